"""Numbers of many records as columns, and their aggregation into a few hundred points."""

import math
from array import array
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Columns", "plain"]

Floats = NDArray[np.float64]

POINTS = 512
"""Points of a curve; more would not be seen."""


class Columns:
    """Records with numeric fields, one column each; a field that a record lacks is NaN there."""

    def __init__(self) -> None:
        self._columns: dict[str, array[float]] = {}
        self.rows = 0

    def add(self, fields: Mapping[str, Any]) -> None:
        """Append a record; of its fields, numbers and lists of numbers are kept."""
        columns, rows = self._columns, self.rows
        for name, value in fields.items():
            kind = type(value)
            if kind is float or kind is int:
                # Nearly all values: a column that has one of every record so far.
                column = columns.get(name)
                if column is not None and len(column) == rows:
                    column.append(value)
                else:
                    self._put(name, value)
            elif kind is list:
                for k, one in enumerate(value):
                    self._put(f"{name}.{k}", one)
        self.rows += 1

    def _put(self, name: str, value: Any) -> None:
        # A bool is an int to Python, and no measurement.
        if not isinstance(value, int | float) or isinstance(value, bool):
            return
        column = self._columns.get(name)
        if column is None:
            column = self._columns[name] = array("d")
        if (missing := self.rows - len(column)) > 0:
            column.extend([math.nan] * missing)
        column.append(value)

    def cut(self, rows: int) -> None:
        """Keep the first `rows` records."""
        self.rows = min(self.rows, rows)
        for column in self._columns.values():
            del column[self.rows :]

    @property
    def names(self) -> list[str]:
        return list(self._columns)

    def column(self, name: str) -> Floats:
        """All values of a field."""
        values = np.full(self.rows, math.nan)
        if (found := self._columns.get(name)) is not None:
            values[: len(found)] = np.frombuffer(found) if len(found) else ()
        return values

    def total(self, name: str) -> float:
        """The sum of a field over the records that have it."""
        return float(np.nansum(self.column(name)))

    def last(self, name: str) -> float | None:
        """The newest value of a field."""
        values = self.column(name)
        there = np.flatnonzero(~np.isnan(values))
        return float(values[there[-1]]) if there.size else None

    def width(self, points: int = POINTS) -> int:
        """Records in each point of a curve: a power of two, so that a growing log stays steady."""
        least = -(-self.rows // points) if self.rows else 1
        return 1 << (least - 1).bit_length()

    def points(self, names: Iterable[str], points: int = POINTS) -> dict[str, Any]:
        """Mean of each field over runs of `width` records; low and high as well if that is not 1.

        A run in which no record has the field is None.
        """
        width = self.width(points)
        means: dict[str, Any] = {}
        lows: dict[str, Any] = {}
        highs: dict[str, Any] = {}
        for name in names:
            runs = self._runs(name, width)
            there = ~np.isnan(runs)
            count = there.sum(axis=1)
            with np.errstate(invalid="ignore"):
                means[name] = plain(np.where(there, runs, 0).sum(axis=1) / count)
            if width > 1:
                lows[name] = plain(_or_nan(np.where(there, runs, np.inf).min(axis=1)))
                highs[name] = plain(_or_nan(np.where(there, runs, -np.inf).max(axis=1)))
        return {"width": width, "mean": means, "low": lows, "high": highs}

    def sums(self, name: str, points: int = POINTS) -> list[float | None]:
        """The sum of a field over the same runs."""
        return plain(np.nansum(self._runs(name, self.width(points)), axis=1))

    def firsts(self, name: str, points: int = POINTS) -> list[float | None]:
        """The first value of each run."""
        return plain(self.column(name)[:: self.width(points)])

    def lasts(self, name: str, points: int = POINTS) -> list[float | None]:
        """The last value of each run."""
        width = self.width(points)
        ends = np.minimum(np.arange(0, self.rows, width) + width, self.rows) - 1
        return plain(self.column(name)[ends])

    def _runs(self, name: str, width: int) -> Floats:
        values = self.column(name)
        short = -len(values) % width
        return np.append(values, np.full(short, math.nan)).reshape(-1, width)


def _or_nan(values: Floats) -> Floats:
    return np.where(np.isfinite(values), values, math.nan)


def plain(values: Floats) -> list[float | None]:
    """As JSON has them: seven digits are more than a curve shows, NaN is None.

    >>> plain(np.array([1.0, 0.123456789, math.nan]))
    [1.0, 0.1234568, None]
    """
    return [
        None if not math.isfinite(v) else v if v.is_integer() else float(f"{v:.7g}")
        for v in values.tolist()
    ]
