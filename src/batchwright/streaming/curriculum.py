"""A curriculum by difficulty: which range to ask a gym for next, from how often it was solved."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from batchwright.errors import ConfigError
from batchwright.streaming.replay import DifficultyBin

__all__ = ["SuccessRateCurriculum"]

BINS = 10
"""Steps from difficulty 0 to 1."""


@dataclass(frozen=True)
class SuccessRateCurriculum:
    """Harder where it is solved often, easier where it is solved seldom, one tenth at a time.

    The range is `width` tenths wide and begins at `lowest`. It moves up when the success rate is
    at least `raise_at`, down when it is at most `lower_at`, and stays within `lowest` and
    `highest`. With fewer than `min_judged` samples of known success it stays.

    >>> curriculum = SuccessRateCurriculum()
    >>> curriculum.first
    (0.0, 0.2)
    >>> solved = [DifficultyBin(low=0.0, high=1.0, samples=50, judged=50, successes=45)]
    >>> curriculum.following((0.0, 0.2), solved)
    (0.1, 0.3)
    >>> curriculum.following((0.8, 1.0), solved)
    (0.8, 1.0)
    """

    lowest: float = 0.0
    highest: float = 1.0
    width: int = 2
    raise_at: float = 0.8
    lower_at: float = 0.5
    min_judged: int = 20

    def __post_init__(self) -> None:
        if not 0.0 <= self.lowest <= self.highest <= 1.0:
            raise ConfigError(
                f"difficulties must ascend within 0 to 1, got {self.lowest} to {self.highest}"
            )
        if not 0.0 <= self.lower_at < self.raise_at <= 1.0:
            raise ConfigError(
                f"lower_at must be below raise_at, both from 0 to 1, got {self.lower_at} and "
                f"{self.raise_at}"
            )

        if self.width < 1:
            raise ConfigError(f"width must be at least 1 tenth, got {self.width}")

    @property
    def first(self) -> tuple[float, float]:
        """The range to begin with: the easiest."""
        return self._range(self._floor)

    def following(
        self, current: tuple[float, float], found: Sequence[DifficultyBin]
    ) -> tuple[float, float]:
        """The range after `current`, given what the samples of that request came to."""
        judged = sum(part.judged for part in found)
        if judged < self.min_judged:
            return current
        rate = sum(part.successes for part in found) / judged
        begin = int(current[0] * BINS + 1e-9)
        if rate >= self.raise_at:
            begin += 1
        elif rate <= self.lower_at:
            begin -= 1
        return self._range(begin)

    @property
    def _floor(self) -> int:
        return int(self.lowest * BINS + 1e-9)

    def _range(self, begin: int) -> tuple[float, float]:
        last = math.ceil(self.highest * BINS - 1e-9) - self.width
        begin = max(self._floor, min(begin, last))
        low, high = begin / BINS, (begin + self.width) / BINS
        return max(self.lowest, low), min(self.highest, high)
