"""The tasks of a workspace, one JSON object each."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from handrail.store.database.sqlite_connection import make_damaged_row_error, map_to_log_unavailable
from handrail.store.database.workspace_database import Statement, WorkspaceDatabase
from handrail.store.json_fallback_encoding import decode_json_with_fallback, encode_json_with_fallback


class TaskTable:
    """The table of tasks."""

    def __init__(self, database: WorkspaceDatabase) -> None:
        self._database = database

    def list_task_rows(self) -> list[tuple[int, Mapping[str, Any]]]:
        """Return the id and the fields of every task, in the order of the ids.

        :raises LogUnavailable: if the database cannot be read
        """
        with map_to_log_unavailable(self._database.path):
            rows = self._database.shared_read_connection.execute("SELECT id, body FROM task ORDER BY id").fetchall()
        return [(number, _decode(number, body)) for number, body in rows]

    async def store(self, task_id: int, fields: Mapping[str, Any], removed: Sequence[int] = ()) -> None:
        """Store a task, and remove others. Durable on return.

        :raises LogUnavailable: if it cannot be made durable
        """
        await self._database.write_durably(
            _STATEMENTS, (task_id, encode_json_with_fallback(dict(fields)), tuple(removed))
        )


def _decode(number: int, body: object) -> Mapping[str, Any]:
    try:
        fields: Any = decode_json_with_fallback(body) if isinstance(body, bytes) else None
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise make_damaged_row_error(f"task {number}")
    return fields  # pyright: ignore[reportUnknownVariableType]


class _TaskStatements:
    """The SQL of the table. It keeps no state in memory."""

    def load(self, connection: sqlite3.Connection) -> None:
        pass

    def build_statements(self, batch: Sequence[tuple[int, bytes, tuple[int, ...]]]) -> Iterable[Statement]:
        for task_id, body, removed in batch:
            yield "INSERT OR REPLACE INTO task (id, body) VALUES (?, ?)", (task_id, body)
            for number in removed:
                yield "DELETE FROM task WHERE id = ?", (number,)


_STATEMENTS = _TaskStatements()
