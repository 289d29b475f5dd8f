"""Lengths in, batches out: the data engine.

    lengths -> buckets or packing -> plan -> microbatches -> arrays

`builder.py` is where the steps meet.
"""

from batchwright.batching.analyze.metrics import BatchMetrics, BatchShapeHistogram
from batchwright.batching.analyze.report import (
    BucketAnalysis,
    BucketEfficiency,
    BucketSuggestion,
    EfficiencyReport,
    LengthHistogram,
    OptimizationGoal,
    analyze_bucket_efficiency,
    compute_length_histogram,
    create_efficiency_report,
    suggest_bucket_edges,
)
from batchwright.batching.batchfiles import BatchReader, BatchWriter
from batchwright.batching.buckets import BucketSpec, BucketStats
from batchwright.batching.collate import CollatedBatch, collate
from batchwright.batching.compare import LayoutRow, compare_layouts
from batchwright.batching.config import BatchingConfig, BatchingMode, PadPolicy
from batchwright.batching.packing.bins import (
    Packing,
    PackingMode,
    PackingProof,
    StreamingPacker,
    pack_lengths,
    verify_packing,
)
from batchwright.batching.packing.sequences import (
    PackedSequence,
    PackingConfig,
    PackingMetrics,
    SequenceToPack,
    create_segment_attention_mask,
    pack_sequences,
    pack_with_metrics,
    verify_packed,
)
from batchwright.batching.plan.builder import BatchPlanBuilder
from batchwright.batching.plan.microbatch import MicrobatchSpec
from batchwright.batching.plan.plan import BatchPlan, EpochPlan, Placement, Step
from batchwright.batching.plan.proofs import (
    BatchFingerprint,
    PlanDiff,
    compute_batch_fingerprint,
    verify_batch_fingerprint,
)
from batchwright.batching.plan.shards import (
    CheckpointPosition,
    DistributedConfig,
    balance,
    interleave_microbatches,
    iter_from_checkpoint,
    shard_batch_plan,
)
from batchwright.batching.sampler import BatchSpec, TokenBudgetBatchSampler
from batchwright.data.lengths import LengthCache, LengthEntry

__all__ = [
    "BatchFingerprint",
    "BatchMetrics",
    "BatchPlan",
    "BatchPlanBuilder",
    "BatchReader",
    "BatchShapeHistogram",
    "BatchSpec",
    "BatchWriter",
    "BatchingConfig",
    "BatchingMode",
    "BucketAnalysis",
    "BucketEfficiency",
    "BucketSpec",
    "BucketStats",
    "BucketSuggestion",
    "CheckpointPosition",
    "CollatedBatch",
    "DistributedConfig",
    "EfficiencyReport",
    "EpochPlan",
    "LayoutRow",
    "LengthCache",
    "LengthEntry",
    "LengthHistogram",
    "MicrobatchSpec",
    "OptimizationGoal",
    "PackedSequence",
    "Packing",
    "PackingConfig",
    "PackingMetrics",
    "PackingMode",
    "PackingProof",
    "PadPolicy",
    "Placement",
    "PlanDiff",
    "SequenceToPack",
    "Step",
    "StreamingPacker",
    "TokenBudgetBatchSampler",
    "analyze_bucket_efficiency",
    "balance",
    "collate",
    "compare_layouts",
    "compute_batch_fingerprint",
    "compute_length_histogram",
    "create_efficiency_report",
    "create_segment_attention_mask",
    "interleave_microbatches",
    "iter_from_checkpoint",
    "pack_lengths",
    "pack_sequences",
    "pack_with_metrics",
    "shard_batch_plan",
    "suggest_bucket_edges",
    "verify_batch_fingerprint",
    "verify_packed",
    "verify_packing",
]
