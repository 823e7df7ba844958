"""The writing side of the workspace's SQLite database, used only by the holder of the lease."""

from __future__ import annotations

import ctypes
import os
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol, cast

from handrail.contract.errors import StartError
from handrail.store.database import journal
from handrail.store.database.connection import (
    OWN,
    abandon,
    connect,
    explained,
    journalled,
    name_of,
    open_reader,
    start_error,
    token_of,
)
from handrail.store.database.journal import HeadFile, Journal
from handrail.store.database.writer import SinkLost, SinkUnavailable, Taken, Writer
from handrail.store.encoding import decode, encode
from handrail.store.folders import Folders
from handrail.store.lease import Lease

Value = str | int | float | bytes | bytearray | None
Statement = tuple[str, Sequence[Value]]


class OneRow(NamedTuple):
    """A statement that is true of exactly one row, or nothing that it belongs to is written: the way in which one of
    several takers gets what can be had once."""

    sql: str
    values: Sequence[Value]


class Unmet(Exception):
    """A :class:`OneRow` found no such row. Only what was to be written with it is not."""


class Table(Protocol):
    """A room's part of the database: turns what it was given into statements, in the writer's thread."""

    def opened(self, connection: sqlite3.Connection) -> None:
        """Read anew whatever is kept in memory; called at the start and after anything went wrong.

        :raises SinkUnavailable: when what is there must not be written to
        """
        ...

    def statements(self, batch: Sequence[Any]) -> Iterable[Statement]:
        """What makes ``batch`` (payloads given to :meth:`Database.append` and ``commit``) durable, in order.

        A single statement that begins with a value which is :meth:`fenced <Database.fenced>` costs the least: it
        needs no transaction around it. A ``PRAGMA`` is run after all others are durable.
        """
        ...


Work = tuple[Table, Any]


class Journalled(Table, Protocol):
    """A table whose payloads can be noted in the journal before they are written."""

    journalled_as: str
    """What the table is called there."""

    def packed(self, payload: Any) -> Any:
        """A payload as JSON-able, or None for one that is not noted."""
        ...

    def unpacked(self, packed: Any) -> Any:
        """The payload again, in another process."""
        ...


class Headed(Protocol):
    """A table whose rows are chained: how far they were written is kept apart from the database."""

    def head(self) -> tuple[int, bytes]:
        """The number of the last row that is durable, and the hash that it has."""
        ...

    def head_is_in(self, connection: sqlite3.Connection) -> bool:
        """Return whether the database of ``connection`` has that row with that hash."""
        ...


class _FileState(NamedTuple):
    """A file of the database, as the file system knows it. SQLite itself changes owners, so the time of that says nothing."""

    device: int
    inode: int
    size: int
    modified_ns: int = 0

    @property
    def identity(self) -> tuple[int, int]:
        return self.device, self.inode


class _FileStates(NamedTuple):
    """The files of the database. Processes that read change the shared memory too, so its times say nothing."""

    database: _FileState
    log: _FileState
    shared_memory: _FileState | None

    def are_those_of(self, other: _FileStates) -> bool:
        """Return whether the names lead to the same files."""
        return self.database.identity == other.database.identity and self.log.identity == other.log.identity


class _Together:
    """Stands where a table stands, for works of several tables that are written whole or not at all."""

    def opened(self, connection: sqlite3.Connection) -> None:
        """Keeps nothing."""

    def statements(self, batch: Sequence[Any]) -> Iterable[Statement]:
        raise AssertionError("each of its works goes to that work's own table")


_TOGETHER = _Together()
_UNBOUNDED = 2**62


class Database:
    """The writing side. One per workspace, by the lease.

    Everything that is written goes through :attr:`writer`, whose thread alone uses the writing connection. Each
    transaction looks at the fencing token first: once another process has acquired the lease nothing is written
    any more, of what was queued neither.
    """

    def __init__(self, folders: Folders, connection: sqlite3.Connection, fence: Lease) -> None:
        self.path = folders.database
        self.folders = folders
        self.token = fence.token
        self._sink = _DatabaseSink(folders, connection, fence)
        self._reading: sqlite3.Connection | None = None
        self.writer: Writer[Work] = Writer(self._sink)

    @staticmethod
    def open(folders: Folders, fence: Lease) -> Database:
        """Open what the acquisition of the lease has made and brought up to date.

        :param fence: the lease, which the caller holds
        :raises StartError: damaged, newer than this program, another program's file, not writable
        """
        path = folders.database
        try:
            connection = connect(path)
            try:
                return Database(folders, connection, fence)
            except BaseException:
                connection.close()
                raise
        except (sqlite3.Error, OSError, TypeError) as error:
            raise start_error(path, error) from None

    def fenced(self, value: str) -> str:
        """An SQL expression that is ``value`` while the token is still ours, and NULL from then on: in a column that
        is NOT NULL it makes a statement fail as a whole. Evaluated once, it costs next to nothing."""
        return f"(SELECT {value}{_fence(self.token)}"

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
        if hasattr(table, "head"):
            self._sink.headed = cast("Headed", table)
        if hasattr(table, "journalled_as"):
            self.journal(cast("Journalled", table))

    def journal(self, table: Journalled) -> None:
        """Let what is handed over for a table be noted before it is written; a table that is attached is known already."""
        self._sink.journalled[table.journalled_as] = table

    async def catch_up(self) -> None:
        """At the start, once all tables are known: write what a former holder has noted and not come to write.

        :raises LogUnavailable: when it cannot be written
        """
        if self._sink.former:
            await self.commit_together([])

    @property
    def reading(self) -> sqlite3.Connection:
        """A shared connection for short look-ups; it sees what is durable."""
        if self._reading is None:
            self._reading = open_reader(self.path)
        return self._reading

    def append(self, table: Table, payload: Any) -> None:
        """Write soon; never blocks (see :meth:`Writer.append`)."""
        self.writer.append((table, payload))

    def take(self, table: Table, payload: Any) -> Taken:
        """Write soon, or now once that is awaited (see :meth:`Writer.take`)."""
        return self.writer.take((table, payload))

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
    def __init__(self, folders: Folders, connection: sqlite3.Connection, fence: Lease) -> None:
        self._path = folders.database
        self._name = str(folders.database)
        self._log_name, self._index_name = f"{self._name}-wal", f"{self._name}-shm"
        self._folder = folders.own
        self._connection: sqlite3.Connection | None = connection
        self._fence = fence
        self._fenced = _fence(fence.token)
        self._lost: str | None = None
        self.tables: list[Table] = []
        self.headed: Headed | None = None
        self.head = HeadFile(folders)
        self._files = self._found()
        """The files that this process has open, as it left them."""
        self._judged: tuple[_FileStates | None, str | None] = None, None
        """The files as another process left them, and what is wrong with them."""
        self.journalled: dict[str, Journalled] = {}
        self.former = journal.left_behind(folders.own)
        """The journals of former holders that are still to be written, with their tokens."""
        self._journal: Journal | None = None
        self._marked = 0
        """The number of the latest note that the database has."""
        self._asked = 0
        """Promises that were asked for before there was a journal."""
        self._notes = journal.SUPPORTED and name_of(folders.database) == OWN  # what another engine hides stays hidden

    def promise(self, batch: Sequence[Work]) -> bool:
        connection = self._connection
        if connection is None or self.former or not self._notes:
            return False
        try:
            content = _noted(batch)
        except Exception:  # of a faulty item: the database tells it from its neighbours
            return False
        if content is None:
            return False
        try:
            if self._journal is None:
                self._asked += 1
                if self._asked == 1:  # many a process makes one such call, which is not worth a file
                    return False
                self._journal = self._new_journal(connection)
            return self._journal is not None and self._journal.note(content) and self._fault() is None
        except Exception:  # the database may still take it
            self._notes = False
            return False

    def rouse(self) -> None:
        if self._journal is not None:
            with suppress(OSError):  # the next note finds out
                self._journal.rouse()

    def write(self, batch: Sequence[Work]) -> None:
        connection = self._connection
        if connection is None:
            raise self._superseded() if self._lost else SinkUnavailable(f"the database {self._path} is closed")
        if any(table is _TOGETHER for table, _ in batch):
            batch = _taken_apart(batch)
        if (fault := self._fault()) is not None:
            raise SinkUnavailable(fault)  # nothing was written: it is once the files are back
        try:
            if self.former:
                self._catch_up(connection)
            statements = _statements(batch)
            if self._journal is not None and self._marked < (noted := self._journal.last):
                statements.append(_mark(self._fence.token, noted))
            self._write(connection, statements)
            if (fault := self._fault_after(statements)) is not None:
                raise SinkUnavailable(fault)
        except Exception as error:
            if (unavailable := self._unavailable_for(connection, error)) is not None:
                raise unavailable from error
            raise
        if self.headed is not None:
            self.head.note(*self.headed.head())
        if self._journal is not None:
            self._marked = self._journal.last
            self._journal.reuse()

    def _unavailable_for(self, connection: sqlite3.Connection, error: Exception) -> SinkUnavailable | None:
        """Undo what a failed write has begun. Return what to raise where the fault is not one of its items."""
        unavailable = self._undo(connection, error)
        if unavailable is None and self.former:  # a fault of none of these items
            return SinkUnavailable(journal.unreadable(self.former[-1][1]))
        return unavailable

    def _fault(self) -> str | None:
        """Return why others who open the database by its name would not get what is written here; None where they do."""
        found, was = self._found(), self._files
        if found == was:
            return None
        if found is None or was is None or not found.are_those_of(was):
            return (
                f"the database {self._path} is not the one any more that this process has open: it, or the -wal beside it, "
                "was removed, renamed or replaced. What is written now would be in no log, so nothing is run. Put the files "
                "back where they were, or end this process and start it again"
            )
        if self._judged[0] != found:
            damage = self._damage(found, was)
            if damage is None:
                self._files = self._found()
            self._judged = found, damage
        return self._judged[1]

    def _fault_after(self, statements: Sequence[Statement]) -> str | None:
        """Return what :meth:`_fault` returns, behind a change that this process has made itself."""
        found, was = self._found(), self._files
        if found is None or was is None or not found.are_those_of(was) or found.database.size < was.database.size:
            return self._fault()
        if found.log.size < was.log.size and not any(sql.startswith("PRAGMA") for sql, _ in statements):
            return self._fault()
        self._files = found
        return None

    def _damage(self, found: _FileStates, was: _FileStates) -> str | None:
        """Return what is wrong after another process has changed the files in place; None where nothing is."""
        if (
            found.shared_memory is not None
            and was.shared_memory is not None
            and found.shared_memory.size < was.shared_memory.size
        ):
            # SQLite has it in memory: a process that reads behind the end of the file is killed. Zeros make it new.
            with suppress(OSError):
                os.truncate(self._index_name, was.shared_memory.size)
        if found.database.size < was.database.size:  # not opened: SQLite removes the -wal of an empty database
            return self._changed(f"it has {found.database.size:,} bytes, and had {was.database.size:,}")
        try:
            connection = open_reader(self._path)
            try:
                if token_of(connection) != self._fence.token:
                    return None  # another process holds the workspace: the write finds out
                (problem,) = connection.execute("PRAGMA quick_check(1)").fetchone()
                if problem == "ok" and self.headed is not None and not self.headed.head_is_in(connection):
                    problem = f"record {self.headed.head()[0]} is not in it"
            finally:
                connection.close()
        except (sqlite3.Error, StartError) as error:
            problem = str(error)
        return None if problem == "ok" else self._changed(problem)

    def _changed(self, problem: str) -> str:
        return (
            f"another process changed the database {self._path}, or the -wal beside it, while this one had it open: {problem}. "
            "What is written now would be in no log, so nothing is run. Put the files back as they were; or end this process, "
            "keep a copy of them, put the newest whole copy in their place, and run handrail log verify"
        )

    def _found(self) -> _FileStates | None:
        # By os.stat, in a fifth of the time.
        try:
            file, beside = os.stat(self._name), os.stat(self._log_name)  # noqa: PTH116
        except OSError:
            return None
        try:
            index = os.stat(self._index_name)  # noqa: PTH116
        except OSError:  # an engine may keep it elsewhere
            index = None
        return _FileStates(
            _FileState(file.st_dev, file.st_ino, file.st_size, file.st_mtime_ns),
            _FileState(beside.st_dev, beside.st_ino, beside.st_size, beside.st_mtime_ns),
            None if index is None else _FileState(index.st_dev, index.st_ino, index.st_size),
        )

    def _write(self, connection: sqlite3.Connection, statements: Sequence[Statement]) -> None:
        if len(statements) == 1 and self._fenced in statements[0][0]:
            _execute(connection, statements[0])
        elif statements:
            afterwards = [s for s in statements if s[0].startswith("PRAGMA")]
            connection.execute("BEGIN IMMEDIATE")
            # A statement that looks at the token by itself speaks for all that stand or fall with it.
            fenced = any(self._fenced in statement[0] for statement in statements)
            if not fenced and token_of(connection) != self._fence.token:
                raise self._superseded()
            for statement in statements:
                if statement not in afterwards:
                    _execute(connection, statement)
            connection.execute("COMMIT")
            if afterwards:
                self._wipe(connection, afterwards)

    def _wipe(self, connection: sqlite3.Connection, statements: Iterable[Statement]) -> None:
        """Leave no traces of what was removed. Raises nothing: all is in the database, and who was told otherwise would
        write it again. What cannot be wiped now goes with the closing."""
        with suppress(sqlite3.Error):
            for statement in statements:
                connection.execute(*statement).fetchall()
        if self._journal is not None:
            try:
                self._journal.erase()
            except OSError:
                self._journal.remove()
                self._journal, self._notes = None, False

    def reopen(self) -> None:
        if self._lost is None and self._connection is not None and (fault := self._fault()) is not None:
            raise SinkUnavailable(fault)  # the connection stays: the files may come back
        self._drop()
        if self._lost is not None:
            raise self._superseded()
        if not self._is_the_same():
            raise SinkUnavailable(self._fault() or f"the database {self._path} was replaced; try again")
        try:
            connection = connect(self._path)
            self._connection = connection
            if token_of(connection) != self._fence.token:
                raise self._superseded()
            for table in self.tables:
                table.opened(connection)
            # What no longer is ours is not touched: the statement looks at the token by itself.
            connection.execute("UPDATE meta SET value = value WHERE key = 'token' AND value = ?", (self._fence.token,))
            self._files = self._found()
        except (sqlite3.Error, OSError) as error:
            self._drop()
            raise SinkUnavailable(explained(self._path, error)) from error
        except StartError as error:
            self._drop()
            raise SinkUnavailable(str(error)) from error
        except SinkUnavailable:
            self._drop()
            raise

    def _is_the_same(self) -> bool:
        """Whether the file is there that was open; a new -wal is made where there is none."""
        try:
            found = os.stat(self._name)  # noqa: PTH116 - as above
        except OSError:
            return False
        return self._files is None or self._files.database.identity == (found.st_dev, found.st_ino)

    def close(self) -> None:
        self._drop()
        self.head.close()
        if self._journal is not None:
            if self._marked == self._journal.last:
                self._journal.remove()
            else:
                self._journal.close()

    def _catch_up(self, connection: sqlite3.Connection) -> None:
        """Write what former holders were told is durable, and did not come to write."""
        works: list[Work] = []
        try:
            for path, content in journal.outstanding(self.former, journalled(connection)):
                try:
                    for name, noted in decode(content):
                        works.append((self.journalled[name], self.journalled[name].unpacked(noted)))
                except (LookupError, TypeError, ValueError) as error:
                    raise SinkUnavailable(journal.unreadable(path)) from error
        except StartError as error:
            raise SinkUnavailable(str(error)) from None
        self._write(connection, [*_statements(works), _mark(self._fence.token, 0)])
        for _, path in self.former:
            path.unlink(missing_ok=True)
        self.former = []

    def _new_journal(self, connection: sqlite3.Connection) -> Journal | None:
        """None where the database is locked, or somebody has counted a token. Nobody can do so meanwhile: they hold the lock
        from the look for journals on, and a journal that is made behind that look would be nobody's to read.

        :raises OSError: when it cannot be made
        """
        try:
            connection.execute("BEGIN IMMEDIATE")
            try:
                ours = token_of(connection) == self._fence.token
                return Journal(self._folder, self._fence.token) if ours else None
            finally:
                abandon(connection)
        except sqlite3.Error:  # whoever writes next finds out what it is
            return None

    def _undo(self, connection: sqlite3.Connection, error: Exception) -> SinkUnavailable | None:
        """Roll back, and tell a failure of the store from a fault of an item."""
        try:
            abandon(connection)
            if token_of(connection) != self._fence.token:
                self._drop()
                return self._superseded()
            for table in self.tables:
                table.opened(connection)
        except (sqlite3.Error, SinkUnavailable) as second:
            self._drop()
            return SinkUnavailable(explained(self._path, second))
        if isinstance(error, SinkUnavailable):
            return error
        item_faults = (sqlite3.DataError, sqlite3.ProgrammingError, sqlite3.InterfaceError)
        if isinstance(error, (sqlite3.Error, OSError, MemoryError)) and not isinstance(error, item_faults):
            return SinkUnavailable(explained(self._path, error))
        return None

    def _superseded(self) -> SinkLost:
        if self._lost is None:
            self._lost = self._fence.superseded()
        return SinkLost(self._lost)

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            if self._judged[1] is not None and self._fault() is not None:
                # The last connection that closes writes the -wal into the database: into the file that another process has put there.
                # This one is never closed, so none is the last.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))
                return
            try:
                connection.close()
            except sqlite3.Error:
                pass


def _taken_apart(batch: Sequence[Work]) -> list[Work]:
    """The works of a batch, of which some were given together, each by itself."""
    return [work for item in batch for work in (item[1] if item[0] is _TOGETHER else (item,))]


def _statements(batch: Sequence[Work]) -> list[Statement]:
    """Of each table together, in order."""
    if not batch:
        return []
    first = batch[0][0]
    by_table: dict[Table, list[Any]] = {first: [payload for table, payload in batch if table is first]}
    if len(by_table[first]) < len(batch):
        for table, payload in batch:
            if table is not first:
                by_table.setdefault(table, []).append(payload)
    return [statement for table, payloads in by_table.items() for statement in table.statements(payloads)]


def _noted(batch: Sequence[Work]) -> bytes | None:
    """A batch as it is noted in the journal; None where a part of it cannot be noted as it is."""
    packed: list[tuple[str, Any]] = []
    for table, payload in batch:
        name = getattr(table, "journalled_as", None)
        if name is None or (noted := cast("Journalled", table).packed(payload)) is None:
            return None
        packed.append((name, noted))
    content = encode(packed, max_bytes=_UNBOUNDED)
    return content if content.lstrip(b" ").startswith(b"[") else None  # else something stands there in its place


def _mark(token: int, number: int) -> Statement:
    """Keeps up to which note of which journal the database has all."""
    sql = (
        "INSERT INTO meta (key, value) VALUES ('journalled', ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value"
    )
    return sql, (f"{token}:{number}",)


def _execute(connection: sqlite3.Connection, statement: Statement) -> None:
    cursor = connection.execute(*statement)
    if type(statement) is OneRow and cursor.rowcount != 1:
        raise Unmet


def _fence(token: int) -> str:
    return f" FROM meta WHERE key = 'token' AND value = {token:d})"
