"""`batchwright calls`: model calls from the command line."""

from cyclopts import App

__all__ = ["calls"]

calls = App(name="calls", help="Call models: run, probe, simulate, cache.")
