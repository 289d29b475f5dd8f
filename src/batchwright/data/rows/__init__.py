"""Rows of files and data sets, and the samples that are trained from them."""

from collections.abc import Mapping
from typing import Any

__all__ = ["Row"]

Row = Mapping[str, Any]
"""One record of a data set, as parsed from JSON or Arrow."""
