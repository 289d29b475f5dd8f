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
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Number
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

__all__ = [
    "IGNORE",
    "Encoded",
    "Encoding",
    "Sample",
    "content_hash",
    "content_hashes",
    "encode_row",
    "encode_rows",
    "row_id",
]

# Created once: `json.dumps` would create one for every row.
_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":"), default=str).encode

Name = TypeVar("Name", int, str)
BETWEEN = secrets.token_hex(8)
"""A text that is in no row."""


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
    given = list(rows)
    encoding = Encoding([row for _, row in given], tokenizer)
    encoding.tokenise()
    encoded = encoding.result()
    ends: list[int] = np.cumsum(encoded.lengths).tolist()
    outcomes: list[tuple[Name, Sample | BadRow]] = []
    for at, ((name, row), start, end) in enumerate(zip(given, [0, *ends], ends, strict=False)):
        try:
            if isinstance(row, BadRow) or at in encoded.bad:
                raise encoded.bad[at]
            # Copied, so that a sample that is kept does not keep the others.
            ids, mask = encoded.tokens[start:end].copy(), encoded.mask[start:end].copy()
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
    return int(content_hashes([row])[0])


def content_hashes(rows: Sequence[Row]) -> NDArray[np.uint64]:
    """The `content_hash` of each row."""
    present = [{key: value for key, value in row.items() if value is not None} for row in rows]
    hashes = [hashlib.sha256(raw).digest()[:8] for raw in _written(present)]
    return np.frombuffer(b"".join(hashes), ">u8").astype(np.uint64)


def _written(rows: Sequence[Row]) -> Iterable[bytes]:
    """Each row as canonical JSON.

    All are written at once, which is quicker, with a text between them that none of them has.
    """
    together: list[Row | str] = [BETWEEN] * (2 * len(rows) - 1)
    together[::2] = rows
    try:
        written = _canonical(together)[1:-1].encode().split(b',"%b",' % BETWEEN.encode())
    except RecursionError:
        # In the list they are nested one level deeper.
        written = []
    return written if len(written) == len(rows) else [_canonical(row).encode() for row in rows]


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """Rows as tokens and loss mask, one after another."""

    lengths: NDArray[np.int32]
    tokens: NDArray[np.int32]
    mask: NDArray[np.uint8]
    bad: dict[int, BadRow]
    """Why a row, by its place, has no tokens; its length is 0."""


class Encoding:
    """Rows on their way to tokens, in steps: create it, `tokenise`, take the `result`.

    Only `tokenise` runs the tokenizer, which may use other cores meanwhile: another thread can
    call it while this one reads the next rows.
    """

    def __init__(self, rows: Iterable[Row | BadRow], tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._shapes = [shape_or_reason(row, tokenizer) for row in rows]
        # Shapes are taken in the order they were given, so iterators are enough.
        self._texts: Iterator[Sequence[int]] = iter(())
        self._parts: Iterator[Sequence[int]] = iter(())
        self._chats: Iterator[tuple[Sequence[int], NDArray[np.int64]]] = iter(())

    def tokenise(self) -> None:
        """Run the tokenizer once for each kind of text."""
        encode = self._tokenizer.encode_batch
        if texts := [shape.text for shape in self._shapes if isinstance(shape, Text)]:
            self._texts = iter(encode(texts, special=True))
        pairs = [shape for shape in self._shapes if isinstance(shape, Pair)]
        if parts := [part for pair in pairs for part in (pair.prompt, pair.response)]:
            self._parts = iter(encode(parts, special=False))
        if chats := [shape.text for shape in self._shapes if isinstance(shape, Chat)]:
            self._chats = iter(self._tokenizer.encode_with_offsets(chats))

    def result(self) -> Encoded:
        """The tokens; to be taken once."""
        pieces: list[Sequence[int] | NDArray[Any]] = []
        bad: dict[int, BadRow] = {}
        ends: list[int] = []
        trained: list[tuple[int, int, Any]] = []
        total = 0
        for at, shape in enumerate(self._shapes):
            start = total
            if isinstance(shape, BadRow):
                bad[at] = shape
            else:
                own, first, mask = self._pieces_of(shape)
                pieces += own
                total += sum(map(len, own))
                trained.append((start + first, total, mask))
                if total == start:
                    bad[at] = BadRow("has no tokens")
            ends.append(total)
        masks = np.zeros(total, np.uint8)
        for begin, end, mask in trained:
            masks[begin:end] = mask
        lengths = np.diff(np.array(ends, np.int64), prepend=0).astype(np.int32)
        return Encoded(lengths, _joined(pieces, total), masks, bad)

    def _pieces_of(
        self, shape: Shape
    ) -> tuple[list[Sequence[int] | NDArray[Any]], int, NDArray[np.uint8] | int]:
        """The tokens of a row in pieces, and the mask from some token on, before which it is 0."""
        if isinstance(shape, Pair):
            prefix, prompt, ids = self._tokenizer.prefix, next(self._parts), next(self._parts)
            everything = self._tokenizer.loss_on == "everything"
            first = 0 if everything else len(prefix) + len(prompt)
            return [prefix, prompt, ids, self._end_of(ids)], first, 1
        if isinstance(shape, Text):
            ids = next(self._texts)
            return [ids, self._end_of(ids)], 0, 1
        if isinstance(shape, Ready):
            return [shape.ids], 0, shape.mask
        ids, offsets = next(self._chats)
        mask = np.zeros(len(ids), np.uint8)
        for start, end in shape.spans:
            mask |= (offsets[:, 0] < end) & (offsets[:, 1] > start)
        return [ids], 0, mask

    def _end_of(self, ids: Sequence[int]) -> Sequence[int]:
        """The end-of-text token, unless the ids end with it."""
        eos = self._tokenizer.eos_id
        return () if eos is None or (len(ids) and ids[-1] == eos) else (eos,)


def _joined(pieces: Sequence[Sequence[int] | NDArray[Any]], total: int) -> NDArray[np.int32]:
    if any(isinstance(piece, np.ndarray) for piece in pieces):
        # An empty list would count as one of floats.
        filled = [piece for piece in pieces if len(piece)] or [np.empty(0, np.int32)]
        return np.concatenate(filled, dtype=np.int32, casting="same_kind")
    # Lists are read one number at a time in any case.
    return np.fromiter(itertools.chain.from_iterable(pieces), np.int32, total)


def _sample(row: Row, name: str, ids: NDArray[np.int32], mask: NDArray[np.uint8]) -> Sample:
    difficulty, dataset = row.get("difficulty"), row.get("dataset_id")
    number: Any = difficulty if isinstance(difficulty, Number) else math.nan
    if isinstance(number, bool) or not math.isfinite(number):
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
