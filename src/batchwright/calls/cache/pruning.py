"""Removing rows from a call cache and freeing their disk space."""

import time
from typing import Any

from batchwright.calls.cache.sqlite import Database

__all__ = ["prune"]

PART = 2000
"""Rows removed in one transaction, so that writers of other processes get their turn."""
BYTES = "(length(answer) + length(request))"


def prune(
    database: Database, older_than_s: float | None, max_bytes: int | None, model: str | None
) -> int:
    """Remove rows by age and model, then the oldest until the file fits; how many were removed."""
    where, values = ("model = ?", [model]) if model is not None else ("1", [])
    removed = 0
    if older_than_s is not None:
        removed += _remove(database, f"{where} AND at <= ?", [*values, time.time() - older_than_s])
    elif max_bytes is None:
        removed += _remove(database, where, values)
    while max_bytes is not None and (ids := _oldest_over(database, max_bytes, where, values)):
        removed += _remove_ids(database, ids)
    with database.writing() as connection:
        connection.execute("DELETE FROM leases WHERE until < monotonic()")
    with database.reading() as connection:
        # One page a step; `execute` would take the first step only.
        connection.executescript("PRAGMA incremental_vacuum")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    return removed


def _remove(database: Database, where: str, values: list[Any]) -> int:
    with database.reading() as connection:
        query = f"SELECT id FROM entries WHERE {where}"
        ids = connection.execute(query, values).fetchall()
    return _remove_ids(database, ids)


def _remove_ids(database: Database, ids: list[tuple[int]]) -> int:
    for start in range(0, len(ids), PART):
        with database.writing() as connection:
            part = ids[start : start + PART]
            connection.executemany("DELETE FROM entries WHERE id = ?", part)
    return len(ids)


def _oldest_over(
    database: Database, max_bytes: int, where: str, values: list[Any]
) -> list[tuple[int]]:
    """The oldest rows that together are about what the file has over `max_bytes`.

    A page is freed when its last row is removed, so call this again afterwards.
    """
    ids: list[tuple[int]] = []
    with database.reading() as connection:
        pages, free, size = (
            connection.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_count", "freelist_count", "page_size")
        )
        used = (pages - free) * size
        if used <= max_bytes:
            return ids
        (values_bytes,) = connection.execute(f"SELECT total({BYTES}) FROM entries").fetchone()
        # Each row counts with its share of the overhead. At least a hundredth is removed, or the
        # last few bytes would take many rounds.
        over = max(used - max_bytes, used / 100) * values_bytes / used
        rows = connection.execute(
            f"SELECT id, {BYTES} FROM entries WHERE {where} ORDER BY id", values
        )
        for id_, row_bytes in rows:
            ids.append((id_,))
            over -= row_bytes
            if over <= 0:
                break
        rows.close()
    return ids
