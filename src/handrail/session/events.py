"""The events of a session as a bounded iteration, and events about changed tools, resources and prompts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from handrail.arbiter.call import Lane
from handrail.arbiter.offers import tell
from handrail.contract.call import Event
from handrail.contract.errors import UsageError
from handrail.contract.generation import Generation
from handrail.contract.session import Session

PASSING = frozenset({"progress", "log"})
"""Event kinds that a program may send without limit, and that a reader can miss."""
_MAX_PROGRESS_WAITING = 10_000
_MAX_EVENTS_WAITING = 20_000


class EventQueue:
    """A bounded queue of the events that one reader has still to read."""

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


async def events_of(session: Session, readers: list[EventQueue]) -> AsyncIterator[Event]:
    """Iterate over the events of ``session``, through a queue with bounds.

    :param readers: the list in which the session finds the queues to end
    :raises UsageError: if the reader fell too far behind, after the events up to that point
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
                f"The reader of the events of session {session.id} fell {_MAX_EVENTS_WAITING:,} events behind. "
                "Read faster, or use watch() and keep only what you need."
            )
    finally:
        stop()
        readers.remove(queue)


# Change events, in addition to those of calls: changes of the tools, resources and prompts that a session has or shows.

Watchers = list[Callable[[Generation], None]]


class News:
    """A sender of the change events of one session.

    Changes in one step of the event loop give one event, sent after all other listeners have seen them.
    """

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._told: dict[str, Any] | None = None
        self._looking: set[asyncio.Task[None]] = set()
        self._watchers: list[Watchers] = []
        self.when_brought: Callable[[tuple[str, ...]], None] | None = None
        """Called at once with the steps by which the active set has changed."""
        lane.catalog.changed = self._brought

    def follow(self, watchers: Watchers) -> None:
        """Watch the new generations of the session's tools."""
        watchers.append(self._published)
        self._watchers.append(watchers)

    def view_changed(self) -> None:
        """Send an event, because another interaction has started."""
        self._soon({})

    def end(self) -> None:
        for watchers in self._watchers:
            if self._published in watchers:
                watchers.remove(self._published)
        self._watchers.clear()
        self._told = None
        for task in self._looking:
            task.cancel()

    def _published(self, generation: Generation) -> None:
        self._soon({"generation": generation.number})
        if (subscribed := self._lane.subscribed) is not None:
            task = asyncio.get_running_loop().create_task(subscribed.look_again(generation.offerings))
            self._looking.add(task)
            task.add_done_callback(self._looking.discard)

    def _brought(self, steps: tuple[str, ...], seen: bool) -> None:
        if self.when_brought is not None:
            self.when_brought(steps)
        if seen:
            self._soon({})

    def _soon(self, what: dict[str, Any]) -> None:
        if self._told is None:
            asyncio.get_running_loop().call_soon(self._tell)
            self._told = {}
        self._told |= what

    def _tell(self) -> None:
        told, self._told = self._told, None
        if told is not None and self._lane.closed is None:
            tell(self._lane, "offers-changed", told)
