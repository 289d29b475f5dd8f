"""`batchwright gym`: samples from puzzles that are played on a server."""

from cyclopts import App

from batchwright.cli.gym.info import info
from batchwright.cli.gym.run import run
from batchwright.cli.gym.serve import serve

__all__ = ["gym"]

gym = App(name="gym")
for command in (run, serve, info):
    gym.command(command)
