"""Token-budget batching: samples, their lengths, buckets, batches, and their efficiency."""

import asyncio
import tempfile
from pathlib import Path

import numpy as np

from batchwright.batching import (
    BatchMetrics,
    BucketSpec,
    LengthCache,
    TokenBudgetBatchSampler,
)
from batchwright.data import Sample

TOKEN_BUDGET = 4096
SAMPLES = 400


def make_samples() -> list[Sample]:
    """Samples in the canonical schema: token ids and a loss mask."""
    random = np.random.default_rng(7)
    lengths = np.clip(random.lognormal(5, 0.8, SAMPLES), 20, 1000).astype(int)
    samples = []
    for number, length in enumerate(lengths):
        prompt = length // 3
        samples.append(
            Sample(
                input_ids=random.integers(0, 50_000, length, dtype=np.int32),
                # Only the response is in the loss.
                loss_mask=(np.arange(length) >= prompt).astype(np.uint8),
                sample_id=f"sample-{number:03d}",
                dataset_id="toy",
            )
        )
    return samples


def measure(samples: list[Sample], path: Path) -> LengthCache:
    """Write the lengths to disk, and read them back as a later run would."""
    with LengthCache.create(path, tokenizer_hash="toy-tokenizer") as cache:
        for sample in samples:
            cache.add(sample.sample_id, len(sample))
    # Raises an error if the lengths were measured with another tokenizer.
    return LengthCache.load(path, expected_tokenizer_hash="toy-tokenizer")


def fixed_efficiency(samples: list[Sample], rows: int) -> float:
    """Useful tokens / padded tokens in batches of `rows` samples in the given order."""
    lengths = [len(sample) for sample in samples]
    batches = [lengths[at : at + rows] for at in range(0, len(lengths), rows)]
    return sum(lengths) / sum(len(batch) * max(batch) for batch in batches)


async def main() -> None:
    samples = make_samples()
    first = samples[0]
    print(f"{len(samples)} samples; {first.sample_id} has {len(first)} tokens, ", end="")
    print(f"{first.loss_mask.sum()} of them in the loss")

    with tempfile.TemporaryDirectory() as folder:
        cache = measure(samples, Path(folder) / "lengths.jsonl")
    missing, extra = cache.validate(sample.sample_id for sample in samples)
    print(f"{cache}: {len(missing)} ids missing, {len(extra)} unexpected")

    # A sample goes to the first bucket that is wide enough, and is padded to that width.
    buckets = BucketSpec(edges=(64, 128, 256, 512), overflow_max=1024)
    for bucket in range(buckets.num_buckets):
        low, high = buckets.get_bucket_range(bucket)
        count = sum(buckets.get_bucket_id(length) == bucket for _, length in cache.items())
        print(f"bucket {bucket}: {low:>4} to {high:>4} tokens, {count:>3} samples")

    sampler = TokenBudgetBatchSampler(cache, buckets, TOKEN_BUDGET, seed=42)
    print(
        f"\n{sampler.estimate_batches_per_epoch()} batches of at most {TOKEN_BUDGET} padded tokens:"
    )
    batches = []
    # A plain `for` works as well.
    async for batch in sampler.iter_epoch(epoch=0):
        batches.append(batch)
        if len(batches) <= 5:
            shape = f"{batch.batch_size:>2} x {batch.max_length:>4}"
            print(f"  {shape} = {batch.padded_token_count} tokens, {batch.efficiency:.1%} useful")

    loss_tokens = sum(int(sample.loss_mask.sum()) for sample in samples)
    metrics = BatchMetrics.of(batches, loss_tokens=loss_tokens)
    print(f"\n{metrics.summary()}\n\n{metrics.bucket_summary()}")
    print(f"\nfixed batches of 16, in given order: {fixed_efficiency(samples, 16):.1%} useful")
    print(f"buckets under a token budget:        {metrics.efficiency:.1%} useful")

    # The order depends on the samples and the seed, not on the order of the input.
    shuffled = dict(sorted(cache.items(), key=lambda item: item[1]))
    again = TokenBudgetBatchSampler(shuffled, buckets, TOKEN_BUDGET, seed=42)
    other = TokenBudgetBatchSampler(shuffled, buckets, TOKEN_BUDGET, seed=43)
    print(f"\nsame seed, other input order, same batches: {list(again.iter_epoch(0)) == batches}")
    print(f"other seed, same batches:                   {list(other.iter_epoch(0)) == batches}")
    print(f"next epoch, same batches:                   {list(again.iter_epoch(1)) == batches}")


if __name__ == "__main__":
    asyncio.run(main())
