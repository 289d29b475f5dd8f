"""Which token stores are kept, how large they are, and removing them."""

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from batchwright.data.tokens.store import STORE
from batchwright.errors import BatchwrightError, ConfigError
from batchwright.files import home
from batchwright.sealed import MANIFEST

__all__ = ["Kept", "kept_stores", "prune", "stores_folder"]


@dataclass(frozen=True, slots=True)
class Kept:
    """A token store in the folder of them; `key` is its name there."""

    key: str
    source: str
    tokenizer: str
    samples: int
    tokens: int
    size_bytes: int
    freed_bytes: int
    """What removing it frees: nothing while a run shares its files."""
    used: float
    """When it was last opened by a build or a run, in seconds since 1970."""
    state: str
    """finished, unfinished (a build can resume it), or damaged."""


def stores_folder() -> Path:
    """Where token stores are kept: `BATCHWRIGHT_TOKENS`, else `tokens` in the home folder.

    The home folder is `BATCHWRIGHT_HOME`, by default `~/.cache/batchwright`.
    """
    if own := os.environ.get("BATCHWRIGHT_TOKENS"):
        return Path(own).expanduser().absolute()
    return home() / "tokens"


def kept_stores() -> list[Kept]:
    """Every token store, the one used last first."""
    folder = stores_folder()
    if not folder.is_dir():
        return []
    found = [_kept(path) for path in folder.iterdir() if path.is_dir()]
    return sorted(found, key=lambda store: store.used, reverse=True)


def prune(
    keys: Sequence[str] = (),
    *,
    older_than_s: float | None = None,
    max_bytes: int | None = None,
    dry_run: bool = False,
) -> list[Kept]:
    """Remove the named stores, those not used for so long, and the oldest above a size in all.

    Runs keep working: they share the files of their store, which go when the last one does.
    """
    if not keys and older_than_s is None and max_bytes is None:
        raise ConfigError(
            "nothing says which token stores to remove; name their keys, or give --older-than "
            "or --max-size"
        )
    stores = kept_stores()
    chosen = []
    for key in keys:
        matching = [store for store in stores if store.key.startswith(key)]
        if len(matching) != 1:
            raise ConfigError(
                f"{len(matching)} token stores have a key that begins with {key!r}; "
                f"`batchwright data tokens ls` shows them"
            )
        chosen += matching
    if older_than_s is not None:
        before = time.time() - older_than_s
        chosen += [store for store in stores if store.used < before and store not in chosen]
    if max_bytes is not None:
        left = [store for store in stores if store not in chosen]
        while left and sum(store.size_bytes for store in left) > max_bytes:
            chosen.append(left.pop())
    if not dry_run:
        for store in chosen:
            shutil.rmtree(stores_folder() / store.key)
    return chosen


def _kept(path: Path) -> Kept:
    files = [file.stat() for file in path.iterdir() if file.is_file()]
    source = tokenizer = "?"
    samples = tokens = 0
    state = "unfinished" if path.name.endswith(".partial") or path.name.startswith(".") else ""
    if not state:
        try:
            fields = STORE.read(path)
            source, tokenizer = fields["source"], fields["tokenizer"]
            samples = fields["files"]["offsets"]["shape"][0] - 1
            tokens = fields["files"]["tokens"]["shape"][0]
            state = "finished"
        except (BatchwrightError, KeyError, TypeError):
            state = "damaged"
    used = path / MANIFEST
    return Kept(
        key=path.name,
        source=source,
        tokenizer=tokenizer,
        samples=samples,
        tokens=tokens,
        size_bytes=sum(file.st_size for file in files),
        freed_bytes=sum(file.st_size for file in files if file.st_nlink == 1),
        used=(used if used.is_file() else path).stat().st_mtime,
        state=state,
    )
