"""Packing: lengths into the fewest bins, token sequences into rows that stay apart."""

from batchwright.batching.packing.bins import (
    MAX_CAPACITY,
    Packing,
    PackingMode,
    PackingProof,
    Patterns,
    StreamingPacker,
    pack_histogram,
    pack_lengths,
    packing_mode,
    patterns_of,
    verify_packing,
)

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
