"""Experiment trackers of a run: started before it, finished after it, and never able to end it."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from batchwright.errors import ConfigError, one_line
from batchwright.train.run import Run

__all__ = ["Tracker", "Tracking"]


class Tracker(Protocol):
    """An experiment tracker: it receives the metrics of the run log as well."""

    def start(self, config: Mapping[str, Any]) -> None: ...
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def finish(self) -> None: ...


class Tracking:
    """The trackers of a run; after their start, none of them can end it."""

    def __init__(self, trackers: Sequence[Tracker], run: Run) -> None:
        self._trackers, self._run = trackers, run
        self._started: list[Tracker] = []
        self._failed: set[str] = set()
        self.failures = 0

    def start(self, config: Mapping[str, Any]) -> None:
        for tracker in self._trackers:
            try:
                tracker.start(config)
            except Exception as error:
                raise ConfigError(
                    f"{type(tracker).__name__} cannot start: {one_line(error)}; correct its "
                    f"settings, or train without it"
                ) from error
            self._started.append(tracker)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._tell("log", step, metrics)

    def finish(self) -> None:
        self._tell("finish")

    def _tell(self, call: str, *given: Any) -> None:
        for tracker in self._started:
            try:
                getattr(tracker, call)(*given)
            except Exception as error:
                self.failures += 1
                name = type(tracker).__name__
                if name not in self._failed:
                    self._failed.add(name)
                    self._run.event("tracker", tracker=name, call=call, error=one_line(error))
