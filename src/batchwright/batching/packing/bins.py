"""Pack lengths into the fewest bins of one capacity."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from batchwright.batching.packing import kernels
from batchwright.errors import BadLength, ConfigError, Mismatch, OversizedSample

__all__ = [
    "MAX_CAPACITY",
    "Packing",
    "PackingMode",
    "PackingProof",
    "Patterns",
    "StreamingPacker",
    "pack_histogram",
    "pack_lengths",
    "packing_mode",
    "patterns_of",
    "verify_packing",
]

MAX_CAPACITY = 2**24
"""The longest pack. Tables have one slot for every length up to here."""


class PackingMode(StrEnum):
    """In which order items come and which bin takes them."""

    FIRST_FIT = "first_fit"
    """In the given order, into the first bin with enough space."""
    BEST_FIT = "best_fit"
    """In the given order, into the tightest bin with enough space."""
    GREEDY = "greedy"
    """Longest first, into the first bin with enough space."""
    BEST_FIT_DECREASING = "best_fit_decreasing"
    """Longest first, into the tightest bin; the default, exact on the length histogram."""
    OPTIMAL = "optimal"
    """Best-fit-decreasing, and a linear programme where that is far from the lower bound."""


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
    >>> [patterns.bin_positions(b).tolist() for b in range(patterns.num_bins)]
    [[0, 2], [1, 3]]
    """

    bin_starts: NDArray[np.int64]
    entry_offsets: NDArray[np.int64]
    entry_position: NDArray[np.int64]
    entry_count: NDArray[np.int32]

    @property
    def num_bins(self) -> int:
        return int(self.bin_starts[-1])

    @property
    def num_positions(self) -> int:
        per_bin = np.add.reduceat(np.append(self.entry_count, 0), self.entry_offsets[:-1])
        return int((per_bin * np.diff(self.bin_starts)).sum())

    def bin_positions(self, b: int) -> NDArray[np.int64]:
        """The positions in bin `b`, without looking at any other bin."""
        return kernels.positions_of(
            self.bin_starts, self.entry_offsets, self.entry_position, self.entry_count, b
        )

    def expand(self, order: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """All bins written out: bin b holds `items[offsets[b]:offsets[b + 1]]`.

        `order[p]` is the item at position p.
        """
        return kernels.expand(
            self.bin_starts, self.entry_offsets, self.entry_position, self.entry_count, order
        )

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
    _check_capacity(capacity, max_segments)
    over = np.flatnonzero(hist[capacity + 1 :])
    if over.size:
        raise _oversized(int(hist[capacity + 1 :].sum()), int(capacity + 1 + over[-1]), capacity)
    if hist.size and hist[0]:
        raise BadLength(f"{hist[0]:,} lengths are 0; lengths are 1 and more, drop empty samples")
    hist = np.ascontiguousarray(hist, np.int64)
    nothing = np.empty((0, 4), np.int64)
    steps = kernels.best_fit_decreasing(hist, capacity, max_segments or kernels.UNLIMITED, nothing)
    taken = steps[:, 1] * steps[:, 2]
    return patterns_of(steps, np.cumsum(taken) - taken)


def patterns_of(steps: NDArray[np.int64], position: NDArray[np.int64]) -> Patterns:
    """Steps (first bin, bins, items per bin), each taking positions from its own on."""
    starts, stops = steps[:, 0], steps[:, 0] + steps[:, 1]
    bin_starts = np.unique(np.concatenate((starts, stops, np.zeros(1, np.int64))))
    first, last = np.searchsorted(bin_starts, starts), np.searchsorted(bin_starts, stops)
    return Patterns(bin_starts, *kernels.spread(bin_starts, steps, first, last, position))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Packing:
    """Items in bins: bin b holds `items[offsets[b]:offsets[b + 1]]`, rows of the lengths given.

    `l1` (tokens over capacity) and `l2` (Martello and Toth) are numbers of bins that no packing
    can beat; `lower_bound` is the best bound known. `method` is what made the bins: for
    `optimal` either best-fit-decreasing or column generation, and `note` says why.
    """

    offsets: NDArray[np.int64]
    items: NDArray[np.int32]
    max_length: int
    max_segments: int | None
    tokens: int
    l1: int
    l2: int
    lower_bound: int
    mode: PackingMode
    method: str
    note: str = ""

    @property
    def num_bins(self) -> int:
        return len(self.offsets) - 1

    @property
    def efficiency(self) -> float:
        """Tokens over the capacity of all bins; 1.0 when there are none."""
        return self.tokens / (self.num_bins * self.max_length) if self.num_bins else 1.0

    def __repr__(self) -> str:
        return (
            f"Packing({len(self.items):,} items, {self.num_bins:,} bins of {self.max_length:,}, "
            f"{self.efficiency:.2%} full, at least {self.lower_bound:,} bins needed, {self.method})"
        )


def pack_lengths(
    lengths: ArrayLike,
    max_length: int,
    mode: PackingMode | str = PackingMode.BEST_FIT_DECREASING,
    max_segments: int | None = None,
) -> Packing:
    """Put every item in one bin of `max_length` tokens with at most `max_segments` items.

    The result depends on the lengths and their order alone. int32 input is read in place.

    Raises:
        OversizedSample: lengths over `max_length`.
        BadLength: lengths that are not whole numbers of 1 and more.

    >>> pack_lengths([5, 3, 4, 3], max_length=8)
    Packing(4 items, 2 bins of 8, 93.75% full, at least 2 bins needed, best_fit_decreasing)
    """
    mode = packing_mode(mode)
    _check_capacity(max_length, max_segments)
    lengths_N = _as_lengths(lengths, max_length)
    longest = int(lengths_N.max(initial=0))
    hist = kernels.histogram(lengths_N, longest)
    l1, l2 = kernels.lower_bounds(hist, max_length)
    bound = max(l2, math.ceil(len(lengths_N) / max_segments) if max_segments else 0)
    most = max_segments or kernels.UNLIMITED
    method, note = mode.value, ""
    if mode in (PackingMode.BEST_FIT_DECREASING, PackingMode.OPTIMAL):
        if mode is PackingMode.OPTIMAL:
            from batchwright.batching.packing.optimal import pack_optimal

            best = pack_optimal(hist, max_length, max_segments)
            patterns, method, note = best.patterns, best.method, best.note
        else:
            patterns = pack_histogram(hist, max_length, max_segments)
        offsets, items = patterns.expand(kernels.sort_descending(lengths_N, hist))
    elif mode is PackingMode.BEST_FIT:
        offsets, items = kernels.gather(*kernels.best_fit(lengths_N, max_length, most))
    else:
        # Two bins that still take items hold more than one capacity between them.
        most_bins = min(len(lengths_N), 2 * l1 + 1 + len(lengths_N) // most)
        if mode is PackingMode.GREEDY:
            order = kernels.sort_descending(lengths_N, hist)
            lengths_N = lengths_N[order]
        bin_of, bins = kernels.first_fit(lengths_N, max_length, most, most_bins)
        offsets, items = kernels.gather(bin_of, bins)
        if mode is PackingMode.GREEDY:
            items = order[items]
    tokens = int(np.dot(hist, np.arange(len(hist))))
    return Packing(
        offsets, items, max_length, max_segments, tokens, l1, l2, bound, mode, method, note
    )


@dataclass(frozen=True, slots=True)
class PackingProof:
    """What `verify_packing` found to hold: every item once, no bin too full, no token lost."""

    items: int
    bins: int
    tokens: int
    fullest: int
    most_segments: int


def verify_packing(packing: Packing, lengths: ArrayLike) -> PackingProof:
    """Prove from the lengths alone that `packing` is sound, or name the first violation.

    Shares no code with the packing: sums and counts of numpy only.

    Raises:
        Mismatch: an item is missing or repeated, or a bin is empty, too full or too long.

    >>> verify_packing(pack_lengths([5, 3, 4, 3], max_length=8), [5, 3, 4, 3])
    PackingProof(items=4, bins=2, tokens=15, fullest=8, most_segments=2)
    """
    lengths_N = np.asarray(lengths)
    items, offsets = packing.items, packing.offsets
    if len(items) != len(lengths_N):
        raise Mismatch(
            f"the packing holds {len(items):,} items, the lengths are {len(lengths_N):,}"
        )
    if offsets[0] != 0 or offsets[-1] != len(items):
        raise Mismatch(f"bins span {offsets[0]}..{offsets[-1]} of {len(items):,} items")
    segments = np.diff(offsets)
    if (segments < 1).any():
        raise Mismatch(f"bin {np.argmax(segments < 1)} is empty or runs backwards")
    if len(items) and not 0 <= items.min() <= items.max() < len(lengths_N):
        raise Mismatch(f"items run from {items.min()} to {items.max()}, not within the lengths")
    times = np.bincount(items, minlength=len(lengths_N))
    if (times != 1).any():
        item = int(np.argmax(times != 1))
        raise Mismatch(f"item {item} is in {times[item]} bins instead of one")
    running = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths_N[items], dtype=np.int64)))
    tokens_B = np.diff(running[offsets])
    if (tokens_B > packing.max_length).any():
        b = int(np.argmax(tokens_B > packing.max_length))
        raise Mismatch(f"bin {b} holds {tokens_B[b]:,} tokens, allowed are {packing.max_length:,}")
    most = packing.max_segments
    if most is not None and (segments > most).any():
        b = int(np.argmax(segments > most))
        raise Mismatch(f"bin {b} holds {segments[b]:,} items, allowed are {most:,}")
    tokens = int(lengths_N.sum(dtype=np.int64))
    if tokens_B.sum() != tokens or packing.tokens != tokens:
        raise Mismatch(f"the bins hold {packing.tokens:,} tokens, the lengths are {tokens:,}")
    if packing.num_bins < packing.lower_bound:
        raise Mismatch(f"{packing.num_bins} bins are under the bound of {packing.lower_bound}")
    return PackingProof(
        items=len(items),
        bins=packing.num_bins,
        tokens=tokens,
        fullest=int(tokens_B.max(initial=0)),
        most_segments=int(segments.max(initial=0)),
    )


class StreamingPacker:
    """Pack items as they arrive, with at most `open_bins` unfinished bins in memory.

    An item goes to the tightest open bin that fits it. When none fits and all places are taken,
    the fullest bin is closed to make room. A push completes at most one bin, so packs come out
    one at a time and never in bursts. Items must be JSON values if the state is to be saved.

    >>> packer = StreamingPacker(max_length=8)
    >>> [packer.push(item, length) for item, length in [("a", 5), ("b", 4), ("c", 3)]]
    [[], [], [['a', 'c']]]
    >>> packer.flush()
    [['b']]
    """

    def __init__(
        self, max_length: int, open_bins: int = 64, max_segments: int | None = None
    ) -> None:
        _check_capacity(max_length, max_segments)
        if open_bins < 1:
            raise ConfigError(f"open_bins={open_bins} leaves no place for a bin; give 1 or more")
        self.max_length = max_length
        self.open_bins = open_bins
        self.max_segments = max_segments
        self._free: list[int] = []
        self._bins: list[list[Any]] = []

    def push(self, item: Any, length: int) -> list[list[Any]]:
        """Take one item; the bins it completed, one at most."""
        if length < 1:
            raise BadLength(f"item {item!r} has length {length}; lengths are 1 and more")
        if length > self.max_length:
            raise _oversized(1, length, self.max_length)
        fitting = [(free, b) for b, free in enumerate(self._free) if free >= length]
        done = []
        if fitting:
            _, b = min(fitting)
        else:
            if len(self._bins) == self.open_bins:
                done = [self._close(self._free.index(min(self._free)))]
            b = len(self._bins)
            self._bins.append([])
            self._free.append(self.max_length)
        self._bins[b].append(item)
        self._free[b] = 0 if len(self._bins[b]) == self.max_segments else self._free[b] - length
        # A bin completed by its first item waits if another was closed for it in this push.
        if self._free[b] == 0 and not done:
            done = [self._close(b)]
        return done

    def flush(self) -> list[list[Any]]:
        """All unfinished bins, oldest first; the packer is empty afterwards."""
        done, self._bins, self._free = self._bins, [], []
        return done

    def state_dict(self) -> dict[str, Any]:
        """Everything a new packer needs to continue, in JSON values."""
        return {
            "max_length": self.max_length,
            "open_bins": self.open_bins,
            "max_segments": self.max_segments,
            "free": list(self._free),
            "bins": [list(items) for items in self._bins],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken, with the same settings."""
        for name in ("max_length", "open_bins", "max_segments"):
            if state[name] != getattr(self, name):
                raise Mismatch(
                    f"the state was saved with {name}={state[name]}, this packer has "
                    f"{getattr(self, name)}; make the packer with the saved value"
                )
        self._free = list(state["free"])
        self._bins = [list(items) for items in state["bins"]]

    def _close(self, b: int) -> list[Any]:
        self._free.pop(b)
        return self._bins.pop(b)


def packing_mode(mode: PackingMode | str) -> PackingMode:
    """The mode by its name."""
    try:
        return PackingMode(mode)
    except ValueError:
        names = ", ".join(PackingMode)
        raise ConfigError(f"packing mode {mode!r} is not known; choose one of {names}") from None


def _as_lengths(lengths: ArrayLike, max_length: int) -> NDArray[np.int32]:
    """`lengths` checked against 1..max_length, as contiguous int32 without a copy if it is that."""
    array = np.asarray(lengths)
    if array.size == 0:
        return np.empty(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise BadLength(
            f"lengths are {array.dtype} of shape {array.shape}; give a flat array of whole numbers"
        )
    if array.min() < 1:
        row = int(np.argmax(array < 1))
        raise BadLength(
            f"{np.count_nonzero(array < 1):,} lengths are under 1, the first is "
            f"{array[row]} in row {row}; lengths are 1 and more, drop empty samples"
        )
    if array.max() > max_length:
        count = int(np.count_nonzero(array > max_length))
        raise _oversized(count, int(array.max()), max_length)
    return np.ascontiguousarray(array, np.int32)


def _check_capacity(capacity: int, max_segments: int | None) -> None:
    if not 1 <= capacity <= MAX_CAPACITY:
        raise ConfigError(f"max_length={capacity:,} is not possible; give 1 to {MAX_CAPACITY:,}")
    if max_segments is not None and max_segments < 1:
        raise ConfigError(f"max_segments={max_segments} leaves no room; give 1 or more, or None")


def _oversized(count: int, longest: int, capacity: int) -> OversizedSample:
    are = "length is" if count == 1 else "lengths are"
    return OversizedSample(
        f"{count:,} {are} over max_length={capacity:,}, the longest {longest:,}; "
        f"raise max_length to {longest:,}, or truncate, split or skip them first"
    )
