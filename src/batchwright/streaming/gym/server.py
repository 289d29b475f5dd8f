"""A gym server of our own: one command a line in, one JSON line out, puzzles by seed."""

import asyncio
import contextlib
import json
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from batchwright import rng
from batchwright.errors import BadReply, NoServer
from batchwright.streaming.gym.dialects import PROTOCOL, VERSION
from batchwright.streaming.gym.puzzles import PUZZLES, Puzzle
from batchwright.streaming.gym.transports import CHUNK, LineSplitter

__all__ = ["GymServer", "Session"]

HOST = "127.0.0.1"
HTTP = re.compile(r"[A-Z]+ \S+ HTTP/[0-9.]+\s*")
HELLO = {"type": "hello", "protocol": PROTOCOL, "version": VERSION, "puzzles": list(PUZZLES)}


class GymServer:
    """Any number of connections to 127.0.0.1, each with a puzzle of its own.

    A puzzle that is asked for without a seed gets the next one of the server's.
    """

    def __init__(self, port: int = 0, seed: int = 0) -> None:
        self.port, self.seed = port, seed
        self.counts: Counter[str] = Counter()
        """Connections, puzzles and solved."""
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        """Listen; `port` is the real one afterwards."""
        try:
            self._server = await asyncio.start_server(self._connected, HOST, self.port)
        except (OSError, OverflowError) as error:
            raise NoServer(
                f"cannot listen on {HOST}:{self.port}: {error}; choose another port, or 0 for a "
                f"free one"
            ) from None
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Close the port and all connections."""
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await self._server.wait_closed()

    def next_seed(self) -> int:
        self.counts["seeded"] += 1
        return rng.key(self.seed, "gym/server", self.counts["seeded"]) % 2**31

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.counts["connections"] += 1
        self._writers.add(writer)
        session, splitter = Session(self), LineSplitter(telnet=True)
        try:
            await _send(writer, HELLO)
            while not session.quit and (chunk := await reader.read(CHUNK)):
                for line in splitter.feed(chunk):
                    if HTTP.fullmatch(line):
                        # A web page may post here, and its lines are no commands.
                        await _send(writer, _error("http", "this is no HTTP server"))
                        return
                    await _send(writer, session.reply(line))
        except BadReply as error:
            code = "not_utf8" if isinstance(error.__cause__, UnicodeDecodeError) else "too_long"
            with contextlib.suppress(OSError):
                await _send(writer, _error(code, "a command is one short line of UTF-8"))
        except OSError:
            # Its client has gone.
            pass
        finally:
            self._writers.discard(writer)
            writer.close()


class Session:
    """One connection: what it has asked for so far."""

    def __init__(self, server: GymServer) -> None:
        self._server = server
        self._range = (0.0, 1.0)
        self._kind = ""
        self._puzzle: Puzzle | None = None
        self.quit = False

    def reply(self, line: str) -> dict[str, Any]:
        """The answer to one command."""
        name, *words = line.split() or [""]
        commands: dict[str, Callable[..., dict[str, Any]]] = {
            "mode": self._mode,
            "difficulty": self._difficulty,
            "puzzle": self._start,
            "observe": self._observe,
            "hint": self._hint,
            "quit": self._quit,
        }
        if name not in commands:
            return self._act(line)
        try:
            return commands[name](*words)
        except (TypeError, ValueError):
            return _error("bad_command", f"{line!r} is not understood; {_USAGE}")

    def _mode(self, mode: str) -> dict[str, Any]:
        if mode != "json":
            return _error("unknown_mode", f"the mode is json, got {mode}")
        return {"type": "mode", "mode": mode}

    def _difficulty(self, low: str, high: str) -> dict[str, Any]:
        given = float(low), float(high)
        if not 0.0 <= given[0] <= given[1] <= 1.0:
            return _error(
                "bad_range",
                f"a difficulty is from 0 to 1, LOW not above HIGH, got LOW {low} and HIGH {high}",
            )
        self._range = given
        return {"type": "difficulty", "low": given[0], "high": given[1]}

    def _start(self, kind: str, seed: str | None = None) -> dict[str, Any]:
        if seed is not None and not (seed.isascii() and seed.isdecimal() and len(seed) < 20):
            return _error("bad_seed", f"a seed is a number of at most 19 digits, got {seed}")
        number = self._server.next_seed() if seed is None else int(seed)
        if kind == "random":
            kind = list(PUZZLES)[rng.key(number, "gym/kind") % len(PUZZLES)]
        if kind not in PUZZLES:
            return _error("unknown_puzzle", f"known: random, {', '.join(PUZZLES)}, got {kind}")
        low, high = self._range
        part = float(rng.stream(number, "gym/difficulty").random())
        # The sum may be rounded to above the range.
        difficulty = min(high, low + (high - low) * part)
        self._kind, self._puzzle = kind, PUZZLES[kind](number, difficulty)
        self._server.counts["puzzles"] += 1
        return {
            "type": "puzzle",
            "puzzle_type": kind,
            "difficulty": difficulty,
            "seed": number,
            "grammar": self._puzzle.grammar,
            "ranges": self._puzzle.ranges,
        }

    def _observe(self) -> dict[str, Any]:
        if self._puzzle is None:
            return _NO_PUZZLE
        return {"type": "observation", **self._seen(self._puzzle)}

    def _hint(self) -> dict[str, Any]:
        if self._puzzle is None or self._puzzle.done:
            return _NO_PUZZLE
        verb = self._puzzle.grammar.split()[0]
        return {"type": "hint", "action": " ".join(map(str, [verb, *self._puzzle.hint()]))}

    def _act(self, action: str) -> dict[str, Any]:
        puzzle = self._puzzle
        if puzzle is None or puzzle.done:
            return _NO_PUZZLE
        valid = puzzle.act(action)
        self._server.counts["solved"] += puzzle.solved
        return {
            "type": "result",
            "reward": float(puzzle.solved),
            "done": puzzle.done,
            "success": puzzle.solved,
            **self._seen(puzzle),
            "info": {"valid": valid, "max_moves": puzzle.max_moves},
        }

    def _seen(self, puzzle: Puzzle) -> dict[str, Any]:
        return {
            "puzzle_type": self._kind,
            "difficulty": puzzle.difficulty,
            "moves": puzzle.moves,
            "observation": puzzle.board(),
        }

    def _quit(self) -> dict[str, Any]:
        self.quit = True
        return {"type": "bye"}


_USAGE = (
    "commands: mode json, difficulty LOW HIGH, puzzle KIND|random [SEED], observe, hint, quit, "
    "or an action of the puzzle"
)


def _error(code: str, message: str) -> dict[str, Any]:
    return {"type": "error", "code": code, "message": message}


_NO_PUZZLE = _error("no_puzzle", f"no puzzle is being played; {_USAGE}")


async def _send(writer: asyncio.StreamWriter, reply: dict[str, Any]) -> None:
    writer.write(json.dumps(reply).encode() + b"\n")
    await writer.drain()
