"""Batched environments: thousands of episodes in one process.

`api.py` is the protocol they all implement, `check.py` checks that they do, `cartpole.py` is the
one to copy; `prover/` proves queries on a knowledge graph, `query_mutation/` rewrites questions.
`torchrl.py` and `gymnasium.py` wrap any of them for other frameworks.
"""

from batchwright.envs.api import ArraySpec, Env, Obs, Step
from batchwright.envs.cartpole import CartPole
from batchwright.envs.check import check_env
from batchwright.envs.prover.env import BatchedVecEnv
from batchwright.envs.query_mutation.named import BatchedQueryMutationEnv, QueryMutationEnv

__all__ = [
    "ArraySpec",
    "BatchedQueryMutationEnv",
    "BatchedVecEnv",
    "CartPole",
    "Env",
    "Obs",
    "QueryMutationEnv",
    "Step",
    "check_env",
]
