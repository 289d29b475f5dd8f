"""A batch plan in the numbers and rows that its panels show."""

from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.batching.compare import compare_layouts, fixed_row, layout_row
from batchwright.batching.plan.builder import BatchPlanBuilder
from batchwright.batching.plan.microbatch import MicrobatchSpec
from batchwright.batching.plan.order import VirtualOrder
from batchwright.batching.plan.plan import BatchPlan
from batchwright.data.lengths import Lengths
from batchwright.data.tokenizers import load_tokenizer
from batchwright.data.tokenizers.tokenizer import ByteTokenizer, Tokenizer
from batchwright.data.tokens.store import TokenStore
from batchwright.errors import BatchwrightError
from batchwright.jit import interpreted
from batchwright.report.links import refusal

__all__ = ["plan_summary", "sample_text"]

Ints = NDArray[np.int64]

BINS = 48
SAMPLED = 512
"""Microbatches that are looked at one by one; totals are of all of them."""
DRAWN_BATCHES = 4
DRAWN_ROWS = 160
DRAWN_SEGMENTS = 4000
PIECES = 5000
"""Pieces of samples in the microbatches that are looked at."""
REPLANNED = 40_000
REPACKED = 5000
"""Samples that other budgets and layouts, and packing, are worked out for; an even sample."""
BUDGETS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
DISTINCT = 2048
"""Lengths that edges of buckets can be moved over."""
TEXT = 1200
"""Characters of a sample that are shown."""


def plan_summary(plan: BatchPlan) -> dict[str, Any]:
    """What a plan holds: totals, lengths, buckets, other budgets and layouts, rows to draw.

    Totals are exact. What is worked out from a part of the plan says of how much: `sampled`
    microbatches, `replanned` samples.
    """
    # Somebody waits for a page: to compile the kernels may take minutes, and to do without them
    # takes a second for as much as is looked at.
    with interpreted():
        pieces = _pieces(plan)
        lengths, counts = np.unique(pieces, return_counts=True)
        useful, padded, config = plan.useful_tokens(0), plan.padded_tokens(0), plan.config
        count = plan.num_microbatches(0)
        most = max(DRAWN_BATCHES, min(SAMPLED, PIECES * count // plan.counts.planned_pieces))
        looked_at = [plan.batch(0, k) for k in _spread(count, most)]
        return {
            "fingerprint": plan.fingerprint,
            "layout": config.layout,
            "epochs": plan.num_epochs,
            "samples": plan.counts.samples,
            "skipped": len(plan.skipped),
            "counts": asdict(plan.counts),
            "microbatches": count,
            "steps": plan.num_steps(0),
            "token_budget": config.token_budget,
            "row_width": config.limit,
            "useful_tokens": useful,
            "padded_tokens": padded,
            "efficiency": useful / padded,
            "ullage": 1 - useful / padded,
            "bound": -(-useful // config.token_budget),
            "longest": plan.longest,
            "edges": list(config.bucket_edges) if config.layout == "bucketed" else [],
            "pad_policy": str(config.pad_policy),
            "width_multiple": config.width_multiple,
            "drop_last": config.drop_last,
            "histogram": _histogram(lengths, counts),
            "distinct": _distinct(lengths, counts) if config.layout == "bucketed" else None,
            "buckets": _buckets(plan),
            "sampled": len(looked_at),
            "fill": [[batch.index, round(batch.efficiency, 5)] for batch in looked_at],
            "packing": _drawn(plan, looked_at),
            **_replanned(plan, pieces),
        }


def _pieces(plan: BatchPlan) -> Ints:
    """The lengths of what is planned in epoch 0, in the order of the data."""
    order = plan.order
    if isinstance(order, VirtualOrder):
        order.prove()
        lengths = np.repeat(order.distinct.astype(np.int64), np.diff(order.distinct_offsets))
        items, starts = order.items, order.starts if order.starts.size else order.items
    else:
        listed = order.listing(0, 0, plan.num_microbatches(0))
        lengths, items, starts = listed.lengths.astype(np.int64), listed.items, listed.starts
    found: Ints = lengths[np.lexsort((starts, items))]
    return found


def _spread(count: int, most: int) -> list[int]:
    """At most `most` of the numbers below `count`, evenly."""
    places = np.linspace(0, count - 1, min(count, most)).round()
    return [int(place) for place in np.unique(places)]


def _histogram(lengths: Ints, counts: Ints) -> dict[str, Any]:
    low, high = int(lengths.min()), int(lengths.max())
    step = max(1, -(-(high - low + 1) // BINS))
    place = (lengths - low) // step
    bins = int(place.max()) + 1
    order = np.argsort(lengths)
    running = np.cumsum(counts[order])
    marks = np.searchsorted(running, np.array([0.5, 0.95, 0.99]) * running[-1])
    p50, p95, p99 = lengths[order][np.minimum(marks, len(lengths) - 1)].tolist()
    return {
        "low": low,
        "step": step,
        "samples": np.bincount(place, counts, bins).astype(np.int64).tolist(),
        "tokens": np.bincount(place, counts * lengths, bins).astype(np.int64).tolist(),
        "p50": p50,
        "p95": p95,
        "p99": p99,
        "longest": high,
    }


def _distinct(lengths: Ints, counts: Ints) -> dict[str, Any]:
    """Lengths and how often they occur, for what-ifs in the page; many are rounded up in groups."""
    step = -(-int(lengths.max()) // DISTINCT)
    grouped, place = np.unique(-(-lengths // step) * step, return_inverse=True)
    return {
        "step": step,
        "length": grouped.tolist(),
        "count": np.bincount(place, counts).astype(np.int64).tolist(),
        "tokens": np.bincount(place, counts * lengths).astype(np.int64).tolist(),
    }


def _buckets(plan: BatchPlan) -> list[dict[str, Any]]:
    """Useful and padded tokens of each bucket, over all microbatches of epoch 0."""
    config, order = plan.config, plan.order
    if config.layout != "bucketed":
        return []
    rows: Iterable[tuple[Any, Any, Any, Any]]
    if isinstance(order, VirtualOrder):
        # Batches one bucket after the other, the last first; what is in them stays the same.
        plain = replace(order, config=config.model_copy(update={"interleave_buckets": False}))
        padded = plain.costs(0, 0, plan.num_microbatches(0), 1, 0)[::-1]
        bounds = order.distinct_offsets
        longest = order.distinct[np.searchsorted(bounds, order.batch_start, "right") - 1]
        ids = config.bucket_spec.get_bucket_ids(longest)
        lengths = np.repeat(order.distinct.astype(np.int64), np.diff(bounds))
        # Of each bucket, what is in it less what `drop_last` leaves out.
        tokens = np.add.reduceat(lengths, order.class_offsets[:-1])
        dropped, missing = order.left_out(0)
        place = np.searchsorted(order.class_offsets, dropped, "right") - 1
        tokens -= np.bincount(place, missing, len(tokens)).astype(np.int64)
        owner = np.searchsorted(order.class_offsets, order.batch_start, "right") - 1
        first = np.diff(owner, prepend=-1) != 0
        useful = np.where(first, tokens[owner], 0)
        rows = zip(ids, order.batch_size, useful, padded, strict=True)
    else:
        listed = order.listing(0, 0, plan.num_microbatches(0))
        bounds = listed.row_offsets[listed.batch_rows]
        tokens = np.add.reduceat(listed.lengths.astype(np.int64), bounds[:-1])
        matrix = np.diff(listed.batch_rows) * listed.batch_width
        rows = zip(listed.batch_bucket, np.diff(bounds), tokens, matrix, strict=True)
    found: dict[int, dict[str, Any]] = {}
    for bucket_id, samples, tokens, matrix in rows:
        low, high = config.bucket_spec.get_bucket_range(int(bucket_id))
        bucket = found.setdefault(
            int(bucket_id),
            {"low": low, "high": high, "microbatches": 0, "samples": 0, "useful": 0, "padded": 0},
        )
        bucket["microbatches"] += 1
        bucket["samples"] += int(samples)
        bucket["useful"] += int(tokens)
        bucket["padded"] += int(matrix)
    return [found[k] for k in sorted(found)]


def _drawn(plan: BatchPlan, batches: list[MicrobatchSpec]) -> dict[str, Any]:
    """Rows of some microbatches spread over the epoch: of each segment, row of data and length."""
    rows: list[dict[str, Any]] = []
    ids: dict[int, str] = {}
    segments = 0
    per_batch = max(1, max(batch.batch_size for batch in batches))
    for k in _spread(len(batches), max(1, DRAWN_ROWS // per_batch)):
        batch = batches[k]
        for row in range(min(batch.batch_size, DRAWN_ROWS)):
            first, last = int(batch.row_offsets[row]), int(batch.row_offsets[row + 1])
            segments += last - first
            if segments > DRAWN_SEGMENTS and rows:
                return _packing(plan, rows, ids)
            items = batch.items[first:last].tolist()
            ids.update((item, plan.ids[item]) for item in items)
            rows.append(
                {
                    "batch": batch.index,
                    "row": row,
                    "width": batch.max_len,
                    "items": items,
                    "lengths": batch.lengths[first:last].tolist(),
                }
            )
    return _packing(plan, rows, ids)


def _packing(plan: BatchPlan, rows: list[dict[str, Any]], ids: dict[int, str]) -> dict[str, Any]:
    return {"rows": rows, "ids": ids, "width": max(row["width"] for row in rows)}


def _replanned(plan: BatchPlan, pieces: Ints) -> dict[str, Any]:
    """The same lengths under other budgets and in other layouts.

    Exact for as many as are planned in a second, so the same as `batchplan build` prints; beyond
    that from samples spread evenly over the lengths, and `about` says of which layouts.
    """
    some, few = (
        pieces if len(pieces) <= most else np.sort(pieces)[:: -(-len(pieces) // most)]
        for most in (REPLANNED, REPACKED)
    )
    config = plan.config.model_copy(update={"overflow": "truncate"})
    rows = [
        fixed_row(Lengths.of(pieces), config),
        *compare_layouts(Lengths.of(some), config, layouts=("bucketed", "sorted"))[1:],
        *compare_layouts(Lengths.of(few), config, layouts=("packed",))[1:],
    ]
    parts = (pieces, some, some, few)
    return {
        "replanned": len(some),
        "repacked": len(few),
        "budgets": _budgets(plan, some, len(pieces) / len(some)),
        "layouts": [
            {
                "layout": row.layout,
                "efficiency": plan.efficiency if own else row.efficiency,
                "about": len(part) < len(pieces) and not own,
                # By token, as they are not all of the same samples.
                "cost": row.cost / row.useful_tokens,
            }
            for row, part in zip(rows, parts, strict=True)
            for own in (row.layout == plan.config.layout,)
        ],
    }


def _budgets(plan: BatchPlan, some: Ints, times: float) -> list[dict[str, Any]]:
    config, found = plan.config, []
    for factor in BUDGETS:
        budget = int(config.token_budget * factor)
        if budget < config.limit:
            continue
        if config.layout == "packed":
            # The same rows, more or fewer of them in a microbatch.
            width = config.get_pad_length(-1, config.pack_max_length)
            rows = plan.padded_tokens(0) // width
            microbatches, efficiency = -(-rows // (budget // width)), plan.efficiency
        else:
            changed = config.model_copy(update={"token_budget": budget, "overflow": "truncate"})
            row = layout_row(_planned(some, changed))
            microbatches, efficiency = round(row.microbatches * times), row.efficiency
        found.append(
            {"token_budget": budget, "microbatches": microbatches, "efficiency": efficiency}
        )
    return found


def _planned(lengths: Ints, config: Any) -> BatchPlan:
    return BatchPlanBuilder(Lengths.of(lengths), config).build()


def sample_text(run: Path, item: int, inside: Path | None = None) -> dict[str, Any]:
    """A sample of a run by its number: its tokens as text where the run can decode them.

    Links that lead out of `inside`, by default the run itself, are not followed.
    """
    inside = (inside or run).resolve()
    if why := refusal(run / "tokens", inside):
        return {"item": item, "error": f"the folder tokens of this run {why}"}
    try:
        sample = TokenStore(run / "tokens")(item)
    except (BatchwrightError, OSError, IndexError, ValueError) as error:
        return {"item": item, "error": f"the tokens of this run cannot be read: {error}"}
    ids = np.asarray(sample.input_ids).tolist()
    tokenizer = None if refusal(run / "model", inside) else _tokenizer(run)
    text = " ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids)
    return {
        "item": item,
        "id": sample.sample_id,
        "length": len(ids),
        "loss_tokens": int(np.asarray(sample.loss_mask).sum()),
        "as": "token ids" if tokenizer is None else "text",
        "text": text[:TEXT],
        "cut": max(0, len(text) - TEXT),
    }


def _tokenizer(run: Path) -> Tokenizer | None:
    """The tokenizer of a run, if nothing outside the run is needed for it."""
    from batchwright.data.tokens.store import STORE

    if (run / "model" / "tokenizer.json").is_file():
        try:
            return load_tokenizer(run / "model" / "tokenizer.json")
        except BatchwrightError:
            return None
    return ByteTokenizer() if STORE.read(run / "tokens").get("tokenizer") == "bytes" else None
