"""The thread that owns the sockets, and what is done beside it."""

import asyncio
import threading

import pytest

from batchwright.calls.loop import in_thread


def test_what_is_done_aside_comes_back_or_raises() -> None:
    async def both() -> int:
        with pytest.raises(ZeroDivisionError):
            await in_thread(lambda: 1 // 0)
        return await in_thread(lambda: 6 * 7)

    assert asyncio.run(both()) == 42


@pytest.mark.parametrize("fails", [False, True])
def test_a_caller_may_leave_before_the_work_ends(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[object] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    begun, leave = threading.Event(), threading.Event()
    worker: list[threading.Thread] = []

    def work() -> int:
        worker.append(threading.current_thread())
        begun.set()
        leave.wait(30)
        if fails:
            raise ValueError("nobody hears this")
        return 1

    async def go() -> None:
        task = asyncio.create_task(in_thread(work))
        await asyncio.to_thread(begun.wait, 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(go())
    leave.set()
    worker[0].join(30)
    assert not raised
