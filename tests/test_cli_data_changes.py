"""Data that moves, grows, mixes or changes between measuring and generating."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchwright.batching import BatchReader
from batchwright.data import load_tokenizer

NAMED = [{"id": f"r{i}", "text": f"{i} " + "word " * (1 + i % 40)} for i in range(120)]
PLAIN = [{"text": f"{i} " + "other " * (1 + i % 30)} for i in range(80)]


Typed = Callable[..., str]


@pytest.fixture
def typed(call) -> Typed:
    """Types a command in a folder; what it printed, or its error if that is expected."""

    def typed(folder: Path, words: str, code: int = 0) -> str:
        outcome = call(words, folder)
        assert outcome.code == code, outcome.err
        return str(outcome.out if code == 0 else outcome.err)

    return typed


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def texts(folder: Path) -> list[str]:
    """Every sample of epoch 0 as text, read back from the batch files."""
    decode = load_tokenizer("bytes").decode
    found = []
    for batch in BatchReader(folder).iter_epoch(0):
        for row in range(batch.batch_size):
            segments = batch.segment_ids[row]
            for segment in range(segments.max() + 1):
                ids = batch.input_ids[row][segments == segment].tolist()
                found.append(decode(ids[:-1]))
    return sorted(found)


@pytest.fixture
def folder(tmp_path: Path, typed: Typed) -> Path:
    write(tmp_path / "named.jsonl", NAMED)
    write(tmp_path / "plain.jsonl", PLAIN)
    for name in ("named", "plain"):
        typed(
            tmp_path,
            f"data lengths build -d {name}.jsonl -t bytes -o {name}.lengths.jsonl",
        )
    return tmp_path


def test_rows_may_move_and_grow_but_not_change(folder: Path, typed: Typed) -> None:
    typed(folder, "data batchplan build -l named.lengths.jsonl --layout packed -o plan")
    generate = "data batch generate -p plan -d named.jsonl -t bytes -o"
    write(folder / "named.jsonl", [*reversed(NAMED), {"id": "new", "text": "x"}])
    typed(folder, f"{generate} moved")
    changed = [{**NAMED[0], "text": NAMED[0]["text"].replace("word", "wood")}, *NAMED[1:]]
    write(folder / "named.jsonl", changed)
    error = typed(folder, f"{generate} changed", code=1)

    assert texts(folder / "moved") == sorted(row["text"] for row in NAMED)
    assert error.startswith("error: the plan was built for data")
    assert not (folder / "changed").exists()


def test_the_same_rows_in_another_order_give_the_same_plan(folder: Path, typed: Typed) -> None:
    write(folder / "turned.jsonl", NAMED[::-1])
    typed(folder, "data lengths build -d turned.jsonl -t bytes -o turned.jsonl.lengths.jsonl")
    fingerprints = []
    for lengths in ("named.lengths.jsonl", "turned.jsonl.lengths.jsonl"):
        words = f"data batchplan build -l {lengths} --format json -o {lengths}.plan"
        fingerprints.append(json.loads(typed(folder, words))["fingerprint"])

    assert fingerprints[0] == fingerprints[1]


def test_a_mixture_shows_each_source_by_its_weight(folder: Path, typed: Typed) -> None:
    lengths = "-l named.lengths.jsonl -l plain.lengths.jsonl"
    build = f"data batchplan build {lengths} --weight 2 --weight 0.5 -e 2 --layout packed -o mixed"
    typed(folder, build)
    typed(folder, f"data batchplan verify -p mixed {lengths}")
    generate = "data batch generate -p mixed -d named.jsonl -d plain.jsonl -t bytes -o batches"
    typed(folder, generate)
    seen = texts(folder / "batches")

    assert [text for text in seen if "word" in text] == sorted(
        row["text"] for row in NAMED for _ in range(2)
    )
    assert len([text for text in seen if "other" in text]) == len(PLAIN) // 2


def test_several_data_sets_are_one_when_measured_as_one(folder: Path, typed: Typed) -> None:
    both = "-d named.jsonl -d plain.jsonl"
    typed(folder, f"data lengths build {both} -t bytes -o both.lengths.safetensors")
    typed(folder, "data batchplan build -l both.lengths.safetensors -o plan")
    typed(folder, f"data batch generate -p plan {both} -t bytes -o batches")

    assert texts(folder / "batches") == sorted(row["text"] for row in [*NAMED, *PLAIN])


def test_a_curriculum_goes_from_easy_to_hard(folder: Path, typed: Typed) -> None:
    write(folder / "graded.jsonl", [{**row, "hard": -n} for n, row in enumerate(NAMED)])
    typed(folder, "data lengths build -d graded.jsonl -t bytes -o graded.lengths.jsonl")
    build = (
        "data batchplan build -l graded.lengths.jsonl -d graded.jsonl --curriculum hard "
        "--curriculum-stages 4 -b 2048 -o plan"
    )
    typed(folder, build)
    info = typed(folder, "data batchplan info -p plan -n 1000 --format json")
    order = [int(name[1:]) for batch in json.loads(info)["batches"] for name in batch["samples"]]
    stages = [sorted(order[start : start + 30]) for start in range(0, 120, 30)]

    assert stages == [
        list(range(90, 120)),
        list(range(60, 90)),
        list(range(30, 60)),
        list(range(30)),
    ]
    error = typed(folder, build.replace("hard", "soft"), code=1)
    assert "soft is None" in error


def test_groups_costs_and_multiples_come_from_columns(folder: Path, typed: Typed) -> None:
    paired = [{**row, "pair": n // 2, "image_tokens": n % 3} for n, row in enumerate(NAMED)]
    write(folder / "paired.jsonl", paired)
    typed(folder, "data lengths build -d paired.jsonl -t bytes -o paired.lengths.jsonl")
    build = (
        "data batchplan build -l paired.lengths.jsonl -d paired.jsonl --group-by pair "
        "--cost-column image_tokens --segment-multiple 16 --layout packed -b 4096 -o plan"
    )
    typed(folder, build)
    typed(folder, "data batchplan verify -p plan -l paired.lengths.jsonl")
    info = json.loads(typed(folder, "data batchplan info -p plan -n 1000 --format json"))
    seen = [sorted(int(name[1:]) // 2 for name in batch["samples"]) for batch in info["batches"]]
    tokens = sum(len(row["text"]) for row in NAMED)

    assert sorted(pair for batch in seen for pair in batch) == [n // 2 for n in range(len(NAMED))]
    assert all(batch.count(pair) == 2 for batch in seen for pair in batch)
    assert info["useful_tokens"] - tokens >= sum(row["image_tokens"] for row in paired)
    typed(folder, "data batch generate -p plan -d paired.jsonl -t bytes -o batches")
    assert texts(folder / "batches") == sorted(row["text"] for row in NAMED)
    for batch in BatchReader(folder / "batches").iter_epoch(0):
        assert not (batch.cu_seqlens % 16).any()
    error = typed(folder, build.replace("image_tokens", "text"), code=1)
    assert "give an integer of at least 0" in error
