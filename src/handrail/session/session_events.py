"""The events of a session as a bounded iteration, and events about changed tools, resources and prompts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from handrail.arbiter.call_state import Lane
from handrail.arbiter.resource_access import emit_session_event
from handrail.contract.calls_and_results import Event
from handrail.contract.errors import UsageError
from handrail.contract.permission_modes import Mode
from handrail.contract.session_protocols import Session
from handrail.contract.tool_generation import Generation

DROPPABLE_KINDS = frozenset({"progress", "log"})
"""Event kinds that a program may send without limit, and that a reader can miss."""
_MAX_PROGRESS_WAITING = 10_000
_MAX_EVENTS_WAITING = 20_000


class EventQueue:
    """A bounded queue of the events that one reader has still to read."""

    def __init__(self) -> None:
        self._waiting: asyncio.Queue[Event | None] = asyncio.Queue()
        self.is_overrun = False

    def put(self, event: Event) -> None:
        behind = self._waiting.qsize()
        if self.is_overrun or (event.kind in DROPPABLE_KINDS and behind >= _MAX_PROGRESS_WAITING):
            return
        if behind >= _MAX_EVENTS_WAITING:
            self.is_overrun = True
            self.end()
        else:
            self._waiting.put_nowait(event)

    def end(self) -> None:
        self._waiting.put_nowait(None)

    async def get(self) -> Event | None:
        return await self._waiting.get()


Listener = TypeVar("Listener")


def add_listener(listeners: list[Listener], listener: Listener) -> Callable[[], None]:
    """Add a listener to a list, and return a function that removes it."""
    listeners.append(listener)

    def remove() -> None:
        if listener in listeners:
            listeners.remove(listener)

    return remove


async def iterate_events(session: Session, readers: list[EventQueue]) -> AsyncIterator[Event]:
    """Iterate over the events of ``session``, through a queue with bounds.

    :param readers: the list in which the session finds the queues to end
    :raises UsageError: if the reader fell too far behind, after the events up to that point
    """
    if session.is_closed:
        return
    queue = EventQueue()
    stop = session.watch_events(queue.put)
    readers.append(queue)
    try:
        while (event := await queue.get()) is not None:
            if queue.is_overrun:
                stop()
            yield event
        if queue.is_overrun:
            raise UsageError(
                f"The reader of the events of session {session.id} fell {_MAX_EVENTS_WAITING:,} events behind. "
                "Read faster, or use watch() and keep only what you need."
            )
    finally:
        stop()
        readers.remove(queue)


# Change events, in addition to those of calls: changes of the tools, resources and prompts that a session has or shows.

GenerationWatchers = list[Callable[[Generation], None]]


class ChangeNotifier:
    """A sender of the change events of one session.

    Changes in one step of the event loop give one event, sent after all other listeners have seen them.
    """

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._pending: dict[str, Any] | None = None
        self._refresh_tasks: set[asyncio.Task[None]] = set()
        self._watchers: list[GenerationWatchers] = []
        self.on_tools_loaded: Callable[[tuple[str, ...]], None] | None = None
        """Called at once with the steps by which the active set has changed."""
        self.on_mode_changed: Callable[[Mode], None] | None = None
        """Called at once with each new mode."""
        self.record_mode: Callable[[Mode, Mode], None] | None = None
        """Stores each new mode, with the mode before it."""
        lane.catalog.on_change = self._on_active_set_changed
        lane.on_mode_changed = self._on_mode_changed

    def watch_new_generations(self, watchers: GenerationWatchers) -> None:
        """Watch the new generations of the session's tools."""
        watchers.append(self._on_generation)
        self._watchers.append(watchers)

    def send_interaction_change(self) -> None:
        """Send an event, because another interaction has started."""
        self._schedule({})

    def end(self) -> None:
        for watchers in self._watchers:
            if self._on_generation in watchers:
                watchers.remove(self._on_generation)
        self._watchers.clear()
        self._pending = None
        for task in self._refresh_tasks:
            task.cancel()

    def _on_generation(self, generation: Generation) -> None:
        self._schedule({"generation": generation.number})
        if (subscribed := self._lane.subscriptions) is not None:
            task = asyncio.get_running_loop().create_task(
                subscribed.poll_and_report_changed_resources(generation.resource_providers)
            )
            self._refresh_tasks.add(task)
            task.add_done_callback(self._refresh_tasks.discard)

    def _on_active_set_changed(self, steps: tuple[str, ...], seen: bool) -> None:
        if self.on_tools_loaded is not None:
            self.on_tools_loaded(steps)
        if seen:
            self._schedule({})

    def _on_mode_changed(self, mode: Mode, before: Mode) -> None:
        if self.on_mode_changed is not None:
            self.on_mode_changed(mode)
        if self.record_mode is not None:
            self.record_mode(mode, before)
        emit_session_event(self._lane, "mode-changed", {"mode": mode, "previous_mode": before})

    def _schedule(self, what: dict[str, Any]) -> None:
        if self._pending is None:
            asyncio.get_running_loop().call_soon(self._emit)
            self._pending = {}
        self._pending |= what

    def _emit(self) -> None:
        pending_events, self._pending = self._pending, None
        if pending_events is not None and self._lane.closed_reason is None:
            emit_session_event(self._lane, "list-changed", pending_events)
