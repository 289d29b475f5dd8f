"""`batchwright train kge`: an embedding of a knowledge graph."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from batchwright.cli.output import Format, Quiet, progress_bar, show
from batchwright.errors import ConfigError
from batchwright.train.kge.config import KgeConfig

if TYPE_CHECKING:
    from batchwright.train.kge.loop import KgeResult

__all__ = ["train_kge"]

CHANGEABLE = ("epochs", "stop_after", "save_every", "threads")
"""What a resumed run may change; everything else would make it another run."""


def train_kge(
    *,
    config: Annotated[KgeConfig | None, Parameter(name="*")] = None,
    resume: Annotated[
        Path | None, Parameter(help="Go on with the run in this folder, as it was configured.")
    ] = None,
    quiet: Quiet = False,
    format: Format = "text",
) -> None:
    """Train an embedding of a knowledge graph, with exact resume."""
    if resume is not None:
        config = _resumed(resume, config)
    config = (config or KgeConfig()).named()
    from batchwright.train.kge.loop import train_kge as train

    with progress_bar("training", quiet) as progress:
        result = train(config, resume=resume is not None, progress=progress)
    facts = {**dataclasses.asdict(result), "run_dir": str(result.run_dir)}
    show(facts, _table(result), format)


def _resumed(run: Path, given: KgeConfig | None) -> KgeConfig:
    """The run's own settings, with those that a resumed run may change."""
    saved = dataclasses.replace(KgeConfig.load(run / "config.toml"), run_dir=run, stop_after=0)
    if given is None:
        return saved
    blank = KgeConfig()
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(KgeConfig):
        value = getattr(given, field.name)
        if value not in (getattr(blank, field.name), getattr(saved, field.name)):
            changed[field.name] = value
    fixed = sorted(changed.keys() - set(CHANGEABLE))
    if fixed:
        raise ConfigError(
            f"a resumed run keeps its {', '.join(fixed)}; what may change is "
            f"{', '.join(CHANGEABLE)}"
        )
    return dataclasses.replace(saved, **changed)


def _table(result: "KgeResult") -> str:
    from batchwright.report.text import number, seconds, table

    mrr = "-" if result.best_mrr is None else f"{result.best_mrr:.4f}"
    rows = [
        ["epochs", number(result.epoch)],
        ["steps", number(result.step)],
        ["loss", "-" if result.loss is None else f"{result.loss:.4f}"],
        ["best MRR on valid", mrr],
        ["at epoch", number(result.best_epoch)],
        ["time", seconds(result.seconds)],
    ]
    end = (
        f"done: {result.run_dir}/model"
        if result.finished
        else f"stopped and saved; go on with: batchwright train kge --resume {result.run_dir}"
    )
    return table(["run", str(result.run_dir)], rows) + "\n" + end
