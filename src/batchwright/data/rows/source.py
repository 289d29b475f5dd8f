"""Rows of JSONL, Parquet or a Hugging Face dataset behind one indexable view.

A file's first bytes, not its name, say what it is: JSONL may be compressed with gzip or zstd.
"""

import bisect
import itertools
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from batchwright.data.rows import Row
from batchwright.data.rows.jsonl import JsonlSource, spooled
from batchwright.data.rows.tables import dataset, hugging_face, parquet
from batchwright.errors import BadRow, ConfigError, MissingFile
from batchwright.fingerprint import digest

__all__ = ["Chunk", "IdsOf", "OnBadRow", "Skipped", "Source", "good_rows", "open_source"]

OnBadRow = Literal["fail", "skip"]
IdsOf = Literal["auto", "ignore", "require"]
"""Ids of rows where they have one, never, or refuse rows without."""
ID_COLUMNS = ("id", "sample_id")
T = TypeVar("T")

FILES = ("*.jsonl", "*.jsonl.gz", "*.jsonl.zst", "*.parquet")
MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}


class Chunk(Protocol):
    """Some rows in a form that is cheap to send to another process, which parses them."""

    def rows(self) -> Iterator[tuple[int, Row | BadRow]]:
        """The number of each row in the source, with the row or why it cannot be read."""
        ...


class Source(Protocol):
    """A data set as a sequence of rows; row `i` of the source is item `i` everywhere else."""

    @property
    def name(self) -> str: ...
    @property
    def fingerprint(self) -> str:
        """A digest of the content, computed on first use."""
        ...

    def __len__(self) -> int: ...
    def __getitem__(self, item: int) -> Row:
        """The row; `BadRow` with its location and the reason if it cannot be read."""
        ...

    def where(self, item: int) -> str:
        """The location of a row as `train.jsonl:17`, lines and rows counted from 1."""
        ...

    def chunk(self, start: int, stop: int) -> Chunk:
        """The rows from `start` up to but not including `stop`."""
        ...


@dataclass(slots=True)
class Skipped:
    """How many bad rows were skipped, and the reasons of the first few."""

    count: int = 0
    reasons: list[str] = field(default_factory=list)

    def add(self, reason: str) -> None:
        self.count += 1
        if len(self.reasons) < 5:
            self.reasons.append(reason)


def open_source(spec: Any, ignore_columns: Sequence[str] = (), ids: IdsOf = "auto") -> Source:
    """Open a file, a folder, several files as one, or a Hugging Face dataset.

    `spec` is a path; a folder of *.jsonl and *.parquet files, taken in the order of their names,
    or one that `save_to_disk` wrote; a list of paths; `hf:NAME` or `hf:NAME:SPLIT` (NAME may be
    a folder); a `datasets.Dataset`; or what this function returned. Only the offsets of the rows
    are held in memory. `ignore_columns` are left out, as if the rows did not have them. `ids`
    says what rows are called: by their `id` or `sample_id` where they have one (auto), all by
    their numbers (ignore), or a row without an id is bad (require).
    """
    if ignore_columns or ids != "auto":
        ignored = frozenset([*ignore_columns, *(ID_COLUMNS if ids == "ignore" else ())])
        return _NarrowSource(open_source(spec), ignored, ids == "require")
    if spec == "":
        raise ConfigError("the name of the data is empty; give a file, a folder or hf:NAME")
    if isinstance(spec, str) and spec.startswith("hf:"):
        return hugging_face(spec.removeprefix("hf:"))
    if isinstance(spec, str | Path):
        return _open_path(Path(spec))
    if isinstance(spec, Sequence):
        if not spec:
            raise ConfigError("got an empty list of data; give at least one path")
        parts = [open_source(part) for part in spec]
        return parts[0] if len(parts) == 1 else _JoinedSource(parts)
    if type(spec).__module__.partition(".")[0] == "datasets":
        return dataset(spec, "the dataset")
    if hasattr(spec, "chunk") and hasattr(spec, "where"):
        opened: Source = spec
        return opened
    raise ConfigError(
        f"data must be a path, a list of paths or a Dataset, got a {type(spec).__name__}"
    )


def good_rows(
    source: Source,
    rows: Iterable[tuple[int, T | BadRow]],
    on_bad_row: OnBadRow,
    skipped: Skipped,
) -> Iterator[tuple[int, T]]:
    """The rows that are not a `BadRow`; a bad one is raised with its location, or counted.

    Rows may be processed already: anything with the row's number that is not a `BadRow` passes.
    """
    for item, row in rows:
        if not isinstance(row, BadRow):
            yield item, row
            continue
        reason = f"{source.where(item)}: {row}"
        if on_bad_row == "fail":
            raise BadRow(reason)
        skipped.add(reason)


def _open_path(path: Path) -> Source:
    try:
        kind = path.stat().st_mode
    except OSError as error:
        reason = "" if isinstance(error, FileNotFoundError) else f" ({error.strerror})"
        raise MissingFile(f"no data at {path}{reason}; check the path") from None
    if stat.S_ISFIFO(kind):
        handle = spooled(path)
        return JsonlSource(path, _compression(os.pread(handle, 4, 0)), handle)
    if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):
        raise MissingFile(
            f"{path} is a device, not a file of rows; give a file, a folder or a pipe"
        )
    if path.is_dir():
        if any((path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json")):
            return hugging_face(str(path))
        files = sorted(file for pattern in FILES for file in path.glob(pattern))
        if not files:
            raise MissingFile(f"{path} is a folder without {' or '.join(FILES)}; check the path")
        return open_source(files)
    try:
        with path.open("rb") as file:
            head = file.read(4096)
    except OSError as error:
        raise MissingFile(f"cannot read {path}: {error.strerror}") from None
    if head.startswith(b"PAR1"):
        return parquet(path)
    return JsonlSource(path, _compression(head))


def _compression(head: bytes) -> str | None:
    return next((name for magic, name in MAGIC.items() if head.startswith(magic)), None)


class _NarrowSource:
    """A source without some of its columns, whose rows may have to have an id."""

    def __init__(self, whole: Source, ignored: frozenset[str], need_id: bool) -> None:
        self._whole, self._ignored, self._need_id = whole, ignored, need_id
        self.name, self.where = whole.name, whole.where

    @property
    def fingerprint(self) -> str:
        return digest("narrow", self._whole.fingerprint, sorted(self._ignored), self._need_id)[:16]

    def __len__(self) -> int:
        return len(self._whole)

    def __getitem__(self, item: int) -> Row:
        row = _narrow(self._whole[item], self._ignored, self._need_id)
        if isinstance(row, BadRow):
            raise BadRow(f"{self.where(item)}: {row}")
        return row

    def chunk(self, start: int, stop: int) -> Chunk:
        return _NarrowChunk(self._whole.chunk(start, stop), self._ignored, self._need_id)


@dataclass(frozen=True, slots=True)
class _NarrowChunk:
    whole: Chunk
    ignored: frozenset[str]
    need_id: bool

    def rows(self) -> Iterator[tuple[int, Row | BadRow]]:
        for item, row in self.whole.rows():
            yield item, row if isinstance(row, BadRow) else _narrow(row, self.ignored, self.need_id)


def _narrow(row: Row, ignored: frozenset[str], need_id: bool) -> Row | BadRow:
    if need_id and all(row.get(name) is None for name in ID_COLUMNS):
        return BadRow("has no id, and --ids require asks for one; add it, or leave the flag out")
    return {name: value for name, value in row.items() if name not in ignored}


class _JoinedSource:
    """Several sources concatenated."""

    def __init__(self, parts: Sequence[Source]) -> None:
        self._parts = parts
        self._starts = [0, *itertools.accumulate(len(part) for part in parts)]
        self.name = f"{parts[0].name} and {len(parts) - 1} more"

    @property
    def fingerprint(self) -> str:
        return digest("joined", [part.fingerprint for part in self._parts])[:16]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, item: int) -> Row:
        part, inner = self._place(item)
        return part[inner]

    def where(self, item: int) -> str:
        part, inner = self._place(item)
        return part.where(inner)

    def chunk(self, start: int, stop: int) -> Chunk:
        chunks = []
        for part, (first, end) in zip(self._parts, itertools.pairwise(self._starts), strict=True):
            a, b = max(start, first), min(stop, end)
            if a < b:
                chunks.append((first, part.chunk(a - first, b - first)))
        return _JoinedChunk(chunks)

    def _place(self, item: int) -> tuple[Source, int]:
        if not 0 <= item < len(self):
            raise IndexError(f"{self.name} have no row {item}, they have {len(self):,}")
        part = bisect.bisect_right(self._starts, item) - 1
        return self._parts[part], item - self._starts[part]


@dataclass(frozen=True, slots=True)
class _JoinedChunk:
    chunks: list[tuple[int, Chunk]]

    def rows(self) -> Iterator[tuple[int, Row | BadRow]]:
        for first, chunk in self.chunks:
            for item, row in chunk.rows():
                yield first + item, row
