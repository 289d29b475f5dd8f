"""Files that are either whole or not there."""

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from batchwright.errors import BatchwrightError, CannotWrite, ConfigError, MissingFile

__all__ = [
    "atomic_folder",
    "check_apart",
    "check_output",
    "check_replaceable",
    "existing",
    "fsync_folder",
    "home",
    "link_or_copy",
    "remove_leftovers",
    "write_atomic",
    "writing",
]


def home() -> Path:
    """The folder of everything that can be downloaded or made again.

    `BATCHWRIGHT_HOME`, else a folder in `XDG_CACHE_HOME`, else `~/.cache/batchwright`.
    """
    if own := os.environ.get("BATCHWRIGHT_HOME"):
        return Path(own).expanduser().absolute()
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification says to ignore a relative path.
    return (cache if cache.is_absolute() else Path.home() / ".cache") / "batchwright"


def link_or_copy(file: Path, to: Path) -> None:
    """Another name for a file that nobody changes; a copy where that cannot be."""
    try:
        os.link(file, to)
    except OSError:
        # Another disk, or one without hard links.
        shutil.copyfile(file, to)


def write_atomic(path: Path, content: bytes) -> None:
    """Write `content` so that a reader sees the old file or the new one, never a part.

    A temporary name in the same folder, fsync, rename, fsync of the folder. When anything
    fails, the temporary file is removed and `CannotWrite` says why.
    """
    with writing(path) as temporary:
        temporary.write_bytes(content)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[Path]:
    """A temporary path that becomes `path` when the block ends well."""
    temporary: Path | None = None
    handle = -1
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        temporary = Path(name)
        # Held until the end, also that of a killed process: `remove_leftovers` asks for it, and
        # removes nothing where a file system has no locks.
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield temporary
        _settle(temporary)
        temporary.replace(path)
        fsync_folder(path.parent)
    except BatchwrightError:
        raise
    except OSError as error:
        raise _refused(path, error) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
            os.close(handle)


def remove_leftovers(path: Path) -> None:
    """Remove the temporary files that killed writers of `path` left beside it."""
    mine = re.compile(re.escape(f".{path.name}.") + r"[a-z0-9_]{8}")
    for left in path.parent.iterdir():
        if mine.fullmatch(left.name):
            # One that is gone or locked belongs to a writer at work.
            with contextlib.suppress(OSError), left.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_folder(path: Path, marker: str, says: str = "") -> Iterator[Path]:
    """A temporary folder that becomes `path` when the block ends well.

    An existing folder is replaced only if it is empty or holds `marker`, a file with the words
    `says` in it by which we know it as ours: a mistyped output path must not delete
    somebody's data.
    """
    check_replaceable(path, marker, says)
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        yield temporary
        temporary.chmod(0o755)
        for child in sorted(temporary.rglob("*")):
            if child.is_file():
                _settle(child)
            else:
                fsync_folder(child)
        fsync_folder(temporary)
        # rename() cannot replace a folder that holds files, so the old one steps aside first;
        # after a crash between the two renames it still stands under its hidden name.
        aside = Path(f"{temporary}.old")
        if path.exists():
            path.rename(aside)
        try:
            temporary.rename(path)
        except OSError:
            if aside.exists():
                aside.rename(path)
            raise
        fsync_folder(path.parent)
        shutil.rmtree(aside, ignore_errors=True)
    except BatchwrightError:
        raise
    except OSError as error:
        raise _refused(path, error) from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def check_replaceable(path: Path, marker: str, says: str = "") -> None:
    """Refuse now what `atomic_folder` would refuse, before work is done for nothing."""
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{path} is a file, not a folder; choose another path")
    if path.is_dir() and any(path.iterdir()) and not _says(path / marker, says):
        raise ConfigError(
            f"{path} is not empty and has no {marker} of the same kind, so it is not overwritten; "
            f"choose another folder or empty it"
        )


HEAD_BYTES = 64 * 2**10
"""So much of a file is read to recognise it."""


def check_output(
    path: Path, ours: re.Pattern[bytes], *, inputs: Iterable[Path] = (), force: bool = False
) -> None:
    """Refuse to replace a file that this package did not write, before work is done for nothing.

    A file is ours if its first bytes match `ours`, whatever its name, or if it is empty; `force`
    allows any regular file. One of the `inputs` is refused in any case. Opens nothing for writing.
    """
    check_apart(path, inputs)
    try:
        if not path.exists():
            return
        if path.is_dir():
            raise ConfigError(f"{path} is a folder; choose the path of a file")
        if not path.is_file():
            raise ConfigError(f"{path} is not a regular file; choose another path")
        if force:
            return
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError as error:
        raise CannotWrite(
            f"cannot read what is at {path}: {error.strerror}; choose another path"
        ) from error
    if head and not ours.match(head):
        raise ConfigError(
            f"{path} was not written by this command, so it is not replaced; "
            f"choose another path, or replace it with --force"
        )


def check_apart(path: Path, inputs: Iterable[Path], what: str = "output") -> None:
    """Refuse an output that is one of the inputs: by another spelling, a symbolic or a hard link.

    >>> check_apart(Path("a/../b"), [Path("b")])
    Traceback (most recent call last):
    batchwright.errors.ConfigError: the output a/../b is the input b; choose another output
    """
    for one in inputs:
        same = os.path.realpath(path) == os.path.realpath(one)
        with contextlib.suppress(OSError):
            same = same or path.samefile(one)
        if same:
            raise ConfigError(f"the {what} {path} is the input {one}; choose another {what}")


def existing(path: Path, what: str) -> Path:
    """`path` itself if something is there, else one sentence that says what was looked for."""
    if not path.exists():
        raise MissingFile(f"no {what} at {path}; check the path")
    return path


def fsync_folder(path: Path) -> None:
    """Make the names in a folder durable, not only the bytes of its files."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _says(marker: Path, words: str) -> bool:
    try:
        return words.encode() in marker.read_bytes()
    except OSError:
        return False


def _settle(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
    path.chmod(0o644)


def _refused(path: Path, error: OSError) -> CannotWrite:
    reason = error.strerror or str(error)
    return CannotWrite(
        f"cannot write {path}: {reason}; nothing was changed, "
        f"free space or choose another path and run again"
    )
