"""The builder: lengths in, plan out."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from batchwright.batching.config import BatchingConfig
from batchwright.batching.plan.arrange import (
    LengthSource,
    Source,
    check_difficulty,
    join_sources,
)
from batchwright.batching.plan.plan import BatchPlan
from batchwright.data.lengths import Lengths
from batchwright.errors import ConfigError

__all__ = ["BatchPlanBuilder"]

MAX_EPOCHS = 2**31 - 1
"""Epochs are planned when they are asked for, so only a slip of the keyboard is refused here."""


class BatchPlanBuilder:
    """Builds plans from lengths.

    `weights` mixes several sources: 2.0 shows each sample twice an epoch, 0.5 half of them, a
    different half each epoch until all were seen. `difficulty`, one number a sample, orders an
    epoch in stages from easy to hard. Both are written out epoch by epoch; everything else is
    a virtual plan, which holds for any number of epochs.

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
    ) -> None:
        self.config = config or BatchingConfig()
        self.sources: tuple[Source, ...] = ()
        if weights is None:
            self.lengths = Lengths.of(lengths)  # type: ignore[arg-type]
        else:
            self.lengths, self.sources = join_sources(lengths, weights)  # type: ignore[arg-type]
        self.difficulty = check_difficulty(difficulty, len(self.lengths))
        if not len(self.lengths):
            raise ConfigError("there are no samples to plan; give at least one length")

    def build(self, num_epochs: int = 1) -> BatchPlan:
        """The plan. A sample over the limit follows `config.overflow`, and the plan counts it."""
        if num_epochs < 1:
            raise ConfigError(f"num_epochs must be at least 1, got {num_epochs}")
        if num_epochs > MAX_EPOCHS:
            raise ConfigError(f"num_epochs must be at most {MAX_EPOCHS:,}, got {num_epochs:,}")
        return BatchPlan.arranged(
            self.lengths, self.config, num_epochs, self.sources, self.difficulty
        )
