"""Atomic replacement of one file's content, also across a crash, and private copies of hard-linked files.

The new content goes to a temporary file in the same folder, becomes durable there, and takes the name in one step. The
displaced file is checked after that step. If it is not the expected one (another process wrote in the meantime), the step
is undone and reported as a conflict, so no edit is lost silently.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import secrets
import stat
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from handrail.contract.doors.files import Located
from handrail.contract.errors import ToolError
from handrail.runtime.files.beneath import FOLDER, READ, explained, not_regular, open_root, regular
from handrail.runtime.files.roots import BENEATH, NO_MAGICLINKS, NO_SYMLINKS, openat2
from handrail.runtime.guard.quarantine import open_parent
from handrail.sandbox.view.tree import Tree, check_passing

MAX_EDIT_BYTES = 16 * 1024 * 1024
"""The largest file that can be replaced. Larger files can be read."""

_STRICT = BENEATH | NO_SYMLINKS | NO_MAGICLINKS
_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2
_libc = ctypes.CDLL(None, use_errno=True)
_turns = [threading.Lock() for _ in range(256)]
"""Locks for the last step of a write: writers of one name take turns; several names share a lock."""


@dataclass(frozen=True, slots=True)
class Replaced:
    """The result of writing a file: whether it is new, its old content and its new hash."""

    created: bool
    before: bytes | None
    sha256: str


def replace(located: Located, data: bytes, over: bytes | Literal["new", "seen"], seen: str | None) -> Replaced:
    """Write ``data`` to the file that ``located`` names, creating parent folders.

    :param over: the expected old content: these bytes, ``"new"`` (no file), or ``"seen"`` (no file, or content with the
        hash ``seen``)
    :raises ToolError: ``conflict`` if the file is not as expected, ``denied`` if it is not a regular file with one name
    :raises OSError: with the kernel's error
    """
    path = located.inner
    if path == ".":
        raise ToolError(f"`{located.shown}` is a folder. Name a file to write.", kind="invalid_input")
    parent_path, _, name = path.rpartition("/")
    assert located.root is not None
    root = open_root(located.root)
    try:
        parent = _open_parent(root, parent_path, located)
    finally:
        os.close(root)
    try:
        before = _current(parent, name, located)
        _agree(located, before, over, seen)
        _put(parent, name, data, before, located)
        os.fsync(parent)
    finally:
        os.close(parent)
    return Replaced(before is None, before.data if before else None, hashlib.sha256(data).hexdigest())


@dataclass(frozen=True, slots=True)
class _Current:
    """The content and status of a file as it is now."""

    data: bytes
    stat: os.stat_result


def read_whole(descriptor: int, size: int) -> bytes:
    """Read all bytes of an open regular file, at most one more than :data:`MAX_EDIT_BYTES`."""
    parts: list[bytes] = []
    offset = 0
    while offset <= MAX_EDIT_BYTES:
        part = os.pread(descriptor, max(size - offset, 0) + 1 if offset <= size else 1 << 16, offset)
        if not part:
            break
        parts.append(part)
        offset += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _open_parent(root: int, path: str, located: Located) -> int:
    """Open the folder of a file, creating missing folders one by one, each below the one before."""
    try:
        return openat2(root, path or ".", FOLDER, _STRICT)
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise explained(error, located, "opening the folder of") from error
    here = os.dup(root)
    try:
        for name in path.split("/"):
            try:
                below = openat2(here, name, FOLDER, _STRICT)
            except FileNotFoundError:
                with contextlib.suppress(FileExistsError):  # another process has just made it
                    os.mkdir(name, 0o777, dir_fd=here)
                below = openat2(here, name, FOLDER, _STRICT)
                _adopt(below, os.fstat(here))
            os.close(here)
            here = below
    except BaseException:
        os.close(here)
        raise
    # The walk began at an O_PATH handle; fsync needs one that is open for reading.
    return here


def _current(parent: int, name: str, located: Located) -> _Current | None:
    """Read the file that has a name now; None if there is none."""
    try:
        descriptor = openat2(parent, name, READ, _STRICT)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ToolError(
                f"`{located.shown}` is now a symbolic link. List the folder again, then retry.", kind="conflict"
            ) from error
        if error.errno == errno.ENXIO:
            raise not_regular(located) from error
        raise
    try:
        found = regular(descriptor, located)
        if found.st_nlink > 1:
            raise ToolError(
                f"`{located.shown}` has {found.st_nlink} hard links, so a write could change a file outside the "
                "workspace. Copy it to a new name, and write the copy.",
                kind="denied",
            )
        data = read_whole(descriptor, found.st_size) if found.st_size <= MAX_EDIT_BYTES else b""
        if max(found.st_size, len(data)) > MAX_EDIT_BYTES:
            raise ToolError(
                f"`{located.shown}` has {found.st_size} bytes. Files over {MAX_EDIT_BYTES >> 20} MiB can be read, "
                "but not edited. Change it with a program instead.",
                kind="limit",
            )
        return _Current(data, found)
    finally:
        os.close(descriptor)


def _agree(located: Located, before: _Current | None, over: bytes | Literal["new", "seen"], seen: str | None) -> None:
    if over == "new":
        if before is not None:
            raise ToolError(
                f"`{located.shown}` already exists, but a new file was expected. Read it first, or use another name.",
                kind="conflict",
            )
    elif over == "seen":
        if before is not None:
            check_seen(located, before.data, seen)
    elif before is None:
        raise ToolError(
            f"`{located.shown}` no longer exists. It existed when you read it. List the folder again.", kind="conflict"
        )
    elif before.data != over:
        raise changed(located)


def check_seen(located: Located, data: bytes, seen: str | None) -> None:
    """Check that ``data`` is the content that the session saw last.

    :raises ToolError: ``conflict`` if it is not
    """
    if seen is None:
        raise ToolError(f"`{located.shown}` has not been read in this session. Read it, then write.", kind="conflict")
    if hashlib.sha256(data).hexdigest() != seen:
        raise changed(located)


def changed(located: Located) -> ToolError:
    """Return the error for a file that has changed since it was read."""
    return ToolError(
        f"`{located.shown}` has changed since it was read. Nothing was written. Read it again and repeat the edit.",
        kind="conflict",
    )


def _put(parent: int, name: str, data: bytes, before: _Current | None, located: Located) -> None:
    temporary = f".handrail-{secrets.token_hex(8)}.tmp"
    mode = 0o644 if before is None else 0o600
    descriptor = os.open(
        temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=parent
    )
    try:
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            if before is not None:
                _adopt(descriptor, before.stat)
                os.fchmod(descriptor, stat.S_IMODE(before.stat.st_mode) & 0o777)
            else:
                _adopt(descriptor, os.fstat(parent))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        folder = os.fstat(parent)
        with _turns[hash((folder.st_dev, folder.st_ino, name)) % len(_turns)]:
            if before is None:
                _claim(parent, temporary, name, located)
            else:
                _exchange(parent, temporary, name, before, located)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=parent)


def _adopt(descriptor: int, like: os.stat_result) -> None:
    """Give a file made by root the owner of the file it replaces or of its folder.

    So a workspace stays its user's.
    """
    if os.geteuid() == 0 and (like.st_uid, like.st_gid) != (0, 0):
        with contextlib.suppress(PermissionError):
            os.fchown(descriptor, like.st_uid, like.st_gid)


def _claim(parent: int, temporary: str, name: str, located: Located) -> None:
    """Give the temporary file a name that no file has."""
    try:
        if not _rename(parent, temporary, name, _RENAME_NOREPLACE):
            os.link(temporary, name, src_dir_fd=parent, dst_dir_fd=parent, follow_symlinks=False)
    except FileExistsError as error:
        raise ToolError(
            f"`{located.shown}` was just created by another process. Read it first, then write.", kind="conflict"
        ) from error


def _exchange(parent: int, temporary: str, name: str, before: _Current, located: Located) -> None:
    """Give the temporary file the name of a file that still is exactly ``before``."""
    now = _current(parent, name, located)
    if now is None or now.data != before.data:
        raise changed(located)
    try:
        exchanged = _rename(parent, temporary, name, _RENAME_EXCHANGE)
    except FileNotFoundError as error:
        raise changed(located) from error
    if not exchanged:  # a file system without exchange: the check above must suffice
        os.rename(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
        return
    try:
        displaced = _current(parent, temporary, located)
        same = displaced is not None and displaced.data == before.data
    except (ToolError, OSError):
        same = False
    if not same:
        _rename(parent, temporary, name, _RENAME_EXCHANGE)
        raise changed(located)


def exchange(parent: int, one: str, other: str) -> bool:
    """Exchange two names in a folder; return False if the file system cannot do that.

    :raises OSError: with the kernel's error
    """
    return _rename(parent, one, other, _RENAME_EXCHANGE)


def _rename(parent: int, old: str, new: str, flags: int) -> bool:
    """Call renameat2 within one folder; return False if the system does not support ``flags``.

    :raises OSError: with the kernel's error
    """
    call = getattr(_libc, "renameat2", None)
    if call is None:
        return False
    if call(parent, os.fsencode(old), parent, os.fsencode(new), flags) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), new)


# Private copies of workspace files that have further names outside the workspace (hard links).
#
# Package managers (pnpm, uv, bun) link the files of a project to one store, so a program that writes such a file in
# place changes every other project. So before a program starts, a copy with the same content, permissions and times
# takes the file's name in the workspace. All copies are durable before the first takes its name. A copy replaces only
# the file that it was made from, so an edit in between is not lost.

MOST_FILES = 20_000
MOST_BYTES = 256 * 1024 * 1024
"""The limit of one start. Files beyond it are read-only for that program, and copied before later ones."""
_AT_ONCE = 500
_PIECE = 8 * 1024 * 1024
_CLONE = 0x40049409
"""FICLONE: share the blocks of another file until one of the files is written, if the file system can."""
_SHORT = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EROFS))


def shared(trees: Sequence[Tree]) -> Mapping[str, tuple[int, int]]:
    """Return the paths in these trees whose files also have names outside, with device and inode."""
    if not any(tree.linked() for tree in trees):
        return {}
    known: dict[tuple[int, int], tuple[set[str], int]] = {}
    for tree in trees:
        for file, (paths, names) in tree.linked().items():
            known.setdefault(file, (set(), names))[0].update(paths)
    return {path: file for file, (paths, names) in known.items() if len(paths) < names for path in sorted(paths)}


def make_private(root: str, files: Iterable[tuple[str, tuple[int, int]]]) -> set[str]:
    """Replace each of these paths below ``root`` by a copy of its file, and return the paths done.

    Paths of the same file get one copy each.

    :raises ToolError: ``unavailable`` if the system is short of descriptors or memory
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
    """How many files and bytes may still be copied."""

    files: int
    bytes: int


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy that does not have its final name yet.

    :param parent: the descriptor of the folder
    :param seen: the state of the file while it was copied
    """

    path: str
    parent: int
    name: str
    temporary: str
    seen: tuple[int, ...]

    def drop(self) -> None:
        """Remove the temporary file and close the folder."""
        with contextlib.suppress(OSError):
            os.unlink(self.temporary, dir_fd=self.parent)
        os.close(self.parent)


def _copied(root: str, path: str, file: tuple[int, int], room: _Room) -> _Copy | None:
    """Copy one file next to itself; None if it changed, or does not fit into the limits.

    :raises OSError: if it cannot be copied
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
    """Make the copies durable, give each its name, and yield the paths that were replaced."""
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
