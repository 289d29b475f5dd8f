"""Batches of a token budget straight from lengths, without a plan on disk."""

from collections.abc import Iterator

from batchwright.batching.analyze.metrics import BatchMetrics
from batchwright.batching.buckets import BucketSpec
from batchwright.batching.config import BatchingConfig, Overflow, PadPolicy
from batchwright.batching.plan.arrange import LengthSource
from batchwright.batching.plan.builder import BatchPlanBuilder
from batchwright.batching.plan.microbatch import BatchSpec, Pulled
from batchwright.batching.plan.plan import BatchPlan

__all__ = ["TokenBudgetBatchSampler"]


class TokenBudgetBatchSampler:
    """Groups samples of one bucket into batches of at most `token_budget` padded tokens.

    Every epoch has its own order, which does not depend on the order of `lengths`. A sample
    longer than `bucket_spec.overflow_max` or the budget follows `overflow`; `num_skipped` counts
    what was left out.

    >>> sampler = TokenBudgetBatchSampler({"a": 3, "b": 4, "c": 9}, BucketSpec((4,), 10), 16)
    >>> sorted(batch.sample_ids for batch in sampler.iter_epoch(0))
    [('a', 'b'), ('c',)]
    """

    def __init__(
        self,
        lengths: LengthSource,
        bucket_spec: BucketSpec,
        token_budget: int,
        seed: int = 42,
        drop_last: bool = False,
        *,
        overflow: Overflow = "error",
        pad_policy: PadPolicy = PadPolicy.PAD_TO_BUCKET,
    ) -> None:
        self.bucket_spec = bucket_spec
        self._builder = BatchPlanBuilder(
            lengths,
            BatchingConfig(
                token_budget=token_budget,
                bucket_edges=bucket_spec.edges,
                overflow_max=bucket_spec.overflow_max,
                min_length=bucket_spec.min_length,
                overflow=overflow,
                pad_policy=pad_policy,
                seed=seed,
                drop_last=drop_last,
            ),
        )
        self._plan = self._builder.build()

    def iter_epoch(self, epoch: int = 0, interleave_buckets: bool = True) -> Pulled[BatchSpec]:
        """The batches of an epoch, for `for` and `async for`."""
        plan = self._plan if interleave_buckets else self._in_bucket_order()
        return Pulled(lambda: _specs(plan, epoch))

    def estimate_batches_per_epoch(self) -> int:
        """How many batches an epoch has; exact, and the same for every epoch."""
        return self._plan.num_microbatches()

    def get_bucket_distribution(self) -> dict[int, int]:
        """Planned samples of each bucket."""
        stats = self.compute_metrics().bucket_stats
        return {bucket: stat.sample_count for bucket, stat in stats.items()}

    def compute_metrics(self, epoch: int = 0) -> BatchMetrics:
        """How full the batches of an epoch are."""
        return BatchMetrics.of(self._plan.iter_epoch(epoch), skipped_samples=self.num_skipped)

    @property
    def num_skipped(self) -> int:
        """Samples that are in no batch of any epoch."""
        return len(self._plan.skipped)

    def _in_bucket_order(self) -> BatchPlan:
        config = self._builder.config.model_copy(update={"interleave_buckets": False})
        return BatchPlanBuilder(self._builder.lengths, config).build()


def _specs(plan: BatchPlan, epoch: int) -> Iterator[BatchSpec]:
    for batch in plan.iter_epoch(epoch):
        yield BatchSpec(batch.samples, batch.bucket_id, batch.max_len, batch.token_count)
