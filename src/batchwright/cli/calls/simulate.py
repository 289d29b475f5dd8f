"""`batchwright calls simulate`: a model server of known behaviour on this machine."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from batchwright.cli.output import Format, say, show
from batchwright.errors import ConfigError

__all__ = ["simulate"]


def simulate(
    *,
    kind: Annotated[
        Literal["queue", "reject", "thrash", "batch"],
        Parameter(help="Above the knee calls queue, get 429, slow down, or batch and queue."),
    ] = "queue",
    knee: Annotated[
        str, Parameter(help="Concurrency it sustains; 0:60,10:20 is 60, and 20 from second 10 on.")
    ] = "8",
    latency: Annotated[float, Parameter(help="Mean latency of a call in seconds.")] = 0.05,
    sigma: Annotated[float, Parameter(help="Sigma of the lognormal latency; 0 is fixed.")] = 0.5,
    token_seconds: Annotated[
        float, Parameter(help="Additional seconds per completion token.")
    ] = 0.0,
    batch_seconds: Annotated[
        float, Parameter(help="Seconds that a batch of the Batch API takes.")
    ] = 0.1,
    retry_after: Annotated[
        float | None, Parameter(help="Retry-After of 429 and 503 in seconds.")
    ] = None,
    rpm: Annotated[int | None, Parameter(help="Rate limit in requests per minute.")] = None,
    tpm: Annotated[int | None, Parameter(help="Rate limit in tokens per minute.")] = None,
    fault: Annotated[
        list[str] | None,
        Parameter(help="NAME=PROBABILITY, repeatable: 429=0.01, hang=0.001, ...", negative=""),
    ] = None,
    questions: Annotated[
        Path | None,
        Parameter(help="JSONL with question, answer, category, for the model sim-qa."),
    ] = None,
    model: Annotated[
        list[str] | None, Parameter(help="An additional model name, repeatable.", negative="")
    ] = None,
    seed: Annotated[int, Parameter(help="Random seed of responses, latencies and faults.")] = 0,
    port: Annotated[int, Parameter(help="Port to listen on; 0 takes a free one.")] = 0,
    format: Format = "text",
) -> None:
    """Serve simulated models on 127.0.0.1 until Ctrl-C, then print the request counts.

    The first line is the address: OpenAI's protocol under /v1, Ollama's under /api.
    """
    import asyncio
    import json
    import signal

    from batchwright.calls.simulator import Simulator
    from batchwright.calls.simulator.server import Server
    from batchwright.report.text import table

    server = Server(
        Simulator(
            kind=kind,
            knee=_knee(knee),
            latency_s=latency,
            sigma=sigma,
            token_s=token_seconds,
            batch_s=batch_seconds,
            retry_after_s=retry_after,
            rpm=rpm,
            tpm=tpm,
            faults=_faults(fault or []),
            questions=questions or (),
            models=model or (),
            seed=seed,
        )
    )

    def started(url: str) -> None:
        say(json.dumps({"url": url}) if format == "json" else url)
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, server.stop)

    server.run(port, None, started)
    counts = server.stats()
    shown = {name: value for name, value in counts.items() if value or name == "received"}
    rows = [[name.replace("_", " "), str(value)] for name, value in shown.items()]
    show(counts, table(["calls", "count"], rows), format)


def _knee(text: str) -> int | list[tuple[float, int]]:
    try:
        if ":" not in text:
            return int(text)
        pairs = [part.split(":") for part in text.split(",")]
        return [(float(since), int(knee)) for since, knee in pairs]
    except ValueError:
        raise ConfigError(
            f"--knee must be a number or pairs of second and knee like 0:60,10:20, got {text}"
        ) from None


def _faults(given: list[str]) -> dict[str, float]:
    found = {}
    for one in given:
        name, _, probability = one.partition("=")
        try:
            found[name] = float(probability)
        except ValueError:
            raise ConfigError(
                f"--fault must be NAME=PROBABILITY, as in 429=0.01, got {one}"
            ) from None
    return found
