"""One arbiter for each workspace: a renewed lease with a fencing token, counted in the database.

Whoever acquires the lease counts the database's token up, in one transaction with the check that nobody else validly
holds it. A holder that dies is replaced at once, one that is paused or hangs after two seconds. It can never do harm
afterwards: every transaction of its writer looks at the token (see :class:`~handrail.store.database.database.Database`), and
:attr:`Lease.valid` is false before anybody may take over, since both sides count from the same beat:

- a renewal counts only if it was written while the one before was still fresh, looked at *after* writing. So
  whoever finds the old beat stale has read it before, and whoever reads later finds the new one;
- a holder that comes too late for that asks the database, with its write lock held, as those who take over do: either
  it is confirmed, and they find its new beat, or they were first, and it is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import replace
from time import monotonic_ns
from types import TracebackType

from handrail.contract.errors import StartError
from handrail.store.database.connection import abandon, connect, is_busy, migrate, start_error, token_of
from handrail.store.database.journal import set_aside
from handrail.store.folders import Folders
from handrail.store.holder import STALE_NS, Holder, HolderFile, clear_former, holder_of, look

RENEW_S = 0.5
VALID_NS = STALE_NS * 3 // 4
"""How long a renewal lasts. Less than what others wait, so that what is begun just before its end has begun."""

_PATIENCE_MS = 500
"""How long the database may be locked by somebody who is about to be done with it."""
_ATTEMPTS = 4


class WorkspaceHeld(StartError):
    """Another process holds the workspace. :attr:`holder` tells which; :attr:`is_writing`, that it was paused or hangs
    in the middle of a write, so that nobody else can write before it goes on or ends."""

    def __init__(self, folders: Folders, holder: Holder, *, is_writing: bool = False) -> None:
        self.folders = folders
        self.holder = holder
        self.is_writing = is_writing and holder.state != "alive"
        step = "stop that process, or choose another --workspace"
        if self.is_writing:
            step = (
                f"it is {holder.state} in the middle of a write: let it go on (kill -CONT PID), or end it (kill -9 PID)"
            )
            step = step.replace("PID", str(holder.pid)) if holder.pid is not None else step
        super().__init__(f"the workspace {folders.workspace} is in use by {holder}; {step}")


class Lease:
    """The right to be the one arbiter of a workspace, held until :meth:`release`, the end of the process, or a pause.

    A thread renews it every half second. :attr:`token` is the fencing token: it grows with every acquisition.
    """

    def __init__(
        self,
        folders: Folders,
        connection: sqlite3.Connection,
        file: HolderFile,
        holder: Holder,
        clock: Callable[[], int],
        renewed_ns: int,
    ) -> None:
        self._folders = folders
        self._connection = connection
        self._file = file
        self._holder = holder
        self._clock = clock
        self._renewed_ns = renewed_ns
        self._released = False
        self._lost: str | None = None
        self.remedy = "start it again"
        """The next step if another process has taken over."""
        self._callbacks: list[Callable[[], None]] = []
        self._losing = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @staticmethod
    def acquire(
        folders: Folders,
        *,
        face: str,
        clock: Callable[[], int],
        monotonic: Callable[[], int] = monotonic_ns,
        protocol: int = 0,
        socket: str = "",
        renewing: bool = True,
    ) -> Lease:
        """Take the lease of a prepared workspace, or say in one line who has it. Makes the database if there is none,
        and brings its schema up to date. Does not wait for a holder.

        :param face: how this process is reached, for the others' messages (``cli``, ``mcp``, ``library``)
        :param clock: wall-clock time in nanoseconds, for people to read
        :param monotonic: the machine's monotonic time in nanoseconds
        :param protocol: see :class:`Holder`
        :param socket: see :class:`Holder`
        :param renewing: renew in a thread of its own; otherwise the caller calls :meth:`renew`
        :raises WorkspaceHeld: when another process holds it
        :raises StartError: when the state cannot be used
        """
        holder = holder_of(folders, monotonic)
        if holder is not None and holder.state == "alive":
            raise WorkspaceHeld(folders, holder)
        wanted = Holder(os.getpid(), face, clock(), None, protocol, socket)
        lease = _acquired(folders, wanted, monotonic)
        if renewing:
            lease._thread = threading.Thread(target=lease._keep_renewing, name="handrail-lease", daemon=True)
            lease._thread.start()
        return lease

    @staticmethod
    def holder_of(folders: Folders) -> Holder | None:
        """Who holds the workspace now, and whether it answers; see :func:`handrail.store.holder.holder_of`."""
        return holder_of(folders)

    @staticmethod
    async def until_free(folders: Folders, *, interval_s: float = 0.1) -> None:
        """Return when nobody validly holds the workspace: at once when its holder is dead, two seconds after the last
        renewal when it is paused. Who comes first with :meth:`acquire` then has it.

        :param interval_s: how often to look
        :raises StartError: see :func:`handrail.store.holder.holder_of`
        """
        while (holder := holder_of(folders)) is not None and holder.state == "alive":  # noqa: ASYNC110 - another's pause is no event here
            await asyncio.sleep(interval_s)

    @property
    def holder(self) -> Holder:
        return self._holder

    @property
    def token(self) -> int:
        return self._holder.token or 0

    @property
    def held(self) -> bool:
        """Neither given back nor lost. A holder that was paused may not know yet; see :attr:`valid`."""
        return not self._released and self._lost is None

    @property
    def valid(self) -> bool:
        """Whether nobody can have taken over by now: one look at the clock, to be asked just before a side effect.

        False after a pause until the database has confirmed that nobody did; false for ever once somebody has.
        """
        return self._lost is None and not self._released and self._clock() - self._renewed_ns < VALID_NS

    @property
    def lost(self) -> str | None:
        """Who has taken over and what to do, or None."""
        return self._lost

    def when_lost(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once when somebody else has taken over, from the thread that finds out; at once if it is so."""
        with self._losing:
            if self._lost is None:
                self._callbacks.append(callback)
                return
        callback()

    def superseded(self) -> str:
        """The database counts another's token, or others cannot see this holder any more: it is over. Returns why."""
        try:
            successor = holder_of(self._folders, self._clock)
        except StartError:
            successor = None
        who = f"another process ({successor})" if successor is not None and successor.token != self.token else None
        text = (
            f"{who or 'another process'} has taken over this workspace while this one was paused or hung; "
            f"here nothing is run or recorded any more: {self.remedy}"
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
        """Hold it for a while longer, or find out that it is over. Once it is over nothing happens."""
        if not self.held:
            return
        now = self._clock()
        if now - self._renewed_ns < VALID_NS:
            try:
                self._file.beat(now)
                in_place = self._file.is_in_place
            except OSError:  # it lapses, unless the next one can be written
                return
            if in_place and self._clock() - self._renewed_ns < VALID_NS:
                self._renewed_ns = now
                return
        self._confirm()

    def release(self) -> None:
        """Give it back. Twice is once."""
        if self._released:
            return
        self._released = True
        if os.getpid() != self._holder.pid:  # a copy of the process: the lease is the original's
            self._file.let_go()
            return
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        try:
            self._connection.close()
        except sqlite3.Error:
            pass
        self._file.remove()

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _keep_renewing(self) -> None:
        while not self._stop.wait(RENEW_S):
            self.renew()

    def _confirm(self) -> None:
        connection = self._connection
        try:
            connection.execute("BEGIN IMMEDIATE")
            try:
                ours = token_of(connection) == self.token and self._file.is_in_place
                if ours:
                    now = self._clock()
                    self._file.beat(now)
                    self._renewed_ns = now
            finally:
                abandon(connection)
        except (sqlite3.Error, OSError):  # not valid meanwhile; the next renewal tries again
            return
        if not ours:
            self.superseded()


def _acquired(folders: Folders, wanted: Holder, monotonic: Callable[[], int]) -> Lease:
    path = folders.database
    try:
        connection = connect(path)
    except (sqlite3.Error, OSError, TypeError) as error:
        raise start_error(path, error) from None
    try:
        connection.execute(f"PRAGMA busy_timeout = {_PATIENCE_MS}")
        lease = _counted_when_unlocked(folders, connection, wanted, monotonic)
        clear_former(folders, lease.token)
        lease.renew()  # the commit may have taken long
        if not lease.held:
            lease.release()
            raise WorkspaceHeld(folders, holder_of(folders, monotonic) or Holder())
    except (sqlite3.Error, OSError, TypeError) as error:
        connection.close()
        raise start_error(path, error) from None
    except BaseException:
        connection.close()
        raise
    return lease


def _counted_when_unlocked(
    folders: Folders, connection: sqlite3.Connection, wanted: Holder, monotonic: Callable[[], int]
) -> Lease:
    for _ in range(_ATTEMPTS - 1):
        try:
            return _counted(folders, connection, wanted, monotonic)
        except sqlite3.Error as error:
            if not is_busy(error):
                raise
            if (holder := holder_of(folders, monotonic)) is not None:
                raise WorkspaceHeld(folders, holder, is_writing=True) from None
            # Whoever had it locked has ended since.
    return _counted(folders, connection, wanted, monotonic)


def _counted(folders: Folders, connection: sqlite3.Connection, wanted: Holder, monotonic: Callable[[], int]) -> Lease:
    """Count the token and be its holder, in one transaction: of several who try, one does."""
    connection.execute("BEGIN IMMEDIATE")
    file: HolderFile | None = None
    try:
        migrate(folders.database, connection)
        token = token_of(connection)
        present = look(folders, token, monotonic)
        if present is not None and present.state == "alive":
            raise WorkspaceHeld(folders, present)
        ours = replace(wanted, token=token + 1)
        now = monotonic()
        # Locked before anybody can see the token, so that nobody finds a token without its living holder.
        file = HolderFile.create(folders, ours, now)
        set_aside(folders.own)
        connection.execute("UPDATE meta SET value = ? WHERE key = 'token'", (token + 1,))
        connection.execute("COMMIT")
    except BaseException:
        abandon(connection)
        if file is not None:
            file.remove()
        raise
    return Lease(folders, connection, file, ours, monotonic, now)
