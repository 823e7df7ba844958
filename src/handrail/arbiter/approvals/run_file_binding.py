"""The workspace files that an approved call runs, bound to the approval by their content.

The request holds the state of each file when the user is asked. The same check runs again when the call is about to run,
with its locks held, even days later and in another process. If anything differs, the call does not run. Other calls cannot
change a file in between, since they wait for the lock; a background program can.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from glob import has_magic
from pathlib import Path
from typing import Any

from handrail.contract.errors import ToolError
from handrail.contract.services.file_services import ResolvedPath
from handrail.contract.text.neutralisation import escape_terminal_controls
from handrail.policy.call_targets import CallTarget
from handrail.policy.shell.executed_files import (
    HOME_MARK,
    MAX_PATH_BYTES,
    PROGRAM_FOLDERS,
    ExecutingCommand,
    find_executing_commands,
)
from handrail.policy.shell.parser import ShellScript
from handrail.runtime.files import secure_open
from handrail.runtime.files.session_roots import SessionRoots, is_beneath
from handrail.runtime.ripgrep import expand_braces

MAX_HASHED_FILE_BYTES = 16 * 1024 * 1024
"""Per file. A larger file is bound by device, inode, size and times instead of its content."""
MAX_HASHED_TOTAL_BYTES = 64 * 1024 * 1024
MAX_RUN_FILES = 2_000
_MOST_LOOKUPS = 200_000
_MOST_NAMED = 5


class ExecutedFileFinder:
    """A finder of the workspace files that calls of one session run.

    :param home: the home folder of its programs; None if unknown
    """

    def __init__(self, roots: SessionRoots, home: str | None) -> None:
        self._roots = roots
        self._home = None if home is None else os.path.realpath(home)

    def fingerprint_executed_files(
        self, targets: Sequence[CallTarget], arguments: Mapping[str, Any], folders: Iterable[str | None] = ()
    ) -> dict[str, str]:
        """Return each file that a call may run, by path, with a mark of its present state.

        :param arguments: a text among them that names a folder may be where the command starts
        :param folders: further folders where the command may start
        :return: empty if the call runs no file of the workspace
        :raises ToolError: ``limit`` if the command names too many files
        """
        texts = [(target.subject, target.value) for target in targets if target.capability == "shell.run"]
        steps = [
            step
            for script, text in texts
            if isinstance(script, ShellScript)
            for step in find_executing_commands(script, text)
        ]
        if not steps:
            return {}
        named = [value for value in arguments.values() if isinstance(value, str) and 0 < len(value) < 1_024]
        starts = [self._roots.workspace]
        for folder in filter(None, folders):
            if "\0" not in folder and (there := self._folder(self._roots.workspace, folder)) is not None:
                starts.append(there)
        for text in named:
            with contextlib.suppress(ToolError):  # most are not a path
                if (there := self._folder(self._roots.workspace, self._roots.resolve_path(text).absolute)) is not None:
                    starts.append(there)
        return _RunFileSearch(self, starts).compute_file_fingerprints(steps)

    def resolve_in_allowed_folders(self, folder: str, word: str) -> ResolvedPath | None:
        """Return where a word leads from a folder; None outside the workspace, the roots and the programs' home."""
        if word.startswith(HOME_MARK) and self._home is not None:
            word = self._home + word[len(HOME_MARK) :]
        path = os.path.join(folder, word)  # noqa: PTH118
        if "\0" in path or not os.path.lexists(path):
            return None
        try:
            located = self._roots.resolve_exact_path(path)
        except ToolError:
            # A spelling with too many names, such as `a/../` a thousand times, still runs the file.
            try:
                located = self._roots.resolve_exact_path(os.path.realpath(path))
            except ToolError:
                return None
        if located.is_inside:
            return located
        if self._home is not None and is_beneath(located.absolute, self._home):
            inner = located.absolute[len(self._home) :].strip("/") or "."
            return located._replace(is_inside=True, root=self._home, is_writable=True, relative_path=inner)
        return None

    def _folder(self, folder: str, word: str) -> str | None:
        located = self.resolve_in_allowed_folders(folder, word)
        return located.absolute if located is not None and Path(located.absolute).is_dir() else None

    def list_folders_with_parents(self, folders: Iterable[str]) -> Iterable[str]:
        """Return the folders and their parents within the workspace, each once."""
        top = self._roots.workspace
        found: dict[str, None] = {}
        for folder in folders:
            while folder not in found:
                found[folder] = None
                if folder != top and is_beneath(folder, top):
                    folder = folder.rpartition("/")[0] or "/"  # noqa: PLW2901
        return found


class _RunFileSearch:
    """A bounded search for files, which fails rather than leave a file out."""

    def __init__(self, files: ExecutedFileFinder, starts: Sequence[str]) -> None:
        self._files = files
        self._folders = list(dict.fromkeys(starts))
        self._found: dict[str, ResolvedPath] = {}
        self._looked_up = 0
        self._listed: dict[str, tuple[str, ...]] = {}

    def compute_file_fingerprints(self, steps: Sequence[ExecutingCommand]) -> dict[str, str]:
        for step in steps:
            self._follow_step(step)
        budget = MAX_HASHED_TOTAL_BYTES
        marks: dict[str, str] = {}
        for absolute in sorted(self._found):
            located = self._found[absolute]
            mark, read = _make_mark(located, min(budget, MAX_HASHED_FILE_BYTES))
            budget -= read
            marks[located.display_path] = mark
        return marks

    def _follow_step(self, step: ExecutingCommand) -> None:
        words = [one for word in step.words for one in self._expand_word(word)]
        inner: dict[str, int] = {}
        waiting = list(self._folders)
        for folder in waiting:  # the loop appends to it
            for word in words:
                there = self._add_file(folder, word)
                if there is not None and there not in inner and there not in self._folders:
                    inner[there] = level = inner.get(folder, 0) + 1
                    if level < step.levels + 1:
                        waiting.append(there)  # a folder in a folder, as after `cd a && cd b`
        for name in step.programs:
            for place in PROGRAM_FOLDERS:
                self._add_file(self._folders[0], f"{place}/{name}")
        for place in self._files.list_folders_with_parents((*self._folders, *inner)) if step.implied else ():
            for name in step.implied:
                for path in self._glob_below(place, "", name.split("/")) if "*" in name else (name,):
                    self._add_file(place, path)
        if step.enters:
            self._folders = list(dict.fromkeys((*self._folders, *inner)))

    def _add_file(self, folder: str, word: str) -> str | None:
        if len(word) > MAX_PATH_BYTES:
            return None
        self._count_lookups(1 + len(folder) // 32)  # the system takes longer for a path of many names
        if (located := self._files.resolve_in_allowed_folders(folder, word)) is None:
            return None
        try:
            mode = os.lstat(located.absolute).st_mode
        except OSError:
            return None
        if stat.S_ISDIR(mode):
            return located.absolute
        if stat.S_ISREG(mode):
            self._found[located.absolute] = located
        return None

    def _count_lookups(self, lookups: int) -> None:
        """Count lookups.

        :raises ToolError: ``limit`` if there are too many
        """
        self._looked_up += lookups
        if self._looked_up > _MOST_LOOKUPS or len(self._found) > MAX_RUN_FILES:
            raise ToolError(
                "The command names too many files for one approval. The limit is "
                f"{MAX_RUN_FILES} files, or {_MOST_LOOKUPS} words and folders together. Split the command, or put it into a script.",
                kind="limit",
            )

    def _expand_word(self, word: str) -> Iterator[str]:
        """Yield the word and what a shell makes of its braces and wildcards."""
        yield word
        if len(word) > MAX_PATH_BYTES:
            return
        read = [word]
        if "{" in word:
            try:
                read += expand_braces(word)
            except ToolError:
                self._count_lookups(_MOST_LOOKUPS)  # they expand to too many
            yield from read[1:]
        for pattern in read:
            if has_magic(pattern):
                for folder in self._folders:
                    yield from self._glob_below(folder, "", pattern.split("/"))

    def _glob_below(self, folder: str, before: str, parts: Sequence[str]) -> Iterator[str]:
        """Yield the paths that match a pattern below a folder. Each listed name counts as a lookup."""
        if not parts:
            yield before.removesuffix("/")
            return
        part, *rest = parts
        if not has_magic(part):
            yield from self._glob_below(folder, f"{before}{part}/", rest)
            return
        for name in self._list_workspace_folder(f"{folder}/{before}" if before[:1] != "/" else before):
            if fnmatchcase(name, part) and (name[0] != "." or part[0] == "."):
                yield from self._glob_below(folder, f"{before}{name}/", rest)

    def _list_workspace_folder(self, folder: str) -> tuple[str, ...]:
        """Return the names in a folder of the workspace; empty for any other path."""
        if (names := self._listed.get(folder)) is None:
            located = self._files.resolve_in_allowed_folders(folder, ".")
            try:
                names = () if located is None else tuple(sorted(os.listdir(located.absolute)))  # noqa: PTH208 - names
            except OSError:
                names = ()
            self._listed[folder] = names
        self._count_lookups(1 + len(names))
        return names


def _make_mark(located: ResolvedPath, most: int) -> tuple[str, int]:
    """Return the mark of a file and how many bytes were read.

    The mark is the hash of the content, or the file's identity if it is too large.
    """
    try:
        descriptor = secure_open.open_beneath(located, secure_open.READ_FLAGS)
    except OSError as error:
        return f"unreadable: {os.strerror(error.errno or 0)}", 0
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            return "no regular file", 0
        if found.st_size <= most:
            digest, read = hashlib.sha256(), 0
            while read <= most and (piece := os.read(descriptor, 1 << 18)):
                digest.update(piece)
                read += len(piece)
            if read <= most:
                return f"sha256:{digest.hexdigest()}", read
        state = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        return "identity:" + ":".join(map(str, state)), 0
    except OSError as error:
        return f"unreadable: {os.strerror(error.errno or 0)}", 0
    finally:
        os.close(descriptor)


def explain_file_changes(approved: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """Return the error text if the files differ from the approved ones; None if they are the same."""
    if approved == now:
        return None
    faults: list[str] = []
    for path in sorted({*approved, *now}):
        if path not in now:
            faults.append(f"`{escape_terminal_controls(path)}` was removed")
        elif path not in approved:
            faults.append(f"`{escape_terminal_controls(path)}` was added")
        elif approved[path] != now[path]:
            faults.append(f"`{escape_terminal_controls(path)}` has changed")
    if not faults:
        return None
    more = len(faults) - _MOST_NAMED
    named = ", ".join(faults[:_MOST_NAMED]) + (f", and {more} more" if more > 0 else "")
    return (
        f"Files that this call may run have changed since its approval: {named}. Nothing was run. Make the call "
        "again, so that the user can approve the current files."
    )
