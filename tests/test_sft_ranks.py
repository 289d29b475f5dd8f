"""Several ranks train as one does, and any number of them goes on where others stopped.

One start of torchrun does several runs, one after the other: most of its time goes into starting.
"""

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))

from batchwright.batching import BatchingConfig, BatchPlan, BatchPlanBuilder
from batchwright.data.measure import build_lengths
from batchwright.events import read_events
from batchwright.train.sft.config import SftConfig
from batchwright.train.sft.loop import train_sft
from rank_pool import RankPool, free_port, rank_pool

torch.set_num_threads(1)

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "SLURM_NTASKS")

PATIENCE_S = 1200
"""A busy machine needs minutes for what takes seconds; only a hang takes this long."""

DRIVER = """
import os, sys, torch
from pathlib import Path
from batchwright.train.sft import train_sft
from batchwright.train.sft.config import SftConfig
torch.set_num_threads(1)
# Every run meets at a place of its own; what an earlier one left at the old place would confuse it.
os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
Path(sys.argv[0]).with_name(f"rank{os.environ['RANK']}").write_text(str(os.getpid()))
for argument in sys.argv[1:]:
    how, port, file = argument.split("=")
    os.environ["MASTER_PORT"] = port
    result = train_sft(SftConfig.load(Path(file)), resume=how == "resume")
    print(how, result.run_dir.name, result.step, result.finished, result.stopped_by, flush=True)
"""


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    with rank_pool(tmp_path_factory.mktemp("ranks")) as ranks:
        yield ranks


@pytest.fixture
def config(tmp_path: Path) -> SftConfig:
    draw = random.Random(0)
    words = ("the", "quick", "otter", "counts", "tokens", "while", "it", "dives")
    with (tmp_path / "train.jsonl").open("w") as file:
        for number in range(34):
            prompt = " ".join(draw.choices(words, k=draw.randint(1, 9)))
            answer = " " + " ".join(draw.choices(words, k=draw.randint(1, 5)))
            row = {"id": f"s{number:02d}", "prompt": prompt, "completion": answer}
            row["pair"] = number // 2
            file.write(json.dumps(row) + "\n")
    return SftConfig(
        model="tiny",
        data=str(tmp_path / "train.jsonl"),
        layout="packed",
        pack_max_len=128,
        token_budget=128,
        step_size=4,
        epochs=2,
        lr=1e-3,
        warmup_steps=2,
        eval_fraction=0.1,
        run_dir=tmp_path / "one",
    )


def elsewhere(config: SftConfig, name: str, **changes: Any) -> SftConfig:
    return dataclasses.replace(config, run_dir=config.run_dir.parent / name, **changes)


def launched(ranks: int, folder: Path, *runs: tuple[str, SftConfig]) -> "subprocess.Popen[str]":
    """Ranks that do these runs in turn: ("start" or "resume", settings)."""
    (folder / "driver.py").write_text(DRIVER)
    arguments = []
    for number, (how, config) in enumerate(runs):
        file = folder / f"settings{ranks}-{number}.toml"
        file.write_text(config.to_toml())
        arguments.append(f"{how}={free_port()}={file}")
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environ = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    return subprocess.Popen(
        [sys.executable, *launch, str(folder / "driver.py"), *arguments],
        env={**environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def torchrun(ranks: int, folder: Path, *runs: tuple[str, SftConfig]) -> str:
    """Do these runs on some ranks; what they said."""
    process = launched(ranks, folder, *runs)
    try:
        out, err = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        # torchrun takes its ranks with it.
        process.terminate()
        out, err = process.communicate()
    assert process.returncode == 0, out + err[-4000:]
    return out


def records(run: Path, kind: str = "step") -> list[dict[str, Any]]:
    """The last record of each step."""
    events = (event for event in read_events(run / "events.jsonl") if event.kind == kind)
    found = {event.fields["step"]: dict(event.fields) for event in events}
    return [found[step] for step in sorted(found)]


def same_run(a: Path, b: Path) -> None:
    """The same steps over the same tokens, with the same losses but for rounding."""
    for name in ("step", "epoch", "first", "tokens", "loss_tokens", "lr"):
        assert [r[name] for r in records(a)] == [r[name] for r in records(b)], name
    for name, tolerance in (("loss", 1e-5), ("grad_norm", 1e-3)):
        one, other = ([r[name] for r in records(run)] for run in (a, b))
        assert np.allclose(one, other, atol=tolerance, rtol=0), name
    one, other = ([r["loss"] for r in records(run, "eval")] for run in (a, b))
    assert len(one) == 1
    assert np.allclose(one, other, atol=1e-5, rtol=0)


def trained(run: Path) -> Counter[str]:
    """How often each sample was trained on, by the steps in the log."""
    plan = BatchPlan.load(run / "plan")
    # Of groups a plan lists its epochs, of others it has any number.
    epochs = 9 if plan.order.kind == "virtual" else None
    step = {(s.epoch, s.first): s for s in plan.iter_steps(epochs=epochs)}
    done = [step[record["epoch"], record["first"]] for record in records(run)]
    return Counter(name for s in done for batch in s.microbatches for name in batch.samples)


def test_two_ranks_are_one_rank_and_one_goes_on_where_two_stopped(config: SftConfig) -> None:
    folder = config.run_dir.parent
    whole = train_sft(config)
    two, stopped = elsewhere(config, "two"), elsewhere(config, "stopped", stop_after=2)
    # Costs of a column that holds integers.
    by = {"group_by": "pair", "cost_column": "pair", "segment_multiple": 4, "token_budget": 256}
    paired = elsewhere(config, "paired", **by)
    train_sft(paired)
    apart = elsewhere(config, "apart", **by, stop_after=2)
    torchrun(2, folder, ("start", two), ("start", stopped), ("start", apart))
    rest = train_sft(dataclasses.replace(stopped, stop_after=0), resume=True)
    train_sft(dataclasses.replace(apart, stop_after=0), resume=True)
    start, *_ = read_events(two.run_dir / "events.jsonl")

    assert whole.step >= 4
    assert start.fields["world"] == 2
    assert json.loads((two.run_dir / "stamp.json").read_text())["world"] == 2
    # An odd number of microbatches: the second rank has had a filler.
    assert BatchPlan.load(two.run_dir / "plan").num_microbatches() % 2 == 1
    same_run(config.run_dir, two.run_dir)
    assert rest.finished
    same_run(config.run_dir, stopped.run_dir)
    assert set(trained(stopped.run_dir).values()) == {2}
    same_run(paired.run_dir, apart.run_dir)
    assert set(trained(apart.run_dir).values()) == {2}
    one, other = (
        load_file(max((run / "checkpoints").iterdir()) / "arrays.safetensors")
        for run in (config.run_dir, two.run_dir)
    )
    weights = [name for name in one if name.startswith("model/")]
    assert all(torch.allclose(one[name], other[name], atol=1e-4) for name in weights)


@pytest.mark.slow
def test_sharded_weights_give_the_same_run_and_one_rank_goes_on_from_them(
    config: SftConfig,
) -> None:
    folder = config.run_dir.parent
    train_sft(config)
    sharded = elsewhere(config, "sharded", fsdp=True)
    stopped = elsewhere(config, "stopped", fsdp=True, stop_after=2)
    adapters = elsewhere(config, "adapters", lora_rank=2)
    torchrun(
        2,
        folder,
        ("start", sharded),
        ("start", stopped),
        ("start", elsewhere(adapters, "sharded_adapters", fsdp=True)),
    )
    train_sft(dataclasses.replace(stopped, stop_after=0, fsdp=False), resume=True)
    train_sft(adapters)

    same_run(config.run_dir, sharded.run_dir)
    same_run(config.run_dir, stopped.run_dir)
    same_run(adapters.run_dir, folder / "sharded_adapters")
    own, whole = (
        load_file(run / "model" / "model.safetensors") for run in (sharded.run_dir, config.run_dir)
    )
    assert own.keys() == whole.keys()
    assert all(torch.allclose(own[name], whole[name], atol=1e-4) for name in own)


@pytest.mark.slow
def test_three_ranks_go_on_where_two_stopped_and_two_shard_what_one_began(
    config: SftConfig,
) -> None:
    folder = config.run_dir.parent
    train_sft(config)
    stopped = elsewhere(config, "stopped", stop_after=1)
    alone = elsewhere(config, "alone", stop_after=1)
    train_sft(alone)
    torchrun(
        2,
        folder,
        ("start", stopped),
        ("resume", dataclasses.replace(alone, stop_after=0, fsdp=True)),
    )
    torchrun(3, folder, ("resume", dataclasses.replace(stopped, stop_after=0)))

    same_run(config.run_dir, stopped.run_dir)
    same_run(config.run_dir, alone.run_dir)
    assert set(trained(stopped.run_dir).values()) == {2}


@pytest.mark.slow
def test_accumulation_on_ranks_is_that_on_one(config: SftConfig) -> None:
    folder = config.run_dir.parent
    config = dataclasses.replace(config, step_size=0, grad_accum=4)
    train_sft(config)
    two = elsewhere(config, "two", grad_accum=2, activation_checkpointing=True)
    padded = elsewhere(config, "padded", layout="sorted", pack_max_len=2048, grad_accum=2)
    torchrun(2, folder, ("start", two), ("start", padded))
    alone = elsewhere(config, "padded_alone", layout="sorted", pack_max_len=2048)
    train_sft(alone)

    same_run(config.run_dir, two.run_dir)
    same_run(alone.run_dir, padded.run_dir)


@pytest.mark.slow
def test_a_plan_whose_steps_grow_with_the_ranks_is_trained_to_its_end(config: SftConfig) -> None:
    """One microbatch a rank: after a change of ranks, the steps that are left are others."""
    folder = config.run_dir.parent
    lengths = build_lengths(config.data[0], "bytes", folder / "lengths.jsonl").cache.lengths
    built = BatchingConfig(layout="packed", pack_max_length=128, token_budget=128)
    plan = BatchPlanBuilder(lengths, built).build(2)
    plan.save(folder / "plan")
    # What the plan holds is left at its defaults.
    given = dataclasses.replace(
        config,
        batchplan=folder / "plan",
        **{name: getattr(SftConfig(), name) for name in ("token_budget", "pack_max_len")},
        step_size=0,
        eval_fraction=0.0,
        layout="auto",
    )
    down = elsewhere(given, "down", stop_after=2)
    up = elsewhere(given, "up", stop_after=3)
    train_sft(up)
    said = torchrun(2, folder, ("start", down), ("resume", dataclasses.replace(up, stop_after=0)))
    rest = train_sft(dataclasses.replace(down, stop_after=0), resume=True)
    count = plan.num_microbatches()

    for run, before, after in ((down.run_dir, 2, 1), (up.run_dir, 1, 2)):
        last = records(run)[-1]
        assert (last["epoch"], (run / "model" / "config.json").is_file()) == (1, True), run
        tokens = sum(record["tokens"] for record in records(run))
        assert tokens == 2 * plan.useful_tokens(0), (before, after)
    assert rest.finished
    assert rest.step == 2 + (count - 4) + count
    assert f"resume up {3 + (count - 3 + 1) // 2 + (count + 1) // 2} True" in said


@pytest.mark.slow
def test_ctrl_c_under_torchrun_saves(config: SftConfig) -> None:
    folder = config.run_dir.parent
    long = dataclasses.replace(config, epochs=200)
    process = launched(2, folder, ("start", long))
    log = long.run_dir / "events.jsonl"
    end = time.monotonic() + PATIENCE_S
    while not (log.exists() and log.read_bytes().count(b'"kind":"step"') >= 2):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.05)
    # As a terminal does it: to everybody in the group.
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=PATIENCE_S)
    step = len(records(long.run_dir))

    assert (long.run_dir / "checkpoints" / f"step_{step:08d}").is_dir()
    result = train_sft(dataclasses.replace(long, max_steps=step + 1), resume=True)
    assert result.step == step + 1


@pytest.mark.slow
def test_a_signal_that_reaches_one_rank_stops_all_of_them_in_one_numbered_folder(
    config: SftConfig,
) -> None:
    folder = config.run_dir.parent
    (folder / "many-1" / "model").mkdir(parents=True)
    long = dataclasses.replace(config, epochs=200, run_dir=folder / "many-{n}")
    process = launched(2, folder, ("start", long))
    log, end = folder / "many-2" / "events.jsonl", time.monotonic() + PATIENCE_S
    while not (log.exists() and log.read_bytes().count(b'"kind":"step"') >= 2):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.05)
    os.kill(int((folder / "rank1").read_text()), signal.SIGUSR1)
    out, err = process.communicate(timeout=PATIENCE_S)
    step = len(records(folder / "many-2"))

    assert process.returncode == 0, err
    assert sorted(out.splitlines()) == [f"start many-2 {step} False SIGUSR1"] * 2
    assert (folder / "many-2" / "checkpoints" / f"step_{step:08d}").is_dir()
    assert not (folder / "many-3").exists()


def test_a_rank_that_waits_says_for_whom_and_in_no_collective(
    config: SftConfig, pool: RankPool
) -> None:
    first, second = pool.train(2, config, until_said=True)
    assert first.finished
    assert second.finished
    assert (first.step, first.said) == (second.step, [])
    (sentence,) = second.said
    assert sentence.startswith(f"waiting for rank 0 (process {pool.pids()[0]} on ")
    assert sentence.endswith(("prepares the data", "of 34 rows"))
    assert not (config.run_dir / ".first-rank.json").exists()


@pytest.mark.slow
def test_ranks_wait_for_longer_than_a_collective_would(config: SftConfig, pool: RankPool) -> None:
    replies = pool.train(2, config, slow=45, limit=20)
    assert [reply.finished for reply in replies] == [True, True]


def test_what_the_first_rank_refuses_ends_the_others_with_its_reason(
    config: SftConfig, pool: RankPool
) -> None:
    data = Path(config.data[0])
    rows = data.read_text()
    data.write_text(rows + '{"prompt": "p"}\n')
    first, second = pool.train(2, config)
    assert first.error == "BadRow"
    assert second.error == "BatchwrightError"
    assert second.message == f"rank 0 failed before training began: {first.message}"
    # And the same command works when the row is mended, whatever the refused one left.
    data.write_text(rows)
    assert [reply.finished for reply in pool.train(2, config)] == [True, True]


@pytest.mark.parametrize(
    "which", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
def test_a_first_rank_that_dies_or_hangs_while_it_tokenises_is_noticed(
    config: SftConfig, pool: RankPool, which: signal.Signals
) -> None:
    _, second = pool.train(2, config, at="preparing", which=int(which), silent=2)
    assert second.error == "BatchwrightError"
    assert "gave no sign for 2 s while the others waited for it" in second.message
    assert f"process {pool.pids()[0]} on " in second.message
