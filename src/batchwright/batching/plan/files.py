"""Plans on disk: a folder of little-endian arrays that are mapped, and a manifest.

The folder is written under a temporary name and renamed, so it is whole or not there. The
manifest carries its own checksum and one for each array. Opening checks the manifest, every
file's size and the content of all arrays that steer the order; asking for the fingerprint checks
the samples and their ids as well, `verify_plan` everything and that the manifest tells the truth.
"""

import dataclasses
import json
import operator
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from batchwright.batching.config import BatchingConfig
from batchwright.batching.plan.order import order_of
from batchwright.batching.plan.plan import VERSION, BatchPlan, Counts
from batchwright.batching.plan.shards import Shard
from batchwright.data.ids import Ids
from batchwright.errors import BatchwrightError
from batchwright.files import atomic_folder
from batchwright.sealed import SealedFolder, array_bytes, write_array

__all__ = ["check_files", "export_plan", "load_plan", "save_plan", "save_shards"]

PLAN = SealedFolder(
    "batchwright.plan",
    VERSION,
    "batch plan",
    "build it again: batchwright data batchplan build",
)
_READ_LATER = {"items", "starts", "lengths", "id_data", "id_offsets", "skipped", "difficulty"}
"""Large arrays whose values index nothing unchecked; the others are hashed on opening."""


def save_plan(plan: BatchPlan, path: Path) -> Path:
    """Write the plan as a folder, whole or not at all."""
    with PLAN.replacing(path) as folder:
        files = {name: write_array(folder, name, array) for name, array in _arrays(plan).items()}
        _write_manifest(folder, plan, files)
    return path


def save_shards(plan: BatchPlan, world_size: int, path: Path, balance: Any = "cost") -> list[Path]:
    """Write `rank_0` to `rank_<world_size - 1>`, each a plan of its own.

    The arrays are the same for all ranks and are linked, not copied, where the disk can.
    """
    plan.shard(0, world_size, balance=balance)  # refuses a wrong world before anything is touched
    with PLAN.replacing(path, "rank_0/") as folder:
        files: dict[str, Any] = {}
        for rank in range(world_size):
            shard = plan.shard(rank, world_size, balance=balance)
            own = folder / f"rank_{rank}"
            own.mkdir()
            for name, array in _arrays(plan).items():
                if rank == 0:
                    files[name] = write_array(own, name, array)
                else:
                    _link(folder / "rank_0" / f"{name}.bin", own / f"{name}.bin")
            _write_manifest(own, shard, files)
    return [path / f"rank_{rank}" for rank in range(world_size)]


def load_plan(path: Path) -> BatchPlan:
    """Open a plan; arrays are mapped, so this takes milliseconds for any size."""
    manifest = PLAN.read(path)
    with _fitting(path):
        arrays = {
            name: PLAN.open_array(path, name, entry, check=name not in _READ_LATER)
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
        plan = BatchPlan(
            skipped=arrays.pop("skipped"),
            difficulty=arrays.pop("difficulty", None),
            order=order_of(manifest["kind"], config, arrays),
            ids=ids,
            config=config,
            num_epochs=operator.index(manifest["num_epochs"]),
            counts=Counts(**manifest["counts"]),
            dataset_hash=manifest["dataset_hash"],
            tokenizer_hash=manifest["tokenizer_hash"],
            sources=tuple((n, s, w) for n, s, w in manifest["sources"]),
            note=manifest["note"],
            shard_of=Shard(**shard) if shard else None,
        )
        if not shard:
            sealed = partial(_sealed, path, manifest["fingerprint"], unread)
            object.__setattr__(plan, "sealed", sealed)
    return plan


def _sealed(
    path: Path, fingerprint: str, unread: dict[str, tuple[dict[str, Any], NDArray[Any]]]
) -> str:
    """The fingerprint in the manifest, if the arrays are those that it was written with.

    To hash them is several times quicker than to put a million names into canonical order.
    """
    for name, (entry, array) in unread.items():
        PLAN.check_array(path, name, entry, array)
    return fingerprint


def check_files(path: Path) -> int:
    """Hash every file of a plan against its manifest; the number of bytes, or `BadFile`."""
    manifest = PLAN.read(path)
    with _fitting(path):
        for name, entry in manifest["files"].items():
            PLAN.open_array(path, name, entry, check=True)
        # A copy does not know what the manifest says and works its fingerprint out.
        plan = dataclasses.replace(load_plan(path))
        if plan.fingerprint != manifest["fingerprint"]:
            raise PLAN.damaged(path, "its content does not have the fingerprint in its manifest")
        return sum(array_bytes(entry) for entry in manifest["files"].values())


@contextmanager
def _fitting(path: Path) -> Iterator[None]:
    """A manifest that is sealed, but not as we seal them, is a damaged plan like any other."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, BatchwrightError):
            raise
        raise PLAN.damaged(path, f"its manifest does not fit version {VERSION}: {error}") from None


def export_plan(plan: BatchPlan, path: Path) -> Path:
    """The plan as text: `meta.json` and one `epoch_<n>.jsonl` for each epoch."""
    with atomic_folder(path, "meta.json", '"tokenizer_hash"') as folder:
        meta = {
            "fingerprint": plan.fingerprint,
            "dataset_hash": plan.dataset_hash,
            "tokenizer_hash": plan.tokenizer_hash,
            "num_epochs": plan.num_epochs,
            "config": plan.config.model_dump(mode="json"),
            "counts": asdict(plan.counts),
            "sources": [list(source) for source in plan.sources],
            "shard": asdict(plan.shard_of) if plan.shard_of else None,
        }
        (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
        for epoch in range(plan.num_epochs):
            with (folder / f"epoch_{epoch}.jsonl").open("w") as file:
                file.writelines(line + "\n" for line in _epoch_lines(plan, epoch))
    return path


def _epoch_lines(plan: BatchPlan, epoch: int) -> Iterator[str]:
    whole = plan.epoch(epoch)
    header = {
        "epoch": epoch,
        "seed": plan.config.seed,
        "total_samples": whole.total_samples,
        "total_tokens": whole.total_tokens,
        "num_microbatches": len(whole),
    }
    yield json.dumps(header)
    for batch in whole:
        yield json.dumps(
            {
                "index": batch.index,
                "samples": batch.samples,
                "packs": batch.packs,
                "bucket_id": batch.bucket_id,
                "max_len": batch.max_len,
                "starts": batch.starts.tolist(),
                "lengths": batch.lengths.tolist(),
                "weight": batch.weight,
            }
        )


def _arrays(plan: BatchPlan) -> dict[str, NDArray[Any]]:
    arrays: dict[str, NDArray[Any]] = {**plan.order.arrays(), "skipped": plan.skipped}
    if plan.ids.arrays is not None:
        arrays["id_offsets"], arrays["id_data"] = plan.ids.arrays
    if plan.difficulty is not None:
        arrays["difficulty"] = plan.difficulty
    return arrays


def _write_manifest(folder: Path, plan: BatchPlan, files: dict[str, Any]) -> None:
    PLAN.write(
        folder,
        {
            "kind": plan.order.kind,
            "fingerprint": plan.fingerprint,
            "order": plan.roots[0],
            "num_epochs": plan.num_epochs,
            "dataset_hash": plan.dataset_hash,
            "tokenizer_hash": plan.tokenizer_hash,
            "config": plan.config.model_dump(mode="json"),
            "counts": asdict(plan.counts),
            "sources": [list(source) for source in plan.sources],
            "note": plan.note,
            "shard": asdict(plan.shard_of) if plan.shard_of else None,
            "files": files,
        },
    )


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
