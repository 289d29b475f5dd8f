"""Replay buffers up to a million samples: microseconds to add, draw 256, update 256, evict.

Every contender is filled before the clock starts, with random priorities, so that each `add`
evicts. Inside the clock is all that a training loop would wait for: packing a sample's tokens
into ours, the 256 samples with their importance weights, the 256 new priorities. Ours takes
samples of 64 tokens; the others hold references to a few ready objects, which costs them nothing.
Each number is the least of 30 rounds of the lesser of elapsed and processor time. Plain numpy
is faster than ours where it has no tree to keep: update, and add with FIFO eviction.

Then a day of a stream in virtual time: a sample a second, windows built and consumed every ten
minutes, the buffer saved every half hour and read back once in the middle. Memory must stay
where it is once the buffer is full.
"""

import random
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.abc import MetaPathFinder
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from batchwright.rng import stream
from batchwright.streaming import (
    MockGymStream,
    ReplayBuffer,
    ReplayBufferConfig,
    RollingBatchPlanWindow,
    StreamSample,
    WindowConfig,
    rate_limit,
)
from batchwright.streaming.combine import Give, Wait
from batchwright.streaming.rows import ROW, contents_of
from common import Contender, Report, arguments, measure

OURS = "batchwright ReplayBuffer"
BATCH, TOKENS, ALPHA, BETA = 256, 64, 0.6, 0.4
OPERATIONS = ("add", "sample", "update")


class Given(NamedTuple):
    size: int
    policy: str
    rounds: int


class Operations(NamedTuple):
    """One step of each, and how often to do it in a round."""

    add: Callable[[int], Any]
    sample: Callable[[], Any]
    update: Callable[[Any], Any]
    times: int


def samples() -> list[StreamSample]:
    tokens = np.arange(TOKENS)
    return [
        StreamSample(
            input_ids=tokens,
            loss_mask=tokens % 2,
            sample_id=f"new{number}",
            dataset_id="bench",
            source="gym",
            difficulty=0.5,
        )
        for number in range(512)
    ]


def priorities(n: int) -> np.ndarray:
    return stream(0, "bench/replay", n).random(n) + 0.01


def ours(given: Given) -> Operations:
    config = ReplayBufferConfig(max_size=given.size, eviction_policy=given.policy)
    buffer = ReplayBuffer(config)
    rows = np.zeros(given.size, ROW)
    rows["serial"] = np.arange(given.size)
    rows["priority"] = priorities(given.size)
    rows["length"], rows["dataset_id_bytes"], rows["episode_id_bytes"] = TOKENS, 5, -1
    ids = [f"s{number:07d}".encode() for number in range(given.size)]
    rows["sample_id_bytes"] = 8
    tokens = bytes(5 * TOKENS)
    counters = {"size": given.size, "total_added": given.size, "total_evicted": 0, "draws": 0}
    buffer.restore(rows, contents_of([tokens + name + b"bench" for name in ids]), counters)
    fresh, new = samples(), priorities(BATCH)
    times = 100
    return Operations(
        lambda number: buffer.add(fresh[number % len(fresh)]),
        lambda: buffer.sample(BATCH),
        lambda batch: buffer.update_priorities(batch, new),
        times,
    )


def numpy_scan(given: Given) -> Operations:
    """Arrays and a cumulative sum at every draw, as short implementations do it."""
    held = [None] * given.size
    weights = priorities(given.size) ** ALPHA
    age = np.arange(given.size)
    generator, fresh, new = stream(0, "numpy"), samples(), priorities(BATCH)
    fifo = given.policy == "fifo"

    def add(number: int) -> None:
        slot = number % given.size if fifo else int(np.argmin(weights))
        held[slot] = fresh[number % len(fresh)]
        weights[slot], age[slot] = 1.0, given.size + number

    def sample() -> Any:
        ends = np.cumsum(weights)
        slots = np.searchsorted(ends, generator.random(BATCH) * ends[-1], "right")
        share = weights[slots] / ends[-1]
        importance = (given.size * share) ** -BETA
        return slots, [held[slot] for slot in slots.tolist()], importance / importance.max()

    def update(batch: Any) -> None:
        weights[batch[0]] = new**ALPHA

    return Operations(add, sample, update, 20 if given.size > 100_000 else 50)


def lists(given: Given) -> Operations:
    """Lists, as the system of the document does it: every operation looks at every sample."""
    fresh, new = samples(), priorities(BATCH).tolist()
    held = [fresh[number % len(fresh)].sample_id for number in range(given.size)]
    weights = priorities(given.size).tolist()
    generator = random.Random(0)

    def add(number: int) -> None:
        slot = 0
        if given.policy != "fifo":
            slot = min(range(len(weights)), key=weights.__getitem__)
        del held[slot], weights[slot]
        held.append(f"new{number}")
        weights.append(1.0)

    def sample() -> Any:
        scaled = [weight**ALPHA for weight in weights]
        chosen = generator.choices(range(len(held)), weights=scaled, k=BATCH)
        return [held[slot] for slot in chosen]

    def update(batch: Any) -> None:
        for name, priority in zip(batch[:BATCH], new, strict=True):
            weights[held.index(name)] = priority

    return Operations(add, sample, update, 1 if given.size > 10_000 else 5)


def torchrl(given: Given) -> Operations:
    """TorchRL's sum tree in C++ over a preallocated tensor storage; its eviction is FIFO."""
    import torch
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
    from torchrl.data.replay_buffers.samplers import PrioritizedSampler

    if given.policy != "fifo":
        raise ValueError("it evicts first in, first out only")
    torch.set_num_threads(1)
    sampler = PrioritizedSampler(given.size, alpha=ALPHA, beta=BETA)
    storage = LazyTensorStorage(given.size)
    buffer = TensorDictReplayBuffer(
        storage=storage, sampler=sampler, batch_size=BATCH, priority_key="priority"
    )
    first = torch.from_numpy(priorities(given.size)).float()
    for start in range(0, given.size, 100_000):
        n = min(100_000, given.size - start)
        tokens = torch.zeros(n, TOKENS, dtype=torch.int32)
        buffer.extend(TensorDict({"input_ids": tokens, "mask": tokens.to(torch.uint8)}, [n]))
    buffer.update_priority(torch.arange(given.size), first)
    one = torch.zeros(TOKENS, dtype=torch.int32)
    fresh = TensorDict({"input_ids": one, "mask": one.to(torch.uint8)}, [])
    new = torch.from_numpy(priorities(BATCH)).float()

    def sample() -> Any:
        batch, info = buffer.sample(return_info=True)
        return batch, info["index"]

    return Operations(
        lambda _: buffer.add(fresh),
        sample,
        lambda batch: buffer.update_priority(batch[1], new),
        100,
    )


def timed(make: Callable[[Given], Operations]) -> Callable[[Given], Callable[[], Any]]:
    def prepare(given: Given) -> Callable[[], Any]:
        operations = make(given)

        def call() -> dict[str, float]:
            best = dict.fromkeys(OPERATIONS, float("inf"))
            number = 0
            batch = operations.sample()
            for _ in range(given.rounds):
                for name in OPERATIONS:
                    start, worked = time.perf_counter(), time.process_time()
                    for _ in range(operations.times):
                        number += 1
                        if name == "add":
                            operations.add(number)
                        elif name == "sample":
                            batch = operations.sample()
                        else:
                            operations.update(batch)
                    spent = min(time.perf_counter() - start, time.process_time() - worked)
                    best[name] = min(best[name], spent / operations.times * 1e6)
            return best

        return call

    return prepare


def passed_on(_: Given, result: Mapping[str, float]) -> Mapping[str, float]:
    return result


CONTENDERS = tuple(
    Contender(name, timed(make), passed_on)
    for name, make in (
        (OURS, ours),
        ("torchrl PrioritizedSampler", torchrl),
        ("numpy, cumulative sum at each draw", numpy_scan),
        ("lists (the document's system)", lists),
    )
)


class CompiledExtension(MetaPathFinder):
    """Finds torchrl's extension where it was compiled: its wheel loads with one torch only."""

    def __init__(self, file: str) -> None:
        self._file = file

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "torchrl._torchrl":
            return None
        return spec_from_file_location(name, self._file)


class Day(NamedTuple):
    samples: int
    windows: int
    microbatches: int
    first_mb: float
    """Peak resident memory an hour after the buffer filled up."""
    last_mb: float
    folder_mb: float
    buffer_mb: float
    seconds: float


def day(hours: float, size: int) -> Day:
    """A stream of one sample a second, its buffer and its windows, in virtual time."""
    start, now = time.perf_counter(), 0.0
    folder = Path(tempfile.mkdtemp()) / "buffer"
    gym = MockGymStream(num_episodes=10**9)
    buffer = ReplayBuffer(ReplayBufferConfig(max_size=size, eviction_policy="priority"))
    config = WindowConfig(window_microbatches=20, token_budget=2048, layout="packed")
    window = RollingBatchPlanWindow(buffer, config)
    program = rate_limit(gym, 1.0, clock=lambda: now).program()
    source, answer = iter(gym), None
    first_mb, build_at, save_at, restarted = 0.0, 600.0, 1800.0, False
    while now < hours * 3600:
        step = program.send(answer)
        answer = None
        if isinstance(step, Wait):
            now += step.seconds
        elif isinstance(step, Give):
            buffer.add(step.sample)
        else:
            answer = next(source)
        if now >= build_at and window.should_build_next:
            build_at += 600.0
            window.build_next_window()
            for _, samples in window.iter_current_with_samples():
                buffer.update_priorities(samples, samples.lengths / samples.lengths.max())
        if now >= save_at:
            save_at += 1800.0
            buffer.save(folder)
            # The buffer is full after `size` seconds; an hour later everything was done once.
            if not first_mb and now >= size + 3600:
                first_mb = peak_mb()
        if not restarted and now >= hours * 1800:
            restarted = True
            states = window.state_dict()
            buffer.save(folder)
            buffer = ReplayBuffer.load(folder)
            window = RollingBatchPlanWindow(buffer, config)
            window.load_state_dict(states)
    held = buffer.snapshot()
    found = Day(
        buffer.total_added,
        window.total_windows,
        window.total_microbatches,
        first_mb,
        peak_mb(),
        sum(path.stat().st_size for path in folder.iterdir()) / 1e6,
        (held.rows.nbytes + sum(map(len, held.contents))) / 1e6,
        time.perf_counter() - start,
    )
    shutil.rmtree(folder.parent)
    return found


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def compared(report: Report, sizes: tuple[int, ...], policy: str, limit_s: float) -> dict[str, Any]:
    """Measure every contender at every size; microseconds by name, operation and size."""
    found: dict[str, Any] = {contender.name: {} for contender in CONTENDERS}
    for size in sizes:
        for contender in CONTENDERS:
            given, small = Given(size, policy, 30), Given(1000, policy, 1)
            got = measure(contender, given, small, limit_s=limit_s, runs=1)
            if got.reason:
                report.not_measured(f"{contender.name}, {policy}, {size:,}", got.reason)
                continue
            for name in OPERATIONS:
                found[contender.name][name, size] = got.summary[name]
    columns = [(name, size) for name in OPERATIONS for size in sizes]
    report.table(
        f"microseconds with {policy} eviction: add one, draw {BATCH}, update {BATCH}",
        ("", *(f"{name} {size:,}" for name, size in columns)),
        [[name, *(row.get(c) for c in columns)] for name, row in found.items() if row],
    )
    return found


def rows_of(simulated: Day) -> Iterator[tuple[str, Any]]:
    for name, value in simulated._asdict().items():
        yield name.replace("_", " "), value


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument(
        "--torchrl-extension", help="torchrl/csrc compiled for the torch that is installed"
    )
    args = parser.parse_args()
    if args.torchrl_extension:
        sys.meta_path.insert(0, CompiledExtension(args.torchrl_extension))
    report = Report("replay", args)
    if args.torchrl_extension:
        report.stamp["versions"]["torchrl extension"] = "compiled from source for this torch"
    sizes = (10_000, 100_000) if args.quick else (10_000, 100_000, 1_000_000)
    largest = sizes[-1]
    for policy in ("fifo", "priority"):
        found = compared(report, sizes, policy, args.limit)
        mine = found[OURS]
        for name, most in zip(OPERATIONS, (50.0, 100.0, 100.0), strict=True):
            value = mine.get((name, largest))
            report.target(f"{policy}, {name} at {largest:,}: microseconds", value, most=most)
            others = [
                row[name, largest]
                for other, row in found.items()
                if other.startswith("lists") and (name, largest) in row
            ]
            ratio = min(others) / value if others and value else None
            report.target(f"{policy}, {name}: times faster than lists", ratio, least=1.0)
    simulated = day(2.0, 2000) if args.quick else day(24.0, 10_000)
    report.table("a day in virtual time", ("", "value"), rows_of(simulated))
    growth = simulated.last_mb - simulated.first_mb
    report.target("MB of memory gained from the full buffer to the end", growth, most=20.0)
    report.target(
        "folder over the size of the buffer", simulated.folder_mb / simulated.buffer_mb, most=3.0
    )
    report.close()


if __name__ == "__main__":
    main()
