"""Checkpoints: any nested state as safetensors and JSON, checksummed, whole or not there."""

import json
import operator
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from batchwright.errors import BadFile, BatchwrightError, ConfigError, MissingFile, one_line
from batchwright.files import (
    atomic_folder,
    cannot_read,
    open_regular,
    remove_folder,
    remove_leftovers,
)
from batchwright.sealed import MANIFEST, SealedFolder

__all__ = [
    "Checkpoint",
    "State",
    "latest",
    "load_checkpoint",
    "newest_step",
    "read_arrays",
    "save_checkpoint",
    "write_arrays",
]

CHECKPOINT = SealedFolder("batchwright.checkpoint", 3, "checkpoint", "resume from an older one")
ARRAYS = "arrays.safetensors"

_SAFETENSORS = {
    **{f"{kind}{size}": f"{kind.upper()}{8 * size}" for kind in "iuf" for size in (1, 2, 4, 8)},
    "b1": "BOOL",
}
"""The format's names of numpy's types."""

State = Mapping[str, Any]
"""Nested mappings with text keys; leaves are arrays, tensors on any device, or JSON values."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that was found whole."""

    path: Path
    step: int
    state: dict[str, Any]
    keep: int
    """How many its writer wanted to keep."""
    passed_over: tuple[str, ...] = ()
    """Newer checkpoints that cannot be used, each with its reason."""

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Say of a state that does not have what the block looks for that it is of another kind.

        Its checksums are right, so another trainer wrote it, or somebody by hand.
        """
        try:
            yield
        except BatchwrightError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise BadFile(
                f"{self.path} does not hold the state of such a run ({one_line(error)[:200]}); put "
                f"back the checkpoints of this run"
            ) from error


def save_checkpoint(folder: Path, step: int, state: State, *, keep: int = 2) -> Path:
    """Write `step_<n>` into `folder`, then remove older ones until `keep` are left.

    A tuple comes back as a list and a tensor as an array; everything else comes back as it was.
    """
    arrays: dict[str, NDArray[Any]] = {}
    plain = _plain(state, [], arrays)
    path = folder / f"step_{step:08d}"
    # One that is damaged is replaced too: nothing is in it but what we write.
    left = {child.name for child in path.iterdir()} if path.is_dir() else set()
    ours = left and left <= {MANIFEST, ARRAYS}
    with atomic_folder(path, left.pop()) if ours else CHECKPOINT.replacing(path) as temporary:
        write_arrays(temporary / ARRAYS, arrays)
        CHECKPOINT.write(temporary, {"step": step, "state": plain, "keep": keep}, [ARRAYS])
    _remove_older(path, keep)
    return path


def _remove_older(path: Path, keep: int) -> None:
    # A newer one is damaged, or the run would have resumed from it: it does not count.
    for old in [found for found in _found(path.parent) if found.name < path.name][keep - 1 :]:
        remove_folder(old)


def load_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at `path`, every byte of it checked."""
    fields = CHECKPOINT.read(path)
    CHECKPOINT.check_files(path, fields, ARRAYS)
    try:
        step, state = operator.index(fields["step"]), dict(fields["state"])
        keep = operator.index(fields["keep"])
        for name, array in read_arrays(path / ARRAYS, CHECKPOINT).items():
            *parents, last = name.split("/")
            place = state
            for parent in parents:
                place = place.setdefault(parent, {})
            place[last] = array
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, BadFile):
            raise
        raise CHECKPOINT.damaged(path, f"it is not as checkpoints are written: {error}") from None
    if re.fullmatch(r"step_\d+", path.name) and path.name != f"step_{step:08d}":
        raise CHECKPOINT.damaged(path, f"it is the checkpoint of step {step} under another name")
    return Checkpoint(path, step, state, max(keep, 1))


def latest(folder: Path) -> Checkpoint | None:
    """The newest whole checkpoint; None if there is none, `BadFile` if no one can be used.

    Older ones that its writer was about to remove when it was killed are removed now.
    """
    passed_over: list[str] = []
    remove_leftovers(folder)
    for path in _found(folder):
        try:
            found = load_checkpoint(path)
        except (BadFile, MissingFile) as error:
            passed_over.append(f"{path.name}: {error}")
            continue
        _remove_older(path, found.keep)
        return replace(found, passed_over=tuple(passed_over))
    if passed_over:
        newest = passed_over[0].removesuffix("; resume from an older one")
        raise BadFile(
            f"no checkpoint in {folder} can be used; the newest, {newest}; put a copy of one "
            f"back, or remove {folder} and resume, which starts the run over"
        )
    return None


def newest_step(folder: Path) -> int:
    """Of the checkpoints, by their names: none of them is read; 0 if there is none."""
    return max((int(path.name.removeprefix("step_")) for path in _found(folder)), default=0)


def write_arrays(
    path: Path, arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file, one array after another.

    The library's own writer makes a temporary file of its own beside it, which nobody removes
    after a kill, and leaves one that only its owner may read.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    parts, at = [], 0
    # The widest first: each array is then aligned, as the format asks.
    for name in sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name)):
        array = arrays[name]
        little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        parts.append(little.reshape(-1).view("u1").data if little.size else b"")
        header[name] = {
            "dtype": _SAFETENSORS[array.dtype.str[1:]],
            "shape": list(array.shape),
            "data_offsets": [at, at + array.nbytes],
        }
        at += array.nbytes
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for part in parts:
            file.write(part)


def read_arrays(path: Path, kind: SealedFolder) -> dict[str, NDArray[Any]]:
    """Read a safetensors file, or raise that the folder it is in, of that `kind`, is damaged."""
    # The library says of a file that cannot be opened that it is not there.
    open_regular(path).close()
    try:
        arrays: dict[str, NDArray[Any]] = load_file(path)
    except OSError as error:
        raise cannot_read(path, error) from error
    except SafetensorError as error:
        raise kind.damaged(path.parent, f"{path.name} cannot be read: {error}") from None
    return arrays


def _plain(value: Any, names: list[str], arrays: dict[str, NDArray[Any]]) -> Any:
    """The JSON part of a state; its arrays are put into `arrays` by their path in it."""
    if isinstance(value, Mapping):
        plain: dict[str, Any] = {}
        for name, inner in value.items():
            if not isinstance(name, str):
                raise ConfigError(f"{'/'.join(names)} has the key {name!r}; keys must be text")
            path = [*names, name]
            array = _array(inner, path)
            if array is None:
                plain[name] = _plain(inner, path, arrays)
            else:
                arrays["/".join(path)] = array
        return plain
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, bool | str | int | float):
        return value
    if isinstance(value, list | tuple):
        inside: dict[str, NDArray[Any]] = {}
        items = [_plain(item, names, inside) for item in value]
        if not inside:
            return items
    raise ConfigError(
        f"{'/'.join(names)} is a {type(value).__name__}; a checkpoint holds numbers, text, None, "
        f"lists of them, and mappings of those and of arrays"
    )


def _array(value: Any, names: list[str]) -> NDArray[Any] | None:
    """An array or tensor as a contiguous array of numbers, None for anything else."""
    # There is no tensor where torch was not imported, and no need to do it here.
    torch = sys.modules.get("torch")
    path = "/".join(names)
    if torch is not None and isinstance(value, torch.Tensor):
        try:
            value = value.detach().cpu().numpy()
        except TypeError as error:
            raise ConfigError(f"{path} cannot be saved in a checkpoint: {error}") from None
    if not isinstance(value, np.ndarray):
        return None
    if value.dtype.kind not in "biuf":
        raise ConfigError(f"{path} is an array of {value.dtype}; a checkpoint holds numbers")
    if any("/" in name for name in names):
        raise ConfigError(f"{path} has a / in one of its names; arrays are saved by their path")
    # np.ascontiguousarray would give an array without axes one.
    return value if value.flags.c_contiguous else np.array(value, order="C")


def _found(folder: Path) -> list[Path]:
    """Checkpoint folders, the newest first."""
    if not folder.is_dir():
        return []
    return sorted((p for p in folder.glob("step_*") if p.is_dir()), reverse=True)
