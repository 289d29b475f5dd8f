"""Rows of every known shape to token ids and a loss mask.

The first of these that a row has decides its shape; a key whose value is null counts as absent:

    input_ids (+ labels, loss_mask,              already tokens; the loss covers what labels and
      completion_mask, assistant_masks)            all masks cover, attention_mask ends padding
    messages | conversations (+ system, tools)   a conversation, by the chat template
    chosen (+ prompt, rejected)                  the preferred answer
    prompt + completion | response | output      text, or lists of messages
    instruction (+ input | context) + output     under Alpaca's headings
    question (+ context) + answer | response     the question, a newline, the answer
    input + output                               the input, a newline, the output
    text | content | input                       plain text

`system` or `system_prompt` stands before any of them but tokens and plain text. A column of text
that a row's shape does not read is an error, unless it only repeats what is read.

The loss covers the response, every assistant turn, or all of a plain text; `loss_on` of the
tokenizer can say otherwise. A prompt and its response are tokenised separately and concatenated,
so the mask is exact. The end-of-text token, where the tokenizer has one, follows plain texts and
responses and counts for the loss; conversations end as their template ends them.
"""

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from batchwright.data.rows import Row
from batchwright.data.rows.shapes import (
    IGNORE,
    Chat,
    Pair,
    Ready,
    Shape,
    Text,
    checked_unicode,
    shape_or_reason,
)
from batchwright.data.tokenizers.tokenizer import Tokenizer
from batchwright.errors import BadRow

__all__ = ["IGNORE", "Sample", "content_hash", "encode_row", "encode_rows", "row_id"]

# Created once: `json.dumps` would create one for every row.
_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":"), default=str).encode

Name = TypeVar("Name", int, str)


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One row as tokens: `loss_mask` is 1 where the token counts for the loss."""

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    sample_id: str
    dataset_id: str | None = None
    difficulty: float | None = None

    def __len__(self) -> int:
        return len(self.input_ids)


def encode_row(row: Row, tokenizer: Tokenizer, sample_id: str) -> Sample:
    """One row as a sample, called `sample_id` unless it has an id of its own.

    >>> from batchwright.data.tokenizers import load_tokenizer
    >>> sample = encode_row({"prompt": "2+2=", "completion": "4"}, load_tokenizer("bytes"), "0")
    >>> sample.input_ids.tolist(), sample.loss_mask.tolist()
    ([50, 43, 50, 61, 52, 257], [0, 0, 0, 0, 1, 1])
    """
    ((_, outcome),) = encode_rows([(sample_id, row)], tokenizer)
    if isinstance(outcome, BadRow):
        raise outcome
    return outcome


def encode_rows(
    rows: Iterable[tuple[Name, Row | BadRow]], tokenizer: Tokenizer
) -> list[tuple[Name, Sample | BadRow]]:
    """Many rows at once, in order; each becomes a sample, or the reason why it cannot.

    All texts go to the tokenizer in one batch, which is several times faster than one by one.
    Rows are named by their number or an id; rows that are already bad pass through.
    """
    read = [(name, row, shape_or_reason(row, tokenizer)) for name, row in rows]
    tokens = _Tokens([shape for _, _, shape in read if not isinstance(shape, BadRow)], tokenizer)
    outcomes: list[tuple[Name, Sample | BadRow]] = []
    for name, row, shape in read:
        if isinstance(row, BadRow):
            outcomes.append((name, row))
            continue
        if isinstance(shape, BadRow):
            outcomes.append((name, shape))
            continue
        ids, mask = tokens.of(shape)
        try:
            outcomes.append((name, _sample(row, str(name), ids, mask)))
        except BadRow as error:
            outcomes.append((name, error))
    return outcomes


def content_hash(row: Row) -> int:
    """A 64-bit hash of a row's content, the same whatever file it is read from.

    Nulls at the top level count as absent, because Parquet gives every row every key.

    >>> content_hash({"text": "a", "id": None}) == content_hash({"text": "a"})
    True
    """
    present = {key: value for key, value in row.items() if value is not None}
    return int.from_bytes(hashlib.sha256(_canonical(present).encode()).digest()[:8], "big")


class _Tokens:
    """The tokens of many shapes, encoded in one call for each kind of text."""

    def __init__(self, shapes: Sequence[Shape], tokenizer: Tokenizer) -> None:
        self._prefix = tokenizer.prefix
        self._eos = tokenizer.eos_id
        self._everything = tokenizer.loss_on == "everything"
        texts = [shape.text for shape in shapes if isinstance(shape, Text)]
        parts = [p for s in shapes if isinstance(s, Pair) for p in (s.prompt, s.response)]
        chats = [shape.text for shape in shapes if isinstance(shape, Chat)]
        # Shapes are taken in the order they were given, so iterators are enough.
        self._texts = iter(tokenizer.encode_batch(texts, special=True) if texts else ())
        self._parts = iter(tokenizer.encode_batch(parts, special=False) if parts else ())
        self._chats = iter(tokenizer.encode_with_offsets(chats) if chats else ())

    def of(self, shape: Shape) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        if isinstance(shape, Ready):
            return shape.ids, shape.mask
        if isinstance(shape, Chat):
            found, offsets = next(self._chats)
            mask = np.zeros(len(found), np.uint8)
            for start, end in shape.spans:
                mask |= (offsets[:, 0] < end) & (offsets[:, 1] > start)
            return np.asarray(found, np.int32), mask
        if isinstance(shape, Text):
            ids = self._ended(next(self._texts))
            return ids, np.ones(len(ids), np.uint8)
        prompt = next(self._parts)
        ids = self._ended(next(self._parts), self._prefix, prompt)
        mask = np.zeros(len(ids), np.uint8)
        mask[0 if self._everything else len(self._prefix) + len(prompt) :] = 1
        return ids, mask

    def _ended(self, ids: Any, *before: Sequence[int]) -> NDArray[np.int32]:
        """All of them, with the end-of-text token appended unless the ids end with it."""
        ended = self._eos is None or (len(ids) and ids[-1] == self._eos)
        parts = (*before, ids, () if ended else (self._eos,))
        if isinstance(ids, np.ndarray):
            return np.concatenate([np.asarray(part, np.int32) for part in parts])
        # One list, because Python joins lists quicker than numpy reads them.
        return np.array([*itertools.chain(*parts)], np.int32)


def _sample(row: Row, name: str, ids: NDArray[np.int32], mask: NDArray[np.uint8]) -> Sample:
    if not len(ids):
        raise BadRow("has no tokens")
    difficulty, dataset = row.get("difficulty"), row.get("dataset_id")
    if isinstance(difficulty, bool | str) or difficulty is None or not math.isfinite(difficulty):
        difficulty = None
    return Sample(
        input_ids=ids,
        loss_mask=mask,
        sample_id=row_id(row, name),
        dataset_id=None if dataset is None else str(dataset),
        difficulty=None if difficulty is None else float(difficulty),
    )


def row_id(row: Row, name: str) -> str:
    """The row's own id from `id` or `sample_id`, in this order, else `name`."""
    for key in ("id", "sample_id"):
        given = row.get(key)
        if given is None:
            continue
        if given == "":
            raise BadRow(f"its {key} is empty; give every row its own, or choose --ids ignore")
        if isinstance(given, bool) or not isinstance(given, str | int):
            raise BadRow(f"its {key} is {given!r}; an id must be a string or an integer")
        return checked_unicode(str(given), key)
    return name
