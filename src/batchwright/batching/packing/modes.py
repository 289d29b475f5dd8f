"""The packing modes by name."""

from enum import StrEnum

from batchwright.errors import ConfigError

__all__ = ["PackingMode", "packing_mode"]


class PackingMode(StrEnum):
    """In which order items come and which bin takes them."""

    FIRST_FIT = "first_fit"
    """In the given order, into the first bin with enough space."""
    BEST_FIT = "best_fit"
    """In the given order, into the tightest bin with enough space."""
    GREEDY = "greedy"
    """Longest first, into the first bin with enough space."""
    BEST_FIT_DECREASING = "best_fit_decreasing"
    """Longest first, into the tightest bin; the default, exact on the length histogram."""
    OPTIMAL = "optimal"
    """Best-fit-decreasing, and column generation where that is far from the lower bound. The
    linear program is solved in floating point, so another version of the solver may find other
    bins; a plan stores the bins it was built with."""


def packing_mode(mode: PackingMode | str) -> PackingMode:
    """The mode by its name."""
    try:
        return PackingMode(mode)
    except ValueError:
        names = ", ".join(PackingMode)
        raise ConfigError(f"packing mode {mode!r} is not known; choose one of {names}") from None
