"""`batchwright data`: from raw rows to verified batch plans."""

from cyclopts import App

from batchwright.cli.batch import batch
from batchwright.cli.batching import batching
from batchwright.cli.batchplan import batchplan
from batchwright.cli.kg import kg
from batchwright.cli.lengths import lengths

__all__ = ["data"]

data = App(name="data", help="Rows to lengths to plans to batches.")
for group in (lengths, batchplan, batching, batch, kg):
    data.command(group)
