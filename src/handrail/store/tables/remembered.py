"""What a session remembers beside its messages: rules stored by a person's answers, and which files it has read."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Sequence

from handrail.store.database.connection import readable
from handrail.store.database.database import Database, Statement

MAX_SEEN = 10_000
"""Files of a session whose content hash is kept; of more, the ones longest unused have to be read again."""
_TRIMMED_EVERY = 1_000


class SessionRules:
    """Rules answered "for this session", as their texts. They are stored with the answer that they come from."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def of(self, session_id: str) -> tuple[str, ...]:
        """A session's rules.

        :raises LogUnavailable: when the database cannot be read
        """
        rows = _rows(self._database, "SELECT text FROM session_rule WHERE session = ? ORDER BY text", session_id)
        return tuple(str(text) for (text,) in rows)


class SeenHashes:
    """Path and sha256 (hexadecimal) of what sessions have read. Safe from any thread."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._noted = 0

    def note(self, session_id: str, path: str, sha256: str | None) -> None:
        """Keep a hash soon, without waiting: None forgets the path. A path that no database takes is not kept."""
        try:
            path.encode()
        except UnicodeEncodeError:
            return
        self._noted += 1
        trim = self._noted % _TRIMMED_EVERY == 0
        self._database.append(_STATEMENTS, (session_id, path, sha256, time.time_ns(), trim))

    def of(self, session_id: str) -> list[tuple[str, str]]:
        """Pairs of path and hash, the longest unused first.

        :raises LogUnavailable: when the database cannot be read
        """
        sql = f"SELECT path, sha256 FROM seen WHERE session = ? ORDER BY at_ns DESC LIMIT {MAX_SEEN}"  # noqa: S608
        return [(str(path), str(sha256)) for path, sha256 in _rows(self._database, sql, session_id)][::-1]


def _rows(database: Database, sql: str, session_id: str) -> list[tuple[object, ...]]:
    with readable(database.path):
        return database.reading.execute(sql, (session_id,)).fetchall()


_Change = tuple[str, str, str | None, int, bool]


class _Statements:
    """The part of the table of hashes in the writer; nothing is kept in memory."""

    def opened(self, connection: sqlite3.Connection) -> None:
        pass

    def statements(self, batch: Sequence[_Change]) -> Iterable[Statement]:
        for change in batch:
            session, path, sha256, at_ns, trim = change
            if sha256 is None:
                yield "DELETE FROM seen WHERE session = ? AND path = ?", (session, path)
            else:
                yield (
                    "INSERT OR REPLACE INTO seen (session, path, sha256, at_ns) VALUES (?, ?, ?, ?)",
                    (session, path, sha256, at_ns),
                )
            if trim:
                yield (
                    "DELETE FROM seen WHERE session = ? AND at_ns < "
                    "(SELECT at_ns FROM seen WHERE session = ? ORDER BY at_ns DESC LIMIT 1 OFFSET ?)",
                    (session, session, MAX_SEEN),
                )


_STATEMENTS = _Statements()
