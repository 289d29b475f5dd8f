"""`batchwright train prover`: a policy that learns which rules to prove by."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from batchwright.cli.output import Format, Quiet, progress_bar, show
from batchwright.cli.train.flags import Given, Resume, ending, leave, settings
from batchwright.train.prover.config import ProverConfig, phases_said

if TYPE_CHECKING:
    from batchwright.train.prover.loop import ProverResult

__all__ = ["train_prover"]


class _Flags(Given, ProverConfig):
    """The flags that were typed."""


def train_prover(
    *,
    given: Annotated[_Flags, Parameter(name="*")] = _Flags(),
    resume: Resume = None,
    quiet: Quiet = False,
    format: Format = "text",
) -> None:
    """Train a prover by PPO; the policy `rules` also by cloning and supervised passes."""
    config = settings(ProverConfig, given, resume)
    from batchwright.train.prover.loop import train_prover as train

    with progress_bar("training", quiet) as progress:
        result = train(config, resume=resume is not None, progress=progress)
    facts: dict[str, Any] = {**dataclasses.asdict(result), "run_dir": str(result.run_dir)}
    show(facts, _table(result, config), format)
    leave(result.stopped_by)


def _table(result: "ProverResult", config: ProverConfig) -> str:
    from batchwright.report.text import number, percent, seconds, table

    def mrr(value: float | None) -> str:
        return "-" if value is None else f"{value:.4f}"

    rows = [
        ["rounds", number(result.rounds)],
        ["environments", number(result.n_envs)],
        ["PPO steps", f"{number(result.ppo_steps)} of {number(config.recipe.ppo_steps)}"],
        ["rules", number(result.rules)],
        ["valid queries proved by one sample, before", percent(result.first_proved)],
        ["valid queries proved by one sample, best policy", percent(result.proved)],
        ["answered correctly by one sample, best policy", percent(result.right)],
        ["MRR on valid, before", mrr(result.first_mrr)],
        ["MRR on valid, before PPO", mrr(result.before_ppo_mrr)],
        ["MRR on valid, after PPO", mrr(result.after_ppo_mrr)],
        ["answered correctly by one sample, before PPO", percent(result.before_ppo_right)],
        ["answered correctly by one sample, after PPO", percent(result.after_ppo_right)],
        ["MRR on valid, best policy", mrr(result.best_mrr)],
        ["best after round", number(result.best_round)],
        ["best policy trained by", phases_said(result.trained_by)],
        ["time", seconds(result.seconds)],
    ]
    text = table(["run", str(result.run_dir)], rows)
    if result.skipped:
        text += (
            f"\n{len(result.skipped)} rules are not chains of up to 3 edges and were skipped: "
            f"{result.skipped[0]}..."
        )
    asked, rollout = config.recipe.ppo_steps, config.steps_each * result.n_envs
    if 0 < asked < rollout:
        text += (
            f"\none rollout is {rollout:,} steps, more than the {asked:,} of --ppo-steps: PPO made "
            f"one update; lower --n-envs, or set it to auto"
        )
    done = (
        f"done; next: batchwright evaluate prover --data {config.data} "
        f"--mode {'rl' if asked else 'prover'} --prover {result.run_dir}"
    )
    return text + "\n" + ending(result.finished, done, "prover", result.run_dir)
