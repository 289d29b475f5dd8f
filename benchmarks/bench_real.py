"""Calls to a real llama.cpp server with 1, 2 and 4 slots: lost calls, time and p95 latency.

The server is `batchwright serve smollm2`, a 135M model on the processor. Every client makes the
same calls with the same time for one call: our deadline, which includes retries, and the timeout
of one try of AsyncOpenAI and litellm, which both try three times. inspect_ai's rule is the port of
`limit_peers.py` in our pool. The clients run one after the other, so that other work on the machine
troubles them differently. So `auto` is judged in rounds: with no memory of the server, once more
with what it learned, and with the limit at the slots, each round with a memory of its own; the
rows have the medians of their seconds. The peers run once.
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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from batchwright.calls import Endpoint, Pool, chat
from common import Report, arguments
from limit_peers import Inspect

HERE = Path(__file__).parent
LITELLM = HERE.parent / ".venv-bench" / "bin" / "python"
DEADLINE_S = 120.0
SLOTS = (1, 2, 4)
LOADS = {"short": (16, 8, 8), "long": (8, 60, 3)}
"""Of each load: calls, words of a prompt, tokens of a response."""
ROUNDS = 3


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
    # Else litellm looks for a list of prices on the network first.
    environ = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    out = subprocess.run(command, capture_output=True, check=True, env=environ)
    data = json.loads(out.stdout.splitlines()[-1])
    return data["seconds"], data["took"]


def measure(report: Report, slots: int, load: str) -> list[tuple[str, int, float]]:
    """Of each client: its name, calls lost, and its time over that of our limit at the slots."""
    took: dict[str, list[tuple[float, list[Any]]]] = {}

    def judge(name: str, result: tuple[float, list[Any]]) -> None:
        took.setdefault(name, []).append(result)
        lost = sum(one is None for one in result[1])
        print(f"{slots} slots, {load}: {name}: {result[0]:.1f} s, {lost} lost", flush=True)

    fixed = f"ours, limit {slots}"
    with served(slots) as url, ExitStack() as stack:
        numbers = itertools.count()

        def mine(name: str, limit: Any, home: str) -> None:
            judge(name, ours(url, limit, load, next(numbers), home))

        homes = [stack.enter_context(tempfile.TemporaryDirectory()) for _ in range(ROUNDS)]
        ours(url, slots, load, next(numbers), homes[0])  # not measured: the model is loaded
        for home in homes:
            mine("ours, auto", "auto", home)
            mine(fixed, slots, home)
            mine("ours, auto, again", "auto", home)
        mine("ours, limit 60", 60, homes[0])
        mine("inspect_ai's rule", Inspect(), homes[0])
        peers = [(f"AsyncOpenAI, {k}", sys.executable, "openai", k) for k in (4, 16, 60)]
        if LITELLM.exists():
            peers.append(("litellm, 16", str(LITELLM), "litellm", 16))
        else:
            report.not_measured("litellm", "no .venv-bench with litellm")
        for name, python, client, limit in peers:
            try:
                judge(name, theirs(python, client, url, limit, load, next(numbers)))
            except (subprocess.CalledProcessError, ValueError) as error:
                report.not_measured(name, f"it failed: {type(error).__name__}")
    base = statistics.median(seconds for seconds, _ in took[fixed])
    rows: list[list[Any]] = []
    for name, runs in took.items():
        every = [one for _, calls in runs for one in calls]
        good = sorted(one for one in every if one is not None)
        p95 = good[round(0.95 * (len(good) - 1))] if good else None
        seconds = statistics.median(seconds for seconds, _ in runs)
        rows.append([name, len(every), len(every) - len(good), seconds, p95, seconds / base])
    report.table(
        f"{load} prompts, {slots} slots",
        ["", "calls", "lost", "seconds", "p95 s", "time over our limit at the slots"],
        rows,
    )
    return [(row[0], row[2], row[5]) for row in rows]


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--slots", type=int, nargs="+", help="slots of the servers")
    args = parser.parse_args()
    report = Report("real", args)
    found = []
    given = args.slots or ((4,) if args.quick else SLOTS)
    for slots in SLOTS:
        if slots not in given:
            report.not_measured(f"{slots} slots", "left out by --slots or --quick")
    for slots in given:
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
