"""Measure every row of a data set on all cores, none twice."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from batchwright.data.build import Build
from batchwright.data.build.journal import Journal
from batchwright.data.build.known import Columns, Known, columns_of
from batchwright.data.lengths.cache import LengthCache
from batchwright.data.lengths.files import (
    JOURNAL,
    check_path,
    partial_path,
    read_entries,
    write_entries,
)
from batchwright.data.rows.source import OnBadRow, Skipped, Source, open_source
from batchwright.data.tokenizers import Tokenizer, load_tokenizer
from batchwright.errors import BadFile

__all__ = ["BuildReport", "build_lengths"]


@dataclass(frozen=True, slots=True)
class BuildReport:
    """What a build did: `measured` entries were tokenised, `reused` ones were known."""

    cache: LengthCache
    entries: int
    measured: int
    reused: int
    skipped: Skipped
    tokens: int
    seconds: float


def build_lengths(
    source: Source | str | Path,
    tokenizer: Tokenizer | str | Path,
    out: str | Path,
    *,
    workers: int | None = None,
    on_bad_row: OnBadRow = "fail",
    progress: Callable[[int, int], None] | None = None,
) -> BuildReport:
    """Write the length of every row of `source` to `out`.

    Entries are reused from a finished cache at `out` and from the journal of a build that was
    killed, where sample id, content and tokenizer all agree. So an interrupted run resumes, an
    appended data set costs its new rows, and a changed row is measured again. The file is the
    same whatever the number of workers and however often the build was interrupted.

    `workers` counts processes; by default all cores are used as soon as the remaining rows are
    worth the start of processes. `progress` is called with rows done and rows in all.
    """
    start = time.monotonic()
    source = open_source(source) if isinstance(source, str | Path) else source
    tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer
    out = Path(out)
    check_path(out)
    journal = Journal(partial_path(out), JOURNAL, tokenizer.fingerprint)
    try:
        known = Known.of([*_finished(out, tokenizer), *map(columns_of, journal.replay())])
        build = Build(
            source, tokenizer, known, on_bad_row=on_bad_row, workers=workers, progress=progress
        )
        for chunk in build:
            journal.append(*chunk.record())
        entries = build.entries()
        write_entries(out, entries)
    except BaseException:
        journal.close()
        raise
    journal.remove()
    return BuildReport(
        cache=LengthCache(out, entries, complete=True, resume=True),
        entries=len(entries.ids),
        measured=build.tokenised,
        reused=len(entries.ids) - build.tokenised,
        skipped=build.skipped,
        tokens=int(entries.lengths.sum(dtype=np.int64)),
        seconds=time.monotonic() - start,
    )


def _finished(out: Path, tokenizer: Tokenizer) -> Iterator[Columns]:
    """The entries of an earlier build, unless they are damaged or of another tokenizer."""
    try:
        entries = read_entries(out)
    except (BadFile, FileNotFoundError):
        return
    if entries.tokenizer_hash == tokenizer.fingerprint:
        yield entries.ids.keys(), entries.content, entries.lengths
