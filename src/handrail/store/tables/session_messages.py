"""The messages of each session, one row for each, in order; searches in them."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple

from handrail.contract.services.history_and_skill_services import HistoryEntry
from handrail.store.database.group_writer import QueuedWrite
from handrail.store.database.sqlite_connection import make_damaged_row_error, map_to_log_unavailable, open_reader
from handrail.store.database.workspace_database import Statement, WorkspaceDatabase, WorkspaceTable
from handrail.store.json_fallback_encoding import decode_stored_object, encode_json_with_fallback

_UNBOUNDED = 2**62
_POSITIONS = 2**63


class SessionMessageTable(WorkspaceTable):
    """The table of messages. :mod:`handrail.agent.conversation` defines their content."""

    def __init__(self, database: WorkspaceDatabase) -> None:
        super().__init__(database)
        database.enable_journal_for_table(_STATEMENTS)

    def queue_message_writes(self, session_id: str, entries: Sequence[HistoryEntry], at_ns: int) -> QueuedWrite:
        """Queue messages before all later writes. They replace those at their positions.

        Awaiting the result waits until they are durable.

        :param at_ns: wall-clock time in nanoseconds; that of the last message counts as a use of the session
        :raises LogUnavailable: when awaited, if they cannot be made durable
        """
        return self._database.queue_awaitable_write(_STATEMENTS, _MessageBatch(session_id, at_ns, tuple(entries)))

    async def read(self, session_id: str) -> list[HistoryEntry]:
        """Return a session's messages by position. A damaged row becomes an empty message.

        It reads in a thread, since a long conversation takes tens of milliseconds.

        :raises LogUnavailable: if the database cannot be read, or does not contain all messages yet
        """
        await self._database.writer.wait_for_promised_items()
        with map_to_log_unavailable(self._database.path):
            return await asyncio.to_thread(self._read_messages, session_id)

    def read_latest_messages(self, session_id: str, count: int) -> list[Mapping[str, Any]]:
        """Return the last ``count`` messages of a session, the latest first.

        :raises LogUnavailable: if the database cannot be read
        """
        sql = "SELECT body FROM message WHERE session = ? ORDER BY position DESC LIMIT ?"
        rows = self._read_rows(sql, (session_id, count))
        return [decode_stored_object(body) or {} for (body,) in rows]

    def _read_messages(self, session_id: str) -> list[HistoryEntry]:
        with closing(open_reader(self._database.path)) as connection:
            return read_session_messages(connection, session_id)


def read_session_messages(connection: sqlite3.Connection, session_id: str, *, limit: int = -1) -> list[HistoryEntry]:
    """Return a session's messages through any connection; see :meth:`SessionMessageTable.read`.

    :param limit: the number of messages from the start; -1 for all
    :raises sqlite3.Error: if the database cannot be read
    """
    sql = "SELECT position, body FROM message WHERE session = ? ORDER BY position LIMIT ?"
    found: list[HistoryEntry] = []
    for position, body in connection.execute(sql, (session_id, limit)):
        if not isinstance(position, int):
            raise make_damaged_row_error(f"a message of {session_id}")
        found.append((position, decode_stored_object(body) or {}))
    return found


class _MessageBatch(NamedTuple):
    session: str
    at_ns: int
    entries: tuple[HistoryEntry, ...]


class _MessageStatements:
    """The SQL of the table. It keeps no state in memory."""

    journalled_as = "message"

    def load(self, connection: sqlite3.Connection) -> None:
        pass

    def pack(self, payload: _MessageBatch) -> Any:
        session, at_ns, entries = payload
        packed = [(position, body) for position, body in entries]
        sound = all(type(position) is int and 0 <= position < _POSITIONS for position, _ in packed)
        return [session, at_ns, packed] if sound else None  # the write to the database rejects the others one by one

    def unpack(self, packed: Any) -> _MessageBatch:
        session, at_ns, entries = packed
        return _MessageBatch(session, at_ns, tuple((position, body) for position, body in entries))

    def build_statements(self, batch: Sequence[_MessageBatch]) -> Iterable[Statement]:
        for session, at_ns, entries in batch:
            for position, body in entries:
                yield (
                    "INSERT INTO message (session, position, at_ns, body) VALUES (?, ?, ?, ?) "
                    "ON CONFLICT (session, position) DO UPDATE SET at_ns = excluded.at_ns, body = excluded.body",
                    (session, position, at_ns, encode_json_with_fallback(body, max_bytes=_UNBOUNDED)),
                )


_STATEMENTS = _MessageStatements()


# Lookups in a session's latest messages.


class StoredSessionMessage(NamedTuple):
    """A stored message."""

    position: int
    at_ns: int
    data: Mapping[str, Any]


def search_session_messages(connection: sqlite3.Connection, session_id: str, text: str) -> Iterator[Mapping[str, Any]]:
    """Yield the messages of a session that contain ``text``, without damaged ones.

    :raises sqlite3.Error: if the database cannot be read
    """
    sql = "SELECT body FROM message WHERE session = ? AND instr(body, ?) > 0 ORDER BY position"
    for (body,) in connection.execute(sql, (session_id, text.encode())):
        if (data := decode_stored_object(body)) is not None:
            yield data


def read_latest_session_messages(
    connection: sqlite3.Connection, session_id: str, *, most: int, max_bytes: int, since: int = 0
) -> tuple[list[StoredSessionMessage], bool]:
    """Return the last messages of a session in order, without damaged ones, and whether there are older ones.

    :param most: at most this many messages, with at most ``max_bytes``; the last one is always included
    :param since: the first position to read
    :raises sqlite3.Error: if the database cannot be read
    """
    sql = "SELECT position, at_ns, body FROM message WHERE session = ? AND position >= ? ORDER BY position DESC LIMIT ?"
    found: list[StoredSessionMessage] = []
    size = 0
    for rows, (position, at_ns, body) in enumerate(connection.execute(sql, (session_id, since, most + 1)), 1):
        size += len(body) if isinstance(body, bytes) else 0
        if rows > most or (rows > 1 and size > max_bytes):
            return found[::-1], True
        data = decode_stored_object(body)
        if data is not None and isinstance(position, int) and isinstance(at_ns, int):
            found.append(StoredSessionMessage(position, at_ns, data))
    return found[::-1], False
