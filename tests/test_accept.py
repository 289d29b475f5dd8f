"""What an embedding accepts: which atoms, from which probability, and what rules make of them."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from batchwright.errors import BadProgram, ConfigError
from batchwright.logic.loaders import Graph, load_graph
from batchwright.logic.prove.proofs import prove
from batchwright.logic.rank.accept import LEAST, accept, asks_kge
from batchwright.logic.rank.ranking import Side
from batchwright.logic.rank.scorers import RuleScorer
from batchwright.logic.rules import parse_rules

Ints = NDArray[np.int32]
N, P = 5, 2


class Table:
    """Probabilities of p(x, y) as they are written, [P, N, N]."""

    def __init__(self, probabilities: NDArray[np.float64]) -> None:
        self.logs = np.log(np.maximum(probabilities, 1e-30)).astype(np.float32)

    def scores(self, given: Ints, predicates: Ints, side: Side) -> NDArray[np.float32]:
        assert side == "tail"
        return self.logs[predicates, given].copy()


def graph_of(train: list[tuple[int, int, int]], valid: list[tuple[int, int, int]]) -> Graph:
    from batchwright.logic.vocab import Vocab

    vocab = Vocab.of([f"e{i}" for i in range(N)], [f"p{i}" for i in range(P)])
    parts = [np.array(part, np.int32).reshape(-1, 3) for part in (train, valid, [])]
    return Graph("small", vocab, *parts, np.full(P, -1, np.int32))


triples = st.lists(
    st.tuples(st.integers(0, N - 1), st.integers(0, P - 1), st.integers(0, N - 1)),
    min_size=1,
    max_size=8,
    unique=True,
)


@settings(max_examples=60, deadline=None)
@given(triples, triples, st.integers(0, 2**32 - 1), st.sampled_from([0.05, 0.25, 1.0]))
def test_the_threshold_of_the_best_f1_on_valid_is_taken_and_all_above_it_accepted(
    train: list[tuple[int, int, int]],
    valid: list[tuple[int, int, int]],
    seed: int,
    sharpness: float,
) -> None:
    graph = graph_of(train, valid)
    probabilities = np.random.default_rng(seed).dirichlet(np.full(N, sharpness), (P, N))
    table = Table(probabilities)
    found = accept(graph, table, np.array([1], np.int32))

    def f1(least: float) -> float:
        asked = {(h, p) for h, p, _ in valid}
        said = {
            (h, p, y)
            for h, p in asked
            for y in range(N)
            if table.logs[p, h, y] >= np.log(least) and (h, p, y) not in train
        }
        true = set(valid) - set(train)
        return 2 * len(said & true) / (len(said) + len(valid))

    assert found.f1 == pytest.approx(max(f1(least) for least in LEAST))
    assert f1(found.least) == pytest.approx(found.f1)
    new = {tuple(row) for row in found.graph.train[len(train) :].tolist()}
    assert new == {
        (x, P + 1, y)
        for x in range(N)
        for y in range(N)
        if table.logs[1, x, y] >= np.log(found.least)
    }
    assert found.graph.train[: len(train)].tolist() == graph.train.tolist()
    assert found.atoms == len(new)


def test_rules_prove_and_score_by_what_is_accepted(tmp_path: Path) -> None:
    graph = graph_of([(0, 0, 1)], [(0, 1, 2)])
    probabilities = np.zeros((P, N, N))
    probabilities[1, 1, 2], probabilities[1, 1, 3] = 0.9, 0.05
    text = "by:0.8:p0(X,Z), p1_kge(Z,Y) -> p1(X,Y)"
    rules = parse_rules(text, graph.vocab.with_kge())
    wider = accept(graph, Table(probabilities), asks_kge(rules), 0.5).graph

    (proof,), complete = prove((0, 1, -1), wider.facts, rules)
    assert (proof.answer, complete) == (2, True)
    lines = list(proof.tree(rules).lines(rules, wider.vocab))
    assert lines[1:] == ["├─ p0(e0, e1)  [fact]", "└─ p1_kge(e1, e2)  [embedding]"]
    asked = np.array([0], np.int32), np.array([1], np.int32)
    scores = RuleScorer(wider.facts, rules).scores(*asked, "tail")[0]
    assert np.flatnonzero(scores).tolist() == [2]
    # What the embedding said did not become a fact.
    assert not wider.facts.contains(1, 1, 2)
    assert prove((1, 1, -1), wider.facts, rules).found == []


def test_a_predicate_that_only_ends_so_is_shown_as_a_fact(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("a\tseen_kge\tb\n")
    graph = load_graph(tmp_path)
    rules = parse_rules("seen_kge(X,Y) -> seen_kge(Y,X)", graph.vocab)
    (proof,), _ = prove((0, 0, 1), graph.facts, rules)

    assert list(proof.tree(rules).lines(rules, graph.vocab)) == ["seen_kge(a, b)  [fact]"]


def test_what_cannot_be_accepted_is_refused() -> None:
    graph = graph_of([(0, 0, 1)], [])
    table, all_of_them = Table(np.full((P, N, N), 1 / N)), np.arange(P, dtype=np.int32)

    with pytest.raises(ConfigError, match="no valid part"):
        accept(graph, table, all_of_them)
    for least in (0.0, 1.5, -1.0):
        with pytest.raises(ConfigError, match="above 0 and at most 1"):
            accept(graph, table, all_of_them, least)
    with pytest.raises(BadProgram, match="ends in _kge"):
        asks_kge(parse_rules("p0(X,Y) -> p1_kge(X,Y)", graph.vocab.with_kge()))
    with pytest.raises(BadProgram, match="give one with --kge"):
        parse_rules("p0_kge(X,Y) -> p1(X,Y)", graph.vocab)
