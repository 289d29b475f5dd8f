"""Horn rules: `head :- body` over binary predicates, read from text or built from arrays.

Two forms are read, one clause a line; `%` and `#` begin comments.

    r0:0.75:brother(a,h), mother(b,h) -> son(a,b)       name, weight, body -> head
    0.75::son(A,B) :- brother(A,H), mother(B,H).        Prolog, with ProbLog's weight if any

Which names are variables? In Prolog form, those that begin with an upper-case letter or `_`. In
arrow form, a name that is an entity of the vocabulary is that entity; any other name is a variable
if it begins with an upper-case letter, `_` or `?`, or is one letter with digits after it or none
(`a`, `x1`); everything else is an error, not a guess. Quotes force an entity in both. Each lone
`_` is a new variable.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from batchwright.errors import BadProgram, Mismatch
from batchwright.files import read_regular_text
from batchwright.fingerprint import digest, digest_array
from batchwright.logic.loaders import read_lines
from batchwright.logic.vocab import Vocab
from batchwright.sealed import check_text

__all__ = ["Clause", "Rules", "parse_atom", "parse_rules"]

Ints = NDArray[np.int32]
Atom = tuple[int, int, int]
"""Predicate and two terms; terms from `num_entities` on are variables."""
Clause = tuple[Atom, Sequence[Atom]]
"""Head and body."""

_TOKEN = re.compile(
    r"\s*(?:(?P<quoted>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")"
    r"|(?P<mark>->|:-|[(),])|(?P<bare>(?:(?!->|:-)[^\s(),'\"])+))"
)
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_ARROW_PREFIX = re.compile(rf"\s*([^():,'\"]*):\s*({_NUMBER})\s*:")
_PROBLOG_PREFIX = re.compile(rf"\s*({_NUMBER})\s*::")
_VARIABLE = re.compile(r"[A-Z_?]|[a-z]\d*$")


@dataclass(frozen=True, slots=True, eq=False)
class Rules:
    """R rules as arrays: `head` [R, 3], `body` [R, M, 3] padded with -1, `body_len` [R].

    An atom is (predicate, term, term). Terms below `num_entities` are entities; others are
    variables, numbered from `num_entities` in the order in which they appear in the rule, head
    first. `variables[r]` says how many rule r has. Rules keep their order; those whose head has
    the predicate p are `by_head[head_ptr[p] : head_ptr[p + 1]]`.
    """

    head: Ints
    body: Ints
    body_len: Ints
    weight: NDArray[np.float64]
    names: tuple[str, ...]
    num_entities: int
    num_predicates: int
    variables: Ints = field(init=False)
    by_head: Ints = field(init=False)
    head_ptr: Ints = field(init=False)

    def __post_init__(self) -> None:
        if len(set(self.names)) != len(self.names):
            twice = next(name for i, name in enumerate(self.names) if name in self.names[:i])
            raise BadProgram(
                f"two rules are named {twice!r}; names must be unique, since proofs refer to them"
            )
        # -1 is padding, so the largest term is a variable of the rule or an entity.
        largest = np.concatenate([self.head[:, None, 1:], self.body[:, :, 1:]], 1).max((1, 2))
        counts = np.maximum(0, largest - self.num_entities + 1).astype(np.int32)
        order = np.argsort(self.head[:, 0], kind="stable").astype(np.int32)
        sizes = np.bincount(self.head[:, 0], minlength=self.num_predicates)
        ptr = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
        for name, value in (("variables", counts), ("by_head", order), ("head_ptr", ptr)):
            object.__setattr__(self, name, value)

    @classmethod
    def of(
        cls,
        clauses: Iterable[Clause],
        vocab: Vocab,
        weights: Iterable[float] | None = None,
        names: Iterable[str] | None = None,
    ) -> "Rules":
        """Rules from heads and bodies of ids; variables may have any number from `num_entities` on.

        >>> vocab = Vocab.of(["a"], ["p", "q"])
        >>> x, y, z = 7, 8, 9
        >>> rules = Rules.of([((0, x, y), [(1, x, z), (1, z, y)])], vocab)
        >>> rules.text(0, vocab)
        'r0:1:q(X,Z), q(Z,Y) -> p(X,Y)'
        """
        n = vocab.num_entities
        listed = [_canonical((head, *body), n) for head, body in clauses]
        longest = max((len(atoms) - 1 for atoms in listed), default=0)
        head = np.zeros((len(listed), 3), np.int32)
        body = np.full((len(listed), longest, 3), -1, np.int32)
        for r, atoms in enumerate(listed):
            head[r] = atoms[0]
            for i, atom in enumerate(atoms[1:]):
                body[r, i] = atom
        return cls(
            head,
            body,
            np.array([len(atoms) - 1 for atoms in listed], np.int32),
            np.ones(len(listed)) if weights is None else np.array(list(weights), np.float64),
            tuple(f"r{r}" for r in range(len(listed))) if names is None else tuple(names),
            n,
            vocab.num_predicates,
        )

    def over(self, vocab: Vocab) -> "Rules":
        """The same rules over another vocabulary in which all that they name has the same id."""
        n = self.num_entities
        if (n, self.num_predicates) == (vocab.num_entities, vocab.num_predicates):
            return self
        clauses = [self.clause(r) for r in range(len(self))]
        atoms = [atom for head, body in clauses for atom in (head, *body)]
        constants = [term for atom in atoms for term in atom[1:] if term < n]
        if max((atom[0] for atom in atoms), default=-1) >= vocab.num_predicates or (
            max(constants, default=-1) >= vocab.num_entities
        ):
            raise Mismatch(
                "the rules name entities or predicates that only the test part has; leave those "
                "rules out"
            )
        shift = vocab.num_entities - n

        def moved(atom: Atom) -> Atom:
            p, x, y = atom
            return p, x if x < n else x + shift, y if y < n else y + shift

        return Rules.of(
            [(moved(head), [moved(atom) for atom in body]) for head, body in clauses],
            vocab,
            self.weight.tolist(),
            self.names,
        )

    def plus(self, other: "Rules") -> "Rules":
        """These rules and then those of `other`, which is over the same vocabulary."""
        longest = max(self.body.shape[1], other.body.shape[1])
        bodies = np.full((len(self) + len(other), longest, 3), -1, np.int32)
        bodies[: len(self), : self.body.shape[1]] = self.body
        bodies[len(self) :, : other.body.shape[1]] = other.body
        return Rules(
            np.concatenate([self.head, other.head]),
            bodies,
            np.concatenate([self.body_len, other.body_len]),
            np.concatenate([self.weight, other.weight]),
            self.names + other.names,
            self.num_entities,
            self.num_predicates,
        )

    def __len__(self) -> int:
        return len(self.names)

    @property
    def fingerprint(self) -> str:
        """Identity of the rules, in their order with names and weights."""
        arrays = (self.head, self.body, self.body_len)
        # As they stand in a file.
        weights = [f"{weight:.12g}" for weight in self.weight.tolist()]
        return digest("rules", list(self.names), weights, *map(digest_array, arrays))

    def clause(self, r: int) -> tuple[Atom, list[Atom]]:
        """Head and body of rule `r` as plain tuples."""
        p, a, b = self.head[r].tolist()
        return (p, a, b), [(q, x, y) for q, x, y in self.body[r, : self.body_len[r]].tolist()]

    def text(self, r: int, vocab: Vocab) -> str:
        """Rule `r` in arrow form; `parse_rules` reads it back to the same rule."""
        # A letter that is also an entity's name would be read as that entity.
        letters = (name for name in _letters() if name not in vocab.entity_ids)
        names = [name for name, _ in zip(letters, range(self.variables[r]), strict=False)]

        def term(number: int) -> str:
            return (
                names[number - self.num_entities]
                if number >= self.num_entities
                else _quoted(vocab.entities[number])
            )

        def atom(given: Atom) -> str:
            return f"{_quoted(vocab.predicates[given[0]])}({term(given[1])},{term(given[2])})"

        head, body = self.clause(r)
        said = ", ".join(atom(one) for one in body)
        return f"{self.names[r]}:{self.weight[r]:.12g}:{said} -> {atom(head)}"

    def __repr__(self) -> str:
        longest = int(self.body_len.max(initial=0))
        return f"Rules({len(self):,} rules, bodies up to {longest} atoms)"


def parse_rules(source: Path | str, vocab: Vocab) -> Rules:
    """Rules from a file (a `Path`) or from text (a `str`), in either form of this module.

    >>> vocab = Vocab.of(["rome", "italy"], ["capital_of", "in"])
    >>> rules = parse_rules("in(X, Y) :- capital_of(X, Y).", vocab)
    >>> rules.text(0, vocab)
    'r0:1:capital_of(X,Y) -> in(X,Y)'
    >>> parse_rules("in(X, Y) :- capital(X, Y).", vocab)
    Traceback (most recent call last):
    batchwright.errors.BadProgram: line 1: unknown predicate 'capital'; did you mean capital_of?
    """
    if isinstance(source, Path):
        lines = [(f"{source}, line {number}", line) for number, line in read_lines(source)]
        if not lines and not check_text(read_regular_text(source, "utf-8-sig"), source, ""):
            # In one that was mined, and is sealed, there may be none.
            raise BadProgram(f"{source} has no rules; write at least one, {_FORMS}")
    else:
        lines = [
            (f"line {number}", line)
            for number, line in enumerate(source.split("\n"), 1)
            if line.strip() and line.lstrip()[0] not in "%#"
        ]
    clauses: list[Clause] = []
    weights, names = [], []
    seen: dict[str, str] = {}
    for where, line in lines:
        try:
            name, weight, clause = _clause(line, vocab)
            name = name or f"r{len(clauses)}"
            if name in seen:
                raise BadProgram(f"the name {name!r} is already used on {seen[name]}")
        except BadProgram as error:
            raise BadProgram(f"{where}: {error}") from None
        seen[name] = where
        clauses.append(clause)
        weights.append(weight)
        names.append(name)
    return Rules.of(clauses, vocab, weights, names)


def parse_atom(text: str, vocab: Vocab) -> tuple[Atom, dict[str, int]]:
    """A query such as `in(rome, X)`, and the ids of its variables by name.

    A name that is an entity is that entity; else it is a variable if it begins with an
    upper-case letter, `_` or `?`, and an error if not.
    """
    tokens = _tokens(text.strip().removesuffix(".").removeprefix("?-"))
    atoms, rest = _atoms(tokens)
    if len(atoms) != 1 or rest:
        raise BadProgram(f"{text!r} is not a query; write one atom such as relation(head, X)")
    ids: dict[str, int] = {}
    return _atom(atoms[0], vocab, ids, arrow=True, letters=False), ids


Token = tuple[str, bool]
"""The text, and whether it stood in quotes."""
Named = tuple[str, list[Token]]
"""A predicate's name and its arguments."""


def _clause(line: str, vocab: Vocab) -> tuple[str, float, Clause]:
    """Name, weight and clause of one line; the name is empty where none is given."""
    name, weight = "", 1.0
    if (match := _ARROW_PREFIX.match(line)) and "->" in line:
        name, weight = match[1].strip(), float(match[2])
        line = line[match.end() :]
    elif match := _PROBLOG_PREFIX.match(line):
        weight = float(match[1])
        line = line[match.end() :]
    first, rest = _atoms(_tokens(line.strip().removesuffix(".")))
    arrow = bool(rest) and rest[0] == ("->", False)
    if arrow:
        heads, rest = _atoms(rest[1:])
        body = first
    elif rest and rest[0] == (":-", False):
        heads = first
        body, rest = _atoms(rest[1:])
    else:
        heads, body = first, []
    if rest:
        raise BadProgram(f"unexpected {rest[0][0]!r}; {_FORMS}")
    if len(heads) != 1:
        raise BadProgram(f"{len(heads)} heads; a rule must have one, {_FORMS}")
    ids: dict[str, int] = {}
    head = _atom(heads[0], vocab, ids, arrow)
    return name, weight, (head, [_atom(one, vocab, ids, arrow) for one in body])


_FORMS = "write 'name:weight:body -> head' or 'head :- body.'"


def _tokens(line: str) -> list[Token]:
    out: list[Token] = []
    at = 0
    while at < len(line) and line[at:].strip():
        match = _TOKEN.match(line, at)
        if match is None:
            raise BadProgram(f"unclosed quote at {line[at:].strip()[:30]!r}")
        if match["quoted"] is not None:
            out.append((re.sub(r"\\(.)", r"\1", match["quoted"][1:-1]), True))
        else:
            out.append((match["mark"] or match["bare"], False))
        at = match.end()
    return out


def _atoms(tokens: list[Token]) -> tuple[list[Named], list[Token]]:
    """The atoms at the beginning, and what follows them."""
    atoms: list[Named] = []
    at = 0
    while at < len(tokens) and tokens[at] not in (("->", False), (":-", False)):
        if atoms:
            if tokens[at] != (",", False):
                raise BadProgram(f"expected ',' between atoms, got {tokens[at][0]!r}; {_FORMS}")
            at += 1
        if at + 1 >= len(tokens) or tokens[at + 1] != ("(", False):
            seen = tokens[at][0] if at < len(tokens) else "the end"
            raise BadProgram(f"expected an atom like relation(x, y), got {seen!r}; {_FORMS}")
        name = tokens[at][0]
        arguments: list[Token] = []
        at += 2
        while at < len(tokens) and tokens[at] != (")", False):
            if arguments:
                if tokens[at] != (",", False):
                    raise BadProgram(f"expected ',' or ')' in {name}, got {tokens[at][0]!r}")
                at += 1
            if at >= len(tokens) or tokens[at] in ((",", False), (")", False), ("(", False)):
                raise BadProgram(f"missing argument in {name}")
            arguments.append(tokens[at])
            at += 1
        if at >= len(tokens):
            raise BadProgram(f"unclosed parenthesis of {name}")
        at += 1
        atoms.append((name, arguments))
    return atoms, tokens[at:]


def _atom(
    named: Named, vocab: Vocab, ids: dict[str, int], arrow: bool, letters: bool = True
) -> Atom:
    name, arguments = named
    if len(arguments) != 2:
        raise BadProgram(
            f"{name} has {len(arguments)} arguments; predicates must have two, relation(x, y)"
        )
    predicate = vocab.predicate(name)
    first, second = (_term(token, vocab, ids, arrow, letters) for token in arguments)
    return predicate, first, second


def _term(token: Token, vocab: Vocab, ids: dict[str, int], arrow: bool, letters: bool) -> int:
    name, quoted = token
    if not quoted:
        known = name in vocab.entity_ids
        shaped = _VARIABLE.match(name) and (letters or not name[0].islower())
        if (shaped and not known) if arrow else name[0].isupper() or name[0] == "_":
            key = name if name != "_" else f"_ {len(ids)}"
            return ids.setdefault(key, vocab.num_entities + len(ids))
    return vocab.entity(name)


def _canonical(atoms: Sequence[Atom], n: int) -> list[Atom]:
    """The same atoms with variables numbered from `n` in the order of their appearance."""
    ids: dict[int, int] = {}
    return [
        (p, *(t if t < n else ids.setdefault(t, n + len(ids)) for t in (x, y)))  # type: ignore[misc]
        for p, x, y in atoms
    ]


def _letters() -> Iterable[str]:
    yield from "XYZUVWABCDEFGH"
    number = 0
    while True:
        yield f"V{number}"
        number += 1


def _quoted(name: str) -> str:
    if re.fullmatch(r"[\w/.#-]+", name) and "->" not in name and not name.endswith("."):
        return name
    return "'" + name.replace("\\", "\\\\").replace("'", "\\'") + "'"
