"""The batch plan: an immutable order of microbatches that every rank and every run agrees on."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from batchwright.batching.config import BatchingConfig
from batchwright.batching.plan.arrange import (
    LengthSource,
    Source,
    arrange,
    join_sources,
    with_costs,
)
from batchwright.batching.plan.canonical import canonical_ids, canonical_order
from batchwright.batching.plan.files import (
    VERSION,
    read_plan,
    write_plan,
    write_shards,
    write_text,
)
from batchwright.batching.plan.groups import Groups
from batchwright.batching.plan.microbatch import MicrobatchSpec, Placement, Pulled, Step
from batchwright.batching.plan.order import Arrays, Listing, Order, Rows
from batchwright.batching.plan.pieces import Counts, SkipReason, skip_reason
from batchwright.batching.plan.proofs import PlanDiff, first_difference, microbatches_of
from batchwright.batching.plan.shards import (
    Balance,
    CheckpointPosition,
    DistributedConfig,
    Shard,
    balance,
)
from batchwright.batching.plan.strip import strip_html
from batchwright.data.ids import Ids
from batchwright.data.lengths import Lengths
from batchwright.errors import BadFile, ConfigError, Mismatch, UnknownSample
from batchwright.fingerprint import Value, digest, digest_array, merkle_root
from batchwright.remote import fetched, local_output

__all__ = ["BatchPlan", "EpochPlan", "iter_from_checkpoint", "shard_batch_plan"]

V = TypeVar("V", np.float64, np.int32)

COST_LINEAR = 24_576
COST_QUADRATIC = 1
"""Relative compute of a token in the matrices and of a pair of tokens in attention (7B model)."""

AHEAD = 1024
"""Microbatches that are made together, at most."""

_TEXT_FACTS = (
    *("fingerprint", "dataset_hash", "tokenizer_hash", "num_epochs"),
    *("config", "counts", "sources", "shard"),
)


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

    def header(self) -> dict[str, Any]:
        """What the epoch amounts to, the first line of it as text."""
        return {
            "epoch": self.epoch,
            "seed": self.plan.config.seed,
            "total_samples": self.total_samples,
            "total_tokens": self.total_tokens,
            "num_microbatches": len(self),
        }


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
    shown: Counts
    """Counts of the samples that some epoch shows: of a mixture not always all of its sources."""
    skipped: NDArray[np.int32]
    """Samples that are in no batch, by row number, in the order of `SkipReason`."""
    dataset_hash: str = "unknown"
    tokenizer_hash: str = "unknown"
    sources: tuple[Source, ...] = ()
    """Name, size and weight of each source of a mixture."""
    difficulty: NDArray[np.float64] | None = None
    groups: NDArray[np.int32] | None = None
    """The group of each sample, -1 if it is in none; None if there are no groups."""
    costs_N: NDArray[np.int32] | None = None
    """Tokens that each sample costs beside its own; None if there are none."""
    note: str = ""
    """How the plan was packed: what `optimal` packing achieved."""
    shard_of: Shard | None = None
    # Set where they are true, and not taken along by `replace`, where they might not be.
    whole: "BatchPlan | None" = field(default=None, init=False)
    """The plan that this one was sharded from."""
    sealed: Callable[[], str] | None = field(default=None, init=False)
    """Of a saved plan: gives the fingerprint it was saved with, if its arrays are still those."""

    @classmethod
    def arranged(
        cls,
        lengths: Lengths,
        config: BatchingConfig,
        num_epochs: int,
        sources: Sequence[Source] = (),
        difficulty: NDArray[np.float64] | None = None,
        groups: Groups | None = None,
        costs: NDArray[np.int32] | None = None,
    ) -> "BatchPlan":
        """The plan of these lengths; `BatchPlanBuilder` makes them ready for it."""
        if costs is not None:
            lengths = with_costs(lengths, costs, config)
        made = arrange(lengths, config, num_epochs, sources, difficulty, groups)
        return cls(
            order=made.order,
            ids=lengths.ids,
            num_epochs=num_epochs,
            config=config,
            counts=made.pieces.counts,
            shown=made.shown or made.pieces.counts,
            skipped=made.pieces.skipped,
            dataset_hash=lengths.dataset_hash,
            tokenizer_hash=lengths.tokenizer_hash,
            sources=tuple(sources),
            difficulty=difficulty,
            groups=None if groups is None else groups.of_sample,
            costs_N=costs,
            note=made.note,
        )

    @classmethod
    def load(cls, path: Path | str, *, check: bool = False) -> "BatchPlan":
        """Open a saved plan. Arrays are mapped, not read: milliseconds for any size.

        With `check` every byte is read and hashed, and the fingerprint is worked out anew.
        """
        return read_plan(fetched(path), cls, check)

    def save(self, path: Path | str) -> Path:
        """Write the plan as a folder, whole or not at all."""
        with local_output(Path(path)) as local:
            write_plan(local, self._manifest(), self._arrays())
        return Path(path)

    def save_shards(
        self, world_size: int, path: Path | str, balance: Balance = "cost"
    ) -> list[Path]:
        """Write `rank_0` to `rank_<world_size - 1>`, each a plan of its own."""
        # A world of no ranks is refused by its rank 0.
        ranks = [self.shard(r, world_size, balance=balance) for r in range(max(1, world_size))]
        with local_output(Path(path)) as local:
            made = write_shards(local, [rank._manifest() for rank in ranks], self._arrays())
        return [Path(path) / one.name for one in made]

    def export(self, path: Path | str) -> Path:
        """Write the plan as text: `meta.json` and one `epoch_<n>.jsonl` for each epoch."""
        facts = self._manifest()
        meta = {name: facts[name] for name in _TEXT_FACTS}
        epochs = ((epoch.header(), epoch) for epoch in self._epochs())
        return write_text(Path(path), meta, epochs)

    def num_microbatches(self, epoch: int = 0) -> int:
        """Microbatches of an epoch over all ranks."""
        return self.order.size(self._checked(epoch))

    def batch(self, epoch: int, index: int) -> MicrobatchSpec:
        """Microbatch `index` of an epoch, whatever the shard, without making any other."""
        count = self.num_microbatches(epoch)
        if not 0 <= index < count:
            raise UnknownSample(f"epoch {epoch} has microbatches 0 to {count - 1}, got {index}")
        return self._spec(epoch, index, self.order.rows(epoch, index))

    def _spec(self, epoch: int, index: int, rows: Rows) -> MicrobatchSpec:
        return MicrobatchSpec(
            epoch,
            index,
            *rows,
            ids=self.ids,
            cut_at=self._cut_at,
            segment_multiple=self.config.segment_multiple,
            costs=None if self.costs_N is None else self.costs_N[rows.items],
        )

    def listing(self, epoch: int = 0, first: int = 0, stop: int | None = None) -> Listing:
        """Microbatches first .. stop - 1 of an epoch as arrays, by default all, made at once."""
        count = self.num_microbatches(epoch)
        stop = count if stop is None else stop
        if not 0 <= first < stop <= count:
            raise UnknownSample(
                f"epoch {epoch} has microbatches 0 to {count - 1}, got {first} to {stop - 1}"
            )
        return self.order.listing(epoch, first, stop)

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
            raise UnknownSample(f"the plan has {last} epochs, so it cannot resume at epoch {epoch}")
        while epoch < last:
            count = self.num_microbatches(epoch)
            if not 0 <= microbatch_idx <= count:
                raise UnknownSample(
                    f"epoch {epoch} has {count} microbatches, so it cannot resume at "
                    f"microbatch {microbatch_idx}"
                )
            fixed = self.config.step_size != "world"
            if fixed and microbatch_idx < count and microbatch_idx % self.step_microbatches:
                raise Mismatch(
                    f"microbatch {microbatch_idx} is inside a step of {self.step_microbatches}; "
                    f"resume at the start of a step"
                )
            batches = self._ahead(epoch, microbatch_idx, count)
            for first in range(microbatch_idx, count, self.step_microbatches):
                stop = min(first + self.step_microbatches, count)
                if self.shard_of is None:
                    share = tuple(islice(batches, stop - first))
                else:
                    share = self._share(epoch, first, stop)
                yield Step(epoch, first, stop, share)
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
        """The position to resume from when `step` is done."""
        ended = step.stop == self.num_microbatches(step.epoch)
        epoch, at = (step.epoch + 1, 0) if ended else (step.epoch, step.stop)
        return CheckpointPosition(epoch, at, global_step, self.whole_fingerprint)

    def shard(self, rank: int, world_size: int, *, balance: Balance = "cost") -> "BatchPlan":
        """The plan as one rank sees it."""
        shard = Shard(rank, world_size, balance)
        fewest = min(self.num_microbatches(epoch) for epoch in range(self.num_epochs))
        if world_size > fewest:
            raise ConfigError(
                f"world size must be at most {fewest}, the microbatches of an epoch, "
                f"got {world_size}; use fewer ranks or a smaller token budget"
            )
        part = dataclasses.replace(self, shard_of=shard)
        object.__setattr__(part, "whole", self.whole or self)
        return part

    def costs(self, epoch: int, first: int = 0, stop: int | None = None) -> NDArray[np.int64]:
        """Predicted compute of microbatches first .. stop - 1, by which ranks are balanced."""
        count = self.num_microbatches(epoch)
        stop = count if stop is None else stop
        if not 0 <= first <= stop <= count:
            raise UnknownSample(
                f"epoch {epoch} has microbatches 0 to {count - 1}, got {first} to {stop - 1}"
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
        samples were given, and not the number of epochs, because a virtual plan has no last epoch.
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
            self._costs_digest,
            shard,
        )

    @cached_property
    def _costs_digest(self) -> str | None:
        if self.costs_N is None:
            return None
        canonical = canonical_order(self.ids)
        return digest_array(self.costs_N if canonical is None else self.costs_N[canonical])

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

    def why_skipped(self, sample_id: str) -> SkipReason | None:
        """Why a sample is in no batch of any epoch; None if its length and loss are allowed."""
        return skip_reason(self.skipped, self.counts, self.ids.find(sample_id))

    def verify(self, lengths: LengthSource | Mapping[str, LengthSource]) -> None:
        """Build the plan again from `lengths`; `Mismatch` names the first step that differs."""
        again = self._again(lengths)
        if again.fingerprint == self.fingerprint:
            return
        where = first_difference(self._epochs(), again._epochs())
        place = "" if where is None else f": epoch {where[0]}, microbatch {where[1]} is the first"
        raise Mismatch(
            f"the plan {self.fingerprint[:16]} does not follow from these lengths, which give "
            f"{again.fingerprint[:16]}{place}; open the lengths it was built from, or build it "
            f"again"
        )

    def diff(self, other: "BatchPlan") -> PlanDiff:
        """How `other` differs: settings, first microbatch, samples that moved."""
        mine, theirs = self.config.model_dump(mode="json"), other.config.model_dump(mode="json")
        config = {k: (mine[k], theirs[k]) for k in mine if mine[k] != theirs[k]}
        for name in ("num_epochs", "dataset_hash", "tokenizer_hash", "sources", "shard_of"):
            a, b = getattr(self, name), getattr(other, name)
            if a != b:
                config[name] = (a, b)
        if self.fingerprint == other.fingerprint and self.num_epochs == other.num_epochs:
            return PlanDiff(True, config, None, 0, 0, 0)
        here, there = microbatches_of(self.iter_epoch(0)), microbatches_of(other.iter_epoch(0))
        both = here.keys() & there.keys()
        return PlanDiff(
            same=False,
            config=config,
            first=first_difference(self._epochs(), other._epochs()),
            only_left=len(here) - len(both),
            only_right=len(there) - len(both),
            moved=sum(here[sample] != there[sample] for sample in both),
        )

    def _again(self, lengths: LengthSource | Mapping[str, LengthSource]) -> "BatchPlan":
        """The plan that follows from `lengths` by the settings of this one."""
        if self.sources:
            weights = {name: weight for name, _, weight in self.sources}
            given, sources = join_sources(lengths, weights)  # type: ignore[arg-type]
        else:
            given, sources = Lengths.of(lengths), ()  # type: ignore[arg-type]
            _same_data(self, given)
        groups = _values_for(self, self.groups, given)
        again = BatchPlan.arranged(
            given,
            self.config,
            self.num_epochs,
            sources,
            _values_for(self, self.difficulty, given),
            None if groups is None else Groups(groups),
            _values_for(self, self.costs_N, given),
        )
        if not sources:
            # Hashes that contradict each other were refused above; an unknown one fits any.
            again = dataclasses.replace(
                again, dataset_hash=self.dataset_hash, tokenizer_hash=self.tokenizer_hash
            )
        if self.shard_of is None:
            return again
        shard = self.shard_of
        return again.shard(shard.rank, shard.world_size, balance=shard.balance)

    def _epochs(self) -> list[EpochPlan]:
        return [self.epoch(number) for number in range(self.num_epochs)]

    def _manifest(self) -> dict[str, Any]:
        """What a saved plan says of itself."""
        return {
            "kind": self.order.kind,
            "fingerprint": self.fingerprint,
            "order": self.roots[0],
            "num_epochs": self.num_epochs,
            "dataset_hash": self.dataset_hash,
            "tokenizer_hash": self.tokenizer_hash,
            "config": self.config.model_dump(mode="json"),
            "counts": asdict(self.counts),
            "shown": asdict(self.shown),
            "sources": [list(source) for source in self.sources],
            "note": self.note,
            "shard": asdict(self.shard_of) if self.shard_of else None,
        }

    def _arrays(self) -> Arrays:
        arrays: Arrays = {**self.order.arrays(), "skipped": self.skipped}
        if self.ids.arrays is not None:
            arrays["id_offsets"], arrays["id_data"] = self.ids.arrays
        for name in ("difficulty", "groups", "costs_N"):
            if getattr(self, name) is not None:
                arrays[name] = getattr(self, name)
        return arrays

    def _ahead(self, epoch: int, first: int, count: int) -> Iterator[MicrobatchSpec]:
        """Microbatches first .. count - 1, the first alone and then more and more at once."""
        together = 1
        while first < count:
            stop = min(first + together, count)
            listed = self.order.listing(epoch, first, stop)
            for number in range(stop - first):
                yield self._spec(epoch, first + number, listed.rows(number))
            first, together = stop, min(2 * together, AHEAD)

    def _share(self, epoch: int, first: int, stop: int) -> tuple[MicrobatchSpec, ...]:
        """The microbatches of this rank in a step."""
        assert self.shard_of is not None
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
            raise UnknownSample(f"epoch must be at least 0, got {epoch}")
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

    def _repr_html_(self) -> str:
        """What a notebook shows: the line of `repr` and the first packed or padded rows."""
        count = self.num_microbatches(0)
        return strip_html(repr(self), (self.batch(0, k) for k in range(count)))


def shard_batch_plan(
    plan: BatchPlan, config: DistributedConfig, balance: Balance = "cost"
) -> BatchPlan:
    """The plan as one rank sees it. Every rank gets the same number of microbatches.

    `round_robin` gives rank i the microbatches i, i + world_size, ...; `cost` evens out the
    predicted compute within each step.
    """
    return plan.shard(config.rank, config.world_size, balance=balance)


def iter_from_checkpoint(plan: BatchPlan, position: CheckpointPosition) -> Iterator[MicrobatchSpec]:
    """What is left after `position`, on however many ranks `plan` is sharded."""
    return (batch for step in plan.steps_from(position) for batch in step.microbatches)


def _same_data(plan: BatchPlan, lengths: Lengths) -> None:
    for what in ("tokenizer_hash", "dataset_hash"):
        planned, given = getattr(plan, what), getattr(lengths, what)
        if planned != given and "unknown" not in (planned, given):
            raise Mismatch(
                f"the plan was built for {what} {planned[:16]}, these lengths have {given[:16]}; "
                f"open the lengths it was built from, or build the plan again"
            )
    if len(lengths) != plan.counts.samples:
        raise Mismatch(
            f"the plan was built for {plan.counts.samples:,} samples, these lengths have "
            f"{len(lengths):,}; open the lengths it was built from, or build the plan again"
        )


def _values_for(plan: BatchPlan, values: NDArray[V] | None, lengths: Lengths) -> NDArray[V] | None:
    """The plan's `values` in the order of `lengths`, which may name the samples otherwise."""
    if values is None or len(lengths) != len(plan.ids):
        return values
    theirs, mine = canonical_order(lengths.ids), canonical_order(plan.ids)
    moved = np.empty_like(values)
    every = slice(None)
    moved[every if theirs is None else theirs] = values[every if mine is None else mine]
    return moved
