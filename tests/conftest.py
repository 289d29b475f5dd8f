"""What the tests of the command share: two ways to run it, and a folder with files to read."""

import contextlib
import fcntl
import io
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# A test is right or wrong on any machine, however busy.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

# Before torch is imported: sums in another number of threads are other sums, and a run in this
# process is compared with one in a process of its own.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Some virtual machines name matrix instructions (AMX) that they do not let a program use, and a
# bfloat16 matrix product of torch then ends the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")
# The hub's client would report each use of TRL from a thread of its own, and no test needs it.
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

# A shell starts what runs in the background with Ctrl-C ignored, and tests send it to programs.
signal.signal(signal.SIGINT, signal.default_int_handler)

COMMAND = Path(sys.executable).parent / "batchwright"
LAUNCHERS = ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS")

DOCUMENT = """
data lengths build -d train.jsonl -t gpt2 -o lengths.jsonl
data lengths stats -c lengths.jsonl
data batchplan build -l lengths.jsonl -e 3 -b 4096 -o batch_plan/
data batchplan info -p batch_plan/
data batchplan verify -p batch_plan/ -l lengths.jsonl
data batchplan shard -p batch_plan/ -w 4 -o shards/
data batching histogram -c lengths.jsonl --bins 20
data batching histogram -c lengths.jsonl --bins 15
data batching analyze -c lengths.jsonl --bucket-edges 128,256,512
data batching suggest -c lengths.jsonl --num-buckets 4 --goal waste
data batch generate -p batch_plan/ -d train.jsonl -t gpt2 -o batches/
"""
"""The data commands of the user's document, with its flags, in its order."""


@dataclass(frozen=True)
class Outcome:
    """How a command ended and what it said."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Outcome]

PROCESSES = {"run", "workshop", "copy", "server", "shell"}
"""Fixtures that start the command or a server; `make quick` leaves out the tests that use them."""

LONG = """
test_accept test_ahead test_attention test_benchmarks test_call_cache test_checkpoint test_cli
test_cli_bad_input
test_cli_calls test_cli_gym test_cli_overwrite test_cli_query_mutator test_gae test_ground test_gym
test_lengths test_limit test_local_models test_mine test_models test_optimal test_planfiles
test_pool test_pool_faults test_ppo test_prover_env test_public_surface test_query_mutation
test_readme test_replay test_replay_files test_report test_simulator test_simulator_witnesses
test_terminal test_hostile_servers test_tokenizers test_tokens test_view
"""
"""Modules that start programs, load large libraries or compile much; not in `make quick` either."""

TRAINING = """
test_cli_kg test_cli_resume test_cli_train test_env_wrappers test_examples
test_gym_arcade test_integration_hf test_integration_openrlhf test_integration_torch
test_integration_trl test_integration_verl test_kge test_neural_prover test_pool_workers
test_prover_memory
test_pykeen test_reasoning test_run_life test_sft test_sft_online test_sft_ranks test_trackers
test_slurm test_train_models test_train_prover test_wn18rr_pipeline
"""
"""Modules of whole training runs, and of other libraries' own classes: `make training`."""

MACHINES = """
object_stores ray_cluster test_ray test_ray_data test_ray_train test_ray_rollouts test_remote
"""
"""Modules that start Ray clusters or object stores: `make machines`, which installs both."""

GUIDES = ("test_docs", "test_install")
"""Modules that `make guides` names."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick", action="store_true", help="leave out what starts programs or takes seconds"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    # Not only deselected: importing torch, transformers and TRL takes longer than many tests.
    marks = config.getoption("markexpr")
    left_out = TRAINING.split() if "not training" in marks else []
    left_out += LONG.split() if config.getoption("--quick") else []
    if "not machines" in marks:
        left_out += MACHINES.split()
    elif "machines" in marks and collection_path.is_file():
        return None if collection_path.stem in MACHINES.split() else True
    return True if collection_path.stem in left_out else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem in TRAINING.split():
            item.add_marker(pytest.mark.training)
        if item.path.stem in MACHINES.split():
            item.add_marker(pytest.mark.machines)
        if item.get_closest_marker("guides") and item.path.stem not in GUIDES:
            raise pytest.UsageError(f"`make guides` does not run {item.nodeid}; name its module")
    if config.getoption("--quick"):
        slow = [item for item in items if PROCESSES & set(getattr(item, "fixturenames", ()))]
        items[:] = [item for item in items if item not in slow]
        config.hook.pytest_deselected(items=slow)


@pytest.fixture(autouse=True)
def own_token_stores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What one test tokenised is not there for another, and never for the user."""
    monkeypatch.setenv("BATCHWRIGHT_TOKENS", str(tmp_path.with_name(f"{tmp_path.name}-tokens")))


@pytest.fixture(autouse=True)
def start_method() -> None:
    """Children start as the system does it: importing torchrl would have all tests spawn them."""
    if multiprocessing.get_start_method(allow_none=True) == "spawn":
        multiprocessing.set_start_method(None, force=True)


@pytest.fixture(scope="session")
def environ(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A user of no ranks and no network, with an empty home that takes temporary files as well."""
    home = tmp_path_factory.mktemp("home")
    (home / "tmp").mkdir()
    given = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    return {
        **given,
        "HOME": str(home),
        "TMPDIR": str(home / "tmp"),
        "BATCHWRIGHT_TOKENS": str(home / "tokens"),
        "HF_HOME": str(home / "hf"),
        "HF_HUB_OFFLINE": "1",
    }


def _own_tokens() -> dict[str, str]:
    """The folder of token stores of the test that runs, if one does."""
    name = "BATCHWRIGHT_TOKENS"
    return {name: os.environ[name]} if name in os.environ else {}


@pytest.fixture(scope="session")
def run(environ: dict[str, str]) -> Run:
    """The installed command as a process of its own, typed as one line in `folder`."""

    def run(line: str, folder: Path, env: Mapping[str, str] | None = None, **more: Any) -> Outcome:
        done = subprocess.run(
            [COMMAND, *line.split()],
            cwd=folder,
            env={**environ, **_own_tokens(), **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            **{"timeout": 300, **more},
        )
        return Outcome(done.returncode, done.stdout.decode(), done.stderr.decode())

    return run


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]) -> Run:
    """The command inside this process, through its entry point: for many cases quickly."""
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def call(line: str, folder: Path) -> Outcome:
        from batchwright.cli.app import main

        out, err = io.StringIO(), io.StringIO()
        monkeypatch.setattr(sys, "argv", ["batchwright", *line.split()])
        with (
            contextlib.chdir(folder),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            warnings.catch_warnings(),
        ):
            # Its words come from sys.argv, as installed; cyclopts takes that for a mistake here.
            warnings.filterwarnings("ignore", "Cyclopts application invoked without tokens")
            try:
                main()
            except SystemExit as end:
                code = end.code or 0
        assert isinstance(code, int)
        return Outcome(code, out.getvalue(), err.getvalue())

    return call


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory, run: Run) -> tuple[Path, dict[str, Outcome]]:
    """A folder where every command of the document was typed, and how each one ended.

    It is made once, even when tests run in several processes. To read only: see `copy`.
    """
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    folder, record = root / "workshop", root / "workshop.json"
    with (root / "workshop.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not record.exists():
            folder.mkdir()
            write_rows(folder / "train.jsonl")
            outcomes = {line: run(line, folder) for line in DOCUMENT.strip().splitlines()}
            record.write_text(json.dumps({k: (o.code, o.out, o.err) for k, o in outcomes.items()}))
    return folder, {k: Outcome(*o) for k, o in json.loads(record.read_text()).items()}


@pytest.fixture
def copy(workshop: tuple[Path, dict[str, Outcome]], tmp_path: Path) -> Path:
    """The files of the workshop, to spoil."""
    return shutil.copytree(workshop[0], tmp_path / "copy")


def write_rows(path: Path) -> None:
    """Sixty rows of four shapes, 10 to 400 tokens long."""
    draw = random.Random(3)
    words = ["the", "quick", "brown", "otters", "count", "tokens", "while", "dogs", "jump"]
    with path.open("w") as file:
        for number in range(60):
            size = min(round(draw.lognormvariate(3.5, 1.0)) + 3, 390)
            text = " ".join(draw.choices(words, k=size))
            shapes: list[dict[str, str]] = [
                {"text": text},
                {"prompt": text, "completion": " yes indeed"},
                {"instruction": text, "output": "so it is"},
                {"question": text, "answer": "fine"},
            ]
            file.write(json.dumps({"id": f"row-{number:02d}", **shapes[number % 4]}) + "\n")


def listing(folder: Path) -> dict[str, bytes | None]:
    """Every file below a folder with its content, every folder with None."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture
def contents() -> Callable[[Path], dict[str, bytes | None]]:
    """What stands in a folder, so that before and after can be compared."""
    return listing
