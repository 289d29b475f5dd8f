"""Training of knowledge graph embeddings."""

from typing import TYPE_CHECKING

from batchwright.lazy import lazy_names

__all__ = [
    "KgeResult",
    "KgeTrainer",
    "fit_kge",
    "load_scorer",
    "read_rules",
    "train_kge",
    "vocab_digest",
]

if TYPE_CHECKING:
    from batchwright.logic.kge import load_scorer, read_rules, vocab_digest
    from batchwright.train.kge.loop import KgeResult, KgeTrainer, fit_kge, train_kge
else:
    # Both need torch; the settings next to them, which a command's help is made from, do not.
    __getattr__ = lazy_names(__name__, "batchwright.logic.kge", "batchwright.train.kge.loop")
