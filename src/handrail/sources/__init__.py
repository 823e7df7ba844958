"""What a package that adds a source of tools is written with; see the entry point group ``handrail.sources``.

It loads what is used first. Everything that is not in ``__all__`` is private by convention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from handrail.contract import make_lazy_exports

if TYPE_CHECKING:
    from handrail.contract.tool.resource_provider import ResourceProvider
    from handrail.contract.tool_generation import DiscoveredTool, SourceContents, SourceRank, ToolSource, UnlistedSource

__all__ = [
    "DiscoveredTool",
    "ResourceProvider",
    "SourceContents",
    "SourceRank",
    "ToolSource",
    "UnlistedSource",
]

__getattr__, __dir__ = make_lazy_exports(
    __name__,
    {
        "contract.tool.resource_provider": "ResourceProvider",
        "contract.tool_generation": "DiscoveredTool SourceContents SourceRank ToolSource UnlistedSource",
    },
)
