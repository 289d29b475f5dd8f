"""Pack a histogram by column generation where best-fit-decreasing leaves bins to save.

The linear program of Gilmore and Gomory: how often to use each pattern (how many items of
which class go in one bin), with new patterns priced by a knapsack. Lengths are grouped into
classes and counted as the longest of their class, so every pattern fits as it stands. The cost
depends on the classes, not on the number of items.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.batching.packing import kernels
from batchwright.batching.packing.patterns import Patterns, pack_histogram, patterns_of
from batchwright.errors import BatchwrightError, need
from batchwright.jit import kernel

__all__ = ["OptimalPacking", "knapsack", "pack_optimal", "patterns_through"]

_NEW_PATTERNS = 64
_CELLS = 1 << 17


@dataclass(frozen=True, slots=True)
class OptimalPacking:
    """The better of two packings; `note` says in one sentence why it is this one.

    `gap` is how far the linear program stopped from its own optimum (0.0 when it was not run).
    """

    patterns: Patterns
    method: str
    note: str
    rounds: int = 0
    gap: float = 0.0


def pack_optimal(
    hist: NDArray[np.int64],
    capacity: int,
    max_segments: int | None = None,
    *,
    worth_above: float = 1.005,
    num_classes: int = 256,
    max_rounds: int = 400,
    gap: float = 1e-4,
) -> OptimalPacking:
    """Fewest bins for `hist[l]` items of each length l, within what the limits allow.

    Best-fit-decreasing is kept when its bins over the lower bound are at most `worth_above`, or
    when the linear program saves nothing. The program stops once it is within `gap` of its
    optimum or after `max_rounds`; the note says which. The limit counts rounds and not seconds,
    so a slow machine makes the same packing as a fast one.

    >>> hist = np.zeros(101, np.int64)
    >>> hist[[51, 27, 26, 23]] = 600, 600, 600, 1200
    >>> pack_histogram(hist, 100).num_bins
    1100
    >>> best = pack_optimal(hist, 100)
    >>> best.method, best.patterns.num_bins
    ('column_generation', 900)
    """
    plain = pack_histogram(hist, capacity, max_segments)
    bound = int(kernels.lower_bounds(hist, capacity)[1])
    if max_segments is not None:
        bound = max(bound, math.ceil(int(hist.sum()) / max_segments))
    keep = "best_fit_decreasing"
    over = plain.num_bins / max(bound, 1)
    if over <= worth_above:
        note = f"best fit is within {over - 1:.2%} of the lower bound"
        return OptimalPacking(plain, keep, note)
    classes = _Classes.of(hist, num_classes)
    program = _solve(classes, capacity, max_segments, max_rounds, gap)
    tried = [
        _rounded(classes, hist, capacity, max_segments, program.patterns, uses)
        for uses in (np.floor(program.uses), np.rint(program.uses))
    ]
    best = min(tried, key=lambda patterns: patterns.num_bins)
    saved = plain.num_bins - best.num_bins
    how = f"{program.stopped} after {program.rounds} rounds with a gap of {program.gap:.3%}"
    if saved <= 0:
        note = f"best fit uses no more bins than the linear program ({how})"
        return OptimalPacking(plain, keep, note, program.rounds, program.gap)
    note = f"{saved:,} bins fewer than best fit ({how})"
    return OptimalPacking(best, "column_generation", note, program.rounds, program.gap)


@dataclass(frozen=True, slots=True)
class _Classes:
    """Lengths in ranges, shortest first: class j has `counts[j]` items from shortest to longest."""

    shortest: NDArray[np.int64]
    longest: NDArray[np.int64]
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, hist: NDArray[np.int64], num_classes: int) -> "_Classes":
        used = np.flatnonzero(hist)
        # Rounding up wastes half a width for every item; widths that fall with the square root
        # of the density waste least for a given number of classes.
        mass = np.cumsum(np.sqrt(hist[used]))
        share = np.ceil(mass / mass[-1] * num_classes - 1e-9)
        last = np.append(share[1:] != share[:-1], True)
        if len(used) <= num_classes:
            last[:] = True
        ends = np.flatnonzero(last)
        starts = np.concatenate((np.zeros(1, np.int64), ends[:-1] + 1))
        counts = np.add.reduceat(hist[used], starts)
        return cls(used[starts], used[ends], counts)


@dataclass(frozen=True, slots=True)
class _Program:
    """Patterns [P, classes], how often each is used [P], and how the search for them ended."""

    patterns: NDArray[np.int64]
    uses: NDArray[np.float64]
    rounds: int
    gap: float
    stopped: str


def _solve(
    classes: _Classes, capacity: int, max_segments: int | None, max_rounds: int, gap: float
) -> _Program:
    """Add the patterns that the current prices call for until none would save enough."""
    optimize = need("scipy.optimize", extra="lp")
    sparse = need("scipy.sparse", extra="lp")
    # Only a limit that space alone does not impose has to be counted in the knapsack.
    most = capacity // int(classes.shortest[0])
    layers = 0 if max_segments is None or max_segments >= most else max_segments
    unit = max(1, math.ceil(capacity * max(layers, 1) / _CELLS))
    weights, space = -(-classes.longest // unit), capacity // unit
    weights = np.minimum(weights, space)  # a lone item fits whatever the rounding says
    alone = np.minimum(capacity // classes.longest, max_segments or kernels.UNLIMITED)
    patterns = np.concatenate((np.diag(alone), _start(classes, capacity, max_segments)))
    patterns = np.unique(patterns, axis=0)
    known = {row.tobytes() for row in patterns}
    bound, stopped, rounds = 0.0, "stopped by max_rounds", 0
    while True:
        rounds += 1
        solved: Any = optimize.linprog(
            np.ones(len(patterns)),
            A_ub=-sparse.csc_array(patterns.T.astype(np.float64)),
            b_ub=-classes.counts.astype(np.float64),
            method="highs-ds",
        )
        if solved.status != 0:
            raise BatchwrightError(
                f"the solver gave up on {len(patterns):,} patterns ({solved.message}); "
                "use mode='best_fit_decreasing'"
            )
        prices = np.maximum(-solved.ineqlin.marginals, 0.0)
        worth, choice = knapsack(weights, prices, space, layers)
        priced, new = patterns_through(weights, prices, space, layers, worth, choice)
        # Prices divided by the dearest pattern are feasible for the dual: Farley's bound.
        bound = max(bound, solved.fun / max(priced.max(), 1.0))
        found = 1.0 - bound / solved.fun
        if found <= gap:
            stopped = "converged"
            break
        if rounds == max_rounds:
            break
        fresh: list[NDArray[np.int64]] = []
        for j in np.argsort(-priced, kind="stable"):
            if priced[j] <= 1.0 + 1e-9 or len(fresh) == _NEW_PATTERNS:
                break
            if new[j].tobytes() not in known:
                known.add(new[j].tobytes())
                fresh.append(new[j])
        if not fresh:
            stopped = "no pattern left to add"
            break
        patterns = np.concatenate((patterns, np.stack(fresh)))
    return _Program(patterns, solved.x, rounds, found, stopped)


def _start(classes: _Classes, capacity: int, max_segments: int | None) -> NDArray[np.int64]:
    """The patterns of best-fit-decreasing on the rounded lengths, a good first guess."""
    hist = np.zeros(capacity + 1, np.int64)
    hist[classes.longest] = classes.counts
    packed = pack_histogram(hist, capacity, max_segments)
    rank = np.searchsorted(np.cumsum(classes.counts[::-1]), packed.entry_position, side="right")
    interval = np.repeat(np.arange(len(packed.bin_starts) - 1), np.diff(packed.entry_offsets))
    patterns = np.zeros((len(packed.bin_starts) - 1, len(classes.counts)), np.int64)
    np.add.at(patterns, (interval, len(classes.counts) - 1 - rank), packed.entry_count)
    return np.unique(patterns, axis=0)


def _rounded(
    classes: _Classes,
    hist: NDArray[np.int64],
    capacity: int,
    max_segments: int | None,
    patterns: NDArray[np.int64],
    uses: NDArray[np.float64],
) -> Patterns:
    """Whole uses of the patterns, and best-fit-decreasing of the rest into what they leave free."""
    stop = np.cumsum(classes.counts[::-1])[::-1]  # positions of class j end here: longest first
    cursor = stop - classes.counts
    steps, position, bins = [], [], 0
    for j in np.argsort(-uses, kind="stable"):
        members = np.flatnonzero(patterns[j])[::-1]
        each = patterns[j, members]
        # The program may cover a class more than once over; then fewer bins will do.
        count = min(int(uses[j]), int(((stop - cursor)[members] // each).min()))
        if count == 0:
            continue
        steps.append(np.column_stack((np.full((len(members), 2), (bins, count)), each)))
        position.append(cursor[members].copy())
        cursor[members] += count * each
        bins += count
    ends = np.cumsum(hist[::-1])  # of the positions of each length, longest first
    made = [
        _opened(step, first, ends, len(hist) - 1, capacity)
        for step, first in zip(steps, position, strict=True)
    ]
    opened = np.array(made, np.int64).reshape(-1, 4)
    left, kept = stop - cursor, np.zeros_like(hist)
    for j in np.flatnonzero(left):
        span = slice(classes.shortest[j], classes.longest[j] + 1)
        shorter = np.cumsum(hist[span]) - hist[span]
        kept[span] = np.clip(left[j] - shorter, 0, hist[span])
    rest = kernels.best_fit_decreasing(kept, capacity, max_segments or kernels.UNLIMITED, opened)
    # The rest counts its own positions; each class's are the last ones of that class.
    taken = rest[:, 1] * rest[:, 2]
    rank = np.cumsum(taken) - taken
    before = np.cumsum(left[::-1]) - left[::-1]
    owner = np.searchsorted(np.cumsum(left[::-1]), rank, side="right")
    rest_position = cursor[::-1][owner] + rank - before[owner]
    return patterns_of(np.concatenate([*steps, rest]), np.concatenate([*position, rest_position]))


def _opened(
    step: NDArray[np.int64],
    first: NDArray[np.int64],
    ends: NDArray[np.int64],
    longest: int,
    capacity: int,
) -> tuple[int, int, int, int]:
    """One range of bins for the rest: its first bin holds the longest items, so it tells."""
    each = step[:, 2]
    offset = np.arange(each.sum()) - np.repeat(np.cumsum(each) - each, each)
    positions = np.repeat(first, each) + offset
    held = longest - np.searchsorted(ends, positions, side="right")
    return int(step[0, 0]), int(step[0, 1]), int(each.sum()), capacity - int(held.sum())


@kernel
def knapsack(
    weights: NDArray[np.int64], prices: NDArray[np.float64], capacity: int, layers: int
) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
    """The most worth in each space, and the class that achieves it (-1: leave a unit empty).

    Weights ascend and items repeat. With `layers`, row s allows at most s items; without, row 1
    allows any number and refers to itself.
    """
    rows = max(layers, 1) + 1
    worth = np.zeros((rows, capacity + 1))
    choice = np.full((rows, capacity + 1), -1, np.int32)
    for row in range(1, rows):
        source = row - 1 if layers else row
        for space in range(1, capacity + 1):
            best, taken = worth[row, space - 1], -1
            for j in range(weights.size):
                if weights[j] > space:
                    break
                value = worth[source, space - weights[j]] + prices[j]
                if value > best + 1e-12:
                    best, taken = value, j
            worth[row, space] = best
            choice[row, space] = taken
    return worth, choice


@kernel
def patterns_through(
    weights: NDArray[np.int64],
    prices: NDArray[np.float64],
    capacity: int,
    layers: int,
    worth: NDArray[np.float64],
    choice: NDArray[np.int32],
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """For each class the best pattern that holds it: what it is worth, and its counts."""
    priced = np.empty(weights.size)
    patterns = np.zeros((weights.size, weights.size), np.int64)
    for j in range(weights.size):
        row = layers - 1 if layers else 1
        space = capacity - weights[j]
        priced[j] = prices[j] + worth[row, space]
        patterns[j, j] = 1
        while space > 0 and row > 0:
            taken = choice[row, space]
            if taken < 0:
                space -= 1
                continue
            patterns[j, taken] += 1
            space -= weights[taken]
            if layers:
                row -= 1
    return priced, patterns
