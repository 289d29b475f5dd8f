"""Collation against the slow, obvious way: one token at a time."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.batching import (
    BatchingConfig,
    BatchPlanBuilder,
    CollatedBatch,
    MicrobatchSpec,
    collate,
)
from batchwright.data.rows.sample import Sample
from batchwright.errors import Mismatch

PAD = 999


def samples_of(lengths: list[int]) -> list[Sample]:
    """Tokens that say which sample and place they are; the first third is a prompt."""
    return [
        Sample(
            input_ids=np.array([item * 1000 + at for at in range(n)], np.int32),
            loss_mask=np.array([int(at >= n // 3) for at in range(n)], np.uint8),
            sample_id=str(item),
        )
        for item, n in enumerate(lengths)
    ]


def slowly(batch: MicrobatchSpec, samples: list[Sample]) -> dict[str, Any]:
    shape = (batch.batch_size, batch.max_len)
    out: dict[str, Any] = {
        "input_ids": np.full(shape, PAD),
        "labels": np.full(shape, -100),
        "position_ids": np.zeros(shape, int),
        "segment_ids": np.full(shape, -1),
        "attention_mask": np.zeros(shape, int),
    }
    ends = [0]
    for row in range(batch.batch_size):
        column = 0
        for number, segment in enumerate(range(batch.row_offsets[row], batch.row_offsets[row + 1])):
            sample = samples[batch.items[segment]]
            for at in range(batch.lengths[segment]):
                token = int(sample.input_ids[batch.starts[segment] + at])
                counts = sample.loss_mask[batch.starts[segment] + at] and at and batch.weight
                out["input_ids"][row, column] = token
                out["labels"][row, column] = token if counts else -100
                out["position_ids"][row, column] = at
                out["segment_ids"][row, column] = number
                out["attention_mask"][row, column] = 1
                column += 1
            ends.append(ends[-1] + int(batch.lengths[segment]))
    out["cu_seqlens"] = np.array(ends)
    return out


def check(collated: CollatedBatch, batch: MicrobatchSpec, samples: list[Sample]) -> None:
    for name, expected in slowly(batch, samples).items():
        assert np.array_equal(getattr(collated, name), expected), name
        assert getattr(collated, name).dtype == np.int32
    assert collated.max_seqlen == batch.lengths.max()
    assert collated.sample_ids == batch.samples
    assert (collated.batch_size, collated.max_len) == (batch.batch_size, batch.max_len)
    assert collated.token_count == batch.token_count
    assert collated.num_loss_tokens == int(collated.loss_mask.sum())
    assert (collated.epoch, collated.index) == (batch.epoch, batch.index)
    assert (collated.bucket_id, collated.weight) == (batch.bucket_id, batch.weight)


@settings(deadline=None, max_examples=80)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=25),
    st.sampled_from(["bucketed", "sorted", "packed"]),
    st.sampled_from(["truncate", "split"]),
    st.sampled_from([1, 8]),
    st.sampled_from(["pad_to_bucket", "pad_to_max"]),
)
def test_collation_equals_token_by_token(
    lengths: list[int], layout: str, overflow: str, align: int, policy: str
) -> None:
    config = BatchingConfig(
        layout=layout,
        token_budget=96,
        bucket_edges=(8, 16),
        overflow_max=30,
        pack_max_length=30,
        overflow=overflow,
        align=align,
        pad_policy=policy,
    )
    plan = BatchPlanBuilder(np.array(lengths), config).build()
    samples = samples_of(lengths)
    for batch in plan.iter_epoch(1):
        check(collate(batch, samples.__getitem__, pad_id=PAD), batch, samples)
        filler = collate(batch.as_filler(), samples.__getitem__, pad_id=PAD)
        check(filler, batch.as_filler(), samples)
        assert filler.num_loss_tokens == 0


def one(overflow: str, length: int) -> MicrobatchSpec:
    config = BatchingConfig(bucket_edges=(4,), overflow_max=10, overflow=overflow)
    plan = BatchPlanBuilder({"a": length}, config).build()
    return plan.batch(0, 0)


def test_samples_of_other_lengths_are_refused() -> None:
    for overflow, length, seen in [
        ("truncate", 5, 4),
        ("truncate", 5, 6),
        ("truncate", 5, 0),
        ("truncate", 10, 9),
        ("error", 10, 11),
        ("skip", 10, 11),
        # The second piece of a split sample that became shorter.
        ("split", 25, 19),
    ]:
        with pytest.raises(Mismatch, match="'a'") as caught:
            collate(one(overflow, length), lambda _, n=seen: samples_of([n])[0])  # type: ignore[misc]
        assert "\n" not in str(caught.value)
    assert collate(one("truncate", 25), lambda _: samples_of([25])[0]).token_count == 10


def test_a_mask_of_another_length_is_refused() -> None:
    whole = samples_of([5])[0]
    for mask in (whole.loss_mask[:4], np.ones(6, np.uint8)):
        wrong = Sample(whole.input_ids, mask, "a")
        with pytest.raises(Mismatch, match="mask"):
            collate(one("skip", 5), lambda _, sample=wrong: sample)  # type: ignore[misc]
