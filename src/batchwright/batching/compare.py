"""Every layout on the same samples, with batches of a fixed size as the baseline."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

import numpy as np

from batchwright import rng
from batchwright.batching.config import BatchingConfig, Layout
from batchwright.batching.plan.builder import BatchPlanBuilder
from batchwright.batching.plan.pieces import cut_pieces
from batchwright.batching.plan.plan import COST_LINEAR, COST_QUADRATIC, BatchPlan
from batchwright.data.lengths import Lengths
from batchwright.permutation import permutation

__all__ = ["LayoutRow", "compare_layouts", "fixed_row", "layout_row"]


@dataclass(frozen=True, slots=True)
class LayoutRow:
    """One layout in numbers."""

    layout: str
    microbatches: int
    bound: int
    """Microbatches that no layout can go below: useful tokens over the token budget.

    Batches of a fixed size ignore the budget, so their bound is at most their own number.
    """
    padded_tokens: int
    useful_tokens: int
    cost: int
    """Predicted compute of an epoch, in the unit that ranks are balanced by."""

    @property
    def efficiency(self) -> float:
        return self.useful_tokens / self.padded_tokens

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "efficiency": self.efficiency, "ullage": 1.0 - self.efficiency}


def compare_layouts(
    lengths: Lengths,
    config: BatchingConfig,
    fixed_rows: int = 8,
    layouts: Sequence[Layout] = get_args(Layout),
) -> list[LayoutRow]:
    """Each layout under the limits of `config`, after batches of `fixed_rows` in random order.

    The layouts get the same budget and overflow policy, and the packed one rows as wide as the
    padded ones may be, so the rows of the table plan the same tokens.
    """
    limit = config.limit
    rows = [fixed_row(lengths, config, fixed_rows)]
    for layout in layouts:
        changed = config.model_copy(
            update={
                "layout": layout,
                "pack_max_length": limit,
                "overflow_max": limit,
                # Narrow packed rows may end below the last of the default edges.
                "bucket_edges": tuple(edge for edge in config.bucket_edges if edge <= limit),
                "drop_last": config.drop_last and layout == "bucketed",
            }
        )
        rows.append(layout_row(BatchPlanBuilder(lengths, changed).build()))
    return rows


def layout_row(plan: BatchPlan) -> LayoutRow:
    """The numbers of one plan in epoch 0."""
    useful = plan.useful_tokens(0)
    return LayoutRow(
        layout=plan.config.layout,
        microbatches=plan.num_microbatches(0),
        bound=-(-useful // plan.config.token_budget),
        padded_tokens=plan.padded_tokens(0),
        useful_tokens=useful,
        cost=int(plan.costs(0).sum()),
    )


def fixed_row(lengths: Lengths, config: BatchingConfig, fixed_rows: int = 8) -> LayoutRow:
    """Batches of a fixed number of samples in random order, padded to the longest of each."""
    pieces = cut_pieces(lengths, config).lengths.astype(np.int64)
    key = np.uint64(rng.key(config.seed, "compare/fixed"))
    shuffled = pieces[permutation(pieces.size, key)]
    starts = np.arange(0, shuffled.size, fixed_rows)
    width = np.maximum.reduceat(shuffled, starts)
    size = np.diff(np.append(starts, shuffled.size))
    useful = int(pieces.sum())
    return LayoutRow(
        layout=f"fixed, {fixed_rows} rows",
        microbatches=starts.size,
        bound=min(starts.size, -(-useful // config.token_budget)),
        padded_tokens=int(width @ size),
        useful_tokens=useful,
        cost=int(COST_LINEAR * (width @ size) + COST_QUADRATIC * (width**2 @ size)),
    )
