"""`batchwright view`: the live page over a folder of runs."""

import os
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from batchwright.cli.output import say
from batchwright.errors import BadFile, MissingFile

__all__ = ["serve_page", "view"]

Port = Annotated[int, Parameter(help="Port; 0 picks a free one.")]
Host = Annotated[
    str, Parameter(help="Address; not loopback needs the variable BATCHWRIGHT_VIEW_TOKEN.")
]


def view(
    runs: Annotated[Path, Parameter(help="A run directory, or a folder of them.")],
    *,
    port: Port = 7331,
    host: Host = "127.0.0.1",
) -> None:
    """Show runs in a browser, live: are batches, calls and environments full? Only reads."""
    from batchwright.report.summary import find_runs

    if not runs.is_dir():
        raise MissingFile(f"there is no folder {runs}; name a run directory or a folder of runs")
    count = len(find_runs(runs))
    if not count and (runs / "manifest.json").is_file():
        raise BadFile(f"{runs} is a batch plan; run: batchwright data batchplan view -p {runs}")
    serve_page(runs, host, port, f"{count:,} {'run' if count == 1 else 'runs'} of {runs}")


def serve_page(path: Path, host: str, port: int, what: str, *, plan: bool = False) -> None:
    """Serve the page until Ctrl-C and say where it is."""
    from batchwright.report.server import bound, serve_view

    token = os.environ.get("BATCHWRIGHT_VIEW_TOKEN") or None

    def ready(url: str) -> None:
        way = f"{url}?token=$BATCHWRIGHT_VIEW_TOKEN" if token else url
        say(f"{what} at {way} (Ctrl-C stops it)")
        if "SSH_CONNECTION" in os.environ and not token:
            at = url.removeprefix("http://").rstrip("/")
            number = at.rpartition(":")[2]
            say(
                f"from your own machine: ssh -L {number}:{at} {os.uname().nodename}, then open "
                f"http://127.0.0.1:{number}/"
            )

    serve_view(path, bound(host, port, token), token=token, plan=plan, ready=ready)
    say("stopped", err=True)
