import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from batchwright.errors import ConfigError
from batchwright.logic.facts import Facts
from batchwright.logic.rank.ranking import Ranks, Side, average_precision, blocks, rank, summary
from batchwright.logic.vocab import Vocab

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]


class Table:
    """Scores that are written down: [sides, predicates, entities, entities]."""

    def __init__(self, table: Floats) -> None:
        self.table = table

    def scores(self, given: Ints, predicates: Ints, side: Side) -> Floats:
        return self.table[0 if side == "tail" else 1, predicates, given].copy()


def facts_of(triples: Ints, entities: int, predicates: int) -> Facts:
    vocab = Vocab(
        tuple(f"e{i}" for i in range(entities)), tuple(f"p{i}" for i in range(predicates))
    )
    return Facts.of(triples, vocab)


def oracle(table: Floats, triples: Ints, known: set[tuple[int, int, int]]) -> list[list[float]]:
    """Higher than and equal to the answer for each query, candidate by candidate."""
    found = []
    for side in (0, 1):
        for h, p, t in triples.tolist():
            given, answer = (h, t) if side == 0 else (t, h)
            score = [-np.inf if np.isnan(s) else s for s in table[side, p, given]]
            higher = equal = 0
            for e in range(table.shape[-1]):
                triple = (given, p, e) if side == 0 else (e, p, given)
                if e == answer or triple in known:
                    continue
                higher += score[e] > score[answer]
                equal += score[e] == score[answer]
            found.append([higher, equal])
    return found


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_ranks_are_those_of_a_candidate_by_candidate_count(data: st.DataObject) -> None:
    n, preds = data.draw(st.integers(2, 7)), data.draw(st.integers(1, 2))
    triple = st.tuples(st.integers(0, n - 1), st.integers(0, preds - 1), st.integers(0, n - 1))
    asked = np.array(data.draw(st.lists(triple, min_size=1, max_size=6)), np.int32)
    other = np.array(data.draw(st.lists(triple, max_size=10)), np.int32).reshape(-1, 3)
    together = np.concatenate([asked, other]) if data.draw(st.booleans()) else other
    values = st.sampled_from([0.0, 1.0, 2.0, -1.0, float("nan"), float("inf"), float("-inf")])
    table = np.array(
        data.draw(st.lists(values, min_size=2 * preds * n * n, max_size=2 * preds * n * n)),
        np.float32,
    ).reshape(2, preds, n, n)

    ranks = rank(Table(table), asked, facts_of(together, n, preds))

    known = {tuple(row) for row in together.tolist()}
    assert np.stack([ranks.greater, ranks.ties], 1).tolist() == oracle(table, asked, known)


def test_a_hand_made_example_gives_the_realistic_filtered_ranks() -> None:
    # Four entities, one relation; 0 -> 1 is asked, 0 -> 2 is true as well and scores highest.
    # Tails: 2 is left out, 3 ties with the answer: between 1 and 2. Heads: 1, 2 and 3 are above.
    table = np.zeros((2, 1, 4, 4), np.float32)
    table[0, 0, 0] = [0.1, 0.5, 0.9, 0.5]
    table[1, 0, 1] = [0.1, 0.2, 0.3, 0.4]
    known = facts_of(np.array([[0, 0, 1], [0, 0, 2]], np.int32), 4, 1)

    found = rank(Table(table), np.array([[0, 0, 1]], np.int32), known)

    assert found.middle.tolist() == [1.5, 4.0]
    metrics = found.metrics()
    assert metrics.mrr == pytest.approx((1 / 1.5 + 1 / 4) / 2)
    assert metrics.expected_mrr == pytest.approx(((1 + 1 / 2) / 2 + 1 / 4) / 2)
    assert metrics.optimistic_mrr == pytest.approx((1 + 1 / 4) / 2)
    assert metrics.pessimistic_mrr == pytest.approx((1 / 2 + 1 / 4) / 2)
    assert (metrics.hits_1, metrics.hits_3, metrics.hits_10) == (0, 0.5, 1)
    assert metrics.tied


def test_a_scorer_that_knows_nothing_ranks_in_the_middle() -> None:
    triples = np.array([[e, 0, (e + 1) % 101] for e in range(101)], np.int32)
    known = facts_of(triples, 101, 1)

    metrics = rank(Table(np.zeros((2, 1, 101, 101), np.float32)), triples, known).metrics()

    assert metrics.mean_rank == 51.0
    assert metrics.hits_10 == 0
    assert metrics.tied


def test_blocks_of_any_size_hold_the_same_queries() -> None:
    rng = np.random.default_rng(0)
    triples = rng.integers(0, 9, (23, 3)).astype(np.int32) % np.array([9, 2, 9], np.int32)
    known = facts_of(triples, 9, 2)
    table = Table(rng.integers(0, 4, (2, 2, 9, 9)).astype(np.float32))
    whole = rank(table, triples, known, sampled=3)

    counts = np.zeros((4, 46), np.int64)
    for block in blocks(triples, known, cells=9 * 4):
        assert len(block.given) <= 4
        scores = table.scores(block.given, block.predicates, block.side)
        counts[:, block.first : block.first + len(block.given)] = block.count(scores, 3)

    expected = [whole.greater, whole.ties, whole.sampled_greater, whole.sampled_ties]
    assert np.array_equal(counts, np.stack(expected))


def test_sampled_candidates_are_wrong_distinct_and_as_many_as_requested() -> None:
    triples = np.array([[0, 0, 1], [0, 0, 2], [0, 0, 3]], np.int32)
    known = facts_of(triples, 50, 1)
    # True answers tie with each other; every wrong candidate is above.
    table = np.ones((2, 1, 50, 50), np.float32)
    table[0, 0, 0, [1, 2, 3]] = 0.0
    table[1, 0, [1, 2, 3], 0] = 0.0

    found = rank(Table(table), triples, known, sampled=20, sides=("tail",))

    assert found.sampled_greater.tolist() == [20] * 3
    assert found.sampled_ties.tolist() == [0] * 3
    everything = rank(Table(table), triples, known, sampled=10_000, sides=("tail",))
    assert everything.sampled_greater.tolist() == everything.greater.tolist() == [47] * 3


def test_sampled_ranks_are_easier_by_the_share_that_is_sampled() -> None:
    n = 1001
    triples = np.array([[e, 0, 0] for e in range(1, n)], np.int32)
    # The true tail stands in the middle of all candidates.
    table = np.broadcast_to(np.arange(n, dtype=np.float32), (2, 1, n, n)).copy()
    table[0, 0, :, 0] = 500.5

    found = rank(Table(table), triples, facts_of(triples, n, 1), sampled=100, sides=("tail",))

    assert found.greater.tolist() == [500] * (n - 1)
    assert found.sampled_greater.mean() == pytest.approx(50, abs=1)


def test_a_scorer_with_too_few_scores_is_refused() -> None:
    known = facts_of(np.array([[0, 0, 1]], np.int32), 3, 1)

    with pytest.raises(ConfigError, match="every entity needs a score"):
        rank(Table(np.zeros((2, 1, 3, 2), np.float32)), np.array([[0, 0, 1]], np.int32), known)


def test_a_summary_has_both_sides_the_sample_and_each_relation() -> None:
    triples = np.array([[0, 0, 1], [1, 1, 2]], np.int32)
    table = Table(np.random.default_rng(1).random((2, 2, 3, 3)).astype(np.float32))
    ranks = rank(table, triples, facts_of(triples, 3, 2), sampled=1)

    found = summary(ranks, ["p", "q"])

    assert {"both", "tail", "head", "sampled", "by_relation", "tied"} == found.keys()
    sides = (found["tail"]["mrr"] + found["head"]["mrr"]) / 2
    assert found["both"]["mrr"] == pytest.approx(sides)
    assert found["by_relation"]["q"]["queries"] == 2


def test_no_queries_have_no_mean() -> None:
    empty = np.empty(0, np.int64)

    with pytest.raises(ConfigError, match="no queries"):
        Ranks(empty.astype(np.int32), empty.astype(np.bool_), empty, empty).metrics()


def test_average_precision_is_that_of_the_sorted_list() -> None:
    # Pairs by score: 0-a true, 1-b false, 1-a true, 0-b false.
    table = np.zeros((2, 1, 4, 4), np.float32)
    table[0, 0, 0, [2, 3]] = [0.9, 0.1]
    table[0, 0, 1, [2, 3]] = [0.5, 0.7]
    triples = np.array([[0, 0, 2], [1, 0, 2]], np.int32)

    found = average_precision(Table(table), triples, np.array([2, 3], np.int32))

    assert found == pytest.approx((1 / 1 + 2 / 3) / 2)


def test_average_precision_takes_ties_together_and_softmax_heads_apart() -> None:
    table = np.zeros((2, 1, 4, 4), np.float32)
    triples = np.array([[0, 0, 2], [1, 0, 2]], np.int32)
    wanted = np.array([2, 3], np.int32)

    assert average_precision(Table(table), triples, wanted) == pytest.approx(0.5)

    # One head's scores are all above the other's, but each head is sure of the right one.
    table[0, 0, 0, [2, 3]] = [9.0, 5.0]
    table[0, 0, 1, [2, 3]] = [4.0, 0.0]
    assert average_precision(Table(table), triples, wanted) == pytest.approx((1 + 2 / 3) / 2)
    assert average_precision(Table(table), triples, wanted, softmax=True) == 1.0


def test_average_precision_of_wrong_candidates_is_refused() -> None:
    table = Table(np.zeros((2, 1, 4, 4), np.float32))

    with pytest.raises(ConfigError, match="none of the candidates"):
        average_precision(table, np.array([[0, 0, 2]], np.int32), np.array([3], np.int32))
