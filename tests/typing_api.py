"""What a user's type checker sees; checked by `mypy --strict`, run by nobody."""

from pathlib import Path

from batchwright.batching import (
    BatchingConfig,
    BatchPlan,
    BatchPlanBuilder,
    BatchSpec,
    BucketSpec,
    MicrobatchSpec,
    TokenBudgetBatchSampler,
    pack_lengths,
)


def plans(path: Path) -> BatchPlan:
    plan = BatchPlanBuilder({"a": 3}, BatchingConfig(token_budget=8)).build(num_epochs=2)
    for batch in plan.iter_epoch(0):
        rows: int = batch.batch_size
        print(rows)
    saved: Path = plan.save(path)
    return BatchPlan.load(saved)


async def sampler() -> list[BatchSpec]:
    made = TokenBudgetBatchSampler({"a": 3}, BucketSpec((4,), 8), token_budget=8)
    return [batch async for batch in made.iter_epoch(0)]


def packing() -> float:
    first: MicrobatchSpec = plans(Path("plan")).batch(0, 0)
    return pack_lengths(first.lengths, 16).efficiency
