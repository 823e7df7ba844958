"""The events of a session as an iteration, within bounds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from handrail.contract.errors import UsageError
from handrail.contract.events import Event

PASSING = frozenset({"progress", "log"})
"""Kinds of which a program may say without end, and that a reader can do without."""
_MAX_PROGRESS_WAITING = 10_000
_MAX_EVENTS_WAITING = 20_000


class Watched(Protocol):
    """The part of a session that is needed here."""

    @property
    def id(self) -> str: ...
    @property
    def closed(self) -> bool: ...
    def watch(self, listener: Callable[[Event], None]) -> Callable[[], None]: ...


class EventQueue:
    """What one reader of events has still to read, within bounds."""

    def __init__(self) -> None:
        self._waiting: asyncio.Queue[Event | None] = asyncio.Queue()
        self.overrun = False

    def put(self, event: Event) -> None:
        behind = self._waiting.qsize()
        if self.overrun or (event.kind in PASSING and behind >= _MAX_PROGRESS_WAITING):
            return
        if behind >= _MAX_EVENTS_WAITING:
            self.overrun = True
            self.end()
        else:
            self._waiting.put_nowait(event)

    def end(self) -> None:
        self._waiting.put_nowait(None)

    async def get(self) -> Event | None:
        return await self._waiting.get()


async def events_of(session: Watched, readers: list[EventQueue]) -> AsyncIterator[Event]:
    """See :meth:`handrail.contract.session.Session.events`.

    :param readers: where the session finds the queues that it ends
    """
    if session.closed:
        return
    queue = EventQueue()
    stop = session.watch(queue.put)
    readers.append(queue)
    try:
        while (event := await queue.get()) is not None:
            if queue.overrun:
                stop()
            yield event
        if queue.overrun:
            raise UsageError(
                f"this reader of the events of session {session.id} fell {_MAX_EVENTS_WAITING:,} behind; read faster, "
                "or use watch() and keep only what you need"
            )
    finally:
        stop()
        readers.remove(queue)
