"""Batched environments: thousands of episodes in one process.

`api.py` is the protocol they all implement, `check.py` checks that they do, `cartpole.py` is the
one to copy; `prover/` proves queries on a knowledge graph, `query_mutation/` rewrites questions.
`torchrl.py` and `gymnasium.py` wrap any of them for other frameworks.
"""

from typing import TYPE_CHECKING

from batchwright.envs.api import ArraySpec, Env, Obs, Step
from batchwright.envs.cartpole import CartPole
from batchwright.envs.check import check_env
from batchwright.envs.prover.env import ProverEnv
from batchwright.envs.query_mutation.named import BatchedQueryMutationEnv, QueryMutationEnv
from batchwright.lazy import lazy_names

__all__ = [
    "ArraySpec",
    "BatchedQueryMutationEnv",
    "BatchedVecEnv",
    "CartPole",
    "Env",
    "Obs",
    "ProverEnv",
    "QueryMutationEnv",
    "Step",
    "check_env",
]

if TYPE_CHECKING:
    from batchwright.envs.prover.batched import BatchedVecEnv
else:
    # It needs TorchRL; the environments on arrays do not.
    __getattr__ = lazy_names(__name__, "batchwright.envs.prover.batched")
