"""How many tokens each sample has, in memory and kept on disk."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.data.ids import Ids
from batchwright.data.journal import Journal
from batchwright.data.lengthfiles import (
    LONGEST,
    Entries,
    bad_length,
    check_path,
    checked_lengths,
    partial_path,
    read_entries,
    write_entries,
)
from batchwright.errors import ConfigError, DuplicateId, Mismatch, UnknownSample

__all__ = ["LONGEST", "LengthCache", "LengthEntry", "Lengths"]

FLUSH_EVERY = 4096


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Lengths:
    """The length of every sample, with its id and the hashes of what was measured.

    `rows` tells which row of the data each sample is; None means that sample i is row i, which
    holds unless bad rows were skipped.

    >>> Lengths.of({"a": 3, "b": 5})
    Lengths(2 samples, 8 tokens, 3 to 5)
    """

    values: NDArray[np.int32]
    ids: Ids
    dataset_hash: str = "unknown"
    tokenizer_hash: str = "unknown"
    rows: NDArray[np.int64] | None = None

    @classmethod
    def of(cls, source: "Mapping[str, int] | Lengths | LengthCache | NDArray[Any]") -> "Lengths":
        """Lengths from whatever holds them, checked once.

        An array numbers its samples "0", "1", ...; a mapping names them. A length below 1 or
        above 2**31 - 1 is refused with the sample's id.
        """
        if isinstance(source, Lengths):
            return source
        if isinstance(source, LengthCache):
            return source.lengths
        if isinstance(source, Mapping):
            return cls(*_from_mapping(source))
        array = np.asarray(source)
        if array.ndim != 1:
            raise ConfigError(f"lengths are one row of numbers, got an array of {array.ndim} axes")
        ids = Ids.numbered(len(array))
        return cls(checked_lengths(array, ids), ids)

    def __len__(self) -> int:
        return len(self.values)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Lengths):
            return NotImplemented
        return (
            self.dataset_hash == other.dataset_hash
            and self.tokenizer_hash == other.tokenizer_hash
            and np.array_equal(self.values, other.values)
            and self.ids == other.ids
            and np.array_equal(_rows(self), _rows(other))
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        if not len(self):
            return "Lengths(0 samples)"
        tokens = int(self.values.sum(dtype=np.int64))
        return (
            f"Lengths({len(self):,} samples, {tokens:,} tokens, "
            f"{self.values.min():,} to {self.values.max():,})"
        )


@dataclass(frozen=True, slots=True)
class LengthEntry:
    """One line of a cache; `content` is the row's hash in 16 hexadecimal digits, or empty."""

    sample_id: str
    length: int
    content: str = ""


class LengthCache:
    """Lengths with a file behind them: `.jsonl` or `.safetensors`, by its suffix.

    Entries are added inside a `with` block. They go to a journal beside the file as they come;
    the file itself appears, whole, when the block ends well. After a crash `load_or_create`
    picks up what the journal holds.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "lengths.jsonl"
    >>> with LengthCache.create(path, tokenizer_hash="t1") as cache:
    ...     cache.add("a", 12)
    >>> LengthCache.load(path).get_all()
    {'a': 12}
    """

    def __init__(self, path: Path, entries: Entries, *, complete: bool) -> None:
        self.path = path
        self._entries = entries
        self._complete = complete
        self._added: dict[str, tuple[int, int]] = {}
        self._unwritten: list[str] = []
        self._journal: Journal | None = None
        self._fresh = False

    @classmethod
    def create(cls, path: str | Path, tokenizer_hash: str) -> "LengthCache":
        """An empty cache, which forgets what stood at `path` once it is finished."""
        check_path(Path(path))
        cache = cls(Path(path), _empty(tokenizer_hash), complete=False)
        cache._fresh = True
        return cache

    @classmethod
    def load(cls, path: str | Path, expected_tokenizer_hash: str | None = None) -> "LengthCache":
        """A finished cache; one that is cut, damaged or of another tokenizer is refused."""
        entries = read_entries(Path(path))
        if expected_tokenizer_hash not in (None, entries.tokenizer_hash):
            raise Mismatch(
                f"{path} was measured with the tokenizer {entries.tokenizer_hash}, not with "
                f"{expected_tokenizer_hash}; measure again or name the tokenizer it was made with"
            )
        return cls(Path(path), entries, complete=True)

    @classmethod
    def load_or_create(cls, path: str | Path, tokenizer_hash: str) -> "LengthCache":
        """The cache at `path` with all that is known so far; entries can be added to it."""
        check_path(Path(path))
        if Path(path).exists():
            return cls.load(path, tokenizer_hash)
        cache = cls(Path(path), _empty(tokenizer_hash), complete=False)
        if partial_path(cache.path).exists():
            with cache:
                cache._keep = True
        return cache
