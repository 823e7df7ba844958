"""The resources and prompts of one source, and the search for the source that has a named one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

from handrail.contract.services.resource_services import SOURCE_PREFIX, SourceRequestSpec, SourceResources
from handrail.contract.services.tool_runtime import Runtime


class ResourceProvider(SourceResources, Protocol):
    """The resources and prompts of one source, and the methods to get them.

    It accepts the names and URIs that it lists. It returns MCP's results as plain data, with binary parts as
    :class:`~handrail.contract.calls_and_results.Blob`.
    """

    async def read(self, uri: str, runtime: Runtime) -> Mapping[str, Any]:
        """Read a resource.

        :return: ``{"contents": [{"uri", "mimeType", "text" | "blob": Blob}, …]}``
        :raises ToolError: ``invalid_input`` for an unknown URI; ``unavailable``, ``backend``
        """
        ...

    async def get_prompt(self, name: str, arguments: Mapping[str, str], runtime: Runtime) -> Mapping[str, Any]:
        """Return the messages of a prompt.

        :return: ``{"description"?, "messages": [{"role", "content"}, …]}``, with images and sounds as ``Blob`` under
            ``data``
        :raises ToolError: ``invalid_input`` for an unknown name or invalid arguments
        """
        ...

    async def complete(
        self, ref: Mapping[str, Any], argument: Mapping[str, str], context: Mapping[str, str], runtime: Runtime
    ) -> Mapping[str, Any]:
        """Return completions for one argument of a prompt or template, in MCP's form.

        :return: ``{"values": [...], "total"?, "hasMore"?}``
        """
        ...

    async def subscribe(self, uri: str, on_update: Callable[[str], None]) -> Callable[[], Awaitable[None]]:
        """Call ``on_update`` with the URI whenever the resource changes.

        :return: a function that ends the subscription
        :raises ToolError: ``unavailable`` if the source does not report changes
        """
        ...


@runtime_checkable
class PollableResourceProvider(Protocol):
    """A provider that does not report changes itself, so the kernel polls it.

    The kernel polls when it reloads sources, and regularly while a subscription exists.
    """

    def content_stamp(self, uri: str) -> str:
        """Return a text that changes with the content of the resource. Called in a thread."""
        ...

    def quick_stamp(self, uri: str) -> str:
        """Return a cheap text that changes when :meth:`content_stamp` may have changed. Called in a thread.

        It is empty if only a reload of the sources can tell.
        """
        ...


def find_resource_provider(
    offerings: Sequence[ResourceProvider], request: SourceRequestSpec, named: object
) -> tuple[ResourceProvider, str] | None:
    """Find the provider that has the named resource or prompt, and its name for it.

    The operator's own provider comes before third-party ones. Of those, one that lists a URI comes before one whose
    template matches it.

    :param named: a URI, a prompt's name, or MCP's reference to either
    """
    kind, name = _kind_and_name(request, named)
    if not isinstance(name, str):
        return None
    ordered = sorted(offerings, key=lambda one: one.is_third_party)
    source, colon, rest = name.removeprefix(SOURCE_PREFIX).partition(":")
    if colon and name.startswith(SOURCE_PREFIX):
        for one in ordered:
            if one.is_third_party and one.source == source and _has_item(one, kind, rest, request):
                return one, rest
    found = [one for one in ordered if _has_item(one, kind, name, request)]
    if len(found) > 1 and found[0].is_third_party and kind == "uri":  # a template may make what another lists
        found.sort(key=lambda one: not any(spec.uri == name for spec in one.resources))
    return (found[0], name) if found else None


def _kind_and_name(request: SourceRequestSpec, named: object) -> tuple[str, object]:
    """Return whether a URI or a prompt is named, and its text."""
    if request.argument != "ref":
        return request.argument, named
    ref: Mapping[str, Any] = cast("Mapping[str, Any]", named) if isinstance(named, Mapping) else {}
    kind = "uri" if ref.get("type") == "ref/resource" else "name"
    return kind, ref.get(kind)


def _has_item(offering: ResourceProvider, kind: str, name: str, request: SourceRequestSpec) -> bool:
    if kind == "name":
        return any(prompt.name == name for prompt in offering.prompts)
    if request.argument == "ref" and any(one.uri_template == name for one in offering.templates):
        return True
    return offering.has_resource(name)
