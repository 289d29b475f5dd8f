"""Folders with a sealed `manifest.json`: what they hold, in which version, with checksums.

The manifest carries a checksum of its own and one for each array or file, so that a damaged
folder is refused by name instead of being read.
"""

import hashlib
import json
import math
import mmap
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.errors import BadFile, BatchwrightError
from batchwright.files import atomic_folder, check_replaceable, existing
from batchwright.fingerprint import digest

__all__ = ["MANIFEST", "SealedFolder", "array_bytes", "write_array"]

MANIFEST = "manifest.json"


class SealedFolder:
    """A kind of folder: its format and version, what it is called, what to do if it is damaged."""

    def __init__(self, format: str, version: int, what: str, remedy: str) -> None:
        self.format = format
        self.version = version
        self.what = what
        self._remedy = remedy
        self._says = f'"format": "{format}"'

    def replacing(self, path: Path, inside: str = "") -> AbstractContextManager[Path]:
        """A temporary folder that replaces `path`, if that is of this kind or empty."""
        return atomic_folder(path, inside + MANIFEST, self._says)

    def check_replaceable(self, path: Path) -> None:
        """Refuse now what `replacing` would refuse, before work is done for nothing."""
        check_replaceable(path, MANIFEST, self._says)

    def write(self, folder: Path, fields: dict[str, Any], files: Sequence[str] = ()) -> None:
        """Write the manifest: `fields`, with the SHA-256 of each of `files` under `files`."""
        if files:
            fields = {**fields, "files": {name: _sha256(folder / name) for name in files}}
        sealed = {"format": self.format, "version": self.version, **fields}
        sealed["sha256"] = digest(sealed)
        (folder / MANIFEST).write_text(json.dumps(sealed, indent=2) + "\n")

    def read(self, path: Path) -> dict[str, Any]:
        """The fields of the manifest; `BadFile` if the folder is of another kind or damaged."""
        existing(path, self.what)
        if not (path / MANIFEST).is_file():
            raise BadFile(f"{path} is not a {self.what}: it has no {MANIFEST}; {self._remedy}")
        try:
            sealed: dict[str, Any] = json.loads((path / MANIFEST).read_bytes())
            if sealed["format"] != self.format:
                raise self.damaged(path, f"its format is {sealed['format']!r}, not {self.format!r}")
            if sealed["version"] != self.version:
                seen = sealed["version"]
                raise self.damaged(
                    path, f"it has format version {seen}, this version reads {self.version}"
                )
            if digest({k: v for k, v in sealed.items() if k != "sha256"}) != sealed["sha256"]:
                raise self.damaged(path, f"{MANIFEST} does not match its checksum")
        except (ValueError, KeyError, TypeError, OSError) as error:
            if isinstance(error, BatchwrightError):
                raise
            raise self.damaged(path, f"{MANIFEST} cannot be read: {error}") from None
        return sealed

    def check_files(self, path: Path, fields: dict[str, Any]) -> None:
        """Raise unless every file that the manifest lists under `files` matches its checksum."""
        for name, expected in fields.get("files", {}).items():
            try:
                found = _sha256(path / name)
            except OSError as error:
                raise self.damaged(path, f"{name} cannot be read: {error.strerror}") from None
            if found != expected:
                raise self.damaged(path, f"{name} does not match its checksum")

    def open_array(
        self,
        path: Path,
        name: str,
        entry: dict[str, Any],
        *,
        check: bool,
        scattered: bool = False,
    ) -> NDArray[Any]:
        """Map an array of the folder; its size is always checked, its content with `check`.

        A `scattered` array is read in small pieces at random, so readahead is switched off: it
        can be megabytes for every piece.
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
        """Raise unless an array of the folder, however long open, matches its checksum."""
        raw = array.reshape(-1).view("u1").data if array.size else b""
        if hashlib.sha256(raw).hexdigest() != entry["sha256"]:
            raise self.damaged(path, f"{name}.bin does not match its checksum")

    def damaged(self, path: Path, reason: str) -> BadFile:
        """The error for a folder of this kind that cannot be used, and the way out."""
        return BadFile(f"the {self.what} {path} cannot be used: {reason}; {self._remedy}")


def write_array(folder: Path, name: str, array: NDArray[Any]) -> dict[str, Any]:
    """Write an array as little-endian bytes and return its entry for the manifest."""
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
    """The size in bytes of the array that an entry of a manifest describes."""
    return int(math.prod(entry["shape"])) * int(np.dtype(entry["dtype"]).itemsize)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
