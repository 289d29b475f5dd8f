"""How many tokens each sample has, in memory and on disk."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.data.build.journal import Journal
from batchwright.data.entries import Entries
from batchwright.data.ids import Ids
from batchwright.data.lengths.files import (
    JOURNAL,
    LONGEST,
    bad_length,
    check_path,
    checked_lengths,
    partial_path,
    read_entries,
    write_entries,
)
from batchwright.errors import ConfigError, DuplicateId, Mismatch, UnknownSample
from batchwright.remote import fetched

__all__ = ["LONGEST", "LengthCache", "LengthEntry", "Lengths"]

FLUSH_EVERY = 4096


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Lengths:
    """The length of every sample, with its id and the hashes of data and tokenizer.

    `rows` are the row numbers of the samples; None means that sample i is row i, which holds
    unless bad rows were skipped. `loss` [N, 2] is the first token of each that is predicted with
    loss (the length, if none is) and how many are; None if that is unknown.

    >>> Lengths.of({"a": 3, "b": 5})
    Lengths(2 samples, 8 tokens, 3 to 5)
    """

    values: NDArray[np.int32]
    ids: Ids
    dataset_hash: str = "unknown"
    tokenizer_hash: str = "unknown"
    rows: NDArray[np.int64] | None = None
    loss: NDArray[np.int32] | None = None

    @classmethod
    def of_entries(cls, entries: Entries, dataset_hash: str | None = None) -> "Lengths":
        """Lengths as they were measured; `dataset_hash` if it is known already."""
        return cls(
            entries.lengths,
            entries.ids,
            entries.dataset_hash if dataset_hash is None else dataset_hash,
            entries.tokenizer_hash,
            entries.rows,
            entries.loss,
        )

    @classmethod
    def of(cls, source: "Mapping[str, int] | Lengths | LengthCache | NDArray[Any]") -> "Lengths":
        """Lengths from a mapping, an array or a cache, checked once.

        The samples of an array are called "0", "1", ...; a mapping names them. A length below 1
        or above 2**31 - 1 is refused with the sample's id.
        """
        if isinstance(source, Lengths):
            return source
        if isinstance(source, LengthCache):
            return source.lengths
        if isinstance(source, Mapping):
            return cls(*_from_mapping(source))
        array = np.asarray(source)
        if array.ndim != 1:
            raise ConfigError(
                f"lengths must be a one-dimensional array, got {array.ndim} dimensions"
            )
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
            and (self.loss is None) == (other.loss is None)
            and (self.loss is None or np.array_equal(self.loss, np.asarray(other.loss)))
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
    """One entry of a cache; `content` is the row's hash in 16 hexadecimal digits, or empty."""

    sample_id: str
    length: int
    content: str = ""


class LengthCache:
    """Lengths with a file behind them: `.jsonl` or `.safetensors`, by its suffix.

    Entries are added inside a `with` block. They are journaled beside the file as they come; the
    file itself is written atomically when the block ends without an error. After a crash
    `load_or_create` resumes from the journal.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "lengths.jsonl"
    >>> with LengthCache.create(path, tokenizer_hash="t1") as cache:
    ...     cache.add("a", 12)
    >>> LengthCache.load(path).get_all()
    {'a': 12}
    """

    def __init__(self, path: Path, entries: Entries, *, complete: bool, resume: bool) -> None:
        self.path = path
        self._entries = entries
        self._complete = complete
        self._resume = resume
        self._added: dict[str, int] = {}
        # The content hashes of what was added, where they are known.
        self._hashes: dict[str, int] = {}
        self._unwritten: list[str] = []
        self._journal: Journal | None = None
        # Whether entries can be added now, and all that are here were.
        self._fresh = False

    @classmethod
    def create(cls, path: str | Path, tokenizer_hash: str) -> "LengthCache":
        """An empty cache, which replaces the one at `path` once it is finished."""
        check_path(Path(path))
        return cls(Path(path), _empty(tokenizer_hash), complete=False, resume=False)

    @classmethod
    def load(cls, path: str | Path, expected_tokenizer_hash: str | None = None) -> "LengthCache":
        """A finished cache; one that is truncated, damaged or of another tokenizer is refused."""
        entries = read_entries(fetched(path))
        if expected_tokenizer_hash not in (None, entries.tokenizer_hash):
            raise Mismatch(
                f"{path} was measured with tokenizer {entries.tokenizer_hash}, not with "
                f"{expected_tokenizer_hash}; measure again or name the tokenizer it was made with"
            )
        return cls(Path(path), entries, complete=True, resume=True)

    @classmethod
    def load_or_create(cls, path: str | Path, tokenizer_hash: str) -> "LengthCache":
        """The cache at `path` with all entries so far, finished or not; more can be added."""
        path = Path(path)
        check_path(path)
        if path.exists():
            cache = cls.load(path, tokenizer_hash)
        else:
            cache = cls(path, _empty(tokenizer_hash), complete=False, resume=True)
        if partial_path(path).exists():
            journal = Journal(partial_path(path), JOURNAL, tokenizer_hash)
            cache._take(journal)
            journal.close()
        return cache

    @property
    def tokenizer_hash(self) -> str:
        return self._entries.tokenizer_hash

    @property
    def dataset_hash(self) -> str:
        return self._all().dataset_hash

    @property
    def lengths(self) -> Lengths:
        """All entries as arrays."""
        return Lengths.of_entries(self._all())

    def add(self, sample_id: str, length: int, content: str = "") -> None:
        """Add an entry; adding the same one again is allowed, with another length it is not."""
        # Nearly every call: of a type, in range, of no content, and new.
        plain = type(length) is int and 0 < length <= LONGEST and not content
        if plain and self._fresh and type(sample_id) is str and sample_id not in self._added:
            self._added[sample_id] = length
            self._unwritten.append(sample_id)
            if len(self._unwritten) >= FLUSH_EVERY:
                self._flush()
            return
        if self._journal is None:
            raise ConfigError("entries can be added inside `with cache:` only")
        if isinstance(length, bool) or not isinstance(length, int | np.integer):
            raise bad_length(sample_id, repr(length))
        if not 1 <= length <= LONGEST:
            raise bad_length(sample_id, length)
        entry = int(length), _content(content)
        known = self._find(sample_id)
        if known is not None and known != entry:
            raise DuplicateId(
                f"duplicate sample id {sample_id!r}, with lengths {known[0]} and {length}; "
                f"ids must be unique"
            )
        if known is None:
            self._note(sample_id, *entry)
            self._unwritten.append(sample_id)
            if len(self._unwritten) >= FLUSH_EVERY:
                self._flush()

    def extend(
        self,
        sample_ids: Iterable[str],
        lengths: Iterable[int],
        contents: Iterable[str] | None = None,
    ) -> None:
        """Add many entries, as columns of equal length."""
        if isinstance(lengths, np.ndarray):
            lengths = lengths.tolist()
        given: tuple[Iterable[Any], ...] = (sample_ids, lengths, contents or ())
        columns = [iter(column) for column in given]
        while True:
            ids, values, hashes = ([*islice(column, FLUSH_EVERY)] for column in columns)
            if contents is None:
                hashes = [""] * len(ids)
            if not len(ids) == len(values) == len(hashes):
                raise ConfigError("the columns of entries have different lengths; make them equal")
            if not ids:
                return
            if not self._is_new(ids, values):
                for entry in zip(ids, values, hashes, strict=True):
                    self.add(*entry)
                continue
            known = [0] * len(ids) if contents is None else [*map(_content, hashes)]
            self._flush()
            self._added.update(zip(ids, values, strict=True))
            if contents is not None:
                self._hashes.update((i, hash) for i, hash in zip(ids, known, strict=True) if hash)
            assert self._journal is not None
            self._journal.append(ids, values, known)

    def _is_new(self, ids: Sequence[Any], lengths: Sequence[Any]) -> bool:
        """Whether all these entries can be added at once: right, inside `with`, and not here."""
        return (
            self._fresh
            and {*map(type, ids)} == {str}
            and {*map(type, lengths)} == {int}
            and min(lengths) >= 1
            and max(lengths) <= LONGEST
            and len({*ids}) == len(ids)
            and self._added.keys().isdisjoint(ids)
        )

    def get(self, sample_id: str) -> int | None:
        """The length of a sample, or None."""
        known = self._find(sample_id)
        return None if known is None else known[0]

    def get_all(self) -> dict[str, int]:
        """Every id with its length, as a dictionary."""
        return dict(self.items())

    def items(self) -> Iterator[tuple[str, int]]:
        """Every id with its length, in order."""
        entries = self._all()
        return zip(entries.ids, entries.lengths.tolist(), strict=True)

    def validate(self, ids: Iterable[str]) -> tuple[set[str], set[str]]:
        """The ids that are missing here, and those that are here but not in `ids`."""
        wanted, here = set(ids), set(self._all().ids)
        return wanted - here, here - wanted

    def is_complete(self, ids: Iterable[str] | None = None) -> bool:
        """Whether the file is finished, and has all of `ids` if they are given."""
        done = self._complete and not self._added
        return done and (ids is None or not self.validate(ids)[0])

    def __len__(self) -> int:
        return len(self._entries.ids) + len(self._added)

    def __iter__(self) -> Iterator[LengthEntry]:
        entries = self._all()
        columns = zip(entries.ids, entries.lengths.tolist(), entries.content.tolist(), strict=True)
        for sample_id, length, content in columns:
            yield LengthEntry(sample_id, length, f"{content:016x}" if content else "")

    def __enter__(self) -> "LengthCache":
        self._journal = Journal(partial_path(self.path), JOURNAL, self.tokenizer_hash)
        if self._resume:
            self._take(self._journal)
        else:
            self._journal.restart()
        self._fresh = not len(self._entries.ids)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        journal, self._journal, self._fresh = self._journal, None, False
        assert journal is not None
        if kind is not None:
            self._flush(journal)
            journal.close()
            return
        self._entries = self._all()
        self._added, self._hashes, self._unwritten = {}, {}, []
        # None was added that was there.
        write_entries(self.path, self._entries, unique=True)
        self._complete = True
        journal.remove()

    def __repr__(self) -> str:
        state = "finished" if self.is_complete() else "unfinished"
        return f"LengthCache({self.path.name}, {len(self):,} entries, {state})"

    def _find(self, sample_id: str) -> tuple[int, int] | None:
        if sample_id in self._added:
            return self._added[sample_id], self._hashes.get(sample_id, 0)
        if not len(self._entries.ids):
            return None
        try:
            item = self._entries.ids.find(sample_id)
        except UnknownSample:
            return None
        return int(self._entries.lengths[item]), int(self._entries.content[item])

    def _note(self, sample_id: str, length: int, content: int) -> None:
        self._added[sample_id] = length
        if content:
            self._hashes[sample_id] = content

    def _take(self, journal: Journal) -> None:
        for chunk in journal.replay():
            for sample_id, length, content in zip(*chunk, strict=True):
                if self._find(sample_id) is None:
                    self._note(sample_id, length, content)

    def _flush(self, journal: Journal | None = None) -> None:
        journal = journal or self._journal
        assert journal is not None
        lengths = [*map(self._added.__getitem__, self._unwritten)]
        hashes = [0] * len(lengths)
        if self._hashes:
            hashes = [self._hashes.get(sample_id, 0) for sample_id in self._unwritten]
        journal.append(self._unwritten, lengths, hashes)
        self._unwritten = []

    def _contents(self) -> NDArray[np.uint64]:
        """The content hashes of what was added."""
        if not self._hashes:
            return np.zeros(len(self._added), np.uint64)
        each = (self._hashes.get(sample_id, 0) for sample_id in self._added)
        return np.fromiter(each, np.uint64, len(self._added))

    def _all(self) -> Entries:
        if not self._added:
            return self._entries
        old, new = self._entries, self._added
        rows = old.rows
        if rows is not None:
            after = int(rows[-1]) + 1
            rows = np.concatenate([rows, np.arange(after, after + len(new))])
        return Entries(
            Ids.of([*old.ids, *self._added]),
            np.concatenate([old.lengths, np.fromiter(new.values(), np.int32, len(new))]),
            np.concatenate([old.content, self._contents()]),
            rows,
            old.tokenizer_hash,
            # Of entries added by hand it is not known, so of the whole it is not either.
        )


def _empty(tokenizer_hash: str) -> Entries:
    return Entries(
        Ids.numbered(0), np.empty(0, np.int32), np.empty(0, np.uint64), None, tokenizer_hash
    )


def _content(text: str) -> int:
    try:
        value = int(text, 16) if text else 0
    except ValueError:
        value = -1
    if not 0 <= value < 2**64 or len(text) not in (0, 16):
        raise ConfigError(f"a content hash must be 16 hexadecimal digits or empty, got {text!r}")
    return value


def _rows(lengths: Lengths) -> NDArray[np.int64]:
    return np.arange(len(lengths)) if lengths.rows is None else lengths.rows


def _from_mapping(source: Mapping[str, int]) -> tuple[NDArray[np.int32], Ids]:
    # As Python integers, so that 2**70 is reported instead of overflowing.
    for id, value in source.items():
        if not isinstance(id, str):
            raise ConfigError(f"sample ids must be strings, got {id!r}")
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise bad_length(id, repr(value))
        if not 1 <= value <= LONGEST:
            raise bad_length(id, value)
    return np.fromiter(source.values(), np.int32, len(source)), Ids.of(source)
