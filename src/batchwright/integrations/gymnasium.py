"""A Gymnasium wrapper that rewards text actions by their score."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gymnasium

from batchwright.rewards.config import Missing, RewardsConfig
from batchwright.rewards.reward import Response
from batchwright.rewards.score import Scorer

__all__ = ["ScoredText", "response_of_action"]


def response_of_action(action: Any, observation: Any, info: Mapping[str, Any]) -> Response:
    """The action as a response to the observation before it, with the ground truth of `info`."""
    truth = info.get("ground_truth", info.get("truth"))
    return Response(str(action), truth, str(info.get("dataset", "")), str(observation), info)


class ScoredText(gymnasium.Wrapper):  # type: ignore[misc]
    """The reward of a step is the score of its text action.

    `info["reward_valid"]` says whether the reward is valid, `info["reward_why"]` why not;
    `info["reward_parts"]` has every column, `info["env_reward"]` the environment's own reward. An
    invalid reward is an error, unless `missing` (or that of the config) is `mask`, which makes it
    NaN, or a number. `response_of(action, observation, info)` makes the response to score from
    the observation that the agent acted on and the `info` of the step.
    """

    def __init__(
        self,
        env: Any,
        config: RewardsConfig | str | Path,
        *,
        missing: Missing | None = None,
        response_of: Callable[[Any, Any, Mapping[str, Any]], Response] = response_of_action,
    ) -> None:
        super().__init__(env)
        settings = config if isinstance(config, RewardsConfig) else RewardsConfig.load(config)
        self.scorer = Scorer(settings)
        self._missing = missing
        self._response_of = response_of
        self._observation: Any = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        self._observation, info = self.env.reset(seed=seed, options=options)
        return self._observation, info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, own, terminated, truncated, info = self.env.step(action)
        response = self._response_of(action, self._observation, info)
        (row,) = self.scorer.columns(self.scorer.score([response]), self._missing)
        self._observation = observation
        scored = {
            **info,
            "env_reward": own,
            "reward_valid": row["valid"],
            "reward_why": row["why"],
            "reward_parts": {name: row[name] for name in row if name not in ("valid", "why")},
        }
        return observation, float(row["score"]), terminated, truncated, scored

    def close(self) -> None:
        self.scorer.close()
        super().close()
