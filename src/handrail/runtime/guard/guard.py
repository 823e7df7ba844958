"""A sandbox wrapper that guards protected paths: mounted before a program starts, checked after it has ended.

It wraps any provider. Existing files are mounted over. Mounts cannot prevent a new file under a protected name, so such a
file is moved away as soon as the sandbox has no process left, before the call is answered, and the call fails.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from handrail.contract.errors import ToolError
from handrail.contract.protected.protected import VCS_CONFIG, protection
from handrail.contract.sandbox import Denials, Process, Profile, Program, Sandbox, Tier
from handrail.contract.text.neutral import visible
from handrail.contract.tool.requires import CapabilitySet
from handrail.runtime.files.replace import make_private
from handrail.runtime.guard.aftermath import Aftermath, Place, Vetoed
from handrail.runtime.guard.running import running_programs
from handrail.sandbox.start.spawn import Delegating
from handrail.sandbox.view import protected
from handrail.sandbox.view.tree import TakesLong

__all__ = ["Guarded", "GuardedProcess", "Vetoed", "explained"]

_MOST_PLACES = 32
_AT_ONCE = 300
"""Up to this number of folders, a look runs without a thread: handing over to one would take longer."""
_FILES_AT_ONCE = 1_000
"""The limit on files in them. Checking a file whose folder has changed takes up to 50 µs."""
_LOOKED_AT = 64 * 1024
_MOST_NOTES = 4
_REFUSED = (b"ermission denied", b"ead-only file system", b"evice or resource busy", b"EACCES", b"EROFS", b"EBUSY")
PACE_S = 1.0
"""The minimum time between two checks of the folders in which programs run."""
_SHARE = 100
"""The pause after a check is this many times the processor time of the check, so checks use 1 % of a core."""
_LAST_LOOKS = (0.05, 0.25, 1.0)
"""Pauses, in seconds, before the last check is retried if the system was short of a resource."""
_T = TypeVar("_T")


def pause_after(spent_s: float) -> float:
    """Return how long to wait after a check that took this much processor time, in seconds."""
    return max(PACE_S, _SHARE * spent_s)


class Guarded:
    """A sandbox that protects paths around another :class:`handrail.contract.sandbox.Sandbox`.

    It remembers the contents of folders from one start to the next. For one event loop.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._places: dict[str, Place] = {}
        self._turn = threading.Lock()
        self._living: dict[GuardedProcess, tuple[Aftermath, tuple[Place, ...]]] = {}
        """The running processes that may write."""
        self._owed: list[Aftermath] = []
        """The checks of ended programs that failed because the system was short of a resource."""
        self._due: asyncio.TimerHandle | None = None
        """The timer of the next check, until the check has run."""
        self._looking: asyncio.Task[None] | None = None

    @property
    def tier(self) -> Tier:
        return self._sandbox.tier

    async def start(self, capabilities: CapabilitySet, profile: Profile, program: Program) -> Process:
        writes = profile.workspace_writable and capabilities.uses("fs.write")
        if not self.tier.confines:
            return await self._started(capabilities, profile, program)
        vcs = writes and capabilities.has(VCS_CONFIG)
        git = bool(program.argv) and program.argv[0].rpartition("/")[2] == "git"
        places = [self._place(root) for root in (profile.workspace, *profile.writable)]
        read_only = [self._place(root) for root in profile.further]

        def look() -> _Prepared:
            self._settle_owed()
            return _prepared(profile, places, read_only, writes=writes, vcs=vcs, git=git)

        holder, begun_s = object(), asyncio.get_running_loop().time()
        while True:
            prepared = await self._run(look, (*places, *read_only))
            repositories = (path for place in places for path in place.tree.repositories())
            if await running_programs.hold(
                holder, prepared.profile, repositories, changeable=prepared.changeable, begun_s=begun_s
            ):
                break
        try:
            process = await self._started(capabilities, prepared.profile, program)
        except BaseException:
            running_programs.release(holder)
            raise
        guarded = GuardedProcess(
            process, prepared, lambda work: self._run(work, places), partial(running_programs.works_for, holder)
        )
        if prepared.aftermath is not None:
            self._living[guarded] = prepared.aftermath, tuple(places)
            self._plan_look(PACE_S)

        def ended(looked: bool) -> None:
            running_programs.release(holder)
            if self._living.pop(guarded, None) is None:
                return
            if not looked and prepared.aftermath is not None:
                self._owed.append(prepared.aftermath)

        guarded.when_settled(ended)
        return guarded

    async def _started(self, capabilities: CapabilitySet, profile: Profile, program: Program) -> Process:
        try:
            return await self._sandbox.start(capabilities, profile, program)
        except OSError as error:
            raise ToolError(
                f"The program was not started: {error.strerror or error}. The system or this process may be short "
                "of descriptors, processes or memory. Stop what uses them, or ask the user to raise the limit "
                "(ulimit -n), then call again.",
                kind="unavailable",
            ) from error

    def _settle_owed(self) -> None:
        """Run the last checks that failed earlier, before another program starts.

        :raises ToolError: ``unavailable`` if a check fails again, ``conflict`` if it finds a problem
        """
        while self._owed:
            aftermath = self._owed[0]
            aftermath.look()
            self._owed.pop(0)
            if (veto := aftermath.veto()) is not None:
                raise ToolError(
                    "No program was started: the check after an earlier program was still due, and found a problem. "
                    f"{veto.text} Call again.",
                    kind="conflict",
                )

    async def look_meanwhile(self) -> float:
        """Check the folders in which programs run, and move away new files under protected names.

        :return: the processor time that it took, in seconds
        """
        living = list(self._living.values())
        places = list({id(place): place for _, mine in living for place in mine}.values())

        def look() -> float:
            begun = time.thread_time()
            for place in places:
                place.look()
            for aftermath, _ in living:
                aftermath.look_meanwhile()
            return time.thread_time() - begun

        return await self._run(look, places)

    def _plan_look(self, pause_s: float) -> None:
        """Schedule the next check while a program runs."""
        if self._living and self._due is None:
            self._due = asyncio.get_running_loop().call_later(pause_s, self._begin_look)

    def _begin_look(self) -> None:
        if self._living:
            self._looking = asyncio.get_running_loop().create_task(self._look_and_plan())
        else:
            self._due = None

    async def _look_and_plan(self) -> None:
        pause = PACE_S
        try:
            pause = pause_after(await self.look_meanwhile())
        except (ToolError, OSError):
            pass  # a shortage: the next check may succeed, and the last one must
        finally:
            self._due = None
        self._plan_look(pause)

    def _place(self, root: str) -> Place:
        place = self._places.pop(root, None) or Place(root)
        self._places[root] = place  # the most recently used stays longest
        while len(self._places) > _MOST_PLACES:
            del self._places[next(iter(self._places))]
        return place

    async def _run(self, work: Callable[[], _T], places: Sequence[Place]) -> _T:
        """Run ``work`` with exclusive use of the folders.

        It runs at once if the folders are small and unused, else in a thread.
        """
        folders, files = sum(place.size for place in places), sum(place.files for place in places)
        if 0 < folders < _AT_ONCE and files <= _FILES_AT_ONCE and self._turn.acquire(blocking=False):
            try:
                for place in places:
                    place.tree.most = _FILES_AT_ONCE
                return work()
            except (_TakesLongError, TakesLong):
                pass
            finally:
                for place in places:
                    place.tree.most = sys.maxsize
                self._turn.release()

        def alone() -> _T:
            with self._turn:
                return work()

        return await asyncio.get_running_loop().run_in_executor(None, alone)


class _TakesLongError(Exception):
    """An error for work that is too long for an event loop."""


@dataclass(frozen=True, slots=True)
class _Prepared:
    """The conditions in which a program is started.

    :param profile: with all paths to mount over
    :param aftermath: the check after the program has ended; None if the program cannot write
    :param shared: files with names outside the workspace, which are read-only for the program
    :param in_use: configurations that the program could change if other running programs had not mounted them over,
        with the names of these programs
    :param changeable: the configurations that the program can change; None for a program that may never change any
    """

    profile: Profile
    aftermath: Aftermath | None
    shared: tuple[str, ...]
    in_use: Mapping[str, str]
    changeable: Collection[str] | None


def _prepared(
    profile: Profile, places: Sequence[Place], read_only: Sequence[Place], *, writes: bool, vcs: bool, git: bool
) -> _Prepared:
    pinned = [*profile.pinned]
    masked = [*profile.masked]
    aftermath = Aftermath(places, profile, vcs=vcs) if writes else None
    in_use: Mapping[str, str] = {}
    free: Collection[str] | None = None
    for place in (*places, *read_only):
        place.look()
        if writes and place in places:
            pinned += _pins(place, profile.denials)
        masked += _hidden(place, profile, writes=writes)
        masked += protected.waiting(place.tree, every=git)
    masked += filter(protected.is_pipe, pinned)  # a file that a configuration includes may be a FIFO
    shared = _made_private(places, {*pinned, *masked}) if writes else ()
    if aftermath is not None:
        aftermath.begin()
        if vcs:
            changeable = aftermath.changeable()
            in_use = running_programs.held(changeable)
            free = changeable.difference(in_use)
            pinned = [path for path in pinned if path not in changeable or path in in_use]
    over = places[0].mounted_over(
        [*places[1:], *read_only],
        places if writes else (),
        tuple(dict.fromkeys((*pinned, *shared))),
        tuple(dict.fromkeys(masked)),
    )
    kept = replace(profile, pinned=over[0], masked=over[1])
    if aftermath is not None:
        aftermath.mounted(pinned)
    return _Prepared(kept, aftermath, shared, in_use, free)


def _pins(place: Place, denials: Denials | None) -> tuple[str, ...]:
    pins = place.pins(denials)
    return pins if denials is None else (*pins, *place.fixed(denials))


def _hidden(place: Place, profile: Profile, *, writes: bool) -> Sequence[str]:
    if not writes and profile.denials is None:
        return ()
    hidden = place.masks(profile.denials)
    shows = profile.shows
    return hidden if shows is None else [path for path in hidden if not shows(path)]


def _made_private(places: Sequence[Place], closed: Collection[str]) -> tuple[str, ...]:
    """Replace files that have names outside these folders by copies, and return the files left over.

    The files left over are to be read-only.

    :param closed: paths that the program cannot write anyway
    """
    found = places[0].shared(places[1:])
    wanted = {path: file for path, file in found.items() if not protected.beneath_any(path, closed)}
    if not wanted:
        return ()
    if _on_event_loop():
        raise _TakesLongError
    in_use = running_programs.held(wanted)
    done: set[str] = set()
    for place in places:
        top = place.root.rstrip("/") + "/"
        mine = ((path, file) for path, file in wanted.items() if path.startswith(top) and path not in in_use)
        done |= make_private(place.root, mine)
        place.look()
    return tuple(path for path in wanted if path not in done)


def _on_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class GuardedProcess(Delegating):
    """A process whose :meth:`wait` raises an error if the program changed protected files."""

    def __init__(
        self,
        process: Process,
        prepared: _Prepared,
        run: Callable[[Callable[[], None]], Awaitable[None]],
        works_for: Callable[[str], None],
    ) -> None:
        super().__init__(process)
        self.profile = prepared.profile
        self.shared = prepared.shared
        self.in_use = prepared.in_use
        self._aftermath = prepared.aftermath
        self._run = run
        self._works_for = works_for
        self._last_look: asyncio.Future[None] | None = None
        self._unlooked: ToolError | None = None
        self._ending: asyncio.Future[None] | None = None
        self._told: list[Callable[[bool], None]] = []
        self._calls = 0
        self._unsettled = False
        """Whether a call has ended and the check after it has not."""

    def when_settled(self, told: Callable[[bool], None]) -> None:
        """Call ``told`` when the sandbox is empty, with whether the last check could run."""
        self._told.append(told)

    async def wait(self) -> int:
        """Wait for the end of the program and for the last check, and return the exit code.

        :raises Vetoed: if the program changed protected files
        :raises ToolError: if the check could not run, or the process failed
        """
        code, error = 0, None
        try:
            code = await super().wait()
        except ToolError as ended:
            error = ended
        await self._settled()
        if (veto := self.veto) is not None:
            if error is not None and error.kind == "conflict":  # a mount has ended, and the program with it
                raise ToolError(f"{error.text} {veto.text}", kind="conflict")
            veto.exit_code = code
            raise veto
        if self._unlooked is not None:
            raise self._unlooked
        if error is not None:
            raise error
        return code

    async def kill(self) -> None:
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._ended())
        await asyncio.shield(self._ending)

    @property
    def veto(self) -> Vetoed | None:
        """The error for what the process changed; valid after :meth:`wait` or :meth:`kill`."""
        return None if self._aftermath is None else self._aftermath.veto()

    @property
    def notices(self) -> tuple[str, ...]:
        """Notes for the model about files that the process made and that stay; valid after :meth:`wait`."""
        return () if self._aftermath is None else self._aftermath.notices()

    async def begin(self, call: str = "") -> tuple[str, ...]:
        """Begin a call of a long-running process, and return what changed since the last call.

        The result names what has appeared under protected names or was moved away since then. Either the process did it
        between its calls, or the user did. It is not counted as a change of this call.

        :param call: its id, which distinguishes programs that the call starts from those that wait for its end
        """
        self._calls += 1
        self._works_for(call)
        appeared: list[str] = []
        aftermath = self._aftermath
        if self._calls > 1 and aftermath is not None:
            await self._settle(aftermath)
            await self._run(lambda: appeared.extend(aftermath.begin_anew()))
        return tuple(appeared)

    async def settle(self) -> None:
        """End a call of a long-running process, and check what it changed.

        :raises Vetoed: if it changed protected files
        """
        if self._aftermath is None:
            return
        self._unsettled = True
        await self._settle(self._aftermath)
        self._works_for("")
        if (veto := self._aftermath.report()) is not None:
            raise veto

    async def _settle(self, aftermath: Aftermath) -> None:
        """Run the check after the last call unless it has run."""
        if self._unsettled:
            await self._run(aftermath.look)
            self._unsettled = False

    async def _ended(self) -> None:
        await super().kill()
        await self._settled()

    async def _settled(self) -> None:
        """Run the last check once, after the sandbox is empty; a cancelled caller does not stop it."""
        if self._last_look is None:
            self._last_look = asyncio.ensure_future(self._look_last())
        await asyncio.shield(self._last_look)

    async def _look_last(self) -> None:
        try:
            for pause in (*_LAST_LOOKS, None) if self._aftermath is not None else ():
                assert self._aftermath is not None
                try:
                    await self._run(self._aftermath.look)
                except (ToolError, OSError) as error:
                    self._unlooked = ToolError(
                        f"The changes of the program in the workspace could not be checked: {str(error).rstrip('.')}. "
                        "No other program starts before this check succeeds. Call again later.",
                        kind="unavailable",
                    )
                    if pause is not None:
                        await asyncio.sleep(pause)
                else:
                    self._unlooked = None
                    break
        finally:
            for told in self._told:
                told(self._unlooked is None)
            self._told.clear()


def explained(process: Process, output: bytes) -> tuple[str, ...]:
    """Return notes for the model on why the program could not read or write files that its output names."""
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
            notes.append(_why_hidden(path, visible(shown), profile.denials))
    for path in profile.pinned:
        shown = path.removeprefix(top)
        if _mentions(said, shown):
            notes.append(_why_fixed(path, shown, process))
    return tuple(notes[:_MOST_NOTES])


def _why_hidden(path: str, shown: str, denials: Denials | None) -> str:
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):  # noqa: PTH110, PTH112, PTH113
        return (
            f"`{shown}` is a FIFO, and opening it would wait forever, so Handrail hides it from programs. "
            "Remove it, or replace it by a regular file."
        )
    if denials is not None and not denials.hides(path) and os.path.isdir(path):  # noqa: PTH112
        return (
            f"The folder `{shown}` is hidden from programs as a whole: it contains too many hidden files to "
            "hide one by one, or Handrail cannot read it. Ask the user to allow reading the files that hold "
            "no secret, or to move the secret ones into another folder."
        )
    return (
        f"`{shown}` is hidden from programs: a rule denies reading it, or it looks like a secret and no "
        f"rule allows it. If programs need it, ask the user for a rule such as 'allow fs.read {shown}'. "
        "Allowing a command does not show it this file."
    )


def _why_fixed(path: str, relative: str, process: GuardedProcess) -> str:
    why, shown = protection(relative), visible(relative)
    if path in process.in_use:
        return (
            f"`{shown}` cannot be changed now: {process.in_use[path]} runs with it mounted over. Wait until "
            "that program has ended, or stop it, then call again."
        )
    if why is None and any(one == path or one.startswith(f"{path}/") for one in process.shared):
        return (
            f"`{shown}` cannot be written by this program: it is, or contains, files with other names outside "
            "the workspace (hard links). Copy it to a new name to change it. Each start gives some of these "
            "files their own copy, and 'handrail doctor' shows how many are left."
        )
    if why is None:
        return (
            f"`{shown}` cannot be written by programs: a rule denies it. Use another path, or ask the user to "
            "change the rule."
        )
    if why.kind == "vcs":
        return (
            f"`{shown}` {why.what}. Programs change it only in tools with the capability vcs.config, which "
            "bash never has. Do without it (git push origin BRANCH, git checkout -b NAME --no-track), use "
            "such a tool, or ask the user."
        )
    return why.refusal(shown)


def _mentions(said: bytes, shown: str) -> bool:
    """Return whether an output contains the last two names of a path."""
    return os.fsencode("/".join(shown.split("/")[-2:])) in said
