"""Resource limits of a sandbox's processes and of all sandboxes together, and the message about a limit that was hit.

The launcher sets them inside the sandbox. On bubblewrap itself, the limit on processes would count everything else that the
user runs; inside, the kernel counts the sandbox's own. For the machine's real root the kernel counts none: only a control
group or another user's identity (:mod:`handrail.sandbox.view.sandbox_user`) can bound it.

Some limits of the kernel are shared by all processes of a user, whose editor fails once a sandbox has used them up. A
sandbox gets a part of these: as a resource limit if one exists, else as a count of its user namespace.

Memory of a process is RLIMIT_DATA. RLIMIT_AS would count address space that is only reserved: with 8 GiB of it node does
not start, while all its use and that of a JVM stay below 512 MiB of data. These limits do not count the sum over all
processes or shared memory (:mod:`handrail.sandbox.filters.memory_monitor`).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import resource
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

from handrail.contract.sandbox_protocol import SandboxLimits

# Control groups enforce two limits: on the processes of real root, which RLIMIT_NPROC does not count, and on memory.
#
# All sandboxes of one Handrail share the groups, so they protect the machine and not one sandbox from another. A group
# is made next to the others at the top (cgroup v2), or below Handrail's own (v1), and removed when Handrail ends. The
# next start removes groups of a killed one. Without the right to make a group, there are no limits, and the tier says
# so. An ordinary user has that right only below groups that systemd gave them, where each start would wait for the
# whole machine's forks to pause (:func:`find_cgroup_entry_file`). Such a Handrail is limited as a whole, by the group in which it is
# started (:func:`read_own_memory_limit`).

_PREFIX = "handrail-"
_SHELL = "/bin/sh"
_ENTER_SCRIPT = 'while [ "$1" != -- ]; do echo 0 > "$1" || exit; shift; done; shift; exec "$@"'
_LIMIT_FILES = {("pids", 1): "pids.max", ("pids", 2): "pids.max"} | {
    ("memory", 1): "memory.limit_in_bytes",
    ("memory", 2): "memory.max",
}
Controller = Literal["pids", "memory"]


class ParentCgroup(NamedTuple):
    """A control group that can have subgroups, with the version of its hierarchy."""

    folder: Path
    version: int


def make_limiting_cgroups(processes: int | None, memory: int | None) -> tuple[Path, ...]:
    """Return the groups to enter that limit processes and memory; none if there are none, or no need.

    :param processes: for all sandboxes of this process with the same limits
    :param memory: in bytes, for all of them
    """
    if os.geteuid() != 0:
        return ()
    found = _make_groups_once(os.getpid(), processes, memory)
    if not all(group.is_dir() for group in found):  # another process has removed one
        _make_groups_once.cache_clear()
        found = _make_groups_once(os.getpid(), processes, memory)
    return found


def start_in_cgroups(
    groups: tuple[Path, ...], program: str, argv: Sequence[str], start: Callable[[str, Sequence[str]], int]
) -> int:
    """Start a program in these groups and return the result of ``start``.

    A process is born in the groups of the thread that makes it. So if threads can have their own groups, one thread
    does nothing but start programs. Elsewhere a shell enters the groups and becomes the program, which takes longer.
    """
    return submit_start_in_cgroups(groups, program, argv, start).result() if groups else start(program, argv)


def submit_start_in_cgroups(
    groups: tuple[Path, ...], program: str, argv: Sequence[str], start: Callable[[str, Sequence[str]], int]
) -> Future[int]:
    """Start a program as :func:`start_in_cgroups` does, in a thread, and return its future result."""
    with contextlib.suppress(RuntimeError):  # the interpreter is ending
        if (thread := _get_cgroup_starter_thread(os.getpid(), groups)) is not None:
            return thread.submit(start, program, argv)
        if (thread := _get_cgroup_starter_thread(os.getpid(), ())) is not None:
            return thread.submit(start, *build_cgroup_entry_command(groups, program, argv))
    done = Future[int]()
    done.set_result(start(*build_cgroup_entry_command(groups, program, argv)) if groups else start(program, argv))
    return done


_STARTER_THREADS: dict[tuple[int, tuple[Path, ...]], ThreadPoolExecutor | None] = {}
"""The threads that start programs, by process and groups; None if there cannot be one."""


def end_cgroup_starter_threads() -> None:
    """End the threads of this process that start programs. The next start makes new ones."""
    for key in tuple(_STARTER_THREADS):
        if key[0] == os.getpid() and (thread := _STARTER_THREADS.pop(key, None)) is not None:
            thread.shutdown()  # after its queued work


def _get_cgroup_starter_thread(owner: int, groups: tuple[Path, ...]) -> ThreadPoolExecutor | None:
    """Return a thread in these groups; None if there cannot be one. A forked process gets another thread."""
    key = owner, groups
    if key not in _STARTER_THREADS:
        made = _make_cgroup_starter_thread(groups)
        if _STARTER_THREADS.setdefault(key, made) is not made and made is not None:
            made.shutdown()  # another thread was faster
    return _STARTER_THREADS.get(key)


def _make_cgroup_starter_thread(groups: tuple[Path, ...]) -> ThreadPoolExecutor | None:
    """Make a thread in these groups; None if that is impossible.

    The kernel counts a process's memory in the groups of its first thread, and selects there for the out-of-memory
    killer. One more thread in other groups changes neither.
    """
    entrances = [group / "tasks" for group in groups]
    if not all(place.exists() for place in entrances):
        return None
    thread = ThreadPoolExecutor(1, thread_name_prefix="handrail-sandboxes")
    try:
        for place in entrances:
            thread.submit(place.write_text, "0").result()
    except (OSError, RuntimeError):
        thread.shutdown()
        return None
    return thread


def build_cgroup_entry_command(groups: Sequence[Path], program: str, argv: Sequence[str]) -> tuple[str, list[str]]:
    """Return the program and argv to start instead: a shell that enters the groups first."""
    entrances = (str(find_cgroup_entry_file(group)) for group in groups)
    return _SHELL, [_SHELL, "-c", _ENTER_SCRIPT, _SHELL, *entrances, "--", program, *argv[1:]]


def find_cgroup_entry_file(group: Path) -> Path:
    """Return the file through which a process with one thread, such as a shell, enters a group.

    ``cgroup.procs`` moves all threads of a process, so the kernel waits until no process anywhere is in the middle of a
    fork: 10 ms, as long as a sandbox takes in all. A thread that moves itself does not wait, which only version 1
    allows.
    """
    threads = group / "tasks"
    return threads if threads.exists() else group / "cgroup.procs"


@lru_cache(maxsize=16)
def _make_groups_once(owner: int, processes: int | None, memory: int | None) -> tuple[Path, ...]:
    wanted: dict[Path, dict[str, int]] = {}
    counted: tuple[tuple[Controller, int | None], ...] = (("pids", processes), ("memory", memory))
    for controller, bound in counted:
        if bound is not None and (found := find_parent_cgroup(controller)) is not None:
            folder = found.folder / f"{_PREFIX}{owner}-{processes}-{memory}"
            wanted.setdefault(folder, {})[_LIMIT_FILES[controller, found.version]] = bound
    return tuple(folder for folder, bounds in wanted.items() if _make_group(folder, owner, bounds))


def _make_group(folder: Path, owner: int, bounds: dict[str, int]) -> bool:
    _remove_stale_cgroups(folder.parent)
    try:
        folder.mkdir(exist_ok=True)
        for name, bound in bounds.items():
            (folder / name).write_text(str(bound))
    except OSError:
        with contextlib.suppress(OSError):
            folder.rmdir()
        return False
    atexit.register(_remove_group, folder, owner)
    return True


def find_parent_cgroup(
    controller: Controller, mounts: str = "/proc/self/mountinfo", own: str = "/proc/self/cgroup"
) -> ParentCgroup | None:
    """Return the group below which a new group can limit ``controller``; None if there is none."""
    for mounted, version, group in _find_cgroup_hierarchies(controller, mounts, own):
        if version == 1:
            return ParentCgroup(group if group.is_dir() else mounted, 1)
        with contextlib.suppress(OSError):
            if controller in (mounted / "cgroup.subtree_control").read_text().split():
                return ParentCgroup(mounted, 2)
    return None


def read_own_memory_limit(mounts: str = "/proc/self/mountinfo", own: str = "/proc/self/cgroup") -> int | None:
    """Return the memory limit that control groups set for Handrail and its programs, in bytes; else None."""
    bounds: list[int] = []
    for mounted, version, group in _find_cgroup_hierarchies("memory", mounts, own):
        for folder in (group, *group.parents):
            if not folder.is_relative_to(mounted):
                break
            with contextlib.suppress(OSError, ValueError):  # "max" is not a number
                bounds.append(int((folder / _LIMIT_FILES["memory", version]).read_text()))
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min((bound for bound in bounds if bound < whole), default=None)


def _find_cgroup_hierarchies(controller: Controller, mounts: str, own: str) -> list[tuple[Path, int, Path]]:
    """Return the hierarchies for a controller: mount point, version, and this process's group in it."""
    try:
        lines = [line.split() for line in Path(mounts).read_text().splitlines()]
        groups = [line.split(":", 2) for line in Path(own).read_text().splitlines()]
    except OSError:
        return []
    found: list[tuple[Path, int, Path]] = []
    for fields in lines:
        if "-" not in fields[:-3]:
            continue
        kind, options, mounted = fields[fields.index("-") + 1], fields[-1].split(","), Path(fields[4])
        if kind == "cgroup" and controller in options:
            of_it = next((group[2] for group in groups if controller in group[1].split(",")), "/")
            found.append((mounted, 1, mounted / of_it.lstrip("/")))
        elif kind == "cgroup2":
            of_it = next((group[2] for group in groups if group[0] == "0"), "/")
            found.append((mounted, 2, mounted / of_it.lstrip("/")))
    return found


def _remove_stale_cgroups(place: Path) -> None:
    """Remove the groups of ended processes. A group with processes in it stays."""
    for left in place.glob(f"{_PREFIX}*"):
        owner = left.name.removeprefix(_PREFIX).partition("-")[0]
        if owner.isdigit() and not Path("/proc", owner).exists():
            with contextlib.suppress(OSError):
                left.rmdir()


def _remove_group(folder: Path, owner: int) -> None:
    if os.getpid() == owner:
        with contextlib.suppress(OSError):
            folder.rmdir()


_NO_CORE = 1
"""In bytes. 0 prevents core files but still starts the host's crash handler, as root; 1 prevents both in Linux."""
_GRACE_S = 5
"""From SIGXCPU, which a program may catch to save its work, to SIGKILL."""
_SCANNED_BYTES = 4096
_USERS_LIMITS: Mapping[int, int] = {
    resource.RLIMIT_SIGPENDING: 4096,
    resource.RLIMIT_MSGQUEUE: 256 * 1024,
    resource.RLIMIT_MEMLOCK: 1024 * 1024,
}
"""Limits that the kernel counts per user: queued signals, message queues, locked memory. The maximum for a sandbox."""
_SHARE = 4
"""The divisor for limits that a sandbox shares with its user."""
_INOTIFY_SETTINGS = ("instances", "watches")


def build_rlimits(limits: SandboxLimits) -> dict[int, tuple[int, int]]:
    """Return the soft and hard value of each resource (``RLIMIT_*``), at most this process's own limits."""
    wanted: dict[int, tuple[int, int]] = {resource.RLIMIT_CORE: (_NO_CORE, _NO_CORE)}
    if limits.cpu_s is not None:
        wanted[resource.RLIMIT_CPU] = (limits.cpu_s, limits.cpu_s + _GRACE_S)
    for which, most in _USERS_LIMITS.items():
        part = min(most, _compute_share(resource.getrlimit(which)[0], most))
        wanted[which] = (part, part)
    processes = limits.processes
    if processes is not None:
        processes = min(processes, _compute_share(resource.getrlimit(resource.RLIMIT_NPROC)[0], processes))
    for which, value in (
        (resource.RLIMIT_DATA, limits.memory_bytes),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_NOFILE, limits.open_files),
    ):
        if value is not None:
            wanted[which] = (value, value)
    return {which: _clamp_limit(which, *bounds) for which, bounds in wanted.items()}


@lru_cache(maxsize=1)
def compute_sandbox_inotify_limits() -> tuple[tuple[str, int], ...]:
    """Return the settings of a sandbox's user namespace that limit inotify instances and watches.

    Each is a file below ``/proc/sys/user`` with its number: a share of the user's limit. Linux has these files since
    4.11; without them the result is empty.
    """
    found: list[tuple[str, int]] = []
    for kind in _INOTIFY_SETTINGS:
        setting = Path(f"/proc/sys/user/max_inotify_{kind}")
        try:
            whole = int(Path(f"/proc/sys/fs/inotify/max_user_{kind}").read_text())
        except (OSError, ValueError):
            continue
        if setting.exists():
            found.append((str(setting), max(1, whole // _SHARE)))
    return tuple(found)


def compute_sandbox_memory_limit(limits: SandboxLimits) -> int | None:
    """Return the memory limit of one sandbox in bytes, at most the limit of all sandboxes."""
    return None if limits.call_memory_bytes is None else min(limits.call_memory_bytes, compute_total_memory_limit())


@lru_cache(maxsize=1)
def compute_total_memory_limit() -> int:
    """Return the memory limit of all sandboxes of one Handrail, in bytes: three quarters of the memory."""
    return (read_own_memory_limit() or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) // 4 * 3


def _compute_share(whole: int, otherwise: int) -> int:
    return otherwise if whole == resource.RLIM_INFINITY else max(1, whole // _SHARE)


def _clamp_limit(which: int, soft: int, hard: int) -> tuple[int, int]:
    ceiling = resource.getrlimit(which)[1]
    if ceiling == resource.RLIM_INFINITY:
        return soft, hard
    return min(soft, ceiling), min(hard, ceiling)


class ReachedLimit(NamedTuple):
    """A limit that a program reached, in words.

    Without ``is_certain``, the limit is only a guess from the program's output, and the words say so.
    """

    text: str
    is_certain: bool


def infer_reached_limit(code: int, output: bytes) -> ReachedLimit | None:
    """Return the limit that ended a program, as far as its exit code and last output show; else None.

    :param code: as from :meth:`handrail.contract.sandbox_protocol.Process.wait`, or from a shell
    :param output: the output; its end counts
    """
    if code == 0:
        return None
    if (known := _SIGNAL_TEXTS.get(-code if code < 0 else code - 128)) is not None:
        return ReachedLimit(known, is_certain=True)
    tail = output[-_SCANNED_BYTES:]
    return next(
        (ReachedLimit(about, is_certain=False) for pattern, about in _MESSAGE_PATTERNS if pattern.search(tail)), None
    )


def _format_setting(name: str) -> str:
    return f"the operator sets it as sandbox.{name}"


_SIGNAL_TEXTS: Mapping[int, str] = {
    signal.SIGXCPU: f"it has used up the processor time of one process ({_format_setting('cpu_s')})",
    signal.SIGXFSZ: f"it has written a file of the maximum length ({_format_setting('file_mib')})",
    signal.SIGSYS: (
        "it made a system call of another architecture, and only programs for this machine run in a sandbox"
    ),
}
_MESSAGE_PATTERNS = tuple(
    (re.compile(pattern), f"it may have reached the limit on {about} ({_format_setting(setting)})")
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
