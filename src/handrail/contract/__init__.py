"""What *is* a tool? Types and Protocols of tools, calls and sessions, without I/O or imports of other rooms."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def make_lazy_exports(
    package: str, names_by_module: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and ``__dir__`` of a package that loads each exported name on first use.

    :param names_by_module: the exported names of each module below ``handrail``, separated by spaces
    """
    homes = {name: module for module, names in names_by_module.items() for name in names.split()}

    def load_name(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"handrail.{homes[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return load_name, lambda: sorted(homes)
