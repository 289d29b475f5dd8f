"""Streams of samples: files, filters, merged sources, a replay buffer that survives a crash."""

import asyncio
import json
import random
import tempfile
from pathlib import Path

from batchwright.streaming import (
    AsyncOfflineDatasetStream,
    MockGymStream,
    OfflineDatasetStream,
    ReplayBuffer,
    ReplayBufferConfig,
    StreamSample,
    merge,
    prefetch,
    shuffle,
)


def write_rows(path: Path) -> None:
    """Tokenised rows with a difficulty, and a success that is rarer where it is harder."""
    draw = random.Random(7)
    with path.open("w") as file:
        for number in range(400):
            difficulty = round(draw.random(), 2)
            row = {
                "id": f"row-{number}",
                "input_ids": [draw.randrange(50_000) for _ in range(draw.randrange(5, 120))],
                "difficulty": difficulty,
                "success": draw.random() > difficulty,
            }
            file.write(json.dumps(row) + "\n")


def shorter(sample: StreamSample) -> StreamSample:
    """A transform: keep the first 64 tokens. Samples are immutable, so it makes a copy."""
    fields = {"input_ids": sample.input_ids[:64], "loss_mask": sample.loss_mask[:64]}
    return sample.model_copy(update=fields)


def offline(path: Path) -> None:
    stream = OfflineDatasetStream(
        path,
        dataset_id="demo",
        min_length=10,
        shuffle=True,
        filters=[lambda sample: sample.difficulty < 0.8],
        transforms=[shorter],
    )
    longest = max(sample.length for sample in stream)
    metrics = stream.metrics
    print(f"given {metrics.samples_produced}, filtered {metrics.samples_filtered}", end=", ")
    print(f"longest {longest}, mean difficulty {metrics.mean_difficulty:.2f}")


def resumed(path: Path) -> None:
    """Stop in the middle of an epoch, and continue in what might be another process."""
    straight = [sample.sample_id for sample in OfflineDatasetStream(path, shuffle=True)]
    first = OfflineDatasetStream(path, shuffle=True)
    source = iter(first)
    seen = [next(source).sample_id for _ in range(123)]
    state = json.loads(json.dumps(first.state_dict()))
    second = OfflineDatasetStream(path, shuffle=True)
    second.load_state_dict(state)
    seen += [sample.sample_id for sample in second]
    print(f"resumed at sample 123, same samples as uninterrupted: {seen == straight}")


async def asynchronous(path: Path) -> int:
    """The same files without blocking an event loop."""
    count = 0
    async for _ in AsyncOfflineDatasetStream(path):
        count += 1
    return count


def mixed(path: Path) -> None:
    """Two parts of a file to one of a gym, shuffled, read ahead by 32 samples at most."""
    sources = OfflineDatasetStream(path), MockGymStream(num_episodes=40)
    stream = prefetch(shuffle(merge(*sources, weights=[2, 1]), buffer_size=100), size=32)
    counts: dict[str, int] = {}
    for _, sample in zip(range(150), stream, strict=False):
        counts[str(sample.source)] = counts.get(str(sample.source), 0) + 1
    print(f"of 150 merged samples: {dict(sorted(counts.items()))}")


def replayed(path: Path, folder: Path) -> None:
    config = ReplayBufferConfig(max_size=300, eviction_policy="priority")
    buffer = ReplayBuffer(config)
    for sample in OfflineDatasetStream(path):
        # What failed is worth another look.
        buffer.add(sample, priority=0.2 if sample.success else 1.0)
    print(buffer)

    batch = buffer.sample(256)
    failed = sum(not sample.success for sample in batch) / len(batch)
    held = sum(not sample.success for sample in buffer) / len(buffer)
    print(f"failures: {held:.0%} of the buffer, {failed:.0%} of a batch drawn by priority")
    print(f"importance weights from {batch.weights.min():.2f} to {batch.weights.max():.2f}")
    first = batch[0]
    print(f"drawn: source {first.source}, replay_count {first.replay_count}")
    print(f"marked by hand: replay_count {first.with_replay().replay_count}")

    print("success by difficulty:")
    for part in buffer.difficulty_stats(bins=4):
        print(f"  {part.low:.2f} to {part.high:.2f}: {part.success_rate:.0%} of {part.judged}")

    buffer.save(folder)
    buffer.update_priorities(batch, batch.priorities / 2)
    buffer.save(folder)
    parts = sorted(file.name for file in folder.glob("*.safetensors"))
    again = ReplayBuffer.load(folder)
    same = again.sample(64).sample_ids == buffer.sample(64).sample_ids
    print(f"saved as {', '.join(parts)}; read back, it draws the same: {same}")


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "rows.jsonl"
        write_rows(path)
        offline(path)
        resumed(path)
        print(f"async: {asyncio.run(asynchronous(path))} samples")
        mixed(path)
        replayed(path, Path(temporary) / "buffer")


if __name__ == "__main__":
    main()
