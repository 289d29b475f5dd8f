"""The tokens of a whole data set, made once and mapped from then on."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.data.ids import Ids
from batchwright.data.lengths import Lengths
from batchwright.data.lengths.files import Entries
from batchwright.data.rows.sample import Sample, content_hash, encode_rows
from batchwright.data.rows.source import OnBadRow, Skipped, Source, good_rows
from batchwright.data.tokenizers import Tokenizer
from batchwright.errors import BadFile, DuplicateId
from batchwright.sealed import SealedFolder, write_array

__all__ = ["TokenStore"]

STORE = SealedFolder("batchwright.tokens", 1, "token store", "delete it and train again")
CHUNK_ROWS = 1024
LARGE = ("tokens", "mask")
"""Only their size is checked when a store is opened: to read all of them would take too long."""


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
        progress: Callable[[int, int], None] | None = None,
    ) -> "TokenStore":
        """Tokenise every row into a folder, whole or not at all."""
        names: list[str] = []
        rows: list[int] = []
        lengths: list[int] = []
        content: list[int] = []
        skipped = Skipped()
        with STORE.replacing(path) as folder:
            tokens, mask = _Growing(folder, "tokens", "<i4"), _Growing(folder, "mask", "u1")
            with tokens, mask:
                for start in range(0, len(source), CHUNK_ROWS):
                    stop = min(start + CHUNK_ROWS, len(source))
                    read = list(source.chunk(start, stop).rows())
                    raw = dict(read)
                    encoded = encode_rows(read, tokenizer)
                    for item, sample in good_rows(source, encoded, on_bad_row, skipped):
                        tokens.write(sample.input_ids)
                        mask.write(sample.loss_mask)
                        names.append(sample.sample_id)
                        rows.append(item)
                        lengths.append(len(sample))
                        content.append(content_hash(raw[item]))  # type: ignore[arg-type]
                    if progress is not None:
                        progress(stop, len(source))
            if not names:
                raise BadFile(f"{source.name} has no row that can be trained on")
            ids = Ids.of(names)
            twice = ids.first_duplicate()
            if twice is not None:
                raise DuplicateId(
                    f"id {ids[twice[0]]!r} stands at {source.where(rows[twice[0]])} and at "
                    f"{source.where(rows[twice[1]])}; every id must be there once"
                )
            sizes = np.array(lengths, np.int32)
            hashes = np.array(content, np.uint64)
            entries = Entries(ids, sizes, hashes, None, tokenizer.fingerprint)
            files: dict[str, Any] = {"tokens": tokens.entry(), "mask": mask.entry()}
            offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])
            files["offsets"] = write_array(folder, "offsets", offsets)
            if ids.arrays is not None:
                files["id_offsets"] = write_array(folder, "id_offsets", ids.arrays[0])
                files["id_data"] = write_array(folder, "id_data", ids.arrays[1])
            STORE.write(
                folder,
                {
                    "dataset_hash": entries.dataset_hash,
                    "tokenizer_hash": tokenizer.fingerprint,
                    "skipped": skipped.count,
                    "files": files,
                },
            )
        return cls(path)

    def __len__(self) -> int:
        return len(self.lengths)

    def __call__(self, item: int) -> Sample:
        first, last = int(self._offsets[item]), int(self._offsets[item + 1])
        return Sample(
            input_ids=self._tokens[first:last],
            loss_mask=self._mask[first:last],
            sample_id=self.lengths.ids[item],
        )


class _Growing:
    """An array that is written piece by piece and knows its manifest entry at the end."""

    def __init__(self, folder: Path, name: str, dtype: str) -> None:
        self._file = (folder / f"{name}.bin").open("wb")
        self._dtype = np.dtype(dtype)
        self._hasher = hashlib.sha256()
        self._size = 0

    def write(self, values: NDArray[Any]) -> None:
        raw = np.ascontiguousarray(values, self._dtype).tobytes()
        self._file.write(raw)
        self._hasher.update(raw)
        self._size += len(values)

    def entry(self) -> dict[str, Any]:
        return {
            "dtype": self._dtype.str,
            "shape": [self._size],
            "sha256": self._hasher.hexdigest(),
        }

    def __enter__(self) -> "_Growing":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
