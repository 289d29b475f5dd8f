"""`batchwright train sft`: fine-tune a model on rows, over a batch plan."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from batchwright.cli.flags import Address, On, joined
from batchwright.cli.output import Format, Progress, Quiet, progress_bar, say, show
from batchwright.cli.train.flags import Given, Resume, ending, leave, settings
from batchwright.errors import ConfigError
from batchwright.train.sft.config import SftConfig

if TYPE_CHECKING:
    from batchwright.train.sft.loop import SftResult

__all__ = ["sft"]


class _Flags(Given, SftConfig):
    """The flags that were typed."""


def sft(
    *,
    given: Annotated[_Flags, Parameter(name="*")] = _Flags(),
    resume: Resume = None,
    dry_run: Annotated[
        bool, Parameter(negative="", help="Predict steps, tokens and memory; train nothing.")
    ] = False,
    on: On = "here",
    address: Address = None,
    workers: Annotated[
        int | None, Parameter(help="Ranks on the Ray cluster; fewer where it has no room.")
    ] = None,
    min_workers: Annotated[
        int | None,
        Parameter(help="With fewer workers than this, wait (1; 2 with --fsdp)."),
    ] = None,
    quiet: Quiet = False,
    format: Format = "text",
) -> None:
    """Fine-tune a model on rows, over a batch plan, with exact resume."""
    if given.batchplan and resume is None:
        SftConfig.refuse_planned(vars(given))
    config = settings(SftConfig, given, resume)
    if resume is None:
        config.refuse_ignored(vars(given))
    if vars(given).get("pack") is False and config.layout == "packed":
        raise ConfigError("--no-pack contradicts --layout packed; give one of them")
    from batchwright.integrations.trackers import check_trackers
    from batchwright.train.devices import refuse_device
    from batchwright.train.run import refuse_unwritable
    from batchwright.train.sft.prepare import refuse_early
    from batchwright.world import World

    world = World.detect()
    if on == "ray":
        if workers is None:
            raise ConfigError("--on ray needs --workers, the number of ranks")
        if world.size > 1:
            raise ConfigError(f"--on ray starts its own ranks; leave out {world.found}")
        if dry_run:
            raise ConfigError("--dry-run predicts on this machine; leave out --on ray")
        # As by the ranks, which see one of themselves.
        world = World(size=max(workers, 1))
    elif workers is not None or min_workers is not None:
        raise ConfigError("--workers and --min-workers go with --on ray")
    # Before torch is imported, which takes seconds.
    if on == "here":
        refuse_device(config.device, config.attention)
        check_trackers(config.track)
    refuse_early(config, world, resume is not None)
    if on == "here" and world.rank == 0:
        refuse_unwritable(config)
    if dry_run:
        _predict(config, format)
        return
    if joined(on, address):
        assert workers is not None
        _on_ray(config, workers, min_workers, resume is not None, quiet, format)
        return
    from batchwright.integrations.trackers import open_trackers
    from batchwright.train.sft.loop import train_sft

    with _bars(quiet, "collecting" if config.online else "tokenising") as (preparing, progress):
        result = train_sft(
            config,
            resume=resume is not None,
            trackers=partial(open_trackers, config.track),
            progress=progress,
            preparing=preparing,
        )
    if world.rank == 0:
        show(_facts(result), _table(result), format)
    leave(result.stopped_by)


def _on_ray(
    config: SftConfig,
    workers: int,
    min_workers: int | None,
    resume: bool,
    quiet: bool,
    format: Literal["text", "json"],
) -> None:
    from batchwright.integrations.ray.train import train_sft_on_ray

    with _bars(quiet, "tokenising") as (_, progress):
        result = train_sft_on_ray(
            config,
            workers=workers,
            min_workers=min_workers,
            resume=resume,
            progress=progress,
            say=lambda text: say(text, err=True),
        )
    show(_facts(result), _table(result), format)
    leave(result.stopped_by)


@contextmanager
def _bars(
    quiet: bool, before: str
) -> Iterator[tuple[Callable[[int, int], None] | None, Callable[[int, int, float], None] | None]]:
    """Progress of what comes before, replaced by that of training from the first step on."""
    with ExitStack() as bars:
        preparing = bars.enter_context(progress_bar(before, quiet))
        steps: Progress | None = None

        def training(done: int, total: int, loss: float) -> None:
            nonlocal steps
            if steps is None:
                # Two bars at once would write over each other.
                bars.close()
                steps = bars.enter_context(progress_bar("training", quiet))
            if steps is not None:
                steps(done, total or done, f"loss {loss:.4f}")

        yield preparing, None if quiet else training


def _predict(config: SftConfig, format: str) -> None:
    from batchwright.report.text import bytes_, number, percent, table
    from batchwright.train.sft.predict import predict

    found = predict(config)
    rows = [
        ["steps", number(found.steps)],
        ["microbatches per epoch", number(found.microbatches)],
        ["useful tokens", number(found.useful_tokens)],
        ["padded tokens", number(found.padded_tokens)],
        ["ullage", percent(found.ullage)],
        ["parameters", number(found.parameters)],
        ["trained", number(found.trained)],
        ["memory, about", bytes_(found.memory_bytes)],
        ["bad rows left out", number(found.bad_rows)],
        ["samples without loss left out", number(found.without_loss)],
        *_policies(found.counts),
    ]
    text = table(["predicted", ""], rows) + (f"\nnote: {found.note}" if found.note else "")
    text += "\nnothing trained (--dry-run); tokens are kept"
    show(dataclasses.asdict(found), text, format)


def _facts(result: "SftResult") -> dict[str, Any]:
    facts = dataclasses.asdict(result)
    return {**facts, "run_dir": str(result.run_dir), "ullage": result.ullage}


def _table(result: "SftResult") -> str:
    from batchwright.report.text import number, percent, seconds, table

    def loss(value: float | None) -> str:
        return "-" if value is None else f"{value:.4f}"

    rate = result.useful_tokens / result.seconds if result.seconds else None
    rows = [
        ["steps", number(result.step)],
        ["first loss", loss(result.first_loss)],
        ["last loss", loss(result.last_loss)],
        ["held-out loss", loss(result.eval_loss)],
        ["useful tokens", number(result.useful_tokens)],
        ["ullage", percent(result.ullage)],
        ["useful tokens per second", number(None if rate is None else round(rate))],
        ["waited for data", seconds(result.data_wait_s)],
        ["time", seconds(result.seconds)],
        ["attention", result.backend],
        *_online(result.online or {}),
    ]
    if result.worlds:
        rows.append(["workers, in turn", ", ".join(map(number, result.worlds))])
    if result.steps_without_loss:
        rows.append(["steps without loss", number(result.steps_without_loss)])
    rows += _policies(result.counts or {})
    if result.tracker_failures:
        rows.append(["calls of trackers that failed", number(result.tracker_failures)])
    done = f"done: {result.run_dir}/model"
    if result.finished and result.first_loss is None:
        done += "; nothing was left to train, raise --max-steps or --epochs to train on"
    end = ending(result.finished, done, "sft", result.run_dir)
    return table(["run", str(result.run_dir)], rows) + "\n" + end


_POLICIES = {
    "skipped_long": "too long, left out",
    "skipped_group": "left out with their groups",
    "truncated": "truncated",
    "split": "split",
}


def _policies(counts: dict[str, int]) -> list[list[str]]:
    """What was done with samples that did not fit; nothing is said where all did."""
    from batchwright.report.text import number

    named = ((words, counts.get(name)) for name, words in _POLICIES.items())
    return [[f"samples {words}", number(count)] for words, count in named if count]


def _online(found: dict[str, Any]) -> list[list[str]]:
    from batchwright.report.text import number, percent

    if not found:
        return []
    low, high = found["difficulty"]
    return [
        ["samples of the stream", number(found["samples"])],
        ["in the buffer", number(found["buffer"])],
        ["of solved episodes", percent(found["success_rate"])],
        ["too long, skipped", number(found["too_long"])],
        ["windows", number(found["windows"])],
        ["difficulty asked for", f"{low:g} to {high:g}"],
        ["samples waited for", number(found["waited_for"])],
    ]
