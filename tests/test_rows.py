"""An index of mostly empty rows: bounded by the facts, and the same in all that reads it."""

import subprocess
import sys

import numpy as np
import pytest
from numpy.typing import NDArray

from batchwright.envs import ProverEnv
from batchwright.jit import interpreted
from batchwright.logic.facts import Facts
from batchwright.logic.rank.scorers import RuleScorer
from batchwright.logic.rules import parse_rules
from batchwright.logic.vocab import Vocab

ENTITIES, PREDICATES = 60, 4
BY = np.array([4001, 30, 4001])
"""What ids are multiplied by, so that most entities and predicates have no fact."""
RULES = (
    "a:0.5:{0}(X,Z), {1}(Y,Z) -> {2}(X,Y)\nb:0.7:{3}(Y,X) -> {0}(X,Y)\nc:0.1:{1}(X,Y) -> {2}(Y,X)"
)


def vocab_of(entities: int, predicates: int) -> Vocab:
    names = tuple(map(str, range(max(entities, predicates))))
    return Vocab(names[:entities], tuple(f"p{name}" for name in names[:predicates]))


FEW = vocab_of(ENTITIES, PREDICATES)
MANY = vocab_of(ENTITIES * int(BY[0]), PREDICATES * int(BY[1]))


@pytest.fixture(scope="module")
def triples() -> NDArray[np.int64]:
    rng = np.random.default_rng(0)
    some = np.stack([rng.integers(0, m, 600) for m in (ENTITIES, PREDICATES, ENTITIES)], 1)
    return np.unique(np.concatenate([some, [(7, 0, 7), (9, 2, 9), (59, 3, 59)]]), axis=0)


def test_the_index_grows_with_the_facts_and_holds_the_same(triples: NDArray[np.int64]) -> None:
    few, many = Facts.of(triples, FEW), Facts.of(triples * BY, MANY)
    grid = np.indices((ENTITIES, PREDICATES, ENTITIES)).reshape(3, -1).T
    expected = [tuple(one) in set(map(tuple, triples.tolist())) for one in grid.tolist()]

    assert many.ps_ptr.nbytes + many.po_ptr.nbytes < 300 * len(triples)
    assert (many.triples == few.triples * BY).all()
    assert many.contains(*(grid * BY).T).tolist() == expected
    assert not many.contains(*(grid * BY + [1, 0, 0]).T).any()
    assert not many.contains(0, [-1, 119, 120, 10**6], 0).any()
    with interpreted():
        assert many.contains(*(grid[:500] * BY).T).tolist() == expected[:500]
    for x, p, _ in grid[::ENTITIES].tolist():
        head, predicate, _ = ([x, p, 0] * BY).tolist()
        assert (many.tails(head, predicate) == few.tails(x, p) * BY[0]).all()
        assert (many.heads(predicate, head) == few.heads(p, x) * BY[0]).all()


def test_rules_over_it_score_the_same(triples: NDArray[np.int64]) -> None:
    found = []
    for vocab, by in ((FEW, np.ones(3, np.int64)), (MANY, BY)):
        names = [vocab.predicates[p * by[1]] for p in range(PREDICATES)]
        scorer = RuleScorer(Facts.of(triples * by, vocab), parse_rules(RULES.format(*names), vocab))
        given = np.arange(ENTITIES, dtype=np.int32) * by[0].astype(np.int32)
        rows = [
            scorer.scores(given, np.full(ENTITIES, p * by[1], np.int32), side)
            for p in (0, 2)
            for side in ("tail", "head")
        ]
        assert sum(int((row != 0).sum()) for row in rows) > 1000
        assert all(set(row.nonzero()[1] % by[0]) == {0} for row in rows)
        found.append([row[:, :: by[0]] for row in rows])
    assert all((one == other).all() for one, other in zip(*found, strict=True))


def test_proofs_over_it_take_the_same_steps(triples: NDArray[np.int64]) -> None:
    found = []
    for vocab, by in ((FEW, np.ones(3, np.int64)), (MANY, BY)):
        names = [vocab.predicates[p * by[1]] for p in range(PREDICATES)]
        facts = Facts.of(triples * by, vocab)
        queries = np.array([(x, 2, (x + 1) % ENTITIES) for x in range(ENTITIES)]) * by
        env = ProverEnv(facts, parse_rules(RULES.format(*names), vocab), queries, 60, depth=5)
        masks, rewards = [], []
        for _ in range(12):
            mask = env.observation["mask"].copy()
            masks.append(mask)
            # The last candidate: a fact of the goal where there is one.
            rewards.append(env.step(mask.shape[1] - 1 - mask[:, ::-1].argmax(1)).reward.copy())
        assert np.concatenate(rewards).any()
        found.append(masks + rewards)
    assert all((one == other).all() for one, other in zip(*found, strict=True))


LARGE = """
import resource
import numpy as np
from batchwright.logic.facts import Facts
from batchwright.logic.loaders import Graph
from batchwright.logic.mine.mining import mine
from batchwright.logic.vocab import Vocab
from batchwright.train.prover.config import ProverConfig
from batchwright.train.prover.loop import fit_prover

names = tuple(map(str, range(2_500_000)))
vocab = Vocab(names, tuple("p" + name for name in names[:535]))
heads = np.arange(0, 4000, 2)
parts = [np.stack([heads, np.full_like(heads, p), heads + 1], 1) for p in (3, 534)]
train = (np.concatenate(parts) * [625, 1, 625]).astype(np.int32)
train[0, 0] = 2_499_999
graph = Graph("large", vocab, train, train[:2], train[:0], np.full(535, -1, np.int32))
mined = mine(train, vocab, length=1)
assert len(mined.rules) == 2
for policy in ("answers", "rules"):
    clone = 0 if policy == "answers" else 1
    config = ProverConfig(
        policy=policy, n_envs=16, n_eval_envs=16, clone_updates=clone, ppo_steps=64, eval_triples=2
    )
    found = fit_prover(config, graph, mined.rules)[1]
    assert found.finished and found.rules == 2, found
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def test_2_5_million_entities_and_535_predicates_are_mined_and_train_in_4_gigabytes() -> None:
    done = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) < 4 * 10**9
