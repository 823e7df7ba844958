"""The writing side of the workspace's SQLite database, used only by the holder of the lease."""

from __future__ import annotations

import ctypes
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from itertools import chain
from typing import Any, NamedTuple, Protocol, cast

from handrail.contract.errors import StartError
from handrail.store.database import journal
from handrail.store.database.group_writer import GroupWriter, QueuedWrite, SinkPermanentlyLost, SinkUnavailable
from handrail.store.database.journal import Journal, LogHeadFile
from handrail.store.database.sqlite_connection import (
    BUILT_IN_ENGINE,
    explain_database_error,
    make_database_start_error,
    map_to_log_unavailable,
    open_reader,
    open_writer,
    read_engine_name,
    read_fencing_token,
    read_last_written_journal_entry,
    restore_shared_memory,
    roll_back,
)
from handrail.store.json_fallback_encoding import decode_json_with_fallback, encode_json_with_fallback
from handrail.store.lease import WorkspaceLease
from handrail.store.state_folders import StateFolders

SqlValue = str | int | float | bytes | bytearray | None
Statement = tuple[str, Sequence[SqlValue]]


class SingleRowStatement(NamedTuple):
    """A statement that must change exactly one row; otherwise its whole group is not written.

    So exactly one of several takers gets an item that can be taken once.
    """

    sql: str
    values: Sequence[SqlValue]


class SingleRowMissing(Exception):
    """A :class:`SingleRowStatement` found no such row. Only its own group is not written."""


class DatabaseTable(Protocol):
    """A part of the database that turns payloads into statements, on the writer's thread."""

    def load(self, connection: sqlite3.Connection) -> None:
        """Load the state that is kept in memory, at the start and after every failure.

        :raises SinkUnavailable: if the present content must not be written to
        """

    def build_statements(self, batch: Sequence[Any]) -> Iterable[Statement]:
        """Return the statements that make ``batch`` durable, in order.

        ``batch`` holds payloads of :meth:`WorkspaceDatabase.write_soon` and ``commit``. A single statement that begins with a
        :meth:`fenced <WorkspaceDatabase.build_fenced_value_sql>` value is the cheapest: it needs no transaction. A ``PRAGMA`` runs after the
        transaction.
        """
        ...


TableWork = tuple[Any, ...]
"""A table and its payload, or a flat payload that begins with a number. A flat one is for the chained table."""


class JournalledTable(DatabaseTable, Protocol):
    """A table whose payloads can be noted in the journal before they are written."""

    journalled_as: str
    """The name of the table in the journal."""

    def pack(self, payload: Any) -> Any:
        """Return a payload in JSON form; None if it is not noted."""
        ...

    def unpack(self, packed: Any) -> Any:
        """Return the payload of a JSON form, in another process."""
        ...


class ChainedTable(DatabaseTable, Protocol):
    """A table of chained rows, whose last position is also stored outside the database."""

    def head(self) -> tuple[int, bytes]:
        """Return the number and the hash of the last durable row."""
        ...

    def is_head_in(self, connection: sqlite3.Connection) -> bool:
        """Return whether the database of ``connection`` contains that row with that hash."""
        ...


class _FileState(NamedTuple):
    """The identity and state of a database file. SQLite changes owners itself, so the time of change is not compared."""

    device: int
    inode: int
    size: int
    modified_ns: int = 0

    @property
    def identity(self) -> tuple[int, int]:
        return self.device, self.inode


class _FileStates(NamedTuple):
    """The states of the database files. Readers change the shared memory, so its times are not compared."""

    database: _FileState
    log: _FileState
    shared_memory: _FileState | None

    def has_same_files(self, other: _FileStates) -> bool:
        """Return whether both name the same files."""
        return self.database.identity == other.database.identity and self.log.identity == other.log.identity


class _CombinedWorks:
    """A placeholder table for works of several tables that are written in one transaction."""

    def load(self, connection: sqlite3.Connection) -> None:
        """Do nothing."""

    def build_statements(self, batch: Sequence[Any]) -> Iterable[Statement]:
        raise AssertionError("each of its works goes to that work's own table")


_TOGETHER = _CombinedWorks()
_UNBOUNDED = 2**62


class WorkspaceDatabase:
    """The writing side of a workspace's database. The holder of the lease has one.

    Every write goes through :attr:`writer`, whose thread alone uses the writing connection. Each transaction checks the fencing
    token first. Once another process has acquired the lease, nothing is written any more, including queued items.
    """

    def __init__(self, folders: StateFolders, connection: sqlite3.Connection, fence: WorkspaceLease) -> None:
        self.path = folders.database_file
        self.folders = folders
        self.token = fence.token
        self._sink = _DatabaseSink(folders, connection, fence)
        self._reading: sqlite3.Connection | None = None
        self.writer: GroupWriter[TableWork] = GroupWriter(self._sink)

    @staticmethod
    def open(folders: StateFolders, fence: WorkspaceLease) -> WorkspaceDatabase:
        """Open the database that the acquisition of the lease has created and migrated.

        :param fence: the lease, which the caller holds
        :raises StartError: if it is damaged, newer than this program, of another program or not writable
        """
        path = folders.database_file
        try:
            connection = open_writer(path)
            try:
                return WorkspaceDatabase(folders, connection, fence)
            except BaseException:
                connection.close()
                raise
        except (sqlite3.Error, OSError, TypeError) as error:
            raise make_database_start_error(path, error) from None

    def build_fenced_value_sql(self, value: str) -> str:
        """Return an SQL expression that is ``value`` while this process holds the token, and NULL afterwards.

        In a NOT NULL column it makes the whole statement fail. It is evaluated once per statement, so it is cheap.
        """
        return f"(SELECT {value}{_fence_expression(self.token)}"

    def attach_table(self, table: DatabaseTable) -> None:
        """Load a table's state before it is written to.

        :raises StartError: if its content is damaged
        """
        try:
            with closing(open_reader(self.path)) as with_reader:
                table.load(with_reader)
        except (sqlite3.Error, SinkUnavailable) as error:
            raise make_database_start_error(self.path, error) from None
        self._sink.tables.append(table)
        if hasattr(table, "head"):
            self._sink.headed = cast("ChainedTable", table)
        if hasattr(table, "journalled_as"):
            self.enable_journal_for_table(cast("JournalledTable", table))

    def enable_journal_for_table(self, table: JournalledTable) -> None:
        """Allow the journal for a table. An attached table needs no call."""
        self._sink.journalled[table.journalled_as] = table

    async def replay_orphaned_journals(self) -> None:
        """Write the notes that a former holder did not write. Call it at start, after all tables are known.

        :raises LogUnavailable: if they cannot be written
        """
        if self._sink.former:
            await self.write_works_atomically([])

    @property
    def shared_read_connection(self) -> sqlite3.Connection:
        """A shared read-only connection for short reads, which sees durable rows."""
        if self._reading is None:
            self._reading = open_reader(self.path)
        return self._reading

    def write_soon(self, table: DatabaseTable, payload: Any) -> None:
        """Write soon, without blocking (see :meth:`GroupWriter.queue_without_waiting`)."""
        self.writer.queue_without_waiting((table, payload))

    def queue_awaitable_write(self, table: DatabaseTable, payload: Any) -> QueuedWrite:
        """Write soon, or at once if the result is awaited (see :meth:`GroupWriter.queue_awaitable`)."""
        return self.writer.queue_awaitable((table, payload))

    async def write_durably(self, table: DatabaseTable, payload: Any) -> None:
        """Write now, and return when it is durable (see :meth:`GroupWriter.commit`)."""
        await self.writer.commit((table, payload))

    async def write_works_atomically(self, works: Sequence[TableWork]) -> None:
        """Write works of several tables in one transaction.

        :raises LogUnavailable: if they could not be written, or a :class:`SingleRowStatement` among them found no row
        """
        await self.writer.commit((_TOGETHER, works))

    def close(self) -> None:
        """Write what is queued, and close. Blocks, so call it in a thread."""
        reading, self._reading = self._reading, None
        if reading is not None:  # first: the last connection moves the write-ahead log into the database
            reading.close()
        self.writer.close()


class _StatementTable:
    """The table of works that are statements already. It keeps no state in memory."""

    def load(self, connection: sqlite3.Connection) -> None:
        """Do nothing."""

    def build_statements(self, batch: Sequence[Sequence[Statement]]) -> Iterable[Statement]:
        return chain.from_iterable(batch)


_STATEMENT_TABLE = _StatementTable()


def make_statement_work(*statements: Statement) -> TableWork:
    """Return the work that executes these statements."""
    return _STATEMENT_TABLE, statements


class WorkspaceTable:
    """One subject in the workspace's database: it reads rows, and its works are statements."""

    def __init__(self, database: WorkspaceDatabase) -> None:
        self._database = database

    async def commit(self, *works: TableWork) -> None:
        """Write the works in one transaction.

        :raises LogUnavailable: if they could not be written, or a row was not in the required state
        """
        if len(works) == 1:
            await self._database.write_durably(*works[0])
        else:
            await self._database.write_works_atomically(works)

    def write_soon(self, work: TableWork) -> None:
        """Write a work soon, without waiting."""
        self._database.write_soon(*work)

    async def _write(self, *statements: Statement) -> None:
        await self._database.write_durably(_STATEMENT_TABLE, statements)

    def _read_rows(
        self, sql: str, values: Sequence[SqlValue] = (), parse: Callable[[tuple[Any, ...]], Any] = tuple
    ) -> list[Any]:
        """Return the rows of a query.

        :raises LogUnavailable: if the database cannot be read, or a row is damaged
        """
        with map_to_log_unavailable(self._database.path):
            return [parse(row) for row in self._database.shared_read_connection.execute(sql, values)]


class _DatabaseSink:
    def __init__(self, folders: StateFolders, connection: sqlite3.Connection, fence: WorkspaceLease) -> None:
        self._path = folders.database_file
        self._name = str(folders.database_file)
        self._log_name, self._index_name = f"{self._name}-wal", f"{self._name}-shm"
        self._folder = folders.workspace_state_folder
        self._connection: sqlite3.Connection | None = connection
        self._fence = fence
        self._fenced = _fence_expression(fence.token)
        self._lost: str | None = None
        self.tables: list[DatabaseTable] = []
        self.headed: ChainedTable | None = None
        self.head = LogHeadFile(folders)
        self._files = self._stat_files()
        """The files that this process has open, as it left them."""
        self._judged: tuple[_FileStates | None, str | None] = None, None
        """The files as another process left them, and what is wrong with them."""
        self.journalled: dict[str, JournalledTable] = {}
        self.former = journal.list_orphaned_journals(folders.workspace_state_folder)
        """The journals of former holders that are not written yet, with their tokens."""
        self._journal: Journal | None = None
        self._marked = 0
        """The number of the latest note that the database contains."""
        self._asked = 0
        """Requests for the journal before it was created."""
        self._notes = (
            journal.IS_SUPPORTED and read_engine_name(folders.database_file) == BUILT_IN_ENGINE
        )  # another engine may encrypt its content

    def write_ahead(self, batch: Sequence[TableWork]) -> bool:
        if (connection := self._connection) is None or self.former or not self._notes:
            return False
        try:
            content = _encode_note(batch, self.headed)
        except Exception:  # a faulty item, which the write to the database isolates
            return False
        if content is None:
            return False
        try:
            if self._journal is None:
                self._asked += 1
                if self._asked == 1:  # many processes make only one such call, which is not worth a file
                    return False
                self._journal = self._new_journal(connection)
            return (
                self._journal is not None
                and self._journal.append_journal_entry(content)
                and self._explain_lost_visibility() is None
            )
        except Exception:  # the database may still be writable
            self._notes = False
            return False

    def warm_up(self) -> None:
        if self._journal is not None:
            with suppress(OSError):  # the next note reports it
                self._journal.wake_disk()

    def write(self, batch: Sequence[TableWork]) -> None:
        if (connection := self._connection) is None:
            raise (
                self._lost_lease_error()
                if self._lost
                else SinkUnavailable(f"The database {self._path} is closed. Open the kernel again.")
            )
        if any(work[0] is _TOGETHER for work in batch):
            batch = [work for item in batch for work in (item[1] if item[0] is _TOGETHER else (item,))]
        if (fault := self._explain_lost_visibility()) is not None:
            raise SinkUnavailable(fault)  # nothing was written yet; it is written when the files are back
        try:
            if self.former:
                self._write_former_notes(connection)
            statements = _build_statements(batch, self.headed)
            if self._journal is not None and self._marked < (noted := self._journal.last):
                statements = chain(statements, (_journal_position_statement(self._fence.token, noted),))
            was_erased = self._write(connection, statements)
            if (fault := self._find_fault_after(was_erased=was_erased)) is not None:
                raise SinkUnavailable(fault)
        except Exception as error:
            if (unavailable := self._roll_back_failed_write(connection, error)) is not None:
                raise unavailable from error
            raise
        if self.headed is not None:
            self.head.advance(*self.headed.head())
        if self._journal is not None:
            self._marked = self._journal.last
            self._journal.rewind_to_start()

    def _roll_back_failed_write(self, connection: sqlite3.Connection, error: Exception) -> SinkUnavailable | None:
        """Roll back a failed write. Return the error to raise unless one of the items is faulty."""
        unavailable = self._roll_back(connection, error)
        if unavailable is None and self.former:  # the former journal is faulty, not these items
            return SinkUnavailable(journal.describe_unreadable_journal(self.former[-1][1]))
        return unavailable

    def _explain_lost_visibility(self) -> str | None:
        """Return why other processes would not see what is written here; None if they would."""
        restore_shared_memory(self._path)
        found, was = self._stat_files(), self._files
        if found == was:
            return None
        if found is None or was is None or not found.has_same_files(was):
            return (
                f"The database {self._path} or its -wal file was removed, renamed or replaced while this process had it open. "
                "No call is run, since nothing can be logged. Put the files back, or restart this process."
            )
        if self._judged[0] != found:
            if (damage := self._explain_in_place_damage(found, was)) is None:
                self._files = self._stat_files()
            self._judged = found, damage
        return self._judged[1]

    def _find_fault_after(self, *, was_erased: bool) -> str | None:
        """Return the result of :meth:`_explain_lost_visibility` after a write of this process."""
        found, was = self._stat_files(), self._files
        if found is None or was is None or not found.has_same_files(was) or found.database.size < was.database.size:
            return self._explain_lost_visibility()
        if found.log.size < was.log.size and not was_erased:
            return self._explain_lost_visibility()
        self._files = found
        return None

    def _explain_in_place_damage(self, found: _FileStates, was: _FileStates) -> str | None:
        """Return what is wrong after another process changed the files in place; None if nothing is."""
        if found.database.size < was.database.size:  # not opened: SQLite removes the -wal of an empty database
            return self._changed_text(f"its size fell from {was.database.size:,} to {found.database.size:,} bytes")
        try:
            with closing(open_reader(self._path)) as connection:
                if read_fencing_token(connection) != self._fence.token:
                    return None  # another process holds the workspace, which the write reports
                (problem,) = connection.execute("PRAGMA quick_check(1)").fetchone()
                if problem == "ok" and self.headed is not None and not self.headed.is_head_in(connection):
                    problem = f"record {self.headed.head()[0]} is missing"
        except (sqlite3.Error, StartError) as error:
            problem = str(error)
        return None if problem == "ok" else self._changed_text(problem)

    def _changed_text(self, problem: str) -> str:
        return (
            f"Another process changed the database {self._path} or its -wal file while this process had it open: {problem}. "
            "No call is run, since nothing can be logged. Put the files back. If you cannot, end this process, keep a copy of "
            "the files, replace them with the newest intact copy, and run `handrail log verify`."
        )

    def _stat_files(self) -> _FileStates | None:
        # os.stat takes a fifth of the time of Path.stat.
        try:
            file, beside = os.stat(self._name), os.stat(self._log_name)  # noqa: PTH116
        except OSError:
            return None
        try:
            index = os.stat(self._index_name)  # noqa: PTH116
        except OSError:  # an engine may store it elsewhere
            index = None
        return _FileStates(
            _FileState(file.st_dev, file.st_ino, file.st_size, file.st_mtime_ns),
            _FileState(beside.st_dev, beside.st_ino, beside.st_size, beside.st_mtime_ns),
            None if index is None else _FileState(index.st_dev, index.st_ino, index.st_size),
        )

    def _write(self, connection: sqlite3.Connection, statements: Iterable[Statement]) -> bool:
        """Execute statements in one transaction, and return whether traces of removed content were erased afterwards.

        Each statement is built only when the one before is executed, which releases the interpreter's lock. So the event loop
        never waits for more than one of them.
        """
        coming = iter(statements)
        first, second = next(coming, None), next(coming, None)
        if first is None:
            return False
        fenced = self._fenced in first[0]  # it covers its whole transaction
        if second is None and fenced:
            _execute(connection, first)
            return False
        afterwards: list[Statement] = []
        connection.execute("BEGIN IMMEDIATE")
        if not fenced and read_fencing_token(connection) != self._fence.token:
            raise self._lost_lease_error()
        for statement in chain((first,) if second is None else (first, second), coming):
            if statement[0].startswith("PRAGMA"):
                afterwards.append(statement)
            else:
                _execute(connection, statement)
        connection.execute("COMMIT")
        if afterwards:
            self._erase_removed_content(connection, afterwards)
        return bool(afterwards)

    def _erase_removed_content(self, connection: sqlite3.Connection, statements: Iterable[Statement]) -> None:
        """Erase traces of removed content. Never raises, since the content is already written.

        Traces that cannot be erased now are erased at closing.
        """
        with suppress(sqlite3.Error):
            for statement in statements:
                connection.execute(*statement).fetchall()
        if self._journal is not None:
            try:
                self._journal.erase()
            except OSError:
                self._journal.close_and_delete()
                self._journal, self._notes = None, False

    def reopen(self) -> None:
        if (
            self._lost is None
            and self._connection is not None
            and (fault := self._explain_lost_visibility()) is not None
        ):
            raise SinkUnavailable(fault)  # the connection stays: the files may come back
        self._close_connection()
        if self._lost is not None:
            raise self._lost_lease_error()
        if not self._is_same_file():
            raise SinkUnavailable(
                self._explain_lost_visibility() or f"The database {self._path} was replaced. Try again."
            )
        try:
            connection = open_writer(self._path)
            self._connection = connection
            if read_fencing_token(connection) != self._fence.token:
                raise self._lost_lease_error()
            for table in self.tables:
                table.load(connection)
            # The statement checks the token, so it changes nothing if another process has the lease.
            connection.execute("UPDATE meta SET value = value WHERE key = 'token' AND value = ?", (self._fence.token,))
            self._files = self._stat_files()
        except (sqlite3.Error, OSError) as error:
            self._close_connection()
            raise SinkUnavailable(explain_database_error(self._path, error)) from error
        except StartError as error:
            self._close_connection()
            raise SinkUnavailable(str(error)) from error
        except SinkUnavailable:
            self._close_connection()
            raise

    def _is_same_file(self) -> bool:
        """Return whether the path still names the file that was open. A missing -wal is created again."""
        try:
            found = os.stat(self._name)  # noqa: PTH116 - as above
        except OSError:
            return False
        return self._files is None or self._files.database.identity == (found.st_dev, found.st_ino)

    def close(self) -> None:
        self._close_connection()
        self.head.close()
        if self._journal is not None:
            if self._marked == self._journal.last:
                self._journal.close_and_delete()
            else:
                self._journal.close()

    def _write_former_notes(self, connection: sqlite3.Connection) -> None:
        """Write the journal notes that former holders did not write to the database."""
        works: list[TableWork] = []
        try:
            for path, content in journal.iterate_unwritten_entries(
                self.former, read_last_written_journal_entry(connection)
            ):
                try:
                    for name, noted in decode_json_with_fallback(content):
                        works.append((self.journalled[name], self.journalled[name].unpack(noted)))
                except (LookupError, TypeError, ValueError) as error:
                    raise SinkUnavailable(journal.describe_unreadable_journal(path)) from error
        except StartError as error:
            raise SinkUnavailable(str(error)) from None
        self._write(
            connection,
            chain(_build_statements(works, self.headed), (_journal_position_statement(self._fence.token, 0),)),
        )
        for _, path in self.former:
            path.unlink(missing_ok=True)
        self.former = []

    def _new_journal(self, connection: sqlite3.Connection) -> Journal | None:
        """Create the journal; return None if the database is locked or another process has counted a token.

        The transaction keeps others from counting a token meanwhile: they lock the database before they look for journals, and would
        miss one that is created after that.

        :raises OSError: if it cannot be created
        """
        restore_shared_memory(self._path)
        try:
            connection.execute("BEGIN IMMEDIATE")
            try:
                ours = read_fencing_token(connection) == self._fence.token
                return Journal(self._folder, self._fence.token) if ours else None
            finally:
                roll_back(connection)
        except sqlite3.Error:  # the next write reports it
            return None

    def _roll_back(self, connection: sqlite3.Connection, error: Exception) -> SinkUnavailable | None:
        """Roll back, and return the error to raise if the database failed; None if an item is faulty."""
        try:
            roll_back(connection)
            if read_fencing_token(connection) != self._fence.token:
                self._close_connection()
                return self._lost_lease_error()
            for table in self.tables:
                table.load(connection)
        except (sqlite3.Error, SinkUnavailable) as second:
            self._close_connection()
            return SinkUnavailable(explain_database_error(self._path, second))
        if isinstance(error, SinkUnavailable):
            return error
        item_faults = (sqlite3.DataError, sqlite3.ProgrammingError, sqlite3.InterfaceError)
        if isinstance(error, (sqlite3.Error, OSError, MemoryError)) and not isinstance(error, item_faults):
            return SinkUnavailable(explain_database_error(self._path, error))
        return None

    def _lost_lease_error(self) -> SinkPermanentlyLost:
        if self._lost is None:
            self._lost = self._fence.mark_superseded()
        return SinkPermanentlyLost(self._lost)

    def _close_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            if self._judged[1] is not None and self._explain_lost_visibility() is not None:
                # The last connection moves the -wal into the database, here a file that another process has put there.
                # This connection is never closed, so it is not the last.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))
                return
            restore_shared_memory(self._path)
            with suppress(sqlite3.Error):
                connection.close()


def _build_statements(batch: Sequence[TableWork], chained: ChainedTable | None) -> Iterator[Statement]:
    """Yield the statements in order, but those of the chained table together."""
    runs: list[tuple[DatabaseTable, list[Any]]] = []
    of_chain: list[Any] = []
    work: Any
    for work in batch:
        table, payload = (cast("ChainedTable", chained), work) if type(work[0]) is int else work
        if table is chained and of_chain:
            of_chain.append(payload)
        elif runs and runs[-1][0] is table:
            runs[-1][1].append(payload)
        else:
            runs.append((table, [payload]))
            of_chain = runs[-1][1] if table is chained else of_chain
    for table, payloads in runs:
        yield from table.build_statements(payloads)


def _encode_note(batch: Sequence[TableWork], chained: ChainedTable | None) -> bytes | None:
    """Return a batch in the form of a journal note; None if a part of it cannot be noted."""
    packed: list[tuple[str, Any]] = []
    for work in batch:
        table, payload = (chained, work) if type(work[0]) is int else work
        name = getattr(table, "journalled_as", None)
        if name is None or (noted := cast("JournalledTable", table).pack(payload)) is None:
            return None
        packed.append((name, noted))
    content = encode_json_with_fallback(packed, max_bytes=_UNBOUNDED)
    return (
        content if content.lstrip(b" ").startswith(b"[") else None
    )  # else it is a substitute for an unencodable value


def _journal_position_statement(token: int, number: int) -> Statement:
    """Return the statement that stores which note of which journal the database contains."""
    sql = (
        "INSERT INTO meta (key, value) VALUES ('journalled', ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value"
    )
    return sql, (f"{token}:{number}",)


def _execute(connection: sqlite3.Connection, statement: Statement) -> None:
    cursor = connection.execute(*statement)
    if type(statement) is SingleRowStatement and cursor.rowcount != 1:
        raise SingleRowMissing


def _fence_expression(token: int) -> str:
    return f" FROM meta WHERE key = 'token' AND value = {token:d})"
