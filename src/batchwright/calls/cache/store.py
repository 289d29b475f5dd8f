"""Answers that are kept, so that an equal exact request is never paid for twice."""

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

from batchwright.calls.cache import entries as form
from batchwright.calls.cache.owners import is_dead, new_owner
from batchwright.calls.cache.pruning import prune
from batchwright.calls.cache.sqlite import Database
from batchwright.calls.outcome import Done, Outcome
from batchwright.calls.request import Request
from batchwright.errors import BadFile, CannotWrite, ConfigError
from batchwright.files import writing

__all__ = ["Cache", "CacheStats", "Row"]

T = TypeVar("T")
Row = tuple[bytes, bytes, int, str, bytes, bytes]
"""An entry as it stands in the file."""

APPLICATION_ID = 0x62774361
VERSION = 2
KEY = 16
"""Bytes of a key in the file: it stands there twice, and half of SHA-256 tells calls apart too."""
# The answer stands before the request, so that a get need not read past it. Random keys stay out
# of the table's own order: answers are appended, only the index is written all over.
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
CHUNK = 128
"""Keys or rows of one statement, at most."""
ENTRIES = "SELECT key, digest, answer FROM entries WHERE key IN ({})"
LEASES = "SELECT key, owner, until FROM leases WHERE key IN ({})"
# Only where nobody has answered yet and nobody else has a lease, not even one that is over.
LEASE = (
    "INSERT INTO leases SELECT column1, ?, ? FROM (VALUES {}) "
    "WHERE NOT EXISTS (SELECT 1 FROM entries WHERE key = column1) "
    "ON CONFLICT (key) DO UPDATE SET until = excluded.until WHERE owner = excluded.owner"
)
INSERT = "INSERT OR {} INTO entries(key, digest, at, model, answer, request) VALUES "


@dataclass(frozen=True, slots=True)
class CacheStats:
    """What a cache holds and what it has saved."""

    entries: int
    value_bytes: int
    """Requests and answers alone."""
    file_bytes: int
    """With everything around them, and what is not yet folded into the file."""
    models: dict[str, int]
    """Answers by model, the most first."""
    hits: int
    """Answers given since `since`, by every process that closed the cache or put something."""
    since: datetime
    oldest: datetime | None
    newest: datetime | None
    damaged: int
    """Entries that this process met and did not believe."""


class Cache:
    """A file of answers by `Request.key`; any number of processes and threads may share it.

    When `put_many` has returned, its answers survive `kill -9`. A power cut may take the last
    seconds of them. Every answer carries a checksum with its key: one that was damaged is a miss,
    is counted in `damaged`, and is replaced by the next answer.

    Kept are answers to exact requests that are neither empty nor, unless `cut_off="keep"`, cut
    off. The first answer stays. With `mode="replay"` the file is a cassette: it is only read, its
    folder may be read-only, and nobody should write to it meanwhile.

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
        cut_off: Literal["skip", "keep"] = "skip",
        mode: Literal["use", "replay"] = "use",
    ) -> None:
        if cut_off not in ("skip", "keep"):
            raise ConfigError(f"cut_off={cut_off!r} is not known; give 'skip' or 'keep'")
        if mode not in ("use", "replay"):
            raise ConfigError(f"mode={mode!r} is not known; give 'use' or 'replay'")
        self.path = Path(path)
        self.cut_off = cut_off
        self.mode = mode
        self.hits = self.misses = self.damaged = 0
        self._unsaved_hits = 0
        self._pid, self._owner = 0, ""
        self._database = Database(
            path, "call cache", SCHEMA, APPLICATION_ID, VERSION, read_only=mode == "replay"
        )

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

    def get_many(self, keys: Sequence[bytes]) -> dict[bytes, Done]:
        """The answers that are here; a key that is not in the result is a miss."""
        self._notice_fork()
        asked = {key[:KEY]: key for key in keys}
        wanted = list(asked)
        found: dict[bytes, Done] = {}
        with self._database.reading() as connection:
            for key, digest, answer in _select(connection, ENTRIES, wanted):
                # A damaged index may lead to a row that nobody asked for.
                if key not in asked or not form.is_whole(key, digest, answer):
                    self.damaged += 1
                elif (done := self._usable(answer)) is not None:
                    found[asked[key]] = done
            self.hits += len(found)
            self.misses += len(wanted) - len(found)
            self._unsaved_hits += len(found)
        return found

    def put_many(self, entries: Iterable[tuple[Request, Outcome]]) -> int:
        """Keep what may be kept, in one transaction; how many of the entries are here now.

        Leases on what was kept end with it.
        """
        rows = [self.row(request, outcome) for request, outcome in entries]
        return self.put_rows([row for row in rows if row is not None])

    def row(self, request: Request, outcome: Outcome) -> Row | None:
        """What `put_rows` keeps of an answer; None if it may not be kept. Touches no disk."""
        if not isinstance(outcome, Done) or not self._keeps(request, outcome):
            return None
        answer = form.pack(outcome)
        if answer is None:
            return None
        key = request.key[:KEY]
        model = request.model
        if not model.isascii():
            # Half of a surrogate pair has no UTF-8.
            model = model.encode(errors="replace").decode()
        checksum, told = form.checksum(key, answer), form.pack_request(request)
        return key, checksum, int(time.time()), model, answer, told

    def put_rows(self, rows: Sequence[Row]) -> int:
        """Keep these in one transaction, as `put_many` does."""
        if not rows:
            return 0
        keys = [row[0] for row in rows]
        if len(rows) <= CHUNK and not self._unsaved_hits:
            # One statement is a transaction by itself. Around each one the interpreter changes
            # hands, and whoever else needs it, as the loop of a pool, has to wait.
            (statement,) = _statements(INSERT.format("IGNORE"), rows)
            if self._database.execute(*statement) == len(rows):
                return len(rows)
        with self._database.writing() as connection:
            _insert(connection, INSERT.format("IGNORE"), rows)
            sound = self._sound(connection, keys)
            _insert(connection, INSERT.format("REPLACE"), [r for r in rows if r[0] not in sound])
            for _ in _select(connection, "DELETE FROM leases WHERE key IN ({})", keys):
                pass
            self._save_hits(connection)
        return len(rows)

    def lease(self, key: bytes, owner: str, ttl_s: float) -> bool:
        """Whether `owner` may make this call now; see `lease_many`."""
        return key in self.lease_many([key], owner, ttl_s)

    def lease_many(self, keys: Sequence[bytes], owner: str, ttl_s: float) -> set[bytes]:
        """The keys that `owner` may call for the next `ttl_s` seconds, and nobody else.

        The others have an answer by now or are being called by somebody: ask `get_many` again.
        A lease ends when the answer is put, when it is released, when its time is over, or when
        its owner (a name from `Cache.owner`) is no longer alive. To prolong one, lease again.
        """
        now = time.time()
        asked = {key[:KEY]: key for key in keys}
        if all(
            # One statement is a transaction by itself; see `put_rows`.
            self._database.execute(LEASE.format(_marks(part)), [owner, now + ttl_s, *part])
            == len(part)
            for part in _parts(list(asked))
        ):
            return set(keys)
        alive: dict[str, bool] = {owner: False}
        held: set[bytes] = set()
        with self._database.writing() as connection:
            for key, name, until in _select(connection, LEASES, list(asked)):
                holder = name.decode(errors="replace")
                if holder not in alive:
                    alive[holder] = not is_dead(holder)
                if until > now and alive[holder]:
                    held.add(key)
            granted = asked.keys() - held
            granted -= self._sound(connection, list(granted))
            rows = [(key, owner, now + ttl_s) for key in granted]
            _insert(connection, "INSERT OR REPLACE INTO leases VALUES ", rows)
        return {asked[key] for key in granted}

    def release(self, *keys: bytes, owner: str) -> None:
        """End leases of `owner` without an answer, so that the next process need not wait."""
        with self._database.writing() as connection:
            connection.executemany(
                "DELETE FROM leases WHERE key = ? AND owner = ?",
                [(key[:KEY], owner) for key in keys],
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
                side.stat().st_size
                for side in (self.path, Path(f"{self.path}-wal"))
                if side.exists()
            )
        return CacheStats(
            entries=sum(row[1] for row in rows),
            value_bytes=sum(row[2] for row in rows),
            file_bytes=file_bytes,
            models={row[0].decode(errors="replace"): row[1] for row in rows},
            hits=hits + self._unsaved_hits,
            since=form.moment(since),
            oldest=form.moment(min(row[3] for row in rows)) if rows else None,
            newest=form.moment(max(row[4] for row in rows)) if rows else None,
            damaged=self.damaged,
        )

    def prune(
        self,
        *,
        older_than_s: float | None = None,
        max_bytes: int | None = None,
        model: str | None = None,
    ) -> int:
        """Remove the answers older than that, then the oldest until the file is small enough.

        `model` narrows both to the answers of one model; alone it removes all of them. Space is
        given back to the disk. Returns how many answers went.
        """
        if older_than_s is None and max_bytes is None and model is None:
            raise ConfigError("nothing says what to remove; give an age, a size or a model")
        return prune(self._database, older_than_s, max_bytes, model)

    def export(
        self, path: str | os.PathLike[str], progress: Callable[[int, int], None] | None = None
    ) -> int:
        """Write every entry as a line of JSON, the request and its answer; how many there were.

        What does not have its checksum is left out and counted in `damaged`.
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
                    "SELECT key, at, digest, answer, request FROM entries ORDER BY id"
                )
            ):
                line = form.line(*row)
                if line is None:
                    self.damaged += 1
                else:
                    file.write(json.dumps(line) + "\n")
                    written += 1
                if progress is not None and number % 1000 == 0:
                    progress(number, total)
        return written

    def close(self) -> None:
        """Save the count of hits and give the file back; the next use would open it again."""
        self._notice_fork()
        if self._unsaved_hits and self.mode == "use":
            # A count is not worth an error at the end of a run.
            with contextlib.suppress(CannotWrite, BadFile), self._database.writing() as connection:
                self._save_hits(connection)
        self._database.close()

    def _notice_fork(self) -> None:
        if self._pid != os.getpid():
            # The parent saves its own hits, and a child is another owner.
            self._pid, self._owner, self._unsaved_hits = os.getpid(), new_owner(), 0

    def _keeps(self, request: Request, done: Done) -> bool:
        return (
            request.exact
            and not form.is_empty(request, done)
            and (self.cut_off == "keep" or not form.is_cut_off(done))
        )

    def _usable(self, answer: bytes) -> Done | None:
        """The answer, unless it was kept by somebody who wants cut-off ones."""
        done = form.unpack(answer)
        return None if self.cut_off == "skip" and form.is_cut_off(done) else done

    def _sound(self, connection: Connection, keys: Sequence[bytes]) -> set[bytes]:
        """Those of the keys that have an answer which `get_many` would give."""
        return {
            key
            for key, digest, answer in _select(connection, ENTRIES, keys)
            if form.is_whole(key, digest, answer) and self._usable(answer) is not None
        }

    def _save_hits(self, connection: Connection) -> None:
        if self._unsaved_hits:
            connection.execute("UPDATE tally SET hits = hits + ?", (self._unsaved_hits,))
            self._unsaved_hits = 0


def _select(connection: Connection, query: str, keys: Sequence[bytes]) -> Iterator[tuple[Any, ...]]:
    """The rows of some keys, asked for many with each statement."""
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

    The last item stands several times where that fills a part; it is asked for or put only once.
    """
    for start in range(0, len(items), CHUNK):
        part = list(items[start : start + CHUNK])
        size = 1 << (len(part) - 1).bit_length()
        yield part + part[-1:] * (size - len(part))
