"""Lengths in, batches out: the data engine.

    lengths -> buckets or packing -> plan -> microbatches -> arrays

`plan/arrange.py` is where the steps meet.
"""

from typing import TYPE_CHECKING

from batchwright.lazy import lazy_names

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

if TYPE_CHECKING:
    from batchwright.batching.analyze.advice import EfficiencyReport
    from batchwright.batching.analyze.findings import (
        BucketAnalysis,
        BucketEfficiency,
        BucketSuggestion,
        LengthHistogram,
        OptimizationGoal,
    )
    from batchwright.batching.analyze.metrics import BatchMetrics, BatchShapeHistogram
    from batchwright.batching.analyze.report import (
        analyze_bucket_efficiency,
        compute_length_histogram,
        create_efficiency_report,
        suggest_bucket_edges,
    )
    from batchwright.batching.batchfiles import BatchReader, BatchWriter
    from batchwright.batching.buckets import BucketSpec, BucketStats
    from batchwright.batching.collation import CollatedBatch, collate
    from batchwright.batching.compare import LayoutRow, compare_layouts
    from batchwright.batching.config import BatchingConfig, BatchingMode, PadPolicy
    from batchwright.batching.packing.bins import (
        Packing,
        PackingProof,
        StreamingPacker,
        pack_lengths,
        verify_packing,
    )
    from batchwright.batching.packing.modes import PackingMode
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
    from batchwright.batching.plan.microbatch import BatchSpec, MicrobatchSpec, Placement, Step
    from batchwright.batching.plan.plan import (
        BatchPlan,
        EpochPlan,
        iter_from_checkpoint,
        shard_batch_plan,
    )
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
    )
    from batchwright.batching.sampler import TokenBudgetBatchSampler
    from batchwright.data.lengths.cache import LengthCache, LengthEntry
else:
    # A command imports the modules it needs and pays for no other.
    __getattr__ = lazy_names(
        __name__,
        "batchwright.batching.buckets",
        "batchwright.batching.packing.modes",
        "batchwright.batching.config",
        "batchwright.batching.plan.microbatch",
        "batchwright.batching.plan.shards",
        "batchwright.batching.plan.plan",
        "batchwright.batching.plan.builder",
        "batchwright.batching.plan.proofs",
        "batchwright.batching.packing.bins",
        "batchwright.batching.packing.sequences",
        "batchwright.batching.collation",
        "batchwright.batching.batchfiles",
        "batchwright.batching.analyze.metrics",
        "batchwright.batching.analyze.findings",
        "batchwright.batching.analyze.report",
        "batchwright.batching.analyze.advice",
        "batchwright.batching.sampler",
        "batchwright.batching.compare",
        "batchwright.data.lengths.cache",
    )
