"""Channels with their messages, notifications and triggers, as rows.

The scope of a channel is the session at the top of a tree, or ``""`` for the whole workspace.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import NamedTuple, get_args

from handrail.contract.services.channels_and_triggers import (
    CHANNEL_CAPACITY,
    SHARED_PREFIX,
    ChannelKind,
    ChannelMessage,
    Notification,
    NotificationKind,
    Trigger,
    TriggerKind,
)
from handrail.store.database.sqlite_connection import map_to_log_unavailable
from handrail.store.database.workspace_database import (
    SingleRowStatement,
    Statement,
    TableWork,
    WorkspaceTable,
    make_statement_work,
)
from handrail.store.json_fallback_encoding import decode_stored_object, encode_json_with_fallback

_UNBOUNDED = 2**62


class ChannelKey(NamedTuple):
    """The identity of one channel of the workspace."""

    scope: str
    name: str

    @property
    def display_name(self) -> str:
        """The name that agents use for it."""
        return self.name if self.scope else SHARED_PREFIX + self.name


class StoredChannelMessage(NamedTuple):
    """A stored message, with its number among all messages and its position in its channel, from 1."""

    number: int
    message: ChannelMessage
    position: int = 0


class UnsettledDelivery(NamedTuple):
    """A message that was delivered to a call whose outcome is not known yet."""

    number: int
    reader: str
    call: str


class BroadcastReaderPosition(NamedTuple):
    """How far a reader of a broadcast has read."""

    number: int
    position: int


class ChannelTable(WorkspaceTable):
    """The tables of channels, for the holder of the workspace.

    A method that writes is durable on return. All raise ``LogUnavailable`` if the database cannot be written or read.
    """

    def find_kind(self, key: ChannelKey) -> ChannelKind | None:
        """Return the kind of a channel; None if it does not exist."""
        rows = self._read_rows("SELECT kind FROM channel WHERE scope = ? AND name = ?", key)
        return rows[0][0] if rows else None

    def list_names(self, scope: str) -> list[str]:
        rows = self._read_rows("SELECT name FROM channel WHERE scope = ? ORDER BY name", (scope,))
        return [name for (name,) in rows]

    def count_waiting_messages(self, key: ChannelKey) -> int:
        """Return how many messages wait in a queue, or are stored of a broadcast."""
        sql = f"SELECT count(*) FROM channel_message AS m WHERE {_HERE} AND {_FREE}"  # noqa: S608
        return self._read_rows(sql, key)[0][0]

    async def add_message(self, key: ChannelKey, kind: ChannelKind, message: ChannelMessage) -> None:
        """Add a message, and its channel if necessary. The oldest messages of a broadcast are removed."""
        body = {
            "sender": message.sender,
            "text": message.text,
            "data": None if message.data is None else dict(message.data),
        }
        work: list[Statement] = [
            ("INSERT INTO channel (scope, name, kind) VALUES (?, ?, ?) ON CONFLICT DO NOTHING", (*key, kind)),
            ("UPDATE channel SET sent = sent + 1 WHERE scope = ? AND name = ?", key),
            (
                "INSERT INTO channel_message (scope, channel, at_ns, consumed, position, body) "
                "SELECT scope, name, ?, 0, sent, ? FROM channel WHERE scope = ? AND name = ?",
                (message.at_ns, encode_json_with_fallback(body, max_bytes=_UNBOUNDED), *key),
            ),
        ]
        if kind == "broadcast":
            work.append((_TRIM.format(where=""), (*key, *key, CHANNEL_CAPACITY)))
            work.append((_OWED_TO_NOBODY, (*key, *key)))
        await self._write(*work)

    def find_oldest_message_after(
        self, key: ChannelKey, after: int = 0, sender: str | None = None
    ) -> StoredChannelMessage | None:
        """Return the oldest available message after a number; None if there is none."""
        found = self.list_messages_after(key, after, limit=1 if sender is None else CHANNEL_CAPACITY)
        return next((kept for kept in found if sender is None or kept.message.sender == sender), None)

    def list_messages_after(
        self, key: ChannelKey, number: int = 0, *, limit: int = CHANNEL_CAPACITY
    ) -> list[StoredChannelMessage]:
        """Return available messages, the oldest first, without damaged ones.

        A message is available if it is neither consumed nor delivered.
        """
        sql = f"SELECT {_COLUMNS} FROM channel_message AS m WHERE {_HERE} AND {_FREE} AND number > ? ORDER BY number LIMIT ?"  # noqa: S608
        found = (_parse_message(key, *row) for row in self._read_rows(sql, (*key, number, limit)))
        return [kept for kept in found if kept is not None]

    async def consume_message(self, key: ChannelKey, number: int) -> None:
        """Consume a message of a queue. Some consumed messages stay for the history."""
        await self._write(
            SingleRowStatement("UPDATE channel_message SET consumed = 1 WHERE number = ? AND consumed = 0", (number,)),
            (_TRIM.format(where=" AND consumed = 1"), (*key, *key, CHANNEL_CAPACITY)),
        )

    async def return_message_to_queue(self, number: int) -> None:
        """Make a consumed message available again, since it reached no reader."""
        await self._write(("UPDATE channel_message SET consumed = 0 WHERE number = ?", (number,)))

    async def record_delivery(self, key: ChannelKey, reader: str, kept: StoredChannelMessage, call: str) -> None:
        """Deliver a message to a call. It counts as consumed once the call has succeeded."""
        await self._write((_GIVE, (*key, kept.number, reader, call)))

    def list_unsettled_deliveries(self, key: ChannelKey) -> list[UnsettledDelivery]:
        """Return the deliveries of a channel whose calls have no known outcome."""
        sql = "SELECT number, reader, call FROM channel_delivery WHERE scope = ? AND channel = ? AND call <> ''"
        return [UnsettledDelivery(*row) for row in self._read_rows(sql, key)]

    def list_channels_with_unsettled_deliveries(self) -> list[ChannelKey]:
        rows = self._read_rows("SELECT DISTINCT scope, channel FROM channel_delivery WHERE call <> ''")
        return [ChannelKey(*row) for row in rows]

    async def settle_deliveries(
        self, key: ChannelKey, taken: Sequence[UnsettledDelivery], back: Sequence[UnsettledDelivery]
    ) -> None:
        """Mark delivered messages as consumed, or make them available again.

        In a broadcast, the latter stay undelivered for their reader alone.
        """
        queue = self.find_kind(key) == "queue"
        work: list[Statement] = []
        for given in taken:
            work.append((_UNGIVE, (*key, given.number, given.reader)))
            if queue:
                work.append(("UPDATE channel_message SET consumed = 1 WHERE number = ?", (given.number,)))
        for given in back:
            work.append((_UNGIVE if queue else _OWE, (*key, given.number, given.reader)))
        if taken and queue:
            work.append((_TRIM.format(where=" AND consumed = 1"), (*key, *key, CHANNEL_CAPACITY)))
        if work:
            await self._write(*work)

    async def mark_message_undelivered(self, key: ChannelKey, given: UnsettledDelivery) -> None:
        """Mark a message of a broadcast as undelivered for its reader."""
        await self._write((_GIVE, (*key, given.number, given.reader, "")))

    def find_undelivered_message(
        self, key: ChannelKey, reader: str, sender: str | None = None
    ) -> StoredChannelMessage | None:
        """Return the oldest stored message of a broadcast that is undelivered for a reader; None if there is none."""
        sql = (
            f"SELECT {_COLUMNS} FROM channel_message AS m WHERE {_HERE} AND number IN (SELECT number FROM channel_delivery "  # noqa: S608
            "WHERE scope = ? AND channel = ? AND reader = ? AND call = '') ORDER BY number"
        )
        found = (_parse_message(key, *row) for row in self._read_rows(sql, (*key, *key, reader)))
        return next((kept for kept in found if kept is not None and sender in (None, kept.message.sender)), None)

    def find_reader_position(self, key: ChannelKey, reader: str) -> BroadcastReaderPosition | None:
        """Return how far a reader of a broadcast has read; None if it never has."""
        sql = "SELECT number, position FROM channel_reader WHERE scope = ? AND channel = ? AND reader = ?"
        rows = self._read_rows(sql, (*key, reader))
        return BroadcastReaderPosition(*rows[0]) if rows else None

    def count_lost_messages(self, key: ChannelKey, reader: str) -> int:
        """Return how many undelivered messages of a broadcast a reader lost, since they are no longer stored."""
        return self._read_rows(f"SELECT count(*) FROM channel_delivery WHERE {_LOST}", (*key, reader))[0][0]  # noqa: S608

    async def store_reader_position(
        self,
        key: ChannelKey,
        reader: str,
        to: BroadcastReaderPosition,
        giving: tuple[StoredChannelMessage, str] | None = None,
        skipped: Iterable[StoredChannelMessage] = (),
    ) -> None:
        """Store how far a reader of a broadcast has read, and clear its lost messages.

        :param giving: the message and the call that it is delivered to; it becomes undelivered if that call fails
        :param skipped: earlier messages that the reader did not ask for, which become undelivered
        """
        sql = (
            "INSERT INTO channel_reader (scope, channel, reader, number, position) VALUES (?, ?, ?, ?, ?) "
            "ON CONFLICT DO UPDATE SET number = excluded.number, position = excluded.position"
        )
        work: list[Statement] = [(sql, (*key, reader, *to))]
        work.append((f"DELETE FROM channel_delivery WHERE {_LOST}", (*key, reader)))  # noqa: S608
        work += [(_GIVE, (*key, kept.number, reader, "")) for kept in skipped]
        if giving is not None:
            kept, call = giving
            work.append((_GIVE if call else _UNGIVE, (*key, kept.number, reader, *((call,) if call else ()))))
        await self._write(*work)

    async def remove_reader(self, key: ChannelKey, reader: str) -> None:
        where = "WHERE scope = ? AND channel = ? AND reader = ?"
        tables = ("channel_reader", "channel_delivery")
        await self._write(*((f"DELETE FROM {table} {where}", (*key, reader)) for table in tables))  # noqa: S608

    async def remove_idle_channels(self, scope: str, before_ns: int) -> None:
        """Remove the empty queues of a scope, and the broadcasts without a message since ``before_ns``.

        A later message creates its channel again.
        """
        unread = "SELECT channel FROM channel_message WHERE scope = ? AND consumed = 0"
        recent = "SELECT channel FROM channel_message WHERE scope = ? AND at_ns >= ?"
        left = "channel NOT IN (SELECT name FROM channel WHERE scope = ?)"
        work: list[Statement] = [
            (f"DELETE FROM channel WHERE scope = ? AND kind = 'queue' AND name NOT IN ({unread})", (scope, scope)),  # noqa: S608
            (
                f"DELETE FROM channel WHERE scope = ? AND kind = 'broadcast' AND name NOT IN ({recent})",  # noqa: S608
                (scope, scope, before_ns),
            ),
        ]
        for table in ("channel_message", "channel_reader", "channel_delivery"):
            work.append((f"DELETE FROM {table} WHERE scope = ? AND {left}", (scope, scope)))  # noqa: S608
        await self._write(*work)

    async def remove_session(self, session_id: str) -> None:
        """Remove all that belongs to a session, since it is closed for good."""
        await self._write(
            ("DELETE FROM channel WHERE scope = ?", (session_id,)),
            ("DELETE FROM channel_message WHERE scope = ?", (session_id,)),
            ("DELETE FROM channel_delivery WHERE scope = ?", (session_id,)),
            ("DELETE FROM channel_delivery WHERE reader = ? AND call = ''", (session_id,)),
            ("DELETE FROM channel_reader WHERE scope = ? OR reader = ?", (session_id, session_id)),
            (  # readers of its triggers in channels of other sessions: "0" comes after "/"
                "DELETE FROM channel_reader WHERE reader > ? AND reader < ?",
                (f"trigger/{session_id}/", f"trigger/{session_id}0"),
            ),
        )


_COLUMNS = "number, at_ns, position, body"
_HERE = "scope = ? AND channel = ?"
_FREE = (  # each reader of a broadcast has its own delivery
    "consumed = 0 AND NOT EXISTS (SELECT 1 FROM channel_delivery AS g WHERE g.scope = m.scope AND g.channel = m.channel "
    "AND g.number = m.number AND EXISTS (SELECT 1 FROM channel AS c WHERE c.scope = g.scope AND c.name = g.channel "
    "AND c.kind = 'queue'))"
)
_GIVE = (
    "INSERT INTO channel_delivery (scope, channel, number, reader, call) VALUES (?, ?, ?, ?, ?) "
    "ON CONFLICT DO UPDATE SET call = excluded.call"
)
_UNGIVE = "DELETE FROM channel_delivery WHERE scope = ? AND channel = ? AND number = ? AND reader = ?"
_LOST = "scope = ? AND channel = ? AND reader = ? AND call = '' AND number NOT IN (SELECT number FROM channel_message)"
_OWED_TO_NOBODY = (
    "DELETE FROM channel_delivery WHERE scope = ? AND channel = ? AND call = '' "
    "AND reader NOT IN (SELECT reader FROM channel_reader WHERE scope = ? AND channel = ?)"
)
_OWE = "UPDATE channel_delivery SET call = '' WHERE scope = ? AND channel = ? AND number = ? AND reader = ?"
_TRIM = (
    "DELETE FROM channel_message WHERE scope = ? AND channel = ?{where} AND number <= (SELECT number FROM channel_message "
    "WHERE scope = ? AND channel = ?{where} ORDER BY number DESC LIMIT 1 OFFSET ?)"
)


def _parse_message(key: ChannelKey, number: int, at_ns: int, place: int, body: object) -> StoredChannelMessage | None:
    data = decode_stored_object(body)
    match data:
        case {"sender": str(sender), "text": str(text), "data": more}:
            return StoredChannelMessage(number, ChannelMessage(key.display_name, sender, text, at_ns, more), place)
        case _:
            return None


# Notifications to the agents of sessions: one row for each, by its delivery id, taken once.

MAX_NOTIFICATIONS_AT_ONCE = 200
MAX_NOTIFICATION_BYTES_AT_ONCE = 4 * 1024 * 1024
"""Bytes of the notifications of one read; the first one is always included."""
MAX_TAKEN = 1_000
"""How many delivered notifications of a session are remembered, so that none is delivered twice."""


class NotificationTable(WorkspaceTable):
    """The table of notifications.

    :raises LogUnavailable: by every method that reads or writes, if the database fails
    """

    async def post(self, notice: Notification, *along: TableWork) -> None:
        """Store a notification unless its id exists. Durable on return.

        :param along: works of the same transaction
        """
        body = {name: getattr(notice, name) for name in ("kind", "source", "text", "at_ns", "untrusted")}
        body["data"] = None if notice.data is None else dict(notice.data)
        sql = "INSERT INTO notification (id, session, delivered, body) VALUES (?, ?, 0, ?) ON CONFLICT (id) DO NOTHING"
        values = (notice.id, notice.session_id, encode_json_with_fallback(body, max_bytes=_UNBOUNDED))
        await self.commit(make_statement_work((sql, values)), *along)

    async def mark_delivered(self, session_id: str, ids: Sequence[str]) -> None:
        """Mark notifications as delivered. Durable on return."""
        if ids:
            await self.commit(self.build_mark_delivered_work(session_id, ids))

    def build_mark_delivered_work(self, session_id: str, ids: Sequence[str]) -> TableWork:
        """Return the work that marks notifications as delivered, for a common transaction."""
        sql = "UPDATE notification SET delivered = 1 WHERE id = ? AND session = ?"
        trim = (_TRIM_NOTICES, (session_id, session_id, MAX_TAKEN))
        return make_statement_work(*((sql, (id, session_id)) for id in ids), trim)

    def list_pending(self, session_id: str) -> list[Notification]:
        """Return the first pending notifications of a session, in order of arrival.

        Damaged ones are marked as delivered, since they cannot be delivered.
        """
        sql = "SELECT id, body FROM notification WHERE session = ? AND delivered = 0 ORDER BY number"
        with map_to_log_unavailable(self._database.path):
            found, damaged, size = list[Notification](), list[str](), 0
            with closing(self._database.shared_read_connection.execute(sql, (session_id,))) as rows:
                for id, body in rows:
                    size += len(body) if isinstance(body, bytes) else 0
                    if len(found) + len(damaged) >= MAX_NOTIFICATIONS_AT_ONCE or (
                        found and size > MAX_NOTIFICATION_BYTES_AT_ONCE
                    ):
                        break
                    if (notice := _parse_notification(id, session_id, body)) is not None:
                        found.append(notice)
                    else:
                        damaged.append(id)
        if damaged:
            self.write_soon(self.build_mark_delivered_work(session_id, damaged))
        return found

    def count_pending(self, session_id: str) -> int:
        """Return how many notifications are pending."""
        sql = "SELECT count(*) FROM notification WHERE session = ? AND delivered = 0"
        return self._read_rows(sql, (session_id,))[0][0]


def _parse_notification(id: object, session_id: str, body: object) -> Notification | None:
    data = decode_stored_object(body) or {}
    try:
        kind, source, text, at_ns = data["kind"], data["source"], data["text"], int(data["at_ns"])
        more, untrusted = data["data"], data["untrusted"]
    except (ValueError, KeyError, TypeError):
        return None
    if kind not in get_args(NotificationKind) or not all(
        isinstance(one, str) for one in (id, source, text, untrusted or "")
    ):
        return None
    return Notification(str(id), session_id, kind, source, text, at_ns, more, untrusted)


_TRIM_NOTICES = (
    "DELETE FROM notification WHERE session = ? AND delivered = 1 AND number <= "
    "(SELECT number FROM notification WHERE session = ? AND delivered = 1 ORDER BY number DESC LIMIT 1 OFFSET ?)"
)


# Triggers: one row for each name in a session, as long as it may fire.

_KINDS = get_args(TriggerKind)
_FIELDS = {
    **dict.fromkeys(("created_ns", "fire_count", "interval_ns", "next_ns"), int),
    **dict.fromkeys(("name", "session_id", "prompt", "cron", "channel", "sender", "tool", "problem"), str),
}
_MAY_BE_EMPTY = frozenset({"interval_ns", "next_ns", "cron", "channel", "sender", "tool", "problem"})


class TriggerTable(WorkspaceTable):
    """The table of triggers, for the holder of the workspace.

    A method that writes is durable on return. All raise ``LogUnavailable`` if the database cannot be written or read.
    """

    def list_all(self) -> list[Trigger]:
        """Return all triggers, without damaged ones."""
        rows = self._read_rows("SELECT body FROM session_trigger ORDER BY session, name")
        return [trigger for (body,) in rows if (trigger := _parse_trigger(body)) is not None]

    @staticmethod
    def build_store_trigger_work(trigger: Trigger) -> TableWork:
        sql = "INSERT INTO session_trigger (session, name, body) VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET body = excluded.body"
        body = encode_json_with_fallback(asdict(trigger), max_bytes=_UNBOUNDED)
        return make_statement_work((sql, (trigger.session_id, trigger.name, body)))

    @staticmethod
    def build_remove_trigger_work(trigger: Trigger) -> TableWork:
        sql = "DELETE FROM session_trigger WHERE session = ? AND name = ?"
        return make_statement_work((sql, (trigger.session_id, trigger.name)))

    async def put(self, trigger: Trigger) -> None:
        await self.commit(self.build_store_trigger_work(trigger))

    async def remove(self, trigger: Trigger) -> None:
        await self.commit(self.build_remove_trigger_work(trigger))

    async def remove_subagent_triggers(self) -> None:
        """Remove the triggers of sub-agents' sessions, and their positions in channels."""
        below = "(SELECT id FROM session WHERE parent_session IS NOT NULL)"
        sql = f"SELECT session, name FROM session_trigger WHERE session IN {below}"  # noqa: S608 - our own words
        if found := self._read_rows(sql):
            readers = [("DELETE FROM channel_reader WHERE reader = ?", (f"trigger/{s}/{name}",)) for s, name in found]
            sql = f"DELETE FROM session_trigger WHERE session IN {below}"  # noqa: S608
            await self._write((sql, ()), *readers)

    async def remove_session(self, session_id: str) -> None:
        """Remove the triggers of a session, since it is closed for good."""
        await self._write(("DELETE FROM session_trigger WHERE session = ?", (session_id,)))


def _parse_trigger(body: object) -> Trigger | None:
    """Parse a stored trigger; return None if it is damaged."""
    try:
        trigger = Trigger(**(decode_stored_object(body) or {}))
    except (ValueError, TypeError):
        return None
    if trigger.kind not in _KINDS or (trigger.kind == "class" and trigger.tool is None):
        return None
    return trigger if _has_valid_types(trigger) else None


def _has_valid_types(trigger: Trigger) -> bool:
    for name, kind in _FIELDS.items():
        value = getattr(trigger, name)
        if not isinstance(value, kind) and (value or name not in _MAY_BE_EMPTY):
            return False
    return isinstance(trigger.arguments, dict | None)
