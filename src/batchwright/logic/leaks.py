"""Leaks: questions whose answers stand among the facts, and proofs that use what they prove."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from batchwright.errors import BadProgram
from batchwright.logic.facts import Facts, as_triples
from batchwright.logic.prove.proofs import Shortest, hidden_facts
from batchwright.logic.prove.search import FACT
from batchwright.logic.vocab import Vocab

__all__ = ["InversePair", "Leak", "check_leaks", "find_leaks", "inverse_pairs", "self_proved"]

Ints = NDArray[np.int32]


class Leak(NamedTuple):
    """One question that the facts give away."""

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


def find_leaks(
    facts: Facts, parts: Mapping[str, ArrayLike], inverse: Ints | None = None
) -> list[Leak]:
    """Every question of `parts` (triples by name) that is a fact, itself or as its inverse.

    >>> vocab = Vocab.of("ab", ["p"])
    >>> find_leaks(Facts.of([(0, 0, 1)], vocab), {"test": [(1, 0, 0), (0, 0, 1)]})
    [Leak(part='test', row=1, triple=(0, 0, 1), inverse=False)]
    """
    found = []
    for name, triples in parts.items():
        asked = as_triples(triples)
        hidden = hidden_facts(asked, inverse)
        for turn in range(2):
            for row in np.flatnonzero(facts.contains(*hidden[:, turn].T)).tolist():
                h, p, t = asked[row].tolist()
                found.append(Leak(name, row, (h, p, t), inverse=turn == 1))
    return found


def check_leaks(
    facts: Facts, parts: Mapping[str, ArrayLike], vocab: Vocab, inverse: Ints | None = None
) -> None:
    """Refuse facts that hold questions; the message names the first."""
    found = find_leaks(facts, parts, inverse)
    if found:
        part, row, (h, p, t), turned = found[0]
        what = "the inverse of it is" if turned else "it is"
        raise BadProgram(
            f"{len(found):,} questions leak into the facts; the first is number {row + 1:,} of "
            f"{part}, {vocab.atom(p, h, t)}: {what} a fact; take them out of one of the two"
        )


def self_proved(queries: ArrayLike, proofs: Shortest, inverse: Ints | None = None) -> Ints:
    """The queries whose proof uses their own fact, or its declared inverse."""
    hidden = hidden_facts(as_triples(queries), inverse)
    kind, predicate, subject, second = (proofs.steps[:, :, column] for column in range(4))
    taken = np.arange(proofs.steps.shape[1]) < proofs.lengths[:, None]
    own = np.zeros(taken.shape, np.bool_)
    for turn in range(2):
        h, p, t = (hidden[:, turn, column, None] for column in range(3))
        own |= (predicate == p) & (subject == h) & (second == t) & (p >= 0)
    return np.flatnonzero((taken & own & (kind == FACT)).any(axis=1)).astype(np.int32)


def inverse_pairs(facts: Facts, least: float = 0.8) -> list[InversePair]:
    """Pairs of predicates that are inverses in at least this share of facts, likeliest first.

    A predicate with itself is a symmetric one. This is a hint of what to declare, not a leak:
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
