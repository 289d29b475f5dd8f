"""The policy `answers`: it follows every rule, and chooses among the answers that they prove.

A decision is one answer. Its logit is the sum of the weights of the rules that prove it, chains and
rules with constants, so evidence adds up; untrained, all rules weigh the same, or as much as their
confidence says. PPO learns the weights from rewards alone: a query of train, its own fact hidden,
is answered several times, and an answer is worth 1 if it is the hidden one. The baseline is the
mean reward of the query's answers (and their standard deviation the scale, as in GRPO), so there
is no critic.
"""

from collections.abc import Mapping
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from batchwright import rng
from batchwright.errors import ConfigError, Mismatch
from batchwright.logic.loaders import Graph
from batchwright.logic.mine.mining import LONGEST
from batchwright.logic.rank.ranking import Side
from batchwright.logic.rank.scorers import LIMIT, RuleScorer
from batchwright.logic.rules import Rules
from batchwright.permutation import permutation
from batchwright.train.prover.config import ProverConfig
from batchwright.train.prover.kernels import find_answers, improve_answers
from batchwright.train.prover.learners import SMALL_SQUARE, Asking, Metrics
from batchwright.train.prover.scorer import ordered_scores

__all__ = ["AnswerPolicy", "AnswerScorer", "Answering", "Weighed", "answer_once", "fit_to_ask"]

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

ALIKE = 0.1
"""The weight of every rule of an untrained policy that starts with all of them alike."""

SHARP = 8.0
"""The weight of a certain rule of an untrained policy that starts by confidence."""

BINS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.7)
"""Rules whose confidences lie between two of these may share what is learned of them."""

FORMS = LONGEST + 4
"""Chains of 1 to 3 edges; then an edge to a constant, to anything, none, and from a constant."""

ROOM = 1 << 20
"""Hits that there is room for at first."""


class Weighed:
    """A graph and all of its rules that can be followed, each from both ends."""

    def __init__(self, graph: Graph, rules: Rules) -> None:
        self._scorer = RuleScorer(graph.facts, rules)
        self.program = self._scorer._program
        self.num_entities = graph.vocab.num_entities
        self.num_predicates = graph.vocab.num_predicates
        self.num_rules = len(self._scorer.evidence)
        self.skipped = self._scorer.skipped

    def start(self, how: Literal["alike", "confidence"]) -> Doubles:
        """The weights of an untrained policy, which learned ones decay to.

        By confidence a rule weighs `SHARP` times the square of it: strong rules count more than
        many weak ones, and the policy is about as sure of an answer as it is right.
        """
        if how == "alike":
            return np.full(self.num_rules, ALIKE)
        return SHARP * np.square(self._confidence())

    def groups(self) -> Longs:
        """The group of every rule: those of one form, with confidences in one bin."""
        chains, constants = len(self.program.lengths), self.program.constants
        # What is looked up from a constant stands last.
        form = np.full(self.num_rules, LONGEST + 3)
        form[:chains] = self.program.lengths - 1
        edge, steps = constants.keys // (2 * self.num_predicates), 2 * self.num_predicates
        any_end = edge % (self.num_entities + 1) == self.num_entities
        kind = np.where(edge == steps * (self.num_entities + 1), 2, any_end)
        form[chains + constants.rule] = LONGEST + np.repeat(kind, np.diff(constants.ptr))
        return form * (len(BINS) + 1) + np.digitize(self._confidence().round(9), BINS)

    def _confidence(self) -> Doubles:
        return np.asarray(-np.expm1(-self._scorer.evidence))

    def questions(self, triples: Ints) -> Longs:
        """Both questions of each triple as (entity, step, answer), those for tails first."""
        h, p, t = triples.astype(np.int64).T
        tails, heads = np.stack([h, p, t], 1), np.stack([t, p + self.num_predicates, h], 1)
        return np.concatenate([tails, heads])

    def scorer(self, weights: Doubles) -> RuleScorer:
        """Summed weights of the rules that reach each entity, 0 where none does."""
        other = self._scorer.copied(1.0, 0.0, 1.0)
        other.evidence, other.left_out = weights, 0
        return other


class AnswerPolicy(nn.Module):
    """A weight for each rule of a `Weighed`, at each of its ends.

    With `groups` what is learned are factors of the weights at the start, one for each group.
    """

    def __init__(self, start: Doubles, groups: Longs | None = None) -> None:
        super().__init__()
        self.num_rules, self._groups = len(start), groups
        learned = start.copy() if groups is None else np.ones(FORMS * (len(BINS) + 1))
        self.weights = nn.Parameter(torch.from_numpy(learned))
        # Saved with the factors: rules in a file have their confidences rounded.
        self.register_buffer("start", torch.from_numpy(start.copy()), groups is not None)

    def array(self) -> Doubles:
        """The weight of every rule."""
        learned: Doubles = self.weights.detach().numpy()
        return learned if self._groups is None else self._first() * learned[self._groups]

    def slope(self, of_rules: Doubles) -> Doubles:
        """The gradient of what is learned, from that of every rule's weight."""
        if self._groups is None:
            return of_rules
        return np.asarray(
            np.bincount(self._groups, of_rules * self._first(), len(self.weights)), np.float64
        )

    def _first(self) -> Doubles:
        return cast(torch.Tensor, self.start).numpy()


class AnswerScorer:
    """Scores log(1 + probability / FLOOR) of the answers that rules prove."""

    def __init__(self, weighed: Weighed, policy: AnswerPolicy) -> None:
        if policy.num_rules != weighed.num_rules:
            raise Mismatch("the policy was trained with other rules; use those of its run")
        self._scorer = weighed.scorer(policy.array().copy())
        self.num_entities, self.num_predicates = weighed.num_entities, weighed.num_predicates

    def how(self) -> dict[str, Any]:
        """How proofs were found, ready for JSON."""
        return {"search": "all proofs by all rules", "left_out": self._scorer.left_out}

    def mass(self, given: Ints, predicates: Ints, side: Side) -> Doubles:
        """The probability that the policy answers with each entity, [Q, N]."""
        return np.exp(self._log_mass(given, predicates, side))

    def scores(self, given: Ints, predicates: Ints, side: Side) -> Floats:
        return ordered_scores(self._log_mass(given, predicates, side))

    def _log_mass(self, given: Ints, predicates: Ints, side: Side) -> Doubles:
        """Log-probabilities, -inf without a proof."""
        logits = self._scorer.scores(given, predicates, side).astype(np.float64)
        # Weights are learned numbers: that those of a proved answer sum to 0 does not happen.
        logits[logits == 0] = -np.inf
        top = logits.max(axis=1, keepdims=True)
        logits -= np.where(np.isfinite(top), top, 0.0)
        with np.errstate(divide="ignore"):
            total = np.log(np.exp(logits).sum(1, keepdims=True))
        logits -= np.where(np.isfinite(total), total, 0.0)
        return logits


class _Searched:
    """What the rules prove of some questions, and what was drawn from it."""

    def __init__(self, weighed: Weighed, draws: int) -> None:
        self._weighed, self._draws = weighed, draws
        self._rule, self._answer = np.empty(ROOM, np.int32), np.empty(ROOM, np.int32)

    def search(self, questions: Longs, weights: Doubles, key: int) -> None:
        weighed, count = self._weighed, len(questions)
        self.ptr = np.zeros(count + 1, np.int64)
        self.answers, self.right = np.zeros(count, np.int64), np.full(count, -1, np.int64)
        self.drawn = np.full((count, self._draws), -2, np.int32)
        self.logp = np.zeros(self.drawn.shape)
        while (
            find_answers(
                questions, weighed.program, weighed.num_entities, weighed.num_predicates, LIMIT,
                weights, np.uint64(key), self.ptr, self._rule, self._answer, self.answers,
                self.right, self.drawn, self.logp,
            )
            < count
        ):  # fmt: skip
            self._rule, self._answer = (np.empty(2 * len(self._rule), np.int32) for _ in range(2))

    def improve(
        self, some: Longs, weights: Doubles, clip: float, entropy_coef: float, slope: Doubles
    ) -> tuple[float, float, float]:
        return improve_answers(
            some, self._weighed.num_entities, self.ptr, self._rule, self._answer, self.answers,
            self.right, self.drawn, self.logp, weights, clip, entropy_coef, slope,
        )  # fmt: skip


class Answering:
    """PPO over answers: each round searches for `n_envs` queries and answers each several times.

    Every minibatch is a step of Adagrad, at a rate annealed to zero over all rounds.
    """

    def __init__(
        self,
        weighed: Weighed,
        policy: AnswerPolicy,
        questions: Longs,
        config: ProverConfig,
        of: int,
    ) -> None:
        self._weighed, self._questions, self._config, self._of = weighed, questions, config, of
        self._policy, self._weights = policy, policy.weights.detach().numpy()
        # What weights decay to; of a run that is resumed, `load_state_dict` has it.
        self._start = self._weights.copy()
        self._squares = np.full(len(self._weights), SMALL_SQUARE)
        self._found = _Searched(weighed, config.draws)
        self._done = 0

    def step(self) -> Metrics:
        config, found, recipe = self._config, self._found, self._config.recipe
        rounds = -(-len(self._questions) // config.num_envs)
        epoch, number = divmod(self._done, rounds)
        order = permutation(
            len(self._questions), np.uint64(rng.key(config.seed, "prover/answers", epoch))
        )
        asked = order[number * config.num_envs : (number + 1) * config.num_envs]
        key = rng.key(config.seed, "prover/draws", self._done)
        found.search(self._questions[asked], self._policy.array(), key)
        lr = recipe.lr * (1.0 - self._done / self._of)
        sums = np.zeros(3)
        bounds = np.linspace(0, len(asked), config.minibatches + 1).astype(np.int64)
        for turn in range(recipe.ppo_epochs):
            shuffle = rng.key(config.seed, "prover/answers/minibatches", self._done, turn)
            mixed = permutation(len(asked), np.uint64(shuffle))
            for part in np.split(mixed, bounds[1:-1]):
                of_rules = np.zeros(self._weighed.num_rules)
                sums += found.improve(
                    part, self._policy.array(), config.clip, recipe.entropy_coef, of_rules
                )
                slope = self._policy.slope(of_rules)
                slope += config.decay * len(part) * (self._start - self._weights)
                self._squares += slope * slope
                self._weights += lr * slope / np.sqrt(self._squares)
        self._done += 1
        answered = found.answers > 0
        clipfrac, kl, entropy = sums / max(1, answered.sum() * config.draws * recipe.ppo_epochs)
        right = (found.drawn == found.right[:, None])[answered]
        return {
            "reward": float(right.mean()) if right.size else 0.0,
            "proved": float(answered.mean()),
            "clipfrac": float(clipfrac),
            "approx_kl": float(kl),
            "entropy": float(entropy),
            "learning_rate": lr,
        }

    def state_dict(self) -> dict[str, Any]:
        return {"done": self._done, "squares": self._squares, "start": self._start}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._done = int(state["done"])
        self._squares[:], self._start[:] = state["squares"], state["start"]


def fit_to_ask(config: ProverConfig, graph: Graph) -> Ints:
    """The triples of train whose queries teach what valid asks.

    Where the ends of no valid triple are joined by a fact of train, as in FB15k-237, train queries
    with such ends would teach rules that valid has no use for.
    """
    if config.linked is True or not len(graph.valid):
        return graph.train
    n = graph.vocab.num_entities

    def pairs(triples: Ints) -> Longs:
        ends = np.sort(triples[:, [0, 2]].astype(np.int64), axis=1)
        return ends[:, 0] * n + ends[:, 1]

    of_train = pairs(graph.train)
    if config.linked == "auto" and np.isin(pairs(graph.valid), of_train).any():
        return graph.train
    _, place, counts = np.unique(of_train, return_inverse=True, return_counts=True)
    alone: Ints = graph.train[counts[place] == 1]
    if config.linked == "auto" and not len(alone):
        return graph.train
    if not len(alone):
        raise ConfigError(
            "--no-linked leaves no train query: every two entities of a fact have another fact; "
            "leave it out"
        )
    return alone


def answer_once(weighed: Weighed, policy: AnswerPolicy, triples: Ints, seed: int) -> Asking:
    """Answer both questions of every triple once; known answers other than its own are left out."""
    found = _Searched(weighed, 1)
    questions = weighed.questions(triples)
    proved = right = 0
    for start in range(0, len(questions), 256):
        part = questions[start : start + 256]
        found.search(part, policy.array(), rng.key(seed, "prover/ask", start))
        proved += int((found.answers > 0).sum())
        right += int((found.drawn[:, 0] == found.right).sum())
    return Asking(proved / len(questions), right / len(questions))
