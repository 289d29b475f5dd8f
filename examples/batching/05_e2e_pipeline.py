"""The whole pipeline: JSONL -> tokens -> lengths -> plan -> training, streamed and from files.

train.jsonl -> lengths.jsonl -> plan/ -> training loop
                                  |
                                  +---> batches/ (NPZ) -> the same training loop
"""

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from batchwright.batching import (
    BatchingConfig,
    BatchPlan,
    BatchPlanBuilder,
    BatchReader,
    BatchWriter,
    CollatedBatch,
    collate,
)
from batchwright.data import build_lengths, encode_row, load_tokenizer, open_source
from batchwright.data.reader import sample_reader


def write_dataset(path: Path) -> None:
    """Rows of an instruction and its response; without `id`, the row number is the sample id."""
    random = np.random.default_rng(1)
    with path.open("w") as file:
        for number in range(500):
            count = int(np.clip(random.lognormal(2.2, 0.8), 2, 60))
            numbers = random.integers(0, 100, count)
            row = {
                "id": f"sort-{number:03d}",
                "instruction": f"Sort: {' '.join(map(str, numbers))}",
                "response": " ".join(map(str, np.sort(numbers))),
            }
            file.write(json.dumps(row) + "\n")


class Bigrams:
    """A bigram language model: the next token from the last one, by softmax."""

    def __init__(self, vocab_size: int) -> None:
        self.logits = np.zeros((vocab_size, vocab_size))

    def train(self, batch: CollatedBatch) -> float:
        """One step of gradient descent; returns the mean loss before it."""
        rows, columns = np.nonzero(batch.labels != -100)
        # The first token of a sample has no label, so there is always one before.
        last, token = batch.input_ids[rows, columns - 1], batch.labels[rows, columns]
        scores = self.logits[last]
        probabilities = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
        loss = -np.log(probabilities[np.arange(len(token)), token]).mean()
        probabilities[np.arange(len(token)), token] -= 1
        np.subtract.at(self.logits, last, 20 * probabilities / len(token))
        return float(loss)


def train(batches: Iterable[CollatedBatch], vocab_size: int) -> list[float]:
    model = Bigrams(vocab_size)
    return [model.train(batch) for batch in batches]


def main(folder: Path) -> None:
    data = folder / "train.jsonl"
    write_dataset(data)
    source = open_source(data)
    print(f"1. dataset: {len(source)} rows in {data.name}")

    tokenizer = load_tokenizer("bytes")
    sample = encode_row(source[0], tokenizer, "0")
    learned = tokenizer.decode(sample.input_ids[sample.loss_mask == 1])
    print(f"2. tokens: {sample.sample_id} has {len(sample)}; in the loss: {learned!r}")

    report = build_lengths(source, tokenizer, folder / "lengths.jsonl")
    again = build_lengths(source, tokenizer, folder / "lengths.jsonl")
    print(f"3. lengths: measured {report.measured}, {report.tokens} tokens; ", end="")
    print(f"a second run measures {again.measured} and reuses {again.reused}")

    config = BatchingConfig(token_budget=4096, bucket_edges=(128, 192, 256), overflow_max=512)
    BatchPlanBuilder(report.cache, config).build(num_epochs=2).save(folder / "plan")
    plan = BatchPlan.load(folder / "plan")
    plan.verify(report.cache)
    print(f"4. plan: {plan}")

    # Path one, recommended: samples are read and collated while training; no files to keep in sync.
    read = sample_reader([source], tokenizer, plan.ids)
    batches = (
        collate(microbatch, read, pad_id=tokenizer.pad_id)
        for epoch in range(plan.num_epochs)
        for microbatch in plan.iter_epoch(epoch)
    )
    streamed = train(batches, tokenizer.vocab_size)
    print(f"5. streaming: {len(streamed)} steps, loss {streamed[0]:.3f} to {streamed[-1]:.3f}")

    # Path two: the same batches written once, for a trainer that reads files.
    BatchWriter(plan, read, folder / "batches", pad_id=tokenizer.pad_id).write_all()
    reader = BatchReader(folder / "batches")
    reader.verify_fingerprint(plan)
    files = [batch for epoch in range(reader.num_epochs) for batch in reader.iter_epoch(epoch)]
    from_files = train(files, tokenizer.vocab_size)
    print(f"   from NPZ:  {len(from_files)} steps, loss {from_files[0]:.3f} to ", end="")
    print(f"{from_files[-1]:.3f}; same losses: {from_files == streamed}")

    shares = [list(plan.shard(rank, 4).iter_epoch(0)) for rank in range(4)]
    fillers = [sum(not microbatch.weight for microbatch in share) for share in shares]
    print(f"6. four ranks: microbatches {[len(share) for share in shares]}, fillers {fillers}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
