"""Measures the concurrency a server sustains, level by level."""

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from time import monotonic
from typing import Any

from batchwright.calls.endpoints import Endpoint
from batchwright.calls.limit.knee import Answer, KneeSearch, Visit
from batchwright.calls.outcome import Done, Kind
from batchwright.calls.pool import Pool
from batchwright.calls.request import chat
from batchwright.errors import ConfigError, NoServer

__all__ = ["Level", "Probe", "levels", "probe"]


@dataclass(frozen=True, slots=True)
class Level:
    """Throughput and latency of a server at one concurrency, all visits together."""

    concurrency: int
    calls: int
    """Responses and failures that were measured; calls of the warm-up are not among them."""
    per_second: float
    """Responses per second, failures excluded."""
    p50_s: float | None
    p95_s: float | None
    failed: int
    rejected: int
    sustained: bool
    """False if the server rejected calls or many failed: there are too many of them."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Probe:
    """What a server sustains, and how sure that is."""

    levels: list[Level]
    answer: Answer
    calls: int
    """Of all levels, with those of the warm-ups."""
    seconds: float
    failed: dict[str, int]
    """How many calls failed, by kind."""


def levels(visits: Iterable[Visit]) -> list[Level]:
    """The visits of a search put together by level, in ascending order."""
    by_level: dict[int, list[Visit]] = {}
    for visit in visits:
        by_level.setdefault(visit.level, []).append(visit)
    return [_level(level, by_level[level]) for level in sorted(by_level)]


def _level(level: int, visits: list[Visit]) -> Level:
    took = sorted(seconds for visit in visits for seconds in visit.took)
    ended = sum(visit.ended for visit in visits)
    busy_s = sum(took) + sum(visit.lost_s for visit in visits)
    in_flight = sum(visit.in_flight for visit in visits) / max(1, ended)
    p50, p95 = (took[round(q * (len(took) - 1))] if took else None for q in (0.5, 0.95))
    return Level(
        level,
        ended,
        in_flight * len(took) / max(1e-9, busy_s),
        p50,
        p95,
        sum(visit.failed for visit in visits),
        sum(visit.rejected for visit in visits),
        not any(visit.too_many for visit in visits),
    )


def probe(
    endpoint: Endpoint,
    model: str,
    *,
    most: int = 128,
    max_calls: int = 8000,
    max_seconds: float = 600.0,
    max_tokens: int = 32,
    prompt: str = "Name three animals that live near water. List",
    progress: Callable[[int], None] | None = None,
) -> Probe:
    """Measure levels of 1 to `most` calls in flight until the knee is known or the budget is used.

    Every prompt is slightly different, so that the server cannot respond from a cache. Calls that
    are in flight when the search is over are cancelled.
    """
    search = KneeSearch(most, max_calls, max_seconds)
    begun = monotonic()
    failed: Counter[str] = Counter()
    error = ""
    given: dict[str, Any] = {"max_tokens": max_tokens}
    requests = (chat(model, f"{prompt} {n}.", **given) for n in range(max_calls))
    with Pool(
        endpoint, limit=search, deadline_s=max_seconds, tries=1, hedge=False, remember=False
    ) as pool:

        def stop() -> None:
            search.stop()
            pool.cancel()

        timer = threading.Timer(max_seconds, stop)
        timer.daemon = True
        timer.start()
        try:
            with pool.stream(requests) as outcomes:
                for number, (_, outcome) in enumerate(outcomes):
                    if not isinstance(outcome, Done) and outcome.kind is not Kind.CANCELLED:
                        failed[str(outcome.kind)] += 1
                        error = f"({outcome.kind}): {outcome.error}"
                    if search.over or (failed and number == 0):
                        break
                    if progress is not None:
                        progress(search.calls)
        finally:
            timer.cancel()
    answer = search.answer
    if answer is not None:
        seconds = monotonic() - begun
        return Probe(levels(search.visits), answer, search.calls, seconds, dict(failed))
    if error:
        raise NoServer(f"{endpoint.name} does not respond for the model {model!r} {error}")
    raise ConfigError(
        f"{search.calls} calls in {monotonic() - begun:.0f} s are too few to measure a level; "
        f"max_calls is {max_calls} and max_seconds is {max_seconds:g}, give more"
    )
