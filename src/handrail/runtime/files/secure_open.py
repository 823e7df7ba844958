"""Opening of files below a root by the kernel's own path resolution, and the choice of an agent's further roots.

``RESOLVE_BENEATH`` keeps ``..`` and absolute links inside. ``RESOLVE_NO_MAGICLINKS`` closes ``/proc/self/root``
and similar links. ``RESOLVE_NO_SYMLINKS`` makes the opened file exactly the one whose canonical path the policy checked: a
link swapped in meanwhile fails instead of being followed.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from handrail.contract.agent_manifest import AgentAdditionalRoot
from handrail.contract.errors import ToolError
from handrail.contract.services.file_services import ResolvedPath
from handrail.origins.listed_paths import canonicalize_path_spelling
from handrail.runtime.files.session_roots import (
    AT_FDCWD,
    BENEATH,
    NO_MAGICLINKS,
    NO_SYMLINKS,
    PATH_FLAGS,
    FurtherRoots,
    find_lost_root_error,
    is_beneath,
    openat2,
)
from handrail.store.state_folders import explain_too_broad_workspace

READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

_PATH_ERRORS = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV)
"""Error numbers that the kernel also returns if the root itself is missing or has changed."""


def open_root(root: str, resolve: int = 0) -> int:
    """Open a canonical root folder and return its descriptor.

    No part of the path may be a link.

    :raises OSError: if the folder is missing, or a part of the path is a link
    """
    return openat2(AT_FDCWD, root, PATH_FLAGS | os.O_DIRECTORY, NO_SYMLINKS | NO_MAGICLINKS | resolve)


def open_beneath(located: ResolvedPath, flags: int, resolve: int = 0) -> int:
    """Open the file that ``located`` names below its root, without following any link.

    :param located: a place inside a root
    :raises OSError: with the kernel's error
    """
    assert located.root is not None
    root = open_root(located.root, resolve)
    try:
        return openat2(root, located.relative_path, flags, BENEATH | NO_SYMLINKS | NO_MAGICLINKS | resolve)
    finally:
        os.close(root)


def require_regular_file(descriptor: int, located: ResolvedPath) -> os.stat_result:
    """Return the status of an open regular file, and refuse everything else.

    :raises ToolError: ``invalid_input`` for a folder, ``denied`` for a device, FIFO or socket
    """
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode):
        return found
    if stat.S_ISDIR(found.st_mode):
        raise ToolError(
            f"`{located.display_path}` is a folder. A file was expected. Name a file in it.", kind="invalid_input"
        )
    raise build_not_regular_file_error(located)


def build_not_regular_file_error(located: ResolvedPath) -> ToolError:
    return ToolError(
        f"`{located.display_path}` is a device, FIFO or socket. Only regular files can be read or written. Use another file.",
        kind="denied",
    )


def translate_os_error_for_model(error: OSError, located: ResolvedPath, doing: str) -> ToolError:
    """Return the error for the model that corresponds to an error of the kernel.

    :param doing: the operation as a gerund, such as ``reading``
    """
    shown = located.display_path
    if (
        error.errno in _PATH_ERRORS
        and located.root is not None
        and (lost := find_lost_root_error(located.root)) is not None
    ):
        return lost
    match error.errno:
        case errno.ENOENT:
            return ToolError(f"`{shown}` does not exist. Check the path, or list the folder with glob.", kind="failed")
        case errno.ENOTDIR:
            return ToolError(f"A part of the path `{shown}` is a file, not a folder. Check the path.", kind="failed")
        case errno.EISDIR:
            return ToolError(f"`{shown}` is a folder. A file was expected. Name a file in it.", kind="invalid_input")
        case errno.ELOOP | errno.EXDEV:
            return ToolError(
                f"`{shown}` is a loop of links, or became a link while it was opened. List the folder again, then "
                "retry.",
                kind="conflict",
            )
        case errno.ENXIO | errno.ENODEV:
            return build_not_regular_file_error(located)
        case errno.ENAMETOOLONG:
            return ToolError(
                f"The path `{shown}` is too long for the file system. Use a shorter path.", kind="invalid_input"
            )
        case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
            return ToolError(
                f"{doing.capitalize()} `{shown}` failed: {os.strerror(error.errno)}. Nothing was changed. Free "
                "some space, or write less.",
                kind="limit",
            )
        case errno.EROFS:
            return ToolError(
                f"{doing.capitalize()} `{shown}` failed: the file system is read-only. Nothing was changed. Use a folder on "
                "another one, or ask the user to mount it writable.",
                kind="failed",
            )
        case errno.EINVAL | errno.EILSEQ:
            return ToolError(
                f"{doing.capitalize()} `{shown}` failed: {os.strerror(error.errno)}. Its file system may not allow this name. "
                'Use a name without characters such as ":", "?" and "*", and without a dot or blank at its end.',
                kind="failed",
            )
        case errno.EEXIST:
            return ToolError(f"`{shown}` already exists. Read it first, or use another name.", kind="conflict")
        case _:
            return ToolError(
                f"{doing.capitalize()} `{shown}` failed: {error.strerror or error}. Check the path and its "
                "permissions.",
                kind="failed",
            )


# An agent's further roots: real folders, separate from everything that Handrail itself relies on.

_SYSTEM_FOLDERS = ("/proc", "/sys", "/dev", "/run", "/boot", "/etc", "/usr/local/etc")
"""Folders that a sandbox masks in part or creates again. A mount over them would undo that."""


def resolve_further_roots(
    roots: Sequence[AgentAdditionalRoot], workspace: str, apart: Iterable[str | Path]
) -> tuple[FurtherRoots, list[tuple[str, str]]]:
    """Resolve the folders that ``roots`` name now, and return them with the problems found.

    A problem is ``(place, text)``. A writable root in the workspace adds nothing, so it is left out.

    :param workspace: a canonical path
    :param apart: folders that no root may overlap: Handrail's state and configuration
    """
    own = [os.path.realpath(folder) for folder in apart]
    found: dict[str, Literal["read", "write"]] = {}
    faults: list[tuple[str, str]] = []
    for index, root in enumerate(roots):
        real = _resolve_root(root)
        if (problem := _find_further_root_problem(root, real, workspace, own)) is not None:
            faults.append((f"roots[{index}].path", problem))
        elif not is_beneath(real, workspace) and found.setdefault(real, root.access) != root.access:
            faults.append(
                (
                    f"roots[{index}].access",
                    f"`{real}` is listed twice, once to read and once to write. Keep one of the entries.",
                )
            )
    faults += _find_nested_root_problems(roots, found)
    faults += _find_work_tree_problems(roots, found, workspace)
    readable = tuple(real for real, access in found.items() if access == "read")
    writable = tuple(real for real, access in found.items() if access == "write")
    return FurtherRoots(readable, writable, tuple(filter(is_git_directory, writable))), faults


def is_git_directory(folder: str) -> bool:
    """Return whether git takes a folder for the directory of a repository or of a linked work tree."""
    if not os.path.lexists(f"{folder}/HEAD"):
        return False
    names = ("commondir",) if os.path.lexists(f"{folder}/commondir") else ("objects", "refs")
    return all(os.path.lexists(f"{folder}/{name}") for name in names)


def _find_further_root_problem(root: AgentAdditionalRoot, real: str, workspace: str, own: Sequence[str]) -> str | None:
    if not real or not Path(real).is_dir():
        return f"The folder {root.path!r} does not exist. Create it, or remove this root."
    if what := explain_too_broad_workspace(Path(real)):
        return f"{root.path!r} is {what}. Name the folder of a project."
    for folder in own:
        if _overlap(real, folder):
            return f"{root.path!r} overlaps `{folder}`, where Handrail keeps its state. Choose another folder."
    for folder in _SYSTEM_FOLDERS:
        if _overlap(real, folder):
            return f"{root.path!r} overlaps `{folder}`, which the sandbox protects. Choose another folder."
    if root.access == "read" and is_beneath(real, workspace):
        return (
            f"{root.path!r} is inside the workspace `{workspace}`, which can be written. To protect a part of "
            "the workspace, add a rule such as 'deny fs.write FOLDER/**'."
        )
    if root.access == "write" and real != workspace and is_beneath(workspace, real):
        return f"{root.path!r} contains the workspace `{workspace}`. Open this folder as the workspace instead."
    return None


def _find_nested_root_problems(
    roots: Sequence[AgentAdditionalRoot], found: dict[str, Literal["read", "write"]]
) -> Iterator[tuple[str, str]]:
    """Yield a problem for each read-only root that lies in a writable one."""
    for index, root in enumerate(roots):
        real = _resolve_root(root)
        if found.get(real) != "read":
            continue
        for other, access in found.items():
            if access == "write" and other != real and is_beneath(real, other):
                yield (
                    f"roots[{index}].access",
                    f"{root.path!r} is inside `{other}`, which can be written. Set `access` to 'write' here too.",
                )


def _find_work_tree_problems(
    roots: Sequence[AgentAdditionalRoot], found: Collection[str], workspace: str
) -> Iterator[tuple[str, str]]:
    """Yield a problem for each repository around the workspace whose work tree is not a root.

    git would take all files outside the workspace for deleted, and ``git commit -a`` would record that.
    """
    for index, root in enumerate(roots):
        top, _, name = _resolve_root(root).rpartition("/")
        if name != ".git" or f"{top}/{name}" not in found or top == workspace or not is_beneath(workspace, top):
            continue
        if not any(is_beneath(top, other) for other in found):
            yield (
                f"roots[{index}].path",
                f"{root.path!r} is the repository around the workspace `{workspace}`, and git would treat the files "
                f"outside the workspace as deleted. Add a root with path '{top}' and access 'read', too.",
            )


def _resolve_root(root: AgentAdditionalRoot) -> str:
    """Return the canonical path of a root; empty if its text cannot name a folder."""
    try:
        return canonicalize_path_spelling(os.path.realpath(Path(root.path).expanduser()))
    except (OSError, RuntimeError, ToolError, ValueError):
        return ""


def _overlap(one: str, other: str) -> bool:
    return is_beneath(one, other) or is_beneath(other, one)
