"""What a graph holds and what its split gives away: counts, inverse relations, test leakage."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from batchwright.logic.facts import Facts, as_triples
from batchwright.logic.loaders import Graph
from batchwright.logic.prove.proofs import hidden_facts

__all__ = ["InversePair", "Leak", "find_leaks", "graph_info", "graph_leaks", "inverse_pairs"]

Ints = NDArray[np.int32]

MOSTLY = 0.5
"""The share of a relation's facts from which on another relation is reported as its inverse."""


class Leak(NamedTuple):
    """One query that the facts give away."""

    part: str
    """The part it was found in, such as `test`."""
    row: int
    triple: tuple[int, int, int]
    inverse: bool
    """True: not the triple itself but its declared inverse is a fact."""


class InversePair(NamedTuple):
    """Two predicates of which one mostly says what the other says from the other end."""

    predicate: int
    other: int
    share: float
    """The share of p(a, b) for which other(b, a) is a fact."""


def graph_info(graph: Graph) -> dict[str, Any]:
    """Counts by part and relation, inverse relations and unseen entities, ready for JSON.

    `inverses` lists (p, q, share): that share of the facts p(x, y) for which q(y, x) is a fact as
    well; where p is q, the relation is symmetric to that degree. They make a graph easy, and must
    not be split between train and test.
    """
    facts, vocab = graph.facts, graph.vocab
    parts = {"train": graph.train, "valid": graph.valid, "test": graph.test}
    relations: dict[str, dict[str, int]] = {}
    unique = facts.triples
    for p, name in enumerate(vocab.predicates):
        own = unique[unique[:, 1] == p]
        relations[name] = {
            **{part: int((triples[:, 1] == p).sum()) for part, triples in parts.items()},
            "heads": len(np.unique(own[:, 0])),
            "tails": len(np.unique(own[:, 2])),
        }
    degree = np.bincount(unique[:, [0, 2]].ravel(), minlength=vocab.num_entities)
    seen = degree > 0
    asked = np.concatenate([graph.valid, graph.test])
    unseen = ~seen[asked[:, 0]] | ~seen[asked[:, 2]]
    return {
        "name": graph.name,
        "entities": vocab.num_entities,
        **{part: len(triples) for part, triples in parts.items()},
        "repeated": len(graph.train) - len(unique),
        "degree": float(degree[seen].mean()),
        "most": int(degree.max()),
        "unseen_entities": int((~seen).sum()),
        "unseen_triples": int(unseen.sum()),
        "relations": relations,
        "inverses": [
            (vocab.predicates[p], vocab.predicates[q], share)
            for p, q, share in inverse_pairs(facts, MOSTLY)
        ],
    }


def graph_leaks(graph: Graph) -> dict[str, Any]:
    """Queries of valid and test that train gives away, ready for JSON.

    `leaks` are queries that are facts of train, themselves or as their declared inverse, or stand
    in both valid and test: those are mistakes. `inverse` counts queries whose inverse is a fact of
    a relation that mostly is the inverse: many graphs are made like that, but a score on them says
    little.
    """
    facts, vocab = graph.facts, graph.vocab
    asked = {"valid": graph.valid, "test": graph.test}
    leaks = [(leak.part, leak.row, leak.triple) for leak in find_leaks(facts, asked, graph.inverse)]
    leaks += [
        ("valid and test", leak.row, leak.triple)
        for leak in find_leaks(Facts.of(graph.valid, vocab), {"test": graph.test})
    ]
    inverse = {part: np.zeros(len(triples), np.bool_) for part, triples in asked.items()}
    for p, q, _ in inverse_pairs(facts, MOSTLY):
        for part, triples in asked.items():
            known = facts.contains(triples[:, 2], q, triples[:, 0])
            inverse[part] |= known & (triples[:, 1] == p)
    return {
        "name": graph.name,
        "leaks": [
            {"part": part, "row": row + 1, "triple": vocab.atom(p, h, t)}
            for part, row, (h, p, t) in leaks
        ],
        "inverse": {part: int(found.sum()) for part, found in inverse.items()},
        "questions": {part: len(triples) for part, triples in asked.items()},
    }


def find_leaks(
    facts: Facts, parts: Mapping[str, ArrayLike], inverse: Ints | None = None
) -> list[Leak]:
    """Every query of `parts` (triples by name) that is a fact, itself or as its inverse.

    >>> from batchwright.logic.vocab import Vocab
    >>> facts = Facts.of([(0, 0, 1)], Vocab.of("ab", ["p"]))
    >>> find_leaks(facts, {"test": [(1, 0, 0), (0, 0, 1)]})
    [Leak(part='test', row=1, triple=(0, 0, 1), inverse=False)]
    """
    found = []
    for name, triples in parts.items():
        asked = as_triples(triples)
        hidden = hidden_facts(asked, inverse)
        for side in range(2):
            for row in np.flatnonzero(facts.contains(*hidden[:, side].T)).tolist():
                h, p, t = asked[row].tolist()
                found.append(Leak(name, row, (h, p, t), inverse=side == 1))
    return found


def inverse_pairs(facts: Facts, least: float = 0.8) -> list[InversePair]:
    """Pairs of predicates that are inverses in at least this share of facts, highest share first.

    A predicate paired with itself is symmetric. This is a hint of what to declare, not a leak:
    whether the other direction may be known is for the user to say.
    """
    triples, pairs = facts.triples, []
    for p in range(facts.num_predicates):
        mine = triples[triples[:, 1] == p]
        for q in range(facts.num_predicates):
            if len(mine):
                share = float(facts.contains(mine[:, 2], q, mine[:, 0]).mean())
                if share >= least:
                    pairs.append(InversePair(p, q, share))
    return sorted(pairs, key=lambda pair: -pair.share)
