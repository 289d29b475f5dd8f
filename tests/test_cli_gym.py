"""`batchwright gym`: the document's commands, what they save, and how they end."""

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from batchwright.streaming import EpisodeStatus, ReplayBuffer, SampleSource

sys.path.insert(0, str(Path(__file__).parent))
from gym_proxy import COMMAND, proxy, served

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    with served() as (_, port):
        yield port


def test_the_commands_of_the_document_work_on_a_bare_machine(
    call: Run, server: int, tmp_path: Path
) -> None:
    mock = call("gym run -t gpt2 --mock --num-episodes 10", tmp_path)
    assert (mock.code, mock.err) == (0, "")
    assert mock.out.startswith("10 episodes: 7 solved, 3 failed, 0 timed out, 0 errors\n")

    played = call(f"gym run -t gpt2 --host localhost --port {server}", tmp_path)
    assert (played.code, played.err) == (0, "")
    assert played.out.startswith("10 episodes: 10 solved, 0 failed, 0 timed out, 0 errors\n")
    assert "not saved (no --output)" in played.out

    saved = call("gym run -t gpt2 --mock --output buffer.json", tmp_path)
    assert saved.out.splitlines()[-1] == "buffer: 50 samples, 0 evicted, saved to buffer.json"
    buffer = ReplayBuffer.load(tmp_path / "buffer.json")
    assert len(buffer) == 50
    assert {sample.source for sample in buffer} == {SampleSource.SYNTHETIC}

    info = call("gym info", tmp_path)
    assert info.code == 0
    assert re.search(r"^port +8023$", info.out, re.MULTILINE)
    assert re.search(r"^transports +telnet, tcp, websocket$", info.out, re.MULTILINE)


def test_info_as_json_has_the_defaults_and_the_puzzles(call: Run, tmp_path: Path) -> None:
    data = call("gym info --format json", tmp_path).data

    assert (data["config"]["host"], data["config"]["port"]) == ("localhost", 8023)
    assert data["buffer"]["max_size"] == 100_000
    wait = (data["config"]["connect_timeout"], data["config"]["read_timeout"])
    words = " ".join(call("gym run --help", tmp_path).out.replace("│", " ").split())
    assert "Seconds for a connection ({:g}), and for each reply ({:g}).".format(*wait) in words
    assert ["guess", "lights", "sort"] in data["servers"].values()


@pytest.mark.parametrize("name", ["buffer.json", "buffer.safetensors", "folder"])
def test_every_form_of_buffer_holds_what_the_server_earned(
    call: Run, server: int, tmp_path: Path, name: str
) -> None:
    line = (
        f"gym run -t bytes --host 127.0.0.1 --port {server} --transport tcp --output-mode agent "
        f"--buffer-size 20 --num-episodes 8 --steps-per-episode 9 --difficulty-min 0.2 "
        f"--difficulty-max 0.6 --timeout 5 --retries 1 --seed 3 --connections 3 --puzzle sort "
        f"--output {name} --format json"
    )

    data = call(line, tmp_path).data

    buffer = ReplayBuffer.load(tmp_path / name)
    assert data["buffer"]["size"] == len(buffer) == 20
    assert data["metrics"]["samples_produced"] == 20 + data["buffer"]["evicted"]
    assert data["episodes"] == data["success"] + data["failure"] == 8
    assert sum(part["episodes"] for part in data["by_difficulty"]) == 8
    for sample in buffer:
        assert sample.source is SampleSource.GYM
        assert 0.2 <= (sample.difficulty or 0.0) <= 0.6
        assert sample.dataset_id == "sort"
        assert (sample.total_steps or 99) <= 9


def test_max_samples_is_exact_and_needs_no_number_of_episodes(
    call: Run, server: int, tmp_path: Path
) -> None:
    for line in (f"--port {server} --host 127.0.0.1", "--mock"):
        ended = call(f"gym run -t bytes {line} --max-samples 57 --format json", tmp_path)
        assert ended.data["metrics"]["samples_produced"] == 57


def test_the_same_seed_earns_the_same_samples(call: Run, server: int, tmp_path: Path) -> None:
    for name, connections in (("a.json", 1), ("b.json", 6)):
        line = f"gym run -t bytes --host 127.0.0.1 --port {server} --policy random --seed 5"
        call(f"{line} --connections {connections} -o {name}", tmp_path)
    first, second = (
        [s.model_dump(exclude={"timestamp"}) for s in ReplayBuffer.load(tmp_path / name)]
        for name in ("a.json", "b.json")
    )

    assert first == second
    assert len(first) > 10


def test_a_simulated_model_plays_and_fails(call: Run, server: int, tmp_path: Path) -> None:
    line = f"gym run -t bytes --host 127.0.0.1 --port {server} --policy sim --num-episodes 2"

    data = call(f"{line} --steps-per-episode 2 --format json", tmp_path).data

    assert (data["episodes"], data["failure"]) == (2, 2)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--port 1 --retries 0", "no gym at localhost:1"),
        ("--port 1 --retries 0", "start one with: batchwright gym serve --port 1"),
        ("--port 0", "port=0"),
        ("--mock --policy random", "--policy is for a server only; leave it out"),
        ("--mock --host localhost", "--host is for a server only; leave it out"),
        ("--mock --port 8023", "--port is for a server only; leave it out"),
        ("--mock --transport tcp", "--transport is for a server only; leave it out"),
        ("--mock --output-mode json", "--output-mode is for a server only; leave it out"),
        ("--mock --timeout 1", "--timeout is for a server only; leave it out"),
        ("--mock --retries 1", "--retries is for a server only; leave it out"),
        ("--success-rate 0.5", "--success-rate is for --mock only; leave it out"),
        ("--mock --success-rate 1.5", "--success-rate must be from 0 to 1, got 1.5"),
        ("--mock --num-episodes 0", "--num-episodes must be at least 1, got 0"),
        (
            "--mock --difficulty-min 0.7 --difficulty-max 0.2",
            "--difficulty-max must ascend",
        ),
        ("--mock --buffer-size 0", "--buffer-size must be at least 1, got 0"),
        ("--policy nonsense", "--policy must be hint, random or a model: cannot parse the model"),
        ("--host no.such.invalid --retries 0", "; check the host's name, no.such.invalid"),
        ("--mock -o no/such/buffer.json", "the folder no/such of --output is not there"),
        ("--mock -t nonsense", "nonsense"),
    ],
)
def test_what_cannot_be_run_is_one_sentence(
    call: Run, tmp_path: Path, words: str, sentence: str
) -> None:
    tokenizer = "" if "-t" in words.split() else "-t bytes"

    ended = call(f"gym run {tokenizer} {words}", tmp_path)

    assert (ended.code, ended.out) == (1, "")
    assert sentence in ended.err
    assert ended.err.count("\n") == 1


def test_a_transport_that_is_not_one_is_wrong_usage(call: Run, tmp_path: Path) -> None:
    assert call("gym run -t bytes --transport http", tmp_path).code == 2
    assert call("gym run -t bytes --output-mode binary", tmp_path).code == 2


def test_a_puzzle_that_is_not_there_ends_before_anything_is_saved(
    call: Run, server: int, tmp_path: Path
) -> None:
    line = f"gym run -t bytes --host 127.0.0.1 --port {server} --puzzle chess -o buffer.json"

    ended = call(line, tmp_path)

    assert ended.code == 1
    assert "does not know the puzzle chess; known: guess, lights, sort" in ended.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["b.json", "b.safetensors", "folder"])
def test_an_output_that_is_there_already_is_left_alone(
    call: Run, tmp_path: Path, name: str
) -> None:
    mock = f"gym run -t bytes --mock -o {name}"
    (tmp_path / "notes.json").write_text("[1, 2]")
    assert call(mock, tmp_path).code == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    for line in (mock, "gym run -t bytes --mock -o notes.json"):
        again = call(line, tmp_path)
        assert (again.code, again.out) == (1, "")
        assert "is already there; name another, or remove it first" in again.err

    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


async def interrupted(
    server: int, folder: Path, words: str, *numbers: int
) -> tuple[int | None, str, str]:
    """`gym run` that gets signals, or loses its server, in the middle; how it ended."""
    enough, gone = asyncio.Event(), False

    async def spoil(count: int, place: int, line: bytes, writer: asyncio.StreamWriter) -> bool:
        if place >= 200:
            enough.set()
        if gone:
            writer.transport.abort()
        return gone

    async with proxy(server, spoil) as port:
        line = f"gym run -t bytes --host 127.0.0.1 --port {port} --num-episodes 1000000 {words}"
        process = await asyncio.create_subprocess_exec(
            COMMAND,
            *line.split(),
            cwd=folder,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        await asyncio.wait_for(enough.wait(), timeout=120)
        gone = not numbers
        for number in numbers:
            process.send_signal(number)
            await asyncio.sleep(0.02)
        out, err = await asyncio.wait_for(process.communicate(), timeout=120)
    return process.returncode, out.decode(), err.decode()


@pytest.mark.parametrize(
    ("ended", "numbers"),
    [
        (130, [signal.SIGINT]),
        (143, [signal.SIGTERM]),
        (130, [signal.SIGINT, signal.SIGINT, signal.SIGTERM]),
    ],
)
def test_ctrl_c_saves_what_was_earned(
    server: int, tmp_path: Path, ended: int, numbers: list[int]
) -> None:
    words = "-o buffer.safetensors --format json"

    code, out, err = asyncio.run(interrupted(server, tmp_path, words, *numbers))

    assert code == ended, err
    # On a slow machine how far it has come is said first.
    assert err.strip().splitlines()[-1] == "stopped"
    buffer = ReplayBuffer.load(tmp_path / "buffer.safetensors")
    assert len(buffer) == json.loads(out)["buffer"]["size"] > 0
    assert {sample.episode_status for sample in buffer} == {EpisodeStatus.SUCCESS}


@pytest.mark.slow
def test_a_folder_survives_kill_9(server: int, tmp_path: Path) -> None:
    line = f"gym run -t bytes --host 127.0.0.1 --port {server} --num-episodes 1000000 -o folder"
    folder = tmp_path / "folder"
    with subprocess.Popen([COMMAND, *line.split()], cwd=tmp_path) as process:
        for _ in range(600):
            if list(folder.glob("0*.safetensors")):
                break
            time.sleep(0.1)
        process.kill()

    assert len(ReplayBuffer.load(folder)) > 0


def test_a_server_that_goes_away_leaves_what_was_earned(server: int, tmp_path: Path) -> None:
    words = "--retries 0 -o buffer.json"

    code, out, err = asyncio.run(interrupted(server, tmp_path, words))

    assert code == 1
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "saved to buffer.json" in out
    assert len(ReplayBuffer.load(tmp_path / "buffer.json")) > 0


def test_serve_says_where_it_is_and_counts_what_it_did(call: Run, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [COMMAND, "gym", "serve", "--port", "0", "--format", "json"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    address = json.loads(process.stdout.readline())
    taken = call(f"gym serve --port {address['port']}", tmp_path)
    call(f"gym run -t bytes --port {address['port']} --num-episodes 3", tmp_path)
    process.send_signal(signal.SIGTERM)
    counts = json.loads(process.communicate(timeout=60)[0])

    assert address["host"] == "127.0.0.1"
    assert taken.code == 1
    assert "choose another port, or 0 for a free one" in taken.err
    assert counts["connections"] >= 1
    assert counts["solved"] >= 3
    assert process.returncode == 0
