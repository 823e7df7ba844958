"""The inventory of stored state: an entry with its size for each workspace, and its removal.

All state of a workspace has its key in its name, so it is found even if the workspace is gone or its state damaged.
Nothing here opens a database, and no link is followed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from handrail.contract.errors import StartError
from handrail.contract.struct import Struct
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.store.lease import find_lease_holder
from handrail.store.state_folders import StateFolders, find_state_key, remove_tree

_KEY = compile_regex_lazily(r"[0-9a-f]{24}")
_REMOVED = ".removed-"
_PARTS = ("ws", "output", "scratch")
USER_DATA = "user-data"
"""Used instead of a key for the data that tools keep for the user in all workspaces."""
MEMORY = "memory"
"""Used instead of a key for the facts that agents stored for the user in all workspaces."""
_MAX_NAME = 65_536


class StateInventoryEntry(Struct, frozen=True):
    """The stored state of one workspace, or the data that tools keep for the user.

    :param key: the key of the workspace, ``USER_DATA`` or ``MEMORY``
    :param workspace: the path of the workspace; None if unknown
    :param workspace_missing: whether the workspace certainly no longer exists
    :param size_bytes: the size of all files
    :param used_ns: wall-clock time of the last write to its database; None if there is none
    :param holder: the present holder in words; None if there is none
    """

    key: str
    workspace: Path | None
    workspace_missing: bool
    size_bytes: int
    used_ns: int | None
    holder: str | None


def list_stored_state(state: Path, key: str | None = None) -> list[StateInventoryEntry]:
    """Return the stored state below a state folder, the most recently used first.

    :param state: the result of :func:`~handrail.store.state_folders.resolve_state_root`
    :param key: the key of one state; None for all
    :raises StartError: if it is not a folder of this user
    """
    _check_state_folder(state)
    keys = sorted({name for part in _PARTS for name in _list_names(state / part) if _KEY.fullmatch(name)})
    keys = keys if key is None else [one for one in keys if one == key]
    found = sorted((_read_stored_state(state, one) for one in keys), key=lambda kept: kept.used_ns or 0, reverse=True)
    for shared in (USER_DATA, MEMORY):
        data = state / shared
        if data.is_dir() and key in (None, shared):
            found.append(
                StateInventoryEntry(shared, None, False, measure_folder_size(data), data.lstat().st_mtime_ns, None)
            )
    return found


def list_workspace_state_folders(state: Path) -> list[StateFolders]:
    """Return the folders of all workspaces with a database, without measuring them.

    :param state: the result of :func:`~handrail.store.state_folders.resolve_state_root`
    :raises StartError: if it is not a folder of this user
    """
    _check_state_folder(state)
    found = [_folders(state, key) for key in sorted(_list_names(state / "ws")) if _KEY.fullmatch(key)]
    return [folders for folders in found if folders.database_file.exists()]


def remove_workspace_state(state: Path, key: str) -> list[str]:
    """Remove the stored state of one workspace, and return what could not be removed.

    :raises StartError: if a process holds it, or the state folder is not a folder of this user
    """
    _check_state_folder(state)
    if key in (USER_DATA, MEMORY):
        remove_tree(state / key)
        return [f"{state / key}: cannot be removed"] if os.path.lexists(state / key) else []
    folders = _folders(state, key)
    ensure_workspace_unheld(folders)
    # Renamed first, so that a process that starts now finds no state instead of a part of it.
    aside = f"{_REMOVED}{key}-{secrets.token_hex(4)}"
    own, put_aside = folders.workspace_state_folder, state / "ws" / aside
    try:
        own.rename(put_aside)
    except FileNotFoundError:
        pass
    except OSError as error:
        return [f"{own}: {error.strerror or error}"]
    else:
        try:
            ensure_workspace_unheld(replace(folders, key=aside))  # a process may have started in between
        except StartError:
            put_aside.rename(own)
            raise
    with contextlib.suppress(OSError):
        folders.log_head_file.unlink()
    problems: list[str] = []
    for part in ("output", "scratch"):
        try:
            (state / part / key).rename(state / part / aside)
        except FileNotFoundError:
            pass
        except OSError as error:
            problems.append(f"{state / part / key}: {error.strerror or error}")
    return problems + finish_interrupted_removals(state)


def finish_interrupted_removals(state: Path) -> list[str]:
    """Finish interrupted removals, and return what could not be removed."""
    problems: list[str] = []
    for part in _PARTS:
        for name in _list_names(state / part):
            if name.startswith(_REMOVED):
                folder = state / part / name
                remove_tree(folder)
                if os.path.lexists(folder):
                    problems.append(f"{folder}: cannot be removed")
    return problems


def measure_folder_size(folder: Path) -> int:
    """Return the size of all files below a folder. It follows no links and ignores files that vanish meanwhile."""
    total = 0
    todo = [str(folder)]
    while todo:
        try:
            with os.scandir(todo.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        todo.append(entry.path)
                    else:
                        total += entry.stat(follow_symlinks=False).st_size
        except OSError:
            continue
    return total


def _folders(state: Path, key: str) -> StateFolders:
    """Return the folders of a workspace. If its path is unknown, messages name its state folder instead."""
    own = state / "ws" / key
    return StateFolders(_read_workspace(own / "workspace", key) or own, state, key)


def _read_stored_state(state: Path, key: str) -> StateInventoryEntry:
    folders = _folders(state, key)
    workspace = folders.workspace if folders.workspace != folders.workspace_state_folder else None
    try:
        held = find_lease_holder(folders)
        holder = None if held is None else f"{held}, {held.state}"
    except StartError as error:
        holder = f"unknown: {error}"
    return StateInventoryEntry(
        key,
        workspace,
        workspace is not None and _is_missing(workspace),
        sum(measure_folder_size(state / part / key) for part in _PARTS),
        _last_used(folders.database_file),
        holder,
    )


def _read_workspace(file: Path, key: str) -> Path | None:
    try:
        descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
        try:
            path = Path(os.fsdecode(os.read(descriptor, _MAX_NAME)))
        finally:
            os.close(descriptor)
        return path if find_state_key(file.parent.parent.parent, path) == key else None
    except (OSError, ValueError, StartError):
        return None


def _is_missing(workspace: Path) -> bool:
    """Return whether a folder certainly no longer exists."""
    try:
        return not stat.S_ISDIR(workspace.lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False


def _last_used(database: Path) -> int | None:
    times: list[int] = []
    for file in (database, database.with_name(f"{database.name}-wal")):
        try:
            times.append(file.lstat().st_mtime_ns)
        except OSError:
            continue
    return max(times, default=None)


def ensure_workspace_unheld(folders: StateFolders) -> None:
    """Check that no process holds a workspace.

    :raises StartError: if one does
    """
    if (holder := find_lease_holder(folders)) is not None:
        raise StartError(
            f"The state of {folders.workspace} is in use by {holder}, {holder.state}. Stop that process first."
        )


def _check_state_folder(state: Path) -> None:
    for folder in (state, *(state / part for part in (*_PARTS, USER_DATA, MEMORY))):
        try:
            found = folder.lstat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise StartError(
                f"The state folder {folder} cannot be read: {error.strerror or error}. Make it readable for this user."
            ) from None
        if not stat.S_ISDIR(found.st_mode):
            raise StartError(f"{folder} should be a state folder, but is not a folder. Check who created it.")
        if os.name != "nt" and found.st_uid != os.geteuid():
            raise StartError(
                f"The state folder {folder} belongs to user {found.st_uid}, not to you (user {os.geteuid()}). "
                "Choose a folder of yours with --state DIR."
            )


def _list_names(folder: Path) -> Iterator[str]:
    try:
        with os.scandir(folder) as entries:
            yield from [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return
