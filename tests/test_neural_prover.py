"""The neural policy of a prover, and the proofs that beam search finds with a policy."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batchwright.envs.prover.env import ProverEnv
from batchwright.envs.prover.settings import auto_batch
from batchwright.errors import ConfigError
from batchwright.events import read_events
from batchwright.logic.kge import Kge, KgeScorer, KgeShape, save_kge, vocab_digest
from batchwright.logic.loaders import Graph, load_graph, shipped_graph
from batchwright.logic.rank.accept import accept
from batchwright.logic.rank.ranking import rank
from batchwright.logic.rules import parse_rules
from batchwright.rl.policy import Policy
from batchwright.rl.rollout import Rollout
from batchwright.train.prover.config import ProverConfig
from batchwright.train.prover.learners import Practice
from batchwright.train.prover.loop import fit_prover, load_prover
from batchwright.train.prover.policy import neural_policy
from batchwright.train.prover.program import Asked
from batchwright.train.prover.scorer import PolicyScorer
from batchwright.train.prover.search import BeamScorer

sys.path.insert(0, str(Path(__file__).parent))

from prover_checks import enumerated, same_end, unlike

FAMILY = shipped_graph()
LINE = (
    f"train prover --data {FAMILY} --rules {FAMILY}/rules.txt --policy neural --n-envs 32 "
    "--ppo-steps 1536 --width 8 --beam 16 --save-every 1 --eval-every 2 --quiet --format json"
)


@pytest.fixture(scope="module")
def family() -> Graph:
    return load_graph(FAMILY)


@pytest.fixture(scope="module")
def asked(family: Graph) -> Asked:
    return Asked.of(family, parse_rules(FAMILY / "rules.txt", family.vocab))


def lively(asked: Asked, seed: int = 0) -> Policy:
    """A neural policy that is far from uniform."""
    policy = neural_policy(asked, 8, 1.0, seed)
    with torch.no_grad():
        for parameter in policy.actor.parameters():
            parameter.mul_(3.0)
    return policy


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, run: Callable[..., Any]) -> Path:
    """A neural run of the command that nothing stopped."""
    folder = tmp_path_factory.mktemp("neural")
    outcome = run(f"{LINE} --run-dir whole", folder, {"OMP_NUM_THREADS": "1"})
    assert outcome.code == 0, outcome.err
    assert outcome.data["finished"]
    return folder / "whole"


def test_a_beam_as_wide_as_there_are_proofs_finds_the_exact_sum(
    family: Graph, asked: Asked
) -> None:
    policy = unlike(asked)
    exact, beam = PolicyScorer(asked, policy), BeamScorer(asked, policy, 4000, num_envs=8000)
    preds = np.ascontiguousarray(family.test[:12, 1])
    for side, column in (("tail", 0), ("head", 2)):
        given = np.ascontiguousarray(family.test[:12, column])
        found = beam.mass(given, preds, side)  # type: ignore[arg-type]
        np.testing.assert_allclose(found, exact.mass(given, preds, side), atol=1e-6)  # type: ignore[arg-type]
    assert beam.searched.pruned == 0
    assert beam.searched.queries == 24


def test_a_wide_beam_sums_all_episodes_of_a_neural_policy(family: Graph, asked: Asked) -> None:
    policy = lively(asked)
    beam = BeamScorer(asked, policy, 4000, num_envs=1)
    for triple in family.test[::24]:
        found = beam.mass(triple[:1], triple[1:2], "tail")[0]
        expected = enumerated(asked, policy, asked.questions(triple[None])[0])
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_a_narrow_beam_finds_less_counts_what_it_prunes_and_does_not_depend_on_its_batch(
    family: Graph, asked: Asked
) -> None:
    policy = lively(asked)
    given, preds = family.test[:20, 0].copy(), family.test[:20, 1].copy()
    wide = BeamScorer(asked, policy, 4000).mass(given, preds, "tail")
    narrow = BeamScorer(asked, policy, 3, num_envs=60)
    found = narrow.mass(given, preds, "tail")
    # Products of matrices of another size round otherwise, in float32.
    assert (found <= wide + 1e-6).all()
    assert 0 < found.sum() < wide.sum()
    assert narrow.searched.pruned > 0
    assert narrow.searched.proofs <= 3 * 20
    other = BeamScorer(asked, policy, 3, num_envs=7 * 3).mass(given, preds, "tail")
    np.testing.assert_allclose(found, other, atol=1e-6)


def test_ground_queries_are_proved_one_by_one_as_by_episodes(family: Graph, asked: Asked) -> None:
    policy = lively(asked)
    h, p, _ = family.test[0].tolist()
    found = BeamScorer(asked, policy, 500, ask="truth").mass(
        np.array([h], np.int32), np.array([p], np.int32), "tail"
    )[0]
    proved = np.flatnonzero(found)
    assert len(proved)
    for answer in [*proved[:3], *np.flatnonzero(found == 0)[:2]]:
        question = asked.questions(np.array([[h, p, answer]], np.int32))[0]
        expected = enumerated(asked, policy, question, ask="truth").sum()
        assert found[answer] == pytest.approx(expected, abs=1e-6)


def test_tables_have_rows_for_kge_predicates(family: Graph) -> None:
    shape = KgeShape("complex", 8, family.vocab.num_entities, family.vocab.num_predicates)
    wider = accept(family, KgeScorer(Kge.new(shape, 0)), np.array([0], np.int32), 1 / 86).graph
    name = family.vocab.predicates[0]
    rules = parse_rules(f"r:1:{name}_kge(X,Y) -> {name}(X,Y)", wider.vocab)
    asked = Asked.of(wider, rules)
    assert asked.facts.num_predicates == 4 * 2 * family.vocab.num_predicates
    h = wider.train[len(family.train), :1]
    found = BeamScorer(asked, neural_policy(asked, 8, 1.0), 64).mass(h, h * 0, "tail")[0]
    believed = wider.facts.tails(int(h[0]), family.vocab.num_predicates)
    assert set(np.flatnonzero(found)) == set(believed.tolist())


def test_a_slot_continues_the_episode_of_another_one(asked: Asked, family: Graph) -> None:
    questions = asked.questions(family.train[:8])
    env = asked.env(questions, 16, ask="tail", seed=3)
    env.step(env.random_actions(1))
    source = np.arange(16)[::-1].copy()
    before = {name: array.copy() for name, array in env.observation.items()}
    other = asked.env(questions, 16, ask="tail", seed=3)
    other.load_state_dict(env.state_dict())
    env.copy_slots(source)
    for name, array in env.observation.items():
        np.testing.assert_array_equal(array, before[name][source])
    actions = other.random_actions(2)
    left, right = other.step(actions), env.step(actions[source])
    for name in ("reward", "terminated", "truncated"):
        np.testing.assert_array_equal(getattr(left, name)[source], getattr(right, name))
    on = ~left.done[source]
    np.testing.assert_array_equal(left.obs["mask"][source][on], right.obs["mask"][on])


def test_other_queries_are_taken_if_they_are_as_many(asked: Asked, family: Graph) -> None:
    questions = asked.questions(family.train[:4])
    env = asked.env(questions, 8, ask="tail", once=True)
    fresh = asked.env(questions[::-1], 8, ask="tail", once=True)
    obs = env.ask_anew(questions[::-1])
    for name, array in fresh.observation.items():
        np.testing.assert_array_equal(array, obs[name])
    with pytest.raises(ConfigError, match="as many queries as it has, 8, got 3"):
        env.ask_anew(questions[:3])


@pytest.mark.parametrize("stop", [1, 4])
def test_a_neural_run_that_was_stopped_and_resumed_ends_with_the_same_bits(
    stop: int, whole: Path, tmp_path: Path, call: Callable[..., Any]
) -> None:
    first = call(f"{LINE} --run-dir part --stop-after {stop}", tmp_path)
    assert (first.data["finished"], first.data["rounds"]) == (False, stop)
    again = call("train prover --resume part --quiet --format json", tmp_path)
    assert again.code == 0, again.err
    same_end(tmp_path / "part", whole)


def test_a_neural_prover_is_evaluated_alone_and_with_an_embedding(
    whole: Path, family: Graph, tmp_path: Path, call: Callable[..., Any]
) -> None:
    shape = KgeShape("complex", 8, family.vocab.num_entities, family.vocab.num_predicates)
    save_kge(tmp_path / "kge", Kge.new(shape, 0), entities=vocab_digest(family))
    line = f"evaluate prover --data {FAMILY} --format json --quiet --limit 20 --mode"
    alone = call(f"{line} rl --prover {whole}", tmp_path)
    assert alone.code == 0, alone.err
    triples = family.test[np.linspace(0, len(family.test) - 1, 20).astype(np.int64)]
    expected = rank(load_prover(whole, family), triples, family.known).metrics()
    assert alone.data["both"]["mrr"] == pytest.approx(expected.mrr)
    assert alone.data["proofs"]["search"] == "beam of 16"
    assert alone.data["proofs"]["probability_found"] > 0
    greedy = call(f"{line} rl --prover {whole} --beam 1", tmp_path)
    assert greedy.data["proofs"]["proofs_found"] < alone.data["proofs"]["proofs_found"]
    plain = call(f"{line} kge --kge kge", tmp_path)
    both = call(f"{line} hybrid --kge kge --prover {whole} --beta 4", tmp_path)
    assert both.data["proofs"]["search"] == "beam of 16"
    assert both.data["both"]["mrr"] > plain.data["both"]["mrr"]
    none = call(f"{line} hybrid --kge kge --prover {whole} --beta 0", tmp_path)
    assert none.data["both"] == plain.data["both"]


def test_exact_sums_and_beams_are_named_in_evaluations_of_the_rules_policy(
    tmp_path: Path, call: Callable[..., Any]
) -> None:
    line = f"train prover --data {FAMILY} --rules {FAMILY}/rules.txt --passes 1 --quiet"
    assert call(f"{line} --clone-updates 0 --ppo-steps 0 --run-dir run", tmp_path).code == 0
    line = f"evaluate prover --data {FAMILY} --mode prover --prover run --limit 10 --quiet"
    assert "proofs: exact sum over all proofs" in call(line, tmp_path).out
    assert "proofs: beam of 8; per search" in call(f"{line} --beam 8", tmp_path).out
    exact, wide = (call(f"{line} --format json{b}", tmp_path).data for b in ("", " --beam 3000"))
    assert wide["both"]["mrr"] == pytest.approx(exact["both"]["mrr"])


def test_events_tell_what_ppo_brought_and_what_is_supervised(
    whole: Path, tmp_path: Path, call: Callable[..., Any]
) -> None:
    events = list(read_events(whole / "events.jsonl"))
    rounds = [event.fields for event in events if event.kind == "round"]
    assert {fields["part"] for fields in rounds} == {"ppo"}
    evals = [event.fields for event in events if event.kind == "eval"]
    (stop,) = (event.fields for event in events if event.kind == "stop")
    assert stop["before_ppo_mrr"] == evals[0]["mrr"]
    assert stop["after_ppo_mrr"] == evals[-1]["mrr"]
    assert evals[-1]["proofs"]["search"] == "beam of 16"
    line = f"train prover --data {FAMILY} --rules {FAMILY}/rules.txt --n-envs 32 --quiet"
    line += " --clone-updates 1 --ppo-steps 256 --passes 1 --run-dir rules"
    outcome = call(line, tmp_path)
    assert "MRR on valid, before PPO" in outcome.out
    parts = [
        e.fields["part"]
        for e in read_events(tmp_path / "rules" / "events.jsonl")
        if e.kind == "round"
    ]
    assert parts == ["imitation", "ppo", "supervised"]


def test_ppo_improves_the_neural_policy(family: Graph, asked: Asked) -> None:
    config = ProverConfig(policy="neural", n_envs=128, n_eval_envs=128, width=16)
    policy = neural_policy(asked, 16, 0.1)
    practice = Practice(asked, policy, asked.questions(family.train), config, asked.depth, 16)
    returns = [practice.step()["charts/episodic_return"] for _ in range(16)]
    assert np.mean(returns[-3:]) > np.mean(returns[:3]) + 0.2


def test_corrupted_queries_train_a_neural_policy_that_judges_triples(
    family: Graph,
) -> None:
    rules = parse_rules(FAMILY / "rules.txt", family.vocab)
    config = ProverConfig(
        data="family", policy="neural", negatives=1, reward="balanced", n_envs=32, n_eval_envs=512,
        ppo_steps=1024, width=8, beam=4, eval_triples=2,
    )  # fmt: skip
    scorer, result = fit_prover(config, family, rules)
    assert result.finished
    assert scorer.how()["searches"] == 0
    h, p, _ = family.valid[0]
    mass = scorer.mass(np.array([h]), np.array([p]), "tail")
    assert scorer.how()["searches"] == family.vocab.num_entities
    assert 0 <= mass.min() <= mass.max() <= 1 + 1e-6


def test_auto_is_a_number_in_the_run_and_leaves_room_for_rollouts(
    family: Graph, tmp_path: Path, call: Callable[..., Any]
) -> None:
    line = f"{LINE} --run-dir run".replace("--n-envs 32", "--n-envs auto").replace("1536", "1")
    line += " --num-steps 2 --n-eval-envs auto --stop-after 1"
    outcome = call(line, tmp_path)
    assert outcome.code == 0, outcome.err
    config = ProverConfig.of_run(tmp_path / "run")
    assert isinstance(config.n_envs, int)
    assert config.n_envs & (config.n_envs - 1) == 0
    free = 1024 * next(
        int(row.split()[1])
        for row in Path("/proc/meminfo").read_text().splitlines()
        if row.startswith("MemAvailable")
    )
    env = ProverEnv(family.facts, parse_rules(FAMILY / "rules.txt", family.vocab), family.train)
    arrays = Rollout.allocate(env, 128).obs.values()
    assert sum(array.nbytes for array in arrays) < free / 8
    assert auto_batch(6, 64, 8, 128) < auto_batch(6, 64, 8, 0)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--passes 1", "--passes must be 0 and --beam at least 1, got 1 and 256"),
        ("--beam 0", "got 0 and 0"),
        ("--n-envs 0", "--n-envs must be at least 1, got 0"),
        ("--constant-scale -1", "--constant-scale must be at least 0, got -1.0"),
        ("--ppo-steps 0", "nothing to do"),
    ],
)
def test_a_mistake_in_the_flags_of_a_neural_policy_is_told_in_one_sentence(
    flags: str, words: str, tmp_path: Path, call: Callable[..., Any]
) -> None:
    outcome = call(f"train prover --data {FAMILY} --policy neural {flags}", tmp_path)
    assert outcome.code == 1
    assert words in outcome.err
    assert outcome.err.count("\n") == 1


def test_a_beam_of_zero_is_refused_for_a_neural_prover_and_one_needs_a_prover(
    whole: Path, tmp_path: Path, call: Callable[..., Any]
) -> None:
    line = f"evaluate prover --data {FAMILY} --quiet"
    outcome = call(f"{line} --mode rl --prover {whole} --beam 0", tmp_path)
    assert (outcome.code, "--beam at least 1" in outcome.err) == (1, True)
    outcome = call(f"{line} --beam 4", tmp_path)
    assert (outcome.code, "--prover RUN" in outcome.err) == (1, True)
    assert json.loads((whole / "stamp.json").read_text())["seed"] == 0
