"""Questions with short reference answers: the shipped set or a file, split in three."""

from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any, Literal

from batchwright.calls.simulator.questions import Question
from batchwright.data.rows.source import open_source
from batchwright.errors import BadRow, ConfigError
from batchwright.rng import key

__all__ = ["Question", "Split", "load_questions"]

Split = Literal["train", "valid", "test", "all"]

_NAMES = {
    "question": ("question", "query", "prompt", "instruction"),
    "answer": ("answer", "response", "completion", "ground_truth", "output"),
}
_SPLITS: tuple[tuple[float, Split], ...] = ((0.6, "train"), (0.8, "valid"), (1.0, "test"))


def load_questions(spec: str = "shipped", split: Split = "train") -> list[Question]:
    """The questions of one split of `shipped`, or of a JSONL, Parquet or HF file.

    A row's own `split` is kept; the others are split 60/20/20 by a hash of the question, so that
    the same question is in the same split of every file. Of a worked answer like GSM8K's, the
    text after `####` is the answer.

    >>> questions = load_questions("shipped", "test")
    >>> questions[0].question
    'Ruth has 58 books and gets 44 more. How many books does Ruth have?'

    Raises:
        BadRow: a row has no question or no answer.
        ConfigError: the split is empty.
    """
    if spec == "shipped":
        with resources.as_file(resources.files("batchwright.shipped") / "questions.jsonl") as path:
            rows, places = _rows(str(path))
    else:
        rows, places = _rows(spec)
    found = []
    for number, row in enumerate(rows):
        one = _question(row, number, places[number])
        if split in ("all", _split(row, one)):
            found.append(one)
    if not found:
        raise ConfigError(
            f"{spec} has {len(rows):,} rows and no question in its {split} split; "
            f"use a larger file or another split"
        )
    return found


def _rows(spec: str) -> tuple[Sequence[Mapping[str, Any]], Sequence[str]]:
    source = open_source(spec)
    return [source[n] for n in range(len(source))], [source.where(n) for n in range(len(source))]


def _question(row: Mapping[str, Any], number: int, place: str) -> Question:
    found: dict[str, str] = {}
    for field, names in _NAMES.items():
        value = next((row[name] for name in names if row.get(name) is not None), None)
        text = str(value).rpartition("####")[2].strip() if value is not None else ""
        if not text:
            raise BadRow(
                f"{place}: no {field}; a row needs text in one of the columns {', '.join(names)}"
            )
        found[field] = text
    name = str(row.get("id", row.get("sample_id", number)))
    return Question(**found, category=str(row.get("category", "")), id=name)


def _split(row: Mapping[str, Any], one: Question) -> Split:
    given = row.get("split")
    if given in ("train", "valid", "test"):
        split: Split = given
        return split
    share = key(0, "question split " + one.question) / 2**64
    return next(split for end, split in _SPLITS if share < end)
