"""Data-parallel training over several ranks; on one rank, each of these does nothing."""

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from batchwright.errors import BatchwrightError, ConfigError, one_line
from batchwright.files import parse_json, read_regular
from batchwright.world import World

__all__ = [
    "FirstRank",
    "clip",
    "device_of",
    "gathered",
    "joined",
    "reshard",
    "spread",
    "summed",
    "syncing",
]

BEAT_S = 2.0
"""How often the first rank shows that it lives."""
SILENT_S = 120.0
"""After so long without a sign of the first rank, the others give up."""
POLL_S = 0.2
SAY_S = 2.0
"""Who waits for longer than this says for what."""

log = logging.getLogger(__name__)


def device_of(wanted: str, world: World) -> torch.device:
    """The device this rank trains on."""
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise ConfigError("--device cuda: torch finds no CUDA device; use --device cpu")
    if wanted == "cpu" or not available:
        return torch.device("cpu")
    return torch.device("cuda", world.local_rank)


@contextmanager
def joined(world: World, device: torch.device) -> Iterator[None]:
    """The ranks as one process group, while the block lasts; one that is there already stays."""
    if world.size == 1:
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if dist.is_initialized():
        # Ray Train's workers have joined before they are given anything to do.
        yield
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    # Given, not read from RANK: srun has other names for them.
    dist.init_process_group(backend, rank=world.rank, world_size=world.size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class FirstRank:
    """What the first rank does alone while the others wait for it.

    They wait by a file in the run folder: a collective gives up after minutes, does not say whom
    it waits for, and tokenising may take hours. The file says how far the first rank is and that
    it lives; when it fails, ends or is silent for `SILENT_S`, the others end with its reason.
    `launch` is a number that all ranks of one start have, so that nobody reads an older file.
    """

    def __init__(self, folder: Path, world: World, launch: int) -> None:
        self._path = folder / ".first-rank.json"
        self._world = world
        self._launch = launch
        self._told: dict[str, Any] = {
            "launch": launch,
            "host": socket.gethostname(),
            "process": os.getpid(),
            "state": "working",
            "rows": [0, 0],
        }
        self._writing = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._tells = world.rank == 0 and world.size > 1

    def __enter__(self) -> "FirstRank":
        if self._tells:
            self._tell()
            self._thread.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if not self._tells:
            return
        if self._told["state"] == "ready":
            self._path.unlink(missing_ok=True)
            return
        reason = "it was stopped"
        if isinstance(error, Exception):
            known = isinstance(error, BatchwrightError)
            reason = one_line(error) if known else f"{type(error).__name__}: {one_line(error)}"
        self._end("failed", why=reason)

    def progress(self, done: int, total: int) -> None:
        """Note how many rows are tokenised."""
        self._told["rows"] = [done, total]

    def ready(self) -> None:
        """Let the others go on, once what they wait for is written."""
        if self._tells:
            self._end("ready")

    def wait(self, stopped: Callable[[], str | None]) -> None:
        """Return when the first rank is ready; raise if it cannot be, or if this one is stopped."""
        began = heard = time.monotonic()
        said, seen = False, None
        # Of all ranks on a machine, one says that they wait.
        says = self._world.local_rank == (1 if self._world.rank == self._world.local_rank else 0)
        while True:
            told, now = self._read(), time.monotonic()
            if told and told["state"] == "ready":
                return
            if told and told["state"] == "failed":
                raise BatchwrightError(f"rank 0 failed before training began: {told['why']}")
            if cause := stopped():
                raise BatchwrightError(f"stopped by {cause} while waiting for rank 0")
            if told != seen:
                seen, heard = told, now
            elif now - heard > SILENT_S:
                who = f" (process {seen['process']} on {seen['host']})" if seen else ""
                raise BatchwrightError(
                    f"rank 0{who} gave no sign for {SILENT_S:g} s while the others waited for it; "
                    f"look at its output, and start again: what it has tokenised is kept"
                )
            if seen and says and not said and now - began > SAY_S:
                said = True
                done, total = seen["rows"]
                at = f"tokenises: {done:,} of {total:,} rows" if total else "prepares the data"
                log.warning(
                    "waiting for rank 0 (process %s on %s), which %s",
                    *(seen["process"], seen["host"], at),
                )
            time.sleep(POLL_S)

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            with self._writing:
                if not self._ended.is_set():
                    self._tell()

    def _end(self, state: str, **more: str) -> None:
        with self._writing:
            self._ended.set()
            self._told |= {"state": state, **more}
            self._tell()

    def _tell(self) -> None:
        self._told["beat"] = time.time()
        temporary = self._path.with_suffix(".new")
        # A disk that is full for a moment does not end a run.
        with contextlib.suppress(OSError):
            temporary.write_text(json.dumps(self._told))
            temporary.replace(self._path)

    def _read(self) -> dict[str, Any] | None:
        try:
            told: dict[str, Any] = parse_json(read_regular(self._path))
        except (OSError, ValueError):
            return None
        return told if told.get("launch") == self._launch else None


def summed(values: Sequence[float], world: World, device: torch.device) -> list[float]:
    """Each value summed over the ranks."""
    if world.size == 1:
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor)
    return [float(value) for value in tensor.tolist()]


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the CPU; if it is sharded, gathered from all ranks, which must all call this."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.detach().cpu().contiguous()


def spread(model: Any, world: World, device: torch.device, *, fsdp: bool) -> Any:
    """The model over the ranks: sharded by FSDP2, or replicated by DDP."""
    if fsdp:
        from torch.distributed.fsdp import fully_shard

        # The layers are the longest list of modules, whatever an architecture calls it.
        lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList)]
        for layer in max(lists, key=len, default=[]):
            fully_shard(layer)
        return fully_shard(model)
    if world.size == 1:
        return model
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)


def reshard(model: Any, world: World) -> None:
    """Free the weights that FSDP gathered for a forward pass without a backward pass."""
    if world.size == 1:
        return
    from torch.distributed.fsdp import FSDPModule

    if isinstance(model, FSDPModule):
        model.reshard()


def syncing(model: Any, last: bool) -> AbstractContextManager[Any]:
    """Synchronise gradients with the last microbatch of a step only."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)
    elif hasattr(model, "no_sync") and not last:
        context: AbstractContextManager[Any] = model.no_sync()
        return context
    return nullcontext()


def clip(model: torch.nn.Module, largest: float) -> float:
    """Clip the gradient norm to `largest` (0: no clipping); the norm before."""
    trained = [p for p in model.parameters() if p.requires_grad]
    norm = torch.nn.utils.clip_grad_norm_(trained, largest or torch.inf)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
