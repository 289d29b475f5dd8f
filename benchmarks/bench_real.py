"""Calls to a real llama.cpp server with 1, 2 and 4 slots: lost calls, time and p95 latency.

The server is `batchwright serve smollm2`, a 135M model on the processor. Every client makes the
same calls with the same time for one call: our deadline, which includes retries, and the timeout
of one try of AsyncOpenAI and litellm, which both try three times. Ours starts with no memory of the
server, then once more with what it learned. inspect_ai's rule is the port of `limit_peers.py` in
our pool. The clients run one after the other, so that other work on the machine troubles them
differently: calls lost are what to look at, not seconds.
"""

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from batchwright.calls import Endpoint, Pool, chat
from common import Report, arguments
from limit_peers import Inspect

HERE = Path(__file__).parent
LITELLM = HERE.parent / ".venv-bench" / "bin" / "python"
DEADLINE_S = 120.0
LOADS = {"short": (8, 8, 4), "long": (6, 60, 3)}
"""Of each load: calls, words of a prompt, tokens of a response."""


@contextmanager
def served(slots: int) -> Iterator[str]:
    """A llama.cpp server in a process of its own."""
    command = [sys.executable, "-m", "batchwright", "serve", "smollm2"]
    command += ["--parallel", str(slots), "--port", "0", "--threads", "1", "--context", "1024"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        found = re.search(r"http://\S+/v1", line)
        if found is None:
            raise SystemExit(f"the server did not start: {line!r}; batchwright models get smollm2")
        yield found[0]
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()


def prompts(load: str, round_: int) -> list[str]:
    """Prompts that share no beginning, so that no slot has any of one cached."""
    calls, words, _ = LOADS[load]
    names = ["river", "stone", "lamp", "garden", "winter", "bread", "letter", "harbour"]
    texts = []
    for n in range(calls):
        drawn = [names[(7 * n + 3 * k * k + round_) % len(names)] for k in range(words)]
        texts.append(f"{round_} {n} " + " ".join(drawn) + ". Continue.")
    return texts


def ours(url: str, limit: Any, load: str, round_: int, home: str) -> tuple[float, list[Any]]:
    tokens = LOADS[load][2]
    requests = [
        chat("smollm2", text, max_tokens=tokens, temperature=0) for text in prompts(load, round_)
    ]
    before = os.environ.get("BATCHWRIGHT_HOME")
    os.environ["BATCHWRIGHT_HOME"] = home  # what is learned stays between these runs
    try:
        with Pool(Endpoint(url), limit=limit, deadline_s=DEADLINE_S) as pool:
            begun = time.perf_counter()
            outcomes = pool.map(requests)
            seconds = time.perf_counter() - begun
    finally:
        del os.environ["BATCHWRIGHT_HOME"]
        if before is not None:
            os.environ["BATCHWRIGHT_HOME"] = before
    return seconds, [outcome.seconds if outcome else None for outcome in outcomes]


def theirs(
    python: Path | str, client: str, url: str, limit: int, load: str, round_: int
) -> tuple[float, list[Any]]:
    given = {
        "client": client,
        "url": url,
        "model": "smollm2",
        "limit": limit,
        "deadline_s": DEADLINE_S,
        "max_tokens": LOADS[load][2],
        "prompts": prompts(load, round_),
    }
    command = [str(python), str(HERE / "real_clients.py"), json.dumps(given)]
    out = subprocess.run(command, capture_output=True, check=True)
    data = json.loads(out.stdout.splitlines()[-1])
    return data["seconds"], data["took"]


def measure(report: Report, slots: int, load: str) -> list[tuple[str, int, float]]:
    rows: list[list[Any]] = []
    with served(slots) as url, tempfile.TemporaryDirectory() as home:
        contenders: list[tuple[str, Any]] = [
            ("ours, auto", lambda n: ours(url, "auto", load, n, home)),
            ("ours, auto, again", lambda n: ours(url, "auto", load, n, home)),
            (f"ours, limit {slots}", lambda n: ours(url, slots, load, n, home)),
            ("ours, limit 60", lambda n: ours(url, 60, load, n, home)),
            *(
                (
                    f"AsyncOpenAI, {k}",
                    lambda n, k=k: theirs(sys.executable, "openai", url, k, load, n),
                )
                for k in (4, 16, 60)
            ),
            ("inspect_ai's rule", lambda n: ours(url, Inspect(), load, n, home)),
        ]
        if LITELLM.exists():
            contenders.append(
                ("litellm, 16", lambda n: theirs(LITELLM, "litellm", url, 16, load, n))
            )
        else:
            report.not_measured("litellm", "no .venv-bench with litellm")
        ours(url, slots, load, 1000, home)  # not measured: the first calls load the model
        for round_, (name, call) in enumerate(contenders):
            try:
                seconds, took = call(round_)
            except (subprocess.CalledProcessError, ValueError) as error:
                report.not_measured(name, f"it failed: {type(error).__name__}")
                continue
            good = sorted(one for one in took if one is not None)
            p95 = good[round(0.95 * (len(good) - 1))] if good else None
            rows.append([name, len(took), len(took) - len(good), seconds, p95])
            print(slots, load, rows[-1], flush=True)
    base = next(row[3] for row in rows if row[0] == f"ours, limit {slots}")
    table = [[*row, row[3] / base] for row in rows]
    report.table(
        f"{load} prompts, {slots} slots",
        ["", "calls", "lost", "seconds", "p95 s", "time over our limit at the slots"],
        table,
    )
    return [(row[0], row[2], row[3] / base) for row in rows]


def main() -> None:
    args = arguments(__doc__ or "").parse_args()
    report = Report("real", args)
    found = []
    for slots in (4,) if args.quick else (1, 2, 4):
        for load in LOADS:
            found += measure(report, slots, load)
    auto = [(lost, share) for name, lost, share in found if name.startswith("ours, auto")]
    report.target("calls that auto lost, of all runs", sum(lost for lost, _ in auto), most=0)
    fixed = sum(lost for name, lost, _ in found if name == "ours, limit 60")
    report.target("calls that a limit of 60 lost", fixed, most=0)
    report.target(
        "time of auto over our limit at the slots, median",
        statistics.median(share for _, share in auto),
        most=1 / 0.9,
    )
    report.close()


if __name__ == "__main__":
    main()
