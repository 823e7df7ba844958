"""Channels between the sessions of a workspace, and the notifications that sessions have not yet received."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile
from typing import Any, Protocol
from weakref import WeakValueDictionary

from handrail.arbiter.output.secret_redaction import SecretRedactor
from handrail.contract.errors import LogUnavailable, ToolError, UsageError
from handrail.contract.services.channels_and_triggers import (
    CHANNEL_CAPACITY,
    MAX_PENDING,
    SHARED_PREFIX,
    ChannelKind,
    ChannelMessage,
    ChannelWaitResult,
    Notification,
    check_channel_name,
)
from handrail.store.database.workspace_database import TableWork
from handrail.store.tables.inbound_tables import (
    BroadcastReaderPosition,
    ChannelKey,
    ChannelTable,
    NotificationTable,
    StoredChannelMessage,
    UnsettledDelivery,
)

MAX_MESSAGE = 64 * 1024
"""The most characters of one message."""
MAX_CHANNELS = 200
"""The most channels of one session tree, and of the workspace."""
IDLE_NS = 7 * 24 * 3600 * 1_000_000_000
"""The time without messages after which a broadcast channel may be replaced."""
_RECHECK_S = 1.0
"""How often a waiting call checks whether messages of other calls come back."""


class ChannelWatcher(Protocol):
    """A reader that takes messages as they arrive, before waiting calls get them."""

    @property
    def reader_name(self) -> str:
        """The watcher's name among the readers of a broadcast channel."""
        ...

    def wants(self, message: ChannelMessage) -> bool: ...

    async def take_message(self, kept: StoredChannelMessage) -> bool:
        """Take a message durably and return whether it was taken. A repeated message has no effect."""
        ...


_ReceiveAttempt = tuple[tuple[StoredChannelMessage, int] | None, bool]
"""The received message, and whether messages of some calls are not settled yet."""


def _unknown_outcome(call: str) -> bool | None:
    return None


class ChannelBroker:
    """All channels of a workspace, in the process that holds it.

    A message counts as read once the call that received it has succeeded, by the log. If the call is cut off, the message
    is available again.

    :param call_succeeded: returns whether a call succeeded; None while the log does not say
    """

    def __init__(
        self,
        table: ChannelTable,
        redactor: SecretRedactor,
        clock: Callable[[], int] = time.time_ns,
        call_succeeded: Callable[[str], bool | None] = _unknown_outcome,
    ) -> None:
        self.table = table
        self._redactor = redactor
        self._clock = clock
        self._call_succeeded = call_succeeded
        self._calls: set[str] = set()
        """The calls of this process that received messages."""
        self._work: set[asyncio.Future[Any]] = set()
        """Work that is completed even if its caller no longer waits."""
        self._locks = WeakValueDictionary[ChannelKey, asyncio.Lock]()
        """The locks of channels in use."""
        self._waiting: dict[ChannelKey, dict[asyncio.Event, str | None]] = {}
        """The calls that wait at each channel in order, with the sender that they wait for; None for any."""
        self._watchers: dict[ChannelKey, list[ChannelWatcher]] = {}

    async def send(
        self, key: ChannelKey, sender: str, text: str, kind: ChannelKind | None, data: Mapping[str, Any] | None
    ) -> int:
        """Send a message and return the number of its readers; see :meth:`ChannelService.send`."""
        if len(text) > MAX_MESSAGE:
            raise ToolError(
                f"`text` has {len(text):,} characters. The maximum is {MAX_MESSAGE:,}. Write it to a file and send the path.",
                kind="invalid_input",
            )
        sending = asyncio.ensure_future(self._send(key, sender, text, kind, data))
        self._work.add(sending)
        sending.add_done_callback(self._on_work_done)
        return await asyncio.shield(sending)  # a cancelled sender may have sent the message, so readers are woken too

    async def _send(
        self, key: ChannelKey, sender: str, text: str, kind: ChannelKind | None, data: Mapping[str, Any] | None
    ) -> int:
        async with self._lock(key):
            there = self.table.find_kind(key)
            if there is not None and kind not in (None, there):
                raise ToolError(
                    f"Channel {key.display_name} is a {there}, not a {kind}. Omit `kind` or pass '{there}'.",
                    kind="conflict",
                )
            if there is None and len(self.table.list_names(key.scope)) >= MAX_CHANNELS:
                await self.table.remove_idle_channels(key.scope, self._clock() - IDLE_NS)
            if there is None and len(self.table.list_names(key.scope)) >= MAX_CHANNELS:
                raise ToolError(
                    f"The maximum of {MAX_CHANNELS} channels is reached. Use an existing channel.", kind="limit"
                )
            used: ChannelKind = there or kind or "queue"
            await self._settle_receiving_calls(key)
            await self._deliver_to_watchers(key)  # a watcher that was full may take messages by now
            if used == "queue" and self.table.count_waiting_messages(key) >= CHANNEL_CAPACITY:
                raise ToolError(
                    f"Channel {key.display_name} is full: it has {CHANNEL_CAPACITY} unread messages. Let an agent read it "
                    "(wait_channel, watch_channel), or use another channel.",
                    kind="limit",
                )
            kept = None if data is None else self._redactor.redact_json(dict(data))
            message = ChannelMessage(key.display_name, sender, self._redactor.redact_text(text), self._clock(), kept)
            await self.table.add_message(key, used, message)
            await self._deliver_to_watchers(key)
            count = self.table.count_waiting_messages(key)
        self._wake_waiting(key)
        return count

    async def receive(
        self, key: ChannelKey, reader: str, timeout_ms: int, sender: str | None, call: str = ""
    ) -> ChannelWaitResult:
        """Receive the next message, or wait for one; see :meth:`ChannelService.receive`.

        :param call: the id of the receiving call; without one, the message counts as read at once
        """
        waiting, changed = self._waiting.setdefault(key, {}), asyncio.Event()
        waiting[changed] = sender
        received = ChannelWaitResult(None)
        try:
            received = await self._wait_for_message(key, reader, timeout_ms, sender, call, changed)
        finally:
            del waiting[changed]
            if not waiting and self._waiting.get(key) is waiting:
                del self._waiting[key]
            elif received.message is None:
                self._wake_waiting(key)  # messages for this call are now for others
        return received

    async def _wait_for_message(
        self, key: ChannelKey, reader: str, timeout_ms: int, sender: str | None, call: str, changed: asyncio.Event
    ) -> ChannelWaitResult:
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_ms / 1000
        while True:
            changed.clear()
            attempt = loop.create_task(self._try_receive(key, reader, sender, call, changed))
            try:
                received, unsettled = await asyncio.shield(attempt)
            except asyncio.CancelledError:  # a cancelled call has received nothing
                undoing = loop.create_task(self._return_undelivered_message(attempt, key, reader, call))
                self._work.add(undoing)
                undoing.add_done_callback(self._on_work_done)
                raise
            if received is not None:
                return ChannelWaitResult(received[0].message, received[1])
            if loop.time() >= until:
                return ChannelWaitResult(None)
            try:
                async with asyncio.timeout_at(min(until, loop.time() + _RECHECK_S) if unsettled else until):
                    await changed.wait()
            except TimeoutError:
                continue

    async def _try_receive(
        self, key: ChannelKey, reader: str, sender: str | None, call: str, changed: asyncio.Event
    ) -> _ReceiveAttempt:
        async with self._lock(key):
            unsettled = await self._settle_receiving_calls(key)
            if (received := await self._take_next(key, reader, sender, call, changed)) is not None and call:
                self._calls.add(call)
            return received, unsettled

    async def _take_next(
        self, key: ChannelKey, reader: str, sender: str | None, call: str, changed: asyncio.Event
    ) -> tuple[StoredChannelMessage, int] | None:
        """Take the next message, for ``call`` if given, and return it with the number of missed messages."""
        table, missed = self.table, 0
        if table.find_kind(key) != "broadcast":
            if (kept := self._find_oldest_for_waiter(key, sender, changed)) is not None:
                await (
                    table.record_delivery(key, reader, kept, call) if call else table.consume_message(key, kept.number)
                )
            return None if kept is None else (kept, missed)
        position = table.find_reader_position(key, reader)
        missed = table.count_lost_messages(key, reader)
        if position is not None and (kept := table.find_undelivered_message(key, reader, sender)) is not None:
            await table.store_reader_position(key, reader, position, (kept, call))
            return kept, missed
        waiting = table.list_messages_after(key, 0 if position is None else position.number)
        at = next((at for at, one in enumerate(waiting) if sender in (None, one.message.sender)), None)
        if at is None:
            return None
        kept = waiting[at]
        if position is not None and (oldest := table.find_oldest_message_after(key)) is not None:
            missed += max(oldest.position - position.position - 1, 0)
        giving = (kept, call) if call else None
        await table.store_reader_position(
            key, reader, BroadcastReaderPosition(kept.number, kept.position), giving, waiting[:at]
        )
        return kept, missed

    def _find_oldest_for_waiter(
        self, key: ChannelKey, sender: str | None, changed: asyncio.Event
    ) -> StoredChannelMessage | None:
        """Return the oldest message of a queue that the waiting call of ``changed`` may take.

        Calls that have waited longer come first.
        """
        waiting = self._waiting.get(key, {})
        before = list(takewhile(lambda one: one[0] is not changed, waiting.items()))
        if not before:
            return self.table.find_oldest_message_after(key, 0, sender)
        anybodys = sender is None and all(wanted is None for _, wanted in before)
        free = self.table.list_messages_after(key, limit=len(before) + 1 if anybodys else CHANNEL_CAPACITY)
        for other, wanted in before:
            theirs = next((kept for kept in free if wanted in (None, kept.message.sender)), None)
            if theirs is not None:
                free.remove(theirs)
                other.set()
        return next((kept for kept in free if sender in (None, kept.message.sender)), None)

    async def _return_undelivered_message(
        self, attempt: asyncio.Task[_ReceiveAttempt], key: ChannelKey, reader: str, call: str
    ) -> None:
        """Return the message of an attempt to the channel, because its caller no longer waits."""
        await asyncio.wait((attempt,))
        if attempt.cancelled() or attempt.exception() is not None or (received := attempt.result()[0]) is None:
            return
        given = UnsettledDelivery(received[0].number, reader, call)
        with suppress(LogUnavailable):  # the call's outcome decides, once the log is available
            await self._return_messages(key, given)

    async def _return_messages(self, key: ChannelKey, given: UnsettledDelivery) -> None:
        async with self._lock(key):
            if given.call:
                await self.table.settle_deliveries(key, (), (given,))
            elif self.table.find_kind(key) == "queue":
                await self.table.return_message_to_queue(given.number)
            else:
                await self.table.mark_message_undelivered(key, given)
            await self._deliver_to_watchers(key)
        self._wake_waiting(key)

    async def _settle_receiving_calls(self, key: ChannelKey) -> bool:
        """Look up the outcomes of calls that received messages, and return whether some are still unknown."""
        taken, back, unsettled = list[UnsettledDelivery](), list[UnsettledDelivery](), False
        for given in self.table.list_unsettled_deliveries(key):
            well = self._call_succeeded(given.call)
            if well is None and given.call in self._calls:
                unsettled = True
                continue
            (taken if well else back).append(given)
            self._calls.discard(given.call)
        await self.table.settle_deliveries(key, taken, back)
        return unsettled

    async def add_watcher(self, key: ChannelKey, watcher: ChannelWatcher) -> None:
        """Let ``watcher`` take the waiting messages and all later ones."""
        async with self._lock(key):
            await self._settle_receiving_calls(key)
            self._watchers.setdefault(key, []).append(watcher)
            await self._deliver_to_watchers(key)

    def unwatch(self, key: ChannelKey, watcher: ChannelWatcher) -> None:
        watchers = self._watchers.get(key, [])
        if watcher in watchers:
            watchers.remove(watcher)
        if not watchers:
            self._watchers.pop(key, None)

    async def _deliver_to_watchers(self, key: ChannelKey) -> None:
        """Give watchers their messages.

        A message is taken by its watcher first and then removed. After a crash between the two the watcher gets it again and
        ignores it, because it has the same number.
        """
        if not (watchers := self._watchers.get(key)):
            return
        if self.table.find_kind(key) == "broadcast":
            for watcher in tuple(watchers):
                read = self.table.find_reader_position(key, watcher.reader_name)
                for kept in self.table.list_messages_after(key, 0 if read is None else read.number):
                    if watcher.wants(kept.message) and not await watcher.take_message(kept):
                        break
                    await self.table.store_reader_position(
                        key, watcher.reader_name, BroadcastReaderPosition(kept.number, kept.position)
                    )
            return
        full: list[ChannelWatcher] = []
        for kept in self.table.list_messages_after(key):
            taker = next((watcher for watcher in watchers if watcher.wants(kept.message)), None)
            if taker is None or taker in full:
                continue
            if await taker.take_message(kept):
                await self.table.consume_message(key, kept.number)
            else:
                full.append(taker)

    async def aclose(self) -> None:
        """Settle all received messages whose calls have ended. The others are settled later."""
        if self._work:
            await asyncio.wait(set(self._work))
        with suppress(LogUnavailable):
            for key in self.table.list_channels_with_unsettled_deliveries():
                async with self._lock(key):
                    await self._settle_receiving_calls(key)

    async def remove_session(self, session_id: str) -> None:
        """Remove the channels of a session that is closed."""
        for key in self.table.list_channels_with_unsettled_deliveries():
            if key.scope == session_id:
                self._calls.difference_update(given.call for given in self.table.list_unsettled_deliveries(key))
        await self.table.remove_session(session_id)
        for key in [key for key in self._waiting if key.scope == session_id]:
            self._wake_waiting(key)

    def _lock(self, key: ChannelKey) -> asyncio.Lock:
        return self._locks.setdefault(key, asyncio.Lock())

    def _on_work_done(self, work: asyncio.Future[Any]) -> None:
        self._work.discard(work)
        if not work.cancelled():
            work.exception()  # the waiting caller got the exception

    def _wake_waiting(self, key: ChannelKey) -> None:
        for changed in self._waiting.get(key, ()):
            changed.set()


class SessionChannels:
    """The channels of one session.

    Implements :class:`~handrail.contract.services.channels_and_triggers.ChannelService`.
    """

    def __init__(self, broker: ChannelBroker, session_id: str, root_id: str, agent: str, call: str = "") -> None:
        """Create the channels of a session.

        :param root_id: the session at the top of its tree
        :param call: the id of the call that uses them
        """
        self._call = call
        self._broker = broker
        self._session_id = session_id
        self._top = root_id
        self._agent = agent

    async def send(
        self, channel: str, text: str, *, kind: ChannelKind | None = None, data: Mapping[str, Any] | None = None
    ) -> int:
        return await self._broker.send(self.resolve_key(channel), self._agent, text, kind, data)

    async def receive(self, channel: str, *, timeout_ms: int, sender: str | None = None) -> ChannelWaitResult:
        return await self._broker.receive(self.resolve_key(channel), self._session_id, timeout_ms, sender, self._call)

    def for_call(self, call_id: str) -> SessionChannels:
        return SessionChannels(self._broker, self._session_id, self._top, self._agent, call_id)

    def resolve_key(self, channel: str) -> ChannelKey:
        """Return the key of a channel.

        :raises ToolError: ``invalid_input`` if the name is invalid
        """
        check_channel_name(channel)
        return (
            ChannelKey("", channel.removeprefix(SHARED_PREFIX))
            if channel.startswith(SHARED_PREFIX)
            else ChannelKey(self._top, channel)
        )


# Notifications: stored until the session's agent takes them, with a way to wait for the next.

MAX_TEXT = 64 * 1024
"""The most characters of one notification. A longer text is cut, with a note."""


class WorkspaceNotifications:
    """The notifications of all sessions of a workspace, in the process that holds it.

    :param redactor: removes registered secrets
    """

    def __init__(self, table: NotificationTable, redactor: SecretRedactor) -> None:
        self.table = table
        self._redactor = redactor
        self._sessions: dict[str, SessionNotifications] = {}

    def attach_session(self, session_id: str) -> SessionNotifications:
        if (found := self._sessions.get(session_id)) is None:
            found = self._sessions[session_id] = SessionNotifications(self, session_id)
        found.is_detached = False
        return found

    def release_session(self, session_id: str) -> None:
        """Release a session that is no longer open. Its pending notifications stay stored."""
        if (found := self._sessions.get(session_id)) is not None:
            found.is_detached = True
            self.drop_unused_session(found)

    def drop_unused_session(self, of: SessionNotifications) -> None:
        """Drop an object whose session is not open and which expects no notification."""
        if of.is_detached and not of.is_expecting_notifications and self._sessions.get(of.session_id) is of:
            del self._sessions[of.session_id]

    async def store_notification(self, notice: Notification, *along: TableWork) -> None:
        """Store a notification for a session, which may be closed for now.

        :param along: writes that are stored in the same transaction
        :raises UsageError: if too many notifications are pending
        """
        if self.table.count_pending(notice.session_id) >= MAX_PENDING:
            raise UsageError(
                f"Session {notice.session_id} has {MAX_PENDING:,} pending notifications, which is the maximum. "
                "Continue the session so that its agent reads them, or close it."
            )
        text = self._redactor.redact_text(notice.text)
        if len(text) > MAX_TEXT:
            text = f"{text[:MAX_TEXT]}\n({len(text) - MAX_TEXT:,} more characters are omitted)"
        data = None if notice.data is None else self._redactor.redact_json(dict(notice.data))
        await self.table.post(
            replace(notice, text=text, data=data, source=self._redactor.redact_text(notice.source)), *along
        )
        if (session := self._sessions.get(notice.session_id)) is not None:
            session.record_posted_notification(notice.source)


class SessionNotifications:
    """The notifications of one session.

    Implements :class:`~handrail.contract.services.channels_and_triggers.NotificationSink`.
    """

    def __init__(self, store: WorkspaceNotifications, session_id: str) -> None:
        self._store = store
        self.session_id = session_id
        self._expected: set[str] = set()
        self.is_detached = False
        """Whether the session is no longer open."""
        self._changed = asyncio.Event()

    @property
    def is_expecting_notifications(self) -> bool:
        """Whether running work will post a notification."""
        return bool(self._expected)

    async def list_pending(self) -> Sequence[Notification]:
        return self._store.table.list_pending(self.session_id)

    async def mark_delivered(self, ids: Sequence[str]) -> None:
        await self._store.table.mark_delivered(self.session_id, ids)

    async def wait_until_pending(self) -> None:
        while not await self._wait_for_change(self._has_pending):
            pass

    async def wait_for_next(self) -> bool:
        while not await self._wait_for_change(lambda: self._has_pending() or not self._expected):
            pass
        return self._has_pending()

    async def post(self, notice: Notification) -> None:
        await self._store.store_notification(notice)

    def expect_from(self, source: str) -> None:
        self._expected.add(source)

    def stop_expecting(self, source: str) -> None:
        self._expected.discard(source)
        self._store.drop_unused_session(self)
        self._wake_waiting()

    def record_posted_notification(self, source: str) -> None:
        self.stop_expecting(source)

    def _has_pending(self) -> bool:
        return self._store.table.count_pending(self.session_id) > 0

    async def _wait_for_change(self, seen: Callable[[], bool]) -> bool:
        """Return whether ``seen`` is true now. If not, wait for the next change first."""
        changed = self._changed
        if seen():
            return True
        await changed.wait()
        return False

    def _wake_waiting(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
