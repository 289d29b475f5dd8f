"""Models by name: which we know how to get, and how they are loaded, served and run."""

from batchwright.models.registry import EMBEDDERS, REGISTRY, Model, find, get, home, known, locked

__all__ = ["EMBEDDERS", "REGISTRY", "Model", "find", "get", "home", "known", "locked"]
