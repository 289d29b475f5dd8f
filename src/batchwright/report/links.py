"""Which files of a run directory may be read on behalf of somebody else: those that lie in it."""

import os
import stat
from pathlib import Path

__all__ = ["refusal"]


def refusal(path: Path, inside: Path) -> str:
    """Why a file, or a folder with the files in it, is not read; "" if it is, or is not there.

    `inside` is the folder that is shown, with its own links resolved. Links that stay in it are
    followed. A pipe or a device could keep a reader waiting for ever.
    """
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            if _leads_out(path, inside):
                return "leads out of the folder and is not read"
            with os.scandir(path) as entries:
                for entry in entries:
                    if not entry.is_file(follow_symlinks=False) and (
                        why := _file(Path(entry.path), inside)
                    ):
                        return f"holds {entry.name}, which {why}"
            return ""
        return _file(path, inside)
    except OSError:
        # Whoever opens it says what is wrong.
        return ""


def _file(path: Path, inside: Path) -> str:
    if _leads_out(path, inside):
        return "leads out of the folder and is not read"
    mode = path.stat().st_mode
    return "" if stat.S_ISREG(mode) or stat.S_ISDIR(mode) else "is no regular file and is not read"


def _leads_out(path: Path, inside: Path) -> bool:
    found = path.resolve()
    return found != inside and inside not in found.parents
