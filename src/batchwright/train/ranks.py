"""Data-parallel training over several ranks; on one rank, each of these does nothing."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from batchwright.errors import ConfigError
from batchwright.world import World

__all__ = [
    "clip",
    "device_of",
    "gathered",
    "joined",
    "reshard",
    "spread",
    "summed",
    "syncing",
]


def device_of(wanted: str, world: World) -> torch.device:
    """The device this rank trains on."""
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise ConfigError("--device cuda: torch finds no CUDA device; use --device cpu")
    if wanted == "cpu" or not available:
        return torch.device("cpu")
    return torch.device("cuda", world.local_rank)


@contextmanager
def joined(world: World, device: torch.device) -> Iterator[Callable[[], None]]:
    """The ranks as one process group, while the block lasts.

    What it gives blocks until every rank has called it, however long one of them works before,
    and keeps no accelerator busy meanwhile.
    """
    if world.size == 1:
        yield lambda: None
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    # Given, not read from RANK: srun has other names for them.
    dist.init_process_group(backend, rank=world.rank, world_size=world.size)
    # Collectives of the default group give up after minutes; tokenising may take hours.
    patient = dist.new_group(backend="gloo", timeout=timedelta(days=30))
    try:
        yield lambda: dist.barrier(patient)
    finally:
        dist.destroy_process_group()


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
