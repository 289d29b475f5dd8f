"""The reward as a file, for trainers that take a path and a name.

    custom_reward_function.path=rewards.py custom_reward_function.name=compute_score

What is scored is set by BATCHWRIGHT_REWARDS=rewards.toml, or by TRAIN_WITH_MONITOR and its
neighbours. `compute_score` serves verl's batch and naive managers and any loop of your own;
`acompute_score` is the same as a coroutine, for verl's reward loop.
"""

from batchwright.integrations.verl import acompute_score, compute_score

__all__ = ["acompute_score", "compute_score"]
