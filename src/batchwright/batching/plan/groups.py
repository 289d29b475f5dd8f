"""Samples that must stay together: every group whole in one microbatch."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from batchwright import rng
from batchwright.batching.config import BatchingConfig, PadPolicy
from batchwright.batching.packing.bins import pack_lengths
from batchwright.batching.plan.order import Rows
from batchwright.batching.plan.pieces import Pieces
from batchwright.errors import ConfigError, OversizedSample
from batchwright.permutation import permutation

__all__ = ["ALONE", "Groups", "Unit", "shuffled_units", "units_of", "whole_units"]

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


@dataclass(frozen=True, slots=True)
class Unit:
    """What is planned as one: the pieces of a group, or one piece of a sample that is alone."""

    group: int
    pieces: NDArray[np.int64]
    rows: tuple[NDArray[np.int64], ...]
    """The matrix rows that it fills, each with its pieces."""
    room: int
    """Tokens that all of it takes up."""
    width: int
    """Tokens of a row, by which the budget is counted."""
    bucket: int
    """The bucket of its longest piece in a bucketed layout, else -1."""


def units_of(pieces: Pieces, groups: Groups, config: BatchingConfig) -> list[Unit]:
    """The units of `pieces`, in the order of their first pieces."""
    group = groups.of_sample[pieces.items].astype(np.int64)
    alone = np.flatnonzero(group == ALONE)
    # Every piece of a sample that is alone is a unit of its own.
    group[alone] = len(groups.of_sample) + alone
    _, first, which = np.unique(group, return_index=True, return_inverse=True)
    grouped = np.argsort(which, kind="stable")
    bounds = np.concatenate(([0], np.cumsum(np.bincount(which))))
    longest = np.maximum.reduceat(pieces.lengths[grouped], bounds[:-1])
    room = config.room(pieces.lengths)
    tokens = np.add.reduceat(room[grouped].astype(np.int64), bounds[:-1])
    widths, buckets = _widths(longest, config)
    units = []
    for number in np.argsort(first, kind="stable").tolist():
        members = grouped[bounds[number] : bounds[number + 1]]
        rows = _rows(members, room, int(tokens[number]), config)
        of = int(groups.of_sample[pieces.items[members[0]]])
        sizes = (int(tokens[number]), int(widths[number]), int(buckets[number]))
        units.append(Unit(of, members, rows, *sizes))
    return units


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
    members: NDArray[np.int64], room: NDArray[np.int32], tokens: int, config: BatchingConfig
) -> tuple[NDArray[np.int64], ...]:
    if config.layout != "packed":
        return tuple(members[at : at + 1] for at in range(len(members)))
    most = config.pack_max_segments
    if tokens <= config.limit and len(members) <= (most or len(members)):
        return (members,)
    packing = pack_lengths(room[members], config.limit, max_segments=most)
    return tuple(members[packing.items[a:b]] for a, b in pairwise(packing.offsets.tolist()))


def whole_units(pieces: Pieces, groups: Groups, config: BatchingConfig) -> Pieces:
    """The pieces of groups that fit a microbatch whole, with counts of what was skipped.

    With overflow skip a group is skipped if one of its samples is, or if it is too large.
    Otherwise a group that is too large is refused.
    """
    lost = groups.of_sample[pieces.skipped]
    lost = lost[lost != ALONE]
    for unit in units_of(pieces, groups, config):
        if len(unit.rows) * unit.width <= config.token_budget:
            continue
        if config.overflow != "skip":
            raise OversizedSample(
                f"group {groups.name(unit.group)!r} of {len(unit.pieces):,} samples needs "
                f"{len(unit.rows):,} rows of {unit.width:,} tokens in one microbatch, over "
                f"token_budget={config.token_budget:,}; raise the budget to at least "
                f"{len(unit.rows) * unit.width:,}, or skip such groups with overflow skip"
            )
        lost = np.append(lost, unit.group)
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
    units: list[Unit],
    rows: list[list[NDArray[np.int64]]],
    config: BatchingConfig,
    epoch: int,
) -> list[Rows]:
    """The microbatches of an epoch: `units` and packed `rows` of small units, none divided.

    `rows` hold whole units each, so they may stand in any microbatch.
    """
    order = permutation(len(units), np.uint64(rng.key(config.seed, "plan/units", epoch)))
    shuffled = [units[at] for at in order.tolist()]
    if config.layout == "packed":
        batches = _packed(shuffled, rows, config)
    elif config.layout == "sorted":
        batches = _sorted(shuffled, config)
    else:
        batches = _bucketed(shuffled, config)
    if config.interleave_buckets:
        key = np.uint64(rng.key(config.seed, "plan/batches", epoch))
        batches = [batches[at] for at in permutation(len(batches), key).tolist()]
    return [_laid(pieces, bucket, listed, config) for bucket, listed in batches]


Batch = tuple[int, list[NDArray[np.int64]]]
"""A bucket, and rows of pieces."""


def _packed(
    units: list[Unit], small: list[list[NDArray[np.int64]]], config: BatchingConfig
) -> list[Batch]:
    """Units of several rows share microbatches; the rows of small units fill them up."""
    most = config.token_budget // config.get_pad_length(-1, config.pack_max_length)
    left = [np.concatenate(row) for row in small]
    batches: list[Batch] = []
    if units:
        packing = pack_lengths(np.array([len(unit.rows) for unit in units]), most)
        for a, b in pairwise(packing.offsets.tolist()):
            listed = [row for at in packing.items[a:b].tolist() for row in units[at].rows]
            kept = max(0, len(left) - (most - len(listed)))
            batches.append((-1, listed + left[kept:]))
            del left[kept:]
    batches += [(-1, left[at : at + most]) for at in range(0, len(left), most)]
    return batches


def _sorted(units: list[Unit], config: BatchingConfig) -> list[Batch]:
    """Runs of units by width, as long as the budget allows; the narrowest come first."""
    batches: list[Batch] = []
    widest = 0
    for unit in sorted(units, key=lambda unit: unit.width, reverse=True):
        if not batches or (len(batches[-1][1]) + len(unit.rows)) * widest > config.token_budget:
            widest = unit.width
            batches.append((-1, []))
        batches[-1][1].extend(unit.rows)
    return batches[::-1]


def _bucketed(units: list[Unit], config: BatchingConfig) -> list[Batch]:
    """The units of each bucket in as few batches as their rows need, bucket after bucket."""
    batches: list[Batch] = []
    for bucket in sorted({unit.bucket for unit in units}):
        own = [unit for unit in units if unit.bucket == bucket]
        sizes = np.array([len(unit.rows) for unit in own])
        packing = pack_lengths(sizes, config.token_budget // own[0].width)
        for a, b in pairwise(packing.offsets.tolist()):
            rows = [row for at in packing.items[a:b].tolist() for row in own[at].rows]
            batches.append((bucket, rows))
    return batches


def _laid(
    pieces: Pieces, bucket: int, rows: list[NDArray[np.int64]], config: BatchingConfig
) -> Rows:
    at = np.concatenate(rows)
    lengths = pieces.lengths[at]
    packed = config.layout == "packed"
    width = config.get_pad_length(bucket, config.pack_max_length if packed else int(lengths.max()))
    offsets = np.cumsum([0, *(len(row) for row in rows)]).astype(np.int32)
    starts = pieces.starts[at] if pieces.starts.size else np.zeros_like(lengths)
    return Rows(bucket, width, pieces.items[at], starts, lengths, offsets)
