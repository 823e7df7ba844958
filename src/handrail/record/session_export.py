"""Sessions as JSON lines that people and programs read: one object a line, in the order in which things happened.

The first line describes the export, the last one ends it, so that a cut file is noticed. Between them, each session has a
line with its facts and a line for each message. Then each record of the log has a line. The content is what the log has:
secrets were redacted before they were stored.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from handrail.contract.errors import UsageError
from handrail.record.log_reader import LogReader
from handrail.store.json_fallback_encoding import decode_json_with_fallback
from handrail.store.tables.session_tables import SessionRow, select_session_rows

FORMAT = 1
_PAGE = 500


def iterate_session_export_lines(
    connection: sqlite3.Connection, workspace: str, program: str, now_ns: int, sessions: Iterable[str] = ()
) -> Iterator[dict[str, Any]]:
    """Yield the lines of an export as JSON-able objects.

    It reads one snapshot, also while another process writes, and keeps one page of rows in memory.

    :param program: the name and version of the program, for the first line
    :param sessions: the ids of the sessions; empty for all, with the records that belong to no session
    :raises UsageError: if a session does not exist
    """
    wanted = tuple(dict.fromkeys(sessions))
    connection.execute("BEGIN")
    try:
        for session in wanted:
            if not select_session_rows(connection, "WHERE id = ?", (session,)) and not _has_records(
                connection, session
            ):
                raise UsageError(f"Unknown session: {session!r:.80}. `handrail sessions` lists the sessions.")
        head = LogReader(connection).head()
        yield {
            "type": "export",
            "format": FORMAT,
            "program": program,
            "workspace": workspace,
            "exported_at": _time(now_ns),
            "log_records": head.sequence,
            "log_head": head.hash,
        }
        count = 1
        for line in _lines(connection, wanted):
            count += 1
            yield line
        yield {"type": "end", "lines": count + 1}
    finally:
        connection.execute("ROLLBACK")


def format_line(line: Mapping[str, Any]) -> str:
    """Return one line of an export: one JSON object with characters that every reader of UTF-8 takes."""
    text = json.dumps(line, ensure_ascii=False, separators=(",", ":"), default=str)
    # Line ends of other alphabets would end a line for some readers, and halves of pairs are no UTF-8.
    return text.translate({0x2028: "\\u2028", 0x2029: "\\u2029", 0x85: "\\u0085"}).encode("utf-8", "replace").decode()


def _lines(connection: sqlite3.Connection, wanted: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    ids = wanted or [str(found) for (found,) in connection.execute("SELECT id FROM session ORDER BY opened_ns, id")]
    for session in ids:
        for row in select_session_rows(connection, "WHERE id = ?", (session,)):
            yield _describe_session(row)
        yield from _message_lines(connection, session)
    for session in wanted or (None,):  # all records in one pass, since the log has no index for each session
        yield from _record_lines(connection, session)


def _has_records(connection: sqlite3.Connection, session: str) -> bool:
    sql = "SELECT 1 FROM record WHERE session = ? AND session <> '' LIMIT 1"
    return connection.execute(sql, (session,)).fetchone() is not None


def _describe_session(row: SessionRow) -> dict[str, Any]:
    return {
        "type": "session",
        "session": row.id,
        "agent": row.agent,
        "frontend": row.frontend,
        "topic": row.topic,
        "headless": row.headless,
        "opened_at": _time(row.opened_ns),
        "used_at": _time(row.used_ns),
        "closed_at": None if row.closed_ns is None else _time(row.closed_ns),
        "parent_session": row.parent_session,
        "parent_call": row.parent_call,
        "details": dict(row.details),
    }


def _message_lines(connection: sqlite3.Connection, session: str) -> Iterator[dict[str, Any]]:
    sql = "SELECT position, at_ns, body FROM message WHERE session = ? AND position > ? ORDER BY position LIMIT ?"
    last = -1
    while rows := connection.execute(sql, (session, last, _PAGE)).fetchall():
        for position, at_ns, body in rows:
            last = position
            yield {
                "type": "message",
                "session": session,
                "position": position,
                "at": _time(at_ns),
                "message": _decode(body),
            }


def _record_lines(connection: sqlite3.Connection, session: str | None) -> Iterator[dict[str, Any]]:
    reader, last = LogReader(connection), 0
    while records := [*reader.records(session=session, since=last, limit=_PAGE)]:
        for record in records:
            last = record.sequence
            yield {
                "type": "record",
                "session": record.session_id or None,
                "sequence": record.sequence,
                "at": _time(record.at_ns),
                "kind": record.kind,
                "call": record.call_id or None,
                "redacted": record.body is None,
                "body": None if record.body is None else dict(record.body),
            }


def _decode(body: object) -> Any:
    try:
        return decode_json_with_fallback(body) if isinstance(body, bytes) else None
    except (ValueError, RecursionError):
        return None  # a damaged row


def _time(at_ns: object) -> str | None:
    try:
        return (
            datetime.fromtimestamp(at_ns / 1e9, UTC).isoformat(timespec="milliseconds")
            if isinstance(at_ns, int)
            else None
        )
    except (ValueError, OverflowError, OSError):
        return None
