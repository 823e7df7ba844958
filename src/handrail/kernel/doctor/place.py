"""The checks of the folders of workspace and state, of disk space and log, of the holder, and of the clock."""

from __future__ import annotations

import os
import socket
import sqlite3
import stat
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from handrail.contract.errors import StartError
from handrail.kernel.doctor.machine import Check, alone
from handrail.record.log import noted
from handrail.record.reading import LogReader
from handrail.runtime.files import replace
from handrail.sandbox.view.tree import Tree
from handrail.store.database.database import open_reader
from handrail.store.database.schema import VERSION
from handrail.store.folders import Folders
from handrail.store.inventory import tree_bytes
from handrail.store.lease import Holder, holder_of

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
    found = replace.shared([tree])
    if not found:
        yield Check("hard links", "ok", "no file of the workspace has a further name outside of it")
        return
    size = sum(Path(path).lstat().st_size for path in found if os.path.lexists(path))
    yield Check(
        "hard links",
        "ok",
        f"{len(found):,} files of the workspace ({_amount(size)}) have further names outside of it, such as in a package manager's "
        "store; before a program that may write starts, each name here is given to a copy (at each start at most "
        f"{replace.MOST_FILES:,} files and {_amount(replace.MOST_BYTES)}; the others are read-only for that program)",
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


# The holder of the workspace, the socket to join it, and the wall clock since the last records.

_PATIENCE_S = 2.0
_TOLERANCE_NS = 5_000_000_000
"""A clock that is disciplined drifts by less."""


def of_holder(folders: Folders) -> list[Check]:
    """Holder, socket and clock; nothing is taken from anybody."""
    return [
        *alone("holder", lambda: _holder(folders)),
        *alone("socket", lambda: _socket(folders)),
        *alone("clock", lambda: of_clock(folders, time.time_ns())),
    ]


def _holder(folders: Folders) -> Iterator[Check]:
    holder = holder_of(folders)
    if holder is None:
        yield Check("holder", "ok", "nobody holds the workspace")
    elif holder.state == "alive":
        yield Check("holder", "ok", f"{holder}, alive")
    elif holder.state == "paused":
        remedy = f"let it go on (kill -CONT {holder.pid}) or end it; whoever starts next takes over"
        yield Check("holder", "warning", f"{holder}, paused", remedy)
    else:
        remedy = f"end it (kill {holder.pid}) if it stays so; whoever starts next takes over"
        yield Check("holder", "warning", f"{holder}, does not answer", remedy)


def _socket(folders: Folders) -> Iterator[Check]:
    holder = holder_of(folders)
    if holder is None or not holder.socket:
        if holder is not None:
            yield Check("socket", "warning", "the holder lets nobody join", "stop it before starting another one here")
        return
    path = folders.own / holder.socket
    try:
        found = path.lstat()
    except FileNotFoundError:
        yield Check(
            "socket", "problem", f"{path} is gone, so nobody can join {holder}", "stop that process and start it again"
        )
        return
    if not stat.S_ISSOCK(found.st_mode) or (os.name != "nt" and found.st_uid != os.geteuid()):
        yield Check("socket", "problem", f"{path} is no socket of yours", "see who put it there and remove it")
    elif (fault := _dialled(path)) is not None:
        yield Check("socket", "problem", f"{path}: {fault}", "stop the holder and start it again")
    else:
        yield Check("socket", "ok", f"{path} answers, protocol {holder.protocol}")


def _dialled(path: Path) -> str | None:
    """Why nobody can connect, or None. The name is opened from its folder, since an address holds 107 bytes."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            line.settimeout(_PATIENCE_S)
            line.connect(f"/proc/self/fd/{folder}/{path.name}")
    except OSError as error:
        return error.strerror or str(error)
    finally:
        os.close(folder)
    return None


def of_clock(folders: Folders, now_ns: int) -> Iterator[Check]:
    """Whether the wall clock has been set since something was noted by it.

    It is compared with the newest record, and, while somebody holds the workspace, with the clock that counts from the
    machine's start and that nobody sets: a process that began a minute ago by that one must not say that it began
    an hour ago.
    """
    newest = 0
    if folders.database.exists():
        try:
            with LogReader.at(folders.database) as reader:
                newest = max((entry.at_ns for entry in reader.records(limit=20, newest_first=True)), default=0)
        except Exception:  # what is wrong with the log is said by the check of the log
            newest = 0
    if newest > now_ns + _TOLERANCE_NS:
        said = f"it is {_at(now_ns)} by the clock, and the newest record was made {_ago(newest - now_ns)} later, at {_at(newest)}"
        yield Check("clock", "warning", f"{said}: it was set back", "set the clock (timedatectl set-ntp true)")
        return
    holder = holder_of(folders)
    shift = None if holder is None else _shift(holder, now_ns)
    if shift is not None and abs(shift) > _TOLERANCE_NS:
        way = "back" if shift < 0 else "forward"
        about = f"it was set {way} by {_ago(abs(shift))} since the holder began"
        yield Check("clock", "warning", about, "approvals expire by it: see that it is right (timedatectl)")
    else:
        yield Check("clock", "ok", f"{_at(now_ns)}, not before anything that is recorded")


def _shift(holder: Holder, now_ns: int) -> int | None:
    """By how much the wall clock was set since a living process noted the time; None where that is not to be told.

    A process notes the time a moment after it begins, so what is smaller than its whole age says nothing when it looks
    like a clock that was set back before.
    """
    if holder.since_ns is None or holder.pid is None:
        return None
    try:
        fields = Path(f"/proc/{holder.pid}/stat").read_bytes().rpartition(b") ")[2].split()
        began_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # since the machine's start
        age_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - int(began_s * 1e9)
    except (OSError, ValueError, IndexError, AttributeError):
        return None
    noted_age = now_ns - holder.since_ns
    if noted_age < 0:
        return noted_age
    # It cannot have noted the time before it began. That it noted it late is not a clock's doing.
    return max(0, noted_age - age_ns)


def _at(at_ns: int) -> str:
    return datetime.fromtimestamp(at_ns / 1e9).astimezone().isoformat(sep=" ", timespec="seconds")


def _ago(ns: int) -> str:
    seconds = ns // 1_000_000_000
    for size, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds // size} {name}"
    return f"{seconds} seconds"
