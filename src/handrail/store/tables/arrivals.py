"""Channels with their messages, notifications and triggers, as rows.

The scope of a channel is the session at the top of a tree, or ``""`` for the whole workspace.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Any, Literal, NamedTuple, cast, get_args

from handrail.contract.doors.channels import (
    HISTORY,
    SHARED,
    ChannelKind,
    ChannelMessage,
    Notice,
    NoticeKind,
    Trigger,
    TriggerKind,
)
from handrail.store.database.connection import readable
from handrail.store.database.database import Database, OneRow, Statement, Work
from handrail.store.encoding import decode, encode

_UNBOUNDED = 2**62


class Key(NamedTuple):
    """One channel of the workspace."""

    scope: str
    name: str

    @property
    def shown(self) -> str:
        """As agents name it."""
        return self.name if self.scope else SHARED + self.name


class Kept(NamedTuple):
    """A message, with its number in the order of all, and its place in its channel, from 1."""

    number: int
    message: ChannelMessage
    place: int = 0


class Given(NamedTuple):
    """A message that a call was given, and whose end is not looked up yet."""

    number: int
    reader: str
    call: str


class Position(NamedTuple):
    """Up to where a reader of a broadcast has read."""

    number: int
    place: int


class ChannelTable:
    """The tables, for the workspace's holder. What writes is durable on return, and raises ``LogUnavailable`` where it
    cannot be; so does what reads where the database cannot be read."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def kind(self, key: Key) -> ChannelKind | None:
        """None where there is no such channel."""
        row = self._row("SELECT kind FROM channel WHERE scope = ? AND name = ?", key)
        return None if row is None else cast("ChannelKind", row[0])

    def named(self, scope: str) -> list[str]:
        """The channels of a scope."""
        return [row[0] for row in self._rows("SELECT name FROM channel WHERE scope = ? ORDER BY name", (scope,))]

    def unread(self, key: Key) -> int:
        """How many messages wait in a queue, or are kept of a broadcast."""
        row = self._row(f"SELECT count(*) FROM channel_message AS m WHERE {_HERE} AND {_FREE}", key)  # noqa: S608
        return cast("int", row[0]) if row is not None else 0

    async def send(self, key: Key, kind: ChannelKind, message: ChannelMessage) -> None:
        """Add a message, and the channel where it is not there yet. Of a broadcast the oldest go."""
        body = {
            "sender": message.sender,
            "text": message.text,
            "data": None if message.data is None else dict(message.data),
        }
        work: list[Statement | OneRow] = [
            ("INSERT INTO channel (scope, name, kind) VALUES (?, ?, ?) ON CONFLICT DO NOTHING", (*key, kind)),
            ("UPDATE channel SET sent = sent + 1 WHERE scope = ? AND name = ?", key),
            (
                "INSERT INTO channel_message (scope, channel, at_ns, taken, place, body) "
                "SELECT scope, name, ?, 0, sent, ? FROM channel WHERE scope = ? AND name = ?",
                (message.at_ns, encode(body, max_bytes=_UNBOUNDED), *key),
            ),
        ]
        if kind == "broadcast":
            work.append((_TRIM.format(where=""), (*key, *key, HISTORY)))
            work.append((_OWED_TO_NOBODY, (*key, *key)))
        await self._database.commit(_STATEMENTS, work)

    def first(self, key: Key, after: int = 0, sender: str | None = None) -> Kept | None:
        """The oldest message after a number that nobody has taken, nor was given."""
        found = self.after(key, after, limit=1 if sender is None else HISTORY)
        return next((kept for kept in found if sender is None or kept.message.sender == sender), None)

    def after(self, key: Key, number: int = 0, *, limit: int = HISTORY) -> list[Kept]:
        """Messages that nobody has taken, nor was given, the oldest first. Without those that are damaged."""
        sql = f"SELECT {_COLUMNS} FROM channel_message AS m WHERE {_HERE} AND {_FREE} AND number > ? ORDER BY number LIMIT ?"  # noqa: S608
        found = (_kept(key, *row) for row in self._rows(sql, (*key, number, limit)))
        return [kept for kept in found if kept is not None]

    async def take(self, key: Key, number: int) -> None:
        """Take a message out of a queue; some of those that were taken stay for whoever looks back."""
        await self._database.commit(
            _STATEMENTS,
            [
                OneRow("UPDATE channel_message SET taken = 1 WHERE number = ? AND taken = 0", (number,)),
                (_TRIM.format(where=" AND taken = 1"), (*key, *key, HISTORY)),
            ],
        )

    async def untake(self, number: int) -> None:
        """It reached nobody after all."""
        await self._database.commit(_STATEMENTS, [("UPDATE channel_message SET taken = 0 WHERE number = ?", (number,))])

    async def give(self, key: Key, reader: str, kept: Kept, call: str) -> None:
        """A call has a message, which is taken once the call has gone well."""
        await self._database.commit(_STATEMENTS, [(_GIVE, (*key, kept.number, reader, call))])

    def given(self, key: Key) -> list[Given]:
        """What calls have of a channel."""
        sql = "SELECT number, reader, call FROM channel_given WHERE scope = ? AND channel = ? AND call <> ''"
        return [Given(*row) for row in self._rows(sql, key)]

    def unsettled(self) -> list[Key]:
        """The channels of which calls have something."""
        return [
            Key(*row) for row in self._rows("SELECT DISTINCT scope, channel FROM channel_given WHERE call <> ''", ())
        ]

    async def settle(self, key: Key, taken: Sequence[Given], back: Sequence[Given]) -> None:
        """What has become of messages that calls were given: they are read, or wait again. One of a broadcast is owed to
        its reader."""
        queue = self.kind(key) == "queue"
        work: list[Statement | OneRow] = []
        for given in taken:
            work.append((_UNGIVE, (*key, given.number, given.reader)))
            if queue:
                work.append(("UPDATE channel_message SET taken = 1 WHERE number = ?", (given.number,)))
        for given in back:
            work.append((_UNGIVE if queue else _OWE, (*key, given.number, given.reader)))
        if taken and queue:
            work.append((_TRIM.format(where=" AND taken = 1"), (*key, *key, HISTORY)))
        if work:
            await self._database.commit(_STATEMENTS, work)

    async def owe(self, key: Key, given: Given) -> None:
        """It reached its reader not after all."""
        await self._database.commit(_STATEMENTS, [(_GIVE, (*key, given.number, given.reader, ""))])

    def owed(self, key: Key, reader: str, sender: str | None = None) -> Kept | None:
        """The oldest message of a broadcast that a reader was given in vain, as long as it is kept."""
        sql = (
            f"SELECT {_COLUMNS} FROM channel_message AS m WHERE {_HERE} AND number IN (SELECT number FROM channel_given "  # noqa: S608
            "WHERE scope = ? AND channel = ? AND reader = ? AND call = '') ORDER BY number"
        )
        found = (_kept(key, *row) for row in self._rows(sql, (*key, *key, reader)))
        return next((kept for kept in found if kept is not None and sender in (None, kept.message.sender)), None)

    def position(self, key: Key, reader: str) -> Position | None:
        """Up to where a reader of a broadcast has read; None for one that never has."""
        sql = "SELECT number, place FROM channel_reader WHERE scope = ? AND channel = ? AND reader = ?"
        row = self._row(sql, (*key, reader))
        return None if row is None else Position(*row)

    def lost(self, key: Key, reader: str) -> int:
        """How many messages of a broadcast were owed to a reader, and are kept no more."""
        row = self._row(f"SELECT count(*) FROM channel_given WHERE {_LOST}", (*key, reader))  # noqa: S608
        return cast("int", row[0]) if row is not None else 0

    async def advance(
        self,
        key: Key,
        reader: str,
        to: Position,
        giving: tuple[Kept, str] | None = None,
        skipped: Iterable[Kept] = (),
    ) -> None:
        """A reader of a broadcast has read up to a message, and been told what it has lost.

        :param giving: what a call has of it; it is owed to the reader if that call goes wrong
        :param skipped: those before it which the reader did not ask for: they are owed to it
        """
        sql = (
            "INSERT INTO channel_reader (scope, channel, reader, number, place) VALUES (?, ?, ?, ?, ?) "
            "ON CONFLICT DO UPDATE SET number = excluded.number, place = excluded.place"
        )
        work: list[Statement | OneRow] = [(sql, (*key, reader, *to))]
        work.append((f"DELETE FROM channel_given WHERE {_LOST}", (*key, reader)))  # noqa: S608
        work += [(_GIVE, (*key, kept.number, reader, "")) for kept in skipped]
        if giving is not None:
            kept, call = giving
            work.append((_GIVE if call else _UNGIVE, (*key, kept.number, reader, *((call,) if call else ()))))
        await self._database.commit(_STATEMENTS, work)

    async def forget_reader(self, key: Key, reader: str) -> None:
        """There is no such reader any more."""
        where = "WHERE scope = ? AND channel = ? AND reader = ?"
        tables = ("channel_reader", "channel_given")
        await self._database.commit(
            _STATEMENTS,
            [(f"DELETE FROM {table} {where}", (*key, reader)) for table in tables],  # noqa: S608
        )

    async def forget_idle(self, scope: str, before_ns: int) -> None:
        """Remove the queues of a scope in which nothing waits, and the broadcasts over which nothing came since then:
        whoever sends makes them anew."""
        unread = "SELECT channel FROM channel_message WHERE scope = ? AND taken = 0"
        recent = "SELECT channel FROM channel_message WHERE scope = ? AND at_ns >= ?"
        left = "channel NOT IN (SELECT name FROM channel WHERE scope = ?)"
        work: list[Statement | OneRow] = [
            (f"DELETE FROM channel WHERE scope = ? AND kind = 'queue' AND name NOT IN ({unread})", (scope, scope)),  # noqa: S608
            (
                f"DELETE FROM channel WHERE scope = ? AND kind = 'broadcast' AND name NOT IN ({recent})",  # noqa: S608
                (scope, scope, before_ns),
            ),
        ]
        for table in ("channel_message", "channel_reader", "channel_given"):
            work.append((f"DELETE FROM {table} WHERE scope = ? AND {left}", (scope, scope)))  # noqa: S608
        await self._database.commit(_STATEMENTS, work)

    async def remove(self, session_id: str) -> None:
        """A session is closed for good: what is its own goes."""
        await self._database.commit(
            _STATEMENTS,
            [
                ("DELETE FROM channel WHERE scope = ?", (session_id,)),
                ("DELETE FROM channel_message WHERE scope = ?", (session_id,)),
                ("DELETE FROM channel_given WHERE scope = ?", (session_id,)),
                ("DELETE FROM channel_given WHERE reader = ? AND call = ''", (session_id,)),
                ("DELETE FROM channel_reader WHERE scope = ? OR reader = ?", (session_id, session_id)),
                (  # those of its triggers, in channels of others: "0" comes after "/"
                    "DELETE FROM channel_reader WHERE reader > ? AND reader < ?",
                    (f"trigger/{session_id}/", f"trigger/{session_id}0"),
                ),
            ],
        )

    def _rows(self, sql: str, values: Sequence[str | int]) -> list[Any]:
        with readable(self._database.path):
            return self._database.reading.execute(sql, values).fetchall()

    def _row(self, sql: str, values: Sequence[str | int]) -> Any:
        with readable(self._database.path):
            return self._database.reading.execute(sql, values).fetchone()


_COLUMNS = "number, at_ns, place, body"
_HERE = "scope = ? AND channel = ?"
_FREE = (  # of a broadcast each reader has its own
    "taken = 0 AND NOT EXISTS (SELECT 1 FROM channel_given AS g WHERE g.scope = m.scope AND g.channel = m.channel "
    "AND g.number = m.number AND EXISTS (SELECT 1 FROM channel AS c WHERE c.scope = g.scope AND c.name = g.channel "
    "AND c.kind = 'queue'))"
)
_GIVE = (
    "INSERT INTO channel_given (scope, channel, number, reader, call) VALUES (?, ?, ?, ?, ?) "
    "ON CONFLICT DO UPDATE SET call = excluded.call"
)
_UNGIVE = "DELETE FROM channel_given WHERE scope = ? AND channel = ? AND number = ? AND reader = ?"
_LOST = "scope = ? AND channel = ? AND reader = ? AND call = '' AND number NOT IN (SELECT number FROM channel_message)"
_OWED_TO_NOBODY = (
    "DELETE FROM channel_given WHERE scope = ? AND channel = ? AND call = '' "
    "AND reader NOT IN (SELECT reader FROM channel_reader WHERE scope = ? AND channel = ?)"
)
_OWE = "UPDATE channel_given SET call = '' WHERE scope = ? AND channel = ? AND number = ? AND reader = ?"
_TRIM = (
    "DELETE FROM channel_message WHERE scope = ? AND channel = ?{where} AND number <= (SELECT number FROM channel_message "
    "WHERE scope = ? AND channel = ?{where} ORDER BY number DESC LIMIT 1 OFFSET ?)"
)


def _kept(key: Key, number: int, at_ns: int, place: int, body: object) -> Kept | None:
    try:
        data: Mapping[str, Any] = decode(body) if isinstance(body, bytes) else {}
        sender, text, more = data["sender"], data["text"], data["data"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return None
    if not isinstance(sender, str) or not isinstance(text, str):
        return None
    return Kept(number, ChannelMessage(key.shown, sender, text, at_ns, more), place)


class _Statements:
    def opened(self, connection: sqlite3.Connection) -> None:
        pass

    def statements(self, batch: Sequence[Sequence[Statement | OneRow]]) -> Iterable[Statement | OneRow]:
        for work in batch:
            yield from work


_STATEMENTS = _Statements()


# Notifications to the agents of sessions: one row for each, by its delivery id, taken once.

MOST_AT_ONCE = 200
MOST_BYTES_AT_ONCE = 4 * 1024 * 1024
"""Of the notices of one look; the first is always among them."""
MAX_TAKEN = 1_000
"""Of a session's notices that were taken, how many are still known, so that the same delivery is not told again."""


class NoticeTable:
    """The table of notices."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def post(self, notice: Notice, *along: Work) -> None:
        """Keep a notice; one of that id that is there stays as it is. Durable on return.

        :param along: what is kept together with it, or not at all
        :raises LogUnavailable: when it cannot be made durable
        """
        if along:
            await self._database.commit_together([(_NOTICE_STATEMENTS, ("post", notice)), *along])
        else:
            await self._database.commit(_NOTICE_STATEMENTS, ("post", notice))

    async def take(self, session_id: str, ids: Sequence[str]) -> None:
        """Mark notices as taken. Durable on return.

        :raises LogUnavailable: when it cannot be made durable
        """
        if ids:
            await self._database.commit(*self.taking(session_id, ids))

    def taking(self, session_id: str, ids: Sequence[str]) -> Work:
        """The same as one of several works that are written whole or not at all."""
        return _NOTICE_STATEMENTS, ("take", session_id, tuple(ids))

    def pending(self, session_id: str) -> list[Notice]:
        """A session's notices that were not taken, in the order in which they came: the first of very many. Those that are
        damaged are taken, since nobody can be told.

        :raises LogUnavailable: when the database cannot be read
        """
        sql = "SELECT id, body FROM notice WHERE session = ? AND taken = 0 ORDER BY number"
        with readable(self._database.path):
            found, damaged, size = list[Notice](), list[str](), 0
            with closing(self._database.reading.execute(sql, (session_id,))) as rows:
                for id, body in rows:
                    size += len(body) if isinstance(body, bytes) else 0
                    if len(found) + len(damaged) >= MOST_AT_ONCE or (found and size > MOST_BYTES_AT_ONCE):
                        break
                    notice = _notice(id, session_id, body)
                    if notice is not None:
                        found.append(notice)
                    else:
                        damaged.append(id)
        if damaged:
            self._database.append(_NOTICE_STATEMENTS, ("take", session_id, tuple(damaged)))
        return found

    def count(self, session_id: str) -> int:
        """How many wait.

        :raises LogUnavailable: when the database cannot be read
        """
        sql = "SELECT count(*) FROM notice WHERE session = ? AND taken = 0"
        with readable(self._database.path):
            return cast("int", self._database.reading.execute(sql, (session_id,)).fetchone()[0])


def _notice(id: object, session_id: str, body: object) -> Notice | None:
    try:
        data: Mapping[str, Any] = decode(body) if isinstance(body, bytes) else {}
        kind, source, text, at_ns = data["kind"], data["source"], data["text"], int(data["at_ns"])
        more, untrusted = data["data"], data["untrusted"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return None
    if kind not in get_args(NoticeKind) or not all(isinstance(one, str) for one in (id, source, text, untrusted or "")):
        return None
    return Notice(str(id), session_id, kind, source, text, at_ns, more, untrusted)


_Change = tuple[Literal["post"], Notice] | tuple[Literal["take"], str, tuple[str, ...]]


class _NoticeStatements:
    """The table's part in the writer; nothing is kept in memory."""

    def opened(self, connection: sqlite3.Connection) -> None:
        pass

    def statements(self, batch: Sequence[_Change]) -> Iterable[Statement]:
        for change in batch:
            if change[0] == "post":
                notice = change[1]
                body = {
                    "kind": notice.kind,
                    "source": notice.source,
                    "text": notice.text,
                    "at_ns": notice.at_ns,
                    "data": None if notice.data is None else dict(notice.data),
                    "untrusted": notice.untrusted,
                }
                yield (
                    "INSERT INTO notice (id, session, taken, body) VALUES (?, ?, 0, ?) ON CONFLICT (id) DO NOTHING",
                    (notice.id, notice.session_id, encode(body, max_bytes=_UNBOUNDED)),
                )
                continue
            _, session, ids = change
            for id in ids:
                yield "UPDATE notice SET taken = 1 WHERE id = ? AND session = ?", (id, session)
            yield _TRIM_NOTICES, (session, session, MAX_TAKEN)


_NOTICE_STATEMENTS = _NoticeStatements()
_TRIM_NOTICES = (
    "DELETE FROM notice WHERE session = ? AND taken = 1 AND number <= "
    "(SELECT number FROM notice WHERE session = ? AND taken = 1 ORDER BY number DESC LIMIT 1 OFFSET ?)"
)


# Triggers: one row for each name in a session, as long as it may fire.

_KINDS = get_args(TriggerKind)
_FIELDS = {
    **dict.fromkeys(("created_ns", "fired", "every_ns", "next_ns"), int),
    **dict.fromkeys(("name", "session_id", "prompt", "cron", "channel", "sender", "tool", "fault"), str),
}
_MAY_BE_EMPTY = frozenset({"every_ns", "next_ns", "cron", "channel", "sender", "tool", "fault"})


class TriggerTable:
    """The table, for the workspace's holder. What writes is durable on return, and raises ``LogUnavailable`` where it
    cannot be; so does what reads where the database cannot be read."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def all(self) -> list[Trigger]:
        """Every one there is, without those that are damaged."""
        with readable(self._database.path):
            rows = self._database.reading.execute("SELECT body FROM trigger_row ORDER BY session, name").fetchall()
        return [trigger for (body,) in rows if (trigger := _trigger(body)) is not None]

    @staticmethod
    def putting(trigger: Trigger) -> Work:
        """What keeps it as it is now."""
        sql = "INSERT INTO trigger_row (session, name, body) VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET body = excluded.body"
        body = encode(asdict(trigger), max_bytes=_UNBOUNDED)
        return _TRIGGER_STATEMENTS, [(sql, (trigger.session_id, trigger.name, body))]

    @staticmethod
    def removing(trigger: Trigger) -> Work:
        """What removes it."""
        sql = "DELETE FROM trigger_row WHERE session = ? AND name = ?"
        return _TRIGGER_STATEMENTS, [(sql, (trigger.session_id, trigger.name))]

    async def put(self, trigger: Trigger) -> None:
        """Keep it as it is now."""
        await self._database.commit(*self.putting(trigger))

    async def remove(self, trigger: Trigger) -> None:
        await self._database.commit(*self.removing(trigger))

    async def remove_below(self) -> None:
        """Those of sub-agents' sessions, and what they have of channels."""
        below = "(SELECT id FROM session WHERE under IS NOT NULL)"
        with readable(self._database.path):
            sql = f"SELECT session, name FROM trigger_row WHERE session IN {below}"  # noqa: S608 - our own words
            found = self._database.reading.execute(sql).fetchall()
        if found:
            readers = [("DELETE FROM channel_reader WHERE reader = ?", (f"trigger/{s}/{name}",)) for s, name in found]
            sql = f"DELETE FROM trigger_row WHERE session IN {below}"  # noqa: S608
            await self._database.commit(_TRIGGER_STATEMENTS, [(sql, ()), *readers])

    async def remove_all(self, session_id: str) -> None:
        """A session is closed for good."""
        await self._database.commit(_TRIGGER_STATEMENTS, [("DELETE FROM trigger_row WHERE session = ?", (session_id,))])


def _trigger(body: object) -> Trigger | None:
    """As it was kept; None where what is there is not what was written."""
    try:
        data: Mapping[str, Any] = decode(body) if isinstance(body, bytes) else {}
        trigger = Trigger(**data)
    except (ValueError, RecursionError, TypeError):
        return None
    if trigger.kind not in _KINDS or (trigger.kind == "class" and trigger.tool is None):
        return None
    return trigger if _has_its_types(trigger) else None


def _has_its_types(trigger: Trigger) -> bool:
    for name, kind in _FIELDS.items():
        value = getattr(trigger, name)
        if not isinstance(value, kind) and (value or name not in _MAY_BE_EMPTY):
            return False
    return isinstance(trigger.arguments, dict | None)


class _TriggerStatements:
    def opened(self, connection: sqlite3.Connection) -> None:
        pass

    def statements(self, batch: Sequence[Sequence[Statement | OneRow]]) -> Iterable[Statement | OneRow]:
        for work in batch:
            yield from work


_TRIGGER_STATEMENTS = _TriggerStatements()
