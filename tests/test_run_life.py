"""The life of a run: started, stopped, killed, signalled, resumed with other flags, finished."""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))

from batchwright.batching import BatchPlan
from batchwright.checkpoint import latest
from batchwright.errors import BadFile, BatchwrightError, ConfigError, Mismatch, MissingFile
from batchwright.events import read_events
from batchwright.logic.kge import load_kge
from batchwright.logic.loaders import shipped_graph
from batchwright.models.transformers import load_model
from batchwright.sealed import write_sealed_json
from batchwright.train.kge.config import KgeConfig
from batchwright.train.kge.loop import train_kge
from batchwright.train.prover.config import ProverConfig
from batchwright.train.query_mutator.config import QueryMutatorConfig
from batchwright.train.run import Run, RunConfig
from batchwright.train.sft.config import SftConfig
from batchwright.train.sft.loop import SftResult, train_sft
from rank_pool import RankPool, Reply, rank_pool

torch.set_num_threads(1)

COMMAND = Path(sys.executable).parent / "batchwright"
PER_EPOCH = 3
MOST = 3 * PER_EPOCH


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)


def new(folder: Path, rows: int = 3, **more: Any) -> SftConfig:
    """A run of one row a microbatch, whose losses do not depend on how long the run is.

    They do on the rows: a step over other ones has another loss.
    """
    data = folder / "rows.jsonl"
    if not data.exists():
        words = ("otter", "tiger", "camel", "hyena", "koala", "lemur", "mouse", "sheep")
        made = (
            {"id": f"r{n}", "prompt": "count", "completion": f" {words[n]}" * 6}
            for n in range(rows)
        )
        data.write_text("".join(json.dumps(row) + "\n" for row in made))
    fixed: dict[str, Any] = {"schedule": "constant", "token_budget": 48, "lr": 1e-3}
    return SftConfig(
        **{"model": "tiny", "data": str(data), "run_dir": folder / "run", **fixed, **more}
    )


def losses(run: Path) -> dict[int, float]:
    events = read_events(run / "events.jsonl")
    return {e.fields["step"]: e.fields["loss"] for e in events if e.kind == "step"}


def shown(run: Path, steps: int) -> list[Counter[str]]:
    """How often the first steps showed each sample, epoch by epoch, by the log and the plan."""
    plan = BatchPlan.load(run / "plan")
    planned = {(s.epoch, s.first): s for s in plan.iter_steps(epochs=MOST)}
    # Of a step that was made again, after a kill, the last record is what was kept.
    done = {
        event.fields["step"]: planned[event.fields["epoch"], event.fields["first"]]
        for event in read_events(run / "events.jsonl")
        if event.kind == "step"
    }
    found: list[Counter[str]] = [Counter() for _ in range(-(-steps // PER_EPOCH))]
    for step in range(1, steps + 1):
        for batch in done[step].microbatches:
            found[done[step].epoch].update(batch.samples)
    return found


def newest(run: Path) -> int:
    return max((int(p.name[5:]) for p in (run / "checkpoints").glob("step_*")), default=0)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a run but its log, which records also what was refused."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(p.relative_to(folder)): p.read_bytes() for p in files if p.name != "events.jsonl"}


def at_step(step: int, do: Callable[[], object]) -> Callable[[int, int, float], None]:
    """A progress callback that does something when a step is done."""

    def progress(done: int, total: int, loss: float) -> None:
        if done == step:
            do()

    return progress


def send(which: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), which)


class Killed(BaseException):
    """Ends a run as kill -9 does: nothing is saved."""


def kill() -> None:
    raise Killed


class RunLife(RuleBasedStateMachine):
    """A run against what is expected of it: how far it is, how long it is to be, what it left."""

    fixed: ClassVar[dict[str, Any]] = {}
    whole: dict[int, float] | None = None
    """The loss of every step of a run that nothing stopped."""
    tolerance = 0.0
    """Of losses: none, to the bit, however often a run was stopped."""

    @initialize(
        epochs=st.integers(1, 3), most=st.sampled_from([0, 0, 2, 5]), save=st.integers(0, 2)
    )
    def begin(self, epochs: int, most: int, save: int) -> None:
        self.folder = Path(tempfile.mkdtemp())
        given = new(self.folder, **self.fixed)
        kind = type(self)
        if kind.whole is None:
            kind.whole = losses(train_sft(dataclasses.replace(given, epochs=3)).run_dir)
            assert len(kind.whole) == MOST
            shutil.rmtree(self.folder / "run")
        self.run = self.folder / "run"
        self.saved = dataclasses.replace(given, epochs=epochs, max_steps=most, save_every=save)
        self.step = 0
        self.finished_at: int | None = None
        self.model: dict[str, bytes] = {}
        self.trained(self.saved, 1, resume=False)

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)

    def total(self, config: SftConfig) -> int:
        whole = config.epochs * PER_EPOCH
        return min(whole, config.max_steps) if config.max_steps else whole

    def call(
        self,
        config: SftConfig,
        resume: bool = True,
        at: int = -1,
        which: signal.Signals | None = None,
    ) -> SftResult | Reply:
        """Train; at a step, the run gets a signal."""
        do = kill if which == signal.SIGKILL else send(which) if which else None
        return train_sft(config, resume=resume, progress=at_step(at, do) if do else None)

    def trained(
        self, config: SftConfig, stop_after: int, resume: bool = True, **more: Any
    ) -> SftResult | Reply | None:
        """Train, and compare with what is expected, unless it is refused as it should be."""
        total = self.total(config)
        config = dataclasses.replace(config, stop_after=stop_after)
        if total < self.step:
            before = contents(self.run)
            with pytest.raises(ConfigError, match=r"--(max-steps|epochs) must be at least"):
                self.call(config, resume, **more)
            assert contents(self.run) == before
            return None
        self.saved = dataclasses.replace(config, stop_after=0)
        begun = self.step
        result = self.call(config, resume, **more)
        self.step = result.step
        assert result.finished == (self.step == total)
        assert newest(self.run) == self.step
        if not more:
            assert self.step == (min(total, begun + stop_after) if stop_after else total)
        if result.finished and self.finished_at != self.step:
            self.finished_at = self.step
            self.model = contents(self.run / "model")
        return result

    @rule(
        epochs=st.none() | st.integers(1, 3),
        most=st.none() | st.integers(0, MOST),
        save=st.none() | st.integers(0, 2),
        stop_after=st.integers(0, 3),
    )
    def resume(
        self, epochs: int | None, most: int | None, save: int | None, stop_after: int
    ) -> None:
        given = {"epochs": epochs, "max_steps": most, "save_every": save}
        changed = {name: value for name, value in given.items() if value is not None}
        self.trained(dataclasses.replace(self.saved, **changed), stop_after)

    @rule(
        which=st.sampled_from([signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]),
        after=st.integers(1, 3),
    )
    def signalled(self, which: signal.Signals, after: int) -> None:
        begun, total = self.step, self.total(self.saved)
        # Sent when a step is done, it is heard in the next one.
        result = self.trained(self.saved, 0, at=begun + after, which=which)
        assert result is not None
        assert result.step == min(total, begun + after + 1)
        name = "Ctrl-C" if which == signal.SIGINT else which.name
        assert result.stopped_by == (None if result.finished else name)

    @rule(after=st.integers(1, 3))
    def killed(self, after: int) -> None:
        at = self.step + after
        if at > self.total(self.saved):
            return
        with pytest.raises(Killed):
            self.call(self.saved, at=at, which=signal.SIGKILL)
        saved = range(self.step + 1, at)
        every = self.saved.save_every
        self.step = max((n for n in saved if every and n % every == 0), default=self.step)

    @rule()
    def started_again(self) -> None:
        before = contents(self.run)
        with pytest.raises(ConfigError, match="already holds a run"):
            self.call(self.saved, resume=False)
        assert contents(self.run) == before

    @invariant()
    def it_is_what_was_asked_for(self) -> None:
        if not hasattr(self, "run"):
            return
        assert SftConfig.of_run(self.run) == self.saved, "what changed is written back"
        assert newest(self.run) == self.step
        whole = type(self).whole
        assert whole is not None
        for step, loss in losses(self.run).items():
            assert abs(loss - whole[step]) <= self.tolerance
        lines = (self.folder / "rows.jsonl").read_text().splitlines()
        rows = {json.loads(line)["id"] for line in lines}
        epochs = shown(self.run, self.step)
        assert all(number == 1 for epoch in epochs for number in epoch.values()), epochs
        assert all(epoch.keys() == rows for epoch in epochs[: self.step // PER_EPOCH]), epochs
        if self.finished_at is None:
            assert not (self.run / "model").exists()
            assert not (self.run / "finished.json").exists()
        else:
            assert json.loads((self.run / "finished.json").read_text())["step"] == self.finished_at
            assert contents(self.run / "model") == self.model, "a finished model stays"


quiet = settings(
    deadline=None, max_examples=4, stateful_step_count=5, suppress_health_check=list(HealthCheck)
)
TestRunLife = RunLife.TestCase
TestRunLife.settings = quiet


class LongRunLife(RunLife):
    """The same, for longer."""


TestLongRunLife = LongRunLife.TestCase
TestLongRunLife.settings = settings(quiet, max_examples=60, stateful_step_count=12)
TestLongRunLife.pytestmark = [pytest.mark.slow]


class RanksLife(RunLife):
    """The same on one, two or three ranks, as many as each call likes."""

    fixed: ClassVar[dict[str, Any]] = {"rows": 8, "step_size": 3}
    whole = None
    tolerance = 1e-5
    hard = False
    """Whether the first rank is killed for good, or ends as if it were."""
    pool: ClassVar[RankPool]
    world = 1

    @initialize(
        epochs=st.integers(1, 3),
        most=st.sampled_from([0, 0, 2, 5]),
        save=st.integers(0, 2),
        world=st.integers(1, 3),
    )
    def begin(self, epochs: int, most: int, save: int, world: int = 1) -> None:
        self.world = world
        super().begin(epochs, most, save)

    @rule(world=st.integers(1, 3))
    def go_on_with(self, world: int) -> None:
        self.world = world

    def call(
        self,
        config: SftConfig,
        resume: bool = True,
        at: int = -1,
        which: signal.Signals | None = None,
    ) -> SftResult | Reply:
        if self.world == 1:
            return super().call(config, resume, at, which)
        killed = which == signal.SIGKILL
        replies = self.pool.train(
            self.world,
            config,
            resume=resume,
            at=at,
            which="raise" if killed and not self.hard else int(which or 0),
            # A signal may reach any rank; the first one writes, so it is the one to kill, and
            # after the last step it is the only one that is sure to be still there.
            target=0 if killed or at >= self.total(config) else self.world - 1,
        )
        first = replies[0]
        if killed and at >= 0 and (first.error == "Killed" or first == Reply()):
            raise Killed
        if first.error == "ConfigError":
            assert {reply.message for reply in replies} == {first.message}
            raise ConfigError(first.message)
        assert not first.error, first
        assert all(
            (r.step, r.finished, r.stopped_by) == (first.step, first.finished, first.stopped_by)
            for r in replies
        ), replies
        return first


@pytest.mark.parametrize(
    ("hard", "examples", "steps"),
    [(False, 2, 5), pytest.param(True, 25, 10, marks=pytest.mark.slow)],
)
def test_a_run_lives_on_whatever_number_of_ranks(
    tmp_path: Path, hard: bool, examples: int, steps: int
) -> None:
    with rank_pool(tmp_path) as RanksLife.pool:
        RanksLife.hard = hard
        run_state_machine_as_test(
            RanksLife,
            settings=settings(quiet, max_examples=examples, stateful_step_count=steps),
        )


def test_a_finished_run_is_left_as_it_is(tmp_path: Path) -> None:
    train_sft(new(tmp_path))
    before = contents(tmp_path / "run")
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "run/model").iterdir()}
    again = train_sft(new(tmp_path), resume=True)

    assert (again.finished, again.step, again.first_loss) == (True, PER_EPOCH, None)
    assert contents(tmp_path / "run") == before
    assert {path: path.stat().st_mtime_ns for path in times} == times
    # What was removed is written again.
    shutil.rmtree(tmp_path / "run" / "model")
    train_sft(new(tmp_path), resume=True)
    assert contents(tmp_path / "run") == before


def test_a_run_killed_between_its_last_checkpoint_and_its_model_is_finished_by_resuming(
    tmp_path: Path,
) -> None:
    config = new(tmp_path, epochs=2)
    train_sft(dataclasses.replace(config, max_steps=2))
    short = load_file(tmp_path / "run/model/model.safetensors")
    train_sft(dataclasses.replace(config, max_steps=4), resume=True)
    write_sealed_json(tmp_path / "run/finished.json", {"step": 2})
    long = load_file(tmp_path / "run/model/model.safetensors")
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    # As if the model of the shorter run still stood there.
    from safetensors.torch import save_file

    save_file(short, tmp_path / "run/model/model.safetensors", {"format": "pt"})
    result = train_sft(dataclasses.replace(config, max_steps=4), resume=True)
    found = load_file(tmp_path / "run/model/model.safetensors")

    assert (result.finished, result.step) == (True, 4)
    assert all(torch.equal(found[name], long[name]) for name in long)


def test_a_setting_changed_on_resume_is_heard_by_later_resumes_and_stop_after_is_not(
    tmp_path: Path,
) -> None:
    train_sft(new(tmp_path, epochs=2, stop_after=1))
    longer = new(tmp_path, epochs=3, max_steps=5, save_every=2, keep=7, stop_after=1)
    train_sft(longer, resume=True)
    saved = SftConfig.of_run(tmp_path / "run")
    done = train_sft(saved, resume=True)

    assert saved == dataclasses.replace(longer, stop_after=0)
    assert (done.step, done.finished) == (5, True)


@pytest.mark.parametrize("left", ["model", "checkpoints"])
def test_a_folder_with_somebodys_model_is_not_trained_into(tmp_path: Path, left: str) -> None:
    (tmp_path / "run" / left).mkdir(parents=True)
    with pytest.raises(ConfigError, match=f"run already holds a {left}; choose another --run-dir"):
        train_sft(new(tmp_path))


@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_while_rows_are_tokenised_ends_at_once_and_the_same_command_begins_again(
    tmp_path: Path, which: signal.Signals
) -> None:
    config = new(tmp_path, run_dir=tmp_path / "run-{n}")
    before = signal.getsignal(which)
    ends = KeyboardInterrupt if which == signal.SIGINT else SystemExit
    with pytest.raises(ends) as end:
        train_sft(config, preparing=lambda done, total: send(which)())
    if isinstance(end.value, SystemExit):
        assert end.value.code == 143
    assert signal.getsignal(which) == before
    assert not (tmp_path / "run-1/config.toml").exists()
    assert train_sft(config).run_dir == tmp_path / "run-1"
    assert train_sft(config).run_dir == tmp_path / "run-2"


def test_a_signal_is_not_kept_waiting_by_an_evaluation(tmp_path: Path) -> None:
    config = new(tmp_path, eval_data=str(tmp_path / "rows.jsonl"), eval_every=2, epochs=2)
    first = train_sft(config, progress=at_step(2, send(signal.SIGUSR1)))
    evaluated = [e for e in read_events(tmp_path / "run/events.jsonl") if e.kind == "eval"]
    # Heard in the evaluation, not after the step that would have followed it.
    assert (first.step, first.finished, first.stopped_by) == (2, False, "SIGUSR1")
    assert not evaluated

    last = train_sft(config, resume=True, progress=at_step(6, send(signal.SIGTERM)))
    assert (last.step, last.finished, last.stopped_by) == (6, False, "SIGTERM")
    assert not (tmp_path / "run/model").exists()
    assert newest(tmp_path / "run") == 6
    done = train_sft(config, resume=True)
    assert (done.step, done.finished, done.eval_loss is None) == (6, True, False)
    assert (tmp_path / "run/model/config.json").is_file()


def test_checkpoints_are_written_by_time_without_a_flag(tmp_path: Path) -> None:
    for minutes, expected in ((1e-9, 1), (0.0, 0), (10.0, 0)):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        with pytest.raises(Killed):
            train_sft(new(tmp_path, save_minutes=minutes), progress=at_step(2, kill))
        assert newest(tmp_path / "run") == expected
    assert SftConfig().save_minutes == 10


def test_a_checkpoint_is_not_due_again_before_fifty_times_what_the_last_one_took(
    tmp_path: Path,
) -> None:
    with Run(new(tmp_path, save_minutes=1e-9)) as run:
        run.start()
        assert run.due()
        with run.saving():
            time.sleep(0.5)
        # The next one would be due in 25 seconds.
        time.sleep(0.01)
        assert not run.due()


TRAINERS: dict[str, tuple[type[RunConfig], dict[str, Any]]] = {
    "sft": (SftConfig, {"model": "tiny", "data": "x"}),
    "kge": (KgeConfig, {"data": "x"}),
    "prover": (ProverConfig, {"data": "x"}),
    "query-mutator": (QueryMutatorConfig, {}),
}


@pytest.mark.parametrize("name", TRAINERS)
def test_runs_without_a_folder_of_their_own_are_numbered(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    kind, given = TRAINERS[name]
    config = kind(**given)
    for number in (1, 2, 3):
        with Run(config) as run:
            run.start()
        assert run.folder == run.config.folder == Path(f"runs/{name}-{number}")
        assert kind.of_run(run.folder).folder == run.folder
    # A number is not given twice, whatever was removed.
    shutil.rmtree("runs/" + name + "-1")
    Path(f"runs/{name}-old").mkdir()
    with Run(config) as run:
        assert run.folder.name == f"{name}-4"
    # Where no run began, there is none.
    with Run(config) as run:
        assert run.folder.name == f"{name}-4"


HOLDER = """
import sys
from pathlib import Path
from batchwright.train.kge.config import KgeConfig
from batchwright.train.run import Run
with Run(KgeConfig(data="x", run_dir=Path(sys.argv[1])), resume=len(sys.argv) > 2) as run:
    print(run.folder, flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def holding(*arguments: str) -> Iterator[str]:
    """Another process that has a run open; the folder of it."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.stdin.close()


def test_two_processes_never_train_in_one_folder(tmp_path: Path) -> None:
    config = KgeConfig(data="x", run_dir=tmp_path / "run-{n}")
    with holding(str(config.run_dir)) as taken:
        assert taken == str(tmp_path / "run-1")
        with Run(config) as run:
            run.start()
        assert run.folder == tmp_path / "run-2"
    with (
        holding(str(tmp_path / "run-2"), "resume"),
        pytest.raises(ConfigError, match=r"another process trains in .*run-2; wait for it"),
    ):
        Run(dataclasses.replace(config, run_dir=tmp_path / "run-2"), resume=True)
    Run(dataclasses.replace(config, run_dir=tmp_path / "run-2"), resume=True)


@pytest.mark.parametrize("folder", ["{n}/run", "run-{n}-{n}"])
def test_a_number_stands_once_in_the_name_of_a_folder(tmp_path: Path, folder: str) -> None:
    with pytest.raises(ConfigError, match=r"may have {n} once, in its last part"):
        Run(KgeConfig(data="x", run_dir=tmp_path / folder))


EARLY = {
    "no data": ("--data nowhere.jsonl", "nowhere.jsonl"),
    "no held-out data": ("--data rows.jsonl --eval-data nowhere.jsonl", "nowhere.jsonl"),
    "no plan": ("--data rows.jsonl --batchplan nowhere", "nowhere"),
    "edges": ("--data rows.jsonl --bucket-edges 64,32", "32"),
    "words": ("--data rows.jsonl --bucket-edges a,b", "--bucket-edges"),
    "too wide": ("--data rows.jsonl --pack --pack-max-len 512 --token-budget 256", "512"),
    "two layouts": ("--data rows.jsonl --pack --layout sorted", "--pack contradicts"),
    "two sizes": ("--data rows.jsonl --step-size 4 --grad-accum 2", "--grad-accum 2"),
    "no tokenizer": ("--data rows.jsonl --tokenizer ./nowhere", "nowhere"),
    "no tracker": ("--data rows.jsonl --track nothing", "nothing"),
}


@pytest.mark.parametrize("case", EARLY)
def test_what_contradicts_itself_is_refused_before_the_model_is_looked_for(
    tmp_path: Path, call: Callable[..., Any], case: str
) -> None:
    new(tmp_path)
    flags, word = EARLY[case]
    outcome = call(f"train sft --model {tmp_path}/no-model {flags}", tmp_path)

    assert outcome.code == 1
    assert word in outcome.err
    assert "no-model" not in outcome.err
    assert not list(tmp_path.glob("runs/*/tokens"))


@pytest.mark.parametrize("eval_every", [0, 2])
def test_an_embedding_with_fewer_epochs_on_resume_is_that_of_as_many_epochs(
    tmp_path: Path, eval_every: int
) -> None:
    whole = KgeConfig(
        data=str(shipped_graph()),
        rank=4,
        batch_size=512,
        epochs=3,
        eval_every=eval_every,
        run_dir=tmp_path / "whole",
    )
    done = train_kge(whole)
    steps = done.step // 3
    longer = dataclasses.replace(whole, epochs=9, run_dir=tmp_path / "run", stop_after=3 * steps)
    assert not train_kge(longer).finished
    with pytest.raises(ConfigError, match="--epochs must be at least 3, the epochs that were"):
        train_kge(dataclasses.replace(longer, epochs=2), resume=True)
    assert train_kge(dataclasses.replace(longer, epochs=3), resume=True).finished
    (one, _), (other, _) = (load_kge(tmp_path / run / "model") for run in ("whole", "run"))

    assert torch.equal(one.entities, other.entities)
    assert KgeConfig.of_run(tmp_path / "run").epochs == 3
    # Raised again, it trains on, and the model of the shorter run stays until then.
    stopped = train_kge(dataclasses.replace(longer, epochs=4, stop_after=1), resume=True)
    assert (stopped.finished, stopped.stopped_by) == (False, "--stop-after")
    assert torch.equal(load_kge(tmp_path / "run/model")[0].entities, one.entities)
    assert newest(tmp_path / "run") == 3 * steps + 1


def until(process: "subprocess.Popen[str]", log: Path, records: int, kind: str = "step") -> None:
    end = time.monotonic() + 1200
    while not (log.exists() and log.read_bytes().count(f'"kind":"{kind}"'.encode()) >= records):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.01)


def test_sigterm_and_sigusr1_save_and_exit_with_143_and_the_end_is_the_same(
    tmp_path: Path, environ: dict[str, str], call: Callable[..., Any]
) -> None:
    line = f"train kge --data {shipped_graph()} --rank 48 --epochs 12 --batch-size 64 --quiet"
    assert call(f"{line} --run-dir whole", tmp_path).code == 0
    log = tmp_path / "run" / "events.jsonl"
    calls = [
        (signal.SIGTERM, f"{line} --run-dir run"),
        (signal.SIGUSR1, "train kge --resume run -q"),
    ]
    for number, (which, words) in enumerate(calls, start=1):
        with subprocess.Popen(
            [COMMAND, *words.split()],
            cwd=tmp_path,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            until(process, log, 2 * number, "epoch")
            # A scheduler may send it again, and to the whole group: that does not cut the saving.
            process.send_signal(which)
            time.sleep(0.001)
            process.send_signal(which)
            out, err = process.communicate(timeout=1200)
        assert process.returncode == 143, err
        assert out.endswith("stopped and saved; resume with: batchwright train kge --resume run\n")
        assert err == ""
    outcome = call("train kge --resume run --quiet --format json", tmp_path)

    assert outcome.data["finished"]
    one, other = (latest(tmp_path / run / "checkpoints") for run in ("whole", "run"))
    assert one is not None
    assert other is not None
    assert one.state["tables"]["entities"].tobytes() == other.state["tables"]["entities"].tobytes()


@pytest.mark.slow
def test_the_script_of_the_guide_is_requeued_until_its_run_is_finished(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    page = (Path(__file__).parents[1] / "docs" / "requeue.md").read_text()
    script = page.partition("```text\n#!/bin/bash\n")[2].partition("```")[0]
    (tmp_path / "job.sh").write_text(script)
    rows = [{"prompt": "count", "completion": " otter" * 4} for _ in range(4)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "scontrol").write_text('#!/bin/sh\necho "$@" >> requeued\n')
    (tmp_path / "bin" / "scontrol").chmod(0o755)
    path = f"{tmp_path}/bin:{COMMAND.parent}:{os.environ['PATH']}"
    run = tmp_path / "runs" / "job-17"
    codes = []
    for number in range(2):
        with subprocess.Popen(
            ["bash", "job.sh"],
            cwd=tmp_path,
            env={**environ, "PATH": path, "SLURM_JOB_ID": "17"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as job:
            if number == 0:
                until(job, run / "events.jsonl", 2)
                job.send_signal(signal.SIGUSR1)
            job.communicate(timeout=1200)
            codes.append(job.returncode)

    assert codes == [143, 0]
    assert (tmp_path / "requeued").read_text() == "requeue 17\n"
    assert [e.kind for e in read_events(run / "events.jsonl") if e.kind in ("start", "resume")] == [
        "start",
        "resume",
    ]
    assert (run / "finished.json").is_file()


def adapter(folder: Path, **more: Any) -> Path:
    return train_sft(new(folder, lora_rank=2, **more)).run_dir / "model"


def test_an_adapter_of_ours_trains_on_and_merges(tmp_path: Path, call: Callable[..., Any]) -> None:
    # As a run of both parts would: with a constant rate, the second half begins where the first
    # one ended, but for the moments of the optimizer.
    first = adapter(tmp_path)
    second = adapter(tmp_path, model=str(first), run_dir=tmp_path / "second")
    settings = SftConfig.of_run(tmp_path / "second")
    before, after = (load_file(path / "adapter_model.safetensors") for path in (first, second))
    merged = call(f"models merge {second} -o merged --format json", tmp_path)
    whole, base = load_model(tmp_path / "merged").model, load_model("tiny").model

    assert (settings.lora_rank, settings.lora_alpha) == (2, 16.0)
    assert before.keys() == after.keys()
    assert not all(torch.equal(before[name], after[name]) for name in before)
    assert losses(tmp_path / "second")[1] < losses(tmp_path / "run")[1]
    for path in (first, second):
        assert (
            json.loads((path / "adapter_config.json").read_text())["base_model_name_or_path"]
            == "tiny"
        )
    assert merged.data == {
        "adapter": str(second), "base": "tiny", "rank": 2, "path": "merged"
    }  # fmt: skip
    name = "model.layers.0.self_attn.q_proj.weight"
    down, up = (after[f"base_model.{'model.' + name[:-7]}.lora_{x}.weight"] for x in "AB")
    expected = dict(base.named_parameters())[name] + (16.0 / 2) * up @ down
    assert torch.allclose(dict(whole.named_parameters())[name], expected, atol=1e-6)
    assert call("models merge run/model -o merged", tmp_path).err.startswith(
        "error: merged is there already"
    )
    # A run on the merged model, and one on that, have their tokenizer.
    train_sft(new(tmp_path, model=str(tmp_path / "merged"), run_dir=tmp_path / "third"))
    train_sft(new(tmp_path, model=str(tmp_path / "third/model"), run_dir=tmp_path / "fourth"))


def test_a_run_that_trains_an_adapter_on_is_resumed(tmp_path: Path) -> None:
    first = adapter(tmp_path)
    more = new(tmp_path, model=str(first), epochs=2, run_dir=tmp_path / "whole")
    train_sft(more)
    stopped = dataclasses.replace(more, run_dir=tmp_path / "stopped")
    train_sft(dataclasses.replace(stopped, stop_after=2))
    train_sft(SftConfig.of_run(tmp_path / "stopped"), resume=True)

    assert losses(tmp_path / "whole") == losses(tmp_path / "stopped")


def test_what_an_adapter_does_not_fit_is_refused_by_name(
    tmp_path: Path, call: Callable[..., Any]
) -> None:
    base = train_sft(new(tmp_path, run_dir=tmp_path / "base")).run_dir / "model"
    first = adapter(tmp_path, model=str(base))
    again = new(tmp_path, model=str(first), run_dir=tmp_path / "again")
    for flag in ({"lora_rank": 3}, {"lora_alpha": 5.0}):
        with pytest.raises(
            ConfigError, match=r"must be (2|16), that of the adapter .*models merge"
        ):
            train_sft(dataclasses.replace(again, **flag))
    with pytest.raises(ConfigError, match=r"run is a run; its model is .*run/model"):
        load_model(tmp_path / "run")
    with pytest.raises(ConfigError, match="is a LoRA adapter, not a whole model; merge it"):
        load_model(first)
    assert "no adapter at base/model" in call("models merge base/model -o m", tmp_path).err

    other = train_sft(new(tmp_path, seed=7, lr=1e-4, run_dir=tmp_path / "other")).run_dir / "model"
    shutil.copy(other / "model.safetensors", base / "model.safetensors")
    with pytest.raises(BadFile, match=r"model\.safetensors does not match its checksum"):
        train_sft(again)
    shutil.rmtree(base)
    shutil.copytree(other, base)
    with pytest.raises(Mismatch, match=f"was trained on {base} with weights [0-9a-f]+, which now"):
        train_sft(again)
    shutil.rmtree(base)
    with pytest.raises(MissingFile, match=f"was trained on {base}, which is not there"):
        train_sft(again)
    assert not (tmp_path / "again/tokens").exists()
    sentence = call(f"models merge {first} -o m", tmp_path)
    assert (sentence.code, sentence.err.count("\n")) == (1, 1)
    (first / "adapter_config.json").write_text("{}")
    with pytest.raises(BatchwrightError, match="is not of a LoRA adapter"):
        train_sft(again)


@pytest.mark.parametrize("name", ["config.json", "adapter_config.json", "model.safetensors"])
def test_a_folder_that_is_a_model_is_not_trained_into(tmp_path: Path, name: str) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "otters"}\n')
    run = tmp_path / "mine"
    run.mkdir()
    (run / name).write_text("{}")
    config = SftConfig(model="tiny", data=(str(tmp_path / "rows.jsonl"),), run_dir=run)
    with pytest.raises(ConfigError, match="already holds a"):
        train_sft(config)
    assert [path.name for path in run.iterdir() if path.name != ".lock"] == [name]
