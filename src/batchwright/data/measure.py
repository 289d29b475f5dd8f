"""Measure every row of a data set on all cores, none twice."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from batchwright.data.build.build import RepeatedIds
from batchwright.data.build.workers import Workers
from batchwright.data.lengths.cache import LengthCache
from batchwright.data.lengths.files import check_path, write_entries
from batchwright.data.rows.source import OnBadRow, Skipped, Source, open_source
from batchwright.data.tokenizers import Tokenizer, load_tokenizer
from batchwright.data.tokens import TokenStore, make_store

__all__ = ["BuildReport", "build_lengths"]


@dataclass(frozen=True, slots=True)
class BuildReport:
    """What a build did: `measured` entries were tokenised, `reused` ones were known."""

    cache: LengthCache
    store: TokenStore
    """Where the tokens are kept for training."""
    entries: int
    measured: int
    reused: int
    skipped: Skipped
    repeated: Skipped
    """Rows that were left out because an earlier one has their id."""
    tokens: int
    seconds: float


def build_lengths(
    source: Source | str | Path,
    tokenizer: Tokenizer | str | Path,
    out: str | Path,
    *,
    workers: int | Workers | None = None,
    on_bad_row: OnBadRow = "fail",
    repeated_ids: RepeatedIds = "fail",
    progress: Callable[[int, int], None] | None = None,
) -> BuildReport:
    """Write the length of every row of `source` to `out`, and keep the tokens for training.

    Rows are not tokenised again where sample id, content and tokenizer all agree with a token
    store of this data or an earlier version of it, or with what a killed build left. So an
    interrupted run resumes, an appended data set costs its new rows, and a changed row is
    measured again. The file is the same whatever the number of workers and however often the
    build was interrupted.

    `workers` counts processes. By default the tokenizer's own threads use all cores beside this
    process, and more processes start where that leaves cores idle for long.
    `progress` is called with rows done and rows in all.
    """
    start = time.monotonic()
    source = open_source(source) if isinstance(source, str | Path) else source
    tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer
    out = Path(out)
    check_path(out)
    store, measured = make_store(
        source,
        tokenizer,
        on_bad_row=on_bad_row,
        repeated_ids=repeated_ids,
        workers=workers,
        progress=progress,
    )
    entries = store.entries
    write_entries(out, entries)
    return BuildReport(
        cache=LengthCache(out, entries, complete=True, resume=True),
        store=store,
        entries=len(store),
        measured=measured,
        reused=len(store) - measured,
        skipped=store.skipped,
        repeated=store.repeated,
        tokens=int(entries.lengths.sum(dtype=np.int64)),
        seconds=time.monotonic() - start,
    )
