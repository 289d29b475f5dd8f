"""TorchRL and Gymnasium see the same episodes as the environment itself, by their own classes."""

import itertools
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import vector
from numpy.typing import NDArray

from batchwright.envs import BatchedVecEnv, CartPole, Env, ProverEnv
from batchwright.envs.gymnasium import GymnasiumVectorEnv
from batchwright.envs.torchrl import TorchRLEnv
from batchwright.errors import ConfigError, Mismatch
from batchwright.logic import Facts, Graph, Vocab, load_graph, parse_rules
from batchwright.logic.mine.mining import mine
from batchwright.rl import PPO, PPOConfig, policy_for

EXAMPLES = Path(__file__).parents[1] / "examples" / "environments"

torch.set_num_threads(1)
# Their own, on import and in use; nothing that we could do otherwise.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:torchrl"),
    pytest.mark.filterwarnings("ignore::UserWarning:tensordict"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def poles(seed: int = 3, num_envs: int = 5) -> CartPole:
    return CartPole(num_envs, seed=seed, max_steps=12)


def prover(seed: int = 3, num_envs: int = 5) -> ProverEnv:
    """A chain of ten cities; which can be reached from which."""
    vocab = Vocab.of([f"c{i}" for i in range(10)], ["road", "reach"])
    road, reach = vocab.predicate("road"), vocab.predicate("reach")
    facts = Facts.of([(i, road, i + 1) for i in range(9)], vocab)
    rules = parse_rules(
        "reach(X, Y) :- road(X, Y).\nreach(X, Y) :- road(X, Z), reach(Z, Y).", vocab
    )
    queries = [(i, reach, j) for i in range(9) for j in range(i + 1, min(10, i + 4))]
    return ProverEnv(
        facts, rules, queries, num_envs, seed=seed, max_candidates=8, depth=6, negatives=1
    )


MAKERS: list[Callable[..., Env]] = [poles, prover]
both = pytest.mark.parametrize("make", MAKERS)


def allowed(mask: NDArray[np.bool_], t: int) -> NDArray[np.int64]:
    draws = np.random.default_rng([7, t]).random(mask.shape)
    return np.argmax(np.where(mask, draws, -1.0), -1).astype(np.int64)


@both
def test_torchrl_finds_the_specs_kept(make: Callable[..., Env]) -> None:
    from torchrl.envs.utils import check_env_specs

    check_env_specs(TorchRLEnv(make()), break_when_any_done="both")
    check_env_specs(TorchRLEnv(make()), seed=1)


@both
def test_a_torchrl_rollout_is_the_life_of_the_environment(make: Callable[..., Env]) -> None:
    steps = iter(range(1000))

    def policy(td: Any) -> Any:
        return td.set("action", torch.from_numpy(allowed(td["mask"].numpy(), next(steps))))

    rollout = TorchRLEnv(make()).rollout(40, policy, break_when_any_done=False)
    env = make()
    obs = {name: array.copy() for name, array in env.reset().items()}
    ends = 0
    for t in range(40):
        for name in env.spec:
            assert np.array_equal(rollout[name][:, t].numpy(), obs[name]), (name, t)
        step = env.step(allowed(obs["mask"], t))
        ended = step.done
        ends += int(ended.sum())
        assert np.array_equal(rollout["next", "reward"][:, t, 0].numpy(), step.reward)
        assert np.array_equal(rollout["next", "terminated"][:, t, 0].numpy(), step.terminated)
        assert np.array_equal(rollout["next", "truncated"][:, t, 0].numpy(), step.truncated)
        assert np.array_equal(rollout["next", "done"][:, t, 0].numpy(), ended)
        for name in env.spec:
            seen = rollout["next", name][:, t].numpy()
            assert np.array_equal(seen[~ended], step.obs[name][~ended])
            assert np.array_equal(seen[ended], step.final_obs[name][ended])
        obs = {name: array.copy() for name, array in step.obs.items()}
    assert ends > 5


def test_a_rollout_that_is_held_by_any_part_of_it_is_never_written_into() -> None:
    env = TorchRLEnv(poles())

    def rolled() -> Any:
        return env.rollout(6, break_when_any_done=False)

    first = rolled()
    part = first["next", "features"][0].numpy()[1:3]
    before, place = part.copy(), first["next", "features"].data_ptr()
    others = [rolled(), rolled()]
    assert np.array_equal(part, before)
    assert len({place, *(td["next", "features"].data_ptr() for td in others)}) == 3
    del first
    others += [rolled(), rolled()]
    assert np.array_equal(part, before)
    # Nothing refers to these any more: one of them is written into.
    places = {td["next", "features"].data_ptr() for td in others}
    del others
    assert rolled()["next", "features"].data_ptr() in places


@both
def test_the_rollout_into_one_tensordict_is_the_same(make: Callable[..., Env]) -> None:
    counts = [iter(range(1000)), iter(range(1000))]
    env = TorchRLEnv(make())
    slow = env.rollout(
        30,
        lambda td: td.set("action", torch.from_numpy(allowed(td["mask"].numpy(), next(counts[0])))),
        break_when_any_done=False,
    )
    other = TorchRLEnv(make())
    fast = other.allocate(30)
    storage = fast["features" if "features" in fast.keys() else "goals"].data_ptr()  # noqa: SIM118
    other.rollout_into(
        fast, lambda obs: torch.from_numpy(allowed(obs["mask"].numpy(), next(counts[1])))
    )

    keys = set(slow.keys(True, True))
    assert set(fast.keys(True, True)) == keys
    assert fast.batch_size == slow.batch_size
    for key in keys:
        assert torch.equal(fast[key], slow[key]), key
        assert fast[key].dtype == slow[key].dtype
    # And once more, into the same memory, from where the environments are.
    other.rollout_into(fast)
    assert fast["features" if "features" in slow else "goals"].data_ptr() == storage
    following = slow[:, -1]["next"]
    over = following["done"][:, 0]
    for name in make().spec:
        assert torch.equal(fast[name][:, 0][~over], following[name][~over])


@both
def test_a_partial_reset_begins_episodes_there_and_nowhere_else(make: Callable[..., Env]) -> None:
    env = TorchRLEnv(make())
    td = env.reset()
    # Two steps, so that no episode is at its beginning.
    for t in range(2):
        action = torch.from_numpy(allowed(td["mask"].numpy(), t))
        td = env.step_and_maybe_reset(td.set("action", action))[1]
    before = td.clone()
    where = torch.tensor([True, False, False, True, False])
    after = env.reset(td.clone().set("_reset", where[:, None]))

    for name in make().spec:
        assert torch.equal(after[name][~where], before[name][~where])
    changed = [not torch.equal(after[name][where], before[name][where]) for name in make().spec]
    assert any(changed)


def test_an_end_is_followed_by_the_episode_that_the_environment_began_itself() -> None:
    """TorchRL asks for a reset after an end; that must not skip an episode."""
    env, wrapped = poles(), TorchRLEnv(poles())
    env.reset()
    td = wrapped.reset()
    for _ in range(60):
        action = np.ones(5, np.int64)
        step = env.step(action)
        _, td = wrapped.step_and_maybe_reset(td.set("action", torch.from_numpy(action)))
        assert np.array_equal(td["features"].numpy(), step.obs["features"])
    assert (env.state_dict()["episodes"] > 3).all()
    assert np.array_equal(env.state_dict()["episodes"], wrapped.env.state_dict()["episodes"])


@both
def test_torchrl_may_give_any_action(make: Callable[..., Env]) -> None:
    env = TorchRLEnv(make())
    td = env.reset()
    for number in (0, env.env.num_actions - 1):
        td = env.step(td.set("action", torch.full((5,), number)))["next"]
    assert torch.isfinite(td["reward"]).all()


def test_random_actions_of_torchrl_keep_to_the_mask() -> None:
    rollout = TorchRLEnv(prover()).rollout(50, break_when_any_done=False)
    assert rollout["mask"].gather(-1, rollout["action"][..., None]).all()


@both
def test_a_collector_with_gae_and_clip_ppo_loss_of_torchrl_trains_on_it(
    make: Callable[..., Env],
) -> None:
    from tensordict.nn import TensorDictModule
    from torch import nn
    from torchrl.collectors import Collector
    from torchrl.modules import MaskedCategorical, ProbabilisticActor, ValueOperator
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value import GAE

    from batchwright.rl import policy_for

    torch.manual_seed(0)
    core = make()
    policy = policy_for(core, width=16)
    names = list(core.spec)

    class Actor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.policy = policy.actor

        def forward(self, *obs: torch.Tensor) -> torch.Tensor:
            given = dict(zip(names, obs, strict=True))
            flat = {n: a.flatten(0, a.ndim - len(core.spec[n].shape) - 1) for n, a in given.items()}
            scores = self.policy.point(flat, self.policy.state(flat))
            return scores.reshape(given["mask"].shape)

    class Critic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.critic, self.head = policy.critic, policy.head

        def forward(self, *obs: torch.Tensor) -> torch.Tensor:
            given = dict(zip(names, obs, strict=True))
            flat = {n: a.flatten(0, a.ndim - len(core.spec[n].shape) - 1) for n, a in given.items()}
            return self.head(self.critic.state(flat)).reshape(*given["mask"].shape[:-1], 1)

    actor = ProbabilisticActor(
        TensorDictModule(Actor(), names, ["logits"]),
        in_keys=["logits", "mask"],
        distribution_class=MaskedCategorical,
        return_log_prob=True,
    )
    critic = ValueOperator(Critic(), names)
    collector = Collector(TorchRLEnv(core), actor, frames_per_batch=100, total_frames=200)
    # Without vmap: the prover's networks compute only what is not padding.
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic, deactivate_vmap=True)
    loss_module = ClipPPOLoss(actor, critic)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=1e-3)
    before = [p.detach().clone() for p in loss_module.parameters()]
    try:
        for data in collector:
            assert data.shape == (5, 20)
            assert data["mask"].gather(-1, data["action"][..., None]).all()
            advantage(data)
            losses = loss_module(data.reshape(-1))
            total = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
            optimizer.zero_grad()
            total.backward()
            assert torch.isfinite(total)
            optimizer.step()
    finally:
        collector.shutdown()
    after = list(loss_module.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


@both
def test_an_environment_with_another_seed_is_that_of_the_seed(make: Callable[..., Env]) -> None:
    """Set through TorchRL and through Gymnasium, and after steps with the seed it had."""
    by_torchrl, by_gymnasium, by_itself = TorchRLEnv(make()), GymnasiumVectorEnv(make()), make(9)
    by_torchrl.rollout(7, break_when_any_done=False)
    by_gymnasium.reset()
    by_gymnasium.step(np.zeros(5, np.int64))
    by_torchrl.set_seed(9)
    shown = [by_torchrl.reset(), by_gymnasium.reset(seed=9)[0]]
    expected = by_itself.reset()
    for t in range(20):
        for name in by_itself.spec:
            assert np.array_equal(shown[0][name].numpy(), expected[name]), (name, t)
            assert np.array_equal(shown[1][name], expected[name]), (name, t)
        actions = allowed(expected["mask"], t)
        expected = by_itself.step(actions).obs
        _, shown[0] = by_torchrl.step_and_maybe_reset(
            shown[0].set("action", torch.from_numpy(actions))
        )
        shown[1] = by_gymnasium.step(actions)[0]


def test_an_environment_without_seeds_says_so() -> None:
    class Fixed:
        """All of CartPole but its seed."""

        def __init__(self) -> None:
            own = poles()
            for name in ("num_envs", "num_actions", "spec", "reset", "step"):
                setattr(self, name, getattr(own, name))

    for reset in (
        lambda: TorchRLEnv(Fixed()).set_seed(1),  # type: ignore[arg-type]
        lambda: GymnasiumVectorEnv(Fixed()).reset(seed=1),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigError, match=r"a Fixed got its seed .* set_seed\(seed\)"):
            reset()


def test_batched_vec_env_is_a_torchrl_environment_over_the_same_arrays() -> None:
    """What the document does with it: batch_size[0], a step on a TensorDict, a rollout."""
    from torchrl.envs import EnvBase
    from torchrl.envs.utils import check_env_specs

    core = prover()
    settings = {"seed": 3, "max_candidates": 8, "depth": 6, "negatives": 1}
    env = BatchedVecEnv(core.facts, core.rules, core.queries, batch_size=5, **settings)
    assert GymnasiumVectorEnv(env).num_envs == 5
    assert isinstance(env, EnvBase)
    assert int(env.batch_size[0]) == 5
    td, expected = env.reset(), core.reset()
    for t in range(12):
        actions = allowed(expected["mask"], t)
        assert np.array_equal(td["goals"].numpy(), expected["goals"])
        step = core.step(actions)
        stepped, td = env.step_and_maybe_reset(td.set("action", torch.from_numpy(actions)))
        assert stepped["next", "reward"].shape == (5, 1)
        assert np.array_equal(stepped["next", "reward"][:, 0].numpy(), step.reward)
        expected = step.obs
    rollout = env.rollout(16, break_when_any_done=False)
    assert rollout.batch_size == (5, 16)
    check_env_specs(env)


class Indexes:
    """An index manager that numbers from 1 and knows predicates that no fact has."""

    def __init__(self, vocab: Vocab) -> None:
        self.constant_idx2str = {i + 1: name for i, name in enumerate(vocab.entities)}
        names = (*vocab.predicates, *(f"{name}_kge" for name in vocab.predicates))
        self.predicate_idx2str = {i + 1: name for i, name in enumerate(names)}


class Handler:
    """A data handler with triples of those numbers."""

    def __init__(self, graph: Graph) -> None:
        self.facts = graph.train + 1
        self.train_queries = self.facts[:20]


def test_an_environment_is_made_of_an_index_manager_and_a_data_handler() -> None:
    graph = load_graph("family")
    rules = mine(graph.train, graph.vocab).rules
    plain = BatchedVecEnv(graph.facts, rules, graph.train, 4, seed=2)
    im, dh = graph.vocab, graph
    env = BatchedVecEnv(index_manager=im, data_handler=dh, queries=dh.train, batch_size=4, seed=2)
    assert env.batch_size[0] == 4
    for made in (env, BatchedVecEnv(data_handler=graph, batch_size=4, seed=2)):
        torch.manual_seed(0)
        one = made.rollout(16, break_when_any_done=False)
        torch.manual_seed(0)
        assert (one == plain.rollout(16, break_when_any_done=False)).all()

    foreign = Handler(graph)
    env = BatchedVecEnv(index_manager=Indexes(graph.vocab), data_handler=foreign, batch_size=4)
    assert env.env.facts.num_predicates == 2 * graph.vocab.num_predicates + 1
    assert env.env.facts.num_entities == graph.vocab.num_entities + 1
    assert np.array_equal(env.env.queries, foreign.train_queries)
    policy = policy_for(env, width=8)
    sizes = {e.num_embeddings for e in policy.modules() if isinstance(e, torch.nn.Embedding)}
    assert max(sizes) > graph.vocab.num_entities
    PPO(env, policy, PPOConfig(total_steps=64, num_steps=8)).learn()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "no facts"),
        ({"data_handler": Handler(load_graph("family"))}, "need an index_manager"),
        ({"facts": load_graph("family").facts}, "no rules"),
        ({"facts": load_graph("family").facts, "index_manager": 3}, "got a int"),
    ],
)
def test_what_an_environment_is_not_made_of_is_said(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        BatchedVecEnv(batch_size=2, **given)


def test_our_ppo_takes_a_wrapped_environment_and_steps_its_arrays() -> None:
    from batchwright.rl import PPO, PPOConfig, policy_for

    config = PPOConfig(total_steps=80, num_steps=8, epochs=1, minibatches=2)
    weights = []
    for env in (prover(), TorchRLEnv(prover()), GymnasiumVectorEnv(prover())):
        ppo = PPO(env, policy_for(env, width=8), config)
        ppo.learn()
        weights.append(torch.cat([p.detach().flatten() for p in ppo.policy.parameters()]))
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])


def test_an_environment_that_wraps_another_keeps_its_policy() -> None:
    from batchwright.rl import policy_for

    class Twice:
        """Double rewards; everything else is the wrapped environment's."""

        def __init__(self, env: Env) -> None:
            self.env = env
            self.num_envs, self.num_actions, self.spec = env.num_envs, env.num_actions, env.spec
            self.reset, self.state_dict = env.reset, env.state_dict
            self.load_state_dict = env.load_state_dict

        def step(self, actions: NDArray[Any]) -> Any:
            step = self.env.step(actions)
            step.reward *= 2
            return step

    for make in MAKERS:
        plain = policy_for(make()).state_dict()
        wrapped = policy_for(Twice(make())).state_dict()  # type: ignore[arg-type]
        assert {n: t.shape for n, t in wrapped.items()} == {n: t.shape for n, t in plain.items()}


def test_torchrls_actor_and_critic_are_our_policy() -> None:
    from batchwright.integrations.torchrl import actor_critic
    from batchwright.rl import policy_for

    for make in MAKERS:
        env = TorchRLEnv(make())
        policy = policy_for(env, width=8)
        actor, critic = actor_critic(env, policy)
        td = env.reset()
        obs = {name: td[name] for name in env.env.spec}
        assert torch.equal(critic(td.clone())["state_value"][:, 0], policy.value(obs))
        found = actor(td.clone())
        assert torch.equal(found["logits"], policy.logits(obs))
        both_ids = {id(p) for module in (actor, critic) for p in module.parameters()}
        assert both_ids == {id(p) for p in policy.parameters()}


@pytest.mark.slow
def test_parallel_environments_of_torchrl_give_the_same_steps() -> None:
    from torchrl.envs import ParallelEnv

    parallel = ParallelEnv(2, [poles_of_torchrl, other_poles_of_torchrl], mp_start_method="fork")
    try:
        found = parallel.rollout(12, always_right, break_when_any_done=False)
        assert found.batch_size == (2, 5, 12)
        for i, make in enumerate((poles_of_torchrl, other_poles_of_torchrl)):
            alone = make().rollout(12, always_right, break_when_any_done=False)
            assert torch.equal(found[i]["next", "reward"], alone["next", "reward"])
            assert torch.equal(found[i]["features"], alone["features"])
    finally:
        parallel.close()


def poles_of_torchrl() -> TorchRLEnv:
    return TorchRLEnv(poles(3))


def other_poles_of_torchrl() -> TorchRLEnv:
    return TorchRLEnv(poles(4))


def always_right(td: Any) -> Any:
    return td.set("action", torch.ones(td.batch_size, dtype=torch.int64))


def test_a_tensordict_of_another_size_is_refused() -> None:
    with pytest.raises(Mismatch, match="for 5 environments, not for 3"):
        TorchRLEnv(poles(num_envs=3)).rollout_into(TorchRLEnv(poles()).allocate(4))


@both
def test_gymnasiums_own_checks_pass(make: Callable[..., Env]) -> None:
    from gymnasium.utils import env_checker

    env = GymnasiumVectorEnv(make())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        env_checker.check_reset_return_type(env)
        env_checker.check_reset_options(env)
        env_checker.check_reset_return_info_deprecation(env)
        env_checker.check_seed_deprecation(env)
    first, _ = env.reset(seed=5)
    again, _ = env.reset(seed=5)
    assert env_checker.data_equivalence(first, again, exact=True)
    # Their check of this asks one environment for one end; these are its own parts.
    kept = [(first, {}), (again, {})]
    for t in range(3):
        step = env.step(allowed(kept[-1][0]["mask"], t))
        kept.append((step[0], step[4]))
    for one, other in itertools.combinations(kept, 2):
        assert not env_checker.data_shares_objects(one, other)


@both
def test_gymnasium_sees_the_life_of_the_environment(make: Callable[..., Env]) -> None:
    from gymnasium.vector import AutoresetMode

    wrapped, env = GymnasiumVectorEnv(make()), make()
    assert wrapped.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    shown, _ = wrapped.reset()
    env.reset()
    ends = 0
    for t in range(40):
        assert shown in wrapped.observation_space
        actions = allowed(shown["mask"], t)
        assert actions in wrapped.action_space
        step = env.step(actions)
        shown, reward, terminated, truncated, infos = wrapped.step(actions)
        assert all(np.array_equal(shown[name], step.obs[name]) for name in env.spec)
        assert np.array_equal(reward, step.reward)
        assert np.array_equal(terminated, step.terminated)
        assert np.array_equal(truncated, step.truncated)
        if step.done.any():
            assert np.array_equal(infos["_final_obs"], step.done)
        for b in np.flatnonzero(step.done):
            ends += 1
            final = infos["final_obs"][b]
            assert final in wrapped.single_observation_space
            assert all(np.array_equal(final[n], step.final_obs[n][b]) for n in env.spec)
    assert ends > 5


def test_gymnasiums_own_wrapper_counts_the_episodes() -> None:
    from gymnasium.wrappers.vector import RecordEpisodeStatistics

    env = RecordEpisodeStatistics(GymnasiumVectorEnv(poles()))
    env.reset(seed=11)
    lengths = []
    for _ in range(30):
        infos = env.step(np.ones(5, np.int64))[4]
        if "episode" in infos:
            lengths += infos["episode"]["l"][infos["_episode"]].tolist()
            assert (infos["episode"]["r"] == infos["episode"]["l"]).all()
    assert len(lengths) > 5
    assert all(8 <= n <= 12 for n in lengths)


def test_gymnasiums_reset_mask_resets_those_only() -> None:
    env = GymnasiumVectorEnv(poles())
    env.reset()
    before = env.step(np.zeros(5, np.int64))[0]
    where = np.array([False, True, False, False, True])
    after, _ = env.reset(options={"reset_mask": where})
    same = (after["features"] == before["features"]).all(1)
    assert np.array_equal(same, ~where)
    with pytest.raises(Mismatch, match="must be bool of shape"):
        env.reset(options={"reset_mask": np.zeros(3, np.bool_)})


@both
def test_stable_baselines_sees_the_same_episodes_by_its_own_classes(
    make: Callable[..., Env],
) -> None:
    from stable_baselines3.common.vec_env import VecMonitor

    from batchwright.integrations.sb3 import Sb3VecEnv

    env, wrapped = make(), Sb3VecEnv(make())
    watched = VecMonitor(wrapped)
    obs, seen = env.reset(), watched.reset()
    returns, lengths = np.zeros(5), np.zeros(5, int)
    ends = cut = 0
    for t in range(40):
        for name in env.spec:
            # A single number has an axis there.
            assert np.array_equal(seen[name].reshape(obs[name].shape), obs[name]), (name, t)
            assert wrapped.observation_space[name].contains(np.asarray(seen[name][0]))
        assert np.array_equal(np.stack(watched.env_method("action_masks")), obs["mask"])
        action = allowed(obs["mask"], t)
        step = env.step(action)
        seen, rewards, done, infos = watched.step(action)
        assert np.array_equal(rewards, step.reward.astype(np.float32))
        assert np.array_equal(done, step.done)
        returns, lengths = returns + rewards, lengths + 1
        for b in np.flatnonzero(done):
            for name in env.spec:
                last = infos[b]["terminal_observation"][name]
                assert last.shape == wrapped.observation_space[name].shape
                assert np.array_equal(last.ravel(), step.final_obs[name][b].ravel())
            assert infos[b]["TimeLimit.truncated"] == (step.truncated[b] and not step.terminated[b])
            assert infos[b]["episode"]["r"] == pytest.approx(returns[b], abs=1e-5)
            assert infos[b]["episode"]["l"] == lengths[b]
            cut += infos[b]["TimeLimit.truncated"]
            returns[b] = lengths[b] = 0
            ends += 1
        obs = step.obs
    assert ends > 5
    assert cut > 0 or make is prover


@both
def test_stable_baselines_own_ppo_takes_every_environment(make: Callable[..., Env]) -> None:
    from stable_baselines3 import PPO

    from batchwright.integrations.sb3 import Sb3VecEnv

    model = PPO("MultiInputPolicy", Sb3VecEnv(make()), n_steps=8, batch_size=20, n_epochs=1)
    assert model.learn(80).num_timesteps == 80


def test_stable_baselines_learns_with_its_own_ppo_and_its_seed_decides() -> None:
    from stable_baselines3 import PPO

    from batchwright.integrations.sb3 import Sb3VecEnv

    weights = []
    for seed in (0, 0, 1):
        model = PPO(
            "MultiInputPolicy", Sb3VecEnv(poles()), n_steps=16, batch_size=40, n_epochs=2, seed=seed
        )
        model.learn(240)
        assert model.num_timesteps == 240
        weights.append(torch.cat([p.detach().flatten() for p in model.policy.parameters()]))
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    with pytest.raises(ConfigError, match="one object"):
        Sb3VecEnv(poles()).set_attr("max_steps", 3)


@both
@pytest.mark.parametrize("name", ["RecordEpisodeStatistics", "DictInfoToList", "NormalizeReward"])
def test_gymnasiums_wrappers_go_around_it(make: Callable[..., Env], name: str) -> None:
    from gymnasium.wrappers import vector

    env = getattr(vector, name)(GymnasiumVectorEnv(make()))
    shown, _ = env.reset(seed=3)
    ends = 0
    for t in range(30):
        shown, _, terminated, truncated, infos = env.step(allowed(shown["mask"], t))
        done = terminated | truncated
        ends += int(done.sum())
        if name == "DictInfoToList":
            assert [bool(info["valid"]) for info in infos] == [True] * 5
            assert [("final_obs" in info) for info in infos] == done.tolist()
        elif name == "RecordEpisodeStatistics" and done.any():
            assert np.array_equal(infos["_episode"], done)
    assert ends > 5


OBSERVERS: dict[str, Callable[[Any], Any]] = {
    "FlattenObservation": lambda env: vector.FlattenObservation(env),
    "FilterObservation": lambda env: vector.FilterObservation(env, ["mask"]),
    "TransformObservation": lambda env: vector.TransformObservation(env, lambda shown: shown),
}


@both
@pytest.mark.parametrize("name", OBSERVERS)
def test_gymnasiums_wrappers_of_observations_go_around_it_without_autoreset(
    make: Callable[..., Env], name: str
) -> None:
    plain = GymnasiumVectorEnv(make(), "disabled")
    env = OBSERVERS[name](GymnasiumVectorEnv(make(), AutoresetMode.DISABLED))
    shown, _ = plain.reset(seed=3)
    seen, _ = env.reset(seed=3)
    ends = 0
    for t in range(30):
        actions = allowed(shown["mask"], t)
        shown, reward, terminated, truncated, _ = plain.step(actions)
        seen, *same, _ = env.step(actions)
        for one, other in zip(same, (reward, terminated, truncated), strict=True):
            assert np.array_equal(one, other)
        assert len(seen["mask"] if isinstance(seen, dict) else seen) == 5
        done = terminated | truncated
        if done.any():
            ends += int(done.sum())
            shown, _ = plain.reset(options={"reset_mask": done})
            seen, _ = env.reset(options={"reset_mask": done})
        if name == "FilterObservation":
            assert np.array_equal(seen["mask"], shown["mask"])
    assert ends > 5


@both
def test_without_autoreset_the_episodes_are_those_of_the_environment(
    make: Callable[..., Env],
) -> None:
    wrapped, env = GymnasiumVectorEnv(make(), "DISABLED"), make()
    shown, _ = wrapped.reset()
    env.reset()
    ends = 0
    for t in range(40):
        actions = allowed(shown["mask"], t)
        step = env.step(actions)
        shown, _, terminated, truncated, _ = wrapped.step(actions)
        done = terminated | truncated
        assert np.array_equal(done, step.done)
        for name in env.spec:
            now = np.where(
                done.reshape(-1, *[1] * (step.obs[name].ndim - 1)),
                step.final_obs[name],
                step.obs[name],
            )
            assert np.array_equal(shown[name], now)
        if done.any():
            ends += int(done.sum())
            with pytest.raises(ConfigError, match="have ended; call reset"):
                wrapped.step(actions)
            # One after the other: what is not reset yet still shows its end.
            for b in np.flatnonzero(done):
                shown, _ = wrapped.reset(options={"reset_mask": np.arange(5) == b})
            assert all(np.array_equal(shown[name], step.obs[name]) for name in env.spec)
    assert ends > 5


def test_gymnasium_may_give_a_seed_for_each_environment_and_no_next_step_reset() -> None:
    def first(seed: Any) -> NDArray[Any]:
        return GymnasiumVectorEnv(poles()).reset(seed=seed)[0]["features"]

    assert np.array_equal(first([1, 2, 3, 4, 5]), first(np.arange(1, 6)))
    assert not np.array_equal(first([1, 2, 3, 4, 5]), first([1, 2, 3, 4, 6]))
    with pytest.raises(Mismatch, match="2 seeds for 5 environments"):
        first([1, 2])
    for mode in (AutoresetMode.NEXT_STEP, "next_step", "often"):
        with pytest.raises(ConfigError, match="must be SAME_STEP or DISABLED"):
            GymnasiumVectorEnv(poles(), mode)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "steps"), [("own_reward", 16_384), ("torchrl_ppo", 16_384), ("sb3_ppo", 8_192)]
)
def test_every_example_learns(script: str, steps: int) -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {"own_reward", "torchrl_ppo", "sb3_ppo"}
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{script}.py", str(steps)],
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = [float(number) for number in re.findall(r"-?\d+\.\d+", done.stdout)]
    if script == "sb3_ppo":
        # A pole that nobody balances falls within about 20 steps.
        assert found[0] > 60
    else:
        assert found[1] > found[0] + 0.1, done.stdout
