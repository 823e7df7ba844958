"""Channels between sessions: who sends, who reads, and who waits for a message."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from handrail.arbiter.redaction import Redactor
from handrail.contract.arrivals import HISTORY, SHARED, ChannelKind, ChannelMessage, Received
from handrail.contract.errors import ToolError
from handrail.store.channels import ChannelTable, Kept, Key

MAX_MESSAGE = 64 * 1024
"""Characters of one message."""
MAX_CHANNELS = 200
"""Of one session tree, and as many of the workspace."""
_NAME = re.compile(r"(?:shared/)?[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z")


class Watcher(Protocol):
    """Takes messages as they come, in place of whoever waits for them."""

    @property
    def reader(self) -> str:
        """Its name among the readers of a broadcast."""
        ...

    def wants(self, message: ChannelMessage) -> bool: ...

    async def take(self, kept: Kept) -> bool:
        """Durable on return; the same one again is nothing. Gives whether it was taken: else it stays where it is."""
        ...


class Switchboard:
    """All channels of a workspace, in the process that holds it."""

    def __init__(self, table: ChannelTable, redactor: Redactor, clock: Callable[[], int] = time.time_ns) -> None:
        self.table = table
        self._redactor = redactor
        self._clock = clock
        self._locks: dict[Key, asyncio.Lock] = {}
        self._changed: dict[Key, asyncio.Event] = {}
        self._watchers: dict[Key, list[Watcher]] = {}

    async def send(
        self, key: Key, sender: str, text: str, kind: ChannelKind | None, data: Mapping[str, Any] | None
    ) -> int:
        """See :meth:`handrail.contract.arrivals.Channels.send`."""
        if len(text) > MAX_MESSAGE:
            raise ToolError(
                f"the message has {len(text):,} characters; up to {MAX_MESSAGE:,} are sent. Put it into a file and send its path",
                kind="invalid_input",
            )
        async with self._lock(key):
            there = self.table.kind(key)
            if there is not None and kind not in (None, there):
                raise ToolError(f"{key.shown} is a {there}, not a {kind}; send to it as it is", kind="conflict")
            if there is None and len(self.table.named(key.scope)) >= MAX_CHANNELS:
                await self.table.forget_empty(key.scope)
            if there is None and len(self.table.named(key.scope)) >= MAX_CHANNELS:
                raise ToolError(f"there are {MAX_CHANNELS} channels already; use one of them", kind="limit")
            used: ChannelKind = there or kind or "queue"
            await self._hand_out(key)  # what was left where it is may be taken by now
            if used == "queue" and self.table.unread(key) >= HISTORY:
                raise ToolError(
                    f"{key.shown} holds {HISTORY} messages that nobody has read, and takes no more; have somebody read it "
                    "(wait_channel, watch_channel), or use another channel",
                    kind="limit",
                )
            kept = None if data is None else self._redactor.value(dict(data))
            message = ChannelMessage(key.shown, sender, self._redactor.text(text), self._clock(), kept)
            await self.table.send(key, used, message)
            await self._hand_out(key)
            count = self.table.unread(key)
        self._ring(key)
        return count

    async def receive(self, key: Key, reader: str, timeout_ms: int, sender: str | None) -> Received:
        """See :meth:`handrail.contract.arrivals.Channels.receive`."""
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_ms / 1000
        while True:
            changed = self._changed.setdefault(key, asyncio.Event())
            async with self._lock(key):
                if (received := await self._next(key, reader, sender)) is not None:
                    return received
            try:
                async with asyncio.timeout_at(until):
                    await changed.wait()
            except TimeoutError:
                return Received(None)

    async def _next(self, key: Key, reader: str, sender: str | None) -> Received | None:
        if self.table.kind(key) == "broadcast":
            position = self.table.position(key, reader)
            kept = self.table.first(key, position or 0, sender)
            if kept is None:
                return None
            oldest = self.table.first(key)
            missed = 0 if position is None or oldest is None else max(oldest.number - position - 1, 0)
            await self.table.advance(key, reader, kept.number)
            return Received(kept.message, missed if sender is None else 0)
        kept = self.table.first(key, 0, sender)
        if kept is None:
            return None
        await self.table.take(key, kept.number)
        return Received(kept.message)

    async def watch(self, key: Key, watcher: Watcher) -> None:
        """Have ``watcher`` take what comes, and what waits already."""
        async with self._lock(key):
            self._watchers.setdefault(key, []).append(watcher)
            await self._hand_out(key)

    def unwatch(self, key: Key, watcher: Watcher) -> None:
        watchers = self._watchers.get(key, [])
        if watcher in watchers:
            watchers.remove(watcher)
        if not watchers:
            self._watchers.pop(key, None)

    async def _hand_out(self, key: Key) -> None:
        """Give watchers what is theirs. First it is told, then taken: a message is told twice rather than never, and the
        second time is none, since what tells of it has its number."""
        watchers = self._watchers.get(key)
        if not watchers:
            return
        if self.table.kind(key) == "broadcast":
            for watcher in tuple(watchers):
                for kept in self.table.after(key, self.table.position(key, watcher.reader) or 0):
                    if watcher.wants(kept.message) and not await watcher.take(kept):
                        break
                    await self.table.advance(key, watcher.reader, kept.number)
            return
        full: list[Watcher] = []
        for kept in self.table.after(key):
            taker = next((watcher for watcher in watchers if watcher.wants(kept.message)), None)
            if taker is None or taker in full:
                continue
            if await taker.take(kept):
                await self.table.take(key, kept.number)
            else:
                full.append(taker)

    async def remove(self, session_id: str) -> None:
        """A session is closed for good."""
        await self.table.remove(session_id)
        for key in [key for key in self._changed if key.scope == session_id]:
            self._ring(key)
            self._changed.pop(key, None)
            self._locks.pop(key, None)

    def _lock(self, key: Key) -> asyncio.Lock:
        return self._locks.setdefault(key, asyncio.Lock())

    def _ring(self, key: Key) -> None:
        changed = self._changed.pop(key, None)
        if changed is not None:
            changed.set()


class SessionChannels:
    """Implements :class:`~handrail.contract.arrivals.Channels` for one session."""

    def __init__(self, switchboard: Switchboard, session_id: str, top: str, agent: str) -> None:
        """:param top: the session at the top of its tree"""
        self._switchboard = switchboard
        self._session_id = session_id
        self._top = top
        self._agent = agent

    async def send(
        self, channel: str, text: str, *, kind: ChannelKind | None = None, data: Mapping[str, Any] | None = None
    ) -> int:
        return await self._switchboard.send(self.key(channel), self._agent, text, kind, data)

    async def receive(self, channel: str, *, timeout_ms: int, sender: str | None = None) -> Received:
        return await self._switchboard.receive(self.key(channel), self._session_id, timeout_ms, sender)

    def key(self, channel: str) -> Key:
        """
        :raises ToolError: ``invalid_input`` for what is no name
        """
        if not _NAME.match(channel):
            text = f"{channel[:80]!r} is no channel: letters, digits and . _ -, up to 64, after {SHARED!r} where all the workspace shares it"
            raise ToolError(text, kind="invalid_input")
        return Key("", channel.removeprefix(SHARED)) if channel.startswith(SHARED) else Key(self._top, channel)
