"""Policy, rollout, advantages and PPO; arrays are [T, B] everywhere."""

__all__: list[str] = []
