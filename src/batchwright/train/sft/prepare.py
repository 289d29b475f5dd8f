"""Rows to a plan and tokens in the run directory, once; every rank then maps the same files."""

import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.batching import BatchingConfig, BatchPlan, BatchPlanBuilder
from batchwright.batching.collation import SampleReader
from batchwright.batching.plan.arrange import join_sources
from batchwright.data.entries import mixture_hash
from batchwright.data.ids import Ids
from batchwright.data.lengths import Lengths
from batchwright.data.rows.columns import column_values
from batchwright.data.rows.sample import Sample
from batchwright.data.rows.shapes import shape_or_reason
from batchwright.data.rows.source import Source, open_source
from batchwright.data.tokenizers import Tokenizer, load_tokenizer
from batchwright.data.tokenizers.tokenizer import with_loss_on
from batchwright.data.tokens import TokenStore, make_store
from batchwright.errors import BadRow, ConfigError, Mismatch, need
from batchwright.remote import address_of
from batchwright.sealed import MANIFEST
from batchwright.train.run import refuse_taken
from batchwright.train.sft.config import SftConfig
from batchwright.world import World

__all__ = [
    "Prepared",
    "batching_config",
    "bucket_edges",
    "mixture_of",
    "open_prepared",
    "prepare",
    "refuse_early",
    "tokenizer_of",
]


@dataclass(frozen=True)
class Prepared:
    """A plan and how to read its samples."""

    plan: BatchPlan
    read: SampleReader
    skipped: int
    """Bad rows that were left out."""


def refuse_early(config: SftConfig, world: World, resume: bool) -> None:
    """Refuse what can be seen to be wrong before anything is loaded, torch included."""
    if config.online and world.size > 1:
        raise ConfigError(
            f"--online trains on one rank, got {world.size}; start it without torchrun"
        )
    if config.fsdp and world.size == 1:
        raise ConfigError(
            "--fsdp needs at least 2 ranks, got 1; start with torchrun, or leave it out"
        )
    if resume:
        return
    config.refuse_ignored()
    refuse_taken(config)
    if config.lora_rank:
        need("peft", extra="train")
    planned = None if config.batchplan is None else BatchPlan.load(config.batchplan)
    if planned is None:
        batching_config(config, world.size)
    else:
        planned.shard(0, world.size)
    data, _ = _data(config, planned)
    columns = _columns(config)
    for paths in (*data.values(), *([(config.eval_data,)] if config.eval_data else [])):
        if any(Path(path).is_fifo() for path in paths):
            # Read once, by the rank that tokenises, which looks for the columns first.
            continue
        narrows = bool(config.ignore_column) or config.ids == "require"
        if columns or narrows or not all(map(_may_be_there, paths)):
            # One that is not there is refused with the sentence of the rows.
            source = _opened(paths)
            _refuse_missing(columns, source)
            if narrows and config.on_bad_row == "fail":
                _refuse_narrowed(config, source)
    if config.tokenizer is not None:
        load_tokenizer(config.tokenizer)


def prepare(
    config: SftConfig,
    tokenizer: Tokenizer,
    world_size: int,
    progress: Callable[[int, int], None] | None = None,
    *,
    check: bool = False,
    lend: bool = False,
) -> None:
    """Write `tokens`, `plan` and, if there is anything to evaluate on, `eval_*` for a run.

    Whatever contradicts itself without the tokens being known is refused before tokenising
    begins. Tokens are taken from the token store of the data, which is made if it is not there;
    the run shares its files, or is lent the whole store if it is gone before anybody could prune
    that. With `check`, a store that is there is read whole first, and made
    again if it is damaged.
    """
    run = config.run_dir
    planned = None if config.batchplan is None else BatchPlan.load(config.batchplan)
    if planned is None:
        batching = batching_config(config, world_size)
    else:
        _check_hash("tokenizer", planned.tokenizer_hash, tokenizer.fingerprint)
        planned.shard(0, world_size)
    # An online run makes its samples as it goes; only what it is evaluated on stands before.
    data, shares = ({}, {}) if config.online else _data(config, planned)
    sources = {name: _opened(paths) for name, paths in data.items()}
    eval_source = open_source(config.eval_data) if config.eval_data else None
    columns = _columns(config)
    for rows in (*sources.values(), *([] if eval_source is None else [eval_source])):
        _refuse_missing(columns, rows)
    for left in ("tokens", "eval_plan", "eval_tokens"):
        # Of an attempt that was refused; this one may hold out nothing.
        shutil.rmtree(run / left, ignore_errors=True)

    def tokenised(rows: Source, path: Path) -> Lengths:
        store, _ = make_store(
            open_source(rows, config.ignore_column, config.ids),
            tokenizer,
            on_bad_row=config.on_bad_row,
            repeated_ids=config.repeated_ids,
            progress=progress,
            check=check,
        )
        if lend:
            path.parent.mkdir(exist_ok=True)
            path.symlink_to(store.path.absolute())
        else:
            store.link(path)
        return store.lengths

    if sources:
        parts = {name: tokenised(sources[name], run / "tokens" / name) for name in sources}
        if planned is not None:
            _check_hash("data", planned.dataset_hash, _dataset_hash(parts))
            planned.save(run / "plan")
        else:
            values = {name: _values(columns, sources[name], parts[name]) for name in parts}
            _plan(config, batching, parts, shares, values)
    if eval_source is not None:
        held = tokenised(eval_source, run / "eval_tokens")
        costs = _values(columns, eval_source, held).get("costs")
        _eval_plan(config, held, costs).save(run / "eval_plan")


def open_prepared(run: Path, part: str = "", *, whole: bool = False) -> Prepared | None:
    """The training part of a run, or its `eval_` part; None if there is none.

    Tokens are checked when they are read, or all at once if the `whole` is asked for.
    """
    if part and not (run / f"{part}plan").is_dir():
        return None
    plan = BatchPlan.load(run / f"{part}plan")
    tokens = run / f"{part}tokens"
    stores = _stores(tokens if tokens.is_dir() else run / "tokens")
    for store in stores.values() if whole else ():
        store.check()
    skipped = sum(store.skipped.count for store in stores.values())
    return Prepared(plan, _reader(plan, stores), skipped)


def mixture_of(data: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """The data sets, and the share of each if they are a mixture.

    >>> mixture_of(("math.jsonl=0.7", "chat.jsonl=0.3"))
    (('math.jsonl', 'chat.jsonl'), (0.7, 0.3))
    >>> mixture_of(("math.jsonl", "chat.jsonl"))
    (('math.jsonl', 'chat.jsonl'), ())
    """
    names, shares = [], []
    for spec in data:
        if not spec:
            raise ConfigError("--data is empty; give a file, a folder or hf:NAME")
        found = re.fullmatch(r"(.+)=([^=/]*)", spec, re.DOTALL)
        if found is None or Path(spec).exists():
            names.append(spec)
            continue
        names.append(found[1])
        shares.append(_share(spec, found[2]))
    if shares and len(shares) < len(names):
        raise ConfigError(
            f"{len(shares)} of {len(names)} --data have a share; write each as "
            f"--data FILE=SHARE, or none"
        )
    if shares and len(names) == 1:
        raise ConfigError(
            f"--data {data[0]} is a share of {names[0]} alone; leave out the share, or give the "
            f"other --data of the mixture"
        )
    return tuple(names), tuple(shares)


def _share(spec: str, text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share < float("inf"):
        raise ConfigError(
            f"--data {spec}: the share must be a number above 0, got {text!r}; write "
            f"--data FILE=SHARE"
        )
    return share


def _data(
    config: SftConfig, planned: BatchPlan | None
) -> tuple[dict[str, tuple[str, ...]], dict[str, float]]:
    """Where the data is by name, one of no name unless it is a mixture, and the share of each."""
    paths, shares = mixture_of(config.data)
    alone: list[tuple[str, ...]] = [(path,) for path in paths]
    if planned is not None:
        if shares:
            raise ConfigError(
                "--data FILE=SHARE makes a mixture, which the plan of --batchplan already is or "
                "is not; leave out the shares"
            )
        if planned.sources:
            names = [name for name, _, _ in planned.sources]
            if len(names) != len(paths):
                raise Mismatch(
                    f"the plan mixes {len(names)} sources ({', '.join(names)}), {len(paths)} "
                    f"--data are given; give one for each, in this order"
                )
            return dict(zip(names, alone, strict=True)), {}
    if shares and config.group_by is not None:
        raise ConfigError(
            "--group-by cannot keep groups together in a mixture, which shows samples one by one; "
            "leave out --group-by, or the shares of --data"
        )
    if not shares:
        return {"": paths}, {}
    plain = [Path(path.removeprefix("hf:")) for path in paths]
    names = [path.name.partition(".")[0] for path in plain]
    if len(set(names)) < len(names):
        # math/train.jsonl and chat/train.jsonl
        names = [f"{path.absolute().parent.name}-{path.name.partition('.')[0]}" for path in plain]
    if len(set(names)) < len(names):
        raise ConfigError(
            f"every source of a mixture needs a name of its own, got {', '.join(names)}; "
            f"rename a file"
        )
    return dict(zip(names, alone, strict=True)), dict(zip(names, shares, strict=True))


def _may_be_there(path: str) -> bool:
    """Whether data are on this disk, or in a dataset of the hub, which is not asked this early."""
    on_hub = path.startswith("hf:") and address_of(path) is None
    return on_hub or Path(path).exists()


def _opened(paths: tuple[str, ...]) -> Source:
    return open_source(paths[0] if len(paths) == 1 else paths)


def _columns(config: SftConfig) -> dict[str, str]:
    """The columns that the plan reads, by the argument of the builder that they become."""
    given = {"groups": config.group_by, "costs": config.cost_column}
    return {name: column for name, column in given.items() if column is not None}


def _refuse_missing(columns: Mapping[str, str], source: Source) -> None:
    """Refuse columns that the first row does not have, before all rows are tokenised."""
    for number in range(len(source)):
        try:
            source[number]
        except BadRow:
            # Whether rows may be bad is seen when they are tokenised.
            continue
        column_values(columns, [(source, number)])
        return


def _refuse_narrowed(config: SftConfig, source: Source) -> None:
    """Refuse what the first row lacks, or lacks without the columns that are ignored."""
    row = open_source(source, config.ignore_column, config.ids)[0]
    # Templates differ, but none is needed to see which columns a row must have.
    tokenizer = load_tokenizer("bytes")
    why = shape_or_reason(row, tokenizer)
    if isinstance(why, BadRow) and not isinstance(shape_or_reason(source[0], tokenizer), BadRow):
        raise BadRow(
            f"{source.where(0)}: {why}; --ignore-column leaves out "
            f"{', '.join(config.ignore_column)}: keep what is trained on"
        )


def _values(columns: Mapping[str, str], source: Source, lengths: Lengths) -> dict[str, list[Any]]:
    """What the columns hold for each sample."""
    rows = range(len(lengths)) if lengths.rows is None else lengths.rows.tolist()
    return column_values(columns, ((source, number) for number in rows))


def _plan(
    config: SftConfig,
    batching: BatchingConfig,
    parts: Mapping[str, Lengths],
    shares: Mapping[str, float],
    values: Mapping[str, Mapping[str, list[Any]]],
) -> None:
    """Plan what is trained, and what is held out of it."""
    run = config.run_dir
    held_out = {
        name: _held_out(lengths, values[name].get("groups"), config)
        for name, lengths in parts.items()
    }

    def taken(column: str, held: bool) -> list[Any] | None:
        """A column of all sources, of the samples that are held out or not."""
        if column not in _columns(config):
            return None
        chosen = (
            compress(values[name][column], (held_out[name] == held).tolist()) for name in parts
        )
        return [value for part in chosen for value in part]

    train = {name: _subset(part, ~held_out[name]) for name, part in parts.items()}
    costs = taken("costs", held=False)
    if shares:
        weights = _weights({name: len(part) for name, part in train.items()}, shares)
        builder = BatchPlanBuilder(train, batching, weights=weights, costs=costs)
    else:
        groups = taken("groups", held=False)
        builder = BatchPlanBuilder(train[""], batching, groups=groups, costs=costs)
    builder.build(config.epochs or 1).save(run / "plan")
    held = {name: _subset(part, held_out[name]) for name, part in parts.items()}
    if any(len(part) for part in held.values()):
        whole = join_sources(held, dict.fromkeys(held, 1.0))[0] if shares else held[""]
        _eval_plan(config, whole, taken("costs", held=True)).save(run / "eval_plan")


def _weights(sizes: Mapping[str, int], shares: Mapping[str, float]) -> dict[str, float]:
    """How often each sample is shown in an epoch, so that sources have their shares of samples.

    The source that is scarcest for its share is shown once, of the others a part, a different
    one each epoch.
    """
    scale = min(sizes[name] / share for name, share in shares.items())
    return {name: shares[name] * scale / sizes[name] for name in sizes}


def _spelled(name: str, ids: Ids) -> Iterator[str]:
    """The ids of a source as a plan spells them: those of a mixture begin with its name."""
    return (f"{name}/{id}" for id in ids) if name else iter(ids)


def _dataset_hash(parts: Mapping[str, Lengths]) -> str:
    if len(parts) == 1:
        return next(iter(parts.values())).dataset_hash
    return mixture_hash({name: part.dataset_hash for name, part in parts.items()})


def batching_config(config: SftConfig, world_size: int) -> BatchingConfig:
    """The plan's settings that follow from the run's."""
    edges = bucket_edges(config)
    return BatchingConfig(
        layout=config.chosen_layout,
        token_budget=config.token_budget,
        # Only the budget limits a padded row: it is what memory is sized by.
        overflow_max=2**31 - 1,
        overflow=config.overflow,
        no_loss=config.no_loss,
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


def _eval_plan(config: SftConfig, lengths: Lengths, costs: list[int] | None) -> BatchPlan:
    longest = int(np.add(lengths.values, 0 if costs is None else costs, dtype=np.int64).max())
    budget = max(config.token_budget, longest)
    evaluation = BatchingConfig(
        layout="sorted", token_budget=budget, overflow_max=budget, no_loss=config.no_loss
    )
    return BatchPlanBuilder(lengths, evaluation, costs=costs).build()


def _held_out(lengths: Lengths, groups: list[Any] | None, config: SftConfig) -> NDArray[np.bool_]:
    """Which samples are for evaluation: the same ones wherever their rows stand, groups whole."""
    ids = lengths.ids
    if groups is not None:
        named = zip(ids, groups, strict=True)
        ids = Ids.of(id if group is None else str(group) for id, group in named)
    held = ids.keys() < np.uint64(config.eval_fraction * 2**64)
    if config.eval_fraction and (held.all() or not held.any()):
        raise ConfigError(
            f"--eval-fraction {config.eval_fraction} of {len(lengths):,} samples leaves "
            f"{'nothing to train on' if held.all() else 'nothing to evaluate on'}; change it"
        )
    return held


def _subset(lengths: Lengths, wanted: NDArray[np.bool_]) -> Lengths:
    if wanted.all():
        return lengths
    items = np.flatnonzero(wanted)
    return replace(
        lengths,
        values=lengths.values[items],
        ids=Ids.of(lengths.ids.take(items.tolist())),
        rows=None if lengths.rows is None else lengths.rows[items],
        loss=None if lengths.loss is None else lengths.loss[items],
    )


def _check_hash(thing: str, planned: str, given: str) -> None:
    if planned not in ("unknown", given):
        raise Mismatch(
            f"the plan was built for {thing} {planned}, this run has {given}; "
            f"give what it was built with, or build a plan for this"
        )


def _stores(tokens: Path) -> dict[str, TokenStore]:
    """The token store of a run, or those of its mixture by name."""
    if (tokens / MANIFEST).exists() or not tokens.is_dir():
        return {"": TokenStore(tokens)}
    return {path.name: TokenStore(path) for path in sorted(tokens.iterdir())}


def _reader(plan: BatchPlan, stores: Mapping[str, TokenStore]) -> SampleReader:
    """Plan items to samples: by number where the ids agree, else by id."""
    if len(stores) == 1:
        (store,) = stores.values()
        if plan.ids == store.lengths.ids:
            return store
    parts = [*stores.values()]
    starts = np.cumsum([0, *(len(store) for store in parts)])
    ids = Ids.of_blocks(_spelled(name, store.lengths.ids) for name, store in stores.items())
    places = ids.places(plan.ids)
    if (places < 0).any():
        missing = plan.ids[int((places < 0).argmax())]
        raise Mismatch(f"sample {missing!r} of the plan is not among the tokens of the run")

    def read(item: int) -> Sample:
        at = int(places[item])
        part = int(np.searchsorted(starts, at, side="right")) - 1
        found = parts[part](at - int(starts[part]))
        return Sample(found.input_ids, found.loss_mask, plan.ids[item])

    return read
