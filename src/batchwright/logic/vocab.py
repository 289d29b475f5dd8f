"""Vocabulary: every entity and predicate of a graph has an id.

Ids of terms: `0 .. num_entities - 1` are entities; `num_entities + v` is the variable number `v`.
"""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field

from batchwright.errors import BadProgram

__all__ = ["INVERSE", "KGE", "Vocab"]

INVERSE = "_inverse"
"""Suffix of the inverse of a predicate: it reads from tail to head."""

KGE = "_kge"
"""Suffix of the predicate that holds what an embedding predicts of another one."""


@dataclass(frozen=True, slots=True)
class Vocab:
    """Entities and predicates in the order of their ids.

    `of` sorts both by name, so that ids do not depend on the order of the files. Predicates that
    are derived from others (`with_inverses`, `with_kge`) follow after them in the same order:
    the id of a derived one is the id of its base plus a constant.

    >>> vocab = Vocab.of(["rome", "italy"], ["capital_of"]).with_kge()
    >>> vocab.entities, vocab.predicates, vocab.num_predicates
    (('italy', 'rome'), ('capital_of', 'capital_of_kge'), 2)
    """

    entities: tuple[str, ...]
    predicates: tuple[str, ...]
    entity_ids: dict[str, int] = field(init=False, repr=False, compare=False)
    predicate_ids: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for names, what, slot in (
            (self.entities, "entity", "entity_ids"),
            (self.predicates, "predicate", "predicate_ids"),
        ):
            ids = {name: number for number, name in enumerate(names)}
            if len(ids) != len(names):
                twice = next(name for number, name in enumerate(names) if ids[name] != number)
                raise BadProgram(
                    f"duplicate {what} {twice!r} in the vocabulary; names must be unique"
                )
            object.__setattr__(self, slot, ids)

    @classmethod
    def of(cls, entities: Iterable[str], predicates: Iterable[str]) -> "Vocab":
        """The vocabulary of these names, each once, sorted."""
        return cls(tuple(sorted(set(entities))), tuple(sorted(set(predicates))))

    @property
    def num_entities(self) -> int:
        """How many entities there are: also the id of the first variable."""
        return len(self.entities)

    @property
    def num_predicates(self) -> int:
        """How many rows a table of predicates needs, derived predicates included."""
        return len(self.predicates)

    def entity(self, name: str) -> int:
        return _found(name, self.entity_ids, "entity")

    def predicate(self, name: str) -> int:
        return _found(name, self.predicate_ids, "predicate")

    def with_inverses(self) -> "Vocab":
        """The same, with `p_inverse` after all predicates for every predicate `p`."""
        return Vocab(self.entities, (*self.predicates, *(p + INVERSE for p in self.predicates)))

    def with_kge(self) -> "Vocab":
        """The same, with `p_kge` after all predicates for every predicate `p`."""
        return Vocab(self.entities, (*self.predicates, *(p + KGE for p in self.predicates)))

    def accepts(self, predicate: int) -> bool:
        """Whether this is the `p_kge` of another predicate `p`."""
        name = self.predicates[predicate]
        return name.endswith(KGE) and name.removesuffix(KGE) in self.predicate_ids

    def term(self, number: int) -> str:
        """A term for people: an entity's name, or X0, X1, ... for a variable."""
        if 0 <= number < self.num_entities:
            return self.entities[number]
        return f"X{number - self.num_entities}"

    def atom(self, predicate: int, first: int, second: int) -> str:
        return f"{self.predicates[predicate]}({self.term(first)}, {self.term(second)})"

    def __repr__(self) -> str:
        return f"Vocab({self.num_entities:,} entities, {self.num_predicates:,} predicates)"


def _found(name: str, ids: dict[str, int], what: str) -> int:
    if name in ids:
        return ids[name]
    plural = "entities" if what == "entity" else "predicates"
    near = difflib.get_close_matches(name, ids, n=3) if len(ids) <= 100_000 else []
    if what == "predicate" and name.endswith(KGE) and name.removesuffix(KGE) in ids:
        hint = "only an embedding answers it: give one with --kge"
    elif near:
        hint = "did you mean " + " or ".join(near) + "?"
    elif len(ids) <= 12:
        hint = f"known {plural}: {', '.join(ids) or 'none'}"
    else:
        hint = f"it is none of the {len(ids):,} {plural}"
    raise BadProgram(f"unknown {what} {name!r}; {hint}")
