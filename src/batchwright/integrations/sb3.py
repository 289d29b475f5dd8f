"""Any batched environment as a `VecEnv` of Stable-Baselines3."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Dict
from numpy.typing import NDArray
from stable_baselines3.common.vec_env.base_vec_env import VecEnv

from batchwright.envs.api import Env, Seeded, Wrapper, array_env
from batchwright.envs.gymnasium import GymnasiumVectorEnv
from batchwright.errors import ConfigError

__all__ = ["Sb3VecEnv"]


class Sb3VecEnv(VecEnv):  # type: ignore[misc, unused-ignore]
    """B environments as Stable-Baselines3 steps them; the policy is `MultiInputPolicy`.

    Where an episode ended, its info has `terminal_observation`, and `TimeLimit.truncated` if it
    was cut off. SB3's own algorithms do not know of masks: an action outside is tolerated and
    counted. `MaskablePPO` of sb3-contrib finds them by `env_method("action_masks")`.
    """

    def __init__(self, env: Env | Wrapper) -> None:
        self.env = array_env(env)
        spaces = GymnasiumVectorEnv(self.env)
        self._actions = np.zeros(self.env.num_envs, np.int64)
        self._obs: dict[str, NDArray[Any]] = {}
        shown = {
            # SB3 flattens every observation, for which a single number needs an axis.
            name: space
            if space.shape
            else Box(space.low.reshape(1), space.high.reshape(1), dtype=space.dtype)
            for name, space in spaces.single_observation_space.items()
        }
        super().__init__(self.env.num_envs, Dict(shown), spaces.single_action_space)

    def reset(self) -> dict[str, NDArray[Any]]:
        seed = self._seeds[0]
        if seed is not None:
            if not isinstance(self.env, Seeded):
                raise ConfigError(
                    f"a {type(self.env).__name__} got its seed when it was made; to set another, "
                    f"give it a method set_seed(seed)"
                )
            self.env.set_seed(seed)
            self._reset_seeds()
        self._obs = self.env.reset()
        return self._copied()

    def step_async(self, actions: NDArray[np.integer[Any]]) -> None:
        self._actions = np.asarray(actions)

    def step_wait(self) -> tuple[Any, ...]:
        step = self.env.step(self._actions)
        self._obs, done = step.obs, step.done
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for b in np.flatnonzero(done).tolist():
            last = {name: np.array(array[b], ndmin=1) for name, array in step.final_obs.items()}
            cut = bool(step.truncated[b] and not step.terminated[b])
            infos[b] = {"terminal_observation": last, "TimeLimit.truncated": cut}
        return self._copied(), step.reward.astype(np.float32), np.array(done), infos

    def close(self) -> None:
        """Nothing is open."""

    def action_masks(self) -> NDArray[np.bool_]:
        """Which actions each environment allows now, [B, K]."""
        if not self._obs:
            raise ConfigError("no episode has begun; call reset first")
        return np.array(self._obs["mask"])

    def env_method(
        self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any
    ) -> list[Any]:
        if method_name == "action_masks":
            return [self.action_masks()[b] for b in self._chosen(indices)]
        return [getattr(self.env, method_name)(*args, **kwargs) for _ in self._chosen(indices)]

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        value = getattr(self, attr_name, None) if attr_name == "render_mode" else None
        return [value or getattr(self.env, attr_name, None) for _ in self._chosen(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        raise ConfigError(
            f"{attr_name} cannot be set through Stable-Baselines3; all environments are one object"
        )

    def env_is_wrapped(self, wrapper_class: type[Any], indices: Any = None) -> list[bool]:
        return [False for _ in self._chosen(indices)]

    def _chosen(self, indices: int | Iterable[int] | None) -> Sequence[int]:
        if indices is None:
            return range(self.num_envs)
        return [indices] if isinstance(indices, int) else list(indices)

    def _copied(self) -> dict[str, NDArray[Any]]:
        return {
            name: np.array(array if array.ndim > 1 else array[:, None])
            for name, array in self._obs.items()
        }
