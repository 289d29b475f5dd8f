"""Cached responses, so that an equal exact request is never paid for twice."""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from pathlib import Path
from sqlite3 import Connection
from typing import Any, Literal, Self, TypeVar

from batchwright.calls.cache import entries
from batchwright.calls.cache.entries import KEY_BYTES, Row
from batchwright.calls.cache.process_id import has_exited, new_owner
from batchwright.calls.cache.pruning import prune
from batchwright.calls.cache.sqlite import Database
from batchwright.calls.outcome import Done, Outcome
from batchwright.calls.request import Request
from batchwright.errors import BadFile, CannotWrite, ConfigError
from batchwright.files import writing

__all__ = ["Cache", "CacheStats", "Row"]

T = TypeVar("T")

APPLICATION_ID = 0x62774361
VERSION = 3
# The response stands before the request, so that a get need not read past it. Random keys stay
# out of the table's own order: rows are appended, only the index is written all over.
SCHEMA = """
CREATE TABLE entries(
    id INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, digest BLOB NOT NULL,
    at INTEGER NOT NULL, model TEXT NOT NULL, answer BLOB NOT NULL, request BLOB NOT NULL);
CREATE TABLE leases(key BLOB PRIMARY KEY, owner TEXT NOT NULL, until REAL NOT NULL) WITHOUT ROWID;
CREATE TRIGGER answered AFTER INSERT ON entries BEGIN
    DELETE FROM leases WHERE key = NEW.key; END;
CREATE TABLE tally(since INTEGER NOT NULL, hits INTEGER NOT NULL);
INSERT INTO tally VALUES (CAST(strftime('%s', 'now') AS INTEGER), 0)
"""
MOST_LEASE_S = 7200.0
"""A lease that ends later is of another clock."""
CHUNK = 128
"""Keys or rows of one statement, at most."""
ENTRIES = "SELECT key, digest, at, model, answer FROM entries WHERE key IN ({})"
LEASES = "SELECT key, owner, until FROM leases WHERE key IN ({})"
# Only where there is no response yet and nobody else has a lease, not even an expired one. The time
# comes from a query of its own, which SQLite makes once: it is a function in Python, and each call
# of it may have to wait until the loop lets go of the interpreter.
LEASE = (
    "INSERT INTO leases SELECT column1, ?, (SELECT monotonic()) + ? FROM (VALUES {}) "
    "WHERE NOT EXISTS (SELECT 1 FROM entries WHERE key = column1) "
    "ON CONFLICT (key) DO UPDATE SET until = excluded.until WHERE owner = excluded.owner"
)
INSERT = "INSERT OR {} INTO entries(key, digest, at, model, answer, request) VALUES "


@dataclass(frozen=True, slots=True)
class CacheStats:
    """What a cache holds and how often it was used."""

    entries: int
    value_bytes: int
    """Requests and responses alone."""
    file_bytes: int
    """The file with its overhead and its write-ahead log."""
    models: dict[str, int]
    """Responses by model, the most first."""
    hits: int
    """Responses served since `since`, by every process that closed the cache or put something."""
    since: datetime
    oldest: datetime | None
    newest: datetime | None
    damaged: int
    """Entries with a wrong checksum that this process met."""


class Cache:
    """A file of responses by `Request.key`; any number of processes and threads may share it.

    When `put_many` has returned, its responses survive `kill -9`. A power cut may take the last
    seconds of them. Every response carries a checksum with its key: a damaged one is a miss, is
    counted in `damaged`, and is replaced by the next response.

    Cached are responses to exact requests that are not empty. A response that was cut off is
    cached too, since the same request is cut off at the same place, and `Done.cut_off` tells;
    with `cut_off="skip"` it is neither stored nor returned. The first response stays. With
    `mode="replay"` the file is a cassette: it is only read, its folder may be read-only, and
    nobody should write to it meanwhile.

    >>> import tempfile
    >>> from batchwright.calls.request import chat
    >>> request = chat("m", "2+2?", temperature=0)
    >>> body = {"choices": [{"message": {"content": "4"}, "finish_reason": "stop"}]}
    >>> with tempfile.TemporaryDirectory() as folder, Cache(f"{folder}/calls.db") as cache:
    ...     cache.put_many([(request, Done("4", body, "stop"))])
    ...     cache.get_many([request.key])[request.key].text
    1
    '4'
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        cut_off: Literal["skip", "keep"] = "keep",
        mode: Literal["use", "replay"] = "use",
    ) -> None:
        if cut_off not in ("skip", "keep"):
            raise ConfigError(f"cut_off must be 'skip' or 'keep', got {cut_off!r}")
        if mode not in ("use", "replay"):
            raise ConfigError(f"mode must be 'use' or 'replay', got {mode!r}")
        self.path = Path(path)
        self.cut_off = cut_off
        self.mode = mode
        self.hits = self.misses = self.damaged = 0
        self._unsaved_hits = 0
        self._pid, self._owner = 0, ""
        known: Any = (path, "call cache", SCHEMA, APPLICATION_ID, VERSION)
        self._database = Database(*known, read_only=mode == "replay")
        self._at_once = Database(*known, waits=False) if mode == "use" else None
        """For an event loop, which must not wait for a lock or a disk."""

    def __repr__(self) -> str:
        return f"Cache({str(self.path)!r}, mode={self.mode!r}, cut_off={self.cut_off!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def owner(self) -> str:
        """The name under which this cache in this process takes leases."""
        self._notice_fork()
        return self._owner

    def wait_at_most(self, seconds: float) -> None:
        """How long a lock that another process holds on the file is waited for."""
        self._database.wait_at_most(seconds)

    def get_many(self, keys: Sequence[bytes]) -> dict[bytes, Done]:
        """The responses that are here; a key that is not in the result is a miss."""
        self._notice_fork()
        wanted = {key[:KEY_BYTES]: key for key in keys}
        found: dict[bytes, Done] = {}
        with self._database.reading() as connection:
            for row in _select(connection, ENTRIES, list(wanted)):
                # A damaged index may lead to another row.
                if row[0] not in wanted or not entries.is_intact(*row):
                    self.damaged += 1
                elif (done := self._usable(row[-1])) is not None:
                    found[wanted[row[0]]] = done
            self.hits += len(found)
            self.misses += len(wanted) - len(found)
            self._unsaved_hits += len(found)
        return found

    def put_many(self, outcomes: Iterable[tuple[Request, Outcome]]) -> int:
        """Store what may be cached, in one transaction; how many of the outcomes are here now.

        Leases on what was stored end with it.
        """
        rows = [
            self.row(request, outcome) for request, outcome in outcomes if isinstance(outcome, Done)
        ]
        return self.put_rows([row for row in rows if row is not None])

    def row(self, request: Request, done: Done) -> Row | None:
        """What `put_rows` stores of a response; None if it may not be cached. Touches no disk."""
        return entries.pack_row(request, done, keep_cut_off=self.cut_off == "keep")

    def put_rows(self, rows: Sequence[Row]) -> int:
        """Store these in one transaction, as `put_many` does."""
        if not rows:
            return 0
        keys = [row[0] for row in rows]
        if len(rows) <= CHUNK and not self._unsaved_hits:
            # One statement is a transaction by itself. Around each one the interpreter lock
            # changes hands, and whoever else needs it, as the loop of a pool, has to wait.
            (statement,) = _statements(INSERT.format("IGNORE"), rows)
            if self._database.execute(*statement) == len(rows):
                return len(rows)
        with self._database.writing() as connection:
            _insert(connection, INSERT.format("IGNORE"), rows)
            intact = self._intact(connection, keys)
            _insert(connection, INSERT.format("REPLACE"), [r for r in rows if r[0] not in intact])
            for _ in _select(connection, "DELETE FROM leases WHERE key IN ({})", keys):
                pass
            self._save_hits(connection)
        return len(rows)

    def put_at_once(self, rows: Sequence[Row]) -> bool:
        """As `put_rows`, but only if nothing has to be waited for or repaired; else use that.

        Never syncs to the disk, and so it needs a `checkpoint` now and then.
        """
        if self._at_once is None or self._unsaved_hits or not rows:
            return False
        # Broad on purpose: whatever it is, `put_rows` meets it too, and raises it.
        with contextlib.suppress(Exception):
            statements = _statements(INSERT.format("IGNORE"), rows)
            return sum(self._at_once.execute(*one) for one in statements) == len(rows)
        return False

    def lease_at_once(self, keys: Sequence[bytes], owner: str, ttl_s: float) -> bool:
        """Whether all of `keys` are leased, as by `lease_many` and without waiting; else use that.

        Some of them may be leased even so.
        """
        if self._at_once is None:
            return False
        wanted = list(dict.fromkeys(key[:KEY_BYTES] for key in keys))
        # Broad on purpose: whatever it is, `lease_many` meets it too, and raises it.
        with contextlib.suppress(Exception):
            return all(
                self._at_once.execute(LEASE.format(_marks(part)), [owner, ttl_s, *part])
                == len(part)
                for part in _parts(wanted)
            )
        return False

    def checkpoint(self) -> None:
        """Bring what was put at once from the log into the file; the log stays small."""
        with contextlib.suppress(CannotWrite, BadFile):
            self._database.checkpoint()

    def lease_many(self, keys: Sequence[bytes], owner: str, ttl_s: float) -> set[bytes]:
        """The keys that `owner` may call for the next `ttl_s` seconds, and nobody else.

        The others have a response by now or are being called by somebody: use `get_many` again.
        A lease ends when the response is put, when it is released, when its time is over, or
        when its owner (a name from `Cache.owner`) has exited. Leasing again renews it.
        """
        wanted = {key[:KEY_BYTES]: key for key in keys}
        if all(
            # One statement is a transaction by itself; see `put_rows`.
            self._database.execute(LEASE.format(_marks(part)), [owner, ttl_s, *part]) == len(part)
            for part in _parts(list(wanted))
        ):
            return set(keys)
        alive: dict[str, bool] = {owner: False}
        held: set[bytes] = set()
        with self._database.writing() as connection:
            # Not before: the lock may have been waited for.
            now = time.monotonic()
            for key, name, until in _select(connection, LEASES, list(wanted)):
                holder = name.decode(errors="replace")
                if holder not in alive:
                    alive[holder] = not has_exited(holder)
                if now < until < now + MOST_LEASE_S and alive[holder]:
                    held.add(key)
            granted = wanted.keys() - held
            granted -= self._intact(connection, list(granted))
            rows = [(key, owner, now + ttl_s) for key in granted]
            _insert(connection, "INSERT OR REPLACE INTO leases VALUES ", rows)
        return {wanted[key] for key in granted}

    def release(self, *keys: bytes, owner: str) -> None:
        """End leases of `owner` without a response, so that the next process need not wait."""
        with self._database.writing() as connection:
            connection.executemany(
                "DELETE FROM leases WHERE key = ? AND owner = ?",
                [(key[:KEY_BYTES], owner) for key in keys],
            )

    def stats(self) -> CacheStats:
        """Count everything; reads the whole table once."""
        with self._database.reading() as connection:
            rows = connection.execute(
                "SELECT CAST(model AS TEXT), count(*), sum(length(answer) + length(request)), "
                "min(CAST(at AS INTEGER)), max(CAST(at AS INTEGER)) "
                "FROM entries GROUP BY 1 ORDER BY 2 DESC, 1"
            ).fetchall()
            since, hits = connection.execute("SELECT since, hits FROM tally").fetchone()
            file_bytes = sum(
                file.stat().st_size
                for file in (self.path, Path(f"{self.path}-wal"))
                if file.exists()
            )
        return CacheStats(
            entries=sum(row[1] for row in rows),
            value_bytes=sum(row[2] for row in rows),
            file_bytes=file_bytes,
            models={row[0].decode(errors="replace"): row[1] for row in rows},
            hits=hits + self._unsaved_hits,
            since=entries.timestamp(since),
            oldest=entries.timestamp(min(row[3] for row in rows)) if rows else None,
            newest=entries.timestamp(max(row[4] for row in rows)) if rows else None,
            damaged=self.damaged,
        )

    def prune(
        self,
        *,
        older_than_s: float | None = None,
        max_bytes: int | None = None,
        model: str | None = None,
    ) -> int:
        """Remove responses older than `older_than_s`, then the oldest until the file fits.

        `model` restricts both to the responses of one model; alone it removes all of them. Disk
        space is freed. Returns how many responses were removed.
        """
        if older_than_s is None and max_bytes is None and model is None:
            raise ConfigError("prune needs an age, a size or a model; give at least one of them")
        return prune(self._database, older_than_s, max_bytes, model)

    def export(
        self, path: str | os.PathLike[str], progress: Callable[[int, int], None] | None = None
    ) -> int:
        """Write every request with its response as a line of JSON; how many there were.

        Entries with a wrong checksum are skipped and counted in `damaged`.
        """
        written = 0
        with (
            self._database.reading() as connection,
            writing(Path(path)) as temporary,
            temporary.open("w", encoding="utf-8") as file,
        ):
            (total,) = connection.execute("SELECT count(*) FROM entries").fetchone()
            for number, row in enumerate(
                connection.execute(
                    "SELECT key, digest, at, model, answer, request FROM entries ORDER BY id"
                )
            ):
                entry = entries.as_json(*row)
                if entry is None:
                    self.damaged += 1
                else:
                    file.write(json.dumps(entry) + "\n")
                    written += 1
                if progress is not None and number % 1000 == 0:
                    progress(number, total)
        return written

    def close(self) -> None:
        """Save the count of hits and close the file; the next use would open it again."""
        self._notice_fork()
        if self._unsaved_hits and self.mode == "use":
            # A count is not worth an error at the end of a run.
            with contextlib.suppress(CannotWrite, BadFile), self._database.writing() as connection:
                self._save_hits(connection)
        if self._at_once is not None:
            self._at_once.close()
        self._database.close()

    def _notice_fork(self) -> None:
        if self._pid != os.getpid():
            # The parent saves its own hits, and a child is another owner.
            self._pid, self._owner, self._unsaved_hits = os.getpid(), new_owner(), 0

    def _usable(self, response: bytes) -> Done | None:
        """The response, unless it was stored by somebody who keeps cut-off ones."""
        done = entries.unpack(response)
        return None if self.cut_off == "skip" and done.cut_off else done

    def _intact(self, connection: Connection, keys: Sequence[bytes]) -> set[bytes]:
        """Those of the keys that have a response which `get_many` would return."""
        return {
            row[0]
            for row in _select(connection, ENTRIES, keys)
            if entries.is_intact(*row) and self._usable(row[-1]) is not None
        }

    def _save_hits(self, connection: Connection) -> None:
        if self._unsaved_hits:
            connection.execute("UPDATE tally SET hits = hits + ?", (self._unsaved_hits,))
            self._unsaved_hits = 0


def _select(connection: Connection, query: str, keys: Sequence[bytes]) -> Iterator[tuple[Any, ...]]:
    """The rows of some keys, many with each statement."""
    for part in _parts(keys):
        yield from connection.execute(query.format(",".join("?" * len(part))), part)


def _marks(part: Sequence[Any]) -> str:
    return ",".join(["(?)"] * len(part))


def _insert(connection: Connection, query: str, rows: Sequence[tuple[Any, ...]]) -> None:
    for text, values in _statements(query, rows):
        connection.execute(text, values)


def _statements(query: str, rows: Sequence[tuple[Any, ...]]) -> Iterator[tuple[str, Sequence[Any]]]:
    """Insert many rows with each statement; with one each, every row would wait for Python."""
    for part in _parts(rows):
        marks = "(" + ",".join("?" * len(part[0])) + ")"
        yield query + ",".join([marks] * len(part)), list(chain.from_iterable(part))


def _parts(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Cut into few different lengths, so that statements are compiled once and used again.

    The last item is repeated to fill a part; a repeated key or row changes nothing.
    """
    for start in range(0, len(items), CHUNK):
        part = list(items[start : start + CHUNK])
        size = 1 << (len(part) - 1).bit_length()
        yield part + part[-1:] * (size - len(part))
