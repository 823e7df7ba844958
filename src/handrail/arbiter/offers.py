"""A call's access to resources and prompts of sources: only to the one that it was authorised for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from handrail.arbiter.subscriptions import Subscriptions
from handrail.contract.call import Event
from handrail.contract.doors.offers import Given, SourceRequest
from handrail.contract.doors.runtime import Runtime
from handrail.contract.errors import ToolError
from handrail.contract.generation import Entry, Generation
from handrail.contract.text.neutral import visible
from handrail.contract.tool.offering import Offering, offered
from handrail.contract.tool.spec import ToolSpec

if TYPE_CHECKING:
    from handrail.arbiter.call import Call, Lane

_MOST_NAMED = 5
_MOST_KEPT = 64
_read: dict[int, tuple[ToolSpec, ToolSpec]] = {}
"""Cached results of :func:`reading`, by the identity of the spec."""


def judged_as(
    entry: Entry, arguments: Mapping[str, Any], generation: Generation
) -> tuple[ToolSpec, str | None, tuple[Offering, str] | None]:
    """Return what a call is evaluated as: the spec, the origin that rules name, and the source with the requested item.

    A step of an unknown tool session does nothing. The operator's own resources are only read. A request to an MCP server is
    evaluated under ``mcp:SERVER:METHOD``.
    """
    request = entry.tool.asks_source
    if entry.tool.goes_on is not None:
        return reading(entry.spec), None, None
    if request is None:
        return entry.spec, entry.tool.origin, None
    found = offered(generation.offerings, request, arguments.get(request.argument))
    if found is None or not found[0].foreign:
        return reading(entry.spec), None, found
    return entry.spec, f"mcp:{found[0].source}:{request.method}", found


def reading(spec: ToolSpec) -> ToolSpec:
    """Return ``spec`` as that of a tool that only reads.

    The same spec gives the same object, since prepared data is cached by identity.
    """
    if spec.side_effect == "read":
        return spec
    kept = _read.get(id(spec))
    if kept is None:
        if len(_read) >= _MOST_KEPT:
            _read.clear()
        kept = _read[id(spec)] = (spec, replace(spec, side_effect="read"))
    return kept[1]


class CallOffers:
    """The resources and prompts of sources for one call (:class:`~handrail.contract.doors.offers.Offers`)."""

    __slots__ = ("_call", "_runtime")

    def __init__(self, call: Call, runtime: Runtime) -> None:
        self._call = call
        self._runtime = runtime

    async def all(self) -> Sequence[Offering]:
        return self._call.generation.offerings

    async def read(self, uri: str) -> Given:
        offering, named = self._judged(uri)
        return _given(offering, await offering.read(named, self._runtime), "contents")

    async def prompt(self, name: str, arguments: Mapping[str, str]) -> Given:
        offering, named = self._judged(name)
        return _given(offering, await offering.prompt(named, arguments, self._runtime), "messages")

    async def complete(self, ref: Mapping[str, Any], argument: Mapping[str, str], context: Mapping[str, str]) -> Given:
        offering, named = self._judged(ref)
        key = "uri" if ref.get("type") == "ref/resource" else "name"
        told = await offering.complete({**ref, key: named}, argument, context, self._runtime)
        return _given(offering, told, "values")

    async def subscribe(self, uri: str) -> None:
        offering, named = self._judged(uri)
        lane = self._call.lane
        if lane.closed is not None:
            raise ToolError("The session is closing, so it takes no more subscriptions.", kind="cancelled")
        if lane.subscribed is None:
            lane.subscribed = Subscriptions(lambda changed: tell(lane, "resource-updated", {"uri": changed}))
        await lane.subscribed.add(uri, offering, named)

    async def unsubscribe(self, uri: str) -> bool:
        subscribed = self._call.lane.subscribed
        return subscribed is not None and await subscribed.remove(uri)

    def _judged(self, named: object) -> tuple[Offering, str]:
        """Return the source and the item that the call was authorised for.

        :raises ToolError: ``denied`` if the call was authorised for another item; ``invalid_input`` if the item does not exist
        """
        call = self._call
        assert call.entry is not None and call.arguments is not None
        request = call.entry.tool.asks_source
        if request is None or call.arguments.get(request.argument) != named:
            raise ToolError(
                f"`{call.tool_id}` is not authorised for `{visible(str(named)[:200])}`. A tool reads resources and prompts through "
                'runtime.call, as in runtime.call("resource.read", {"uri": …}), so that rules apply.',
                kind="denied",
            )
        if call.at_source is None:
            raise ToolError(_unknown(request, named, call.generation.offerings), kind="invalid_input")
        return call.at_source


def tell(lane: Lane, kind: Any, data: Mapping[str, Any]) -> None:
    """Send an event that belongs to no call to the session's listeners."""
    if lane.listeners:
        event = Event(kind, lane.session_id, "", "", time.time_ns(), data)
        for listener in tuple(lane.listeners):
            try:
                listener(event)
            except Exception as error:  # a listener must not stop other listeners
                about = f"a listener to the events of session {lane.session_id} failed at {kind!r}"
                asyncio.get_running_loop().call_exception_handler({"message": about, "exception": error})


def _given(offering: Offering, told: object, member: str) -> Given:
    """Return a validated answer of a source.

    :raises ToolError: ``backend`` if the answer is invalid
    """
    data: Mapping[str, Any] = cast("Mapping[str, Any]", told) if isinstance(told, Mapping) else {}
    if not isinstance(data.get(member), list):
        named = f"Source `{offering.source}`" if offering.source else "The source"
        raise ToolError(
            f"{named} returned an invalid answer: expected a list `{member}`. Continue without it.", kind="backend"
        )
    return Given(data, offering.source if offering.foreign else "")


def _unknown(request: SourceRequest, named: object, offerings: Sequence[Offering]) -> str:
    if request.argument == "uri":
        there = [one.uri for offering in offerings for one in offering.resources]
        what, lists = "Resource", "resource.list"
    else:
        there = [one.name for offering in offerings for one in offering.prompts]
        what, lists = "Prompt", "prompt.list"
    text = f"{what} `{visible(str(named)[:200])}` does not exist."
    if not there:
        return f"{text} This session has no {what.lower()}s."
    more = f" and {len(there) - _MOST_NAMED} more; list them with {lists}" if len(there) > _MOST_NAMED else ""
    return f"{text} Available: {', '.join(there[:_MOST_NAMED])}{more}."
