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
    """Where each segment begins if all are laid end to end, and where the last one ends."""
    lengths: NDArray[np.int32]
    """Tokens of each segment. With `segment_multiple` padding follows them up to the next segment:
    it belongs to the segment, its positions go on, and the loss does not count it."""
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
        mask = np.asarray(self.segment_ids >= 0, np.int32)
        inside = mask > 0
        sizes = np.diff(self.cu_seqlens)
        mask[inside] = self.position_ids[inside] < np.repeat(self.lengths, sizes)
        return mask

    @property
    def loss_mask(self) -> NDArray[np.int32]:
        """1 where the loss counts a token."""
        return np.asarray(self.labels != IGNORE, np.int32)

    @property
    def token_count(self) -> int:
        return int(self.lengths.sum(dtype=np.int64))

    @property
    def num_loss_tokens(self) -> int:
        return int((self.labels != IGNORE).sum())


def collate(batch: MicrobatchSpec, read: SampleReader, *, pad_id: int = 0) -> CollatedBatch:
    """Lay the samples of `batch` into a matrix.

    A sample may be longer than its planned length only if the plan cut it there. Anything else
    means the plan was made for other tokens, and is refused.
    """
    samples = [read(int(item)) for item in batch.items]
    tokens_of = batch.tokens
    planned = zip(batch.starts.tolist(), tokens_of.tolist(), batch.lengths.tolist(), strict=True)
    pieces = [(s, a, n, whole) for s, (a, n, whole) in zip(samples, planned, strict=True)]
    for segment, (sample, start, length, whole) in enumerate(pieces):
        size = len(sample.input_ids)
        if size != start + length and not (size > start + length and whole == batch.cut_at):
            raise Mismatch(
                f"sample {batch.ids[int(batch.items[segment])]!r} has {size:,} tokens where the "
                f"plan expects {start + length:,}; use the data and the tokenizer it was built with"
            )
        if len(sample.loss_mask) != size:
            raise Mismatch(
                f"sample {batch.ids[int(batch.items[segment])]!r} has {size:,} tokens and a loss "
                f"mask of {len(sample.loss_mask):,}; give one value for each token"
            )
    lengths = tokens_of.astype(np.int64)
    rooms = -(-lengths // batch.segment_multiple) * batch.segment_multiple
    offsets = np.concatenate([[0], np.cumsum(rooms)])
    row = np.repeat(np.arange(batch.batch_size), np.diff(batch.row_offsets))
    in_row = offsets[:-1] - offsets[batch.row_offsets[row]]
    # Where each place of a segment is in the flattened matrix, and which of them have a token.
    base = np.repeat(row * batch.max_len + in_row - offsets[:-1], rooms)
    target = base + np.arange(offsets[-1])
    position = np.arange(offsets[-1]) - np.repeat(offsets[:-1], rooms)
    filled = target[position < np.repeat(lengths, rooms)]
    tokens = np.concatenate([s.input_ids[a : a + n] for s, a, n, _ in pieces])
    counted = np.concatenate([s.loss_mask[a : a + n] for s, a, n, _ in pieces]).astype(bool)
    counted[np.cumsum(lengths) - lengths] = False
    if not batch.weight:
        counted[:] = False
    shape = (batch.batch_size, batch.max_len)
    segment_in_row = np.arange(len(lengths)) - batch.row_offsets[row]

    def laid(
        values: NDArray[np.generic], fill: int, places: NDArray[np.int64]
    ) -> NDArray[np.int32]:
        out = np.full(shape, fill, np.int32)
        out.reshape(-1)[places] = values
        return out

    return CollatedBatch(
        input_ids=laid(tokens, pad_id, filled),
        labels=laid(np.where(counted, tokens, IGNORE), IGNORE, filled),
        position_ids=laid(position, 0, target),
        segment_ids=laid(np.repeat(segment_in_row, rooms), -1, target),
        cu_seqlens=offsets.astype(np.int32),
        lengths=lengths.astype(np.int32),
        max_seqlen=int(rooms.max()),
        sample_ids=batch.samples,
        epoch=batch.epoch,
        index=batch.index,
        bucket_id=batch.bucket_id,
        weight=batch.weight,
    )
