"""Lookups in the indexes of the facts: the numba kernels under `facts`."""

import numpy as np
from numpy.typing import NDArray

from batchwright.jit import kernel

__all__ = ["contains", "found", "lower_bound", "pointers"]

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


@kernel
def pointers(rows: NDArray[np.int64], size: int) -> Ints:
    """Where each of `size` groups begins in the ascending group numbers `rows`, [size + 1]."""
    out = np.zeros(size + 1, np.int32)
    for row in rows:
        out[row + 1] += 1
    for row in range(size):
        out[row + 1] += out[row]
    return out
