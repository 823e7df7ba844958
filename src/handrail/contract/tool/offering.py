"""The resources and prompts of one source, and the search for the source that has a named one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

from handrail.contract.doors.offers import AT_SOURCE, Listing, SourceRequest
from handrail.contract.doors.runtime import Runtime


class Offering(Listing, Protocol):
    """The resources and prompts of one source, and the way to get them.

    The names and URIs that it takes are those that it lists. What it gives are MCP's results as plain data; binary parts
    are :class:`~handrail.contract.call.Blob`.
    """

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


def offered(offerings: Sequence[Offering], request: SourceRequest, named: object) -> tuple[Offering, str] | None:
    """The first of ``offerings`` that has what is named, and what it calls it: the operator's own before others, and of
    others who lists a URI before whose template makes it.

    :param named: a URI, a prompt's name, or MCP's reference to either
    """
    kind, name = _kind_and_name(request, named)
    if not isinstance(name, str):
        return None
    ordered = sorted(offerings, key=lambda one: one.foreign)
    source, colon, rest = name.removeprefix(AT_SOURCE).partition(":")
    if colon and name.startswith(AT_SOURCE):
        for one in ordered:
            if one.foreign and one.source == source and _has(one, kind, rest, request):
                return one, rest
    found = [one for one in ordered if _has(one, kind, name, request)]
    if len(found) > 1 and found[0].foreign and kind == "uri":  # a template may make what another lists
        found.sort(key=lambda one: not _lists(one, name))
    return (found[0], name) if found else None


def _lists(offering: Offering, uri: str) -> bool:
    return any(spec.uri == uri for spec in offering.resources)


def _kind_and_name(request: SourceRequest, named: object) -> tuple[str, object]:
    """Whether a URI or a prompt is named, and how."""
    if request.argument != "ref":
        return request.argument, named
    ref: Mapping[str, Any] = cast("Mapping[str, Any]", named) if isinstance(named, Mapping) else {}
    kind = "uri" if ref.get("type") == "ref/resource" else "name"
    return kind, ref.get(kind)


def _has(offering: Offering, kind: str, name: str, request: SourceRequest) -> bool:
    if kind == "name":
        return any(prompt.name == name for prompt in offering.prompts)
    if request.argument == "ref" and any(one.uri_template == name for one in offering.templates):
        return True
    return offering.has(name)
