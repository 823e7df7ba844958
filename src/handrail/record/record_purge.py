"""Removal of recorded data: bodies by a recorded redaction, and the files that only these bodies referred to.

The data can be chosen by age and by session. The records stay as headers without a body, so that the chain still verifies
and reports the redactions. Nothing else remains in the database, its write-ahead log, the artifacts or the sessions' folders.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import closing
from datetime import datetime
from pathlib import Path

from handrail.contract.struct import Struct
from handrail.record.commit_log import CommitLog
from handrail.record.hash_chain import SALT_BYTES
from handrail.record.log_reader import LogReader
from handrail.store.database.workspace_database import Statement, WorkspaceDatabase
from handrail.store.memory.knowledge_store import KnowledgeStore, KnowledgeUnavailable
from handrail.store.state_folders import StateFolders, remove_tree
from handrail.store.state_inventory import measure_folder_size
from handrail.store.tables.session_tables import LAST_USED
from handrail.store.undo_store import UndoStore

# Orphans: artifacts, output files and folders of ended sessions that no record refers to any more.

_REF_PATTERN = re.compile(rb"sha256:([0-9a-f]{64})")
_HEX_PATTERN = re.compile(r"[0-9a-f]+")
_TOOL_PREFIX = "tool-"
"""The prefix of the scratch folders of persistent tools, which belong to no session."""
_REMOVED_SUFFIX = ".removed"
"""The suffix of the note that replaces a job's output that was removed to free space."""
_OTHER_TABLES = ("record", "meta", "session")

SqlCondition = tuple[str, list[str | int]]


class OrphanedFiles(Struct, frozen=True):
    """Files and folders that nothing refers to, with their total size in bytes."""

    files: tuple[Path, ...]
    folders: tuple[Path, ...]
    bytes: int

    @property
    def paths(self) -> tuple[Path, ...]:
        return (*self.files, *self.folders)

    def remove(self) -> list[str]:
        """Remove all of them without following links, and return a problem for each that remains."""
        problems: list[str] = []
        for file in self.files:
            try:
                file.unlink(missing_ok=True)
            except OSError as error:
                problems.append(f"{file}: {error.strerror or error}")
        for folder in self.folders:
            remove_tree(folder)
            if folder.exists():
                problems.append(f"{folder}: cannot be removed")
        return problems


def find_orphaned_files(
    connection: sqlite3.Connection, folders: StateFolders, ending: Sequence[str], without: SqlCondition | None = None
) -> OrphanedFiles:
    """Find orphaned files and folders. No call may be running, or its output would look orphaned.

    :param ending: sessions to treat as removed
    :param without: records to treat as removed
    """
    # The references are collected from all tables, so a new table with references needs no change here.
    refs, outputs = _collect_references(connection, folders, frozenset(ending), without)
    sessions = {str(row[0]) for row in connection.execute("SELECT id FROM session")} - set(ending)
    files: list[Path] = []
    for file in _artifact_files(folders.artifact_folder):
        digest = f"{file.parent.name}{file.name.removesuffix('.type')}"
        if digest not in refs:
            files.append(file)
    of_outputs, whole = _find_session_orphans(folders, sessions, outputs)
    files += of_outputs
    size = sum(_size(file) for file in files) + sum(measure_folder_size(folder) for folder in whole)
    return OrphanedFiles(tuple(files), tuple(whole), size)


def _find_session_orphans(
    folders: StateFolders, sessions: Collection[str], outputs: Collection[str]
) -> tuple[list[Path], list[Path]]:
    """Return output files that nothing refers to, and folders of removed sessions."""
    files: list[Path] = []
    whole: list[Path] = []
    for part in ("output", "scratch"):
        for folder in _subfolders(folders.state / part / folders.key):
            # A folder without a row in the table belongs to a session that was removed, or never stored.
            if folder.name not in sessions and not (part == "scratch" and folder.name.startswith(_TOOL_PREFIX)):
                whole.append(folder)
            elif part == "output":
                names = ((file, file.name.removesuffix(_REMOVED_SUFFIX)) for file in _plain_files(folder))
                files += (file for file, name in names if f"{folder.name}/{name}" not in outputs)
    return files, whole


def list_tables_with_sessions(connection: sqlite3.Connection) -> Iterator[str]:
    """Yield the tables, except the log, that have rows of sessions."""
    for table in _tables(connection):
        if table not in _OTHER_TABLES and "session" in _columns(connection, table):
            yield table


def _collect_references(
    connection: sqlite3.Connection, folders: StateFolders, ending: frozenset[str], without: SqlCondition | None
) -> tuple[set[str], set[str]]:
    """Return the hashes of artifacts and the ``session/file`` of outputs that any remaining row names."""
    outputs = str(folders.session_outputs_folder)
    # The path in the form of each of the two encoders of the log.
    spellings = {json.dumps(outputs, ensure_ascii=ascii_only)[1:-1].encode() for ascii_only in (True, False)}
    output = re.compile(b"(?:" + b"|".join(map(re.escape, sorted(spellings))) + rb")/([\w-]+/[\w.-]+)")
    refs: set[str] = set()
    named: set[str] = set()

    def look(value: object) -> None:
        raw = value if isinstance(value, bytes) else value.encode("utf-8", "replace") if isinstance(value, str) else b""
        refs.update(match.decode() for match in _REF_PATTERN.findall(raw))
        named.update(match.decode() for match in output.findall(raw))

    where, values = ("body IS NOT NULL", list[str | int]()) if without is None else (f"NOT ({without[0]})", without[1])
    for (body,) in connection.execute(f"SELECT body FROM record WHERE body IS NOT NULL AND {where}", values):  # noqa: S608
        look(body)
    for table in _tables(connection):
        columns = _columns(connection, table)
        if table in _OTHER_TABLES or not columns:
            continue
        owner = columns.index("session") if "session" in columns else None
        for row in connection.execute(f'SELECT * FROM "{table}"'):  # noqa: S608
            if owner is None or row[owner] not in ending:
                for value in row:
                    look(value)
    return refs, named


def _tables(connection: sqlite3.Connection) -> list[str]:
    rows = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")
    # The names are put into SQL between quotes, so a name with a quote is not used.
    return [str(row[0]) for row in rows.fetchall() if '"' not in row[0]]


def _columns(connection: sqlite3.Connection, table: str) -> list[str]:
    return [str(row[1]) for row in connection.execute(f'PRAGMA table_info("{table}")')]


def _artifact_files(folder: Path) -> Iterator[Path]:
    for inner in _subfolders(folder):
        if len(inner.name) == 2 and _HEX_PATTERN.fullmatch(inner.name):
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


_PERMANENT_KINDS = ("redacted", "records-dropped")
"""Records that document the fate of other records. They contain only numbers and reasons."""
_MAX_BATCH_RECORDS = 20_000
_MAX_BATCH_BYTES = 64 * 1024 * 1024
"""The limit of one transaction, which must fit into the write-ahead log: users also purge when the disk is full."""

_BODY_SQL = f"CAST(substr(body, {SALT_BYTES + 1}) AS TEXT)"
_COUNT_SQL = "(length(kinds) - length(replace(kinds, ' ', '')) + 1)"
"""The number of records in an entry."""
_NEWEST_WHOLE_SQL = (
    "SELECT max(sequence) FROM record WHERE kinds = 'generation' AND at_ns < ? "  # noqa: S608
    f"AND CASE WHEN json_valid({_BODY_SQL}) THEN json_extract({_BODY_SQL}, '$[0].after') IS NULL END"
)


class PurgeSelection(Struct, frozen=True):
    """The records to purge: those before a time (wall clock, nanoseconds), those of a session, or both."""

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
    def sql_condition(self) -> tuple[str, list[str | int]]:
        """The SQL condition on a record, with its values."""
        wheres, values = ["body IS NOT NULL", f"kinds NOT IN {_PERMANENT_KINDS}"], list[str | int]()
        if self.session_id is not None:
            wheres.append("session = ?")
            values.append(self.session_id)
        if self.before_ns is not None:
            wheres.append("at_ns < ?")
            values.append(self.before_ns)
            # Later calls may refer to the newest complete generation, and to the later records that only list changes to it.
            wheres.append(f"(kinds <> 'generation' OR sequence < ifnull(({_NEWEST_WHOLE_SQL}), 0))")
            values.append(self.before_ns)
        return " AND ".join(wheres), values


class PurgePlan(Struct, frozen=True):
    """The data that a purge would remove.

    :param records: the number of bodies, ``bytes`` in total
    :param calls: the number of calls that these records belong to
    :param sessions: the ids of sessions that are removed completely, with their tools' state and their folders
    :param orphans: artifacts, output files and folders that nothing else refers to
    :param kept_changes: the number of changes in the workspace that could be undone until then
    :param facts: the number of facts that its sessions stored, and that no person confirmed or a later one replaced
    """

    records: int
    bytes: int
    calls: int
    oldest_ns: int | None
    newest_ns: int | None
    sessions: tuple[str, ...]
    orphans: OrphanedFiles
    kept_changes: int = 0
    facts: int = 0

    @property
    def is_empty(self) -> bool:
        return not (self.records or self.sessions or self.orphans.paths or self.kept_changes or self.facts)


class PurgeResult(Struct, frozen=True):
    """The result of a purge: the removed data, and the problems."""

    records: int
    sessions: int
    files: int
    problems: tuple[str, ...] = ()
    kept_changes: int = 0
    facts: int = 0


def plan_purge(reader: LogReader, folders: StateFolders, selection: PurgeSelection) -> PurgePlan:
    """Return the data that a purge would remove, without changing anything.

    :raises sqlite3.Error: if the log is damaged
    """
    connection = reader.connection
    where, values = selection.sql_condition
    records, size, calls, oldest, newest = connection.execute(
        f"SELECT total({_COUNT_SQL}), total(length(body)), count(DISTINCT nullif(call, '')), min(at_ns), max(at_ns) "  # noqa: S608
        f"FROM record WHERE {where}",
        values,
    ).fetchone()
    sessions = tuple(_removed_sessions(connection, selection))
    left_over = find_orphaned_files(connection, folders, sessions, (where, values))
    kept = UndoStore(folders.undo_folder)
    try:
        changes = kept.count_purgeable_operations(selection.before_ns, selection.session_id)
    except OSError:
        changes = 0
    finally:
        kept.close()
    with closing(KnowledgeStore(folders.state)) as knowledge:
        try:
            facts = knowledge.count_purgeable_entries(
                str(folders.workspace), before_ns=selection.before_ns, session=selection.session_id
            )
        except KnowledgeUnavailable:
            facts = 0
    return PurgePlan(int(records), int(size), calls, oldest, newest, sessions, left_over, changes, facts)


async def purge_records(
    log: CommitLog, database: WorkspaceDatabase, folders: StateFolders, selection: PurgeSelection, *, reason: str
) -> PurgeResult:
    """Remove the data that :func:`plan_purge` finds. The caller must hold the lease, and no call may run.

    If it is interrupted, it has removed and recorded a part. Run it again to remove the rest.

    :param reason: recorded with each redaction
    :raises LogUnavailable: if the removal cannot be made durable
    """
    await log.flush()
    connection = log.reader.connection
    sessions = tuple(_removed_sessions(connection, selection))
    removed = 0
    # The batches are computed first, because the removal changes the rows that the query reads.
    for sequences in list(_batches(connection, selection)):
        await log.redact_record_bodies(sequences, reason=reason, session_id=selection.session_id or "")
        removed += len(sequences)
    forgetting = _SessionRemover(selection)
    database.attach_table(forgetting)
    # Files come after the rows: a crash in between leaves files without a reference, which the next purge finds.
    await database.write_durably(forgetting, sessions)
    found = await asyncio.to_thread(find_orphaned_files, connection, folders, sessions)
    problems = await asyncio.to_thread(found.remove)
    files = len(found.paths) - len(problems)
    kept, changes = UndoStore(folders.undo_folder), 0
    try:
        changes = await asyncio.to_thread(kept.purge, selection.before_ns, selection.session_id)
    except OSError as error:
        problems.append(f"{folders.undo_folder}: {error.strerror or error}")
    finally:
        kept.close()
    facts = await asyncio.to_thread(_purge_facts, folders, selection, problems)
    return PurgeResult(removed, len(sessions), files, tuple(problems), changes, facts)


def _purge_facts(folders: StateFolders, selection: PurgeSelection, problems: list[str]) -> int:
    with closing(KnowledgeStore(folders.state)) as knowledge:
        try:
            return knowledge.purge(str(folders.workspace), before_ns=selection.before_ns, session=selection.session_id)
        except KnowledgeUnavailable as error:
            problems.append(str(error))
            return 0


def _removed_sessions(connection: sqlite3.Connection, selection: PurgeSelection) -> Iterator[str]:
    """Yield the sessions that are removed completely."""
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


def _batches(connection: sqlite3.Connection, selection: PurgeSelection) -> Iterator[list[int]]:
    where, values = selection.sql_condition
    batch: list[int] = []
    size = 0
    sql = f"SELECT sequence, {_COUNT_SQL}, length(body) FROM record WHERE {where} ORDER BY sequence"  # noqa: S608
    rows = connection.execute(sql, values)
    for sequence, count, length in rows:
        batch += range(sequence, sequence + count)
        size += length
        if len(batch) >= _MAX_BATCH_RECORDS or size >= _MAX_BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _SessionRemover:
    """A database participant that deletes the rows of sessions.

    It deletes from every table with a column ``session``. For sessions that remain, it deletes answered approval requests.
    """

    def __init__(self, selection: PurgeSelection) -> None:
        self._before_ns = None if selection.session_id is not None else selection.before_ns
        self._tables: tuple[str, ...] = ()

    def load(self, connection: sqlite3.Connection) -> None:
        self._tables = tuple(list_tables_with_sessions(connection))

    def build_statements(self, batch: Sequence[Sequence[str]]) -> Iterable[Statement]:
        for session in (one for sessions in batch for one in sessions):
            for table in self._tables:
                yield f'DELETE FROM "{table}" WHERE session = ?', (session,)  # noqa: S608
            yield "DELETE FROM session WHERE id = ?", (session,)
        if self._before_ns is not None and "approval" in self._tables:
            yield "DELETE FROM approval WHERE answered = 1 AND created_ns < ?", (self._before_ns,)
        yield "PRAGMA wal_checkpoint(TRUNCATE)", ()
