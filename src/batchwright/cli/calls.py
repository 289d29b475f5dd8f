"""`batchwright calls`: model calls from the command line."""

from cyclopts import App

from batchwright.cli.callcache import cache
from batchwright.cli.simulate import simulate

__all__ = ["calls"]

calls = App(name="calls", help="Call models: run, probe, simulate, cache.")
calls.command(cache)
calls.command(simulate)
