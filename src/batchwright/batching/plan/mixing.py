"""Packed rows composed anew every epoch, hardly more of them than best-fit-decreasing needs.

Best-fit-decreasing pairs lengths, so on a small set, where most lengths occur once, it pairs the
same samples in every epoch. Here the rows of an epoch are drawn at random and filled to the last
token (`kernels.random_rows`). Where that would take more rows than best-fit-decreasing, or more
than one draw a sample, samples are exchanged between rows that have tokens to spare
(`kernels.stir`). In a large set, every run of `copies` positions in the order of lengths is one
slot, as long as its longest: rows of slots are drawn, and each stands for `copies` rows of
samples. Lengths in a slot hardly differ, so that this costs about half a row a copy.
"""

import numpy as np
from numpy.typing import NDArray

from batchwright.batching.packing import kernels
from batchwright.batching.packing.patterns import Patterns, pack_histogram
from batchwright.errors import BadFile
from batchwright.jit import interpreted, quicker_without_numba
from batchwright.permutation import mix

__all__ = ["VARIANTS", "mixable_patterns", "mixed_patterns"]

BLOCK = 2**13
"""Fewest pieces of a block: its rows are drawn in a few milliseconds, once for an epoch."""

VARIANTS = 16
"""Different drawings of a set of several blocks. Epochs share them in turn, so that any microbatch
of any epoch is at hand; equal lengths are permuted in each epoch nevertheless."""

_DRAWS = (1, 2, 2, 3, 4, 8, 16)
"""From the most random rows to the fullest."""

_STIR = 32
"""Exchanges that are tried for each piece of rows that are less random than could be."""


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
    # No row is empty.
    most_extra = min((most_rows - patterns.num_bins) // copies, int(slots.sum()) - rows)
    # With so few tokens to spare the last of the random rows seldom come out.
    extra = max(0, most_extra) if 1000 * spare < rows * capacity else 0
    if extra and copies == 1:
        sizes = np.flatnonzero(hist)[::-1].astype(np.int32)
        most = max_segments or kernels.UNLIMITED
        with interpreted(quicker_without_numba(60.0 * int(hist.sum()))):
            made, _ = kernels.random_rows(
                sizes, hist[sizes], capacity, most, rows + 1, 1, np.uint64(0)
            )
        if made.size:
            # One is enough; otherwise all that may be added make rows more random.
            extra = 1
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
    """The rows of `base` and the extra ones, drawn by `key`.

    Positions offsets[c] to offsets[c + 1] - 1 have size sizes[c], the longest first.
    """
    copies, rows, extra = (int(number) for number in mixing)
    counts = _slots(offsets, copies)
    pieces = int(counts.sum())
    most = max_segments or kernels.UNLIMITED
    falling = np.repeat(sizes, counts)
    with interpreted(quicker_without_numba(120.0 * pieces)):
        drawn = _drawn(sizes, counts, capacity, most, rows + extra, key)
        if drawn is None:
            if copies == 1 and not extra:
                row_offsets, items = base.expand(np.arange(pieces, dtype=np.int32))
                row_of = np.empty(pieces, np.int32)
                row_of[items] = np.repeat(np.arange(rows), np.diff(row_offsets))
            else:
                row_of, _ = kernels.best_fit(falling, capacity, most)
            tries = 2 * _STIR * pieces
        else:
            row_of, draws = drawn
            tries = _STIR * pieces if draws > 1 else 0
        # A drawing, and best-fit-decreasing with extra rows, may be fuller than it has to be.
        used = int(row_of.max()) + 1
        own = np.uint64(mix(key, np.uint64(0)))
        kernels.stir(falling, row_of, used, capacity, tries, own)
        row_offsets, slot = kernels.gather(row_of, used)
    missing = rows + extra + 1 - len(row_offsets)
    if missing < 0:
        raise BadFile(
            f"the batch plan cannot be used: its samples do not fit {rows + extra:,} rows of "
            f"{capacity:,} tokens; build it again: batchwright data batchplan build"
        )
    if missing:
        # Every epoch has as many rows, so some are cut in two.
        inside = np.setdiff1d(np.arange(pieces), row_offsets)
        cuts = inside[:: inside.size // missing][:missing]
        row_offsets = np.sort(np.concatenate((row_offsets, cuts)))
    alone = int(offsets[-1]) % copies
    rows_of_slots = Patterns(
        np.arange(len(row_offsets)) * copies,
        row_offsets,
        alone + slot.astype(np.int64) * copies,
        np.ones(pieces, np.int32),
    )
    return _with_rows_alone(rows_of_slots, alone)


def _drawn(
    sizes: NDArray[np.int32],
    counts: NDArray[np.int64],
    capacity: int,
    most: int,
    rows: int,
    key: np.uint64,
) -> tuple[NDArray[np.int32], int] | None:
    """The random row of each slot, and of how many draws; None if no drawing is as full."""
    spare = rows * capacity - int(counts @ sizes)
    # In loose rows exchanges mix more than the later drawings, and sooner.
    loose = 100 * spare > rows * capacity
    for number, draws in enumerate(_DRAWS[:3] if loose else _DRAWS, 1):
        own = np.uint64(mix(key, np.uint64(number)))
        row_offsets, classes = kernels.random_rows(sizes, counts, capacity, most, rows, draws, own)
        if row_offsets.size:
            rows_drawn = np.repeat(
                np.arange(len(row_offsets) - 1, dtype=np.int32), np.diff(row_offsets)
            )
            return rows_drawn[np.argsort(classes, kind="stable")], draws
    return None


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
