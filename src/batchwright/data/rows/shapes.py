"""The known shapes of rows, and which one a row has."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.data.rows import Row
from batchwright.data.rows.turns import trained_spans
from batchwright.data.tokenizers.tokenizer import Tokenizer
from batchwright.errors import BadRow

__all__ = ["Chat", "Pair", "Ready", "Shape", "Text", "checked_unicode", "shape_or_reason"]


@dataclass(frozen=True, slots=True)
class Text:
    """Plain text: the loss covers all of it."""

    text: str


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt and a response: the loss covers the response."""

    prompt: str
    response: str


@dataclass(frozen=True, slots=True)
class Chat:
    """A rendered conversation and the character ranges that the loss covers."""

    text: str
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Ready:
    """Tokens and mask as the row has them."""

    ids: NDArray[np.int32]
    mask: NDArray[np.uint8]


Shape = Text | Pair | Chat | Ready


def shape_or_reason(row: Row | BadRow, tokenizer: Tokenizer) -> Shape | BadRow:
    """The shape of a row, or why it has none."""
    if isinstance(row, BadRow):
        return row
    try:
        return _shape(row, tokenizer)
    except BadRow as error:
        return error


def _shape(row: Row, tokenizer: Tokenizer) -> Shape:
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
                raise BadRow(f"its {key} is empty, so there are no tokens to train on")
            return Text(text)
    raise BadRow(
        f"has none of the known keys; saw {_keys(row)}; known are input_ids, messages, "
        f"prompt + completion, instruction + output, question + answer, and text"
    )


def _pair(prompt: str, response: str) -> Pair:
    if not prompt and not response:
        raise BadRow("its prompt and response are both empty, so there are no tokens to train on")
    return Pair(prompt, response)


def _ready(row: Row, vocab_size: int) -> Ready:
    ids = _integers(row, "input_ids")
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
        wrong = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise BadRow(
            f"its input_ids contain {wrong}, outside the tokenizer's vocabulary of {vocab_size:,}; "
            f"name the tokenizer that made them"
        )
    if row.get("loss_mask") is None:
        return Ready(ids.astype(np.int32), np.ones(len(ids), np.uint8))
    mask = _integers(row, "loss_mask")
    if len(mask) != len(ids):
        raise BadRow(f"its loss_mask has {len(mask)} entries for {len(ids)} input_ids")
    if len(mask) and not 0 <= mask.min() <= mask.max() <= 1:
        raise BadRow("its loss_mask has values other than 0 and 1")
    return Ready(ids.astype(np.int32), mask.astype(np.uint8))


def _chat(row: Row, given: Any, first: int, tokenizer: Tokenizer) -> Chat:
    """A rendered conversation, and the assistant turns from message `first` on."""
    text, spans = trained_spans(tokenizer.chat, _messages(given), row.get("tools"), first)
    return Chat(checked_unicode(text, "conversation"), tuple(spans))


def _messages(given: Any) -> list[dict[str, Any]]:
    if not isinstance(given, list) or not given:
        raise BadRow("its messages are not a list with at least one message")
    messages = []
    for number, message in enumerate(given):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise BadRow(f"its message {number} is not an object with a role")
        if "content" not in message and "tool_calls" not in message:
            raise BadRow(f"its message {number} has no content")
        # Parquet gives every message every key; templates test whether a key exists.
        kept = {k: v for k, v in message.items() if v is not None or k == "content"}
        messages.append(kept)
    return messages


def _one_of(row: Row, having: str, keys: tuple[str, ...]) -> str:
    for key in keys:
        if row.get(key) is not None:
            return key
    raise BadRow(f"has {having} but no {' or '.join(keys)}; saw {_keys(row)}")


def _string(row: Row, key: str) -> str:
    value = row[key]
    if not isinstance(value, str):
        raise BadRow(f"its {key} is of type {type(value).__name__}, not text")
    return checked_unicode(value, key)


def checked_unicode(text: str, key: str) -> str:
    # JSON can encode half of a surrogate pair, which no tokenizer can read.
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadRow(
            f"its {key} has half of a surrogate pair, which is not valid Unicode"
        ) from None
    return text


def _integers(row: Row, key: str) -> NDArray[np.int64]:
    try:
        array = np.asarray(row[key])
    except ValueError:
        array = np.empty(0, object)
    if array.ndim == 1 and array.size == 0 and array.dtype != object:
        return np.empty(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iub":
        raise BadRow(f"its {key} are not a list of integers")
    return array.astype(np.int64)


def _keys(row: Row) -> str:
    names = sorted(str(key) for key in row)
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return f"[{shown}]"
