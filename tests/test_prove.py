"""The exhaustive prover finds what plain breadth-first search finds, and its trees are proofs."""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.errors import BadProgram, ConfigError, Mismatch
from batchwright.logic.facts import Facts
from batchwright.logic.loaders import load_graph, shipped_graph
from batchwright.logic.prove.proofs import Node, prove, prove_all
from batchwright.logic.prove.search import RULE
from batchwright.logic.rules import Rules, parse_rules
from batchwright.logic.vocab import Vocab
from batchwright.train.prover import load_prover

sys.path.insert(0, str(Path(__file__).parent))

from plain_prover import Atom, programs, shortest

HERE = Path(__file__).parent
FAMILY = Path(os.environ.get("BATCHWRIGHT_DATA", HERE / "../../shared/data")) / "kg" / "family"
FAMILY_RULES = """
father(X,Y) :- husband(X,Z), mother(Z,Y).
father(X,Y) :- father(X,Z), sister(Z,Y).
father(X,Y) :- father(X,Z), brother(Z,Y).
mother(X,Y) :- wife(X,Z), father(Z,Y).
mother(X,Y) :- mother(X,Z), brother(Z,Y).
son(X,Y) :- father(Y,X), brother(X,Z).
son(X,Y) :- brother(X,Z), daughter(Z,Y).
daughter(X,Y) :- sister(X,Z), son(Z,Y).
brother(X,Y) :- brother(X,Z), sister(Z,Y).
brother(X,Y) :- brother(X,Z), brother(Z,Y).
sister(X,Y) :- sister(X,Z), brother(Z,Y).
sister(X,Y) :- sister(X,Z), sister(Z,Y).
uncle(X,Y) :- brother(X,Z), father(Z,Y).
uncle(X,Y) :- uncle(X,Z), brother(Z,Y).
aunt(X,Y) :- sister(X,Z), father(Z,Y).
aunt(X,Y) :- aunt(X,Z), sister(Z,Y).
nephew(X,Y) :- brother(X,Z), niece(Z,Y).
niece(X,Y) :- sister(X,Z), nephew(Z,Y).
husband(X,Y) :- wife(Y,X).
wife(X,Y) :- husband(Y,X).
"""


def check_tree(node: Node, triples: set[Atom], rules: Rules, hidden: set[Atom]) -> int:
    """Every leaf is an allowed fact and every inner node an instance of its rule; the steps."""
    p, x, y = node.atom
    if node.rule is None:
        assert (x, p, y) in triples - hidden
        return 1
    head, body = rules.clause(node.rule)
    bound: dict[int, int] = {}
    for one, atom in zip([head, *body], [node, *node.children], strict=True):
        assert one[0] == atom.atom[0]
        for pattern, term in zip(one[1:], atom.atom[1:], strict=True):
            if pattern < rules.num_entities:
                assert pattern == term
            else:
                assert bound.setdefault(pattern, term) == term
    return 1 + sum(check_tree(child, triples, rules, hidden) for child in node.children)


@settings(max_examples=100, deadline=None)
@given(programs(), st.data())
def test_ground_queries_have_the_shortest_proof_that_plain_search_finds(
    program: tuple[Vocab, list[Atom], Rules], data: st.DataObject
) -> None:
    vocab, triples, rules = program
    n, facts = vocab.num_entities, Facts.of(triples, vocab)
    depth = data.draw(st.integers(1, 5))
    entity = st.integers(0, n - 1)
    queries = data.draw(
        st.lists(
            st.tuples(entity, st.integers(0, vocab.num_predicates - 1), entity),
            min_size=1,
            max_size=4,
        )
    )

    found = prove_all(queries, facts, rules, depth)

    for q, (h, p, t) in enumerate(queries):
        hidden = {(h, p, t)}
        expected = shortest((p, h, t), t, set(triples), rules, n, hidden, depth)
        assert found.lengths[q] == expected.get(t, 0)
        proofs, complete = prove((h, p, t), facts, rules, depth, hide=[(h, p, t)])
        assert complete
        assert len(proofs) == (t in expected)
        for proof in proofs:
            assert check_tree(proof.tree(rules), set(triples), rules, hidden) == expected[t]
            assert proof.tree(rules).atom == (p, h, t)


@settings(max_examples=80, deadline=None)
@given(programs(most_body=3), st.data())
def test_open_queries_have_every_answer_nearest_first(
    program: tuple[Vocab, list[Atom], Rules], data: st.DataObject
) -> None:
    vocab, triples, rules = program
    n, facts = vocab.num_entities, Facts.of(triples, vocab)
    depth = data.draw(st.integers(1, 5))
    p = data.draw(st.integers(0, vocab.num_predicates - 1))
    e = data.draw(st.integers(0, n - 1))
    tail = data.draw(st.booleans())

    goal = (p, e, n) if tail else (p, n, e)
    proofs, complete = prove((e, p, -1) if tail else (-1, p, e), facts, rules, depth)

    assert complete
    expected = shortest(goal, n, set(triples), rules, n, set(), depth)
    assert {proof.answer: len(proof) for proof in proofs} == expected
    assert [len(proof) for proof in proofs] == sorted(len(proof) for proof in proofs)
    for proof in proofs:
        atom = proof.tree(rules).atom
        if proof.answer < n:
            assert atom == ((p, e, proof.answer) if tail else (p, proof.answer, e))


def test_every_proof_of_an_answer_can_be_had() -> None:
    vocab = Vocab.of("abc", ["p", "q"])
    facts = Facts.of([(0, 1, 2), (0, 1, 1), (1, 1, 2)], vocab)
    rules = parse_rules("one:0.5:q(X,Y) -> p(X,Y)\ntwo:0.25:q(X,Z), q(Z,Y) -> p(X,Y)", vocab)

    proofs, complete = prove((0, 0, 2), facts, rules, every=True)

    assert complete
    assert [(len(proof), proof.weight(rules)) for proof in proofs] == [(2, 0.5), (3, 0.25)]


@settings(max_examples=80, deadline=None)
@given(programs(most_body=3), st.data())
def test_by_one_rule_come_the_proofs_whose_rules_are_one_at_most(
    program: tuple[Vocab, list[Atom], Rules], data: st.DataObject
) -> None:
    vocab, triples, rules = program
    n, facts = vocab.num_entities, Facts.of(triples, vocab)
    depth = data.draw(st.integers(1, 4))
    p = data.draw(st.integers(0, vocab.num_predicates - 1))
    e = data.draw(st.integers(0, n - 1))
    query = (e, p, -1) if data.draw(st.booleans()) else (-1, p, e)

    every, whole = prove(query, facts, rules, depth, every=True)
    single, complete = prove(query, facts, rules, depth, one_rule=True)

    if whole:
        assert complete
        few = [one for one in every if sum(kind == RULE for kind, *_ in one.steps) <= 1]
        assert sorted((one.answer, one.steps) for one in single) == sorted(
            (one.answer, one.steps) for one in few
        )


def test_a_search_that_is_cut_short_says_so() -> None:
    vocab = Vocab.of(map(str, range(30)), ["p", "q"])
    facts = Facts.of([(i, 0, j) for i in range(30) for j in range(30)], vocab)
    rules = parse_rules("q(X,Y) :- p(X,Z), p(Z,W), q(W,Y).", vocab)

    assert not prove((0, 1, 5), facts, rules, depth=7, max_nodes=1000).complete
    assert prove_all([(0, 1, 5)], facts, rules, 7, max_nodes=1000).lengths.tolist() == [-1]
    assert not prove((0, 0, -1), facts, rules, depth=1, max_proofs=7).complete


def test_a_head_that_repeats_a_variable_unifies_with_two_different_ones() -> None:
    vocab = Vocab.of("ab", ["p", "q", "r"])
    facts = Facts.of([(0, 1, 1), (1, 1, 1)], vocab)
    # p(X, Y) meets p(Z, Z): X and Y become one, so of q(a, b) and q(b, b) only the second fits.
    rules = parse_rules("p(Z, Z).\nr(X, Y) :- p(X, Y), q(X, Y).", vocab)

    assert [p.answer for p in prove((-1, 2, 1), facts, rules).found] == [1]
    assert [p.answer for p in prove((1, 2, -1), facts, rules).found] == [1]
    assert prove((0, 2, 1), facts, rules).found == []


def test_a_query_is_not_proved_by_itself_nor_by_its_inverse() -> None:
    vocab = Vocab.of("ab", ["child", "parent"])
    facts = Facts.of([(0, 1, 1), (1, 0, 0)], vocab)
    rules = parse_rules("parent(X,Y) :- child(Y,X).\nparent(X,Y) :- parent(X,Y).", vocab)
    query = [(0, 1, 1)]

    assert prove_all(query, facts, rules, hide_self=False).lengths.tolist() == [1]
    assert prove_all(query, facts, rules).lengths.tolist() == [2]
    inverse = np.array([1, 0], np.int32)
    assert prove_all(query, facts, rules, inverse=inverse).lengths.tolist() == [0]


def test_bad_queries_are_refused() -> None:
    vocab = Vocab.of("ab", ["p"])
    facts, rules = Facts.of([(0, 0, 1)], vocab), Rules.of([], vocab)
    with pytest.raises(BadProgram, match="both arguments of the query are open"):
        prove((-1, 0, -1), facts, rules)
    with pytest.raises(BadProgram, match="ids outside the vocabulary"):
        prove((0, 3, 1), facts, rules)
    with pytest.raises(ConfigError, match="depth must be at least 1, got 0"):
        prove((0, 0, 1), facts, rules, depth=0)
    with pytest.raises(Mismatch, match="one vocabulary"):
        prove((0, 0, 1), facts, Rules.of([], Vocab.of("abc", ["p"])))


@pytest.mark.skipif(not FAMILY.is_dir(), reason="no family data set; set BATCHWRIGHT_DATA")
def test_deeper_search_proves_more_of_a_sample_of_the_family_data() -> None:
    graph = load_graph(FAMILY)
    rules = parse_rules(FAMILY_RULES, graph.vocab)
    sample = graph.train[::40]

    shares = [prove_all(sample, graph.facts, rules, depth).share for depth in (1, 3, 5)]

    assert shares[0] == 0.0
    assert 0.6 < shares[1] < shares[2] < 1.0


def test_the_command_prints_a_tree_with_rule_names(call: Any, tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("anna\tparent\tbo\nbo\tparent\tcy\ncy\tgrandparent\tcy\n")
    (tmp_path / "rules.txt").write_text("gp:0.9:parent(x,y), parent(y,z) -> grandparent(x,z)\n")

    # Words come apart at spaces.
    done = call("prove grandparent(anna,X) --data .", tmp_path)
    assert done.code == 0, done.err
    assert "grandparent(anna, cy)  [by gp]" in done.out
    assert "└─ parent(bo, cy)  [fact]" in done.out

    found = call("prove grandparent(anna,X) --data . --format json", tmp_path).data
    (answer,) = found["answers"]
    assert answer["bindings"] == {"X": "cy"}
    assert answer["evidence"] == {"rules": pytest.approx(0.9)}
    assert answer["proofs"][0]["weight"] == 0.9
    assert answer["proofs"][0]["proof"]["rule"] == "gp"
    assert "no proof" in call("prove grandparent(bo,X) --data .", tmp_path).out
    hidden = call("prove grandparent(cy,cy) --data . --hide", tmp_path)
    assert "no proof" in hidden.out


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("prove uncle(X,Y)", "leaves both arguments open"),
        ("prove uncel(adela,X)", "did you mean uncle"),
        ("prove uncle(adela)", "uncle has 1 arguments"),
        ("prove uncle(adela,X) --data nowhere", "no folder of triples at nowhere"),
        ("prove uncle(adela,X) --data .", "no train.txt"),
        ("prove uncle(adela,X) --mine --rules r.txt", "exclude each other"),
        ("prove uncle(adela,X) --rules none.txt", "no file at none.txt"),
    ],
)
def test_the_command_says_what_is_wrong(call: Any, tmp_path: Path, line: str, reason: str) -> None:
    done = call(line, tmp_path)
    assert done.code == 1
    assert reason in done.err
    assert done.err.count("\n") == 1


PEOPLE = "ann knows bo\nann knows cy\nbo knows dee\ncy knows dee\nann likes dee\nann likes bo\n"
PEOPLE_RULES = """
friend:0.5:knows(x,z), knows(z,y) -> likes(x,y)
met:0.2:knows(x,y) -> likes(x,y)
also:0.6:likes(x,z), knows(z,y) -> likes(x,y)
mutual:0.9:knows(x,z), knows(y,z) -> likes(x,y)
"""


@pytest.fixture
def people(tmp_path: Path) -> Path:
    (tmp_path / "train.txt").write_text(PEOPLE.replace(" ", "\t"))
    (tmp_path / "rules.txt").write_text(PEOPLE_RULES)
    return tmp_path


def test_answers_are_ranked_by_all_rules_that_conclude_them(call: Any, people: Path) -> None:
    """Checked by hand: each rule is one witness, as strong as its best proof."""
    found = call("prove likes(ann,X) --data . --depth 3 --hide --format json", people).data
    scores = {one["bindings"]["X"]: (one["score"], one["known"]) for one in found["answers"]}
    # dee by `friend`, over bo or cy, and by `also`, over bo whom ann likes.
    assert scores == {
        "dee": (pytest.approx(1 - 0.5 * 0.4), True),
        "bo": (pytest.approx(0.2), True),
        "cy": (pytest.approx(0.2), False),
    }
    assert [one["bindings"]["X"] for one in found["answers"]] == ["dee", "bo", "cy"]
    best = found["answers"][0]["proofs"]
    assert [(proof["weight"], proof["proof"]["rule"]) for proof in best] == [(0.6, "also")]
    assert found["answers"][0]["more"] == 1

    every = call("prove likes(ann,X) --data . --depth 3 --hide --all --format json", people).data
    assert len(every["answers"][0]["proofs"]) == 3
    assert every["answers"][0]["score"] == found["answers"][0]["score"]
    drawn = call("prove likes(ann,X) --data . --depth 3 --hide --all", people).out
    assert drawn.count("[by friend]") == 2

    plain = call("prove likes(ann,X) --data . --depth 3", people).out
    assert "likes(ann, bo): 1, a known fact" in plain
    new = call("prove likes(ann,X) --data . --depth 3 --new", people).out
    assert "likes(ann, cy): 0.2" in new
    assert "1 answer; 2 known facts left out" in new


def test_nobody_is_proved_to_be_related_to_himself_unless_a_fact_shows_that(
    call: Any, people: Path
) -> None:
    def found() -> set[str]:
        line = "prove likes(ann,X) --data . --depth 3 --format json"
        return {one["bindings"]["X"] for one in call(line, people).data["answers"]}

    assert "ann" not in found()
    with (people / "train.txt").open("a") as file:
        file.write("cy\tlikes\tcy\n")
    assert "ann" in found()


def test_the_examples_of_the_help_work_on_the_shipped_graph(call: Any, tmp_path: Path) -> None:
    shown = call("prove --help", tmp_path).out
    for query in ("uncle(X, joren)", "uncle(anselm, joren)"):
        assert query in " ".join(shown.split())
        found = call(f"prove {query.replace(' ', '')} --format json", tmp_path).data
        assert found["answers"][0]["known"]


def test_the_shipped_rules_relate_nobody_to_himself() -> None:
    graph = load_graph("family")
    rules = parse_rules(shipped_graph() / "rules.txt", graph.vocab)
    everybody = range(graph.vocab.num_entities)
    for p in range(graph.vocab.num_predicates):
        assert not prove_all([(e, p, e) for e in everybody], graph.facts, rules, 5).share


def test_a_policy_and_an_embedding_are_evidence(call: Any, people: Path) -> None:
    made = (
        "train kge --data . --rank 4 --epochs 2 --batch-size 8 --run-dir kge --quiet",
        "train prover --data . --n-envs 4 --ppo-steps 64 --clone-updates 1 --passes 2 "
        "--run-dir prover --rules rules.txt --quiet",
    )
    for line in made:
        assert call(line, people).code == 0
    query = "prove likes(ann,X) --data . --format json"
    found = call(f"{query} --prover prover --kge kge", people).data
    assert found["answers"]
    scores = [one["score"] for one in found["answers"]]
    assert scores == sorted(scores, reverse=True)
    for one in found["answers"]:
        policy, embedding = one["evidence"]["policy"], one["evidence"]["embedding"]
        assert one["score"] == pytest.approx(1 - (1 - policy) * (1 - embedding))
    graph = load_graph(people)
    prover = load_prover(people / "prover", graph)
    ann, likes = graph.vocab.entity("ann"), graph.vocab.predicate("likes")
    mass = prover.mass(np.array([ann], np.int32), np.array([likes], np.int32), "tail")[0]
    told = {one["bindings"]["X"]: one["evidence"]["policy"] for one in found["answers"]}
    assert told == {name: pytest.approx(mass[graph.vocab.entity(name)]) for name in told}
    mined = call(f"{query} --mine --kge kge", people)
    assert mined.code == 0, mined.err
    assert "exclude each other" in call(f"{query} --mine --prover prover", people).err
    assert "no rules of a run" in call(f"{query} --prover nowhere", people).err


OF_ANYTHING = "liked:0.3: -> likes(x, bo)\nlikes_all:0.2: -> likes(ann, y)\n"


@pytest.mark.parametrize("policy", ["rules", "neural", "answers", None])
def test_every_policy_proves_where_a_rule_holds_of_anything_at_all(
    call: Any, people: Path, policy: str | None
) -> None:
    with (people / "rules.txt").open("a") as file:
        file.write(OF_ANYTHING)
    made = ["train kge --data . --rank 4 --epochs 1 --batch-size 8 --run-dir kge --quiet"]
    if policy:
        made.append(
            f"train prover --data . --policy {policy} --n-envs 4 --ppo-steps 64 --run-dir prover "
            f"--rules rules.txt --quiet"
        )
    for line in made:
        outcome = call(line, people)
        assert outcome.code == 0, outcome.err
    by = "--prover prover" if policy else "--rules rules.txt --depth 3"
    names = load_graph(people).vocab.entities
    for query in ("likes(X,bo)", "likes(ann,X)", "likes(ann,bo)", "likes(X,dee)"):
        for more in ("", " --hide", " --hide --all --new", " --kge kge"):
            outcome = call(f"prove {query} --data . {by}{more} --format json", people)
            assert outcome.code == 0, outcome.err
            found = outcome.data["answers"]
            # What names nobody is said to, comes last, and has no score of policy or embedding.
            assert [one["anything"] for one in found] == sorted(one["anything"] for one in found)
            named = [one for one in found if not one["anything"]]
            assert all(one["bindings"].get("X", "bo") in names for one in named)
            general = [one for one in found if one["anything"]]
            # Of dee it takes two rules, and a policy's rules stand alone.
            assert len(general) == ("X" in query and (policy is None or "dee" not in query))
            for one in general:
                assert one["bindings"] == {"X": None}
                assert one["evidence"] == {"rules": pytest.approx(one["score"])}
            drawn = call(f"prove {query} --data . {by}{more}", people)
            assert drawn.out.count(", of anything at all\n") == len(general)
