"""T steps of B environments under a policy, into arrays [T, B] that are allocated once.

A step runs the actor only. Values are not needed to act, so they are computed for the whole
rollout at once, and so are those of the final observations of truncated episodes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from batchwright import rng
from batchwright.envs.api import Env, Obs
from batchwright.errors import ConfigError, Mismatch
from batchwright.rl.policy import Policy, choose

__all__ = ["Rollout", "Runner"]

Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]
CHUNK = 16_384
"""Observations whose values are computed at once."""


@dataclass(slots=True)
class Rollout:
    """What happened, [T, B]; the next rollout of the same runner writes over it."""

    obs: Obs
    """What each step acted on; the mask is among it."""
    actions: NDArray[np.int64]
    logp: Floats
    """The logarithm of the probability that the policy gave to the action."""
    rewards: Floats
    terminated: Flags
    truncated: Flags
    valid: Flags
    values: Floats
    final_values: Floats
    """The value of a truncated episode's last observation; 0 where none was truncated."""
    last_value: Floats
    """[B]: the value of what the next rollout will begin with."""
    episode_returns: list[float] = field(default_factory=list)
    """Sums of rewards of the episodes that ended here and had valid steps only."""
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


class Runner:
    """Steps an environment on and on, rollout after rollout.

    The action of environment b at its step t is drawn with numbers that (seed, t, b) names, so
    that a runner restored by `load_state_dict` goes on to the bit.
    """

    def __init__(self, env: Env, num_steps: int, *, seed: int = 0) -> None:
        if num_steps < 1:
            raise ConfigError(f"num_steps is {num_steps}; a rollout has at least one step")
        self.env = env
        self.step = 0
        """Steps of each environment so far."""
        self._seed = seed
        self._rollout = Rollout.allocate(env, num_steps)
        self._tensors = {name: torch.from_numpy(a) for name, a in self._rollout.obs.items()}
        self._obs: Obs | None = None
        self._returns = np.zeros(env.num_envs, np.float64)
        self._lengths = np.zeros(env.num_envs, np.int64)
        self._clean = np.ones(env.num_envs, np.bool_)

    def collect(self, policy: Policy, *, greedy: bool = False) -> Rollout:
        """The next rollout; the first one resets the environments."""
        out, env, device = self._rollout, self.env, policy.device
        out.episode_returns, out.episode_lengths = [], []
        finals: list[tuple[int, NDArray[np.int64], Obs]] = []
        obs = env.reset() if self._obs is None else self._obs
        for t in range(len(out.actions)):
            for name, array in out.obs.items():
                array[t] = obs[name]
            seen = {name: tensor[t].to(device) for name, tensor in self._tensors.items()}
            with torch.inference_mode():
                logits = policy.logits(seen)
            key = None if greedy else rng.key(self._seed, "act", self.step)
            out.actions[t], out.logp[t] = choose(logits, out.obs["mask"][t], key)
            step = env.step(out.actions[t])
            out.rewards[t] = step.reward
            out.terminated[t] = step.terminated
            # An episode that came to its end has no value behind it, whatever stopped it too.
            out.truncated[t] = step.truncated & ~step.terminated
            out.valid[t] = step.valid
            cut = np.flatnonzero(out.truncated[t])
            if len(cut):
                finals.append((t, cut, {n: step.final_obs[n][cut] for n in out.obs}))
            self._count(out, t, step.terminated | step.truncated)
            obs = step.obs
            self.step += 1
        # Copied: the environment may write its next observation into the same memory.
        self._obs = {name: obs[name].copy() for name in out.obs}
        return self._valued(policy, finals)

    def _valued(
        self, policy: Policy, finals: Sequence[tuple[int, NDArray[np.int64], Obs]]
    ) -> Rollout:
        """The rollout with the values of all it saw; `finals` are (step, rows, observations)."""
        out = self._rollout
        assert self._obs is not None
        flat = {name: tensor.flatten(0, 1) for name, tensor in self._tensors.items()}
        out.values[:] = _values(policy, flat).reshape(out.values.shape)
        out.last_value[:] = _values(policy, _as_tensors(self._obs))
        out.final_values[:] = 0.0
        if finals:
            together = {n: np.concatenate([obs[n] for _, _, obs in finals]) for n in out.obs}
            found = np.split(
                _values(policy, _as_tensors(together)),
                np.cumsum([len(rows) for _, rows, _ in finals])[:-1],
            )
            for (t, rows, _), values in zip(finals, found, strict=True):
                out.final_values[t, rows] = values
        return out

    def state_dict(self) -> dict[str, Any]:
        """Everything the next rollout depends on but the policy, the environment included."""
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
                f"the state is of {len(state['returns'])} environments, not of "
                f"{len(self._returns)}; take as many as the run was begun with"
            )
        self.step = int(state["step"])
        self.env.load_state_dict(state["env"])
        self._obs = None if state["obs"] is None else dict(state["obs"])
        self._returns[:] = state["returns"]
        self._lengths[:] = state["lengths"]
        self._clean[:] = state["clean"]

    def _count(self, out: Rollout, t: int, done: Flags) -> None:
        self._returns += out.rewards[t]
        self._lengths += 1
        self._clean &= out.valid[t]
        if done.any():
            told = done & self._clean
            out.episode_returns += self._returns[told].tolist()
            out.episode_lengths += self._lengths[told].tolist()
            self._returns[done] = 0.0
            self._lengths[done] = 0
            self._clean[done] = True


def _as_tensors(obs: Obs) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in obs.items()}


def _values(policy: Policy, obs: Mapping[str, torch.Tensor]) -> Floats:
    """The values of N observations, a chunk at a time."""
    parts = []
    with torch.inference_mode():
        for start in range(0, len(obs["mask"]), CHUNK):
            chunk = {n: a[start : start + CHUNK].to(policy.device) for n, a in obs.items()}
            parts.append(policy.value(chunk).float().cpu().numpy())
    return np.concatenate(parts)
