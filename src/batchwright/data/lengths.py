"""Everything about lengths by one name: the arrays, the cache, and how it is built."""

from batchwright.data.build import BuildReport, build_lengths
from batchwright.data.lengthcache import LONGEST, LengthCache, LengthEntry, Lengths

__all__ = ["LONGEST", "BuildReport", "LengthCache", "LengthEntry", "Lengths", "build_lengths"]
