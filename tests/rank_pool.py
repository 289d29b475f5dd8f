"""Ranks that stay: processes that have torch imported and train together whenever they are told.

Starting a process takes most of the time of a test; each run meets at a port of its own.
"""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from batchwright.train.sft.config import SftConfig

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS")

WORKER = """
import json, logging, os, signal, sys, time
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
from batchwright.train import ranks
from batchwright.train.sft.config import SftConfig
from batchwright.train.sft.loop import train_sft
torch.set_num_threads(1)
said = []
logging.getLogger("batchwright").addHandler(logging.NullHandler())
class Said(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())
        Path(told["said"]).touch()
logging.getLogger("batchwright").addHandler(Said())
class Killed(BaseException):
    pass
def joined(*args, _real=dist.init_process_group, **more):
    return _real(*args, **{"timeout": timedelta(seconds=limit), **more})
dist.init_process_group = joined
replies = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
print("{}", file=replies, flush=True)
for line in sys.stdin:
    told = json.loads(line)
    os.environ.update(told["environ"])
    limit, first = told["limit"], told["environ"]["RANK"] == "0"
    ranks.SILENT_S, ranks.SAY_S, ranks.BEAT_S = told["silent"], 0.2, 0.1
    said.clear()
    def act(which, pid):
        if which == "raise":
            raise Killed
        os.kill(pid, which)
        if pid != os.getpid() and which == signal.SIGSTOP:
            time.sleep(1)
    def progress(done, total, loss):
        if done == told["at"]:
            act(told["which"], told["pid"])
    def preparing(done, total):
        time.sleep(told["slow"])
        while told["until_said"] and not os.path.exists(told["said"]):
            time.sleep(0.05)
        if told["at"] == "preparing":
            act(told["which"], told["pid"])
    try:
        result = train_sft(SftConfig.load(Path(told["config"])), resume=told["resume"],
                           progress=progress, preparing=preparing)
        reply = {"step": result.step, "finished": result.finished, "stopped_by": result.stopped_by}
    except BaseException as error:
        reply = {"error": type(error).__name__, "message": str(error)}
    print(json.dumps({**reply, "said": list(said)}), file=replies, flush=True)
"""


@dataclass
class Reply:
    """What became of a run on one rank; of one that was killed, nothing is known."""

    step: int = -1
    finished: bool = False
    stopped_by: str | None = None
    error: str = ""
    message: str = ""
    said: list[str] = field(default_factory=list)


def free_port() -> int:
    """A port that nobody listens on, and that no connection of others is given meanwhile."""
    draw = random.SystemRandom()
    while True:
        # Below those that a system gives to whoever names none.
        port = draw.randrange(12_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as tried:
            tried.bind(("127.0.0.1", port))
            return port


class RankPool:
    """Processes by rank, started when first needed and again when they were killed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[str]] = []

    def train(
        self,
        world: int,
        config: SftConfig,
        *,
        resume: bool = False,
        at: int | str = -1,
        which: int | str = 0,
        target: int = 0,
        slow: float = 0.0,
        until_said: bool = False,
        limit: float = 600.0,
        silent: float = 300.0,
    ) -> list[Reply]:
        """Train on `world` ranks; at a step, `which` signal is sent to the `target` rank.

        The first rank prepares the data for `slow` seconds longer, or `until_said`: until another
        one has logged a sentence, however late it comes.
        """
        self._start(world)
        port = free_port()
        file = self._folder / f"settings-{port}.toml"
        file.write_text(config.to_toml())
        ranks = self._processes[:world]
        for rank, process in enumerate(ranks):
            environ = {
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "BATCHWRIGHT_TOKENS": os.environ["BATCHWRIGHT_TOKENS"],
            }
            told = {
                "environ": environ,
                "config": str(file),
                "resume": resume,
                "slow": slow,
                "until_said": until_said,
                "said": str(file.with_suffix(".said")),
                "at": at,
                "which": which,
                "pid": ranks[target].pid,
                "limit": limit,
                "silent": silent,
            }
            assert process.stdin is not None
            process.stdin.write(json.dumps(told) + "\n")
            process.stdin.flush()
        replies = []
        for rank, process in enumerate(ranks):
            if which == signal.SIGSTOP and rank == target:
                continue
            assert process.stdout is not None
            reply = process.stdout.readline()
            replies.append(Reply(**json.loads(reply or "{}")))
            if not reply:
                process.wait()
        if which == signal.SIGSTOP:
            ranks[target].kill()
            ranks[target].wait()
            replies.insert(target, Reply())
        return replies

    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()

    def _start(self, world: int) -> None:
        environ = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
        fresh = []
        for rank in range(world):
            if rank < len(self._processes):
                process = self._processes[rank]
                if process.poll() is None:
                    continue
                process.communicate()
            with (self._folder / f"rank{rank}.log").open("a") as errors:
                process = subprocess.Popen(
                    [sys.executable, "-c", WORKER],
                    env={**environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    start_new_session=True,
                )
            self._processes[rank : rank + 1] = [process]
            fresh.append(process)
        for process in fresh:
            assert process.stdout is not None
            assert process.stdout.readline() == "{}\n"


@contextlib.contextmanager
def rank_pool(folder: Path) -> Iterator[RankPool]:
    pool = RankPool(folder)
    try:
        yield pool
    finally:
        pool.close()
