"""The streamable HTTP transport: each request is a separate POST, answered at once or as a stream of events.

A broken stream is resumed if the server said how. Messages on the stream of a request belong to that request. The transport
waits for slow answers; only the caller gives up. Also here: the older HTTP+SSE transport.

Source: https://modelcontextprotocol.io/specification/2025-11-25/basic/transports#streamable-http
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import httpx2
import orjson

from handrail.contract.text.hosts import read_url
from handrail.contract.tool.requires import CapabilitySet
from handrail.sandbox.network.egress import Egress, Gate
from handrail.upstream.client import dialling
from handrail.upstream.client.conversation import MAX_MESSAGE_BYTES, Channel, Ears, Lost, Message, RpcError, TooLong
from handrail.upstream.client.dialling import said_of, within_origin
from handrail.upstream.client.stdio import messages_in
from handrail.upstream.definition import ServerDefinition
from handrail.upstream.oauth import NeedsSignIn, Prompt, SignIn

_SESSION, _VERSION, _EVENT = "mcp-session-id", "mcp-protocol-version", "last-event-id"
_SAFE = re.compile(r"[\x21-\x7E](?:[\x20-\x7E]*[\x21-\x7E])?\Z")
_WRAPPED = re.compile(r"=\?base64\?.*\?=\Z")
_ABANDON_S = 5.0
_AGAIN_S = 1.0
_SHORTEST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 60.0
MOST_RESUMED = 5
"""The most attempts in a row to resume a stream that delivers nothing."""
_SAID = 4096


def http_channel(
    definition: ServerDefinition,
    capabilities: CapabilitySet,
    gate: Gate,
    state: Path,
    prompt: Prompt | None = None,
    learn: Callable[[str], None] = lambda value: None,
) -> Channel:
    """Return a transport for one connection to a server with a URL.

    :param capabilities: the hosts that Handrail may connect to
    :param gate: checks these hosts against the rules
    :param state: the root folder of all state, which has the tokens
    :param prompt: how a user signs in; None if no user is present
    :param learn: called with every token of the sign-in
    """
    egress = Egress(capabilities, gate)
    auth = None
    if not any(name.lower() == "authorization" for name in definition.headers):
        auth = SignIn(definition, state, prompt, learn)
    if definition.transport == "sse":
        return SseChannel(definition, lambda: dialling.client(egress, auth))
    return HttpChannel(definition, lambda: dialling.client(egress, auth))


class HttpChannel:
    """The streamable HTTP transport of one server."""

    def __init__(
        self,
        definition: ServerDefinition,
        client: Callable[[], httpx2.AsyncClient],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """:param sleep: waits a number of seconds before a stream is resumed"""
        self._sleep = sleep
        self._url = definition.url
        self._fields = dict(definition.headers)
        self._make = client
        self._client: httpx2.AsyncClient | None = None
        self._ears: Ears | None = None
        self._posts: dict[int, asyncio.Task[None]] = {}
        self._listener: asyncio.Task[None] | None = None
        self._session = ""
        self._protocol = ""
        self._modern = False

    async def open(self, ears: Ears) -> None:
        self._client, self._ears = self._make(), ears

    async def send(self, message: Message, headers: Mapping[str, str] | None = None) -> None:
        if self._client is None:
            raise Lost("the connection was closed", unsent=True)
        number = message.get("id") if "method" in message else None
        if isinstance(number, int):
            task = asyncio.create_task(self._asked(number, message, headers), name="mcp: a request over HTTP")
            self._posts[number] = task
            task.add_done_callback(lambda _: self._posts.pop(number, None))
            return
        if self._modern and message.get("method") == "notifications/cancelled":
            return
        await self._noted(message)
        if message.get("method") == "notifications/initialized" and self._session:
            self._listener = asyncio.create_task(self._listen(), name="mcp: listens over HTTP")

    def abandon(self, request: int) -> bool:
        task = self._posts.get(request)
        if task is not None and self._modern:
            task.cancel()  # closing the stream notifies the server
            return True
        if task is not None:
            asyncio.get_running_loop().call_later(_ABANDON_S, task.cancel)
        return self._modern

    def watched(self) -> AbstractAsyncContextManager[None]:
        return contextlib.nullcontext()  # a remote server cannot write here

    def settled(self, protocol: str, *, modern: bool) -> None:
        self._protocol, self._modern = protocol, modern

    async def aclose(self) -> None:
        client, self._client = self._client, None
        tasks = [*self._posts.values(), *([self._listener] if self._listener is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if client is None:
            return
        if self._session:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(1):
                    await client.delete(self._url, headers=self._head())
        with contextlib.suppress(Exception):
            await client.aclose()

    def _head(self, headers: Mapping[str, str] | None = None, accept: str = "") -> dict[str, str]:
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
        return found | {name: in_a_field(value) for name, value in (headers or {}).items()}

    async def _noted(self, message: Message) -> None:
        """Send a notification or an answer, without its outcome."""
        assert self._client is not None
        try:
            async with self._client.stream(
                "POST", self._url, content=orjson.dumps(message), headers=self._head()
            ) as response:
                if response.status_code == 404 and self._session:
                    self._forgotten()
        except (httpx2.HTTPError, NeedsSignIn) as error:
            raise Lost(said_of(error)) from None

    async def _asked(self, number: int, message: Message, headers: Mapping[str, str] | None) -> None:
        """Send a request and deliver its answer."""
        assert self._client is not None and self._ears is not None
        ears, begins = self._ears, message["method"] == "initialize"
        try:
            url = self._url
            for _ in range(3):
                async with self._client.stream(
                    "POST", url, content=orjson.dumps(message), headers=self._head(headers)
                ) as response:
                    onward = within_origin(response)
                    if onward is not None:
                        url = onward
                        continue
                    if begins and (session := response.headers.get(_SESSION)):
                        self._session = session
                    await self._answered(number, response)
                    return
            ears.failed(number, RpcError(-32600, "the server redirects in a circle"))
        except NeedsSignIn as error:
            ears.failed(number, Lost(str(error), unsent=True))
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            why = Lost(said_of(error), unsent=True)
            ears.failed(number, why)
            ears.lost(why)
        except httpx2.HTTPError as error:
            ears.failed(number, Lost(said_of(error)))
        except Exception as error:  # such as an invalid answer of an authorization server
            ears.failed(number, Lost(f"{type(error).__name__}: {str(error)[:300]}", unsent=True))

    async def _answered(self, number: int, response: httpx2.Response) -> None:
        assert self._ears is not None
        ears, status = self._ears, response.status_code
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            ears.failed(number, RpcError(-32600, "the server's answer has a content coding that was not requested"))
        elif status == 404 and self._session:
            ears.failed(number, Lost("the server has forgotten the session", forgotten=True))
            self._forgotten()
        elif status >= 300 or status == 202:
            ears.failed(number, await _refused(response, kind))
        elif kind == "text/event-stream":
            await self._streamed(number, response)
        elif kind == "application/json":
            for message in messages_in(await body_of(response, ears, number)):
                if message is not None:
                    ears.heard({**message, "id": number} if "method" not in message else message, number)
            ears.failed(number, Lost("the server's answer is not valid"))  # no effect after an answer
        else:
            ears.failed(number, RpcError(-32600, f"the server's answer has the content type {kind[:80] or 'none'}"))

    def _forgotten(self) -> None:
        assert self._ears is not None
        self._ears.lost(Lost("the server has forgotten the session", forgotten=True))

    async def _streamed(self, number: int, response: httpx2.Response) -> None:
        """Read events up to the answer, and resume the stream if it breaks off."""
        assert self._client is not None and self._ears is not None
        ears = self._ears
        place = _Place()
        done = await self._events(response, place, number)
        fruitless = 0
        while not done:
            if not place.last or fruitless >= MOST_RESUMED:
                ears.failed(number, Lost("the server's stream ended before the answer"))
                return
            await self._sleep(place.pause_s)
            before = place.last
            head = {**self._head(accept="text/event-stream"), _EVENT: place.last}
            try:
                async with self._client.stream("GET", self._url, headers=head) as again:
                    if again.status_code != 200:
                        ears.failed(
                            number,
                            Lost(
                                f"the server's stream ended before the answer and was not resumed ({again.status_code})"
                            ),
                        )
                        return
                    done = await self._events(again, place, number)
            except httpx2.ConnectError:
                pass
            fruitless = 0 if place.last != before else fruitless + 1

    async def _events(self, response: httpx2.Response, place: _Place, number: int | None) -> bool:
        """Deliver the events of a stream, and return whether the answer to ``number`` was among them."""
        assert self._ears is not None
        try:
            async for event in httpx2.EventSource(response, max_event_size=MAX_MESSAGE_BYTES):
                place.seen(event)
                if event.event not in ("message", "") or not event.data:
                    continue
                for message in messages_in(event.data.encode("utf-8", "surrogatepass")):
                    if message is None:
                        if number is not None:
                            self._ears.failed(number, Lost("the server's answer is not valid JSON"))
                        continue
                    is_answer = number is not None and "method" not in message
                    self._ears.heard({**message, "id": number} if is_answer else message, number)
                    if is_answer:
                        return True
        except httpx2.SSEError:
            self._ears.failed(
                number,
                TooLong(f"it exceeds the limit of {MAX_MESSAGE_BYTES // 2**20} MiB"),
            )
            return True
        except httpx2.HTTPError:
            pass  # the stream broke off
        return False

    async def _listen(self) -> None:
        """Deliver messages outside of any request, as long as the server offers the stream."""
        assert self._client is not None and self._ears is not None
        place, failures = _Place(), 0
        while True:
            head = self._head(accept="text/event-stream")
            if place.last:
                head[_EVENT] = place.last
            try:
                async with self._client.stream("GET", self._url, headers=head) as response:
                    if response.status_code == 404:
                        self._forgotten()
                        return
                    if response.status_code != 200:
                        return
                    failures = 0
                    await self._events(response, place, None)
            except NeedsSignIn:
                return
            except httpx2.HTTPError as error:
                failures += 1
                if failures > 2:
                    self._ears.lost(Lost(said_of(error)))
                    return
            await self._sleep(place.pause_s)


class _Place:
    """The position in a stream, and the delay before it may be resumed."""

    def __init__(self) -> None:
        self.last = ""
        self.pause_s = _AGAIN_S

    def seen(self, event: httpx2.ServerSentEvent) -> None:
        if event.id and len(event.id) <= _SAID and _SAFE.match(event.id):
            self.last = event.id
        if event.retry is not None:
            self.pause_s = min(max(event.retry / 1000, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S)


async def body_of(response: httpx2.Response, ears: Ears, number: int) -> bytes:
    """Return the whole body; empty after reporting an error if it exceeds the limit."""
    kept = bytearray()
    async for piece in response.aiter_raw():
        kept += piece
        if len(kept) > MAX_MESSAGE_BYTES:
            ears.failed(
                number,
                TooLong(f"it exceeds the limit of {MAX_MESSAGE_BYTES // 2**20} MiB"),
            )
            return b""
    return bytes(kept)


async def _refused(response: httpx2.Response, kind: str) -> Exception:
    """Return the error for a response without an answer, from its body or its status."""
    status = response.status_code
    if status == 202:
        return RpcError(-32600, "the server accepted a request as a notification (202)")
    said = b""
    async for piece in response.aiter_raw():
        said += piece
        if len(said) > MAX_MESSAGE_BYTES:
            break
    if kind == "application/json":
        for message in messages_in(said):
            error: Any = message.get("error") if message is not None else None
            if isinstance(error, dict) and isinstance(error.get("code"), int):  # pyright: ignore[reportUnknownMemberType]
                return RpcError(error["code"], str(error.get("message", ""))[:4000], error.get("data"))  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
    if status == 401:
        return Lost("the server rejected the authorization (401)", unsent=True)
    if status == 404:
        return RpcError(-32601, "the server's URL does not exist (404)")
    if status in (301, 302, 303, 307, 308):
        return RpcError(-32600, "the server redirects to another server; if that is intended, configure its URL")
    code = -32603 if status >= 500 else -32600
    return RpcError(code, f"the server answered {status} {response.reason_phrase}".strip())


def in_a_field(value: str) -> str:
    """Return a text as the value of a header field, in base64 if necessary."""
    if _SAFE.match(value) and not _WRAPPED.match(value):
        return value
    return f"=?base64?{base64.b64encode(value.encode('utf-8', 'surrogatepass')).decode()}?="


# The first HTTP transport (2024-11-05): one stream of events from the server, and POSTs to an address that the stream names.


class SseChannel:
    """The HTTP+SSE transport of one server."""

    def __init__(self, definition: ServerDefinition, client: Callable[[], httpx2.AsyncClient]) -> None:
        self._url = definition.url
        self._fields = {**definition.headers, "accept-encoding": "identity"}
        self._make = client
        self._client: httpx2.AsyncClient | None = None
        self._stream: asyncio.Task[None] | None = None
        self._posts: set[asyncio.Task[None]] = set()
        self._endpoint: asyncio.Future[str] | None = None
        self._ears: Ears | None = None

    async def open(self, ears: Ears) -> None:
        self._client, self._ears = self._make(), ears
        self._endpoint = asyncio.get_running_loop().create_future()
        self._stream = asyncio.create_task(self._read(self._client, ears, self._endpoint), name="mcp: reads events")
        await asyncio.shield(self._endpoint)

    async def send(self, message: Message, headers: Mapping[str, str] | None = None) -> None:
        if self._client is None or self._endpoint is None or not self._endpoint.done():
            raise Lost("the connection was closed", unsent=True)
        task = asyncio.create_task(self._post(self._client, self._endpoint.result(), message), name="mcp: a POST")
        self._posts.add(task)
        task.add_done_callback(self._posts.discard)

    def abandon(self, request: int) -> bool:
        return False

    def watched(self) -> AbstractAsyncContextManager[None]:
        return contextlib.nullcontext()  # a remote server cannot write here

    def settled(self, protocol: str, *, modern: bool) -> None:
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
            async with client.stream("POST", url, content=orjson.dumps(message), headers=head) as response:
                if response.status_code >= 300 and request is not None:
                    self._ears.failed(
                        request,
                        RpcError(-32600, f"the server answered {response.status_code} {response.reason_phrase}"),
                    )
        except (httpx2.HTTPError, NeedsSignIn) as error:
            if request is not None:
                self._ears.failed(request, Lost(said_of(error), unsent=isinstance(error, httpx2.ConnectError)))

    async def _read(self, client: httpx2.AsyncClient, ears: Ears, endpoint: asyncio.Future[str]) -> None:
        why = Lost("the server's stream of events ended")
        try:
            url = self._url
            for _ in range(3):
                head = {**self._fields, "accept": "text/event-stream"}
                async with client.stream("GET", url, headers=head) as response:
                    onward = within_origin(response)
                    if onward is not None:
                        url = onward
                        continue
                    if response.status_code != 200:
                        why = Lost(f"the server answered {response.status_code} {response.reason_phrase}", unsent=True)
                        break
                    await self._events(response, url, ears, endpoint)
                    break
        except httpx2.SSEError:
            why = Lost(f"the server sent an event longer than {MAX_MESSAGE_BYTES // 2**20} MiB, or no events")
        except (httpx2.HTTPError, NeedsSignIn) as error:
            why = Lost(said_of(error), unsent=isinstance(error, (httpx2.ConnectError, NeedsSignIn)))
        except ValueError as error:
            why = Lost(str(error), unsent=True)
        if not endpoint.done():
            endpoint.set_exception(why)
        ears.lost(why)

    @staticmethod
    async def _events(response: httpx2.Response, url: str, ears: Ears, endpoint: asyncio.Future[str]) -> None:
        """Deliver the events of the stream.

        :raises ValueError: if the server names an endpoint on another server
        """
        async for event in httpx2.EventSource(response, max_event_size=MAX_MESSAGE_BYTES):
            if event.event == "endpoint" and not endpoint.done():
                target = urljoin(url, event.data)
                here, there = read_url(url), read_url(target)
                if (here.scheme, here.host) != (there.scheme, there.host):
                    raise ValueError(f"the server names an endpoint on another server, {there.host}")
                endpoint.set_result(target)
            elif event.event in ("message", "") and event.data:
                for message in messages_in(event.data.encode("utf-8", "surrogatepass")):
                    if message is None:
                        ears.failed(None, TooLong("it is not valid JSON"))
                    else:
                        ears.heard(message, None)
