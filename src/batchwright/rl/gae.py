"""Generalised advantage estimation on [T, B], with every kind of end told apart."""

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
    the observation after the last step. What stands behind step t is

    * nothing, if it terminated (even if it was truncated as well);
    * `final_values[t]`, the value of its final observation, if it was truncated: `values[t + 1]`
      is already of the next episode;
    * else `values[t + 1]`, or `last_value` behind the last step.

    Where an episode ends, nothing of the next one enters it. A step that is not `valid` has
    neither a trustworthy reward nor a trustworthy outcome, but the observation it acted on is
    real: so the step before it leans on `values[t]` and on nothing later, as if the rollout had
    been cut there, and steps after it do not notice. Its own advantage is 0 and its return
    `values[t]`; leave it out of means and losses all the same. Returns are advantages + values.

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
                "observations [T, B], or count them as terminated"
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
                f"{name} is {array.dtype} of shape {list(array.shape)}; beside rewards of {dtype} "
                f"{list(shape)} it must be {np.dtype(kind)} {list(expected)}"
            )
    advantages, returns = np.empty(shape, dtype), np.empty(shape, dtype)
    if rewards.size:
        # The kernel is compiled for arrays in order of memory; a copy is cheaper than another.
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
