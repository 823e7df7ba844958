"""Files as they were when a program started, and whether they are still those files when it has ended.

A file that is mounted over cannot be written by the program. The mount ends, however, when a process outside of the
sandbox gives the file's name to another file (``rename``) or removes it: git and most editors replace files that way.
From then on the program writes what it finds under that name. So each such file is compared when the program has
ended. As long as it is the same file, the mount was on it all the time.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import stat
import struct
import time
from dataclasses import dataclass
from typing import Literal

from handrail.runtime.files.beneath import READ, open_root
from handrail.runtime.files.openat2 import AT_FDCWD, BENEATH, NO_MAGICLINKS, NO_SYMLINKS, openat2
from handrail.runtime.guard.gitconfig import MAX_CONFIG_BYTES
from handrail.runtime.guard.quarantine import open_parent
from handrail.sandbox.view.tree import check_passing

MAX_KEPT_BYTES = 32 * 1024 * 1024
"""Content kept of all files of one folder that programs work in; a file beyond it is compared, not put back."""
_TICK_NS = 2_100_000_000
"""Longer than a tick of any file system's clock: a file that changed so recently may change again unseen."""
_STRICT = BENEATH | NO_SYMLINKS | NO_MAGICLINKS
_libc = ctypes.CDLL(None, use_errno=True)
_BORN, _BORN_AT, _STATX_BYTES, _NO_FOLLOW = 0x800, 80, 256, 0x100

Fate = Literal["same", "edited", "replaced", "gone"]


@dataclass(frozen=True, slots=True)
class Kept:
    """The content of a plain file."""

    data: bytes
    mode: int
    owner: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Original:
    """One path as it was.

    :param identity: what :func:`os.lstat` said of it, as far as that changes with the file and its content
    :param born: when the file was made; None where the file system does not say
    :param settled: the file was old enough for ``identity`` to change with any later write
    :param kept: its content; None for a folder, and for what is no plain file or too long
    """

    identity: tuple[int, ...]
    born: int | None
    folder: bool
    links: int
    settled: bool
    kept: Kept | None


class Originals:
    """The files of one folder that programs work in, read again only when they have changed. For one thread at a time."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._known: dict[str, Original] = {}
        self._bytes = 0

    def take(self, path: str) -> Original | None:
        """``path`` as it is now; None where nothing is there."""
        try:
            status = os.lstat(path)
        except OSError:
            self._forget(path)
            return None
        known = self._known.get(path)
        identity = _identity(status)
        if known is not None and known.settled and known.identity == identity:
            return known
        self._forget(path)
        folder = stat.S_ISDIR(status.st_mode)
        kept = None if folder or self._bytes >= MAX_KEPT_BYTES else read_plain(self._root, path, any_links=True)
        original = Original(
            identity,
            _birth(path),
            folder,
            status.st_nlink,
            folder or status.st_ctime_ns < time.time_ns() - _TICK_NS,
            kept,
        )
        self._known[path] = original
        self._bytes += 0 if kept is None else len(kept.data)
        return original

    def retain(self, paths: set[str]) -> None:
        """Forget all but ``paths``."""
        for path in [path for path in self._known if path not in paths]:
            self._forget(path)

    @property
    def count(self) -> int:
        return len(self._known)

    def fate(self, path: str, original: Original) -> Fate:
        """What became of ``path`` since.

        ``edited`` is the same file with other content: nothing in the sandbox can have written it, since the mount stays
        on the file and it has no second name. ``replaced`` is another file, or one that could be written by another name.
        """
        try:
            status = os.lstat(path)
        except OSError:
            return "gone"
        identity = _identity(status)
        if original.folder:
            same = identity[:3] == original.identity[:3] and _birth(path) == original.born
            return "same" if same else "replaced"
        if identity == original.identity and original.settled:
            return "same"
        kept = original.kept
        if kept is not None and stat.S_ISREG(status.st_mode) and status.st_size == len(kept.data):
            now = read_plain(self._root, path, any_links=True)
            if now is not None and now.data == kept.data:
                return "same"
        if identity == original.identity and kept is None:
            return "same"  # too long to be read: as well as can be said
        same_file = identity[:3] == original.identity[:3] and original.born is not None
        alone = status.st_nlink == original.links == 1
        return "edited" if same_file and alone and _birth(path) == original.born else "replaced"

    def identify(self, path: str) -> tuple[tuple[int, ...], int | None] | None:
        """What file or folder is at ``path``, and when it was made; None where nothing is."""
        try:
            status = os.lstat(path)
        except OSError:
            return None
        return _identity(status)[:3], _birth(path)

    def _forget(self, path: str) -> None:
        known = self._known.pop(path, None)
        if known is not None and known.kept is not None:
            self._bytes -= len(known.kept.data)


def read_plain(root: str, path: str, *, any_links: bool = False) -> Kept | None:
    """The content of a plain file, not too long and with one name; None for everything else. Never waits for a FIFO.

    :param any_links: also of a file that has several names
    :raises ToolError: ``unavailable`` where the system is short of descriptors or memory
    """
    try:
        top = open_root(root)
    except OSError as error:
        check_passing(error, path)
        return None
    try:
        relative = path[len(root.rstrip("/")) + 1 :]
        descriptor = openat2(top, relative, READ | os.O_NOFOLLOW, _STRICT)
    except OSError as error:
        check_passing(error, path)
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
        return Kept(data, stat.S_IMODE(status.st_mode), (status.st_uid, status.st_gid))
    except OSError:
        return None
    finally:
        os.close(descriptor)


def restore(root: str, path: str, before: Kept) -> None:
    """Put back what was there, in one step.

    :raises OSError: where that cannot be done
    """
    parent = open_parent(root, path)
    if parent is None:
        raise FileNotFoundError(path)
    temporary = f".handrail-{secrets.token_hex(8)}.tmp"
    try:
        descriptor = os.open(
            temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=parent
        )
        try:
            rest = memoryview(before.data)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            with contextlib.suppress(PermissionError):
                os.fchown(descriptor, *before.owner)
            os.fchmod(descriptor, before.mode)
        finally:
            os.close(descriptor)
        os.rename(temporary, path.rpartition("/")[2], src_dir_fd=parent, dst_dir_fd=parent)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=parent)
        os.close(parent)


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return (
        status.st_dev,
        status.st_ino,
        stat.S_IFMT(status.st_mode),
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
    )


def _birth(path: str) -> int | None:
    """When the file was made, in nanoseconds: it tells a file from a later one that was given the same number."""
    call = getattr(_libc, "statx", None)
    if call is None:
        return None
    answer = ctypes.create_string_buffer(_STATX_BYTES)
    if call(AT_FDCWD, os.fsencode(path), _NO_FOLLOW, _BORN, answer) != 0:
        return None
    if not struct.unpack_from("=I", answer.raw, 0)[0] & _BORN:
        return None
    seconds, nanoseconds = struct.unpack_from("=qI", answer.raw, _BORN_AT)
    return seconds * 1_000_000_000 + nanoseconds
