"""The `batchwright` command: words to calls to tables."""
