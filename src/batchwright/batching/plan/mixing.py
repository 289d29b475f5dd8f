"""Packed rows composed anew every epoch, hardly more of them than best-fit-decreasing needs.

Best-fit-decreasing pairs lengths, so on a small set, where most lengths occur once, it pairs the
same samples in every epoch. Here the rows of an epoch are drawn at random and filled to the last
token (`kernels.random_rows`). In a large set, every run of `copies` positions in the order of
lengths is one slot, as long as its longest: rows of slots are drawn, and each stands for `copies`
rows of samples. Lengths in a slot hardly differ, so that this costs about half a row a copy.
"""

import numpy as np
from numpy.typing import NDArray

from batchwright.batching.packing import kernels
from batchwright.batching.packing.patterns import Patterns, pack_histogram
from batchwright.jit import interpreted, quicker_without_numba
from batchwright.permutation import mix

__all__ = ["VARIANTS", "mixable_patterns", "mixed_patterns"]

BLOCK = 2**15
"""Fewest pieces of a block: its rows are drawn in a few milliseconds, once for an epoch."""

VARIANTS = 16
"""Different drawings of a set of several blocks. Epochs share them in turn, so that any microbatch
of any epoch is at hand; equal lengths are permuted in each epoch nevertheless."""

_DRAWS = (1, 2, 3, 4, 6, 8, 16)
"""From the most random rows to the fullest."""


def mixable_patterns(
    hist: NDArray[np.int64], capacity: int, max_segments: int | None
) -> tuple[Patterns, NDArray[np.int64]]:
    """Best-fit-decreasing of `hist`, and what `mixed_patterns` has to know of it.

    That is: the copies of every slot, the rows of slots, and how many more rows they are given
    because they have no tokens to spare. Empty if that would need over a thousandth more rows.
    """
    plain = pack_histogram(hist, capacity, max_segments)
    most_rows = plain.num_bins + plain.num_bins // 1000
    copies = max(1, int(hist.sum()) // BLOCK)
    patterns, slots = plain, hist
    if copies > 1:
        offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(hist[::-1])))
        slots = _slots(offsets, copies)[::-1]
        block = pack_histogram(slots, capacity, max_segments)
        alone = int(offsets[-1]) % copies
        patterns = _with_rows_alone(
            Patterns(
                block.bin_starts * copies,
                block.entry_offsets,
                alone + block.entry_position * copies,
                block.entry_count,
            ),
            alone,
        )
    if patterns.num_bins > most_rows:
        return plain, np.empty(0, np.int64)
    rows = patterns.num_bins // copies
    spare = rows * capacity - int(slots @ np.arange(len(slots)))
    # With less than two rows free, the last of the random rows seldom come out.
    tight = spare < 2 * capacity
    extra = int(tight and patterns.num_bins + copies <= most_rows)
    return patterns, np.array([copies, rows, extra])


def mixed_patterns(
    base: Patterns,
    mixing: NDArray[np.int64],
    sizes: NDArray[np.int32],
    offsets: NDArray[np.int64],
    capacity: int,
    max_segments: int | None,
    key: np.uint64,
) -> Patterns:
    """The rows of `base` and the extra ones, drawn by `key`; `base` if no drawing is as full.

    Positions offsets[c] to offsets[c + 1] - 1 have size sizes[c], the longest first.
    """
    copies, rows, extra = (int(number) for number in mixing)
    counts = _slots(offsets, copies)
    pieces = int(counts.sum())
    most = max_segments or kernels.UNLIMITED
    with interpreted(quicker_without_numba(60.0 * pieces)):
        for draws in _DRAWS:
            own = np.uint64(mix(key, np.uint64(draws)))
            row_offsets, classes = kernels.random_rows(
                sizes, counts, capacity, most, rows + extra, draws, own
            )
            if row_offsets.size:
                break
        else:
            if not extra:
                return base
            falling = np.repeat(np.arange(len(sizes), dtype=np.int32), counts)
            row_offsets, items = kernels.gather(*kernels.best_fit(sizes[falling], capacity, most))
            classes = falling[items]
    missing = rows + extra + 1 - len(row_offsets)
    if missing:
        # Fuller than it has to be: every epoch has as many rows, so some are cut in two.
        inside = np.setdiff1d(np.arange(pieces), row_offsets)
        cuts = inside[:: inside.size // missing][:missing]
        row_offsets = np.sort(np.concatenate((row_offsets, cuts)))
    # The place of each item among the items of its class, in the order in which they were drawn.
    by_class = np.argsort(classes, kind="stable")
    place = np.empty(pieces, np.int64)
    place[by_class] = np.arange(pieces) - np.repeat(np.cumsum(counts) - counts, counts)
    alone = int(offsets[-1]) % copies
    slot = (np.cumsum(counts) - counts)[classes] + place
    rows_of_slots = Patterns(
        np.arange(len(row_offsets)) * copies,
        row_offsets,
        alone + slot * copies,
        np.ones(pieces, np.int32),
    )
    return _with_rows_alone(rows_of_slots, alone)


def _slots(offsets: NDArray[np.int64], copies: int) -> NDArray[np.int64]:
    """How many slots begin in each class of positions; the first few positions are in none."""
    alone = int(offsets[-1]) % copies
    begun: NDArray[np.int64] = np.maximum(0, -(-(offsets - alone) // copies))
    return np.diff(begun)


def _with_rows_alone(patterns: Patterns, alone: int) -> Patterns:
    """`patterns` and a row for each of the first `alone` positions, the longest."""
    if not alone:
        return patterns
    return Patterns(
        np.append(patterns.bin_starts, patterns.num_bins + alone),
        np.append(patterns.entry_offsets, patterns.entry_offsets[-1] + 1),
        np.append(patterns.entry_position, 0),
        np.append(patterns.entry_count, np.int32(1)),
    )
