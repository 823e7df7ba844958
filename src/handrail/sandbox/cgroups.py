"""A bound on processes for real root, whom RLIMIT_NPROC does not count: a control group, where one can be made.

All sandboxes of one Handrail share it, so it keeps the machine and not one sandbox from another. It is made beside the
others at the top (cgroup v2), or beneath Handrail's own (v1), and removed when Handrail ends; what a killed one left is
removed by the next. Without the right to make one there is none, which the tier says.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

_PREFIX = "handrail-"
_SHELL = "/bin/sh"
_ENTER = 'echo 0 > "$0" && exec "$@"'


def group_for(processes: int | None) -> Path | None:
    """A group that bounds processes; None where there is none, or no need.

    :param processes: of all sandboxes of this process that have the same bound
    """
    if processes is None or os.geteuid() != 0:
        return None
    found = _group(os.getpid(), processes)
    if found is not None and not found.is_dir():  # somebody has removed it
        _group.cache_clear()
        found = _group(os.getpid(), processes)
    return found


def command(group: Path, program: str, argv: Sequence[str]) -> tuple[str, list[str]]:
    """The program to start in place of ``program``, and its argv: it enters the group and becomes that one."""
    return _SHELL, [_SHELL, "-c", _ENTER, str(entrance(group)), program, *argv[1:]]


def entrance(group: Path) -> Path:
    """The file by which a process enters that has one thread only, as a shell has.

    ``cgroup.procs`` moves all threads of a process, and for that the kernel waits until no process anywhere is in the
    middle of a fork: 10 ms, where a sandbox takes as long in all. A thread that moves itself waits for nobody; only the
    first version lets it.
    """
    threads = group / "tasks"
    return threads if threads.exists() else group / "cgroup.procs"


@lru_cache(maxsize=16)
def _group(owner: int, processes: int) -> Path | None:
    place = top()
    if place is None:
        return None
    _sweep(place)
    folder = place / f"{_PREFIX}{owner}-{processes}"
    try:
        folder.mkdir(exist_ok=True)
        (folder / "pids.max").write_text(str(processes))
    except OSError:
        with contextlib.suppress(OSError):
            folder.rmdir()
        return None
    atexit.register(_removed, folder, owner)
    return folder


def top(mounts: str = "/proc/self/mountinfo", own: str = "/proc/self/cgroup") -> Path | None:
    """The group beneath which a new one can bound processes; None where there is none."""
    try:
        found = [line.split() for line in Path(mounts).read_text().splitlines()]
        groups = [line.split(":", 2) for line in Path(own).read_text().splitlines()]
    except OSError:
        return None
    for fields in found:
        if "-" not in fields[:-3]:
            continue
        kind, options = fields[fields.index("-") + 1], fields[-1].split(",")
        mounted = Path(fields[4])
        if kind == "cgroup" and "pids" in options:
            path = next((group[2] for group in groups if "pids" in group[1].split(",")), "/")
            within = mounted / path.lstrip("/")
            return within if within.is_dir() else mounted
        if kind == "cgroup2":
            with contextlib.suppress(OSError):
                if "pids" in (mounted / "cgroup.subtree_control").read_text().split():
                    return mounted
    return None


def _sweep(place: Path) -> None:
    """Remove the groups of those that ended without doing it; one with processes in it stays."""
    for left in place.glob(f"{_PREFIX}*"):
        owner = left.name.removeprefix(_PREFIX).partition("-")[0]
        if owner.isdigit() and not Path("/proc", owner).exists():
            with contextlib.suppress(OSError):
                left.rmdir()


def _removed(folder: Path, owner: int) -> None:
    if os.getpid() == owner:
        with contextlib.suppress(OSError):
            folder.rmdir()
