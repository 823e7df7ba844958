"""The tasks of a workspace, one JSON object each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from handrail.store.database.sqlite_connection import make_damaged_row_error
from handrail.store.database.workspace_database import WorkspaceTable
from handrail.store.json_fallback_encoding import decode_stored_object, encode_json_with_fallback


class TaskTable(WorkspaceTable):
    """The table of tasks."""

    def list_task_rows(self) -> list[tuple[int, Mapping[str, Any]]]:
        """Return the id and the fields of every task, in the order of the ids.

        :raises LogUnavailable: if the database cannot be read
        """
        return self._read_rows("SELECT id, body FROM task ORDER BY id", parse=_parse_task)

    async def store(self, task_id: int, fields: Mapping[str, Any], removed: Sequence[int] = ()) -> None:
        """Store a task, and remove others. Durable on return.

        :raises LogUnavailable: if it cannot be made durable
        """
        await self._write(
            (
                "INSERT OR REPLACE INTO task (id, body) VALUES (?, ?)",
                (task_id, encode_json_with_fallback(dict(fields))),
            ),
            *(("DELETE FROM task WHERE id = ?", (number,)) for number in removed),
        )


def _parse_task(row: tuple[Any, ...]) -> tuple[int, Mapping[str, Any]]:
    number, body = row
    if (fields := decode_stored_object(body)) is None:
        raise make_damaged_row_error(f"task {number}")
    return number, fields
