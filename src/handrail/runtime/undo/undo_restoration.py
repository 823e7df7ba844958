"""The undo itself: find the earlier state of each path, compare the present one, and put the earlier one back.

A path is changed only if it still is as the call left it. Otherwise it is a conflict and stays. Every step goes from the
descriptor of a folder below the workspace to a name in it and follows no link. What is displaced is compared once more after it
was moved aside, and kept in the store first, so that an undo can itself be undone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from handrail.contract.protected.path_protection import find_path_protection
from handrail.contract.struct import Struct
from handrail.contract.text.neutralisation import escape_terminal_controls
from handrail.contract.undo_reports import UndoOutcome, UndoPathResult
from handrail.runtime.files.atomic_write import exchange_names, rename_without_overwriting, set_mode
from handrail.runtime.files.secure_open import FOLDER_FLAGS, READ_FLAGS, open_root
from handrail.runtime.files.session_roots import BENEATH, NO_MAGICLINKS, NO_SYMLINKS, PATH_FLAGS, openat2
from handrail.runtime.undo.workspace_snapshots import WorkspaceSnapshots, copy_content, hash_open_file, is_kept
from handrail.store.undo_store import ABSENT, PathChange, PathState, UndoableOperation
from handrail.store.unsupported_operations import ignore_unsupported_operation, make_temporary_name, replace_name

_STRICT = BENEATH | NO_SYMLINKS | NO_MAGICLINKS
_MOST_NAMED = 3


class _UndoStep(Struct, frozen=True):
    """The change of one path that an undo makes."""

    path: bytes
    present: PathState
    earlier: PathState

    @property
    def needs_removal_first(self) -> bool:
        """Whether what is there now goes before anything else comes."""
        return self.earlier.kind == "absent" or (self.present.kind == "folder" and self.earlier.kind != "folder")


class UndoPlan(Struct, frozen=True):
    """What an undo would do.

    :param steps: the paths to change
    :param left: the paths that stay, with the reason
    """

    operations: tuple[UndoableOperation, ...]
    steps: tuple[_UndoStep, ...]
    left: tuple[UndoPathResult, ...]

    @property
    def calls(self) -> tuple[str, ...]:
        """The calls whose changes are undone."""
        return tuple(dict.fromkeys(one.name for one in self.operations))

    @property
    def problems(self) -> tuple[str, ...]:
        """What calls changed in ways that are not known."""
        return tuple(f"{one.name}: {one.problem}" for one in self.operations if one.problem)

    def list_paths(self) -> list[str]:
        return [os.fsdecode(one.path) for one in self.steps]

    def preview(self) -> tuple[UndoPathResult, ...]:
        """Return the outcome of each path if all goes well."""
        return _sort([*(UndoPathResult(_show(one.path), _find_outcome(one)) for one in self.steps), *self.left])


def plan_undo(snapshots: WorkspaceSnapshots, operations: Sequence[UndoableOperation], *, overwrite: bool) -> UndoPlan:
    """Compare the present state of each path with what the operations left, and return what an undo would do.

    :param operations: the oldest first
    :param overwrite: whether paths that changed since are also given back; their present state is kept
    """
    chains: dict[bytes, list[tuple[UndoableOperation, PathChange]]] = {}
    for operation in reversed(operations):
        for change in snapshots.store.list_changes(operation.id):
            chains.setdefault(change.path, []).append((operation, change))
    own = {name for one in operations for name in (one.name, *one.callers)}
    steps: list[_UndoStep] = []
    left: list[UndoPathResult] = []
    kept: list[bytes] = []
    with WorkspaceFolderHandle(snapshots) as workspace:
        for path, chain in chains.items():
            present = workspace.read_path_state(path)
            earlier, reason = _follow_changes_back(snapshots, path, present, chain, own, overwrite=overwrite)
            if reason is not None:
                left.append(UndoPathResult(_show(path), *reason))
                kept += [path] if earlier.kind != "absent" else []
            if not earlier.is_same(present) and (reason is None or reason[0] == "conflict"):
                steps.append(_UndoStep(path, present, earlier))
        staying = {folder for path in kept for folder in _list_parents(path)}
        steps = [one for one in steps if one.earlier.kind != "absent" or one.path not in staying]
        for path in workspace.find_unremovable_folders(steps):
            left.append(UndoPathResult(_show(path), "conflict", _NEWER_FILES))
            steps = [one for one in steps if one.path != path]
    return UndoPlan(tuple(operations), tuple(steps), tuple(left))


def _list_parents(path: bytes) -> Iterator[bytes]:
    while path := path.rpartition(b"/")[0]:
        yield path


def _follow_changes_back(
    snapshots: WorkspaceSnapshots,
    path: bytes,
    present: PathState,
    chain: Sequence[tuple[UndoableOperation, PathChange]],
    own: Collection[str],
    *,
    overwrite: bool,
) -> tuple[PathState, tuple[UndoOutcome, str] | None]:
    """Follow the changes of a path from the newest to the oldest, as far as each is still in place.

    :return: the earlier state, and why it does not go back further
    """
    state = present
    for operation, change in chain:
        if change.after.is_same(state):
            strangers = [name for name in operation.overlaps if name not in own]
            if change.is_shared and strangers and not overwrite:
                names = ", ".join(strangers[:_MOST_NAMED])
                return state, ("conflict", f"{names} ran at the same time and may have made this change")
        elif change.before.is_same(state):
            continue  # it is as before already
        elif not overwrite:
            return state, ("conflict", f"it has changed since {operation.name}; the newer version stays")
        if not is_kept(change.before):
            return state, ("unavailable", "its earlier content was not kept")
        if operation.kind == "undo" and _is_forbidden(snapshots, path, change.before):
            return state, ("conflict", "it is a protected file, and its content came from a call")
        state = change.before
    return state, None


def _is_forbidden(snapshots: WorkspaceSnapshots, path: bytes, earlier: PathState) -> bool:
    """Return whether undoing an undo would put a call's content under a protected name."""
    if earlier.kind not in ("file", "link"):
        return False
    if (found := find_path_protection(os.fsdecode(path))) is None or found.requires_approval:
        return False
    return earlier.sha is None or snapshots.store.was_written_by_call(path, earlier.sha)


def execute_undo_plan(
    snapshots: WorkspaceSnapshots, plan: UndoPlan, undo_id: str, in_use: Mapping[str, str]
) -> tuple[UndoPathResult, ...]:
    """Change the workspace as planned, record the changes as an operation, and return the outcome of each path.

    :param in_use: absolute paths that running programs have mounted over, with a program's name
    :raises OSError: if the changes cannot be recorded; then nothing was changed
    """
    store, now = snapshots.store, time.time_ns()
    sessions = {one.session for one in plan.operations}
    session = next(iter(sessions)) if len(sessions) == 1 else ""
    needed = {sha for one in plan.steps for sha in (one.present.sha, one.earlier.sha) if sha is not None} - store.in_use
    store.in_use |= needed
    # The changes are on record before they are made: after a crash, the undo can be undone as far as it went.
    with store.transaction():
        changes = [PathChange(one.path, one.present, one.earlier) for one in plan.steps]
        number = store.add_operation(UndoableOperation(0, "undo", undo_id, session, "", now, now), changes)
    failed: dict[bytes, str] = {}
    try:
        with WorkspaceFolderHandle(snapshots) as workspace:
            for path, reason in _carry_out_steps(workspace, plan.steps, in_use):
                failed.setdefault(path, reason)
    finally:
        store.remove_changes(number, failed)
        if len(failed) == len(plan.steps):
            store.remove_operation(number)
        store.in_use -= needed
    done = [
        UndoPathResult(_show(one.path), "conflict", failed[one.path])
        if one.path in failed
        else UndoPathResult(_show(one.path), _find_outcome(one))
        for one in plan.steps
    ]
    if not any(one.outcome == "conflict" for one in (*done, *plan.left)):
        store.mark_undone(plan.operations, undo_id)
    return _sort([*done, *plan.left])


def _carry_out_steps(
    workspace: WorkspaceFolderHandle, steps: Sequence[_UndoStep], in_use: Mapping[str, str]
) -> Iterator[tuple[bytes, str]]:
    """Carry out the steps, each when its folder is there, and yield those that fail with the reason."""
    ordered = sorted(steps, key=lambda one: one.path)
    failed: set[bytes] = set()
    for step in ordered:
        if step.present.kind == step.earlier.kind == "folder" and step.earlier.mode is not None:
            workspace.set_folder_mode(step.path, step.earlier.mode | 0o700)
    for is_removal in (True, False):
        for step in reversed(ordered) if is_removal else ordered:
            if step.path in failed or not (step.needs_removal_first if is_removal else step.earlier.kind != "absent"):
                continue
            name = in_use.get(workspace.absolute(step.path))
            try:
                if name is not None:
                    raise _PathConflict(f"{name} has it mounted over; stop that program first")
                if is_removal:
                    workspace.remove(step.path, step.present)
                else:
                    workspace.put(step.path, ABSENT if step.needs_removal_first else step.present, step.earlier)
            except (_PathConflict, OSError) as error:
                failed.add(step.path)
                yield step.path, str(error) if isinstance(error, _PathConflict) else error.strerror or str(error)
    for step in reversed(ordered):
        if step.earlier.kind == "folder" and step.path not in failed:
            workspace.set_folder_mode(step.path, step.earlier.mode)


class _PathConflict(Exception):
    """An error for a path that is no longer as the plan found it."""


_RACE = "it changed while the undo ran"
_NEWER_FILES = "the folder has newer files, which stay"


class WorkspaceFolderHandle:
    """The workspace by the descriptors of its folders. For one thread."""

    def __init__(self, snapshots: WorkspaceSnapshots) -> None:
        self._snapshots = snapshots
        self._store = snapshots.store
        self._root = -1
        self._parent: tuple[str, int] | None = None
        self._closed_folders: dict[str, int] = {}
        """The permissions of folders that had to be opened for a change."""

    def __enter__(self) -> WorkspaceFolderHandle:
        top = open_root(self._snapshots.root)
        try:
            self._root = openat2(top, ".", FOLDER_FLAGS, _STRICT)
        finally:
            os.close(top)
        return self

    def __exit__(self, *_: object) -> None:
        self._forget_parent()
        for folder, mode in self._closed_folders.items():
            self.set_folder_mode(os.fsencode(folder), mode)
        os.close(self._root)

    def absolute(self, path: bytes) -> str:
        """Return the absolute path of a path below the workspace."""
        return f"{self._snapshots.root.rstrip('/')}/{os.fsdecode(path)}"

    def read_path_state(self, path: bytes) -> PathState:
        """Return what is at a path now."""
        try:
            parent, name = self._open_parent(os.fsdecode(path))
        except OSError:
            return ABSENT  # a folder on the way is missing, or is a link
        return self._read_entry(parent, name)

    def find_unremovable_folders(self, steps: Sequence[_UndoStep]) -> list[bytes]:
        """Return the folders that cannot be removed, because they have entries that stay."""
        going = {one.path for one in steps if one.needs_removal_first}
        found: list[bytes] = []
        for step in sorted(steps, key=lambda one: one.path, reverse=True):
            if step.path not in going or step.present.kind != "folder":
                continue
            if any(step.path + b"/" + name not in going for name in self._list_names(step.path)):
                going.discard(step.path)
                found.append(step.path)
        return found

    def _list_names(self, path: bytes) -> list[bytes]:
        """Return the names in a folder, or none if it cannot be read."""
        try:
            descriptor = openat2(self._root, os.fsdecode(path), FOLDER_FLAGS, _STRICT)
        except OSError:
            return []
        try:
            with os.scandir(descriptor) as entries:
                return [os.fsencode(one.name) for one in entries]
        finally:
            os.close(descriptor)

    def store_path_state(self, path: bytes, *, content: bool) -> PathState:
        """Return what is at a path now, and keep the content of a file. Call it within a transaction of the store.

        :param content: whether the content is kept; without it, the state cannot be given back
        :raises OSError: if the store fails
        """
        try:
            parent, name = self._open_parent(os.fsdecode(path))
        except OSError:
            return ABSENT
        state = self._read_entry(parent, name, keep=True, content=content)
        is_missing = state.sha is not None and not self._store.has_content(state.sha)
        return state._replace(sha=None) if is_missing else state

    def _read_entry(self, parent: int, name: str, *, keep: bool = False, content: bool = True) -> PathState:
        """Return what an entry of a folder is now.

        :param keep: whether to keep the content of a file, too
        :param content: whether to read it
        """
        try:
            found = os.stat(name, dir_fd=parent, follow_symlinks=False)
            if stat.S_ISDIR(found.st_mode):
                return PathState("folder", stat.S_IMODE(found.st_mode))
            if stat.S_ISLNK(found.st_mode):
                return PathState("link", target=os.fsencode(os.readlink(name, dir_fd=parent)))
        except OSError:
            return ABSENT
        if not stat.S_ISREG(found.st_mode):
            return PathState("other", identity=str(found.st_ino))
        identity = f"{found.st_ino}:{found.st_size}:{found.st_mtime_ns}:{found.st_ctime_ns}"
        is_read = content and found.st_size <= self._snapshots.limits.file_bytes
        sha = self._read_hash(parent, name, keep=keep) if is_read else None
        return PathState("file", stat.S_IMODE(found.st_mode), sha, identity=identity)

    def _read_hash(self, parent: int, name: str, *, keep: bool) -> bytes | None:
        try:
            descriptor = os.open(name, READ_FLAGS | os.O_NOFOLLOW, dir_fd=parent)
        except OSError:
            return None
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return None
            sha = hash_open_file(descriptor)
            if keep and not self._store.has_content(sha):
                self._snapshots.keep_content(descriptor)
            return sha
        finally:
            os.close(descriptor)

    def remove(self, path: bytes, present: PathState) -> None:
        parent, name = self._open_parent(os.fsdecode(path), change=True)
        if present.kind == "folder":
            try:
                os.rmdir(name, dir_fd=parent)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    raise _PathConflict(_NEWER_FILES) from None
                raise
            return
        self._keep(parent, name, present)
        aside = make_temporary_name()
        os.rename(name, aside, src_dir_fd=parent, dst_dir_fd=parent)
        if self._is_unmoved(present, parent, aside):
            os.unlink(aside, dir_fd=parent)
            return
        try:
            rename_without_overwriting(parent, aside, name)
        except FileExistsError:
            raise _PathConflict(f"{_RACE}; one of the newer versions is now {aside}") from None
        raise _PathConflict(_RACE)

    def put(self, path: bytes, present: PathState, earlier: PathState) -> None:
        """Give a path its earlier state, if it still is ``present``."""
        parent, name = self._open_parent(os.fsdecode(path), change=True)
        if earlier.kind == "folder":
            if present.kind not in ("folder", "absent"):
                self.remove(path, present)
            if present.kind != "folder":
                os.mkdir(name, 0o700, dir_fd=parent)
                self._give_owner(parent, name)
            return
        aside = make_temporary_name()
        try:
            self._make(parent, aside, earlier)
            if present.kind == "absent":
                rename_without_overwriting(parent, aside, name)
                return
            self._keep(parent, name, present)
            if not exchange_names(parent, aside, name):
                replace_name(parent, aside, name)
            elif not self._is_unmoved(present, parent, aside):
                exchange_names(parent, aside, name)
                raise _PathConflict(_RACE)
        except FileExistsError:
            raise _PathConflict(_RACE) from None
        finally:
            with contextlib.suppress(OSError):
                os.unlink(aside, dir_fd=parent)

    def _keep(self, parent: int, name: str, present: PathState) -> None:
        """Keep the content of a file that is about to be removed, unless it is kept, and check that it still is ``present``."""
        if present.sha is not None and self._store.has_content(present.sha):
            return  # the check after the move suffices
        if not self._read_entry(parent, name, keep=True).is_same(present):
            raise _PathConflict(_RACE)

    def _is_unmoved(self, present: PathState, parent: int, name: str) -> bool:
        """Return whether an entry is the expected one after a rename, which changes the last time in its identity.

        Some file systems give a renamed file another number, too. Then the content tells.
        """
        now = self._read_entry(parent, name, content=False)
        if present.kind != "file" or now.kind != "file":
            return present.is_same(now)
        expected, found = ((one.identity or "").rpartition(":")[0] for one in (present, now))
        if present.mode == now.mode and expected == found != "":
            return True
        return present.sha is not None and present.is_same(self._read_entry(parent, name))

    def _make(self, parent: int, name: str, state: PathState) -> None:
        """Make a link or file with a state."""
        if state.kind == "link":
            assert state.target is not None
            os.symlink(os.fsdecode(state.target), name, dir_fd=parent)
            self._give_owner(parent, name)
            return
        assert state.sha is not None and state.mode is not None
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(name, flags, 0o600, dir_fd=parent)
        try:
            if (data := self._store.read_small_content(state.sha)) is not None:
                rest = memoryview(data)
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
            else:
                self._copy_large(descriptor, state.sha)
            self._give_owner(parent, name)
            set_mode(descriptor, state.mode)
        finally:
            os.close(descriptor)

    def _copy_large(self, target: int, sha: bytes) -> None:
        try:
            source = os.open(self._store.locate_large_content(sha), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            raise _PathConflict("its earlier content is no longer kept") from None
        try:
            copy_content(source, target, os.fstat(source).st_size)
        finally:
            os.close(source)
        if hash_open_file(target) != sha:
            raise _PathConflict("its kept content is damaged")

    def _give_owner(self, parent: int, name: str) -> None:
        """Give what root made the owner of its folder, so that a workspace stays its user's."""
        if os.geteuid() == 0:
            folder = os.fstat(parent)
            if (folder.st_uid, folder.st_gid) != (0, 0):
                with ignore_unsupported_operation():
                    os.chown(name, folder.st_uid, folder.st_gid, dir_fd=parent, follow_symlinks=False)

    def set_folder_mode(self, path: bytes, mode: int | None) -> None:
        """Give a folder its permissions, after everything in it is done."""
        with contextlib.suppress(OSError):
            descriptor = openat2(self._root, os.fsdecode(path) or ".", PATH_FLAGS | os.O_DIRECTORY, _STRICT)
            try:
                if mode is not None:
                    Path(f"/proc/self/fd/{descriptor}").chmod(mode)
            finally:
                os.close(descriptor)

    def _open_parent(self, path: str, *, change: bool = False) -> tuple[int, str]:
        """Return the descriptor of a path's folder, and its name in it.

        :param change: whether to make missing folders and to open one that cannot be written
        """
        if not path:  # the workspace itself
            return self._root, "."
        folder, _, name = path.rpartition("/")
        if self._parent is None or self._parent[0] != folder:
            self._forget_parent()
            try:
                descriptor = openat2(self._root, folder or ".", FOLDER_FLAGS, _STRICT)
            except FileNotFoundError:
                if not change:
                    raise
                above, inner = self._open_parent(folder, change=True)
                os.mkdir(inner, 0o777, dir_fd=above)
                self._give_owner(above, inner)
                self._forget_parent()
                descriptor = openat2(self._root, folder, FOLDER_FLAGS, _STRICT)
            self._parent = folder, descriptor
        if change:
            mode = stat.S_IMODE(os.fstat(self._parent[1]).st_mode)
            if mode & 0o300 != 0o300:
                self._closed_folders.setdefault(folder, mode)
                os.fchmod(self._parent[1], mode | 0o700)
        return self._parent[1], name

    def _forget_parent(self) -> None:
        if self._parent is not None:
            os.close(self._parent[1])
        self._parent = None


def _find_outcome(step: _UndoStep) -> UndoOutcome:
    return "removed" if step.earlier.kind == "absent" else "restored"


def _show(path: bytes) -> str:
    return escape_terminal_controls(os.fsdecode(path)) or "."


def _sort(paths: Iterable[UndoPathResult]) -> tuple[UndoPathResult, ...]:
    return tuple(sorted(paths, key=lambda one: one.path))
