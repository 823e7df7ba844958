"""What lies in a folder, known from the last look and looked at again only where it has changed.

Before a program starts and after it has ended, the kernel has to know every protected name and every hidden file of
the workspace. Reading 24,000 names takes a tenth of a second; asking 2,400 folders for their status takes three
milliseconds. A folder's status-change time moves with every entry that is made, removed or renamed in it, and no
program can set it. Where it is so young that another change could fall into the same tick of the clock, the folder is
read again at the next look.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

from handrail.contract.protected import GIT_NAMES, Protection, leads_on, plain, protection, suspicious

_TICK_NS = 25_000_000
"""Longer than one tick of any kernel's coarse clock, which file systems take their times from and which lags by a tick."""
_COARSE_TICK_NS = 2_100_000_000
"""The same where a file system keeps whole seconds."""
_DEEPEST = 128
_LONGEST = 2_048
"""Bytes of a folder's path. What lies deeper is not looked at, and so not shown to programs."""
_MOST_JUDGES = 8
_ANY_NAME = "~handrail-any-name~"
"""Stands for a name that no pattern was written for."""


@dataclass(frozen=True, slots=True)
class Protected:
    """One protected entry that is there, with all that is in it.

    :param path: absolute
    :param link: it is a symbolic link, which cannot be mounted over
    """

    path: str
    why: Protection
    folder: bool
    link: bool


class Folder:
    """One folder as it was when it was last read.

    :ivar relative: to the tree's root; empty for the root itself
    :ivar files: names of what is neither a folder nor a link
    :ivar repository: it is a git directory, by its name or by what is in it
    :ivar closed: it cannot be read, or lies too deep, so nothing is known of what is in it
    """

    __slots__ = (
        "_entries",
        "closed",
        "ctime",
        "files",
        "folders",
        "inode",
        "judged",
        "links",
        "path",
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
        self.folders: tuple[str, ...] = ()
        self.links: tuple[str, ...] = ()
        self.protected: tuple[Protected, ...] = ()
        self.repository = False
        self.closed = False
        self.judged: dict[Hashable, tuple[str, ...]] = {}
        self._entries: object = None

    def child(self, name: str) -> tuple[str, str]:
        """The absolute path of an entry, and its path relative to the root."""
        return f"{self.path.rstrip('/')}/{name}", f"{self.relative}/{name}" if self.relative else name

    def taken(self, found: os.stat_result, now_ns: int) -> None:
        """Remember how it stood before it is read.

        :param now_ns: the clock before that: what changes the folder from then on gives it a time no older
        """
        ctime = found.st_ctime_ns
        tick = _TICK_NS if ctime % 1_000_000_000 else _COARSE_TICK_NS
        self.inode = found.st_ino
        self.ctime = ctime if ctime < now_ns - tick else -1

    def read(self) -> bool:
        """Read its entries. Whether they are others than before."""
        before = self._entries
        files: list[str] = []
        folders: list[str] = []
        links: list[str] = []
        self.closed = self.relative.count("/") >= _DEEPEST or len(os.fsencode(self.path)) > _LONGEST
        if not self.closed:
            try:
                with os.scandir(self.path) as entries:
                    for entry in entries:
                        if entry.is_symlink():
                            links.append(entry.name)
                        elif entry.is_dir(follow_symlinks=False):
                            folders.append(entry.name)
                        else:
                            files.append(entry.name)
            except OSError:
                self.closed = True
                files, folders, links = [], [], []
        self.files, self.folders, self.links = tuple(sorted(files)), tuple(sorted(folders)), tuple(sorted(links))
        self._entries = (self.files, self.folders, self.links, self.closed)
        if self._entries == before:
            return False
        self.judged.clear()
        self.repository = self._is_repository()
        self.protected = () if self.within else tuple(self._protected())
        return True

    def _is_repository(self) -> bool:
        """As git decides it: any folder with a HEAD and both of these, or with a HEAD and word of where they are."""
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
    """All folders beneath one, kept between looks. Not safe for several threads at once.

    :param root: absolute, canonical
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self.version = 0
        """Grows with each look that found other names than the one before."""
        self.order: list[Folder] = []
        """Every folder, the outer before the inner."""

    def look(self) -> int:
        """Bring it up to date. Gives the version.

        A folder that cannot be read stays as a closed one, so that nobody takes it for empty.
        """
        changed = not self.order
        if changed:
            self.order = [Folder(self.root, "", False)]
        status, now_ns, gone = os.lstat, time.time_ns(), False
        for folder in self.order:
            try:
                found = status(folder.path)
            except OSError:
                found = None
            else:
                if found.st_ctime_ns == folder.ctime and found.st_ino == folder.inode:
                    continue
            if found is None or not stat.S_ISDIR(found.st_mode):
                gone = changed = True
                folder.inode = -1
                continue
            folder.taken(found, now_ns)
            changed = folder.read() or changed
        if changed:
            self._arrange(gone=gone)
            self.version += 1
        return self.version

    def _arrange(self, *, gone: bool) -> None:
        """The order anew, with folders read that are new; what is gone falls out of it."""
        known = {folder.path: folder for folder in self.order if not (gone and folder.inode == -1)}
        root = known.get(self.root)
        self.order = []
        waiting = [] if root is None else [root]
        while waiting:
            folder = waiting.pop()
            self.order.append(folder)
            # A rule may open a folder that is asked about, and what is never written in it stays protected.
            within = {entry.path for entry in folder.protected if entry.folder and not entry.why.asks}
            for name in reversed(folder.folders):
                path, relative = folder.child(name)
                inside = folder.within or path in within
                below = known.get(path)
                if below is None or below.within != inside:
                    below = Folder(path, relative, inside)
                    self._first(below)
                waiting.append(below)

    @staticmethod
    def _first(folder: Folder) -> None:
        now_ns = time.time_ns()
        try:
            folder.taken(os.lstat(folder.path), now_ns)
        except OSError:
            folder.closed = True
            return
        folder.read()

    def protected(self) -> dict[str, Protected]:
        """What is there of the protected names, as of the last look."""
        return {entry.path: entry for folder in self.order for entry in folder.protected}

    def repositories(self) -> list[str]:
        """The git directories there are, as of the last look: absolute paths."""
        return [folder.path for folder in self.order if folder.repository]

    def closed(self) -> list[str]:
        """The folders that could not be looked into."""
        return [folder.path for folder in self.order if folder.closed]

    def judged(self, named: Callable[[str], bool], key: Hashable) -> Iterator[tuple[Folder, tuple[str, ...]]]:
        """Each folder with the names in it (files and folders) that ``named`` says yes to, remembered by ``key``.

        A folder is named, too, where whatever is in it would be.

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
