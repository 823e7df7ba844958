"""The workspace files that an approved call runs, bound to the approval by their content.

The request holds the state of each file when the person is asked. The same check runs again when the call is about to run,
with its locks held, even days later and in another process. If anything differs, the call does not run. Other calls cannot
change a file in between, since they wait for the lock; a background program can.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from glob import has_magic
from pathlib import Path
from typing import Any

from handrail.contract.doors.files import Located
from handrail.contract.errors import ToolError
from handrail.contract.text.neutral import visible
from handrail.policy.shell.executed import FOLDERS_OF_PROGRAMS, HOME, LONGEST, RunStep, run_steps
from handrail.policy.shell.parse import Script
from handrail.policy.targets import Target
from handrail.runtime.files import beneath
from handrail.runtime.files.roots import Roots, is_beneath
from handrail.runtime.ripgrep import alternatives

MOST_HASHED_BYTES = 16 * 1024 * 1024
"""Of one file. A larger one is bound by what it is: device, inode, size and times of change."""
MOST_HASHED_IN_ALL = 64 * 1024 * 1024
MOST_FILES = 2_000
_MOST_LOOKUPS = 200_000
_MOST_NAMED = 5


class RunFiles:
    """Finds the files of the workspace that calls of one session run.

    :param home: the home folder of its programs; None where that is not known
    """

    def __init__(self, roots: Roots, home: str | None) -> None:
        self._roots = roots
        self._home = None if home is None else os.path.realpath(home)

    def of(
        self, targets: Sequence[Target], arguments: Mapping[str, Any], folders: Iterable[str | None] = ()
    ) -> dict[str, str]:
        """Return each file that a call may run, with what it is now; nothing for a call that runs no file there.

        :param arguments: a text among them that names a folder may be where the command starts
        :param folders: others where it may start
        :raises ToolError: ``limit`` for a command that names more than can be looked for
        """
        texts = [(target.subject, target.value) for target in targets if target.capability == "shell.run"]
        steps = [step for script, text in texts if isinstance(script, Script) for step in run_steps(script, text)]
        if not steps:
            return {}
        named = [value for value in arguments.values() if isinstance(value, str) and 0 < len(value) < 1_024]
        starts = [self._roots.workspace]
        for folder in (*folders, *named):
            if folder and "\0" not in folder and (there := self._folder(self._roots.workspace, folder)) is not None:
                starts.append(there)
        return _Search(self, starts).marks(steps)

    def located(self, folder: str, word: str) -> Located | None:
        """Where a word leads from a folder, if that is in the workspace, another root or the programs' home."""
        if word.startswith(HOME) and self._home is not None:
            word = self._home + word[len(HOME) :]
        path = os.path.join(folder, word)  # noqa: PTH118
        if "\0" in path or not os.path.lexists(path):
            return None
        try:
            located = self._roots.locate(path)
        except ToolError:
            return None
        if located.inside:
            return located
        if self._home is not None and is_beneath(located.absolute, self._home):
            inner = located.absolute[len(self._home) :].strip("/") or "."
            return located._replace(inside=True, root=self._home, writable=True, inner=inner)
        return None

    def _folder(self, folder: str, word: str) -> str | None:
        located = self.located(folder, word)
        return located.absolute if located is not None and Path(located.absolute).is_dir() else None

    def with_those_above(self, folders: Iterable[str]) -> Iterable[str]:
        """The folders, and those above them within the workspace, each once."""
        top = self._roots.workspace
        found: dict[str, None] = {}
        for folder in folders:
            while folder not in found:
                found[folder] = None
                if folder != top and is_beneath(folder, top):
                    folder = folder.rpartition("/")[0] or "/"  # noqa: PLW2901
        return found


class _Search:
    """One look for files. It fails rather than leave out any: what is beyond its bounds would not be covered."""

    def __init__(self, files: RunFiles, starts: Sequence[str]) -> None:
        self._files = files
        self._folders = list(dict.fromkeys(starts))
        self._found: dict[str, Located] = {}
        self._looked_up = 0
        self._listed: dict[str, tuple[str, ...]] = {}

    def marks(self, steps: Sequence[RunStep]) -> dict[str, str]:
        for step in steps:
            self._look(step)
        budget = MOST_HASHED_IN_ALL
        marks: dict[str, str] = {}
        for absolute in sorted(self._found):
            located = self._found[absolute]
            mark, read = _mark(located, min(budget, MOST_HASHED_BYTES))
            budget -= read
            marks[located.shown] = mark
        return marks

    def _look(self, step: RunStep) -> None:
        words = [one for word in step.words for one in self._expanded(word)]
        inner: dict[str, int] = {}
        waiting = list(self._folders)
        for folder in waiting:  # which grows meanwhile
            for word in words:
                there = self._take(folder, word)
                if there is not None and there not in inner and there not in self._folders:
                    inner[there] = level = inner.get(folder, 0) + 1
                    if level < step.levels + 1:
                        waiting.append(there)  # a folder in a folder, as after `cd a && cd b`
        for name in step.programs:
            for place in FOLDERS_OF_PROGRAMS:
                self._take(self._folders[0], f"{place}/{name}")
        for place in self._files.with_those_above((*self._folders, *inner)) if step.implied else ():
            for name in step.implied:
                self._take(place, name)
        if step.enters:
            self._folders = list(dict.fromkeys((*self._folders, *inner)))

    def _take(self, folder: str, word: str) -> str | None:
        """Keep the file that a word names; give the folder that it names."""
        if len(word) > LONGEST:
            return None
        self._count(1 + len(folder) // 32)  # the system takes longer for a path of many names
        located = self._files.located(folder, word)
        if located is None:
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

    def _count(self, lookups: int) -> None:
        """:raises ToolError: ``limit`` where that is too much"""
        self._looked_up += lookups
        if self._looked_up > _MOST_LOOKUPS or len(self._found) > MOST_FILES:
            raise ToolError(
                f"the command names too much for an approval to cover the files that it runs: more than {MOST_FILES} files, or "
                f"{_MOST_LOOKUPS} words and folders together. Run it in parts, or from a script",
                kind="limit",
            )

    def _expanded(self, word: str) -> Iterator[str]:
        """The word itself, and what a shell makes of its braces and wildcards."""
        yield word
        if len(word) > LONGEST:
            return
        read = [word]
        if "{" in word:
            try:
                read += alternatives(word)
            except ToolError:
                self._count(_MOST_LOOKUPS)  # they stand for too many
            yield from read[1:]
        for pattern in read:
            if has_magic(pattern):
                for folder in self._folders:
                    yield from self._matches(folder, "", pattern.split("/"))

    def _matches(self, folder: str, before: str, parts: Sequence[str]) -> Iterator[str]:
        """What the parts of a pattern stand for in a folder, each found name counted."""
        if not parts:
            yield before.removesuffix("/")
            return
        part, *rest = parts
        if not has_magic(part):
            yield from self._matches(folder, f"{before}{part}/", rest)
            return
        for name in self._names(f"{folder}/{before}" if before[:1] != "/" else before):
            if fnmatchcase(name, part) and (name[0] != "." or part[0] == "."):
                yield from self._matches(folder, f"{before}{name}/", rest)

    def _names(self, folder: str) -> tuple[str, ...]:
        """The names in a folder of the workspace; none in what is no folder, or lies elsewhere."""
        names = self._listed.get(folder)
        if names is None:
            located = self._files.located(folder, ".")
            try:
                names = () if located is None else tuple(sorted(os.listdir(located.absolute)))  # noqa: PTH208 - names
            except OSError:
                names = ()
            self._listed[folder] = names
        self._count(1 + len(names))
        return names


def _mark(located: Located, most: int) -> tuple[str, int]:
    """What a file is: its content's hash, or where it is too large what the system says of it; and how much was read."""
    try:
        descriptor = beneath.open_beneath(located, beneath.READ)
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


def changes(approved: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """Return what a call is refused with whose files are others than those that were approved; None where they are the same."""
    if approved == now:
        return None
    faults: list[str] = []
    for path in sorted({*approved, *now}):
        if path not in now:
            faults.append(f"{visible(path)} is gone")
        elif path not in approved:
            faults.append(f"{visible(path)} is new")
        elif approved[path] != now[path]:
            faults.append(f"{visible(path)} has changed")
    if not faults:
        return None
    more = len(faults) - _MOST_NAMED
    named = ", ".join(faults[:_MOST_NAMED]) + (f", and {more} more" if more > 0 else "")
    return (
        f"nothing was run: {named} since this call was approved, and it may run that. Ask again: propose the call once "
        "more, so that a person is asked about the files as they are now"
    )
