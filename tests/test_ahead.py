"""Kernels compiled ahead are used where they fit, and nowhere else; and who needs none has none."""

import ctypes
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

import batchwright
from batchwright.ahead import listed, read, spelled
from batchwright.permutation import below

ROOT = Path(__file__).parents[1]
LISTED = "batchwright.permutation.below (uint64, int64, int64,)\n"
"""One kernel that compiles in a moment."""
BELOW = (
    "import numpy as np; from batchwright.permutation import below; "
    "print(below(np.uint64(7), 3, 100))"
)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package by itself, with one kernel to compile ahead."""
    package = tmp_path / "site" / "batchwright"
    unwanted = shutil.ignore_patterns("__pycache__", "compiled")
    shutil.copytree(Path(batchwright.__file__).parent, package, ignore=unwanted)
    (package / "ahead.txt").write_text(LISTED)
    return package


def python(copy: Path, cache: Path | None, *words: str, **more: object) -> str:
    """What a Python process with this copy of the package prints."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("NUMBA", "XDG", "PYTHON"))}
    env = {**kept, "PYTHONPATH": str(copy.parent), "HOME": str(copy.parent)}
    if cache:
        env["NUMBA_CACHE_DIR"] = str(cache)
    done = subprocess.run(
        [sys.executable, *words],
        cwd=copy.parent,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        **more,  # type: ignore[call-overload]
    )
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


def test_what_is_compiled_ahead_is_used_until_its_source_changes(
    copy: Path, tmp_path: Path
) -> None:
    right = f"{below(np.uint64(7), 3, 100)}\n"
    cache = tmp_path / "cache"
    assert "compiled 1 kernels" in python(copy, None, "-m", "batchwright.ahead")

    assert python(copy, cache, "-c", BELOW) == right
    assert not list(cache.glob("**/*.nbi")), "something was compiled"

    with (copy / "permutation.py").open("a") as source:
        source.write("# another version\n")
    assert python(copy, cache, "-c", BELOW) == right
    assert list(cache.glob("**/*below*.nbi"))


def test_kernels_work_where_nothing_can_be_written(copy: Path) -> None:
    for path in [*copy.parent.rglob("*"), copy.parent]:
        path.chmod(path.stat().st_mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))
    words = "from batchwright.cli.doctor import _kernels; print(_kernels()['state'])"
    try:
        said = python(copy, None, "-c", f"{words}\n{BELOW}", preexec_fn=humbly)
    finally:
        for path in [copy.parent, *copy.parent.rglob("*")]:
            path.chmod(path.stat().st_mode | stat.S_IWUSR)
    assert "cold, each process compiles" in said
    assert 0 <= int(said.splitlines()[-1]) < 100


def test_kernels_are_interpreted_where_numba_may_compile_nothing(
    copy: Path, tmp_path: Path
) -> None:
    words = (
        "import os; os.environ['NUMBA_DISABLE_JIT'] = '1'; from batchwright.cli.doctor import "
        f"_kernels; print(_kernels()['state'])\n{BELOW}"
    )
    said = python(copy, tmp_path / "cache", "-c", words).splitlines()
    assert said[0].startswith("interpreted")
    assert said[1] == str(below(np.uint64(7), 3, 100))
    assert not list(tmp_path.glob("cache/**/*.nbi"))


def test_asking_how_to_compile_ahead_compiles_nothing(copy: Path) -> None:
    assert "usage" in python(copy, None, "-m", "batchwright.ahead", "--help")
    assert not (copy / "compiled").exists()


def test_kernels_of_another_processor_are_not_called_warm(copy: Path, tmp_path: Path) -> None:
    words = (
        "import os; os.environ['NUMBA_CPU_NAME'] = '{}'; from batchwright.cli.doctor import "
        "_kernels, _engine; _engine(); print(_kernels()['state'])"
    )
    for processor in ("generic", "nehalem"):
        said = python(copy, tmp_path / "cache", "-c", words.format(processor))
        assert said.startswith("cold, each is compiled on its first use, into "), said


def humbly() -> None:
    """Let the process, even of root, mind the permissions of files (no CAP_DAC_OVERRIDE)."""
    ctypes.CDLL(None).prctl(24, 1, 0, 0, 0)


def test_every_listed_kernel_is_there_with_types_that_exist() -> None:
    for name, signatures in listed().items():
        module, _, function = name.rpartition(".")
        found = getattr(import_module(module), function)
        count = found.py_func.__code__.co_argcount
        for signature in signatures:
            args = read(signature)
            assert len(args) == count, (name, signature)
            assert spelled(args) == signature


COMMANDS: Mapping[str, Callable[[Path], str]] = {
    "plan": lambda folder: f"data batchplan build -l {lengths(folder)} --layout packed -o plan",
    "proof": lambda folder: "prove uncle(X,joren)",
}


def lengths(folder: Path) -> str:
    from batchwright.data.lengths import LengthCache

    with LengthCache.create(folder / "lengths.jsonl", tokenizer_hash="none") as cache:
        cache.extend([f"row-{n}" for n in range(60_000)], [n % 2000 + 1 for n in range(60_000)])
    return "lengths.jsonl"


@pytest.mark.parametrize("what", COMMANDS)
def test_what_commands_call_is_compiled_ahead(what: str, tmp_path: Path) -> None:
    words = COMMANDS[what](tmp_path).split()
    called = tmp_path / "called.txt"
    recorder = [sys.executable, ROOT / "tools" / "kernels.py", called, *words]
    done = subprocess.run(recorder, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    known = {f"{name} {types}" for name, found in listed().items() for types in found}
    missing = set(called.read_text().splitlines()) - known
    assert not missing, "run tools/kernels.py: ahead.txt lacks these"


CALLS_AND_REWARDS = """
import asyncio, json, sys
from pathlib import Path
from batchwright.calls import Endpoint, Pool, chat
from batchwright.cli.app import main
from batchwright.integrations.trl import RewardFunction
from batchwright.rewards import Response, score_all

with Pool(Endpoint(lambda requests: ["4"] * len(requests)), cache="calls.db") as pool:
    assert len(pool.map(chat("m", str(n), temperature=0) for n in range(3))) == 3
Path("rewards.toml").write_text('[[part]]\\nkind = "exact"\\n')
rows = [{"id": str(i), "response": "4", "ground_truth": "4", "dataset": "d"} for i in range(9)]
Path("responses.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
scores = [{"id": str(i), "score": i / 9, "label": i > 4} for i in range(9)]
Path("scores.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in scores))
assert RewardFunction("rewards.toml")(["q"], ["4"], answer=["4"]) == [1.0]
for line in (
    "calls cache stats calls.db",
    "reward score -i responses.jsonl -c rewards.toml -o scored.jsonl",
    "reward explain 0 -i responses.jsonl -c rewards.toml",
    "reward agree -s scores.jsonl",
):
    sys.argv = ["batchwright", *line.split()]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, line
print("numba" in sys.modules)
"""


def test_calls_and_rewards_do_not_import_numba(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CALLS_AND_REWARDS],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "False"
