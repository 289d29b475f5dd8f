"""A given number of bins with about equal costs, none of them over its capacity."""

import numpy as np
from numpy.typing import NDArray

from batchwright.batching.packing.bins import pack_lengths
from batchwright.errors import ConfigError
from batchwright.jit import kernel

__all__ = ["balance_bins", "fewest_bins"]

_NO_LIMIT = 2**62


def fewest_bins(lengths: NDArray[np.int64], capacity: int) -> int:
    """The smallest number of bins into which items of these lengths were found to fit.

    Never above best-fit-decreasing, and below it where levelling the bins finds fewer.

    >>> fewest_bins(np.array([10, 9, 8, 6, 5, 4]), capacity=22)
    2
    """
    if not lengths.any():
        return 1
    packing = pack_lengths(lengths[lengths > 0], capacity)
    for bins in range(packing.lower_bound, packing.num_bins):
        if _fits(lengths, _levelled(lengths, bins), capacity):
            return bins
    return packing.num_bins


def balance_bins(
    costs: NDArray[np.int64],
    bins: int,
    lengths: NDArray[np.int64] | None = None,
    capacity: int = _NO_LIMIT,
) -> NDArray[np.int32]:
    """The bin of every item: none is empty, none over `capacity`, the largest cost kept small.

    `lengths` count against the capacity; without them nothing does. There is a result for every
    number of bins from `fewest_bins` to the number of items. Deterministic.

    Raises:
        ConfigError: fewer items than bins, or more tokens than were found to fit.

    >>> balance_bins(np.array([9, 1, 1, 9]), 2).tolist()
    [0, 0, 1, 1]
    """
    if not 1 <= bins <= len(costs):
        raise ConfigError(f"bins must be 1 to the number of items, {len(costs)}, got {bins}")
    if lengths is None:
        lengths = np.zeros_like(costs)
    bin_of = _heaviest_first(costs, lengths, bins, capacity)
    if not _fits(lengths, bin_of, capacity):
        bin_of = _levelled(lengths, bins)
    if not _fits(lengths, bin_of, capacity):
        bin_of = _packed(lengths, capacity)
        if bin_of.max() >= bins:
            raise ConfigError(f"{len(costs)} items do not fit into {bins} bins of {capacity}")
    _fill_empty(costs, bin_of, bins)
    return _improve(costs, lengths, bin_of, bins, capacity)


def _fits(lengths: NDArray[np.int64], bin_of: NDArray[np.int32], capacity: int) -> bool:
    # Sums of float64 are exact up to 2**53 tokens.
    return bool(np.bincount(bin_of, lengths).max() <= capacity)


def _levelled(lengths: NDArray[np.int64], bins: int) -> NDArray[np.int32]:
    """About equal lengths in all bins, whatever the costs."""
    free = np.zeros_like(lengths)
    start = _heaviest_first(lengths, free, bins, _NO_LIMIT)
    return _improve(lengths, free, start, bins, _NO_LIMIT)


def _packed(lengths: NDArray[np.int64], capacity: int) -> NDArray[np.int32]:
    """Best-fit-decreasing; what has no length lies in bin 0."""
    bin_of = np.zeros(len(lengths), np.int32)
    (rows,) = np.nonzero(lengths)
    packing = pack_lengths(lengths[rows], capacity)
    numbers = np.arange(packing.num_bins, dtype=np.int32)
    bin_of[rows[packing.items]] = np.repeat(numbers, np.diff(packing.offsets))
    return bin_of


@kernel
def _heaviest_first(
    costs: NDArray[np.int64], lengths: NDArray[np.int64], bins: int, capacity: int
) -> NDArray[np.int32]:
    """Each to the lightest bin with enough space, or to the lightest of all where there is none."""
    load = np.zeros(bins, np.int64)
    used = np.zeros(bins, np.int64)
    bin_of = np.empty(costs.size, np.int32)
    for item in np.argsort(-costs, kind="mergesort"):
        best = -1
        for b in range(bins):
            fits = used[b] + lengths[item] <= capacity
            if fits and (best < 0 or load[b] < load[best]):
                best = b
        if best < 0:
            best = int(np.argmin(load))
        load[best] += costs[item]
        used[best] += lengths[item]
        bin_of[item] = best
    return bin_of


@kernel
def _fill_empty(costs: NDArray[np.int64], bin_of: NDArray[np.int32], bins: int) -> None:
    """Move the costliest item of a bin that has others into each bin that has none."""
    count = np.zeros(bins, np.int64)
    for b in bin_of:
        count[b] += 1
    for b in range(bins):
        if count[b] > 0:
            continue
        best = -1
        for item in range(costs.size):
            if count[bin_of[item]] > 1 and (best < 0 or costs[item] > costs[best]):
                best = item
        count[bin_of[best]] -= 1
        count[b] += 1
        bin_of[best] = b


@kernel
def _improve(
    costs: NDArray[np.int64],
    lengths: NDArray[np.int64],
    bin_of: NDArray[np.int32],
    bins: int,
    capacity: int,
) -> NDArray[np.int32]:
    """Move an item out of the costliest bin or swap it with a cheaper one, while that helps."""
    load = np.zeros(bins, np.int64)
    used = np.zeros(bins, np.int64)
    count = np.zeros(bins, np.int64)
    for item in range(costs.size):
        load[bin_of[item]] += costs[item]
        used[bin_of[item]] += lengths[item]
        count[bin_of[item]] += 1
    # Within a thousandth of an even share nothing worth the search is left.
    even = costs.sum() // bins
    while True:
        heavy = np.argmax(load)
        if load[heavy] <= even + even // 1000:
            return bin_of
        best_gain = 0
        best_a, best_b, best_bin = -1, -1, -1
        for a in range(costs.size):
            if bin_of[a] != heavy:
                continue
            if count[heavy] > 1:
                for b in range(bins):
                    gain = min(costs[a], load[heavy] - load[b] - costs[a])
                    if b != heavy and gain > best_gain and used[b] + lengths[a] <= capacity:
                        best_gain, best_a, best_b, best_bin = gain, a, -1, b
            for b in range(costs.size):
                other = bin_of[b]
                moved = costs[a] - costs[b]
                # The swap helps as far as both bins end below the present maximum.
                gain = min(moved, load[heavy] - load[other] - moved)
                if gain <= best_gain or other == heavy:
                    continue
                longer = lengths[a] - lengths[b]
                if used[other] + longer <= capacity and used[heavy] - longer <= capacity:
                    best_gain, best_a, best_b, best_bin = gain, a, b, other
        if best_gain == 0:
            return bin_of
        moved, longer = costs[best_a], lengths[best_a]
        bin_of[best_a] = best_bin
        if best_b < 0:
            count[heavy] -= 1
            count[best_bin] += 1
        else:
            moved -= costs[best_b]
            longer -= lengths[best_b]
            bin_of[best_b] = heavy
        load[heavy] -= moved
        load[best_bin] += moved
        used[heavy] -= longer
        used[best_bin] += longer
