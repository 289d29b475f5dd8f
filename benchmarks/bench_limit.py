"""The automatic limit against other rules: share of the throughput of the best limit, and rejects.

Servers and client are simulated in virtual time (`limit_world.py`), so the numbers are the same on
every machine. Four kinds of servers, knees 8, 60 and 200, and a knee that moves from 60 to 20 to
120 after each third of the calls: 16 cases, each the mean over 24 worlds of other latencies,
spreads and seeds; `error` is the standard error of ours. The oracle is the best limit that knows
the knee, in every phase. `cold` knows nothing; `warm` begins with what a cold run over other calls
learned, for the moving knee that is 120. The `late oracle` knows the knee, but begins where ours
does and goes up by doubling, once as many calls have ended as were in flight: what it falls short
by is the price of beginning small.

The constants of the limit were chosen on the worlds of `--tuning`, which have other knees,
latencies, spreads and seeds than the ones judged here. The judging is not blind, though: the table
of an earlier draw of the judged worlds, and once that of the present one, told which cases fell
short (thrash 200, the moving knee on thrash and queue), and the tuning worlds got more of their
kind. One constant of the ramp was moved after a look at the table of servers whose pace lags.

Refused calls keep their place while they wait, for everybody: the rule is kinder to the peers,
which would otherwise be refused many times as often. What our own pool does, to give the place to
the next call, is in the table of `--others`, with other numbers of calls and other servers.

`--families` judges ours on servers and loads of which everything is drawn (`limit_families.py`),
with seeds that were never used for tuning; the warm run has another seed and the same server. The
`late oracle` beside it knows the knee and acts a round of calls late: the price of the delay alone.
The `detecting oracle` knows both knees of a thrashing server, its law and its spread, and only has
to find out when the knee moves; how it does is chosen for each world with hindsight.

`--live` measures over HTTP, with the pool, against a real llama.cpp server with 1 and 4 slots, and
`--http` against the simulator, each in a process of its own; there the machine matters.
"""

import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from batchwright.calls import Endpoint, Pool, Request, chat
from batchwright.calls.limit import AutoLimit, Limit
from batchwright.calls.simulator import Simulator
from batchwright.rng import stream
from bench_real import served
from common import Report, arguments
from limit_families import FAMILIES, JUDGING, draw
from limit_peers import Aimd, Fixed, Gradient2, Inspect, Vegas
from limit_world import KINDS, LateOracle, Run, World, detecting_seconds, oracle_seconds, run

OURS = "batchwright"
LIVE_CALLS = {1: 32, 4: 48}
"""Calls to llama.cpp in a run, by the slots of the server."""
LIVE_ROUNDS, LIVE_S = 12, 200.0
"""Rounds of four runs for each server; no new one begins after so many seconds."""
LIVE_TURNS = ("before", "cold", "warm", "after")
LIVE_BODY: dict[str, Any] = {"max_tokens": 8, "temperature": 0}
CONTENDERS: dict[str, Callable[[float], Limit]] = {
    OURS: lambda latency_s: AutoLimit(),
    "fixed 60": Fixed,
    "AIMD": Aimd,
    "Gradient2": Gradient2,
    "Vegas": Vegas,
    "inspect_ai": Inspect,
}
KNEES: tuple[tuple[int, ...], ...] = ((8,), (60,), (200,), (60, 20, 120))
JUDGED = [
    (latency, sigma, seed) for latency, sigma in ((0.7, 0.55), (3.0, 0.4)) for seed in range(81, 93)
]
TUNING_KNEES: tuple[tuple[int, ...], ...] = (
    *((12,), (40,), (90,), (150,), (240,)),
    *((40, 15, 90), (75, 25, 150), (90, 25, 60), (20, 50, 20)),
)
TUNING = [(1.0, sigma, seed) for sigma in (0.4, 0.55, 0.7) for seed in (1, 2, 11, 12)]


@dataclass(frozen=True, slots=True)
class Score:
    """Of one contender in one case."""

    cold: float
    warm: float
    rejects: float
    crowd: float
    """Calls in flight over the oracle's, warm: how much longer a call takes."""
    worst_cold: float
    worst_warm: float
    cold_error: float
    """Standard error of the mean over the worlds."""
    warm_error: float


def worlds(kind: Any, knees: tuple[int, ...], draws: Sequence[Any], **more: Any) -> list[World]:
    return [
        World(kind, knees, latency_s=latency, sigma=sigma, seed=seed, **more)
        for latency, sigma, seed in draws
    ]


def score(
    make: Callable[[float], Limit], given: Sequence[World], best: dict[World, float]
) -> Score:
    """Run each world cold, and another one like it with the memory of the first."""
    cold, warm, rejects, crowd = [], [], [], []
    for world in given:
        limit = make(world.latency_s)
        first = run(world, limit)
        again = replace(world, seed=world.seed + 1000)
        # Ours goes through its JSON; the peers have no memory but the object itself.
        if isinstance(limit, AutoLimit):
            state = json.loads(json.dumps(limit.state_dict()))
            limit = make(world.latency_s)
            limit.load_state_dict(state)
            limit.pause_until = 0.0
        second = run(again, _Continued(limit))
        cold.append(100 * oracle(world, best) / first.seconds)
        warm.append(100 * oracle(again, best) / second.seconds)
        rejects += [first.rejects / world.calls, second.rejects / world.calls]
        crowd.append(_crowd(second) / statistics.harmonic_mean(world.knees))
    return Score(
        statistics.mean(cold),
        statistics.mean(warm),
        max(rejects),
        statistics.mean(crowd),
        min(cold),
        min(warm),
        _error(cold),
        _error(warm),
    )


def _error(shares: list[float]) -> float:
    return statistics.stdev(shares) / math.sqrt(len(shares)) if len(shares) > 1 else math.nan


def _crowd(done: Run) -> float:
    return done.seconds_in_flight / done.seconds


class _Continued:
    """A limit whose clock starts again: cool-downs of the first run are over."""

    def __init__(self, limit: Any) -> None:
        self._limit = limit
        for name in ("_until", "_cool_until"):
            if hasattr(limit, name):
                setattr(limit, name, -1.0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._limit, name)


def oracle(world: World, known: dict[World, float]) -> float:
    if world not in known:
        known[world] = oracle_seconds(world)
    return known[world]


def _named(kind: str, knees: tuple[int, ...]) -> str:
    return f"{kind} {' -> '.join(map(str, knees))}"


def compare(report: Report, cases: list[list[World]]) -> list[tuple[str, Score]]:
    best: dict[World, float] = {}
    names = [_named(case[0].kind, case[0].knees) for case in cases]
    found = {
        contender: [score(make, case, best) for case in cases]
        for contender, make in CONTENDERS.items()
    }
    late = {
        what: [
            statistics.mean(late_share(world, best, what == "cold") for world in case)
            for case in cases
        ]
        for what in ("cold", "warm")
    }
    for title, pick in (
        ("cold: percent of the oracle's throughput", lambda s: round(s.cold, 1)),
        ("warm: percent of the oracle's throughput", lambda s: round(s.warm, 1)),
        ("rejects a call, the most of all runs", lambda s: f"{s.rejects:.3f}"),
        (
            "calls in flight over the knee, warm (harmonic mean of a moving one)",
            lambda s: f"{s.crowd:.2f}",
        ),
    ):
        rows = [
            [name, *(pick(found[contender][i]) for contender in CONTENDERS)]
            for i, name in enumerate(names)
        ]
        columns = ["", *CONTENDERS]
        if "percent" in title:
            columns += ["late oracle", "error"]
            for i, row in enumerate(rows):
                ours = found[OURS][i]
                error = ours.cold_error if title.startswith("cold") else ours.warm_error
                row += [round(late[title[:4]][i], 1), round(error, 1)]
            shares = range(1, len(columns) - 1)
            rows.append(["least", *(min(row[i] for row in rows) for i in shares), None])
        report.table(title, columns, rows)
    return list(zip(names, found[OURS], strict=True))


def other_worlds(report: Report, knees: Sequence[tuple[int, ...]], draws: Sequence[Any]) -> None:
    """Ours alone: other numbers of calls, and worlds the constants were not made for."""
    best: dict[World, float] = {}
    rows = []
    variants: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [
        *((f"{calls:,} calls", KINDS, {"calls": calls}) for calls in (2000, 6000, 20_000)),
        ("calls come in waves of 256", KINDS, {"wave": 256}),
        ("refused calls give their place away", ("reject",), {"holds_slot": False}),
        ("no Retry-After", ("reject",), {"retry_after_s": None}),
        ("Retry-After of 5 s, place kept", ("reject",), {"retry_after_s": 5.0}),
        (
            "Retry-After of 5 s, place given away",
            ("reject",),
            {"retry_after_s": 5.0, "holds_slot": False},
        ),
        ("a call keeps the pace of its start", ("thrash", "batch"), {"paced_at_start": True}),
    ]
    for what, kinds, more in variants:
        scores = {
            (kind, each): score(
                CONTENDERS[OURS], worlds(kind, each, draws, **{"holds_slot": True, **more}), best
            )
            for kind in kinds
            for each in knees
        }
        cold, cold_case = min((s.cold, _named(*case)) for case, s in scores.items())
        warm, warm_case = min((s.warm, _named(*case)) for case, s in scores.items())
        rows.append(
            [
                what,
                round(statistics.mean(s.cold for s in scores.values()), 1),
                f"{cold:.1f} {cold_case}",
                round(statistics.mean(s.warm for s in scores.values()), 1),
                f"{warm:.1f} {warm_case}",
                round(max(s.rejects for s in scores.values()), 3),
            ]
        )
    columns = ["batchwright", "cold %", "least", "warm %", "least", "rejects a call"]
    report.table("the same in other worlds", columns, rows)


def families(report: Report, seeds: Sequence[int]) -> list[tuple[str, Score]]:
    """Ours alone, on servers and loads of which everything is drawn at random."""
    found, rows = [], []
    for family in FAMILIES:
        given, best = [draw(family, seed) for seed in seeds], dict[World, float]()
        got = score(CONTENDERS[OURS], given, best)
        found.append((family, got))
        figures = []
        for cold, mean, least in (
            (True, got.cold, got.worst_cold),
            (False, got.warm, got.worst_warm),
        ):
            late, detecting = bounds(given, best, cold)
            figures += [mean, least, late, "" if detecting is None else detecting]
        rows.append([family, *figures, got.rejects])
    columns = [""]
    for what in ("cold", "warm"):
        columns += [f"{what} %", "least", "late oracle", "detecting oracle"]
    columns += ["rejects a call, most"]
    report.table(f"{len(seeds)} drawn worlds of each family, from {seeds[0]}", columns, rows)
    return found


def late_share(world: World, best: dict[World, float], cold: bool) -> float:
    """What a limit reaches that knows the knee and acts as late as anyone can, in percent of the
    oracle; cold from where ours starts, warm from the knee."""
    start = AutoLimit().limit if cold else world.knees[-1]
    if not cold:
        world = replace(world, seed=world.seed + 1000)
    return 100 * oracle(world, best) / run(world, LateOracle(world, start)).seconds


def bounds(
    given: Sequence[World], best: dict[World, float], cold: bool
) -> tuple[float, float | None]:
    """What limits reach that know the knee, percent of the oracle: one that acts as late as anyone
    can, and one that has to find out when the knee of a thrashing server moves."""
    late = [late_share(world, best, cold) for world in given]
    detecting = []
    for world in given:
        if world.kind == "thrash" and len(world.knees) > 1:
            start = AutoLimit().limit if cold else world.knees[-1]
            if not cold:
                world = replace(world, seed=world.seed + 1000)
            detecting.append(100 * oracle(world, best) / detecting_seconds(world, start))
    return statistics.mean(late), statistics.mean(detecting) if detecting else None


def cpu(report: Report) -> None:
    """What the limit itself costs, by the difference to a limit that does nothing."""
    rows = []
    for knee in (8, 60, 200):
        world = World("thrash", (knee,), calls=20_000)
        spent = []
        for make in (AutoLimit, Fixed):
            times = []
            for _ in range(3):
                begun = time.process_time()
                run(world, make())
                times.append(time.process_time() - begun)
            spent.append(min(times))
        rows.append([f"thrash {knee}", 1e6 * (spent[0] - spent[1]) / world.calls])
    report.table("CPU of the automatic limit", ["", "us a call"], rows)


def measured(
    url: str, name: str, limit: int | str, requests: Sequence[Request]
) -> tuple[float, int, float]:
    """Seconds, calls lost and rejects a call, over HTTP."""
    endpoint = Endpoint(url, name=name)
    with Pool(endpoint, limit=limit, deadline_s=300, hedge=False) as pool:
        begun = time.perf_counter()
        lost = sum(not answer for answer in pool.map(requests))
        seconds = time.perf_counter() - begun
        return seconds, lost, pool.stats()["rejects"] / len(requests)


@contextmanager
def memory() -> Iterator[None]:
    """What is learned is kept apart meanwhile, and forgotten afterwards."""
    home = os.environ.get("BATCHWRIGHT_HOME")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["BATCHWRIGHT_HOME"] = folder
        try:
            yield
        finally:
            del os.environ["BATCHWRIGHT_HOME"]
            if home is not None:
                os.environ["BATCHWRIGHT_HOME"] = home


def live(report: Report, quick: bool) -> None:
    """Against llama.cpp: the limit that knows the slots, and ours cold and with its memory.

    A round is a run with the limit at the slots, a cold one, a warm one, and one with the limit at
    the slots again. Ours are compared with the mean of the two beside them, because the machine
    changes from round to round; the median of the rounds counts.
    """
    rows, least = [], dict[str, float]()
    for slots in (4,) if quick else (1, 4):
        lost, rounds = live_rounds(slots, 2 if quick else LIVE_ROUNDS)
        row: list[Any] = [f"{slots} slots", LIVE_CALLS[slots], len(rounds), lost]
        fixed = [one[name][0] for one in rounds for name in ("before", "after")]
        row += [statistics.median(fixed), max(fixed) / min(fixed)]
        for name in ("cold", "warm"):
            shares = [share(one, name, 0) for one in rounds]
            middle, low, high = median(shares)
            row += [middle, f"{low:.0f} to {high:.0f}"]
            row.append(statistics.median(share(one, name, 1) for one in rounds))
            least[name] = min(least.get(name, middle), middle)
        rows.append(row)
    columns = ["", "calls a run", "rounds", "lost", "limit=slots s", "slowest over fastest"]
    for name in ("cold", "warm"):
        columns += [f"{name} %", f"{name}, 90 % sure", f"{name} % by the server's processor"]
    report.table("live: pool and llama.cpp over HTTP, percent of limit=slots", columns, rows)
    report.target("calls lost to llama.cpp", sum(row[3] for row in rows), most=0)
    for name, goal in (("cold", 90.0), ("warm", 95.0)):
        report.target(f"llama.cpp, {name}, percent of limit=slots", least[name], least=goal)


def live_rounds(slots: int, most: int) -> tuple[int, list[dict[str, tuple[float, float]]]]:
    """Calls lost, and of each run of each round its seconds and the server's processor time."""
    lost, rounds = 0, list[dict[str, tuple[float, float]]]()
    begun = time.monotonic()
    with served(slots) as server:
        # The first round loads the model and is not measured.
        while len(rounds) <= most and (len(rounds) < 3 or time.monotonic() - begun < LIVE_S):
            took = {}
            with memory():
                for name in LIVE_TURNS:
                    given = [
                        chat("smollm2", f"{len(rounds)} {name} {n} rivers and stones.", **LIVE_BODY)
                        for n in range(LIVE_CALLS[slots])
                    ]
                    limit = "auto" if name in ("cold", "warm") else slots
                    before = server.processor_s()
                    seconds, gone, _ = measured(server.url, f"llama.cpp {slots}", limit, given)
                    lost += gone
                    took[name] = (seconds, server.processor_s() - before)
            rounds.append(took)
            print(f"{slots} slots:", *(f"{name} {s:.1f} s" for name, (s, _) in took.items()))
    return lost, rounds[1:]


def share(took: dict[str, tuple[float, float]], name: str, which: int) -> float:
    """Percent of the throughput of the runs with the limit at the slots, in one round."""
    return 50 * (took["before"][which] + took["after"][which]) / took[name][which]


def median(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and between which it lies with a probability of 0.9, by resampling."""
    draws = stream(0, "median").choice(np.array(values), (2000, len(values)))
    low, high = np.quantile(np.median(draws, axis=1), (0.05, 0.95))
    return statistics.median(values), float(low), float(high)


def over_http(report: Report, quick: bool) -> None:
    """Against the simulator: the limit that knows the knee, ours, and a fixed one of 60."""
    rows = []
    for kind in KINDS:
        for knee in (8,) if quick else (8, 60):
            given = [chat("sim", f"What is {i}?", draw=0) for i in range(45 * knee)]
            server = Simulator(kind=kind, knee=knee, latency_s=0.1, retry_after_s=0.05)
            with memory(), server.running() as url:
                runs = [
                    measured(f"{url}/v1", f"{kind} {knee}", limit, given)
                    for limit in (knee, "auto", "auto", 60)
                ]
            best, lost = runs[0][0], sum(lost for _, lost, _ in runs)
            percent = [100 * best / seconds for seconds, _, _ in runs[1:]]
            rejects = [rejects for _, _, rejects in runs[1:]]
            rows.append([f"{kind} {knee}", len(given), lost, best, *percent, *rejects])
    columns = ["", "calls", "lost", "limit=K s", "cold %", "warm %"]
    columns += ["fixed 60 %", "rejects cold", "warm", "fixed 60"]
    report.table("live: pool and simulator over HTTP, percent of Pool(limit=K)", columns, rows)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--tuning", action="store_true", help="the worlds used for tuning")
    parser.add_argument("--live", action="store_true", help="llama.cpp over HTTP")
    parser.add_argument("--http", action="store_true", help="the simulator over HTTP")
    parser.add_argument("--families", action="store_true", help="worlds drawn at random, ours only")
    parser.add_argument("--others", action="store_true", help="other loads and servers, ours only")
    args = parser.parse_args()
    if args.tuning:
        args.no_save = True
    which = [name for name in ("families", "live", "http", "others") if getattr(args, name)]
    report = Report("_".join(["limit", *which]), args)
    if args.families:
        first = 0 if args.tuning else JUDGING
        drawn = families(report, range(first, first + (2 if args.quick else 12)))
        for what, value, goal in (
            ("cold, percent of the oracle, least family", min(s.cold for _, s in drawn), 90.0),
            ("warm, percent of the oracle, least family", min(s.warm for _, s in drawn), 95.0),
        ):
            report.target(what, value, least=goal)
        report.close()
        return
    if args.live or args.http:
        (live if args.live else over_http)(report, args.quick)
        report.close()
        return
    draws, knees = (TUNING, TUNING_KNEES) if args.tuning else (JUDGED, KNEES)
    if args.quick:
        draws = draws[:1] if args.smoke else draws[::3]
    if args.others:
        other_worlds(report, knees, draws[::3])
        report.close()
        return
    knees = knees[:1] if args.smoke else knees
    cases = [worlds(kind, each, draws, holds_slot=True) for kind in KINDS for each in knees]
    ours = compare(report, cases)
    if not args.quick:
        cpu(report)
    n = len(ours)
    print()
    for name, got in ours:
        short = [
            f"{what} {value:.1f} % of {goal} %"
            for what, value, goal in (("cold", got.cold, 90), ("warm", got.warm, 95))
            if value < goal
        ]
        if short:
            print(f"falls short: {name}: {', '.join(short)}")
    for what, pick, goal in (
        (f"cold, percent of the oracle, least of {n} cases", lambda s: s.cold, 90.0),
        (f"warm, percent of the oracle, least of {n} cases", lambda s: s.warm, 95.0),
    ):
        report.target(what, min(pick(got) for _, got in ours), least=goal)
    report.target(f"cases of {n} with 90 % cold", sum(got.cold >= 90 for _, got in ours), least=n)
    report.target(f"cases of {n} with 95 % warm", sum(got.warm >= 95 for _, got in ours), least=n)
    report.target("rejects a call", max(got.rejects for _, got in ours), most=0.2)
    report.close()


if __name__ == "__main__":
    main()
