"""`batchwright evaluate`: measure what was trained."""

from cyclopts import App

from batchwright.cli.evaluate.prover import evaluate_prover
from batchwright.cli.evaluate.query_mutator import evaluate_query_mutator

__all__ = ["evaluate"]

evaluate = App(name="evaluate")
evaluate.command(evaluate_query_mutator, name="query-mutator")
evaluate.command(evaluate_prover, name="prover")
