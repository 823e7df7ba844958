"""The identity of a workspace's folder, which standing answers belong to, and the other workspaces whose answers it shares.

An answer "for this project" is about the folder in which it was given. Another folder that takes its path, such as a new
clone or a project of someone else, does not inherit it. A folder is recognised by its inode number and the time of its
creation, which the file system sets: nothing in a workspace can forge them. On a file system without times of creation, the
device number counts instead.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from handrail.contract.errors import UsageError
from handrail.contract.struct import Struct
from handrail.store.operator_decisions import read_private_file, write_private_file
from handrail.store.state_folders import StateFolders, compute_workspace_key

_FILE = "project.json"
_VERSION = 1
_MAX_BYTES = 64 * 1024
_MOST_SHARED = 32
_libc = ctypes.CDLL(None, use_errno=True)
_AT_FDCWD, _BORN, _BORN_AT, _STATX_BYTES, _NO_FOLLOW = -100, 0x800, 80, 256, 0x100


class FolderIdentity(Struct, frozen=True):
    """What tells one folder from any other.

    :param birth_ns: when it was made, in nanoseconds; None if the file system does not record it
    """

    inode: int
    device: int
    birth_ns: int | None

    def is_same_as(self, other: FolderIdentity) -> bool:
        """Return whether both are one folder, also after it was moved or the machine was restarted."""
        if self.inode != other.inode:
            return False
        if self.birth_ns is not None and other.birth_ns is not None:
            return self.birth_ns == other.birth_ns
        return self.birth_ns is other.birth_ns and self.device == other.device


class ProjectRecord(Struct, frozen=True):
    """What the state of a workspace knows about its folder.

    :param workspace: the path of the folder when it was recorded
    :param shared: the paths of the workspaces whose standing answers hold here too
    """

    workspace: str
    identity: FolderIdentity
    shared: tuple[str, ...] = ()


def read_folder_identity(folder: Path) -> FolderIdentity | None:
    """Return the identity of a folder, or None if there is none."""
    try:
        found = folder.stat()
    except OSError:
        return None
    return FolderIdentity(found.st_ino, found.st_dev, read_creation_time_ns(str(folder)))


def read_creation_time_ns(path: str) -> int | None:
    """Return when a file was made, in nanoseconds; None if unknown.

    It tells a file from a later one with the same inode number.
    """
    if (call := getattr(_libc, "statx", None)) is None:
        return None
    answer = ctypes.create_string_buffer(_STATX_BYTES)
    if call(_AT_FDCWD, os.fsencode(path), _NO_FOLLOW, _BORN, answer) != 0:
        return None
    if not struct.unpack_from("=I", answer.raw, 0)[0] & _BORN:
        return None
    seconds, nanoseconds = struct.unpack_from("=qI", answer.raw, _BORN_AT)
    return seconds * 1_000_000_000 + nanoseconds


def is_recorded_project_folder(folders: StateFolders) -> bool:
    """Return whether the workspace is the folder that its stored answers were given for.

    The first call records the folder. A record that cannot be read counts as another folder.
    """
    if (identity := read_folder_identity(folders.workspace)) is None:
        return False
    path = folders.workspace_state_folder / _FILE
    if not os.path.lexists(path):
        _write(folders, ProjectRecord(str(folders.workspace), identity))
        return True
    record = read_project_record(folders.workspace_state_folder)
    return record is not None and record.identity.is_same_as(identity)


def bind_state_to_current_folder(folders: StateFolders) -> None:
    """Let the stored answers of this state hold for the folder that is at its path now.

    :raises UsageError: if there is no folder
    :raises StartError: if the state folder cannot be written
    """
    if (identity := read_folder_identity(folders.workspace)) is None:
        raise UsageError(f"The workspace {folders.workspace} does not exist. Name an existing folder.")
    record = read_project_record(folders.workspace_state_folder)
    _write(folders, ProjectRecord(str(folders.workspace), identity, () if record is None else record.shared))


def set_grant_sharing(folders: StateFolders, other: Path, *, shares: bool) -> None:
    """Let the standing answers of another workspace hold here too, or no longer.

    :param other: the real path of the other workspace
    :raises UsageError: if it has no state, or its folder is not the one that its answers were given for
    """
    record = read_project_record(folders.workspace_state_folder)
    if record is None or not is_recorded_project_folder(folders):
        raise UsageError(
            f"{folders.workspace} is not the folder that its stored answers were given for. Adopt it first."
        )
    kept = tuple(path for path in record.shared if path != str(other))
    if shares:
        if other == folders.workspace:
            raise UsageError(f"{other} is this workspace. Name another one.")
        if _read_current(folders, str(other)) is None:
            raise UsageError(
                f"{other} has no stored answers in {folders.state}. Open the workspace once, or name another one."
            )
        if len(kept) >= _MOST_SHARED:
            raise UsageError(
                f"Too many workspaces share their answers: {len(kept)}. The maximum is {_MOST_SHARED}. Run `handrail rules --unshare` first."
            )
        kept = (*kept, str(other))
    _write(folders, replace(record, shared=kept))


def list_workspaces_sharing_grants(folders: StateFolders) -> Iterator[tuple[str, Path]]:
    """Yield the path and the state folder of each workspace whose standing answers hold here too.

    A folder that another one has replaced since is left out.
    """
    record = read_project_record(folders.workspace_state_folder)
    for path in () if record is None else record.shared:
        if (state := _read_current(folders, path)) is not None:
            yield path, state


def _read_current(folders: StateFolders, workspace: str) -> Path | None:
    """Return the state folder of a workspace if its folder is the recorded one, at its path or moved to this one; else None."""
    folder = folders.state / "ws" / compute_workspace_key(Path(workspace))
    if (record := read_project_record(folder)) is None:
        return None
    now = (read_folder_identity(Path(workspace)), read_folder_identity(folders.workspace))
    return folder if any(one is not None and record.identity.is_same_as(one) for one in now) else None


def read_project_record(state_folder: Path) -> ProjectRecord | None:
    """Return the record in the state folder of a workspace; None if there is none that only its owner could have written."""
    if (content := read_private_file(state_folder / _FILE, _MAX_BYTES)) is None:
        return None
    try:
        data: Any = json.loads(content.decode("utf-8", "surrogateescape"))
        if data["version"] != _VERSION:
            return None
        identity = FolderIdentity(int(data["inode"]), int(data["device"]), data["birth_ns"])
        return ProjectRecord(str(data["workspace"]), identity, tuple(str(path) for path in data["shared"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _write(folders: StateFolders, record: ProjectRecord) -> None:
    identity = record.identity
    data = {"version": _VERSION, "workspace": record.workspace, "inode": identity.inode, "device": identity.device}
    data |= {"birth_ns": identity.birth_ns, "shared": list(record.shared)}
    write_private_file(folders.workspace_state_folder / _FILE, json.dumps(data).encode("utf-8", "surrogateescape"))
