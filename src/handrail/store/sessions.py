"""Which sessions there are, and what tools remember in them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from handrail.contract.errors import UsageError
from handrail.store.database import Database, Statement
from handrail.store.encoding import decode, encode
from handrail.store.folders import check_session_id

MAX_VALUE_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class SessionRow:
    """One conversation with the workspace. Times are wall-clock nanoseconds; ``closed_ns`` is None while it is open
    or only suspended. ``details`` is JSON-able, for what a face wants to find again."""

    id: str
    opened_ns: int
    closed_ns: int | None = None
    agent: str = "default"
    topic: str | None = None
    face: str = "library"
    headless: bool = True
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Sessions:
    """The table of sessions."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def open(self, row: SessionRow) -> None:
        """Record that a session is open; opening one again keeps its first time.

        :raises LogUnavailable: when it cannot be made durable
        """
        check_session_id(row.id)
        await self._database.commit(_STATEMENTS, ("open", row))

    async def close(self, session_id: str, at_ns: int) -> None:
        """Close it for good: what its tools remember goes with it."""
        await self._database.commit(_STATEMENTS, ("close", session_id, at_ns))

    def get(self, session_id: str) -> SessionRow | None:
        rows = list(self._rows("WHERE id = ?", (session_id,)))
        return rows[0] if rows else None

    def all(self, *, limit: int = 1000) -> list[SessionRow]:
        """The most recently opened first."""
        return list(self._rows("ORDER BY opened_ns DESC LIMIT ?", (limit,)))

    def _rows(self, where: str, values: Sequence[str | int]) -> Iterable[SessionRow]:
        sql = "SELECT id, opened_ns, closed_ns, agent, topic, face, headless, details FROM session "
        for row in self._database.reading.execute(sql + where, values):
            *plain, headless, details = row
            yield SessionRow(*plain, headless=bool(headless), details=decode(details))


class SessionState:
    """Values that tools keep in sessions, across restarts."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def get(self, session_id: str, tool_id: str, key: str) -> Any:
        """The value, or None."""
        row = self._database.reading.execute(
            "SELECT value FROM state WHERE session = ? AND tool = ? AND key = ?",
            (_text(session_id), _text(tool_id), _text(key)),
        ).fetchone()
        return None if row is None else decode(cast("bytes", row[0]))

    async def put(self, session_id: str, tool_id: str, key: str, value: Any) -> None:
        """Keep ``value``; None forgets the key. Durable on return.

        :raises UsageError: when it is larger than 4 MiB as JSON
        :raises LogUnavailable: when it cannot be made durable
        """
        encoded = None if value is None else encode(value, max_bytes=2**62)
        if encoded is not None and len(encoded) > MAX_VALUE_BYTES:
            raise UsageError(
                f"the value of {key[:80]!r} takes {len(encoded):,} bytes; at most {MAX_VALUE_BYTES:,} are kept. "
                "Keep large values in a file or artifact and remember its name"
            )
        names = (_text(session_id), _text(tool_id), _text(key))
        await self._database.commit(_STATEMENTS, ("put", *names, encoded))

    def of(self, session_id: str, tool_id: str) -> ToolState:
        """The one tool's view, as its runtime offers it."""
        return ToolState(self, session_id, tool_id)


class ToolState:
    """One tool's values in one session (:class:`handrail.contract.runtime.State`)."""

    def __init__(self, state: SessionState, session_id: str, tool_id: str) -> None:
        self._state = state
        self._session_id = session_id
        self._tool_id = tool_id

    async def get(self, key: str) -> Any:
        return await self._state.get(self._session_id, self._tool_id, key)

    async def put(self, key: str, value: Any) -> None:
        await self._state.put(self._session_id, self._tool_id, key, value)


_Change = (
    tuple[Literal["open"], SessionRow]
    | tuple[Literal["close"], str, int]
    | tuple[Literal["put"], str, str, str, bytes | None]
)


class _Statements:
    """Both tables' part in the writer; nothing is kept in memory."""

    def opened(self, connection: sqlite3.Connection) -> None:
        pass

    def statements(self, batch: Sequence[_Change]) -> Iterable[Statement]:
        for change in batch:
            if change[0] == "open":
                row = change[1]
                yield (
                    "INSERT INTO session (id, opened_ns, agent, topic, face, headless, details) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET closed_ns = NULL, "
                    "agent = excluded.agent, topic = excluded.topic, face = excluded.face, "
                    "headless = excluded.headless, details = excluded.details",
                    (
                        row.id,
                        row.opened_ns,
                        _text(row.agent),
                        None if row.topic is None else _text(row.topic),
                        _text(row.face),
                        int(row.headless),
                        encode(dict(row.details)),
                    ),
                )
            elif change[0] == "close":
                yield "UPDATE session SET closed_ns = ? WHERE id = ?", (change[2], change[1])
                yield "DELETE FROM state WHERE session = ?", (change[1],)
            else:
                _, session, tool, key, value = change
                if value is None:
                    yield "DELETE FROM state WHERE session = ? AND tool = ? AND key = ?", (session, tool, key)
                else:
                    yield (
                        "INSERT OR REPLACE INTO state (session, tool, key, value) VALUES (?, ?, ?, ?)",
                        (session, tool, key, value),
                    )


_STATEMENTS = _Statements()


def _text(text: str) -> str:
    """Half surrogate pairs cannot be stored; keep them readable."""
    return text.encode("utf-8", "backslashreplace").decode()
