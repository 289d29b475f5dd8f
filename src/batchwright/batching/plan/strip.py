"""A plan as a notebook shows it: a line of figures over the rows of its first microbatches."""

import itertools
from collections.abc import Iterable
from html import escape

from batchwright.batching.plan.microbatch import MicrobatchSpec

__all__ = ["strip_html"]

ROWS, WIDTH, HEIGHT = 24, 640, 6
COLOURS = ("#0072b2", "#56b4e9", "#cc79a7")


def strip_html(line: str, batches: Iterable[MicrobatchSpec]) -> str:
    """`line` over one bar for each row and one block in it for each sample; grey is padding."""
    rows: list[tuple[int, list[int]]] = []
    for batch in batches:
        bounds = batch.row_offsets.tolist()
        for first, last in itertools.pairwise(bounds):
            rows.append((batch.max_len, batch.lengths[first:last].tolist()))
        if len(rows) >= ROWS:
            break
    rows = rows[:ROWS]
    widest = max((width for width, _ in rows), default=1)
    shapes = []
    for number, (width, lengths) in enumerate(rows):
        y, x = number * (HEIGHT + 1), 0.0
        shapes.append(_block(0, y, width * WIDTH / widest, "#8888884d"))
        for k, length in enumerate(lengths):
            wide = length * WIDTH / widest
            shapes.append(_block(x, y, max(0.5, wide - 1), COLOURS[k % len(COLOURS)]))
            x += wide
    tall = len(rows) * (HEIGHT + 1)
    return (
        f"<div><code>{escape(line)}</code><br>"
        f'<svg role="img" aria-label="the first {len(rows)} rows" width="{WIDTH}" height="{tall}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(shapes)}</svg></div>'
    )


def _block(x: float, y: int, width: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{HEIGHT}" fill="{colour}"/>'
