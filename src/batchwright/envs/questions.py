"""Questions with short answers: the shipped set or a file, in train, valid and test parts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

from batchwright.data.rows.source import open_source
from batchwright.errors import BadRow, ConfigError
from batchwright.rng import key

__all__ = ["Question", "Split", "load_questions"]

Split = Literal["train", "valid", "test", "all"]

_NAMES = {
    "question": ("question", "query", "prompt", "instruction"),
    "answer": ("answer", "response", "completion", "ground_truth", "output"),
}
_PARTS: tuple[tuple[float, Split], ...] = ((0.6, "train"), (0.8, "valid"), (1.0, "test"))


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked and what is right."""

    id: str
    question: str
    answer: str
    category: str = ""


def load_questions(spec: str = "shipped", split: Split = "train") -> list[Question]:
    """The questions of one part of `shipped`, or of a JSONL, Parquet or HF file.

    A row's own `split` is kept; rows without one are put into 60, 20 and 20 percent by a hash
    of the question, so that the same question is in the same part in every file. Of a worked
    answer like GSM8K's, what stands behind `####` is the answer.

    >>> questions = load_questions("shipped", "test")
    >>> questions[0].question
    'Ruth has 58 books and gets 44 more. How many books does Ruth have?'

    Raises:
        BadRow: a row has no question or no answer.
        ConfigError: no question is left.
    """
    if spec == "shipped":
        with resources.as_file(resources.files("batchwright.shipped") / "questions.jsonl") as path:
            rows, places = _rows(str(path))
    else:
        rows, places = _rows(spec)
    found = []
    for number, row in enumerate(rows):
        one = _question(row, number, places[number])
        if split in ("all", _part(row, one)):
            found.append(one)
    if not found:
        raise ConfigError(
            f"{spec} has {len(rows):,} rows and no question in its {split} part; "
            f"give a larger file or another part"
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
                f"{place}: no {field}; a row needs a text in one of {', '.join(names)} so that "
                f"answers can be compared"
            )
        found[field] = text
    name = str(row.get("id", row.get("sample_id", number)))
    return Question(name, found["question"], found["answer"], str(row.get("category", "")))


def _part(row: Mapping[str, Any], one: Question) -> Split:
    given = row.get("split")
    if given in ("train", "valid", "test"):
        part: Split = given
        return part
    share = key(0, "question split " + one.question) / 2**64
    return next(part for end, part in _PARTS if share < end)
