import json
import statistics
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.batching.analyze.report import (
    OptimizationGoal,
    analyze_bucket_efficiency,
    compute_length_histogram,
    create_efficiency_report,
    suggest_bucket_edges,
)
from batchwright.batching.buckets import BucketSpec
from batchwright.data.lengths import Lengths
from batchwright.errors import BadLength, ConfigError

some_lengths = st.lists(st.integers(1, 300), min_size=1, max_size=60)


@settings(max_examples=100, deadline=None)
@given(some_lengths, st.integers(1, 20), st.none() | st.integers(1, 50))
def test_every_sample_is_in_one_bin(lengths, num_bins, bin_width) -> None:
    histogram = compute_length_histogram(lengths, num_bins, bin_width)

    for bin in histogram.bins:
        assert bin.count == sum(bin.min_length <= n < bin.max_length for n in lengths)
        assert bin.percentage == pytest.approx(100 * bin.count / len(lengths))
    assert sum(bin.count for bin in histogram.bins) == len(lengths)
    assert bin_width or len(histogram.bins) <= num_bins
    assert all(a.max_length == b.min_length for a, b in pairwise(histogram.bins))


@settings(max_examples=100, deadline=None)
@given(some_lengths)
def test_figures_equal_the_textbook(lengths) -> None:
    histogram = compute_length_histogram(lengths)

    assert histogram.mean_length == pytest.approx(statistics.fmean(lengths))
    assert histogram.std_length == pytest.approx(statistics.pstdev(lengths), abs=1e-9)
    assert histogram.total_tokens == sum(lengths)
    for share in (25, 50, 75, 90, 95, 99):
        # The smallest length that at least this share of the samples does not exceed.
        mark = min(n for n in lengths if 100 * sum(m <= n for m in lengths) >= share * len(lengths))
        assert getattr(histogram, f"p{share}") == mark
    assert histogram.median_length == histogram.p50


@pytest.mark.parametrize(
    "source",
    [
        {"a": 3, "b": 9, "c": 5},
        [3, 9, 5],
        (3, 9, 5),
        np.array([3, 9, 5]),
        np.array([3, 9, 5], np.uint16),
        Lengths.of({"x": 3, "y": 9, "z": 5}),
    ],
)
def test_lengths_come_in_any_shape(source) -> None:
    assert compute_length_histogram(source) == compute_length_histogram([3, 9, 5])
    assert suggest_bucket_edges(source, 2).edges == (5, 9)


@pytest.mark.parametrize(
    "look",
    [
        compute_length_histogram,
        lambda lengths: analyze_bucket_efficiency(lengths, BucketSpec.default()),
        suggest_bucket_edges,
        create_efficiency_report,
    ],
)
def test_no_lengths_and_wrong_lengths_are_refused(look) -> None:
    for empty in ({}, [], np.array([], np.int32)):
        with pytest.raises(ConfigError, match="no lengths"):
            look(empty)
    for wrong in ({"a": 3, "b": 0}, [3, -1], [2**31], [1.5]):
        with pytest.raises(BadLength):
            look(wrong)


@settings(max_examples=100, deadline=None)
@given(some_lengths, st.sets(st.integers(1, 200), min_size=1, max_size=5), st.integers(1, 9))
def test_buckets_equal_a_sample_by_sample_count(lengths, widths, min_length) -> None:
    *edges, top = sorted(widths)
    spec = BucketSpec(tuple(edges), top, min(min_length, *widths))

    analysis = analyze_bucket_efficiency(lengths, spec)

    fit = [n for n in lengths if not spec.should_skip(n)]
    for bucket in analysis.buckets:
        inside = [n for n in fit if bucket.min_length <= n <= bucket.max_length]
        assert bucket.sample_count == len(inside)
        assert bucket.total_tokens == sum(inside)
        assert bucket.padded_tokens == len(inside) * bucket.max_length
    assert analysis.over_long == sum(n > top for n in lengths)
    assert analysis.too_short == sum(n < spec.min_length for n in lengths)
    if fit:
        assert 0 < analysis.overall_efficiency <= 1
    else:
        assert analysis.overall_efficiency is analysis.overall_waste is None


def test_samples_over_the_limit_never_count_as_efficiency() -> None:
    analysis = analyze_bucket_efficiency([5000] * 10, BucketSpec.default())

    assert analysis.over_long == 10
    assert analysis.overall_efficiency is None
    assert analysis.empty_buckets == 5
    assert "over-long" in analysis.to_ascii()


@settings(max_examples=100, deadline=None)
@given(some_lengths, st.integers(1, 6), st.sampled_from(list(OptimizationGoal)))
def test_a_suggestion_describes_its_own_edges(lengths, num_buckets, goal) -> None:
    suggestion = suggest_bucket_edges(lengths, num_buckets, goal)

    analysis = analyze_bucket_efficiency(lengths, suggestion.spec())
    assert 1 <= len(suggestion.edges) <= num_buckets
    assert suggestion.edges[-1] == max(lengths)
    assert suggestion.efficiency == pytest.approx(analysis.overall_efficiency)
    assert suggestion.waste == pytest.approx(analysis.overall_waste, abs=1e-12)
    assert suggestion.counts == tuple(b.sample_count for b in analysis.buckets)
    assert analysis.over_long == 0


@settings(max_examples=60, deadline=None)
@given(some_lengths, st.integers(1, 6))
def test_each_goal_is_best_at_what_it_says(lengths, num_buckets) -> None:
    by_goal = {goal: suggest_bucket_edges(lengths, num_buckets, goal) for goal in OptimizationGoal}

    def memory(suggestion) -> int:
        pairs = zip(suggestion.edges, suggestion.counts, strict=True)
        return sum(edge * edge * count for edge, count in pairs)

    assert by_goal["waste"].efficiency == max(s.efficiency for s in by_goal.values())
    assert memory(by_goal["memory"]) == min(map(memory, by_goal.values()))


@given(st.integers(1, 40), st.integers(1, 8))
def test_balance_gives_equal_counts_where_lengths_differ(per_bucket: int, num_buckets: int) -> None:
    lengths = range(1, per_bucket * num_buckets + 1)

    suggestion = suggest_bucket_edges(lengths, num_buckets, "balance")

    assert suggestion.counts == (per_bucket,) * num_buckets


@settings(max_examples=60, deadline=None)
@given(some_lengths, st.sampled_from(list(OptimizationGoal)), st.sampled_from([8, 64]))
def test_aligned_edges_are_multiples_and_stay_below_the_limit(lengths, goal, align) -> None:
    suggestion = suggest_bucket_edges([*lengths, 1], 4, goal, max_length=128, align=align)

    assert all(edge % align == 0 for edge in suggestion.edges)
    assert suggestion.edges[-1] <= 128
    assert suggestion.over_long == sum(n > 128 for n in lengths)
    assert sum(suggestion.counts) + suggestion.over_long == len(lengths) + 1


def test_goals_have_long_names_too() -> None:
    assert OptimizationGoal("balance_buckets") is OptimizationGoal.BALANCE
    assert OptimizationGoal.MINIMIZE_MEMORY is OptimizationGoal.MEMORY
    assert [str(goal) for goal in OptimizationGoal] == ["waste", "balance", "memory"]
    with pytest.raises(ConfigError, match="choose waste, balance or memory"):
        suggest_bucket_edges([1, 2], goal="speed")


def test_current_edges_are_compared_with_the_best_of_as_many() -> None:
    lengths = [10] * 50 + [100] * 50

    for current in ((50, 100), BucketSpec((50,), 100), (50,)):
        suggestion = suggest_bucket_edges(lengths, 2, current=current)
        assert suggestion.current_efficiency == 5500 / 7500
        assert suggestion.regret == pytest.approx(1 - 5500 / 7500)
    assert suggest_bucket_edges(lengths, 2, current=(10, 100)).regret == 0.0


def test_settings_that_contradict_the_lengths_are_refused() -> None:
    with pytest.raises(ConfigError, match="longer than max_length=5"):
        suggest_bucket_edges([10, 20], max_length=5)
    with pytest.raises(ConfigError, match="give 128"):
        suggest_bucket_edges([10, 20], max_length=100, align=64)
    with pytest.raises(ConfigError, match="give a max_length"):
        suggest_bucket_edges([10, 2**31 - 1])
    with pytest.raises(ConfigError, match="num_buckets and align must be at least 1, got 0 and 1"):
        suggest_bucket_edges([10, 20], 0, "balance")
    with pytest.raises(ConfigError, match="at least 1, got 4 and 0"):
        suggest_bucket_edges([10, 20], align=0, max_length=20)
    with pytest.raises(ConfigError, match="bin_width must be at least 1, got 10 and 0"):
        compute_length_histogram([10, 20], bin_width=0)


def words(report) -> str:
    return "\n".join(report.recommendations)


def test_a_good_fit_gets_no_advice() -> None:
    report = create_efficiency_report([120, 128, 250, 256], BucketSpec((128,), 256), 4096)

    assert report.recommendations == []
    assert "Advice" not in report.to_text()


def test_poor_edges_are_answered_with_better_ones() -> None:
    report = create_efficiency_report([10] * 50 + [100] * 50, BucketSpec((50,), 100))

    assert "edges (10, 100) reach 100.0% instead of 73.3%" in words(report)


def test_scattered_lengths_are_advised_to_pack() -> None:
    report = create_efficiency_report(range(1, 1025), BucketSpec((512,), 1024))

    assert "layout='packed'" in words(report)


def test_every_problem_of_a_spec_is_named() -> None:
    lengths = [100] * 500 + [900] * 5 + [5000]
    report = create_efficiency_report(lengths, BucketSpec((128, 256), 1024, min_length=2), 512)

    assert "1 sample is longer than overflow_max=1,024" in words(report)
    assert "no sample has a length of 129-256" in words(report)
    assert "100 times as many" in words(report)
    assert "5 samples are in buckets wider than token_budget=512" in words(report)
    short = create_efficiency_report([1, 100], BucketSpec((128,), 256, min_length=2))
    assert "1 sample is shorter than min_length=2" in words(short)


def test_when_nothing_fits_edges_for_everything_are_suggested() -> None:
    report = create_efficiency_report([5000, 6000], BucketSpec((128,), 256))

    assert report.suggestions[0].edges == (5000, 6000)
    assert "no sample fits these buckets" in words(report)


@settings(max_examples=60, deadline=None)
@given(some_lengths, st.none() | st.integers(1, 400))
def test_any_report_is_json_and_plain_text(lengths, token_budget) -> None:
    report = create_efficiency_report(lengths, BucketSpec((64, 128), 200), token_budget)

    back = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert back["recommendations"] == report.recommendations
    assert [s["goal"] for s in back["suggestions"]] == ["waste", "balance", "memory"]
    assert back["analysis"]["bucket_spec"]["overflow_max"] == 200
    assert report.to_text().isascii()
    assert not any("\n" in sentence for sentence in report.recommendations)
