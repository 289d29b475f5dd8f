"""Bucket edges: how many of the padded tokens are useful, and how long the edges take to find.

Every way gets the same histogram and the same number of buckets; the last edge is always the
longest sample. Timed is the choice of edges from the histogram alone. `every pair of edges` is
the same dynamic programme without the shortcut, in numpy: it must find the same cost.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.batching.analyze.edges import edges_cost, optimal_edges
from common import Contender, Report, arguments, lengths_of, measure

Hist = NDArray[np.int64]
Given = tuple[Hist, int]
FIXED = (128, 256, 512, 1024)
EVERY_PAIR_MOST = 8192
SAMPLES = 1_000_000


def quantile(hist: Hist, k: int) -> NDArray[np.int64]:
    """As many samples in each bucket."""
    upto = np.cumsum(hist)
    return np.searchsorted(upto, upto[-1] * np.arange(1, k) / k)


def equal_mass(hist: Hist, k: int) -> NDArray[np.int64]:
    """As many tokens in each bucket, as lhotse's estimate_duration_buckets does."""
    upto = np.cumsum(hist * np.arange(len(hist)))
    return np.searchsorted(upto, upto[-1] * np.arange(1, k) / k)


def geometric(hist: Hist, k: int) -> NDArray[np.int64]:
    """Edges grow by a constant factor; one sample in a hundred lies below where they start."""
    upto = np.cumsum(hist)
    start = int(np.searchsorted(upto, upto[-1] / 100))
    return np.geomspace(start, len(hist) - 1, k + 1)[1:-1].round().astype(np.int64)


def uniform(hist: Hist, k: int) -> NDArray[np.int64]:
    """Edges at equal distances."""
    return np.linspace(0, len(hist) - 1, k + 1)[1:-1].round().astype(np.int64)


def every_pair(hist: Hist, k: int) -> list[int]:
    """The dynamic programme with all L * L pairs of edges in each round."""
    widths = np.flatnonzero(hist)
    below = np.concatenate(([0], np.cumsum(hist[widths])))
    best = widths * below[1:]
    choices = []
    for _ in range(k - 1):
        after, choice = np.empty_like(best), np.zeros(len(widths), np.int64)
        after[0] = best[0]
        for j in range(1, len(widths)):
            cost = best[:j] + widths[j] * (below[j + 1] - below[1 : j + 1])
            choice[j] = np.argmin(cost)
            after[j] = min(cost[choice[j]], best[j])
        best = after
        choices.append(choice)
    edges, j = [], len(widths) - 1
    for choice in reversed(choices):
        j = int(choice[j])
        edges.append(int(widths[j]))
    return edges[::-1]


def contender(name: str, find: Callable[[Hist, int], Any]) -> Contender:
    def prepare(given: Given) -> Callable[[], Any]:
        return lambda: find(*given)

    def summary(given: Given, edges: Any) -> Mapping[str, Any]:
        hist, _ = given
        ordered = sorted({int(edge) for edge in edges if edge > 0} | {len(hist) - 1})
        useful = int(np.dot(hist, np.arange(len(hist))))
        return {"efficiency": 100 * useful / edges_cost(hist, ordered), "edges": ordered}

    return Contender(name, prepare, summary)


WAYS = (
    contender("exact (batchwright)", optimal_edges),
    contender("every pair of edges", every_pair),
    contender("quantile", quantile),
    contender("equal mass", equal_mass),
    contender("geometric", geometric),
    contender("uniform", uniform),
    contender("fixed 128..1024", lambda hist, k: FIXED),
)


def compare(report: Report, name: str, capacity: int, k: int) -> dict[str, float]:
    hist = np.bincount(lengths_of(name, SAMPLES, capacity)).astype(np.int64)
    rows: list[list[Any]] = []
    found: dict[str, float] = {}
    for way in WAYS:
        if way.name.startswith("fixed") and (k != len(FIXED) + 1 or capacity != 2048):
            continue
        if way.name.startswith("every") and capacity > EVERY_PAIR_MOST:
            continue
        got = measure(way, (hist, k), (hist[:64], 2), limit_s=report.args.limit, patience_s=3.0)
        if got.seconds is None:
            rows.append([got.name, None, got.reason])
            continue
        found[way.name] = got.summary["efficiency"]
        milliseconds = None if way.name.startswith("fixed") else 1000 * got.busy
        rows.append([got.name, got.summary["efficiency"], milliseconds])
    distinct = np.count_nonzero(hist)
    report.table(
        f"{name}, lengths to {capacity:,} ({distinct:,} distinct), {k} buckets",
        ("", "efficiency %", "milliseconds"),
        rows,
    )
    return found


def main() -> None:
    args = arguments(__doc__.splitlines()[0]).parse_args()
    report = Report("edges", args)
    cases = [("lognormal", 2048, 5), ("mixture", 2048, 8)]
    if not args.quick:
        cases += [
            ("lognormal", 2048, 8),
            ("mixture", 2048, 32),
            ("lognormal", 8192, 8),
            ("mixture", 8192, 16),
            ("long", 131_072, 16),
        ]
    lead, regret = [], []
    for name, capacity, k in cases:
        found = compare(report, name, capacity, k)
        exact = found.pop("exact (batchwright)")
        if "every pair of edges" in found:
            regret.append(abs(found.pop("every pair of edges") - exact))
        lead.append(exact - max(found.values()))
    report.target("distance from the programme over every pair, points", max(regret), most=1e-9)
    report.target("points ahead of the best other way, at least", min(lead), least=0.0)
    report.close()


if __name__ == "__main__":
    main()
