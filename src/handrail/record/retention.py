"""Removing what was recorded: bodies by recorded redaction, and whatever they alone referred to.

What is removed can be chosen by age and by session. The records themselves stay, as headers without a body, so that the
chain still verifies and says how many were redacted; nothing else of them is left in the database, in its
write-ahead log, among the artifacts or in the sessions' folders.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from handrail.record.chain import SALT_BYTES
from handrail.record.leftovers import Leftovers, leftovers, tables_of_sessions
from handrail.record.log import CommitLog
from handrail.record.reading import LogReader
from handrail.store.database.database import Database, Statement
from handrail.store.folders import Folders
from handrail.store.tables.sessions import LAST_USED

_KEPT = ("redacted", "lost")
"""Records that prove what became of others. They hold numbers and reasons only."""
_MOST_RECORDS = 20_000
_MOST_BYTES = 64 * 1024 * 1024
"""Of one transaction, which the write-ahead log has to hold: a purge is also what one does on a disk that is full."""

_TEXT = f"CAST(substr(body, {SALT_BYTES + 1}) AS TEXT)"
_NEWEST_WHOLE = (
    "SELECT max(sequence) FROM record WHERE kind = 'generation' AND at_ns < ? "  # noqa: S608
    f"AND CASE WHEN json_valid({_TEXT}) THEN json_extract({_TEXT}, '$.after') IS NULL END"
)


@dataclass(frozen=True, slots=True)
class Selection:
    """Which records: those of before a moment (wall clock, nanoseconds), those of a session, or both."""

    before_ns: int | None = None
    session_id: str | None = None

    def __str__(self) -> str:
        parts: list[str] = []
        if self.session_id is not None:
            parts.append(f"session {self.session_id}")
        if self.before_ns is not None:
            moment = datetime.fromtimestamp(self.before_ns / 1e9).astimezone()
            parts.append(f"before {moment.isoformat(sep=' ', timespec='seconds')}")
        return ", ".join(parts) or "everything"

    @property
    def condition(self) -> tuple[str, list[str | int]]:
        """As SQL on a record, with its values."""
        wheres, values = ["body IS NOT NULL", f"kind NOT IN {_KEPT}"], list[str | int]()
        if self.session_id is not None:
            wheres.append("session = ?")
            values.append(self.session_id)
        if self.before_ns is not None:
            wheres.append("at_ns < ?")
            values.append(self.before_ns)
            # Later calls may have been made with the tools that this one names, and those that only say what changed since.
            wheres.append(f"(kind <> 'generation' OR sequence < ifnull(({_NEWEST_WHOLE}), 0))")
            values.append(self.before_ns)
        return " AND ".join(wheres), values


@dataclass(frozen=True, slots=True)
class Survey:
    """What a purge would take away.

    :param records: how many bodies, ``bytes`` in all
    :param calls: how many calls have a record among them
    :param sessions: ids of sessions that go as a whole, with what their tools remember and their folders
    :param left_over: artifacts, sidecars and folders that nothing else refers to
    """

    records: int
    bytes: int
    calls: int
    oldest_ns: int | None
    newest_ns: int | None
    sessions: tuple[str, ...]
    left_over: Leftovers

    @property
    def empty(self) -> bool:
        return not (self.records or self.sessions or self.left_over.paths)


@dataclass(frozen=True, slots=True)
class Purged:
    """What was taken away, and what could not be."""

    records: int
    sessions: int
    files: int
    problems: tuple[str, ...] = ()


def survey(reader: LogReader, folders: Folders, selection: Selection) -> Survey:
    """Look without changing anything.

    :raises sqlite3.Error: when the log is damaged
    """
    connection = reader.connection
    where, values = selection.condition
    records, size, calls, oldest, newest = connection.execute(
        "SELECT count(*), total(length(body)), count(DISTINCT nullif(call, '')), min(at_ns), max(at_ns) "  # noqa: S608
        f"FROM record WHERE {where}",
        values,
    ).fetchone()
    sessions = tuple(_whole_sessions(connection, selection))
    left_over = leftovers(connection, folders, sessions, (where, values))
    return Survey(records, int(size), calls, oldest, newest, sessions, left_over)


async def purge(log: CommitLog, database: Database, folders: Folders, selection: Selection, *, reason: str) -> Purged:
    """Take away what :func:`survey` finds. The caller holds the workspace's lease, and no call runs.

    Ended in its middle, it has removed a part, each step of it recorded; the same again removes the rest.

    :param reason: goes on record with each redaction
    :raises LogUnavailable: when it cannot be made durable
    """
    await log.flush()
    connection = log.reader.connection
    sessions = tuple(_whole_sessions(connection, selection))
    removed = 0
    for sequences in list(_batches(connection, selection)):
        await log.redact(sequences, reason=reason, session_id=selection.session_id or "")
        removed += len(sequences)
    forgetting = _Forgetting(selection)
    database.attach(forgetting)
    await database.commit(forgetting, sessions)
    found = await asyncio.to_thread(leftovers, connection, folders, sessions)
    problems = await asyncio.to_thread(found.remove)
    return Purged(removed, len(sessions), len(found.paths) - len(problems), tuple(problems))


def _whole_sessions(connection: sqlite3.Connection, selection: Selection) -> Iterator[str]:
    """The sessions of which nothing is kept."""
    sql, values = "SELECT id FROM session", list[str | int]()
    if selection.before_ns is not None:
        sql += " LEFT JOIN (SELECT session, max(at_ns) AS latest FROM record WHERE session <> '' GROUP BY session) ON session = id"
        sql += f" WHERE max(coalesce(latest, 0), opened_ns, {LAST_USED}, coalesce(closed_ns, 0)) < ?"
        values.append(selection.before_ns)
    if selection.session_id is not None:
        sql += (" AND" if values else " WHERE") + " id = ?"
        values.append(selection.session_id)
    for (session,) in connection.execute(sql, values):
        yield str(session)


def _batches(connection: sqlite3.Connection, selection: Selection) -> Iterator[list[int]]:
    where, values = selection.condition
    batch: list[int] = []
    size = 0
    rows = connection.execute(f"SELECT sequence, length(body) FROM record WHERE {where} ORDER BY sequence", values)  # noqa: S608
    for sequence, length in rows:
        batch.append(sequence)
        size += length
        if len(batch) >= _MOST_RECORDS or size >= _MOST_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _Forgetting:
    """Removes sessions from every table that keeps something of them, as the column ``session`` says; and, of sessions
    that go on, requests to people that are over."""

    def __init__(self, selection: Selection) -> None:
        self._before_ns = None if selection.session_id is not None else selection.before_ns
        self._tables: tuple[str, ...] = ()

    def opened(self, connection: sqlite3.Connection) -> None:
        self._tables = tuple(tables_of_sessions(connection))

    def statements(self, batch: Sequence[Sequence[str]]) -> Iterable[Statement]:
        for session in (one for sessions in batch for one in sessions):
            for table in self._tables:
                yield f'DELETE FROM "{table}" WHERE session = ?', (session,)  # noqa: S608
            yield "DELETE FROM session WHERE id = ?", (session,)
        if self._before_ns is not None and "approval" in self._tables:
            yield "DELETE FROM approval WHERE answered = 1 AND created_ns < ?", (self._before_ns,)
        yield "PRAGMA wal_checkpoint(TRUNCATE)", ()
