"""Pictures as PNG files, drawn with matplotlib and written whole or not at all.

Figures are objects of their own: nothing here touches pyplot's global state, so drawing is safe
in threads, notebooks and servers.
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from batchwright.batching.analyze.findings import LengthHistogram
from batchwright.errors import CannotWrite, ConfigError, need
from batchwright.files import check_output, writing
from batchwright.report.text import number, percent

__all__ = [
    "PICTURE",
    "calibration_png",
    "histogram_png",
    "intervals_png",
    "levels_png",
    "packing_png",
    "run_png",
]

PICTURE = re.compile(rb"\x89PNG.{0,200}?tEXtSoftware\0batchwright", re.DOTALL)
"""The first bytes of every picture that is drawn here."""

INK = "#222222"
PALE = "#d9d9d9"
BAR = "#4878a8"
EDGE = "#c8502d"


def packing_png(
    path: Path | str,
    rows: Sequence[Sequence[int]],
    row_width: int,
    title: str = "",
    *,
    max_rows: int = 48,
) -> None:
    """One bar per row, one block in it per sample, coloured by length; white is padding.

    Only the first `max_rows` rows are drawn; the line below the title counts them all.
    """
    if not rows or row_width < 1:
        raise ConfigError(
            f"rows and row_width must be at least 1, got {len(rows)} rows and {row_width} tokens"
        )
    widest = max(sum(row) for row in rows)
    if widest > row_width:
        raise ConfigError(f"a row must hold at most {row_width:,} tokens, got {widest:,}")
    shown = rows[:max_rows]
    height = 0.9 + 0.16 * max(len(shown), 6)
    figure, axes = _axes(9.0, height, title, _rows_line(rows, row_width, len(shown)))
    blocks = _blocks(axes, shown, row_width)
    axes.set_xlim(-0.002 * row_width, 1.002 * row_width)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlabel("tokens")
    axes.set_ylabel("row")
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(length=0)
    if blocks is not None:
        bar = figure.colorbar(blocks, ax=axes, pad=0.015, fraction=0.035, aspect=24)
        bar.set_label("sample length", size=9)
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=0, labelsize=8)
        _whole_numbers(bar.ax.yaxis, ticks=5)
    _save(figure, path)


def histogram_png(
    path: Path | str,
    histogram: LengthHistogram,
    edges: Sequence[int] | None = None,
    title: str = "",
) -> None:
    """The length histogram, with bucket edges as lines."""
    line = (
        f"{number(histogram.total_samples)} samples, {number(histogram.total_tokens)} tokens, "
        f"median {number(histogram.median_length)}, p99 {number(histogram.p99)}, "
        f"longest {number(histogram.max_length)}"
    )
    figure, axes = _axes(9.0, 3.8, title, line, above=24 if edges else 0)
    bins = histogram.bins
    axes.bar(
        [bin.min_length for bin in bins],
        [bin.count for bin in bins],
        width=[bin.max_length - bin.min_length for bin in bins],
        align="edge",
        color=BAR,
        edgecolor="white",
        linewidth=0.5,
    )
    left, right = bins[0].min_length, bins[-1].max_length
    if edges:
        right = max(right, max(edges))
    margin = 0.01 * (right - left)
    axes.set_xlim(left - margin, right + margin)
    axes.set_xlabel("length in tokens")
    axes.set_ylabel("samples")
    axes.yaxis.grid(True, color=PALE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    _edge_lines(axes, edges or (), room=0.014 * (right - left))
    _save(figure, path)


CURVES = (
    *("loss", "charts/episodic_return", "losses/approx_kl", "losses/entropy", "tokens_per_s"),
    *("grad_norm", "proved", "useful"),
)
"""Metrics of steps that get a figure, where a run has them."""


def run_png(folder: Path | str, summary: Mapping[str, Any], *, force: bool = True) -> list[Path]:
    """Figures of a run's summary: curves, evaluations, calls, lengths, packed rows; their files.

    A figure for which the run has no numbers is not drawn. Without `force` no picture is replaced
    that this package did not draw.
    """
    need("matplotlib", extra="plot")
    made: list[Path] = []

    def place(name: str) -> Path:
        path = Path(folder) / f"{name}.png"
        check_output(path, PICTURE, force=force)
        made.append(path)
        return path

    def curves(name: str, lines: Sequence[_Curve], x: str, y: str) -> None:
        known = [line for line in lines if any(v is not None for v in line[2])]
        if not known:
            return
        figure, axes = _axes(7.0, 3.4, summary["run"], y)
        _curves(axes, known, x)
        _save(figure, place(name))

    if steps := summary["steps"]:
        for name in CURVES:
            if name in steps["mean"]:
                line = (name, steps["last"], steps["mean"][name])
                curves(name.replace("/", "_"), [line], steps["unit"], name)
    if evals := summary["evals"]:
        for name, values in evals["mean"].items():
            curves(f"eval_{name}", [(name, evals["at"], values)], "evaluation at", f"eval: {name}")
    if (calls := summary["calls"]) and calls["rows"]:
        levels = [
            (n, calls["t"], calls["mean"][n]) for n in ("in_flight", "limit") if n in calls["mean"]
        ]
        curves("calls_in_flight", levels, "seconds", "calls in flight and limit")
        latency = [
            (n, calls["t"], calls["mean"][n]) for n in ("p50", "p95", "p99") if n in calls["mean"]
        ]
        curves("calls_latency", latency, "seconds", "latency in seconds")
    if plan := summary["plan"]:
        rows = [row["lengths"] for row in plan["packing"]["rows"]]
        packing_png(place("packing"), rows, plan["packing"]["width"], summary["run"])
        _lengths_png(place("lengths"), plan, summary["run"])
    return made


_Curve = tuple[str, Sequence[float | None], Sequence[float | None]]


def _curves(axes: Any, lines: Sequence[_Curve], x: str) -> None:
    ticker = need("matplotlib.ticker", extra="plot")
    styles = (("#0072b2", "-"), ("#d55e00", "--"), ("#009e73", ":"))
    for (name, at, values), (colour, style) in zip(lines, styles, strict=False):
        points = [math.nan if v is None else v for v in values]
        marker = "o" if sum(v is not None for v in values) == 1 else ""
        axes.plot(at, points, style, color=colour, linewidth=1.4, marker=marker, label=name)
    axes.yaxis.set_major_locator(ticker.MaxNLocator(6))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    axes.yaxis.grid(True, color=PALE, linewidth=0.6)
    axes.set_xlabel(x)
    if len(lines) > 1:
        axes.legend(frameon=False, fontsize=8)


def _lengths_png(path: Path, plan: Mapping[str, Any], title: str) -> None:
    found = plan["histogram"]
    low, step, counts = found["low"], found["step"], found["samples"]
    line = (
        f"{number(plan['samples'])} samples, median {found['p50']:,}, longest {found['longest']:,}"
    )
    figure, axes = _axes(7.0, 3.4, title, line)
    starts = [low + k * step for k in range(len(counts))]
    axes.bar(starts, counts, width=step, align="edge", color=BAR, edgecolor="white", linewidth=0.5)
    axes.set_xlabel("length in tokens")
    axes.set_ylabel("samples")
    _save(figure, path)


def calibration_png(
    path: Path | str, bins: Sequence[Mapping[str, float]], count: int, title: str = ""
) -> None:
    """Share of true labels over the score, one dot per bin, larger for more samples."""
    line = f"{number(count)} samples; on the line, a score of 0.7 is right 7 times in 10"
    figure, axes = _axes(5.2, 4.8, title, line)
    ticker = need("matplotlib.ticker", extra="plot")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(ticker.MultipleLocator(0.2))
        axis.set_major_formatter(lambda value, _: f"{value:.1f}")
    axes.plot([0, 1], [0, 1], color=PALE, linewidth=1.0)
    axes.plot(
        [bin["mean_score"] for bin in bins],
        [bin["share_true"] for bin in bins],
        color=BAR,
        linewidth=1.0,
    )
    axes.scatter(
        [bin["mean_score"] for bin in bins],
        [bin["share_true"] for bin in bins],
        s=[20 + 400 * bin["count"] / count for bin in bins],
        color=BAR,
        edgecolor="white",
        zorder=3,
    )
    axes.set_xlim(-0.03, 1.03)
    axes.set_ylim(-0.03, 1.03)
    axes.set_xlabel("mean score of the judge")
    axes.set_ylabel("labelled true")
    _save(figure, path)


def intervals_png(
    path: Path | str,
    rows: Sequence[tuple[str, float, float, float]],
    what: str,
    lines: str = "95 % intervals",
) -> None:
    """One line per row (name, value, low, high): a dot with its interval, from top to bottom."""
    figure, axes = _axes(7.0, 1.1 + 0.36 * len(rows), "", f"{what}; lines are {lines}")
    for place, (_, value, low, high) in enumerate(rows):
        axes.plot([low, high], [place, place], color=BAR, linewidth=2.0, solid_capstyle="butt")
        axes.plot([value], [place], "o", color=BAR, markersize=6)
    axes.axvline(0, color=PALE, linewidth=1.0, zorder=0)
    axes.set_yticks(range(len(rows)), [name for name, _, _, _ in rows], fontsize=9)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel(what)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    _save(figure, path)


def levels_png(
    path: Path | str, levels: Sequence[tuple[int, float, float, float]], knee: int
) -> None:
    """Throughput and latency over concurrency, one (in flight, calls/s, p50, p95) per level."""
    at, rates, p50, p95 = zip(*levels, strict=True)
    figure, left = _axes(7.0, 4.0, "", f"the dotted line is the knee, {knee} calls in flight")
    left.plot(at, rates, "o-", color=BAR)
    left.axvline(knee, color="grey", linestyle=":")
    left.set_xscale("log")
    left.set_xticks(at, [str(count) for count in at], minor=False)
    left.set_xticks([], minor=True)
    left.set_xlabel("calls in flight")
    left.set_ylabel("calls per second (blue)")
    left.set_ylim(0, None)
    right = left.twinx()
    right.plot(at, p50, "s--", color=EDGE)
    right.plot(at, p95, "s-", color=EDGE)
    right.set_ylabel("seconds, p50 and p95 (red)")
    right.set_ylim(0, None)
    _save(figure, path)


def _rows_line(rows: Sequence[Sequence[int]], row_width: int, drawn: int) -> str:
    samples = sum(map(len, rows))
    useful = sum(map(sum, rows)) / (len(rows) * row_width)
    line = (
        f"{number(samples)} samples in {number(len(rows))} rows of {number(row_width)} tokens, "
        f"{percent(useful)} useful"
    )
    return line if drawn == len(rows) else f"{line}; the first {drawn} rows"


def _blocks(axes: Any, rows: Sequence[Sequence[int]], row_width: int) -> Any:
    """Draw the frames of the rows and the samples inside; gives the samples' collection."""
    collections = need("matplotlib.collections", extra="plot")
    colors = need("matplotlib.colors", extra="plot")

    def box(left: float, right: float, row: int) -> list[tuple[float, float]]:
        low, high = row - 0.4, row + 0.4
        return [(left, low), (right, low), (right, high), (left, high)]

    frames = [box(0, row_width, row) for row in range(len(rows))]
    axes.add_collection(
        collections.PolyCollection(frames, facecolors="white", edgecolors=PALE, linewidths=0.6)
    )
    boxes, lengths = [], []
    for row, samples in enumerate(rows):
        ends = np.cumsum(samples)
        for length, end in zip(samples, ends.tolist(), strict=True):
            boxes.append(box(end - length, end, row))
            lengths.append(length)
    if not boxes:
        return None
    # Most samples are short; the square root leaves them more than a sliver of the colours.
    scale = colors.PowerNorm(0.5, vmin=min(lengths) - 1, vmax=max(lengths))
    samples_drawn = collections.PolyCollection(
        boxes,
        array=np.asarray(lengths),
        cmap="viridis_r",
        norm=scale,
        edgecolors="white",
        linewidths=0.4,
    )
    axes.add_collection(samples_drawn)
    return samples_drawn


def _edge_lines(axes: Any, edges: Sequence[int], room: float) -> None:
    """A line for each edge and its number on end above; a number that would touch is left out."""
    last = -np.inf
    for edge in edges:
        axes.axvline(edge, color=EDGE, linewidth=1.0)
        if edge - last < room:
            continue
        last = edge
        axes.annotate(
            f"{edge:,}",
            (edge, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            va="bottom",
            rotation=90,
            fontsize=7.5,
            color=EDGE,
        )


def _axes(width: float, height: float, title: str, line: str, above: int = 0) -> tuple[Any, Any]:
    """A figure with one plain plot under a title and a line, `above` points over the plot."""
    need("matplotlib", extra="plot")
    figure = need("matplotlib.figure", extra="plot").Figure((width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8, colors=INK)
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set_size(9)
        _whole_numbers(axis)
    axes.set_title(line, loc="left", fontsize=9, color=INK, pad=8 + above)
    if title:
        axes.annotate(
            title,
            (0, 1),
            xycoords="axes fraction",
            xytext=(0, 24 + above),
            textcoords="offset points",
            fontsize=12,
            fontweight="bold",
            color=INK,
        )
    return figure, axes


def _whole_numbers(axis: Any, ticks: int = 8) -> None:
    locator = need("matplotlib.ticker", extra="plot").MaxNLocator
    axis.set_major_locator(locator(ticks, steps=[1, 2, 2.5, 5, 10], integer=True, min_n_ticks=1))
    axis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _save(figure: Any, path: Path | str) -> None:
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CannotWrite(
            f"cannot write {path}: no folder {path.parent}: {error.strerror}"
        ) from None
    with writing(path) as temporary:
        # Without the version of the software, the same picture is the same bytes.
        figure.savefig(temporary, format="png", dpi=150, metadata={"Software": "batchwright"})
