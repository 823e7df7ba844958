"""The files of a workspace with their times, sizes and inodes, to find what changed since the last question to a server."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

from handrail.contract.struct import Struct, field

MAX_FILES = 60_000
"""The maximum number of files that are compared. If there are more, an answer says that it may miss changes."""
_SKIPPED_FOLDERS = frozenset(
    (".git", ".hg", ".svn", ".jj", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis", ".tox")
)
_PACKAGE_FOLDERS = frozenset(("node_modules", "site-packages", "dist-packages"))
"""Folders of installed packages. A change of such a folder is a change of the packages."""
_RECENT_NS = 50_000_000
"""If a file changed within this time (ns) before it was looked at, it may change again without a new time."""

FileStamp = tuple[int, int, int, int]
"""Modification time (ns), size (bytes), inode and change time (ns). If none of them changes, the content is the same."""


class FileChanges(NamedTuple):
    """The files that changed between two looks, by absolute path."""

    created: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether nothing changed."""
        return not (self.created or self.changed or self.deleted)


class WorkspaceFileSnapshot(Struct):
    """The files below a root, as they were at the last look. For one thread at a time.

    :param is_hidden: returns whether rules hide a path from programs; such files are left out
    :ivar hidden: the hidden files with their inodes, because a sandbox masks a file and not its name
    :ivar packages: the folders of installed packages, with their modification times (ns)
    :ivar is_complete: whether all files were looked at
    """

    root: str
    is_hidden: Callable[[str], bool]
    stamps: dict[str, FileStamp] = field(default_factory=dict[str, FileStamp])
    hidden: Mapping[str, int] = field(default_factory=dict[str, int])
    packages: Mapping[str, int] = field(default_factory=dict[str, int])
    is_complete: bool = True
    _recent: frozenset[str] = frozenset()

    def look(self) -> FileChanges:
        """Look at all files, and return what changed since the last look."""
        before, known_hidden, recent = self.stamps, self.hidden, self._recent
        begun_ns = time.time_ns()
        stamps: dict[str, FileStamp] = {}
        packages: dict[str, int] = {}
        hidden: dict[str, int] = {}
        waiting = [self.root]
        self.is_complete = True
        while waiting:
            folder = waiting.pop()
            try:
                entries = list(os.scandir(folder))
            except OSError:
                continue
            if folder != self.root and any(one.name == "pyvenv.cfg" for one in entries):
                packages |= _find_site_packages(folder)
                continue
            for entry in entries:
                if len(stamps) >= MAX_FILES:
                    self.is_complete = False
                    break
                try:
                    if entry.is_dir(follow_symlinks=False):
                        if entry.name in _PACKAGE_FOLDERS:
                            packages[entry.path] = entry.stat(follow_symlinks=False).st_mtime_ns
                        elif entry.name not in _SKIPPED_FOLDERS:
                            waiting.append(entry.path)
                        continue
                    found = entry.stat()
                except OSError:
                    continue
                if not stat.S_ISREG(found.st_mode):
                    continue
                path = entry.path
                if path in known_hidden or (path not in before and self.is_hidden(path)):
                    hidden[path] = found.st_ino
                    continue
                stamps[path] = make_file_stamp(found)
        self.stamps, self.hidden, self.packages = stamps, hidden, packages
        self._recent = frozenset(path for path, one in stamps.items() if one[3] > begun_ns - _RECENT_NS)
        return FileChanges(
            tuple(path for path in stamps if path not in before),
            tuple(path for path, one in stamps.items() if path in before and (before[path] != one or path in recent)),
            tuple(path for path in before if path not in stamps),
        )


def make_file_stamp(found: os.stat_result) -> FileStamp:
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_ctime_ns


def read_file_stamp(path: str) -> FileStamp | None:
    """Return the present stamp of a file; None if it does not exist."""
    try:
        return make_file_stamp(os.stat(path))  # noqa: PTH116 - for every file of an answer
    except OSError:
        return None


def _find_site_packages(environment: str) -> dict[str, int]:
    """Return the folder of installed packages of a virtual environment, with the time of its last change."""
    found: dict[str, int] = {}
    with suppress(OSError):
        for one in os.scandir(f"{environment}/lib"):
            folder = f"{one.path}/site-packages"
            found[folder] = os.stat(folder).st_mtime_ns  # noqa: PTH116
    return found
