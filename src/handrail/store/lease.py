"""The lease of a workspace: one arbiter at a time, with renewals, a holder file, and a fencing token in the database.

A process acquires the lease by incrementing the database's token, in one transaction with the check that no other process
validly holds it. A dead holder is replaced at once, a paused or hanging one after two seconds. It can do no harm afterwards:
every transaction of its writer checks the token (see :class:`~handrail.store.database.workspace_database.WorkspaceDatabase`), and
:attr:`WorkspaceLease.is_valid` is false before another process may take over, since both sides count from the same beat:

- a renewal counts only if it was written while the one before was still fresh, checked *after* writing. So a process that
  finds the old beat stale has read it before, and a later reader finds the new one;
- a holder that is too late for that asks the database, with its write lock held, as processes that take over do: either
  it is confirmed, and they find its new beat, or they were first, and it has lost the lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import sqlite3
import stat
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from time import monotonic_ns
from types import TracebackType
from typing import Any, Literal, cast

from msgspec.structs import replace

from handrail.contract.errors import StartError
from handrail.contract.struct import Struct
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.store.database.journal import mark_journals_orphaned
from handrail.store.database.sqlite_connection import (
    check_shared_memory,
    is_database_locked,
    make_database_start_error,
    migrate,
    open_writer,
    read_fencing_token,
    restore_shared_memory,
    roll_back,
)
from handrail.store.state_folders import StateFolders, make_unwritable_state_error

# Holder files: one locked file for each acquisition, with a beat that distinguishes a live holder from a paused one.
#
# The file ``holder-<token>`` lies in the workspace's private folder. The operating system releases its lock when the process
# dies, for any reason. The beat at its beginning is the time of the last renewal on the machine's monotonic clock. All
# processes share that clock, no process can set it, and it stops while the machine sleeps, so a closed lid makes no holder
# look paused. A note for users and for connecting processes follows the beat.

STALE_NS = 2_000_000_000
"""A holder without a renewal for this long may be replaced."""

_NAME = compile_regex_lazily(r"holder-([0-9]{1,19})")
_BEAT = struct.Struct("<QQQ")
"""The token, the time in nanoseconds, and both combined as a check."""
_NOTE_AT = 64
_MAX_BYTES = 4096
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK if sys.platform != "win32" else 0

HolderState = Literal["alive", "paused", "hung"]


class LeaseHolder(Struct, frozen=True):
    """The holder of a workspace's lease, as its file describes it. A field is None if the file does not say.

    :param since_ns: wall-clock time of the acquisition
    :param protocol: the version of the protocol for client processes; 0: none can connect
    :param socket: the name of its socket in the workspace's private folder, or ``""``; see also :attr:`is_short_lived`
    :param state: ``alive`` renews its lease; ``paused`` was stopped (Ctrl-Z, SIGSTOP), and ``hung`` does not renew: both may be
        replaced
    """

    pid: int | None = None
    frontend: str | None = None
    since_ns: int | None = None
    token: int | None = None
    protocol: int = 0
    socket: str = ""
    state: HolderState = "alive"

    @property
    def is_short_lived(self) -> bool:
        """Whether it only writes an answer and ends soon, so that other processes wait for it."""
        return self.protocol > 0 and not self.socket

    def __str__(self) -> str:
        who = f"handrail {self.frontend}" if self.frontend else "another handrail process"
        if self.pid is not None:
            who += f", pid {self.pid}" + (" (this process)" if self.pid == os.getpid() else "")
        if self.since_ns is not None:
            began = datetime.fromtimestamp(self.since_ns / 1e9).astimezone()
            who += f", since {began.isoformat(sep=' ', timespec='seconds')}"
        return who


def find_lease_holder(folders: StateFolders, clock: Callable[[], int] = monotonic_ns) -> LeaseHolder | None:
    """Return the present holder of the workspace; None if there is none. Reads small files only, without a wait.

    :param clock: the machine's monotonic time in nanoseconds
    :raises StartError: if a holder file is not a plain file of this user
    """
    found = (find_holder_by_token(folders, token, clock) for token in sorted(_list_tokens(folders), reverse=True))
    return next((holder for holder in found if holder is not None), None)


def find_holder_by_token(
    folders: StateFolders, token: int, clock: Callable[[], int] = monotonic_ns
) -> LeaseHolder | None:
    """Return the living process that acquired ``token``; None if there is none. See :func:`find_lease_holder`."""
    path = _holder_path(folders, token)
    try:
        descriptor = os.open(path, os.O_RDONLY | _FLAGS)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unfit_error(path, _error_reason(error)) from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _unfit_error(path, "it is not a regular file")
        if sys.platform != "win32" and status.st_uid != os.geteuid():
            raise _unfit_error(path, f"it belongs to user {status.st_uid}, not to you (user {os.geteuid()})")
        # The clock first: a beat that is written meanwhile can only make the holder look more recent.
        now = clock()
        if not _is_locked(descriptor):
            return None
        content = os.read(descriptor, _MAX_BYTES)
    except OSError as error:
        raise _unfit_error(path, _error_reason(error)) from None
    finally:
        os.close(descriptor)
    holder = replace(_parse_note(content[_NOTE_AT:]), token=token)
    beat = _read_heartbeat(content, token)
    # An unreadable beat is not a reason to replace a living process.
    if beat is None or now - beat < STALE_NS:
        return holder
    return replace(holder, state="paused" if _is_stopped(holder.pid) else "hung")


def remove_former_holder_files(folders: StateFolders, token: int) -> None:
    """Remove the files of earlier acquisitions. A replaced process notices that its file is missing."""
    for former in _list_tokens(folders):
        if former != token:
            with contextlib.suppress(OSError):  # only the token in the database counts
                _holder_path(folders, former).unlink()


class HolderFile:
    """This process's holder file, locked until :meth:`remove` or the end of the process."""

    def __init__(self, path: Path, descriptor: int, token: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self._token = token

    @staticmethod
    def create(folders: StateFolders, holder: LeaseHolder, now_ns: int) -> HolderFile:
        """Create and lock the file of ``holder.token``, with its first beat.

        The caller has locked the database, and the token is not counted yet. So a file of that name was left by a failed attempt.

        :raises StartError: if it cannot be created
        """
        token = holder.token or 0
        path = _holder_path(folders, token)
        # Complete and locked before it gets its name, so that every reader finds the socket in it.
        made = path if sys.platform == "win32" else path.with_name(f"new-{path.name}")
        try:
            path.unlink(missing_ok=True)
            made.unlink(missing_ok=True)
            descriptor = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600)
        except OSError as error:
            unfit = made if made.is_dir() else path
            if error.errno in (errno.EISDIR, errno.EEXIST) or unfit.is_dir():
                raise _unfit_error(unfit, _error_reason(error)) from None
            raise make_unwritable_state_error(folders.workspace_state_folder, error) from None
        file = HolderFile(made, descriptor, token)
        try:
            if not try_lock_descriptor(descriptor):
                raise _unfit_error(made, "another process has locked it")
            file.write_heartbeat(now_ns)
            fields = {name: value for name, value in asdict(holder).items() if name != "state"}
            _write_at(descriptor, json.dumps(fields).encode() + b"\n", _NOTE_AT)
            if made != path:
                made.rename(path)
                file._path = path
        except OSError as error:
            file.remove()
            raise make_unwritable_state_error(folders.workspace_state_folder, error) from None
        except StartError:
            file.remove()
            raise
        return file

    @property
    def is_current_file(self) -> bool:
        """Whether other processes find this very file."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), self._path.lstat())
        except FileNotFoundError:
            return False

    def write_heartbeat(self, now_ns: int) -> None:
        """Write the time of a renewal. It is not synced, since it means nothing after a restart of the machine.

        :raises OSError: if it cannot be written
        """
        _write_at(self._descriptor, _BEAT.pack(self._token, now_ns, self._token ^ now_ns), 0)

    def remove(self) -> None:
        """Remove and unlock the file. Repeated calls have no further effect."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor < 0:
            return
        try:
            if os.path.samestat(os.fstat(descriptor), self._path.lstat()):
                if sys.platform == "win32":  # no open file is removed there
                    os.close(descriptor)
                    descriptor = -1
                self._path.unlink()
        except OSError:  # an unlocked file has no effect, and the next holder removes it
            pass
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def close_descriptor(self) -> None:
        """Close the file and leave it in place, in a fork of the process that holds it."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _holder_path(folders: StateFolders, token: int) -> Path:
    return folders.workspace_state_folder / f"holder-{token}"


def _list_tokens(folders: StateFolders) -> Iterator[int]:
    try:
        names = [path.name for path in folders.workspace_state_folder.iterdir()]
    except FileNotFoundError:
        return
    except OSError as error:
        raise make_unwritable_state_error(folders.workspace_state_folder, error) from None
    for name in names:
        if found := _NAME.fullmatch(name):
            yield int(found[1])


def _read_heartbeat(content: bytes, token: int) -> int | None:
    if len(content) < _BEAT.size:
        return None
    noted, now_ns, check = _BEAT.unpack_from(content)
    return now_ns if noted == token and check == noted ^ now_ns else None


def _parse_note(content: bytes) -> LeaseHolder:
    """Parse the note. The holder may be about to write it, so missing fields are unknown."""
    try:
        note: Any = json.loads(content)
    except ValueError:
        return LeaseHolder()
    if not isinstance(note, dict):
        return LeaseHolder()
    fields = cast("dict[str, Any]", note)

    def number(key: str) -> int | None:
        value = fields.get(key)
        return value if type(value) is int and 0 <= value < 2**62 else None

    def text(key: str) -> str | None:
        value = fields.get(key)
        return value[:40] if isinstance(value, str) and value.isprintable() else None

    return LeaseHolder(
        pid=number("pid"),
        frontend=text("frontend"),
        since_ns=number("since_ns"),
        protocol=number("protocol") or 0,
        socket=text("socket") or "",
    )


def _is_stopped(pid: int | None) -> bool:
    """Return whether the system shows the process as stopped; False if it does not tell."""
    try:
        # The program's name comes before, in brackets, and may contain anything.
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1]
    except OSError:
        return False
    return state in (b"T", b"t")


def _write_at(descriptor: int, content: bytes, offset: int) -> None:
    if sys.platform == "win32":  # pragma: no cover - exercised on Windows only
        os.lseek(descriptor, offset, os.SEEK_SET)
        written = os.write(descriptor, content)
    else:
        written = os.pwrite(descriptor, content, offset)
    if written != len(content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _error_reason(error: OSError) -> str:
    return "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror or str(error)


def _unfit_error(path: Path, reason: str) -> StartError:
    return StartError(
        f"{path} should be the holder file of this workspace, but cannot be used: {reason}. "
        "Check who created it, remove it, and start again."
    )


if sys.platform == "win32":  # pragma: no cover - exercised on Windows only
    import msvcrt

    _LOCKED_BYTE = 2**30  # past the note, which others must be able to read

    def try_lock_descriptor(descriptor: int) -> bool:
        os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except PermissionError:
            return False
        return True

    def _is_locked(descriptor: int) -> bool:
        locked = not try_lock_descriptor(descriptor)
        os.lseek(descriptor, 0, os.SEEK_SET)
        return locked

else:
    import fcntl

    def try_lock_descriptor(descriptor: int) -> bool:
        """Lock an open file against other processes until it is closed, and return whether this was possible."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _is_locked(descriptor: int) -> bool:
        """Return whether the file is locked, tested with a shared lock, so that two tests do not see each other."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


RENEW_INTERVAL_S = 0.5
VALID_NS = STALE_NS * 3 // 4
"""How long a renewal lasts. It is shorter than the wait of other processes, so work that starts in time has started."""

_PATIENCE_MS = 500
"""How long the database may be locked by a process that is about to end."""
_ATTEMPTS = 4


class WorkspaceAlreadyHeld(StartError):
    """Another process, :attr:`holder`, holds the workspace.

    :attr:`is_writing` says that it was paused or hangs during a write, so that no other process can write meanwhile.
    """

    def __init__(self, folders: StateFolders, holder: LeaseHolder, *, is_writing: bool = False) -> None:
        self.folders = folders
        self.holder = holder
        self.is_writing = is_writing and holder.state != "alive"
        step = "Stop that process, or choose another --workspace."
        if self.is_writing:
            step = f"It is {holder.state} during a write. Continue it (kill -CONT PID), or end it (kill -9 PID)."
            step = step.replace("PID", str(holder.pid)) if holder.pid is not None else step
        super().__init__(f"The workspace {folders.workspace} is in use by {holder}. {step}")


class WorkspaceLease:
    """The right to be the only arbiter of a workspace, until :meth:`release`, a pause, or the end of the process.

    A thread renews it every half second. :attr:`token` is the fencing token, which grows with every acquisition.
    """

    def __init__(
        self,
        folders: StateFolders,
        connection: sqlite3.Connection,
        file: HolderFile,
        holder: LeaseHolder,
        clock: Callable[[], int],
        renewed_ns: int,
    ) -> None:
        self._folders = folders
        self._connection = connection
        self._file = file
        self.holder = holder
        self._clock = clock
        self._renewed_ns = renewed_ns
        self._released = False
        self._lost: str | None = None
        self.remedy = "restart it"
        """The next step if another process has taken over."""
        self._callbacks: list[Callable[[], None]] = []
        self._losing = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @staticmethod
    def acquire(
        folders: StateFolders,
        *,
        frontend: str,
        clock: Callable[[], int],
        monotonic: Callable[[], int] = monotonic_ns,
        protocol: int = 0,
        socket: str = "",
        renewing: bool = True,
    ) -> WorkspaceLease:
        """Acquire the lease of a prepared workspace. Does not wait for a holder.

        Creates the database if there is none, and migrates its schema.

        :param frontend: the frontend of this process, for messages of other processes (``cli``, ``mcp``, ``library``)
        :param clock: wall-clock time in nanoseconds, for users to read
        :param monotonic: the machine's monotonic time in nanoseconds
        :param protocol: see :class:`LeaseHolder`
        :param socket: see :class:`LeaseHolder`
        :param renewing: renew in a separate thread; otherwise the caller calls :meth:`renew`
        :raises WorkspaceAlreadyHeld: if another process holds it
        :raises StartError: if the state cannot be used
        """
        holder = find_lease_holder(folders, monotonic)
        if holder is not None and holder.state == "alive":
            raise WorkspaceAlreadyHeld(folders, holder)
        wanted = LeaseHolder(os.getpid(), frontend, clock(), None, protocol, socket)
        lease = _try_acquire(folders, wanted, monotonic)
        if renewing:
            lease._thread = threading.Thread(target=lease._keep_renewing, name="handrail-lease", daemon=True)
            lease._thread.start()
        return lease

    @staticmethod
    async def wait_until_free(folders: StateFolders, *, interval_s: float = 0.1) -> None:
        """Return when no process validly holds the workspace. The first :meth:`acquire` then gets it.

        That is at once if the holder is dead, and two seconds after the last renewal if it is paused.

        :param interval_s: how often to check
        :raises StartError: see :func:`handrail.store.lease.find_lease_holder`
        """
        while (holder := find_lease_holder(folders)) is not None and holder.state == "alive":  # noqa: ASYNC110 - no event tells of a pause
            await asyncio.sleep(interval_s)

    @property
    def token(self) -> int:
        return self.holder.token or 0

    @property
    def is_held(self) -> bool:
        """Whether it is neither released nor lost. A process that was paused may not know yet; see :attr:`is_valid`."""
        return not self._released and self._lost is None

    @property
    def is_valid(self) -> bool:
        """Whether no other process can have taken over. Check it just before a side effect; it only reads the clock.

        After a pause it is False until the database confirms the lease. Once another process has taken over, it stays False.
        """
        return self._lost is None and not self._released and self._clock() - self._renewed_ns < VALID_NS

    @property
    def lost_reason(self) -> str | None:
        """Which process has taken over and what to do; None if none has."""
        return self._lost

    def add_lost_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once when another process has taken over, on the thread that notices it, or at once."""
        with self._losing:
            if self._lost is None:
                self._callbacks.append(callback)
                return
        callback()

    def mark_superseded(self) -> str:
        """Mark the lease as lost, since another process has the token or replaced the holder file, and return why."""
        try:
            successor = find_lease_holder(self._folders, self._clock)
        except StartError:
            successor = None
        who = f"Another process ({successor})" if successor is not None and successor.token != self.token else None
        text = (
            f"{who or 'Another process'} has taken over this workspace while this process was paused or hung. "
            f"This process runs and records no more calls: {self.remedy}"
        )
        with self._losing:
            if self._lost is not None:
                return self._lost
            self._lost = text
            callbacks, self._callbacks = self._callbacks, []
        self._stop.set()
        for callback in callbacks:
            with contextlib.suppress(RuntimeError):  # its event loop is closed
                callback()
        return text

    def renew(self) -> None:
        """Renew the lease, or notice that it is lost. A lost lease stays lost."""
        if not self.is_held:
            return
        now = self._clock()
        if now - self._renewed_ns < VALID_NS:
            try:
                self._file.write_heartbeat(now)
                in_place = self._file.is_current_file
            except OSError:  # the lease expires unless the next beat can be written
                return
            if in_place and self._clock() - self._renewed_ns < VALID_NS:
                self._renewed_ns = now
                return
        self._confirm_held()

    def release(self) -> None:
        """Release the lease. Repeated calls have no further effect."""
        if self._released:
            return
        self._released = True
        if os.getpid() != self.holder.pid:  # a copy of the process: the lease is the original's
            self._file.close_descriptor()
            return
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        restore_shared_memory(self._folders.database_file)
        with contextlib.suppress(sqlite3.Error):
            self._connection.close()
        self._file.remove()

    def __enter__(self) -> WorkspaceLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _keep_renewing(self) -> None:
        while not self._stop.wait(RENEW_INTERVAL_S):
            self.renew()

    def _confirm_held(self) -> None:
        connection = self._connection
        try:
            check_shared_memory(self._folders.database_file)
            connection.execute("BEGIN IMMEDIATE")
            try:
                ours = read_fencing_token(connection) == self.token and self._file.is_current_file
                if ours:
                    now = self._clock()
                    self._file.write_heartbeat(now)
                    self._renewed_ns = now
            finally:
                roll_back(connection)
        except (sqlite3.Error, OSError, StartError):  # not valid meanwhile; the next renewal tries again
            return
        if not ours:
            self.mark_superseded()


def _try_acquire(folders: StateFolders, wanted: LeaseHolder, monotonic: Callable[[], int]) -> WorkspaceLease:
    path = folders.database_file
    try:
        connection = open_writer(path)
    except (sqlite3.Error, OSError, TypeError) as error:
        raise make_database_start_error(path, error) from None
    try:
        connection.execute(f"PRAGMA busy_timeout = {_PATIENCE_MS}")
        lease = _retry_acquire(folders, connection, wanted, monotonic)
        remove_former_holder_files(folders, lease.token)
        lease.renew()  # the commit may have taken long
        if not lease.is_held:
            lease.release()
            raise WorkspaceAlreadyHeld(folders, find_lease_holder(folders, monotonic) or LeaseHolder())
    except (sqlite3.Error, OSError, TypeError) as error:
        connection.close()
        raise make_database_start_error(path, error) from None
    except BaseException:
        connection.close()
        raise
    return lease


def _retry_acquire(
    folders: StateFolders, connection: sqlite3.Connection, wanted: LeaseHolder, monotonic: Callable[[], int]
) -> WorkspaceLease:
    for _ in range(_ATTEMPTS - 1):
        try:
            return _count_token(folders, connection, wanted, monotonic)
        except sqlite3.Error as error:
            if not is_database_locked(error):
                raise
            if (holder := find_lease_holder(folders, monotonic)) is not None:
                raise WorkspaceAlreadyHeld(folders, holder, is_writing=True) from None
            # The process that had it locked has ended meanwhile.
    return _count_token(folders, connection, wanted, monotonic)


def _count_token(
    folders: StateFolders, connection: sqlite3.Connection, wanted: LeaseHolder, monotonic: Callable[[], int]
) -> WorkspaceLease:
    """Count the token and create the holder file in one transaction, so that only one of several processes succeeds."""
    connection.execute("BEGIN IMMEDIATE")
    file: HolderFile | None = None
    try:
        migrate(folders.database_file, connection)
        token = read_fencing_token(connection)
        present = find_holder_by_token(folders, token, monotonic)
        if present is not None and present.state == "alive":
            raise WorkspaceAlreadyHeld(folders, present)
        ours = replace(wanted, token=token + 1)
        now = monotonic()
        # Locked before other processes can see the token, so that they never find a token without its holder.
        file = HolderFile.create(folders, ours, now)
        mark_journals_orphaned(folders.workspace_state_folder)
        connection.execute("UPDATE meta SET value = ? WHERE key = 'token'", (token + 1,))
        connection.execute("COMMIT")
    except BaseException:
        roll_back(connection)
        if file is not None:
            file.remove()
        raise
    return WorkspaceLease(folders, connection, file, ours, monotonic, now)
