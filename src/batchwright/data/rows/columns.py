"""Columns of the rows that say how to plan a sample: its group, its cost, its difficulty."""

from collections.abc import Iterable, Mapping
from typing import Any

from batchwright.data.rows.source import Source
from batchwright.errors import BadRow

__all__ = ["FLAGS", "column_values"]

_KINDS = {
    "difficulty": ((int, float), "a curriculum needs a number in every row"),
    "groups": ((str, int, type(None)), "give a string, an integer or null"),
    "costs": ((int,), "give an integer of at least 0 in every row"),
}
"""Of every argument of `BatchPlanBuilder` that a column can give: what may stand there."""

FLAGS = {"difficulty": "--curriculum", "groups": "--group-by", "costs": "--cost-column"}


def column_values(
    columns: Mapping[str, str], rows: Iterable[tuple[Source, int]]
) -> dict[str, list[Any]]:
    """The values of `columns`, by the argument they are for, in these rows of sources.

    Raises:
        BadRow: a row has something else there, by its location.
    """
    found: dict[str, list[Any]] = {name: [] for name in columns}
    for source, number in rows if columns else ():
        row = source[number]
        for name, column in columns.items():
            kinds, allowed = _KINDS[name]
            value = row.get(column)
            missing = name == "groups" and column not in row
            negative = name == "costs" and isinstance(value, int) and value < 0
            if not isinstance(value, kinds) or isinstance(value, bool) or missing or negative:
                seen = "missing" if missing else repr(value)
                raise BadRow(f"{source.where(number)}: {column} is {seen}; {allowed}")
            found[name].append(value)
    return found
