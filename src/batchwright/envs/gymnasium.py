"""Any batched environment as a Gymnasium `VectorEnv`, with same-step autoreset or none."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.envs.api import ArraySpec, Env, Obs, Seeded, Wrapper, array_env
from batchwright.errors import ConfigError, Mismatch, need
from batchwright.rng import key

need("gymnasium", extra="rl")

from gymnasium import spaces  # noqa: E402 - only now is it known to be installed
from gymnasium.vector import AutoresetMode, VectorEnv  # noqa: E402
from gymnasium.vector.utils import batch_space  # noqa: E402

__all__ = ["GymnasiumVectorEnv"]


class GymnasiumVectorEnv(VectorEnv):  # type: ignore[misc, unused-ignore]
    """B environments behind Gymnasium's vector interface, autoreset mode SAME_STEP or DISABLED.

    Observations are a `Dict` space with the environment's names, `mask` among them. Where an
    episode ended, `infos["final_obs"]` holds its last observation and `infos["_final_obs"]` is
    true; `infos["valid"]` is false after a step that must not enter the loss. A `reset` with
    `options={"reset_mask": ...}` resets those environments only, as Gymnasium's own do. It takes
    a seed, or a list of one for each environment, if the environment has `set_seed`; a list is one
    seed for all of them together.

    With `DISABLED` the last observation is the one returned, and an environment that ended must be
    reset by such a mask before the next step: Gymnasium's wrappers of observations ask for that.
    There is no `NEXT_STEP`: the environments of a batch all act in every step.
    """

    def __init__(
        self, env: Env | Wrapper, autoreset_mode: AutoresetMode | str = AutoresetMode.SAME_STEP
    ) -> None:
        env = array_env(env)
        try:
            mode = AutoresetMode[getattr(autoreset_mode, "name", str(autoreset_mode)).upper()]
        except KeyError:
            mode = AutoresetMode.NEXT_STEP
        if mode is AutoresetMode.NEXT_STEP:
            raise ConfigError(
                f"autoreset_mode must be SAME_STEP or DISABLED, got {autoreset_mode}: the "
                f"environments of a batch all act in every step, so none can wait for its reset; "
                f"with DISABLED reset those that ended by options={{'reset_mask': ...}}"
            )
        self.env = env
        self.num_envs = env.num_envs
        self.metadata = {"autoreset_mode": mode}
        self._resets = mode is AutoresetMode.SAME_STEP
        self._ended = np.zeros(env.num_envs, np.bool_)
        """Without autoreset: those that ended and were not reset yet."""
        self._shown: Obs = {}
        self._begun: Obs = {}
        shown = {name: _space(spec) for name, spec in env.spec.items()}
        self.single_observation_space = spaces.Dict(shown)
        self.single_action_space = spaces.Discrete(env.num_actions)
        self.observation_space = batch_space(self.single_observation_space, env.num_envs)
        self.action_space = batch_space(self.single_action_space, env.num_envs)

    def reset(
        self, *, seed: int | Sequence[int] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Obs, dict[str, Any]]:
        if isinstance(seed, Sequence | np.ndarray):
            seed = self._one_seed(seed)
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
        return _copied(self._reset(where)), {}

    def _reset(self, where: NDArray[np.bool_] | None) -> Obs:
        if self._resets:
            return self.env.reset(where)
        if where is None or not self._begun:
            self._begun, where = _copied(self.env.reset()), np.ones(self.num_envs, np.bool_)
            self._shown = _copied(self._begun)
        elif (anew := where & ~self._ended).any():
            # Those that ended have begun their next episode already: none is lost.
            self._begun = _copied(self.env.reset(anew))
        for name, array in self._shown.items():
            array[where] = self._begun[name][where]
        self._ended &= ~where
        return self._shown

    def _one_seed(self, seeds: Sequence[int] | NDArray[np.integer[Any]]) -> int:
        if len(seeds) != self.num_envs:
            raise Mismatch(
                f"{len(seeds)} seeds for {self.num_envs} environments; give one seed, or one for "
                f"each environment"
            )
        return key(0, "gymnasium/seeds", *(int(seed) for seed in seeds)) >> 1

    def step(
        self, actions: NDArray[np.integer[Any]]
    ) -> tuple[Obs, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        if self._ended.any():
            raise ConfigError(
                f"environments {np.flatnonzero(self._ended).tolist()[:8]} have ended; call "
                f"reset(options={{'reset_mask': terminated | truncated}}) before the next step"
            )
        step = self.env.step(np.asarray(actions))
        done = step.done
        infos: dict[str, Any] = {name: np.array(array) for name, array in step.info.items()}
        infos["valid"] = np.array(step.valid)
        if done.any():
            final = np.full(self.num_envs, None, dtype=object)
            for b in np.flatnonzero(done):
                final[b] = {name: np.array(array[b]) for name, array in step.final_obs.items()}
            infos |= {"final_obs": final, "_final_obs": done}
        shown = _copied(step.obs)
        if not self._resets:
            self._ended[:], self._begun, shown = done, shown, _copied(shown)
            for name, array in shown.items():
                array[done] = step.final_obs[name][done]
            self._shown = shown
        return (
            _copied(shown) if not self._resets else shown,
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
