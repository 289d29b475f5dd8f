"""What the lengths of a data set say about how to batch it."""

from typing import TYPE_CHECKING

from batchwright.lazy import lazy_names

__all__ = [
    "BucketAnalysis",
    "BucketEfficiency",
    "BucketSuggestion",
    "EfficiencyReport",
    "HistogramBin",
    "LengthHistogram",
    "OptimizationGoal",
    "analyze_bucket_efficiency",
    "compute_length_histogram",
    "create_efficiency_report",
    "suggest_bucket_edges",
]

if TYPE_CHECKING:
    from batchwright.batching.analyze.advice import EfficiencyReport
    from batchwright.batching.analyze.findings import (
        BucketAnalysis,
        BucketEfficiency,
        BucketSuggestion,
        HistogramBin,
        LengthHistogram,
        OptimizationGoal,
    )
    from batchwright.batching.analyze.report import (
        analyze_bucket_efficiency,
        compute_length_histogram,
        create_efficiency_report,
        suggest_bucket_edges,
    )
else:
    # A command imports the modules it needs and pays for no other.
    __getattr__ = lazy_names(
        __name__,
        "batchwright.batching.analyze.findings",
        "batchwright.batching.analyze.report",
        "batchwright.batching.analyze.advice",
    )
