"""Packed rows composed anew every epoch, no more of them than best-fit-decreasing needs.

Best-fit-decreasing pairs lengths, so on a small set, where most lengths occur once, it pairs the
same samples in every epoch. Here the rows of an epoch are drawn at random and filled to the last
token (`kernels.random_rows`). A set of many samples is copies of one block of them: the rows of
the block are drawn, each stands for as many rows as there are copies, and their samples are
permuted among equal lengths.
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

    That is: of how many copies of one block it consists, the rows of the block, and how many more
    rows a block is given because it has no tokens to spare. Empty if all that would need over a
    thousandth more rows.
    """
    plain = pack_histogram(hist, capacity, max_segments)
    most_rows = plain.num_bins + plain.num_bins // 1000
    copies = int(hist.sum()) // BLOCK
    if copies <= 1:
        extra = int(plain.num_bins < most_rows and _tight(hist, capacity, plain.num_bins))
        return plain, np.array([1, plain.num_bins, extra])
    # Lengths that are rare are not in the block; a sixteenth of the others is left to fill them up.
    one = hist // copies * 15 // 16
    others = hist - one * copies
    block = pack_histogram(one, capacity, max_segments)
    rest = pack_histogram(others, capacity, max_segments)
    start = _starts(hist)
    rows = copies * block.num_bins
    patterns = _joined(
        Patterns(
            block.bin_starts * copies,
            block.entry_offsets,
            _moved(block.entry_position, _starts(one), start, copies),
            block.entry_count,
        ),
        Patterns(
            rest.bin_starts + rows,
            rest.entry_offsets,
            _moved(rest.entry_position, _starts(others), start + (one * copies)[::-1], 1),
            rest.entry_count,
        ),
    )
    if patterns.num_bins > most_rows:
        return plain, np.empty(0, np.int64)
    extra = int(patterns.num_bins + copies <= most_rows and _tight(one, capacity, block.num_bins))
    return patterns, np.array([copies, block.num_bins, extra])


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
    counts = np.diff(offsets) // copies
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
    block = Patterns(
        np.arange(len(row_offsets)) * copies,
        row_offsets,
        offsets[classes] + place * copies,
        np.ones(pieces, np.int32),
    )
    rest = int(np.searchsorted(base.bin_starts, rows * copies))
    first = int(base.entry_offsets[rest])
    return _joined(
        block,
        Patterns(
            base.bin_starts[rest:] + extra * copies,
            base.entry_offsets[rest:] - first,
            base.entry_position[first:],
            base.entry_count[first:],
        ),
    )


def _tight(hist: NDArray[np.int64], capacity: int, rows: int) -> bool:
    """Whether less than half a row is free, too little for random rows to end with."""
    tokens = int(hist @ np.arange(len(hist)))
    return 2 * (rows * capacity - tokens) < capacity


def _joined(left: Patterns, right: Patterns) -> Patterns:
    """The intervals of both; `right` counts its bins on from those of `left`."""
    return Patterns(
        np.concatenate((left.bin_starts, right.bin_starts[1:])),
        np.concatenate((left.entry_offsets, right.entry_offsets[1:] + left.entry_offsets[-1])),
        np.concatenate((left.entry_position, right.entry_position)),
        np.concatenate((left.entry_count, right.entry_count)),
    )


def _starts(hist: NDArray[np.int64]) -> NDArray[np.int64]:
    """The first position of each length, the longest length first."""
    falling = hist[::-1]
    return np.cumsum(falling) - falling


def _moved(
    position: NDArray[np.int64],
    start: NDArray[np.int64],
    new_start: NDArray[np.int64],
    copies: int,
) -> NDArray[np.int64]:
    """Positions of a part in the whole, where each class begins elsewhere and is repeated."""
    which = np.searchsorted(start, position, side="right") - 1
    return new_start[which] + (position - start[which]) * copies
