"""Online learning: episodes of a gym server, a replay buffer, rolling batch plans, a curriculum."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from batchwright.streaming import (
    BufferEvictionPolicy,
    GymConfig,
    GymEpisodeStream,
    MockGymStream,
    ReplayBuffer,
    ReplayBufferConfig,
    RollingBatchPlanWindow,
    WindowConfig,
)
from batchwright.streaming.gym import GymServer


@contextmanager
def gym_server() -> Iterator[int]:
    """The puzzle server of `batchwright gym serve` on a free port, in a thread."""
    loop, server = asyncio.new_event_loop(), GymServer(port=0)
    loop.run_until_complete(server.start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield server.port
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def mocked() -> None:
    """No server at all: episodes of sums, for tests. Seven of ten succeed."""
    stream = MockGymStream(num_episodes=10, steps_per_episode=5, success_rate=0.7)
    samples = list(stream)
    metrics = stream.metrics
    print(f"mock: {len(samples)} samples, {metrics.success_rate:.0%} of episodes solved", end=", ")
    print(f"rewards {sum(sample.reward for sample in samples):.0f}")


def played(port: int) -> ReplayBuffer:
    """A real server: four episodes at once, a step is a sample, the loss is on the action."""
    config = GymConfig(
        host="127.0.0.1",
        port=port,
        transport="telnet",
        output_mode="normal",
        difficulty_range=(0.0, 0.8),
        max_retries=3,
        retry_delay=0.1,
    )
    buffer = ReplayBuffer(
        ReplayBufferConfig(max_size=400, eviction_policy=BufferEvictionPolicy.PRIORITY)
    )
    # Half of it by following hints, half by random moves, which rarely solve anything hard.
    for policy, seed in (("hint", 1), ("random", 2)):
        stream = GymEpisodeStream(
            config, "bytes", policy, num_episodes=40, connections=4, seed=seed
        )
        for sample in stream:
            buffer.add(sample, priority=1.0 if sample.success else 0.3)
        print(f"{policy}: {dict(stream.status_counts)}, {stream.metrics.samples_produced} samples")
    print(buffer)
    sample = next(iter(buffer))
    asked, acted = sample.input_ids[sample.loss_mask == 0], sample.input_ids[sample.loss_mask == 1]
    print(f"a prompt: {bytes(asked.tolist()).decode()!r}", end=", ")
    print(f"its action: {bytes(acted[:-1].tolist()).decode()!r}")
    return buffer


def trained(buffer: ReplayBuffer) -> None:
    """Windows of microbatches, harder ones as the easier ones are solved."""
    config = WindowConfig(window_microbatches=10, overlap_fraction=0.2, token_budget=1024)
    window = RollingBatchPlanWindow(buffer, config)
    for part in buffer.difficulty_stats(bins=4):
        if not part.samples:
            continue
        print(
            f"difficulty {part.low:.2f} to {part.high:.2f}: {part.success_rate:.0%} solved", end=""
        )
        state = window.build_next_window(buffer.filter_by_difficulty(part.low, part.high))
        tokens = sum(window.collate(batch).input_ids.size for batch in window.iter_current())
        print(
            f", window {state.window_id}: {state.plan_microbatches} microbatches, {tokens} tokens"
        )
    batch = buffer.sample(64)
    solved = sum(bool(sample.success) for sample in batch) / len(batch)
    held = sum(bool(sample.success) for sample in buffer) / len(buffer)
    print(f"solved: {held:.0%} of the buffer, {solved:.0%} of a batch drawn by priority")


def resumed(port: int) -> None:
    """The state of a stream is its position: a run that was stopped plays on where it was."""
    config = GymConfig(host="127.0.0.1", port=port)
    straight = [sample.sample_id for sample in GymEpisodeStream(config, num_episodes=12)]
    first = GymEpisodeStream(config, num_episodes=12)
    source = iter(first)
    seen = [next(source).sample_id for _ in range(17)]
    source.close()
    second = GymEpisodeStream(config, num_episodes=12, connections=3)
    second.load_state_dict(first.state_dict())
    seen += [sample.sample_id for sample in second]
    print(f"resumed at sample 17, same samples as uninterrupted: {seen == straight}")


def main() -> None:
    mocked()
    with gym_server() as port:
        buffer = played(port)
        trained(buffer)
        resumed(port)


if __name__ == "__main__":
    main()
