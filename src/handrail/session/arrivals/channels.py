"""Channels between the sessions of a workspace, and the notifications that sessions have not yet received."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, Protocol

from handrail.arbiter.output.redaction import Redactor
from handrail.contract.doors.channels import (
    HISTORY,
    MAX_PENDING,
    SHARED,
    ChannelKind,
    ChannelMessage,
    Notice,
    Received,
    check_channel,
)
from handrail.contract.errors import LogUnavailable, ToolError, UsageError
from handrail.store.database.database import Work
from handrail.store.tables.arrivals import ChannelTable, Given, Kept, Key, NoticeTable, Position

MAX_MESSAGE = 64 * 1024
"""The most characters of one message."""
MAX_CHANNELS = 200
"""The most channels of one session tree, and of the workspace."""
IDLE_NS = 7 * 24 * 3600 * 1_000_000_000
"""The time without messages after which a broadcast channel may be replaced."""
_LOOK_AGAIN_S = 1.0
"""How often a waiting call checks whether messages of other calls come back."""


class Watcher(Protocol):
    """A reader that takes messages as they arrive, before waiting calls get them."""

    @property
    def reader(self) -> str:
        """The watcher's name among the readers of a broadcast channel."""
        ...

    def wants(self, message: ChannelMessage) -> bool: ...

    async def take(self, kept: Kept) -> bool:
        """Take a message durably and return whether it was taken. A repeated message has no effect."""
        ...


_Attempt = tuple[tuple[Kept, int] | None, bool]
"""The received message, and whether messages of some calls are not settled yet."""


def _nobody_knows(call: str) -> bool | None:
    return None


class Switchboard:
    """All channels of a workspace, in the process that holds it.

    A message counts as read once the call that received it has succeeded, by the log. If the call is cut off, the message
    is available again.

    :param went_well: returns whether a call succeeded; None while the log does not say
    """

    def __init__(
        self,
        table: ChannelTable,
        redactor: Redactor,
        clock: Callable[[], int] = time.time_ns,
        went_well: Callable[[str], bool | None] = _nobody_knows,
    ) -> None:
        self.table = table
        self._redactor = redactor
        self._clock = clock
        self._went_well = went_well
        self._calls: set[str] = set()
        """The calls of this process that received messages."""
        self._going_on: set[asyncio.Future[Any]] = set()
        """Work that is completed even if its caller no longer waits."""
        self._turns: dict[Key, _Turns] = {}
        """The locks of channels in use."""
        self._waiting: dict[Key, dict[asyncio.Event, str | None]] = {}
        """The calls that wait at each channel in order, with the sender that they wait for; None for any."""
        self._watchers: dict[Key, list[Watcher]] = {}

    async def send(
        self, key: Key, sender: str, text: str, kind: ChannelKind | None, data: Mapping[str, Any] | None
    ) -> int:
        """Send a message and return the number of its readers; see :meth:`Channels.send`."""
        if len(text) > MAX_MESSAGE:
            raise ToolError(
                f"`text` has {len(text):,} characters. The maximum is {MAX_MESSAGE:,}. Write it to a file and send the path.",
                kind="invalid_input",
            )
        sending = asyncio.ensure_future(self._send(key, sender, text, kind, data))
        self._going_on.add(sending)
        sending.add_done_callback(self._over)
        return await asyncio.shield(sending)  # a cancelled sender may have sent the message, so readers are woken too

    async def _send(
        self, key: Key, sender: str, text: str, kind: ChannelKind | None, data: Mapping[str, Any] | None
    ) -> int:
        async with self._lock(key):
            there = self.table.kind(key)
            if there is not None and kind not in (None, there):
                raise ToolError(
                    f"Channel {key.shown} is a {there}, not a {kind}. Omit `kind` or pass '{there}'.", kind="conflict"
                )
            if there is None and len(self.table.named(key.scope)) >= MAX_CHANNELS:
                await self.table.forget_idle(key.scope, self._clock() - IDLE_NS)
            if there is None and len(self.table.named(key.scope)) >= MAX_CHANNELS:
                raise ToolError(
                    f"The maximum of {MAX_CHANNELS} channels is reached. Use an existing channel.", kind="limit"
                )
            used: ChannelKind = there or kind or "queue"
            await self._settle(key)
            await self._hand_out(key)  # a watcher that was full may take messages by now
            if used == "queue" and self.table.unread(key) >= HISTORY:
                raise ToolError(
                    f"Channel {key.shown} is full: it has {HISTORY} unread messages. Let an agent read it "
                    "(wait_channel, watch_channel), or use another channel.",
                    kind="limit",
                )
            kept = None if data is None else self._redactor.value(dict(data))
            message = ChannelMessage(key.shown, sender, self._redactor.text(text), self._clock(), kept)
            await self.table.send(key, used, message)
            await self._hand_out(key)
            count = self.table.unread(key)
        self._ring(key)
        return count

    async def receive(self, key: Key, reader: str, timeout_ms: int, sender: str | None, call: str = "") -> Received:
        """Receive the next message, or wait for one; see :meth:`Channels.receive`.

        :param call: the id of the receiving call; without one, the message counts as read at once
        """
        waiting, changed = self._waiting.setdefault(key, {}), asyncio.Event()
        waiting[changed] = sender
        received = Received(None)
        try:
            received = await self._received(key, reader, timeout_ms, sender, call, changed)
        finally:
            del waiting[changed]
            if not waiting and self._waiting.get(key) is waiting:
                del self._waiting[key]
            elif received.message is None:
                self._ring(key)  # messages for this call are now for others
        return received

    async def _received(
        self, key: Key, reader: str, timeout_ms: int, sender: str | None, call: str, changed: asyncio.Event
    ) -> Received:
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_ms / 1000
        while True:
            changed.clear()
            attempt = loop.create_task(self._attempt(key, reader, sender, call, changed))
            try:
                received, unsettled = await asyncio.shield(attempt)
            except asyncio.CancelledError:  # a cancelled call has received nothing
                undoing = loop.create_task(self._undo(attempt, key, reader, call))
                self._going_on.add(undoing)
                undoing.add_done_callback(self._over)
                raise
            if received is not None:
                return Received(received[0].message, received[1])
            if loop.time() >= until:
                return Received(None)
            try:
                async with asyncio.timeout_at(min(until, loop.time() + _LOOK_AGAIN_S) if unsettled else until):
                    await changed.wait()
            except TimeoutError:
                continue

    async def _attempt(self, key: Key, reader: str, sender: str | None, call: str, changed: asyncio.Event) -> _Attempt:
        async with self._lock(key):
            unsettled = await self._settle(key)
            if (received := await self._next(key, reader, sender, call, changed)) is not None and call:
                self._calls.add(call)
            return received, unsettled

    async def _next(
        self, key: Key, reader: str, sender: str | None, call: str, changed: asyncio.Event
    ) -> tuple[Kept, int] | None:
        """Take the next message, for ``call`` if given, and return it with the number of missed messages."""
        table, missed = self.table, 0
        if table.kind(key) != "broadcast":
            if (kept := self._first(key, sender, changed)) is not None:
                await (table.give(key, reader, kept, call) if call else table.take(key, kept.number))
            return None if kept is None else (kept, missed)
        position = table.position(key, reader)
        missed = table.lost(key, reader)
        if position is not None and (kept := table.owed(key, reader, sender)) is not None:
            await table.advance(key, reader, position, (kept, call))
            return kept, missed
        waiting = table.after(key, 0 if position is None else position.number)
        at = next((at for at, one in enumerate(waiting) if sender in (None, one.message.sender)), None)
        if at is None:
            return None
        kept = waiting[at]
        if position is not None and (oldest := table.first(key)) is not None:
            missed += max(oldest.place - position.place - 1, 0)
        giving = (kept, call) if call else None
        await table.advance(key, reader, Position(kept.number, kept.place), giving, waiting[:at])
        return kept, missed

    def _first(self, key: Key, sender: str | None, changed: asyncio.Event) -> Kept | None:
        """Return the oldest message of a queue that the waiting call of ``changed`` may take.

        Calls that have waited longer come first.
        """
        waiting = self._waiting.get(key, {})
        before = list(takewhile(lambda one: one[0] is not changed, waiting.items()))
        if not before:
            return self.table.first(key, 0, sender)
        anybodys = sender is None and all(wanted is None for _, wanted in before)
        free = self.table.after(key, limit=len(before) + 1 if anybodys else HISTORY)
        for other, wanted in before:
            theirs = next((kept for kept in free if wanted in (None, kept.message.sender)), None)
            if theirs is not None:
                free.remove(theirs)
                other.set()
        return next((kept for kept in free if sender in (None, kept.message.sender)), None)

    async def _undo(self, attempt: asyncio.Task[_Attempt], key: Key, reader: str, call: str) -> None:
        """Return the message of an attempt to the channel, because its caller no longer waits."""
        await asyncio.wait((attempt,))
        if attempt.cancelled() or attempt.exception() is not None or (received := attempt.result()[0]) is None:
            return
        given = Given(received[0].number, reader, call)
        with suppress(LogUnavailable):  # the call's outcome decides, once the log is available
            await self._give_back(key, given)

    async def _give_back(self, key: Key, given: Given) -> None:
        async with self._lock(key):
            if given.call:
                await self.table.settle(key, (), (given,))
            elif self.table.kind(key) == "queue":
                await self.table.untake(given.number)
            else:
                await self.table.owe(key, given)
            await self._hand_out(key)
        self._ring(key)

    async def _settle(self, key: Key) -> bool:
        """Look up the outcomes of calls that received messages, and return whether some are still unknown."""
        taken, back, unsettled = list[Given](), list[Given](), False
        for given in self.table.given(key):
            well = self._went_well(given.call)
            if well is None and given.call in self._calls:
                unsettled = True
                continue
            (taken if well else back).append(given)
            self._calls.discard(given.call)
        await self.table.settle(key, taken, back)
        return unsettled

    async def watch(self, key: Key, watcher: Watcher) -> None:
        """Let ``watcher`` take the waiting messages and all later ones."""
        async with self._lock(key):
            await self._settle(key)
            self._watchers.setdefault(key, []).append(watcher)
            await self._hand_out(key)

    def unwatch(self, key: Key, watcher: Watcher) -> None:
        watchers = self._watchers.get(key, [])
        if watcher in watchers:
            watchers.remove(watcher)
        if not watchers:
            self._watchers.pop(key, None)

    async def _hand_out(self, key: Key) -> None:
        """Give watchers their messages.

        A message is taken by its watcher first and then removed. After a crash between the two the watcher gets it again and
        ignores it, because it has the same number.
        """
        watchers = self._watchers.get(key)
        if not watchers:
            return
        if self.table.kind(key) == "broadcast":
            for watcher in tuple(watchers):
                read = self.table.position(key, watcher.reader)
                for kept in self.table.after(key, 0 if read is None else read.number):
                    if watcher.wants(kept.message) and not await watcher.take(kept):
                        break
                    await self.table.advance(key, watcher.reader, Position(kept.number, kept.place))
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

    async def aclose(self) -> None:
        """Settle all received messages whose calls have ended. The others are settled later."""
        if self._going_on:
            await asyncio.wait(set(self._going_on))
        with suppress(LogUnavailable):
            for key in self.table.unsettled():
                async with self._lock(key):
                    await self._settle(key)

    async def remove(self, session_id: str) -> None:
        """Remove the channels of a session that is closed."""
        for key in self.table.unsettled():
            if key.scope == session_id:
                self._calls.difference_update(given.call for given in self.table.given(key))
        await self.table.remove(session_id)
        for key in [key for key in self._waiting if key.scope == session_id]:
            self._ring(key)

    @asynccontextmanager
    async def _lock(self, key: Key) -> AsyncGenerator[None]:
        """Lock a channel."""
        turns = self._turns.setdefault(key, _Turns())
        turns.users += 1
        try:
            async with turns.lock:
                yield
        finally:
            turns.users -= 1
            if not turns.users:
                del self._turns[key]

    def _over(self, work: asyncio.Future[Any]) -> None:
        self._going_on.discard(work)
        if not work.cancelled():
            work.exception()  # the waiting caller got the exception

    def _ring(self, key: Key) -> None:
        for changed in self._waiting.get(key, ()):
            changed.set()


@dataclass(slots=True)
class _Turns:
    """A lock of one channel with the number of its users."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0


class SessionChannels:
    """The channels of one session.

    Implements :class:`~handrail.contract.doors.channels.Channels`.
    """

    def __init__(self, switchboard: Switchboard, session_id: str, top: str, agent: str, call: str = "") -> None:
        """Create the channels of a session.

        :param top: the session at the top of its tree
        :param call: the id of the call that uses them
        """
        self._call = call
        self._switchboard = switchboard
        self._session_id = session_id
        self._top = top
        self._agent = agent

    async def send(
        self, channel: str, text: str, *, kind: ChannelKind | None = None, data: Mapping[str, Any] | None = None
    ) -> int:
        return await self._switchboard.send(self.key(channel), self._agent, text, kind, data)

    async def receive(self, channel: str, *, timeout_ms: int, sender: str | None = None) -> Received:
        return await self._switchboard.receive(self.key(channel), self._session_id, timeout_ms, sender, self._call)

    def of_call(self, call_id: str) -> SessionChannels:
        """Return the channels for one call."""
        return SessionChannels(self._switchboard, self._session_id, self._top, self._agent, call_id)

    def key(self, channel: str) -> Key:
        """Return the key of a channel.

        :raises ToolError: ``invalid_input`` if the name is invalid
        """
        check_channel(channel)
        return Key("", channel.removeprefix(SHARED)) if channel.startswith(SHARED) else Key(self._top, channel)


# Notifications: stored until the session's agent takes them, with a way to wait for the next.

MAX_TEXT = 64 * 1024
"""The most characters of one notification. A longer text is cut, with a note."""


class Noticeboard:
    """The notifications of all sessions of a workspace, in the process that holds it.

    :param redactor: removes registered secrets
    """

    def __init__(self, table: NoticeTable, redactor: Redactor) -> None:
        self.table = table
        self._redactor = redactor
        self._sessions: dict[str, SessionNotices] = {}

    def of(self, session_id: str) -> SessionNotices:
        """Return the notifications of a session."""
        found = self._sessions.get(session_id)
        if found is None:
            found = self._sessions[session_id] = SessionNotices(self, session_id)
        found.left = False
        return found

    def forget(self, session_id: str) -> None:
        """Release a session that is no longer open. Its pending notifications stay stored."""
        if (found := self._sessions.get(session_id)) is not None:
            found.left = True
            self.let_go(found)

    def let_go(self, of: SessionNotices) -> None:
        """Drop an object whose session is not open and which expects no notification."""
        if of.left and not of.expects and self._sessions.get(of.session_id) is of:
            del self._sessions[of.session_id]

    async def post(self, notice: Notice, *along: Work) -> None:
        """Store a notification for a session, which may be closed for now.

        :param along: writes that are stored in the same transaction
        :raises UsageError: if too many notifications are pending
        """
        if self.table.count(notice.session_id) >= MAX_PENDING:
            raise UsageError(
                f"Session {notice.session_id} has {MAX_PENDING:,} pending notifications, which is the maximum. "
                "Continue the session so that its agent reads them, or close it."
            )
        text = self._redactor.text(notice.text)
        if len(text) > MAX_TEXT:
            text = f"{text[:MAX_TEXT]}\n({len(text) - MAX_TEXT:,} more characters are omitted)"
        data = None if notice.data is None else self._redactor.value(dict(notice.data))
        await self.table.post(replace(notice, text=text, data=data, source=self._redactor.text(notice.source)), *along)
        if (session := self._sessions.get(notice.session_id)) is not None:
            session.has_come(notice.source)


class SessionNotices:
    """The notifications of one session.

    Implements :class:`~handrail.contract.doors.channels.NoticeBox`.
    """

    def __init__(self, board: Noticeboard, session_id: str) -> None:
        self._board = board
        self.session_id = session_id
        self._expected: set[str] = set()
        self.left = False
        """Whether the session is no longer open."""
        self._changed = asyncio.Event()

    @property
    def expects(self) -> bool:
        """Whether running work will post a notification."""
        return bool(self._expected)

    async def pending(self) -> Sequence[Notice]:
        return self._board.table.pending(self.session_id)

    async def take(self, ids: Sequence[str]) -> None:
        await self._board.table.take(self.session_id, ids)

    async def arrived(self) -> None:
        while not await self._changes_until(self._any):
            pass

    async def awaited(self) -> bool:
        while not await self._changes_until(lambda: self._any() or not self._expected):
            pass
        return self._any()

    async def post(self, notice: Notice) -> None:
        await self._board.post(notice)

    def expect(self, source: str) -> None:
        self._expected.add(source)

    def forget(self, source: str) -> None:
        self._expected.discard(source)
        self._board.let_go(self)
        self._ring()

    def has_come(self, source: str) -> None:
        """Record that a notification of ``source`` was posted."""
        self.forget(source)

    def _any(self) -> bool:
        return self._board.table.count(self.session_id) > 0

    async def _changes_until(self, seen: Callable[[], bool]) -> bool:
        """Return whether ``seen`` is true now. If not, wait for the next change first."""
        changed = self._changed
        if seen():
            return True
        await changed.wait()
        return False

    def _ring(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
