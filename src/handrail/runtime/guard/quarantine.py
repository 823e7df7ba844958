"""Quarantine: moving away files that a program made under protected names, to where they do no harm.

The program has ended, but others may still write in the workspace: every step goes from a folder's descriptor to a
name in it and follows no link. What is kept carries another name, and a git directory in it has no HEAD any more, so
that whoever looks at it with a shell, git or an editor runs nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path

from handrail.contract.errors import ToolError
from handrail.contract.text.neutral import visible
from handrail.runtime.files.beneath import FOLDER, open_root
from handrail.runtime.files.openat2 import BENEATH, HANDLE, NO_MAGICLINKS, NO_SYMLINKS, openat2
from handrail.sandbox.view.tree import Tree, check_passing
from handrail.store.folders import remove_tree

MAX_COPIED_BYTES = 64 * 1024 * 1024
"""Where the quarantine is on another file system, what goes beyond this is not kept."""
MAX_COPIED_FILES = 10_000
_DEEPEST_COPIED = 64
_STRICT = BENEATH | NO_SYMLINKS | NO_MAGICLINKS
_SUFFIX = ".quarantined"


class Quarantine:
    """A private folder outside of every workspace.

    :param folder: made when it is first needed
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def take(self, root: str, path: str) -> str | None:
        """Move ``path``, which lies beneath ``root``, here. Gives where it is now; None where it is gone already.

        :raises OSError: where it can neither be moved nor removed
        :raises ToolError: ``unavailable`` where the system is short of descriptors or memory; it is still there
        """
        parent = open_parent(root, path)
        if parent is None:
            return None
        name = path.rpartition("/")[2]
        place = Path(self.folder, secrets.token_hex(4))
        target = place / f"{visible(name)[:100].replace('/', '_')}{_SUFFIX}"
        try:
            Path(self.folder).mkdir(mode=0o700, parents=True, exist_ok=True)
            place.mkdir(mode=0o700)
            try:
                _renamed(parent, name, str(target))
            except FileNotFoundError:
                place.rmdir()
                return None
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                _Copy(parent, name, target).carry_out()
                _remove(parent, name)
        except OSError:
            # No room, or no permission, to keep it: it must not stay all the same.
            _remove(parent, name)
            return ""
        finally:
            os.close(parent)
        _disarm(target)
        return str(target)


def open_parent(root: str, path: str) -> int | None:
    """The folder that ``path`` lies in, opened beneath ``root`` without following a link; None where there is none.

    :raises ToolError: ``unavailable`` where the system is short of descriptors or memory
    """
    relative = path[len(root.rstrip("/")) + 1 :].rpartition("/")[0]
    try:
        top = open_root(root)
    except OSError as error:
        check_passing(error, path)
        return None
    try:
        return openat2(top, relative or ".", FOLDER, _STRICT)
    except OSError as error:
        check_passing(error, path)
        if error.errno != errno.EACCES:
            return None
        return _opened_up(top, relative)
    finally:
        os.close(top)


def make_readable(root: str, path: str) -> bool:
    """Give a folder's owner, which is who runs this, the rights to look into it. Whether that could be done."""
    try:
        top = open_root(root)
    except OSError:
        return False
    try:
        return _allow(top, path[len(root.rstrip("/")) + 1 :] or ".")
    finally:
        os.close(top)


def _opened_up(top: int, relative: str) -> int | None:
    parts = relative.split("/")
    for count in range(1, len(parts) + 1):
        _allow(top, "/".join(parts[:count]))
    try:
        return openat2(top, relative, FOLDER, _STRICT)
    except OSError:
        return None


def _allow(folder: int, relative: str) -> bool:
    try:
        there = openat2(folder, relative, HANDLE | os.O_DIRECTORY, _STRICT)
    except OSError:
        return False
    try:
        mode = stat.S_IMODE(os.fstat(there).st_mode)
        if mode & 0o700 == 0o700:
            return False
        Path(f"/proc/self/fd/{there}").chmod(mode | 0o700)
    except OSError:
        return False
    finally:
        os.close(there)
    return True


def _renamed(parent: int, name: str, target: str) -> None:
    try:
        os.rename(name, target, src_dir_fd=parent)
    except PermissionError:
        # A folder is moved only by who may write in it, and in the one that it lies in.
        os.fchmod(parent, stat.S_IMODE(os.fstat(parent).st_mode) | 0o700)
        _allow(parent, name)
        os.rename(name, target, src_dir_fd=parent)


def _remove(parent: int, name: str) -> None:
    """
    :raises OSError: where it is still there
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


class _Copy:
    """A bounded copy of files and folders to another file system. Links, devices and pipes are left out."""

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
            check_passing(error, name)  # what is not copied would be lost
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


def _disarm(place: Path) -> None:
    """Let no git directory in it be taken for one, and nothing in it be run by its name."""
    if place.is_symlink() or not place.is_dir():
        return
    tree = Tree(str(place))
    try:
        tree.look()
    except ToolError:  # too short of descriptors to look: then it is closed whole
        place.chmod(0)
        return
    for path in tree.closed():
        with contextlib.suppress(OSError):
            Path(path).chmod(0)
    for folder in tree.order:
        for name in (*folder.files, *folder.links):
            if name.casefold() == "head":
                with contextlib.suppress(OSError):
                    Path(folder.child(name)[0]).rename(folder.child(f"{name}{_SUFFIX}")[0])
