"""An order of samples that depends on their ids alone, not on the order they were given in."""

import numpy as np
from numpy.typing import NDArray

from batchwright.data.ids import Ids
from batchwright.errors import DuplicateId
from batchwright.jit import interpreted, kernel, quicker_without_numba

__all__ = ["canonical_ids", "canonical_order"]


def canonical_order(ids: Ids) -> NDArray[np.int32] | None:
    """Samples in their canonical order; None is the order they stand in.

    Ids that are the numbers 0 .. n - 1 go by number, all others by their hash.

    >>> canonical_order(Ids.of(["2", "0", "1"])).tolist()
    [1, 2, 0]
    """
    arrays = ids.arrays
    if arrays is None:
        return None
    offsets, data = arrays
    # Nearly always the first id tells that they are no numbers.
    if data[: offsets[1]].tobytes().isdigit():
        with interpreted(quicker_without_numba(2 * data.size)):
            numbers = _row_numbers(offsets, data)
        if numbers.size:
            return np.argsort(numbers).astype(np.int32)
    keys = ids.keys()
    order = np.argsort(keys, kind="stable")
    for at in np.flatnonzero(keys[order[1:]] == keys[order[:-1]]):
        if ids[int(order[at])] == ids[int(order[at + 1])]:
            raise DuplicateId(
                f"two samples are called {ids[int(order[at])]!r}; every id must be there once"
            )
        # Two ids with one hash: their own letters decide, whichever came first.
        order[[at, at + 1]] = sorted(order[[at, at + 1]].tolist(), key=ids.__getitem__)
    return order.astype(np.int32)


def canonical_ids(ids: Ids, order: NDArray[np.int32] | None) -> Ids:
    """The same ids, standing in their canonical order."""
    if order is None or ids.arrays is None:
        return ids
    gather = _gathered_by_numpy if quicker_without_numba(0.5 * len(ids)) else _gathered
    return Ids.from_arrays(*gather(*ids.arrays, order))


@kernel
def _row_numbers(offsets: NDArray[np.int64], data: NDArray[np.uint8]) -> NDArray[np.int64]:
    """The number each id spells if they are 0 .. n - 1 in some order, else an empty array."""
    n = offsets.size - 1
    numbers = np.empty(n, np.int64)
    seen = np.zeros(n, np.bool_)
    for item in range(n):
        first, last = offsets[item], offsets[item + 1]
        leading_zero = last - first > 1 and data[first] == 48
        if last == first or last - first > 18 or leading_zero:
            return np.empty(0, np.int64)
        number = 0
        for at in range(first, last):
            digit = np.int64(data[at]) - 48
            if digit < 0 or digit > 9:
                return np.empty(0, np.int64)
            number = number * 10 + digit
        if number >= n or seen[number]:
            return np.empty(0, np.int64)
        seen[number] = True
        numbers[item] = number
    return numbers


def _gathered_by_numpy(
    offsets: NDArray[np.int64], data: NDArray[np.uint8], order: NDArray[np.int32]
) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """`_gathered` for as long as numba is not worth loading."""
    sizes = np.diff(offsets)[order]
    new_offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes)))
    return new_offsets, data[
        np.repeat(offsets[order] - new_offsets[:-1], sizes) + np.arange(data.size)
    ]


@kernel
def _gathered(
    offsets: NDArray[np.int64], data: NDArray[np.uint8], order: NDArray[np.int32]
) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    new_offsets = np.zeros(offsets.size, np.int64)
    new_data = np.empty(data.size, np.uint8)
    at = 0
    for place in range(order.size):
        first, last = offsets[order[place]], offsets[order[place] + 1]
        for byte in range(first, last):
            new_data[at + byte - first] = data[byte]
        at += last - first
        new_offsets[place + 1] = at
    return new_offsets, new_data
