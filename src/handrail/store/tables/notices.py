"""What sessions' agents are to be told: a notice a row, by the id of its delivery, taken once."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from typing import Any, Literal, cast, get_args

from handrail.contract.doors.notices import Notice, NoticeKind
from handrail.store.database.connection import readable
from handrail.store.database.database import Database, Statement, Work
from handrail.store.encoding import decode, encode

_UNBOUNDED = 2**62
MOST_AT_ONCE = 200
MOST_BYTES_AT_ONCE = 4 * 1024 * 1024
"""Of the notices of one look; the first is always among them."""
MAX_TAKEN = 1_000
"""Of a session's notices that were taken, how many are still known, so that the same delivery is not told again."""


class NoticeTable:
    """The table of notices."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def post(self, notice: Notice, *along: Work) -> None:
        """Keep a notice; one of that id that is there stays as it is. Durable on return.

        :param along: what is kept together with it, or not at all
        :raises LogUnavailable: when it cannot be made durable
        """
        if along:
            await self._database.commit_together([(_STATEMENTS, ("post", notice)), *along])
        else:
            await self._database.commit(_STATEMENTS, ("post", notice))

    async def take(self, session_id: str, ids: Sequence[str]) -> None:
        """Mark notices as taken. Durable on return.

        :raises LogUnavailable: when it cannot be made durable
        """
        if ids:
            await self._database.commit(*self.taking(session_id, ids))

    def taking(self, session_id: str, ids: Sequence[str]) -> Work:
        """The same as one of several works that are written whole or not at all."""
        return _STATEMENTS, ("take", session_id, tuple(ids))

    def pending(self, session_id: str) -> list[Notice]:
        """A session's notices that were not taken, in the order in which they came: the first of very many. Those that are
        damaged are taken, since nobody can be told.

        :raises LogUnavailable: when the database cannot be read
        """
        sql = "SELECT id, body FROM notice WHERE session = ? AND taken = 0 ORDER BY number"
        with readable(self._database.path):
            found, damaged, size = list[Notice](), list[str](), 0
            with closing(self._database.reading.execute(sql, (session_id,))) as rows:
                for id, body in rows:
                    size += len(body) if isinstance(body, bytes) else 0
                    if len(found) + len(damaged) >= MOST_AT_ONCE or (found and size > MOST_BYTES_AT_ONCE):
                        break
                    notice = _notice(id, session_id, body)
                    if notice is not None:
                        found.append(notice)
                    else:
                        damaged.append(id)
        if damaged:
            self._database.append(_STATEMENTS, ("take", session_id, tuple(damaged)))
        return found

    def count(self, session_id: str) -> int:
        """How many wait.

        :raises LogUnavailable: when the database cannot be read
        """
        sql = "SELECT count(*) FROM notice WHERE session = ? AND taken = 0"
        with readable(self._database.path):
            return cast("int", self._database.reading.execute(sql, (session_id,)).fetchone()[0])


def _notice(id: object, session_id: str, body: object) -> Notice | None:
    try:
        data: Mapping[str, Any] = decode(body) if isinstance(body, bytes) else {}
        kind, source, text, at_ns = data["kind"], data["source"], data["text"], int(data["at_ns"])
        more, untrusted = data["data"], data["untrusted"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return None
    if kind not in get_args(NoticeKind) or not all(isinstance(one, str) for one in (id, source, text, untrusted or "")):
        return None
    return Notice(str(id), session_id, kind, source, text, at_ns, more, untrusted)


_Change = tuple[Literal["post"], Notice] | tuple[Literal["take"], str, tuple[str, ...]]


class _Statements:
    """The table's part in the writer; nothing is kept in memory."""

    def opened(self, connection: sqlite3.Connection) -> None:
        pass

    def statements(self, batch: Sequence[_Change]) -> Iterable[Statement]:
        for change in batch:
            if change[0] == "post":
                notice = change[1]
                body = {
                    "kind": notice.kind,
                    "source": notice.source,
                    "text": notice.text,
                    "at_ns": notice.at_ns,
                    "data": None if notice.data is None else dict(notice.data),
                    "untrusted": notice.untrusted,
                }
                yield (
                    "INSERT INTO notice (id, session, taken, body) VALUES (?, ?, 0, ?) ON CONFLICT (id) DO NOTHING",
                    (notice.id, notice.session_id, encode(body, max_bytes=_UNBOUNDED)),
                )
                continue
            _, session, ids = change
            for id in ids:
                yield "UPDATE notice SET taken = 1 WHERE id = ? AND session = ?", (id, session)
            yield _TRIM, (session, session, MAX_TAKEN)


_STATEMENTS = _Statements()
_TRIM = (
    "DELETE FROM notice WHERE session = ? AND taken = 1 AND number <= "
    "(SELECT number FROM notice WHERE session = ? AND taken = 1 ORDER BY number DESC LIMIT 1 OFFSET ?)"
)
