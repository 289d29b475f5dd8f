"""Score 1024 samples with a monitor behind a server: how long, and what an outage teaches.

The server is the simulator: a queue that serves 60 calls at once, as the document's optimum is
called, each call 0.1 s on average (its 2 s, so a scale of 1 to 20), lognormal. Ideal is a client
that costs nothing and sends the next call the moment one of 60 is answered; it, too, waits for the
last.

    one by one          the document's naive manager: a call, then the next; extrapolated
    batch of clients    the document's and verl's legacy pattern: a new AsyncOpenAI for each batch,
                        gather behind a semaphore of 60; a failed call counts 0.0
    rate_limited        verl's manager of that name, its run_single written anew: semaphore,
                        wait_for, 0.0 for a timeout or an error; by default one call at a time
    batchwright         one pool, 60 in flight, or as many as it finds good (auto)

With the cache there are 482 different texts among the 1024, as in the document's test. Without it
all 1024 differ, so that equal calls in flight cannot be shared.

The second part asks what failures do to learning: groups of 8, and 5 % of the calls spoilt, either
in passing (a second try may do) or for good. A sample learns in the wrong direction if its
advantage has another sign than it would have had.
"""

import asyncio
import heapq
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.calls import Done
from batchwright.calls.simulator import Simulator
from batchwright.rewards import (
    Correctness,
    Format,
    Monitor,
    Response,
    RewardsConfig,
    Scorer,
    group_advantages,
)
from batchwright.rng import stream
from common import Contender, Report, arguments, measure

AT_ONCE = 60
LATENCY_S = 0.1
SIGMA = 0.5
DISTINCT = 482
GROUP = 8
MONITOR = Monitor(model="sim-judge")
RULES = (Format(), Correctness())
PASSING = {"500": 0.02, "empty": 0.01, "bad_json": 0.01, "cut": 0.01}
"""Faults of 5 % of the calls; drawn anew for each try."""
UNLUCKY = {"fate-a": "500", "fate-b": "empty", "fate-c": "bad_json"}
"""Texts that carry these words fail at every try."""


@dataclass(frozen=True)
class Job:
    """Samples and the server that is asked about them."""

    url: str
    responses: Sequence[Response]
    counted: int
    """How many of them the slow contenders score; the rest is extrapolated."""


def samples(n: int, distinct: int, unlucky: float = 0.0) -> list[Response]:
    """Answers of three values, a quarter of them wrong in one, with about 40 words before them."""
    random = stream(7, "benchmark/rewards", n, distinct)
    words = np.array("so then because it follows that we see count add check again".split())  # noqa: SIM905
    made = []
    for number in range(distinct):
        reasoning = " ".join(random.choice(words, 40))
        verdict = "correct" if random.random() < 0.5 else "incorrect"
        fate = f"fate-{'abc'[number % 3]}" if random.random() < unlucky else "fate"
        values = "[true, false, true]" if random.random() < 0.75 else "[true, true, true]"
        text = f"{number} {reasoning}, {verdict} {fate} <measurements>{values}</measurements>"
        label = bool(random.random() < 0.7) == (verdict == "correct")
        made.append(Response(text, "[true, false, true]", "diamonds", extra={"is_correct": label}))
    return [made[number % distinct] for number in range(n)]


def rules_of(response: Response) -> float:
    return sum(rule.weight * rule.part_of(response, ()).value for rule in RULES)


def ours(limit: int | str, cached: bool = False, **more: Any) -> Callable[[Job], Callable[[], Any]]:
    def prepare(job: Job) -> Callable[[], Any]:
        def call() -> list[Any]:
            with tempfile.TemporaryDirectory() as folder:
                settings = {
                    "part": (*RULES, MONITOR),
                    "endpoints": (f"{job.url}/v1",),
                    "key_env": "",
                    "batch_size": limit,
                    "cache": Path(folder) / "calls.db" if cached else None,
                    **more,
                }
                scorer = Scorer(RewardsConfig(**settings))
                rewards = scorer.score(job.responses)
                scorer.close()
            return [(reward.value, reward.valid) for reward in rewards]

        return call

    return prepare


def ideal(calls: int) -> float:
    """Seconds for so many calls, 60 at a time in the order given: the mean of 50 draws."""
    random = stream(11, "benchmark/rewards/ideal", calls)
    found = []
    for _ in range(50):
        free = [0.0] * AT_ONCE
        for seconds in LATENCY_S * random.lognormal(-(SIGMA**2) / 2, SIGMA, calls):
            heapq.heapreplace(free, free[0] + float(seconds))
        found.append(max(free))
    return float(np.mean(found))


async def ask(client: Any, response: Response) -> float:
    """The sample's whole reward, with one call to the monitor; raises what the client raises."""
    (request,) = MONITOR.requests_of(response)
    answer = await client.chat.completions.create(**request.body, timeout=10.0)
    part = MONITOR.part_of(response, [Done(answer.choices[0].message.content or "", {})])
    if not part.valid:
        raise ValueError(part.error)
    return rules_of(response) + part.value


def clients(at_once: int, few: bool = False) -> Callable[[Job], Callable[[], Any]]:
    """A new client for each batch, everything gathered behind a semaphore."""

    def prepare(job: Job) -> Callable[[], Any]:
        from openai import AsyncOpenAI, OpenAIError

        async def batch() -> list[Any]:
            slots = asyncio.Semaphore(at_once)

            async def one(client: Any, response: Response) -> tuple[float, bool]:
                async with slots:
                    try:
                        return await ask(client, response), True
                    except (OpenAIError, ValueError, AttributeError, TypeError):
                        # The failed monitor is worth 0.0, the rest of the reward stays.
                        return rules_of(response), True

            chosen = job.responses[: job.counted] if few else job.responses
            async with AsyncOpenAI(base_url=f"{job.url}/v1", api_key="none") as client:
                return await asyncio.gather(*(one(client, response) for response in chosen))

        return lambda: asyncio.run(batch())

    return prepare


def rate_limited(at_once: int = 1, few: bool = False) -> Callable[[Job], Callable[[], Any]]:
    """verl 0.9.1's RateLimitedRewardManager without rpm and tpm: its run_single, step by step."""

    def prepare(job: Job) -> Callable[[], Any]:
        from openai import AsyncOpenAI

        async def batch() -> list[Any]:
            semaphore = asyncio.Semaphore(at_once)
            client = AsyncOpenAI(base_url=f"{job.url}/v1", api_key="none")

            async def run_single(response: Response) -> tuple[float, bool]:
                async with semaphore:
                    try:
                        return await asyncio.wait_for(ask(client, response), timeout=300.0), True
                    except TimeoutError:
                        return 0.0, True
                    except Exception:  # as it does
                        return 0.0, True

            chosen = job.responses[: job.counted] if few else job.responses
            try:
                return await asyncio.gather(*(run_single(response) for response in chosen))
            finally:
                await client.close()

        return lambda: asyncio.run(batch())

    return prepare


def kept(job: Job, result: list[Any]) -> dict[str, Any]:
    return {
        "n": len(result),
        "scores": [score for score, _ in result],
        "valid": [ok for _, ok in result],
    }


def advantages(found: dict[str, Any]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    n = len(found["scores"])
    return group_advantages(found["scores"], np.arange(n) // GROUP, found["valid"])


def main() -> None:
    parser = arguments("Rewards with a monitor: time, and signs of advantages under failures.")
    args = parser.parse_args()
    report = Report("rewards", args)
    n, few = (256, 16) if args.quick else (1024, 64)
    distinct = n * DISTINCT // 1024
    times(report, n, distinct, few, 1 if args.quick else 3)
    signs(report, n if args.quick else 4096)
    report.close()


def times(report: Report, n: int, distinct: int, few: int, runs: int) -> None:
    simulator = Simulator(kind="queue", knee=AT_ONCE, latency_s=LATENCY_S, sigma=SIGMA)
    slow, all_, cached = "one by one", "all differ", f"{distinct} differ"
    ways = [
        (slow, all_, clients(1, few=True)),
        ("rate_limited (verl's default: 1)", all_, rate_limited(1, few=True)),
        (f"batch of clients, {AT_ONCE}", all_, clients(AT_ONCE)),
        (f"rate_limited, {AT_ONCE}", all_, rate_limited(AT_ONCE)),
        (f"batchwright, {AT_ONCE}", all_, ours(AT_ONCE)),
        ("batchwright, auto", all_, ours("auto")),
        (f"batch of clients, {AT_ONCE}", cached, clients(AT_ONCE)),
        (f"batchwright, {AT_ONCE}, cache", cached, ours(AT_ONCE, cached=True)),
    ]
    rows, ratios = [], {}
    base = None
    with simulator.running() as url:
        for name, which, prepare in ways:
            url.reset()
            given = Job(url, samples(n, n if which == all_ else distinct), few)
            small = Job(url, samples(4, 4), 4)
            contender = Contender(name, prepare, lambda job, result: {"n": len(result)})
            got = measure(contender, given, small, runs=runs, patience_s=20.0)
            if got.seconds is None:
                report.not_measured(name, got.reason)
                continue
            seconds = got.seconds * n / got.summary["n"]
            base = base or seconds
            asked = distinct if "cache" in name else n
            best = ideal(asked)
            ratios[name, which] = (base / seconds, seconds / best)
            rows.append(
                [
                    name,
                    which,
                    seconds,
                    n / seconds,
                    base / seconds,
                    seconds / best,
                    "extrapolated" if got.summary["n"] < n else "",
                ]
            )
    report.table(
        f"{n:,} samples, {LATENCY_S} s a call, {AT_ONCE} served at once",
        ("", "texts", "seconds", "samples/s", "times one by one", "of ideal", ""),
        rows,
    )
    plain, kept_ = (f"batchwright, {AT_ONCE}", all_), (f"batchwright, {AT_ONCE}, cache", cached)
    none = (None, None)
    report.target("batch without cache, times one by one", ratios.get(plain, none)[0], least=16.0)
    report.target("batch with cache, times one by one", ratios.get(kept_, none)[0], least=27.0)
    report.target("batch without cache, of ideal", ratios.get(plain, none)[1], most=1.25)
    report.target("batch with cache, of ideal", ratios.get(kept_, none)[1], most=1.25)


def signs(report: Report, n: int) -> None:
    quick = {"kind": "queue", "knee": AT_ONCE, "latency_s": 0.01, "sigma": SIGMA}
    rows = []
    for title, unlucky, faults in (
        ("5 % in passing", 0.0, {"faults": PASSING}),
        ("5 % for good", 0.05, {"script": UNLUCKY}),
    ):
        responses = samples(n, n, unlucky)
        with Simulator(**quick).running() as url:
            truth = measured(report, ours(AT_ONCE), Job(url, responses, n), "without faults")
        if truth is None:
            continue
        right, _ = advantages(truth)
        for name, prepare in (
            (f"batch of clients, {AT_ONCE}", clients(AT_ONCE)),
            (f"rate_limited, {AT_ONCE}", rate_limited(AT_ONCE)),
            (f"batchwright, {AT_ONCE}", ours(AT_ONCE, deadline_s=5.0)),
        ):
            # A server of its own for each: faults by chance depend on what was asked before.
            with Simulator(**quick, **faults).running() as url:
                found = measured(report, prepare, Job(url, responses, n), name)
            if found is None:
                continue
            values, usable = advantages(found)
            wrong = (np.sign(values) * np.sign(right) < 0) & usable
            left_out = float(np.mean(~np.array(found["valid"])))
            rows.append([name, title, 100 * left_out, 100 * float(wrong.mean())])
            if name.startswith("batchwright"):
                report.target(f"wrong signs, {title}", float(wrong.mean()), most=0.002)
    report.table(
        f"{n:,} samples in groups of {GROUP}, failures",
        ("", "failures", "% left out", "% with a wrong sign"),
        rows,
    )


def measured(
    report: Report, prepare: Callable[[Job], Callable[[], Any]], job: Job, name: str
) -> dict[str, Any] | None:
    small = Job(job.url, samples(2, 2), 2)
    got = measure(Contender(name, prepare, kept), job, small, runs=1, limit_s=300.0)
    if got.seconds is None:
        report.not_measured(name, got.reason)
        return None
    return dict(got.summary)


if __name__ == "__main__":
    main()
