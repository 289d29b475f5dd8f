"""Batched environments: thousands of episodes in one process.

`api.py` is the protocol they all implement, `check.py` checks that they do, `cartpole.py` is the
one to copy; `prover/` proves queries on a knowledge graph. `torchrl.py` and `gymnasium.py` wrap any
of them for other frameworks.
"""

from batchwright.envs.api import ArraySpec, Env, Obs, Step
from batchwright.envs.cartpole import CartPole
from batchwright.envs.check import check_env
from batchwright.envs.prover.env import BatchedVecEnv

__all__ = ["ArraySpec", "BatchedVecEnv", "CartPole", "Env", "Obs", "Step", "check_env"]
