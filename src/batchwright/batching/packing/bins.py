"""Pack lengths into the fewest bins of one capacity."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from batchwright.batching.packing import kernels
from batchwright.batching.packing.modes import PackingMode, packing_mode
from batchwright.batching.packing.optimal import pack_optimal
from batchwright.batching.packing.patterns import check_capacity, oversized, pack_histogram
from batchwright.errors import BadLength, ConfigError, Mismatch

__all__ = ["Packing", "PackingProof", "StreamingPacker", "pack_lengths", "verify_packing"]


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
        BadLength: lengths that are not integers of at least 1.

    >>> pack_lengths([5, 3, 4, 3], max_length=8)
    Packing(4 items, 2 bins of 8, 93.75% full, at least 2 bins needed, best_fit_decreasing)
    """
    mode = packing_mode(mode)
    check_capacity(max_length, max_segments)
    lengths_N = _as_lengths(lengths, max_length)
    longest = int(lengths_N.max(initial=0))
    hist = kernels.histogram(lengths_N, longest)
    l1, l2 = kernels.lower_bounds(hist, max_length)
    bound = max(l2, math.ceil(len(lengths_N) / max_segments) if max_segments else 0)
    most = max_segments or kernels.UNLIMITED
    method, note = mode.value, ""
    if mode in (PackingMode.BEST_FIT_DECREASING, PackingMode.OPTIMAL):
        if mode is PackingMode.OPTIMAL:
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
        check_capacity(max_length, max_segments)
        if open_bins < 1:
            raise ConfigError(f"open_bins must be at least 1, got {open_bins}")
        self.max_length = max_length
        self.open_bins = open_bins
        self.max_segments = max_segments
        self._free: list[int] = []
        self._bins: list[list[Any]] = []

    def push(self, item: Any, length: int) -> list[list[Any]]:
        """Take one item; the bins it completed, one at most."""
        if length < 1:
            raise BadLength(f"the length of item {item!r} must be at least 1, got {length}")
        if length > self.max_length:
            raise oversized(1, length, self.max_length)
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


def _as_lengths(lengths: ArrayLike, max_length: int) -> NDArray[np.int32]:
    """`lengths` checked against 1..max_length, as contiguous int32 without a copy if it is that."""
    array = np.asarray(lengths)
    if array.size == 0:
        return np.empty(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise BadLength(
            f"lengths must be a flat array of integers, got {array.dtype} of shape {array.shape}"
        )
    if array.min() < 1:
        row = int(np.argmax(array < 1))
        raise BadLength(
            f"lengths must be at least 1, got {array[row]} in row {row} "
            f"({np.count_nonzero(array < 1):,} in all); drop empty samples"
        )
    if array.max() > max_length:
        count = int(np.count_nonzero(array > max_length))
        raise oversized(count, int(array.max()), max_length)
    return np.ascontiguousarray(array, np.int32)
