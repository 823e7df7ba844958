"""What the server says of itself when a client connects: its name, capabilities and instructions."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from handrail.catalog.prompt import index_of
from handrail.catalog.view import view_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from handrail.kernel.kernel import Kernel

INSTRUCTIONS = (
    "Every call is checked against its operator's rules before it runs. An error says what was wrong and what to do "
    "instead; what was denied stays denied. Where a result says that it is the beginning only, the whole is in the file "
    "that it names."
)
CAPABILITIES: Mapping[str, Any] = {
    "completions": {},
    "logging": {},
    "prompts": {"listChanged": True},
    "resources": {"listChanged": True, "subscribe": True},
    "tools": {"listChanged": True},
}
"""As the SDK says them of the server."""
EXTENSIONS: Mapping[str, dict[str, Any]] = {"io.modelcontextprotocol/tasks": {}}
"""What it says beside them in the stateless era; the older one has no word for it."""


def instructions(kernel: Kernel) -> str:
    """What there is beside the tools in view, as a model reads it."""
    options = kernel.config.settings.catalog.options(kernel.agent.core)
    index = index_of(view_of(kernel.generation, options), options.index_tokens)
    return "\n\n".join(filter(None, (INSTRUCTIONS, index)))


def greeting(kernel: Kernel) -> dict[str, Any]:
    """What both eras say in one way or the other."""
    about = {"name": "handrail", "version": version("handrail")}
    return {"capabilities": CAPABILITIES, "serverInfo": about, "instructions": instructions(kernel)}
