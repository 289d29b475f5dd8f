"""Reads responses from files, and writes scores."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from batchwright.data.rows.source import open_source
from batchwright.errors import BadRow, UnknownSample
from batchwright.events import finite
from batchwright.files import write_atomic
from batchwright.lines import checked_lines, read_line
from batchwright.rewards.reward import Response, message_text

__all__ = ["is_scores", "read_responses", "response_of", "values_of", "write_rows"]

_COLUMNS = {
    "text": ("response", "completion", "solution_str", "answer_text", "output"),
    "truth": ("ground_truth", "truth", "reference", "answer", "label"),
    "dataset": ("dataset", "data_source", "dataset_name"),
    "prompt": ("prompt", "question", "query"),
    "extra": ("extra_info", "extra"),
}
"""The column names of each field of a response; the first one present is used."""


def read_responses(path: Path) -> tuple[list[str], list[Response]]:
    """Ids and responses of a JSONL or Parquet file; a row without an id has its number.

    Raises:
        BadRow: a row has no response; the message has file and line.
    """
    source = open_source(str(path))
    ids, responses = [], []
    for item in range(len(source)):
        row = source[item]
        try:
            responses.append(response_of(row))
        except BadRow as error:
            raise BadRow(f"{source.where(item)}: {error}") from None
        ids.append(str(row.get("id", row.get("sample_id", item))))
    return ids, responses


def response_of(row: Mapping[str, Any]) -> Response:
    """One row as a response; columns with other names can be used in templates.

    >>> response_of({"response": "4", "answer": "4", "level": 2})
    Response(text='4', truth='4', dataset='', prompt='', extra={'level': 2})
    """
    found: dict[str, Any] = {}
    used = {"id", "sample_id"}
    for field, names in _COLUMNS.items():
        name = next((name for name in names if row.get(name) is not None), None)
        if name is not None:
            found[field] = row[name]
            used.add(name)
    text = message_text(found.get("text"))
    if not isinstance(text, str):
        seen = "no response" if text is None else f"a response that is {type(text).__name__}"
        allowed = ", ".join(_COLUMNS["text"])
        raise BadRow(f"{seen}; a row needs text in one of the columns {allowed}")
    extra = {name: value for name, value in row.items() if name not in used}
    given = found.get("extra")
    if isinstance(given, Mapping):
        extra |= given
    prompt = str(message_text(found.get("prompt", "")))
    return Response(text, found.get("truth"), str(found.get("dataset", "")), prompt, extra)


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write JSON lines atomically, each with its check; NaN becomes null."""
    lines = (json.dumps(finite(row), ensure_ascii=False, allow_nan=False) for row in rows)
    # Half a surrogate pair has no UTF-8; escaped it is JSON.
    write_atomic(path, checked_lines(line.encode("utf-8", "backslashreplace") for line in lines))


def is_scores(content: bytes) -> bool:
    """Whether this is what `write_rows` wrote: no line changed, added or taken out inside."""
    before = 0
    *lines, rest = content.split(b"\n")
    for line in lines:
        whole = read_line(line, before)
        if whole is None:
            return False
        before = whole[1]
    return not rest


def values_of(path: Path, column: str) -> dict[str, Any]:
    """One column of a file by id; rows without it are skipped, but one row must have it."""
    source = open_source(str(path))
    rows: Sequence[Mapping[str, Any]] = [source[item] for item in range(len(source))]
    if not any(column in row for row in rows):
        seen = sorted({name for row in rows for name in row})
        raise UnknownSample(f"{path} has no column {column!r}; it has {', '.join(seen)}")
    found: dict[str, Any] = {}
    for number, row in enumerate(rows):
        name = str(row.get("id", row.get("sample_id", number)))
        if column in row:
            found[name] = row[column]
    return found
