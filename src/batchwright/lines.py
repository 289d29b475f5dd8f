"""Files of JSON lines that are appended to, with a check in every line.

The last field of a line is a CRC of its bytes and of all lines before it, in eight hexadecimal
digits:

    {"t":0.0,"kind":"start","crc":"6c2f5e1a"}

So a line that was changed, added, moved or taken out is named. A process killed while writing
leaves the beginning of a line: it is told apart from damage, and cut off by the next writer. What
cannot be told from a log that was never continued is an end that was cut off between two lines.
"""

import contextlib
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from batchwright.errors import BadFile, one_line
from batchwright.files import append_to, parse_json, write_all

__all__ = [
    "LineFile",
    "check_of",
    "checked_line",
    "checked_lines",
    "has_check",
    "read_line",
    "read_lines",
]

T = TypeVar("T")

_TAIL = len(b',"crc":"01234567"}')
_HAS_CHECK = re.compile(rb',"crc":"[0-9a-f]{8}"\}$')


def checked_line(body: bytes, before: int = 0) -> bytes:
    """A JSON object as a line with its check, which follows the check `before` it.

    >>> checked_line(b'{"t":1}')
    b'{"t":1,"crc":"c0c55bc3"}\\n'
    """
    return body[:-1] + _tail(zlib.crc32(body[:-1], before)) + b"\n"


def _tail(check: int) -> bytes:
    return b',"crc":"%08x"}' % check


def checked_lines(bodies: Iterable[bytes]) -> bytes:
    """JSON objects as a whole file of lines with their checks."""
    lines, before = [], 0
    for body in bodies:
        lines.append(checked_line(body, before))
        before = check_of(lines[-1])
    return b"".join(lines)


def read_line(line: bytes, before: int = 0) -> tuple[bytes, int] | None:
    """The JSON object and the check of a line, with its break or without; None if it is damaged.

    >>> read_line(b'{"t":1,"crc":"c0c55bc3"}\\n')
    (b'{"t":1}', 3234159555)
    """
    if line[-1:] == b"\n":
        line = line[:-1]
    # Slices and one CRC: logs have millions of lines.
    body = line[:-_TAIL]
    check = zlib.crc32(body, before)
    return (body + b"}", check) if body and line[-_TAIL:] == _tail(check) else None


def has_check(line: bytes) -> bool:
    """Whether a line ends as checked ones do, be it right or wrong."""
    return _HAS_CHECK.search(line) is not None


def check_of(line: bytes) -> int:
    """The check of a line that has one."""
    return int(line.rstrip(b"\n")[-10:-2], 16)


def read_lines(
    path: Path, raw: bytes, what: str, make: Callable[[dict[str, Any]], T]
) -> Iterator[T]:
    """What `make` makes of every whole line; `BadFile` names the first that is not as written."""
    before = 0
    lines = raw.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if (whole := read_line(line, before)) is not None:
            body, before = whole
            try:
                made = make(parse_json(body))
            except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
                raise BadFile(
                    f"{path}, line {number}: not a line of a {what}: {one_line(error)[:200]}"
                ) from None
            yield made
        elif number < len(lines) or not _is_beginning(line, before):
            raise BadFile(
                f"{path}, line {number}: this line of the {what} is not as it was written, or one "
                f"before it is missing; restore the file, or move it away"
            )


def _is_beginning(line: bytes, before: int) -> bool:
    """Whether the end of a file is what a killed writer leaves: nothing, or a part of a line."""
    # A whole line with something behind it is none, whatever stands in the place of its break.
    at = line.rfind(b"}") + 1
    return not (0 < at < len(line) and read_line(line[:at], before)) and line[:1] in (b"", b"{")


class LineFile:
    """A file of checked lines, opened to append; what a killed writer left is cut off.

    Only one process may write it. `OSError` says what the disk refuses.
    """

    def __init__(self, path: Path, what: str) -> None:
        self.path = path
        self._handle = append_to(path)
        try:
            self._size, self._check = self._end(what)
            os.ftruncate(self._handle, self._size)
        except BaseException:
            os.close(self._handle)
            raise

    def append(self, body: bytes) -> None:
        """Add a JSON object, handed to the system before this returns, or nothing of it."""
        line = checked_line(body, self._check)
        try:
            write_all(self._handle, line)
        except OSError:
            # A part may be there; if it cannot be removed now, the next to open it does.
            with contextlib.suppress(OSError):
                os.ftruncate(self._handle, self._size)
            raise
        self._size += len(line)
        self._check = check_of(line)

    def sync(self) -> None:
        """Make what was written survive a power cut."""
        os.fsync(self._handle)

    @property
    def closed(self) -> bool:
        return self._handle < 0

    def close(self) -> None:
        if not self.closed:
            os.close(self._handle)
            self._handle = -1

    def _end(self, what: str) -> tuple[int, int]:
        """The size of all whole lines, and the check of the last of them."""
        size = os.fstat(self._handle).st_size
        tail, at = b"", size
        # From the end on backwards, until two line breaks are seen or the beginning.
        while at and tail.count(b"\n") < 2:
            step = min(at, 1 << 16)
            at -= step
            tail = os.pread(self._handle, step, at) + tail
        whole, _, torn = tail.rpartition(b"\n")
        check = 0
        if whole:
            last = whole.rpartition(b"\n")[2]
            if not has_check(last):
                raise BadFile(f"{self.path} is not a {what} of this version; move it away")
            check = check_of(last)
        if (found := read_line(torn, check)) is not None:
            # Only its line break is missing.
            write_all(self._handle, b"\n")
            return size + 1, found[1]
        if torn[:1] not in (b"", b"{"):
            raise BadFile(f"{self.path} is not a {what}; move it away")
        return size - len(torn), check
