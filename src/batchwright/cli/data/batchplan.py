"""`batchwright data batchplan`: build, inspect, verify and shard batch plans."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter

from batchwright.cli.flags import (
    DryRun,
    OutFolder,
    PlanPath,
    Rank,
    WorldSize,
    at_least,
    edges_of,
    hint,
    load_lengths,
    load_sources,
    sharded,
)
from batchwright.cli.output import Force, Format, check_picture, count_of, say, show, spelled
from batchwright.errors import ConfigError

if TYPE_CHECKING:
    from batchwright.batching import BatchPlan, BatchPlanBuilder

__all__ = ["batchplan"]

batchplan = App(name="batchplan")

_OF_ALL = ("microbatches", "padded_tokens", "useful_tokens")

LengthPaths = Annotated[
    list[Path],
    Parameter(
        name=["--lengths", "-l"],
        negative="",
        help="A length cache; several make a mixture, see --weight.",
    ),
]


@batchplan.command
def build(
    *,
    lengths: LengthPaths,
    output: Annotated[
        Path | None, Parameter(name=["--output", "-o"], help="Folder to write.")
    ] = None,
    epochs: Annotated[int, Parameter(name=["--epochs", "-e"], help="Number of epochs.")] = 1,
    token_budget: Annotated[
        int, Parameter(name=["--token-budget", "-b"], help="Padded tokens per microbatch.")
    ] = 4096,
    layout: Annotated[
        Literal["bucketed", "sorted", "packed"],
        Parameter(help="Group by bucket, sort by length, or pack samples into full rows."),
    ] = "bucketed",
    bucket_edges: Annotated[
        str | None,
        Parameter(help="Upper lengths; default: 128,256,512,1024 as far as they fit the budget."),
    ] = None,
    overflow_max: Annotated[int, Parameter(help="Longest sample of a padded layout.")] = 2048,
    overflow: Annotated[
        Literal["error", "skip", "truncate", "split"],
        Parameter(help="What happens to a longer sample."),
    ] = "error",
    no_loss: Annotated[
        Literal["error", "skip"],
        Parameter(help="What happens to a sample without a token that carries loss."),
    ] = "error",
    min_length: Annotated[int, Parameter(help="Shorter samples are skipped.")] = 1,
    pack_max_len: Annotated[
        int | None, Parameter(help="Width of a packed row; default: 2048, or the budget if less.")
    ] = None,
    pack_mode: Annotated[
        Literal["best_fit_decreasing", "optimal", "first_fit", "best_fit", "greedy"],
        Parameter(help="Packing algorithm; optimal also tries column generation."),
    ] = "best_fit_decreasing",
    pack_max_segments: Annotated[int | None, Parameter(help="Maximum samples per row.")] = None,
    pad_policy: Annotated[
        Literal["pad_to_max", "pad_to_bucket"] | None,
        Parameter(help="Width of a padded batch; default: pad_to_bucket if predictable."),
    ] = None,
    align: Annotated[int, Parameter(help="Widths are multiples of this.")] = 1,
    segment_multiple: Annotated[
        int, Parameter(help="Pad every sample to a multiple of this, for context parallel or FP8.")
    ] = 1,
    predictable: Annotated[
        bool,
        Parameter(name=["--predictable", "-p"], negative="", help="Fixed shapes and bucket order."),
    ] = False,
    seed: Annotated[int, Parameter(name=["--seed", "-s"], help="Seed of the shuffle.")] = 42,
    drop_last: Annotated[
        bool, Parameter(negative="", help="Drop the partial batch of each bucket.")
    ] = False,
    step_size: Annotated[
        str, Parameter(help="Microbatches per optimizer step, or world: one per rank.")
    ] = "world",
    weight: Annotated[
        list[float] | None,
        Parameter(negative="", help="One per --lengths: 2 shows its samples twice per epoch."),
    ] = None,
    curriculum: Annotated[
        str | None, Parameter(help="Column of --dataset that holds the difficulty of a sample.")
    ] = None,
    curriculum_stages: Annotated[
        int, Parameter(help="Stages of the curriculum, from easy to hard.")
    ] = 10,
    group_by: Annotated[
        str | None,
        Parameter(help="Column of --dataset; rows of equal value share a microbatch."),
    ] = None,
    cost_column: Annotated[
        str | None,
        Parameter(help="Column of --dataset: tokens to add to a sample's length (image tokens)."),
    ] = None,
    dataset: Annotated[
        list[str] | None,
        Parameter(name=["--dataset", "-d"], negative="", help="The rows that columns are read of."),
    ] = None,
    dataset_hash: Annotated[
        str | None, Parameter(help="Overrides the hash in the length cache.")
    ] = None,
    dry_run: DryRun = False,
    format: Format = "text",
) -> None:
    """Build a plan and compare its efficiency with the other layouts."""
    from batchwright.batching.config import BatchingConfig

    if output is None and not dry_run:
        raise ConfigError("no output folder; give --output DIR or --dry-run")
    given = {
        "pad_policy": pad_policy,
        "bucket_edges": edges_of(bucket_edges) if bucket_edges is not None else None,
        "pack_max_length": pack_max_len,
    }
    optional = {name: value for name, value in given.items() if value is not None}
    config = BatchingConfig(
        mode="predictable" if predictable else "throughput",
        layout=layout,
        token_budget=token_budget,
        overflow_max=overflow_max,
        overflow=overflow,
        no_loss=no_loss,
        min_length=min_length,
        pack_mode=pack_mode,
        pack_max_segments=pack_max_segments,
        align=align,
        segment_multiple=segment_multiple,
        seed=seed,
        drop_last=drop_last,
        step_size=_step_size(step_size),
        curriculum_stages=curriculum_stages,
        **optional,
    )
    columns = {"difficulty": curriculum, "groups": group_by, "costs": cost_column}
    named = {name: column for name, column in columns.items() if column is not None}
    if group_by is not None and (len(lengths) > 1 or weight or curriculum is not None):
        raise ConfigError(
            "--group-by cannot keep groups together in a mixture or a curriculum, which show "
            "samples one by one; leave out --group-by, or --weight, further --lengths and "
            "--curriculum"
        )
    builder = _builder(lengths, config, weight, named, dataset, dataset_hash)
    plan = builder.build(epochs)
    lines = [_comparison(builder, plan), *_counted(plan)]
    if dry_run:
        lines.append("nothing written (--dry-run); run it with --output DIR instead to save it")
    else:
        assert output is not None
        plan.save(output)
        lines.append(f"saved {spelled(output)}, plan {plan.fingerprint[:16]}")
        caches = [word for path in lengths for word in ("-l", path)]
        lines.append(hint("data", "batchplan", "verify", "-p", output, *caches))
    show({**_facts(plan), "output": None if dry_run else spelled(output)}, "\n".join(lines), format)


@batchplan.command
def view(
    *,
    plan: PlanPath,
    html: Annotated[
        Path | None, Parameter(help="Write the page as one file instead of serving it.")
    ] = None,
    port: Annotated[int, Parameter(help="Port; 0 picks a free one.")] = 7331,
    force: Force = False,
) -> None:
    """Show a plan in a browser: lengths, buckets, other budgets and layouts, packed rows."""
    from batchwright.batching.plan.plan import BatchPlan
    from batchwright.cli.view import serve_page
    from batchwright.files import check_output
    from batchwright.report.html import PAGE, write_html
    from batchwright.report.summary import summarise_plan

    if html is None:
        opened = BatchPlan.load(plan)
        serve_page(plan, "127.0.0.1", port, f"plan {opened.fingerprint[:16]}", plan=True)
        return
    check_output(html, PAGE, force=force)
    size = write_html(html, [summarise_plan(plan)])
    say(f"wrote {html} ({size:,} bytes)")


@batchplan.command
def info(
    *,
    plan: PlanPath,
    show_batches: Annotated[
        int, Parameter(name=["--show-batches", "-n"], help="Number of microbatches to list.")
    ] = 0,
    rank: Rank = None,
    world_size: WorldSize = None,
    format: Format = "text",
) -> None:
    """Show what a plan holds, whole or for one rank."""
    from itertools import islice

    from batchwright.batching.plan.plan import BatchPlan
    from batchwright.report.text import number, percent, table

    at_least(0, show_batches=show_batches)
    opened = BatchPlan.load(plan, check=show_batches > 0)
    opened = sharded(opened, rank, world_size)
    facts = _facts(opened)
    listed: list[dict[str, Any]] = [
        {
            "index": batch.index,
            "bucket": batch.bucket_id,
            "rows": batch.batch_size,
            "width": batch.max_len,
            "samples": list(batch.samples),
            "useful": batch.efficiency,
            "weight": batch.weight,
        }
        for batch in islice(opened.iter_epoch(0), show_batches)
    ]
    rows = [[name, str(facts[name])] for name in ("fingerprint", "layout", "kind", "epochs")]
    whole = facts["whole"]
    if whole is not None:
        shard = facts["shard"]
        rows.append(["shard", f"rank {shard['rank']} of {shard['world_size']}, {shard['balance']}"])
    counted = ("microbatches", "fillers", "steps", "padded_tokens", "useful_tokens")
    rows += [[name, number(facts[name])] for name in counted if facts[name] is not None]
    rows += [["useful", percent(facts["efficiency"])], ["ullage", percent(facts["ullage"])]]
    if whole is not None:
        # What follows is counted over all ranks.
        rows.append(["whole plan", whole["fingerprint"]])
        rows += [[f"{name} of all", number(whole[name])] for name in _OF_ALL]
    rows += [[name, number(value)] for name, value in facts["counts"].items()]
    if facts["shown"] != facts["counts"]:
        # A mixture does not show all samples of its sources.
        rows += [[f"{name} shown", number(value)] for name, value in facts["shown"].items()]
    lines = [table(["plan", spelled(plan)], rows), *_dropped_line(opened)]
    for batch in listed:
        ids = ", ".join(batch["samples"][:6]) + (", ..." if len(batch["samples"]) > 6 else "")
        lines.append(
            f"{batch['index']:>6}  {batch['rows']:>4} x {batch['width']:<6} "
            f"{percent(batch['useful']):>6}  {ids}{'' if batch['weight'] else '  (filler)'}"
        )
    show({**facts, "batches": listed}, "\n".join(lines), format)


@batchplan.command
def draw(
    *,
    plan: PlanPath,
    epoch: Annotated[int, Parameter(help="Epoch to draw.")] = 0,
    rows: Annotated[int, Parameter(help="Rows to draw.")] = 20,
    width: Annotated[int, Parameter(help="Characters of a row.")] = 64,
    png: Annotated[Path | None, Parameter(help="Save the picture to this file too.")] = None,
    force: Force = False,
    format: Format = "text",
) -> None:
    """Draw the first rows of a plan: samples and padding."""
    from itertools import pairwise

    from batchwright.batching.plan.plan import BatchPlan
    from batchwright.report import text as pictures

    at_least(1, rows=rows, width=width)
    check_picture(png, force=force)
    opened = BatchPlan.load(plan)
    drawn: list[list[int]] = []
    widest = 0
    for batch in opened.iter_epoch(epoch):
        if len(drawn) >= rows:
            break
        lengths = batch.lengths.tolist()
        drawn += [lengths[a:b] for a, b in pairwise(batch.row_offsets.tolist())]
        widest = max(widest, batch.max_len)
    drawn = drawn[:rows]
    text = pictures.packing_strip(drawn, widest, width, rows)
    if png is not None:
        from batchwright.report.figures import packing_png

        title = f"{opened.config.layout} plan {opened.fingerprint[:8]}, epoch {epoch}"
        packing_png(png, drawn, widest, title)
        text += f"\nsaved {png}"
    show({"epoch": epoch, "width": widest, "rows": drawn}, text, format)


@batchplan.command
def verify(*, plan: PlanPath, lengths: LengthPaths, format: Format = "text") -> None:
    """Check every byte of a plan, and that these lengths give the same plan."""
    from batchwright.batching.plan.plan import BatchPlan
    from batchwright.remote import fetched
    from batchwright.report.text import bytes_

    opened = BatchPlan.load(plan, check=True)
    size = sum(file.stat().st_size for file in fetched(plan).glob("*.bin"))
    if not opened.sources and len(lengths) > 1:
        raise ConfigError(
            f"{spelled(plan)} was built from one length cache, {len(lengths)} are given; "
            f"give the one it was built from"
        )
    opened.verify(load_sources(lengths) if opened.sources else load_lengths(lengths[0]))
    text = (
        f"{spelled(plan)} is intact ({bytes_(size)}) and follows from "
        f"{', '.join(map(spelled, lengths))}: plan {opened.fingerprint[:16]}"
    )
    show({"verified": True, "fingerprint": opened.fingerprint, "bytes": size}, text, format)


@batchplan.command
def shard(
    *,
    plan: PlanPath,
    world_size: Annotated[int, Parameter(name=["--world-size", "-w"], help="Number of ranks.")],
    output: OutFolder,
    balance: Annotated[
        Literal["cost", "round_robin"],
        Parameter(help="Balance predicted compute within a step, or assign in turn."),
    ] = "cost",
    dry_run: DryRun = False,
    format: Format = "text",
) -> None:
    """Write one plan per rank, `rank_0` and so on, with equal numbers of microbatches."""
    from batchwright.batching.plan.plan import BatchPlan
    from batchwright.report.text import number, percent, table

    opened = BatchPlan.load(plan, check=True)
    ranks = []
    for rank in range(world_size) if world_size > 0 else [0]:
        part = opened.shard(rank, world_size, balance=balance)
        batches = list(part.iter_epoch(0))
        ranks.append(
            {
                "rank": rank,
                "microbatches": len(batches),
                "fillers": sum(not b.weight for b in batches),
                "useful_tokens": sum(b.token_count for b in batches if b.weight),
                "padded_tokens": sum(b.padded_tokens for b in batches),
            }
        )
    mean = sum(r["useful_tokens"] for r in ranks) / len(ranks)
    rows = [
        [
            str(r["rank"]),
            number(r["microbatches"]),
            number(r["fillers"]),
            number(r["useful_tokens"]),
            percent(r["useful_tokens"] / mean - 1),
        ]
        for r in ranks
    ]
    lines = [table(["rank", "microbatches", "fillers", "useful tokens", "vs mean"], rows)]
    if dry_run:
        lines.append("nothing written (--dry-run)")
    else:
        opened.save_shards(world_size, output, balance)
        lines.append(f"saved {spelled(output)}/rank_0 to rank_{world_size - 1}")
    result = {"epoch": 0, "ranks": ranks, "output": None if dry_run else spelled(output)}
    show(result, "\n".join(lines), format)


@batchplan.command
def diff(left: Path, right: Path, *, format: Format = "text") -> None:
    """Show where two plans differ: settings, first microbatch, samples that moved."""
    from dataclasses import asdict

    from batchwright.batching.plan.plan import BatchPlan

    found = BatchPlan.load(left).diff(BatchPlan.load(right))
    lines = [f"{left} and {right} {'are the same plan' if found.same else 'differ'}"]
    lines += [f"  {name}: {a} -> {b}" for name, (a, b) in found.config.items()]
    if found.first is not None:
        lines.append(f"  first difference: epoch {found.first[0]}, microbatch {found.first[1]}")
    if not found.same:
        lines.append(
            f"  samples only left {found.only_left:,}, only right {found.only_right:,}, "
            f"in another microbatch of epoch 0 {found.moved:,}"
        )
    result = {
        **asdict(found),
        "config": {k: [str(a), str(b)] for k, (a, b) in found.config.items()},
    }
    show(result, "\n".join(lines), format)


@batchplan.command
def explain(
    sample_id: str,
    *,
    plan: PlanPath,
    rank: Rank = None,
    world_size: WorldSize = None,
    format: Format = "text",
) -> None:
    """Show where a sample is in every epoch, and why; or why it was left out."""
    from dataclasses import asdict

    from batchwright.batching.plan.plan import BatchPlan

    opened = sharded(BatchPlan.load(plan, check=True), rank, world_size)
    places = opened.explain(sample_id)
    lines = [f"{sample_id} in {spelled(plan)} ({opened.config.layout})"]
    for place in places:
        batch = opened.batch(place.epoch, place.microbatch)
        piece = f"tokens {place.start:,} to {place.start + place.length - 1:,}"
        on_rank = "" if place.rank is None else f", rank {place.rank}"
        lines.append(
            f"  epoch {place.epoch}: microbatch {place.microbatch:,}{on_rank}, row {place.row} of "
            f"{batch.batch_size}, segment {place.segment}, {piece}: {_why(opened, batch.bucket_id)}"
        )
    left_out = not places
    if left_out:
        lines.append(f"  in no batch: {_why_not(opened, sample_id)}")
    result = {
        "sample_id": sample_id,
        "left_out": left_out,
        "reason": opened.why_skipped(sample_id),
        "places": [asdict(p) for p in places],
    }
    show(result, "\n".join(lines), format)


@batchplan.command
def export(
    *,
    plan: PlanPath,
    output: OutFolder,
    dry_run: DryRun = False,
    format: Format = "text",
) -> None:
    """Write a plan as text: meta.json, and one JSON line per microbatch of each epoch."""
    from batchwright.batching.plan.plan import BatchPlan

    opened = BatchPlan.load(plan, check=True)
    count = sum(opened.num_microbatches(epoch) for epoch in range(opened.num_epochs))
    text = count_of(count, "microbatch", "microbatches")
    text += f" of {count_of(opened.num_epochs, 'epoch')}"
    if not dry_run:
        opened.export(output)
    text += "\nnothing written (--dry-run)" if dry_run else f" -> {spelled(output)}"
    show({"microbatches": count, "output": None if dry_run else spelled(output)}, text, format)


def _builder(
    paths: list[Path],
    config: Any,
    weights: list[float] | None,
    columns: dict[str, str],
    dataset: list[str] | None,
    dataset_hash: str | None,
) -> "BatchPlanBuilder":
    """The builder of these length caches; `columns` of the rows by the argument they become."""
    import dataclasses

    from batchwright.batching.plan.builder import BatchPlanBuilder

    if len(paths) > 1 or weights:
        sources = load_sources(paths)
        shares = weights or [1.0] * len(paths)
        if len(shares) != len(paths):
            raise ConfigError(
                f"got {len(shares)} weights for {len(paths)} sources; give one --weight each"
            )
        parts = dict(zip(sources, shares, strict=True))
        mixture = BatchPlanBuilder(sources, config, weights=parts)
        if not columns:
            return mixture
        values: dict[str, Any] = _columns(dataset, columns, mixture.lengths.ids, list(sources))
        return BatchPlanBuilder(sources, config, weights=parts, **values)
    loaded = load_lengths(paths[0])
    if dataset_hash is not None:
        loaded = dataclasses.replace(loaded, dataset_hash=dataset_hash)
    found: dict[str, Any] = _columns(dataset, columns, loaded.ids, [])
    return BatchPlanBuilder(loaded, config, **found)


def _columns(
    dataset: list[str] | None, columns: dict[str, str], ids: Any, names: list[str]
) -> dict[str, Any]:
    """The values of columns of the rows, one for each sample."""
    from batchwright.data.reader import PlanRows
    from batchwright.data.rows.columns import FLAGS, column_values
    from batchwright.data.rows.source import open_source

    if columns and not dataset:
        flag = FLAGS[next(iter(columns))]
        raise ConfigError(f"{flag} reads a column of the rows; give --dataset too")
    if not columns:
        return {}
    sources = [open_source(spec) for spec in dataset or []]
    place = PlanRows(sources, ids, names).place
    places = (place(item) for item in range(len(ids)))
    return column_values(columns, ((sources[part], number) for part, number in places))


def _comparison(builder: "BatchPlanBuilder", plan: "BatchPlan") -> str:
    from batchwright.batching.compare import compare_layouts, layout_row
    from batchwright.batching.plan.arrange import with_costs
    from batchwright.report.text import number, percent, table

    lengths = builder.lengths
    if builder.costs is not None:
        lengths = with_costs(lengths, builder.costs, builder.config)
    rows = compare_layouts(lengths, builder.config)
    if plan.order.kind == "materialised":
        rows.append(layout_row(plan))
    first = rows[0]
    cells = []
    for row in rows:
        chosen = row.layout == plan.config.layout and (
            plan.order.kind == "virtual" or row is rows[-1]
        )
        cells.append(
            [
                row.layout,
                number(row.microbatches),
                number(row.bound),
                number(row.padded_tokens),
                percent(row.efficiency),
                f"{row.cost / first.cost:.2f}",
                "<- this plan" if chosen else "",
            ]
        )
    headers = ["layout", "microbatches", "lower bound", "padded tokens", "useful", "cost", ""]
    return table(headers, cells)


def _counted(plan: "BatchPlan") -> list[str]:
    """One line per policy that skipped or cut samples; of a mixture, samples that it shows."""
    counts = plan.shown
    lines = []
    if counts.skipped_long:
        long = count_of(counts.skipped_long, "sample")
        lines.append(f"skipped {long} over {plan.config.limit:,} tokens")
    if counts.skipped_short:
        short = count_of(counts.skipped_short, "sample")
        lines.append(f"skipped {short} under {plan.config.min_length:,} tokens")
    if counts.skipped_no_loss:
        skipped = count_of(counts.skipped_no_loss, "piece" if counts.split else "sample")
        lines.append(f"skipped {skipped} without a token that carries loss")
    if counts.skipped_group:
        more = count_of(counts.skipped_group, "more sample")
        lines.append(f"skipped {more} so that groups stay whole")
    if counts.truncated:
        truncated = count_of(counts.truncated, "sample")
        lines.append(f"truncated {truncated} to {plan.config.limit:,} tokens")
    if counts.split:
        split = count_of(counts.split, "sample")
        lines.append(f"split {split} into pieces of {plan.config.limit:,} tokens")
    if counts.tokens_left_out:
        lines.append(f"left out {counts.tokens_left_out:,} of {counts.tokens:,} tokens")
    if plan.note:
        lines.append(f"packing: {plan.note}")
    return lines + _dropped_line(plan)


def _dropped(plan: "BatchPlan") -> dict[str, int] | None:
    """What `--drop-last` leaves out of epoch 0 over all ranks, or None where it is not known."""
    if not plan.config.drop_last:
        return {"pieces": 0, "tokens": 0}
    if any(weight != 1 for _, _, weight in plan.sources):
        # The weights decide too what an epoch shows, and it is not told which left out what.
        return None
    batches = (plan.batch(0, index) for index in range(plan.num_microbatches(0)))
    return {
        "pieces": plan.counts.planned_pieces - sum(len(batch.items) for batch in batches),
        "tokens": plan.counts.planned_tokens - plan.useful_tokens(0),
    }


def _dropped_line(plan: "BatchPlan") -> list[str]:
    if not plan.config.drop_last:
        return []
    dropped = _dropped(plan)
    if dropped is None:
        return ["--drop-last leaves out partial batches; not counted apart from the weights"]
    out = count_of(dropped["pieces"], "piece" if plan.counts.split else "sample")
    tokens = count_of(dropped["tokens"], "token")
    return [f"--drop-last leaves out {out} with {tokens} of epoch 0"]


def _facts(plan: "BatchPlan") -> dict[str, Any]:
    """What a plan holds in epoch 0; of a shard, what its rank does, and the whole plan apart."""
    from dataclasses import asdict

    useful, padded = plan.useful_tokens(0), plan.padded_tokens(0)
    microbatches, fillers, whole = plan.num_microbatches(0), None, None
    if plan.shard_of is not None:
        whole = {
            "fingerprint": plan.whole_fingerprint,
            "microbatches": microbatches,
            "padded_tokens": padded,
            "useful_tokens": useful,
        }
        own = list(plan.iter_epoch(0))
        microbatches, fillers = len(own), sum(not batch.weight for batch in own)
        padded = sum(batch.padded_tokens for batch in own)
        useful = sum(batch.token_count for batch in own if batch.weight)
    return {
        "fingerprint": plan.fingerprint,
        "layout": plan.config.layout,
        "kind": plan.order.kind,
        "epochs": plan.num_epochs,
        "microbatches": microbatches,
        "fillers": fillers,
        "steps": plan.num_steps(0),
        "padded_tokens": padded,
        "useful_tokens": useful,
        "efficiency": useful / padded,
        "ullage": 1 - useful / padded,
        "dropped": _dropped(plan),
        "counts": asdict(plan.counts),
        "shown": asdict(plan.shown),
        "config": plan.config.model_dump(mode="json"),
        "dataset_hash": plan.dataset_hash,
        "tokenizer_hash": plan.tokenizer_hash,
        "sources": [list(source) for source in plan.sources],
        "note": plan.note,
        "shard": asdict(plan.shard_of) if plan.shard_of else None,
        "whole": whole,
    }


def _why(plan: "BatchPlan", bucket: int) -> str:
    if plan.config.layout == "bucketed":
        low, high = plan.config.bucket_spec.get_bucket_range(bucket)
        return f"bucket {bucket} takes {low:,} to {high:,} tokens"
    if plan.config.layout == "sorted":
        return "batched with samples of nearly the same length"
    return f"packed into a row of {plan.config.pack_max_length:,} tokens"


def _why_not(plan: "BatchPlan", sample_id: str) -> str:
    config = plan.config
    reason = plan.why_skipped(sample_id)
    if reason == "long":
        return f"it is longer than {config.limit:,} tokens (overflow skip)"
    if reason == "short":
        return f"it is shorter than {config.min_length:,} tokens"
    if reason == "no_loss":
        first = f"first {config.limit:,} " if config.overflow == "truncate" else ""
        return f"none of its {first}tokens carries loss (no-loss skip)"
    if reason == "group":
        return f"its group does not fit whole (overflow {config.overflow})"
    drop = ["--drop-last"] if config.drop_last else []
    weight = ["the weight of its source"] if plan.sources else []
    return f"{' or '.join(drop + weight)} left it out of these epochs"


def _step_size(text: str) -> int | str:

    if text == "world":
        return text
    if not text.isdecimal():
        raise ConfigError(f"--step-size must be an integer or world, got {text!r}")
    return int(text)
