"""Training of a prover on a knowledge graph."""

from typing import TYPE_CHECKING

from batchwright.lazy import lazy_names

__all__ = ["ProverResult", "fit_prover", "load_prover", "train_prover"]

if TYPE_CHECKING:
    from batchwright.train.prover.loop import ProverResult, fit_prover, load_prover, train_prover
else:
    # The loop needs torch; the settings beside it, which a command's help is made from, do not.
    __getattr__ = lazy_names(__name__, "batchwright.train.prover.loop")
