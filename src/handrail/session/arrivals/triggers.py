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
from typing import Any, NamedTuple, Protocol, cast

from handrail.arbiter.output.redaction import Redactor
from handrail.contract.doors.channels import ChannelMessage, Notice, Trigger, TriggerClass
from handrail.contract.errors import LogUnavailable, ToolError, UsageError
from handrail.contract.generation import Generation
from handrail.contract.text.neutral import neutralised
from handrail.contract.tool.triggers import TriggerTool, plain_cron
from handrail.record.reading import LogReader
from handrail.session.arrivals.channels import Noticeboard, SessionChannels, SessionNotices, Switchboard
from handrail.session.arrivals.waits import Happened, Id, Waits, time_of
from handrail.session.past import SessionTranscript
from handrail.store.database.connection import readable
from handrail.store.database.database import Database, Work
from handrail.store.opening import Store
from handrail.store.tables.arrivals import Kept, TriggerTable

# The next time of a trigger: by its interval, or by its cron expression in the machine's local time.
#
# Clock changes: an hourly schedule (its hour is ``*``) fires each time that the clock shows a matching time, so twice for a
# repeated hour and not at all for a skipped one. Any other schedule fires once for each matching time: at the first of two
# repeated times, and for a skipped time at the moment it would have been without the change.

SECOND_NS = 1_000_000_000
_EPOCH = datetime(1970, 1, 1)
_NEAR_S = 26 * 3600
"""The seconds before and after a UTC time at which every zone is before or after a nearby clock change.

Zones are at most 14 hours ahead, and clock changes are days apart.
"""
_EVERY_HOUR = set(range(24))
Zone = Callable[[int], int]
"""Returns the seconds by which clocks are ahead of UTC, at a time in seconds."""


def local(at_s: int) -> int:
    """Return the offset of the machine's time zone from UTC, in seconds."""
    return time.localtime(at_s).tm_gmtoff


def next_after(trigger: Trigger, now_ns: int, zone: Zone = local) -> int | None:
    """Return the time at which a trigger fires after ``now_ns``, or None if it never fires again."""
    if trigger.every_ns is not None:
        if trigger.once and (trigger.next_ns is None or trigger.next_ns <= now_ns):
            return None
        begun = trigger.next_ns if trigger.next_ns is not None else trigger.created_ns
        return begun + max((now_ns - begun) // trigger.every_ns + 1, 1) * trigger.every_ns
    if trigger.cron is not None:
        return _next_of(trigger.cron, now_ns, trigger.created_ns, zone)
    return None


def _next_of(cron: str, now_ns: int, created_ns: int, zone: Zone) -> int | None:
    from cronsim import CronSim, CronSimError

    now, found = now_ns // SECOND_NS, None
    try:
        begin = now + min(zone(now - _NEAR_S), zone(now), zone(now + _NEAR_S))
        times = CronSim(cron, _EPOCH + timedelta(seconds=begin))
        hourly = times.hours == _EVERY_HOUR
        for shown in times:
            wall = int((shown - _EPOCH).total_seconds())
            before, after = zone(wall - _NEAR_S), zone(wall + _NEAR_S)
            if found is not None and wall - max(before, after) >= found:
                break
            for at in _fires(wall, before, after, zone, created_ns // SECOND_NS, hourly=hourly):
                if at > now and (found is None or at < found):
                    found = at
            if found is not None and before == after:
                break
    except (CronSimError, OverflowError, ValueError, OSError):
        return None
    return None if found is None else found * SECOND_NS


def _fires(wall: int, before: int, after: int, zone: Zone, created: int, *, hourly: bool) -> list[int]:
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


def when(trigger: Trigger) -> str:
    """Describe why a trigger fired, for the notification."""
    if trigger.tool is not None:
        how = trigger.tool
    elif trigger.every_ns is not None:
        how = "once" if trigger.once else f"every {trigger.every_ns / SECOND_NS:g} s"
    else:
        how = f"at {trigger.cron}"
    return f"The trigger {trigger.name} ({how}) fired"


# Triggers that watch a channel: each of its messages is sent to their session as a notification.


class Teller(Protocol):
    """A sender of notifications about fired triggers."""

    clock: Callable[[], int]

    async def tell(self, trigger: Trigger, delivery: str, now: int, *, about: str, **more: Any) -> bool: ...


class Watch:
    """A trigger that takes the messages of a channel.

    Implements :class:`~handrail.session.arrivals.channels.Watcher`.
    """

    def __init__(self, teller: Teller, trigger: Trigger, channels: SessionChannels) -> None:
        assert trigger.channel is not None
        self._teller = teller
        self._trigger = trigger
        self.key = channels.key(trigger.channel)

    @property
    def reader(self) -> str:
        return f"trigger/{self._trigger.session_id}/{self._trigger.name}"

    def wants(self, message: ChannelMessage) -> bool:
        return self._trigger.sender in (None, message.sender)

    async def take(self, kept: Kept) -> bool:
        message = kept.message
        return await self._teller.tell(
            self._trigger,
            f"message/{kept.number}",
            self._teller.clock(),
            about=f"A message came over {message.channel}, which the trigger {self._trigger.name} watches",
            message=f"{neutralised(message.sender)}: {neutralised(message.text)}",
            untrusted=f"a message of the agent {message.sender}",
        )


logger = logging.getLogger("handrail.session")

MAX_IN_SESSION = 1_000
MAX_OF_CLASSES = 100
"""The most triggers of registered classes in a session."""
MAX_PROMPT = 8 * 1024
LEAST_MS = 1_000
LONGEST_MS = 366 * 24 * 3600 * 1000
_LONGEST_SLEEP_S = 60.0
"""The longest sleep, after which a changed clock or a resumed machine is noticed."""
_LATE_NS = 60 * 1_000_000_000
_AGAIN_S = 5.0


class Clockwork:
    """All triggers of a workspace, in the process that holds it.

    :param clock: returns wall-clock time in nanoseconds
    """

    def __init__(
        self,
        table: TriggerTable,
        board: Noticeboard,
        switchboard: Switchboard,
        redactor: Redactor,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self.table = table
        self.clock = clock
        self._board = board
        self._switchboard = switchboard
        self._redactor = redactor
        self._all: dict[Id, Trigger] = {}
        self._of: dict[str, dict[str, Trigger]] = {}
        self._heap: list[tuple[int, Id]] = []
        self._watching: dict[Id, Watch] = {}
        self._classes: dict[Id, TriggerClass] = {}
        """The classes of triggers that are loaded here."""
        self._waits = Waits(self)
        self._adding: dict[Id, asyncio.Future[None]] = {}
        """The triggers that are not durable yet."""
        self._timer: asyncio.TimerHandle | None = None
        self._firing: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()
        """A lock for changes, so that a trigger that is removed while it fires is not stored again."""
        self._closed = False

    async def begin(self) -> None:
        """Start the stored triggers, except those of sub-agents, which ended with their process.

        Triggers that came due meanwhile fire once, with a note that they are late.
        """
        await self.table.remove_below()
        for trigger in self.table.all():
            self._keep(trigger)
        await self.due()

    async def aclose(self) -> None:
        """Stop firing. The triggers stay stored."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._firing is not None:
            await asyncio.wait((self._firing,))
        await self._waits.aclose()

    def get(self, id: Id) -> Trigger | None:
        return self._all.get(id)

    def of(self, session_id: str) -> list[Trigger]:
        return list(self._of.get(session_id, {}).values())

    async def add(self, trigger: Trigger, name: str | None) -> Trigger:
        """Store a new trigger durably and return it.

        :param name: None for the next free name of its kind
        :raises ToolError: ``conflict`` if the name is in use, ``limit`` if the session has too many triggers
        """
        named = replace(trigger, name=self._free(trigger, name), prompt=self._redactor.text(trigger.prompt))
        id = (named.session_id, named.name)
        adding = self._adding[id] = asyncio.ensure_future(self._put(named))
        adding.add_done_callback(lambda _: self._adding.pop(id))
        await asyncio.shield(adding)  # if this is cancelled, the trigger is in the list anyway, because it is durable
        return named

    async def _put(self, trigger: Trigger) -> None:
        await self.table.put(trigger)
        self._keep(trigger)
        self._wind()

    def _free(self, trigger: Trigger, name: str | None) -> str:
        taken = {name for session, name in self._adding if session == trigger.session_id}
        taken |= self._of.get(trigger.session_id, {}).keys()
        if len(taken) >= MAX_IN_SESSION:
            raise ToolError(
                f"The session has {MAX_IN_SESSION:,} triggers, which is the maximum. Remove one first.", kind="limit"
            )
        if trigger.tool is not None:
            of_classes = sum(one.tool is not None for one in self._of.get(trigger.session_id, {}).values())
            if of_classes >= MAX_OF_CLASSES:
                text = f"The session has {MAX_OF_CLASSES} triggers of registered classes, which is the maximum. Remove one first."
                raise ToolError(text, kind="limit")
        if name is None:
            return next(free for n in range(1, len(taken) + 2) if (free := f"{trigger.name}-{n}") not in taken)
        if name in taken:
            text = f"Trigger {name!r} exists already. Choose another `name`, or remove that trigger first."
            raise ToolError(text, kind="conflict")
        return name

    async def remove(self, session_id: str, name: str) -> Trigger | None:
        """Remove a trigger and return it, or None if the name does not exist."""
        async with self._changing:
            trigger = self._of.get(session_id, {}).get(name)
            if trigger is not None:
                await self.table.remove(trigger)
                watch = self._watching.get((session_id, name))
                self._let_go(trigger)
                if watch is not None:
                    await self._switchboard.table.forget_reader(watch.key, watch.reader)
            return trigger

    async def remove_all(self, session_id: str) -> None:
        """Remove the triggers of a session that is closed."""
        if adding := [put for (session, _), put in self._adding.items() if session == session_id]:
            await asyncio.wait(adding)
        async with self._changing:
            triggers = self.of(session_id)
            if triggers:
                await self.table.remove_all(session_id)
            for trigger in triggers:
                self._let_go(trigger)

    async def follow(self, trigger: Trigger, channels: SessionChannels) -> None:
        """Let a trigger that watches a channel take its messages."""
        id = (trigger.session_id, trigger.name)
        if trigger.channel is not None and id not in self._watching:
            watch = self._watching[id] = Watch(self, trigger, channels)
            await self._switchboard.watch(watch.key, watch)
            if self._watching.get(id) is not watch:  # removed meanwhile
                self._switchboard.unwatch(watch.key, watch)

    async def go_by(self, trigger: Trigger, of: TriggerClass, workdir: str) -> None:
        """Let a trigger wait as its class defines. An earlier fault is cleared."""
        id = (trigger.session_id, trigger.name)
        async with self._changing:
            found, before = self._all.get(id), self._classes.get(id)
            if found is None:
                return
            self._classes[id] = of
            if before is of and found.fault is None:
                return
            if before is not of:
                self._waits.stop(id)  # as for triggers of an earlier process
            if found.fault is not None or (of.by_time and found.next_ns is None):
                found = replace(found, fault=None)
                if of.by_time and found.next_ns is None:
                    found = self._timed(found, self.clock())
                    if (
                        found.next_ns is found.fault is None
                    ):  # it fired for the last time while its class was not loaded
                        await self.table.remove(found)
                        self._let_go(found)
                        return
                await self._move(found)
        if not of.by_time:
            self._waits.begin(id, of, workdir)
        self._wind()

    def is_known(self, trigger: Trigger) -> bool:
        """Return whether the trigger waits for something in this process."""
        return trigger.tool is None or (trigger.session_id, trigger.name) in self._classes

    async def happened(self, id: Id, what: Happened) -> bool:
        """Record durably that a trigger has fired or failed, and return whether its session was notified."""
        async with self._changing:
            if (trigger := self._all.get(id)) is None:
                return True
            now, about = self.clock(), f"The trigger {trigger.name} ({trigger.tool})"
            if what.fault is not None:
                failed = f"{about} failed too often and was stopped: {what.fault}"
                await self.tell(trigger, f"fault/{trigger.fired}", now, about=failed)
                await self._move(replace(trigger, fault=self._redactor.text(what.fault)))
                return True
            position = self._redactor.value(what.position)
            after = replace(trigger, fired=trigger.fired + 1, position=position, fault=None)
            told = await self.tell(
                trigger,
                f"event/{trigger.fired}",
                now,
                about=f"{about} fired",
                message=neutralised(what.text) if what.text else None,
                untrusted=f"what {trigger.tool} has seen",
                # Stored together: the next process may see another event first and would use the same delivery id.
                along=self.table.removing(trigger) if what.last else self.table.putting(after),
            )
            if told:
                (self._let_go if what.last else self._keep)(after)
            return told

    def redacted(self, value: Any) -> Any:
        """Return ``value`` without registered secrets."""
        return self._redactor.value(value)

    def _timed(self, trigger: Trigger, now: int) -> Trigger:
        """Return the trigger with the next time of its class, or with its fault if the class fails."""
        of = self._classes[trigger.session_id, trigger.name]
        try:
            return replace(trigger, next_ns=time_of(of, trigger.arguments or {}, now))
        except ToolError as error:
            return replace(trigger, next_ns=None, fault=str(error))

    async def _move(self, trigger: Trigger) -> None:
        await self.table.put(trigger)
        self._keep(trigger)

    async def due(self) -> None:
        """Fire the triggers that are due, once each, and set the timer for the next."""
        now, again_s = self.clock(), _AGAIN_S
        try:
            while self._heap and self._heap[0][0] <= now and not self._closed:
                at, id = heapq.heappop(self._heap)
                try:
                    async with self._changing:
                        trigger = self._all.get(id)
                        if trigger is not None and trigger.next_ns == at:  # else removed, or moved on
                            await self._fire(trigger, at, now)
                except BaseException:  # a trigger that has not fired stays
                    heapq.heappush(self._heap, (at, id))
                    raise
            again_s = 0.0
        except LogUnavailable as error:
            logger.warning("Triggers are delayed because their notifications cannot be stored: %s", error)
        finally:
            self._wind(again_s)

    async def due_soon(self) -> None:
        """Fire the triggers that are due in a separate task, which a cancelled caller does not stop."""
        self._ring()
        if self._firing is not None:
            await asyncio.shield(self._firing)

    async def _fire(self, trigger: Trigger, at: int, now: int) -> None:
        after = self._after(trigger, now)
        missed = 0
        if trigger.every_ns is not None and not trigger.once and now - at >= trigger.every_ns:
            missed = (now - at) // trigger.every_ns
        told = await self.tell(trigger, f"{at}", now, late=now - at > _LATE_NS, missed=missed, about=when(trigger))
        if after is None and told:
            await self.table.remove(trigger)
            self._let_go(trigger)
        elif after is None:  # the only notification, so the trigger is due until there is room
            await self._move(replace(trigger, next_ns=now + _LATE_NS))
        else:
            await self._move(replace(after, fired=trigger.fired + 1))
            if after.fault is not None:
                await self.tell(after, f"fault/{at}", now, about=f"The trigger {after.name} was stopped: {after.fault}")

    def _after(self, trigger: Trigger, now: int) -> Trigger | None:
        """Return the trigger after its firing, or None if it never fires again."""
        if trigger.tool is None:
            following = next_after(trigger, now)
            return None if following is None else replace(trigger, next_ns=following)
        if not self.is_known(trigger):
            return replace(trigger, next_ns=None)  # until its session is opened with its class
        after = self._timed(trigger, now)
        return None if after.next_ns is None and after.fault is None else after

    async def tell(
        self, trigger: Trigger, delivery: str, now: int, *, about: str, along: Work | None = None, **more: Any
    ) -> bool:
        """Post the notification of one firing, and return whether the session had room for it.

        :param along: a write that is stored in the same transaction
        """
        said = {key: value for key, value in more.items() if value}
        untrusted, message = said.pop("untrusted", None), said.pop("message", None)
        late = " (late)" if said.get("late") else ""
        missed = f" ({said['missed']} firings before it were missed)" if said.get("missed") else ""
        text = f"{about}{late}{missed}: {trigger.prompt}" + ("" if message is None else f"\n{message}")
        data = {"trigger": trigger.name, "kind": trigger.kind, **said}
        notice = Notice(
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
            await self._board.post(notice, *(() if along is None else (along,)))
        except UsageError as error:
            logger.warning("Trigger %s fired, but its notification was not posted: %s", trigger.name, error)
            return False
        return True

    def _keep(self, trigger: Trigger) -> None:
        id = (trigger.session_id, trigger.name)
        self._all[id] = trigger
        self._of.setdefault(trigger.session_id, {})[trigger.name] = trigger
        if trigger.next_ns is not None:
            heapq.heappush(self._heap, (trigger.next_ns, id))

    def _let_go(self, trigger: Trigger) -> None:
        id = (trigger.session_id, trigger.name)
        self._all.pop(id, None)
        named = self._of.get(trigger.session_id, {})
        named.pop(trigger.name, None)
        if not named:
            self._of.pop(trigger.session_id, None)
        watch = self._watching.pop(id, None)
        if watch is not None:
            self._switchboard.unwatch(watch.key, watch)
        self._classes.pop(id, None)
        self._waits.stop(id)

    def _wind(self, at_least_s: float = 0.0) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._heap and ((found := self._all.get(self._heap[0][1])) is None or found.next_ns != self._heap[0][0]):
            heapq.heappop(self._heap)  # removed, or moved on
        if self._heap and not self._closed:
            wait_s = min(max((self._heap[0][0] - self.clock()) / SECOND_NS, at_least_s), _LONGEST_SLEEP_S)
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._ring)

    def _ring(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._firing is None or self._firing.done():
            self._firing = asyncio.get_running_loop().create_task(self.due())


class SessionTriggers:
    """The triggers of one session.

    Implements :class:`~handrail.contract.doors.channels.Triggers`.
    """

    def __init__(
        self,
        clockwork: Clockwork,
        session_id: str,
        channels: SessionChannels,
        workdir: str = "",
        find: Callable[[str], TriggerClass | None] = lambda _: None,
    ) -> None:
        """Create the triggers of a session.

        :param find: returns the class of triggers with a tool's id
        """
        self._find = find
        self._workdir = workdir
        self._clockwork = clockwork
        self._session_id = session_id
        self._channels = channels

    async def timer(
        self, every_ms: int, prompt: str, *, name: str | None = None, once: bool = False, immediate: bool = False
    ) -> Trigger:
        if not LEAST_MS <= every_ms <= LONGEST_MS:
            text = f"The interval is invalid: {every_ms:,} ms. Use {LEAST_MS:,} to {LONGEST_MS:,} ms (366 days)."
            raise ToolError(text, kind="invalid_input")
        now = self._clockwork.clock()
        every = every_ms * 1_000_000
        made = Trigger("timer", self._session_id, "timer", _prompt(prompt), now, every_ns=every, once=once)
        made = await self._clockwork.add(replace(made, next_ns=now if immediate else now + every), name)
        if immediate:
            await self._clockwork.due_soon()
        return made

    async def schedule(self, cron: str, prompt: str, *, name: str | None = None) -> Trigger:
        now = self._clockwork.clock()
        made = Trigger("schedule", self._session_id, "schedule", _prompt(prompt), now, cron=plain_cron(cron))
        return await self._clockwork.add(replace(made, next_ns=next_after(made, now)), name)

    async def watch(self, channel: str, prompt: str, *, name: str | None = None, sender: str | None = None) -> Trigger:
        self._channels.key(channel)
        now = self._clockwork.clock()
        made = Trigger("watch", self._session_id, "channel", _prompt(prompt), now, channel=channel, sender=sender)
        made = await self._clockwork.add(made, name)
        await self._clockwork.follow(made, self._channels)
        return made

    async def add(
        self, of: TriggerClass, arguments: Mapping[str, Any], prompt: str, *, name: str | None = None
    ) -> Trigger:
        now, tool = self._clockwork.clock(), of.spec.id
        at = time_of(of, arguments, now) if of.by_time else None
        if of.by_time and at is None:
            text = f"The trigger was not added: by {tool} it would never fire. Change the arguments."
            raise ToolError(text, kind="invalid_input")
        own = tool.rpartition(".")[2].removeprefix("add_") or "trigger"
        kept = self._clockwork.redacted(dict(arguments))
        made = Trigger(own, self._session_id, "class", _prompt(prompt), now, next_ns=at, tool=tool, arguments=kept)
        made = await self._clockwork.add(made, name)
        await self._clockwork.go_by(made, of, self._workdir)
        return made

    async def list(self) -> Sequence[Trigger]:
        found = sorted(self._clockwork.of(self._session_id), key=lambda trigger: (trigger.created_ns, trigger.name))
        return [trigger if self._clockwork.is_known(trigger) else _unknown(trigger) for trigger in found]

    async def remove(self, name: str) -> Trigger:
        if (found := await self._clockwork.remove(self._session_id, name)) is None:
            there = ", ".join(sorted(trigger.name for trigger in self._clockwork.of(self._session_id))[:20]) or "none"
            text = f"Trigger {name[:80]!r} does not exist in this session. Triggers: {there}."
            raise ToolError(text, kind="invalid_input")
        return found

    async def take_up(self) -> None:
        """Resume the triggers of a session that is open again: channel watches and waits of classes."""
        for trigger in self._clockwork.of(self._session_id):
            await self._clockwork.follow(trigger, self._channels)
            if trigger.tool is not None and (of := self._find(trigger.tool)) is not None:
                await self._clockwork.go_by(trigger, of, self._workdir)


def _unknown(trigger: Trigger) -> Trigger:
    fault = f"Tool {trigger.tool} is not available. The trigger continues when the session is opened with that tool."
    return replace(trigger, fault=fault)


def _prompt(text: str) -> str:
    if len(text) > MAX_PROMPT:
        text = f"`prompt` has {len(text):,} characters. The maximum is {MAX_PROMPT:,}. Write details to a file and name it."
        raise ToolError(text, kind="invalid_input")
    return text


# All arrivals of a workspace's sessions: notifications, channels and triggers.


class SessionArrivals(NamedTuple):
    """The services of one session for events from outside its turns."""

    notices: SessionNotices
    channels: SessionChannels
    triggers: SessionTriggers
    transcript: SessionTranscript


class Arrivals:
    """The notifications, channels and triggers of all sessions, in the process that holds the workspace."""

    def __init__(self, store: Store, redactor: Redactor, clock: Callable[[], int] = time.time_ns) -> None:
        self.notices = Noticeboard(store.notices, redactor)
        self.channels = Switchboard(store.channels, redactor, clock, partial(_went_well, store.database))
        self.triggers = Clockwork(store.triggers, self.notices, self.channels, redactor, clock)
        self._database = store.database
        self._begun = False
        self._beginning = asyncio.Lock()

    def of(
        self, session_id: str, top: str, agent: str, workdir: str, current: Callable[[], Generation]
    ) -> SessionArrivals:
        """Return the services for a session that is about to be open, until :meth:`leave`.

        :param top: the session at the top of its tree
        :param current: returns its current tools
        """
        channels = SessionChannels(self.channels, session_id, top, agent)
        triggers = SessionTriggers(self.triggers, session_id, channels, workdir, partial(_class_of, current))
        transcript = SessionTranscript(session_id, self._database)
        return SessionArrivals(self.notices.of(session_id), channels, triggers, transcript)

    async def enter(self, triggers: SessionTriggers) -> None:
        """Resume the triggers of a session that is open. The first session starts the triggers of all."""
        await self._begin()
        await triggers.take_up()

    async def _begin(self) -> None:
        """Start the triggers of all sessions. If this is cancelled, the next caller tries again."""
        async with self._beginning:
            if not self._begun:
                await self.triggers.begin()
                self._begun = True

    def leave(self, session_id: str) -> None:
        """Release a session that is no longer open. Its pending notifications stay stored."""
        self.notices.forget(session_id)

    async def end(self, session_id: str) -> None:
        """Remove the triggers of a sub-agent that has ended, so that they take no messages of others."""
        for trigger in self.triggers.of(session_id):
            await self.triggers.remove(session_id, trigger.name)
        await self.triggers.remove_all(session_id)  # those that a cancelled call was adding meanwhile

    async def discard(self, session_id: str) -> None:
        """Remove the triggers and channels of a session that is closed."""
        await self.triggers.remove_all(session_id)
        await self.channels.remove(session_id)

    async def aclose(self) -> None:
        await self.triggers.aclose()
        await self.channels.aclose()


def _class_of(current: Callable[[], Generation], tool_id: str) -> TriggerTool | None:
    """Return the class of triggers that a session's tool is, or None if it is not available."""
    entry = current().entries.get(tool_id)
    return entry.tool if entry is not None and entry.withheld is None and isinstance(entry.tool, TriggerTool) else None


def _went_well(database: Database, call_id: str) -> bool | None:
    """Return whether a call succeeded, by the log; None if the log does not say."""
    with readable(database.path):
        outcome = LogReader(database.reading).outcome_of(call_id)
    if outcome is None:
        return None
    result: Any = (outcome.body or {}).get("result")
    return outcome.kind == "committed" and not (isinstance(result, dict) and cast("Any", result).get("type") == "error")
