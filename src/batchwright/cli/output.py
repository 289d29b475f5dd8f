"""Output of commands: text or JSON on stdout, progress on stderr."""

import json
import logging
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from cyclopts import Parameter

from batchwright.errors import printable
from batchwright.remote import address_of

__all__ = [
    "Force",
    "Format",
    "Progress",
    "Quiet",
    "check_picture",
    "count_of",
    "escape_messages",
    "progress_bar",
    "say",
    "show",
    "spelled",
    "terminated_like_ctrl_c",
]

Format = Annotated[
    Literal["text", "json"],
    Parameter(name="--format", help="Text or JSON."),
]
Force = Annotated[
    bool, Parameter(negative="", help="Replace an output that this command did not write.")
]


def spelled(path: object) -> str:
    """A path as it was typed: `Path` makes one slash of the two of an address.

    >>> spelled(Path("s3://bucket/plan")), spelled(Path("plan"))
    ('s3://bucket/plan', 'plan')
    """
    return (isinstance(path, Path) and address_of(path)) or str(path)


def check_picture(path: Path | None, inputs: Iterable[Path] = (), *, force: bool) -> None:
    """Refuse to replace a picture that this package did not draw, before work is done."""
    if path is not None:
        from batchwright.files import check_output
        from batchwright.report.figures import PICTURE

        check_output(path, PICTURE, inputs=inputs, force=force)


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
    say(json.dumps(data, indent=2, default=_plain) if format == "json" else text)


def say(text: str, *, err: bool = False) -> None:
    """Print text on stdout or stderr, at once; every line of every command goes through here.

    It may hold rows, names of files and what servers said, so control characters are escaped.
    """
    file = sys.stderr if err else sys.stdout
    if isinstance(file, TextIOWrapper):
        # Sample ids may have characters that the encoding of this terminal lacks.
        file.reconfigure(errors="backslashreplace")
    print(printable(text), file=file, flush=True)


def count_of(count: int, one: str, many: str | None = None) -> str:
    """A number of things, in the singular if it is one.

    >>> count_of(1, "sample"), count_of(1200, "sample"), count_of(0, "batch", "batches")
    ('1 sample', '1,200 samples', '0 batches')
    """
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def escape_messages() -> None:
    """Escape what Python itself prints: log messages that nobody else handles, and warnings."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_Escaped())
    warnings.formatwarning = _escaped


_written = warnings.formatwarning


def _escaped(*details: Any, **more: Any) -> str:
    return printable(_written(*details, **more))


class _Escaped(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


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
                bar.update(task, completed=done, total=total, note=printable(note, line=True))

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
            say(f"{what}: {done:,} of {total:,}{extra}", err=True)

    return line


def _plain(value: Any) -> Any:
    """Numpy's numbers and arrays as JSON knows them."""
    return value.tolist()


@contextmanager
def terminated_like_ctrl_c() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does: what was kept is said, and how to resume."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
