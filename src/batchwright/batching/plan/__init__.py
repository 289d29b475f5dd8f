"""The batch plan: built, ordered, divided over ranks, kept on disk and proved."""

from batchwright.batching.plan.plan import BatchPlan, Counts, EpochPlan, Placement, Pulled, Step

__all__ = ["BatchPlan", "Counts", "EpochPlan", "Placement", "Pulled", "Step"]
