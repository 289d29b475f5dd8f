"""Plans on disk: a folder of little-endian arrays that are mapped, and a manifest.

The folder is written under a temporary name and renamed, so it is whole or not there. The
manifest carries its own checksum and those of each array. Opening checks the manifest, every
file's size and the small arrays; the first use of the plan the large ones, bytes and values, and
to open with `check` every byte at once.
"""

import json
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from numpy.typing import NDArray

from batchwright.batching.config import BatchingConfig
from batchwright.batching.plan.microbatch import MicrobatchSpec
from batchwright.batching.plan.order import (
    MAX_EPOCHS,
    Arrays,
    MaterialisedOrder,
    Order,
    VirtualOrder,
    order_of,
)
from batchwright.batching.plan.pieces import Counts
from batchwright.batching.plan.shards import Shard
from batchwright.data.ids import Ids
from batchwright.errors import BadFile, one_line
from batchwright.files import atomic_folder, link_or_copy
from batchwright.sealed import MappedArray, SealedFolder, write_array

__all__ = ["VERSION", "read_plan", "write_plan", "write_shards", "write_text"]

VERSION = 3
"""Of the rules by which an order follows from a plan's arrays."""

PLAN = SealedFolder(
    "batchwright.plan",
    5,
    "batch plan",
    "build it again: batchwright data batchplan build",
)
_BY_SAMPLE = ("difficulty", "groups", "costs_N")
TYPES = {
    **VirtualOrder.TYPES,
    **MaterialisedOrder.TYPES,
    "skipped": "<i4",
    "id_offsets": "<i8",
    "id_data": "u1",
    "difficulty": "<f8",
    "groups": "<i4",
    "costs_N": "<i4",
}
"""The type of every array; each has one dimension."""
_READ_LATER = {
    *("items", "starts", "lengths", "id_data", "id_offsets"),
    *("batch_start", "batch_size", "row_offsets", "batch_rows", "batch_width", "batch_bucket"),
    *("entry_offsets", "entry_position", "entry_count"),
}
"""Arrays that may be large, which nothing needs before the first microbatch; see `read_plan`."""


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
                    link_or_copy(folder / "rank_0" / f"{name}.bin", own / f"{name}.bin")
            PLAN.write(own, {**facts, "files": files})
    return [path / f"rank_{rank}" for rank in range(len(ranks))]


def read_plan(path: Path, make: Callable[..., P], check: bool = False) -> P:
    """Open a plan, which `make` makes of its parts; arrays are mapped: milliseconds for any size.

    What was not read is checked before its first use: the bytes against their checksums, the
    values against the plan, so that no kernel is led out of its arrays. With `check` all that is
    done now, and the content has to give the saved fingerprint.
    """
    manifest = PLAN.read(path)
    with _fitting(path):
        config = BatchingConfig(**manifest["config"])
        counts, shown = (_counts(manifest[name]) for name in ("counts", "shown"))
        mapped = {name: _mapped(path, name, entry) for name, entry in manifest["files"].items()}
        if check:
            for one in mapped.values():
                one.check_all()
        arrays = {
            name: one.unread if name in _READ_LATER and not one.is_small else one.whole()
            for name, one in mapped.items()
        }
        skipped, by_sample = arrays.pop("skipped"), {n: arrays.pop(n, None) for n in _BY_SAMPLE}
        ids = Ids.numbered(counts.samples)
        if "id_offsets" in arrays:
            ids = Ids.from_arrays(arrays.pop("id_offsets"), arrays.pop("id_data"))
        if len(ids) != counts.samples:
            raise ValueError(f"it has {len(ids):,} ids for {counts.samples:,} samples")
        order = order_of(manifest["kind"], config, arrays)

        def prove_ids() -> None:
            for name in ("id_offsets", "id_data"):
                mapped[name].whole()

        def prove() -> None:
            for one in mapped.values():
                one.whole()
            with _fitting(path):
                order.check(counts.samples)
                _check_samples(counts.samples, skipped, by_sample)

        order.prove_first(prove)
        ids.prove_first(prove_ids)
        shard = manifest["shard"]
        plan = make(
            skipped=skipped,
            **by_sample,
            order=order,
            ids=ids,
            config=config,
            num_epochs=_epochs(manifest["num_epochs"]),
            counts=counts,
            shown=shown,
            dataset_hash=str(manifest["dataset_hash"]),
            tokenizer_hash=str(manifest["tokenizer_hash"]),
            sources=tuple(
                (str(name), operator.index(size), float(weight))
                for name, size, weight in manifest["sources"]
            ),
            note=str(manifest["note"]),
            shard_of=Shard(**shard) if shard else None,
        )
        if check:
            order.prove()
            if plan.fingerprint != manifest["fingerprint"]:
                raise PLAN.damaged(
                    path, "its content does not have the fingerprint in its manifest"
                )
        elif not shard:
            sealed = partial(_sealed, str(manifest["fingerprint"]), order)
            object.__setattr__(plan, "sealed", sealed)
    return plan


def _mapped(path: Path, name: str, entry: Mapping[str, Any]) -> MappedArray:
    if name not in TYPES:
        raise PLAN.damaged(path, f"its manifest names an array {name!r}")
    mapped = PLAN.open_array(path, name, entry, dtype=TYPES[name])
    if mapped.unread.ndim != 1:
        raise PLAN.damaged(path, f"{name}.bin is not a list of numbers")
    return mapped


def _check_samples(
    samples: int, skipped: NDArray[Any], by_sample: Mapping[str, NDArray[Any] | None]
) -> None:
    if len(skipped) and not 0 <= skipped.min() <= skipped.max() < samples:
        raise ValueError("it skips samples that are not there")
    for name, values in by_sample.items():
        if values is not None and len(values) != samples:
            raise ValueError(f"{name} has {len(values):,} values for {samples:,} samples")


def _counts(found: Mapping[str, Any]) -> Counts:
    if not all(type(count) is int and count >= 0 for count in found.values()):
        raise ValueError("its counts are not numbers of samples and tokens")
    return Counts(**found)


def _epochs(number: Any) -> int:
    if not 1 <= operator.index(number) <= MAX_EPOCHS:
        raise ValueError(f"num_epochs is {number}")
    return operator.index(number)


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


def _sealed(fingerprint: str, order: Order) -> str:
    """The fingerprint in the manifest, if the arrays are those that it was written with.

    To check them is many times quicker than to put a million names into canonical order.
    """
    order.prove()
    return fingerprint


@contextmanager
def _fitting(path: Path) -> Iterator[None]:
    """A manifest that is sealed, but not as we seal them, is a damaged plan like any other."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        if isinstance(error, BadFile):
            raise
        raise PLAN.damaged(path, f"it is not as plans are written: {one_line(error)}") from None
