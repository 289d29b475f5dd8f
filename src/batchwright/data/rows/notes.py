"""What is true of data and a chat template together, and said once before training."""

from typing import cast

from batchwright.data.rows import Row
from batchwright.data.rows.elsewhere import NotTheSame, far_chunk
from batchwright.data.rows.shapes import Chat, shape_or_reason
from batchwright.data.rows.source import Source
from batchwright.data.rows.turns import untrained_ends
from batchwright.data.tokenizers.tokenizer import Tokenizer
from batchwright.errors import BadRow, NoTokenizer

__all__ = ["untaught_ends"]

LOOKED_AT = 8
"""Rows, evenly spread, of which one that is a conversation is enough."""


def untaught_ends(source: Source, tokenizer: Tokenizer) -> str:
    """A sentence where conversations are trained without the end of their last turn; else ""."""
    numbers = {len(source) * part // LOOKED_AT for part in range(LOOKED_AT)}
    # Rows come first: a template that no row needs is not read.
    if not any(_is_chat(source, number, tokenizer) for number in sorted(numbers)):
        return ""
    return untrained_ends(tokenizer.chat, tokenizer.loss_on)


def _is_chat(source: Source, number: int, tokenizer: Tokenizer) -> bool:
    try:
        return isinstance(shape_or_reason(_row(source, number), tokenizer), Chat)
    except (BadRow, NoTokenizer, NotTheSame):
        # Who measures the rows says so.
        return False


def _row(source: Source, number: int) -> Row:
    """Read by itself, or a Parquet file would be unpacked as one that is read in any order."""
    chunk = far_chunk(source, number, number + 1)
    if chunk is None:
        return source[number]
    ((_, row),) = chunk.rows()
    if isinstance(row, BadRow):
        raise row
    return cast(Row, row)
