"""A monitor of a sandbox's total memory, with files in /tmp, pipes and terminals. It ends a sandbox that exceeds its limit.

The kernel bounds the private memory of each process (:mod:`handrail.sandbox.filters.resource_limits`). An ordinary user can bound
shared memory, files in memory and the sum over all processes only by polling. So a program that runs for longer is polled,
and its sandbox ended when it holds too much. While the whole machine uses less than one call may, a poll is one read of
``/proc/meminfo``.

Three more limits are enforced this way. The size of the private /tmp and /dev/shm does not include the kernel's memory for
their files and extended attributes, so each poll asks both file systems for their number of files. All pipes of a user
share one limit, above which the kernel gives every new pipe of that user two pages. So each poll makes a pipe, and counts
those of the sandbox once it gets a short one. All programs of the machine share its pseudo-terminals, so each poll counts
those of the sandbox.

Polling has gaps: memory that is allocated between two polls, and memory that no process has in its descriptors or address
space at that moment (on its way through a socket, or handed from one short-lived process to the next). If a control group
can be made (:mod:`handrail.sandbox.filters.resource_limits`), the kernel itself bounds those. Elsewhere a machine that runs out of
memory takes it from sandboxes first.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from handrail.contract.errors import ToolError

if TYPE_CHECKING:
    from handrail.sandbox.start.sandboxed_process import SandboxedProcess

POLL_INTERVAL_S = 0.25
"""The time between two polls, and before the first: a program that ends sooner costs no poll."""
_MIB = 1 << 20
_OOM_SCORE = b"500"
_MOST_DESCRIPTORS = 20_000
"""The limit of descriptors examined in one poll. A sandbox with more cannot be measured in time."""


_MOST_PIPES = 256
"""The limit of one sandbox while its user has more pipes than the kernel gives full length."""
_WHOLE_PIPE = 64 * 1024
_FILE_BYTES = 4096
"""A file system in memory may have one file for this many of its bytes."""
MOST_TERMINALS = 256
"""The limit of pseudo-terminals in one sandbox. A machine usually has 3072 for all."""
_IN_MEMORY = ("/tmp", "/dev/shm")  # noqa: S108 - the sandbox's


class MemoryMonitor:
    """A monitor that polls a sandbox while its program runs, and ends it if it exceeds its limits.

    :param bound: bytes of memory; None for no limit
    :param files: the maximum number of files in ``/tmp`` and ``/dev/shm`` together
    """

    def __init__(self, process: SandboxedProcess, bound: int | None, files: int) -> None:
        self._process = process
        self._bound = bound
        self._files = files
        self._has_ended = False
        self._timer = process.loop.call_later(POLL_INTERVAL_S, self._poll)
        process.add_sandbox_empty_callback(self._stop)

    def _stop(self) -> None:
        self._has_ended = True
        self._timer.cancel()

    def _poll(self) -> None:
        first = self._process.first_process_pid
        if not first or not self._process.has_checked_mounts:  # until then its /tmp is the machine's
            self._schedule_poll()
        elif (held := count_tmpfs_files(first)) > self._files:
            self._process.end_for_reached_limit(_too_many_files(held, self._files))
        elif (terminals := count_terminals(first)) > MOST_TERMINALS:
            self._process.end_for_reached_limit(_too_many_terminals(terminals))
        # The exact figures take milliseconds for each process. They are read only while the whole machine uses more
        # than one call may.
        elif (short := are_new_pipes_undersized()) or (self._bound is not None and _may_exceed(self._bound)):
            looking = _get_poll_thread(os.getpid())
            looked = self._process.loop.run_in_executor(looking, find_exceeded_limit_error, first, self._bound, short)
            looked.add_done_callback(self._handle_result)
        else:
            self._schedule_poll()

    def _schedule_poll(self) -> None:
        self._timer = self._process.loop.call_later(POLL_INTERVAL_S, self._poll)

    def _handle_result(self, looked: asyncio.Future[ToolError | None]) -> None:
        if self._has_ended or looked.cancelled():
            return
        # A process that ends during the measurement must not end the sandbox. The next poll measures again.
        found = None if looked.exception() else looked.result()
        if found is None:
            self._schedule_poll()
        else:
            self._process.end_for_reached_limit(found)


def find_exceeded_limit_error(first: int, bound: int | None, short: bool) -> ToolError | None:
    """Return the error for a sandbox that exceeds a limit; None if it does not.

    :param first: its first process
    :param bound: the memory limit in bytes; None for no limit
    :param short: whether new pipes of its user are short
    """
    if bound is not None and (held := measure_memory_if_exceeding(first, bound)) is not None:
        return ToolError(
            f"The program was stopped: its processes used {held // _MIB:,} MiB of memory together, with shared "
            f"memory and files in memory. One call may use {bound // _MIB:,} MiB (the operator sets it as "
            "sandbox.call_memory_mib, and it is at most three quarters of the machine's). Work on less at a "
            "time, or in fewer processes.",
            kind="limit",
        )
    if short and (count := count_open_pipes(first)) > _MOST_PIPES:
        return ToolError(
            f"The program was stopped: its processes had {count:,} pipes open, and this user is running out of pipes. "
            f"A call may have {_MOST_PIPES} pipes then. Work with fewer pipes or processes at a time.",
            kind="limit",
        )
    return None


def _too_many_files(held: int, most: int) -> ToolError:
    return ToolError(
        f"The program was stopped: it had {held:,} files in /tmp and /dev/shm, including extended attributes. A call may "
        f"have {most:,} there. Keep many files in the workspace or in the home folder.",
        kind="limit",
    )


def _too_many_terminals(held: int) -> ToolError:
    return ToolError(
        f"The program was stopped: it had {held:,} pseudo-terminals open, which all programs of the machine share. A call may "
        f"have {MOST_TERMINALS}. Open fewer at a time, and close each after use.",
        kind="limit",
    )


def compute_max_memory_files(size: int) -> int:
    """Return how many files the file systems in memory with ``size`` bytes may have together."""
    return size // _FILE_BYTES


def count_tmpfs_files(first: int) -> int:
    """Return how many files a sandbox has in memory; extended attributes count as in the kernel.

    :param first: its first process; the result is 0 if it has ended
    """
    held = 0
    for place in _IN_MEMORY:
        with contextlib.suppress(OSError):
            found = os.statvfs(f"/proc/{first}/root{place}")
            held += found.f_files - found.f_ffree
    return held


def count_terminals(first: int) -> int:
    """Return how many pseudo-terminals a sandbox has; 0 if its first process has ended."""
    try:
        return sum(map(str.isdecimal, os.listdir(f"/proc/{first}/root/dev/pts")))  # noqa: PTH208 - while others wait
    except OSError:
        return 0


_short_pipes: tuple[float, bool] = (float("-inf"), False)


def are_new_pipes_undersized() -> bool:
    """Return whether new pipes of this user are short, because the user reached the kernel's limit.

    The answer is shared by all sandboxes, and at most half a poll interval old. Root always gets full pipes.
    """
    global _short_pipes
    now = time.monotonic()
    if now - _short_pipes[0] >= POLL_INTERVAL_S / 2:
        _short_pipes = now, _new_pipe() < _WHOLE_PIPE
    return _short_pipes[1]


def _new_pipe() -> int:
    try:
        ends = os.pipe2(os.O_CLOEXEC)
    except OSError:
        return _WHOLE_PIPE  # no descriptor is left, which says nothing about pipes
    try:
        return fcntl.fcntl(ends[0], fcntl.F_GETPIPE_SZ)
    finally:
        for end in ends:
            os.close(end)


def count_open_pipes(first: int) -> int:
    """Return the number of pipes that the process ``first`` and its descendants have open."""
    found: set[str] = set()
    for pid in _find_members(first):
        folder = f"/proc/{pid}/fd"
        with contextlib.suppress(OSError):
            for descriptor in os.listdir(folder):  # noqa: PTH208 - while others wait
                with contextlib.suppress(OSError):
                    target = os.readlink(f"{folder}/{descriptor}")  # noqa: PTH115 - no path
                    if target.startswith("pipe:"):
                        found.add(target)
    return len(found)


@lru_cache(maxsize=1)
def _get_poll_thread(_pid: int) -> ThreadPoolExecutor:
    """Return the thread for memory polls.

    The common threads may all be busy with tools, which is when polling matters. A forked process gets another thread.
    """
    return ThreadPoolExecutor(1, thread_name_prefix="handrail-memory")


class MachineMemoryUse(NamedTuple):
    """The memory use of the machine in bytes: everything that is not in files, and the shared part."""

    all: int
    shared: int


def read_memory_use() -> MachineMemoryUse:
    """Return the memory use of the machine."""
    figures: dict[str, int] = {}
    with Path("/proc/meminfo").open("rb") as file:
        for line in file:
            name, _, rest = line.partition(b":")
            figures[name.decode()] = int(rest.split()[0]) * 1024
    shared = figures.get("Shmem", 0)
    return MachineMemoryUse(
        figures.get("AnonPages", 0) + shared + figures.get("SwapTotal", 0) - figures.get("SwapFree", 0), shared
    )


def _may_exceed(bound: int) -> bool:
    try:
        return read_memory_use().all > bound
    except OSError:
        return False  # no descriptor is left: the next poll finds out


def prefer_for_oom_kill(pid: int) -> None:
    """Let the kernel's out-of-memory killer choose this process and its descendants first.

    For a process that has not started another one: descendants inherit the mark.
    """
    with contextlib.suppress(OSError):  # it has ended
        Path(f"/proc/{pid}/oom_score_adj").write_bytes(_OOM_SCORE)


def measure_memory_if_exceeding(first: int, bound: int) -> int | None:
    """Return the memory of the process ``first`` and its descendants, in bytes, if it exceeds ``bound``.

    Each figure is read only if a cheaper one, which is never smaller, exceeds the limit.
    """
    shared = read_memory_use().shared
    members = tuple(_find_members(first))
    if sum(_read_resident(pid) for pid in members) + shared <= bound:  # shared pages count in each process
        return None
    parts = [_read_proportional(pid) for pid in members]
    mapped = sum(parts)
    if mapped + shared <= bound:
        return None
    files, all_seen = _measure_memfds(members)
    if not all_seen:  # the sandbox prevents it, so unseen memory counts as its own
        return _exceeding_or_none(mapped + shared, bound)
    # A file in memory can be both open and mapped. Its mapped part is counted once.
    whole = mapped + sum(files.values()) - sum(_measure_mapped_memfds(pid, files) for pid in members if files)
    return _exceeding_or_none(whole, bound)


def _exceeding_or_none(held: int, bound: int) -> int | None:
    return held if held > bound else None


def _find_members(first: int) -> Iterator[int]:
    waiting = [first]
    seen: set[int] = set()
    while waiting:
        pid = waiting.pop()
        # Process ids can be given again during the walk, which could otherwise go in a circle.
        if pid in seen:
            continue
        seen.add(pid)
        yield pid
        with contextlib.suppress(OSError):
            # Each thread has its own list of children.
            for task in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - while others wait
                waiting += map(int, Path(f"/proc/{pid}/task/{task}/children").read_bytes().split())


def _read_resident(pid: int) -> int:
    return _sum_fields_of_file(f"/proc/{pid}/status", (b"RssAnon", b"RssShmem", b"VmSwap")) or 0


def _read_proportional(pid: int) -> int:
    """Return the resident memory of a process, with shared pages divided among their processes."""
    try:
        with Path(f"/proc/{pid}/smaps_rollup").open("rb") as file:
            if b"Pss_Anon" in (text := file.read()):
                return _sum_fields(text.splitlines(), (b"Pss_Anon", b"Pss_Shmem", b"SwapPss"))
    except OSError:
        pass
    return _read_resident(pid)


def _sum_fields_of_file(path: str, names: tuple[bytes, ...]) -> int | None:
    try:
        with Path(path).open("rb") as file:
            return _sum_fields(file.read().splitlines(), names)
    except OSError:
        return None


def _sum_fields(lines: list[bytes], names: tuple[bytes, ...]) -> int:
    return sum(int(line.split()[1]) * 1024 for line in lines if line.partition(b":")[0] in names)


def _measure_memfds(members: tuple[int, ...]) -> tuple[dict[tuple[int, int], int], bool]:
    """Return the open files of memfd_create(2) with their sizes, and whether all were seen.

    The key is device and inode; the size is in bytes.
    """
    found: dict[tuple[int, int], int] = {}
    rest = _MOST_DESCRIPTORS
    for pid in members:
        folder = f"/proc/{pid}/fd"
        try:
            descriptors = os.listdir(folder)  # noqa: PTH208
        except FileNotFoundError:
            continue  # it has ended
        except OSError:
            return found, False
        rest -= len(descriptors)
        if rest < 0:
            return found, False
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                if os.readlink(f"{folder}/{descriptor}").startswith("/memfd:"):  # noqa: PTH115 - no path
                    about = os.stat(f"{folder}/{descriptor}")  # noqa: PTH116
                    found[about.st_dev, about.st_ino] = about.st_blocks * 512
    return found, True


def _measure_mapped_memfds(pid: int, files: dict[tuple[int, int], int]) -> int:
    """Return how many bytes of these files the process maps, which :func:`_read_proportional` has counted."""
    names = {b"%02x:%02x %d" % (os.major(device), os.minor(device), inode) for device, inode in files}
    counted, ours = 0, False
    try:
        with Path(f"/proc/{pid}/smaps").open("rb") as file:
            for line in file:
                if line[:1] in b"0123456789abcdef":
                    ours = b" ".join(line.split(maxsplit=5)[3:5]) in names
                elif ours and line.startswith(b"Pss:"):
                    counted += int(line.split()[1]) * 1024
    except OSError:
        pass
    return counted
