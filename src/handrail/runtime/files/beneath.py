"""Opening files beneath a root by the kernel's own path resolution.

``RESOLVE_BENEATH`` keeps ``..`` and absolute links inside, ``RESOLVE_NO_MAGICLINKS`` closes ``/proc/self/root``
and its like, and ``RESOLVE_NO_SYMLINKS`` makes the opened file the very one whose canonical path was judged: a
link swapped in meanwhile fails instead of being followed.
"""

from __future__ import annotations

import errno
import os
import stat

from handrail.contract.errors import ToolError
from handrail.runtime.files.openat2 import AT_FDCWD, BENEATH, HANDLE, NO_MAGICLINKS, NO_SYMLINKS, openat2
from handrail.runtime.files.roots import Located, lost_root

READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

_OF_THE_WAY = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV)
"""What the kernel answers also where the root itself is what is missing or changed."""


def open_root(root: str, resolve: int = 0) -> int:
    """A descriptor of a canonical root folder; no part of its path may have become a link."""
    return openat2(AT_FDCWD, root, HANDLE | os.O_DIRECTORY, NO_SYMLINKS | NO_MAGICLINKS | resolve)


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
