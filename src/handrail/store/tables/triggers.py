"""Triggers, as rows: one for each name in a session, as long as it may fire."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, get_args

from handrail.contract.doors.channels import Trigger, TriggerKind
from handrail.store.database.connection import readable
from handrail.store.database.database import Database, OneRow, Statement, Work
from handrail.store.encoding import decode, encode

_UNBOUNDED = 2**62
_KINDS = get_args(TriggerKind)


class TriggerTable:
    """The table, for the workspace's holder. What writes is durable on return, and raises ``LogUnavailable`` where it
    cannot be; so does what reads where the database cannot be read."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def all(self) -> list[Trigger]:
        """Every one there is, without those that are damaged."""
        with readable(self._database.path):
            rows = self._database.reading.execute("SELECT body FROM trigger_row ORDER BY session, name").fetchall()
        return [trigger for (body,) in rows if (trigger := _trigger(body)) is not None]

    @staticmethod
    def putting(trigger: Trigger) -> Work:
        """What keeps it as it is now."""
        sql = "INSERT INTO trigger_row (session, name, body) VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET body = excluded.body"
        body = encode(asdict(trigger), max_bytes=_UNBOUNDED)
        return _STATEMENTS, [(sql, (trigger.session_id, trigger.name, body))]

    @staticmethod
    def removing(trigger: Trigger) -> Work:
        """What removes it."""
        sql = "DELETE FROM trigger_row WHERE session = ? AND name = ?"
        return _STATEMENTS, [(sql, (trigger.session_id, trigger.name))]

    async def put(self, trigger: Trigger) -> None:
        """Keep it as it is now."""
        await self._database.commit(*self.putting(trigger))

    async def remove(self, trigger: Trigger) -> None:
        await self._database.commit(*self.removing(trigger))

    async def remove_below(self) -> None:
        """Those of sub-agents' sessions, and what they have of channels."""
        below = "(SELECT id FROM session WHERE under IS NOT NULL)"
        with readable(self._database.path):
            sql = f"SELECT session, name FROM trigger_row WHERE session IN {below}"  # noqa: S608 - our own words
            found = self._database.reading.execute(sql).fetchall()
        if found:
            readers = [("DELETE FROM channel_reader WHERE reader = ?", (f"trigger/{s}/{name}",)) for s, name in found]
            sql = f"DELETE FROM trigger_row WHERE session IN {below}"  # noqa: S608
            await self._database.commit(_STATEMENTS, [(sql, ()), *readers])

    async def remove_all(self, session_id: str) -> None:
        """A session is closed for good."""
        await self._database.commit(_STATEMENTS, [("DELETE FROM trigger_row WHERE session = ?", (session_id,))])


def _trigger(body: object) -> Trigger | None:
    """As it was kept; None where what is there is not what was written."""
    try:
        data: Mapping[str, Any] = decode(body) if isinstance(body, bytes) else {}
        trigger = Trigger(**data)
    except (ValueError, RecursionError, TypeError):
        return None
    kept: Any = trigger  # whatever the row held
    numbers = (kept.created_ns, kept.fired, kept.every_ns or 0, kept.next_ns or 0)
    texts = (kept.name, kept.session_id, kept.prompt, kept.cron or "", kept.channel or "", kept.sender or "")
    texts += (kept.tool or "", kept.fault or "")
    sound = all(isinstance(one, int) for one in numbers) and all(isinstance(one, str) for one in texts)
    sound = sound and isinstance(kept.arguments, dict | None) and (kept.kind != "class" or kept.tool is not None)
    return trigger if sound and kept.kind in _KINDS else None


class _Statements:
    def opened(self, connection: sqlite3.Connection) -> None:
        pass

    def statements(self, batch: Sequence[Sequence[Statement | OneRow]]) -> Iterable[Statement | OneRow]:
        for work in batch:
            yield from work


_STATEMENTS = _Statements()
