from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.batching.analyze.edges import (
    _choices,
    _choices_by_numpy,
    edges_cost,
    optimal_edges,
    regret,
)
from batchwright.errors import ConfigError

histograms = st.lists(st.integers(0, 6), min_size=1, max_size=14).filter(any).map(lambda h: [0, *h])


def plain_cost(hist, edges, cost):
    """Sample by sample."""
    return sum(
        count * cost[min(e for e in edges if e >= length)]
        for length, count in enumerate(hist)
        if count
    )


def brute_force(hist, num_buckets, cost, align):
    """The least cost over every set of allowed edges."""
    longest = max(length for length, count in enumerate(hist) if count)
    top = -(-longest // align) * align
    allowed = range(align, top, align)
    return min(
        plain_cost(hist, (*chosen, top), cost)
        for k in range(min(num_buckets, len(allowed) + 1))
        for chosen in combinations(allowed, k)
    )


def naive_dp(hist, num_buckets):
    """The textbook recursion, K times L squared, in Python's whole numbers."""
    lengths = [length for length, count in enumerate(hist) if count]
    totals = [0]
    for length in lengths:
        totals.append(totals[-1] + int(hist[length]))
    best = [0] + [lengths[j] * totals[j + 1] for j in range(len(lengths))]
    for _ in range(num_buckets - 1):
        best = [0] + [
            min(best[i] + lengths[j - 1] * (totals[j] - totals[i]) for i in range(j))
            for j in range(1, len(lengths) + 1)
        ]
    return best[-1]


@settings(max_examples=150, deadline=None)
@given(histograms, st.integers(1, 4), st.sampled_from([1, 2, 3, 4]), st.data())
def test_no_set_of_edges_is_cheaper(hist, num_buckets, align, data) -> None:
    steps = data.draw(st.lists(st.integers(0, 5), min_size=len(hist) + 4, max_size=len(hist) + 4))
    cost = np.cumsum(steps).tolist()

    edges = optimal_edges(hist, num_buckets, cost, align)

    assert len(edges) <= num_buckets
    assert all(edge % align == 0 for edge in edges)
    assert edges_cost(hist, edges, cost) == plain_cost(hist, edges, cost)
    assert edges_cost(hist, edges, cost) == brute_force(hist, num_buckets, cost, align)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 12))
def test_long_histograms_equal_the_textbook_recursion(seed: int, num_buckets: int) -> None:
    rng = np.random.default_rng(seed)
    hist = np.bincount(rng.lognormal(3.5, 1.0, 400).astype(int) + 1)

    edges = optimal_edges(hist, num_buckets)

    assert edges_cost(hist, edges) == naive_dp(hist, num_buckets)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 6))
def test_fractional_costs_are_best_up_to_rounding(seed: int, num_buckets: int) -> None:
    rng = np.random.default_rng(seed)
    hist = np.bincount(rng.integers(1, 13, 30))
    cost = np.cumsum(rng.random(hist.size))

    found = edges_cost(hist, optimal_edges(hist, num_buckets, cost), cost)

    assert found == pytest.approx(brute_force(hist, num_buckets, cost, 1), rel=1e-12)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 8))
def test_the_compiled_kernel_equals_its_plain_twins(seed: int, buckets: int) -> None:
    rng = np.random.default_rng(seed)
    m = int(rng.integers(buckets, 60))
    costs = np.cumsum(rng.integers(0, 9, m))
    totals = np.concatenate(([0], np.cumsum(rng.integers(1, 9, m))))

    for kind in (np.int64, np.float64):
        args = costs.astype(kind), totals.astype(kind), buckets
        assert np.array_equal(_choices(*args), _choices.py_func(*args))
        assert np.array_equal(_choices(*args), _choices_by_numpy(*args))


def test_sums_that_differ_in_the_last_bit_are_told_apart() -> None:
    # Beside costs near 2**60, float64 cannot see a difference of 1.
    big = 2**60
    cost = np.array([0, big, big + 1, big + 1, big + 3])
    hist = np.array([0, 1, 1, 1, 1])

    edges = optimal_edges(hist, 2, cost)

    assert edges_cost(hist, edges, cost) == 4 * big + 6
    assert edges_cost(hist, edges, cost) == brute_force(hist, 2, cost.tolist(), 1)


def test_costs_beyond_64_bits_still_give_edges() -> None:
    hist = np.bincount([1, 2, 3, 100, 101], weights=[2**30] * 5).astype(np.int64)
    cost = np.arange(hist.size, dtype=np.int64) ** 2 * 10**9

    assert optimal_edges(hist, 2, cost) == (3, 101)


def test_enough_buckets_leave_no_padding() -> None:
    hist = np.bincount([3, 3, 5, 9])

    assert optimal_edges(hist, 7) == (3, 5, 9)
    assert edges_cost(hist, (3, 5, 9)) == 20


@settings(max_examples=60, deadline=None)
@given(histograms, st.integers(1, 4))
def test_regret_is_nothing_for_the_best_and_never_negative(hist, num_buckets) -> None:
    longest = max(length for length, count in enumerate(hist) if count)
    even = sorted({-(-longest * k // num_buckets) for k in range(1, num_buckets + 1)})

    assert regret(hist, optimal_edges(hist, num_buckets)) == 0.0
    assert regret(hist, even) >= 0.0


@pytest.mark.parametrize(
    ("hist", "words"),
    [
        ([0, 0], "empty"),
        ([], "empty"),
        ([1, 2], "length 0"),
        ([0, -1, 3], "negative"),
        ([0.0, 1.5], "whole number"),
        ([[0, 1]], "shape"),
    ],
)
def test_a_histogram_that_makes_no_sense_is_refused(hist, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        optimal_edges(hist, 2)


def test_settings_that_make_no_sense_are_refused() -> None:
    hist = [0, 1, 1, 1]
    with pytest.raises(ConfigError, match="num_buckets must be at least 1, got 0"):
        optimal_edges(hist, 0)
    with pytest.raises(ConfigError, match="align must be at least 1, got 0"):
        optimal_edges(hist, 2, align=0)
    with pytest.raises(ConfigError, match="must not fall"):
        optimal_edges(hist, 2, cost=[0, 3, 2, 1])
    with pytest.raises(ConfigError, match="from 0 to 4"):
        optimal_edges(hist, 1, cost=[0, 1, 2, 3], align=2)
    with pytest.raises(ConfigError, match="below the longest sample"):
        edges_cost(hist, (1, 2))
    with pytest.raises(ConfigError, match="ascending"):
        edges_cost(hist, (3, 3))
