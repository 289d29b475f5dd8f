"""The prover in plain Python, as the textbooks have it: what the kernels must equal."""

from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from batchwright.logic.prove.search import FACT, RULE
from batchwright.logic.rules import Rules
from batchwright.logic.vocab import Vocab

Atom = tuple[int, int, int]
State = tuple[tuple[Atom, ...], int]
"""Goals and the answer, variables numbered as they appear."""
Row = tuple[int, int, int, int]


def unified(pairs: list[tuple[Any, Any]], is_entity: Any) -> dict[Any, Any] | None:
    """A most general unifier of flat terms, by Robinson's rules."""
    bound: dict[Any, Any] = {}

    def value(term: Any) -> Any:
        while term in bound:
            term = bound[term]
        return term

    for a, b in pairs:
        a, b = value(a), value(b)
        if a == b:
            continue
        if is_entity(a) and is_entity(b):
            return None
        if is_entity(a):
            a, b = b, a
        bound[a] = b
    return {term: value(term) for term in bound}


def canonical(goals: list[tuple[int, Any, Any]], answer: Any, n: int) -> State:
    names: dict[Any, int] = {}

    def name(term: Any) -> int:
        if isinstance(term, int) and term < n:
            return term
        return names.setdefault(term, n + len(names))

    renamed = tuple((p, name(x), name(y)) for p, x, y in goals)
    return renamed, name(answer)


def successors(
    state: State, triples: set[Atom], rules: Rules, n: int, hidden: set[Atom]
) -> Iterator[tuple[Row, State]]:
    """Every way to resolve the first goal, in the order in which the environment lists them."""
    goals, answer = state
    (p, x, y), rest = goals[0], goals[1:]

    def applied(bound: dict[Any, Any], body: list[tuple[int, Any, Any]]) -> State:
        def put(term: Any) -> Any:
            return bound.get(term, term)

        atoms = [(q, put(a), put(b)) for q, a, b in [*body, *rest]]
        return canonical(atoms, put(answer), n)

    def is_entity(term: Any) -> bool:
        return isinstance(term, int) and term < n

    facts = []
    for s, q, o in sorted(triples - hidden):
        bound = unified([(x, s), (y, o)], is_entity) if q == p else None
        if bound is not None:
            facts.append(((FACT, p, s, o), applied(bound, [])))
    by_rules = []
    for r in range(len(rules)):
        head, body = rules.clause(r)
        if head[0] != p:
            continue

        def apart(term: int) -> Any:
            return term if term < n else ("rule", term)

        # The rule's variables come first, so that the goal keeps its own where it can.
        bound = unified([(apart(head[1]), x), (apart(head[2]), y)], is_entity)
        if bound is None:
            continue
        after = applied(bound, [(q, apart(a), apart(b)) for q, a, b in body])
        shown = [bound.get(term, term) for term in (x, y)]
        by_rules.append(((RULE, r, *shown), after))
    if x < n and y < n:
        yield from facts
        yield from by_rules
    else:
        yield from by_rules
        yield from facts


def shortest(
    goal: Atom, answer: int, triples: set[Atom], rules: Rules, n: int, hidden: set[Atom], depth: int
) -> dict[int, int]:
    """The least number of steps to every answer, by breadth-first search over all states."""
    found: dict[int, int] = {}
    frontier = {canonical([goal], answer, n)}
    seen = set(frontier)
    for steps in range(1, depth + 1):
        following: set[State] = set()
        for state in frontier:
            for _, after in successors(state, triples, rules, n, hidden):
                if not after[0]:
                    found.setdefault(after[1], steps)
                elif after not in seen and len(after[0]) <= depth - steps:
                    seen.add(after)
                    following.add(after)
        frontier = following
    return found


@st.composite
def programs(draw: st.DrawFn, most_body: int = 4) -> tuple[Vocab, list[Atom], Rules]:
    """Small random programs with cycles, constants, repeated variables and empty bodies."""
    n, preds = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    vocab = Vocab.of([f"e{i}" for i in range(n)], [f"p{i}" for i in range(preds)])
    entity, predicate = st.integers(0, n - 1), st.integers(0, preds - 1)
    triples = draw(st.lists(st.tuples(entity, predicate, entity), max_size=8))
    term = st.one_of(st.integers(n, n + 3), entity, st.integers(n, n + 1))
    atom = st.tuples(predicate, term, term)
    bodies = st.integers(0, most_body).flatmap(lambda m: st.lists(atom, min_size=m, max_size=m))
    clauses = draw(st.lists(st.tuples(atom, bodies), max_size=5))
    return vocab, triples, Rules.of(clauses, vocab)
