"""Best-fit-decreasing on a length histogram: bins as a few repeated patterns."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchwright.batching.packing import kernels
from batchwright.errors import BadLength, ConfigError, OversizedSample
from batchwright.jit import interpreted, quicker_without_numba

__all__ = [
    "MAX_CAPACITY",
    "Patterns",
    "check_capacity",
    "oversized",
    "pack_histogram",
    "patterns_of",
]

MAX_CAPACITY = 2**24
"""The longest pack. Tables have one slot for every length up to here."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Patterns:
    """Bins over *positions* (ranks with the longest first), written as few repeated patterns.

    Bin b of interval i (`bin_starts[i] <= b < bin_starts[i + 1]`) holds, for each entry e in
    `entry_offsets[i]..entry_offsets[i + 1] - 1`, the `entry_count[e]` positions from
    `entry_position[e] + (b - bin_starts[i]) * entry_count[e]` on. Every position is in exactly one
    bin, and the size of the arrays depends on the shape of the histogram, not on the number of
    items.

    >>> patterns = pack_histogram(np.array([0, 0, 0, 2, 1, 1]), capacity=8)
    >>> patterns
    Patterns(2 bins, 4 positions, 2 intervals)
    >>> offsets, positions = patterns.expand(np.arange(4, dtype=np.int32))
    >>> [bin.tolist() for bin in np.split(positions, offsets[1:-1])]
    [[0, 2], [1, 3]]
    """

    bin_starts: NDArray[np.int64]
    entry_offsets: NDArray[np.int64]
    entry_position: NDArray[np.int64]
    entry_count: NDArray[np.int32]

    @property
    def arrays(
        self,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
        """What the kernels take."""
        return self.bin_starts, self.entry_offsets, self.entry_position, self.entry_count

    @property
    def num_bins(self) -> int:
        return int(self.bin_starts[-1])

    @property
    def num_positions(self) -> int:
        per_bin = np.add.reduceat(np.append(self.entry_count, 0), self.entry_offsets[:-1])
        return int((per_bin * np.diff(self.bin_starts)).sum())

    def expand(self, order: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """All bins written out: bin b holds `items[offsets[b]:offsets[b + 1]]`.

        `order[p]` is the item at position p.
        """
        return kernels.expand(*self.arrays, order)

    def __repr__(self) -> str:
        return (
            f"Patterns({self.num_bins:,} bins, {self.num_positions:,} positions, "
            f"{len(self.bin_starts) - 1:,} intervals)"
        )


def pack_histogram(
    hist: NDArray[np.int64], capacity: int, max_segments: int | None = None
) -> Patterns:
    """Best-fit-decreasing of `hist[l]` items of each length l, at a cost that does not grow with n.

    The bins are those of item-by-item best-fit-decreasing, where among equally tight bins those
    changed last go first. A bin that holds `max_segments` items is closed.

    >>> hist = np.zeros(2049, np.int64)
    >>> hist[[1500, 500, 40]] = 1_000_000_000
    >>> pack_histogram(hist, 2048)
    Patterns(1,000,000,000 bins, 3,000,000,000 positions, 1 intervals)
    """
    check_capacity(capacity, max_segments)
    over = np.flatnonzero(hist[capacity + 1 :])
    if over.size:
        raise oversized(int(hist[capacity + 1 :].sum()), int(capacity + 1 + over[-1]), capacity)
    if hist.size and hist[0]:
        raise BadLength(f"lengths must be at least 1, got {hist[0]:,} of 0; drop empty samples")
    hist = np.ascontiguousarray(hist, np.int64)
    nothing = np.empty((0, 4), np.int64)
    most = max_segments or kernels.UNLIMITED
    with interpreted(quicker_without_numba(50 * np.count_nonzero(hist) + 0.2 * hist.size)):
        steps = kernels.best_fit_decreasing(hist, capacity, most, nothing)
        taken = steps[:, 1] * steps[:, 2]
        return patterns_of(steps, np.cumsum(taken) - taken)


def patterns_of(steps: NDArray[np.int64], position: NDArray[np.int64]) -> Patterns:
    """Steps (first bin, bins, items per bin), each taking positions from its own on."""
    starts, stops = steps[:, 0], steps[:, 0] + steps[:, 1]
    bin_starts = np.unique(np.concatenate((starts, stops, np.zeros(1, np.int64))))
    first, last = np.searchsorted(bin_starts, starts), np.searchsorted(bin_starts, stops)
    return Patterns(bin_starts, *kernels.spread(bin_starts, steps, first, last, position))


def check_capacity(capacity: int, max_segments: int | None) -> None:
    """Refuse a capacity or a limit on items that no bin can have."""
    if not 1 <= capacity <= MAX_CAPACITY:
        raise ConfigError(f"max_length must be between 1 and {MAX_CAPACITY:,}, got {capacity:,}")
    if max_segments is not None and max_segments < 1:
        raise ConfigError(f"max_segments must be at least 1 or None, got {max_segments}")


def oversized(count: int, longest: int, capacity: int) -> OversizedSample:
    """The error for `count` lengths over the capacity."""
    are = "length is" if count == 1 else "lengths are"
    return OversizedSample(
        f"{count:,} {are} over max_length={capacity:,}, the longest {longest:,}; "
        f"raise max_length to {longest:,}, or truncate, split or skip them first"
    )
