"""Cached responses: everything of the call engine that touches the disk."""

from batchwright.calls.cache.store import Cache, CacheStats, Row

__all__ = ["Cache", "CacheStats", "Row"]
