"""One plan over many ranks: equal counts, balanced work, and resume on another world size."""

import os
import subprocess
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from batchwright.batching import (
    BatchingConfig,
    BatchPlan,
    BatchPlanBuilder,
    CheckpointPosition,
    DistributedConfig,
    MicrobatchSpec,
    interleave_microbatches,
    iter_from_checkpoint,
    shard_batch_plan,
)

WORLD_SIZE = 4


def make_plan() -> BatchPlan:
    random = np.random.default_rng(5)
    lengths = np.clip(random.lognormal(5.2, 0.9, 3000), 8, 2048).astype(int)
    # An optimizer step is 12 microbatches, on any number of ranks.
    config = BatchingConfig(token_budget=8192, step_size=12)
    return BatchPlanBuilder(lengths, config).build(num_epochs=2)


def on_rank(rank: int) -> DistributedConfig:
    """What a process reads from its environment; torchrun sets these two variables."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORLD_SIZE))
    return DistributedConfig.from_env()


def samples_of(microbatches: Iterable[MicrobatchSpec]) -> list[str]:
    """The samples trained on; a filler has weight 0 and does not count."""
    return [sample for batch in microbatches if batch.weight for sample in batch.samples]


def show_shares(plan: BatchPlan) -> None:
    """Both balancing modes: round robin (i, i + world_size, ...) and by predicted cost."""
    costs = plan.costs(0)
    for balance in ("round_robin", "cost"):
        ranks = [shard_batch_plan(plan, on_rank(rank), balance) for rank in range(WORLD_SIZE)]
        counts = [sum(1 for _ in rank.iter_epoch(0)) for rank in ranks]
        # A step is over when its slowest rank is done.
        slowest = mean = 0.0
        for step in zip(*(rank.iter_steps(0, epochs=1) for rank in ranks), strict=True):
            work = [sum(costs[b.index] for b in share.microbatches) for share in step]
            slowest, mean = slowest + max(work), mean + sum(work) / WORLD_SIZE
        print(f"{balance}: microbatches of each rank {counts}, ", end="")
        print(f"slowest rank / mean {slowest / mean:.3f}")


def show_interleaving() -> None:
    """Bucket after bucket is easy to follow; interleaved, every window has all of them."""
    lengths = {f"s{number}": 20 + 13 * number % 480 for number in range(640)}
    config = BatchingConfig.predictable(
        token_budget=2048, bucket_edges=(128, 256), overflow_max=512
    )
    in_order = list(BatchPlanBuilder(lengths, config).build().iter_epoch(0))
    mixed = interleave_microbatches(in_order)
    for name, batches in (("bucket after bucket", in_order), ("interleaved", mixed)):
        shares = [Counter(b.bucket_id for b in batches[at : at + 16]) for at in (0, 16)]
        print(f"{name}: buckets of the first 32: ", end="")
        print(" then ".join(str(dict(sorted(share.items()))) for share in shares))


def resume_elsewhere(plan: BatchPlan, folder: Path) -> None:
    """Stop on four ranks after 7 steps, resume on three: the remaining samples, each once."""
    seen: list[str] = []
    for rank in range(WORLD_SIZE):
        share = shard_batch_plan(plan, on_rank(rank))
        for number, step in enumerate(share.iter_steps(), start=1):
            seen += samples_of(step.microbatches)
            if number == 7:
                # Every rank would write the same, so one is enough.
                share.position_after(step, global_step=number).save(folder / "position.json")
                break
    position = CheckpointPosition.load(folder / "position.json")
    print(f"\nstopped on {WORLD_SIZE} ranks: epoch {position.epoch}, ", end="")
    print(f"microbatch {position.microbatch_idx}, step {position.global_step}")
    for rank in range(3):
        seen += samples_of(iter_from_checkpoint(plan.shard(rank, 3), position))
    everything = samples_of([*plan.iter_epoch(0), *plan.iter_epoch(1)])
    print(
        f"resumed on 3 ranks, same samples as uninterrupted: {sorted(seen) == sorted(everything)}"
    )


def main() -> None:
    plan = make_plan()
    print(f"{plan}\n{plan.num_steps()} steps of {plan.step_microbatches} microbatches in epoch 0")
    show_shares(plan)
    print()
    show_interleaving()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        resume_elsewhere(plan, folder)
        plan.save(folder / "plan")
        command = f"batchwright data batchplan shard -p plan -w {WORLD_SIZE} -o shards"
        print(f"\nThe same from the shell: {command}", flush=True)
        path = sysconfig.get_path("scripts")
        subprocess.run(
            [f"{path}/{command.split()[0]}", *command.split()[1:]], cwd=folder, check=True
        )
        rank_2 = BatchPlan.load(folder / "shards" / "rank_2")
        print(f"rank 2 opens {rank_2}")


if __name__ == "__main__":
    main()
