"""The thread that owns the sockets, and what is done beside it."""

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from batchwright.calls.loop import in_thread
from raw_server import RawServer, Seen


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


FORKS = """
import os, random, signal, sys, threading, time
from batchwright.calls import Endpoint, Pool, chat

url, folder, seed = sys.argv[1:]
draw = random.Random(int(seed))

def use(pool, name):
    outcomes = pool.map([chat("m", f"{name} {n}", temperature=0) for n in range(3)])
    assert all(outcomes), outcomes

def child(pool, name):
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        # A child that hangs is killed by this, and its parent sees the signal.
        signal.alarm(30)
        use(pool, name)
        code = 0
    finally:
        os._exit(code)

def one_round(pool, forks, most_s):
    first = threading.Thread(target=use, args=(pool, "parent"))
    children = []
    first.start()
    for n in range(forks):
        time.sleep(draw.uniform(0, most_s))
        children.append(child(pool, f"child {n}"))
    first.join()
    use(pool, "parent again")
    return [os.waitpid(pid, 0)[1] for pid in children]

def answer(requests):
    return ["yes"] * len(requests)

# The first one imports aiohttp, for which there is time to fork in between.
ends = one_round(Pool(url, cache=folder + "/a.db"), 4, 0.1)
for number in range(4):
    ends += one_round(Pool(url, cache=f"{folder}/{number}.db", rpm=1e6), 2, 0.004)
    ends += one_round(Pool(url), 1, 0.002)
    ends += one_round(Pool(Endpoint(answer)), 1, 0.002)
print(ends)
"""


@pytest.mark.parametrize("seed", [1, 2])
def test_a_fork_at_any_moment_hangs_neither_side(seed: int, tmp_path: Path) -> None:
    async def answer(seen: Seen) -> None:
        await seen.answer()

    with RawServer(answer) as server:
        done = subprocess.run(
            [sys.executable, "-c", FORKS, server.url, str(tmp_path), str(seed)],
            env={**os.environ, "BATCHWRIGHT_HOME": str(tmp_path / "home")},
            capture_output=True,
            text=True,
            timeout=200,
        )

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str([0] * 20), done.stderr


INTERRUPTED = """
import asyncio, atexit, os, signal, threading, time
from batchwright.calls import Endpoint, Pool, chat
from batchwright.calls.loop import background

# Registered first, so called last. Tasks that are left here are "destroyed but pending" later.
atexit.register(lambda: print(len(asyncio.all_tasks(loop)), loop.is_closed()))
loop = background().loop
signal.signal(signal.SIGINT, signal.default_int_handler)
begun = threading.Event()

def slow(requests):
    begun.set()
    time.sleep(1)
    return ["x"] * len(requests)

pool = Pool(Endpoint(slow))
threading.Thread(target=pool.map, args=([chat("m", "q")],), daemon=True).start()
begun.wait()
timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
timer.start()
try:
    pool.close()
except KeyboardInterrupt:
    print("interrupted")
timer.join()
"""


def test_a_close_that_ctrl_c_interrupts_ends_at_exit_without_noise(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", INTERRUPTED],
        env={**os.environ, "BATCHWRIGHT_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n0 True\n", "")
