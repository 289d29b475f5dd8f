"""Calls to a server: processor time a call, seconds against the ideal, memory at 10,000 in flight.

The server is the shipped simulator in a process of its own; every client asks it the same.

    batchwright            Pool, the limit given, retries, accounting and single-flight on
    batchwright + cache    the same with an empty cache on disk: look-up, lease, group commit
    ... full cache         the same a second time: no call is made
    aiohttp                one session, a worker for each call in flight, answers parsed
    AsyncOpenAI + sem(60)  the usual pattern: gather under a semaphore; with openai 3, and with
                           openai 2 as well, which has another transport, and with the
                           aiohttp transport that openai 3 offers
    litellm, inspect_ai    the same with their own calls; needs benchmarks/requirements.txt
    ThreadPool(8) + OpenAI eight threads with the plain client, as in the document on batching
    naive                  one call after the other; a few calls, extrapolated

The ideal of N calls of mean latency s at K in flight is ceil(N / K) * s, so nobody can be further
ahead of a peer than that peer is behind the ideal (column `x ideal`). The goal of ten times ahead
of AsyncOpenAI was set with openai 2; openai 3 is so near to the ideal that no client can be, and
stands in the tables without a goal. The same calls are then made while every core also has other
work, as beside a training run: there the client that needs less of the processor is ahead by more.
The machine is shared: processor time and ratios are what counts.
"""

import asyncio
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchwright.calls.simulator import Simulator
from common import Contender, Measured, Report, arguments, measure
from install_peers import aside

MODEL = "sim"
IN_FLIGHT = 60
MEMORY_CALLS = 10_000
NAIVE_CALLS = 20
QUESTION = "Which of the numbers that follow is the largest? " * 4


@dataclass(frozen=True)
class Case:
    """So many calls to this server, so many at a time."""

    url: str
    calls: int
    in_flight: int

    @property
    def prompts(self) -> list[str]:
        return [f"{QUESTION}{i} {i * 7919 % 1000}" for i in range(self.calls)]


class Meter:
    """Runs a client's call and keeps the best of what it took."""

    def __init__(self, work: Callable[[], int], wanted: int) -> None:
        self.work, self.wanted = work, wanted
        self.cpu, self.wall = math.inf, math.inf
        self.last_cpu = math.inf

    def __call__(self) -> "Meter":
        start, worked = time.perf_counter(), time.process_time()
        done = self.work()
        self.last_cpu = time.process_time() - worked
        self.cpu = min(self.cpu, self.last_cpu)
        self.wall = min(self.wall, time.perf_counter() - start)
        assert done == self.wanted, f"{done} of {self.wanted} calls came back"
        return self


def summary(case: Case, meter: Meter) -> Mapping[str, Any]:
    return {"cpu": meter.cpu, "wall": meter.wall}


def ours(cache: bool = False, full: bool = False) -> Callable[[Case], Meter]:
    def prepare(case: Case) -> Meter:
        from batchwright.calls import Pool, chat

        requests = [chat(MODEL, text, temperature=0, max_tokens=32) for text in case.prompts]
        folder = tempfile.mkdtemp(dir=os.environ["BATCHWRIGHT_HOME"])
        number = 0

        def work() -> int:
            nonlocal number
            number += not (full and number)
            path = Path(folder, f"{number}.db") if cache else None
            prices = {MODEL: (1.0, 2.0)}
            with Pool(
                case.url, limit=case.in_flight, cache=path, prices=prices, remember=False
            ) as pool:
                return sum(map(bool, pool.map(requests)))

        if full:
            work()
        return Meter(work, case.calls)

    return prepare


def raw_aiohttp(case: Case) -> Meter:
    import aiohttp

    url = f"{case.url}/v1/chat/completions"
    bodies = [json.dumps(body(text)).encode() for text in case.prompts]

    async def run() -> int:
        connector = aiohttp.TCPConnector(limit=0)
        headers = {"Content-Type": "application/json"}
        async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
            waiting, done = iter(bodies), 0

            async def worker() -> None:
                nonlocal done
                for one in waiting:
                    async with session.post(url, data=one) as response:
                        answer = await response.json()
                        done += bool(answer["choices"][0]["message"]["content"])

            await asyncio.gather(*(worker() for _ in range(case.in_flight)))
            return done

    return Meter(lambda: asyncio.run(run()), case.calls)


def body(text: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 32}


def gathered(
    case: Case, ask: Callable[[str], Coroutine[Any, Any, str]], most: int
) -> Coroutine[Any, Any, int]:
    """The usual pattern: everything at once, held back by a semaphore."""

    async def run() -> int:
        gate = asyncio.Semaphore(most)

        async def one(text: str) -> str:
            async with gate:
                return await ask(text)

        answers = await asyncio.gather(*map(one, case.prompts))
        return sum(map(bool, answers))

    return run()


def old_openai(case: Case) -> Meter:
    """The same client of the version before; in a process that has imported no other."""
    sys.path.insert(0, str(aside("openai==2.54.0")))
    import openai

    if not openai.__version__.startswith("2."):
        raise ImportError(f"openai {openai.__version__} is here, not 2")
    return async_openai(case)


def aiohttp_openai(case: Case) -> Meter:
    """OpenAI's client over its own aiohttp transport, which its documentation advises."""
    from openai import DefaultAioHttpClient

    return async_openai(case, lambda: {"http_client": DefaultAioHttpClient()})


def async_openai(case: Case, more: Callable[[], dict[str, Any]] = dict) -> Meter:
    from openai import AsyncOpenAI

    async def run() -> int:
        async with AsyncOpenAI(base_url=f"{case.url}/v1", api_key="none", **more()) as client:

            async def ask(text: str) -> str:
                answer = await client.chat.completions.create(**body(text))
                return answer.choices[0].message.content or ""

            return await gathered(case, ask, case.in_flight)

    return Meter(lambda: asyncio.run(run()), case.calls)


def litellm(case: Case) -> Meter:
    import litellm

    litellm.suppress_debug_info = True

    async def ask(text: str) -> str:
        given = {**body(text), "model": f"openai/{MODEL}"}
        answer = await litellm.acompletion(**given, api_base=f"{case.url}/v1", api_key="none")
        return answer.choices[0].message.content or ""

    return Meter(lambda: asyncio.run(gathered(case, ask, case.in_flight)), case.calls)


def inspect_ai(case: Case) -> Meter:
    from inspect_ai.model import GenerateConfig, get_model

    async def run() -> int:
        model = get_model(
            f"openai-api/bench/{MODEL}",
            base_url=f"{case.url}/v1",
            api_key="none",
            config=GenerateConfig(temperature=0, max_tokens=32, max_connections=case.in_flight),
            memoize=False,
        )

        async def ask(text: str) -> str:
            return (await model.generate(text)).completion

        return await gathered(case, ask, case.in_flight)

    return Meter(lambda: asyncio.run(run()), case.calls)


def threads(case: Case) -> Meter:
    from openai import OpenAI

    def work() -> int:
        with OpenAI(base_url=f"{case.url}/v1", api_key="none") as client:

            def ask(text: str) -> bool:
                answer = client.chat.completions.create(**body(text))
                return bool(answer.choices[0].message.content)

            with ThreadPoolExecutor(8) as executor:
                return sum(executor.map(ask, case.prompts))

    return Meter(work, case.calls)


OURS = "batchwright"
CACHED = "batchwright + cache"
FULL = "batchwright, full cache"
FLOOR = "aiohttp"
SEMAPHORE = f"AsyncOpenAI + sem({IN_FLIGHT})"
BY_AIOHTTP = f"AsyncOpenAI, aiohttp + sem({IN_FLIGHT})"
OLD = f"AsyncOpenAI 2 + sem({IN_FLIGHT})"
CLIENTS = {
    OURS: ours(),
    CACHED: ours(cache=True),
    FULL: ours(cache=True, full=True),
    FLOOR: raw_aiohttp,
    SEMAPHORE: async_openai,
    BY_AIOHTTP: aiohttp_openai,
    OLD: old_openai,
    "litellm": litellm,
    "inspect_ai": inspect_ai,
    "ThreadPool(8) + OpenAI": threads,
}
LEAN = (OURS, CACHED, FULL, FLOOR)
FAT = tuple(name for name in CLIENTS if name not in LEAN)


def measured(
    report: Report, case: Case, names: Sequence[str], limit_s: float, runs: int
) -> dict[str, Measured]:
    found = {}
    small = Case(case.url, min(case.calls, 16), case.in_flight)
    for name in names:
        contender = Contender(name, CLIENTS[name], summary)
        one = measure(contender, case, small, limit_s=limit_s, runs=runs, patience_s=limit_s / 12)
        if one.reason:
            report.not_measured(f"{name} ({case.calls:,} calls)", one.reason)
        else:
            found[name] = one
    return found


def processor_time(report: Report, args: Any) -> None:
    """A server without latency: what a call costs the client."""
    # Most clients take so long that fewer calls tell as much.
    many, few, runs = (400, 100, 3) if args.quick else (3000, 600, 15)
    with Simulator(knee=100_000, latency_s=0.0, sigma=0.0).running() as url:
        # In turns, so that all of them meet the same machine: it changes within minutes.
        meters = {name: CLIENTS[name](Case(str(url), many, 64)) for name in LEAN}
        turns: dict[str, list[float]] = {name: [] for name in LEAN}
        for _ in range(runs):
            for meter in meters.values():
                meter()
            for name, meter in meters.items():
                turns[name].append(meter.last_cpu / meters[FLOOR].last_cpu)
        found = measured(report, Case(str(url), few, 64), FAT, args.limit, min(runs, 3))
    cpu = {name: meter.cpu / many for name, meter in meters.items()}
    cpu |= {name: one.summary["cpu"] / few for name, one in found.items()}
    floor = cpu.get(FLOOR)
    # Of those that took turns the ratio is the median of all turns, the time that of the best one.
    times = {name: statistics.median(ratios) for name, ratios in turns.items()}
    rows = [
        [name, value * 1e6, times.get(name, value / floor if floor else None)]
        for name, value in cpu.items()
    ]
    title = f"processor time a call, {many:,} calls ({few:,} from {FAT[0]} on), 64 in flight"
    report.table(title, ["", "us", "x aiohttp"], rows)
    if args.quick:
        # So few calls are mostly the opening of their connections.
        return
    ratios = {str(row[0]): row[2] for row in rows}
    report.target("us a call with the cache, x aiohttp", ratios.get(CACHED), most=1.5)
    report.target("us a call without the cache, x aiohttp", ratios.get(OURS), most=1.5)
    for name in (SEMAPHORE, OLD):
        if name in cpu:
            report.target(f"us a call, {name} / {OURS}", cpu[name] / cpu[OURS], least=10.0)


def against_the_ideal(report: Report, args: Any, calls: int, names: Sequence[str]) -> None:
    """50 ms a call, 60 at a time, as long as the server bears."""
    mean_s = 0.05
    ideal = math.ceil(calls / IN_FLIGHT) * mean_s
    with Simulator(knee=IN_FLIGHT, latency_s=mean_s, sigma=0.5).running() as url:
        case = Case(str(url), calls, IN_FLIGHT)
        found = measured(report, case, names, args.limit, 1 if args.quick else 3)
        few = Case(str(url), NAIVE_CALLS, 1)
        one = measure(Contender("naive", raw_aiohttp, summary), few, few, runs=1)
    walls = {name: m.summary["wall"] for name, m in found.items()}
    if not one.reason:
        walls[f"naive, from {NAIVE_CALLS} calls"] = one.summary["wall"] * calls / NAIVE_CALLS
    mine = walls.get(OURS)
    rows = [
        [
            *(name, wall, wall / ideal, wall / mine if mine else None),
            found[name].summary["cpu"] if name in found else None,
        ]
        for name, wall in walls.items()
    ]
    title = f"{calls:,} calls of 50 ms, {IN_FLIGHT} in flight; ideal {ideal:.2f} s"
    report.table(title, ["", "seconds", "x ideal", "x batchwright", "processor s"], rows)
    if args.quick:
        # So few calls are mostly their own tail; the ideal means nothing here.
        return
    for name in (OURS, CACHED):
        if name in walls:
            report.target(f"{calls:,} calls, {name}, x ideal", walls[name] / ideal, most=1.25)
    if OLD in walls and OURS in walls:
        ahead = walls[OLD] / walls[OURS]
        report.target(f"{calls:,} calls, {OLD} / {OURS}", ahead, least=10.0)


@contextmanager
def busy_cores() -> Iterator[int]:
    """Two processes a core that only count, at the same priority."""
    number = 2 * len(os.sched_getaffinity(0))
    command = [sys.executable, "-c", "while True: pass"]
    spinning = [subprocess.Popen(command) for _ in range(number)]
    try:
        yield number
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def beside_other_work(report: Report, args: Any, calls: int) -> None:
    """The same calls of 50 ms on a machine that is busy; the server has to share it as well."""
    names = (OURS, CACHED, FLOOR, SEMAPHORE, BY_AIOHTTP, OLD)
    with Simulator(knee=IN_FLIGHT, latency_s=0.05, sigma=0.5).running() as url, busy_cores() as n:
        case = Case(str(url), calls, IN_FLIGHT)
        found = measured(report, case, names, args.limit, 1 if args.quick else 3)
    walls = {name: m.summary["wall"] for name, m in found.items()}
    rows = [
        [name, wall, wall / walls[OURS] if OURS in walls else None, found[name].summary["cpu"]]
        for name, wall in walls.items()
    ]
    title = f"{calls:,} calls of 50 ms, {IN_FLIGHT} in flight, beside {n} processes that count"
    report.table(title, ["", "seconds", "x batchwright", "processor s"], rows)
    if OLD in walls and OURS in walls and not args.quick:
        what = f"{calls:,} calls beside other work, {OLD} / {OURS}"
        report.target(what, walls[OLD] / walls[OURS], least=10.0)


def memory(report: Report, args: Any) -> None:
    """Everything in flight at once."""
    calls = 500 if args.quick else MEMORY_CALLS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        # Long enough that the last call is sent before the first is answered.
        latency = 1.0 if args.quick else 12.0
        with Simulator(knee=100_000, latency_s=latency, sigma=0.0).running() as url:
            case = Case(str(url), calls, calls)
            found = measured(report, case, [OURS, FLOOR], args.limit, 1)
            peak = url.stats()["peak_in_flight"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    rows = [
        [name, (m.extra_bytes or 0) / 1e6, (m.extra_bytes or 0) / calls / 1e3, m.summary["wall"]]
        for name, m in found.items()
    ]
    title = f"{calls:,} calls in flight (the server saw {peak:,} at once)"
    report.table(title, ["", "MB more", "kB a call", "seconds"], rows)
    if not args.quick and OURS in found:
        report.target("MB more at 10,000 in flight", (found[OURS].extra_bytes or 0) / 1e6, most=200)


def main() -> None:
    args = arguments(__doc__ or "").parse_args()
    with tempfile.TemporaryDirectory() as home:
        os.environ["BATCHWRIGHT_HOME"] = home
        os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
        os.environ.pop("OPENAI_API_KEY", None)
        report = Report("calls", args)
        processor_time(report, args)
        if args.quick:
            against_the_ideal(report, args, 240, [OURS, CACHED, SEMAPHORE])
            beside_other_work(report, args, 240)
        else:
            against_the_ideal(report, args, 1024, list(CLIENTS))
            beside_other_work(report, args, 1024)
            against_the_ideal(report, args, 10_000, [OURS, CACHED, FLOOR])
        memory(report, args)
        report.close()


if __name__ == "__main__":
    main()
