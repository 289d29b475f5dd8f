"""`batchwright train sft` and `pack verify` as they are typed."""

import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from batchwright.batching import BatchPlan
from batchwright.events import read_events
from batchwright.train.devices import _has_driver
from batchwright.train.sft.config import SftConfig

torch.set_num_threads(1)

COMMAND = Path(sys.executable).parent / "batchwright"
WORDS = ("the", "quick", "otter", "counts", "tokens", "while", "it", "dives")
ONE_CORE = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def write_rows(path: Path, count: int = 24, seed: int = 0) -> None:
    draw = random.Random(seed)
    with path.open("w") as file:
        for number in range(count):
            prompt = " ".join(draw.choices(WORDS, k=draw.randint(1, 9)))
            row = {"id": f"s{number:02d}", "prompt": prompt, "completion": f" {draw.choice(WORDS)}"}
            file.write(json.dumps(row) + "\n")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_rows(tmp_path / "train.jsonl")
    return tmp_path


def losses(run: Path) -> list[float]:
    """The loss in the last record of each step."""
    found = {
        event.fields["step"]: event.fields["loss"]
        for event in read_events(run / "events.jsonl")
        if event.kind == "step"
    }
    return [found[step] for step in sorted(found)]


def weights(run: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(run / "model" / "model.safetensors")
    return found


def refused(outcome: Any, *words: str) -> str:
    """One sentence on stderr, exit code 1, nothing on stdout."""
    assert outcome.code == 1, outcome
    lines = [line for line in outcome.err.splitlines() if line.startswith("error:")]
    assert len(lines) == 1, outcome.err
    assert "internal error" not in lines[0]
    assert "Traceback" not in outcome.err
    for word in words:
        assert word in lines[0]
    return lines[0]


def test_the_documents_plan_is_followed(folder: Path, call: Callable[..., Any]) -> None:
    write_rows(folder / "train.jsonl", 150)
    assert call("data lengths build -d train.jsonl -t bytes -o lengths.jsonl", folder).code == 0
    plan = "data batchplan build -l lengths.jsonl -e 3 -b 4096 -o batch_plan/"
    assert call(plan, folder).code == 0
    line = "train sft --model tiny --data train.jsonl --batchplan batch_plan/"
    outcome = call(f"{line} --format json", folder)
    first = next(iter(read_events(folder / "runs/sft-1/events.jsonl")))

    assert outcome.code == 0, outcome.err
    assert outcome.data["finished"]
    assert outcome.data["run_dir"] == "runs/sft-1"
    assert outcome.data["step"] == len(losses(folder / "runs/sft-1")) > 3
    assert first.fields["plan"] == BatchPlan.load(folder / "batch_plan").fingerprint


def test_the_documents_buckets_are_used(folder: Path, call: Callable[..., Any]) -> None:
    line = (
        "train sft --model tiny --data train.jsonl --bucket-edges 128,256,512 --token-budget 4096"
    )
    outcome = call(line, folder)

    assert outcome.code == 0, outcome.err
    assert SftConfig.load(folder / "runs/sft-1/config.toml").chosen_layout == "bucketed"
    assert "causal rows" in outcome.out


def test_the_documents_packing_is_used(folder: Path, call: Callable[..., Any]) -> None:
    line = "train sft --model tiny --data train.jsonl --pack --pack-max-len 2048"
    outcome = call(line, folder)

    assert outcome.code == 0, outcome.err
    for word in ("steps", "first loss", "last loss", "useful tokens", "ullage", "segments"):
        assert word in outcome.out
    assert re.search(r"^ullage +\d+(\.\d+)?%$", outcome.out, re.MULTILINE)
    assert "done: runs/sft-1/model" in outcome.out


@pytest.mark.parametrize("mode", ["greedy", "first_fit", "best_fit"])
def test_the_documents_pack_modes_are_used(
    folder: Path, call: Callable[..., Any], mode: str
) -> None:
    line = f"train sft --model tiny --data train.jsonl --pack --pack-max-len 256 --pack-mode {mode}"
    outcome = call(line, folder)

    assert outcome.code == 0, outcome.err
    assert SftConfig.load(folder / "runs/sft-1/config.toml").pack_mode == mode


def test_a_dry_run_predicts_the_steps_and_writes_nothing(
    folder: Path, call: Callable[..., Any], contents: Callable[[Path], Any]
) -> None:
    line = "train sft --model tiny --data train.jsonl --token-budget 256 --epochs 2"
    before = contents(folder)
    outcome = call(f"{line} --dry-run", folder)
    data = call(f"{line} --dry-run --format json", folder).data

    assert outcome.code == 0
    assert "nothing trained" in outcome.out
    assert "memory" in outcome.out
    assert contents(folder) == before
    assert call(f"{line} --format json", folder).data["step"] == data["steps"]


GROUPED = {
    "packed": "--pack --pack-max-len 128 --segment-multiple 16",
    "sorted": "--segment-multiple 8",
    "bucketed": "--bucket-edges 48,120",
}


@pytest.mark.parametrize("layout", GROUPED)
def test_groups_and_costs_of_columns_hold_in_every_batch_and_over_a_resume(
    folder: Path, call: Callable[..., Any], layout: str
) -> None:
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    for number, row in enumerate(rows):
        # Of different sizes, apart in the file, one sample in no group.
        row["answers"] = None if number == 7 else f"p{number % 5}"
        row["images"] = number % 3 * 6
    of = {row["id"]: row for row in rows}
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = (
        "train sft --model tiny --data train.jsonl --group-by answers --ignore-column answers "
        f"--cost-column images --token-budget 768 --epochs 2 --eval-fraction 0.2 {GROUPED[layout]} "
        "--quiet --format json"
    )
    predicted = call(f"{line} --dry-run", folder).data
    whole = call(f"{line} --run-dir whole", folder).data
    call(f"{line} --run-dir parts --stop-after 1", folder)
    rest = call("train sft --resume parts --quiet --format json", folder)
    more = call("train sft --resume parts --epochs 3", folder)

    assert rest.data["finished"], rest
    assert whole["step"] == predicted["steps"] >= 4
    assert whole["useful_tokens"] == predicted["useful_tokens"]
    assert losses(folder / "whole") == losses(folder / "parts")
    refused(more, "--epochs must be at most 2, got 3")
    plan = BatchPlan.load(folder / "whole/plan", check=True)
    shown: set[str] = set()
    for epoch in range(2):
        for world in (1, 2):
            where: dict[str, set[tuple[int, int]]] = {}
            for rank in range(world):
                for batch in plan.shard(rank, world).iter_epoch(epoch):
                    for name, tokens, length in zip(
                        batch.samples, batch.tokens, batch.lengths, strict=True
                    ):
                        row = of[name]
                        assert tokens == len(row["prompt"] + row["completion"]) + 1
                        assert length == tokens + row["images"]
                        if batch.weight:
                            where.setdefault(row["answers"] or name, set()).add((rank, batch.index))
                            shown.add(name)
                    assert batch.padded_tokens <= 768
            assert all(len(places) == 1 for places in where.values())
    held = {
        name
        for batch in BatchPlan.load(folder / "whole/eval_plan").iter_epoch(0)
        for name in batch.samples
    }
    groups = [{of[name]["answers"] or name for name in names} for names in (shown, held)]
    assert held
    assert groups[0].isdisjoint(groups[1])
    assert shown | held == of.keys()


def test_a_mixture_is_counted_by_the_samples_that_it_shows(
    folder: Path, call: Callable[..., Any]
) -> None:
    for name, count in (("many", 60), ("few", 6)):
        rows = (
            {"prompt": "count ", "completion": "otters" * (20 if n % 3 == 0 else n % 2 + 1)}
            for n in range(count)
        )
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = (
        "train sft --model tiny --data many.jsonl=0.5 --data few.jsonl=0.5 --token-budget 64 "
        "--overflow skip --quiet"
    )
    predicted = call(f"{line} --dry-run --format json", folder).data
    done = call(f"{line} --run-dir run --format json", folder).data
    table = call(f"{line} --run-dir again", folder).out
    batches = [*BatchPlan.load(folder / "run/plan", check=True).iter_epoch(0)]
    shown = {name for batch in batches for name in batch.samples}
    (start,) = (e for e in read_events(folder / "run/events.jsonl") if e.kind == "start")
    found = dict(start.fields["counts"])

    assert found == done["counts"] == predicted["counts"]
    # Six of each, as many of them too long as are not in the plan.
    assert (found["samples"], found["planned_pieces"]) == (12, len(shown))
    assert found["skipped_long"] == 12 - len(shown) < 22
    assert found["planned_tokens"] == done["useful_tokens"] == predicted["useful_tokens"]
    assert f"samples too long, left out  {12 - len(shown)}\n" in table
    info = call("data batchplan info -p run/plan --format json", folder).data
    assert (info["counts"]["samples"], info["shown"]) == (66, found)


def test_a_pipe_is_trained_on_as_its_rows_in_a_file(
    folder: Path, run: Callable[..., Any], call: Callable[..., Any]
) -> None:
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    content = "".join(json.dumps({**row, "images": 3}) + "\n" for row in rows)
    (folder / "train.jsonl").write_text(content)
    os.mkfifo(folder / "pipe")
    line = "train sft --model tiny --cost-column images --token-budget 512 --quiet --format json"
    writer = threading.Thread(target=(folder / "pipe").write_text, args=(content,), daemon=True)
    writer.start()
    # In a process of its own: one that reads a pipe twice waits for ever.
    piped = run(f"{line} --data pipe --run-dir piped", folder)
    writer.join()
    assert piped.code == 0, piped.err
    assert call(f"{line} --data train.jsonl --run-dir plain", folder).code == 0
    assert losses(folder / "piped") == losses(folder / "plain")


LINE = (
    "train sft --model tiny --data train.jsonl --pack --pack-max-len 96 --token-budget 96 "
    "--epochs 5 --lr 1e-3 --save-every 3 --quiet"
)


def start(folder: Path, environ: dict[str, str], line: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [COMMAND, *line.split()],
        cwd=folder,
        env={**environ, **ONE_CORE},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def until(process: "subprocess.Popen[str]", run: Path, steps: int) -> None:
    """Wait for a number of records of steps in the log."""
    log = run / "events.jsonl"
    end = time.monotonic() + 1200
    while not (log.exists() and log.read_bytes().count(b'"kind":"step"') >= steps):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.01)


def test_ctrl_c_saves_and_kill_9_loses_little_and_the_end_is_the_same_to_the_bit(
    folder: Path, environ: dict[str, str], call: Callable[..., Any]
) -> None:
    whole, run = folder / "whole", folder / "run"
    assert call(f"{LINE} --run-dir {whole}", folder).code == 0

    process = start(folder, environ, f"{LINE} --run-dir run")
    until(process, run, 4)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=1200)
    assert process.returncode == 0, err
    assert "stopped and saved; resume with: batchwright train sft --resume run" in out
    stopped = len(losses(run))
    assert 4 <= stopped < len(losses(whole))
    newest = max((run / "checkpoints").iterdir())
    assert newest.name == f"step_{stopped:08d}"

    process = start(folder, environ, "train sft --resume run --quiet")
    until(process, run, stopped + 5)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=1200)
    reached = len(losses(run))
    assert stopped + 5 <= reached < len(losses(whole))
    saved = max(int(p.name[5:]) for p in (run / "checkpoints").glob("step_*"))
    assert reached - 3 <= saved <= reached

    outcome = call("train sft --resume run --format json", folder)
    assert outcome.code == 0, outcome.err
    assert outcome.data["finished"]
    resumed = [e.fields["step"] for e in read_events(run / "events.jsonl") if e.kind == "resume"]
    assert resumed == [stopped, saved]
    assert losses(run) == losses(whole)
    one, other = weights(run), weights(whole)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert len(list((run / "checkpoints").iterdir())) == 2


def test_stop_after_is_meant_for_one_call_only(folder: Path, call: Callable[..., Any]) -> None:
    assert "stopped and saved" in call(f"{LINE} --run-dir run --stop-after 2", folder).out
    outcome = call("train sft --resume run --stop-after 3 --format json", folder)
    assert (outcome.data["step"], outcome.data["finished"]) == (5, False)
    outcome = call("train sft --resume run --format json", folder)

    assert outcome.data["finished"]


def test_a_resumed_run_may_change_its_length_and_goes_on(
    folder: Path, call: Callable[..., Any]
) -> None:
    assert call(f"{LINE} --run-dir run --max-steps 2", folder).code == 0
    outcome = call("train sft --resume run --max-steps 4 --format json", folder)

    assert outcome.data["step"] == 4
    assert len(losses(folder / "run")) == 4
    # Also back to the default.
    whole = call("train sft --resume run --max-steps 0 --format json", folder)
    assert whole.data["finished"]
    assert whole.data["step"] > 4


def test_a_run_can_be_moved_and_resumed_there(folder: Path, call: Callable[..., Any]) -> None:
    assert call(f"{LINE} --run-dir run --stop-after 2", folder).code == 0
    (folder / "run").rename(folder / "moved")
    # The data is not needed any more: tokens and plan are in the run.
    (folder / "train.jsonl").unlink()
    outcome = call("train sft --resume moved --format json", folder)

    assert outcome.code == 0, outcome.err
    assert outcome.data["run_dir"] == "moved"
    assert (folder / "moved" / "model" / "config.json").is_file()


def full_disk() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))


@pytest.mark.slow
def test_a_full_disk_at_save_is_one_sentence_and_the_older_checkpoint_is_good(
    folder: Path, run: Callable[..., Any], call: Callable[..., Any]
) -> None:
    assert call(f"{LINE} --run-dir whole", folder).code == 0
    assert call(f"{LINE} --run-dir run --stop-after 4", folder).code == 0
    outcome = run("train sft --resume run --quiet", folder, env=ONE_CORE, preexec_fn=full_disk)

    refused(outcome, "cannot write", "step_00000006", "File too large")
    kept = sorted(p.name for p in (folder / "run" / "checkpoints").iterdir())
    assert kept == ["step_00000003", "step_00000004"]
    assert call("train sft --resume run", folder).code == 0
    assert losses(folder / "run") == losses(folder / "whole")


BAD: dict[str, tuple[str, tuple[str, ...]]] = {
    "no model": ("--data train.jsonl", ("no --model",)),
    "no data": ("--model tiny", ("no --data",)),
    "unknown model": ("--model nobody/nothing --data train.jsonl", ("nobody/nothing",)),
    "missing data": ("--model tiny --data none.jsonl", ("no data at none.jsonl",)),
    "no CUDA": ("--model tiny --data train.jsonl --device cuda", ("no CUDA device",)),
    "flash": ("--model tiny --data train.jsonl --attention flash", ("flash", "CUDA")),
    "flex": ("--model tiny --data train.jsonl --attention flex", ("CPU",)),
    "edges": ("--model tiny --data train.jsonl --bucket-edges 1,b", ("'1,b'",)),
    "missing plan": ("--model tiny --data train.jsonl --batchplan none", ("none",)),
    "too long": (
        "--model tiny --data train.jsonl --token-budget 8",
        ("choose --overflow skip, truncate or split", "raise --token-budget"),
    ),
    "fsdp alone": ("--model tiny --data train.jsonl --fsdp", ("torchrun",)),
    "packed edges": (
        "--model tiny --data train.jsonl --pack --bucket-edges 128",
        ("--bucket-edges is for the bucketed layout, got packed",),
    ),
    "sorted edges": (
        "--model tiny --data train.jsonl --layout sorted --bucket-edges 128",
        ("--bucket-edges is for the bucketed layout, got sorted",),
    ),
    "packed and not": (
        "--model tiny --data train.jsonl --no-pack --layout packed",
        ("--no-pack contradicts --layout packed",),
    ),
    "two sizes of a step": (
        "--model tiny --data train.jsonl --step-size 4 --grad-accum 2",
        ("--step-size 4", "--grad-accum 2", "give one"),
    ),
    "no run": ("--resume nowhere", ("nowhere",)),
    "tracker": ("--model tiny --data train.jsonl --track nobody", ("nobody", "tensorboard")),
    "rate": (
        "--model tiny --data train.jsonl --lr nan",
        ("--lr must be above 0", "got nan"),
    ),
    "rate beyond 32 bits": (
        "--model tiny --data train.jsonl --lr 1e38",
        ("--lr must be", "1e30, got 1e+38"),
    ),
    "planned": (
        # At its default value, which the plan may not have.
        "--model tiny --data train.jsonl --batchplan none --token-budget 4096",
        ("--token-budget is part of the plan",),
    ),
    "no such column": (
        "--model tiny --data train.jsonl --group-by pair",
        ("train.jsonl:1: pair is missing", "or null"),
    ),
    "no costs": (
        "--model tiny --data train.jsonl --cost-column prompt",
        ("train.jsonl:1: prompt is", "an integer of at least 0"),
    ),
    "costs cannot be split": (
        "--model tiny --data train.jsonl --cost-column images --overflow split",
        ("--overflow split cannot divide", "--cost-column"),
    ),
    "groups of a mixture": (
        "--model tiny --data train.jsonl=1 --data train.jsonl=2 --group-by pair",
        ("--group-by cannot keep groups together in a mixture", "shares of --data"),
    ),
    "groups of a plan": (
        "--model tiny --data train.jsonl --batchplan none --group-by pair",
        ("--group-by is part of the plan",),
    ),
    "a share of one": (
        "--model tiny --data train.jsonl=0.7",
        ("a share of train.jsonl alone", "leave out the share"),
    ),
    "evaluations of nothing": (
        "--model tiny --data train.jsonl --eval-every 5",
        ("--eval-every has no effect without --eval-data or --eval-fraction",),
    ),
    "warmer than long": (
        "--model tiny --data train.jsonl --warmup-steps 100 --max-steps 5",
        ("--warmup-steps 100 is more than --max-steps 5",),
    ),
    "negative": ("--model tiny --data train.jsonl --keep 0", ("--keep must be at least 1, got 0",)),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_starts_no_run(
    folder: Path, call: Callable[..., Any], case: str
) -> None:
    arguments, words = BAD[case]
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    refused(call(f"train sft {arguments}", folder), *words)

    assert not (folder / "runs/sft-1/config.toml").exists()


FOLDERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "a file for a folder": (
        "--model tiny --data train.jsonl --run-dir train.jsonl",
        ("cannot write a run to train.jsonl: Not a directory",),
    ),
    "a folder in a file": (
        "--model tiny --data train.jsonl --run-dir train.jsonl/run",
        ("cannot write a run to train.jsonl/run: Not a directory",),
    ),
    "a folder of the system": (
        "--model tiny --data train.jsonl --run-dir /proc/run",
        ("cannot write a run to /proc/run",),
    ),
    "two numbers": (
        "--model tiny --data train.jsonl --run-dir {n}-{n}",
        ("--run-dir {n}-{n} may have {n} once",),
    ),
}
COLUMNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "a response that is ignored": (
        "--model tiny --data train.jsonl --ignore-column completion",
        ("train.jsonl:1: has prompt but no completion", "--ignore-column leaves out completion"),
    ),
    "all that is ignored": (
        "--model tiny --data train.jsonl --ignore-column completion --ignore-column prompt",
        ("train.jsonl:1: has none of the known keys", "leaves out completion, prompt"),
    ),
    "ignored where it is evaluated": (
        "--model tiny --data texts.jsonl --eval-data train.jsonl --ignore-column completion",
        ("train.jsonl:1: has prompt but no completion",),
    ),
    "no id": (
        "--model tiny --data texts.jsonl --ids require",
        ("texts.jsonl:1: ", "has no id"),
    ),
}
LATE: dict[str, tuple[str, tuple[str, ...]]] = {
    "longer than the model takes": (
        "--model tiny --data long.jsonl --token-budget 20000",
        ("the longest sample has 9,001 tokens, the model takes 8,192",),
    ),
    "longer where it is evaluated": (
        "--model tiny --data train.jsonl --eval-data long.jsonl",
        ("the longest sample has 9,001 tokens, the model takes 8,192",),
    ),
    "more epochs than are planned": (
        "--model tiny --data train.jsonl --data texts.jsonl --batchplan mixed --epochs 3",
        ("--epochs must be at most 1, got 3",),
    ),
}


@pytest.fixture
def other_data(folder: Path, call: Callable[..., Any]) -> Path:
    (folder / "texts.jsonl").write_text('{"text": "otters dive"}\n' * 4)
    (folder / "long.jsonl").write_text(json.dumps({"text": "o" * 9000}) + "\n")
    for name in ("train", "texts"):
        line = f"data lengths build -d {name}.jsonl -t bytes -o {name}.lengths.jsonl -q"
        assert call(line, folder).code == 0
    line = (
        "data batchplan build -l train.lengths.jsonl -l texts.lengths.jsonl -o mixed "
        "--weight 1 --weight 0.5"
    )
    made = call(line, folder)
    assert made.code == 0, made.err
    return folder


@pytest.mark.parametrize("case", BAD | FOLDERS | COLUMNS | LATE)
def test_a_dry_run_refuses_what_the_run_refuses_with_the_same_sentence(
    other_data: Path, call: Callable[..., Any], case: str
) -> None:
    line, words = (BAD | FOLDERS | COLUMNS | LATE)[case]
    if "cuda" in line and torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    predicted = refused(call(f"train sft {line} --dry-run", other_data), *words)

    assert not (other_data / "runs").exists()
    assert refused(call(f"train sft {line}", other_data), *words) == predicted


def test_a_dry_run_leaves_no_trace_of_the_folder_it_looked_at(
    folder: Path, call: Callable[..., Any]
) -> None:
    before = sorted(folder.rglob("*"))
    line = "train sft --model tiny --data train.jsonl --max-steps 1 --run-dir deep/er/run --dry-run"

    assert call(line, folder).code == 0
    assert sorted(folder.rglob("*")) == before


NEEDS_TORCH = ("unknown model", "too long")
"""What only the model or the tokens can tell."""


def test_flags_and_data_are_refused_before_torch_is_imported(other_data: Path) -> None:
    folder = other_data
    (folder / "taken").mkdir()
    (folder / "taken" / "config.toml").touch()
    others = {
        "taken": ("--model tiny --data train.jsonl --run-dir taken", ("already holds a run",)),
        "one share": ("--model tiny --data train.jsonl=1 --data a.jsonl", ("1 of 2 --data",)),
        "no share": ("--model tiny --data train.jsonl=nan", ("above 0, got 'nan'",)),
        "twice": ("--model tiny --data train.jsonl=1 --data train.jsonl=2", ("name of its own",)),
        "falling": ("--model tiny --data train.jsonl --bucket-edges 20,10", ("edges",)),
        "row": ("--model tiny --data train.jsonl --pack --token-budget 9", ("--token-budget",)),
    }
    cases = {n: case for n, case in (BAD | FOLDERS | COLUMNS).items() if n not in NEEDS_TORCH}
    if _has_driver():
        # Then only torch can tell.
        cases = {n: case for n, case in cases.items() if n not in ("no CUDA", "flex")}
    cases |= others
    script = """if True:
        import contextlib, io, json, sys
        sys.modules["torch"] = sys.modules["transformers"] = None
        from batchwright.cli.app import main
        said = {}
        for name, words in json.load(sys.stdin).items():
            sys.argv = ["batchwright", "train", "sft", *words.split()]
            with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.suppress(SystemExit):
                main()
            said[name] = err.getvalue()
        print(json.dumps(said))
    """
    lines = json.dumps({name: line for name, (line, _) in cases.items()})
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, cwd=folder)
    said = json.loads(done.stdout)

    wrong = {n: said[n] for n, (_, words) in cases.items() if any(w not in said[n] for w in words)}
    assert wrong == {}


@pytest.mark.parametrize("trainer", ["sft", "kge", "prover", "query-mutator"])
def test_a_folder_that_is_no_run_of_this_trainer_says_what_to_do(
    folder: Path, call: Callable[..., Any], trainer: str
) -> None:
    (folder / "begun").mkdir()
    (folder / "foreign").mkdir()
    (folder / "foreign" / "config.toml").write_text("wings = 2\nfeathers = 90\n")

    begun = call(f"train {trainer} --resume begun", folder)
    foreign = call(f"train {trainer} --resume foreign", folder)

    refused(begun, "no training began there", "original command")
    refused(foreign, "unknown settings feathers, wings", "another trainer")


def test_one_rank_of_fsdp_is_refused_before_a_row_is_tokenised(
    folder: Path, call: Callable[..., Any]
) -> None:
    refused(
        call("train sft --model tiny --data train.jsonl --fsdp --run-dir one", folder), "--fsdp"
    )

    assert not (folder / "one").exists()


def test_wrong_usage_has_another_exit_code(folder: Path, call: Callable[..., Any]) -> None:
    outcome = call("train sft --model tiny --data train.jsonl --layout zigzag", folder)

    assert outcome.code == 2
    assert outcome.err.startswith("error:")


def test_a_plan_for_other_data_is_refused_with_both_fingerprints(
    folder: Path, call: Callable[..., Any]
) -> None:
    write_rows(folder / "other.jsonl", seed=1)
    for name in ("train", "other"):
        call(f"data lengths build -d {name}.jsonl -t bytes -o {name}.lengths.jsonl", folder)
    call("data batchplan build -l other.lengths.jsonl -b 4096 -o plan", folder)
    outcome = call("train sft --model tiny --data train.jsonl --batchplan plan", folder)
    hashes = [
        json.loads((folder / f"{name}.lengths.jsonl").read_text().splitlines()[-1])["dataset_hash"]
        for name in ("train", "other")
    ]

    refused(outcome, *hashes)


def test_a_plan_for_another_tokenizer_is_refused_with_both_fingerprints(
    folder: Path, call: Callable[..., Any]
) -> None:
    call("data lengths build -d train.jsonl -t gpt2 -o lengths.jsonl", folder)
    call("data batchplan build -l lengths.jsonl -b 4096 -o plan", folder)
    outcome = call("train sft --model tiny --data train.jsonl --batchplan plan", folder)
    head = json.loads((folder / "lengths.jsonl").read_text().splitlines()[0])
    sentence = refused(outcome, head["tokenizer_hash"])

    assert len(set(re.findall(r"\b[0-9a-f]{16}\b", sentence))) == 2


def test_a_run_where_one_is_already_is_refused(folder: Path, call: Callable[..., Any]) -> None:
    assert call(f"{LINE} --run-dir run --max-steps 1", folder).code == 0

    refused(call(f"{LINE} --run-dir run", folder), "run already holds a run", "--resume run")


def test_a_loss_that_is_not_a_number_ends_with_one_sentence(
    folder: Path, call: Callable[..., Any]
) -> None:
    line = "train sft --model tiny --data train.jsonl --token-budget 96 --lr 1e30 --quiet"
    sentence = refused(call(line, folder), "the state before it is saved", "samples s")
    *_, stop = read_events(folder / "runs/sft-1/events.jsonl")

    assert stop.fields["why"] == "loss is not finite"
    assert stop.fields["samples"] in sentence
    assert (folder / f"runs/sft-1/checkpoints/step_{stop.fields['step']:08d}").is_dir()


def test_verify_shows_the_proof_and_its_backend(folder: Path, run: Callable[..., Any]) -> None:
    outcome = run("pack verify --model tiny", folder, env=ONE_CORE)

    assert outcome.code == 0, outcome.err
    assert "tiny with segments attention on" in outcome.out
    assert len(re.findall(r"^sample \d +\S+ +0$", outcome.out, re.MULTILINE)) == 5
    assert "no other sample's logits changed" in outcome.out


def test_verify_gives_its_numbers_as_json(folder: Path, call: Callable[..., Any]) -> None:
    line = "pack verify --model tiny --attention sdpa --segments 3 --tokens 40 --format json"
    data = call(line, folder).data

    assert data["backend"] == "sdpa"
    assert sum(data["lengths"]) == 40
    assert data["others"] == [0.0, 0.0, 0.0]
    assert all(moved > 0 for moved in data["own"])
    assert 0 < data["against_alone"] < 1e-5


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ("--attention flash", "CUDA"),
        ("--segments 1", "cannot be tested"),
        ("--tokens 99999", "context of 8192"),
    ],
)
def test_verify_refuses_in_one_sentence(
    folder: Path, call: Callable[..., Any], arguments: str, word: str
) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    refused(call(f"pack verify --model tiny {arguments}", folder), word)
