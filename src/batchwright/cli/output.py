"""Output of commands: text or JSON on stdout, progress on stderr."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from typing import Annotated, Any, Literal, Protocol

from cyclopts import Parameter

__all__ = ["Force", "Format", "Progress", "Quiet", "progress_bar", "show"]

Format = Annotated[
    Literal["text", "json"],
    Parameter(name="--format", help="Text or JSON."),
]
Force = Annotated[
    bool, Parameter(negative="", help="Replace an output that this command did not write.")
]
Quiet = Annotated[
    bool, Parameter(name=["--quiet", "-q"], negative="", help="Show no progress bar.")
]


class Progress(Protocol):
    """Reports progress; `note` is shown next to it, such as the loss."""

    def __call__(self, done: int, total: int, note: str = "") -> None: ...


PLAIN_EVERY_S = 30.0
"""Seconds between progress lines where there is no terminal to redraw."""


def show(data: dict[str, Any] | list[Any], text: str, format: str) -> None:
    """Print one of the two forms of the same result."""
    if isinstance(sys.stdout, TextIOWrapper):
        # Sample ids may have characters that the encoding of this terminal lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    print(json.dumps(data, indent=2, default=_plain) if format == "json" else text)


@contextmanager
def progress_bar(
    what: str, quiet: bool = False, *, at_once: bool = False
) -> Iterator[Progress | None]:
    """A callback (done, total, note): a bar on a terminal, a line now and then in a log.

    With `at_once` the log has a line for the first call too, for work whose first step is slow.
    """
    if quiet:
        yield None
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as Bars
        from rich.progress import TimeRemainingColumn as Remaining

        note = TextColumn("{task.fields[note]}", markup=False)
        columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), Remaining(), note)
        with Bars(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, note="")

            def redraw(done: int, total: int, note: str = "") -> None:
                bar.update(task, completed=done, total=total, note=note)

            yield redraw
    else:
        yield _plain_lines(what, 0.0 if at_once else PLAIN_EVERY_S)


def _plain_lines(what: str, first_s: float) -> Progress:
    last = time.monotonic() + first_s - PLAIN_EVERY_S

    def line(done: int, total: int, note: str = "") -> None:
        nonlocal last
        if time.monotonic() - last >= PLAIN_EVERY_S:
            last = time.monotonic()
            extra = f", {note}" if note else ""
            print(f"{what}: {done:,} of {total:,}{extra}", file=sys.stderr, flush=True)

    return line


def _plain(value: Any) -> Any:
    """Numpy's numbers and arrays as JSON knows them."""
    return value.tolist()
