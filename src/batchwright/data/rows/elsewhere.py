"""Files of rows that are read where the rows are used: what another machine finds them by.

    here: path or address, version, range of rows  ->  there: the same rows, read there

A machine that does not see the same file says so, and the rows are sent to it instead.
"""

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from batchwright.errors import BatchwrightError, one_line
from batchwright.remote import address_of, fetched, origin_of

__all__ = ["FarFile", "NotTheSame", "far_chunk"]


class NotTheSame(BatchwrightError):
    """This machine does not see a file as the one does that named it."""


@dataclass(frozen=True, slots=True)
class FarFile:
    """A file as any machine may find it: by its path or address, in one version."""

    place: str
    version: str
    """Of an object its checksum, of a file its size and the time of its last change."""

    @classmethod
    def of(cls, path: Path, found: os.stat_result) -> "FarFile":
        """A file of this machine, as it was when it was opened."""
        if (origin := origin_of(path)) is not None:
            return cls(*origin)
        return cls(os.path.abspath(path), _version(found))

    def here(self) -> Path:
        """The file on this machine, or the copy of an object, which is made at its first use.

        Raises:
            NotTheSame: it is not here, or it is another one.
        """
        try:
            if address_of(self.place) is None:
                path = Path(self.place)
                found = _version(path.stat())
            else:
                path, found = _copied(self.place)
        except (OSError, BatchwrightError) as error:
            # Not there, or no library or no right to read it.
            raise NotTheSame(one_line(error)) from None
        if found != self.version:
            raise NotTheSame(f"{self.place} is another file there")
        return path


def far_chunk(source: Any, start: int, stop: int) -> Any:
    """The chunk of some rows of a source as one that is read where it is used.

    None where only this process can read them: pipes, compressed files, rows in memory.
    """
    make = getattr(source, "far_chunk", None)
    return None if make is None else make(start, stop)


def _version(found: os.stat_result) -> str:
    return f"{found.st_size} bytes of {found.st_mtime_ns}"


@lru_cache(8)
def _copied(address: str) -> tuple[Path, str]:
    path = fetched(address)
    origin = origin_of(path)
    return path, "" if origin is None else origin[1]
