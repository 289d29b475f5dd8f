"""Tokenizers of the `tokenizers` library, from a file or a folder."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.data.tokenizers.chat import ChatTemplate
from batchwright.data.tokenizers.tokenizer import ENCODING_VERSION, LossOn
from batchwright.errors import BadFile, NoTokenizer, one_line
from batchwright.files import parse_json, read_regular
from batchwright.fingerprint import digest

__all__ = ["VOCABULARIES", "FileTokenizer", "from_folder", "from_json"]

EOS_NAMES = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "<|eot_id|>", "<|im_end|>")
"""Tried in this order where no configuration file names the end-of-text token."""

CACHED_WORDS = 2**17
"""Words whose tokens the library remembers: its own 10,000 are few for a text of any size."""

GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend", "TokenizersBackendFast")
"""Classes of transformers that have no end of text of their own, as GPT2TokenizerFast has."""
VOCABULARIES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))


class FileTokenizer:
    """A tokenizer of the `tokenizers` library with the settings of its folder."""

    loss_on: LossOn = "all-turns"

    def __init__(
        self,
        inner: Any,
        name: str,
        content: str,
        *,
        tokens: Mapping[str, str] | None = None,
        template: str | None = None,
    ) -> None:
        # Files saved after training often have both, and both change lengths.
        inner.no_truncation()
        inner.no_padding()
        # Only models that split words have such a cache, and it changes no token.
        if resize := getattr(inner.model, "_resize_cache", None):
            resize(CACHED_WORDS)
        self._inner = inner
        self.name = name
        self.vocab_size = 1 + max(inner.get_vocab(with_added_tokens=True).values(), default=-1)
        tokens = dict(tokens or {})
        eos = [tokens["eos_token"]] if "eos_token" in tokens else EOS_NAMES
        known = (inner.token_to_id(token) for token in eos)
        self.eos_id: int | None = next((id for id in known if id is not None), None)
        pad = inner.token_to_id(tokens["pad_token"]) if "pad_token" in tokens else None
        self.pad_id: int = next(id for id in (pad, self.eos_id, 0) if id is not None)
        self.prefix = _prefix(inner)
        self._chat = None if template is None else ChatTemplate(template, tokens)
        self.fingerprint = digest(
            "tokenizer", ENCODING_VERSION, content, self.eos_id, template, tokens
        )[:16]

    def encode_batch(self, texts: Sequence[str], *, special: bool) -> list[Sequence[int]]:
        encodings = self._inner.encode_batch_fast(list(texts), add_special_tokens=special)
        return [encoding.ids for encoding in encodings]

    def encode_with_offsets(
        self, texts: Sequence[str]
    ) -> list[tuple[Sequence[int], NDArray[np.int64]]]:
        encodings = self._inner.encode_batch(list(texts), add_special_tokens=False)
        return [(e.ids, np.array(e.offsets, np.int64).reshape(-1, 2)) for e in encodings]

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        return str(self._inner.decode([int(id) for id in ids], skip_special_tokens=not special))

    @property
    def chat(self) -> ChatTemplate:
        if self._chat is None:
            raise NoTokenizer(
                f"the tokenizer {self.name} has no chat template, which rows of messages need; "
                f"put a chat_template.jinja into its folder and name the folder, or use -t bytes"
            )
        return self._chat


def from_json(path: Path, name: str, **side: Any) -> FileTokenizer:
    """The tokenizer in one `tokenizer.json`."""
    from tokenizers import Tokenizer as Inner

    raw = read_regular(path)
    try:
        inner = Inner.from_buffer(raw)
    except Exception as error:  # the library raises nothing narrower
        raise NoTokenizer(f"{path} is not a tokenizer.json: {one_line(error)[:200]}") from None
    return FileTokenizer(inner, name, hashlib.sha256(raw).hexdigest(), **side)


def from_folder(folder: Path, name: str) -> FileTokenizer | None:
    """The tokenizer in a folder with its configuration files; None if there is none."""
    config = _json(folder / "tokenizer_config.json")
    tokens = _special_tokens(_json(folder / "special_tokens_map.json") | config)
    if "eos_token" in config or config.get("tokenizer_class") in GENERIC:
        # Said to have none; a token that is merely called like one ends no text.
        tokens.setdefault("eos_token", "")
    side = {
        "tokens": tokens,
        "template": _template(folder, config),
    }
    if (folder / "tokenizer.json").is_file():
        return from_json(folder / "tokenizer.json", name, **side)
    for vocabulary, merges in VOCABULARIES:
        if (folder / vocabulary).is_file() and (folder / merges).is_file():
            return _from_bpe(folder / vocabulary, folder / merges, name, **side)
    return None


def _from_bpe(vocabulary: Path, merges: Path, name: str, **side: Any) -> FileTokenizer:
    """Byte-level BPE from GPT-2's two files, vocabulary and merges."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers

    try:
        inner = Inner(models.BPE.from_file(str(vocabulary), str(merges)))
    except Exception as error:  # the library raises nothing narrower
        raise NoTokenizer(
            f"{vocabulary} and {merges.name} are not a vocabulary: {one_line(error)[:200]}"
        ) from None
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    named = [token for key, token in side["tokens"].items() if key.endswith("_token")]
    known = inner.get_vocab(with_added_tokens=False)
    inner.add_special_tokens([token for token in (*EOS_NAMES, *named) if token in known])
    raw = hashlib.sha256(vocabulary.read_bytes()), hashlib.sha256(merges.read_bytes())
    return FileTokenizer(inner, name, digest("bpe", *(h.hexdigest() for h in raw)), **side)


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = parse_json(read_regular(path))
    except BadFile:
        raise
    except ValueError as error:
        raise NoTokenizer(f"{path} is not JSON: {one_line(error)}") from None
    return content if isinstance(content, dict) else {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for key, value in config.items():
        if key.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                tokens[key] = text
    return tokens


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    given = config.get("chat_template")
    if isinstance(given, list):
        named = {entry.get("name"): entry.get("template") for entry in given}
        given = named.get("default")
    return given if isinstance(given, str) else None


def _prefix(inner: Any) -> tuple[int, ...]:
    plain = inner.encode("a", add_special_tokens=False).ids
    whole = inner.encode("a", add_special_tokens=True).ids
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return tuple(whole[:start])
    return ()
