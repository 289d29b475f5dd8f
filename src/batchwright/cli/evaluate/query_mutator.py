"""`batchwright evaluate query-mutator`: the learned policy compared with baselines."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from batchwright.cli.output import Format, Quiet, progress_bar, show
from batchwright.errors import ConfigError

if TYPE_CHECKING:
    from batchwright.train.query_mutator.compare import Comparison

__all__ = ["evaluate_query_mutator"]


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
    from batchwright.train.query_mutator.evaluate import evaluate_run

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
