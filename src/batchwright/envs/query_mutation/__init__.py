"""Rewriting questions as a batched environment."""

from batchwright.envs.query_mutation.env import (
    NO_ANSWER,
    BatchedQueryMutationEnv,
    Failures,
    Rate,
    Runs,
    Score,
    Turn,
)

__all__ = ["NO_ANSWER", "BatchedQueryMutationEnv", "Failures", "Rate", "Runs", "Score", "Turn"]
