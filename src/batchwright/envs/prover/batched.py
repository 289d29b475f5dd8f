"""The prover's environment on TensorDicts: thin over `ProverEnv`, which does the work on arrays."""

from typing import Any, Literal

from numpy.typing import ArrayLike

from batchwright.envs.prover.env import ProverEnv
from batchwright.envs.torchrl import TorchRLEnv
from batchwright.logic.facts import Facts
from batchwright.logic.rules import Rules

__all__ = ["BatchedVecEnv"]


class BatchedVecEnv(TorchRLEnv):
    """`batch_size` queries proved at once in one process, as a TorchRL `EnvBase`.

    `reset()` and `step(td)` give TensorDicts with the batch size [B], which `batch_size[0]` reads;
    `rollout`, collectors, transforms and losses of TorchRL work on it. All settings are those of
    `ProverEnv`, which is `.env` and which our own PPO steps without a TensorDict in between.
    """

    env: ProverEnv

    def __init__(
        self,
        facts: Facts,
        rules: Rules,
        queries: ArrayLike,
        batch_size: int | Literal["auto"] = "auto",
        **settings: Any,
    ) -> None:
        super().__init__(ProverEnv(facts, rules, queries, batch_size, **settings))
