"""A trained prover as a scorer: the probability that it answers a query with each entity.

The probability is over whole proofs: the policy draws a rule, and then a fact for each step of it.
What an episode of the environment would answer by sampling is summed here exactly and for all
entities at once, without sampling or beam search; proofs that use one fact twice in a row, back and
forth, are left out. No embedding is involved.
"""

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.errors import Mismatch
from batchwright.logic.rank.ranking import Side
from batchwright.rl.policy import Policy
from batchwright.train.prover.kernels import answer
from batchwright.train.prover.policy import RuleActor
from batchwright.train.prover.program import Asked

__all__ = ["FLOOR", "PolicyScorer", "log_scores", "ordered_scores"]

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

FLOOR = 1e-6
"""Probabilities far below this count as none."""

FAR = 16.0
"""How far a log-probability is below that of `FLOOR` where its score is next to nothing."""


class PolicyScorer:
    """Scores log(1 + probability / FLOOR): 0 without a proof, in the order of the probabilities."""

    def __init__(self, asked: Asked, policy: Policy) -> None:
        actor = policy.actor
        if not isinstance(actor, RuleActor) or len(actor.rules) != len(asked.rules):
            raise Mismatch("the policy was trained with other rules; use those of its run")
        self.asked = asked
        self.num_entities = asked.steps.num_entities
        self.num_predicates = asked.steps.num_predicates
        rules = actor.rules.detach().cpu().numpy().astype(np.float64)
        end = actor.end.detach().cpu().numpy().astype(np.float64)
        self.probabilities = _softmax(rules, end, asked.chains.ptr)
        """[R]: of drawing each rule for its query."""
        self.left_out = 0
        """How often a rule led along too many edges from an entity; its proofs are missing then."""

    def how(self) -> dict[str, Any]:
        """How proofs were found, ready for JSON."""
        return {"search": "exact sum over all proofs", "left_out": self.left_out}

    def mass(self, given: Ints, predicates: Ints, side: Side) -> Doubles:
        """The probability that the policy answers with each entity, [Q, N]."""
        steps, chains = self.asked.steps, self.asked.chains
        heads = predicates.astype(np.int64) + (0 if side == "tail" else steps.num_predicates)
        found = np.zeros((len(given), steps.num_entities))
        self.left_out += answer(
            np.ascontiguousarray(given, np.int32), heads, chains.ptr, chains.bodies,
            chains.lengths, self.probabilities, steps.ptr, steps.ends, steps.num_entities,
            steps.num_predicates, found,
        )  # fmt: skip
        return found

    def scores(self, given: Ints, predicates: Ints, side: Side) -> Floats:
        # A query with several answers is ranked once for each, and scored only once.
        pairs = predicates.astype(np.int64) * self.asked.steps.num_entities + given
        _, first, place = np.unique(pairs, return_index=True, return_inverse=True)
        return log_scores(self.mass(given[first], predicates[first], side))[place]


def log_scores(mass: Doubles) -> Floats:
    """Scores log(1 + probability / FLOOR), made in place of the probabilities."""
    mass *= 1 / FLOOR
    return np.log1p(mass, out=mass).astype(np.float32)


def ordered_scores(logs: Doubles) -> Floats:
    """`log_scores` of log-probabilities, made in their place and in their order, however low.

    Far below `FLOOR` a score would come to 0 in single precision, and answers of which the policy
    is very unsure would tie with each other and with those that are not proved. There it falls as
    1 / log(FLOOR / probability) does, from the value that it has at `FAR`; it is 0 without a proof.
    """
    logs -= np.log(FLOOR)
    low = logs < -FAR
    fall = -FAR / logs[low]
    np.log1p(np.exp(np.maximum(logs, -FAR, out=logs), out=logs), out=logs)
    logs[low] *= fall
    scores: Floats = logs.astype(np.float32)
    return scores


def _softmax(rules: Doubles, end: Doubles, ptr: NDArray[np.int64]) -> Doubles:
    probabilities = np.zeros_like(rules)
    for question, (start, stop) in enumerate(pairwise(ptr)):
        logits = np.append(rules[start:stop], end[question])
        shares = np.exp(logits - logits.max())
        probabilities[start:stop] = shares[:-1] / shares.sum()
    return probabilities
