"""One process per workspace: an exclusive lease that the operating system takes back when its holder dies."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from handrail.contract.errors import StartError
from handrail.store.folders import Folders, unwritable

_MAX_NOTE = 4096


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lease, as its file says; fields are None where the file does not tell."""

    pid: int | None = None
    face: str | None = None
    since_ns: int | None = None
    token: int | None = None

    def __str__(self) -> str:
        who = f"handrail {self.face}" if self.face else "another handrail process"
        if self.pid is not None:
            who += f", pid {self.pid}" + (" (this process)" if self.pid == os.getpid() else "")
        if self.since_ns is not None:
            began = datetime.fromtimestamp(self.since_ns / 1e9).astimezone()
            who += f", since {began.isoformat(sep=' ', timespec='seconds')}"
        return who


class Lease:
    """The right to be the one arbiter of a workspace, held until :meth:`release` or the end of the process.

    It is an advisory lock on a file, so a crash leaves nothing to clean up. :attr:`token` is the fencing
    token: it grows with every acquisition and is 0 until the database has counted (see :meth:`fenced`).
    """

    def __init__(self, path: Path, descriptor: int, holder: Holder) -> None:
        self._path = path
        self._descriptor = descriptor
        self._holder = holder

    @staticmethod
    def acquire(folders: Folders, *, face: str, clock: Callable[[], int]) -> Lease:
        """Take the lease of a prepared workspace, or say in one line who has it. Never waits.

        :param face: how this process is reached, for the other's message (``cli``, ``mcp``, ``library``)
        :param clock: wall-clock time in nanoseconds
        :raises StartError: when another process holds it, or the file cannot be written
        """
        path = folders.lease
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
        except OSError as error:
            raise unwritable(folders.own, error) from None
        try:
            if not _try_lock(descriptor):
                raise StartError(
                    f"the workspace {folders.workspace} is in use by {_read(descriptor)}; "
                    "stop that process, or choose another --workspace"
                )
            lease = Lease(path, descriptor, Holder(os.getpid(), face, clock()))
            lease._write()
        except OSError as error:
            os.close(descriptor)
            raise unwritable(folders.own, error) from None
        except StartError:
            os.close(descriptor)
            raise
        return lease

    @property
    def holder(self) -> Holder:
        return self._holder

    @property
    def token(self) -> int:
        return self._holder.token or 0

    @property
    def held(self) -> bool:
        return self._descriptor >= 0

    def fenced(self, token: int) -> None:
        """Note the fencing token that the database counted for this acquisition."""
        self._holder = Holder(self._holder.pid, self._holder.face, self._holder.since_ns, token)
        try:
            self._write()
        except OSError:  # the note is for people; the lock itself holds
            pass

    def release(self) -> None:
        """Give it back. Twice is once."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _write(self) -> None:
        note = {
            "pid": self._holder.pid,
            "face": self._holder.face,
            "since_ns": self._holder.since_ns,
            "token": self._holder.token,
        }
        os.ftruncate(self._descriptor, 0)
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        os.write(self._descriptor, json.dumps(note).encode() + b"\n")


def _read(descriptor: int) -> Holder:
    """The note in the file. Its holder may be about to write it, so anything missing is simply unknown."""
    try:
        os.lseek(descriptor, 0, os.SEEK_SET)
        note: Any = json.loads(os.read(descriptor, _MAX_NOTE))
    except (OSError, ValueError):
        return Holder()
    if not isinstance(note, dict):
        return Holder()
    fields = cast("dict[str, Any]", note)

    def number(key: str) -> int | None:
        value = fields.get(key)
        return value if isinstance(value, int) and 0 <= value < 2**62 else None

    face = fields.get("face")
    shown = face[:40] if isinstance(face, str) and face.isprintable() else None
    return Holder(number("pid"), shown, number("since_ns"), number("token"))


if sys.platform == "win32":  # pragma: no cover - exercised on Windows only
    import msvcrt

    def _try_lock(descriptor: int) -> bool:
        os.lseek(descriptor, 2**30, os.SEEK_SET)  # a byte past the note, which others must be able to read
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except PermissionError:
            return False
        return True

else:
    import fcntl

    def _try_lock(descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
