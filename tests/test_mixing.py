"""Packed rows that are drawn anew every epoch: none too full, no more of them, few pairs kept."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from batchwright.batching import BatchingConfig, BatchPlan, BatchPlanBuilder, pack_lengths
from batchwright.batching.packing import kernels
from batchwright.batching.plan import mixing
from batchwright.jit import interpreted
from batchwright.permutation import below


def lognormal(n: int, seed: int = 0) -> NDArray[np.int32]:
    values = np.random.default_rng(seed).lognormal(5.5, 0.9, n)
    return values.clip(1, 2048).astype(np.int32)


def pairs(plan: BatchPlan, epoch: int) -> set[tuple[int, int]]:
    """The samples that share a row."""
    found = set()
    for batch in plan.iter_epoch(epoch):
        for first, last in pairwise(batch.row_offsets.tolist()):
            found |= set(combinations(sorted(batch.items[first:last].tolist()), 2))
    return found


def num_rows(plan: BatchPlan, epoch: int) -> int:
    return sum(batch.batch_size for batch in plan.iter_epoch(epoch))


@pytest.mark.parametrize("n", [300, 1500])
def test_packed_epochs_keep_at_most_twice_the_pairs_of_random_rows(n: int) -> None:
    lengths = lognormal(n)
    plan = BatchPlanBuilder(lengths, BatchingConfig(layout="packed", token_budget=8192)).build(6)

    epochs = [pairs(plan, epoch) for epoch in range(6)]
    kept = sum(len(a & b) for a, b in pairwise(epochs))
    random = sum(len(a) * len(b) / (n * (n - 1) / 2) for a, b in pairwise(epochs))
    assert kept < 2 * random
    assert {num_rows(plan, epoch) for epoch in range(6)} == {pack_lengths(lengths, 2048).num_bins}


def test_a_set_of_many_blocks_mixes_as_a_small_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixing, "BLOCK", 6000)
    n = 20_000
    lengths = (lognormal(n) // 8).clip(1)
    config = BatchingConfig(layout="packed", token_budget=1024, pack_max_length=256)
    plan = BatchPlanBuilder(lengths, config).build(3)

    assert plan.order.arrays()["mixing"].tolist()[0] == 3
    first, second = pairs(plan, 0), pairs(plan, 1)
    assert len(first & second) < 4 * len(first) * len(second) / (n * (n - 1) / 2)
    fewest = pack_lengths(lengths, 256).num_bins
    assert num_rows(plan, 0) == num_rows(plan, 1) <= fewest + fewest // 1000


def around(n: int) -> NDArray[np.int32]:
    """Lengths of which two leave a hole and three rarely fit: drawing rows at random fails."""
    values = np.random.default_rng(0).normal(0.36 * 256, 0.08 * 256, n)
    return values.clip(1, 256).astype(np.int32)


def test_where_no_random_rows_are_as_full_samples_are_exchanged_between_full_ones() -> None:
    n = 2500
    lengths = around(n)
    config = BatchingConfig(layout="packed", token_budget=1024, pack_max_length=256)
    plan = BatchPlanBuilder(lengths, config).build(4)

    assert plan.order.arrays()["mixing"].tolist()[2] == 0
    epochs = [pairs(plan, epoch) for epoch in range(4)]
    kept = sum(len(a & b) for a, b in combinations(epochs, 2))
    random = sum(len(a) * len(b) / (n * (n - 1) / 2) for a, b in combinations(epochs, 2))
    # Rows of best-fit-decreasing keep some hundred times as many as random ones.
    assert kept < 5 * random
    assert {num_rows(plan, epoch) for epoch in range(4)} == {pack_lengths(lengths, 256).num_bins}


@pytest.mark.parametrize("n", [5000, 100_000])
def test_rows_that_cannot_be_divided_are_not_added_to(n: int) -> None:
    config = BatchingConfig(layout="packed", token_budget=1024, pack_max_length=256)
    plan = BatchPlanBuilder(np.full(n, 256), config).build()

    assert plan.order.size(0) == -(-n // 4)
    assert plan.batch(0, n // 4 - 1).batch_size == 4


def stirred(sizes: list[int], row_of: list[int], width: int, tries: int, key: int) -> list[int]:
    """`stir` by looking at all items each time."""
    row_of = list(row_of)
    for attempt in range(tries):
        short = int(below(np.uint64(key), 2 * attempt, len(sizes)))
        row = row_of[short]
        free = width - sum(s for s, r in zip(sizes, row_of, strict=True) if r == row)
        fitting = [i for i, s in enumerate(sizes) if sizes[short] < s <= sizes[short] + free]
        if fitting:
            long = fitting[int(below(np.uint64(key), 2 * attempt + 1, len(fitting)))]
            row_of[long], row_of[short] = row, row_of[long]
    return row_of


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=40),
    st.integers(40, 90),
    st.integers(0, 60),
    st.integers(0, 2**63),
)
def test_stirred_rows_are_those_of_the_plain_way_and_none_is_too_full(
    values: list[int], width: int, tries: int, key: int
) -> None:
    sizes = sorted(values, reverse=True)
    packing = pack_lengths(np.array(sizes), width)
    row_of = np.repeat(np.arange(packing.num_bins), np.diff(packing.offsets))
    row_of = row_of[np.argsort(packing.items)].astype(np.int32)
    with interpreted():
        expected = stirred(sizes, row_of.tolist(), width, tries, key)

    for plain in (False, True):
        with interpreted(plain):
            got = row_of.copy()
            kernels.stir(
                np.array(sizes, np.int32), got, packing.num_bins, width, tries, np.uint64(key)
            )
        assert got.tolist() == expected
        assert np.bincount(got, sizes).max() <= width
        assert np.bincount(got).tolist() == np.bincount(row_of).tolist()


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 64), min_size=1, max_size=300),
    st.integers(64, 100),
    st.sampled_from([None, 1, 2, 5]),
    st.sampled_from([1, 4, 16]),
    st.sampled_from([8, 50, 2**15]),
    st.integers(0, 40),
)
def test_every_epoch_has_every_sample_once_and_the_same_number_of_rows(
    values: list[int], width: int, most: int | None, multiple: int, block: int, epoch: int
) -> None:
    config = BatchingConfig(
        layout="packed",
        token_budget=2 * width,
        pack_max_length=width,
        pack_max_segments=most,
        segment_multiple=multiple,
    )
    before = mixing.BLOCK
    mixing.BLOCK = block
    try:
        plan = BatchPlanBuilder(np.array(values), config).build()
    finally:
        mixing.BLOCK = before
    rooms = -(-np.array(values) // multiple) * multiple
    fewest = pack_lengths(rooms, width // multiple * multiple, max_segments=most).num_bins

    items = []
    for batch in plan.iter_epoch(epoch):
        items += batch.items.tolist()
        for first, last in pairwise(batch.row_offsets.tolist()):
            assert rooms[batch.items[first:last]].sum() <= width
            assert 1 <= last - first <= (most or last)
        for at, item in enumerate(batch.items.tolist()):
            assert batch.lengths[at] == values[item]
            place = plan.order.places(epoch, item)
            assert [p.microbatch for p in place] == [batch.index]
    assert sorted(items) == list(range(len(values)))
    assert fewest <= num_rows(plan, epoch) <= fewest + fewest // 1000


def slowly(
    sizes: list[int], counts: list[int], width: int, segments: int, rows: int, draws: int, key: int
) -> list[list[int]] | None:
    """`random_rows` on a plain list of the items that are left, the longest first."""
    left = [c for c, count in enumerate(counts) for _ in range(count)]
    made: list[list[int]] = []
    counter = 0
    with interpreted():
        while left:
            row = [left.pop(0)]
            while len(row) < segments:
                free = width - sum(sizes[c] for c in row)
                fitting = [c for c in left if sizes[c] <= free]
                best: tuple[int, list[int]] | None = None
                for attempt in range(kernels.TRIES if fitting else 0):
                    drawn = []
                    for _ in range(draws):
                        counter += 1
                        drawn.append(int(below(np.uint64(key), counter, len(fitting))))
                    one = fitting[min(drawn)]
                    rest = free - sizes[one]
                    if len(row) + 1 == segments or (attempt == 0 and 4 * rest >= width):
                        best = (0, [one])
                        break
                    others = list(fitting)
                    others.remove(one)
                    two = [c for c in others if sizes[c] <= rest][:1]
                    waste = rest - sum(sizes[c] for c in two)
                    if best is None or waste < best[0]:
                        best = (waste, [one, *two])
                    if waste == 0:
                        break
                if best is None:
                    break
                for c in best[1]:
                    left.remove(c)
                    row.append(c)
            made.append(row)
    return made if len(made) <= rows else None


@settings(deadline=None, max_examples=80)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=60),
    st.integers(40, 90),
    st.sampled_from([1, 2, 3, 2**31 - 1]),
    st.integers(1, 4),
    st.integers(0, 2**63),
    st.integers(0, 2),
)
def test_random_rows_are_those_of_the_plain_way(
    values: list[int], width: int, segments: int, draws: int, key: int, short: int
) -> None:
    sizes, counts = np.unique(values, return_counts=True)
    sizes, counts = sizes[::-1].astype(np.int32), counts[::-1].astype(np.int64)
    arguments = (sizes.tolist(), counts.tolist(), width, segments)
    whole = slowly(*arguments, len(values), draws, key)
    assert whole is not None
    rows = max(1, len(whole) - short)

    for plain in (False, True):
        with interpreted(plain):
            offsets, classes = kernels.random_rows(
                sizes, counts, width, segments, rows, draws, np.uint64(key)
            )
        if rows < len(whole):
            assert not offsets.size
        else:
            assert [classes[a:b].tolist() for a, b in pairwise(offsets)] == whole
