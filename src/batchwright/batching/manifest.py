"""The `manifest.json` of a folder: what it holds, sealed with a checksum of its own."""

import json
from pathlib import Path
from typing import Any

from batchwright.errors import BadFile, BatchwrightError
from batchwright.files import existing
from batchwright.fingerprint import digest

__all__ = ["MANIFEST", "Kind"]

MANIFEST = "manifest.json"


class Kind:
    """A kind of folder, its format version, and what to do when one is damaged."""

    def __init__(self, format: str, version: int, what: str, again: str) -> None:
        self.format = format
        self.version = version
        self.what = what
        self._again = again

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

    def damaged(self, path: Path, reason: str) -> BadFile:
        return BadFile(f"the {self.what} {path} cannot be used: {reason}; {self._again}")
