"""Names of a package that are imported when they are first used, so that importing it is quick."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

__all__ = ["lazy_names"]


def lazy_names(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """A module-level `__getattr__` (PEP 562): `modules` says which module defines each name.

    >>> get = lazy_names("decimals", {"Decimal": "decimal"})
    >>> get("Decimal")("1.50")
    Decimal('1.50')
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules[name]), name)

    return get
