"""Bounds that only a control group has: on the processes of real root, whom RLIMIT_NPROC does not count, and on memory.

All sandboxes of one Handrail share them, so they keep the machine and not one sandbox from another. A group is made
beside the others at the top (cgroup v2), or beneath Handrail's own (v1), and removed when Handrail ends; what a killed
one left is removed by the next. Without the right to make one there is none, which the tier says. An ordinary user has
it only beneath groups that systemd gave them, where each start would wait for the whole machine's forks to pause
(:func:`entrance`): theirs is bounded with Handrail itself, by whoever starts it in a group with a bound (:func:`own_bound`).
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

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
        if (kind == "cgroup" and controller in options) or kind == "cgroup2":
            of_it = (group[2] for group in groups if controller in group[1].split(","))
            if kind == "cgroup2":
                of_it = (group[2] for group in groups if group[0] == "0")
            found.append((mounted, 1 if kind == "cgroup" else 2, mounted / next(of_it, "/").lstrip("/")))
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
