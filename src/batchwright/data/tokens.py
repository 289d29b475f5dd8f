"""The tokens of a whole data set, made once and mapped from then on."""

import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.data.build import Build, EncodedChunk
from batchwright.data.build.journal import Journal, Record
from batchwright.data.build.known import Known, columns_of
from batchwright.data.entries import Entries
from batchwright.data.ids import Ids
from batchwright.data.lengths import Lengths
from batchwright.data.rows.sample import Sample
from batchwright.data.rows.source import OnBadRow, Source
from batchwright.data.tokenizers.tokenizer import Tokenizer
from batchwright.errors import BadFile, CannotWrite
from batchwright.sealed import SealedFolder, write_array

__all__ = ["TokenStore"]

STORE = SealedFolder("batchwright.tokens", 1, "token store", "delete it and train again")
JOURNAL = "batchwright.tokens.partial"
LARGE: dict[str, np.dtype[Any]] = {"tokens": np.dtype("<i4"), "mask": np.dtype("u1")}
"""Only their size is checked when a store is opened: to read all of them would take too long."""

COPY_ITEMS = 1 << 22

log = logging.getLogger(__name__)


class TokenStore:
    """Samples by number, straight from a mapped file: reading one touches nothing else.

    `store(item)` is the sample; `lengths` are those of all samples, as a plan wants them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        fields = STORE.read(path)
        try:
            arrays = {
                name: STORE.open_array(
                    path, name, entry, check=name not in LARGE, scattered=name in LARGE
                )
                for name, entry in fields["files"].items()
            }
            self._tokens: NDArray[np.int32] = arrays["tokens"]
            self._mask: NDArray[np.uint8] = arrays["mask"]
            self._offsets: NDArray[np.int64] = arrays["offsets"]
            ids = Ids.numbered(len(self._offsets) - 1)
            if "id_offsets" in arrays:
                ids = Ids.from_arrays(arrays["id_offsets"], arrays["id_data"])
            self.skipped: int = fields["skipped"]
            self.lengths = Lengths(
                values=np.diff(self._offsets).astype(np.int32),
                ids=ids,
                dataset_hash=fields["dataset_hash"],
                tokenizer_hash=fields["tokenizer_hash"],
            )
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, BadFile):
                raise
            raise STORE.damaged(path, f"its manifest lacks {error}") from None

    @classmethod
    def build(
        cls,
        source: Source,
        tokenizer: Tokenizer,
        path: Path,
        *,
        on_bad_row: OnBadRow = "fail",
        workers: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> "TokenStore":
        """Tokenise every row into a folder, whole or not at all.

        An interrupted build resumes: rows whose id, content and tokenizer are the same are not
        tokenised again. The folder is the same whatever the number of workers and however often
        the build was interrupted.
        """
        with cls.building(
            source, tokenizer, path, on_bad_row=on_bad_row, workers=workers, progress=progress
        ) as store:
            return store

    @classmethod
    @contextmanager
    def building(
        cls,
        source: Source,
        tokenizer: Tokenizer,
        path: Path,
        *,
        on_bad_row: OnBadRow = "fail",
        workers: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Iterator["TokenStore"]:
        """`build` for a larger task: should that fail, trying again tokenises nothing again.

        What a resumed build needs is deleted when the block ends without an error.
        """
        STORE.check_replaceable(path)
        with _Unfinished.beside(path, tokenizer) as unfinished:
            build = Build(
                source,
                tokenizer,
                unfinished.known,
                on_bad_row=on_bad_row,
                workers=workers,
                keep_tokens=True,
                progress=progress,
            )
            for chunk in build:
                unfinished.append(chunk)
            _write(path, build.entries(), unfinished, build.skipped.count)
            yield cls(path)

    def __len__(self) -> int:
        return len(self.lengths)

    def __call__(self, item: int) -> Sample:
        first, last = int(self._offsets[item]), int(self._offsets[item + 1])
        return Sample(
            input_ids=self._tokens[first:last],
            loss_mask=self._mask[first:last],
            sample_id=self.lengths.ids[item],
        )


class _Unfinished:
    """Tokens in the order they were made, in a folder beside the store, and their journal.

    A chunk's tokens are written before its record, which holds their checksum: what a killed
    build left behind the last record is cut off.
    """

    def __init__(self, folder: Path, tokenizer_hash: str) -> None:
        self._folder = folder
        self._journal = Journal(folder / "journal.jsonl", JOURNAL, tokenizer_hash)
        self._files = {name: (folder / f"{name}.bin").open("a+b", 0) for name in LARGE}
        for file in self._files.values():
            file.seek(0)
        sizes, columns = [np.zeros(1, np.int64)], []
        for record in self._journal.replay(self._is_intact):
            columns.append(columns_of(record))
            sizes.append(columns[-1][2].astype(np.int64))
        self.known = Known.of(columns)
        self._sizes = sizes
        self._places: list[NDArray[np.int64]] = []
        self._count = len(self.known)
        for name, file in self._files.items():
            file.truncate(sum(int(part.sum()) for part in sizes) * LARGE[name].itemsize)

    @classmethod
    @contextmanager
    def beside(cls, path: Path, tokenizer: Tokenizer) -> Iterator["_Unfinished"]:
        """Kept when the block ends with an error, if there is anything to keep; else deleted."""
        self = cls(path.with_name(f"{path.name}.partial"), tokenizer.fingerprint)
        if len(self.known):
            log.warning("resuming: %s rows are tokenised already", f"{len(self.known):,}")
        try:
            yield self
        except BaseException:
            self._close(keep=not self._journal.is_empty)
            raise
        self._close(keep=False)

    def append(self, chunk: EncodedChunk) -> None:
        """Add the rows tokenised now; the others are here already."""
        new = chunk.is_new
        places = chunk.places.copy()
        places[new] = self._count + np.arange(int(new.sum()))
        self._count += int(new.sum())
        self._places.append(places)
        self._sizes.append(chunk.lengths[new].astype(np.int64))
        pieces: dict[str, NDArray[Any]] = {"tokens": chunk.tokens, "mask": chunk.mask}
        raw = {name: _bytes(values, name) for name, values in pieces.items()}
        try:
            for name, file in self._files.items():
                view = memoryview(raw[name])
                while view:
                    view = view[file.write(view) :]
        except OSError as error:
            raise CannotWrite(
                f"cannot write {self._folder}: {error.strerror}; free space and run again: "
                f"it resumes from here"
            ) from None
        self._journal.append(*chunk.record(), _checksum(*raw.values()))

    def copy(self, folder: Path, name: str) -> dict[str, Any]:
        """Write the tokens or the mask of every row, in the order of the rows."""
        offsets = np.cumsum(np.concatenate(self._sizes))
        places = np.concatenate(self._places)
        made = np.memmap(self._folder / f"{name}.bin", LARGE[name], "r")
        # Rows stand as they were made unless the data changed in between: one run is usual.
        bounds = [0, *(np.flatnonzero(np.diff(places) != 1) + 1).tolist(), len(places)]
        hasher, size = hashlib.sha256(), 0
        with (folder / f"{name}.bin").open("wb") as file:
            for first, stop in pairwise(bounds):
                end = int(offsets[places[stop - 1] + 1])
                for at in range(int(offsets[places[first]]), end, COPY_ITEMS):
                    raw = made[at : min(at + COPY_ITEMS, end)].tobytes()
                    file.write(raw)
                    hasher.update(raw)
                    size += len(raw) // LARGE[name].itemsize
        return {"dtype": LARGE[name].str, "shape": [size], "sha256": hasher.hexdigest()}

    def _is_intact(self, record: Record) -> bool:
        items = sum(record[1])
        raw = [file.read(items * LARGE[name].itemsize) for name, file in self._files.items()]
        return record[3:] == (_checksum(*raw),)

    def _close(self, *, keep: bool) -> None:
        for file in self._files.values():
            file.close()
        if keep:
            self._journal.close()
            return
        for name in self._files:
            (self._folder / f"{name}.bin").unlink(missing_ok=True)
        self._journal.remove()
        with suppress(OSError):
            self._folder.rmdir()


def _write(path: Path, entries: Entries, unfinished: _Unfinished, skipped: int) -> None:
    with STORE.replacing(path) as folder:
        files = {name: unfinished.copy(folder, name) for name in LARGE}
        offsets = np.concatenate([[0], np.cumsum(entries.lengths, dtype=np.int64)])
        files["offsets"] = write_array(folder, "offsets", offsets)
        if entries.ids.arrays is not None:
            files["id_offsets"] = write_array(folder, "id_offsets", entries.ids.arrays[0])
            files["id_data"] = write_array(folder, "id_data", entries.ids.arrays[1])
        STORE.write(
            folder,
            {
                "dataset_hash": entries.dataset_hash,
                "tokenizer_hash": entries.tokenizer_hash,
                "skipped": skipped,
                "files": files,
            },
        )


def _bytes(values: NDArray[Any], name: str) -> bytes:
    return np.ascontiguousarray(values, LARGE[name]).tobytes()


def _checksum(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]
