"""`batchwright data rows`: look at what will be trained, before it is."""

import sys
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from batchwright.cli.data.lengths import IdsFlag, IgnoreColumn, LossOnFlag, TokenizerName
from batchwright.cli.flags import at_least
from batchwright.cli.output import Format, count_of
from batchwright.cli.output import show as print_result
from batchwright.errors import ConfigError

if TYPE_CHECKING:
    from batchwright.data.rows import Row
    from batchwright.data.rows.sample import Sample
    from batchwright.data.rows.source import Source
    from batchwright.data.tokenizers import Tokenizer

__all__ = ["rows"]

rows = App(name="rows")

GREEN, PLAIN = "\x1b[32m", "\x1b[0m"


@rows.command
def show(
    dataset: Annotated[str, Parameter(help="Data as for `data lengths build`.")],
    *,
    tokenizer: TokenizerName = "bytes",
    rows: Annotated[int, Parameter(name=["--rows", "-n"], help="Number of rows.")] = 3,
    first: Annotated[int, Parameter(help="Number of the first row, counted from 1.")] = 1,
    loss_on: LossOnFlag = "all-turns",
    ignore_column: IgnoreColumn = None,
    ids: IdsFlag = "auto",
    format: Format = "text",
) -> None:
    """Show rows as they will be trained: columns used, template, what is read, what is learned.

    Give the tokenizer of the model with --tokenizer: it decides the tokens and the chat template.
    """
    from batchwright.data.rows.notes import untaught_ends
    from batchwright.data.rows.source import open_source
    from batchwright.data.tokenizers import load_tokenizer
    from batchwright.data.tokenizers.tokenizer import with_loss_on

    at_least(1, rows=rows, first=first)
    source = open_source(dataset, ignore_column or (), ids)
    loaded = with_loss_on(load_tokenizer(tokenizer), loss_on)
    if first > max(1, len(source)):
        raise ConfigError(f"--first {first:,} is past the last of {count_of(len(source), 'row')}")
    numbers = range(first - 1, min(first - 1 + rows, len(source)))
    shown = [_described(source, number, loaded) for number in numbers]
    left = f"rows {first:,} to {numbers.stop:,} of {len(source):,}" if numbers else "no such rows"
    how = f"tokenizer {loaded.name}, loss on {loss_on}"
    ends = untaught_ends(source, loaded)
    print_result(
        {"rows": len(source), "tokenizer": loaded.name, "loss_on": loss_on, "shown": shown}
        | {"note": ends or None},
        "\n\n".join([*map(_text, shown), *([f"note: {ends}"] if ends else []), f"{left}; {how}"]),
        format,
    )
    if shown and all("error" in one for one in shown):
        sys.exit(1)


def _described(source: "Source", number: int, tokenizer: "Tokenizer") -> dict[str, Any]:
    """One row: its columns and its tokens, or why it cannot be trained."""
    from batchwright.data.rows.sample import encode_row
    from batchwright.data.rows.shapes import Chat, Pair, read_shape
    from batchwright.data.rows.source import ID_COLUMNS
    from batchwright.errors import BadRow

    where: dict[str, Any] = {"row": source.where(number)}
    try:
        row: Row = source[number]
        shape, read = read_shape(row, tokenizer)
        used = list(dict.fromkeys(read))
        sample = encode_row(row, tokenizer, str(number))
    except BadRow as error:
        return where | {"error": str(error).removeprefix(f"{where['row']}: ")}
    ids = [name for name in ID_COLUMNS if str(row.get(name)) == sample.sample_id]
    template = "chat" if isinstance(shape, Chat) else None
    if isinstance(shape, Pair) and "instruction" in used:
        template = "Alpaca"
    pieces = []
    for learned, run in groupby(range(len(sample)), key=lambda at: bool(sample.loss_mask[at])):
        text = tokenizer.decode(sample.input_ids[list(run)].tolist(), special=True)
        pieces.append({"learned": learned, "text": text})
    return where | {
        "id": sample.sample_id,
        "columns": used,
        "not_used": [
            *(name for name in row if name not in (*used, *ids)),
            *_idle_keys(row, used, sample, tokenizer),
        ],
        "template": template,
        "tokens": len(sample),
        "loss_tokens": int(sample.loss_mask.sum()),
        "pieces": pieces,
    }


def _idle_keys(row: "Row", used: list[str], sample: "Sample", tokenizer: "Tokenizer") -> list[str]:
    """The keys of messages without which the row has the same tokens and the same loss."""
    from batchwright.data.rows.sample import encode_row
    from batchwright.data.rows.shapes import KNOWN_OF_MESSAGES
    from batchwright.data.rows.source import without
    from batchwright.errors import BadRow

    idle = []
    for column in used:
        messages = row[column] if isinstance(row[column], list) else []
        keys = {key for one in messages if isinstance(one, dict) for key in one}
        for key in sorted(keys - KNOWN_OF_MESSAGES):
            try:
                other = encode_row(without(row, [f"{column}.{key}"]), tokenizer, "0")
            except BadRow:
                continue
            same = other.input_ids.tobytes() == sample.input_ids.tobytes()
            if same and other.loss_mask.tobytes() == sample.loss_mask.tobytes():
                idle.append(f"{column}.{key}")
    return idle


def _text(shown: dict[str, Any]) -> str:
    if "error" in shown:
        return f"{shown['row']}: cannot be trained: {shown['error']}"
    other = f"; not used: {', '.join(shown['not_used'])}" if shown["not_used"] else ""
    template = f" in the {shown['template']} template" if shown["template"] else ""
    lines = [
        f"{shown['row']}: {' + '.join(shown['columns'])}{template}, "
        f"{count_of(shown['tokens'], 'token')}, {shown['loss_tokens']:,} with loss{other}"
    ]
    colour = sys.stdout.isatty()
    for piece in shown["pieces"]:
        text = repr(piece["text"])
        if piece["learned"]:
            lines.append(f"  learned {GREEN + text + PLAIN if colour else text}")
        else:
            lines.append(f"  read    {text}")
    return "\n".join(lines)
