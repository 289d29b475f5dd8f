"""Kernels compiled when the package is installed, so that no command waits for a compiler.

    python -m batchwright.ahead

compiles every kernel of `ahead.txt` with the argument types named there into the folder `compiled`
of the package. `make setup` runs it, and so does the build of a wheel. What is found there is used
only where it fits: by the same Python and numba, on a processor that has what it was compiled for,
and with the sources it was compiled from. Everywhere else kernels compile on their first call and
go to numba's own cache, as they do with other argument types.
"""

import argparse
import functools
import hashlib
import itertools
import json
import os
import pickle
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from batchwright.jit import PLAIN

__all__ = ["COMPILED", "Ahead", "build", "listed", "main", "read", "spelled", "why_not"]

PACKAGE = Path(__file__).parent
COMPILED = PACKAGE / "compiled"
_LIST = PACKAGE / "ahead.txt"
_MANIFEST = "manifest.json"
_PORTABLE = "x86-64-v3"
"""Processors since 2013 to 2015; code for it runs on every later one."""
_PORTABLE_HAS = ("avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe")

_building = False
"""In a process that compiles ahead all is compiled anew, since what was loaded cannot be saved."""


class Ahead:
    """The cache of one kernel: first what was compiled ahead, then numba's own.

    Takes the place of the cache in a numba dispatcher.
    """

    def __init__(self, cache: Any, module: str, name: str) -> None:
        self._cache = cache
        self._name = f"{module}.{name}"

    def load_overload(self, args: tuple[Any, ...], context: Any) -> Any:
        """The compiled code for these argument types, or None."""
        if _building:
            return None
        if not why_not():
            path = COMPILED / _file_name(self._name, args)
            if path.exists():
                from numba.core.compiler import CompileResult

                # The runtime that the code calls; numba's own cache does the same.
                context.refresh()
                return CompileResult._rebuild(context, *pickle.loads(path.read_bytes()))
        return self._cache.load_overload(args, context)

    def save_overload(self, args: tuple[Any, ...], result: Any) -> None:
        """Give what was compiled to numba's own cache."""
        if not _building:
            self._cache.save_overload(args, result)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


@functools.cache
def why_not() -> str:
    """Why this process cannot use what was compiled ahead; nothing if it can."""
    import numba

    if PLAIN:
        return "NUMBA_DISABLE_JIT is set"
    if numba.config.CPU_NAME is not None or numba.config.CPU_FEATURES is not None:
        return "NUMBA_CPU_NAME or NUMBA_CPU_FEATURES is set"
    try:
        manifest = json.loads((COMPILED / _MANIFEST).read_bytes())
    except OSError:
        # Not there, or the package is an archive.
        return "nothing is compiled ahead"
    for key, here in _versions().items():
        if manifest[key] != here:
            return f"compiled for {key} {manifest[key]}, this is {here}"
    if manifest["processor"] not in (_host(), _portable()):
        return f"compiled for {manifest['processor']}, this is {_host()}"
    for name, digest in manifest["sources"].items():
        if _digest(PACKAGE / name) != digest:
            return f"{name} has changed since"
    return ""


def listed() -> dict[str, list[str]]:
    """The argument types that each kernel is compiled ahead for, by module and function."""
    found: dict[str, list[str]] = {}
    for line in _LIST.read_text("ascii").splitlines():
        name, _, types = line.partition(" ")
        found.setdefault(name, []).append(types)
    return found


def build(folder: Path = COMPILED) -> int:
    """Compile all that is listed into `folder`, and replace what was there; how many."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    names = listed()
    # A module's kernels call each other: what one process has compiled serves the next of them.
    modules = sorted({name.rpartition(".")[0] for name in names})
    processor = _portable() or _host()
    if _portable():
        os.environ |= {"NUMBA_CPU_NAME": _PORTABLE, "NUMBA_CPU_FEATURES": ""}
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=".compiled-", dir=folder.parent))
    try:
        workers = min(len(os.sched_getaffinity(0)), len(modules))
        with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
            parts = [pool.submit(_compile, module, str(fresh)) for module in modules]
            sources = {name for part in parts for name in part.result()}
        manifest = {
            **_versions(),
            "processor": processor,
            "sources": {name: _digest(PACKAGE / name) for name in sorted(sources)},
        }
        (fresh / _MANIFEST).write_text(json.dumps(manifest, indent=1))
        fresh.chmod(0o755)
        shutil.rmtree(folder, ignore_errors=True)
        fresh.rename(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return sum(map(len, names.values()))


def _compile(module: str, folder: str) -> list[str]:
    """Compile the listed kernels of a module; the source files that took part."""
    from numba.core.serialize import dumps

    global _building
    _building = True
    for name, signatures in listed().items():
        if name.rpartition(".")[0] != module:
            continue
        _bare_packages(module)
        kernel = getattr(import_module(module), name.rpartition(".")[2])
        for signature in signatures:
            args = read(signature)
            kernel.dispatcher.compile(args)
            result = kernel.dispatcher.overloads[args]
            if result.library.has_dynamic_globals:
                raise RuntimeError(f"{name} holds an address of this process; it cannot be kept")
            data = dumps(result._reduce())
            Path(folder, _file_name(name, args)).write_bytes(data)
    own = [m for name, m in sys.modules.items() if name.split(".")[0] == "batchwright"]
    files = [getattr(module, "__file__", None) for module in own]
    # This one says what is compiled, not how.
    return [Path(f).relative_to(PACKAGE).as_posix() for f in files if f and f != __file__]


def _bare_packages(module: str) -> None:
    """Import the packages of `module` without running them.

    They import torch and more, which kernels do not need and a wheel is built without.
    """
    for package in itertools.accumulate(module.split(".")[:-1], "{}.{}".format):
        if package not in sys.modules:
            bare = sys.modules[package] = ModuleType(package)
            bare.__path__ = [str(PACKAGE.parent.joinpath(*package.split(".")))]


def spelled(args: Iterable[Any]) -> str:
    """Argument types as one line that `read` understands."""
    from numba import types

    def one(kind: Any) -> str:
        if not isinstance(kind, types.BaseNamedTuple):
            return repr(kind)
        found = kind.instance_class
        parts = ", ".join(map(one, kind.types))
        return f"named('{found.__module__}', '{found.__name__}', {parts})"

    return f"({', '.join(map(one, args))},)"


def read(text: str) -> tuple[Any, ...]:
    """The argument types that `spelled` wrote."""
    from numba import types

    def named(module: str, name: str, *parts: Any) -> Any:
        found = getattr(import_module(module), name)
        if len(set(parts)) == 1:
            return types.NamedUniTuple(parts[0], len(parts), found)
        return types.NamedTuple(parts, found)

    args: tuple[Any, ...] = eval(text, {**vars(types), "named": named})
    return args


def _file_name(name: str, args: Iterable[Any]) -> str:
    types = hashlib.sha256(spelled(args).encode()).hexdigest()[:16]
    return f"{name}-{types}.bin"


def _versions() -> dict[str, str]:
    import numba
    import numpy as np

    python = f"{platform.python_implementation()} {sys.version_info[0]}.{sys.version_info[1]}"
    return {"python": python, "numba": numba.__version__, "numpy": np.__version__.split(".")[0]}


@functools.cache
def _host() -> str:
    from llvmlite import binding

    return f"{binding.get_host_cpu_name()} {binding.get_process_triple()}"


@functools.cache
def _portable() -> str:
    """The common processor that this one can stand in for, or nothing."""
    from llvmlite import binding

    triple = binding.get_process_triple()
    if not triple.startswith("x86_64"):
        return ""
    features = binding.get_host_cpu_features()
    return f"{_PORTABLE} {triple}" if all(map(features.get, _PORTABLE_HAS)) else ""


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else "not there"


def main() -> None:
    """Compile into the folder that is given, else into the package."""
    parser = argparse.ArgumentParser("python -m batchwright.ahead", description=main.__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=COMPILED)
    folder = parser.parse_args().folder
    if PLAIN:
        parser.error("NUMBA_DISABLE_JIT is set, so nothing can be compiled; unset it")
    start = time.perf_counter()
    count = build(folder)
    print(f"compiled {count} kernels ahead in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    # By its name, so that the processes it starts share this module with the kernels.
    import_module("batchwright.ahead").main()
