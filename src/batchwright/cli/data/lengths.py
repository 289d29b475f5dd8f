"""`batchwright data lengths`: measure the length of every sample once."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from batchwright.cli.flags import Address, CachePath, On, hint, joined, load_lengths
from batchwright.cli.output import Format, Quiet, count_of, progress_bar, show, spelled
from batchwright.errors import ConfigError

if TYPE_CHECKING:
    from batchwright.data.build.workers import Workers

__all__ = ["lengths"]

lengths = App(name="lengths")

Dataset = Annotated[
    list[str],
    Parameter(
        name=["--dataset", "-d"],
        negative="",
        help="JSONL (.gz, .zst), Parquet, a folder of them, an address such as s3://BUCKET/NAME, "
        "a saved HF dataset or hf:NAME[:SPLIT]; several are concatenated.",
    ),
]
TokenizerName = Annotated[
    str,
    Parameter(
        name=["--tokenizer", "-t"],
        help="bytes, a tokenizer.json or its folder, or a hub id such as gpt2.",
    ),
]
OnBadRow = Annotated[
    Literal["fail", "skip"],
    Parameter(
        name="--on-bad-row",
        help="fail: stop at the first bad row; skip: leave bad rows out and count them.",
    ),
]
LossOnFlag = Annotated[
    Literal["all-turns", "last-turn", "everything"],
    Parameter(
        name="--loss-on",
        help="Loss on every assistant turn and response, only on the last turn, or on all tokens.",
    ),
]
IgnoreColumn = Annotated[
    list[str] | None,
    Parameter(
        name="--ignore-column", negative="", help="Leave this column of text out; repeatable."
    ),
]

IdsFlag = Annotated[
    Literal["auto", "ignore", "require"],
    Parameter(
        name="--ids",
        help="Sample ids: those of the rows where they have one, row numbers, or refuse rows "
        "without.",
    ),
]


@lengths.command
def build(
    *,
    dataset: Dataset,
    tokenizer: TokenizerName,
    output: Annotated[
        Path,
        Parameter(
            name=["--output", "-o"],
            help="Length cache: .jsonl is readable, .safetensors loads fast.",
        ),
    ],
    on_bad_row: OnBadRow = "fail",
    loss_on: LossOnFlag = "all-turns",
    ignore_column: IgnoreColumn = None,
    ids: IdsFlag = "auto",
    repeated_ids: Annotated[
        Literal["fail", "skip"],
        Parameter(help="fail: stop at rows with the same id; skip: keep the first, count others."),
    ] = "fail",
    workers: Annotated[
        int | None, Parameter(help="Worker processes; default: all cores where it is worth it.")
    ] = None,
    on: On = "here",
    address: Address = None,
    dry_run: Annotated[
        bool, Parameter(negative="", help="Check data and tokenizer, measure and write nothing.")
    ] = False,
    quiet: Quiet = False,
    format: Format = "text",
) -> None:
    """Measure all rows into a length cache. Run it again to resume or to add new rows."""
    from batchwright.data.measure import build_lengths
    from batchwright.data.rows.notes import untaught_ends
    from batchwright.data.rows.source import open_source
    from batchwright.data.tokenizers import load_tokenizer
    from batchwright.data.tokenizers.tokenizer import with_loss_on
    from batchwright.report.text import seconds

    source = open_source(dataset[0] if len(dataset) == 1 else dataset, ignore_column or (), ids)
    loaded = with_loss_on(load_tokenizer(tokenizer), loss_on)
    ends = untaught_ends(source, loaded)
    notes = [f"note: {ends}"] if ends else []
    if dry_run:
        result = {"rows": len(source), "tokenizer": loaded.name, "output": spelled(output)}
        text = f"{count_of(len(source), 'row')} would be measured with {loaded.name} into "
        lines = [f"{text}{spelled(output)}", *notes, "nothing written (--dry-run)"]
        show(result | {"note": ends or None}, "\n".join(lines), format)
        return
    using: int | Workers | None = workers
    if on == "ray" and workers is not None:
        raise ConfigError("--workers does not go with --on ray, which uses all its cores")
    if joined(on, address):
        from batchwright.integrations.ray import RayWorkers

        using = RayWorkers()
    with progress_bar("measuring", quiet) as progress:
        report = build_lengths(
            source,
            loaded,
            output,
            workers=using,
            on_bad_row=on_bad_row,
            repeated_ids=repeated_ids,
            progress=progress,
        )
    assert report.store.entries.loss is not None
    without_loss = int((report.store.entries.loss[:, 1] == 0).sum())
    result = {
        "output": spelled(output),
        "samples": report.entries,
        "tokens": report.tokens,
        "measured": report.measured,
        "reused": report.reused,
        "skipped": report.skipped.count,
        "skipped_reasons": list(report.skipped.reasons),
        "repeated": report.repeated.count,
        "repeated_reasons": list(report.repeated.reasons),
        "without_loss": without_loss,
        "token_store": str(report.store.path),
        "note": ends or None,
        "seconds": report.seconds,
        "tokenizer_hash": report.cache.lengths.tokenizer_hash,
        "dataset_hash": report.cache.lengths.dataset_hash,
    }
    lines = [
        f"{count_of(report.entries, 'sample')}, {count_of(report.tokens, 'token')} "
        f"-> {spelled(output)}",
        f"measured {report.measured:,}, reused {report.reused:,}, "
        f"skipped {report.skipped.count:,} in {seconds(report.seconds)}",
        *(f"  skipped {reason}" for reason in report.skipped.reasons),
        *(
            [f"left out {count_of(again, 'repeated id')}"]
            if (again := report.repeated.count)
            else []
        ),
        *(f"  left out {reason}" for reason in report.repeated.reasons),
        *(
            [f"{count_of(without_loss, 'sample')} without a token with loss"]
            if without_loss
            else []
        ),
        *notes,
        hint("data", "batching", "suggest", "-c", output),
    ]
    show(result, "\n".join(lines), format)


@lengths.command
def stats(
    *,
    cache: CachePath,
    format: Format = "text",
) -> None:
    """Summarise a length cache: samples, tokens, quantiles."""
    from batchwright.batching.analyze.report import compute_length_histogram
    from batchwright.report.text import number, table

    loaded = load_lengths(cache)
    histogram = compute_length_histogram(loaded)
    facts = {
        "samples": histogram.total_samples,
        "tokens": histogram.total_tokens,
        "shortest": histogram.min_length,
        "longest": histogram.max_length,
        "mean": histogram.mean_length,
        "std": histogram.std_length,
        **{name: getattr(histogram, name) for name in ("p25", "p50", "p75", "p90", "p95", "p99")},
    }
    hashes = {"tokenizer_hash": loaded.tokenizer_hash, "dataset_hash": loaded.dataset_hash}
    text = table(["", "value"], [[name, number(value)] for name, value in facts.items()])
    text += f"\ntokenizer {loaded.tokenizer_hash}, data {loaded.dataset_hash}"
    show({**facts, **hashes}, text, format)
