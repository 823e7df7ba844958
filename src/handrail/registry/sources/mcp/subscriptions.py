"""Which resources of a server somebody wants to hear of, on whatever connection there is.

In the older era each is a request of its own; in the newer one a single stream names everything that is wanted, and is
opened anew when that changes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from handrail.registry.sources.mcp.channel import Lost, RpcError, TooLong

if TYPE_CHECKING:
    from handrail.registry.sources.mcp.conversation import Conversation

MOST_SUBSCRIBED = 1_000
_AGAIN_S = (0.1, 1.0, 5.0, 30.0)


class Subscriptions:
    """Of one server."""

    def __init__(self) -> None:
        self._told: dict[str, list[Callable[[str], None]]] = {}
        self._conversation: Conversation | None = None
        self._wanted = asyncio.Event()
        """What is wanted has changed."""
        self._listener: asyncio.Task[None] | None = None
        self._changed: asyncio.Event | None = None

    def begin(self, conversation: Conversation, changed: asyncio.Event) -> None:
        """A connection is there. Called by its owner.

        :param changed: set where a stream that would have told of changes was not there for a while
        """
        self._conversation, self._changed = conversation, changed
        work = self._listen(conversation) if conversation.era == "modern" else self._subscribe_again(conversation)
        self._listener = asyncio.create_task(work, name=f"mcp {conversation.name}: subscriptions")

    async def end(self) -> None:
        listener, self._listener, self._conversation = self._listener, None, None
        if listener is not None:
            listener.cancel()
            await asyncio.gather(listener, return_exceptions=True)

    def updated(self, uri: str) -> None:
        """The server says that a resource has changed; it may be a part of one that is subscribed to."""
        for wanted, told in tuple(self._told.items()):
            if uri == wanted or uri.startswith(wanted.rstrip("/") + "/"):
                for tell in tuple(told):
                    tell(uri)

    async def add(self, uri: str, told: Callable[[str], None]) -> None:
        """
        :raises RpcError: where the server does not want to
        :raises Lost: when the connection ends meanwhile
        """
        if len(self._told) >= MOST_SUBSCRIBED and uri not in self._told:
            raise RpcError(-32600, f"at most {MOST_SUBSCRIBED} resources of a server are subscribed to")
        first = uri not in self._told
        self._told.setdefault(uri, []).append(told)  # first: it may tell before it has answered
        if not first:
            return
        self._wanted.set()
        if self._conversation is not None and self._conversation.era == "legacy":
            try:
                await self._conversation.request("resources/subscribe", {"uri": uri})
            except BaseException:
                self._forget(uri, told)
                raise

    async def remove(self, uri: str, told: Callable[[str], None]) -> None:
        """Never raises: where the server cannot be told, it tells nobody."""
        if not self._forget(uri, told):
            return
        self._wanted.set()
        if self._conversation is not None and self._conversation.era == "legacy":
            with contextlib.suppress(RpcError, Lost, TooLong):
                await self._conversation.request("resources/unsubscribe", {"uri": uri})

    def _forget(self, uri: str, told: Callable[[str], None]) -> bool:
        """Whether nobody wants to hear of it any more."""
        here = self._told.get(uri)
        if here is None or told not in here:
            return False
        here.remove(told)
        if here:
            return False
        del self._told[uri]
        return True

    async def _subscribe_again(self, conversation: Conversation) -> None:
        for uri in tuple(self._told):
            with contextlib.suppress(RpcError, Lost, TooLong):
                await conversation.request("resources/subscribe", {"uri": uri})

    async def _listen(self, conversation: Conversation) -> None:
        """Keep the newer era's stream, with what is wanted now."""
        failures = 0
        while True:
            self._wanted.clear()
            asks = self._filter(conversation)
            if not asks:
                await self._wanted.wait()
                continue
            stream = asyncio.ensure_future(conversation.request("subscriptions/listen", {"notifications": asks}))
            other = asyncio.ensure_future(self._wanted.wait())
            try:
                await asyncio.wait((stream, other), return_when=asyncio.FIRST_COMPLETED)
                if not stream.done():
                    continue
                try:
                    stream.result()
                    failures = 0
                except RpcError as error:
                    if error.code == -32601:
                        return
                    failures += 1
                except (Lost, TooLong):
                    return
            finally:
                for one in (stream, other):
                    one.cancel()
                await asyncio.gather(stream, other, return_exceptions=True)
            await asyncio.sleep(_AGAIN_S[min(failures, len(_AGAIN_S) - 1)])
            if self._changed is not None:
                self._changed.set()  # whatever changed while nobody listened

    def _filter(self, conversation: Conversation) -> dict[str, Any]:
        offered: dict[str, Any] = {}
        for capability, key in (
            ("tools", "toolsListChanged"),
            ("prompts", "promptsListChanged"),
            ("resources", "resourcesListChanged"),
        ):
            said = conversation.capabilities.get(capability)
            if isinstance(said, dict) and said.get("listChanged") is True:  # pyright: ignore[reportUnknownMemberType]
                offered[key] = True
        if self._told:
            offered["resourceSubscriptions"] = sorted(self._told)
        return offered
