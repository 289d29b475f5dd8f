"""Chunks of rows through worker processes and back, in order."""

import contextlib
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
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from batchwright.data.build.known import Known
from batchwright.data.rows.source import Chunk, Source, row_ranges
from batchwright.data.tokenizers.load import load_tokenizer
from batchwright.data.tokenizers.tokenizer import LossOn, Tokenizer, with_loss_on
from batchwright.errors import BatchwrightError, ConfigError, Mismatch

__all__ = ["CHUNK_ROWS", "map_chunks"]

T = TypeVar("T")
Work = Callable[[Chunk, Tokenizer, Known], T]

CHUNK_ROWS = 256

TRIAL_S = 1.0
"""How long this process works alone before it judges whether workers are worth their start."""

WORTH_S = 10.0
"""Remaining work of one process, in seconds, from which on workers finish earlier."""


def map_chunks(
    work: Work[T], source: Source, tokenizer: Tokenizer, known: Known, workers: int | None
) -> Generator[T, None, None]:
    """What `work` makes of each chunk of `source`, in order.

    `workers` counts processes; 1 is this one alone. None starts here, and goes on with one for
    each core once what remains would take this process more than `WORTH_S`.
    """
    if workers is not None and workers < 1:
        raise ConfigError(f"workers must be at least 1, got {workers}")
    total = len(source)
    ranges = row_ranges(source, CHUNK_ROWS)
    begin = time.monotonic()
    if workers is None:
        workers = len(os.sched_getaffinity(0))
        for at, done in ranges:
            yield work(source.chunk(at, done), tokenizer, known)
            spent = time.monotonic() - begin
            if workers > 1 and spent >= TRIAL_S and spent / done * (total - done) > WORTH_S:
                break
        else:
            return
    chunks = (source.chunk(at, stop) for at, stop in ranges)
    if workers == 1:
        yield from (work(chunk, tokenizer, known) for chunk in chunks)
    else:
        yield from _in_workers(work, chunks, tokenizer, known, workers)


def _in_workers(
    work: Work[T], chunks: Iterator[Chunk], tokenizer: Tokenizer, known: Known, workers: int
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
            yield from _in_order(pool, work, chunks, in_flight=workers * 4)
        except BrokenProcessPool:
            raise BatchwrightError(
                "a worker process died, perhaps out of memory; run again to resume, "
                "with workers=1 if it happens again"
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _in_order(
    pool: ProcessPoolExecutor, work: Work[T], chunks: Iterator[Chunk], in_flight: int
) -> Iterator[T]:
    waiting: deque[Future[T]] = deque()
    for chunk in chunks:
        with _blank_main():
            waiting.append(pool.submit(_work_in_worker, work, chunk))
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


def _work_in_worker(work: Work[T], chunk: Chunk) -> T:
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
    return work(chunk, _worker["tokenizer"], _worker["known"])
