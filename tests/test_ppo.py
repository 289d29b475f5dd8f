"""PPO: acts within the mask, learns, leaves invalid steps out, and resumes to the bit."""

import dataclasses
import inspect
import itertools
import math
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from batchwright import rng
from batchwright.checkpoint import latest
from batchwright.envs import ArraySpec, CartPole, Obs, ProverEnv, Step, check_env
from batchwright.errors import BadFile, BadLoss, ConfigError, Mismatch, MissingFile
from batchwright.logic import Facts, Vocab, parse_rules
from batchwright.rl import (
    PPO,
    GoalEncoder,
    Policy,
    PPOConfig,
    Rollout,
    Runner,
    choose,
    gae,
    policy_for,
)

torch.set_num_threads(1)


class Doors:
    """Six doors, some of them locked: the last unlocked one pays 1. Three doors, then the end.

    With `failing`, that share of the steps is not valid and shows a reward of a million.
    """

    num_actions = 6

    def __init__(self, num_envs: int, *, seed: int = 0, failing: float = 0.0) -> None:
        self.num_envs, self._seed, self._failing = num_envs, seed, failing
        self._steps = np.zeros(num_envs, np.int64)
        self._count = 0

    @property
    def spec(self) -> Mapping[str, ArraySpec]:
        return {
            "features": ArraySpec((6,), np.dtype(np.float32)),
            "mask": ArraySpec((6,), np.dtype(np.bool_)),
        }

    def _look(self, purpose: str) -> Obs:
        unlocked = rng.stream(self._seed, purpose, self._count).random((self.num_envs, 6)) < 0.4
        unlocked[np.arange(self.num_envs), self._count % 6] = True
        return {"features": unlocked.astype(np.float32), "mask": unlocked}

    def reset(self, where: NDArray[np.bool_] | None = None) -> Obs:
        self._steps[slice(None) if where is None else where] = 0
        return self._look("doors")

    def step(self, actions: NDArray[Any]) -> Step:
        best = 5 - np.argmax(self._look("doors")["mask"][:, ::-1], 1)
        valid = rng.stream(self._seed, "fail", self._count).random(self.num_envs) >= self._failing
        reward = np.where(valid, actions == best, 1e6).astype(np.float32)
        self._steps += 1
        self._count += 1
        over = self._steps == 3
        self._steps[over] = 0
        none = np.zeros(self.num_envs, np.bool_)
        return Step(self._look("doors"), reward, over, none, valid, self._look("last"), {})

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps.copy(), "count": self._count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._steps[:], self._count = state["steps"], state["count"]


def prover(num_envs: int = 16, *, goals: int = 6) -> ProverEnv:
    """A chain of ten cities; which can be reached from which."""
    vocab = Vocab.of([f"c{i}" for i in range(10)], ["road", "reach"])
    road, reach = vocab.predicate("road"), vocab.predicate("reach")
    facts = Facts.of([(i, road, i + 1) for i in range(9)], vocab)
    rules = parse_rules(
        "reach(X, Y) :- road(X, Y).\nreach(X, Y) :- road(X, Z), reach(Z, Y).", vocab
    )
    queries = [(i, reach, j) for i in range(9) for j in range(i + 1, min(10, i + 4))]
    return ProverEnv(
        facts, rules, queries, num_envs, max_candidates=8, depth=8, goals=goals, negatives=1
    )


def weights(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def mixed(key: int, counter: int) -> int:
    """`batchwright.permutation.mix` in plain Python."""
    x = (key + 0x9E3779B97F4A7C15 * (counter + 1)) % 2**64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


def drawn(logits: list[float], mask: list[bool], key: int, row: int) -> int:
    """The kernel `sample` in plain Python, for one row."""
    top = max(x for x, ok in zip(logits, mask, strict=True) if ok)
    shares = [math.exp(x - top) if ok else 0.0 for x, ok in zip(logits, mask, strict=True)]
    aim = (mixed(mixed(key, row), 0) >> 11) * 2.0**-53 * sum(shares)
    passed = list(itertools.accumulate(shares))
    beyond = [k for k, sum_so_far in enumerate(passed) if sum_so_far > aim]
    return beyond[0] if beyond else max(k for k, share in enumerate(shares) if share > 0)


logits_and_masks = st.integers(1, 7).flatmap(
    lambda k: st.lists(
        st.tuples(
            st.lists(st.floats(-(2.0**90), 2.0**90, width=32), min_size=k, max_size=k),
            st.lists(st.booleans(), min_size=k, max_size=k).filter(any),
        ),
        min_size=1,
        max_size=6,
    )
)


@settings(max_examples=100, deadline=None)
@given(logits_and_masks, st.integers(0, 2**64 - 1))
def test_an_action_is_never_outside_the_mask(
    rows: list[tuple[list[float], list[bool]]], key: int
) -> None:
    logits = np.array([r[0] for r in rows], np.float32)
    mask = np.array([r[1] for r in rows])
    for chosen in (None, key):
        actions, logp = choose(torch.from_numpy(logits), mask, chosen)
        assert mask[np.arange(len(mask)), actions].all()
        expected = torch.from_numpy(logits).double().masked_fill(~torch.from_numpy(mask), -np.inf)
        expected = expected.log_softmax(-1)
        assert np.isfinite(expected.numpy()[np.arange(len(mask)), actions]).all()
        np.testing.assert_allclose(
            logp, expected.numpy()[np.arange(len(mask)), actions], rtol=1e-5, atol=1e-5
        )
    # Each row is drawn by its own number, whatever the others are.
    alone, _ = choose(torch.from_numpy(logits[:1]), mask[:1], key)
    assert alone[0] == actions[0]
    assert actions.tolist() == [drawn(*row, key, b) for b, row in enumerate(rows)]


def test_actions_are_drawn_as_often_as_their_probability_says() -> None:
    logits = torch.tensor([0.0, 1.0, -1.0, 5.0, 2.0]).expand(40_000, 5)
    mask = np.broadcast_to(np.array([True, True, True, False, True]), (40_000, 5)).copy()
    actions, _ = choose(logits, mask, 12345)
    p = np.exp([0.0, 1.0, -1.0, -np.inf, 2.0])
    expected = p / p.sum() * 40_000
    seen = np.bincount(actions, minlength=5)
    allowed = expected > 0
    # Chi-square with three degrees of freedom; 25 is passed once in 60,000 seeds.
    assert (((seen - expected) ** 2)[allowed] / expected[allowed]).sum() < 25
    assert seen[3] == 0


def test_scores_that_are_no_numbers_and_masks_that_allow_nothing_are_told() -> None:
    mask = np.array([[True, True], [True, False]])
    with pytest.raises(BadLoss, match="environment 1 are not finite"):
        choose(torch.tensor([[0.0, 1.0], [torch.nan, 0.0]]), mask, 1)
    mask[0] = False
    with pytest.raises(ConfigError, match="environment 0 allows no action"):
        choose(torch.zeros(2, 2), mask, None)


def test_a_rollout_is_what_happened() -> None:
    policy = policy_for(CartPole(4), seed=1)
    runner = Runner(CartPole(4, max_steps=11), 40, seed=5)
    env = CartPole(4, max_steps=11)
    obs = env.reset()
    truncated = 0
    for _ in range(2):
        got = runner.collect(policy)
        for t in range(40):
            assert np.array_equal(got.obs["features"][t], obs["features"])
            step = env.step(got.actions[t])
            assert np.array_equal(got.rewards[t], step.reward)
            assert np.array_equal(got.terminated[t], step.terminated)
            assert np.array_equal(got.truncated[t], step.truncated)
            with torch.no_grad():
                now = policy.value({"features": torch.from_numpy(obs["features"])})
                last = policy.value({"features": torch.from_numpy(step.final_obs["features"])})
            np.testing.assert_allclose(got.values[t], now, atol=1e-6)
            expected = np.where(step.truncated, last, 0.0)
            np.testing.assert_allclose(got.final_values[t], expected, atol=1e-6)
            truncated += int(step.truncated.sum())
            obs = step.obs
        with torch.no_grad():
            behind = policy.value({"features": torch.from_numpy(obs["features"])})
        np.testing.assert_allclose(got.last_value, behind, atol=1e-6)
        assert got.episode_returns == [float(n) for n in got.episode_lengths]
        assert len(got.episode_returns) == int((got.terminated | got.truncated).sum())
    assert truncated > 0


def test_an_update_moves_nothing_by_what_stands_in_invalid_steps() -> None:
    results = []
    for spoil in (False, True):
        env = Doors(8, failing=0.3)
        learner = PPO(env, policy_for(env), PPOConfig(total_steps=1000, num_steps=16))
        rollout = learner.runner.collect(learner.policy)
        bad = ~rollout.valid
        assert 10 < bad.sum() < 80
        if spoil:
            rollout.rewards[bad] = -np.inf
            rollout.terminated[bad] ^= True
            rollout.logp[bad] = 17.0
            rollout.actions[bad] = 0
        metrics = learner.update(rollout)
        results.append((weights(learner.policy), metrics))
    assert same(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]
    assert results[0][1]["losses/value_loss"] < 10


def test_episodes_with_an_invalid_step_are_in_no_metric() -> None:
    env = Doors(64, failing=0.2)
    learner = PPO(env, policy_for(env), PPOConfig(total_steps=64 * 32, num_steps=32))
    metrics = learner.step()
    assert metrics["charts/invalid_steps"] > 100
    assert 0 <= metrics["charts/episodic_return"] <= 3
    assert 0 < metrics["charts/episodes"] < 64 * 10
    env = Doors(4, failing=1.0)
    learner = PPO(env, policy_for(env), PPOConfig(total_steps=64, num_steps=8))
    before = weights(learner.policy)
    metrics = learner.step()
    assert "charts/episodic_return" not in metrics
    assert same(before, weights(learner.policy))


@pytest.mark.parametrize("clip", [None, 0.2])
def test_the_first_minibatch_has_the_losses_of_the_formula(clip: float | None) -> None:
    config = PPOConfig(
        total_steps=4096,
        num_steps=32,
        epochs=1,
        minibatches=1,
        normalize_advantages=False,
        value_clip=clip,
    )
    env = CartPole(8, max_steps=9)
    learner = PPO(env, policy_for(env), config)
    rollout = learner.runner.collect(learner.policy)
    advantages, returns = gae(
        rollout.rewards,
        rollout.values,
        rollout.last_value,
        rollout.terminated,
        rollout.truncated,
        config.gamma,
        config.lam,
        rollout.final_values,
    )
    values, rewards = rollout.values.copy(), returns.copy()
    metrics = learner.update(rollout)
    # The policy has not moved since the rollout: all ratios are 1, in spite of the masks.
    assert metrics["losses/policy_loss"] == pytest.approx(-advantages.mean(), rel=1e-4)
    assert metrics["losses/value_loss"] == pytest.approx(
        0.5 * np.square(values - rewards).mean(), rel=1e-4
    )
    assert metrics["losses/approx_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["losses/clipfrac"] == 0.0
    explained = 1 - np.var(rewards - values) / np.var(rewards)
    assert metrics["losses/explained_variance"] == pytest.approx(explained, abs=1e-5)


def test_rates_and_entropy_move_in_straight_lines() -> None:
    env = Doors(4)
    config = PPOConfig(
        total_steps=4 * 8 * 4, num_steps=8, lr=1.0e-3, entropy_coef=0.4, final_entropy_coef=0.0
    )
    seen: list[tuple[float, float]] = []
    PPO(env, policy_for(env), config).learn(
        on_update=lambda _, m: seen.append((m["charts/learning_rate"], m["charts/entropy_coef"]))
    )
    np.testing.assert_allclose([s[0] for s in seen], [1e-3, 0.75e-3, 0.5e-3, 0.25e-3])
    np.testing.assert_allclose([s[1] for s in seen], [0.4, 0.3, 0.2, 0.1])


def test_an_update_ends_where_the_policy_has_moved_too_far() -> None:
    counts = []
    for limit in (None, 1e-3):
        env = Doors(8)
        config = PPOConfig(total_steps=4096, num_steps=16, lr=1e-2, target_kl=limit)
        counts.append(PPO(env, policy_for(env), config).step()["losses/minibatches"])
    assert counts[0] == 16
    assert 0 < counts[1] < 16


@pytest.mark.training
def test_it_learns_to_open_the_right_door_among_the_unlocked_ones_though_steps_fail() -> None:
    env = Doors(32, failing=0.1)
    config = PPOConfig(total_steps=32 * 16 * 30, num_steps=16, lr=1e-2, gamma=0.5, entropy_coef=0.0)
    learner = PPO(env, policy_for(env), config)
    first = learner.step()["charts/episodic_return"]
    last = learner.learn()["charts/episodic_return"]
    assert first < 2.2
    assert last > 2.8


@pytest.mark.training
def test_it_learns_to_balance_the_pole() -> None:
    env = CartPole(32)
    config = PPOConfig(
        total_steps=30_000,
        num_steps=32,
        epochs=8,
        minibatches=4,
        gamma=0.98,
        lam=0.8,
        lr=3e-3,
        entropy_coef=0.0,
    )
    returns: list[float] = []
    PPO(env, policy_for(env), config).learn(
        on_update=lambda _, m: returns.append(m.get("charts/episodic_return", np.nan))
    )
    assert returns[0] < 40
    assert np.nanmean(returns[-8:]) > 200


@pytest.mark.training
def test_it_learns_to_prove() -> None:
    env = prover(32)
    config = PPOConfig(
        total_steps=32 * 32 * 25, num_steps=32, lr=3e-3, gamma=0.95, entropy_coef=0.01
    )
    learner = PPO(env, policy_for(env, width=32), config)
    first = learner.step()["charts/episodic_return"]
    last = learner.learn()["charts/episodic_return"]
    assert last > first + 0.5
    assert last > 0.7


def test_what_is_padding_does_not_count() -> None:
    env = prover(12)
    obs = {name: torch.from_numpy(array.copy()) for name, array in env.reset().items()}
    policy = policy_for(env, seed=3)
    with torch.no_grad():
        logits, value = policy.logits(obs), policy.value(obs)
        obs["candidates"][~obs["mask"]] = 3
        assert torch.equal(policy.logits(obs), logits)
        more = torch.cat([obs["goals"], torch.full((12, 5, 3), -1, dtype=torch.int32)], 1)
        torch.testing.assert_close(policy.value(obs | {"goals": more}), value)
    assert (logits[~obs["mask"]] == torch.finfo(torch.float32).min).all()
    assert isinstance(policy.actor, GoalEncoder)


def test_the_environments_of_these_tests_are_good_ones() -> None:
    assert check_env(Doors(4)) == []
    assert check_env(prover(4), make=prover) == []


def test_a_policy_is_the_same_for_the_same_seed_and_leaves_torchs_own_alone() -> None:
    state = torch.random.get_rng_state()
    one, two, other = (policy_for(CartPole(2), seed=s) for s in (1, 1, 2))
    assert torch.equal(state, torch.random.get_rng_state())
    assert same(weights(one), weights(two))
    assert not same(weights(one), weights(other))


class Plainest:
    """A collector as short as can be: every value on its own, no state beyond the environment's."""

    def __init__(self, env: Any, num_steps: int, *, seed: int) -> None:
        self.env, self.num_steps, self.seed = env, num_steps, seed
        self.at, self.obs = 0, None

    def collect(self, policy: Policy) -> Rollout:
        out = Rollout.allocate(self.env, self.num_steps)
        obs = self.env.reset() if self.obs is None else self.obs
        for t in range(self.num_steps):
            for name in out.obs:
                out.obs[name][t] = obs[name]
            seen = {name: torch.from_numpy(out.obs[name][t]) for name in out.obs}
            with torch.no_grad():
                logits, out.values[t] = policy.logits(seen), policy.value(seen)
            key = rng.key(self.seed, "act", self.at + t)
            out.actions[t], out.logp[t] = choose(logits, out.obs["mask"][t], key)
            step = self.env.step(out.actions[t])
            out.rewards[t], out.valid[t] = step.reward, step.valid
            out.terminated[t], out.truncated[t] = step.terminated, step.truncated
            last = {name: torch.from_numpy(step.final_obs[name]) for name in out.obs}
            with torch.no_grad():
                out.final_values[t] = np.where(step.truncated, policy.value(last), 0.0)
            obs = step.obs
        self.at += self.num_steps
        self.obs = {name: obs[name].copy() for name in out.obs}
        with torch.no_grad():
            out.last_value[:] = policy.value(
                {name: torch.from_numpy(array) for name, array in self.obs.items()}
            )
        return out

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "obs": self.obs, "env": self.env.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.at, self.obs = state["at"], state["obs"]
        self.env.load_state_dict(state["env"])


def test_another_collector_takes_the_place_of_the_runner_in_training_and_checkpoints(
    tmp_path: Path,
) -> None:
    def learner() -> PPO:
        env = CartPole(8, max_steps=20)
        return PPO(env, policy_for(env, width=16), CONFIG, runner=Plainest)

    whole, begun, resumed = learner(), learner(), learner()
    whole.learn()
    begun.learn(save_to=tmp_path, stop=lambda: begun.updates == 3)
    resumed.resume(tmp_path)
    resumed.learn()

    assert (whole.steps, resumed.steps) == (8 * 16 * 8, 8 * 16 * 8)
    assert same(weights(whole.policy), weights(resumed.policy))


@pytest.mark.parametrize("kind", ["pole", "doors", "prover"])
def test_the_default_rollout_is_the_plain_definition_to_the_bit(kind: str) -> None:
    """All but values, whose last bits depend on how many rows a matrix product has."""
    one, other = (learner(kind) for _ in range(2))
    plain = Plainest(other.env, CONFIG.num_steps, seed=CONFIG.seed)
    for _ in range(3):
        got, expected = one.runner.collect(one.policy), plain.collect(other.policy)
        for name in ("actions", "logp", "rewards", "terminated", "truncated", "valid"):
            np.testing.assert_array_equal(getattr(got, name), getattr(expected, name), name)
        for name, array in expected.obs.items():
            np.testing.assert_array_equal(got.obs[name], array, name)
        for name in ("values", "final_values", "last_value"):
            np.testing.assert_allclose(getattr(got, name), getattr(expected, name), atol=1e-5)
        # So that the policies go on from the same bits.
        one.update(got)
        other.policy.load_state_dict(one.policy.state_dict())


CONFIG = PPOConfig(total_steps=8 * 16 * 8, num_steps=16, target_kl=0.5, lr=1e-2)
TIMES = ("charts/SPS", "charts/rollout_s", "charts/update_s")


def learner(kind: str = "pole", config: PPOConfig = CONFIG) -> PPO:
    env: Any = {
        "pole": lambda: CartPole(8, max_steps=20),
        "doors": lambda: Doors(8, failing=0.2),
        "prover": lambda: prover(8),
    }[kind]()
    return PPO(env, policy_for(env, width=16), config)


@pytest.mark.parametrize("kind", ["pole", "doors", "prover"])
def test_a_saved_run_goes_on_to_the_bit(kind: str, tmp_path: Path) -> None:
    seen: list[list[dict[str, float]]] = [[], []]
    whole = learner(kind)
    whole.learn(on_update=lambda _, m: seen[0].append(m))
    begun = learner(kind)
    begun.learn(
        on_update=lambda _, m: seen[1].append(m),
        save_to=tmp_path,
        stop=lambda: begun.updates == 3,
    )
    resumed = learner(kind)
    resumed.policy.load_state_dict(learner(kind).policy.state_dict())
    resumed.resume(tmp_path)
    assert (resumed.updates, resumed.steps) == (3, 3 * 8 * 16)
    resumed.learn(on_update=lambda _, m: seen[1].append(m))

    assert same(weights(whole.policy), weights(resumed.policy))
    for one, other in zip(seen[0], seen[1], strict=True):
        kept = {name: value for name, value in one.items() if name not in TIMES}
        assert kept == {name: value for name, value in other.items() if name not in TIMES}


def train(folder: Path, *, resume: bool = False, kill_at: int = 0) -> PPO:
    """Sixteen updates, saved each; killed after that many, before the last one is saved."""
    env = CartPole(8, max_steps=40)
    config = PPOConfig(total_steps=8 * 32 * 16, num_steps=32, lr=3e-3, epochs=2)
    learner = PPO(env, policy_for(env), config)
    if resume:
        learner.resume(folder)

    def after(learner: PPO, metrics: dict[str, float]) -> None:
        if learner.updates == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    learner.learn(on_update=after, save_to=folder, save_every=1)
    return learner


SCRIPT = f"""
import os, signal, sys, torch
from pathlib import Path
from batchwright.envs import CartPole
from batchwright.rl import PPO, PPOConfig, policy_for

torch.set_num_threads(1)
{inspect.getsource(train)}
train(Path(sys.argv[1]), kill_at=7)
"""


@pytest.mark.training
def test_a_run_that_was_killed_ends_with_the_bits_of_one_that_was_not(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path / "killed")])
    assert killed.returncode == -signal.SIGKILL
    assert latest(tmp_path / "killed").state["updates"] == 6
    resumed = train(tmp_path / "killed", resume=True)
    whole = train(tmp_path / "whole")

    assert (resumed.updates, whole.updates) == (16, 16)
    assert same(weights(resumed.policy), weights(whole.policy))


def test_what_cannot_be_resumed_says_why(tmp_path: Path) -> None:
    with pytest.raises(MissingFile, match="no checkpoint in"):
        learner().resume(tmp_path)
    saved = learner()
    saved.step()
    saved.save(tmp_path)
    other = dataclasses.replace(CONFIG, gamma=0.5)
    with pytest.raises(Mismatch, match=r"gamma=0\.99, got 0\.5"):
        learner(config=other).resume(tmp_path)
    env = CartPole(8)
    with pytest.raises(Mismatch, match="a policy of other shapes"):
        PPO(env, policy_for(env, width=8), CONFIG).resume(tmp_path)
    env = CartPole(9)
    with pytest.raises(Mismatch, match="has 8 environments, this runner has 9"):
        PPO(env, policy_for(env, width=16), CONFIG).resume(tmp_path)


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    run = learner()
    paths = []
    for _ in range(4):
        run.step()
        paths.append(run.save(tmp_path, keep=2))
    assert sorted(tmp_path.iterdir()) == paths[2:]
    arrays = paths[3] / "arrays.safetensors"
    content = bytearray(arrays.read_bytes())
    content[len(content) // 2] ^= 1
    arrays.write_bytes(content)
    found = latest(tmp_path)
    assert found is not None
    assert found.path == paths[2]
    (paths[2] / "manifest.json").write_text("{}")
    with pytest.raises(BadFile, match=r"no checkpoint in .* can be used"):
        latest(tmp_path)


def test_a_loss_that_is_no_number_stops_before_it_reaches_the_weights() -> None:
    run = learner()
    rollout = run.runner.collect(run.policy)
    rollout.rewards[3, 2] = np.nan
    before = weights(run.policy)
    with pytest.raises(BadLoss, match="update 1: a reward or a value is not finite"):
        run.update(rollout)
    assert same(before, weights(run.policy))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_steps": 0}, "num_steps must be at least 1, got 0"),
        ({"clip": 0.0}, "clip must be greater than 0, got 0"),
        ({"target_kl": -1.0}, "target_kl must be greater than 0, got -1"),
        ({"gamma": 1.5}, "gamma must be between 0 and 1, got 1.5"),
    ],
)
def test_settings_out_of_range_are_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        PPOConfig(**change)
