"""Models by name: downloaded, loaded, served and run in this process."""

from batchwright.models.registry import EMBEDDERS, REGISTRY, Model, find, get, home, known, locked

__all__ = ["EMBEDDERS", "REGISTRY", "Model", "find", "get", "home", "known", "locked"]
