"""Tables, histograms and packing strips for a terminal, as plain strings.

Block characters where the terminal can show them, `#` and `.` elsewhere.
"""

import sys
from collections.abc import Sequence

import numpy as np

from batchwright.errors import ConfigError, printable

__all__ = [
    "bytes_",
    "can_draw",
    "histogram",
    "number",
    "packing_strip",
    "percent",
    "seconds",
    "table",
]

Cell = str | float | None

_EIGHTHS = " ▏▎▍▌▋▊▉█"


def can_draw(encoding: str | None = None) -> bool:
    """Whether block characters survive `encoding`, by default that of the terminal.

    >>> can_draw("utf-8"), can_draw("ascii")
    (True, False)
    """
    # sys.stdout is None under pythonw, and a replaced one may have no encoding.
    name = encoding or getattr(sys.stdout, "encoding", None) or "ascii"
    try:
        (_EIGHTHS + "▒·").encode(name)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def number(value: float | None) -> str:
    """Thousands separated; whole numbers whole, others to one place; "-" for none.

    >>> number(1234567), number(1234.56), number(None)
    ('1,234,567', '1,234.6', '-')
    """
    if value is None:
        return "-"
    return f"{value:,.1f}" if isinstance(value, float | np.floating) else f"{value:,}"


def percent(value: float | None, digits: int = 1) -> str:
    """A share of one as a percentage; "-" for none.

    >>> percent(0.98765), percent(None)
    ('98.8%', '-')
    """
    return "-" if value is None else f"{value:.{digits}%}"


def seconds(value: float | None) -> str:
    """A duration in the unit that suits it; "-" for none.

    >>> [seconds(s) for s in (0.0000042, 0.0123, 4.56, 125, 7380)]
    ['4.2 us', '12.3 ms', '4.56 s', '2 min 5 s', '2 h 3 min']
    """
    if value is None:
        return "-"
    if value < 60:
        # The thresholds are where the next unit's rounding would begin.
        for factor, unit in ((1e6, "us"), (1e3, "ms"), (1.0, "s")):
            if value * factor < 999.5:
                return f"{value * factor:.3g} {unit}"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60} min"


def bytes_(count: float | None) -> str:
    """A size in powers of 1000; "-" for none.

    >>> [bytes_(n) for n in (999, 1500, 41_300_000)]
    ['999 B', '1.5 kB', '41.3 MB']
    """
    if count is None:
        return "-"
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB", "TB"):
        count /= 1000
        if count < 999.95:
            return f"{count:.1f} {unit}"
    return f"{count / 1000:,.1f} PB"


def histogram(
    counts: Sequence[int], labels: Sequence[str], width: int = 50, *, blocks: bool | None = None
) -> str:
    """One bar a line, the largest count `width` characters long; a count above 0 always shows.

    >>> print(histogram([8, 3, 0], ["1-4", "5-8", "9-12"], width=8, blocks=False))
     1-4  ########  8
     5-8  ###       3
    9-12            0
    """
    blocks = can_draw() if blocks is None else blocks
    largest = max(counts, default=0)
    name = max(map(len, labels), default=0)
    digits = max((len(number(count)) for count in counts), default=0)
    lines = []
    for label, count in zip(labels, counts, strict=True):
        bar = _bar(count / largest if largest else 0.0, width, blocks)
        lines.append(f"{label:>{name}}  {bar:<{width}}  {number(count):>{digits}}")
    return "\n".join(lines)


def packing_strip(
    rows: Sequence[Sequence[int]],
    width_tokens: int,
    width_chars: int = 64,
    max_rows: int = 20,
    *,
    blocks: bool | None = None,
) -> str:
    """One line a row: its samples end to end in alternating shades, padding as dots.

    Each character stands for width_tokens / width_chars tokens and shows whatever lies at its
    middle, so what is much narrower than a character may not be seen; the figure at the end of
    the line is exact.

    >>> print(packing_strip([[4, 3, 1], [6]], width_tokens=8, width_chars=16, blocks=False))
    |########======##| 100.0%
    |############....|  75.0%
    2 rows of 8 tokens, 87.5% useful
    """
    blocks = can_draw() if blocks is None else blocks
    if width_tokens < 1 or width_chars < 1:
        raise ConfigError(
            f"width_chars and width_tokens must be at least 1, got {width_chars} and {width_tokens}"
        )
    middles = (2 * np.arange(width_chars) + 1) * width_tokens // (2 * width_chars)
    lines = []
    for row in rows[:max_rows]:
        ends = np.cumsum(np.asarray(row, np.int64))
        used = int(ends[-1]) if len(row) else 0
        if used > width_tokens:
            raise ConfigError(f"a row must hold at most {width_tokens:,} tokens, got {used:,}")
        strip = _shades(np.searchsorted(ends, middles, side="right"), len(row), blocks)
        lines.append(f"|{strip}| {percent(used / width_tokens):>6}")
    if len(rows) > max_rows:
        lines.append(f"and {len(rows) - max_rows:,} more rows")
    useful = sum(map(sum, rows))
    share = percent(useful / (len(rows) * width_tokens)) if rows else percent(None)
    lines.append(f"{len(rows):,} rows of {width_tokens:,} tokens, {share} useful")
    return "\n".join(lines)


def table(headers: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Columns as wide as they need; those that hold numbers are aligned to the right.

    >>> rows = [["packed", 1232, "99.9%"], ["sorted", 41, None]]
    >>> print(table(["layout", "batches", "useful"], rows))
    layout  batches  useful
    ------  -------  ------
    packed    1,232   99.9%
    sorted       41       -
    """
    cells = [
        # Escaped here as well: it makes them longer, and a line break would end the row.
        [printable(cell, line=True) if isinstance(cell, str) else number(cell) for cell in row]
        for row in rows
    ]
    columns = list(zip(headers, *cells, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [all(_numeric(cell) for cell in column[1:]) for column in columns]
    lines = [headers, ["-" * width for width in widths], *cells]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    )


def _bar(share: float, width: int, blocks: bool) -> str:
    steps = 8 if blocks else 1
    units = round(share * width * steps)
    if share > 0:
        units = max(1, units)
    if not blocks:
        return "#" * units
    whole, part = divmod(units, 8)
    return "█" * whole + (_EIGHTHS[part] if part else "")


def _shades(
    owners: "np.ndarray[tuple[int], np.dtype[np.int64]]", padding: int, blocks: bool
) -> str:
    """A character for each owner; the shade changes with every owner that is seen."""
    first, second, empty = "█▒·" if blocks else "#=."
    shade = np.cumsum(np.diff(owners, prepend=owners[:1]) != 0) % 2
    return "".join(
        empty if owner == padding else second if odd else first
        for owner, odd in zip(owners.tolist(), shade.tolist(), strict=True)
    )


def _numeric(cell: str) -> bool:
    return cell in ("", "-") or cell.lstrip("+-")[:1].isdigit()
