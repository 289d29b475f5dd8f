"""Every script of benchmarks/ runs, with whatever peers are installed here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
SCRIPTS = sorted(path.stem.removeprefix("bench_") for path in FOLDER.glob("bench_*.py"))
SHORT = [
    *("answers", "balance", "cache", "calls", "edges", "gae", "gym", "hops", "kg", "lengths"),
    *("limit", "mixing", "packing", "plans", "ppo", "probe", "prover_env", "prover_policies"),
    *("query_mutation", "ray", "replay", "resume", "rewards", "rows", "seal", "sft", "startup"),
    *("tokenize", "view"),
]
"""Those of a few seconds; the other loads a model of 93 MB and runs with the slow tests."""
LONG = [name for name in SCRIPTS if name not in SHORT]
RUN = """
import contextlib, os, sys, traceback
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
from batchwright.permutation import permute

names = sys.argv[1:]
scripts = [import_module(f"bench_{name}") for name in names]
for peer in ("torchrl.collectors", "trl", "datasets", "openai"):
    with contextlib.suppress(ImportError):
        import_module(peer)
permute(3, 1000, np.uint64(7))
for name, script in zip(names, scripts):
    child = os.fork()
    if not child:
        code = 1
        sys.argv = [f"bench_{name}.py", "--smoke"]
        try:
            with Path(f"{name}.out").open("w") as out, contextlib.redirect_stdout(out):
                script.main()
            code = 0
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"bench_{name}.py --smoke failed")
"""
"""Each in a child of one process that has loaded torch, numba and the largest peers for all of
them: to load these takes longer than most of what a smoke run does."""


def run(names: list[str], folder: Path, timeout_s: float) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN, *names],
        env={**os.environ, "PYTHONPATH": str(FOLDER)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr
    for name in names:
        said = (folder / f"{name}.out").read_text()
        assert said.startswith(f"{name}: ")
        assert "saved" not in said.splitlines()[-1]
        # A peer may be absent; what is ours must run.
        assert "not measured: batchwright" not in said


@pytest.mark.parametrize("first", [0, 1])
def test_scripts_run_and_say_what_they_could_not_measure(first: int, tmp_path: Path) -> None:
    run(SHORT[first::2], tmp_path, 900)


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_a_long_script_runs_and_says_what_it_could_not_measure(name: str, tmp_path: Path) -> None:
    run([name], tmp_path, 900)


def test_every_script_can_be_imported() -> None:
    """A name that is gone is found here, whatever the script would measure."""
    code = f"import {', '.join(f'bench_{name}' for name in LONG)}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(FOLDER)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_digest_of_link_prediction_covers_sources_that_exist() -> None:
    code = """
from pathlib import Path
import batchwright, kg_runs
package = Path(batchwright.__file__).parent
for way, parts in kg_runs.CODE.items():
    found = [{str(p.relative_to(package)) for p in package.glob(part)} for part in parts]
    assert all(found), way
    gone = set(kg_runs.NOT_CALLED[way]) - set().union(*found)
    assert not gone, gone
assert len({kg_runs.code(way) for way in kg_runs.CODE}) == len(kg_runs.CODE)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(FOLDER), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def run_with_benchmarks(code: str, folder: Path) -> str:
    """What the code prints that writes its results to a folder of its own."""
    begin = """
import argparse, json, sys
from pathlib import Path
import common
common.RESULTS = Path(sys.argv[1])
args = argparse.Namespace(no_save=False, quick=False, smoke=False, only="umls")
"""
    done = subprocess.run(
        [sys.executable, "-c", begin + code, str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(FOLDER), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_saved_result_is_not_replaced_by_one_that_a_missing_peer_leaves_short(
    tmp_path: Path,
) -> None:
    said = run_with_benchmarks(
        """
def run(missing, *tables):
    report = common.Report("some", args)
    for title in tables:
        report.table(title, ["", "value"], [["ours", missing]])
    if missing:
        report.not_measured("peer", "not installed")
    report.close()
    found = json.loads((common.RESULTS / "some.json").read_bytes())
    return [(one["title"], one["rows"][0][1]) for one in found["tables"]]

assert run(0, "a", "b") == [("a", 0), ("b", 0)]
assert run(1, "a") == [("a", 0), ("b", 0)]
assert run(2, "a", "b") == [("a", 2), ("b", 2)]
assert run(0, "a") == [("a", 0)]
""",
        tmp_path,
    )
    assert said.count("not saved: some.json has what was not measured here: b") == 1


def test_graphs_that_were_not_run_stay_beside_the_one_that_was(tmp_path: Path) -> None:
    run_with_benchmarks(
        """
import bench_kg
bench_kg.RESULTS = common.RESULTS

def run(names, value):
    report = common.Report("kg", args)
    for name in names:
        report.table(f"{name}, 3 seeds", ["", "MRR"], [["rules", value]])
        report.target(f"{name}: MRR of rules", value, least=0.5)
    bench_kg.beside_earlier(report, {name: {"date": str(value)} for name in names})
    report.close()
    found = json.loads((common.RESULTS / "kg.json").read_bytes())
    rows = [(one["title"], one["rows"][0][1]) for one in found["tables"]]
    targets = [(one["what"], one["value"]) for one in found["targets"]]
    return rows, targets, {k: v["date"] for k, v in found["machine"]["graphs"].items()}

run(["umls", "family", "kinship"], 1)
rows, targets, dates = run(["family"], 2)
assert rows == [("umls, 3 seeds", 1), ("family, 3 seeds", 2), ("kinship, 3 seeds", 1)]
values = {"umls": 1, "family": 2, "kinship": 1}
assert targets == [(f"{name}: MRR of rules", value) for name, value in values.items()]
assert dates == {"umls": "1", "kinship": "1", "family": "2"}
""",
        tmp_path,
    )
