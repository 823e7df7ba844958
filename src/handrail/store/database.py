"""The workspace's SQLite database: opened by its one owner, or only to read while another owns it."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from handrail.contract.errors import StartError
from handrail.store.folders import Folders, unwritable
from handrail.store.schema import APPLICATION_ID, MIGRATIONS, VERSION
from handrail.store.writer import SinkUnavailable, Writer

Value = str | int | float | bytes | bytearray | None
Statement = tuple[str, Sequence[Value]]


class OneRow(NamedTuple):
    """A statement that is true of exactly one row, or nothing that it belongs to is written: the way in which one of
    several takers gets what can be had once."""

    sql: str
    values: Sequence[Value]


class Unmet(Exception):
    """A :class:`OneRow` found no such row. Only what was to be written with it is not."""


_CHECKPOINT_PAGES = 4000
"""The write-ahead log is folded into the database every 16 MiB, and overwritten in place from then on."""
_CACHED_STATEMENTS = 256


class Table(Protocol):
    """A room's part of the database: turns what it was given into statements, in the writer's thread."""

    def opened(self, connection: sqlite3.Connection) -> None:
        """Read anew whatever is kept in memory; called at the start and after anything went wrong.

        :raises SinkUnavailable: when what is there must not be written to
        """
        ...

    def statements(self, batch: Sequence[Any]) -> Iterable[Statement]:
        """What makes ``batch`` (payloads given to :meth:`Database.append` and ``commit``) durable, in order.

        A single statement costs the least: it needs no transaction around it. A ``PRAGMA`` is run after all others
        are durable.
        """
        ...


Work = tuple[Table, Any]


class _Together:
    """Stands where a table stands, for works of several tables that are written whole or not at all."""

    def opened(self, connection: sqlite3.Connection) -> None:
        """Keeps nothing."""

    def statements(self, batch: Sequence[Any]) -> Iterable[Statement]:
        raise AssertionError("each of its works goes to that work's own table")


_TOGETHER = _Together()


class Database:
    """The writing side. One per workspace, by the lease.

    Everything that is written goes through :attr:`writer`, whose thread alone uses the writing connection.
    """

    def __init__(self, folders: Folders, connection: sqlite3.Connection, token: int) -> None:
        self.path = folders.database
        self.token = token
        self._sink = _DatabaseSink(folders.database, connection)
        self._reading: sqlite3.Connection | None = None
        self.writer: Writer[Work] = Writer(self._sink)

    @staticmethod
    def open(folders: Folders) -> Database:
        """Open or create, bring the schema up to date, and count this acquisition (:attr:`token`).

        The caller holds the workspace's lease.

        :raises StartError: damaged, newer than this program, another program's file, not writable
        """
        path = folders.database
        _create_private(path)
        try:
            connection = _connect(path)
        except (sqlite3.Error, OSError, TypeError) as error:
            raise start_error(path, error) from None
        try:
            _migrate(connection)
            connection.execute("UPDATE meta SET value = value + 1 WHERE key = 'token'")
            (token,) = connection.execute("SELECT value FROM meta WHERE key = 'token'").fetchone()
            if not isinstance(token, int):
                raise sqlite3.DatabaseError("the fencing token is no number")
        except (sqlite3.Error, TypeError) as error:
            connection.close()
            raise start_error(path, error) from None
        except StartError:
            connection.close()
            raise
        return Database(folders, connection, token)

    def attach(self, table: Table) -> None:
        """Let a table read its state before anything is written to it.

        :raises StartError: when what it finds is damaged
        """
        try:
            with_reader = open_reader(self.path)
            try:
                table.opened(with_reader)
            finally:
                with_reader.close()
        except (sqlite3.Error, SinkUnavailable) as error:
            raise start_error(self.path, error) from None
        self._sink.tables.append(table)

    @property
    def reading(self) -> sqlite3.Connection:
        """A shared connection for short look-ups; it sees what is durable."""
        if self._reading is None:
            self._reading = open_reader(self.path)
        return self._reading

    def append(self, table: Table, payload: Any) -> None:
        """Write soon; never blocks (see :meth:`Writer.append`)."""
        self.writer.append((table, payload))

    async def commit(self, table: Table, payload: Any) -> None:
        """Write now, and return when it is durable (see :meth:`Writer.commit`)."""
        await self.writer.commit((table, payload))

    async def commit_together(self, works: Sequence[Work]) -> None:
        """Write works of several tables now, in one transaction: all of them or none.

        :raises LogUnavailable: when they could not be written, or a :class:`OneRow` among them was not true
        """
        await self.writer.commit((_TOGETHER, works))

    def close(self) -> None:
        """Write what is left and close. Blocks; call it in a thread where a loop must go on."""
        reading, self._reading = self._reading, None
        if reading is not None:  # first: whoever closes last, and may write, folds the write-ahead log in
            reading.close()
        self.writer.close()


class _DatabaseSink:
    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = connection
        self.tables: list[Table] = []

    def write(self, batch: Sequence[Work]) -> None:
        connection = self._connection
        if connection is None:
            raise SinkUnavailable(f"the database {self._path} is closed")
        if any(table is _TOGETHER for table, _ in batch):
            batch = [work for item in batch for work in (item[1] if item[0] is _TOGETHER else (item,))]
        first = batch[0][0]
        by_table: dict[Table, list[Any]] = {first: [payload for table, payload in batch if table is first]}
        if len(by_table[first]) < len(batch):
            for table, payload in batch:
                if table is not first:
                    by_table.setdefault(table, []).append(payload)
        try:
            statements = [s for table, payloads in by_table.items() for s in table.statements(payloads)]
            if len(statements) == 1:
                _execute(connection, statements[0])
            elif statements:
                afterwards = [s for s in statements if s[0].startswith("PRAGMA")]
                connection.execute("BEGIN IMMEDIATE")
                for statement in statements:
                    if statement not in afterwards:
                        _execute(connection, statement)
                connection.execute("COMMIT")
                for statement in afterwards:
                    connection.execute(*statement).fetchall()
        except Exception as error:
            unavailable = self._undo(connection, error)
            if unavailable is not None:
                raise unavailable from error
            raise

    def reopen(self) -> None:
        self._drop()
        try:
            connection = _connect(self._path)
            self._connection = connection
            for table in self.tables:
                table.opened(connection)
            connection.execute("UPDATE meta SET value = value WHERE key = 'token'")
        except (sqlite3.Error, OSError) as error:
            self._drop()
            raise SinkUnavailable(_explained(self._path, error)) from error
        except StartError as error:
            self._drop()
            raise SinkUnavailable(str(error)) from error
        except SinkUnavailable:
            self._drop()
            raise

    def close(self) -> None:
        self._drop()

    def _undo(self, connection: sqlite3.Connection, error: Exception) -> SinkUnavailable | None:
        """Roll back, and tell a failure of the store from a fault of an item."""
        try:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            for table in self.tables:
                table.opened(connection)
        except (sqlite3.Error, SinkUnavailable) as second:
            self._drop()
            return SinkUnavailable(_explained(self._path, second))
        if isinstance(error, SinkUnavailable):
            return error
        item_faults = (sqlite3.DataError, sqlite3.ProgrammingError, sqlite3.InterfaceError)
        if isinstance(error, (sqlite3.Error, OSError, MemoryError)) and not isinstance(error, item_faults):
            return SinkUnavailable(_explained(self._path, error))
        return None

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                connection.close()
            except sqlite3.Error:
                pass


def _execute(connection: sqlite3.Connection, statement: Statement) -> None:
    cursor = connection.execute(*statement)
    if type(statement) is OneRow and cursor.rowcount != 1:
        raise Unmet


def open_reader(path: Path) -> sqlite3.Connection:
    """A connection that cannot write, usable while another process holds the lease, from any thread.

    :raises StartError: when there is no database, or it is damaged or newer than this program
    """
    if not path.exists():
        raise StartError(
            f"there is no log yet at {path}: nothing was run in this workspace with this --state, or the state is elsewhere"
        )
    try:
        return _read_only(path, "mode=ro")
    except (sqlite3.Error, OSError) as error:
        # Where nothing can be written SQLite cannot make the file by which readers and a writer agree. A log that was
        # closed well needs none: it is all in the one file.
        if getattr(error, "sqlite_errorname", "") == "SQLITE_CANTOPEN" and not Path(f"{path}-wal").exists():
            try:
                return _read_only(path, "mode=ro&immutable=1")
            except (sqlite3.Error, OSError):
                pass
        raise start_error(path, error) from None


def _read_only(path: Path, how: str) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?{how}", uri=True, isolation_level=None, check_same_thread=False
    )
    # Damaged text is shown as what it is; a reader that stopped at it could not show the rest.
    connection.text_factory = _readable
    try:
        connection.execute("PRAGMA query_only = 1")
        _check_version(path, connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _readable(text: bytes) -> str:
    return text.decode("utf-8", "replace")


def start_error(path: Path, error: Exception) -> StartError:
    """A database failure at start, as what is wrong and what to do."""
    if isinstance(error, OSError):
        return unwritable(path.parent, error)
    return StartError(_explained(path, error))


def _explained(path: Path, error: Exception) -> str:
    name = str(getattr(error, "sqlite_errorname", ""))
    said = f"{error} ({name})" if name else str(error)
    if isinstance(error, SinkUnavailable):
        return str(error)
    if isinstance(error, OSError):
        return str(unwritable(path.parent, error))
    if name.startswith("SQLITE_FULL"):
        return f"the log {path} cannot be written: {said}. Free some space there; until then every call is refused"
    if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM", "SQLITE_IOERR")):
        return (
            f"the log {path} cannot be written: {said}. Make its folder writable and see that the disk is sound "
            "and not full, or choose another folder with --state DIR; without a log no call is run"
        )
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return f"the log {path} is locked by another program: {said}. Close whatever has that file open"
    return (
        f"the log {path} is damaged: {said}. Keep a copy for inspection and move it away "
        f"(mv '{path}' '{path}.damaged') to begin a new log; nothing is repaired by guessing"
    )


def _create_private(path: Path) -> None:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600))
    except OSError as error:
        raise unwritable(path.parent, error) from None


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(
        path, isolation_level=None, check_same_thread=False, cached_statements=_CACHED_STATEMENTS
    )
    try:
        _check_version(path, connection)
        (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise sqlite3.OperationalError(f"the file system offers no write-ahead log (journal mode {mode})")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
        connection.execute("PRAGMA secure_delete = ON")
    except BaseException:
        connection.close()
        raise
    return connection


def _check_version(path: Path, connection: sqlite3.Connection) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    if application != APPLICATION_ID and (version or application or _has_tables(connection)):
        raise StartError(
            f"{path} is a database of another program; move it away, or choose another folder with --state DIR"
        )
    if version > VERSION:
        row = connection.execute("SELECT value FROM meta WHERE key = 'written_by'").fetchone()
        needed = f"handrail {row[0]}" if row else "a newer handrail"
        raise StartError(
            f"the log {path} has schema {version}, this handrail reads up to {VERSION}; it needs {needed} or later: "
            "upgrade, or choose another folder with --state DIR"
        )


def _has_tables(connection: sqlite3.Connection) -> bool:
    return connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone() is not None


def _migrate(connection: sqlite3.Connection) -> None:
    """All missing steps in one transaction: a crash leaves the old shape or the new one."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version == VERSION:
        return
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        ours = installed("handrail")
    except PackageNotFoundError:
        ours = "unknown"
    connection.execute("BEGIN IMMEDIATE")
    try:
        for step in MIGRATIONS[version:]:
            for statement in step:
                connection.execute(statement)
        connection.execute("INSERT OR REPLACE INTO meta (key, value) VALUES ('written_by', ?)", (ours,))
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
