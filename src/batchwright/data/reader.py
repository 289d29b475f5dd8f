"""Samples of a plan: from the token store of their data, else tokenised when they are needed."""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from batchwright.data.entries import UNKNOWN, hash_of, mixture_hash
from batchwright.data.ids import Ids
from batchwright.data.rows import Row
from batchwright.data.rows.sample import (
    Sample,
    content_hash,
    content_hashes,
    encode_row,
    row_id,
)
from batchwright.data.rows.source import Source, row_ranges
from batchwright.data.tokenizers import Tokenizer
from batchwright.data.tokens import TokenStore, find_store
from batchwright.errors import BadRow, Mismatch

__all__ = ["PlanRows", "other_rows", "sample_reader"]

BLOCK_ROWS = 4096


def sample_reader(
    sources: Sequence[Source], tokenizer: Tokenizer, ids: Ids, names: Sequence[str] = ()
) -> Callable[[int], Sample]:
    """A function that gives a sample by its number in the plan.

    Data that `data lengths build` or a run has tokenised with this tokenizer is read from its
    token store; any other row is tokenised each time it is read. Samples are looked up by id, so
    rows that were skipped, moved or added since the lengths were measured do not shift the
    others. For a mixture of several sources, `names` are the prefixes of their ids.
    """
    return PlanRows(sources, ids, names, tokenizer).sample


class PlanRows:
    """The rows of a plan's samples: where they stand, what they hold, their tokens.

    Only ids and offsets are held in memory, as arrays.
    """

    def __init__(
        self,
        sources: Sequence[Source | TokenStore],
        ids: Ids,
        names: Sequence[str] = (),
        tokenizer: Tokenizer | None = None,
    ) -> None:
        if names and len(names) != len(sources):
            raise Mismatch(
                f"the plan mixes {len(names)} sources ({', '.join(names)}), {len(sources)} are "
                f"given; give one data set for each, in this order"
            )
        self._ids, self._names, self._tokenizer = ids, names, tokenizer
        # Several without names number their rows over all of them, unlike the store of each.
        stored = tokenizer is not None and (names or len(sources) == 1)
        self.parts = [_stored(s, tokenizer) if stored and tokenizer else s for s in sources]
        """Each source, or its token store, which stands for it: to find it takes long."""
        self._starts = np.array([0, *accumulate(map(len, self.parts))])
        self._places = self._found(ids)
        self.content: NDArray[np.uint64] | None = None
        """Of each sample, once that of all was found to be what the plan was built from."""

    def place(self, item: int) -> tuple[int, int]:
        """The source and the row of a sample."""
        part, entry = self._entry(item)
        rows = self.parts[part]
        if not isinstance(rows, TokenStore) or rows.entries.rows is None:
            return part, entry
        return part, int(rows.entries.rows[entry])

    def sample(self, item: int) -> Sample:
        """The tokens of a sample."""
        part, entry = self._entry(item)
        source = self.parts[part]
        if isinstance(source, TokenStore):
            found = source(entry)
            return Sample(found.input_ids, found.loss_mask, self._ids[item])
        assert self._tokenizer is not None
        row = source[entry]
        if self.content is not None and content_hash(row) != self.content[item]:
            raise Mismatch(
                f"{source.where(entry)} has changed since this run began; start again with the "
                f"data that the plan was built from"
            )
        try:
            return encode_row(row, self._tokenizer, self._ids[item])
        except BadRow as error:
            raise BadRow(f"{source.where(entry)}: {error}") from None

    def check(self, planned: str) -> None:
        """Refuse rows that are not those of which the plan has this `dataset_hash`.

        Equal if no row of a sample has changed since it was measured; rows that were added or
        moved do not matter. A plan that knows no hash of its data fits any. Rows that are not in
        a token store are compared once more whenever they are read.
        """
        if planned == UNKNOWN:
            return
        found = self._contents()
        seen = self._hash(found)
        if seen == planned:
            if not all(isinstance(part, TokenStore) for part in self.parts):
                self.content = found
            return
        # Lengths that were added by hand have no content; a plan may hold some of the samples.
        if planned not in (self._hash(np.zeros_like(found)), self._hash_of_stores()):
            raise other_rows(planned, seen)

    def _hash(self, content: NDArray[np.uint64]) -> str:
        """What a plan of these samples has as `dataset_hash` if this is their content."""
        # Samples of a mixture stand source by source.
        counts = np.bincount(self._parts_of(self._places), minlength=len(self._names))
        return hash_of(self._ids, content, [*zip(self._names, counts.tolist(), strict=False)])

    def _hash_of_stores(self) -> str | None:
        """The hash of all samples of the token stores: what a plan has that holds some of them."""
        hashes = [p.lengths.dataset_hash for p in self.parts if isinstance(p, TokenStore)]
        if len(hashes) < len(self.parts):
            return None
        if self._names:
            return mixture_hash(dict(zip(self._names, hashes, strict=True)))
        return hashes[0] if len(hashes) == 1 else None

    def _contents(self) -> NDArray[np.uint64]:
        """The content hash of each sample, as its row is now."""
        if (self._places < 0).any():
            self._entry(int((self._places < 0).argmax()))
        content = np.empty(len(self._places), np.uint64)
        of_item = self._parts_of(self._places)
        for number, source in enumerate(self.parts):
            items = np.flatnonzero(of_item == number)
            entries = self._places[items] - self._starts[number]
            if isinstance(source, TokenStore):
                content[items] = source.entries.content[entries]
            else:
                content[items] = _hashed(source, entries)
        return content

    def _parts_of(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.searchsorted(self._starts, places, side="right") - 1

    def _entry(self, item: int) -> tuple[int, int]:
        at = int(self._places[item])
        if at < 0:
            raise Mismatch(
                f"sample {self._ids[item]!r} of the plan is not in "
                f"{', '.join(part.name for part in self.parts)}; give the data it was built from"
            )
        part = int(np.searchsorted(self._starts, at, side="right")) - 1
        return part, at - int(self._starts[part])

    def _found(self, ids: Ids) -> NDArray[np.int64]:
        total = int(self._starts[-1])
        if len(self.parts) == 1 and not self._names:
            (source,) = self.parts
            if isinstance(source, TokenStore):
                return source.entries.ids.places(ids)
            if ids.arrays is None:
                if total < len(ids):
                    raise Mismatch(
                        f"the plan has {len(ids):,} samples, {source.name} only has {total:,} "
                        f"rows; give the data it was built from"
                    )
                return np.arange(len(ids))
        return Ids.of_blocks(self._blocks()).places(ids)

    def _blocks(self) -> Iterator[list[str]]:
        """The ids of all rows as the plan spells them, in the order of `_places`."""
        for part, source in enumerate(self.parts):
            prefix = f"{self._names[part]}/" if self._names else ""
            if isinstance(source, TokenStore):
                for at in range(0, len(source), BLOCK_ROWS):
                    items = range(at, min(at + BLOCK_ROWS, len(source)))
                    yield [prefix + id for id in source.entries.ids.take(items)]
                continue
            before = 0 if self._names else int(self._starts[part])
            for at, stop in row_ranges(source, BLOCK_ROWS):
                rows = source.chunk(at, stop).rows()
                yield [prefix + _name(row, str(before + item)) for item, row in rows]


def other_rows(planned: str, seen: str) -> Mismatch:
    """The refusal of rows that are not those that a plan was built from."""
    return Mismatch(
        f"the plan was built for data {planned}, these rows are {seen}: some have changed; "
        f"measure and plan again, or give the data it was built from"
    )


def _hashed(source: Source, entries: NDArray[np.int64]) -> NDArray[np.uint64]:
    """The content hashes of these rows, all of which must be good."""
    wanted = np.zeros(len(source), bool)
    wanted[entries] = True
    content = np.zeros(len(source), np.uint64)
    for start, stop in row_ranges(source, BLOCK_ROWS):
        if not wanted[start:stop].any():
            continue
        rows: list[Row] = []
        for item, row in source.chunk(start, stop).rows():
            if not wanted[item]:
                continue
            if isinstance(row, BadRow):
                raise BadRow(f"{source.where(item)}: {row}")
            rows.append(row)
        content[start:stop][wanted[start:stop]] = content_hashes(rows)
    return content[entries]


def _stored(source: Source | TokenStore, tokenizer: Tokenizer) -> Source | TokenStore:
    return source if isinstance(source, TokenStore) else find_store(source, tokenizer) or source


def _name(row: object, number: str) -> str:
    """The id of a row: its own, or its number."""
    try:
        # A bad row was not a sample when lengths were measured either, so nobody looks for it.
        return row_id(row, number) if isinstance(row, dict) else number
    except BadRow:
        return number
