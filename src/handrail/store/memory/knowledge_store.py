"""The user's knowledge: facts that agents stored, one row each, shared by all workspaces and processes of the user.

It is one SQLite file in the state folder. Each write is one transaction that only adds or marks rows, so processes that write
at the same time lose nothing. A row that another one replaced is history: no query finds it, and a person can bring it back.
"""

from __future__ import annotations

import json
import secrets
import sqlite3
import threading
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, cast

from msgspec.structs import astuple

from handrail.contract.errors import StartError
from handrail.contract.struct import Struct
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.store.database.sqlite_connection import (
    connect_engine,
    create_private_file,
    record_or_check_engine,
    restore_shared_memory,
)
from handrail.store.memory.passage_index import CREATE_INDEX, QueryTerms, RankedPassage, find_passages, parse_query
from handrail.store.state_folders import prepare_knowledge_folder

MOST_WRITES_PER_SESSION = 20
NEAR_DUPLICATE = 0.92
"""The similarity by trigrams from which on a text says the same as a stored one."""
_PATIENCE_S = 60.0
_VERSION = 1
_APPLICATION_ID = 0x48_52_4D_31
"""Marks a file as ours in SQLite's own header ("HRM1")."""
_COMPARED = 50
_SCHEMA = (
    # `untrusted` says why a person has to confirm the entry; empty for one that only follows the user's words.
    """CREATE TABLE entry (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        text TEXT NOT NULL,
        key TEXT,
        tags TEXT NOT NULL,
        created_ns INTEGER NOT NULL,
        workspace TEXT NOT NULL,
        session TEXT NOT NULL,
        call TEXT NOT NULL,
        agent TEXT NOT NULL,
        untrusted TEXT NOT NULL,
        confirmed_ns INTEGER,
        replaces TEXT,
        superseded_by TEXT,
        compaction INTEGER
    )""",
    "CREATE INDEX entry_by_key ON entry (key) WHERE key IS NOT NULL",
    "CREATE INDEX entry_by_session ON entry (session)",
    "CREATE INDEX entry_by_time ON entry (created_ns)",
    "CREATE INDEX entry_history ON entry (superseded_by) WHERE superseded_by IS NOT NULL",
    CREATE_INDEX,
    """CREATE TABLE vector (
        number INTEGER PRIMARY KEY,
        model TEXT NOT NULL,
        row BLOB NOT NULL
    )""",
    f"PRAGMA application_id = {_APPLICATION_ID}",
    f"PRAGMA user_version = {_VERSION}",
)
_COLUMNS = (
    "id, text, key, tags, created_ns, workspace, session, call, agent, untrusted, confirmed_ns, replaces, superseded_by"
)
_IS_CONFIRMED = "(untrusted = '' OR confirmed_ns IS NOT NULL)"


class KnowledgeUnavailable(Exception):
    """The file with the knowledge cannot be used now. The text says why and what to do."""


class UnknownKnowledgeEntry(Exception):
    """No current entry has this id."""


class SessionWriteLimitError(Exception):
    """The session has stored as many entries as it may."""


class KnowledgeEntry(Struct, frozen=True):
    """One stored fact. Times are wall-clock nanoseconds.

    :param key: the subject of the fact. The latest entry with a key counts
    :param workspace: the workspace of the session that stored it
    :param call: the call that stored it
    :param untrusted: why it may not be the user's; empty if only the user's words were in view
    :param confirmed_ns: when a person confirmed it
    :param replaces: the id of the entry that it replaces
    :param superseded_by: the id of the entry that replaced it; None for a current entry
    """

    id: str
    text: str
    key: str | None
    tags: tuple[str, ...]
    created_ns: int
    workspace: str
    session: str
    call: str
    agent: str
    untrusted: str = ""
    confirmed_ns: int | None = None
    replaces: str | None = None
    superseded_by: str | None = None

    @property
    def is_confirmed(self) -> bool:
        """Whether a model may rely on it without a label."""
        return not self.untrusted or self.confirmed_ns is not None


class KnowledgeWriteResult(NamedTuple):
    """The stored entry, and whether a stored one that says the same was kept instead of a new one."""

    entry: KnowledgeEntry
    is_merged: bool


class KnowledgeCompactionResult(NamedTuple):
    """The number by which a compaction can be undone, and the ids of the entries that became history."""

    number: int
    folded: tuple[str, ...]


# The similarity of texts.

_WORD = compile_regex_lazily(r"[^\W_]+(?:['’][^\W_]+)?")
_NEGATIONS = frozenset(["no", "not", "never", "none", "nothing", "without", "cannot"])


def compute_trigram_similarity(one: str, other: str) -> float:
    """Return how many trigrams two texts share, from 0 to 1 (Dice)."""
    first, second = extract_trigrams(one), extract_trigrams(other)
    return 2 * len(first & second) / (len(first) + len(second) or 1)


def extract_trigrams(text: str) -> set[str]:
    """Return the trigrams of a text, without case and repeated spaces."""
    plain = f" {' '.join(text.lower().split())} "
    return {plain[at : at + 3] for at in range(len(plain) - 2)}


def has_same_facts(one: str, other: str) -> bool:
    """Return whether two similar texts have the same numbers, negations and names in the same order.

    Texts that differ in one of these say something else, however similar they are.
    """
    return _list_facts(one, other) == _list_facts(other, one)


def _list_facts(text: str, other: str) -> list[str]:
    capitals = {word.lower() for word in [*_WORD.findall(text)[1:], *_WORD.findall(other)[1:]] if word != word.lower()}
    words = [word.lower() for word in _WORD.findall(text)]
    return [
        word
        for word in words
        if word in capitals or word in _NEGATIONS or word.endswith(("n't", "n’t")) or any(map(str.isdigit, word))
    ]


def is_near_duplicate(text: str, stored: str) -> bool:
    """Return whether a text says the same as a stored one."""
    return compute_trigram_similarity(text, stored) >= NEAR_DUPLICATE and has_same_facts(text, stored)


class KnowledgeStore:
    """The stored facts of this user. Thread-safe; any number of processes may use the file.

    :param state: the root of all state
    :param engine: the engine that creates the file; an existing file keeps its engine
    :raises KnowledgeUnavailable: by every method that reads or writes, if the file cannot be used
    """

    def __init__(self, state: Path, engine: str | None = None) -> None:
        self._state = state
        self._engine = engine
        self.path = state / "memory" / "knowledge.db"
        self._connection: sqlite3.Connection | None = None
        self._inode = 0
        self._lock = threading.RLock()

    @property
    def exists(self) -> bool:
        """Whether anything was ever stored."""
        return self._connection is not None or self.path.exists()

    @contextmanager
    def _transaction(self) -> Generator[sqlite3.Connection]:
        """Yield a connection within a transaction that excludes other writers."""
        with self._lock, self._map_database_errors():
            connection = self._connect()
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")

    @contextmanager
    def _reading(self) -> Generator[sqlite3.Connection | None]:
        """Yield a connection for reading; None if nothing was ever stored."""
        with self._lock, self._map_database_errors():
            yield self._connect() if self.exists else None

    @contextmanager
    def _map_database_errors(self) -> Generator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise KnowledgeUnavailable(
                f"The memory {self.path} cannot be used: {error}. If it is damaged, keep a copy and move it away. Continue "
                "without stored knowledge."
            ) from None
        except StartError as error:
            raise KnowledgeUnavailable(str(error)) from None

    def _connect(self) -> sqlite3.Connection:
        if self._connection is not None and _find_inode(self.path) != self._inode:
            self.close()  # a person removed the file
        if self._connection is None:
            prepare_knowledge_folder(self._state)
            if self._engine is not None and not self.path.exists():
                record_or_check_engine(self.path, self._engine)
            create_private_file(self.path)
            connection = connect_engine(
                self.path, self.path, timeout=_PATIENCE_S, isolation_level=None, check_same_thread=False
            )
            try:
                self._prepare(connection)
            except BaseException:
                connection.close()
                raise
            self._connection, self._inode = connection, _find_inode(self.path)
        restore_shared_memory(self.path)
        return self._connection

    @staticmethod
    def _prepare(connection: sqlite3.Connection) -> None:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA secure_delete = ON")
        if _read_version(connection) == (_APPLICATION_ID, _VERSION):
            return
        connection.execute("BEGIN IMMEDIATE")
        try:
            found = _read_version(connection)
            if found == (0, 0) and not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                for statement in _SCHEMA:
                    connection.execute(statement)
            elif found != (_APPLICATION_ID, _VERSION):
                raise sqlite3.DatabaseError("another program or another version of Handrail wrote it")
            connection.execute("COMMIT")
        except BaseException:
            connection.execute("ROLLBACK")
            raise

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                restore_shared_memory(self.path)
                self._connection.close()
                self._connection = None

    # Writing

    def store(self, new: KnowledgeEntry, *, limit: int = MOST_WRITES_PER_SESSION) -> KnowledgeWriteResult:
        """Store an entry, unless a current one says the same.

        An entry that a person has to confirm replaces no confirmed one until then.

        :param new: its id is replaced
        :param limit: the maximum number of entries of one session
        :raises UnknownKnowledgeEntry: if ``replaces`` names no current entry
        :raises SessionWriteLimitError: if the session has stored that many
        """
        with self._transaction() as connection:
            replaced = self._find_current(connection, new.replaces) if new.replaces is not None else None
            if (same := _find_same(connection, new.text, without=new.replaces)) is not None:
                return KnowledgeWriteResult(self._merge(connection, same, new), is_merged=True)
            (count,) = connection.execute("SELECT count(*) FROM entry WHERE session = ?", (new.session,)).fetchone()
            if count >= limit:
                raise SessionWriteLimitError
            entry = replace(new, id=f"mem_{secrets.token_hex(6)}", superseded_by=None)
            _insert(connection, entry)
            if replaced is not None and (entry.is_confirmed or not replaced.is_confirmed):
                _move_to_history(connection, [replaced.id], entry.id, None)
            return KnowledgeWriteResult(entry, is_merged=False)

    def _find_current(self, connection: sqlite3.Connection, id: str) -> KnowledgeEntry:
        found = _select(connection, "WHERE id = ? AND superseded_by IS NULL", (id,))
        if not found:
            raise UnknownKnowledgeEntry(id)
        return found[0]

    def contains(self, text: str) -> bool:
        """Return whether a current entry says the same as ``text``."""
        with self._reading() as connection:
            return connection is not None and _find_same(connection, text) is not None

    def _merge(self, connection: sqlite3.Connection, same: KnowledgeEntry, new: KnowledgeEntry) -> KnowledgeEntry:
        """Add the key and the tags of a text that says the same as an entry, unless that is confirmed and the text is not."""
        if same.is_confirmed and not new.is_confirmed:
            return same
        tags = tuple(dict.fromkeys([*same.tags, *new.tags]))
        sql = "UPDATE entry SET key = coalesce(key, ?), tags = ? WHERE id = ?"
        connection.execute(sql, (new.key, json.dumps(tags), same.id))
        (merged,) = _select(connection, "WHERE id = ?", (same.id,))
        (number,) = connection.execute("SELECT number FROM entry WHERE id = ?", (same.id,)).fetchone()
        connection.execute("DELETE FROM passage WHERE rowid = ?", (number,))
        _index(connection, number, merged)
        return merged

    def confirm(self, id: str, at_ns: int) -> KnowledgeEntry:
        """Confirm a current entry, and let it replace the one that it was stored for.

        :raises UnknownKnowledgeEntry: if there is no such entry
        """
        with self._transaction() as connection:
            entry = self._find_current(connection, id)
            connection.execute("UPDATE entry SET confirmed_ns = ? WHERE id = ?", (at_ns, id))
            if entry.replaces is not None:
                current = _select(connection, "WHERE id = ? AND superseded_by IS NULL", (entry.replaces,))
                _move_to_history(connection, [one.id for one in current], id, None)
            return self._find_current(connection, id)

    def compact(self) -> KnowledgeCompactionResult:
        """Fold entries with the same key into the latest one, as history.

        An entry that no person confirmed never folds a confirmed one.
        """
        with self._transaction() as connection:
            (last,) = connection.execute("SELECT coalesce(max(compaction), 0) FROM entry").fetchone()
            rows = connection.execute(
                f"SELECT key, id, {_IS_CONFIRMED} FROM entry WHERE key IS NOT NULL AND superseded_by IS NULL "  # noqa: S608
                "AND key IN (SELECT key FROM entry WHERE key IS NOT NULL AND superseded_by IS NULL GROUP BY key "
                "HAVING count(*) > 1) ORDER BY number DESC"
            ).fetchall()
            folded: list[str] = []
            newest: dict[tuple[str, bool], str] = {}
            for key, id, confirmed in rows:
                by = newest.get((key, True)) or (None if confirmed else newest.get((key, False)))
                if by is None:
                    newest[key, bool(confirmed)] = id
                else:
                    _move_to_history(connection, [id], by, last + 1)
                    folded.append(id)
            return KnowledgeCompactionResult(last + 1 if folded else last, tuple(folded))

    def restore(self, *, compaction: int | None = None, id: str | None = None) -> list[str]:
        """Make history current again, and return the ids: the entries of a compaction, or one entry.

        :param compaction: None for the latest one
        """
        with self._transaction() as connection:
            if id is not None:
                found = _select(connection, "WHERE id = ? AND superseded_by IS NOT NULL", (id,))
            else:
                latest = "SELECT max(compaction) FROM entry WHERE superseded_by IS NOT NULL"
                number = connection.execute(latest).fetchone()[0] if compaction is None else compaction
                found = _select(connection, "WHERE compaction = ? AND superseded_by IS NOT NULL", (number,))
            for entry in found:
                sql = "UPDATE entry SET superseded_by = NULL, compaction = NULL WHERE id = ?"
                connection.execute(sql, (entry.id,))
                (number,) = connection.execute("SELECT number FROM entry WHERE id = ?", (entry.id,)).fetchone()
                _index(connection, number, entry)
            return [entry.id for entry in found]

    def forget(self, ids: Collection[str]) -> list[str]:
        """Delete entries with all that they replaced, also from the index, and return the ids that were deleted.

        :raises KnowledgeUnavailable: if the file cannot be used, or a reader keeps the deleted text in the write-ahead log
        """
        with self._transaction() as connection:
            todo = [one for one in ids if _select(connection, "WHERE id = ?", (one,))]
            deleted: dict[str, None] = {}
            while todo:
                if (one := todo.pop()) not in deleted:
                    deleted[one] = None
                    rows = connection.execute("SELECT id FROM entry WHERE superseded_by = ?", (one,)).fetchall()
                    todo += [row[0] for row in rows]
            self._delete(connection, "id", deleted)
        if deleted:
            self._remove_traces()
        return list(deleted)

    def purge(self, workspace: str, *, before_ns: int | None = None, session: str | None = None) -> int:
        """Delete what the sessions of a workspace stored and no person confirmed, and their history.

        Entries that follow the user's words stay, without the session and call that stored them.

        :return: the number of deleted entries
        """
        if not self.exists:
            return 0
        where, values = _select_origin(workspace, before_ns, session)
        with self._transaction() as connection:
            unwanted = f"{where} AND (superseded_by IS NOT NULL OR NOT {_IS_CONFIRMED})"
            rows = connection.execute(f"SELECT id FROM entry {unwanted}", values).fetchall()  # noqa: S608
            self._delete(connection, "id", [row[0] for row in rows])
            connection.execute(f"UPDATE entry SET session = '', call = '' {where}", values)  # noqa: S608
        if rows:
            self._remove_traces()
        return len(rows)

    def count_purgeable_entries(
        self, workspace: str, *, before_ns: int | None = None, session: str | None = None
    ) -> int:
        """Return how many entries :meth:`purge` would delete."""
        where, values = _select_origin(workspace, before_ns, session)
        with self._reading() as connection:
            unwanted = f"{where} AND (superseded_by IS NOT NULL OR NOT {_IS_CONFIRMED})"
            sql = f"SELECT count(*) FROM entry {unwanted}"  # noqa: S608
            return 0 if connection is None else int(connection.execute(sql, values).fetchone()[0])

    def list_workspace_entries(self, workspace: str) -> list[KnowledgeEntry]:
        """Return what the sessions of a workspace stored, with history, the oldest first."""
        with self._reading() as connection:
            return (
                [] if connection is None else _select(connection, "WHERE workspace = ? ORDER BY number", (workspace,))
            )

    def add_missing_entries(self, entries: Iterable[KnowledgeEntry]) -> int:
        """Add entries of a backup whose ids are not there, and return how many."""
        added = 0
        with self._transaction() as connection:
            for entry in entries:
                if not _select(connection, "WHERE id = ?", (entry.id,)):
                    _insert(connection, entry)
                    added += 1
        return added

    def reassign_workspace_entries(self, old: str, new: str) -> None:
        """Record that a workspace was moved."""
        if self.exists:
            with self._transaction() as connection:
                connection.execute("UPDATE entry SET workspace = ? WHERE workspace = ?", (new, old))

    @staticmethod
    def _delete(connection: sqlite3.Connection, column: str, values: Iterable[str]) -> None:
        for value in values:
            numbers = connection.execute(f"SELECT number FROM entry WHERE {column} = ?", (value,)).fetchall()  # noqa: S608
            for (number,) in numbers:
                connection.execute("DELETE FROM passage WHERE rowid = ?", (number,))
                connection.execute("DELETE FROM vector WHERE number = ?", (number,))
                connection.execute("DELETE FROM entry WHERE number = ?", (number,))

    def _remove_traces(self) -> None:
        """Merge the index, which keeps deleted words until then, and empty the write-ahead log."""
        with self._lock, self._map_database_errors():
            connection = self._connect()
            connection.execute("INSERT INTO passage (passage) VALUES ('rebuild')")
            is_busy = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        if is_busy:
            raise KnowledgeUnavailable(
                f"The facts were deleted, but {self.path}-wal still has their text: another process is reading the memory. "
                "That file is removed when the last process that uses the memory ends. End the other processes."
            )

    # Reading

    def find(self, terms: QueryTerms, from_ns: int | None = None, to_ns: int | None = None) -> list[RankedPassage]:
        """Return the best current entries by words."""
        wheres = [f"created_ns >= {from_ns:d}"] if from_ns is not None else []
        wheres += [f"created_ns < {to_ns:d}"] if to_ns is not None else []
        among = f"rowid IN (SELECT number FROM entry WHERE {' AND '.join(wheres)})" if wheres else ""  # noqa: S608
        with self._reading() as connection:
            return [] if connection is None else find_passages(connection, terms, among, with_context=True)

    def load(self, numbers: Sequence[int]) -> dict[int, KnowledgeEntry]:
        """Return the current entries with these numbers, without those that a later one with their key replaces."""
        with self._reading() as connection:
            if connection is None:
                return {}
            found: dict[int, KnowledgeEntry] = {}
            for number in numbers:
                if entries := _select(connection, f"WHERE number = ? AND {_IS_LATEST}", (number,)):
                    found[number] = entries[0]
            return found

    def find_exact_matches(self, wanted: str) -> list[KnowledgeEntry]:
        """Return the current entries with this id, key or text, the latest first."""
        where = f"WHERE (id = ? OR key = ? OR text = ?) AND {_IS_LATEST} ORDER BY number DESC"
        with self._reading() as connection:
            return [] if connection is None else _select(connection, where, (wanted, wanted, wanted))

    def get(self, id: str) -> KnowledgeEntry | None:
        """Return an entry, also from history; None if there is none."""
        with self._reading() as connection:
            found = [] if connection is None else _select(connection, "WHERE id = ?", (id,))
        return found[0] if found else None

    def list_replaced_entries(self, id: str) -> list[KnowledgeEntry]:
        """Return the entries that an entry replaced, the latest first."""
        with self._reading() as connection:
            where = "WHERE superseded_by = ? ORDER BY number DESC"
            return [] if connection is None else _select(connection, where, (id,))

    def list_entries(
        self,
        *,
        from_ns: int | None = None,
        to_ns: int | None = None,
        limit: int = -1,
        history: bool = False,
        only_unconfirmed: bool = False,
        latest_only: bool = False,
    ) -> list[KnowledgeEntry]:
        """Return entries, the latest first.

        :param from_ns: the earliest time, in wall-clock nanoseconds
        :param to_ns: the end of the period, which is not in it
        :param limit: the maximum number; negative for all
        :param history: include entries that were replaced
        :param latest_only: leave out entries that a later one with their key replaces
        """
        wheres = ["1"] if history else ["superseded_by IS NULL"]
        wheres += [f"created_ns >= {from_ns:d}"] if from_ns is not None else []
        wheres += [f"created_ns < {to_ns:d}"] if to_ns is not None else []
        wheres += [f"NOT {_IS_CONFIRMED}"] if only_unconfirmed else []
        wheres += [_IS_LATEST] if latest_only else []
        where = f"WHERE {' AND '.join(wheres)} ORDER BY created_ns DESC, number DESC LIMIT ?"
        with self._reading() as connection:
            return [] if connection is None else _select(connection, where, (limit,))

    def count_entries(self, *, from_ns: int | None = None, to_ns: int | None = None, latest_only: bool = False) -> int:
        """Return how many current entries there are; see :meth:`list_entries`."""
        where = _IS_LATEST if latest_only else "superseded_by IS NULL"
        sql = f"SELECT count(*) FROM entry WHERE {where} AND created_ns >= ? AND created_ns < ?"  # noqa: S608
        with self._reading() as connection:
            values = (from_ns or 0, 2**62 if to_ns is None else to_ns)
            return 0 if connection is None else int(connection.execute(sql, values).fetchone()[0])

    def load_vectors(self, numbers: Sequence[int], model: str) -> dict[int, bytes]:
        """Return the stored vectors of entries, made by a model."""
        sql = "SELECT row FROM vector WHERE number = ? AND model = ?"
        with self._reading() as connection:
            if connection is None:
                return {}
            rows = {number: connection.execute(sql, (number, model)).fetchone() for number in numbers}
        return {number: row[0] for number, row in rows.items() if row is not None}

    def store_vectors(self, vectors: Mapping[int, bytes], model: str) -> None:
        """Store vectors of entries that still exist."""
        with self._transaction() as connection:
            for number, row in vectors.items():
                sql = "INSERT OR REPLACE INTO vector SELECT number, ?, ? FROM entry WHERE number = ?"
                connection.execute(sql, (model, row, number))


_IS_LATEST = (
    "superseded_by IS NULL AND NOT EXISTS (SELECT 1 FROM entry AS later WHERE later.key = entry.key "
    "AND later.number > entry.number AND later.superseded_by IS NULL AND "
    "(later.untrusted = '' OR later.confirmed_ns IS NOT NULL OR NOT (entry.untrusted = '' OR entry.confirmed_ns IS NOT NULL)))"
)


def _find_inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return 0


def _select_origin(workspace: str, before_ns: int | None, session: str | None) -> tuple[str, list[str | int]]:
    """Return the SQL condition on entries of a workspace's sessions, with its values."""
    where, values = "WHERE workspace = ? AND session <> ''", cast("list[str | int]", [workspace])
    if before_ns is not None:
        where, values = f"{where} AND created_ns < ?", [*values, before_ns]
    if session is not None:
        where, values = f"{where} AND session = ?", [*values, session]
    return where, values


def _read_version(connection: sqlite3.Connection) -> tuple[int, int]:
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return application, version


def parse_entry(data: Mapping[str, Any], workspace: str) -> KnowledgeEntry:
    """Return an entry from its JSON form, as one of a workspace.

    :raises KeyError: if a member is missing
    :raises TypeError: if a member has another type
    """
    fields: dict[str, Any] = {name: data[name] for name in KnowledgeEntry.__struct_fields__}
    texts = [fields[name] for name in ("id", "text", "session", "call", "agent", "untrusted")]
    optional = [fields[name] for name in ("key", "replaces", "superseded_by") if fields[name] is not None]
    if not all(isinstance(one, str) for one in (*texts, *optional, *fields["tags"])):
        raise TypeError("a stored fact has a value of another type")
    if type(fields["created_ns"]) is not int or type(fields["confirmed_ns"]) not in (int, type(None)):
        raise TypeError("a time is not a number")
    fields["tags"], fields["workspace"] = tuple(fields["tags"]), workspace
    return KnowledgeEntry(**fields)


def _to_row(entry: KnowledgeEntry) -> tuple[Any, ...]:
    return astuple(replace(entry, tags=json.dumps(entry.tags)))


def _select(connection: sqlite3.Connection, where: str, values: Sequence[Any]) -> list[KnowledgeEntry]:
    rows = connection.execute(f"SELECT {_COLUMNS} FROM entry {where}", values).fetchall()  # noqa: S608
    return [_read_entry(*row) for row in rows]


def _read_entry(id: str, text: str, key: str | None, tags: str, *others: Any) -> KnowledgeEntry:
    return KnowledgeEntry(id, text, key, tuple(json.loads(tags)), *others)


def _find_same(connection: sqlite3.Connection, text: str, *, without: str | None = None) -> KnowledgeEntry | None:
    """Return the current entry that says the same as ``text``."""
    for hit in find_passages(connection, parse_query(text.replace('"', " ")))[:_COMPARED]:
        (entry,) = _select(connection, "WHERE number = ?", (hit.number,))
        if entry.id != without and is_near_duplicate(text, entry.text):
            return entry
    return None


def _insert(connection: sqlite3.Connection, entry: KnowledgeEntry) -> None:
    sql = f"INSERT INTO entry ({_COLUMNS}) VALUES ({', '.join('?' * 13)})"  # noqa: S608
    number = connection.execute(sql, _to_row(entry)).lastrowid
    if entry.superseded_by is None:
        _index(connection, number, entry)


def _index(connection: sqlite3.Connection, number: int | None, entry: KnowledgeEntry) -> None:
    at = datetime.fromtimestamp(entry.created_ns / 1e9, UTC)
    context = " ".join([entry.key or "", *entry.tags, f"{at.day} {at:%B %Y}"])
    connection.execute("INSERT INTO passage (rowid, text, context) VALUES (?, ?, ?)", (number, entry.text, context))


def _move_to_history(connection: sqlite3.Connection, ids: Iterable[str], by: str, compaction: int | None) -> None:
    """Make entries history."""
    for id in ids:
        connection.execute("UPDATE entry SET superseded_by = ?, compaction = ? WHERE id = ?", (by, compaction, id))
        connection.execute("DELETE FROM passage WHERE rowid = (SELECT number FROM entry WHERE id = ?)", (id,))
