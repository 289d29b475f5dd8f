"""Training on a batch plan."""
