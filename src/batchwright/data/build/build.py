"""Encode every row of a data set once: what lengths and tokens are both built from."""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from batchwright.data.build.known import Known
from batchwright.data.build.workers import Workers, map_chunks
from batchwright.data.entries import Entries
from batchwright.data.ids import Ids
from batchwright.data.rows import Row
from batchwright.data.rows.sample import Encoding, content_hashes, row_id
from batchwright.data.rows.source import Chunk, OnBadRow, Skipped, Source, good_rows
from batchwright.data.tokenizers.tokenizer import Tokenizer
from batchwright.errors import BadRow, DuplicateId

__all__ = ["Build", "EncodedChunk", "EncodingChunk", "RepeatedIds"]

RepeatedIds = Literal["fail", "skip"]
"""Of rows with the same id: refuse them, or keep the first and count the others."""


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """The good rows of one chunk in order, and why the others are bad."""

    rows: list[int]
    ids: list[str]
    lengths: NDArray[np.int32]
    content: NDArray[np.uint64]
    places: NDArray[np.int64]
    """Where a row is among the known ones; -1 if it was tokenised now."""
    tokens: NDArray[np.int32]
    """Of the rows tokenised now, one after another."""
    mask: NDArray[np.uint8]
    bad: list[tuple[int, BadRow]]

    @property
    def is_new(self) -> NDArray[np.bool_]:
        """Which rows were tokenised now."""
        return self.places < 0

    def record(self) -> tuple[list[str], list[int], list[int]]:
        """Ids, lengths and content hashes of the rows tokenised now, for the journal."""
        new = self.is_new
        ids = [id for id, is_new in zip(self.ids, new.tolist(), strict=True) if is_new]
        return ids, self.lengths[new].tolist(), self.content[new].tolist()


class Build:
    """Iterate it to encode a source chunk by chunk; `entries` then holds what was gathered.

    Rows that are `known` by id and content are not tokenised again. The chunks are the same
    whatever the number of workers.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: Tokenizer,
        known: Known,
        *,
        on_bad_row: OnBadRow,
        repeated_ids: RepeatedIds,
        workers: int | Workers | None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._source = source
        self._tokenizer = tokenizer
        self._known = known
        self._on_bad_row = on_bad_row
        self._repeated_ids = repeated_ids
        self._workers = workers
        self._progress = progress
        # Ids are held as bytes: as strings, those of ten million rows fill a gigabyte.
        self._ids: list[bytes] = []
        self._columns: list[tuple[NDArray[Any], ...]] = []
        self._rows_done = 0
        self.skipped = Skipped()
        self.repeated = Skipped()
        self.tokenised = 0
        """Rows of `entries` that were not known; a repeated one that is left out does not count."""

    def __iter__(self) -> Iterator[EncodedChunk]:
        """The chunks in order; whoever takes one may journal it, it holds no refused row."""
        chunks = map_chunks(
            EncodingChunk, self._source, self._tokenizer, self._known, self._workers
        )
        with closing(chunks):
            for chunk in chunks:
                self._gather(chunk)
                yield chunk
                if self._progress is not None:
                    self._progress(self._rows_done, len(self._source))

    def entries(self) -> tuple[Entries, NDArray[np.bool_]]:
        """What all good rows are, in order, each id once; and which of the good rows these are."""
        columns = [np.concatenate(column) for column in zip(*self._columns, strict=True)]
        sizes, rows, lengths, content, new = columns
        if not len(rows):
            raise BadRow(
                f"none of the {self._rows_done:,} rows of {self._source.name} can be used; "
                f"the first reason: {self.skipped.reasons[0]}"
            )
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        ids = Ids.from_arrays(offsets, np.frombuffer(b"".join(self._ids), np.uint8))
        kept = np.ones(len(ids), bool)
        if ids.first_duplicate() is not None:
            first = ids.places(ids)
            kept = first == np.arange(len(ids))
            for item in np.flatnonzero(~kept).tolist():
                self._repeat(ids[item], int(rows[first[item]]), int(rows[item]))
            ids = Ids.of(ids.take(np.flatnonzero(kept).tolist()))
            rows, lengths, content = rows[kept], lengths[kept], content[kept]
        self.tokenised = int(new[kept].sum())
        moved = len(rows) != rows[-1] + 1
        whole = rows if moved else None
        return Entries(ids, lengths, content, whole, self._tokenizer.fingerprint), kept

    def _repeat(self, id: str, first: int, again: int) -> None:
        where = self._source.where
        reason = (
            f"duplicate sample id {id!r}, at {where(first)} and {where(again)}; ids must be "
            f"unique, or choose --ids ignore or --repeated-ids skip"
        )
        if self._repeated_ids == "fail":
            raise DuplicateId(reason)
        self.repeated.add(reason)

    def _gather(self, chunk: EncodedChunk) -> None:
        # None of them is good: the first is raised, or all are counted.
        list(good_rows(self._source, chunk.bad, self._on_bad_row, self.skipped))
        self._rows_done += len(chunk.rows) + len(chunk.bad)
        encoded = [id.encode() for id in chunk.ids]
        sizes = np.array([len(raw) for raw in encoded], np.int64)
        self._ids.append(b"".join(encoded))
        rows = np.array(chunk.rows, np.int64)
        self._columns.append((sizes, rows, chunk.lengths, chunk.content, chunk.is_new))


class EncodingChunk:
    """A chunk on its way to an `EncodedChunk`; created in a worker process or in this one."""

    def __init__(self, chunk: Chunk, tokenizer: Tokenizer, known: Known) -> None:
        self._bad: list[tuple[int, BadRow]] = []
        self._rows: list[int] = []
        self._ids: list[str] = []
        read: list[Row] = []
        for item, row in chunk.rows():
            try:
                if isinstance(row, BadRow):
                    raise row
                self._ids.append(row_id(row, str(item)))
            except BadRow as error:
                self._bad.append((item, error))
                continue
            self._rows.append(item)
            read.append(row)
        self._content = content_hashes(read)
        self._lengths, self._places = known.find(self._ids, self._content)
        self._new = np.flatnonzero(self._places < 0)
        self._encoding = Encoding([read[at] for at in self._new.tolist()], tokenizer)

    def tokenise(self) -> None:
        """Run the tokenizer; any thread may."""
        self._encoding.tokenise()

    def result(self) -> EncodedChunk:
        encoded, lengths = self._encoding.result(), self._lengths
        lengths[self._new] = encoded.lengths
        bad = [(self._rows[self._new[at]], why) for at, why in encoded.bad.items()]
        good = lengths > 0
        kept = np.flatnonzero(good).tolist()
        return EncodedChunk(
            rows=[self._rows[at] for at in kept],
            ids=[self._ids[at] for at in kept],
            lengths=lengths[good],
            content=self._content[good],
            places=self._places[good],
            tokens=encoded.tokens,
            mask=encoded.mask,
            bad=sorted(self._bad + bad, key=itemgetter(0)),
        )
