"""Everything about lengths by one name: the arrays, the cache, and how it is built."""

from batchwright.data.lengths.build import BuildReport, build_lengths
from batchwright.data.lengths.cache import LONGEST, LengthCache, LengthEntry, Lengths

__all__ = ["LONGEST", "BuildReport", "LengthCache", "LengthEntry", "Lengths", "build_lengths"]
