"""`batchwright reward`: score responses, explain a score, compare a judge with labels."""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from batchwright.cli.flags import Address, On, joined
from batchwright.cli.output import (
    Force,
    Format,
    Quiet,
    check_picture,
    progress_bar,
    say,
    show,
    terminated_like_ctrl_c,
)
from batchwright.errors import BadReward, ConfigError, UnknownSample

if TYPE_CHECKING:
    from batchwright.rewards import Agreement, Reward, RewardsConfig, Scorer

__all__ = ["reward"]

reward = App(name="reward")

Input = Annotated[
    Path,
    Parameter(name=["--input", "-i"], help="Rows with response, ground_truth, dataset, prompt."),
]
Config = Annotated[
    Path, Parameter(name=["--config", "-c"], help="TOML file with the parts of the reward.")
]
Cache = Annotated[
    Path | None,
    Parameter(help="Response cache; default: that of the config, else next to the output."),
]


@reward.command
def score(
    *,
    input: Input,
    config: Config,
    output: Annotated[
        Path, Parameter(name=["--output", "-o"], help="Scores, one row per response.")
    ],
    cache: Cache = None,
    allow_missing: Annotated[
        bool, Parameter(negative="", help="Exit 0 although some rewards are missing.")
    ] = False,
    on: On = "here",
    address: Address = None,
    force: Force = False,
    quiet: Quiet = False,
    format: Format = "text",
) -> None:
    """Score every response; an interrupted run resumes from its cached responses."""
    from batchwright.files import check_apart, check_output
    from batchwright.rewards import RewardsConfig
    from batchwright.rewards.files import is_scores, read_responses, write_rows

    check_output(output, is_scores, inputs=[input, config], force=force)
    settings = RewardsConfig.load(config)
    for place in (cache, settings.cache):
        if place is not None:
            check_apart(place, [input, config], "cache")
            check_apart(place, [output], "cache", "output")
    ids, responses = read_responses(input)
    if joined(on if on == "ray" else settings.on, address):
        settings = settings.model_copy(update={"on": "ray"})
    with (
        terminated_like_ctrl_c(),
        _open(settings, cache, output) as scorer,
        progress_bar("scoring", quiet) as progress,
    ):
        try:
            rewards = scorer.score(responses, progress=progress)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"{output} was not written; the calls that were answered are in "
                f"{scorer.config.cache}, run the same command again to resume"
            ) from None
        rows = scorer.columns(rewards, missing="mask")
    write_rows(output, ({"id": id, **row} for id, row in zip(ids, rows, strict=True)))
    facts = _facts(settings, rewards, output)
    show(facts, _summary(settings, rewards, output), format)
    lost = len(rewards) - facts["valid"]
    unweighted = _unweighted(settings, facts)
    if not lost and unweighted and not allow_missing:
        raise BadReward(
            f"values of parts with weight 0 are missing ({unweighted}) and are empty in {output}; "
            f"run again to repeat failed calls, or accept them with --allow-missing"
        )
    if lost and not allow_missing:
        raise BadReward(
            f"{lost:,} of {len(rewards):,} rewards are missing ({_kinds(facts)}) and are marked in "
            f"{output}; run again to repeat failed calls, or accept them with --allow-missing"
        )


@reward.command
def explain(
    id: Annotated[str, Parameter(help="The id of a row, or its number.")],
    /,
    *,
    input: Input,
    config: Config,
    cache: Cache = None,
    format: Format = "text",
) -> None:
    """Explain one score: the value of every part, its prompts and the replies."""
    from batchwright.rewards import RewardsConfig
    from batchwright.rewards.files import read_responses
    from batchwright.rewards.score import plan_work

    settings = RewardsConfig.load(config)
    ids, responses = read_responses(input)
    if id not in ids:
        raise UnknownSample(f"{input} has no row {id!r}; its {len(ids):,} ids start with {ids[:3]}")
    work = plan_work([responses[ids.index(id)]], settings.part)
    with _open(settings, cache, None) as scorer:
        outcomes = scorer.call(work.requests)
        (found,) = work.rewards(outcomes)
    parts = []
    for rule, first, end in work.spans[0]:
        part = found.parts[rule.column]
        parts.append(
            {
                "part": rule.column,
                "weight": rule.weight,
                "value": part.value if part.valid else None,
                "why": part.why,
                "error": part.error,
                "facts": dict(part.facts),
                "calls": [
                    {
                        "model": request.model,
                        "asked": request.body.get("messages", request.body.get("input")),
                        "answered": outcome.text if outcome else None,
                        "failed": None if outcome else f"{outcome.kind}: {outcome.error}",
                        "from": outcome.source if outcome else None,
                    }
                    for request, outcome in zip(
                        work.requests[first:end], outcomes[first:end], strict=True
                    )
                ],
            }
        )
    value = found.value if found.valid else None
    data = {"id": id, "score": value, "valid": found.valid, "why": found.why, "parts": parts}
    show(data, _explained(data), format)


@reward.command
def agree(
    *,
    scores: Annotated[Path, Parameter(name=["--scores", "-s"], help="Rows with id and score.")],
    labels: Annotated[
        Path | None, Parameter(help="Rows with id and label; default: the scores file.")
    ] = None,
    score: Annotated[str, Parameter(help="Column with the scores.")] = "score",
    label: Annotated[str, Parameter(help="Column with the labels, true or false.")] = "label",
    low: Annotated[float, Parameter(help="Score that means false.")] = 0.0,
    high: Annotated[float, Parameter(help="Score that means true.")] = 1.0,
    threshold: Annotated[float, Parameter(help="Decision threshold of the scaled score.")] = 0.5,
    plot: Annotated[Path | None, Parameter(help="Write the calibration plot to this PNG.")] = None,
    force: Force = False,
    format: Format = "text",
) -> None:
    """Compare a judge with labels: accuracy, Cohen's kappa, calibration."""
    from batchwright.rewards import agreement
    from batchwright.rewards.files import values_of

    check_picture(plot, [scores, *([] if labels is None else [labels])], force=force)
    if not low < high:
        raise ConfigError(f"--low must be below --high, got {low} and {high}")
    given, known = values_of(scores, score), values_of(labels or scores, label)
    both = [id for id in given if id in known]
    if not both:
        raise ConfigError(f"{scores} and {labels or scores} have no id in common")
    values = [_number(given[id]) for id in both]
    found = agreement(
        [(value - low) / (high - low) for value in values],
        [_bool(known[id], id) for id in both],
        threshold=threshold,
    )
    if plot is not None:
        from batchwright.report.figures import calibration_png

        calibration_png(plot, [dataclasses.asdict(bin) for bin in found.bins], found.count)
    show(dataclasses.asdict(found), _agreed(found, len(given) - len(both)), format)


@reward.command
def serve(
    *,
    config: Config,
    port: Annotated[int, Parameter(help="Port on 127.0.0.1; 0: any free port.")] = 5000,
    missing: Annotated[
        float | None,
        Parameter(help="Value of an invalid reward; default: an error."),
    ] = None,
) -> None:
    """Serve rewards over HTTP on this machine until Ctrl-C: a remote reward model for OpenRLHF."""
    import asyncio

    from batchwright.integrations.openrlhf import RewardFunction
    from batchwright.integrations.openrlhf import serve as serve_function
    from batchwright.rewards import RewardsConfig

    def started(url: str) -> None:
        say(f"serving rewards at {url}; stop with Ctrl-C")

    function = RewardFunction(RewardsConfig.load(config), missing=missing)
    asyncio.run(serve_function(function, port, started))


@contextmanager
def _open(settings: "RewardsConfig", cache: Path | None, output: Path | None) -> "Iterator[Scorer]":
    """A scorer with a response cache, so that a second run makes no call twice."""
    from batchwright.rewards import Scorer

    beside = None if output is None else output.with_name(output.name + ".calls.db")
    place = cache or settings.cache or beside
    scorer = Scorer(settings.model_copy(update={"cache": place}))
    try:
        yield scorer
    finally:
        scorer.close()


def _facts(settings: "RewardsConfig", rewards: "Sequence[Reward]", output: Path) -> dict[str, Any]:
    import numpy as np

    parts = {}
    for column in dict.fromkeys(rule.column for rule in settings.part):
        found = [reward.parts[column] for reward in rewards if column in reward.parts]
        values = np.array([part.value for part in found if part.valid])
        parts[column] = {
            "scored": len(values),
            "missing": dict(Counter(part.why for part in found if not part.valid)),
            "mean": float(values.mean()) if len(values) else None,
            "lowest": float(values.min()) if len(values) else None,
            "highest": float(values.max()) if len(values) else None,
        }
    valid = [reward.value for reward in rewards if reward.valid]
    return {
        "output": str(output),
        "responses": len(rewards),
        "valid": len(valid),
        "missing": dict(Counter(reward.why for reward in rewards if not reward.valid)),
        "mean": float(np.mean(valid)) if valid else None,
        "parts": parts,
    }


def _summary(settings: "RewardsConfig", rewards: "Sequence[Reward]", output: Path) -> str:
    import numpy as np

    from batchwright.report.text import histogram, number, table

    facts = _facts(settings, rewards, output)
    weights = {rule.column: rule.weight for rule in settings.part}

    def shown(value: float | None) -> str:
        return "-" if value is None else f"{value:.4g}"

    rows = [
        [
            *(name, shown(weights[name]), part["scored"], sum(part["missing"].values())),
            *(shown(part["mean"]), shown(part["lowest"]), shown(part["highest"])),
        ]
        for name, part in facts["parts"].items()
    ]
    headers = ["part", "weight", "scored", "missing", "mean", "lowest", "highest"]
    text = table(headers, rows) + f"\n\n{_counted(facts)}"
    values = np.array([reward.value for reward in rewards if reward.valid])
    if len(values) and values.min() < values.max():
        counts, edges = np.histogram(values, bins=12)
        labels = [f"{one:.3g} to {two:.3g}" for one, two in pairwise(edges)]
        text += "\n" + histogram(counts.tolist(), labels)
    return text + f"\n{number(len(rewards))} rows in {output}"


def _counted(facts: dict[str, Any]) -> str:
    mean = "-" if facts["mean"] is None else f"{facts['mean']:.4g}"
    line = f"{facts['valid']:,} of {facts['responses']:,} rewards are valid, mean {mean}"
    if facts["missing"]:
        line += f"; excluded: {_kinds(facts)}"
    return line


def _unweighted(settings: "RewardsConfig", facts: dict[str, Any]) -> str:
    """The missing values of parts that count for no reward, and why."""
    found = []
    for column in dict.fromkeys(rule.column for rule in settings.part if not rule.weight):
        missing = facts["parts"][column]["missing"]
        found += [f"{column}: {count:,} {kind}" for kind, count in missing.items()]
    return ", ".join(found)


def _kinds(facts: dict[str, Any]) -> str:
    return ", ".join(f"{count:,} {kind}" for kind, count in facts["missing"].items())


def _explained(data: dict[str, Any]) -> str:
    score = f"{data['score']:.4g}" if data["valid"] else f"missing ({data['why']})"
    lines = [f"{data['id']}: score {score}"]
    for part in data["parts"]:
        value = f"{part['value']:.4g}" if part["value"] is not None else f"missing, {part['why']}"
        lines.append(f"\n{part['part']}: {value}, weight {part['weight']:g}")
        if part["error"]:
            lines.append(f"  {part['error']}")
        lines += [f"  {name}: {fact}" for name, fact in part["facts"].items()]
        for call in part["calls"]:
            lines.append(f"  prompt to {call['model']}:")
            prompt = call["asked"]
            text = prompt if isinstance(prompt, str) else "\n".join(m["content"] for m in prompt)
            lines += [f"    | {line}" for line in text.splitlines()]
            reply = call["answered"] if call["failed"] is None else f"({call['failed']})"
            lines.append(f"  reply{' (cached)' if call['from'] == 'cache' else ''}:")
            lines += [f"    | {line}" for line in str(reply).splitlines()]
    return "\n".join(lines)


def _agreed(found: "Agreement", unlabelled: int) -> str:
    from batchwright.report.text import number, percent, table

    rows = [
        ["compared", number(found.count)],
        ["no valid score", number(found.missing)],
        ["no label", number(unlabelled)],
        ["accuracy", percent(found.accuracy)],
        ["Cohen's kappa", "-" if found.kappa is None else f"{found.kappa:.3f}"],
        ["true positives, negatives", f"{found.true_positive:,}, {found.true_negative:,}"],
        ["false positives, negatives", f"{found.false_positive:,}, {found.false_negative:,}"],
        ["Brier score", f"{found.brier:.4f}"],
        ["calibration error", f"{found.calibration_error:.4f}"],
    ]
    bins: list[list[str | float | None]] = [
        [f"{b.low:.1f} to {b.high:.1f}", b.count, f"{b.mean_score:.3f}", percent(b.share_true)]
        for b in found.bins
    ]
    return (
        table(["judge compared with labels", ""], rows)
        + "\n\n"
        + table(["score", "samples", "mean score", "labelled true"], bins)
    )


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")


def _bool(value: Any, id: str) -> bool:
    if isinstance(value, bool) or value in (0, 1):
        return bool(value)
    raise ConfigError(f"the label of {id!r} must be true or false, got {value!r}")
