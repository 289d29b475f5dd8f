"""Results of an analysis: length histograms, efficiency per bucket, suggested edges."""

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from batchwright.batching.analyze.metrics import ascii_bars, shown
from batchwright.batching.buckets import BucketSpec
from batchwright.errors import ConfigError

__all__ = [
    "BucketAnalysis",
    "BucketEfficiency",
    "BucketSuggestion",
    "HistogramBin",
    "LengthHistogram",
    "OptimizationGoal",
]


class OptimizationGoal(StrEnum):
    """What suggested edges optimize.

    The longer names are aliases.

    >>> OptimizationGoal("minimize_waste")
    <OptimizationGoal.WASTE: 'waste'>
    """

    WASTE = "waste"
    """Fewest padding tokens."""
    BALANCE = "balance"
    """The same number of samples in each bucket."""
    MEMORY = "memory"
    """Least attention memory, which grows with the square of the width."""
    MINIMIZE_WASTE = "waste"
    BALANCE_BUCKETS = "balance"
    MINIMIZE_MEMORY = "memory"

    @classmethod
    def _missing_(cls, value: object) -> "OptimizationGoal":
        known = cls.__members__.get(str(value).upper())
        if known is None:
            raise ConfigError(f"goal={value!r} is not known; choose waste, balance or memory")
        return known


@dataclass(frozen=True, slots=True)
class HistogramBin:
    """Lengths from `min_length` up to, not including, `max_length`; `percentage` of 100."""

    min_length: int
    max_length: int
    count: int
    percentage: float


@dataclass(frozen=True, slots=True)
class LengthHistogram:
    """The distribution of lengths. Percentiles are lengths that occur, not interpolated ones."""

    bins: tuple[HistogramBin, ...]
    total_samples: int
    total_tokens: int
    min_length: int
    max_length: int
    mean_length: float
    median_length: int
    std_length: float
    p25: int
    p50: int
    p75: int
    p90: int
    p95: int
    p99: int

    def to_ascii(self, width: int = 50) -> str:
        """A bar for each bin, then the figures."""
        labels = [f"{bin.min_length}-{bin.max_length - 1}" for bin in self.bins]
        bars = ascii_bars(labels, [bin.count for bin in self.bins], width, whole=self.total_samples)
        return "\n".join(
            [
                *bars,
                f"{self.total_samples:,} samples, {self.total_tokens:,} tokens, "
                f"{self.min_length:,} to {self.max_length:,} each, "
                f"mean {self.mean_length:,.1f}, deviation {self.std_length:,.1f}",
                f"p25 {self.p25:,}   p50 {self.p50:,}   p75 {self.p75:,}   "
                f"p90 {self.p90:,}   p95 {self.p95:,}   p99 {self.p99:,}",
            ]
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class BucketEfficiency:
    """One bucket when every sample in it is padded to its width; None where it is empty."""

    bucket_id: int
    min_length: int
    max_length: int
    sample_count: int
    total_tokens: int
    padded_tokens: int
    efficiency: float | None
    waste: float | None


@dataclass(frozen=True, slots=True)
class BucketAnalysis:
    """Every bucket, and all together.

    `over_long` and `too_short` samples are in no bucket: they are counted separately and are not
    part of any efficiency.
    """

    bucket_spec: BucketSpec
    buckets: tuple[BucketEfficiency, ...]
    overall_efficiency: float | None
    overall_waste: float | None
    over_long: int
    too_short: int

    @property
    def empty_buckets(self) -> int:
        return sum(bucket.sample_count == 0 for bucket in self.buckets)

    def to_ascii(self) -> str:
        """A line for each bucket."""
        lines = [f"{'bucket':>6} {'lengths':>15} {'samples':>12} {'efficiency':>11} {'waste':>7}"]
        for b in self.buckets:
            efficiency, waste = shown(b.efficiency, ".1%"), shown(b.waste, ".1%")
            span = f"{b.min_length}-{b.max_length}"
            lines.append(
                f"{b.bucket_id:>6} {span:>15} {b.sample_count:>12,} {efficiency:>11} {waste:>7}"
            )
        kept = sum(b.sample_count for b in self.buckets)
        efficiency, waste = shown(self.overall_efficiency, ".1%"), shown(self.overall_waste, ".1%")
        lines.append(f"{'all':>6} {'':>15} {kept:>12,} {efficiency:>11} {waste:>7}")
        for count, what in ((self.over_long, "over-long"), (self.too_short, "too short")):
            if count:
                lines.append(f"{'':>6} {what:>15} {count:>12,}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "empty_buckets": self.empty_buckets}


@dataclass(frozen=True, slots=True)
class BucketSuggestion:
    """Edges for a goal; the last holds the longest sample, so each edge is a bucket.

    `efficiency` is useful over padded tokens whatever the goal. `current_efficiency` and
    `regret` are about the edges in use, when they were given: `regret` is the efficiency they
    lose relative to the best edges for as many buckets.
    """

    edges: tuple[int, ...]
    goal: OptimizationGoal
    counts: tuple[int, ...]
    efficiency: float
    waste: float
    over_long: int = 0
    current_efficiency: float | None = None
    regret: float | None = None

    def spec(self) -> BucketSpec:
        """The same buckets as a `BucketSpec`, whose last width is called `overflow_max`."""
        return BucketSpec(edges=self.edges[:-1], overflow_max=self.edges[-1])

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
