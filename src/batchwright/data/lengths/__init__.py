"""Sample lengths: the arrays, the cache on disk, and its build."""

from typing import TYPE_CHECKING

from batchwright.lazy import lazy_names

__all__ = ["LONGEST", "BuildReport", "LengthCache", "LengthEntry", "Lengths", "build_lengths"]

if TYPE_CHECKING:
    from batchwright.data.lengths.build import BuildReport, build_lengths
    from batchwright.data.lengths.cache import LONGEST, LengthCache, LengthEntry, Lengths
else:
    # A command imports the modules it needs and pays for no other.
    __getattr__ = lazy_names(
        __name__,
        "batchwright.data.lengths.cache",
        "batchwright.data.lengths.build",
    )
