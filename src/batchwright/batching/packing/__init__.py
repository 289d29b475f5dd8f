"""Packing: lengths into the fewest bins, token sequences into rows that stay apart."""

from typing import TYPE_CHECKING

from batchwright.lazy import lazy_names

__all__ = [
    "MAX_CAPACITY",
    "Packing",
    "PackingMode",
    "PackingProof",
    "Patterns",
    "StreamingPacker",
    "pack_histogram",
    "pack_lengths",
    "packing_mode",
    "patterns_of",
    "verify_packing",
]

if TYPE_CHECKING:
    from batchwright.batching.packing.bins import (
        Packing,
        PackingProof,
        StreamingPacker,
        pack_lengths,
        verify_packing,
    )
    from batchwright.batching.packing.modes import PackingMode, packing_mode
    from batchwright.batching.packing.patterns import (
        MAX_CAPACITY,
        Patterns,
        pack_histogram,
        patterns_of,
    )
else:
    # A command imports the modules it needs and pays for no other.
    __getattr__ = lazy_names(
        __name__,
        "batchwright.batching.packing.modes",
        "batchwright.batching.packing.patterns",
        "batchwright.batching.packing.bins",
    )
