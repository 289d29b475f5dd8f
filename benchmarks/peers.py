"""How each peer is reached. Imports happen inside, in the child that measures the peer."""

import ast
import functools
import heapq
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["function_of", "lightbinpack", "mosaic_streaming", "trl_binning", "trl_dataset"]


class _Binned(Exception):
    """Raised where TRL would start to move rows."""


def trl_binning(lengths: NDArray[np.int32], capacity: int) -> Callable[[], list[list[int]]]:
    """TRL's own `_pack_bfd` up to the point where every row has its bin.

    Three arrow calls in it only move or cut tokens: dropping empty rows and cutting overlong
    ones (there are none here) give back what they got, and taking the rows in their new order
    ends the call. What is left is the sort and the loop over a segment tree.
    """
    import pyarrow as pa
    import pyarrow.compute
    from trl import data_utils

    class WithoutTokens:
        def __getattr__(self, name: str) -> Any:
            return getattr(pyarrow.compute, name)

        def filter(self, values: Any, mask: Any) -> Any:
            return values

        def list_slice(self, column: Any, start: int, stop: int) -> Any:
            return column

        def take(self, table: Any, rows: Any) -> Any:
            raise _Binned

    data_utils.pc = WithoutTokens()
    # A list of nulls has lengths and takes no memory.
    table = pa.table({"input_ids": _lists(lengths, pa.nulls)})

    def call() -> list[list[int]]:
        try:
            data_utils._pack_bfd(table, capacity)
        except _Binned as stopped:
            trace = stopped.__traceback__
            while trace is not None:
                if "bins" in trace.tb_frame.f_locals:
                    return [entry["ids"] for entry in trace.tb_frame.f_locals["bins"]]
                trace = trace.tb_next
        raise LookupError("trl no longer keeps its bins where this looks for them")

    return call


def trl_dataset(lengths: NDArray[np.int32]) -> Any:
    """A `datasets.Dataset` of int8 tokens: what TRL's users hold, at its lightest."""
    import pyarrow as pa
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    column = _lists(lengths, lambda total: pa.array(np.zeros(total, np.int8)))
    return Dataset(pa.table({"input_ids": column}))


def _lists(lengths: NDArray[np.int32], values: Callable[[int], Any]) -> Any:
    import pyarrow as pa

    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    total = int(offsets[-1])
    # 32-bit offsets, as datasets writes them, as long as they can hold the total.
    kind, width = (pa.ListArray, np.int32) if total < 2**31 else (pa.LargeListArray, np.int64)
    return kind.from_arrays(pa.array(offsets.astype(width)), values(total))


def lightbinpack(name: str) -> Callable[..., list[list[int]]]:
    import lightbinpack

    function: Callable[..., list[list[int]]] = getattr(lightbinpack, name)
    return function


@functools.cache
def mosaic_streaming() -> Any:
    """MosaicML Streaming's `streaming.base`, without its data sets of pictures and texts.

    Those need torchvision, and another version of transformers.
    """
    spec = find_spec("streaming")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'streaming'")
    bare = sys.modules["streaming"] = ModuleType("streaming")
    bare.__path__ = list(spec.submodule_search_locations)
    return import_module("streaming.base")


def function_of(package: str, file: str, *names: str, **imported: Any) -> list[Callable[..., Any]]:
    """Functions and classes compiled from a file of an installed package, without importing it.

    For functions that need the standard library and what is `imported` alone, in packages that
    import a whole training stack on the way to them.
    """
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"No module named {package!r}")
    path = Path(spec.submodule_search_locations[0]) / file
    tree = ast.parse(path.read_text())
    wanted = [node for node in tree.body if getattr(node, "name", None) in names]
    scope: dict[str, Any] = {"heapq": heapq, **imported}
    exec(compile(ast.Module(wanted, []), str(path), "exec"), scope)
    return [scope[name] for name in names]
