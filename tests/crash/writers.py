"""What the crash tests run that is no command: writers of files by the library."""

import json
from pathlib import Path
from typing import Any

import numpy as np


def checkpoints(folder: str) -> None:
    """Three checkpoints, from wherever the newest one is, and a log."""
    from batchwright.checkpoint import latest, save_checkpoint
    from batchwright.events import EventLog

    found = latest(Path(folder) / "checkpoints")
    at, total = (found.step, found.state["total"]) if found else (0, np.zeros(4))
    with EventLog(Path(folder) / "events.jsonl") as log:
        while at < 3:
            at += 1
            total = total + at
            save_checkpoint(Path(folder) / "checkpoints", at, {"total": total, "at": at})
            log.write("step", step=at)


def replay(folder: str) -> None:
    """A replay buffer saved after every few samples, in full and as changes."""
    from batchwright.streaming import ReplayBuffer, ReplayBufferConfig

    path = Path(folder) / "buffer"
    saved = path.is_dir() and any(path.glob("*.safetensors"))
    buffer = ReplayBuffer.load(path) if saved else ReplayBuffer(ReplayBufferConfig(max_size=30))
    while buffer.total_added < 40:
        for _ in range(10):
            number = buffer.total_added
            buffer.add(_sample(number))
        buffer.save(path)
    (Path(folder) / "seen.json").write_text(json.dumps([s.sample_id for s in buffer.snapshot()]))


def _sample(number: int) -> Any:
    from batchwright.streaming import StreamSample

    return StreamSample(
        input_ids=[number] * 5,
        loss_mask=[1] * 5,
        sample_id=f"s{number}",
        dataset_id="crash",
        source="offline",
    )


def small_files(folder: str) -> None:
    """A position and a fingerprint, over older ones."""
    from batchwright.batching import CheckpointPosition
    from batchwright.batching.plan.proofs import BatchFingerprint

    CheckpointPosition(1, 2, 3, "p").save(Path(folder) / "position.json")
    BatchFingerprint("f" * 16, "f" * 64, 1, 2, 3).save(Path(folder) / "fingerprint.json")
