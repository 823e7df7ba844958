"""Opening files beneath a root by the kernel's own path resolution (openat2), called by ctypes.

``RESOLVE_BENEATH`` keeps ``..`` and absolute links inside, ``RESOLVE_NO_MAGICLINKS`` closes ``/proc/self/root``
and its like, and ``RESOLVE_NO_SYMLINKS`` makes the opened file the very one whose canonical path was judged: a
link swapped in meanwhile fails instead of being followed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import sys

from handrail.contract.errors import ToolError
from handrail.runtime.roots import Located, lost_root

NO_MAGICLINKS = 0x02
NO_SYMLINKS = 0x04
BENEATH = 0x08
CACHED = 0x20
"""Fail with EAGAIN rather than wait for a disk."""

READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
HANDLE = getattr(os, "O_PATH", 0) | os.O_CLOEXEC
"""Names a file without opening it: enough to look at what it is."""

_OPENAT2 = 437  # one number on every architecture, as for all calls since 5.1
_AT_FDCWD = -100
_RACE_RETRIES = 64
"""The kernel answers EAGAIN when something was renamed while it resolved ``..``; the next try usually holds."""


_OF_THE_WAY = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV)
"""What the kernel answers also where the root itself is what is missing or changed."""


class _How(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = (
    ctypes.c_long,
    ctypes.c_long,
    ctypes.c_char_p,
    ctypes.POINTER(_How),
    ctypes.c_size_t,
)


def openat2(folder: int, path: str, flags: int, resolve: int, mode: int = 0) -> int:
    """One openat2 call.

    :param folder: the descriptor that ``path`` is relative to
    :raises OSError: as the kernel answers; EAGAIN only with :data:`CACHED`
    """
    how = _How(flags, mode, resolve)
    raw = os.fsencode(path)
    for _ in range(_RACE_RETRIES):
        descriptor = _syscall(_OPENAT2, folder, raw, ctypes.byref(how), ctypes.sizeof(how))
        if descriptor >= 0:
            return descriptor
        number = ctypes.get_errno()
        if number == errno.EINTR or (number == errno.EAGAIN and not resolve & CACHED):
            continue
        raise OSError(number, os.strerror(number), path)
    raise OSError(errno.ELOOP, "the path keeps changing while it is resolved", path)


def openat2_works() -> str | None:
    """Why files cannot be confined here, with the remedy; None where they can."""
    if not sys.platform.startswith("linux"):
        return f"file tools need Linux's openat2; this is {sys.platform}"
    try:
        os.close(openat2(_AT_FDCWD, "/", HANDLE | os.O_DIRECTORY, NO_SYMLINKS | NO_MAGICLINKS))
    except OSError as error:
        if error.errno == errno.ENOSYS:
            return f"the kernel ({os.uname().release}) has no openat2; use Linux 5.6 or newer"
        return f"openat2 is refused here ({error.strerror}); allow it in the container's seccomp profile"
    return None


def open_root(root: str, resolve: int = 0) -> int:
    """A descriptor of a canonical root folder; no part of its path may have become a link."""
    return openat2(_AT_FDCWD, root, HANDLE | os.O_DIRECTORY, NO_SYMLINKS | NO_MAGICLINKS | resolve)


def open_beneath(located: Located, flags: int, resolve: int = 0) -> int:
    """Open what ``located`` names, links refused all the way.

    :param located: a place inside a root
    :raises OSError: as the kernel answers
    """
    assert located.root is not None
    root = open_root(located.root, resolve)
    try:
        return openat2(root, relative(located), flags, BENEATH | NO_SYMLINKS | NO_MAGICLINKS | resolve)
    finally:
        os.close(root)


def relative(located: Located) -> str:
    """The path from the root to the file; ``.`` for the root itself."""
    assert located.root is not None
    return located.absolute[len(located.root) :].strip("/") or "."


def regular(descriptor: int, located: Located) -> os.stat_result:
    """What the open descriptor is; refuses whatever is no regular file.

    :raises ToolError: ``invalid_input`` for a folder, ``denied`` for a device, FIFO or socket
    """
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode):
        return found
    if stat.S_ISDIR(found.st_mode):
        raise ToolError(f"{located.shown} is a folder; a file was expected", kind="invalid_input")
    raise not_regular(located)


def not_regular(located: Located) -> ToolError:
    return ToolError(
        f"{located.shown} is a device, FIFO or socket; only regular files are read and written", kind="denied"
    )


def explained(error: OSError, located: Located, doing: str) -> ToolError:
    """The model's version of what the kernel answered."""
    shown = located.shown
    if error.errno in _OF_THE_WAY and located.root is not None and (lost := lost_root(located.root)) is not None:
        return lost
    match error.errno:
        case errno.ENOENT:
            return ToolError(f"there is no {shown}", kind="failed")
        case errno.ENOTDIR:
            return ToolError(f"{shown}: a part of this path is a file, not a folder", kind="failed")
        case errno.EISDIR:
            return ToolError(f"{shown} is a folder; a file was expected", kind="invalid_input")
        case errno.ELOOP | errno.EXDEV:
            return ToolError(
                f"{shown} is a loop of links, or was changed into a link while it was opened; look at the folder again",
                kind="conflict",
            )
        case errno.ENXIO | errno.ENODEV:
            return not_regular(located)
        case errno.ENAMETOOLONG:
            return ToolError(f"{shown}: this path is too long for the file system", kind="invalid_input")
        case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
            return ToolError(f"{doing} {shown}: {os.strerror(error.errno)}; nothing was changed", kind="limit")
        case errno.EEXIST:
            return ToolError(f"{shown} exists already", kind="conflict")
        case _:
            return ToolError(f"{doing} {shown}: {error.strerror or error}", kind="failed")
