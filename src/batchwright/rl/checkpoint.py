"""Checkpoints of a learner: arrays as safetensors, plain values as JSON, whole or not there."""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from batchwright.errors import BadFile, BatchwrightError, ConfigError
from batchwright.sealed import Kind

__all__ = ["latest", "load_checkpoint", "save_checkpoint"]

CHECKPOINT = Kind("batchwright.learner", 1, "checkpoint", "resume from an older one")
ARRAYS = "arrays.safetensors"

State = Mapping[str, Any]
"""Nested mappings with names as keys; leaves are arrays, tensors or what JSON can hold."""


def save_checkpoint(folder: Path, update: int, state: State, *, keep: int = 2) -> Path:
    """Write `update_<n>`, then drop all older ones but `keep` - 1.

    A tuple comes back as a list and a tensor as an array; everything else comes back as it was.
    """
    arrays: dict[str, NDArray[Any]] = {}
    plain: list[tuple[list[str], Any]] = []
    for names, value in _leaves(state, []):
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu().numpy()
        if isinstance(value, np.ndarray):
            if value.dtype.kind not in "biuf":
                raise ConfigError(
                    f"{'/'.join(names)} is an array of {value.dtype}; a checkpoint holds numbers"
                )
            # np.ascontiguousarray would give an array without axes one.
            arrays[json.dumps(names)] = np.array(value, order="C")
        else:
            plain.append((names, _plain(names, value)))
    path = folder / f"update_{update:08d}"
    with CHECKPOINT.replacing(path) as temporary:
        try:
            save_file(arrays, temporary / ARRAYS)
        except SafetensorError as error:
            raise OSError(str(error)) from None
        fields = {"update": update, "plain": plain, "arrays_sha256": _sha256(temporary / ARRAYS)}
        CHECKPOINT.write(temporary, fields)
    for old in [found for found in _found(folder) if found.name < path.name][keep - 1 :]:
        shutil.rmtree(old, ignore_errors=True)
    return path


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The state as it was given to `save_checkpoint`, every byte of it checked."""
    fields = CHECKPOINT.read(path)
    file = path / ARRAYS
    if not file.is_file() or _sha256(file) != fields["arrays_sha256"]:
        raise CHECKPOINT.damaged(path, f"{ARRAYS} is missing or lacks its checksum")
    state: dict[str, Any] = {}
    for names, value in fields["plain"]:
        _put(state, names, value)
    for name, array in load_file(file).items():
        _put(state, json.loads(name), array)
    return state


def latest(folder: Path) -> Path | None:
    """The newest checkpoint that is whole; None if there is none, an error if none is whole."""
    reasons = []
    for path in _found(folder):
        try:
            load_checkpoint(path)
        except (BatchwrightError, SafetensorError, OSError) as error:
            reasons.append(f"{path.name}: {error}")
            continue
        return path
    if reasons:
        raise BadFile(f"no checkpoint in {folder} is whole; the newest: {reasons[0]}")
    return None


def _leaves(value: Any, names: list[str]) -> Iterator[tuple[list[str], Any]]:
    # An empty mapping is a leaf, or it would not come back.
    if not isinstance(value, Mapping) or not value:
        yield names, value
        return
    for name, inside in value.items():
        if not isinstance(name, str):
            raise ConfigError(f"{'/'.join(names)} has the key {name!r}; keys must be text")
        yield from _leaves(inside, [*names, name])


def _plain(names: list[str], value: Any) -> Any:
    if value is None or isinstance(value, bool | str | int | float):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list | tuple):
        return [_plain(names, item) for item in value]
    if isinstance(value, Mapping):
        if not all(isinstance(name, str) for name in value):
            raise ConfigError(f"{'/'.join(names)} has a key that is not text; a checkpoint cannot")
        return {name: _plain(names, item) for name, item in value.items()}
    raise ConfigError(
        f"{'/'.join(names)} is a {type(value).__name__}; a checkpoint holds arrays, numbers, text, "
        f"None, and lists and mappings of them"
    )


def _put(state: dict[str, Any], names: list[str], value: Any) -> None:
    *path, last = names
    for name in path:
        state = state.setdefault(name, {})
    state[last] = value


def _found(folder: Path) -> list[Path]:
    """Checkpoints, the newest first."""
    if not folder.is_dir():
        return []
    return sorted((p for p in folder.glob("update_*") if p.is_dir()), reverse=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
