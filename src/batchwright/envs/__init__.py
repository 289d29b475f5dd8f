"""Batched environments: thousands of episodes in one process.

`api.py` is the protocol they all keep; `prover.py` proves queries on a knowledge graph.
"""

from batchwright.envs.api import ArraySpec, Env, Obs, Step

__all__ = ["ArraySpec", "Env", "Obs", "Step"]
