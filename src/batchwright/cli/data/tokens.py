"""`batchwright data tokens`: which data sets were tokenised and are kept for training."""

import dataclasses
from datetime import UTC, datetime
from typing import Annotated

from cyclopts import App, Parameter

from batchwright.cli.flags import DryRun, amount
from batchwright.cli.output import Format, count_of, show

__all__ = ["tokens"]

tokens = App(name="tokens")


@tokens.command
def ls(*, format: Format = "text") -> None:
    """List token stores, the one used last first."""
    from batchwright.data.tokens import kept_stores, stores_folder
    from batchwright.report.text import bytes_, number, table

    stores = kept_stores()
    rows = [
        [
            store.key,
            store.source,
            store.tokenizer,
            number(store.samples),
            number(store.tokens),
            bytes_(store.size_bytes),
            f"{datetime.fromtimestamp(store.used, UTC):%Y-%m-%d %H:%M}",
            store.state,
        ]
        for store in stores
    ]
    headers = ["key", "data", "tokenizer", "samples", "tokens", "size", "used (UTC)", "state"]
    total = sum(store.size_bytes for store in stores)
    text = f"{count_of(len(stores), 'token store')}, {bytes_(total)}, in {stores_folder()}"
    if stores:
        text = table(headers, rows) + "\n" + text
    data = {
        "folder": str(stores_folder()),
        "size_bytes": total,
        "stores": [dataclasses.asdict(store) for store in stores],
    }
    show(data, text, format)


@tokens.command
def prune(
    keys: Annotated[
        list[str] | None,
        Parameter(negative="", help="Keys of `data tokens ls`, or their first letters."),
    ] = None,
    /,
    *,
    older_than: Annotated[
        str | None, Parameter(help="Remove stores not used for this long: 12h, 30d, 8w.")
    ] = None,
    max_size: Annotated[
        str | None, Parameter(help="Remove the longest unused until all are this small: 50GB.")
    ] = None,
    dry_run: DryRun = False,
    format: Format = "text",
) -> None:
    """Delete token stores; data is tokenised again when it is next needed.

    Runs keep theirs: a run shares the files of its token store.
    """
    from batchwright.data import tokens as stores
    from batchwright.report.text import bytes_

    removed = stores.prune(
        keys or (),
        older_than_s=None if older_than is None else amount("age", older_than),
        max_bytes=None if max_size is None else int(amount("size", max_size)),
        dry_run=dry_run,
    )
    freed = sum(store.freed_bytes for store in removed)
    shared = sum(store.size_bytes for store in removed) - freed
    done = ("would remove", "free") if dry_run else ("removed", "freed")
    text = f"{done[0]} {count_of(len(removed), 'token store')}, {done[1]} {bytes_(freed)}"
    if shared:
        text += f"; {bytes_(shared)} stay with the runs that share them"
    text += "\nnothing removed (--dry-run)" if dry_run else ""
    data = {"removed": [store.key for store in removed], "freed_bytes": freed, "dry_run": dry_run}
    show(data, text, format)
