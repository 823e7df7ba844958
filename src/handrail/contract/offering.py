"""What a source of tools offers beside them: resources to be read, and prompts to begin with. MCP's shapes.

Reading and getting go through the arbiter like every call (``resource.read``, ``prompt.get``, …), under the same rules; an
offering only carries them out.

Source: https://modelcontextprotocol.io/specification/2025-11-25/server
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from handrail.contract.runtime import Runtime


@dataclass(frozen=True, slots=True)
class ResourceSpec:
    """:param more: what else MCP lets a listing say (``annotations``, ``icons``, ``_meta``), as it writes it"""

    uri: str
    name: str
    description: str = ""
    title: str = ""
    media_type: str = ""
    size: int | None = None
    more: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)


@dataclass(frozen=True, slots=True)
class ResourceTemplate:
    """:param uri_template: RFC 6570"""

    uri_template: str
    name: str
    description: str = ""
    title: str = ""
    media_type: str = ""
    more: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)


@dataclass(frozen=True, slots=True)
class PromptArgument:
    name: str
    description: str = ""
    required: bool = False
    title: str = ""


@dataclass(frozen=True, slots=True)
class PromptSpec:
    """:param name: as models and people call it; of a foreign source with the source's name before it"""

    name: str
    description: str = ""
    title: str = ""
    arguments: tuple[PromptArgument, ...] = ()
    more: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)


class Offering(Protocol):
    """What one source has beside tools, as it stands in one generation.

    The names and URIs that it takes are those that it lists. What it gives are MCP's results as plain data; binary parts
    are :class:`~handrail.contract.result.Blob`.
    """

    @property
    def source(self) -> str:
        """What the operator calls the source; ``""`` for the operator's own."""
        ...

    @property
    def foreign(self) -> bool: ...

    @property
    def resources(self) -> Sequence[ResourceSpec]: ...

    @property
    def templates(self) -> Sequence[ResourceTemplate]: ...

    @property
    def prompts(self) -> Sequence[PromptSpec]: ...

    def has(self, uri: str) -> bool:
        """Whether a URI is one of its resources, or one that a template of its makes."""
        ...

    async def read(self, uri: str, runtime: Runtime) -> Mapping[str, Any]:
        """``{"contents": [{"uri", "mimeType", "text" | "blob": Blob}, …]}``.

        :raises ToolError: ``invalid_input`` for a URI that there is not; ``unavailable``, ``backend``
        """
        ...

    async def prompt(self, name: str, arguments: Mapping[str, str], runtime: Runtime) -> Mapping[str, Any]:
        """``{"description"?, "messages": [{"role", "content"}, …]}``, pictures and sounds in them as ``Blob`` under
        ``data``.

        :raises ToolError: ``invalid_input`` for a name or arguments that do not fit
        """
        ...

    async def complete(
        self, ref: Mapping[str, Any], argument: Mapping[str, str], context: Mapping[str, str], runtime: Runtime
    ) -> Mapping[str, Any]:
        """``{"values": [...], "total"?, "hasMore"?}`` for one argument of a prompt or template, as MCP asks for it."""
        ...

    async def subscribe(self, uri: str, updated: Callable[[str], None]) -> Callable[[], Awaitable[None]]:
        """Tell ``updated`` the URI whenever it changes; gives the way to stop it.

        :raises ToolError: ``unavailable`` where the source does not tell
        """
        ...
