"""Channels between sessions, triggers, and notifications to an agent: the Protocols that tools and sessions use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from handrail.contract.errors import ToolError
from handrail.contract.struct import Struct
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.contract.tool.spec import ToolSpec

_NAME = compile_regex_lazily(r"(?:shared/)?[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z")
SHARED_PREFIX = "shared/"
"""The prefix of a channel that the whole workspace shares. Any other channel belongs to one session and its
sub-agents."""
CHANNEL_CAPACITY = 200
"""Messages that a channel keeps: unread ones of a queue, the latest ones of a broadcast."""

ChannelKind = Literal["queue", "broadcast"]
"""A queue delivers each message to one reader, a broadcast to every reader."""


def check_channel_name(name: str) -> None:
    """Check that ``name`` is a valid name of a channel.

    :raises ToolError: ``invalid_input`` otherwise
    """
    if not _NAME.match(name):
        text = f"Invalid channel name: {name[:80]!r}. Use up to 64 letters, digits, '.', '_' and '-'; begin with {SHARED_PREFIX!r} for a channel of the whole workspace."
        raise ToolError(text, kind="invalid_input")


class ChannelMessage(Struct, frozen=True):
    """A message on a channel, with the agent that sent it. ``at_ns`` is wall-clock time."""

    channel: str
    sender: str
    text: str
    at_ns: int
    data: Mapping[str, Any] | None = None


class ChannelWaitResult(Struct, frozen=True):
    """The result of a wait for a message.

    :param missed: how many messages of a broadcast were dropped before the session could read them
    """

    message: ChannelMessage | None
    missed: int = 0


class ChannelService(Protocol):
    """The named channels between sessions, as one session sees them."""

    async def send(
        self, channel: str, text: str, *, kind: ChannelKind | None = None, data: Mapping[str, Any] | None = None
    ) -> int:
        """Send a message and return how many messages the channel now holds for its readers.

        :param kind: the kind of a new channel; a queue if left out
        :raises ToolError: ``limit`` for a full queue; ``conflict`` for a channel of the other kind; ``invalid_input``
            for an invalid name
        """
        ...

    async def receive(self, channel: str, *, timeout_ms: int, sender: str | None = None) -> ChannelWaitResult:
        """Wait for the oldest message that this session has not read; None if the time expires first.

        :param sender: accept messages of this agent only
        """
        ...


class SessionChannelService(ChannelService, Protocol):
    """The channels of a session, for all of its calls."""

    def for_call(self, call_id: str) -> ChannelService:
        """Return the channels for one call.

        A message that the call receives counts as read only if the call succeeds. Otherwise it is delivered again.
        """
        ...


TriggerKind = Literal["timer", "schedule", "channel", "class"]


class Trigger(Struct, frozen=True):
    """A trigger that notifies a session at a time, or when a message arrives. Times are wall-clock nanoseconds.

    :param name: unique in the session
    :param prompt: the text that the agent receives when the trigger fires
    :param interval_ns: for a timer: the interval
    :param is_one_shot: whether the trigger is removed after it has fired
    :param cron: for a schedule: five fields, in the local time of the machine
    :param channel: the watched channel; its messages go to this trigger
    :param sender: watch only messages of this agent
    :param next_ns: when it fires next; None for a trigger that waits for something else than a time
    :param tool: the tool that defines the class of the trigger
    :param arguments: of that tool
    :param position: where its next wait continues; JSON-able
    :param problem: why the trigger does not wait any more, or not now
    """

    name: str
    session_id: str
    kind: TriggerKind
    prompt: str
    created_ns: int
    interval_ns: int | None = None
    is_one_shot: bool = False
    cron: str | None = None
    channel: str | None = None
    sender: str | None = None
    next_ns: int | None = None
    fire_count: int = 0
    tool: str | None = None
    arguments: Mapping[str, Any] | None = None
    position: Any = None
    problem: str | None = None


class CustomTriggerTool(Protocol):
    """A tool that adds triggers of another class; see :class:`handrail.contract.tool.trigger_tools.TriggerTool`."""

    spec: ToolSpec

    @property
    def is_scheduled(self) -> bool: ...
    def next_ns(self, arguments: Mapping[str, Any], now_ns: int) -> int | None: ...
    async def wait(self, context: Any) -> Any: ...


class TriggerService(Protocol):
    """The triggers of one session."""

    async def add_timer(
        self, every_ms: int, prompt: str, *, name: str | None = None, once: bool = False, immediate: bool = False
    ) -> Trigger:
        """Add a timer.

        :param immediate: whether it fires at once, too
        :raises ToolError: ``conflict`` for a name that is in use; ``limit`` if the session has too many triggers
        """
        ...

    async def add_schedule(self, cron: str, prompt: str, *, name: str | None = None) -> Trigger:
        """Add a schedule.

        :raises ToolError: as :meth:`add_timer`; ``invalid_input`` for a text that is not a cron expression, or for a time
            that never comes
        """
        ...

    async def watch_channel(
        self, channel: str, prompt: str, *, name: str | None = None, sender: str | None = None
    ) -> Trigger:
        """Add a trigger that fires for each message on a channel.

        :raises ToolError: as :meth:`add_timer`
        """
        ...

    async def add_custom_trigger(
        self, of: CustomTriggerTool, arguments: Mapping[str, Any], prompt: str, *, name: str | None = None
    ) -> Trigger:
        """Add a trigger of a class that a tool defines.

        :raises ToolError: as :meth:`add_timer`; ``invalid_input`` for a trigger that never fires; ``failed`` if its class
            cannot compute a time
        """
        ...

    async def list_triggers(self) -> Sequence[Trigger]:
        """Return the triggers of the session."""
        ...

    async def remove(self, name: str) -> Trigger:
        """Remove a trigger and return it.

        :raises ToolError: ``invalid_input`` for an unknown name, with the existing ones
        """
        ...


# Notifications to a session's agent about events outside its calls, such as a finished job or a fired trigger.
#
# A notification is durable and is delivered once. It is data for the model, not an order of the user: the code that shows
# it to a model also says so, and names its origin.

NotificationKind = Literal["job", "agent", "trigger", "message"]
"""The cause of a notification: a job ended, a sub-agent ended, a trigger fired, or a message arrived on a channel."""

MAX_PENDING = 10_000
"""Notifications that may be pending in one session."""


class Notification(Struct, frozen=True):
    """One notification.

    :param id: of the delivery, unique in the workspace: the same id is delivered once only
    :param source: the job's id, the trigger's name, the channel
    :param text: as the model reads it, without secrets and with markers neutralised
    :param at_ns: wall-clock time
    :param untrusted: the origin of the text, if that is not the operator or the user
    """

    id: str
    session_id: str
    kind: NotificationKind
    source: str
    text: str
    at_ns: int
    data: Mapping[str, Any] | None = None
    untrusted: str | None = None


class NotificationQueue(Protocol):
    """The pending notifications of one session, for the code that runs its agent."""

    async def list_pending(self) -> Sequence[Notification]:
        """Return the notifications that are not delivered, in order of arrival.

        Of very many it returns the first ones.

        :raises LogUnavailable: if the store cannot be read
        """
        ...

    async def mark_delivered(self, ids: Sequence[str]) -> None:
        """Mark notifications as delivered: they are part of the conversation now.

        Durable on return. A repeated call has no further effect.

        :raises LogUnavailable: if that cannot be made durable
        """

    async def wait_until_pending(self) -> None:
        """Wait until a notification is pending. Return at once if there is one."""

    async def wait_for_next(self) -> bool:
        """Wait until a notification is pending and return True.

        Return False as soon as none is pending, and nothing that runs in this session will post one.
        """
        ...


class NotificationSink(NotificationQueue, Protocol):
    """The notifications of a session, for code that posts them."""

    async def post(self, notice: Notification) -> None:
        """Store a notification for any session.

        Durable on return. A notification with an id that was stored before is not stored again.

        :raises UsageError: if :data:`MAX_PENDING` are pending in that session
        :raises LogUnavailable: if it cannot be made durable
        """

    def expect_from(self, source: str) -> None:
        """Announce a source that will post a notification, such as a job by its id.

        An agent that runs until it is idle waits for it.
        """

    def stop_expecting(self, source: str) -> None:
        """Withdraw :meth:`expect_from` for a source that posts nothing after all.

        A source that has posted needs no call of this method.
        """
