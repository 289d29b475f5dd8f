"""JSON lines, plain or compressed, indexed by one byte offset a row."""

import hashlib
import itertools
import json
import os
import sys
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.data.rows import Row
from batchwright.data.rows.elsewhere import FarFile, NotTheSame
from batchwright.errors import BadFile, BadRow, CannotWrite, one_line
from batchwright.files import cannot_read, line_limit, too_long
from batchwright.fingerprint import digest

__all__ = ["GZIP", "ZSTD", "JsonlSource", "no_room", "spooled"]

BLOCK = 1 << 24
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
DEEPEST = 200
"""Lists and objects of a row may stand in so many others: what reads rows has a limited stack."""
BLANK = np.frombuffer(b" \t\r\n\v\f", np.uint8)


class JsonlSource:
    """One JSON object a line; `compression` is None, "gzip" or "zstd".

    Blank lines are not rows, but count as lines; a row has `line_limit` bytes at most, with the
    blank lines after it. A compressed file is decompressed into an unnamed temporary file, which
    is gone with the process; `spool` is such a file with what a pipe at `path` held.
    """

    def __init__(self, path: Path, compression: str | None, spool: int | None = None) -> None:
        self.path = path
        self._is_pipe = spool is not None
        self.name = path.name
        # Rows are read by offset instead of mapped: a file that shrinks meanwhile must be an
        # error, and a mapped one would kill the process.
        self._compression = compression
        plain = os.open(path, os.O_RDONLY) if spool is None else spool
        self._handle = plain if compression is None else _decompressed(plain, path, compression)
        # A source is a view that nobody closes, so its file is closed with it.
        weakref.finalize(self, os.close, self._handle)
        self._starts, self._lines = _index(self._handle, path)
        if len(self) == 0:
            raise BadFile(f"{path} has no rows; check the path")

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, item: int) -> Row:
        if not 0 <= item < len(self):
            raise IndexError(f"{self.name} has no row {item}, it has {len(self):,}")
        ((_, row),) = self.chunk(item, item + 1).rows()
        if isinstance(row, BadRow):
            raise BadRow(f"{self.where(item)}: {row}")
        return row

    def where(self, item: int) -> str:
        return f"{self.name}:{item + 1 if self._lines is None else self._lines[item]}"

    def chunk(self, start: int, stop: int) -> "_Lines":
        ends = self._starts[start : stop + 1]
        raw = _pread(self._handle, int(ends[-1] - ends[0]), int(ends[0]))
        if len(raw) != ends[-1] - ends[0]:
            raise BadFile(f"{self.path} became shorter while it was read; run again")
        return _Lines(start, raw, (ends - ends[0]).tolist())

    def far_chunk(self, start: int, stop: int) -> "_FarLines | None":
        """These rows as a chunk that is read where it is used; None for a pipe or compressed."""
        if self._is_pipe or self._compression is not None:
            return None
        ends = self._starts[start : stop + 1]
        return _FarLines(self._far, start, int(ends[0]), (ends - ends[0]).tolist())

    @cached_property
    def _far(self) -> FarFile:
        return FarFile.of(self.path, os.fstat(self._handle))

    def size_of(self, start: int, stop: int) -> int:
        return int(self._starts[stop] - self._starts[start])

    @cached_property
    def fingerprint(self) -> str:
        return digest("jsonl", _file_digest(self._handle))[:16]

    def __reduce__(self) -> tuple[Any, ...]:
        # By path, not by content: the unnamed file cannot be passed on.
        if self._is_pipe:
            raise BadFile(f"{self.path} is a pipe, which only one process can read; give a file")
        return (JsonlSource, (self.path, self._compression))


@dataclass(frozen=True, slots=True)
class _Lines:
    first: int
    raw: bytes
    ends: list[int]

    def rows(self) -> Iterator[tuple[int, Row | BadRow]]:
        for number, (start, end) in enumerate(itertools.pairwise(self.ends), self.first):
            yield number, _parse(self.raw[start:end])


@dataclass(frozen=True, slots=True)
class _FarLines:
    file: FarFile
    first: int
    start: int
    ends: list[int]

    def rows(self) -> Iterator[tuple[int, Row | BadRow]]:
        with self.file.here().open("rb") as file:
            raw = _pread(file.fileno(), self.ends[-1], self.start)
        # Once more: what was read is of the version that is asked for.
        self.file.here()
        if len(raw) != self.ends[-1]:
            raise NotTheSame(f"{self.file.place} is shorter there")
        return _Lines(self.first, raw, self.ends).rows()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, of which Python would keep the last of several values."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise BadRow(f"has the key {json.dumps(twice)} more than once in one object; keep one")
    return made


# What `json.loads` calls, without what it does before and after for every row.
_decode = json.JSONDecoder(object_pairs_hook=_object).raw_decode


def _parse(line: bytes) -> Row | BadRow:
    try:
        text = line.rstrip().decode()
        row, end = _decode(text)
        if end == len(text) and isinstance(row, dict):
            return _too_deep(row, line) or row
    except BadRow as error:
        return error
    except (ValueError, RecursionError):
        pass
    # It begins with white space, or is bad.
    return _parsed(line)


def _parsed(line: bytes) -> Row | BadRow:
    try:
        row = json.loads(line.rstrip().decode(), object_pairs_hook=_object)
    except BadRow as error:
        return error
    except UnicodeDecodeError as error:
        return BadRow(f"not UTF-8: byte 0x{line[error.start]:02x} at column {error.start + 1}")
    except json.JSONDecodeError as error:
        what = one_line(error.msg).removesuffix(" starting at")
        return BadRow(f"not JSON: {what} at column {error.colno}")
    except RecursionError:
        return BadRow("not JSON that can be read: it is nested too deeply")
    except ValueError:
        # All else that Python's reader refuses.
        most = sys.get_int_max_str_digits()
        return BadRow(f"not JSON that can be read: an integer has more than {most:,} digits")
    if not isinstance(row, dict):
        return BadRow(f"is a JSON {type(row).__name__}, not an object")
    return _too_deep(row, line) or row


def _too_deep(row: Row, line: bytes) -> BadRow | None:
    """Why a row cannot be read whose lists and objects stand in too many others."""
    if line.count(b"[") + line.count(b"{") <= DEEPEST:
        return None
    level: list[Any] = [row]
    for _ in range(DEEPEST):
        inner = (one.values() if isinstance(one, dict) else one for one in level)
        level = [x for one in inner for x in one if isinstance(x, dict | list)]
        if not level:
            return None
    return BadRow(f"is nested too deeply: more than {DEEPEST} lists and objects in one another")


def _index(handle: int, path: Path) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """The offset of each row, then of the end, and its line number if there are blank lines."""
    limit = line_limit()
    size = os.fstat(handle).st_size
    head = os.pread(handle, 4096, 0)
    _refuse_foreign(head, path)
    byte_order_mark = 3 if head.startswith(b"\xef\xbb\xbf") else 0
    begins = [np.array([byte_order_mark])]
    numbers: list[range | NDArray[np.int64]] = [range(1, 2)]
    number = 1
    for start in range(0, size, BLOCK):
        block = np.frombuffer(os.pread(handle, BLOCK, start), np.uint8)
        breaks = block == 10
        count = int(np.count_nonzero(breaks))
        # Lines of nothing are left out at once: gigabytes of them take no memory.
        last = breaks.copy()
        last[:-1] &= ~breaks[1:]
        found = np.flatnonzero(last)
        begins.append(found + (start + 1))
        if len(found) == count:
            numbers.append(range(number + 1, number + 1 + count))
        else:
            numbers.append(np.cumsum(breaks, dtype=np.int32)[found] + np.int64(number))
        number += count
    starts = np.concatenate([*begins, [size]])
    if starts[-2] == size:  # the file ends with a newline, so no line begins there
        starts = starts[:-1]
    # A row begins with a brace; only lines that begin with white space can be blank.
    sizes, firsts = np.diff(starts), _first_bytes(handle, starts[:-1], size)
    blank = firsts == 10
    for line in np.flatnonzero(np.isin(firsts, BLANK) & ~blank & (sizes <= limit)):
        blank[line] = not os.pread(handle, int(sizes[line]), int(starts[line])).strip()
    lines = None
    if blank.any() or not all(isinstance(some, range) for some in numbers):
        lines = np.concatenate(
            [np.arange(s.start, s.stop) if isinstance(s, range) else s for s in numbers]
        )
        lines = lines[: len(blank)][~blank]
        # Blank lines belong to the row before them: JSON allows white space at the end. Those
        # before the first row belong to none.
        starts = np.append(starts[:-1][~blank], size)
    if (long := np.flatnonzero(np.diff(starts) > limit)).size:
        first = int(long[0])
        raise too_long(path, first + 1 if lines is None else int(lines[first]), limit)
    return starts, lines


def _first_bytes(handle: int, starts: NDArray[np.int64], size: int) -> NDArray[np.uint8]:
    firsts = np.empty(len(starts), np.uint8)
    for at in range(0, size, BLOCK):
        a, b = np.searchsorted(starts, [at, at + BLOCK])
        if a < b:
            block = np.frombuffer(os.pread(handle, BLOCK, at), np.uint8)
            firsts[a:b] = block[starts[a:b] - at]
    return firsts


def _refuse_foreign(head: bytes, path: Path) -> None:
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise BadFile(f"{path} is UTF-16; save it as UTF-8")
    if b"\0" in head:
        raise BadFile(f"{path} is a binary file; give JSONL, gzip or zstd JSONL, or Parquet")
    if head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        raise BadFile(
            f"{path} is one JSON array; write one object a line, as in: "
            f"jq -c '.[]' {path} > rows.jsonl"
        )
    if path.suffix.lower() in (".csv", ".tsv"):
        raise BadFile(
            f"{path} is a table of text; give JSONL, gzip or zstd JSONL, or Parquet, as pandas "
            f"and datasets write them"
        )


def _pread(handle: int, size: int, at: int) -> bytes:
    """`size` bytes, or as many as there are; one call of the system reads less than 2 GiB."""
    if size <= BLOCK:
        return os.pread(handle, size, at)
    parts = []
    while size and (part := os.pread(handle, min(size, 1 << 30), at)):
        parts.append(part)
        size, at = size - len(part), at + len(part)
    return b"".join(parts)


def _of_short_lines(blocks: Iterable[bytes], path: Path) -> Iterator[bytes]:
    """The same blocks, up to one in which a line becomes too long: a bomb is not unpacked."""
    limit, number, size = line_limit(), 1, 0
    for block in blocks:
        last = block.rfind(b"\n")
        number += block.count(b"\n")
        size = size + len(block) if last < 0 else len(block) - last - 1
        if size > limit:
            raise too_long(path, number, limit)
        yield block


def spooled(path: Path) -> int:
    """What a pipe holds, as an open unnamed file: rows are read more than once."""
    try:
        with tempfile.TemporaryFile() as file, path.open("rb") as pipe:
            first = pipe.read(BLOCK)
            blocks = itertools.chain([first], iter(lambda: pipe.read(BLOCK), b""))
            # What is compressed has no lines yet.
            packed = first.startswith((GZIP, ZSTD))
            file.writelines(blocks if packed else _of_short_lines(blocks, path))
            file.flush()
            file.seek(0)
            return os.dup(file.fileno())
    except OSError as error:
        raise no_room(path, error) from None


def _decompressed(handle: int, path: Path, compression: str) -> int:
    """The content of a compressed file as an open unnamed file; closes the `handle` of it."""
    import pyarrow

    try:
        with (
            tempfile.TemporaryFile() as file,
            os.fdopen(handle, "rb") as opened,
            pyarrow.PythonFile(opened, mode="r") as compressed,
        ):
            stream = pyarrow.CompressedInputStream(compressed, compression)
            blocks = iter(lambda: _read(stream, path, compression), b"")
            file.writelines(_of_short_lines(blocks, path))
            file.flush()
            return os.dup(file.fileno())
    except OSError as error:
        raise no_room(path, error) from None


def no_room(path: Path, error: OSError) -> CannotWrite:
    """What to raise where the unpacked rows of `path` cannot be written."""
    return CannotWrite(
        f"cannot copy {path} into {tempfile.gettempdir()}: {error.strerror or error}; "
        f"free space or set TMPDIR to a larger disk"
    )


def _read(stream: Any, path: Path, compression: str) -> bytes:
    try:
        return bytes(stream.read(BLOCK))
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno:
            raise cannot_read(path, error) from error
        raise BadFile(
            f"{path} is truncated or damaged {compression}: {one_line(error)}; get it again"
        ) from None


def _file_digest(handle: int) -> str:
    hasher = hashlib.sha256()
    at = 0
    while block := os.pread(handle, BLOCK, at):
        hasher.update(block)
        at += len(block)
    return hasher.hexdigest()
