"""Sample lengths: the arrays, the cache on disk, and its build."""

from batchwright.data.lengths.build import BuildReport, build_lengths
from batchwright.data.lengths.cache import LONGEST, LengthCache, LengthEntry, Lengths

__all__ = ["LONGEST", "BuildReport", "LengthCache", "LengthEntry", "Lengths", "build_lengths"]
