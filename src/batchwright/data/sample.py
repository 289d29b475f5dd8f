"""Rows of every known shape become token ids and a loss mask.

The first of these that a row has decides its shape; a key whose value is null counts as absent:

    input_ids (+ loss_mask)                      already tokens; taken as they are
    messages (+ tools)                           a conversation, by the chat template
    prompt + completion | response               text, or lists of messages
    instruction (+ input) + output | response    under Alpaca's headings
    question + answer                            the question, a newline, the answer
    text | content | input                       plain text

The loss covers the response, every assistant turn, or all of a plain text. A prompt and its
response are tokenised apart and joined, so the mask is exact. The end-of-text token, where the
tokenizer has one, follows plain texts and responses and counts for the loss; conversations end
as their template ends them.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from batchwright.errors import BadRow

if TYPE_CHECKING:
    from batchwright.data.tokenizers import Tokenizer

__all__ = ["ENCODING_VERSION", "Row", "Sample", "content_hash", "encode_row", "encode_rows"]

ENCODING_VERSION = 1
"""Part of every tokenizer's fingerprint: raised when the same row would give other tokens."""

Row = Mapping[str, Any]
Name = TypeVar("Name", int, str)


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One row as tokens: `loss_mask` is 1 where the model is to learn the token."""

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    sample_id: str
    dataset_id: str | None = None
    difficulty: float | None = None

    def __len__(self) -> int:
        return len(self.input_ids)


def encode_row(row: Row, tokenizer: "Tokenizer", sample_id: str) -> Sample:
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
    rows: Iterable[tuple[Name, Row | BadRow]], tokenizer: "Tokenizer"
) -> list[tuple[Name, Sample | BadRow]]:
    """Many rows at once, in order; each becomes a sample or the reason why it cannot.

    All texts go to the tokenizer together, which is several times faster than one by one. Rows
    are named by their number or an id; rows that are already bad pass through.
    """
    read = [(name, row, _shape_or_reason(row, tokenizer)) for name, row in rows]
    tokens = _Tokens([shape for _, _, shape in read if not isinstance(shape, BadRow)], tokenizer)
    outcomes: list[tuple[Name, Sample | BadRow]] = []
    for name, row, shape in read:
        if isinstance(row, BadRow) or isinstance(shape, BadRow):
            outcomes.append((name, shape if isinstance(shape, BadRow) else row))
            continue
        ids, mask = tokens.of(shape)
        try:
            outcomes.append((name, _sample(row, str(name), ids, mask)))
        except BadRow as error:
            outcomes.append((name, error))
    return outcomes


def content_hash(row: Row) -> int:
    """64 bits of a row's content, the same whatever file it is read from.

    Nulls at the top count as absent, because Parquet gives every row every key.

    >>> content_hash({"text": "a", "id": None}) == content_hash({"text": "a"})
    True
    """
    present = {key: value for key, value in row.items() if value is not None}
    text = json.dumps(present, sort_keys=True, separators=(",", ":"), default=str)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


@dataclass(frozen=True, slots=True)
class _Text:
    text: str


@dataclass(frozen=True, slots=True)
class _Pair:
    prompt: str
    response: str


@dataclass(frozen=True, slots=True)
class _Chat:
    text: str
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class _Ready:
    ids: NDArray[np.int32]
    mask: NDArray[np.uint8]


_Shape = _Text | _Pair | _Chat | _Ready


def _shape_or_reason(row: Row | BadRow, tokenizer: "Tokenizer") -> _Shape | BadRow:
    if isinstance(row, BadRow):
        return row
    try:
        return _shape(row, tokenizer)
    except BadRow as error:
        return error


def _shape(row: Row, tokenizer: "Tokenizer") -> _Shape:
    def has(key: str) -> bool:
        return row.get(key) is not None

    if has("input_ids"):
        return _ready(row, tokenizer.vocab_size)
    if has("messages"):
        return _chat(row, row["messages"], 0, tokenizer)
    if has("prompt"):
        response = _one_of(row, "prompt", ("completion", "response"))
        if isinstance(row["prompt"], list) and isinstance(row[response], list):
            conversation = [*row["prompt"], *row[response]]
            return _chat(row, conversation, len(row["prompt"]), tokenizer)
        return _pair(_string(row, "prompt"), _string(row, response))
    if has("instruction"):
        response = _one_of(row, "instruction", ("output", "response"))
        middle = f"### Input:\n{_string(row, 'input')}\n\n" if row.get("input") else ""
        prompt = f"### Instruction:\n{_string(row, 'instruction')}\n\n{middle}### Response:\n"
        return _pair(prompt, _string(row, response))
    if has("question"):
        answer = _one_of(row, "question", ("answer",))
        return _pair(_string(row, "question") + "\n", _string(row, answer))
    for key in ("text", "content", "input"):
        if has(key):
            text = _string(row, key)
            if not text:
                raise BadRow(f"its {key} is empty, so there are no tokens to learn")
            return _Text(text)
    raise BadRow(
        f"has none of the known keys; saw {_keys(row)}; known are input_ids, messages, "
        f"prompt + completion, instruction + output, question + answer, and text"
    )


def _pair(prompt: str, response: str) -> _Pair:
    if not prompt and not response:
        raise BadRow("its prompt and response are both empty, so there are no tokens to learn")
    return _Pair(prompt, response)


def _ready(row: Row, vocab_size: int) -> _Ready:
    ids = _integers(row, "input_ids")
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
        wrong = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise BadRow(
            f"its input_ids hold {wrong}, outside the tokenizer's vocabulary of {vocab_size:,}; "
            f"name the tokenizer that made them"
        )
    if row.get("loss_mask") is None:
        return _Ready(ids.astype(np.int32), np.ones(len(ids), np.uint8))
    mask = _integers(row, "loss_mask")
    if len(mask) != len(ids):
        raise BadRow(f"its loss_mask has {len(mask)} entries for {len(ids)} input_ids")
    if len(mask) and not 0 <= mask.min() <= mask.max() <= 1:
        raise BadRow("its loss_mask holds values other than 0 and 1")
    return _Ready(ids.astype(np.int32), mask.astype(np.uint8))


def _chat(row: Row, given: Any, first: int, tokenizer: "Tokenizer") -> _Chat:
    """A rendered conversation, and the characters the assistant says from message `first` on.

    The assistant's words are what a turn adds to the rendering of all before it, the generation
    prompt included. That holds only while earlier turns render as they did, which is checked.
    """
    messages = _messages(given)
    tools = row.get("tools")

    def render(count: int, prompt: bool) -> str:
        return tokenizer.render_chat(messages[:count], add_generation_prompt=prompt, tools=tools)

    text = render(len(messages), False)
    spans = []
    for number in range(first, len(messages)):
        if messages[number]["role"] != "assistant":
            continue
        before, after = render(number, True), render(number + 1, False)
        if not (text.startswith(after) and after.startswith(before)):
            raise BadRow(
                f"the chat template is not prefix-stable: the first {number + 1} messages render "
                f"differently once more follow, so the assistant's words cannot be found"
            )
        spans.append((len(before), len(after)))
    if not spans:
        raise BadRow("has no assistant message to learn from")
    return _Chat(_unicode(text, "conversation"), tuple(spans))


def _messages(given: Any) -> list[dict[str, Any]]:
    if not isinstance(given, list) or not given:
        raise BadRow("its messages are not a list with at least one message")
    messages = []
    for number, message in enumerate(given):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise BadRow(f"its message {number} is not an object with a role")
        if "content" not in message and "tool_calls" not in message:
            raise BadRow(f"its message {number} has no content")
        # Parquet gives every message every key; templates ask whether a key is there at all.
        kept = {k: v for k, v in message.items() if v is not None or k == "content"}
        messages.append(kept)
    return messages


class _Tokens:
    """The tokens of many shapes, encoded in as few calls as there are kinds of text."""

    def __init__(self, shapes: Sequence[_Shape], tokenizer: "Tokenizer") -> None:
        self._prefix = tokenizer.prefix
        self._eos = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
        texts = [shape.text for shape in shapes if isinstance(shape, _Text)]
        parts = [p for s in shapes if isinstance(s, _Pair) for p in (s.prompt, s.response)]
        chats = [shape.text for shape in shapes if isinstance(shape, _Chat)]
        # Shapes are asked for in the order they were given, so iterators are enough.
        self._texts = iter(tokenizer.encode_batch(texts, special=True) if texts else ())
        self._parts = iter(tokenizer.encode_batch(parts, special=False) if parts else ())
        self._chats = iter(tokenizer.encode_with_offsets(chats) if chats else ())

    def of(self, shape: _Shape) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        if isinstance(shape, _Ready):
            return shape.ids, shape.mask
        if isinstance(shape, _Chat):
            found, offsets = next(self._chats)
            mask = np.zeros(len(found), np.uint8)
            for start, end in shape.spans:
                mask |= (offsets[:, 0] < end) & (offsets[:, 1] > start)
            return np.asarray(found, np.int32), mask
        if isinstance(shape, _Text):
            ids = self._ended(next(self._texts))
            return ids, np.ones(len(ids), np.uint8)
        prompt = next(self._parts)
        response = self._ended(next(self._parts))
        before = np.concatenate([self._prefix, prompt]).astype(np.int32)
        mask = np.zeros(len(before) + len(response), np.uint8)
        mask[len(before) :] = 1
        return np.concatenate([before, response]), mask

    def _ended(self, ids: Sequence[int]) -> NDArray[np.int32]:
        """The ids with the end-of-text token behind, unless it is there already."""
        done = len(ids) and self._eos and ids[-1] == self._eos[0]
        return np.asarray(ids if done else [*ids, *self._eos], np.int32)


def _sample(row: Row, name: str, ids: NDArray[np.int32], mask: NDArray[np.uint8]) -> Sample:
    if not len(ids):
        raise BadRow("has no tokens")
    difficulty, dataset = row.get("difficulty"), row.get("dataset_id")
    if isinstance(difficulty, bool | str) or difficulty is None or not math.isfinite(difficulty):
        difficulty = None
    return Sample(
        input_ids=ids,
        loss_mask=mask,
        sample_id=_id(row, name),
        dataset_id=None if dataset is None else str(dataset),
        difficulty=None if difficulty is None else float(difficulty),
    )


def _id(row: Row, name: str) -> str:
    for key in ("id", "sample_id"):
        given = row.get(key)
        if given is None:
            continue
        if isinstance(given, bool) or not isinstance(given, str | int) or given == "":
            raise BadRow(f"its {key} is {given!r}; an id is a string or a whole number")
        return _unicode(str(given), key)
    return name


def _one_of(row: Row, having: str, keys: tuple[str, ...]) -> str:
    for key in keys:
        if row.get(key) is not None:
            return key
    raise BadRow(f"has {having} but no {' or '.join(keys)}; saw {_keys(row)}")


def _string(row: Row, key: str) -> str:
    value = row[key]
    if not isinstance(value, str):
        raise BadRow(f"its {key} is of type {type(value).__name__}, not text")
    return _unicode(value, key)


def _unicode(text: str, key: str) -> str:
    # JSON can spell half of a surrogate pair, which no tokenizer can read.
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadRow(f"its {key} holds half of a surrogate pair, which is not text") from None
    return text


def _integers(row: Row, key: str) -> NDArray[np.int64]:
    try:
        array = np.asarray(row[key])
    except ValueError:
        array = np.empty(0, object)
    if array.ndim == 1 and array.size == 0 and array.dtype != object:
        return np.empty(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iub":
        raise BadRow(f"its {key} are not a list of whole numbers")
    return array.astype(np.int64)


def _keys(row: Row) -> str:
    names = sorted(str(key) for key in row)
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return f"[{shown}]"
