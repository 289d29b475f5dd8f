"""`batchwright data kg`, `train kge` and `evaluate prover` as they are typed."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchwright.logic.kge import load_kge
from batchwright.logic.loaders import load_graph
from batchwright.logic.rules import parse_rules

COMMAND = Path(sys.executable).parent / "batchwright"
DATA = Path(os.environ.get("BATCHWRIGHT_DATA", Path(__file__).parents[2] / "shared/data")) / "kg"


def typed(*words: object) -> str:
    """The command in a process of its own."""
    done = subprocess.run(
        [COMMAND, *map(str, words)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
        check=True,
    )
    return done.stdout


class Batchwright:
    """The command in this process, and what it must end with."""

    def __init__(self, call: Callable[[str, Path], Any], folder: Path) -> None:
        self._call = call
        self._folder = folder

    def __call__(self, *words: object, code: int = 0) -> Any:
        done = self._call(" ".join(map(str, words)), self._folder)
        assert done.code == code, done.out + done.err
        assert "Traceback" not in done.err
        return done

    def json(self, *words: object, code: int = 0) -> Any:
        return json.loads(self(*words, "--format", "json", code=code).out)


@pytest.fixture
def batchwright(call: Callable[[str, Path], Any], tmp_path: Path) -> Batchwright:
    return Batchwright(call, tmp_path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve small families: parent, its inverse, and grandparents of which a few are asked."""
    path = tmp_path_factory.mktemp("kg") / "families"
    path.mkdir()
    train, asked = [], []
    for f in range(12):
        for a, b in (("old", "mid"), ("mid", "kid"), ("mid", "babe")):
            train.append(f"{a}{f}\tparent\t{b}{f}\n")
            train.append(f"{b}{f}\tchild\t{a}{f}\n")
        for b in ("kid", "babe"):
            (asked if f < 3 else train).append(f"old{f}\tgrandparent\t{b}{f}\n")
    (path / "train.txt").write_text("".join(train))
    (path / "valid.txt").write_text("".join(asked[:3]))
    (path / "test.txt").write_text("".join(asked[3:]))
    return path


@pytest.fixture(scope="module")
def embedding(folder: Path) -> Path:
    """The run directory of a trained embedding, stopped once on the way."""
    path = folder.parent / "run"
    words = ("train", "kge", "--data", folder, "--run-dir", path, "--rank", 8, "--epochs", 6)
    more = ("--batch-size", 32, "--eval-every", 2, "--quiet")
    stopped = typed(*words, *more, "--stop-after", 5)
    assert f"resume with: batchwright train kge --resume {path}" in stopped
    done = json.loads(typed("train", "kge", "--resume", path, "--quiet", "--format", "json"))
    assert done["finished"]
    assert done["epoch"] == 6
    return path


def test_info_counts_and_finds_inverses(batchwright: Batchwright, folder: Path) -> None:
    found = batchwright.json("data", "kg", "info", folder)

    assert (found["entities"], found["train"], found["valid"], found["test"]) == (48, 90, 3, 3)
    assert found["relations"]["grandparent"] == {
        "train": 18, "valid": 3, "test": 3, "heads": 9, "tails": 18,
    }  # fmt: skip
    assert sorted(found["inverses"]) == [["child", "parent", 1.0], ["parent", "child", 1.0]]
    assert found["unseen_entities"] == 0
    assert "grandparent" in batchwright("data", "kg", "info", folder).out


def test_info_counts_entities_that_train_does_not_know(
    batchwright: Batchwright, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "train.txt").write_text("a\tp\tb\na\tp\tb\n")
    (tmp_path / "test.txt").write_text("a\tp\tc\nb\tp\ta\n")

    found = batchwright.json("data", "kg", "info", tmp_path)

    assert (found["unseen_entities"], found["unseen_triples"], found["repeated"]) == (1, 1, 1)


def test_mine_writes_rules_that_can_be_read(
    batchwright: Batchwright, folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "rules.txt"
    found = batchwright.json(
        "data", "kg", "mine", folder, "-o", out, "--min-confidence", 0.5, "--quiet"
    )

    graph = load_graph(folder)
    rules = parse_rules(out, graph.vocab)
    assert found["rules"] == len(rules) == sum(found["by_relation"].values())
    assert "parent(X,Z), parent(Z,Y) -> grandparent(X,Y)" in out.read_text()
    # Rules without a body are kept whatever their confidence.
    assert float(rules.weight[rules.body_len > 0].min()) >= 0.5
    assert (rules.body_len == 0).any()


def test_mine_refuses_a_length_that_cannot_be(
    batchwright: Batchwright, folder: Path, tmp_path: Path
) -> None:
    done = batchwright(
        "data", "kg", "mine", folder, "-o", tmp_path / "r", "--length", 9, "--quiet", code=1
    )

    assert "length must be 1, 2 or 3, got 9" in done.err


def test_check_passes_clean_graphs_and_names_planted_leaks(
    batchwright: Batchwright, folder: Path, tmp_path: Path
) -> None:
    assert "no leaks" in batchwright("data", "kg", "check", folder).out

    (tmp_path / "train.txt").write_text("a\tp\tb\nb\tq\ta\nb\tp\tc\nc\tq\tb\nd\tq\tc\n")
    (tmp_path / "valid.txt").write_text("c\tp\td\n")
    (tmp_path / "test.txt").write_text("a\tp\tb\nc\tp\td\n")
    found = batchwright.json("data", "kg", "check", tmp_path, code=1)

    assert [(leak["part"], leak["row"], leak["triple"]) for leak in found["leaks"]] == [
        ("test", 1, "p(a, b)"),
        ("valid and test", 2, "p(c, d)"),
    ]
    assert found["inverse"] == {"valid": 1, "test": 2}


def test_a_resumed_run_keeps_its_settings(batchwright: Batchwright, embedding: Path) -> None:
    done = batchwright("train", "kge", "--resume", embedding, "--rank", 9, "--quiet", code=1)

    assert "--rank is 8, got 9" in done.err
    assert load_kge(embedding / "model")[0].shape.rank == 8


def test_rules_answer_what_they_were_mined_for(batchwright: Batchwright, folder: Path) -> None:
    found = batchwright.json("evaluate", "prover", "--data", folder, "--mode", "rules", "--quiet")

    assert found["mined"]
    assert found["both"]["queries"] == 6
    assert found["tail"]["hits_3"] == 1.0
    assert found["by_relation"].keys() == {"grandparent"}


def test_rules_of_a_file_are_used_and_those_that_are_not_chains_named(
    batchwright: Batchwright, folder: Path, tmp_path: Path
) -> None:
    rules = tmp_path / "rules.txt"
    rules.write_text(
        "good:0.9:parent(X,Z), parent(Z,Y) -> grandparent(X,Y)\n"
        "odd:0.1:parent(X,Y), parent(X,Z) -> grandparent(X,Y)\n"
    )

    done = batchwright("evaluate", "prover", "--data", folder, "--rules", rules, "--quiet")

    assert "1 rule is not a chain of up to 3 edges, skipped: odd" in done.out


def test_hybrid_of_weight_zero_is_the_embedding(
    batchwright: Batchwright, folder: Path, embedding: Path
) -> None:
    words = ("evaluate", "prover", "--data", folder, "--kge", embedding, "--quiet")
    plain = batchwright.json(*words, "--mode", "kge")
    nothing = batchwright.json(*words, "--mode", "hybrid", "--beta", 0)
    chosen = batchwright.json(*words, "--mode", "hybrid", "--part", "valid")

    for key in ("both", "tail", "head", "sampled", "by_relation"):
        assert plain[key] == nothing[key]
    assert chosen["both"]["mrr"] == pytest.approx(chosen["valid_mrr"])


def test_an_accepted_probability_is_refused_where_no_rule_uses_an_embedding(
    batchwright: Batchwright, folder: Path, embedding: Path, tmp_path: Path
) -> None:
    rules = tmp_path / "rules.txt"
    rules.write_text("far:0.9:parent(X,Z), parent(Z,Y) -> grandparent(X,Y)\n")
    given, kge, least = ("--data", folder), ("--kge", embedding), ("--accept", 0.5)
    prove, evaluate = ("prove", "grandparent(old0,X)", *given), ("evaluate", "prover", *given)
    for words, said in (
        ((*prove, "--rules", rules, *kge, *least), "no rule of"),
        ((*prove, "--rules", rules, *least), "give one with --kge"),
        ((*prove, "--mine", *kge, *least), "mined rules ask for no p_kge"),
        ((*evaluate, *kge, *least, "--quiet"), "--accept is for rules"),
        ((*evaluate, "--rules", rules, *least, "--quiet"), "--accept is for rules"),
        ((*evaluate, "--mode", "kge", *kge, *least, "--quiet"), "--accept is for rules"),
        ((*evaluate, "--rules", rules, *kge, *least, "--quiet"), "no rule of"),
    ):
        assert said in batchwright(*words, code=1).err


def test_rules_may_use_an_embedding(
    batchwright: Batchwright, folder: Path, embedding: Path, tmp_path: Path
) -> None:
    rules = tmp_path / "rules.txt"
    rules.write_text("far:0.9:parent(X,Z), parent_kge(Z,Y) -> grandparent(X,Y)\n")
    given = ("--data", folder, "--rules", rules)
    with_kge = (*given, "--kge", embedding, "--accept", 1e-12)

    # At so low a probability everything is accepted, so everybody is an answer but old0 himself.
    found = batchwright.json("prove", "grandparent(old0,X)", *with_kge, "--depth", 3)
    assert len(found["answers"]) == 47
    assert (
        "parent_kge(mid0, kid0)  [embedding]"
        in batchwright("prove", "grandparent(old0,kid0)", *with_kge, "--depth", 3).out
    )
    ranked = batchwright.json("evaluate", "prover", *with_kge, "--quiet")
    assert ranked["accepted"] == 48 * 48
    by_valid = batchwright.json(
        "evaluate", "prover", *given, "--kge", embedding, "--mode", "hybrid", "--quiet"
    )
    assert 0 <= by_valid["accepted"] < 48 * 48
    assert by_valid["accept_probability"] >= 0.01
    done = batchwright("evaluate", "prover", *given, "--quiet", code=1)
    assert "give one with --kge" in done.err
    rules.write_text("parent(X,Y) -> parent_kge(X,Y)\n")
    done = batchwright("prove", "parent(old0,X)", *with_kge, code=1)
    assert "ends in _kge, which only an embedding answers" in done.err


def test_an_area_is_given_for_named_candidates(batchwright: Batchwright, folder: Path) -> None:
    words = ("evaluate", "prover", "--data", folder, "--mode", "rules", "--quiet")
    found = batchwright.json(*words, "--candidates", "kid1,babe1,kid2,babe2")

    assert 0 < found["average_precision"] <= 1
    done = batchwright(*words, "--candidates", "kid1,nobody", code=1)
    assert "unknown entity 'nobody'" in done.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--mode", "kge"], "needs --kge"),
        (["--mode", "rl"], "no trained prover"),
        (["--limit", "-1"], "must be at least 0, got -1"),
        (["--rules", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_in_one_sentence(
    batchwright: Batchwright, folder: Path, words: list[str], says: str
) -> None:
    done = batchwright("evaluate", "prover", "--data", folder, *words, "--quiet", code=1)

    assert says in done.err


@pytest.mark.slow
@pytest.mark.skipif(not (DATA / "umls").is_dir(), reason="no umls data set; set BATCHWRIGHT_DATA")
def test_mined_rules_rank_umls_well(batchwright: Batchwright) -> None:
    found = batchwright.json("evaluate", "prover", "--data", DATA / "umls", "--quiet")

    assert found["both"]["queries"] == 1322
    assert found["both"]["mrr"] > 0.93
    # Whatever the order of ties.
    assert found["both"]["pessimistic_mrr"] > 0.93


def test_another_test_file_changes_no_weight_no_choice_and_no_figure_of_valid(
    batchwright: Batchwright, folder: Path, tmp_path: Path
) -> None:
    """Names that sort first, unknown relations, and triples that would filter valid's rivals."""
    own = "aaa\tadores\tzzz\nold0\tgrandparent\tmid3\nold0\tgrandparent\tbabe1\naaa\tchild\told1\n"
    found = []
    for number, test in enumerate(((folder / "test.txt").read_text(), own, "")):
        data = tmp_path / f"{number}" / "families"
        data.mkdir(parents=True)
        for part in ("train", "valid"):
            (data / f"{part}.txt").write_text((folder / f"{part}.txt").read_text())
        (data / "test.txt").write_text(test)
        kge, prover = data.parent / "kge", data.parent / "prover"
        batchwright(
            *("train", "kge", "--data", data, "--run-dir", kge, "--rank", 6, "--epochs", 2),
            *("--batch-size", 32, "--eval-every", 1, "--quiet"),
        )
        done = batchwright.json(
            *("train", "prover", "--data", data, "--run-dir", prover, "--n-envs", 8),
            *("--ppo-steps", 128, "--clone-updates", 2, "--passes", 2, "--quiet"),
        )
        tables = (kge / "model" / "tables.safetensors").read_bytes()
        weights = [path.read_bytes() for path in sorted((prover / "model").rglob("*.safetensors"))]
        assert weights
        valid = []
        for more in (
            ("rules", "--learn", 1),
            ("kge", "--kge", kge),
            ("rl", "--prover", prover),
            ("hybrid", "--kge", kge, "--prover", prover),
        ):
            words = ("evaluate", "prover", "--data", data, "--part", "valid", "--quiet")
            figures = batchwright.json(*words, "--mode", *more)
            valid.append({k: v for k, v in figures.items() if k != "prover"})
        mrrs = [done[k] for k in ("first_mrr", "before_ppo_mrr", "after_ppo_mrr", "best_mrr")]
        found.append((tables, weights, valid, mrrs, (prover / "rules.txt").read_text()))
    assert found[0] == found[1] == found[2]


def test_names_that_only_test_has_are_ranked_and_steer_nothing(
    batchwright: Batchwright, folder: Path, embedding: Path, tmp_path: Path
) -> None:
    data = tmp_path / "families"
    data.mkdir()
    for part in ("train", "valid"):
        (data / f"{part}.txt").write_text((folder / f"{part}.txt").read_text())
    (data / "test.txt").write_text(
        "aaa\tparent\told1\nold1\tadores\tmid1\nold1\tgrandparent\tkid1\nmid1\tparent\tkid1\n"
    )
    words = ("evaluate", "prover", "--data", data, "--quiet", "--mode")
    for more in (("rules",), ("kge", "--kge", embedding), ("hybrid", "--kge", embedding)):
        found = batchwright.json(*words, *more)
        assert found["both"]["queries"] == 8
        # All 49 entities are alike for a relation that was never seen.
        assert found["by_relation"]["adores"]["mean_rank"] == 25.0
        assert found["by_relation"]["parent"]["mean_rank"] > 1
        assert found["in_train"] == 1
    said = batchwright(*words, "rules").out
    assert "warning: 1 of the test triples are facts of train.txt" in said


def test_very_many_entities_are_not_learned_over_unless_told(
    batchwright: Batchwright, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = load_graph(folder)
    each = 2 * len(graph.train) * graph.vocab.num_entities
    words = ("evaluate", "prover", "--data", folder, "--mode", "rules", "--limit", 4, "--quiet")
    assert batchwright.json(*words)["learn"] == 4
    for epochs in (0, 2):
        monkeypatch.setattr("batchwright.cli.evaluate.prover.CELLS", each * epochs + 1)
        assert batchwright.json(*words)["learn"] == epochs
        told = batchwright(*words).out
        assert f"learned for {epochs} of 4 epochs at most" in told
        found = batchwright.json(*words, "--learn", 3)
        assert (found["learn"], "learn_cut" in found) == (3, False)
