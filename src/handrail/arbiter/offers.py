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
from handrail.contract.tool.offering import Offering, offered
from handrail.contract.tool.spec import ToolSpec

if TYPE_CHECKING:
    from handrail.arbiter.call import Call, Lane

_MOST_NAMED = 5
_MOST_KEPT = 64
_read: dict[int, tuple[ToolSpec, ToolSpec]] = {}
"""By the identity of a spec: the spec, and the same for what only reads."""


def judged_as(
    entry: Entry, arguments: Mapping[str, Any], generation: Generation
) -> tuple[ToolSpec, str | None, tuple[Offering, str] | None]:
    """As what a call is judged: the tool's spec, by whose rules, and what it is about where it asks a source for something.

    What is to go on with a state that there is not does nothing. The operator's own is only read. What a server gives is a request to that server, which rules name by
    ``mcp:SERVER:METHOD``.
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
    """``spec`` as that of a tool that only reads: the same object for the same spec, since what is prepared of it is kept by that."""
    if spec.side_effect == "read":
        return spec
    kept = _read.get(id(spec))
    if kept is None:
        if len(_read) >= _MOST_KEPT:
            _read.clear()
        kept = _read[id(spec)] = (spec, replace(spec, side_effect="read"))
    return kept[1]


class CallOffers:
    """Implements :class:`~handrail.contract.doors.offers.Offers` for one call."""

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
            raise ToolError("the session ends", kind="cancelled")
        if lane.subscribed is None:
            lane.subscribed = Subscriptions(lambda changed: tell(lane, "resource-updated", {"uri": changed}))
        await lane.subscribed.add(uri, offering, named)

    async def unsubscribe(self, uri: str) -> bool:
        subscribed = self._call.lane.subscribed
        return subscribed is not None and await subscribed.remove(uri)

    def _judged(self, named: object) -> tuple[Offering, str]:
        """
        :raises ToolError: ``denied`` for what this call was not judged for; ``invalid_input`` for what there is not
        """
        call = self._call
        assert call.entry is not None and call.arguments is not None
        request = call.entry.tool.asks_source
        if request is None or call.arguments.get(request.argument) != named:
            raise ToolError(
                f"{call.tool_id} was not judged for this; a tool gets what a source offers by runtime.call, as in "
                'runtime.call("resource.read", {"uri": …}), which rules speak of',
                kind="denied",
            )
        if call.at_source is None:
            raise ToolError(_unknown(request, named, call.generation.offerings), kind="invalid_input")
        return call.at_source


def tell(lane: Lane, kind: Any, data: Mapping[str, Any]) -> None:
    """Tell whoever watches a session of what is no call's."""
    if lane.listeners:
        event = Event(kind, lane.session_id, "", "", time.time_ns(), data)
        for listener in tuple(lane.listeners):
            try:
                listener(event)
            except Exception as error:  # whoever watches has no say in what happens
                about = f"a listener to the events of session {lane.session_id} failed at {kind!r}"
                asyncio.get_running_loop().call_exception_handler({"message": about, "exception": error})


def _given(offering: Offering, told: object, member: str) -> Given:
    """
    :raises ToolError: ``backend`` for what is no such result
    """
    data: Mapping[str, Any] = cast("Mapping[str, Any]", told) if isinstance(told, Mapping) else {}
    if not isinstance(data.get(member), list):
        raise ToolError(f"{offering.source or 'the source'} gave no {member}", kind="backend")
    return Given(data, offering.source if offering.foreign else "")


def _unknown(request: SourceRequest, named: object, offerings: Sequence[Offering]) -> str:
    if request.argument == "uri":
        there = [one.uri for offering in offerings for one in offering.resources]
        what, lists = "resource", "resource.list"
    else:
        there = [one.name for offering in offerings for one in offering.prompts]
        what, lists = "prompt", "prompt.list"
    shown = ", ".join(there[:_MOST_NAMED]) or "none"
    more = f" and {len(there) - _MOST_NAMED} more, which {lists} lists" if len(there) > _MOST_NAMED else ""
    return f"there is no {what} {str(named)[:200]!r}; there are {shown}{more}"
