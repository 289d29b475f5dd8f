"""Models to train, by name, with their tokenizers: tiny, smollm2, a folder, a hub id."""

import contextlib
import io
import json
import logging
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from batchwright.data.tokenizers import Tokenizer, load_tokenizer
from batchwright.errors import ConfigError, Mismatch, MissingFile, need, one_line
from batchwright.files import atomic_folder, parse_json, read_regular
from batchwright.models import registry as models
from batchwright.models.folder import (
    TOKENIZER_NAME,
    missing_weights,
    no_progress_bars,
    pretrained,
    refuse_adapter,
    tokenizer_in,
    weightless,
)
from batchwright.models.tiny import tiny

__all__ = [
    "Loaded",
    "ModelInfo",
    "context_length",
    "has_tokenizer",
    "load_model",
    "tokenizer_for",
    "write_tokenizer",
]

CONVERSION = 1
"""Raised when the conversion of a GGUF file changes, so that older copies are converted again."""

MARKER = "batchwright.json"
"""The file that marks a folder as our conversion, and says of what."""

HUB_TIMEOUT_S = 4.0

TOKENIZER_FILES = (
    TOKENIZER_NAME,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The size of a loaded model."""

    name: str
    parameters: int
    """Tied ones counted once."""
    bytes: int
    """Of the parameters in the dtype they were loaded in."""
    context: int | None
    """Longest sequence in tokens; None if the model states no limit."""
    vocabulary: int
    """Rows of the embedding table, which may be more than the tokenizer has ids."""


class Loaded(NamedTuple):
    """A model with the tokenizer it was trained with."""

    model: Any
    tokenizer: Tokenizer
    info: ModelInfo


def load_model(
    name: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> Loaded:
    """The model called `name`, on `device` with parameters of `dtype`.

    `tiny` is a random Llama of a million parameters over bytes, the same in every process.
    `smollm2` is converted from its GGUF file on first use, which takes half a minute, and loaded
    from that copy afterwards. Anything else is a folder as `save_pretrained` writes it, or
    a hub id: looked up in the local cache, then on the hub. On the device `meta` a model has its
    shapes and no weights, and none are read.

    >>> model, tokenizer, info = load_model("tiny")
    >>> info.parameters, info.context, info.vocabulary, tokenizer.name
    (1025152, 8192, 320, 'bytes')
    """
    place = _device(device)
    if not dtype.is_floating_point:
        raise ConfigError(f"a model cannot be trained in {dtype}; use float32 or bfloat16")
    if str(name) == "tiny":
        model, tokenizer = _tiny(dtype), load_tokenizer("bytes")
    else:
        folder = _folder(name)
        # The tokenizer first: it is quick, and without it the weights are of no use.
        tokenizer = tokenizer_in(folder, name)
        model = weightless(folder) if place.type == "meta" else pretrained(folder, dtype=dtype)
    if place.type != "meta":
        model = model.to(place)
    info = _info(str(name), model)
    if tokenizer.vocab_size > info.vocabulary:
        raise Mismatch(
            f"the tokenizer of {name} has {tokenizer.vocab_size:,} ids and the model has "
            f"{info.vocabulary:,}; put the tokenizer it was trained with into its folder"
        )
    return Loaded(model, tokenizer, info)


def tokenizer_for(name: str | Path) -> Tokenizer:
    """The tokenizer that `load_model` gives with this model, without the weights.

    >>> tokenizer_for("tiny").vocab_size
    258
    """
    if str(name) == "tiny":
        return load_tokenizer("bytes")
    return tokenizer_in(Path(name) if has_tokenizer(name) else _folder(name), name)


def context_length(model: Any) -> int | None:
    """The longest sequence in tokens; None if the model states no limit."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def _info(name: str, model: Any) -> ModelInfo:
    parameters = list(model.parameters())
    return ModelInfo(
        name=name,
        parameters=sum(p.numel() for p in parameters),
        bytes=sum(p.numel() * p.element_size() for p in parameters),
        context=context_length(model),
        vocabulary=model.get_input_embeddings().weight.shape[0],
    )


def _device(device: str | torch.device) -> torch.device:
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"unknown device {device}; use cpu, cuda or cuda:N") from None
    if found.type == "cuda" and (count := torch.cuda.device_count()) <= (found.index or 0):
        seen = f"{count} CUDA devices" if count else "no CUDA device that torch can use"
        raise ConfigError(f"device {device} is not available: found {seen}; use --device cpu")
    if found.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("device mps is not available on this machine; use --device cpu")
    return found


def _tiny(dtype: torch.dtype) -> Any:
    need("transformers", extra="train")
    model = tiny()
    # Not model.to(dtype): the frequencies of the rotary embedding must stay in float32.
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)
    model.config.dtype = dtype
    return model.eval()


def _folder(name: str | Path) -> Path:
    """The folder that holds the model called `name`."""
    text, path = str(name), Path(name)
    if text in models.REGISTRY:
        return _converted(models.find(text))
    if path.is_dir():
        refuse_adapter(path)
        if not (path / "config.json").is_file():
            raise MissingFile(
                f"{path} has no config.json, so it is not a transformers folder; name one that "
                f"save_pretrained wrote"
            )
        if missing := missing_weights(path):
            raise MissingFile(f"{path} has no weights: {missing} is missing; copy it there")
        return path
    if path.is_file():
        raise ConfigError(f"{path} is a file; name the folder that has config.json")
    if re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", text):
        return _from_hub(text)
    raise MissingFile(f"no model at {path}; {_ways()}")


def write_tokenizer(folder: Path, model: str | Path, tokenizer: str | None = None) -> None:
    """Write into `folder` what `load_model` needs to load the same tokenizer from it."""
    name = tokenizer or ("bytes" if str(model) == "tiny" else None)
    source = Path(name) if name else Path(model) if has_tokenizer(model) else _folder(model)
    if source.is_dir():
        for file in TOKENIZER_FILES:
            if (source / file).is_file():
                shutil.copyfile(source / file, folder / file)
    elif name:
        (folder / TOKENIZER_NAME).write_text(name)


def has_tokenizer(folder: str | Path) -> bool:
    """Whether a folder has a tokenizer; that of an adapter may be its base's."""
    return any((Path(folder) / file).is_file() for file in TOKENIZER_FILES)


def _from_hub(name: str) -> Path:
    hub = need("huggingface_hub", extra="train")
    config = hub.try_to_load_from_cache(name, "config.json")
    if isinstance(config, str) and not missing_weights(Path(config).parent):
        return Path(config).parent
    wanted = ["*.json", "*.safetensors", "*.jinja", "merges.txt"]
    try:
        with no_progress_bars():
            folder = Path(
                hub.snapshot_download(name, allow_patterns=wanted, etag_timeout=HUB_TIMEOUT_S)
            )
        # Offline this returns what is in the cache, which may be the tokenizer alone.
        if (folder / "config.json").is_file() and not missing_weights(folder):
            return folder
    except (OSError, ValueError) as error:
        log.info("cannot download %s: %s", name, one_line(error))
    raise MissingFile(
        f"the model {name} is not a local folder, not in the local Hugging Face cache, and could "
        f"not be downloaded; {_ways()}, or set HF_HOME to a cache that has it"
    )


def _ways() -> str:
    names = ", ".join([*models.REGISTRY, "tiny"])
    return f"name a folder with config.json and weights, or one of {names}"


def _converted(known: models.Model) -> Path:
    """The trainable copy of a GGUF file, made on first use."""
    folder = known.folder / "transformers"
    made = {"conversion": CONVERSION, "from": known.sha256}
    if _made(folder) == made:
        return folder
    if known.path is None:
        raise MissingFile(
            f"{known.name} is not downloaded yet; run: batchwright models get {known.name}"
        )
    need("gguf", extra="train")
    need("accelerate", extra="train")
    source = models.get(known.name)
    with models.locked(known.folder):
        if _made(folder) != made:
            log.warning("converting %s for training; this takes a minute, once", known.name)
            with atomic_folder(folder, MARKER) as temporary:
                _convert(source, temporary)
                (temporary / MARKER).write_text(json.dumps(made))
    return folder


def _made(folder: Path) -> object:
    try:
        return parse_json(read_regular(folder / MARKER))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def _convert(source: Path, folder: Path) -> None:
    """Write the GGUF file at `source` as a transformers folder in float32."""
    transformers = need("transformers", extra="train")
    pre = need("tokenizers", extra="train").pre_tokenizers
    place: dict[str, Any] = {"gguf_file": source.name, "local_files_only": True}
    # One of the loader's progress bars ignores the setting.
    with no_progress_bars(), contextlib.redirect_stderr(io.StringIO()):
        tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, **place)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            source.parent, dtype=torch.float32, **place
        )
        # The loader drops the file's `tokenizer.ggml.pre = smollm`: digits are split first, so
        # that the spaces before a number stay together, as in training.
        tokenizer.backend_tokenizer.pre_tokenizer = pre.Sequence(
            [pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)]
        )
        tokenizer.save_pretrained(folder)
        # The weights are dequantised now, but still marked as quantised, which cannot be saved.
        del model.config.quantization_config
        model.hf_quantizer = None
        model.is_quantized = False
        model.save_pretrained(folder)
