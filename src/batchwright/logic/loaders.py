"""Load graphs from folders of triples and from PyKEEN datasets."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from batchwright.errors import BadFile, BadProgram, MissingFile
from batchwright.files import existing, read_regular_text
from batchwright.logic.facts import Facts
from batchwright.logic.vocab import Vocab
from batchwright.sealed import check_text

__all__ = [
    "Graph",
    "PykeenDataset",
    "PykeenFactory",
    "load_graph",
    "read_lines",
    "read_triples",
    "shipped_graph",
]

Ints = NDArray[np.int32]
Named = tuple[str, str, str]
"""Head, relation, tail by name."""

SHIPPED = ("family",)
"""Graphs that come with the package."""

_QUOTED = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_ARGUMENT = rf"\s*({_QUOTED}|[^\s,()'\"][^,()]*?)\s*"
_PROLOG = re.compile(rf"\s*({_QUOTED}|[^\s,()'\"]+)\s*\(((?:{_QUOTED}|[^()'\"])*)\)\s*\.?\s*$")


@dataclass(frozen=True, eq=False)
class Graph:
    """A knowledge graph in three parts of int32 triples (head, predicate, tail), [n, 3].

    `train` holds the facts; `valid` and `test` hold the queries.
    """

    name: str
    vocab: Vocab
    train: Ints
    valid: Ints
    test: Ints
    inverse: Ints
    """For each predicate the one that is declared as its inverse, or -1."""

    @cached_property
    def facts(self) -> Facts:
        """The facts of `train`: what proofs may use."""
        return Facts.of(self.train, self.vocab)

    @cached_property
    def known(self) -> Facts:
        """Everything known to be true in any part, declared inverses included.

        It filters rankings: candidates that are true do not count as wrong answers.
        """
        parts = np.concatenate([self.train, self.valid, self.test])
        both = np.concatenate([parts, _inverses(parts, self.inverse)])
        return Facts.of(both, self.vocab)

    def without_test(self) -> "Graph":
        """The graph as it is before anyone looks at `test`: what is trained and chosen on.

        Entities and predicates that only `test` names have the highest ids, so all others keep
        theirs, and nothing of this graph depends on what `test` holds.
        """
        seen = np.concatenate([self.train, self.valid])
        entities = int(seen[:, [0, 2]].max(initial=-1)) + 1
        predicates = int(seen[:, 1].max(initial=-1)) + 1
        vocab = self.vocab
        if (entities, predicates) != (vocab.num_entities, vocab.num_predicates):
            vocab = Vocab(vocab.entities[:entities], vocab.predicates[:predicates])
        return replace(self, vocab=vocab, test=self.test[:0], inverse=self.inverse[:predicates])

    def with_inverses(self) -> "Graph":
        """The same graph with `p_inverse(t, h)` in `train` for each p(h, t) there.

        `valid` and `test` stay as they are: queries are asked as they were written.
        """
        preds = self.vocab.num_predicates
        numbers = np.arange(preds, dtype=np.int32)
        inverse = np.concatenate([numbers + preds, numbers]).astype(np.int32)
        train = np.concatenate([self.train, _inverses(self.train, inverse)])
        return replace(self, vocab=self.vocab.with_inverses(), train=train, inverse=inverse)

    def __repr__(self) -> str:
        sizes = f"{len(self.train):,} train, {len(self.valid):,} valid, {len(self.test):,} test"
        vocab = self.vocab
        return (
            f"Graph({self.name}: {vocab.num_entities:,} entities, "
            f"{vocab.num_predicates:,} predicates, {sizes})"
        )


class PykeenFactory(Protocol):
    """What is read of PyKEEN's `TriplesFactory`."""

    mapped_triples: Any
    entity_to_id: Mapping[str, int]
    relation_to_id: Mapping[str, int]


class PykeenDataset(Protocol):
    """What is read of PyKEEN's `Dataset`."""

    training: Any
    validation: Any
    testing: Any


def load_graph(source: str | Path | PykeenDataset | PykeenFactory) -> Graph:
    """The graph in a folder with `train.txt`, and `valid.txt` and `test.txt` if there are any.

    `family` is the small graph that comes with the package, unless a folder is called so. A line
    is `head<tab>relation<tab>tail`, or `relation(head, tail).` where lines that begin with `%` or
    `#` are comments. Empty lines are skipped. Ids go by sorted name: first the names of `train` and
    `valid`, then those that only `test` has.

    A PyKEEN dataset is read directly, and a `TriplesFactory` as a graph of facts alone. PyKEEN's
    `PathDataset` drops the test triples of entities that train does not name: give the folder
    instead to keep them.
    """
    if not isinstance(source, str | Path):
        return _from_pykeen(source)
    folder = Path(source)
    if str(source) in SHIPPED and not folder.exists():
        folder = shipped_graph(str(source))
    folder = existing(folder, "folder of triples")
    if not folder.is_dir():
        raise BadProgram(f"{folder} is a file, not a folder; give the folder that holds train.txt")
    if not (folder / "train.txt").exists():
        raise MissingFile(f"no train.txt in {folder}; a graph is a folder with train.txt")
    parts = [
        list(read_triples(folder / name)) if (folder / name).exists() else []
        for name in ("train.txt", "valid.txt", "test.txt")
    ]
    if not parts[0]:
        raise BadProgram(f"{folder / 'train.txt'} has no facts; give at least one")
    names = [({n for h, _, t in part for n in (h, t)}, {r for _, r, _ in part}) for part in parts]
    return _graph(folder.name, _vocab(names), parts)


def shipped_graph(name: str = "family") -> Path:
    """The folder of a graph that comes with the package, with its rules in `rules.txt`."""
    with as_file(files("batchwright.shipped").joinpath(name)) as folder:
        return existing(folder, "shipped graph")


def read_triples(path: Path) -> Iterator[Named]:
    """The triples of one file by name; the error for a bad line names file, line and reason.

    A line with two tabs is a triple whatever it begins with: `#` and `%` begin names too.
    """
    for number, line in _numbered(path):
        if not line.strip() or (line.count("\t") != 2 and line.lstrip()[0] in "%#"):
            continue
        if "\t" in line:
            fields = line.rstrip("\r\n").split("\t")
            empty = sum(not field.strip() for field in fields)
            if len(fields) != 3 or empty:
                raise BadProgram(
                    f"{path}, line {number}: expected 3 non-empty fields between tabs, got "
                    f"{len(fields)}{f', {empty} of them empty,' if empty else ''} in "
                    f"{line.rstrip()[:60]!r}; write head<tab>relation<tab>tail"
                )
            yield fields[0].strip(), fields[1].strip(), fields[2].strip()
        else:
            yield _prolog_fact(line, f"{path}, line {number}")


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a text file that are neither empty nor comments, numbered from 1.

    A text that is sealed, as that of mined rules is, must be as it was written.
    """
    for number, line in _numbered(path):
        if line.strip() and line.lstrip()[0] not in "%#":
            yield number, line


def _numbered(path: Path) -> Iterator[tuple[int, str]]:
    try:
        text = read_regular_text(existing(path, "file"), "utf-8-sig")
    except (BadFile, UnicodeDecodeError) as error:
        reason = f"not UTF-8: {error.reason}" if isinstance(error, UnicodeDecodeError) else error
        raise BadProgram(f"{path} cannot be read: {reason}; give a text file") from None
    check_text(text, path, "restore it, or delete its first and last line if the change was meant")
    yield from enumerate(text.split("\n"), 1)


def _prolog_fact(line: str, where: str) -> Named:
    match = _PROLOG.match(line)
    if match is None:
        raise BadProgram(
            f"{where}: {line.strip()[:60]!r} is not a fact; write head<tab>relation<tab>tail or "
            f"relation(head, tail)."
        )
    arguments = re.findall(rf"{_ARGUMENT}(?:,|$)", match[2])
    if len(arguments) != 2:
        raise BadProgram(f"{where}: {match[1]} has {len(arguments)} arguments; facts must have two")
    return _unquoted(arguments[0]), _unquoted(match[1]), _unquoted(arguments[1])


def _unquoted(name: str) -> str:
    if name[0] in "'\"" and name[-1] == name[0] and len(name) > 1:
        return re.sub(r"\\(.)", r"\1", name[1:-1])
    return name


def _vocab(names: Sequence[tuple[Iterable[str], Iterable[str]]]) -> Vocab:
    """Entities and predicates of train, valid and test; what only test names comes last."""
    entities, predicates = (
        [set().union(*(part[kind] for part in parts)) for parts in (names[:2], names[2:])]
        for kind in (0, 1)
    )
    return Vocab(
        *((*sorted(seen), *sorted(unseen - seen)) for seen, unseen in (entities, predicates))
    )


def _graph(name: str, vocab: Vocab, parts: list[list[Named]]) -> Graph:
    entity, predicate = vocab.entity_ids, vocab.predicate_ids
    arrays = [
        np.array([(entity[h], predicate[r], entity[t]) for h, r, t in part], np.int32).reshape(
            -1, 3
        )
        for part in parts
    ]
    train, valid, test = arrays
    return Graph(name, vocab, train, valid, test, np.full(vocab.num_predicates, -1, np.int32))


def _from_pykeen(source: Any) -> Graph:
    # Datasets without a validation part have None there.
    others = [getattr(source, name, None) for name in ("validation", "testing")]
    factories = [getattr(source, "training", source), *others]
    parts = [_pykeen_triples(f) if f is not None or not i else [] for i, f in enumerate(factories)]
    if not parts[0]:
        raise BadProgram(f"the {type(source).__name__} has no facts; give at least one")
    names = [
        (() if f is None else f.entity_to_id, () if f is None else f.relation_to_id)
        for f in factories
    ]
    return _graph(type(source).__name__.lower(), _vocab(names), parts)


def _pykeen_triples(factory: Any) -> list[Named]:
    """By name: factories that were made one by one have numbers of their own each."""
    if not all(hasattr(factory, name) for name in ("mapped_triples", "entity_to_id")):
        raise BadProgram(
            f"a {type(factory).__name__} is not a graph with names; give a folder with train.txt, "
            f"or a PyKEEN dataset or TriplesFactory"
        )
    entity = {number: name for name, number in factory.entity_to_id.items()}
    relation = {number: name for name, number in factory.relation_to_id.items()}
    numbers = np.asarray(factory.mapped_triples).tolist()
    return [(entity[h], relation[r], entity[t]) for h, r, t in numbers]


def _inverses(triples: Ints, inverse: Ints) -> Ints:
    """p_inverse(t, h) for every p(h, t) whose predicate has an inverse."""
    inverted = np.stack([triples[:, 2], inverse[triples[:, 1]], triples[:, 0]], axis=1)
    return inverted[inverted[:, 1] >= 0]
