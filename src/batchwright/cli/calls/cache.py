"""`batchwright calls cache`: inspect, prune and export a file of cached responses."""

from datetime import datetime
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from batchwright.cli.flags import amount
from batchwright.cli.output import Force, Format, Quiet, progress_bar, show

__all__ = ["cache"]

cache = App(name="cache", help="Inspect, prune and export cached responses.")

CacheFile = Annotated[Path, Parameter(help="The file of `calls run --cache`.")]


@cache.command
def stats(path: CacheFile, /, *, format: Format = "text") -> None:
    """Count cached responses by model, their disk space and cache hits."""
    from batchwright.calls.cache.store import Cache
    from batchwright.report.text import bytes_, number, table

    with Cache(path, mode="replay") as opened:
        found = opened.stats()
    facts = [
        ["responses", number(found.entries)],
        ["file", bytes_(found.file_bytes)],
        ["requests and responses", bytes_(found.value_bytes)],
        ["oldest", _day(found.oldest)],
        ["newest", _day(found.newest)],
        [f"hits since {found.since:%Y-%m-%d}", number(found.hits)],
    ]
    text = table(["call cache", str(path)], facts)
    if found.models:
        rows = [[model, number(count)] for model, count in found.models.items()]
        text += "\n\n" + table(["model", "responses"], rows)
    data = {
        "path": str(path),
        "entries": found.entries,
        "file_bytes": found.file_bytes,
        "value_bytes": found.value_bytes,
        "models": found.models,
        "hits": found.hits,
        "since": found.since.isoformat(),
        "oldest": found.oldest and found.oldest.isoformat(),
        "newest": found.newest and found.newest.isoformat(),
    }
    show(data, text, format)


@cache.command
def prune(
    path: CacheFile,
    /,
    *,
    older_than: Annotated[
        str | None, Parameter(help="Remove responses older than this: 12h, 30d, 8w.")
    ] = None,
    max_size: Annotated[
        str | None, Parameter(help="Remove the oldest until the file is this small: 500MB, 2GB.")
    ] = None,
    model: Annotated[str | None, Parameter(help="Remove responses of this model only.")] = None,
    format: Format = "text",
) -> None:
    """Delete cached responses by age, size or model, and free their disk space."""
    from batchwright.calls.cache.store import Cache
    from batchwright.files import existing
    from batchwright.report.text import bytes_, number

    age_s = None if older_than is None else amount("age", older_than)
    max_bytes = None if max_size is None else int(amount("size", max_size))
    existing(path, "call cache")
    with Cache(path) as opened:
        before = opened.stats()
        removed = opened.prune(older_than_s=age_s, max_bytes=max_bytes, model=model)
        after = opened.stats()
    data = {
        "path": str(path),
        "removed": removed,
        "entries": after.entries,
        "file_bytes_before": before.file_bytes,
        "file_bytes": after.file_bytes,
    }
    text = (
        f"removed {number(removed)} of {number(before.entries)} responses; "
        f"{path} has {bytes_(after.file_bytes)} now, {bytes_(before.file_bytes)} before"
    )
    show(data, text, format)


@cache.command
def export(
    path: CacheFile,
    /,
    *,
    out: Annotated[Path, Parameter(name=["--out", "-o"], help="The JSONL file to write.")],
    force: Force = False,
    quiet: Quiet = False,
    format: Format = "text",
) -> None:
    """Write every request with its response as a line of JSON."""
    from batchwright.calls.cache.entries import EXPORTED
    from batchwright.calls.cache.store import Cache
    from batchwright.files import check_output
    from batchwright.report.text import number

    check_output(out, EXPORTED, inputs=[path], force=force)
    with Cache(path, mode="replay") as opened, progress_bar("exporting", quiet) as progress:
        written = opened.export(out, progress)
        damaged = opened.damaged
    text = f"{number(written)} responses -> {out}"
    if damaged:
        text += f"; skipped {number(damaged)} damaged ones"
    show({"path": str(path), "out": str(out), "written": written, "damaged": damaged}, text, format)


def _day(moment: datetime | None) -> str:
    return "-" if moment is None else f"{moment:%Y-%m-%d %H:%M} UTC"
