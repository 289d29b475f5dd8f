"""The whole report on a data set, and the rules that turn it into recommendations."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from batchwright.batching.analyze.findings import (
    BucketAnalysis,
    BucketSuggestion,
    LengthHistogram,
)
from batchwright.batching.analyze.metrics import shown

__all__ = ["EfficiencyReport"]

FAR = 0.02
"""Edges that lose more efficiency than this are worth changing."""

LOOSE = 0.10
"""Padding with even the best edges, above which packing pays for its segment masks."""

UNEVEN = 10
"""Largest over smallest bucket, above which single buckets dominate the end of an epoch."""


@dataclass(frozen=True, slots=True)
class EfficiencyReport:
    """A data set under one choice of buckets, with better choices and recommendations."""

    histogram: LengthHistogram
    analysis: BucketAnalysis
    suggestions: tuple[BucketSuggestion, ...]
    token_budget: int | None = None

    @property
    def recommendations(self) -> list[str]:
        """Recommendations, the most important first; empty when there are none."""
        return [sentence for rule in _RULES for sentence in rule(self)]

    def to_text(self, width: int = 50) -> str:
        """The whole report for a terminal."""
        suggested = [
            f"{s.goal:>8}  {shown(s.efficiency, '.1%'):>6}  {', '.join(map(str, s.edges))}"
            for s in self.suggestions
        ]
        advice = self.recommendations
        return "\n".join(
            [
                "Lengths",
                self.histogram.to_ascii(width),
                "",
                "Buckets",
                self.analysis.to_ascii(),
                "",
                "Edges suggested for each goal, with their efficiency",
                *suggested,
                *(["", "Advice", *(f"* {sentence}" for sentence in advice)] if advice else []),
            ]
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "histogram": self.histogram.to_dict(),
            "analysis": self.analysis.to_dict(),
            "suggestions": [suggestion.to_dict() for suggestion in self.suggestions],
            "token_budget": self.token_budget,
            "recommendations": self.recommendations,
        }


def _over_long(report: EfficiencyReport) -> list[str]:
    count = report.analysis.over_long
    if not count:
        return []
    limit = report.analysis.bucket_spec.overflow_max
    share = count / report.histogram.total_samples
    return [
        f"{_samples(count)} longer than overflow_max={limit:,} ({share:.1%} of all, "
        f"the longest of {report.histogram.max_length:,} tokens): raise overflow_max, or set "
        f"overflow='truncate', 'split' or 'skip'"
    ]


def _too_short(report: EfficiencyReport) -> list[str]:
    count = report.analysis.too_short
    limit = report.analysis.bucket_spec.min_length
    return [f"{_samples(count)} shorter than min_length={limit}"] if count else []


def _better_edges(report: EfficiencyReport) -> list[str]:
    best = report.suggestions[0]
    now = report.analysis.overall_efficiency
    if now is None:
        return [f"no sample fits these buckets: edges {best.edges} would hold all of them"]
    lost = best.efficiency - now
    if lost <= FAR:
        return []
    return [
        f"the edges lose {100 * lost:.1f} percentage points of efficiency: with as many buckets, "
        f"edges {best.edges} reach {best.efficiency:.1%} instead of {now:.1%}"
    ]


def _packing(report: EfficiencyReport) -> list[str]:
    best = report.suggestions[0]
    if best.waste <= LOOSE:
        return []
    return [
        f"even the best {len(best.edges)} buckets leave {best.waste:.1%} padding: consider packing "
        f"(layout='packed'), or layout='sorted' if rows must hold one sample"
    ]


def _empty_buckets(report: EfficiencyReport) -> list[str]:
    empty = [b for b in report.analysis.buckets if b.sample_count == 0]
    if not empty or len(empty) == len(report.analysis.buckets):
        return []
    spans = ", ".join(f"{b.min_length}-{b.max_length}" for b in empty)
    return [f"no sample has a length of {spans}: drop an edge there, or move it"]


def _imbalance(report: EfficiencyReport) -> list[str]:
    filled = [b for b in report.analysis.buckets if b.sample_count]
    if len(filled) < 2:
        return []
    small = min(filled, key=lambda b: b.sample_count)
    large = max(filled, key=lambda b: b.sample_count)
    even = next(s for s in report.suggestions if s.goal == "balance")
    times = large.sample_count / small.sample_count
    if times <= UNEVEN:
        return []
    return [
        f"the bucket up to {large.max_length} holds {times:,.0f} times as many samples as the one "
        f"up to {small.max_length} ({large.sample_count:,} and {small.sample_count:,}): "
        f"goal='balance' evens them out, at {even.efficiency:.1%} efficiency"
    ]


def _budget(report: EfficiencyReport) -> list[str]:
    budget = report.token_budget
    if budget is None:
        return []
    wide = [b for b in report.analysis.buckets if b.sample_count and b.max_length > budget]
    if not wide:
        return []
    count = sum(b.sample_count for b in wide)
    return [
        f"{_samples(count)} in buckets wider than token_budget={budget:,}: "
        f"raise it to {wide[-1].max_length:,}, or lower overflow_max"
    ]


_RULES: tuple[Callable[[EfficiencyReport], list[str]], ...] = (
    _over_long,
    _too_short,
    _budget,
    _better_edges,
    _packing,
    _empty_buckets,
    _imbalance,
)


def _samples(count: int) -> str:
    return "1 sample is" if count == 1 else f"{count:,} samples are"
