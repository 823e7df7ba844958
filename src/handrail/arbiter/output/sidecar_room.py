"""Room for the whole of outputs that were cut: how much those of a workspace may take together, and whose goes where there
is none.

Those of sessions that nobody has open make room, the oldest first. In the place of each stands a note of what was there,
so that whoever opens its session again is told. What an open session has stays, and so does what a fork has too.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from handrail.arbiter.output.room import JOB_ENDING, REMOVED

NOTE = ".note"
"""What follows a file's name in that of the note on its way to its place."""
_MIB = 1024 * 1024
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
