"""Policy, rollout, advantages and PPO; arrays are [T, B] everywhere."""

from batchwright.rl.gae import gae
from batchwright.rl.policy import Encoder, FeatureEncoder, GoalEncoder, Policy, choose, policy_for
from batchwright.rl.ppo import PPO, PPOConfig
from batchwright.rl.rollout import Collector, Rollout, Runner

__all__ = [
    "PPO",
    "Collector",
    "Encoder",
    "FeatureEncoder",
    "GoalEncoder",
    "PPOConfig",
    "Policy",
    "Rollout",
    "Runner",
    "choose",
    "gae",
    "policy_for",
]
