"""Arithmetic of a large cluster: 1B samples, 1,000 ranks, 100k calls in flight.

What can be measured here is measured on a million samples and some thousand messages, on one core;
the rest is multiplied. Nothing of this ran at that size. docs/many-machines.md uses these numbers.

    python benchmarks/scale.py
"""

import os
import tempfile
import time
from pathlib import Path

import numpy as np

from batchwright.batching import BatchingConfig, BatchPlanBuilder
from batchwright.train.run import SAVE_SHARE
from common import lengths_of

SAMPLES, RANKS, CALLS = 10**9, 1000, 100_000
MEASURED = 10**6
TOKENS, CALL_S = 358, 10.0
"""Mean tokens of a sample, and seconds of a call to a large model."""
GROUP = 64
ROW_BYTES = 1400
"""Of JSONL, at about 4 bytes a token."""
TOKENISE = 2.0e6
"""Tokens a second of one core, a round figure for a byte-pair tokenizer."""
STORED = 4 + 1
"""Bytes of a token and of its mask."""
MODEL_BYTES = 7e9 * (4 + 8)
"""Weights in float32 and two moments, of a model of 7B parameters."""


def plan() -> tuple[float, float, float]:
    """Bytes a sample on disk, seconds to build a sample, and seconds to find a batch of a rank."""
    lengths = lengths_of("lognormal", MEASURED)
    config = BatchingConfig(layout="packed", token_budget=8192, step_size=RANKS)
    BatchPlanBuilder(lengths[:20_000], config).build(1)
    start = time.perf_counter()
    made = BatchPlanBuilder(lengths, config).build(1)
    built = (time.perf_counter() - start) / MEASURED
    with tempfile.TemporaryDirectory() as folder:
        made.save(Path(folder) / "plan")
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    shard = made.shard(RANKS - 1, RANKS)
    steps = shard.iter_steps(epochs=1)
    next(steps)
    start, count = time.perf_counter(), 0
    for count, _ in enumerate(steps, start=1):
        if count == 20:
            break
    return size / MEASURED, built, (time.perf_counter() - start) / count


def main() -> None:
    each, built, step = plan()
    tokens = SAMPLES * TOKENS
    rows = [
        ("plan, bytes a sample (measured)", each),
        ("plan of 1B samples, GB", each * SAMPLES / 1e9),
        ("building it, minutes of one core", built * SAMPLES / 60),
        ("a rank's part of one step of 1,000 ranks, ms (measured)", 1e3 * step),
        ("tokens, TB at 4 bytes", 4 * tokens / 1e12),
        ("rows, TB of JSONL", ROW_BYTES * SAMPLES / 1e12),
        ("tokenising, hours of one core", tokens / TOKENISE / 3600),
        ("tokenising, hours of 1,000 cores", tokens / TOKENISE / 3600 / RANKS),
        ("rows a second of 1,000 cores", SAMPLES * TOKENISE * RANKS / tokens),
        ("GB a second that one writer must take for that", STORED * TOKENISE * RANKS / 1e9),
        ("calls a second, 100k in flight at 10 s each", CALLS / CALL_S),
        ("groups of 64 a second through the actor", CALLS / CALL_S / GROUP),
        ("sockets of one process", float(CALLS)),
        ("checkpoint of a 7B model, GB", MODEL_BYTES / 1e9),
        ("writing it by one rank at 1 GB/s, s", MODEL_BYTES / 1e9),
        ("minutes between two of them, by the rule of 2%", SAVE_SHARE * MODEL_BYTES / 1e9 / 60),
        ("hours between losses, if a node fails once in 3 years", 3 * 365 * 24 / (RANKS / 8)),
    ]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(
            f"{name:<{width}}  {value:>14,.3g}"
            if value < 1000
            else f"{name:<{width}}  {value:>14,.0f}"
        )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    np.seterr(all="raise")
    main()
