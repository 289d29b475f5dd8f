"""`batchwright reward`: score responses from the command line."""

from cyclopts import App

__all__ = ["reward"]

reward = App(name="reward", help="Score responses with rules, judges and monitors.")
