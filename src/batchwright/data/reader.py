"""Tokens of a plan's samples, read from their rows when they are needed."""

from collections.abc import Callable, Sequence

import numpy as np

from batchwright.data.entries import dataset_hash, mixture_hash
from batchwright.data.ids import Ids
from batchwright.data.rows.sample import Sample, content_hash, encode_row, row_id
from batchwright.data.rows.source import Source
from batchwright.data.tokenizers import Tokenizer
from batchwright.errors import BadRow, Mismatch

__all__ = ["find_rows", "rows_hash", "sample_reader"]


def sample_reader(
    sources: Sequence[Source], tokenizer: Tokenizer, ids: Ids, names: Sequence[str] = ()
) -> Callable[[int], Sample]:
    """A function that tokenises a sample by its number in the plan.

    Samples are looked up by id, so rows that were skipped, moved or added since the lengths were
    measured do not shift the others. For a mixture of several sources, `names` are the prefixes
    of their ids.
    """
    places = find_rows(sources, ids, names)

    def read(item: int) -> Sample:
        part, row = places(item)
        source = sources[part]
        found = source[row]
        try:
            return encode_row(found, tokenizer, ids[item])
        except BadRow as error:
            raise BadRow(f"{source.where(row)}: {error}") from None

    return read


def find_rows(
    sources: Sequence[Source], ids: Ids, names: Sequence[str] = ()
) -> Callable[[int], tuple[int, int]]:
    """A function that maps the number of a sample to its source and row."""
    if names and len(names) != len(sources):
        raise Mismatch(
            f"the plan mixes {len(names)} sources ({', '.join(names)}), {len(sources)} are given; "
            f"give one data set for each, in this order"
        )
    total = sum(len(source) for source in sources)
    if ids.arrays is None and not names and len(sources) == 1:
        if total < len(ids):
            raise Mismatch(
                f"the plan has {len(ids):,} samples, {sources[0].name} only has {total:,} rows; "
                f"give the data it was built from"
            )
        return lambda item: (0, item)
    rows: dict[str, tuple[int, int]] = {}
    before = 0
    for part, source in enumerate(sources):
        prefix = f"{names[part]}/" if names else ""
        for row, name in enumerate(_row_ids(source, 0 if names else before)):
            rows[prefix + name] = (part, row)
        before += len(source)

    def place(item: int) -> tuple[int, int]:
        name = ids[item]
        if name not in rows:
            raise Mismatch(
                f"sample {name!r} of the plan is not in {', '.join(s.name for s in sources)}; "
                f"give the data it was built from"
            )
        return rows[name]

    return place


def rows_hash(sources: Sequence[Source], ids: Ids, names: Sequence[str] = ()) -> str:
    """The `dataset_hash` of the rows with these ids, as they are now.

    Equal to that of the lengths if no row has changed since they were measured; rows that were
    added or moved do not matter.
    """
    place = find_rows(sources, ids, names)
    places = [place(item) for item in range(len(ids))]
    content = np.array([content_hash(sources[part][row]) for part, row in places], np.uint64)
    if not names:
        return dataset_hash(ids, content)
    parts = {}
    for number, name in enumerate(names):
        items = [item for item, (part, _) in enumerate(places) if part == number]
        own = Ids.of(id.removeprefix(f"{name}/") for id in ids.take(items))
        parts[name] = dataset_hash(own, content[items])
    return mixture_hash(parts)


def _row_ids(source: Source, first: int) -> Sequence[str]:
    """The id of every row: its own, or its number."""
    found = []
    for item, row in source.chunk(0, len(source)).rows():
        name = str(first + item)
        try:
            found.append(name if isinstance(row, BadRow) else row_id(row, name))
        except BadRow:
            # It was not a sample when lengths were measured either, so it is never looked up.
            found.append(name)
    return found
