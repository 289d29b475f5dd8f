"""Token buckets that the processes of one machine share through a file."""

import contextlib
import math
import os
from collections.abc import Iterator

from batchwright.calls.cache.process_id import boot_id
from batchwright.calls.cache.sqlite import Database

__all__ = ["RateFile"]

APPLICATION_ID = 0x62775261
VERSION = 1
SCHEMA = """
CREATE TABLE buckets(
    name TEXT PRIMARY KEY, boot TEXT NOT NULL, requests REAL NOT NULL, tokens REAL NOT NULL)
"""


class RateFile:
    """When the buckets of requests and tokens are full again, by the name of their endpoint.

    Times are of `time.monotonic()`, which is one clock for all processes of a machine.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._database = Database(path, "rate limit file", SCHEMA, APPLICATION_ID, VERSION)

    @contextlib.contextmanager
    def locked(self, name: str) -> Iterator[list[float]]:
        """The two times, held by this process alone; what the block leaves in them is saved."""
        with self._database.writing() as connection:
            # The clock restarts with the machine, and so do the buckets.
            row = connection.execute(
                "SELECT requests, tokens FROM buckets WHERE name = ? AND boot = ?",
                (name, boot_id()),
            ).fetchone()
            before = row or (-math.inf, -math.inf)
            times = list(before)
            yield times
            if tuple(times) != before:
                connection.execute(
                    "INSERT OR REPLACE INTO buckets VALUES (?, ?, ?, ?)", (name, boot_id(), *times)
                )

    def close(self) -> None:
        self._database.close()
