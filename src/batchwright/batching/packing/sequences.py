"""Join token sequences into packs that never see each other."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from batchwright.batching.packing.bins import pack_lengths
from batchwright.batching.packing.modes import PackingMode, packing_mode
from batchwright.data.rows.sample import IGNORE
from batchwright.errors import BadLength, ConfigError, DuplicateId, Mismatch, OversizedSample

__all__ = [
    "PackedProof",
    "PackedSequence",
    "PackingConfig",
    "PackingMetrics",
    "SequenceToPack",
    "TokenSample",
    "create_segment_attention_mask",
    "pack_sequences",
    "pack_with_metrics",
    "verify_packed",
]


class TokenSample(Protocol):
    """What can be packed: anything with an id, tokens, and a 0/1 mask (None is all ones)."""

    @property
    def sample_id(self) -> str: ...
    @property
    def input_ids(self) -> ArrayLike: ...
    @property
    def loss_mask(self) -> ArrayLike | None: ...


@dataclass(frozen=True, slots=True)
class SequenceToPack:
    """One sample's tokens; without a loss mask every token carries loss."""

    sample_id: str
    input_ids: ArrayLike
    loss_mask: ArrayLike | None = None


@dataclass(frozen=True, slots=True)
class PackingConfig:
    """How token sequences are joined.

    A separator is the last token of its own segment, like an end-of-text token: it counts in
    `max_length`, follows its sample's positions and carries no loss.

    >>> PackingConfig(mode="greedy", max_length=512).mode
    <PackingMode.GREEDY: 'greedy'>
    """

    mode: PackingMode | str = PackingMode.BEST_FIT_DECREASING
    max_length: int = 2048
    """Tokens in one pack."""
    pad_to_max: bool = True
    """Fill every pack up to `max_length`; otherwise packs end with their last token."""
    add_separator: bool = False
    separator_token_id: int | None = None
    max_segments: int | None = None
    """Most samples in one pack; None is no limit."""
    overflow: Literal["error", "skip", "truncate", "split"] = "error"
    """What happens to a sequence longer than a pack."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", packing_mode(self.mode))
        if self.add_separator and self.separator_token_id is None:
            raise ConfigError(
                "add_separator needs separator_token_id; give the token to put between samples"
            )
        if self.overflow not in ("error", "skip", "truncate", "split"):
            raise ConfigError(
                f"overflow={self.overflow!r} is not known; choose error, skip, truncate or split"
            )
        if self.max_length <= self.add_separator:
            least = 1 + self.add_separator
            raise ConfigError(f"max_length must be at least {least}, got {self.max_length}")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class PackedSequence:
    """Samples joined in one row; every array has one value for each token of the row.

    Labels are -100 where there is no loss: outside the loss mask, on separators and padding,
    and on the first token of every segment, whose predecessor belongs to another sample.
    `loss_mask` is 1 exactly where labels are not -100. Positions restart at 0 in every segment.
    Padding has segment -1. Segment s is `input_ids[cu_seqlens[s]:cu_seqlens[s + 1]]`, so
    `cu_seqlens` ends before the padding.
    """

    input_ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    loss_mask: NDArray[np.int32]
    segment_ids: NDArray[np.int32]
    position_ids: NDArray[np.int32]
    cu_seqlens: NDArray[np.int32]
    max_seqlen: int
    sample_ids: tuple[str, ...]
    sample_starts: tuple[int, ...]
    """Where each segment begins in its sample: 0 unless the sample was split."""
    sample_lengths: tuple[int, ...]
    """Tokens each segment took from its sample, without a separator."""

    @property
    def num_segments(self) -> int:
        return len(self.sample_ids)

    @property
    def total_tokens(self) -> int:
        """Tokens that came from samples: neither padding nor separators."""
        return sum(self.sample_lengths)

    @property
    def padding_tokens(self) -> int:
        return len(self.input_ids) - int(self.cu_seqlens[-1])

    @property
    def efficiency(self) -> float:
        return self.total_tokens / len(self.input_ids)

    @property
    def num_loss_tokens(self) -> int:
        return int(self.loss_mask.sum())

    def __repr__(self) -> str:
        return (
            f"PackedSequence({self.num_segments} segments, {self.total_tokens:,} tokens "
            f"in {len(self.input_ids):,}, {self.num_loss_tokens:,} with loss)"
        )


@dataclass(frozen=True, slots=True)
class PackingMetrics:
    """What packing did with the samples: everything left out or cut is counted."""

    num_original_samples: int
    num_packed_sequences: int
    num_skipped: int
    num_truncated: int
    num_split: int
    total_tokens: int
    total_padded_length: int
    total_loss_tokens: int

    @classmethod
    def of(
        cls,
        packed: Iterable[PackedSequence],
        *,
        num_skipped: int = 0,
        num_truncated: int = 0,
        num_split: int = 0,
    ) -> "PackingMetrics":
        """Count `packed`; pass what happened to samples before that."""
        packs = list(packed)
        # A split sample has several segments, of which one starts at 0.
        samples = sum(start == 0 for pack in packs for start in pack.sample_starts)
        return cls(
            num_original_samples=samples + num_skipped,
            num_packed_sequences=len(packs),
            num_skipped=num_skipped,
            num_truncated=num_truncated,
            num_split=num_split,
            total_tokens=sum(pack.total_tokens for pack in packs),
            total_padded_length=sum(len(pack.input_ids) for pack in packs),
            total_loss_tokens=sum(pack.num_loss_tokens for pack in packs),
        )

    @property
    def packing_ratio(self) -> float:
        """Samples in an average pack."""
        kept = self.num_original_samples - self.num_skipped
        return kept / self.num_packed_sequences if self.num_packed_sequences else 0.0

    @property
    def efficiency(self) -> float:
        """Sample tokens over all tokens."""
        return self.total_tokens / self.total_padded_length if self.total_padded_length else 1.0

    @property
    def loss_efficiency(self) -> float:
        """Tokens with loss over all tokens."""
        return (
            self.total_loss_tokens / self.total_padded_length if self.total_padded_length else 1.0
        )

    @property
    def ullage(self) -> float:
        """The part of the packs that holds no sample token."""
        return 1.0 - self.efficiency


def pack_sequences(
    sequences: Iterable[TokenSample], config: PackingConfig | None = None, pad_token_id: int = 0
) -> list[PackedSequence]:
    """Join sequences into packs; see `pack_with_metrics` for what was skipped or cut.

    >>> samples = [SequenceToPack("a", [5, 6, 7]), SequenceToPack("b", [8, 9])]
    >>> [pack] = pack_sequences(samples, PackingConfig(max_length=8))
    >>> pack.segment_ids.tolist()
    [0, 0, 0, 1, 1, -1, -1, -1]
    >>> pack.labels.tolist()
    [-100, 6, 7, -100, 9, -100, -100, -100]
    """
    return pack_with_metrics(sequences, config, pad_token_id)[0]


def pack_with_metrics(
    sequences: Iterable[TokenSample], config: PackingConfig | None = None, pad_token_id: int = 0
) -> tuple[list[PackedSequence], PackingMetrics]:
    """Join sequences into packs, and count what the overflow policy did.

    Raises:
        OversizedSample: a sequence is longer than a pack and `overflow` is "error".
        BadLength: a sequence has no tokens.
        Mismatch: a loss mask has another length than its tokens.
    """
    config = config or PackingConfig()
    samples = [_Tokens.of(sample) for sample in sequences]
    limit = config.max_length - config.add_separator
    over = [sample for sample in samples if len(sample.ids) > limit]
    if over and config.overflow == "error":
        longest = max(over, key=lambda sample: len(sample.ids))
        raise OversizedSample(
            f"{len(over):,} of {len(samples):,} sequences have over {limit:,} tokens, the longest "
            f"is {longest.sample_id!r} with {len(longest.ids):,}; raise max_length, "
            "or set overflow to 'truncate', 'split' or 'skip'"
        )
    if config.overflow == "skip":
        samples = [sample for sample in samples if len(sample.ids) <= limit]
    pieces = [
        (sample, start)
        for sample in samples
        for start in range(0, len(sample.ids) if config.overflow == "split" else 1, limit)
    ]
    lengths = [min(len(sample.ids) - start, limit) for sample, start in pieces]
    packing = pack_lengths(
        np.array(lengths, np.int64) + config.add_separator,
        config.max_length,
        config.mode,
        config.max_segments,
    )
    packs = [
        _joined([pieces[i] for i in items], limit, config, pad_token_id)
        for items in np.split(packing.items, packing.offsets[1:-1])
        if len(items)
    ]
    counted = {"skip": "num_skipped", "truncate": "num_truncated", "split": "num_split"}
    counts = {counted[config.overflow]: len(over)} if over else {}
    return packs, PackingMetrics.of(packs, **counts)


def create_segment_attention_mask(segment_ids: ArrayLike, dtype: DTypeLike = bool) -> NDArray[Any]:
    """Who attends to whom: row t is 1 at the tokens of its own segment up to t.

    Padding (segment -1) attends to nothing and nothing attends to it. Shape [L] gives [L, L] and
    [R, L] gives [R, L, L]; for long rows use `cu_seqlens` with a variable-length kernel instead.

    >>> create_segment_attention_mask([0, 0, 1, -1], dtype=int).tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
    """
    segments = np.asarray(segment_ids)
    mask: NDArray[Any] = segments[..., :, None] == segments[..., None, :]
    mask &= np.tri(segments.shape[-1], dtype=bool)
    mask &= segments[..., :, None] >= 0
    return mask.astype(dtype, copy=False)


@dataclass(frozen=True, slots=True)
class PackedProof:
    """What `verify_packed` found to hold, and how much of the samples the packs leave out."""

    packs: int
    segments: int
    tokens: int
    absent_samples: int
    absent_tokens: int


def verify_packed(
    packed: Sequence[PackedSequence], sequences: Iterable[TokenSample]
) -> PackedProof:
    """Prove that packs keep samples apart and every token as it was, or name the first violation.

    Checked for each pack: segment ids are whole runs that agree with `cu_seqlens`, padding is -1,
    positions restart, tokens and loss are those of the sample, first tokens have no label. Over all
    packs: no token of a sample is there twice. Tokens left out (skipped, truncated) are counted.

    Raises:
        Mismatch: a pack breaks one of these; the message names pack and segment.
    """
    samples: dict[str, _Tokens] = {}
    for sequence in sequences:
        sample = _Tokens.of(sequence)
        if sample.sample_id in samples:
            raise DuplicateId(
                f"two sequences are called {sample.sample_id!r}; give each its own id"
            )
        samples[sample.sample_id] = sample
    seen = {name: np.zeros(len(sample.ids), bool) for name, sample in samples.items()}
    for number, pack in enumerate(packed):
        problem = _row_problem(pack)
        if problem:
            raise Mismatch(f"pack {number}: {problem}")
        for segment, name in enumerate(pack.sample_ids):
            if name not in samples:
                raise Mismatch(
                    f"pack {number}, segment {segment}: {name!r} is not a sequence given"
                )
            problem = _segment_problem(pack, segment, samples[name], seen[name])
            if problem:
                raise Mismatch(f"pack {number}, segment {segment} ({name!r}): {problem}")
    return PackedProof(
        packs=len(packed),
        segments=sum(pack.num_segments for pack in packed),
        tokens=sum(int(there.sum()) for there in seen.values()),
        absent_samples=sum(not there.any() for there in seen.values()),
        absent_tokens=sum(int((~there).sum()) for there in seen.values()),
    )


def _row_problem(pack: PackedSequence) -> str | None:
    """What is wrong with the row as a whole: its segments, positions and padding."""
    cu, width = pack.cu_seqlens, len(pack.input_ids)
    if len(cu) != pack.num_segments + 1 or cu[0] != 0 or cu[-1] > width or (np.diff(cu) < 1).any():
        return (
            f"cu_seqlens {cu.tolist()} do not cut {width} tokens into {pack.num_segments} segments"
        )
    if pack.max_seqlen != np.diff(cu).max(initial=0):
        return f"max_seqlen is {pack.max_seqlen}, the longest segment {np.diff(cu).max(initial=0)}"
    row = np.arange(width)
    # By definition and not by construction: a token's segment is the last one that began.
    segment = np.searchsorted(cu, row, side="right") - 1
    segment[row >= cu[-1]] = -1
    if not np.array_equal(pack.segment_ids, segment):
        return f"segment id of token {np.argmax(pack.segment_ids != segment)} is not its segment's"
    inside = row < cu[-1]
    if not np.array_equal(pack.position_ids[inside], (row - cu[segment])[inside]):
        return "positions do not count from 0 in every segment"
    if (pack.labels[~inside] != IGNORE).any():
        return "padding has labels"
    if not np.array_equal(pack.loss_mask != 0, pack.labels != IGNORE):
        return "loss mask and labels disagree"
    return None


def _segment_problem(
    pack: PackedSequence, segment: int, sample: "_Tokens", seen: NDArray[np.bool_]
) -> str | None:
    """What is wrong with one segment against its sample; marks its tokens as seen."""
    start, length = pack.sample_starts[segment], pack.sample_lengths[segment]
    first, stop = int(pack.cu_seqlens[segment]), int(pack.cu_seqlens[segment + 1])
    if not (start >= 0 and start + length <= len(sample.ids) and 0 <= stop - first - length <= 1):
        return f"{length} tokens from {start} on do not fit {len(sample.ids)} in {stop - first}"
    if not np.array_equal(pack.input_ids[first : first + length], sample.ids[start:][:length]):
        return "tokens differ from the sample's"
    expected = np.full(stop - first, IGNORE)
    expected[:length] = np.where(sample.mask[start:][:length], sample.ids[start:][:length], IGNORE)
    expected[0] = IGNORE
    if not np.array_equal(pack.labels[first:stop], expected):
        return f"label of token {np.argmax(pack.labels[first:stop] != expected)} is wrong"
    if seen[start : start + length].any():
        return "some of its tokens are in another segment as well"
    seen[start : start + length] = True
    return None


@dataclass(frozen=True, slots=True, eq=False)
class _Tokens:
    sample_id: str
    ids: NDArray[np.int32]
    mask: NDArray[np.bool_]

    @classmethod
    def of(cls, sample: TokenSample) -> "_Tokens":
        ids = np.asarray(sample.input_ids, np.int32)
        if ids.size == 0:
            raise BadLength(f"sample {sample.sample_id!r} has no tokens; drop it before packing")
        given = sample.loss_mask
        mask = np.ones(len(ids), bool) if given is None else np.asarray(given) != 0
        if len(mask) != len(ids):
            raise Mismatch(
                f"sample {sample.sample_id!r} has {len(ids):,} tokens but {len(mask):,} loss mask "
                "values; give one for each token"
            )
        return cls(sample.sample_id, ids, mask)


def _joined(
    pieces: Sequence[tuple[_Tokens, int]], limit: int, config: PackingConfig, pad_token_id: int
) -> PackedSequence:
    lengths = np.array([min(len(sample.ids) - start, limit) for sample, start in pieces], np.int32)
    spans = lengths + np.int32(config.add_separator)
    cu_seqlens = np.concatenate((np.zeros(1, np.int32), np.cumsum(spans, dtype=np.int32)))
    total = int(cu_seqlens[-1])
    width = config.max_length if config.pad_to_max else total
    tokens = np.full(width, pad_token_id, np.int32)
    learned = np.zeros(width, bool)
    segment = np.full(width, -1, np.int32)
    position = np.zeros(width, np.int32)
    for (sample, start), first, length in zip(pieces, cu_seqlens[:-1], lengths, strict=True):
        tokens[first : first + length] = sample.ids[start : start + length]
        learned[first : first + length] = sample.mask[start : start + length]
    if config.add_separator and config.separator_token_id is not None:
        tokens[cu_seqlens[1:] - 1] = config.separator_token_id
    learned[cu_seqlens[:-1]] = False
    segment[:total] = np.repeat(np.arange(len(spans), dtype=np.int32), spans)
    position[:total] = np.arange(total, dtype=np.int32) - np.repeat(cu_seqlens[:-1], spans)
    return PackedSequence(
        input_ids=tokens,
        labels=np.where(learned, tokens, np.int32(IGNORE)),
        loss_mask=learned.astype(np.int32),
        segment_ids=segment,
        position_ids=position,
        cu_seqlens=cu_seqlens,
        max_seqlen=int(spans.max()),
        sample_ids=tuple(sample.sample_id for sample, _ in pieces),
        sample_starts=tuple(start for _, start in pieces),
        sample_lengths=tuple(lengths.tolist()),
    )
