"""Lay samples into microbatches: lengths in, the order of every epoch out.

    lengths -> pieces (overflow policy) -> canonical order (longest first) -> shapes -> order

The order depends on the samples and the seed alone: not on the order in which samples were
given, nor on machine, process count or library version. All of it is arithmetic on integers,
but for `pack_mode` optimal, whose patterns come from a linear programme and are stored.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from batchwright import rng
from batchwright.batching.config import BatchingConfig, PadPolicy
from batchwright.batching.packing import kernels
from batchwright.batching.packing.bins import pack_lengths
from batchwright.batching.packing.modes import PackingMode
from batchwright.batching.packing.optimal import pack_optimal
from batchwright.batching.plan import order_kernels
from batchwright.batching.plan.canonical import canonical_order
from batchwright.batching.plan.groups import Groups, Units, shuffled_units, units_of, whole_units
from batchwright.batching.plan.mixing import mixable_patterns
from batchwright.batching.plan.order import (
    Listing,
    MaterialisedOrder,
    Order,
    VirtualOrder,
)
from batchwright.batching.plan.pieces import Counts, Pieces, cut_pieces
from batchwright.data.entries import mixture_hash
from batchwright.data.ids import Ids
from batchwright.data.lengths import LengthCache, Lengths
from batchwright.errors import ConfigError, DuplicateId, OversizedSample
from batchwright.jit import interpreted, quicker_without_numba
from batchwright.permutation import permutation

__all__ = [
    "Arranged",
    "LengthSource",
    "Source",
    "arrange",
    "check_costs",
    "check_difficulty",
    "join_sources",
    "with_costs",
]

LengthSource = Mapping[str, int] | LengthCache | Lengths | NDArray[np.integer]

Source = tuple[str, int, float]
"""Name, size and weight of one source of a mixture."""

SORT_SLACK = 128
"""In the sorted layout lengths within 1/128 of each other count as equal: batches lose under one
percent of their tokens and gain new neighbours every epoch."""


MOST_SHOWN = 2**31 - 1
"""Samples that a source of a mixture may show in an epoch."""


@dataclass(frozen=True, slots=True)
class Arranged:
    """An order, what it was made of, and a note if packing has one."""

    order: Order
    pieces: Pieces
    note: str = ""
    shown: Counts | None = None
    """Of a mixture: counts of the samples that some epoch shows."""


def arrange(
    lengths: Lengths,
    config: BatchingConfig,
    num_epochs: int,
    sources: Sequence[Source] = (),
    difficulty: NDArray[np.float64] | None = None,
    groups: Groups | None = None,
) -> Arranged:
    """The order of `num_epochs` epochs. A sample over the limit follows `config.overflow`.

    Mixtures, curricula, groups and packing by arrival are written out epoch by epoch; everything
    else is a virtual order, which holds for any number of epochs.
    """
    pieces = cut_pieces(lengths, config)
    canonical = canonical_order(lengths.ids)
    if difficulty is None and not sources and groups is None and not _by_arrival(config):
        return _virtual(pieces, canonical, config)
    if canonical is None:
        canonical = np.arange(len(lengths), dtype=np.int32)
    if groups is not None:
        pieces = whole_units(pieces, groups, config)
        ordered = pieces.of_items(canonical)
        units = units_of(ordered, groups, config)
        together = [_grouped(ordered, units, config, epoch) for epoch in range(num_epochs)]
        return Arranged(MaterialisedOrder.collect(config, together), pieces)
    # From easy to hard, in stages; all in one stage without a difficulty.
    easy_first, stages = canonical, 1
    if difficulty is not None:
        easy_first = canonical[np.argsort(difficulty[canonical], kind="stable")]
        stages = config.curriculum_stages
    epochs = []
    seen = np.full(len(lengths), not sources)
    for epoch in range(num_epochs):
        times = _times_shown(canonical, sources, config, epoch) if sources else None
        shown = easy_first if times is None else np.repeat(easy_first, times[easy_first])
        epochs.append(_listed(pieces, np.array_split(shown, stages), config, epoch))
        seen |= True if times is None else times > 0
    sizes = [epoch.items.size for epoch in epochs]
    if 0 in sizes:
        raise ConfigError(
            f"epoch {sizes.index(0)} is empty: all samples it would show were skipped; "
            f"give larger weights or another overflow policy"
        )
    counts = pieces.counts if seen.all() else _counts_of(lengths, seen, config)
    return Arranged(MaterialisedOrder.collect(config, epochs), pieces, shown=counts)


def _counts_of(lengths: Lengths, seen: NDArray[np.bool_], config: BatchingConfig) -> Counts:
    """What the policies do to some of the samples."""
    values = lengths.values[seen]
    loss = None if lengths.loss is None else lengths.loss[seen]
    some = replace(lengths, values=values, ids=Ids.numbered(len(values)), rows=None, loss=loss)
    return cut_pieces(some, config).counts


def join_sources(
    sources: Mapping[str, LengthSource], weights: Mapping[str, float]
) -> tuple[Lengths, tuple[tuple[str, int, float], ...]]:
    """Several sources as one, ids prefixed by the source's name."""
    if set(sources) != set(weights):
        raise ConfigError(
            f"weights are for {sorted(weights)}, sources are {sorted(sources)}; name each once"
        )
    if not sources:
        raise ConfigError("there are no sources to mix; give at least one")
    parts = {name: Lengths.of(source) for name, source in sources.items()}
    for name, part in parts.items():
        weight = weights[name]
        if not 0 < weight < math.inf:
            raise ConfigError(
                f"source {name!r} has weight {weight}; a weight must be above 0 and finite, as 2 "
                f"shows each of its samples twice an epoch"
            )
        if weight * len(part) > MOST_SHOWN:
            raise ConfigError(
                f"source {name!r} with weight {weight:g} shows {weight * len(part):.3g} samples an "
                f"epoch, more than {MOST_SHOWN:,}; give a smaller weight"
            )
        if round(weight * len(part)) < 1:
            raise ConfigError(
                f"source {name!r} with weight {weight} shows none of its {len(part):,} samples; "
                f"give a larger weight or leave it out"
            )
    tokenizers = {part.tokenizer_hash for part in parts.values()}
    if len(tokenizers) > 1:
        raise ConfigError(
            f"the sources were measured with {len(tokenizers)} different tokenizers; "
            f"measure them with one"
        )
    ids = Ids.prefixed({name: part.ids for name, part in parts.items()})
    twice = ids.first_duplicate()
    if twice is not None:
        raise DuplicateId(
            f"two samples of the mixture are called {ids[twice[1]]!r}; "
            f"rename a source so that no name continues another with a slash"
        )
    lengths = Lengths(
        values=np.concatenate([part.values for part in parts.values()]),
        ids=ids,
        dataset_hash=mixture_hash({name: part.dataset_hash for name, part in parts.items()}),
        tokenizer_hash=tokenizers.pop(),
        loss=_joined_loss([*parts.values()]),
    )
    return lengths, tuple((name, len(part), float(weights[name])) for name, part in parts.items())


def _joined_loss(parts: Sequence[Lengths]) -> NDArray[np.int32] | None:
    """Where the loss of all samples is; unknown if it is for some."""
    known = [part.loss for part in parts if part.loss is not None]
    return np.concatenate(known) if len(known) == len(parts) else None


def check_difficulty(
    difficulty: Sequence[float] | NDArray[np.floating] | None,
    samples: int,
) -> NDArray[np.float64] | None:
    if difficulty is None:
        return None
    values = np.asarray(difficulty, np.float64)
    if values.shape != (samples,):
        raise ConfigError(
            f"difficulty has {values.size:,} values for {samples:,} samples; give one each"
        )
    if not np.isfinite(values).all():
        bad = int(np.flatnonzero(~np.isfinite(values))[0])
        raise ConfigError(f"the difficulty of sample {bad} is {values[bad]}; give a finite number")
    return values


def check_costs(
    costs: Sequence[int] | NDArray[np.integer] | None, samples: int
) -> NDArray[np.int32] | None:
    if costs is None:
        return None
    values = np.asarray(costs)
    if values.shape != (samples,):
        raise ConfigError(
            f"costs has {values.size:,} values for {samples:,} samples; give one each"
        )
    if values.dtype.kind not in "iu" or values.min() < 0 or values.max() >= 2**31:
        raise ConfigError(
            "costs must be integers of at least 0, the tokens that each sample takes up beside "
            "its own"
        )
    return values.astype(np.int32)


def with_costs(lengths: Lengths, costs: NDArray[np.int32], config: BatchingConfig) -> Lengths:
    """The lengths that are planned: tokens and costs. Only tokens can be cut."""
    if config.overflow == "split":
        raise ConfigError(
            "overflow split cannot divide the costs of a sample; choose error, skip or truncate"
        )
    values = lengths.values.astype(np.int64) + costs
    uncut = np.flatnonzero((costs >= config.limit) | (values >= 2**31))
    if uncut.size and config.overflow == "truncate":
        at = int(uncut[0])
        raise OversizedSample(
            f"sample {lengths.ids[at]!r} costs {int(costs[at]):,} tokens beside its own, which "
            f"cannot be truncated to {config.limit:,}; choose overflow skip, or raise the limit"
        )
    loss = lengths.loss
    if loss is not None:
        # Costs stand before the tokens, so that cutting a sample cuts its last tokens.
        moved = np.minimum(loss[:, 0] + costs.astype(np.int64), 2**31 - 1)
        loss = np.stack([moved, loss[:, 1]], axis=1).astype(np.int32)
    return replace(lengths, values=np.minimum(values, 2**31 - 1).astype(np.int32), loss=loss)


def _times_shown(
    canonical: NDArray[np.int32], sources: Sequence[Source], config: BatchingConfig, epoch: int
) -> NDArray[np.int64]:
    """How often the epoch shows each sample."""
    times = np.zeros(len(canonical), np.int64)
    first = 0
    by_name = sorted(name for name, _, _ in sources)
    for name, size, weight in sources:
        # By name, so that the order in which sources are given does not matter.
        number = by_name.index(name)
        # One multiplication of doubles and one rounding, the same on every machine.
        shown = round(weight * size)
        own = canonical[(canonical >= first) & (canonical < first + size)]
        # Source after source is dealt out in rounds, so fractions cover everything in turn.
        for turn in range(epoch * shown // size, ((epoch + 1) * shown - 1) // size + 1):
            low = max(epoch * shown - turn * size, 0)
            high = min((epoch + 1) * shown - turn * size, size)
            if high - low == size:
                times[own] += 1
                continue
            key = np.uint64(rng.key(config.seed, "plan/mixture", number, turn))
            times[own[permutation(size, key)[low:high]]] += 1
        first += size
    return times


def _listed(
    pieces: Pieces, stages: Sequence[NDArray[np.int32]], config: BatchingConfig, epoch: int
) -> Listing:
    """The microbatches of one epoch, stage by stage."""
    listed = []
    for number, stage in enumerate(stages):
        own = config.model_copy(update={"seed": rng.key(config.seed, "plan/stage", number)})
        part = pieces.of_items(stage)
        if part.items.size and _by_arrival(own):
            listed.append(_packed_by_arrival(part, own, epoch))
        elif part.items.size:
            order = _virtual(part, None, own).order
            listed.append(order.listing(epoch, 0, order.size(epoch)))
    return Listing.joined(listed)


def _grouped(pieces: Pieces, units: Units, config: BatchingConfig, epoch: int) -> Listing:
    """The microbatches of one epoch, in which no unit is divided."""
    if config.layout != "packed":
        return shuffled_units(pieces, units, None, config, epoch)
    rows = units.row_counts
    large, small = units.take(np.flatnonzero(rows > 1)), units.take(np.flatnonzero(rows == 1))
    if not len(small):
        return shuffled_units(pieces, large, None, config, epoch)
    # Units of one row are packed as samples are, each as long as all of it.
    most = config.pack_max_segments
    if most is not None:
        most = max(1, most // int(np.diff(small.offsets).max()))
    one_row = {"token_budget": config.limit, "pack_max_length": config.limit, "align": 1}
    own = config.model_copy(
        update={**one_row, "segment_multiple": 1, "pack_max_segments": most, "min_length": 1}
    )
    numbers = np.arange(len(small), dtype=np.int32)
    rooms = small.room.astype(np.int32)
    whole = Pieces(numbers, np.empty(0, np.int32), rooms, pieces.skipped, pieces.counts)
    packed = _listed(whole, [numbers], own, epoch)
    in_row = small.take(packed.items)
    rows_of_small = in_row.members, in_row.offsets[packed.row_offsets]
    return shuffled_units(pieces, large, rows_of_small, config, epoch)


def _virtual(
    pieces: Pieces, canonical: NDArray[np.int32] | None, config: BatchingConfig
) -> Arranged:
    """Sort longest first, then draw the shapes of the layout; a note if packing has one."""
    if canonical is not None:
        pieces = pieces.of_items(canonical)
    hist, by_length = _longest_first(pieces.lengths)
    # Sorting row numbers that are 0 .. n - 1 already gives the items.
    whole = canonical is None and not pieces.starts.size and _counts_up(pieces.items)
    distinct = np.flatnonzero(hist)[::-1].astype(np.int32)
    distinct_offsets = _offsets(hist[distinct])
    no_longs, no_ints = np.empty(0, np.int64), np.empty(0, np.int32)
    classes = distinct_offsets
    batch_start, batch_size = no_longs, no_ints
    patterns = (no_longs, no_longs, no_longs, no_ints)
    mixing = no_longs
    note = ""
    if config.layout == "packed":
        # Positions with the longest first are in the order of their rooms as well.
        rooms = np.zeros(config.limit + 1, np.int64)
        np.add.at(rooms, config.room(distinct), hist[distinct])
        most = config.pack_max_segments
        packed, mixing = mixable_patterns(rooms, config.limit, most)
        if config.pack_mode is PackingMode.OPTIMAL:
            best = pack_optimal(rooms, config.limit, most)
            note = f"{best.method}: {best.note}"
            if best.patterns.num_bins < packed.num_bins:
                packed = best.patterns
                # Blocks were cut from best-fit-decreasing; one block is as good as any rows.
                mixing = (
                    np.array([1, packed.num_bins, 0]) if mixing.tolist()[:1] == [1] else no_longs
                )
        patterns = packed.arrays
    elif config.layout == "sorted":
        classes, widths = _near_lengths(distinct, distinct_offsets, config.width_multiple)
        # At most two runs share a class, and one more is cut for every budget of tokens.
        runs = 2 * widths.size + pieces.counts.planned_tokens // config.token_budget
        with interpreted(quicker_without_numba(4.0 * runs)):
            starts = order_kernels.cut_by_budget(widths, classes, config.token_budget)
        batch_start, batch_size = starts[:-1], np.diff(starts).astype(np.int32)
    else:
        classes, batch_start, batch_size = _buckets(distinct, distinct_offsets, config)
    order = VirtualOrder(
        config,
        by_length if whole else pieces.items[by_length],
        pieces.starts[by_length] if pieces.starts.size else no_ints,
        distinct,
        distinct_offsets,
        classes,
        batch_start,
        batch_size,
        *patterns,
        mixing,
    )
    return Arranged(order, pieces, note)


def _longest_first(lengths: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """How many pieces have each length, and the pieces longest first, equal ones in order."""
    if quicker_without_numba(0.2 * lengths.size):
        return np.bincount(lengths), np.argsort(-lengths, kind="stable").astype(np.int32)
    hist = kernels.histogram(lengths, int(lengths.max()))
    return hist, kernels.sort_descending(lengths, hist)


def _by_arrival(config: BatchingConfig) -> bool:
    """Whether rows depend on the order in which samples come, so that no pattern repeats."""
    sorted_first = (PackingMode.BEST_FIT_DECREASING, PackingMode.OPTIMAL)
    return config.layout == "packed" and config.pack_mode not in sorted_first


def _packed_by_arrival(pieces: Pieces, config: BatchingConfig, epoch: int) -> Listing:
    """Pack samples as they come in this epoch's shuffle, and shuffle the rows."""
    key = np.uint64(rng.key(config.seed, "plan/arrival", epoch))
    arrival = permutation(pieces.items.size, key)
    rooms = config.room(pieces.lengths[arrival])
    packing = pack_lengths(rooms, config.limit, config.pack_mode, config.pack_max_segments)
    key = np.uint64(rng.key(config.seed, "plan/bins", epoch))
    bins = permutation(packing.num_bins, key)
    width = config.get_pad_length(-1, config.pack_max_length)
    # The segments of each row, rows in their new order.
    row_offsets = _offsets(np.diff(packing.offsets)[bins])
    moved = np.repeat(packing.offsets[:-1][bins] - row_offsets[:-1], np.diff(row_offsets))
    at = arrival[packing.items[moved + np.arange(row_offsets[-1])]]
    batches = -(-packing.num_bins // (rows := config.token_budget // width))
    return Listing(
        pieces.items[at],
        pieces.starts[at] if pieces.starts.size else np.zeros_like(pieces.items[at]),
        pieces.lengths[at],
        row_offsets,
        np.minimum(np.arange(batches + 1) * rows, packing.num_bins),
        np.full(batches, width, np.int32),
        np.full(batches, -1, np.int32),
    )


def _near_lengths(
    distinct: NDArray[np.int32], offsets: NDArray[np.int64], align: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Classes of lengths that count as equal, and the width of each class."""
    firsts = [0]
    for at, length in enumerate(distinct.tolist()):
        longest = int(distinct[firsts[-1]])
        if length < longest - longest // SORT_SLACK:
            firsts.append(at)
    widths = -(-distinct[firsts].astype(np.int64) // align) * align
    return np.append(offsets[firsts], offsets[-1]), widths


def _buckets(
    distinct: NDArray[np.int32], offsets: NDArray[np.int64], config: BatchingConfig
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
    """Classes by bucket, and batches of as many samples as the bucket's width allows."""
    spec = config.bucket_spec
    bucket = spec.get_bucket_ids(distinct)
    firsts = np.flatnonzero(np.r_[True, bucket[1:] != bucket[:-1]])
    classes = np.append(offsets[firsts], offsets[-1])
    starts, sizes = [], []
    padded = config.model_copy(update={"pad_policy": PadPolicy.PAD_TO_BUCKET})
    for number, first in enumerate(firsts):
        capacity = config.token_budget // padded.get_pad_length(int(bucket[first]), 0)
        low, high = int(classes[number]), int(classes[number + 1])
        start = np.arange(low, high, capacity)
        size = np.minimum(capacity, high - start)
        if config.drop_last:
            start, size = start[size == capacity], size[size == capacity]
        starts.append(start)
        sizes.append(size)
    batch_start = np.concatenate(starts).astype(np.int64)
    if not batch_start.size:
        raise ConfigError(
            "drop_last leaves no batch: no bucket fills one; turn it off or lower the token budget"
        )
    return classes, batch_start, np.concatenate(sizes).astype(np.int32)


def _counts_up(items: NDArray[np.int32]) -> bool:
    return bool((items == np.arange(items.size, dtype=np.int32)).all())


def _offsets(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])
