"""`batchwright train prover`: a policy that learns which rules to prove by."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from batchwright.cli.output import Format, Quiet, progress_bar, show
from batchwright.errors import ConfigError
from batchwright.train.prover.config import ProverConfig

if TYPE_CHECKING:
    from batchwright.train.prover.loop import ProverResult

__all__ = ["train_prover"]


def train_prover(
    *,
    config: Annotated[ProverConfig | None, Parameter(name="*")] = None,
    resume: Annotated[
        Path | None, Parameter(help="Go on with the run in this folder, as it was configured.")
    ] = None,
    quiet: Quiet = False,
    format: Format = "text",
) -> None:
    """Learn to prove: imitate shortest proofs, practise with PPO, then exact policy gradients."""
    chosen = config or ProverConfig()
    if resume is not None:
        from batchwright.train.settings import from_toml

        saved = dataclasses.replace(from_toml(ProverConfig, resume / "config.toml"), run_dir=resume)
        given = dataclasses.replace(chosen, stop_after=saved.stop_after)
        if given not in (dataclasses.replace(ProverConfig(), stop_after=saved.stop_after), saved):
            raise ConfigError(
                f"a resumed run keeps its settings; give --resume {resume} alone, or with "
                f"--stop-after"
            )
        # To stop after some rounds is meant for the call that says so.
        chosen = dataclasses.replace(saved, stop_after=chosen.stop_after)
    chosen = chosen.named()
    from batchwright.train.prover.loop import train_prover as train

    with progress_bar("training", quiet) as progress:
        result = train(chosen, resume=resume is not None, progress=progress)
    facts: dict[str, Any] = {**dataclasses.asdict(result), "run_dir": str(result.run_dir)}
    show(facts, _table(result, chosen), format)


def _table(result: "ProverResult", config: ProverConfig) -> str:
    from batchwright.report.text import number, percent, seconds, table

    def mrr(value: float | None) -> str:
        return "-" if value is None else f"{value:.4f}"

    rows = [
        ["rounds", number(result.rounds)],
        ["rules", number(result.rules)],
        ["valid questions proved in one draw, at first", percent(result.first_proved)],
        ["by the policy that is kept", percent(result.proved)],
        ["answered as looked for", percent(result.right)],
        ["MRR on valid at first", mrr(result.first_mrr)],
        ["best MRR on valid", mrr(result.best_mrr)],
        ["after round", number(result.best_round)],
        ["time", seconds(result.seconds)],
    ]
    text = table(["run", str(result.run_dir)], rows)
    if result.skipped:
        text += (
            f"\n{len(result.skipped)} rules are no chains of up to 3 and took no part: "
            f"{result.skipped[0]}..."
        )
    if result.finished:
        return text + (
            f"\ndone; next: batchwright evaluate prover --data {config.data} --mode rl "
            f"--prover {result.run_dir}"
        )
    return text + (
        f"\nstopped and saved; go on with: batchwright train prover --resume {result.run_dir}"
    )
