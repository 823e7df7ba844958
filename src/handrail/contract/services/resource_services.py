"""Resources and prompts, which a source may provide in addition to tools. Their shapes are MCP's.

Reads and requests pass through the arbiter like every call (``resource.read``, ``prompt.get``, …), under the same
rules. A provider only carries them out.

Source: https://modelcontextprotocol.io/specification/2025-11-25/server
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from handrail.contract.struct import Struct

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True)
class ResourceSpec:
    """A resource that a source lists.

    :param more: other members of an MCP listing (``annotations``, ``icons``, ``_meta``), in MCP's form
    """

    uri: str
    name: str
    description: str = ""
    title: str = ""
    media_type: str = ""
    size: int | None = None
    more: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)


@dataclass(frozen=True, slots=True)
class ResourceTemplate:
    """A template of resource URIs that a source lists.

    :param uri_template: RFC 6570
    """

    uri_template: str
    name: str
    description: str = ""
    title: str = ""
    media_type: str = ""
    more: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)


class PromptArgument(Struct, frozen=True):
    """An argument of a prompt."""

    name: str
    description: str = ""
    required: bool = False
    title: str = ""


@dataclass(frozen=True, slots=True)
class PromptSpec:
    """A prompt that a source lists.

    :param name: the name for models and people; for a third-party source it begins with the source's name
    """

    name: str
    description: str = ""
    title: str = ""
    arguments: tuple[PromptArgument, ...] = ()
    more: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)


class SourceResources(Protocol):
    """The resources and prompts that one source lists in one generation."""

    @property
    def source(self) -> str:
        """The operator's name of the source; ``""`` for the operator's own resources."""
        ...

    @property
    def is_third_party(self) -> bool:
        """Whether the source is third-party."""
        ...

    @property
    def resources(self) -> Sequence[ResourceSpec]:
        """The listed resources."""
        ...

    @property
    def templates(self) -> Sequence[ResourceTemplate]:
        """The listed URI templates."""
        ...

    @property
    def prompts(self) -> Sequence[PromptSpec]:
        """The listed prompts."""
        ...

    def has_resource(self, uri: str) -> bool:
        """Return whether a URI is one of the resources, or matches one of the templates."""
        ...


class SourceRequestSpec(Struct, frozen=True):
    """The request that a call of a built-in tool sends to a source.

    :param method: MCP's method, by which rules may name it: ``mcp:SERVER:resources/read``
    :param argument: the argument of the tool that names the resource or prompt
    """

    method: str
    argument: Literal["uri", "name", "ref"]


SOURCE_PREFIX = "mcp+"
"""The prefix of a source's name and a colon before a URI or name. It selects a source if two have the same."""


class SourceResponse(Struct, frozen=True):
    """The response of a source, in MCP's form.

    :param source: the name of a third-party source; ``""`` for the operator's own
    """

    data: Mapping[str, Any]
    source: str = ""


class ResourceService(Protocol):
    """The resources and prompts of all sources: ``runtime.resources``.

    A call reaches only the source that it was evaluated for.
    """

    async def list_sources(self) -> Sequence[SourceResources]:
        """Return the listings of all sources in the generation of the call."""
        ...

    async def read(self, uri: str) -> SourceResponse:
        """Read a resource; see :meth:`handrail.contract.tool.resource_provider.ResourceProvider.read`.

        :raises ToolError: ``invalid_input`` for an unknown URI
        """
        ...

    async def get_prompt(self, name: str, arguments: Mapping[str, str]) -> SourceResponse:
        """Return the messages of a prompt."""
        ...

    async def complete(
        self, ref: Mapping[str, Any], argument: Mapping[str, str], context: Mapping[str, str]
    ) -> SourceResponse:
        """Return completions for an argument of a prompt or template."""
        ...

    async def subscribe(self, uri: str) -> None:
        """Send ``resource-updated`` events to the session when the resource changes, until the session closes.

        A repeated call has no further effect.

        :raises ToolError: ``unavailable`` if the source does not report changes; ``limit`` if the session has too
            many subscriptions
        """

    async def unsubscribe(self, uri: str) -> bool:
        """End a subscription and return whether there was one."""
        ...
