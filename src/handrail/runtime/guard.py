"""A sandbox wrapper that guards protected paths: pinned and masked before a program starts, checked once it has ended.

Around any provider. What is there is mounted over; what a program newly made under a protected name cannot be
prevented by mounts, so it is moved away as soon as nobody of the sandbox is left, before its call is answered, and
the call fails.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from handrail.contract.errors import ToolError
from handrail.contract.protected import VCS_CONFIG, protection
from handrail.contract.requires import CapabilitySet
from handrail.contract.sandbox import Process, Profile, Program, Sandbox, Tier
from handrail.runtime.aftermath import Aftermath, Place, Vetoed
from handrail.runtime.roots import visible
from handrail.sandbox.delegating import Delegating

__all__ = ["Guarded", "GuardedProcess", "Vetoed", "explained"]

_MOST_PLACES = 32
_AT_ONCE = 300
"""Folders that are looked at without a thread: it takes less than handing over to one."""
_LOOKED_AT = 64 * 1024
_MOST_NOTES = 4
_REFUSED = (b"ermission denied", b"ead-only file system", b"evice or resource busy", b"EACCES", b"EROFS", b"EBUSY")
_T = TypeVar("_T")


class Guarded:
    """Implements :class:`handrail.contract.sandbox.Sandbox` around another.

    What a folder holds is remembered from one start to the next. For one event loop.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._places: dict[str, Place] = {}
        self._turn = threading.Lock()

    @property
    def tier(self) -> Tier:
        return self._sandbox.tier

    async def start(self, capabilities: CapabilitySet, profile: Profile, program: Program) -> Process:
        writes = profile.workspace_writable and capabilities.uses("fs.write")
        if not self.tier.confines or (not writes and profile.denials is None):
            return await self._sandbox.start(capabilities, profile, program)
        vcs = writes and capabilities.has(VCS_CONFIG)
        places = [self._place(root) for root in (profile.workspace, *profile.writable)]
        read_only = [self._place(root) for root in profile.further]

        def look() -> tuple[Profile, Aftermath | None]:
            return _prepared(profile, places, read_only, writes=writes, vcs=vcs)

        kept, aftermath = await self._run(look, (*places, *read_only))
        process = await self._sandbox.start(capabilities, kept, program)
        return GuardedProcess(process, kept, aftermath, lambda work: self._run(work, places))

    def _place(self, root: str) -> Place:
        place = self._places.pop(root, None) or Place(root)
        self._places[root] = place  # the last used is kept the longest
        while len(self._places) > _MOST_PLACES:
            del self._places[next(iter(self._places))]
        return place

    async def _run(self, work: Callable[[], _T], places: Sequence[Place]) -> _T:
        """``work`` on its own with the places, in a thread where they are large."""

        def alone() -> _T:
            with self._turn:
                return work()

        folders = sum(place.size for place in places)
        if 0 < folders < _AT_ONCE:
            return alone()
        return await asyncio.get_running_loop().run_in_executor(None, alone)


def _prepared(
    profile: Profile, places: Sequence[Place], read_only: Sequence[Place], *, writes: bool, vcs: bool
) -> tuple[Profile, Aftermath | None]:
    """The profile with everything that is to be mounted over, and what will be looked at afterwards."""
    pinned = [*profile.pinned]
    masked = [*profile.masked]
    aftermath = Aftermath(places, profile, vcs=vcs) if writes else None
    for place in (*places, *read_only):
        place.look()
        if writes and place in places:
            pinned += place.pins(profile.denials)
            if profile.denials is not None:
                pinned += place.fixed(profile.denials)
        if profile.denials is not None:
            masked += place.masks(profile.denials)
    if aftermath is not None:
        aftermath.begin()
        if vcs:
            changeable = aftermath.changeable()
            pinned = [path for path in pinned if path not in changeable]
    return replace(profile, pinned=tuple(dict.fromkeys(pinned)), masked=tuple(dict.fromkeys(masked))), aftermath


class GuardedProcess(Delegating):
    """A process whose :meth:`wait` fails for what the program left behind."""

    def __init__(
        self,
        process: Process,
        profile: Profile,
        aftermath: Aftermath | None,
        run: Callable[[Callable[[], None]], Awaitable[None]],
    ) -> None:
        """
        :param profile: what it was started in
        :param aftermath: None where it can write nothing
        """
        super().__init__(process)
        self.profile = profile
        self._aftermath = aftermath
        self._run = run
        self._last_look: asyncio.Future[None] | None = None
        self._ending: asyncio.Future[None] | None = None
        self._calls = 0

    async def wait(self) -> int:
        """
        :raises Vetoed: when it has ended, for what it made under a protected name
        """
        code, error = 0, None
        try:
            code = await super().wait()
        except ToolError as ended:
            error = ended
        await self._settled()
        if (veto := self.veto) is not None:
            veto.exit_code = code
            raise veto
        if error is not None:
            raise error
        return code

    async def kill(self) -> None:
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._ended())
        await asyncio.shield(self._ending)

    @property
    def veto(self) -> Vetoed | None:
        """Once it has been waited for or killed: what it was found to have done."""
        return None if self._aftermath is None else self._aftermath.veto()

    @property
    def notices(self) -> tuple[str, ...]:
        """Once it has been waited for: what it made that stays, and that the model and the person should know of."""
        return () if self._aftermath is None else self._aftermath.notices()

    async def begin(self) -> tuple[str, ...]:
        """A call begins in a process that stays up: what others did since the last one is not its doing.

        Gives what has appeared under protected names since then, and no call made that may: the process may have done it
        between its calls, or a person.
        """
        self._calls += 1
        appeared: list[str] = []
        aftermath = self._aftermath
        if self._calls > 1 and aftermath is not None:
            await self._run(lambda: appeared.extend(aftermath.begin_anew()))
        return tuple(appeared)

    async def settle(self) -> None:
        """A call ends in a process that stays up.

        :raises Vetoed: for what was made under a protected name during it
        """
        if self._aftermath is not None:
            await self._run(self._aftermath.look)
        if (veto := self.veto) is not None:
            raise veto

    async def _ended(self) -> None:
        await super().kill()
        await self._settled()

    async def _settled(self) -> None:
        """Nobody of the sandbox is left: the last look, once, and to its end whoever is cancelled meanwhile."""
        if self._aftermath is None:
            return
        if self._last_look is None:
            self._last_look = asyncio.ensure_future(self._run(self._aftermath.look))
        await asyncio.shield(self._last_look)


def explained(process: Process, output: bytes) -> tuple[str, ...]:
    """Why a program could not read or write what it says it could not, where that was kept from it; for the model."""
    said = output[-_LOOKED_AT:]
    if not isinstance(process, GuardedProcess):
        return ()
    notes = [*process.notices]
    if not any(sign in said for sign in _REFUSED):
        return tuple(notes)
    profile = process.profile
    top = profile.workspace.rstrip("/") + "/"
    for path in profile.masked:
        shown = path.removeprefix(top)
        if _mentions(said, shown):
            notes.append(
                f"{visible(shown)} is hidden from programs: a rule keeps it from being read, or it looks like a secret "
                f"and no rule allows it. A rule such as 'allow fs.read {visible(shown)}' would show it to programs; "
                "that a command may run does not"
            )
    for path in profile.pinned:
        shown = path.removeprefix(top)
        if _mentions(said, shown):
            why = protection(shown)
            if why is None:
                notes.append(f"{visible(shown)} cannot be written by programs: a rule denies it")
            elif why.kind == "vcs":
                notes.append(
                    f"{visible(shown)} {why.what}: programs change it only in tools with the capability vcs.config, "
                    "which bash never has. Go without (git push origin BRANCH, git checkout -b NAME --no-track), use "
                    "such a tool, or ask a person"
                )
            else:
                notes.append(why.refusal(visible(shown)))
    return tuple(notes[:_MOST_NOTES])


def _mentions(said: bytes, shown: str) -> bool:
    """Whether the whole path is in it, or its last two names."""
    return os.fsencode("/".join(shown.split("/")[-2:])) in said
