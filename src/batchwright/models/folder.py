"""A folder as `save_pretrained` writes it: which weights it has, its model and its tokenizer."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from batchwright.data.tokenizers import Tokenizer, load_tokenizer
from batchwright.errors import BadFile, ConfigError, need, one_line
from batchwright.files import parse_json, read_regular
from batchwright.sealed import MANIFEST, SealedFolder

__all__ = [
    "ADAPTER",
    "TOKENIZER_NAME",
    "check_model",
    "missing_weights",
    "no_progress_bars",
    "pretrained",
    "refuse_adapter",
    "seal_model",
    "tokenizer_in",
    "weightless",
]

TOKENIZER_NAME = "tokenizer_name.txt"
"""Names a tokenizer that has no files of its own, such as `bytes`."""

ADAPTER = "adapter_config.json"
"""Of a LoRA adapter, which has no weights of its own."""

WEIGHTS = ("model.safetensors", "pytorch_model.bin")


MODEL = SealedFolder(
    "batchwright.model",
    1,
    "trained model",
    f"restore it, or delete its {MANIFEST} if the change was meant",
)


def seal_model(folder: Path) -> None:
    """Write checksums of all files of a model or an adapter into its folder."""
    MODEL.write(folder, {}, sorted(path.name for path in folder.iterdir() if path.is_file()))


def check_model(folder: Path) -> None:
    """Raise if a folder has checksums and a file has changed since; others' models have none."""
    if (folder / MANIFEST).is_file():
        MODEL.check_files(folder, MODEL.read(folder))


def refuse_adapter(folder: Path) -> None:
    """Say of an adapter, or of a run, what to name instead where a whole model is needed."""
    if (folder / ADAPTER).is_file() and not (folder / "config.json").is_file():
        raise ConfigError(
            f"{folder} is a LoRA adapter, not a whole model; merge it: "
            f"batchwright models merge {folder} -o FOLDER"
        )
    if (folder / "config.toml").is_file() and (folder / "model").is_dir():
        raise ConfigError(f"{folder} is a run; its model is {folder / 'model'}")


def missing_weights(folder: Path) -> str | None:
    """The first file of weights that is named but missing, if any is."""
    for file in WEIGHTS:
        if (folder / file).is_file():
            return None
        index = folder / f"{file}.index.json"
        if index.is_file():
            try:
                named = sorted(set(parse_json(read_regular(index))["weight_map"].values()))
            except (ValueError, KeyError, TypeError, AttributeError):
                raise BadFile(f"{index} is not an index of weights; copy it again") from None
            return next((shard for shard in named if not (folder / shard).is_file()), None)
    return WEIGHTS[0]


def pretrained(folder: Path, kind: str = "AutoModelForCausalLM", **settings: Any) -> Any:
    """The model in `folder`, loaded by the class `kind` of transformers, no weight left random."""
    transformers = need("transformers", extra="train")
    check_model(folder)
    try:
        with no_progress_bars():
            model, report = getattr(transformers, kind).from_pretrained(
                folder,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                **settings,
            )
    except Exception as error:  # the library raises nothing narrower for files it cannot read
        raise BadFile(
            f"{folder} cannot be loaded: {one_line(error)[:300]}; get the model again, or name "
            f"another folder"
        ) from error
    # transformers would initialise them at random; the pooler of an embedder is not used here.
    missing = [key for key in sorted(report["missing_keys"]) if "pooler." not in key]
    if missing:
        raise BadFile(
            f"{folder} lacks {len(missing)} of the model's weights, {missing[0]} first; "
            f"get the model again"
        )
    return model


def weightless(folder: Path, kind: str = "AutoModelForCausalLM") -> Any:
    """The model in `folder` as `pretrained` gives it, with no weight read or made (`meta`)."""
    transformers = need("transformers", extra="train")
    torch = need("torch", extra="train")
    check_model(folder)
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):
            return getattr(transformers, kind).from_config(config)
    except Exception as error:  # the library raises nothing narrower for files it cannot read
        raise BadFile(
            f"{folder} cannot be loaded: {one_line(error)[:300]}; get the model again, or name "
            f"another folder"
        ) from error


def tokenizer_in(folder: Path, name: str | Path) -> Tokenizer:
    """The tokenizer of the model in `folder`, which was asked for as `name`."""
    if (folder / TOKENIZER_NAME).is_file():
        return load_tokenizer((folder / TOKENIZER_NAME).read_text().strip())
    inside = (folder / "tokenizer.json").is_file() or (folder / "vocab.json").is_file()
    # A hub id whose tokenizer is not in the cache beside the weights is looked up by its name.
    # Absolute, so that a folder without one is not taken for a hub id.
    return load_tokenizer(folder.absolute() if inside or Path(name).is_dir() else name)


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """Switch off the progress bars of transformers, which would overwrite ours."""
    logs = need("transformers", extra="train").utils.logging
    shown = logs.is_progress_bar_enabled()
    logs.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logs.enable_progress_bar()
