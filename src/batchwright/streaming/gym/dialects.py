"""The two protocols of gym servers: lines in, typed replies out, anything else is an error.

`LineJson` is ours, the command dialect mode, difficulty, puzzle, observe, hint and action: one
line in, one JSON line out. `Arcade` is that of chuk-puzzles-gym, whose replies have any number of
lines: a command is followed by `mode json`, and all lines before the answer to that belong to it.
"""

import asyncio
import json
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from batchwright.errors import BadReply, ConfigError, NoServer
from batchwright.rng import key
from batchwright.streaming.gym.config import GymConfig, GymOutputMode
from batchwright.streaming.gym.transports import Lines

__all__ = [
    "ARCADE_GAMES",
    "PROTOCOL",
    "VERSION",
    "Arcade",
    "Dialect",
    "LineJson",
    "Move",
    "Task",
    "greeted",
]

PROTOCOL, VERSION = "batchwright-gym", 1
"""What our server says of itself; a client refuses another version."""
NUMBER = r"\d{1,6}"
LARGEST = 999_999
"""The greatest number of a move."""
MALFORMED = "malformed"
"""Sent to our server for a move that does not fit the grammar: it counts it as one."""
COMMANDS = ("mode", "difficulty", "puzzle", "observe", "hint", "quit", MALFORMED)
"""No move of our protocol begins with one of these."""
MAX_LINES = 1000
"""Lines of one reply; the longest of chuk-puzzles-gym has about a hundred."""


@dataclass(frozen=True, slots=True)
class Task:
    """The puzzle of an episode, as the server confirmed it."""

    puzzle: str
    difficulty: float
    grammar: str
    """What an action looks like: `place ROW COL VALUE`."""
    ranges: Mapping[str, tuple[int, int]]
    """Least and greatest value of each word of the grammar that stands for a number."""

    def fits(self, action: str) -> bool:
        """Whether an action has this grammar. Nothing else is ever sent: a model might type
        `solve`, `hint` or `puzzle` in place of a move."""
        words = [NUMBER if word in self.ranges else re.escape(word) for word in self._words()]
        return re.fullmatch(" ".join(words), action, re.ASCII) is not None

    def any_action(self, random: np.random.Generator) -> str:
        """An action within the ranges."""
        words = []
        for word in self._words():
            low, high = self.ranges.get(word, (0, 0))
            drawn = low + int(random.random() * (high - low + 1))
            words.append(str(drawn) if word in self.ranges else word)
        return " ".join(words)

    def _words(self) -> list[str]:
        return self.grammar.split()


@dataclass(frozen=True, slots=True)
class Move:
    """What the server said of an action."""

    reward: float
    done: bool
    success: bool


class Dialect(ABC):
    """A conversation with one server: `start`, then `hint` and `act` until the puzzle is done."""

    game: str
    """Key of an observation that has the puzzle's name."""
    board: str
    """Key of an observation that has the board as text."""

    def __init__(self, lines: Lines, config: GymConfig) -> None:
        self.lines = lines
        self.config = config
        self.observation: Mapping[str, Any] = {}
        """The newest one, as the server sent it."""

    @abstractmethod
    async def start(self, seed: int) -> Task:
        """A new puzzle: which one and how difficult is a function of the settings and `seed`."""

    @abstractmethod
    async def hint(self) -> str | None:
        """An action that the server suggests; None if it has none to give."""

    @abstractmethod
    async def act(self, action: str) -> Move:
        """Make a move that fits the grammar."""

    async def act_malformed(self) -> Move | None:
        """Tell the server of a move that does not fit the grammar, whose text is not sent.

        None if the server has no word for that, so that it did not score the move.
        """
        return None

    def text(self) -> str:
        """The newest observation in the output mode of the settings."""
        if self.config.output_mode is GymOutputMode.JSON:
            return json.dumps(self.observation, separators=(",", ":"))
        board = str(self.observation[self.board]).strip("\n")
        if self.config.output_mode is GymOutputMode.NORMAL:
            return board
        seen = [self.observation[name] for name in (self.game, "difficulty", "moves")]
        return (
            "---GAME-START---\nGAME: {}\nDIFFICULTY: {}\nMOVES: {}\n"
            "---GRID-START---\n{}\n---GRID-END---\n---GAME-END---"
        ).format(*seen, board)

    @asynccontextmanager
    async def deadline(self, command: str) -> AsyncIterator[None]:
        """The read timeout, for a whole reply."""
        seconds = self.config.read_timeout
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError:
            raise NoServer(
                f"{self.config.address} did not answer {command!r} within {seconds:g} s"
            ) from None


class LineJson(Dialect):
    """Our own protocol; `batchwright gym serve` speaks it."""

    game, board = "puzzle_type", "observation"
    _ready = False
    _kind, _difficulty, _moves = "", 0.0, 0
    """The game that is being played; every reply must be of it."""

    def __init__(self, lines: Lines, config: GymConfig, hello: Mapping[str, Any]) -> None:
        super().__init__(lines, config)
        protocol, version = hello.get("protocol"), hello.get("version")
        if (protocol, version, type(version)) != (PROTOCOL, VERSION, int):
            raise BadReply(
                f"{config.address} speaks {_short(protocol)} {_short(json.dumps(version))}, "
                f"this client {PROTOCOL} {VERSION}; use a server of the same version"
            )
        self._offered = _field(hello, "puzzles", list)
        if not self._offered or not all(isinstance(name, str) for name in self._offered):
            raise BadReply(f"{config.address} offers no puzzles that can be named: {_short(hello)}")

    async def start(self, seed: int) -> Task:
        kinds = _known(self.config.puzzle_types, self._offered, "the server")
        low, high = self.config.difficulty_range
        if not self._ready:
            await self._ask("mode json", "mode", mode="json")
            await self._ask(f"difficulty {low} {high}", "difficulty", low=low, high=high)
            self._ready = True
        kind = kinds[key(seed, "gym/puzzle") % len(kinds)]
        given = await self._ask(f"puzzle {kind} {seed}", "puzzle", puzzle_type=kind, seed=seed)
        difficulty = float(_field(given, "difficulty", float))
        if not low <= difficulty <= high:
            raise BadReply(f"asked for a difficulty from {low} to {high}, got {_short(given)}")
        self._kind, self._difficulty, self._moves = kind, difficulty, 0
        await self._observe()
        return Task(kind, difficulty, *_moves_of(given))

    async def hint(self) -> str | None:
        return str(_field(await self._ask("hint", "hint"), "action", str))

    async def act_malformed(self) -> Move:
        return await self.act(MALFORMED)

    async def act(self, action: str) -> Move:
        self._moves += 1
        reply = await self._ask(action, "result", **self._played())
        self._see(reply)
        done, success = _field(reply, "done", bool), _field(reply, "success", bool)
        if success and not done:
            raise BadReply(f"a success that is not done: {_short(reply)}")
        info = _field(reply, "info", dict)
        _field(info, "valid", bool)
        _field(info, "max_moves", int)
        reward = float(_field(reply, "reward", float))
        if done and await self._observe() != self.observation:
            raise BadReply(f"{_short(reply)} is followed by {_short(self.observation)}")
        return Move(reward, done, success)

    async def _observe(self) -> Mapping[str, Any]:
        """Look at the board; what was seen before."""
        before = self.observation
        self._see(await self._ask("observe", "observation", **self._played()))
        return before

    def _played(self) -> dict[str, Any]:
        return {
            "puzzle_type": self._kind,
            "difficulty": self._difficulty,
            "moves": self._moves,
        }

    def _see(self, reply: Mapping[str, Any]) -> None:
        self.observation = {**self._played(), "observation": _field(reply, "observation", str)}

    async def _ask(self, command: str, kind: str, **same: Any) -> dict[str, Any]:
        """The reply to a command, which must be of this kind and have these values."""
        if unasked := await self.lines.unasked():
            raise BadReply(f"before {command!r} was sent the server said {_short(unasked)!r}")
        async with self.deadline(command):
            await self.lines.send(command)
            line = await self.lines.receive()
        reply = _json(line)
        if reply.get("type") == "error":
            raise BadReply(f"the server refused {command!r}: {_field(reply, 'message', str)}")
        if reply.get("type") != kind:
            raise BadReply(f"the reply to {command!r} should be a {kind}, got {_short(line)}")
        for name, value in same.items():
            if _field(reply, name, type(value)) != value:
                raise BadReply(
                    f"the reply to {command!r} should have the {name} {value}, got {_short(line)}"
                )
        return reply


@dataclass(frozen=True, slots=True)
class _Game:
    """A game of chuk-puzzles-gym that this client can play."""

    grammar: str
    hint: str
    """What a hint says, with a group for each word of the grammar."""
    values: tuple[int, int] | None = None
    """Range of VALUE; None is 1 to the side of the board."""


_CELL = r"row (?P<ROW>\d+), column (?P<COL>\d+)"
_NUMBER = _Game("place ROW COL VALUE", r"placing (?P<VALUE>\d+) at " + _CELL)
ARCADE_GAMES: Mapping[str, _Game] = {
    **dict.fromkeys(("sudoku", "killer", "kenken", "futoshiki", "skyscrapers"), _NUMBER),
    **dict.fromkeys(("kakuro", "hidato", "numberlink"), _NUMBER),
    "binary": _Game(_NUMBER.grammar, _NUMBER.hint, (0, 1)),
    "lights": _Game("press ROW COL", "pressing the light at " + _CELL),
    "hitori": _Game("shade ROW COL", "shading cell at " + _CELL),
    "nqueens": _Game("place ROW COL 1", "placing a queen at " + _CELL),
}
"""Those whose moves and hints have one plain form; the tests play them all."""
LEVELS = {"easy": 0.0, "medium": 0.5, "hard": 1.0}
"""The difficulties of chuk-puzzles-gym."""
FENCE = "mode json"
FENCED = {"type": "mode", "mode": "json", "success": True}


class Arcade(Dialect):
    """chuk-puzzles-gym. It gives no rewards: 1 for the move that solves the puzzle, else 0."""

    game, board = "game", "grid_display"
    _playing = False
    _rules = _NUMBER

    async def start(self, seed: int) -> Task:
        kinds = _known(self.config.puzzle_types, list(ARCADE_GAMES), "this client")
        low, high = self.config.difficulty_range
        levels = [level for level, value in LEVELS.items() if low <= value <= high]
        if not levels:
            raise ConfigError(
                f"this server has the difficulties 0, 0.5 and 1, none of them is in "
                f"{low} to {high}; widen difficulty_range"
            )
        kind = kinds[key(seed, "gym/puzzle") % len(kinds)]
        level = levels[key(seed, "gym/level") % len(levels)]
        menu = ["menu"] if self._playing else []
        said = await self._exchange(*menu, f"{kind} {level} {seed}", FENCE, "show")
        self._playing, self._rules = True, ARCADE_GAMES[kind]
        # The rules come first, as text; before that, a new connection has sent the whole menu.
        self.observation = _observation(_json(said[-1]))
        # Its games have titles: binary is `Binary Puzzle`.
        title = re.sub("[^a-z]", "", self.observation["game"].lower())
        seen = self.observation["seed"], self.observation["difficulty"]
        if seen != (seed, level) or not title.startswith(kind):
            raise BadReply(f"asked for {kind} {level} {seed}, got {_short(said[-1])}")
        match self.observation["grid"]:
            case [[_, *_] as first, *_] as grid:
                side, width = (1, len(grid)), (1, len(first))
            case _:
                raise BadReply(f"should be a board, got {_short(said[-1])}")
        ranges = {"ROW": side, "COL": width, "VALUE": self._rules.values or side}
        return Task(kind, LEVELS[level], self._rules.grammar, ranges)

    async def hint(self) -> str | None:
        said = "\n".join(await self._exchange("hint"))
        if said.startswith("{") and _json(said).get("code") in ("HINT_NONE", "HINT_DENIED"):
            return None
        found = re.search(self._rules.hint, said) if "\n" not in said else None
        if found is None:
            raise BadReply(f"no hint that can be read: {_short(said)}")
        words = self._rules.grammar.split()
        return " ".join(found.groupdict().get(word, word) for word in words)

    async def act(self, action: str) -> Move:
        said = await self._exchange(action)
        result, *rest = [_json(line) for line in said]
        kinds = [reply.get("type") for reply in (result, *rest)]
        if kinds[0] != "result" or not {*kinds[1:]} <= {"observation", "complete"}:
            raise BadReply(f"unknown reply to {action!r}: {_short(' '.join(said))}")
        # Not the line `complete`: it follows a puzzle that is over, and always claims success.
        solved = self._complete(_field(result, "state", dict))
        if solved and not _field(result, "success", bool):
            raise BadReply(f"a move that failed completes the puzzle: {_short(said[0])}")
        for reply in rest:
            if reply["type"] == "observation":
                if self._complete(_observation(reply)) != solved:
                    raise BadReply(f"complete and then not, or not and then: {_short(reply)}")
                self.observation = reply
        return Move(float(solved), solved, solved)

    def _complete(self, state: Mapping[str, Any]) -> bool:
        """Whether the puzzle that is being played is complete; another one is a bad reply."""
        for name, value in self.observation.items():
            if name in ("game", "seed", "difficulty") and state.get(name) != value:
                raise BadReply(f"the {name} of this puzzle is {value}, got {_short(state)}")
        return bool(_field(state, "is_complete", bool))

    async def _exchange(self, *commands: str) -> list[str]:
        """The lines that answer these commands, without echo and prompt."""
        fences = commands.count(FENCE) + 1
        echoes = [*commands, FENCE]
        said: list[str] = []
        async with self.deadline(commands[0]):
            await self.lines.send(*commands, FENCE)
            while fences:
                line = (await self.lines.receive()).removeprefix("> ").strip()
                if line in echoes:
                    echoes.remove(line)
                elif line.startswith("{") and _json(line) == FENCED:
                    fences -= 1
                elif line.startswith("Unknown command"):
                    raise BadReply(f"the server does not know {' or '.join(commands)}: {line}")
                elif line:
                    said.append(line)
                if len(said) > MAX_LINES:
                    raise BadReply(f"more than {MAX_LINES:,} lines in reply to {commands[0]!r}")
        if not said:
            raise BadReply(f"the server did not answer {commands[0]!r}")
        return said


async def greeted(lines: Lines, config: GymConfig) -> Dialect:
    """The dialect that the server's first words are in; the caller has the deadline."""
    for _ in range(MAX_LINES):
        line = (await lines.receive()).strip()
        if line.startswith("{"):
            return LineJson(lines, config, _json(line))
        if "PUZZLE ARCADE" in line:
            return Arcade(lines, config)
        if "maximum capacity" in line:
            raise NoServer(f"{config.address} has no free connection: {_short(line)}")
        if line.strip("="):
            break
    raise BadReply(f"{config.address} greets with {_short(line)!r}, as no gym does")


def _known(wanted: tuple[str, ...] | None, offered: Sequence[Any], who: str) -> Sequence[str]:
    names = [str(name) for name in offered]
    unknown = [name for name in wanted or () if name not in names]
    if unknown:
        raise ConfigError(
            f"{who} does not know the puzzle {', '.join(unknown)}; known: {', '.join(names)}"
        )
    return wanted or names


def _observation(reply: Mapping[str, Any]) -> Mapping[str, Any]:
    if reply.get("type") != "observation":
        raise BadReply(f"should be an observation, got {_short(reply)}")
    for name, kind in _ARCADE_OBSERVED.items():
        _field(reply, name, kind)
    return reply


_ARCADE_OBSERVED = {
    **dict.fromkeys(("game", "difficulty", "grid_display"), str),
    **dict.fromkeys(("seed", "moves"), int),
    "is_complete": bool,
    "grid": list,
}


def _json(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line, parse_constant=_refuse, object_pairs_hook=_unique)
    # A line of a million brackets is too deep for the parser.
    except (ValueError, RecursionError):
        raise BadReply(
            f"the server sent {_short(line)!r}, which is not JSON with every key once"
        ) from None
    if not isinstance(value, dict):
        raise BadReply(f"the server sent {_short(line)!r}, which is not a JSON object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a key is there twice")
    return dict(pairs)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _moves_of(given: Mapping[str, Any]) -> tuple[str, dict[str, tuple[int, int]]]:
    """The grammar and the ranges of a puzzle, if they allow a move to be written."""
    grammar, ranges = _field(given, "grammar", str), _field(given, "ranges", dict)
    words = grammar.split(" ")
    numbers = [word for word in words if word.isupper()]
    plain = all(word.isascii() and word.isalnum() for word in words)
    if not plain or not numbers or words[0] in (*numbers, *COMMANDS) or {*numbers} != {*ranges}:
        raise BadReply(
            f"the grammar should be a verb and words in capitals, each with its range, "
            f"got {_short(given)}"
        )
    return grammar, {name: _range(ranges, name) for name in ranges}


def _range(ranges: Mapping[str, Any], name: str) -> tuple[int, int]:
    match ranges[name]:
        case [int(low), int(high)] if 0 <= low <= high <= LARGEST:
            return low, high
    raise BadReply(
        f"the range of {name} should be two ascending numbers from 0 to {LARGEST}, "
        f"got {_short(ranges)}"
    )


def _field(reply: Mapping[str, Any], name: str, kind: type) -> Any:
    value = reply.get(name)
    if kind is float:
        # The last comparison is false for infinity and for integers that no float can hold.
        right = isinstance(value, int | float) and abs(value) < 1e300
    else:
        right = isinstance(value, kind)
    if not right or (isinstance(value, bool) and kind is not bool):
        raise BadReply(f"{name} should be a {kind.__name__} in the reply {_short(reply)}")
    return value


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 120 else text[:117] + "..."
