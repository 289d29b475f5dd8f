"""A process that runs commands in forks of itself and kills them at a chosen moment.

It reads jobs from its input, one JSON object a line, and answers each with one line. Everything is
imported and compiled once, so that a fork takes milliseconds where a new process takes seconds.

A moment is a number: operations of a command on files below its folder are counted, and the
process is killed before the one with that number, or in the middle of it if it is a write. Or it is
a time in seconds. `fail` has the operation with that number fail as on a full disk instead.
"""

import contextlib
import errno
import importlib
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

AUDITED = {
    *("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate"),
    *("os.chmod", "shutil.rmtree", "batchwright.exchange"),
}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Moments:
    """Counts what a process does to files below a folder, and ends it at the given moment."""

    def __init__(self, folder: Path, kill_at: int, fail_at: int) -> None:
        self._folder = str(folder)
        self._kill_at, self._fail_at = kill_at, fail_at
        self.count = 0
        self.names: list[str] = []
        self._write, self._fsync = os.write, os.fsync

    def watch(self) -> None:
        sys.addaudithook(self._audited)
        os.write, os.fsync = self._writing, self._syncing  # type: ignore[assignment]

    def write_report(self, path: Path) -> None:
        # Whole or not there: the process may be killed here too.
        path.with_suffix(".new").write_text(json.dumps({"names": self.names}))
        path.with_suffix(".new").replace(path)

    def _audited(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = args
            writes = flags & WRITES if mode is None else set("wax+") & set(mode)
            if writes and self._is_here(path):
                self._step("open")
        elif event in AUDITED and any(map(self._is_here, args)):
            self._step(event)

    def _is_here(self, path: object) -> bool:
        if isinstance(path, int) and not isinstance(path, bool) and path > 2:
            try:
                path = os.readlink(f"/proc/self/fd/{path}")
            except OSError:
                return False
        if not isinstance(path, str | bytes | os.PathLike):
            return False
        found = os.path.join(os.getcwd(), os.fsdecode(path))
        return found.startswith(self._folder)

    def _step(self, name: str, torn: Callable[[], object] = lambda: None) -> None:
        self.count += 1
        self.names.append(name)
        if self.count == self._kill_at:
            torn()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.count == self._fail_at:
            torn()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _writing(self, handle: int, data: Any) -> int:
        if self._is_here(handle):
            self._step("write", lambda: self._write(handle, bytes(data)[: len(data) // 2]))
        return self._write(handle, data)

    def _syncing(self, handle: Any) -> None:
        number = handle if isinstance(handle, int) else handle.fileno()
        if self._is_here(number):
            self._step("fsync")
        self._fsync(handle)


def child(job: dict[str, Any], report: str) -> None:
    """One command, to its end or to the chosen moment."""
    folder = Path(job["folder"])
    os.chdir(folder)
    os.environ.update(job.get("env", {}))
    output = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    limits = job.get("limits", {})
    soft = {name: resource.getrlimit(getattr(resource, name))[0] for name in limits}
    hard = {name: resource.getrlimit(getattr(resource, name))[1] for name in limits}
    for name, limit in limits.items():
        resource.setrlimit(getattr(resource, name), (limit, hard[name]))
    if "memory" in job:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + job["memory"]
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    moments = Moments(folder, job.get("kill_at", 0), job.get("fail_at", 0))
    moments.watch()
    code: Any = 0
    os.seteuid(job.get("user", os.geteuid()) if os.geteuid() == 0 else os.geteuid())
    try:
        run(job)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 99
    os.seteuid(os.getuid())
    for name in limits:
        resource.setrlimit(getattr(resource, name), (soft[name], hard[name]))
    sys.stdout.flush()
    sys.stderr.flush()
    moments.write_report(Path(report))
    os._exit(code if isinstance(code, int) else int(code is not None))


def run(job: dict[str, Any]) -> None:
    if "call" in job:
        module, _, name = job["call"].partition(":")
        getattr(importlib.import_module(module), name)(*job.get("args", ()))
        return
    from batchwright.cli.app import main

    sys.argv = ["batchwright", *job["argv"]]
    main()


def do(job: dict[str, Any]) -> dict[str, Any]:
    report = Path(job["output"]).with_suffix(".report")
    report.unlink(missing_ok=True)
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        child(job, str(report))
    limit, kill_after = job.get("timeout", 600.0), job.get("kill_after")
    ended, hung = 0, False
    while not ended:
        ended, status = os.waitpid(pid, os.WNOHANG)
        spent = time.monotonic() - began
        if not ended and spent > (limit if kill_after is None else min(limit, kill_after)):
            hung = kill_after is None or spent > limit
            os.kill(pid, signal.SIGKILL)
            ended, status = os.waitpid(pid, 0)
        time.sleep(0 if ended else 0.001)
    found = json.loads(report.read_text()) if report.exists() else {"names": []}
    code = os.waitstatus_to_exitcode(status)
    seconds = time.monotonic() - began
    return {
        **found,
        "seconds": seconds,
        "code": code,
        "hung": hung,
        "killed": code == -signal.SIGKILL,
    }


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    for name in sys.argv[1:]:
        importlib.import_module(name)
    for line in sys.stdin:
        job = json.loads(line)
        if "warm" in job:
            # In this process, so that all forks have what it compiled and imported.
            os.chdir(job["folder"])
            os.environ.update(job.get("env", {}))
            saved = os.dup(1)
            sink = os.open(os.devnull, os.O_WRONLY)
            os.dup2(sink, 1)
            for one in job["warm"]:
                with contextlib.suppress(SystemExit):
                    run(one)
            sys.stdout.flush()
            os.dup2(saved, 1)
            answer: dict[str, Any] = {"warm": True}
        else:
            answer = do(job)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
