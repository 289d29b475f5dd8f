"""The policy that chooses among proved answers: what it finds, what PPO learns, and its command."""

import dataclasses
import shutil
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.errors import ConfigError, Mismatch
from batchwright.logic.loaders import Graph, load_graph, shipped_graph
from batchwright.logic.mine.mining import mine
from batchwright.logic.rank.ranking import rank
from batchwright.logic.rank.scorers import LIMIT
from batchwright.logic.rules import Rules, parse_rules
from batchwright.train.prover.answers import AnswerPolicy, AnswerScorer, Weighed, fit_to_ask
from batchwright.train.prover.config import ProverConfig
from batchwright.train.prover.kernels import find_answers, improve_answers
from batchwright.train.prover.loop import fit_prover, load_prover, train_prover
from batchwright.train.prover.scorer import FLOOR

sys.path.insert(0, str(Path(__file__).parent))

from prover_checks import same_end

FAMILY = shipped_graph()
SMALL: dict[str, Any] = {
    "policy": "answers", "n_envs": 64, "draws": 4, "ppo_steps": 1536, "eval_triples": 40,
    "eval_every": 2, "save_every": 1, "most": 40, "constants": 20,
}  # fmt: skip
FLAGS = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in SMALL.items())


@pytest.fixture(scope="module")
def family() -> Graph:
    return load_graph(FAMILY)


@pytest.fixture(scope="module")
def rules(family: Graph) -> Rules:
    return mine(family.train, family.vocab, most=30).rules


@pytest.fixture(scope="module")
def weighed(family: Graph, rules: Rules) -> Weighed:
    return Weighed(family, rules)


class Found:
    """One search of `find_answers`, with room for its hits."""

    def __init__(
        self, weighed: Weighed, questions: Any, weights: Any, draws: int, room: int = 1 << 20
    ) -> None:
        count = len(questions)
        self.ptr = np.zeros(count + 1, np.int64)
        self.rule, self.answer = np.empty(room, np.int32), np.empty(room, np.int32)
        self.answers, self.right = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self.drawn = np.zeros((count, draws), np.int32)
        self.logp = np.zeros((count, draws))
        self.done = find_answers(
            questions, weighed.program, weighed.num_entities, weighed.num_predicates, LIMIT,
            weights, np.uint64(5), self.ptr, self.rule, self.answer, self.answers, self.right,
            self.drawn, self.logp,
        )  # fmt: skip


def test_what_is_found_is_what_each_rule_reaches_with_the_fact_hidden(
    family: Graph, rules: Rules, weighed: Weighed
) -> None:
    questions = weighed.questions(family.train[::97])
    found = Found(weighed, questions, np.ones(weighed.num_rules), 2)
    assert found.done == len(questions)
    chains = weighed.program
    for q, (x, step, y) in enumerate(questions.tolist()):
        side = step >= weighed.num_predicates
        p = step % weighed.num_predicates
        own = (y, p, x) if side else (x, p, y)
        ways: dict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
        known = set()
        for number, (h, r, t) in enumerate(family.train.tolist()):
            if (h, r, t) != own:
                ways[h, r].add((t, number))
                ways[t, r + weighed.num_predicates].add((h, number))
                if r == p and (t if side else h) == x:
                    known.add(h if side else t)
        wanted = []
        for rule in range(chains.rule_ptr[step], chains.rule_ptr[step + 1]):
            at = {(x, -1)}
            for s in chains.bodies[rule, : chains.lengths[rule]].tolist():
                at = {(e, f) for z, came in at for e, f in ways[z, s] if f != came}
            ends = {e for e, _ in at} - known
            wanted += [(rule, e) for e in ends if e != x or chains.reflexive[step]]
        part = slice(found.ptr[q], found.ptr[q + 1])
        hits: dict[int, set[int]] = defaultdict(set)
        for rule, number in zip(
            found.rule[part].tolist(), found.answer[part].tolist(), strict=True
        ):
            hits[number].add(rule)
        by_entity: dict[int, set[int]] = defaultdict(set)
        for rule, e in wanted:
            by_entity[e].add(rule)
        assert sorted(map(sorted, hits.values())) == sorted(map(sorted, by_entity.values()))
        assert found.answers[q] == len(by_entity)
        assert hits.get(int(found.right[q]), set()) == by_entity.get(y, set())


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    clip=st.sampled_from([0.05, 0.2, 10.0]),
    entropy_coef=st.sampled_from([0.0, 0.1]),
)
def test_the_gradient_is_that_of_ppos_objective(
    seed: int, clip: float, entropy_coef: float
) -> None:
    """Against torch's derivative of the objective as it is written in the paper."""
    rng = np.random.default_rng(seed)
    queries, num_rules, draws = 4, 6, 5
    answers = rng.integers(1, 5, queries)
    hits = [
        sorted({(int(rng.integers(num_rules)), int(a)) for _ in range(3) for a in range(k)})
        for k in answers
    ]
    ptr = np.cumsum([0, *map(len, hits)]).astype(np.int64)
    flat = np.array([hit for some in hits for hit in some], np.int32)
    right = np.array([rng.integers(-1, k) for k in answers])
    drawn = np.array([rng.integers(0, k, draws) for k in answers], np.int32)
    weights = rng.normal(size=num_rules)
    logp = np.log(rng.uniform(0.05, 1.0, drawn.shape))
    slope = np.zeros(num_rules)
    clipped, _, entropies = improve_answers(
        np.arange(queries), 5, ptr, flat[:, 0].copy(), flat[:, 1].copy(), answers, right, drawn,
        logp, weights, clip, entropy_coef, slope,
    )  # fmt: skip

    w = torch.tensor(weights, requires_grad=True)
    objective, cut, entropy_sum = torch.zeros((), dtype=torch.float64), 0, 0.0
    for q in range(queries):
        logits = torch.stack(
            [
                sum((w[r] for r, a in hits[q] if a == k), start=w.sum() * 0)
                for k in range(answers[q])
            ]
        )
        all_logp = torch.log_softmax(logits, 0)
        rewards = (drawn[q] == right[q]).astype(float)
        entropy = -(all_logp.exp() * all_logp).sum()
        entropy_sum += float(entropy.detach()) * draws
        objective = objective + entropy_coef * entropy
        if rewards.std() == 0:
            continue
        advantage = torch.tensor((rewards - rewards.mean()) / rewards.std())
        ratio = (all_logp[torch.tensor(drawn[q]).long()] - torch.tensor(logp[q])).exp()
        bounded = ratio.clamp(1 - clip, 1 + clip)
        objective = objective + torch.min(ratio * advantage, bounded * advantage).mean()
        out = torch.where(advantage > 0, ratio > 1 + clip, ratio < 1 - clip)
        cut += int(out.sum())
    torch.autograd.backward(objective)
    assert w.grad is not None
    np.testing.assert_allclose(slope, w.grad.numpy(), atol=1e-9)
    assert clipped == cut
    assert entropies == pytest.approx(entropy_sum)


def test_answers_are_drawn_as_often_as_they_are_probable(family: Graph, weighed: Weighed) -> None:
    questions = weighed.questions(family.train[:3])
    weights = np.linspace(-0.3, 0.3, weighed.num_rules)
    found = Found(weighed, questions, weights, 20_000)
    for q in range(len(questions)):
        logits = np.zeros(found.answers[q])
        part = slice(found.ptr[q], found.ptr[q + 1])
        np.add.at(logits, found.answer[part], weights[found.rule[part]])
        chances = np.exp(logits) / np.exp(logits).sum()
        often = np.bincount(found.drawn[q], minlength=len(chances)) / 20_000
        np.testing.assert_allclose(often, chances, atol=0.02)
        np.testing.assert_allclose(np.exp(found.logp[q]), chances[found.drawn[q]], atol=1e-12)


def test_a_search_without_room_says_how_far_it_came(family: Graph, weighed: Weighed) -> None:
    questions = weighed.questions(family.train[:50])
    weights = np.ones(weighed.num_rules)
    whole, small = Found(weighed, questions, weights, 2), Found(weighed, questions, weights, 2, 90)
    assert whole.done == len(questions)
    assert 0 < small.done < len(questions)
    same = slice(small.done + 1)
    assert (small.ptr[same] == whole.ptr[same]).all()


def test_probabilities_are_a_softmax_over_what_is_proved_and_order_the_ranking(
    family: Graph, weighed: Weighed
) -> None:
    policy = AnswerPolicy(weighed.start("alike"))
    with torch.no_grad():
        policy.weights.copy_(torch.linspace(-1, 1, weighed.num_rules, dtype=torch.float64))
    scorer = AnswerScorer(weighed, policy)
    h, p, _ = family.valid[:20].T
    mass = scorer.mass(h, p, "tail")
    logits = weighed.scorer(policy.array()).scores(h, p, "tail")
    assert ((mass > 0) == (logits != 0)).all()
    answered = mass.any(1)
    assert answered.any()
    np.testing.assert_allclose(mass.sum(1)[answered], 1.0)
    scores = scorer.scores(h, p, "tail")
    for row, proved, score in zip(logits, mass > 0, scores, strict=True):
        assert (
            np.argsort(row[proved], kind="stable") == np.argsort(score[proved], kind="stable")
        ).all()
        assert (score[~proved] == 0).all()
    with pytest.raises(Mismatch, match="other rules"):
        AnswerScorer(weighed, AnswerPolicy(np.ones(3)))


def test_a_start_by_confidence_sums_squared_confidences_and_runs_decay_to_it(
    family: Graph, tmp_path: Path
) -> None:
    text = "a:0.5:father(X,Y) -> uncle(X,Y)\nb:0.2:mother(X,Y) -> aunt(X,Y)"
    weighed = Weighed(family, parse_rules(text, family.vocab))
    assert sorted(weighed.start("confidence")) == pytest.approx([0.32, 0.32, 2.0, 2.0])

    small = {**SMALL, "start": "confidence", "decay": 0.1}
    config = ProverConfig(data=str(FAMILY), run_dir=tmp_path / "whole", **small)
    assert train_prover(config).finished
    cut = dataclasses.replace(config, run_dir=tmp_path / "cut")
    assert not train_prover(dataclasses.replace(cut, stop_after=2)).finished
    assert train_prover(cut, resume=True).finished
    same_end(tmp_path / "cut", tmp_path / "whole")


def test_rules_of_one_form_and_confidence_share_a_factor_and_runs_resume(
    family: Graph, tmp_path: Path
) -> None:
    person = family.vocab.entities[0]
    lines = [
        "0.11:father(X,Y) -> uncle(X,Y)",
        "0.19:mother(Y,X) -> aunt(X,Y)",
        "0.25:father(X,Y) -> aunt(X,Y)",
        "0.15:father(X,Z), mother(Z,Y) -> aunt(X,Y)",
        f"0.15:father(X,{person}) -> aunt(X,{person})",
        f"0.15:father(X,Y) -> aunt(X,{person})",
        f"0.15: -> aunt(X,{person})",
    ]
    text = "\n".join(f"r{number}:{line}" for number, line in enumerate(lines))
    weighed = Weighed(family, parse_rules(text, family.vocab))
    start, groups = weighed.start("confidence"), weighed.groups()

    # From both ends each; the first two are of one form and bin, and a rule with a constant at
    # both of its atoms is another one when it is asked from the constant.
    assert weighed.num_rules == len(groups) == 2 * len(lines)
    sizes = Counter(groups.tolist())
    assert sorted(sizes.values())[-1] == 4
    assert len(sizes) == 7
    policy = AnswerPolicy(start, groups)
    assert (policy.array() == start).all()
    rng = np.random.default_rng(0)
    slope = rng.normal(size=len(start))
    with torch.no_grad():
        policy.weights += torch.from_numpy(rng.normal(size=len(policy.weights)))
    factors = policy.weights.detach().numpy()
    for rule, group in enumerate(groups):
        assert policy.array()[rule] == start[rule] * factors[group]
    for group in sizes:
        expected = (slope * start)[groups == group].sum()
        assert policy.slope(slope)[group] == pytest.approx(expected)

    small = {**SMALL, "start": "confidence", "shared": True, "decay": 0.1}
    config = ProverConfig(data=str(FAMILY), run_dir=tmp_path / "whole", **small)
    assert train_prover(config).finished
    cut = dataclasses.replace(config, run_dir=tmp_path / "cut")
    assert not train_prover(dataclasses.replace(cut, stop_after=2)).finished
    assert train_prover(cut, resume=True).finished
    same_end(tmp_path / "cut", tmp_path / "whole")
    load_prover(tmp_path / "whole", family)


def test_train_queries_with_joined_ends_are_left_out_where_valid_has_none(family: Graph) -> None:
    config = ProverConfig(data="x", policy="answers")
    assert fit_to_ask(config, family) is family.train
    rng = np.random.default_rng(0)
    train = np.stack([rng.integers(0, m, 300) for m in (30, 3, 30)], 1).astype(np.int32)
    train = np.unique(train, axis=0)
    ends = Counter(tuple(sorted(pair)) for pair in train[:, [0, 2]].tolist())
    free = [(x, 1, y) for x in range(30) for y in range(x, 30) if (x, y) not in ends][:9]
    graph = dataclasses.replace(family, train=train, valid=np.array(free, np.int32))

    expected = [one for one in train.tolist() if ends[tuple(sorted((one[0], one[2])))] == 1]
    assert 0 < len(expected) < len(train)
    assert fit_to_ask(config, graph).tolist() == expected
    joined = dataclasses.replace(graph, valid=np.concatenate([graph.valid, train[:1]]))
    assert fit_to_ask(config, joined) is train
    never = dataclasses.replace(config, linked=False)
    assert fit_to_ask(never, joined).tolist() == expected
    assert fit_to_ask(dataclasses.replace(config, linked=True), graph) is train
    shifted = (train + np.array([0, 3, 0])).astype(np.int32)
    double = dataclasses.replace(graph, train=np.concatenate([train, shifted]))
    assert len(fit_to_ask(config, double)) == len(double.train)
    with pytest.raises(ConfigError, match="leaves no train query"):
        fit_to_ask(never, double)


def test_ppo_learns_from_rewards_alone_which_rule_is_right(tmp_path: Path) -> None:
    """Two rules agree on a wrong answer and one has the right one: counting proofs is misled."""
    n = 60
    true, wrong = (np.roll(np.arange(n), k) for k in (7, 23))
    lines: dict[str, list[str]] = {"train.txt": [], "valid.txt": [], "test.txt": []}
    for x in range(n):
        for relation, end in (("good", true), ("bad", wrong), ("worse", wrong)):
            lines["train.txt"].append(f"e{x}\t{relation}\te{end[x]}")
        part = ("valid.txt", "test.txt")[x % 2] if x % 5 < 2 else "train.txt"
        lines[part].append(f"e{x}\tp\te{true[x]}")
    for name, some in lines.items():
        (tmp_path / name).write_text("\n".join(some) + "\n")
    graph = load_graph(tmp_path)
    text = "\n".join(f"{r}:0.5:{r}(X,Y) -> p(X,Y)" for r in ("good", "bad", "worse"))
    rules = parse_rules(text, graph.vocab)
    seen = graph.without_test()
    weighed = Weighed(seen, rules.over(seen.vocab))
    untrained = AnswerScorer(weighed, AnswerPolicy(weighed.start("alike")))
    assert rank(untrained, graph.test, graph.known).metrics().mrr == 0.5

    config = ProverConfig(policy="answers", n_envs=64, ppo_steps=40_000, eval_every=100)
    trained, result = fit_prover(config, graph, rules)

    assert (result.before_ppo_mrr, result.after_ppo_mrr) == (0.5, 1.0)
    assert rank(trained, graph.test, graph.known).metrics().mrr == 1.0


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing stopped."""
    run = tmp_path_factory.mktemp("answers") / "whole"
    assert train_prover(ProverConfig(data=str(FAMILY), run_dir=run, **SMALL)).finished
    return run


@pytest.mark.parametrize("rounds", [1, 3, 5])
def test_a_run_that_was_stopped_and_resumed_ends_with_the_same_bits(
    rounds: int, tmp_path: Path, whole: Path
) -> None:
    config = ProverConfig(data=str(FAMILY), run_dir=tmp_path / "run", **SMALL)
    first = train_prover(dataclasses.replace(config, stop_after=rounds))
    assert (first.rounds, first.finished) == (rounds, False)
    assert train_prover(config, resume=True).finished
    same_end(tmp_path / "run", whole)


def test_another_test_file_changes_nothing_that_is_learned(tmp_path: Path, whole: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(FAMILY, data)
    lines = (data / "test.txt").read_text().splitlines()
    (data / "test.txt").write_text("\n".join(lines[::-2]) + "\n")
    train_prover(ProverConfig(data=str(data), run_dir=tmp_path / "run", **SMALL))
    same_end(tmp_path / "run", whole)


def test_the_command_trains_evaluates_and_proves(
    tmp_path: Path, family: Graph, whole: Path, call: Callable[..., Any]
) -> None:
    outcome = call(f"train prover --data {FAMILY} {FLAGS} --run-dir run --format json", tmp_path)
    assert outcome.code == 0, outcome.err
    assert outcome.data["rounds"] == 6
    assert outcome.data["after_ppo_right"] > outcome.data["before_ppo_right"]
    same_end(tmp_path / "run", whole)

    line = f"evaluate prover --data {FAMILY} --mode rl --prover run --format json"
    outcome = call(line, tmp_path)
    assert outcome.code == 0, outcome.err
    expected = rank(load_prover(whole, family), family.test, family.known).metrics()
    assert outcome.data["both"]["mrr"] == expected.mrr
    assert outcome.data["proofs"] == {"search": "all proofs by all rules", "left_out": 0}

    h, p, _ = (int(v) for v in family.test[0])
    query = f"{family.vocab.predicates[p]}({family.vocab.entities[h]},X)"
    outcome = call(f"prove {query} --data {FAMILY} --prover run", tmp_path)
    assert outcome.code == 0, outcome.err


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"passes": 2}, "--passes"),
        ({"clone_updates": 5, "negatives": 2}, "--clone-updates, --negatives"),
        ({"reward": "balanced"}, "--reward"),
        ({"beam": 8}, "--beam"),
        ({"end_action": False}, "--end-action"),
    ],
)
def test_what_the_policy_does_not_have_is_refused(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"leave out {named}$"):
        ProverConfig(data="x", policy="answers", **given)
    with pytest.raises(ConfigError, match="--policy answers only"):
        ProverConfig(data="x", constants=5)
    for own in ({"shared": True}, {"linked": False}, {"start": "confidence"}):
        with pytest.raises(ConfigError, match="are for --policy answers"):
            ProverConfig(data="x", **own)  # type: ignore[arg-type]
    for embedded in ({"width": 8}, {"constant_scale": 0.5}, {"width": 8, "constant_scale": 0.5}):
        for policy in ("rules", "answers"):
            with pytest.raises(ConfigError, match=r"(is|are) for --policy neural; leave (it|them)"):
                ProverConfig(data="x", policy=policy, **embedded)  # type: ignore[arg-type]


def test_rules_of_a_file_are_followed_and_the_others_named(tmp_path: Path, family: Graph) -> None:
    config = ProverConfig(
        data=str(FAMILY), rules=FAMILY / "rules.txt", run_dir=tmp_path / "run", **SMALL
    )
    result = train_prover(config)
    horn = parse_rules(FAMILY / "rules.txt", family.vocab)
    assert result.rules + len(result.skipped) == len(horn)


@pytest.mark.parametrize("sharp", [0.1, 3.0, 100.0, 3000.0])
def test_scores_order_answers_however_sure_a_policy_is(
    sharp: float, family: Graph, weighed: Weighed
) -> None:
    """No tie but of equal weights, however far a softmax leaves an answer behind."""
    policy = AnswerPolicy(np.random.default_rng(0).uniform(0.5, 1, weighed.num_rules) * sharp)
    given, predicates = (np.ascontiguousarray(family.test[:30, i]) for i in (0, 1))
    summed = weighed.scorer(policy.array()).scores(given, predicates, "tail")
    scorer = AnswerScorer(weighed, policy)
    scores = scorer.scores(given, predicates, "tail")
    mass = scorer.mass(given, predicates, "tail")
    assert (scores >= 0).all()
    assert np.array_equal(scores > 0, summed > 0)
    assert np.allclose(scores, np.log1p(mass / FLOOR), atol=2e-7)
    assert np.allclose(mass.sum(1), (summed > 0).any(1))
    for row, weights in zip(scores, summed, strict=True):
        # In the order of the sums, whose differences may be less than single precision of scores.
        order = np.argsort(weights, kind="stable")
        assert (np.diff(row[order]) >= 0).all()
        apart = np.diff(weights[order]) > 1e-4 * max(1.0, float(weights.max()))
        assert (np.diff(row[order])[apart] > 0).all()
