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
from typing import NamedTuple

from handrail.contract.errors import ToolError
from handrail.contract.protected.path_protection import (
    GIT_NAMES,
    PathProtection,
    extract_path_from_git_folder,
    find_path_protection,
    has_path_dependent_entries,
    needs_full_path_check,
    normalise_file_name,
)
from handrail.contract.struct import Struct
from handrail.origins.listed_paths import can_respelling_bypass_mounts, forget_folder, keeps_folder_times

_TICK_NS = 25_000_000
"""Longer than a tick of any kernel's coarse clock, which file systems take their times from and which lags by a tick.
"""
_COARSE_TICK_NS = 2_100_000_000
"""The same for a file system with whole seconds."""
MAX_DEPTH = 128
MAX_PATH_BYTES = 3_800
"""The limit of a folder's path in bytes, so that its entries still have valid paths (4,095). Deeper folders are not
read: programs do not see them, and new ones are moved away."""
SHORTAGE_ERRORS = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN, errno.EINTR))
"""Errors that mean that the system is short of a resource. They say nothing about the folder."""
RECOUNT_NS = 300_000_000_000
"""How soon a new second name elsewhere is noticed at the latest, if nothing in this tree changes."""
_MAX_CACHED_MATCHES = 8
_ANY_NAME = "~handrail-any-name~"
"""Stands for a name that no pattern was written for."""


class ProtectedEntry(Struct, frozen=True):
    """One protected entry that exists, including everything in it.

    :param path: absolute
    :param link: whether it is a symbolic link, which cannot be mounted over
    """

    path: str
    why: PathProtection
    folder: bool
    link: bool


class HardLinkedFile(NamedTuple):
    """A file with several names.

    :param file: its device and inode
    :param names: how many names it has in all
    """

    file: tuple[int, int]
    names: int


class FolderScanTooLong(Exception):
    """An error for a look that found more files than its limit. The next look reads them."""


class CachedFolder:
    """A folder as it was when it was last read.

    :ivar relative: the path from the tree's root; empty for the root itself
    :ivar compared: the path by which its entries are protected. It begins with ``.git`` in a git directory of any name
    :ivar files: names of entries that are neither folders nor links
    :ivar pipes: those of them that are FIFOs
    :ivar linked: those of them with several names
    :ivar link_targets: the links with their targets
    :ivar is_repository: whether it is a git directory, by its name or its contents
    :ivar is_closed: whether it cannot be read, or lies too deep, so its contents are unknown. If the system refused to
        read it, the next look tries again
    """

    __slots__ = (
        "_entries",
        "_numbers",
        "compared",
        "ctime",
        "device",
        "files",
        "folders",
        "inode",
        "is_closed",
        "is_in_protected",
        "is_repository",
        "link_targets",
        "linked",
        "links",
        "matches",
        "path",
        "pipes",
        "protected",
        "relative",
    )

    def __init__(self, path: str, relative: str, within: bool, compared: str) -> None:
        self.path = path
        self.compared = compared
        self.relative = relative
        self.is_in_protected = within
        self.inode = self.ctime = self.device = -1
        self.files: tuple[str, ...] = ()
        self.pipes: tuple[str, ...] = ()
        self.linked: dict[str, HardLinkedFile] = {}
        self._numbers: dict[str, int] = {}
        self.folders: tuple[str, ...] = ()
        self.links: tuple[str, ...] = ()
        self.link_targets: tuple[tuple[str, str], ...] = ()
        self.protected: tuple[ProtectedEntry, ...] = ()
        self.is_repository = False
        self.is_closed = False
        self.matches: dict[Hashable, tuple[str, ...]] = {}
        self._entries: object = None

    def get_child_paths(self, name: str) -> tuple[str, str]:
        """Return the absolute path of an entry, and its path relative to the root."""
        return f"{self.path.rstrip('/')}/{name}", f"{self.relative}/{name}" if self.relative else name

    def get_child_protection_path(self, name: str) -> str:
        """Return the path by which an entry is protected."""
        compared = ".git" if self.is_repository else self.compared
        return f"{compared}/{name}" if compared else name

    def record_folder_status(self, found: os.stat_result, now_ns: int) -> None:
        """Record the status of the folder before it is read.

        :param now_ns: the clock before that: a later change of the folder gets a time that is not older
        """
        ctime = found.st_ctime_ns
        # A time without a fraction comes from a file system with whole seconds, where a later change can have the same
        # time.
        tick = _TICK_NS if ctime % 1_000_000_000 else _COARSE_TICK_NS
        # Another folder has taken the path, so nothing that is cached for the old one holds.
        if self.inode != -1 and (self.device, self.inode) != (found.st_dev, found.st_ino):
            forget_folder(self.path)
        self.device, self.inode = found.st_dev, found.st_ino
        is_settled = ctime < now_ns - tick and keeps_folder_times(self.path, found.st_dev)
        self.ctime = ctime if is_settled else -1

    def read(self, most: int = sys.maxsize) -> bool:
        """Read the entries, and return whether they have changed.

        :param most: how many there may be
        :raises FolderScanTooLong: if there are more; the next look reads the folder again
        :raises ToolError: ``unavailable`` if the system is short of a resource; the next look reads the folder again
        """
        before = self._entries
        files: list[str] = []
        folders: list[str] = []
        links: list[str] = []
        ends: list[tuple[str, str]] = []
        pipes: list[str] = []
        linked: dict[str, HardLinkedFile] = {}
        numbers: dict[str, int] = {}
        # A folder that is too deep counts as closed instead of empty: its unknown contents are then hidden as a whole.
        self.is_closed = self.relative.count("/") >= MAX_DEPTH or len(os.fsencode(self.path)) > MAX_PATH_BYTES
        if not self.is_closed:
            try:
                with os.scandir(self.path) as entries:
                    for number_of, entry in enumerate(entries):
                        if number_of >= most:
                            self.ctime = -1
                            raise FolderScanTooLong
                        if entry.is_symlink():
                            links.append(entry.name)
                            ends.append((entry.name, _read_link(entry.path)))
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
                raise_if_resource_shortage(error, self.path)
                self.is_closed = True
                files, folders, links, ends, pipes, linked, numbers = [], [], [], [], [], {}, {}
        self.files, self.folders, self.links = tuple(sorted(files)), tuple(sorted(folders)), tuple(sorted(links))
        self.pipes, self.linked, self._numbers = tuple(sorted(pipes)), linked, numbers
        self.link_targets = tuple(sorted(ends))
        # Everything that decides about mounts is in this tuple, so equal tuples mean that the mounts are still right.
        self._entries = (self.files, self.folders, self.link_targets, self.is_closed, self.pipes, linked)
        if self._entries == before:
            return False
        # The cached matches belong to the former names.
        self.matches.clear()
        self.is_repository = self._is_repository()
        self.protected = () if self.is_in_protected else tuple(self._find_protected())
        return True

    def recount_hard_links(self) -> bool:
        """Read again how many names each file has, and return whether any number has changed."""
        linked: dict[str, HardLinkedFile] = {}
        for name in self.files:
            try:
                found = os.lstat(f"{self.path}/{name}")
            except OSError:
                continue  # it was removed, so the folder has changed too
            if found.st_nlink > 1 and stat.S_ISREG(found.st_mode):
                linked[name] = HardLinkedFile((found.st_dev, found.st_ino), found.st_nlink)
        # Only the number of names can change without a change of the folder itself.
        if linked == self.linked:
            return False
        self.linked = linked
        self._entries = (self.files, self.folders, self.link_targets, self.is_closed, self.pipes, linked)
        return True

    def _is_repository(self) -> bool:
        """Return whether git takes it for a repository.

        That is a folder with a HEAD, and either ``objects`` and ``refs`` or ``commondir``.
        """
        if normalise_file_name(self.compared.rpartition("/")[2]) == ".git":
            return True
        # The cheapest test comes first, since most folders have no HEAD.
        if "HEAD" not in self.files and "HEAD" not in self.links:
            return False
        folders = {*self.folders, *self.links}
        return {"objects", "refs"} <= folders or "commondir" in self.files or "commondir" in self.links

    def _find_protected(self) -> Iterator[ProtectedEntry]:
        led = any(has_path_dependent_entries(part) for part in self.compared.split("/"))
        for names, folder, link in ((self.files, False, False), (self.folders, True, False), (self.links, False, True)):
            for name in names:
                why = GIT_NAMES.get(name) if self.is_repository else None
                if why is None and (led or needs_full_path_check(name)):
                    why = find_path_protection(self.get_child_protection_path(name))
                # A .git folder is not protected as a whole, because git must write in it. Its protected entries are
                # found below.
                if why is not None and not (folder and normalise_file_name(name) == ".git"):
                    yield ProtectedEntry(self.get_child_paths(name)[0], why, folder, link)


class FolderTree:
    """A folder with all its subfolders, cached between looks. Not thread-safe.

    :param root: absolute, canonical
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self.version = 0
        """Grows with each look that found changes."""
        self.order: list[CachedFolder] = []
        """Every folder, the outer before the inner."""
        self.file_count = 0
        """The number of files in all folders."""
        self.can_respelling_bypass_mounts = False
        """Whether programs reach some path below a mount by another spelling. There each protected entry counts by itself."""
        self.max_files = sys.maxsize
        """How many files a look may read. Evaluating a file takes longer than reading it."""
        self._left = self.max_files
        self._counted_ns = 0
        self._outside_files: set[tuple[int, int]] = set()
        self._linked: tuple[int, dict[tuple[int, int], tuple[list[str], int]]] | None = None
        self._unfinished = True
        """Whether the last look failed, so that its changes count in the next one."""

    def refresh(self) -> int:
        """Update the tree and return its version.

        A folder that cannot be read stays in the tree as closed, so that it does not count as empty.

        :raises FolderScanTooLong: if there are more than :attr:`most` files
        :raises ToolError: ``unavailable`` if the system is short of a resource; the next look finds the same changes
        """
        # If the last look failed halfway, its changes are in the tree but were not reported. They count as changes now.
        changed, self._unfinished, self._left = self._unfinished, True, self.max_files
        if not self.order:
            self.order = [CachedFolder(self.root, "", False, extract_path_from_git_folder(self.root).rstrip("/"))]
        status, now_ns, gone = os.lstat, time.time_ns(), False
        for folder in self.order:
            try:
                found = status(folder.path)
            except OSError as error:
                raise_if_resource_shortage(error, folder.path)
                found = None
            else:
                # The change time of a folder covers its list of names. Most folders are done with one lstat.
                if found.st_ctime_ns == folder.ctime and found.st_ino == folder.inode:
                    continue
            # The folder may have become a link or a file. It must not be followed, so it leaves the tree.
            if found is None or not stat.S_ISDIR(found.st_mode):
                gone = changed = True
                folder.inode = -1
                continue
            folder.record_folder_status(found, now_ns)
            changed = self._read_folder(folder) or changed
        if changed:
            self._rebuild_order(gone=gone)
            self.file_count = sum(len(folder.files) for folder in self.order)
            if self.file_count > self.max_files:
                raise FolderScanTooLong
            self.version += 1
        self._find_multiply_named_files(now_ns, changed=changed)
        self._unfinished = False
        return self.version

    def _read_folder(self, folder: CachedFolder) -> bool:
        changed = folder.read(self._left)
        self._left -= len(folder.files)
        return changed

    def _find_multiply_named_files(self, now_ns: int, *, changed: bool) -> None:
        """Find the files with several names, as of now or of a moment ago.

        A folder does not change when a file in it gets another name elsewhere. So all files are read again if one turns
        up with more names than are known, and otherwise every :data:`RECOUNT_NS`.
        """
        if changed:
            known = self._collect_names()
            strangers = {file for file, (paths, names) in known.items() if len(paths) < names}
            # A file that has more names than this tree knows is reachable from outside. Its other name may have been
            # made for a file here too.
            again = bool(strangers - self._outside_files) and self._counted_ns > 0
            self._outside_files = strangers
        else:
            again = False
        if self._counted_ns == 0:  # all were just read
            self._counted_ns = now_ns
        elif again or now_ns - self._counted_ns > RECOUNT_NS:
            self._counted_ns = now_ns
            recounted = [folder.recount_hard_links() for folder in self.order]
            self.version += any(recounted)

    def _collect_names(self) -> dict[tuple[int, int], tuple[list[str], int]]:
        found: dict[tuple[int, int], tuple[list[str], int]] = {}
        for folder in self.order:
            for name, linked in folder.linked.items():
                found.setdefault(linked.file, ([], linked.names))[0].append(folder.get_child_paths(name)[0])
        return found

    def list_hard_linked_files(self) -> Mapping[tuple[int, int], tuple[Sequence[str], int]]:
        """Return the files with several names: their paths in this tree, and how many names they have in all."""
        if self._linked is None or self._linked[0] != self.version:
            self._linked = self.version, self._collect_names()
        return self._linked[1]

    def _rebuild_order(self, *, gone: bool) -> None:
        """Rebuild the order of folders: read new ones and drop missing ones."""
        known = {folder.path: folder for folder in self.order if not (gone and folder.inode == -1)}
        root = known.get(self.root)
        avoidable: dict[int, bool] = {}
        order: list[CachedFolder] = []
        waiting = [] if root is None else [root]
        while waiting:
            folder = waiting.pop()
            order.append(folder)
            if folder.device not in avoidable:
                # The answer belongs to the file system, and a workspace can contain several.
                avoidable[folder.device] = can_respelling_bypass_mounts(folder.path)
            # A rule may open a folder that requires approval; its unwritable entries stay protected.
            whole = () if avoidable[folder.device] else folder.protected
            within = {entry.path for entry in whole if entry.folder and not entry.why.requires_approval}
            # The stack reverses the order, so that the outer folder always comes before the inner ones.
            for name in reversed(folder.folders):
                path, relative = folder.get_child_paths(name)
                inside = folder.is_in_protected or path in within
                below = known.get(path)
                compared = folder.get_child_protection_path(name)
                # The same path can be protected in another way now, for example after its parent became a repository.
                if below is None or below.is_in_protected != inside or below.compared != compared:
                    below = CachedFolder(path, relative, inside, compared)
                    self._read_first(below)
                waiting.append(below)
        self.order = order
        self.can_respelling_bypass_mounts = any(avoidable.values())

    def _read_first(self, folder: CachedFolder) -> None:
        now_ns = time.time_ns()
        try:
            folder.record_folder_status(os.lstat(folder.path), now_ns)
        except OSError as error:
            raise_if_resource_shortage(error, folder.path)
            folder.is_closed = True
            return
        self._read_folder(folder)

    def get_protected_entries(self) -> dict[str, ProtectedEntry]:
        """Return the protected entries as of the last look, by path."""
        return {entry.path: entry for folder in self.order for entry in folder.protected}

    def list_git_directories(self) -> list[str]:
        """Return the absolute paths of the git directories as of the last look."""
        return [folder.path for folder in self.order if folder.is_repository]

    def list_unreadable_folders(self) -> list[str]:
        """Return the folders that could not be read."""
        return [folder.path for folder in self.order if folder.is_closed]

    def find_matching_entries(
        self, named: Callable[[str], bool], key: Hashable
    ) -> Iterator[tuple[CachedFolder, tuple[str, ...]]]:
        """Yield each folder with the names in it for which ``named`` is true, cached by ``key``.

        A folder is also named if everything in it would be.

        :param named: takes an absolute path
        """
        for folder in self.order:
            found = folder.matches.get(key)
            if found is None:
                below = folder.path.rstrip("/") + "/"
                found = tuple(
                    [name for name in folder.files if named(below + name)]
                    + [name for name in folder.folders if named(below + name) or named(f"{below}{name}/{_ANY_NAME}")]
                )
                # Each profile has its own key. The oldest is dropped, so that many profiles do not fill the memory.
                if len(folder.matches) >= _MAX_CACHED_MATCHES:
                    folder.matches.pop(next(iter(folder.matches)))
                folder.matches[key] = found
            yield folder, found


def _read_link(link: str) -> str:
    """Return the target of a link; empty if it is missing, because then its folder is read again."""
    try:
        return os.readlink(link)  # noqa: PTH115 - for each link of a folder
    except OSError:
        return ""


def _note_file(entry: os.DirEntry[str], linked: dict[str, HardLinkedFile], pipes: list[str]) -> None:
    try:
        found = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return  # it was removed, so the folder has changed and is read again
    if stat.S_ISFIFO(found.st_mode):
        pipes.append(entry.name)
    elif found.st_nlink > 1 and stat.S_ISREG(found.st_mode):
        linked[entry.name] = HardLinkedFile((found.st_dev, found.st_ino), found.st_nlink)


def raise_if_resource_shortage(error: OSError, path: str) -> None:
    """Raise an error if ``error`` only means that the system is short of a resource.

    :raises ToolError: ``unavailable`` in that case
    """
    if error.errno in SHORTAGE_ERRORS:
        raise ToolError(
            f"`{path}` cannot be read: {error.strerror}. The system or this process is out of descriptors or "
            "memory. Call again. If it fails again, ask the user to raise the limit (ulimit -n), or to stop "
            "what uses them.",
            kind="unavailable",
        ) from error
