"""Column generation against best fit, brute force and the definition of a packing."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.batching.packing.bins import pack_lengths, verify_packing
from batchwright.batching.packing.optimal import knapsack, pack_optimal, patterns_through
from batchwright.batching.packing.patterns import pack_histogram

quick = settings(max_examples=60, deadline=None)


def hard(n, capacity=2048, seed=0):
    """Two or three to a bin: what decreasing heuristics are worst at."""
    rng = np.random.default_rng(seed)
    return np.clip(rng.normal(0.36 * capacity, 0.08 * capacity, n), 1, capacity).astype(np.int32)


def easy(n, capacity=2048):
    rng = np.random.default_rng(0)
    return np.clip(rng.lognormal(5.5, 0.8, n), 1, capacity).astype(np.int32)


@pytest.mark.parametrize("max_segments", [None, 3])
def test_on_the_hard_set_column_generation_wins_and_the_packing_is_sound(max_segments):
    lengths = hard(50_000)
    plain = pack_lengths(lengths, 2048, max_segments=max_segments)
    best = pack_lengths(lengths, 2048, "optimal", max_segments)

    verify_packing(best, lengths)
    assert best.method == "column_generation"
    assert plain.efficiency < 0.96 < 0.975 < best.efficiency
    assert "converged" in best.note


def test_the_easy_set_keeps_best_fit():
    lengths = easy(50_000)
    plain, best = pack_lengths(lengths, 2048), pack_lengths(lengths, 2048, "optimal")

    assert best.method == "best_fit_decreasing"
    assert "of the lower bound" in best.note
    assert np.array_equal(plain.items, best.items)


def test_the_cap_on_rounds_is_kept_and_reported():
    best = pack_optimal(np.bincount(hard(5000)), 2048, max_rounds=3, gap=0.0)

    assert best.rounds == 3
    assert best.gap > 0
    assert "stopped by max_rounds after 3 rounds" in best.note


def test_a_capacity_too_long_for_the_table_is_scaled_and_still_fits():
    lengths = hard(3000, capacity=400_000)
    best = pack_lengths(lengths, 400_000, "optimal")

    verify_packing(best, lengths)
    assert best.num_bins <= pack_lengths(lengths, 400_000).num_bins


@quick
@given(
    st.integers(10, 60),
    st.lists(st.integers(1, 60), min_size=1, max_size=80),
    st.none() | st.integers(1, 4),
    st.integers(1, 8),
)
def test_patterns_hold_every_position_once_and_never_use_more_bins(
    capacity, lengths, max_segments, num_classes
):
    lengths = np.minimum(lengths, capacity).astype(np.int32)
    hist = np.bincount(lengths)
    best = pack_optimal(hist, capacity, max_segments, worth_above=0.0, num_classes=num_classes)
    descending = np.sort(lengths)[::-1]
    offsets, positions = best.patterns.expand(np.arange(len(lengths), dtype=np.int32))
    bins = np.split(positions, offsets[1:-1])

    assert sorted(itertools.chain(*bins)) == list(range(len(lengths)))
    assert all(descending[positions].sum() <= capacity for positions in bins)
    assert all(len(positions) <= (max_segments or 10**9) for positions in bins)
    assert len(bins) <= pack_histogram(hist, capacity, max_segments).num_bins


@quick
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), min_size=1, max_size=4),
    st.integers(9, 20),
    st.integers(0, 4),
)
def test_the_knapsack_finds_the_dearest_pattern_through_each_class(classes, capacity, layers):
    by_weight = dict(sorted(classes))
    weights = np.array(list(by_weight), np.int64)
    prices = np.array([price / 7 for price in by_weight.values()])
    worth, choice = knapsack(weights, prices, capacity, layers)
    priced, patterns = patterns_through(weights, prices, capacity, layers, worth, choice)

    most = layers or capacity
    everything = [
        np.array(counts)
        for counts in itertools.product(*(range(capacity // w + 1) for w in weights))
        if sum(counts) <= most and np.dot(counts, weights) <= capacity
    ]
    for j in range(len(weights)):
        best = max(counts @ prices for counts in everything if counts[j])
        assert priced[j] == pytest.approx(best)
        assert patterns[j] @ prices == pytest.approx(best)
        assert patterns[j] @ weights <= capacity
        assert 1 <= patterns[j].sum() <= most
