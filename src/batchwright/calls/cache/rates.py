"""Token buckets that the processes of one machine share through a file."""

import contextlib
import json
import math
import os
from collections.abc import Iterator
from typing import Any

from batchwright.calls.cache.process_id import boot_id
from batchwright.calls.cache.sqlite import Database
from batchwright.errors import BadFile
from batchwright.files import parse_json
from batchwright.lines import checked_line, read_line

__all__ = ["RateFile"]

APPLICATION_ID = 0x62775261
VERSION = 2
# One row, so that a damaged one is noticed and none can be missing.
SCHEMA = """
CREATE TABLE buckets(id INTEGER PRIMARY KEY, line BLOB NOT NULL);
INSERT INTO buckets VALUES (1, '')
"""


class RateFile:
    """When the buckets of requests and tokens are full again, by the name of their endpoint.

    Times are of `time.monotonic()`, which is one clock for all processes of a machine.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self._database = Database(path, "rate limit file", SCHEMA, APPLICATION_ID, VERSION)

    @contextlib.contextmanager
    def locked(self, name: str) -> Iterator[list[float]]:
        """The two times, held by this process alone; what the block leaves in them is saved."""
        with self._database.writing() as connection:
            buckets = self._read(connection.execute("SELECT id, line FROM buckets").fetchall())
            times = list(buckets.get(name, (-math.inf, -math.inf)))
            before = tuple(times)
            yield times
            if tuple(times) != before:
                body = json.dumps({"boot": boot_id(), "buckets": {**buckets, name: times}})
                line = checked_line(body.encode())
                connection.execute("UPDATE buckets SET line = ? WHERE id = 1", (line,))

    def _read(self, rows: list[tuple[Any, Any]]) -> dict[str, list[float]]:
        try:
            ((number, line),) = rows
            if number == 1 and not line:
                return {}
            whole = read_line(line)
            if number != 1 or whole is None:
                raise ValueError("it does not match its checksum")
            found = parse_json(whole[0])
            # The clock restarts with the machine, and so do the buckets.
            if found["boot"] != boot_id():
                return {}
            return {name: [float(a), float(b)] for name, (a, b) in found["buckets"].items()}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise BadFile(
                f"the rate limit file {self._path} is damaged: {error}; move it away and run again"
            ) from None

    def close(self) -> None:
        self._database.close()
