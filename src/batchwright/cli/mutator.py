"""`train query-mutator` and `evaluate query-mutator`: PPO with language models in the loop."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from batchwright.cli.output import Format, Quiet, progress_bar, show
from batchwright.errors import ConfigError
from batchwright.train.mutatorconfig import QueryMutatorConfig

if TYPE_CHECKING:
    from batchwright.train.compare_mutators import Comparison
    from batchwright.train.query_mutator import MutatorResult

__all__ = ["evaluate_query_mutator", "train_query_mutator"]


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
    from batchwright.train.query_mutator import train_query_mutator
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


def evaluate_query_mutator(
    run: Annotated[Path, Parameter(help="The folder of a run.")],
    /,
    *,
    questions: Annotated[int, Parameter(help="Of each part at most; 0: all.")] = 0,
    bandit_episodes: Annotated[int, Parameter(help="Questions the bandit learns on.")] = 500,
    output: Annotated[
        Path | None,
        Parameter(name=["--output", "-o"], help="Folder for JSON, plot and transcripts."),
    ] = None,
    quiet: Quiet = False,
    format: Format = "text",
) -> None:
    """Compare the learned policy with plain ways on held-out questions, with intervals."""
    from batchwright.train.evaluate_mutator import evaluate_run

    if questions < 0 or bandit_episodes < 1:
        raise ConfigError("--questions is 0 or more, --bandit-episodes 1 or more")
    with progress_bar("comparing", quiet) as progress:
        found = evaluate_run(
            run,
            questions=questions,
            bandit_episodes=bandit_episodes,
            output=output or run / "evaluation",
            progress=progress,
        )
    place = output or run / "evaluation"
    _draw(found, place / "gain.png")
    data = {
        "ways": [dataclasses.asdict(way) for way in found.ways],
        "robustness": dataclasses.asdict(found.robustness),
    }
    show(data, _compared(found, place), format)


def _draw(found: "Comparison", path: Path) -> None:
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        return
    from batchwright.report.figures import intervals_png

    rows = [(way.name, 100 * way.gain, 100 * way.low, 100 * way.high) for way in found.ways]
    intervals_png(path, rows, "points gained over asking as it stands")


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


def _compared(found: "Comparison", output: Path) -> str:
    from batchwright.report.text import number, percent, table

    def points(value: float) -> str:
        return f"{100 * value:+.1f}"

    rows: list[list[str | float | None]] = [
        [
            *(way.name, way.plan, percent(way.accuracy), points(way.gain)),
            f"{points(way.low)} to {points(way.high)}",
            *(way.questions, way.invalid, way.calls, way.tokens),
            None if way.calls_per_point is None else f"{way.calls_per_point:.3f}",
            None if way.tokens_per_point is None else f"{way.tokens_per_point:.1f}",
        ]
        for way in found.ways
    ]
    headers = [
        *("way", "operators", "right", "gain", "95 %", "questions", "invalid", "calls", "tokens"),
        *("calls a question and point", "tokens a question and point"),
    ]
    robust = found.robustness
    by_operator = [[name, percent(share)] for name, share in robust.by_operator.items()]
    lines = [
        ["as asked", percent(robust.original)],
        ["mean over rewritings", percent(robust.mean)],
        ["robustness drop", percent(robust.drop)],
        ["right in every wording", percent(robust.worst)],
        ["right in at least one", percent(robust.best)],
        *[[f"  {name}", share] for name, share in by_operator],
    ]
    return (
        table(headers, rows)
        + "\n\n"
        + table(["the target and its wordings", "right"], lines)
        + f"\n\n{number(len(found.ways))} ways; JSON, plot and transcripts in {output}"
    )
