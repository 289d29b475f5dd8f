"""Trackers get every step and the held-out loss, by name, and nothing before a run starts."""

import dataclasses
import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from batchwright.errors import BadLoss, ConfigError, MissingExtra
from batchwright.events import read_events
from batchwright.integrations.trackers import TRACKERS, open_trackers
from batchwright.train.sft.config import SftConfig
from batchwright.train.sft.loop import train_sft

torch.set_num_threads(1)


@pytest.fixture
def config(tmp_path: Path) -> SftConfig:
    rows = [{"id": f"s{n}", "text": "otters " * (1 + n % 4)} for n in range(16)]
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return SftConfig(
        model="tiny",
        data=str(data),
        token_budget=64,
        eval_data=str(data),
        eval_every=2,
        lr=1e-3,
        run_dir=tmp_path / "run",
    )


def logged(run: Path, kind: str) -> list[tuple[int, float]]:
    events = read_events(run / "events.jsonl")
    return [(e.fields["step"], e.fields["loss"]) for e in events if e.kind == kind]


def installed(name: str) -> None:
    if find_spec(name) is None:
        pytest.skip(f"{name} is missing; run: pip install 'batchwright[track]' to test it")


class Memory:
    """A tracker as a user may write one."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def start(self, config: Mapping[str, Any]) -> None:
        self.calls.append(("start", dict(config)))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.calls.append(("log", step, dict(metrics)))

    def finish(self) -> None:
        self.calls.append(("finish",))


def test_a_tracker_is_started_gets_every_step_and_is_finished(config: SftConfig) -> None:
    tracker = Memory()
    result = train_sft(config, trackers=[tracker])
    first, *logged_, last = tracker.calls
    train = [(step, values) for _, step, values in logged_ if "train/loss" in values]
    held_out = [(step, values["eval/loss"]) for _, step, values in logged_ if "eval/loss" in values]

    assert first[0] == "start"
    assert first[1]["model"] == "tiny"
    assert last == ("finish",)
    assert [(s, v["train/loss"]) for s, v in train] == logged(config.run_dir, "step")
    assert held_out == logged(config.run_dir, "eval")
    assert len(train) == result.step
    names = {f"train/{n}" for n in ("loss", "lr", "grad_norm", "tokens", "padded", "tokens_per_s")}
    assert train[0][1].keys() >= names
    assert all(type(value) is float for _, values in train for value in values.values())


def test_a_tracker_is_finished_when_a_run_fails_too(config: SftConfig) -> None:
    tracker = Memory()
    with pytest.raises(BadLoss):
        train_sft(dataclasses.replace(config, lr=1e30, clip=0.0), trackers=[tracker])

    assert tracker.calls[-1] == ("finish",)


class Failing(Memory):
    """A tracker whose server cannot be reached, from one of its calls on."""

    def __init__(self, call: str) -> None:
        super().__init__()
        self.fails = call

    def start(self, config: Mapping[str, Any]) -> None:
        super().start(config)
        if self.fails == "start":
            raise OSError("no route to\n the server")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        super().log(step, metrics)
        if self.fails == "log":
            raise OSError("no route to\n the server")

    def finish(self) -> None:
        super().finish()
        raise RuntimeError("not flushed")


def test_a_tracker_that_fails_is_counted_and_ends_nothing(config: SftConfig) -> None:
    failing, other = Failing("log"), Memory()
    result = train_sft(config, trackers=[failing, other])
    events = list(read_events(config.run_dir / "events.jsonl"))
    failed = [dict(e.fields) for e in events if e.kind == "tracker"]
    (stop,) = (e for e in events if e.kind == "stop")

    assert result.finished
    assert result.tracker_failures == stop.fields["tracker_failures"] > result.step
    assert failed == [{"tracker": "Failing", "call": "log", "error": "no route to the server"}]
    assert len([c for c in other.calls if c[0] == "log"]) == result.tracker_failures


def test_a_tracker_that_cannot_start_is_an_error_before_the_run(config: SftConfig) -> None:
    started = Memory()
    with pytest.raises(ConfigError, match=r"Failing cannot start: no route to the server; correct"):
        train_sft(config, trackers=[started, Failing("start")])

    assert not (config.run_dir / "config.toml").exists()
    assert started.calls[-1] == ("finish",)
    assert train_sft(config).finished


def test_tensorboard_files_hold_what_the_log_holds(config: SftConfig) -> None:
    installed("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train_sft(config, trackers=open_trackers(("tensorboard",), config.run_dir))
    board = EventAccumulator(str(config.run_dir / "tensorboard"))
    board.Reload()

    def scalars(name: str) -> list[tuple[int, float]]:
        return [(event.step, event.value) for event in board.Scalars(name)]

    for name, kind in (("train/loss", "step"), ("eval/loss", "eval")):
        expected = logged(config.run_dir, kind)
        assert [step for step, _ in scalars(name)] == [step for step, _ in expected]
        assert [v for _, v in scalars(name)] == pytest.approx([v for _, v in expected], rel=1e-6)
    assert {"train/lr", "train/grad_norm", "train/tokens_per_s"} <= set(board.Tags()["scalars"])
    assert "config/text_summary" in board.Tags()["tensors"]


def test_nothing_is_written_before_a_run_starts(config: SftConfig) -> None:
    installed("tensorboard")
    trackers = open_trackers(("tensorboard",), config.run_dir)

    with pytest.raises(ConfigError):
        train_sft(dataclasses.replace(config, attention="flex"), trackers=trackers)
    assert not config.run_dir.exists()


@pytest.mark.filterwarnings("ignore")  # theirs, not ours
def test_wandb_takes_a_run_offline(config: SftConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    installed("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    train_sft(config, trackers=open_trackers(("wandb",), config.run_dir))

    assert list((config.run_dir / "wandb").glob("offline-run-*"))


@pytest.mark.filterwarnings("ignore")  # theirs, not ours
def test_mlflow_takes_a_run(config: SftConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    installed("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    train_sft(config, trackers=open_trackers(("mlflow",), config.run_dir))
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{config.run_dir / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("batchwright")
    (run,) = client.search_runs([experiment.experiment_id])
    for name, kind in (("train/loss", "step"), ("eval/loss", "eval")):
        history = client.get_metric_history(run.info.run_id, name)
        assert sorted((m.step, m.value) for m in history) == logged(config.run_dir, kind)
    assert run.data.params["model"] == "tiny"
    assert run.info.status == "FINISHED"


@pytest.mark.parametrize("name", sorted(TRACKERS))
def test_a_tracker_that_is_not_installed_says_how_to_get_it(name: str, tmp_path: Path) -> None:
    if find_spec(name) is not None:
        pytest.skip(f"{name} is installed here, so nothing is missing")
    with pytest.raises(MissingExtra, match=rf"{name} is missing; run: pip install"):
        open_trackers((name,), tmp_path)


def test_an_unknown_tracker_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one of tensorboard, wandb, mlflow, got comet"):
        open_trackers(("tensorboard", "comet"), tmp_path)
    assert open_trackers((), tmp_path) == []
