"""Concurrency limits that earlier runs found, one file for all endpoints of a user."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchwright.errors import BadFile, CannotRead, CannotWrite, MissingFile
from batchwright.models import registry as models
from batchwright.sealed import read_sealed_json, write_sealed_json

__all__ = ["limits_path", "load_limit", "save_limits"]


def limits_path() -> Path:
    """The file that holds them."""
    return models.home() / "limits.json"


def load_limit(address: str) -> dict[str, Any] | None:
    """What an earlier run learned about an endpoint; None if nothing readable is there."""
    state = None
    with contextlib.suppress(CannotRead):
        state = _known().get(address)
    return state if isinstance(state, dict) else None


def save_limits(states: Mapping[str, dict[str, Any]]) -> None:
    """Save what was learned by address; entries of other endpoints stay.

    It only saves the next run a ramp, so a disk that refuses is not an error.
    """
    with contextlib.suppress(CannotRead, CannotWrite):
        write_sealed_json(limits_path(), {**_known(), **states})


def _known() -> dict[str, Any]:
    """All that is saved; nothing if the file is not there or damaged: it is learned again."""
    try:
        return read_sealed_json(limits_path(), "file of limits", "")
    except (BadFile, MissingFile):
        return {}
