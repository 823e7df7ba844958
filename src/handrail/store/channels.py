"""Channels and their messages, as rows. A scope is the session at the top of a tree, or ``""`` for the whole workspace."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from handrail.contract.arrivals import HISTORY, SHARED, ChannelKind, ChannelMessage
from handrail.store.connection import readable
from handrail.store.database import Database, OneRow, Statement
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
    """A message, with its number in the order of all."""

    number: int
    message: ChannelMessage


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
        row = self._row("SELECT count(*) FROM channel_message WHERE scope = ? AND channel = ? AND taken = 0", key)
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
            (
                "INSERT INTO channel_message (scope, channel, at_ns, taken, body) VALUES (?, ?, ?, 0, ?)",
                (*key, message.at_ns, encode(body, max_bytes=_UNBOUNDED)),
            ),
        ]
        if kind == "broadcast":
            work.append((_TRIM.format(where=""), (*key, *key, HISTORY)))
        await self._database.commit(_STATEMENTS, work)

    def first(self, key: Key, after: int = 0, sender: str | None = None) -> Kept | None:
        """The oldest message after a number that nobody has taken."""
        found = self.after(key, after, limit=1 if sender is None else HISTORY)
        return next((kept for kept in found if sender is None or kept.message.sender == sender), None)

    def after(self, key: Key, number: int = 0, *, limit: int = HISTORY) -> list[Kept]:
        """Messages that nobody has taken, the oldest first. Without those that are damaged."""
        sql = (
            "SELECT number, at_ns, body FROM channel_message WHERE scope = ? AND channel = ? AND taken = 0 AND number > ? "
            "ORDER BY number LIMIT ?"
        )
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

    def position(self, key: Key, reader: str) -> int | None:
        """Up to which number a reader of a broadcast has read; None for one that never has."""
        sql = "SELECT number FROM channel_reader WHERE scope = ? AND channel = ? AND reader = ?"
        row = self._row(sql, (*key, reader))
        return None if row is None else cast("int", row[0])

    async def advance(self, key: Key, reader: str, number: int) -> None:
        """A reader of a broadcast has read up to a number."""
        sql = (
            "INSERT INTO channel_reader (scope, channel, reader, number) VALUES (?, ?, ?, ?) "
            "ON CONFLICT DO UPDATE SET number = excluded.number"
        )
        await self._database.commit(_STATEMENTS, [(sql, (*key, reader, number))])

    async def forget_reader(self, key: Key, reader: str) -> None:
        """There is no such reader any more."""
        sql = "DELETE FROM channel_reader WHERE scope = ? AND channel = ? AND reader = ?"
        await self._database.commit(_STATEMENTS, [(sql, (*key, reader))])

    async def forget_empty(self, scope: str) -> None:
        """Remove the queues of a scope in which nothing waits: whoever sends makes them anew."""
        unread = "SELECT channel FROM channel_message WHERE scope = ? AND taken = 0"
        await self._database.commit(
            _STATEMENTS,
            [
                (f"DELETE FROM channel WHERE scope = ? AND kind = 'queue' AND name NOT IN ({unread})", (scope, scope)),  # noqa: S608
                (
                    "DELETE FROM channel_message WHERE scope = ? AND channel NOT IN (SELECT name FROM channel WHERE scope = ?)",
                    (scope, scope),
                ),
            ],
        )

    async def remove(self, session_id: str) -> None:
        """A session is closed for good: what is its own goes."""
        await self._database.commit(
            _STATEMENTS,
            [
                ("DELETE FROM channel WHERE scope = ?", (session_id,)),
                ("DELETE FROM channel_message WHERE scope = ?", (session_id,)),
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


_TRIM = (
    "DELETE FROM channel_message WHERE scope = ? AND channel = ?{where} AND number <= (SELECT number FROM channel_message "
    "WHERE scope = ? AND channel = ?{where} ORDER BY number DESC LIMIT 1 OFFSET ?)"
)


def _kept(key: Key, number: int, at_ns: int, body: object) -> Kept | None:
    try:
        data: Mapping[str, Any] = decode(body) if isinstance(body, bytes) else {}
        sender, text, more = data["sender"], data["text"], data["data"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return None
    if not isinstance(sender, str) or not isinstance(text, str):
        return None
    return Kept(number, ChannelMessage(key.shown, sender, text, at_ns, more))


class _Statements:
    def opened(self, connection: sqlite3.Connection) -> None:
        pass

    def statements(self, batch: Sequence[Sequence[Statement | OneRow]]) -> Iterable[Statement | OneRow]:
        for work in batch:
            yield from work


_STATEMENTS = _Statements()
