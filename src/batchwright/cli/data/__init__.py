"""`batchwright data`: from raw rows to verified batch plans."""

from cyclopts import App

__all__ = ["data"]

GROUPS = {
    "rows": "Look at rows as they will be trained: columns, text, loss.",
    "lengths": "Measure the length in tokens of each sample.",
    "tokens": "Token stores: what was tokenised and is kept for training.",
    "batchplan": "Batch plans: the order of every microbatch of every epoch.",
    "batching": "Length histograms, bucket edges and recommendations.",
    "batch": "Batches as NPZ files, for trainers that read files.",
    "kg": "Knowledge graphs: inspect, mine rules, check for test leakage.",
}

data = App(name="data")
for group, words in GROUPS.items():
    data.command(f"batchwright.cli.data.{group}:{group}", name=group, help=words)
