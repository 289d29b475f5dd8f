"""Gym episodes on the real chuk-puzzles-gym server, over each of its transports."""

import asyncio
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from batchwright.calls import Endpoint, Pool
from batchwright.data.tokenizers import load_tokenizer
from batchwright.errors import BadReply, ConfigError, NoServer
from batchwright.streaming import GymConfig, GymEpisodeStream, StreamSample
from batchwright.streaming.gym import ModelPolicy
from batchwright.streaming.gym.dialects import ARCADE_GAMES

sys.path.insert(0, str(Path(__file__).parent))
from gym_proxy import proxy

PLACES = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
FOUND = shutil.which("chuk-puzzles-server", path=PLACES)

pytestmark = pytest.mark.skipif(
    FOUND is None, reason="chuk-puzzles-gym is not installed; it is in the extra dev"
)


@contextmanager
def arcade(transport: str) -> Iterator[int]:
    """The real server on a free port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # `chuk-puzzles-server` itself has one fixed port.
    launcher = Path(FOUND or "").with_name("server-launcher")
    words = [launcher, "chuk_puzzles_gym.server:ArcadeHandler", "--host", "127.0.0.1"]
    process = subprocess.Popen(
        [*words, "--port", str(port), "--transport", transport],
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(600):
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                assert process.poll() is None, "the server did not start"
                time.sleep(0.05)
        yield port
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def port_of() -> Iterator[Callable[[str], int]]:
    """The port of the server of a transport, started when it is first asked for."""
    opened: dict[str, Any] = {}

    def port(transport: str) -> int:
        if transport not in opened:
            opened[transport] = arcade(transport)
            ports[transport] = opened[transport].__enter__()
        return ports[transport]

    ports: dict[str, int] = {}
    yield port
    for server in opened.values():
        server.__exit__(None, None, None)


def at(port: int, transport: str = "tcp", **fields: Any) -> GymConfig:
    fields = {"output_mode": "normal", "max_retries": 0, **fields}
    return GymConfig(host="127.0.0.1", port=port, transport=transport, **fields)


def content(sample: StreamSample) -> dict[str, Any]:
    return sample.model_dump(exclude={"timestamp"})


def text_of(sample: StreamSample, loss: int) -> str:
    return load_tokenizer("bytes").decode(sample.input_ids[sample.loss_mask == loss].tolist())


@pytest.mark.parametrize("game", ARCADE_GAMES)
def test_hints_solve_every_game(port_of: Callable[[str], int], game: str) -> None:
    # The server's solution of a hard binary puzzle is not always one by its own rules.
    hardest = 0.5 if game == "binary" else 1.0
    config = at(port_of("tcp"), puzzle_types=(game,), difficulty_range=(0.0, hardest))
    stream = GymEpisodeStream(config, num_episodes=4, connections=2)

    samples = list(stream)

    assert dict(stream.status_counts) == {"success": 4}, stream.last_error
    assert {s.difficulty for s in samples} <= {0.0, 0.5, 1.0}
    assert {s.dataset_id for s in samples} == {game}
    by_place = {s.step_index == (s.total_steps or 0) - 1: s.reward for s in samples}
    assert by_place == {True: 1.0, False: 0.0}


@pytest.mark.parametrize("game", ARCADE_GAMES)
def test_random_moves_end_no_connection_and_win_no_reward(
    port_of: Callable[[str], int], game: str
) -> None:
    config = at(port_of("tcp"), puzzle_types=(game,), difficulty_range=(0.5, 1.0), max_steps=30)
    stream = GymEpisodeStream(config, policy="random", num_episodes=2)

    samples = list(stream)

    assert dict(stream.status_counts) == {"failure": 2}, stream.last_error
    assert {(s.reward, s.success, s.total_steps) for s in samples} == {(0.0, False, 30)}


def test_all_transports_and_any_number_of_connections_give_the_same_samples(
    port_of: Callable[[str], int],
) -> None:
    config = {"puzzle_types": ("lights", "futoshiki", "binary"), "difficulty_range": (0.0, 0.5)}

    def samples(transport: str, connections: int) -> list[dict[str, Any]]:
        given = at(port_of(transport), transport, **config)
        stream = GymEpisodeStream(given, num_episodes=6, connections=connections)
        return [content(sample) for sample in stream]

    first = samples("telnet", 1)
    assert len(first) > 12
    assert samples("telnet", 4) == first
    assert samples("tcp", 3) == first
    assert samples("websocket", 2) == first


def test_prompts_hold_the_board_and_completions_the_move(port_of: Callable[[str], int]) -> None:
    seen = {}
    for mode in ("normal", "agent", "json"):
        config = at(port_of("telnet"), "telnet", puzzle_types=("sudoku",), output_mode=mode)
        seen[mode] = next(iter(GymEpisodeStream(config, num_episodes=1)))

    head = r"sudoku: place ROW COL VALUE\n"
    assert re.match(head + r"  \| 1 2 3 \| 4 5 6 \| 7 8 9 \|\n", text_of(seen["normal"], 0))
    assert re.match(
        head + r"---GAME-START---\nGAME: Sudoku\nDIFFICULTY: \w+\nMOVES: 0\n---GRID-START---\n",
        text_of(seen["agent"], 0),
    )
    assert re.match(
        head + r'\{"game":"Sudoku",.*"grid_display":".*"\}\n$', text_of(seen["json"], 0)
    )
    assert re.match(r"place [1-9] [1-9] [1-9]", text_of(seen["normal"], 1))


@pytest.mark.parametrize(
    "trick", ["solve", "hint", "menu", "quit", "mode normal", "reset", "place 1 1 1\x00", "place"]
)
def test_a_model_that_asks_for_the_solution_gets_nothing(
    port_of: Callable[[str], int], trick: str
) -> None:
    config = at(port_of("tcp"), puzzle_types=("sudoku",), max_steps=2)
    with Pool(Endpoint(lambda requests: [trick] * len(requests))) as pool:
        stream = GymEpisodeStream(config, policy=ModelPolicy(pool, "m"), num_episodes=1)
        samples = list(stream)

    # The server has no word for a malformed move, so it scored nothing that could be a sample.
    assert (samples, stream.unscored) == ([], 2)
    assert dict(stream.status_counts) == {"failure": 1}


def test_what_the_server_does_not_have_is_one_sentence(port_of: Callable[[str], int]) -> None:
    for fields, reason in [
        ({"puzzle_types": ("chess",)}, "this client does not know the puzzle chess; known: sudoku"),
        ({"difficulty_range": (0.1, 0.4)}, "difficulties 0, 0.5 and 1, none of them is in 0.1 to"),
    ]:
        with pytest.raises(ConfigError, match=re.escape(reason)):
            list(GymEpisodeStream(at(port_of("tcp"), **fields), num_episodes=1))


@pytest.mark.parametrize(
    ("server", "client"), [("websocket", "tcp"), ("tcp", "websocket"), ("telnet", "websocket")]
)
def test_the_wrong_transport_is_an_error(
    port_of: Callable[[str], int], server: str, client: str
) -> None:
    config = at(port_of(server), client, connect_timeout=1.5)

    with pytest.raises((NoServer, BadReply)):
        list(GymEpisodeStream(config, num_episodes=1))


@pytest.mark.parametrize("transport", ["telnet", "websocket"])
def test_a_server_that_dies_in_an_episode_gives_no_sample_of_it(transport: str) -> None:
    with arcade(transport) as port:
        config = at(port, transport, puzzle_types=("killer",))
        stream = GymEpisodeStream(config, connections=2)
        samples = iter(stream)
        seen = [next(samples)]

    def take_all() -> None:
        for sample in samples:
            seen.append(sample)  # noqa: PERF402

    with pytest.raises(NoServer):
        take_all()

    lengths = {s.episode_id: s.total_steps for s in seen}
    assert len(seen) == sum(steps or 0 for steps in lengths.values())
    assert len(lengths) == stream.status_counts["success"]
    assert all(s.success for s in seen)


LIES = {
    "text before the result": lambda line: b"Congratulations!\r\n" + line,
    "text in place of the result": lambda line: b"You solved it\r\n",
    "nothing at all": lambda line: b"",
    "a result without a state": lambda line: b'{"type":"result","success":true}\r\n',
    "unknown JSON": lambda line: line + b'{"type":"jackpot","reward":1}\r\n',
    "a hint in two lines": lambda line: line + line,
    "a hint in other words": lambda line: b"Hint: think harder\r\n",
    "no board": lambda line: re.sub(rb'"grid":\[\[.*?\]\]', b'"grid":[]', line),
    "a failed move that completes": lambda line: line.replace(b"true", b"false", 1).replace(
        b'"is_complete":false', b'"is_complete":true'
    ),
    "complete, and then not": lambda line: line.replace(
        b'"is_complete":false', b'"is_complete":true'
    ),
    "another seed": lambda line: re.sub(rb'"seed":\d+', b'"seed":1', line),
    "another game": lambda line: line.replace(b"Futoshiki", b"Sudoku"),
    "a state in words": lambda line: line.replace(b'"is_complete":false', b'"is_complete":"yes"'),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_reply_that_the_protocol_does_not_have_ends_the_episode(
    port_of: Callable[[str], int], lie: str
) -> None:
    lied = False
    before = b"Hint: " if "hint" in lie else b'{"game"' if "board" in lie else b'{"type":"result"'

    async def spoil(number: int, place: int, line: bytes, writer: asyncio.StreamWriter) -> bool:
        nonlocal lied
        if lied or not line.startswith(before):
            return False
        lied = True
        writer.write(LIES[lie](line))
        return True

    async def play() -> tuple[GymEpisodeStream, list[StreamSample]]:
        async with proxy(port_of("tcp"), spoil) as port:
            config = at(port, puzzle_types=("futoshiki",), max_retries=1, retry_delay=0.01)
            stream = GymEpisodeStream(config, num_episodes=2)
            return stream, [sample async for sample in stream]

    stream, samples = asyncio.run(play())

    assert dict(stream.status_counts) == {"error": 1, "success": 1}, stream.last_error
    assert {s.episode_id for s in samples} == {"gym_42_000001"}


def test_a_claim_of_completion_is_not_believed(port_of: Callable[[str], int]) -> None:
    async def spoil(number: int, place: int, line: bytes, writer: asyncio.StreamWriter) -> bool:
        writer.write(line)
        if line.startswith(b'{"type":"result"'):
            writer.write(b'{"type":"complete","success":true,"game":"Futoshiki"}\r\n')
        return True

    async def play() -> list[StreamSample]:
        async with proxy(port_of("tcp"), spoil) as port:
            config = at(port, puzzle_types=("futoshiki",), max_steps=3)
            stream = GymEpisodeStream(config, policy="random", num_episodes=1)
            return [sample async for sample in stream]

    assert {(s.reward, s.success) for s in asyncio.run(play())} == {(0.0, False)}
