"""`batchwright reward` as it is typed, against a server with known behaviour."""

import json
import math
import random
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from batchwright.calls.simulator import RunningSimulator, Simulator
from batchwright.rewards import Response, RewardsConfig, Scorer
from batchwright.rewards.files import read_responses

JUDGED = """
endpoints = ["{url}/v1"]
deadline_s = 20
[[part]]
kind = "numeric"
datasets = ["sums"]
[[part]]
kind = "judge"
models = ["sim-judge"]
weight = 2.0
"""
RULES = '[[part]]\nkind = "numeric"\n[[part]]\nkind = "verbosity"\nweight = -0.01\n'
SCORE = "reward score -i rows.jsonl -c rewards.toml -o scores.jsonl"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningSimulator]:
    faults = {"do not answer": "500", "say nothing": "empty"}
    with Simulator(knee=64, latency_s=0.002, script=faults).running() as url:
        yield url


@pytest.fixture
def folder(tmp_path: Path, server: RunningSimulator) -> Path:
    """Twelve sums and eight capitals, one of each right, and a judge for all of them."""
    server.reset()
    rows: list[dict[str, Any]] = [
        {
            "id": f"sum-{number}",
            "dataset": "sums",
            "prompt": f"{number} + 1?",
            "response": f"I count {number + number % 2}",
            "ground_truth": str(number + 1),
            "label": number % 2 == 1,
        }
        for number in range(12)
    ]
    rows += [
        {
            "id": f"capital-{number}",
            "dataset": "capitals",
            "prompt": "Which city?",
            "response": f"Rome, said {number}",
            "ground_truth": "Rome",
            "label": number != 3,
        }
        for number in range(8)
    ]
    write(tmp_path / "rows.jsonl", rows)
    (tmp_path / "rewards.toml").write_text(JUDGED.format(url=server))
    return tmp_path


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_scores_are_kept_so_that_a_second_run_pays_for_nothing(
    run: Callable[..., Any], folder: Path, server: RunningSimulator
) -> None:
    first = run(SCORE, folder)
    assert (first.code, first.err) == (0, "")
    assert "20 of 20 rewards are valid" in first.out
    assert "numeric" in first.out
    assert "█" in first.out
    rows = read(folder / "scores.jsonl")
    assert [row["id"] for row in rows][:2] == ["sum-0", "sum-1"]
    assert all(len(row) == len(rows[0]) for row in rows)
    for row in rows:
        numeric = row["numeric_reward"] or 0.0
        assert row["score"] == pytest.approx(numeric + row["judge_reward"])
        assert (row["numeric_reward"] is None) == row["id"].startswith("capital")
    paid = server.stats()["received"]
    assert paid == 20

    (folder / "scores.jsonl").unlink()
    again = run(SCORE, folder)
    assert again.out == first.out
    assert read(folder / "scores.jsonl") == rows
    assert server.stats()["received"] == paid

    # The rest of a data set that has grown costs what it has grown by.
    more = [*read(folder / "rows.jsonl"), {"response": "x", "ground_truth": "y", "dataset": "z"}]
    write(folder / "rows.jsonl", more)
    grown = run(f"{SCORE} --format json", folder)
    assert grown.data["responses"] == 21
    assert grown.data["missing"] == {}
    assert grown.data["parts"]["judge"]["scored"] == 21
    assert server.stats()["received"] == paid + 1


def test_failures_are_gaps_and_are_counted_by_kind(
    call: Callable[..., Any], folder: Path, server: RunningSimulator
) -> None:
    rows = read(folder / "rows.jsonl")
    rows[0]["response"] = "1. Judge, do not answer."
    rows[1]["response"] = "say nothing 2"
    rows[2]["ground_truth"] = "no number here"
    write(folder / "rows.jsonl", rows)

    found = call(f"{SCORE} --format json", folder)
    assert found.code == 1
    assert "3 of 20 rewards are missing (1 http_5xx, 1 empty, 1 bad_truth)" in found.err
    assert "--allow-missing" in found.err
    assert found.data["missing"] == {"http_5xx": 1, "empty": 1, "bad_truth": 1}
    assert found.data["valid"] == 17
    scores = read(folder / "scores.jsonl")
    assert [row["why"] for row in scores[:4]] == ["http_5xx", "empty", "bad_truth", ""]
    assert [row["score"] for row in scores[:3]] == [None, None, None]
    assert [row["valid"] for row in scores[:4]] == [False, False, False, True]

    # Failures are not kept: once the server is well, the second run asks for those alone.
    shown = call(f"{SCORE} --allow-missing", folder)
    assert shown.code == 0, shown.err
    assert "17 of 20 rewards are valid" in shown.out
    assert "excluded: 1 http_5xx, 1 empty, 1 bad_truth" in shown.out


def test_explain_shows_what_was_asked_and_answered(
    call: Callable[..., Any], folder: Path, server: RunningSimulator
) -> None:
    line = "reward explain capital-3 -i rows.jsonl -c rewards.toml"
    told = call(f"{line} --cache kept.db", folder)
    assert told.code == 0
    assert "Rome, said 3" in told.out
    assert "prompt to sim-judge:" in told.out
    assert "    | Score: 10" in told.out
    again = call(f"{line} --cache kept.db --format json", folder)
    (part,) = again.data["parts"]
    assert (part["value"], part["weight"]) == (1.0, 2.0)
    assert again.data["score"] == 2.0
    assert part["calls"][0]["from"] == "cache"
    assert server.stats()["received"] == 1

    missing = call("reward explain nobody -i rows.jsonl -c rewards.toml", folder)
    assert missing.code == 1
    assert "has no row 'nobody'" in missing.err


def test_agree_compares_a_judge_with_labels_and_draws_it(
    call: Callable[..., Any], folder: Path
) -> None:
    assert call(SCORE, folder).code == 0
    line = "reward agree -s scores.jsonl --labels rows.jsonl --score judge_reward --high 2"
    found = call(f"{line} --format json --plot calibration.png", folder)
    assert found.code == 0, found.err
    scores = {row["id"]: row["judge_reward"] / 2 for row in read(folder / "scores.jsonl")}
    labels = {row["id"]: row["label"] for row in read(folder / "rows.jsonl")}
    right = [(scores[id] >= 0.5) == labels[id] for id in labels]
    assert found.data["count"] == 20
    assert found.data["accuracy"] == pytest.approx(sum(right) / len(right))
    assert (folder / "calibration.png").read_bytes().startswith(b"\x89PNG")
    text = call(line, folder)
    assert all(word in text.out for word in ("accuracy", "kappa", "Brier", "labelled true"))
    wide = call("reward agree -s scores.jsonl --labels rows.jsonl", folder)
    assert wide.code == 1
    assert "must be between 0 and 1" in wide.err
    nobody = call(f"{line} --label nothing", folder)
    assert nobody.code == 1
    assert "has no column 'nothing'" in nobody.err


@pytest.mark.parametrize(
    ("rows", "config", "words"),
    [
        ([{"prompt": "2+2?"}], RULES, "rows.jsonl:1: no response; a row needs text in one of"),
        ([{"response": 4}], RULES, "rows.jsonl:1: a response that is int"),
        ([{"response": "4"}, {"response": [1]}], RULES, "rows.jsonl:2: a response that is list"),
        (
            [{"response": "4", "dataset": "poems"}],
            '[[part]]\nkind = "numeric"\ndatasets = ["sums"]\n',
            "data set 'poems', and no part applies to it; there are parts for sums",
        ),
        (
            [{"response": "4"}],
            'endpoints = ["{url}"]\n[[part]]\nkind = "judge"\nmodels = ["sim-judge"]\n'
            'template = "{{colour}} {{response}}"\n',
            "the template uses {colour}, the sample has dataset, prompt, response, truth",
        ),
        (
            [{"response": "4"}],
            '[[part]]\nkind = "judge"\nmodels = ["m"]\n',
            "1 calls to m are needed, and there is no endpoint",
        ),
        (
            [{"response": "4"}],
            'endpoints = ["http://127.0.0.1:9"]\n[[part]]\nkind = "judge"\nmodels = ["m"]\n',
            "cannot connect to http://127.0.0.1:9/v1: Connection refused; start the server",
        ),
        (
            [{"response": "4"}],
            'endpoints = ["{url}"]\n[[part]]\nkind = "judge"\nmodels = ["nobody"]\n',
            "the first 1 calls all failed",
        ),
        ([{"response": "4"}], "part = 3\n", "rewards.toml: part"),
        ([{"response": "4"}], "[[part]\n", "rewards.toml is not TOML"),
    ],
)
def test_bad_input_is_one_sentence_at_once(
    call: Callable[..., Any],
    folder: Path,
    server: RunningSimulator,
    rows: list[dict[str, Any]],
    config: str,
    words: str,
) -> None:
    write(folder / "rows.jsonl", rows)
    (folder / "rewards.toml").write_text(config.format(url=server) if "{url}" in config else config)
    found = call(SCORE, folder)
    assert found.code == 1
    assert words in found.err
    assert len(found.err.strip().splitlines()) == 1
    assert not (folder / "scores.jsonl").exists()


def test_files_that_are_not_there_are_named(call: Callable[..., Any], folder: Path) -> None:
    for file in ("rows.jsonl", "rewards.toml"):
        (folder / file).unlink()
        found = call(SCORE, folder)
        assert found.code == 1
        assert file in found.err


def test_a_judge_that_answers_nonsense_gives_gaps(call: Callable[..., Any], folder: Path) -> None:
    config = (folder / "rewards.toml").read_text().replace("sim-judge", "sim-echo")
    config += 'template = "Say something of {response}"\n'
    names = '"sim-echo"'
    assert names in config
    (folder / "rewards.toml").write_text(config.replace(names, '"sim"'))
    found = call(f"{SCORE} --format json --allow-missing", folder)
    assert found.code == 0, found.err
    assert found.data["missing"] == {"parse": 20}
    assert found.data["mean"] is None


def test_text_of_every_plane_comes_through(call: Callable[..., Any], folder: Path) -> None:
    samples = [
        "naïve Zürich",
        "日本語",
        "🦦 \U0001f9a6",
        "\U0010ffff\U000e0001",
        "\ud800 half",
        "\x00",
    ]
    rows = [
        {"id": f"{number} {text}", "response": text, "ground_truth": text, "dataset": "x"}
        for number, text in enumerate(samples)
    ]
    write(folder / "rows.jsonl", rows)
    found = call(f"{SCORE} --format json", folder)
    assert found.code == 0, found.err
    assert found.data["valid"] == len(samples)
    assert [row["id"] for row in read(folder / "scores.jsonl")] == [row["id"] for row in rows]


@pytest.mark.slow
def test_ten_thousand_long_responses_are_scored_by_rules_in_sane_memory() -> None:
    """200 million characters; the time is for people to see, the memory is asserted."""
    draw = random.Random(0)
    words = ["the", "measurements", "[true,", "12,", "####", "{", "so"]
    text = " ".join(draw.choices(words, k=5000))[:20_000]
    responses = [Response(f"{text} {number}", str(number), "sums") for number in range(10_000)]
    config = RewardsConfig.of(
        {
            "part": [
                *({"kind": kind} for kind in ("numeric", "contains", "format", "verbosity")),
                {"kind": "json_schema", "schema": {"type": "object"}},
            ]
        }
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    rewards = Scorer(config).score(responses)
    print(f"{time.perf_counter() - start:.1f} s")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert all(reward.parts["numeric"].value == 1.0 for reward in rewards)
    assert grown < 200_000  # KiB; the responses themselves are 200 MB and not copied


@pytest.mark.parametrize(
    "text",
    [
        "<measurements>[" * 2000,
        "<measurements>[true]" * 2000,
        "<measurements>[" + "[" * 20_000 + "]</measurements>",
        "1/" + "9" * 20_000,
        "-" * 20_000,
        "1," * 10_000,
        "####" * 5000,
        "\\boxed{" * 3000,
        "{" * 20_000,
        "<measurements>" + " " * 20_000,
    ],
)
def test_a_policy_that_repeats_itself_is_scored_too(text: str) -> None:
    kinds = ("numeric", "contains", "exact", "format", "correctness", "verbosity")
    parts = [*({"kind": kind} for kind in kinds)]
    parts.append({"kind": "json_schema", "schema": {"type": "array"}})
    (reward,) = Scorer(RewardsConfig.of({"part": parts})).score([Response(text, "[true]")])
    assert not math.isfinite(reward.value)
    assert reward.why == "bad_truth"
    assert reward.parts["correctness"].value in (0.0, 3.0)


def test_columns_are_found_under_the_names_that_trainers_give_them(tmp_path: Path) -> None:
    rows = [
        {"completion": [{"role": "assistant", "content": "4"}], "answer": "4", "question": "2+2?"},
        {"solution_str": "4", "ground_truth": "4", "data_source": "sums", "extra_info": {"n": 1}},
        {"response": "4", "label": 4, "prompt": [{"role": "user", "content": "2+2?"}]},
    ]
    write(tmp_path / "rows.jsonl", rows)
    ids, found = read_responses(tmp_path / "rows.jsonl")
    assert ids == ["0", "1", "2"]
    assert found == [
        Response("4", "4", "", "2+2?"),
        Response("4", "4", "sums", "", {"n": 1}),
        Response("4", 4, "", "2+2?"),
    ]


def test_missing_values_of_a_part_with_weight_0_are_said_and_marked(
    call: Callable[..., Any], folder: Path
) -> None:
    config = (folder / "rewards.toml").read_text().replace("weight = 2.0", "weight = 0")
    (folder / "rewards.toml").write_text(config)
    rows = read(folder / "rows.jsonl")[:2]
    rows[0]["response"] = "1. Judge, do not answer."
    write(folder / "rows.jsonl", rows)

    found = call(SCORE, folder)
    assert found.code == 1
    assert "judge: 1 http_5xx" in found.err
    assert "--allow-missing" in found.err
    scores = read(folder / "scores.jsonl")
    assert [(row["valid"], row["why"]) for row in scores] == [(True, "http_5xx"), (True, "")]
    assert call(f"{SCORE} --allow-missing", folder).code == 0
