"""The sum of what an embedding and what rules say of open queries."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchwright.errors import ConfigError
from batchwright.logic.facts import Facts
from batchwright.logic.rank.ranking import Ranks, Scorer, Side, blocks, evenly_spread

__all__ = ["BETAS", "FLOORS", "LINKED", "Choice", "Hybrid", "Links", "choose_beta", "rank_each"]

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

BETAS = (0.0, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Weights of the proofs that are tried on the valid part."""

FLOORS = (None, 0.001, 0.01, 0.1)
"""What is tried on the valid part as `floor`; see `Hybrid`."""

LINKED = (0.0, 2.0, 20.0)
"""What is tried on the valid part as `linked`; see `Hybrid`."""

CHOSEN = 1500
"""Triples of valid that `floor` and `linked` are chosen on."""

FEWEST = 50
"""Queries that a predicate needs for a weight of its own."""


class Links:
    """Scores of 1 for entities that some fact joins to the given one, and of 0 for all others."""

    def __init__(self, facts: Facts) -> None:
        n = facts.num_entities
        heads, _, tails = facts.triples.astype(np.int64).T
        pairs = np.unique(np.concatenate([heads * n + tails, tails * n + heads]))
        self.num_entities, self.num_predicates = n, facts.num_predicates
        self._ends = pairs % max(1, n)
        self._ptr = np.searchsorted(pairs, np.arange(n + 1) * n)

    def scores(self, given: Ints, predicates: Ints, side: Side) -> Floats:
        found = np.zeros((len(given), self.num_entities), np.float32)
        for row, entity in zip(found, given.tolist(), strict=True):
            row[self._ends[self._ptr[entity] : self._ptr[entity + 1]]] = 1
        return found


class Hybrid:
    """The embedding's scores plus `beta` times those of the proofs.

    `beta` is one number, or one for each predicate and side, [P, 2] with the tail first. Where it
    is 0 the scores are the embedding's own, bit for bit.

    With a `floor` it is `beta` times log(score + floor), scores below 0 counted as 0. The
    embedding's scores are logarithms of probabilities, so evidence then weighs by its ratio: twice
    as much evidence means the same whether there is much or little of it. The floor is what there
    is for entities that no proof reaches.

    `linked` is taken from the scores of entities that a fact joins to the given one, by whatever
    predicate and in either direction: there are graphs whose valid and test triples join no two
    entities that train joins, since such triples were removed when they were made.
    """

    def __init__(
        self,
        kge: Scorer,
        proofs: Scorer,
        beta: float | Doubles,
        floor: float | None = None,
        linked: float = 0.0,
        facts: Facts | None = None,
    ) -> None:
        if floor is not None and not floor > 0:
            raise ConfigError(f"the floor must be above 0, or None for no logarithm, got {floor}")
        if linked and facts is None:
            raise ConfigError(f"linked {linked:g} needs the facts that link; give facts as well")
        self.linked = linked
        self._links = Links(facts) if linked and facts is not None else None
        self.kge = kge
        self.proofs = proofs
        self.beta = np.asarray(beta, np.float64)
        self.floor = floor
        self.num_entities: int = getattr(kge, "num_entities", np.iinfo(np.int32).max)
        self.num_predicates: int = getattr(kge, "num_predicates", np.iinfo(np.int32).max)

    def scores(self, given: Ints, predicates: Ints, side: Side) -> Floats:
        scores = self.kge.scores(given, predicates, side)
        column = 0 if side == "tail" else 1
        beta = self.beta if self.beta.ndim == 0 else self.beta[predicates, column]
        weight = np.broadcast_to(beta, len(given)).astype(np.float32)
        used = np.flatnonzero(weight)
        if used.size:
            proofs = _floored(self.proofs.scores(given[used], predicates[used], side), self.floor)
            scores[used] += weight[used, None] * proofs
        if self._links is not None:
            scores -= np.float32(self.linked) * self._links.scores(given, predicates, side)
        return scores

    def unseen(self, predicates: Ints, side: Side) -> Floats:
        """What the proofs say of an entity that neither knows; an embedding has nothing to say."""
        made = getattr(self.proofs, "unseen", None)
        if made is None:
            return np.zeros((len(predicates), self.num_entities), np.float32)
        scores: Floats = made(predicates, side)
        return scores


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """The weight of the proofs that did well on the valid part."""

    beta: float
    """One for all predicates."""
    table: Doubles
    """[P, 2]: one for each predicate and side; all the same where their own did not do better."""
    own: bool
    """Whether a weight for each predicate did better on the held-out half of the queries."""
    floor: float | None
    """The floor of the proofs' logarithms; None if their scores are better as they are."""
    linked: float
    """What is taken from entities that a fact joins to the given one."""
    mrr: float
    """On valid with `table`: what the choice was made by, so an optimistic estimate."""


def rank_each(
    triples: Ints,
    known: Facts,
    scorers: Sequence[Scorer],
    make: Callable[[list[Floats]], Sequence[Floats]],
) -> list[Ranks]:
    """Ranks for every combination that `make` forms of the scorers' scores, in one pass."""
    counts: list[list[tuple[NDArray[np.int64], ...]]] = []
    preds, tails = [], []
    for block in blocks(triples, known):
        scores = [block.scores(scorer) for scorer in scorers]
        counts.append([block.count(joined)[:2] for joined in make(scores)])
        preds.append(block.predicates)
        tails.append(np.full(len(block.given), block.side == "tail"))
    predicates, is_tail = np.concatenate(preds), np.concatenate(tails)
    found = []
    for i in range(len(counts[0])):
        greater, ties = (np.concatenate([block[i][c] for block in counts]) for c in range(2))
        found.append(Ranks(predicates, is_tail, greater, ties))
    return found


def choose_beta(
    kge: Scorer,
    proofs: Scorer,
    valid: Ints,
    known: Facts,
    betas: Sequence[float] = BETAS,
    floors: Sequence[float | None] = FLOORS,
    facts: Facts | None = None,
) -> Choice:
    """The weights of the proofs that rank well on `valid`, which must not be among their facts.

    First the floor is chosen, on at most `CHOSEN` triples of valid, evenly spread, each floor with
    the weight that is best for it: the first one, unless the best of the others does better by
    more than a standard error. What links of `facts` take is chosen likewise; nothing without
    `facts`.

    Many weights differ by less than chance does, so the middle one of those that are within a
    standard error of the best is taken. Predicates get their own weights only if such weights,
    chosen on one half of the queries, did better than a common one on the held-out half, by more
    than a standard error.
    """

    links = [] if facts is None else [Links(facts)]

    def gained(
        triples: Ints, floors: Sequence[float | None], linked: Sequence[float] = (0.0,)
    ) -> tuple[Doubles, Ranks]:
        """The reciprocal ranks [W, B, Q] of every pair of a floor and what links take."""

        def joined(scores: list[Floats]) -> list[Floats]:
            plain, proved = scores[:2]
            raised = [_floored(proved, floor) for floor in floors]
            less = [plain - np.float32(x) * scores[2] if x else plain for x in linked]
            return [
                start + np.float32(b) * each if b else start
                for each in raised
                for start in less
                for b in betas
            ]

        found = rank_each(triples, known, [kge, proofs, *links], joined)
        gain = np.stack([1 / ranks.middle for ranks in found])
        return gain.reshape(-1, len(betas), gain.shape[-1]), found[0]

    some = evenly_spread(valid, CHOSEN)
    floor, taken = floors[0], 0.0
    if len(floors) > 1:
        floor = floors[_clearly_best(gained(some, floors)[0])]
    if links:
        taken = LINKED[_clearly_best(gained(some, [floor], LINKED)[0])]
    tried, ranked = gained(valid, [floor], [taken])
    gain = tried[0]
    slot = ranked.predicates.astype(np.int64) * 2 + ~ranked.is_tail
    slots = 2 * known.num_predicates
    halves = np.arange(gain.shape[1]) % 2 == 0
    more = np.zeros(gain.shape[1])
    for half in (halves, ~halves):
        if half.any() and not half.all():
            chosen = _own(gain[:, half], slot[half], slots, FEWEST // 2)[slot[~half]]
            held_out = gain[:, ~half]
            single = held_out[_settled(gain[:, half])]
            more[~half] = held_out[chosen, np.arange(len(chosen))] - single
    best = _settled(gain)
    own = bool(more.mean() > _standard_error(more))
    index = _own(gain, slot, slots, FEWEST) if own else np.full(slots, best)
    table = np.asarray(betas, np.float64)[index].reshape(-1, 2)
    mrr = float(gain[index[slot], np.arange(gain.shape[1])].mean())
    return Choice(betas[best], table, own, floor, taken, mrr)


def _floored(proved: Floats, floor: float | None) -> Floats:
    """What is weighed: the scores of the proofs, or the logarithm of as much above the floor."""
    if floor is None:
        return proved
    return np.log(np.maximum(proved, np.float32(0)) + np.float32(floor))


def _clearly_best(tried: Doubles) -> int:
    """Of ways [W, B, Q] by their best weights: the best if it clearly beats the first, else 0."""
    each = np.stack([rows[rows.mean(axis=1).argmax()] for rows in tried])
    best = int(each.mean(axis=1).argmax())
    more = each[best] - each[0]
    return best if more.mean() > _standard_error(more) else 0


def _own(gain: Doubles, slot: NDArray[np.int64], slots: int, fewest: int) -> NDArray[np.int64]:
    """A row of `gain` for each slot: that of all together, unless the slot's own are better."""
    index = np.full(slots, _settled(gain))
    for which in np.unique(slot):
        asked = slot == which
        if np.count_nonzero(asked) >= fewest and index[which] not in _alike(gain[:, asked]):
            index[which] = _settled(gain[:, asked])
    return index


def _settled(gain: Doubles) -> int:
    """The middle one of the rows that are as good as the best; of rows that are equal the first."""
    alike = _alike(gain)
    middle = gain[alike[(len(alike) - 1) // 2]]
    return int((gain == middle).all(axis=1).argmax())


def _alike(gain: Doubles) -> NDArray[np.int64]:
    """The rows whose mean is within a standard error of the best one's, query by query."""
    less = gain[gain.mean(axis=1).argmax()] - gain
    return np.flatnonzero(less.mean(axis=1) <= _standard_error(less))


def _standard_error(values: Doubles) -> Doubles:
    error: Doubles = values.std(axis=-1) / math.sqrt(max(1, values.shape[-1]))
    return error
