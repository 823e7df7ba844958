"""Resources and prompts, which a source may provide in addition to tools. Their shapes are MCP's.

Reading and getting pass through the arbiter like every call (``resource.read``, ``prompt.get``, …), under the same rules.
An offering only carries them out.

Source: https://modelcontextprotocol.io/specification/2025-11-25/server
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    pass


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


class Listing(Protocol):
    """The resources and prompts that one source lists in one generation."""

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


@dataclass(frozen=True, slots=True)
class SourceRequest:
    """What a call of a built-in tool asks of a source.

    :param method: of MCP's, by which rules may name it: ``mcp:SERVER:resources/read``
    :param argument: which of its arguments names what it is about
    """

    method: str
    argument: Literal["uri", "name", "ref"]


AT_SOURCE = "mcp+"
"""Before a source's name and a colon, before a URI or name: what that source offers, where two offer the same."""


@dataclass(frozen=True, slots=True)
class Given:
    """What a source gave, as MCP writes it.

    :param source: whose it is, where that is not the operator's own
    """

    data: Mapping[str, Any]
    source: str = ""


class Offers(Protocol):
    """What a built-in tool sees of all sources' offerings: ``runtime.offers``. It reaches what its call was judged for."""

    async def all(self) -> Sequence[Listing]:
        """Those of the generation that the call is at, for what they list."""
        ...

    async def read(self, uri: str) -> Given:
        """See :meth:`handrail.contract.tool.offering.Offering.read`.

        :raises ToolError: ``invalid_input`` for a URI that there is not
        """
        ...

    async def prompt(self, name: str, arguments: Mapping[str, str]) -> Given: ...

    async def complete(
        self, ref: Mapping[str, Any], argument: Mapping[str, str], context: Mapping[str, str]
    ) -> Given: ...

    async def subscribe(self, uri: str) -> None:
        """From now on, as long as the session is open, it is told of changes by ``resource-updated``. Twice is once.

        :raises ToolError: ``unavailable`` where the source does not tell; ``limit`` for too many
        """
        ...

    async def unsubscribe(self, uri: str) -> bool:
        """Whether it was subscribed."""
        ...
