"""Folders that say what they hold: arrays that are mapped, and a sealed `manifest.json`.

The manifest carries a checksum of its own and one for each array, so that a damaged folder is
named instead of believed.
"""

import hashlib
import json
import math
import mmap
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.errors import BadFile, BatchwrightError
from batchwright.files import atomic_folder, check_replaceable, existing
from batchwright.fingerprint import digest

__all__ = ["MANIFEST", "Kind", "array_bytes", "write_array"]

MANIFEST = "manifest.json"


class Kind:
    """A kind of folder, its format version, and what to do when one is damaged."""

    def __init__(self, format: str, version: int, what: str, again: str) -> None:
        self.format = format
        self.version = version
        self.what = what
        self._again = again
        self._says = f'"format": "{format}"'

    def replacing(self, path: Path, inside: str = "") -> AbstractContextManager[Path]:
        """A temporary folder that takes the place of `path`, if that is of this kind or empty."""
        return atomic_folder(path, inside + MANIFEST, self._says)

    def check_replaceable(self, path: Path) -> None:
        """Refuse now what `replacing` would refuse, before work is done for nothing."""
        check_replaceable(path, MANIFEST, self._says)

    def write(self, folder: Path, fields: dict[str, Any]) -> None:
        sealed = {"format": self.format, "version": self.version, **fields}
        sealed["sha256"] = digest(sealed)
        (folder / MANIFEST).write_text(json.dumps(sealed, indent=2) + "\n")

    def read(self, path: Path) -> dict[str, Any]:
        """The fields, or one sentence on why the folder is none of ours or is damaged."""
        existing(path, self.what)
        if not (path / MANIFEST).is_file():
            raise BadFile(f"{path} is not a {self.what}: it has no {MANIFEST}; {self._again}")
        try:
            sealed: dict[str, Any] = json.loads((path / MANIFEST).read_bytes())
            if sealed["format"] != self.format:
                raise self.damaged(path, f"its {MANIFEST} is of a {sealed['format']!r}")
            if sealed["version"] != self.version:
                seen = sealed["version"]
                raise self.damaged(path, f"it has format {seen}, this version reads {self.version}")
            if digest({k: v for k, v in sealed.items() if k != "sha256"}) != sealed["sha256"]:
                raise self.damaged(path, f"{MANIFEST} does not have its own checksum")
        except (ValueError, KeyError, TypeError, OSError) as error:
            if isinstance(error, BatchwrightError):
                raise
            raise self.damaged(path, f"{MANIFEST} cannot be read: {error}") from None
        return sealed

    def open_array(
        self,
        path: Path,
        name: str,
        entry: dict[str, Any],
        *,
        check: bool,
        scattered: bool = False,
    ) -> NDArray[Any]:
        """Map an array of the folder; its size is checked always, its content if asked.

        One that is `scattered` is read in small pieces from anywhere, so the system is told not
        to read ahead: that can be megabytes for every piece.
        """
        file = path / f"{name}.bin"
        size = array_bytes(entry)
        try:
            with file.open("rb") as handle:
                seen = os.fstat(handle.fileno()).st_size
                if seen != size:
                    raise self.damaged(path, f"{file.name} has {seen:,} bytes, not {size:,}")
                # An empty file cannot be mapped.
                raw = mmap.mmap(handle.fileno(), size, access=mmap.ACCESS_READ) if size else b""
            if scattered and isinstance(raw, mmap.mmap) and hasattr(mmap, "MADV_RANDOM"):
                raw.madvise(mmap.MADV_RANDOM)
        except OSError as error:
            raise self.damaged(path, f"{file.name} cannot be read: {error.strerror}") from None
        array = np.frombuffer(raw, np.dtype(entry["dtype"])).reshape(entry["shape"])
        if check:
            self.check_array(path, name, entry, array)
        return array

    def check_array(
        self, path: Path, name: str, entry: dict[str, Any], array: NDArray[Any]
    ) -> None:
        """Raise unless an array of the folder, however long it has been open, has its checksum."""
        raw = array.reshape(-1).view("u1").data if array.size else b""
        if hashlib.sha256(raw).hexdigest() != entry["sha256"]:
            raise self.damaged(path, f"{name}.bin does not have its checksum")

    def damaged(self, path: Path, reason: str) -> BadFile:
        return BadFile(f"the {self.what} {path} cannot be used: {reason}; {self._again}")


def write_array(folder: Path, name: str, array: NDArray[Any]) -> dict[str, Any]:
    """Write an array as little-endian bytes; its entry for the manifest."""
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    raw = little.reshape(-1).view("u1").data if little.size else b""
    with (folder / f"{name}.bin").open("wb") as file:
        file.write(raw)
    return {
        "dtype": little.dtype.str,
        "shape": list(little.shape),
        "sha256": hashlib.sha256(raw).hexdigest(),
    }


def array_bytes(entry: dict[str, Any]) -> int:
    """How many bytes the array of a manifest's entry has."""
    return int(math.prod(entry["shape"])) * int(np.dtype(entry["dtype"]).itemsize)
