"""The kept versions of workspace files, and what each call changed: the memory of ``handrail undo``.

Everything is in one private folder of the workspace's state: a database with the changes and the content of small files, and
one file for each large content. Content is stored once by its hash. Nothing is synced: after a crash of the machine an undo may
be missing, but never wrong, because each content is compared with its hash before it is used.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
import sys
import threading
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from handrail.contract.struct import Struct
from handrail.store.database.sqlite_connection import restore_shared_memory
from handrail.store.state_folders import remove_tree

PathKind = Literal["absent", "file", "link", "folder", "other"]
OperationKind = Literal["tool", "program", "undo"]

INLINE_BYTES = 256 * 1024
"""Content up to this size is a row of the database; larger content is a file, which can share blocks with the original."""
_VERSION = 1
_SCHEMA = """
CREATE TABLE content(sha BLOB PRIMARY KEY, size INTEGER NOT NULL, data BLOB) WITHOUT ROWID;
CREATE TABLE known(folder BLOB, name BLOB, ctime_ns INTEGER, inode INTEGER, size INTEGER, mtime_ns INTEGER, mode INTEGER,
    sha BLOB, settled INTEGER, PRIMARY KEY(folder, name)) WITHOUT ROWID;
CREATE TABLE operation(id INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL, name TEXT NOT NULL, session TEXT NOT NULL,
    tool TEXT NOT NULL, started_ns INTEGER NOT NULL, ended_ns INTEGER NOT NULL, problem TEXT NOT NULL);
CREATE TABLE caller(call TEXT NOT NULL, operation INTEGER NOT NULL, PRIMARY KEY(call, operation)) WITHOUT ROWID;
CREATE TABLE undone(operation INTEGER PRIMARY KEY, undo TEXT NOT NULL);
CREATE TABLE overlap(operation INTEGER NOT NULL, call TEXT NOT NULL, PRIMARY KEY(operation, call)) WITHOUT ROWID;
CREATE TABLE change(operation INTEGER NOT NULL, path BLOB NOT NULL, shared INTEGER NOT NULL,
    before_kind TEXT NOT NULL, before_mode INTEGER, before_sha BLOB, before_target BLOB, before_identity TEXT,
    after_kind TEXT NOT NULL, after_mode INTEGER, after_sha BLOB, after_target BLOB, after_identity TEXT,
    PRIMARY KEY(operation, path)) WITHOUT ROWID;
CREATE TABLE open_run(callers TEXT PRIMARY KEY, tool TEXT NOT NULL, started_ns INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX change_path ON change(path);
"""
_UNUSED_SQL = (
    "sha NOT IN (SELECT sha FROM known WHERE sha IS NOT NULL) "
    "AND sha NOT IN (SELECT before_sha FROM change WHERE before_sha IS NOT NULL) "
    "AND sha NOT IN (SELECT after_sha FROM change WHERE after_sha IS NOT NULL)"
)


class PathState(NamedTuple):
    """What is at a path.

    :param mode: the permission bits of a file or folder
    :param sha: the hash of a file's content; None if the content was not kept
    :param target: the target of a link
    :param identity: inode, size and times of a file, to compare one whose content was not kept
    """

    kind: PathKind
    mode: int | None = None
    sha: bytes | None = None
    target: bytes | None = None
    identity: str | None = None

    def is_same(self, other: PathState) -> bool:
        """Return whether both are the same, as far as an undo could restore it."""
        if self.kind != other.kind or self.mode != other.mode or self.target != other.target:
            return False
        if self.kind in ("absent", "folder", "link"):
            return True
        if self.sha is not None and other.sha is not None:
            return self.sha == other.sha
        return self.identity is not None and self.identity == other.identity


ABSENT = PathState("absent")


class StoredFileState(NamedTuple):
    """A file as it was when its content was kept.

    :param mode: the whole mode, with the type of the file
    :param sha: None if the content was not kept
    :param settled: whether a later write certainly changes ``ctime_ns``
    """

    ctime_ns: int
    inode: int
    size: int
    mtime_ns: int
    mode: int
    sha: bytes | None
    settled: bool


class PathChange(Struct, frozen=True):
    """The change of one path.

    :param is_shared: whether another call that ran at the same time may have made it
    """

    path: bytes
    before: PathState
    after: PathState
    is_shared: bool = False


class UndoableOperation(Struct, frozen=True):
    """The changes of one program run, of one write of a file tool, or of an undo.

    :param name: the id of the call, or of the undo
    :param callers: all ids by which it can be undone: its call, its job, and the calls above it
    :param overlaps: the calls and jobs that may have changed files at the same time
    :param problem: why its changes are not known completely; empty if they are
    """

    id: int
    kind: OperationKind
    name: str
    session: str
    tool: str
    started_ns: int
    ended_ns: int
    callers: tuple[str, ...] = ()
    overlaps: tuple[str, ...] = ()
    problem: str = ""


class UndoStore:
    """The kept content and the changes of one workspace. Thread-safe.

    :param folder: a folder that only the kernel uses, created when it is first needed
    :param max_bytes: the limit of all kept content. Beyond it, the oldest operations are forgotten
    """

    def __init__(self, folder: Path, max_bytes: int = sys.maxsize) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        self.lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._total = 0
        self._stored: set[bytes] = set()
        self.in_use: set[bytes] = set()
        """Content that no operation or known file names yet, so that it is not removed to make room."""

    @property
    def exists(self) -> bool:
        """Whether anything was ever kept."""
        return self._connection is not None or (self.folder / "undo.db").exists()

    def connect(self) -> sqlite3.Connection:
        """Open the database, or create it again if it is damaged.

        :raises OSError: if that fails
        """
        with self.lock:
            if self._connection is None:
                try:
                    self._connection = self._open()
                except sqlite3.OperationalError as error:  # it is in use, or the disk is full
                    raise OSError(5, str(error), str(self.folder)) from error
                except sqlite3.Error:
                    remove_tree(self.folder)  # only an undo is lost, and a damaged file would end every program
                    try:
                        self._connection = self._open()
                    except sqlite3.Error as error:
                        raise OSError(5, str(error), str(self.folder)) from error
            if not self._connection.in_transaction:
                restore_shared_memory(self.folder / "undo.db")
            return self._connection

    def _open(self) -> sqlite3.Connection:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self.folder / "large").mkdir(mode=0o700, exist_ok=True)
        file = self.folder / "undo.db"
        os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        connection = sqlite3.connect(file, check_same_thread=False, isolation_level=None)
        try:
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if version != _VERSION:
                if version or connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                    raise sqlite3.DatabaseError("another version wrote it")
                connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
                connection.execute("PRAGMA journal_mode = WAL")
                connection.executescript(f"BEGIN;{_SCHEMA}PRAGMA user_version = {_VERSION};COMMIT;")
            connection.execute("PRAGMA synchronous = OFF")
            connection.execute("PRAGMA secure_delete = ON")
            self._stored = {sha for (sha,) in connection.execute("SELECT sha FROM content")}
            self._total = int(connection.execute("SELECT total(size) FROM content").fetchone()[0])
        except BaseException:
            connection.close()
            raise
        return connection

    def close(self) -> None:
        with self.lock:
            if self._connection is not None:
                restore_shared_memory(self.folder / "undo.db")
                with contextlib.suppress(sqlite3.Error):
                    self._connection.close()
                self._connection = None

    @contextlib.contextmanager
    def transaction(self) -> Generator[sqlite3.Connection]:
        """Write in one transaction.

        :raises OSError: if the database cannot be written
        """
        with self.lock:
            connection = self.connect()
            try:
                if connection.in_transaction:
                    yield connection
                    return
                connection.execute("BEGIN IMMEDIATE")
                try:
                    yield connection
                    connection.execute("COMMIT")
                except BaseException:
                    if connection.in_transaction:
                        connection.execute("ROLLBACK")
                    self._recount()
                    raise
            except sqlite3.Error as error:
                raise OSError(5, str(error), str(self.folder)) from error

    @contextlib.contextmanager
    def _reading(self) -> Generator[sqlite3.Connection]:
        """Read.

        :raises OSError: if the database cannot be read
        """
        with self.lock:
            try:
                yield self.connect()
            except sqlite3.Error as error:
                raise OSError(5, str(error), str(self.folder)) from error

    def _recount(self) -> None:
        assert self._connection is not None
        with contextlib.suppress(sqlite3.Error):
            self._stored = {sha for (sha,) in self._connection.execute("SELECT sha FROM content")}
            self._total = int(self._connection.execute("SELECT total(size) FROM content").fetchone()[0])

    # ── content ──────────────────────────────────────────────────────────────────────────────────

    def has_content(self, sha: bytes) -> bool:
        """Return whether the content with a hash is kept."""
        return sha in self._stored

    def put_bytes(self, data: bytes) -> bytes | None:
        """Keep ``data`` and return its hash; None if there is no room. Call it within a transaction."""
        sha = hashlib.sha256(data).digest()
        self.in_use.add(sha)
        if sha in self._stored:
            return sha
        if not self.make_room(len(data)):
            return None
        if len(data) > INLINE_BYTES:
            self.locate_large_content(sha).write_bytes(data)
            stored: bytes | None = None
        else:
            stored = data
        self.add_content_row(sha, len(data), stored)
        return sha

    def add_content_row(self, sha: bytes, size: int, data: bytes | None) -> None:
        """Add a row for content; without ``data``, it is in :meth:`locate_large_content` already."""
        self.connect().execute("INSERT OR REPLACE INTO content VALUES(?, ?, ?)", (sha, size, data))
        self._stored.add(sha)
        self._total += size

    def locate_large_content(self, sha: bytes) -> Path:
        return self.folder / "large" / sha.hex()

    def read_small_content(self, sha: bytes) -> bytes | None:
        """Return small content; None if it is large, missing or damaged."""
        with self._reading() as connection:
            row = connection.execute("SELECT data FROM content WHERE sha = ?", (sha,)).fetchone()
        if row is None or row[0] is None or hashlib.sha256(row[0]).digest() != sha:
            return None
        return bytes(row[0])

    def make_room(self, size: int) -> bool:
        """Make room for ``size`` bytes by forgetting the oldest operations, and return whether there is room."""
        if self._total + size <= self.max_bytes:
            return True
        if size > self.max_bytes:
            return False
        self._remove_unused()
        connection = self.connect()
        while self._total + size > self.max_bytes:
            oldest = [row[0] for row in connection.execute("SELECT id FROM operation ORDER BY id LIMIT 20")]
            if not oldest:
                return False
            self._forget(oldest)
            self._remove_unused()
        return True

    def _remove_unused(self) -> None:
        connection = self.connect()
        unused = connection.execute(f"SELECT sha, size, data IS NULL FROM content WHERE {_UNUSED_SQL}").fetchall()  # noqa: S608
        for sha, size, is_large in unused:
            if sha in self.in_use:
                continue
            connection.execute("DELETE FROM content WHERE sha = ?", (sha,))
            self._stored.discard(sha)
            self._total -= size
            if is_large:
                with contextlib.suppress(OSError):
                    self.locate_large_content(sha).unlink()

    # ── the known state of the workspace ─────────────────────────────────────────────────────────

    def load_known_files(self) -> dict[str, dict[str, StoredFileState]]:
        """Return the files whose content is known, by folder and name."""
        found: dict[str, dict[str, StoredFileState]] = {}
        with self._reading() as connection:
            for folder, name, *values, settled in connection.execute("SELECT * FROM known"):
                kept = StoredFileState._make((*values, bool(settled)))
                found.setdefault(os.fsdecode(folder), {})[os.fsdecode(name)] = kept
        return found

    def save_known_files(self, changed: Mapping[tuple[str, str], StoredFileState | None]) -> None:
        """Store the known files that changed; None for one that is gone. Call it within a transaction."""
        connection = self.connect()
        rows = [(os.fsencode(at), os.fsencode(name), *kept) for (at, name), kept in changed.items() if kept is not None]
        gone = [(os.fsencode(at), os.fsencode(name)) for (at, name), kept in changed.items() if kept is None]
        connection.executemany("INSERT OR REPLACE INTO known VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
        connection.executemany("DELETE FROM known WHERE folder = ? AND name = ?", gone)

    # ── programs that run ────────────────────────────────────────────────────────────────────────

    def add_open_run(self, callers: Sequence[str], tool: str, started_ns: int) -> None:
        """Remember that a program runs, in case this process ends before it.

        :raises OSError: if that cannot be written
        """
        with self.transaction() as connection:
            connection.execute("INSERT OR REPLACE INTO open_run VALUES(?, ?, ?)", (" ".join(callers), tool, started_ns))

    def remove_open_run(self, callers: Sequence[str]) -> None:
        """Forget a program that has ended. Call it within a transaction."""
        self.connect().execute("DELETE FROM open_run WHERE callers = ?", (" ".join(callers),))

    def list_interrupted_runs(self) -> list[tuple[tuple[str, ...], str, int]]:
        """Return the callers, the tool and the start of the programs that a former process left."""
        with self._reading() as connection:
            rows = connection.execute("SELECT * FROM open_run ORDER BY started_ns").fetchall()
        return [(tuple(callers.split(" ")), tool, started_ns) for callers, tool, started_ns in rows]

    # ── operations ───────────────────────────────────────────────────────────────────────────────

    def add_operation(self, operation: UndoableOperation, changes: Iterable[PathChange]) -> int:
        """Store an operation with its changes, and return its id. Call it within a transaction."""
        connection = self.connect()
        row = connection.execute(
            "INSERT INTO operation(kind, name, session, tool, started_ns, ended_ns, problem) VALUES(?, ?, ?, ?, ?, ?, ?)",
            (
                operation.kind,
                operation.name,
                operation.session,
                operation.tool,
                operation.started_ns,
                operation.ended_ns,
                operation.problem,
            ),
        )
        number = row.lastrowid
        assert number is not None
        names = [(call, number) for call in dict.fromkeys((operation.name, *operation.callers))]
        connection.executemany("INSERT INTO caller VALUES(?, ?)", names)
        connection.executemany("INSERT INTO overlap VALUES(?, ?)", [(number, call) for call in operation.overlaps])
        self.add_changes(number, changes)
        return number

    def add_changes(self, operation: int, changes: Iterable[PathChange]) -> None:
        """Add changes to a stored operation. Call it within a transaction."""
        rows = [(operation, one.path, one.is_shared, *one.before, *one.after) for one in changes]
        self.connect().executemany("INSERT OR REPLACE INTO change VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)

    def remove_changes(self, operation: int, paths: Iterable[bytes]) -> None:
        """Remove changes that did not happen."""
        with self.transaction() as connection:
            rows = [(operation, path) for path in paths]
            connection.executemany("DELETE FROM change WHERE operation = ? AND path = ?", rows)

    def mark_undone(self, operations: Iterable[UndoableOperation], undo: str) -> None:
        """Remember that an undo gave back all that these operations changed; those that it undid are in place again."""
        with self.transaction() as connection:
            for one in operations:
                if one.kind == "undo":
                    connection.execute("DELETE FROM undone WHERE undo = ?", (one.name,))
                else:
                    connection.execute("INSERT OR REPLACE INTO undone VALUES(?, ?)", (one.id, undo))

    def list_undone_operation_ids(self) -> frozenset[int]:
        with self._reading() as connection:
            return frozenset(row[0] for row in connection.execute("SELECT operation FROM undone"))

    def remove_operation(self, operation: int) -> None:
        """Remove an operation that did not happen."""
        with self.transaction():
            self._forget([operation])

    def find_operations(
        self, *, call: str | None = None, session: str | None = None, ended_after_ns: int | None = None
    ) -> list[UndoableOperation]:
        """Return the operations of a call or session, or those since a time; without any, all. The oldest first."""
        sql, values = "SELECT * FROM operation", list[str | int]()
        if call is not None:
            sql += " WHERE id IN (SELECT operation FROM caller WHERE call = ?)"
            values.append(call)
        elif session is not None:
            sql += " WHERE session = ?"
            values.append(session)
        elif ended_after_ns is not None:
            sql += " WHERE ended_ns > ?"
            values.append(ended_after_ns)
        with self._reading() as connection:
            rows = connection.execute(f"{sql} ORDER BY id", values).fetchall()
            return [self._complete(row) for row in rows]

    def _complete(self, row: Sequence[Any]) -> UndoableOperation:
        connection = self.connect()
        number = row[0]
        callers = connection.execute("SELECT call FROM caller WHERE operation = ?", (number,)).fetchall()
        overlaps = connection.execute("SELECT call FROM overlap WHERE operation = ?", (number,)).fetchall()
        kind, name, session, tool, started_ns, ended_ns, problem = row[1:]
        made_by, beside = (tuple(one[0] for one in found) for found in (callers, overlaps))
        return UndoableOperation(row[0], kind, name, session, tool, started_ns, ended_ns, made_by, beside, problem)

    def list_changes(self, operation: int) -> list[PathChange]:
        """Return the changes of an operation, by path."""
        with self._reading() as connection:
            rows = connection.execute("SELECT * FROM change WHERE operation = ? ORDER BY path", (operation,))
            return [PathChange(row[1], PathState(*row[3:8]), PathState(*row[8:13]), bool(row[2])) for row in rows]

    def was_written_by_call(self, path: bytes, sha: bytes) -> bool:
        """Return whether a call left this content at a path."""
        sql = (
            "SELECT 1 FROM change JOIN operation ON operation.id = change.operation "
            "WHERE path = ? AND after_sha = ? AND kind <> 'undo' LIMIT 1"
        )
        with self._reading() as connection:
            return connection.execute(sql, (path, sha)).fetchone() is not None

    def _forget(self, operations: Collection[int]) -> None:
        connection = self.connect()
        for number in operations:
            connection.execute("DELETE FROM change WHERE operation = ?", (number,))
            connection.execute("DELETE FROM caller WHERE operation = ?", (number,))
            connection.execute("DELETE FROM overlap WHERE operation = ?", (number,))
            connection.execute("DELETE FROM undone WHERE operation = ?", (number,))
            connection.execute("DELETE FROM operation WHERE id = ?", (number,))

    def count_purgeable_operations(self, before_ns: int | None, session: str | None) -> int:
        """Return how many operations :meth:`purge` would forget, also while another process uses the store.

        :raises OSError: if that cannot be read
        """
        if not self.exists:
            return 0
        try:
            with contextlib.closing(
                sqlite3.connect(f"{(self.folder / 'undo.db').as_uri()}?mode=ro", uri=True)
            ) as connection:
                return len(self._select(connection, before_ns, session))
        except sqlite3.Error as error:
            raise OSError(5, str(error), str(self.folder)) from error

    @staticmethod
    def _select(connection: sqlite3.Connection, before_ns: int | None, session: str | None) -> list[int]:
        wheres, values = ["1"], list[str | int]()
        if before_ns is not None:
            wheres.append("ended_ns < ?")
            values.append(before_ns)
        if session is not None:
            wheres.append("session = ?")
            values.append(session)
        sql = f"SELECT id FROM operation WHERE {' AND '.join(wheres)}"  # noqa: S608 - texts of this file
        return [row[0] for row in connection.execute(sql, values)]

    def purge(self, before_ns: int | None, session: str | None) -> int:
        """Forget operations by age and session, with the content that only they had, and return their number.

        By age alone, the copies of the present files go as well: the next program keeps them again.
        """
        if not self.exists:
            return 0
        with self.transaction() as connection:
            found = self._select(connection, before_ns, session)
            self._forget(found)
            if session is None:
                connection.execute("DELETE FROM known")
            self._remove_unused()
        with self.lock, contextlib.suppress(sqlite3.Error):
            self.connect().execute("PRAGMA incremental_vacuum").fetchall()
            self.connect().execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        return len(found)
