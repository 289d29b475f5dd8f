"""One decorator for every numba kernel."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

import numba

__all__ = ["DEBUG", "kernel"]

F = TypeVar("F", bound=Callable[..., object])

DEBUG = os.environ.get("BATCHWRIGHT_DEBUG_KERNELS", "0") not in ("", "0")
"""Whether kernels check the bounds of every array access: an IndexError instead of a crash."""

if DEBUG:
    # Numba's cache does not tell apart code with and without checks: it gets a folder of its own.
    base = numba.config.CACHE_DIR or Path(__file__).parent / "__pycache__"
    numba.config.CACHE_DIR = str(Path(base) / "debug")


def kernel(function: F) -> F:
    """Compile `function` on first call and keep the machine code on disk for the next process.

    Single-threaded: on shared machines numba's parallel loops were far slower than one thread.
    The plain function stays reachable as `.py_func`.
    """
    return cast(F, numba.njit(cache=True, boundscheck=DEBUG, nogil=True)(function))
