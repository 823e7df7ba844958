"""Sidecars: files that hold the whole of a truncated output, and the disk quotas of outputs in a workspace."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from handrail.contract.doors.jobs import JobOutput

# The disk quota of job outputs in one workspace.
#
# If space runs out, the outputs of ended jobs are removed, the first ended first. A note replaces each, so that a later
# reader learns of the removal.

JOB_ENDING = ".job.txt"
"""What an output's file name ends with."""
REMOVED = ".removed"
"""What follows an output's file name in that of the note in its place."""
_MIB = 1024 * 1024
_MAX_NOTE = 4096


class OutputRoom:
    """The outputs of all jobs of one workspace. For the event loop's thread.

    :param most: bytes that they may take together
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._used = 0
        self._ended: dict[str, int] = {}
        """Bytes of the outputs that may be removed, by their files, the next one first."""
        self._removable = 0

    @property
    def full(self) -> str:
        """Why there is none, as a part of a sentence."""
        return f"the outputs of all jobs here may take {self.most / _MIB:,.4g} MiB together (limits.job_output_mib)"

    def take(self, size: int) -> bool:
        """Take so many bytes, and remove outputs where that makes room for them. Gives whether there is room; else nothing
        was removed."""
        if self._used - self._removable + size > self.most or not self.trim(size):
            return False
        self._used += size
        return True

    def trim(self, size: int = 0) -> bool:
        """Remove outputs until so many bytes have room. Gives whether they have."""
        while self._used + size > self.most and self._ended:
            path = next(iter(self._ended))
            removable = self._ended.pop(path)
            self._removable -= removable
            if _remove(path, self.full):
                self._used -= removable
        return self._used + size <= self.most

    def give(self, size: int) -> None:
        """So many are free again."""
        self._used -= size

    def found(self, path: str, size: int, *, ended: bool) -> None:
        """An earlier process left one; call it for those of jobs that ended in the order of their ends."""
        self._used += size
        if ended:
            self.ended(path, size)

    def ended(self, path: str, size: int) -> None:
        """The job of one has ended, so it may be removed.

        :param size: bytes of it that were taken
        """
        if size:
            self._removable += size - self._ended.pop(path, 0)
            self._ended[path] = size

    def forget(self, paths: Iterable[str]) -> None:
        """Outputs of jobs that ended are removed with all that is known of these."""
        for path in paths:
            size = self._ended.pop(path, 0)
            self._removable -= size
            self._used -= size

    def forget_in(self, folder: Path) -> None:
        """All that were in a folder are."""
        self.forget([path for path in self._ended if Path(path).parent == folder])


def removal_of(path: str, cursor: int) -> JobOutput | None:
    """What is read of an output that was removed, from a cursor on; None where none was. Blocks."""
    try:
        with os.fdopen(os.open(f"{path}{REMOVED}", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            size, _, note = file.read(_MAX_NOTE).decode("utf-8", "replace").partition("\n")
        end = int(size)
    except (OSError, ValueError):
        return None
    return JobOutput(note if cursor < end else "", end, more=False, skipped=max(end - max(cursor, 0), 0))


def unlink(paths: Iterable[str]) -> None:
    """Remove outputs, and the notes of those that were removed before. Blocks."""
    for path in paths:
        if path:
            for name in (path, f"{path}{REMOVED}"):
                with suppress(OSError, ValueError):
                    Path(name).unlink(missing_ok=True)


def _remove(path: str, why: str) -> bool:
    """Remove one that is full of what nobody may need any more. Gives whether its place on the disk is free."""
    try:
        size = os.lstat(path).st_size
        note = f"{size}\n[this output of {size:,} bytes was removed to make room: {why}, and those of the jobs that ended first go first]\n"
        noted = _write(f"{path}{REMOVED}", note)  # first: nobody finds nothing at all
        Path(path).unlink()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    if not noted:  # for which the disk was too full
        _write(f"{path}{REMOVED}", note)
    return True


def _write(path: str, text: str) -> bool:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
            file.write(text.encode())
    except OSError:
        return False
    return True


# The disk quota of sidecars in one workspace.
#
# If space runs out, the sidecars of closed sessions are removed, the oldest first. A note replaces each, so that a reopened
# session learns of the removal. The files of open sessions stay, and so do files that a fork shares.

NOTE = ".note"
"""What follows a file's name in that of the note on its way to its place."""
_WORTH = 4096
"""Bytes. Less is not worth a note in its place."""
_NOTED = 512
"""Bytes. What a note takes at most."""
_OTHERS = (JOB_ENDING, f"{JOB_ENDING}{REMOVED}")
"""Outputs of jobs, which have a bound of their own."""


class _File(NamedTuple):
    written_ns: int
    path: Path
    size: int


class SidecarRoom:
    """The sidecars of all sessions of one workspace. For any thread; what it does blocks.

    :param folder: holds the sessions' output folders
    :param most: bytes that they may take together
    :ivar in_use: whether a session's files have to stay; until somebody says so, all have to
    """

    def __init__(self, folder: Path, most: int) -> None:
        self.in_use: Callable[[str], bool] = lambda session_id: True
        self._folder = folder
        self._most = most
        self._lock = threading.Lock()
        self._used = most
        """At most so many bytes are in use: exactly so many after each look."""
        self._oldest: list[_File] = []
        """What the last look found that could be removed."""
        self._changed = True
        """Whether another look might find more to remove, or less in use."""

    @property
    def full(self) -> str:
        """Why there is none, as a part of a sentence."""
        return f"the cut outputs of all sessions here may take {self._most / _MIB:,.4g} MiB together (limits.cut_output_mib)"

    def changed(self) -> None:
        """Files are gone."""
        self._changed = True

    @contextmanager
    def taken(self, size: int) -> Generator[None, None, None]:
        """Write a file of so many bytes meanwhile. Where that raises, they are free again.

        :raises OSError: where there is no room
        """
        with self._lock:  # also while it is written, so that a look counts all there is
            if not self._has_room_for(size):
                raise OSError(f"{self.full}, and have no room for it; ask for less, or close sessions that are over")
            self._used += size
            self._changed = True
            try:
                yield
            except BaseException:
                self._used -= size
                raise

    def _has_room_for(self, size: int) -> bool:
        while self._used + size > self._most and not self._cleared(size):
            if not self._changed:
                return False
            self._changed = False  # first: what changes from here on is looked at again
            self._look()
        return True

    def _cleared(self, size: int) -> bool:
        """Whether there is room for so many bytes, once the oldest that may go have made some. Else nothing goes in vain."""
        spare = [one for one in self._oldest if not self.in_use(one.path.parent.name)]
        if self._used + size - sum(one.size - _NOTED for one in spare) > self._most:
            return False
        gone: set[_File] = set()
        for one in spare:
            if self._used + size <= self._most:
                break
            self._remove(one.path)
            gone.add(one)
        self._oldest = [one for one in self._oldest if one not in gone]
        return self._used + size <= self._most

    def _look(self) -> None:
        sizes: dict[tuple[int, int], int] = {}
        found: list[_File] = []
        for folder in _entries(self._folder):
            for file in _entries(folder.path) if folder.is_dir(follow_symlinks=False) else ():
                with suppress(OSError):
                    about = file.stat(follow_symlinks=False)
                    if stat.S_ISREG(about.st_mode) and not file.name.endswith(_OTHERS):
                        sizes[about.st_dev, about.st_ino] = about.st_size  # a fork's is the same file
                        if about.st_nlink == 1 and about.st_size > _WORTH:
                            found.append(_File(about.st_mtime_ns, Path(file.path), about.st_size))
        self._used = sum(sizes.values())
        self._oldest = sorted(found)

    def _remove(self, path: Path) -> None:
        """Put the note in its place, if it may go."""
        with suppress(OSError):  # it stays
            about = path.lstat()
            if about.st_nlink > 1:
                return
            text = f"[this output of {about.st_size:,} bytes was removed to make room: {self.full}, and the oldest of sessions that nobody has open go first]\n"
            note = path.with_name(f"{path.name}{NOTE}")
            note.unlink(missing_ok=True)  # of a process that was killed
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            try:
                with os.fdopen(os.open(note, flags, 0o600), "wb") as file:
                    file.write(text.encode())
                note.replace(path)  # at once: nobody finds nothing at all, or a part
            except OSError:
                note.unlink(missing_ok=True)
                raise
            self._used += len(text) - about.st_size


def _entries(folder: str | Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


MAX_SIDECAR = 64 * 1024 * 1024
"""Bytes. What is longer is cut there, and the file's last line says so."""

_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_-]")
_MAX_NAME = 100
_MAX_SAME_NAME = 100


def write(room: SidecarRoom, folder: Path, call_id: str, text: str, ending: str = ".txt") -> tuple[Path, int]:
    """Write a new file named for the call, readable by its owner alone.

    Blocks; leaves no part of a file behind when it fails.

    :param room: what all of them may take together
    :return: the file, and how many bytes of ``text`` are in it
    :raises OSError: when it cannot be written, or has no room
    """
    encoded = text.encode("utf-8", "backslashreplace")
    kept = len(encoded)
    if kept > MAX_SIDECAR:
        note = f"\n[this file ends here: it holds the first {MAX_SIDECAR:,} of {kept:,} bytes]\n".encode()
        head = encoded[: MAX_SIDECAR - len(note)].decode("utf-8", "ignore").encode()
        kept, encoded = len(head), head + note
    with room.taken(len(encoded)):
        path, descriptor = _new(folder, file_name(call_id), ending)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(encoded)
        except BaseException:
            path.unlink(missing_ok=True)  # on a full disk its part is worth more as free space
            raise
    return path, kept


def file_name(call_id: str) -> str:
    """``call_id`` as a file's name: itself where it is one, else what fits of it and a hash of the whole."""
    name = _NOT_IN_A_NAME.sub("_", call_id)[:_MAX_NAME]
    if name == call_id and name:
        return name
    return f"{name}-{hashlib.sha256(call_id.encode('utf-8', 'surrogatepass')).hexdigest()[:10]}"


def _new(folder: Path, name: str, ending: str) -> tuple[Path, int]:
    """A file that was not there before: an earlier attempt of the same call keeps its own."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
    for attempt in range(1, _MAX_SAME_NAME):
        path = folder / (f"{name}{ending}" if attempt == 1 else f"{name}-{attempt}{ending}")
        try:
            return path, os.open(path, flags, 0o600)
        except FileExistsError:
            continue
    raise FileExistsError(17, f"there are {_MAX_SAME_NAME} outputs of this call already", str(folder / name))
