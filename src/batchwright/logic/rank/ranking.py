"""Filtered ranking: the rank of the true answer among all entities, other true answers excluded.

For every triple p(h, t) there are two queries, p(h, ?) and p(?, t). Every entity is a candidate;
true answers in any part of the graph, other than the one queried, are filtered out. With `greater`
candidates that score higher than the answer and `ties` that score the same, its rank is

    1 + greater + ties / 2

(the realistic rank), so that a constant scorer does not come first. A score that is not a number
counts as minus infinity. Optimistic and pessimistic ranks show how much ties matter; the expected
reciprocal rank is the mean over all orders of the ties.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from batchwright.errors import ConfigError
from batchwright.jit import kernel
from batchwright.logic.facts import Facts
from batchwright.logic.rows import row_span
from batchwright.permutation import mix
from batchwright.rng import key

__all__ = [
    "SIDES",
    "Block",
    "Metrics",
    "Ranks",
    "Scorer",
    "Side",
    "all_scores",
    "average_precision",
    "blocks",
    "count_ranks",
    "evenly_spread",
    "rank",
    "summary",
]

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Floats = NDArray[np.float32]

Side = Literal["tail", "head"]
"""Which end of the triple is queried."""
SIDES: tuple[Side, ...] = ("tail", "head")

BLOCK_CELLS = 2**24
"""Scores of one block of queries: 64 MiB, whatever the number of entities."""

TIE_ALARM = 0.002
"""The gap between optimistic and pessimistic MRR from which on ties distort the result."""


class Scorer(Protocol):
    """Anything that scores every entity as the missing end of a triple.

    One that has `num_entities` and `num_predicates` knows only the first so many, as after
    training without the test part, and may have a method `unseen(predicates, side)` for queries
    about an entity that it does not know: see `all_scores`.
    """

    def scores(self, given: Ints, predicates: Ints, side: Side) -> Floats:
        """Scores [Q, N]: of p(given, e) for every entity e if `side` is tail, else of p(e, given).

        The array is the caller's to change.
        """
        ...


def all_scores(scorer: Scorer, given: Ints, predicates: Ints, side: Side, entities: int) -> Floats:
    """The scores of all `entities`, [Q, entities], also where the scorer knows fewer.

    Entities that it does not know score as the lowest that it does. A query about an entity that it
    does not know is answered by what the scorer says of `unseen` ones, and if it says nothing, or
    does not know the predicate, all entities score alike.
    """
    known = getattr(scorer, "num_entities", entities)
    named = np.asarray(predicates < getattr(scorer, "num_predicates", np.iinfo(np.int32).max))
    asked = named & (given < known)
    if known >= entities and asked.all():
        return scorer.scores(given, predicates, side)
    found = np.zeros((len(given), entities), np.float32)
    unseen: Callable[[Ints, Side], Floats] | None = getattr(scorer, "unseen", None)
    parts = [(asked, scorer.scores(given[asked], predicates[asked], side))] if asked.any() else []
    if unseen is not None and (others := named & ~asked).any():
        parts.append((others, unseen(predicates[others], side)))
    for where, scores in parts:
        found[where, :known] = scores
        found[where, known:] = np.nanmin(scores, axis=1, keepdims=True)
    return found


@dataclass(frozen=True, slots=True)
class Metrics:
    """Means over some queries."""

    queries: int
    mrr: float
    """Of the realistic rank: the middle of its ties."""
    expected_mrr: float
    """Over all orders of the ties."""
    hits_1: float
    hits_3: float
    hits_10: float
    mean_rank: float
    optimistic_mrr: float
    pessimistic_mrr: float

    @property
    def tied(self) -> bool:
        """Whether the order of ties would change the result."""
        return self.optimistic_mrr - self.pessimistic_mrr > TIE_ALARM


@dataclass(frozen=True, slots=True, eq=False)
class Ranks:
    """How many candidates score higher than the answer, and how many the same, for each query, [Q].

    >>> ranks = Ranks(np.zeros(2, np.int32), np.array([True, True]), np.array([0, 2]),
    ...               np.array([0, 2]))
    >>> ranks.middle.tolist(), round(ranks.metrics().mrr, 4)
    ([1.0, 4.0], 0.625)
    """

    predicates: Ints
    is_tail: NDArray[np.bool_]
    greater: Longs
    ties: Longs
    sampled_greater: Longs = field(default_factory=lambda: np.empty(0, np.int64))
    """The same among a sample of wrong candidates; empty if none was drawn."""
    sampled_ties: Longs = field(default_factory=lambda: np.empty(0, np.int64))

    def __len__(self) -> int:
        return len(self.greater)

    @property
    def middle(self) -> NDArray[np.float64]:
        return np.asarray(1 + self.greater + self.ties / 2, np.float64)

    def where(self, chosen: NDArray[np.bool_]) -> "Ranks":
        """Some of the queries."""
        sampled = chosen[: len(self.sampled_greater)]
        return Ranks(
            self.predicates[chosen],
            self.is_tail[chosen],
            self.greater[chosen],
            self.ties[chosen],
            self.sampled_greater[sampled],
            self.sampled_ties[sampled],
        )

    def sampled(self) -> "Ranks":
        """The ranks among the sampled candidates instead of all."""
        return Ranks(self.predicates, self.is_tail, self.sampled_greater, self.sampled_ties)

    def metrics(self) -> Metrics:
        if not len(self):
            raise ConfigError("there are no queries to average over; rank at least one triple")
        best, worst = 1.0 + self.greater, 1.0 + self.greater + self.ties
        middle = self.middle
        harmonic = np.concatenate([[0.0], np.cumsum(1 / np.arange(1, worst.max() + 1))])
        over_ties = harmonic[self.greater + self.ties + 1] - harmonic[self.greater]
        return Metrics(
            queries=len(self),
            mrr=float((1 / middle).mean()),
            expected_mrr=float((over_ties / (self.ties + 1)).mean()),
            hits_1=float((middle <= 1).mean()),
            hits_3=float((middle <= 3).mean()),
            hits_10=float((middle <= 10).mean()),
            mean_rank=float(middle.mean()),
            optimistic_mrr=float((1 / best).mean()),
            pessimistic_mrr=float((1 / worst).mean()),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Some queries of one side, and how to count the ranks of their answers."""

    side: Side
    first: int
    """The number of the first query among all of both sides."""
    given: Ints
    predicates: Ints
    answers: Ints
    known: Facts

    def scores(self, scorer: Scorer) -> Floats:
        """Of all entities, [Q, N]; see `all_scores`."""
        entities = self.known.num_entities
        return all_scores(scorer, self.given, self.predicates, self.side, entities)

    def count(self, scores: Floats, sampled: int = 0, seed: int = 0) -> tuple[Longs, ...]:
        """Candidates higher than and equal to each answer, among all and among a sample.

        What is sampled for a query depends on `seed` and its number, not on the block.
        """
        if scores.shape != (len(self.given), self.known.num_entities):
            raise ConfigError(
                f"a scorer returned scores of shape {list(scores.shape)} for {len(self.given)} "
                f"queries over {self.known.num_entities:,} entities; every entity needs a score"
            )
        tails = self.side == "tail"
        counts = np.zeros((4, len(self.given)), np.int64)
        count_ranks(
            np.ascontiguousarray(scores, np.float32),
            self.answers,
            self.predicates.astype(np.int64) * self.known.num_entities + self.given,
            self.known.ps_ptr if tails else self.known.po_ptr,
            self.known.ps_obj if tails else self.known.po_sub,
            sampled,
            np.uint64(key(seed, "ranking/sampled")),
            self.first,
            counts,
        )
        return tuple(counts)


def blocks(
    triples: Ints, known: Facts, sides: Sequence[Side] = SIDES, cells: int = BLOCK_CELLS
) -> Iterator[Block]:
    """The queries of all triples, side after side, in blocks that fit in memory."""
    rows = max(1, cells // max(1, known.num_entities))
    for number, side in enumerate(sides):
        given, asked = (0, 2) if side == "tail" else (2, 0)
        for start in range(0, len(triples), rows):
            part = triples[start : start + rows]
            yield Block(
                side,
                number * len(triples) + start,
                np.ascontiguousarray(part[:, given]),
                np.ascontiguousarray(part[:, 1]),
                np.ascontiguousarray(part[:, asked]),
                known,
            )


def rank(
    scorer: Scorer,
    triples: Ints,
    known: Facts,
    *,
    sides: Sequence[Side] = SIDES,
    sampled: int = 0,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Ranks:
    """Rank the answers of all triples; `known` holds whatever is true in any part of the graph.

    Ranks among `sampled` wrong candidates are counted too, to compare with published results of
    that protocol: it is far easier.
    """
    total = len(triples) * len(sides)
    counts = np.zeros((4, total), np.int64)
    for block in blocks(triples, known, sides):
        scores = block.scores(scorer)
        end = block.first + len(block.given)
        counts[:, block.first : end] = block.count(scores, sampled, seed)
        if progress:
            progress(end, total)
    drawn = counts[2:] if sampled else counts[2:, :0]
    asked = np.repeat([side == "tail" for side in sides], len(triples))
    return Ranks(np.tile(triples[:, 1], len(sides)), asked, counts[0], counts[1], *drawn)


def evenly_spread(triples: Ints, most: int) -> Ints:
    """At most `most` of the triples, evenly spread over all of them; 0: all."""
    if not most or len(triples) <= most:
        return triples
    return triples[np.linspace(0, len(triples) - 1, most).astype(np.int64)]


def summary(ranks: Ranks, names: Sequence[str]) -> dict[str, Any]:
    """Metrics over both sides, each side, sampled candidates and each relation, ready for JSON."""
    found: dict[str, Any] = {"both": asdict(ranks.metrics()), "tied": ranks.metrics().tied}
    for side, chosen in (("tail", ranks.is_tail), ("head", ~ranks.is_tail)):
        if chosen.any():
            found[side] = asdict(ranks.where(chosen).metrics())
    if len(ranks.sampled_greater):
        found["sampled"] = asdict(ranks.sampled().metrics())
    by_relation: dict[str, Mapping[str, Any]] = {}
    for predicate in np.unique(ranks.predicates):
        part = ranks.where(ranks.predicates == predicate)
        by_relation[names[predicate]] = asdict(part.metrics())
    return {**found, "by_relation": by_relation}


def average_precision(
    scorer: Scorer, triples: Ints, candidates: Ints, *, softmax: bool = False
) -> float:
    """The area under the precision-recall curve over all pairs of a head and a candidate tail.

    The heads are those of `triples`, which also say what is true. Scores are compared over all
    pairs at once; equal scores are taken together, so that their order cannot help. With `softmax`
    the scores of each head first become log-probabilities over the candidates, for queries that
    have one answer among them but scores that do not compare between heads.
    """
    heads, first = np.unique(triples[:, :2], axis=0, return_index=True)
    if not len(heads) or not len(candidates):
        raise ConfigError("average precision needs at least one triple and one candidate")
    asked = np.ascontiguousarray(triples[first].T)
    entities = max(int(triples[:, [0, 2]].max()), int(candidates.max())) + 1
    entities = max(entities, getattr(scorer, "num_entities", 0))
    found = all_scores(scorer, asked[0], asked[1], "tail", entities)
    scores = found[:, candidates].astype(np.float64)
    scores[np.isnan(scores)] = -np.inf
    if softmax:
        top = np.maximum(scores.max(axis=1, keepdims=True), -1e300)
        scores = scores - top - np.log(np.exp(scores - top).sum(axis=1, keepdims=True))
    true = {tuple(triple) for triple in triples.tolist()}
    label = np.array([[(h, p, int(c)) in true for c in candidates] for h, p in heads.tolist()])
    levels, group = np.unique(-scores.ravel(), return_inverse=True)
    hits = np.bincount(group, weights=label.ravel(), minlength=len(levels))
    right, seen = np.cumsum(hits), np.cumsum(np.bincount(group, minlength=len(levels)))
    if not right[-1]:
        raise ConfigError(
            "none of the candidates is the tail of any triple; give candidates that are"
        )
    return float((hits * right / seen).sum() / right[-1])


@kernel
def count_ranks(
    scores: Floats,
    answers: Ints,
    rows: Longs,
    ptr: Ints,
    others: Ints,
    sampled: int,
    seed: np.uint64,
    first: int,
    counts: Longs,
) -> None:
    """Count into [4, Q]: higher and equal among all, and higher and equal among the sample."""
    n = scores.shape[1]
    marked = np.full(n, -1, np.int64)
    for q in range(scores.shape[0]):
        line = scores[q]
        wanted = line[answers[q]]
        if np.isnan(wanted):
            wanted = np.float32(-np.inf)
        higher = 0
        equal = 0
        for e in range(n):
            # Comparisons with NaN are false, so it is never higher; it equals minus infinity.
            if line[e] > wanted:
                higher += 1
            elif line[e] == wanted or (wanted == -np.inf and np.isnan(line[e])):
                equal += 1
        wrong = n
        seen_answer = False
        begin, end = row_span(ptr, rows[q])
        for i in range(begin, end):
            e = others[i]
            marked[e] = q
            wrong -= 1
            seen_answer = seen_answer or e == answers[q]
            if line[e] > wanted:
                higher -= 1
            elif line[e] == wanted or (wanted == -np.inf and np.isnan(line[e])):
                equal -= 1
        if not seen_answer:
            # A query whose own triple is not among the known ones.
            marked[answers[q]] = q
            wrong -= 1
            equal -= 1
        counts[0, q] = higher
        counts[1, q] = equal
        if sampled == 0:
            continue
        if wrong <= sampled:
            counts[2, q] = higher
            counts[3, q] = equal
            continue
        draws = mix(seed, np.uint64(first + q))
        counter = 0
        left = sampled
        while left > 0:
            high = mix(draws, np.uint64(counter)) >> np.uint64(32)
            counter += 1
            e = int((high * np.uint64(n)) >> np.uint64(32))
            if marked[e] == q:
                continue
            marked[e] = q
            left -= 1
            if line[e] > wanted:
                counts[2, q] += 1
            elif line[e] == wanted or (wanted == -np.inf and np.isnan(line[e])):
                counts[3, q] += 1
