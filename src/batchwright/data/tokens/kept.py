"""Which token stores are kept, how large they are, and removing them."""

import contextlib
import fcntl
import functools
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from batchwright.data.tokens.store import STORE
from batchwright.errors import BatchwrightError, CannotWrite, ConfigError
from batchwright.files import home
from batchwright.sealed import MANIFEST

__all__ = ["Kept", "StoreLock", "kept_stores", "prune", "stores_folder"]

ELSEWHERE = "set BATCHWRIGHT_TOKENS to a folder that can be written to and has space"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Kept:
    """A token store in the folder of them; `key` is its name there."""

    key: str
    source: str
    tokenizer: str
    samples: int
    tokens: int
    size_bytes: int
    freed_bytes: int
    """What removing it frees: nothing while a run shares its files."""
    used: float
    """When it was last opened by a build or a run, in seconds since 1970."""
    state: str
    """finished, building (by a process now), unfinished (a build can resume it), or damaged."""


def stores_folder() -> Path:
    """Where token stores are kept: `BATCHWRIGHT_TOKENS`, else `tokens` in the home folder.

    The home folder is `BATCHWRIGHT_HOME`, by default `~/.cache/batchwright`. Where nobody chose it
    and it cannot be written to, as in a hardened container, a temporary folder takes its place.
    """
    if own := os.environ.get("BATCHWRIGHT_TOKENS"):
        return Path(own).expanduser().absolute()
    folder = home() / "tokens"
    if os.environ.get("BATCHWRIGHT_HOME") or _can_be_written(folder):
        return folder
    return _temporary(folder)


def _can_be_written(folder: Path) -> bool:
    """Whether a folder that may not exist yet takes files."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


@functools.cache
def _temporary(instead_of: Path) -> Path:
    """A temporary folder of this user alone, said once."""
    try:
        folder = Path(tempfile.gettempdir(), f"batchwright-{os.getuid()}")
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise CannotWrite(
            f"cannot keep tokens in {instead_of} nor in a temporary folder: {error.strerror}; "
            f"{ELSEWHERE}"
        ) from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise CannotWrite(f"{folder} is not a folder of this user alone; {ELSEWHERE}")
    log.warning("cannot keep tokens in %s; they are kept in %s/tokens", instead_of, folder)
    return folder / "tokens"


def kept_stores() -> list[Kept]:
    """Every token store, the one used last first."""
    folder = stores_folder()
    while folder.is_dir():
        try:
            found = [_kept(path) for path in folder.iterdir() if path.is_dir()]
        except FileNotFoundError:
            # A build has ended, or somebody prunes; what it became is in the next list.
            continue
        return sorted(found, key=lambda store: store.used, reverse=True)
    return []


def prune(
    keys: Sequence[str] = (),
    *,
    older_than_s: float | None = None,
    max_bytes: int | None = None,
    dry_run: bool = False,
) -> list[Kept]:
    """Remove the named stores, those not used for so long, and the oldest above a size in all.

    Runs keep working: they share the files of their store, which go when the last one does. What
    a process is building stays: to name it is an error.
    """
    if not keys and older_than_s is None and max_bytes is None:
        raise ConfigError(
            "nothing says which token stores to remove; name their keys, or give --older-than "
            "or --max-size"
        )
    stores = kept_stores()
    chosen = []
    for key in keys:
        matching = [store for store in stores if store.key.startswith(key)]
        if len(matching) != 1:
            raise ConfigError(
                f"{len(matching)} token stores have a key that begins with {key!r}; "
                f"`batchwright data tokens ls` shows them"
            )
        if matching[0].state == "building":
            raise ConfigError(
                f"another process is building the token store {matching[0].key}; wait for it, or "
                f"stop it first"
            )
        chosen += matching
    stores = [store for store in stores if store.state != "building"]
    if older_than_s is not None:
        before = time.time() - older_than_s
        chosen += [store for store in stores if store.used < before and store not in chosen]
    if max_bytes is not None:
        left = [store for store in stores if store not in chosen]
        while left and sum(store.size_bytes for store in left) > max_bytes:
            chosen.append(left.pop())
    if not dry_run:
        for store in chosen:
            with contextlib.suppress(BlockingIOError), StoreLock(_made(store.key), wait=False):
                # Unless a build has begun, or has taken it over, since they were listed.
                shutil.rmtree(stores_folder() / store.key, ignore_errors=True)
        chosen = [store for store in chosen if not (stores_folder() / store.key).exists()]
    return chosen


class StoreLock:
    """Held by the one process that makes a store; the system releases that of a killed one."""

    def __init__(self, path: Path, *, wait: bool = True) -> None:
        self._path = path.with_name(f"{path.name}.lock")
        self._wait = wait

    def exists(self) -> bool:
        """Whether a process holds it, or one that was killed has left it."""
        return self._path.exists()

    def __enter__(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            while True:
                self._file = self._path.open("w")
                self._lock()
                # Whoever held it before may have removed it.
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(self._file.fileno()), self._path.stat()):
                        return
                self._file.close()
        except BlockingIOError:
            raise
        except OSError as error:
            raise CannotWrite(
                f"cannot keep tokens in {self._path.parent}: {error.strerror}; {ELSEWHERE}"
            ) from None

    def __exit__(self, *_: object) -> None:
        self._path.unlink(missing_ok=True)
        self._file.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not self._wait:
                self._file.close()
                raise
            log.warning("another process is tokenising this data; waiting for it")
            fcntl.flock(self._file, fcntl.LOCK_EX)


def _made(key: str) -> Path:
    """The store that a folder becomes when it is finished."""
    name = key.removesuffix(".partial").rpartition("-")[2]
    return stores_folder() / (name.split(".")[1] if name.startswith(".") else name)


def _is_building(key: str) -> bool:
    path = _made(key)
    try:
        with path.with_name(f"{path.name}.lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        # There is no lock, or no lock that can be read.
        return False
    return False


def _kept(path: Path) -> Kept:
    files = [file.stat() for file in path.iterdir() if file.is_file()]
    source = tokenizer = "?"
    samples = tokens = 0
    state = "unfinished" if path.name.endswith(".partial") or path.name.startswith(".") else ""
    if _is_building(path.name):
        state = "building"
    if not state:
        try:
            fields = STORE.read(path)
            source, tokenizer = fields["source"], fields["tokenizer"]
            samples = fields["files"]["offsets"]["shape"][0] - 1
            tokens = fields["files"]["tokens"]["shape"][0]
            state = "finished"
        except (BatchwrightError, KeyError, TypeError):
            state = "damaged"
    used = path / MANIFEST
    return Kept(
        key=path.name,
        source=source,
        tokenizer=tokenizer,
        samples=samples,
        tokens=tokens,
        size_bytes=sum(file.st_size for file in files),
        freed_bytes=sum(file.st_size for file in files if file.st_nlink == 1),
        used=(used if used.is_file() else path).stat().st_mtime,
        state=state,
    )
