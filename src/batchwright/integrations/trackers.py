"""Experiment trackers by name: TensorBoard, Weights & Biases, MLflow."""

import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from batchwright.errors import ConfigError, need

__all__ = [
    "TRACKERS",
    "MlflowTracker",
    "TensorBoardTracker",
    "WandbTracker",
    "check_trackers",
    "open_trackers",
]


class TensorBoardTracker:
    """Writes event files to `tensorboard/` in the run directory."""

    def __init__(self, run_dir: Path) -> None:
        need("tensorboard", extra="track")
        self._run_dir = run_dir
        self._writer: Any = None

    def start(self, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._run_dir / "tensorboard"))
        lines = "\n".join(f"    {name} = {value}" for name, value in config.items())
        self._writer.add_text("config", lines)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def finish(self) -> None:
        self._writer.close()


class WandbTracker:
    """A Weights & Biases run named after the run directory; `WANDB_MODE=offline` keeps it local."""

    def __init__(self, run_dir: Path) -> None:
        self._wandb = need("wandb", extra="track")
        self._run_dir = run_dir
        self._run: Any = None

    def start(self, config: Mapping[str, Any]) -> None:
        self._run = self._wandb.init(
            project="batchwright",
            name=self._run_dir.name,
            dir=str(self._run_dir),
            config=dict(config),
            resume="allow",
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def finish(self) -> None:
        self._run.finish()


class MlflowTracker:
    """An MLflow run at `MLFLOW_TRACKING_URI`, by default in `mlflow.db` of the run directory."""

    def __init__(self, run_dir: Path) -> None:
        self._mlflow = need("mlflow", extra="track")
        self._run_dir = run_dir

    def start(self, config: Mapping[str, Any]) -> None:
        if "MLFLOW_TRACKING_URI" not in os.environ:
            # SQLite: MLflow no longer accepts a plain folder.
            self._mlflow.set_tracking_uri(f"sqlite:///{(self._run_dir / 'mlflow.db').resolve()}")
        self._mlflow.set_experiment("batchwright")
        self._mlflow.start_run(run_name=self._run_dir.name)
        self._mlflow.log_params(dict(config))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(metrics), step=step)

    def finish(self) -> None:
        self._mlflow.end_run()


TRACKERS = {"tensorboard": TensorBoardTracker, "wandb": WandbTracker, "mlflow": MlflowTracker}


def check_trackers(names: Sequence[str]) -> None:
    """Refuse trackers that are not known or not installed, without importing one."""
    for name in names:
        if name not in TRACKERS:
            raise ConfigError(f"--track must be one of {', '.join(TRACKERS)}, got {name}")
        if find_spec(name) is None:
            need(name, extra="track")


def open_trackers(names: Sequence[str], run_dir: Path) -> list[Any]:
    """The trackers of these names for a run in `run_dir`; they write nothing before `start`."""
    check_trackers(names)
    return [TRACKERS[name](run_dir) for name in names]
