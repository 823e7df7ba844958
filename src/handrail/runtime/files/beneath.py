"""Opening of files below a root by the kernel's own path resolution, and the choice of an agent's further roots.

``RESOLVE_BENEATH`` keeps ``..`` and absolute links inside. ``RESOLVE_NO_MAGICLINKS`` closes ``/proc/self/root``
and similar links. ``RESOLVE_NO_SYMLINKS`` makes the opened file exactly the one whose canonical path the policy checked: a
link swapped in meanwhile fails instead of being followed.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from handrail.contract.agent import AgentRoot
from handrail.contract.doors.files import Located
from handrail.contract.errors import ToolError
from handrail.runtime.files.roots import (
    AT_FDCWD,
    BENEATH,
    HANDLE,
    NO_MAGICLINKS,
    NO_SYMLINKS,
    FurtherRoots,
    is_beneath,
    lost_root,
    openat2,
)
from handrail.store.folders import too_broad

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
        return openat2(root, located.inner, flags, BENEATH | NO_SYMLINKS | NO_MAGICLINKS | resolve)
    finally:
        os.close(root)


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


# An agent's further roots: real folders, separate from everything that Handrail itself relies on.

_OF_THE_SYSTEM = ("/proc", "/sys", "/dev", "/run", "/boot", "/etc", "/usr/local/etc")
"""What a sandbox masks in parts or makes anew; a mount over it would undo that."""


def further_roots(
    roots: Sequence[AgentRoot], workspace: str, apart: Iterable[str | Path]
) -> tuple[FurtherRoots, list[tuple[str, str]]]:
    """The folders that ``roots`` name now, and ``(place, problem)`` for each that cannot be one.

    A writable root in the workspace adds nothing to it and is left out.

    :param workspace: canonical
    :param apart: folders that no root may meet: Handrail's state and configuration
    """
    own = [os.path.realpath(folder) for folder in apart]
    found: dict[str, Literal["read", "write"]] = {}
    faults: list[tuple[str, str]] = []
    for index, root in enumerate(roots):
        real = _real(root)
        problem = _problem(root, real, workspace, own)
        if problem is not None:
            faults.append((f"roots[{index}].path", problem))
        elif not is_beneath(real, workspace) and found.setdefault(real, root.access) != root.access:
            faults.append((f"roots[{index}].access", f"{real} is named twice, once to read and once to write"))
    faults += _inside_writable(roots, found)
    readable = (real for real, access in found.items() if access == "read")
    writable = (real for real, access in found.items() if access == "write")
    return FurtherRoots(tuple(readable), tuple(writable)), faults


def _problem(root: AgentRoot, real: str, workspace: str, own: Sequence[str]) -> str | None:
    if not real or not Path(real).is_dir():
        return f"there is no folder {root.path!r}; make it, or leave the root out"
    if what := too_broad(Path(real)):
        return f"{root.path!r} is {what}; name a project's folder"
    for folder in own:
        if _meet(real, folder):
            return f"{root.path!r} meets {folder}, where Handrail keeps its own; name a folder apart from it"
    for folder in _OF_THE_SYSTEM:
        if _meet(real, folder):
            return f"{root.path!r} meets {folder}, which a sandbox guards; name a folder apart from it"
    if root.access == "read" and is_beneath(real, workspace):
        return (
            f"{root.path!r} lies in the workspace {workspace}, which may be written; a rule such as "
            "'deny fs.write FOLDER/**' keeps a part of it from being changed"
        )
    if root.access == "write" and real != workspace and is_beneath(workspace, real):
        return f"{root.path!r} holds the workspace {workspace}; open that folder as the workspace instead"
    return None


def _inside_writable(
    roots: Sequence[AgentRoot], found: dict[str, Literal["read", "write"]]
) -> Iterator[tuple[str, str]]:
    """A folder to be read only, in one that may be written, would not stay as it is."""
    for index, root in enumerate(roots):
        real = _real(root)
        if found.get(real) != "read":
            continue
        for other, access in found.items():
            if access == "write" and other != real and is_beneath(real, other):
                yield (
                    f"roots[{index}].access",
                    f"{root.path!r} lies in {other}, which may be written; write 'write' here too",
                )


def _real(root: AgentRoot) -> str:
    """The canonical path; empty for a text that can name none."""
    try:
        return os.path.realpath(Path(root.path).expanduser())
    except (OSError, RuntimeError, ValueError):
        return ""


def _meet(one: str, other: str) -> bool:
    return is_beneath(one, other) or is_beneath(other, one)
