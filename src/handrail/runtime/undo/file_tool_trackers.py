"""The tracker of one change by a file tool: it keeps what the change replaces, moves or removes, directly before."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
import time
from collections.abc import Generator, Iterable, Iterator, Sequence

from handrail.contract.services.file_services import ResolvedPath
from handrail.runtime.undo.undo_restoration import WorkspaceFolderHandle
from handrail.runtime.undo.workspace_snapshots import WorkspaceSnapshots, get_folder_state, parse_session_id
from handrail.store.undo_store import ABSENT, PathChange, PathState, UndoableOperation

logger = logging.getLogger("handrail.runtime")


class FileChangeRecorder:
    """The tracker of one change by a file tool.

    :param located: the path that is written, deleted, or the target of a move
    :param callers: the ids of the call and of the calls above it
    """

    def __init__(
        self, snapshots: WorkspaceSnapshots, located: ResolvedPath, callers: tuple[str, ...], tool: str
    ) -> None:
        self._snapshots = snapshots
        self._relative = located.relative_path
        self._is_inside = located.root == snapshots.root
        self._callers = callers
        self._tool = tool
        self._operation: int | None = None
        self._missing = tuple(self._find_missing_folders()) if self._is_inside else ()

    def _find_missing_folders(self) -> Iterator[str]:
        folder = self._relative.rpartition("/")[0]
        while folder and not os.path.lexists(f"{self._snapshots.root.rstrip('/')}/{folder}"):
            yield folder
            folder = folder.rpartition("/")[0]

    def keep(self, before: bytes | None, mode: int | None, after: bytes, new_mode: int) -> None:
        """Keep the content that a write replaces, and record the change.

        :param before: None if the file is new
        :param mode: its permission bits
        """
        if not self._is_inside:
            return
        store = self._snapshots.store
        with self._log_errors(), store.transaction():
            state = PathState("file", new_mode, hashlib.sha256(after).digest())
            kept = ABSENT if before is None else PathState("file", mode, store.put_bytes(before))
            self._record([PathChange(os.fsencode(self._relative), kept, state)])

    def keep_deleted(self, entries: Sequence[str], aside: str) -> None:
        """Keep a tree that is about to be deleted, and record the deletion.

        :param entries: its paths in the tree; empty for the top
        :param aside: the name in its folder that it has now
        """
        if not self._is_inside:
            return
        now = _join(self._relative.rpartition("/")[0], aside)
        with self._log_errors(), self._snapshots.store.transaction():
            states = self._keep_tree(now, entries)
            self._record(PathChange(_path(self._relative, one), state, ABSENT) for one, state in states)

    def keep_moved(self, source: ResolvedPath, entries: Sequence[str]) -> None:
        """Keep a tree that is about to be moved, and record the move.

        A tree that comes from outside the workspace is not removed by an undo, since it would have no other place.

        :param entries: its paths in the tree; empty for the top
        """
        with self._log_errors(), self._snapshots.store.transaction():
            if source.root != self._snapshots.root:
                if self._is_inside:
                    self._record([], "It moved files from outside the workspace, which stay.")
                return
            changes: list[PathChange] = []
            for one, state in self._keep_tree(source.relative_path, entries):
                changes.append(PathChange(_path(source.relative_path, one), state, ABSENT))
                if self._is_inside:  # the move changes the times in an identity
                    changes.append(PathChange(_path(self._relative, one), ABSENT, state._replace(identity=None)))
            self._record(changes)

    def _keep_tree(self, top: str, entries: Sequence[str]) -> list[tuple[str, PathState]]:
        """Keep the entries of a tree, as far as the time suffices."""
        deadline = time.monotonic() + self._snapshots.limits.keep_ms / 1000
        with WorkspaceFolderHandle(self._snapshots) as workspace:
            return [
                (one, workspace.store_path_state(_path(top, one), content=time.monotonic() < deadline))
                for one in entries
            ]

    def _record(self, changes: Iterable[PathChange], problem: str = "") -> None:
        now, session, name = time.time_ns(), parse_session_id(self._callers), self._callers[0]
        operation = UndoableOperation(0, "tool", name, session, self._tool, now, now, self._callers, problem=problem)
        made = [PathChange(os.fsencode(one), ABSENT, self._read_folder(one)) for one in self._missing]
        self._operation = self._snapshots.store.add_operation(operation, [*changes, *made])

    @contextlib.contextmanager
    def _log_errors(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            logger.warning("the content of %s could not be kept for undo: %s", self._relative, error)

    def _read_folder(self, folder: str) -> PathState:
        try:
            found = os.lstat(f"{self._snapshots.root.rstrip('/')}/{folder}")
        except OSError:
            return ABSENT
        return get_folder_state(stat.S_IMODE(found.st_mode))

    def discard(self) -> None:
        """Forget the change, since it failed."""
        if self._operation is not None:
            with contextlib.suppress(OSError):
                self._snapshots.store.remove_operation(self._operation)


def _join(folder: str, name: str) -> str:
    return "/".join(one for one in (folder, name) if one)


def _path(top: str, relative: str) -> bytes:
    return os.fsencode(_join(top, relative))
