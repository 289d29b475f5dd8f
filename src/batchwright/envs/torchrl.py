"""Any batched environment as a TorchRL `EnvBase`, and a rollout straight into one TensorDict.

TorchRL expects an ended episode's last observation and then calls reset itself; the environments
here have already begun the next episode by then. The wrapper returns the first and keeps the
second until reset is called, so nothing is lost and nothing is reset twice.
"""

import multiprocessing
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from batchwright.envs.api import ArraySpec, Env, Obs, Seeded, Step
from batchwright.errors import ConfigError, Mismatch, need

_start_method = multiprocessing.get_start_method(allow_none=True)
need("torchrl", extra="rl")
if multiprocessing.get_start_method(allow_none=True) != _start_method:
    # TorchRL decides for the whole process that children are spawned; an import must not.
    multiprocessing.set_start_method(_start_method, force=True)

from tensordict import TensorDict, TensorDictBase  # noqa: E402 - only now known to be installed
from torchrl.data import (  # noqa: E402
    Binary,
    Bounded,
    Categorical,
    Composite,
    TensorSpec,
    Unbounded,
)
from torchrl.envs import EnvBase  # noqa: E402

__all__ = ["TorchRLEnv"]

_NOT_DIRECT = ("return_contiguous", "out", "set_truncated", "auto_cast_to_device", "storing_device")
"""Settings of a rollout that TorchRL's own loop and stack see to."""


class _Remembers(Exception):
    """A policy wrote what its next call is to read."""


class _Memory:
    """Memory of rollouts by name, used again once every tensor that showed it is gone.

    To clear fresh pages takes the system as long as the steps take.
    """

    def __init__(self) -> None:
        self._kept: dict[str, list[tuple[NDArray[Any], weakref.ref[NDArray[Any]]]]] = {}

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        kind = torch.empty(0, dtype=dtype).numpy().dtype
        kept = [pair for pair in self._kept.get(name, []) if pair[0].shape == shape]
        free = next((pair for pair in kept if pair[1]() is None), None)
        # Numpy asks the system for large pages, torch does not.
        array = np.empty(shape, kind) if free is None else free[0]
        # A tensor's storage holds this view of the array as long as anything refers to it.
        lent = array.view()
        others = [pair for pair in kept if pair is not free]
        self._kept[name] = [*others[-1:], (array, weakref.ref(lent))]
        return torch.from_numpy(lent)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _Memory, ()


class TorchRLEnv(EnvBase):  # type: ignore[misc, unused-ignore]
    """B environments as one locked batch.

    Observations keep their names; `mask` is what `ActionMask(mask_key="mask")` and
    `MaskedCategorical` take, and random actions keep to it. `valid` [B, 1] is false after a step
    that must not enter the loss. TorchRL can set a seed if the environment has `set_seed`.
    """

    batch_locked = True

    def __init__(self, env: Env) -> None:
        super().__init__(device="cpu", batch_size=torch.Size([env.num_envs]))
        self.env = env
        self._now: Obs | None = None
        self._direct = False
        self._memory = _Memory()
        self._whole: TensorDictBase | None = None
        self._fresh = np.zeros(env.num_envs, np.bool_)
        """Which environments have begun an episode for which reset was not called yet."""
        B = env.num_envs
        shown = {name: _spec(spec, B) for name, spec in env.spec.items()}
        flag = Categorical(2, shape=(B, 1), dtype=torch.bool)
        self.observation_spec = Composite({**shown, "valid": flag}, shape=(B,))
        self.action_spec = Categorical(env.num_actions, shape=(B,), dtype=torch.int64)
        self.reward_spec = Unbounded(shape=(B, 1), dtype=torch.float32)
        ends = ("done", "terminated", "truncated")
        self.done_spec = Composite({name: flag.clone() for name in ends}, shape=(B,))

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        asked = None if tensordict is None else tensordict.get("_reset", None)
        if asked is None or self._now is None:
            self._now = _copied(self.env.reset())
            self._fresh[:] = False
        else:
            where = asked.reshape(self.env.num_envs).numpy()
            anew = where & ~self._fresh
            if anew.any():
                self._now = _copied(self.env.reset(anew))
            self._fresh &= ~where
        ends = torch.zeros(3, self.env.num_envs, 1, dtype=torch.bool)
        return self._tensordict(
            {
                **_tensors(self._now),
                "valid": torch.ones(self.env.num_envs, 1, dtype=torch.bool),
                "done": ends[0],
                "terminated": ends[1],
                "truncated": ends[2],
            }
        )

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        step = self.env.step(tensordict.get("action").numpy())
        seen = _seen(step)
        self._now = _copied(step.obs)
        self._fresh[:] = step.done
        return self._tensordict(
            {
                **_tensors(seen),
                "valid": _column(step.valid),
                "reward": _column(step.reward),
                "done": _column(step.done),
                "terminated": _column(step.terminated),
                "truncated": _column(step.truncated),
            }
        )

    def _set_seed(self, seed: int | None) -> None:
        if seed is None:
            return
        if not isinstance(self.env, Seeded):
            raise ConfigError(
                f"a {type(self.env).__name__} got its seed when it was made; to set another, give "
                f"it a method set_seed(seed)"
            )
        self.env.set_seed(seed)
        self._now = None
        self._fresh[:] = False

    def rand_action(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """A random action that the mask allows; any action where there is no mask yet."""
        if tensordict is None or (mask := tensordict.get("mask", None)) is None:
            return super().rand_action(tensordict)
        return tensordict.set("action", _random(mask))

    def allocate(self, num_steps: int) -> TensorDictBase:
        """A rollout [B, num_steps] to be filled, with all keys of `rollout`, laid out time first.

        Time first is how it is written, a whole step at a time; [B, T] is how TorchRL reads.
        """
        return self._allocate(num_steps, _Memory())

    def _allocate(self, T: int, memory: "_Memory") -> TensorDictBase:
        B, leaves = self.env.num_envs, self._leaves()

        def half(name: str, without: str = "") -> TensorDictBase:
            kept = {
                leaf: memory.empty(f"{name} {leaf}", (T, *spec.shape), spec.dtype).transpose(0, 1)
                for leaf, spec in leaves.items()
                if leaf != without
            }
            return TensorDict(kept, batch_size=[B, T])

        out = half("root", without="reward")
        out["action"] = memory.empty("action", (T, B), torch.int64).transpose(0, 1)
        out["next"] = half("next")
        out.refine_names(None, "time")
        return out

    def rollout_into(
        self,
        out: TensorDictBase,
        policy: Callable[[dict[str, torch.Tensor]], torch.Tensor] | None = None,
    ) -> TensorDictBase:
        """Fill a rollout of `allocate`, continuing from the current state of the environments.

        The same data as `rollout(T, policy, break_when_any_done=False, auto_reset=...)`, without
        a TensorDict for every step: `policy` sees a plain dict of tensors [B, ...] and returns
        actions [B]; without one they are random within the mask.
        """
        if out.batch_size[0] != self.env.num_envs:
            raise Mismatch(
                f"out is for {out.batch_size[0]} environments, not for {self.env.num_envs}; "
                f"use what allocate() returns"
            )
        if self._now is None:
            self._now = _copied(self.env.reset())
        root = {name: out.get(name).transpose(0, 1) for name in self._leaves() if name != "reward"}
        after = {name: out.get(("next", name)).transpose(0, 1) for name in self._leaves()}
        actions = out.get("action").transpose(0, 1)
        names = list(self.env.spec)
        for flag in ("done", "terminated", "truncated"):
            root[flag].zero_()
        root["valid"].fill_(True)
        now = self._now
        self._now = None  # if a step fails, the next rollout must reset
        writable = {name: (root[name].numpy(), after[name].numpy()) for name in names}
        ends = {name: after[name].numpy()[..., 0] for name in after if name not in writable}
        for t in range(len(actions)):
            for name, (before, _) in writable.items():
                before[t] = now[name]
            seen = {name: root[name][t] for name in names}
            actions[t] = _random(seen["mask"]) if policy is None else policy(seen)
            step = self.env.step(actions[t].numpy())
            done = step.done
            ended = np.flatnonzero(done)
            for name, (_, behind) in writable.items():
                behind[t] = step.obs[name]
                if len(ended):
                    behind[t][ended] = step.final_obs[name][ended]
            ends["reward"][t], ends["valid"][t] = step.reward, step.valid
            ends["terminated"][t], ends["truncated"][t] = step.terminated, step.truncated
            ends["done"][t] = done
            now = step.obs
        self._now = _copied(now)
        self._fresh[:] = False
        return out

    def rollout(
        self,
        max_steps: int,
        policy: Callable[[TensorDictBase], TensorDictBase] | None = None,
        callback: Callable[..., Any] | None = None,
        **settings: Any,
    ) -> TensorDictBase:
        """TorchRL's rollout; one that ends at no episode's end is written where it is returned.

        TorchRL copies every step four times. Its layout there is that of `allocate`: ask for
        `return_contiguous=True` to have it laid out environments first. The environment keeps the
        memory of the last two rollouts, for the next one to be written into when nothing refers
        to them any more.
        """
        self._direct = not any(settings.get(name) for name in _NOT_DIRECT)
        try:
            stacked = super().rollout(max_steps, policy, callback, **settings)
            return stacked if self._whole is None else self._whole
        finally:
            self._direct, self._whole = False, None

    def _rollout_nonstop(self, **settings: Any) -> list[TensorDictBase]:
        if not self._direct or self._now is None or settings["callback"] is not None:
            return super()._rollout_nonstop(**settings)  # type: ignore[no-any-return]
        start, policy, now = settings["tensordict"], settings["policy"], self._now
        flags = {name: start.get(name) for name in ("valid", "done", "terminated", "truncated")}
        own = {*self.env.spec, *flags, "action"}
        more: dict[Any, list[torch.Tensor]] = {}

        def act(seen: dict[str, torch.Tensor]) -> torch.Tensor:
            given = self._tensordict({**seen, **flags})
            given.update(policy(given))
            if given.get("next", None) is not None:
                raise _Remembers(given)
            for key in given.keys(True, True):
                if key not in own:
                    more.setdefault(key, []).append(given.get(key))
            action: torch.Tensor = given.get("action")
            return action

        out = self._allocate(settings["max_steps"], self._memory)
        try:
            self.rollout_into(out, act)
        except _Remembers as policy_call:
            # TorchRL's own loop carries from step to step what the policy remembers.
            self._now, chosen = now, iter(policy_call.args)
            settings["policy"] = lambda given: next(chosen, None) or policy(given)
            return super()._rollout_nonstop(**settings)  # type: ignore[no-any-return]
        for key, values in more.items():
            out.set(key, torch.stack(values, 1))
        # The environments have begun what TorchRL will ask to be reset.
        self._fresh[:] = out.get(("next", "done"))[:, -1, 0].numpy()
        self._whole = out
        return [start]

    def _leaves(self) -> dict[str, TensorSpec]:
        done = {name: self.full_done_spec[name] for name in ("done", "terminated", "truncated")}
        shown = {name: self.observation_spec[name] for name in (*self.env.spec, "valid")}
        return {**shown, **done, "reward": self.reward_spec}

    def _tensordict(self, tensors: dict[str, torch.Tensor]) -> TensorDictBase:
        return TensorDict(tensors, batch_size=self.batch_size, device=self.device)


def _spec(spec: ArraySpec, num_envs: int) -> TensorSpec:
    shape = (num_envs, *spec.shape)
    dtype = torch.from_numpy(np.empty(0, spec.dtype)).dtype
    if spec.dtype == np.bool_ and spec.shape:
        return Binary(n=spec.shape[-1], shape=shape, dtype=dtype)
    if spec.high is not None:
        return Bounded(low=-1, high=spec.high - 1, shape=shape, dtype=dtype)
    return Unbounded(shape=shape, dtype=dtype)


def _seen(step: Step) -> Obs:
    """What the step led to: the last observation of an episode that ended, not the next first."""
    seen = _copied(step.obs)
    ended = np.flatnonzero(step.done)
    if len(ended):
        for name, array in seen.items():
            array[ended] = step.final_obs[name][ended]
    return seen


def _random(mask: torch.Tensor) -> torch.Tensor:
    """One of the allowed in every row, each with the same probability; 0 where none is."""
    rows = mask.reshape(-1, mask.shape[-1]).numpy()
    allowed, counts = np.flatnonzero(rows), rows.sum(1)
    first = counts.cumsum() - counts
    drawn = torch.rand(len(rows), dtype=torch.float64).numpy()
    # A row without any may point behind the last.
    chosen = np.append(allowed, 0)[first + (drawn * counts).astype(np.int64)] % rows.shape[1]
    return torch.from_numpy(np.where(counts, chosen, 0)).reshape(mask.shape[:-1])


def _copied(obs: Obs) -> Obs:
    return {name: np.array(array) for name, array in obs.items()}


def _tensors(obs: Obs) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in obs.items()}


def _column(array: NDArray[Any]) -> torch.Tensor:
    # A copy: the next step may overwrite this memory.
    return torch.from_numpy(np.array(array)).unsqueeze(-1)
