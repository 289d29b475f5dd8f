"""How many tokens each sample has."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchwright.data.ids import Ids
from batchwright.errors import BadLength, ConfigError, DuplicateId

__all__ = ["LONGEST", "Lengths"]

LONGEST = 2**31 - 1
"""Lengths are int32 everywhere, so this is the longest a sample may be."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Lengths:
    """The length of every sample, with its id and the hashes of what was measured.

    >>> Lengths.of({"a": 3, "b": 5})
    Lengths(2 samples, 8 tokens, 3 to 5)
    """

    values: NDArray[np.int32]
    ids: Ids
    dataset_hash: str = "unknown"
    tokenizer_hash: str = "unknown"

    @classmethod
    def of(cls, source: "Mapping[str, int] | Lengths | NDArray[np.integer]") -> "Lengths":
        """Lengths from whatever holds them, checked once.

        An array numbers its samples "0", "1", ...; a mapping names them. A length below 1 or
        above 2**31 - 1 is refused with the sample's id, an id that repeats with both places.
        """
        if isinstance(source, Lengths):
            return source
        if isinstance(source, Mapping):
            return cls(*_from_mapping(source))
        array = np.asarray(source)
        if array.ndim != 1:
            raise ConfigError(f"lengths are one row of numbers, got an array of {array.ndim} axes")
        ids = Ids.numbered(len(array))
        return cls(checked_lengths(array, ids), ids)

    def __len__(self) -> int:
        return len(self.values)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Lengths):
            return NotImplemented
        return (
            self.dataset_hash == other.dataset_hash
            and self.tokenizer_hash == other.tokenizer_hash
            and np.array_equal(self.values, other.values)
            and self.ids == other.ids
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        if not len(self):
            return "Lengths(0 samples)"
        tokens = int(self.values.sum(dtype=np.int64))
        return (
            f"Lengths({len(self):,} samples, {tokens:,} tokens, "
            f"{self.values.min():,} to {self.values.max():,})"
        )


def checked_lengths(values: NDArray[np.integer], ids: Ids) -> NDArray[np.int32]:
    """The values as int32, or `BadLength` with the first id whose value is out of range."""
    if values.dtype.kind not in "iu":
        raise BadLength(f"lengths are whole numbers, got an array of {values.dtype}")
    wrong = (values < 1) | (values > LONGEST)
    if wrong.any():
        item = int(wrong.argmax())
        raise BadLength(
            f"sample {ids[item]!r} has length {values[item]}; "
            f"a length is at least 1 and at most {LONGEST:,}"
        )
    return np.ascontiguousarray(values, np.int32)


def checked_ids(ids: Ids) -> Ids:
    """The same ids, or `DuplicateId` with both places of the first that repeats."""
    pair = ids.first_duplicate()
    if pair is not None:
        raise DuplicateId(
            f"sample id {ids[pair[0]]!r} stands twice, as samples {pair[0]} and {pair[1]} "
            f"(from 0); every id must be there once"
        )
    return ids


def _from_mapping(source: Mapping[str, int]) -> tuple[NDArray[np.int32], Ids]:
    for id in source:
        if not isinstance(id, str):
            raise ConfigError(f"sample ids are strings, got {id!r}")
    ids = Ids.of(source)
    # Through Python's integers, so that 2**70 is named instead of overflowing.
    for id, value in source.items():
        if not isinstance(value, int | np.integer) or isinstance(value, bool):
            raise BadLength(f"sample {id!r} has length {value!r}; a length is a whole number")
        if not 1 <= value <= LONGEST:
            raise BadLength(
                f"sample {id!r} has length {value}; a length is at least 1 and at most {LONGEST:,}"
            )
    return np.fromiter(source.values(), np.int32, len(source)), ids
