"""A token store: a sealed folder with the tokens, loss masks, ids and lengths of a data set."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.data.entries import Entries
from batchwright.data.ids import Ids
from batchwright.data.lengths import Lengths
from batchwright.data.rows.sample import Sample
from batchwright.data.rows.source import Skipped
from batchwright.errors import BadFile
from batchwright.files import link_or_copy
from batchwright.sealed import SealedFolder

__all__ = ["LARGE", "STORE", "TokenStore"]

STORE = SealedFolder("batchwright.tokens", 2, "token store", "delete it and run again")

LARGE: dict[str, np.dtype[Any]] = {"tokens": np.dtype("<i4"), "mask": np.dtype("u1")}
"""Only their size is checked when a store is opened: to read all of them would take too long."""


class TokenStore:
    """Samples by number, straight from a mapped file: reading one touches nothing else.

    `store(item)` is the sample; `lengths` are those of all samples, as a plan wants them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        fields = STORE.read(path)
        try:
            self.name: str = fields["source"]
            arrays = {
                name: STORE.open_array(
                    path, name, entry, check=name not in LARGE, scattered=name in LARGE
                )
                for name, entry in fields["files"].items()
            }
            self.tokens: NDArray[np.int32] = arrays["tokens"]
            self.mask: NDArray[np.uint8] = arrays["mask"]
            self._offsets: NDArray[np.int64] = arrays["offsets"]
            ids = Ids.numbered(len(self._offsets) - 1)
            if "id_offsets" in arrays:
                ids = Ids.from_arrays(arrays["id_offsets"], arrays["id_data"])
            self.skipped = Skipped(**fields["skipped"])
            self.repeated = Skipped(**fields["repeated"])
            self.entries = Entries(
                ids=ids,
                lengths=np.diff(self._offsets).astype(np.int32),
                content=arrays["content"],
                rows=arrays.get("rows"),
                tokenizer_hash=fields["tokenizer_hash"],
                loss=arrays["loss"],
            )
            self.lengths = Lengths.of_entries(self.entries, fields["dataset_hash"])
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, BadFile):
                raise
            raise STORE.damaged(path, f"its manifest lacks {error}") from None

    def __len__(self) -> int:
        return len(self.lengths)

    def __call__(self, item: int) -> Sample:
        first, last = int(self._offsets[item]), int(self._offsets[item + 1])
        return Sample(
            input_ids=self.tokens[first:last],
            loss_mask=self.mask[first:last],
            sample_id=self.lengths.ids[item],
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # Mapped again by whoever unpickles it.
        return TokenStore, (self.path,)

    def link(self, path: Path) -> None:
        """Make `path` the same store, sharing its files where the file system can.

        What is linked stays when the store itself is pruned.
        """
        with STORE.replacing(path) as folder:
            for file in self.path.iterdir():
                link_or_copy(file, folder / file.name)
