"""What several processes do together; alone, each of these does nothing."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from batchwright.errors import ConfigError
from batchwright.world import World

__all__ = ["clip", "device_of", "joined", "spread", "summed", "syncing", "wait"]


def device_of(asked: str, world: World) -> torch.device:
    """Where this rank trains."""
    here = torch.cuda.is_available()
    if asked == "cuda" and not here:
        raise ConfigError("--device cuda was asked for, and torch finds no CUDA device; use cpu")
    if asked == "cpu" or not here:
        return torch.device("cpu")
    return torch.device("cuda", world.local_rank)


@contextmanager
def joined(world: World, device: torch.device) -> Iterator[None]:
    """The ranks as one group, while the block lasts."""
    if world.size == 1:
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def wait(world: World) -> None:
    """Until every rank is here."""
    if world.size > 1:
        dist.barrier()


def summed(values: Sequence[float], world: World, device: torch.device) -> list[float]:
    """Each value added up over the ranks."""
    if world.size == 1:
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor)
    return [float(value) for value in tensor.tolist()]


def spread(model: Any, world: World, device: torch.device, *, fsdp: bool) -> Any:
    """The model over the ranks: sharded by FSDP2, or copied by DDP."""
    if fsdp:
        if world.size == 1:
            raise ConfigError("--fsdp shards over several ranks; start with torchrun, or leave it")
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


def syncing(model: Any, last: bool) -> AbstractContextManager[Any]:
    """Gradients travel with the last microbatch of a step, not with each."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)
    elif hasattr(model, "no_sync") and not last:
        context: AbstractContextManager[Any] = model.no_sync()
        return context
    return nullcontext()


def clip(model: torch.nn.Module, largest: float) -> float:
    """Scale the gradient to norm `largest` at most (0: leave it); the norm it had."""
    trained = [p for p in model.parameters() if p.requires_grad]
    norm = torch.nn.utils.clip_grad_norm_(trained, largest or torch.inf)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
