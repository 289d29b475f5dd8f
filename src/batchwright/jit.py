"""One decorator for every numba kernel."""

from collections.abc import Callable
from typing import TypeVar, cast

import numba

__all__ = ["kernel"]

F = TypeVar("F", bound=Callable[..., object])


def kernel(function: F) -> F:
    """Compile `function` on first call and keep the machine code on disk for the next process.

    Single-threaded: on shared machines numba's parallel loops were far slower than one thread.
    The plain function stays reachable as `.py_func`.
    """
    return cast(F, numba.njit(cache=True, boundscheck=False, nogil=True)(function))
