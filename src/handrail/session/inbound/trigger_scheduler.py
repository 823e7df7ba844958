"""Triggers of a workspace: one clock for all, channel watches, and the notifications that they send."""

from __future__ import annotations

import asyncio
import heapq
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any, NamedTuple, cast

from handrail.arbiter.output.secret_redaction import SecretRedactor
from handrail.contract.errors import LogUnavailable, ToolError, UsageError
from handrail.contract.services.channels_and_triggers import ChannelMessage, CustomTriggerTool, Notification, Trigger
from handrail.contract.text.neutralisation import neutralise_text
from handrail.contract.tool.trigger_tools import TriggerTool, normalise_cron
from handrail.contract.tool_generation import Generation
from handrail.record.log_reader import LogReader
from handrail.session.inbound.channel_broker import (
    ChannelBroker,
    SessionChannels,
    SessionNotifications,
    WorkspaceNotifications,
)
from handrail.session.inbound.trigger_waits import TriggerId, TriggerWaiters, WaitResult, compute_next_class_firing_ns
from handrail.session.memory.meaning_comparer import EmbeddingComparer
from handrail.session.transcript_search import SessionTranscriptSearch
from handrail.store.database.sqlite_connection import map_to_log_unavailable
from handrail.store.database.workspace_database import TableWork, WorkspaceDatabase
from handrail.store.tables.inbound_tables import StoredChannelMessage, TriggerTable
from handrail.store.workspace_store import WorkspaceStore

# The next time of a trigger: by its interval, or by its cron expression in the machine's local time.
#
# Clock changes: an hourly schedule (its hour is ``*``) fires each time that the clock shows a matching time, so twice for a
# repeated hour and not at all for a skipped one. Any other schedule fires once for each matching time: at the first of two
# repeated times, and for a skipped time at the moment it would have been without the change.

SECOND_NS = 1_000_000_000
_EPOCH = datetime(1970, 1, 1)
_OFFSET_WINDOW_S = 26 * 3600
"""The seconds before and after a UTC time at which every zone is before or after a nearby clock change.

Zones are at most 14 hours ahead, and clock changes are days apart.
"""
_EVERY_HOUR = set(range(24))
UtcOffset = Callable[[int], int]
"""Returns the seconds by which clocks are ahead of UTC, at a time in seconds."""


def get_local_utc_offset(at_s: int) -> int:
    """Return the offset of the machine's time zone from UTC, in seconds."""
    return time.localtime(at_s).tm_gmtoff


def compute_next_firing_ns(trigger: Trigger, now_ns: int, zone: UtcOffset = get_local_utc_offset) -> int | None:
    """Return the time at which a trigger fires after ``now_ns``, or None if it never fires again."""
    if trigger.interval_ns is not None:
        if trigger.is_one_shot and (trigger.next_ns is None or trigger.next_ns <= now_ns):
            return None
        begun = trigger.next_ns if trigger.next_ns is not None else trigger.created_ns
        return begun + max((now_ns - begun) // trigger.interval_ns + 1, 1) * trigger.interval_ns
    if trigger.cron is not None:
        return _next_cron_ns(trigger.cron, now_ns, trigger.created_ns, zone)
    return None


def _next_cron_ns(cron: str, now_ns: int, created_ns: int, zone: UtcOffset) -> int | None:
    from cronsim import CronSim, CronSimError

    now, found = now_ns // SECOND_NS, None
    try:
        begin = now + min(zone(now - _OFFSET_WINDOW_S), zone(now), zone(now + _OFFSET_WINDOW_S))
        times = CronSim(cron, _EPOCH + timedelta(seconds=begin))
        hourly = times.hours == _EVERY_HOUR
        for shown in times:
            wall = int((shown - _EPOCH).total_seconds())
            before, after = zone(wall - _OFFSET_WINDOW_S), zone(wall + _OFFSET_WINDOW_S)
            if found is not None and wall - max(before, after) >= found:
                break
            for at in _firing_times(wall, before, after, zone, created_ns // SECOND_NS, hourly=hourly):
                if at > now and (found is None or at < found):
                    found = at
            if found is not None and before == after:
                break
    except (CronSimError, OverflowError, ValueError, OSError):
        return None
    return None if found is None else found * SECOND_NS


def _firing_times(wall: int, before: int, after: int, zone: UtcOffset, created: int, *, hourly: bool) -> list[int]:
    """Return the times at which a schedule fires for one wall-clock time, all in seconds.

    :param before: the offset from UTC before a nearby clock change
    :param after: the offset from UTC after it
    :param created: when the schedule was added; of two repeated times the second counts if the first was before that
    """
    if before == after:
        return [wall - before]
    shown = sorted({wall - ahead for ahead in (before, after) if zone(wall - ahead) == ahead})
    if hourly:
        return shown
    if not shown:
        return [wall - before]
    return shown[1:] if len(shown) > 1 and shown[0] <= created else shown[:1]


def describe_firing_cause(trigger: Trigger) -> str:
    """Describe why a trigger fired, for the notification."""
    if trigger.tool is not None:
        how = trigger.tool
    elif trigger.interval_ns is not None:
        how = "once" if trigger.is_one_shot else f"every {trigger.interval_ns / SECOND_NS:g} s"
    else:
        how = f"at {trigger.cron}"
    return f"The trigger {trigger.name} ({how}) fired"


# Triggers that watch a channel: each of its messages is sent to their session as a notification.


class ChannelTriggerWatcher:
    """A trigger that takes the messages of a channel.

    Implements :class:`~handrail.session.inbound.channel_broker.ChannelWatcher`.
    """

    def __init__(self, sink: TriggerScheduler, trigger: Trigger, channels: SessionChannels) -> None:
        assert trigger.channel is not None
        self._sink = sink
        self._trigger = trigger
        self.key = channels.resolve_key(trigger.channel)

    @property
    def reader_name(self) -> str:
        return f"trigger/{self._trigger.session_id}/{self._trigger.name}"

    def wants(self, message: ChannelMessage) -> bool:
        return self._trigger.sender in (None, message.sender)

    async def take_message(self, kept: StoredChannelMessage) -> bool:
        message = kept.message
        return await self._sink.post_firing_notification(
            self._trigger,
            f"message/{kept.number}",
            self._sink.clock(),
            about=f"A message arrived on {message.channel}, which the trigger {self._trigger.name} watches",
            message=f"{neutralise_text(message.sender)}: {neutralise_text(message.text)}",
            untrusted=f"a message of the agent {message.sender}",
        )


logger = logging.getLogger("handrail.session")

MAX_IN_SESSION = 1_000
MAX_CLASS_TRIGGERS = 100
"""The most triggers of registered classes in a session."""
MAX_PROMPT = 8 * 1024
MIN_INTERVAL_MS = 1_000
MAX_INTERVAL_MS = 366 * 24 * 3600 * 1000
_LONGEST_SLEEP_S = 60.0
"""The longest sleep, after which a changed clock or a resumed machine is noticed."""
_LATE_NS = 60 * 1_000_000_000
_RETRY_S = 5.0


class TriggerScheduler:
    """All triggers of a workspace, in the process that holds it.

    :param clock: returns wall-clock time in nanoseconds
    """

    def __init__(
        self,
        table: TriggerTable,
        notifications: WorkspaceNotifications,
        broker: ChannelBroker,
        redactor: SecretRedactor,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self.table = table
        self.clock = clock
        self._notifications = notifications
        self._broker = broker
        self._redactor = redactor
        self._triggers: dict[TriggerId, Trigger] = {}
        self._names_by_session: dict[str, dict[str, Trigger]] = {}
        self._heap: list[tuple[int, TriggerId]] = []
        self._watching: dict[TriggerId, ChannelTriggerWatcher] = {}
        self._classes: dict[TriggerId, CustomTriggerTool] = {}
        """The classes of triggers that are loaded here."""
        self._waits = TriggerWaiters(self)
        self._adding: dict[TriggerId, asyncio.Future[None]] = {}
        """The triggers that are not durable yet."""
        self._timer: asyncio.TimerHandle | None = None
        self._firing: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()
        """A lock for changes, so that a trigger that is removed while it fires is not stored again."""
        self._closed = False

    async def start_stored_triggers(self) -> None:
        """Start the stored triggers, except those of sub-agents, which ended with their process.

        Triggers that came due meanwhile fire once, with a note that they are late.
        """
        await self.table.remove_subagent_triggers()
        for trigger in self.table.list_all():
            self._store(trigger)
        await self.fire_due_triggers()

    async def aclose(self) -> None:
        """Stop firing. The triggers stay stored."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._firing is not None:
            await asyncio.wait((self._firing,))
        await self._waits.aclose()

    def get(self, id: TriggerId) -> Trigger | None:
        return self._triggers.get(id)

    def list_triggers(self, session_id: str) -> list[Trigger]:
        return list(self._names_by_session.get(session_id, {}).values())

    async def add(self, trigger: Trigger, name: str | None) -> Trigger:
        """Store a new trigger durably and return it.

        :param name: None for the next free name of its kind
        :raises ToolError: ``conflict`` if the name is in use, ``limit`` if the session has too many triggers
        """
        named = replace(
            trigger, name=self._find_free_name(trigger, name), prompt=self._redactor.redact_text(trigger.prompt)
        )
        id = (named.session_id, named.name)
        adding = self._adding[id] = asyncio.ensure_future(self._remember(named))
        adding.add_done_callback(lambda _: self._adding.pop(id))
        await asyncio.shield(adding)  # if this is cancelled, the trigger is in the list anyway, because it is durable
        return named

    async def _remember(self, trigger: Trigger) -> None:
        await self.table.put(trigger)
        self._store(trigger)
        self._set_timer()

    def _find_free_name(self, trigger: Trigger, name: str | None) -> str:
        taken = {name for session, name in self._adding if session == trigger.session_id}
        taken |= self._names_by_session.get(trigger.session_id, {}).keys()
        if len(taken) >= MAX_IN_SESSION:
            raise ToolError(
                f"The session has {MAX_IN_SESSION:,} triggers, which is the maximum. Remove one first.", kind="limit"
            )
        if trigger.tool is not None:
            of_classes = sum(
                one.tool is not None for one in self._names_by_session.get(trigger.session_id, {}).values()
            )
            if of_classes >= MAX_CLASS_TRIGGERS:
                text = f"The session has {MAX_CLASS_TRIGGERS} triggers of registered classes, which is the maximum. Remove one first."
                raise ToolError(text, kind="limit")
        if name is None:
            return next(free for n in range(1, len(taken) + 2) if (free := f"{trigger.name}-{n}") not in taken)
        if name in taken:
            text = f"Trigger {name!r} already exists. Choose another `name`, or remove that trigger first."
            raise ToolError(text, kind="conflict")
        return name

    async def remove(self, session_id: str, name: str) -> Trigger | None:
        """Remove a trigger and return it, or None if the name does not exist."""
        async with self._changing:
            trigger = self._names_by_session.get(session_id, {}).get(name)
            if trigger is not None:
                await self.table.remove(trigger)
                watch = self._watching.get((session_id, name))
                self._detach(trigger)
                if watch is not None:
                    await self._broker.table.remove_reader(watch.key, watch.reader_name)
            return trigger

    async def remove_session(self, session_id: str) -> None:
        """Remove the triggers of a session that is closed."""
        if adding := [put for (session, _), put in self._adding.items() if session == session_id]:
            await asyncio.wait(adding)
        async with self._changing:
            if triggers := self.list_triggers(session_id):
                await self.table.remove_session(session_id)
            for trigger in triggers:
                self._detach(trigger)

    async def start_channel_watch(self, trigger: Trigger, channels: SessionChannels) -> None:
        """Let a trigger that watches a channel take its messages."""
        id = (trigger.session_id, trigger.name)
        if trigger.channel is not None and id not in self._watching:
            watch = self._watching[id] = ChannelTriggerWatcher(self, trigger, channels)
            await self._broker.add_watcher(watch.key, watch)
            if self._watching.get(id) is not watch:  # removed meanwhile
                self._broker.unwatch(watch.key, watch)

    async def start_custom_trigger_wait(self, trigger: Trigger, of: CustomTriggerTool, workdir: str) -> None:
        """Let a trigger wait as its class defines. An earlier fault is cleared."""
        id = (trigger.session_id, trigger.name)
        async with self._changing:
            found, before = self._triggers.get(id), self._classes.get(id)
            if found is None:
                return
            self._classes[id] = of
            if before is of and found.problem is None:
                return
            if before is not of:
                self._waits.stop(id)  # as for triggers of an earlier process
            if found.problem is not None or (of.is_scheduled and found.next_ns is None):
                found = replace(found, problem=None)
                if of.is_scheduled and found.next_ns is None:
                    found = self._compute_next_class_time(found, self.clock())
                    if found.next_ns is found.problem is None:  # it fired for the last time without its class
                        await self.table.remove(found)
                        self._detach(found)
                        return
                await self._reschedule(found)
        if not of.is_scheduled:
            self._waits.start(id, of, workdir)
        self._set_timer()

    def is_waiting_in_process(self, trigger: Trigger) -> bool:
        """Return whether the trigger waits for something in this process."""
        return trigger.tool is None or (trigger.session_id, trigger.name) in self._classes

    async def record_wait_result(self, id: TriggerId, what: WaitResult) -> bool:
        """Record durably that a trigger has fired or failed, and return whether its session was notified."""
        async with self._changing:
            if (trigger := self._triggers.get(id)) is None:
                return True
            now, about = self.clock(), f"The trigger {trigger.name} ({trigger.tool})"
            if what.fault is not None:
                failed = f"{about} failed too often and was stopped: {what.fault}"
                await self.post_firing_notification(trigger, f"fault/{trigger.fire_count}", now, about=failed)
                await self._reschedule(replace(trigger, problem=self._redactor.redact_text(what.fault)))
                return True
            position = self._redactor.redact_json(what.position)
            after = replace(trigger, fire_count=trigger.fire_count + 1, position=position, problem=None)
            is_posted = await self.post_firing_notification(
                trigger,
                f"event/{trigger.fire_count}",
                now,
                about=f"{about} fired",
                message=neutralise_text(what.text) if what.text else None,
                untrusted=f"what {trigger.tool} has seen",
                # Stored together: the next process may see another event first and would use the same delivery id.
                along=self.table.build_remove_trigger_work(trigger)
                if what.last
                else self.table.build_store_trigger_work(after),
            )
            if is_posted:
                (self._detach if what.last else self._store)(after)
            return is_posted

    def redact(self, value: Any) -> Any:
        """Return ``value`` without registered secrets."""
        return self._redactor.redact_json(value)

    def _compute_next_class_time(self, trigger: Trigger, now: int) -> Trigger:
        """Return the trigger with the next time of its class, or with its fault if the class fails."""
        of = self._classes[trigger.session_id, trigger.name]
        try:
            return replace(trigger, next_ns=compute_next_class_firing_ns(of, trigger.arguments or {}, now))
        except ToolError as error:
            return replace(trigger, next_ns=None, problem=str(error))

    async def _reschedule(self, trigger: Trigger) -> None:
        await self.table.put(trigger)
        self._store(trigger)

    async def fire_due_triggers(self) -> None:
        """Fire the triggers that are due, once each, and set the timer for the next."""
        now, again_s = self.clock(), _RETRY_S
        try:
            while self._heap and self._heap[0][0] <= now and not self._closed:
                at, id = heapq.heappop(self._heap)
                try:
                    async with self._changing:
                        trigger = self._triggers.get(id)
                        if trigger is not None and trigger.next_ns == at:  # else removed, or moved on
                            await self._fire(trigger, at, now)
                except BaseException:  # a trigger that has not fired stays
                    heapq.heappush(self._heap, (at, id))
                    raise
            again_s = 0.0
        except LogUnavailable as error:
            logger.warning("Triggers are delayed because their notifications cannot be stored: %s", error)
        finally:
            self._set_timer(again_s)

    async def fire_due_triggers_in_task(self) -> None:
        """Fire the triggers that are due in a separate task, which a cancelled caller does not stop."""
        self._on_timer()
        if self._firing is not None:
            await asyncio.shield(self._firing)

    async def _fire(self, trigger: Trigger, at: int, now: int) -> None:
        after = self._after_firing(trigger, now)
        missed = 0
        if trigger.interval_ns is not None and not trigger.is_one_shot and now - at >= trigger.interval_ns:
            missed = (now - at) // trigger.interval_ns
        is_posted = await self.post_firing_notification(
            trigger, f"{at}", now, late=now - at > _LATE_NS, missed=missed, about=describe_firing_cause(trigger)
        )
        if after is None and is_posted:
            await self.table.remove(trigger)
            self._detach(trigger)
        elif after is None:  # the only notification, so the trigger is due until there is room
            await self._reschedule(replace(trigger, next_ns=now + _LATE_NS))
        else:
            await self._reschedule(replace(after, fire_count=trigger.fire_count + 1))
            if after.problem is not None:
                await self.post_firing_notification(
                    after, f"fault/{at}", now, about=f"The trigger {after.name} was stopped: {after.problem}"
                )

    def _after_firing(self, trigger: Trigger, now: int) -> Trigger | None:
        """Return the trigger after its firing, or None if it never fires again."""
        if trigger.tool is None:
            following = compute_next_firing_ns(trigger, now)
            return None if following is None else replace(trigger, next_ns=following)
        if not self.is_waiting_in_process(trigger):
            return replace(trigger, next_ns=None)  # until its session is opened with its class
        after = self._compute_next_class_time(trigger, now)
        return None if after.next_ns is None and after.problem is None else after

    async def post_firing_notification(
        self, trigger: Trigger, delivery: str, now: int, *, about: str, along: TableWork | None = None, **more: Any
    ) -> bool:
        """Post the notification of one firing, and return whether the session had room for it.

        :param along: a write that is stored in the same transaction
        """
        fields = {key: value for key, value in more.items() if value}
        untrusted, message = fields.pop("untrusted", None), fields.pop("message", None)
        late = " (late)" if fields.get("late") else ""
        missed = f" ({fields['missed']} firings before it were missed)" if fields.get("missed") else ""
        text = f"{about}{late}{missed}: {trigger.prompt}" + ("" if message is None else f"\n{message}")
        data = {"trigger": trigger.name, "kind": trigger.kind, **fields}
        notice = Notification(
            f"trigger/{trigger.session_id}/{trigger.name}/{trigger.created_ns}/{delivery}",
            trigger.session_id,
            "trigger",
            trigger.name,
            text,
            now,
            data,
            untrusted,
        )
        try:
            await self._notifications.store_notification(notice, *(() if along is None else (along,)))
        except UsageError as error:
            logger.warning("Trigger %s fired, but its notification was not posted: %s", trigger.name, error)
            return False
        return True

    def _store(self, trigger: Trigger) -> None:
        id = (trigger.session_id, trigger.name)
        self._triggers[id] = trigger
        self._names_by_session.setdefault(trigger.session_id, {})[trigger.name] = trigger
        if trigger.next_ns is not None:
            heapq.heappush(self._heap, (trigger.next_ns, id))

    def _detach(self, trigger: Trigger) -> None:
        id = (trigger.session_id, trigger.name)
        self._triggers.pop(id, None)
        named = self._names_by_session.get(trigger.session_id, {})
        named.pop(trigger.name, None)
        if not named:
            self._names_by_session.pop(trigger.session_id, None)
        if (watch := self._watching.pop(id, None)) is not None:
            self._broker.unwatch(watch.key, watch)
        self._classes.pop(id, None)
        self._waits.stop(id)

    def _set_timer(self, at_least_s: float = 0.0) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._heap and (
            (found := self._triggers.get(self._heap[0][1])) is None or found.next_ns != self._heap[0][0]
        ):
            heapq.heappop(self._heap)  # removed, or moved on
        if self._heap and not self._closed:
            wait_s = min(max((self._heap[0][0] - self.clock()) / SECOND_NS, at_least_s), _LONGEST_SLEEP_S)
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._on_timer)

    def _on_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._firing is None or self._firing.done():
            self._firing = asyncio.get_running_loop().create_task(self.fire_due_triggers())


class SessionTriggers:
    """The triggers of one session.

    Implements :class:`~handrail.contract.services.channels_and_triggers.TriggerService`.
    """

    def __init__(
        self,
        scheduler: TriggerScheduler,
        session_id: str,
        channels: SessionChannels,
        workdir: str = "",
        find: Callable[[str], CustomTriggerTool | None] = lambda _: None,
    ) -> None:
        """Create the triggers of a session.

        :param find: returns the class of triggers with a tool's id
        """
        self._find = find
        self._workdir = workdir
        self._scheduler = scheduler
        self._session_id = session_id
        self._channels = channels

    async def add_timer(
        self, every_ms: int, prompt: str, *, name: str | None = None, once: bool = False, immediate: bool = False
    ) -> Trigger:
        if not MIN_INTERVAL_MS <= every_ms <= MAX_INTERVAL_MS:
            text = f"The interval is invalid: {every_ms:,} ms. Use {MIN_INTERVAL_MS:,} to {MAX_INTERVAL_MS:,} ms (366 days)."
            raise ToolError(text, kind="invalid_input")
        now = self._scheduler.clock()
        every = every_ms * 1_000_000
        made = Trigger(
            "timer", self._session_id, "timer", _check_prompt(prompt), now, interval_ns=every, is_one_shot=once
        )
        made = await self._scheduler.add(replace(made, next_ns=now if immediate else now + every), name)
        if immediate:
            await self._scheduler.fire_due_triggers_in_task()
        return made

    async def add_schedule(self, cron: str, prompt: str, *, name: str | None = None) -> Trigger:
        now = self._scheduler.clock()
        made = Trigger("schedule", self._session_id, "schedule", _check_prompt(prompt), now, cron=normalise_cron(cron))
        return await self._scheduler.add(replace(made, next_ns=compute_next_firing_ns(made, now)), name)

    async def watch_channel(
        self, channel: str, prompt: str, *, name: str | None = None, sender: str | None = None
    ) -> Trigger:
        self._channels.resolve_key(channel)
        now = self._scheduler.clock()
        made = Trigger("watch", self._session_id, "channel", _check_prompt(prompt), now, channel=channel, sender=sender)
        made = await self._scheduler.add(made, name)
        await self._scheduler.start_channel_watch(made, self._channels)
        return made

    async def add_custom_trigger(
        self, of: CustomTriggerTool, arguments: Mapping[str, Any], prompt: str, *, name: str | None = None
    ) -> Trigger:
        now, tool = self._scheduler.clock(), of.spec.id
        at = compute_next_class_firing_ns(of, arguments, now) if of.is_scheduled else None
        if of.is_scheduled and at is None:
            text = f"The trigger was not added: with {tool} it would never fire. Change the arguments."
            raise ToolError(text, kind="invalid_input")
        own = tool.rpartition(".")[2].removeprefix("add_") or "trigger"
        kept = self._scheduler.redact(dict(arguments))
        made = Trigger(
            own, self._session_id, "class", _check_prompt(prompt), now, next_ns=at, tool=tool, arguments=kept
        )
        made = await self._scheduler.add(made, name)
        await self._scheduler.start_custom_trigger_wait(made, of, self._workdir)
        return made

    async def list_triggers(self) -> Sequence[Trigger]:
        found = sorted(
            self._scheduler.list_triggers(self._session_id), key=lambda trigger: (trigger.created_ns, trigger.name)
        )
        return [
            trigger if self._scheduler.is_waiting_in_process(trigger) else _with_unknown_class(trigger)
            for trigger in found
        ]

    async def remove(self, name: str) -> Trigger:
        if (found := await self._scheduler.remove(self._session_id, name)) is None:
            there = (
                ", ".join(sorted(trigger.name for trigger in self._scheduler.list_triggers(self._session_id))[:20])
                or "none"
            )
            text = f"Trigger {name[:80]!r} does not exist in this session. Triggers: {there}."
            raise ToolError(text, kind="invalid_input")
        return found

    async def resume(self) -> None:
        """Resume the triggers of a session that is open again: channel watches and waits of classes."""
        for trigger in self._scheduler.list_triggers(self._session_id):
            await self._scheduler.start_channel_watch(trigger, self._channels)
            if trigger.tool is not None and (of := self._find(trigger.tool)) is not None:
                await self._scheduler.start_custom_trigger_wait(trigger, of, self._workdir)


def _with_unknown_class(trigger: Trigger) -> Trigger:
    fault = f"Tool {trigger.tool} is not available. The trigger continues when the session is opened with that tool."
    return replace(trigger, problem=fault)


def _check_prompt(text: str) -> str:
    if len(text) > MAX_PROMPT:
        text = f"`prompt` has {len(text):,} characters. The maximum is {MAX_PROMPT:,}. Write details to a file and name it."
        raise ToolError(text, kind="invalid_input")
    return text


# All arrivals of a workspace's sessions: notifications, channels and triggers.


class SessionInboundServices(NamedTuple):
    """The services of one session for events from outside its turns."""

    notifications: SessionNotifications
    channels: SessionChannels
    triggers: SessionTriggers
    transcript: SessionTranscriptSearch


class WorkspaceInboundServices:
    """The notifications, channels and triggers of all sessions, in the process that holds the workspace."""

    def __init__(
        self,
        store: WorkspaceStore,
        redactor: SecretRedactor,
        clock: Callable[[], int] = time.time_ns,
        comparer: EmbeddingComparer | None = None,
    ) -> None:
        self._comparer = comparer
        self.notifications = WorkspaceNotifications(store.notifications, redactor)
        self.channels = ChannelBroker(store.channels, redactor, clock, partial(_call_succeeded, store.database))
        self.triggers = TriggerScheduler(store.triggers, self.notifications, self.channels, redactor, clock)
        self._database = store.database
        self._is_started = False
        self._start_lock = asyncio.Lock()

    def for_session(
        self, session_id: str, root_id: str, agent: str, workdir: str, current: Callable[[], Generation]
    ) -> SessionInboundServices:
        """Return the services for a session that is about to be open, until :meth:`release_session`.

        :param root_id: the session at the top of its tree
        :param current: returns its current tools
        """
        channels = SessionChannels(self.channels, session_id, root_id, agent)
        triggers = SessionTriggers(self.triggers, session_id, channels, workdir, partial(_find_trigger_class, current))
        transcript = SessionTranscriptSearch(session_id, self._database, self._comparer)
        return SessionInboundServices(self.notifications.attach_session(session_id), channels, triggers, transcript)

    async def resume_session(self, triggers: SessionTriggers) -> None:
        """Resume the triggers of a session that is open. The first session starts the triggers of all."""
        await self._start()
        await triggers.resume()

    async def _start(self) -> None:
        """Start the triggers of all sessions. If this is cancelled, the next caller tries again."""
        async with self._start_lock:
            if not self._is_started:
                await self.triggers.start_stored_triggers()
                self._is_started = True

    def release_session(self, session_id: str) -> None:
        """Release a session that is no longer open. Its pending notifications stay stored."""
        self.notifications.release_session(session_id)

    async def remove_triggers_of_subagent(self, session_id: str) -> None:
        """Remove the triggers of a sub-agent that has ended, so that they take no messages of others."""
        for trigger in self.triggers.list_triggers(session_id):
            await self.triggers.remove(session_id, trigger.name)
        await self.triggers.remove_session(session_id)  # those that a cancelled call was adding meanwhile

    async def remove_triggers_and_channels(self, session_id: str) -> None:
        await self.triggers.remove_session(session_id)
        await self.channels.remove_session(session_id)

    async def aclose(self) -> None:
        await self.triggers.aclose()
        await self.channels.aclose()


def _find_trigger_class(current: Callable[[], Generation], tool_id: str) -> TriggerTool | None:
    """Return the class of triggers that a session's tool is, or None if it is not available."""
    entry = current().entries.get(tool_id)
    return (
        entry.tool
        if entry is not None and entry.unavailable_reason is None and isinstance(entry.tool, TriggerTool)
        else None
    )


def _call_succeeded(database: WorkspaceDatabase, call_id: str) -> bool | None:
    """Return whether a call succeeded, by the log; None if the log does not say."""
    with map_to_log_unavailable(database.path):
        outcome = LogReader(database.shared_read_connection).find_outcome(call_id)
    if outcome is None:
        return None
    result: Any = (outcome.body or {}).get("result")
    return outcome.kind == "committed" and not (isinstance(result, dict) and cast("Any", result).get("type") == "error")
