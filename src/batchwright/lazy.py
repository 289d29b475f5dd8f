"""Names of a package that are imported when they are first used, so that importing it is quick."""

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

__all__ = ["lazy_names"]


def lazy_names(package: str, *modules: str) -> Callable[[str], Any]:
    """A module-level `__getattr__` (PEP 562) for what the `__all__` of `package` names.

    The first of `modules`, which are imported in turn, that has a name in its own `__all__`
    defines it. No such name may be that of a module of the package as well: the import of the
    module would hide it.

    >>> get = lazy_names("string", "csv", "string")
    >>> get("digits")
    '0123456789'
    """

    def get(name: str) -> Any:
        if name in sys.modules[package].__all__:
            for module in map(import_module, modules):
                if name in module.__all__:
                    value = getattr(module, name)
                    setattr(sys.modules[package], name, value)
                    return value
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get
