"""Mine rules by counting: chains of up to three edges that predict another edge.

A chain rule is p(X, Y) <- q1(X, Z1), q2(Z1, Z2), q3(Z2, Y), each edge read in either direction.
Its pairs are all distinct (X, Y) that the body joins, its support those that are facts of the head,
and

    confidence = support / (pairs + prior)

so that a rule that held twice out of twice is not taken as certain. A chain never goes back over
the edge it came by, and a pair that is joined only through the head's own fact is not counted: such
a chain would not be there for a fact that is still unknown.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from batchwright.errors import ConfigError
from batchwright.files import write_atomic
from batchwright.logic.facts import Facts
from batchwright.logic.mine.kernels import count_chains
from batchwright.logic.rules import Clause, Rules
from batchwright.logic.vocab import Vocab

__all__ = ["LONGEST", "Chains", "Mined", "Steps", "chains_of", "mine", "write_rules"]

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]

LONGEST = 3
"""Edges of the longest chain that is mined or scored."""

PART = 2048
"""Bodies counted between two reports of progress."""


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """The edges of a graph in both directions: step s is predicate s, step s + P its reverse."""

    ptr: Ints
    ends: Ints
    num_entities: int
    num_predicates: int

    @classmethod
    def of(cls, facts: Facts) -> "Steps":
        return cls(
            np.concatenate([facts.ps_ptr, facts.po_ptr[1:] + facts.ps_ptr[-1]]).astype(np.int32),
            np.concatenate([facts.ps_obj, facts.po_sub]).astype(np.int32),
            facts.num_entities,
            facts.num_predicates,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Mined:
    """Rules with their confidence as weight, and the counts it came from."""

    rules: Rules
    support: Longs
    pairs: Longs
    bodies: int
    """How many bodies were counted."""
    dropped: int
    """Rules above the thresholds but not among the best of their head."""


@dataclass(frozen=True, slots=True, eq=False)
class Chains:
    """Rules as chains, sorted by head step: `bodies[ptr[s] : ptr[s + 1]]` answer step s.

    Every rule stands twice, once for p(h, ?) and, read backwards, once for p(?, t).
    """

    ptr: Longs
    bodies: Ints
    lengths: Ints
    weights: NDArray[np.float64]
    origin: Longs
    """Twice the number of the rule, plus one where it is read backwards."""
    skipped: tuple[str, ...]
    """Names of rules that are not chains of at most `LONGEST` edges between two variables."""


def mine(
    facts: Facts,
    vocab: Vocab,
    *,
    length: int = 2,
    min_support: int = 2,
    min_confidence: float = 0.02,
    most: int = 300,
    prior: float = 5.0,
    progress: Callable[[int, int], None] | None = None,
) -> Mined:
    """Mine all chain rules of up to `length` edges; at most `most` are kept for each predicate.

    >>> vocab = Vocab.of(["a", "b", "c", "d"], ["child", "parent"])
    >>> facts = Facts.of([(0, 0, 1), (1, 1, 0), (2, 0, 3), (3, 1, 2)], vocab)
    >>> mined = mine(facts, vocab, length=1)
    >>> [mined.rules.text(r, vocab) for r in range(len(mined.rules))]
    ['m0:0.285714285714:parent(Y,X) -> child(X,Y)', 'm1:0.285714285714:child(Y,X) -> parent(X,Y)']
    """
    if not 1 <= length <= LONGEST:
        raise ConfigError(f"length must be 1, 2 or {LONGEST}, got {length}")
    if min_support < 1 or most < 1 or prior < 0 or not 0 <= min_confidence <= 1:
        raise ConfigError(
            f"min_support and most must be at least 1, got {min_support} and {most}; prior must be "
            f"at least 0, got {prior}; min_confidence must be from 0 to 1, got {min_confidence}"
        )
    steps = Steps.of(facts)
    preds = steps.num_predicates
    edges = _edges(facts)
    parts: list[tuple[Ints, Ints, tuple[Longs, Longs, Longs, Longs]]] = []
    totals: dict[tuple[int, ...], int] = {}
    looked = 0
    for size in range(1, length + 1):
        bodies = np.array(list(_bodies(size, preds, totals)), np.int32).reshape(-1, size)
        for start in range(0, len(bodies), PART):
            part = np.full((len(bodies[start : start + PART]), LONGEST), -1, np.int32)
            part[:, :size] = bodies[start : start + PART]
            lengths = np.full(len(part), size, np.int32)
            pairs = np.zeros(len(part), np.int64)
            found = count_chains(
                part, lengths, steps.ptr, steps.ends, steps.num_entities, preds, *edges, pairs,
                min_support, min_confidence, prior,
            )  # fmt: skip
            parts.append((part, lengths, found))
            totals.update(zip(map(tuple, part[:, :size].tolist()), pairs.tolist(), strict=True))
            if progress:
                progress(start + len(part), len(bodies))
        looked += len(bodies)
    return _kept(parts, vocab, preds, most, prior, looked)


def write_rules(path: Path, rules: Rules, vocab: Vocab, note: str = "") -> None:
    """Write rules one a line, as `name:weight:body -> head`; `parse_rules` reads them back."""
    lines = [f"# {note}"] if note else []
    lines += [rules.text(r, vocab) for r in range(len(rules))]
    write_atomic(path, ("\n".join(lines) + "\n").encode())


def chains_of(rules: Rules) -> Chains:
    """Those of the rules that are chains from the head's first variable to its second."""
    preds = rules.num_predicates
    found: list[tuple[int, float, int, list[int]]] = []
    skipped = []
    for r in range(len(rules)):
        head, body = rules.clause(r)
        path = _path(head, body, rules.num_entities, preds)
        if path is None:
            skipped.append(rules.names[r])
            continue
        back = [step - preds if step >= preds else step + preds for step in reversed(path)]
        found.append((head[0], -float(rules.weight[r]), 2 * r, path))
        found.append((head[0] + preds, -float(rules.weight[r]), 2 * r + 1, back))
    found.sort()
    bodies = np.full((len(found), LONGEST), -1, np.int32)
    for i, (_, _, _, path) in enumerate(found):
        bodies[i, : len(path)] = path
    heads = np.array([step for step, _, _, _ in found], np.int64)
    counts = np.bincount(heads, minlength=2 * preds)
    return Chains(
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        bodies,
        np.array([len(path) for _, _, _, path in found], np.int32),
        np.array([-negative for _, negative, _, _ in found], np.float64),
        np.array([origin for _, _, origin, _ in found], np.int64),
        tuple(skipped),
    )


def _edges(facts: Facts) -> tuple[Longs, Ints, Ints]:
    """Every entity's edges as steps: where they begin, the step, the other end."""
    h, p, t = facts.triples.T.astype(np.int64)
    start = np.concatenate([h, t])
    step = np.concatenate([p, p + facts.num_predicates])
    end = np.concatenate([t, h])
    order = np.argsort(start, kind="stable")
    sizes = np.bincount(start, minlength=facts.num_entities)
    ptr = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return ptr, step[order].astype(np.int32), end[order].astype(np.int32)


def _bodies(size: int, preds: int, totals: dict[tuple[int, ...], int]) -> Iterator[tuple[int, ...]]:
    """Bodies worth counting, each once for itself and its mirror image.

    A body with an empty part has no pairs, and those of a mirror are the same pairs reversed.
    """
    steps = range(2 * preds)
    if size == 1:
        # A step and its reverse are mirrors of each other.
        yield from ((step,) for step in range(preds))
        return

    def mirror(body: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(s - preds if s >= preds else s + preds for s in reversed(body))

    def alive(body: tuple[int, ...]) -> bool:
        return totals.get(min(body, mirror(body)), 0) > 0

    shorter = [(step,) for step in steps] if size == 2 else [(a, b) for a in steps for b in steps]
    for front in shorter:
        if not alive(front):
            continue
        for step in steps:
            body = (*front, step)
            if body <= mirror(body) and alive(body[1:]):
                yield body


def _kept(
    parts: list[tuple[Ints, Ints, tuple[Longs, Longs, Longs, Longs]]],
    vocab: Vocab,
    preds: int,
    most: int,
    prior: float,
    looked: int,
) -> Mined:
    """The best rules of each head, as rules."""
    rows: list[tuple[int, float, tuple[int, ...], int, int]] = []
    for bodies, lengths, (which, heads, support, pairs) in parts:
        for b, head, hits, of in zip(which, heads, support, pairs, strict=True):
            path = tuple(bodies[b, : lengths[b]].tolist())
            if head >= preds:
                # What the body says of a reversed head, its mirror says of the head itself.
                path = tuple(s - preds if s >= preds else s + preds for s in reversed(path))
            confidence = hits / (of + prior)
            rows.append((int(head) % preds, -float(confidence), path, int(hits), int(of)))
    rows.sort(key=lambda row: (row[0], row[1], len(row[2]), row[2]))
    place: dict[int, int] = {}
    kept = []
    for row in rows:
        place[row[0]] = place.get(row[0], 0) + 1
        if place[row[0]] <= most:
            kept.append(row)
    clauses = [_clause(head, path, preds, vocab.num_entities) for head, _, path, _, _ in kept]
    weights = [-negative for _, negative, _, _, _ in kept]
    names = [f"m{number}" for number in range(len(kept))]
    return Mined(
        Rules.of(clauses, vocab, weights, names),
        np.array([row[3] for row in kept], np.int64),
        np.array([row[4] for row in kept], np.int64),
        looked,
        len(rows) - len(kept),
    )


def _clause(head: int, path: tuple[int, ...], preds: int, n: int) -> Clause:
    """The rule of a chain: X is variable 0, Y is 1, those between follow."""
    nodes = [n, *range(n + 2, n + 1 + len(path)), n + 1]
    body = [
        (step, nodes[i], nodes[i + 1]) if step < preds else (step - preds, nodes[i + 1], nodes[i])
        for i, step in enumerate(path)
    ]
    return (head, n, n + 1), body


def _path(
    head: tuple[int, int, int], body: list[tuple[int, int, int]], n: int, preds: int
) -> list[int] | None:
    """The steps from the head's first variable to its second through every atom, if they chain."""
    _, start, end = head
    terms = {start, end, *(t for _, x, y in body for t in (x, y))}
    if start == end or min(terms) < n or not 1 <= len(body) <= LONGEST:
        return None
    left = list(body)
    path: list[int] = []
    at = start
    while left:
        near = [atom for atom in left if at in atom[1:]]
        # In a chain a variable is met by two atoms, and one of them is behind us.
        if len(near) != 1 or near[0][1] == near[0][2]:
            return None
        predicate, x, y = near[0]
        path.append(predicate if x == at else predicate + preds)
        at = y if x == at else x
        left.remove(near[0])
    return path if at == end else None
