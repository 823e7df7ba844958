"""Private copies of files in a workspace that have further names outside of it (hard links).

Package managers (pnpm, uv, bun) link the files of a project to one store, so a program that writes such a file in place
changes every other project. So before a program starts, the file's name in the workspace is given to a copy of it, with
the same content, permissions and times. The copies are made durable before the first takes its name, and a name is given
away only while it is that file's: an edit in between is not lost.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from handrail.runtime.files.beneath import READ
from handrail.runtime.files.openat2 import BENEATH, NO_MAGICLINKS, NO_SYMLINKS, openat2
from handrail.runtime.files.replace import exchange
from handrail.runtime.guard.quarantine import open_parent
from handrail.sandbox.view.tree import Tree, check_passing

MOST_FILES = 20_000
MOST_BYTES = 256 * 1024 * 1024
"""Copied before one start. What is beyond is read-only for that program, and copied before the next ones."""
_AT_ONCE = 500
_PIECE = 8 * 1024 * 1024
_CLONE = 0x40049409
"""FICLONE: share the blocks of another file until one of them is written, where the file system can."""
_STRICT = BENEATH | NO_SYMLINKS | NO_MAGICLINKS
_SHORT = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EROFS))
_libc = ctypes.CDLL(None, use_errno=True)


def shared(trees: Sequence[Tree]) -> Mapping[str, tuple[int, int]]:
    """The paths in these trees of files that have names outside of them, each with its device and number."""
    if not any(tree.linked() for tree in trees):
        return {}
    known: dict[tuple[int, int], tuple[set[str], int]] = {}
    for tree in trees:
        for file, (paths, names) in tree.linked().items():
            known.setdefault(file, (set(), names))[0].update(paths)
    return {path: file for file, (paths, names) in known.items() if len(paths) < names for path in sorted(paths)}


def make_private(root: str, files: Iterable[tuple[str, tuple[int, int]]]) -> set[str]:
    """Give each of these paths beneath ``root`` to a copy of its file. Gives those that have one now.

    Paths of the same file get one copy each.

    :raises ToolError: ``unavailable`` where the system is short of descriptors or memory
    """
    done: set[str] = set()
    room = _Room(MOST_FILES, MOST_BYTES)
    batch: list[_Copy] = []
    try:
        for path, file in files:
            if room.files <= 0:
                break
            try:
                copy = _copied(root, path, file, room)
            except OSError as error:
                check_passing(error, path)
                if error.errno in _SHORT:
                    break
                continue
            if copy is not None:
                batch.append(copy)
            if len(batch) >= _AT_ONCE:
                done.update(_taken(batch))
                batch.clear()
        done.update(_taken(batch))
        batch.clear()
    finally:
        for copy in batch:
            copy.drop()
    return done


@dataclass(slots=True)
class _Room:
    files: int
    bytes: int


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy that has not taken its name yet.

    :param parent: the folder's descriptor
    :param seen: what the file was while it was copied
    """

    path: str
    parent: int
    name: str
    temporary: str
    seen: tuple[int, ...]

    def drop(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self.temporary, dir_fd=self.parent)
        os.close(self.parent)


def _copied(root: str, path: str, file: tuple[int, int], room: _Room) -> _Copy | None:
    """
    :raises OSError: where it cannot be copied
    """
    parent = open_parent(root, path)
    if parent is None:
        return None
    name = path.rpartition("/")[2]
    temporary = f".handrail-{secrets.token_hex(8)}.tmp"
    copied = False
    try:
        source = openat2(parent, name, READ | os.O_NOFOLLOW, _STRICT)
        try:
            before = os.fstat(source)
            if not stat.S_ISREG(before.st_mode) or (before.st_dev, before.st_ino) != file or before.st_nlink < 2:
                return None
            if before.st_size > room.bytes:
                return None
            target = os.open(
                temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=parent
            )
            try:
                _copy(source, target, before)
            finally:
                os.close(target)
            if _state(os.fstat(source)) != _state(before):
                return None  # another process writes it now
        finally:
            os.close(source)
        room.files -= 1
        room.bytes -= before.st_size
        copied = True
        return _Copy(path, parent, name, temporary, _state(before))
    finally:
        if not copied:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=parent)
            os.close(parent)


def _copy(source: int, target: int, found: os.stat_result) -> None:
    try:
        fcntl.ioctl(target, _CLONE, source)
    except OSError:
        rest = found.st_size
        while rest > 0 and (count := os.sendfile(target, source, None, min(rest, _PIECE))) > 0:
            rest -= count
    with contextlib.suppress(OSError):
        for attribute in os.listxattr(source):
            if attribute.startswith("user."):
                os.setxattr(target, attribute, os.getxattr(source, attribute))
    if os.geteuid() == 0:
        os.fchown(target, found.st_uid, found.st_gid)
    os.fchmod(target, stat.S_IMODE(found.st_mode))
    os.utime(target, ns=(found.st_atime_ns, found.st_mtime_ns))


def _taken(batch: Sequence[_Copy]) -> Iterator[str]:
    """Make the copies durable, and give each its name. Gives the paths that have one."""
    if not batch:
        return
    device = None
    for copy in batch:
        if copy.seen[0] != device:
            device = copy.seen[0]
            _libc.syncfs(copy.parent)
    for copy in batch:
        try:
            if _takes_name(copy):
                yield copy.path
        except OSError:
            pass  # it stays a shared file, and so is read-only for the program
        finally:
            copy.drop()


def _takes_name(copy: _Copy) -> bool:
    def is_seen(name: str) -> bool:
        return _state(os.stat(name, dir_fd=copy.parent, follow_symlinks=False)) == copy.seen

    if not is_seen(copy.name):
        return False
    if not exchange(copy.parent, copy.temporary, copy.name):
        os.rename(copy.temporary, copy.name, src_dir_fd=copy.parent, dst_dir_fd=copy.parent)
        return True
    found = os.stat(copy.temporary, dir_fd=copy.parent, follow_symlinks=False)
    if _state(found) == copy.seen:
        return True
    exchange(copy.parent, copy.temporary, copy.name)  # another file took the name in between
    return False


def _state(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
