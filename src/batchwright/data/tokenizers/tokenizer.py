"""The interface of a tokenizer, and the built-in one over bytes."""

import copy
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from batchwright.data.tokenizers.chat import PLAIN_TEMPLATE, ChatTemplate
from batchwright.fingerprint import digest

__all__ = ["ENCODING_VERSION", "ByteTokenizer", "LossOn", "Tokenizer", "with_loss_on"]

ENCODING_VERSION = 5
"""Part of every tokenizer's fingerprint: raised when the same row would give other tokens."""


LossOn = Literal["all-turns", "last-turn", "everything"]
"""What the loss covers: every assistant turn and response, only the last turn, or all tokens."""

T = TypeVar("T", bound="Tokenizer")


class Tokenizer(Protocol):
    """What the rest of the package needs of a tokenizer.

    `fingerprint` changes whenever the tokens of some row could. `prefix` are the special tokens
    that the tokenizer puts before a text, such as a beginning-of-sequence token. Two threads may
    encode at once.
    """

    @property
    def name(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def pad_id(self) -> int: ...
    @property
    def eos_id(self) -> int | None: ...
    @property
    def prefix(self) -> tuple[int, ...]: ...
    @property
    def loss_on(self) -> LossOn: ...

    def encode_batch(self, texts: Sequence[str], *, special: bool) -> list[Sequence[int]]:
        """The token ids of each text, with the tokenizer's own special tokens or without."""
        ...

    def encode_with_offsets(
        self, texts: Sequence[str]
    ) -> list[tuple[Sequence[int], NDArray[np.int64]]]:
        """For each text its ids, no special tokens added, and [ids, 2] character offsets."""
        ...

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of these ids, with their special tokens or without."""
        ...

    @property
    def chat(self) -> ChatTemplate:
        """The chat template; `NoTokenizer` if it has none."""
        ...


class ByteTokenizer:
    """UTF-8 bytes as token ids: 0 to 255, padding 256, end of text 257.

    Needs no files and is lossless: decoding gives back the original text.

    >>> ByteTokenizer().encode_batch(["hé"], special=True)[0].tolist()
    [104, 195, 169]
    >>> ByteTokenizer().decode([104, 195, 169, 257])
    'hé'
    """

    name = "bytes"
    vocab_size = 258
    pad_id = 256
    eos_id = 257
    prefix = ()
    loss_on: LossOn = "all-turns"
    fingerprint = digest("tokenizer", ENCODING_VERSION, "bytes", PLAIN_TEMPLATE)[:16]

    def encode_batch(self, texts: Sequence[str], *, special: bool) -> list[Any]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[Any, NDArray[np.int64]]]:
        encoded = []
        for text in texts:
            raw = np.frombuffer(text.encode(), np.uint8)
            # A byte 10xxxxxx continues the character before it.
            starts = np.cumsum((raw & 0xC0) != 0x80) - 1
            encoded.append((raw, np.stack([starts, starts + 1], axis=1)))
        return encoded

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        text = bytes(int(id) for id in ids if id < 256).decode("utf-8", "replace")
        return text + "<eos>" * (special and len(ids) > 0 and ids[-1] == self.eos_id)

    @cached_property
    def chat(self) -> ChatTemplate:
        return ChatTemplate(PLAIN_TEMPLATE)


def with_loss_on(tokenizer: T, loss_on: LossOn) -> T:
    """The tokenizer for rows whose loss covers this; another fingerprint, as masks differ.

    >>> with_loss_on(ByteTokenizer(), "everything").loss_on
    'everything'
    """
    if loss_on == tokenizer.loss_on:
        return tokenizer
    other: Any = copy.copy(tokenizer)
    other.loss_on = loss_on
    other.fingerprint = digest("loss on", loss_on, tokenizer.fingerprint)[:16]
    return cast(T, other)
