"""`batchwright data`: from raw rows to verified batch plans."""

from cyclopts import App

from batchwright.cli.data.batch import batch
from batchwright.cli.data.batching import batching
from batchwright.cli.data.batchplan import batchplan
from batchwright.cli.data.kg import kg
from batchwright.cli.data.lengths import lengths

__all__ = ["data"]

data = App(name="data", help="Rows to lengths to plans to batches.")
for group in (lengths, batchplan, batching, batch, kg):
    data.command(group)
