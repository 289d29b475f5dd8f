"""`train sft` on the workers of a Ray cluster, through losses of nodes, by Ray Train.

    command -> controller -> one worker a rank -> train_sft, as under torchrun
            <- events.jsonl, checkpoints in the run directory, which all of them see <-

Ray Train places the workers, joins them to a process group, and starts them again when their number
can grow. A worker that is lost ends the others; they start again, on what the cluster has by then,
from the last checkpoint. The steps are those of the plan, whatever the number of workers.
"""

import logging
import os
import secrets
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchwright import __version__
from batchwright.checkpoint import newest_step
from batchwright.errors import (
    BatchwrightError,
    ConfigError,
    Mismatch,
    MissingExtra,
    MissingFile,
    need,
    one_line,
)
from batchwright.events import EventTail
from batchwright.files import write_atomic
from batchwright.integrations.ray.cluster import join, same_version, wait_for_losses
from batchwright.train.run import (
    SAME_PRESS_S,
    SIGNALS,
    STOPS,
    TERMINATED,
    Run,
    wait_until_free,
)
from batchwright.train.sft.config import SftConfig

if TYPE_CHECKING:
    from batchwright.train.sft.loop import SftResult

__all__ = ["train_sft_on_ray"]

FOLDER = ".ray"
"""In the run directory: what Ray Train writes, and two notes from the command to the workers."""
GROW_S = 60.0
"""How often Ray Train looks whether there is room for more workers."""
LOOK_S = 0.5
"""How often the command looks at the run."""
TRIES = 3
"""Losses in a row without a new checkpoint after which the run is given up."""
FREE_S = 120.0
"""How long the lock of a worker that was lost is waited for; a file server keeps it that long."""

log = logging.getLogger(__name__)


def train_sft_on_ray(
    config: SftConfig,
    *,
    workers: int,
    min_workers: int | None = None,
    resume: bool = False,
    progress: Callable[[int, int, float], None] | None = None,
    say: Callable[[str], None] = log.info,
) -> "SftResult":
    """Train on `workers` workers of the cluster, or on as many as it has, down to `min_workers`.

    Each worker is a rank, with a GPU of its own where the cluster has some and the device is not
    `cpu`, else with a core. The run directory must be one folder for all nodes. Without a
    `step_size`, a step has the microbatches that it would have on `workers` ranks, also when there
    are fewer. `say` is told of every start with its number of workers.

    The result is that of all starts together: a step that was made twice counts once.

    Ctrl-C and SIGTERM end the step and save, as in `train_sft`.
    """
    ray = need("ray", extra="ray")
    need("ray.train.v2.api.config", extra="ray")
    least = _checked(config, workers, min_workers)
    if not ray.is_initialized():
        say(join())
    if not (resume or config.step_size or config.batchplan):
        config = replace(config, step_size=config.grad_accum * workers, grad_accum=1)
    if not resume:
        # Numbers the folder, and refuses one that is taken; the first worker locks it again.
        with Run(config) as run:
            config = replace(config, run_dir=run.folder)
    begun = newest_step(config.run_dir / "checkpoints") if resume else 0
    launch = secrets.token_hex(8)
    told = {
        "version": __version__,
        "launch": launch,
        "folder": os.getcwd(),
        "settings": {**asdict(config), "run_dir": str(config.run_dir)},
        "resume": resume,
        "until": begun + config.stop_after if config.stop_after else 0,
    }
    notes = config.run_dir / FOLDER
    shutil.rmtree(notes, ignore_errors=True)
    write_atomic(notes / "launch", launch.encode())
    watched = _Watched(config.run_dir, resume, progress, say)
    try:
        with _signals(notes, watched) as interrupted:
            found = _until_done(ray, told, least, workers, config, watched, interrupted)
    finally:
        shutil.rmtree(notes, ignore_errors=True)
    return watched.result(found)


def _checked(config: SftConfig, workers: int, min_workers: int | None) -> int:
    """The least number of workers, once all that contradicts itself is refused."""
    fewest = 2 if config.fsdp else 1
    least = fewest if min_workers is None else min_workers
    if config.online:
        raise ConfigError("--online trains on one rank; leave out --on ray")
    if workers < 1:
        raise ConfigError(f"--workers must be at least 1, got {workers}")
    if not 1 <= least <= workers:
        raise ConfigError(f"--min-workers must be from 1 to --workers {workers}, got {least}")
    if least < fewest:
        raise ConfigError(f"--fsdp needs --min-workers of at least 2, got {least}")
    return least


def _until_done(
    ray: Any,
    told: dict[str, Any],
    least: int,
    workers: int,
    config: SftConfig,
    watched: "_Watched",
    interrupted: Callable[[], None],
) -> dict[str, Any]:
    """Start the workers until they come to an end; what the first of them returns."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    if "elastic_resize_monitor_interval_s" not in ScalingConfig.__dataclass_fields__:
        raise MissingExtra(
            f"Ray {ray.__version__} cannot train on a changing number of workers; "
            f"pip install 'ray>=2.60' on all nodes"
        )
    gpus = config.device != "cpu" and ray.cluster_resources().get("GPU", 0) > 0
    failures, at = 0, -1
    while True:
        if (room := int(ray.cluster_resources().get("GPU" if gpus else "CPU", 0))) < least:
            what = "GPUs" if gpus else "cores"
            watched.say(f"waiting for {least} workers: the cluster has {room} {what}")
        trainer = TorchTrainer(
            _rank,
            train_loop_config=told,
            scaling_config=ScalingConfig(
                num_workers=(least, workers),
                use_gpu=gpus,
                elastic_resize_monitor_interval_s=GROW_S,
            ),
            run_config=RunConfig(
                name=FOLDER,
                storage_path=str(config.run_dir.absolute()),
                # Whether to try again is decided below: a setting that a worker refuses would be
                # refused again.
                failure_config=FailureConfig(max_failures=0, controller_failure_limit=TRIES),
            ),
        )
        try:
            found: dict[str, Any] = _watching(trainer.fit, watched, interrupted)
            return found
        except Exception as error:
            watched.look()
            raised = _of_workers(error)
            if raised is None:
                raise
            saved = newest_step(config.run_dir / "checkpoints")
            failures, at = (1 if saved > at else failures + 1), saved
            why = one_line(raised)[:300]
            if isinstance(raised, BatchwrightError):
                raise raised from None
            if failures >= TRIES:
                raise BatchwrightError(
                    f"workers were lost {failures} times without a checkpoint between, perhaps out "
                    f"of memory: {why}; give them more memory, or a smaller --token-budget or "
                    f"--save-every"
                    + (
                        f"; what was trained is in {config.run_dir}, resume with --resume"
                        if (config.run_dir / "config.toml").exists()
                        else ""
                    )
                ) from None
            watched.say(f"a worker was lost at step {watched.step:,}: {why}")
            wait_for_losses()


def _watching(
    fit: Callable[[], Any], watched: "_Watched", interrupted: Callable[[], None]
) -> dict[str, Any]:
    """Wait for the trainer in a thread, so that this one hears signals and shows progress."""
    done: Future[Any] = Future()

    def work() -> None:
        try:
            done.set_result(fit())
        # Whatever it is, it is raised where it is waited for.
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    while not done.done():
        interrupted()
        watched.look()
        with suppress(TimeoutError):
            done.exception(LOOK_S)
    found: dict[str, Any] = done.result().return_value
    watched.look()
    return found


def _of_workers(error: Exception) -> Exception | None:
    """What the workers ended with: a refusal of ours before the consequences of a loss.

    None if it has nothing to do with workers.
    """
    from ray.exceptions import RayError
    from ray.train import TrainingFailedError

    if not isinstance(error, TrainingFailedError | RayError):
        return None
    failures: dict[int, Exception] = getattr(error, "worker_failures", {})
    by_rank = [failures[rank] for rank in sorted(failures)]
    for one in by_rank:
        if isinstance(one, BatchwrightError):
            return one
        if isinstance(one, ModuleNotFoundError) and "batchwright" in str(one.name):
            return _not_the_same(f"{one}")
    lost = [getattr(one, "health_check_failure", one) for one in by_rank]
    # The others only say that they no longer hear the one that was lost.
    lost.sort(key=lambda one: not isinstance(one, RayError))
    cause = lost[0] if lost else getattr(error, "controller_failure", error)
    if "No module named 'batchwright" in str(cause):
        return _not_the_same("it is not installed on a node")
    return cause if isinstance(cause, Exception) else error


def _not_the_same(why: str) -> Mismatch:
    return Mismatch(
        f"a node does not have this batchwright ({__version__}): {one_line(why)[:200]}; install "
        f"one version on all nodes"
    )


class _Watched:
    """What the log of the run says of the starts of this command, as it is written."""

    def __init__(
        self,
        run: Path,
        resume: bool,
        progress: Callable[[int, int, float], None] | None,
        say: Callable[[str], None],
    ) -> None:
        self.say = say
        self.step = 0
        self._tail = EventTail(run / "events.jsonl")
        self._progress = progress
        self._total = 0
        self.worlds: list[int] = []
        self._steps: dict[int, dict[str, Any]] = {}
        self._began = time.monotonic()
        if resume:
            with suppress(MissingFile):
                while self._tail.read():
                    pass

    def look(self) -> None:
        """Read on, and tell of it."""
        with suppress(MissingFile):
            while events := self._tail.read():
                for event in events:
                    self._take(event.kind, event.fields)

    def _take(self, kind: str, fields: dict[str, Any]) -> None:
        if kind in ("start", "resume"):
            if not self.worlds:
                self._began = time.monotonic()
            self.worlds.append(fields["world"])
            self._total = fields["steps"]
            count = "1 worker" if fields["world"] == 1 else f"{fields['world']} workers"
            self.say(f"training on {count} from step {fields['step']:,} of {self._total:,}")
        elif kind == "step":
            self.step = fields["step"]
            self._steps[self.step] = fields
            if self._progress is not None:
                loss = fields["loss"]
                self._progress(self.step, self._total, float("nan") if loss is None else loss)

    def result(self, last: dict[str, Any]) -> "SftResult":
        """Of all starts, given that of the last one."""
        from batchwright.train.sft.loop import SftResult

        steps = [self._steps[step] for step in sorted(self._steps)]
        losses = [fields["loss"] for fields in steps if fields["loss"] is not None]
        own = {
            "run_dir": self._tail.path.parent,
            "first_loss": losses[0] if losses else None,
            "last_loss": losses[-1] if losses else None,
            "useful_tokens": sum(fields["tokens"] for fields in steps),
            "padded_tokens": sum(fields["padded"] for fields in steps),
            "seconds": time.monotonic() - self._began,
            "data_wait_s": sum(fields["data_wait_s"] for fields in steps),
            "steps_without_loss": len(steps) - len(losses),
            "worlds": tuple(self.worlds),
        }
        return SftResult(**{**last, **own})


@contextmanager
def _signals(notes: Path, watched: _Watched) -> Iterator[Callable[[], None]]:
    """Pass signals of this process on to the first worker; a function that acts on them.

    Before the first step there is nothing to save, and the command ends at once; so it does at a
    second Ctrl-C.
    """
    heard: list[str] = []
    passed, pressed = 0, -SAME_PRESS_S

    def hear(number: int, frame: object) -> None:
        nonlocal pressed
        name, now = SIGNALS[signal.Signals(number)], time.monotonic()
        if name != "Ctrl-C" or now - pressed > SAME_PRESS_S:
            heard.append(name)
        if name == "Ctrl-C":
            pressed = now

    def act() -> None:
        nonlocal passed
        if len(heard) == passed:
            return
        if not watched.worlds or heard.count("Ctrl-C") > 1:
            if "Ctrl-C" in heard:
                raise KeyboardInterrupt
            raise SystemExit(TERMINATED)
        passed = len(heard)
        strongest = min(heard, key=STOPS.index)
        watched.say(f"{strongest}: saving after this step")
        write_atomic(notes / "stop", strongest.encode())

    if threading.current_thread() is not threading.main_thread():
        yield act
        return
    before = {number: signal.signal(number, hear) for number in SIGNALS}
    try:
        yield act
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _rank(told: dict[str, Any]) -> dict[str, Any]:
    """On a worker: train as one rank of the world that Ray Train has joined."""
    same_version(told["version"])
    # Paths of the command are as it was typed.
    with suppress(OSError):
        os.chdir(told["folder"])
    run_dir = Path(told["settings"]["run_dir"])
    notes = run_dir / FOLDER
    try:
        same = (notes / "launch").read_text() == told["launch"]
    except OSError:
        same = False
    if not same:
        raise ConfigError(
            f"node {_node()} does not see the run directory {run_dir} of the command; put it, and "
            f"start the command, on a folder that all nodes share"
        )
    from ray.train import collective, get_context

    from batchwright.integrations.trackers import open_trackers
    from batchwright.train.sft.loop import train_sft

    first = get_context().get_world_rank() == 0
    if first:
        wait_until_free(run_dir, FREE_S)
    # Of one rank for all: the run may begin while another still looks.
    resume = collective.broadcast_from_rank_zero(
        told["resume"] or (run_dir / "config.toml").exists()
    )
    config = SftConfig(**{**told["settings"], "run_dir": run_dir})
    if told["until"]:
        left = told["until"] - newest_step(run_dir / "checkpoints") if resume else told["until"]
        config = replace(config, stop_after=max(1, left))

    def asked() -> str | None:
        with suppress(OSError):
            return (notes / "stop").read_text()
        return None

    result = train_sft(
        config,
        resume=resume,
        trackers=lambda folder: open_trackers(config.track, folder),
        stop=asked,
    )
    return {**asdict(result), "run_dir": str(result.run_dir)}


def _node() -> str:
    import ray

    return str(ray.util.get_node_ip_address())
