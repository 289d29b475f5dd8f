"""Rows to a plan and tokens in the run directory, once; every rank then maps the same files."""

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.batching import BatchingConfig, BatchPlan, BatchPlanBuilder
from batchwright.batching.collation import SampleReader
from batchwright.data.ids import Ids
from batchwright.data.lengths import Lengths
from batchwright.data.rows.sample import Sample
from batchwright.data.rows.source import Source, open_source
from batchwright.data.tokenizers import Tokenizer, load_tokenizer
from batchwright.data.tokenizers.tokenizer import with_loss_on
from batchwright.data.tokens import TokenStore
from batchwright.errors import ConfigError, Mismatch
from batchwright.train.sft.config import SftConfig

__all__ = [
    "Prepared",
    "batching_config",
    "bucket_edges",
    "open_prepared",
    "prepare",
    "tokenizer_of",
]


@dataclass(frozen=True)
class Prepared:
    """A plan and how to read its samples."""

    plan: BatchPlan
    read: SampleReader
    skipped: int
    """Bad rows that were left out."""


def prepare(
    config: SftConfig,
    tokenizer: Tokenizer,
    world_size: int,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write `tokens`, `plan` and, if there is anything to evaluate on, `eval_*` for a run.

    Whatever contradicts itself without the tokens being known is refused before tokenising
    begins. Killed or refused later, it resumes: no row is tokenised twice.
    """
    run = config.run_dir
    planned = None if config.batchplan is None else BatchPlan.load(config.batchplan)
    if planned is None:
        batching = batching_config(config, world_size)
    else:
        _check_hash("tokenizer", planned.tokenizer_hash, tokenizer.fingerprint)
        planned.shard(0, world_size)
    # An online run makes its samples as it goes; only what it is evaluated on stands before.
    columns = config.ignore_column
    source = None if config.online else open_source(config.data, columns)
    eval_source = open_source(config.eval_data, columns) if config.eval_data else None
    for left in ("eval_plan", "eval_tokens"):
        # Of an attempt that was refused; this one may hold out nothing.
        shutil.rmtree(run / left, ignore_errors=True)
    with ExitStack() as unfinished:

        def tokenised(rows: Source, name: str) -> Lengths:
            building = TokenStore.building(
                rows, tokenizer, run / name, on_bad_row=config.on_bad_row, progress=progress
            )
            return unfinished.enter_context(building).lengths

        if source is not None:
            lengths = tokenised(source, "tokens")
            if planned is not None:
                _check_hash("data", planned.dataset_hash, lengths.dataset_hash)
                planned.save(run / "plan")
            else:
                held_out = _held_out(lengths, config)
                train = _subset(lengths, ~held_out) if held_out.any() else lengths
                BatchPlanBuilder(train, batching).build(config.epochs or 1).save(run / "plan")
                if held_out.any():
                    _eval_plan(config, _subset(lengths, held_out)).save(run / "eval_plan")
        if eval_source is not None:
            held = tokenised(eval_source, "eval_tokens")
            _eval_plan(config, held).save(run / "eval_plan")


def open_prepared(run: Path, part: str = "") -> Prepared | None:
    """The training part of a run, or its `eval_` part; None if there is none."""
    if part and not (run / f"{part}plan").is_dir():
        return None
    plan = BatchPlan.load(run / f"{part}plan")
    tokens = run / f"{part}tokens"
    store = TokenStore(tokens if tokens.is_dir() else run / "tokens")
    return Prepared(plan, _reader(plan, store), store.skipped)


def batching_config(config: SftConfig, world_size: int) -> BatchingConfig:
    """The plan's settings that follow from the run's."""
    edges = bucket_edges(config)
    return BatchingConfig(
        layout=config.chosen_layout,
        token_budget=config.token_budget,
        # Only the budget limits a padded row: it is what memory is sized by.
        overflow_max=2**31 - 1,
        overflow=config.overflow,
        pack_max_length=config.pack_max_len,
        pack_mode=config.pack_mode,
        segment_multiple=config.segment_multiple,
        step_size=config.step_size or config.grad_accum * world_size,
        seed=config.seed,
        **({"bucket_edges": edges} if edges else {}),
    )


def bucket_edges(config: SftConfig) -> tuple[int, ...]:
    """The numbers of --bucket-edges; none if it was not given."""
    if not config.bucket_edges:
        return ()
    try:
        return tuple(int(edge) for edge in config.bucket_edges.split(","))
    except ValueError:
        raise ConfigError(
            f"--bucket-edges {config.bucket_edges!r} must be integers separated by commas"
        ) from None


def tokenizer_of(config: SftConfig, own: Tokenizer, model: Any) -> Tokenizer:
    """The tokenizer that --tokenizer names, else the model's own; the model must know it."""
    tokenizer = load_tokenizer(config.tokenizer) if config.tokenizer is not None else own
    rows = model.get_input_embeddings().weight.shape[0]
    if tokenizer.vocab_size > rows:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size:,} tokens, the model {rows:,}; "
            f"use the model's own tokenizer"
        )
    return with_loss_on(tokenizer, config.loss_on)


def _eval_plan(config: SftConfig, lengths: Lengths) -> BatchPlan:
    longest = int(lengths.values.max())
    budget = max(config.token_budget, longest)
    evaluation = BatchingConfig(layout="sorted", token_budget=budget, overflow_max=budget)
    return BatchPlanBuilder(lengths, evaluation).build()


def _held_out(lengths: Lengths, config: SftConfig) -> NDArray[np.bool_]:
    """Which samples are for evaluation: the same ones wherever their rows stand."""
    held = lengths.ids.keys() < np.uint64(config.eval_fraction * 2**64)
    if config.eval_fraction and (held.all() or not held.any()):
        raise ConfigError(
            f"--eval-fraction {config.eval_fraction} of {len(lengths):,} samples leaves "
            f"{'nothing to train on' if held.all() else 'nothing to evaluate on'}; change it"
        )
    return held


def _subset(lengths: Lengths, wanted: NDArray[np.bool_]) -> Lengths:
    items = np.flatnonzero(wanted)
    return Lengths(
        values=lengths.values[items],
        ids=Ids.of(lengths.ids.take(items.tolist())),
        dataset_hash=lengths.dataset_hash,
        tokenizer_hash=lengths.tokenizer_hash,
    )


def _check_hash(thing: str, planned: str, given: str) -> None:
    if planned not in ("unknown", given):
        raise Mismatch(
            f"the plan was built for {thing} {planned}, this run has {given}; "
            f"give what it was built with, or build a plan for this"
        )


def _reader(plan: BatchPlan, store: TokenStore) -> SampleReader:
    """Plan items to samples: by number where the ids agree, else by id."""
    if plan.ids == store.lengths.ids:
        return store
    find = store.lengths.ids.find

    def read(item: int) -> Sample:
        return store(find(plan.ids[item]))

    return read
