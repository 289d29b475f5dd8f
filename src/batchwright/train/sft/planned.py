"""Optimizer steps of a run over a fixed plan, on one rank, from any position on."""

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from batchwright.batching import BatchPlan, CheckpointPosition, Step, collate
from batchwright.batching.collation import CollatedBatch
from batchwright.checkpoint import Checkpoint
from batchwright.errors import ConfigError, Mismatch
from batchwright.train.sft.config import SftConfig
from batchwright.train.sft.prepare import Prepared
from batchwright.world import World

__all__ = ["PlannedSteps", "batches_of", "check_context"]


class PlannedSteps:
    """The steps of this rank's part of a plan, and the position they have come to."""

    ended = False
    """A plan has as many steps as it says."""

    def __init__(self, config: SftConfig, data: Prepared, world: World, pad_id: int) -> None:
        self._data, self._pad_id = data, pad_id
        self._plan = data.plan.shard(world.rank, world.size)
        self._epochs = config.epochs or self._plan.num_epochs
        if data.plan.order.kind == "materialised" and self._epochs > data.plan.num_epochs:
            raise ConfigError(
                f"--epochs must be at most {data.plan.num_epochs}, got {self._epochs}: the plan of "
                f"a mixture, a curriculum or of groups lists its epochs; start a run with more"
            )
        self._most = config.max_steps
        self._step: Step | None = None
        self.packed = self._plan.config.layout == "packed"
        self.position = CheckpointPosition(plan=self._plan.whole_fingerprint)

    @property
    def total(self) -> int:
        """Steps of the run, those before the position included."""
        total = self.position.global_step + _steps_left(self._plan, self.position, self._epochs)
        return min(total, self._most) if self._most else total

    def facts(self) -> dict[str, Any]:
        """For the first event of the run."""
        return {
            "plan": self._plan.whole_fingerprint,
            "skipped_rows": self._data.skipped,
            "counts": self.counts(),
        }

    def counts(self) -> dict[str, int]:
        """What the plan counted of the samples it shows: planned, skipped, truncated and split."""
        return asdict(self._plan.shown)

    def state(self) -> dict[str, Any]:
        """Nothing but the position."""
        return {}

    def load(self, found: Checkpoint, position: CheckpointPosition) -> None:
        """Continue from a checkpoint of the same plan."""
        if position.plan != self._plan.whole_fingerprint:
            raise Mismatch(
                f"the checkpoint belongs to plan {position.plan[:16]}, the run has "
                f"{self._plan.whole_fingerprint[:16]}; restore the plan of the run"
            )
        self.position = position

    def steps(
        self, stop: Callable[[], bool], progress: Callable[[int, int], None] | None = None
    ) -> Generator[list[CollatedBatch], None, None]:
        """The microbatches of each step; the next one is collated while this one trains."""
        at = self.position
        with ThreadPoolExecutor(1) as worker:
            waiting: deque[tuple[Step, Future[list[CollatedBatch]]]] = deque()
            for step in self._plan.iter_steps(
                at.epoch, at.microbatch_idx, epochs=self._epochs - at.epoch
            ):
                waiting.append((step, worker.submit(batches_of, step, self._data, self._pad_id)))
                if len(waiting) > 1:
                    self._step, batches = waiting.popleft()
                    yield batches.result()
            for self._step, batches in waiting:
                yield batches.result()

    def finish_step(self, step: int) -> dict[str, Any]:
        """Move the position behind the step that was trained; what to log about it."""
        assert self._step is not None
        self.position = self._plan.position_after(self._step, step)
        return {"epoch": self._step.epoch, "first": self._step.first}

    def summary(self) -> None:
        """A plan has been described by its own commands."""

    def close(self) -> None:
        """There is nothing to close."""


def batches_of(step: Step, data: Prepared, pad_id: int) -> list[CollatedBatch]:
    """The arrays of a step."""
    return [collate(batch, data.read, pad_id=pad_id) for batch in step.microbatches]


def check_context(data: Prepared, context: int | None) -> None:
    """Refuse a plan with samples that are longer than what the model takes."""
    longest = data.plan.longest
    if context is not None and longest > context:
        raise ConfigError(
            f"the longest sample has {longest:,} tokens, the model takes {context:,}; "
            f"choose --overflow truncate, split or skip with a --pack-max-len or "
            f"--token-budget of at most {context:,}"
        )


def _steps_left(plan: BatchPlan, at: CheckpointPosition, epochs: int) -> int:
    """Steps left from a position; on another number of ranks, a step may have more or fewer."""
    if at.epoch >= epochs:
        return 0
    this = -(-(plan.num_microbatches(at.epoch) - at.microbatch_idx) // plan.step_microbatches)
    return this + sum(plan.num_steps(epoch) for epoch in range(at.epoch + 1, epochs))
