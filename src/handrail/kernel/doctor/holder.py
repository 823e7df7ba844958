"""Who holds the workspace, whether they can be joined, and whether the clock is the one that the records were made by."""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from handrail.kernel.doctor.check import Check, alone
from handrail.record.reading import LogReader
from handrail.store.folders import Folders
from handrail.store.holder import Holder, holder_of

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
