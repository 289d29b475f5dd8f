"""Packings against item-by-item Python, brute force and the definition of a packing."""

import itertools
import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.batching.packing import kernels
from batchwright.batching.packing.bins import (
    Packing,
    StreamingPacker,
    pack_lengths,
    verify_packing,
)
from batchwright.batching.packing.modes import PackingMode
from batchwright.batching.packing.patterns import MAX_CAPACITY, pack_histogram
from batchwright.errors import BadLength, ConfigError, Mismatch, OversizedSample

NO_LIMIT = 10**9
quick = settings(max_examples=150, deadline=None)


@st.composite
def problems(draw, most_items=60, widest=150):
    """A capacity, lengths that fit it (often many equal ones) and perhaps a limit on items."""
    capacity = draw(st.integers(1, widest))
    longest = draw(st.integers(1, capacity))
    lengths = draw(st.lists(st.integers(1, longest), max_size=most_items))
    return capacity, lengths, draw(st.none() | st.integers(1, 6))


def fit_naively(lengths, capacity, max_segments, key):
    """Bins of item indices, in the given order, into the open bin that `key` ranks first."""
    bins, free, changed = [], [], []
    for step, (item, length) in enumerate(lengths):
        open_bins = [
            b
            for b in range(len(bins))
            if free[b] >= length and len(bins[b]) < (max_segments or NO_LIMIT)
        ]
        if open_bins:
            b = min(open_bins, key=lambda b: key(b, free[b], changed[b]))
        else:
            b = len(bins)
            bins.append([])
            free.append(capacity)
            changed.append(0)
        bins[b].append(item)
        free[b] -= length
        changed[b] = step
    return bins


def first(b, free, changed):
    return b


def tightest(b, free, changed):
    return (free, -changed)


def longest_first(lengths):
    return sorted(enumerate(lengths), key=lambda pair: -pair[1])


def bins_of(packing):
    return [part.tolist() for part in np.split(packing.items, packing.offsets[1:-1])][
        : packing.num_bins
    ]


def fewest_bins(lengths, capacity, max_segments=None):
    """The optimum by trying every assignment, for a handful of items."""
    best = len(lengths)

    def place(i, loads):
        nonlocal best
        if len(loads) >= best:
            return
        if i == len(lengths):
            best = len(loads)
            return
        for b, (load, count) in enumerate(loads):
            if load + lengths[i] <= capacity and count < (max_segments or NO_LIMIT):
                place(i + 1, [*loads[:b], (load + lengths[i], count + 1), *loads[b + 1 :]])
        place(i + 1, [*loads, (lengths[i], 1)])

    place(0, [])
    return best


def positions_of(patterns):
    """The positions of every bin, by the words of `Patterns`."""
    return [
        [
            position
            for e in range(patterns.entry_offsets[i], patterns.entry_offsets[i + 1])
            for position in range(
                patterns.entry_position[e] + (b - start) * patterns.entry_count[e],
                patterns.entry_position[e] + (b - start + 1) * patterns.entry_count[e],
            )
        ]
        for i, (start, stop) in enumerate(pairwise(patterns.bin_starts))
        for b in range(start, stop)
    ]


@quick
@given(problems())
def test_best_fit_on_the_histogram_makes_the_bins_of_best_fit_item_by_item(problem):
    capacity, lengths, max_segments = problem
    patterns = pack_histogram(np.bincount(lengths, minlength=2), capacity, max_segments)
    order = [item for item, _ in longest_first(lengths)]
    naive = fit_naively(longest_first(lengths), capacity, max_segments, tightest)

    bins = positions_of(patterns)
    got = [tuple(lengths[order[p]] for p in positions) for positions in bins]

    # Items of one length are interchangeable, so bins are compared by the lengths they hold.
    assert Counter(got) == Counter(tuple(lengths[i] for i in bin_) for bin_ in naive)
    assert sorted(p for positions in bins for p in positions) == list(range(len(lengths)))
    assert patterns.num_positions == len(lengths)


def test_best_fit_on_the_histogram_equals_its_twin_on_crowded_random_sets():
    # Many items in narrow bins: several groups of bins with the same free space at once.
    rng = np.random.default_rng(0)
    for _ in range(150):
        capacity = int(rng.integers(4, 40))
        lengths = rng.integers(1, rng.integers(2, capacity + 1), rng.integers(50, 200)).tolist()
        max_segments = [None, 2, 3, 5][rng.integers(4)]
        packing = pack_lengths(lengths, capacity, max_segments=max_segments)
        naive = fit_naively(longest_first(lengths), capacity, max_segments, tightest)

        assert Counter(tuple(lengths[i] for i in bin_) for bin_ in bins_of(packing)) == Counter(
            tuple(lengths[i] for i in bin_) for bin_ in naive
        )


@quick
@given(problems())
def test_bins_written_out_are_those_that_the_patterns_define(problem):
    capacity, lengths, max_segments = problem
    hist = np.bincount(lengths, minlength=2)
    patterns = pack_histogram(hist, capacity, max_segments)
    order = kernels.sort_descending(np.array(lengths, np.int32), hist)

    offsets, items = patterns.expand(order)

    assert [items[first:stop].tolist() for first, stop in pairwise(offsets)] == [
        order[positions].tolist() for positions in positions_of(patterns)
    ]


@quick
@given(problems())
def test_first_fit_best_fit_and_greedy_are_what_plain_python_makes(problem):
    capacity, lengths, max_segments = problem
    arrival = list(enumerate(lengths))

    def packed(mode):
        return bins_of(pack_lengths(lengths, capacity, mode, max_segments))

    assert packed("first_fit") == fit_naively(arrival, capacity, max_segments, first)
    assert packed("best_fit") == fit_naively(arrival, capacity, max_segments, tightest)
    assert packed("greedy") == fit_naively(longest_first(lengths), capacity, max_segments, first)


@quick
@given(problems(), st.sampled_from(list(PackingMode)))
def test_every_mode_packs_every_item_once_and_fits(problem, mode):
    capacity, lengths, max_segments = problem

    packing = pack_lengths(lengths, capacity, mode, max_segments)
    proof = verify_packing(packing, lengths)

    assert proof.tokens == sum(lengths)
    assert sorted(itertools.chain(*bins_of(packing))) == list(range(len(lengths)))
    for bin_ in bins_of(packing):
        assert sum(lengths[i] for i in bin_) <= capacity
        assert len(bin_) <= (max_segments or NO_LIMIT)
    assert packing.lower_bound >= packing.l2 >= packing.l1
    # What the tree of first fit is sized for; any mode that opens bins only when it must keeps it.
    closed = len(lengths) // (max_segments or NO_LIMIT)
    assert packing.num_bins <= min(len(lengths), 2 * packing.l1 + 1 + closed)


@quick
@given(problems(most_items=8, widest=20))
def test_no_bound_exceeds_the_optimum(problem):
    capacity, lengths, max_segments = problem
    packing = pack_lengths(lengths, capacity, max_segments=max_segments)

    assert packing.l1 == -(-sum(lengths) // capacity)
    assert packing.l1 <= packing.l2 <= fewest_bins(lengths, capacity)
    assert packing.lower_bound <= fewest_bins(lengths, capacity, max_segments) <= packing.num_bins


def test_the_second_bound_sees_that_large_items_cannot_share():
    packing = pack_lengths([6] * 10, max_length=10)

    assert (packing.l1, packing.l2, packing.num_bins) == (6, 10, 10)


@quick
@given(st.lists(st.integers(1, 300), max_size=200), st.integers(0, 5))
def test_histogram_and_sort_are_numpys(lengths, spare):
    array = np.array(lengths, np.int32)
    longest = max(lengths, default=0) + spare
    hist = kernels.histogram(array, longest)

    assert hist.tolist() == np.bincount(array, minlength=longest + 1).tolist()
    assert (
        kernels.sort_descending(array, hist).tolist() == np.argsort(-array, kind="stable").tolist()
    )


def test_the_histogram_of_long_lengths_is_numpys():
    lengths = np.array([1, 70_000, 70_000, 65_536, 99_999], np.int32)

    assert np.array_equal(
        kernels.histogram(lengths, 100_000), np.bincount(lengths, minlength=100_001)
    )


@quick
@given(
    st.sampled_from([1, 63, 64, 65, 4095, 4096, 2**18 + 1, MAX_CAPACITY]),
    st.lists(st.tuples(st.booleans(), st.integers(0, 2**24)), max_size=60),
)
def test_the_bitset_is_a_set_at_every_capacity(capacity, changes):
    words, base = kernels.bitset(capacity)
    members = set()
    for add, value in changes:
        value %= capacity + 1
        if add:
            members.add(value)
            kernels.bitset_add(words, base, value)
        elif value in members:
            members.remove(value)
            kernels.bitset_discard(words, base, value)
        for probe in {0, value, min(value + 1, capacity), capacity}:
            expected = min((m for m in members if m >= probe), default=-1)
            assert kernels.bitset_next(words, base, probe) == expected


def test_the_largest_capacity_packs():
    lengths = np.array([MAX_CAPACITY, MAX_CAPACITY - 1, 1, 5, MAX_CAPACITY - 5], np.int32)

    for mode in ("first_fit", "best_fit", "greedy", "best_fit_decreasing"):
        packing = pack_lengths(lengths, MAX_CAPACITY, mode)
        assert verify_packing(packing, lengths).bins == packing.lower_bound == 3


def test_the_size_of_patterns_does_not_grow_with_the_number_of_items():
    hist = np.zeros(513, np.int64)
    hist[1:] = np.arange(512, 0, -1)
    small, large = pack_histogram(hist * 1000, 512), pack_histogram(hist * 1_000_000, 512)

    assert large.num_positions == 1000 * small.num_positions
    assert len(large.entry_count) < 2 * len(small.entry_count)


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int32, np.int64, np.uint64])
def test_any_whole_number_type_packs_alike(dtype):
    lengths = np.array([5, 3, 4, 3], dtype)

    assert bins_of(pack_lengths(lengths, 8)) == bins_of(pack_lengths([5, 3, 4, 3], 8))


def test_no_items_make_no_bins():
    for mode in PackingMode:
        packing = pack_lengths([], 8, mode)
        assert (packing.num_bins, packing.efficiency, packing.lower_bound) == (0, 1.0, 0)
        assert verify_packing(packing, []).items == 0


@pytest.mark.parametrize(
    ("lengths", "error", "message"),
    [
        ([9, 3, 12], OversizedSample, "2 lengths are over max_length=8, the longest 12; raise"),
        ([3, 0, -1], BadLength, "got 0 in row 1 .2 in all.;"),
        ([1.5], BadLength, "got float64 of shape"),
        ([True], BadLength, "got bool"),
        ([[1, 2]], BadLength, "a flat array of integers"),
    ],
)
def test_lengths_that_cannot_be_packed_are_refused_in_one_sentence(lengths, error, message):
    with pytest.raises(error, match=message) as caught:
        pack_lengths(lengths, 8)
    assert "\n" not in str(caught.value)


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(ConfigError, match="choose one of first_fit, best_fit"):
        pack_lengths([1], 8, "tetris")
    with pytest.raises(ConfigError, match="max_segments must be at least 1 or None, got 0"):
        pack_lengths([1], 8, max_segments=0)
    with pytest.raises(ConfigError, match=r"max_length must be between 1 and .*, got 0"):
        pack_lengths([1], 0)
    with pytest.raises(OversizedSample, match="1 length is over max_length=4, the longest 9"):
        pack_histogram(np.bincount([9, 3]), 4)
    with pytest.raises(BadLength, match="lengths must be at least 1, got 1 of 0"):
        pack_histogram(np.bincount([0, 3]), 4)


LENGTHS = [5, 3, 4, 3]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("items", [0, 1, 2], "holds 3 items"),
        ("items", [0, 1, 2, 2], "item 2 is in 2 bins|item 3 is in 0 bins"),
        ("items", [0, 1, 2, 4], "not within the lengths"),
        ("items", [0, 2, 1, 3], "bin 0 holds 9 tokens"),
        ("offsets", [0, 2], "bins span 0..2"),
        ("offsets", [0, 4, 4], "bin 1 is empty"),
        ("offsets", [0, 5, 4], "bin 1 is empty or runs backwards"),
        ("max_segments", 1, "bin 0 holds 2 items"),
        ("tokens", 14, "hold 14 tokens"),
        ("lower_bound", 3, "under the bound"),
    ],
)
def test_the_verifier_finds_every_kind_of_damage(field, value, message):
    packing = pack_lengths(LENGTHS, 8)
    if isinstance(value, list):
        value = np.array(value, getattr(packing, field).dtype)

    with pytest.raises(Mismatch, match=message):
        verify_packing(replace(packing, **{field: value}), LENGTHS)


def test_the_packing_names_itself_in_one_line():
    packing = pack_lengths(LENGTHS, 8)

    assert isinstance(packing, Packing)
    assert packing.method == "best_fit_decreasing"
    assert "\n" not in repr(packing)


def stream_through(packer, items):
    return [bin_ for item, length in items for bin_ in packer.push(item, length)]


@quick
@given(problems(), st.integers(1, 5), st.integers(0, 60))
def test_a_resumed_stream_continues_as_if_never_interrupted(problem, open_bins, cut):
    capacity, lengths, max_segments = problem
    items = list(enumerate(lengths))
    whole = StreamingPacker(capacity, open_bins, max_segments)
    expected = stream_through(whole, items) + whole.flush()

    before = StreamingPacker(capacity, open_bins, max_segments)
    done = stream_through(before, items[:cut])
    after = StreamingPacker(capacity, open_bins, max_segments)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    done += stream_through(after, items[cut:]) + after.flush()

    assert done == expected
    assert after.flush() == []


@quick
@given(problems(), st.integers(1, 5))
def test_a_stream_loses_nothing_fits_and_emits_one_bin_at_a_time(problem, open_bins):
    capacity, lengths, max_segments = problem
    packer = StreamingPacker(capacity, open_bins, max_segments)
    emitted = [packer.push(item, length) for item, length in enumerate(lengths)]
    left = packer.flush()
    bins = [bin_ for done in emitted for bin_ in done] + left

    assert all(len(done) <= 1 for done in emitted)
    assert len(left) <= open_bins
    assert sorted(itertools.chain(*bins)) == list(range(len(lengths)))
    for bin_ in bins:
        assert 0 < sum(lengths[i] for i in bin_) <= capacity
        assert len(bin_) <= (max_segments or NO_LIMIT)


def test_sixty_four_open_bins_are_enough_to_fill_a_stream():
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5.5, 0.8, 20_000), 1, 2048).astype(int).tolist()
    packer = StreamingPacker(2048)
    full = stream_through(packer, enumerate(lengths))

    assert sum(lengths[i] for bin_ in full for i in bin_) / (2048 * len(full)) >= 0.99


def test_a_stream_refuses_what_it_cannot_take():
    packer = StreamingPacker(8)
    with pytest.raises(OversizedSample, match="longest 9"):
        packer.push("a", 9)
    with pytest.raises(BadLength, match="item 'a' must be at least 1, got 0"):
        packer.push("a", 0)
    with pytest.raises(ConfigError, match="open_bins must be at least 1, got 0"):
        StreamingPacker(8, open_bins=0)
    with pytest.raises(Mismatch, match="saved with max_length=9"):
        packer.load_state_dict(StreamingPacker(9).state_dict())
