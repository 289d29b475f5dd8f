"""`batchwright calls probe`: throughput and latency of a server at each concurrency."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from batchwright.cli.calls.flags import KeyEnv, ModelFlag, endpoint_at
from batchwright.cli.output import Force, Format, Quiet, progress_bar, show

if TYPE_CHECKING:
    from batchwright.calls.probe import Level

__all__ = ["probe"]


def probe(
    *,
    endpoint: Annotated[
        str, Parameter(name=["--endpoint", "-e"], help="A server of your own: this is a load test.")
    ],
    model: ModelFlag,
    most: Annotated[int, Parameter(help="The highest concurrency to try.")] = 128,
    max_tokens: Annotated[int, Parameter(help="Completion tokens of each call.")] = 32,
    calls_a_slot: Annotated[
        int, Parameter(help="Calls at each level, per slot of its concurrency.")
    ] = 6,
    key_env: KeyEnv = None,
    plot: Annotated[Path | None, Parameter(help="Plot throughput and latency to this PNG.")] = None,
    force: Force = False,
    quiet: Quiet = False,
    format: Format = "text",
) -> None:
    """Measure throughput and latency at 1, 2, 4, ... calls in flight, and find the knee."""
    from batchwright.calls.probe import knee, ramp

    target = endpoint_at(endpoint, key_env)
    if plot is not None:
        from batchwright.files import check_output
        from batchwright.report.figures import PICTURE

        check_output(plot, PICTURE, force=force)
    with progress_bar("measuring levels", quiet) as progress:
        count = 0

        def seen(level: "Level") -> None:
            nonlocal count
            count += 1
            if progress is not None:
                progress(count, max(count, most.bit_length() + 1))

        measured = ramp(
            target,
            model,
            most=most,
            max_tokens=max_tokens,
            calls_a_slot=calls_a_slot,
            progress=seen,
        )
    best = knee(measured)
    line = f"batchwright calls run -i prompts.jsonl -o answers.jsonl --endpoint {target.name} "
    line += f"--model {model} --batch-size {best.concurrency}"
    if plot is not None:
        from batchwright.report.figures import levels_png

        levels = [
            (one.concurrency, one.per_second, one.p50_s or 0, one.p95_s or 0) for one in measured
        ]
        levels_png(plot, levels, best.concurrency)
    data = {
        "endpoint": target.name,
        "model": model,
        "levels": [level.as_dict() for level in measured],
        "knee": best.concurrency,
        "use": line,
    }
    show(data, _drawn(measured, best, line), format)


def _drawn(measured: "list[Level]", best: "Level", line: str) -> str:
    from batchwright.report.text import histogram, seconds, table

    names = [f"{level.concurrency:,}" for level in measured]
    rows = [
        [
            name + (" <- knee" if level is best else ""),
            f"{level.per_second:.2f}",
            seconds(level.p50_s),
            seconds(level.p95_s),
            ", ".join(f"{n} {kind}" for kind, n in level.failed.items()) or "-",
        ]
        for name, level in zip(names, measured, strict=True)
    ]
    rates = [round(100 * level.per_second) for level in measured]
    latencies = [round(1000 * (level.p95_s or 0)) for level in measured]
    return "\n".join(
        [
            table(["in flight", "calls/s", "p50", "p95", "failed"], rows),
            "",
            "throughput (calls in 100 s)",
            histogram(rates, names, width=40),
            "",
            "latency p95 (ms)",
            histogram(latencies, names, width=40),
            "",
            f"the knee is at {best.concurrency:,} calls in flight: {best.per_second:.2f} calls/s "
            f"at {seconds(best.p50_s)}; more only adds latency",
            f"use: {line}",
        ]
    )
