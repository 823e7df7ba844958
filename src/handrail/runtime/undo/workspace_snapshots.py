"""The snapshot of the workspace that is kept before a program may write, and the changes that each call made.

A program starts only when the content of every file that it may change is kept, within limits. The kernel walks the workspace
before and after such a program anyway, to protect names. A snapshot adds one look at the status of each file to this walk, and
copies only files that changed since the last one: a file's status-change time moves with every write, and no program can set it.

Every look compares the workspace with the table of known files and notes each difference for all programs that run. A program's
changes are the differences between its start and its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import logging
import os
import secrets
import stat
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from handrail.contract.sandbox_protocol import SandboxProfile
from handrail.contract.struct import Struct
from handrail.contract.text.neutralisation import escape_terminal_controls
from handrail.runtime.files.secure_open import FOLDER_FLAGS, READ_FLAGS, open_root
from handrail.runtime.files.session_roots import BENEATH, NO_MAGICLINKS, NO_SYMLINKS, openat2
from handrail.sandbox.view.cached_folder_tree import CachedFolder, FolderTree
from handrail.store.undo_store import (
    ABSENT,
    INLINE_BYTES,
    PathChange,
    PathState,
    StoredFileState,
    UndoableOperation,
    UndoStore,
)

logger = logging.getLogger("handrail.runtime")

_STRICT = BENEATH | NO_SYMLINKS | NO_MAGICLINKS
_FICLONE = 0x40049409
_PIECE = 8 * 1024 * 1024
_TICK_NS = 25_000_000
_COARSE_TICK_NS = 2_100_000_000
"""Longer than a tick of the clock that a file system takes its times from; the second for one with whole seconds."""
_FEW_FILES = 50
"""Up to this number of files are kept on the event loop."""
_LATE_BYTES = 4 * 1024 * 1024
"""Larger files are kept after all others."""
_MOST_NAMED = 4
_MOST_UNCOVERED = 5_000
_UNKNOWN = PathState("file")
"""A file that existed and was not looked at."""
_HEAVY_FILES = 1_000
_HEAVY_NAMES = frozenset(
    (
        *("node_modules", "bower_components", ".pnpm-store", ".venv", "venv", "site-packages", "__pycache__"),
        *(".tox", ".nox", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".cache", ".gradle", ".next", ".nuxt"),
        *("target", "Pods", ".terraform", "vendor"),
    )
)
"""Folders that a tool makes again. They are kept only if they have few files."""


class UndoRetentionLimits(Struct, frozen=True):
    """How much is kept for undo.

    :param file_bytes: the largest file
    :param files: the number of files of a workspace
    :param keep_ms: how long one start may take to copy files
    """

    file_bytes: int = 256 * 1024 * 1024
    files: int = 50_000
    keep_ms: int = 3_000


class _CoveredFolder(Struct):
    """A folder whose files are looked at.

    :param base: its absolute path with a slash
    """

    relative: str
    base: str
    names: tuple[str, ...]
    known: dict[str, StoredFileState]


class _ScanCoverage(Struct):
    """The folders that a look covers, chosen again only if the tree or the closed paths have changed.

    :param noted_version: the version of the tree whose removed names are noted
    """

    key: object
    folders: list[_CoveredFolder]
    uncovered: list[str]
    noted_version: int = -1


_ChangedFile = tuple[_CoveredFolder, str, os.stat_result]


class ScanNeedsThread(Exception):
    """An error for a look that takes too long for an event loop. Nothing was changed."""


class ProgramChangeTracker:
    """The changes in the workspace while one program, or one call of a long-running program, runs.

    :ivar ended_ns: when it ended; 0 while it runs
    """

    def __init__(self, callers: tuple[str, ...], tool: str, closed: frozenset[str]) -> None:
        self.callers = callers
        self.tool = tool
        self.closed = closed
        """The paths that it cannot change, since they are mounted over."""
        self.started_ns = self.ended_ns = 0
        self.before: dict[str, PathState] = {}
        """The first state of each path that changed since the start."""
        self.overlaps: dict[str, None] = {}
        """The calls and jobs whose changes cannot be distinguished from its own."""
        self.uncovered: Mapping[str, tuple[int, int]] = {}
        """The folders whose files are not known, with inode and change time."""
        self.further: tuple[str, ...] = ()
        """The folders outside the workspace in which files changed meanwhile."""
        self.is_recovered = False
        """Whether a former process started it, which was killed."""
        self.problem = ""
        """Why its changes are not known completely."""
        self.notes: tuple[str, ...] = ()
        """Notes for the result of the call: what it changed and cannot be given back."""

    @property
    def name(self) -> str:
        """The id by which texts name it."""
        return self.callers[0]


class WorkspaceSnapshots:
    """The kept state of one workspace, and the recordings of its running programs. Thread-safe.

    Errors of the store never fail a call: its changes are then recorded as not known.

    :param root: the workspace, absolute and canonical
    """

    def __init__(self, root: str, store: UndoStore, limits: UndoRetentionLimits) -> None:
        self.root = root
        self.store = store
        self.limits = limits
        self._lock = threading.RLock()
        self._files: dict[str, dict[str, StoredFileState]] | None = None
        self._listed: Mapping[str, tuple[str, ...]] = {}
        """The names of all files as of the last look, by folder, also of those that are not kept."""
        self._folders: dict[str, int] = {}
        self._links: dict[str, str] = {}
        self._closed: tuple[str, ...] = ()
        """The folders that could not be read or entered, each with a slash."""
        self._shape: object = None
        self._coverage: _ScanCoverage | None = None
        self._uncovered: Sequence[str] = ()
        """The folders whose files are not known."""
        self._is_recovered = False
        self._noted: dict[str, PathState] = {}
        self._running: list[ProgramChangeTracker] = []

    # ── programs ─────────────────────────────────────────────────────────────────────────────────

    def begin(self, tree: FolderTree, profile: SandboxProfile, callers: tuple[str, ...]) -> ProgramChangeTracker | None:
        """Keep the workspace before a program starts; None if it works for no call, or in another workspace.

        :param tree: the workspace as of a look just now
        :param profile: with all paths that are mounted over
        :raises ScanNeedsThread: if it takes too long for the event loop
        :raises OSError: if nothing can be kept
        """
        if tree.root != self.root or not callers:
            return None
        closed = frozenset((*profile.pinned, *profile.masked))
        tracker = ProgramChangeTracker(callers, profile.tool, closed)
        with self._lock:
            self._record_ended_programs(tree, closed)
            tracker.uncovered = {one: _folder_state(self.root, one) for one in self._uncovered}
            # Two programs at the same time can both have made a change, so undo must name both.
            for other in self._running:
                other.overlaps[tracker.name] = None
                tracker.overlaps[other.name] = None
            tracker.started_ns = time.time_ns()
            # If this process is killed, the next one finds the run here and records what it changed.
            self.store.add_open_run(tracker.callers, tracker.tool, tracker.started_ns)
            self._running.append(tracker)
        return tracker

    def finish(self, tree: FolderTree, tracker: ProgramChangeTracker, further: Sequence[str] = ()) -> None:
        """Record what a program changed, after its sandbox is empty.

        :param tree: the workspace as of a look just now
        :param further: the folders outside the workspace in which files changed
        :raises ScanNeedsThread: if it takes too long for the event loop
        """
        with self._lock:
            tracker.ended_ns = tracker.ended_ns or time.time_ns()
            tracker.further = tuple(further)
            try:
                self._record_ended_programs(tree, tracker.closed)
            except OSError as error:  # the next look records it
                logger.warning("what changed in the workspace could not be kept for undo: %s", error)

    def recover(self) -> None:
        """Record what programs changed while a former process was killed, unless a program has started since.

        Only files that were kept are looked at, since it is not known which files the rules hide.
        """
        with self._lock:
            if self._is_recovered or not self.store.exists or not self.store.list_interrupted_runs():
                return
            known = self.store.load_known_files()
            tree = FolderTree(self.root)
            tree.refresh()
            paths = ((folder, name) for folder in tree.order for name in folder.files)
            closed = frozenset(f"{one.path}/{name}" for one, name in paths if name not in known.get(one.relative, {}))
            self._record_ended_programs(tree, closed)

    def _record_ended_programs(self, tree: FolderTree, closed: frozenset[str]) -> None:
        """Look at the workspace, and record the changes of the programs that have ended.

        :raises OSError: if the store fails; what is known is then read again
        :raises ScanNeedsThread: if it takes too long for the event loop
        """
        try:
            if self._files is None:
                self._load()
            self._update_known_files(tree, closed)
            for one in [one for one in self._running if one.ended_ns]:
                self._running.remove(one)
                self._record(one)
        except OSError as error:
            # After an error it is unknown which part was recorded, so everything is read again.
            self._files = self._coverage = self._shape = None
            self._noted.clear()
            for one in self._running:
                one.problem = f"Some changes could not be recorded: {error.strerror or error}."
            raise
        if not self._running:
            self.store.in_use.clear()

    def _load(self) -> None:
        """Read what is known, and go on with the programs of a process that was killed.

        :raises OSError: if the store cannot be read
        """
        self._files = self.store.load_known_files()
        if self._is_recovered:
            return
        self._is_recovered = True
        for callers, tool, started_ns in self.store.list_interrupted_runs():
            tracker = ProgramChangeTracker(callers, tool, frozenset())
            tracker.started_ns, tracker.ended_ns = started_ns, time.time_ns()
            tracker.is_recovered = True
            tracker.problem = "Handrail was killed while it ran. The files that it created stay, and later changes by the user count as its changes."
            self._running.append(tracker)

    def _record(self, tracker: ProgramChangeTracker) -> None:
        changes = list(self._collect_changes(tracker))
        touched = [one for one, seen in tracker.uncovered.items() if _folder_state(self.root, one) != seen]
        tracker.notes = tuple(_describe_unkept(changes, touched))
        problem = tracker.problem
        if touched:
            problem = f"{problem} Files in {_join_names(touched)} changed, and Handrail does not keep them.".strip()
        if tracker.further:
            named = _join_names(tracker.further)
            problem = f"{problem} Files in {named} changed, and Handrail keeps only files of the workspace.".strip()
        with self.store.transaction():
            self.store.remove_open_run(tracker.callers)
            if changes or touched or tracker.further:
                operation = UndoableOperation(
                    0,
                    "program",
                    tracker.name,
                    parse_session_id(tracker.callers),
                    tracker.tool,
                    tracker.started_ns,
                    tracker.ended_ns,
                    tracker.callers,
                    tuple(tracker.overlaps),
                    problem,
                )
                self.store.add_operation(operation, changes)

    def _collect_changes(self, tracker: ProgramChangeTracker) -> Iterator[PathChange]:
        """Yield the changes of a tracker, without those that are known to be another call's."""
        others = self._list_overlapping(tracker)
        for path, before in tracker.before.items():
            after = self._known_state(path)
            if before.is_same(after) or (tracker.is_recovered and before.kind == "absent"):
                continue
            if before is _UNKNOWN and self._is_older(path, tracker.started_ns):
                continue  # it was only not looked at before
            key = os.fsencode(path)
            beside = others.get(key, ())
            if any(change.after.is_same(after) and not change.is_shared for _, change in beside):
                continue  # another call certainly made it
            strangers = [name for name, _ in beside if name not in tracker.callers]
            tracker.overlaps |= dict.fromkeys(strangers)
            yield PathChange(key, before, after, bool(strangers) or self._is_running_with(tracker))

    def _is_older(self, path: str, started_ns: int) -> bool:
        folder, _, name = path.rpartition("/")
        kept = (self._files or {}).get(folder, {}).get(name)
        return kept is not None and kept.ctime_ns < started_ns - _TICK_NS

    def _is_running_with(self, tracker: ProgramChangeTracker) -> bool:
        return any(one.name in tracker.overlaps for one in self._running)

    def _list_overlapping(self, tracker: ProgramChangeTracker) -> Mapping[bytes, list[tuple[str, PathChange]]]:
        """Return the changes that were recorded while this program ran, with the call, by path."""
        found: dict[bytes, list[tuple[str, PathChange]]] = {}
        if not tracker.before:
            return found
        for one in self.store.find_operations(ended_after_ns=tracker.started_ns):
            for change in self.store.list_changes(one.id):
                found.setdefault(change.path, []).append((one.name, change))
        return found

    def keep_content(self, descriptor: int) -> None:
        """Keep the content of an open file that is about to be replaced.

        :raises OSError: if the store fails
        """
        with self.store.transaction():
            _FileKeeper(self.root, self.store, self.limits).keep_content(descriptor, os.fstat(descriptor))

    # ── the look ─────────────────────────────────────────────────────────────────────────────────

    def _update_known_files(self, tree: FolderTree, closed: frozenset[str]) -> None:
        """Bring the table of known files up to date, and note each difference for the running programs.

        :param closed: paths that are left out, since no program can change them
        :raises OSError: if the store fails
        :raises ScanNeedsThread: if it takes too long for the event loop
        """
        coverage = self._choose_covered_folders(tree, closed)
        changed = _find_changed(coverage)
        # Nothing is changed before this point, so the look can be repeated in a thread.
        if len(changed) > _FEW_FILES and _on_event_loop():
            raise ScanNeedsThread
        stored: dict[tuple[str, str], StoredFileState | None] = {}
        self._note_folders_and_links(tree)
        if tree.version != coverage.noted_version:
            self._note_removed(tree, coverage, stored)
        if changed or stored:
            with self.store.transaction():
                keeper = _FileKeeper(self.root, self.store, self.limits)
                for folder, name, kept in keeper.store_changed_files(changed):
                    self._note(_join(folder.relative, name), self._get_last_known_state(folder, name))
                    if kept is not None:
                        folder.known[name] = stored[folder.relative, name] = kept
                    elif folder.known.pop(name, None) is not None:
                        stored[folder.relative, name] = None
                self.store.save_known_files(stored)
        if tree.version != coverage.noted_version:
            self._listed = {folder.relative: folder.files for folder in tree.order}
            coverage.noted_version = tree.version
        self._send_notes_to_programs()
        self._uncovered = coverage.uncovered

    def _choose_covered_folders(self, tree: FolderTree, closed: frozenset[str]) -> _ScanCoverage:
        """Return which folders and files a look covers."""
        key = (id(tree), tree.version, closed)
        if self._coverage is not None and self._coverage.key == key:
            return self._coverage
        assert self._files is not None
        folders: list[_CoveredFolder] = []
        ordered, uncovered = _choose_folders(tree, closed)
        left = self.limits.files
        shut = {path.rpartition("/")[0] for path in closed}
        for folder in ordered:
            # The outer folders come first, so a limit leaves out deep folders and not the top of the project.
            left -= len(folder.files)
            if left < 0:
                uncovered.append(folder.relative)
                continue
            base, names = folder.path.rstrip("/") + "/", folder.files
            if base[:-1] in shut:
                names = tuple(name for name in names if base + name not in closed)
            folders.append(_CoveredFolder(folder.relative, base, names, self._files.setdefault(folder.relative, {})))
        self._coverage = _ScanCoverage(key, folders, uncovered[:_MOST_UNCOVERED])
        return self._coverage

    def _note_folders_and_links(self, tree: FolderTree) -> None:
        """Note folders and links that were made, removed or changed."""
        folders: dict[str, int] = {}
        for folder in tree.order:
            try:
                folders[folder.relative] = stat.S_IMODE(os.lstat(folder.path).st_mode)
            except OSError:
                continue
        shape = (id(tree), tree.version)
        if folders == self._folders and shape == self._shape:
            return
        links = {_join(folder.relative, name): target for folder in tree.order for name, target in folder.link_targets}
        self._closed = _list_closed(tree, folders)
        for shut in self._closed:  # what is in them is not seen, so it counts as unchanged
            folders |= {path: mode for path, mode in self._folders.items() if path.startswith(shut)}
            links |= {path: target for path, target in self._links.items() if path.startswith(shut)}
            if shut[:-1] in self._folders:
                folders.setdefault(shut[:-1], self._folders[shut[:-1]])
        if self._shape is not None:
            for path in folders.keys() | self._folders.keys():
                if folders.get(path) != self._folders.get(path):
                    self._note(path, get_folder_state(self._folders.get(path)))
            for path in links.keys() | self._links.keys():
                if links.get(path) != self._links.get(path):
                    self._note(path, _link_state_of(self._links.get(path)))
        self._folders, self._links, self._shape = folders, links, shape

    def _note_removed(
        self, tree: FolderTree, coverage: _ScanCoverage, stored: dict[tuple[str, str], StoredFileState | None]
    ) -> None:
        """Note known files that are gone, also with their folders."""
        assert self._files is not None
        present = {folder.relative: folder.files for folder in tree.order}
        for relative in [one for one in self._files if self._files[one]]:
            if f"{relative}/".startswith(self._closed):
                continue
            known, names = self._files[relative], frozenset(present.get(relative, ()))
            for name in [name for name in known if name not in names]:
                self._note(_join(relative, name), _state_of(known.pop(name)))
                stored[relative, name] = None
            if relative not in present:
                del self._files[relative]

    def _get_last_known_state(self, folder: _CoveredFolder, name: str) -> PathState:
        """Return the state of a changed file as of the last look."""
        if (was := folder.known.get(name)) is not None:
            return _state_of(was)
        return _UNKNOWN if name in self._listed.get(folder.relative, ()) else ABSENT

    def _note(self, path: str, before: PathState) -> None:
        """Note the state of a path before a change. A file that became a folder is noted once, as the file."""
        if self._running and (before.kind != "absent" or path not in self._noted):
            self._noted[path] = before

    def _send_notes_to_programs(self) -> None:
        """Give the notes of a look to every running program."""
        for tracker in self._running:
            for path, before in self._noted.items():
                # The first state counts: later changes of the same program have the state before the first one as their
                # origin.
                tracker.before.setdefault(path, before)
        self.store.in_use.update(before.sha for before in self._noted.values() if before.sha is not None)
        self._noted.clear()

    def _known_state(self, path: str) -> PathState:
        """Return what is at a path, as of the last look."""
        folder, _, name = path.rpartition("/")
        if (kept := (self._files or {}).get(folder, {}).get(name)) is not None:
            return _state_of(kept)
        if path in self._links:
            return _link_state_of(self._links[path])
        if path in self._folders:
            return get_folder_state(self._folders[path])
        return _UNKNOWN if name in self._listed.get(folder, ()) else ABSENT

    def find_running_calls(self, calls: Iterable[str]) -> frozenset[str]:
        """Return those of ``calls`` whose programs still run."""
        with self._lock:
            running = (one for one in self._running if not one.ended_ns)
            return frozenset(name for one in running for name in one.callers).intersection(calls)


class _FileKeeper:
    """Keeps the content of files, within the limits of one start."""

    def __init__(self, root: str, store: UndoStore, limits: UndoRetentionLimits) -> None:
        self._root = root
        self._store = store
        self._limits = limits
        self._deadline = time.monotonic() + limits.keep_ms / 1000
        self._folder: _CoveredFolder | None = None
        self._parent = -1

    def store_changed_files(
        self, files: Iterable[_ChangedFile]
    ) -> Iterator[tuple[_CoveredFolder, str, StoredFileState | None]]:
        """Keep files and yield each with its state; None for one that is gone. Long files come last."""
        late: list[_ChangedFile] = []
        try:
            for one in files:
                if one[2].st_size > _LATE_BYTES:
                    late.append(one)
                else:
                    yield one[0], one[1], self._keep(*one)
            for one in late:
                yield one[0], one[1], self._keep(*one)
        finally:
            self._close_parent()

    def _keep(self, folder: _CoveredFolder, name: str, found: os.stat_result) -> StoredFileState | None:
        if not stat.S_ISREG(found.st_mode) or found.st_size > self._limits.file_bytes:
            return _describe_file(found, None)
        if time.monotonic() > self._deadline:
            return _describe_file(found, None)._replace(settled=False)  # the next start tries again
        try:
            descriptor = os.open(name, READ_FLAGS | os.O_NOFOLLOW, dir_fd=self._open_parent(folder))
        except FileNotFoundError:
            return None
        except OSError:
            return _describe_file(found, None)
        try:
            now = os.fstat(descriptor)
            if not stat.S_ISREG(now.st_mode) or now.st_size > self._limits.file_bytes:
                return _describe_file(now, None)
            try:
                sha = self.keep_content(descriptor, now)
            except OSError:
                sha = None
            after = os.fstat(descriptor)
            kept = _describe_file(now, sha)
            # The file was written during the copy, so the content may be a mixture. The next look copies it again.
            return kept if after.st_ctime_ns == now.st_ctime_ns else kept._replace(settled=False)
        finally:
            os.close(descriptor)

    def keep_content(self, descriptor: int, found: os.stat_result) -> bytes | None:
        """Keep the content of an open file, and return its hash; None if there is no room."""
        if found.st_size <= INLINE_BYTES:
            return self._store.put_bytes(os.read(descriptor, INLINE_BYTES + 1))
        if not self._store.make_room(found.st_size):
            return None
        return self._keep_large(descriptor, found.st_size)

    def _keep_large(self, descriptor: int, size: int) -> bytes | None:
        """Keep a long file as a file, which shares blocks with the original if the file system can."""
        temporary = self._store.locate_large_content(b"").parent / f".new-{secrets.token_hex(8)}"
        target = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            copy_content(descriptor, target, size)
            sha = hash_open_file(target)
            # The content is marked before it has a row, so that making room cannot remove it.
            self._store.in_use.add(sha)
            # Equal files are stored once.
            if not self._store.has_content(sha):
                temporary.rename(self._store.locate_large_content(sha))
                self._store.add_content_row(sha, os.fstat(target).st_size, None)
            return sha
        finally:
            os.close(target)
            with contextlib.suppress(OSError):
                temporary.unlink()

    def _open_parent(self, folder: _CoveredFolder) -> int:
        if self._folder is not folder:
            self._close_parent()
            top = open_root(self._root)
            try:
                self._parent = openat2(top, folder.relative or ".", FOLDER_FLAGS, _STRICT)
            finally:
                os.close(top)
            self._folder = folder
        return self._parent

    def _close_parent(self) -> None:
        if self._parent >= 0:
            os.close(self._parent)
        self._folder, self._parent = None, -1


def copy_content(source: int, target: int, size: int) -> None:
    """Copy an open file, sharing blocks if the file system can."""
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError:
        rest = size
        while rest > 0 and (count := os.sendfile(target, source, None, min(rest, _PIECE))) > 0:
            rest -= count


def hash_open_file(descriptor: int) -> bytes:
    digest, offset = hashlib.sha256(), 0
    while piece := os.pread(descriptor, _PIECE, offset):
        digest.update(piece)
        offset += len(piece)
    return digest.digest()


def parse_session_id(callers: Sequence[str]) -> str:
    """Return the session of a call: the ids of calls begin with it."""
    return next((one.partition("/")[0] for one in callers if "/" in one), "")


def _choose_folders(tree: FolderTree, closed: frozenset[str]) -> tuple[list[CachedFolder], list[str]]:
    """Return the folders to look at, and the folders whose files are too many or of no use."""
    chosen: list[CachedFolder] = []
    heavy: dict[str, list[CachedFolder]] = {}
    top = shut = "\0"
    for folder in tree.order:
        if folder.path.startswith(shut):
            continue
        if folder.path in closed:
            shut = folder.path + "/"
        elif folder.path.startswith(top):
            heavy[top].append(folder)
        elif folder.relative.rpartition("/")[2] in _HEAVY_NAMES:
            top = folder.path + "/"
            heavy[top] = [folder]
        else:
            chosen.append(folder)
    uncovered: list[str] = []
    for folders in heavy.values():
        # A small folder with such a name may be the user's own, and keeping it is cheap.
        if sum(len(folder.files) for folder in folders) <= _HEAVY_FILES:
            chosen += folders
        else:
            uncovered += [folder.relative for folder in folders]
    return chosen, uncovered


def _list_closed(tree: FolderTree, modes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the folders that cannot be read or entered, each with a slash.

    :param modes: the permission bits of all folders
    """
    shut = {folder.relative for folder in tree.order if folder.is_closed}
    if os.geteuid() != 0:
        shut.update(folder for folder, mode in modes.items() if mode & 0o500 != 0o500)
    return tuple(f"{folder}/" for folder in sorted(shut))


def _find_changed(coverage: _ScanCoverage) -> list[_ChangedFile]:
    """Return the files whose status differs from the known one. Files that are gone are found by the listing."""
    changed: list[_ChangedFile] = []
    status = os.lstat
    for folder in coverage.folders:
        base, get = folder.base, folder.known.get
        for name in folder.names:
            try:
                now = status(base + name)
            except OSError:
                continue
            was = get(name)
            # No program can set the change time, so equal times mean equal content, unless the file was too young when
            # it was read.
            if was is None or was[0] != now.st_ctime_ns or was[1] != now.st_ino or not was[6]:
                changed.append((folder, name, now))
    return changed


def _describe_file(found: os.stat_result, sha: bytes | None) -> StoredFileState:
    tick = _TICK_NS if found.st_ctime_ns % 1_000_000_000 else _COARSE_TICK_NS
    settled = found.st_ctime_ns < time.time_ns() - tick
    return StoredFileState(
        found.st_ctime_ns, found.st_ino, found.st_size, found.st_mtime_ns, found.st_mode, sha, settled
    )


def _state_of(kept: StoredFileState) -> PathState:
    if not stat.S_ISREG(kept.mode):
        return PathState("other", identity=str(kept.inode))
    identity = f"{kept.inode}:{kept.size}:{kept.mtime_ns}:{kept.ctime_ns}"
    return PathState("file", stat.S_IMODE(kept.mode), kept.sha, identity=identity)


def get_folder_state(mode: int | None) -> PathState:
    return ABSENT if mode is None else PathState("folder", mode)


def _link_state_of(target: str | None) -> PathState:
    return ABSENT if target is None else PathState("link", target=os.fsencode(target))


def _folder_state(root: str, relative: str) -> tuple[int, int]:
    try:
        found = os.lstat(f"{root.rstrip('/')}/{relative}")
    except OSError:
        return 0, 0
    return found.st_ino, found.st_ctime_ns


def _describe_unkept(changes: Sequence[PathChange], touched: Sequence[str]) -> Iterator[str]:
    """Yield notes about what a call changed and `handrail undo` cannot restore."""
    lost = [os.fsdecode(one.path) for one in changes if not is_kept(one.before)]
    if lost or touched:
        yield (
            f"`handrail undo` cannot restore {_join_names([*lost, *touched])}: the earlier content was not kept, since it "
            "is too large, or of a kind or in a folder that Handrail does not keep."
        )


def is_kept(state: PathState) -> bool:
    """Return whether this state can be given back."""
    return state.kind != "other" and (state.kind != "file" or state.sha is not None)


def _join_names(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - _MOST_NAMED} more" if len(paths) > _MOST_NAMED else ""
    return ", ".join(f"`{escape_terminal_controls(path) or '.'}`" for path in paths[:_MOST_NAMED]) + more


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _on_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
