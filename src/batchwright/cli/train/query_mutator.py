"""`batchwright train query-mutator`: PPO with language models in the loop."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from batchwright.cli.flags import Address, On, at_least, joined
from batchwright.cli.output import Format, Quiet, progress_bar, show
from batchwright.cli.train.flags import Given, Resume, ending, leave, settings
from batchwright.errors import ConfigError
from batchwright.train.query_mutator.config import QueryMutatorConfig
from batchwright.train.run import changes

if TYPE_CHECKING:
    from batchwright.train.query_mutator.loop import MutatorResult

__all__ = ["train_query_mutator"]


class _Flags(Given, QueryMutatorConfig):
    """The flags that were typed."""


def train_query_mutator(
    *,
    given: Annotated[_Flags, Parameter(name="*")] = _Flags(),
    resume: Resume = None,
    replay: Annotated[
        Path | None,
        Parameter(help="Repeat the run in this folder from its cached responses, with no server."),
    ] = None,
    on: On = "here",
    address: Address = None,
    workers: Annotated[
        int | None, Parameter(help="Actors on the Ray cluster that step the environments.")
    ] = None,
    quiet: Quiet = False,
    format: Format = "text",
) -> None:
    """Learn which rewriting of a question makes a target model answer it correctly."""
    if resume is not None and resume == replay:
        raise ConfigError("--resume and --replay name one folder; give --replay another --save-dir")
    if replay is not None and resume is None:
        config = _replayed(replay, given)
    else:
        config = settings(QueryMutatorConfig, given, resume)
    more: dict[str, Any] = {}
    if (on == "ray") != (workers is not None):
        raise ConfigError("--workers, the number of actors, and --on ray go together; give both")
    if on == "ray":
        if replay is not None:
            raise ConfigError("--replay makes no calls, so it does not go with --on ray")
        at_least(1, workers=workers)
        for name in (config.target_model, config.mutator_model, config.judge_model):
            if name == "sim":
                raise ConfigError("the model sim is in this process; --on ray needs a server")
    if joined(on, address) and workers is not None:
        from batchwright.integrations.ray.mutation import on_workers, ray_pool

        more = {"pool": ray_pool, "environments": partial(on_workers, workers)}
    # The first answers of a local model take a while: the line before them says what is awaited.
    with progress_bar("training, steps", quiet, at_once=True) as progress:
        if progress is not None:
            progress(0, config.num_env_steps, f"opening {config.target_model}")
        from batchwright.integrations.trackers import open_trackers
        from batchwright.train.query_mutator.loop import train_query_mutator

        result = train_query_mutator(
            config,
            resume=resume is not None,
            replay=replay,
            trackers=partial(open_trackers, config.track),
            progress=progress,
            **more,
        )
    facts = dataclasses.asdict(result) | {"run_dir": str(result.run_dir)}
    show(facts, _trained(result), format)
    leave(result.stopped_by)


def _replayed(run: Path, given: _Flags) -> QueryMutatorConfig:
    """The settings of the run to repeat, in a folder of its own."""
    wanted = dict(vars(given))
    place = wanted.pop("save_dir", run.with_name(run.name + "-replay-{n}"))
    saved = QueryMutatorConfig.of_run(run)
    return dataclasses.replace(saved, **changes(saved, wanted, "replayed"), save_dir=place)


def _trained(result: "MutatorResult") -> str:
    from batchwright.report.text import number, percent, seconds, table

    def gain(value: float | None) -> str:
        return "-" if value is None else f"{value:+.3f}"

    calls: dict[str, Any] = result.calls
    asked = int(calls.get("asked", 0))
    rows = [
        ["updates", number(result.updates)],
        ["steps", number(result.steps)],
        ["mean episode gain, first update", gain(result.first_gain)],
        ["mean episode gain, last tenth", gain(result.last_gain)],
        ["invalid steps, not in the loss", number(result.invalid_steps)],
        *[[f"  {reason}", number(count)] for reason, count in result.reasons.items()],
        ["rewritings rejected by the guard", number(result.rejected)],
        ["questions without a first score", number(result.failed_starts)],
        ["calls", number(asked)],
        ["cache hits", percent((calls.get("hits", 0)) / asked if asked else None)],
        ["tokens", number(int(calls.get("prompt_tokens", 0) + calls.get("completion_tokens", 0)))],
        ["time", seconds(result.seconds)],
    ]
    if result.lost_steps:
        rows.append(["steps lost with their actor, made again", number(result.lost_steps)])
    if result.tracker_failures:
        rows.append(["calls of trackers that failed", number(result.tracker_failures)])
    done = f"done; next: batchwright evaluate query-mutator {result.run_dir}"
    end = ending(result.finished, done, "query-mutator", result.run_dir)
    return table(["run", str(result.run_dir)], rows) + "\n" + end
