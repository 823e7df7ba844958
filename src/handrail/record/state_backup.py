"""Backups of a workspace's state, and their restoration.

A backup is a private folder. The database in it is a consistent copy, made while other processes may write. Stored outputs
and artifacts lie next to it. A repeated backup copies only the files that are new or changed, and so continues an interrupted
one. Files that the workspace no longer has are removed from the backup, so that a purge reaches it at the next backup. The
description is written last: a folder without it is no backup.

The facts that sessions of the workspace stored for the user are in a file of JSON lines. A restoration adds those that are
missing, since the user's facts belong to all workspaces.

A backup contains no scratch folders, no kept files of ``handrail undo`` and no trust in the workspace's configuration.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import sqlite3
import stat
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from handrail.contract.errors import StartError, UsageError
from handrail.contract.struct import Struct
from handrail.record.log_reader import LogReader
from handrail.record.verification import verify_log
from handrail.store.database.journal import LogHeadFile
from handrail.store.database.schema_migrations import VERSION
from handrail.store.database.sqlite_connection import (
    connect_engine,
    make_database_start_error,
    open_reader,
    read_engine_name,
)
from handrail.store.memory.knowledge_store import KnowledgeStore, KnowledgeUnavailable, parse_entry
from handrail.store.operator_decisions import write_private_file
from handrail.store.state_folders import StateFolders, make_unwritable_state_error, prepare_folders, remove_tree
from handrail.store.state_inventory import ensure_workspace_unheld, remove_workspace_state
from handrail.store.unsupported_operations import sync_descriptor

FORMAT = 1
DESCRIPTION_FILE = "backup.json"
_DATABASE, _ARTIFACTS, _OUTPUTS, _FACTS = "handrail.db", "artifacts", "output", "memory.jsonl"
_STEP_PAGES = 4_096
_PIECE = 1024 * 1024
_MAX_DESCRIPTION_BYTES = 64 * 1024
_STAGED = ".restored-"
"""The beginning of the name of a folder whose restoration is not finished. The next restoration removes it."""

ShowProgress = Callable[[str, int, int], None]
"""Shows what is copied, how much is done, and how much there is."""


def _show_nothing(_what: str, _done: int, _total: int) -> None:
    pass


class BackupDescription(Struct, frozen=True):
    """What a backup contains.

    :param schema: the version of the database's tables
    :param key: the key of the workspace in the state folder
    :param engine: the store that made the database
    :param files: the number of artifacts and output files
    """

    format: int
    handrail: str
    schema: int
    engine: str
    workspace: str
    key: str
    created_ns: int
    records: int
    head: str
    database_sha256: str
    files: int
    bytes: int


def back_up_state(
    folders: StateFolders, target: Path, now_ns: int, show: ShowProgress = _show_nothing
) -> BackupDescription:
    """Copy the state of a workspace into a folder, also while a process holds it.

    :param target: a new or empty folder, or a backup of the same workspace, which is brought up to date
    :raises UsageError: if ``target`` is another folder, or lies in the workspace or in the state folder
    :raises StartError: if there is no state, or a file cannot be read or written
    """
    _check_target(folders, target)
    source = open_reader(folders.database_file)
    try:
        target.mkdir(mode=0o700, parents=True, exist_ok=True)
        target.chmod(0o700)
        engine = read_engine_name(folders.database_file)
        # The description is removed first and written last, so an interrupted backup is never taken for a complete one.
        (target / DESCRIPTION_FILE).unlink(missing_ok=True)
        (target / "store").unlink(missing_ok=True)
        if engine != "sqlite":
            write_private_file(target / "store", engine.encode())
        partial = target / f"{_DATABASE}.partial"
        _remove_database(partial)
        head = _copy_database(source, folders.database_file, partial, show)
        # The former copy stays until the new one is complete.
        partial.replace(target / _DATABASE)
        count = size = 0
        for name, origin in ((_ARTIFACTS, folders.artifact_folder), (_OUTPUTS, folders.session_outputs_folder)):
            copied, bytes_copied = _copy_tree(origin, target / name, name, show)
            count, size = count + copied, size + bytes_copied
        size += _copy_facts(folders, target / _FACTS)
        found = BackupDescription(
            FORMAT,
            version("handrail"),
            VERSION,
            engine,
            str(folders.workspace),
            folders.key,
            now_ns,
            head[0],
            head[1],
            _hash_file(target / _DATABASE),
            count,
            size + (target / _DATABASE).stat().st_size,
        )
        write_private_file(target / DESCRIPTION_FILE, json.dumps(asdict(found), indent=1).encode())
        return found
    except sqlite3.Error as error:
        raise make_database_start_error(folders.database_file, error) from None
    except OSError as error:
        raise _copy_error(target, error) from None
    finally:
        source.close()


def read_backup_description(folder: Path) -> BackupDescription:
    """Return the description of a backup, and check that this version of Handrail can restore it.

    :raises UsageError: if the folder is no backup, is not complete, or needs a newer version
    """
    path = folder / DESCRIPTION_FILE
    try:
        if path.stat().st_size > _MAX_DESCRIPTION_BYTES:
            raise ValueError("it is too large")
        data: Any = json.loads(path.read_bytes())
        if data["format"] != FORMAT:
            raise UsageError(
                f"The backup {folder} has format {data['format']!r:.20}, but this version of Handrail reads format {FORMAT}. "
                f"Use Handrail {str(data.get('handrail'))[:20]} or later."
            )
        found = BackupDescription(**{name: data[name] for name in BackupDescription.__struct_fields__})
        numbers = (found.schema, found.created_ns, found.records, found.files, found.bytes)
        names = ("engine", "workspace", "key", "database_sha256", "head", "handrail")
        texts: list[object] = [getattr(found, name) for name in names]
        if not all(type(one) is int and one >= 0 for one in numbers) or any(type(one) is not str for one in texts):
            raise ValueError("a value has a wrong type")
    except FileNotFoundError:
        what = (
            "is not complete: a backup was interrupted. Run it again"
            if (folder / _DATABASE).exists()
            else ("is not a backup. Pass a folder that `handrail state backup` wrote")
        )
        raise UsageError(f"{folder} {what}.") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} cannot be read: {error}. Use another backup.") from None
    if found.schema > VERSION:
        raise UsageError(
            f"The backup {folder} has schema {found.schema}, but this version of Handrail supports up to {VERSION}. "
            f"Upgrade to Handrail {found.handrail[:20]} or later."
        )
    return found


def restore_state(
    folders: StateFolders, backup: Path, *, replace: bool = False, show: ShowProgress = _show_nothing
) -> BackupDescription:
    """Restore the state of a workspace from a backup.

    The database and its log are checked before anything changes.

    :param folders: the folders of the workspace, which may be another one than that of the backup
    :param replace: remove the current state of the workspace
    :raises UsageError: if the backup cannot be restored, or the workspace has state and ``replace`` is not set
    :raises StartError: if a process holds the workspace, or its state cannot be written
    """
    found = read_backup_description(backup)
    ensure_workspace_unheld(folders)
    if os.path.lexists(folders.database_file) and not replace:
        raise UsageError(
            f"The workspace {folders.workspace} already has state. Back it up if you need it, and pass `--replace` to "
            "remove it."
        )
    staged = f"{_STAGED}{folders.key}"
    own, outputs = folders.state / "ws" / staged, folders.state / "output" / staged
    try:
        for folder in (folders.state, own.parent, outputs.parent):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        remove_tree(own)
        remove_tree(outputs)
        own.mkdir(mode=0o700)
        if found.engine != "sqlite":
            write_private_file(own / "store", found.engine.encode())
        # Everything is copied to a folder next to the state and checked there. Until the renames, the old state is
        # untouched.
        _copy_file(backup / _DATABASE, own / _DATABASE, lambda done, size: show("database", done, size))
        head = _check_database(own / _DATABASE, backup, found)
        _copy_tree(backup / _ARTIFACTS, own / _ARTIFACTS, _ARTIFACTS, show)
        _copy_tree(backup / _OUTPUTS, outputs, _OUTPUTS, show)
        if problems := remove_workspace_state(folders.state, folders.key):  # also what is there without a database
            raise StartError(
                f"The current state cannot be removed: {'; '.join(problems)}. Nothing was restored. Check the permissions, then run the command again."
            )
        ensure_workspace_unheld(folders)
        # The database comes last: without it, a crash between the two renames leaves a workspace without state instead
        # of half of one.
        if outputs.exists():
            outputs.replace(folders.session_outputs_folder)
        own.replace(folders.workspace_state_folder)
    except OSError as error:
        raise make_unwritable_state_error(folders.state, error) from None
    finally:
        remove_tree(own)
        remove_tree(outputs)
    prepare_folders(folders.workspace, folders.state, allow_home=True)
    _restore_facts(folders, backup / _FACTS)
    with closing(LogHeadFile(folders)) as file:
        # The note of the log's end is from the old state, and the next start would report the restored log as cut.
        file.overwrite_log_head(head[0], head[1])
    return found


def _check_target(folders: StateFolders, target: Path) -> None:
    real = Path(os.path.realpath(target))
    for inside, what in (
        (folders.workspace, "the workspace, where tools could change it"),
        (folders.state, "the state folder"),
    ):
        if real == inside or inside in real.parents:
            raise UsageError(f"The backup folder {real} is inside {what}. Choose a folder outside it.")
    try:
        names = {entry.name for entry in real.iterdir()}
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"The backup folder {real} cannot be read: {error.strerror}. Choose another folder.") from None
    ours = {DESCRIPTION_FILE, _DATABASE, _ARTIFACTS, _OUTPUTS, _FACTS, "store", f"{_DATABASE}.partial"}
    # A later backup removes files that the workspace no longer has, so the folder must not contain anything else.
    if names and (not names & {DESCRIPTION_FILE, _DATABASE, f"{_DATABASE}.partial"} or names - ours):
        raise UsageError(f"The folder {real} is not empty and is not a backup. Choose a new folder.")
    known = None
    with suppress(UsageError):
        known = read_backup_description(real)
    if known is not None and known.key != folders.key:
        raise UsageError(
            f"The folder {real} has a backup of {known.workspace}. Choose another folder for this workspace."
        )


def _copy_database(source: sqlite3.Connection, file: Path, target: Path, show: ShowProgress) -> tuple[int, str]:
    """Copy the database as it is at one moment, and return the head of its log."""
    os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    with closing(connect_engine(file, target, isolation_level=None)) as copy:
        source.execute("BEGIN")  # a snapshot: without it, each write of another process would start the copy again
        try:
            reader = LogReader(source)
            head = reader.head()
            page = int(source.execute("PRAGMA page_size").fetchone()[0])

            def told(_status: int, remaining: int, total: int) -> None:
                show("database", (total - remaining) * page, total * page)

            source.backup(copy, pages=_STEP_PAGES, progress=told, sleep=0)
        finally:
            source.execute("ROLLBACK")
        copy.execute("PRAGMA journal_mode = DELETE")  # one file
    with target.open("rb") as copied:
        sync_descriptor(copied.fileno())
    return head.sequence, head.hash


def _copy_facts(folders: StateFolders, target: Path) -> int:
    """Write the facts of a workspace's sessions, and return the size of the file."""
    with closing(KnowledgeStore(folders.state)) as knowledge:
        try:
            entries = knowledge.list_workspace_entries(str(folders.workspace))
        except KnowledgeUnavailable as error:
            raise StartError(str(error)) from None
    if not entries:
        target.unlink(missing_ok=True)
        return 0
    content = "".join(f"{json.dumps(asdict(entry))}\n" for entry in entries).encode()
    write_private_file(target, content)
    return len(content)


def _restore_facts(folders: StateFolders, source: Path) -> None:
    """Add the facts of a backup that are missing."""
    try:
        lines = source.read_text(encoding="utf-8").splitlines()
        entries = [parse_entry(json.loads(line), str(folders.workspace)) for line in lines]
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StartError(
            f"The workspace was restored without its stored facts: {source} cannot be read: {error}. Check the backup."
        ) from None
    if entries:
        with closing(KnowledgeStore(folders.state)) as knowledge:
            try:
                knowledge.add_missing_entries(entries)
            except KnowledgeUnavailable as error:
                raise StartError(f"The workspace was restored without its stored facts. {error}") from None


def _check_database(database: Path, backup: Path, found: BackupDescription) -> tuple[int, bytes]:
    """Check a restored database, and return the head of its log.

    :raises UsageError: if it is damaged
    """
    problem = None
    if _hash_file(database) != found.database_sha256:
        problem = "the database was changed or is damaged"
    else:
        with LogReader.open_database(database) as reader:
            checked = verify_log(reader)
            if not checked.ok:
                problem = f"the log is {checked}"
            elif (checked.records, checked.head) != (found.records, found.head):
                problem = "the log is not the one that the backup describes"
            head = reader.head()
            if problem is None:
                return head.sequence, bytes.fromhex(head.hash)
    raise UsageError(f"The backup {backup} cannot be restored: {problem}. Nothing was changed. Use another backup.")


def _remove_database(path: Path) -> None:
    for file in (path, *(path.with_name(f"{path.name}{end}") for end in ("-wal", "-shm", "-journal"))):
        file.unlink(missing_ok=True)


def _copy_tree(source: Path, target: Path, name: str, show: ShowProgress) -> tuple[int, int]:
    """Copy the files of a folder that are new or changed, and remove those that it no longer has.

    :return: the number of its files, and their bytes
    """
    wanted = dict(_list_files(source))
    for relative, _ in [*_list_files(target)]:
        if relative not in wanted:
            (target / relative).unlink(missing_ok=True)
    total = sum(found.st_size for found in wanted.values())
    done = copied = 0
    for relative, found in wanted.items():
        if _copy_if_changed(source / relative, found, target / relative):
            copied += 1
        done += found.st_size
        show(name, done, total)
    _remove_empty_folders(target)
    return len(wanted), total


def _list_files(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the plain files below a folder with their relative paths. Links are left out."""
    todo = [""]
    while todo:
        below = todo.pop()
        try:
            with os.scandir(folder / below) as entries:
                found = sorted(entries, key=lambda entry: entry.name)
        except (FileNotFoundError, NotADirectoryError):
            continue
        for entry in found:
            relative = f"{below}/{entry.name}" if below else entry.name
            try:
                if entry.is_dir(follow_symlinks=False):
                    todo.append(relative)
                elif entry.is_file(follow_symlinks=False):
                    yield relative, entry.stat(follow_symlinks=False)
            except FileNotFoundError:  # it was removed after it was listed
                continue


def _copy_if_changed(source: Path, found: os.stat_result, target: Path) -> bool:
    with suppress(OSError):
        there = target.lstat()
        # Artifacts never change, and a write to an output changes its size or its time. So these show a current copy.
        if stat.S_ISREG(there.st_mode) and (there.st_size, there.st_mtime_ns) == (found.st_size, found.st_mtime_ns):
            return False
    folder = target.parent
    while not folder.exists():
        folder = folder.parent
    target.parent.mkdir(parents=True, exist_ok=True)
    for parent in (target.parent, *target.parent.parents):
        if parent == folder:
            break
        parent.chmod(0o700)
    partial = target.with_name(f".{target.name[:200]}.{secrets.token_hex(4)}")
    try:
        _copy_file(source, partial)
        os.utime(partial, ns=(found.st_atime_ns, found.st_mtime_ns))
        partial.replace(target)
    except FileNotFoundError:  # it was removed meanwhile
        return False
    finally:
        partial.unlink(missing_ok=True)
    return True


def _copy_file(source: Path, target: Path, show: Callable[[int, int], None] = lambda _done, _size: None) -> None:
    # A backup can come from anywhere. A link would copy a file outside it, and a FIFO would block.
    reading = os.open(source, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(reading, "rb") as given:
        status = os.fstat(reading)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{source} is not a regular file")
        writing = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, stat.S_IMODE(status.st_mode) & 0o700 | 0o600)
        with os.fdopen(writing, "wb") as taken:
            done = 0
            while piece := given.read(_PIECE):
                taken.write(piece)
                show(done := done + len(piece), status.st_size)
            taken.flush()
            sync_descriptor(writing)


def _remove_empty_folders(folder: Path) -> None:
    for here, _, _ in os.walk(folder, topdown=False):
        with suppress(OSError):
            Path(here).rmdir()


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _copy_error(target: Path, error: OSError) -> StartError:
    reason = error.strerror or str(error)
    free = shutil.disk_usage(target).free if target.exists() else 0
    return StartError(
        f"The backup in {target} is not complete: {reason} ({free // 1024 // 1024:,} MiB free). Free some space or make the "
        "folder writable, and run the backup again; it continues."
    )
