"""Folders with valid checksums whose content nobody of good will would write."""

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np

from batchwright.fingerprint import digest
from batchwright.sealed import BLOCK, MANIFEST, PAGE, SUMS, ArrayWriter, sha256_of, write_array

VALUES: list[Any] = [
    *(-1, 0, 1, 7, 2**31 - 1, 2**31, 2**40, 2**62, -(2**63), 1e308, float("nan"), None, True),
    *("", "x", "../../etc/passwd", "/etc/passwd", "a\0b", "O", "<f8", "packed", "sorted", [], {}),
    *([2**40], [-1, -1], {"a": 1}, ["items"] * 3, "\x1b[2J"),
]


def craft(folder: Path, draw: random.Random) -> str:
    """Change an array or the manifest of a sealed folder below this one, and seal it again."""
    manifests = sorted(folder.rglob(MANIFEST))
    path = draw.choice(manifests).parent
    fields = json.loads((path / MANIFEST).read_bytes())
    files = fields.get("files", {})
    arrays = [name for name in files if isinstance(files[name], dict)]
    if arrays and draw.random() < 0.7:
        name = draw.choice(arrays)
        files |= _craft_array(path, name, files, draw)
        what = name
    else:
        what = _craft_fields(fields, draw)
    for name, entry in files.items() if isinstance(files, dict) else ():
        if isinstance(entry, str) and os.path.isfile(path / name):
            files[name] = sha256_of(path / name)
    fields.pop("sha256", None)
    try:
        fields["sha256"] = digest(fields)
    except TypeError:
        fields["sha256"] = ""
    (path / MANIFEST).write_text(json.dumps(fields))
    return what


def _craft_array(
    path: Path, name: str, files: dict[str, Any], draw: random.Random
) -> dict[str, Any]:
    entry = files[name]
    raw = np.fromfile(path / f"{name}.bin", entry["dtype"])
    (path / f"{name}.bin").unlink()
    size = len(raw)
    kind = draw.choice(("value", "value", "value", "values", "longer", "shorter", "sorted", "type"))
    hostile = [-1, 0, 1, size, size + 1, 2**31 - 1, -(2**31), 2**62, -(2**63), draw.randrange(100)]
    with np.errstate(all="ignore"):
        value = np.array(draw.choice(hostile), np.int64).astype(raw.dtype)
    if kind in ("value", "values") and size:
        many = size if kind == "values" else 1
        raw[[draw.randrange(size) for _ in range(draw.randint(1, many))]] = value
    elif kind == "longer":
        raw = np.append(raw, np.full(draw.randint(1, 5), value, raw.dtype))
    elif kind == "shorter":
        raw = raw[: draw.randrange(size)] if size else raw
    elif kind == "sorted":
        raw = np.sort(raw)[:: draw.choice((1, -1))]
    elif kind == "type":
        raw = raw.astype(draw.choice(("<i8", "<i4", "<f8", "u1", "<u8")))
    made = write_array(path, name, np.ascontiguousarray(raw), entry.get("block", BLOCK))
    if name + SUMS in files:
        writer = ArrayWriter(raw.dtype, PAGE)
        writer.update(raw.tobytes())
        return writer.write_sums(path, name)
    shape = entry["shape"]
    if len(shape) == 2 and len(raw) % shape[1] == 0:
        made["shape"] = [len(raw) // shape[1], shape[1]]
    return {name: made}


def _craft_fields(fields: dict[str, Any], draw: random.Random) -> str:
    """Replace, remove or rename one thing anywhere in nested fields."""
    here: Any = fields
    names: list[str] = []
    while True:
        keys = list(here) if isinstance(here, dict) else list(range(len(here)))
        keys = [key for key in keys if key not in ("format", "version", "sha256")]
        key = draw.choice(keys)
        names.append(str(key))
        inner = here[key]
        if isinstance(inner, dict | list) and inner and draw.random() < 0.8:
            here = inner
            continue
        if draw.random() < 0.8:
            here[key] = draw.choice(VALUES)
        elif isinstance(here, dict):
            value = here.pop(key)
            if draw.random() < 0.5:
                here[draw.choice(("../x", "/x", "x", "x" * 300))] = value
        return ".".join(names)
