"""T steps of B environments under a policy, into arrays [T, B] that are allocated once.

A step runs the actor only. Values are not needed to act, so they are computed for the whole
rollout at once, and so are those of the final observations of truncated episodes.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from batchwright import rng
from batchwright.envs.api import Env, Obs, Padded
from batchwright.errors import ConfigError, Mismatch
from batchwright.rl import kernels
from batchwright.rl.policy import Policy, choose

__all__ = ["Collector", "Rollout", "RolloutStopped", "Runner"]

Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]
Finals = list[tuple[int, NDArray[np.int64], Obs]]
"""Episodes truncated in a rollout: the step, which environments, their last observations."""
CHUNK = 16_384
"""Observations whose values are computed in one forward pass."""


@dataclass(slots=True)
class Rollout:
    """Transitions of T steps of B environments, [T, B]; the next rollout overwrites them."""

    obs: Obs
    """The observation that each step acted on, with the action mask."""
    actions: NDArray[np.int64]
    logp: Floats
    """The log-probability of each action under the policy."""
    rewards: Floats
    terminated: Flags
    truncated: Flags
    valid: Flags
    values: Floats
    final_values: Floats
    """The value of the last observation of a truncated episode; 0 elsewhere."""
    last_value: Floats
    """[B]: the value of the observation that the next rollout starts with."""
    episode_returns: list[float] = field(default_factory=list)
    """Returns of the episodes that ended in this rollout and had no invalid step."""
    episode_lengths: list[int] = field(default_factory=list)

    @classmethod
    def allocate(cls, env: Env, num_steps: int) -> "Rollout":
        shape = (num_steps, env.num_envs)
        obs = {name: np.zeros((*shape, *s.shape), s.dtype) for name, s in env.spec.items()}
        floats = [np.zeros(shape, np.float32) for _ in range(4)]
        flags = [np.zeros(shape, np.bool_) for _ in range(3)]
        return cls(
            obs=obs,
            actions=np.zeros(shape, np.int64),
            logp=floats[0],
            rewards=floats[1],
            terminated=flags[0],
            truncated=flags[1],
            valid=flags[2],
            values=floats[2],
            final_values=floats[3],
            last_value=np.zeros(env.num_envs, np.float32),
        )


class RolloutStopped(Exception):
    """A rollout was stopped between two steps; its collector is as before it."""


class Collector(Protocol):
    """Where PPO gets its rollouts from: `PPO(..., runner=Runner)` is the default.

    PPO makes one by `runner(env, num_steps, seed=seed)`, and its state is part of checkpoints.
    """

    def collect(self, policy: Policy) -> Rollout:
        """The next rollout, [num_steps, num_envs]; or `RolloutStopped`."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything the next rollout depends on except the policy, the environment included."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Runner:
    """Collects rollouts by stepping all environments in lockstep.

    The action of environment b at step t is sampled with random numbers named by (seed, t, b), so
    a runner restored by `load_state_dict` continues bit for bit. To step environments in another
    way, override `fill`; episodes, values and state stay the same.
    """

    def __init__(self, env: Env, num_steps: int, *, seed: int = 0) -> None:
        if num_steps < 1:
            raise ConfigError(f"num_steps must be at least 1, got {num_steps}")
        self.env = env
        self.seed = seed
        self.step = 0
        """Steps of each environment before the current rollout."""
        self.stop: Callable[[], bool] | None = None
        """Asked between steps whether to stop; then the rollout is as if it had not begun."""
        self._rollout = Rollout.allocate(env, num_steps)
        self._padded = env if isinstance(env, Padded) else None
        if self._padded is not None:
            # How much of the candidates of each step may be other than padding: at first, all.
            size = math.prod(env.spec["candidates"].shape)
            self._held = np.full((num_steps, env.num_envs), size)
        self._obs: Obs | None = None
        self._returns = np.zeros(env.num_envs, np.float64)
        self._lengths = np.zeros(env.num_envs, np.int64)
        self._clean = np.ones(env.num_envs, np.bool_)

    def collect(self, policy: Policy) -> Rollout:
        """The next rollout; the first one resets the environments."""
        out = self._rollout
        before = None if self.stop is None else self.state_dict()
        try:
            obs = self.env.reset() if self._obs is None else self._obs
            obs, finals = self.fill(out, obs, policy)
        except RolloutStopped:
            if before is not None:
                self.load_state_dict(before)
            raise
        # Copied: the environment may write its next observation into the same memory.
        self._obs = {name: obs[name].copy() for name in out.obs}
        self._count_episodes(out)
        self._add_values(out, policy, finals)
        self.step += len(out.actions)
        return out

    def fill(self, out: Rollout, obs: Obs, policy: Policy) -> tuple[Obs, Finals]:
        """Step from `obs` and write observations, actions, log-probabilities, rewards and flags.

        Returns the observations after the last step, and those of truncated episodes.
        """
        finals: Finals = []
        for t in range(len(out.actions)):
            if self.stop is not None and self.stop():
                raise RolloutStopped
            self._keep(out, t, obs)
            seen = {n: torch.from_numpy(a[t]).to(policy.device) for n, a in out.obs.items()}
            with torch.inference_mode():
                logits = policy.logits(seen)
            out.actions[t], out.logp[t] = choose(logits, out.obs["mask"][t], self.action_key(t))
            step = self.env.step(out.actions[t])
            out.rewards[t] = step.reward
            out.terminated[t] = step.terminated
            # A terminated episode has no value behind it, even if it was truncated as well.
            out.truncated[t] = step.truncated & ~step.terminated
            out.valid[t] = step.valid
            cut = np.flatnonzero(out.truncated[t])
            if len(cut):
                finals.append((t, cut, {n: step.final_obs[n][cut] for n in out.obs}))
            obs = step.obs
        return obs, finals

    def _keep(self, out: Rollout, t: int, obs: Obs) -> None:
        """Copy an observation; of candidates that are mostly padding only what is none."""
        for name, array in out.obs.items():
            if name != "candidates" or self._padded is None:
                array[t] = obs[name]
                continue
            shown, kept = (all.reshape(len(all), -1) for all in (obs[name], array[t]))
            filled = self._padded.filled * array.shape[-1]
            kernels.copy_filled(shown, filled, kept, self._held[t])

    def action_key(self, t: int) -> int:
        """The key of the random numbers that sample the actions of step `t` of this rollout."""
        return rng.key(self.seed, "act", self.step + t)

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "env": self.env.state_dict(),
            "obs": self._obs,
            "returns": self._returns.copy(),
            "lengths": self._lengths.copy(),
            "clean": self._clean.copy(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["returns"].shape != self._returns.shape:
            raise Mismatch(
                f"the state has {len(state['returns'])} environments, this runner has "
                f"{len(self._returns)}; resume with the same number"
            )
        self.step = int(state["step"])
        self.env.load_state_dict(state["env"])
        self._obs = None if state["obs"] is None else dict(state["obs"])
        self._returns[:] = state["returns"]
        self._lengths[:] = state["lengths"]
        self._clean[:] = state["clean"]

    def _count_episodes(self, out: Rollout) -> None:
        done = out.terminated | out.truncated
        most = int(np.count_nonzero(done))
        returns, lengths = np.empty(most, np.float64), np.empty(most, np.int64)
        running = self._returns, self._lengths, self._clean
        count = kernels.episodes(out.rewards, done, out.valid, *running, returns, lengths)
        out.episode_returns = returns[:count].tolist()
        out.episode_lengths = lengths[:count].tolist()

    def _add_values(self, out: Rollout, policy: Policy, finals: Finals) -> None:
        assert self._obs is not None
        flat = {name: array.reshape(-1, *array.shape[2:]) for name, array in out.obs.items()}
        out.values[:] = _values(policy, flat).reshape(out.values.shape)
        out.last_value[:] = _values(policy, self._obs)
        out.final_values[:] = 0.0
        if finals:
            together = {n: np.concatenate([obs[n] for _, _, obs in finals]) for n in out.obs}
            ends = np.cumsum([len(rows) for _, rows, _ in finals])[:-1]
            found = np.split(_values(policy, together), ends)
            for (t, rows, _), values in zip(finals, found, strict=True):
                out.final_values[t, rows] = values


def _values(policy: Policy, obs: Obs) -> Floats:
    """The values of N observations, a chunk at a time."""
    tensors = {name: torch.from_numpy(array) for name, array in obs.items()}
    parts = []
    with torch.inference_mode():
        for start in range(0, len(obs["mask"]), CHUNK):
            chunk = {n: a[start : start + CHUNK].to(policy.device) for n, a in tensors.items()}
            parts.append(policy.value(chunk).float().cpu().numpy())
    return np.concatenate(parts)
