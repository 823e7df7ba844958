"""Resumable HTTP streams: recent events are kept, so that a client whose connection broke continues where it was."""

from __future__ import annotations

import secrets
from collections import OrderedDict, deque

from mcp.server.streamable_http import EventCallback, EventMessage, EventStore
from mcp_types import JSONRPCMessage

MOST_EVENTS = 10_000
MOST_OF_A_STREAM = 1_000
MOST_BYTES = 32 * 1024 * 1024
_NO_MESSAGE = 64
"""Bytes that an event without a message is taken for."""


class Replay(EventStore):
    """The last events of all streams, within bounds; the oldest are forgotten first.

    An event's id cannot be guessed: it is all that it takes to have what came after it.
    """

    def __init__(self) -> None:
        self._events: OrderedDict[str, tuple[str, JSONRPCMessage | None, int]] = OrderedDict()
        self._streams: dict[str, deque[str]] = {}
        self._bytes = 0

    async def store_event(self, stream_id: str, message: JSONRPCMessage | None) -> str:
        event_id = secrets.token_urlsafe(12)
        size = _NO_MESSAGE if message is None else len(message.model_dump_json())
        self._events[event_id] = (stream_id, message, size)
        stream = self._streams.setdefault(stream_id, deque())
        stream.append(event_id)
        self._bytes += size
        if len(stream) > MOST_OF_A_STREAM:
            self._forget(stream[0])
        while self._events and (len(self._events) > MOST_EVENTS or self._bytes > MOST_BYTES):
            self._forget(next(iter(self._events)))
        return event_id

    def _forget(self, event_id: str) -> None:
        stream_id, _, size = self._events.pop(event_id)
        self._bytes -= size
        stream = self._streams[stream_id]
        stream.remove(event_id)
        if not stream:
            del self._streams[stream_id]

    async def replay_events_after(self, last_event_id: str, send_callback: EventCallback) -> str | None:
        known = self._events.get(last_event_id)
        if known is None:
            return None
        stream_id = known[0]
        passed = False
        for event_id in tuple(self._streams[stream_id]):
            if passed and (event := self._events.get(event_id)) is not None and event[1] is not None:
                await send_callback(EventMessage(event[1], event_id))
            passed = passed or event_id == last_event_id
        return stream_id
