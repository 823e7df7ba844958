"""Removing deleted data from the database file itself: the write-ahead log is emptied and free pages are given back."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from pathlib import Path

from handrail.contract.errors import StartError
from handrail.store.database.engines import connected

_PATIENCE_S = 5
_WORTHWHILE = 0.25
"""The share of a file that is free before it is written anew."""
_LITTLE = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Compaction:
    """Bytes of the database and its write-ahead log before and after; ``problem`` says what could not be done."""

    before: int
    after: int
    problem: str | None = None


def compact(path: Path) -> Compaction:
    """Empty the write-ahead log, and give free pages back where there are many.

    The caller holds the workspace's lease and has closed its own connections. Removed content was overwritten before
    (``secure_delete``); what stands here is only older copies of pages, and room. Never raises for what the disk or
    another reader stands against.
    """
    before = _size(path)
    problem: str | None = None
    try:
        connection = connected(path, path, isolation_level=None, timeout=_PATIENCE_S)
        try:
            connection.execute("PRAGMA secure_delete = ON")
            problem = _emptied(connection)
            free, pages, page = (_number(connection, name) for name in ("freelist_count", "page_count", "page_size"))
            if problem is None and free * page > _LITTLE and free > pages * _WORTHWHILE:
                # Its temporary copy is made beside the database, not on whatever disk /tmp is.
                connection.execute(f"PRAGMA temp_store_directory = '{str(path.parent).replace(chr(39), chr(39) * 2)}'")
                try:
                    connection.execute("VACUUM")
                finally:
                    connection.execute("PRAGMA temp_store_directory = ''")
                problem = _emptied(connection)
        finally:
            connection.close()
    except (sqlite3.Error, StartError) as error:
        problem = f"the file {path} could not be made smaller: {error}"
    return Compaction(before, _size(path), problem)


def _emptied(connection: sqlite3.Connection) -> str | None:
    busy, *_ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    if not busy:
        return None
    return (
        "another process is reading the log, so older copies of its pages are still in the write-ahead log; they go "
        "once it has ended and Handrail writes again, or with another purge"
    )


def _number(connection: sqlite3.Connection, name: str) -> int:
    (value,) = connection.execute(f"PRAGMA {name}").fetchone()
    return int(value)


def _size(path: Path) -> int:
    total = 0
    for file in (path, path.with_name(f"{path.name}-wal")):
        try:
            total += file.stat().st_size
        except OSError:
            pass
    return total
