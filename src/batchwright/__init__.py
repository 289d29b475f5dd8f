"""Keeps the three expensive things of LLM and RL training full.

Import the engines by name: `batchwright.data`, `batchwright.batching`. This module stays
empty of them so that `import batchwright` costs nothing.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
