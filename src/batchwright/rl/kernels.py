"""The inner loops of acting and of advantages."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.jit import kernel
from batchwright.permutation import mix

__all__ = ["advantages", "copy_filled", "episodes", "greedy", "sample"]


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
def _allowed(mask: NDArray[np.bool_], row: int, places: NDArray[np.int64]) -> int:
    """How many actions are allowed in a row; their numbers are put into `places`, in order."""
    count = 0
    for k in range(mask.shape[1]):
        places[count] = k
        count += int(mask[row, k])
    return count


@kernel
def _best(
    logits: NDArray[np.float32],
    row: int,
    places: NDArray[np.int64],
    count: int,
    shares: NDArray[np.float64],
) -> tuple[int, float, float]:
    """The first of the highest allowed logits, that logit, the sum of exp(logit - highest).

    Of a row, at the first `count` of `places`. -1 in place of the first if nothing is allowed, or
    if a logit is not a number. What is summed is left in `shares`. The arrays come whole: to
    slice one costs as much as an exponential.
    """
    top = -np.inf
    best = -1
    for i in range(count):
        if not logits[row, places[i]] <= top:
            top = np.float64(logits[row, places[i]])
            best = places[i]
    total = 0.0
    for i in range(count):
        shares[i] = np.exp(logits[row, places[i]] - top)
        total += shares[i]
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
    places, shares = np.empty(K, np.int64), np.empty(K)
    for b in range(B):
        count = _allowed(mask, b, places)
        best, top, total = _best(logits, b, places, count, shares)
        if best < 0:
            return b
        # 53 bits of the hash, in [0, 1).
        bits = mix(mix(key, np.uint64(b)), np.uint64(0)) >> np.uint64(11)
        aim = np.float64(bits) * 2.0**-53 * total
        passed = 0.0
        chosen = -1
        for i in range(count):
            if shares[i] > 0.0:
                passed += shares[i]
                chosen = places[i]
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
    K = logits.shape[1]
    places, shares = np.empty(K, np.int64), np.empty(K)
    for b in range(len(logits)):
        count = _allowed(mask, b, places)
        best, _, total = _best(logits, b, places, count, shares)
        if best < 0:
            return b
        actions[b] = best
        logp[b] = -np.log(total)
    return -1


@kernel
def episodes(
    rewards: NDArray[np.float32],
    done: NDArray[np.bool_],
    valid: NDArray[np.bool_],
    returns: NDArray[np.float64],
    lengths: NDArray[np.int64],
    clean: NDArray[np.bool_],
    ended_returns: NDArray[np.float64],
    ended_lengths: NDArray[np.int64],
) -> int:
    """Continue the return and length [B] of every episode over T steps.

    Those that ended are written one after the other, in the order of steps, if all of their steps
    were valid; returns how many.
    """
    T, B = rewards.shape
    count = 0
    for t in range(T):
        for b in range(B):
            returns[b] += rewards[t, b]
            lengths[b] += 1
            clean[b] &= valid[t, b]
            if done[t, b]:
                if clean[b]:
                    ended_returns[count], ended_lengths[count] = returns[b], lengths[b]
                    count += 1
                returns[b], lengths[b], clean[b] = 0.0, 0, True
    return count


@kernel
def copy_filled(
    rows: NDArray[np.int32],
    filled: NDArray[np.int64],
    out: NDArray[np.int32],
    held: NDArray[np.int64],
) -> None:
    """Make `out` [B, n] equal to `rows`, of which row b is -1 from filled[b] on.

    `out` is -1 already from held[b] on, which is filled[b] afterwards: what is padding in both is
    neither read nor written.
    """
    for b in range(rows.shape[0]):
        for k in range(filled[b]):
            out[b, k] = rows[b, k]
        for k in range(filled[b], held[b]):
            out[b, k] = -1
        held[b] = filled[b]
