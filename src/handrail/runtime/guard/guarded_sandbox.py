"""A sandbox wrapper that guards protected paths: mounted before a program starts, checked after it has ended.

It wraps any provider. Existing files are mounted over. Mounts cannot prevent a new file under a protected name, so such a
file is moved away as soon as the sandbox has no process left, before the call is answered, and the call fails.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from handrail.contract.errors import ToolError
from handrail.contract.protected.path_protection import VCS_CONFIG
from handrail.contract.sandbox_protocol import PathDenials, Process, ProgramSpec, Sandbox, SandboxProfile, SandboxTier
from handrail.contract.struct import Struct
from handrail.contract.text.neutralisation import escape_terminal_controls
from handrail.contract.tool.requires import CapabilitySet
from handrail.origins.listed_paths import can_respelling_bypass_mounts
from handrail.runtime.files.atomic_write import replace_hard_links_by_copies
from handrail.runtime.guard.post_run_check import GuardedFolder, PostRunCheck, ProtectedPathViolation
from handrail.runtime.guard.running_programs import running_programs
from handrail.runtime.undo.workspace_snapshots import ProgramChangeTracker, ScanNeedsThread, WorkspaceSnapshots
from handrail.sandbox.start.spawn import ProcessWrapper
from handrail.sandbox.view import protected_mounts
from handrail.sandbox.view.cached_folder_tree import FolderScanTooLong

__all__ = ["GuardedProcess", "GuardedSandbox", "ProtectedPathViolation"]

_MOST_PLACES = 32
_AT_ONCE = 300
"""Up to this number of folders, a look runs without a thread: handing over to one would take longer."""
_FILES_AT_ONCE = 1_000
"""The limit on files in them. Checking a file whose folder has changed takes up to 50 µs."""
CHECK_INTERVAL_S = 1.0
"""The minimum time between two checks of the folders in which programs run."""
_PAUSE_FACTOR = 100
"""The pause after a check is this many times the processor time of the check, so checks use 1 % of a core."""
_LAST_CHECK_PAUSES_S = (0.05, 0.25, 1.0)
"""Pauses, in seconds, before the last check is retried if the system was short of a resource."""
_T = TypeVar("_T")


def compute_check_pause_s(spent_s: float) -> float:
    """Return how long to wait after a check that took this much processor time, in seconds."""
    return max(CHECK_INTERVAL_S, _PAUSE_FACTOR * spent_s)


class GuardedSandbox:
    """A sandbox that protects paths around another :class:`handrail.contract.sandbox_protocol.Sandbox`.

    It remembers the contents of folders from one start to the next. For one event loop.

    :param snapshots: keeps what programs may change; None if nothing is kept
    """

    def __init__(self, sandbox: Sandbox, snapshots: WorkspaceSnapshots | None = None) -> None:
        self._sandbox = sandbox
        self._snapshots = snapshots
        self._folders: dict[str, GuardedFolder] = {}
        self._lock = threading.Lock()
        self._running: dict[GuardedProcess, tuple[PostRunCheck, tuple[GuardedFolder, ...]]] = {}
        """The running processes that may write."""
        self._owed_checks: list[PostRunCheck] = []
        """The checks of ended programs that failed because the system was short of a resource."""
        self._next_check: asyncio.TimerHandle | None = None
        """The timer of the next check, until the check has run."""
        self._check_task: asyncio.Task[None] | None = None

    @property
    def tier(self) -> SandboxTier:
        return self._sandbox.tier

    async def start(self, capabilities: CapabilitySet, profile: SandboxProfile, program: ProgramSpec) -> Process:
        writes = profile.workspace_writable and capabilities.may_allow_any_target("fs.write")
        # Without confinement there are no mounts to guard, and the results already report that.
        if not self.tier.is_confining:
            return await self._start_wrapped(capabilities, profile, program)
        vcs = writes and capabilities.has_capability(VCS_CONFIG)
        git = bool(program.argv) and program.argv[0].rpartition("/")[2] == "git"
        places = [self._get_folder(root) for root in (profile.workspace, *profile.writable)]
        read_only = [self._get_folder(root) for root in profile.read_only_roots]

        def look() -> _StartConditions:
            # A check that could not run may still find something, so it comes before the state counts as a baseline.
            self._run_failed_last_checks()
            return _prepare_start(profile, places, read_only, writes=writes, vcs=vcs, git=git)

        holder, begun_s = object(), asyncio.get_running_loop().time()
        while True:
            prepared = await self._run_with_exclusive_folders(look, (*places, *read_only))
            repositories = (path for place in places for path in place.tree.list_git_directories())
            # Another program may be about to replace a file that this sandbox mounts. Then the state is read again
            # after it.
            if await running_programs.register(
                holder, prepared.profile, repositories, changeable=prepared.changeable, begun_s=begun_s
            ):
                break
        kept = self._snapshots if prepared.aftermath is not None else None
        changes = _RunChanges(
            kept, places, prepared.profile, lambda work: self._run_with_exclusive_folders(work, places)
        )
        try:
            # The files are kept for undo before the program can change them.
            await changes.begin((profile.callers or (profile.call,)) if profile.call else ())
            process = await self._start_wrapped(capabilities, prepared.profile, program)
        except BaseException:
            running_programs.unregister(holder)
            await changes.finish()
            raise
        guarded = GuardedProcess(
            process,
            prepared,
            changes,
            lambda work: self._run_with_exclusive_folders(work, places),
            partial(running_programs.set_current_call, holder),
        )
        if prepared.aftermath is not None:
            self._running[guarded] = prepared.aftermath, tuple(places)
            self._schedule_check(CHECK_INTERVAL_S)

        def ended(looked: bool) -> None:
            running_programs.unregister(holder)
            if self._running.pop(guarded, None) is None:
                return
            # The check of this program failed for a shortage. It is repeated before any other program starts.
            if not looked and prepared.aftermath is not None:
                self._owed_checks.append(prepared.aftermath)

        guarded.add_last_check_callback(ended)
        return guarded

    async def _start_wrapped(
        self, capabilities: CapabilitySet, profile: SandboxProfile, program: ProgramSpec
    ) -> Process:
        try:
            return await self._sandbox.start(capabilities, profile, program)
        except OSError as error:
            raise ToolError(
                f"The program could not be started: {error.strerror or error}. The system or this process may have "
                "no free file descriptors, processes or memory. Stop programs that are not needed, or ask the user to "
                "raise the limits (such as ulimit -n), then call again.",
                kind="unavailable",
            ) from error

    def _run_failed_last_checks(self) -> None:
        """Run the last checks that failed earlier, before another program starts.

        :raises ToolError: ``unavailable`` if a check fails again, ``conflict`` if it finds a problem
        """
        while self._owed_checks:
            aftermath = self._owed_checks[0]
            aftermath.check_and_restore()
            # The check leaves the list only after it has run, so an error keeps it.
            self._owed_checks.pop(0)
            if (veto := aftermath.get_violation_so_far()) is not None:
                raise ToolError(
                    "No program was started: the check after an earlier program was pending and found a problem. "
                    f"{veto.text} Call again.",
                    kind="conflict",
                )

    async def quarantine_new_protected_files(self) -> float:
        """Check the folders in which programs run, and move away new files under protected names.

        :return: the processor time that it took, in seconds
        """
        living = list(self._running.values())
        places = list({id(place): place for _, mine in living for place in mine}.values())

        def look() -> float:
            begun = time.thread_time()
            for place in places:
                place.refresh()
            for aftermath, _ in living:
                aftermath.quarantine_while_running()
            # The processor time counts, because a busy machine must not make the checks rarer than needed.
            return time.thread_time() - begun

        return await self._run_with_exclusive_folders(look, places)

    def _schedule_check(self, pause_s: float) -> None:
        """Schedule the next check while a program runs."""
        if self._running and self._next_check is None:
            self._next_check = asyncio.get_running_loop().call_later(pause_s, self._begin_check)

    def _begin_check(self) -> None:
        if self._running:
            self._check_task = asyncio.get_running_loop().create_task(self._check_and_reschedule())
        else:
            self._next_check = None

    async def _check_and_reschedule(self) -> None:
        pause = CHECK_INTERVAL_S
        try:
            pause = compute_check_pause_s(await self.quarantine_new_protected_files())
        except (ToolError, OSError):
            pass  # a shortage: the next check may succeed, and the last one must
        finally:
            self._next_check = None
        self._schedule_check(pause)

    def _get_folder(self, root: str) -> GuardedFolder:
        place = self._folders.pop(root, None) or GuardedFolder(root)
        self._folders[root] = place  # the most recently used stays longest
        while len(self._folders) > _MOST_PLACES:
            del self._folders[next(iter(self._folders))]
        return place

    async def _run_with_exclusive_folders(self, work: Callable[[], _T], places: Sequence[GuardedFolder]) -> _T:
        """Run ``work`` with exclusive use of the folders.

        It runs at once if the folders are small and unused, else in a thread.
        """
        folders, files = sum(place.folder_count for place in places), sum(place.file_count for place in places)
        # The lock is only tried: waiting for it would block the event loop.
        if 0 < folders < _AT_ONCE and files <= _FILES_AT_ONCE and self._lock.acquire(blocking=False):
            try:
                for place in places:
                    place.tree.max_files = _FILES_AT_ONCE
                return work()
            except (ScanNeedsThread, FolderScanTooLong):
                pass
            finally:
                for place in places:
                    place.tree.max_files = sys.maxsize
                self._lock.release()

        def alone() -> _T:
            with self._lock:
                return work()

        return await asyncio.get_running_loop().run_in_executor(None, alone)


class _StartConditions(Struct, frozen=True):
    """The conditions in which a program is started.

    :param profile: with all paths to mount over
    :param aftermath: the check after the program has ended; None if the program cannot write
    :param shared: files with names outside the workspace, which are read-only for the program
    :param in_use: configurations that the program could change if other running programs had not mounted them over,
        with the names of these programs
    :param changeable: the configurations that the program can change; None for a program that may never change any
    """

    profile: SandboxProfile
    aftermath: PostRunCheck | None
    shared: tuple[str, ...]
    in_use: Mapping[str, str]
    changeable: Collection[str] | None


def _prepare_start(
    profile: SandboxProfile,
    places: Sequence[GuardedFolder],
    read_only: Sequence[GuardedFolder],
    *,
    writes: bool,
    vcs: bool,
    git: bool,
) -> _StartConditions:
    pinned = [*profile.pinned]
    masked = [*profile.masked]
    listed = [*profile.listed]
    aftermath = PostRunCheck(places, profile, vcs=vcs) if writes else None
    in_use: Mapping[str, str] = {}
    free: Collection[str] | None = None
    for place in (*places, *read_only):
        place.refresh()
        # A read-only root needs no pins, because nothing in it can be written.
        if writes and place in places:
            pinned += _find_pinned(place, profile.denials)
            pinned += place.tree.list_git_directories() if profile.repositories_read_only else ()
        hidden = _find_hidden(place, profile, writes=writes)
        masked += hidden
        if place.tree.can_respelling_bypass_mounts and profile.denials is not None:
            listed += _find_folders_to_list(place, profile, hidden, writes=writes and place in places)
        masked += protected_mounts.find_blocking_pipes(place.tree, every=git)
        if git and (link := protected_mounts.find_link_to_device(place.tree)) is not None:
            shown, target = map(escape_terminal_controls, (link[0].removeprefix(f"{place.root}/"), link[1]))
            raise ToolError(
                f"The file `{shown}` is a link to {target}, which git would read without end. Remove the link, or replace it by a "
                "regular file.",
                kind="failed",
            )
    masked += filter(protected_mounts.is_named_pipe, pinned)  # a file that a configuration includes may be a FIFO
    shared = _make_files_private(places, {*pinned, *masked}) if writes else ()
    if aftermath is not None:
        aftermath.set_baseline()
        if vcs:
            changeable = aftermath.list_compared_paths()
            in_use = running_programs.find_mounted_paths(changeable)
            # A file that another running program has mounted over cannot be replaced without ending that program.
            free = changeable.difference(in_use)
            pinned = [path for path in pinned if path not in changeable or path in in_use]
    over = places[0].plan_protective_mounts(
        [*places[1:], *read_only],
        places if writes else (),
        tuple(dict.fromkeys((*pinned, *shared))),
        tuple(dict.fromkeys(masked)),
    )
    kept = replace(profile, pinned=over[0], masked=over[1], listed=tuple(dict.fromkeys(listed)))
    if aftermath is not None:
        aftermath.remember_mounted_paths(pinned)
    return _StartConditions(kept, aftermath, shared, in_use, free)


def _find_folders_to_list(
    place: GuardedFolder, profile: SandboxProfile, hidden: Sequence[str], *, writes: bool
) -> tuple[str, ...]:
    """Return the folders of which a program may see only the listed names, because another spelling leads below a mount.

    These are all folders around a path that a rule hides or keeps. A search opens each file by its listed name, so its
    mounts suffice.

    :raises ToolError: ``unavailable`` if these folders have too many entries
    """
    denials = profile.denials
    assert denials is not None
    shown = hidden if profile.may_read is None else ()
    fixed = place.find_rule_read_only_paths(denials) if writes else ()
    found = [path for path in (*shown, *fixed) if can_respelling_bypass_mounts(path.rpartition("/")[0] or "/")]
    folders = dict.fromkeys(
        folder
        for path in found
        for folder in (place.root, *protected_mounts.find_folders_between(path, (place.root,)))
        if path != place.root and can_respelling_bypass_mounts(folder)
    )
    by_path = {folder.path: folder for folder in place.tree.order}
    known = [by_path[path] for path in folders if path in by_path]
    count = sum(len(folder.files) + len(folder.folders) + len(folder.links) for folder in known)
    if count <= protected_mounts.MAX_UNFOLDED_MOUNTS and place.root not in found:
        return tuple(folders)
    named = protected_mounts.format_first_paths((place.root,), found)
    raise ToolError(
        f"No program was started: rules forbid programs to read or write {named}. Another spelling of a name leads "
        f"there. {escape_terminal_controls(place.root)} is on a file system that ignores letter case or Unicode forms. "
        f"A sandbox can close that for at most {protected_mounts.MAX_UNFOLDED_MOUNTS} entries of the folders around such files, and these folders have {count:,}."
        f" Use the file tools. The user can move the files into a folder with few entries, or "
        "allow these paths with rules such as 'allow fs.read NAME'.",
        kind="denied",
    )


def _find_pinned(place: GuardedFolder, denials: PathDenials | None) -> tuple[str, ...]:
    pins = place.find_paths_to_pin(denials)
    return pins if denials is None else (*pins, *place.find_rule_read_only_paths(denials))


def _find_hidden(place: GuardedFolder, profile: SandboxProfile, *, writes: bool) -> Sequence[str]:
    if not writes and profile.denials is None:
        return ()
    hidden = place.find_paths_to_mask(profile.denials)
    return hidden if (shows := profile.may_read) is None else [path for path in hidden if not shows(path)]


def _make_files_private(places: Sequence[GuardedFolder], closed: Collection[str]) -> tuple[str, ...]:
    """Replace files that have names outside these folders by copies, and return the files left over.

    The files left over are to be read-only.

    :param closed: paths that the program cannot write anyway
    """
    found = places[0].find_externally_linked_files(places[1:])
    wanted = {path: file for path, file in found.items() if not protected_mounts.is_within_any_folder(path, closed)}
    if not wanted:
        return ()
    # Copying can take seconds, so the whole preparation starts again in a thread.
    if _on_event_loop():
        raise ScanNeedsThread
    in_use = running_programs.find_mounted_paths(wanted)
    done: set[str] = set()
    for place in places:
        top = place.root.rstrip("/") + "/"
        mine = ((path, file) for path, file in wanted.items() if path.startswith(top) and path not in in_use)
        done |= replace_hard_links_by_copies(place.root, mine)
        place.refresh()
    return tuple(path for path in wanted if path not in done)


def _on_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class _RunChanges:
    """The tracker of what one process changes in the workspace: as a whole, or in each call of a long-running process.

    :param places: the workspace, and the other folders that it can write, whose files are not kept
    :param run: runs a look, at once or in a thread
    """

    def __init__(
        self,
        snapshots: WorkspaceSnapshots | None,
        places: Sequence[GuardedFolder],
        profile: SandboxProfile,
        run: Callable[[Callable[[], None]], Awaitable[None]],
    ) -> None:
        self._snapshots = snapshots
        self._place, *self._further = places
        self._versions: list[int] = []
        self._profile = profile
        self._run = run
        self._tracker: ProgramChangeTracker | None = None
        self.notes: tuple[str, ...] = ()

    async def begin(self, callers: tuple[str, ...]) -> None:
        """Keep the workspace as it is now. The folder was looked at just now."""
        if (snapshots := self._snapshots) is None or not callers:
            return
        await self.finish()  # a call that was not ended

        def begin() -> None:
            self._tracker = snapshots.begin(self._place.tree, self._profile, callers)
            self._versions = [place.tree.version for place in self._further]

        try:
            await self._run(begin)
        except OSError as error:
            self.notes = (f"`handrail undo` cannot undo this call: {error.strerror or error}.",)

    async def finish(self) -> None:
        """Record what has changed since then. The folder was looked at just now."""
        tracker, self._tracker = self._tracker, None
        if self._snapshots is not None and tracker is not None:
            await self._run(partial(self._record, self._snapshots, tracker))
            self.notes = tracker.notes

    def _record(self, snapshots: WorkspaceSnapshots, tracker: ProgramChangeTracker) -> None:
        further: list[str] = []
        for place, seen in zip(self._further, self._versions, strict=True):
            place.refresh()
            if place.tree.version != seen:
                further.append(place.root)
        snapshots.finish(self._place.tree, tracker, further)


class GuardedProcess(ProcessWrapper):
    """A process whose :meth:`wait` raises an error if the program changed protected files."""

    def __init__(
        self,
        process: Process,
        prepared: _StartConditions,
        changes: _RunChanges,
        run: Callable[[Callable[[], None]], Awaitable[None]],
        works_for: Callable[[str], None],
    ) -> None:
        super().__init__(process)
        self.profile = prepared.profile
        self.shared = prepared.shared
        self.in_use = prepared.in_use
        self._aftermath = prepared.aftermath
        self._changes = changes
        self._run = run
        self._works_for = works_for
        self._last_look: asyncio.Future[None] | None = None
        self._last_check_error: ToolError | None = None
        self._ending: asyncio.Future[None] | None = None
        self._settled_callbacks: list[Callable[[bool], None]] = []
        self._calls = 0
        self._check_pending = False
        """Whether a call has ended and the check after it has not."""

    def add_last_check_callback(self, callback: Callable[[bool], None]) -> None:
        """Call ``callback`` when the sandbox is empty, with whether the last check could run."""
        self._settled_callbacks.append(callback)

    async def wait(self) -> int:
        """Wait for the end of the program and for the last check, and return the exit code.

        :raises ProtectedPathViolation: if the program changed protected files
        :raises ToolError: if the check could not run, or the process failed
        """
        code, error = 0, None
        try:
            code = await super().wait()
        except ToolError as ended:
            error = ended
        await self._finish_last_check()
        if (veto := self.violation) is not None:
            if error is not None and error.kind == "conflict":  # a mount has ended, and the program with it
                raise ToolError(f"{error.text} {veto.text}", kind="conflict")
            veto.exit_code = code
            raise veto
        if self._last_check_error is not None:
            raise self._last_check_error
        if error is not None:
            raise error
        return code

    async def kill(self) -> None:
        if self._ending is None:
            # Several callers may kill the process at once, and the check must run exactly once.
            self._ending = asyncio.ensure_future(self._kill_and_check())
        await asyncio.shield(self._ending)

    @property
    def violation(self) -> ProtectedPathViolation | None:
        """The error for what the process changed; valid after :meth:`wait` or :meth:`kill`."""
        return None if self._aftermath is None else self._aftermath.get_violation_so_far()

    @property
    def kept_file_notes(self) -> tuple[str, ...]:
        """Notes for the model about files that the process made and that stay; valid after :meth:`wait`."""
        return () if self._aftermath is None else (*self._aftermath.describe_kept_code_files(), *self._changes.notes)

    async def begin_call(self, call: str = "") -> tuple[str, ...]:
        """Begin a call of a long-running process, and return what changed since the last call.

        The result names what has appeared under protected names or was moved away since then. Either the process did it
        between its calls, or the user did. It is not counted as a change of this call.

        :param call: its id, which distinguishes programs that the call starts from those that wait for its end
        """
        self._calls += 1
        self._works_for(call)
        appeared: list[str] = []
        aftermath = self._aftermath
        # Before the first call, the state at the start is the baseline.
        if self._calls > 1 and aftermath is not None:
            await self._check_last_call(aftermath)
            await self._run(lambda: appeared.extend(aftermath.retake_baseline()))
        if call:
            await self._changes.begin((call,))
        return tuple(appeared)

    async def end_call(self) -> None:
        """End a call of a long-running process, and check what it changed.

        :raises ProtectedPathViolation: if it changed protected files
        """
        if self._aftermath is None:
            return
        self._check_pending = True
        await self._check_last_call(self._aftermath)
        self._works_for("")
        if (veto := self._aftermath.take_unreported_violation()) is not None:
            raise veto

    async def _check_last_call(self, aftermath: PostRunCheck) -> None:
        """Run the check after the last call unless it has run."""
        if self._check_pending:
            await self._run(aftermath.check_and_restore)
            self._check_pending = False
            await self._changes.finish()

    async def _kill_and_check(self) -> None:
        await super().kill()
        await self._finish_last_check()

    async def _finish_last_check(self) -> None:
        """Run the last check once, after the sandbox is empty; a cancelled caller does not stop it."""
        if self._last_look is None:
            self._last_look = asyncio.ensure_future(self._run_last_check())
        await asyncio.shield(self._last_look)

    async def _run_last_check(self) -> None:
        try:
            for pause in (*_LAST_CHECK_PAUSES_S, None) if self._aftermath is not None else ():
                assert self._aftermath is not None
                try:
                    await self._run(self._aftermath.check_and_restore)
                except (ToolError, OSError) as error:
                    self._last_check_error = ToolError(
                        f"The changes of the program in the workspace could not be checked: {str(error).rstrip('.')}. "
                        "No other program starts before this check succeeds. Call again later.",
                        kind="unavailable",
                    )
                    if pause is not None:
                        await asyncio.sleep(pause)
                else:
                    self._last_check_error = None
                    break
            await self._changes.finish()
        finally:
            for callback in self._settled_callbacks:
                callback(self._last_check_error is None)
            self._settled_callbacks.clear()
