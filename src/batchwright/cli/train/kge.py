"""`batchwright train kge`: an embedding of a knowledge graph."""

import dataclasses
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from batchwright.cli.output import Format, Quiet, progress_bar, show
from batchwright.cli.train.flags import Given, Resume, ending, leave, settings
from batchwright.train.kge.config import KgeConfig

if TYPE_CHECKING:
    from batchwright.train.kge.loop import KgeResult

__all__ = ["train_kge"]


class _Flags(Given, KgeConfig):
    """The flags that were typed."""


def train_kge(
    *,
    given: Annotated[_Flags, Parameter(name="*")] = _Flags(),
    resume: Resume = None,
    quiet: Quiet = False,
    format: Format = "text",
) -> None:
    """Train an embedding of a knowledge graph, with exact resume."""
    config = settings(KgeConfig, given, resume)
    from batchwright.train.kge.loop import train_kge as train

    with progress_bar("training", quiet) as progress:
        result = train(config, resume=resume is not None, progress=progress)
    facts = {**dataclasses.asdict(result), "run_dir": str(result.run_dir)}
    show(facts, _table(result), format)
    leave(result.stopped_by)


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
    end = ending(result.finished, f"done: {result.run_dir}/model", "kge", result.run_dir)
    return table(["run", str(result.run_dir)], rows) + "\n" + end
