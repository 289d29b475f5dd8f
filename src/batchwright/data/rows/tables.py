"""Parquet files and Hugging Face datasets: rows of Arrow tables."""

import hashlib
import mmap
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from batchwright.data.rows import Row
from batchwright.data.rows.elsewhere import FarFile
from batchwright.data.rows.jsonl import no_room
from batchwright.errors import (
    BadFile,
    BadRow,
    BatchwrightError,
    ConfigError,
    MissingFile,
    need,
    one_line,
)
from batchwright.files import cannot_read
from batchwright.fingerprint import digest

LARGE = 1 << 26
"""Bytes of a row group that is not decoded as a whole."""
JUMPS = 2
"""Row groups that are decoded out of their order before the file is unpacked."""
UNPACKED_ROWS = 256
OPEN_BATCHES = 4096
"""Unpacked batches that stay open, a few kilobytes each."""

Columns = list[tuple[str, Any]]

__all__ = ["TableSource", "chosen_split", "dataset", "hugging_face", "parquet"]


class TableSource:
    """Rows of anything that returns a range of itself as an Arrow table."""

    def __init__(
        self,
        name: str,
        size: int,
        table: Callable[[int, int], Any],
        fingerprint: Callable[[], str],
        far: FarFile | None = None,
        place: Callable[[int], tuple[Columns, int]] | None = None,
    ) -> None:
        if size == 0:
            raise BadFile(f"{name} has no rows; check its name")
        self.name = name
        self._size = size
        self._table = table
        self._fingerprint = fingerprint
        self._far = far
        self._place = place

    @cached_property
    def fingerprint(self) -> str:
        # Of a file, every byte is read for it.
        return self._fingerprint()

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, item: int) -> Row:
        if not 0 <= item < self._size:
            raise IndexError(f"{self.name} has no row {item}, it has {self._size:,}")
        if self._place:
            columns, at = self._place(item)
        else:
            columns, at = _columns(self._table(item, item + 1)), 0
        row = _row_at(columns, at)
        if isinstance(row, BadRow):
            raise BadRow(f"{self.where(item)}: {row}")
        return row

    def where(self, item: int) -> str:
        return f"{self.name}:{item + 1}"

    def size_of(self, start: int, stop: int) -> int:
        # A table is read by row groups, however few of their rows are wanted.
        return 0

    def far_chunk(self, start: int, stop: int) -> "_FarTable | None":
        """These rows as a chunk that is read where it is used; None where only this can."""
        return None if self._far is None else _FarTable(self._far, start, stop)

    def chunk(self, start: int, stop: int) -> "_TableChunk":
        import pyarrow

        table = self._table(start, stop)
        sink = pyarrow.BufferOutputStream()
        # Arrow's own format writes only the slice; pickle may write the whole table.
        with pyarrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        return _TableChunk(start, sink.getvalue().to_pybytes())


@dataclass(frozen=True, slots=True)
class _TableChunk:
    first: int
    raw: bytes

    def rows(self) -> Iterator[tuple[int, Row | BadRow]]:
        import pyarrow

        with pyarrow.ipc.open_stream(self.raw) as reader:
            yield from enumerate(_rows(reader.read_all()), self.first)


@dataclass(frozen=True, slots=True)
class _FarTable:
    file: FarFile
    start: int
    stop: int

    def rows(self) -> Iterator[tuple[int, Row | BadRow]]:
        path = self.file.here()
        rows = _rows(_opened(self.file, path).decoded(self.start, self.stop))
        self.file.here()
        return enumerate(rows, self.start)


UNREADABLE = (ValueError, OverflowError, NotImplementedError)
"""What Arrow raises for a value that Python has no place for: text that is not UTF-8, a year after
9999, nanoseconds where pandas is not installed, a type without a counterpart."""


def _rows(table: Any) -> list[Row | BadRow]:
    try:
        return [_row(given) for given in table.to_pylist()]
    except UNREADABLE:
        columns = _columns(table)
        return [_row_at(columns, at) for at in range(len(table))]


def _row_at(columns: Columns, at: int) -> Row | BadRow:
    """One row, at a third of what `to_pylist` takes for it."""
    given = {}
    for name, column in columns:
        try:
            given[name] = column[at].as_py()
        except UnicodeDecodeError as error:
            return BadRow(f"column {name!r} is not UTF-8: byte 0x{error.object[error.start]:02x}")
        except UNREADABLE as error:
            # A time that Python has no place for is its number, in the unit of the column.
            given[name] = getattr(column[at], "value", None)
            if isinstance(given[name], int):
                continue
            return BadRow(f"column {name!r} cannot be read: {one_line(error)[:200]}")
    return _row(given)


def _row(given: dict[str, Any]) -> Row:
    """A row without the nulls of nested objects.

    Arrow gives every object of a column every key that one of them has.
    """
    return {name: _without_nulls(value) for name, value in given.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return [_without_nulls(inner) for inner in value]
    return value


def parquet(path: Path) -> TableSource:
    """A Parquet file; nested columns become lists and objects.

    Rows in order are decoded a row group at a time. For rows in any order, and for row groups too
    large to be held, the file is unpacked once into an unnamed one, which is gone with the process.
    """
    reader = _Parquet(path)
    return TableSource(
        path.name, len(reader), reader.table, reader.fingerprint, reader.far, reader.place
    )


def _columns(table: Any) -> Columns:
    """The columns of a table or a batch by their names."""
    columns: Iterable[Any] = table.itercolumns()
    return list(zip(table.schema.names, columns, strict=True))


class _Parquet:
    def __init__(self, path: Path) -> None:
        import pyarrow.parquet

        self._path = path
        try:
            # With a buffer, and nothing read ahead, a row group of any size takes little memory.
            self._file = pyarrow.parquet.ParquetFile(
                path, page_checksum_verification=True, buffer_size=1 << 20, pre_buffer=False
            )
        except (OSError, ValueError) as error:
            raise _damaged(path, error) from None
        names = self._file.schema_arrow.names
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise BadFile(f"{path} has the column {twice!r} more than once; keep one of them")
        metadata = self._file.metadata
        groups = [metadata.row_group(g) for g in range(metadata.num_row_groups)]
        sizes = [group.num_rows for group in groups]
        self._starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        self._bounds: list[int] = self._starts.tolist()
        self._large = any(group.total_byte_size > LARGE for group in groups)
        # Who reads a large row group for some of its rows unpacks the whole file first.
        self.far = None if self._large else FarFile.of(path, path.stat())
        self._jumps = 0
        self._group: tuple[int, Any] = (-1, None)
        self._columns: tuple[int, Columns] = (-1, [])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def table(self, start: int, stop: int) -> Any:
        import pyarrow

        if self._large or self._jumps > JUMPS:
            return pyarrow.concat_tables(self._unpacked.tables(start, stop))
        return self.decoded(start, stop)

    def place(self, item: int) -> tuple[Columns, int]:
        """The columns that hold this row, and where in them it is."""
        if self._large or self._jumps > JUMPS:
            return self._unpacked.place(item)
        group = bisect_right(self._bounds, item) - 1
        if self._columns[0] != group:
            self._columns = (group, _columns(self._read(group)))
        return self._columns[1], item - self._bounds[group]

    def decoded(self, start: int, stop: int) -> Any:
        """The rows from `start` up to but not including `stop`, out of their row groups."""
        import pyarrow

        first, last = np.searchsorted(self._starts, [start, stop - 1], side="right") - 1
        cuts = []
        for group in range(int(first), int(last) + 1):
            begin, end = int(self._starts[group]), int(self._starts[group + 1])
            a, b = max(start, begin), min(stop, end)
            if a < b:
                cuts.append(self._read(group).slice(a - begin, b - a))
        return pyarrow.concat_tables(cuts)

    def fingerprint(self) -> str:
        with self._path.open("rb") as file:
            return digest("parquet", hashlib.file_digest(file, "sha256").hexdigest())[:16]

    def _read(self, group: int) -> Any:
        # Neighbouring rows are read together, so the last group is cached.
        if self._group[0] != group:
            self._jumps += group != self._group[0] + 1
            try:
                table = self._file.read_row_group(group)
            except (OSError, ValueError) as error:
                raise _damaged(self._path, error) from None
            if len(table) != self._bounds[group + 1] - self._bounds[group]:
                raise BadFile(f"{self._path} changed while it was read; run again")
            self._group = (group, table)
        return self._group[1]

    @cached_property
    def _unpacked(self) -> "_Unpacked":
        self._group, self._columns = (-1, None), (-1, [])
        try:
            return _Unpacked(self._batches())
        except OSError as error:
            raise no_room(self._path, error) from None

    def _batches(self) -> Iterator[Any]:
        batches = self._file.iter_batches(UNPACKED_ROWS)
        while True:
            try:
                batch = next(batches, None)
            except (OSError, ValueError) as error:
                raise _damaged(self._path, error) from None
            if batch is None:
                return
            yield batch

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Parquet, (self._path,))


@lru_cache(1)
def _opened(file: FarFile, path: Path) -> _Parquet:
    """Of a file that is read elsewhere, with the row group that was read last."""
    return _Parquet(path)


class _Unpacked:
    """Rows as Arrow has them in memory, in an unnamed file that is mapped: any is found at once."""

    def __init__(self, batches: Iterator[Any]) -> None:
        import pyarrow

        starts, offsets = [0], []
        with tempfile.TemporaryFile() as file:
            for batch in batches:
                offsets.append(file.tell())
                starts.append(starts[-1] + len(batch))
                # Each a stream of its own: a dictionary of values may differ from batch to batch.
                with pyarrow.ipc.new_stream(file, batch.schema) as writer:
                    writer.write_batch(batch)
            file.flush()
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._raw = pyarrow.py_buffer(mapped)
        self._starts, self._offsets, self._bounds = np.array(starts), offsets, starts
        self._open = lru_cache(OPEN_BATCHES)(self._opened)

    def place(self, item: int) -> tuple[Columns, int]:
        """The columns that hold this row, and where in them it is."""
        number = bisect_right(self._bounds, item) - 1
        return self._open(number), item - self._bounds[number]

    def _opened(self, number: int) -> Columns:
        import pyarrow

        with pyarrow.ipc.open_stream(self._raw.slice(self._offsets[number])) as reader:
            return _columns(reader.read_next_batch())

    def tables(self, start: int, stop: int) -> list[Any]:
        """The rows from `start` up to but not including `stop`."""
        import pyarrow

        first, last = np.searchsorted(self._starts, [start, stop - 1], side="right") - 1
        found = []
        for number in range(int(first), int(last) + 1):
            begin = int(self._starts[number])
            with pyarrow.ipc.open_stream(self._raw.slice(self._offsets[number])) as reader:
                table = reader.read_all()
            a, b = max(start - begin, 0), min(stop - begin, len(table))
            found.append(table.slice(a, b - a))
        return found


def _damaged(path: Path, error: Exception) -> BatchwrightError:
    if isinstance(error, OSError) and error.errno:
        # The system's word, not that of the decoder.
        return cannot_read(path, error)
    reason = one_line(error)[:200]
    return BadFile(f"{path} is truncated or damaged Parquet: {reason}; get it again")


def hugging_face(spec: str) -> TableSource:
    """The dataset NAME or NAME:SPLIT; a NAME that is a folder was written by `save_to_disk`."""
    datasets = need("datasets", extra="hf")
    if not spec.strip("/"):
        raise ConfigError(f"no name behind hf: in {f'hf:{spec}'!r}; write hf:NAME or hf:NAME:SPLIT")
    name, split = spec, ""
    if not Path(spec).is_dir() and ":" in spec:
        name, _, split = spec.rpartition(":")
    try:
        if Path(name).is_dir():
            loaded = datasets.load_from_disk(name)
        else:
            loaded = datasets.load_dataset(name, split=split or None)
    except (OSError, ValueError) as error:
        raise MissingFile(
            f"cannot load the dataset {name}: {one_line(error)[:200]}; check its name, "
            f"or give a local file"
        ) from None
    if isinstance(loaded, dict):
        # A folder needs no hf: before its name.
        shown = name if Path(name).is_dir() else f"hf:{name}"
        loaded = loaded[chosen_split(loaded, shown, split)]
    elif split and Path(name).is_dir():
        raise ConfigError(f"{name} has no splits; leave out :{split}")
    return dataset(loaded, Path(name).name)


def dataset(loaded: Any, name: str) -> TableSource:
    """A `datasets.Dataset` that is already open."""
    datasets = need("datasets", extra="hf")
    if isinstance(loaded, dict):
        if len(loaded) > 1:
            raise ConfigError(
                f"{name} is a DatasetDict of {', '.join(loaded)}; pass one of them, as "
                f"data[{next(iter(loaded))!r}]"
            )
        (loaded,) = loaded.values()
    if not isinstance(loaded, datasets.Dataset):
        raise ConfigError(
            f"{name} is a {type(loaded).__name__}, which has no random access; "
            f"give a datasets.Dataset, as load_dataset without streaming returns"
        )
    reader = _Dataset(loaded.with_format("arrow"))
    return TableSource(name, len(loaded), reader.table, reader.fingerprint)


@dataclass(frozen=True, slots=True)
class _Dataset:
    inner: Any

    def table(self, start: int, stop: int) -> Any:
        return self.inner[start:stop]

    def fingerprint(self) -> str:
        return digest("dataset", str(self.inner._fingerprint))[:16]


def chosen_split(splits: Mapping[str, Any], name: str, wanted: str) -> str:
    """The split that is `wanted`, or the only one; an error if none of several is named."""
    if wanted in splits:
        return wanted
    if not wanted and len(splits) == 1:
        return next(iter(splits))
    example = f"{name}:{'train' if 'train' in splits else next(iter(splits))}"
    if not wanted:
        raise ConfigError(
            f"{name} has {len(splits)} splits, {', '.join(splits)}; name one as {example}"
        )
    raise ConfigError(
        f"{name} has no split {wanted!r}, it has {', '.join(splits)}; name one as {example}"
    )
