"""`batchwright calls probe`: throughput and latency of a server at each concurrency."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from batchwright.cli.calls.flags import KeyEnv, ModelFlag, endpoint_at
from batchwright.cli.output import Force, Format, Quiet, progress_bar, show

if TYPE_CHECKING:
    from batchwright.calls.probe import Probe

__all__ = ["probe"]


def probe(
    *,
    endpoint: Annotated[
        str, Parameter(name=["--endpoint", "-e"], help="A server of your own: this is a load test.")
    ],
    model: ModelFlag,
    most: Annotated[int, Parameter(help="The highest concurrency to try.")] = 128,
    max_tokens: Annotated[int, Parameter(help="Completion tokens of each call.")] = 32,
    max_calls: Annotated[int, Parameter(help="Calls to make at most.")] = 8000,
    max_seconds: Annotated[float, Parameter(help="Seconds to measure at most.")] = 600.0,
    key_env: KeyEnv = None,
    plot: Annotated[Path | None, Parameter(help="Plot throughput and latency to this PNG.")] = None,
    force: Force = False,
    quiet: Quiet = False,
    format: Format = "text",
) -> None:
    """Find the fewest calls in flight with 95 % of the best throughput, and how sure that is."""
    from batchwright.calls.probe import probe as measure

    target = endpoint_at(endpoint, key_env)
    if plot is not None:
        from batchwright.files import check_output
        from batchwright.report.figures import PICTURE

        check_output(plot, PICTURE, force=force)
    with progress_bar("calls, at most", quiet) as progress:

        def seen(calls: int) -> None:
            if progress is not None:
                progress(calls, max_calls)

        found = measure(
            target,
            model,
            most=most,
            max_tokens=max_tokens,
            max_calls=max_calls,
            max_seconds=max_seconds,
            progress=seen,
        )
    answer = found.answer
    line = f"batchwright calls run -i prompts.jsonl -o answers.jsonl --endpoint {target.name} "
    line += f"--model {model} --batch-size {answer.concurrency if answer.sure else 'auto'}"
    if plot is not None:
        from batchwright.report.figures import levels_png

        levels = [
            (one.concurrency, one.per_second, one.p50_s or 0, one.p95_s or 0)
            for one in found.levels
        ]
        levels_png(plot, levels, answer.concurrency)
    data = {
        "endpoint": target.name,
        "model": model,
        "levels": [level.as_dict() for level in found.levels],
        "knee": answer.concurrency,
        "interval": [answer.low, answer.high],
        "probability": round(answer.probability, 4),
        "sure": answer.sure,
        "still_grows": answer.at_most,
        "calls": found.calls,
        "seconds": round(found.seconds, 3),
        "failed": found.failed,
        "use": line,
    }
    show(data, _drawn(found, most, line), format)


def _drawn(found: "Probe", most: int, line: str) -> str:
    from batchwright.report.text import histogram, seconds, table

    answer = found.answer
    names = [f"{level.concurrency:,}" for level in found.levels]
    rows = [
        [
            name + (" <- knee" if level.concurrency == answer.concurrency else ""),
            f"{level.calls:,}",
            f"{level.per_second:.2f}" if level.sustained else "too many",
            seconds(level.p50_s),
            seconds(level.p95_s),
            f"{level.failed:,}",
            f"{level.rejected:,}",
        ]
        for name, level in zip(names, found.levels, strict=True)
    ]
    rates = [round(100 * level.per_second) for level in found.levels]
    latencies = [round(1000 * (level.p95_s or 0)) for level in found.levels]
    return "\n".join(
        [
            table(["in flight", "calls", "calls/s", "p50", "p95", "failed", "rejected"], rows),
            "",
            "throughput (calls in 100 s)",
            histogram(rates, names, width=40),
            "",
            "latency p95 (ms)",
            histogram(latencies, names, width=40),
            "",
            *_sentences(found, most),
            f"use: {line}",
        ]
    )


def _sentences(found: "Probe", most: int) -> list[str]:
    answer = found.answer
    told = [
        f"{answer.concurrency:,} calls in flight are the fewest with 95 % of the best throughput "
        f"(90 % interval: {answer.low:,} to {answer.high:,}); more only adds latency"
    ]
    if answer.at_most:
        told.append(f"throughput still grows at {most:,} calls in flight; give a higher --most")
    if not answer.sure:
        told.append(
            f"not sure: right within a factor of 1.25 with probability {answer.probability:.2f} "
            f"after {found.calls:,} calls in {found.seconds:.0f} s; give more --max-calls or "
            "--max-seconds, and leave the server to the probe"
        )
    return told
