"""Batches as files: NPZ shards without pickle, with checksums and the plan's fingerprint."""

import math
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from batchwright.batching.collation import CollatedBatch, SampleReader, collate
from batchwright.batching.plan.microbatch import Pulled
from batchwright.batching.plan.plan import BatchPlan
from batchwright.data.rows.sample import Sample
from batchwright.errors import ConfigError, Mismatch, UnknownSample
from batchwright.files import cannot_read
from batchwright.remote import fetched, local_output
from batchwright.sealed import SealedFolder, sha256_of

__all__ = ["BatchReader", "BatchWriter"]

BATCHES = SealedFolder(
    "batchwright.batches",
    2,
    "folder of batches",
    "generate it again: batchwright data batch generate",
)
_ARRAYS = ("input_ids", "labels", "position_ids", "segment_ids", "cu_seqlens", "lengths")


class BatchWriter:
    """Writes the batches of a plan as `epoch_<e>/shard_<n>.npz`, `per_file` batches in each.

    `samples` gives the sample of a data row: a function of the row number, or a mapping from
    sample id to `Sample` or to {"input_ids", "loss_mask"}.
    """

    def __init__(
        self,
        plan: BatchPlan,
        samples: SampleReader | Mapping[str, Any],
        output_dir: Path | str,
        *,
        pad_id: int = 0,
        per_file: int = 64,
    ) -> None:
        if per_file < 1:
            raise ConfigError(f"per_file must be at least 1, got {per_file}")
        self.plan = plan
        self.output_dir = Path(output_dir)
        self._read = samples if callable(samples) else _from_mapping(plan, samples)
        self._pad_id = pad_id
        self._per_file = per_file

    def write_all(self, progress: Callable[[int, int], None] | None = None) -> "BatchReader":
        """Write every epoch of the plan, whole or not at all."""
        sizes = [len(self.plan.epoch(epoch)) for epoch in range(self.plan.num_epochs)]
        done = 0
        with local_output(self.output_dir) as local, BATCHES.replacing(local) as folder:
            files: dict[str, str] = {}
            for epoch in range(self.plan.num_epochs):
                (folder / f"epoch_{epoch}").mkdir()
                for number, group in enumerate(self._groups(epoch)):
                    name = f"epoch_{epoch}/shard_{number:05d}.npz"
                    arrays = {k: v for i, batch in enumerate(group) for k, v in _flat(i, batch)}
                    np.savez(folder / name, allow_pickle=False, **arrays)
                    files[name] = sha256_of(folder / name)
                    done += len(group)
                    if progress:
                        progress(done, sum(sizes))
            BATCHES.write(
                folder,
                {
                    "fingerprint": self.plan.fingerprint,
                    "num_epochs": self.plan.num_epochs,
                    "batches": sizes,
                    "per_file": self._per_file,
                    "files": files,
                },
            )
        return BatchReader(self.output_dir)

    def _groups(self, epoch: int) -> Iterator[list[CollatedBatch]]:
        group: list[CollatedBatch] = []
        for batch in self.plan.iter_epoch(epoch):
            group.append(collate(batch, self._read, pad_id=self._pad_id))
            if len(group) == self._per_file:
                yield group
                group = []
        if group:
            yield group


class BatchReader:
    """Reads what `BatchWriter` wrote; each file is checked against its checksum when opened."""

    def __init__(self, path: Path | str) -> None:
        self.path = fetched(path)
        self._manifest = BATCHES.read(self.path)
        try:
            counts = [*self._manifest["batches"], self._manifest["per_file"]]
            fits = all(type(count) is int and count >= 0 for count in counts) and counts[-1] > 0
            fits = fits and self._manifest["num_epochs"] == len(counts) - 1
            fits = fits and isinstance(self._manifest["fingerprint"], str)
        except (KeyError, TypeError):
            fits = False
        if not fits:
            raise BATCHES.damaged(self.path, "its manifest does not count its batches")
        self._open: tuple[str, dict[str, NDArray[Any]]] | None = None

    @property
    def num_epochs(self) -> int:
        return int(self._manifest["num_epochs"])

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the plan the batches were written from."""
        return str(self._manifest["fingerprint"])

    def num_batches(self, epoch: int = 0) -> int:
        if not 0 <= epoch < self.num_epochs:
            raise UnknownSample(f"epoch must be between 0 and {self.num_epochs - 1}, got {epoch}")
        return int(self._manifest["batches"][epoch])

    def get_batch(self, epoch: int, index: int) -> CollatedBatch:
        """Batch `index` of an epoch, in the order the plan gives them."""
        count = self.num_batches(epoch)
        if not 0 <= index < count:
            raise UnknownSample(f"epoch {epoch} has batches 0 to {count - 1}, got {index}")
        number, inside = divmod(index, int(self._manifest["per_file"]))
        arrays = self._arrays(f"epoch_{epoch}/shard_{number:05d}.npz")
        try:
            return _batch(inside, arrays)
        except (KeyError, TypeError, ValueError) as error:
            reason = f"batch {index} of epoch {epoch} is not as it was written: {error}"
            raise BATCHES.damaged(self.path, reason) from None

    def iter_epoch(self, epoch: int = 0) -> Pulled[CollatedBatch]:
        count = self.num_batches(epoch)
        return Pulled(lambda: (self.get_batch(epoch, index) for index in range(count)))

    def verify_fingerprint(self, plan: BatchPlan) -> None:
        """`Mismatch` unless the batches were written from this plan."""
        if plan.fingerprint != self.fingerprint:
            raise Mismatch(
                f"the batches in {self.path} come from plan {self.fingerprint[:16]}, not "
                f"{plan.fingerprint[:16]}; generate them again"
            )

    def check_files(self) -> int:
        """Check every file; the number of files, or `BadFile`."""
        names = list(self._manifest.get("files", ()))
        for name in names:
            self._arrays(name)
        return len(names)

    def _arrays(self, name: str) -> dict[str, NDArray[Any]]:
        if self._open is None or self._open[0] != name:
            file = BATCHES.check_file(self.path, self._manifest, name)
            try:
                self._open = name, _loaded(file)
            except OSError as error:
                raise cannot_read(file, error) from error
            except (ValueError, zipfile.BadZipFile, EOFError, MemoryError) as error:
                raise BATCHES.damaged(self.path, f"{name} cannot be read: {error}") from None
        return self._open[1]


def _flat(number: int, batch: CollatedBatch) -> Iterator[tuple[str, NDArray[Any]]]:
    for name in _ARRAYS:
        yield f"{number}.{name}", getattr(batch, name)
    yield f"{number}.sample_ids", np.array(batch.sample_ids, dtype=np.str_)
    place = (batch.epoch, batch.index, batch.bucket_id, batch.max_seqlen)
    yield f"{number}.place", np.array(place, np.int64)
    yield f"{number}.weight", np.array(batch.weight, np.float64)


def _batch(number: int, arrays: dict[str, NDArray[Any]]) -> CollatedBatch:
    epoch, index, bucket_id, max_seqlen = arrays[f"{number}.place"].tolist()
    return CollatedBatch(
        **{name: arrays[f"{number}.{name}"] for name in _ARRAYS},
        sample_ids=tuple(arrays[f"{number}.sample_ids"].tolist()),
        epoch=epoch,
        index=index,
        bucket_id=bucket_id,
        max_seqlen=max_seqlen,
        weight=float(arrays[f"{number}.weight"]),
    )


def _from_mapping(plan: BatchPlan, samples: Mapping[str, Any]) -> SampleReader:
    def read(item: int) -> Sample:
        name = plan.ids[item]
        if name not in samples:
            raise UnknownSample(f"the plan names sample {name!r}, which was not given")
        found = samples[name]
        if isinstance(found, Sample):
            return found
        ids = np.asarray(found["input_ids"], np.int32)
        mask = np.asarray(found.get("loss_mask", np.ones(len(ids), np.uint8)), np.uint8)
        return Sample(input_ids=ids, loss_mask=mask, sample_id=name)

    return read


def _loaded(file: Path) -> dict[str, NDArray[Any]]:
    """The arrays of an NPZ file as `BatchWriter` writes them, which compresses nothing.

    A small file can claim to hold large arrays only by compression or a wrong header.
    """
    size = file.stat().st_size
    with zipfile.ZipFile(file) as archive:
        if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):
            raise ValueError("it is compressed")
        if sum(part.file_size for part in archive.infolist()) > size:
            raise ValueError("its parts are larger than it")
        for part in archive.infolist():
            with archive.open(part) as stream:
                _check_header(stream, part.file_size)
    with np.load(file, allow_pickle=False) as stored:
        return {key: stored[key] for key in stored.files}


def _check_header(stream: IO[bytes], size: int) -> None:
    version = np.lib.format.read_magic(stream)
    read = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in read:
        raise ValueError(f"it has arrays of version {version}")
    shape, _, dtype = read[version](stream)
    if math.prod(shape) * dtype.itemsize > size:
        raise ValueError(f"it claims an array of shape {shape} in {size:,} bytes")
