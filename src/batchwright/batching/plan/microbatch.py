"""What plans and samplers hand out: microbatches, the steps they make, where a sample stands."""

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from batchwright.data.ids import Ids

__all__ = ["BatchSpec", "MicrobatchSpec", "Placement", "Pulled", "Step"]

T = TypeVar("T")


@dataclass(frozen=True)
class MicrobatchSpec:
    """Which samples stand where in one microbatch.

    The matrix has `batch_size` rows of `max_len` tokens. Segment s is `lengths[s]` tokens of
    data row `items[s]` from token `starts[s]` on. Matrix row r holds the segments
    `row_offsets[r]` to `row_offsets[r + 1] - 1`: one in a padded layout, several in a packed one.
    """

    epoch: int
    index: int
    """Place in the epoch, counted over all ranks."""
    bucket_id: int
    """The bucket of a bucketed layout, else -1."""
    max_len: int
    items: NDArray[np.int32]
    starts: NDArray[np.int32]
    lengths: NDArray[np.int32]
    row_offsets: NDArray[np.int32]
    ids: Ids = field(repr=False)
    cut_at: int | None = None
    """Pieces of this length may be cut from a longer sample; None: every sample is whole."""
    weight: float = 1.0
    """0 for a filler that evens out the ranks: run it, but count none of its loss."""
    segment_multiple: int = 1
    """Every segment is padded to a multiple of this."""
    costs: NDArray[np.int32] | None = None
    """The part of `lengths` that is not in the tokens of the samples, such as image tokens."""

    @property
    def tokens(self) -> NDArray[np.int32]:
        """Tokens of each segment: its length without what it costs beside them."""
        return self.lengths if self.costs is None else self.lengths - self.costs

    @property
    def batch_size(self) -> int:
        """Matrix rows."""
        return len(self.row_offsets) - 1

    @cached_property
    def token_count(self) -> int:
        """Useful tokens."""
        return int(self.lengths.sum(dtype=np.int64))

    @property
    def padded_tokens(self) -> int:
        """Tokens of the whole matrix, useful or not."""
        return self.batch_size * self.max_len

    @property
    def efficiency(self) -> float:
        return self.token_count / self.padded_tokens

    @property
    def packed(self) -> bool:
        """Whether some row may hold several samples; such a row must be kept apart by segment."""
        return len(self.items) != self.batch_size

    @property
    def samples(self) -> tuple[str, ...]:
        """The ids, row by row; a sample that was split stands here once for each piece."""
        return tuple(self.ids.take(self.items))

    @property
    def packs(self) -> tuple[tuple[str, ...], ...] | None:
        """The ids of each row if rows hold several samples, else None."""
        if not self.packed:
            return None
        ids = self.samples
        bounds = self.row_offsets.tolist()
        return tuple(ids[a:b] for a, b in pairwise(bounds))

    def as_filler(self) -> "MicrobatchSpec":
        """The same shape with weight 0."""
        return replace(self, weight=0.0)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MicrobatchSpec):
            return NotImplemented
        mine = (self.epoch, self.index, self.bucket_id, self.max_len, self.weight)
        theirs = (other.epoch, other.index, other.bucket_id, other.max_len, other.weight)
        return (
            mine == theirs
            and np.array_equal(self.starts, other.starts)
            and np.array_equal(self.lengths, other.lengths)
            and np.array_equal(self.tokens, other.tokens)
            and np.array_equal(self.row_offsets, other.row_offsets)
            and self.samples == other.samples
        )

    def __hash__(self) -> int:
        return hash((self.epoch, self.index, self.samples))

    def __repr__(self) -> str:
        weight = "" if self.weight else ", filler"
        return (
            f"MicrobatchSpec(epoch={self.epoch}, index={self.index}, {len(self.items)} samples, "
            f"{self.batch_size} x {self.max_len}, {self.efficiency:.1%} useful{weight})"
        )


@dataclass(frozen=True, slots=True)
class BatchSpec:
    """One batch of the sampler, by sample ids."""

    sample_ids: tuple[str, ...]
    bucket_id: int
    max_length: int
    """Width every sample is padded to."""
    token_count: int
    """Useful tokens."""

    @property
    def batch_size(self) -> int:
        return len(self.sample_ids)

    @property
    def padded_token_count(self) -> int:
        return self.batch_size * self.max_length

    @property
    def efficiency(self) -> float:
        return self.token_count / self.padded_token_count


@dataclass(frozen=True, slots=True)
class Step:
    """The microbatches of one rank in one optimizer step; every rank has as many."""

    epoch: int
    first: int
    stop: int
    """The step takes microbatches first .. stop - 1 of the epoch, over all ranks."""
    microbatches: tuple[MicrobatchSpec, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a sample, or a piece of it, stands in one epoch."""

    epoch: int
    microbatch: int
    row: int
    segment: int
    start: int
    length: int
    rank: int | None
    """The rank that reads it, on a sharded plan."""


class Pulled(Generic[T]):
    """Something to iterate over with `for` or with `async for`, as often as wanted."""

    def __init__(self, make: Callable[[], Iterator[T]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[T]:
        return self._make()

    async def __aiter__(self) -> AsyncIterator[T]:
        for value in self._make():
            yield value
