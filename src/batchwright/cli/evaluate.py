"""`batchwright evaluate`: measure what was trained."""

from cyclopts import App

__all__ = ["evaluate"]

evaluate = App(name="evaluate", help="Measure what was trained.")
