"""The builder: lengths in, plan out."""

from collections.abc import Hashable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from batchwright.batching.config import BatchingConfig
from batchwright.batching.plan.arrange import (
    LengthSource,
    Source,
    check_costs,
    check_difficulty,
    join_sources,
)
from batchwright.batching.plan.groups import Groups
from batchwright.batching.plan.order import MAX_EPOCHS
from batchwright.batching.plan.plan import BatchPlan
from batchwright.data.lengths import Lengths
from batchwright.errors import ConfigError

__all__ = ["BatchPlanBuilder"]


class BatchPlanBuilder:
    """Builds plans from lengths.

    `weights` mixes several sources: 2.0 shows each sample twice an epoch, 0.5 half of them, a
    different half each epoch until all were seen. `difficulty`, one number a sample, orders an
    epoch in stages from easy to hard. Samples with equal `groups` stand in the same microbatch, so
    on the same rank and in the same step; None is no group. All three are written out epoch by
    epoch; everything else is a virtual plan, which holds for any number of epochs. `costs` are
    tokens that a sample takes up beside its own, such as those of its images.

    >>> builder = BatchPlanBuilder({"a": 5, "b": 3, "c": 4}, BatchingConfig(token_budget=10,
    ...     layout="packed", pack_max_length=10))
    >>> builder.build(num_epochs=2)
    BatchPlan(3 samples, 2 microbatches, 60.0% useful, packed, seed=42, id=...)
    """

    def __init__(
        self,
        lengths: LengthSource | Mapping[str, LengthSource],
        config: BatchingConfig | None = None,
        *,
        weights: Mapping[str, float] | None = None,
        difficulty: Sequence[float] | NDArray[np.floating] | None = None,
        groups: Sequence[Hashable] | NDArray[np.generic] | None = None,
        costs: Sequence[int] | NDArray[np.integer] | None = None,
    ) -> None:
        self.config = config or BatchingConfig()
        self.sources: tuple[Source, ...] = ()
        if weights is None:
            self.lengths = Lengths.of(lengths)  # type: ignore[arg-type]
        else:
            self.lengths, self.sources = join_sources(lengths, weights)  # type: ignore[arg-type]
        self.difficulty = check_difficulty(difficulty, len(self.lengths))
        self.costs = check_costs(costs, len(self.lengths))
        self.groups = None if groups is None else Groups.of(groups, len(self.lengths))
        if self.groups is not None and (self.sources or self.difficulty is not None):
            raise ConfigError(
                "groups cannot be kept together in a mixture or a curriculum, which show samples "
                "one by one; leave out groups, or weights and difficulty"
            )
        if self.groups is not None and self.config.drop_last:
            raise ConfigError("drop_last would drop groups at random; leave it out with groups")
        if not len(self.lengths):
            raise ConfigError("there are no samples to plan; give at least one length")

    def build(self, num_epochs: int = 1) -> BatchPlan:
        """The plan. A sample over the limit follows `config.overflow`, and the plan counts it."""
        if num_epochs < 1:
            raise ConfigError(f"num_epochs must be at least 1, got {num_epochs}")
        if num_epochs > MAX_EPOCHS:
            raise ConfigError(f"num_epochs must be at most {MAX_EPOCHS:,}, got {num_epochs:,}")
        return BatchPlan.arranged(
            self.lengths,
            self.config,
            num_epochs,
            self.sources,
            self.difficulty,
            self.groups,
            self.costs,
        )
