"""Settings of runs as `config.toml`: flat dataclasses, written and read back."""

import json
import tomllib
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from batchwright.errors import BadFile
from batchwright.files import existing

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Settings = TypeVar("Settings", bound=DataclassInstance)
else:
    Settings = TypeVar("Settings")

__all__ = ["flag", "from_toml", "to_toml"]


def to_toml(settings: "DataclassInstance") -> str:
    """The settings as lines `name = value`; what is None is left out."""
    lines = []
    for name, value in asdict(settings).items():
        if value is None:
            continue
        if isinstance(value, Path):
            value = str(value)
        # JSON's strings, finite numbers, booleans and lists are TOML's as well.
        lines.append(f"{name} = {json.dumps(value, ensure_ascii=False)}")
    return "\n".join(lines) + "\n"


def from_toml(kind: type[Settings], path: Path) -> Settings:
    """Read what `to_toml` wrote, or a person in its place."""
    try:
        found: dict[str, Any] = tomllib.loads(
            existing(path, "run configuration").read_text("utf-8")
        )
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadFile(f"{path} is not TOML: {error}") from None
    known = {field.name for field in fields(kind)}
    unknown = sorted(found.keys() - known)
    if unknown:
        raise BadFile(f"{path} has unknown settings {unknown}; known are {sorted(known)}")
    hints = get_type_hints(kind)
    for name, value in found.items():
        if isinstance(value, str) and hints[name] in (Path, Path | None):
            found[name] = Path(value)
        elif isinstance(value, list):
            found[name] = tuple(value)
    try:
        return kind(**found)
    except TypeError as error:
        raise BadFile(f"{path} lacks settings: {error}") from None


def flag(name: str) -> str:
    """The flag of a setting.

    >>> flag("max_steps")
    '--max-steps'
    """
    return "--" + name.replace("_", "-")
