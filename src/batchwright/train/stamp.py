"""`stamp.json`: what a run was made with."""

import json
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from batchwright import __version__
from batchwright.files import write_atomic
from batchwright.world import World

__all__ = ["write_stamp"]

_PARTS = ("numpy", "numba", "torch", "transformers", "tokenizers", "safetensors", "peft")


def write_stamp(run_dir: Path, *, seed: int, world: World) -> None:
    """Versions, commit, machine, seed and ranks; no host name and no path."""
    versions: dict[str, str | None] = {}
    for part in _PARTS:
        try:
            versions[part] = version(part)
        except PackageNotFoundError:
            versions[part] = None
    stamp = {
        "batchwright": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": versions,
        "commit": _commit(),
        "seed": seed,
        "world": world.size,
    }
    write_atomic(run_dir / "stamp.json", (json.dumps(stamp, indent=2) + "\n").encode())


def _commit() -> str | None:
    """The commit of the working directory, if it is a git repository."""
    try:
        asked = ["git", "rev-parse", "HEAD"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
