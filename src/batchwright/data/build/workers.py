"""Chunks of rows through threads or worker processes and back, in order."""

import contextlib
import itertools
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TypeVar

from batchwright.data.build.known import Known
from batchwright.data.rows.source import Chunk, Source, row_ranges
from batchwright.data.tokenizers.load import load_tokenizer
from batchwright.data.tokenizers.tokenizer import LossOn, Tokenizer, with_loss_on
from batchwright.errors import BatchwrightError, ConfigError, Mismatch

__all__ = ["CHUNK_ROWS", "Begin", "Work", "Workers", "check_workers", "map_chunks"]

T = TypeVar("T")
Made = TypeVar("Made", covariant=True)

CHUNK_ROWS = 256

TRIAL_S = 1.0
"""How long this process works alone before it judges whether workers are worth their start."""

WORTH_S = 5.0
"""Seconds that workers must save to be started: their start alone takes some."""

AHEAD = 2
"""Chunks at the tokenizer together, so that none of its threads waits between two of them."""


class Work(Protocol[Made]):
    """A chunk under way: created, then tokenised by any thread, then taken."""

    def tokenise(self) -> None: ...
    def result(self) -> Made: ...


Begin = Callable[[Chunk, Tokenizer, Known], Work[T]]


class Workers(Protocol):
    """Processes of another kind than this module starts, say on other machines."""

    def map(
        self,
        begin: Begin[T],
        source: Source,
        ranges: Iterator[tuple[int, int]],
        tokenizer: Tokenizer,
        known: Known,
    ) -> Iterator[T]:
        """What becomes of the chunk of each range of rows, in order."""
        ...


def check_workers(workers: object) -> None:
    """Refuse a number of processes that is none."""
    if isinstance(workers, int) and workers < 1:
        raise ConfigError(f"workers must be at least 1, got {workers}")


def map_chunks(
    begin: Begin[T],
    source: Source,
    tokenizer: Tokenizer,
    known: Known,
    workers: int | Workers | None,
) -> Generator[T, None, None]:
    """What becomes of each chunk of `source`, in order.

    `workers` counts processes; 1 is this one alone, in which the tokenizer uses its own threads
    while this one reads. That is all that most data sets need, so None starts here, and goes on
    with a process for each core if that saves more than `WORTH_S`: where Python is the limit, as
    with chat templates.
    """
    check_workers(workers)
    ranges = row_ranges(source, CHUNK_ROWS)
    if not isinstance(workers, int | None):
        yield from workers.map(begin, source, ranges, tokenizer, known)
        return
    cores = len(os.sched_getaffinity(0))
    if workers is None or workers == 1:
        spent: list[float] = []
        here = ranges if workers or cores == 1 else _until_worth(ranges, len(source), cores, spent)
        chunks = (source.chunk(*rows) for rows in here)
        yield from _in_threads(begin, chunks, tokenizer, known, spent)
    for rest in ranges:
        chunks = (source.chunk(*rows) for rows in itertools.chain([rest], ranges))
        yield from _in_workers(begin, chunks, tokenizer, known, workers or cores)


def _until_worth(
    ranges: Iterator[tuple[int, int]], total: int, cores: int, spent: list[float]
) -> Iterator[tuple[int, int]]:
    """The next rows, until all cores busy would finish the others much earlier than this.

    Judged by processor time, which other processes of the machine do not change: of this thread
    and of those that call the tokenizer (`spent`), which take turns, and of the whole process.
    """
    began, alone, busy = time.monotonic(), time.thread_time(), time.process_time()
    for start, stop in ranges:
        yield start, stop
        in_turn = time.thread_time() - alone + sum(spent)
        saved = in_turn - (time.process_time() - busy) / cores
        if time.monotonic() - began >= TRIAL_S and saved / stop * (total - stop) > WORTH_S:
            return


def _in_threads(
    begin: Begin[T],
    chunks: Iterator[Chunk],
    tokenizer: Tokenizer,
    known: Known,
    spent: list[float],
) -> Iterator[T]:
    with ThreadPoolExecutor(AHEAD, "tokenise") as threads:
        waiting: deque[tuple[Work[T], Future[float]]] = deque()
        try:
            for chunk in chunks:
                work = begin(chunk, tokenizer, known)
                waiting.append((work, threads.submit(_timed, work.tokenise)))
                if len(waiting) > AHEAD:
                    yield _taken(waiting, spent)
            while waiting:
                yield _taken(waiting, spent)
        finally:
            threads.shutdown(wait=True, cancel_futures=True)


def _timed(tokenise: Callable[[], None]) -> float:
    """How much processor time this thread takes for it."""
    before = time.thread_time()
    tokenise()
    return time.thread_time() - before


def _taken(waiting: "deque[tuple[Work[T], Future[float]]]", spent: list[float]) -> T:
    work, tokenised = waiting.popleft()
    spent.append(tokenised.result())
    return work.result()


def _in_workers(
    begin: Begin[T], chunks: Iterator[Chunk], tokenizer: Tokenizer, known: Known, workers: int
) -> Iterator[T]:
    with tempfile.TemporaryDirectory(prefix="batchwright-", ignore_cleanup_errors=True) as folder:
        known.save(Path(folder))
        # Not forked: threads of the tokenizer and of Arrow may hold locks at that moment.
        pool = ProcessPoolExecutor(
            workers,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start_worker,
            initargs=(tokenizer.name, tokenizer.loss_on, tokenizer.fingerprint, folder),
        )
        try:
            yield from _in_order(pool, begin, chunks, in_flight=workers * 4)
        except BrokenProcessPool:
            raise BatchwrightError(
                "a worker process died, perhaps out of memory; run again to resume, "
                "with workers=1 if it happens again"
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _in_order(
    pool: ProcessPoolExecutor, begin: Begin[T], chunks: Iterator[Chunk], in_flight: int
) -> Iterator[T]:
    waiting: deque[Future[T]] = deque()
    for chunk in chunks:
        with _blank_main():
            waiting.append(pool.submit(_work_in_worker, begin, chunk))
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
    # Ctrl-C in a terminal reaches every process; only this one handles it, workers inherit that.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        sys.modules["__main__"] = main


_worker: dict[str, Any] = {}


def _start_worker(name: str, loss_on: LossOn, fingerprint: str, folder: str) -> None:
    # One process a core already; threads of the tokenizers library would compete for them.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    _worker.update(name=name, loss_on=loss_on, fingerprint=fingerprint, folder=folder)


def _end_with_parent(folder: str) -> None:
    """Exit when the parent is killed, which could neither stop its workers nor clean up."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _work_in_worker(begin: Begin[T], chunk: Chunk) -> T:
    # Loaded here and not at the start, so that an error comes back as itself.
    if "tokenizer" not in _worker:
        tokenizer = with_loss_on(load_tokenizer(_worker["name"]), _worker["loss_on"])
        if tokenizer.fingerprint != _worker["fingerprint"]:
            raise Mismatch(
                f"the tokenizer {tokenizer.name} loads differently in a worker process; "
                f"use workers=1, or do not change its files meanwhile"
            )
        _worker["known"] = Known.load(Path(_worker["folder"]))
        _worker["tokenizer"] = tokenizer
    work = begin(chunk, _worker["tokenizer"], _worker["known"])
    work.tokenise()
    return work.result()
