"""Replacing one file's content at once: everybody sees the old bytes or the new ones, also after a crash.

The new content goes to a temporary file in the same folder, is made durable there, and takes the name in one
step. What it displaces is looked at again after that step: if it is not what was expected (somebody else wrote
in the meantime), the step is undone and reported as a conflict, so no edit is lost silently.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import secrets
import stat
import threading
from dataclasses import dataclass
from typing import Literal

from handrail.contract.errors import ToolError
from handrail.runtime.files.beneath import FOLDER, READ, explained, not_regular, open_root, regular, relative
from handrail.runtime.files.openat2 import BENEATH, NO_MAGICLINKS, NO_SYMLINKS, openat2
from handrail.runtime.files.roots import Located

MAX_EDIT_BYTES = 16 * 1024 * 1024
"""The largest file that can be replaced; larger ones can be read."""

_STRICT = BENEATH | NO_SYMLINKS | NO_MAGICLINKS
_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2
_libc = ctypes.CDLL(None, use_errno=True)
_turns = [threading.Lock() for _ in range(256)]
"""Writers of one name in this process take turns for the last step; many names share a lock."""


@dataclass(frozen=True, slots=True)
class Replaced:
    created: bool
    before: bytes | None
    sha256: str


def replace(located: Located, data: bytes, over: bytes | Literal["new", "seen"], seen: str | None) -> Replaced:
    """Put ``data`` where ``located`` points, creating parent folders.

    :param over: what must be there: these bytes, ``"new"`` (nothing), or ``"seen"`` (nothing, or content of hash ``seen``)
    :raises ToolError: ``conflict`` when something else is there, ``denied`` for what is no regular file of one name
    :raises OSError: as the kernel answers
    """
    path = relative(located)
    if path == ".":
        raise ToolError(f"{located.shown} is a folder; name a file to write", kind="invalid_input")
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
    data: bytes
    stat: os.stat_result


def read_whole(descriptor: int, size: int) -> bytes:
    """All bytes of an open regular file, at most one more than :data:`MAX_EDIT_BYTES`."""
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
    """The folder the file goes to; missing ones are made one by one, each beneath the one before."""
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
                with contextlib.suppress(FileExistsError):  # somebody else made it just now
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
    """What has the name now, or None."""
    try:
        descriptor = openat2(parent, name, READ, _STRICT)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ToolError(
                f"{located.shown} is a symbolic link now; look at the folder again", kind="conflict"
            ) from error
        if error.errno == errno.ENXIO:
            raise not_regular(located) from error
        raise
    try:
        found = regular(descriptor, located)
        if found.st_nlink > 1:
            raise ToolError(
                f"{located.shown} has {found.st_nlink} hard links, so writing it could change a file outside the workspace; "
                "copy it under a new name",
                kind="denied",
            )
        data = read_whole(descriptor, found.st_size) if found.st_size <= MAX_EDIT_BYTES else b""
        if max(found.st_size, len(data)) > MAX_EDIT_BYTES:
            raise ToolError(
                f"{located.shown} has {found.st_size} bytes; files above {MAX_EDIT_BYTES >> 20} MiB are read but not edited",
                kind="limit",
            )
        return _Current(data, found)
    finally:
        os.close(descriptor)


def _agree(located: Located, before: _Current | None, over: bytes | Literal["new", "seen"], seen: str | None) -> None:
    if over == "new":
        if before is not None:
            raise ToolError(f"{located.shown} exists already; a new file was expected", kind="conflict")
    elif over == "seen":
        if before is not None:
            check_seen(located, before.data, seen)
    elif before is None:
        raise ToolError(f"{located.shown} is gone; it was there when it was read", kind="conflict")
    elif before.data != over:
        raise changed(located)


def check_seen(located: Located, data: bytes, seen: str | None) -> None:
    """:raises ToolError: ``conflict`` unless ``data`` is what the session saw last."""
    if seen is None:
        raise ToolError(
            f"{located.shown} exists and has not been read in this session; read it first, then write", kind="conflict"
        )
    if hashlib.sha256(data).hexdigest() != seen:
        raise changed(located)


def changed(located: Located) -> ToolError:
    return ToolError(
        f"{located.shown} has changed since it was read; nothing was written. Read it again and repeat the edit",
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
    """Give a file made by root the owner of what it replaces or lies in: a workspace stays its user's."""
    if os.geteuid() == 0 and (like.st_uid, like.st_gid) != (0, 0):
        with contextlib.suppress(PermissionError):
            os.fchown(descriptor, like.st_uid, like.st_gid)


def _claim(parent: int, temporary: str, name: str, located: Located) -> None:
    """Take a name that nothing has."""
    try:
        if not _rename(parent, temporary, name, _RENAME_NOREPLACE):
            os.link(temporary, name, src_dir_fd=parent, dst_dir_fd=parent, follow_symlinks=False)
    except FileExistsError as error:
        raise ToolError(f"{located.shown} was created by somebody else just now", kind="conflict") from error


def _exchange(parent: int, temporary: str, name: str, before: _Current, located: Located) -> None:
    """Take the name of exactly ``before``."""
    now = _current(parent, name, located)
    if now is None or now.data != before.data:
        raise changed(located)
    try:
        exchanged = _rename(parent, temporary, name, _RENAME_EXCHANGE)
    except FileNotFoundError as error:
        raise changed(located) from error
    if not exchanged:  # a file system without the exchange: the look above has to do
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
    """Let two names in a folder change places; False where the system or file system cannot.

    :raises OSError: as the kernel answers
    """
    return _rename(parent, one, other, _RENAME_EXCHANGE)


def _rename(parent: int, old: str, new: str, flags: int) -> bool:
    """renameat2 within one folder; False where the system or file system does not know ``flags``."""
    call = getattr(_libc, "renameat2", None)
    if call is None:
        return False
    if call(parent, os.fsencode(old), parent, os.fsencode(new), flags) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), new)
