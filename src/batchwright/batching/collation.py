"""Collate the samples of a microbatch into the arrays that a model takes."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchwright.batching.plan.microbatch import MicrobatchSpec
from batchwright.data.rows.sample import IGNORE, Sample
from batchwright.errors import Mismatch

__all__ = ["CollatedBatch", "SampleReader", "collate"]

SampleReader = Callable[[int], Sample]
"""The sample of a data row."""


@dataclass(frozen=True, slots=True)
class CollatedBatch:
    """A microbatch as arrays [rows, width]; padding is segment -1 and attends to nothing."""

    input_ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    """The token itself where the loss counts it, else -100. The first token of a segment is
    never counted: what stands before it belongs to another sample."""
    position_ids: NDArray[np.int32]
    """Counts from 0 in every segment."""
    segment_ids: NDArray[np.int32]
    cu_seqlens: NDArray[np.int32]
    """Where each segment begins in the useful tokens laid end to end, and their number."""
    max_seqlen: int
    sample_ids: tuple[str, ...]
    epoch: int
    index: int
    bucket_id: int
    weight: float

    @property
    def max_len(self) -> int:
        return int(self.input_ids.shape[1])

    @property
    def batch_size(self) -> int:
        return int(self.input_ids.shape[0])

    @property
    def attention_mask(self) -> NDArray[np.int32]:
        """1 on samples, 0 on padding."""
        return np.asarray(self.segment_ids >= 0, np.int32)

    @property
    def loss_mask(self) -> NDArray[np.int32]:
        """1 where the loss counts a token."""
        return np.asarray(self.labels != IGNORE, np.int32)

    @property
    def token_count(self) -> int:
        return int(self.cu_seqlens[-1])

    @property
    def num_loss_tokens(self) -> int:
        return int((self.labels != IGNORE).sum())


def collate(batch: MicrobatchSpec, read: SampleReader, *, pad_id: int = 0) -> CollatedBatch:
    """Lay the samples of `batch` into a matrix.

    A sample may be longer than its planned length only if the plan cut it there. Anything else
    means the plan was made for other tokens, and is refused.
    """
    samples = [read(int(item)) for item in batch.items]
    pieces = list(zip(samples, batch.starts.tolist(), batch.lengths.tolist(), strict=True))
    for segment, (sample, start, length) in enumerate(pieces):
        size = len(sample.input_ids)
        if size != start + length and not (size > start + length and length == batch.cut_at):
            raise Mismatch(
                f"sample {batch.ids[int(batch.items[segment])]!r} has {size:,} tokens where the "
                f"plan expects {start + length:,}; use the data and the tokenizer it was built with"
            )
        if len(sample.loss_mask) != size:
            raise Mismatch(
                f"sample {batch.ids[int(batch.items[segment])]!r} has {size:,} tokens and a loss "
                f"mask of {len(sample.loss_mask):,}; give one value for each token"
            )
    lengths = batch.lengths.astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    row = np.repeat(np.arange(batch.batch_size), np.diff(batch.row_offsets))
    in_row = offsets[:-1] - offsets[batch.row_offsets[row]]
    # Where each useful token goes in the flattened matrix.
    base = np.repeat(row * batch.max_len + in_row - offsets[:-1], lengths)
    target = base + np.arange(offsets[-1])
    tokens = np.concatenate([s.input_ids[a : a + n] for s, a, n in pieces])
    counted = np.concatenate([s.loss_mask[a : a + n] for s, a, n in pieces]).astype(bool)
    counted[offsets[:-1]] = False
    if not batch.weight:
        counted[:] = False
    shape = (batch.batch_size, batch.max_len)
    segment_in_row = np.arange(len(lengths)) - batch.row_offsets[row]

    def laid(values: NDArray[np.generic], fill: int) -> NDArray[np.int32]:
        out = np.full(shape, fill, np.int32)
        out.reshape(-1)[target] = values
        return out

    return CollatedBatch(
        input_ids=laid(tokens, pad_id),
        labels=laid(np.where(counted, tokens, IGNORE), IGNORE),
        position_ids=laid(np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths), 0),
        segment_ids=laid(np.repeat(segment_in_row, lengths), -1),
        cu_seqlens=offsets.astype(np.int32),
        max_seqlen=int(lengths.max()),
        sample_ids=batch.samples,
        epoch=batch.epoch,
        index=batch.index,
        bucket_id=batch.bucket_id,
        weight=batch.weight,
    )
