"""The puzzles of our gym server: lights, sort and guess, each a function of seed and difficulty."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np

from batchwright import rng

__all__ = ["PUZZLES", "Guess", "Lights", "Puzzle", "Sort"]


class Puzzle(ABC):
    """A puzzle with a limit of moves; the difficulty is from 0 to 1."""

    grammar: str
    """What a move looks like; words in capitals are numbers."""
    ranges: Mapping[str, tuple[int, int]]
    """Least and greatest value of each number."""
    max_moves: int

    def __init__(self, seed: int, difficulty: float) -> None:
        self.difficulty = difficulty
        self.moves = 0
        self.set_up(rng.stream(seed, f"gym/{type(self).__name__}"))

    @abstractmethod
    def set_up(self, random: np.random.Generator) -> None: ...

    @abstractmethod
    def board(self) -> str: ...

    @abstractmethod
    def hint(self) -> list[int]:
        """The numbers of a move that leads to the solution."""

    @abstractmethod
    def move(self, *numbers: int) -> None: ...

    @property
    @abstractmethod
    def solved(self) -> bool: ...

    def act(self, action: str) -> bool:
        """Make a move; False if it is not one, which counts as a move all the same."""
        self.moves += 1
        verb, *names = self.grammar.split()
        words = action.split()
        if not all(word.isascii() and word.isdecimal() and len(word) < 10 for word in words[1:]):
            return False
        numbers = [int(word) for word in words[1:]]
        if words[:1] != [verb] or len(numbers) != len(names):
            return False
        limits = [self.ranges[name] for name in names]
        if not all(low <= n <= high for n, (low, high) in zip(numbers, limits, strict=True)):
            return False
        self.move(*numbers)
        return True

    @property
    def done(self) -> bool:
        return self.solved or self.moves >= self.max_moves


class Lights(Puzzle):
    """Switch all lights off; a press toggles a light and its neighbours."""

    grammar = "press ROW COL"

    def set_up(self, random: np.random.Generator) -> None:
        side = self.side = 2 + round(3 * self.difficulty)
        self.ranges = {"ROW": (1, side), "COL": (1, side)}
        presses = 1 + round(self.difficulty * side * side / 2)
        cells = random.random(side * side).argsort(kind="stable")[:presses]
        self._left: set[tuple[int, int]] = set()
        self._lit: set[tuple[int, int]] = set()
        for cell in cells.tolist():
            self.move(*(1 + n for n in divmod(cell, side)))
        if not self._lit:
            # Some sets of presses cancel out.
            self.move(1, 1)
        self.max_moves = 4 + 4 * len(self._left)

    def move(self, *numbers: int) -> None:
        row, col = numbers
        self._left ^= {(row, col)}
        cross = ((row, col), (row - 1, col), (row + 1, col), (row, col - 1), (row, col + 1))
        self._lit ^= {(r, c) for r, c in cross if 1 <= r <= self.side and 1 <= c <= self.side}

    def board(self) -> str:
        side = range(1, self.side + 1)
        return "\n".join("".join("#" if (r, c) in self._lit else "." for c in side) for r in side)

    def hint(self) -> list[int]:
        return list(min(self._left))

    @property
    def solved(self) -> bool:
        return not self._lit


class Sort(Puzzle):
    """Swap numbers by their places until they ascend."""

    grammar = "swap A B"

    def set_up(self, random: np.random.Generator) -> None:
        size = 3 + round(5 * self.difficulty)
        self.ranges = {"A": (1, size), "B": (1, size)}
        self._items: list[int] = random.random(size).argsort(kind="stable").tolist()
        if self.solved:
            self._items.reverse()
        self.max_moves = 4 + 4 * size

    def move(self, *numbers: int) -> None:
        a, b = (n - 1 for n in numbers)
        self._items[a], self._items[b] = self._items[b], self._items[a]

    def board(self) -> str:
        return " ".join(map(str, self._items))

    def hint(self) -> list[int]:
        wanted = sorted(self._items)
        place = next(k for k, item in enumerate(self._items) if item != wanted[k])
        return [place + 1, self._items.index(wanted[place]) + 1]

    @property
    def solved(self) -> bool:
        return self._items == sorted(self._items)


class Guess(Puzzle):
    """Find a number; each guess is answered with higher or lower."""

    grammar = "guess NUMBER"

    def set_up(self, random: np.random.Generator) -> None:
        top = 8 << round(5 * self.difficulty)
        self.ranges = {"NUMBER": (1, top)}
        self._secret = 1 + int(random.random() * top)
        self._low, self._high, self._last = 1, top, 0
        self.max_moves = top.bit_length() + 2

    def move(self, *numbers: int) -> None:
        (self._last,) = numbers
        if self._last < self._secret:
            self._low = max(self._low, self._last + 1)
        elif self._last > self._secret:
            self._high = min(self._high, self._last - 1)

    def board(self) -> str:
        asked = f"between {self._low} and {self._high}"
        if not self._last:
            return asked
        if self.solved:
            return f"{self._last} it is"
        return f"{'higher' if self._last < self._secret else 'lower'} than {self._last}, {asked}"

    def hint(self) -> list[int]:
        return [(self._low + self._high) // 2]

    @property
    def solved(self) -> bool:
        return self._last == self._secret


PUZZLES: dict[str, type[Puzzle]] = {"guess": Guess, "lights": Lights, "sort": Sort}
