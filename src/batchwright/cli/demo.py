"""`batchwright demo`: the whole pipeline on a small text data set, command by command."""

import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from batchwright.cli.output import Force, say

__all__ = ["demo"]

_BUDGET = 8192
_WIDTH = 8192
NO_PICTURES = "Pictures need matplotlib: pip install 'batchwright[plot]'"


def demo(
    *,
    out: Annotated[Path, Parameter(name=["--out", "-o"], help="Folder for what it makes.")] = Path(
        "demo"
    ),
    force: Force = False,
) -> None:
    """Go from rows to verified, sharded batch plans, showing every command on the way."""
    from importlib.resources import files

    from batchwright.files import check_output, write_atomic

    draws = find_spec("matplotlib") is not None

    def png(name: str) -> str:
        return f"--png {out}/{name}" if draws else ""

    data = out / "demo.jsonl"
    shipped = files("batchwright.shipped").joinpath("demo.jsonl").read_bytes()
    check_output(data, re.compile(re.escape(shipped[:200])), force=force)
    write_atomic(data, shipped)
    lengths = out / "lengths.jsonl"
    say(f"Everything below is written to {out}/; each line after $ is a command you can type.")
    _run(
        "Measure every row once, with the built-in byte tokenizer.",
        f"data lengths build -d {data} -t bytes -o {lengths} --quiet",
    )
    _run(
        "How long are the samples?",
        f"data batching histogram -c {lengths} --bins 16 --width 40 {png('lengths.png')}",
    )
    _run(
        "Which bucket edges waste least? The optimum, by dynamic programming.",
        f"data batching suggest -c {lengths} -n 5 --current 128,256,512,1024,2048",
    )
    edges = _suggested(lengths)
    for layout, words in (
        ("bucketed", f"--bucket-edges {edges}"),
        ("sorted", ""),
        ("packed", f"--pack-max-len {_WIDTH}"),
    ):
        shared = f"-l {lengths} -e 3 -b {_BUDGET} --overflow-max {_BUDGET}"
        _run(
            f"A plan of three epochs, {layout}; the table compares all layouts.",
            f"data batchplan build {shared} --layout {layout} {words} -o {out}/{layout}/",
        )
    plan = out / "packed"
    _run(
        "The packed rows: one line per row, one shade per sample, dots are padding.",
        f"data batchplan draw -p {plan} --rows 12 {png('packing.png')}",
    )
    _run(
        "Is the plan intact, and does it follow from these lengths?",
        f"data batchplan verify -p {plan} -l {lengths}",
    )
    _run(
        "The same plan over four ranks: equal counts by construction.",
        f"data batchplan shard -p {plan} -w 4 -o {out}/shards/",
    )
    _run("The first batches of rank 0.", f"data batchplan info -p {out}/shards/rank_0 -n 4")
    _run("Where is one sample, in every epoch?", f"data batchplan explain demo-0007 -p {plan}")
    _train(out, data)
    pictures = f"Pictures: {out}/packing.png, {out}/lengths.png"
    say(
        f"\n{pictures if draws else NO_PICTURES}\n"
        f"\nNext, with your own data:\n"
        f"  batchwright data lengths build -d train.jsonl -t gpt2 -o lengths.jsonl\n"
        f"  batchwright data batchplan build -l lengths.jsonl --layout packed --dry-run\n"
        f"  batchwright data batchplan build -l lengths.jsonl --layout packed -o batch_plan/\n"
        f"  batchwright train sft --model MODEL --data train.jsonl --batchplan batch_plan/"
    )


def _train(out: Path, data: Path) -> None:
    """Train a small random model for a few steps, on padded batches and on packed ones."""
    import shutil

    if not (find_spec("torch") and find_spec("transformers")):
        say("\nTraining needs torch: pip install 'batchwright[train]'")
        return
    limits = "--token-budget 2048 --overflow truncate --lr 3e-3 --warmup-steps 2 --max-steps 12"
    for name, words in (
        ("padded", "--bucket-edges 128,256,512,1024"),
        ("packed", "--pack --pack-max-len 2048"),
    ):
        run = out / f"run_{name}"
        if (run / "config.toml").is_file():
            shutil.rmtree(run)
        _run(
            f"Train a small random model on {name} batches; ullage is the share of padding.",
            f"train sft --model tiny --data {data} {words} {limits} --run-dir {run} --quiet",
        )


def _run(why: str, words: str) -> None:
    from batchwright.cli.app import app

    words = " ".join(words.split())
    say(f"\n{why}\n$ batchwright {words}")
    app(shlex.split(words), exit_on_error=False)


def _suggested(lengths: Path) -> str:
    """The edges that `suggest` finds, as the flag takes them."""
    from batchwright.batching.analyze.report import suggest_bucket_edges
    from batchwright.cli.flags import load_lengths

    found = suggest_bucket_edges(load_lengths(lengths), num_buckets=5)
    return ",".join(map(str, found.edges))
