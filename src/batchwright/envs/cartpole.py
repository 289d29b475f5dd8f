"""CartPole as B environments in one numba kernel: the environment to copy when writing your own.

The dynamics, the bounds and the limit of 500 steps are those of Gymnasium's CartPole-v1. Copy
from it the five things that every environment here does: random numbers that depend on (seed,
environment, episode) and on nothing else, so that environment 3 has the same episodes whatever
`num_envs` is; a same-step reset that leaves the last observation in `final_obs`; `truncated` for
the time limit and `terminated` for the fall, never both; actions outside the mask that are counted
and do not raise; and a `state_dict` that is all the next step depends on. Then run
`batchwright.envs.check_env` on yours.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright import rng
from batchwright.envs.api import ArraySpec, Obs, Step, as_actions, require_state
from batchwright.errors import ConfigError
from batchwright.jit import kernel
from batchwright.permutation import mix

__all__ = ["CartPole"]

LIMIT = 500


class CartPole:
    """Keep a pole upright on a cart: 1 for each step until it falls, or for 500 steps.

    >>> env = CartPole(num_envs=2, seed=0)
    >>> env.reset()["features"].shape
    (2, 4)
    >>> env.step(np.array([0, 1])).reward.tolist()
    [1.0, 1.0]
    """

    def __init__(self, num_envs: int, *, seed: int = 0, max_steps: int = LIMIT) -> None:
        if num_envs < 1 or max_steps < 1:
            raise ConfigError(
                f"num_envs and max_steps must be at least 1, got {num_envs} and {max_steps}"
            )
        self._key = np.uint64(rng.key(seed, "cartpole"))
        self._max_steps = max_steps
        self._state = np.zeros((num_envs, 4), np.float64)
        self._steps = np.zeros(num_envs, np.int64)
        self._episodes = np.zeros(num_envs, np.int64)
        self._invalid_actions = np.zeros(num_envs, np.int64)

    @property
    def num_envs(self) -> int:
        return len(self._steps)

    @property
    def num_actions(self) -> int:
        return 2

    @property
    def spec(self) -> Mapping[str, ArraySpec]:
        return {
            "features": ArraySpec((4,), np.dtype(np.float32)),
            "mask": ArraySpec((2,), np.dtype(np.bool_)),
        }

    def set_seed(self, seed: int) -> None:
        self._key = np.uint64(rng.key(seed, "cartpole"))
        for array in (self._state, self._steps, self._episodes, self._invalid_actions):
            array[:] = 0

    def reset(self, where: NDArray[np.bool_] | None = None) -> Obs:
        if where is None:
            where = np.ones(self.num_envs, np.bool_)
        for env in np.flatnonzero(where).tolist():
            _begin(self._key, env, self._state, self._steps, self._episodes)
        return self._observed(self._state)

    def step(self, actions: NDArray[np.integer[Any]]) -> Step:
        B = self.num_envs
        final = np.empty((B, 4), np.float64)
        terminated, truncated = np.empty(B, np.bool_), np.empty(B, np.bool_)
        _step(
            as_actions(actions, B),
            self._key,
            self._max_steps,
            self._state,
            self._steps,
            self._episodes,
            self._invalid_actions,
            final,
            terminated,
            truncated,
        )
        return Step(
            obs=self._observed(self._state),
            reward=np.ones(B, np.float32),
            terminated=terminated,
            truncated=truncated,
            valid=np.ones(B, np.bool_),
            final_obs=self._observed(final),
            info={"invalid_actions": self._invalid_actions.copy()},
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "key": int(self._key),
            "state": self._state.copy(),
            "steps": self._steps.copy(),
            "episodes": self._episodes.copy(),
            "invalid_actions": self._invalid_actions.copy(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        require_state(state, ("key", "state", "steps", "episodes", "invalid_actions"))
        self._key = np.uint64(state["key"])
        self._state[:] = state["state"]
        self._steps[:] = state["steps"]
        self._episodes[:] = state["episodes"]
        self._invalid_actions[:] = state["invalid_actions"]

    def _observed(self, state: NDArray[np.float64]) -> Obs:
        return {
            "features": state.astype(np.float32),
            "mask": np.ones((self.num_envs, 2), np.bool_),
        }


@kernel
def _begin(
    key: np.uint64,
    env: int,
    state: NDArray[np.float64],
    steps: NDArray[np.int64],
    episodes: NDArray[np.int64],
) -> None:
    """A new episode in one environment; its start depends on (key, env, episode) alone."""
    episode_key = mix(mix(key, np.uint64(env)), np.uint64(episodes[env]))
    for i in range(4):
        bits = mix(episode_key, np.uint64(i)) >> np.uint64(11)
        state[env, i] = np.float64(bits) * 2.0**-53 * 0.1 - 0.05
    steps[env] = 0
    episodes[env] += 1


@kernel
def _step(
    actions: NDArray[np.int64],
    key: np.uint64,
    max_steps: int,
    state: NDArray[np.float64],
    steps: NDArray[np.int64],
    episodes: NDArray[np.int64],
    invalid_actions: NDArray[np.int64],
    final: NDArray[np.float64],
    terminated: NDArray[np.bool_],
    truncated: NDArray[np.bool_],
) -> None:
    gravity, pole, half_length, force, tau = 9.8, 0.1, 0.5, 10.0, 0.02
    total = 1.1  # the cart weighs 1
    for b in range(len(actions)):
        invalid_actions[b] += not 0 <= actions[b] <= 1
        push = force if actions[b] == 1 else -force
        x, x_dot, theta, theta_dot = state[b]
        sine, cosine = np.sin(theta), np.cos(theta)
        swing = (push + pole * half_length * theta_dot**2 * sine) / total
        turn = (gravity * sine - cosine * swing) / (
            half_length * (4.0 / 3.0 - pole * cosine**2 / total)
        )
        slide = swing - pole * half_length * turn * cosine / total
        state[b, 0] = x + tau * x_dot
        state[b, 1] = x_dot + tau * slide
        state[b, 2] = theta + tau * theta_dot
        state[b, 3] = theta_dot + tau * turn
        steps[b] += 1
        fell = abs(state[b, 0]) > 2.4 or abs(state[b, 2]) > 12 * 2 * np.pi / 360
        terminated[b] = fell
        truncated[b] = steps[b] >= max_steps and not fell
        final[b] = state[b]
        if terminated[b] or truncated[b]:
            _begin(key, b, state, steps, episodes)
