"""Rewriting questions as a batched environment."""

from batchwright.calls.queries import NO_ANSWER
from batchwright.envs.query_mutation.env import (
    BatchedQueryMutationEnv,
    Failures,
    Rate,
    Runs,
    Score,
    Turn,
)

__all__ = ["NO_ANSWER", "BatchedQueryMutationEnv", "Failures", "Rate", "Runs", "Score", "Turn"]
