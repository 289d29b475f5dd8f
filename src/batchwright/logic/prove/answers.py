"""Answers to a query, ranked by all the evidence for them, each with its proofs, best first.

Each rule that concludes an answer is one witness, as strong as its best proof: the product of the
weights of the rules in it. Witnesses are joined by a noisy-or, 1 - (1 - w1) (1 - w2) ..., so two
rules that agree say more than one. A fact is certain.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from batchwright.logic.facts import Facts
from batchwright.logic.prove.proofs import MAX_NODES, Node, Proof, prove
from batchwright.logic.prove.search import FACT
from batchwright.logic.rules import Rules

__all__ = ["Answer", "Answers", "answers"]

MOST_PROOFS = 100_000
"""Proofs that one search collects; shorter ones come first."""


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """One answer, with the best proof of each rule that concludes it, or with all proofs."""

    entity: int
    """What the open argument stands for; of a ground query its second argument."""
    known: bool
    """Whether the answer itself is a fact."""
    confidence: float
    """The noisy-or of its witnesses."""
    proofs: tuple[Proof, ...]
    """The best first."""


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
    """What a search found: the most certain answer first."""

    found: list[Answer]
    complete: bool
    """False: a bound ended the search; there may be more answers, and more proofs of these."""


def answers(
    query: tuple[int, int, int],
    facts: Facts,
    rules: Rules,
    depth: int = 5,
    *,
    hide: bool = False,
    every: bool = False,
    one_rule: bool = False,
    max_nodes: int = MAX_NODES,
    max_proofs: int = MOST_PROOFS,
) -> Answers:
    """All answers to the triple `query`, in which -1 asks for an entity.

    With `hide` no answer is proved by its own fact. With `every` an answer has all its proofs, else
    the best of each rule. With `one_rule` facts alone prove the body of a rule. No proof goes
    through p(x, x) where no fact p(y, y) shows that an entity can stand in the relation p to
    itself: nobody is a brother of his own.

    >>> from batchwright.logic.rules import parse_rules
    >>> from batchwright.logic.vocab import Vocab
    >>> vocab = Vocab.of(["ann", "bo", "cy"], ["knows", "likes"])
    >>> facts = Facts.of([(0, 0, 1), (1, 0, 2), (0, 1, 2)], vocab)
    >>> text = "a:{}:knows(x,z), knows(z,y) -> likes(x,y)"
    >>> rules = parse_rules(text.format(0.5) + "\\n" + text.format(0.2).replace("a", "b", 1), vocab)
    >>> (answer,) = answers((0, 1, -1), facts, rules, hide=True).found
    >>> answer.known, round(answer.confidence, 3), [len(proof) for proof in answer.proofs]
    (True, 0.6, [3, 3])
    """
    h, p, t = query
    bounds = {"max_nodes": max_nodes, "max_proofs": max_proofs}
    search = prove(query, facts, rules, depth, every=True, one_rule=one_rule, **bounds)
    irreflexive = np.diff(facts.loop_ptr) == 0
    by_answer: dict[int, list[Proof]] = {}
    for proof in search.found:
        by_answer.setdefault(proof.answer, []).append(proof)
    found = []
    for entity, proofs in by_answer.items():
        own = (FACT, p, h if h >= 0 else entity, t if t >= 0 else entity)
        if hide:
            proofs = [proof for proof in proofs if own not in proof.steps]
        kept = list(_best(proofs, rules, irreflexive, every))
        if kept:
            witnesses: dict[int, float] = {}
            for proof in kept:
                rule = -1 if proof.steps[0][0] == FACT else proof.steps[0][1]
                witnesses[rule] = max(witnesses.get(rule, 0.0), proof.weight(rules))
            doubt = float(np.prod([1 - min(1.0, weight) for weight in witnesses.values()]))
            known = bool(facts.contains(own[2], p, own[3]))
            found.append(Answer(entity, known, 1 - doubt, tuple(kept)))
    found.sort(key=lambda each: (-each.confidence, len(each.proofs[0]), each.entity))
    return Answers(found, search.complete)


def _best(
    proofs: list[Proof], rules: Rules, irreflexive: np.ndarray, every: bool
) -> Iterator[Proof]:
    """The proofs without p(x, x), best and then shortest first; of each rule the first, or all."""
    seen = set()
    for proof in sorted(proofs, key=lambda proof: (-proof.weight(rules), len(proof))):
        first = proof.steps[0][:2] if proof.steps[0][0] != FACT else (FACT, -1)
        if (every or first not in seen) and not _loops(proof.tree(rules), irreflexive):
            seen.add(first)
            yield proof


def _loops(node: Node, irreflexive: np.ndarray) -> bool:
    p, x, y = node.atom
    return (x == y and bool(irreflexive[p])) or any(
        _loops(child, irreflexive) for child in node.children
    )
