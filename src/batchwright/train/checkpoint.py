"""Checkpoints: safetensors and JSON, whole or not there, readable on any number of ranks."""

import hashlib
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor, distribute_tensor

from batchwright.batching.plan.shards import CheckpointPosition
from batchwright.errors import BadFile, BatchwrightError, Mismatch
from batchwright.sealed import Kind

__all__ = ["Checkpoint", "latest", "load_into", "save", "whole"]

CHECKPOINT = Kind("batchwright.checkpoint", 1, "checkpoint", "resume from an older one")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that was found whole: where it is and how far it had come."""

    path: Path
    step: int
    position: CheckpointPosition
    passed_over: tuple[str, ...] = ()
    """Newer checkpoints that cannot be used, each with its reason."""


def save(
    folder: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    position: CheckpointPosition,
    *,
    keep: int,
    write: bool = True,
) -> None:
    """Write `step_<n>` with weights, optimizer state and position; then drop all but `keep`.

    All ranks must call it, because sharded tensors are gathered; only the rank with `write`
    touches the disk. Weights that do not train are not written: they are the model's own.
    """
    weights = {name: whole(p) for name, p in _trained(model)}
    states: dict[str, torch.Tensor] = {}
    for name, parameter in _trained(model):
        for key, value in optimizer.state[parameter].items():
            states[f"{name}|{key}"] = whole(torch.as_tensor(value))
    if not write:
        return
    path = folder / f"step_{position.global_step:08d}"
    with CHECKPOINT.replacing(path) as temporary:
        _write(weights, temporary / "model.safetensors")
        _write(states, temporary / "optimizer.safetensors")
        files = {name: _sha256(temporary / name) for name in _FILES}
        CHECKPOINT.write(temporary, {"position": asdict(position), "files": files})
    # A newer one can only be damaged, or this run would have gone on from there.
    older = [found for found in _found(folder) if found.name < path.name]
    for old in older[keep - 1 :]:
        shutil.rmtree(old, ignore_errors=True)


def latest(folder: Path) -> Checkpoint | None:
    """The newest checkpoint that is whole, every byte of it checked; None if there is none."""
    passed: list[str] = []
    for path in _found(folder):
        try:
            fields = CHECKPOINT.read(path)
            for name, expected in fields["files"].items():
                if not (path / name).is_file() or _sha256(path / name) != expected:
                    raise CHECKPOINT.damaged(path, f"{name} is missing or lacks its checksum")
            position = CheckpointPosition(**fields["position"])
        except (BatchwrightError, KeyError, TypeError, OSError) as error:
            passed.append(f"{path.name}: {error}")
            continue
        return Checkpoint(path, position.global_step, position, tuple(passed))
    if passed:
        raise BadFile(f"no checkpoint in {folder} is whole; the newest: {passed[0]}")
    return None


def load_into(
    checkpoint: Checkpoint, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Set weights and optimizer state to those of the checkpoint."""
    weights = load_file(checkpoint.path / "model.safetensors")
    states = load_file(checkpoint.path / "optimizer.safetensors")
    trained = dict(_trained(model))
    if weights.keys() != trained.keys():
        odd = sorted(weights.keys() ^ trained.keys())
        raise Mismatch(
            f"{checkpoint.path} is of another model: {len(odd)} weights differ, first {odd[0]}"
        )
    with torch.no_grad():
        for name, parameter in trained.items():
            if parameter.shape != weights[name].shape:
                raise Mismatch(
                    f"{checkpoint.path} is of another model: {name} is "
                    f"{tuple(weights[name].shape)}, not {tuple(parameter.shape)}"
                )
            parameter.copy_(_like(weights[name], parameter))
    by_parameter: dict[str, dict[str, torch.Tensor]] = {}
    for combined, value in states.items():
        name, _, key = combined.rpartition("|")
        by_parameter.setdefault(name, {})[key] = value
    for name, parameter in trained.items():
        if name in by_parameter:
            optimizer.state[parameter] = {
                key: _like(value, parameter) if value.shape == parameter.shape else value
                for key, value in by_parameter[name].items()
            }


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the CPU; if it is sharded, gathered from all ranks, which must all ask."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.detach().cpu().contiguous()


_FILES = ("model.safetensors", "optimizer.safetensors")


def _trained(model: torch.nn.Module) -> Iterable[tuple[str, torch.nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def _write(tensors: dict[str, torch.Tensor], path: Path) -> None:
    try:
        save_file(tensors, path)
    except SafetensorError as error:
        # What the disk says, as every other writer would pass it on.
        raise OSError(str(error)) from None


def _like(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    value = value.to(parameter.device)
    if isinstance(parameter, DTensor):
        return distribute_tensor(value, parameter.device_mesh, parameter.placements)
    return value


def _found(folder: Path) -> list[Path]:
    """Checkpoints, the newest first."""
    if not folder.is_dir():
        return []
    return sorted((p for p in folder.glob("step_*") if p.is_dir()), reverse=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
