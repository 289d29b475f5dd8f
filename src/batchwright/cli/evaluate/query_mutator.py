"""`batchwright evaluate query-mutator`: the learned policy compared with baselines."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from batchwright.cli.output import Force, Format, Quiet, progress_bar, show
from batchwright.errors import ConfigError

if TYPE_CHECKING:
    from batchwright.train.query_mutator.compare import Comparison, Versus

__all__ = ["evaluate_query_mutator"]


def evaluate_query_mutator(
    run: Annotated[Path, Parameter(help="Folder of a run.")],
    /,
    *,
    questions: Annotated[
        int, Parameter(help="Questions of each split at most, evenly from it; 0: all.")
    ] = 0,
    bandit_episodes: Annotated[
        int, Parameter(help="Train questions for each operator of the bandit's plan.")
    ] = 500,
    output: Annotated[
        Path | None,
        Parameter(name=["--output", "-o"], help="Folder for JSON, plot and transcripts."),
    ] = None,
    force: Force = False,
    quiet: Quiet = False,
    format: Format = "text",
) -> None:
    """Compare the learned policy with baselines, with confidence intervals and cost."""
    from batchwright.train.query_mutator.evaluate import as_json, check_folder, evaluate_run

    if questions < 0 or bandit_episodes < 1:
        raise ConfigError(
            f"--questions must be at least 0 and --bandit-episodes at least 1, got {questions} and "
            f"{bandit_episodes}"
        )
    place = output or run / "evaluation"
    check_folder(place, force)
    with progress_bar("evaluating", quiet) as progress:
        found = evaluate_run(
            run,
            questions=questions,
            bandit_episodes=bandit_episodes,
            output=place,
            progress=progress,
        )
    drawn = _draw(found, place / "gain.png")
    show(as_json(found), _compared(found, place, drawn), format)


def _draw(found: "Comparison", path: Path) -> bool:
    """Whether there is a picture: without matplotlib there is none."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        return False
    from batchwright.report.figures import intervals_png

    rows = [(one.name, 100 * one.gain, 100 * one.low, 100 * one.high) for one in found.strategies]
    intervals_png(path, rows, "gain over the original wording, percentage points")
    return True


def _versus(found: "Versus") -> str:
    gain, low, high = (f"{100 * value:+.1f}" for value in (found.gain, found.low, found.high))
    return (
        f"ppo against the best baseline, {found.baseline}: {gain} points, 95 % CI {low} to {high}, "
        f"{found.questions:,} questions"
    )


def _compared(found: "Comparison", output: Path, drawn: bool) -> str:
    from batchwright.report.text import number, percent, table

    def points(value: float) -> str:
        return f"{100 * value:+.1f}"

    rows: list[list[str | float | None]] = [
        [
            *(one.name, one.plan, percent(one.accuracy), points(one.gain)),
            f"{points(one.low)} to {points(one.high)}",
            *(one.questions, one.invalid, one.invalid_steps, f"{one.rewritings:.2f}"),
            *(one.calls, one.tokens),
            None if one.calls_per_point is None else f"{one.calls_per_point:.3f}",
            None if one.tokens_per_point is None else f"{one.tokens_per_point:.1f}",
        ]
        for one in found.strategies
    ]
    headers = [
        *("strategy", "operators", "accuracy", "gain", "95 % CI", "questions", "invalid"),
        *("invalid steps", "rewritings per question", "calls", "tokens"),
        *("calls per question and point", "tokens per question and point"),
    ]
    reasons = [
        [one.name, reason, number(count)]
        for one in found.strategies
        for reason, count in one.reasons.items()
    ]
    robust = found.robustness
    by_operator = [[name, percent(share)] for name, share in robust.by_operator.items()]
    lines = [
        ["original wording", percent(robust.original)],
        ["mean over rewritings", percent(robust.mean)],
        ["robustness drop", percent(robust.drop)],
        ["correct in every wording", percent(robust.worst)],
        ["correct in at least one", percent(robust.best)],
        *[[f"  {name}", share] for name, share in by_operator],
    ]
    return (
        table(headers, rows)
        + (f"\n{_versus(found.versus)}" if found.versus else "")
        + ("\n\n" + table(["strategy", "invalid because", "steps"], reasons) if reasons else "")
        + "\n\n"
        + table(["robustness of the target", "accuracy"], lines)
        + f"\n\n{number(len(found.strategies))} strategies; JSON and transcripts in {output}"
        + (", with a plot" if drawn else "; no plot, because matplotlib is not installed")
    )
