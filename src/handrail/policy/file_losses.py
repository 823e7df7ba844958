"""The files that a shell text or a tool removes or replaces for good, as the file system and git's index say.

Nothing is lost if git has the content of a removed file, or if git ignores a folder of build outputs. The index is read as a
file, so no program of the workspace runs.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

from handrail.contract.errors import ToolError
from handrail.contract.services.file_services import PathResolver, ResolvedPath
from handrail.contract.text.glob_patterns import matches_path_glob
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.policy.shell import command_wrappers, destroying_forms
from handrail.policy.shell.nested_commands import program_name
from handrail.policy.shell.parser import ShellScript, parse_script
from handrail.policy.shell.risky_options import SHELLS
from handrail.policy.shell.simple_commands import ShellCommand, is_marked
from handrail.policy.stored_paths import read_regular_file

_MOST_LOSSES = 8
_MAX_DEPTH = 3
_MOST_PATHS = 200
_MAX_INDEX_BYTES = 16 * 1024 * 1024
_MAX_LOOKS = 10_000
"""The most places of the index to look at in one call, which takes about 40 ms."""
_BYTES_OF_A_LOOK = 2 * 1024
"""The bytes that are searched in the time of one look."""
_MAX_IGNORE_BYTES = 64 * 1024
_ENTRY_BYTES = 62
"""The bytes of an index entry before its name (gitformat-index(5), versions 2 and 3)."""
_PLAIN_IGNORE = compile_regex_lazily(r"/?(?:\*\*/)?[\w.*-]+/?(?:\*{1,2})?")


_MAY_LOSE = (
    destroying_forms.PROGRAM_NAMES
    | destroying_forms.WRITING_PROGRAMS
    | frozenset(command_wrappers.WRAPPER_NAMES)
    | SHELLS
)


def find_irrecoverable_file_losses(script: ShellScript, roots: PathResolver) -> tuple[str, ...]:
    """Return the files and folders that a text removes or replaces for good, as a message names them."""
    found: dict[str, None] = {}
    if script.unclear is None:
        _collect_losses(script, _RepositoryFiles(roots), found, (".",), _MAX_DEPTH)
    return tuple(found)


def _collect_losses(
    script: ShellScript, repository: _RepositoryFiles, found: dict[str, None], folders: Sequence[str], depth: int
) -> None:
    """Add the losses of a text to ``found``.

    :param folders: the folders that its shell may run in
    :param depth: how many texts of shells in shells are followed
    """
    for redirection in script.files:
        if redirection.operator.lstrip("0123456789") not in (">", ">|", "&>", ">&"):
            continue
        for place in _join_folders(folders, redirection.target):
            if _is_lost(place, "", repository, removed=False):
                found[place] = None
    for command in script.commands:
        if command.argv[0] not in _MAY_LOSE and "/" not in command.argv[0]:
            continue
        *_, argv = command_wrappers.split_wrapper_layers(command.argv)
        inner_script = _parse_shell_argument(argv) if depth else None
        if inner_script is not None and inner_script.unclear is None:
            within = [place for folder in command.folders for place in _join_folders(folders, folder)]
            _collect_losses(inner_script, repository, found, within, depth - 1)
        removed = [(path, "", True) for path in destroying_forms.find_removed_paths(argv)]
        made = _find_rewritten_file(argv, script) if argv[0] in ("mv", "cp") else None
        replaced = [(path, inner, False) for path, inner in destroying_forms.find_replaced_paths(argv) if path != made]
        for path, inner, is_removed in (*removed, *replaced)[:_MOST_PATHS]:
            for place in (joined for one in _places(command, path) for joined in _join_folders(folders, one)):
                if len(found) < _MOST_LOSSES and _is_lost(place, inner, repository, removed=is_removed):
                    found[place] = None


def _join_folders(folders: Sequence[str], path: str) -> list[str]:
    if path[:1] == "/":
        return [path]
    return [path if folder == "." else f"{folder}/{path}" for folder in folders]


def _parse_shell_argument(argv: Sequence[str]) -> ShellScript | None:
    """Return the text that a shell runs by its option ``-c``; None for any other command."""
    if program_name(argv) not in SHELLS:
        return None
    words = iter(argv)
    if not any(map(_RUNS_ARGUMENT.fullmatch, words)):
        return None
    text = ""
    for text in words:  # the first word after all options, which may follow the option too
        if text in ("-o", "+o", "-O", "+O"):
            next(words, "")
        elif text[:1] not in ("-", "+"):
            break
    return None if is_marked(text) else parse_script(text)


_RUNS_ARGUMENT = compile_regex_lazily(r"-[a-zA-Z]*c[a-zA-Z]*")


_FILTERS = frozenset(
    {"jq", "yq", "xq", "sed", "gsed", "awk", "gawk", "mawk", "sort", "uniq", "grep", "egrep", "rg", "tr", "cut", "fmt", "fold"}
    | {"column", "expand", "unexpand", "iconv", "nl", "xmllint"}
)  # fmt: skip
"""Programs that print a file in another form."""


def _find_rewritten_file(argv: Sequence[str], script: ShellScript) -> str | None:
    """Return the file that ``mv NEW OLD`` replaces by its own changed content, as in ``jq … OLD > NEW && mv NEW OLD``; else None."""
    operands = destroying_forms.split_words(argv)[1]
    if len(operands) != 2 or any(map(is_marked, operands)):
        return None
    new, old = operands
    for command in script.commands:
        writes = any(one.capability == "fs.write" and one.target == new for one in command.redirections)
        reads = old in command.argv[1:] or any(
            one.capability == "fs.read" and one.target == old for one in command.redirections
        )
        if writes:
            return old if reads and command.argv[0] in _FILTERS and command.folders == (".",) else None
    return None


def is_lost_by_deletion(where: ResolvedPath, roots: PathResolver) -> bool:
    """Return whether something is lost for good if a tool deletes this path."""
    try:
        found = os.lstat(where.absolute)
        if stat.S_ISDIR(found.st_mode):
            with os.scandir(where.absolute) as entries:
                if next(entries, None) is None:
                    return False
    except FileNotFoundError:
        return False
    except OSError:
        return True
    if where.root != roots.workspace:
        return stat.S_ISDIR(found.st_mode) or found.st_size > 0
    return _is_lost(where.absolute, "", _RepositoryFiles(roots), removed=True)


def _places(command: ShellCommand, path: str) -> Iterator[str]:
    """Yield where a path may lead from the folders of a command."""
    if is_marked(path):
        return
    if path[:1] == "/":
        yield path
    else:
        yield from (path if folder == "." else f"{folder}/{path}" for folder in command.folders)


def _is_lost(path: str, inner: str, repository: _RepositoryFiles, *, removed: bool) -> bool:
    """Return whether something is lost for good if this path is removed, or replaced.

    :param inner: the name of the replaced file if the path is a folder
    """
    roots = repository.roots
    try:
        where = roots.resolve_exact_path(path)
        if inner and is_marked(inner):
            is_rebuilt = where.root == roots.workspace and _is_ignored_output(where.relative_path, repository)
            return where.is_writable and not is_rebuilt and _is_full_folder(where.absolute)
        if inner and Path(where.absolute).is_dir():
            where = roots.resolve_exact_path(f"{path}/{inner}")
    except ToolError:
        return False
    if not where.is_writable:
        return False
    try:
        found = os.lstat(where.absolute)
    except OSError:
        return False
    if not stat.S_ISDIR(found.st_mode) and not (stat.S_ISREG(found.st_mode) and found.st_size):
        return False
    if where.root != roots.workspace:  # neither git nor undo has its files
        return removed or not stat.S_ISDIR(found.st_mode) or _is_full_folder(where.absolute)
    relative = where.relative_path
    if destroying_forms.is_cache(relative):
        return False
    if _is_ignored_output(relative, repository):
        return False
    if stat.S_ISDIR(found.st_mode):
        return removed or _is_full_folder(where.absolute)
    return not (removed and repository.has_content(relative, found))


def _is_ignored_output(relative: str, repository: _RepositoryFiles) -> bool:
    return destroying_forms.is_build_output(relative) and repository.ignores(relative)


def _is_full_folder(path: str) -> bool:
    """Return whether this is a folder with at least one entry, of which some may be replaced."""
    try:
        with os.scandir(path) as entries:
            return next(entries, None) is not None
    except OSError:
        return False


class _RepositoryFiles:
    """The entries of a git repository for paths of the workspace, read from its files once for each call."""

    def __init__(self, roots: PathResolver) -> None:
        self.roots = roots
        self._workspace = Path(roots.workspace)
        self._looks = 0

    def ignores(self, relative: str) -> bool:
        """Return whether git certainly ignores a path, and tracks nothing in it."""
        index = self._index
        if index is None or self._tracks(index, relative):
            return False
        text = self._read(".gitignore", _MAX_IGNORE_BYTES)
        lines = [] if text is None else text.decode("utf-8", "replace").splitlines()
        if any(line.startswith("!") for line in lines):
            return False
        names = relative.split("/")
        parents = ["/".join(names[:count]) for count in range(1, len(names) + 1)]
        return any(_PLAIN_IGNORE.fullmatch(line.strip()) and _ignores(line.strip(), parents) for line in lines)

    def has_content(self, relative: str, found: os.stat_result) -> bool:
        """Return whether the index has a file exactly as it is now."""
        index = self._index
        start = None if index is None else self._find_entry(index, relative)
        if index is None or start is None or start < 0:
            return False
        seconds, nanoseconds, size = (int.from_bytes(index[start + at : start + at + 4]) for at in (8, 12, 36))
        return size == found.st_size & 0xFFFFFFFF and (seconds, nanoseconds) == divmod(found.st_mtime_ns, 1_000_000_000)

    def _tracks(self, index: bytes, relative: str) -> bool:
        """Return whether the index has this path, or a path in it. If it cannot be read, the answer is yes."""
        if index[:4] != b"DIRC" or index[4:8] not in (b"\0\0\0\2", b"\0\0\0\3"):
            return True
        starts = (self._find_entry(index, relative), self._find_entry(index, f"{relative}/", whole=False))
        return any(start is None or start >= 0 for start in starts)

    @cached_property
    def _index(self) -> bytes | None:
        """Return the index of the repository, also if a ``.git`` file leads to another root of the session."""
        link = self._read(".git", _MAX_IGNORE_BYTES)
        if link is None:
            return self._read(".git/index", _MAX_INDEX_BYTES)
        marker, _, place = link.decode("utf-8", "surrogateescape").strip().partition(":")
        try:
            index = self.roots.resolve_path(f"{place.strip()}/index")
        except ToolError:
            return None
        return self._read(index.absolute, _MAX_INDEX_BYTES) if marker == "gitdir" and index.is_inside else None

    def _read(self, name: str, most: int) -> bytes | None:
        try:
            return read_regular_file(self._workspace / name, most, follow=False)
        except OSError:
            return None

    def _find_entry(self, index: bytes, name: str, *, whole: bool = True) -> int | None:
        """Return where the entry of a name begins, or that of a path which begins with it; -1 if there is none.

        None if the answer would take too long.
        """
        if index[:4] != b"DIRC" or index[4:8] not in (b"\0\0\0\2", b"\0\0\0\3"):
            return -1
        name_bytes = name.encode("utf-8", "surrogateescape")
        wanted = name_bytes + b"\0" * whole
        at = -1
        while self._looks < _MAX_LOOKS:
            begin, at = at + 1, index.find(wanted, at + 1)
            self._looks += 1 + ((len(index) if at < 0 else at) - begin) // _BYTES_OF_A_LOOK
            if at < 0:
                return -1
            end = index.find(b"\0", at, at + 0x1000)
            length = 0xFFF if end < 0 else end - at
            for extended in (0, 2):
                start = at - _ENTRY_BYTES - extended
                flags = int.from_bytes(index[start + 60 : start + 62]) if start >= 0 else 0
                is_entry = (
                    start >= 12 and flags & 0xFFF == min(length, 0xFFF) and bool(flags & 0x4000) == bool(extended)
                )
                if is_entry and (not whole or length == len(name_bytes)):
                    return start
        return None


def _ignores(line: str, paths: list[str]) -> bool:
    """Return whether a plain line of ``.gitignore`` matches one of these paths."""
    pattern = line.rstrip("/")
    anchored = "/" in pattern.removeprefix("**/")
    pattern = pattern.removeprefix("/")
    return any(
        matches_path_glob(pattern if anchored or pattern.startswith("**/") else f"**/{pattern}", path) for path in paths
    )
