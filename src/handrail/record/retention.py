"""Removal of recorded data: bodies by a recorded redaction, and the files that only they referred to.

The data can be chosen by age and by session. The records themselves stay, as headers without a body, so that the chain still
verifies and says how many were redacted. Nothing else of them is left in the database, in its write-ahead log, among the
artifacts or in the sessions' folders.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from handrail.record.chain import SALT_BYTES
from handrail.record.log import CommitLog
from handrail.record.reading import LogReader
from handrail.store.database.database import Database, Statement
from handrail.store.folders import Folders, remove_tree
from handrail.store.inventory import tree_bytes
from handrail.store.tables.sessions import LAST_USED

# Orphans: artifacts, sidecars and files of ended sessions that no record refers to any more.

_REF = re.compile(rb"sha256:([0-9a-f]{64})")
_HEX = re.compile(r"[0-9a-f]+")
_OF_A_TOOL = "tool-"
"""Scratch folders of tools that stay up between calls; they belong to no session."""
_NOTE = ".removed"
"""Follows the name of a job's output that made room for others, in that of the note that says so."""
_PLAIN = ("record", "meta", "session")

Condition = tuple[str, list[str | int]]


@dataclass(frozen=True, slots=True)
class Leftovers:
    """Files and whole folders, and how many bytes are in them."""

    files: tuple[Path, ...]
    folders: tuple[Path, ...]
    bytes: int

    @property
    def paths(self) -> tuple[Path, ...]:
        return (*self.files, *self.folders)

    def remove(self) -> list[str]:
        """Remove all of them, following no link; says what could not be."""
        problems: list[str] = []
        for file in self.files:
            try:
                file.unlink(missing_ok=True)
            except OSError as error:
                problems.append(f"{file}: {error.strerror or error}")
        for folder in self.folders:
            remove_tree(folder)
            if folder.exists():
                problems.append(f"{folder}: could not be removed")
        return problems


def leftovers(
    connection: sqlite3.Connection, folders: Folders, ending: Sequence[str], without: Condition | None = None
) -> Leftovers:
    """Look for them. No call may be running, or its output would look unreferred to.

    :param ending: sessions that count as gone
    :param without: records that count as gone
    """
    refs, outputs = _references(connection, folders, frozenset(ending), without)
    sessions = {str(row[0]) for row in connection.execute("SELECT id FROM session")} - set(ending)
    files: list[Path] = []
    for file in _files(folders.artifacts):
        digest = f"{file.parent.name}{file.name.removesuffix('.type')}"
        if digest not in refs:
            files.append(file)
    of_outputs, whole = _left_by_sessions(folders, sessions, outputs)
    files += of_outputs
    size = sum(_size(file) for file in files) + sum(tree_bytes(folder) for folder in whole)
    return Leftovers(tuple(files), tuple(whole), size)


def _left_by_sessions(
    folders: Folders, sessions: Collection[str], outputs: Collection[str]
) -> tuple[list[Path], list[Path]]:
    """Files of outputs that nothing refers to, and folders of sessions that are gone."""
    files: list[Path] = []
    whole: list[Path] = []
    for part in ("output", "scratch"):
        for folder in _subfolders(folders.state / part / folders.key):
            if folder.name not in sessions and not (part == "scratch" and folder.name.startswith(_OF_A_TOOL)):
                whole.append(folder)
            elif part == "output":
                names = ((file, file.name.removesuffix(_NOTE)) for file in _plain_files(folder))
                files += (file for file, name in names if f"{folder.name}/{name}" not in outputs)
    return files, whole


def tables_of_sessions(connection: sqlite3.Connection) -> Iterator[str]:
    """The tables, but the log, that keep something of sessions."""
    for table in _tables(connection):
        if table not in _PLAIN and "session" in _columns(connection, table):
            yield table


def _references(
    connection: sqlite3.Connection, folders: Folders, ending: frozenset[str], without: Condition | None
) -> tuple[set[str], set[str]]:
    """Hashes of the artifacts, and ``session/file`` of the outputs, that anything kept names."""
    outputs = str(folders.outputs)
    # A path as each of the two encoders of the log writes it.
    spellings = {json.dumps(outputs, ensure_ascii=ascii_only)[1:-1].encode() for ascii_only in (True, False)}
    output = re.compile(b"(?:" + b"|".join(map(re.escape, sorted(spellings))) + rb")/([\w-]+/[\w.-]+)")
    refs: set[str] = set()
    named: set[str] = set()

    def look(value: object) -> None:
        raw = value if isinstance(value, bytes) else value.encode("utf-8", "replace") if isinstance(value, str) else b""
        refs.update(match.decode() for match in _REF.findall(raw))
        named.update(match.decode() for match in output.findall(raw))

    where, values = ("body IS NOT NULL", list[str | int]()) if without is None else (f"NOT ({without[0]})", without[1])
    for (body,) in connection.execute(f"SELECT body FROM record WHERE body IS NOT NULL AND {where}", values):  # noqa: S608
        look(body)
    for table in _tables(connection):
        columns = _columns(connection, table)
        if table in _PLAIN or not columns:
            continue
        owner = columns.index("session") if "session" in columns else None
        for row in connection.execute(f'SELECT * FROM "{table}"'):  # noqa: S608
            if owner is None or row[owner] not in ending:
                for value in row:
                    look(value)
    return refs, named


def _tables(connection: sqlite3.Connection) -> list[str]:
    rows = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")
    return [str(row[0]) for row in rows.fetchall() if '"' not in row[0]]


def _columns(connection: sqlite3.Connection, table: str) -> list[str]:
    return [str(row[1]) for row in connection.execute(f'PRAGMA table_info("{table}")')]


def _files(folder: Path) -> Iterator[Path]:
    for inner in _subfolders(folder):
        if len(inner.name) == 2 and _HEX.fullmatch(inner.name):
            yield from _plain_files(inner)


def _subfolders(folder: Path) -> list[Path]:
    return [path for path, is_folder in _entries(folder) if is_folder]


def _plain_files(folder: Path) -> list[Path]:
    return [path for path, is_folder in _entries(folder) if not is_folder]


def _entries(folder: Path) -> list[tuple[Path, bool]]:
    try:
        with os.scandir(folder) as entries:
            return sorted((Path(entry.path), entry.is_dir(follow_symlinks=False)) for entry in entries)
    except OSError:
        return []


def _size(file: Path) -> int:
    try:
        return file.lstat().st_size
    except OSError:
        return 0


_KEPT = ("redacted", "lost")
"""Records that prove what became of others. They hold numbers and reasons only."""
_MOST_RECORDS = 20_000
_MOST_BYTES = 64 * 1024 * 1024
"""Of one transaction, which the write-ahead log has to hold: a purge is also what one does on a disk that is full."""

_TEXT = f"CAST(substr(body, {SALT_BYTES + 1}) AS TEXT)"
_NEWEST_WHOLE = (
    "SELECT max(sequence) FROM record WHERE kind = 'generation' AND at_ns < ? "  # noqa: S608
    f"AND CASE WHEN json_valid({_TEXT}) THEN json_extract({_TEXT}, '$.after') IS NULL END"
)


@dataclass(frozen=True, slots=True)
class Selection:
    """Which records: those of before a moment (wall clock, nanoseconds), those of a session, or both."""

    before_ns: int | None = None
    session_id: str | None = None

    def __str__(self) -> str:
        parts: list[str] = []
        if self.session_id is not None:
            parts.append(f"session {self.session_id}")
        if self.before_ns is not None:
            moment = datetime.fromtimestamp(self.before_ns / 1e9).astimezone()
            parts.append(f"before {moment.isoformat(sep=' ', timespec='seconds')}")
        return ", ".join(parts) or "everything"

    @property
    def condition(self) -> tuple[str, list[str | int]]:
        """As SQL on a record, with its values."""
        wheres, values = ["body IS NOT NULL", f"kind NOT IN {_KEPT}"], list[str | int]()
        if self.session_id is not None:
            wheres.append("session = ?")
            values.append(self.session_id)
        if self.before_ns is not None:
            wheres.append("at_ns < ?")
            values.append(self.before_ns)
            # Later calls may have been made with the tools that this one names, and those that only say what changed since.
            wheres.append(f"(kind <> 'generation' OR sequence < ifnull(({_NEWEST_WHOLE}), 0))")
            values.append(self.before_ns)
        return " AND ".join(wheres), values


@dataclass(frozen=True, slots=True)
class Survey:
    """What a purge would take away.

    :param records: how many bodies, ``bytes`` in all
    :param calls: how many calls have a record among them
    :param sessions: ids of sessions that go as a whole, with what their tools remember and their folders
    :param left_over: artifacts, sidecars and folders that nothing else refers to
    """

    records: int
    bytes: int
    calls: int
    oldest_ns: int | None
    newest_ns: int | None
    sessions: tuple[str, ...]
    left_over: Leftovers

    @property
    def empty(self) -> bool:
        return not (self.records or self.sessions or self.left_over.paths)


@dataclass(frozen=True, slots=True)
class Purged:
    """What was taken away, and what could not be."""

    records: int
    sessions: int
    files: int
    problems: tuple[str, ...] = ()


def survey(reader: LogReader, folders: Folders, selection: Selection) -> Survey:
    """Look without changing anything.

    :raises sqlite3.Error: when the log is damaged
    """
    connection = reader.connection
    where, values = selection.condition
    records, size, calls, oldest, newest = connection.execute(
        "SELECT count(*), total(length(body)), count(DISTINCT nullif(call, '')), min(at_ns), max(at_ns) "  # noqa: S608
        f"FROM record WHERE {where}",
        values,
    ).fetchone()
    sessions = tuple(_whole_sessions(connection, selection))
    left_over = leftovers(connection, folders, sessions, (where, values))
    return Survey(records, int(size), calls, oldest, newest, sessions, left_over)


async def purge(log: CommitLog, database: Database, folders: Folders, selection: Selection, *, reason: str) -> Purged:
    """Take away what :func:`survey` finds. The caller holds the workspace's lease, and no call runs.

    Ended in its middle, it has removed a part, each step of it recorded; the same again removes the rest.

    :param reason: goes on record with each redaction
    :raises LogUnavailable: when it cannot be made durable
    """
    await log.flush()
    connection = log.reader.connection
    sessions = tuple(_whole_sessions(connection, selection))
    removed = 0
    for sequences in list(_batches(connection, selection)):
        await log.redact(sequences, reason=reason, session_id=selection.session_id or "")
        removed += len(sequences)
    forgetting = _Forgetting(selection)
    database.attach(forgetting)
    await database.commit(forgetting, sessions)
    found = await asyncio.to_thread(leftovers, connection, folders, sessions)
    problems = await asyncio.to_thread(found.remove)
    return Purged(removed, len(sessions), len(found.paths) - len(problems), tuple(problems))


def _whole_sessions(connection: sqlite3.Connection, selection: Selection) -> Iterator[str]:
    """The sessions of which nothing is kept."""
    sql, values = "SELECT id FROM session", list[str | int]()
    if selection.before_ns is not None:
        sql += " LEFT JOIN (SELECT session, max(at_ns) AS latest FROM record WHERE session <> '' GROUP BY session) ON session = id"
        sql += f" WHERE max(coalesce(latest, 0), opened_ns, {LAST_USED}, coalesce(closed_ns, 0)) < ?"
        values.append(selection.before_ns)
    if selection.session_id is not None:
        sql += (" AND" if values else " WHERE") + " id = ?"
        values.append(selection.session_id)
    for (session,) in connection.execute(sql, values):
        yield str(session)


def _batches(connection: sqlite3.Connection, selection: Selection) -> Iterator[list[int]]:
    where, values = selection.condition
    batch: list[int] = []
    size = 0
    rows = connection.execute(f"SELECT sequence, length(body) FROM record WHERE {where} ORDER BY sequence", values)  # noqa: S608
    for sequence, length in rows:
        batch.append(sequence)
        size += length
        if len(batch) >= _MOST_RECORDS or size >= _MOST_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _Forgetting:
    """Removes sessions from every table that keeps something of them, as the column ``session`` says; and, of sessions
    that go on, requests to people that are over."""

    def __init__(self, selection: Selection) -> None:
        self._before_ns = None if selection.session_id is not None else selection.before_ns
        self._tables: tuple[str, ...] = ()

    def opened(self, connection: sqlite3.Connection) -> None:
        self._tables = tuple(tables_of_sessions(connection))

    def statements(self, batch: Sequence[Sequence[str]]) -> Iterable[Statement]:
        for session in (one for sessions in batch for one in sessions):
            for table in self._tables:
                yield f'DELETE FROM "{table}" WHERE session = ?', (session,)  # noqa: S608
            yield "DELETE FROM session WHERE id = ?", (session,)
        if self._before_ns is not None and "approval" in self._tables:
            yield "DELETE FROM approval WHERE answered = 1 AND created_ns < ?", (self._before_ns,)
        yield "PRAGMA wal_checkpoint(TRUNCATE)", ()
