"""`batchwright train`: the loops that use the engines."""

from cyclopts import App

from batchwright.cli.train.kge import train_kge
from batchwright.cli.train.prover import train_prover
from batchwright.cli.train.query_mutator import train_query_mutator
from batchwright.cli.train.sft import sft

__all__ = ["train"]

train = App(name="train")
train.command(sft)
train.command(train_query_mutator, name="query-mutator")
train.command(train_kge, name="kge")
train.command(train_prover, name="prover")
