"""A cached listing of a folder tree, read again only in folders that have changed.

Before a program starts and after it has ended, the kernel has to know every protected name and every hidden file of
the workspace. Reading 24,000 names takes a tenth of a second; asking 2,400 folders for their status takes three
milliseconds. A folder's status-change time moves with every entry that is made, removed or renamed in it, and no
program can set it. If that time is so recent that another change could fall into the same tick of the clock, the folder is
read again next time.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from handrail.contract.errors import ToolError
from handrail.contract.protected.protected import GIT_NAMES, Protection, leads_on, plain, protection, suspicious

_TICK_NS = 25_000_000
"""Longer than a tick of any kernel's coarse clock, which file systems take their times from and which lags by a tick.
"""
_COARSE_TICK_NS = 2_100_000_000
"""The same for a file system with whole seconds."""
DEEPEST = 128
LONGEST = 3_800
"""The limit of a folder's path in bytes, so that its entries still have valid paths (4,095). Deeper folders are not
read: programs do not see them, and new ones are moved away."""
PASSING = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN, errno.EINTR))
"""Errors that mean that the system is short of a resource. They say nothing about the folder."""
RECOUNT_NS = 300_000_000_000
"""How soon a new second name elsewhere is noticed at the latest, if nothing in this tree changes."""
_MOST_JUDGES = 8
_ANY_NAME = "~handrail-any-name~"
"""Stands for a name that no pattern was written for."""


@dataclass(frozen=True, slots=True)
class Protected:
    """One protected entry that exists, including everything in it.

    :param path: absolute
    :param link: whether it is a symbolic link, which cannot be mounted over
    """

    path: str
    why: Protection
    folder: bool
    link: bool


class Linked(NamedTuple):
    """A file with several names.

    :param file: its device and inode
    :param names: how many names it has in all
    """

    file: tuple[int, int]
    names: int


class TakesLong(Exception):
    """An error for a look that found more files than its limit. The next look reads them."""


class Folder:
    """A folder as it was when it was last read.

    :ivar relative: the path from the tree's root; empty for the root itself
    :ivar files: names of entries that are neither folders nor links
    :ivar pipes: those of them that are FIFOs
    :ivar linked: those of them with several names
    :ivar repository: whether it is a git directory, by its name or its contents
    :ivar closed: whether it cannot be read, or lies too deep, so its contents are unknown. If the system refused to
        read it, the next look tries again
    """

    __slots__ = (
        "_ends",
        "_entries",
        "_numbers",
        "closed",
        "ctime",
        "files",
        "folders",
        "inode",
        "judged",
        "linked",
        "links",
        "path",
        "pipes",
        "protected",
        "relative",
        "repository",
        "within",
    )

    def __init__(self, path: str, relative: str, within: bool) -> None:
        self.path = path
        self.relative = relative
        self.within = within
        self.inode = self.ctime = -1
        self.files: tuple[str, ...] = ()
        self.pipes: tuple[str, ...] = ()
        self.linked: dict[str, Linked] = {}
        self._numbers: dict[str, int] = {}
        self.folders: tuple[str, ...] = ()
        self.links: tuple[str, ...] = ()
        self._ends: tuple[tuple[str, str], ...] = ()
        self.protected: tuple[Protected, ...] = ()
        self.repository = False
        self.closed = False
        self.judged: dict[Hashable, tuple[str, ...]] = {}
        self._entries: object = None

    def child(self, name: str) -> tuple[str, str]:
        """Return the absolute path of an entry, and its path relative to the root."""
        return f"{self.path.rstrip('/')}/{name}", f"{self.relative}/{name}" if self.relative else name

    def taken(self, found: os.stat_result, now_ns: int) -> None:
        """Record the status of the folder before it is read.

        :param now_ns: the clock before that: a later change of the folder gets a time that is not older
        """
        ctime = found.st_ctime_ns
        tick = _TICK_NS if ctime % 1_000_000_000 else _COARSE_TICK_NS
        self.inode = found.st_ino
        self.ctime = ctime if ctime < now_ns - tick else -1

    def read(self, most: int = sys.maxsize) -> bool:
        """Read the entries, and return whether they have changed.

        :param most: how many there may be
        :raises TakesLong: if there are more; the next look reads the folder again
        :raises ToolError: ``unavailable`` if the system is short of a resource; the next look reads the folder again
        """
        before = self._entries
        files: list[str] = []
        folders: list[str] = []
        links: list[str] = []
        ends: list[tuple[str, str]] = []
        pipes: list[str] = []
        linked: dict[str, Linked] = {}
        numbers: dict[str, int] = {}
        self.closed = self.relative.count("/") >= DEEPEST or len(os.fsencode(self.path)) > LONGEST
        if not self.closed:
            try:
                with os.scandir(self.path) as entries:
                    for number_of, entry in enumerate(entries):
                        if number_of >= most:
                            self.ctime = -1
                            raise TakesLong
                        if entry.is_symlink():
                            links.append(entry.name)
                            ends.append((entry.name, _end(entry.path)))
                        elif entry.is_dir(follow_symlinks=False):
                            folders.append(entry.name)
                        else:
                            name = entry.name
                            files.append(name)
                            numbers[name] = number = entry.inode()
                            # A name with the same file as before need not be asked about, which is the slowest step.
                            # Inode numbers are reused, so the number of a file can belong to a FIFO now.
                            plain_file = entry.is_file(follow_symlinks=False)
                            if name in self.linked or self._numbers.get(name) != number or not plain_file:
                                _note_file(entry, linked, pipes)
            except OSError as error:
                self.ctime = -1
                check_passing(error, self.path)
                self.closed = True
                files, folders, links, ends, pipes, linked, numbers = [], [], [], [], [], {}, {}
        self.files, self.folders, self.links = tuple(sorted(files)), tuple(sorted(folders)), tuple(sorted(links))
        self.pipes, self.linked, self._numbers = tuple(sorted(pipes)), linked, numbers
        self._ends = tuple(sorted(ends))
        self._entries = (self.files, self.folders, self._ends, self.closed, self.pipes, linked)
        if self._entries == before:
            return False
        self.judged.clear()
        self.repository = self._is_repository()
        self.protected = () if self.within else tuple(self._protected())
        return True

    def recount(self) -> bool:
        """Read again how many names each file has, and return whether any number has changed."""
        linked: dict[str, Linked] = {}
        for name in self.files:
            try:
                found = os.lstat(f"{self.path}/{name}")
            except OSError:
                continue  # it was removed, so the folder has changed too
            if found.st_nlink > 1 and stat.S_ISREG(found.st_mode):
                linked[name] = Linked((found.st_dev, found.st_ino), found.st_nlink)
        if linked == self.linked:
            return False
        self.linked = linked
        self._entries = (self.files, self.folders, self._ends, self.closed, self.pipes, linked)
        return True

    def _is_repository(self) -> bool:
        """Return whether git takes it for a repository.

        That is a folder with a HEAD, and either ``objects`` and ``refs`` or ``commondir``.
        """
        if plain(self.relative.rpartition("/")[2]) == ".git":
            return True
        if "HEAD" not in self.files and "HEAD" not in self.links:
            return False
        folders = {*self.folders, *self.links}
        return {"objects", "refs"} <= folders or "commondir" in self.files or "commondir" in self.links

    def _protected(self) -> Iterator[Protected]:
        led = any(leads_on(part) for part in self.relative.split("/"))
        for names, folder, link in ((self.files, False, False), (self.folders, True, False), (self.links, False, True)):
            for name in names:
                why = GIT_NAMES.get(name) if self.repository else None
                if why is None and (led or suspicious(name)):
                    why = protection(self.child(name)[1])
                if why is not None and not (folder and plain(name) == ".git"):
                    yield Protected(self.child(name)[0], why, folder, link)


class Tree:
    """A folder with all its subfolders, cached between looks. Not thread-safe.

    :param root: absolute, canonical
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self.version = 0
        """Grows with each look that found changes."""
        self.order: list[Folder] = []
        """Every folder, the outer before the inner."""
        self.files = 0
        """The number of files in all folders."""
        self.most = sys.maxsize
        """How many files a look may read. Evaluating a file takes longer than reading it."""
        self._left = self.most
        self._counted_ns = 0
        self._strangers: set[tuple[int, int]] = set()
        self._linked: tuple[int, dict[tuple[int, int], tuple[list[str], int]]] | None = None
        self._unfinished = True
        """Whether the last look failed, so that its changes count in the next one."""

    def look(self) -> int:
        """Update the tree and return its version.

        A folder that cannot be read stays in the tree as closed, so that it does not count as empty.

        :raises TakesLong: if there are more than :attr:`most` files
        :raises ToolError: ``unavailable`` if the system is short of a resource; the next look finds the same changes
        """
        changed, self._unfinished, self._left = self._unfinished, True, self.most
        if not self.order:
            self.order = [Folder(self.root, "", False)]
        status, now_ns, gone = os.lstat, time.time_ns(), False
        for folder in self.order:
            try:
                found = status(folder.path)
            except OSError as error:
                check_passing(error, folder.path)
                found = None
            else:
                if found.st_ctime_ns == folder.ctime and found.st_ino == folder.inode:
                    continue
            if found is None or not stat.S_ISDIR(found.st_mode):
                gone = changed = True
                folder.inode = -1
                continue
            folder.taken(found, now_ns)
            changed = self._read(folder) or changed
        if changed:
            self._arrange(gone=gone)
            self.files = sum(len(folder.files) for folder in self.order)
            if self.files > self.most:
                raise TakesLong
            self.version += 1
        self._count_names(now_ns, changed=changed)
        self._unfinished = False
        return self.version

    def _read(self, folder: Folder) -> bool:
        changed = folder.read(self._left)
        self._left -= len(folder.files)
        return changed

    def _count_names(self, now_ns: int, *, changed: bool) -> None:
        """Find the files with several names, as of now or of a moment ago.

        A folder does not change when a file in it gets another name elsewhere. So all files are read again if one turns
        up with more names than are known, and otherwise every :data:`RECOUNT_NS`.
        """
        if changed:
            known = self._names()
            strangers = {file for file, (paths, names) in known.items() if len(paths) < names}
            again = bool(strangers - self._strangers) and self._counted_ns > 0
            self._strangers = strangers
        else:
            again = False
        if self._counted_ns == 0:  # all were just read
            self._counted_ns = now_ns
        elif again or now_ns - self._counted_ns > RECOUNT_NS:
            self._counted_ns = now_ns
            recounted = [folder.recount() for folder in self.order]
            self.version += any(recounted)

    def _names(self) -> dict[tuple[int, int], tuple[list[str], int]]:
        found: dict[tuple[int, int], tuple[list[str], int]] = {}
        for folder in self.order:
            for name, linked in folder.linked.items():
                found.setdefault(linked.file, ([], linked.names))[0].append(folder.child(name)[0])
        return found

    def linked(self) -> Mapping[tuple[int, int], tuple[Sequence[str], int]]:
        """Return the files with several names: their paths in this tree, and how many names they have in all."""
        if self._linked is None or self._linked[0] != self.version:
            self._linked = self.version, self._names()
        return self._linked[1]

    def _arrange(self, *, gone: bool) -> None:
        """Rebuild the order of folders: read new ones and drop missing ones."""
        known = {folder.path: folder for folder in self.order if not (gone and folder.inode == -1)}
        root = known.get(self.root)
        order: list[Folder] = []
        waiting = [] if root is None else [root]
        while waiting:
            folder = waiting.pop()
            order.append(folder)
            # A rule may open a folder that requires approval; its unwritable entries stay protected.
            within = {entry.path for entry in folder.protected if entry.folder and not entry.why.asks}
            for name in reversed(folder.folders):
                path, relative = folder.child(name)
                inside = folder.within or path in within
                below = known.get(path)
                if below is None or below.within != inside:
                    below = Folder(path, relative, inside)
                    self._first(below)
                waiting.append(below)
        self.order = order

    def _first(self, folder: Folder) -> None:
        now_ns = time.time_ns()
        try:
            folder.taken(os.lstat(folder.path), now_ns)
        except OSError as error:
            check_passing(error, folder.path)
            folder.closed = True
            return
        self._read(folder)

    def protected(self) -> dict[str, Protected]:
        """Return the protected entries as of the last look, by path."""
        return {entry.path: entry for folder in self.order for entry in folder.protected}

    def repositories(self) -> list[str]:
        """Return the absolute paths of the git directories as of the last look."""
        return [folder.path for folder in self.order if folder.repository]

    def closed(self) -> list[str]:
        """Return the folders that could not be read."""
        return [folder.path for folder in self.order if folder.closed]

    def judged(self, named: Callable[[str], bool], key: Hashable) -> Iterator[tuple[Folder, tuple[str, ...]]]:
        """Yield each folder with the names in it for which ``named`` is true, cached by ``key``.

        A folder is also named if everything in it would be.

        :param named: takes an absolute path
        """
        for folder in self.order:
            found = folder.judged.get(key)
            if found is None:
                below = folder.path.rstrip("/") + "/"
                found = tuple(
                    [name for name in folder.files if named(below + name)]
                    + [name for name in folder.folders if named(below + name) or named(f"{below}{name}/{_ANY_NAME}")]
                )
                if len(folder.judged) >= _MOST_JUDGES:
                    folder.judged.pop(next(iter(folder.judged)))
                folder.judged[key] = found
            yield folder, found


def _end(link: str) -> str:
    """Return the target of a link; empty if it is missing, because then its folder is read again."""
    try:
        return os.readlink(link)  # noqa: PTH115 - for each link of a folder
    except OSError:
        return ""


def _note_file(entry: os.DirEntry[str], linked: dict[str, Linked], pipes: list[str]) -> None:
    try:
        found = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return  # it was removed, so the folder has changed and is read again
    if stat.S_ISFIFO(found.st_mode):
        pipes.append(entry.name)
    elif found.st_nlink > 1 and stat.S_ISREG(found.st_mode):
        linked[entry.name] = Linked((found.st_dev, found.st_ino), found.st_nlink)


def check_passing(error: OSError, path: str) -> None:
    """Raise an error if ``error`` only means that the system is short of a resource.

    :raises ToolError: ``unavailable`` in that case
    """
    if error.errno in PASSING:
        raise ToolError(
            f"`{path}` cannot be read: {error.strerror}. The system or this process is out of descriptors or "
            "memory. Call again. If it fails again, ask the user to raise the limit (ulimit -n), or to stop "
            "what uses them.",
            kind="unavailable",
        ) from error
