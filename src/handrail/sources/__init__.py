"""What a package that adds a source of tools is written with; see the entry point group ``handrail.sources``.

It loads what is used first. Everything that is not in ``__all__`` is private by convention.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from handrail.contract.tool.resource_provider import ResourceProvider
    from handrail.contract.tool_generation import DiscoveredTool, SourceContents, SourceRank, ToolSource, UnlistedSource

_HOME = {
    "DiscoveredTool": "contract.tool_generation",
    "SourceContents": "contract.tool_generation",
    "ResourceProvider": "contract.tool.resource_provider",
    "SourceRank": "contract.tool_generation",
    "ToolSource": "contract.tool_generation",
    "UnlistedSource": "contract.tool_generation",
}

__all__ = [
    "DiscoveredTool",
    "ResourceProvider",
    "SourceContents",
    "SourceRank",
    "ToolSource",
    "UnlistedSource",
]


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"handrail.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_HOME)
