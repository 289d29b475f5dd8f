"""Families of model servers and loads drawn at random from a seed, for `bench_limit.py`.

Everything is drawn: the kind's own law (how much it thrashes or batches), the knee, the latency and
its law, slow changes of pace, how calls arrive, what rejections say. Seeds below `JUDGING` are for
tuning; those from it on only judge, and the limit was never changed after a look at one of them.
"""

from typing import Any

from batchwright.rng import stream
from limit_world import KINDS, World

__all__ = ["FAMILIES", "JUDGING", "draw"]

JUDGING = 1000
FAMILIES = tuple(f"{kind}{moves}" for kind in KINDS for moves in ("", ", knee moves"))
LAWS = ("lognormal", "gamma", "uniform", "bimodal")


def draw(family: str, seed: int) -> World:
    """A server and its load. Enough calls are made for a cold start to be a small part of them:
    30 to 60 for each slot, and for a knee that moves so many after each move."""
    kind: Any = family.split(",")[0]
    draws = stream(seed, "limit family", FAMILIES.index(family))

    def between(low: float, high: float) -> float:
        """Evenly on the logarithmic scale."""
        return float(low * (high / low) ** draws.random())

    knee = round(between(1, 250))
    knees = (knee,)
    if "moves" in family:
        knee = max(4, knee)
        other = min(250, max(3, round(knee * between(2, 4) ** draws.choice([-1.0, 1.0]))))
        knees = (knee, other)
    calls = round(sum(max(400, knee * between(30, 60)) for knee in knees))
    latency_s = between(0.05, 10)
    more: dict[str, Any] = {}
    if kind == "reject" and draws.random() < 0.5:
        more["retry_after_s"] = None
    elif kind == "reject":
        more["retry_after_s"] = latency_s * between(0.1, 2)
    if kind in ("thrash", "batch"):
        more["paced_at_start"] = bool(draws.random() < 0.3)
    if draws.random() < 0.3:
        more["wave"] = round(max(knees) * between(3, 10))
    return World(
        kind,
        knees,
        calls=calls,
        latency_s=latency_s,
        sigma=between(0.2, 0.9),
        seed=seed,
        law=LAWS[int(draws.integers(len(LAWS)))],
        power=between(1.0, 2.0),
        base=between(0.2, 0.7),
        drift=float(draws.choice([0.0, 0.05, 0.15])),
        **more,
    )
