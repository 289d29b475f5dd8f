"""Queries as a program of their own: a rule answers the query, and facts the rule's body.

Every triple p(h, t) is queried from both ends, p(h, ?) and p(?, t), and every rule that is a chain
of edges is there once for each, its body in the order in which it is walked from the entity that is
given. With P predicates the program has 4 P, so that bodies never use what rules answer:

    p        p(h, t) as it is                in bodies of queries p(?, t)
    P + p    its inverse, (t, h)             in bodies of queries p(h, ?)
    2 P + p  the query p(h, ?)               answered by rules; hides P + p of (t, h)
    3 P + p  the query p(?, t), (t, h)       answered by rules; hides p of (h, t)

The last two are declared as inverses of the first two in reverse order: so the environment hides
the fact that a query is about, in whichever direction it is read.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.envs.prover.env import ProverEnv
from batchwright.errors import ConfigError
from batchwright.logic.facts import Facts
from batchwright.logic.loaders import Graph
from batchwright.logic.mine.mining import Chains, Steps, chains_of
from batchwright.logic.rules import Clause, Rules
from batchwright.logic.vocab import Vocab

__all__ = ["PAGE", "Asked"]

Ints = NDArray[np.int32]

PAGE = 1024
"""Facts that are offered at once."""


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A graph and its rules as questions from both ends; rule i of the program is chain i."""

    chains: Chains
    steps: Steps
    facts: Facts
    rules: Rules
    inverse: Ints

    @classmethod
    def of(cls, graph: Graph, rules: Rules) -> "Asked":
        chains = chains_of(rules)
        if not len(chains.weights):
            raise ConfigError(
                f"none of the {len(rules):,} rules is a chain of 1 to 3 edges between two "
                f"variables; give other rules, or mine them"
            )
        names, preds, n = graph.vocab.predicates, graph.vocab.num_predicates, len(graph.train)
        kinds = ("{}", "{} inverse", "{}?", "{} inverse?")
        vocab = Vocab(graph.vocab.entities, tuple(kind.format(p) for kind in kinds for p in names))
        forward, backward = graph.train, graph.train[:, ::-1]
        facts = np.concatenate([forward, backward, forward, backward])
        facts[:, 1] += np.repeat(np.arange(4, dtype=np.int32) * preds, n)
        clauses, called = [], []
        heads = np.repeat(np.arange(2 * preds), np.diff(chains.ptr))
        for i, head in enumerate(heads.tolist()):
            path = chains.bodies[i, : chains.lengths[i]].tolist()
            clauses.append(_clause(head, path, preds, vocab.num_entities))
            rule, backwards = divmod(int(chains.origin[i]), 2)
            called.append(f"{rules.names[rule]} {'head' if backwards else 'tail'}")
        inverse = np.full(4 * preds, -1, np.int32)
        inverse[2 * preds : 3 * preds] = np.arange(preds, 2 * preds)
        inverse[3 * preds :] = np.arange(preds)
        return cls(
            chains,
            Steps.of(graph.facts),
            Facts.of(facts, vocab),
            Rules.of(clauses, vocab, chains.weights.tolist(), called),
            inverse,
        )

    @property
    def num_rules(self) -> int:
        """Of both ends together."""
        return len(self.rules)

    @property
    def skipped(self) -> tuple[str, ...]:
        """Names of the rules that are not chains."""
        return self.chains.skipped

    @property
    def first_question(self) -> int:
        """The lowest predicate that is a question."""
        return 2 * self.steps.num_predicates

    @property
    def depth(self) -> int:
        """Steps of the longest proof."""
        return 1 + int(self.chains.lengths.max())

    @property
    def goals(self) -> int:
        """Goals of the longest body."""
        return self.depth - 1

    @property
    def width(self) -> int:
        """Actions that hold all rules of a query, and as many facts as fit on a page.

        The facts of a hub take several pages, or it would decide how much memory all others need.
        """
        facts = min(int(np.diff(self.steps.ptr).max()), PAGE)
        return 2 + max(int(np.diff(self.chains.ptr).max()), facts)

    def env(self, questions: Ints, num_envs: int, *, depth: int = 0, **more: Any) -> ProverEnv:
        """An environment that asks these; 0: full depth."""
        return ProverEnv(
            self.facts,
            self.rules,
            questions,
            num_envs,
            depth=depth or self.depth,
            max_candidates=self.width,
            goals=self.goals,
            inverse=self.inverse,
            **more,
        )

    def questions(self, triples: Ints) -> Ints:
        """Both questions of each triple, all that ask for tails first, as triples [2 n, 3]."""
        both = np.concatenate([triples, triples[:, ::-1]]).astype(np.int32)
        both[:, 1] += np.repeat(
            np.array([2, 3], np.int32) * self.steps.num_predicates, len(triples)
        )
        return both

    def as_steps(self, questions: Ints) -> NDArray[np.int64]:
        """Questions as (entity, step, answer), as kernels take them."""
        found = questions.astype(np.int64)
        found[:, 1] -= self.first_question
        return found


def _clause(head: int, path: list[int], preds: int, n: int) -> Clause:
    """The rule that answers a question by a path of steps; variables are numbered along it."""
    nodes = [n, *range(n + 2, n + 1 + len(path)), n + 1]
    body = []
    for i, step in enumerate(path):
        x, y = nodes[i], nodes[i + 1]
        base = step % preds
        if (step < preds) == (head >= preds):
            # Read along the predicate as it is, or against its inverse.
            body.append((base, x, y) if head >= preds else (preds + base, x, y))
        else:
            body.append((base, y, x) if head >= preds else (preds + base, y, x))
    return (2 * preds + head, n, n + 1), body
