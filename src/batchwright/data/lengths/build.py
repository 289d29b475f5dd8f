"""Measure every row of a data set, on all cores, without measuring anything twice."""

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.data.ids import Ids
from batchwright.data.lengths.cache import LengthCache
from batchwright.data.lengths.files import (
    Entries,
    check_path,
    partial_path,
    read_entries,
    write_entries,
)
from batchwright.data.lengths.journal import Journal
from batchwright.data.lengths.known import Known
from batchwright.data.rows.sample import content_hash, encode_rows, row_id
from batchwright.data.rows.source import Chunk, OnBadRow, Skipped, Source, open_source
from batchwright.data.tokenizers import Tokenizer, load_tokenizer
from batchwright.errors import BadFile, BadRow, BatchwrightError, ConfigError, DuplicateId, Mismatch

__all__ = ["BuildReport", "build_lengths"]

CHUNK_ROWS = 256
FEW_ROWS = 16 * CHUNK_ROWS
"""Below this, starting processes costs more than they save."""


@dataclass(frozen=True, slots=True)
class BuildReport:
    """What a build did: `measured` entries were tokenised, `reused` ones were known."""

    cache: LengthCache
    entries: int
    measured: int
    reused: int
    skipped: Skipped
    tokens: int
    seconds: float


def build_lengths(
    source: Source | str | Path,
    tokenizer: Tokenizer | str | Path,
    out: str | Path,
    *,
    workers: int | None = None,
    on_bad_row: OnBadRow = "fail",
    progress: Callable[[int, int], None] | None = None,
) -> BuildReport:
    """Write the length of every row of `source` to `out`.

    Entries are reused from a finished cache at `out` and from the journal of a build that was
    killed, where sample id, content and tokenizer all agree. So a run that stopped goes on, an
    appended data set costs its new rows, and a changed row is measured again. The file is the
    same whatever the number of workers and however often the build was interrupted.

    `workers` counts processes and is by default all cores, or none besides this one where the
    rows are few. `progress` is told rows done and rows in all.
    """
    start = time.monotonic()
    source = open_source(source) if isinstance(source, str | Path) else source
    tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer
    if workers is None:
        workers = len(os.sched_getaffinity(0)) if len(source) > FEW_ROWS else 1
    if workers < 1:
        raise ConfigError(f"{workers} workers can measure nothing; give 1 or more")
    out = Path(out)
    check_path(out)
    journal = Journal(partial_path(out), tokenizer.fingerprint)
    try:
        known = Known.gather(_finished(out, tokenizer.fingerprint), journal)
        gathered = _Gathered(source, on_bad_row)
        for chunk in _measure_all(source, tokenizer, known, workers):
            journal.append(*chunk.fresh())
            gathered.add(chunk)
            if progress is not None:
                progress(gathered.rows_done, len(source))
        entries = gathered.entries(tokenizer.fingerprint)
        write_entries(out, entries)
    except BaseException:
        journal.close()
        raise
    journal.remove()
    return BuildReport(
        cache=LengthCache(out, entries, complete=True, resume=True),
        entries=len(entries.ids),
        measured=gathered.measured,
        reused=len(entries.ids) - gathered.measured,
        skipped=gathered.skipped,
        tokens=int(entries.lengths.sum(dtype=np.int64)),
        seconds=time.monotonic() - start,
    )


@dataclass(frozen=True, slots=True)
class _Measured:
    """The rows of one chunk: what was found for each, in order."""

    rows: list[int]
    ids: list[str]
    lengths: NDArray[np.int32]
    content: NDArray[np.uint64]
    is_fresh: NDArray[np.bool_]
    bad: list[tuple[int, str]]

    def fresh(self) -> tuple[list[str], list[int], list[int]]:
        ids = [id for id, fresh in zip(self.ids, self.is_fresh, strict=True) if fresh]
        return ids, self.lengths[self.is_fresh].tolist(), self.content[self.is_fresh].tolist()


def _measure(chunk: Chunk, tokenizer: Tokenizer, known: Known) -> _Measured:
    bad: list[tuple[int, str]] = []
    read = []
    for item, row in chunk.rows():
        try:
            if isinstance(row, BadRow):
                raise row
            read.append((item, row, row_id(row, str(item)), content_hash(row)))
        except BadRow as error:
            bad.append((item, str(error)))
    content = np.array([r[3] for r in read], np.uint64)
    lengths = known.find([r[2] for r in read], content)
    unknown = np.flatnonzero(lengths == 0).tolist()
    for place, outcome in encode_rows([(place, read[place][1]) for place in unknown], tokenizer):
        if isinstance(outcome, BadRow):
            bad.append((read[place][0], str(outcome)))
        else:
            lengths[place] = len(outcome)
    good = lengths > 0
    is_fresh = np.zeros(len(read), np.bool_)
    is_fresh[unknown] = True
    kept = [r for r, keep in zip(read, good, strict=True) if keep]
    return _Measured(
        rows=[r[0] for r in kept],
        ids=[r[2] for r in kept],
        lengths=lengths[good],
        content=content[good],
        is_fresh=is_fresh[good],
        bad=sorted(bad),
    )


class _Gathered:
    """Chunks put together in order, bad rows treated as the user wishes."""

    def __init__(self, source: Source, on_bad_row: OnBadRow) -> None:
        self._source = source
        self._on_bad_row = on_bad_row
        # Ids are kept as bytes: as strings, those of ten million rows fill a gigabyte.
        self._ids: list[bytes] = []
        self._columns: list[tuple[NDArray[Any], ...]] = []
        self.skipped = Skipped()
        self.measured = 0
        self.rows_done = 0

    def add(self, chunk: _Measured) -> None:
        for item, reason in chunk.bad:
            named = f"{self._source.where(item)}: {reason}"
            if self._on_bad_row == "fail":
                raise BadRow(named)
            self.skipped.add(named)
        self.rows_done += len(chunk.rows) + len(chunk.bad)
        self.measured += int(chunk.is_fresh.sum())
        encoded = [id.encode() for id in chunk.ids]
        sizes = np.array([len(raw) for raw in encoded], np.int64)
        self._ids.append(b"".join(encoded))
        rows = np.array(chunk.rows, np.int64)
        self._columns.append((sizes, rows, chunk.lengths, chunk.content))

    def entries(self, tokenizer_hash: str) -> Entries:
        columns = [np.concatenate(column) for column in zip(*self._columns, strict=True)]
        sizes, rows, lengths, content = columns
        if not len(rows):
            raise BadRow(
                f"none of the {self.rows_done:,} rows of {self._source.name} can be used; "
                f"the first reason: {self.skipped.reasons[0]}"
            )
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        ids = Ids.from_arrays(offsets, np.frombuffer(b"".join(self._ids), np.uint8))
        if (pair := ids.first_duplicate()) is not None:
            places = [self._source.where(int(rows[item])) for item in pair]
            raise DuplicateId(
                f"sample id {ids[pair[0]]!r} stands twice, at {places[0]} and {places[1]}; "
                f"every id must be there once"
            )
        moved = len(rows) != rows[-1] + 1
        return Entries(ids, lengths, content, rows if moved else None, tokenizer_hash)


def _finished(out: Path, tokenizer_hash: str) -> Entries | None:
    """The entries of an earlier build, unless they are damaged or of another tokenizer."""
    try:
        entries = read_entries(out)
    except (BadFile, FileNotFoundError):
        return None
    return entries if entries.tokenizer_hash == tokenizer_hash else None


def _measure_all(
    source: Source, tokenizer: Tokenizer, known: Known, workers: int
) -> Iterator[_Measured]:
    """The chunks of a source measured, in order."""
    starts = range(0, len(source), CHUNK_ROWS)
    chunks = (source.chunk(at, min(at + CHUNK_ROWS, len(source))) for at in starts)
    if workers == 1:
        yield from (_measure(chunk, tokenizer, known) for chunk in chunks)
        return
    with tempfile.TemporaryDirectory(prefix="batchwright-") as folder:
        known.save(Path(folder))
        # Not forked: threads of the tokenizer and of Arrow may hold locks at that moment.
        pool = ProcessPoolExecutor(
            workers,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start_worker,
            initargs=(tokenizer.name, tokenizer.fingerprint, folder),
        )
        try:
            yield from _in_order(pool, chunks, in_flight=workers * 4)
        except BrokenProcessPool:
            raise BatchwrightError(
                "a worker process died, perhaps for want of memory; run again to go on from "
                "here, with workers=1 if it happens again"
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _in_order(
    pool: ProcessPoolExecutor, chunks: Iterator[Chunk], in_flight: int
) -> Iterator[_Measured]:
    waiting: deque[Future[_Measured]] = deque()
    for chunk in chunks:
        with _blank_main():
            waiting.append(pool.submit(_measure_in_worker, chunk))
        if len(waiting) == in_flight:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


@contextlib.contextmanager
def _blank_main() -> Iterator[None]:
    """Keep processes that start in this block from importing the caller's script.

    They need nothing of it, and one without `if __name__ == "__main__":` would start itself
    again in each of them.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    # Ctrl-C in a terminal reaches every process; this one alone answers it, and they inherit that.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        sys.modules["__main__"] = main


_worker: dict[str, Any] = {}


def _start_worker(name: str, fingerprint: str, folder: str) -> None:
    # One process a core already; threads of the tokenizers library would fight over them.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker.update(name=name, fingerprint=fingerprint, folder=folder)


def _end_with_parent() -> None:
    """A killed parent tells its workers nothing, and they would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _measure_in_worker(chunk: Chunk) -> _Measured:
    # Loaded here and not at the start, so that an error comes back as itself.
    if "tokenizer" not in _worker:
        tokenizer = load_tokenizer(_worker["name"])
        if tokenizer.fingerprint != _worker["fingerprint"]:
            raise Mismatch(
                f"the tokenizer {tokenizer.name} loads differently in a worker process; "
                f"use workers=1, or do not change its files meanwhile"
            )
        _worker["known"] = Known.load(Path(_worker["folder"]))
        _worker["tokenizer"] = tokenizer
    return _measure(chunk, _worker["tokenizer"], _worker["known"])
