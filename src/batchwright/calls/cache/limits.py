"""Concurrency limits that earlier runs found, one file for all endpoints of a user."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchwright.errors import CannotWrite
from batchwright.files import write_atomic
from batchwright.models import registry as models

__all__ = ["limits_path", "load_limit", "save_limits"]


def limits_path() -> Path:
    """The file that holds them."""
    return models.home() / "limits.json"


def load_limit(address: str) -> dict[str, Any] | None:
    """What an earlier run learned about an endpoint; None if nothing readable is there."""
    try:
        state = json.loads(limits_path().read_bytes())[address]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return state if isinstance(state, dict) else None


def save_limits(states: Mapping[str, dict[str, Any]]) -> None:
    """Save what was learned by address; entries of other endpoints stay.

    It only saves the next run a ramp, so a disk that refuses is not an error.
    """
    try:
        known = json.loads(limits_path().read_bytes())
    except (OSError, ValueError):
        known = {}
    if not isinstance(known, dict):
        known = {}
    text = json.dumps({**known, **states}, indent=1, sort_keys=True)
    try:
        write_atomic(limits_path(), text.encode() + b"\n")
    except CannotWrite:
        return
