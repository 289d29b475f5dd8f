"""An SQLite file that threads, processes and forks share."""

import contextlib
import os
import re
import sqlite3
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from batchwright.errors import BadFile, BatchwrightError, CannotWrite, ConfigError, MissingFile

__all__ = ["Database", "filesystem", "refuse_network"]

BUSY_S = 60.0
"""How long a writer waits for the writers of other processes, unless it is told otherwise."""
SMALLEST = 512
"""Bytes of the smallest SQLite file that is not empty: its smallest page."""
NETWORK = """
9p afs beegfs ceph cifs coda fhgfs gfs2 glusterfs gpfs lustre ncpfs nfs nfs4 ocfs2 orangefs panfs
pvfs2 smb2 smb3 smbfs wekafs fuse.ceph fuse.cephfs fuse.gcsfuse fuse.glusterfs fuse.goofys
fuse.juicefs fuse.mount-s3 fuse.rclone fuse.s3fs fuse.smbnetfs fuse.sshfs
"""
"""Filesystems of several machines, whose locks and memory maps are not safe for SQLite."""


class Database:
    """A file with one schema, identified by its application id, in write-ahead logging mode.

    What `writing` has committed survives the end of the process, also by `kill -9`. A power cut
    may take the last seconds (whatever was written since the last checkpoint), never the file.

    Any thread may use it, one at a time. Before a fork the connection is closed, and each side
    opens its own when it needs one: SQLite holds its locks by process, so a connection that
    crosses a fork believes in locks that the child does not have.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        what: str,
        schema: str,
        application_id: int,
        version: int,
        *,
        read_only: bool = False,
        waits: bool = True,
    ) -> None:
        """Without `waits`, a lock of somebody else is an error at once, and nothing is synced to
        the disk: whoever has another connection calls `checkpoint` there now and then. The file
        is opened by its first use, since somebody may have it locked now."""
        self.path = Path(path)
        self.what = what
        self.read_only = read_only
        self._schema = schema
        self._application_id = application_id
        self._version = version
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._waits = waits
        self._busy_s = BUSY_S if waits else 0.0
        self._locked_until = 0.0
        """Until then nobody waits: the file was locked for as long as they would."""
        if self.path.is_dir():
            raise ConfigError(f"{self.path} is a folder; give the path of a file for the {what}")
        if self.path.exists() and not self.path.is_file():
            raise BadFile(f"{self.path} is not a regular file; choose another path for the {what}")
        if read_only and not self.path.exists():
            raise MissingFile(f"no {what} at {self.path}; check the path")
        # SQLite takes a file of one byte for an empty one. To read it here would end the locks
        # that other connections of this process hold on it.
        if self.path.exists() and 0 < self.path.stat().st_size < SMALLEST:
            raise BadFile(f"{self.path} is damaged or not a {what}; choose another path")
        # A file that is only read needs no locks.
        if not read_only:
            refuse_network(self.path, what)
        _alive[id(self)] = self
        if waits:
            with self.reading():
                pass

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """The connection; what SQLite raises inside comes out as an error of this package."""
        with self._lock:
            try:
                connection = self._open()
                if self._locked_until:
                    self._wait_for_locks(connection)
                yield connection
            except sqlite3.DatabaseError as error:
                # Without an error code of SQLite it is a bug of ours and must be seen as such.
                if not getattr(error, "sqlite_errorcode", 0):
                    raise
                raise self._translated(error) from error

    @contextlib.contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction: committed when the block ends well, rolled back otherwise."""
        self._refuse_if_read_only()
        with self.reading() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            finally:
                # On a full disk SQLite may have ended the transaction by itself.
                if connection.in_transaction:
                    connection.execute("ROLLBACK")

    def wait_at_most(self, seconds: float) -> None:
        """How long the lock of another process is waited for, at most `BUSY_S`.

        When that was not enough, nobody waits again for the same time.
        """
        with self._lock:
            self._busy_s = min(BUSY_S, seconds)
            if self._connection is not None:
                self._wait_for_locks(self._connection)

    def _wait_for_locks(self, connection: sqlite3.Connection) -> None:
        locked = time.monotonic() < self._locked_until
        if not locked:
            self._locked_until = 0.0
        wait_ms = 0 if locked else round(1000 * self._busy_s)
        connection.execute(f"PRAGMA busy_timeout = {wait_ms}")

    def execute(self, statement: str, values: Sequence[Any]) -> int:
        """One statement as a transaction of its own; how many rows it changed."""
        self._refuse_if_read_only()
        with self.reading() as connection:
            return connection.execute(statement, values).rowcount

    def checkpoint(self) -> None:
        """Move what was committed from the log into the file, as far as nobody reads it there."""
        with self.reading() as connection:
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def _refuse_if_read_only(self) -> None:
        if self.read_only:
            raise ConfigError(f"the {self.what} {self.path} is open read-only; open it for writing")

    def close(self) -> None:
        """Close the file; the last one to do so merges its `-wal` file into it."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            connection = self._connect()
            try:
                self._prepare(connection)
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    def _connect(self) -> sqlite3.Connection:
        address = "file:" + quote(str(self.path.absolute()))
        if not self.read_only:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise CannotWrite(
                    f"cannot make a folder for the {self.what} {self.path}: {error.strerror}; "
                    f"choose another path"
                ) from error
        elif Path(f"{self.path}-wal").exists():
            address += "?mode=ro"
        else:
            # Nobody writes: without locks the folder may be read-only and stays as it is.
            address += "?mode=ro&immutable=1"
        connection = sqlite3.connect(
            address, uri=True, timeout=self._busy_s, isolation_level=None, check_same_thread=False
        )
        # Damaged text would fail to decode inside SQLite, before its checksum could be checked.
        connection.text_factory = bytes
        # Leases end by this clock, which nobody sets: it is one for all processes of a machine.
        connection.create_function("monotonic", 0, time.monotonic)
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        seen = self._stamp(connection)
        if seen == (0, 0) and not self.read_only:
            if _is_empty(connection):
                self._create(connection)
            # Another process may have been first.
            seen = self._stamp(connection)
        if seen[0] != self._application_id:
            raise BadFile(
                f"{self.path} is an SQLite file but not a {self.what}; choose another path"
            )
        if seen[1] != self._version:
            raise BadFile(
                f"the {self.what} {self.path} has format {seen[1]}, this version reads "
                f"{self._version}; use the version that wrote it or choose another file"
            )
        if not self.read_only:
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute(f"PRAGMA wal_autocheckpoint = {1000 if self._waits else 0}")
            connection.execute("PRAGMA journal_size_limit = 67108864")
        connection.execute("PRAGMA cache_size = -32000")

    def _create(self, connection: sqlite3.Connection) -> None:
        # Responses of some kilobytes would leave much of smaller pages empty.
        connection.execute("PRAGMA page_size = 16384")
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        _to_wal(connection)
        connection.execute("BEGIN IMMEDIATE")
        if _is_empty(connection):
            for statement in self._schema.split(";\n"):
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {self._application_id}")
            connection.execute(f"PRAGMA user_version = {self._version}")
        connection.execute("COMMIT")

    def _stamp(self, connection: sqlite3.Connection) -> tuple[int, int]:
        # One transaction: between the two another process may make the file ours.
        connection.execute("BEGIN")
        try:
            (application_id,) = connection.execute("PRAGMA application_id").fetchone()
            (version,) = connection.execute("PRAGMA user_version").fetchone()
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        return application_id, version

    def _translated(self, error: sqlite3.DatabaseError) -> BatchwrightError:
        code = error.sqlite_errorcode & 0xFF
        named = f"the {self.what} {self.path}"
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            return BadFile(
                f"{named} is damaged or not an SQLite file ({error}); move it away and run again"
            )
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            if not self._locked_until:
                self._locked_until = time.monotonic() + self._busy_s
            return CannotWrite(
                f"another process has held {named} locked for {self._busy_s:.0f} s; "
                f"look for one that hangs, or choose another file"
            )
        if code == sqlite3.SQLITE_FULL:
            return CannotWrite(
                f"cannot write {named}: no space is left on the disk; its contents are intact, "
                f"free some space and run again"
            )
        if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
            if self.read_only:
                return CannotWrite(
                    f"{named} has an unmerged -wal file and its folder is read-only "
                    f"({error}); copy both files to a folder you can write"
                )
            return CannotWrite(
                f"cannot open or write {named}: it or its folder is read-only, or too many files "
                f"are open ({error}); change that, choose another path, or open it read-only"
            )
        if code == sqlite3.SQLITE_IOERR:
            return CannotWrite(
                f"I/O error on {named} ({error}); check the disk's space and health, then run again"
            )
        return BadFile(f"{named} cannot be used: {error}; move it away and run again")


def filesystem(path: Path, mountinfo: str) -> str:
    """The type of the filesystem that holds `path`, from the lines of /proc/self/mountinfo.

    >>> lines = "1 0 8:1 / / rw - ext4 /dev/sda rw\\n2 1 0:5 / /data rw - nfs4 server:/x rw"
    >>> filesystem(Path("/data/calls.db"), lines), filesystem(Path("/database.db"), lines)
    ('nfs4', 'ext4')
    """
    found, depth = "", -1
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split()
        if len(fields) < 5 or not right:
            continue
        # Spaces and the like are octal escapes.
        mount = Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields[4]))
        # Of two mounts on one place the later one lies on top.
        if path.is_relative_to(mount) and len(mount.parts) >= depth:
            found, depth = right.split()[0], len(mount.parts)
    return found


def refuse_network(path: Path, what: str) -> None:
    """Raise if `path` is on a filesystem where processes cannot share an SQLite file."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    except OSError:
        return
    kind = filesystem(path.resolve(), mounts)
    if kind in NETWORK.split():
        raise ConfigError(
            f"{path} is on a network filesystem ({kind}), where processes cannot share a {what} "
            f"safely; choose a path on a local disk"
        )


def _is_empty(connection: sqlite3.Connection) -> bool:
    return connection.execute("SELECT 1 FROM sqlite_master").fetchone() is None


def _to_wal(connection: sqlite3.Connection) -> None:
    """Switch the mode; SQLite does not wait by itself when another process does the same."""
    end = time.monotonic() + BUSY_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
            if not busy or time.monotonic() > end:
                raise
            time.sleep(0.005)


_alive: "weakref.WeakValueDictionary[int, Database]" = weakref.WeakValueDictionary()
_forking = threading.Lock()
_held: list[Database] = []


_inherited: list[sqlite3.Connection] = []
"""Connections of the parent process: kept, because closing them would end its locks."""


def _every() -> list[Database]:
    # The references are one step of the interpreter: another thread may open a file meanwhile.
    return [one for reference in _alive.valuerefs() if (one := reference()) is not None]


def _before_fork() -> None:
    _forking.acquire()
    for database in _every():
        database._lock.acquire()
        _held.append(database)
        database.close()


def _after_fork() -> None:
    while _held:
        _held.pop()._lock.release()
    _forking.release()


def _after_fork_in_child() -> None:
    for database in _every():
        if database not in _held:
            # Another thread opened it after the locks were taken; nobody here would release its.
            database._lock = threading.RLock()
            if database._connection is not None:
                _inherited.append(database._connection)
                database._connection = None
    _after_fork()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child
)
