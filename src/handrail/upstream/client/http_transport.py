"""The streamable HTTP transport: each request is a separate POST, answered at once or as a stream of events.

A broken stream is resumed if the server said how. Messages on the stream of a request belong to that request. The transport
waits for slow answers; only the caller gives up. Also here: the older HTTP+SSE transport.

Source: https://modelcontextprotocol.io/specification/2025-11-25/basic/transports#streamable-http
"""

from __future__ import annotations

import asyncio
import base64
import codecs
import contextlib
import re
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, cast
from urllib.parse import urljoin

import httpx2

from handrail.contract.network_route import DIRECT_ROUTE, OutboundConnectionSettings
from handrail.contract.text.event_stream_text import EventStreamCleaner
from handrail.contract.text.host_names import parse_http_url
from handrail.contract.tool.requires import CapabilitySet
from handrail.sandbox.network.egress_check import EgressCheck, HostGate
from handrail.upstream.client.checked_http_client import (
    describe_http_error,
    find_same_server_redirect,
    keep_secure_scheme,
    make_checked_http_client,
)
from handrail.upstream.client.json_rpc_messages import (
    Message,
    encode_message,
    is_truncated_rpc_response,
    parse_json_rpc_messages,
)
from handrail.upstream.client.upstream_session import (
    MAX_MESSAGE_BYTES,
    McpTransport,
    ResponseTooLong,
    RpcError,
    TransportCallbacks,
    UpstreamConnectionLost,
    parse_rpc_error,
)
from handrail.upstream.oauth_sign_in import SignInPrompt, SignInRequired, UpstreamSignIn
from handrail.upstream.server_definition import ServerDefinition

_SESSION, _VERSION, _EVENT = "mcp-session-id", "mcp-protocol-version", "last-event-id"
_SAFE_VALUE = re.compile(r"[\x21-\x7E](?:[\x20-\x7E]*[\x21-\x7E])?\Z")
_WRAPPED_VALUE = re.compile(r"=\?base64\?.*\?=\Z")
_ABANDON_S = 5.0
_RECONNECT_S = 1.0
_SHORTEST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 60.0
MAX_STREAM_RESUMES = 5
"""The most attempts in a row to resume a stream that delivers nothing."""
_MAX_ERROR_BYTES = 4096
_SESSION_STATUSES = (400, 409, 412, 422)
_SESSION_CODE = -32001
_CODINGS = ("gzip", "x-gzip", "deflate")
_NO_POST = (400, 404, 405)
"""The statuses with which a server of the older transport refuses the first POST."""
_OLDER_OPEN_S = 5.0
_HASTY_END_S = 5.0
"""A stream for the server's messages that ends sooner, and without an event, is of no use."""


def make_http_transport(
    definition: ServerDefinition,
    capabilities: CapabilitySet,
    gate: HostGate,
    state: Path,
    prompt: SignInPrompt | None = None,
    register_secret: Callable[[str], None] = lambda value: None,
    route: OutboundConnectionSettings = DIRECT_ROUTE,
) -> McpTransport:
    """Return a transport for one connection to a server with a URL.

    :param capabilities: the hosts that Handrail may connect to
    :param gate: checks these hosts against the rules
    :param state: the root folder of all state, which has the tokens
    :param prompt: how a user signs in; None if no user is present
    :param register_secret: called with every token of the sign-in
    :param route: the way to the server
    """
    egress = EgressCheck(capabilities, gate)
    auth = None
    # An operator who sets the header has chosen the credential, and Handrail must not replace it.
    if not any(name.lower() == "authorization" for name in definition.headers):
        auth = UpstreamSignIn(definition, state, prompt, register_secret)
    if definition.transport == "sse":
        return LegacySseTransport(definition, lambda: make_checked_http_client(egress, auth, route))
    return StreamableHttpTransport(definition, lambda: make_checked_http_client(egress, auth, route))


class StreamableHttpTransport:
    """The streamable HTTP transport of one server."""

    def __init__(
        self,
        definition: ServerDefinition,
        client: Callable[[], httpx2.AsyncClient],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """:param sleep: waits a number of seconds before a stream is resumed"""
        self._sleep = sleep
        self._definition = definition
        self._older: LegacySseTransport | None = None
        """The transport of a server that has only the older one."""
        self._url = definition.url
        self._fields = dict(definition.headers)
        self._make = client
        self._client: httpx2.AsyncClient | None = None
        self._ears: TransportCallbacks | None = None
        self._posts: dict[int, asyncio.Task[None]] = {}
        self._listener: asyncio.Task[None] | None = None
        self._session = ""
        self._protocol = ""
        self._modern = False

    async def open(self, handler: TransportCallbacks) -> None:
        self._client, self._ears = self._make(), handler

    async def send(self, message: Message, headers: Mapping[str, str] | None = None) -> None:
        if self._client is None:
            raise UpstreamConnectionLost("the connection was closed", unsent=True)
        if self._older is not None:
            return await self._older.send(message, headers)
        # An answer to a request of the server has an id too, but no method, and nothing answers it.
        number = message.get("id") if "method" in message else None
        if isinstance(number, int):
            task = asyncio.create_task(self._post_request(number, message, headers), name="mcp: a request over HTTP")
            self._posts[number] = task
            task.add_done_callback(lambda _: self._posts.pop(number, None))
            return None
        if self._modern and message.get("method") == "notifications/cancelled":
            return None
        await self._post_notification(message)
        # Without a session, a server has no stream to offer outside of requests.
        if message.get("method") == "notifications/initialized" and self._session:
            self._listener = asyncio.create_task(self._listen_for_server_messages(), name="mcp: listens over HTTP")
        return None

    def abandon_request(self, request: int) -> bool:
        task = self._posts.get(request)
        if task is not None and self._modern:
            task.cancel()  # closing the stream notifies the server
            return True
        if task is not None:
            # An older server hears of the cancellation by a notification. Its stream stays open for a moment, so that
            # it can react.
            asyncio.get_running_loop().call_later(_ABANDON_S, task.cancel)
        return self._modern

    def watch_protected_paths(self) -> AbstractAsyncContextManager[None]:
        return contextlib.nullcontext()  # a remote server cannot write here

    def set_version(self, protocol: str, *, modern: bool) -> None:
        self._protocol, self._modern = protocol, modern
        if self._older is not None:
            self._older.set_version(protocol, modern=modern)

    async def aclose(self) -> None:
        client, self._client = self._client, None
        if self._older is not None:
            await self._older.aclose()
        tasks = [*self._posts.values(), *([self._listener] if self._listener is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if client is None:
            return
        if self._session:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(1):
                    await client.delete(self._url, headers=self._make_request_headers())
        with contextlib.suppress(Exception):
            await client.aclose()

    def _make_request_headers(self, headers: Mapping[str, str] | None = None, accept: str = "") -> dict[str, str]:
        """Return the header fields of a request, without compression, which could grow without limit."""
        found = {
            **self._fields,
            "accept": accept or "application/json, text/event-stream",
            "accept-encoding": "identity",
            "content-type": "application/json",
        }
        if self._session:
            found[_SESSION] = self._session
        if self._protocol:
            found[_VERSION] = self._protocol
        return found | {name: encode_header_value(value) for name, value in (headers or {}).items()}

    async def _post_notification(self, message: Message) -> None:
        """Send a notification or an answer, without its outcome."""
        assert self._client is not None and self._ears is not None
        try:
            async with self._client.stream(
                "POST", self._url, content=encode_message(message), headers=self._make_request_headers()
            ) as response:
                if self._session and response.status_code >= 400:
                    error_body = await _read_error_body(response)
                    if _is_about_ended_session(response.status_code, error_body):
                        self._ears.on_connection_lost(_make_session_error(response.status_code, error_body))
        except (httpx2.HTTPError, SignInRequired) as error:
            raise UpstreamConnectionLost(describe_http_error(error)) from None

    async def _post_request(self, number: int, message: Message, headers: Mapping[str, str] | None) -> None:
        """Send a request and deliver its answer."""
        assert self._client is not None and self._ears is not None
        ears, begins, is_answered = self._ears, message["method"] == "initialize", False
        try:
            url = self._url
            for _ in range(3):
                async with self._client.stream(
                    "POST", url, content=encode_message(message), headers=self._make_request_headers(headers)
                ) as response:
                    is_answered = True
                    onward = find_same_server_redirect(response)
                    if onward is not None:
                        url = onward
                        continue
                    if begins:
                        self._url = url  # also for notifications, which have no answer that could redirect them
                    # Only the first answer may set the session. Later ones could move the client into the session of
                    # another.
                    if begins and (session := response.headers.get(_SESSION)):
                        self._session = session
                    await self._handle_response(number, message, response)
                    return
            ears.on_request_failed(number, RpcError(-32600, "the server redirects in a circle"))
        except SignInRequired as error:
            ears.on_request_failed(number, UpstreamConnectionLost(str(error), unsent=True))
        # Nothing was sent, so the call can be repeated without asking whether it took effect.
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            why = UpstreamConnectionLost(describe_http_error(error), unsent=True)
            ears.on_request_failed(number, why)
            ears.on_connection_lost(why)
        except httpx2.HTTPError as error:
            ears.on_request_failed(number, UpstreamConnectionLost(describe_http_error(error)))
        except Exception as error:  # such as an invalid answer of an authorization server
            ears.on_request_failed(
                number, UpstreamConnectionLost(f"{type(error).__name__}: {str(error)[:300]}", unsent=not is_answered)
            )

    async def _switch_to_older_transport(self, message: Message) -> bool:
        """Send the first message by the older transport, and return whether the server has it.

        Source: https://modelcontextprotocol.io/specification/2025-11-25/basic/transports#backwards-compatibility
        """
        assert self._ears is not None
        older = LegacySseTransport(self._definition, self._make)
        try:
            async with asyncio.timeout(_OLDER_OPEN_S):
                await older.open(self._ears)
            self._older = older
        except (UpstreamConnectionLost, TimeoutError):
            return False
        finally:
            if self._older is None:
                await older.aclose()
        await older.send(message)
        return True

    async def _handle_response(self, number: int, message: Message, response: httpx2.Response) -> None:
        assert self._ears is not None
        ears, status = self._ears, response.status_code
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        coding = response.headers.get("content-encoding", "identity").strip().lower()
        if coding != "identity" and (coding not in _CODINGS or kind == "text/event-stream"):
            ears.on_request_failed(
                number, RpcError(-32600, "the server's answer has a content coding that was not requested")
            )
        elif status >= 300 or status == 202:
            error_body = await _read_error_body(response)
            # Some servers send a valid result with an error status. The result is what the protocol asks for.
            if answers := [one for one in parse_json_rpc_messages(error_body) if "result" in one]:
                ears.on_message({**answers[0], "id": number}, number)
            elif self._session and _is_about_ended_session(status, error_body):
                self._end_session(number, status, error_body)
            elif not (
                message["method"] == "initialize"
                and status in _NO_POST
                and not parse_json_rpc_messages(error_body)
                and await self._switch_to_older_transport(message)
            ):
                ears.on_request_failed(number, _response_error(response, error_body))
        elif kind == "text/event-stream":
            await self._read_stream(number, response)
        else:
            body = await read_limited_body(response, ears, number)
            messages = parse_json_rpc_messages(body)
            if self._session and any(map(_names_unknown_session, messages)):
                return self._end_session(number, status, body)
            for one in messages:
                ears.on_message({**one, "id": number} if "method" not in one else one, number)
            known = kind in ("", "text/plain") or kind.endswith("json")
            why = UpstreamConnectionLost("the server's answer is not valid")
            other = RpcError(-32600, f"the server's answer has the content type {kind[:80]}")
            ears.on_request_failed(number, why if known else other)  # no effect after an answer
        return None

    def _end_session(self, number: int, status: int, body: bytes) -> None:
        """Report that the server has forgotten the session."""
        assert self._ears is not None
        self._ears.on_request_failed(number, _make_session_error(status, body))
        self._ears.on_connection_lost(_make_session_error(status, body))

    async def _read_stream(self, number: int, response: httpx2.Response) -> None:
        """Read events up to the answer, and resume the stream if it breaks off."""
        assert self._client is not None and self._ears is not None
        ears = self._ears
        place = _StreamPosition()
        done = await self._deliver_events(response, place, number)
        fruitless = 0
        while not done:
            # Without an event id the server cannot know what this client has missed.
            if not place.last or fruitless >= MAX_STREAM_RESUMES:
                detail = f": {place.error}" if place.error else ""
                why = f"the server's stream ended before the answer{detail}"
                ears.on_request_failed(number, UpstreamConnectionLost(why))
                return
            await self._sleep(place.pause_s)
            before = place.last
            head = {**self._make_request_headers(accept="text/event-stream"), _EVENT: place.last}
            try:
                async with self._client.stream("GET", self._url, headers=head) as again:
                    if again.status_code != 200:
                        ears.on_request_failed(
                            number,
                            UpstreamConnectionLost(
                                f"the server's stream ended before the answer and was not resumed ({again.status_code})"
                            ),
                        )
                        return
                    done = await self._deliver_events(again, place, number)
            except httpx2.ConnectError:
                pass
            # A stream that delivers something may break as often as it likes.
            fruitless = 0 if place.last != before else fruitless + 1

    async def _deliver_events(self, response: httpx2.Response, place: _StreamPosition, number: int | None) -> bool:
        """Deliver the events of a stream, and return whether the answer to ``number`` was among them."""
        assert self._ears is not None
        try:
            async for event in iterate_events(response):
                place.advance(event)
                data = event.data.encode("utf-8", "replace")
                messages = parse_json_rpc_messages(data)
                if not messages and event.event not in ("message", ""):
                    place.error = event.data[:_MAX_DETAIL] if event.event == "error" else place.error
                    continue
                # An answer that was cut would otherwise leave the call waiting until its time-out.
                if number is not None and not messages and is_truncated_rpc_response(data):
                    self._ears.on_request_failed(
                        number, UpstreamConnectionLost("the server's answer is not valid JSON")
                    )
                for message in messages:
                    is_answer = number is not None and "method" not in message
                    other = message.get("id")
                    if is_answer and other != number and isinstance(other, int) and other in self._posts:
                        self._ears.on_message(message, other)  # the server answers another request here
                        continue
                    if is_answer and number is not None and self._session and _names_unknown_session(message):
                        self._end_session(number, 200, data)
                        return True
                    self._ears.on_message({**message, "id": number} if is_answer else message, number)
                    if is_answer:
                        return True
        except httpx2.SSEError:
            if number is not None:
                self._ears.on_request_failed(
                    number,
                    ResponseTooLong(f"it exceeds the limit of {MAX_MESSAGE_BYTES // 2**20} MiB"),
                )
            return True
        except httpx2.HTTPError:
            pass  # the stream broke off
        return False

    async def _listen_for_server_messages(self) -> None:
        """Deliver messages outside of any request, as long as the server offers the stream.

        The stream is optional. If it fails, listening ends, and the connection remains.
        """
        assert self._client is not None
        loop = asyncio.get_running_loop()
        place, fruitless = _StreamPosition(), 0
        while fruitless <= MAX_STREAM_RESUMES:
            head = self._make_request_headers(accept="text/event-stream")
            if place.last:
                head[_EVENT] = place.last
            count, began = place.event_count, loop.time()
            try:
                async with self._client.stream("GET", self._url, headers=head) as response:
                    if response.status_code != 200 or await self._deliver_events(response, place, None):
                        return
            except SignInRequired:
                return
            except httpx2.HTTPError:
                pass
            useful = place.event_count > count or loop.time() - began > _HASTY_END_S
            fruitless = 0 if useful else fruitless + 1
            await self._sleep(place.pause_s)


class _StreamPosition:
    """The position in a stream, and the delay before it may be resumed."""

    def __init__(self) -> None:
        self.last = ""
        self.pause_s = _RECONNECT_S
        self.event_count = 0
        self.error = ""
        """The text of the last event that reported an error."""

    def advance(self, event: httpx2.ServerSentEvent) -> None:
        self.event_count += 1
        if event.id and len(event.id) <= _MAX_ERROR_BYTES and _SAFE_VALUE.match(event.id):
            self.last = event.id
        if event.retry is not None:
            # The server chooses the pause, within bounds: it must neither flood itself nor stop the client.
            self.pause_s = min(max(event.retry / 1000, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S)


class _CleanEvents(httpx2.AsyncByteStream):
    """The body of a response as a clean stream of events."""

    def __init__(self, response: httpx2.Response) -> None:
        self._response = response

    async def __aiter__(self) -> AsyncIterator[bytes]:
        cleaner = EventStreamCleaner()
        async for piece in self._response.aiter_bytes():
            if cleaned := cleaner.feed(piece):
                yield cleaned
        if cleaned := cleaner.close():
            yield cleaned


def iterate_events(response: httpx2.Response) -> AsyncIterator[httpx2.ServerSentEvent]:
    """Return the events of a stream.

    :raises httpx2.SSEError: for an event that exceeds the limit, and for a response of another type
    """
    clean = httpx2.Response(
        response.status_code,
        headers={"content-type": response.headers.get("content-type", "")},
        stream=_CleanEvents(response),
        request=response.request,
    )
    return aiter(httpx2.EventSource(clean, max_event_size=MAX_MESSAGE_BYTES))


async def read_limited_body(response: httpx2.Response, handler: TransportCallbacks, number: int) -> bytes:
    """Return the whole body; empty after reporting an error if it exceeds the limit."""
    kept = bytearray()
    async for piece in response.aiter_raw():
        kept += piece
        if len(kept) > MAX_MESSAGE_BYTES:
            handler.on_request_failed(
                number,
                ResponseTooLong(f"it exceeds the limit of {MAX_MESSAGE_BYTES // 2**20} MiB"),
            )
            return b""
    body = _decode_body(response, bytes(kept))
    if body is None:
        handler.on_request_failed(number, RpcError(-32600, f"the server's answer is no valid {_coding_of(response)}"))
    return body or b""


def _coding_of(response: httpx2.Response) -> str:
    return response.headers.get("content-encoding", "").strip().lower()


def _decode_body(response: httpx2.Response, body: bytes) -> bytes | None:
    """Return a body as UTF-8 without its content coding, which a proxy may add unasked; None if it cannot be decoded."""
    if _coding_of(response) in _CODINGS:
        reader = zlib.decompressobj(zlib.MAX_WBITS | 32)  # with the header of either coding
        try:
            body = reader.decompress(body, MAX_MESSAGE_BYTES)
        except zlib.error:
            return None
        if reader.unconsumed_tail:
            return None
    charset = (response.charset_encoding or "utf-8").lower()
    with contextlib.suppress(LookupError, UnicodeError):
        if codecs.lookup(charset).name not in ("utf-8", "ascii"):
            return body.decode(charset, "replace").encode()
    return body


async def _read_error_body(response: httpx2.Response) -> bytes:
    """Return the body of a response without an answer, cut at the limit of a message."""
    body = bytearray()
    async for piece in response.aiter_raw():
        body += piece
        if len(body) > MAX_MESSAGE_BYTES:
            break
    return _decode_body(response, bytes(body)) or b""


def _is_about_ended_session(status: int, error_body: bytes) -> bool:
    """Return whether a refusal means that the server no longer knows the session.

    The protocol demands 404. Many servers answer 400 or another status, with a text about sessions.
    """
    if status in (404, 410) or (status in _SESSION_STATUSES and b"session" in error_body[:_MAX_ERROR_BYTES].lower()):
        return True
    return _UNKNOWN_SESSION.search(error_body[:_MAX_ERROR_BYTES]) is not None or any(
        map(_names_unknown_session, parse_json_rpc_messages(error_body))
    )


_UNKNOWN_SESSION = re.compile(rb"(?i)mcp-session-id|no valid session id|(?:unknown|invalid|expired) mcp session")


def _names_unknown_session(message: Message) -> bool:
    """Return whether an error says, in the words of the SDKs, that the server does not know the session.

    Other texts about sessions may be about those of a tool.
    """
    error: Any = message.get("error")
    if not isinstance(error, dict):
        return False
    fields = cast("dict[str, Any]", error)
    text = str(fields.get("message", ""))[:_MAX_ERROR_BYTES]
    is_known = fields.get("code") == _SESSION_CODE and re.match(r"(?i)\s*session (?:id )?not found", text) is not None
    return is_known or _UNKNOWN_SESSION.search(text.encode("utf-8", "replace")) is not None


def _make_session_error(status: int, error_body: bytes) -> UpstreamConnectionLost:
    text = f"the server has forgotten the session ({status})"
    for message in parse_json_rpc_messages(error_body):
        if isinstance(error := message.get("error"), dict) and (
            words := str(cast("dict[str, Any]", error).get("message", ""))[:300]
        ):
            text = f"{text}: {words}"
    return UpstreamConnectionLost(text, forgotten=True)


def _response_error(response: httpx2.Response, error_body: bytes) -> Exception:
    """Return the error for a response without an answer, from its body or its status."""
    status = response.status_code
    if status == 202:
        return RpcError(-32600, "the server accepted a request as a notification (202)")
    for message in parse_json_rpc_messages(error_body):
        if message.get("error"):
            return parse_rpc_error(message["error"])
    if status == 401:
        return UpstreamConnectionLost("the server rejected the authorization (401)", unsent=True)
    if status == 404:
        is_bare = response.request.url.path in ("", "/")
        hint = "; most servers are at a path such as /mcp" if is_bare else ""
        return RpcError(-32601, f"the server's URL does not exist (404){hint}")
    if status in (301, 302, 303, 307, 308):
        onward = response.next_request
        target = "another address" if onward is None else onward.url.copy_with(query=None)
        return RpcError(
            -32600,
            f"the server redirects to another server ({str(target)[:200]}); if that is intended, configure its URL",
        )
    code = -32603 if status >= 500 else -32600
    said = f"the server answered {status} {response.reason_phrase}".strip()
    detail = _TAGS.sub(" ", error_body[:_MAX_DETAIL_BYTES].decode("utf-8", "replace"))
    detail = " ".join(detail.split())[:_MAX_DETAIL]
    return RpcError(code, f"{said}: {detail}" if detail else said)


_TAGS = re.compile(r"(?is)<(script|style)\b.{0,4000}?</\1\s*>|<[^>]{0,2000}>")
_MAX_DETAIL_BYTES, _MAX_DETAIL = 20_000, 300
"""How much of an error's body is read and shown."""


def encode_header_value(value: str) -> str:
    """Return a text as the value of a header field, in base64 if necessary."""
    if _SAFE_VALUE.match(value) and not _WRAPPED_VALUE.match(value):
        return value
    return f"=?base64?{base64.b64encode(value.encode('utf-8', 'surrogatepass')).decode()}?="


# The first HTTP transport (2024-11-05): one stream of events from the server, and POSTs to an address that the stream names.


class LegacySseTransport:
    """The HTTP+SSE transport of one server."""

    def __init__(self, definition: ServerDefinition, client: Callable[[], httpx2.AsyncClient]) -> None:
        self._url = definition.url
        self._fields = {**definition.headers, "accept-encoding": "identity"}
        self._make = client
        self._client: httpx2.AsyncClient | None = None
        self._stream: asyncio.Task[None] | None = None
        self._posts: set[asyncio.Task[None]] = set()
        self._endpoint: asyncio.Future[str] | None = None
        self._ears: TransportCallbacks | None = None

    async def open(self, handler: TransportCallbacks) -> None:
        self._client, self._ears = self._make(), handler
        self._endpoint = asyncio.get_running_loop().create_future()
        self._stream = asyncio.create_task(
            self._read_stream(self._client, handler, self._endpoint), name="mcp: reads events"
        )
        await asyncio.shield(self._endpoint)

    async def send(self, message: Message, headers: Mapping[str, str] | None = None) -> None:
        if self._client is None or self._endpoint is None or not self._endpoint.done():
            raise UpstreamConnectionLost("the connection was closed", unsent=True)
        task = asyncio.create_task(self._post(self._client, self._endpoint.result(), message), name="mcp: a POST")
        self._posts.add(task)
        task.add_done_callback(self._posts.discard)

    def abandon_request(self, request: int) -> bool:
        return False

    def watch_protected_paths(self) -> AbstractAsyncContextManager[None]:
        return contextlib.nullcontext()  # a remote server cannot write here

    def set_version(self, protocol: str, *, modern: bool) -> None:
        if protocol:
            self._fields["mcp-protocol-version"] = protocol

    async def aclose(self) -> None:
        client, self._client = self._client, None
        tasks = [*self._posts, *([self._stream] if self._stream is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._endpoint is not None and not self._endpoint.cancel() and not self._endpoint.cancelled():
            self._endpoint.exception()
        if client is not None:
            with contextlib.suppress(Exception):
                await client.aclose()

    async def _post(self, client: httpx2.AsyncClient, url: str, message: Message) -> None:
        assert self._ears is not None
        number = message.get("id") if "method" in message else None
        request = number if isinstance(number, int) else None
        try:
            head = {**self._fields, "content-type": "application/json"}
            async with client.stream("POST", url, content=encode_message(message), headers=head) as response:
                if response.status_code >= 300 and request is not None:
                    self._ears.on_request_failed(
                        request,
                        RpcError(-32600, f"the server answered {response.status_code} {response.reason_phrase}"),
                    )
        except (httpx2.HTTPError, SignInRequired) as error:
            if request is not None:
                self._ears.on_request_failed(
                    request,
                    UpstreamConnectionLost(describe_http_error(error), unsent=isinstance(error, httpx2.ConnectError)),
                )

    async def _read_stream(
        self, client: httpx2.AsyncClient, handler: TransportCallbacks, endpoint: asyncio.Future[str]
    ) -> None:
        why = UpstreamConnectionLost("the server's stream of events ended")
        try:
            url = self._url
            for _ in range(3):
                head = {**self._fields, "accept": "text/event-stream"}
                async with client.stream("GET", url, headers=head) as response:
                    onward = find_same_server_redirect(response)
                    if onward is not None:
                        url = onward
                        continue
                    if response.status_code != 200:
                        why = UpstreamConnectionLost(
                            f"the server answered {response.status_code} {response.reason_phrase}", unsent=True
                        )
                        break
                    await self._deliver_events(response, url, handler, endpoint)
                    break
        except httpx2.SSEError:
            why = UpstreamConnectionLost(
                f"the server sent an event longer than {MAX_MESSAGE_BYTES // 2**20} MiB, or no events"
            )
        except (httpx2.HTTPError, SignInRequired) as error:
            why = UpstreamConnectionLost(
                describe_http_error(error), unsent=isinstance(error, (httpx2.ConnectError, SignInRequired))
            )
        except (ValueError, httpx2.InvalidURL) as error:
            why = UpstreamConnectionLost(str(error), unsent=True)
        if not endpoint.done():
            endpoint.set_exception(why)
        else:
            handler.on_connection_lost(why)

    @staticmethod
    async def _deliver_events(
        response: httpx2.Response, url: str, ears: TransportCallbacks, endpoint: asyncio.Future[str]
    ) -> None:
        """Deliver the events of the stream.

        :raises ValueError: if the server names an endpoint on another server
        :raises httpx2.InvalidURL: if the endpoint is not a valid URL
        """
        async for event in iterate_events(response):
            if event.event == "endpoint" and not endpoint.done():
                target = str(keep_secure_scheme(httpx2.URL(url), httpx2.URL(urljoin(url, event.data.strip()))))
                here, there = parse_http_url(url), parse_http_url(target)
                # The messages have the user's credentials. A server must not send them to another host.
                if (here.scheme, here.host) != (there.scheme, there.host):
                    raise ValueError(f"the server names an endpoint on {there.host}, which is another server")
                endpoint.set_result(target)
            elif event.event in ("message", "") and event.data:
                data = event.data.encode("utf-8", "replace")
                messages = parse_json_rpc_messages(data)
                if not messages and is_truncated_rpc_response(data):
                    ears.on_request_failed(None, UpstreamConnectionLost("the server's answer is not valid JSON"))
                for message in messages:
                    ears.on_message(message, None)
