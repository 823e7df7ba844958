"""The running programs of all sessions, with the files that they have mounted over and may change.

A mount over a file ends, in every sandbox, when another file takes the file's name. A file tool writes by ``rename``, so it
would remove the mount from a running program, which is then ended. So a file tool waits, for a bounded time, until no
program has the file mounted over. A starting program waits as long for the file and git tools that may replace such a file.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable, Collection, Iterable
from contextlib import asynccontextmanager

from handrail.contract.errors import ToolError
from handrail.contract.sandbox_protocol import SandboxProfile
from handrail.contract.struct import Struct
from handrail.contract.text.neutralisation import escape_terminal_controls
from handrail.runtime.files.session_roots import is_beneath
from handrail.sandbox.view.protected_mounts import is_within_any_folder

_MOST_VOUCHED = 100_000
WAIT_S = 5.0
"""How long a write waits for programs that have its file mounted over, and a program for tools that would end its
mounts."""


class _RunningProgram(Struct):
    """A running program.

    :param mounted_paths: the paths that it has mounted over
    :param config_folders: the folders in which it may change version-control configuration
    :param current_call: the call or job that it works for now; empty between the calls of a long-running process
    :param on_file_needed: called if a file tool waits for one of the mounted paths
    """

    name: str
    mounted_paths: frozenset[str]
    config_folders: tuple[str, ...]
    current_call: str
    on_file_needed: Callable[[], None] | None = None


class RunningPrograms:
    """The running programs of this process, for all its event loops and threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._programs: dict[object, _RunningProgram] = {}
        self.vouched: set[str] = set()
        """Paths under protected names that programs with ``vcs.config`` made and that passed the check."""
        self._replacing: dict[str, int] = {}
        self._waiting: set[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = set()

    async def register(
        self,
        holder: object,
        profile: SandboxProfile,
        repositories: Iterable[str] = (),
        *,
        changeable: Collection[str] | None = None,
        begun_s: float,
    ) -> bool:
        """Register a program that is about to start; return whether it may start now.

        :param holder: identifies the program
        :param repositories: the git directories that it sees
        :param changeable: the version-control configuration that it may change now; None if it may never change any
        :param begun_s: when its start began, by the event loop's clock
        :return: False, after a wait, if a tool could replace one of its files; then the profile must be made again
        :raises ToolError: ``conflict`` if such a tool does not end in time
        """
        paths = frozenset((*profile.pinned, *profile.masked))
        with self._lock:
            if changeable and any(not one.mounted_paths.isdisjoint(changeable) for one in self._programs.values()):
                return False  # that program has started since the profile was made
            if (found := self._find_possible_replacer(profile, paths, repositories)) is None:
                roots = () if changeable is None else (profile.workspace, *profile.writable)
                self._programs[holder] = _RunningProgram(
                    format_running_program_name(profile), paths, roots, profile.call, profile.on_file_needed
                )
                return True
            change = self._add_waiter()
        if not await self._wait_for_change(change, begun_s + WAIT_S - asyncio.get_running_loop().time()):
            name, path = found
            shown = escape_terminal_controls(path.removeprefix(profile.workspace.rstrip("/") + "/"))
            raise ToolError(
                f"No program was started: {name} may replace `{shown}` while it runs, which would end a program "
                "that starts now. Wait until it has ended, or stop it, then call again.",
                kind="conflict",
            )
        return False

    def set_current_call(self, holder: object, call: str) -> None:
        """Set the call that a long-running process works for from now on; empty for none."""
        with self._lock:
            if (one := self._programs.get(holder)) is not None:
                one.current_call = call
                self._wake_waiters()

    def unregister(self, holder: object) -> None:
        """Unregister a program whose sandbox is empty."""
        with self._lock:
            if self._programs.pop(holder, None) is not None:
                self._wake_waiters()

    def find_mounted_paths(self, paths: Collection[str]) -> dict[str, str]:
        """Return those of ``paths`` that a running program has mounted over, each with a program's name."""
        with self._lock:
            return {path: one.name for one in self._programs.values() for path in one.mounted_paths.intersection(paths)}

    def find_program_mounting_beneath(self, folder: str) -> str | None:
        """Return the name of a running program that has a path in ``folder`` mounted over; None if there is none."""
        with self._lock:
            programs = tuple(self._programs.values())
        return next((one.name for one in programs if any(is_beneath(path, folder) for path in one.mounted_paths)), None)

    def may_change_git_config(self, root: str) -> bool:
        """Return whether a running program may change git configuration in this folder."""
        with self._lock:
            changed = [other for one in self._programs.values() for other in one.config_folders]
        return any(is_beneath(root, other) or is_beneath(other, root) for other in changed)

    def remember_checked_paths(self, paths: Iterable[str]) -> None:
        """Remember paths that such a program made, once they have passed the check."""
        if len(self.vouched) < _MOST_VOUCHED:
            self.vouched.update(paths)

    @asynccontextmanager
    async def reserve_file_replacement(self, path: str, shown: str) -> AsyncGenerator[None]:
        """Reserve a file for a write that replaces it.

        :raises ToolError: ``conflict`` if a running program has it mounted over and does not end in time
        """
        await self._wait_and_reserve(path, shown)
        try:
            yield
        finally:
            with self._lock:
                self._replacing[path] -= 1
                if not self._replacing[path]:
                    del self._replacing[path]
                self._wake_waiters()

    async def _wait_and_reserve(self, path: str, shown: str) -> None:
        deadline: float | None = None
        while True:
            with self._lock:
                if (program := self._find_program_with(path)) is None:
                    self._replacing[path] = self._replacing.get(path, 0) + 1
                    return
                change = self._add_waiter()
            if program.on_file_needed is not None:
                program.on_file_needed()
            now = asyncio.get_running_loop().time()
            deadline = now + WAIT_S if deadline is None else deadline
            if not await self._wait_for_change(change, deadline - now):
                raise ToolError(
                    f"`{shown}` was not written: {program.name} runs with this file mounted over, and a write would end it. "
                    "Wait until it has ended, or stop it, then write again.",
                    kind="conflict",
                )

    def _find_possible_replacer(
        self, profile: SandboxProfile, paths: Collection[str], repositories: Iterable[str]
    ) -> tuple[str, str] | None:
        """Return what may replace one of ``paths`` now, and the path; None if nothing may.

        Programs of the same call, and of the calls that made it, are left out: they may wait for this program.
        """
        for path in paths:
            if path in self._replacing:
                return "a file tool", path
        own = {profile.call, *profile.callers}
        others = [
            one
            for one in self._programs.values()
            if one.config_folders and one.current_call and one.current_call not in own
        ]
        if not others:
            return None
        within = frozenset(repositories)
        for path in sorted(path for path in paths if is_within_any_folder(path, within)):
            for one in others:
                if _may_replace(one, path):
                    return one.name if one.current_call in one.name else f"{one.name} ({one.current_call})", path
        return None

    def _find_program_with(self, path: str) -> _RunningProgram | None:
        return next((one for one in self._programs.values() if path in one.mounted_paths), None)

    def _add_waiter(self) -> tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]:
        loop = asyncio.get_running_loop()
        change = loop, loop.create_future()
        self._waiting.add(change)
        return change

    async def _wait_for_change(
        self, change: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]], timeout_s: float
    ) -> bool:
        try:
            done, _ = await asyncio.wait({change[1]}, timeout=max(timeout_s, 0))
        finally:
            with self._lock:
                self._waiting.discard(change)
        return bool(done)

    def _wake_waiters(self) -> None:
        for loop, future in self._waiting:
            with contextlib.suppress(RuntimeError):  # that loop is closed
                loop.call_soon_threadsafe(_resolve_future, future)
        self._waiting.clear()


def _may_replace(holder: _RunningProgram, path: str) -> bool:
    return any(is_beneath(path, root) for root in holder.config_folders) and not is_within_any_folder(
        path, holder.mounted_paths
    )


def format_running_program_name(profile: SandboxProfile) -> str:
    """Return how an answer names a running program: by its tool, and its call or job."""
    tool = f"a program of {profile.tool}" if profile.tool else "a program"
    return f"{tool} ({profile.call})" if profile.call else tool


def _resolve_future(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


running_programs = RunningPrograms()
"""The programs of this process. Mounts and names belong to the machine, whichever kernel started the program."""
