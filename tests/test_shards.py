"""Ranks: equal counts, every microbatch once, exact resume on any number of ranks."""

import itertools
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.batching import (
    BatchingConfig,
    BatchPlan,
    BatchPlanBuilder,
    CheckpointPosition,
    DistributedConfig,
    MicrobatchSpec,
    balance,
    interleave_microbatches,
    iter_from_checkpoint,
    shard_batch_plan,
)
from batchwright.errors import BadFile, ConfigError, Mismatch, MissingFile, UnknownSample

LAYOUTS = ["bucketed", "sorted", "packed", "curriculum"]


def make(layout: str, step_size: Any = "world", seed: int = 42, n: int = 120) -> BatchPlan:
    lengths = {f"s{i}": (i * 37) % 61 + 1 for i in range(n)}
    config = BatchingConfig(
        layout="bucketed" if layout == "curriculum" else layout,
        token_budget=130,
        bucket_edges=(16, 32),
        overflow_max=50,
        pack_max_length=50,
        overflow="split",
        step_size=step_size,
        seed=seed,
    )
    difficulty = [i % 11 for i in range(n)] if layout == "curriculum" else None
    return BatchPlanBuilder(lengths, config, difficulty=difficulty).build(2)


def pieces(batches: Any) -> "Counter[tuple[str, int]]":
    return Counter(
        piece
        for batch in batches
        if batch.weight
        for piece in zip(batch.samples, batch.starts.tolist(), strict=True)
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("step_size", ["world", 1, 4, 6, 8])
@pytest.mark.parametrize("mode", ["cost", "round_robin"])
def test_ranks_share_every_step_evenly(layout: str, step_size: Any, mode: Any) -> None:
    plan = make(layout, step_size)
    count = plan.num_microbatches(1)
    alone = {batch.index: batch for batch in plan.iter_epoch(1)}
    for world in (1, 2, 3, 5, 9):
        shards = [plan.shard(rank, world, balance=mode) for rank in range(world)]
        steps = [list(shard.iter_steps(1, 0, epochs=1)) for shard in shards]
        assert {len(mine) for mine in steps} == {shards[0].num_steps(1)}
        owner: dict[int, int] = {}
        at = 0
        for together in zip(*steps, strict=True):
            assert len({(step.first, step.stop, step.epoch) for step in together}) == 1
            assert together[0].first == at
            at = together[0].stop
            per_step = world if step_size == "world" else step_size
            assert at == min(together[0].first + per_step, count)
            # The same number for every rank, and no more than needed.
            assert {len(step.microbatches) for step in together} == {
                math.ceil((at - together[0].first) / world)
            }
            for rank, step in enumerate(together):
                for batch in step.microbatches:
                    assert step.first <= batch.index < step.stop
                    if batch.weight:
                        assert batch.weight == 1.0
                        assert batch == alone[batch.index]
                        assert batch.index not in owner
                        owner[batch.index] = rank
                    else:
                        assert batch == alone[batch.index].as_filler()
        assert at == count
        assert sorted(owner) == list(range(count))
        for name in ("s0", "s60", "s119"):
            for place in shards[-1].explain(name):
                if place.epoch == 1:
                    assert place.rank == owner[place.microbatch]
        if mode == "round_robin" and step_size == "world":
            assert all(rank == index % world for index, rank in owner.items())


@settings(deadline=None, max_examples=50)
@given(
    st.sampled_from(LAYOUTS),
    st.sampled_from(["world", 1, 4, 6, 8]),
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(1, 9),
    st.sampled_from(["cost", "round_robin"]),
    st.integers(0, 10**6),
)
def test_a_run_goes_on_with_other_ranks_and_sees_each_remaining_sample_once(
    tmp_path_factory: pytest.TempPathFactory,
    layout: str,
    step_size: Any,
    before: int,
    after: int,
    last: int,
    mode: Any,
    stop: int,
) -> None:
    plan = PLANS.setdefault((layout, step_size), make(layout, step_size))
    everything = Counter(
        (epoch, batch.index, *piece)
        for epoch in range(2)
        for batch in plan.iter_epoch(epoch)
        for piece in zip(batch.samples, batch.starts.tolist(), strict=True)
    )
    seen: Counter[tuple[Any, ...]] = Counter()

    def note(batches: Any) -> None:
        for batch in batches:
            if batch.weight:
                for piece in zip(batch.samples, batch.starts.tolist(), strict=True):
                    seen[batch.epoch, batch.index, *piece] += 1

    path = tmp_path_factory.mktemp("run") / "position.json"
    position = CheckpointPosition()
    # Two interruptions: every rank of a world stops after the same step.
    for number, world in enumerate((before, after)):
        shards = [plan.shard(rank, world, balance=mode) for rank in range(world)]
        runs = [list(s.iter_steps(position.epoch, position.microbatch_idx)) for s in shards]
        if not runs[0]:
            break
        done = stop // (1 + number * 1000) % len(runs[0])
        for run in runs:
            for step in run[: done + 1]:
                note(step.microbatches)
        positions = {s.position_after(r[done], done + 1) for s, r in zip(shards, runs, strict=True)}
        assert len(positions) == 1
        positions.pop().save(path)
        position = CheckpointPosition.load(path)
        assert position.plan == plan.fingerprint
    for rank in range(last):
        note(iter_from_checkpoint(plan.shard(rank, last, balance=mode), position))

    assert seen == everything


PLANS: dict[tuple[str, Any], BatchPlan] = {}


def test_an_integer_step_holds_the_same_samples_on_any_world() -> None:
    for layout, step_size in itertools.product(LAYOUTS, (1, 4, 6, 8)):
        plan = make(layout, step_size)
        seen = []
        for world in (1, 2, 4, 7):
            shards = [plan.shard(rank, world) for rank in range(world)]
            steps = zip(*(shard.iter_steps() for shard in shards), strict=True)
            seen.append(
                [pieces(batch for step in ranks for batch in step.microbatches) for ranks in steps]
            )
        assert all(other == seen[0] for other in seen)


def test_a_shard_and_a_position_are_refused_where_they_do_not_belong(tmp_path: Path) -> None:
    plan = make("bucketed")
    few = make("bucketed", n=2)

    for rank, world in [(0, 0), (2, 2), (-1, 2), (0, -1), (0, plan.num_microbatches() + 1)]:
        with pytest.raises(ConfigError) as caught:
            plan.shard(rank, world)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError):
        DistributedConfig(rank=3, world_size=3)
    with pytest.raises(ConfigError):
        plan.shard(0, 2, balance="luck")  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        few.shard(0, 3)

    step = next(plan.iter_steps())
    with pytest.raises(Mismatch, match="belongs to plan"):
        iter_from_checkpoint(make("bucketed", seed=1), plan.position_after(step, 1))
    # A position without a plan fits every plan.
    assert list(iter_from_checkpoint(plan.shard(0, 2), CheckpointPosition()))
    with pytest.raises(UnknownSample):
        list(iter_from_checkpoint(plan, CheckpointPosition(0, 10**6)))

    path = tmp_path / "position"
    for text in (
        "",
        "[]",
        "5",
        "{",
        '{"epoch": 1.5}',
        '{"epoch": -1}',
        '{"plan": 3}',
        '{"x": 1}',
        "\xff",
    ):
        path.write_text(text, encoding="latin-1")
        with pytest.raises(BadFile):
            CheckpointPosition.load(path)
    with pytest.raises(MissingFile):
        CheckpointPosition.load(tmp_path / "none")


def test_ranks_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    config = DistributedConfig.from_env()
    plan = make("sorted")

    assert (config.rank, config.world_size, config.is_main) == (1, 3, False)
    mine = list(shard_batch_plan(plan, config, "round_robin").iter_epoch(0))
    assert [batch.index for batch in mine if batch.weight] == list(
        range(1, plan.num_microbatches(), 3)
    )


def heaviest(costs: list[int], ranks: Any, world: int) -> int:
    return max(
        sum(c for c, r in zip(costs, ranks, strict=True) if r == rank) for rank in range(world)
    )


@settings(deadline=None, max_examples=150)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(1, 4))
def test_balance_stays_near_the_best_division(costs: list[int], world: int) -> None:
    ranks = balance(costs, world)

    counts = np.bincount(ranks, minlength=world)
    assert counts.max() - counts.min() <= 1
    assert balance(costs, world).tolist() == ranks.tolist()
    best = min(
        heaviest(costs, division, world)
        for division in itertools.product(range(world), repeat=len(costs))
        if max(n := [division.count(r) for r in range(world)]) - min(n) <= 1
    )
    # Graham's bound for largest-first holds for any number of items a rank.
    assert heaviest(costs, ranks, world) <= best * (4 / 3) + 1e-9


def test_balance_is_near_perfect_on_many_costs() -> None:
    costs = np.random.default_rng(0).lognormal(8, 1, 1024).astype(np.int64)
    ranks = balance(costs, 64)
    loads = np.bincount(ranks, costs, 64)

    assert set(np.bincount(ranks)) == {16}
    assert loads.max() <= 1.02 * max(loads.mean(), costs.max())


@dataclass(frozen=True)
class Numbered:
    bucket_id: int
    number: int


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 4), max_size=60))
def test_interleaving_keeps_order_in_a_bucket_and_mixes_to_the_end(buckets: list[int]) -> None:
    given_batches = [Numbered(bucket, number) for number, bucket in enumerate(buckets)]

    mixed = interleave_microbatches(given_batches)

    assert sorted(mixed, key=lambda b: b.number) == given_batches
    sizes = Counter(buckets)
    seen: Counter[int] = Counter()
    for place, batch in enumerate(mixed, start=1):
        seen[batch.bucket_id] += 1
        # After any number of batches each bucket is where its share says, give or take a few.
        for bucket, size in sizes.items():
            assert abs(seen[bucket] - size * place / len(mixed)) <= len(sizes)
    for bucket in sizes:
        numbers = [batch.number for batch in mixed if batch.bucket_id == bucket]
        assert numbers == sorted(numbers)


def test_microbatches_of_a_plan_can_be_interleaved() -> None:
    batches: list[MicrobatchSpec] = list(make("bucketed").iter_epoch(0))

    assert Counter(b.index for b in interleave_microbatches(batches)) == Counter(
        range(len(batches))
    )
