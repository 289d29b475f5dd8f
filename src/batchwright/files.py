"""Files and folders that are either whole or not there.

Every output is made under a hidden name beside it, `.NAME.1a2b3c4d.unfinished`, made durable and
renamed once: at every instant its place holds the old version or the new one. The hidden name is
locked while its writer lives, so what a killed one left is known, and the next process that writes
into the same folder removes it.
"""

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

from batchwright.errors import (
    BadFile,
    BatchwrightError,
    CannotRead,
    CannotWrite,
    ConfigError,
    MissingFile,
)

__all__ = [
    "append_to",
    "atomic_folder",
    "cannot_read",
    "check_apart",
    "check_output",
    "check_replaceable",
    "existing",
    "fsync_folder",
    "home",
    "line_limit",
    "link_or_copy",
    "open_regular",
    "parse_json",
    "parse_toml",
    "read_regular",
    "read_regular_text",
    "regular_handle",
    "remove_folder",
    "remove_leftovers",
    "short_lines",
    "too_long",
    "write_all",
    "write_atomic",
    "writing",
]

LEFT = re.compile(r"\.(.+)\.[0-9a-f]{8}\.(unfinished|replaced)")
NAME_BYTES = 200
"""So much of an output's name is in its hidden one: file systems allow 255 bytes."""


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


def parse_json(raw: bytes | str) -> Any:
    """JSON of unknown origin; whatever is wrong with it, also its depth, is a `ValueError`."""
    try:
        return json.loads(raw)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_toml(text: str) -> dict[str, Any]:
    """TOML of unknown origin; whatever is wrong with it, also its depth, is a `ValueError`."""
    import tomllib

    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


LINE_BYTES = 256 * 2**20
"""The most that a line of a data file has, unless `BATCHWRIGHT_MAX_LINE` says otherwise."""


def line_limit() -> int:
    """How many bytes of a data file are read as one line at most."""
    given = os.environ.get("BATCHWRIGHT_MAX_LINE") or str(LINE_BYTES)
    if not re.fullmatch(r"[0-9]{1,15}", given) or not int(given):
        raise ConfigError(
            f"BATCHWRIGHT_MAX_LINE is {given!r}; give the most bytes of a line, as in {LINE_BYTES}"
        )
    return int(given)


def short_lines(file: IO[bytes], path: Path) -> Iterator[bytes]:
    """The lines of an open file, up to one that has more than `line_limit` bytes."""
    limit = line_limit()
    for number, line in enumerate(iter(lambda: file.readline(limit + 1), b""), start=1):
        if len(line) > limit:
            raise too_long(path, number, limit)
        yield line


def too_long(path: Path, line: int, limit: int) -> BadFile:
    """What is said of a line that has more bytes than `line_limit`."""
    return BadFile(
        f"{path}, line {line}: this row has more than {limit:,} bytes; "
        f"split it, or set BATCHWRIGHT_MAX_LINE to more"
    )


def open_regular(path: Path) -> BufferedReader:
    """Open a file that is read back, as `regular_handle` does."""
    return os.fdopen(regular_handle(path)[0], "rb")


def regular_handle(path: Path) -> tuple[int, int]:
    """A descriptor of a file that is read back, and its size.

    Nothing but a regular file is opened: a FIFO would be waited for. What the system refuses is
    `CannotRead`, so that nobody takes it for damage; a file that is not there is
    `FileNotFoundError`.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ENODEV):
            raise _not_regular(path) from None  # a socket, or a device without a driver
        raise cannot_read(path, error) from error
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode):
        os.close(handle)
        raise _not_regular(path)
    return handle, found.st_size


def read_regular(path: Path, most: int = -1) -> bytes:
    """The bytes of a file that is read back, or the first `most` of them; see `open_regular`."""
    with open_regular(path) as file:
        try:
            return file.read(most)
        except OSError as error:
            raise cannot_read(path, error) from error


def read_regular_text(path: Path, encoding: str = "utf-8") -> str:
    """The text of a file that is read back, with the line breaks of any system as one."""
    text = read_regular(path).decode(encoding)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def cannot_read(path: Path, error: OSError) -> CannotRead:
    """What is said of a file that the system does not give: it is no word about its content."""
    return CannotRead(
        f"cannot read {path}: {error.strerror or error}; the file itself may be whole: "
        f"remove the cause and run again"
    )


def _not_regular(path: Path) -> BadFile:
    what = "a folder" if path.is_dir() else "not a regular file"
    return BadFile(f"{path} is {what}; give a file")


def write_all(handle: int, raw: bytes) -> None:
    """Hand all of `raw` to the system, which may take only a part at once."""
    view = memoryview(raw)
    while view:
        view = view[os.write(handle, view) :]


def append_to(path: Path) -> int:
    """A file opened to be read and appended to, made if it is not there; nothing but a file is."""
    handle = os.open(
        path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC, 0o666
    )
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return handle


def write_atomic(path: Path, content: bytes) -> None:
    """Write `content` so that a reader sees the old file or the new one, never a part.

    When anything fails, the old file stays and `CannotWrite` says why.
    """
    with writing(path) as temporary:
        temporary.write_bytes(content)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[Path]:
    """A temporary path that becomes `path` when the block ends well.

    A symbolic link stays one: what it points to is replaced. A device, a FIFO or a folder is
    refused. The permissions are those of the file that is replaced, else what the umask allows.
    """
    with _made(path, _new_file, Path.unlink) as (temporary, target, there):
        if there is not None and not stat.S_ISREG(there):
            what = "a folder" if stat.S_ISDIR(there) else "not a regular file"
            raise CannotWrite(f"cannot write {path}: it is {what}; choose another path")
        mode = temporary.stat().st_mode if there is None else there
        yield temporary
        _settle(temporary, mode)
        temporary.replace(target)
        fsync_folder(target.parent)


@contextlib.contextmanager
def atomic_folder(path: Path, marker: str, says: str = "") -> Iterator[Path]:
    """A temporary folder that becomes `path` when the block ends well.

    An existing folder is replaced only if it is empty or holds `marker`, a file with the words
    `says` in it by which we know it as ours: a mistyped output path must not delete
    somebody's data.
    """
    check_replaceable(path, marker, says)
    with _made(path, _new_folder, shutil.rmtree) as (temporary, target, there):
        yield temporary
        mode = temporary.stat().st_mode if there is None else there
        for child in sorted(temporary.rglob("*")):
            if child.is_file():
                # Libraries make files that only their owner reads; a linked one is another's too.
                _settle(child, mode & 0o666 if child.stat().st_nlink == 1 else None)
            else:
                fsync_folder(child)
        temporary.chmod(stat.S_IMODE(mode))
        fsync_folder(temporary)
        _replace_folder(temporary, target)
        fsync_folder(target.parent)


@contextlib.contextmanager
def _made(
    path: Path, make: Callable[[Path], int], remove: Callable[[Path], object]
) -> Iterator[tuple[Path, Path, int | None]]:
    """What `make` makes under a hidden name, locked; where it is to be moved; what is there now.

    `remove` removes what has the hidden name in the end: the new version if the block failed, the
    old one if the two were exchanged.
    """
    handle, temporary = -1, None
    try:
        # Not through a link that goes in circles: that is an error of the system below.
        target = Path(os.path.realpath(path)) if path.is_symlink() else path
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(target.parent)
        mode = None
        with contextlib.suppress(FileNotFoundError):
            mode = target.stat().st_mode
        while temporary is None:
            temporary = _hidden(target, "unfinished")
            handle = make(temporary)
            # Held until the end, also that of a killed process. A file system may have no locks:
            # there nothing is ever removed.
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_EX)
            if not _is_at(handle, temporary):
                # Taken for a leftover in the instant before it was locked.
                os.close(handle)
                handle, temporary = -1, None
        yield temporary, target, mode
    except BatchwrightError:
        raise
    except OSError as error:
        raise _refused(path, error) from error
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                remove(temporary)
        if handle >= 0:
            os.close(handle)


def _new_file(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def _new_folder(path: Path) -> int:
    path.mkdir()
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _hidden(path: Path, state: str) -> Path:
    name = os.fsencode(path.name)[:NAME_BYTES].decode("utf-8", "ignore")
    return path.with_name(f".{name}.{os.urandom(4).hex()}.{state}")


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _replace_folder(new: Path, path: Path) -> None:
    """Put a folder in the place of another in one step."""
    if not path.is_dir() or not any(path.iterdir()):
        new.rename(path)
    elif not _exchange(new, path):
        # rename() cannot replace a folder that holds files, so the old one steps aside first;
        # if nobody comes back from here, `remove_leftovers` puts it in its place again.
        aside = _hidden(path, "replaced")
        path.rename(aside)
        try:
            new.rename(path)
        except OSError:
            aside.rename(path)
            raise
        shutil.rmtree(aside, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Let two folders swap their names in one step; False where the file system cannot."""
    import ctypes

    sys.audit("batchwright.exchange", str(one), str(other))
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    at_fdcwd, rename_exchange = -100, 2
    if not call(at_fdcwd, os.fsencode(one), at_fdcwd, os.fsencode(other), rename_exchange):
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(other))


def remove_folder(path: Path) -> None:
    """Remove a folder as a whole: killed meanwhile, it is gone under its own name all the same."""
    with contextlib.suppress(OSError):
        hidden = _hidden(path, "unfinished")
        path.rename(hidden)
        shutil.rmtree(hidden)


def remove_leftovers(folder: Path) -> None:
    """Remove what killed writers left in a folder under hidden names.

    A folder that had stepped aside for a new one that never came is put back.
    """
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        match = LEFT.fullmatch(name) if name.startswith(".") else None
        if match is None:
            continue
        left = folder / name
        # What is locked belongs to a writer at work, what is gone to another who cleans up.
        with contextlib.suppress(OSError):
            handle = os.open(left, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if match[2] == "replaced" and not (folder / match[1]).exists():
                    left.rename(folder / match[1])
                elif left.is_dir():
                    shutil.rmtree(left)
                else:
                    left.unlink()
            finally:
                os.close(handle)


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
    path: Path,
    ours: re.Pattern[bytes] | Callable[[bytes], bool],
    *,
    inputs: Iterable[Path] = (),
    force: bool = False,
) -> None:
    """Refuse to replace a file that this package did not write, before work is done for nothing.

    A file is ours if its first bytes match `ours`, whatever its name, or if it is empty; where
    `ours` is a function, it judges the whole content. `force` allows any regular file. One of the
    `inputs` is refused in any case. Opens nothing for writing.
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
            content = file.read(HEAD_BYTES if isinstance(ours, re.Pattern) else -1)
    except OSError as error:
        raise CannotWrite(
            f"cannot read what is at {path}: {error.strerror}; choose another path"
        ) from error
    known = ours.match if isinstance(ours, re.Pattern) else ours
    if content and not known(content):
        raise ConfigError(
            f"{path} was not written by this command, so it is not replaced; "
            f"choose another path, or replace it with --force"
        )


def check_apart(
    path: Path, inputs: Iterable[Path], what: str = "output", other: str = "input"
) -> None:
    """Refuse an output that is one of the inputs: by another spelling, a symbolic or a hard link.

    >>> check_apart(Path("a/../b"), [Path("b")])
    Traceback (most recent call last):
    batchwright.errors.ConfigError: the output a/../b is the input b; choose another output
    >>> check_apart(Path("b"), [Path("b")], "cache", "output")
    Traceback (most recent call last):
    batchwright.errors.ConfigError: the cache b is the output b; choose another cache
    """
    for one in inputs:
        same = os.path.realpath(path) == os.path.realpath(one)
        with contextlib.suppress(OSError):
            same = same or path.samefile(one)
        if same:
            raise ConfigError(f"the {what} {path} is the {other} {one}; choose another {what}")


def existing(path: Path, what: str) -> Path:
    """`path` itself if something is there, else one sentence that says what was looked for."""
    try:
        there = path.exists()
    except OSError as error:
        raise cannot_read(path, error) from error
    if not there:
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
        return words.encode() in read_regular(marker)
    except (BadFile, OSError):
        return False


def _settle(path: Path, mode: int | None = None) -> None:
    with path.open("rb") as file:
        if mode is not None:
            os.fchmod(file.fileno(), stat.S_IMODE(mode))
        os.fsync(file.fileno())


def _refused(path: Path, error: OSError) -> CannotWrite:
    reason = error.strerror or str(error)
    return CannotWrite(
        f"cannot write {path}: {reason}; nothing was changed, "
        f"free space or choose another path and run again"
    )
