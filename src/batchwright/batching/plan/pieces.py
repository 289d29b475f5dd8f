"""The overflow policy: which tokens of every sample are planned, with counts."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from batchwright.batching.config import BatchingConfig
from batchwright.data.lengths import Lengths
from batchwright.errors import ConfigError, NoLoss, OversizedSample

__all__ = ["Counts", "Pieces", "SkipReason", "cut_pieces", "skip_reason"]

SkipReason = Literal["long", "short", "no_loss", "group"]

LONGEST_PLANNED = 2**26
"""Plans have a counter for every length up to the longest, which must fit in memory."""


@dataclass(frozen=True, slots=True)
class Counts:
    """How many samples were planned, skipped, truncated or split."""

    samples: int
    tokens: int
    planned_pieces: int
    planned_tokens: int
    skipped_long: int
    skipped_short: int
    skipped_no_loss: int
    """Pieces of which no token carries loss: whole samples, or parts of split ones."""
    truncated: int
    split: int
    tokens_left_out: int
    skipped_group: int = 0
    """Samples that were skipped with others of their group, or because it is too large."""


@dataclass(frozen=True)
class Pieces:
    """What is planned: `lengths[p]` tokens of sample `items[p]` from `starts[p]` on.

    `items` are the numbers 0 .. n - 1 unless something was skipped or split.
    """

    items: NDArray[np.int32]
    starts: NDArray[np.int32]
    lengths: NDArray[np.int32]
    skipped: NDArray[np.int32]
    """Samples that are too long, then those too short, without loss, and skipped with a group."""
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


def cut_pieces(measured: Lengths, config: BatchingConfig) -> Pieces:
    """Apply the policies for samples that are too long or without loss, counting all they touch."""
    lengths = measured.values
    limit = config.limit
    over = np.flatnonzero(lengths > limit)
    short = np.flatnonzero(lengths < config.min_length)
    longest = int(lengths.max())
    if min(longest, limit) > LONGEST_PLANNED:
        raise ConfigError(
            f"pieces must have at most {LONGEST_PLANNED:,} tokens, got "
            f"{min(longest, limit):,}; lower {_what_limits(config)}"
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
        # No sample is both: the shortest allowed length is within the limit.
        skipped = np.concatenate([over, short])
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
    mute = _without_loss(measured, config, items, starts, planned)
    if mute.any():
        silent = items[mute]
        items, planned = items[~mute], planned[~mute]
        starts = starts[~mute] if starts.size else starts
        # Of a split sample some pieces may remain.
        skipped = np.concatenate([skipped, np.setdiff1d(silent, items)])
    if not items.size:
        raise ConfigError(
            f"all {lengths.size:,} samples were skipped: only {config.min_length:,} to "
            f"{limit:,} tokens, some of them with loss, are allowed; raise {_what_limits(config)}"
        )
    kept_tokens = int(planned.sum(dtype=np.int64))
    shown = np.isin(over, items).sum() if over.size else 0
    counts = Counts(
        samples=lengths.size,
        tokens=total,
        planned_pieces=items.size,
        planned_tokens=kept_tokens,
        skipped_long=over.size if config.overflow == "skip" else 0,
        skipped_short=short.size,
        skipped_no_loss=int(mute.sum()),
        truncated=int(shown) if config.overflow == "truncate" else 0,
        split=int(shown) if config.overflow == "split" else 0,
        tokens_left_out=total - kept_tokens,
    )
    return Pieces(items, starts, planned, skipped.astype(np.int32), counts)


def skip_reason(skipped: NDArray[np.int32], counts: Counts, item: int) -> SkipReason | None:
    """Why a sample is in no batch of any epoch; None if its length and loss are allowed."""
    found = np.flatnonzero(skipped == item)
    if not found.size:
        return None
    at = int(found[0])
    if at < counts.skipped_long:
        return "long"
    if at < counts.skipped_long + counts.skipped_short:
        return "short"
    return "group" if at >= len(skipped) - counts.skipped_group else "no_loss"


def _without_loss(
    measured: Lengths,
    config: BatchingConfig,
    items: NDArray[np.int32],
    starts: NDArray[np.int32],
    planned: NDArray[np.int32],
) -> NDArray[np.bool_]:
    """Which pieces are left out: those that end before the first token that carries loss."""
    if measured.loss is None:
        return np.zeros(items.size, bool)
    ends = planned + starts if starts.size else planned
    mute: NDArray[np.bool_] = measured.loss[items, 0] >= ends
    heard = np.zeros(len(measured), bool)
    heard[items[~mute]] = True
    silent = items[mute & ~heard[items]]
    if silent.size and config.no_loss == "error":
        cut = f" in its first {config.limit:,} tokens" if config.overflow == "truncate" else ""
        count = np.unique(silent).size
        raise NoLoss(
            f"{count:,} of {len(measured):,} samples have no token with loss, the first is "
            f"{measured.ids[int(silent[0])]!r}, which has none{cut}; choose no_loss skip to leave "
            f"them out, or mend their rows"
        )
    return mute if config.no_loss == "skip" else np.zeros(items.size, bool)


def _what_limits(config: BatchingConfig) -> str:
    if config.layout == "packed":
        return "pack_max_length"
    return "overflow_max" if config.limit == config.overflow_max else "token_budget"
