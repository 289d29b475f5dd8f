"""Where the steps of the batching engine meet: lengths in, plan out.

    lengths -> pieces (overflow policy) -> canonical order (longest first) -> shapes -> plan

The order depends on the samples and the seed alone: not on the order in which samples were
given, nor on machine, process count or library version.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchwright import rng
from batchwright.batching.config import BatchingConfig, PadPolicy
from batchwright.batching.packing import kernels
from batchwright.batching.packing.bins import PackingMode, pack_histogram, pack_lengths
from batchwright.batching.packing.optimal import pack_optimal
from batchwright.batching.plan import order_kernels
from batchwright.batching.plan.canonical import canonical_order
from batchwright.batching.plan.order import MaterialisedOrder, Order, Rows, VirtualOrder
from batchwright.batching.plan.plan import BatchPlan, Counts
from batchwright.data.entries import mixture_hash
from batchwright.data.ids import Ids
from batchwright.data.lengths import LengthCache, Lengths
from batchwright.errors import ConfigError, DuplicateId, OversizedSample
from batchwright.permutation import permutation

__all__ = ["BatchPlanBuilder", "LengthSource", "Pieces", "cut_pieces", "virtual_order"]

LengthSource = Mapping[str, int] | LengthCache | Lengths | NDArray[np.integer]

LONGEST_PLANNED = 2**26
"""Plans count every length up to the longest, so that one must stay within memory."""

SORT_SLACK = 128
"""In the sorted layout lengths within 1/128 of each other count as equal: batches lose under one
percent of their tokens and gain new neighbours every epoch."""


class BatchPlanBuilder:
    """Builds plans from lengths.

    `weights` mixes several sources: 2.0 shows each sample twice an epoch, 0.5 half of them, a
    different half each epoch until all were seen. `difficulty`, one number a sample, orders an
    epoch in stages from easy to hard. Both are written out epoch by epoch; everything else is
    a virtual plan, which holds for any number of epochs.

    >>> builder = BatchPlanBuilder({"a": 5, "b": 3, "c": 4}, BatchingConfig(token_budget=10,
    ...     layout="packed", pack_max_length=10))
    >>> builder.build(num_epochs=2)
    BatchPlan(3 samples, 2 microbatches, 60.0% useful, packed, seed=42, id=...)
    """

    def __init__(
        self,
        lengths: LengthSource | Mapping[str, LengthSource],
        config: BatchingConfig | None = None,
        *,
        weights: Mapping[str, float] | None = None,
        difficulty: Sequence[float] | NDArray[np.floating] | None = None,
    ) -> None:
        self.config = config or BatchingConfig()
        self.sources: tuple[tuple[str, int, float], ...] = ()
        if weights is None:
            self.lengths = Lengths.of(lengths)  # type: ignore[arg-type]
        else:
            self.lengths, self.sources = _joined(lengths, weights)  # type: ignore[arg-type]
        self.difficulty = _checked_difficulty(difficulty, len(self.lengths))
        if not len(self.lengths):
            raise ConfigError("there are no samples to plan; give at least one length")

    def build(self, num_epochs: int = 1) -> BatchPlan:
        """The plan. A sample over the limit follows `config.overflow`, and the plan counts it."""
        if num_epochs < 1:
            raise ConfigError(f"a plan of {num_epochs} epochs is not possible; give 1 or more")
        pieces = cut_pieces(self.lengths.values, self.config)
        everything = canonical_order(self.lengths.ids)
        order: Order
        note = ""
        if self.difficulty is None and not self.sources and not _by_arrival(self.config):
            order, note = virtual_order(pieces, everything, self.config)
        else:
            epochs = [self._epoch(pieces, everything, epoch) for epoch in range(num_epochs)]
            if not all(epochs):
                raise ConfigError(
                    f"epoch {epochs.index([])} is empty: all samples it would show were skipped; "
                    f"give larger weights or another overflow policy"
                )
            order = MaterialisedOrder.collect(self.config, epochs)
        return BatchPlan(
            order=order,
            ids=self.lengths.ids,
            num_epochs=num_epochs,
            config=self.config,
            counts=pieces.counts,
            skipped=pieces.skipped,
            dataset_hash=self.lengths.dataset_hash,
            tokenizer_hash=self.lengths.tokenizer_hash,
            sources=self.sources,
            difficulty=self.difficulty,
            note=note,
        )

    def _epoch(
        self, pieces: "Pieces", everything: NDArray[np.int32] | None, epoch: int
    ) -> list[Rows]:
        """The microbatches of one epoch, stage by stage."""
        n = len(self.lengths)
        chosen = np.arange(n, dtype=np.int32) if everything is None else everything
        if self.sources:
            chosen = self._mixture(chosen, epoch)
        listed: list[Rows] = []
        for number, stage in enumerate(self._stages(chosen)):
            config = self.config.model_copy(
                update={"seed": rng.key(self.config.seed, "plan/stage", number)}
            )
            part = pieces.of_items(stage)
            if part.items.size and _by_arrival(config):
                listed += _packed_by_arrival(part, config, epoch)
            elif part.items.size:
                order, _ = virtual_order(part, None, config)
                listed += [order.rows(epoch, index) for index in range(order.size(epoch))]
        return listed

    def _mixture(self, canonical: NDArray[np.int32], epoch: int) -> NDArray[np.int32]:
        """Which samples this epoch shows, in canonical order, some of them several times."""
        times = np.zeros(len(self.lengths), np.int64)
        first = 0
        by_name = sorted(name for name, _, _ in self.sources)
        for name, size, weight in self.sources:
            # By name, so that the order in which sources are given does not matter.
            number = by_name.index(name)
            shown = round(weight * size)
            # Source after source is dealt out in rounds, so fractions cover everything in turn.
            for turn in range(epoch * shown // size, ((epoch + 1) * shown - 1) // size + 1):
                low = max(epoch * shown - turn * size, 0)
                high = min((epoch + 1) * shown - turn * size, size)
                key = np.uint64(rng.key(self.config.seed, "plan/mixture", number, turn))
                dealt = canonical[(canonical >= first) & (canonical < first + size)]
                times[dealt[permutation(size, key)[low:high]]] += 1
            first += size
        return np.repeat(canonical, times[canonical])

    def _stages(self, chosen: NDArray[np.int32]) -> list[NDArray[np.int32]]:
        if self.difficulty is None:
            return [chosen]
        by_difficulty = chosen[np.argsort(self.difficulty[chosen], kind="stable")]
        return np.array_split(by_difficulty, self.config.curriculum_stages)


@dataclass(frozen=True)
class Pieces:
    """What is to be planned: `lengths[p]` tokens of sample `items[p]` from `starts[p]` on.

    `items` is None-like (the numbers 0 .. n - 1) unless something was skipped or split.
    """

    items: NDArray[np.int32]
    starts: NDArray[np.int32]
    lengths: NDArray[np.int32]
    skipped: NDArray[np.int32]
    counts: Counts

    def of_items(self, wanted: NDArray[np.int32]) -> "Pieces":
        """The pieces of these samples, in this order; a sample named twice gives them twice."""
        n = int(max(self.items.max(initial=-1), wanted.max(initial=-1))) + 1
        per_item = np.bincount(self.items, minlength=n)
        first = np.cumsum(per_item) - per_item
        repeats = per_item[wanted]
        # Pieces of one sample stand together, so each wanted sample is a run of them.
        base = np.repeat(first[wanted], repeats)
        run = np.arange(repeats.sum()) - np.repeat(np.cumsum(repeats) - repeats, repeats)
        at = base + run
        starts = self.starts[at] if self.starts.size else self.starts
        return Pieces(self.items[at], starts, self.lengths[at], self.skipped, self.counts)


def cut_pieces(lengths: NDArray[np.int32], config: BatchingConfig) -> Pieces:
    """Apply the overflow policy, counting everything it touches."""
    limit = config.limit
    over = np.flatnonzero(lengths > limit)
    short = np.flatnonzero(lengths < config.min_length)
    longest = int(lengths.max())
    if min(longest, limit) > LONGEST_PLANNED:
        raise ConfigError(
            f"pieces of {min(longest, limit):,} tokens are too long to plan; at most "
            f"{LONGEST_PLANNED:,} are possible, lower {_what_limits(config)}"
        )
    total = int(lengths.sum(dtype=np.int64))
    if over.size and config.overflow == "error":
        raise OversizedSample(
            f"{over.size:,} of {lengths.size:,} samples are longer than {limit:,} tokens "
            f"(the longest {longest:,}); choose overflow skip, truncate or split, "
            f"or raise {_what_limits(config)}"
        )
    items = np.arange(lengths.size, dtype=np.int32)
    starts = np.empty(0, np.int32)
    skipped = short
    planned = lengths
    if config.overflow == "skip":
        skipped = np.union1d(short, over)
    elif config.overflow == "truncate":
        planned = np.minimum(lengths, np.int32(limit)) if over.size else lengths
    elif config.overflow == "split" and over.size:
        repeats = np.ones(lengths.size, np.int64)
        repeats[over] = -(-lengths[over].astype(np.int64) // limit)
        items = np.repeat(items, repeats)
        first = np.repeat(np.cumsum(repeats) - repeats, repeats)
        starts = ((np.arange(items.size) - first) * limit).astype(np.int32)
        planned = np.minimum(lengths[items] - starts, np.int32(limit))
    if skipped.size:
        kept = ~np.isin(items, skipped)
        items, planned = items[kept], planned[kept]
        starts = starts[kept] if starts.size else starts
    if not items.size:
        raise ConfigError(
            f"every one of the {lengths.size:,} samples was skipped: allowed are "
            f"{config.min_length:,} to {limit:,} tokens; raise {_what_limits(config)}"
        )
    kept_tokens = int(planned.sum(dtype=np.int64))
    counts = Counts(
        samples=lengths.size,
        tokens=total,
        planned_pieces=items.size,
        planned_tokens=kept_tokens,
        skipped_long=over.size if config.overflow == "skip" else 0,
        skipped_short=short.size,
        truncated=over.size if config.overflow == "truncate" else 0,
        split=over.size if config.overflow == "split" else 0,
        tokens_left_out=total - kept_tokens,
    )
    return Pieces(items, starts, planned, skipped.astype(np.int32), counts)


def virtual_order(
    pieces: Pieces, canonical: NDArray[np.int32] | None, config: BatchingConfig
) -> tuple[VirtualOrder, str]:
    """Sort longest first, then draw the shapes of the layout; a note if packing has one."""
    if canonical is not None:
        pieces = pieces.of_items(canonical)
    hist = kernels.histogram(pieces.lengths, int(pieces.lengths.max()))
    by_length = kernels.sort_descending(pieces.lengths, hist)
    # Sorting row numbers that are 0 .. n - 1 already gives the items.
    whole = canonical is None and not pieces.starts.size and _counts_up(pieces.items)
    distinct = np.flatnonzero(hist)[::-1].astype(np.int32)
    distinct_offsets = _offsets(hist[distinct])
    no_longs, no_ints = np.empty(0, np.int64), np.empty(0, np.int32)
    classes = distinct_offsets
    batch_start, batch_size = no_longs, no_ints
    patterns = (no_longs, no_longs, no_longs, no_ints)
    note = ""
    if config.layout == "packed":
        packed = pack_histogram(hist, config.pack_max_length, config.pack_max_segments)
        if config.pack_mode is PackingMode.OPTIMAL:
            best = pack_optimal(hist, config.pack_max_length, config.pack_max_segments)
            packed, note = best.patterns, f"{best.method}: {best.note}"
        patterns = (
            packed.bin_starts,
            packed.entry_offsets,
            packed.entry_position,
            packed.entry_count,
        )
    elif config.layout == "sorted":
        classes, widths = _near_lengths(distinct, distinct_offsets, config.align)
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
    )
    return order, note


def _by_arrival(config: BatchingConfig) -> bool:
    """Whether rows depend on the order in which samples come, so that no pattern repeats."""
    sorted_first = (PackingMode.BEST_FIT_DECREASING, PackingMode.OPTIMAL)
    return config.layout == "packed" and config.pack_mode not in sorted_first


def _packed_by_arrival(pieces: Pieces, config: BatchingConfig, epoch: int) -> list[Rows]:
    """Pack samples as they come in this epoch's shuffle, and shuffle the rows."""
    key = np.uint64(rng.key(config.seed, "plan/arrival", epoch))
    arrival = permutation(pieces.items.size, key)
    lengths = pieces.lengths[arrival]
    packing = pack_lengths(
        lengths, config.pack_max_length, config.pack_mode, config.pack_max_segments
    )
    key = np.uint64(rng.key(config.seed, "plan/bins", epoch))
    bins = permutation(packing.num_bins, key)
    width = config.get_pad_length(-1, config.pack_max_length)
    rows = config.token_budget // width
    starts = pieces.starts if pieces.starts.size else np.zeros_like(pieces.items)
    listed = []
    for first in range(0, packing.num_bins, rows):
        parts = [
            packing.items[packing.offsets[b] : packing.offsets[b + 1]]
            for b in bins[first : first + rows]
        ]
        at = arrival[np.concatenate(parts)]
        offsets = _offsets(np.array([len(part) for part in parts])).astype(np.int32)
        listed.append(Rows(-1, width, pieces.items[at], starts[at], pieces.lengths[at], offsets))
    return listed


def _near_lengths(
    distinct: NDArray[np.int32], offsets: NDArray[np.int64], align: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Classes of lengths that count as equal, and the width of each."""
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


def _joined(
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
        if not (0 < weight < math.inf and round(weight * len(part)) >= 1):
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
    ids = Ids.of(f"{name}/{id}" for name, part in parts.items() for id in part.ids)
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
    )
    return lengths, tuple((name, len(part), float(weights[name])) for name, part in parts.items())


def _checked_difficulty(
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


def _what_limits(config: BatchingConfig) -> str:
    if config.layout == "packed":
        return "pack_max_length"
    return "overflow_max" if config.limit == config.overflow_max else "token_budget"


def _counts_up(items: NDArray[np.int32]) -> bool:
    return bool((items == np.arange(items.size, dtype=np.int32)).all())


def _offsets(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])
