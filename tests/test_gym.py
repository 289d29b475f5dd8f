"""Gym episodes on our own server: what becomes a sample, and that nothing else ever does."""

import asyncio
import contextlib
import json
import os
import re
import resource
import socket
import ssl
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.calls import Endpoint, Pool
from batchwright.data.tokenizers import load_tokenizer
from batchwright.errors import BadReply, ConfigError, Mismatch, NoServer
from batchwright.streaming import (
    AsyncSampleStream,
    EpisodeStatus,
    GymConfig,
    GymEpisodeStream,
    SampleSource,
    SampleStream,
    StreamSample,
    prefetch,
)
from batchwright.streaming.gym import GymOutputMode, GymServer, GymTransport, ModelPolicy, Turn
from batchwright.streaming.gym.puzzles import PUZZLES
from batchwright.streaming.gym.transports import LineSplitter

sys.path.insert(0, str(Path(__file__).parent))
from gym_proxy import proxy, served


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    """The port of one server for all tests of this module."""
    with served() as (_, port):
        yield port


def at(port: int, **fields: Any) -> GymConfig:
    """A gym on this machine, with little patience."""
    short = {"connect_timeout": 5.0, "read_timeout": 5.0, "retry_delay": 0.01}
    return GymConfig(**{"host": "127.0.0.1", "port": port, **short, **fields})


def content(sample: StreamSample) -> dict[str, Any]:
    """All of a sample but the time it was made at."""
    return sample.model_dump(exclude={"timestamp"})


def test_the_settings_have_the_names_and_defaults_of_the_document() -> None:
    config = GymConfig()

    assert (config.host, config.port, config.transport) == ("localhost", 8023, "telnet")
    assert (config.connect_timeout, config.read_timeout, config.episode_timeout) == (10, 30, 300)
    assert (config.puzzle_types, config.difficulty_range) == (None, (0.0, 1.0))
    assert (config.max_retries, config.retry_delay) == (3, 1.0)
    assert [one.value for one in GymTransport] == ["telnet", "tcp", "websocket"]
    assert [one.value for one in GymOutputMode] == ["normal", "agent", "json"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"port": 0}, "port=0"),
        ({"transport": "http"}, "telnet"),
        ({"output_mode": "binary"}, "normal"),
        ({"read_timeout": 0}, "read_timeout=0"),
        ({"max_retries": -1}, "max_retries=-1"),
        ({"difficulty_range": (0.8, 0.2)}, "difficulty_range must ascend within 0 to 1"),
        ({"puzzle_types": ()}, "puzzle_types is empty"),
        ({"prot": 8023}, "prot"),
    ],
)
def test_a_setting_that_cannot_be_is_one_sentence(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)) as caught:
        GymConfig(**fields)

    assert "\n" not in str(caught.value)


def test_episodes_become_samples_with_the_reward_of_the_server(server: int) -> None:
    stream = GymEpisodeStream(at(server), "bytes", num_episodes=6)

    samples = list(stream)

    assert isinstance(stream, SampleStream)
    assert isinstance(stream, AsyncSampleStream)
    episodes = {name: [s for s in samples if s.episode_id == name] for name in
                dict.fromkeys(s.episode_id for s in samples)}  # fmt: skip
    assert len(episodes) == 6
    for steps in episodes.values():
        assert [s.step_index for s in steps] == list(range(len(steps)))
        assert {s.total_steps for s in steps} == {len(steps)}
        assert [s.reward for s in steps] == [0.0] * (len(steps) - 1) + [1.0]
        assert {s.episode_status for s in steps} == {EpisodeStatus.SUCCESS}
        assert len({s.difficulty for s in steps}) == 1
    assert {s.source for s in samples} == {SampleSource.GYM}
    assert {s.dataset_id for s in samples} <= set(PUZZLES)
    assert stream.metrics.episodes_successful == stream.metrics.episodes_completed == 6
    assert stream.metrics.samples_produced == len(samples)
    assert dict(stream.status_counts) == {"success": 6}


def test_the_loss_covers_what_the_policy_wrote_and_nothing_else(server: int) -> None:
    tokenizer = load_tokenizer("bytes")
    written = []

    class Noted:
        async def act(self, turn: Turn) -> str:
            written.append((turn.prompt, await turn.hint()))
            return written[-1][1]

    samples = list(GymEpisodeStream(at(server), tokenizer, Noted(), num_episodes=3))

    assert len(written) >= len(samples)
    for sample, (prompt, action) in zip(samples, written, strict=False):
        text = tokenizer.decode(sample.input_ids[sample.loss_mask == 1].tolist())
        assert text.startswith(action)
        assert tokenizer.decode(sample.input_ids[sample.loss_mask == 0].tolist()) == prompt
        assert sample.num_loss_tokens == len(action) + 1


def test_a_random_policy_fails_and_its_failures_have_no_reward(server: int) -> None:
    stream = GymEpisodeStream(at(server, max_steps=6), policy="random", num_episodes=30)

    samples = list(stream)

    assert stream.status_counts["failure"] > 10
    failed = [s for s in samples if s.episode_status is EpisodeStatus.FAILURE]
    assert {(s.reward, s.success) for s in failed} == {(0.0, False)}
    assert max(s.total_steps or 0 for s in samples) <= 6


@pytest.mark.parametrize("transport", ["telnet", "tcp"])
@pytest.mark.parametrize("policy", ["hint", "random"])
def test_the_samples_do_not_depend_on_connections_or_transport(
    server: int, transport: str, policy: Any
) -> None:
    one = GymEpisodeStream(at(server), policy=policy, num_episodes=12)
    many = GymEpisodeStream(
        at(server, transport=transport), policy=policy, num_episodes=12, connections=5
    )

    assert [content(s) for s in one] == [content(s) for s in many]


def test_another_seed_plays_other_puzzles(server: int) -> None:
    first = {s.difficulty for s in GymEpisodeStream(at(server), num_episodes=5, seed=1)}
    second = {s.difficulty for s in GymEpisodeStream(at(server), num_episodes=5, seed=2)}

    assert not first & second


def test_a_stream_resumes_at_any_sample(server: int) -> None:
    def fresh() -> GymEpisodeStream:
        return GymEpisodeStream(at(server), policy="random", num_episodes=4, connections=2)

    straight = [content(sample) for sample in fresh()]
    stream = fresh()
    states = [json.loads(json.dumps(stream.state_dict())) for _ in stream]

    for place in (0, 1, len(straight) // 2, len(straight) - 2):
        resumed = fresh()
        resumed.load_state_dict(states[place])
        assert [content(sample) for sample in resumed] == straight[place + 1 :]
        assert resumed.metrics == stream.metrics
        assert resumed.status_counts == stream.status_counts


def test_a_resumed_stream_goes_on_where_the_replayed_episode_is_shorter(server: int) -> None:
    config = at(server, puzzle_types=("sort",))
    stream = GymEpisodeStream(config, policy="random", num_episodes=3)
    samples = iter(stream)
    while next(samples).step_index != 7:
        pass
    samples.close()  # type: ignore[attr-defined]

    resumed = GymEpisodeStream(config, policy="hint", num_episodes=3)
    resumed.load_state_dict(stream.state_dict())
    left = {s.episode_id: s.total_steps for s in resumed}

    assert sum(resumed.status_counts.values()) == 3
    assert list(left) == [f"gym_42_{k:06d}" for k in range(3) if f"gym_42_{k:06d}" in left]
    assert len(left) == 3 - stream.state_dict()["episode"] - 1


def test_a_state_of_other_settings_is_refused(server: int) -> None:
    state = GymEpisodeStream(at(server), seed=1).state_dict()

    with pytest.raises(Mismatch, match="make it with the settings it was saved with"):
        GymEpisodeStream(at(server), seed=2).load_state_dict(state)
    GymEpisodeStream(at(server, read_timeout=9.0), seed=1).load_state_dict(state)


def test_a_consumer_may_stop_at_any_time_and_prefetch(server: int) -> None:
    endless = GymEpisodeStream(at(server), connections=4)
    for count, _ in enumerate(endless):
        if count == 20:
            break
    ahead = prefetch(GymEpisodeStream(at(server), num_episodes=10), size=8)

    assert endless.metrics.samples_produced == 21
    assert len({s.episode_id for s in ahead}) == 10
    assert ahead.most_queued <= 8


@pytest.mark.parametrize(
    ("mode", "pattern"),
    [
        ("normal", r"lights: press ROW COL\n[#.]+\n[#.\n]+"),
        (
            "agent",
            r"(?s)lights: press ROW COL\n---GAME-START---\nGAME: lights\n.*---GRID-END---\n.*",
        ),
        ("json", r'lights: press ROW COL\n\{"puzzle_type":"lights",.*\}\n'),
    ],
)
def test_the_output_mode_is_how_the_prompt_shows_the_board(
    server: int, mode: str, pattern: str
) -> None:
    config = at(server, output_mode=mode, puzzle_types=("lights",))

    first = next(iter(GymEpisodeStream(config, num_episodes=1)))

    prompt = load_tokenizer("bytes").decode(first.input_ids[first.loss_mask == 0].tolist())
    assert re.fullmatch(pattern, prompt)


def test_a_puzzle_that_the_server_does_not_know_is_a_config_error(server: int) -> None:
    with pytest.raises(ConfigError, match="does not know the puzzle chess; known: guess, lights"):
        list(GymEpisodeStream(at(server, puzzle_types=("chess",)), num_episodes=1))


def sorter(requests: Any) -> list[str]:
    """A model that can sort: it swaps the first number that is out of place."""
    answers = []
    for request in requests:
        board = request.body["messages"][0]["content"].strip().splitlines()[-1]
        items = [int(word) for word in board.split()]
        place = next(k for k, item in enumerate(items) if item != sorted(items)[k])
        other = items.index(sorted(items)[place])
        answers.append(f"\n  swap {place + 1} {other + 1}\nbecause it is out of place")
    return answers


def test_a_model_plays_through_a_pool_and_is_trained_on_all_it_wrote(server: int) -> None:
    config = at(server, puzzle_types=("sort",), output_mode="normal")
    with Pool(Endpoint(sorter)) as pool:
        policy = ModelPolicy(pool, "sorter", temperature=0)
        stream = GymEpisodeStream(config, policy=policy, num_episodes=8, connections=4)
        samples = list(stream)

    assert dict(stream.status_counts) == {"success": 8}
    first = samples[0]
    text = load_tokenizer("bytes").decode(first.input_ids[first.loss_mask == 1].tolist())
    assert re.match(r"\n  swap \d \d\nbecause it is out of place", text)


@pytest.mark.parametrize("trick", ["hint", "observe", "puzzle sort 1", "quit", "swap 1 2; quit"])
def test_a_model_cannot_leave_its_puzzle(server: int, trick: str) -> None:
    config = at(server, puzzle_types=("sort",), output_mode="json", max_steps=3)
    with Pool(Endpoint(lambda requests: [trick] * len(requests))) as pool:
        stream = GymEpisodeStream(config, policy=ModelPolicy(pool, "m"), num_episodes=2)
        samples = list(stream)

    assert dict(stream.status_counts) == {"failure": 2}
    prompts = [load_tokenizer("bytes").decode(s.input_ids.tolist()) for s in samples]
    # The server counts it as a malformed move, and the board stays as it is.
    assert all(f'"moves":{s.step_index}' in p for s, p in zip(samples, prompts, strict=True))
    assert len({p.partition('"observation"')[2] for p in prompts[:3]}) == 1
    assert {s.reward for s in samples} == {0.0}


def test_a_model_that_writes_no_move_fails_by_the_limit_of_the_server(server: int) -> None:
    with Pool(Endpoint(lambda requests: ["I give up"] * len(requests))) as pool:
        config = at(server, puzzle_types=("guess",), difficulty_range=(0.0, 0.0))
        stream = GymEpisodeStream(config, policy=ModelPolicy(pool, "m"), num_episodes=1)
        samples = list(stream)

    # 8 numbers: as many moves as 8 has bits, and two more.
    assert len(samples) == 6
    assert (dict(stream.status_counts), stream.unscored) == ({"failure": 1}, 0)


def test_a_call_that_fails_is_no_action(server: int) -> None:
    def broken(requests: Any) -> list[Exception]:
        return [RuntimeError("no weights") for _ in requests]

    with Pool(Endpoint(broken), tries=1) as pool:
        policy = ModelPolicy(pool, "m")
        stream = GymEpisodeStream(at(server, max_retries=1), policy=policy, num_episodes=5)
        with pytest.raises(NoServer, match="the policy's model gave no action"):
            list(stream)

    assert stream.metrics.samples_produced == 0


Damage = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


async def cut(line: bytes, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def half(line: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(line[: len(line) // 2])
    await writer.drain()
    writer.transport.abort()


async def noise(line: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(bytes(range(256)) * 50 + b"\n")


async def drip(line: bytes, writer: asyncio.StreamWriter) -> None:
    for byte in line:
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(0.1)


def says(text: bytes) -> Damage:
    async def say(line: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(text + b"\n")

    return say


def changes(**fields: Any) -> Damage:
    async def change(line: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(json.dumps({**json.loads(line), **fields}).encode() + b"\n")

    return change


async def twice(line: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(line + line)


async def unasked(line: bytes, writer: asyncio.StreamWriter) -> None:
    """A result that would be the one of the next move."""
    result = json.loads(line)
    won = {"done": True, "success": True, "reward": 1.0, "moves": result["moves"] + 1}
    writer.write(line + json.dumps(result | won).encode() + b"\n")


async def half_a_line_more(line: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(line + b'{"type":')


async def key_twice(line: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(line.replace(b'{"type"', b'{"reward": 1.0, "type"', 1))


FAULTS = {
    "the connection is cut": cut,
    "half a line, then nothing": half,
    "binary noise": noise,
    "a slow drip": drip,
    "unknown JSON": says(b'{"type":"surprise","reward":1.0,"done":true,"success":true}'),
    "not an object": says(b"[1, 2, 3]"),
    "brackets without end": says(b"[" * 100_000),
    "plain text": says(b"You win! reward: 1.0"),
    "an empty line": says(b""),
    "an error of the server": says(b'{"type":"error","code":"x","message":"out of memory"}'),
    "a reward that is not a number": changes(reward=float("nan")),
    "an infinite reward": says(
        b'{"type":"result","reward":1e999,"done":true,"success":true,"puzzle_type":"sort",'
        b'"difficulty":0.5,"moves":1,"observation":"1 2"}'
    ),
    "a reward that no float can hold": changes(reward=10**400),
    "a board in half a character": changes(observation="\ud800"),
    "a reward in words": changes(reward="one"),
    "no reward": changes(reward=None),
    "a success that is not done": changes(success=True, done=False),
    "done in words": changes(done="yes"),
    "a line twice": twice,
    "a success that nobody asked for": unasked,
    "half a line that nobody asked for": half_a_line_more,
    "moves that were not made": changes(moves=7),
    "a puzzle that is not played": changes(puzzle_type="guess"),
    "a difficulty that is not played": changes(difficulty=0.123),
    "no information": changes(info=None),
    "no limit of moves": changes(info={"valid": True}),
    "a key twice": key_twice,
    "an error without a message": says(b'{"type":"error","code":"x","message":null}'),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_episode_that_a_fault_ends_gives_no_sample_and_the_next_ones_do(
    server: int, fault: str
) -> None:
    async def spoil(number: int, place: int, line: bytes, writer: asyncio.StreamWriter) -> bool:
        # The first result: after the greeting, mode, difficulty, puzzle, observation and hint.
        if (number, place) != (0, 6):
            return False
        assert json.loads(line)["type"] == "result"
        await FAULTS[fault](line, writer)
        return True

    async def play() -> tuple[GymEpisodeStream, list[StreamSample]]:
        async with proxy(server, spoil) as port:
            config = at(port, read_timeout=0.5, output_mode="normal", puzzle_types=("sort",))
            stream = GymEpisodeStream(config, num_episodes=4)
            return stream, [sample async for sample in stream]

    stream, samples = asyncio.run(play())

    assert dict(stream.status_counts) == {"error": 1, "success": 3}
    assert {s.episode_id for s in samples} == {f"gym_42_{k:06d}" for k in (1, 2, 3)}
    assert stream.last_error
    assert "\n" not in stream.last_error


def spoiled(server: int, kind: str, damage: Damage, **fields: Any) -> GymEpisodeStream:
    """A stream of two episodes after its end, the first reply of this kind was damaged."""
    done = False

    async def spoil(number: int, place: int, line: bytes, writer: asyncio.StreamWriter) -> bool:
        nonlocal done
        if done or json.loads(line)["type"] != kind:
            return False
        done = True
        await damage(line, writer)
        return True

    async def play() -> GymEpisodeStream:
        async with proxy(server, spoil) as port:
            stream = GymEpisodeStream(at(port, puzzle_types=("sort",), **fields), num_episodes=2)
            async for sample in stream:
                assert sample.episode_id == "gym_42_000001"
            return stream

    return asyncio.run(play())


@pytest.mark.parametrize(
    ("kind", "fields", "sentence"),
    [
        ("mode", {"mode": "agent"}, "should have the mode json"),
        ("mode", {"mode": None}, "mode should be a str"),
        ("difficulty", {"low": 0.0}, "should have the low 0.3"),
        ("puzzle", {"difficulty": 0.9}, "asked for a difficulty from 0.3 to 0.5"),
        ("puzzle", {"seed": 1}, "should have the seed"),
        ("observation", {"moves": 1}, "should have the moves 0"),
        ("puzzle", {"grammar": ""}, "the grammar should be"),
        ("puzzle", {"grammar": "swap A\nB"}, "the grammar should be"),
        ("puzzle", {"grammar": "quit A B"}, "the grammar should be"),
        ("puzzle", {"grammar": "swap A B C"}, "the grammar should be"),
        ("puzzle", {"ranges": {}}, "the grammar should be"),
        ("puzzle", {"ranges": {"A": [1, 5], "B": [1, 10**7]}}, "the range of B"),
        ("hint", {"action": "press 1 2"}, "the hint 'press 1 2' does not fit 'swap A B'"),
    ],
)
def test_a_reply_that_is_not_of_what_was_asked_ends_the_episode(
    server: int, kind: str, fields: dict[str, Any], sentence: str
) -> None:
    stream = spoiled(server, kind, changes(**fields), difficulty_range=(0.3, 0.5))

    assert dict(stream.status_counts) == {"error": 1, "success": 1}
    assert sentence in stream.last_error


def test_a_claim_that_comes_in_time_is_found_by_the_board_after_it(server: int) -> None:
    async def hold(number: int, place: int, line: bytes, writer: asyncio.StreamWriter) -> bool:
        if (number, place) != (0, 6):
            return False
        won = json.loads(line) | {"done": True, "success": True, "reward": 1.0}
        writer.write(json.dumps(won).encode() + b"\n")
        await asyncio.sleep(0.1)
        return False

    async def play() -> GymEpisodeStream:
        async with proxy(server, hold) as port:
            stream = GymEpisodeStream(at(port, puzzle_types=("sort",)), num_episodes=1)
            assert [sample async for sample in stream] == []
            return stream

    assert dict(asyncio.run(play()).status_counts) == {"error": 1}


def test_a_line_of_100_mb_is_not_read_to_its_end(server: int) -> None:
    sent = 0

    async def spoil(number: int, place: int, line: bytes, writer: asyncio.StreamWriter) -> bool:
        nonlocal sent
        if (number, place) != (0, 6):
            return False
        for _ in range(1600):
            writer.write(b"x" * 65536)
            await writer.drain()
            sent += 65536
        return True

    async def play() -> GymEpisodeStream:
        async with proxy(server, spoil) as port:
            stream = GymEpisodeStream(at(port), num_episodes=2)
            async for _ in stream:
                pass
            return stream

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    stream = asyncio.run(play())

    assert dict(stream.status_counts) == {"error": 1, "success": 1}
    assert "more than 1,048,576 bytes" in stream.last_error
    assert sent < 50_000_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


@pytest.mark.parametrize(
    ("fault", "error"), [("the connection is cut", NoServer), ("plain text", BadReply)]
)
def test_a_fault_that_stays_is_raised_after_the_retries(
    server: int, fault: str, error: type[Exception]
) -> None:
    connections = 0

    async def spoil(number: int, place: int, line: bytes, writer: asyncio.StreamWriter) -> bool:
        nonlocal connections
        connections = number + 1
        if place == 6:
            await FAULTS[fault](line, writer)
        return place == 6

    async def play() -> None:
        async with proxy(server, spoil) as port:
            stream = GymEpisodeStream(at(port, max_retries=2))
            try:
                async for _ in stream:
                    raise AssertionError("no episode was earned")
            finally:
                assert dict(stream.status_counts) == {"error": 3}

    with pytest.raises(error):
        asyncio.run(play())
    assert connections == 3


def test_an_episode_that_takes_too_long_is_a_timeout_without_samples(server: int) -> None:
    class Slow:
        async def act(self, turn: Turn) -> str:
            if turn.step == 1:
                await asyncio.sleep(60)
            return await turn.hint()

    config = at(server, episode_timeout=0.2, max_retries=1)
    stream = GymEpisodeStream(config, policy=Slow(), num_episodes=9)
    with pytest.raises(NoServer, match=r"took over 0\.2 s"):
        list(stream)

    assert stream.status_counts["timeout"] >= 1
    assert stream.status_counts["error"] == 0


def test_a_server_that_is_killed_and_restarted_costs_only_the_episodes_it_was_in() -> None:
    with served() as (first, port):
        stream = GymEpisodeStream(
            at(port, max_retries=12, retry_delay=0.05), num_episodes=60, connections=3
        )
        samples = iter(stream)
        seen = [next(samples) for _ in range(3)]
        first.kill()
        first.wait()
        with served(port):
            seen += list(samples)

    counts = stream.status_counts
    assert sum(counts.values()) == 60
    assert counts["error"] <= 3
    assert counts["success"] == len({s.episode_id for s in seen}) == 60 - counts["error"]
    assert all(s.success for s in seen)


def spent(stream: GymEpisodeStream) -> tuple[float, float]:
    """Processor and wall time until a stream that gets nothing gives up."""
    cpu, wall = time.process_time(), time.perf_counter()
    with pytest.raises(NoServer):
        list(stream)
    return time.process_time() - cpu, time.perf_counter() - wall


def test_waiting_takes_no_processor_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        stream = GymEpisodeStream(at(port, connect_timeout=1.0, max_retries=0), connections=8)
        cpu, wall = spent(stream)
    assert wall >= 1.0
    assert cpu < wall / 2

    # Nobody listens here any more.
    cpu, wall = spent(GymEpisodeStream(at(port, retry_delay=0.2)))
    assert wall >= 1.4
    assert cpu < wall / 2


def test_a_port_without_a_gym_is_said_at_once() -> None:
    async def http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(9)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async def play() -> None:
        server = await asyncio.start_server(http, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            async for _ in GymEpisodeStream(at(port)):
                pass

    with pytest.raises(BadReply, match=r"greets with 'HTTP/1\.1 400 Bad Request', as no gym does"):
        asyncio.run(play())


@pytest.mark.parametrize("transport", ["telnet", "tcp", "websocket"])
def test_a_port_that_speaks_tls_is_no_gym(transport: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)

    async def tls(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        side = context.wrap_bio(incoming, outgoing, server_side=True)
        with contextlib.suppress(ssl.SSLError, OSError):
            while chunk := await reader.read(4096):
                incoming.write(chunk)
                with contextlib.suppress(ssl.SSLWantReadError):
                    side.do_handshake()
        writer.write(outgoing.read())
        writer.close()

    async def play() -> None:
        server = await asyncio.start_server(tls, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            config = at(port, transport=transport, max_retries=1, connect_timeout=0.5)
            async for _ in GymEpisodeStream(config):
                pass

    with pytest.raises(NoServer, match=r"127\.0\.0\.1:\d+.*; check ") as caught:
        asyncio.run(play())
    assert len(str(caught.value)) < 250


def test_the_server_survives_tls_noise_and_clients_that_leave(server: int) -> None:
    context = ssl.create_default_context()
    with pytest.raises((ssl.SSLError, OSError)), socket.create_connection(
        ("127.0.0.1", server), timeout=5
    ) as plain:  # fmt: skip
        context.wrap_socket(plain, server_hostname="localhost")
    for data in (os.urandom(100_000), b"puzzle lights 1\nhi", b"x" * 3_000_000):
        with socket.create_connection(("127.0.0.1", server), timeout=5) as client:
            client.sendall(data)

    stream = GymEpisodeStream(at(server), num_episodes=2)
    assert len(list(stream)) > 2
    assert stream.status_counts["success"] == 2


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"version": 2}, "speaks batchwright-gym 2, this client batchwright-gym 1"),
        ({"version": "1"}, 'speaks batchwright-gym "1", this client batchwright-gym 1'),
        ({"version": True}, "speaks batchwright-gym true, this client batchwright-gym 1"),
        ({"puzzles": []}, "offers no puzzles that can be named"),
        ({"puzzles": [7]}, "offers no puzzles that can be named"),
    ],
)
def test_a_greeting_of_another_version_or_without_puzzles_is_refused(
    server: int, fields: dict[str, Any], sentence: str
) -> None:
    async def spoil(number: int, place: int, line: bytes, writer: asyncio.StreamWriter) -> bool:
        if place:
            return False
        await changes(**fields)(line, writer)
        return True

    async def play() -> None:
        async with proxy(server, spoil) as port:
            async for _ in GymEpisodeStream(at(port)):
                pass

    with pytest.raises(BadReply, match=sentence):
        asyncio.run(play())


def test_a_websocket_to_a_port_of_lines_is_one_sentence(server: int) -> None:
    with pytest.raises(NoServer, match="does not speak HTTP; check the port, or use the") as caught:
        list(GymEpisodeStream(at(server, transport="websocket", max_retries=0)))
    assert "hello" not in str(caught.value)


def test_only_telnet_has_telnet_commands(server: int) -> None:
    async def negotiate(line: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\xff\xfb\x01" + line)

    assert LineSplitter(telnet=True).feed(b"\xff\xfb\x01a\n") == ["a"]
    with pytest.raises(BadReply, match="not UTF-8"):
        LineSplitter(telnet=False).feed(b"\xff\xfb\x01a\n")
    stream = spoiled(server, "result", negotiate, transport="tcp")
    assert dict(stream.status_counts) == {"error": 1, "success": 1}


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        (b"\xc3\x28", "not_utf8", "UTF-8"),
        (b"x" * 1_100_000, "too_long", "short line"),
        (b"difficulty 1 0", "bad_range", "LOW not above HIGH, got LOW 1 and HIGH 0"),
        ("puzzle sort \u0661".encode(), "bad_seed", "at most 19 digits"),
        (b"puzzle sort 1_0", "bad_seed", "at most 19 digits"),
        (b"puzzle sort -1", "bad_seed", "at most 19 digits"),
    ],
)
def test_a_command_that_cannot_be_has_a_code_of_its_own(
    server: int, command: bytes, code: str, words: str
) -> None:
    with socket.create_connection(("127.0.0.1", server), timeout=5) as client:
        lines = client.makefile("rb")
        lines.readline()
        client.sendall(command + b"\n")
        reply = json.loads(lines.readline())

    assert (reply["type"], reply["code"]) == ("error", code)
    assert words in reply["message"]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(PUZZLES)),
    st.integers(0, 2**31 - 1),
    st.floats(0, 1, allow_nan=False),
)
def test_hints_solve_every_puzzle_within_its_limit(kind: str, seed: int, difficulty: float) -> None:
    puzzle = PUZZLES[kind](seed, difficulty)
    again = PUZZLES[kind](seed, difficulty)
    assert not puzzle.solved
    assert puzzle.board() == again.board()

    while not puzzle.done:
        verb = puzzle.grammar.split()[0]
        assert puzzle.act(" ".join(map(str, [verb, *puzzle.hint()])))

    assert puzzle.solved


WORDS = "mode json difficulty 0 1 0.5 nan puzzle random lights 7 observe hint press swap guess 99"


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.lists(st.sampled_from(WORDS.split()), max_size=4).map(" ".join),
            st.text(
                st.characters(exclude_characters="\n\r", exclude_categories=("Cs",)), max_size=20
            ),
        ),
        max_size=8,
    )
)
def test_every_command_gets_exactly_one_json_line(commands: list[str]) -> None:
    async def talk() -> list[dict[str, Any]]:
        server = GymServer()
        await server.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write("".join(f"{command}\n" for command in [*commands, "quit"]).encode())
        replies = [json.loads(line) async for line in reader]
        writer.close()
        await server.stop()
        return replies

    commands = [command for command in commands if command.split() != ["quit"]]
    replies = asyncio.run(talk())

    assert len(replies) == len(commands) + 2
    assert replies[0]["type"] == "hello"
    assert replies[-1] == {"type": "bye"}
    assert all("type" in reply for reply in replies)


TELNET = [b"\xff\xfb\x01", b"\xff\xfd\x18", b"\xff\xf1", b"\xff\xfa\x18\x00\nx\xff\xff\xff\xf0"]


@given(
    st.lists(st.one_of(st.sampled_from(TELNET), st.text(max_size=9).map(str.encode)), max_size=12),
    st.lists(st.integers(0, 60), max_size=8),
)
def test_telnet_commands_vanish_wherever_a_chunk_is_cut(
    parts: list[bytes], cuts: list[int]
) -> None:
    raw = b"".join(parts) + b"\n"
    plain = b"".join(part for part in parts if part not in TELNET) + b"\n"
    places = [0, *sorted(cuts), len(raw)]
    splitter = LineSplitter(telnet=True)

    lines = [line for a, b in pairwise(places) for line in splitter.feed(raw[a:b])]

    assert lines == [line.rstrip(b"\r").decode() for line in plain.split(b"\n")[:-1]]


def test_a_web_page_that_posts_to_the_server_gives_it_no_commands(server: int) -> None:
    with socket.create_connection(("127.0.0.1", server), 10) as sock:
        sock.sendall(b"POST / HTTP/1.1\r\nHost: evil.example\r\n\r\npuzzle random 1\nquit\n")
        said = sock.makefile("r").read().splitlines()
        assert [json.loads(line)["type"] for line in said] == ["hello", "error"]
