"""Approval requests and their answers, as durable rows, and the rules that answers stored.

A row only ever moves forward: ``pending`` to ``approved``, ``rejected``, ``expired`` or ``withdrawn``, and ``approved``
to ``used``, ``expired`` or ``withdrawn``. Each move is a statement that is true of one row in one state
(:class:`~handrail.store.database.workspace_database.SingleRowStatement`), so the second of two competing moves fails.
"""

from __future__ import annotations

import sqlite3
from typing import Any

from handrail.contract.approval_requests import Approval, ApprovalRequest, ApprovalState, StoredProjectRule
from handrail.contract.json_codec import expect_json_object, reader_of, write
from handrail.store.database.sqlite_connection import make_damaged_row_error, map_to_log_unavailable
from handrail.store.database.workspace_database import (
    SingleRowStatement,
    Statement,
    TableWork,
    WorkspaceTable,
    make_statement_work,
)
from handrail.store.json_fallback_encoding import decode_json_with_fallback, encode_json_with_fallback

_COLUMNS = "state, answered, grant_expires_ns, kind, request, decision"
_UNDECIDED: dict[str, Any] = {
    "choice": None,
    "message": "",
    "decided_ns": None,
    "decided_by": "",
    "changed_arguments": None,
    "changed_arguments_hash": None,
    "changed_files": None,
    "answers": [],
}
"""The decision of a row that has none."""


class ApprovalReader:
    """A reader of requests through one connection, which may be another process's read-only one.

    :raises LogUnavailable: by every method, if the database cannot be read
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def get(self, approval_id: str) -> Approval | None:
        if not approval_id.isascii():  # not one of our ids, and perhaps not storable text
            return None
        found = self._read_approvals("WHERE id = ?", (approval_id,))
        return found[0] if found else None

    def list_pending_requests(
        self, now_ns: int, *, session_id: str | None = None, limit: int = 10_000
    ) -> list[Approval]:
        """Return the requests that can be answered at ``now_ns``, the oldest first."""
        where = "WHERE state = 'pending' AND expires_ns > ?"
        if session_id is None:
            return self._read_approvals(f"{where} ORDER BY created_ns, rowid LIMIT ?", (now_ns, limit))
        return self._read_approvals(
            f"{where} AND session = ? ORDER BY created_ns, rowid LIMIT ?", (now_ns, session_id, limit)
        )

    def read_pending_request_ids(self, now_ns: int, session_id: str | None = None) -> set[str]:
        """Return the ids of the requests that can be answered at ``now_ns``, of one session or of all."""
        where, values = ("", (now_ns,)) if session_id is None else (" AND session = ?", (now_ns, session_id))
        sql = f"SELECT id FROM approval WHERE state = 'pending' AND expires_ns > ?{where}"  # noqa: S608 - of this file
        return {str(found) for (found,) in self._read_rows(sql, values)}

    def list_overdue_requests(self, now_ns: int) -> list[Approval]:
        """Return the pending requests whose time is over."""
        return self._read_approvals("WHERE state = 'pending' AND expires_ns <= ? ORDER BY created_ns, rowid", (now_ns,))

    def read_next_expiry_ns(self) -> int | None:
        """Return when the next pending request expires; None if there is none."""
        ((due,),) = self._read_rows("SELECT min(expires_ns) FROM approval WHERE state = 'pending'")
        return due if isinstance(due, int) else None

    def list_unresolved_requests(self, session_id: str) -> list[Approval]:
        """Return the requests of a session whose calls have no result yet, the oldest first."""
        return self._read_approvals("WHERE session = ? AND answered = 0 ORDER BY created_ns, rowid", (session_id,))

    def list_subagents_awaiting_approval(self) -> list[str]:
        """Return the sub-agents' sessions that have requests of calls without a result."""
        sql = (
            "SELECT DISTINCT session FROM approval WHERE answered = 0 "
            "AND session IN (SELECT id FROM session WHERE parent_session IS NOT NULL)"
        )
        return [str(session) for (session,) in self._read_rows(sql)]

    def list_requests_of_call(self, session_id: str, call_id: str) -> list[Approval]:
        """Return the requests of one call that has no result yet, the oldest first."""
        where = "WHERE session = ? AND call = ? AND answered = 0 ORDER BY created_ns, rowid"
        return self._read_approvals(where, (session_id, call_id))

    def are_arguments_unredacted(self, approval_id: str) -> bool:
        """Return whether the stored arguments are exactly the proposed ones, without a redacted secret."""
        rows = self._read_rows("SELECT exact_arguments FROM approval WHERE id = ?", (approval_id,))
        return rows == [(1,)]

    def list_rules(self) -> list[StoredProjectRule]:
        """Return the stored project rules, the oldest first."""
        sql = "SELECT id, text, created_ns, approval FROM project_rule ORDER BY created_ns, id"
        return [
            StoredProjectRule(str(id), str(text), created, str(asked))
            for id, text, created, asked in self._read_rows(sql)
        ]

    def data_version(self) -> int:
        """Return a number that changes when another process writes to the database."""
        ((version,),) = self._read_rows("PRAGMA data_version")
        return version

    def _read_approvals(self, where: str, values: tuple[str | int, ...]) -> list[Approval]:
        sql = f"SELECT {_COLUMNS} FROM approval {where}"  # noqa: S608
        with map_to_log_unavailable(self._connection):
            return [_parse_row(row) for row in self._connection.execute(sql, values)]

    def _read_rows(self, sql: str, values: tuple[str | int, ...] = ()) -> list[Any]:
        with map_to_log_unavailable(self._connection):
            return self._connection.execute(sql, values).fetchall()


class ApprovalTable(WorkspaceTable):
    """The writing side of approval requests.

    Each method returns a :data:`~handrail.store.database.workspace_database.TableWork` for
    :meth:`~handrail.store.database.workspace_database.WorkspaceDatabase.write_works_atomically`, so that a move and its record are one transaction.
    """

    @property
    def reader(self) -> ApprovalReader:
        """A reader of the durable rows.

        :raises LogUnavailable: if the database cannot be opened
        """
        with map_to_log_unavailable(self._database.path):
            return ApprovalReader(self._database.shared_read_connection)

    def build_add_request_work(self, asked: Approval, *, whole: bool) -> TableWork:
        """Add a new request.

        :param whole: whether ``asked.request.arguments`` are exactly the proposed ones
        """
        return make_statement_work(_insert_statement(asked, whole))

    def decide(self, decided: Approval, now_ns: int) -> TableWork:
        """Move a request from ``pending`` to ``decided.state``, unless it has expired."""
        sql = (
            "UPDATE approval SET state = ?, decision = ?, grant_expires_ns = ? "
            "WHERE id = ? AND state = 'pending' AND expires_ns > ?"
        )
        decision = encode_json_with_fallback({name: getattr(decided, name) for name in _UNDECIDED}, max_bytes=2**62)
        values = (decided.state, decision, decided.grant_expires_ns, decided.id, now_ns)
        return make_statement_work(SingleRowStatement(sql, values))

    def use(self, approval_id: str, now_ns: int) -> TableWork:
        """Move a request from ``approved`` to ``used``, unless it has expired, since its call starts."""
        sql = (
            "UPDATE approval SET state = 'used', answered = 1 "
            "WHERE id = ? AND state = 'approved' AND answered = 0 AND grant_expires_ns > ?"
        )
        return make_statement_work(SingleRowStatement(sql, (approval_id, now_ns)))

    def build_expire_or_withdraw_work(self, approval_id: str, before: ApprovalState, after: ApprovalState) -> TableWork:
        """Move a request from ``before`` to ``expired`` or ``withdrawn``."""
        sql = "UPDATE approval SET state = ? WHERE id = ? AND state = ?"
        return make_statement_work(SingleRowStatement(sql, (after, approval_id, before)))

    def build_withdraw_if_open_work(self, approval_id: str) -> TableWork:
        """Withdraw a request if it is open, since its call has its result."""
        sql = (
            "UPDATE approval SET answered = 1, state = CASE WHEN state IN ('pending', 'approved') "
            "THEN 'withdrawn' ELSE state END WHERE id = ?"
        )
        return make_statement_work((sql, (approval_id,)))

    def build_store_rule_work(self, rule: StoredProjectRule) -> TableWork:
        """Store a project rule, unless one with the same text exists."""
        sql = "INSERT OR IGNORE INTO project_rule (id, text, created_ns, approval) VALUES (?, ?, ?, ?)"
        return make_statement_work((sql, (rule.id, rule.text, rule.created_ns, rule.approval_id)))

    def build_session_rule_work(self, session_id: str, text: str) -> TableWork:
        sql = "INSERT OR IGNORE INTO session_rule (session, text) VALUES (?, ?)"
        return make_statement_work((sql, (session_id, text)))

    def build_remove_rule_work(self, rule_id: str) -> TableWork:
        return make_statement_work(SingleRowStatement("DELETE FROM project_rule WHERE id = ?", (rule_id,)))


def _insert_statement(asked: Approval, whole: bool) -> Statement:
    request: dict[str, Any] = dict(write(ApprovalRequest, asked.request))
    if asked.questions:
        request["questions"] = asked.questions
    sql = (
        "INSERT INTO approval (id, kind, session, call, state, created_ns, expires_ns, exact_arguments, request) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
    )
    of = asked.request
    last = (asked.state, of.created_ns, of.expires_ns, int(whole), encode_json_with_fallback(request, max_bytes=2**62))
    return sql, (asked.id, asked.kind, of.session_id, of.call_id, *last)


def _parse_row(row: tuple[Any, ...]) -> Approval:
    """Parse a row.

    :raises sqlite3.Error: if it is damaged
    """
    state, answered, grant_expires_ns, kind, request, decision = row
    try:
        asked = expect_json_object(decode_json_with_fallback(request))
        approval = reader_of(Approval)(
            {
                "questions": asked.pop("questions", []),
                "request": asked,
                "kind": kind,
                "state": state,
                "grant_expires_ns": grant_expires_ns,
                "is_answered": bool(answered),
                **(_UNDECIDED if decision is None else expect_json_object(decode_json_with_fallback(decision))),
            }
        )
    except (ValueError, RecursionError):
        raise make_damaged_row_error("the row of an approval request") from None
    if approval.choice is None and approval.state in ("approved", "rejected"):
        raise make_damaged_row_error("the row of an approval request")
    return approval
