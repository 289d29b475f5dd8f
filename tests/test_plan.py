"""Plans against brute force: every piece once, no batch over budget, nothing depends on order."""

import math
import random
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.batching import (
    BatchingConfig,
    BatchPlan,
    BatchPlanBuilder,
    MicrobatchSpec,
    PadPolicy,
)
from batchwright.batching.plan.plan import COST_LINEAR, COST_QUADRATIC
from batchwright.data.lengths import Lengths
from batchwright.errors import (
    ConfigError,
    DuplicateId,
    Mismatch,
    OversizedSample,
    UnknownSample,
)
from batchwright.jit import interpreted

LAYOUTS = ("bucketed", "sorted", "packed")
Piece = tuple[str, int, int]


@dataclass(frozen=True)
class Case:
    lengths: dict[str, int]
    config: BatchingConfig

    @property
    def limit(self) -> int:
        """The longest piece, worked out without the config's own property."""
        c = self.config
        if c.layout == "packed":
            return c.pack_max_length
        return min(c.overflow_max, c.token_budget - c.token_budget % c.align)

    def pieces(self) -> list[Piece]:
        """What a plan must hold, sample by sample."""
        out: list[Piece] = []
        for name, length in self.lengths.items():
            if length < self.config.min_length:
                continue
            if length <= self.limit:
                out.append((name, 0, length))
            elif self.config.overflow == "truncate":
                out.append((name, 0, self.limit))
            elif self.config.overflow == "split":
                starts = range(0, length, self.limit)
                out += [(name, start, min(self.limit, length - start)) for start in starts]
        return out

    def fit(self, length: int) -> int:
        while length % self.config.align:
            length += 1
        return length

    def bucket(self, length: int) -> tuple[int, int]:
        """Number and width of a bucket."""
        edges = [e for e in self.config.bucket_edges if e < self.limit]
        for number, edge in enumerate([*edges, self.limit]):
            if length <= edge:
                return number, self.fit(edge)
        raise AssertionError


@st.composite
def cases(draw: st.DrawFn, layouts: tuple[str, ...] = LAYOUTS) -> Case:
    align = draw(st.sampled_from([1, 1, 4, 8]))
    budget = draw(st.integers(24, 120))
    most = budget - budget % align
    overflow_max = draw(st.integers(8, 64))
    limit = min(overflow_max, most)
    edges = draw(st.lists(st.integers(4, limit), max_size=3, unique=True).map(sorted))
    layout = draw(st.sampled_from(layouts))
    config = BatchingConfig(
        layout=layout,
        token_budget=budget,
        bucket_edges=tuple(edges),
        overflow_max=overflow_max,
        overflow=draw(st.sampled_from(["skip", "truncate", "split"])),
        min_length=draw(st.integers(1, 3)),
        pad_policy=draw(st.sampled_from(list(PadPolicy))),
        align=align,
        pack_max_length=draw(st.integers(8, most)),
        pack_mode=draw(st.sampled_from(["best_fit_decreasing", "optimal"])),
        pack_max_segments=draw(st.sampled_from([None, 1, 3])),
        seed=draw(st.integers(-5, 2**40)),
        drop_last=layout == "bucketed" and draw(st.booleans()),
        interleave_buckets=draw(st.booleans()),
        step_size=draw(st.sampled_from(["world", 1, 4, 6])),
    )
    values = draw(st.lists(st.integers(1, 90), min_size=1, max_size=50))
    prefix = draw(st.sampled_from(["", "s", "ü/"]))
    return Case({f"{prefix}{i}": value for i, value in enumerate(values)}, config)


def built(case: Case, num_epochs: int = 2) -> BatchPlan | None:
    """The plan, or None if there rightly is none."""
    try:
        return BatchPlanBuilder(case.lengths, case.config).build(num_epochs)
    except ConfigError as error:
        if "drop_last" in str(error):
            assert case.config.drop_last
            full = Counter(case.bucket(length) for _, _, length in case.pieces())
            assert all(n < case.config.token_budget // w for (_, w), n in full.items())
        else:
            assert not case.pieces()
        return None


def pieces_of(batch: MicrobatchSpec) -> list[Piece]:
    return list(zip(batch.samples, batch.starts.tolist(), batch.lengths.tolist(), strict=True))


def check_batch(case: Case, batch: MicrobatchSpec) -> None:
    config = case.config
    rows = [
        batch.lengths[a:b] for a, b in zip(batch.row_offsets, batch.row_offsets[1:], strict=False)
    ]
    longest = max(int(row.sum()) for row in rows)
    assert min(len(row) for row in rows) >= 1
    assert batch.row_offsets[0] == 0
    assert batch.row_offsets[-1] == len(batch.items)
    assert batch.batch_size == len(rows)
    assert batch.padded_tokens == len(rows) * batch.max_len <= config.token_budget
    assert batch.token_count == int(batch.lengths.sum())
    assert batch.max_len % config.align == 0
    assert longest <= batch.max_len
    assert batch.weight == 1.0
    if config.layout == "packed":
        assert (batch.bucket_id, batch.max_len) == (-1, case.fit(config.pack_max_length))
        assert longest <= config.pack_max_length
        assert max(len(row) for row in rows) <= (config.pack_max_segments or 10**9)
        return
    assert len(batch.items) == len(rows)
    if config.layout == "bucketed":
        number, width = {case.bucket(int(length)) for length in batch.lengths}.pop()
        assert batch.bucket_id == number
        bucket_wide = config.pad_policy is PadPolicy.PAD_TO_BUCKET
        assert batch.max_len == (width if bucket_wide else case.fit(longest))
        assert len({case.bucket(int(length)) for length in batch.lengths}) == 1
    else:
        assert (batch.bucket_id, batch.max_len) == (-1, case.fit(longest))


@settings(deadline=None, max_examples=200)
@given(cases())
def test_every_piece_stands_in_one_batch_of_every_epoch(case: Case) -> None:
    plan = built(case)
    if plan is None:
        return
    for epoch in (0, 1, 7):
        batches = list(plan.iter_epoch(epoch))
        for batch in batches:
            check_batch(case, batch)
        assert [batch.index for batch in batches] == list(range(plan.num_microbatches(epoch)))
        seen = Counter(piece for batch in batches for piece in pieces_of(batch))
        wanted = Counter(case.pieces())
        if not case.config.drop_last:
            assert seen == wanted
            continue
        # What is missing of a bucket does not fill a batch, and what is there is full batches.
        assert seen <= wanted
        missing = Counter(case.bucket(length) for _, _, length in (wanted - seen).elements())
        assert all(n < case.config.token_budget // w for (_, w), n in missing.items())
        sizes = {(b.bucket_id, b.batch_size) for b in batches}
        assert len(sizes) == len({bucket for bucket, _ in sizes})


@settings(deadline=None, max_examples=100)
@given(cases(), st.tuples(st.integers(0, 99), st.integers(1, 99)))
def test_microbatches_made_together_are_those_made_one_by_one(
    case: Case, part: tuple[int, int]
) -> None:
    plan = built(case)
    if plan is None:
        return
    for epoch in range(2):
        count = plan.num_microbatches(epoch)
        first = part[0] % count
        stop = min(first + part[1], count)
        with interpreted():
            alone = [plan.order.rows(epoch, index) for index in range(first, stop)]
        together = plan.listing(epoch, first, stop)
        for number, rows in enumerate(alone):
            made = together.rows(number)
            assert made[:2] == rows[:2]
            for one, other in zip(made[2:], rows[2:], strict=True):
                np.testing.assert_array_equal(one, other)
                assert one.dtype == other.dtype
        assert len(together.batch_width) == stop - first
        iterated = [*plan.iter_epoch(epoch)][first:stop]
        assert iterated == [plan.batch(epoch, index) for index in range(first, stop)]


@settings(deadline=None, max_examples=100)
@given(cases())
def test_counts_add_up(case: Case) -> None:
    plan = built(case)
    if plan is None:
        return
    counts, pieces, limit = plan.counts, case.pieces(), case.limit
    over = sum(length > limit for length in case.lengths.values())
    short = sum(length < case.config.min_length for length in case.lengths.values())

    assert counts.samples == len(case.lengths)
    assert counts.tokens == sum(case.lengths.values())
    assert counts.planned_pieces == len(pieces)
    assert counts.planned_tokens == sum(length for _, _, length in pieces)
    assert counts.tokens_left_out == counts.tokens - counts.planned_tokens
    assert counts.skipped_short == short
    policy = case.config.overflow
    assert counts.skipped_long == (over if policy == "skip" else 0)
    assert counts.truncated == (over if policy == "truncate" else 0)
    assert counts.split == (over if policy == "split" else 0)
    skipped = set(case.lengths) - {name for name, _, _ in pieces}
    assert {plan.ids[int(item)] for item in plan.skipped} == skipped
    assert len(skipped) == counts.skipped_short + counts.skipped_long
    for name, length in case.lengths.items():
        reason = "long" if length > limit and policy == "skip" else "short"
        assert plan.why_skipped(name) == (reason if name in skipped else None)
    assert plan.shown == counts


@settings(deadline=None, max_examples=100)
@given(cases())
def test_figures_equal_brute_force(case: Case) -> None:
    plan = built(case)
    if plan is None:
        return
    for epoch in (0, 5):
        batches = list(plan.iter_epoch(epoch))
        assert [plan.batch(epoch, i) for i in range(len(batches))] == batches
        assert plan.padded_tokens(epoch) == sum(b.padded_tokens for b in batches)
        assert plan.useful_tokens(epoch) == sum(b.token_count for b in batches)
        costs = []
        for b in batches:
            squares = b.batch_size * b.max_len**2
            if case.config.layout == "packed":
                squares = sum(int(length) ** 2 for length in b.lengths)
            costs.append(COST_LINEAR * b.padded_tokens + COST_QUADRATIC * squares)
        assert plan.costs(epoch).tolist() == costs
        middle = len(batches) // 2
        assert plan.costs(epoch, middle).tolist() == costs[middle:]
        assert plan.costs(epoch, 0, middle).tolist() == costs[:middle]
    assert plan.efficiency == plan.useful_tokens(0) / plan.padded_tokens(0)
    whole = plan.epoch(0)
    assert whole.total_tokens == plan.useful_tokens(0)
    assert len(whole) == plan.num_microbatches(0)


@settings(deadline=None, max_examples=100)
@given(cases())
def test_explain_points_to_the_true_places(case: Case) -> None:
    plan = built(case)
    if plan is None:
        return
    true: dict[str, set[tuple[int, ...]]] = {name: set() for name in case.lengths}
    for epoch in range(plan.num_epochs):
        for batch in plan.iter_epoch(epoch):
            rows = np.repeat(np.arange(batch.batch_size), np.diff(batch.row_offsets))
            for at, (name, start, length) in enumerate(pieces_of(batch)):
                row = int(rows[at])
                segment = at - int(batch.row_offsets[row])
                true[name].add((epoch, batch.index, row, segment, start, length))
    for name, places in true.items():
        told = [
            (p.epoch, p.microbatch, p.row, p.segment, p.start, p.length) for p in plan.explain(name)
        ]
        assert len(told) == len(places)
        assert set(told) == places


def test_explain_knows_samples_whose_whole_bucket_was_dropped() -> None:
    lengths = {**{f"s{i}": 3 for i in range(8)}, "long": 15}
    config = BatchingConfig(token_budget=32, bucket_edges=(8,), overflow_max=16, drop_last=True)
    plan = BatchPlanBuilder(lengths, config).build()

    assert plan.explain("long") == []
    assert len(plan.explain("s3")) == 1


def by_id(plan: BatchPlan, epoch: int = 0) -> list[tuple[Any, ...]]:
    return [
        (b.samples, b.max_len, b.bucket_id, b.starts.tolist(), b.row_offsets.tolist())
        for b in plan.iter_epoch(epoch)
    ]


@settings(deadline=None, max_examples=100)
@given(cases(), st.randoms(use_true_random=False))
def test_the_order_in_which_samples_are_given_does_not_matter(
    case: Case, chance: random.Random
) -> None:
    plan = built(case)
    if plan is None:
        return
    names = list(case.lengths)
    chance.shuffle(names)
    other = BatchPlanBuilder({name: case.lengths[name] for name in names}, case.config).build(2)

    assert other.fingerprint == plan.fingerprint
    assert by_id(other, 1) == by_id(plan, 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_array_equals_its_numbered_mapping_in_any_order(layout: str) -> None:
    values = np.random.default_rng(0).integers(1, 300, 500)
    config = BatchingConfig(layout=layout, token_budget=2048)
    plan = BatchPlanBuilder(values, config).build()
    shuffled = np.random.default_rng(1).permutation(500)
    other = BatchPlanBuilder({str(i): int(values[i]) for i in shuffled}, config).build()

    assert other.fingerprint == plan.fingerprint
    assert by_id(other) == by_id(plan)


def small(n: int = 400, **fields: Any) -> BatchPlan:
    lengths = {f"s{i}": (i * 37) % 97 + 1 for i in range(n)}
    fields = {"token_budget": 512, "bucket_edges": (32, 64), "overflow_max": 128, **fields}
    fields = {"pack_max_length": 128, **fields}
    return BatchPlanBuilder(lengths, BatchingConfig(**fields)).build(3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_epochs_and_seeds_mix_anew(layout: str) -> None:
    plan, other = small(layout=layout, seed=42), small(layout=layout, seed=43)
    orders = [by_id(plan, 0), by_id(plan, 1), by_id(plan, 99), by_id(other, 0), by_id(other, 1)]

    sets = [{frozenset(entry[0]) for entry in order} for order in orders]
    for i in range(len(orders)):
        for j in range(i):
            assert orders[i] != orders[j]
            # Not only the batches' order: hardly any batch has the same company again.
            assert len(sets[i] & sets[j]) < len(sets[i]) / 2


CHANGES: dict[str, tuple[str, Any]] = {
    "mode": ("bucketed", "predictable"),
    "layout": ("bucketed", "sorted"),
    "token_budget": ("bucketed", 513),
    "bucket_edges": ("bucketed", (32, 65)),
    "overflow_max": ("bucketed", 127),
    "overflow": ("bucketed", "split"),
    "no_loss": ("bucketed", "skip"),
    "min_length": ("bucketed", 2),
    "pad_policy": ("bucketed", "pad_to_bucket"),
    "align": ("sorted", 8),
    "segment_multiple": ("packed", 2),
    "pack_max_length": ("packed", 127),
    "pack_mode": ("packed", "optimal"),
    "pack_max_segments": ("packed", 50),
    "seed": ("packed", 43),
    "drop_last": ("bucketed", True),
    "interleave_buckets": ("sorted", False),
    "step_size": ("packed", 4),
    "curriculum_stages": ("sorted", 9),
}


def test_every_setting_is_part_of_the_fingerprint() -> None:
    assert CHANGES.keys() == BatchingConfig.model_fields.keys()
    for field, (layout, value) in CHANGES.items():
        base = {} if field == "layout" else {"layout": layout}
        assert small(100, **base).fingerprint != small(100, **{**base, field: value}).fingerprint


@settings(deadline=None, max_examples=60)
@given(
    cases(),
    st.integers(0, 10**6),
    st.sampled_from(["id", "length", "swap", "dataset", "tokenizer"]),
)
def test_every_sample_is_part_of_the_fingerprint(case: Case, at: int, what: str) -> None:
    plan = built(case)
    if plan is None:
        return
    lengths = dict(case.lengths)
    planned = [
        name for name, length in lengths.items() if case.config.min_length <= length <= case.limit
    ]
    if what in ("dataset", "tokenizer"):
        given_lengths = Lengths.of(lengths)
        other = Lengths(given_lengths.values, given_lengths.ids, **{f"{what}_hash": "x"})
        assert BatchPlanBuilder(other, case.config).build(2).fingerprint != plan.fingerprint
        return
    if not planned:
        return
    name = planned[at % len(planned)]
    if what == "id":
        value = lengths.pop(name)
        lengths[name + "x"] = value
    elif what == "length":
        lengths[name] += 1 if lengths[name] < case.limit else -1
    else:
        partner = planned[at // 7 % len(planned)]
        if lengths[name] == lengths[partner]:
            return
        lengths[name], lengths[partner] = lengths[partner], lengths[name]
    other_plan = built(Case(lengths, case.config))
    assert other_plan is None or other_plan.fingerprint != plan.fingerprint


@settings(deadline=None, max_examples=60)
@given(cases())
def test_a_plan_without_numba_is_the_same_plan(case: Case) -> None:
    plan = built(case)
    with interpreted():
        plain = built(case)

    if plan is None or plain is None:
        assert plan is plain
        return
    for name, array in plan.order.arrays().items():
        assert np.array_equal(array, plain.order.arrays()[name])
    with interpreted():
        seen = list(plain.iter_epoch(1)), plain.costs(1), plain.padded_tokens(1)
        places = [plain.explain(name) for name in case.lengths]
        roots = plain.roots
    assert seen[0] == list(plan.iter_epoch(1))
    assert seen[1].tolist() == plan.costs(1).tolist()
    assert seen[2] == plan.padded_tokens(1)
    assert places == [plan.explain(name) for name in case.lengths]
    assert roots == plan.roots


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_large_plan_without_numba_is_the_same_plan(layout: str) -> None:
    # Classes of over 64 samples are ordered by a Feistel network instead of shuffled.
    lengths = np.random.default_rng(5).lognormal(4.0, 0.9, 3000).clip(1, 512).astype(np.int32)
    config = BatchingConfig(layout=layout, pack_max_length=512)
    plan = BatchPlanBuilder(lengths, config).build(2)
    with interpreted():
        plain = BatchPlanBuilder(lengths, config).build(2)
        assert plain.fingerprint == plan.fingerprint
        last = plain.batch(1, plain.num_microbatches() - 1)
        costs = plain.padded_tokens(1)

    assert last == plan.batch(1, plan.num_microbatches() - 1)
    assert costs == plan.padded_tokens(1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_plans_never_change(layout: str) -> None:
    plan = small(200, layout=layout)

    fingerprint, first = GOLDEN[layout]
    assert plan.fingerprint == fingerprint
    assert plan.batch(1, 2).samples[:4] == first


GOLDEN: dict[str, tuple[str, tuple[str, ...]]] = {
    "bucketed": (
        "57dd0770d07b3e26ee1c50f235e7814b66a5060705fc37fe588ffdff160f1613",
        ("s31", "s136", "s131", "s165"),
    ),
    "sorted": (
        "c08ed230f967bdb717f967434f2f7de5117715fee672976f8c69834c8309ec06",
        ("s149", "s52", "s128", "s31"),
    ),
    "packed": (
        "2718a9817d91b37207905e8b7f48157e57a0967b180df5aa684ea8976d383da9",
        ("s54", "s1", "s145", "s49"),
    ),
}


@pytest.mark.parametrize("policy", list(PadPolicy))
def test_no_stretch_of_an_epoch_belongs_to_one_bucket(policy: PadPolicy) -> None:
    lengths = np.random.default_rng(3).lognormal(4, 0.8, 20_000).clip(1, 1000).astype(np.int32)
    edges = (32, 64, 128, 256)
    config = BatchingConfig(
        token_budget=1024, bucket_edges=edges, overflow_max=1024, pad_policy=policy
    )
    plan = BatchPlanBuilder(lengths, config).build()

    buckets = np.array([batch.bucket_id for batch in plan.iter_epoch(3)])
    share = np.bincount(buckets, minlength=5) / len(buckets)
    for decile in np.array_split(buckets, 10):
        here = np.bincount(decile, minlength=5) / len(decile)
        assert (abs(here - share) < 6 * np.sqrt(share / len(decile)) + 0.01).all()
    assert len(set(buckets[-60:].tolist())) == 5


def test_samples_over_the_limit_are_an_error_unless_a_policy_is_chosen() -> None:
    with pytest.raises(OversizedSample, match="1 of 2") as caught:
        BatchPlanBuilder({"a": 5, "b": 3000}).build()
    assert "\n" not in str(caught.value)


def test_batches_and_epochs_that_are_not_there_are_refused() -> None:
    plan = small(50)
    count = plan.num_microbatches()

    for epoch, index in [(0, count), (0, -1), (-1, 0)]:
        with pytest.raises(UnknownSample):
            plan.batch(epoch, index)
    for epoch, first, stop in [(0, 0, count + 1), (0, -1, 1), (0, 3, 2), (-1, 0, 1)]:
        with pytest.raises(UnknownSample):
            plan.costs(epoch, first, stop)
    with pytest.raises(UnknownSample):
        plan.explain("nobody")
    with pytest.raises(UnknownSample):
        plan.iter_epoch(-1)
    with pytest.raises(UnknownSample):
        list(plan.iter_from(0, count + 1))
    assert plan.batch(10**6, 0).epoch == 10**6
    with pytest.raises(ConfigError):
        BatchPlanBuilder({}).build()
    with pytest.raises(ConfigError):
        BatchPlanBuilder({"a": 1}).build(num_epochs=0)


@pytest.mark.parametrize(
    "fields",
    [
        {"token_budget": 0},
        {"token_budget": 2**31},
        {"bucket_edges": (64, 32)},
        {"bucket_edges": (32, 32)},
        {"bucket_edges": (0, 32)},
        {"token_budget": 100, "bucket_edges": (128,)},
        {"token_budget": 130, "bucket_edges": (128,), "align": 64, "overflow_max": 120},
        {"token_budget": 100, "align": 128},
        {"token_budget": 100, "align": 128, "layout": "sorted"},
        {"layout": "packed", "pack_max_length": 5000},
        {"layout": "packed", "pack_mode": "next_fit"},
        {"layout": "sorted", "drop_last": True},
        {"layout": "sorted", "min_length": 4000},
        {"layout": "stacked"},
        {"mode": "fast"},
        {"step_size": 0},
        {"step_size": "everything"},
        {"curriculum_stages": 0},
        {"seed": 1.5},
        {"budget": 1},
    ],
)
def test_settings_that_make_no_sense_are_one_sentence(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        BatchingConfig(**fields)
    assert "\n" not in str(caught.value)


def test_a_mode_gives_defaults_and_nothing_more() -> None:
    predictable = BatchingConfig.predictable(pad_policy="pad_to_max")

    assert predictable.pad_policy is PadPolicy.PAD_TO_MAX
    assert not predictable.interleave_buckets
    assert BatchingConfig.throughput().interleave_buckets
    assert BatchingConfig(**predictable.model_dump(mode="json")) == predictable


def test_the_optimal_pack_mode_is_a_plan_like_any_other() -> None:
    values = np.random.default_rng(5).normal(600, 150, 3000).clip(50, 2000).astype(np.int32)
    plain, best = (
        BatchPlanBuilder(values, BatchingConfig(layout="packed", pack_mode=mode)).build()
        for mode in ("best_fit_decreasing", "optimal")
    )

    seen = Counter(int(item) for batch in best.iter_epoch(4) for item in batch.items)
    assert seen == Counter(range(3000))
    for batch in best.iter_epoch(4):
        assert (values[batch.items] == batch.lengths).all()
        sums = np.add.reduceat(batch.lengths, batch.row_offsets[:-1])
        assert sums.max() <= 2048
    costs = [
        COST_LINEAR * b.padded_tokens
        + COST_QUADRATIC * int((b.lengths.astype(np.int64) ** 2).sum())
        for b in best.iter_epoch(4)
    ]
    assert best.costs(4).tolist() == costs
    assert best.num_microbatches() <= plain.num_microbatches()
    assert best.explain("17")[0].length == values[17]


def stages_of(difficulty: dict[str, float], stages: int) -> dict[str, int]:
    ordered = sorted(difficulty, key=difficulty.__getitem__)
    parts = np.array_split(np.array(ordered, object), stages)
    return {name: number for number, part in enumerate(parts) for name in part}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("stages", [1, 3, 50])
def test_a_curriculum_goes_from_easy_to_hard(layout: str, stages: int) -> None:
    chance = random.Random(stages)
    lengths = {f"s{i}": chance.randint(1, 150) for i in range(90)}
    difficulty = {name: chance.random() for name in lengths}
    config = BatchingConfig(
        layout=layout,
        token_budget=256,
        bucket_edges=(32, 64),
        overflow_max=100,
        pack_max_length=100,
        overflow="split",
        curriculum_stages=stages,
    )
    plan = BatchPlanBuilder(lengths, config, difficulty=list(difficulty.values())).build(2)
    stage = stages_of(difficulty, stages)
    case = Case(lengths, config)

    for epoch in range(2):
        batches = list(plan.iter_epoch(epoch))
        walked = [{stage[name] for name in batch.samples} for batch in batches]
        assert all(len(stages) == 1 for stages in walked)
        flat = [min(stages) for stages in walked]
        assert flat == sorted(flat)
        assert Counter(p for b in batches for p in pieces_of(b)) == Counter(case.pieces())
        for batch in batches:
            check_batch(case, batch)
        assert plan.costs(epoch).tolist() == [
            COST_LINEAR * b.padded_tokens
            + (
                sum(int(length) ** 2 for length in b.lengths)
                if layout == "packed"
                else b.batch_size * b.max_len**2
            )
            for b in batches
        ]
        assert plan.useful_tokens(epoch) == sum(b.token_count for b in batches)
        assert plan.padded_tokens(epoch) == sum(b.padded_tokens for b in batches)
    assert by_id(plan, 0) != by_id(plan, 1)
    with pytest.raises(UnknownSample):
        plan.batch(2, 0)
    # Neither here does the order of the samples matter.
    names = sorted(lengths, key=lambda name: name[::-1])
    other = BatchPlanBuilder(
        {name: lengths[name] for name in names}, config, difficulty=[difficulty[n] for n in names]
    ).build(2)
    assert other.fingerprint == plan.fingerprint
    assert by_id(other, 1) == by_id(plan, 1)


@pytest.mark.parametrize(
    ("weight", "said"),
    [
        (math.inf, "has weight inf; a weight must be above 0 and finite"),
        (math.nan, "has weight nan; a weight must be above 0 and finite"),
        (-1.0, "has weight -1.0; a weight must be above 0 and finite"),
        (0.0, "has weight 0.0; a weight must be above 0 and finite"),
        (1e9, "shows 2e+11 samples an epoch, more than 2,147,483,647; give a smaller weight"),
        (1e-4, "shows none of its 200 samples; give a larger weight"),
    ],
)
def test_a_weight_that_cannot_be_shown_is_refused_with_its_reason(weight: float, said: str) -> None:
    sources = {"a": np.arange(1, 201), "b": np.arange(1, 201)}
    with pytest.raises(ConfigError, match=re.escape(said)):
        BatchPlanBuilder(sources, BatchingConfig(), weights={"a": weight, "b": 1.0})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("weights", [(2.0, 0.5), (1.0, 1.0), (0.75, 1.25), (1.5, 0.25)])
def test_a_mixture_shows_each_source_by_its_weight(
    layout: str, weights: tuple[float, float]
) -> None:
    chance = random.Random(7)
    sources = {
        name: {f"x{i}": chance.randint(1, 90) for i in range(40)} for name in ("books", "code")
    }
    by_name = dict(zip(sources, weights, strict=True))
    config = BatchingConfig(
        layout=layout, token_budget=256, bucket_edges=(32,), overflow_max=100, pack_max_length=100
    )
    plan = BatchPlanBuilder(sources, config, weights=by_name).build(4)
    true = {f"{s}/{name}": n for s, part in sources.items() for name, n in part.items()}

    total: Counter[str] = Counter()
    for epoch in range(4):
        shown: Counter[str] = Counter()
        for batch in plan.iter_epoch(epoch):
            check_batch(Case({}, config), batch)
            for name, start, length in pieces_of(batch):
                assert (start, length) == (0, true[name])
                shown[name] += 1
        total += shown
        for source, weight in by_name.items():
            counts = [shown[f"{source}/x{i}"] for i in range(40)]
            assert sum(counts) == 40 * weight
            # Dealt in rounds: nobody is ahead of another by more than one round.
            running = [total[f"{source}/x{i}"] for i in range(40)]
            assert max(running) - min(running) <= 1
            if float(weight * (epoch + 1)).is_integer():
                assert set(running) == {int(weight * (epoch + 1))}
    placed = plan.explain("code/x3")
    assert Counter(p.epoch for p in placed).total() == total["code/x3"]
    for place in placed:
        at = plan.batch(place.epoch, place.microbatch)
        assert at.samples[int(at.row_offsets[place.row]) + place.segment] == "code/x3"

    other = BatchPlanBuilder(dict(reversed(sources.items())), config, weights=by_name).build(4)
    assert other.fingerprint == plan.fingerprint
    assert by_id(other, 2) == by_id(plan, 2)


def test_mixture_and_curriculum_go_together() -> None:
    sources = {"a": {f"x{i}": i % 9 + 1 for i in range(30)}, "b": {f"x{i}": 5 for i in range(10)}}
    config = BatchingConfig(layout="sorted", token_budget=64, curriculum_stages=4)
    plan = BatchPlanBuilder(
        sources, config, weights={"a": 1.0, "b": 2.0}, difficulty=np.arange(40) % 7
    ).build()

    rank = {f"a/x{i}": i % 7 for i in range(30)} | {f"b/x{i}": (30 + i) % 7 for i in range(10)}
    hardest = [max(rank[name] for name in batch.samples) for batch in plan.iter_epoch(0)]
    easiest = [min(rank[name] for name in batch.samples) for batch in plan.iter_epoch(0)]
    quarter = len(hardest) // 4
    assert max(hardest[:quarter]) <= min(easiest[-quarter:])
    seen = Counter(name for batch in plan.iter_epoch(0) for name in batch.samples)
    assert seen == Counter({name: 1 if name[0] == "a" else 2 for name in rank})


def test_mixtures_that_make_no_sense_are_refused() -> None:
    two = {"a": {"x": 1}, "b": {"y": 2}}
    for weights in (
        {"a": 1.0},
        {"a": 1.0, "b": 0.0},
        {"a": 1.0, "b": -1.0},
        {"a": 1.0, "b": float("nan")},
        {"a": 1.0, "b": float("inf")},
        {"a": 1.0, "b": 0.1},
    ):
        with pytest.raises(ConfigError):
            BatchPlanBuilder(two, weights=weights).build()
    with pytest.raises(ConfigError):
        BatchPlanBuilder({}, weights={})
    # "a" + "b/c" and "a/b" + "c" would be one id.
    with pytest.raises(DuplicateId):
        BatchPlanBuilder({"a": {"b/c": 1}, "a/b": {"c": 1}}, weights={"a": 1, "a/b": 1})
    for difficulty in ([1.0], [1.0, float("nan")], [[1.0, 2.0]]):
        with pytest.raises(ConfigError):
            BatchPlanBuilder({"x": 1, "y": 2}, difficulty=difficulty)  # type: ignore[arg-type]


def test_an_epoch_with_nothing_to_show_is_refused() -> None:
    source = {"a": {"short": 5, "long": 5000}}
    for seed in range(4):
        config = BatchingConfig(overflow="skip", seed=seed)
        # Half of two samples is one an epoch, and in one of two epochs it is the skipped one.
        with pytest.raises(ConfigError, match="empty"):
            BatchPlanBuilder(source, config, weights={"a": 0.5}).build(2)


def test_nobody_can_change_a_plan_through_a_batch() -> None:
    for difficulty in (None, list(range(60))):
        lengths = {f"s{i}": i + 1 for i in range(60)}
        plan = BatchPlanBuilder(lengths, difficulty=difficulty).build()
        before = by_id(plan)
        batch = plan.batch(0, 0)
        for array in (batch.items, batch.starts, batch.lengths, batch.row_offsets):
            if array.flags.writeable:
                array[:] = 7
        assert by_id(plan) == before


@pytest.mark.parametrize("mode", ["first_fit", "best_fit", "greedy"])
@pytest.mark.parametrize("overflow", ["skip", "truncate", "split"])
def test_packing_by_arrival_covers_every_piece_and_shuffles_every_epoch(
    mode: str, overflow: str
) -> None:
    rng = np.random.default_rng(7)
    lengths = {f"s{i}": int(n) for i, n in enumerate(rng.integers(1, 90, 300))}
    config = BatchingConfig(
        layout="packed", token_budget=256, pack_max_length=64, pack_mode=mode, overflow=overflow
    )
    plan = BatchPlanBuilder(lengths, config).build(num_epochs=2)
    backwards = BatchPlanBuilder(dict(reversed(lengths.items())), config).build(num_epochs=2)

    expected = Counter()
    for name, length in lengths.items():
        if length <= 64 or overflow != "skip":
            expected[name] += length if overflow == "split" else min(length, 64)
    for epoch in (0, 1):
        seen: Counter[str] = Counter()
        for batch in plan.iter_epoch(epoch):
            assert batch.padded_tokens <= 256
            assert max(np.add.reduceat(batch.lengths, batch.row_offsets[:-1])) <= 64
            for name, length in zip(batch.samples, batch.lengths.tolist(), strict=True):
                seen[name] += length
        assert seen == expected
    assert [b.samples for b in plan.iter_epoch(0)] != [b.samples for b in plan.iter_epoch(1)]
    assert backwards.fingerprint == plan.fingerprint


def test_defaults_give_way_to_a_small_budget_but_what_was_given_does_not() -> None:
    small = BatchingConfig(token_budget=200)
    packed = BatchingConfig(layout="packed", token_budget=1000)

    assert (small.bucket_edges, packed.pack_max_length) == ((128,), 1000)
    with pytest.raises(ConfigError, match="512"):
        BatchingConfig(token_budget=200, bucket_edges=(128, 512))


def test_a_position_inside_a_step_or_behind_the_plan_is_refused() -> None:
    config = BatchingConfig(token_budget=64, bucket_edges=(16,), overflow_max=32, step_size=4)
    plan = BatchPlanBuilder({f"s{i}": 1 + i % 30 for i in range(90)}, config).build(num_epochs=2)

    assert [step.first for step in plan.iter_steps(0, 4, epochs=1)][:2] == [4, 8]
    with pytest.raises(Mismatch, match="inside a step of 4"):
        next(plan.iter_steps(0, 3))
    with pytest.raises(UnknownSample, match="2 epochs"):
        next(plan.iter_steps(3, 0))
    assert list(plan.iter_steps(2, 0)) == []
