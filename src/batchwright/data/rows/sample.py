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
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

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

__all__ = ["IGNORE", "Encoding", "Sample", "content_hash", "encode_row", "encode_rows", "row_id"]

# Created once: `json.dumps` would create one for every row.
_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":"), default=str).encode

Name = TypeVar("Name", int, str)
Tokens = tuple[NDArray[np.int32], NDArray[np.uint8]]
"""Ids and loss mask of a row."""


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
    encoding = Encoding(rows, tokenizer)
    encoding.tokenise()
    outcomes: list[tuple[Name, Sample | BadRow]] = []
    for name, row, tokens in encoding.tokens():
        if isinstance(tokens, BadRow):
            outcomes.append((name, tokens))
            continue
        assert not isinstance(row, BadRow), "it has no tokens"
        try:
            outcomes.append((name, _sample(row, str(name), *tokens)))
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


class Encoding(Generic[Name]):
    """Rows on their way to tokens, in steps: create it, `tokenise`, take the `tokens`.

    Only `tokenise` runs the tokenizer, which may use other cores meanwhile: another thread can
    call it while this one reads the next rows.
    """

    def __init__(self, rows: Iterable[tuple[Name, Row | BadRow]], tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._read: list[tuple[Name, Row | BadRow, Shape | BadRow]] = [
            (name, row, shape_or_reason(row, tokenizer)) for name, row in rows
        ]
        # Shapes are taken in the order they were given, so iterators are enough.
        self._texts: Iterator[Sequence[int]] = iter(())
        self._parts: Iterator[Sequence[int]] = iter(())
        self._chats: Iterator[tuple[Sequence[int], NDArray[np.int64]]] = iter(())

    def tokenise(self) -> None:
        """Run the tokenizer once for each kind of text."""
        shapes = [shape for _, _, shape in self._read]
        encode = self._tokenizer.encode_batch
        if texts := [shape.text for shape in shapes if isinstance(shape, Text)]:
            self._texts = iter(encode(texts, special=True))
        pairs = [shape for shape in shapes if isinstance(shape, Pair)]
        if parts := [part for pair in pairs for part in (pair.prompt, pair.response)]:
            self._parts = iter(encode(parts, special=False))
        if chats := [shape.text for shape in shapes if isinstance(shape, Chat)]:
            self._chats = iter(self._tokenizer.encode_with_offsets(chats))

    def tokens(self) -> Iterator[tuple[Name, Row | BadRow, Tokens | BadRow]]:
        """Each row's ids and mask, or the reason why it has none; to be iterated once."""
        for name, row, shape in self._read:
            if isinstance(shape, BadRow):
                yield name, row, shape
                continue
            ids, mask = self._tokens_of(shape)
            yield name, row, (ids, mask) if len(ids) else BadRow("has no tokens")

    def _tokens_of(self, shape: Shape) -> Tokens:
        if isinstance(shape, Ready):
            return shape.ids, shape.mask
        if isinstance(shape, Chat):
            found, offsets = next(self._chats)
            mask = np.zeros(len(found), np.uint8)
            for start, end in shape.spans:
                mask |= (offsets[:, 0] < end) & (offsets[:, 1] > start)
            return np.asarray(found, np.int32), mask
        if isinstance(shape, Text):
            ids = self._ended((), (), next(self._texts))
            return ids, np.ones(len(ids), np.uint8)
        prompt, prefix = next(self._parts), self._tokenizer.prefix
        ids = self._ended(prefix, prompt, next(self._parts))
        mask = np.zeros(len(ids), np.uint8)
        everything = self._tokenizer.loss_on == "everything"
        mask[0 if everything else len(prefix) + len(prompt) :] = 1
        return ids, mask

    def _ended(
        self, prefix: Sequence[int], prompt: Sequence[int], ids: Sequence[int]
    ) -> NDArray[np.int32]:
        """All of them, with the end-of-text token appended unless the ids end with it."""
        eos = self._tokenizer.eos_id
        end: Sequence[int] = () if eos is None or (len(ids) and ids[-1] == eos) else (eos,)
        if isinstance(ids, np.ndarray):
            return np.concatenate([np.asarray(p, np.int32) for p in (prefix, prompt, ids, end)])
        # One list, because Python joins lists quicker than numpy reads them.
        return np.array([*prefix, *prompt, *ids, *end], np.int32)


def _sample(row: Row, name: str, ids: NDArray[np.int32], mask: NDArray[np.uint8]) -> Sample:
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
