"""`batchwright models`: download and list the models that need no hub, and merge adapters."""

from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from batchwright.cli.flags import OutFolder
from batchwright.cli.output import Format, Quiet, progress_bar, show

__all__ = ["models"]

models = App(name="models")


@models.command
def get(
    name: Annotated[str, Parameter(help="A name from `batchwright models list`.")],
    *,
    verify: Annotated[
        bool, Parameter(negative="", help="Check the sha256 of a file that is already downloaded.")
    ] = False,
    file_only: Annotated[
        bool, Parameter(negative="", help="Do not convert a trainable copy.")
    ] = False,
    quiet: Quiet = False,
    format: Format = "text",
) -> None:
    """Download a model once; of a language model, make a trainable copy as well.

    Run it again to resume after an interruption.
    """
    from importlib.util import find_spec

    from batchwright.models.registry import REGISTRY, find, get
    from batchwright.report.text import bytes_

    model = find(name)
    with progress_bar(f"downloading {name} (bytes)", quiet) as progress:
        path = get(name, verify=verify, progress=progress)
    trainable = None
    wanted = name in REGISTRY and not file_only
    able = all(find_spec(part) for part in ("torch", "transformers", "gguf", "accelerate"))
    if able and wanted:
        from batchwright.models.transformers import tokenizer_for

        tokenizer_for(name)
        trainable = str(model.folder / "transformers")
    text = f"{name}: {bytes_(model.size_bytes)}, {model.license} -> {_short(path)}"
    if trainable:
        text += f"\ntrainable copy -> {_short(Path(trainable))}"
    elif wanted:
        text += "\nto train it: pip install 'batchwright[train]' and run this again"
    facts = {"name": name, "path": str(path), "size_bytes": model.size_bytes}
    show({**facts, "trainable": trainable}, text, format)


@models.command(name="list")
def list_(*, format: Format = "text") -> None:
    """List the models that have a name, and which of them are downloaded."""
    from batchwright.models.registry import known
    from batchwright.report.text import bytes_, table

    found: list[dict[str, Any]] = [
        {
            "name": model.name,
            "what": model.what,
            "license": model.license,
            "size_bytes": model.size_bytes,
            "present": model.path is not None,
            "path": None if model.path is None else str(model.path),
        }
        for model in known()
    ]
    found.append(
        {
            "name": "tiny",
            "what": "random Llama over bytes, for demos and tests; built in",
            "license": None,
            "size_bytes": None,
            "present": True,
            "path": None,
        }
    )
    rows = [
        [one["name"], bytes_(one["size_bytes"]), one["license"] or "-", _where(one), one["what"]]
        for one in found
    ]
    show(found, table(["model", "size", "license", "where", "what"], rows), format)


@models.command
def merge(
    adapter: Annotated[Path, Parameter(help="The model folder of a run with --lora-rank.")],
    *,
    output: OutFolder,
    format: Format = "text",
) -> None:
    """Merge a LoRA adapter into the model it was trained on, as a model of its own.

    A model whose weights are no longer those of the training is refused.
    """
    from batchwright.models.adapter import merge

    found = merge(adapter, output)
    facts = {"adapter": str(adapter), "base": found.base, "rank": found.rank, "path": str(output)}
    text = f"{adapter} (rank {found.rank}) merged into {found.base} -> {output}"
    show(facts, text, format)


def _where(one: dict[str, Any]) -> str:
    if not one["present"]:
        return f"not downloaded; run: batchwright models get {one['name']}"
    return _short(Path(one["path"])) if one["path"] else "-"


def _short(path: Path) -> str:
    """The path with the home folder written as ~."""
    home = Path.home()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)
