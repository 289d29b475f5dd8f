"""Batch plans: the order of a whole training run, built once and verified everywhere."""

import tempfile
from pathlib import Path

import numpy as np

from batchwright.batching import (
    BatchingConfig,
    BatchPlan,
    BatchPlanBuilder,
    compute_batch_fingerprint,
    verify_batch_fingerprint,
)
from batchwright.errors import Mismatch

WORLD_SIZE = 4


def make_lengths(count: int) -> dict[str, int]:
    random = np.random.default_rng(11)
    lengths = np.clip(random.lognormal(5.2, 0.9, count), 8, 2048).astype(int)
    return {f"doc-{number:05d}": int(length) for number, length in enumerate(lengths)}


def main() -> None:
    lengths = make_lengths(5000)
    config = BatchingConfig(token_budget=8192, bucket_edges=(128, 256, 512, 1024), seed=42)
    plan = BatchPlanBuilder(lengths, config).build(num_epochs=3)
    print(plan)

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "plan"
        plan.save(folder)
        size = sum(file.stat().st_size for file in folder.iterdir())
        loaded = BatchPlan.load(folder)
        print(f"saved {len(list(folder.iterdir()))} files, {size:,} bytes; ", end="")
        print(f"loaded plan is the same: {loaded.fingerprint == plan.fingerprint}")
        loaded.verify(lengths)
        print("verified: the plan can be rebuilt from these lengths")
        try:
            loaded.verify({**lengths, "doc-00000": lengths["doc-00000"] + 1})
        except Mismatch as error:
            print(f"one length changed: {error}")

    # Random access to any microbatch of any epoch.
    batch = plan.batch(epoch=2, index=100)
    print(f"\nepoch 2, microbatch 100: {batch}, begins with {', '.join(batch.samples[:3])}")
    print("where is doc-00007?")
    for place in plan.explain("doc-00007"):
        print(f"  epoch {place.epoch}: microbatch {place.microbatch}, row {place.row}")

    print(f"\none plan for {WORLD_SIZE} ranks, {plan.num_microbatches()} microbatches in epoch 0:")
    seen: list[str] = []
    for rank in range(WORLD_SIZE):
        share = list(plan.shard(rank, WORLD_SIZE).iter_epoch(0))
        work = [batch for batch in share if batch.weight]
        seen += [sample for batch in work for sample in batch.samples]
        tokens = sum(batch.token_count for batch in work)
        print(
            f"  rank {rank}: {len(share)} microbatches ({len(share) - len(work)} fillers), ", end=""
        )
        print(f"{tokens:,} useful tokens")
    print(f"every sample on exactly one rank: {sorted(seen) == sorted(lengths)}")

    # A run that stopped after epoch 1, microbatch 59 resumes at microbatch 60.
    whole = [*plan.iter_epoch(0), *plan.iter_epoch(1), *plan.iter_epoch(2)]
    done = whole[: plan.num_microbatches(0) + 60]
    resumed = list(plan.iter_from(1, 60))
    print(f"\nstopped after {len(done)} of {len(whole)} microbatches, {len(resumed)} left")
    print(f"resumed == uninterrupted: {done + resumed == whole}")

    # A fingerprint to commit, so that a test fails if batching changes.
    expected = compute_batch_fingerprint(plan.iter_epoch(0), config)
    print(f"\nfingerprint of epoch 0: {expected.fingerprint} ", end="")
    print(f"({expected.num_batches} batches, {expected.total_samples} samples)")
    backwards = dict(reversed(lengths.items()))
    for name, source, changed in (
        ("same samples, reversed", backwards, {}),
        ("another seed", lengths, {"seed": 43}),
        ("another budget", lengths, {"token_budget": 4096}),
    ):
        again = BatchPlanBuilder(source, config.model_copy(update=changed)).build()
        same, sentence = verify_batch_fingerprint(again.iter_epoch(0), expected)
        print(f"  {name}: {'same' if same else 'different'}; {sentence}")


if __name__ == "__main__":
    main()
