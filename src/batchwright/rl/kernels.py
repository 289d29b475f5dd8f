"""The inner loops of acting and of advantages."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.jit import kernel
from batchwright.permutation import mix

__all__ = ["advantages", "greedy", "sample"]


@kernel
def _row(
    rewards: NDArray[Any],
    values: NDArray[Any],
    next_values: NDArray[Any],
    next_advantages: NDArray[Any],
    terminated: NDArray[np.bool_],
    truncated: NDArray[np.bool_],
    final_values: NDArray[Any],
    valid: NDArray[np.bool_],
    gamma: Any,
    decay: Any,
    advantages: NDArray[Any],
    returns: NDArray[Any],
) -> None:
    zero = gamma * 0
    for b in range(rewards.shape[0]):
        goes_on = not (terminated[b] | truncated[b])
        behind = next_values[b] if goes_on else (zero if terminated[b] else final_values[b])
        chain = next_advantages[b] if goes_on else zero
        found = rewards[b] + gamma * behind - values[b] + decay * chain
        # Zero at an invalid step, so that the step before it is bootstrapped from values[t].
        found = found if valid[b] else zero
        advantages[b] = found
        returns[b] = found + values[b]


@kernel
def advantages(
    rewards: NDArray[Any],
    values: NDArray[Any],
    last_value: NDArray[Any],
    terminated: NDArray[np.bool_],
    truncated: NDArray[np.bool_],
    final_values: NDArray[Any],
    valid: NDArray[np.bool_],
    gamma: Any,
    decay: Any,
    advantages: NDArray[Any],
    returns: NDArray[Any],
) -> None:
    """Fill `advantages` and `returns` [T, B] from the last step to the first.

    A row at a time in a function of its own: there the compiler finds no aliases between the
    arrays of one row, and the loop is twice as fast at B = 4096 as two nested ones.
    """
    T, B = rewards.shape
    next_values, chain = last_value, np.zeros(B, rewards.dtype)
    for t in range(T - 1, -1, -1):
        _row(
            rewards[t],
            values[t],
            next_values,
            chain,
            terminated[t],
            truncated[t],
            final_values[t],
            valid[t],
            gamma,
            decay,
            advantages[t],
            returns[t],
        )
        next_values, chain = values[t], advantages[t]


@kernel
def _best(
    logits: NDArray[np.float32], mask: NDArray[np.bool_], shares: NDArray[np.float64]
) -> tuple[int, float, float]:
    """The first of the highest allowed logits, that logit, and the sum of exp(logit - highest).

    -1 in place of the first if nothing is allowed, or if a logit is not a number. What is summed
    is left in `shares`, 0 where not allowed.
    """
    top = -np.inf
    best = -1
    for k in range(len(logits)):
        if mask[k] and not logits[k] <= top:
            top = np.float64(logits[k])
            best = k
    total = 0.0
    for k in range(len(logits)):
        shares[k] = np.exp(logits[k] - top) if mask[k] else 0.0
        total += shares[k]
    if not np.isfinite(top) or not np.isfinite(total):
        best = -1
    return best, top, total


@kernel
def sample(
    logits: NDArray[np.float32],
    mask: NDArray[np.bool_],
    key: np.uint64,
    actions: NDArray[np.int64],
    logp: NDArray[np.float32],
) -> int:
    """Draw one action a row where `mask` allows, by the inverse of the cumulative probability.

    Row b draws the number that (key, b) names, whatever the other rows are. Only a candidate
    with a probability above zero can be drawn, however the sum rounds. Returns the first row
    that cannot be drawn from (nothing allowed, or a logit that is not a number), or -1.
    """
    B, K = logits.shape
    shares = np.empty(K)
    for b in range(B):
        best, top, total = _best(logits[b], mask[b], shares)
        if best < 0:
            return b
        # 53 bits of the hash, in [0, 1).
        bits = mix(mix(key, np.uint64(b)), np.uint64(0)) >> np.uint64(11)
        aim = np.float64(bits) * 2.0**-53 * total
        passed = 0.0
        chosen = -1
        for k in range(K):
            if shares[k] > 0.0:
                passed += shares[k]
                chosen = k
                if passed > aim:
                    break
        actions[b] = chosen
        logp[b] = logits[b, chosen] - top - np.log(total)
    return -1


@kernel
def greedy(
    logits: NDArray[np.float32],
    mask: NDArray[np.bool_],
    actions: NDArray[np.int64],
    logp: NDArray[np.float32],
) -> int:
    """The allowed action of the highest logit, the first of equal ones; returns as `sample`."""
    shares = np.empty(logits.shape[1])
    for b in range(len(logits)):
        best, _, total = _best(logits[b], mask[b], shares)
        if best < 0:
            return b
        actions[b] = best
        logp[b] = -np.log(total)
    return -1
