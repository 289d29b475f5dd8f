"""Rows that were encoded before, so that none is tokenised twice."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from batchwright.data.build.journal import Record
from batchwright.data.ids import Ids
from batchwright.jit import kernel
from batchwright.permutation import mix

__all__ = ["Known", "columns_of"]

Columns = tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.int32]]
"""Id keys, content hashes and lengths."""


@dataclass(frozen=True, slots=True)
class Known:
    """Lengths found by sample id and content hash together; `places` number them as given.

    Sorted arrays instead of a dictionary: a tenth of its size, and worker processes map them
    from one file instead of each holding a copy.
    """

    keys: NDArray[np.uint64]
    content: NDArray[np.uint64]
    lengths: NDArray[np.int32]
    places: NDArray[np.int64]

    @classmethod
    def of(cls, parts: Iterable[Columns]) -> "Known":
        given = list(parts)
        if not given:
            hashes = np.empty(0, np.uint64)
            return cls(hashes, hashes, np.empty(0, np.int32), np.empty(0, np.int64))
        id_keys, content, lengths = (np.concatenate(column) for column in zip(*given, strict=True))
        keys = _entry_keys(id_keys, content)
        order = np.argsort(keys, kind="stable")
        return cls(keys[order], content[order], lengths[order], order)

    def __len__(self) -> int:
        return len(self.keys)

    def find(
        self, ids: list[str], content: NDArray[np.uint64]
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """The length and the place of each row; 0 and -1 where it is not known."""
        if not len(self) or not ids:
            return np.zeros(len(ids), np.int32), np.full(len(ids), -1, np.int64)
        keys = _entry_keys(Ids.of(ids).keys(), content)
        at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        # An entry without a content hash (0) was added by hand and proves nothing.
        same = (self.keys[at] == keys) & (self.content[at] == content) & (content != 0)
        lengths = np.where(same, self.lengths[at], 0).astype(np.int32)
        return lengths, np.where(same, self.places[at], -1)

    def save(self, folder: Path) -> None:
        """Write the arrays where worker processes `load` them."""
        for name in self.__slots__:
            np.save(folder / f"{name}.npy", getattr(self, name))

    @classmethod
    def load(cls, folder: Path) -> "Known":
        """Map what `save` wrote."""
        return cls(*(np.load(folder / f"{name}.npy", mmap_mode="r") for name in cls.__slots__))


def columns_of(record: Record) -> Columns:
    """The columns of a journal's record."""
    ids, lengths, content = record[:3]
    return Ids.of(ids).keys(), np.array(content, np.uint64), np.array(lengths, np.int32)


@kernel
def _entry_keys(id_keys: NDArray[np.uint64], content: NDArray[np.uint64]) -> NDArray[np.uint64]:
    out = np.empty(len(id_keys), np.uint64)
    for item in range(len(out)):
        out[item] = mix(id_keys[item], content[item])
    return out
