"""Online runs: what is trained, how far ahead the stream may be, and exact resume."""

import asyncio
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from batchwright.calls.simulator import Simulator
from batchwright.data.tokenizers import Tokenizer, load_tokenizer
from batchwright.errors import BadRow, ConfigError, Mismatch, NoServer, OversizedSample
from batchwright.events import read_events
from batchwright.streaming import MockGymStream, ReplayBuffer, StreamMetrics, StreamSample
from batchwright.train.sft.config import SftConfig
from batchwright.train.sft.loop import train_sft

torch.set_num_threads(1)
COMMAND = Path(sys.executable).parent / "batchwright"


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def config(tmp_path: Path) -> SftConfig:
    """Eight steps over four windows."""
    return SftConfig(
        model="tiny",
        online=True,
        online_source="mock",
        max_steps=8,
        buffer_size=40,
        online_window=2,
        online_fresh=20,
        online_min_samples=10,
        token_budget=256,
        curriculum="success-rate",
        lr=1e-3,
        run_dir=tmp_path / "run",
    )


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [dict(e.fields) for e in read_events(run / "events.jsonl") if e.kind == kind]


def trained(run: Path) -> list[dict[str, Any]]:
    """What each step and each window did, without how long it took; the last record of each."""
    timed = ("seconds", "tokens_per_s", "data_wait_s", "waited_for")
    steps = {e["step"]: e for e in events(run, "step")}
    windows = {e["window"]: e for e in events(run, "window")}
    listed = [steps[k] for k in sorted(steps)] + [windows[k] for k in sorted(windows)]
    return [{k: v for k, v in event.items() if k not in timed} for event in listed]


def arrays(run: Path) -> dict[str, torch.Tensor]:
    folder = max((run / "checkpoints").glob("step_*"))
    found: dict[str, torch.Tensor] = load_file(folder / "arrays.safetensors")
    return found


def same_end(a: Path, b: Path) -> bool:
    """Whether two runs came to the same weights, window and buffer over the same steps."""
    one, other = arrays(a), arrays(b)
    held, other_held = (ReplayBuffer.load(run / "replay").to_dict() for run in (a, b))
    return (
        trained(a) == trained(b)
        and one.keys() == other.keys()
        and all(torch.equal(one[name], other[name]) for name in one)
        and held == other_held
    )


class Solvable(MockGymStream):
    """A mock gym whose episodes succeed up to a difficulty, and which counts what it has made."""

    made = 0

    def __init__(self, tokenizer: Tokenizer, limit: float = 0.45, **settings: Any) -> None:
        super().__init__(tokenizer, num_episodes=10_000, **settings)
        self.limit = limit

    def episode(self, number: int) -> list[StreamSample]:
        samples = super().episode(number)
        solved = (samples[0].difficulty or 0.0) < self.limit
        self.made += len(samples)
        return [sample.model_copy(update={"success": solved}) for sample in samples]


class Broken(MockGymStream):
    """A mock gym that goes down after some samples."""

    def __init__(self, tokenizer: Tokenizer, after: int) -> None:
        super().__init__(tokenizer, num_episodes=2**31)
        self.after = after

    async def __aiter__(self) -> AsyncIterator[StreamSample]:
        for sample in self:
            if self._position > self.after:
                raise NoServer("the gym is down; start it")
            yield sample


class Silent:
    """A stream that never gives a sample."""

    metrics = StreamMetrics()

    async def __aiter__(self) -> AsyncIterator[StreamSample]:
        await asyncio.Event().wait()
        yield Any

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert state == {}


def mock(**settings: Any) -> Callable[[Tokenizer], MockGymStream]:
    return lambda tokenizer: MockGymStream(tokenizer, num_episodes=2**31, **settings)


def test_a_run_that_stops_after_every_step_ends_as_one_that_does_not(config: SftConfig) -> None:
    def stream(tokenizer: Tokenizer) -> MockGymStream:
        return Solvable(tokenizer, limit=0.35)

    whole = train_sft(config, stream=stream)
    stopped = dataclasses.replace(config, run_dir=config.run_dir.with_name("stopped"), stop_after=1)
    result = train_sft(stopped, stream=stream)
    while not result.finished:
        result = train_sft(stopped, resume=True, stream=stream)

    assert whole.finished
    assert whole.step == result.step == 8
    assert same_end(config.run_dir, stopped.run_dir)
    windows = events(config.run_dir, "window")
    assert windows[-1]["evicted"] > 0, "a full buffer is tested too"
    assert len({tuple(window["range"]) for window in windows}) > 1, "and a range that moves"


@pytest.mark.parametrize("more", [{"pack": True, "pack_max_len": 128}, {"bucket_edges": "32,64"}])
def test_other_layouts_train_and_resume_too(config: SftConfig, more: dict[str, Any]) -> None:
    config = dataclasses.replace(config, max_steps=4, grad_accum=2, online_window=3, **more)
    train_sft(config)
    stopped = dataclasses.replace(config, run_dir=config.run_dir.with_name("stopped"))
    train_sft(dataclasses.replace(stopped, stop_after=3))
    train_sft(stopped, resume=True)

    assert same_end(config.run_dir, stopped.run_dir)


def test_a_killed_run_resumes_to_the_same_end(config: SftConfig, tmp_path: Path) -> None:
    train_sft(config)
    line = (
        "train sft --model tiny --online --online-source mock --max-steps 8 --buffer-size 40 "
        "--online-window 2 --online-fresh 20 --online-min-samples 10 --token-budget 256 "
        "--curriculum success-rate --lr 1e-3 --run-dir killed --save-every 1 --quiet"
    )
    killed = tmp_path / "killed"
    process = subprocess.Popen([COMMAND, *line.split()], cwd=tmp_path, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 600
        while not (killed / "checkpoints/step_00000003").is_dir():
            assert process.poll() is None, "it ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    result = train_sft(SftConfig.of_run(killed), resume=True)

    assert result.finished
    assert same_end(config.run_dir, killed)


def test_a_damaged_checkpoint_is_passed_over_with_its_buffer(config: SftConfig) -> None:
    config = dataclasses.replace(config, save_every=1)
    train_sft(config)
    hurt = config.run_dir.with_name("hurt")
    train_sft(dataclasses.replace(config, run_dir=hurt, stop_after=6))
    newest = max((hurt / "checkpoints").glob("step_*")) / "arrays.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    train_sft(dataclasses.replace(config, run_dir=hurt), resume=True)

    assert "step_00000006" in events(hurt, "resume")[0]["passed_over"][0]
    assert same_end(config.run_dir, hurt)


def test_a_foreign_replay_folder_is_refused(config: SftConfig) -> None:
    first = dataclasses.replace(config, stop_after=1)
    train_sft(first)
    other = dataclasses.replace(first, run_dir=config.run_dir.with_name("other"), seed=7)
    train_sft(other)
    shutil.rmtree(config.run_dir / "replay")
    shutil.copytree(other.run_dir / "replay", config.run_dir / "replay")

    with pytest.raises(Mismatch, match="not the one that the checkpoint names"):
        train_sft(config, resume=True)


def test_a_gym_that_goes_down_leaves_a_run_to_resume(config: SftConfig) -> None:
    config = dataclasses.replace(config, curriculum="none")
    train_sft(config, stream=mock())
    down = dataclasses.replace(config, run_dir=config.run_dir.with_name("down"))
    with pytest.raises(NoServer, match="the gym is down"):
        train_sft(down, stream=lambda tokenizer: Broken(tokenizer, after=50))
    assert events(down.run_dir, "stop")[0]["why"] == "no samples"
    train_sft(down, resume=True, stream=mock())

    assert same_end(config.run_dir, down.run_dir)


def test_ctrl_c_is_heard_while_samples_are_waited_for(config: SftConfig) -> None:
    config = dataclasses.replace(config, curriculum="none")
    press = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    press.start()
    result = train_sft(config, stream=lambda _: Silent())
    press.join()

    assert (result.finished, result.step) == (False, 0)
    assert (config.run_dir / "checkpoints/step_00000000").is_dir()


def test_the_stream_is_never_further_ahead_than_one_request(config: SftConfig) -> None:
    stream = Solvable(load_tokenizer("bytes"), limit=1.0)
    ahead = []
    train_sft(
        dataclasses.replace(config, max_steps=6),
        stream=lambda _: stream,
        progress=lambda *_: ahead.append(stream.made - stream.metrics.samples_produced),
    )
    added = [window["added"] for window in events(config.run_dir, "window")]

    assert added == [20, 40, 60]
    assert stream.made <= added[-1] + 20 + stream.steps_per_episode
    assert max(ahead) <= stream.steps_per_episode


def test_the_curriculum_settles_where_episodes_are_solved_half_the_time(config: SftConfig) -> None:
    config = dataclasses.replace(config, max_steps=40, online_window=2, buffer_size=1000)
    train_sft(config, stream=lambda tokenizer: Solvable(tokenizer, limit=0.45))
    ranges = [window["range"] for window in events(config.run_dir, "window")]

    assert ranges[0] == [0.1, 0.3], "the easiest were all solved"
    assert all(0.2 <= low <= 0.5 for low, _ in ranges[4:])
    assert all(high - low == pytest.approx(0.2) for low, high in ranges)


def test_only_solved_episodes_are_trained_on_and_the_others_are_counted(config: SftConfig) -> None:
    config = dataclasses.replace(config, max_steps=2, curriculum="none", online_fresh=40)
    for policy in ("success", "all"):
        run = config.run_dir.with_name(policy)
        train_sft(
            dataclasses.replace(config, run_dir=run, online_train_on=policy),
            stream=lambda tokenizer: Solvable(tokenizer, limit=0.5),
        )
    solved, every = (events(config.run_dir.with_name(p), "window")[0] for p in ("success", "all"))

    assert solved["failed"] == every["failed"] > 0
    assert solved["trained_on"] == solved["buffer"] - solved["failed"]
    assert every["trained_on"] == every["buffer"] == 40
    assert {part["success_rate"] for part in every["by_difficulty"]} == {0.0, 1.0}


def test_a_gym_where_nothing_is_solved_is_an_error_not_an_endless_wait(config: SftConfig) -> None:
    with pytest.raises(ConfigError, match=r"0 of its 40 samples .*--online-train-on all"):
        train_sft(
            dataclasses.replace(config, curriculum="none"),
            stream=lambda tokenizer: Solvable(tokenizer, limit=0.0),
        )


def test_a_stream_that_ends_ends_the_run(config: SftConfig) -> None:
    result = train_sft(
        dataclasses.replace(config, curriculum="none"),
        stream=lambda tokenizer: MockGymStream(tokenizer, num_episodes=8),
    )

    assert result.finished
    assert result.step == 4
    assert events(config.run_dir, "stop")[0]["why"] == "stream ended"
    assert (config.run_dir / "model/config.json").exists()


def test_rows_fill_the_buffer_first_and_are_always_trained_on(
    config: SftConfig, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"otter {n}"}) + "\n" for n in range(15)))
    config = dataclasses.replace(config, data=str(rows), max_steps=1, curriculum="none")
    train_sft(config, stream=lambda tokenizer: Solvable(tokenizer, limit=0.0))
    (window,) = events(config.run_dir, "window")

    assert (window["trained_on"], window["unjudged"], window["failed"]) == (15, 15, 20)
    few = dataclasses.replace(config, buffer_size=10, run_dir=tmp_path / "few")
    with pytest.raises(ConfigError, match="15 rows, more than --buffer-size 10"):
        train_sft(few)
    assert not (tmp_path / "few/config.toml").exists()
    rows.write_text(json.dumps({"text": "o" * 9000}) + "\n")
    with pytest.raises(OversizedSample, match="has 9,001 tokens, a row takes 256"):
        train_sft(few)


def test_held_out_rows_are_evaluated_on(config: SftConfig, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "2 + 2 = ", "completion": "4"}\n')
    result = train_sft(dataclasses.replace(config, max_steps=2, eval_data=str(rows), eval_every=1))

    assert result.eval_loss is not None
    assert len(events(config.run_dir, "eval")) == 2


def test_samples_that_are_too_long_follow_the_overflow_policy(config: SftConfig) -> None:
    config = dataclasses.replace(config, token_budget=24, max_steps=1, curriculum="none")
    for resume in (False, True):
        with pytest.raises(OversizedSample, match=r"'mock_0000_0' has 37 .*choose --overflow"):
            train_sft(config, resume=resume)
    skips = dataclasses.replace(config, overflow="skip", run_dir=config.run_dir.with_name("skips"))
    assert (train_sft(skips).online or {})["too_long"] > 0
    cut = {"overflow": "truncate", "grad_accum": 8, "online_window": 8}
    cuts = dataclasses.replace(config, **cut, run_dir=config.run_dir.with_name("cut"))
    assert (train_sft(cuts).online or {})["too_long"] == 0


def test_tokens_of_another_tokenizer_are_refused(config: SftConfig) -> None:
    with pytest.raises(BadRow, match="make the stream with the tokenizer of the model"):
        train_sft(
            dataclasses.replace(config, curriculum="none"),
            stream=lambda _: MockGymStream("gpt2", num_episodes=100),
        )


def test_a_curriculum_needs_a_stream_that_can_be_aimed(config: SftConfig) -> None:
    with pytest.raises(ConfigError, match="needs a stream with a difficulty_range"):
        train_sft(config, stream=lambda _: Silent())


def test_several_ranks_are_refused(config: SftConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="one rank, got 2"):
        train_sft(config)


def test_a_run_without_max_steps_goes_on_until_it_is_stopped(config: SftConfig) -> None:
    endless = dataclasses.replace(config, max_steps=0, stop_after=3)
    result = train_sft(endless)
    rates = {event["lr"] for event in events(config.run_dir, "step")}

    assert (result.finished, result.step) == (False, 3)
    assert rates == {config.lr}
    assert (config.run_dir / "model/config.json").exists()
    assert train_sft(endless, resume=True).step == 6
    assert train_sft(dataclasses.replace(endless, stop_after=0, max_steps=7), resume=True).finished


@pytest.fixture
def gym() -> Iterator[Callable[[], int]]:
    """Starts a gym server each time it is called; its port."""
    with contextlib.ExitStack() as servers:

        def start() -> int:
            server = servers.enter_context(
                subprocess.Popen(
                    [COMMAND, "gym", "serve", "--port", "0"], stdout=subprocess.PIPE, text=True
                )
            )
            servers.callback(server.terminate)
            assert server.stdout is not None
            return int(server.stdout.readline().rpartition(":")[2])

        yield start


def test_a_run_on_a_gym_server_resumes_on_another_one(
    config: SftConfig, gym: Callable[[], int]
) -> None:
    config = dataclasses.replace(
        config,
        online_source="gym",
        gym_port=gym(),
        gym_connections=3,
        token_budget=1024,
        online_window=1,
        max_steps=4,
    )
    train_sft(config)
    other = dataclasses.replace(config, run_dir=config.run_dir.with_name("other"), stop_after=2)
    train_sft(other)
    moved = dataclasses.replace(other, gym_port=gym(), stop_after=0)
    result = train_sft(moved, resume=True)

    # Its samples carry the time, so the buffers differ; what was trained does not.
    assert result.finished
    assert trained(config.run_dir) == trained(other.run_dir)
    assert events(other.run_dir, "resume")[0]["changed"] == {"gym_port": moved.gym_port}
    window = events(config.run_dir, "window")[-1]
    assert window["success_rate"] == 1.0, "the hints of the server solve its puzzles"
    assert window["range"][0] > 0.0


def test_the_line_of_the_document_trains_until_ctrl_c(
    tmp_path: Path, gym: Callable[[], int]
) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "2 + 2 = ", "completion": "4"}\n')
    line = (
        "train sft --model tiny --data train.jsonl --online --gym-host localhost "
        f"--gym-port {gym()} --token-budget 1024"
    )
    process = subprocess.Popen(
        [COMMAND, *line.split()], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    try:
        log, deadline = tmp_path / "runs/sft-1/events.jsonl", time.monotonic() + 600
        while not (log.exists() and '"kind":"step"' in log.read_text()):
            assert process.poll() is None, "it ended by itself"
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()

    assert process.returncode == 0
    assert "stopped and saved; resume with: batchwright train sft --resume runs/sft-1" in out
    assert (tmp_path / "runs/sft-1/model/config.json").exists()
    assert events(tmp_path / "runs/sft-1", "window")[0]["unjudged"] == 1, "the row of --data"


def test_no_gym_server_is_one_sentence_and_a_run_to_resume(
    config: SftConfig, gym: Callable[[], int]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        nobody = taken.getsockname()[1]
        config = dataclasses.replace(
            config, online_source="gym", gym_port=nobody, max_steps=1, token_budget=1024
        )
        with pytest.raises(NoServer, match="no gym at localhost"):
            train_sft(config)
    assert train_sft(dataclasses.replace(config, gym_port=gym()), resume=True).finished


def test_tasks_of_reasoning_gym_are_learned_and_resumed(config: SftConfig) -> None:
    pytest.importorskip("reasoning_gym", reason="pip install 'batchwright[gym]'")
    config = dataclasses.replace(
        config,
        online_source="reasoning-gym",
        online_tasks="chain_sum, leg_counting",
        token_budget=1024,
        max_steps=6,
    )
    train_sft(config)
    stopped = dataclasses.replace(config, run_dir=config.run_dir.with_name("stopped"), stop_after=3)
    train_sft(stopped)
    train_sft(dataclasses.replace(stopped, stop_after=0), resume=True)

    assert same_end(config.run_dir, stopped.run_dir)
    assert events(config.run_dir, "window")[-1]["range"] == pytest.approx([0.3, 0.5])


def test_a_served_model_plays_reasoning_gym(config: SftConfig) -> None:
    pytest.importorskip("reasoning_gym", reason="pip install 'batchwright[gym]'")
    with Simulator().running() as url:
        config = dataclasses.replace(
            config,
            online_source="reasoning-gym",
            online_tasks="chain_sum",
            online_policy=f"{url}#sim",
            online_train_on="all",
            token_budget=4096,
            max_steps=2,
        )
        result = train_sft(config)
    (window,) = events(config.run_dir, "window")

    assert result.finished
    assert window["failed"] == window["buffer"] == 20, "a simulated model cannot add"
    assert window["range"] == [0.0, 0.2]


BASE = "train sft --model tiny --online --online-source mock --max-steps 3"
REFUSED = {
    f"{BASE} --batchplan plans": "--batchplan has no effect with --online",
    f"{BASE} --epochs 0": "--epochs has no effect with --online",
    f"{BASE} --eval-fraction 0.1": "--eval-fraction has no effect with --online",
    f"{BASE} --pack --pack-mode optimal": "--pack-mode has no effect with --online",
    f"{BASE} --gym-port 8023": "--gym-port has no effect with --online-source mock",
    f"{BASE} --online-policy hint": "--online-policy has no effect with --online-source mock",
    f"{BASE} --difficulty-min 0.9 --difficulty-max 0.1": "--difficulty-min must be at most",
    f"{BASE} --buffer-size 0": "--buffer-size must be at least 1, got 0",
    f"{BASE} --dry-run": "an --online run cannot be predicted",
    "train sft --model tiny --online --schedule cosine": "--schedule cosine needs the number of",
    "train sft --online --max-steps 3": "no --model",
    "train sft --model tiny --online --max-steps 3 --online-source reasoning-gym": (
        "no --online-tasks"
    ),
    "train sft --model tiny --data x.jsonl --buffer-size 100000": (
        "--buffer-size has no effect without --online"
    ),
    "train sft --model tiny --data x.jsonl --no-pack --pack-max-len 2048": (
        "--pack-max-len is for the packed layout, got sorted"
    ),
}


@pytest.mark.parametrize("line", REFUSED)
def test_flags_without_effect_are_refused_by_name(call: Any, tmp_path: Path, line: str) -> None:
    outcome = call(line, tmp_path)

    assert outcome.code == 1
    assert REFUSED[line] in " ".join(outcome.err.split())
    assert not (tmp_path / "runs").exists()
