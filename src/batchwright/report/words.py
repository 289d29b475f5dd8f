"""A summary as text for a terminal."""

import textwrap
from collections.abc import Mapping
from typing import Any

from batchwright.errors import printable
from batchwright.report.text import can_draw, histogram, number, percent, seconds, table

__all__ = ["words"]

CURVE = 40
HEADS = ("metric", "first", "last", "lowest", "highest", "course")
BLOCKS = "▁▂▃▄▅▆▇█"


def words(summary: Mapping[str, Any], width: int = 100) -> str:
    """The strip, the notes, the newest metrics with their course, and the advice.

    Sentences are wrapped at `width`, and the courses are drawn in what the table leaves of it.
    """
    at = summary["progress"]
    place = "" if at["at"] is None else f", {at['unit']} {at['at']:,}"
    place += f" of {at['of']:,}" if at["of"] and place else ""
    lines = [
        f"{summary['run']}: {summary['kind']}, {summary['state']['text']}{place}, "
        f"{seconds(at['seconds'])}"
    ]
    lines += [_wrapped(f"note: {note}", width) for note in summary["notes"]]
    if summary["strip"]:
        rows = [[cell["name"], _figure(cell), cell["hint"]] for cell in summary["strip"]]
        lines += ["", table(["figure", "value", "what it is"], rows)]
    if curves := _curves(summary, width):
        lines += ["", table(HEADS, curves)]
    if plan := summary["plan"]:
        lines += ["", _lengths(plan)]
    for one in summary["advice"]:
        lines += ["", _wrapped(f"advice: {one['seen']} {one['do']}", width)]
    return "\n".join(lines)


def _wrapped(text: str, width: int) -> str:
    return textwrap.fill(
        printable(text, line=True),
        max(40, width),
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _figure(cell: Mapping[str, Any]) -> str:
    if cell["form"] == "share":
        return percent(cell["value"])
    return number(round(cell["value"])) if abs(cell["value"]) >= 1000 else f"{cell['value']:.4g}"


def _curves(summary: Mapping[str, Any], width: int) -> list[list[str | float | None]]:
    found: list[tuple[list[str | float | None], list[float]]] = []
    for source, prefix in ((summary["steps"], ""), (summary["evals"], "eval: ")):
        for name, values in (source or {}).get("mean", {}).items():
            known = [value for value in values if value is not None]
            if known:
                ends = source["ends"][name]
                found.append(([prefix + name, *(f"{v:.4g}" for v in ends)], known))
    if not found:
        return []
    taken = len(table(HEADS[:-1], [row for row, _ in found]).split("\n", 2)[1]) + 2
    room = max(len(HEADS[-1]), min(CURVE, width - taken))
    return [[*row, _spark(known, room)] for row, known in found]


def _spark(values: list[float], room: int) -> str:
    """The course of a metric in one line, where the terminal can show it."""
    if not can_draw():
        return "-"
    step = -(-len(values) // room)
    points = [
        sum(part) / len(part) for k in range(0, len(values), step) if (part := values[k : k + step])
    ]
    low, high = min(points), max(points)
    reach = (high - low) or 1.0
    return "".join(BLOCKS[int((point - low) / reach * (len(BLOCKS) - 1))] for point in points)


def _lengths(plan: Mapping[str, Any]) -> str:
    found = plan["histogram"]
    counts, step = found["samples"], found["step"]
    merged = -(-len(counts) // 12)
    bars = [sum(counts[k : k + merged]) for k in range(0, len(counts), merged)]
    labels = [f"{found['low'] + k * merged * step:,}+" for k in range(len(bars))]
    return (
        f"plan {plan['fingerprint'][:16]}: {plan['layout']}, {percent(plan['efficiency'])} useful\n"
        f"{plan['samples']:,} samples by length in tokens\n"
        f"{histogram(bars, labels, width=40)}"
    )
