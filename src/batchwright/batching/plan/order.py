"""Two ways to hold an order of microbatches, behind one interface.

A `VirtualOrder` stores the samples sorted by length, the shapes of the batches and a seed; any
batch of any epoch follows from them, and every epoch mixes anew. Only the first batch of a packed
epoch takes longer than microseconds: then its rows are drawn. A
`MaterialisedOrder` stores the lists themselves, for orders that no such rule describes:
curricula and mixtures.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar, NamedTuple, Protocol

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

__all__ = [
    "MAX_EPOCHS",
    "Arrays",
    "Listing",
    "MaterialisedOrder",
    "Order",
    "Place",
    "Rows",
    "VirtualOrder",
    "order_of",
]

Arrays = dict[str, NDArray[np.generic]]
Drawn = tuple[
    NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int32], NDArray[np.int32]
]

MAX_EPOCHS = 2**31 - 1
"""Epochs are planned when they are asked for, so only a slip of the keyboard is refused here."""

SETTLED = 2**25
"""Up to so many samples are kept in the order of one packed epoch while it is listed: 128 MB."""

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


class Listing(NamedTuple):
    """Microbatches one after another, as arrays.

    Batch b has the matrix rows batch_rows[b] to batch_rows[b + 1] - 1, row r the segments
    row_offsets[r] to row_offsets[r + 1] - 1.
    """

    items: NDArray[np.int32]
    starts: NDArray[np.int32]
    lengths: NDArray[np.int32]
    row_offsets: NDArray[np.int64]
    batch_rows: NDArray[np.int64]
    batch_width: NDArray[np.int32]
    batch_bucket: NDArray[np.int32]

    @classmethod
    def of(cls, batches: Sequence[Rows]) -> "Listing":
        """Batches that were made one by one."""
        sizes = [np.diff(rows.row_offsets) for rows in batches]
        none = np.empty(0, np.int32)
        return cls(
            np.concatenate([none, *(rows.items for rows in batches)]),
            np.concatenate([none, *(rows.starts for rows in batches)]),
            np.concatenate([none, *(rows.lengths for rows in batches)]),
            _offsets(np.concatenate([none, *sizes])),
            _offsets(np.array([len(size) for size in sizes], np.int64)),
            np.array([rows.max_len for rows in batches], np.int32),
            np.array([rows.bucket_id for rows in batches], np.int32),
        )

    @classmethod
    def joined(cls, parts: Sequence["Listing"]) -> "Listing":
        """Some listings after each other."""
        empty = cls.of([])
        columns = zip(empty, *parts, strict=True)
        items, starts, lengths, _, _, width, bucket = (np.concatenate(c) for c in columns)
        rows = np.concatenate([np.diff(part.row_offsets) for part in (empty, *parts)])
        batches = np.concatenate([np.diff(part.batch_rows) for part in (empty, *parts)])
        return cls(items, starts, lengths, _offsets(rows), _offsets(batches), width, bucket)

    def rows(self, batch: int) -> Rows:
        """One of them."""
        return _rows_at(self, batch)


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

    def check(self, samples: int) -> None:
        """`ValueError` unless the arrays fit each other and name only these samples."""
        ...

    def prove_first(self, prove: Callable[[], None]) -> None: ...

    def prove(self) -> None: ...

    def size(self, epoch: int) -> int:
        """Microbatches in the epoch."""
        ...

    def rows(self, epoch: int, index: int) -> Rows: ...

    def listing(self, epoch: int, first: int, stop: int) -> Listing:
        """Microbatches first .. stop - 1 of an epoch, made together."""
        ...

    def costs(
        self, epoch: int, first: int, stop: int, linear: int, quadratic: int
    ) -> NDArray[np.int64]:
        """linear * tokens + quadratic * tokens^2 of each microbatch; (1, 0) is padded tokens."""
        ...

    def useful_tokens(self, epoch: int) -> int: ...

    def places(self, epoch: int, item: int) -> list[Place]: ...


class _Mapped:
    """An order whose arrays may be those of a file: they are proved before their first use."""

    TYPES: ClassVar[dict[str, str]]
    """The arrays by name, with their types."""
    _prove: Callable[[], None] | None = None

    def prove_first(self, prove: Callable[[], None]) -> None:
        """Have `prove`, which may raise, called before any array is used."""
        object.__setattr__(self, "_prove", prove)

    def prove(self) -> None:
        """Raise unless the arrays are as they were written and fit each other."""
        if self._prove is not None:
            self._prove()
            object.__setattr__(self, "_prove", None)

    def arrays(self) -> Arrays:
        self.prove()
        return {name: getattr(self, name) for name in self.TYPES}

    def __getstate__(self) -> dict[str, Any]:
        # What is sent to another process is a copy, and there is no file to check it with.
        self.prove()
        return {name: value for name, value in vars(self).items() if name != "_prove"}


@dataclass(frozen=True)
class VirtualOrder(_Mapped):
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
    TYPES: ClassVar[dict[str, str]] = {
        "items": "<i4",
        "starts": "<i4",
        "distinct": "<i4",
        "distinct_offsets": "<i8",
        "class_offsets": "<i8",
        "batch_start": "<i8",
        "batch_size": "<i4",
        "bin_starts": "<i8",
        "entry_offsets": "<i8",
        "entry_position": "<i8",
        "entry_count": "<i4",
        "mixing": "<i8",
    }

    def __post_init__(self) -> None:
        # The number of microbatches is told before the arrays are proved.
        _need(len(self.mixing) in (0, 3), "mixing has three numbers, or none")
        if self.config.layout == "packed":
            _need(len(self.bin_starts) > 1, "there are rows")
            _need(self.rows_per_batch >= 1, "a row fits the token budget")
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
        object.__setattr__(self, "_settled", {})

    _buckets: NDArray[np.int32] = None  # type: ignore[assignment]
    _widths: NDArray[np.int32] = None  # type: ignore[assignment]
    _drawn: dict[int, Drawn] = None  # type: ignore[assignment]
    """The packed rows of the epochs that were last asked for."""
    _settled: dict[np.uint64, NDArray[np.int32]] = None  # type: ignore[assignment]
    """The samples of every position in the last packed epoch that was listed."""

    def check(self, samples: int) -> None:
        """`ValueError` unless the kernels, which check no bounds, stay inside these arrays."""
        n = len(self.items)
        _need(0 < n < 2**31 and _within(self.items, 0, samples), "items are samples")
        _need(len(self.starts) in (0, n), "starts are one for each item, or none")
        _need(_within(self.starts, 0, 2**31), "starts are not negative")
        distinct, counts = self.distinct.astype(np.int64), np.diff(self.distinct_offsets)
        _need(_ascends(self.distinct_offsets, len(distinct), n), "distinct_offsets span the items")
        _need((counts > 0).all() and (np.diff(distinct) < 0).all(), "distinct lengths fall")
        _need(distinct[-1] >= 1, "lengths are at least 1")
        _need(
            _ascends(self.class_offsets, len(self.class_offsets) - 1, n), "classes span the items"
        )
        _need((np.diff(self.class_offsets) > 0).all(), "no class is empty")
        _need(int(distinct @ counts) < 2**62, "tokens can be counted")
        if self.config.layout == "packed":
            self._check_packed(n)
            return
        start, size = self.batch_start, self.batch_size.astype(np.int64)
        _need(len(start) == len(size) > 0, "batches have a start and a size")
        _need(_within(start, 0, n) and (size > 0).all(), "batches are of items")
        _need((start + size <= n).all(), "batches end with the items")

    def _check_packed(self, n: int) -> None:
        fits = int(self.config.room(self.distinct).max()) <= self.config.limit
        _need(fits, "the longest sample fits a row")
        same = np.array_equal(self.class_offsets, self.distinct_offsets)
        _need(same, "classes of packed rows are lengths")
        bins, position = self.bin_starts, self.entry_position
        intervals, count = len(bins) - 1, self.entry_count.astype(np.int64)
        _need(intervals > 0 and _ascends(bins, intervals, int(bins[-1])), "rows ascend")
        _need(0 < bins[-1] <= n and (np.diff(bins) > 0).all(), "rows hold items")
        _need(_ascends(self.entry_offsets, intervals, len(position)), "entries span the rows")
        _need(len(count) == len(position) and (count > 0).all(), "entries have a count")
        own = np.repeat(np.diff(bins), np.diff(self.entry_offsets))
        _need((np.diff(self.entry_offsets) > 0).all(), "no row is empty")
        # Neither product overflows: a count is below 2**31, and so are the rows.
        taken = own * count
        _need(_within(position, 0, n) and (taken <= n - position).all(), "entries are of items")
        first = np.argsort(position)
        ends = np.append(0, (position + taken)[first])
        tiles = np.array_equal(ends[:-1], position[first]) and ends[-1] == n
        _need(tiles, "each item stands in one row")
        _need(int(self._row_tokens().max()) <= self._pack_width, "rows fit their width")
        if self.mixing.size:
            copies, rows, extra = (int(x) for x in self.mixing)
            _need(1 <= copies <= n and min(rows, extra) >= 0, "mixing is of rows")
            _need(rows + extra <= n // copies, "no row is empty")
            _need(rows * copies + n % copies == int(bins[-1]), "mixing has as many rows")

    def _row_tokens(self) -> NDArray[np.int64]:
        """The most tokens that a row of each interval can have."""
        offsets = self.distinct_offsets
        room = self.config.room(self.distinct).astype(np.int64)
        before = np.concatenate([np.zeros(1, np.int64), np.cumsum(room * np.diff(offsets))])

        def until(position: NDArray[np.int64]) -> NDArray[np.int64]:
            """Tokens of all items before a position."""
            which = np.minimum(np.searchsorted(offsets, position, "right") - 1, len(room) - 1)
            found: NDArray[np.int64] = before[which] + (position - offsets[which]) * room[which]
            return found

        tokens = until(self.entry_position + self.entry_count) - until(self.entry_position)
        # The first row of an interval has its longest items, of each entry those in front.
        sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(tokens)])
        most: NDArray[np.int64] = sums[self.entry_offsets[1:]] - sums[self.entry_offsets[:-1]]
        return most

    @property
    def longest(self) -> int:
        return int(self.distinct[0])

    @property
    def rows_per_batch(self) -> int:
        """Rows of a packed microbatch."""
        return self.config.token_budget // self._pack_width

    @cached_property
    def _pack_width(self) -> int:
        return self.config.get_pad_length(-1, self.config.pack_max_length)

    @cached_property
    def _num_rows(self) -> int:
        """Rows of a packed epoch."""
        extra = int(self.mixing[0] * self.mixing[2]) if self.mixing.size else 0
        return int(self.bin_starts[-1]) + extra

    def size(self, epoch: int) -> int:
        if self.config.layout == "packed":
            return -(-self._num_rows // self.rows_per_batch)
        return len(self.batch_start)

    def rows(self, epoch: int, index: int) -> Rows:
        self.prove()
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

    def listing(self, epoch: int, first: int, stop: int) -> Listing:
        self.prove()
        if self._quicker_without_numba(stop - first):
            with interpreted():
                return Listing.of([self._rows(epoch, index) for index in range(first, stop)])
        if self.config.layout == "packed":
            return self._packed(epoch, first, stop)
        items, starts, lengths, rows, which = kernels.draw_ranges(
            first,
            stop,
            self.config.interleave_buckets,
            self._key("batches", epoch),
            self._key("class", epoch),
            self.batch_start,
            self.batch_size,
            self.class_offsets,
            self.items,
            self.starts,
            self.distinct,
            self.distinct_offsets,
        )
        align = self.config.width_multiple
        longest = -(-np.maximum.reduceat(lengths, rows[:-1]) // align) * align
        widths = np.where(self._widths[which] > 0, self._widths[which], longest).astype(np.int32)
        offsets = np.arange(len(items) + 1)
        return Listing(items, starts, lengths, offsets, rows, widths, self._buckets[which])

    def _packed(self, epoch: int, first: int, stop: int) -> Listing:
        each, key = self.rows_per_batch, self._key("class", epoch)
        begin, end = first * each, min(stop * each, self._num_rows)
        own = self.class_offsets, self.items, self.starts, self.distinct
        arrays: tuple[Any, ...] = (*own, *self._patterns(epoch))
        slots = begin, end - begin, self._key("bins", epoch)
        made: tuple[NDArray[Any], ...]
        if len(self.items) <= SETTLED:
            if key not in self._settled:
                self._settled.clear()
                self._settled[key] = kernels.settle_all(self.class_offsets, key)
            made = kernels.draw_settled_bins(*slots, self._settled[key], *arrays)
        else:
            made = kernels.draw_bins(*slots, key, *arrays)
        items, starts, lengths, row_offsets = made
        return Listing(
            items,
            starts,
            lengths,
            row_offsets.astype(np.int64),
            np.minimum(np.arange(stop - first + 1) * each, end - begin),
            np.full(stop - first, self._pack_width, np.int32),
            np.full(stop - first, -1, np.int32),
        )

    def costs(
        self, epoch: int, first: int, stop: int, linear: int, quadratic: int
    ) -> NDArray[np.int64]:
        self.prove()
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
        self.prove()
        whole = int(self.distinct.astype(np.int64) @ np.diff(self.distinct_offsets))
        return whole - int(self.left_out(epoch)[1].sum())

    def left_out(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Positions that are in no batch of the epoch, by `drop_last`, and their lengths."""
        self.prove()
        none = np.zeros(0, np.int64)
        if not self.config.drop_last or self.config.layout == "packed":
            return none, none
        first = np.append(0, self.batch_start + self.batch_size)
        last = np.append(self.batch_start, len(self.items))
        gaps = [(int(first[k]), int(last[k])) for k in np.flatnonzero(last > first)]
        arrays = (self.class_offsets, self.items, self.starts, self.distinct, self.distinct_offsets)
        key = self._key("class", epoch)
        with interpreted(quicker_without_numba(sum(b - a for a, b in gaps))):
            drawn = [kernels.draw_range(a, b - a, key, *arrays)[2] for a, b in gaps]
        positions = np.concatenate([none, *(np.arange(a, b) for a, b in gaps)])
        return positions, np.concatenate([none, *drawn]).astype(np.int64)

    def places(self, epoch: int, item: int) -> list[Place]:
        self.prove()
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
class MaterialisedOrder(_Mapped):
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
    TYPES: ClassVar[dict[str, str]] = {
        "items": "<i4",
        "starts": "<i4",
        "lengths": "<i4",
        "row_offsets": "<i8",
        "batch_rows": "<i8",
        "batch_width": "<i4",
        "batch_bucket": "<i4",
        "epoch_batches": "<i8",
    }

    @classmethod
    def collect(cls, config: BatchingConfig, epochs: Sequence[Listing]) -> "MaterialisedOrder":
        """Store every microbatch of every epoch."""
        batches = np.array([len(epoch.batch_width) for epoch in epochs])
        order = cls(config, *Listing.joined(epochs), epoch_batches=_offsets(batches))
        # Batches are views of these arrays; nobody may change the plan through one.
        for array in order.arrays().values():
            array.flags.writeable = False
        return order

    def check(self, samples: int) -> None:
        """`ValueError` unless these arrays fit each other."""
        n, rows, batches = len(self.items), len(self.row_offsets) - 1, len(self.batch_width)
        _need(0 < n < 2**31 and _within(self.items, 0, samples), "items are samples")
        _need(len(self.starts) == len(self.lengths) == n, "items have a start and a length")
        _need(_within(self.starts, 0, 2**31) and _within(self.lengths, 1, 2**31), "so they do")
        _need(_ascends(self.row_offsets, rows, n), "rows span the items")
        _need(_ascends(self.batch_rows, batches, rows), "batches span the rows")
        sizes = np.diff(self.row_offsets), np.diff(self.batch_rows)
        _need(all((part > 0).all() for part in sizes), "no row and no batch is empty")
        _need(len(self.batch_bucket) == batches, "batches have a bucket")
        epochs = len(self.epoch_batches) - 1
        _need(_ascends(self.epoch_batches, epochs, batches), "epochs span the batches")
        width = np.repeat(self.batch_width.astype(np.int64), sizes[1])
        room = self.config.room(self.lengths).astype(np.int64)
        tokens = np.add.reduceat(room, self.row_offsets[:-1])
        _need((tokens <= width).all(), "rows fit their width")

    @property
    def longest(self) -> int:
        self.prove()
        return int(self.lengths.max())

    def size(self, epoch: int) -> int:
        if not 0 <= epoch < len(self.epoch_batches) - 1:
            raise UnknownSample(
                f"this plan lists epochs 0 to {len(self.epoch_batches) - 2}, got {epoch}; "
                f"build it with more epochs"
            )
        return int(self.epoch_batches[epoch + 1] - self.epoch_batches[epoch])

    def rows(self, epoch: int, index: int) -> Rows:
        self.prove()
        self.size(epoch)
        return _rows_at(self, int(self.epoch_batches[epoch]) + index)

    def listing(self, epoch: int, first: int, stop: int) -> Listing:
        self.prove()
        self.size(epoch)
        base = int(self.epoch_batches[epoch])
        batches = slice(base + first, base + stop)
        batch_rows = self.batch_rows[base + first : base + stop + 1]
        row_offsets = self.row_offsets[batch_rows[0] : batch_rows[-1] + 1]
        segments = slice(int(row_offsets[0]), int(row_offsets[-1]))
        return Listing(
            self.items[segments],
            self.starts[segments],
            self.lengths[segments],
            row_offsets - row_offsets[0],
            batch_rows - batch_rows[0],
            self.batch_width[batches],
            self.batch_bucket[batches],
        )

    def costs(
        self, epoch: int, first: int, stop: int, linear: int, quadratic: int
    ) -> NDArray[np.int64]:
        self.prove()
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
        self.prove()
        base = int(self.epoch_batches[epoch])
        rows = self.batch_rows[[base, base + self.size(epoch)]]
        first, last = (int(x) for x in self.row_offsets[rows])
        return int(self.lengths[first:last].sum(dtype=np.int64))

    def places(self, epoch: int, item: int) -> list[Place]:
        self.prove()
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
    orders = {order.kind: order for order in (VirtualOrder, MaterialisedOrder)}
    order: Order = orders[kind](config, **arrays)  # type: ignore[arg-type]
    return order


def _rows_at(listed: "Listing | MaterialisedOrder", batch: int) -> Rows:
    bounds = listed.row_offsets[listed.batch_rows[batch] : listed.batch_rows[batch + 1] + 1]
    first, last = int(bounds[0]), int(bounds[-1])
    return Rows(
        int(listed.batch_bucket[batch]),
        int(listed.batch_width[batch]),
        listed.items[first:last],
        listed.starts[first:last],
        listed.lengths[first:last],
        (bounds - first).astype(np.int32),
    )


def _need(holds: bool | np.bool_, what: str) -> None:
    if not holds:
        raise ValueError(f"it does not hold that {what}")


def _within(values: NDArray[Any], least: int, stop: int) -> bool:
    return not values.size or bool(least <= values.min() and values.max() < stop)


def _ascends(offsets: NDArray[Any], count: int, stop: int) -> bool:
    """Whether these are the bounds of `count` consecutive parts of [0, stop)."""
    if count < 0 or len(offsets) != count + 1 or offsets[0] != 0 or offsets[-1] != stop:
        return False
    return bool((offsets[1:] >= offsets[:-1]).all())


@lru_cache(maxsize=64)
def _epoch_key(seed: int, purpose: str, epoch: int) -> np.uint64:
    return np.uint64(rng.key(seed, f"plan/{purpose}", epoch))


def _offsets(counts: NDArray[np.integer]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])
