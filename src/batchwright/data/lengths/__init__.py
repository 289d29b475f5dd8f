"""Sample lengths: the arrays, and the cache on disk."""

from batchwright.data.lengths.cache import LONGEST, LengthCache, LengthEntry, Lengths

__all__ = ["LONGEST", "LengthCache", "LengthEntry", "Lengths"]
