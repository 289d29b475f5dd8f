"""What is read is what was written, the indexes hold it all, and mistakes have a line."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.errors import BadProgram, ConfigError, MissingFile
from batchwright.jit import interpreted
from batchwright.logic.audit import find_leaks, graph_leaks, inverse_pairs
from batchwright.logic.facts import Facts
from batchwright.logic.loaders import load_graph, shipped_graph
from batchwright.logic.prove.proofs import prove_all
from batchwright.logic.rules import Rules, parse_atom, parse_rules
from batchwright.logic.vocab import Vocab

CITIES = Vocab.of(["rome", "italy", "europe", "New York", "a"], ["in", "capital_of", "_near"])


def graph_folder(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.txt").write_text(text)
    return folder


def failure(call: object, *arguments: object) -> str:
    """The sentence with which a call fails."""
    with pytest.raises(BadProgram) as caught:
        call(*arguments)  # type: ignore[operator]
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_both_indexes_hold_exactly_the_facts(data: st.DataObject) -> None:
    n, preds = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
    vocab = Vocab.of(map(str, range(n)), [f"p{i}" for i in range(preds)])
    entity, predicate = st.integers(0, n - 1), st.integers(0, preds - 1)
    triples = data.draw(st.lists(st.tuples(entity, predicate, entity), max_size=20))

    facts = Facts.of(triples, vocab)

    assert len(facts) == len(set(triples))
    assert set(map(tuple, facts.triples.tolist())) == set(triples)
    for p in range(preds):
        loops = facts.loop_sub[facts.loop_ptr[p] : facts.loop_ptr[p + 1]]
        assert loops.tolist() == sorted({h for h, q, t in triples if q == p and h == t})
        for e in range(n):
            assert facts.tails(e, p).tolist() == sorted(
                {t for h, q, t in triples if (h, q) == (e, p)}
            )
            assert facts.heads(p, e).tolist() == sorted(
                {h for h, q, t in triples if (q, t) == (p, e)}
            )
    grid = np.indices((n, preds, n)).reshape(3, -1)
    expected = [tuple(one) in set(triples) for one in grid.T.tolist()]
    assert facts.contains(*grid).tolist() == expected
    with interpreted():
        assert facts.contains(*grid).tolist() == expected


def test_ids_that_are_out_of_range_are_no_facts_and_cannot_become_some() -> None:
    vocab = Vocab.of("ab", ["p"])
    facts = Facts.of([(0, 0, 1)], vocab)

    strange = [-1, 0, 9, 0, 0, 0], [0, 7, 0, -1, 0, 0], [1, 1, 1, 1, 9, -1]
    assert facts.contains(*strange).tolist() == [False] * 6
    with interpreted():
        assert facts.contains(*strange).tolist() == [False] * 6
    assert "triple 0 is [0, 0, 5]" in failure(Facts.of, [(0, 0, 5)], vocab)
    assert "shape [n, 3]" in failure(Facts.of, [(0, 0)], vocab)
    names = tuple(map(str, range(2_100_000)))
    with pytest.raises(ConfigError, match="fewer than 2\\*\\*63 are allowed"):
        Facts.of([(0, 0, 0)], Vocab(names, names))


def test_an_empty_graph_has_no_facts_and_no_trouble() -> None:
    facts = Facts.of([], Vocab.of([], []))
    assert len(facts) == 0
    assert facts.triples.shape == (0, 3)


def test_ids_do_not_depend_on_the_order_of_lines(tmp_path: Path) -> None:
    lines = ["b\tp\ta", "a\tq\tc", "c\tp\ta"]
    one, two = tmp_path / "one", tmp_path / "two"
    for folder, order in ((one, lines), (two, lines[::-1])):
        folder.mkdir()
        graph_folder(folder, train="\n".join(order))

    assert load_graph(one).vocab == load_graph(two).vocab
    assert np.array_equal(load_graph(one).facts.triples, load_graph(two).facts.triples)


def test_tabs_and_prolog_facts_may_stand_in_one_file(tmp_path: Path) -> None:
    graph_folder(
        tmp_path,
        train="% a comment\nrome\tin\titaly\n\nin(italy, europe).\nin('New York', \"USA, east\")\n",
        test="in(rome,europe).\r\n",
    )
    graph = load_graph(tmp_path)

    assert graph.vocab.entities == ("New York", "USA, east", "europe", "italy", "rome")
    assert len(graph.train) == 3
    assert len(graph.valid) == 0
    assert graph.vocab.atom(*graph.test[0][[1, 0, 2]].tolist()) == "in(rome, europe)"


def test_the_error_for_a_bad_line_names_file_line_and_reason(tmp_path: Path) -> None:
    for text, reason in (
        ("a\tp\tb\na\tp\n", "line 2: expected 3 non-empty fields between tabs, got 2"),
        (
            "a\tp\tb\na\t\tb\n",
            "line 2: expected 3 non-empty fields between tabs, got 3, 1 of them empty, in",
        ),
        ("a\tp\tb\n\n# note\np(a,b,c).\n", "line 4: p has 3 arguments"),
        ("p(a).", "line 1: p has 1 arguments"),
        ("just words", "line 1: 'just words' is not a fact"),
        ("% nothing\n", "has no facts"),
    ):
        sentence = failure(load_graph, graph_folder(tmp_path, train=text))
        assert reason in sentence
        assert "train.txt" in sentence
    (tmp_path / "train.txt").write_bytes(b"a\tp\t\xff\xfe\n")
    assert "not UTF-8" in failure(load_graph, tmp_path)
    (tmp_path / "train.txt").unlink()
    (tmp_path / "train.txt").mkdir()
    assert "cannot be read" in failure(load_graph, tmp_path)
    with pytest.raises(MissingFile, match=r"no train\.txt"):
        load_graph(tmp_path / "train.txt")
    with pytest.raises(MissingFile, match="no folder of triples"):
        load_graph(tmp_path / "nowhere")


def test_a_pykeen_dataset_is_read_directly() -> None:
    def part(*triples: tuple[int, int, int]) -> SimpleNamespace:
        return SimpleNamespace(
            mapped_triples=np.array(triples), entity_to_id={"z": 0, "a": 1}, relation_to_id={"r": 0}
        )

    data = SimpleNamespace(training=part((0, 0, 1)), validation=None, testing=part((1, 0, 1)))
    graph = load_graph(data)  # type: ignore[arg-type]

    assert graph.vocab.entities == ("a", "z")
    assert graph.train.tolist() == [[1, 0, 0]]
    assert graph.valid.tolist() == []
    assert graph.test.tolist() == [[0, 0, 0]]


def test_inverses_double_the_facts_and_are_known(tmp_path: Path) -> None:
    graph = load_graph(graph_folder(tmp_path, train="a\tp\tb\n", test="b\tp\tc\n"))
    both = graph.with_inverses()

    assert both.vocab.predicates == ("p", "p_inverse")
    assert both.train.tolist() == [[0, 0, 1], [1, 1, 0]]
    assert both.test.tolist() == graph.test.tolist()
    assert both.known.contains(2, 1, 1)
    assert both.vocab.with_kge().num_predicates == 4


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("r7:0.5:in(x,y), in(y,z) -> in(x,z)", "r7:0.5:in(X,Z), in(Z,Y) -> in(X,Y)"),
        ("in(X,Z) :- in(X,Y), in(Y,Z).", "r0:1:in(X,Z), in(Z,Y) -> in(X,Y)"),
        ("0.25::in(X,europe) :- in(X,italy).", "r0:0.25:in(X,italy) -> in(X,europe)"),
        ("in(X,X).", "r0:1: -> in(X,X)"),
        ("r1:1.0: -> in(x, rome)", "r1:1: -> in(X,rome)"),
        # An entity's name is that entity in arrow form, even if it is one letter.
        ("in(a,b)->_near(b,a)", "r0:1:in(a,X) -> _near(X,a)"),
        ("_near(A,'New York') :- in(_, A), in(_, A).", None),
        ("n:1e-3:in(x1,?y) -> in(?y,x1)", "n:0.001:in(Y,X) -> in(X,Y)"),
    ],
)
def test_rules_are_read_in_both_forms(text: str, expected: str | None) -> None:
    rules = parse_rules(text, CITIES)
    if expected is None:
        # Each lone underscore is a variable of its own.
        assert rules.variables.tolist() == [3]
        assert rules.text(0, CITIES) == "r0:1:in(Y,X), in(Z,X) -> _near(X,'New York')"
    else:
        assert rules.text(0, CITIES) == expected
    again = parse_rules(rules.text(0, CITIES), CITIES)
    assert np.array_equal(again.head, rules.head)
    assert np.array_equal(again.body, rules.body)


def test_the_error_for_a_bad_rule_names_file_line_and_reason(tmp_path: Path) -> None:
    path = tmp_path / "rules.txt"
    for line, reason in (
        ("in(X,Y) :- inn(X,Y).", "unknown predicate 'inn'; did you mean in?"),
        ("in(X,Y) :- in(X).", "in has 1 arguments"),
        ("in(X,Y) :- in(X,Y,Z).", "in has 3 arguments"),
        ("in(X,Y) :- in(X,itali).", "unknown entity 'itali'; did you mean italy?"),
        ("r:1:in(x,y) -> in(x,itali)", "unknown entity 'itali'"),
        ("in(X,Y) in(Y,X)", "expected ','"),
        ("in(X,Y) :- in(X,Y", "unclosed parenthesis"),
        ("in(X,Y) :- in(X,'Y)", "unclosed quote"),
        ("in(X,Y), in(Y,X) :- in(X,X)", "2 heads"),
        ("in(x,y) -> ", "0 heads"),
        ("in(X,) :- in(X,Y)", "missing argument"),
        ("in", "expected an atom"),
        ("in(X,Y) :- in(Y,X) -> in(X,X)", "unexpected '->'"),
    ):
        path.write_text(f"# rules\nin(X,Y) :- in(Y,X).\n{line}\n")
        sentence = failure(parse_rules, path, CITIES)
        assert sentence.startswith(f"{path}, line 3: ")
        assert reason in sentence
    assert "line 2: the name 'x' is already used on line 1" in failure(
        parse_rules, "x:1:in(a,b) -> in(b,a)\nx:1:in(a,b) -> in(b,a)", CITIES
    )
    with pytest.raises(MissingFile):
        parse_rules(tmp_path / "none.txt", CITIES)


def test_queries_are_read_with_their_variables() -> None:
    n = CITIES.num_entities
    assert parse_atom("in(rome, X)", CITIES) == (
        (CITIES.predicate("in"), CITIES.entity("rome"), n),
        {"X": n},
    )
    assert parse_atom("?- in('New York',a).", CITIES)[1] == {}
    assert "unknown entity 'x'" in failure(parse_atom, "in(rome, x)", CITIES)
    assert "is not a query" in failure(parse_atom, "in(rome, X), in(X, Y)", CITIES)


def test_rules_with_the_same_head_are_found_by_it() -> None:
    rules = parse_rules(
        "in(X,Y) :- _near(X,Y).\n_near(X,Y) :- in(X,Y).\nin(X,Y) :- in(Y,X).", CITIES
    )
    p = CITIES.predicate("in")
    assert rules.by_head[rules.head_ptr[p] : rules.head_ptr[p + 1]].tolist() == [0, 2]
    assert len(Rules.of([], CITIES)) == 0


def test_a_planted_fact_of_the_test_part_is_caught() -> None:
    graph = load_graph(shipped_graph())
    parts = {"valid": graph.valid, "test": graph.test}
    assert find_leaks(graph.facts, parts) == []

    planted = Facts.of(np.concatenate([graph.train, graph.test[4:5]]), graph.vocab)

    (leak,) = find_leaks(planted, parts)
    assert (leak.part, leak.row, leak.inverse) == ("test", 4, False)


def test_a_planted_inverse_is_caught() -> None:
    graph = load_graph(shipped_graph()).with_inverses()
    h, p, t = graph.valid[0].tolist()
    planted = Facts.of(np.concatenate([graph.train, [(t, graph.inverse[p], h)]]), graph.vocab)

    assert find_leaks(graph.facts, {"valid": graph.valid}, graph.inverse) == []
    (leak,) = find_leaks(planted, {"valid": graph.valid}, graph.inverse)
    assert (leak.row, leak.inverse) == (0, True)
    (reported,) = graph_leaks(replace(graph, train=planted.triples))["leaks"]
    assert (reported["part"], reported["row"]) == ("valid", 1)


def test_queries_are_proved_by_themselves_or_their_inverse_unless_both_are_hidden() -> None:
    graph = load_graph(shipped_graph()).with_inverses()
    rules = parse_rules(
        "\n".join(f"{p}(X,Y) :- {p}_inverse(Y,X)." for p in graph.vocab.predicates[:14]),
        graph.vocab,
    )
    queries = graph.train[:40]

    open_book = prove_all(queries, graph.facts, rules, 2, hide_self=False)
    assert open_book.lengths.tolist() == [1] * 40
    half = prove_all(queries, graph.facts, rules, 2)
    assert half.lengths.tolist() == [2] * 40
    closed = prove_all(queries, graph.facts, rules, 2, inverse=graph.inverse)
    assert closed.share == 0.0


def test_inverse_predicates_are_noticed() -> None:
    graph = load_graph(shipped_graph())
    names = {
        (graph.vocab.predicates[p], graph.vocab.predicates[q])
        for p, q, _ in inverse_pairs(graph.facts, 0.7)
    }
    assert ("husband", "wife") in names
    assert ("uncle", "father") not in names


def test_the_shipped_family_is_whole_and_its_rules_prove_it() -> None:
    graph = load_graph(shipped_graph())
    rules = parse_rules(shipped_graph() / "rules.txt", graph.vocab)

    assert 60 <= graph.vocab.num_entities <= 120
    seen = set(graph.train[:, [0, 2]].ravel().tolist())
    assert seen == set(range(graph.vocab.num_entities))
    assert find_leaks(graph.facts, {"valid": graph.valid, "test": graph.test}) == []
    assert prove_all(graph.test, graph.facts, rules, 5).share > 0.9


def test_names_that_begin_like_comments_are_data_between_tabs(tmp_path: Path) -> None:
    text = "#1\tin\t%2\n# a comment\n%3\tin\t#1\n% another\twith a tab\n\nin(#1, b).\n"
    (tmp_path / "train.txt").write_text(text + "b\tin\t%2\n")
    graph = load_graph(tmp_path)
    assert graph.vocab.entities == ("#1", "%2", "%3", "b")
    named = [graph.vocab.atom(p, h, t) for h, p, t in graph.train.tolist()]
    assert named == ["in(#1, %2)", "in(%3, #1)", "in(#1, b)", "in(b, %2)"]
