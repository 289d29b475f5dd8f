"""Graphs from PyKEEN's own classes: the real package, with files on this machine."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchwright.errors import BadProgram
from batchwright.logic.loaders import Graph, load_graph
from batchwright.logic.mine.mining import mine
from batchwright.logic.rank.ranking import rank
from batchwright.logic.rank.scorers import RuleScorer

pytest.importorskip("pykeen", reason="pykeen is not installed: pip install pykeen==1.11.1")

from pykeen.datasets import Nations, get_dataset
from pykeen.datasets.base import Dataset, EagerDataset, PathDataset
from pykeen.triples import CoreTriplesFactory, TriplesFactory

# Out of alphabetical order, so that PyKEEN's numbers in one part are not those in another.
PARTS = {
    "train": "zoe\tlikes\tbo\nbo\tlikes\tcy\ncy\tknows\tzoe\nann\tknows\tcy\n",
    "valid": "cy\tlikes\tzoe\n",
    "test": "bo\tknows\tzoe\nann\tlikes\tbo\n",
}


def written(folder: Path, **parts: str) -> Path:
    for name, text in (PARTS | parts).items():
        (folder / f"{name}.txt").write_text(text)
    return folder


def paths(folder: Path) -> dict[str, str]:
    names = {"training": "train", "validation": "valid", "testing": "test"}
    return {key: str(folder / f"{name}.txt") for key, name in names.items()}


def named(graph: Graph) -> list[set[str]]:
    return [
        {graph.vocab.atom(p, h, t) for h, p, t in part.tolist()}
        for part in (graph.train, graph.valid, graph.test)
    ]


def same(one: Graph, other: Graph) -> bool:
    return one.vocab == other.vocab and named(one) == named(other)


def test_a_data_set_of_paths_is_the_graph_of_the_same_files(tmp_path: Path) -> None:
    folder = written(tmp_path)
    graph = load_graph(folder)

    assert same(load_graph(get_dataset(**paths(folder))), graph)
    # PyKEEN creates its inverse triples in training; the facts are those of the file.
    given = {f"{key}_path": value for key, value in paths(folder).items()}
    inverted = PathDataset(**given, create_inverse_triples=True)
    assert same(load_graph(inverted), graph)


def test_factories_with_numbers_of_their_own_are_joined_by_name(tmp_path: Path) -> None:
    folder = written(tmp_path)
    made = {key: TriplesFactory.from_path(path) for key, path in paths(folder).items()}

    assert made["training"].entity_to_id != made["testing"].entity_to_id
    assert same(load_graph(EagerDataset(**made)), load_graph(folder))


def test_a_data_set_that_pykeen_wrote_comes_back_through_pykeen(tmp_path: Path) -> None:
    folder = written(tmp_path)
    get_dataset(**paths(folder)).to_directory_binary(tmp_path / "kept")

    assert same(load_graph(Dataset.from_directory_binary(tmp_path / "kept")), load_graph(folder))


def test_a_factory_alone_is_a_graph_of_facts(tmp_path: Path) -> None:
    folder = written(tmp_path)
    factory = TriplesFactory.from_path(folder / "train.txt")
    graph = load_graph(factory)

    assert named(graph) == [named(load_graph(folder))[0], set(), set()]
    training, testing = factory.split(0.75, random_state=0)
    parts = named(load_graph(EagerDataset(training, testing)))
    assert parts[0] | parts[2] == named(graph)[0]
    assert not parts[0] & parts[2]


def test_test_triples_that_pykeen_leaves_out_are_asked_from_the_folder(tmp_path: Path) -> None:
    folder = written(tmp_path, test="bo\tknows\tzoe\ndora\tknows\tzoe\n")

    assert len(load_graph(get_dataset(**paths(folder))).test) == 1
    assert len(load_graph(folder).test) == 2


@pytest.mark.slow
def test_the_graph_that_comes_with_pykeen_can_be_mined_and_ranked() -> None:
    data = Nations()
    graph = load_graph(data)

    assert len(graph.train) == data.training.num_triples
    assert graph.vocab.num_entities == data.num_entities
    scorer = RuleScorer(graph.facts, mine(graph.facts, graph.vocab).rules)
    assert rank(scorer, graph.test, graph.known).metrics().mrr > 0.5
    counted = np.bincount(data.training.mapped_triples[:, 1].numpy())
    by_name = dict(zip(data.training.relation_to_id, counted.tolist(), strict=True))
    ours = np.bincount(graph.train[:, 1], minlength=graph.vocab.num_predicates)
    assert {name: by_name[name] for name in graph.vocab.predicates} == dict(
        zip(graph.vocab.predicates, ours.tolist(), strict=True)
    )


def test_what_has_no_names_or_no_facts_is_refused() -> None:
    core = CoreTriplesFactory(Nations().training.mapped_triples, num_entities=14, num_relations=55)
    refused: tuple[Any, ...] = (core, EagerDataset(core, core), {"train": []}, None)
    for source in refused:
        with pytest.raises(BadProgram, match="is not a graph with names"):
            load_graph(source)
    training = Nations().training
    empty = training.clone_and_exchange_triples(training.mapped_triples[:0])
    with pytest.raises(BadProgram, match="has no facts"):
        load_graph(empty)
