"""What the lengths of a data set say about how to batch it."""

from batchwright.batching.analyze.report import (
    BucketAnalysis,
    BucketEfficiency,
    BucketSuggestion,
    EfficiencyReport,
    HistogramBin,
    LengthHistogram,
    OptimizationGoal,
    analyze_bucket_efficiency,
    compute_length_histogram,
    create_efficiency_report,
    suggest_bucket_edges,
)

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
