"""What a command says to type next works when it is pasted into a shell."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Shell = Callable[[str], list[str]]


@pytest.fixture
def shell(tmp_path: Path, environ: dict[str, str]) -> Shell:
    """Types a line where the installed command is on the path; gives the hints it prints."""
    rows = [{"text": "word " * (1 + 7 * n % 40)} for n in range(40)]
    for name in ("my rows.jsonl", "others.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    def shell(line: str) -> list[str]:
        done = subprocess.run(
            ["sh", "-c", line],
            cwd=tmp_path,
            env={**environ, "PATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{line}: {done.stdout} {done.stderr}"
        return re.findall(r"(?:next|resume with): (batchwright .*)", done.stdout)

    return shell


def test_from_rows_to_a_verified_plan_by_pasting(shell: Shell, tmp_path: Path) -> None:
    (suggest,) = shell("batchwright data lengths build -d 'my rows.jsonl' -t bytes -o 'my l.jsonl'")
    (build,) = shell(suggest)
    (verify,) = shell(build)
    assert (tmp_path / "batch_plan" / "manifest.json").exists()
    assert shlex.split(verify)[1:4] == ["data", "batchplan", "verify"]
    assert shell(verify) == []


def test_edges_that_leave_long_samples_out_are_pasted_with_the_policy(shell: Shell) -> None:
    shell("batchwright data lengths build -d 'my rows.jsonl' -t bytes -o l.jsonl")
    (build,) = shell("batchwright data batching suggest -c l.jsonl --max-length 100")
    assert "--overflow skip" in build
    shell(build)


def test_the_hint_of_a_mixture_names_all_its_length_caches(shell: Shell) -> None:
    shell("batchwright data lengths build -d 'my rows.jsonl' -t bytes -o a.jsonl")
    shell("batchwright data lengths build -d others.jsonl -t bytes -o b.jsonl")
    (verify,) = shell("batchwright data batchplan build -l a.jsonl -l b.jsonl -o plan")
    assert shell(verify) == []


@pytest.mark.training
@pytest.mark.slow
def test_a_stopped_run_is_resumed_by_pasting(shell: Shell) -> None:
    pytest.importorskip("torch", reason="training needs torch")
    (resume,) = shell(
        "batchwright train sft --model tiny --data 'my rows.jsonl' --token-budget 1024 "
        "--stop-after 1 --run-dir 'my run' --quiet"
    )
    assert shell(f"{resume} --quiet") == []
