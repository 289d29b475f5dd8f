"""Processor time of the installed command: help of every group, and commands that only read.

Each line is a process of its own, run several times after one run that is not counted (it fills
the page cache and the cache of compiled code). User and system time of the process and its
children are added; the least of all runs counts, because on a shared machine noise only adds.
They read the 413 samples of the demo, and plans of 50,000 samples. `import cyclopts`, the library
under the command, stands in the first table: what of `--help` is not ours.

The last table is that of a first use, with an empty cache of compiled code and the kernels that
were compiled at installation (`python -m batchwright.ahead`), and of a second one. The wait for
the compiler is the first less the second. A few are also used without what was compiled, which
takes the compiler half a minute for some.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import numpy as np
from llvmlite.binding import get_host_cpu_name

from batchwright.ahead import why_not
from batchwright.calls.cache.store import Cache
from batchwright.data.lengths import LengthCache
from batchwright.rng import stream
from common import Report, arguments

COMMAND = Path(sys.executable).parent / "batchwright"
HELP_S, READ_S = 0.3, 0.6
LARGE = 50_000

HELPS = (
    *("", "data", "data lengths", "data batchplan", "data batching", "data batch", "data kg"),
    *("calls", "calls run", "calls cache", "reward", "models", "pack"),
    *("train", "train sft", "train kge", "train prover", "train query-mutator", "evaluate"),
)
SETUP = (
    "data lengths build -d rows.jsonl -t bytes -o small.jsonl --quiet",
    "data batchplan build -l {0}.jsonl -e 3 --overflow truncate -o {0}_bucketed",
    "data batchplan build -l {0}.jsonl -e 3 --overflow truncate --layout sorted -o {0}_sorted",
    "data batchplan build -l {0}.jsonl -e 3 --overflow truncate --layout packed -o {0}_packed",
)
READS = (
    "data lengths stats -c {0}.jsonl",
    "data batching histogram -c {0}.jsonl",
    "data batching analyze -c {0}.jsonl",
    "data batching suggest -c {0}.jsonl",
    "data batchplan info -p {0}_bucketed",
    "data batchplan info -p {0}_sorted",
    "data batchplan info -p {0}_packed",
    "data batchplan info -p {0}_packed -n 4 -r 0 -w 4",
    "data batchplan draw -p {0}_packed",
    "data batchplan explain {1} -p {0}_bucketed",
    "data batchplan explain {1} -p {0}_packed",
)
OTHERS = (
    "--version",
    "data batchplan verify -p small_bucketed -l small.jsonl",
    "data batchplan verify -p small_packed -l small.jsonl",
    "data batchplan diff small_bucketed small_packed",
    "data kg info family",
    "data kg check family",
    "calls cache stats calls.db",
    "models list",
    "reward explain 0 -i responses.jsonl -c rewards.toml",
    "reward agree -s scores.jsonl",
)
FIRST_S = 2.0
FIRSTS = (
    "data batchplan build -l small.jsonl -e 3 --overflow truncate --layout packed -o {out}",
    "data batchplan build -l large.jsonl -e 3 --overflow truncate --layout sorted -o {out}",
    "data batchplan build -l large.jsonl -e 3 --overflow truncate --layout packed -o {out}",
    "data batchplan build -l large.jsonl -e 3 --overflow truncate --layout bucketed -o {out}",
    "data batchplan verify -p large_packed -l large.jsonl",
    "doctor",
    "prove uncle(X,joren)",
    "prove uncle(X,joren) --mine",
    "evaluate prover --data family --limit 20 --quiet",
    "train kge --data family --epochs 1 --rank 8 --run-dir {out} --quiet",
    "train prover --data family --policy rules --passes 1 --run-dir {out} --quiet",
    "train prover --data family --policy neural --n-envs 64 --ppo-steps 4096 --run-dir {out} -q",
    "train sft --model tiny --data rows.jsonl --overflow truncate --max-steps 1 --run-dir {out} -q",
    "demo --out {out}",
    "first.py",
)
COMPILED = (FIRSTS[2], FIRSTS[6], FIRSTS[11])
"""Those that are also used with nothing compiled."""
FIRST_ENV = """
from pathlib import Path

from batchwright.envs import BatchedVecEnv
from batchwright.logic import load_graph, parse_rules

graph = load_graph("family")
rules = parse_rules(Path("family/rules.txt"), graph.vocab)
BatchedVecEnv(graph.facts, rules, graph.train, 16, ask="tail", depth=4).rollout(4)
"""
"""The first prover environment of a program."""
DRY_RUN = "train sft --model tiny --data rows.jsonl --overflow truncate --max-steps 1 --dry-run"
COMPUTES = (
    DRY_RUN,
    "data batchplan build -l small.jsonl --overflow truncate --dry-run",
    "data batchplan verify -p large_packed -l large.jsonl",
    "data batchplan diff large_bucketed large_packed",
    "doctor",
)
"""Not only reading: these build plans, draw every batch, predict a run or time the kernels."""


def processor_s(words: Sequence[str | Path], folder: Path, runs: int) -> float:
    """The least user and system seconds of one command over `runs` runs, after one to warm up."""
    spent = []
    for _ in range(runs + 1):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(words, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(spent[1:])


def first_s(line: str, folder: Path, cache: Path, ahead: bool) -> float:
    """User and system seconds of one run with the compiled code in `cache`, and that alone."""
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    words = line.format(out=out).split()
    start = [sys.executable] if words[0].endswith(".py") else [COMMAND]
    # Where a processor is named, nothing that was compiled ahead is used.
    named = {} if ahead else {"NUMBA_CPU_NAME": get_host_cpu_name()}
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache), **named}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [*start, *words], cwd=folder, check=True, stdout=subprocess.DEVNULL, env=environment
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def first_uses(report: Report, folder: Path, lines: Sequence[str]) -> None:
    """Every command that has kernels, on a fresh install."""
    reason = why_not()
    if reason:
        report.not_measured("kernels compiled ahead", f"{reason}; run python -m batchwright.ahead")
    rows: list[list[str | float | None]] = []
    for line in lines:
        cold, fresh = folder / "cold", folder / "fresh"
        for cache in (cold, fresh):
            shutil.rmtree(cache, ignore_errors=True)
        ahead = None if reason else first_s(line, folder, fresh, ahead=True)
        again = min(first_s(line, folder, fresh, ahead=not reason) for _ in range(2))
        first = first_s(line, folder, cold, ahead=False) if line in COMPILED else None
        waits = None if ahead is None else max(0.0, ahead - again)
        name = line.replace("-o {out}", "").replace("--run-dir {out}", "").replace("{out}", "demo")
        rows.append([name, ahead, again, waits, first])
    columns = ("", "first use", "second", "waits", "first, nothing compiled ahead")
    report.table("first use with an empty cache, processor s", columns, rows)
    waited = [row[3] for row in rows if isinstance(row[3], float)]
    report.target("longest wait for a compiler, s", max(waited, default=None), most=FIRST_S)


def prepare(folder: Path, sizes: Sequence[str]) -> None:
    """The files that the commands read."""
    shipped = files("batchwright.shipped")
    (folder / "rows.jsonl").write_bytes(shipped.joinpath("demo.jsonl").read_bytes())
    (folder / "family").mkdir()
    for name in ("train.txt", "valid.txt", "test.txt", "rules.txt"):
        (folder / "family" / name).write_bytes(shipped.joinpath("family", name).read_bytes())
    lengths = np.clip(stream(42, "bench/startup").lognormal(5.5, 0.9, LARGE), 1, 2048).astype(int)
    with LengthCache.create(folder / "large.jsonl", tokenizer_hash="none") as cache:
        cache.extend([f"row-{number:06d}" for number in range(LARGE)], lengths.tolist())
    for size in sizes:
        for line in SETUP[0 if size == "small" else 1 :]:
            words = line.format(size).split()
            subprocess.run([COMMAND, *words], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    rows = [{"id": str(i), "response": "4", "ground_truth": "4", "dataset": "d"} for i in range(9)]
    (folder / "responses.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    scores = [{"id": str(i), "score": i / 9, "label": i > 4} for i in range(9)]
    (folder / "scores.jsonl").write_text("".join(json.dumps(row) + "\n" for row in scores))
    (folder / "rewards.toml").write_text('[[part]]\nkind = "exact"\n')
    Cache(folder / "calls.db").close()


def main() -> None:
    args = arguments(__doc__.splitlines()[0]).parse_args()
    report = Report("startup", args)
    runs = 1 if args.smoke else 2 if args.quick else 5
    # One of each group is enough to see that they run.
    some = slice(None, 1 if args.smoke else None)
    sizes = ("small",) if args.quick else ("small", "large")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        folder = Path(name)
        prepare(folder, sizes)
        helps = [f"{words} --help".strip() for words in HELPS[some]]
        groups: list[tuple[str, list[str], float | None]] = [("help", helps, HELP_S)]
        for size, sample in (("small", "demo-0007"), ("large", "row-000007")):
            if size in sizes:
                count = "413" if size == "small" else f"{LARGE:,}"
                lines = [line.format(size, sample) for line in READS[some]]
                groups.append((f"reading {count} samples", lines, READ_S))
        groups.append(("reading other files", list(OTHERS[some]), READ_S))
        if not args.quick:
            groups.append(("computing", list(COMPUTES), None))
        (folder / "first.py").write_text(FIRST_ENV)
        library = processor_s([sys.executable, "-c", "import cyclopts"], folder, runs)
        for title, lines, goal in groups:
            spent = {line: processor_s([COMMAND, *line.split()], folder, runs) for line in lines}
            columns = ("batchwright ...", "processor s", "goal")
            rows = [[line, s, goal] for line, s in spent.items()]
            if title == "help":
                rows.append(["(import cyclopts)", library, None])
            report.table(title, columns, rows)
            if goal is not None:
                report.target(f"{title}: the slowest, processor s", max(spent.values()), most=goal)
        if args.smoke or not args.quick:
            first_uses(report, folder, FIRSTS[some])
    report.close()


if __name__ == "__main__":
    main()
