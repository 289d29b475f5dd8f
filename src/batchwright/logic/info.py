"""What is in a graph: counts, relations that are another one turned around, unseen entities."""

from typing import Any

import numpy as np

from batchwright.logic.facts import Facts
from batchwright.logic.leaks import find_leaks, inverse_pairs
from batchwright.logic.loaders import Graph

__all__ = ["graph_info", "graph_leaks"]

MOSTLY = 0.5
"""From this share of facts on that are there turned around, a relation is told as an inverse."""


def graph_info(graph: Graph) -> dict[str, Any]:
    """Counts by part and relation, inverse candidates and unseen entities, ready for JSON.

    `inverses` lists (p, q, share): that part of the facts p(x, y) for which q(y, x) is a fact as
    well; where p is q, the relation is symmetric to that part. They are what makes a graph easy
    for those who look, and what must not be split between train and test.
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
    strange = ~seen[asked[:, 0]] | ~seen[asked[:, 2]]
    return {
        "name": graph.name,
        "entities": vocab.num_entities,
        **{part: len(triples) for part, triples in parts.items()},
        "repeated": len(graph.train) - len(unique),
        "degree": float(degree[seen].mean()),
        "most": int(degree.max()),
        "unseen_entities": int((~seen).sum()),
        "unseen_triples": int(strange.sum()),
        "relations": relations,
        "inverses": [
            (vocab.predicates[p], vocab.predicates[q], share)
            for p, q, share in inverse_pairs(facts, MOSTLY)
        ],
    }


def graph_leaks(graph: Graph) -> dict[str, Any]:
    """Questions of valid and test that train gives away, ready for JSON.

    `leaks` are questions that are facts of train, or stand in both valid and test: those are
    wrong. `turned` counts questions whose reverse is a fact of a relation that mostly is the
    inverse: many graphs are made like that, but a score on them says little.
    """
    facts, vocab = graph.facts, graph.vocab
    asked = {"valid": graph.valid, "test": graph.test}
    leaks = [(leak.part, leak.row, leak.triple) for leak in find_leaks(facts, asked)]
    valid = Facts.of(graph.valid, vocab)
    leaks += [
        ("valid and test", leak.row, leak.triple)
        for leak in find_leaks(valid, {"test": graph.test})
    ]
    turned = {part: np.zeros(len(triples), np.bool_) for part, triples in asked.items()}
    for p, q, _ in inverse_pairs(facts, MOSTLY):
        for part, triples in asked.items():
            given = facts.contains(triples[:, 2], q, triples[:, 0])
            turned[part] |= given & (triples[:, 1] == p)
    return {
        "name": graph.name,
        "leaks": [
            {"part": part, "row": row + 1, "triple": vocab.atom(p, h, t)}
            for part, row, (h, p, t) in leaks
        ],
        "turned": {part: int(found.sum()) for part, found in turned.items()},
        "questions": {part: len(triples) for part, triples in asked.items()},
    }
