"""Connections to the workspace's SQLite database, for writing or only reading; engine choice, migration, compaction."""

from __future__ import annotations

import os
import sqlite3
import stat
import sys
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from handrail.contract.errors import LogUnavailable, StartError
from handrail.origins.imports import entry_points
from handrail.store import decisions
from handrail.store.database.schema import APPLICATION_ID, MIGRATIONS, VERSION
from handrail.store.database.writer import SinkUnavailable
from handrail.store.folders import unwritable

if TYPE_CHECKING:
    from importlib import metadata


# The engine that opens a workspace's database: Python's own SQLite, or one that an installed package provides.
#
# A package provides one by the entry point group ``handrail.stores``: a function with the parameters of
# :func:`sqlite3.connect`, which returns a SQLite connection with the package's setup, such as the key of an encrypted file
# or another file system. An operator chooses it by name (``[state] store``) for workspaces without state. The name is stored
# next to the database, so that later openings, even read-only ones, use the same engine.

GROUP = "handrail.stores"
OWN = "sqlite"
"""The name of SQLite as Python has it."""
_MOST_BYTES = 200

Engine = Callable[..., sqlite3.Connection]
"""Called as :func:`sqlite3.connect` is."""


def installed() -> Iterable[metadata.EntryPoint]:
    """What the packages in this environment offer."""
    return entry_points(GROUP)


def connected(path: Path, database: str | Path, **options: Any) -> sqlite3.Connection:
    """A connection to the database in the file ``path``, by the engine that has made it.

    :param database: as :func:`sqlite3.connect` takes it, with its ``options``
    :raises sqlite3.Error: when it cannot be opened
    :raises StartError: when its engine is not there any more, or gives something else
    """
    name = name_of(path)
    if name == OWN:
        return sqlite3.connect(database, **options)
    try:
        connection: Any = _engine(name)(str(database), **options)
    except (sqlite3.Error, StartError):
        raise
    except Exception as error:
        raise StartError(f"the store {name!r} cannot open {path}: {type(error).__name__}: {error}") from error
    if not isinstance(connection, sqlite3.Connection):
        raise StartError(f"the store {name!r} gave {type(connection).__name__} for {path}; expected sqlite3.Connection")
    return connection


def name_of(path: Path) -> str:
    """The engine that has made the database in the file ``path``, by name.

    :raises StartError: where something else says so than the operator's own file
    """
    beside = _beside(path)
    if not beside.exists():
        return OWN
    said = decisions.read_private(beside, _MOST_BYTES)
    name = "" if said is None else said.decode("utf-8", "replace").strip()
    if not name:
        raise StartError(
            f"{beside} should name what opens the log, but cannot be read as your own; see who put it there"
        )
    return name


def settle(path: Path, wanted: str) -> None:
    """Before the database in the file ``path`` is opened to be written: say what will have made it, if it is to be made
    now; and see that what there is was made so.

    :raises StartError: where it was made by another, or ``wanted`` is not there
    """
    if not path.exists() or not path.stat().st_size:
        if wanted != OWN:
            _engine(wanted)
            decisions.write_private(_beside(path), wanted.encode())
            return
        try:
            with suppress(FileNotFoundError):
                _beside(path).unlink()
        except OSError as error:
            raise unwritable(path.parent, error) from None
    elif (made_by := name_of(path)) != wanted:
        raise StartError(
            f"the state of this workspace was made by the store {made_by!r}, and [state] store asks for {wanted!r}; "
            f"set it to {made_by!r}, or choose another folder with --state DIR"
        )


def _beside(path: Path) -> Path:
    return path.with_name("store")


@lru_cache(maxsize=16)
def _engine(name: str) -> Engine:
    points = {point.name: point for point in installed()}
    if name not in points:
        there = ", ".join((OWN, *sorted(points)))
        raise StartError(f"there is no store {name!r} ([state] store); there are: {there}")
    try:
        made: Any = points[name].load()
    except Exception as error:
        raise StartError(
            f"the store {name!r} from {points[name].value} cannot be used: {type(error).__name__}: {error}"
        ) from error
    if not callable(made):
        raise StartError(
            f"the store {name!r} from {points[name].value} is none: expected a function that is called as sqlite3.connect is"
        )
    return cast("Engine", made)


_CHECKPOINT_PAGES = 4000
"""The write-ahead log is folded into the database every 16 MiB, and overwritten in place from then on."""
_CACHED_STATEMENTS = 256
_PATIENCE_S = 5.0
"""How long somebody else may keep the database locked for a moment."""


class NotMadeYet(StartError):
    """There is no database, or one that another process is making at this moment."""


def token_of(connection: sqlite3.Connection) -> int:
    """The fencing token that was counted last.

    :raises sqlite3.Error: when it cannot be read
    """
    row = connection.execute("SELECT value FROM meta WHERE key = 'token'").fetchone()
    if row is None or type(row[0]) is not int or not 0 <= row[0] < 2**62:
        raise sqlite3.DatabaseError("the fencing token is no number")
    return row[0]


def journalled(connection: sqlite3.Connection) -> tuple[int, int]:
    """Whose journal was used last, by its token, and up to which note the database has it.

    :raises sqlite3.Error: when it cannot be read
    """
    row = connection.execute("SELECT value FROM meta WHERE key = 'journalled'").fetchone()
    try:
        token, number = (0, 0) if row is None else map(int, str(row[0]).split(":"))
    except ValueError:
        raise sqlite3.DatabaseError("up to where the journal is written is no number") from None
    return token, number


def open_reader(path: Path) -> sqlite3.Connection:
    """A connection that cannot write, usable while another process holds the lease, from any thread.

    :raises NotMadeYet: when there is no database
    :raises StartError: when it is damaged or newer than this program
    """
    if not path.exists():
        raise NotMadeYet(
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
    connection = connected(
        path, f"{path.absolute().as_uri()}?{how}", uri=True, isolation_level=None, check_same_thread=False
    )
    # Damaged text is shown as what it is; a reader that stopped at it could not show the rest.
    connection.text_factory = _readable
    try:
        connection.execute("PRAGMA query_only = 1")
        _check_version(path, connection)
        if connection.execute("PRAGMA user_version").fetchone() == (0,):
            raise NotMadeYet(f"there is no log yet at {path}: it is just being made; try again in a moment")
    except BaseException:
        connection.close()
        raise
    return connection


def _readable(text: bytes) -> str:
    return text.decode("utf-8", "replace")


@contextmanager
def readable(source: Path | sqlite3.Connection) -> Generator[None]:
    """Around each look-up of a kernel that runs, with the opening of its connection: damage may be found by any of them.

    :param source: the database, by its file or through a connection
    :raises LogUnavailable: when it cannot be read, or a row in it is :func:`not what was written <not_as_written>`
    """
    try:
        yield
    except StartError as error:
        raise LogUnavailable(str(error)) from None
    except sqlite3.Error as error:
        path = source if isinstance(source, Path) else _file_of(source)
        raise LogUnavailable(explained(path, error)) from None


def not_as_written(row: str) -> sqlite3.DatabaseError:
    """Damage that SQLite does not see, told in the way of that which it does see.

    :param row: which row it is in
    """
    return sqlite3.DatabaseError(f"{row} is not what was written")


def _file_of(connection: sqlite3.Connection) -> Path:
    try:
        return Path(connection.execute("PRAGMA database_list").fetchone()[2])
    except sqlite3.Error:
        return Path("handrail.db")


def start_error(path: Path, error: Exception) -> StartError:
    """A database failure at start, as what is wrong and what to do."""
    if isinstance(error, OSError):
        return unwritable(path.parent, error)
    return StartError(explained(path, error))


def explained(path: Path, error: Exception) -> str:
    """What is wrong with the database, and the next step."""
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
        f"(mv '{path}' '{path}.damaged') to begin a new log (handrail log acknowledge); nothing is repaired by guessing"
    )


def _create_private(path: Path) -> None:
    """Make an empty file, or see that what is there is one of ours.

    It is not opened where that can be avoided: closing it would let go of the locks that other connections of this
    process have on it.

    :raises StartError: when it cannot be made, or something else stands there
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
        raise unwritable(path.parent, error) from None
    try:
        found = path.lstat()
    except OSError as error:
        raise unwritable(path.parent, error) from None
    problem = None
    if not stat.S_ISREG(found.st_mode):
        problem = "is a link" if stat.S_ISLNK(found.st_mode) else "is no plain file"
    elif sys.platform != "win32" and found.st_uid != os.geteuid():
        problem = f"belongs to user {found.st_uid}, not to you (user {os.geteuid()})"
    if problem is not None:
        raise StartError(f"{path} should hold the log, but {problem}; see who put it there, and move it away")


def connect(path: Path) -> sqlite3.Connection:
    """A connection that writes, for any one thread at a time; makes an empty database if there is none.

    :raises sqlite3.Error: when the database cannot be opened
    :raises StartError: another program's, newer than this program, or not writable
    """
    _create_private(path)
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return _connect(path)
        except sqlite3.OperationalError as error:
            # Two that make a new database at once get in each other's way, and SQLite waits for neither.
            if not is_busy(error) or time.monotonic() > deadline:
                raise
        time.sleep(0.005)


def is_busy(error: Exception) -> bool:
    """Whether somebody else had the database locked."""
    return str(getattr(error, "sqlite_errorname", "")).startswith("SQLITE_BUSY")


def _connect(path: Path) -> sqlite3.Connection:
    connection = connected(
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
    except BaseException:
        connection.close()
        raise
    return connection


def abandon(connection: sqlite3.Connection) -> None:
    """Roll back what is open. After some failures, as of a full disk, SQLite has done so by itself."""
    if connection.in_transaction:
        connection.execute("ROLLBACK")


def _check_version(path: Path, connection: sqlite3.Connection) -> None:
    if connection.in_transaction:
        _check_what_is_there(path, connection)
        return
    # In one look: another process may be making the database at this moment.
    connection.execute("BEGIN")
    try:
        _check_what_is_there(path, connection)
    finally:
        abandon(connection)


def _check_what_is_there(path: Path, connection: sqlite3.Connection) -> None:
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


def migrate(path: Path, connection: sqlite3.Connection) -> None:
    """All missing steps, in the transaction that the caller has begun: a crash leaves the old shape or the new one.

    :raises StartError: when a newer program was faster
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
        connection = connected(path, path, isolation_level=None, timeout=_COMPACTION_PATIENCE_S)
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
