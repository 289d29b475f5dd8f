"""Plans on disk: a folder of little-endian arrays that are mapped, and a manifest.

The folder is written under a temporary name and renamed, so it is whole or not there. The
manifest carries its own checksum and one for each array. Opening checks the manifest, every
file's size and the content of all arrays that steer the order; asking for the fingerprint checks
the samples and their ids as well, and to open with `check` every byte.
"""

import json
import operator
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from numpy.typing import NDArray

from batchwright.batching.config import BatchingConfig
from batchwright.batching.plan.microbatch import MicrobatchSpec
from batchwright.batching.plan.order import Arrays, order_of
from batchwright.batching.plan.pieces import Counts
from batchwright.batching.plan.shards import Shard
from batchwright.data.ids import Ids
from batchwright.errors import BatchwrightError
from batchwright.files import atomic_folder
from batchwright.sealed import SealedFolder, write_array

__all__ = ["VERSION", "read_plan", "write_plan", "write_shards", "write_text"]

VERSION = 3
"""Of the plan's format and of the rules by which an order follows from its arrays."""

PLAN = SealedFolder(
    "batchwright.plan",
    VERSION,
    "batch plan",
    "build it again: batchwright data batchplan build",
)
_BY_SAMPLE = ("difficulty", "groups", "costs_N")
_READ_LATER = {"items", "starts", "lengths", "id_data", "id_offsets", "skipped", *_BY_SAMPLE}
"""Large arrays whose values index nothing unchecked; the others are hashed on opening."""


class _Plan(Protocol):
    @property
    def fingerprint(self) -> str: ...


P = TypeVar("P", bound=_Plan)


def write_plan(path: Path, facts: Mapping[str, Any], arrays: Arrays) -> Path:
    """Write one plan, whole or not at all; `facts` are what its manifest says of it."""
    with PLAN.replacing(path) as folder:
        files = {name: write_array(folder, name, array) for name, array in arrays.items()}
        PLAN.write(folder, {**facts, "files": files})
    return path


def write_shards(path: Path, ranks: Sequence[Mapping[str, Any]], arrays: Arrays) -> list[Path]:
    """Write `rank_0` to `rank_<n>`, each a plan of its own, by the facts of each rank.

    The arrays are the same for all ranks and are linked, not copied, where the disk can.
    """
    with PLAN.replacing(path, "rank_0/") as folder:
        files: dict[str, Any] = {}
        for rank, facts in enumerate(ranks):
            own = folder / f"rank_{rank}"
            own.mkdir()
            for name, array in arrays.items():
                if rank == 0:
                    files[name] = write_array(own, name, array)
                else:
                    _link(folder / "rank_0" / f"{name}.bin", own / f"{name}.bin")
            PLAN.write(own, {**facts, "files": files})
    return [path / f"rank_{rank}" for rank in range(len(ranks))]


def read_plan(path: Path, make: Callable[..., P], check: bool = False) -> P:
    """Open a plan, which `make` makes of its parts; arrays are mapped: milliseconds for any size.

    With `check` every byte is hashed, and the content has to give the saved fingerprint.
    """
    manifest = PLAN.read(path)
    with _fitting(path):
        arrays = {
            name: PLAN.open_array(path, name, entry, check=check or name not in _READ_LATER)
            for name, entry in manifest["files"].items()
        }
        unread = {
            name: (manifest["files"][name], array)
            for name, array in arrays.items()
            if name in _READ_LATER
        }
        config = BatchingConfig(**manifest["config"])
        ids = Ids.numbered(manifest["counts"]["samples"])
        if "id_offsets" in arrays:
            ids = Ids.from_arrays(arrays.pop("id_offsets"), arrays.pop("id_data"))
        shard = manifest["shard"]
        plan = make(
            skipped=arrays.pop("skipped"),
            **{name: arrays.pop(name, None) for name in _BY_SAMPLE},
            order=order_of(manifest["kind"], config, arrays),
            ids=ids,
            config=config,
            num_epochs=operator.index(manifest["num_epochs"]),
            counts=Counts(**manifest["counts"]),
            dataset_hash=manifest["dataset_hash"],
            tokenizer_hash=manifest["tokenizer_hash"],
            sources=tuple((name, size, weight) for name, size, weight in manifest["sources"]),
            note=manifest["note"],
            shard_of=Shard(**shard) if shard else None,
        )
        if check and plan.fingerprint != manifest["fingerprint"]:
            raise PLAN.damaged(path, "its content does not have the fingerprint in its manifest")
        if not check and not shard:
            sealed = partial(_sealed, path, manifest["fingerprint"], unread)
            object.__setattr__(plan, "sealed", sealed)
    return plan


def write_text(
    path: Path,
    meta: Mapping[str, Any],
    epochs: Iterable[tuple[Mapping[str, Any], Iterable[MicrobatchSpec]]],
) -> Path:
    """A plan as text: `meta.json`, and one `epoch_<n>.jsonl` for each header and its batches."""
    with atomic_folder(path, "meta.json", '"tokenizer_hash"') as folder:
        (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
        for number, (header, batches) in enumerate(epochs):
            with (folder / f"epoch_{number}.jsonl").open("w") as file:
                file.write(json.dumps(header) + "\n")
                file.writelines(_line(batch) for batch in batches)
    return path


def _line(batch: MicrobatchSpec) -> str:
    fields = {
        "index": batch.index,
        "samples": batch.samples,
        "packs": batch.packs,
        "bucket_id": batch.bucket_id,
        "max_len": batch.max_len,
        "starts": batch.starts.tolist(),
        "lengths": batch.lengths.tolist(),
        "weight": batch.weight,
    }
    return json.dumps(fields) + "\n"


def _sealed(
    path: Path, fingerprint: str, unread: dict[str, tuple[dict[str, Any], NDArray[Any]]]
) -> str:
    """The fingerprint in the manifest, if the arrays are those that it was written with.

    To hash them is several times quicker than to put a million names into canonical order.
    """
    for name, (entry, array) in unread.items():
        PLAN.check_array(path, name, entry, array)
    return fingerprint


@contextmanager
def _fitting(path: Path) -> Iterator[None]:
    """A manifest that is sealed, but not as we seal them, is a damaged plan like any other."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, BatchwrightError):
            raise
        raise PLAN.damaged(path, f"its manifest does not fit version {VERSION}: {error}") from None


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
