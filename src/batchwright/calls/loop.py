"""One background thread with one event loop per process, which owns every socket.

So calls work from scripts, notebooks, actors with event loops of their own, and after a fork: a
child starts a thread of its own, and never touches what it inherited.
"""

import asyncio
import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

__all__ = ["Background", "background", "forgets_after_fork", "in_thread", "unforked"]

T = TypeVar("T")


@dataclass(eq=False)
class Background:
    """A running loop and the process it runs in."""

    loop: asyncio.AbstractEventLoop
    pid: int
    thread: threading.Thread
    at_exit: "weakref.WeakSet[Any]" = field(default_factory=weakref.WeakSet)
    """Pools: closed before the loop ends."""

    @property
    def here(self) -> bool:
        """Whether the caller runs on the loop itself, where waiting for it would deadlock."""
        return threading.current_thread() is self.thread


async def in_thread(work: Callable[[], T]) -> T:
    """As `asyncio.to_thread`, but on a thread of its own, so it works at interpreter exit too.

    The executors of the standard library accept no work any more at that time.
    """
    loop = asyncio.get_running_loop()
    future: Future[T] = Future()
    # Marked as running: a cancelled caller cannot cancel it, so `run` may always set its result.
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result = work()
        except Exception as error:
            # Broad on purpose: it is raised again where the result is awaited.
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name="batchwright-work", daemon=True).start()
    return await asyncio.wrap_future(future, loop=loop)


_current: Background | None = None
_inherited: list[Background] = []
"""Loops of the parent process: kept, because deleting them would close the shared sockets."""
_lock = threading.Lock()


def background() -> Background:
    """This process's loop, started at the first call."""
    global _current
    found = _current
    if found is not None and found.pid == os.getpid() and found.thread.is_alive():
        return found
    with _lock:
        if _current is None or _current.pid != os.getpid() or not _current.thread.is_alive():
            _current = _start()
        return _current


def _start() -> Background:
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(_on_bug)
    thread = threading.Thread(target=loop.run_forever, name="batchwright-calls", daemon=True)
    thread.start()
    started = Background(loop, os.getpid(), thread)
    atexit.register(_stop, started)
    return started


async def _end_tasks(patience_s: float) -> None:
    """Wait for all tasks of this loop, then cancel the rest: none is pending when it closes."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    if tasks:
        _, late = await asyncio.wait(tasks, timeout=patience_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)


def _on_bug(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A callback of this package raised: pools are aborted, so that nobody waits for ever."""
    loop.default_exception_handler(context)
    error = context.get("exception")
    if isinstance(error, Exception) and "handle" in context and _current is not None:
        for pool in list(_current.at_exit):
            pool.abort(error)


def _stop(running: Background) -> None:
    if running.pid != os.getpid() or not running.thread.is_alive():
        return
    with contextlib.suppress(KeyboardInterrupt, TimeoutError):
        for one in list(running.at_exit):
            one.close()
        # A close that Ctrl-C interrupted goes on there.
        asyncio.run_coroutine_threadsafe(_end_tasks(END_S), running.loop).result(2 * END_S)
    with contextlib.suppress(KeyboardInterrupt):
        running.loop.call_soon_threadsafe(running.loop.stop)
        running.thread.join(timeout=5.0)
        if not running.thread.is_alive():
            running.loop.run_until_complete(_end_tasks(0.0))
            running.loop.close()


END_S = 3.0
"""How long tasks that are still open at exit may take to end by themselves."""
FORK_WAIT_S = 30.0
"""How long a fork waits for what must not be interrupted; a model may take longer to load."""
forgets_after_fork: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
"""Pools by their id, from their first moment on: `forget` is called in the child."""
_whole = threading.RLock()
_forking = threading.local()


@contextlib.contextmanager
def unforked() -> Iterator[None]:
    """One thread at a time, and no fork by another one while it is inside.

    A child has the locks that other threads held, of modules that were being imported too, and
    nobody there who would release them.
    """
    with _whole:
        yield


def _before_fork() -> None:
    # Forever would be a deadlock if the other thread waits for something that this one has.
    _forking.held = _whole if _whole.acquire(timeout=FORK_WAIT_S) else None


def _after_fork_in_parent() -> None:
    if _forking.held is not None:
        _forking.held.release()


def _after_fork() -> None:
    global _current, _lock, _whole
    _lock, _whole = threading.Lock(), threading.RLock()
    if _current is not None:
        _inherited.append(_current)
        _current = None
    for reference in forgets_after_fork.valuerefs():
        if (one := reference()) is not None:
            one.forget()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork
)
