"""Models by name, with their tokenizers: `tiny`, `smollm2`, a transformers folder, a hub id."""

import contextlib
import io
import json
import logging
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from batchwright.data.tokenizers import Tokenizer, load_tokenizer
from batchwright.errors import BadFile, ConfigError, Mismatch, MissingFile, need, one_line
from batchwright.files import atomic_folder
from batchwright.models import registry as models
from batchwright.models.tiny import tiny

__all__ = [
    "Loaded",
    "ModelInfo",
    "context_length",
    "load_model",
    "tokenizer_for",
    "write_tokenizer",
]

CONVERSION = 1
"""Raised when the conversion of a GGUF file changes, so that older copies are made anew."""

MARKER = "batchwright.json"
"""The file by which a folder is known as our conversion, and of what."""

HUB_TIMEOUT_S = 4.0

TOKENIZER_NAME = "tokenizer_name.txt"
"""Names a tokenizer that has no files of its own, such as `bytes`."""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)

WEIGHTS = ("model.safetensors", "pytorch_model.bin")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a loaded model is made of."""

    name: str
    parameters: int
    """Shared ones counted once."""
    bytes: int
    """Of the parameters in the type they were loaded in."""
    context: int | None
    """Tokens one sequence may have; None if the model states no limit."""
    vocabulary: int
    """Rows of the embedding table, which may be more than the tokenizer has ids."""


class Loaded(NamedTuple):
    """A model ready for use with the tokenizer it was trained with."""

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
    `smollm2` is made trainable from its GGUF file on first use, which takes half a minute, and
    read from that copy afterwards. Anything else is a folder as `save_pretrained` writes it, or
    a hub id: looked up in the local cache, then on the hub.

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
        tokenizer = _tokenizer(name, folder)
        model = _from_folder(folder, dtype)
    model = model.to(place)
    info = _info(str(name), model)
    if tokenizer.vocab_size > info.vocabulary:
        raise Mismatch(
            f"the tokenizer of {name} has {tokenizer.vocab_size:,} ids and the model knows "
            f"{info.vocabulary:,}; put the tokenizer it was trained with into its folder"
        )
    return Loaded(model, tokenizer, info)


def tokenizer_for(name: str | Path) -> Tokenizer:
    """The tokenizer that `load_model` gives with this model, without the weights.

    >>> tokenizer_for("tiny").vocab_size
    258
    """
    return load_tokenizer("bytes") if str(name) == "tiny" else _tokenizer(name, _folder(name))


def context_length(model: Any) -> int | None:
    """Tokens one sequence may have; None if the model states no limit."""
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
        raise ConfigError(f"there is no device {device}; use cpu, cuda or cuda:N") from None
    if found.type == "cuda" and (count := torch.cuda.device_count()) <= (found.index or 0):
        seen = f"has {count} of them" if count else "has no CUDA device that torch can use"
        raise ConfigError(f"{device} was asked for and this machine {seen}; use --device cpu")
    if found.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("mps was asked for and this machine has none; use --device cpu")
    return found


def _tiny(dtype: torch.dtype) -> Any:
    need("transformers", extra="train")
    model = tiny()
    # Not model.to(dtype): the angles of the rotary embedding must stay exact.
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
        if not (path / "config.json").is_file():
            raise MissingFile(
                f"{path} holds no config.json, so it is no transformers folder; name one that "
                f"save_pretrained wrote"
            )
        if missing := _missing_weights(path):
            raise MissingFile(f"{path} has no weights: {missing} is not there; copy it there")
        return path
    if path.is_file():
        raise ConfigError(f"{path} is a file; name the folder that holds config.json")
    if re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", text):
        return _from_hub(text)
    raise MissingFile(f"no model at {path}; {_ways()}")


def _missing_weights(folder: Path) -> str | None:
    """The first file of weights that is named and not there, if one is."""
    for file in WEIGHTS:
        if (folder / file).is_file():
            return None
        index = folder / f"{file}.index.json"
        if index.is_file():
            try:
                named = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
            except (ValueError, KeyError, TypeError, AttributeError):
                raise BadFile(f"{index} is not a list of weights; copy it again") from None
            return next((shard for shard in named if not (folder / shard).is_file()), None)
    return WEIGHTS[0]


def _from_folder(folder: Path, dtype: torch.dtype) -> Any:
    transformers = need("transformers", extra="train")
    try:
        with _silent():
            model, report = transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except Exception as error:  # the library raises nothing narrower for files it cannot read
        raise BadFile(
            f"{folder} cannot be loaded: {one_line(error)[:300]}; get the model again, or name "
            f"the folder of another"
        ) from error
    # transformers would go on with random numbers in their place.
    if missing := sorted(report["missing_keys"]):
        raise BadFile(
            f"{folder} lacks {len(missing)} of the model's weights, {missing[0]} first; "
            f"get the model again"
        )
    return model


def write_tokenizer(folder: Path, model: str | Path, tokenizer: str | None = None) -> None:
    """Put into `folder` what `load_model` needs to give the same tokenizer with it."""
    name = tokenizer or ("bytes" if str(model) == "tiny" else None)
    source = Path(name) if name else _folder(model)
    if source.is_dir():
        for file in TOKENIZER_FILES:
            if (source / file).is_file():
                shutil.copyfile(source / file, folder / file)
    elif name:
        (folder / TOKENIZER_NAME).write_text(name)


def _tokenizer(name: str | Path, folder: Path) -> Tokenizer:
    if (folder / TOKENIZER_NAME).is_file():
        return load_tokenizer((folder / TOKENIZER_NAME).read_text().strip())
    inside = (folder / "tokenizer.json").is_file() or (folder / "vocab.json").is_file()
    # A hub id whose tokenizer is not in the cache beside the weights is looked up by its name.
    # Absolute, so that a folder without one is not taken for the name of something on the hub.
    return load_tokenizer(folder.absolute() if inside or Path(name).is_dir() else name)


def _from_hub(name: str) -> Path:
    hub = need("huggingface_hub", extra="train")
    config = hub.try_to_load_from_cache(name, "config.json")
    if isinstance(config, str) and not _missing_weights(Path(config).parent):
        return Path(config).parent
    wanted = ["*.json", "*.safetensors", "*.jinja", "merges.txt"]
    try:
        with _silent():
            folder = Path(
                hub.snapshot_download(name, allow_patterns=wanted, etag_timeout=HUB_TIMEOUT_S)
            )
        # Without the hub this gives what is in the cache, which may be the tokenizer alone.
        if (folder / "config.json").is_file() and not _missing_weights(folder):
            return folder
    except (OSError, ValueError) as error:
        log.info("the hub did not give %s: %s", name, one_line(error))
    raise MissingFile(
        f"the model {name} is no folder here, is not in the local Hugging Face cache, and the "
        f"hub did not give it; {_ways()}, or set HF_HOME to a cache that has it"
    )


def _ways() -> str:
    names = ", ".join([*models.REGISTRY, "tiny"])
    return f"name a folder that holds config.json and weights, or one of {names}"


def _converted(known: models.Model) -> Path:
    """The trainable copy of a GGUF file, made on first use."""
    folder = known.folder / "transformers"
    made = {"conversion": CONVERSION, "from": known.sha256}
    if _made(folder) == made:
        return folder
    if known.path is None:
        raise MissingFile(f"{known.name} is not here yet; run: batchwright models get {known.name}")
    need("gguf", extra="train")
    need("accelerate", extra="train")
    source = models.get(known.name)
    with models.locked(known.folder):
        if _made(folder) != made:
            log.warning("making %s trainable; this takes a minute, once", known.name)
            with atomic_folder(folder, MARKER) as temporary:
                _convert(source, temporary)
                (temporary / MARKER).write_text(json.dumps(made))
    return folder


def _made(folder: Path) -> object:
    try:
        return json.loads((folder / MARKER).read_bytes())
    except (OSError, ValueError):
        return None


def _convert(source: Path, folder: Path) -> None:
    """Write the GGUF file at `source` as a transformers folder in float32."""
    transformers = need("transformers", extra="train")
    pre = need("tokenizers", extra="train").pre_tokenizers
    place: dict[str, Any] = {"gguf_file": source.name, "local_files_only": True}
    # One of the loader's bars heeds no setting.
    with _silent(), contextlib.redirect_stderr(io.StringIO()):
        tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, **place)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            source.parent, dtype=torch.float32, **place
        )
        # The loader drops the file's `tokenizer.ggml.pre = smollm`: single digits come first,
        # so that the spaces before a number stay together as the model was trained on.
        tokenizer.backend_tokenizer.pre_tokenizer = pre.Sequence(
            [pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)]
        )
        tokenizer.save_pretrained(folder)
        # The weights are plain floats now, but are still marked as ones that cannot be saved.
        del model.config.quantization_config
        model.hf_quantizer = None
        model.is_quantized = False
        model.save_pretrained(folder)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """No progress bars of the library: they would run through ours."""
    logs = need("transformers", extra="train").utils.logging
    shown = logs.is_progress_bar_enabled()
    logs.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logs.enable_progress_bar()
