"""Sessions, the values that tools store in them, their rules, and the hashes of files that they have read."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from handrail.contract.errors import UsageError
from handrail.contract.services.subagent_services import DelegatedSession
from handrail.contract.struct import Struct, field
from handrail.store.database.sqlite_connection import make_damaged_row_error, map_to_log_unavailable
from handrail.store.database.workspace_database import (
    SqlValue,
    Statement,
    TableWork,
    WorkspaceDatabase,
    WorkspaceTable,
    make_statement_work,
)
from handrail.store.json_fallback_encoding import (
    decode_json_with_fallback,
    decode_stored_object,
    encode_json_with_fallback,
)
from handrail.store.state_folders import check_session_id

MAX_VALUE_BYTES = 4 * 1024 * 1024


class SessionRow(Struct, frozen=True):
    """One conversation with the workspace. Times are wall-clock nanoseconds.

    :param closed_ns: None while it is open or suspended
    :param details: JSON data of its frontend; ``parent`` names the session it was forked from, ``mode`` and
        ``previous_mode`` its mode after the last change
    :param used_ns: when it was last opened or suspended, or received a message
    :param holder: the fencing token of the process that opened it and has not suspended it. The reader checks whether that
        process still holds the workspace: a process that is killed changes nothing here
    :param parent_session: the parent session of a sub-agent's session, and ``under_call`` the call that started it
    """

    id: str
    opened_ns: int
    closed_ns: int | None = None
    agent: str = "default"
    topic: str | None = None
    frontend: str = "library"
    headless: bool = True
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])
    used_ns: int = 0
    holder: int | None = None
    parent_session: str | None = None
    parent_call: str | None = None


class SessionTable(WorkspaceTable):
    """The table of sessions.

    :raises LogUnavailable: by every method that reads or writes, if the database fails
    """

    async def record_opened(self, row: SessionRow) -> None:
        """Record that this process has opened a session. The first time of opening stays.

        :param row: its ``holder`` is replaced with this process's fencing token
        """
        check_session_id(row.id)
        opened = replace(row, holder=self._database.token, used_ns=max(row.used_ns, row.opened_ns))
        await self._write((_INSERT + _AGAIN, _row_values(opened)))

    async def record_suspended(self, session_id: str, at_ns: int) -> None:
        """Record that a session is no longer open. All its data is kept."""
        await self.commit(self._build_suspend_work(session_id, at_ns))

    def record_mode(self, session_id: str, mode: str, before: str) -> None:
        """Record soon the mode of a session and the one before it, among its details."""
        sql = (
            "UPDATE session SET details = CAST(json_set(CAST(details AS TEXT), '$.mode', ?, '$.previous_mode', ?) AS BLOB) "
            "WHERE id = ? AND json_valid(CAST(details AS TEXT))"
        )
        self.write_soon(make_statement_work((sql, (mode, before, session_id))))

    def record_opening_interrupted(self, session_id: str, at_ns: int) -> None:
        """Record soon that a session is not open, since its opening was interrupted, perhaps before it was recorded."""
        self.write_soon(self._build_suspend_work(session_id, at_ns))

    def _build_suspend_work(self, session_id: str, at_ns: int) -> TableWork:
        # Checked by token: a process that lost the workspace must not change the session of another.
        sql = "UPDATE session SET lease_token = NULL, used_ns = max(used_ns, ?) WHERE id = ? AND lease_token = ?"
        return make_statement_work((sql, (at_ns, session_id, self._database.token)))

    async def fork(self, parent: str, row: SessionRow, paths: tuple[str, str]) -> None:
        """Record a suspended session with a copy of the parent's messages, tool values and read files, without its rules.

        :param paths: a part of the paths of the parent's files, and its replacement for the fork
        """
        check_session_id(row.id)
        await self._write(
            (_INSERT, _row_values(replace(row, holder=None))),
            (_SAID, (row.id, *paths, parent)),
            *((copied, (row.id, parent)) for copied in _COPIED),
        )

    async def close(self, session_id: str, at_ns: int) -> None:
        """Close a session for good. Its messages and tool values are removed; the log is kept."""
        sql = f"UPDATE session SET closed_ns = ?, lease_token = NULL, used_ns = {LAST_USED} WHERE id = ?"  # noqa: S608
        tables = ("state", "message", "session_rule", "read_file", "notification", "job", "tool_session")
        removals = ((f"DELETE FROM {table} WHERE session = ?", (session_id,)) for table in tables)  # noqa: S608
        await self._write((sql, (at_ns, session_id)), *removals)

    def get(self, session_id: str) -> SessionRow | None:
        """Return a session; None if it does not exist."""
        with map_to_log_unavailable(self._database.path):
            rows = select_session_rows(self._database.shared_read_connection, "WHERE id = ?", (session_id,))
        return rows[0] if rows else None

    def list_open_subagent_sessions(self, session_id: str) -> list[SessionRow]:
        """Return the sub-agents' sessions of this session that are not closed, the oldest first."""
        return [row for row in self.list_subagent_sessions(session_id) if row.closed_ns is None]

    def list_subagent_sessions(self, session_id: str) -> list[SessionRow]:
        """Return all sub-agents' sessions of this session, the oldest first."""
        with map_to_log_unavailable(self._database.path):
            where = "WHERE parent_session = ? ORDER BY opened_ns, id"
            return select_session_rows(self._database.shared_read_connection, where, (session_id,))

    def is_subagent(self, session_id: str) -> bool:
        """Return whether a session belongs to a sub-agent."""
        row = self.get(session_id)
        return row is not None and row.parent_session is not None

    def list_delegated_by_call(self, session_id: str, call_id: str) -> list[DelegatedSession]:
        """Return the sub-agents that a call has started."""
        return [
            DelegatedSession(row.agent, row.id)
            for row in self.list_open_subagent_sessions(session_id)
            if row.parent_call == call_id
        ]

    def list_latest(self, *, limit: int = 1000) -> list[SessionRow]:
        """Return the latest ``limit`` sessions, the most recently opened first."""
        with map_to_log_unavailable(self._database.path):
            return select_session_rows(
                self._database.shared_read_connection, "ORDER BY opened_ns DESC LIMIT ?", (limit,)
            )


LAST_USED = """max(used_ns, coalesce((
    SELECT at_ns FROM message WHERE session = session.id AND typeof(at_ns) = 'integer' ORDER BY position DESC LIMIT 1), 0))"""
"""SQL: when a session was last opened or suspended, or received a message.

The time of a message is not copied to the row, since each message would have to wait for that.
"""


def select_session_rows(connection: sqlite3.Connection, where: str, values: Sequence[str | int]) -> list[SessionRow]:
    """Return sessions through any connection.

    :param where: the rest of the query, after ``FROM session``
    :raises sqlite3.Error: if the database cannot be read
    """
    columns = f"id, opened_ns, closed_ns, agent, topic, frontend, headless, details, {LAST_USED} AS used_ns, lease_token, parent_session, parent_call"
    rows = connection.execute(f"SELECT {columns} FROM session {where}", values)  # noqa: S608 - our own words
    return [_parse_row(row) for row in rows]


def _parse_row(row: tuple[Any, ...]) -> SessionRow:
    """Parse a row.

    :raises sqlite3.Error: if it is damaged
    """
    id, opened_ns, closed_ns, agent, topic, frontend, headless, details, used_ns, holder, under, under_call = row
    texts = (id, agent, frontend, *("" if text is None else text for text in (topic, under, under_call)))
    numbers = (opened_ns, used_ns, 0 if closed_ns is None else closed_ns, 0 if holder is None else holder)
    if not all(isinstance(text, str) for text in texts) or not all(isinstance(number, int) for number in numbers):
        raise make_damaged_row_error(f"the row of session {str(id)[:80]!r}")
    values: list[Any] = [*row]
    values[6:8] = bool(headless), decode_stored_object(details) or {}
    return SessionRow(*values)


class SessionToolStateTable(WorkspaceTable):
    """The values that tools keep in sessions, across restarts."""

    async def get(self, session_id: str, tool_id: str, key: str) -> Any:
        """Return a value; None if there is none.

        :raises LogUnavailable: if it cannot be read
        """
        with map_to_log_unavailable(self._database.path):
            row = self._database.shared_read_connection.execute(
                "SELECT value FROM state WHERE session = ? AND tool = ? AND key = ?",
                (_storable_text(session_id), _storable_text(tool_id), _storable_text(key)),
            ).fetchone()
            try:
                return None if row is None else decode_json_with_fallback(row[0])
            except (ValueError, TypeError, RecursionError):
                raise make_damaged_row_error(
                    f"the value {key[:80]!r} of tool {tool_id} in session {session_id}"
                ) from None

    async def put(self, session_id: str, tool_id: str, key: str, value: Any) -> None:
        """Store ``value``; None removes the key. Durable on return.

        :raises UsageError: if it is larger than 4 MiB as JSON
        :raises LogUnavailable: if it cannot be made durable
        """
        encoded = None if value is None else encode_json_with_fallback(value, max_bytes=2**62)
        if encoded is not None and len(encoded) > MAX_VALUE_BYTES:
            raise UsageError(
                f"The value of {key[:80]!r} is too large: {len(encoded):,} bytes. The limit is {MAX_VALUE_BYTES:,}. "
                "Store large values in a file or an artifact, and keep its name."
            )
        names = (_storable_text(session_id), _storable_text(tool_id), _storable_text(key))
        if encoded is None:
            await self._write(("DELETE FROM state WHERE session = ? AND tool = ? AND key = ?", names))
        else:
            sql = "INSERT OR REPLACE INTO state (session, tool, key, value) VALUES (?, ?, ?, ?)"
            await self._write((sql, (*names, encoded)))


_INSERT = (
    "INSERT INTO session (id, opened_ns, agent, topic, frontend, headless, details, used_ns, lease_token, parent_session, parent_call) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_AGAIN = (
    " ON CONFLICT (id) DO UPDATE SET closed_ns = NULL, agent = excluded.agent, topic = excluded.topic, "
    "frontend = excluded.frontend, headless = excluded.headless, details = excluded.details, "
    "used_ns = max(used_ns, excluded.used_ns), lease_token = excluded.lease_token"
)
_SAID = (
    "INSERT INTO message (session, position, at_ns, body) "
    "SELECT ?, position, at_ns, CAST(replace(CAST(body AS TEXT), ?, ?) AS BLOB) FROM message WHERE session = ?"
)
_COPIED = (
    "INSERT INTO state (session, tool, key, value) SELECT ?, tool, key, value FROM state WHERE session = ?",
    "INSERT INTO read_file (session, path, sha256, at_ns) SELECT ?, path, sha256, at_ns FROM read_file WHERE session = ?",
)


def _row_values(row: SessionRow) -> tuple[SqlValue, ...]:
    topic = None if row.topic is None else _storable_text(row.topic)
    texts = (_storable_text(row.agent), topic, _storable_text(row.frontend))
    details = encode_json_with_fallback(dict(row.details))
    last = (row.used_ns, row.holder, row.parent_session, row.parent_call)
    return (row.id, row.opened_ns, *texts, int(row.headless), details, *last)


def _storable_text(text: str) -> str:
    """Return a storable text: half surrogate pairs are escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


# Further data of a session: rules that answers have stored, and the files that it has read.

MAX_HASHES = 10_000
"""Files of a session whose content hash is kept. Beyond that, the least recently used ones must be read again."""
_TRIMMED_EVERY = 1_000


class SessionRuleTable(WorkspaceTable):
    """The rules that users stored "for this session", as texts. They are written together with the answer."""

    def list_rules(self, session_id: str) -> tuple[str, ...]:
        """Return the rules of a session.

        :raises LogUnavailable: if the database cannot be read
        """
        rows = self._read_rows("SELECT text FROM session_rule WHERE session = ? ORDER BY text", (session_id,))
        return tuple(str(text) for (text,) in rows)


class ReadFileHashTable(WorkspaceTable):
    """Path and SHA-256 (hexadecimal) of the files that sessions have read. Safe from any thread."""

    def __init__(self, database: WorkspaceDatabase) -> None:
        super().__init__(database)
        self._noted = 0

    def queue_file_hash_write(self, session_id: str, path: str, sha256: str | None) -> None:
        """Store a hash soon, without waiting; None removes the path. A path that cannot be stored is ignored."""
        try:
            path.encode()
        except UnicodeEncodeError:
            return
        self._noted += 1
        statements: list[Statement] = [("DELETE FROM read_file WHERE session = ? AND path = ?", (session_id, path))]
        if sha256 is not None:
            sql = "INSERT OR REPLACE INTO read_file (session, path, sha256, at_ns) VALUES (?, ?, ?, ?)"
            statements = [(sql, (session_id, path, sha256, time.time_ns()))]
        if self._noted % _TRIMMED_EVERY == 0:
            sql = (
                "DELETE FROM read_file WHERE session = ? AND at_ns < "
                "(SELECT at_ns FROM read_file WHERE session = ? ORDER BY at_ns DESC LIMIT 1 OFFSET ?)"
            )
            statements.append((sql, (session_id, session_id, MAX_HASHES)))
        self.write_soon(make_statement_work(*statements))

    def list_path_hash_pairs(self, session_id: str) -> list[tuple[str, str]]:
        """Return pairs of path and hash, the least recently used first.

        :raises LogUnavailable: if the database cannot be read
        """
        sql = f"SELECT path, sha256 FROM read_file WHERE session = ? ORDER BY at_ns DESC LIMIT {MAX_HASHES}"  # noqa: S608
        return [(str(path), str(sha256)) for path, sha256 in self._read_rows(sql, (session_id,))][::-1]
