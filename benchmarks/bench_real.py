"""Calls to a real llama.cpp server with 1, 2 and 4 slots: lost calls, time and p95 latency.

The server is `batchwright serve smollm2` with one thread, a 135M model on the processor. Every
client makes the same calls with the same time for one call: our deadline, which includes retries,
and the timeout of one try of AsyncOpenAI and litellm, which both try three times. inspect_ai's rule
is the port of `limit_peers.py` in our pool.

Other work on the machine troubles the clients differently, so they are measured in rounds: `auto`
with no memory of the server, the limit at the slots, `auto` with what it has learned, and then some
of the other clients, each of which has one turn in all. The last column has the time over that of
the limit at the slots in the same round, the median of the rounds.
"""

import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from batchwright.calls import Endpoint, Pool, chat
from common import Report, arguments
from limit_peers import Inspect

HERE = Path(__file__).parent
LITELLM = (
    Path(sys.executable)
    if find_spec("litellm") is not None
    else HERE.parent / ".venv-bench" / "bin" / "python"
)
DEADLINE_S = 120.0
SLOTS = (1, 2, 4)
LOADS = {"short": (32, 8, 8), "long": (16, 60, 3)}
"""Of each load: calls, words of a prompt, tokens of a response."""
ROUNDS = 2
OVER = "time over our limit at the slots"
Client = Callable[[], tuple[float, list[Any]]]
"""Makes all calls: the seconds of all together, and of each, None if it was lost."""


@dataclass(frozen=True, slots=True)
class Server:
    """A llama.cpp server in a process of its own."""

    url: str
    pid: int

    def processor_s(self) -> float:
        """Processor time that it has used, which other work on the machine hardly changes."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def served(slots: int) -> Iterator[Server]:
    """A llama.cpp server with one thread, and so many slots."""
    command = [sys.executable, "-m", "batchwright", "serve", "smollm2"]
    command += ["--parallel", str(slots), "--port", "0", "--threads", "1", "--context", "1024"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        found = re.search(r"http://\S+/v1", line)
        if found is None:
            raise SystemExit(f"the server did not start: {line!r}; batchwright models get smollm2")
        yield Server(found[0], server.pid)
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
    # Else litellm looks for a list of prices on the network first.
    environ = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    out = subprocess.run(command, capture_output=True, check=True, env=environ)
    data = json.loads(out.stdout.splitlines()[-1])
    return data["seconds"], data["took"]


def measure(report: Report, slots: int, load: str, rounds: int) -> list[tuple[str, int, float]]:
    """Of each client: its name, calls lost, and its time over that of our limit at the slots."""
    took: dict[str, list[tuple[float, list[Any]]]] = {}
    shares: dict[str, list[float]] = {}
    fixed = f"ours, limit {slots}"
    numbers = itertools.count()
    with served(slots) as server, ExitStack() as stack:
        homes = [stack.enter_context(tempfile.TemporaryDirectory()) for _ in range(rounds)]

        def mine(limit: Any, home: str) -> Client:
            return lambda: ours(server.url, limit, load, next(numbers), home)

        def peer(python: Path | str, client: str, limit: int) -> Client:
            return lambda: theirs(python, client, server.url, limit, load, next(numbers))

        others = {
            "ours, limit 60": mine(60, homes[0]),
            "inspect_ai's rule": mine(Inspect(), homes[0]),
        }
        others |= {f"AsyncOpenAI, {k}": peer(sys.executable, "openai", k) for k in (4, 16, 60)}
        if LITELLM.exists():
            others["litellm, 16"] = peer(LITELLM, "litellm", 16)
        else:
            report.not_measured("litellm", "no .venv-bench with litellm")
        mine(slots, homes[0])()  # not measured: the model is loaded
        for number, home in enumerate(homes):
            turns = {
                "ours, auto": mine("auto", home),
                fixed: mine(slots, home),
                "ours, auto, again": mine("auto", home),
            }
            turns |= dict(list(others.items())[number::rounds])
            for name, call in turns.items():
                try:
                    took.setdefault(name, []).append(call())
                except (subprocess.CalledProcessError, ValueError) as error:
                    report.not_measured(name, f"it failed: {type(error).__name__}")
            base = took[fixed][-1][0]
            for name in turns.keys() & took.keys():
                shares.setdefault(name, []).append(took[name][-1][0] / base)
            shown = [f"{name} {took[name][-1][0]:.1f} s" for name in turns if name in took]
            print(f"{slots} slots, {load}: {', '.join(shown)}", flush=True)
    rows = [_row(name, took[name], shares[name]) for name in took]
    title = f"{load} prompts, {slots} slots, {rounds} rounds"
    report.table(title, ["", "calls", "lost", "seconds", "p95 s", OVER], rows)
    return [(row[0], row[2], row[5]) for row in rows]


def _row(name: str, runs: list[tuple[float, list[Any]]], shares: list[float]) -> list[Any]:
    every = [one for _, calls in runs for one in calls]
    good = sorted(one for one in every if one is not None)
    p95 = good[round(0.95 * (len(good) - 1))] if good else None
    seconds = statistics.median(seconds for seconds, _ in runs)
    return [name, len(every), len(every) - len(good), seconds, p95, statistics.median(shares)]


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--slots", type=int, nargs="+", help="slots of the servers")
    args = parser.parse_args()
    report = Report("real", args)
    found = []
    given = args.slots or ((4,) if args.quick else SLOTS)
    rounds = 1 if args.quick else ROUNDS
    for slots in SLOTS:
        if slots not in given:
            report.not_measured(f"{slots} slots", "left out by --slots or --quick")
    for slots in given:
        for load in LOADS:
            found += measure(report, slots, load, rounds)
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
