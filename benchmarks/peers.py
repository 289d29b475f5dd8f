"""How each peer is reached. Imports happen inside, in the child that measures the peer."""

import ast
import heapq
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["function_of", "lightbinpack", "trl_dataset", "trl_table"]


def trl_table(lengths: NDArray[np.int32], tokens: bool) -> Any:
    """The arrow table TRL packs. Without `tokens` its rows have lengths but no contents.

    A list of nulls takes no memory, so TRL's own function then does its binning and next to
    nothing else.
    """
    import pyarrow as pa

    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    total = int(offsets[-1])
    values = pa.array(np.zeros(total, np.int8)) if tokens else pa.nulls(total)
    # 32-bit offsets, as datasets writes them, as long as they can hold the total.
    kind, width = (pa.ListArray, np.int32) if total < 2**31 else (pa.LargeListArray, np.int64)
    return pa.table({"input_ids": kind.from_arrays(pa.array(offsets.astype(width)), values)})


def trl_dataset(lengths: NDArray[np.int32]) -> Any:
    """The same as a `datasets.Dataset` with contents, which is what TRL's users hold."""
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    return Dataset(trl_table(lengths, tokens=True))


def lightbinpack(name: str) -> Callable[..., list[list[int]]]:
    import lightbinpack

    function: Callable[..., list[list[int]]] = getattr(lightbinpack, name)
    return function


def function_of(package: str, file: str, *names: str) -> list[Callable[..., Any]]:
    """Functions and classes compiled from a file of an installed package, without importing it.

    For functions that need the standard library alone, in packages that import a whole
    training stack on the way to them.
    """
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"No module named {package!r}")
    path = Path(spec.submodule_search_locations[0]) / file
    tree = ast.parse(path.read_text())
    wanted = [node for node in tree.body if getattr(node, "name", None) in names]
    scope: dict[str, Any] = {"heapq": heapq}
    exec(compile(ast.Module(wanted, []), str(path), "exec"), scope)
    return [scope[name] for name in names]
