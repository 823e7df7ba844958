"""The kernel's own path resolution (openat2), called by ctypes."""

from __future__ import annotations

import ctypes
import errno
import os
import sys

NO_MAGICLINKS = 0x02
NO_SYMLINKS = 0x04
BENEATH = 0x08
CACHED = 0x20
"""Fail with EAGAIN rather than wait for a disk."""

HANDLE = getattr(os, "O_PATH", 0) | os.O_CLOEXEC
"""Names a file without opening it: enough to look at what it is."""

_OPENAT2 = 437  # one number on every architecture, as for all calls since 5.1
AT_FDCWD = -100
_ON_LINUX = sys.platform.startswith("linux")
_RACE_RETRIES = 64
"""The kernel answers EAGAIN when something was renamed while it resolved ``..``; the next try usually holds."""


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


_LOOKING = ctypes.byref(_How(HANDLE, 0, NO_SYMLINKS | NO_MAGICLINKS))


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


def canonical(path: str) -> str:
    """What :func:`os.path.realpath` gives for an absolute path without NUL; in one system call where no part of it is a link."""
    if _ON_LINUX and path.startswith("/") and "//" not in path and "/." not in path and not path.endswith("/"):
        raw = os.fsencode(path)
        descriptor = _syscall(_OPENAT2, AT_FDCWD, raw, _LOOKING, ctypes.sizeof(_How))
        if descriptor >= 0:
            os.close(descriptor)
            return path
        if ctypes.get_errno() == errno.ENOENT:  # and what comes before that is no link
            return path
    return os.path.realpath(path)


def openat2_works() -> str | None:
    """Why files cannot be confined here, with the remedy; None where they can."""
    if not _ON_LINUX:
        return f"file tools need Linux's openat2; this is {sys.platform}"
    try:
        os.close(openat2(AT_FDCWD, "/", HANDLE | os.O_DIRECTORY, NO_SYMLINKS | NO_MAGICLINKS))
    except OSError as error:
        if error.errno == errno.ENOSYS:
            return f"the kernel ({os.uname().release}) has no openat2; use Linux 5.6 or newer"
        return f"openat2 is refused here ({error.strerror}); allow it in the container's seccomp profile"
    return None
