"""Rows of JSONL, Parquet or a Hugging Face dataset behind one indexable view.

A file's first bytes, not its name, say what it is: JSONL may be compressed with gzip or zstd.
"""

import bisect
import itertools
import os
import re
import stat
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from batchwright.data.rows import Row
from batchwright.data.rows.elsewhere import far_chunk
from batchwright.data.rows.jsonl import GZIP, ZSTD, JsonlSource, spooled
from batchwright.data.rows.tables import chosen_split, dataset, hugging_face, parquet
from batchwright.errors import BadRow, ConfigError, MissingFile
from batchwright.fingerprint import digest
from batchwright.remote import address_of, fetched

__all__ = [
    "Chunk",
    "IdsOf",
    "OnBadRow",
    "Skipped",
    "Source",
    "good_rows",
    "open_source",
    "row_ranges",
    "split_of",
    "without",
]

OnBadRow = Literal["fail", "skip"]
IdsOf = Literal["auto", "ignore", "require"]
"""Ids of rows where they have one, never, or refuse rows without."""
ID_COLUMNS = ("id", "sample_id")
T = TypeVar("T")

CHUNK_BYTES = 1 << 25
"""Rows that are read together have at most so many bytes, unless a single one has more."""
FILES = ("*.jsonl", "*.jsonl.gz", "*.jsonl.zst", "*.parquet")
OTHER_DATA = r"\.(jsonl?|ndjson|csv|tsv|parquet|arrow)(\.(gz|zst|bz2|xz))?$"
"""Names of files that hold rows, whether they can be read or not."""
ABOUT = ("dataset_info", "config", "metadata", "state", "manifest", "package")
"""Beginnings of the names of files that stand beside rows and hold none."""
SPLITS = {
    "test": {"test", "testing", "eval", "evaluation"},
    "validation": {"validation", "valid", "val", "dev"},
}
"""Words in the names of files that are not of the split `train`."""
MAGIC = {GZIP: "gzip", ZSTD: "zstd"}


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

    def size_of(self, start: int, stop: int) -> int:
        """The bytes of these rows where they stand; 0 if that is not known."""
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

    `spec` is a path, or an address such as s3://BUCKET/NAME; a folder of *.jsonl and *.parquet
    files, taken in the order of their names, or one that `save_to_disk` wrote; a list of paths;
    `hf:NAME`; a `datasets.Dataset`; or what this function returned. Of several splits one must be
    named: `FOLDER:SPLIT`, `hf:NAME:SPLIT`. The split of a file is in its name, as `train` in
    `train-00000-of-00002.parquet`; files without one are of `train`. Only the offsets of the rows
    are held in memory. `ignore_columns` are left out, as if the rows did not have them;
    `messages.thought` leaves out that key of every message. `ids`
    says what rows are called: by their `id` or `sample_id` where they have one (auto), all by
    their numbers (ignore), or a row without an id is bad (require).
    """
    if ignore_columns or ids != "auto":
        ignored = frozenset([*ignore_columns, *(ID_COLUMNS if ids == "ignore" else ())])
        return _NarrowSource(open_source(spec), ignored, ids == "require")
    if spec == "":
        raise ConfigError("the name of the data is empty; give a file, a folder or hf:NAME")
    if isinstance(spec, str | Path) and (address := address_of(spec)) is not None:
        place, colon, split = address.rpartition(":")
        # The colon of a scheme or a port is before a slash.
        named = bool(colon) and "/" not in split
        local = fetched(place if named else address)
        return open_source(f"{local}:{split}" if named else local)
    if isinstance(spec, str) and spec.startswith("hf:"):
        return hugging_face(spec.removeprefix("hf:"))
    if isinstance(spec, str | Path):
        folder, colon, split = str(spec).rpartition(":")
        if colon and not Path(spec).exists() and Path(folder).is_dir():
            return _open_folder(Path(folder), split)
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


def row_ranges(source: Source, rows: int) -> Iterator[tuple[int, int]]:
    """All rows in order, so many at a time as are not too large together to be held."""
    start = 0
    while start < len(source):
        stop = min(start + rows, len(source))
        while stop - start > 1 and source.size_of(start, stop) > CHUNK_BYTES:
            stop = start + (stop - start) // 2
        yield start, stop
        start = stop


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
        if any(sign in str(path) for sign in "*?["):
            raise MissingFile(
                f"no data at {path}; patterns of names are not expanded here, leave out the quotes "
                f"so that the shell does, or give the folder"
            ) from None
        raise MissingFile(f"no data at {path}{reason}; check the path") from None
    if stat.S_ISFIFO(kind):
        handle = spooled(path)
        return JsonlSource(path, _compression(os.pread(handle, 4, 0)), handle)
    if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):
        raise MissingFile(
            f"{path} is a device, not a file of rows; give a file, a folder or a pipe"
        )
    if path.is_dir():
        return _open_folder(path, "")
    try:
        with path.open("rb") as file:
            head = file.read(4096)
    except OSError as error:
        raise MissingFile(f"cannot read {path}: {error.strerror}") from None
    if head.startswith(b"PAR1"):
        return parquet(path)
    return JsonlSource(path, _compression(head))


def _open_folder(path: Path, split: str) -> Source:
    if any((path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json")):
        return hugging_face(f"{path}:{split}" if split else str(path))
    files = sorted(file for pattern in FILES for file in path.glob(pattern))
    if not files:
        raise MissingFile(f"{path} is a folder without {' or '.join(FILES)}; check the path")
    if others := _other_data(path, set(files)):
        shown = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
        raise ConfigError(
            f"{path} has {len(others)} files of data beside those that a folder gives, {shown}; a "
            f"folder gives its own {', '.join(FILES)}; name the files to read, or move the others"
        )
    splits: dict[str, list[Path]] = {}
    for file in files:
        splits.setdefault(split_of(file.name), []).append(file)
    return open_source(splits[chosen_split(splits, str(path), split)])


def _other_data(path: Path, read: set[Path]) -> list[str]:
    """Files of rows in a folder that are not among those that are read."""
    found = []
    for file in path.rglob("*"):
        inner = file.relative_to(path)
        hidden = any(part.startswith((".", "_")) for part in inner.parts)
        about = file.name.lower().startswith(ABOUT)
        if file in read or hidden or about or not file.is_file():
            continue
        if re.search(OTHER_DATA, file.name.lower()):
            found.append(str(inner))
    return sorted(found)


def split_of(name: str) -> str:
    """The split that a file's name says, as `datasets` reads it; `train` if it says none.

    >>> [split_of(name) for name in ("test_sft-00000-of-00001.parquet", "my-dev.jsonl", "a.jsonl")]
    ['test_sft', 'validation', 'train']
    """
    if found := re.match(r"(.+)-\d{5}-of-\d{5}", name):
        return found[1]
    words = re.split(r"[-_. ]", name.lower())
    return next((split for split, names in SPLITS.items() if names & set(words)), "train")


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

    def far_chunk(self, start: int, stop: int) -> Chunk | None:
        whole = far_chunk(self._whole, start, stop)
        return None if whole is None else _NarrowChunk(whole, self._ignored, self._need_id)

    def size_of(self, start: int, stop: int) -> int:
        return self._whole.size_of(start, stop)


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
    return without(row, ignored)


def without(row: Row, ignored: Collection[str]) -> Row:
    """The row without some columns; `COLUMN.KEY` is a key of everything that the column lists."""
    kept = {name: value for name, value in row.items() if name not in ignored}
    for name in ignored:
        column, dot, key = name.partition(".")
        if dot and isinstance(kept.get(column), list):
            # Of every message, or whatever the column lists.
            kept[column] = [
                {k: v for k, v in inner.items() if k != key} if isinstance(inner, dict) else inner
                for inner in kept[column]
            ]
    return kept


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
        parts = self._parts_of(start, stop)
        return _JoinedChunk([(first, part.chunk(a, b)) for first, part, a, b in parts])

    def far_chunk(self, start: int, stop: int) -> Chunk | None:
        parts = list(self._parts_of(start, stop))
        far = [far_chunk(part, a, b) for _, part, a, b in parts]
        if None in far:
            return None
        return _JoinedChunk([(one[0], chunk) for one, chunk in zip(parts, far, strict=True)])

    def size_of(self, start: int, stop: int) -> int:
        return sum(part.size_of(a, b) for _, part, a, b in self._parts_of(start, stop))

    def _parts_of(self, start: int, stop: int) -> Iterator[tuple[int, Source, int, int]]:
        """The first row of each part that has some of these rows, the part, and which of it."""
        for part, (first, end) in zip(self._parts, itertools.pairwise(self._starts), strict=True):
            a, b = max(start, first), min(stop, end)
            if a < b:
                yield first, part, a - first, b - first

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
