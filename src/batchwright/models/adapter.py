"""LoRA adapters in folders: which model each was trained on, and the two of them merged."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchwright.errors import BadFile, ConfigError, Mismatch, MissingFile, need, one_line
from batchwright.files import atomic_folder, parse_json, read_regular
from batchwright.models.folder import ADAPTER, check_model, no_progress_bars, seal_model
from batchwright.models.transformers import has_tokenizer, load_model, write_tokenizer

__all__ = [
    "Adapter",
    "attach",
    "base_weights",
    "check_base",
    "find_adapter",
    "merge",
    "name_base",
]

BASE = "base.json"
"""Has the fingerprint of the weights that an adapter was trained on."""
BASE_NAME = "base_model_name_or_path"
"""The setting of an adapter, as PEFT calls it, that names the model it is of."""
SAMPLED = 1024
"""Elements of a weight that are in the fingerprint of a model."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter in a folder."""

    folder: Path
    base: str
    """The model that it was trained on, by a name that `load_model` takes."""
    rank: int
    alpha: float

    @property
    def tokenizer(self) -> str:
        """The folder or model that has its tokenizer."""
        return str(self.folder) if has_tokenizer(self.folder) else self.base


def find_adapter(name: str | Path) -> Adapter | None:
    """The adapter in the folder `name`, None if that is anything else; its base must be there."""
    folder = Path(name)
    if not (folder / ADAPTER).is_file() or (folder / "config.json").is_file():
        return None
    try:
        found = parse_json(read_regular(folder / ADAPTER))
        base, rank, alpha = found[BASE_NAME], int(found["r"]), float(found["lora_alpha"])
    except (ValueError, KeyError, TypeError) as error:
        raise BadFile(f"{folder / ADAPTER} is not of a LoRA adapter: {one_line(error)}") from None
    way = f"write where it is as {BASE_NAME} into {folder / ADAPTER}"
    if not base:
        raise MissingFile(f"the adapter {folder} does not say which model it is of; {way}")
    if Path(base).is_absolute() and not Path(base).is_dir():
        raise MissingFile(
            f"the adapter {folder} was trained on {base}, which is not there; put it back, or {way}"
        )
    return Adapter(folder, str(base), rank, alpha)


def base_weights(model: Any) -> str:
    """A fingerprint of a model's weights: elements of each, evenly spread, in 32 bits.

    Quick at any size, and another one after any training that touches every weight.
    """
    found = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        flat = weight.detach().flatten()
        sample = flat[:: max(1, len(flat) // SAMPLED)][:SAMPLED].float().cpu()
        found.update(f"{name} {tuple(weight.shape)}".encode() + sample.numpy().tobytes())
    return found.hexdigest()[:32]


def attach(model: Any, adapter: Adapter) -> Any:
    """The base `model` with the adapter, to be trained on; a base that has changed is refused."""
    peft = need("peft", extra="train")
    check_model(adapter.folder)
    check_base(model, adapter)
    try:
        adapted = peft.PeftModel.from_pretrained(model, str(adapter.folder), is_trainable=True)
    except Exception as error:  # the library raises nothing narrower for files it cannot read
        raise BadFile(
            f"the adapter {adapter.folder} cannot be loaded: {one_line(error)[:300]}"
        ) from error
    # Else the library would look for our name of the base on the hub when it saves.
    adapted.peft_config["default"].base_model_name_or_path = None
    return adapted


def name_base(folder: Path, base: str, weights: str) -> None:
    """Write into an adapter's folder which model it was trained on, and its fingerprint."""
    settings = parse_json((folder / ADAPTER).read_bytes())
    # A folder may be named from anywhere later; other names are those of models.
    settings[BASE_NAME] = str(Path(base).resolve()) if Path(base).is_dir() else base
    (folder / ADAPTER).write_text(json.dumps(settings, indent=2) + "\n")
    (folder / BASE).write_text(json.dumps({"weights": weights}) + "\n")


def merge(name: Path, output: Path) -> Adapter:
    """Write the base of an adapter with the adapter added to its weights, as a model of its own.

    The weights are added and written in 32 bits, as they were trained.
    """
    adapter = find_adapter(name)
    if adapter is None:
        raise MissingFile(
            f"no adapter at {name}: it has no {ADAPTER}; name the model folder of a run with "
            f"--lora-rank"
        )
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"{output} is there already; choose another folder for -o")
    model = attach(load_model(adapter.base).model, adapter)
    merged = model.merge_and_unload()
    with no_progress_bars(), atomic_folder(output, "config.json") as folder:
        merged.save_pretrained(folder)
        write_tokenizer(folder, adapter.tokenizer)
        seal_model(folder)
    return adapter


def check_base(model: Any, adapter: Adapter) -> None:
    """Refuse another base than the one of the training; an adapter made elsewhere names none."""
    try:
        wanted = parse_json(read_regular(adapter.folder / BASE))["weights"]
    except FileNotFoundError:
        return
    except (ValueError, KeyError, TypeError) as error:
        raise BadFile(f"{adapter.folder / BASE} cannot be read: {one_line(error)}") from None
    if (found := base_weights(model)) != wanted:
        raise Mismatch(
            f"the adapter {adapter.folder} was trained on {adapter.base} with weights {wanted}, "
            f"which now has {found}; restore the weights that it was trained on"
        )
