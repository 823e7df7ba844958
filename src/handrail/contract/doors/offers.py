"""Resources and prompts, which a source may offer beside tools. Their shapes are MCP's.

Reading and getting go through the arbiter like every call (``resource.read``, ``prompt.get``, …), under the same rules; an
offering only carries them out.

Source: https://modelcontextprotocol.io/specification/2025-11-25/server
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast, runtime_checkable

if TYPE_CHECKING:
    from handrail.contract.doors.runtime import Runtime


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


@runtime_checkable
class Stamped(Protocol):
    """An offering that does not tell of changes by itself, and is looked at: when sources are looked through, and now and
    then as long as somebody wants to hear of it."""

    def stamp(self, uri: str) -> str:
        """Another text when what is read there is other. Called in a thread."""
        ...

    def glance(self, uri: str) -> str:
        """Another text when it may be worth a look, at little cost; empty where only a new look through sources tells.
        Called in a thread."""
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


def offered(offerings: Sequence[Offering], request: SourceRequest, named: object) -> tuple[Offering, str] | None:
    """The first of ``offerings`` that has what is named, and what it calls it: the operator's own before others, and of
    others who lists a URI before whose template makes it.

    :param named: a URI, a prompt's name, or MCP's reference to either
    """
    kind, name = request.argument, named
    if kind == "ref":
        ref: Mapping[str, Any] = cast("Mapping[str, Any]", named) if isinstance(named, Mapping) else {}
        kind = "uri" if ref.get("type") == "ref/resource" else "name"
        name = ref.get(kind)
    if not isinstance(name, str):
        return None
    ordered = sorted(offerings, key=lambda one: one.foreign)
    if name.startswith(AT_SOURCE):
        source, colon, rest = name[len(AT_SOURCE) :].partition(":")
        for one in ordered:
            if colon and one.foreign and one.source == source and _has(one, kind, rest, request):
                return one, rest
    found = [one for one in ordered if _has(one, kind, name, request)]
    if len(found) > 1 and found[0].foreign and kind == "uri":  # a template may make what another lists
        found.sort(key=lambda one: not any(spec.uri == name for spec in one.resources))
    return (found[0], name) if found else None


def _has(offering: Offering, kind: str, name: str, request: SourceRequest) -> bool:
    if kind == "name":
        return any(prompt.name == name for prompt in offering.prompts)
    if request.argument == "ref" and any(one.uri_template == name for one in offering.templates):
        return True
    return offering.has(name)


@dataclass(frozen=True, slots=True)
class Given:
    """What a source gave, as MCP writes it.

    :param source: whose it is, where that is not the operator's own
    """

    data: Mapping[str, Any]
    source: str = ""


class Offers(Protocol):
    """What a built-in tool sees of all sources' offerings: ``runtime.offers``. It reaches what its call was judged for."""

    def all(self) -> Sequence[Offering]:
        """Those of the generation that the call is at, for what they list."""
        ...

    async def read(self, uri: str) -> Given:
        """See :meth:`Offering.read`.

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
