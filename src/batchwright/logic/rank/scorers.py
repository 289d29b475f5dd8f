"""Scorers for open queries: rules, and the sum of an embedding and rules.

Everything that ranks entities has one method, `scores(given, predicates, side)`; see
`batchwright.logic.rank.ranking.Scorer`. So one evaluation serves embeddings, rules, their sum and
a trained prover.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchwright.errors import ConfigError, Mismatch
from batchwright.logic.facts import Facts
from batchwright.logic.mine.kernels import apply_chains, learn_chains
from batchwright.logic.mine.mining import Steps, chains_of
from batchwright.logic.rank.ranking import Ranks, Scorer, Side, blocks
from batchwright.logic.rules import Rules
from batchwright.permutation import permutation
from batchwright.rng import key

__all__ = [
    "AGGREGATIONS",
    "BETAS",
    "Choice",
    "Hybrid",
    "RuleScorer",
    "choose_beta",
    "choose_rules",
    "rank_each",
]

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

BETAS = (0.0, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Weights of the proofs that are tried on the valid part."""

AGGREGATIONS = (
    *((power, 0.0) for power in (1.0, 1.5, 2.0, 3.0, 4.0, 8.0, math.inf)),
    *((power, 0.5) for power in (1.0, 2.0, 4.0)),
    (1.0, 1.0),
)
"""Aggregations of rules that are tried on valid, as (power, share); see `RuleScorer`."""

CERTAIN = 1 - 1e-4
"""Weights are clipped here, or one certain rule would outweigh all others."""

FEWEST = 50
"""Queries that a predicate needs for a weight of its own."""


class RuleScorer:
    """What chain rules say of every entity: one search answers p(h, ?) for all of them.

    A rule of weight w is evidence e = -log(1 - w) for the entities it reaches. With `share` above
    0 they divide it: each gets e * q ** share, q being the probability that a random walk along
    the rule ends there. An entity's score joins what all rules give it, (sum of parts ** power) **
    (1 / power). With power 1 and share 0 that is the noisy-or (as a sum of logarithms, so that
    many rules do not all come to 1), with infinite power the greatest weight; what lies between
    trusts strong rules more than many weak ones.
    """

    def __init__(self, facts: Facts, rules: Rules, power: float = 1.0, share: float = 0.0) -> None:
        if (facts.num_entities, facts.num_predicates) != (rules.num_entities, rules.num_predicates):
            raise Mismatch(
                f"the rules are over {rules.num_entities:,} entities and {rules.num_predicates:,} "
                f"predicates, the facts over {facts.num_entities:,} and {facts.num_predicates:,}; "
                f"read both with one vocabulary"
            )
        if not power >= 1 or not 0 <= share <= 1:
            raise ConfigError(
                f"power must be at least 1 (1: noisy-or, inf: maximum), got {power}; share must be "
                f"from 0 (whole) to 1 (divided), got {share}"
            )
        self.power = power
        self.share = share
        self._chains = chains_of(rules)
        self._steps = Steps.of(facts)
        weights = self._chains.weights
        outside = weights[(weights < 0) | (weights > 1)]
        if outside.size:
            raise ConfigError(
                f"the weight of a rule must be a probability from 0 to 1, got {outside[0]:g}"
            )
        self.evidence: Doubles = -np.log1p(-np.minimum(weights, CERTAIN))
        self.learned_epochs = 0
        self.num_entities, self.num_predicates = facts.num_entities, facts.num_predicates

    @property
    def skipped(self) -> tuple[str, ...]:
        """Names of rules that are not chains, and so are not used."""
        return self._chains.skipped

    def scores(self, given: Ints, predicates: Ints, side: Side) -> Floats:
        steps, chains = self._steps, self._chains
        found = np.zeros((len(given), steps.num_entities), np.float32)
        heads = predicates.astype(np.int64) + (0 if side == "tail" else steps.num_predicates)
        apply_chains(
            np.ascontiguousarray(given, np.int32), heads, chains.ptr, chains.bodies,
            chains.lengths, self.evidence, steps.ptr, steps.ends, steps.num_entities,
            steps.num_predicates, self.share, self.power, found,
        )  # fmt: skip
        return found

    def learn(self, train: Ints, *, rate: float = 0.1, seed: int = 0) -> float:
        """One epoch of Adagrad that fits the evidence of rules to the facts; the mean loss.

        Each fact is queried from both ends with itself hidden, and the loss is the cross-entropy
        of a softmax over all entities. Evidence may become negative.
        """
        if self.power != 1:
            raise ConfigError(f"evidence can only be learned for power 1, got power {self.power}")
        steps, chains = self._steps, self._chains
        if not len(chains.weights):
            return 0.0
        h, p, t = train.astype(np.int64).T
        both = np.concatenate(
            [np.stack([h, p, t], 1), np.stack([t, p + steps.num_predicates, h], 1)]
        )
        order = permutation(len(both), np.uint64(key(seed, "rules/order", self.learned_epochs)))
        if not self.learned_epochs:
            # So that the first steps are smaller than the rate and confidences are not forgotten.
            self._squares: Doubles = np.full(len(self.evidence), 0.1)
            self.evidence = self.evidence.copy()
        loss, _ = learn_chains(
            np.ascontiguousarray(both[order]), chains.ptr, chains.bodies, chains.lengths,
            steps.ptr, steps.ends, steps.num_entities, steps.num_predicates, self.share, rate,
            self.evidence, self._squares,
        )  # fmt: skip
        self.learned_epochs += 1
        return loss

    def copied(self) -> "RuleScorer":
        """The same scorer with its own evidence, which later epochs do not change."""
        other = copy.copy(self)
        other.evidence = self.evidence.copy()
        return other


class Hybrid:
    """The embedding's scores plus `beta` times those of the proofs.

    `beta` is one number, or one for each predicate and side, [P, 2] with the tail first. Where it
    is 0 the scores are the embedding's own, bit for bit.
    """

    def __init__(self, kge: Scorer, proofs: Scorer, beta: float | Doubles) -> None:
        self.kge = kge
        self.proofs = proofs
        self.beta = np.asarray(beta, np.float64)
        self.num_entities: int = getattr(kge, "num_entities", np.iinfo(np.int32).max)
        self.num_predicates: int = getattr(kge, "num_predicates", np.iinfo(np.int32).max)

    def scores(self, given: Ints, predicates: Ints, side: Side) -> Floats:
        scores = self.kge.scores(given, predicates, side)
        column = 0 if side == "tail" else 1
        beta = self.beta if self.beta.ndim == 0 else self.beta[predicates, column]
        weight = np.broadcast_to(beta, len(given)).astype(np.float32)
        used = np.flatnonzero(weight)
        if used.size:
            proofs = self.proofs.scores(given[used], predicates[used], side)
            scores[used] += weight[used, None] * proofs
        return scores


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """The weight of the proofs that did best on the valid part."""

    beta: float
    """One for all predicates."""
    table: Doubles
    """[P, 2]: one for each predicate and side; all the same where that did better."""
    own: bool
    """Whether a weight for each predicate did better on the held-out half of the queries."""
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


def choose_rules(
    facts: Facts,
    rules: Rules,
    train: Ints,
    valid: Ints,
    known: Facts,
    *,
    epochs: int = 4,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[RuleScorer, dict[str, float]]:
    """The aggregation of rules that ranks best on `valid`, and the MRR of each that was tried.

    Tried are `AGGREGATIONS` of the mined confidences, and then evidence learned on `train` for up
    to `epochs` epochs, with the share that did best.
    """
    tried: dict[str, float] = {}
    best: tuple[float, RuleScorer] | None = None
    shares: dict[float, float] = {}
    learner: RuleScorer | None = None
    for number in range(len(AGGREGATIONS) + epochs):
        if number < len(AGGREGATIONS):
            power, share = AGGREGATIONS[number]
            scorer, name = RuleScorer(facts, rules, power, share), f"power {power:g}"
        else:
            if learner is None:
                learner = RuleScorer(facts, rules, share=max(shares, key=lambda s: shares[s]))
            learner.learn(train, seed=seed)
            scorer = learner.copied()
            share, name = learner.share, f"learned {learner.learned_epochs}"
        mrr = rank_each(valid, known, [scorer], list)[0].metrics().mrr
        tried[f"{name}, share {share:g}"] = mrr
        if number < len(AGGREGATIONS) and power == 1:
            shares[share] = mrr
        if best is None or mrr > best[0]:
            best = mrr, scorer
        if progress:
            progress(number + 1, len(AGGREGATIONS) + epochs)
    assert best is not None  # at least one aggregation is tried
    return best[1], tried


def choose_beta(
    kge: Scorer, proofs: Scorer, valid: Ints, known: Facts, betas: Sequence[float] = BETAS
) -> Choice:
    """The weights of the proofs that rank best on `valid`, which must not be among their facts.

    Predicates get their own weights only if such weights, chosen on one half of the queries, did
    better than a common one on the held-out half.
    """

    def joined(scores: list[Floats]) -> list[Floats]:
        plain, proved = scores
        return [plain + np.float32(b) * proved if b else plain for b in betas]

    found = rank_each(valid, known, [kge, proofs], joined)
    gain = np.stack([1 / ranks.middle for ranks in found])
    slot = found[0].predicates.astype(np.int64) * 2 + ~found[0].is_tail
    slots = 2 * known.num_predicates
    halves = np.arange(gain.shape[1]) % 2 == 0
    common = own = 0.0
    for half in (halves, ~halves):
        if half.any() and not half.all():
            single = int(gain[:, half].mean(axis=1).argmax())
            chosen = _own(gain[:, half], slot[half], slots, FEWEST // 2)
            common += float(gain[single, ~half].sum())
            own += float(gain[chosen[slot[~half]], ~half].sum())
    best = int(gain.mean(axis=1).argmax())
    index = np.full(slots, best)
    if own > common:
        index = _own(gain, slot, slots, FEWEST)
    table = np.asarray(betas, np.float64)[index].reshape(-1, 2)
    mrr = float(gain[index[slot], np.arange(gain.shape[1])].mean())
    return Choice(betas[best], table, own > common, mrr)


def _own(gain: Doubles, slot: NDArray[np.int64], slots: int, fewest: int) -> NDArray[np.int64]:
    """The best row of `gain` for each slot; that of all together where a slot has too few."""
    index = np.full(slots, int(gain.mean(axis=1).argmax()))
    for which in np.unique(slot):
        asked = slot == which
        if np.count_nonzero(asked) >= fewest:
            index[which] = int(gain[:, asked].mean(axis=1).argmax())
    return index
