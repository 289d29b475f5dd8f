"""Named arrays in one block of memory, found by the same names in Python and in kernels.

Numba inspects every array argument at every call, and counts references to each at calls between
kernels; for small batches the first, for large ones the second takes as long as the step. So a
kernel takes a whole block as one argument and opens it with `view`. A block holds no address, only
where each array begins and its shape: copied or pickled, it is a block of its own.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar, get_args, get_type_hints

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload
from numba.np.arrayobj import populate_array
from numba.np.numpy_support import from_dtype
from numpy.typing import NDArray

__all__ = ["Block", "aligned", "allocate", "fields", "pack", "stamp", "view"]

Block = NDArray[np.int64]
"""The `stamp` of its layout; a row (first byte, three lengths) for each array; the arrays."""

T = TypeVar("T", bound=tuple[Any, ...])

WORD = 8
LINE = 64
"""Bytes of a word of a block, and of a line of the processor's cache."""

ROW = 4
"""Words of the header for each array."""


@cache
def fields(kind: Any) -> tuple[tuple[np.dtype[Any], int], ...]:
    """The type and the number of dimensions of each array of a layout, as it is annotated.

    A layout is a NamedTuple whose fields are `Annotated[NDArray[<scalar type>], <dimensions>]`.
    """
    hints = get_type_hints(kind, include_extras=True)
    found = []
    for name in kind._fields:
        array, dimensions = get_args(hints[name])
        (scalar,) = get_args(get_args(array)[1])
        found.append((np.dtype(scalar), int(dimensions)))
    return tuple(found)


def allocate(kind: Any, shapes: Mapping[str, tuple[int, ...]]) -> Block:
    """A block of zeros for arrays of these shapes."""
    return _block(kind, [shapes[name] for name in kind._fields], range(len(kind._fields)))


def pack(arrays: tuple[NDArray[Any], ...]) -> Block:
    """A block with copies of the arrays of a layout; one that is there twice is stored once."""
    kind = type(arrays)
    block = _block(kind, [array.shape for array in arrays], [id(array) for array in arrays])
    for target, array in zip(view(kind, block), arrays, strict=True):
        target[...] = array
    return block


def aligned(words: int) -> Block:
    """Zeros that begin at a line of the cache.

    In one piece: for large ones numpy asks the system for huge pages, and a step that goes through
    thousands of slots in many small pieces would spend its time on finding pages.
    """
    whole = np.zeros(words + LINE // WORD, np.int64)
    first = (-whole.ctypes.data % LINE) // WORD
    return whole[first : first + words]


def view(kind: type[T], block: Block) -> T:
    """The arrays of a block; they are the block's own memory. Kernels may call it too.

    In a kernel the arrays do not keep the block alive: they must not outlive the call.
    """
    parts = []
    for number, (dtype, dimensions) in enumerate(fields(kind)):
        start, *lengths = block[ROW * number + 1 : ROW * (number + 1) + 1].tolist()
        shape = lengths[:dimensions]
        size = dtype.itemsize * int(np.prod(shape))
        parts.append(block.view(np.uint8)[start : start + size].view(dtype).reshape(shape))
    return kind(*parts)


def stamp(kind: Any) -> int:
    """A number that changes with the names, types and dimensions of a layout.

    Machine code that is cached on disk knows the layout it was compiled for, and numba does not
    notice when another file changes: a kernel compares this before it reads a block.
    """
    return zlib.crc32(repr((kind._fields, fields(kind))).encode())


def _block(kind: Any, shapes: Sequence[tuple[int, ...]], keys: Sequence[int]) -> Block:
    """A block of zeros; arrays of the same key share their memory."""
    header = np.ones((len(shapes), ROW), np.int64)
    starts: dict[int, int] = {}
    end = _lines(WORD * (1 + header.size))
    for row, shape, key, (dtype, dimensions) in zip(
        header, shapes, keys, fields(kind), strict=True
    ):
        assert len(shape) == dimensions
        row[0] = starts.setdefault(key, end)
        row[1 : 1 + dimensions] = shape
        if row[0] == end:
            end += _lines(dtype.itemsize * int(np.prod(shape)))
    block = aligned(end // WORD)
    block[0] = stamp(kind)
    block[1 : 1 + header.size] = header.ravel()
    return block


def _lines(size: int) -> int:
    """At least `size` bytes and one line, in whole lines."""
    return max(1, -(-size // LINE)) * LINE


@overload(view, strict=False)  # type: ignore[untyped-decorator]
def _view_in_kernels(kind: Any, block: Any) -> Callable[..., Any]:
    return lambda kind, block: _arrays(kind, block)


@intrinsic  # type: ignore[untyped-decorator]
def _arrays(_: Any, kind: Any, block: Any) -> tuple[Any, Callable[..., Any]]:
    layout = fields(kind.instance_class)
    arrays = [types.Array(from_dtype(dtype), dimensions, "C") for dtype, dimensions in layout]
    result = types.BaseTuple.from_types(arrays, kind.instance_class)

    def generate(context: Any, builder: Any, _: Any, given: Sequence[Any]) -> Any:
        memory = context.make_array(block)(context, builder, given[1]).data
        made = []
        for number, (array, (dtype, dimensions)) in enumerate(zip(arrays, layout, strict=True)):
            row = [
                builder.load(cgutils.gep(builder, memory, ROW * number + 1 + column))
                for column in range(1 + dimensions)
            ]
            itemsize = context.get_constant(types.intp, dtype.itemsize)
            strides = [itemsize]
            for length in row[:1:-1]:
                strides.insert(0, builder.mul(strides[0], length))
            part = context.make_array(array)(context, builder)
            start = cgutils.pointer_add(builder, memory, row[0])
            populate_array(
                part,
                data=builder.bitcast(start, part.data.type),
                shape=row[1:],
                strides=strides,
                itemsize=itemsize,
                meminfo=None,
            )
            made.append(part._getvalue())
        return context.make_tuple(builder, result, made)

    return result(kind, block), generate
