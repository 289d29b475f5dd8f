"""The whole way on WN18RR: load, environment, rollout, PPO, evaluation."""

import os
from pathlib import Path

import numpy as np
import pytest

from batchwright.envs.prover.env import ProverEnv
from batchwright.logic.loaders import Graph, load_graph
from batchwright.logic.mine.mining import mine
from batchwright.logic.rank.ranking import rank
from batchwright.rl import PPO, PPOConfig, Runner, policy_for
from batchwright.train.prover.policy import rule_policy
from batchwright.train.prover.program import Asked
from batchwright.train.prover.scorer import PolicyScorer

SHARED = Path(__file__).parents[2] / "shared" / "data"
FOLDER = Path(os.environ.get("BATCHWRIGHT_DATA", SHARED)) / "kg" / "wn18rr"


@pytest.fixture(scope="module")
def graph() -> Graph:
    if not (FOLDER / "train.txt").exists():
        pytest.skip("WN18RR is not at hand; set BATCHWRIGHT_DATA to a folder with kg/wn18rr")
    return load_graph(FOLDER)


def test_wn18rr_is_loaded_whole(graph: Graph) -> None:
    assert [len(part) for part in (graph.train, graph.valid, graph.test)] == [86_835, 3_034, 3_134]
    assert (graph.vocab.num_entities, graph.vocab.num_predicates) == (40_943, 11)


def test_wn18rr_from_rules_to_ranks(graph: Graph) -> None:
    rules = mine(graph.facts, graph.vocab, length=1).rules
    asked = Asked.of(graph, rules)
    env = ProverEnv(
        asked.facts,
        asked.rules,
        asked.questions(graph.train),
        4,
        ask="tail",
        depth=asked.depth,
        goals=asked.depth - 1,
        max_candidates=asked.width,
        inverse=asked.inverse,
        reward="proved_signed",
    )
    policy = rule_policy(asked)
    ppo = PPO(env, policy, PPOConfig(num_steps=16, total_steps=64, lr=0.1))

    rollout = ppo.runner.collect(policy)
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    metrics = ppo.update(rollout)

    assert rollout.actions.shape == (16, 4)
    chosen = np.take_along_axis(rollout.obs["mask"], rollout.actions[..., None], -1)
    assert chosen.all()
    assert (rollout.terminated | rollout.truncated).any()
    assert all(np.isfinite(value) for name, value in metrics.items() if "variance" not in name)
    assert any((policy.state_dict()[name] != tensor).any() for name, tensor in before.items())
    ranks = rank(PolicyScorer(asked, policy), graph.test[::157][:20], graph.known)
    assert len(ranks) == 40
    assert (ranks.middle >= 1).all()
    # Symmetric relations alone, turned round, answer a third of WN18RR's questions.
    assert ranks.metrics().mrr > 0.1


def test_the_plain_prover_environment_trains_on_wn18rr_as_well(graph: Graph) -> None:
    """Truths and corruptions of the graph as it stands, with the policy that reads goals."""
    rules = mine(graph.facts, graph.vocab, length=1).rules
    env = ProverEnv(graph.facts, rules, graph.train, 4, negatives=1, depth=4)
    policy = policy_for(env, width=16)
    ppo = PPO(env, policy, PPOConfig(num_steps=16, total_steps=64))
    metrics = ppo.step()
    assert metrics["charts/global_step"] == 64
    assert np.isfinite(metrics["losses/policy_loss"])
    assert env.counters["invalid"] == 0
    assert Runner(env, 16).collect(policy).valid.all()
