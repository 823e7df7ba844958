"""Channels between sessions, triggers, and notifications to an agent: the Protocols that tools and sessions use."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from handrail.contract.errors import ToolError
from handrail.contract.tool.spec import ToolSpec

_NAME = re.compile(r"(?:shared/)?[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z")
SHARED = "shared/"
"""Before the name of a channel: it is the whole workspace's. Any other is its session's and its sub-agents'."""
HISTORY = 200
"""Messages that a channel keeps: of a queue those nobody has read, of a broadcast the last ones."""

ChannelKind = Literal["queue", "broadcast"]
"""Each message for one reader, or for each of them."""


def check_channel(name: str) -> None:
    """Check that ``name`` can be a channel's.

    :raises ToolError: ``invalid_input`` otherwise
    """
    if not _NAME.match(name):
        text = f"{name[:80]!r} is no channel: letters, digits and . _ -, up to 64, after {SHARED!r} where all the workspace shares it"
        raise ToolError(text, kind="invalid_input")


@dataclass(frozen=True, slots=True)
class ChannelMessage:
    """What was sent over a channel, by which agent. ``at_ns`` is wall-clock time."""

    channel: str
    sender: str
    text: str
    at_ns: int
    data: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Received:
    """What a wait came to.

    :param missed: how many messages of a broadcast were dropped before this one could be read
    """

    message: ChannelMessage | None
    missed: int = 0


class Channels(Protocol):
    """Named channels between sessions, as one session sees them."""

    async def send(
        self, channel: str, text: str, *, kind: ChannelKind | None = None, data: Mapping[str, Any] | None = None
    ) -> int:
        """Send, and give how many messages the channel then holds for its readers.

        :param kind: of a channel that is not there yet; a queue if left out
        :raises ToolError: ``limit`` for a queue that is full; ``conflict`` for a channel of the other kind; ``invalid_input``
            for a name that is none
        """
        ...

    async def receive(self, channel: str, *, timeout_ms: int, sender: str | None = None) -> Received:
        """The oldest message that this session has not read, once there is one; None for it when the time is over.

        :param sender: take only what this agent sent
        """
        ...


class SessionDoor(Channels, Protocol):
    """The same, for all calls of a session."""

    def of_call(self, call_id: str) -> Channels:
        """As one call has it: what that receives is read once it has gone well, and waits again if it has not."""
        ...


TriggerKind = Literal["timer", "schedule", "channel", "class"]


@dataclass(frozen=True, slots=True)
class Trigger:
    """What tells a session something when its time, or its message, comes. Times are wall-clock nanoseconds.

    :param name: within the session
    :param prompt: what the agent is told when it fires
    :param every_ns: of a timer: between two firings
    :param once: it is gone after it has fired
    :param cron: of a schedule: five fields, in the machine's local time
    :param channel: that is watched; its messages go to this trigger
    :param sender: watch only what this agent sends
    :param next_ns: when it fires next; None for one that waits for something else than a time
    :param tool: the tool whose class of triggers it is of
    :param arguments: of that
    :param position: where its next wait goes on from; JSON-able
    :param fault: why it waits no more, or not now
    """

    name: str
    session_id: str
    kind: TriggerKind
    prompt: str
    created_ns: int
    every_ns: int | None = None
    once: bool = False
    cron: str | None = None
    channel: str | None = None
    sender: str | None = None
    next_ns: int | None = None
    fired: int = 0
    tool: str | None = None
    arguments: Mapping[str, Any] | None = None
    position: Any = None
    fault: str | None = None


class TriggerClass(Protocol):
    """A tool that adds triggers of another class; see :class:`handrail.contract.tool.triggers.TriggerTool`."""

    spec: ToolSpec

    @property
    def by_time(self) -> bool: ...
    def next_ns(self, arguments: Mapping[str, Any], now_ns: int) -> int | None: ...
    async def wait(self, waiting: Any) -> Any: ...


class Triggers(Protocol):
    """The triggers of one session."""

    async def timer(
        self, every_ms: int, prompt: str, *, name: str | None = None, once: bool = False, immediate: bool = False
    ) -> Trigger:
        """:raises ToolError: ``conflict`` for a name that is taken; ``limit`` for more than a session may have"""
        ...

    async def schedule(self, cron: str, prompt: str, *, name: str | None = None) -> Trigger:
        """:raises ToolError: also ``invalid_input`` for a text that is no cron expression, or one that never comes"""
        ...

    async def watch(
        self, channel: str, prompt: str, *, name: str | None = None, sender: str | None = None
    ) -> Trigger: ...

    async def add(
        self, of: TriggerClass, arguments: Mapping[str, Any], prompt: str, *, name: str | None = None
    ) -> Trigger:
        """Add a trigger of a class that a tool is.

        :raises ToolError: also ``invalid_input`` for one that never fires; ``failed`` where its class cannot say when
        """
        ...

    async def list(self) -> Sequence[Trigger]: ...

    async def remove(self, name: str) -> Trigger:
        """:raises ToolError: ``invalid_input`` for a name that there is not, with those there are"""
        ...


# Notifications to a session's agent about events outside its calls, such as a finished job or a fired trigger.
#
# A notification is durable and is delivered once. It is data for the model, not an order of the user: the code that shows
# it to a model also says so, and names its origin.

NoticeKind = Literal["job", "agent", "trigger", "message"]
"""A job ended; a sub-agent did; a trigger fired; something came over a channel."""

MAX_PENDING = 10_000
"""Notices that may wait in one session."""


@dataclass(frozen=True, slots=True)
class Notice:
    """One thing to be told.

    :param id: of the delivery, unique in the workspace: the same one twice is told once
    :param source: the job's id, the trigger's name, the channel
    :param text: as its model reads it, with no secret in it and nothing that could act
    :param at_ns: wall-clock time
    :param untrusted: where the text comes from, where that is not the operator or the user
    """

    id: str
    session_id: str
    kind: NoticeKind
    source: str
    text: str
    at_ns: int
    data: Mapping[str, Any] | None = None
    untrusted: str | None = None


class Notices(Protocol):
    """What waits to be told in one session, for whoever runs its agent."""

    async def pending(self) -> Sequence[Notice]:
        """Those that nobody has taken, in the order in which they came; of very many the first.

        :raises LogUnavailable: when the store cannot tell
        """
        ...

    async def take(self, ids: Sequence[str]) -> None:
        """They are part of the conversation now. Durable on return; again is nothing.

        :raises LogUnavailable: when that cannot be made durable
        """
        ...

    async def arrived(self) -> None:
        """Return when there is one that nobody has taken; at once where there is."""
        ...

    async def awaited(self) -> bool:
        """Likewise, and give True; give False as soon as there is none, and nothing runs in this session that will leave
        one."""
        ...


class NoticeBox(Notices, Protocol):
    """The same, as those see it who have something to tell."""

    async def post(self, notice: Notice) -> None:
        """Leave ``notice``, whichever session it is for. Durable on return; one that was left before is not left again.

        :raises UsageError: when :data:`MAX_PENDING` wait in that session
        :raises LogUnavailable: when it cannot be made durable
        """
        ...

    def expect(self, source: str) -> None:
        """Something runs that will leave one, such as a job by its id: an agent that works until it is idle waits for it."""
        ...

    def forget(self, source: str) -> None:
        """It will not after all. That it has left one needs no word."""
        ...
