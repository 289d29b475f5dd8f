"""`batchwright data batch`: write the batches of a plan as NPZ files."""

from typing import Annotated

from cyclopts import App, Parameter

from batchwright.cli.data.lengths import Dataset, IdsFlag, IgnoreColumn, LossOnFlag, TokenizerName
from batchwright.cli.flags import OutFolder, PlanPath
from batchwright.cli.output import Format, Quiet, count_of, progress_bar, show, spelled

__all__ = ["batch"]

batch = App(name="batch")


@batch.command
def generate(
    *,
    plan: PlanPath,
    dataset: Dataset,
    tokenizer: TokenizerName,
    output: OutFolder,
    loss_on: LossOnFlag = "all-turns",
    ignore_column: IgnoreColumn = None,
    ids: IdsFlag = "auto",
    per_file: Annotated[int, Parameter(help="Batches in one NPZ file.")] = 64,
    dry_run: Annotated[bool, Parameter(negative="", help="Write nothing.")] = False,
    quiet: Quiet = False,
    format: Format = "text",
) -> None:
    """Pad or pack, and write every microbatch of the plan."""
    from batchwright.batching import BatchPlan, BatchWriter
    from batchwright.data.reader import PlanRows
    from batchwright.data.rows.source import open_source
    from batchwright.data.tokenizers import load_tokenizer
    from batchwright.data.tokenizers.tokenizer import with_loss_on
    from batchwright.errors import Mismatch
    from batchwright.report.text import bytes_

    opened = BatchPlan.load(plan, check=True)
    loaded = with_loss_on(load_tokenizer(tokenizer), loss_on)
    if opened.tokenizer_hash not in ("unknown", loaded.fingerprint):
        raise Mismatch(
            f"the plan was built for tokenizer {opened.tokenizer_hash}, {loaded.name} is "
            f"{loaded.fingerprint}; give the tokenizer it was built with"
        )
    names = [name for name, _, _ in opened.sources]
    # Without names the data sets are concatenated, as they were measured.
    parts = dataset if names else [dataset]
    sources = [open_source(part, ignore_column or (), ids) for part in parts]
    rows = PlanRows(sources, opened.ids, names, loaded)
    rows.check(opened.dataset_hash)
    epochs = range(opened.num_epochs)
    count = sum(len(opened.epoch(epoch)) for epoch in epochs)
    tokens = sum(opened.padded_tokens(epoch) for epoch in epochs)
    result = {
        "plan": opened.fingerprint,
        "epochs": opened.num_epochs,
        "batches": count,
        "padded_tokens": tokens,
        "output": spelled(output),
    }
    text = f"{count_of(count, 'batch', 'batches')} of {count_of(opened.num_epochs, 'epoch')}"
    text += f", {tokens:,} padded tokens"
    if dry_run:
        # Four int32 matrices a batch; the rest is small.
        show(result, f"{text}, about {bytes_(tokens * 16)}\nnothing written (--dry-run)", format)
        return
    with progress_bar("writing", quiet) as progress:
        writer = BatchWriter(opened, rows.sample, output, pad_id=loaded.pad_id, per_file=per_file)
        writer.write_all(progress)
    show(result, f"{text} -> {spelled(output)}", format)
