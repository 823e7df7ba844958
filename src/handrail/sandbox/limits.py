"""What the processes of a sandbox may use up, as the kernel's resource limits, and how one that ended a program is told.

The launcher sets them inside the sandbox. Set on bubblewrap itself, the bound on processes would count everything else
that the user runs; inside, the kernel counts the sandbox's own. It counts none for the machine's real root, whom only a
control group or another user's identity (:mod:`handrail.sandbox.identity`) can bound.

Memory is RLIMIT_DATA. RLIMIT_AS would count address space that is only reserved: with 8 GiB of it node does not start,
while all its use and that of a JVM stay below 512 MiB of data.
"""

from __future__ import annotations

import re
import resource
import signal
from collections.abc import Mapping

from handrail.contract.sandbox import Limits

_NO_CORE = 1
"""Byte. 0 would keep core files away and still start the host's crash handler, as its root; 1 is how Linux says neither."""
_GRACE_S = 5
"""After SIGXCPU, which a program may catch to save its work, until SIGKILL."""
_TAIL = 4096


def rlimits(limits: Limits) -> dict[int, tuple[int, int]]:
    """Soft and hard value of each resource (``RLIMIT_*``), none above what this process may itself have."""
    wanted: dict[int, tuple[int, int]] = {resource.RLIMIT_CORE: (_NO_CORE, _NO_CORE)}
    if limits.cpu_s is not None:
        wanted[resource.RLIMIT_CPU] = (limits.cpu_s, limits.cpu_s + _GRACE_S)
    for which, value in (
        (resource.RLIMIT_DATA, limits.memory_bytes),
        (resource.RLIMIT_NPROC, limits.processes),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_NOFILE, limits.open_files),
    ):
        if value is not None:
            wanted[which] = (value, value)
    return {which: _at_most(which, *bounds) for which, bounds in wanted.items()}


def _at_most(which: int, soft: int, hard: int) -> tuple[int, int]:
    ceiling = resource.getrlimit(which)[1]
    if ceiling == resource.RLIM_INFINITY:
        return soft, hard
    return min(soft, ceiling), min(hard, ceiling)


def ended_by(code: int, said: bytes, limits: Limits) -> str | None:
    """Which bound a program came upon, as far as its end and its last words show; None where nothing does.

    :param code: as :meth:`handrail.contract.sandbox.Process.wait` gives it, or a shell
    :param said: the end of what it wrote
    """
    number = -code if code < 0 else code - 128
    if number == signal.SIGXCPU and limits.cpu_s is not None:
        return f"it had used {limits.cpu_s} s of processor time, the most that one process may ({_SETTING['cpu_s']})"
    if number == signal.SIGXFSZ and limits.file_bytes is not None:
        return f"it wrote a file beyond {_size(limits.file_bytes)}, the longest there may be ({_SETTING['file_mib']})"
    if number == signal.SIGSYS:
        return "it made a system call of another architecture; in the sandbox only this machine's own programs run"
    if code == 0:
        return None
    for pattern, name, about in _WORDS:
        value: int | None = getattr(limits, name)
        if value is not None and pattern.search(said[-_TAIL:]):
            return about.format(_size(value) if name.endswith("bytes") else value)
    return None


_SETTING: Mapping[str, str] = {
    name: f"the operator's setting sandbox.{name}"
    for name in ("cpu_s", "memory_mib", "processes", "file_mib", "open_files", "tmp_mib")
}
_WORDS = tuple(
    (re.compile(pattern), field, f"perhaps for its bound: {about} ({_SETTING[setting]})")
    for pattern, field, setting, about in (
        (
            rb"(?i)cannot allocate memory|out of memory|MemoryError|bad_alloc|ENOMEM",
            "memory_bytes",
            "memory_mib",
            "a process may have {} of memory",
        ),
        (
            rb"(?i)resource temporarily unavailable|can't start new thread|EAGAIN",
            "processes",
            "processes",
            "there may be {} processes and threads",
        ),
        (rb"(?i)too many open files|EMFILE", "open_files", "open_files", "a process may have {} files open"),
        (rb"(?i)file too large|EFBIG", "file_bytes", "file_mib", "a file may be {} long"),
        (
            rb"(?i)no space left on device|ENOSPC",
            "tmp_bytes",
            "tmp_mib",
            "the private /tmp holds {}, or the disk is full",
        ),
    )
)


def _size(count: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit and count % unit == 0:
            return f"{count // unit} {name}"
    return f"{count} bytes"
