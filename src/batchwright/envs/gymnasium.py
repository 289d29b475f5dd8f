"""Any batched environment as a Gymnasium `VectorEnv` with same-step autoreset."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.envs.api import ArraySpec, Env, Obs, Seeded
from batchwright.errors import ConfigError, Mismatch, need

need("gymnasium", extra="rl")

from gymnasium import spaces  # noqa: E402 - only now is it known to be installed
from gymnasium.vector import AutoresetMode, VectorEnv  # noqa: E402
from gymnasium.vector.utils import batch_space  # noqa: E402

__all__ = ["GymnasiumVectorEnv"]


class GymnasiumVectorEnv(VectorEnv):  # type: ignore[misc, unused-ignore]
    """B environments behind Gymnasium's vector interface, autoreset mode SAME_STEP.

    Observations are a `Dict` space with the environment's names, `mask` among them. Where an
    episode ended, `infos["final_obs"]` holds its last observation and `infos["_final_obs"]` is
    true; `infos["valid"]` is false after a step that must not enter the loss. A `reset` with
    `options={"reset_mask": ...}` resets those environments only, as Gymnasium's own do. It takes
    a seed if the environment has `set_seed`.
    """

    def __init__(self, env: Env) -> None:
        self.env = env
        self.num_envs = env.num_envs
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        shown = {name: _space(spec) for name, spec in env.spec.items()}
        self.single_observation_space = spaces.Dict(shown)
        self.single_action_space = spaces.Discrete(env.num_actions)
        self.observation_space = batch_space(self.single_observation_space, env.num_envs)
        self.action_space = batch_space(self.single_action_space, env.num_envs)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Obs, dict[str, Any]]:
        super().reset(seed=seed)
        where = (options or {}).get("reset_mask")
        if where is not None and (where.shape != (self.num_envs,) or where.dtype != np.bool_):
            raise Mismatch(
                f"options['reset_mask'] is {where.dtype} of shape {where.shape}; "
                f"it must be bool of shape ({self.num_envs},)"
            )
        if seed is not None:
            if not isinstance(self.env, Seeded):
                raise ConfigError(
                    f"a {type(self.env).__name__} got its seed when it was made; to reset it with "
                    f"another, give it a method set_seed(seed)"
                )
            self.env.set_seed(seed)
            where = None
        return _copied(self.env.reset(where)), {}

    def step(
        self, actions: NDArray[np.integer[Any]]
    ) -> tuple[Obs, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        step = self.env.step(np.asarray(actions))
        done = step.done
        infos: dict[str, Any] = {name: np.array(array) for name, array in step.info.items()}
        infos["valid"] = np.array(step.valid)
        if done.any():
            final = np.full(self.num_envs, None, dtype=object)
            for b in np.flatnonzero(done):
                final[b] = {name: np.array(array[b]) for name, array in step.final_obs.items()}
            infos |= {"final_obs": final, "_final_obs": done}
        return (
            _copied(step.obs),
            step.reward.astype(np.float64),
            np.array(step.terminated),
            np.array(step.truncated),
            infos,
        )


def _space(spec: ArraySpec) -> spaces.Space[Any]:
    if spec.dtype == np.bool_:
        return spaces.Box(0, 1, spec.shape, np.bool_)
    if spec.high is not None:
        return spaces.Box(-1, spec.high - 1, spec.shape, spec.dtype.type)
    if spec.dtype.kind in "iu":
        range_ = np.iinfo(spec.dtype)
        return spaces.Box(range_.min, range_.max, spec.shape, spec.dtype.type)
    return spaces.Box(-np.inf, np.inf, spec.shape, spec.dtype.type)


def _copied(obs: Obs) -> Obs:
    # Gymnasium's users keep what they are given; the environment may overwrite its buffers.
    return {name: np.array(array) for name, array in obs.items()}
