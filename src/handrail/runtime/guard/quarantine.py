"""Quarantine of files that a program made under protected names, and the originals of mounted-over files.

The program has ended, but others may still write in the workspace. So every step goes from a folder's descriptor to a
name in it and follows no link. Quarantined files get another name, and a git directory among them loses its HEAD, so that a
shell, git or an editor that opens them runs nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import time
from pathlib import Path
from typing import Literal

from handrail.contract.errors import ToolError
from handrail.contract.struct import Struct
from handrail.contract.text.neutralisation import escape_terminal_controls
from handrail.origins.listed_paths import can_respelling_bypass_mounts
from handrail.runtime.files.secure_open import FOLDER_FLAGS, READ_FLAGS, open_root
from handrail.runtime.files.session_roots import BENEATH, NO_MAGICLINKS, NO_SYMLINKS, PATH_FLAGS, openat2
from handrail.runtime.guard.git_config_reader import MAX_CONFIG_BYTES
from handrail.sandbox.view.cached_folder_tree import FolderTree, raise_if_resource_shortage
from handrail.store.project_identity import read_creation_time_ns
from handrail.store.state_folders import remove_tree
from handrail.store.unsupported_operations import ignore_unsupported_operation, make_temporary_name, replace_name

MAX_COPIED_BYTES = 64 * 1024 * 1024
"""If the quarantine is on another file system, content beyond this limit is not kept."""
MAX_COPIED_FILES = 10_000
_DEEPEST_COPIED = 64
_STRICT = BENEATH | NO_SYMLINKS | NO_MAGICLINKS
_SUFFIX = ".quarantined"


class QuarantineFolder:
    """A private folder outside every workspace, for files that programs may not make.

    :param folder: created when it is first needed
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def move_into_quarantine(self, root: str, path: str) -> str | None:
        """Move ``path``, which lies below ``root``, into the quarantine.

        :return: the new path; empty if the file could only be removed; None if it no longer exists
        :raises OSError: if it can neither be moved nor removed
        :raises ToolError: ``unavailable`` if the system is short of descriptors or memory; the file is still there
        """
        if (parent := open_parent(root, path)) is None:
            return None
        name = path.rpartition("/")[2]
        # A separate folder for each file, so that a program cannot predict or occupy the target.
        place = Path(self.folder, secrets.token_hex(4))
        target = place / f"{escape_terminal_controls(name)[:100].replace('/', '_')}{_SUFFIX}"
        try:
            Path(self.folder).mkdir(mode=0o700, parents=True, exist_ok=True)
            place.mkdir(mode=0o700)
            try:
                _rename_out(parent, name, str(target))
            except FileNotFoundError:
                place.rmdir()
                return None
            except OSError as error:
                # The quarantine can be on another file system, where a rename is impossible.
                if error.errno != errno.EXDEV:
                    raise
                _QuarantineCopy(parent, name, target).carry_out()
                _remove(parent, name)
        except OSError:
            # It cannot be kept, for lack of space or permission, but it must not stay either.
            _remove(parent, name)
            return ""
        finally:
            os.close(parent)
        _disarm_quarantined_folder(target)
        return str(target)


def open_parent(root: str, path: str) -> int | None:
    """Open the folder of ``path`` below ``root`` without following a link; None if that fails.

    :raises ToolError: ``unavailable`` if the system is short of descriptors or memory
    """
    relative = path[len(root.rstrip("/")) + 1 :].rpartition("/")[0]
    try:
        top = open_root(root)
    except OSError as error:
        raise_if_resource_shortage(error, path)
        return None
    try:
        return openat2(top, relative or ".", FOLDER_FLAGS, _STRICT)
    except OSError as error:
        raise_if_resource_shortage(error, path)
        if error.errno != errno.EACCES:
            return None
        return _open_after_chmod(top, relative)
    finally:
        os.close(top)


def grant_folder_access_to_owner(root: str, path: str) -> bool:
    """Give the owner of a folder access to it, and return whether that worked."""
    try:
        top = open_root(root)
    except OSError:
        return False
    try:
        return _grant_owner_rights(top, path[len(root.rstrip("/")) + 1 :] or ".")
    finally:
        os.close(top)


def _open_after_chmod(top: int, relative: str) -> int | None:
    parts = relative.split("/")
    for count in range(1, len(parts) + 1):
        _grant_owner_rights(top, "/".join(parts[:count]))
    try:
        return openat2(top, relative, FOLDER_FLAGS, _STRICT)
    except OSError:
        return None


def _grant_owner_rights(folder: int, relative: str) -> bool:
    try:
        there = openat2(folder, relative, PATH_FLAGS | os.O_DIRECTORY, _STRICT)
    except OSError:
        return False
    try:
        mode = stat.S_IMODE(os.fstat(there).st_mode)
        # The rights are not the reason, so another attempt would loop.
        if mode & 0o700 == 0o700:
            return False
        Path(f"/proc/self/fd/{there}").chmod(mode | 0o700)
    except OSError:
        return False
    finally:
        os.close(there)
    return True


def _rename_out(parent: int, name: str, target: str) -> None:
    try:
        os.rename(name, target, src_dir_fd=parent)
    except PermissionError:
        # Moving a folder needs write permission on it and on its parent.
        os.fchmod(parent, stat.S_IMODE(os.fstat(parent).st_mode) | 0o700)
        _grant_owner_rights(parent, name)
        os.rename(name, target, src_dir_fd=parent)


def _remove(parent: int, name: str) -> None:
    """Remove a file or folder.

    :raises OSError: if it still exists
    """
    try:
        os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        return
    except OSError:
        remove_tree(Path(f"/proc/self/fd/{parent}/{name}"))
        with contextlib.suppress(FileNotFoundError):
            os.stat(name, dir_fd=parent, follow_symlinks=False)
            raise OSError(errno.EBUSY, "it could not be removed", name) from None


class _QuarantineCopy:
    """A bounded copy of files and folders to another file system, without links, devices and pipes."""

    def __init__(self, parent: int, name: str, target: Path) -> None:
        self._parent, self._name, self._target = parent, name, target
        self._bytes = MAX_COPIED_BYTES
        self._files = MAX_COPIED_FILES

    def carry_out(self) -> None:
        self._entry(self._parent, self._name, self._target, _DEEPEST_COPIED)

    def _entry(self, parent: int, name: str, target: Path, depth: int) -> None:
        if depth == 0 or self._files <= 0 or self._bytes <= 0:
            return
        self._files -= 1
        try:
            here = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
        except OSError as error:
            raise_if_resource_shortage(error, name)  # without a copy, the file would be lost
            return
        try:
            mode = os.fstat(here).st_mode
            if stat.S_ISDIR(mode):
                target.mkdir(mode=0o700)
                with os.scandir(here) as entries:
                    names = [entry.name for entry in entries]
                for below in names:
                    self._entry(here, below, target / below, depth - 1)
            elif stat.S_ISREG(mode):
                with target.open("xb") as file:
                    while self._bytes > 0 and (piece := os.read(here, min(1 << 20, self._bytes))):
                        self._bytes -= file.write(piece)
        finally:
            os.close(here)


def _disarm_quarantined_folder(place: Path) -> None:
    """Make a quarantined folder harmless: git finds no repository in it, and nothing runs by its name."""
    if place.is_symlink() or not place.is_dir():
        return
    tree = FolderTree(str(place))
    try:
        tree.refresh()
    except ToolError:  # too few descriptors to look into it: close all of it
        place.chmod(0)
        return
    for path in tree.list_unreadable_folders():
        with contextlib.suppress(OSError):
            Path(path).chmod(0)
    for folder in tree.order:
        for name in (*folder.files, *folder.links):
            if name.casefold() == "head":
                with contextlib.suppress(OSError):
                    Path(folder.get_child_paths(name)[0]).rename(folder.get_child_paths(f"{name}{_SUFFIX}")[0])


# Originals: the state of files when a program started, to compare and restore them after its end.
#
# A program cannot write a file that is mounted over. But the mount ends when a process outside the sandbox gives the
# file's name to another file (``rename``) or removes it, as git and most editors do. From then on the program writes
# the file that it finds under that name. So each such file is compared when the program has ended. If it is still the
# same file, the mount was there all the time.

MAX_KEPT_BYTES = 32 * 1024 * 1024
"""The limit of kept content for all files of one folder. Files beyond it are compared, not restored."""
_TICK_NS = 2_100_000_000
"""Longer than a clock tick of any file system. A file that changed more recently may change again unnoticed."""

FileFate = Literal["same", "edited", "replaced", "gone"]


class FileSnapshot(Struct, frozen=True):
    """The content of a regular file, with its mode and owner."""

    data: bytes
    mode: int
    owner: tuple[int, int]


class OriginalPathState(Struct, frozen=True):
    """The state of one path before a program ran.

    :param identity: values of :func:`os.lstat` that change with the file and its content
    :param birth_ns: when the file was made, in nanoseconds; None if the file system does not record it
    :param settled: whether the file was old enough for ``identity`` to change with any later write
    :param snapshot: the content; None for a folder, and for a file that is too long or not regular
    """

    identity: tuple[int, ...]
    birth_ns: int | None
    folder: bool
    links: int
    settled: bool
    snapshot: FileSnapshot | None


class OriginalPathStates:
    """The states of files in one folder, read again only after a change. For one thread at a time.

    :param root: the folder
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._known: dict[str, OriginalPathState] = {}
        self._bytes = 0

    def remember(self, path: str) -> OriginalPathState | None:
        """Return the current state of ``path``; None if nothing is there."""
        try:
            status = os.lstat(path)
        except OSError:
            self._forget(path)
            return None
        known = self._known.get(path)
        identity = _file_identity(status)
        # A file that has just changed can change again within the same clock tick, so its state is not reused.
        if known is not None and known.settled and known.identity == identity:
            return known
        self._forget(path)
        folder = stat.S_ISDIR(status.st_mode)
        kept = (
            None
            if folder or self._bytes >= MAX_KEPT_BYTES
            else snapshot_single_link_file(self._root, path, any_links=True)
        )
        original = OriginalPathState(
            identity,
            read_creation_time_ns(path),
            folder,
            status.st_nlink,
            folder or status.st_ctime_ns < time.time_ns() - _TICK_NS,
            kept,
        )
        self._known[path] = original
        self._bytes += 0 if kept is None else len(kept.data)
        return original

    def forget_all_except(self, paths: set[str]) -> None:
        for path in [path for path in self._known if path not in paths]:
            self._forget(path)

    @property
    def count(self) -> int:
        """The number of remembered paths."""
        return len(self._known)

    def classify_file_change(self, path: str, original: OriginalPathState) -> FileFate:
        """Return what happened to ``path`` since its state was taken.

        ``edited`` is the same file with other content. Nothing in the sandbox can have written it, since the mount
        stays on the file and it has no second name or spelling. ``replaced`` is another file, or one that could be written by
        another name.
        """
        try:
            status = os.lstat(path)
        except OSError:
            return "gone"
        identity = _file_identity(status)
        if original.folder:
            same = identity[:3] == original.identity[:3] and read_creation_time_ns(path) == original.birth_ns
            return "same" if same else "replaced"
        # Without the content, which is too long to read, this is the best available answer.
        if identity == original.identity and (original.settled or original.snapshot is None):
            return "same"
        if original.snapshot is not None and self._has_content(path, status, original.snapshot):
            return "same"
        same_file = identity[:3] == original.identity[:3] and original.birth_ns is not None
        # A second name, or another spelling, would have been a way around the mount.
        alone = status.st_nlink == original.links == 1 and not can_respelling_bypass_mounts(path.rpartition("/")[0])
        return "edited" if same_file and alone and read_creation_time_ns(path) == original.birth_ns else "replaced"

    def _has_content(self, path: str, status: os.stat_result, kept: FileSnapshot) -> bool:
        if not stat.S_ISREG(status.st_mode) or status.st_size != len(kept.data):
            return False
        now = snapshot_single_link_file(self._root, path, any_links=True)
        return now is not None and now.data == kept.data

    def identify(self, path: str) -> tuple[tuple[int, ...], int | None] | None:
        """Return the identity and the birth time of the file or folder at ``path``; None if there is none."""
        try:
            status = os.lstat(path)
        except OSError:
            return None
        return _file_identity(status)[:3], read_creation_time_ns(path)

    def _forget(self, path: str) -> None:
        if (known := self._known.pop(path, None)) is not None and known.snapshot is not None:
            self._bytes -= len(known.snapshot.data)


def snapshot_single_link_file(root: str, path: str, *, any_links: bool = False) -> FileSnapshot | None:
    """Return the content of a short regular file with one name; None for everything else.

    It never waits for a FIFO.

    :param any_links: whether the file may have several names
    :raises ToolError: ``unavailable`` if the system is short of descriptors or memory
    """
    try:
        top = open_root(root)
    except OSError as error:
        raise_if_resource_shortage(error, path)
        return None
    try:
        relative = path[len(root.rstrip("/")) + 1 :]
        descriptor = openat2(top, relative, READ_FLAGS | os.O_NOFOLLOW, _STRICT)
    except OSError as error:
        raise_if_resource_shortage(error, path)
        return None
    finally:
        os.close(top)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_CONFIG_BYTES:
            return None
        if status.st_nlink > 1 and not any_links:
            return None
        data = os.pread(descriptor, MAX_CONFIG_BYTES + 1, 0)
        return FileSnapshot(data, stat.S_IMODE(status.st_mode), (status.st_uid, status.st_gid))
    except OSError:
        return None
    finally:
        os.close(descriptor)


def restore_file(root: str, path: str, before: FileSnapshot) -> None:
    """Restore the earlier content of a file in one step.

    :raises OSError: if that fails
    """
    if (parent := open_parent(root, path)) is None:
        raise FileNotFoundError(path)
    temporary = make_temporary_name()
    try:
        descriptor = os.open(
            temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=parent
        )
        try:
            rest = memoryview(before.data)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            with ignore_unsupported_operation():
                os.fchown(descriptor, *before.owner)
            # The mode is set before the rename, so the file never appears with wider permissions.
            with ignore_unsupported_operation():
                os.fchmod(descriptor, before.mode)
        finally:
            os.close(descriptor)
        replace_name(parent, temporary, path.rpartition("/")[2])
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=parent)
        os.close(parent)


def _file_identity(status: os.stat_result) -> tuple[int, ...]:
    return (
        status.st_dev,
        status.st_ino,
        stat.S_IFMT(status.st_mode),
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
    )
