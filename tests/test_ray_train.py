"""Training on a Ray cluster: nodes that are lost and that come, and the same run without Ray."""

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from ray_cluster import cluster_of, lose, new_node, processes  # isort: split

import numpy as np
import torch
from ray.cluster_utils import Cluster

from batchwright.batching import BatchPlan
from batchwright.errors import BatchwrightError, ConfigError
from batchwright.events import read_events
from batchwright.integrations.ray import train as ray_train
from batchwright.integrations.ray.train import train_sft_on_ray
from batchwright.train.sft.config import SftConfig
from batchwright.train.sft.loop import train_sft

pytestmark = pytest.mark.filterwarnings("ignore")
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with cluster_of(1) as found:
        yield found


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SftConfig:
    monkeypatch.chdir(tmp_path)
    draw = random.Random(0)
    words = ("the", "quick", "otter", "counts", "tokens", "while", "it", "dives")
    with open("train.jsonl", "w") as file:
        for number in range(60):
            prompt = " ".join(draw.choices(words, k=draw.randint(1, 9)))
            answer = " " + " ".join(draw.choices(words, k=draw.randint(1, 5)))
            row = {"id": f"s{number:02d}", "prompt": prompt, "completion": answer}
            file.write(json.dumps(row) + "\n")
    return SftConfig(
        model="tiny",
        data="train.jsonl",
        layout="packed",
        pack_max_len=128,
        token_budget=128,
        epochs=400,
        schedule="constant",
        save_every=5,
        run_dir=Path("ray"),
    )


def steps_of(run: Path) -> list[dict[str, Any]]:
    """The last record of each step: those after the last checkpoint are made again."""
    events = (event for event in read_events(run / "events.jsonl") if event.kind == "step")
    found = {event.fields["step"]: dict(event.fields) for event in events}
    return [found[step] for step in sorted(found)]


def worlds_of(run: Path) -> list[int]:
    events = read_events(run / "events.jsonl")
    return [e.fields["world"] for e in events if e.kind in ("start", "resume")]


def sample_counts(run: Path) -> Counter[tuple[int, str]]:
    """How often each sample was trained on in each epoch, by the steps in the log."""
    plan, done = BatchPlan.load(run / "plan"), steps_of(run)
    known = {
        (step.epoch, step.first): step for step in plan.iter_steps(epochs=done[-1]["epoch"] + 1)
    }
    steps = [known[one["epoch"], one["first"]] for one in done]
    return Counter((s.epoch, name) for s in steps for one in s.microbatches for name in one.samples)


def test_a_run_that_loses_a_node_and_gets_another_is_the_run_that_was_never_disturbed(
    cluster: Cluster, config: SftConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_train, "GROW_S", 1.0)
    nodes = [new_node(cluster, 1)]
    said: list[str] = []
    starts: list[str] = []
    stopped = False

    def say(text: str) -> None:
        said.append(text)
        if text.startswith("training on "):
            starts.append(text)

    def progress(step: int, total: int, loss: float) -> None:
        nonlocal stopped
        if len(starts) == 1 and nodes and step >= 7:
            lose(cluster, nodes.pop())
        elif len(starts) == 2 and not nodes:
            nodes.append(new_node(cluster, 1))
        elif len(starts) == 3 and not stopped:
            # Heard as of the command: the run saves and stops. A node of the test took SIGTERM.
            stopped = True
            signal.raise_signal(signal.SIGUSR1)

    result = train_sft_on_ray(config, workers=2, progress=progress, say=say)
    cluster.remove_node(nodes.pop())
    assert result.worlds == (2, 1, 2), said
    assert (result.finished, result.stopped_by) == (False, "SIGUSR1")
    assert not (config.run_dir / ".ray").exists()
    # Then without Ray, and with torchrun.
    saved = dataclasses.replace(SftConfig.of_run(config.run_dir), stop_after=3)
    alone = train_sft(saved, resume=True)
    assert alone.step == result.step + 3
    environ = {n: v for n, v in os.environ.items() if not n.startswith(("RAY_", "SLURM_"))}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            *("-m", "batchwright", "train", "sft", "--resume", "ray", "--stop-after", "3"),
        ],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert worlds_of(config.run_dir) == [2, 1, 2, 1, 2]

    last = alone.step + 3
    whole = dataclasses.replace(
        config, step_size=2, grad_accum=1, run_dir=Path("whole"), stop_after=last, save_every=0
    )
    train_sft(whole)
    one, other = steps_of(config.run_dir), steps_of(whole.run_dir)
    for name in ("step", "epoch", "first", "tokens", "loss_tokens", "lr"):
        assert [s[name] for s in one] == [s[name] for s in other], name
    losses = [[step["loss"] for step in steps] for steps in (one, other)]
    assert np.allclose(*losses, atol=1e-4, rtol=0), np.abs(np.subtract(*losses)).max()
    counts = sample_counts(config.run_dir)
    assert counts == sample_counts(whole.run_dir)
    # Whole epochs: every sample once.
    ended = one[-1]["epoch"]
    assert set(counts.values()) == {1}
    assert sum(epoch < ended for epoch, _ in counts) == 60 * ended


def test_the_command_shards_a_model_over_the_workers_of_a_cluster(
    cluster: Cluster, config: SftConfig, tmp_path: Path, run: Any
) -> None:
    """FSDP2 on two workers, typed, and the same run in one process."""
    node = new_node(cluster, 1)
    flags = (
        "--model tiny --data train.jsonl --pack --pack-max-len 128 --token-budget 128 --epochs 4"
    )
    try:
        done = run(
            f"train sft {flags} --fsdp --workers 2 --stop-after 4 --run-dir sharded --on ray "
            f"--address {cluster.address} --format json",
            tmp_path,
        )
        assert done.code == 0, done.err
        assert f"Ray: the cluster at {cluster.address} (2 nodes, 2 cores)" in done.err
        assert "training on 2 workers from step 0" in done.err
    finally:
        cluster.remove_node(node)
    whole = run(
        f"train sft {flags} --step-size 2 --stop-after 4 --run-dir whole --format json", tmp_path
    )
    assert whole.code == 0, whole.err
    losses = [[s["loss"] for s in steps_of(tmp_path / name)] for name in ("sharded", "whole")]
    assert np.allclose(*losses, atol=1e-4, rtol=0)


def test_what_a_worker_refuses_is_said_once_and_in_one_sentence(
    cluster: Cluster, config: SftConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(**changes: Any) -> str:
        with pytest.raises(BatchwrightError) as found:
            train_sft_on_ray(dataclasses.replace(config, **changes), workers=1)
        assert "\n" not in str(found.value)
        return str(found.value)

    # Known to the workers alone: the longest sample of the data.
    said = refused(pack_max_len=16, token_budget=16, run_dir=Path("short"))
    assert "tokens" in said
    # Nodes that do not share the run directory: the note of the command is not there for them.
    real = ray_train.write_atomic

    def elsewhere(path: Path, raw: bytes) -> None:
        real(path.parent / "elsewhere" if path.name == "launch" else path, raw)

    with monkeypatch.context() as patch:
        patch.setattr(ray_train, "write_atomic", elsewhere)
        said = refused(run_dir=Path("unshared"))
    assert "does not see the run directory unshared" in said
    assert "a folder that all nodes share" in said
    with monkeypatch.context() as patch:
        patch.setattr(ray_train, "__version__", "9.9")
        said = refused(run_dir=Path("other"))
    assert "and the command 9.9; install one version on all nodes" in said
    # None of them left a run behind: the same folder can be used.
    assert not list(tmp_path.glob("*/config.toml"))


def test_workers_that_die_each_time_end_the_run_with_its_checkpoints(
    cluster: Cluster, config: SftConfig, tmp_path: Path
) -> None:
    """As the kernel ends a process that has taken too much memory."""
    killed = 0

    def say(text: str) -> None:
        nonlocal killed
        if text.startswith("training on "):
            killed += 1
            os.kill(train_worker(cluster), signal.SIGKILL)

    with pytest.raises(BatchwrightError, match="3 times without a checkpoint") as found:
        train_sft_on_ray(dataclasses.replace(config, save_every=0), workers=1, say=say)
    assert killed == 3
    assert "out of memory" in str(found.value)
    assert "\n" not in str(found.value)
    assert "resume with --resume" in str(found.value)
    # Nothing is in the way of the next start.
    rest = train_sft(
        dataclasses.replace(SftConfig.of_run(config.run_dir), stop_after=2), resume=True
    )
    assert rest.step == 2


def train_worker(cluster: Cluster) -> int:
    """The process of the one training worker."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        for found in processes(cluster, "ray::RayTrainWorker"):
            return found
        time.sleep(0.1)
    raise AssertionError("no training worker")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"workers": 0}, "--workers must be at least 1"),
        ({"workers": 2, "min_workers": 3}, "--min-workers must be from 1 to --workers 2, got 3"),
        ({"workers": 2, "min_workers": 1, "fsdp": True}, "--fsdp needs --min-workers of at least"),
        ({"workers": 1, "online": True}, "--online trains on one rank"),
    ],
)
def test_settings_that_no_cluster_can_meet_are_refused_before_it_is_asked(
    config: SftConfig, flags: dict[str, Any], said: str
) -> None:
    own = {name: flags.pop(name) for name in ("fsdp", "online") if name in flags}
    with pytest.raises(ConfigError, match=said):
        train_sft_on_ray(dataclasses.replace(config, **own), **flags)
