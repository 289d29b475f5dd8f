"""Where the rows of an index begin and end, as one array, however many of them are empty.

The rows of facts are predicates times entities: 2.5 million entities and 535 predicates have 1.3
billion, of which some millions hold a fact. So an index has one of two forms, and `row_span` reads
both:

    dense     row r is `ptr[r]` to `ptr[r + 1]`; `ptr[0]` is 0
    hashed    a table of the rows that hold something, with open addressing; `ptr[0]` is -1.
              A slot is 4 numbers from `ptr[4]` on: two halves of the row, begin and end

Groups of `width` rows, one after the other, are looked up as wholes by `group_span`.
"""

# Kernels annotate numba's 64-bit integers as int; only numba can tell them apart.
# mypy: disable-error-code="arg-type, return-value"

import numpy as np
from numpy.typing import NDArray

from batchwright.jit import kernel, quicker_without_numba
from batchwright.permutation import mix

__all__ = ["group_span", "index_rows", "row_span", "span_of"]

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Number = int | np.int64

DENSE = 2**24
"""Rows up to which an index is dense: 64 MiB."""
PER_ENTRY = 8
"""Rows for each entry up to which it is dense beyond that, as a table would not be smaller."""
GROUP = 1 << 61
"""Keys of whole groups begin here; there are fewer rows."""


def index_rows(rows: Longs, groups: int, width: int) -> Ints:
    """The index of entries whose row numbers, below `groups * width`, are `rows`, ascending."""
    size = groups * width
    if size <= max(DENSE, PER_ENTRY * len(rows)):
        if quicker_without_numba(0.1 * size):
            return np.searchsorted(rows, np.arange(size + 1)).astype(np.int32)
        return _count(rows, size)
    of_groups = rows // width
    parts = [_runs(rows), _runs(of_groups)]
    parts[1][0] += GROUP
    keys, low, high = np.concatenate(parts, axis=1)
    ptr = np.zeros(4 + 4 * (1 << max(1, 2 * len(keys) - 1).bit_length()), np.int32)
    ptr[0] = -1
    _fill(ptr, keys, low, high)
    return ptr


@kernel
def row_span(ptr: Ints, row: Number) -> tuple[int, int]:
    """Where the entries of a row begin and end."""
    if ptr[0] == 0:
        return np.int64(ptr[row]), np.int64(ptr[row + 1])
    at = _slot(ptr, np.int64(row))
    return np.int64(ptr[at + 2]), np.int64(ptr[at + 3])


@kernel
def group_span(ptr: Ints, group: Number, width: int) -> tuple[int, int]:
    """Where the entries of rows `group * width` to `(group + 1) * width` begin and end."""
    if ptr[0] == 0:
        row = np.int64(group) * width
        return np.int64(ptr[row]), np.int64(ptr[row + width])
    at = _slot(ptr, np.int64(GROUP) + group)
    return np.int64(ptr[at + 2]), np.int64(ptr[at + 3])


def span_of(ptr: Ints, row: int, rows: int = 1) -> tuple[int, int]:
    """`row_span`, or of `rows` that are a group `group_span`, without numba if `ptr` is dense."""
    if ptr[0] == 0:
        return int(ptr[row]), int(ptr[row + rows])
    return row_span(ptr, row) if rows == 1 else group_span(ptr, row // rows, rows)


def _runs(numbers: Longs) -> NDArray[np.int64]:
    """Each of the ascending numbers once, and where its run begins and ends, [3, n]."""
    first = np.flatnonzero(np.append(True, numbers[1:] != numbers[:-1]) & (len(numbers) > 0))
    return np.stack([numbers[first], first, np.append(first[1:], len(numbers))[: len(first)]])


@kernel
def _slot(ptr: Ints, key: int) -> int:
    """Where the slot of a key is, or the empty one (begin and end 0) where it would be."""
    most = (ptr.size - 4) // 4 - 1
    upper, lower = key >> 31, key & 0x7FFFFFFF
    at = np.int64(mix(np.uint64(0), np.uint64(key)) & np.uint64(most))
    while ptr[7 + 4 * at] != 0 and (ptr[4 + 4 * at] != upper or ptr[5 + 4 * at] != lower):
        at = (at + 1) & most
    return 4 + 4 * at


@kernel
def _fill(ptr: Ints, keys: Longs, low: Longs, high: Longs) -> None:
    for i in range(len(keys)):
        at = _slot(ptr, keys[i])
        ptr[at] = keys[i] >> 31
        ptr[at + 1] = keys[i] & 0x7FFFFFFF
        ptr[at + 2] = low[i]
        ptr[at + 3] = high[i]


@kernel
def _count(rows: Longs, size: int) -> Ints:
    """Where each of `size` rows begins, and where the last one ends."""
    out = np.zeros(size + 1, np.int32)
    for row in rows:
        out[row + 1] += 1
    for row in range(size):
        out[row + 1] += out[row]
    return out
