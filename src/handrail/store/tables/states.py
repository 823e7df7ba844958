"""What calls of stateful tools have opened, as rows: a state itself lives in memory, that it was there is kept.

A row is durable before its id is given to anybody, so that whoever asks for the state after a crash is told how it ended.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args

from handrail.contract.doors.opened import StateEnd
from handrail.store.database.connection import not_as_written, readable
from handrail.store.database.database import Database, Statement, Work

_COLUMNS = "id, session, call, tool, opened_ns, ended_ns, ended"
_DAY_NS = 24 * 3600 * 1_000_000_000
MOST_ENDED = 1_000
"""How many that have ended are kept in a workspace, for who asks for one of them, and for how long."""
KEPT_NS = 7 * _DAY_NS


@dataclass(frozen=True, slots=True)
class StateRow:
    """One state as it is kept. Times are wall-clock nanoseconds.

    :param call_id: of the call that opened it
    :param ended: None while it is open
    """

    id: str
    session_id: str
    call_id: str
    tool_id: str
    opened_ns: int
    ended_ns: int | None = None
    ended: StateEnd | None = None


class StateTable:
    """The table, for the workspace's holder. What reads raises ``LogUnavailable`` where the database cannot be read."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, row: StateRow) -> None:
        """:raises LogUnavailable: when it cannot be made durable"""
        values = (row.id, row.session_id, row.call_id, row.tool_id, row.opened_ns, row.ended_ns, row.ended or "")
        sql = f"INSERT INTO opened ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)"  # noqa: S608 - our own words
        await self._database.commit_together([_work(sql, values)])

    def end(self, state_id: str, ended: StateEnd, at_ns: int) -> None:
        """Keep how one ended, soon; the first end stays."""
        self._database.append(
            *_work("UPDATE opened SET ended = ?, ended_ns = ? WHERE id = ? AND ended = ''", (ended, at_ns, state_id))
        )

    async def recover(self, now_ns: int) -> None:
        """At start: what is open was left by a process that has ended. What ended long ago is forgotten.

        :raises LogUnavailable: when that cannot be made durable
        """
        newest = "SELECT id FROM opened ORDER BY ended_ns DESC, id DESC LIMIT ?"
        await self._database.commit_together(
            [
                _work("UPDATE opened SET ended = 'interrupted', ended_ns = ? WHERE ended = ''", (now_ns,)),
                _work("DELETE FROM opened WHERE ended_ns < ?", (now_ns - KEPT_NS,)),
                _work(f"DELETE FROM opened WHERE id NOT IN ({newest})", (MOST_ENDED,)),  # noqa: S608
            ]
        )

    def retire(self, now_ns: int) -> None:
        """Forget, soon, those that ended long ago or before very many others."""
        newest = "SELECT id FROM opened WHERE ended <> '' ORDER BY ended_ns DESC, id DESC LIMIT ?"
        sql = f"DELETE FROM opened WHERE ended <> '' AND (ended_ns < ? OR id NOT IN ({newest}))"  # noqa: S608
        self._database.append(*_work(sql, (now_ns - KEPT_NS, MOST_ENDED)))

    def get(self, state_id: str, session_id: str) -> StateRow | None:
        """One of a session; None where there is none, or it is another session's."""
        if not state_id.isascii():
            return None
        sql = f"SELECT {_COLUMNS} FROM opened WHERE id = ? AND session = ?"  # noqa: S608
        with readable(self._database.path):
            found = self._database.reading.execute(sql, (state_id, session_id)).fetchone()
            return None if found is None else _row(found)


def _row(row: tuple[Any, ...]) -> StateRow:
    """:raises sqlite3.Error: when it is not what was written"""
    id, session, call, tool, opened_ns, ended_ns, ended = row
    texts = (id, session, call, tool)
    whole = isinstance(opened_ns, int) and (ended_ns is None or isinstance(ended_ns, int))
    if not whole or not all(isinstance(text, str) for text in texts) or ended not in ("", *get_args(StateEnd)):
        raise not_as_written(f"the row of the state {str(row[0])[:80]!r}")
    return StateRow(id, session, call, tool, opened_ns, ended_ns, cast("StateEnd", ended) if ended else None)


class _Statements:
    def opened(self, connection: sqlite3.Connection) -> None:
        pass

    def statements(self, batch: Sequence[Statement]) -> Iterable[Statement]:
        return batch


_STATEMENTS = _Statements()


def _work(sql: str, values: tuple[str | int | None, ...]) -> Work:
    return _STATEMENTS, (sql, values)
