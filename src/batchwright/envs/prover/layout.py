"""Many arrays as one argument: a table of where they stand and of their shapes.

Numba looks at the type of every array at every call, and counts its references at calls between
kernels as well; for small batches the first and for large ones the second takes as long as the
step. Arrays taken from a table are bare memory: whoever makes the table keeps them alive.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from batchwright.errors import ConfigError
from batchwright.jit import kernel

__all__ = ["carve", "one", "table_of", "three", "two"]

DIMENSIONS = 3


LINE = 64
"""Bytes of a line of the processor's cache."""


def carve(*wanted: tuple[tuple[int, ...], Any]) -> list[NDArray[Any]]:
    """Arrays of zeros of the given shapes and types, side by side in one block of memory.

    For large blocks numpy asks the system for huge pages. In many small ones a step that goes
    through thousands of slots would spend its time on finding pages.
    """
    sizes = [int(np.prod(shape)) * np.dtype(kind).itemsize for shape, kind in wanted]
    starts = np.cumsum([0, *(-(-size // LINE) * LINE for size in sizes)]).tolist()
    block = np.zeros(starts[-1] + LINE, np.uint8)
    block = block[-block.ctypes.data % LINE :]
    return [
        block[start : start + size].view(kind).reshape(shape)
        for (shape, kind), start, size in zip(wanted, starts, sizes, strict=False)
    ]


def table_of(arrays: Sequence[NDArray[Any]]) -> NDArray[np.int64]:
    """Rows (address, three lengths) of arrays in C order with up to three dimensions."""
    out = np.ones((len(arrays), 1 + DIMENSIONS), np.int64)
    for row, array in zip(out, arrays, strict=True):
        if not array.flags.c_contiguous or array.ndim > DIMENSIONS:
            raise ConfigError(f"an array of strides {array.strides} cannot stand in a table")
        row[0] = array.ctypes.data
        row[1 : 1 + array.ndim] = array.shape
    return out


@intrinsic  # type: ignore[untyped-decorator]
def _pointer(context: Any, address: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(_: Any, builder: Any, __: Any, given: Sequence[Any]) -> Any:
        return builder.inttoptr(given[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


@kernel
def one(table: NDArray[np.int64], row: int, kind: Any) -> Any:
    """The array of one dimension in a row of the table; `kind` is its type of numbers."""
    return carray(_pointer(table[row, 0]), (table[row, 1],), kind)


@kernel
def two(table: NDArray[np.int64], row: int, kind: Any) -> Any:
    return carray(_pointer(table[row, 0]), (table[row, 1], table[row, 2]), kind)


@kernel
def three(table: NDArray[np.int64], row: int, kind: Any) -> Any:
    shape = (table[row, 1], table[row, 2], table[row, 3])
    return carray(_pointer(table[row, 0]), shape, kind)
