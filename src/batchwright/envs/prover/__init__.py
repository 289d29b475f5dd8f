"""Proving as a batched environment: `ProverEnv` on arrays, `BatchedVecEnv` on TensorDicts."""

from typing import TYPE_CHECKING

from batchwright.envs.prover.env import END, FACT, NEXT, REWARDS, RULE, ProverEnv
from batchwright.envs.prover.settings import (
    ASKS,
    Ask,
    Ended,
    auto_batch,
    check_settings,
    checked,
    scheme,
)
from batchwright.lazy import lazy_names

__all__ = [
    "ASKS",
    "END",
    "FACT",
    "NEXT",
    "REWARDS",
    "RULE",
    "Ask",
    "BatchedVecEnv",
    "Ended",
    "ProverEnv",
    "auto_batch",
    "check_settings",
    "checked",
    "scheme",
]

if TYPE_CHECKING:
    from batchwright.envs.prover.batched import BatchedVecEnv
else:
    # It needs TorchRL; the environment on arrays does not.
    __getattr__ = lazy_names(__name__, "batchwright.envs.prover.batched")
