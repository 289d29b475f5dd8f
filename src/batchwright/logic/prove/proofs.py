"""Proofs of queries from facts and rules: all of them up to a depth, shortest first.

This is the oracle that the environment is tested against, the teacher of behaviour cloning, and the
explanation of an answer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from batchwright.errors import BadProgram, ConfigError, Mismatch
from batchwright.logic.facts import Facts, as_triples
from batchwright.logic.prove import search as kernels
from batchwright.logic.prove.search import FACT
from batchwright.logic.prove.unify import program, scratch_size
from batchwright.logic.rules import Atom, Rules
from batchwright.logic.vocab import Vocab

__all__ = ["Node", "Proof", "Proofs", "Shortest", "hidden_facts", "prove", "prove_all"]

Ints = NDArray[np.int32]

OPEN = -1
"""In the place of a rule: a goal that an unfinished proof leaves unresolved."""

MAX_NODES = 10_000_000
"""Steps one search may try: some seconds. A search that stops here is not `complete`."""

TABLE_ROWS = 1 << 14


@dataclass(frozen=True, slots=True)
class Node:
    """A goal of a proof with its variables bound, and how it was proved."""

    atom: Atom
    rule: int | None
    """None: it is a fact; OPEN: no step of the proof is about it."""
    children: tuple["Node", ...] = ()

    def lines(self, rules: Rules, vocab: Vocab, indent: str = "") -> Iterator[str]:
        """The tree as text, a goal a line."""
        leaf = "embedding" if vocab.accepts(self.atom[0]) else "fact"
        by = leaf if self.rule is None else f"by {rules.names[self.rule]}"
        reason = "open" if self.rule == OPEN else by
        yield f"{vocab.atom(*self.atom)}  [{reason}]"
        for i, child in enumerate(self.children):
            last = i == len(self.children) - 1
            first, *rest = child.lines(rules, vocab)
            yield f"{indent}{'└─ ' if last else '├─ '}{first}"
            yield from (f"{indent}{'   ' if last else '│  '}{line}" for line in rest)


@dataclass(frozen=True, slots=True)
class Proof:
    """One proof: how each goal was resolved, in the order in which goals are met."""

    query: Atom
    answer: int
    """The entity found for the open argument, or the second argument of a ground query. Where
    anything at all would do, it is a variable: an id from `num_entities` on."""
    steps: tuple[tuple[int, int, int, int], ...]
    """Rows (FACT, predicate, subject, object) and (RULE, rule, -1, -1)."""

    def __len__(self) -> int:
        return len(self.steps)

    def weight(self, rules: Rules) -> float:
        """The product of the weights of the rules that were used, each time they were."""
        used = [step[1] for step in self.steps if step[0] != FACT]
        return float(np.prod(rules.weight[used]))

    def tree(self, rules: Rules) -> Node:
        """The proof as a tree; a variable that was bound is shown as what it stands for.

        Where the steps end before all goals are resolved, the rest of the goals are `OPEN`.
        """
        bound: dict[int, int] = {}
        fresh = rules.num_entities + 2
        steps = iter(self.steps)
        n = rules.num_entities

        def value(term: int) -> int:
            while term in bound:
                term = bound[term]
            return term

        def equal(a: int, b: int) -> None:
            a, b = value(a), value(b)
            if a != b:
                bound[max(a, b)] = min(a, b)

        def build(goal: Atom) -> Node:
            nonlocal fresh
            kind, number, s, o = next(steps, (OPEN, 0, 0, 0))
            if kind == OPEN:
                return Node(goal, OPEN)
            if kind == FACT:
                equal(goal[1], s)
                equal(goal[2], o)
                return Node(goal, None)
            base = fresh
            fresh += int(rules.variables[number])
            head, body = rules.clause(number)
            apart = [
                (p, *(t if t < n else base + t - n for t in (x, y))) for p, x, y in (head, *body)
            ]
            equal(goal[1], apart[0][1])
            equal(goal[2], apart[0][2])
            return Node(goal, number, tuple(build(atom) for atom in apart[1:]))  # type: ignore[arg-type]

        def settled(node: Node) -> Node:
            p, x, y = node.atom
            children = tuple(settled(child) for child in node.children)
            return Node((p, value(x), value(y)), node.rule, children)

        return settled(build(self.query))


class Proofs(NamedTuple):
    """What a search found."""

    found: list[Proof]
    complete: bool
    """False: a bound ended the search (`max_nodes`, `max_proofs`); there may be more."""


class Shortest(NamedTuple):
    """One shortest proof for each of many queries."""

    lengths: Ints
    """Steps of the proof, [q]; 0: none up to the depth; -1: `max_nodes` ended the search."""
    steps: Ints
    """[q, depth, 4]; rows as in `Proof.steps`, of which the first `lengths` count."""

    @property
    def share(self) -> float:
        """The share of queries that are provable."""
        return float(np.mean(self.lengths > 0)) if len(self.lengths) else 0.0


def prove(
    query: Sequence[int],
    facts: Facts,
    rules: Rules,
    depth: int = 5,
    *,
    hide: ArrayLike = (),
    every: bool = False,
    one_rule: bool = False,
    max_nodes: int = MAX_NODES,
    max_proofs: int = 100_000,
) -> Proofs:
    """Prove the triple `query` (head, predicate, tail), in which -1 asks for an entity.

    A ground query gets one shortest proof; an open one gets a shortest proof for each of its
    answers, nearest first. With `every` set, all proofs come, also the longer ones of an answer;
    with `one_rule` all of those in which no rule proves the body of another.
    `hide` holds triples that no proof may use.

    >>> vocab = Vocab.of(["anna", "bo", "cy"], ["grandparent", "parent"])
    >>> facts = Facts.of([(0, 1, 1), (1, 1, 2)], vocab)
    >>> from batchwright.logic.rules import parse_rules
    >>> rules = parse_rules("gp:0.9:parent(x,y), parent(y,z) -> grandparent(x,z)", vocab)
    >>> (proof,), complete = prove((0, 0, -1), facts, rules)
    >>> print("\\n".join(proof.tree(rules).lines(rules, vocab)))
    grandparent(anna, cy)  [by gp]
    ├─ parent(anna, bo)  [fact]
    └─ parent(bo, cy)  [fact]
    """
    _fit(facts, rules, depth)
    n = facts.num_entities
    h, p, t = (int(part) for part in query)
    if not 0 <= p < facts.num_predicates or not (-1 <= h < n and -1 <= t < n):
        raise BadProgram(f"the query {(h, p, t)} holds ids outside the vocabulary: {facts!r}")
    if h < 0 and t < 0:
        raise BadProgram("both arguments of the query are open; name at least one entity")
    goal = np.array([p, n if h < 0 else h, n if t < 0 else t], np.int32)
    is_open = h < 0 or t < 0
    # A ground query ends at its first proof, and an open one has no more answers than entities.
    mode, most = (kernels.ANSWERS, min(n + 1, max_proofs)) if is_open else (kernels.FIRST, 1)
    if every or one_rule:
        mode, most = kernels.ONE_RULE if one_rule else kernels.ALL, max_proofs
    steps = np.zeros((most, depth, 4), np.int32)
    lengths, answers = np.zeros(most, np.int32), np.zeros(most, np.int32)
    count, complete = kernels.search(
        program(facts, rules),
        n,
        goal,
        n if is_open else t,
        as_triples(hide),
        depth,
        mode,
        max_nodes,
        _scratch(depth, rules),
        _table(depth),
        1,
        np.zeros(n + 1, np.bool_),
        steps,
        lengths,
        answers,
    )
    query_atom = (p, int(goal[1]), int(goal[2]))
    proofs = [
        Proof(
            query_atom,
            int(answers[i]),
            tuple((k, a, b, c) for k, a, b, c in steps[i, : lengths[i]].tolist()),
        )
        for i in range(count)
    ]
    return Proofs(proofs, complete)


def prove_all(
    queries: ArrayLike,
    facts: Facts,
    rules: Rules,
    depth: int = 5,
    *,
    inverse: Ints | None = None,
    hide_self: bool = True,
    max_nodes: int = MAX_NODES,
) -> Shortest:
    """One shortest proof for each ground query (head, predicate, tail).

    No query is proved by itself: its own fact is hidden, and so is its `inverse` (for each
    predicate the one declared as its inverse, or -1), unless `hide_self` is False.
    """
    _fit(facts, rules, depth)
    asked = as_triples(queries)
    hidden = (
        hidden_facts(asked, inverse) if hide_self else np.full((len(asked), 0, 3), -1, np.int32)
    )
    lengths = np.zeros(len(asked), np.int32)
    steps = np.full((len(asked), depth, 4), -1, np.int32)
    prog, scratch, table = program(facts, rules), _scratch(depth, rules), _table(depth)
    seen, answers = np.zeros(1, np.bool_), np.zeros(1, np.int32)
    for q, (h, p, t) in enumerate(asked.tolist()):
        goal = np.array([p, h, t], np.int32)
        count, complete = kernels.search(
            prog,
            facts.num_entities,
            goal,
            t,
            hidden[q],
            depth,
            kernels.FIRST,
            max_nodes,
            scratch,
            table,
            q + 1,
            seen,
            steps[q : q + 1],
            lengths[q : q + 1],
            answers,
        )
        if not count:
            lengths[q] = 0 if complete else -1
    return Shortest(lengths, steps)


def hidden_facts(queries: Ints, inverse: Ints | None) -> Ints:
    """The facts that each query must not be proved by: itself and its inverse, [q, 2, 3]."""
    hidden = np.full((len(queries), 2, 3), -1, np.int32)
    hidden[:, 0] = queries
    if inverse is not None:
        predicate = np.asarray(inverse, np.int32)[queries[:, 1]]
        inverted = np.stack([queries[:, 2], predicate, queries[:, 0]], axis=1)
        hidden[:, 1] = np.where(predicate[:, None] >= 0, inverted, -1)
    return hidden


def _fit(facts: Facts, rules: Rules, depth: int) -> None:
    theirs = (facts.num_entities, facts.num_predicates)
    ours = (rules.num_entities, rules.num_predicates)
    if theirs != ours:
        raise Mismatch(
            f"facts have {theirs[0]:,} entities and {theirs[1]:,} predicates, rules {ours[0]:,} "
            f"and {ours[1]:,}; build both with one vocabulary"
        )
    if depth < 1:
        raise ConfigError(f"depth must be at least 1, got {depth}")


def _scratch(depth: int, rules: Rules) -> Ints:
    return np.zeros((2, scratch_size(max(depth, 1), rules)), np.int32)


def _table(depth: int) -> Ints:
    return np.zeros((TABLE_ROWS, max(depth, 1) + 2, 3), np.int32)
