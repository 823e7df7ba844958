"""The resource subscriptions at one server, kept over reconnections.

In the older era each is a separate request. In the newer era a single stream names all of them, and is reopened when they
change.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from handrail.upstream.client.upstream_session import ResponseTooLong, RpcError, UpstreamConnectionLost

if TYPE_CHECKING:
    from handrail.upstream.client.upstream_session import UpstreamSession

MAX_SUBSCRIPTIONS = 1_000
ACKNOWLEDGE_TIMEOUT_S = 5.0
"""The timeout in seconds for a server to acknowledge a subscription, after which it is assumed."""
STABLE_STREAM_S = 5.0
"""The minimum duration in seconds of a stream; a shorter one counts as a failure."""
_RETRY_DELAYS_S = (0.1, 1.0, 5.0, 30.0)
_METHOD_NOT_FOUND = -32601


class ServerResourceSubscriptions:
    """The resource subscriptions at one server."""

    def __init__(self) -> None:
        self._told: dict[str, list[Callable[[str], None]]] = {}
        self._conversation: UpstreamSession | None = None
        self._wanted = asyncio.Event()
        """Set when the wanted subscriptions have changed."""
        self._listener: asyncio.Task[None] | None = None
        self._changed: asyncio.Event | None = None
        self._named: frozenset[str] = frozenset()
        """The URIs that the newer era's stream covers now."""
        self._news = asyncio.Event()
        """Set, and replaced by a new event, when the covered URIs change or no notifications will come."""
        self._deaf = False
        """Whether the server does not implement the stream."""

    def subscribe_on_connection(self, conversation: UpstreamSession, changed: asyncio.Event) -> None:
        """Subscribe on a new connection. Called by its owner.

        :param changed: set after a gap in the stream, in which the lists may have changed
        """
        self._conversation, self._changed, self._deaf = conversation, changed, False
        work = (
            self._keep_subscription_stream(conversation)
            if conversation.era == "modern"
            else self._resubscribe(conversation)
        )
        self._listener = asyncio.create_task(work, name=f"mcp {conversation.name}: subscriptions")
        self._listener.add_done_callback(lambda _: self._mark_covered(frozenset()))

    async def detach(self) -> None:
        listener, self._listener, self._conversation = self._listener, None, None
        if listener is not None:
            listener.cancel()
            await asyncio.gather(listener, return_exceptions=True)

    def notify_subscribers(self, uri: str) -> None:
        """Notify the subscribers of a resource, or of a folder that has it."""
        for wanted, notified_uris in tuple(self._told.items()):
            if uri == wanted or uri.startswith(wanted.rstrip("/") + "/"):
                for tell in tuple(notified_uris):
                    tell(uri)

    async def subscribe_resource(self, uri: str, callback: Callable[[str], None]) -> None:
        """Subscribe to a resource.

        :raises RpcError: if the server refuses
        :raises UpstreamConnectionLost: if the connection ends meanwhile
        """
        if len(self._told) >= MAX_SUBSCRIPTIONS and uri not in self._told:
            raise RpcError(-32600, f"the limit is {MAX_SUBSCRIPTIONS} resource subscriptions for each server")
        first = uri not in self._told
        self._told.setdefault(uri, []).append(
            callback
        )  # before the request, since a notification may precede the answer
        if not first:
            return
        self._wanted.set()
        if self._conversation is not None and self._conversation.era == "legacy":
            try:
                await self._conversation.request("resources/subscribe", {"uri": uri})
            except BaseException:
                self._remove_callback(uri, callback)
                raise
        elif self._conversation is not None:
            try:
                await self._wait_until_covered(uri)
            except BaseException:
                self._remove_callback(uri, callback)
                self._wanted.set()
                raise

    async def unsubscribe_resource(self, uri: str, callback: Callable[[str], None]) -> None:
        """Remove a subscription. Never raises."""
        if not self._remove_callback(uri, callback):
            return
        self._wanted.set()
        if self._conversation is not None and self._conversation.era == "legacy":
            with contextlib.suppress(RpcError, UpstreamConnectionLost, ResponseTooLong):
                await self._conversation.request("resources/unsubscribe", {"uri": uri})

    def _remove_callback(self, uri: str, callback: Callable[[str], None]) -> bool:
        """Remove a callback, and return whether it was the last one of its resource."""
        here = self._told.get(uri)
        if here is None or callback not in here:
            return False
        here.remove(callback)
        if here:
            return False
        del self._told[uri]
        return True

    async def _resubscribe(self, conversation: UpstreamSession) -> None:
        for uri in tuple(self._told):
            with contextlib.suppress(RpcError, UpstreamConnectionLost, ResponseTooLong):
                await conversation.request("resources/subscribe", {"uri": uri})

    def _mark_covered(self, named: frozenset[str]) -> None:
        self._named = named
        self._news.set()
        self._news = asyncio.Event()

    async def _wait_until_covered(self, uri: str) -> None:
        """Wait until the stream covers a resource. After a timeout, that is assumed.

        :raises RpcError: if the server does not implement the stream
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ACKNOWLEDGE_TIMEOUT_S):
                while uri not in self._named and self._listener is not None and not self._listener.done():
                    await self._news.wait()
        if self._deaf:
            raise RpcError(_METHOD_NOT_FOUND, "the server does not report changes of resources")

    async def _keep_subscription_stream(self, conversation: UpstreamSession) -> None:
        """Keep the newer era's stream for the wanted resources.

        A new stream is acknowledged before the old one ends.
        """
        failures = 0
        streams: list[asyncio.Future[Any]] = []
        try:
            while True:
                self._wanted.clear()
                asks, named = self._filter(conversation), frozenset(self._told)
                if not asks:
                    await _cancel_streams(streams)
                    self._mark_covered(named)
                    await self._wanted.wait()
                    continue
                began, heard = asyncio.get_running_loop().time(), asyncio.Event()
                request = conversation.request("subscriptions/listen", {"notifications": asks}, acknowledged=heard)
                streams.append(stream := asyncio.ensure_future(request))
                await _wait_for_either(stream, heard, ACKNOWLEDGE_TIMEOUT_S)
                await _cancel_streams(streams, stream)
                if not stream.done():
                    self._mark_covered(named)
                    await _wait_for_either(stream, self._wanted)
                    if not stream.done():
                        continue
                streams.clear()
                try:
                    stream.result()
                except RpcError as error:
                    if error.code == _METHOD_NOT_FOUND:
                        self._deaf = True
                        return
                except (UpstreamConnectionLost, ResponseTooLong):
                    return
                lasted = asyncio.get_running_loop().time() - began
                failures = 0 if lasted >= STABLE_STREAM_S else failures + 1
                await asyncio.sleep(_RETRY_DELAYS_S[min(failures, len(_RETRY_DELAYS_S) - 1)])
                if self._changed is not None:
                    self._changed.set()  # changes in the gap were not reported
        finally:
            await _cancel_streams(streams)

    def _filter(self, conversation: UpstreamSession) -> dict[str, Any]:
        offered: dict[str, Any] = {}
        for capability, key in (
            ("tools", "toolsListChanged"),
            ("prompts", "promptsListChanged"),
            ("resources", "resourcesListChanged"),
        ):
            value = conversation.capabilities.get(capability)
            if isinstance(value, dict) and value.get("listChanged") is True:  # pyright: ignore[reportUnknownMemberType]
                offered[key] = True
        if self._told:
            offered["resourceSubscriptions"] = sorted(self._told)
        return offered


async def _wait_for_either(stream: asyncio.Future[Any], event: asyncio.Event, timeout_s: float | None = None) -> None:
    """Wait until a stream ends or an event is set, or for a timeout."""
    happened = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((stream, happened), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        happened.cancel()


async def _cancel_streams(streams: list[asyncio.Future[Any]], but: asyncio.Future[Any] | None = None) -> None:
    """Cancel all streams but one."""
    ended = [stream for stream in streams if stream is not but]
    for stream in ended:
        stream.cancel()
        streams.remove(stream)
    await asyncio.gather(*ended, return_exceptions=True)
