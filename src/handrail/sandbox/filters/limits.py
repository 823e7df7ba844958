"""Resource limits of a sandbox's processes and of all sandboxes together, and the message about a limit that was hit.

The launcher sets them inside the sandbox. On bubblewrap itself, the limit on processes would count everything else that the
user runs; inside, the kernel counts the sandbox's own. For the machine's real root the kernel counts none: only a control
group or another user's identity (:mod:`handrail.sandbox.view.identity`) can bound it.

Some limits of the kernel are shared by all processes of a user, whose editor fails once a sandbox has used them up. A
sandbox gets a part of these: as a resource limit if one exists, else as a count of its user namespace.

Memory of a process is RLIMIT_DATA. RLIMIT_AS would count address space that is only reserved: with 8 GiB of it node does
not start, while all its use and that of a JVM stay below 512 MiB of data. These limits do not count the sum over all
processes or shared memory (:mod:`handrail.sandbox.filters.memory`).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import resource
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

from handrail.contract.sandbox import Limits

# Control groups, for two limits: on the processes of real root, whom RLIMIT_NPROC does not count, and on memory.
#
# All sandboxes of one Handrail share the groups, so they protect the machine and not one sandbox from another. A group is
# made next to the others at the top (cgroup v2), or below Handrail's own (v1), and removed when Handrail ends. The next start
# removes groups of a killed one. Without the right to make a group there is none, and the tier says so. An ordinary user has
# that right only below groups that systemd gave them, where each start would wait for the whole machine's forks to pause
# (:func:`entrance`). Such a Handrail is bounded as a whole, by a group that it is started in (:func:`own_bound`).

_PREFIX = "handrail-"
_SHELL = "/bin/sh"
_ENTER = 'while [ "$1" != -- ]; do echo 0 > "$1" || exit; shift; done; shift; exec "$@"'
_FILES = {("pids", 1): "pids.max", ("pids", 2): "pids.max"} | {
    ("memory", 1): "memory.limit_in_bytes",
    ("memory", 2): "memory.max",
}
Controller = Literal["pids", "memory"]


class Top(NamedTuple):
    """A group beneath which others can be made, and the version of its hierarchy."""

    place: Path
    version: int


def groups_for(processes: int | None, memory: int | None) -> tuple[Path, ...]:
    """The groups that bound processes and memory, to be entered; none where there is none, or no need.

    :param processes: of all sandboxes of this process that have the same bounds
    :param memory: bytes, of all of them
    """
    if os.geteuid() != 0:
        return ()
    found = _groups(os.getpid(), processes, memory)
    if not all(group.is_dir() for group in found):  # somebody has removed one
        _groups.cache_clear()
        found = _groups(os.getpid(), processes, memory)
    return found


def started(
    groups: tuple[Path, ...], program: str, argv: Sequence[str], start: Callable[[str, Sequence[str]], int]
) -> int:
    """What ``start`` gives for a program that is in these groups from its beginning.

    A process is born into the groups of the thread that makes it. So where threads may be in groups of their own, there
    is one that does nothing but start programs; elsewhere a shell enters and becomes the program, which takes longer.
    """
    if not groups:
        return start(program, argv)
    thread = _inside(os.getpid(), groups)
    if thread is not None:
        with contextlib.suppress(RuntimeError):  # the interpreter is ending
            waiting = thread.submit(start, program, argv)
            return waiting.result()
    return start(*command(groups, program, argv))


_starters: dict[tuple[int, tuple[Path, ...]], ThreadPoolExecutor | None] = {}
"""The threads that start programs, by their process and groups; None where there cannot be one."""


def rest() -> None:
    """End the threads of this process that start programs. Whoever starts one more gets another."""
    for key in tuple(_starters):
        if key[0] == os.getpid() and (thread := _starters.pop(key, None)) is not None:
            thread.shutdown()  # after what it has been given


def _inside(owner: int, groups: tuple[Path, ...]) -> ThreadPoolExecutor | None:
    """A thread that is in these groups; None where it cannot be. A forked copy of this process has none, so another."""
    key = owner, groups
    if key not in _starters:
        made = _starter(groups)
        if _starters.setdefault(key, made) is not made and made is not None:
            made.shutdown()  # another thread of ours was quicker
    return _starters.get(key)


def _starter(groups: tuple[Path, ...]) -> ThreadPoolExecutor | None:
    """The kernel counts a process's memory where its first thread is, and looks there for whom to end for lack of memory:
    one further thread in the groups changes neither."""
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


def command(groups: Sequence[Path], program: str, argv: Sequence[str]) -> tuple[str, list[str]]:
    """The program to start in place of ``program``, and its argv: it enters the groups and becomes that one."""
    entrances = (str(entrance(group)) for group in groups)
    return _SHELL, [_SHELL, "-c", _ENTER, _SHELL, *entrances, "--", program, *argv[1:]]


def entrance(group: Path) -> Path:
    """The file by which a process enters that has one thread only, as a shell has.

    ``cgroup.procs`` moves all threads of a process, and for that the kernel waits until no process anywhere is in the
    middle of a fork: 10 ms, where a sandbox takes as long in all. A thread that moves itself waits for nobody; only the
    first version lets it.
    """
    threads = group / "tasks"
    return threads if threads.exists() else group / "cgroup.procs"


@lru_cache(maxsize=16)
def _groups(owner: int, processes: int | None, memory: int | None) -> tuple[Path, ...]:
    wanted: dict[Path, dict[str, int]] = {}
    counted: tuple[tuple[Controller, int | None], ...] = (("pids", processes), ("memory", memory))
    for controller, bound in counted:
        if bound is not None and (found := top(controller)) is not None:
            folder = found.place / f"{_PREFIX}{owner}-{processes}-{memory}"
            wanted.setdefault(folder, {})[_FILES[controller, found.version]] = bound
    return tuple(folder for folder, bounds in wanted.items() if _made(folder, owner, bounds))


def _made(folder: Path, owner: int, bounds: dict[str, int]) -> bool:
    _sweep(folder.parent)
    try:
        folder.mkdir(exist_ok=True)
        for name, bound in bounds.items():
            (folder / name).write_text(str(bound))
    except OSError:
        with contextlib.suppress(OSError):
            folder.rmdir()
        return False
    atexit.register(_removed, folder, owner)
    return True


def top(controller: Controller, mounts: str = "/proc/self/mountinfo", own: str = "/proc/self/cgroup") -> Top | None:
    """Where a new group can bound what ``controller`` counts; None where none can."""
    for mounted, version, group in _hierarchies(controller, mounts, own):
        if version == 1:
            return Top(group if group.is_dir() else mounted, 1)
        with contextlib.suppress(OSError):
            if controller in (mounted / "cgroup.subtree_control").read_text().split():
                return Top(mounted, 2)
    return None


def own_bound(mounts: str = "/proc/self/mountinfo", own: str = "/proc/self/cgroup") -> int | None:
    """The bytes of memory that Handrail itself and all that it starts may have, by the groups it was started in."""
    bounds: list[int] = []
    for mounted, version, group in _hierarchies("memory", mounts, own):
        for folder in (group, *group.parents):
            if not folder.is_relative_to(mounted):
                break
            with contextlib.suppress(OSError, ValueError):  # "max" is no number
                bounds.append(int((folder / _FILES["memory", version]).read_text()))
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min((bound for bound in bounds if bound < whole), default=None)


def _hierarchies(controller: Controller, mounts: str, own: str) -> list[tuple[Path, int, Path]]:
    """Those that may count it: where each is mounted, its version, and this process's own group in it."""
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
    return (own_bound() or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) // 4 * 3


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
    signal.SIGXCPU: f"it has used up the processor time of one process ({_setting('cpu_s')})",
    signal.SIGXFSZ: f"it has written a file of the maximum length ({_setting('file_mib')})",
    signal.SIGSYS: (
        "it made a system call of another architecture, and only programs for this machine run in a sandbox"
    ),
}
_WORDS = tuple(
    (re.compile(pattern), f"it perhaps reached the limit on {about} ({_setting(setting)})")
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
