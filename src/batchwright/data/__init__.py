"""Rows to tokens to lengths: sources, tokenizers, samples and length caches."""

from typing import TYPE_CHECKING

from batchwright.lazy import lazy_names

__all__ = [
    "BuildReport",
    "Chunk",
    "Ids",
    "LengthCache",
    "LengthEntry",
    "Lengths",
    "OnBadRow",
    "Row",
    "Sample",
    "Skipped",
    "Source",
    "Tokenizer",
    "build_lengths",
    "content_hash",
    "encode_row",
    "encode_rows",
    "good_rows",
    "load_tokenizer",
    "open_source",
    "sample_reader",
]

if TYPE_CHECKING:
    from batchwright.data.ids import Ids
    from batchwright.data.lengths import LengthCache, LengthEntry, Lengths
    from batchwright.data.measure import BuildReport, build_lengths
    from batchwright.data.reader import sample_reader
    from batchwright.data.rows import Row
    from batchwright.data.rows.sample import Sample, content_hash, encode_row, encode_rows
    from batchwright.data.rows.source import (
        Chunk,
        OnBadRow,
        Skipped,
        Source,
        good_rows,
        open_source,
    )
    from batchwright.data.tokenizers import Tokenizer, load_tokenizer
else:
    # A command imports the modules it needs and pays for no other.
    __getattr__ = lazy_names(
        __name__,
        "batchwright.data.ids",
        "batchwright.data.lengths.cache",
        "batchwright.data.rows",
        "batchwright.data.rows.sample",
        "batchwright.data.rows.source",
        "batchwright.data.tokenizers",
        "batchwright.data.reader",
        "batchwright.data.measure",
    )
