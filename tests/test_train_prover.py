"""Training of a prover, and the chances it gives to answers."""

import dataclasses
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.envs.prover import REWARDS
from batchwright.errors import ConfigError, Mismatch, MissingFile
from batchwright.logic.kge import Kge, KgeScorer, KgeShape, save_kge, vocab_digest
from batchwright.logic.loaders import Graph, load_graph, shipped_graph
from batchwright.logic.mine.mining import mine
from batchwright.logic.prove.proofs import prove_all
from batchwright.logic.rank.hybrid import Hybrid
from batchwright.logic.rank.ranking import rank
from batchwright.logic.rules import Rules, parse_rules
from batchwright.logic.vocab import Vocab
from batchwright.report.summary import summarise
from batchwright.train.prover.config import REWARD_NAMES, ProverConfig
from batchwright.train.prover.episodes import SHOWN
from batchwright.train.prover.kernels import learn
from batchwright.train.prover.learners import Practice, kge_potential
from batchwright.train.prover.loop import (
    FEWEST,
    UPDATES,
    Weighting,
    _followed,
    _plan,
    _sized,
    fit_prover,
    load_prover,
    train_prover,
)
from batchwright.train.prover.policy import rule_policy
from batchwright.train.prover.program import Asked
from batchwright.train.prover.scorer import PolicyScorer

sys.path.insert(0, str(Path(__file__).parent))

from prover_checks import enumerated, same_end, unlike

BIN = Path(sys.executable).parent
FAMILY = shipped_graph()
SMALL = {"n_envs": 32, "clone_updates": 4, "ppo_steps": 1536, "passes": 3, "save_every": 1}
FLAGS = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in SMALL.items())


@pytest.fixture(scope="module")
def family() -> Graph:
    return load_graph(FAMILY)


@pytest.fixture(scope="module")
def asked(family: Graph) -> Asked:
    return Asked.of(family, parse_rules(FAMILY / "rules.txt", family.vocab))


def walks(
    x: int, path: list[int], triples: list[list[int]], preds: int, hidden: Any
) -> Iterator[tuple[int, float]]:
    """Ends of a path of steps and the chance of each walk: the plain twin of the kernel."""
    ways: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for number, (h, p, t) in enumerate(triples):
        if [h, p, t] != hidden:
            ways[h, p].append((t, number))
            ways[t, p + preds].append((h, number))

    def go(at: int, left: list[int], came_by: int, likely: float) -> Iterator[tuple[int, float]]:
        if not left:
            yield at, likely
            return
        choices = ways[at, left[0]]
        for end, fact in choices:
            if fact != came_by:
                yield from go(end, left[1:], fact, likely / len(choices))

    yield from go(x, path, -1, 1.0)


@st.composite
def programs(draw: st.DrawFn) -> tuple[Graph, Rules]:
    """A small graph and chain rules over it."""
    n, preds = 4, 2
    entity = st.integers(0, n - 1)
    triples = draw(
        st.lists(
            st.tuples(entity, st.integers(0, preds - 1), entity),
            min_size=3,
            max_size=9,
            unique=True,
        )
    )
    vocab = Vocab.of([f"e{i}" for i in range(n)], [f"p{i}" for i in range(preds)])
    array = np.array(triples, np.int32)
    graph = Graph("small", vocab, array, array[:0], array[:0], np.full(preds, -1, np.int32))
    paths = draw(
        st.lists(
            st.tuples(
                st.integers(0, preds - 1),
                st.lists(st.integers(0, 2 * preds - 1), min_size=1, max_size=3).map(tuple),
            ),
            min_size=1,
            max_size=4,
            unique=True,
        )
    )
    clauses = []
    for head, path in paths:
        nodes = [n, *range(n + 2, n + 1 + len(path)), n + 1]
        body = [
            (s, nodes[i], nodes[i + 1]) if s < preds else (s - preds, nodes[i + 1], nodes[i])
            for i, s in enumerate(path)
        ]
        clauses.append(((head, n, n + 1), body))
    return graph, Rules.of(clauses, vocab)


@settings(max_examples=25, deadline=None)
@given(program=programs(), seed=st.integers(0, 3))
def test_scores_are_the_chances_of_all_episodes_of_the_environment(
    program: tuple[Graph, Rules], seed: int
) -> None:
    graph, rules = program
    asked = Asked.of(graph, rules)
    policy = unlike(asked, seed)
    scorer = PolicyScorer(asked, policy)
    # A triple that is no fact has nothing to hide, as it is with questions of the test part.
    missing = next(t for t in np.ndindex(4, 2, 4) if not (graph.train == np.array(t)).all(1).any())
    h, p, t = missing
    tail, head = asked.questions(np.array([missing], np.int32))
    for side, entity, question in (("tail", h, tail), ("head", t, head)):
        found = scorer.mass(np.array([entity], np.int32), np.array([p], np.int32), side)[0]
        np.testing.assert_allclose(found, enumerated(asked, policy, question), atol=1e-7)


def test_scores_are_the_chances_of_all_episodes_on_the_shipped_graph(
    family: Graph, asked: Asked
) -> None:
    policy = unlike(asked)
    scorer = PolicyScorer(asked, policy)
    for h, p, t in family.test[::16].tolist():
        found = scorer.mass(np.array([h], np.int32), np.array([p], np.int32), "tail")[0]
        expected = enumerated(asked, policy, asked.questions(np.array([[h, p, t]]))[0])
        np.testing.assert_allclose(found, expected, atol=1e-7)


def test_scores_order_entities_as_chances_do_and_are_zero_without_a_proof(
    family: Graph, asked: Asked
) -> None:
    scorer = PolicyScorer(asked, unlike(asked))
    heads, preds = family.test[:40, 0], family.test[:40, 1]
    mass, scores = scorer.mass(heads, preds, "tail"), scorer.scores(heads, preds, "tail")
    assert ((mass == 0) == (scores == 0)).all()
    order = np.argsort(mass, axis=1, kind="stable")
    assert (np.diff(np.take_along_axis(scores, order, 1), axis=1) >= 0).all()


@settings(max_examples=30, deadline=None)
@given(program=programs(), which=st.integers(0, 100))
def test_a_pass_of_gradients_does_what_its_plain_twin_does(
    program: tuple[Graph, Rules], which: int
) -> None:
    graph, rules = program
    asked = Asked.of(graph, rules)
    chains, steps, preds = asked.chains, asked.steps, asked.steps.num_predicates
    triples = np.unique(graph.train, axis=0)
    h, p, t = (int(v) for v in triples[which % len(triples)])
    logits = np.linspace(-1.0, 1.0, len(asked.rules))
    squares = np.full(len(logits), 0.01)
    wanted, loss = logits.copy(), 0.0
    true = [b for a, q, b in triples.tolist() if (a, q) == (h, p) and b != t]
    right, whole = np.zeros(len(logits)), np.zeros(len(logits))
    for r in range(chains.ptr[p], chains.ptr[p + 1]):
        path = chains.bodies[r, : chains.lengths[r]].tolist()
        for end, chance in walks(h, path, triples.tolist(), preds, [h, p, t]):
            right[r] += chance * (end == t)
            whole[r] += chance * (end not in true)
    weight = np.exp(logits)
    if (weight * right).sum() > 0:
        slope = weight * (whole / (weight * whole).sum() - right / (weight * right).sum())
        loss = np.log((weight * whole).sum() / (weight * right).sum())
        used = whole > 0
        wanted[used] -= 0.5 * slope[used] / np.sqrt(0.01 + slope[used] ** 2)

    question = asked.as_steps(asked.questions(np.array([[h, p, t]], np.int32)))[:1]
    found, counted = learn(
        question, chains.ptr, chains.bodies, chains.lengths, steps.ptr, steps.ends,
        steps.num_entities, preds, 0.5, logits, squares,
    )  # fmt: skip

    assert counted == ((weight * right).sum() > 0)
    assert found == pytest.approx(loss, abs=1e-9)
    np.testing.assert_allclose(logits, wanted, atol=1e-9)


def test_a_question_is_never_answered_by_its_own_fact() -> None:
    vocab = Vocab.of(["a", "b"], ["p", "q"])
    fact = np.array([[0, 0, 1]], np.int32)
    graph = Graph("planted", vocab, fact, fact[:0], fact[:0], np.full(2, -1, np.int32))
    asked = Asked.of(graph, parse_rules("same:1:p(X,Y) -> p(X,Y)", vocab))
    questions = asked.questions(fact)
    found = prove_all(questions, asked.facts, asked.rules, asked.depth, inverse=asked.inverse)
    assert found.lengths.tolist() == [0, 0]
    chains, steps = asked.chains, asked.steps
    _, counted = learn(
        asked.as_steps(questions), chains.ptr, chains.bodies, chains.lengths, steps.ptr,
        steps.ends, 2, 2, 0.5, np.zeros(2), np.ones(2),
    )  # fmt: skip
    assert counted == 0
    for question in questions:
        assert enumerated(asked, rule_policy(asked), question).sum() == 0


def test_a_trained_prover_proves_more_and_ranks_better_than_an_untrained_one(
    family: Graph,
) -> None:
    rules = mine(family.facts, family.vocab).rules
    config = ProverConfig(data="family", n_envs=64, clone_updates=20, ppo_steps=8192, passes=4)
    trained, result = fit_prover(config, family, rules)

    assert result.finished
    assert result.proved is not None
    assert result.first_proved is not None
    assert result.proved > result.first_proved
    untrained = PolicyScorer(trained.asked, rule_policy(trained.asked))
    after, before = (
        rank(scorer, family.test, family.known).metrics() for scorer in (trained, untrained)
    )
    assert after.expected_mrr > before.expected_mrr
    assert after.expected_mrr > 0.98


def test_ppo_alone_learns_to_answer_rightly(family: Graph) -> None:
    asked = Asked.of(family, mine(family.facts, family.vocab, length=2).rules)
    config = ProverConfig(n_envs=64, lr=0.1)
    practice = Practice(
        asked, rule_policy(asked), asked.questions(family.train), config, asked.depth, 24
    )
    returns = [practice.step()["charts/episodic_return"] for _ in range(24)]
    assert np.mean(returns[-4:]) > np.mean(returns[:4]) + 0.1


@pytest.mark.parametrize("rounds", [1, 4, 6, 11])
def test_a_run_that_was_stopped_and_resumed_ends_with_the_same_bits(
    rounds: int, tmp_path: Path, whole: Path
) -> None:
    config = ProverConfig(
        data=str(FAMILY), rules=FAMILY / "rules.txt", run_dir=tmp_path / "run", **SMALL
    )
    first = train_prover(dataclasses.replace(config, stop_after=rounds))
    assert (first.rounds, first.finished) == (rounds, False)
    with pytest.raises(MissingFile, match="no trained prover"):
        load_prover(tmp_path / "run", load_graph(FAMILY))
    assert train_prover(config, resume=True).finished
    same_end(tmp_path / "run", whole)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing stopped."""
    run = tmp_path_factory.mktemp("prover") / "whole"
    config = ProverConfig(data=str(FAMILY), rules=FAMILY / "rules.txt", run_dir=run, **SMALL)
    assert train_prover(config).finished
    return run


def test_a_run_killed_anywhere_goes_on_to_the_same_bits(
    tmp_path: Path, whole: Path, call: Callable[..., Any], environ: dict[str, str]
) -> None:
    line = f"train prover --data {FAMILY} --rules {FAMILY}/rules.txt {FLAGS} --run-dir killed"
    process = subprocess.Popen(
        [BIN / "batchwright", *line.split(), "--quiet"],
        cwd=tmp_path,
        env={**environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
    )
    checkpoints = tmp_path / "killed" / "checkpoints"
    deadline = time.monotonic() + 600
    # Unless it is quicker than the signal.
    while not any(path.name >= "step_00000003" for path in checkpoints.glob("step_*")):
        assert process.poll() in (None, 0)
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()

    outcome = call("train prover --resume killed --quiet --format json", tmp_path)

    assert outcome.code == 0, outcome.err
    assert outcome.data["finished"]
    same_end(tmp_path / "killed", whole)


def atoms(text: str) -> list[tuple[str, str, str]]:
    return re.findall(r"(\w+)\(\s*([^\s,()]+)\s*,\s*([^\s,()]+)\s*\)", text)


def nodes(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for child in node["children"]:
        yield from nodes(child)


def is_an_instance(node: dict[str, Any], rule: str) -> bool:
    """Whether one substitution makes the rule's head the goal and its body the children."""
    *body, head = atoms(rule)
    (goal,), children = atoms(node["goal"]), [atoms(c["goal"])[0] for c in node["children"]]
    if len(body) != len(children) or head[0] != goal[0]:
        return False
    for order in itertools.permutations(children):
        pairs = [(head, goal), *zip(body, order, strict=True)]
        bound: dict[str, str] = {}
        if all(
            rp == gp and all(bound.setdefault(v, g) == g for v, g in zip(rest, given, strict=True))
            for (rp, *rest), (gp, *given) in pairs
        ):
            return True
    return False


def test_the_rollouts_of_a_run_are_proofs_that_hold_and_are_read_by_the_report(
    whole: Path, family: Graph
) -> None:
    rules = dict(
        line.split(":")[::2]
        for line in (whole / "rules.txt").read_text().splitlines()
        if not line.startswith("#")
    )
    facts = {tuple(line.split("\t")) for line in (FAMILY / "train.txt").read_text().splitlines()}
    records = [json.loads(line) for line in (whole / "events.jsonl").read_text().splitlines()]
    rounds = {record["round"] for record in records if record["kind"] == "eval"}
    files = sorted((whole / "rollouts").glob("*.jsonl"))
    shown = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    proved = [one for one in shown if one["proved"]]

    assert {int(file.stem) for file in files} == rounds
    assert len(shown) == len(files) * min(SHOWN, 2 * len(family.valid))
    assert proved
    for one in shown:
        found = list(nodes(one["proof"]))
        ends = {node["by"] for node in found if not node["children"]}
        assert ends == {"fact"} if one["proved"] else "open" in ends
        # As many steps as goals that were resolved.
        assert sum(node["by"] != "open" for node in found) == one["depth"]
        ((predicate, x, y),) = atoms(one["question"])
        own = (predicate, *(one["expected"] if term == "X" else term for term in (x, y)))
        for node in found:
            ((p, h, t),) = atoms(node["goal"])
            if node["by"] == "fact":
                assert (h, p, t) in facts
                assert (p, h, t) != own
            elif node["by"] != "open":
                assert is_an_instance(node, rules[node["by"].removeprefix("rule ")])
        if one["proved"]:
            assert one["right"] == (atoms(one["proof"]["goal"])[0] == own)
    found = summarise(whole)["rollouts"]
    assert (found["episodes"], found["invalid"]) == (len(shown), 0)
    assert found["mean_reward"] == pytest.approx(np.mean([one["reward"] for one in shown]))


def test_the_command_trains_and_the_prover_is_evaluated_alone_and_beside_an_embedding(
    tmp_path: Path, family: Graph, whole: Path, call: Callable[..., Any]
) -> None:
    shape = KgeShape("complex", 8, family.vocab.num_entities, family.vocab.num_predicates)
    kge = Kge.new(shape, 0)
    save_kge(tmp_path / "kge", kge, entities=vocab_digest(family))
    line = f"evaluate prover --data {FAMILY} --prover {whole} --format json --quiet --mode"
    ways: tuple[tuple[str, Weighting], ...] = (("prover", "kept"), ("rl", "ppo"))
    for mode, which in ways:
        alone = call(f"{line} {mode}", tmp_path)
        assert alone.code == 0, alone.err
        expected = rank(load_prover(whole, family, which=which), family.test, family.known)
        assert alone.data["both"]["mrr"] == pytest.approx(expected.metrics().mrr)
    plain = call(f"{line.replace(f' --prover {whole}', '')} kge --kge kge", tmp_path)
    none = call(f"{line} hybrid --kge kge --beta 0", tmp_path)
    assert none.data["both"] == plain.data["both"]
    chosen = call(f"{line} hybrid --kge kge", tmp_path)
    assert chosen.data["both"]["mrr"] > 2 * plain.data["both"]["mrr"]
    proofs = load_prover(whole, family)
    given = family.test[:50]
    for side, column in (("tail", 0), ("head", 2)):
        asked = np.ascontiguousarray(given[:, column]), np.ascontiguousarray(given[:, 1]), side
        embedding = KgeScorer(kge).scores(*asked)  # type: ignore[arg-type]
        both = Hybrid(KgeScorer(kge), proofs, 0.0).scores(*asked)  # type: ignore[arg-type]
        assert embedding.tobytes() == both.tobytes()


def test_corrupted_triples_and_an_embedding_that_shapes_rewards_can_be_trained_with(
    tmp_path: Path, family: Graph
) -> None:
    shape = KgeShape("distmult", 4, family.vocab.num_entities, family.vocab.num_predicates)
    kge = Kge.new(shape, 1)
    save_kge(tmp_path / "kge", kge, entities=vocab_digest(family))
    h, p, t = family.train[0].tolist()
    preds = family.vocab.num_predicates
    potential = kge_potential(kge, kge.shape.num_predicates)
    goals = [[h, p, t], [t, preds + p, h], [h, 2 * preds + p, t], [t, 3 * preds + p, h], [h, p, -1]]
    values = potential(np.array(goals, np.int32))
    score = float((kge.entities[h] * kge.steps[p] * kge.entities[t]).sum())
    assert values.tolist() == pytest.approx([1 / (1 + np.exp(-score))] * 4 + [0.0])
    config = ProverConfig(
        data=str(FAMILY), rules=FAMILY / "rules.txt", run_dir=tmp_path / "run", negatives=1,
        reward="balanced", kge=tmp_path / "kge", curriculum=False, **SMALL,
    )  # fmt: skip
    assert train_prover(config).finished


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("train prover", "no --data"),
        ("train prover --data nowhere", "nowhere"),
        ("train prover --data {family} --rules r --mine", "exclude each other"),
        ("train prover --data {family} --n-envs 0", "--n-envs must be at least 1, got 0"),
        ("train prover --data {family} --kge k", "--negatives"),
        (
            "train prover --data {family} --passes 0 --ppo-steps 0 --clone-updates 0",
            "nothing to do",
        ),
        ("train prover --data {family} --rules bad.txt", "bad.txt, line 1"),
        ("train prover --data {family} --rules none.txt", "none of the 1 rules"),
        ("train prover --data {family} --negatives 1 --kge nowhere", "nowhere"),
        ("train prover --resume nowhere", "nowhere"),
        ("evaluate prover --data {family} --mode rl", "--prover RUN"),
        ("evaluate prover --data {family} --mode rl --prover nowhere", "no trained prover"),
        ("evaluate prover --data {family} --mode prover", "--prover RUN"),
        ("evaluate prover --data {family} --mode prover --prover a b", "takes one --prover, got 2"),
        ("evaluate prover --data {family} --mode rl --prover a ./a", "given twice"),
        ("evaluate prover --data {family} --mode rules --prover x", "takes no --prover"),
    ],
)
def test_a_mistake_is_told_in_one_sentence(
    line: str, words: str, tmp_path: Path, call: Callable[..., Any]
) -> None:
    (tmp_path / "bad.txt").write_text("r:1:cousin(X,Y) -> father(X,Y)\n")
    (tmp_path / "none.txt").write_text("r:1:father(X,Y), father(X,Z) -> brother(Y,Y)\n")
    outcome = call(line.format(family=FAMILY), tmp_path)
    assert outcome.code == 1
    assert words in outcome.err
    assert outcome.err.count("\n") == 1
    assert not (tmp_path / "runs" / "prover" / "config.toml").exists()


def test_a_run_is_resumed_with_its_own_settings_and_never_written_over(
    whole: Path, family: Graph, call: Callable[..., Any], tmp_path: Path
) -> None:
    outcome = call(f"train prover --resume {whole} --n-envs 64", tmp_path)
    assert (outcome.code, "--n-envs is 32, got 64" in outcome.err) == (1, True)
    with pytest.raises(ConfigError, match="already holds a run"):
        train_prover(ProverConfig(data=str(FAMILY), run_dir=whole))
    other = dataclasses.replace(family, vocab=Vocab.of(["a"], ["p"]))
    with pytest.raises(Mismatch, match="other names"):
        load_prover(whole, other)
    assert json.loads((whole / "stamp.json").read_text())["seed"] == 0


def test_a_run_is_not_resumed_on_facts_that_changed(tmp_path: Path) -> None:
    graph = tmp_path / "graph"
    shutil.copytree(FAMILY, graph)
    config = ProverConfig(
        data=str(graph), rules=FAMILY / "rules.txt", run_dir=tmp_path / "run", **SMALL
    )
    train_prover(dataclasses.replace(config, stop_after=2))
    lines = (graph / "train.txt").read_text().splitlines()
    (graph / "train.txt").write_text("\n".join(lines[1:]) + "\n")
    with pytest.raises(Mismatch, match="other facts"):
        train_prover(config, resume=True)


def test_rules_that_ask_an_embedding_are_trained_and_read_back(
    call: Callable[[str, Path], Any], tmp_path: Path
) -> None:
    (tmp_path / "rules.txt").write_text(
        "by_facts:1.0:father(x,z), father(z,y) -> grandfather(x,y)\n"
        "by_belief:1.0:father(x,z), father_kge(z,y) -> grandfather(x,y)\n"
    )
    (tmp_path / "reward.py").write_text("def mine(ended):\n    return ended.proved & ended.label\n")
    for line in (
        "train kge --data family --rank 8 --epochs 3 --run-dir kge --quiet",
        "train prover --data family --rules rules.txt --kge kge --accept 0.05 --n-envs 16 "
        "--reward reward.py:mine --ppo-steps 256 --clone-updates 2 --passes 2 --run-dir run -q",
    ):
        done = call(line, tmp_path)
        assert done.code == 0, done.err
    graph = load_graph("family")
    here = os.getcwd()
    os.chdir(tmp_path)
    try:
        prover = load_prover(Path("run"), graph)
    finally:
        os.chdir(here)
    assert prover.asked.steps.num_predicates == 2 * graph.vocab.num_predicates
    rule = {name: i for i, name in enumerate(prover.asked.rules.names)}
    believed = prover.probabilities[rule["by_belief tail"]]
    assert 0 < believed < 1
    evaluated = call("evaluate prover --data family --mode rl --prover run --quiet", tmp_path)
    assert evaluated.code == 0, evaluated.err
    proved = call("prove grandfather(X,joren) --prover run --kge kge --accept 0.05", tmp_path)
    assert proved.code == 0, proved.err
    for more, said in (
        ("--kge kge", "give --rules or --negatives"),
        ("--accept 0.5", "--accept is for rules that use p_kge"),
        ("--reward nice", "or FILE.py:function, got 'nice'"),
        ("--reward none.py:mine --clone-updates 0", "no reward file at none.py"),
        ("--reward reward.py:yours --clone-updates 0", "has no function 'yours'"),
    ):
        done = call(f"train prover --data family {more} --ppo-steps 64 --n-envs 8 -q", tmp_path)
        assert (done.code, said in done.err) == (1, True), done.err


def test_the_names_of_rewards_are_those_of_the_environment() -> None:
    assert tuple(REWARDS) == REWARD_NAMES


def test_facts_of_a_hub_come_in_pages_and_stay_equally_probable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Five neighbours on two pages of three: what is sampled is what the exact sum says."""
    monkeypatch.setattr("batchwright.train.prover.program.PAGE", 3)
    vocab = Vocab.of([f"e{i}" for i in range(8)], ["near", "road"])
    near, road = vocab.predicate("near"), vocab.predicate("road")
    train = [(0, road, i) for i in range(1, 6)] + [(1, near, 7), (6, road, 7)]
    triples = np.array(train, np.int32)
    graph = Graph("hub", vocab, triples, triples[:0], triples[:0], np.full(2, -1, np.int32))
    rules = parse_rules("by_road:0.5:road(X,Y) -> near(X,Y)", vocab)
    asked = Asked.of(graph, rules)
    assert asked.width == 2 + 3
    policy = unlike(asked)
    found = PolicyScorer(asked, policy).mass(
        np.array([0], np.int32), np.array([near], np.int32), "tail"
    )[0]
    question = asked.questions(np.array([[0, near, 7]], np.int32))[0]
    np.testing.assert_allclose(found, enumerated(asked, policy, question), atol=1e-7)
    assert np.ptp(found[1:6]) < 1e-12
    assert found[1] > 0


def test_a_prover_whose_rules_somebody_edited_since_is_refused(
    tmp_path: Path, whole: Path, call: Callable[..., Any]
) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    rules = run / "rules.txt"
    lines = rules.read_text().splitlines(keepends=True)
    said = [n for n, line in enumerate(lines) if ":-" in line or "->" in line]
    del lines[said[0]]
    rules.write_text("".join(lines))

    ended = call(f"evaluate prover --data {FAMILY} --prover run --mode rl --quiet", tmp_path)
    assert ended.code == 1
    assert ended.err.count("\n") == 1
    assert "rules" in ended.err
    assert "internal" not in ended.err


def started(folder: Path, call: Callable[..., Any], name: str, flags: str) -> Path:
    line = f"train prover --data {FAMILY} --rules {FAMILY}/rules.txt --n-envs 8 --quiet {flags}"
    outcome = call(f"{line} --run-dir {name} --format json", folder)
    assert outcome.code == 0, outcome.err
    return folder / name


@pytest.mark.parametrize("policy", ["rules", "neural", "answers"])
def test_a_mode_called_rl_ranks_what_ppo_trained_beside_what_it_started_from(
    policy: str, tmp_path: Path, family: Graph, call: Callable[..., Any]
) -> None:
    """Over several runs the difference has an interval over them, of one run over its queries."""
    flags = f"--policy {policy} --ppo-steps 192 --eval-every 1"
    runs = [
        started(tmp_path, call, f"run{seed}", f"{flags} --seed {seed}").name for seed in range(3)
    ]
    triples = family.test[:4]
    (tmp_path / "few").mkdir()
    for part in ("train.txt", "valid.txt", "test.txt"):
        lines = (FAMILY / part).read_text().splitlines(keepends=True)
        (tmp_path / "few" / part).write_text("".join(lines[:4] if part == "test.txt" else lines))
    few = load_graph(tmp_path / "few")
    assert len(few.test) == len(triples)
    line = "evaluate prover --data few --mode rl --quiet --format json --prover"
    found = call(f"{line} {' '.join(runs)}", tmp_path).data
    expected = {
        which: [
            rank(load_prover(tmp_path / run, few, which=which), few.test, few.known).metrics().mrr
            for run in runs
        ]
        for which in ("before_ppo", "ppo")
    }
    gain = np.subtract(expected["ppo"], expected["before_ppo"])
    assert found["mode"] == "rl"
    assert found["both"]["mrr"] == pytest.approx(np.mean(expected["ppo"]))
    assert found["gain"]["before"]["mrr"] == pytest.approx(np.mean(expected["before_ppo"]))
    assert found["gain"]["runs"] == pytest.approx(gain)
    assert found["gain"]["over"] == "runs"
    spread = 4.303 * gain.std(ddof=1) / np.sqrt(3)
    assert found["gain"]["low"] == pytest.approx(gain.mean() - spread, abs=1e-12)
    assert found["gain"]["high"] == pytest.approx(gain.mean() + spread, abs=1e-12)
    for one in found["runs"]:
        assert "ppo" not in one["started_from"]
        assert one["trained_by"][-1] == "ppo"
    assert found["differing"] == []

    one = call(f"{line} {runs[0]}", tmp_path).data["gain"]
    assert one["over"] == "queries"
    assert one["low"] <= one["mrr"] <= one["high"]
    told = call(line.replace("--format json", "") + f" {runs[0]} {runs[1]}", tmp_path).out
    assert "both sides, before PPO" in told
    assert "over the 2 runs)" in told


@pytest.mark.parametrize(
    ("flags", "by"),
    [
        ("--clone-updates 1 --passes 0", ["imitation"]),
        ("--clone-updates 0 --passes 1", ["supervised"]),
        ("--clone-updates 1 --passes 1", ["imitation", "supervised"]),
    ],
)
def test_what_took_no_ppo_step_is_never_called_rl(
    flags: str, by: list[str], tmp_path: Path, call: Callable[..., Any]
) -> None:
    started(tmp_path, call, "run", f"{flags} --ppo-steps 0")
    line = f"evaluate prover --data {FAMILY} --limit 4 --quiet --prover run"
    refused = call(f"{line} --mode rl", tmp_path)
    assert (refused.code, refused.err.count("\n")) == (1, 1)
    assert "took no PPO step" in refused.err
    assert "--mode prover" in refused.err
    found = call(f"{line} --mode prover --format json", tmp_path).data
    assert found["mode"] == "prover"
    assert found["trained_by"] == by[: len(found["trained_by"])]
    assert "policy: trained by" in call(f"{line} --mode prover", tmp_path).out


def test_runs_that_are_no_repetitions_of_each_other_are_said_to_differ(
    tmp_path: Path, call: Callable[..., Any]
) -> None:
    started(tmp_path, call, "one", "--clone-updates 0 --passes 0 --ppo-steps 64")
    started(tmp_path, call, "two", "--clone-updates 0 --passes 0 --ppo-steps 64 --lr 0.5 --seed 1")
    line = f"evaluate prover --data {FAMILY} --limit 4 --quiet --mode rl --prover one two"
    assert call(f"{line} --format json", tmp_path).data["differing"] == ["lr"]
    assert "warning: the runs differ in more than the seed: lr" in call(line, tmp_path).out


def test_runs_of_one_seed_are_no_interval_over_seeds(
    tmp_path: Path, call: Callable[..., Any]
) -> None:
    for name in ("one", "two"):
        started(tmp_path, call, name, "--clone-updates 0 --passes 0 --ppo-steps 64 --seed 3")
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    line = f"evaluate prover --data {FAMILY} --limit 4 --quiet --mode rl --prover"
    for other in ("two", "copy"):
        refused = call(f"{line} one {other}", tmp_path)
        assert refused.code == 1
        assert "the same settings and the same seed, 3, so they are one run" in refused.err


@pytest.mark.parametrize("beta", ["nan", "inf", "-inf", "-1"])
def test_a_weight_of_proofs_that_is_none_is_refused(
    beta: str, tmp_path: Path, call: Callable[..., Any]
) -> None:
    refused = call(
        f"evaluate prover --data {FAMILY} --mode hybrid --kge no --beta={beta}", tmp_path
    )
    assert refused.code == 1
    assert f"--beta must be a number of at least 0, got {beta}" in refused.err


def test_a_reward_that_cannot_be_loaded_leaves_no_run(
    tmp_path: Path, call: Callable[..., Any]
) -> None:
    (tmp_path / "reward.py").write_text("def short(ended):\n    return ended.proved * 1.0\n")
    line = f"train prover --data {FAMILY} --clone-updates 0 --passes 0 --ppo-steps 64 --run-dir run"
    for wrong in ("nofile.py:short", "reward.py:", "reward.py:long"):
        assert call(f"{line} --reward {wrong}", tmp_path).code == 1
        assert not (tmp_path / "run").exists()
    assert call(f"{line} --reward reward.py:short", tmp_path).code == 0


def test_a_graph_without_short_rules_is_told_how_to_find_longer_ones(
    tmp_path: Path, call: Callable[..., Any]
) -> None:
    # Who likes one thing likes what others who like it like: three edges, and nothing shorter.
    likes = [f"user{u}\tlikes\titem{i}" for u in range(8) for i in range(6) if (u ^ i) & 1 == 0]
    for part, lines in (("train", likes[:-4]), ("valid", likes[-4:-2]), ("test", likes[-2:])):
        (tmp_path / f"{part}.txt").write_text("".join(f"{line}\n" for line in lines))
    line = "train prover --data . --clone-updates 0 --passes 0 --ppo-steps 64 --n-envs 8"
    refused = call(line, tmp_path)
    assert refused.code == 1
    assert "no rule of up to 2 edges" in refused.err
    assert "give --length 3, a lower --min-confidence, or --rules FILE" in refused.err
    assert call(f"{line} --length 3", tmp_path).code == 0


@pytest.mark.parametrize("policy", ["rules", "neural", "answers"])
@pytest.mark.parametrize("budget", [3000, 20_000])
def test_auto_leaves_a_budget_many_updates_and_the_report_says_what_was_taken(
    policy: str, budget: int, tmp_path: Path, family: Graph
) -> None:
    config = ProverConfig(data=str(FAMILY), policy=policy, n_envs="auto", ppo_steps=budget)  # type: ignore[arg-type]
    rules = parse_rules(FAMILY / "rules.txt", family.vocab)
    sized = _sized(config, _followed(config, family, rules))
    assert budget / sized.rollout >= min(UPDATES, budget / (FEWEST * config.steps_each))
    taken = sum(here.part == "ppo" for here in _plan(sized, 3)) * sized.rollout
    assert budget <= taken < budget + sized.rollout


def test_a_rollout_larger_than_the_budget_is_said(tmp_path: Path, call: Callable[..., Any]) -> None:
    line = f"train prover --data {FAMILY} --rules {FAMILY}/rules.txt --clone-updates 0 --passes 0"
    outcome = call(f"{line} --n-envs 32 --ppo-steps 100 --run-dir run --quiet", tmp_path)
    assert "256 of 100" in outcome.out
    assert "one rollout is 256 steps, more than the 100 of --ppo-steps" in outcome.out
    outcome = call(f"{line} --n-envs 8 --ppo-steps 100 --run-dir fits --quiet", tmp_path)
    assert "128 of 100" in outcome.out
    assert "one rollout is" not in outcome.out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def mine(e):\n    raise KeyError('no\\nway')\n", "line 2: KeyError"),
        ("def mine(e):\n    return e.proved / e.nothing\n", "line 2: AttributeError"),
        ("def mine(e, other):\n    return 1\n", "reward.py: TypeError"),
        ("def mine(e)\n    return 1\n", "line 1: SyntaxError"),
        ("import nowhere\n", "line 1: ModuleNotFoundError"),
        ("def mine(e):\n    return ['much'] * len(e.proved)\n", "reward function must return"),
        ("def mine(e):\n    return [[1, 2], [3]]\n", "reward function must return"),
        ("def mine(e):\n    return None\n", "reward function must return"),
        ("def mine(e):\n    return e.depth * float('nan')\n", "reward"),
        ("def mine(e):\n    return [1.0] * (len(e.depth) + 1)\n", "reward function must return"),
    ],
)
def test_a_mistake_in_a_reward_function_is_told_as_one_of_its_file(
    text: str, words: str, tmp_path: Path, call: Callable[..., Any]
) -> None:
    (tmp_path / "reward.py").write_text(text)
    line = f"train prover --data {FAMILY} --rules {FAMILY}/rules.txt --clone-updates 0 --passes 0"
    line += " --n-envs 8 --ppo-steps 64 --run-dir run --quiet --reward reward.py:mine"
    outcome = call(line, tmp_path)
    assert outcome.code == 1
    assert words in outcome.err
    assert "internal error" not in outcome.err
    assert outcome.err.count("\n") == 1
