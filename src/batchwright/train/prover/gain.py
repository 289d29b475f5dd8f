"""What PPO brought: the policy it started from and the one it trained, ranked on the same queries.

With one run the interval is over the queries: how sure the difference is for these weights. With
several runs, of other seeds, it is over the runs: how sure it is for the settings.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.logic.rank.ranking import Ranks

__all__ = ["gain", "joined", "mean_interval"]

Doubles = NDArray[np.float64]

T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)
"""The quantile .975 of Student's t with 1, 2, ... degrees of freedom."""


def joined(ranks: Sequence[Ranks]) -> Ranks:
    """The queries of several runs as one, so that its metrics are the means over the runs."""
    columns = ("predicates", "is_tail", "greater", "ties", "sampled_greater", "sampled_ties")
    return Ranks(*(np.concatenate([getattr(one, name) for one in ranks]) for name in columns))


def gain(before: Sequence[Ranks], after: Sequence[Ranks]) -> dict[str, Any]:
    """The metrics before, and the difference in MRR that training made, with its interval."""
    gains = np.stack([1 / b.middle - 1 / a.middle for a, b in zip(before, after, strict=True)])
    each = gains.mean(axis=1)
    low, high = mean_interval(each if len(each) > 1 else gains[0])
    return {
        "before": asdict(joined(before).metrics()),
        "mrr": float(each.mean()),
        "low": low,
        "high": high,
        "over": "runs" if len(each) > 1 else "queries",
        "runs": each.tolist(),
    }


def mean_interval(values: Doubles) -> tuple[float, float] | tuple[None, None]:
    """The 95 % interval of a mean, by Student's t; of one value there is none.

    >>> mean_interval(np.array([1.0, 2.0, 3.0]))  # doctest: +ELLIPSIS
    (-0.48..., 4.48...)
    """
    count = len(values)
    if count < 2:
        return None, None
    freedom = count - 1
    t = T_975[freedom - 1] if freedom <= len(T_975) else 1.96 + 2.4 / freedom
    mean, error = float(values.mean()), float(values.std(ddof=1)) / math.sqrt(count)
    return mean - t * error, mean + t * error
