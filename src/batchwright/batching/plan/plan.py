"""The batch plan: an immutable order of microbatches that every rank and every run agrees on."""

import dataclasses
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from batchwright.batching.config import BatchingConfig
from batchwright.batching.plan.canonical import canonical_ids, canonical_order
from batchwright.batching.plan.microbatch import MicrobatchSpec
from batchwright.batching.plan.order import Order
from batchwright.batching.plan.shards import Balance, CheckpointPosition, Shard, balance
from batchwright.data.ids import Ids
from batchwright.errors import BadFile, ConfigError, Mismatch, UnknownSample
from batchwright.fingerprint import Value, digest, digest_array, merkle_root

if TYPE_CHECKING:
    from batchwright.batching.plan.builder import LengthSource
    from batchwright.batching.plan.proofs import PlanDiff

__all__ = ["BatchPlan", "Counts", "EpochPlan", "Placement", "Pulled", "Step"]

VERSION = 1
"""Of the plan's format and of the rules by which an order follows from its arrays."""

COST_LINEAR = 24_576
COST_QUADRATIC = 1
"""Relative work of a token in the matrices and of a pair of tokens in attention (a 7B model)."""

T = TypeVar("T")


class Pulled(Generic[T]):
    """Something to iterate over with `for` or with `async for`, as often as wanted."""

    def __init__(self, make: Callable[[], Iterator[T]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[T]:
        return self._make()

    async def __aiter__(self) -> AsyncIterator[T]:
        for value in self._make():
            yield value


@dataclass(frozen=True, slots=True)
class Counts:
    """What became of the samples: planned, left out or cut, and by which rule."""

    samples: int
    tokens: int
    planned_pieces: int
    planned_tokens: int
    skipped_long: int
    skipped_short: int
    truncated: int
    split: int
    tokens_left_out: int


@dataclass(frozen=True, slots=True)
class Step:
    """The microbatches of one rank in one optimizer step; every rank has as many."""

    epoch: int
    first: int
    stop: int
    """The step takes microbatches first .. stop - 1 of the epoch, over all ranks."""
    microbatches: tuple[MicrobatchSpec, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a sample, or a piece of it, stands in one epoch."""

    epoch: int
    microbatch: int
    row: int
    segment: int
    start: int
    length: int
    rank: int | None
    """The rank that reads it, on a sharded plan."""


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """One epoch of a plan."""

    plan: "BatchPlan"
    epoch: int

    @property
    def microbatches(self) -> Pulled[MicrobatchSpec]:
        return self.plan.iter_epoch(self.epoch)

    @property
    def total_samples(self) -> int:
        return sum(len(batch.items) for batch in self if batch.weight)

    @property
    def total_tokens(self) -> int:
        return sum(batch.token_count for batch in self if batch.weight)

    def __len__(self) -> int:
        """Microbatches of this shard, fillers included."""
        count, step = self.plan.num_microbatches(self.epoch), self.plan.step_microbatches
        world = self.plan.shard_of.world_size if self.plan.shard_of else 1
        whole, rest = divmod(count, step)
        return whole * -(-step // world) + -(-rest // world)

    def __iter__(self) -> Iterator[MicrobatchSpec]:
        return iter(self.microbatches)


@dataclass(frozen=True, eq=False, repr=False)
class BatchPlan:
    """An order of microbatches, the same wherever it is opened.

    Microbatches are counted over all ranks, so a position means the same on one rank and on
    a hundred. `shard` gives the part of one rank.
    """

    order: Order
    ids: Ids
    config: BatchingConfig
    num_epochs: int
    counts: Counts
    skipped: NDArray[np.int32]
    """Samples that are in no batch, by row number."""
    dataset_hash: str = "unknown"
    tokenizer_hash: str = "unknown"
    sources: tuple[tuple[str, int, float], ...] = ()
    """Name, size and weight of each source of a mixture."""
    difficulty: NDArray[np.float64] | None = None
    note: str = ""
    """What is to be known of how it was made: how far `optimal` packing came."""
    shard_of: Shard | None = None
    # Set where they are true, and not taken along by `replace`, where they might not be.
    whole: "BatchPlan | None" = field(default=None, init=False)
    """The plan that this one was sharded from."""
    sealed: Callable[[], str] | None = field(default=None, init=False)
    """Of a saved plan: gives the fingerprint it was saved with, if its arrays are still those."""

    @classmethod
    def load(cls, path: Path | str) -> "BatchPlan":
        """Open a saved plan. Arrays are mapped, not read: milliseconds for any size."""
        from batchwright.batching.plan.files import load_plan

        return load_plan(Path(path))

    def save(self, path: Path | str) -> Path:
        """Write the plan as a folder, whole or not at all."""
        from batchwright.batching.plan.files import save_plan

        return save_plan(self, Path(path))

    def num_microbatches(self, epoch: int = 0) -> int:
        """Microbatches of an epoch over all ranks."""
        return self.order.size(self._checked(epoch))

    def batch(self, epoch: int, index: int) -> MicrobatchSpec:
        """Microbatch `index` of an epoch, whatever the shard, without making any other."""
        count = self.num_microbatches(epoch)
        if not 0 <= index < count:
            raise UnknownSample(f"epoch {epoch} has the microbatches 0 to {count - 1}, not {index}")
        rows = self.order.rows(epoch, index)
        return MicrobatchSpec(epoch, index, *rows, ids=self.ids, cut_at=self._cut_at)

    def epoch(self, epoch: int) -> EpochPlan:
        return EpochPlan(self, self._checked(epoch))

    def iter_epoch(self, epoch: int = 0) -> Pulled[MicrobatchSpec]:
        """The microbatches of this shard in one epoch, for `for` and `async for`."""
        self._checked(epoch)
        return Pulled(lambda: self._flat(self.iter_steps(epoch, 0, epochs=1)))

    def iter_from(self, epoch: int, microbatch_idx: int = 0) -> Pulled[MicrobatchSpec]:
        """What is left of the plan from a microbatch on, to the end of the last epoch."""
        self._checked(epoch)
        return Pulled(lambda: self._flat(self.iter_steps(epoch, microbatch_idx)))

    def iter_steps(
        self, epoch: int = 0, microbatch_idx: int = 0, epochs: int | None = None
    ) -> Iterator[Step]:
        """Optimizer steps from a position on, through `epochs` epochs (default: all that are left).

        With `step_size` "world" a step is one microbatch a rank. Where microbatches do not
        divide evenly, ranks that have none left get a filler of weight 0.
        """
        last = self.num_epochs if epochs is None else epoch + epochs
        if epoch > last:
            raise UnknownSample(f"the plan has {last} epochs, so it cannot go on at {epoch}")
        while epoch < last:
            count = self.num_microbatches(epoch)
            if not 0 <= microbatch_idx <= count:
                raise UnknownSample(
                    f"epoch {epoch} has {count} microbatches, so it cannot go on at "
                    f"{microbatch_idx}"
                )
            fixed = self.config.step_size != "world"
            if fixed and microbatch_idx < count and microbatch_idx % self.step_microbatches:
                raise Mismatch(
                    f"microbatch {microbatch_idx} is inside a step of {self.step_microbatches}; "
                    f"go on at the beginning of a step"
                )
            for first in range(microbatch_idx, count, self.step_microbatches):
                stop = min(first + self.step_microbatches, count)
                yield Step(epoch, first, stop, self._share(epoch, first, stop))
            epoch, microbatch_idx = epoch + 1, 0

    def steps_from(self, position: CheckpointPosition) -> Iterator[Step]:
        """The steps that are left after `position`; `Mismatch` if it belongs to another plan."""
        if position.plan and position.plan != self.whole_fingerprint:
            raise Mismatch(
                f"the checkpoint belongs to plan {position.plan[:16]}, "
                f"this is {self.whole_fingerprint[:16]}; open the plan it was made with"
            )
        return self.iter_steps(position.epoch, position.microbatch_idx)

    @property
    def step_microbatches(self) -> int:
        """Microbatches in one optimizer step, over all ranks."""
        if self.config.step_size == "world":
            return self.shard_of.world_size if self.shard_of else 1
        return self.config.step_size

    def num_steps(self, epoch: int = 0) -> int:
        """Optimizer steps of an epoch."""
        return -(-self.num_microbatches(epoch) // self.step_microbatches)

    def position_after(self, step: Step, global_step: int) -> CheckpointPosition:
        """Where to go on when `step` is done."""
        ended = step.stop == self.num_microbatches(step.epoch)
        epoch, at = (step.epoch + 1, 0) if ended else (step.epoch, step.stop)
        return CheckpointPosition(epoch, at, global_step, self.whole_fingerprint)

    def shard(self, rank: int, world_size: int, *, balance: Balance = "cost") -> "BatchPlan":
        """The plan as one rank sees it."""
        shard = Shard(rank, world_size, balance)
        fewest = min(self.num_microbatches(epoch) for epoch in range(self.num_epochs))
        if world_size > fewest:
            raise ConfigError(
                f"{world_size} ranks cannot share {fewest} microbatches: some would never get one; "
                f"use at most {fewest} ranks or a smaller token budget"
            )
        part = dataclasses.replace(self, shard_of=shard)
        object.__setattr__(part, "whole", self.whole or self)
        return part

    def costs(self, epoch: int, first: int = 0, stop: int | None = None) -> NDArray[np.int64]:
        """Predicted work of microbatches first .. stop - 1, in the unit ranks are balanced by."""
        count = self.num_microbatches(epoch)
        stop = count if stop is None else stop
        if not 0 <= first <= stop <= count:
            raise UnknownSample(
                f"epoch {epoch} has the microbatches 0 to {count - 1}, not {first} to {stop - 1}"
            )
        return self.order.costs(epoch, first, stop, COST_LINEAR, COST_QUADRATIC)

    def padded_tokens(self, epoch: int = 0) -> int:
        """Tokens of an epoch's matrices, over all ranks."""
        count = self.num_microbatches(epoch)
        return int(self.order.costs(epoch, 0, count, 1, 0).sum())

    def useful_tokens(self, epoch: int = 0) -> int:
        """Tokens of an epoch that belong to samples, over all ranks."""
        return self.order.useful_tokens(self._checked(epoch))

    @property
    def longest(self) -> int:
        """Tokens of the longest piece that is planned."""
        return self.order.longest

    @cached_property
    def efficiency(self) -> float:
        """Useful tokens over padded tokens in epoch 0; 1 - efficiency is the ullage."""
        return self.useful_tokens(0) / self.padded_tokens(0)

    @property
    def ullage(self) -> float:
        return 1.0 - self.efficiency

    @cached_property
    def roots(self) -> tuple[str, str]:
        """Merkle root of the arrays that define the order, and the digest of all ids.

        Both in terms of canonical sample numbers.
        """
        if self.whole is not None:
            # The order is the same for all ranks; hashing it once is enough.
            return self.whole.roots
        arrays, canonical = self.order.arrays(), canonical_order(self.ids)
        if canonical is not None:
            number = np.empty(len(self.ids), np.int32)
            number[canonical] = np.arange(len(self.ids), dtype=np.int32)
            items = arrays["items"]
            # Opening a plan does not read its items; this does.
            if not 0 <= items.min() <= items.max() < len(self.ids):
                raise BadFile("the plan names samples that are not there; build it again")
            arrays["items"] = number[items]
        order = merkle_root(f"{name}:{digest_array(arrays[name])}" for name in sorted(arrays))
        return order, canonical_ids(self.ids, canonical).digest()

    @cached_property
    def fingerprint(self) -> str:
        """Identity of the plan: equal for equal orders of equal samples, and only then.

        It covers samples, config, order and, on a shard, the rank; not the order in which
        samples were given, and not the number of epochs, because a virtual plan goes on for ever.
        """
        if self.shard_of is None:
            return self.whole_fingerprint
        return self._digest([self.shard_of.rank, self.shard_of.world_size, self.shard_of.balance])

    @cached_property
    def whole_fingerprint(self) -> str:
        """Identity of the plan over all ranks, the same on every shard of it."""
        if self.whole is not None:
            return self.whole.whole_fingerprint
        return self._digest(None) if self.sealed is None else self.sealed()

    def _digest(self, shard: Value) -> str:
        order, ids = self.roots
        return digest(
            "plan",
            VERSION,
            self.dataset_hash,
            self.tokenizer_hash,
            self.config.model_dump(mode="json"),
            [list(source) for source in sorted(self.sources)],
            ids,
            order,
            shard,
        )

    @cached_property
    def _cut_at(self) -> int | None:
        return self.config.limit if self.config.overflow in ("truncate", "split") else None

    def explain(self, sample_id: str) -> list[Placement]:
        """Where a sample stands in each epoch; an empty list if it was skipped."""
        item = self.ids.find(sample_id)
        found = []
        for epoch in range(self.num_epochs):
            for place in self.order.places(epoch, item):
                rank = self._rank_of(epoch, place.microbatch) if self.shard_of else None
                found.append(Placement(epoch, *place, rank))
        return found

    def verify(self, lengths: "LengthSource | Mapping[str, LengthSource]") -> None:
        """Build the plan again from `lengths`; `Mismatch` names the first step that differs."""
        from batchwright.batching.plan.proofs import verify_plan

        verify_plan(self, lengths)

    def diff(self, other: "BatchPlan") -> "PlanDiff":
        """How `other` differs: settings, first microbatch, samples that moved."""
        from batchwright.batching.plan.proofs import diff_plans

        return diff_plans(self, other)

    def _share(self, epoch: int, first: int, stop: int) -> tuple[MicrobatchSpec, ...]:
        if self.shard_of is None:
            return tuple(self.batch(epoch, index) for index in range(first, stop))
        mine = np.flatnonzero(self._ranks(epoch, first, stop) == self.shard_of.rank) + first
        most = -(-(stop - first) // self.shard_of.world_size)
        share = [self.batch(epoch, int(index)) for index in mine]
        if len(share) < most:
            cheapest = first + int(np.argmin(self.costs(epoch, first, stop)))
            share += [self.batch(epoch, cheapest).as_filler()] * (most - len(share))
        return tuple(share)

    def _ranks(self, epoch: int, first: int, stop: int) -> NDArray[np.int32]:
        """The rank of each microbatch of a step."""
        assert self.shard_of is not None
        count, world = stop - first, self.shard_of.world_size
        if self.shard_of.balance == "round_robin" or count <= world:
            return (np.arange(count) % world).astype(np.int32)
        return balance(self.costs(epoch, first, stop), world)

    def _rank_of(self, epoch: int, index: int) -> int:
        first = index - index % self.step_microbatches
        stop = min(first + self.step_microbatches, self.num_microbatches(epoch))
        return int(self._ranks(epoch, first, stop)[index - first])

    def _checked(self, epoch: int) -> int:
        if epoch < 0:
            raise UnknownSample(f"there is no epoch {epoch}; epochs count from 0")
        return epoch

    @staticmethod
    def _flat(steps: Iterator[Step]) -> Iterator[MicrobatchSpec]:
        for step in steps:
            yield from step.microbatches

    def __repr__(self) -> str:
        part = ""
        if self.shard_of is not None:
            part = f", rank {self.shard_of.rank} of {self.shard_of.world_size}"
        return (
            f"BatchPlan({self.counts.samples:,} samples, {self.num_microbatches():,} microbatches, "
            f"{self.efficiency:.1%} useful, {self.config.layout}{part}, "
            f"seed={self.config.seed}, id={self.fingerprint[:8]})"
        )
