"""Optimal bucket edges, by dynamic programming over the length histogram.

Padding every sample to the edge above it costs `sum over buckets of cost(edge) * samples`. For
a cost that does not fall with the width, the best last-but-one edge only moves up as the last
one does (the cost table has the Monge property), so each bucket more takes L log L comparisons
of sums instead of L**2. Sums of whole numbers are compared as whole numbers: the edges are
optimal, not nearly so.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from batchwright.errors import ConfigError
from batchwright.jit import kernel, quicker_without_numba

__all__ = ["edges_cost", "optimal_edges", "regret"]


def optimal_edges(
    hist: ArrayLike, num_buckets: int, cost: ArrayLike | None = None, align: int = 1
) -> tuple[int, ...]:
    """The widths of at most `num_buckets` buckets that cost least; the last takes the longest.

    `hist[l]` counts the samples of length l. `cost[w]` is the price of one sample padded to
    width w, by default w itself, that is, padded tokens; it must not fall as w grows. With
    `align`, every width is a multiple of it. Among equally good edges the smaller win. Costs
    that are fractions, or so large that their sums leave 64 bits, are summed in float64, and
    the edges are then best up to rounding.

    >>> hist = np.bincount([1, 2, 2, 3, 9, 10, 10])
    >>> optimal_edges(hist, 2)
    (3, 10)
    >>> optimal_edges(hist, 2, align=4)
    (4, 12)
    """
    if num_buckets < 1:
        raise ConfigError(f"num_buckets must be at least 1, got {num_buckets}")
    widths, counts = _candidates(_checked(hist), align)
    if num_buckets >= widths.size:
        return tuple(widths.tolist())
    costs = _costs(cost, widths)
    totals = np.concatenate(([0], np.cumsum(counts)))
    if costs.dtype == np.int64 and int(np.abs(costs).max()) * int(totals[-1]) >= 2**63:
        costs = costs.astype(np.float64)
    by_numpy = quicker_without_numba(0.1 * num_buckets * widths.size * len(bin(widths.size)))
    choices = _choices_by_numpy if by_numpy else _choices
    choice = choices(costs, totals.astype(costs.dtype), num_buckets)
    ends = [widths.size]
    for layer in range(num_buckets - 1, 0, -1):
        ends.append(int(choice[layer, ends[-1]]))
    return tuple(int(widths[end - 1]) for end in reversed(ends))


def edges_cost(hist: ArrayLike, edges: Sequence[int], cost: ArrayLike | None = None) -> float:
    """What all samples cost, each padded to the first edge that holds it.

    An integer when the costs are.

    >>> edges_cost(np.bincount([1, 2, 2, 3, 9, 10, 10]), (3, 10))
    42
    """
    counts = _checked(hist)
    widths = np.asarray(edges, np.int64)
    if widths.size == 0 or widths[0] < 1 or np.any(np.diff(widths) <= 0):
        raise ConfigError(f"edges must be positive and strictly ascending, got {tuple(edges)}")
    longest = int(np.flatnonzero(counts)[-1])
    if widths[-1] < longest:
        raise ConfigError(
            f"the last edge {widths[-1]} is below the longest sample, {longest} tokens; "
            f"add an edge or leave such samples out"
        )
    upto = np.cumsum(counts)[np.minimum(widths, counts.size - 1)]
    # Python's whole numbers do not overflow.
    samples = np.diff(upto, prepend=0).tolist()
    total: float = sum(n * c for n, c in zip(samples, _costs(cost, widths).tolist(), strict=True))
    return total


def regret(hist: ArrayLike, edges: Sequence[int]) -> float:
    """The efficiency these edges lose: the best of as many edges, minus theirs.

    Efficiency is useful over padded tokens, so 0.05 means five points of the hundred.

    >>> round(regret(np.bincount([1, 2, 2, 3, 9, 10, 10]), (5, 10)), 4)
    0.141
    """
    counts = _checked(hist)
    useful = int(np.dot(counts, np.arange(counts.size)))
    best = edges_cost(counts, optimal_edges(counts, len(edges)))
    return useful / best - useful / edges_cost(counts, edges)


@kernel
def _choices(
    costs: NDArray[np.int64], totals: NDArray[np.int64], buckets: int
) -> NDArray[np.int32]:
    """For each layer and end j: the end of the layer before that makes the first j+1 cheapest.

    Ends count candidates: end j covers candidates 0 to j-1. Layer k has k+1 buckets. Rows are
    solved from the middle outwards; the choice in a row lies between those of its neighbours.
    """
    m = costs.size
    choice = np.zeros((buckets, m + 1), np.int32)
    best = np.zeros(m + 1, costs.dtype)
    for j in range(1, m + 1):
        best[j] = costs[j - 1] * totals[j]
    for layer in range(1, buckets):
        after = np.zeros(m + 1, costs.dtype)
        first = layer + 1
        rows = m - layer
        stride = 1
        while stride < rows:
            stride *= 2
        while stride >= 1:
            for row in range(stride - 1, rows, 2 * stride):
                j = first + row
                low = layer
                if row >= stride:
                    low = choice[layer, j - stride]
                high = j - 1
                if row + stride < rows:
                    high = min(high, choice[layer, j + stride])
                price = costs[j - 1]
                least = best[low] + price * (totals[j] - totals[low])
                where = low
                for i in range(low + 1, high + 1):
                    value = best[i] + price * (totals[j] - totals[i])
                    if value < least:
                        least = value
                        where = i
                after[j] = least
                choice[layer, j] = where
            stride //= 2
        best = after
    return choice


def _choices_by_numpy(
    costs: NDArray[np.int64], totals: NDArray[np.int64], buckets: int
) -> NDArray[np.int32]:
    """`_choices` for as long as numba is not worth loading: a stride of rows at a time."""
    m = costs.size
    choice = np.zeros((buckets, m + 1), np.int32)
    best = np.concatenate((np.zeros(1, costs.dtype), costs * totals[1:]))
    for layer in range(1, buckets):
        after = np.zeros(m + 1, costs.dtype)
        rows = m - layer
        stride = 1 << (rows.bit_length() - 1)
        while stride >= 1:
            row = np.arange(stride - 1, rows, 2 * stride)
            j = layer + 1 + row
            low = np.where(row >= stride, choice[layer, np.maximum(j - stride, 0)], layer)
            above = choice[layer, np.minimum(j + stride, m)]
            high = np.where(row + stride < rows, np.minimum(j - 1, above), j - 1)
            size = high - low + 1
            begins = np.cumsum(size) - size
            owner = np.repeat(np.arange(row.size), size)
            i = np.arange(size.sum()) + (low - begins)[owner]
            value = best[i] + costs[j - 1][owner] * (totals[j][owner] - totals[i])
            after[j] = np.minimum.reduceat(value, begins)
            # Of equally cheap ends the first, as the kernel takes it.
            cheapest = np.flatnonzero(value == after[j][owner])
            choice[layer, j] = i[cheapest[np.searchsorted(cheapest, begins)]]
            stride //= 2
        best = after
    return choice


def _checked(hist: ArrayLike) -> NDArray[np.int64]:
    counts = np.asarray(hist)
    if not np.any(counts):
        raise ConfigError("the histogram is empty, and edges need at least one sample")
    if counts.ndim != 1 or not np.issubdtype(counts.dtype, np.integer):
        raise ConfigError(
            f"a histogram of shape {counts.shape} and type {counts.dtype} cannot be read; "
            f"give one whole number for each length, as np.bincount(lengths) does"
        )
    if np.any(counts < 0) or np.any(counts[:1]):
        raise ConfigError("the histogram has a negative count or samples of length 0; clean them")
    return counts.astype(np.int64, copy=False)


def _candidates(
    counts: NDArray[np.int64], align: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Every width worth an edge, and how many samples it has over the width before.

    A width with no new sample below it is never better than the one before: only lengths that
    occur, rounded up to `align`, can be edges.
    """
    if align < 1:
        raise ConfigError(f"align must be at least 1, got {align}")
    lengths = np.flatnonzero(counts)
    widths, first = np.unique(-(-lengths // align) * align, return_index=True)
    return widths, np.add.reduceat(counts[lengths], first)


def _costs(cost: ArrayLike | None, widths: NDArray[np.int64]) -> NDArray[np.int64]:
    """The price at each width, as int64 where that is exact and float64 otherwise."""
    if cost is None:
        return widths
    table = np.asarray(cost)
    if table.ndim != 1 or table.size <= widths[-1]:
        raise ConfigError(
            f"cost has shape {table.shape} and widths go to {widths[-1]}; "
            f"give one cost for each width from 0 to {widths[-1]}"
        )
    exact = np.issubdtype(table.dtype, np.integer)
    costs: NDArray[np.int64] = table[widths].astype(np.int64 if exact else np.float64)
    if not np.all(np.isfinite(costs)) or np.any(np.diff(costs) < 0):
        raise ConfigError("cost must be finite and must not fall as the width grows")
    return costs
