"""Limits on HTTP connections, requests and sessions, so that no client excludes others or is mistaken for another.

uvicorn waits forever for a request that was begun, and answers no request once enough connections are open; the SDK opens no
session once enough are. Here slow or idle ones make room, and a request that two readers could read in two ways is refused
before any other code sees it.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import h11
import orjson
from mcp.server.auth.middleware.bearer_auth import AuthorizationContext
from mcp.server.streamable_http import MCP_SESSION_ID_HEADER, StreamableHTTPServerTransport
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from uvicorn.protocols.http.h11_impl import H11Protocol

from handrail.frontends.mcp.clients import CONNECTION, principal

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send


HEAD_S = 10.0
"""How long a request's first line and header fields may take, also of one that has not begun."""
BODY_S = 60.0
"""How long its body may take: enough for the longest message at 80 KiB a second."""
DROPPED_S = 2.0
"""How long a client that was answered may still send its body: closing at once would lose the answer on its way."""
MOST_DROPPED_BYTES = 16 * 1024 * 1024
MOST_CONNECTIONS = 2_000

_ONCE = frozenset(
    (
        *(b"authorization", b"content-encoding", b"content-length", b"content-type", b"expect", b"last-event-id"),
        *(b"mcp-method", b"mcp-name", b"mcp-protocol-version", b"mcp-session-id", b"transfer-encoding", b"upgrade"),
    )
)
"""Header fields of which there is one value. A repetition of the same is none; another is refused."""
_NEVER_TWICE = frozenset((b"host", b"origin"))
_NAMED = _ONCE | _NEVER_TWICE
_FOLDED = re.compile(rb"\n[ \t]")
_END_OF_HEAD = re.compile(rb"\n\r?\n")


def fault_in(scope: Scope) -> str | None:
    """Return what in a request two readers could take for two things, or None."""
    if not scope["path"].startswith("/"):
        return "its target is no path; expected one that begins with /"
    found: dict[bytes, bytes] = {}
    for name, value in scope["headers"]:
        if name not in _NAMED:
            if (alike := name.replace(b"_", b"-")) in _NAMED:
                return f"it has a header field {name.decode('latin-1')!r}; write {alike.decode('latin-1')!r}"
            continue
        before = found.setdefault(name, value)
        if before is not value and (name in _NEVER_TWICE or before != value):
            return f"it has the header field {name.decode('latin-1')!r} twice; send it once"
    if b"content-length" in found and b"transfer-encoding" in found:
        return "it has both Content-Length and Transfer-Encoding; send one of the two"
    return None


class OneMeaning:
    """Answers a request that has two meanings with 400, and reads no more from its connection."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (fault := fault_in(scope)) is not None:
            return await refused(send, 400, f"the request was refused: {fault}")
        return await self._app(scope, receive, send)


async def refused(send: Send, status: int, text: str, receive: Receive | None = None) -> None:
    """Answer a request with an error of JSON-RPC, and close its connection.

    :param receive: gives the rest of the body, which is dropped before the connection is closed, within bounds
    """
    error: dict[str, Any] = {"jsonrpc": "2.0", "id": None, "error": {"code": -32600, "message": text}}
    body = orjson.dumps(error)
    length = b"%d" % len(body)
    headers = [(b"content-type", b"application/json"), (b"content-length", length), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": receive is not None})
    if receive is not None:
        await _drop_body(receive)
        await send({"type": "http.response.body", "body": b""})


async def _drop_body(receive: Receive) -> None:
    left = MOST_DROPPED_BYTES
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DROPPED_S):
            while left > 0:
                message = await receive()
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return
                left -= len(message.get("body", b""))


class _OneReading(h11.Connection):
    """Refuses a header field that goes on in a further line, which readers join in several ways."""

    def next_event(self) -> Any:
        if self.their_state is h11.IDLE:
            head, _ = self.trailing_data
            end = _END_OF_HEAD.search(head)
            if _FOLDED.search(head, 0, len(head) if end is None else end.start() + 1) is not None:
                raise h11.RemoteProtocolError("a header field goes on in another line")
        return super().next_event()


class Connection(H11Protocol):
    """One connection, which is closed where a request does not come to its end in time.

    Where there are too many, the one goes that has waited longest for its request; where none waits, the new one.
    """

    most = MOST_CONNECTIONS
    ended: Callable[[object], object] = staticmethod(bool)
    """Called with a connection that has ended."""
    _awaited: type[h11.Request | h11.EndOfMessage] | None = None
    _timer: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.conn = _OneReading(h11.SERVER)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {**self.app_state, CONNECTION: self}
        self.began = self.loop.time()
        self._await()
        if len(self.connections) > self.most:
            waiting = (one for one in self.connections if isinstance(one, Connection) and one.waits)
            min(waiting, key=lambda one: one.began, default=self).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)
        self.ended(self)

    @property
    def waits(self) -> bool:
        """Whether no request is on its way here, or being answered."""
        return self._awaited is h11.Request

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._await()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await()

    def _await(self) -> None:
        """Begin to wait for what has to come next, unless it is that already."""
        state = self.conn.their_state
        awaited = h11.Request if state is h11.IDLE else h11.EndOfMessage if state is h11.SEND_BODY else None
        if awaited is not self._awaited or self._timer is None:
            self._stop_timer()
            self._awaited = awaited
            if awaited is not None and not self.transport.is_closing():
                after = HEAD_S if awaited is h11.Request else BODY_S
                self._timer = self.loop.call_later(after, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def connections_within(most: int, ended: Callable[[object], object]) -> type[Connection]:
    """The protocol for at most so many connections, and half of the files that this process may open.

    :param ended: called when a connection has ended
    """
    with contextlib.suppress(ImportError, OSError):
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = most if soft == resource.RLIM_INFINITY else max(16, min(most, soft // 2))
    return type("BoundedConnection", (Connection,), {"most": most, "ended": staticmethod(ended)})


class RequestsOfOne:
    """Bounds how many requests of one credential are answered at once, so that it does not take the places of others."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app = app
        self._most = most
        self._in_flight = Counter[object]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (who := principal()) is None:
            return await self._app(scope, receive, send)
        if self._in_flight[who] >= self._most:
            text = f"{self._most:,} requests of this credential are being answered; wait for some of them, or close streams"
            return await refused(send, 429, text)
        self._in_flight[who] += 1
        try:
            return await self._app(scope, receive, send)
        finally:
            self._in_flight[who] -= 1
            if not self._in_flight[who]:
                del self._in_flight[who]


class Sessions(StreamableHTTPSessionManager):
    """The sessions of the older era: the least used makes room for a new one, and no owner takes the places of others.

    :param most: at once
    :param most_of_one: of one credential, where there are credentials
    :param at_work: tells of a session's id whether a call of it is under way
    """

    def __init__(
        self, *args: Any, most: int, most_of_one: int, at_work: Callable[[str], bool], **settings: Any
    ) -> None:
        super().__init__(*args, max_sessions=None, **settings)
        self._most = most
        self._most_of_one = most_of_one
        self._at_work = at_work
        self._in_flight = Counter[str]()
        self._uses = Counter[str]()
        self._used: dict[str, float] = {}

    async def _handle_stateful_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        wanted = MCP_SESSION_ID_HEADER.encode("ascii")
        named = next((value.decode("latin-1") for name, value in scope["headers"] if name == wanted), None)
        if named is None or named not in self._server_instances:
            return await super()._handle_stateful_request(scope, receive, send)
        self._in_flight[named] += 1
        self._uses[named] += 1
        try:
            return await super()._handle_stateful_request(scope, receive, send)
        finally:
            self._in_flight[named] -= 1
            if named in self._server_instances:
                self._used[named] = time.monotonic()
            else:
                self._forget(named)

    def _admit_session(self, requestor: AuthorizationContext | None) -> StreamableHTTPServerTransport | None:
        own = [one for one in self._server_instances if self._session_owners.get(one) == requestor]
        crowded: list[str] | None = None
        if requestor is not None and len(own) >= self._most_of_one:
            crowded = own
        elif len(self._server_instances) >= self._most:
            crowded = list(self._server_instances)
        if crowded is not None:
            if (leaving := self._least_used(crowded)) is None:
                return None
            self._end(leaving)
        made = super()._admit_session(requestor)
        if made is not None and made.mcp_session_id is not None:
            self._used[made.mcp_session_id] = time.monotonic()
        return made

    def _least_used(self, crowded: list[str]) -> str | None:
        """The session that makes room: one that did nothing but begin, before one that was used; the longest unused."""

        def without_work() -> Iterator[str]:
            return (one for one in crowded if not self._in_flight[one] and not self._at_work(one) and one in self._used)

        return min(without_work(), key=lambda one: (self._uses[one] > 1, self._used[one]), default=None)

    def _end(self, session_id: str) -> None:
        transport = self._server_instances.pop(session_id)
        self._session_owners.pop(session_id, None)
        self._forget(session_id)
        assert self._task_group is not None
        self._task_group.start_soon(self._ended, transport)

    def _forget(self, session_id: str) -> None:
        for kept in (self._in_flight, self._uses, self._used):
            kept.pop(session_id, None)

    async def _discard_session(self, session_id: str, transport: StreamableHTTPServerTransport) -> None:
        if not self._in_flight[session_id]:
            self._forget(session_id)
        await super()._discard_session(session_id, transport)

    @staticmethod
    async def _ended(transport: StreamableHTTPServerTransport) -> None:
        await asyncio.shield(transport.terminate())
