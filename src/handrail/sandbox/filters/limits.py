"""What the processes of a sandbox may use up, as the kernel's resource limits, and how one that ended a program is told.

The launcher sets them inside the sandbox. Set on bubblewrap itself, the bound on processes would count everything else
that the user runs; inside, the kernel counts the sandbox's own. It counts none for the machine's real root, whom only a
control group or another user's identity (:mod:`handrail.sandbox.view.identity`) can bound.

Some bounds of the kernel are shared by all processes of a user, whose editor fails once a sandbox has used them up. Of
these a sandbox gets a part: as a resource limit where there is one, else as a count of its user namespace.

Memory of a process is RLIMIT_DATA. RLIMIT_AS would count address space that is only reserved: with 8 GiB of it node does
not start, while all its use and that of a JVM stay below 512 MiB of data. What all processes hold together, and what they
share, no such limit counts (:mod:`handrail.sandbox.filters.memory`).
"""

from __future__ import annotations

import os
import re
import resource
import signal
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from handrail.contract.sandbox import Limits
from handrail.sandbox.filters import cgroups

_NO_CORE = 1
"""Byte. 0 would keep core files away and still start the host's crash handler, as its root; 1 is how Linux says neither."""
_GRACE_S = 5
"""After SIGXCPU, which a program may catch to save its work, until SIGKILL."""
_TAIL = 4096
_USERS_LIMITS: Mapping[int, int] = {
    resource.RLIMIT_SIGPENDING: 4096,
    resource.RLIMIT_MSGQUEUE: 256 * 1024,
    resource.RLIMIT_MEMLOCK: 1024 * 1024,
}
"""Limits whose use the kernel counts for the whole user: POSIX timers and queued signals, message queues, locked memory.
The most of each that a sandbox gets."""
_PART = 4
"""A sandbox gets at most this part of a bound that it shares with its user."""
_INOTIFY = ("instances", "watches")


def rlimits(limits: Limits) -> dict[int, tuple[int, int]]:
    """Soft and hard value of each resource (``RLIMIT_*``), none above what this process may itself have."""
    wanted: dict[int, tuple[int, int]] = {resource.RLIMIT_CORE: (_NO_CORE, _NO_CORE)}
    if limits.cpu_s is not None:
        wanted[resource.RLIMIT_CPU] = (limits.cpu_s, limits.cpu_s + _GRACE_S)
    for which, most in _USERS_LIMITS.items():
        part = min(most, _part_of(resource.getrlimit(which)[0], most))
        wanted[which] = (part, part)
    processes = limits.processes
    if processes is not None:
        processes = min(processes, _part_of(resource.getrlimit(resource.RLIMIT_NPROC)[0], processes))
    for which, value in (
        (resource.RLIMIT_DATA, limits.memory_bytes),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_NOFILE, limits.open_files),
    ):
        if value is not None:
            wanted[which] = (value, value)
    return {which: _at_most(which, *bounds) for which, bounds in wanted.items()}


@lru_cache(maxsize=1)
def user_counts() -> tuple[tuple[str, int], ...]:
    """Return the settings of a sandbox's user namespace that bound a part of its user's inotify instances and watches.

    Each is a file beneath ``/proc/sys/user`` with its number. Linux has them since 4.11; without them there are none.
    """
    found: list[tuple[str, int]] = []
    for kind in _INOTIFY:
        setting = Path(f"/proc/sys/user/max_inotify_{kind}")
        try:
            whole = int(Path(f"/proc/sys/fs/inotify/max_user_{kind}").read_text())
        except (OSError, ValueError):
            continue
        if setting.exists():
            found.append((str(setting), max(1, whole // _PART)))
    return tuple(found)


def memory_of_call(limits: Limits) -> int | None:
    """What the processes of one sandbox may hold together, in bytes: never more than the machine can do without."""
    return None if limits.call_memory_bytes is None else min(limits.call_memory_bytes, memory_of_all())


@lru_cache(maxsize=1)
def memory_of_all() -> int:
    """What all sandboxes of one Handrail may hold together, in bytes: three quarters of what there is for it."""
    return (cgroups.own_bound() or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) // 4 * 3


def _part_of(whole: int, otherwise: int) -> int:
    return otherwise if whole == resource.RLIM_INFINITY else max(1, whole // _PART)


def _at_most(which: int, soft: int, hard: int) -> tuple[int, int]:
    ceiling = resource.getrlimit(which)[1]
    if ceiling == resource.RLIM_INFINITY:
        return soft, hard
    return min(soft, ceiling), min(hard, ceiling)


class Bound(NamedTuple):
    """A bound that a program came upon, in words. Not ``sure``: its words say so, and they are its own."""

    about: str
    sure: bool


def ended_by(code: int, said: bytes) -> Bound | None:
    """Which bound ended a program, as far as its end and its last words show; None where nothing does.

    :param code: as :meth:`handrail.contract.sandbox.Process.wait` gives it, or a shell
    :param said: what it wrote, of which the end counts
    """
    if code == 0:
        return None
    if (known := _SIGNALS.get(-code if code < 0 else code - 128)) is not None:
        return Bound(known, sure=True)
    tail = said[-_TAIL:]
    return next((Bound(about, sure=False) for pattern, about in _WORDS if pattern.search(tail)), None)


def _setting(name: str) -> str:
    return f"the operator sets it as sandbox.{name}"


_SIGNALS: Mapping[int, str] = {
    signal.SIGXCPU: f"it has used up the processor time that one process may have ({_setting('cpu_s')})",
    signal.SIGXFSZ: f"it has written a file to the greatest length that one may have ({_setting('file_mib')})",
    signal.SIGSYS: "it made a system call of another architecture, and only this machine's own programs run in a sandbox",
}
_WORDS = tuple(
    (re.compile(pattern), f"perhaps the bound on {about} ({_setting(setting)})")
    for pattern, setting, about in (
        (
            rb"(?i)cannot allocate memory|\bout of memory|MemoryError|bad_alloc|\bENOMEM\b",
            "memory_mib",
            "the memory of a process",
        ),
        (
            rb"(?i)resource temporarily unavailable|can't start new thread|\bEAGAIN\b",
            "processes",
            "processes and threads",
        ),
        (rb"(?i)too many open files|\bEMFILE\b", "open_files", "the files that a process may have open"),
        (rb"(?i)file too large|\bEFBIG\b", "file_mib", "the length of a file"),
        (rb"(?i)no space left on device|\bENOSPC\b", "tmp_mib", "the private /tmp, or a full disk"),
    )
)
