"""The checks of the workspace and state folders, disk space, the log, the lease holder, and the clock."""

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
from handrail.kernel.doctor.machine_checks import DoctorCheck, run_check_isolated
from handrail.origins.listed_paths import can_respelling_bypass_mounts, is_name_folding_folder
from handrail.record.commit_log import read_unwritten_records
from handrail.record.log_reader import LogReader
from handrail.runtime.files import atomic_write
from handrail.sandbox.view.cached_folder_tree import FolderTree
from handrail.store.database.schema_migrations import VERSION
from handrail.store.database.workspace_database import open_reader
from handrail.store.lease import LeaseHolder, find_lease_holder
from handrail.store.state_folders import STATE_VARIABLE, StateFolders
from handrail.store.state_inventory import measure_folder_size

_LOW_SPACE_BYTES = 256 * 1024 * 1024
_FULL_DISK_BYTES = 16 * 1024 * 1024
_LOW_INODES = 1000


def check_storage(folders: StateFolders) -> list[DoctorCheck]:
    """Check the folders and their content, without writing or waiting."""
    return [
        *run_check_isolated("workspace", lambda: _check_workspace(folders)),
        *run_check_isolated("file names", lambda: check_file_name_aliasing(str(folders.workspace))),
        *run_check_isolated("hard links", lambda: _check_hard_links(folders)),
        *run_check_isolated("state", lambda: _check_state(folders)),
        *run_check_isolated("log", lambda: _check_log(folders)),
        *run_check_isolated("interrupted calls", lambda: _check_interrupted(folders)),
    ]


def _check_workspace(folders: StateFolders) -> Iterator[DoctorCheck]:
    yield from _check_folder("workspace", folders.workspace, "the file tools cannot change files there")


def check_file_name_aliasing(folder: str) -> Iterator[DoctorCheck]:
    """Check whether a folder is on a file system that accepts several spellings of one name."""
    if not is_name_folding_folder(folder):
        return
    about = f"{folder} is on a file system that accepts several spellings of one name, such as another letter case. Rules, locks and protected names apply to all spellings of a file"
    if can_respelling_bypass_mounts(folder):
        about += (
            ". A program cannot create files in the folders around a file that rules hide from programs or protect, and a sandbox "
            "closes at most 400 entries of such folders"
        )
    yield DoctorCheck("file names", "warning", about, "keep it on a file system that distinguishes letter case")


def _check_hard_links(folders: StateFolders) -> Iterator[DoctorCheck]:
    tree = FolderTree(os.path.realpath(folders.workspace))
    tree.refresh()
    found = atomic_write.find_outside_hard_links([tree])
    if not found:
        yield DoctorCheck("hard links", "ok", "no file of the workspace has another name outside it")
        return
    size = sum(Path(path).lstat().st_size for path in found if os.path.lexists(path))
    yield DoctorCheck(
        "hard links",
        "ok",
        f"{len(found):,} files of the workspace ({_format_bytes(size)}) have other names outside it, for example in the store of a "
        "package manager. Before a program with write access starts, Handrail replaces them with copies (per start at most "
        f"{atomic_write.MAX_COPIED_FILES:,} files and {_format_bytes(atomic_write.MAX_COPIED_BYTES)}; the others are read-only for that program)",
    )


def _check_state(folders: StateFolders) -> Iterator[DoctorCheck]:
    place = (
        folders.workspace_state_folder if folders.workspace_state_folder.exists() else _nearest_existing(folders.state)
    )
    if place != folders.workspace_state_folder:
        yield DoctorCheck("state", "ok", f"no state yet; it would be in {folders.workspace_state_folder}")
    else:
        size = sum(measure_folder_size(folders.state / part / folders.key) for part in ("ws", "output", "scratch"))
        yield from _check_private_folder(folders.state, 0o022)
        yield from _check_private_folder(
            folders.workspace_state_folder, 0o077, f", {_format_bytes(size)} for this workspace"
        )
    if folders.user_data_folder.exists():
        kept = _format_bytes(measure_folder_size(folders.user_data_folder))
        yield from _check_private_folder(
            folders.user_data_folder, 0o077, f", {kept} of user data of tools ({{user-data}})"
        )
    yield from _check_folder("state disk", place, "calls cannot run without a log")


def _check_private_folder(folder: Path, closed: int, more: str = "") -> Iterator[DoctorCheck]:
    """Check whether only the user can access a folder.

    :param closed: the permission bits that must not be set
    :param more: further text for a folder without problems; empty for no result
    """
    found = folder.lstat()
    mode = stat.S_IMODE(found.st_mode)
    message = f"{folder}, mode {mode:04o}, owner {found.st_uid}{more}"
    if not stat.S_ISDIR(found.st_mode):
        yield DoctorCheck("state", "problem", f"{folder} is not a folder", "check who created it, or use --state DIR")
    elif os.name != "nt" and found.st_uid != os.geteuid():
        remedy = "use another folder with --state DIR"
        yield DoctorCheck("state", "problem", f"{message}: another user owns it (you are {os.geteuid()})", remedy)
    elif os.name != "nt" and mode & closed:
        yield DoctorCheck(
            "state",
            "problem",
            f"{message}: other users can access it",
            f"check who changed it, then run chmod 700 {folder}",
        )
    elif more:
        yield DoctorCheck("state", "ok", message)


def _check_folder(name: str, folder: Path, consequence: str) -> Iterator[DoctorCheck]:
    disk = os.statvfs(folder)
    free, files = disk.f_bavail * disk.f_frsize, disk.f_favail
    room = f"{folder}, {_format_bytes(free)} free" + (f", {files:,} inodes free" if disk.f_files else "")
    other = ", or use another folder" if name == "workspace" else f", or use another folder: set {STATE_VARIABLE}"
    if disk.f_flag & os.ST_RDONLY:
        problem = "problem" if name != "workspace" else "warning"
        yield DoctorCheck(name, problem, f"{room}: mounted read-only, so {consequence}", f"mount it writable{other}")
    elif not os.access(folder, os.W_OK | os.X_OK):
        problem = "problem" if name != "workspace" else "warning"
        remedy = f"make it writable for this user{other}"
        yield DoctorCheck(name, problem, f"{room}: this user cannot write there, so {consequence}", remedy)
    elif free < _FULL_DISK_BYTES or (disk.f_files and not files):
        yield DoctorCheck(
            name, "problem", f"{room}: the disk is full", "free some space there, for example with handrail log purge"
        )
    elif free < _LOW_SPACE_BYTES or (disk.f_files and files < _LOW_INODES):
        yield DoctorCheck(name, "warning", f"{room}: the disk is almost full", "free some space there")
    else:
        yield DoctorCheck(name, "ok", room)


def _check_log(folders: StateFolders) -> Iterator[DoctorCheck]:
    if not folders.database_file.exists():
        yield DoctorCheck("log", "ok", "no records yet")
        return
    connection = open_reader(folders.database_file)  # its errors explain newer, damaged and unknown files
    try:
        reader = LogReader(connection)
        head = reader.check_last_records()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        row = connection.execute("SELECT value FROM meta WHERE key = 'written_by'").fetchone()
    except sqlite3.Error as error:
        remedy = "find the place with handrail log verify; to start a new log, keep a copy and move the file away"
        yield DoctorCheck("log", "problem", f"{folders.database_file} is damaged: {error}", remedy)
        return
    except Exception as error:  # the end of the chain is damaged; the text explains it
        yield DoctorCheck("log", "problem", str(error))
        return
    finally:
        connection.close()
    shape = f"schema {version} of {VERSION}, written by handrail {row[0] if row else 'unknown'}"
    yield DoctorCheck("log", "ok", f"{head.sequence:,} records, {shape}; handrail log verify checks all of them")


def _check_interrupted(folders: StateFolders) -> Iterator[DoctorCheck]:
    """Check for calls with an unknown outcome.

    While a process holds the workspace, such calls are running.
    """
    if not folders.database_file.exists() or find_lease_holder(folders) is not None:
        return
    try:
        with LogReader.open_database(folders.database_file) as reader:
            ids = [entry.call_id for entry in reader.list_unfinished_intents()]
            try:
                only_noted = read_unwritten_records(reader.connection, folders.workspace_state_folder)
            except StartError as error:
                yield DoctorCheck("interrupted calls", "problem", str(error))
                return
            ids += [record.call_id for record in only_noted if record.kind == "intended"]
    except Exception:  # the check of the log reports it
        return
    if ids:
        shown = ", ".join(ids[:10]) + (f" and {len(ids) - 10} more" if len(ids) > 10 else "")
        about = f"{shown}: started before the last stop, outcome unknown; they are not run again"
        yield DoctorCheck("interrupted calls", "warning", about, "handrail explain CALL_ID")


def _nearest_existing(path: Path) -> Path:
    return next(one for one in (path, *path.parents) if one.exists())


def _format_bytes(count: int) -> str:
    return f"{count / 1024**3:.1f} GiB" if count >= 1024**3 else f"{count / 1024**2:.1f} MiB"


# The lease holder, its socket, and the wall clock since the last records.

_CONNECT_TIMEOUT_S = 2.0
_TOLERANCE_NS = 5_000_000_000
"""A synchronised clock drifts by less."""


def check_lease_holder(folders: StateFolders) -> list[DoctorCheck]:
    """Check the lease holder, its socket and the clock, without side effects."""
    return [
        *run_check_isolated("holder", lambda: _check_holder(folders)),
        *run_check_isolated("socket", lambda: _check_socket(folders)),
        *run_check_isolated("clock", lambda: check_wall_clock(folders, time.time_ns())),
    ]


def _check_holder(folders: StateFolders) -> Iterator[DoctorCheck]:
    if (holder := find_lease_holder(folders)) is None:
        yield DoctorCheck("holder", "ok", "no process holds the workspace")
    elif holder.state == "alive":
        yield DoctorCheck("holder", "ok", f"{holder}, alive")
    elif holder.state == "paused":
        remedy = f"continue it (kill -CONT {holder.pid}) or end it; the next process takes over"
        yield DoctorCheck("holder", "warning", f"{holder}, paused", remedy)
    else:
        remedy = f"if this persists, end it (kill {holder.pid}); the next process takes over"
        yield DoctorCheck("holder", "warning", f"{holder}, does not answer", remedy)


def _check_socket(folders: StateFolders) -> Iterator[DoctorCheck]:
    if (holder := find_lease_holder(folders)) is None or not holder.socket:
        if holder is not None:
            yield DoctorCheck(
                "socket",
                "warning",
                "the holder accepts no connections",
                "stop it before you start another process here",
            )
        return
    path = folders.workspace_state_folder / holder.socket
    try:
        found = path.lstat()
    except FileNotFoundError:
        yield DoctorCheck(
            "socket",
            "problem",
            f"{path} does not exist, so no process can connect to {holder}",
            "stop that process and start it again",
        )
        return
    if not stat.S_ISSOCK(found.st_mode) or (os.name != "nt" and found.st_uid != os.geteuid()):
        yield DoctorCheck(
            "socket", "problem", f"{path} is not a socket of this user", "check who created it, then remove it"
        )
    elif (fault := _find_connection_problem(path)) is not None:
        yield DoctorCheck("socket", "problem", f"{path}: {fault}", "stop the holder and start it again")
    else:
        yield DoctorCheck("socket", "ok", f"{path} answers, protocol {holder.protocol}")


def _find_connection_problem(path: Path) -> str | None:
    """Return why a connection fails, or None.

    The socket is addressed through its folder, because an address has at most 107 bytes.
    """
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            line.settimeout(_CONNECT_TIMEOUT_S)
            line.connect(f"/proc/self/fd/{folder}/{path.name}")
    except OSError as error:
        return error.strerror or str(error)
    finally:
        os.close(folder)
    return None


def check_wall_clock(folders: StateFolders, now_ns: int) -> Iterator[DoctorCheck]:
    """Check whether the wall clock was changed.

    It is compared with the newest record. While a process holds the workspace, it is also compared with the monotonic clock:
    if that process started a minute ago by the monotonic clock, its start time must not be an hour ago by the wall clock.
    """
    newest = 0
    if folders.database_file.exists():
        try:
            with LogReader.open_database(folders.database_file) as reader:
                newest = max((entry.at_ns for entry in reader.records(limit=20, newest_first=True)), default=0)
        except Exception:  # the check of the log reports it
            newest = 0
    if newest > now_ns + _TOLERANCE_NS:
        message = f"the time is {_format_time(now_ns)}, but the newest record is {_format_duration(newest - now_ns)} later, at {_format_time(newest)}"
        yield DoctorCheck(
            "clock", "warning", f"{message}: the clock was set back", "set the clock (timedatectl set-ntp true)"
        )
        return
    holder = find_lease_holder(folders)
    shift = None if holder is None else _measure_clock_shift(holder, now_ns)
    if shift is not None and abs(shift) > _TOLERANCE_NS:
        way = "back" if shift < 0 else "forward"
        about = f"the clock was set {way} by {_format_duration(abs(shift))} since the holder started"
        yield DoctorCheck("clock", "warning", about, "check the clock (timedatectl): approvals expire by it")
    else:
        yield DoctorCheck("clock", "ok", f"{_format_time(now_ns)}, not before the newest record")


def _measure_clock_shift(holder: LeaseHolder, now_ns: int) -> int | None:
    """Return how much the wall clock was changed since a process noted the time; None if unknown.

    A process notes the time a moment after its start. A noted age that is smaller than its real age is therefore no sign that
    the clock was set back.
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
    # A process cannot note the time before its start. A late note does not indicate a changed clock.
    return max(0, noted_age - age_ns)


def _format_time(at_ns: int) -> str:
    return datetime.fromtimestamp(at_ns / 1e9).astimezone().isoformat(sep=" ", timespec="seconds")


def _format_duration(ns: int) -> str:
    seconds = ns // 1_000_000_000
    for size, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds // size} {name}"
    return f"{seconds} seconds"
