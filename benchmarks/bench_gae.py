"""Advantages of a rollout of 128 steps: microseconds, beside TorchRL's two and the usual loops.

Every contender gets the arrays in the form and the order of axes it likes best, made before the
clock starts: [T, B] for ours and the loops, [B, T, 1] for TorchRL's. One step in ten ends its
episode, four of five by termination. Each is checked against the loop over scalars. Ratios are
of `busy` seconds (see common.Measured): the machine may be shared.
"""

import time
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchwright.rl import gae
from batchwright.rng import stream
from common import Contender, Report, arguments, measure

GAMMA, LAMBDA, T = 0.99, 0.95, 128
OURS = "batchwright gae"
Array = NDArray[Any]


class Rollout(NamedTuple):
    rewards: Array
    values: Array
    last: Array
    terminated: Array
    truncated: Array
    finals: Array


def rollout(B: int) -> Rollout:
    random = stream(0, "bench/gae", B)
    rewards, values, finals = random.standard_normal((3, T, B), np.float32)
    ends = random.random((T, B)) < 0.1
    by_limit = random.random((T, B)) < 0.2
    last = random.standard_normal(B, np.float32)
    return Rollout(rewards, values, last, ends & ~by_limit, ends & by_limit, finals)


def behind(given: Rollout) -> Array:
    """The value of what each step led to, as the other forms want it."""
    following = np.concatenate([given.values[1:], given.last[None]])
    following[given.truncated] = given.finals[given.truncated]
    return following


def repeated(call: Callable[[], Any]) -> Callable[[], Any]:
    """About 20 ms of calls at once, so that the clock and its reading do not count.

    The result is (number of calls, last result).
    """
    call()
    start = time.perf_counter()
    call()
    number = max(1, min(2000, int(0.02 / max(time.perf_counter() - start, 1e-6))))

    def many() -> tuple[int, Any]:
        for _ in range(number - 1):
            call()
        return number, call()

    return many


def ours(given: Rollout) -> Callable[[], Any]:
    r, v, last, terminated, truncated, finals = given
    return repeated(lambda: gae(r, v, last, terminated, truncated, GAMMA, LAMBDA, finals)[0])


def numpy_loop(given: Rollout) -> Callable[[], Any]:
    following = behind(given)
    lives = (~given.terminated).astype(np.float32)
    goes_on = (~(given.terminated | given.truncated)).astype(np.float32)

    def call() -> Array:
        advantages = np.empty_like(given.rewards)
        carry = np.zeros_like(given.last)
        for t in range(T - 1, -1, -1):
            delta = given.rewards[t] + GAMMA * following[t] * lives[t] - given.values[t]
            carry = delta + GAMMA * LAMBDA * goes_on[t] * carry
            advantages[t] = carry
        return advantages

    return repeated(call)


def torch_loop(given: Rollout) -> Callable[[], Any]:
    """As CleanRL and Stable-Baselines3 write it."""
    import torch

    torch.set_num_threads(1)
    rewards, values, following = map(torch.from_numpy, (given.rewards, given.values, behind(given)))
    lives = torch.from_numpy(~given.terminated).float()
    goes_on = torch.from_numpy(~(given.terminated | given.truncated)).float()

    def call() -> Array:
        with torch.no_grad():
            advantages = torch.zeros_like(rewards)
            carry = torch.zeros_like(rewards[0])
            for t in reversed(range(T)):
                delta = rewards[t] + GAMMA * following[t] * lives[t] - values[t]
                advantages[t] = carry = delta + GAMMA * LAMBDA * goes_on[t] * carry
        return advantages.numpy()

    return repeated(call)


def torchrl(name: str) -> Callable[[Rollout], Callable[[], Any]]:
    def prepare(given: Rollout) -> Callable[[], Any]:
        import torch
        from torchrl.objectives.value import functional

        torch.set_num_threads(1)
        function = getattr(functional, name)

        def turned(array: Array) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(array.T)).unsqueeze(-1)

        values, following, rewards, done, terminated = map(
            turned,
            (
                given.values,
                behind(given),
                given.rewards,
                given.terminated | given.truncated,
                given.terminated,
            ),
        )

        def call() -> Array:
            with torch.no_grad():
                found = function(GAMMA, LAMBDA, values, following, rewards, done, terminated)[0]
            return found[..., 0].numpy().T

        return repeated(call)

    return prepare


def check(given: Rollout, result: tuple[int, Array]) -> Mapping[str, Any]:
    """Equal to a loop over scalars on the first environments."""
    number, advantages = result
    following = behind(given).astype(np.float64)
    for b in range(min(4, len(given.last))):
        carry = 0.0
        for t in range(T - 1, -1, -1):
            ends = given.terminated[t, b] or given.truncated[t, b]
            value = 0.0 if given.terminated[t, b] else following[t, b]
            carry = 0.0 if ends else carry
            carry = given.rewards[t, b] + GAMMA * (value + LAMBDA * carry) - given.values[t, b]
            assert abs(carry - advantages[t, b]) < 2e-3, (t, b, carry, advantages[t, b])
    return {"number": number}


CONTENDERS = (
    Contender(OURS, ours, check),
    Contender("numpy loop over T", numpy_loop, check),
    Contender("torch loop over T (CleanRL, SB3)", torch_loop, check),
    Contender(
        "torchrl generalized_advantage_estimate", torchrl("generalized_advantage_estimate"), check
    ),
    Contender(
        "torchrl vec_generalized_advantage_estimate",
        torchrl("vec_generalized_advantage_estimate"),
        check,
    ),
)


def main() -> None:
    args = arguments(__doc__.splitlines()[0]).parse_args()
    report = Report("gae", args)
    for package in ("torchrl", "tensordict"):
        try:
            report.stamp["versions"][package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            report.not_measured(package, "not installed")
    sizes = (16,) if args.smoke else (1, 16, 256, 4096)
    found: dict[str, dict[int, float]] = {c.name: {} for c in CONTENDERS}
    for B in sizes:
        given, small = rollout(B), rollout(2)
        for contender in CONTENDERS:
            got = measure(contender, given, small, limit_s=args.limit, runs=15, patience_s=3.0)
            if got.busy is None:
                report.not_measured(f"{contender.name}, B={B}", got.reason)
                continue
            found[contender.name][B] = got.busy / got.summary["number"] * 1e6
    report.table(
        f"microseconds for [T, B] = [{T}, B], one thread",
        ("", *(f"B={B}" for B in sizes)),
        [[name, *(row.get(B) for B in sizes)] for name, row in found.items()],
    )
    mine = found[OURS]
    report.table(
        "times the time of ours",
        ("", *(f"B={B}" for B in sizes)),
        [
            [name, *(row[B] / mine[B] if B in row else None for B in sizes)]
            for name, row in found.items()
        ],
    )
    for B in sizes:
        others = [row[B] for name, row in found.items() if name != OURS and B in row]
        ratio = min(others) / mine[B] if others else None
        report.target(f"B={B}: times faster than the fastest other", ratio, least=1.0)
    report.close()


if __name__ == "__main__":
    main()
