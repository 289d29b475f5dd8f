"""`check_env` passes a good environment and names each mistake that is planted in it."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_equal
from numpy.typing import NDArray

from batchwright.envs import CartPole, Env, Obs, ProverEnv, Step, check_env
from batchwright.errors import ConfigError, Mismatch
from batchwright.logic import Facts, Vocab, parse_rules


class Planted(CartPole):
    """CartPole with short episodes, to plant a mistake in."""

    limit = 12

    def __init__(self, num_envs: int = 4) -> None:
        super().__init__(num_envs, max_steps=self.limit)


class WrongShape(Planted):
    def reset(self, where: NDArray[np.bool_] | None = None) -> Obs:
        obs = super().reset(where)
        return obs | {"features": obs["features"][:, :3]}


class WrongType(Planted):
    def step(self, actions: NDArray[Any]) -> Step:
        step = super().step(actions)
        step.reward = step.reward.astype(np.float64)  # type: ignore[assignment]
        return step


class ForgottenArray(Planted):
    def step(self, actions: NDArray[Any]) -> Step:
        step = super().step(actions)
        del step.obs["mask"]
        return step


class NotFinite(Planted):
    def step(self, actions: NDArray[Any]) -> Step:
        step = super().step(actions)
        step.reward[1] = np.nan
        return step


class NothingAllowed(Planted):
    def reset(self, where: NDArray[np.bool_] | None = None) -> Obs:
        obs = super().reset(where)
        obs["mask"][2] = False
        return obs


class NeverShowsTheNextEpisode(Planted):
    """Shows the last observation in the step that ends, as a reset in the next step would."""

    def step(self, actions: NDArray[Any]) -> Step:
        step = super().step(actions)
        step.obs["features"][step.done] = step.final_obs["features"][step.done]
        return step


class FinalIsTheNextFirst(Planted):
    def step(self, actions: NDArray[Any]) -> Step:
        step = super().step(actions)
        step.final_obs = step.obs
        return step


class BothEnds(Planted):
    def step(self, actions: NDArray[Any]) -> Step:
        step = super().step(actions)
        step.truncated |= step.terminated
        return step


class LimitTerminates(Planted):
    def step(self, actions: NDArray[Any]) -> Step:
        step = super().step(actions)
        step.terminated, step.truncated = step.done, np.zeros(self.num_envs, np.bool_)
        return step


class TooLong(Planted):
    limit = 15


class ForgetsItsEpisodes(Planted):
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"episodes": np.zeros(self.num_envs, np.int64)}


class LiveState(Planted):
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"state": self._state}


class ResetsAll(Planted):
    def reset(self, where: NDArray[np.bool_] | None = None) -> Obs:
        return super().reset()


class CrashesOnBadActions(Planted):
    def step(self, actions: NDArray[Any]) -> Step:
        if ((actions < 0) | (actions > 1)).any():
            raise IndexError("no such\naction")
        return super().step(actions)


class SharedGenerator(Planted):
    """Starts come from one generator in the order of ends, so they depend on the others."""

    def __init__(self, num_envs: int = 4) -> None:
        super().__init__(num_envs)
        self._draws = 0

    def _perturb(self, rows: NDArray[np.bool_]) -> None:
        for b in np.flatnonzero(rows):
            self._state[b] += 1e-3 * self._draws
            self._draws += 1

    def reset(self, where: NDArray[np.bool_] | None = None) -> Obs:
        super().reset(where)
        self._perturb(np.ones(self.num_envs, np.bool_) if where is None else where)
        return self._observed(self._state)

    def step(self, actions: NDArray[Any]) -> Step:
        step = super().step(actions)
        self._perturb(step.done)
        step.obs = self._observed(self._state)
        return step

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"draws": self._draws}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._draws = state["draws"]


def test_a_good_environment_passes_without_a_remark() -> None:
    assert check_env(Planted(), make=Planted, time_limit=12) == []
    assert check_env(Planted(1), make=Planted) == []


@pytest.mark.parametrize(
    ("planted", "words"),
    [
        (WrongShape, r"reset\(\)\['features'\] is float32 of shape \(4, 3\), not .*\(4, 4\)"),
        (WrongType, r"Step.reward is float64 of shape \(4,\), not float32"),
        (ForgottenArray, r"Step.obs has \['features'\], spec has \['features', 'mask'\]"),
        (NotFinite, "Step.reward holds non-finite numbers"),
        (NothingAllowed, "allows no action in environment 2"),
        (NeverShowsTheNextEpisode, "must show its next episode in obs at once"),
        (FinalIsTheNextFirst, "last observation in final_obs"),
        (BothEnds, "terminated and was truncated in one step"),
        (LimitTerminates, "every episode of 12 steps terminated"),
        (TooLong, "an episode is longer than time_limit=12"),
        (ForgetsItsEpisodes, "something it depends on is not in the state"),
        (LiveState, "changes with later steps; it must hold copies"),
        (ResetsAll, r"reset\(where\) changes environments that were not chosen"),
        (CrashesOnBadActions, "with an action of -1 raised IndexError: no such action"),
        (SharedGenerator, "seeds depend on B"),
    ],
)
def test_a_planted_mistake_is_named(planted: Callable[..., Planted], words: str) -> None:
    with pytest.raises(Mismatch, match=words) as caught:
        check_env(planted(), make=planted, time_limit=12)
    assert "\n" not in str(caught.value)


def test_all_mistakes_of_one_array_after_another_are_listed_at_once() -> None:
    class Several(Planted):
        def step(self, actions: NDArray[Any]) -> Step:
            step = super().step(actions)
            step.reward = step.reward[:2]
            step.valid = step.valid.astype(np.int8)  # type: ignore[assignment]
            return step

    with pytest.raises(Mismatch, match=r"\(1\) Step\.valid .*\(2\) Step\.reward"):
        check_env(Several())


def test_a_limit_that_seems_to_terminate_is_a_remark_where_the_limit_is_not_known() -> None:
    (remark,) = check_env(LimitTerminates())
    assert "at exactly 12 steps" in remark


def test_the_error_for_an_object_that_is_not_an_environment_names_what_it_lacks() -> None:
    with pytest.raises(Mismatch, match=r"lacks .*state_dict"):
        check_env(object())  # type: ignore[arg-type]


def ladder() -> ProverEnv:
    vocab = Vocab.of(["a", "b", "c"], ["up", "above"])
    facts = Facts.of([(0, 0, 1), (1, 0, 2)], vocab)
    rules = parse_rules("above(X, Y) :- up(X, Y).", vocab)
    return ProverEnv(facts, rules, [(0, 1, 1), (1, 1, 2)], 3, max_candidates=4)


ENVS: list[Callable[[], Env]] = [lambda: CartPole(3), ladder]
each = pytest.mark.parametrize("make", ENVS, ids=["cartpole", "prover"])


@each
@pytest.mark.parametrize(
    ("actions", "error", "words"),
    [
        (np.array([0.2, 0.7, 0.1]), ConfigError, "must be integers, got float64"),
        (np.array([np.nan, 1, 0]), ConfigError, "must be integers"),
        (np.array(["0", "1", "0"]), ConfigError, "must be integers"),
        ([0, 1], Mismatch, r"must have shape \(3,\), got \(2,\)"),
        (np.zeros(4, np.int64), Mismatch, r"got \(4,\)"),
        (0, Mismatch, r"got \(\)"),
        ([[0, 1, 0]], Mismatch, r"got \(1, 3\)"),
    ],
)
def test_actions_that_are_not_one_integer_each_are_refused_and_change_nothing(
    make: Callable[[], Env], actions: Any, error: type[Exception], words: str
) -> None:
    env = make()
    env.reset()
    before = copy.deepcopy(env.state_dict())

    with pytest.raises(error, match=words):
        env.step(actions)
    assert_equal(env.state_dict(), before)


@each
def test_a_state_without_one_of_its_parts_is_refused_by_name(make: Callable[[], Env]) -> None:
    env = make()
    env.reset()
    for name in env.state_dict():
        state = env.state_dict()
        del state[name]
        with pytest.raises(Mismatch, match=f"lacks {name};"):
            env.load_state_dict(state)


@pytest.mark.parametrize("size", [0, -1, 2.5, float("nan"), "many"])
def test_a_batch_size_is_a_whole_number(size: Any) -> None:
    env = ladder()
    with pytest.raises(ConfigError, match="batch_size must be an integer of at least 1"):
        ProverEnv(env.facts, env.rules, env.queries, size)


@pytest.mark.parametrize("gamma", [-0.1, 1.5, float("nan")])
def test_a_discount_is_from_0_to_1(gamma: float) -> None:
    env = ladder()
    with pytest.raises(ConfigError, match="gamma must be from 0 to 1"):
        ProverEnv(env.facts, env.rules, env.queries, 2, gamma=gamma)
