"""From the flags that were typed to the settings of a run, in the same way for all trainers."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

from cyclopts import Parameter

from batchwright.train.run import TERMINATED, RunConfig, changes

__all__ = ["Given", "Resume", "ending", "leave", "settings"]

Config = TypeVar("Config", bound=RunConfig)

Resume = Annotated[
    Path | None,
    Parameter(help="Resume the run in this folder, with its own settings."),
]


class Given:
    """Put before a config among the bases of a class, it holds only the flags that were typed.

    cyclopts makes flags of the config's fields, and calls the class with those that were given.
    """

    def __init__(self, **given: Any) -> None:
        vars(self).update(given)


def settings(config: type[Config], given: Given, resume: Path | None) -> Config:
    """The settings of a new run, or those of the run to resume with what may change and was given.

    A flag is given if it was typed, whatever its value.
    """
    if resume is None:
        return config(**vars(given)).named()
    saved = config.of_run(resume)
    return replace(saved, **changes(saved, vars(given))).named()


def ending(finished: bool, done: str, trainer: str, run: Path) -> str:
    """The last line of a trainer's report: what is done, or how to resume what is not."""
    if finished:
        return done
    words = ["batchwright", "train", trainer, "--resume", str(run)]
    return f"stopped and saved; resume with: {shlex.join(words)}"


def leave(stopped_by: str | None) -> None:
    """Exit with a code of its own if a scheduler stopped the run, which may then requeue it."""
    if stopped_by in ("SIGTERM", "SIGUSR1"):
        raise SystemExit(TERMINATED)
