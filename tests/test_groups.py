"""Groups, costs and segment multiples: together, in the budget, and really padded."""

from itertools import pairwise
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
    collate,
    iter_from_checkpoint,
)
from batchwright.data.rows.sample import Sample
from batchwright.errors import BatchwrightError, ConfigError, Mismatch, OversizedSample

LAYOUTS = ("bucketed", "sorted", "packed")


def config_of(layout: str, **fields: Any) -> BatchingConfig:
    given = {"token_budget": 256, "bucket_edges": (16, 32), "overflow_max": 64}
    return BatchingConfig(**{**given, "layout": layout, "pack_max_length": 64, **fields})


@st.composite
def grouped(draw: st.DrawFn) -> tuple[dict[str, int], list[str | None], BatchingConfig]:
    values = draw(st.lists(st.integers(1, 70), min_size=1, max_size=60))
    labels = [draw(st.sampled_from([None, *"abcdefgh", f"alone{i}"])) for i in range(len(values))]
    config = config_of(
        draw(st.sampled_from(LAYOUTS)),
        token_budget=draw(st.sampled_from([128, 256, 1024])),
        overflow=draw(st.sampled_from(["skip", "truncate", "split"])),
        segment_multiple=draw(st.sampled_from([1, 4, 16])),
        pack_max_segments=draw(st.sampled_from([None, 3])),
        pack_mode=draw(st.sampled_from(["best_fit_decreasing", "best_fit"])),
        interleave_buckets=draw(st.booleans()),
        step_size=draw(st.sampled_from(["world", 2])),
        seed=draw(st.integers(0, 99)),
    )
    return {f"s{i}": value for i, value in enumerate(values)}, labels, config


@settings(deadline=None, max_examples=150)
@given(grouped(), st.integers(0, 1))
def test_groups_are_never_divided_and_nothing_else_is_lost(
    case: tuple[dict[str, int], list[str | None], BatchingConfig], epoch: int
) -> None:
    lengths, labels, config = case
    refused = ""
    try:
        plan = BatchPlanBuilder(lengths, config, groups=labels).build(2)
    except (OversizedSample, ConfigError) as error:
        refused = str(error)
    if refused:
        assert refused.startswith(("group '", "all ")), refused
        return

    where: dict[str, set[int]] = {}
    seen: list[tuple[str, int]] = []
    multiple = config.segment_multiple
    for batch in plan.iter_epoch(epoch):
        assert batch.padded_tokens <= config.token_budget
        assert batch.max_len % multiple == 0 or config.layout == "packed"
        rooms = -(-batch.lengths // multiple) * multiple
        for first, last in pairwise(batch.row_offsets.tolist()):
            assert rooms[first:last].sum() <= batch.max_len
            assert last - first <= (config.pack_max_segments or last)
        seen += list(zip(batch.samples, batch.starts.tolist(), strict=True))
        for sample in batch.samples:
            label = labels[int(sample[1:])]
            if label is not None:
                where.setdefault(label, set()).add(batch.index)
    multi = {label for label in where if labels.count(label) > 1}
    assert all(len(where[label]) == 1 for label in multi)
    assert len(seen) == len(set(seen)) == plan.counts.planned_pieces
    left = {plan.ids[int(item)] for item in plan.skipped}
    assert left.isdisjoint({name for name, _ in seen})
    assert left | {name for name, _ in seen} == set(lengths)
    # A group is planned whole or not at all.
    for label in set(labels) - {None}:
        members = {f"s{i}" for i, other in enumerate(labels) if other == label}
        assert members <= left or members.isdisjoint(left)
    plan.verify(dict(reversed(lengths.items())))


@settings(deadline=None, max_examples=80)
@given(
    grouped(),
    st.integers(0, 2**32),
    st.integers(12, 60),
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.integers(0, 12),
)
def test_on_any_ranks_from_any_step_on_everything_is_seen_once_and_groups_on_one_rank(
    case: tuple[dict[str, int], list[str | None], BatchingConfig],
    drawn: int,
    n: int,
    worlds: tuple[int, int],
    done: int,
) -> None:
    # Random numbers of numpy: small examples have no groups, and one microbatch for all ranks.
    random = np.random.default_rng(drawn)
    config = case[2].model_copy(update={"overflow": "skip"})
    lengths = {f"s{i}": int(random.integers(1, 45)) for i in range(n)}
    costs = random.integers(0, 22, n).tolist()
    labels = [f"g{i}" if random.random() < 0.8 else None for i in random.integers(0, n // 3, n)]
    plan = BatchPlanBuilder(lengths, config, groups=labels, costs=costs).build(2)
    assert plan.groups is not None
    fewest = min(plan.num_microbatches(epoch) for epoch in (0, 1))
    before, after = (
        [plan.shard(rank, world) for rank in range(world)]
        for world in (min(world, fewest) for world in worlds)
    )

    # What may be planned, worked out from the definition: whole groups of samples that fit.
    size = {name: lengths[name] + cost for name, cost in zip(lengths, costs, strict=True)}
    group = dict(zip(lengths, labels, strict=True))
    lone = {name for name, label in group.items() if label is None or labels.count(label) < 2}
    too_long = {name for name in lengths if size[name] > config.limit}
    broken = {group[name] for name in too_long - lone}
    fit = {n for n in lengths if n not in too_long and (n in lone or group[n] not in broken)}
    position = CheckpointPosition()
    seen: list[list[str]] = [[], []]
    for ranks, most in ((before, done), (after, 10**6)):
        steps = zip(*(rank.steps_from(position) for rank in ranks), strict=True)
        for number, step in enumerate(steps, 1):
            if number > most:
                break
            where: dict[str, set[int]] = {}
            assert len({len(part.microbatches) for part in step}) == 1
            for rank, part in enumerate(step):
                for batch in part.microbatches:
                    rooms = [-(-size[n] // config.segment_multiple) for n in batch.samples]
                    rows = np.add.reduceat(rooms, batch.row_offsets[:-1]) * config.segment_multiple
                    assert rows.max() <= batch.max_len
                    assert batch.batch_size * batch.max_len <= config.token_budget
                    if not batch.weight:
                        continue
                    seen[part.epoch] += batch.samples
                    for name in set(batch.samples) - lone:
                        where.setdefault(str(group[name]), set()).add(rank)
            assert all(len(found) == 1 for found in where.values())
            # Groups are not divided over steps either.
            for label in where:
                whole = {name for name in lengths if str(group[name]) == label}
                shown = {n for part in step for b in part.microbatches for n in b.samples}
                assert whole <= shown
            position = ranks[0].position_after(step[0], number)
    skipped = {plan.ids[int(item)] for item in plan.skipped}
    for names in seen:
        assert sorted(names) == sorted(set(lengths) - skipped)
    # Besides, whole groups are skipped that fit no microbatch, and none that is alone.
    assert set(lengths) - skipped <= fit
    assert skipped & lone <= too_long
    assert plan.counts.skipped_group == len(skipped - too_long)
    why = {name: plan.why_skipped(name) for name in lengths}
    assert {name for name in lengths if why[name] == "group"} == skipped - too_long
    assert {name for name in lengths if why[name] == "long"} == skipped & too_long


@pytest.mark.parametrize("layout", LAYOUTS)
def test_groups_of_one_sample_are_the_plan_without_groups(layout: str) -> None:
    lengths = {f"s{i}": i * 7 % 60 + 1 for i in range(50)}
    plain = BatchPlanBuilder(lengths, config_of(layout)).build(2)

    for labels in ([f"g{i}" for i in range(50)], [None] * 50, np.arange(50)):
        alone = BatchPlanBuilder(lengths, config_of(layout), groups=labels).build(2)
        assert alone.fingerprint == plain.fingerprint
        assert alone.order.kind == "virtual"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_grouped_plans_are_saved_sharded_resumed_and_verified(layout: str, tmp_path: Path) -> None:
    lengths = {f"s{i}": i * 7 % 60 + 1 for i in range(120)}
    labels = [i // 4 for i in range(120)]
    config = config_of(layout, step_size=6, token_budget=512)
    built = BatchPlanBuilder(lengths, config, groups=labels).build(2)
    plan = BatchPlan.load(built.save(tmp_path / "plan"), check=True)

    plan.verify(lengths)
    assert plan.fingerprint == built.fingerprint
    steps = list(plan.iter_steps())
    position = plan.position_after(steps[1], 2)
    left = sorted(
        name
        for rank in range(3)
        for batch in iter_from_checkpoint(plan.shard(rank, 3), position)
        if batch.weight
        for name in batch.samples
    )
    rest = [b for step in steps[2:] for b in step.microbatches]
    assert left == sorted(name for batch in rest for name in batch.samples)
    other = BatchPlanBuilder(lengths, config, groups=[i // 2 for i in range(120)]).build(2)
    assert other.fingerprint != plan.fingerprint
    with pytest.raises(Mismatch):
        plan.verify({**lengths, "s3": 60})


def test_a_group_over_the_budget_is_refused_by_name_or_skipped_whole() -> None:
    lengths = {f"s{i}": 60 for i in range(12)}
    labels = ["prompt-7"] * 9 + ["b"] * 3
    for layout in LAYOUTS:
        with pytest.raises(OversizedSample, match=r"group 'prompt-7' of 9 samples") as caught:
            BatchPlanBuilder(lengths, config_of(layout), groups=labels).build()
        least = int(str(caught.value).split("at least ")[1].split(",")[0])
        BatchPlanBuilder(lengths, config_of(layout, token_budget=least), groups=labels).build()
        skipping = config_of(layout, overflow="skip")
        plan = BatchPlanBuilder(lengths, skipping, groups=labels).build()
        assert plan.counts.skipped_group == 9
        assert [len(batch.items) for batch in plan.iter_epoch(0)] == [3]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"groups": [1, 1]}, "groups has 2 values for 3 samples"),
        ({"costs": [1, 2]}, "costs has 2 values for 3 samples"),
        ({"costs": [1, 2, -1]}, "at least 0"),
        ({"costs": [1, 2, 0.5]}, "integers"),
        ({"groups": [1, 1, 2], "difficulty": [1, 2, 3]}, "curriculum"),
    ],
)
def test_what_cannot_be_planned_is_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(BatchwrightError, match=says):
        BatchPlanBuilder({"a": 1, "b": 2, "c": 3}, **arguments)


def samples_of(lengths: list[int]) -> list[Sample]:
    return [
        Sample(np.arange(1, n + 1, dtype=np.int32), np.ones(n, np.uint8), sample_id=str(item))
        for item, n in enumerate(lengths)
    ]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 30)), min_size=1, max_size=40),
    st.sampled_from(LAYOUTS),
    st.sampled_from([1, 2, 16]),
    st.sampled_from(["skip", "truncate"]),
)
def test_segments_are_padded_to_the_multiple_and_costs_count_in_the_budget(
    values: list[tuple[int, int]], layout: str, multiple: int, overflow: str
) -> None:
    lengths, costs = [n for n, _ in values], [cost for _, cost in values]
    config = config_of(layout, segment_multiple=multiple, overflow=overflow)
    plan = BatchPlanBuilder(np.array(lengths), config, costs=costs).build()
    samples = samples_of(lengths)

    for batch in plan.iter_epoch(0):
        for item, length, tokens in zip(batch.items, batch.lengths, batch.tokens, strict=True):
            assert length == min(lengths[item] + costs[item], config.limit)
            assert tokens == length - costs[item]
        rooms = -(-batch.lengths // multiple) * multiple
        rows = np.add.reduceat(rooms, batch.row_offsets[:-1])
        assert rows.max() <= batch.max_len
        got = collate(batch, samples.__getitem__, pad_id=99)
        assert (got.cu_seqlens % multiple == 0).all()
        assert got.max_seqlen == np.diff(got.cu_seqlens).max()
        assert got.lengths.tolist() == batch.tokens.tolist()
        assert got.token_count == got.attention_mask.sum() == batch.tokens.sum()
        # Laid end to end, each segment is its tokens and then padding without loss.
        flat = {
            name: getattr(got, name)[got.segment_ids >= 0]
            for name in ("input_ids", "labels", "position_ids", "attention_mask")
        }
        for at, (first, last) in enumerate(pairwise(got.cu_seqlens.tolist())):
            n = int(batch.tokens[at])
            assert last - first == -(-n // multiple) * multiple
            assert flat["input_ids"][first : first + n].tolist() == list(range(1, n + 1))
            assert set(flat["input_ids"][first + n : last].tolist()) <= {99}
            assert set(flat["labels"][first + n : last].tolist()) <= {-100}
            assert flat["position_ids"][first:last].tolist() == list(range(last - first))
            assert flat["attention_mask"][first:last].tolist() == [1] * n + [0] * (last - first - n)


def test_costs_are_part_of_the_plan_and_cannot_be_cut() -> None:
    lengths = {"a": 10, "b": 20, "c": 30}
    config = config_of("packed")
    plans = [BatchPlanBuilder(lengths, config, costs=c).build() for c in ([1, 2, 3], [0, 0, 0])]

    assert plans[0].fingerprint != plans[1].fingerprint
    assert plans[0].useful_tokens() == 66
    plans[0].verify({"c": 30, "a": 10, "b": 20})
    # The same sums from other tokens are another plan.
    moved = BatchPlanBuilder({"a": 9, "b": 20, "c": 30}, config, costs=[2, 2, 3]).build()
    assert moved.fingerprint != plans[0].fingerprint
    with pytest.raises(ConfigError, match="split cannot divide"):
        BatchPlanBuilder(lengths, config_of("packed", overflow="split"), costs=[1, 2, 3]).build()
    cut = config_of("packed", overflow="truncate")
    with pytest.raises(OversizedSample, match="sample 'c' costs 90 tokens"):
        BatchPlanBuilder(lengths, cut, costs=[1, 2, 90]).build()
