"""What a fine-tuning run resumes from: trained weights, optimizer state and position."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from batchwright.batching import CheckpointPosition
from batchwright.checkpoint import Checkpoint
from batchwright.errors import Mismatch
from batchwright.train import ranks

__all__ = ["load_state", "training_state"]


def training_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, position: CheckpointPosition
) -> dict[str, Any]:
    """The state to save; all ranks must ask for it, because sharded tensors are gathered.

    Frozen weights are not in it: they are those of the model that the run starts from.
    """
    trained = _trained(model)
    return {
        "position": asdict(position),
        "model": {name: ranks.gathered(p) for name, p in trained.items()},
        "optimizer": {
            name: {
                key: ranks.gathered(torch.as_tensor(value))
                for key, value in optimizer.state[p].items()
            }
            for name, p in trained.items()
        },
    }


def load_state(
    found: Checkpoint, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> CheckpointPosition:
    """Set weights and optimizer state to those of a checkpoint; its position."""
    weights: Mapping[str, Any] = found.state["model"]
    trained = _trained(model)
    if weights.keys() != trained.keys():
        differing = sorted(weights.keys() ^ trained.keys())
        raise Mismatch(
            f"{found.path} is of another model: {len(differing)} weights differ, first "
            f"{differing[0]}; resume with the model of the run"
        )
    for name, parameter in trained.items():
        if parameter.shape != weights[name].shape:
            raise Mismatch(
                f"{found.path} is of another model: {name} is {weights[name].shape}, not "
                f"{tuple(parameter.shape)}; resume with the model of the run"
            )
        with torch.no_grad():
            parameter.copy_(_like(weights[name], parameter))
        moments = found.state["optimizer"][name]
        if moments:
            optimizer.state[parameter] = {
                key: _like(value, parameter)
                if value.shape == parameter.shape
                else torch.from_numpy(value)
                for key, value in moments.items()
            }
    return CheckpointPosition(**found.state["position"])


def _trained(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _like(array: Any, parameter: torch.Tensor) -> torch.Tensor:
    """An array as a tensor that stands where `parameter` does, sharded as it is."""
    tensor = torch.from_numpy(array).to(parameter.device)
    if isinstance(parameter, DTensor):
        return distribute_tensor(tensor, parameter.device_mesh, parameter.placements)
    return tensor
