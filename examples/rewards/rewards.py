"""The reward as a file, for trainers that load a function by path and name.

    custom_reward_function.path=rewards.py custom_reward_function.name=compute_score

The reward is configured by BATCHWRIGHT_REWARDS=rewards.toml, or by TRAIN_WITH_MONITOR and its
related variables. `compute_score` serves verl's batch and naive managers and any loop of your own;
`acompute_score` is the same as a coroutine, for verl's reward loop.
"""

from batchwright.integrations.verl import acompute_score, compute_score

__all__ = ["acompute_score", "compute_score"]
