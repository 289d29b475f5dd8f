"""Samples that must stay together: every group whole in one microbatch."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from batchwright import rng
from batchwright.batching.config import BatchingConfig, PadPolicy
from batchwright.batching.packing.bins import pack_lengths
from batchwright.batching.plan.order import Listing
from batchwright.batching.plan.pieces import Pieces
from batchwright.errors import ConfigError, OversizedSample
from batchwright.permutation import permutation

__all__ = ["ALONE", "Groups", "Units", "runs", "shuffled_units", "units_of", "whole_units"]

ALONE = -1
"""The group of a sample that is in none."""


@dataclass(frozen=True, slots=True)
class Groups:
    """The group of each sample, by number; samples whose group has no other are `ALONE`."""

    of_sample: NDArray[np.int32]
    names: tuple[str, ...] = ()
    """Names of the groups for messages; a plan that was loaded knows their numbers only."""

    @classmethod
    def of(cls, labels: Sequence[Hashable] | NDArray[np.generic], samples: int) -> "Groups | None":
        """Groups by equal labels, of which None is no group; None if every sample is alone."""
        listed: list[Hashable] = labels.tolist() if isinstance(labels, np.ndarray) else list(labels)
        if len(listed) != samples:
            raise ConfigError(
                f"groups has {len(listed):,} values for {samples:,} samples; give one each"
            )
        numbers: dict[Hashable, int] = {}
        for label in listed:
            if label is not None:
                numbers.setdefault(label, len(numbers))
        of_sample = np.array(
            [ALONE if label is None else numbers[label] for label in listed], np.int32
        )
        sizes = np.bincount(of_sample[of_sample >= 0], minlength=1)
        if sizes.max(initial=0) < 2:
            return None
        of_sample[(of_sample >= 0) & (sizes[of_sample] < 2)] = ALONE
        return cls(of_sample, tuple(map(str, numbers)))

    def name(self, number: int) -> str:
        return self.names[number] if self.names else str(number)


@dataclass(frozen=True, slots=True, eq=False)
class Units:
    """What is planned as one: the pieces of a group, or one piece of a sample that is alone.

    Unit u fills the matrix rows rows[u] to rows[u + 1] - 1, row r has the pieces
    members[offsets[r]] to members[offsets[r + 1] - 1].
    """

    members: NDArray[np.int64]
    offsets: NDArray[np.int64]
    rows: NDArray[np.int64]
    group: NDArray[np.int64]
    room: NDArray[np.int64]
    """Tokens that all of it takes up."""
    width: NDArray[np.int64]
    """Tokens of a row, by which the budget is counted."""
    bucket: NDArray[np.int64]
    """The bucket of its longest piece in a bucketed layout, else -1."""

    def __len__(self) -> int:
        return len(self.group)

    @property
    def row_counts(self) -> NDArray[np.int64]:
        return np.diff(self.rows)

    def take(self, numbers: NDArray[np.integer]) -> "Units":
        """These units, in this order."""
        rows, unit_rows = runs(self.rows, numbers)
        at, offsets = runs(self.offsets, rows)
        mine = (column[numbers] for column in (self.group, self.room, self.width, self.bucket))
        return Units(self.members[at], offsets, unit_rows, *mine)


def runs(
    offsets: NDArray[np.int64], numbers: NDArray[np.integer]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The places in the runs of these numbers, one run after another, and the offsets of those.

    Run i are the places offsets[i] to offsets[i + 1] - 1.

    >>> [found.tolist() for found in runs(np.array([0, 2, 3, 6]), np.array([2, 0]))]
    [[3, 4, 5, 0, 1], [0, 3, 5]]
    """
    sizes = np.diff(offsets)[numbers]
    ends = np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)))
    moved = np.repeat(offsets[:-1][numbers] - ends[:-1], sizes)
    return moved + np.arange(ends[-1]), ends


def units_of(pieces: Pieces, groups: Groups, config: BatchingConfig) -> Units:
    """The units of `pieces`, in the order of their first pieces."""
    group = groups.of_sample[pieces.items].astype(np.int64)
    alone = np.flatnonzero(group == ALONE)
    # Every piece of a sample that is alone is a unit of its own.
    group[alone] = len(groups.of_sample) + alone
    _, first, which = np.unique(group, return_index=True, return_inverse=True)
    # Renumbered by first piece; sorted by that, the pieces of a unit keep their order.
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first))
    unit = rank[which]
    members = np.argsort(unit, kind="stable")
    bounds = np.concatenate((np.zeros(1, np.int64), np.cumsum(np.bincount(unit))))
    room = config.room(pieces.lengths)
    tokens = np.add.reduceat(room[members].astype(np.int64), bounds[:-1])
    widths, buckets = _widths(np.maximum.reduceat(pieces.lengths[members], bounds[:-1]), config)
    of = groups.of_sample[pieces.items[members[bounds[:-1]]]].astype(np.int64)
    rows = _rows(members, bounds, room, tokens, config)
    return Units(*rows, of, tokens, widths, buckets)


def _widths(
    longest: NDArray[np.int32], config: BatchingConfig
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The row width and the bucket of units by their longest pieces."""
    none = np.full(len(longest), -1)
    if config.layout == "packed":
        return np.full(len(longest), config.get_pad_length(-1, config.pack_max_length)), none
    if config.layout == "sorted":
        return -(-longest.astype(np.int64) // config.width_multiple) * config.width_multiple, none
    padded = config.model_copy(update={"pad_policy": PadPolicy.PAD_TO_BUCKET})
    buckets = config.bucket_spec.get_bucket_ids(longest)
    width = {b: padded.get_pad_length(b, 0) for b in np.unique(buckets).tolist()}
    return np.array([width[b] for b in buckets.tolist()]), buckets


def _rows(
    members: NDArray[np.int64],
    bounds: NDArray[np.int64],
    room: NDArray[np.int32],
    tokens: NDArray[np.int64],
    config: BatchingConfig,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Members, offsets and rows of units that have the members bounds[u] to bounds[u + 1] - 1."""
    if config.layout != "packed":
        return members, np.arange(len(members) + 1), bounds
    most = config.pack_max_segments
    large = (tokens > config.limit) | (np.diff(bounds) > (most or len(members)))
    counts = np.ones(len(tokens), np.int64)
    # Where each row ends, at first as if every unit had one.
    ends = [bounds[1:][~large]]
    members = members.copy()
    for unit in np.flatnonzero(large).tolist():
        own = members[bounds[unit] : bounds[unit + 1]]
        packing = pack_lengths(room[own], config.limit, max_segments=most)
        own[:] = own[packing.items]
        ends.append(bounds[unit] + packing.offsets[1:])
        counts[unit] = packing.num_bins
    offsets = np.concatenate((np.zeros(1, np.int64), np.sort(np.concatenate(ends))))
    return members, offsets, np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))


def whole_units(pieces: Pieces, groups: Groups, config: BatchingConfig) -> Pieces:
    """The pieces of groups that fit a microbatch whole, with counts of what was skipped.

    With overflow skip a group is skipped if one of its samples is, or if it is too large.
    Otherwise a group that is too large is refused.
    """
    lost = groups.of_sample[pieces.skipped]
    lost = lost[lost != ALONE]
    if config.layout == "packed" and not lost.size:
        grouped = groups.of_sample[pieces.items]
        most = max(1, int(np.bincount(grouped[grouped != ALONE], minlength=1).max()))
        # At worst every piece has a row of its own, and then too they fit.
        if most * config.get_pad_length(-1, config.pack_max_length) <= config.token_budget:
            return pieces
    units = units_of(pieces, groups, config)
    rows = units.row_counts
    large = np.flatnonzero(rows * units.width > config.token_budget)
    if large.size and config.overflow != "skip":
        at = int(large[0])
        needed = int(rows[at] * units.width[at])
        size = units.offsets[units.rows[at + 1]] - units.offsets[units.rows[at]]
        raise OversizedSample(
            f"group {groups.name(int(units.group[at]))!r} of {size:,} samples needs "
            f"{rows[at]:,} rows of {units.width[at]:,} tokens in one microbatch, over "
            f"token_budget={config.token_budget:,}; raise the budget to at least "
            f"{needed:,}, or skip such groups with overflow skip"
        )
    lost = np.append(lost, units.group[large])
    if not lost.size:
        return pieces
    gone = np.isin(groups.of_sample, lost)
    kept = ~gone[pieces.items]
    if not kept.any():
        raise ConfigError("all samples were skipped with their groups; raise token_budget")
    more = np.setdiff1d(np.flatnonzero(gone), pieces.skipped)
    skipped = np.concatenate([pieces.skipped, more]).astype(np.int32)
    planned = pieces.lengths[kept]
    tokens = int(planned.sum(dtype=np.int64))
    counts = replace(
        pieces.counts,
        planned_pieces=len(planned),
        planned_tokens=tokens,
        skipped_group=len(more),
        tokens_left_out=pieces.counts.tokens - tokens,
    )
    starts = pieces.starts[kept] if pieces.starts.size else pieces.starts
    return Pieces(pieces.items[kept], starts, planned, skipped, counts)


def shuffled_units(
    pieces: Pieces,
    units: Units,
    small: tuple[NDArray[np.int64], NDArray[np.int64]] | None,
    config: BatchingConfig,
    epoch: int,
) -> Listing:
    """The microbatches of an epoch: `units` and packed rows of `small` units, none divided.

    The rows of small ones, members and offsets, may stand in any microbatch.
    """
    order = permutation(len(units), np.uint64(rng.key(config.seed, "plan/units", epoch)))
    shuffled = units.take(order)
    if config.layout == "packed":
        made = _packed(shuffled, 0 if small is None else len(small[1]) - 1, config)
    elif config.layout == "sorted":
        made = _sorted(shuffled, config)
    else:
        made = _bucketed(shuffled, config)
    members, offsets = shuffled.members, shuffled.offsets
    if small is not None:
        offsets = np.concatenate((offsets, small[1][1:] + offsets[-1]))
        members = np.concatenate((members, small[0]))
    rows, batches, buckets = made
    if config.interleave_buckets:
        key = np.uint64(rng.key(config.seed, "plan/batches", epoch))
        mixed = permutation(len(buckets), key)
        at, batches = runs(batches, mixed)
        rows, buckets = rows[at], buckets[mixed]
    at, row_offsets = runs(offsets, rows)
    return _laid(pieces, members[at], row_offsets, batches, buckets, config)


Batches = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]
"""Rows by number, the offsets of each batch in them, and the bucket of each."""


def _packed(units: Units, small: int, config: BatchingConfig) -> Batches:
    """Units of several rows share microbatches; the rows of small units fill them up.

    The small rows are numbered after those of the units.
    """
    most = config.token_budget // config.get_pad_length(-1, config.pack_max_length)
    first = int(units.rows[-1])
    rows, left = [np.empty(0, np.int64)], small
    sizes = [0]
    if len(units):
        packing = pack_lengths(units.row_counts, most)
        own, row_offsets = runs(units.rows, packing.items)
        for a, b in pairwise(row_offsets[packing.offsets].tolist()):
            kept = max(0, left - (most - (b - a)))
            rows += [own[a:b], first + np.arange(kept, left)]
            sizes.append(b - a + left - kept)
            left = kept
    rows.append(first + np.arange(left))
    sizes += [min(most, left - at) for at in range(0, left, most)]
    return np.concatenate(rows), np.cumsum(sizes), np.full(len(sizes) - 1, -1)


def _sorted(units: Units, config: BatchingConfig) -> Batches:
    """Runs of units by width, as long as the budget allows; the narrowest come first."""
    order = np.argsort(-units.width, kind="stable")
    widths = units.width[order]
    ends = np.cumsum(units.row_counts[order])
    cuts = [0]
    while cuts[-1] < len(order):
        begun = cuts[-1]
        before = ends[begun - 1] if begun else 0
        most = before + config.token_budget // widths[begun]
        cuts.append(max(begun + 1, int(np.searchsorted(ends, most, side="right"))))
    narrow_first, in_units = runs(np.array(cuts), np.arange(len(cuts) - 1)[::-1])
    rows, row_offsets = runs(units.rows, order[narrow_first])
    return rows, row_offsets[in_units], np.full(len(cuts) - 1, -1)


def _bucketed(units: Units, config: BatchingConfig) -> Batches:
    """The units of each bucket in as few batches as their rows need, bucket after bucket."""
    rows, sizes, buckets = [], [np.zeros(1, np.int64)], []
    for bucket in np.unique(units.bucket).tolist():
        own = np.flatnonzero(units.bucket == bucket)
        packing = pack_lengths(
            units.row_counts[own], int(config.token_budget // units.width[own[0]])
        )
        found, row_offsets = runs(units.rows, own[packing.items])
        rows.append(found)
        sizes.append(np.diff(row_offsets[packing.offsets]))
        buckets.append(np.full(packing.num_bins, bucket))
    return np.concatenate(rows), np.cumsum(np.concatenate(sizes)), np.concatenate(buckets)


def _laid(
    pieces: Pieces,
    at: NDArray[np.int64],
    row_offsets: NDArray[np.int64],
    batches: NDArray[np.int64],
    buckets: NDArray[np.int64],
    config: BatchingConfig,
) -> Listing:
    """The pieces `at` as microbatches, each as wide as its layout asks."""
    lengths = pieces.lengths[at]
    packed = config.layout == "packed"
    longest = np.maximum.reduceat(lengths, row_offsets[batches[:-1]])
    asked = np.full(len(buckets), config.pack_max_length) if packed else longest.astype(np.int64)
    kinds, which = np.unique(np.stack([buckets, asked]), axis=1, return_inverse=True)
    widths = [config.get_pad_length(bucket, asked) for bucket, asked in kinds.T.tolist()]
    return Listing(
        pieces.items[at],
        pieces.starts[at] if pieces.starts.size else np.zeros_like(lengths),
        lengths,
        row_offsets,
        batches,
        np.array(widths, np.int32)[which],
        buckets.astype(np.int32),
    )
