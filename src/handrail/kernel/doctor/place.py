"""The workspace's and the state's folders: whose they are, how full their disks are, what the log is like."""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path

from handrail.contract.errors import StartError
from handrail.kernel.doctor.check import Check, alone
from handrail.record.noted import noted
from handrail.record.reading import LogReader
from handrail.runtime.files import private_copies
from handrail.sandbox.view.tree import Tree
from handrail.store.database.database import open_reader
from handrail.store.database.schema import VERSION
from handrail.store.folders import Folders
from handrail.store.holder import holder_of
from handrail.store.inventory import tree_bytes

_LITTLE_ROOM = 256 * 1024 * 1024
_NO_ROOM = 16 * 1024 * 1024
_FEW_FILES = 1000


def of_place(folders: Folders) -> list[Check]:
    """The folders and what is kept in them, looked at without writing or waiting."""
    return [
        *alone("workspace", lambda: _workspace(folders)),
        *alone("hard links", lambda: _links(folders)),
        *alone("state", lambda: _state(folders)),
        *alone("log", lambda: _log(folders)),
        *alone("interrupted calls", lambda: _interrupted(folders)),
    ]


def _workspace(folders: Folders) -> Iterator[Check]:
    yield from _folder("workspace", folders.workspace, "the file tools can change nothing there")


def _links(folders: Folders) -> Iterator[Check]:
    tree = Tree(os.path.realpath(folders.workspace))
    tree.look()
    found = private_copies.shared([tree])
    if not found:
        yield Check("hard links", "ok", "no file of the workspace has a further name outside of it")
        return
    size = sum(Path(path).lstat().st_size for path in found if os.path.lexists(path))
    yield Check(
        "hard links",
        "ok",
        f"{len(found):,} files of the workspace ({_amount(size)}) have further names outside of it, such as in a package manager's "
        "store; before a program that may write starts, each name here is given to a copy (at each start at most "
        f"{private_copies.MOST_FILES:,} files and {_amount(private_copies.MOST_BYTES)}; the others are read-only for that program)",
    )


def _state(folders: Folders) -> Iterator[Check]:
    place = folders.own if folders.own.exists() else _existing(folders.state)
    if place != folders.own:
        yield Check("state", "ok", f"nothing is kept yet; it would be in {folders.own}")
    else:
        size = sum(tree_bytes(folders.state / part / folders.key) for part in ("ws", "output", "scratch"))
        yield from _private(folders.state, 0o022)
        yield from _private(folders.own, 0o077, f", {_amount(size)} for this workspace")
    if folders.user_data.exists():
        kept = _amount(tree_bytes(folders.user_data))
        yield from _private(folders.user_data, 0o077, f", {kept} that tools keep for the user ({{user-data}})")
    yield from _folder("state disk", place, "no call runs without a log")


def _private(folder: Path, closed: int, more: str = "") -> Iterator[Check]:
    """Whether a folder is the user's alone.

    :param closed: the permission bits that must not be set
    """
    found = folder.lstat()
    mode = stat.S_IMODE(found.st_mode)
    said = f"{folder}, mode {mode:04o}, owner {found.st_uid}{more}"
    if not stat.S_ISDIR(found.st_mode):
        yield Check("state", "problem", f"{folder} is not a folder", "look who put it there, or use --state DIR")
    elif os.name != "nt" and found.st_uid != os.geteuid():
        remedy = "use a folder of your own with --state DIR"
        yield Check("state", "problem", f"{said}: it is not yours (you are {os.geteuid()})", remedy)
    elif os.name != "nt" and mode & closed:
        yield Check("state", "problem", f"{said}: others can get at it", f"see who changed it, then chmod 700 {folder}")
    elif more:
        yield Check("state", "ok", said)


def _folder(name: str, folder: Path, consequence: str) -> Iterator[Check]:
    disk = os.statvfs(folder)
    free, files = disk.f_bavail * disk.f_frsize, disk.f_favail
    room = f"{folder}, {_amount(free)} free" + (f", {files:,} inodes free" if disk.f_files else "")
    if disk.f_flag & os.ST_RDONLY:
        problem = "problem" if name != "workspace" else "warning"
        yield Check(
            name, problem, f"{room}: mounted read-only, so {consequence}", "mount it writable, or choose another"
        )
    elif not os.access(folder, os.W_OK | os.X_OK):
        problem = "problem" if name != "workspace" else "warning"
        yield Check(name, problem, f"{room}: this user cannot write there, so {consequence}", "change its permissions")
    elif free < _NO_ROOM or (disk.f_files and not files):
        yield Check(
            name, "problem", f"{room}: the disk is full", "free some space there; handrail log purge gives some"
        )
    elif free < _LITTLE_ROOM or (disk.f_files and files < _FEW_FILES):
        yield Check(name, "warning", f"{room}: there is little left", "free some space there before it is full")
    else:
        yield Check(name, "ok", room)


def _log(folders: Folders) -> Iterator[Check]:
    if not folders.database.exists():
        yield Check("log", "ok", "nothing is recorded yet")
        return
    connection = open_reader(folders.database)  # says what to do about a newer, damaged or foreign one
    try:
        reader = LogReader(connection)
        head = reader.checked_end()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        row = connection.execute("SELECT value FROM meta WHERE key = 'written_by'").fetchone()
    except sqlite3.Error as error:
        remedy = "handrail log verify says where; keep a copy, and move it away to begin a new log"
        yield Check("log", "problem", f"{folders.database} is damaged: {error}", remedy)
        return
    except Exception as error:  # the end of the chain does not hold; the text says so
        yield Check("log", "problem", str(error))
        return
    finally:
        connection.close()
    shape = f"schema {version} of {VERSION}, made by handrail {row[0] if row else 'unknown'}"
    yield Check("log", "ok", f"{head.sequence:,} records, {shape}; handrail log verify checks all of them")


def _interrupted(folders: Folders) -> Iterator[Check]:
    """Calls that nobody knows the outcome of. While somebody holds the workspace they are simply running."""
    if not folders.database.exists() or holder_of(folders) is not None:
        return
    try:
        with LogReader.at(folders.database) as reader:
            ids = [entry.call_id for entry in reader.unfinished()]
            try:
                only_noted = noted(reader.connection, folders.own)
            except StartError as error:
                yield Check("interrupted calls", "problem", str(error))
                return
            ids += [record.call_id for record in only_noted if record.kind == "intended"]
    except Exception:  # why the log cannot be read is said by the check of the log
        return
    if ids:
        shown = ", ".join(ids[:10]) + (f" and {len(ids) - 10} more" if len(ids) > 10 else "")
        about = f"{shown}: begun before the last stop, outcome unknown; they are not run again"
        yield Check("interrupted calls", "warning", about, "handrail explain CALL_ID")


def _existing(path: Path) -> Path:
    return next(one for one in (path, *path.parents) if one.exists())


def _amount(count: int) -> str:
    return f"{count / 1024**3:.1f} GiB" if count >= 1024**3 else f"{count / 1024**2:.1f} MiB"
