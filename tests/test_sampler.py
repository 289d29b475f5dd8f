"""The sampler of the document: batches of a token budget straight from lengths."""

import asyncio
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.batching import (
    BatchSpec,
    BucketSpec,
    PadPolicy,
    TokenBudgetBatchSampler,
)
from batchwright.errors import BadLength, ConfigError, OversizedSample, UnknownSample


def test_the_quick_start_of_the_document_holds() -> None:
    lengths = {f"s{i}": 100 + i * 10 for i in range(50)}
    bucket_spec = BucketSpec(edges=(128, 256, 512), overflow_max=1024)
    sampler = TokenBudgetBatchSampler(
        lengths=lengths, bucket_spec=bucket_spec, token_budget=2048, seed=42
    )

    async def main() -> list[BatchSpec]:
        return [batch async for batch in sampler.iter_epoch(epoch=0)]

    batches = asyncio.run(main())

    assert batches == list(sampler.iter_epoch(epoch=0))
    assert Counter(name for batch in batches for name in batch.sample_ids) == Counter(
        lengths.keys()
    )
    # By hand: 3 samples to 128 (16 a batch), 13 to 256 (8), 26 to 512 (4), 8 to 1024 (2).
    assert sampler.estimate_batches_per_epoch() == len(batches) == 1 + 2 + 7 + 4
    assert sampler.get_bucket_distribution() == {0: 3, 1: 13, 2: 26, 3: 8}
    for batch in batches:
        assert batch.max_length == bucket_spec.get_bucket_max_length(batch.bucket_id)
        assert batch.padded_token_count == batch.batch_size * batch.max_length <= 2048
        assert batch.token_count == sum(lengths[name] for name in batch.sample_ids)
        assert batch.efficiency == batch.token_count / batch.padded_token_count
    metrics = sampler.compute_metrics(0)
    assert metrics.total_tokens == sum(lengths.values())
    assert metrics.padded_tokens == sum(batch.padded_token_count for batch in batches)
    assert metrics.total_batches == len(batches)


def test_epochs_can_be_read_again_and_differ() -> None:
    sampler = TokenBudgetBatchSampler(
        {f"s{i}": i % 90 + 1 for i in range(300)}, BucketSpec((32,), 128), 256
    )
    first = sampler.iter_epoch(0)

    assert list(first) == list(first)
    assert list(sampler.iter_epoch(0)) != list(sampler.iter_epoch(1))
    with pytest.raises(UnknownSample):
        list(sampler.iter_epoch(-1))


lengths_of = st.lists(st.integers(1, 60), min_size=1, max_size=40).map(
    lambda values: {f"s{i}": value for i, value in enumerate(values)}
)


@settings(deadline=None, max_examples=80)
@given(
    lengths_of,
    st.lists(st.integers(4, 31), max_size=3, unique=True).map(sorted),
    st.integers(32, 50),
    st.integers(31, 120),
    st.sampled_from(["skip", "truncate", "split"]),
    st.sampled_from(list(PadPolicy)),
)
def test_no_batch_is_over_budget_and_bucket_order_goes_short_to_long(
    lengths: dict[str, int],
    edges: list[int],
    overflow_max: int,
    budget: int,
    overflow: Any,
    policy: PadPolicy,
) -> None:
    spec = BucketSpec(tuple(edges), overflow_max)
    limit = min(overflow_max, budget)
    try:
        sampler = TokenBudgetBatchSampler(
            lengths, spec, budget, overflow=overflow, pad_policy=policy
        )
    except ConfigError:
        assert overflow == "skip"
        assert min(lengths.values()) > limit
        return
    over = {name for name, length in lengths.items() if length > limit}
    assert sampler.num_skipped == (len(over) if overflow == "skip" else 0)
    for interleave in (True, False):
        batches = list(sampler.iter_epoch(2, interleave_buckets=interleave))
        assert max(batch.padded_token_count for batch in batches) <= budget
        seen = Counter(name for batch in batches for name in batch.sample_ids)
        if overflow == "skip":
            assert seen == Counter(set(lengths) - over)
        elif overflow == "truncate":
            assert seen == Counter(lengths.keys())
        else:
            assert seen == Counter({name: -(-n // limit) for name, n in lengths.items()})
        tokens = sum(batch.token_count for batch in batches)
        kept = [min(n, limit) if overflow == "truncate" else n for n in lengths.values()]
        kept = [n for n in kept if n <= limit] if overflow == "skip" else kept
        assert tokens == sum(kept)
    buckets = [batch.bucket_id for batch in batches]
    assert buckets == sorted(buckets)


def test_drop_last_leaves_only_full_batches() -> None:
    lengths = {f"s{i}": 10 if i < 25 else 30 for i in range(38)}
    sampler = TokenBudgetBatchSampler(lengths, BucketSpec((16,), 32), 64, drop_last=True)

    dropped = set()
    for epoch in range(12):
        batches = list(sampler.iter_epoch(epoch))
        # 25 samples in fours and 13 in twos.
        assert Counter((b.bucket_id, b.batch_size) for b in batches) == {(0, 4): 6, (1, 2): 6}
        seen = Counter(name for batch in batches for name in batch.sample_ids)
        assert max(seen.values()) == 1
        dropped |= set(lengths) - set(seen)
    assert len(batches) == sampler.estimate_batches_per_epoch()
    # Not always the same ones are left out.
    assert len(dropped) > 10


def test_what_cannot_be_batched_is_one_sentence() -> None:
    spec = BucketSpec((16,), 32)

    with pytest.raises(OversizedSample):
        TokenBudgetBatchSampler({"a": 33}, spec, 64)
    with pytest.raises(OversizedSample, match="token_budget"):
        TokenBudgetBatchSampler({"a": 30}, spec, 20)
    with pytest.raises(ConfigError):
        TokenBudgetBatchSampler({"a": 5}, spec, 10)
    with pytest.raises(ConfigError):
        TokenBudgetBatchSampler({}, spec, 64)
    with pytest.raises(BadLength):
        TokenBudgetBatchSampler({"a": 0}, spec, 64)
    with pytest.raises(ConfigError):
        TokenBudgetBatchSampler({"a": 3}, spec, 64, drop_last=True)
