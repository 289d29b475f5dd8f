"""One decorator for every numba kernel, and when a kernel is worth loading numba for."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar, cast

__all__ = ["DEBUG", "PLAIN", "cache_folder", "interpreted", "kernel", "quicker_without_numba"]

F = TypeVar("F", bound=Callable[..., object])

DEBUG = os.environ.get("BATCHWRIGHT_DEBUG_KERNELS", "0") not in ("", "0")
"""Whether kernels check the bounds of every array access: an IndexError instead of a crash."""

PLAIN = os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0")
"""Whether numba was told to compile nothing, as under a debugger: kernels are then interpreted."""

_PATIENCE_US = 250_000
"""What a process may spend without numba: less than importing it takes."""

_spent_us = 0
_started = False
"""Whether a kernel was compiled or loaded. That numba was imported, by whomever, says little: its
first kernel takes longer than its import."""
_interpreting = ContextVar("interpreting", default=False)


def kernel(function: F) -> F:
    """Compile `function` on its first call and cache the machine code for the next process.

    Numba itself is imported by that call. Single-threaded: on shared machines numba's parallel
    loops were far slower than one thread. The plain function stays reachable as `.py_func`. In a
    kernel, loop instead of assigning an array to a slice: numba compiles the message for shapes
    that differ, with all of its texts, for three seconds.
    """
    return cast(F, _Kernel(function))


def cache_folder(function: Callable[..., object]) -> str | None:
    """Where numba keeps the machine code of a kernel; None where no folder takes it."""
    if PLAIN:
        return None
    return cast(str | None, cast(Any, function).dispatcher._cache.cache_path)


def quicker_without_numba(microseconds: float) -> bool:
    """Whether to do something that takes plain numpy this long without loading numba for it.

    Never once a kernel has run, nor once a process has done many small things: then it pays.
    Always where kernels are interpreted.
    """
    global _spent_us
    if _interpreting.get():
        return True
    if _started or _spent_us + microseconds > _PATIENCE_US:
        return False
    _spent_us += int(microseconds)
    return True


def interpreted(on: bool = True) -> contextlib.AbstractContextManager[None]:
    """Inside, kernels run as the plain Python they are written in, if `on`."""
    return _interpreted() if on else _AS_BEFORE


@contextlib.contextmanager
def _interpreted() -> Iterator[None]:
    import numpy as np

    token = _interpreting.set(True)
    try:
        # Kernels compute hashes in 64 bits that wrap around.
        with np.errstate(over="ignore"):
            yield
    finally:
        _interpreting.reset(token)


_AS_BEFORE = contextlib.nullcontext()


class _Kernel:
    """A function that is compiled when it is called, or when another kernel calls it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.py_func = function

    @functools.cached_property
    def dispatcher(self) -> Callable[..., Any]:
        import numba

        global _started
        _started = True
        if DEBUG:
            # Numba's cache does not tell code with checks from code without: another folder.
            base = numba.config.CACHE_DIR or Path(__file__).parent / "__pycache__"
            if Path(base).name != "debug":
                numba.config.CACHE_DIR = str(Path(base) / "debug")
        options = {"boundscheck": DEBUG, "nogil": True}
        try:
            compiled = numba.njit(cache=True, **options)(self.py_func)
        except RuntimeError:
            # No folder takes the machine code, neither the package's nor the user's.
            compiled = numba.njit(**options)(self.py_func)
        if not DEBUG:
            from batchwright.ahead import Ahead

            name = self.py_func.__name__
            compiled._cache = Ahead(compiled._cache, self.py_func.__module__, name)
        return cast(Callable[..., Any], compiled)

    @property
    def _numba_type_(self) -> Any:
        # How numba asks a global of a kernel what it is: a kernel calls the compiled one.
        return self.dispatcher._numba_type_  # type: ignore[attr-defined]

    def __call__(self, *args: Any) -> Any:
        if _interpreting.get():
            return self.py_func(*args)
        if PLAIN:
            with _interpreted():
                return self.py_func(*args)
        try:
            return self.dispatcher(*args)
        except SystemError as error:
            # What Ctrl-C becomes if it is heard while numba makes Python objects of the result:
            # one such error for each of several arrays.
            cause: BaseException | None = error
            while isinstance(cause, SystemError):
                cause = cause.__cause__
            if isinstance(cause, KeyboardInterrupt):
                raise cause from None
            raise
