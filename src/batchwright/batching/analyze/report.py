"""Analyze the lengths of a data set: histogram, bucket efficiency, better edges, a report."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from batchwright.batching.analyze.advice import EfficiencyReport
from batchwright.batching.analyze.edges import edges_cost, optimal_edges, regret
from batchwright.batching.analyze.findings import (
    BucketAnalysis,
    BucketEfficiency,
    BucketSuggestion,
    HistogramBin,
    LengthHistogram,
    OptimizationGoal,
)
from batchwright.batching.analyze.metrics import ratio
from batchwright.batching.buckets import BucketSpec
from batchwright.data.lengths import Lengths
from batchwright.errors import ConfigError

__all__ = [
    "analyze_bucket_efficiency",
    "compute_length_histogram",
    "create_efficiency_report",
    "suggest_bucket_edges",
]

LengthSource = Mapping[str, int] | Lengths | Sequence[int] | NDArray[np.integer]

WIDEST = 2**24
"""Suggestions consider every width up to the longest sample; above this the table is too large."""


def compute_length_histogram(
    lengths: LengthSource, num_bins: int = 10, bin_width: int | None = None
) -> LengthHistogram:
    """The distribution of lengths over at most `num_bins` bins, or over bins of `bin_width`.

    >>> histogram = compute_length_histogram([10, 20, 20, 30, 49], num_bins=4)
    >>> [(bin.min_length, bin.max_length, bin.count) for bin in histogram.bins]
    [(10, 20, 1), (20, 30, 2), (30, 40, 1), (40, 50, 1)]
    """
    values = _values(lengths)
    low, high = int(values.min()), int(values.max())
    if num_bins < 1 or (bin_width is not None and bin_width < 1):
        raise ConfigError(
            f"num_bins and bin_width must be at least 1, got {num_bins} and {bin_width}"
        )
    step = bin_width or -(-(high - low + 1) // num_bins)
    counts = np.bincount((values - low) // step).tolist()
    marks = np.percentile(values, (25, 50, 75, 90, 95, 99), method="inverted_cdf").tolist()
    p25, p50, p75, p90, p95, p99 = (int(mark) for mark in marks)
    return LengthHistogram(
        bins=tuple(
            HistogramBin(low + k * step, low + (k + 1) * step, n, 100 * n / values.size)
            for k, n in enumerate(counts)
        ),
        total_samples=values.size,
        total_tokens=int(values.sum(dtype=np.int64)),
        min_length=low,
        max_length=high,
        mean_length=float(values.mean(dtype=np.float64)),
        median_length=p50,
        std_length=float(values.std(dtype=np.float64)),
        p25=p25,
        p50=p50,
        p75=p75,
        p90=p90,
        p95=p95,
        p99=p99,
    )


def analyze_bucket_efficiency(lengths: LengthSource, bucket_spec: BucketSpec) -> BucketAnalysis:
    """How well the buckets fit, each sample padded to the width of its bucket.

    >>> analysis = analyze_bucket_efficiency([64, 128, 250, 9000], BucketSpec((128,), 256))
    >>> [bucket.efficiency for bucket in analysis.buckets], analysis.over_long
    ([0.75, 0.9765625], 1)
    """
    values = _values(lengths)
    over_long = int((values > bucket_spec.overflow_max).sum())
    too_short = int((values < bucket_spec.min_length).sum())
    if over_long or too_short:
        fits = (values >= bucket_spec.min_length) & (values <= bucket_spec.overflow_max)
        values = values[fits]
    ids = bucket_spec.get_bucket_ids(values)
    counts = np.bincount(ids, minlength=bucket_spec.num_buckets).tolist()
    # Weights are summed in float64, which is exact up to nine quadrillion tokens.
    tokens = np.bincount(ids, weights=values, minlength=bucket_spec.num_buckets).tolist()
    buckets = []
    for bucket, (count, useful) in enumerate(zip(counts, map(int, tokens), strict=True)):
        low, high = bucket_spec.get_bucket_range(bucket)
        padded = count * high
        efficiency, waste = ratio(useful, padded), ratio(padded - useful, padded)
        buckets.append(
            BucketEfficiency(bucket, low, high, count, useful, padded, efficiency, waste)
        )
    useful = sum(bucket.total_tokens for bucket in buckets)
    padded = sum(bucket.padded_tokens for bucket in buckets)
    return BucketAnalysis(
        bucket_spec=bucket_spec,
        buckets=tuple(buckets),
        overall_efficiency=ratio(useful, padded),
        overall_waste=ratio(padded - useful, padded),
        over_long=over_long,
        too_short=too_short,
    )


def suggest_bucket_edges(
    lengths: LengthSource,
    num_buckets: int = 4,
    goal: OptimizationGoal | str = OptimizationGoal.WASTE,
    max_length: int | None = None,
    align: int = 1,
    current: BucketSpec | Sequence[int] | None = None,
) -> BucketSuggestion:
    """At most `num_buckets` edges that are best for `goal`; the last holds the longest sample.

    Waste and memory are exact optima. Balance cuts at the quantiles, and samples of one length
    stay together. Samples over `max_length` are left out and counted. `current` are the edges
    in use, for comparison; if they end below the longest sample, a last bucket is added for it.

    >>> suggestion = suggest_bucket_edges([10, 11, 12, 90, 99, 100], num_buckets=2)
    >>> suggestion.edges, suggestion.counts, suggestion.spec().overflow_max
    ((12, 100), (3, 3), 100)
    """
    goal = OptimizationGoal(goal)
    values = _values(lengths)
    if num_buckets < 1 or align < 1:
        raise ConfigError(
            f"num_buckets and align must be at least 1, got {num_buckets} and {align}"
        )
    if max_length is not None and max_length % align:
        raise ConfigError(
            f"max_length={max_length} is not a multiple of align={align}, so the last edge "
            f"could exceed it; give {-(-max_length // align) * align}"
        )
    kept = values if max_length is None else values[values <= max_length]
    hist = _histogram(kept, max_length)
    if goal is OptimizationGoal.WASTE:
        edges = optimal_edges(hist, num_buckets, align=align)
    elif goal is OptimizationGoal.MEMORY:
        squares = np.arange(hist.size + align, dtype=np.int64) ** 2
        edges = optimal_edges(hist, num_buckets, squares, align=align)
    else:
        edges = _quantile_edges(hist, num_buckets, align)
    useful = int(kept.sum(dtype=np.int64))
    padded = int(edges_cost(hist, edges))
    suggestion = BucketSuggestion(
        edges=edges,
        goal=goal,
        counts=_counts(hist, edges),
        efficiency=useful / padded,
        waste=(padded - useful) / padded,
        over_long=values.size - kept.size,
    )
    if current is None:
        return suggestion
    widths = _widths(current, longest=hist.size - 1)
    return replace(
        suggestion,
        current_efficiency=useful / edges_cost(hist, widths),
        regret=regret(hist, widths),
    )


def create_efficiency_report(
    lengths: LengthSource, bucket_spec: BucketSpec | None = None, token_budget: int | None = None
) -> EfficiencyReport:
    """The lengths, how well `bucket_spec` (or the default one) fits them, and better edges.

    Suggestions have as many buckets as the spec and leave out the samples it leaves out.
    """
    values = _values(lengths)
    spec = BucketSpec.default() if bucket_spec is None else bucket_spec
    fits = values[(values >= spec.min_length) & (values <= spec.overflow_max)]
    # When nothing fits, edges for everything are the best advice there is.
    considered = fits if fits.size else values
    return EfficiencyReport(
        histogram=compute_length_histogram(values),
        analysis=analyze_bucket_efficiency(values, spec),
        suggestions=tuple(
            suggest_bucket_edges(considered, spec.num_buckets, goal) for goal in OptimizationGoal
        ),
        token_budget=token_budget,
    )


def _values(lengths: LengthSource) -> NDArray[np.int32]:
    if isinstance(lengths, Sequence):
        # An empty list would become an array of floats, and the error would speak of those.
        lengths = np.asarray(lengths, None if len(lengths) else np.int32)
    values = Lengths.of(lengths).values
    if values.size == 0:
        raise ConfigError("there are no lengths to analyze; give at least one sample")
    return values


def _histogram(values: NDArray[np.int32], max_length: int | None) -> NDArray[np.int64]:
    if values.size == 0:
        raise ConfigError(f"every sample is longer than max_length={max_length}; raise it")
    longest = int(values.max())
    if longest > WIDEST:
        raise ConfigError(
            f"the longest sample has {longest:,} tokens, too many to consider every width; "
            f"give a max_length of at most {WIDEST:,}"
        )
    return np.bincount(values).astype(np.int64)


def _quantile_edges(hist: NDArray[np.int64], num_buckets: int, align: int) -> tuple[int, ...]:
    totals = np.cumsum(hist)
    shares = -(-totals[-1] * np.arange(1, num_buckets + 1) // num_buckets)
    edges = np.searchsorted(totals, shares)
    return tuple(np.unique(-(-edges // align) * align).tolist())


def _counts(hist: NDArray[np.int64], edges: tuple[int, ...]) -> tuple[int, ...]:
    upto = np.cumsum(hist)[np.minimum(edges, hist.size - 1)]
    return tuple(np.diff(upto, prepend=0).tolist())


def _widths(current: BucketSpec | Sequence[int], longest: int) -> tuple[int, ...]:
    widths = current.widths if isinstance(current, BucketSpec) else tuple(current)
    return widths if widths and widths[-1] >= longest else (*widths, longest)
