"""Generalized advantage estimation on [T, B], with termination and truncation kept apart."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.errors import ConfigError, Mismatch
from batchwright.rl import kernels

__all__ = ["gae"]

Array = NDArray[Any]


def gae(
    rewards: Array,
    values: Array,
    last_value: Array,
    terminated: NDArray[np.bool_],
    truncated: NDArray[np.bool_],
    gamma: float,
    lam: float,
    final_values: Array | None = None,
    valid: NDArray[np.bool_] | None = None,
) -> tuple[Array, Array]:
    """Advantages and returns [T, B] of steps whose environments reset themselves within the step.

    `values[t]` is the value of the observation that step t acted on, `last_value` [B] that of
    the observation after the last step. Step t is bootstrapped from

    * nothing, if it terminated (even if it was truncated as well);
    * `final_values[t]`, the value of its final observation, if it was truncated: `values[t + 1]`
      is already of the next episode;
    * else `values[t + 1]`, or `last_value` after the last step.

    Nothing of an episode enters the one before it. A step that is not `valid` has neither a usable
    reward nor a usable outcome, but the observation it acted on is real: so the step before it is
    bootstrapped from `values[t]` and uses nothing later, as if the rollout had been cut there, and
    steps after it are unaffected. Its own advantage is 0 and its return `values[t]`; mask it out
    of means and losses all the same. Returns are advantages + values.

    Arrays are all float32 or all float64, and stay so.

    >>> import numpy as np
    >>> one = np.ones((3, 1), np.float32)
    >>> ends = np.array([[False], [True], [False]])
    >>> advantages, returns = gae(one, one, one[0], ends, ends & False, gamma=0.5, lam=1.0)
    >>> returns.ravel().tolist()
    [1.5, 1.0, 1.5]
    """
    shape, dtype = rewards.shape, rewards.dtype
    if len(shape) != 2 or dtype not in (np.float32, np.float64):
        raise Mismatch(
            f"rewards are {dtype} of shape {list(shape)}; they must be float32 or float64 [T, B]"
        )
    if final_values is None:
        if truncated.any():
            raise ConfigError(
                "steps are truncated and final_values is missing; give the values of their final "
                "observations [T, B], or mark them as terminated"
            )
        final_values = values
    if valid is None:
        valid = np.ones(shape, np.bool_)
    floats = {"values": values, "final_values": final_values}
    flags = {"terminated": terminated, "truncated": truncated, "valid": valid}
    for name, array in {**floats, **flags, "last_value": last_value}.items():
        expected = shape[1:] if name == "last_value" else shape
        kind = np.bool_ if name in flags else dtype
        if array.shape != expected or array.dtype != kind:
            raise Mismatch(
                f"{name} is {array.dtype} of shape {list(array.shape)}; for rewards of {dtype} "
                f"{list(shape)} it must be {np.dtype(kind)} {list(expected)}"
            )
    advantages, returns = np.empty(shape, dtype), np.empty(shape, dtype)
    if rewards.size:
        # Compiled for C-contiguous arrays only; a copy is cheaper than another compilation.
        kernels.advantages(
            np.ascontiguousarray(rewards),
            np.ascontiguousarray(values),
            np.ascontiguousarray(last_value),
            np.ascontiguousarray(terminated),
            np.ascontiguousarray(truncated),
            np.ascontiguousarray(final_values),
            np.ascontiguousarray(valid),
            dtype.type(gamma),
            dtype.type(gamma * lam),
            advantages,
            returns,
        )
    return advantages, returns
