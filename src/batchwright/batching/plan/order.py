"""Two ways to hold an order of microbatches, behind one interface.

A `VirtualOrder` stores the samples sorted by length, the shapes of the batches and a seed; any
batch of any epoch follows from them, and every epoch mixes anew. Only the first batch of a packed
epoch takes longer than microseconds: then its rows are drawn. A
`MaterialisedOrder` stores the lists themselves, for orders that no such rule describes:
curricula and mixtures.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from batchwright import rng
from batchwright.batching.config import BatchingConfig, PadPolicy
from batchwright.batching.packing.patterns import Patterns
from batchwright.batching.plan import order_kernels as kernels
from batchwright.batching.plan.mixing import VARIANTS, mixed_patterns
from batchwright.errors import UnknownSample
from batchwright.jit import interpreted, quicker_without_numba
from batchwright.permutation import permute, unpermute

__all__ = ["Arrays", "MaterialisedOrder", "Order", "Place", "Rows", "VirtualOrder", "order_of"]

Arrays = dict[str, NDArray[np.generic]]
Drawn = tuple[
    NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int32], NDArray[np.int32]
]

_DRAW_US = 80.0
"""Microseconds to find one sample of a batch by kernels that are interpreted."""


class Rows(NamedTuple):
    """What a microbatch holds, as `MicrobatchSpec` describes it."""

    bucket_id: int
    max_len: int
    items: NDArray[np.int32]
    starts: NDArray[np.int32]
    lengths: NDArray[np.int32]
    row_offsets: NDArray[np.int32]


class Place(NamedTuple):
    """Where a piece of a sample stands in an epoch."""

    microbatch: int
    row: int
    segment: int
    start: int
    length: int


class Order(Protocol):
    """What a plan needs of its order."""

    kind: str

    @property
    def longest(self) -> int: ...

    def arrays(self) -> Arrays: ...

    def size(self, epoch: int) -> int:
        """Microbatches in the epoch."""
        ...

    def rows(self, epoch: int, index: int) -> Rows: ...

    def costs(
        self, epoch: int, first: int, stop: int, linear: int, quadratic: int
    ) -> NDArray[np.int64]:
        """linear * tokens + quadratic * tokens^2 of each microbatch; (1, 0) is padded tokens."""
        ...

    def useful_tokens(self, epoch: int) -> int: ...

    def places(self, epoch: int, item: int) -> list[Place]: ...


@dataclass(frozen=True)
class VirtualOrder:
    """Samples sorted by length, shapes and a seed."""

    config: BatchingConfig
    items: NDArray[np.int32]
    """Data rows, longest sample first."""
    starts: NDArray[np.int32]
    """First token of each piece; empty when no sample was split."""
    distinct: NDArray[np.int32]
    distinct_offsets: NDArray[np.int64]
    """Positions distinct_offsets[u] to distinct_offsets[u + 1] - 1 have length distinct[u]."""
    class_offsets: NDArray[np.int64]
    batch_start: NDArray[np.int64]
    batch_size: NDArray[np.int32]
    """Positions of each padded batch; empty for packed rows."""
    bin_starts: NDArray[np.int64]
    entry_offsets: NDArray[np.int64]
    entry_position: NDArray[np.int64]
    entry_count: NDArray[np.int32]
    """Patterns of packed rows (`packing.Patterns`); empty for padded layouts."""
    mixing: NDArray[np.int64]
    """How packed rows are drawn anew every epoch (`mixing`); empty if they are not."""

    kind = "virtual"
    _names = (
        "items",
        "starts",
        "distinct",
        "distinct_offsets",
        "class_offsets",
        "batch_start",
        "batch_size",
        "bin_starts",
        "entry_offsets",
        "entry_position",
        "entry_count",
        "mixing",
    )

    def __post_init__(self) -> None:
        # Derived once: both are read for every batch.
        buckets = np.full(len(self.class_offsets) - 1, -1, np.int32)
        widths = np.zeros(len(buckets), np.int32)
        if self.config.layout == "bucketed":
            spec = self.config.bucket_spec
            longest = np.searchsorted(self.distinct_offsets, self.class_offsets[:-1], "right") - 1
            buckets = spec.get_bucket_ids(self.distinct[longest]).astype(np.int32)
            if self.config.pad_policy is PadPolicy.PAD_TO_BUCKET:
                widths = np.array(
                    [self.config.get_pad_length(int(bucket), 0) for bucket in buckets], np.int32
                )
        object.__setattr__(self, "_buckets", buckets)
        object.__setattr__(self, "_widths", widths)
        object.__setattr__(self, "_drawn", {})

    _buckets: NDArray[np.int32] = None  # type: ignore[assignment]
    _widths: NDArray[np.int32] = None  # type: ignore[assignment]
    _drawn: dict[int, Drawn] = None  # type: ignore[assignment]
    """The packed rows of the epochs that were last asked for."""

    def arrays(self) -> Arrays:
        return {name: getattr(self, name) for name in self._names}

    @property
    def longest(self) -> int:
        return int(self.distinct[0])

    @property
    def rows_per_batch(self) -> int:
        """Rows of a packed microbatch."""
        return self.config.token_budget // self._pack_width

    @property
    def _pack_width(self) -> int:
        return self.config.get_pad_length(-1, self.config.pack_max_length)

    @property
    def _num_rows(self) -> int:
        """Rows of a packed epoch."""
        extra = int(self.mixing[0] * self.mixing[2]) if self.mixing.size else 0
        return int(self.bin_starts[-1]) + extra

    def size(self, epoch: int) -> int:
        if self.config.layout == "packed":
            return -(-self._num_rows // self.rows_per_batch)
        return len(self.batch_start)

    def rows(self, epoch: int, index: int) -> Rows:
        if self._quicker_without_numba(batches=1):
            with interpreted():
                return self._rows(epoch, index)
        return self._rows(epoch, index)

    def _rows(self, epoch: int, index: int) -> Rows:
        key = self._key("class", epoch)
        if self.config.layout == "packed":
            first = index * self.rows_per_batch
            count = min(self.rows_per_batch, self._num_rows - first)
            items, starts, lengths, row_offsets = kernels.draw_bins(
                first,
                count,
                self._key("bins", epoch),
                key,
                self.class_offsets,
                self.items,
                self.starts,
                self.distinct,
                *self._patterns(epoch),
            )
            return Rows(-1, self._pack_width, items, starts, lengths, row_offsets)
        batch = self._batch_at(epoch, index)
        start, size = int(self.batch_start[batch]), int(self.batch_size[batch])
        items, starts, lengths = kernels.draw_range(
            start,
            size,
            key,
            self.class_offsets,
            self.items,
            self.starts,
            self.distinct,
            self.distinct_offsets,
        )
        which = int(np.searchsorted(self.class_offsets, start, "right")) - 1
        width = int(self._widths[which])
        if not width:
            width = self.config.get_pad_length(-1, int(lengths.max()))
        row_offsets = np.arange(size + 1, dtype=np.int32)
        return Rows(int(self._buckets[which]), width, items, starts, lengths, row_offsets)

    def costs(
        self, epoch: int, first: int, stop: int, linear: int, quadratic: int
    ) -> NDArray[np.int64]:
        if self.config.layout == "packed":
            if not quadratic:
                left = self._num_rows - np.arange(first, stop) * self.rows_per_batch
                rows: NDArray[np.int64] = np.minimum(left, self.rows_per_batch)
                return rows * (linear * self._pack_width)
            with interpreted(self._quicker_without_numba(stop - first)):
                return kernels.pack_costs(
                    first,
                    stop,
                    self.rows_per_batch,
                    self._pack_width,
                    self._key("bins", epoch),
                    self.class_offsets,
                    self.distinct,
                    *self._patterns(epoch)[:4],
                    linear,
                    quadratic,
                )
        # Numpy is a hundred times quicker at this than the kernel interpreted.
        by_numpy = self._quicker_without_numba((stop - first) / 100)
        costs = kernels.range_costs_by_numpy if by_numpy else kernels.range_costs
        return costs(
            first,
            stop,
            self.config.interleave_buckets,
            self._key("batches", epoch),
            self._key("class", epoch),
            self.batch_start,
            self.batch_size,
            self.class_offsets,
            self._widths,
            self.config.width_multiple,
            self.distinct,
            self.distinct_offsets,
            linear,
            quadratic,
        )

    def useful_tokens(self, epoch: int) -> int:
        if self.config.drop_last:
            sizes = range(self.size(epoch))
            return sum(int(self.rows(epoch, index).lengths.sum()) for index in sizes)
        return int(self.distinct.astype(np.int64) @ np.diff(self.distinct_offsets))

    def places(self, epoch: int, item: int) -> list[Place]:
        origins = np.flatnonzero(self.items == item)
        entries = len(self.entry_position)
        with interpreted(quicker_without_numba(len(origins) * (200 + 2 * entries))):
            return self._places(epoch, origins)

    def _places(self, epoch: int, origins: NDArray[np.int64]) -> list[Place]:
        found = []
        for origin in origins:
            position = kernels.unsettle(int(origin), self.class_offsets, self._key("class", epoch))
            start = int(self.starts[origin]) if self.starts.size else 0
            length_class = np.searchsorted(self.distinct_offsets, origin, "right") - 1
            length = int(self.distinct[length_class])
            if self.config.layout == "packed":
                bin_, segment = kernels.find_bin(position, *self._patterns(epoch)[:4])
                slot = unpermute(bin_, self._num_rows, self._key("bins", epoch))
                index, row = divmod(slot, self.rows_per_batch)
                found.append(Place(index, row, segment, start, length))
                continue
            batch = int(np.searchsorted(self.batch_start, position, "right")) - 1
            row = position - int(self.batch_start[batch])
            # With drop_last a bucket's last samples of the epoch are in no batch.
            if batch >= 0 and row < self.batch_size[batch]:
                found.append(Place(self._index_of(epoch, batch), row, 0, start, length))
        return found

    def _patterns(self, epoch: int) -> Drawn:
        """The packed rows of an epoch, as `packing.Patterns` has them, and classes of entries."""
        variant = 0
        if self.mixing.size:
            variant = epoch if self.mixing[0] == 1 else epoch % VARIANTS
        found = self._drawn.get(variant)
        if found is None:
            rows = Patterns(
                self.bin_starts, self.entry_offsets, self.entry_position, self.entry_count
            )
            if self.mixing.size:
                rows = self._mixed(rows, variant)
            first = np.searchsorted(self.class_offsets, rows.entry_position, "right") - 1
            found = (*rows.arrays, first.astype(np.int32))
            for old in list(self._drawn)[: 1 - VARIANTS]:
                self._drawn.pop(old, None)
            self._drawn[variant] = found
        return found

    def _mixed(self, base: Patterns, variant: int) -> Patterns:
        sizes, first = np.unique(-self.config.room(self.distinct), return_index=True)
        return mixed_patterns(
            base,
            self.mixing,
            -sizes,
            np.append(self.distinct_offsets[first], self.distinct_offsets[-1]),
            self.config.limit,
            self.config.pack_max_segments,
            self._key("rows", variant),
        )

    def _batch_at(self, epoch: int, index: int) -> int:
        count = len(self.batch_start)
        if not self.config.interleave_buckets:
            return count - 1 - index
        return permute(index, count, self._key("batches", epoch))

    def _index_of(self, epoch: int, batch: int) -> int:
        count = len(self.batch_start)
        if not self.config.interleave_buckets:
            return count - 1 - batch
        return unpermute(batch, count, self._key("batches", epoch))

    def _quicker_without_numba(self, batches: float) -> bool:
        return quicker_without_numba(_DRAW_US * batches * len(self.items) / self.size(0))

    def _key(self, purpose: str, epoch: int) -> np.uint64:
        return _epoch_key(self.config.seed, purpose, epoch)


@dataclass(frozen=True)
class MaterialisedOrder:
    """The lists themselves, epoch after epoch."""

    config: BatchingConfig
    items: NDArray[np.int32]
    starts: NDArray[np.int32]
    lengths: NDArray[np.int32]
    row_offsets: NDArray[np.int64]
    """Segments of each matrix row, over the whole plan."""
    batch_rows: NDArray[np.int64]
    """Matrix rows of each microbatch."""
    batch_width: NDArray[np.int32]
    batch_bucket: NDArray[np.int32]
    epoch_batches: NDArray[np.int64]
    """Microbatches of each epoch."""

    kind = "materialised"
    _names = (
        "items",
        "starts",
        "lengths",
        "row_offsets",
        "batch_rows",
        "batch_width",
        "batch_bucket",
        "epoch_batches",
    )

    @classmethod
    def collect(cls, config: BatchingConfig, epochs: list[list[Rows]]) -> "MaterialisedOrder":
        """Store every microbatch of every epoch."""
        every = [rows for epoch in epochs for rows in epoch]
        segments = np.concatenate([np.diff(rows.row_offsets) for rows in every])
        order = cls(
            config=config,
            items=np.concatenate([rows.items for rows in every]),
            starts=np.concatenate([rows.starts for rows in every]),
            lengths=np.concatenate([rows.lengths for rows in every]),
            row_offsets=_offsets(segments),
            batch_rows=_offsets(np.array([len(rows.row_offsets) - 1 for rows in every])),
            batch_width=np.array([rows.max_len for rows in every], np.int32),
            batch_bucket=np.array([rows.bucket_id for rows in every], np.int32),
            epoch_batches=_offsets(np.array([len(epoch) for epoch in epochs])),
        )
        # Batches are views of these arrays; nobody may change the plan through one.
        for array in order.arrays().values():
            array.flags.writeable = False
        return order

    def arrays(self) -> Arrays:
        return {name: getattr(self, name) for name in self._names}

    @property
    def longest(self) -> int:
        return int(self.lengths.max())

    def size(self, epoch: int) -> int:
        if not 0 <= epoch < len(self.epoch_batches) - 1:
            raise UnknownSample(
                f"this plan lists epochs 0 to {len(self.epoch_batches) - 2}, got {epoch}; "
                f"build it with more epochs"
            )
        return int(self.epoch_batches[epoch + 1] - self.epoch_batches[epoch])

    def rows(self, epoch: int, index: int) -> Rows:
        self.size(epoch)
        batch = int(self.epoch_batches[epoch]) + index
        bounds = self.row_offsets[self.batch_rows[batch] : self.batch_rows[batch + 1] + 1]
        first, last = int(bounds[0]), int(bounds[-1])
        return Rows(
            int(self.batch_bucket[batch]),
            int(self.batch_width[batch]),
            self.items[first:last],
            self.starts[first:last],
            self.lengths[first:last],
            (bounds - first).astype(np.int32),
        )

    def costs(
        self, epoch: int, first: int, stop: int, linear: int, quadratic: int
    ) -> NDArray[np.int64]:
        base = int(self.epoch_batches[epoch])
        rows = self.batch_rows[base + first : base + stop + 1]
        width = self.batch_width[base + first : base + stop].astype(np.int64)
        tokens = np.diff(rows) * width
        if self.config.layout != "packed":
            return linear * tokens + quadratic * tokens * width
        bounds = self.row_offsets[rows]
        square = self.lengths[bounds[0] : bounds[-1]].astype(np.int64) ** 2
        squares: NDArray[np.int64] = np.add.reduceat(square, bounds[:-1] - bounds[0])
        return linear * tokens + quadratic * squares

    def useful_tokens(self, epoch: int) -> int:
        base = int(self.epoch_batches[epoch])
        rows = self.batch_rows[[base, base + self.size(epoch)]]
        first, last = (int(x) for x in self.row_offsets[rows])
        return int(self.lengths[first:last].sum(dtype=np.int64))

    def places(self, epoch: int, item: int) -> list[Place]:
        base = int(self.epoch_batches[epoch])
        rows = self.batch_rows[[base, base + self.size(epoch)]]
        first, last = (int(x) for x in self.row_offsets[rows])
        found = []
        for segment in first + np.flatnonzero(self.items[first:last] == item):
            row = int(np.searchsorted(self.row_offsets, segment, "right")) - 1
            batch = int(np.searchsorted(self.batch_rows, row, "right")) - 1
            found.append(
                Place(
                    batch - base,
                    row - int(self.batch_rows[batch]),
                    int(segment - self.row_offsets[row]),
                    int(self.starts[segment]),
                    int(self.lengths[segment]),
                )
            )
        return found


def order_of(kind: str, config: BatchingConfig, arrays: Arrays) -> Order:
    """The order that was stored as `arrays`; they are made read-only, as mapped files are."""
    for array in arrays.values():
        array.flags.writeable = False
    order = VirtualOrder if kind == "virtual" else MaterialisedOrder
    return order(config, **arrays)  # type: ignore[arg-type]


@lru_cache(maxsize=64)
def _epoch_key(seed: int, purpose: str, epoch: int) -> np.uint64:
    return np.uint64(rng.key(seed, f"plan/{purpose}", epoch))


def _offsets(counts: NDArray[np.integer]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])
