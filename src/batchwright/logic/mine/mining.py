"""Mine rules by counting: chains of up to three edges that predict another edge.

A chain rule is p(X, Y) <- q1(X, Z1), q2(Z1, Z2), q3(Z2, Y), each edge read in either direction.
Its pairs are all distinct (X, Y) that the body joins, its support those that are facts of the head,
and

    confidence = support / (pairs + prior)

so that a rule that held twice out of twice is not taken as certain. A chain never goes back over
the edge it came by, and a pair that is joined only through the head's own fact is not counted: such
a chain would not be there for a fact that is still unknown.

Bodies are found as paths between the two ends of facts, and those found most often are counted
first. On small graphs everything is counted. On large ones facts, paths and the entities that a
body begins at are drawn at random, so that neither time nor memory depends on hubs.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from batchwright import rng
from batchwright.errors import ConfigError
from batchwright.files import write_atomic
from batchwright.logic.facts import Facts
from batchwright.logic.mine.paths import Adjacency, adjacency, count_bodies, distinct, find_paths
from batchwright.logic.rows import index_rows
from batchwright.logic.rules import Clause, Rules
from batchwright.logic.vocab import Vocab
from batchwright.permutation import permutation
from batchwright.sealed import sealed_text

__all__ = [
    "LONGEST",
    "MIN_CONFIDENCE",
    "Chains",
    "Mined",
    "Steps",
    "chains_of",
    "mine",
    "write_rules",
]

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]

LONGEST = 3
"""Edges of the longest chain that is mined or scored."""

MIN_CONFIDENCE = 0.01
"""The lowest confidence of a mined rule, unless told otherwise."""

FACTS = 1000
"""Facts of each relation between whose ends paths are looked for."""
SOME = 16
"""Facts for which that is done at a time: between two of them Ctrl-C is heard."""
NAMED = 256
"""Facts whose paths are drawn by one key."""
PATHS = 1024
"""Paths of each length that are looked at for one fact."""
KEYS = 2**21
"""Paths that are kept in memory at a time, at least."""
BODIES = 20_000
"""Bodies of each length that are counted: those found most often."""
EDGES = 100_000
"""Edges looked at to count one body; an entity from which a tenth does not suffice is left out."""
WORK = 2**19
"""Edges looked at between two moments at which Ctrl-C and the end of the time are heard, or those
of one body if they are more."""


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """The edges of a graph in both directions: step s is predicate s, step s + P its reverse."""

    ptr: Ints
    """Of step s from x: row s * N + x of `batchwright.logic.rows`."""
    ends: Ints
    num_entities: int
    num_predicates: int

    @classmethod
    def of(cls, facts: Facts) -> "Steps":
        n, preds = facts.num_entities, facts.num_predicates
        h, p, t = facts.triples.T.astype(np.int64)
        rows = np.concatenate([p * n + h, np.sort((p + preds) * n + t)])
        return cls(
            index_rows(rows, 2 * preds, n),
            np.concatenate([facts.ps_obj, facts.po_sub]).astype(np.int32),
            n,
            preds,
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
    sampled: int
    """Bodies for which some of the entities they begin at were left out."""
    left: int
    """Bodies that were found but not counted: too rare, or no time was left."""
    seconds: float
    in_time: bool
    """False if the time was up before every body was counted."""


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
    facts: Facts | ArrayLike,
    vocab: Vocab,
    *,
    length: int = LONGEST,
    min_support: int = 2,
    min_confidence: float = MIN_CONFIDENCE,
    most: int = 300,
    prior: float = 5.0,
    seconds: float = 300.0,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Mined:
    """Mine chain rules of up to `length` edges; at most `most` are kept for each predicate.

    `facts` may be triples, which saves making an index of them. No more than `seconds` are spent on
    counting; rules that were counted by then are kept. Ctrl-C is heard between bodies, after
    `WORK` edges or the first body that needs more.

    >>> vocab = Vocab.of(["a", "b", "c", "d"], ["child", "parent"])
    >>> facts = Facts.of([(0, 0, 1), (1, 1, 0), (2, 0, 3), (3, 1, 2)], vocab)
    >>> mined = mine(facts, vocab, length=1)
    >>> [mined.rules.text(r, vocab) for r in range(len(mined.rules))]
    ['m0:0.285714285714:parent(Y,X) -> child(X,Y)', 'm1:0.285714285714:child(Y,X) -> parent(X,Y)']
    """
    if not 1 <= length <= LONGEST:
        raise ConfigError(f"length must be 1, 2 or {LONGEST}, got {length}")
    if min_support < 1 or most < 1 or prior < 0 or not 0 <= min_confidence <= 1 or seconds <= 0:
        raise ConfigError(
            f"min_support and most must be at least 1, got {min_support} and {most}; prior must be "
            f"at least 0, got {prior}; min_confidence must be from 0 to 1, got {min_confidence}; "
            f"seconds must be above 0, got {seconds}"
        )
    began = time.monotonic()
    n, preds = vocab.num_entities, vocab.num_predicates
    triples = distinct(facts.triples if isinstance(facts, Facts) else facts, n)
    index = adjacency(triples, n, preds)
    found, found_all = _candidates(triples, index, preds, length, min_support, seed, began, seconds)
    bodies = found[:, :LONGEST]
    lengths = (bodies >= 0).sum(1).astype(np.int32)
    stamp, uses, out = np.full(n, -1, np.int64), np.zeros(n, np.uint8), np.empty(n, np.int32)
    columns: list[tuple[Longs, ...]] = []
    at = now = cut = 0
    key = np.uint64(rng.key(seed, "mine/starts"))
    while at < len(bodies) and (at == 0 or time.monotonic() - began < seconds):
        *found_here, now, short, at = count_bodies(
            bodies, lengths, at, index, n, preds, EDGES, WORK, key, min_support, min_confidence,
            prior, stamp, uses, out, now,
        )  # fmt: skip
        columns.append(tuple(found_here))
        cut += short
        if progress:
            progress(at, len(bodies))
    counted = [np.concatenate(each) for each in zip(*columns, strict=True)] if columns else []
    rules, support, pairs, dropped = _kept(bodies, counted, vocab, most, prior)
    return Mined(
        rules,
        support,
        pairs,
        at,
        dropped,
        cut,
        found_all - at,
        time.monotonic() - began,
        at == len(bodies),
    )


def write_rules(path: Path, rules: Rules, vocab: Vocab, note: str = "") -> None:
    """Write rules one a line, as `name:weight:body -> head`; `parse_rules` reads them back.

    The first and the last line have their checksum; without these they can be edited by hand.
    """
    lines = [f"# {note}"] if note else []
    lines += [rules.text(r, vocab) for r in range(len(rules))]
    text = sealed_text("\n".join(lines) + "\n", "delete this and the last line to edit the rules")
    write_atomic(path, text.encode())


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


def _candidates(
    triples: Ints,
    index: Adjacency,
    preds: int,
    length: int,
    least: int,
    seed: int,
    began: float,
    seconds: float,
) -> tuple[Ints, int]:
    """Bodies that join the ends of facts, each once for itself and its mirror image.

    The one found most often first, of each length at most `BODIES`; and how many there are in all.
    A third of the time is for this.
    """
    order = permutation(len(triples), np.uint64(rng.key(seed, "mine/facts")))
    place = np.empty(len(order), np.int64)
    by_relation = np.argsort(triples[order, 1], kind="stable")
    counts = np.bincount(triples[:, 1], minlength=preds)
    place[by_relation] = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    # The first facts of every relation, then the second ones: whenever it ends, all have had some.
    drawn = triples[order[np.argsort(place, kind="stable")][: np.minimum(counts, FACTS).sum()]]
    bound = 2 * (2 * preds + 1) * (PATHS + 2)
    keys, hits = np.empty(0, np.int64), np.empty(0, np.int64)
    out = np.empty(max(KEYS, bound), np.int64)
    at = count = 0
    whole = len(drawn) == len(triples)
    more = len(drawn) > 0
    while more:
        key = np.uint64(rng.key(seed, "mine/paths", at // NAMED))
        some = drawn[at : min(at + SOME, (at // NAMED + 1) * NAMED)]
        count, done, all_paths = find_paths(
            some, index, preds, length, PATHS, key, at % NAMED, out, count
        )
        at += done
        whole = whole and all_paths
        more = at < len(drawn) and time.monotonic() - began < seconds / 3
        if done < len(some) or not more:
            keys, hits = _counted(keys, hits, out[:count])
            count = 0
    # A path that was drawn by chance may be the only one of its kind.
    often = hits >= (least if whole else max(2, least))
    keys, hits = keys[often], hits[often]
    m = 2 * preds + 1
    path = keys // preds
    body = np.stack([path // (m * m), path // m % m, path % m], 1).astype(np.int64) - 1
    size = (body >= 0).sum(1)
    back = np.full_like(body, -1)
    for i in range(LONGEST):
        has = size > i
        step = body[has, size[has] - 1 - i]
        back[has, i] = np.where(step >= preds, step - preds, step + preds)
    codes = [(each + 1) @ np.array([m * m, m, 1]) for each in (body, back)]
    names, place_of = np.unique(np.minimum(*codes), return_inverse=True)
    total = np.bincount(place_of, hits, len(names)).astype(np.int64)
    found = np.stack([names // (m * m), names // m % m, names % m], 1).astype(np.int32) - 1
    sizes = (found >= 0).sum(1)
    ranked = np.lexsort((names, -total, sizes))
    first = np.searchsorted(sizes[ranked], sizes[ranked])
    kept = ranked[np.arange(len(ranked)) - first < BODIES]
    best = kept[np.lexsort((names[kept], -total[kept], sizes[kept] > 2))]
    return np.ascontiguousarray(found[best]), len(names)


def _counted(keys: Longs, hits: Longs, more: Longs) -> tuple[Longs, Longs]:
    """Each key once with its hits, those of more keys added."""
    new, count = np.unique(more, return_counts=True)
    both, place_of = np.unique(np.concatenate([keys, new]), return_inverse=True)
    total = np.bincount(place_of, np.concatenate([hits, count]), len(both))
    return both, total.astype(np.int64)


def _kept(
    bodies: Ints, counted: list[Longs], vocab: Vocab, most: int, prior: float
) -> tuple[Rules, Longs, Longs, int]:
    """The best rules of each head as rules, their support and pairs; how many were left out."""
    preds = vocab.num_predicates
    if not counted:
        return Rules.of([], vocab), np.empty(0, np.int64), np.empty(0, np.int64), 0
    which, heads, support, pairs = counted
    body = bodies[which].astype(np.int64)
    size = (body >= 0).sum(1)
    # What the body says of a reversed head, its mirror says of the head itself.
    turned = np.flatnonzero(heads >= preds)
    mirrored = np.full((len(turned), LONGEST), -1, np.int64)
    for i in range(LONGEST):
        has = size[turned] > i
        step = body[turned[has], size[turned[has]] - 1 - i]
        mirrored[has, i] = np.where(step >= preds, step - preds, step + preds)
    body[turned] = mirrored
    head = heads % preds
    confidence = support / (pairs + prior)
    order = np.lexsort((body[:, 2], body[:, 1], body[:, 0], size, -confidence, head))
    first = np.searchsorted(head[order], head[order])
    kept = order[np.arange(len(order)) - first < most]
    clauses = [
        _clause(int(head[i]), tuple(body[i, : size[i]].tolist()), preds, vocab.num_entities)
        for i in kept.tolist()
    ]
    rules = Rules.of(
        clauses, vocab, confidence[kept].tolist(), [f"m{number}" for number in range(len(kept))]
    )
    return rules, support[kept], pairs[kept], len(order) - len(kept)


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
