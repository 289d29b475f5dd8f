"""An append-only record of the rows done, so that a killed build loses only what was in flight.

A header line, then one line for each chunk, each with a checksum of its own. A process killed
while writing leaves a torn last line; opening the journal drops it, and anything after the
first line that is not whole.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from batchwright.errors import CannotWrite
from batchwright.files import write_all

__all__ = ["Journal", "Record"]

OURS = b'{"format": "batchwright.'
"""How the first line of any journal begins."""

Record = tuple[Any, ...]
"""Columns of one chunk: sample ids, lengths, content hashes, and what else its writer needs."""


class Journal:
    """The records of one unfinished output, made with one tokenizer, locked while it is open.

    A journal of another format or tokenizer is overwritten.
    """

    def __init__(self, path: Path, format: str, tokenizer_hash: str) -> None:
        self.path = path
        header = {"format": format, "version": 1, "tokenizer_hash": tokenizer_hash}
        self._header = json.dumps(header).encode() + b"\n"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Nobody named this file: a link there is not followed, and a FIFO not waited for.
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            self._file = os.fdopen(os.open(path, flags, 0o666), "r+b", buffering=0)
        except OSError as error:
            raise CannotWrite(f"cannot write {path}: {error.strerror or error}") from None
        try:
            head = os.pread(self._file.fileno(), 4096, 0).partition(b"\n")[0]
            if not head.startswith(OURS) and not OURS.startswith(head):
                raise CannotWrite(
                    f"{path} was not written by this command, so it is not replaced; move it away "
                    f"or name another output"
                )
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            if isinstance(error, CannotWrite):
                raise
            if isinstance(error, BlockingIOError):
                raise CannotWrite(
                    f"another process is writing {path}; wait for it or name another output"
                ) from None
            raise CannotWrite(f"cannot write {path}: {error.strerror}") from None

    def replay(self, intact: Callable[[Record], bool] = lambda _: True) -> Iterator[Record]:
        """Every record up to the first that is torn or not `intact`; the rest is cut off.

        Exhaust it before the first `append`.
        """
        self._file.seek(0)
        good = 0
        with open(self._file.fileno(), "rb", closefd=False) as reader:
            if reader.readline() == self._header:
                good = len(self._header)
                for line in reader:
                    record = _parse(line)
                    if record is None or not intact(record):
                        break
                    good += len(line)
                    yield record
        self._cut(good)

    def restart(self) -> None:
        """Drop every record."""
        self._cut(0)

    def append(self, ids: list[str], *columns: Any) -> None:
        """Add a record, handed to the operating system before this returns."""
        if ids:
            body = json.dumps([ids, *columns], separators=(",", ":"))
            self._write(_line(body.encode()))

    @property
    def is_empty(self) -> bool:
        """Whether it holds no record."""
        return os.fstat(self._file.fileno()).st_size <= len(self._header)

    def close(self) -> None:
        """Keep the journal for a later run, unless it is empty."""
        if self.is_empty:
            self.path.unlink(missing_ok=True)
        self._file.close()

    def remove(self) -> None:
        """Delete the journal: the output is finished."""
        self.path.unlink(missing_ok=True)
        self._file.close()

    def _cut(self, size: int) -> None:
        self._file.truncate(size)
        self._file.seek(size)
        if not size:
            self._write(self._header)

    def _write(self, raw: bytes) -> None:
        try:
            write_all(self._file.fileno(), raw)
        except OSError as error:
            raise CannotWrite(
                f"cannot write {self.path}: {error.strerror}; free space and run again: "
                f"it resumes from here"
            ) from None


def _line(body: bytes) -> bytes:
    sum = hashlib.sha256(body).hexdigest()[:16].encode()
    return b'{"sum":"' + sum + b'","entries":' + body + b"}\n"


def _parse(line: bytes) -> Record | None:
    body = line[len(b'{"sum":"0123456789abcdef","entries":') : -len(b"}\n")]
    return tuple(json.loads(body)) if line == _line(body) else None
