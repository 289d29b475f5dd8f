"""Every script of benchmarks/ runs, with whatever peers are installed here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
SCRIPTS = sorted(path.stem.removeprefix("bench_") for path in FOLDER.glob("bench_*.py"))
QUICK = ["edges", "hops", "lengths", "mixing", "rows", "seal"]
"""Those of a few seconds; the others run with the slow tests."""


def test_every_script_can_be_imported() -> None:
    """In one process: a name that is gone is found here, whatever the script would measure."""
    code = f"import {', '.join(f'bench_{name}' for name in SCRIPTS)}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(FOLDER)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in SCRIPTS],
)
def test_a_script_runs_and_says_what_it_could_not_measure(name: str, tmp_path: Path) -> None:
    script = FOLDER / f"bench_{name}.py"
    done = subprocess.run(
        [sys.executable, str(script), "--smoke"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{name}: ")
    assert "saved" not in done.stdout.splitlines()[-1]
    # A peer may be absent; what is ours must run.
    assert "not measured: batchwright" not in done.stdout
