"""Reading about sessions from any process: which ones a workspace has, their state, and what was said in them."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from handrail.store.tables.approvals import ApprovalReader
from handrail.store.tables.messages import messages_of
from handrail.store.tables.sessions import SessionRow, session_rows

SessionState = Literal[
    "open",  # a process has it open now
    "suspended",  # nobody has it open; it can go on
    "closed",  # for good: its messages and folders are gone, the log of its calls stays
]
_MAX_TASK = 200
_RESUMABLE = (
    "WHERE closed_ns IS NULL AND under IS NULL AND EXISTS (SELECT 1 FROM message WHERE message.session = session.id)"
)


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """How a session stands. Times are wall-clock nanoseconds.

    :param used_ns: when it was last opened, suspended, or something was said in it
    :param task: the beginning of the first thing that was asked in it, on one line; None where nothing was
    :param parent: the session it was forked from
    :param under: the session that a sub-agent's belongs to, and ``under_call`` the call of it that began this one
    :param messages: how many are kept
    :param calls: how many were proposed, by the log
    :param parked: ids of requests to a person that nobody has answered
    :param decided: ids of those that were answered, and whose calls go on when the session does
    """

    id: str
    state: SessionState
    agent: str
    face: str
    topic: str | None
    task: str | None
    parent: str | None
    headless: bool
    opened_ns: int
    used_ns: int
    closed_ns: int | None
    messages: int
    calls: int
    parked: tuple[str, ...] = ()
    decided: tuple[str, ...] = ()
    under: str | None = None
    under_call: str | None = None


class SessionReader:
    """Reads sessions through one connection.

    :param holder: the fencing token of the process that holds the workspace now; None where none does
    :raises sqlite3.Error: by every method, where the database cannot be read
    """

    def __init__(self, connection: sqlite3.Connection, holder: int | None) -> None:
        self._connection = connection
        self._holder = holder

    def all(self, *, limit: int = 1000, closed: bool = True) -> list[SessionFacts]:
        """The most recently used first.

        :param closed: those that are closed for good too
        """
        which = "" if closed else "WHERE closed_ns IS NULL "
        rows = session_rows(self._connection, f"{which}ORDER BY used_ns DESC, id DESC LIMIT ?", (limit,))
        return [self._facts(row) for row in rows]

    def resumable(self, *, limit: int = 1000) -> list[SessionFacts]:
        """Those in which something was said and that people can go on with, the most recently used first."""
        rows = session_rows(self._connection, f"{_RESUMABLE} ORDER BY used_ns DESC, id DESC LIMIT ?", (limit,))
        return [self._facts(row) for row in rows]

    def get(self, session_id: str) -> SessionFacts | None:
        rows = session_rows(self._connection, "WHERE id = ?", (session_id,))
        return self._facts(rows[0]) if rows else None

    def latest(self) -> SessionFacts | None:
        """The most recently used session in which something was said and that nobody has open."""
        where = f"{_RESUMABLE} AND (holder IS NULL OR holder IS NOT ?) ORDER BY used_ns DESC, id DESC LIMIT 1"
        rows = session_rows(self._connection, where, (-1 if self._holder is None else self._holder,))
        return self._facts(rows[0]) if rows else None

    def messages(self, session_id: str) -> list[Mapping[str, Any]]:
        """What was said, as :mod:`handrail.agent.conversation.history` writes it."""
        return [data for _, data in messages_of(self._connection, session_id)]

    def _facts(self, row: SessionRow) -> SessionFacts:
        asked = ApprovalReader(self._connection).unanswered(row.id)
        parent = row.details.get("parent")
        state: SessionState = "closed" if row.closed_ns is not None else "suspended"
        if state == "suspended" and row.holder is not None and row.holder == self._holder:
            state = "open"
        return SessionFacts(
            id=row.id,
            state=state,
            agent=row.agent,
            face=row.face,
            topic=row.topic,
            task=self._task(row.id),
            parent=parent if isinstance(parent, str) else None,
            headless=row.headless,
            opened_ns=row.opened_ns,
            used_ns=row.used_ns,
            closed_ns=row.closed_ns,
            messages=self._count("SELECT count(*) FROM message WHERE session = ?", row.id),
            calls=self._count("SELECT count(*) FROM record WHERE session = ? AND kind = 'proposed'", row.id),
            parked=tuple(approval.id for approval in asked if approval.state == "pending"),
            decided=tuple(approval.id for approval in asked if approval.state in ("approved", "rejected")),
            under=row.under,
            under_call=row.under_call,
        )

    def _count(self, sql: str, session_id: str) -> int:
        return cast("int", self._connection.execute(sql, (session_id,)).fetchone()[0])

    def _task(self, session_id: str) -> str | None:
        """Whose first message it is does not matter: a history begins with its user."""
        for _, data in messages_of(self._connection, session_id, limit=1):
            text = data.get("text")
            if isinstance(text, str):
                line = " ".join(text.split())
                return line if len(line) <= _MAX_TASK else f"{line[:_MAX_TASK]}…"
        return None
