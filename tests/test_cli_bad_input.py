"""Whatever is wrong with files, flags or the machine: one sentence, and nothing half-written."""

import contextlib
import gzip
import hashlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from batchwright.batching import BatchPlan, BatchReader
from batchwright.data.entries import Entries
from batchwright.data.ids import Ids
from batchwright.data.lengths.files import write_entries
from batchwright.errors import BadFile, Mismatch

COMMAND = Path(sys.executable).parent / "batchwright"
READ_LENGTHS = (
    "data lengths stats -c {}",
    "data batching histogram -c {}",
    "data batching analyze -c {}",
    "data batching suggest -c {}",
    "data batchplan build -l {} -o new",
    "data batchplan verify -p batch_plan -l {}",
)
READ_PLAN = (
    "data batchplan info -p {}",
    "data batchplan verify -p {} -l lengths.jsonl",
    "data batchplan draw -p {}",
    "data batchplan explain row-07 -p {}",
    "data batchplan diff {} batch_plan",
    "data batchplan shard -p {} -w 2 -o new",
    "data batchplan export -p {} -o new",
    "data batch generate -p {} -d train.jsonl -t gpt2 -o new",
)
READ_SAMPLES_OF_PLAN = ("data batchplan info -n 9 -p {}", *READ_PLAN[1:2], *READ_PLAN[5:])
WRITE = (
    "data lengths build -d train.jsonl -t bytes -o {}.jsonl",
    "data lengths build -d train.jsonl -t bytes -o {}.safetensors",
    "data batchplan build -l lengths.jsonl -o {}",
    "data batchplan shard -p batch_plan -w 2 -o {}",
    "data batchplan export -p batch_plan -o {}",
    "data batch generate -p batch_plan -d train.jsonl -t gpt2 -o {}",
    "data batchplan draw -p batch_plan --png {}.png",
    "data batching histogram -c lengths.jsonl --png {}.png",
    "data batching analyze -c lengths.jsonl -o {}.json",
)


def one_sentence(outcome: Any, code: int = 1) -> str:
    """What the command said, if it is one line without a traceback and the right exit code."""
    assert outcome.code == code, outcome
    assert outcome.out == ""
    assert outcome.err.startswith("error: ")
    assert outcome.err.count("\n") == 1
    assert outcome.err.endswith("\n")
    assert "Traceback" not in outcome.err
    assert "internal error" not in outcome.err
    return str(outcome.err.removeprefix("error: ").strip())


@pytest.fixture
def refused(call, contents) -> Callable[..., str]:
    """Runs a line that must fail with one sentence and leave its folder as it was."""

    def refused(line: str, folder: Path, code: int = 1) -> str:
        before = contents(folder)
        said = one_sentence(call(line, folder), code)
        after = contents(folder)
        # A journal with measured rows is no waste: the next run goes on from it.
        journals = {n for n, raw in after.items() if n.endswith(".partial") and b"\n{" in raw}
        assert {n: raw for n, raw in after.items() if n not in journals} == before
        return said

    return refused


def flip(path: Path, at: int, bit: int = 0) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1 << bit
    path.write_bytes(raw)


def cache(path: Path, *entries: tuple[str, object]) -> Path:
    """A cache as somebody might write it by hand, all its checksums right."""
    ids = Ids.of([name for name, _ in entries])
    none = Entries(ids, np.ones(len(ids), np.int32), np.zeros(len(ids), np.uint64), None, "t")
    lines = ['{"format":"batchwright.lengths","version":2,"tokenizer_hash":"t","loss":false}']
    lines += [f'{{"sample_id":{json.dumps(n)},"length":{json.dumps(v)}}}' for n, v in entries]
    text = "".join(line + "\n" for line in lines)
    end = {
        "end": True,
        "entries": len(ids),
        "dataset_hash": none.dataset_hash,
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
    }
    path.write_text(text + json.dumps(end, separators=(",", ":")) + "\n")
    return path


def parquet_bytes(rows: int = 200) -> bytes:
    sink = pa.BufferOutputStream()
    pyarrow.parquet.write_table(pa.table({"text": ["some words"] * rows}), sink)
    return bytes(sink.getvalue())


ROWS = b"".join(b'{"text": "row number %d"}\n' % number for number in range(300))
PACKED = gzip.compress(ROWS)
BAD_DATA = {
    "empty": (b"", "has no rows"),
    "blank": (b"\n \n\n", "has no rows"),
    "binary": (bytes(range(256)) * 40, "binary"),
    "array": (b'[{"text": "a"}]\n', "one JSON array"),
    "utf16": ('{"text": "a"}\n'.encode("utf-16"), "UTF-16"),
    "cut": (ROWS[:-9], "bad.jsonl:300: not JSON"),
    "not-utf8": (ROWS + b'{"text": "\xff"}\n', "bad.jsonl:301: not UTF-8"),
    "foreign": (b'{"hello": 1}\n', "bad.jsonl:1: has none of the known keys"),
    "number": (b"3\n", "bad.jsonl:1: is a JSON int"),
    "no-tokens": (ROWS + b'{"input_ids": []}\n', "bad.jsonl:301: .*no tokens"),
    "only-no-tokens": (b'{"input_ids": []}\n', "bad.jsonl:1: .*no tokens"),
    "cut-gzip": (PACKED[:-20], "truncated or damaged gzip"),
    "flipped-gzip": (PACKED[:90] + bytes([PACKED[90] ^ 1]) + PACKED[91:], "gzip"),
    "cut-parquet": (parquet_bytes()[:-9], "bad.jsonl"),
    "headless-parquet": (b"PAR1" + bytes(100), "bad.jsonl"),
    "length-cache": (b'{"format":"batchwright.lengths","version":2}\n', "none of the known keys"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD_DATA)
def test_data_that_cannot_be_read_is_named_with_its_line(refused, tmp_path, kind) -> None:
    content, says = BAD_DATA[kind]
    (tmp_path / "bad.jsonl").write_bytes(content)

    said = refused("data lengths build -d bad.jsonl -t bytes -o new.jsonl", tmp_path)
    assert re.search(says, said), said


def test_data_that_is_not_there_or_a_folder_is_named(refused, copy) -> None:
    (copy / "folder").mkdir()
    for data in ("nowhere.jsonl", "folder", "batch_plan"):
        said = refused(f"data lengths build -d {data} -t bytes -o new.jsonl", copy)
        assert data in said
        said = refused(f"data batch generate -p batch_plan -d {data} -t gpt2 -o new", copy)
        assert data in said


def test_ids_that_repeat_are_named_with_both_lines(refused, tmp_path) -> None:
    rows = [f'{{"id": "n{number}", "text": "x"}}' for number in range(700)]
    rows[3] = '{"id": "twin", "text": "y"}'
    rows[650] = '{"id": "twin", "text": "z"}'
    (tmp_path / "rows.jsonl").write_text("\n".join([*rows[:5], "", *rows[5:]]) + "\n")

    said = refused("data lengths build -d rows.jsonl -t bytes -o new.jsonl", tmp_path)
    assert "'twin'" in said
    assert "rows.jsonl:4 and rows.jsonl:652" in said


def test_a_line_that_was_doubled_in_a_cache_is_noticed(refused, copy) -> None:
    head, first, *rest = (copy / "lengths.jsonl").read_text().splitlines(keepends=True)
    (copy / "bad.jsonl").write_text("".join([head, first, first, *rest]))

    for line in READ_LENGTHS:
        assert "bad.jsonl is damaged" in refused(line.format("bad.jsonl"), copy)


@pytest.mark.parametrize("value", [0, -3, 2**31, 2**70, 1.5, "12", None, True, [4]])
def test_a_length_in_a_cache_is_a_positive_int32(refused, tmp_path, value) -> None:
    cache(tmp_path / "bad.jsonl", ("a", 5), ("odd", value))

    said = refused("data lengths stats -c bad.jsonl", tmp_path)
    assert "length" in said
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63:
        assert f"sample 'odd' has length {value}" in said
        assert "2,147,483,647" in said


@pytest.mark.parametrize("value", [0, -3, 2**31])
def test_a_length_in_a_fast_cache_is_a_positive_int32(refused, tmp_path, value) -> None:
    lengths = np.array([5, value])
    entries = Entries(Ids.of(["a", "odd"]), lengths, np.zeros(2, np.uint64), None, "t")  # type: ignore[arg-type]
    write_entries(tmp_path / "bad.safetensors", entries)

    said = refused("data lengths stats -c bad.safetensors", tmp_path)
    assert f"sample 'odd' has length {value}" in said


def test_a_cache_without_entries_is_refused(refused, tmp_path) -> None:
    cache(tmp_path / "bad.jsonl")

    for line in READ_LENGTHS[:-1]:
        refused(line.format("bad.jsonl"), tmp_path)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "folder": make_folder,
    "binary": lambda path: path.write_bytes(bytes(range(256)) * 9),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: -max(2, path.stat().st_size // 3)]),
    "foreign": lambda path: path.write_text('{"hello": 1}\n'),
    "flipped": lambda path: flip(path, path.stat().st_size // 2),
}


@pytest.mark.parametrize("suffix", ["jsonl", "safetensors"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_lengths_that_are_not_whole_are_refused_everywhere(
    refused, call, copy, suffix, damage
) -> None:
    bad = copy / f"bad.{suffix}"
    assert call(f"data lengths build -d train.jsonl -t bytes -o {bad}", copy).code == 0
    DAMAGE[damage](bad)

    for line in READ_LENGTHS:
        assert bad.name in refused(line.format(bad.name), copy)


@pytest.mark.parametrize("suffix", ["jsonl", "safetensors"])
def test_any_flipped_bit_of_lengths_is_noticed(call, copy, suffix) -> None:
    bad = copy / f"bad.{suffix}"
    call(f"data lengths build -d train.jsonl -t bytes -o {bad}", copy)
    good, draw = bad.read_bytes(), random.Random(suffix)

    for at in range(0, len(good), len(good) // 60):
        bad.write_bytes(good)
        flip(bad, at, draw.randrange(8))
        one_sentence(call(f"data lengths stats -c {bad.name}", copy))


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_plan_that_is_not_whole_is_refused_everywhere(refused, copy, damage) -> None:
    shutil.copytree(copy / "batch_plan", copy / "bad")
    DAMAGE[damage](copy / "bad/manifest.json")

    for line in READ_PLAN:
        assert "bad" in refused(line.format("bad"), copy)


def test_what_is_no_plan_at_all_is_refused_everywhere(refused, copy) -> None:
    (copy / "void").mkdir()
    for path in ("nowhere", "void", "train.jsonl", "batches", "shards"):
        for line in READ_PLAN:
            assert path in refused(line.format(path), copy)


@pytest.mark.parametrize("damage", ["missing", "folder", "binary", "cut", "foreign", "flipped"])
def test_damage_to_any_array_of_a_plan_is_refused(refused, copy, damage) -> None:
    arrays = [p.name for p in (copy / "batch_plan").glob("*.bin") if p.stat().st_size]
    assert len(arrays) > 5
    for name in arrays:
        shutil.copytree(copy / "batch_plan", copy / "bad")
        DAMAGE[damage](copy / "bad" / name)
        for line in READ_SAMPLES_OF_PLAN if damage == "flipped" else READ_PLAN[1:2]:
            assert "bad" in refused(line.format("bad"), copy)
        shutil.rmtree(copy / "bad")


def test_any_flipped_bit_of_a_plan_is_noticed(call, copy) -> None:
    draw = random.Random(7)
    for path in sorted((copy / "batch_plan").iterdir()):
        good = path.read_bytes()
        for at in range(0, len(good), max(1, len(good) // 12)):
            flip(path, at, draw.randrange(8))
            line = "data batchplan verify -p batch_plan -l lengths.jsonl"
            one_sentence(call(line, copy))
            path.write_bytes(good)


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["manifest.json", "epoch_1/shard_00000.npz"])
def test_batches_that_are_not_whole_are_refused(copy, name, damage) -> None:
    DAMAGE[damage](copy / "batches" / name)

    with pytest.raises(BadFile, match="batches") as error:
        BatchReader(copy / "batches").check_files()
    assert "\n" not in str(error.value)


def test_batches_of_another_plan_are_told_apart(call, copy) -> None:
    call("data batchplan build -l lengths.jsonl --seed 7 -o other", copy)

    BatchReader(copy / "batches").verify_fingerprint(BatchPlan.load(copy / "batch_plan"))
    with pytest.raises(Mismatch):
        BatchReader(copy / "batches").verify_fingerprint(BatchPlan.load(copy / "other"))


BUILD = "data batchplan build -l lengths.jsonl -o new"
WRONG_NUMBERS = {
    f"{BUILD} --bucket-edges 256,128": "strictly ascending",
    f"{BUILD} --bucket-edges 128,128": "strictly ascending",
    f"{BUILD} --bucket-edges few,many": "must be integers",
    f"{BUILD} --bucket-edges 1.5,3": "must be integers",
    f"{BUILD} --bucket-edges=-5,10": "edge -5",
    f"{BUILD} --bucket-edges 0,10": "edge 0",
    f"{BUILD} --bucket-edges 128 --overflow-max 100": "edge 128, got 100",
    f"{BUILD} -b 0": "--token-budget must be at least 1, got 0",
    f"{BUILD} -b -5": "--token-budget must be at least 1, got -5",
    f"{BUILD} -b 99999999999": "--token-budget must be at most 2,147,483,647, got 99999999999",
    f"{BUILD} -b 100 --bucket-edges 128": "edge 128 .*--token-budget=100",
    f"{BUILD} -b 2 --bucket-edges 1": "60 of 60 samples are longer than 2",
    f"{BUILD} -b 2 --layout sorted": "60 of 60 samples are longer than 2",
    f"{BUILD} -b 2 --layout sorted --overflow skip": "all 60 samples were skipped",
    f"{BUILD} -b 2 --layout packed --pack-max-len 2": "60 of 60 samples are longer than 2",
    f"{BUILD} -b 100 --layout packed": "samples are longer than 100",
    f"{BUILD} -b 100 --layout packed --pack-max-len 101": "--token-budget=100, got 101",
    f"{BUILD} --layout packed --pack-max-len 0": "--pack-max-len must be at least 1, got 0",
    f"{BUILD} --pack-max-segments 0": "--pack-max-segments must be at least 1, got 0",
    f"{BUILD} --overflow-max 0": "--overflow-max must be at least 1, got 0",
    f"{BUILD} --min-length 0": "--min-length must be at least 1, got 0",
    f"{BUILD} --min-length 9999": "--min-length must be at most .*, got 9,999",
    f"{BUILD} --align 0": "--align must be at least 1, got 0",
    f"{BUILD} -e 0": "--epochs must be at least 1, got 0",
    f"{BUILD} -e {10**20}": "--epochs must be at most 2,147,483,647, got 100,000,000",
    f"{BUILD} -e -1": "--epochs must be at least 1, got -1",
    f"{BUILD} --step-size 0": "--step-size must be at least 1 or 'world', got 0",
    f"{BUILD} --step-size few": "must be an integer or world, got 'few'",
    f"{BUILD} --curriculum-stages 0": "--curriculum-stages must be at least 1, got 0",
    f"{BUILD} --weight 0": "weight 0",
    f"{BUILD} --weight nan": "weight nan",
    f"{BUILD} --weight 1 --weight 2": "2 weights for 1 sources",
    f"{BUILD} --curriculum difficulty": "--dataset",
    f"{BUILD} --curriculum difficulty -d train.jsonl": "train.jsonl:1: difficulty is None",
    f"{BUILD} --group-by pair": "--group-by reads a column of the rows; give --dataset too",
    f"{BUILD} --group-by pair -d train.jsonl": "train.jsonl:1: pair is missing",
    f"{BUILD} --cost-column images -d train.jsonl": "train.jsonl:1: images is None",
    f"{BUILD} --segment-multiple 0": "--segment-multiple must be at least 1, got 0",
    f"{BUILD} --layout packed --segment-multiple 4096": "--pack-max-len must be at least",
    f"{BUILD} --layout sorted --drop-last": "--drop-last is for",
    f"{BUILD} -l lengths.jsonl": "a name of its own",
    "data batchplan build -l lengths.jsonl": "--output",
    "data batchplan shard -p batch_plan -o new -w 0": "--world-size must be at least 1, got 0",
    "data batchplan shard -p batch_plan -o new -w -1": "--world-size must be at least 1, got -1",
    "data batchplan shard -p batch_plan -o new -w 99": "--world-size must be at most .*, got 99",
    "data batchplan shard -p batch_plan -o new -w 99999999999": "--world-size must be at most",
    "data batchplan info -p batch_plan -r 0": "--rank and --world-size go together",
    "data batchplan info -p batch_plan -w 2": "--rank and --world-size go together",
    "data batchplan info -p batch_plan -r 2 -w 2": "--rank must be between 0 and 1 .*, got 2",
    "data batchplan info -p batch_plan -r -1 -w 2": "--rank must be between 0 and 1 .*, got -1",
    "data batchplan info -p batch_plan -r 0 -w 0": "--world-size must be at least 1, got 0",
    "data batchplan info -p batch_plan -n -1": "--show-batches must be at least 0, got -1",
    "data batchplan explain row-07 -p batch_plan -r 0": "--rank and --world-size go together",
    "data batchplan explain nobody -p batch_plan": "'nobody'",
    "data batchplan draw -p batch_plan --epoch -1": "--epoch must be at least 0, got -1",
    "data batchplan draw -p batch_plan --rows 0": "--rows must be at least 1, got 0",
    "data batchplan draw -p batch_plan --width 0": "--width must be at least 1, got 0",
    "data batchplan verify -p batch_plan -l lengths.jsonl -l lengths.jsonl": "2 are given",
    "data batching histogram -c lengths.jsonl --bins 0": "--bins .*at least 1, got 0",
    "data batching histogram -c lengths.jsonl --width -4": "--width must be at least 1, got -4",
    "data batching histogram -c lengths.jsonl --bucket-edges few": "must be integers",
    "data batching analyze -c lengths.jsonl --bucket-edges 3,2": "strictly ascending",
    "data batching analyze -c lengths.jsonl --overflow-max 5": "last bucket edge 1024, got 5",
    "data batching analyze -c lengths.jsonl --token-budget 0": "--token-budget .*at least 1, got 0",
    "data batching suggest -c lengths.jsonl -n 0": "--num-buckets .*at least 1, got 0 and 1",
    "data batching suggest -c lengths.jsonl --align 0": "--align must be at least 1, got 4 and 0",
    "data batching suggest -c lengths.jsonl --max-length 2": "--max-length=2",
    "data batching suggest -c lengths.jsonl --current 5,4": "5, 4",
    "data lengths build -d train.jsonl -t bytes -o new.jsonl --workers 0": "at least 1, got 0",
    "data batch generate -p batch_plan -d train.jsonl -t gpt2 -o new --per-file 0": "--per-file",
    "train sft --model tiny --data train.jsonl --pack --pack-max-len 0": "--pack-max-len must be",
    "gym run --mock -t bytes --difficulty-max 2": "--difficulty-min and --difficulty-max must be",
}  # fmt: skip
WRONG_USAGE = {
    "nonsense": '"nonsense"',
    "data nonsense": '"nonsense"',
    "data batchplan nonsense": '"nonsense"',
    f"{BUILD} --nonsense 3": "--nonsense",
    f"{BUILD} -b many": '"many"',
    f"{BUILD} --layout heap": '"heap"',
    f"{BUILD} --overflow drop": '"drop"',
    f"{BUILD} --bucket-edges": "--bucket-edges",
    "data batchplan build -o new": "--lengths",
    "data batchplan shard -p batch_plan -o new": "--world-size",
    "data batchplan info": "--plan",
    "data batchplan diff batch_plan": "RIGHT|right",
    "data batchplan explain -p batch_plan": "SAMPLE|sample",
    "data lengths build -d train.jsonl -t bytes": "--output",
    "data lengths build -d train.jsonl -o new.jsonl": "--tokenizer",
    "data lengths stats -c lengths.jsonl --format yaml": '"yaml"',
    "data batching suggest -c lengths.jsonl --goal speed": '"speed"',
    "data batching histogram -c lengths.jsonl --bins many": '"many"',
}


@pytest.fixture(scope="module")
def shop(workshop) -> Path:
    return workshop[0]


@pytest.mark.parametrize("line", WRONG_NUMBERS)
def test_numbers_out_of_range_are_refused_by_name(refused, shop, line) -> None:
    said = refused(line, shop)
    assert re.search(WRONG_NUMBERS[line], said)
    # Flags are named, not the fields of Python behind them.
    assert set(re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", said)) <= {"batch_plan"}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--batch-size 0", "--batch-size must be at least 1, got 0"),
        ("--deadline -1", "--deadline must be above 0, got -1"),
        ("--max-cost 1", "--max-cost needs prices; give --price-in and --price-out"),
    ],
)
def test_flags_of_calls_are_refused_by_name(refused, tmp_path, flags, words) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Why?"}\n')
    line = "calls run -i prompts.jsonl -o new.jsonl --model m --endpoint http://127.0.0.1:1/v1"
    assert words in refused(f"{line} {flags}", tmp_path)


def test_a_file_that_is_called_like_a_field_keeps_its_name(refused, shop) -> None:
    said = refused("data batchplan build -l token_budget -o new", shop)
    assert "token_budget" in said
    assert "--token-budget" not in said


@pytest.mark.parametrize("line", WRONG_USAGE)
def test_wrong_usage_names_the_word_and_where_help_is(refused, shop, line) -> None:
    said = refused(line, shop, code=2)
    assert re.search(WRONG_USAGE[line], said)
    assert re.search(r"batchwright.* --help", said)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("data lengths build -d train.jsonl -t no/such-tokenizer -o new.jsonl", 1),
        ("data batchplan build -l lengths.jsonl -o new --bucket-edges 256,128", 1),
        ("data batch generate -p batch_plan -d train.jsonl -t bytes -o new", 1),
        ("data batchplan build -l lengths.jsonl -o new --layout heap", 2),
    ],
)
def test_the_installed_command_fails_the_same_way(run, shop, contents, line, code) -> None:
    before = contents(shop)
    one_sentence(run(line, shop), code)
    assert contents(shop) == before


def test_a_plan_is_not_verified_with_other_lengths(refused, call, copy) -> None:
    rows = (copy / "train.jsonl").read_text().splitlines(keepends=True)
    (copy / "fewer.jsonl").write_text("".join(rows[1:]))
    (copy / "changed.jsonl").write_text("".join([rows[0].replace("}", ', "x": 1}'), *rows[1:]]))
    for data, tokenizer, says in (
        ("train", "bytes", "tokenizer"),
        ("fewer", "gpt2", "lengths"),
        ("changed", "gpt2", "lengths"),
    ):
        call(f"data lengths build -d {data}.jsonl -t {tokenizer} -o other.jsonl", copy)
        said = refused("data batchplan verify -p batch_plan -l other.jsonl", copy)
        assert says in said


def test_batches_are_not_generated_with_another_tokenizer(refused, copy) -> None:
    said = refused("data batch generate -p batch_plan -d train.jsonl -t bytes -o new", copy)

    assert "bytes" in said
    assert "tokenizer" in said


def swapped(text: str) -> str:
    """As many tokens, but others."""
    first, second, *rest = text.split()
    assert first != second
    return " ".join([second, first, *rest])


CHANGES: dict[str, Callable[[list[dict[str, str]]], object]] = {
    "a row is gone": lambda rows: rows.pop(7),
    "a row is longer": lambda rows: rows[4].update(text=rows[4]["text"] + " and more"),
    "two words are swapped": lambda rows: rows[4].update(text=swapped(rows[4]["text"])),
    "an id is new": lambda rows: rows[4].update(id="other"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_batches_are_not_generated_from_changed_data(refused, copy, change) -> None:
    rows = [json.loads(line) for line in (copy / "train.jsonl").read_text().splitlines()]
    CHANGES[change](rows)
    (copy / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    refused("data batch generate -p batch_plan -d train.jsonl -t gpt2 -o new", copy)


@pytest.mark.parametrize("line", WRITE)
def test_a_path_below_a_file_cannot_be_written(refused, copy, line) -> None:
    said = refused(line.format("train.jsonl/new"), copy)
    assert "train.jsonl" in said


@pytest.mark.parametrize("line", WRITE[2:6])
def test_a_folder_with_files_of_somebody_else_stays(refused, copy, line) -> None:
    (copy / "thesis").mkdir()
    (copy / "thesis/chapter.tex").write_text("In the beginning")

    assert "thesis" in refused(line.format("thesis"), copy)
    assert "train.jsonl" in refused(line.format("train.jsonl"), copy)


@pytest.mark.parametrize("line", WRITE[2:6])
def test_a_folder_with_a_manifest_of_somebody_else_stays(refused, copy, line) -> None:
    (copy / "extension/rank_0").mkdir(parents=True)
    for name in ("manifest.json", "meta.json", "rank_0/manifest.json", "main.js"):
        (copy / "extension" / name).write_text('{"manifest_version": 3}\n')

    refused(line.format("extension"), copy)


@pytest.mark.parametrize(
    "line",
    [
        "data batch generate -p batch_plan -d train.jsonl -t gpt2 -o batch_plan",
        "data batchplan build -l lengths.jsonl -o batches",
    ],
)
def test_a_plan_and_its_batches_do_not_replace_each_other(refused, copy, line) -> None:
    refused(line, copy)


def test_a_file_of_somebody_else_is_not_replaced_by_lengths(refused, copy) -> None:
    (copy / "model.safetensors").write_bytes(bytes(8) + b"{}")
    for output in ("train.jsonl", "model.safetensors", "batch_plan", "lengths.txt"):
        assert output in refused(f"data lengths build -d train.jsonl -t bytes -o {output}", copy)


def test_an_unknown_tokenizer_names_the_ways_out(refused, copy) -> None:
    for name in ("nobody/nothing", "no-such-tokenizer"):
        said = refused(f"data lengths build -d train.jsonl -t {name} -o new.jsonl", copy)
        assert name in said
        for way in ("folder", "tokenizer.json", "HF_HOME", "-t bytes"):
            assert way in said
    for name in ("train.jsonl", "./nowhere/tokenizer.json"):
        said = refused(f"data lengths build -d train.jsonl -t {name} -o new.jsonl", copy)
        assert "tokenizer.json" in said


def test_pictures_without_matplotlib_name_the_line_to_type(shop, environ, contents) -> None:
    before = contents(shop)
    script = """
import sys
sys.modules["matplotlib"] = None
sys.argv = "batchwright data batchplan draw -p batch_plan --png new.png".split()
from batchwright.cli.app import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=shop,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )

    said = "matplotlib is missing; run: pip install 'batchwright[plot]'"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"error: {said}\n")
    assert contents(shop) == before


@pytest.mark.parametrize(
    ("module", "extra", "line"),
    [
        ("matplotlib", "plot", "data batching histogram -c lengths.jsonl --png new.png"),
        (
            *("scipy.optimize", "lp"),
            "data batchplan build -l hard.jsonl -o new -b 100 --layout packed --pack-max-len 100 "
            "--pack-mode optimal",
        ),
        ("datasets", "hf", "data lengths build -d hf:anything -t bytes -o new.jsonl"),
    ],
)
def test_optional_parts_that_are_missing_name_the_line_to_type(
    refused, copy, monkeypatch, module, extra, line
) -> None:
    # Best fit needs a fifth more rows than these lengths must have.
    counts = {51: 60, 27: 60, 26: 60, 23: 120}
    hard = [(f"{length}-{n}", length) for length, count in counts.items() for n in range(count)]
    cache(copy / "hard.jsonl", *hard)
    monkeypatch.setitem(sys.modules, module, None)

    said = refused(line, copy)
    assert module in said
    assert f"pip install 'batchwright[{extra}]'" in said


@pytest.fixture
def small_disk(copy) -> Iterator[tuple[Path, Callable[[], None] | None]]:
    """A folder of the copy that holds 64 KiB, or a limit that makes every file end at 4 KiB."""
    folder = copy / "disk"
    folder.mkdir()
    mounted = shutil.which("mount") and not subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], check=False
    ).returncode  # fmt: skip
    try:
        yield folder, None if mounted else limit_files
    finally:
        if mounted:
            subprocess.run(["umount", folder], check=True)


def limit_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))


def test_a_full_disk_is_said_and_leaves_nothing(run, copy, small_disk, contents) -> None:
    disk, limit = small_disk
    (copy / "rows.jsonl").write_bytes(ROWS * 12)
    if limit is None:
        (disk / "filler").write_bytes(bytes(48 << 10))
    before = contents(copy)
    for line in (
        "data lengths build -d rows.jsonl -t bytes -o {}.jsonl --workers 1",
        "data batch generate -p batch_plan -d train.jsonl -t gpt2 -o {}",
    ):
        more = {"preexec_fn": limit} if limit else {}
        said = one_sentence(run(line.format("disk/new"), copy, **more))
        assert re.search("No space left|File too large", said)
        # What was measured is kept for the next run; that is said as well.
        journal = copy / "disk/new.jsonl.partial"
        assert journal.exists() == ("resumes" in said)
        journal.unlink(missing_ok=True)
        assert contents(copy) == before, line


@pytest.mark.parametrize("line", WRITE[2:8])
def test_a_disk_without_any_room_is_said_and_leaves_nothing(
    refused, copy, small_disk, line
) -> None:
    disk, limit = small_disk
    if limit is not None:
        pytest.skip("no disk can be mounted here")
    (disk / "filler").write_bytes(bytes(64 << 10))

    assert "No space left" in refused(line.format("disk/new"), copy)


@pytest.mark.parametrize("suffix", ["jsonl", "safetensors"])
def test_a_disk_that_fills_up_at_the_last_moment_is_said(
    refused, call, copy, small_disk, suffix
) -> None:
    disk, limit = small_disk
    if limit is not None:
        pytest.skip("no disk can be mounted here")
    line = f"data lengths build -d train.jsonl -t bytes -o disk/new.{suffix}"
    # All rows are tokenised already, and no page is left for the cache itself.
    call(line.replace("disk/", ""), copy)
    (disk / "filler").write_bytes(bytes(64 << 10))

    assert "No space left" in refused(line, copy)
    (disk / "filler").unlink()
    again = call(f"{line} --format json", copy)
    assert (again.code, again.data["measured"]) == (0, 0)
    assert (disk / f"new.{suffix}").read_bytes() == (copy / f"new.{suffix}").read_bytes()


def test_a_prediction_takes_no_room_for_tokens(run, copy, small_disk) -> None:
    disk, limit = small_disk
    if limit is not None:
        pytest.skip("no disk can be mounted here")
    rows = "".join(json.dumps({"text": f"{n} " + "otter " * 200}) + "\n" for n in range(300))
    (copy / "long.jsonl").write_text(rows)
    line = "train sft --model tiny --data long.jsonl --pack --dry-run --run-dir none"

    # Tokens and masks take ten times what the folder for temporary files holds.
    done = run(line, copy, {"TMPDIR": str(disk)})

    assert done.code == 0, done.err
    assert not list(disk.glob("**/tokens*"))
    assert not (copy / "none").exists()


@pytest.mark.parametrize("group", [100, 1000])
def test_parquet_that_is_read_in_order_takes_no_room(run, copy, small_disk, group) -> None:
    import pyarrow
    import pyarrow.parquet

    disk, limit = small_disk
    if limit is not None:
        pytest.skip("no disk can be mounted here")
    rows = [{"prompt": f"{n} " + "otter " * 50, "completion": "ok"} for n in range(3000)]
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, copy / "rows.parquet", row_group_size=group)
    line = "data lengths build -d rows.parquet -t bytes -o lengths.jsonl"

    done = run(line, copy, {"TMPDIR": str(disk)})

    assert done.code == 0, done.err


def test_a_read_only_disk_is_said(refused, copy, small_disk) -> None:
    disk, limit = small_disk
    if limit is not None:
        pytest.skip("no disk can be mounted here")
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    for line in WRITE:
        assert "Read-only" in refused(line.format("disk/new"), copy)


ROWS_OF_MANY = 2560


@pytest.fixture(scope="module")
def many_rows(tmp_path_factory) -> Path:
    """Ten chunks of rows, which take two processes about a second to measure."""
    draw = random.Random(5)
    words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(2, 9))) for _ in range(999)]
    path = tmp_path_factory.mktemp("many") / "rows.jsonl"
    with path.open("w") as file:
        for _ in range(ROWS_OF_MANY):
            file.write(json.dumps({"text": " ".join(draw.choices(words, k=80))}) + "\n")
    return path


class Build:
    """A build of lengths under way, in a process group of its own like one in a terminal."""

    def __init__(self, rows: Path, out: Path, environ: dict[str, str]) -> None:
        self._tokens = Path(os.environ["BATCHWRIGHT_TOKENS"])
        self._before = self.chunks()
        words = f"data lengths build -d {rows} -t gpt2 -o {out} --workers 2 --format json"
        self.process = subprocess.Popen(
            [COMMAND, *words.split()],
            env={**environ, "BATCHWRIGHT_TOKENS": str(self._tokens)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def chunks(self) -> int:
        journals = self._tokens.glob("*.partial/journal.jsonl")
        return sum(journal.read_bytes().count(b"\n") for journal in journals)

    def workers(self) -> list[int]:
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [child for child in map(int, children) if b"spawn_main" in command_line(child)]

    def wait_until(self, reached: Callable[[], object]) -> None:
        while not reached():
            assert self.process.poll() is None, "it ended too early to be interrupted"
            time.sleep(0.005)

    def wait_for_progress(self) -> None:
        # A new journal begins with a header.
        self.wait_until(lambda: self.chunks() >= self._before + 2)

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=120)
        return self.process.returncode, out, err


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def ticks(pid: int) -> int:
    """The processor time a process has used so far, in hundredths of a second."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


@pytest.fixture
def start(many_rows, tmp_path, environ) -> Iterator[Callable[[], Build]]:
    """Starts builds of one output, and leaves no process behind."""
    builds: list[Build] = []

    def start() -> Build:
        builds.append(Build(many_rows, tmp_path / "lengths.jsonl", environ))
        return builds[-1]

    yield start
    for build in builds:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(build.process.pid, signal.SIGKILL)
        build.process.communicate()


@pytest.mark.slow
def test_a_killed_and_a_stopped_build_go_on_where_they_were(
    start, call, many_rows, tmp_path
) -> None:
    killed = start()
    killed.wait_for_progress()
    os.killpg(killed.process.pid, signal.SIGKILL)
    assert killed.end()[0] == -signal.SIGKILL
    assert not (tmp_path / "lengths.jsonl").exists()

    stopped = start()
    stopped.wait_for_progress()
    stopped.process.send_signal(signal.SIGINT)
    code, out, err = stopped.end()
    assert (code, out) == (130, "")
    assert "Traceback" not in err
    assert not (tmp_path / "lengths.jsonl").exists()

    code, out, err = start().end()
    assert code == 0
    assert re.fullmatch(r"resuming: [\d,]+ rows are tokenised already\n", err)
    report = json.loads(out)
    assert report["reused"] >= 3 * 256
    assert report["reused"] + report["measured"] == report["samples"] == ROWS_OF_MANY
    call(f"data lengths build -d {many_rows} -t gpt2 -o whole.jsonl --workers 1", tmp_path)
    assert (tmp_path / "lengths.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lengths.jsonl", "whole.jsonl"]


def test_workers_do_not_outlive_a_killed_build(start) -> None:
    build = start()
    build.wait_for_progress()
    workers = build.workers()
    assert workers
    build.process.kill()
    build.process.wait()

    for _ in range(1000):
        if not any(b"spawn_main" in command_line(pid) for pid in workers):
            break
        time.sleep(0.01)
    else:
        pytest.fail(f"{len(workers)} processes are left behind")


def test_ctrl_c_while_workers_start_shows_no_traceback(start) -> None:
    build = start()
    # A terminal sends it to all of them. They have begun to import, and have not finished yet.
    build.wait_until(lambda: any(ticks(pid) >= 20 for pid in build.workers()))
    os.killpg(build.process.pid, signal.SIGINT)
    code, out, err = build.end()

    assert (code, out) == (130, "")
    assert "Traceback" not in err


def test_two_builds_of_one_output_do_not_spoil_it(start, call, tmp_path) -> None:
    both = [start(), start()]
    ends = [build.end() for build in both]

    assert [code for code, _, _ in ends] == [0, 0]
    # One tokenises, and the other waits for it.
    assert sorted(json.loads(out)["measured"] for _, out, _ in ends) == [0, ROWS_OF_MANY]
    stats = call("data lengths stats -c lengths.jsonl --format json", tmp_path).data
    assert stats["samples"] == ROWS_OF_MANY
    assert [path.name for path in tmp_path.iterdir()] == ["lengths.jsonl"]


@pytest.mark.parametrize(
    "line",
    [
        "data batchplan build -l lengths.jsonl -e 2.5",
        "data batchplan shard -p plan -w 1.0 -o shards",
        "train sft --model tiny --data x --seed 1.5",
        "calls run -i x -o y --endpoint http://127.0.0.1:9 --model m --rpm 10 --tries 2.5",
    ],
)
def test_a_fraction_where_a_whole_number_is_asked_for_is_not_rounded(call, tmp_path, line) -> None:
    said = one_sentence(call(line, tmp_path), code=2)
    assert "into int" in said


def flags_of_paths() -> list[str]:
    """Every command with each of its flags that takes a path."""
    from cyclopts import App

    from batchwright.cli.app import _types, app

    found = []

    def walk(inner: App, chain: str) -> None:
        if inner.default_command is not None:
            found.extend(
                f"{chain} {argument.names[0]}"
                for argument in inner.assemble_argument_collection()
                if Path in _types(argument.hint) and argument.names[0].startswith("--")
            )
        for name in inner:
            if not name.startswith("-"):
                walk(inner[name], f"{chain} {name}".strip())

    walk(app, "")
    return found


def test_an_empty_path_is_refused_by_the_flag_that_it_was_given_for(call, tmp_path: Path) -> None:
    flags = flags_of_paths()
    said = {flag: call(f"{flag}=", tmp_path) for flag in flags}

    assert {f"{c} --{f}" for c, f in (("train sft", "run-dir"), ("train kge", "run-dir"))} <= {
        *flags
    }
    assert len(flags) > 50
    wrong = {
        flag: outcome.err
        for flag, outcome in said.items()
        if not outcome.code or f"{flag.split()[-1]} is empty" not in outcome.err
    }
    assert wrong == {}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("workers", [0, -3])
def test_workers_that_are_none_are_refused_also_where_nothing_is_left_to_do(
    call, tmp_path: Path, workers: int
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "otter"}\n')
    line = "data lengths build -d rows.jsonl -t bytes -o lengths.jsonl"
    before = call(f"{line} --workers {workers}", tmp_path)
    assert call(line, tmp_path).code == 0
    after = call(f"{line} --workers {workers}", tmp_path)

    assert before.err == after.err == f"error: --workers must be at least 1, got {workers}\n"
    assert before.code == after.code == 1
