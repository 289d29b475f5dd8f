"""Samples without their tokens: ids, lengths and content hashes, as arrays."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from batchwright.data.ids import Ids
from batchwright.fingerprint import digest, digest_array

__all__ = ["UNKNOWN", "Entries", "dataset_hash", "hash_of", "mixture_hash"]

UNKNOWN = "unknown"
"""The hash of data of which only the lengths are known."""


@dataclass(frozen=True, eq=False)
class Entries:
    """Every sample of a data set: ids, lengths, content hashes (0: unknown) and row numbers.

    `rows` is None when entry i is row i of the data. `loss` [N, 2] is the first token that is
    predicted with loss (the length, if none is) and how many are; None if that is unknown.
    """

    ids: Ids
    lengths: NDArray[np.int32]
    content: NDArray[np.uint64]
    rows: NDArray[np.int64] | None
    tokenizer_hash: str
    loss: NDArray[np.int32] | None = None

    @cached_property
    def dataset_hash(self) -> str:
        """A digest of the ids and content of all rows, independent of their order."""
        return dataset_hash(self.ids, self.content)


def dataset_hash(ids: Ids, content: NDArray[np.uint64]) -> str:
    """Identity of a data set: its rows by id and content, independent of their order."""
    keys = ids.keys()
    order = np.argsort(keys)
    if (keys[order[1:]] == keys[order[:-1]]).any():
        # Twice the work, and only for ids that repeat, or whose hashes do.
        order = np.lexsort((content, keys))
    return digest("dataset", digest_array(keys[order]), digest_array(content[order]))[:16]


def mixture_hash(parts: Mapping[str, str]) -> str:
    """Identity of several named data sets together, independent of their order.

    Unknown if that of any of them is.
    """
    if UNKNOWN in parts.values():
        return UNKNOWN
    return digest("mixture", [[name, parts[name]] for name in sorted(parts)])[:16]


def hash_of(ids: Ids, content: NDArray[np.uint64], sources: Sequence[tuple[str, int]]) -> str:
    """Identity of samples by the ids that a plan gives them, those of a mixture with its names.

    `sources` are the name and the size of each, in the order in which their samples stand.
    """
    if not sources:
        return dataset_hash(ids, content)
    parts, stop = {}, 0
    for name, size in sources:
        start, stop = stop, stop + size
        own = Ids.of(id.removeprefix(f"{name}/") for id in ids.take(range(start, stop)))
        parts[name] = dataset_hash(own, content[start:stop])
    return mixture_hash(parts)
