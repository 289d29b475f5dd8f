"""PPO towards the likelihood of the answer that is looked for, instead of the expected reward.

The expected reward is highest for a policy that always gives its surest answer, while a ranking
needs all probable answers, in their order. With P the probability of the answer looked for, the
gradient of log P is that of P divided by P. So the reward is 1 for this answer, P is what the
critic says of the query, and advantages are divided by it. Other known answers, which the filtered
ranking leaves out as well, are neither right nor wrong: their last step is not trained on.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.envs.api import Step
from batchwright.envs.prover.env import BatchedVecEnv
from batchwright.rl.policy import Policy
from batchwright.rl.rollout import Finals, Rollout, Runner

__all__ = ["AnswerEnv", "LikelihoodRunner"]

LEAST = 0.02
"""The lowest probability that advantages are divided by."""


class AnswerEnv(BatchedVecEnv):
    """Rewards 1 for a proof of the answer looked for; a proof of another fact is not valid."""

    def step(self, actions: NDArray[np.integer[Any]]) -> Step:
        step = super().step(actions)
        proven, wanted = step.info["proven"], self.queries[step.info["query_index"], 2]
        own = proven & (step.info["answer"] == wanted)
        step.valid[:] &= own | ~proven | (step.reward <= 0)
        step.reward[:] = own
        return step


class LikelihoodRunner(Runner):
    """Weighs the steps of an episode by 1 / the value of its first state."""

    def __init__(self, env: BatchedVecEnv, num_steps: int, *, seed: int = 0) -> None:
        super().__init__(env, num_steps, seed=seed)
        self._began = np.zeros(env.num_envs, np.float32)
        self._fresh = np.ones(env.num_envs, np.bool_)

    def state_dict(self) -> dict[str, Any]:
        own = {"began": self._began.copy(), "fresh": self._fresh.copy()}
        return super().state_dict() | own

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._began[:], self._fresh[:] = state["began"], state["fresh"]

    def _add_values(self, out: Rollout, policy: Policy, finals: Finals) -> None:
        super()._add_values(out, policy, finals)
        ended = out.terminated | out.truncated
        for t, values in enumerate(out.values):
            self._began[self._fresh] = values[self._fresh]
            out.weights[t] = 1 / np.maximum(self._began, np.float32(LEAST))
            self._fresh = ended[t]
