"""Proving as a batched environment."""

from batchwright.envs.prover.env import END, FACT, NEXT, REWARDS, RULE, BatchedVecEnv
from batchwright.envs.prover.settings import ASKS, Ask, auto_batch, check_settings, checked, scheme

__all__ = [
    "ASKS",
    "END",
    "FACT",
    "NEXT",
    "REWARDS",
    "RULE",
    "Ask",
    "BatchedVecEnv",
    "auto_batch",
    "check_settings",
    "checked",
    "scheme",
]
