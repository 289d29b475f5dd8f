"""`batchwright data batching`: analyze lengths before planning."""

import re
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from batchwright.cli.flags import CachePath, at_least, edges_of, hint, load_lengths
from batchwright.cli.output import Force, Format, check_picture, count_of, show, spelled

__all__ = ["batching"]

batching = App(name="batching")
_REPORT = re.compile(rb'\{\n  "histogram": \{\n    "bins": ')
"""How a report begins."""

Edges = Annotated[str, Parameter(name="--bucket-edges", help="Upper lengths, as 128,256,512.")]
Png = Annotated[Path | None, Parameter(name="--png", help="Save the picture to this file too.")]


@batching.command
def histogram(
    *,
    cache: CachePath,
    bins: Annotated[int, Parameter(help="Number of bars.")] = 15,
    width: Annotated[int, Parameter(help="Characters of the longest bar.")] = 50,
    bucket_edges: Annotated[str | None, Parameter(help="Edges to mark in the PNG.")] = None,
    png: Png = None,
    force: Force = False,
    format: Format = "text",
) -> None:
    """Draw the distribution of sample lengths."""
    check_picture(png, [cache], force=force)
    from batchwright.batching.analyze.report import compute_length_histogram
    from batchwright.report import text as pictures

    at_least(1, bins=bins, width=width)
    marks = edges_of(bucket_edges) if bucket_edges else None
    found = compute_length_histogram(load_lengths(cache), num_bins=bins)
    labels = [f"{b.min_length:,}-{b.max_length - 1:,}" for b in found.bins]
    lines = [
        pictures.histogram([b.count for b in found.bins], labels, width),
        "",
        f"{count_of(found.total_samples, 'sample')}, {count_of(found.total_tokens, 'token')}, "
        f"mean {found.mean_length:,.1f}, median {found.median_length:,.0f}, "
        f"p90 {found.p90:,.0f}, p99 {found.p99:,.0f}, longest {found.max_length:,}",
    ]
    if png is not None:
        from batchwright.report.figures import histogram_png

        histogram_png(png, found, marks)
        lines.append(f"saved {png}")
    show(found.to_dict(), "\n".join(lines), format)


@batching.command
def analyze(
    *,
    cache: CachePath,
    bucket_edges: Edges = "128,256,512,1024",
    overflow_max: Annotated[int, Parameter(help="Longest sample of the last bucket.")] = 2048,
    token_budget: Annotated[int | None, Parameter(help="Padded tokens per microbatch.")] = None,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"], help="JSON file.")] = None,
    force: Force = False,
    format: Format = "text",
) -> None:
    """Show the efficiency of these buckets, and better edges."""
    import json

    from batchwright.batching.analyze.report import create_efficiency_report
    from batchwright.batching.buckets import BucketSpec
    from batchwright.files import check_output, write_atomic

    at_least(1, token_budget=token_budget)
    if output is not None:
        check_output(output, _REPORT, inputs=[cache], force=force)
    spec = BucketSpec(edges_of(bucket_edges), overflow_max)
    report = create_efficiency_report(load_lengths(cache), spec, token_budget)
    if output is not None:
        write_atomic(output, (json.dumps(report.to_dict(), indent=2) + "\n").encode())
    text = report.to_text()
    show(report.to_dict(), text + (f"\nsaved {spelled(output)}" if output else ""), format)


@batching.command
def suggest(
    *,
    cache: CachePath,
    num_buckets: Annotated[
        int, Parameter(name=["--num-buckets", "-n"], help="Maximum number of buckets.")
    ] = 4,
    goal: Annotated[
        Literal["waste", "balance", "memory"],
        Parameter(
            name=["--goal", "-g"], help="Least padding, equal counts, or least attention memory."
        ),
    ] = "waste",
    max_length: Annotated[
        int | None, Parameter(help="Leave out longer samples; default: none.")
    ] = None,
    align: Annotated[int, Parameter(help="Edges are multiples of this.")] = 1,
    current: Annotated[
        str | None, Parameter(help="The edges in use, for comparison, as 128,256,512.")
    ] = None,
    format: Format = "text",
) -> None:
    """Find the optimal bucket edges."""
    from batchwright.batching.analyze.report import suggest_bucket_edges
    from batchwright.report.text import number, percent, table

    found = suggest_bucket_edges(
        load_lengths(cache),
        num_buckets=num_buckets,
        goal=goal,
        max_length=max_length,
        align=align,
        current=edges_of(current) if current else None,
    )
    lows = [1, *(edge + 1 for edge in found.edges)]
    rows = [
        [f"{low:,}-{edge:,}", number(count)]
        for low, edge, count in zip(lows, found.edges, found.counts, strict=False)
    ]
    lines = [table(["bucket", "samples"], rows), ""]
    lines.append(f"useful {percent(found.efficiency)}, goal {found.goal}")
    if found.over_long:
        lines.append(f"left out: {count_of(found.over_long, 'sample')} longer than {max_length:,}")
    if found.regret is not None:
        given = edges_of(current) if current else ()
        added = f" and a last bucket up to {found.edges[-1]:,}" * (given[-1] < found.edges[-1])
        lines.append(
            f"your edges{added}: {percent(found.current_efficiency)} useful, "
            f"{100 * found.regret:.1f} percentage points below the best edges for as many buckets"
        )
    spec = found.spec()
    edges = ",".join(map(str, spec.edges)) or str(spec.overflow_max)
    longest = spec.overflow_max
    limits: tuple[object, ...] = (
        "--bucket-edges",
        edges,
        "--overflow-max",
        longest,
        "-b",
        max(4096, longest),
    )
    if found.over_long:
        limits += ("--overflow", "skip")
    lines.append(hint("data", "batchplan", "build", "-l", cache, *limits, "-o", "batch_plan/"))
    show(found.to_dict(), "\n".join(lines), format)
