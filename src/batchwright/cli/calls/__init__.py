"""`batchwright calls`: model calls from the command line."""

from cyclopts import App

from batchwright.cli.calls.cache import cache
from batchwright.cli.calls.probe import probe
from batchwright.cli.calls.run import run
from batchwright.cli.calls.simulate import simulate

__all__ = ["calls"]

calls = App(name="calls")
for command in (run, probe, cache, simulate):
    calls.command(command)
