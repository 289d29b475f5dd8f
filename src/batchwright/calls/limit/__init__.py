"""How many calls may be in flight: pure arithmetic, no clock and no I/O."""

from batchwright.calls.limit.auto import AutoLimit
from batchwright.calls.limit.fixed import Change, FixedLimit, Limit

__all__ = ["AutoLimit", "Change", "FixedLimit", "Limit"]
