"""A call's access to resources and prompts of sources: only to the one that it was authorised for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from handrail.arbiter.session_subscriptions import SessionResourceSubscriptions
from handrail.contract.calls_and_results import Event
from handrail.contract.errors import ToolError
from handrail.contract.services.resource_services import SourceRequestSpec, SourceResponse
from handrail.contract.services.tool_runtime import Runtime
from handrail.contract.text.neutralisation import escape_terminal_controls
from handrail.contract.tool.resource_provider import ResourceProvider, find_resource_provider
from handrail.contract.tool.spec import ToolSpec
from handrail.contract.tool_generation import Generation, ToolEntry

if TYPE_CHECKING:
    from handrail.arbiter.call_state import Call, Lane

_MOST_NAMED = 5
_MOST_KEPT = 64
_read: dict[int, tuple[ToolSpec, ToolSpec]] = {}
"""Cached results of :func:`make_read_only_spec`, by the identity of the spec."""


def resolve_evaluated_target(
    entry: ToolEntry, arguments: Mapping[str, Any], generation: Generation
) -> tuple[ToolSpec, str | None, tuple[ResourceProvider, str] | None]:
    """Return what a call is evaluated as: the spec, the origin that rules name, and the source with the requested item.

    A step of an unknown tool session does nothing. The operator's own resources are only read. A request to an MCP server is
    evaluated under ``mcp:SERVER:METHOD``.
    """
    request = entry.tool.source_request
    if entry.tool.state_arguments is not None:
        return make_read_only_spec(entry.spec), None, None
    if request is None:
        return entry.spec, entry.tool.origin, None
    found = find_resource_provider(generation.resource_providers, request, arguments.get(request.argument))
    if found is None or not found[0].is_third_party:
        return make_read_only_spec(entry.spec), None, found
    return entry.spec, f"mcp:{found[0].source}:{request.method}", found


def make_read_only_spec(spec: ToolSpec) -> ToolSpec:
    """Return ``spec`` as that of a tool that only reads.

    The same spec gives the same object, since prepared data is cached by identity.
    """
    if spec.side_effect == "read":
        return spec
    if (kept := _read.get(id(spec))) is None:
        if len(_read) >= _MOST_KEPT:
            _read.clear()
        kept = _read[id(spec)] = (spec, replace(spec, side_effect="read"))
    return kept[1]


class CallResourceAccess:
    """The resources and prompts of sources for one call (:class:`~handrail.contract.services.resource_services.ResourceService`)."""

    __slots__ = ("_call", "_runtime")

    def __init__(self, call: Call, runtime: Runtime) -> None:
        self._call = call
        self._runtime = runtime

    async def list_sources(self) -> Sequence[ResourceProvider]:
        return self._call.generation.resource_providers

    async def read(self, uri: str) -> SourceResponse:
        offering, named = self._check_authorised(uri)
        return _parse_answer(offering, await offering.read(named, self._runtime), "contents")

    async def get_prompt(self, name: str, arguments: Mapping[str, str]) -> SourceResponse:
        offering, named = self._check_authorised(name)
        return _parse_answer(offering, await offering.get_prompt(named, arguments, self._runtime), "messages")

    async def complete(
        self, ref: Mapping[str, Any], argument: Mapping[str, str], context: Mapping[str, str]
    ) -> SourceResponse:
        offering, named = self._check_authorised(ref)
        key = "uri" if ref.get("type") == "ref/resource" else "name"
        response = await offering.complete({**ref, key: named}, argument, context, self._runtime)
        return _parse_answer(offering, response, "values")

    async def subscribe(self, uri: str) -> None:
        offering, named = self._check_authorised(uri)
        lane = self._call.lane
        if lane.closed_reason is not None:
            raise ToolError(
                "The session is closing, so it accepts no more subscriptions. Subscribe in another session.",
                kind="cancelled",
            )
        if lane.subscriptions is None:
            lane.subscriptions = SessionResourceSubscriptions(
                lambda changed: emit_session_event(lane, "resource-updated", {"uri": changed})
            )
        await lane.subscriptions.subscribe_resource(uri, offering, named)

    async def unsubscribe(self, uri: str) -> bool:
        subscribed = self._call.lane.subscriptions
        return subscribed is not None and await subscribed.unsubscribe_resource(uri)

    def _check_authorised(self, named: object) -> tuple[ResourceProvider, str]:
        """Return the source and the item that the call was authorised for.

        :raises ToolError: ``denied`` if the call was authorised for another item; ``invalid_input`` if the item does not exist
        """
        call = self._call
        assert call.entry is not None and call.arguments is not None
        request = call.entry.tool.source_request
        if request is None or call.arguments.get(request.argument) != named:
            raise ToolError(
                f"`{call.tool_id}` is not authorised for `{escape_terminal_controls(str(named)[:200])}`. A tool reads resources and prompts through "
                'runtime.call, as in runtime.call("resource.read", {"uri": …}), so that rules apply.',
                kind="denied",
            )
        if call.requested_source is None:
            raise ToolError(_unknown_text(request, named, call.generation.resource_providers), kind="invalid_input")
        return call.requested_source


def emit_session_event(lane: Lane, kind: Any, data: Mapping[str, Any]) -> None:
    """Send an event that belongs to no call to the session's listeners."""
    if lane.listeners:
        event = Event(kind, lane.session_id, "", "", time.time_ns(), data)
        for listener in tuple(lane.listeners):
            try:
                listener(event)
            except Exception as error:  # a listener must not stop other listeners
                about = f"a listener to the events of session {lane.session_id} failed at {kind!r}"
                asyncio.get_running_loop().call_exception_handler({"message": about, "exception": error})


def _parse_answer(offering: ResourceProvider, response: object, member: str) -> SourceResponse:
    """Return a validated answer of a source.

    :raises ToolError: ``backend`` if the answer is invalid
    """
    data: Mapping[str, Any] = cast("Mapping[str, Any]", response) if isinstance(response, Mapping) else {}
    if not isinstance(data.get(member), list):
        named = f"Source `{offering.source}`" if offering.source else "The source"
        raise ToolError(
            f"{named} returned an invalid answer: expected a list `{member}`. Continue without it.", kind="backend"
        )
    return SourceResponse(data, offering.source if offering.is_third_party else "")


def _unknown_text(request: SourceRequestSpec, named: object, offerings: Sequence[ResourceProvider]) -> str:
    if request.argument == "uri":
        there = [one.uri for offering in offerings for one in offering.resources]
        what, lists = "Resource", "resource.list"
    else:
        there = [one.name for offering in offerings for one in offering.prompts]
        what, lists = "Prompt", "prompt.list"
    if isinstance(named, Mapping):  # a reference of a completion
        reference = cast("Mapping[str, object]", named)
        named = reference.get("name") or reference.get("uri") or ""
    text = f"{what} `{escape_terminal_controls(str(named)[:200])}` does not exist."
    if not there:
        return f"{text} This session has no {what.lower()}s."
    more = f" and {len(there) - _MOST_NAMED} more; list them with {lists}" if len(there) > _MOST_NAMED else ""
    return f"{text} Available: {', '.join(there[:_MOST_NAMED])}{more}."
