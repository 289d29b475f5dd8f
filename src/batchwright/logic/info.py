"""What is in a graph: counts, relations that are another one turned around, unseen entities."""

from typing import Any

import numpy as np

from batchwright.logic.loaders import Graph

__all__ = ["graph_info"]

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
    inverses: list[tuple[str, str, float]] = []
    unique = facts.triples
    for p, name in enumerate(vocab.predicates):
        own = unique[unique[:, 1] == p]
        relations[name] = {
            **{part: int((triples[:, 1] == p).sum()) for part, triples in parts.items()},
            "heads": len(np.unique(own[:, 0])),
            "tails": len(np.unique(own[:, 2])),
        }
        for q, other in enumerate(vocab.predicates if len(own) else ()):
            share = float(facts.contains(own[:, 2], q, own[:, 0]).mean())
            if share >= MOSTLY:
                inverses.append((name, other, share))
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
        "inverses": sorted(inverses, key=lambda pair: -pair[2]),
    }
