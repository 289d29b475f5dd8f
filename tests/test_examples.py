"""The examples and the documented Quick Start run as a user runs them, and say what must hold."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples" / "batching"

QUICK_START = """
import asyncio
from batchwright.batching import (
    BucketSpec,
    TokenBudgetBatchSampler,
    BatchingConfig,
    BatchPlanBuilder,
)

async def main():
    # Sample lengths (normally from tokenized data)
    lengths = {f"s{i}": 100 + i * 10 for i in range(50)}

    # Configure bucketing
    bucket_spec = BucketSpec(
        edges=(128, 256, 512),
        overflow_max=1024,
    )

    # Create sampler
    sampler = TokenBudgetBatchSampler(
        lengths=lengths,
        bucket_spec=bucket_spec,
        token_budget=2048,
        seed=42,
    )

    # Iterate batches
    async for batch in sampler.iter_epoch(epoch=0):
        print(f"Batch: {batch.batch_size} samples, {batch.max_length} max len")

asyncio.run(main())
"""


@pytest.fixture
def run(tmp_path: Path) -> Callable[[Path], str]:
    """Run a script in an empty folder; what it prints, once it is seen to leave nothing behind."""

    def run_script(script: Path) -> str:
        here, temporary = tmp_path / "here", tmp_path / "temporary"
        here.mkdir()
        temporary.mkdir()
        outside = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        environ = {k: v for k, v in os.environ.items() if k not in outside}
        done = subprocess.run(
            [sys.executable, "-W", "error", script],
            cwd=here,
            env={**environ, "TMPDIR": str(temporary)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        assert not list(here.iterdir())
        assert not list(temporary.iterdir())
        return done.stdout

    return run_script


def numbers(pattern: str, text: str) -> tuple[float, ...]:
    """The numbers in the first line that fits `pattern`; every group is one."""
    found = re.search(pattern, text)
    assert found, f"no line fits {pattern!r} in:\n{text}"
    return tuple(float(group.replace(",", "")) for group in found.groups())


def test_the_quick_start_runs_as_written_and_stays_within_its_budget(run, tmp_path):
    script = tmp_path / "quick_start.py"
    script.write_text(QUICK_START)

    lines = run(script).splitlines()

    shapes = [re.fullmatch(r"Batch: (\d+) samples, (\d+) max len", line) for line in lines]
    assert all(shapes)
    sizes = [(int(shape[1]), int(shape[2])) for shape in shapes]
    assert sum(rows for rows, _ in sizes) == 50
    assert max(rows * width for rows, width in sizes) <= 2048


def test_every_example_of_the_folder_is_tested_here_and_named_in_its_readme():
    scripts = sorted(path.name for path in EXAMPLES.glob("*.py"))
    tested = Path(__file__).read_text()
    readme = (EXAMPLES / "README.md").read_text()

    assert len(scripts) == 8
    assert [name for name in scripts if name not in tested or name not in readme] == []


def test_basic_batching_fits_the_budget_and_beats_fixed_batches(run):
    text = run(EXAMPLES / "01_basic_batching.py")

    assert "0 ids missing, 0 unexpected" in text
    padded = [int(n) for n in re.findall(r"= (\d+) tokens, [\d.]+% useful", text)]
    assert len(padded) == 5
    assert max(padded) <= 4096
    (fixed,) = numbers(r"fixed batches of 16, in given order: ([\d.]+)% useful", text)
    (bucketed,) = numbers(r"buckets under a token budget: +([\d.]+)% useful", text)
    assert bucketed > 1.5 * fixed
    assert re.search(r"same seed, other input order, same batches: +True", text)
    assert re.search(r"other seed, same batches: +False", text)
    assert re.search(r"next epoch, same batches: +False", text)


def test_packing_is_fuller_than_buckets_and_leaks_nothing(run):
    text = run(EXAMPLES / "02_sequence_packing.py")

    rows = dict(re.findall(r"^([A-Z_]+) +(\d+) +[\d.]+%$", text, re.MULTILINE))
    (bound,) = numbers(r"no packing needs fewer than (\d+) rows", text)
    assert list(rows) == ["FIRST_FIT", "BEST_FIT", "GREEDY", "BEST_FIT_DECREASING"]
    assert bound <= int(rows["BEST_FIT_DECREASING"]) <= int(rows["FIRST_FIT"])
    bucketed, packed = numbers(r"bucketed ([\d.]+)%, packed ([\d.]+)%", text)
    assert packed > bucketed
    assert re.search(r"600 samples in \d+ rows, complete and disjoint, 0 of \d+ tokens lost", text)
    assert numbers(r"segment mask: the outputs of (\d+) tokens of other samples", text) == (0,)
    assert numbers(r"plain causal mask: the outputs of (\d+) tokens of other", text)[0] > 0


def test_a_plan_is_the_same_after_a_round_trip_a_resume_and_a_shuffle(run):
    text = run(EXAMPLES / "03_batch_plan.py")

    assert "loaded plan is the same: True" in text
    assert "one length changed: the plan" in text
    counts = re.findall(r"rank \d: (\d+) microbatches", text)
    assert len(counts) == 4
    assert len(set(counts)) == 1
    assert "every sample on exactly one rank: True" in text
    assert "resumed == uninterrupted: True" in text
    assert "same samples, reversed: same" in text
    assert "another seed: different" in text
    assert "another budget: different" in text


def test_ranks_have_equal_counts_and_a_run_resumes_on_another_number_of_them(run):
    text = run(EXAMPLES / "04_distributed.py")

    for balance in ("round_robin", "cost"):
        counts = numbers(
            rf"{balance}: microbatches of each rank \[(\d+), (\d+), (\d+), (\d+)\]", text
        )
        assert len(set(counts)) == 1
    (in_turn,) = numbers(r"round_robin: .* / mean ([\d.]+)", text)
    (by_cost,) = numbers(r"cost: .* / mean ([\d.]+)", text)
    assert 1.0 <= by_cost < in_turn
    # Three buckets in the first half and in the second, where in order there is one in the second.
    mixed = re.search(r"interleaved: .*?({.*}) then ({.*})", text)
    assert mixed
    assert [part.count(":") for part in mixed.groups()] == [3, 3]
    assert "resumed on 3 ranks, same samples as uninterrupted: True" in text
    assert "saved shards/rank_0 to rank_3" in text
    assert "rank 2 of 4" in text


def test_both_ways_of_training_give_the_same_losses(run):
    text = run(EXAMPLES / "05_e2e_pipeline.py")

    assert "measured 500" in text
    assert "a second run measures 0 and reuses 500" in text
    steps, first, last = numbers(r"streaming: (\d+) steps, loss ([\d.]+) to ([\d.]+)", text)
    assert last < 0.6 * first
    assert numbers(r"from NPZ: +(\d+) steps, loss ([\d.]+) to ([\d.]+)", text) == (
        steps,
        first,
        last,
    )
    assert "same losses: True" in text
    counts = numbers(r"four ranks: microbatches \[(\d+), (\d+), (\d+), (\d+)\]", text)
    assert len(set(counts)) == 1


def test_optimised_edges_beat_the_original_ones(run):
    text = run(EXAMPLES / "06_analyze.py")

    assert re.search(r"p25 .* p99 ", text)
    for goal in ("waste", "balance", "memory"):
        assert re.search(rf"^  {goal} +edges \(", text, re.MULTILINE)
    original, before = numbers(r"original .*\) +([\d.]+)% useful, (\d+) batches", text)
    optimised, after = numbers(r"optimised .*\) +([\d.]+)% useful, (\d+) batches", text)
    assert optimised > original
    assert after < before
    assert "lost by the original edges" in text
    fuller = [float(n) for n in re.findall(r"^ +\d+ buckets: ([\d.]+)% useful", text, re.MULTILINE)]
    assert len(fuller) == 4
    assert fuller == sorted(fuller)


def test_streams_resume_and_a_replay_buffer_draws_what_failed_more_often(run):
    text = run(EXAMPLES / "07_streaming.py")

    given, filtered, longest = numbers(r"given (\d+), filtered (\d+), longest (\d+)", text)
    assert given + filtered == 400
    assert longest == 64
    assert "resumed at sample 123, same samples as uninterrupted: True" in text
    assert "async: 400 samples" in text
    merged = numbers(r"of 150 merged samples: {'offline': (\d+), 'synthetic': (\d+)}", text)
    assert sum(merged) == 150
    held, drawn = numbers(r"failures: (\d+)% of the buffer, (\d+)% of a batch", text)
    assert drawn > held
    rates = [float(rate) for rate in re.findall(r": (\d+)% of \d+$", text, re.MULTILINE)]
    assert rates == sorted(rates, reverse=True)
    assert len(rates) == 4
    assert "source replay, replay_count 1" in text
    assert "it draws the same: True" in text


def test_online_learning_earns_samples_and_draws_what_was_solved_more_often(run):
    text = run(EXAMPLES / "08_online_learning.py")

    assert "mock: 50 samples, 70% of episodes solved, rewards 7" in text
    assert "hint: {'success': 40}" in text
    failed, solved = numbers(r"random: {'failure': (\d+), 'success': (\d+)}", text)
    assert failed + solved == 40
    assert failed > solved
    assert "ReplayBuffer(400 of 400 samples" in text
    assert re.search(r"a prompt: '(guess|lights|sort): .*', its action: '(guess|press|swap) ", text)
    assert text.count("10 microbatches") == 4
    held, drawn = numbers(r"solved: (\d+)% of the buffer, (\d+)% of a batch", text)
    assert drawn > held
    assert "resumed at sample 17, same samples as uninterrupted: True" in text
