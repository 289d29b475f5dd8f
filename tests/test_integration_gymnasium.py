"""Text actions of a Gymnasium environment are rewarded by a scorer."""

import math
from typing import Any

import gymnasium
import pytest
from gymnasium.spaces import Text
from gymnasium.utils.env_checker import check_env

from batchwright.calls.simulator import Simulator
from batchwright.errors import BadReward
from batchwright.integrations.gymnasium import ScoredText
from batchwright.rewards import Response, RewardsConfig


class Sums(gymnasium.Env):
    """Three sums; the truth stands in `info` after each, for the last one it is spoilt."""

    observation_space = Text(20, charset="0123456789 +?")
    action_space = Text(20)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.number = 0
        return self._asked(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        truth = str(2 * self.number + 1) if self.number < 2 else "spoilt"
        self.number += 1
        return self._asked(), 0.0, self.number == 3, False, {"ground_truth": truth}

    def _asked(self) -> str:
        return f"{self.number} + {self.number + 1}?"


RULES = RewardsConfig.of({"part": [{"kind": "numeric", "weight": 2.0}]})


def test_each_step_is_scored_and_says_whether_it_counts() -> None:
    env = ScoredText(Sums(), RULES, missing="mask")
    observation, _ = env.reset(seed=1)
    assert observation == "0 + 1?"
    steps = [env.step(text) for text in ("it is 1", "4?", "5")]

    assert [step[1] for step in steps[:2]] == [2.0, 0.0]
    assert math.isnan(steps[2][1])
    infos = [step[4] for step in steps]
    assert [info["reward_valid"] for info in infos] == [True, True, False]
    assert [info["reward_why"] for info in infos] == ["", "", "bad_truth"]
    assert infos[0]["reward_parts"]["numeric_number"] == 1.0
    assert [step[2] for step in steps] == [False, False, True]
    env.close()


def test_without_a_choice_a_missing_reward_is_an_error() -> None:
    env = ScoredText(Sums(), RULES)
    env.reset()
    env.step("1")
    env.step("3")
    with pytest.raises(BadReward, match="bad_truth"):
        env.step("5")
    env.close()


def test_a_judge_sees_what_the_agent_saw() -> None:
    part = {
        "kind": "judge",
        "models": ["sim-judge"],
        "template": "Score: N from 0 to 10\nreference: {prompt}\n\nresponse: {response}",
    }
    with Simulator(latency_s=0.001).running() as url:
        config = RewardsConfig.of({"part": [part], "endpoints": [f"{url}/v1"]})
        env = ScoredText(
            Sums(),
            config,
            response_of=lambda action, seen, info: Response(action, prompt=seen, extra=info),
        )
        env.reset()
        # The simulator's judge counts the words of the reference in the response.
        assert env.step("0 + 1?")[1] == 1.0
        assert env.step("none of it")[1] == 0.0
        env.close()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_gymnasiums_own_check_finds_nothing_wrong() -> None:
    env = ScoredText(Sums(), RULES, missing=0.0)
    check_env(env, skip_render_check=True)
    env.close()
