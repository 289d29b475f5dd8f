"""The batch plan: built, ordered, divided over ranks, kept on disk and proved."""

from typing import TYPE_CHECKING

from batchwright.lazy import lazy_names

__all__ = ["BatchPlan", "Counts", "EpochPlan", "Placement", "Pulled", "Step"]

if TYPE_CHECKING:
    from batchwright.batching.plan.microbatch import Placement, Pulled, Step
    from batchwright.batching.plan.pieces import Counts
    from batchwright.batching.plan.plan import BatchPlan, EpochPlan
else:
    # A command imports the modules it needs and pays for no other.
    __getattr__ = lazy_names(
        __name__,
        "batchwright.batching.plan.microbatch",
        "batchwright.batching.plan.pieces",
        "batchwright.batching.plan.plan",
    )
