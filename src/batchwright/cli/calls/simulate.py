"""`batchwright calls simulate`: a model server of known behaviour, on this machine."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from batchwright.cli.output import Format, show
from batchwright.errors import ConfigError

__all__ = ["simulate"]


def simulate(
    *,
    kind: Annotated[
        Literal["queue", "reject", "thrash", "batch"],
        Parameter(help="What happens above the knee: wait, 429, slow down, batch and wait."),
    ] = "queue",
    knee: Annotated[
        str, Parameter(help="Calls it bears at once; 0:60,10:20 is 60, and 20 from second 10 on.")
    ] = "8",
    latency: Annotated[float, Parameter(help="Mean seconds of a call.")] = 0.05,
    sigma: Annotated[float, Parameter(help="Spread of the lognormal latency; 0 is fixed.")] = 0.5,
    token_seconds: Annotated[float, Parameter(help="Seconds for each token of an answer.")] = 0.0,
    retry_after: Annotated[
        float | None, Parameter(help="Seconds in Retry-After of 429 and 503.")
    ] = None,
    rpm: Annotated[int | None, Parameter(help="Requests a minute.")] = None,
    tpm: Annotated[int | None, Parameter(help="Tokens a minute.")] = None,
    fault: Annotated[
        list[str] | None,
        Parameter(help="NAME=CHANCE, several times: 429=0.01, hang=0.001, ...", negative=""),
    ] = None,
    questions: Annotated[
        Path | None,
        Parameter(help="JSON lines with question, answer, category, for the model sim-qa."),
    ] = None,
    model: Annotated[
        list[str] | None, Parameter(help="One more model name, several times.", negative="")
    ] = None,
    seed: Annotated[int, Parameter(help="Answers, latencies and faults depend on it.")] = 0,
    port: Annotated[int, Parameter(help="0 takes a free one.")] = 0,
    format: Format = "text",
) -> None:
    """Serve simulated models on 127.0.0.1 until Ctrl-C, then print what was asked of them.

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
        print(json.dumps({"url": url}) if format == "json" else url, flush=True)
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, server.stop)

    server.run(port, None, started)
    counts = server.stats()
    told = {name: value for name, value in counts.items() if value or name == "received"}
    rows = [[name.replace("_", " "), str(value)] for name, value in told.items()]
    show(counts, table(["calls", "count"], rows), format)


def _knee(text: str) -> int | list[tuple[float, int]]:
    try:
        if ":" not in text:
            return int(text)
        pairs = [part.split(":") for part in text.split(",")]
        return [(float(since), int(knee)) for since, knee in pairs]
    except ValueError:
        raise ConfigError(
            f"--knee {text} is neither a number nor pairs of second and knee like 0:60,10:20"
        ) from None


def _faults(given: list[str]) -> dict[str, float]:
    found = {}
    for one in given:
        name, _, chance = one.partition("=")
        try:
            found[name] = float(chance)
        except ValueError:
            raise ConfigError(f"--fault {one} is not NAME=CHANCE, as in 429=0.01") from None
    return found
