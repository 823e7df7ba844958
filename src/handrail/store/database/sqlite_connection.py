"""Connections to the workspace's SQLite database, for writing or only reading; engine choice, migration, compaction."""

from __future__ import annotations

import os
import sqlite3
import stat
import sys
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import closing, contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from handrail.contract.errors import LogUnavailable, StartError
from handrail.contract.struct import Struct
from handrail.origins.import_guard import list_trusted_entry_points
from handrail.store import operator_decisions
from handrail.store.database.group_writer import SinkUnavailable
from handrail.store.database.schema_migrations import APPLICATION_ID, MIGRATIONS, VERSION
from handrail.store.state_folders import make_unwritable_state_error

if TYPE_CHECKING:
    from importlib import metadata


# The engine that opens a workspace's database: Python's own SQLite, or one that an installed package provides.
#
# A package provides one by the entry point group ``handrail.stores``: a function with the parameters of
# :func:`sqlite3.connect`, which returns a SQLite connection with the package's setup, such as the key of an encrypted file
# or another file system. An operator chooses it by name (``[state] store``) for workspaces without state. The name is stored
# next to the database, so that later openings, even read-only ones, use the same engine.

ENTRY_POINT_GROUP = "handrail.stores"
BUILT_IN_ENGINE = "sqlite"
"""The name of Python's own SQLite."""
_MOST_BYTES = 200

Engine = Callable[..., sqlite3.Connection]
"""A function with the parameters of :func:`sqlite3.connect`."""


def find_engine_entry_points() -> Iterable[metadata.EntryPoint]:
    return list_trusted_entry_points(ENTRY_POINT_GROUP)


def connect_engine(path: Path, database: str | Path, **options: Any) -> sqlite3.Connection:
    """Connect to the database in the file ``path``, with the engine that created it.

    :param database: the first argument of :func:`sqlite3.connect`, with its ``options``
    :raises sqlite3.Error: if it cannot be opened
    :raises StartError: if its engine is no longer installed, or returns another type
    """
    name = read_engine_name(path)
    if name == BUILT_IN_ENGINE:
        return sqlite3.connect(database, **options)
    try:
        connection: Any = _load_engine(name)(str(database), **options)
    except (sqlite3.Error, StartError):
        raise
    except Exception as error:
        raise StartError(
            f"Store `{name}` cannot open {path}: {type(error).__name__}: {error}. Check the path and its permissions."
        ) from error
    if not isinstance(connection, sqlite3.Connection):
        raise StartError(
            f"Store `{name}` returned {type(connection).__name__} for {path}. Expected sqlite3.Connection. "
            "Report this to the author of the store."
        )
    return connection


def read_engine_name(path: Path) -> str:
    """Return the name of the engine that created the database in the file ``path``.

    :raises StartError: if the file with the name does not belong to this user
    """
    beside = _engine_file(path)
    if not beside.exists():
        return BUILT_IN_ENGINE
    content = operator_decisions.read_private_file(beside, _MOST_BYTES)
    name = "" if content is None else content.decode("utf-8", "replace").strip()
    if not name:
        raise StartError(
            f"{beside} should name the store of the log, but is not a readable file that you own. Check who created it."
        )
    return name


def record_or_check_engine(path: Path, wanted: str) -> None:
    """Store the engine for a database that does not exist yet, or check that an existing one was created by it.

    :raises StartError: if another engine created it, or ``wanted`` is not installed
    """
    if not path.exists() or not path.stat().st_size:
        if wanted != BUILT_IN_ENGINE:
            _load_engine(wanted)
            operator_decisions.write_private_file(_engine_file(path), wanted.encode())
            return
        try:
            with suppress(FileNotFoundError):
                _engine_file(path).unlink()
        except OSError as error:
            raise make_unwritable_state_error(path.parent, error) from None
    elif (made_by := read_engine_name(path)) != wanted:
        raise StartError(
            f"The state of this workspace was created by store `{made_by}`, but `[state] store` is `{wanted}`. "
            f"Set it to `{made_by}`, or choose another folder with --state DIR."
        )


def _engine_file(path: Path) -> Path:
    return path.with_name("store")


@lru_cache(maxsize=16)
def _load_engine(name: str) -> Engine:
    points = {point.name: point for point in find_engine_entry_points()}
    if name not in points:
        there = ", ".join((BUILT_IN_ENGINE, *sorted(points)))
        raise StartError(f"Store `{name}` of `[state] store` is not installed. Available: {there}.")
    try:
        made: Any = points[name].load()
    except Exception as error:
        raise StartError(
            f"Store `{name}` from {points[name].value} cannot be loaded: {type(error).__name__}: {error}. Install its package, or correct the setting `store`."
        ) from error
    if not callable(made):
        raise StartError(
            f"Store `{name}` from {points[name].value} is invalid. Expected a function with the parameters of sqlite3.connect."
        )
    return cast("Engine", made)


_CHECKPOINT_PAGES = 4000
"""SQLite moves the write-ahead log into the database every 16 MiB and then overwrites it in place."""
_CACHED_STATEMENTS = 256
_PATIENCE_S = 5.0
"""How long another process may keep the database locked."""


class DatabaseNotCreated(StartError):
    """The database does not exist, or another process is creating it."""


def read_fencing_token(connection: sqlite3.Connection) -> int:
    """Return the last fencing token.

    :raises sqlite3.Error: if it cannot be read
    """
    row = connection.execute("SELECT value FROM meta WHERE key = 'token'").fetchone()
    if row is None or type(row[0]) is not int or not 0 <= row[0] < 2**62:
        raise sqlite3.DatabaseError("the fencing token is not a number")
    return row[0]


def read_last_written_journal_entry(connection: sqlite3.Connection) -> tuple[int, int]:
    """Return the token of the last journal, and the number of its last note that the database contains.

    :raises sqlite3.Error: if they cannot be read
    """
    row = connection.execute("SELECT value FROM meta WHERE key = 'journalled'").fetchone()
    try:
        token, number = (0, 0) if row is None else map(int, str(row[0]).split(":"))
    except ValueError:
        raise sqlite3.DatabaseError("the position of the journal is not a number") from None
    return token, number


# SQLite maps the file -shm into memory. If another process cuts it, a read behind its end would kill this process.

_largest_shared_memory: dict[tuple[int, int], int] = {}
"""The largest size of each shared-memory file that this process has seen, by device and inode."""


def check_shared_memory(path: Path) -> None:
    """Check that no other process has cut the shared memory of a database. Wrap reads in :func:`map_to_log_unavailable` instead.

    :raises StartError: if one has. The next write restores it
    """
    if _find_mapped_size_if_cut(path):
        raise StartError(
            f"The log {path} cannot be read: another process has cut its file {path.name}-shm. Make a call, which restores it, and "
            "try again."
        )


def restore_shared_memory(path: Path) -> None:
    """Lengthen shared memory that another process has cut, with zeros, so that SQLite rebuilds it from the write-ahead log.

    Call it only while no transaction of this process runs. The file is not opened: closing it would release the locks of this
    process.
    """
    if size := _find_mapped_size_if_cut(path):
        with suppress(OSError):
            os.truncate(f"{path}-shm", 0)  # a header that is left would make the zeros after it valid
            os.truncate(f"{path}-shm", size)


def _find_mapped_size_if_cut(path: Path) -> int:
    """Return the size that this process has mapped if the file is shorter now, else 0."""
    try:
        found = os.stat(f"{path}-shm")  # noqa: PTH116 - at each read
    except OSError:
        return 0
    inode, size = (found.st_dev, found.st_ino), found.st_size
    if size >= _largest_shared_memory.get(inode, 0):
        _largest_shared_memory[inode] = size
        return 0
    mapped = _measure_mapping(found.st_ino, f"{path}-shm")
    if mapped <= size:  # SQLite has created the file again
        _largest_shared_memory[inode] = size
        return 0
    return mapped


def _measure_mapping(inode: int, name: str) -> int:
    """Return how many bytes of a file this process has mapped into its memory; 0 if this system does not tell."""
    size = 0
    with suppress(OSError, ValueError), Path("/proc/self/maps").open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            place, _, offset, _, number, *shown = line.split(None, 5)
            if int(number) == inode and shown and shown[0].strip().endswith(name.rpartition("/")[2]):
                start, _, end = place.partition("-")
                size = max(size, int(offset, 16) + int(end, 16) - int(start, 16))
    return size


def open_reader(path: Path) -> sqlite3.Connection:
    """Open a read-only connection, for any thread, also while another process holds the lease.

    :raises DatabaseNotCreated: if there is no database
    :raises StartError: if it is damaged or newer than this program
    """
    if not path.exists():
        raise DatabaseNotCreated(
            f"The log {path} does not exist yet. No call was run in this workspace with this state folder. Check --state."
        )
    check_shared_memory(path)
    try:
        return _read_only(path, "mode=ro")
    except (sqlite3.Error, OSError) as error:
        # On a read-only file system SQLite cannot create the shared-memory file. A log that was closed properly needs
        # none: all of it is in one file.
        if getattr(error, "sqlite_errorname", "") == "SQLITE_CANTOPEN" and not Path(f"{path}-wal").exists():
            with suppress(sqlite3.Error, OSError):
                return _read_only(path, "mode=ro&immutable=1")
        raise make_database_start_error(path, error) from None


def _read_only(path: Path, how: str) -> sqlite3.Connection:
    connection = connect_engine(
        path, f"{path.absolute().as_uri()}?{how}", uri=True, isolation_level=None, check_same_thread=False
    )
    # Damaged text is replaced; a reader that failed at it could not show the rest.
    connection.text_factory = _decode_text
    try:
        connection.execute("PRAGMA query_only = 1")
        _check_version(path, connection)
        if connection.execute("PRAGMA user_version").fetchone() == (0,):
            raise DatabaseNotCreated(f"The log {path} is currently being created. Try again in a moment.")
        check_shared_memory(path)
    except BaseException:
        connection.close()
        raise
    return connection


def _decode_text(text: bytes) -> str:
    return text.decode("utf-8", "replace")


@contextmanager
def map_to_log_unavailable(source: Path | sqlite3.Connection) -> Generator[None]:
    """Map errors of reading to :class:`LogUnavailable`. Wrap each read of a running kernel in it, with the opening.

    :param source: the database, by its file or a connection
    :raises LogUnavailable: if it cannot be read or a row is :func:`damaged <make_damaged_row_error>`
    """
    try:
        check_shared_memory(source if isinstance(source, Path) else _file_of(source))
        yield
    except StartError as error:
        raise LogUnavailable(str(error)) from None
    except sqlite3.Error as error:
        path = source if isinstance(source, Path) else _file_of(source)
        raise LogUnavailable(explain_database_error(path, error)) from None


def make_damaged_row_error(row: str) -> sqlite3.DatabaseError:
    """Return an error for damage that SQLite does not detect, in the form of the damage that it detects.

    :param row: names the damaged row
    """
    return sqlite3.DatabaseError(f"{row} is damaged")


def _file_of(connection: sqlite3.Connection) -> Path:
    try:
        return Path(connection.execute("PRAGMA database_list").fetchone()[2])
    except sqlite3.Error:
        return Path("handrail.db")


_WRITE_FAILURES = ("SQLITE_FULL", "SQLITE_IOERR_WRITE", "SQLITE_IOERR_SHMSIZE")
"""Failures for lack of space. SQLite names a quota or a limit on the size of files as an input or output error."""


def make_database_start_error(path: Path, error: Exception) -> StartError:
    """Return a :class:`StartError` for a database failure, with the next step."""
    if isinstance(error, OSError):
        return make_unwritable_state_error(path.parent, error)
    return StartError(explain_database_error(path, error))


def explain_database_error(path: Path, error: Exception) -> str:
    """Return what is wrong with the database, and the next step."""
    name = str(getattr(error, "sqlite_errorname", ""))
    message = f"{error} ({name})" if name else str(error)
    if isinstance(error, SinkUnavailable):
        return str(error)
    if isinstance(error, OSError):
        return str(make_unwritable_state_error(path.parent, error))
    if name.startswith(_WRITE_FAILURES):
        step = "Free some disk space there"
        if (limit := _find_file_size_limit()) is not None:
            step += f", raise the limit of file sizes (ulimit -f: {limit:,} bytes)"
        return (
            f"The log {path} cannot be written: {message}. {step}, check the disk, or choose another folder with --state DIR. "
            "Until then every call is refused."
        )
    if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM", "SQLITE_IOERR")):
        return (
            f"The log {path} cannot be written: {message}. Make its folder writable and check the disk, or choose another "
            "folder with --state DIR. Without a log no call is run."
        )
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return f"The log {path} is locked by another program: {message}. Close the program that has the file open."
    return (
        f"The log {path} is damaged: {message}. Handrail does not repair it. Keep a copy for inspection, move it away "
        f"(mv '{path}' '{path}.damaged'), and start a new log with `handrail log acknowledge`."
    )


def _find_file_size_limit() -> int | None:
    """Return the most bytes that a file of this process may have; None without a limit."""
    if sys.platform == "win32":
        return None
    import resource

    soft = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def create_private_file(path: Path) -> None:
    """Create an empty file, or check that the existing one belongs to this user.

    An existing file is not opened if possible: closing it would release the locks of this process's other connections.

    :raises StartError: if it cannot be created, or the path is not a plain file of this user
    """
    try:
        if sys.platform == "linux":
            os.mknod(path, stat.S_IFREG | 0o600)
        else:  # pragma: no cover - exercised on other platforms only
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        return
    except FileExistsError:
        pass
    except OSError as error:
        raise make_unwritable_state_error(path.parent, error) from None
    try:
        found = path.lstat()
    except OSError as error:
        raise make_unwritable_state_error(path.parent, error) from None
    problem = None
    if not stat.S_ISREG(found.st_mode):
        problem = "is a link" if stat.S_ISLNK(found.st_mode) else "is not a plain file"
    elif sys.platform != "win32" and found.st_uid != os.geteuid():
        problem = f"belongs to user {found.st_uid}, not to you (user {os.geteuid()})"
    if problem is not None:
        raise StartError(f"{path} should be the log, but {problem}. Check who created it, and move it away.")


def open_writer(path: Path) -> sqlite3.Connection:
    """Open a connection for writing, which one thread at a time may use. Creates an empty database if there is none.

    :raises sqlite3.Error: if the database cannot be opened
    :raises StartError: if it belongs to another program, is newer than this program, or is not writable
    """
    create_private_file(path)
    restore_shared_memory(path)
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return _connect(path)
        except sqlite3.OperationalError as error:
            # Two processes that create a database at once fail with SQLITE_BUSY, for which SQLite does not wait.
            if not is_database_locked(error) or time.monotonic() > deadline:
                raise
        time.sleep(0.005)


def is_database_locked(error: Exception) -> bool:
    """Return whether another connection had the database locked."""
    return str(getattr(error, "sqlite_errorname", "")).startswith("SQLITE_BUSY")


def _connect(path: Path) -> sqlite3.Connection:
    connection = connect_engine(
        path,
        path,
        timeout=_PATIENCE_S,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=_CACHED_STATEMENTS,
    )
    try:
        _check_version(path, connection)
        (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise sqlite3.OperationalError(f"the file system offers no write-ahead log (journal mode {mode})")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
        connection.execute("PRAGMA secure_delete = ON")
        check_shared_memory(path)
    except BaseException:
        connection.close()
        raise
    return connection


def roll_back(connection: sqlite3.Connection) -> None:
    """Roll back an open transaction. After some failures, such as a full disk, SQLite has already done so."""
    if connection.in_transaction:
        connection.execute("ROLLBACK")


def _check_version(path: Path, connection: sqlite3.Connection) -> None:
    if connection.in_transaction:
        _check_content(path, connection)
        return
    # In one transaction: another process may be creating the database.
    connection.execute("BEGIN")
    try:
        _check_content(path, connection)
    finally:
        roll_back(connection)


def _check_content(path: Path, connection: sqlite3.Connection) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    if application != APPLICATION_ID and (version or application or _has_tables(connection)):
        raise StartError(
            f"{path} is the database of another program. Move it away, or choose another folder with --state DIR."
        )
    if version > VERSION:
        row = connection.execute("SELECT value FROM meta WHERE key = 'written_by'").fetchone()
        needed = f"handrail {row[0]}" if row else "a newer handrail"
        raise StartError(
            f"The log {path} has schema {version}, but this version of Handrail supports up to {VERSION}. "
            f"Upgrade to {needed} or later, or choose another folder with --state DIR."
        )


def _has_tables(connection: sqlite3.Connection) -> bool:
    return connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone() is not None


def migrate(path: Path, connection: sqlite3.Connection) -> None:
    """Run all missing steps in the caller's transaction, so that a crash leaves either the old or the new schema.

    :raises StartError: if a newer program was faster
    """
    _check_version(path, connection)
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version == VERSION:
        return
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        ours = installed("handrail")
    except PackageNotFoundError:
        ours = "unknown"
    for step in MIGRATIONS[version:]:
        for statement in step:
            connection.execute(statement)
    connection.execute("INSERT OR REPLACE INTO meta (key, value) VALUES ('written_by', ?)", (ours,))
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {VERSION}")


# Compaction of the database file: the write-ahead log is emptied and free pages are returned, so that deleted data is gone.

_COMPACTION_PATIENCE_S = 5
_WORTHWHILE = 0.25
"""The share of free pages from which on the file is rewritten."""
_LITTLE = 16 * 1024 * 1024


class CompactionResult(Struct, frozen=True):
    """Bytes of the database and its write-ahead log before and after; ``problem`` says what failed."""

    before: int
    after: int
    problem: str | None = None


def compact(path: Path) -> CompactionResult:
    """Empty the write-ahead log, and return free pages to the file system if there are many.

    The caller holds the workspace's lease and has closed its own connections. Deleted content was already overwritten
    (``secure_delete``); this removes older copies of pages and free space. It does not raise for a full disk or a reader.
    """
    before = _size(path)
    problem: str | None = None
    try:
        with closing(connect_engine(path, path, isolation_level=None, timeout=_COMPACTION_PATIENCE_S)) as connection:
            connection.execute("PRAGMA secure_delete = ON")
            problem = _empty_log(connection)
            free, pages, page = (
                _read_pragma(connection, name) for name in ("freelist_count", "page_count", "page_size")
            )
            if problem is None and free * page > _LITTLE and free > pages * _WORTHWHILE:
                # The temporary copy is made next to the database, not on the disk of /tmp.
                connection.execute(f"PRAGMA temp_store_directory = '{str(path.parent).replace(chr(39), chr(39) * 2)}'")
                try:
                    connection.execute("VACUUM")
                finally:
                    connection.execute("PRAGMA temp_store_directory = ''")
                problem = _empty_log(connection)
    except (sqlite3.Error, StartError) as error:
        problem = f"The file {path} could not be compacted: {error}"
    return CompactionResult(before, _size(path), problem)


def _empty_log(connection: sqlite3.Connection) -> str | None:
    busy, *_ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    if not busy:
        return None
    return (
        "Another process is reading the log, so older copies of its pages are still in the write-ahead log. They are removed "
        "when that process has ended and Handrail writes again, or with another purge."
    )


def _read_pragma(connection: sqlite3.Connection, name: str) -> int:
    (value,) = connection.execute(f"PRAGMA {name}").fetchone()
    return int(value)


def _size(path: Path) -> int:
    total = 0
    for file in (path, path.with_name(f"{path.name}-wal")):
        with suppress(OSError):
            total += file.stat().st_size
    return total
