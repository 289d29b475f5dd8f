"""Lookups in the indexes of the facts: the numba kernels under `facts`."""

import numpy as np
from numpy.typing import NDArray

from batchwright.jit import kernel, quicker_without_numba

__all__ = ["contains", "contains_by_numpy", "found", "lower_bound", "pointers"]

Ints = NDArray[np.int32]


@kernel
def lower_bound(values: Ints, low: int, high: int, wanted: int) -> int:
    """The first place in the ascending `values[low:high]` that is not below `wanted`."""
    while low < high:
        middle = (low + high) >> 1
        if values[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low


@kernel
def found(ps_ptr: Ints, ps_obj: Ints, n: int, h: int, p: int, t: int) -> bool:
    """Whether p(h, t) is a fact; `n` is the number of entities."""
    row = np.int64(p) * n + h
    end = ps_ptr[row + 1]
    place = lower_bound(ps_obj, ps_ptr[row], end, t)
    return bool(place < end and ps_obj[place] == t)


@kernel
def contains(ps_ptr: Ints, ps_obj: Ints, n: int, triples: Ints) -> NDArray[np.bool_]:
    """`found` for each of `triples` (head, predicate, tail); ids out of range are no facts."""
    out = np.zeros(triples.shape[0], np.bool_)
    for i in range(triples.shape[0]):
        h, p, t = triples[i, 0], triples[i, 1], triples[i, 2]
        if 0 <= h < n and p >= 0 and (p + 1) * np.int64(n) < ps_ptr.size:
            out[i] = found(ps_ptr, ps_obj, n, h, p, t)
    return out


def contains_by_numpy(ps_ptr: Ints, ps_obj: Ints, n: int, triples: Ints) -> NDArray[np.bool_]:
    """`contains` for as long as numba is not worth loading."""
    h, p, t = triples.T.astype(np.int64)
    facts = np.repeat(np.arange(len(ps_ptr) - 1) * n, np.diff(ps_ptr)) + ps_obj
    wanted = (p * n + h) * n + t
    place = np.searchsorted(facts, wanted)
    inside = (h >= 0) & (h < n) & (t >= 0) & (t < n) & (p >= 0) & (place < len(facts))
    inside[inside] = facts[place[inside]] == wanted[inside]
    return inside


def pointers(rows: NDArray[np.int64], size: int) -> Ints:
    """Where each of `size` groups begins in the ascending group numbers `rows`, [size + 1]."""
    if quicker_without_numba(0.1 * size):
        return np.searchsorted(rows, np.arange(size + 1)).astype(np.int32)
    return _pointers(rows, size)


@kernel
def _pointers(rows: NDArray[np.int64], size: int) -> Ints:
    out = np.zeros(size + 1, np.int32)
    for row in rows:
        out[row + 1] += 1
    for row in range(size):
        out[row + 1] += out[row]
    return out
