"""Atomic changes of several files: all happen or none, even if the process is killed meanwhile.

Each new content is first written durably to a temporary file next to its target. Then a journal records the decision, and each
temporary file is exchanged with its target. The old contents keep the temporary names until the end, so each step can be
reverted. If a process was killed, the next one reads its journal. Before the decision, it removes the temporary files. After the
decision, it makes the remaining exchanges. If a file was changed in between, it reverts the others.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import secrets
import stat
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NamedTuple

from handrail.contract.errors import ToolError
from handrail.contract.services.file_services import ResolvedPath
from handrail.contract.struct import Struct
from handrail.runtime.files import atomic_write, secure_open
from handrail.runtime.files.session_roots import openat2
from handrail.store.unsupported_operations import (
    make_temporary_name,
    replace_name,
    sync_descriptor,
    sync_folder,
    sync_folder_descriptor,
)

logger = logging.getLogger("handrail.runtime")

_VERSION = 1
_Stage = Literal["prepared", "decided", "reverting"]


class MultiFileChange(NamedTuple):
    """The change of one file that happens together with others.

    :param before: what must be there now; None if nothing
    :param after: the new content; None deletes the file
    :param like: the file whose permissions a new file gets
    :param keep: keeps the file for undo; called with the permissions before and after, before any file changes
    """

    located: ResolvedPath
    before: bytes | None
    after: bytes | None
    like: ResolvedPath | None
    is_executable: bool | None
    keep: Callable[[int | None, int | None], None]


class _ContentState(NamedTuple):
    """The hash of a file's content, and its permissions."""

    sha256: str
    mode: int


class _FileStep(Struct):
    """The change of one file in a journal.

    :param temporary: the name of the new content before the change, and of the old content after it
    :param aside: the name of the old content on a file system that cannot exchange names
    """

    root: str
    path: str
    temporary: str
    aside: str
    before: _ContentState | None
    after: _ContentState | None

    @property
    def name(self) -> str:
        """The name of the file in its folder."""
        return self.path.rpartition("/")[2]

    @contextmanager
    def open_parent(self) -> Generator[int]:
        """Open the folder of the file, without following links.

        :raises OSError: if that fails
        """
        root = secure_open.open_root(self.root)
        try:
            folder = self.path.rpartition("/")[0]
            parent = openat2(root, folder or ".", secure_open.FOLDER_FLAGS, atomic_write.STRICT)
        finally:
            os.close(root)
        try:
            yield parent
        finally:
            os.close(parent)


class MultiFileChangeJournal:
    """The journal of the joint changes in one workspace. Thread-safe.

    :param folder: a folder that only the kernel uses, created when it is first needed
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.RLock()
        self._own: set[str] = set()
        """The journals of changes that this process makes now."""

    def change_atomically(self, changes: Sequence[MultiFileChange]) -> None:
        """Make all changes or none.

        :raises ToolError: ``conflict`` if a file is not as expected; ``unavailable`` if the journal cannot be written;
            ``backend`` if the changes are made but not durable
        """
        with self._lock:
            # A former process may have left files half changed. They are settled before new ones change.
            self.recover()
            journal = _JournalFile(self._folder, secrets.token_hex(8))
            self._own.add(journal.name)
            try:
                _carry_out(journal, changes)
            finally:
                self._own.discard(journal.name)

    def recover(self) -> int:
        """Finish or revert the changes that a killed process left, and return their number."""
        count = 0
        with self._lock:
            try:
                names = sorted(entry.stem for entry in self._folder.iterdir() if entry.suffix == ".json")
            except OSError:
                return 0
            for name in names:
                if name not in self._own:
                    count += _recover(_JournalFile(self._folder, name))
        return count


class _JournalFile(Struct):
    """One file of the journal: the steps of one joint change, and how far it has come."""

    folder: Path
    name: str

    @property
    def file(self) -> Path:
        return self.folder / f"{self.name}.json"

    def write(self, stage: _Stage, steps: Sequence[_FileStep], folders: Sequence[tuple[str, str]]) -> None:
        """Make the present stage durable.

        :raises ToolError: ``unavailable`` if that fails
        """
        data = {"version": _VERSION, "stage": stage, "steps": [asdict(one) for one in steps], "folders": folders}
        temporary = self.folder / f"{self.name}.new"
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with temporary.open("w", encoding="ascii") as file:
                json.dump(data, file)
                file.flush()
                sync_descriptor(file.fileno())
            # A reader sees the old stage or the new one, never a part.
            temporary.rename(self.file)
            sync_folder(self.folder)
        except OSError as error:
            raise ToolError(
                f"Nothing was changed: the journal of the change could not be written: {error.strerror or error}. Ask the user "
                "to check the disk of Handrail's state.",
                kind="unavailable",
            ) from error

    def read(self) -> tuple[_Stage, list[_FileStep], list[tuple[str, str]]]:
        """Return the stage, the steps and the folders that are made.

        :raises ValueError: if the file is damaged
        :raises OSError: if it cannot be read
        """
        data: Any = json.loads(self.file.read_bytes())
        if data["version"] != _VERSION or data["stage"] not in ("prepared", "decided", "reverting"):
            raise ValueError(data["version"])
        steps = [
            _FileStep(
                **{key: one[key] for key in ("root", "path", "temporary", "aside")},
                before=None if one["before"] is None else _ContentState(*one["before"]),
                after=None if one["after"] is None else _ContentState(*one["after"]),
            )
            for one in data["steps"]
        ]
        return data["stage"], steps, [(root, path) for root, path in data["folders"]]

    def remove(self) -> None:
        """Remove the file, after everything is done."""
        with contextlib.suppress(FileNotFoundError):
            self.file.unlink()
        with contextlib.suppress(OSError):
            sync_folder(self.folder)


def _carry_out(journal: _JournalFile, changes: Sequence[MultiFileChange]) -> None:
    """Make all changes or none.

    :raises ToolError: if one of them is not possible; the others are reverted
    """
    steps: list[_FileStep] = []
    for change in changes:
        assert change.located.root is not None
        # All files are compared before the first one is prepared, so most conflicts change nothing.
        before = _read_expected(change)
        temporary, aside = make_temporary_name(), make_temporary_name()
        steps.append(_FileStep(change.located.root, change.located.relative_path, temporary, aside, before, None))
    folders = list(dict.fromkeys(one for change in changes for one in _find_missing_folders(change)))
    journal.write("prepared", steps, folders)
    is_decided = False
    try:
        for change, step in zip(changes, steps, strict=True):
            with _map_errors(change.located):
                _prepare(change, step)
        for change, step in zip(changes, steps, strict=True):
            change.keep(step.before and step.before.mode, step.after and step.after.mode)
        # This is set before the write: if the write fails halfway, the journal may say decided already.
        is_decided = True
        journal.write("decided", steps, folders)
        for change, step in zip(changes, steps, strict=True):
            with _map_errors(change.located):
                _take(step, change.located)
    except BaseException:
        _restore_old_states(journal, steps, folders, is_decided=is_decided)
        raise
    _finish(journal, steps)


def _read_expected(change: MultiFileChange) -> _ContentState | None:
    """Return the state of a file that is as expected.

    :raises ToolError: ``conflict`` if it is not
    """
    located, found = change.located, None
    name, step = _name_of(located), _FileStep(located.root or "", located.relative_path, "", "", None, None)
    # A folder of a new file may be missing.
    with _map_errors(located), contextlib.suppress(FileNotFoundError), step.open_parent() as parent:
        found = atomic_write.read_current_file(parent, name, located)
    if found is None and change.before is None:
        return None
    if change.before is None:
        raise _existing_error(located)
    if found is None or found.data != change.before:
        raise atomic_write.build_changed_file_error(located)
    return _ContentState(hashlib.sha256(found.data).hexdigest(), stat.S_IMODE(found.stat.st_mode))


def _existing_error(located: ResolvedPath) -> ToolError:
    return ToolError(
        f"`{located.display_path}` already exists, but a new file was expected. Nothing was changed. Use another path.",
        kind="conflict",
    )


def _name_of(located: ResolvedPath) -> str:
    if located.relative_path == ".":
        raise ToolError(f"`{located.display_path}` is a folder. Name a file in it.", kind="invalid_input")
    return located.relative_path.rpartition("/")[2]


def _find_missing_folders(change: MultiFileChange) -> Iterable[tuple[str, str]]:
    """Yield the folders that are made for a new file, the outermost first."""
    root, parts = change.located.root or "", change.located.relative_path.split("/")[:-1]
    if change.after is None:
        return
    for count in range(1, len(parts) + 1):
        folder = "/".join(parts[:count])
        if not os.path.lexists(f"{root.rstrip('/')}/{folder}"):
            yield root, folder


def _prepare(change: MultiFileChange, step: _FileStep) -> None:
    """Write the new content next to its target.

    :raises OSError: if that fails
    """
    if change.after is None:
        return
    located, like = change.located, None
    with atomic_write.open_or_create_parent(located, step.path.rpartition("/")[0]) as parent:
        source = change.located if change.before is not None else change.like
        if source is not None:
            descriptor = secure_open.open_beneath(source, secure_open.READ_FLAGS)
            try:
                like = atomic_write.OwnerAndPermissions.read(descriptor)
            finally:
                os.close(descriptor)
        mode = atomic_write.write_temporary_file(
            parent, step.temporary, change.after, like, is_executable=change.is_executable
        )
    step.after = _ContentState(hashlib.sha256(change.after).hexdigest(), mode)


def _take(step: _FileStep, located: ResolvedPath) -> None:
    """Give a file its new state.

    :raises ToolError: ``conflict`` if it is not as expected
    """
    with step.open_parent() as parent:
        # The file may have changed while the others were prepared.
        if _read_state(parent, step.name) != step.before:
            raise _existing_error(located) if step.before is None else atomic_write.build_changed_file_error(located)
        _exchange(step, parent)
        old = step.temporary if _read_state(parent, step.temporary) is not None else step.aside
        if step.before is not None and _read_state(parent, old) != step.before:
            raise atomic_write.build_changed_file_error(located)  # another process has just changed it


def _exchange(step: _FileStep, parent: int) -> None:
    """Exchange the old and the new state of a file.

    :raises OSError: if that fails
    """
    if step.after is None:
        atomic_write.rename_without_overwriting(parent, step.name, step.temporary)
    elif step.before is None:
        atomic_write.rename_without_overwriting(parent, step.temporary, step.name)
    # Without an exchange there is a moment without the file. The old one is kept aside, so that recovery finds it.
    elif not atomic_write.exchange_names(parent, step.temporary, step.name):
        os.rename(step.name, step.aside, src_dir_fd=parent, dst_dir_fd=parent)
        os.rename(step.temporary, step.name, src_dir_fd=parent, dst_dir_fd=parent)


def _read_state(parent: int, name: str) -> _ContentState | None:
    """Return the state of a file by its name; None if there is none.

    :raises OSError: if it cannot be read
    """
    try:
        descriptor = openat2(parent, name, secure_open.READ_FLAGS, atomic_write.STRICT)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            return _ContentState("", 0)  # a link or a socket, which is no state of this change
        raise
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            return _ContentState("", 0)
        digest = hashlib.sha256(atomic_write.read_open_file_within_limit(descriptor, found.st_size))
        return _ContentState(digest.hexdigest(), stat.S_IMODE(found.st_mode))
    finally:
        os.close(descriptor)


def _restore_old_states(
    journal: _JournalFile, steps: Sequence[_FileStep], folders: Sequence[tuple[str, str]], *, is_decided: bool
) -> None:
    """Give each file its old state, unless another process has changed it.

    :param is_decided: whether a file may have its new state; else only the temporary files are removed
    """
    if is_decided:
        with contextlib.suppress(ToolError):
            journal.write("reverting", steps, folders)
    if _revert(steps, folders, is_decided=is_decided):
        journal.remove()


def _revert(steps: Sequence[_FileStep], folders: Sequence[tuple[str, str]], *, is_decided: bool) -> bool:
    """Revert the steps, the last first, and return whether nothing is left to do."""
    is_whole = True
    for step in reversed(steps):
        try:
            with step.open_parent() as parent:
                if is_decided:
                    _revert_step(step, parent)
                _remove_temporary(step, parent)
        except FileNotFoundError:
            continue  # its folder was not made
        except OSError as error:
            logger.warning("%s/%s could not be restored: %s", step.root, step.path, error)
            is_whole = False
    # The inner folder comes first, and one that has other files by now stays.
    for root, folder in reversed(folders):
        with contextlib.suppress(OSError):
            inner = _FileStep(root, folder, "", "", None, None)
            with inner.open_parent() as parent:
                os.rmdir(inner.name, dir_fd=parent)
    return is_whole


def _revert_step(step: _FileStep, parent: int) -> None:
    now, kept = _read_state(parent, step.name), _read_state(parent, step.temporary)
    if step.before is None:
        if kept is None and step.after is not None and now == step.after:
            atomic_write.rename_without_overwriting(parent, step.name, step.temporary)
    elif now is None:
        old = step.temporary if step.after is None or kept == step.before else step.aside
        if _read_state(parent, old) is not None:
            with contextlib.suppress(FileExistsError):
                atomic_write.rename_without_overwriting(parent, old, step.name)
    elif now == step.after and now != step.before:
        if kept == step.before:
            atomic_write.exchange_names(parent, step.temporary, step.name)
        elif kept is None and _read_state(parent, step.aside) is not None:
            replace_name(parent, step.aside, step.name)
        elif kept is not None:  # it was changed just before the exchange: that version comes back
            atomic_write.exchange_names(parent, step.temporary, step.name)


def _remove_temporary(step: _FileStep, parent: int) -> None:
    for name in (step.temporary, step.aside):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=parent)


def _finish(journal: _JournalFile, steps: Sequence[_FileStep]) -> None:
    """Make the new names durable, and remove the old contents.

    :raises ToolError: ``backend`` if a folder cannot be made durable
    """
    try:
        for step in steps:
            with contextlib.suppress(FileNotFoundError), step.open_parent() as parent:
                sync_folder_descriptor(parent)
    except OSError as error:
        raise ToolError(
            f"All files were changed, but a folder could not be made durable: {error.strerror or error}. The changes may be "
            "lost if the machine crashes now. Ask the user to check the disk.",
            kind="backend",
        ) from error
    for step in steps:
        with contextlib.suppress(OSError), step.open_parent() as parent:
            _remove_temporary(step, parent)
    journal.remove()


def _recover(journal: _JournalFile) -> bool:
    """Finish or revert a change that a killed process left, and return whether that was possible."""
    try:
        stage, steps, folders = journal.read()
    except (ValueError, KeyError, TypeError):
        logger.warning("the journal %s is damaged and was removed", journal.file)
        journal.remove()
        return False
    except OSError as error:
        logger.warning("the journal %s could not be read: %s", journal.file, error)
        return False
    # A root on a drive that is missing now must not make the journal look finished.
    if not all(Path(step.root).is_dir() for step in steps):
        return False  # it is not mounted now
    try:
        # Once the old content of one file is removed, reverting is impossible, so the change is finished.
        if stage == "decided" and (all(map(_can_finish, steps)) or any(map(_is_cleaned_up, steps))):
            for step in steps:
                _complete(step)
            _finish(journal, steps)
            return True
    except (ToolError, OSError) as error:
        logger.warning("the changes in the journal %s could not be finished: %s", journal.file, error)
        return False
    _restore_old_states(journal, steps, folders, is_decided=stage != "prepared")
    return True


def _can_finish(step: _FileStep) -> bool:
    """Return whether a step is done, or can still be done.

    :raises OSError: if the file cannot be read
    """
    try:
        with step.open_parent() as parent:
            now, ready = _read_state(parent, step.name), _read_state(parent, step.temporary)
            if now == step.after:
                return True
            if now is None and step.before is not None and _read_state(parent, step.aside) != step.before:
                return False
            return now in (step.before, None) and ready == step.after
    except FileNotFoundError:
        return step.after is None  # the folder has been removed


def _is_cleaned_up(step: _FileStep) -> bool:
    """Return whether the old content of a file is removed already, so that all files have their names."""
    with contextlib.suppress(FileNotFoundError), step.open_parent() as parent:
        has_old = any(_read_state(parent, name) is not None for name in (step.temporary, step.aside))
        return step.before is not None and not has_old and _read_state(parent, step.name) == step.after
    return False


def _complete(step: _FileStep) -> None:
    """Do a step that is not done yet and still can be.

    :raises OSError: if the file cannot be read or renamed
    """
    if not _can_finish(step):
        return
    with contextlib.suppress(FileNotFoundError), step.open_parent() as parent:
        if (now := _read_state(parent, step.name)) == step.after:
            return
        if now is None and step.before is not None:  # the old one is aside already
            os.rename(step.temporary, step.name, src_dir_fd=parent, dst_dir_fd=parent)
        else:
            _exchange(step, parent)


@contextmanager
def _map_errors(located: ResolvedPath) -> Generator[None]:
    try:
        yield
    except FileExistsError:
        raise _existing_error(located) from None
    except OSError as error:
        raise secure_open.translate_os_error_for_model(error, located, "writing") from error
