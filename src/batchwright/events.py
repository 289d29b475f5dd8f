"""The run log: typed records appended as JSON lines, readable while a run is under way.

A record is `{"t": seconds since start, "kind": ..., ..., "crc": ...}`, with the check of `lines`.
Readers ignore kinds they do not know. A process killed while writing leaves at most one torn last
line, which readers skip and the next writer cuts off.
"""

import contextlib
import json
import math
import numbers
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from batchwright.errors import BadFile, CannotWrite, ConfigError, Mismatch, MissingFile
from batchwright.files import existing, open_regular, parse_json, read_regular
from batchwright.lines import (
    LineFile,
    check_of,
    has_check,
    read_line,
    read_lines,
)

__all__ = ["Event", "EventLog", "EventTail", "changed_lines", "finite", "read_events"]


class Event(NamedTuple):
    """One record: when, of what kind, and its fields."""

    t: float
    kind: str
    fields: dict[str, Any]


class EventLog:
    """Appends records to `events.jsonl`; each `write` is one line handed to the system at once.

    Records survive a power cut after `sync`, which `close` calls too. One process writes a log.
    """

    def __init__(self, path: Path, *, start: float | None = None) -> None:
        self.path = path
        self._start = time.monotonic() if start is None else start
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = LineFile(path, "run log")
        except BadFile:
            raise
        except OSError as error:
            raise CannotWrite(f"cannot open the run log {path}: {error.strerror}") from error

    def write(self, kind: str, /, **fields: Any) -> None:
        """Append one record. Values must be JSON; NaN and infinity are written as null."""
        if fields.keys() & {"t", "kind", "crc"}:
            raise ConfigError(
                f"a record of {kind!r} cannot have fields t, kind or crc; rename them"
            )
        record = {"t": round(time.monotonic() - self._start, 4), "kind": kind, **fields}
        line = json.dumps(finite(record), separators=(",", ":"), allow_nan=False).encode()
        try:
            self._file.append(line)
        except OSError as error:
            raise CannotWrite(
                f"cannot write the run log {self.path}: {error.strerror}; "
                f"free space, all earlier records are kept"
            ) from error

    def sync(self) -> None:
        """Make what was written survive a power cut."""
        self._file.sync()

    def close(self) -> None:
        if not self._file.closed:
            try:
                self.sync()
            finally:
                self._file.close()

    def __enter__(self) -> "EventLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_events(path: Path) -> Iterator[Event]:
    """Every whole record, in order. A torn last line is skipped; a changed line is an error."""
    return read_lines(path, read_regular(existing(path, "run log")), "run log", _event)


def changed_lines(path: Path) -> list[int]:
    """Numbers of the lines that are not as they were written; none if there is no log."""
    tail, before = EventTail(path), -1
    with contextlib.suppress(MissingFile):
        while tail.offset != before:
            before = tail.offset
            tail.read()
    return tail.bad


def _event(record: dict[str, Any]) -> Event:
    return Event(float(record.pop("t")), str(record.pop("kind")), record)


class EventTail:
    """Reads a log that is being written: each `read` gives the records appended since the last.

    Every line is checked as `read_events` does, but one that is not as it was written does not
    stop it: it is left out and named, so that the rest of a damaged log can still be looked at.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        """Bytes read, up to the end of the last whole line."""
        self.size = 0
        """Bytes that the file had when it was last read."""
        self.torn = 0
        """1 if the last line is incomplete: its writer was killed, or is still at it."""
        self.bad: list[int] = []
        """Numbers of the lines that are not as they were written, or follow one that is missing."""
        self._lines = 0
        self._before: tuple[int, ...] = (0,)

    def read(self, most_bytes: int = 2**18) -> list[Event]:
        """The next records, from at most `most_bytes` of the file; an empty list at its end.

        A file that became shorter was replaced: `Mismatch`.
        """
        with open_regular(existing(self.path, "run log")) as file:
            self.size = os.fstat(file.fileno()).st_size
            if self.size < self.offset:
                raise Mismatch(f"{self.path} became shorter; it was replaced, so open it again")
            file.seek(self.offset)
            data = file.read(most_bytes)
            # One line may be longer than all that was asked for.
            while b"\n" not in data and (more := file.read(most_bytes)):
                data += more
        whole, newline, rest = data.rpartition(b"\n")
        self.offset += len(whole) + len(newline)
        lines = whole.split(b"\n") if newline else []
        events = self._all_at_once(lines)
        if events is None:
            events = self._one_by_one(lines)
        self.torn = int(bool(rest) and self.offset + len(rest) >= self.size)
        return events

    def _all_at_once(self, lines: list[bytes]) -> list[Event] | None:
        """All lines as records, parsed as one array, which is much faster; None if one is none.

        Every line has its check, and there have to be as many records as lines: none joins with
        its neighbours unseen.
        """
        if len(self._before) > 1:
            return None
        before = self._before[0]
        bodies = []
        for line in lines:
            found = read_line(line, before) if line[:1] == b"{" else None
            if found is None:
                return None
            body, before = found
            bodies.append(body)
        try:
            records = json.loads(b"[" + b",".join(bodies) + b"]")
            if len(records) != len(lines):
                return None
            events = [_event(record) for record in records]
        except (
            LookupError,
            TypeError,
            ValueError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ):
            return None
        self._lines += len(lines)
        self._before = (before,)
        return events

    def _one_by_one(self, lines: list[bytes]) -> list[Event]:
        """The records among lines of which some are none; those are named."""
        events = []
        for line in lines:
            self._lines += 1
            event = self._event(line)
            if event is not None:
                events.append(event)
            else:
                self.bad.append(self._lines)
        return events

    @property
    def share(self) -> float:
        """How much of the file is read, from 0 to 1; a torn last line cannot be read."""
        if self.torn:
            return 1.0
        return min(1.0, self.offset / self.size) if self.size else 1.0

    def _event(self, line: bytes) -> Event | None:
        event = None
        found = next(filter(None, (read_line(line, before) for before in self._before)), None)
        if found is not None:
            with contextlib.suppress(
                LookupError, TypeError, ValueError, AttributeError, ArithmeticError
            ):
                event = _event(parse_json(found[0]))
        if found is not None and event is not None:
            self._before = (found[1],)
        elif has_check(line):
            # The next line follows the last good one if this was added, or this if it was changed.
            self._before = (self._before[0], check_of(line))
        return event


def finite(value: Any) -> Any:
    """`value` as JSON can hold it: NaN and infinity become None, numpy's numbers plain ones.

    >>> finite({"loss": float("nan"), "steps": (1, 2)})
    {'loss': None, 'steps': [1, 2]}
    """
    if isinstance(value, bool) or value is None:
        return value
    # Numpy's numbers are integral and real too, but JSON does not know them.
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return value
