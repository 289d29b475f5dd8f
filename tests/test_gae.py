"""Advantages: equal to a recursion along each episode, on every pattern of ends there is."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from batchwright.errors import ConfigError, Mismatch
from batchwright.rl import gae, kernels

Array = NDArray[Any]
NONE, TERMINATED, TRUNCATED, INVALID = range(4)


def by_recursion(
    rewards: list[float],
    values: list[float],
    last: float,
    kinds: tuple[int, ...],
    gamma: float,
    lam: float,
    finals: list[float],
) -> list[float]:
    """The definition: sum over k of (gamma lam)^k delta(t + k), within the episode."""

    def delta(t: int) -> float:
        if kinds[t] == TERMINATED:
            behind = 0.0
        elif kinds[t] == TRUNCATED:
            behind = finals[t]
        else:
            behind = values[t + 1] if t + 1 < len(values) else last
        return rewards[t] + gamma * behind - values[t]

    def advantage(t: int) -> float:
        if t == len(rewards) or kinds[t] == INVALID:
            return 0.0
        rest = advantage(t + 1) if kinds[t] == NONE else 0.0
        return delta(t) + gamma * lam * rest

    return [advantage(t) for t in range(len(rewards))]


def arrays(T: int, B: int, seed: int = 0, dtype: Any = np.float64) -> tuple[Array, ...]:
    random = np.random.default_rng(seed)
    return tuple(random.normal(size=s).astype(dtype) for s in [(T, B), (T, B), (B,), (T, B)])


def flags(kinds: Array) -> tuple[Array, Array, Array]:
    return kinds == TERMINATED, kinds == TRUNCATED, kinds != INVALID


@pytest.mark.parametrize("T", [1, 2, 3, 4, 5])
def test_every_pattern_of_ends_equals_the_recursion_along_the_episode(T: int) -> None:
    patterns = list(itertools.product(range(4), repeat=T))
    rewards, values, last, finals = arrays(T, len(patterns), seed=T)
    terminated, truncated, valid = flags(np.array(patterns).T)
    # All patterns at once, side by side, and then each alone: B is 4 ** T and 1.
    advantages, returns = gae(rewards, values, last, terminated, truncated, 0.9, 0.8, finals, valid)
    for b, kinds in enumerate(patterns):
        column = [a[:, b].tolist() for a in (rewards, values, finals)]
        expected = by_recursion(column[0], column[1], last[b], kinds, 0.9, 0.8, column[2])
        np.testing.assert_allclose(advantages[:, b], expected, rtol=1e-12, atol=1e-12)
        own = [a[:, b : b + 1] for a in (rewards, values, terminated, truncated, finals, valid)]
        alone, _ = gae(own[0], own[1], last[b : b + 1], own[2], own[3], 0.9, 0.8, own[4], own[5])
        assert np.array_equal(alone[:, 0], advantages[:, b])
    np.testing.assert_array_equal(returns, advantages + values)


@pytest.mark.parametrize("T", [1, 2, 3, 4])
def test_two_environments_with_every_pair_of_patterns_do_not_touch_each_other(T: int) -> None:
    rewards, values, last, finals = arrays(T, 2)
    for pair in itertools.product(itertools.product(range(3), repeat=T), repeat=2):
        terminated, truncated, _ = flags(np.array(pair).T)
        advantages, _ = gae(rewards, values, last, terminated, truncated, 0.99, 0.95, finals)
        for b in range(2):
            column = [a[:, b].tolist() for a in (rewards, values, finals)]
            expected = by_recursion(column[0], column[1], last[b], pair[b], 0.99, 0.95, column[2])
            np.testing.assert_allclose(advantages[:, b], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_torchrl_agrees(dtype: Any) -> None:
    from torchrl.objectives.value.functional import generalized_advantage_estimate

    T, B = 40, 7
    rewards, values, last, finals = arrays(T, B, dtype=dtype)
    kinds = np.random.default_rng(1).choice(3, (T, B), p=[0.8, 0.1, 0.1])
    terminated, truncated, _ = flags(kinds)
    # Their next value is that of the observation the step led to, the final one included.
    behind = np.concatenate([values[1:], last[None]])
    behind[truncated] = finals[truncated]

    def theirs(array: Array) -> torch.Tensor:
        return torch.from_numpy(array.T.copy()).unsqueeze(-1)

    expected, target = generalized_advantage_estimate(
        0.99,
        0.95,
        theirs(values),
        theirs(behind),
        theirs(rewards),
        theirs(terminated | truncated),
        theirs(terminated),
    )
    advantages, returns = gae(rewards, values, last, terminated, truncated, 0.99, 0.95, finals)
    tolerance = 1e-4  # theirs keeps gamma and lambda in float32
    assert advantages.dtype == dtype
    np.testing.assert_allclose(advantages, expected[..., 0].numpy().T, atol=tolerance)
    np.testing.assert_allclose(returns, target[..., 0].numpy().T, atol=tolerance)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_the_machine_code_equals_its_plain_python(T: int, B: int, seed: int) -> None:
    rewards, values, last, finals = arrays(T, B, seed)
    kinds = np.random.default_rng(seed).choice(4, (T, B))
    got = gae(rewards, values, last, *flags(kinds)[:2], 0.9, 0.7, finals, flags(kinds)[2])
    # The outer loop as plain Python; the inner one is compared by the recursion above.
    out = np.empty((T, B)), np.empty((T, B))
    terminated, truncated, valid = flags(kinds)
    kernels.advantages.py_func(  # type: ignore[attr-defined]
        rewards, values, last, terminated, truncated, finals, valid, 0.9, 0.9 * 0.7, *out
    )
    np.testing.assert_array_equal(got[0], out[0])
    np.testing.assert_array_equal(got[1], out[1])


def test_what_happens_in_and_after_an_invalid_step_does_not_reach_the_steps_before_it() -> None:
    rewards, values, last, finals = arrays(6, 3)
    kinds = np.zeros((6, 3), int)
    kinds[3] = INVALID
    before, _ = gae(rewards, values, last, *flags(kinds)[:2], 0.9, 0.9, finals, flags(kinds)[2])
    spoiled = rewards.copy()
    spoiled[3:] = 1e6
    other_values = values.copy()
    other_values[4:] = -1e6  # values[3] is of a real observation and does count
    kinds[3:] = INVALID
    after, _ = gae(spoiled, other_values, last, *flags(kinds)[:2], 0.9, 0.9, finals, kinds < 3)

    np.testing.assert_array_equal(before[:3], after[:3])
    assert (before[3] == 0).all()


def test_numbers_that_mean_nothing_are_never_used() -> None:
    rewards, values, last, finals = arrays(5, 2)
    kinds = np.array([[NONE, TRUNCATED], [TERMINATED, INVALID]] + [[NONE, NONE]] * 3)
    terminated, truncated, valid = flags(kinds)
    expected, _ = gae(rewards, values, last, terminated, truncated, 0.9, 0.9, finals, valid)
    finals[~truncated] = np.nan
    rewards[~valid] = np.inf
    got, returns = gae(rewards, values, last, terminated, truncated, 0.9, 0.9, finals, valid)

    np.testing.assert_array_equal(got, expected)
    assert np.isfinite(returns).all()


def test_truncation_without_final_values_is_refused_instead_of_guessed() -> None:
    rewards, values, last, _ = arrays(3, 2)
    ends = np.ones((3, 2), bool)
    with pytest.raises(ConfigError, match="final_values is missing"):
        gae(rewards, values, last, ~ends, ends, 0.9, 0.9)


def test_arrays_in_another_order_of_memory_give_the_same() -> None:
    rewards, values, last, finals = arrays(6, 4)
    terminated, truncated, valid = flags(np.random.default_rng(0).choice(4, (6, 4)))
    expected = gae(rewards, values, last, terminated, truncated, 0.9, 0.9, finals, valid)
    turned = [np.asfortranarray(a) for a in (rewards, values, terminated, truncated, finals, valid)]
    got = gae(*turned[:2], last, *turned[2:4], 0.9, 0.9, *turned[4:])
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"values": np.zeros((3, 1))}, r"values is float64 of shape \[3, 1\]"),
        ({"last_value": np.zeros((1, 2))}, r"last_value .* must be float64 \[2\]"),
        ({"terminated": np.zeros((3, 2))}, "terminated is float64 .* must be bool"),
        ({"values": np.zeros((3, 2), np.float32)}, "values is float32"),
        ({"rewards": np.zeros(3)}, r"\[T, B\]"),
        ({"rewards": np.zeros((3, 2), int)}, "rewards are int64"),
    ],
)
def test_arrays_that_do_not_fit_are_named(change: dict[str, Array], words: str) -> None:
    none = np.zeros((3, 2), bool)
    given = {
        "rewards": np.zeros((3, 2)),
        "values": np.zeros((3, 2)),
        "last_value": np.zeros(2),
        "terminated": none,
        "truncated": none,
    }
    with pytest.raises(Mismatch, match=words):
        gae(**(given | change), gamma=0.9, lam=0.9)
