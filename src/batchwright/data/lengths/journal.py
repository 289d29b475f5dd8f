"""Lengths as they are measured, so that a killed build loses only what was under way.

A header line, then one line for each chunk, each with a checksum of its own. A process killed
while writing leaves a torn last line; opening the journal drops it, and anything behind the
first line that is not whole.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from batchwright.errors import CannotWrite

__all__ = ["Journal"]

Chunk = tuple[list[str], list[int], list[int]]
"""Sample ids, lengths and content hashes."""


class Journal:
    """An append-only file of measured entries for one tokenizer.

    One of another tokenizer, or of another kind altogether, is begun anew.
    """

    def __init__(self, path: Path, tokenizer_hash: str) -> None:
        self.path = path
        start = {"format": "batchwright.lengths.partial", "version": 1, "tokenizer_hash": ""}
        self._header = json.dumps({**start, "tokenizer_hash": tokenizer_hash}).encode() + b"\n"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b", buffering=0)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise CannotWrite(
                f"another process is writing {path}; wait for it or name another output"
            ) from None
        except OSError as error:
            raise CannotWrite(f"cannot write {path}: {error.strerror}") from None

    def replay(self) -> Iterator[Chunk]:
        """Every whole chunk from the beginning; what follows the last is cut off.

        Run it to its end before the first `append`.
        """
        self._file.seek(0)
        good = 0
        with os.fdopen(os.dup(self._file.fileno()), "rb") as reader:
            if reader.readline() == self._header:
                good = len(self._header)
                for line in reader:
                    chunk = _parse(line)
                    if chunk is None:
                        break
                    good += len(line)
                    yield chunk
        self._cut(good)

    def restart(self) -> None:
        """Forget everything in the journal."""
        self._cut(0)

    def append(self, ids: Sequence[str], lengths: Sequence[int], content: Sequence[int]) -> None:
        """One more chunk, handed to the system before this returns."""
        if ids:
            body = json.dumps([list(ids), list(lengths), list(content)], separators=(",", ":"))
            self._write(_line(body.encode()))

    def close(self) -> None:
        """Keep the journal for a later run, unless nothing was measured."""
        if os.fstat(self._file.fileno()).st_size <= len(self._header):
            self.path.unlink(missing_ok=True)
        self._file.close()

    def remove(self) -> None:
        """The cache is finished: the journal is not needed any more."""
        self.path.unlink(missing_ok=True)
        self._file.close()

    def _cut(self, size: int) -> None:
        self._file.truncate(size)
        self._file.seek(size)
        if not size:
            self._write(self._header)

    def _write(self, raw: bytes) -> None:
        view = memoryview(raw)
        try:
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            raise CannotWrite(
                f"cannot write {self.path}: {error.strerror}; free space and run again: "
                f"what was measured is kept"
            ) from None


def _line(body: bytes) -> bytes:
    sum = hashlib.sha256(body).hexdigest()[:16].encode()
    return b'{"sum":"' + sum + b'","entries":' + body + b"}\n"


def _parse(line: bytes) -> Chunk | None:
    body = line[len(b'{"sum":"0123456789abcdef","entries":') : -len(b"}\n")]
    if line != _line(body):
        return None
    ids, lengths, content = json.loads(body)
    return ids, lengths, content
