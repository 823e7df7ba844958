"""A server of the first HTTP transport (2024-11-05): one stream of events from it, and POSTs to where the stream says."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from urllib.parse import urljoin

import httpx2
import orjson

from handrail.contract.text.hosts import read_url
from handrail.upstream.client.channel import MAX_MESSAGE_BYTES, Ears, Lost, Message, RpcError, TooLong
from handrail.upstream.client.dialling import said_of, within_origin
from handrail.upstream.client.stdio import messages_in
from handrail.upstream.definition import ServerDefinition
from handrail.upstream.oauth import NeedsSignIn


class SseChannel:
    """Implements :class:`~handrail.upstream.client.channel.Channel`."""

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
        return contextlib.nullcontext()  # it is elsewhere

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
                        request, RpcError(-32600, f"it answered {response.status_code} {response.reason_phrase}")
                    )
        except (httpx2.HTTPError, NeedsSignIn) as error:
            if request is not None:
                self._ears.failed(request, Lost(said_of(error), unsent=isinstance(error, httpx2.ConnectError)))

    async def _read(self, client: httpx2.AsyncClient, ears: Ears, endpoint: asyncio.Future[str]) -> None:
        why = Lost("its stream of events ended")
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
                        why = Lost(f"it answered {response.status_code} {response.reason_phrase}", unsent=True)
                        break
                    await self._events(response, url, ears, endpoint)
                    break
        except httpx2.SSEError:
            why = Lost(f"it sent an event longer than {MAX_MESSAGE_BYTES // 2**20} MiB, or no events at all")
        except (httpx2.HTTPError, NeedsSignIn) as error:
            why = Lost(said_of(error), unsent=isinstance(error, (httpx2.ConnectError, NeedsSignIn)))
        except ValueError as error:
            why = Lost(str(error), unsent=True)
        if not endpoint.done():
            endpoint.set_exception(why)
        ears.lost(why)

    @staticmethod
    async def _events(response: httpx2.Response, url: str, ears: Ears, endpoint: asyncio.Future[str]) -> None:
        """
        :raises ValueError: where it wants its messages sent elsewhere
        """
        async for event in httpx2.EventSource(response, max_event_size=MAX_MESSAGE_BYTES):
            if event.event == "endpoint" and not endpoint.done():
                target = urljoin(url, event.data)
                here, there = read_url(url), read_url(target)
                if (here.scheme, here.host) != (there.scheme, there.host):
                    raise ValueError(f"it wants what it is told sent to {there.host}, which is another server")
                endpoint.set_result(target)
            elif event.event in ("message", "") and event.data:
                for message in messages_in(event.data.encode("utf-8", "surrogatepass")):
                    if message is None:
                        ears.failed(None, TooLong("it answered something that is no JSON"))
                    else:
                        ears.heard(message, None)
