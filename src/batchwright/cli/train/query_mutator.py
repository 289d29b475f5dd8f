"""`batchwright train query-mutator`: PPO with language models in the loop."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from batchwright.cli.output import Format, Quiet, progress_bar, show
from batchwright.errors import ConfigError
from batchwright.train.query_mutator.config import QueryMutatorConfig

if TYPE_CHECKING:
    from batchwright.train.query_mutator.loop import MutatorResult

__all__ = ["train_query_mutator"]


def train_query_mutator(
    *,
    config: Annotated[QueryMutatorConfig | None, Parameter(name="*")] = None,
    resume: Annotated[
        Path | None, Parameter(help="Go on with the run in this folder, as it was configured.")
    ] = None,
    replay: Annotated[
        Path | None,
        Parameter(help="Do the run in this folder again from its kept answers, with no server."),
    ] = None,
    quiet: Quiet = False,
    format: Format = "text",
) -> None:
    """Learn which rewriting of a question makes a target model answer it correctly."""
    from batchwright.train.query_mutator.loop import train_query_mutator
    from batchwright.train.settings import from_toml

    chosen = config or QueryMutatorConfig()
    if resume is not None and replay is not None and resume == replay:
        raise ConfigError("--resume and --replay name one folder; give --replay another --save-dir")
    if resume is not None:
        saved = from_toml(QueryMutatorConfig, resume / "config.toml")
        if config is not None and dataclasses.replace(config, save_dir=saved.save_dir) != saved:
            raise ConfigError(f"a resumed run keeps its settings; give --resume {resume} alone")
        chosen = dataclasses.replace(saved, save_dir=resume)
    elif replay is not None:
        place = chosen.save_dir
        if place == QueryMutatorConfig().save_dir:
            place = replay.with_name(replay.name + "-replay")
        saved = from_toml(QueryMutatorConfig, replay / "config.toml")
        chosen = dataclasses.replace(saved, save_dir=place)
    with progress_bar("training", quiet) as bar:

        def progress(done: int, total: int, gain: float | None) -> None:
            if bar is not None:
                bar(done, total, "" if gain is None else f"gain {gain:+.3f}")

        result = train_query_mutator(
            chosen, resume=resume is not None, replay=replay, progress=progress
        )
    facts = dataclasses.asdict(result) | {"run_dir": str(result.run_dir)}
    show(facts, _trained(result), format)


def _trained(result: "MutatorResult") -> str:
    from batchwright.report.text import number, percent, seconds, table

    def gain(value: float | None) -> str:
        return "-" if value is None else f"{value:+.3f}"

    calls: dict[str, Any] = result.calls
    asked = int(calls.get("asked", 0))
    rows = [
        ["updates", number(result.updates)],
        ["steps", number(result.steps)],
        ["gain of an episode at first", gain(result.first_gain)],
        ["gain of an episode at last", gain(result.last_gain)],
        ["steps left out as invalid", number(result.invalid_steps)],
        *[[f"  {kind}", number(count)] for kind, count in result.counts.items()],
        ["calls asked", number(asked)],
        ["of them from the cache", percent((calls.get("hits", 0)) / asked if asked else None)],
        ["tokens", number(int(calls.get("prompt_tokens", 0) + calls.get("completion_tokens", 0)))],
        ["time", seconds(result.seconds)],
    ]
    end = (
        f"done; next: batchwright evaluate query-mutator {result.run_dir}"
        if result.finished
        else f"stopped and saved; go on with: batchwright train query-mutator "
        f"--resume {result.run_dir}"
    )
    return table(["run", str(result.run_dir)], rows) + "\n" + end
