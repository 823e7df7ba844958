"""The adoption of stored state by a workspace whose folder was moved.

State belongs to a path. If the folder of a workspace is moved, its log, sessions and answers stay with the old path. The
state folder records which folder each state belongs to, by what the file system knows of it (:mod:`~handrail.store.project_identity`):
no content of a workspace can pass for another folder. Nothing is adopted unless the user agrees. The state keeps its key,
and the new path leads to it. A folder that appears at the old path gets a new key.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from handrail.contract.errors import StartError, UsageError
from handrail.contract.struct import Struct
from handrail.store.database.sqlite_connection import open_reader
from handrail.store.memory.knowledge_store import KnowledgeStore, KnowledgeUnavailable
from handrail.store.operator_decisions import write_private_file
from handrail.store.project_identity import bind_state_to_current_folder, read_folder_identity, read_project_record
from handrail.store.state_folders import StateFolders, compute_workspace_key, prepare_redirect_folder
from handrail.store.state_inventory import (
    MEMORY,
    USER_DATA,
    StateInventoryEntry,
    ensure_workspace_unheld,
    list_stored_state,
    remove_workspace_state,
)

_KEY_BYTES = 12
_NAMES_IF_EMPTY = ("handrail.db", "handrail.db-shm", "handrail.db-wal", "artifacts", "project.json", "workspace")
"""The entries in the state folder of a workspace that has run no call. Others contain data."""
_HAS_CONTENT = (
    "SELECT EXISTS (SELECT 1 FROM record) OR EXISTS (SELECT 1 FROM session) "
    "OR EXISTS (SELECT 1 FROM project_rule) OR EXISTS (SELECT 1 FROM task)"
)
"""Everything in a database belongs to a row of these tables."""


class AdoptableState(Struct, frozen=True):
    """Stored state that a workspace may adopt.

    :param is_recognised: whether the workspace certainly is the folder of that state
    """

    stored: StateInventoryEntry
    is_recognised: bool


def find_adoptable_states(folders: StateFolders) -> list[AdoptableState]:
    """Return the states whose folder is at the path of this workspace now.

    :param folders: the folders of the workspace, see :func:`~handrail.store.state_folders.locate_folders`
    """
    if (identity := read_folder_identity(folders.workspace)) is None:
        return []
    found: list[AdoptableState] = []
    for key in _list_keys(folders.state):
        record = read_project_record(folders.state / "ws" / key)
        if key == folders.key or record is None or not record.identity.is_same_as(identity):
            continue
        if has_workspace_database(StateFolders(folders.workspace, folders.state, key)):
            found += [AdoptableState(one, True) for one in list_stored_state(folders.state, key)]
    return found


def select_adoptable_state(folders: StateFolders, key: str | None) -> AdoptableState:
    """Return the state to adopt, and check that nothing else uses it.

    :param key: the key of the state; None for the one whose folder was recognised
    :raises UsageError: if there is no such state, or several, or it still has its folder
    :raises StartError: if a process holds it
    """
    recognised = find_adoptable_states(folders)
    if key is None:
        if not recognised:
            raise UsageError(
                f"No state belongs to the folder {folders.workspace} under a former path. `handrail state` lists the keys; "
                "pass the KEY of the state to adopt."
            )
        if len(recognised) > 1:
            keys = ", ".join(one.stored.key for one in recognised)
            raise UsageError(f"Several states belong to the folder {folders.workspace}: {keys}. Pass one KEY.")
        chosen = recognised[0]
    else:
        chosen = next((one for one in recognised if one.stored.key == key), None) or _find_by_key(folders, key)
    _check_free(folders, chosen.stored)
    return chosen


def adopt_state(folders: StateFolders, chosen: AdoptableState) -> StateFolders:
    """Let the workspace use the chosen state from now on, and return its folders. Repeat an interrupted call.

    :raises UsageError: if the workspace has state already
    :raises StartError: if the state folder cannot be written, or a process holds one of the two
    """
    _check_free(folders, chosen.stored)
    if os.path.lexists(folders.database_file) and not has_workspace_database(folders):
        remove_workspace_state(folders.state, folders.key)
    if has_workspace_database(folders):
        raise UsageError(
            f"The workspace {folders.workspace} already has state, with the key {folders.key}. Back it up if you need it, "
            f"remove it with `handrail state remove {folders.key}`, and adopt again."
        )
    redirects, former = prepare_redirect_folder(folders.state), chosen.stored.workspace
    adopted = StateFolders(folders.workspace, folders.state, chosen.stored.key)
    if former is not None and former != folders.workspace:
        write_private_file(redirects / compute_workspace_key(former), secrets.token_hex(_KEY_BYTES).encode())
    if compute_workspace_key(folders.workspace) == adopted.key:  # the folder is back at its first path
        (redirects / adopted.key).unlink(missing_ok=True)
    else:
        write_private_file(redirects / compute_workspace_key(folders.workspace), adopted.key.encode())
    write_private_file(adopted.workspace_path_file, os.fsencode(folders.workspace))
    bind_state_to_current_folder(adopted)
    if former is not None:
        knowledge = KnowledgeStore(folders.state)
        with contextlib.suppress(KnowledgeUnavailable), contextlib.closing(knowledge):
            knowledge.reassign_workspace_entries(str(former), str(folders.workspace))
    return adopted


def has_workspace_database(folders: StateFolders) -> bool:
    """Return whether a workspace has state that is worth keeping.

    A command that runs no call, such as ``handrail explain``, leaves an empty database, which is not.
    """
    if not os.path.lexists(folders.database_file):
        return False
    try:
        if any(entry.name not in _NAMES_IF_EMPTY for entry in folders.workspace_state_folder.iterdir()):
            return True
        with contextlib.closing(open_reader(folders.database_file)) as connection:
            return bool(connection.execute(_HAS_CONTENT).fetchone()[0])
    except (OSError, StartError, sqlite3.Error):
        return True


def _list_keys(state: Path) -> Iterator[str]:
    try:
        with os.scandir(state / "ws") as entries:
            yield from sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return


def _find_by_key(folders: StateFolders, key: str) -> AdoptableState:
    if key == folders.key:
        raise UsageError(
            f"The workspace {folders.workspace} already uses the state {key}, so there is nothing to adopt. `handrail state` lists the other keys."
        )
    stored = next((one for one in list_stored_state(folders.state, key)), None)
    if stored is None or stored.key in (USER_DATA, MEMORY):
        raise UsageError(f"Unknown key: {key!r:.80}. `handrail state` lists the keys.")
    if stored.workspace is not None and not stored.workspace_missing and _has_its_folder(folders.state, stored):
        raise UsageError(
            f"The state {key} belongs to {stored.workspace}, which still exists. Move or remove that folder first, or copy "
            "the state with `handrail state backup` and `handrail state restore`."
        )
    return AdoptableState(stored, False)


def _has_its_folder(state: Path, stored: StateInventoryEntry) -> bool:
    """Return whether the folder at the path of a state is the one that it was recorded for, as far as is known."""
    assert stored.workspace is not None
    record, identity = read_project_record(state / "ws" / stored.key), read_folder_identity(stored.workspace)
    return record is None or identity is None or record.identity.is_same_as(identity)


def _check_free(folders: StateFolders, stored: StateInventoryEntry) -> None:
    """Check that no process holds the state or the workspace.

    :raises StartError: if one does
    """
    other = StateFolders(stored.workspace or folders.state / "ws" / stored.key, folders.state, stored.key)
    for one in (other, folders):
        ensure_workspace_unheld(one)
