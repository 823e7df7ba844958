"""Sandboxes made before they are needed: each is used once, and only for a call that it was made for.

Making a sandbox takes several times as long as starting a shell without one. So once a call has taken one, the next of its
kind is made in the background: namespaces, mounts, limits and Landlock in force, for shell texts a bash that waits for its
text, and for calls with hosts the socket of their proxy. As many are held as calls of the kind came at once lately. The key
of a ready sandbox is every parameter that a start would have now, and the state of each mounted path at this moment. If
anything differs, a new sandbox is made.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter, deque
from collections.abc import Coroutine, Sequence
from functools import partial

from handrail.contract.errors import ToolError
from handrail.contract.sandbox_protocol import SHELL_ARGV, Process, ProgramSpec, Sandbox, SandboxProfile, SandboxTier
from handrail.contract.struct import Struct
from handrail.contract.tool.requires import CapabilitySet
from handrail.sandbox.bubblewrap import BubblewrapSandbox, SessionNetworkMembership
from handrail.sandbox.filters import resource_limits
from handrail.sandbox.network.sandbox_network import EarlyProxyListener
from handrail.sandbox.start.sandboxed_process import SandboxedProcess, wait_until_sandboxes_dismantled
from handrail.sandbox.view.mount_comparison import host_mounts

MAX_READY = 8
"""The limit of ready sandboxes in one pool. Each takes about 1.5 MB."""
MAX_AGE_S = 60.0
"""A ready sandbox that is not used ends after this time, and is not replaced."""
BURST_S = 1.0
"""Calls that start within this time count as calls at once."""
_QUIET_S = 0.005
"""The pause in the starts of calls after which the next sandbox is made, so that short calls get their answers first."""
_MOST_PAUSES = 4
"""After this many times the pause, the next sandbox is made although more calls start."""


class _CallKind(Struct, frozen=True):
    """The common properties of calls of one kind, to plan the next sandbox."""

    capabilities: CapabilitySet
    profile: SandboxProfile
    program: ProgramSpec


def wrap_bubblewrap_in_pool(sandbox: Sandbox) -> Sandbox:
    """Return ``sandbox`` with a pool before it if it is a bubblewrap sandbox; else ``sandbox`` itself."""
    return SandboxPool(sandbox) if isinstance(sandbox, BubblewrapSandbox) else sandbox


class _ReadySandbox(Struct, frozen=True):
    """A sandbox that waits for its call.

    :param scratch: the scratch folder of its session
    :param listener: the socket for its proxy, or its place in the network of its session; None without both
    :param taken: done once a call has taken it
    """

    key: object
    scratch: str
    listener: EarlyProxyListener | SessionNetworkMembership | None
    taken: asyncio.Future[None]


class SandboxPool:
    """A pool of ready sandboxes before another :class:`handrail.contract.sandbox_protocol.Sandbox`.

    Belongs to one event loop. Calls with their own descriptors, or a terminal, start without the pool.
    """

    def __init__(self, sandbox: BubblewrapSandbox, *, most: int = MAX_READY, age_s: float = MAX_AGE_S) -> None:
        self._sandbox = sandbox
        self._most = most
        self._age_s = age_s
        self._ready: dict[SandboxedProcess, _ReadySandbox] = {}
        """The oldest first."""
        self._in_use: set[str] = set()
        """Scratch folders of the sessions that have had a call."""
        self._running: dict[object, int] = {}
        self._starts: dict[object, deque[float]] = {}
        """The times of the last starts by key."""
        self._last_start_s = 0.0
        self._requested: dict[object, _CallKind] = {}
        """The kinds of calls whose next sandboxes are to be made, by key."""
        self._maker: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def tier(self) -> SandboxTier:
        return self._sandbox.tier

    @property
    def ready_sandbox_count(self) -> int:
        """The number of sandboxes that wait for a call."""
        return len(self._ready)

    async def start(self, capabilities: CapabilitySet, profile: SandboxProfile, program: ProgramSpec) -> Process:
        # These must exist before the first process starts, so a waiting sandbox cannot get them any more.
        if program.descriptors or program.terminal is not None or self._closed:
            return await self._sandbox.start(capabilities, profile, program)
        plan = await self._sandbox.make_plan(capabilities, profile, program, ready_made=True)
        key = plan.ready_sandbox_key
        # Before the first wait, so that a successor of this session is not given up as unused.
        self._in_use.add(profile.scratch)
        process, ahead = self._take_ready(key)
        if process is None:
            # A new sandbox starts the shell with its text, which is faster.
            plan = await self._sandbox.make_plan(capabilities, profile, program)
            ahead = await self._sandbox.find_network(capabilities, profile)
            process = self._sandbox.start_waiting_sandbox(plan, place=ahead)
        begun = await self._sandbox.begin_program(process, plan, capabilities, profile, ahead)
        shell = tuple(program.argv[:-1]) == SHELL_ARGV
        sample = ProgramSpec((*SHELL_ARGV, "true") if shell else ("true",), merge_stderr=program.merge_stderr)
        secrets = dict.fromkeys(profile.secrets, "")
        # Without secrets and callbacks of this call: a ready sandbox must not keep them alive, and the next call may
        # have others.
        likewise = dataclasses.replace(
            profile, secrets=secrets, cwd=None, check_host=None, request_host=None, on_attempt=None, may_read=None
        )
        self._request_successor(process, _CallKind(capabilities, likewise, sample), key)
        return begun

    async def wait_until_successors_ready(self) -> None:
        """Wait until each call that was started has its successor ready, if it gets one."""
        while self._maker is not None:
            await asyncio.wait({self._maker})

    async def end_ready_sandboxes(self, scratch: str) -> None:
        """End the ready sandboxes of the session with this scratch folder, until its next call."""
        self._in_use.discard(scratch)
        await self._end([process for process, ready in self._ready.items() if ready.scratch == scratch])
        self._sandbox.close_networks(scratch)

    async def aclose(self) -> None:
        """End all ready sandboxes and make no more. Running calls continue."""
        self._closed = True
        await self._end(list(self._ready))
        await asyncio.gather(*self._tasks)
        await self._end(list(self._ready))  # a task that was about to start a sandbox has added it meanwhile
        self._sandbox.close_networks()
        await wait_until_sandboxes_dismantled()
        resource_limits.end_cgroup_starter_threads()
        host_mounts.forget()

    def _take_ready(
        self, key: object
    ) -> tuple[SandboxedProcess | None, EarlyProxyListener | SessionNetworkMembership | None]:
        for process, ready in self._ready.items():
            # A sandbox may have ended a moment ago and still be listed until the loop handles its end.
            if ready.key == key and process.is_waiting:
                del self._ready[process]
                ready.taken.set_result(None)
                return process, ready.listener
        return None, None

    def _request_successor(self, process: SandboxedProcess, kind: _CallKind, key: object) -> None:
        """Request the next sandboxes of this kind, for a call that has just begun."""
        now = self._last_start_s = asyncio.get_running_loop().time()
        self._starts.setdefault(key, deque(maxlen=self._most)).append(now)
        self._running[key] = self._running.get(key, 0) + 1
        process.add_sandbox_empty_callback(partial(self._note_call_end, key))
        if self._closed:
            return
        self._requested[key] = kind
        if self._maker is None:
            self._maker = self._start_task(self._make_requested())

    def _note_call_end(self, key: object) -> None:
        self._running[key] -= 1
        if not self._running[key]:
            del self._running[key]

    def _count_calls_at_once(self, key: object) -> int:
        """Return how many calls of this key run, or started in the last moment if these are more."""
        since = asyncio.get_running_loop().time() - BURST_S
        return max(1, self._running.get(key, 0), sum(start > since for start in self._starts.get(key, ())))

    def _start_task(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _make_requested(self) -> None:
        """Make the requested sandboxes, one after the other, so that running calls keep the other processors."""
        loop = asyncio.get_running_loop()
        for _ in range(_MOST_PAUSES):
            await asyncio.sleep(_QUIET_S)
            if loop.time() - self._last_start_s >= _QUIET_S:
                break
        try:
            while self._requested:
                key, kind = next(iter(self._requested.items()))
                if not await self._make(kind, self._count_calls_at_once(key)):
                    self._requested.pop(key, None)
                    recent = loop.time() - BURST_S
                    # Keys contain whole plans. Without this, a long session would keep one entry for each kind of call.
                    self._starts = {key: starts for key, starts in self._starts.items() if starts[-1] > recent}
        finally:
            self._maker = None

    async def _make(self, kind: _CallKind, wanted: int) -> bool:
        """Make a sandbox for calls of this kind; return False if ``wanted`` are ready, or it failed."""
        try:
            plan = await self._sandbox.make_plan(kind.capabilities, kind.profile, kind.program, ready_made=True)
            key = plan.ready_sandbox_key
            if self._closed or kind.profile.scratch not in self._in_use:
                return False
            alike = sum(ready.key == key for ready in self._ready.values())
            # As many as recently ran at a time: more would take memory, and fewer would let a call wait.
            if alike >= min(self._most, wanted):
                return False
            place = await self._sandbox.find_network(kind.capabilities, kind.profile)
            if self._closed or kind.profile.scratch not in self._in_use:
                return False  # the pool or the session was closed while the network was made
            process = await self._sandbox.start_waiting_sandbox_in_thread(plan, place)
        except (ToolError, OSError):
            return False  # if the problem persists, the next call reports it
        if self._closed or kind.profile.scratch not in self._in_use:  # it ended meanwhile
            await process.kill()
            return False
        connected = kind.capabilities.may_allow_any_target("net.fetch")
        ahead = EarlyProxyListener(process) if place is None and connected else None
        loop = asyncio.get_running_loop()
        taken = loop.create_future()
        self._ready[process] = _ReadySandbox(key, kind.profile.scratch, place or ahead, taken)
        process.add_sandbox_empty_callback(lambda: self._forget(process))
        loop.call_later(self._age_s, self._expire, process)
        await self._end(self._list_surplus())
        made = self._start_task(self._end_unless_made(process, ahead))
        await asyncio.wait({made, taken}, return_when=asyncio.FIRST_COMPLETED)  # if one is short, the next begins
        return taken.done() or process in self._ready

    async def _end_unless_made(self, process: SandboxedProcess, ahead: EarlyProxyListener | None) -> None:
        """Wait until a sandbox is made; end it if that failed, unless a call has taken it, which reports the problem."""
        if not await process.wait_until_ready() or not (ahead is None or await ahead.wait_until_socket_made()):
            self._expire(process)

    def _list_surplus(self) -> list[SandboxedProcess]:
        """Return the ready sandboxes above the limit: of the keys with the most, the oldest."""
        left, surplus = dict(self._ready), list[SandboxedProcess]()
        while len(left) > self._most:
            counts = Counter(ready.key for ready in left.values())
            most = max(counts.values())
            # From the most common key, so that a burst of one kind of call does not evict the only sandbox of another.
            surplus.append(next(process for process, ready in left.items() if counts[ready.key] == most))
            del left[surplus[-1]]
        return surplus

    def _forget(self, process: SandboxedProcess) -> None:
        ready = self._ready.pop(process, None)
        if ready is not None and isinstance(ready.listener, EarlyProxyListener):
            ready.listener.close_untaken_socket()

    def _expire(self, process: SandboxedProcess) -> None:
        if process in self._ready:
            self._start_task(self._end([process]))

    async def _end(self, processes: Sequence[SandboxedProcess]) -> None:
        for process in processes:
            self._forget(process)
        await asyncio.gather(*(process.kill() for process in processes))
