"""Measures the concurrency a server sustains, level by level."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from time import monotonic
from typing import Any

from batchwright.calls.endpoints import Endpoint
from batchwright.calls.outcome import Done, Failed
from batchwright.calls.pool import Pool
from batchwright.calls.request import chat
from batchwright.errors import ConfigError, NoServer

__all__ = ["Level", "knee", "levels", "ramp"]

NEAR = 0.9
"""A level is good enough at this share of the best throughput."""
PAYS = 1.05
"""Twice the concurrency must give this many times the throughput, or the server is full."""


@dataclass(frozen=True, slots=True)
class Level:
    """Throughput and latency of a server at one concurrency."""

    concurrency: int
    calls: int
    per_second: float
    """Responses per second, failures excluded."""
    p50_s: float | None
    p95_s: float | None
    failed: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def levels(most: int) -> Iterator[int]:
    """1, 2, 4, ... up to `most`, which is the last.

    >>> list(levels(12))
    [1, 2, 4, 8, 12]
    """
    level = 1
    while level < most:
        yield level
        level *= 2
    yield most


def knee(measured: Sequence[Level]) -> Level:
    """The least concurrency with nearly the best throughput: more only adds latency.

    >>> rates = {1: 10.0, 2: 20.0, 4: 38.0, 8: 40.0, 16: 41.0}
    >>> knee([Level(n, 9, rate, 0.1, 0.1, {}) for n, rate in rates.items()]).concurrency
    4
    """
    best = max(level.per_second for level in measured)
    return next(level for level in measured if level.per_second >= NEAR * best)


def ramp(
    endpoint: Endpoint,
    model: str,
    *,
    most: int = 128,
    calls_a_slot: int = 6,
    max_tokens: int = 32,
    prompt: str = "Name three animals that live near water. List",
    deadline_s: float = 600.0,
    progress: Callable[[Level], None] | None = None,
) -> list[Level]:
    """Measure each level in turn; stops after two without a gain, or when calls fail.

    Every prompt is slightly different, so that the server cannot respond from a cache.
    """
    if most < 1:
        raise ConfigError(f"most must be at least 1, got {most}")
    measured: list[Level] = []
    number = without_gain = 0
    given: dict[str, Any] = {"max_tokens": max_tokens}
    for concurrency in levels(most):
        with Pool(
            endpoint,
            limit=concurrency,
            deadline_s=deadline_s,
            tries=1,
            hedge=False,
            remember=False,
        ) as pool:
            if not measured:
                # The first call may load the model.
                first = pool.map([chat(model, f"{prompt} 0.", **given)])[0]
                if isinstance(first, Failed):
                    raise NoServer(
                        f"{endpoint.name} does not respond for the model {model!r} "
                        f"({first.kind}): {first.error}"
                    )
            calls = max(8, calls_a_slot * concurrency)
            numbers = range(number + 1, number + calls + 1)
            number += calls
            start = monotonic()
            outcomes = pool.map([chat(model, f"{prompt} {n}.", **given) for n in numbers])
            seconds = monotonic() - start
            rejects = pool.stats()["rejects"]
        level = _level(concurrency, outcomes, seconds, rejects)
        measured.append(level)
        if progress is not None:
            progress(level)
        before = max((one.per_second for one in measured[:-1]), default=0.0)
        without_gain = without_gain + 1 if level.per_second < PAYS * before else 0
        if without_gain == 2 or sum(level.failed.values()) > 0.2 * calls:
            break
    return measured


def _level(
    concurrency: int, outcomes: Sequence[Done | Failed], seconds: float, rejects: int
) -> Level:
    took = sorted(outcome.seconds for outcome in outcomes if isinstance(outcome, Done))
    failed = Counter(str(outcome.kind) for outcome in outcomes if isinstance(outcome, Failed))
    if rejects:
        failed["rejected"] += rejects
    p50, p95 = (took[round(q * (len(took) - 1))] if took else None for q in (0.5, 0.95))
    return Level(concurrency, len(outcomes), len(took) / seconds, p50, p95, dict(failed))
