"""Batched environments: thousands of episodes in one process.

`api.py` is the protocol they all keep, `check.py` finds out whether they do, `cartpole.py` is the
one to copy; `prover.py` proves queries on a knowledge graph. `torchrl.py` and `gymnasium.py` show
any of them to other frameworks.
"""

from batchwright.envs.api import ArraySpec, Env, Obs, Step
from batchwright.envs.cartpole import CartPole
from batchwright.envs.check import check_env
from batchwright.envs.prover.env import BatchedVecEnv

__all__ = ["ArraySpec", "BatchedVecEnv", "CartPole", "Env", "Obs", "Step", "check_env"]
