"""Numbers of many records as columns, and their aggregation into a few hundred points."""

import math
from array import array
from collections.abc import Iterable, Mapping
from itertools import groupby, zip_longest
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

__all__ = ["MOST", "Columns", "is_number", "plain", "tame"]

Floats = NDArray[np.float64]

POINTS = 512
"""Points of a curve; more would not be seen."""
TOGETHER = 512
"""Records that wait to be taken into the columns together."""
NUMBERS = {int, float}
MOST = 1e100
"""Numbers beyond it are no measurements, and sums of them would overflow."""
RANKS = 4096
"""Numbers in a list of a record."""
DEEPEST = 48
"""Levels of what a record holds; proofs have one for each goal, and one for its list."""
EXACT = 2**53
"""Whole numbers up to here are themselves in JSON for every reader."""


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value of JSON is a number that can be shown; a bool is none."""
    return type(value) in NUMBERS and -MOST < value < MOST


def tame(value: Any, text: int | None = None, deepest: int = DEEPEST) -> Any:
    """A value from a file as every part of a report can take it: JSON, finite, not too deep.

    Texts longer than `text` are cut and say by how much.

    >>> tame({"a": [float("inf"), 10**400, [[1]]]}, deepest=3)
    {'a': [None, None, ['(nested too deeply to be shown)']]}
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        if text is None or len(value) <= text:
            return value
        return f"{value[:text]} [{len(value) - text:,} more characters]"
    if isinstance(value, int | float):
        if not is_number(value):
            return None
        return float(value) if abs(value) > EXACT else value
    if isinstance(value, list | tuple | Mapping) and not deepest:
        return "(nested too deeply to be shown)"
    if isinstance(value, Mapping):
        return {str(name): tame(one, text, deepest - 1) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [tame(one, text, deepest - 1) for one in value]
    return str(value)


class Columns:
    """Records with numeric fields, one column each; a field that a record lacks is NaN there."""

    def __init__(self) -> None:
        self._columns: dict[str, array[float]] = {}
        self._new: list[Mapping[str, Any]] = []
        self._kept = 0
        """Records that are in the columns; those in `_new` follow."""
        self._odd = 0

    @property
    def odd(self) -> int:
        """Numbers that are left out: not finite, or beyond all measure."""
        self._keep()
        return self._odd

    @property
    def rows(self) -> int:
        return self._kept + len(self._new)

    def add(self, fields: Mapping[str, Any]) -> None:
        """Append a record, which must not change any more; numbers and lists of them are kept."""
        new = self._new
        new.append(fields)
        if len(new) >= TOGETHER:
            self._keep()

    def _keep(self) -> None:
        """Move the new records into the columns, those in a row with the same fields at once."""
        new, self._new = self._new, []
        for names, group in groupby(new, tuple):
            records = list(group)
            for name in names:
                self._extend(name, [record[name] for record in records])
            self._kept += len(records)

    def _extend(self, name: str, values: list[Any], deep: int = 0) -> None:
        kinds = set(map(type, values))
        if kinds <= NUMBERS:
            self._append(name, self._measured(values))
        elif kinds == {list}:
            # Lists of lists are no columns, and nobody has so many ranks.
            if deep or max(map(len, values)) > RANKS:
                self._odd += len(values)
            else:
                for k, place in enumerate(zip_longest(*values)):
                    self._extend(f"{name}.{k}", list(place), deep + 1)
        elif kinds & NUMBERS:
            # A bool is an int to Python, and no measurement.
            self._append(name, self._measured([v if type(v) in NUMBERS else None for v in values]))

    def _measured(self, values: list[Any]) -> Floats:
        """Numbers, with NaN for those that are none to show; they are counted."""
        try:
            found = np.array(values, np.float64)
            if bool((np.abs(found) < MOST).all()):
                return found
        except OverflowError:
            pass
        self._odd += sum(type(v) in NUMBERS and not is_number(v) for v in values)
        return np.array([v if is_number(v) else math.nan for v in values])

    def _append(self, name: str, values: Floats) -> None:
        column = self._columns.get(name)
        if column is None:
            column = self._columns[name] = array("d")
        if (missing := self._kept - len(column)) > 0:
            column.extend([math.nan] * missing)
        column.frombytes(values.tobytes())

    def cut(self, rows: int) -> None:
        """Keep the first `rows` records."""
        self._keep()
        self._kept = min(self._kept, rows)
        for column in self._columns.values():
            del column[self._kept :]

    @property
    def names(self) -> list[str]:
        self._keep()
        return list(self._columns)

    def column(self, name: str) -> Floats:
        """All values of a field."""
        self._keep()
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

    def ends(self, names: Iterable[str]) -> dict[str, list[float]]:
        """The first, last, lowest and highest value of each field that has any, of all records."""
        found = {}
        for name in names:
            values = self.column(name)
            known = values[~np.isnan(values)]
            if known.size:
                ends = (known[0], known[-1], known.min(), known.max())
                found[name] = [float(v) for v in ends]
        return found

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

    def sums(self, of: str | Floats, points: int = POINTS) -> list[float | None]:
        """The sum of a field, or of one value for each record, over the same runs."""
        return plain(np.nansum(self._runs(of, self.width(points)), axis=1))

    def firsts(self, name: str, points: int = POINTS) -> list[float | None]:
        """The first value of each run."""
        return plain(self.column(name)[:: self.width(points)])

    def lasts(self, name: str, points: int = POINTS) -> list[float | None]:
        """The last value of each run."""
        width = self.width(points)
        ends = np.minimum(np.arange(0, self.rows, width) + width, self.rows) - 1
        return plain(self.column(name)[ends])

    def _runs(self, of: str | Floats, width: int) -> Floats:
        values = self.column(of) if isinstance(of, str) else of
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
