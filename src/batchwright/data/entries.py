"""Samples without their tokens: ids, lengths and content hashes, as arrays."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from batchwright.data.ids import Ids
from batchwright.fingerprint import digest, digest_array

__all__ = ["Entries", "dataset_hash", "mixture_hash"]


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
    order = np.lexsort((content, keys))
    return digest("dataset", digest_array(keys[order]), digest_array(content[order]))[:16]


def mixture_hash(parts: Mapping[str, str]) -> str:
    """Identity of several named data sets together, independent of their order."""
    return digest("mixture", [[name, parts[name]] for name in sorted(parts)])[:16]
