"""Check that a batched environment implements the protocol."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.envs.api import ArraySpec, Env, Obs, Step
from batchwright.errors import Mismatch
from batchwright.rng import stream

__all__ = ["check_env"]

Actions = NDArray[np.int64]


def check_env(
    env: Env,
    *,
    make: Callable[[int], Env] | None = None,
    steps: int = 200,
    time_limit: int | None = None,
    seed: int = 0,
) -> list[str]:
    """Act at random for `steps` steps; raise `Mismatch` with all that violates the protocol.

    Checked are shapes, types and ranges of every array; masks that allow nothing; the same-step
    reset and its final observation; that no step is both terminated and truncated; partial resets;
    whether `state_dict` restores everything and holds copies; actions outside the mask. With
    `make(num_envs)`, which must return a new environment of the same seed, also whether episodes
    depend on the number of environments. With `time_limit`, also that an episode stopped by it is
    truncated and that none is longer.

    Returns warnings about what is allowed but often a mistake. The environment is left in the
    middle of episodes: make a new one for training.

    >>> from batchwright.envs import CartPole
    >>> check_env(CartPole(4), make=CartPole, time_limit=500)
    []
    """
    found = _Findings()
    missing = [name for name in _PARTS if not hasattr(env, name)]
    if missing:
        raise Mismatch(f"{type(env).__name__} is not an Env: it lacks {', '.join(missing)}")
    looks = _Looks(env, found)
    looks.spec()
    # The environment's code may raise anything; what it raised is the finding.
    try:
        if not found.problems:
            _run(env, looks, found, steps, time_limit, seed)
        if not found.problems:
            _restores(env, found, seed)
            _resets_partly(env, looks, found, seed)
            _tolerates(env, looks, found)
        if make is not None and not found.problems:
            _lives_alone(make, found, seed)
    except Exception as error:
        found.add(f"{found.doing} raised {type(error).__name__}: {error}")
    if found.problems:
        listed = "; ".join(f"({n}) {what}" for n, what in enumerate(found.problems, start=1))
        raise Mismatch(f"{type(env).__name__} violates the protocol of environments: {listed}")
    return found.remarks


_PARTS = ("num_envs", "num_actions", "spec", "reset", "step", "state_dict", "load_state_dict")


class _Findings:
    """Problems, each reported once, and what is being checked right now."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.remarks: list[str] = []
        self.doing = "the check"

    def add(self, what: str) -> None:
        what = " ".join(what.split())
        if what not in self.problems:
            self.problems.append(what)


class _Looks:
    """Whether arrays are as the specification says."""

    def __init__(self, env: Env, found: _Findings) -> None:
        self.B, self.K, self.arrays = env.num_envs, env.num_actions, dict(env.spec)
        self.found = found

    def spec(self) -> None:
        add = self.found.add
        for name, value in (("num_envs", self.B), ("num_actions", self.K)):
            if not isinstance(value, int) or value < 1:
                add(f"{name} must be an integer of at least 1, got {value!r}")
        mask = self.arrays.get("mask")
        if mask is None or mask.shape != (self.K,) or mask.dtype != np.bool_:
            add(f"spec['mask'] is {mask}, not booleans of shape ({self.K},)")

    def obs(self, obs: Any, where: str, rows: NDArray[np.bool_] | None = None) -> None:
        """An observation; with `rows`, a final one that is defined only there."""
        add = self.found.add
        if not isinstance(obs, Mapping) or obs.keys() != self.arrays.keys():
            names = sorted(obs) if isinstance(obs, Mapping) else type(obs).__name__
            add(f"{where} has {names}, spec has {sorted(self.arrays)}")
            return
        for name, spec in self.arrays.items():
            if self.array(obs[name], (self.B, *spec.shape), spec.dtype, f"{where}[{name!r}]"):
                values = obs[name] if rows is None else obs[name][rows]
                self._range(values, spec, f"{where}[{name!r}]")
        mask = obs["mask"]
        if rows is None and np.shape(mask) == (self.B, self.K) and not np.all(np.any(mask, 1)):
            add(f"{where}['mask'] allows no action in environment {np.argmin(np.any(mask, 1))}")

    def array(self, array: Any, shape: tuple[int, ...], dtype: Any, where: str) -> bool:
        if isinstance(array, np.ndarray) and array.shape == shape and array.dtype == dtype:
            return True
        seen = type(array).__name__
        if isinstance(array, np.ndarray):
            seen = f"{array.dtype} of shape {array.shape}"
        self.found.add(f"{where} is {seen}, not {np.dtype(dtype)} of shape {shape}")
        return False

    def step(self, step: Any) -> bool:
        before = len(self.found.problems)
        if not isinstance(step, Step):
            self.found.add(f"step() gives a {type(step).__name__}, not a Step")
            return False
        flags = {"terminated": step.terminated, "truncated": step.truncated, "valid": step.valid}
        for name, array in flags.items():
            self.array(array, (self.B,), np.bool_, f"Step.{name}")
        if self.array(step.reward, (self.B,), np.float32, "Step.reward"):
            self._range(step.reward, ArraySpec((), np.dtype(np.float32)), "Step.reward")
        for name, array in step.info.items():
            if np.shape(array)[:1] != (self.B,):
                self.found.add(
                    f"Step.info[{name!r}] has shape {np.shape(array)}, not {self.B} rows"
                )
        if len(self.found.problems) > before:
            return False
        self.obs(step.obs, "Step.obs")
        self.obs(step.final_obs, "Step.final_obs", step.done)
        both = np.flatnonzero(step.terminated & step.truncated)
        if len(both):
            self.found.add(
                f"environment {both[0]} terminated and was truncated in one step; it must be one "
                f"of them"
            )
        return len(self.found.problems) == before

    def _range(self, values: NDArray[Any], spec: ArraySpec, where: str) -> None:
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            self.found.add(f"{where} holds non-finite numbers")
        if values.dtype.kind in "iu" and spec.high is not None and values.size:
            low, high = int(values.min()), int(values.max())
            if low < -1 or high >= spec.high:
                self.found.add(f"{where} holds {low} to {high}, outside [-1, {spec.high})")


def _run(
    env: Env,
    looks: _Looks,
    found: _Findings,
    steps: int,
    time_limit: int | None,
    seed: int,
) -> None:
    """Random episodes: arrays, ends, and the observation after an end."""
    found.doing = "reset()"
    obs = _copied(env.reset())
    looks.obs(obs, "reset()")
    first = obs
    lengths = np.zeros(looks.B, np.int64)
    ended: list[tuple[int, bool]] = []
    unchanged = 0
    moves = False
    found.doing = "step()"
    for number in range(steps):
        if found.problems:
            return
        step = env.step(_random_actions(obs["mask"], seed, number))
        if not looks.step(step):
            return
        lengths += 1
        for b in np.flatnonzero(step.done).tolist():
            ended.append((int(lengths[b]), bool(step.terminated[b])))
            unchanged += _same_row(step.obs, step.final_obs, b)
        if time_limit is not None and (lengths > time_limit).any():
            found.add(f"an episode is longer than time_limit={time_limit}")
        lengths[step.done] = 0
        obs = _copied(step.obs)
        moves = moves or not _same(first, obs)
    if ended and moves and unchanged == len(ended):
        found.add(
            f"after each of {len(ended)} ends Step.obs equals Step.final_obs: an environment that "
            f"ends must show its next episode in obs at once and its last observation in final_obs"
        )
    if time_limit is None:
        _suspect_limit(ended, found)
    elif (limited := [over for n, over in ended if n == time_limit]) and all(limited):
        # One or two may have come to their end in the very last step.
        report = found.add if len(limited) > 2 else found.remarks.append
        report(
            f"every episode of {time_limit} steps terminated; one stopped by the limit must be "
            f"truncated, so that its value is bootstrapped"
        )
    if not ended:
        found.remarks.append(f"no episode ended within {steps} steps, so ends were not checked")


def _suspect_limit(ended: list[tuple[int, bool]], found: _Findings) -> None:
    longest = max((n for n, _ in ended), default=0)
    at_longest = [over for n, over in ended if n == longest]
    varied = len({n for n, _ in ended}) > 1
    if varied and len(at_longest) >= 5 and len(at_longest) * 5 >= len(ended) and all(at_longest):
        found.remarks.append(
            f"{len(at_longest)} of {len(ended)} episodes terminated at exactly {longest} steps, "
            f"the longest; if that is a time limit, it must truncate"
        )


def _restores(env: Env, found: _Findings, seed: int) -> None:
    """A restored state leads to the same steps, and a saved one does not change meanwhile."""
    obs = _copied(env.reset())
    for number in range(5):
        obs = _copied(env.step(_random_actions(obs["mask"], seed, 1000 + number)).obs)
    found.doing = "state_dict()"
    state = env.state_dict()
    kept = copy.deepcopy(state)
    found.doing = "step() after state_dict()"
    once = _follow(env, obs, seed, 30)
    if not _equal(state, kept):
        found.add("the result of state_dict() changes with later steps; it must hold copies")
    found.doing = "load_state_dict()"
    env.load_state_dict(kept)
    found.doing = "step() after load_state_dict()"
    again = _follow(env, obs, seed, 30)
    differs = next((n for n, (a, b) in enumerate(zip(once, again, strict=True)) if a != b), None)
    if differs is not None:
        found.add(
            f"step {differs + 1} after load_state_dict differs from the one after state_dict: "
            f"something it depends on is not in the state"
        )


def _resets_partly(env: Env, looks: _Looks, found: _Findings, seed: int) -> None:
    """reset(where) begins episodes there and leaves the other environments unchanged."""
    obs = _copied(env.reset())
    obs = _copied(env.step(_random_actions(obs["mask"], seed, 2000)).obs)
    where = np.arange(looks.B) % 2 == 0
    state = copy.deepcopy(env.state_dict())
    found.doing = "reset(where)"
    after = _copied(env.reset(where))
    looks.obs(after, "reset(where)")
    if found.problems:
        return
    others = np.flatnonzero(~where).tolist()
    if not all(_same_row(obs, after, b) for b in others):
        found.add("reset(where) changes environments that were not chosen")
        return
    actions = _random_actions(obs["mask"], seed, 2001)
    fresh = _random_actions(after["mask"], seed, 2001)
    step = env.step(np.where(where, fresh, actions))
    # Environments that end may get other episodes: the reset has begun some of the stream.
    unfinished = np.flatnonzero(~where & ~step.done).tolist()
    ended, one = step.done[~where], _copied(step.obs)
    env.load_state_dict(state)
    step = env.step(actions)
    other = _copied(step.obs)
    same_ends = np.array_equal(ended, step.done[~where])
    if not same_ends or not all(_same_row(one, other, b) for b in unfinished):
        found.add("reset(where) changes the next step of environments that were not chosen")


def _tolerates(env: Env, looks: _Looks, found: _Findings) -> None:
    """Actions outside the mask, below zero and beyond K."""
    obs = _copied(env.reset())
    first_masked = np.argmin(obs["mask"], 1).astype(np.int64)
    for name, actions in (
        ("that the mask forbids", first_masked),
        ("of -1", np.full(looks.B, -1, np.int64)),
        ("of num_actions", np.full(looks.B, looks.K, np.int64)),
    ):
        found.doing = f"step() with an action {name}"
        looks.step(env.step(actions))
    found.doing = "step() with int32 actions"
    looks.step(env.step(np.zeros(looks.B, np.int32)))


def _lives_alone(make: Callable[[int], Env], found: _Findings, seed: int) -> None:
    """The same episodes among 2 environments and among 5.

    Which slot takes which episode may differ, so only the first ones are followed step by step;
    of the later ones, each that begins among 2 must begin among 5 as well.
    """
    firsts, begun = [], []
    for num_envs in (2, 5):
        found.doing = f"make({num_envs})"
        env = make(num_envs)
        first, starts = _lives(env, seed, steps=60)
        firsts.append(first)
        begun.append(starts)
    few, many = begun
    if firsts[0] != firsts[1] or (len(many) >= len(few) and not set(few) <= set(many)):
        found.add("episodes among 5 environments differ from those among 2: seeds depend on B")


def _lives(env: Env, seed: int, steps: int) -> tuple[list[bytes], list[bytes]]:
    """The first episodes of environments 0 and 1, and how every episode begins."""
    obs = _copied(env.reset())
    starts = [_row(obs, b) for b in range(env.num_envs)]
    first, alive = starts[:2], np.ones(2, np.bool_)
    for number in range(steps):
        step = env.step(_random_actions(obs["mask"], seed, 3000 + number))
        obs = _copied(step.obs)
        for b in np.flatnonzero(alive).tolist():
            shown = step.final_obs if step.done[b] else obs
            first.append(_row(shown, b) + step.reward[b].tobytes())
        alive &= ~step.done[:2]
        starts += [_row(obs, b) for b in np.flatnonzero(step.done).tolist()]
    return first, starts


def _row(obs: Obs, row: int) -> bytes:
    return b"".join(obs[name][row].tobytes() for name in sorted(obs))


def _follow(env: Env, obs: Obs, seed: int, steps: int) -> list[tuple[bytes, ...]]:
    """What `steps` random steps give, as bytes to compare."""
    out = []
    for number in range(steps):
        step = env.step(_random_actions(obs["mask"], seed, 3000 + number))
        obs = _copied(step.obs)
        parts = [step.reward, step.terminated, step.truncated, step.valid]
        parts += [obs[name] for name in sorted(obs)]
        parts += [step.final_obs[name][step.done] for name in sorted(obs)]
        out.append(tuple(array.tobytes() for array in parts))
    return out


def _random_actions(mask: NDArray[np.bool_], seed: int, number: int) -> Actions:
    """A random allowed action for each environment; row b does not depend on the others."""
    # Filled row after row, so the first rows are the same however many follow.
    draws = stream(seed, "check", number).random(mask.shape)
    actions: Actions = np.argmax(np.where(mask, draws, -1.0), 1).astype(np.int64)
    return actions


def _copied(obs: Obs) -> Obs:
    return {name: np.array(array) for name, array in obs.items()}


def _same_row(one: Obs, other: Obs, row: int) -> bool:
    return all(np.array_equal(one[name][row], other[name][row]) for name in one)


def _same(one: Obs, other: Obs) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in one)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.tobytes() == other.tobytes()
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_equal(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other or (one != one and other != other))
