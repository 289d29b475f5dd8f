"""What rules say of open queries, and how rules are best joined.

Everything that ranks entities has one method, `scores(given, predicates, side)`; see
`batchwright.logic.rank.ranking.Scorer`. So one evaluation serves embeddings, rules, their sum
(`batchwright.logic.rank.hybrid`) and a trained prover.
"""

import copy
import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from batchwright.errors import ConfigError, Mismatch
from batchwright.logic.facts import Facts
from batchwright.logic.mine.constants import NO_CONSTANTS, constants_of
from batchwright.logic.mine.mining import Steps, chains_of
from batchwright.logic.mine.paths import adjacency
from batchwright.logic.mine.score import Program, learn_rules, raise_evidence, score_rules
from batchwright.logic.rank.ranking import BLOCK_CELLS, Side, blocks, evenly_spread
from batchwright.logic.rules import Rules
from batchwright.permutation import permutation
from batchwright.rng import key

__all__ = ["AGGREGATIONS", "RuleScorer", "choose_rules"]

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

AGGREGATIONS = (
    *((power, 0.0) for power in (1.0, 1.5, 2.0, 3.0, 4.0, 8.0, math.inf)),
    *((power, 0.5) for power in (1.0, 2.0, 4.0)),
    (1.0, 1.0),
)
"""Aggregations of rules that are tried on valid, as (power, share); see `RuleScorer`."""

SCALES = (0.0, 0.1, 0.3, 1.0, 2.0, 4.0)
"""Weights of rules with constants that are tried beside chains whose evidence is learned."""

PLAIN = ((1.0, 0.0), (4.0, 0.0), (math.inf, 0.0), (1.0, 0.5), (1.0, 1.0))
"""Those of them that are tried with little or no weight of rules with constants."""

LIMIT = 1 << 14
"""Edges that one rule may lead along from one entity."""

PART = 128
"""Queries that are searched for at a time."""

CHOSEN = 1500
"""Triples of valid that an aggregation is chosen on."""

LEARNED = 60_000
"""Queries in one epoch of learning."""

CERTAIN = 1 - 1e-4
"""Weights are clipped here, or one certain rule would outweigh all others."""


class RuleScorer:
    """What rules say of every entity: one search answers p(h, ?) for all of them.

    Used are chains, and rules with constants as `batchwright.logic.mine.constants` has them. A rule
    of weight w is evidence e = -log(1 - w) for the entities it reaches. With `share` above 0 they
    divide it: each gets e * q ** share, q being the probability that a random walk along the rule
    ends there. An entity's score joins what all rules give it, (sum of parts ** power) ** (1 /
    power). With power 1 and share 0 that is the noisy-or (as a sum of logarithms, so that many
    rules do not all come to 1), with infinite power the greatest weight; what lies between trusts
    strong rules more than many weak ones. Evidence of rules with constants is multiplied by
    `constants`.

    No rule says p(x, x) unless there are such facts of p. A rule that leads along more than
    `LIMIT` edges from an entity is left out there; `left_out` counts how often.
    """

    def __init__(
        self,
        facts: Facts,
        rules: Rules,
        power: float = 1.0,
        share: float = 0.0,
        constants: float = 1.0,
    ) -> None:
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
        outside = rules.weight[(rules.weight < 0) | (rules.weight > 1)]
        if outside.size:
            raise ConfigError(
                f"the weight of a rule must be a probability from 0 to 1, got {outside[0]:g}"
            )
        self.power, self.share, self.constants = power, share, constants
        self.num_entities, self.num_predicates = facts.num_entities, facts.num_predicates
        chains, steps = chains_of(rules), Steps.of(facts)
        given, weights, used = constants_of(rules)
        named = {rules.names[r] for r in used.tolist()}
        self.skipped = tuple(name for name in chains.skipped if name not in named)
        """Names of rules that are neither chains nor of the forms with constants."""
        loops = np.diff(facts.loop_ptr) > 0
        self._program = Program(
            chains.ptr,
            chains.bodies,
            chains.lengths,
            steps.ptr,
            steps.ends,
            adjacency(facts.triples, self.num_entities, self.num_predicates),
            given,
            np.concatenate([loops, loops]),
        )
        self._chains = len(chains.weights)
        everything = np.concatenate([chains.weights, weights])
        self.evidence: Doubles = -np.log1p(-np.minimum(everything, CERTAIN))
        """Of chains from both ends, and then of rules with constants, from both ends."""
        self.left_out = 0
        self.learned_epochs = 0

    def scores(self, given: Ints, predicates: Ints, side: Side) -> Floats:
        return self.joined(given, predicates, side, [(self.power, self.share, self.constants)])[
            :, 0
        ]

    def unseen(self, predicates: Ints, side: Side) -> Floats:
        """Scores [Q, N] of a query about an entity without a fact, by the rules without a body.

        They say how frequent an answer is. Nothing else speaks there, so `constants`, their weight
        beside chains, is left out.
        """
        n, preds = self.num_entities, self.num_predicates
        given = self._program.constants
        found = np.zeros((len(predicates), n), np.float32)
        steps = predicates.astype(np.int64) + (0 if side == "tail" else preds)
        wanted = 2 * preds * (n + 1) * 2 * preds + steps
        at = np.searchsorted(given.keys, wanted)
        for row, key_, place in zip(found, wanted.tolist(), at.tolist(), strict=True):
            if place < len(given.keys) and given.keys[place] == key_:
                rules = slice(given.ptr[place], given.ptr[place + 1])
                row[given.entity[rules]] = self.evidence[self._chains + given.rule[rules]]
        return found

    def joined(
        self,
        given: Ints,
        predicates: Ints,
        side: Side,
        ways: Sequence[tuple[float, float, float]],
    ) -> Floats:
        """Scores [Q, A, N] of several ways (power, share, constants) by one search."""
        # A query with several answers is ranked once for each, and searched only once.
        n, preds = self.num_entities, self.num_predicates
        steps = predicates.astype(np.int64) + (0 if side == "tail" else preds)
        if len(given) and not (
            0 <= given.min() <= given.max() < n
            and 0 <= predicates.min() <= predicates.max() < preds
        ):
            raise ConfigError(
                f"a query holds ids beyond the {n:,} entities and {preds:,} predicates of the rules"
            )
        _, first, place = np.unique(steps * n + given, return_index=True, return_inverse=True)
        found = np.zeros((len(first), len(ways), n), np.float32)
        evidence = np.tile(self.evidence, (len(ways), 1))
        evidence[:, self._chains :] *= np.array([way[2] for way in ways])[:, None]
        powers, shares = (np.array([way[i] for way in ways]) for i in range(2))
        raised = raise_evidence(evidence, powers)
        asked, asked_steps = np.ascontiguousarray(given[first], np.int32), steps[first]
        # A part at a time, so that Ctrl-C is heard.
        for start in range(0, len(first), PART):
            part = slice(start, start + PART)
            self.left_out += score_rules(
                asked[part], asked_steps[part], self._program, raised, n, preds, LIMIT, powers,
                shares, found[part],
            )  # fmt: skip
        every: Floats = found[place]
        return every

    def learn(self, train: Ints, *, rate: float = 0.1, seed: int = 0, most: int = 0) -> float:
        """One epoch of Adagrad that fits the evidence of rules to the facts; the mean loss.

        Each fact is queried from both ends with itself hidden, and the loss is the cross-entropy
        of a softmax over all entities. Evidence may become negative. That of rules with constants
        is neither used nor changed: they were found by the very facts that are queried, so on train
        they are better than elsewhere. With `most`, as many queries are drawn in every epoch.
        """
        if self.power != 1:
            raise ConfigError(f"evidence can only be learned for power 1, got power {self.power}")
        if not self._chains:
            return 0.0
        h, p, t = train.astype(np.int64).T
        both = np.concatenate(
            [np.stack([h, p, t], 1), np.stack([t, p + self.num_predicates, h], 1)]
        )
        order = permutation(len(both), np.uint64(key(seed, "rules/order", self.learned_epochs)))
        if not self.learned_epochs:
            # So that the first steps are smaller than the rate and confidences are not forgotten.
            self._squares: Doubles = np.full(len(self.evidence), 0.1)
            self.evidence = self.evidence.copy()
        total, counted = 0.0, 0
        chains = self._program._replace(constants=NO_CONSTANTS)
        questions = both[order[: most or None]]
        for start in range(0, len(questions), PART):
            loss, count = learn_rules(
                questions[start : start + PART], chains, self.num_entities,
                self.num_predicates, LIMIT, self.share, rate, self.evidence, self._squares,
            )  # fmt: skip
            total, counted = total + loss * count, counted + count
        self.learned_epochs += 1
        return total / max(1, counted)

    def copied(self, power: float, share: float, constants: float) -> "RuleScorer":
        """The same rules, joined in another way, with evidence that later epochs do not change."""
        other = copy.copy(self)
        other.power, other.share, other.constants = power, share, constants
        other.evidence = self.evidence.copy()
        return other


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

    Tried are the aggregations of the mined confidences, and then evidence learned on `train` for
    up to `epochs` epochs, with the share that did best and several weights of constants. At most
    `CHOSEN` triples of valid are ranked, evenly spread, and an epoch has at most `LEARNED` queries.
    """
    scorer = RuleScorer(facts, rules)
    mixed = [(power, share, 1.0) for power, share in AGGREGATIONS]
    ways = list(mixed)
    if len(scorer.evidence) > scorer._chains:
        ways += [(power, share, scale) for scale in (0.1, 0.0) for power, share in PLAIN]
    asked = evenly_spread(valid, CHOSEN)

    def measured(made: RuleScorer, some: Sequence[tuple[float, float, float]]) -> list[float]:
        counts: list[list[NDArray[np.float64]]] = [[] for _ in some]
        for block in blocks(asked, known, cells=BLOCK_CELLS // len(some)):
            scores = made.joined(block.given, block.predicates, block.side, some)
            for i in range(len(some)):
                greater, ties = block.count(scores[:, i])[:2]
                counts[i].append(1 / (1 + greater + ties / 2))
        return [float(np.concatenate(each).mean()) for each in counts]

    mrrs = measured(scorer, ways)
    tried = {_said(way): mrr for way, mrr in zip(ways, mrrs, strict=True)}
    first = int(np.argmax(mrrs))
    best = mrrs[first], scorer.copied(*ways[first])
    if progress:
        progress(1, 1 + epochs)
    # Evidence is learned as a sum, so with the share that did best in sums.
    sums = [i for i, way in enumerate(ways) if way[0] == 1]
    share = ways[max(sums, key=lambda i: mrrs[i])][1]
    learner = scorer.copied(1.0, share, 1.0)
    sums_of = [(1.0, share, scale) for scale in SCALES[: None if len(ways) > len(mixed) else 1]]
    for epoch in range(epochs):
        learner.learn(train, seed=seed, most=LEARNED)
        for way, mrr in zip(sums_of, measured(learner, sums_of), strict=True):
            tried[f"learned {epoch + 1}, {_said(way)}"] = mrr
            if mrr > best[0]:
                best = mrr, learner.copied(*way)
        if progress:
            progress(2 + epoch, 1 + epochs)
    return best[1], tried


def _said(way: tuple[float, float, float]) -> str:
    return f"power {way[0]:g}, share {way[1]:g}, constants {way[2]:g}"
