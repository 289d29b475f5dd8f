"""verl's real managers, Ray workers, advantages and micro-batches, in an environment of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import verl_venv
from batchwright.integrations import verl as ours
from batchwright.rewards import acompute_score, compute_score

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count"), [("verl_checks.py", 9), ("verl_batching_checks.py", 40)]
)
def test_everything_of_the_checks_holds_inside_verl(tmp_path: Path, name: str, count: int) -> None:
    try:
        python = verl_venv.made()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"verl cannot be installed here: {error.stderr.strip().splitlines()[-1]}")
    checks = ROOT / "tests" / name
    # conftest.py is of the other environment: it imports what this one has not.
    words = ["-q", "--noconftest", "-c", os.devnull, "--rootdir", ROOT]
    words += ["-p", "no:cacheprovider", "-W", "ignore"]
    done = subprocess.run(
        [python, "-m", "pytest", *words, checks],
        cwd=tmp_path,
        env={**os.environ, "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert f"{count} passed" in done.stdout


def test_without_verl_the_module_still_gives_the_functions() -> None:
    assert ours.compute_score is compute_score
    assert ours.acompute_score is acompute_score
