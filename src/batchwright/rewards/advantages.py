"""Group-relative advantages, as in GRPO, with invalid rewards left out."""

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
    """The advantage of each response over its group, and which of them may enter the loss.

    Mean and standard deviation of a group are those of its valid rewards. Invalid ones, and a
    valid one that is alone in its group, get advantage 0 and False. A reward that is not finite
    is invalid. With `scale`, advantages are divided by the group's standard deviation plus
    `epsilon`.

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
            raise Mismatch(f"{len(values)} rewards and {given.size} validity flags; pass one each")
        usable &= given
    if values.ndim != 1 or names.shape != values.shape:
        raise Mismatch(
            f"rewards and groups must be lists of equal length, got shapes {values.shape} and "
            f"{names.shape}"
        )
    _, members = np.unique(names, return_inverse=True)
    count = np.bincount(members, usable)
    usable &= count[members] >= 2
    kept = np.where(usable, values, 0.0)
    count = np.maximum(np.bincount(members, usable), 1)
    away = np.where(usable, kept - (np.bincount(members, kept) / count)[members], 0.0)
    if scale:
        # Divided by n - 1, as torch.std does, which the trainers use.
        spread = np.sqrt(np.bincount(members, away**2) / np.maximum(count - 1, 1))
        away = away / (spread[members] + epsilon)
    return away, usable
