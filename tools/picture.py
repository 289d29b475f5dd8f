"""Draw docs/assets/packing.svg: the same samples in padded batches of eight, and packed.

    python tools/picture.py            draw it
    python tools/picture.py --check    write nothing; exit with 1 if it differs

The samples are rows of the shipped text set, the packed rows are those of a batch plan. All
coordinates are integers, so the file is the same on every machine.
"""

import json
import sys
from importlib.resources import files
from pathlib import Path

import numpy as np

from batchwright.batching import BatchingConfig, BatchPlanBuilder
from batchwright.data import encode_row, load_tokenizer

PICTURE = Path(__file__).parents[1] / "docs" / "assets" / "packing.svg"
SAMPLES, ROWS_PER_BATCH, WIDTH = 56, 8, 2048
PANEL, GAP, TOP = 430, 20, 34
"""Pixels: the width of a panel, between the panels, and of the line of text above them."""
ROW, BETWEEN = 4, 5
"""Pixels: the height of a row, and between two batches."""
COLOURS = ("#4878a8", "#7aa6cf", "#c8502d", "#e0906f", "#5f9e6e", "#9cc5a1")
PADDING, INK = '#888888" fill-opacity="0.3', "#888888"
"""Mid grey, for padding nearly transparent: seen on a light page and on a dark one."""

Batch = tuple[int, list[list[int]]]
"""How wide a matrix is, and the lengths of the samples in each of its rows."""


def main() -> None:
    lengths = shipped_lengths()
    text = svg(padded_batches(lengths), packed_batches(lengths))
    if "--check" not in sys.argv:
        PICTURE.parent.mkdir(exist_ok=True)
        PICTURE.write_text(text, "utf-8")
    elif text != PICTURE.read_text("utf-8"):
        sys.exit(f"{PICTURE.name} differs from what the plan gives; run {sys.argv[0]}")


def shipped_lengths() -> list[int]:
    tokenizer = load_tokenizer("bytes")
    rows = files("batchwright.shipped").joinpath("demo.jsonl").read_text("utf-8").splitlines()
    every = [len(encode_row(json.loads(row), tokenizer, "")) for row in rows]
    return [length for length in every if length <= WIDTH][:SAMPLES]


def padded_batches(lengths: list[int]) -> list[Batch]:
    groups = [lengths[n : n + ROWS_PER_BATCH] for n in range(0, SAMPLES, ROWS_PER_BATCH)]
    return [(max(group), [[length] for length in group]) for group in groups]


def packed_batches(lengths: list[int]) -> list[Batch]:
    config = BatchingConfig(layout="packed", token_budget=WIDTH, pack_max_length=WIDTH)
    plan = BatchPlanBuilder(np.array(lengths), config).build()
    return [(batch.max_len, [batch.lengths.tolist()]) for batch in plan.iter_epoch(0)]


def svg(padded: list[Batch], packed: list[Batch]) -> str:
    left, left_height = panel(padded, 0, BETWEEN)
    right, _ = panel(packed, PANEL + GAP, 1)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * PANEL + GAP}" '
        f'height="{TOP + left_height}" font-family="sans-serif" font-size="13" fill="{INK}">',
        "<title>The same samples in padded batches of eight, and packed</title>",
        caption(f"padded, {ROWS_PER_BATCH} samples per batch", padded, 0),
        caption(f"packed into rows of {WIDTH:,}", packed, PANEL + GAP),
        *left,
        *right,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def panel(batches: list[Batch], x: int, between: int) -> tuple[list[str], int]:
    """The rows of all batches below each other, and the height they take."""
    lines: list[str] = []
    y = sample = 0
    for width, rows in batches:
        for row in rows:
            lines.append(block(x, y, 0, width, PADDING))
            start = 0
            for length in row:
                lines.append(block(x, y, start, start + length, COLOURS[sample % len(COLOURS)]))
                start += length
                sample += 1
            y += ROW + 1
        y += between
    return lines, y


def block(x: int, y: int, start: int, stop: int, colour: str) -> str:
    """Tokens `start` to `stop` of a row, with a pixel of air before the next sample."""
    left, right = start * PANEL // WIDTH, stop * PANEL // WIDTH
    size = f'width="{max(right - left - 1, 1)}" height="{ROW}"'
    return f'<rect x="{x + left}" y="{TOP + y}" {size} fill="{colour}"/>'


def caption(title: str, batches: list[Batch], x: int) -> str:
    useful = sum(sum(row) for _, rows in batches for row in rows)
    tokens = sum(width * len(rows) for width, rows in batches)
    share = f"{tokens:,} tokens, {useful / tokens:.0%} useful"
    return f'<text x="{x}" y="16"><tspan font-weight="bold">{title}</tspan>: {share}</text>'


if __name__ == "__main__":
    main()
