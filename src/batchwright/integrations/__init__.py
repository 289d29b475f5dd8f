"""Adapters for other frameworks: torch, transformers, TRL, verl, OpenRLHF, Gymnasium, trackers."""
