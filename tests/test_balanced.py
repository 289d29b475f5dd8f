"""Bins of about equal cost under a capacity, and verl's partitions made of them."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.batching.packing import pack_lengths
from batchwright.batching.packing.balanced import balance_bins, fewest_bins
from batchwright.errors import ConfigError, MissingExtra
from batchwright.integrations import verl_batching
from batchwright.integrations.verl_batching import get_seqlen_balanced_partitions

LENGTHS = st.lists(st.integers(0, 50), min_size=1, max_size=40)


def bins_by_trying(lengths: list[int], capacity: int) -> int:
    """The true least number of bins, by trying every bin for every item."""

    def fits(rest: list[int], free: list[int]) -> bool:
        if not rest:
            return True
        return any(
            fits(rest[1:], [*free[:b], space - rest[0], *free[b + 1 :]])
            for b, space in enumerate(free)
            if space >= rest[0] and space not in free[:b]
        )

    longest_first = sorted(lengths, reverse=True)
    return next(n for n in itertools.count(1) if fits(longest_first, [capacity] * n))


@given(LENGTHS, st.integers(50, 120), st.data())
@settings(deadline=None, max_examples=60)
def test_bins_are_filled_within_their_capacity_for_every_possible_number(
    lengths: list[int], capacity: int, data: st.DataObject
) -> None:
    array = np.array(lengths, np.int64)
    costs = array * array + 24 * array
    fewest = fewest_bins(array, capacity)
    if array.any():
        packing = pack_lengths(array[array > 0], capacity)
        assert packing.lower_bound <= fewest <= packing.num_bins
    bins = data.draw(st.integers(fewest, max(fewest, len(lengths))))
    if bins > len(lengths):
        return
    bin_of = balance_bins(costs, bins, array, capacity)
    assert set(bin_of.tolist()) == set(range(bins))
    assert np.bincount(bin_of, array).max() <= capacity
    np.testing.assert_array_equal(bin_of, balance_bins(costs, bins, array, capacity))


@given(st.lists(st.integers(1, 10), min_size=1, max_size=8))
@settings(deadline=None, max_examples=60)
def test_the_fewest_bins_are_within_the_guarantee_of_best_fit(lengths: list[int]) -> None:
    truth = bins_by_trying(lengths, 10)
    assert truth <= fewest_bins(np.array(lengths), 10) <= 11 / 9 * truth + 6 / 9


def test_levelling_finds_fewer_bins_than_best_fit() -> None:
    lengths = np.array([10, 9, 8, 6, 5, 4])
    assert pack_lengths(lengths, 22).num_bins == 3
    assert fewest_bins(lengths, 22) == 2


def test_fewer_bins_than_needed_are_refused() -> None:
    lengths = np.array([6, 6, 6])
    with pytest.raises(ConfigError, match="3 items do not fit into 2 bins of 10"):
        balance_bins(lengths, 2, lengths, 10)
    with pytest.raises(ConfigError, match="bins must be 1 to the number of items, 3, got 4"):
        balance_bins(lengths, 4, lengths, 10)


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=60), st.integers(1, 8), st.booleans())
@settings(deadline=None, max_examples=60)
def test_verls_partitions_hold_every_index_once_and_none_is_empty(
    costs: list[int], k: int, equal: bool
) -> None:
    k = min(k, len(costs))
    if equal:
        costs = costs[: len(costs) // k * k]
    parts = get_seqlen_balanced_partitions(costs, k, equal_size=equal)
    assert len(parts) == k
    assert sorted(itertools.chain(*parts)) == list(range(len(costs)))
    assert all(part and part == sorted(part) for part in parts)
    if equal:
        assert {len(part) for part in parts} == {len(costs) // k}
    else:
        # What giving each item to the lightest bin guarantees.
        largest = max(sum(costs[i] for i in part) for part in parts)
        assert largest <= sum(costs) / k + max(costs)


def test_costs_of_verls_trainers_may_be_floats_and_tensors() -> None:
    torch = pytest.importorskip("torch", reason="tensors need torch")
    whole = [9.0, 1.0, 1.0, 9.0]
    parts = [[0, 1], [2, 3]]
    assert get_seqlen_balanced_partitions(torch.tensor(whole), 2, equal_size=True) == parts
    assert get_seqlen_balanced_partitions(np.array(whole) / 7, 2, equal_size=True) == parts
    for wrong in ([1.0, float("nan")], [1, -1], [[1, 2]]):
        with pytest.raises(ConfigError, match="seqlen_list must be"):
            get_seqlen_balanced_partitions(wrong, 1, equal_size=False)


def test_partitions_that_verl_asserts_against_are_asserted_against() -> None:
    with pytest.raises(AssertionError, match=r"number of items:\[2\] < k_partitions:\[3\]"):
        get_seqlen_balanced_partitions([1, 2], 3, equal_size=False)
    with pytest.raises(AssertionError, match="3 % 2 != 0"):
        get_seqlen_balanced_partitions([1, 2, 3], 2, equal_size=True)


@pytest.mark.skipif(verl_batching._INSTALLED, reason="verl is installed here")
def test_without_verl_switching_it_on_says_what_is_missing() -> None:
    verl_batching.use_verl_batching()
    with pytest.raises(MissingExtra, match="verl is missing; run: pip install verl"):
        verl_batching.use_batchwright_batching()
