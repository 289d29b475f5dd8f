"""Microbatches over ranks: equal counts by construction, any number of ranks, exact resume."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from batchwright.errors import BadFile, ConfigError
from batchwright.jit import kernel
from batchwright.sealed import read_sealed_json, write_sealed_json
from batchwright.world import World

__all__ = [
    "Balance",
    "CheckpointPosition",
    "DistributedConfig",
    "Shard",
    "balance",
    "interleave_microbatches",
]

Balance = Literal["cost", "round_robin"]


@dataclass(frozen=True, slots=True)
class DistributedConfig:
    """Rank and world size, as `World` finds them.

    >>> DistributedConfig(rank=1, world_size=4).is_main
    False
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    def __post_init__(self) -> None:
        World(rank=self.rank, size=self.world_size)

    @classmethod
    def from_env(cls) -> "DistributedConfig":
        """From torchrun's variables, else SLURM's, else one process alone."""
        world = World.detect()
        return cls(world.rank, world.size, world.local_rank, world.local_size)

    @property
    def is_main(self) -> bool:
        return self.rank == 0


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of a plan a rank reads."""

    rank: int = 0
    world_size: int = 1
    balance: Balance = "cost"

    def __post_init__(self) -> None:
        World(rank=self.rank, size=self.world_size)
        if self.balance not in ("cost", "round_robin"):
            raise ConfigError(f"balance must be cost or round_robin, got {self.balance!r}")


@dataclass(frozen=True, slots=True)
class CheckpointPosition:
    """The progress of a run, counted over all ranks, so that it resumes on any number of them.

    `microbatch_idx` is the first microbatch of `epoch` that was not trained on.
    """

    epoch: int = 0
    microbatch_idx: int = 0
    global_step: int = 0
    plan: str = ""
    """Fingerprint of the plan; empty fits every plan."""

    def save(self, path: Path | str) -> None:
        """Write as JSON with a checksum, whole or not at all."""
        write_sealed_json(Path(path), asdict(self))

    @classmethod
    def load(cls, path: Path | str) -> "CheckpointPosition":
        """Read what `save` wrote; `BadFile` if a byte of it has changed."""
        path = Path(path)
        fields = read_sealed_json(path, "checkpoint position", "resume from another one")
        try:
            position = cls(**fields)
        except TypeError as error:
            raise BadFile(f"{path} is not a checkpoint position: {error}") from None
        numbers = (position.epoch, position.microbatch_idx, position.global_step)
        if not all(type(n) is int and n >= 0 for n in numbers) or not isinstance(
            position.plan, str
        ):
            raise BadFile(f"{path} is not a checkpoint position: {fields}")
        return position


class _Bucketed(Protocol):
    @property
    def bucket_id(self) -> int: ...


B = TypeVar("B", bound=_Bucketed)


def interleave_microbatches(microbatches: Iterable[B]) -> list[B]:
    """Spread every bucket evenly over the list, keeping its own order.

    Any window of the result has each bucket about as often as the whole list.
    """
    listed = list(microbatches)
    sizes: dict[int, int] = {}
    for batch in listed:
        sizes[batch.bucket_id] = sizes.get(batch.bucket_id, 0) + 1
    seen: dict[int, int] = {}
    whole = math.lcm(*sizes.values())
    keyed = []
    for batch in listed:
        bucket = batch.bucket_id
        nth = seen.get(bucket, 0)
        seen[bucket] = nth + 1
        # Its middle in the list, (2 nth + 1) / (2 size), in whole numbers.
        keyed.append(((2 * nth + 1) * (whole // sizes[bucket]), bucket, batch))
    keyed.sort(key=lambda entry: entry[:2])
    return [batch for _, _, batch in keyed]


def balance(costs: NDArray[np.int64] | Sequence[int], world_size: int) -> NDArray[np.int32]:
    """The rank of each cost: counts differ by at most one, the largest load is kept small.

    Largest first to the lightest rank that has room, then swaps that lower the heaviest rank.
    Deterministic: ties go to the lower index.

    >>> balance([9, 1, 1, 9], 2).tolist()
    [0, 0, 1, 1]
    """
    values = np.ascontiguousarray(costs, np.int64)
    return _swap(values, _largest_first(values, world_size), world_size)


@kernel
def _largest_first(costs: NDArray[np.int64], world: int) -> NDArray[np.int32]:
    room = np.full(world, costs.size // world, np.int64)
    spare = costs.size % world
    load = np.zeros(world, np.int64)
    rank_of = np.empty(costs.size, np.int32)
    for item in np.argsort(-costs, kind="mergesort"):
        best = -1
        for rank in range(world):
            has_room = room[rank] > 0 or (room[rank] == 0 and spare > 0)
            if has_room and (best < 0 or load[rank] < load[best]):
                best = rank
        if room[best] == 0:
            spare -= 1
        room[best] -= 1
        load[best] += costs[item]
        rank_of[item] = best
    return rank_of


@kernel
def _swap(costs: NDArray[np.int64], rank_of: NDArray[np.int32], world: int) -> NDArray[np.int32]:
    load = np.zeros(world, np.int64)
    for item in range(costs.size):
        load[rank_of[item]] += costs[item]
    # Within a thousandth of an even share nothing worth the search is left.
    even = costs.sum() // world
    while True:
        heavy = np.argmax(load)
        if load[heavy] <= even + even // 1000:
            return rank_of
        best_gain = 0
        best_a, best_b = -1, -1
        for a in range(costs.size):
            if rank_of[a] != heavy:
                continue
            for b in range(costs.size):
                moved = costs[a] - costs[b]
                if rank_of[b] == heavy or moved <= 0:
                    continue
                # The swap helps as far as both ranks end below the present maximum.
                gain = min(moved, load[heavy] - (load[rank_of[b]] + moved))
                if gain > best_gain:
                    best_gain, best_a, best_b = gain, a, b
        if best_gain == 0:
            return rank_of
        other = rank_of[best_b]
        moved = costs[best_a] - costs[best_b]
        load[heavy] -= moved
        load[other] += moved
        rank_of[best_a], rank_of[best_b] = other, heavy
