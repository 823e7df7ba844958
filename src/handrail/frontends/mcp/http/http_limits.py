"""Limits on HTTP connections, requests and sessions, so that no client excludes others or is mistaken for another.

uvicorn waits forever for the rest of a request, and answers no request when too many connections are open. The SDK opens no
session when too many exist. Here slow or idle ones make room. An ambiguous request, which two parsers could read in two ways,
is rejected before any other code sees it.
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

from handrail.frontends.mcp.client_manager import CONNECTION_KEY, get_request_principal

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send


HEAD_TIMEOUT_S = 10.0
"""Seconds for the request line and header fields, and for the wait until a request begins."""
BODY_TIMEOUT_S = 60.0
"""Seconds for the body: enough for the longest message at 80 KiB per second."""
DROP_TIMEOUT_S = 2.0
"""Seconds in which a client may still send its body after its answer. An immediate close could lose the answer."""
MAX_DROPPED_BYTES = 16 * 1024 * 1024
MAX_CONNECTIONS = 2_000
BACKLOG = 1_024
"""The maximum number of connections that the operating system keeps until the event loop accepts them."""

_SINGLE_VALUE_FIELDS = frozenset(
    (
        *(b"authorization", b"content-encoding", b"content-length", b"content-type", b"expect", b"last-event-id"),
        *(b"mcp-method", b"mcp-name", b"mcp-protocol-version", b"mcp-session-id", b"transfer-encoding", b"upgrade"),
    )
)
"""Header fields with a single value. An equal repetition is ignored, a different one is rejected."""
_SINGLE_FIELDS = frozenset((b"host", b"origin"))
_CHECKED_FIELDS = _SINGLE_VALUE_FIELDS | _SINGLE_FIELDS
_OPTIONAL_FIELDS = frozenset((b"accept", b"mcp-protocol-version", b"mcp-session-id"))
"""Header fields that count as absent if they are empty."""
_MENDED_FIELDS = frozenset((b"accept", b"content-type"))
_JSON_TYPE = re.compile(rb"(?i)\s*application/(?:[\w.-]+\+)?json(?:-?rpc)?\s*(?:;|\Z)")
_FOLDED = re.compile(rb"\n[ \t]")
_END_OF_HEAD = re.compile(rb"\n\r?\n")


def find_request_ambiguity(scope: Scope) -> str | None:
    """Return the reason why a request is ambiguous, or None."""
    if not scope["path"].startswith("/"):
        return "Its target is not a path. Expected a path that begins with /."
    found: dict[bytes, bytes] = {}
    for name, value in scope["headers"]:
        if name not in _CHECKED_FIELDS:
            if (alike := name.replace(b"_", b"-")) in _CHECKED_FIELDS:
                expected = alike.decode("latin-1")
                return f"Its header field {name.decode('latin-1')!r} is not allowed. Send {expected!r} instead."
            continue
        before = found.setdefault(name, value)
        if before is not value and (name in _SINGLE_FIELDS or before != value):
            return f"Its header field {name.decode('latin-1')!r} occurs twice. Send it once."
        if name in _SINGLE_FIELDS and not value:
            return f"Its header field {name.decode('latin-1')!r} is empty. Send its value, or leave it out."
    if b"content-length" in found and b"transfer-encoding" in found:
        return "It has both Content-Length and Transfer-Encoding. Send only one of the two."
    return None


def mend_request_headers(scope: Scope) -> list[tuple[bytes, bytes]]:
    """Return the header fields of a request in the form that the SDK reads.

    Empty fields of the protocol count as absent, another spelling of the type of JSON as ``application/json``, and a request that
    names no types of answers accepts all.
    """
    found: dict[bytes, bytes] = {}
    for name, value in scope["headers"]:
        if not (name in _OPTIONAL_FIELDS and not value.strip()):
            found.setdefault(name, value)
    headers = [(name, value) for name, value in scope["headers"] if name in found and name not in _MENDED_FIELDS]
    headers = [(name, value.lower() if name == b"host" else value) for name, value in headers]  # names have no case
    kind = found.get(b"content-type")
    if kind is not None:
        is_json = _JSON_TYPE.match(kind) is not None
        headers.append((b"content-type", b"application/json" if is_json else kind))
    accepted = b", ".join(value for name, value in scope["headers"] if name == b"accept" and value.strip()) or b"*/*"
    if scope["method"] == "POST" and accepted.strip().lower() == b"text/event-stream":
        accepted = b"*/*"
    return [*headers, (b"accept", accepted)]


class AmbiguousRequestFilter:
    """An ASGI middleware that rejects ambiguous requests with 400, and mends odd header fields of the others.

    It closes the connection of a rejected request.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (fault := find_request_ambiguity(scope)) is not None:
            return await reject_http_request(send, 400, f"The request is ambiguous. {fault}")
        if scope["type"] == "http":
            scope = {**scope, "headers": mend_request_headers(scope)}
        return await self._app(scope, receive, send)


async def reject_http_request(send: Send, status: int, text: str, receive: Receive | None = None) -> None:
    """Answer a request with a JSON-RPC error, and close its connection.

    :param receive: the receiver of the rest of the body, which is discarded, within bounds, before the close
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


async def send_json_response(send: Send, status: int, value: object) -> None:
    """Answer a request with JSON, or without a body if ``value`` is None. The connection stays open."""
    body = b"" if value is None else orjson.dumps(value)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _drop_body(receive: Receive) -> None:
    left = MAX_DROPPED_BYTES
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DROP_TIMEOUT_S):
            while left > 0:
                message = await receive()
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return
                left -= len(message.get("body", b""))


class _StrictHttpParser(h11.Connection):
    """An HTTP parser that rejects folded header fields, which parsers join in different ways."""

    def next_event(self) -> Any:
        if self.their_state is h11.IDLE:
            head, _ = self.trailing_data
            end = _END_OF_HEAD.search(head)
            if _FOLDED.search(head, 0, len(head) if end is None else end.start() + 1) is not None:
                raise h11.RemoteProtocolError("A header field continues on a further line.")
        return super().next_event()


class TimedHttpConnection(H11Protocol):
    """One connection, which is closed if a request is not complete in time.

    If too many connections are open, those are closed that have waited longest for a request or the rest of one, else the newest ones.
    """

    most = MAX_CONNECTIONS
    most_at_once = BACKLOG
    """The maximum number of connections that one step of the event loop accepts."""
    ended: Callable[[object], object] = staticmethod(bool)
    """Called with each connection that has ended."""
    _awaited: type[h11.Request | h11.EndOfMessage] | None = None
    _timer: asyncio.TimerHandle | None = None
    _awaited_since = 0.0
    _is_making_room = False

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.conn = _StrictHttpParser(h11.SERVER)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {**self.app_state, CONNECTION_KEY: self}
        self.began = self.loop.time()
        self._await_next()
        if len(self.connections) > self.most and not self._is_making_room:
            type(self)._is_making_room = True
            self.loop.call_soon(self._make_room)

    def _make_room(self) -> None:
        """Close as many connections as there are too many. A client can open hundreds before this runs."""
        type(self)._is_making_room = False
        found = [one for one in self.connections if isinstance(one, TimedHttpConnection)]
        found = [one for one in found if not one.transport.is_closing()]
        waiting = sorted((one for one in found if one.is_waiting), key=lambda one: one._awaited_since)
        newest = sorted((one for one in found if not one.is_waiting), key=lambda one: -one.began)
        for one in [*waiting, *newest][: max(len(found) - self.most, 0)]:
            one.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)
        self.ended(self)

    @property
    def is_waiting(self) -> bool:
        """Whether the connection waits for its client: for a request, or for the rest of one."""
        return self._awaited is not None

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._await_next()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_next()

    def _await_next(self) -> None:
        """Start the timer for the next expected part, unless it already runs for that part."""
        state = self.conn.their_state
        awaited = h11.Request if state is h11.IDLE else h11.EndOfMessage if state is h11.SEND_BODY else None
        if awaited is not self._awaited or self._timer is None:
            self._stop_timer()
            self._awaited = awaited
            self._awaited_since = self.loop.time()
            if awaited is not None and not self.transport.is_closing():
                after = HEAD_TIMEOUT_S if awaited is h11.Request else BODY_TIMEOUT_S
                self._timer = self.loop.call_later(after, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def make_bounded_connection_class(most: int, ended: Callable[[object], object]) -> type[TimedHttpConnection]:
    """Return the connection class for at most ``most`` connections, and half of the process's file limit.

    A connection that is too many is closed five steps of the event loop after it was accepted. So a step accepts a sixteenth of
    the limit, and an eighth of the limit stays free for other files.

    :param ended: called when a connection has ended
    """
    at_once = BACKLOG
    with contextlib.suppress(ImportError, OSError):
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY:
            most, at_once = max(16, min(most, soft // 2)), max(8, min(at_once, soft // 16))
    bounds = {"most": most, "most_at_once": at_once, "ended": staticmethod(ended)}
    return type("BoundedConnection", (TimedHttpConnection,), bounds)


class CredentialConcurrencyLimiter:
    """An ASGI middleware that limits the concurrent requests of one credential."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app = app
        self._most = most
        self._in_flight = Counter[object]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (who := get_request_principal()) is None:
            return await self._app(scope, receive, send)
        if self._in_flight[who] >= self._most:
            limit = f"The limit is {self._most:,}. Wait until some have ended, or close streams."
            text = f"Too many concurrent requests of this credential. {limit}"
            return await reject_http_request(send, 429, text)
        self._in_flight[who] += 1
        try:
            return await self._app(scope, receive, send)
        finally:
            self._in_flight[who] -= 1
            if not self._in_flight[who]:
                del self._in_flight[who]


class BoundedHttpSessionManager(StreamableHTTPSessionManager):
    """The session manager of the handshake versions, which makes room for new sessions.

    The least used session makes room, and no owner displaces the sessions of others.

    :param most: maximum number of sessions
    :param most_of_one: maximum number of sessions of one credential
    :param at_work: returns whether the session with an ID has a running call
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
            if (leaving := self._choose_evicted_session(crowded)) is None:
                return None
            self._end(leaving)
        made = super()._admit_session(requestor)
        if made is not None and made.mcp_session_id is not None:
            self._used[made.mcp_session_id] = time.monotonic()
        return made

    def _choose_evicted_session(self, crowded: list[str]) -> str | None:
        """Return the session that makes room: one that was only opened, else the longest unused one."""

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
