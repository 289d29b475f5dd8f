"""A token store: a sealed folder with the tokens, loss masks, ids and lengths of a data set."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.data.entries import Entries
from batchwright.data.ids import Ids
from batchwright.data.lengths import LONGEST, Lengths
from batchwright.data.rows.sample import Sample
from batchwright.data.rows.source import Skipped
from batchwright.errors import BadFile
from batchwright.files import link_or_copy
from batchwright.sealed import SUMS, SealedFolder

__all__ = ["LARGE", "STORE", "TokenStore"]

STORE = SealedFolder("batchwright.tokens", 4, "token store", "delete it and run again")

LARGE: dict[str, np.dtype[Any]] = {"tokens": np.dtype("<i4"), "mask": np.dtype("u1")}
"""Read page by page, as samples of them are used: all of them would take too long to open."""
SMALL = {
    "offsets": "<i8",
    "loss": "<i4",
    "content": "<u8",
    "rows": "<i8",
    "id_offsets": "<i8",
    "id_data": "u1",
}


class TokenStore:
    """Samples by number, straight from a mapped file: reading one touches nothing else.

    `store(item)` is the sample, every byte of it checked; `lengths` are those of all samples, as a
    plan wants them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        fields = STORE.read(path)
        try:
            self.name = str(fields["source"])
            files = fields["files"]
            sums = {
                name: STORE.open_array(path, name + SUMS, files[name + SUMS], dtype="<u4")
                for name in LARGE
            }
            large = {
                name: STORE.open_array(path, name, files[name], dtype=kind.str, sums=sums[name])
                for name, kind in LARGE.items()
            }
            self.tokens, self.mask = large["tokens"], large["mask"]
            arrays = {
                name: STORE.open_array(path, name, files[name], dtype=kind).whole()
                for name, kind in SMALL.items()
                if name in files
            }
            self._offsets: NDArray[np.int64] = arrays["offsets"]
            lengths = np.diff(self._offsets)
            ids = Ids.numbered(len(lengths))
            if "id_offsets" in arrays:
                ids = Ids.from_arrays(arrays["id_offsets"], arrays["id_data"])
            _check(len(self.tokens), len(self.mask), lengths, len(ids), arrays)
            self.skipped = Skipped(**fields["skipped"])
            self.repeated = Skipped(**fields["repeated"])
            self.entries = Entries(
                ids=ids,
                lengths=lengths.astype(np.int32),
                content=arrays["content"],
                rows=arrays.get("rows"),
                tokenizer_hash=str(fields["tokenizer_hash"]),
                loss=arrays["loss"],
            )
            self.lengths = Lengths.of_entries(self.entries, str(fields["dataset_hash"]))
        except (LookupError, TypeError, ValueError) as error:
            if isinstance(error, BadFile):
                raise
            raise STORE.damaged(path, f"its manifest does not fit: {error}") from None

    def __len__(self) -> int:
        return len(self.lengths)

    def __call__(self, item: int) -> Sample:
        first, last = int(self._offsets[item]), int(self._offsets[item + 1])
        return Sample(
            input_ids=self.tokens.part(first, last),
            loss_mask=self.mask.part(first, last),
            sample_id=self.lengths.ids[item],
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # Mapped again by whoever unpickles it.
        return TokenStore, (self.path,)

    def check(self) -> None:
        """Read all of it; `BadFile` if anything is damaged."""
        self.tokens.whole()
        self.mask.whole()

    def link(self, path: Path) -> None:
        """Make `path` the same store, sharing its files where the file system can.

        What is linked stays when the store itself is pruned.
        """
        with STORE.replacing(path) as folder:
            for file in self.path.iterdir():
                link_or_copy(file, folder / file.name)


def _check(
    tokens: int, mask: int, lengths: NDArray[np.int64], ids: int, arrays: dict[str, NDArray[Any]]
) -> None:
    """`ValueError` unless the arrays are of the same samples."""
    n, offsets = len(lengths), arrays["offsets"]
    if offsets.ndim != 1 or not len(offsets) or offsets[0] != 0 or offsets[-1] != tokens:
        raise ValueError("its offsets do not span its tokens")
    if mask != tokens or (lengths < 1).any() or (lengths > LONGEST).any():
        raise ValueError("its masks or lengths are not of its tokens")
    rows = arrays.get("rows", arrays["content"])
    if ids != n or arrays["content"].shape != (n,) or rows.shape != (n,):
        raise ValueError("its arrays differ in length")
    loss = arrays["loss"]
    if loss.shape != (n, 2) or (loss < 0).any() or (loss.sum(1, dtype=np.int64) > lengths).any():
        raise ValueError("its loss is outside its tokens")
