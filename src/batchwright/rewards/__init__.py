"""Responses in, rewards with a validity bit out.

    responses -> requests of all parts -> outcomes -> parts -> rewards

`score.py` is where these steps come together.
"""

from batchwright.rewards.advantages import group_advantages
from batchwright.rewards.agreement import Agreement, agreement
from batchwright.rewards.compute import acompute_score, compute_score
from batchwright.rewards.config import RewardsConfig
from batchwright.rewards.expressions import Math
from batchwright.rewards.model_rules import Judge, Monitor, Similarity
from batchwright.rewards.reward import Part, Response, Reward
from batchwright.rewards.rules import (
    Contains,
    Correctness,
    Exact,
    Format,
    JsonSchema,
    Numeric,
    Pattern,
    Rule,
    Verbosity,
)
from batchwright.rewards.score import Scorer, ascore_all, score_all

__all__ = [
    "Agreement",
    "Contains",
    "Correctness",
    "Exact",
    "Format",
    "JsonSchema",
    "Judge",
    "Math",
    "Monitor",
    "Numeric",
    "Part",
    "Pattern",
    "Response",
    "Reward",
    "RewardsConfig",
    "Rule",
    "Scorer",
    "Similarity",
    "Verbosity",
    "acompute_score",
    "agreement",
    "ascore_all",
    "compute_score",
    "group_advantages",
    "score_all",
]
