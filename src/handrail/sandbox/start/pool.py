"""Sandboxes made before they are needed: each is used once, and only for a call that it was made for.

Making a sandbox takes several times as long as starting a shell without one. So after a call, the next sandbox of its kind
is made in the background: namespaces, mounts, limits and Landlock in force, for shell texts a bash that waits for its text,
and for calls with hosts the socket of their proxy. The key of a ready sandbox is every parameter that a start would have
now, and the state of each mounted path at this moment. If anything differs, a new sandbox is made.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass

from handrail.contract.errors import ToolError
from handrail.contract.sandbox import SHELL_ARGV, Process, Profile, Program, Sandbox, Tier
from handrail.contract.tool.requires import CapabilitySet
from handrail.sandbox.bubblewrap import Bubblewrap
from handrail.sandbox.filters import limits
from handrail.sandbox.network.network import Ahead
from handrail.sandbox.start.process import Confined, settled
from handrail.sandbox.view.mount_table import host_mounts

MOST = 8
"""The limit of ready sandboxes in one pool. The oldest ends first."""
MOST_ALIKE = 3
"""The limit for one key while that many calls of the key run at once; else one."""
AGE_S = 60.0
"""A ready sandbox that is not used ends after this time, and is not replaced."""
_AFTERWARDS_S = 0.02
"""The delay after a call's end, so that its answer goes first."""
_LONG_CALL_S = 1.0
"""If a call runs longer, its successor is made meanwhile."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """The common properties of calls of one kind, to plan the next sandbox."""

    capabilities: CapabilitySet
    profile: Profile
    program: Program


def pooled(sandbox: Sandbox) -> Sandbox:
    """Return ``sandbox`` with a pool before it if it is a bubblewrap sandbox; else ``sandbox`` itself."""
    return Pooled(sandbox) if isinstance(sandbox, Bubblewrap) else sandbox


@dataclass(frozen=True, slots=True)
class _Ready:
    """A sandbox that waits for its call.

    :param scratch: the scratch folder of its session
    :param ahead: the socket for its proxy; None without hosts
    """

    key: object
    scratch: str
    ahead: Ahead | None


class Pooled:
    """A pool of ready sandboxes before another :class:`handrail.contract.sandbox.Sandbox`.

    Belongs to one event loop. Calls with their own descriptors, or a terminal, start without the pool.
    """

    def __init__(self, sandbox: Bubblewrap, *, most: int = MOST, age_s: float = AGE_S) -> None:
        self._sandbox = sandbox
        self._most = most
        self._age_s = age_s
        self._ready: dict[Confined, _Ready] = {}
        """The oldest first."""
        self._in_use: set[str] = set()
        """Scratch folders of the sessions that have had a call."""
        self._running: dict[object, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._due: set[asyncio.Future[None]] = set()
        self._closed = False

    @property
    def tier(self) -> Tier:
        return self._sandbox.tier

    @property
    def ready(self) -> int:
        """The number of sandboxes that wait for a call."""
        return len(self._ready)

    async def start(self, capabilities: CapabilitySet, profile: Profile, program: Program) -> Process:
        if program.descriptors or program.terminal is not None or self._closed:
            return await self._sandbox.start(capabilities, profile, program)
        plan = await self._sandbox.plan(capabilities, profile, program, ready_made=True)
        key = plan.key
        self._in_use.add(profile.scratch)
        process, ahead = self._taken(key)
        if process is None:
            # A new sandbox starts the shell with its text, which is faster.
            plan = await self._sandbox.plan(capabilities, profile, program)
            process = self._sandbox.prepare(plan)
        begun = await self._sandbox.begun(process, plan, capabilities, profile, ahead)
        shell = tuple(program.argv[:-1]) == SHELL_ARGV
        sample = Program((*SHELL_ARGV, "true") if shell else ("true",), merge_stderr=program.merge_stderr)
        secrets = dict.fromkeys(profile.secrets, "")
        likewise = dataclasses.replace(profile, secrets=secrets, cwd=None, gate=None, on_attempt=None, shows=None)
        self._replaced(process, _Kind(capabilities, likewise, sample), key)
        return begun

    async def replenished(self) -> None:
        """Wait until each call that was started has its successor ready, if it gets one."""
        await asyncio.gather(*self._due)

    async def release(self, scratch: str) -> None:
        """End the ready sandboxes of the session with this scratch folder, until its next call."""
        self._in_use.discard(scratch)
        await self._end([process for process, ready in self._ready.items() if ready.scratch == scratch])

    async def aclose(self) -> None:
        """End all ready sandboxes and make no more. Running calls continue."""
        self._closed = True
        await self._end(list(self._ready))
        await asyncio.gather(*self._tasks)
        await settled()
        limits.rest()
        host_mounts.forget()

    def _taken(self, key: object) -> tuple[Confined | None, Ahead | None]:
        for process, ready in self._ready.items():
            if ready.key == key and process.waits:
                del self._ready[process]
                return process, ready.ahead
        return None, None

    def _replaced(self, process: Confined, kind: _Kind, key: object) -> None:
        """Plan the next sandbox of this kind for when the call has ended, or takes long."""
        loop = asyncio.get_running_loop()
        due: asyncio.Future[None] = loop.create_future()
        self._due.add(due)
        due.add_done_callback(self._due.discard)
        self._running[key] = self._running.get(key, 0) + 1

        def make() -> None:
            long.cancel()
            if self._closed:
                due.set_result(None)
                return
            task = self._task(self._make(kind))
            task.add_done_callback(lambda done: due.set_result(None))

        def ended() -> None:
            self._running[key] -= 1
            if not self._running[key]:
                del self._running[key]
            if not long.cancelled():
                long.cancel()
                loop.call_later(_AFTERWARDS_S, make)

        long = loop.call_later(_LONG_CALL_S, make)
        process.when_gone(ended)

    def _task(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _make(self, kind: _Kind) -> None:
        try:
            plan = await self._sandbox.plan(kind.capabilities, kind.profile, kind.program, ready_made=True)
            key = plan.key
            if self._closed or kind.profile.scratch not in self._in_use:
                return
            alike = sum(ready.key == key for ready in self._ready.values())
            if alike >= max(1, min(MOST_ALIKE, self._running.get(key, 0))):
                return
            process = self._sandbox.prepare(plan)
        except (ToolError, OSError):
            return  # if the problem persists, the next call reports it
        ahead = Ahead(process) if kind.capabilities.uses("net.fetch") else None
        self._ready[process] = _Ready(key, kind.profile.scratch, ahead)
        process.when_gone(lambda: self._forgotten(process))
        asyncio.get_running_loop().call_later(self._age_s, self._expired, process)
        await self._end(list(self._ready)[: -self._most])
        if not await process.until_ready() or not (ahead is None or await ahead.until_made()):
            self._expired(process)  # unless a call has taken it, which then reports the problem

    def _forgotten(self, process: Confined) -> None:
        ready = self._ready.pop(process, None)
        if ready is not None and ready.ahead is not None:
            ready.ahead.close()

    def _expired(self, process: Confined) -> None:
        if process in self._ready:
            self._task(self._end([process]))

    async def _end(self, processes: Sequence[Confined]) -> None:
        for process in processes:
            self._forgotten(process)
        await asyncio.gather(*(process.kill() for process in processes))
