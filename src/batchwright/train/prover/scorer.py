"""A trained prover as a scorer: the chance that it answers a question with each entity.

The chance is over whole proofs: the policy draws a rule, and then a fact for each step of it. What
an episode of the environment would answer by sampling is summed here exactly and for all entities
at once, with no sampling and no beam; proofs that use one fact twice in a row, there and back, are
left out. Nothing of an embedding is in it.
"""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from batchwright.errors import Mismatch
from batchwright.logic.rank.ranking import Side
from batchwright.rl.policy import Policy
from batchwright.train.prover.kernels import answer
from batchwright.train.prover.policy import RuleActor
from batchwright.train.prover.program import Asked

__all__ = ["FLOOR", "PolicyScorer"]

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

FLOOR = 1e-6
"""Chances far below this count as none."""


class PolicyScorer:
    """Scores log(1 + chance / FLOOR): 0 for what has no proof, in the order of the chances."""

    def __init__(self, asked: Asked, policy: Policy) -> None:
        actor = policy.actor
        if not isinstance(actor, RuleActor) or len(actor.rules) != len(asked.rules):
            raise Mismatch("the policy was trained for other rules; take those of its run")
        self.asked = asked
        rules = actor.rules.detach().cpu().numpy().astype(np.float64)
        end = actor.end.detach().cpu().numpy().astype(np.float64)
        self.chances = _softmax(rules, end, asked.chains.ptr)
        """[R]: how likely each rule is drawn for its question."""

    def mass(self, given: Ints, predicates: Ints, side: Side) -> Doubles:
        """The chance that the policy answers with each entity, [Q, N]."""
        steps, chains = self.asked.steps, self.asked.chains
        heads = predicates.astype(np.int64) + (0 if side == "tail" else steps.num_predicates)
        found = np.zeros((len(given), steps.num_entities))
        answer(
            np.ascontiguousarray(given, np.int32), heads, chains.ptr, chains.bodies,
            chains.lengths, self.chances, steps.ptr, steps.ends, steps.num_entities,
            steps.num_predicates, found,
        )  # fmt: skip
        return found

    def scores(self, given: Ints, predicates: Ints, side: Side) -> Floats:
        # Several answers of one question are asked for one by one, and found together.
        pairs = predicates.astype(np.int64) * self.asked.steps.num_entities + given
        _, first, place = np.unique(pairs, return_index=True, return_inverse=True)
        mass = self.mass(given[first], predicates[first], side)
        mass *= 1 / FLOOR
        return np.log1p(mass, out=mass).astype(np.float32)[place]


def _softmax(rules: Doubles, end: Doubles, ptr: NDArray[np.int64]) -> Doubles:
    chances = np.zeros_like(rules)
    for question, (start, stop) in enumerate(pairwise(ptr)):
        logits = np.append(rules[start:stop], end[question])
        shares = np.exp(logits - logits.max())
        chances[start:stop] = shares[:-1] / shares.sum()
    return chances
