"""Advantages within groups, as GRPO takes them, with the invalid rewards left out."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from batchwright.errors import Mismatch

__all__ = ["group_advantages"]


def group_advantages(
    rewards: ArrayLike,
    groups: ArrayLike,
    valid: ArrayLike | None = None,
    *,
    scale: bool = True,
    epsilon: float = 1e-6,
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """How much better than its group each response was, and which of them may be learned from.

    Mean and deviation of a group are taken over its valid rewards alone. Invalid ones, and a
    valid one that has no valid neighbour to be compared with, get advantage 0 and False. A
    reward that is not finite is invalid. With `scale`, differences are divided by the group's
    standard deviation plus `epsilon`.

    >>> values, usable = group_advantages([1, 0, 9, 0, 1], "aaabb", valid=[1, 1, 0, 1, 1])
    >>> values.round(2).tolist(), usable.tolist()
    ([0.71, -0.71, 0.0, -0.71, 0.71], [True, True, False, True, True])
    """
    values = np.asarray(rewards, dtype=np.float64)
    names: NDArray[Any] = np.asarray(list(groups) if isinstance(groups, str) else groups)
    usable = np.isfinite(values)
    if valid is not None:
        given = np.asarray(valid, dtype=bool)
        if given.shape != values.shape:
            raise Mismatch(f"{len(values)} rewards have {given.size} validity bits; give one each")
        usable &= given
    if values.ndim != 1 or names.shape != values.shape:
        raise Mismatch(f"rewards {values.shape} and groups {names.shape} are not two equal lists")
    _, members = np.unique(names, return_inverse=True)
    count = np.bincount(members, usable)
    usable &= count[members] >= 2
    kept = np.where(usable, values, 0.0)
    count = np.maximum(np.bincount(members, usable), 1)
    away = np.where(usable, kept - (np.bincount(members, kept) / count)[members], 0.0)
    if scale:
        # Over n - 1, as torch.std does, on which the trainers rely.
        spread = np.sqrt(np.bincount(members, away**2) / np.maximum(count - 1, 1))
        away = away / (spread[members] + epsilon)
    return away, usable
