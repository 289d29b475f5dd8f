"""Rewriting questions as a batched environment."""

from batchwright.calls.queries import NO_ANSWER
from batchwright.envs.query_mutation.env import (
    Failures,
    MutationPipelines,
    Rate,
    Runs,
    Score,
    Turn,
)
from batchwright.envs.query_mutation.named import BatchedQueryMutationEnv, QueryMutationEnv

__all__ = [
    "NO_ANSWER",
    "BatchedQueryMutationEnv",
    "Failures",
    "MutationPipelines",
    "QueryMutationEnv",
    "Rate",
    "Runs",
    "Score",
    "Turn",
]
