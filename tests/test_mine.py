import _thread
import itertools
import math
import threading
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from batchwright.errors import ConfigError, Mismatch
from batchwright.logic.facts import Facts
from batchwright.logic.mine.constants import SEEN, mine_constants
from batchwright.logic.mine.kernels import NO_LIMIT, walk
from batchwright.logic.mine.mining import Steps, chains_of, mine, write_rules
from batchwright.logic.mine.paths import adjacency, count_bodies, find_paths
from batchwright.logic.mine.score import learn_rules
from batchwright.logic.rank.hybrid import Hybrid, choose_beta
from batchwright.logic.rank.ranking import SIDES, all_scores, rank
from batchwright.logic.rank.scorers import RuleScorer, choose_rules
from batchwright.logic.rules import Rules, parse_rules
from batchwright.logic.vocab import Vocab

Fact = tuple[int, int, int]
Edge = tuple[int, int, int]
"""From, step, to; step p + P goes from a tail to its head."""


def vocab_of(entities: int, preds: int) -> Vocab:
    return Vocab(tuple(f"e{i}" for i in range(entities)), tuple(f"p{i}" for i in range(preds)))


def paths(start: int, body: tuple[int, ...], facts: set[Fact], preds: int) -> list[list[Edge]]:
    """Every chain of edges along `body`, none of which goes straight back over the one before."""
    found: list[list[Edge]] = [[]]
    for step in body:
        longer = []
        for path in found:
            at = path[-1][2] if path else start
            for h, p, t in facts:
                edge = (h, step, t) if step < preds else (t, step, h)
                if p != step % preds or edge[0] != at:
                    continue
                # A loop may be gone round again, but no fact is read back and forth.
                same = path and fact_of(edge, preds) == fact_of(path[-1], preds)
                if same and edge[1] != path[-1][1]:
                    continue
                longer.append([*path, edge])
        found = longer
    return found


def fact_of(edge: Edge, preds: int) -> Fact:
    u, step, v = edge
    return (u, step, v) if step < preds else (v, step - preds, u)


def counted(
    facts: set[Fact], n: int, preds: int, length: int
) -> dict[tuple[int, tuple[int, ...]], tuple[int, int]]:
    """Support and pairs of every rule (head, body), by looking at every path."""
    found = {}
    for size in range(1, length + 1):
        for body in itertools.product(range(2 * preds), repeat=size):
            ways = {x: paths(x, body, facts, preds) for x in range(n)}
            for head in range(preds):
                pairs = set()
                for x, all_paths in ways.items():
                    for path in all_paths:
                        own = (x, head, path[-1][2])
                        if own not in {fact_of(edge, preds) for edge in path}:
                            pairs.add((x, path[-1][2]))
                support = sum((x, head, y) in facts for x, y in pairs)
                if support:
                    found[head, body] = support, len(pairs)
    return found


def bodies_of(rules: Rules) -> dict[tuple[int, tuple[int, ...]], int]:
    chains = chains_of(rules)
    found = {}
    for step in range(rules.num_predicates):
        for i in range(chains.ptr[step], chains.ptr[step + 1]):
            body = tuple(chains.bodies[i, : chains.lengths[i]].tolist())
            found[step, body] = int(chains.origin[i]) // 2
    return found


@st.composite
def graphs(draw: st.DrawFn) -> tuple[set[Fact], int, int]:
    n, preds = draw(st.integers(2, 6)), draw(st.integers(1, 2))
    fact = st.tuples(st.integers(0, n - 1), st.integers(0, preds - 1), st.integers(0, n - 1))
    return draw(st.sets(fact, min_size=1, max_size=10)), n, preds


@settings(max_examples=40, deadline=None)
@given(graphs(), st.integers(1, 3))
def test_support_and_pairs_are_those_of_all_paths(
    graph: tuple[set[Fact], int, int], length: int
) -> None:
    facts, n, preds = graph
    if preds == 2 and length == 3:
        length = 2
    vocab = vocab_of(n, preds)

    mined = mine(
        Facts.of(sorted(facts), vocab),
        vocab,
        length=length,
        min_support=1,
        min_confidence=0,
        most=10**6,
    )

    found = {
        rule: (int(mined.support[r]), int(mined.pairs[r]))
        for rule, r in bodies_of(mined.rules).items()
    }
    assert found == counted(facts, n, preds, length)
    for r in range(len(mined.rules)):
        expected = mined.support[r] / (mined.pairs[r] + 5)
        assert mined.rules.weight[r] == pytest.approx(expected)


def test_a_rule_does_not_count_the_fact_it_predicts() -> None:
    # a -p-> b -q-> c -r-> b: the chain p q r from a comes to b, but through p(a, b) itself.
    vocab = vocab_of(3, 3)
    facts = Facts.of([(0, 0, 1), (1, 1, 2), (2, 2, 1)], vocab)

    mined = mine(facts, vocab, length=3, min_support=1, min_confidence=0)

    assert (0, (0, 1, 2)) not in bodies_of(mined.rules)


def test_symmetric_and_inverse_relations_are_found() -> None:
    pairs = [(0, 1), (2, 3), (4, 5), (6, 7)]
    triples = [(a, 0, b) for a, b in pairs] + [(b, 0, a) for a, b in pairs]
    triples += [(a, 1, b) for a, b in pairs] + [(b, 2, a) for a, b in pairs]
    vocab = vocab_of(8, 3)

    found = bodies_of(mine(Facts.of(triples, vocab), vocab, length=1).rules)

    assert {(0, (3,)), (1, (5,)), (2, (4,))} <= found.keys()
    assert (0, (0,)) not in found


def test_only_the_best_rules_of_a_head_are_kept_and_the_rest_is_counted() -> None:
    rng = np.random.default_rng(3)
    vocab = vocab_of(20, 3)
    triples = np.stack([rng.integers(0, m, 120) for m in (20, 3, 20)], 1)
    facts = Facts.of(triples, vocab)
    everything = mine(facts, vocab, min_confidence=0, most=10**6)

    few = mine(facts, vocab, min_confidence=0, most=5)

    assert len(few.rules) == 15
    assert few.dropped == len(everything.rules) - 15
    for p in range(3):
        kept = few.rules.weight[few.rules.head[:, 0] == p].tolist()
        best = sorted(everything.rules.weight[everything.rules.head[:, 0] == p])[-5:]
        assert kept == best[::-1]


def test_mined_rules_come_back_from_their_file(tmp_path: Path) -> None:
    vocab = Vocab.of(["a", "b", "c", "d", "e"], ["likes", "it's->odd"])
    triples = [(0, 0, 1), (1, 0, 2), (0, 1, 2), (2, 0, 3), (1, 1, 3), (3, 0, 4), (2, 1, 4)]
    rules = mine(Facts.of(triples, vocab), vocab, length=3, min_support=1).rules

    write_rules(tmp_path / "rules.txt", rules, vocab, "a note")
    back = parse_rules(tmp_path / "rules.txt", vocab)

    assert back.names == rules.names
    assert np.array_equal(back.body, rules.body)
    assert np.allclose(back.weight, rules.weight)


@pytest.mark.parametrize(
    "wrong",
    [{"length": 0}, {"length": 4}, {"min_support": 0}, {"min_confidence": 2.0}, {"most": 0}],
)
def test_settings_that_cannot_be_are_refused(wrong: dict[str, int]) -> None:
    vocab = vocab_of(2, 1)

    with pytest.raises(ConfigError):
        mine(Facts.of([(0, 0, 1)], vocab), vocab, **wrong)  # type: ignore[arg-type]


def test_rules_that_are_not_chains_are_named() -> None:
    vocab = vocab_of(3, 2)
    rules = parse_rules(
        """chain:0.5:p0(Z,X), p1(Z,Y) -> p0(X,Y)
        swapped:0.5:p1(Z,Y), p0(X,Z) -> p0(X,Y)
        constant:0.5:p0(X,e1) -> p1(X,e1)
        loop:0.5:p0(X,X) -> p1(X,X)
        branch:0.5:p0(X,Y), p0(X,Z) -> p1(X,Y)
        long:0.5:p0(X,A), p0(A,B), p0(B,C), p0(C,Y) -> p0(X,Y)""",
        vocab,
    )

    chains = chains_of(rules)

    assert chains.skipped == ("constant", "loop", "branch", "long")
    assert set(bodies_of(rules)) == {(0, (2, 1)), (0, (0, 1))}


@settings(max_examples=60, deadline=None)
@given(graphs(), st.data())
def test_walks_end_where_paths_end_with_the_probability_of_their_steps(
    graph: tuple[set[Fact], int, int], data: st.DataObject
) -> None:
    facts, n, preds = graph
    vocab = vocab_of(n, preds)
    body = tuple(data.draw(st.lists(st.integers(0, 2 * preds - 1), min_size=1, max_size=3)))
    hidden = data.draw(st.sampled_from([None, *sorted(facts)]))
    lost = data.draw(st.booleans())
    x = data.draw(st.integers(0, n - 1)) if hidden is None else hidden[0]
    steps = Steps.of(Facts.of(sorted(facts), vocab))
    padded = np.full(3, -1, np.int32)
    padded[: len(body)] = body
    share, out = np.zeros(n), np.empty(n, np.int32)
    stamp = np.full(n, -1, np.int64)

    count = walk(
        x, padded, len(body), steps.ptr, steps.ends, n, preds,
        -1 if hidden is None else hidden[1], -1 if hidden is None else hidden[2],
        lost, stamp, 0, share, out, NO_LIMIT,
    )  # fmt: skip

    expected: dict[int, float] = {}

    def follow(at: int, left: tuple[int, ...], reached: float, before: list[Edge]) -> None:
        if not left:
            expected[at] = expected.get(at, 0.0) + reached
            return
        edges = [
            path[-1]
            for path in paths(at, left[:1], facts - {hidden}, preds)  # type: ignore[arg-type]
        ]
        nexts = [
            edge
            for edge in edges
            if not (
                before
                and (lost or edge[1] != before[-1][1])
                and fact_of(edge, preds) == fact_of(before[-1], preds)
            )
        ]
        for edge in nexts:
            choices = len(edges) if lost else len(nexts)
            follow(edge[2], left[1:], reached / choices, [*before, edge])

    follow(x, body, 1.0, [])
    assert sorted(out[:count].tolist()) == sorted(expected)
    for end, probability in expected.items():
        assert share[end] == pytest.approx(probability)


def family() -> tuple[Facts, Rules, Vocab]:
    vocab = Vocab.of(["ann", "bob", "cat", "dan", "eve"], ["child", "grandchild", "sibling"])
    text = "\n".join(
        [
            "g:0.9:child(X,Z), child(Z,Y) -> grandchild(X,Y)",
            "s:0.5:child(X,Z), child(Y,Z) -> sibling(X,Y)",
            "w:0.2:sibling(X,Z), child(Z,W), child(W,Y) -> grandchild(X,Y)",
        ]
    )
    ids = vocab.entity_ids
    triples = [("bob", 0, "ann"), ("cat", 0, "ann"), ("dan", 0, "bob"), ("bob", 2, "cat")]
    triples += [("eve", 0, "bob"), ("dan", 2, "eve")]
    facts = Facts.of([(ids[h], p, ids[t]) for h, p, t in triples], vocab)
    return facts, parse_rules(text, vocab), vocab


def test_rules_answer_from_both_ends() -> None:
    facts, rules, vocab = family()
    scorer = RuleScorer(facts, rules)
    ids = vocab.entity_ids

    def asked(name: str, side: str) -> dict[str, float]:
        given = np.array([ids[name]], np.int32)
        scores = scorer.scores(given, np.array([1], np.int32), side)[0]  # type: ignore[arg-type]
        return {vocab.entities[e]: float(s) for e, s in enumerate(scores) if s}

    # dan: by g over bob; by w over the sibling eve and her parent bob.
    both = -math.log(1 - 0.9) - math.log(1 - 0.2)
    assert asked("dan", "tail") == {"ann": pytest.approx(both)}
    assert asked("ann", "head") == {
        "dan": pytest.approx(both),
        "eve": pytest.approx(-math.log(1 - 0.9)),
    }


def test_power_lies_between_the_sum_and_the_greatest() -> None:
    facts, rules, vocab = family()
    dan, grand = np.array([vocab.entity("dan")], np.int32), np.array([1], np.int32)
    scores = [
        float(RuleScorer(facts, rules, power).scores(dan, grand, "tail").max())
        for power in (1.0, 2.0, 8.0, math.inf)
    ]

    strong, weak = -math.log(1 - 0.9), -math.log(1 - 0.2)
    assert scores[0] == pytest.approx(strong + weak)
    assert scores[1] == pytest.approx(math.hypot(strong, weak))
    # As a sum of 64 bits, rounded once: of the 8th powers the weak one is lost in that.
    eighth = (strong**8 + weak**8) ** (1 / 8)
    assert scores[2:] == [float(np.float32(eighth)), float(np.float32(strong))]
    assert scores == sorted(scores, reverse=True)


def test_many_certain_rules_do_not_all_come_to_one() -> None:
    # Noisy-or in 32 bits would give both entities exactly 1.
    vocab = vocab_of(3, 9)
    text = "\n".join(f"r{p}:0.99:p{p}(X,Y) -> p0(X,Y)" for p in range(1, 9))
    triples = [(0, p, 1) for p in range(1, 9)] + [(0, p, 2) for p in range(1, 8)]

    scores = RuleScorer(Facts.of(triples, vocab), parse_rules(text, vocab)).scores(
        np.array([0], np.int32), np.array([0], np.int32), "tail"
    )[0]

    assert scores[1] > scores[2] > 0


def test_a_share_divides_the_evidence_among_the_ends() -> None:
    # Three neighbours, two of them in one region: the region of most neighbours wins.
    vocab = Vocab.of(["x", "n1", "n2", "n3", "east", "west"], ["in", "near"])
    ids = vocab.entity_ids
    triples = [(ids["x"], 1, ids[n]) for n in ("n1", "n2", "n3")]
    triples += [(ids["n1"], 0, ids["east"])]
    triples += [(ids["n2"], 0, ids["west"]), (ids["n3"], 0, ids["west"])]
    facts = Facts.of(triples, vocab)
    rules = parse_rules("r:0.5:near(X,Z), in(Z,Y) -> in(X,Y)", vocab)
    x, located = np.array([ids["x"]], np.int32), np.array([0], np.int32)

    whole = RuleScorer(facts, rules).scores(x, located, "tail")[0]
    divided = RuleScorer(facts, rules, share=1.0).scores(x, located, "tail")[0]

    assert whole[ids["west"]] == whole[ids["east"]]
    assert divided[ids["west"]] == pytest.approx(2 * divided[ids["east"]])
    assert divided.sum() == pytest.approx(-math.log(0.5))


def test_rules_of_another_graph_and_weights_that_are_not_probabilities_are_refused() -> None:
    facts, rules, vocab = family()
    other = Vocab.of(["x"], ["child", "grandchild", "sibling"])

    with pytest.raises(Mismatch, match="one vocabulary"):
        RuleScorer(Facts.of([(0, 0, 0)], other), rules)
    with pytest.raises(ConfigError, match=r"probability from 0 to 1, got 1\.5"):
        RuleScorer(facts, parse_rules("r:1.5:child(X,Y) -> sibling(X,Y)", vocab))
    with pytest.raises(ConfigError, match="power"):
        RuleScorer(facts, rules, power=0.5)


def one_question_loss(
    evidence: NDArray[np.float64], question: Fact, facts: set[Fact], rules: Rules, n: int
) -> float:
    """The loss that learning follows, written out for one question from its head."""
    preds = rules.num_predicates
    x, p, y = question
    score = np.zeros(n)
    chains = chains_of(rules)
    for i in range(chains.ptr[p], chains.ptr[p + 1]):
        body = tuple(chains.bodies[i, : chains.lengths[i]].tolist())
        for end in {path[-1][2] for path in paths(x, body, facts - {question}, preds)}:
            score[end] += evidence[i]
    others = [e for e in range(n) if e == y or (x, p, e) not in facts]
    return float(np.log(np.exp(score[others]).sum()) - score[y])


def test_learning_goes_down_the_slope_of_the_written_out_loss() -> None:
    facts = {(0, 0, 1), (1, 0, 2), (2, 0, 3), (0, 1, 2), (1, 1, 3), (0, 0, 4), (4, 0, 3), (4, 1, 0)}
    vocab = vocab_of(5, 2)
    indexed = Facts.of(sorted(facts), vocab)
    rules = parse_rules(
        """a:0.6:p0(X,Z), p0(Z,Y) -> p1(X,Y)
        b:0.3:p0(X,Y) -> p1(X,Y)
        c:0.2:p1(X,Z), p0(Z,W), p0(W,Y) -> p1(X,Y)""",
        vocab,
    )
    chains = chains_of(rules)
    question = (0, 1, 2)
    before = -np.log1p(-chains.weights)
    evidence, squares = before.copy(), np.full(len(before), 1e-12)

    # With next to nothing in the squares, a step of Adagrad is the rate times the slope's sign.
    loss, count = learn_rules(
        np.array([question], np.int64), RuleScorer(indexed, rules)._program, 5, 2, NO_LIMIT, 0.0,
        0.01, evidence, squares,
    )  # fmt: skip

    assert count == 1
    assert loss == pytest.approx(one_question_loss(before, question, facts, rules, 5))
    for i in range(len(before)):
        up, down = before.copy(), before.copy()
        up[i] += 1e-5
        down[i] -= 1e-5
        slope = one_question_loss(up, question, facts, rules, 5) - one_question_loss(
            down, question, facts, rules, 5
        )
        slope /= 2e-5
        assert math.sqrt(squares[i] - 1e-12) == pytest.approx(abs(slope), abs=1e-6)
        if abs(slope) > 1e-6:
            assert np.sign(before[i] - evidence[i]) == np.sign(slope)


def test_learned_evidence_ranks_true_facts_higher_and_repeats_itself() -> None:
    rng = np.random.default_rng(5)
    vocab = vocab_of(30, 3)
    edges = {(int(a), 0, int(b)) for a, b in rng.integers(0, 30, (60, 2))}
    edges |= {(int(a), 2, int(b)) for a, b in rng.integers(0, 30, (60, 2))}
    joined = {(a, 1, d) for a, p, b in edges for c, q, d in edges if b == c and p == 0 and q == 2}
    train = np.array(sorted(edges | joined), np.int32)
    facts = Facts.of(train, vocab)
    rules = mine(facts, vocab, min_confidence=0).rules

    runs = []
    for _ in range(2):
        scorer = RuleScorer(facts, rules)
        losses = [scorer.learn(train, seed=1) for _ in range(4)]
        runs.append((losses, scorer.evidence.tolist()))

    assert runs[0] == runs[1]
    assert runs[0][0][-1] < 0.8 * runs[0][0][0]


class Fixed:
    """Scores of p(row, column), the same for every predicate."""

    def __init__(self, scores: NDArray[np.float32]) -> None:
        self.table = scores

    def scores(
        self, given: NDArray[np.int32], predicates: NDArray[np.int32], side: str
    ) -> NDArray[np.float32]:
        return (self.table if side == "tail" else self.table.T)[given].copy()


def test_a_hybrid_of_weight_zero_is_the_embedding_bit_for_bit() -> None:
    rng = np.random.default_rng(0)
    kge = Fixed(rng.standard_normal((6, 6)).astype(np.float32))
    proofs = Fixed(np.full((6, 6), np.inf, np.float32))
    given, preds = np.arange(6, dtype=np.int32), np.array([0, 1] * 3, np.int32)

    for beta in (0.0, np.zeros((2, 2))):
        found = Hybrid(kge, proofs, beta).scores(given, preds, "tail")
        assert found.tobytes() == kge.table.tobytes()

    by_predicate = Hybrid(kge, proofs, np.array([[0.0, 1.0], [1.0, 0.0]]))
    tails = by_predicate.scores(given, preds, "tail")
    assert tails[::2].tobytes() == kge.table[::2].tobytes()
    assert np.isinf(tails[1::2]).all()
    heads = by_predicate.scores(given, preds, "head")
    assert heads[1::2].tobytes() == kge.table.T[1::2].tobytes()


def test_the_weight_of_proofs_follows_who_is_right_on_valid() -> None:
    n = 40
    vocab = vocab_of(n, 1)
    valid = np.array([[e, 0, (e + 1) % n] for e in range(n)], np.int32)
    known = Facts.of(valid, vocab)
    right = np.zeros((n, n), np.float32)
    right[valid[:, 0], valid[:, 2]] = 1.0
    noise = np.random.default_rng(0).random((n, n)).astype(np.float32)

    assert choose_beta(Fixed(noise), Fixed(right), valid, known).beta >= 1
    assert choose_beta(Fixed(10 * right), Fixed(noise), valid, known).beta == 0


def test_the_aggregation_of_rules_is_the_best_of_all_that_were_tried() -> None:
    rng = np.random.default_rng(2)
    vocab = vocab_of(25, 2)
    triples = np.stack([rng.integers(0, m, 150) for m in (25, 2, 25)], 1).astype(np.int32)
    train, valid = triples[:120], triples[120:]
    facts = Facts.of(train, vocab)
    rules = mine(facts, vocab, min_confidence=0).rules

    scorer, tried = choose_rules(facts, rules, train, valid, Facts.of(triples, vocab), epochs=2)

    best = max(tried, key=lambda name: tried[name])
    assert len(tried) == 13
    way = f"power {scorer.power:g}, share {scorer.share:g}, constants {scorer.constants:g}"
    assert best == (f"learned {scorer.learned_epochs}, " if scorer.learned_epochs else "") + way


def edges_of(facts: set[Fact], preds: int) -> dict[int, set[tuple[int, int]]]:
    """The edges of every entity as (step, end)."""
    found: dict[int, set[tuple[int, int]]] = {}
    for h, p, t in facts:
        found.setdefault(h, set()).add((p, t))
        found.setdefault(t, set()).add((p + preds, h))
    return found


def read_constant(rules: Rules, r: int) -> tuple[int, int, tuple[int, int | None] | None]:
    """A rule with a constant as (step of the head, constant, edge of its body)."""
    n, preds = rules.num_entities, rules.num_predicates
    (p, a, b), body = rules.clause(r)
    x, step, constant = (a, p, b) if a >= n else (b, p + preds, a)
    if not body:
        return step, constant, None
    q, u, v = body[0]
    of, end = (q, v) if u == x else (q + preds, u)
    return step, constant, (of, end if end < n else None)


@settings(max_examples=40, deadline=None)
@given(graphs())
def test_rules_with_constants_hold_as_often_as_counted(graph: tuple[set[Fact], int, int]) -> None:
    facts, n, preds = graph
    vocab = vocab_of(n, preds)
    rules = mine_constants(
        sorted(facts), vocab, min_support=1, min_confidence=0.0, most=10**6, prior=2.0
    )
    edges = edges_of(facts, preds)
    seen = set()
    for r in range(len(rules)):
        step, constant, body = read_constant(rules, r)
        seen.add((step, constant, body))
        right = {x for x in edges if (step, constant) in edges[x]}
        if body is None:
            has = {x for x in edges if any(s == step for s, _ in edges[x])}
            support = right
        else:
            of, end = body
            has = {x for x in edges if any(s == of and end in (None, e) for s, e in edges[x])}
            turned = (step + preds) % (2 * preds)
            # The fact of the head, which of a loop is an edge back as well, is no body of it.
            own = {x: {(step, constant), (turned, x)} for x in right}
            support = {
                x
                for x in right
                if any(
                    s == of
                    and end in (None, e)
                    and (s, e) not in (own[x] if x == constant else {(step, constant)})
                    for s, e in edges[x]
                )
            }
        assert rules.weight[r] == pytest.approx(len(support) / (len(has) + 2.0))
    # Of every answer there is the rule without a body, and the ten best with one.
    for x in edges:
        assert {(step, end, None) for step, end in edges[x]} <= seen


@settings(max_examples=30, deadline=None)
@given(graphs())
def test_of_an_entity_that_nobody_names_rules_say_what_they_say_of_one_without_facts(
    graph: tuple[set[Fact], int, int],
) -> None:
    facts, n, preds = graph
    vocab = vocab_of(n + 1, preds)  # the last one has no fact
    indexed = Facts.of(sorted(facts), vocab)
    rules = mine(indexed, vocab, length=2, min_support=1, min_confidence=0, most=4).rules.plus(
        mine_constants(indexed, vocab, min_support=1, min_confidence=0.0, most=20)
    )
    scorer = RuleScorer(indexed, rules)
    predicates = np.arange(preds, dtype=np.int32)
    lonely = np.full(preds, n, np.int32)
    for side in SIDES:
        said = scorer.unseen(predicates, side)
        known = scorer.scores(lonely, predicates, side)
        assert np.allclose(said[:, :n], known[:, :n], atol=1e-6)
        assert np.array_equal(Hybrid(scorer, scorer, 1.0).unseen(predicates, side), said)
        # Asked of an entity beyond the vocabulary; those that are beyond it score lowest.
        found = all_scores(scorer, np.full(preds, n + 2, np.int32), predicates, side, n + 3)
        assert np.array_equal(found[:, : n + 1], said)
        assert (found[:, n + 1 :] == said.min(axis=1, keepdims=True)).all()


@settings(max_examples=60, deadline=None)
@given(graphs(), st.data())
def test_scores_are_those_of_rules_written_out(
    graph: tuple[set[Fact], int, int], data: st.DataObject
) -> None:
    """Chains and rules with constants, every way to join them, from both ends."""
    facts, n, preds = graph
    vocab = vocab_of(n, preds)
    indexed = Facts.of(sorted(facts), vocab)
    rules = mine(indexed, vocab, length=2, min_support=1, min_confidence=0, most=4).rules.plus(
        mine_constants(indexed, vocab, min_support=1, min_confidence=0.0, most=6)
    )
    power = data.draw(st.sampled_from([1.0, 2.0, math.inf]))
    scale = data.draw(st.sampled_from([1.0, 0.1, 0.0]))
    step = data.draw(st.integers(0, 2 * preds - 1))
    x = data.draw(st.integers(0, n - 1))
    edges = edges_of(facts, preds)
    loops = any(h == t for h, p, t in facts if p == step % preds)
    evidence = -np.log1p(-np.minimum(rules.weight, 1 - 1e-4))
    parts: dict[int, list[float]] = {}
    chains = chains_of(rules)
    for i in range(chains.ptr[step], chains.ptr[step + 1]):
        body = tuple(chains.bodies[i, : chains.lengths[i]].tolist())
        for end in {path[-1][2] for path in paths(x, body, facts, preds)}:
            parts.setdefault(end, []).append(evidence[chains.origin[i] // 2])
    for r in range(len(rules)):
        if (rules.head[r, 1:] < n).sum() != 1:
            continue
        head, constant, body_edge = read_constant(rules, r)
        turned = head - preds if head >= preds else head + preds

        def has(e: int, edge: tuple[int, int | None]) -> bool:
            return any(s == edge[0] and edge[1] in (None, t) for s, t in edges.get(e, ()))

        if head == step and (body_edge is None or has(x, body_edge)):
            parts.setdefault(constant, []).append(scale * evidence[r])
        if turned == step and constant == x and body_edge and body_edge[1] is not None:
            for e in range(n):
                if has(e, body_edge):
                    parts.setdefault(e, []).append(scale * evidence[r])
    expected = np.zeros(n)
    for e, each in parts.items():
        if e != x or loops:
            norm = max(each) if math.isinf(power) else sum(part**power for part in each)
            expected[e] = norm if math.isinf(power) else norm ** (1 / power)

    side = "tail" if step < preds else "head"
    asked = np.array([x], np.int32), np.array([step % preds], np.int32)
    scorer = RuleScorer(indexed, rules, power, constants=scale)

    assert scorer.scores(*asked, side)[0] == pytest.approx(expected, abs=1e-6)  # type: ignore[arg-type]
    assert not scorer.skipped


def test_a_hub_costs_no_more_than_its_share_and_what_is_left_out_is_counted() -> None:
    """A relation that half of all entities have with one: no body through it is followed whole."""
    entities, hub = 60_000, 0
    vocab = vocab_of(entities, 3)
    rng = np.random.default_rng(0)
    members = np.arange(1, 30_000)
    triples = [np.stack([members, np.zeros_like(members), np.full_like(members, hub)], 1)]
    pairs = rng.integers(1, entities, (5000, 2))
    triples += [np.stack([pairs[:, 0], np.full(5000, p), pairs[:, 1]], 1) for p in (1, 2)]
    train = np.concatenate(triples).astype(np.int32)

    mined = mine(train, vocab)
    rules = parse_rules("same:0.5:p0(X,Z), p0(Y,Z) -> p1(X,Y)\nalike:0.5:p2(X,Y) -> p1(X,Y)", vocab)
    scorer = RuleScorer(Facts.of(train, vocab), rules)
    given, asked = np.array([5], np.int32), np.array([1], np.int32)

    assert mined.sampled > 0
    assert mined.in_time
    found = bodies_of(mined.rules)
    assert {(1, (2,)), (2, (1,))} <= set(found)
    assert float(mined.rules.weight[found[1, (2,)]]) > 0.99
    scorer.scores(given, asked, "tail")
    assert scorer.left_out == 1


def test_a_graph_too_large_for_an_index_is_mined() -> None:
    vocab = Vocab(tuple(map(str, range(2_500_000))), tuple(f"p{i}" for i in range(535)))
    heads = np.arange(0, 4000, 2, dtype=np.int32)
    parts = [np.stack([heads, np.full_like(heads, p), heads + 1], 1) for p in (3, 7)]
    train = np.concatenate(parts)
    train[:, [0, 2]] *= 600

    mined = mine(train, vocab, seconds=20)

    assert (7, (3,)) in bodies_of(mined.rules)


def test_mining_ends_in_time_with_what_it_has_and_says_so() -> None:
    rng = np.random.default_rng(1)
    vocab = vocab_of(200, 12)
    train = np.stack([rng.integers(0, m, 4000) for m in (200, 12, 200)], 1).astype(np.int32)

    short = mine(train, vocab, seconds=1e-9, min_confidence=0)

    assert not short.in_time
    assert short.bodies > 0
    assert short.left > 0
    assert len(short.rules) > 0


def test_ctrl_c_stops_mining_as_everywhere_else() -> None:
    rng = np.random.default_rng(1)
    vocab = vocab_of(3000, 40)
    train = np.stack([rng.integers(0, m, 60_000) for m in (3000, 40, 3000)], 1).astype(np.int32)
    mine(train[:50], vocab)
    for delay in (0.3, 0.5, 0.7, 0.9):
        timer = threading.Timer(delay, _thread.interrupt_main)
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            mine(train, vocab)
        timer.join()


def test_ctrl_c_is_heard_before_the_second_next_part_of_the_work() -> None:
    rng = np.random.default_rng(1)
    vocab = vocab_of(3000, 40)
    train = np.stack([rng.integers(0, m, 60_000) for m in (3000, 40, 3000)], 1).astype(np.int32)
    parts = later = 0
    reached = threading.Event()
    signalled = threading.Event()

    def progress(done: int, total: int) -> None:
        nonlocal parts, later
        parts += 1
        later += signalled.is_set()
        if parts == 3:
            reached.set()

    def interrupt() -> None:
        reached.wait()
        _thread.interrupt_main()
        signalled.set()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        mine(train, vocab, progress=progress)
    thread.join()
    assert parts >= 3
    assert later <= 1


def test_no_part_of_mining_is_longer_than_its_share_of_work_and_one_body() -> None:
    """Between two parts Ctrl-C is heard: they are bounded by edges, whatever the graph."""
    rng = np.random.default_rng(1)
    n, preds, work = 500, 5, 2000
    triples = np.stack([rng.integers(0, m, 20_000) for m in (n, preds, n)], 1).astype(np.int32)
    index = adjacency(triples, n, preds)
    bodies = np.array([(s, t, -1) for s in range(10) for t in range(10)], np.int32)

    def counted(begin: int, limit: int) -> tuple[list[NDArray[np.int64]], int]:
        *found, now, _, end = count_bodies(
            bodies, np.full(100, 2, np.int32), begin, index, n, preds, 10_000, limit, np.uint64(7),
            2, 0.0, 5.0, np.full(n, -1, np.int64), np.zeros(n, np.uint8), np.empty(n, np.int32), 0,
        )  # fmt: skip
        assert now > 0
        return list(found), end

    whole, end = counted(0, 2**40)
    assert end == 100
    parts, at = [], 0
    for _ in range(100):
        found, after = counted(at, work)
        assert after == at + 1
        parts.append(found)
        at = after
    assert all(
        (one == np.concatenate(each)).all()
        for one, each in zip(whole, zip(*parts, strict=True), strict=True)
    )
    out = np.empty(10**6, np.int64)
    facts = triples[:100]
    count, done, _ = find_paths(facts, index, preds, 3, 50, np.uint64(7), 0, out, 0)
    assert done == 100
    again, piece = np.empty(10**6, np.int64), 0
    for first in range(0, 100, 7):
        piece, done, _ = find_paths(
            facts[first : first + 7], index, preds, 3, 50, np.uint64(7), first, again, piece
        )
    assert piece == count
    assert (again[:count] == out[:count]).all()


def test_rules_with_constants_of_many_answers_are_counted_part_by_part_and_each_once() -> None:
    rng = np.random.default_rng(1)
    n, preds = 300, 2
    triples = np.stack([rng.integers(0, m, 30_000) for m in (n, preds, n)], 1)
    facts = {(h, p, t) for h, p, t in triples.tolist()}

    rules = mine_constants(triples, vocab_of(n, preds), min_confidence=0.9, most=10**6)

    bare = [read_constant(rules, r)[:2] for r in range(len(rules)) if not rules.body_len[r]]
    counts = Counter(edge for of_one in edges_of(facts, preds).values() for edge in of_one)
    assert sorted(bare) == sorted(edge for edge, count in counts.items() if count > 1)


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.sampled_from((0.001, 0.1)), st.sampled_from((0.25, 8.0)))
def test_with_a_floor_evidence_weighs_by_its_ratio(seed: int, floor: float, scale: float) -> None:
    draw = np.random.default_rng(seed)
    kge = Fixed(draw.standard_normal((6, 6)).astype(np.float32))
    proofs = Fixed(draw.standard_normal((6, 6)).astype(np.float32))
    asked = np.arange(6, dtype=np.int32), np.zeros(6, np.int32), "tail"

    found = Hybrid(kge, proofs, 2.0, floor).scores(*asked)

    evidence = np.maximum(proofs.table, 0).astype(np.float64)
    assert np.allclose(found, kge.table + 2 * np.log(evidence + floor), atol=1e-4)
    scaled = Hybrid(kge, Fixed(scale * proofs.table), 2.0, scale * floor).scores(*asked)
    assert np.allclose(scaled - found, 2 * math.log(scale), atol=1e-4)
    plain = Hybrid(kge, proofs, 0.0, floor).scores(*asked)
    assert plain.tobytes() == kge.table.tobytes()


def test_a_floor_is_taken_where_the_logarithm_of_the_evidence_ranks_better() -> None:
    draw = np.random.default_rng(0)
    n = 300
    valid = np.array([[e, 0, draw.integers(n)] for e in range(n)], np.int32)
    known = Facts.of(valid, vocab_of(n, 1))
    kge = draw.standard_normal((n, n)).astype(np.float32)
    # All of a query's evidence is large or small; what is right has three times that of the rest.
    size = np.exp(2 * draw.standard_normal((n, 1)) - 3)
    proofs = size * np.exp(draw.standard_normal((n, n)) / 2)
    proofs[valid[:, 0], valid[:, 2]] *= 3
    kge[valid[:, 0], valid[:, 2]] += 1

    choice = choose_beta(Fixed(kge), Fixed(proofs.astype(np.float32)), valid, known)
    logs = Fixed(np.log(proofs).astype(np.float32))

    assert choice.floor is not None
    assert choose_beta(Fixed(kge), logs, valid, known).floor is None
    with pytest.raises(ConfigError, match="floor must be above 0"):
        Hybrid(Fixed(kge), logs, 1.0, 0.0)


@settings(max_examples=25)
@given(graphs(), st.sampled_from((0.0, 1.0)))
def test_linked_entities_lose_as_much_as_is_said(
    graph: tuple[set[Fact], int, int], beta: float
) -> None:
    facts, n, preds = graph
    draw = np.random.default_rng(len(facts))
    kge, proofs = (Fixed(draw.standard_normal((n, n)).astype(np.float32)) for _ in range(2))
    known = Facts.of(np.array(sorted(facts), np.int32), vocab_of(n, preds))
    given, predicates = np.arange(n, dtype=np.int32), np.zeros(n, np.int32)

    for side in ("tail", "head"):
        plain = Hybrid(kge, proofs, beta).scores(given, predicates, side)
        less = Hybrid(kge, proofs, beta, None, 4.0, known).scores(given, predicates, side)
        for e in range(n):
            for other in range(n):
                linked = any({h, t} == {e, other} for h, _, t in facts)
                assert plain[e, other] - less[e, other] == pytest.approx(4 * linked, abs=1e-4)
    with pytest.raises(ConfigError, match="needs the facts"):
        Hybrid(kge, proofs, beta, None, 4.0)


def test_links_count_where_valid_says_so() -> None:
    draw = np.random.default_rng(0)
    n = 80
    pairs = draw.permutation(n * n)
    train, valid = (
        np.stack([part // n, np.zeros_like(part), part % n], 1).astype(np.int32)
        for part in (pairs[:1200], pairs[1200:1400])
    )
    joined = {frozenset((h, t)) for h, _, t in train.tolist()}
    apart = np.array([x for x in valid.tolist() if frozenset((x[0], x[2])) not in joined], np.int32)
    inverse = train[:200, ::-1].copy()
    noise = [Fixed(draw.random((n, n)).astype(np.float32)) for _ in range(2)]
    facts = Facts.of(train, vocab_of(n, 1))

    def linked(asked: NDArray[np.int32], facts: Facts | None) -> float:
        known = Facts.of(asked, vocab_of(n, 1))
        return choose_beta(*noise, asked, known, facts=facts).linked

    assert linked(apart, facts) > 0
    assert linked(inverse, facts) == 0
    assert linked(apart, None) == 0


@settings(max_examples=25)
@given(st.integers(0, 10_000))
def test_the_weight_of_proofs_is_as_good_as_the_best_but_for_chance(seed: int) -> None:
    draw = np.random.default_rng(seed)
    n, betas = 60, (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)
    vocab = vocab_of(n, 1)
    valid = np.array([[e, 0, draw.integers(n)] for e in range(n)], np.int32)
    known = Facts.of(valid, vocab)
    kge, proofs = (draw.random((n, n)).astype(np.float32) for _ in range(2))
    for table in (kge, proofs):
        table[valid[:, 0], valid[:, 2]] += 0.3

    choice = choose_beta(Fixed(kge), Fixed(proofs), valid, known, betas)
    gains = {
        beta: 1 / rank(Hybrid(Fixed(kge), Fixed(proofs), beta, choice.floor), valid, known).middle
        for beta in betas
    }

    best = max(gains.values(), key=lambda gain: gain.mean())
    behind = best - gains[choice.beta]
    assert behind.mean() <= behind.std() / len(behind) ** 0.5 + 1e-12


@pytest.mark.parametrize("seed", range(3))
def test_rules_of_answers_with_very_many_entities_are_counted_and_none_that_is_sure_is_missed(
    seed: int,
) -> None:
    """More entities than are looked at, and many edges that one of those has by chance."""
    rng = np.random.default_rng(seed)
    people, kinds, lands = 2000, 6, 2
    n = people + kinds + lands
    kind = rng.integers(0, kinds, people)
    known = np.minimum(people - 1, (rng.pareto(1.1, 3 * people) * 3).astype(np.int64))
    everybody = np.arange(people)
    triples = np.concatenate(
        [
            np.stack([everybody, np.full(people, 0), people + kind], 1),
            np.stack([everybody, np.full(people, 1), people + kinds + kind % lands], 1),
            np.stack([rng.integers(0, people, 3 * people), np.full(3 * people, 2), known], 1),
        ]
    )
    facts = {(h, p, t) for h, p, t in triples.tolist()}
    with_edge: dict[tuple[int, int | None], set[int]] = defaultdict(set)
    for x, of_x in edges_of(facts, 3).items():
        for step, end in of_x:
            with_edge[step, end].add(x)
            with_edge[step, None].add(x)
    rules = mine_constants(triples, vocab_of(n, 3), most=500)
    citizen, sure, off = 1, set(), []
    for r in range(len(rules)):
        step, constant, body = read_constant(rules, r)
        if body is None:
            continue
        of, end = body
        has = with_edge[of, end]
        right = len(has & with_edge[step, constant])
        if len(has) <= SEEN:
            assert rules.weight[r] == pytest.approx(right / (len(has) + 5))
        else:
            off.append(float(rules.weight[r]) - right / (len(has) + 5))
        if step == citizen and of == 0 and end is not None:
            assert right == len(has)
            assert rules.weight[r] == pytest.approx(right / (right + 5))
            sure.add((constant, end))
    assert sure == {(people + kinds + k % lands, people + k) for k in range(kinds)}
    assert np.abs(off).max() < 0.15
