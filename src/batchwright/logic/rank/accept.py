"""What an embedding accepts, as facts `p_kge(X, Y)` that the bodies of rules may use.

`son(x,z), wife_kge(y,z) -> son(x,y)` proves by a marriage that is not a fact but predicted by an
embedding. It accepts p(x, y) if it gives y at least the probability `least` among all answers to
p(x, ?). What it accepts is added to the facts under a name of its own, so searches, scores and
proof trees need not know of it, and no accepted atom passes for a fact. An embedding was fitted on
the train part, so what it accepts there says little of its accuracy elsewhere: `least` is chosen
on valid, and evidence that rules with `_kge` learn on train is only kept if it ranks valid better.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from batchwright.errors import BadProgram, ConfigError
from batchwright.logic.loaders import Graph
from batchwright.logic.rank.ranking import Scorer
from batchwright.logic.rules import Rules
from batchwright.logic.vocab import KGE

__all__ = ["LEAST", "Accepted", "accept", "asks_kge"]

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]

LEAST = (0.5, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01)
"""Probabilities that are tried on valid as the threshold of acceptance."""

CELLS = 2**24
"""Scores of one block of questions."""


@dataclass(frozen=True, slots=True, eq=False)
class Accepted:
    """A graph with what an embedding accepts among its facts, under predicates `p_kge`."""

    graph: Graph
    least: float
    """The probability from which on atoms were accepted."""
    atoms: int
    """How many were."""
    f1: float | None
    """Of accepted and true answers to the questions p(h, ?) of valid; None if `least` was given."""


def asks_kge(rules: Rules) -> Ints:
    """The predicates p whose p_kge rules use; the rules are over `vocab.with_kge()`."""
    half = rules.num_predicates // 2
    if (rules.head[:, 0] >= half).any():
        name = rules.names[int(np.argmax(rules.head[:, 0] >= half))]
        raise BadProgram(
            f"the head of rule {name!r} ends in {KGE}, which only an embedding answers; use it in "
            f"the body, and conclude the predicate itself"
        )
    used = np.unique(rules.body[..., 0])
    return (used[used >= half] - half).astype(np.int32)


def accept(
    graph: Graph,
    embedding: Scorer,
    predicates: Ints,
    least: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Accepted:
    """The graph with `p_kge(x, y)` in train for each of the predicates, x and y that is accepted.

    Without `least` it is the one of `LEAST` with the best F1 on valid. All pairs of entities are
    scored, a predicate at a time; `embedding` gives log-probabilities.
    """
    f1 = None
    if least is None:
        if not len(graph.valid):
            raise ConfigError(
                "there is no valid part to choose the accepted probability on; give it"
            )
        least, f1 = _chosen(graph, embedding)
    if not 0 < least <= 1:
        raise ConfigError(f"the accepted probability must be above 0 and at most 1, got {least}")
    n, preds = graph.vocab.num_entities, graph.vocab.num_predicates
    rows = max(1, CELLS // n)
    found = [graph.train]
    for number, predicate in enumerate(predicates.tolist()):
        for start in range(0, n, rows):
            given = np.arange(start, min(n, start + rows), dtype=np.int32)
            asked = np.full(len(given), predicate, np.int32)
            x, y = np.nonzero(embedding.scores(given, asked, "tail") >= np.log(least))
            step = np.full(len(x), preds + predicate)
            found.append(np.stack([given[x], step, y], 1).astype(np.int32))
        if progress:
            progress(number + 1, len(predicates))
    train = np.concatenate(found)
    inverse = np.concatenate([graph.inverse, np.full(preds, -1, np.int32)])
    wider = replace(graph, vocab=graph.vocab.with_kge(), train=train, inverse=inverse)
    return Accepted(wider, least, len(train) - len(graph.train), f1)


def _chosen(graph: Graph, embedding: Scorer) -> tuple[float, float]:
    """The threshold of the best F1 on valid; answers that are facts of train are left out."""
    asked, place = np.unique(graph.valid[:, :2], axis=0, return_inverse=True)
    accepted, right = np.zeros(len(LEAST)), np.zeros(len(LEAST))
    rows = max(1, CELLS // graph.vocab.num_entities)
    bounds = np.log(LEAST)
    for start in range(0, len(asked), rows):
        part = asked[start : start + rows]
        scores = embedding.scores(
            np.ascontiguousarray(part[:, 0]), np.ascontiguousarray(part[:, 1]), "tail"
        )
        own = (place >= start) & (place < start + rows)
        true = np.zeros(scores.shape, np.bool_)
        true[place[own] - start, graph.valid[own, 2]] = True
        facts = graph.facts
        for i, (h, p) in enumerate(part.tolist()):
            scores[i, facts.tails(h, p)] = -np.inf
        for i, bound in enumerate(bounds):
            over = scores >= bound
            accepted[i] += over.sum()
            right[i] += (over & true).sum()
    f1 = 2 * right / (accepted + len(np.unique(graph.valid, axis=0)))
    best = int(f1.argmax())
    return LEAST[best], float(f1[best])
