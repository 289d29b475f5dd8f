"""Rules mined from a graph by counting."""

from batchwright.logic.mine.mining import (
    LONGEST,
    Chains,
    Mined,
    Steps,
    chains_of,
    mine,
    write_rules,
)

__all__ = ["LONGEST", "Chains", "Mined", "Steps", "chains_of", "mine", "write_rules"]
