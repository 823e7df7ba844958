"""Parse patches: the format with ``*** Begin Patch``, and unified diffs as ``git diff`` and ``diff -u`` write them.

A patch names its files itself. So rules and locks read the same text as the tool that applies it, with the functions of
this file. Models often count lines wrongly and leave out the space at the start of an empty line. Both are read as they were
meant. Nothing here reads a file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Literal, NamedTuple

from handrail.contract.errors import ToolError, quote_text_or_length
from handrail.contract.struct import Struct, field
from handrail.contract.text.lazy_patterns import compile_regex_lazily

SectionKind = Literal["add", "update", "delete"]
LineSign = Literal[" ", "-", "+"]

MAX_SECTIONS = 500
"""The most files of one patch."""
MAX_HUNKS = 5_000
"""The most hunks of one patch."""
MAX_LINES = 50_000
"""The most lines of one patch, which is parsed on the event loop."""
_MAX_PATH = 4096
_HUNK_HEAD = compile_regex_lazily(r"@@+ -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@+ ?(.*)")
_LOOSE_HEAD = compile_regex_lazily(r"@@+(?:$|[ \t])")
_MARKER = compile_regex_lazily(r"\*\*\* (Add|Update|Delete) File: *(.*)")
_GIT_HEAD = "diff --git "
_BEGIN, _END, _END_OF_FILE, _MOVE = "*** Begin Patch", "*** End Patch", "*** End of File", "*** Move to:"
_NO_LINE_END = "\\ "
_FENCE = compile_regex_lazily(r"```+[\w-]*\s*")
_HERE_DOCUMENT = compile_regex_lazily(r"(?:apply_patch )?<<-?\s*(['\"]?)(\w+)\1\s*")
_SIGNATURE = compile_regex_lazily(r"--\s*")
_PREFIXES = (("a", "b"), ("b", "a"), ("i", "w"), ("w", "i"), ("c", "i"), ("i", "c"), ("c", "w"), ("w", "c"), ("o", "w"))
"""The prefixes that git writes before the old and the new path (diff.mnemonicPrefix), also reversed."""
_TIME = compile_regex_lazily(r"(?<!\s)\s+\d{4}-\d\d-\d\d \d\d:\d\d.*")  # a run of blanks is read once
_BACKUP = compile_regex_lazily(r"(.+?)(?:\.orig|\.old|\.bak|~)")
_NO_ANCHOR = compile_regex_lazily(r"[-+\d,.…@\s]*")
_MODES = {"100644": False, "100755": True}
_ESCAPES = {"a": 7, "b": 8, "t": 9, "n": 10, "v": 11, "f": 12, "r": 13, '"': 34, "\\": 92}
_QUOTED = compile_regex_lazily(rb"\\([abtnvfr\"\\]|[0-7]{1,3})")


class HunkLine(NamedTuple):
    """One line of a hunk: context, removed or added."""

    sign: LineSign
    text: str


class PatchHunk(Struct, frozen=True):
    """One place that a patch changes.

    :param number: its number in its file, from 1
    :param anchors: lines before it that say where it is, each within the block of the one before
    :param old_line: the number of its first line, as the patch says; None without one
    :param heading: the line that a unified diff shows after the numbers
    :param is_at_end: whether the patch says that it ends with the file
    :param lacks_end: whether the patch says that the last line has no line end, before and after
    :param loose_tail: how many empty lines at the end may only separate it from what follows
    :param has_returns: whether its added lines end with a carriage return, unlike the headers of the patch
    """

    number: int
    lines: tuple[HunkLine, ...]
    anchors: tuple[str, ...] = ()
    old_line: int | None = None
    heading: str = ""
    is_at_end: bool = False
    lacks_end: tuple[bool, bool] = (False, False)
    loose_tail: int = 0
    has_returns: bool = False

    @property
    def old(self) -> tuple[str, ...]:
        """The lines before the change."""
        return tuple(line.text for line in self.lines if line.sign != "+")

    @property
    def new(self) -> tuple[str, ...]:
        """The lines after the change."""
        return tuple(line.text for line in self.lines if line.sign != "-")

    @property
    def has_text_changes(self) -> bool:
        """Whether it changes anything, except line ends within the file."""
        return self.old != self.new or self.lacks_end[0] != self.lacks_end[1]


class PatchSection(Struct, frozen=True):
    """What a patch does with one file.

    :param path: the present path of the file, or that of a new one
    :param to: the path to which it moves; None if it stays
    :param copied_from: the file of which a new one is a copy
    :param is_executable: the permission to execute that it gets; None if that stays
    :param has_content: whether the section of a deletion lists what the file contains
    """

    kind: SectionKind
    path: str
    hunks: tuple[PatchHunk, ...] = ()
    to: str | None = None
    copied_from: str | None = None
    is_executable: bool | None = None
    has_content: bool = False

    @property
    def is_in_place_update(self) -> bool:
        """Whether the file stays where it is, with another content."""
        return self.kind == "update" and self.to is None

    @property
    def paths_to_read(self) -> tuple[str, ...]:
        """The paths whose content decides about the change, or about what the answer says.

        A file that is there already is compared with what would be written.
        """
        return self.paths_to_write if self.copied_from is None else (self.copied_from, *self.paths_to_write)

    @property
    def paths_to_write(self) -> tuple[str, ...]:
        """The paths that are created, changed or removed."""
        return (self.path,) if self.to is None else (self.path, self.to)


class PatchPaths(NamedTuple):
    """The paths that a patch names, as it spells them.

    :param removed: those of the written paths whose files are deleted
    """

    read: tuple[str, ...]
    written: tuple[str, ...]
    removed: frozenset[str]

    @property
    def named(self) -> list[str]:
        return [*dict.fromkeys((*self.written, *self.read))]


def extract_patch_paths(text: str) -> PatchPaths:
    """Return the paths of a patch.

    :raises ToolError: ``invalid_input`` if the text is not a patch
    """
    sections = parse_patch(text)
    read = dict.fromkeys(path for one in sections for path in one.paths_to_read)
    written = dict.fromkeys(path for one in sections for path in one.paths_to_write)
    return PatchPaths(tuple(read), tuple(written), frozenset(one.path for one in sections if one.kind == "delete"))


@lru_cache(maxsize=4)
def parse_patch(text: str) -> tuple[PatchSection, ...]:
    """Return the sections of a patch, one for each file.

    :raises ToolError: ``invalid_input`` if the text is not a patch, or names a path outside its folder
    """
    if (count := text.count("\n")) > MAX_LINES:
        raise ToolError(
            f"The patch has {count:,} lines. The maximum is {MAX_LINES:,}. Split it into several calls, or create "
            "large files with a program.",
            kind="limit",
        )
    raw = _strip_wrapping(text.split("\n"))
    lines = [line.removesuffix("\r") for line in raw]
    returns: frozenset[int] = frozenset()
    if "\r" in text and not raw[0].endswith("\r"):  # the files have them, not the text as a whole
        returns = frozenset(at for at, line in enumerate(raw) if line.endswith("\r"))
    if not any(line.strip() for line in lines):
        raise _invalid("The patch is empty.")
    is_marked = False
    for line in lines:
        if line.startswith(_BEGIN) or _MARKER.match(line):
            is_marked = True
            break
        if line.startswith((_GIT_HEAD, "--- ", "@@ ")):
            break
    reader = _MarkedReader(lines, returns) if is_marked else _UnifiedReader(lines, returns)
    if not (sections := tuple(_merge_updates(reader.read_sections()))):
        raise _invalid("The patch names no file.")
    if len(sections) > MAX_SECTIONS or sum(len(one.hunks) for one in sections) > MAX_HUNKS:
        raise ToolError(
            f"The patch has {len(sections):,} files and {sum(len(one.hunks) for one in sections):,} hunks. At most "
            f"{MAX_SECTIONS:,} files and {MAX_HUNKS:,} hunks are possible. Split it into several calls.",
            kind="limit",
        )
    for section in sections:
        _check_effect(section, has_returns=bool(returns))
    return sections


def _invalid(problem: str, advice: str = "") -> ToolError:
    expected = (
        advice
        or "Send `*** Begin Patch`, `*** Update File: PATH`, hunks that begin with `@@`, and `*** End Patch`, or a unified diff with `--- a/PATH` and `+++ b/PATH`."
    )
    return ToolError(f"{problem} {expected}", kind="invalid_input")


def _strip_wrapping(lines: list[str]) -> list[str]:
    """Return the lines without the code fences and here-documents around them."""
    first, last = 0, len(lines)
    while True:
        while first < last and not lines[first].strip():
            first += 1
        while last > first and lines[last - 1] != " " and not lines[last - 1].strip():  # " " is an empty line of a hunk
            last -= 1
        if last - first < 2:
            return lines[first:last]
        here = _HERE_DOCUMENT.fullmatch(lines[first])
        is_fenced = _FENCE.fullmatch(lines[first]) and _FENCE.fullmatch(lines[last - 1])
        if not is_fenced and (here is None or lines[last - 1].strip() != here[2]):
            return lines[first:last]
        first, last = first + 1, last - 1


def _merge_updates(sections: Sequence[PatchSection]) -> Iterator[PatchSection]:
    """Merge several updates of one file, and refuse other sections with the same path.

    :raises ToolError: ``invalid_input`` for two sections that contradict each other
    """
    groups: list[list[PatchSection]] = []
    found: dict[str, list[PatchSection]] = {}
    for one in sections:
        other = None
        for path in one.paths_to_write:
            other = found.get(_normalize(path))
            if other is not None and not (one.is_in_place_update and other[0].is_in_place_update):
                raise _invalid(
                    f"Two sections of the patch change {quote_text_or_length(path, 200)}.",
                    "Change each file in one section. To replace a whole file, use write.",
                )
        if other is not None:
            other.append(one)
            continue
        groups.append([one])
        for path in one.paths_to_write:
            found[_normalize(path)] = groups[-1]
    for first, *further in groups:
        if not further:
            yield first
            continue
        hunks = [hunk for one in (first, *further) for hunk in one.hunks]
        numbered = tuple(replace(hunk, number=number) for number, hunk in enumerate(hunks, 1))
        modes = [one.is_executable for one in (first, *further) if one.is_executable is not None]
        yield replace(first, hunks=numbered, is_executable=modes[-1] if modes else None)


def _normalize(path: str) -> str:
    return "/".join(part for part in path.split("/") if part not in ("", "."))


def _check_path(path: str) -> str:
    """Return a path that a patch names.

    :raises ToolError: ``invalid_input`` for a path that is empty, absolute, invalid or outside the workspace
    """
    shown = quote_text_or_length(path, 200)
    if not path.strip() or "\0" in path or len(path) > _MAX_PATH:
        raise _invalid(
            f"A path of the patch is invalid: {shown}.", "Name each file by a path relative to the workspace."
        )
    if path.startswith("/"):
        raise _invalid(
            f"The patch names the absolute path {shown}.",
            "The paths of a patch are relative to the workspace. Write them without the workspace folder.",
        )
    if ".." in path.split("/"):
        raise _invalid(f"The patch names the path {shown}.", "Use paths in the workspace, without `..`.")
    if not _normalize(path) or path.endswith("/"):
        raise _invalid(f"The patch names the folder {shown}.", "Name a file in it.")
    return path


def _check_effect(section: PatchSection, *, has_returns: bool) -> None:
    """Refuse a section that changes nothing.

    :raises ToolError: ``invalid_input``
    """
    if section.kind != "update" or section.to is not None or section.is_executable is not None:
        return
    if any(hunk.has_text_changes for hunk in section.hunks):
        return
    shown = quote_text_or_length(section.path, 200)
    if has_returns:
        raise _invalid(
            f"The hunks of {shown} change only line ends.",
            "A patch keeps the line ends of a file. Convert them with a program, such as sed or unix2dos.",
        )
    raise _invalid(f"The hunks of {shown} change nothing.", "Begin removed lines with `-` and added lines with `+`.")


class _HunkBuilder:
    """The lines of a hunk while they are read."""

    def __init__(self) -> None:
        self.lines: list[HunkLine] = []
        self.loose_tail = 0
        self._lacks_end = [False, False]
        self._added = self._returns = 0

    def add(self, line: str, *, has_return: bool) -> bool:
        """Add a line of the patch, and return whether it belongs to a hunk."""
        if line == "":
            self.loose_tail += 1
            self.lines.append(HunkLine(" ", ""))
            return True
        sign = line[0]
        if sign == "\\":
            if not self.lines:
                return False
            last = self.lines[-1].sign
            self._lacks_end = [self._lacks_end[0] or last != "+", self._lacks_end[1] or last != "-"]
            return True
        if sign == " " or sign == "-" or sign == "+":
            self.loose_tail = 0
            self.lines.append(HunkLine(sign, line[1:]))
            self._added += sign == "+"
            self._returns += sign == "+" and has_return
            return True
        return False

    def build(self, number: int, *, head: re.Match[str] | None, anchors: Sequence[str], is_at_end: bool) -> PatchHunk:
        return PatchHunk(
            number,
            tuple(self.lines),
            tuple(anchors),
            None if head is None else int(head[1]),
            "" if head is None else head[5].strip(),
            is_at_end or any(self._lacks_end),
            (self._lacks_end[0], self._lacks_end[1]),
            self.loose_tail,
            0 < self._added == self._returns,
        )


class _PatchReader(Struct):
    """A position in the lines of a patch.

    :param returns: the indexes of the lines that had a carriage return at the end
    """

    lines: list[str]
    returns: frozenset[int]
    at: int = 0
    _blank: tuple[int, int] = (0, 0)
    """A run of blank lines that was found last."""

    def _find_text(self, at: int) -> int:
        """Return where the next line that is not blank is, or the number of lines."""
        first, last = self._blank
        if not first <= at < last:
            last = at
            while last < len(self.lines) and not self.lines[last].strip():
                last += 1
            self._blank = at, last
        return last

    @property
    def line(self) -> str | None:
        """The present line; None at the end."""
        return self.lines[self.at] if self.at < len(self.lines) else None

    def _is_file_head(self, at: int) -> bool:
        """Return whether ``---`` and ``+++`` lines begin here."""
        lines = self.lines
        return (
            lines[at].startswith("--- ")
            and at + 1 < len(lines)
            and lines[at + 1].startswith("+++ ")
            and (at + 2 >= len(lines) or lines[at + 2][:1] not in (" ", "-", "+", "\\"))
        )

    def _unexpected(self, line: str, where: str) -> ToolError:
        return _invalid(
            f"Line {self.at + 1} of the patch is {quote_text_or_length(line, 120)}, {where}.",
            "Begin each line of a hunk with a space (unchanged), `-` (removed) or `+` (added).",
        )


class _MarkedReader(_PatchReader):
    """A reader of the format with ``*** Begin Patch``."""

    def read_sections(self) -> list[PatchSection]:
        found: list[PatchSection] = []
        last_marker = max((at for at, line in enumerate(self.lines) if _MARKER.match(line)), default=0)
        while (line := self.line) is not None:
            if (marker := _MARKER.match(line)) is not None:
                self.at += 1
                path = _check_path(marker[2].strip())
                if marker[1] == "Add":
                    found.append(self._read_added(path))
                elif marker[1] == "Delete":
                    found.append(PatchSection("delete", path))
                else:
                    found.append(self._read_updated(path))
            elif line.startswith(_END):
                self.at += 1
                if last_marker < self.at:
                    break  # a remark may follow
                self.at = max(self.at, self._find_text(self.at))
            elif not line.strip() or line.startswith("*** ") or not found:
                self.at += 1
            else:
                raise self._unexpected(line, "which belongs to no file")
        return found

    def _read_added(self, path: str) -> PatchSection:
        content: list[HunkLine] = []
        blank = 0
        while (line := self.line) is not None and not line.startswith("*** "):
            if line.startswith("+"):
                content += [HunkLine("+", "")] * (blank if content else 0)
                content.append(HunkLine("+", line[1:]))
                blank = 0
            elif not line.strip():
                blank += 1
            elif content or not _LOOSE_HEAD.match(line):
                raise _invalid(
                    f"Line {self.at + 1} of the patch is {quote_text_or_length(line, 120)}, within the new file {path}.",
                    "Begin each line of a new file with `+`.",
                )
            self.at += 1
        if self.line == _END_OF_FILE:
            self.at += 1
        return PatchSection("add", path, (PatchHunk(1, tuple(content)),) if content else ())

    def _read_updated(self, path: str) -> PatchSection:
        to: str | None = None
        if (line := self.line) is not None and line.startswith(_MOVE):
            to = _check_path(line[len(_MOVE) :].strip())
            self.at += 1
        if self.at < len(self.lines) and self._is_file_head(self.at):
            self.at += 2
        hunks: list[PatchHunk] = []
        while (line := self.line) is not None and (line == _END_OF_FILE or not line.startswith("*** ")):
            ahead = self._find_text(self.at)
            following = self.lines[ahead] if ahead < len(self.lines) else _END
            if ahead > self.at and (following.startswith("*** ") or _LOOSE_HEAD.match(following)):
                self.at = ahead
                continue
            hunks.append(self._read_hunk(len(hunks) + 1, path))
        if not hunks and to is None:
            raise _invalid(f"The section of {path} has no hunk.")
        return PatchSection("update", path, tuple(hunks), to)

    def _read_hunk(self, number: int, path: str) -> PatchHunk:
        anchors: list[str] = []
        head: re.Match[str] | None = None
        while (line := self.line) is not None and _LOOSE_HEAD.match(line):
            head = _HUNK_HEAD.match(line) or head
            anchors += _read_anchor(line)
            self.at += 1
        builder, is_at_end = _HunkBuilder(), False
        while (line := self.line) is not None and not _LOOSE_HEAD.match(line):
            if line == _END_OF_FILE:
                is_at_end = True
                self.at += 1
                break
            if line.startswith("*** "):
                break
            if not builder.add(line, has_return=self.at in self.returns):
                raise self._unexpected(line, f"within hunk {number} of {path}")
            self.at += 1
        if not builder.lines:
            raise _invalid(f"Hunk {number} of {path} has no lines.")
        return builder.build(number, head=head, anchors=anchors, is_at_end=is_at_end)


def _read_anchor(line: str) -> list[str]:
    """Return the line of code that a line with ``@@`` names, if it names one."""
    anchor = line.lstrip("@").strip().removesuffix("@@").strip()
    return [] if _HUNK_HEAD.match(line) or _NO_ANCHOR.fullmatch(anchor) else [anchor]


class _GitHead(Struct):
    """The header lines of one file in a git diff."""

    paths: tuple[str, str] | None = None
    moved: dict[str, str] = field(default_factory=dict[str, str])
    """The paths of ``rename from``, ``rename to``, ``copy from`` and ``copy to``."""
    is_new: bool = False
    is_deleted: bool = False
    is_executable: bool | None = None


class _UnifiedReader(_PatchReader):
    """A reader of unified diffs."""

    def read_sections(self) -> list[PatchSection]:
        found: list[PatchSection] = []
        while (line := self.line) is not None:
            if line.startswith(_GIT_HEAD):
                found.append(self._read_git_section())
            elif self._is_file_head(self.at):
                found.append(self._read_section(_GitHead()))
            elif _LOOSE_HEAD.match(line):
                raise _invalid(f"Line {self.at + 1} of the patch begins a hunk, and no file is named before it.")
            elif line.startswith(("GIT binary patch", "Binary files ")):
                raise _binary_error(line)
            else:
                self.at += 1
        return found

    def _read_git_section(self) -> PatchSection:
        first = self.lines[self.at]
        head = _GitHead(_split_git_paths(first[len(_GIT_HEAD) :]))
        named = head.paths[1] if head.paths else first
        self.at += 1
        while (line := self.line) is not None and not line.startswith(_GIT_HEAD):
            key, _, value = line.partition(" mode ")
            if key in ("new file", "deleted file", "old", "new") and value:
                head.is_new = head.is_new or key == "new file"
                head.is_deleted = head.is_deleted or key == "deleted file"
                if value.strip() not in _MODES:
                    raise _invalid(
                        f"The patch gives {quote_text_or_length(named, 200)} the mode {quote_text_or_length(value.strip(), 20)}.",
                        "Only files with the modes 100644 and 100755 can be patched. Create links and submodules with a program.",
                    )
                if key in ("new file", "new"):
                    head.is_executable = _MODES[value.strip()]
            elif line.startswith(("rename from ", "rename to ", "copy from ", "copy to ")):
                kind, way, path = line.split(" ", 2)
                head.moved[f"{kind} {way}"] = _unquote(path.strip())
            elif line.startswith(("GIT binary patch", "Binary files ")):
                raise _binary_error(named)
            elif not line.startswith(("index ", "similarity index ", "dissimilarity index ")):
                break
            self.at += 1
        if self.at < len(self.lines) and self._is_file_head(self.at):
            return self._read_section(head)
        return self._make_section(head, head.paths, ())

    def _read_section(self, head: _GitHead) -> PatchSection:
        old, new = (_read_name(self.lines[self.at + offset][4:]) for offset in (0, 1))
        self.at += 2
        hunks: list[PatchHunk] = []
        while (line := self.line) is not None:
            if _LOOSE_HEAD.match(line):
                hunks.append(self._read_hunk(len(hunks) + 1, new if new != "/dev/null" else old))
            elif not line.strip():
                self.at = self._find_text(self.at)
            else:
                break
        is_null = "/dev/null" in (old, new)
        head.is_new = head.is_new or old == "/dev/null"
        head.is_deleted = head.is_deleted or new == "/dev/null"
        paths = head.paths if is_null and head.paths is not None else _strip_prefixes(old, new)
        return self._make_section(head, paths, tuple(hunks))

    def _read_hunk(self, number: int, path: str) -> PatchHunk:
        first = self.lines[self.at]
        head, anchors = _HUNK_HEAD.match(first), _read_anchor(first)
        self.at += 1
        builder = _HunkBuilder()
        end = None if head is None else self._find_counted_end(head)
        while (line := self.line) is not None and self.at != end:
            if end is None and self._ends_hunk():
                break
            if not builder.add(line, has_return=self.at in self.returns):
                raise self._unexpected(line, f"within hunk {number} of {path}")
            self.at += 1
        if end is not None:
            builder.loose_tail = 0
        if not builder.lines and not (head is not None and head[2] == head[4] == "0"):
            raise _invalid(f"Hunk {number} of {path} has no lines.")
        return builder.build(number, head=head, anchors=anchors, is_at_end=False)

    def _find_counted_end(self, head: re.Match[str]) -> int | None:
        """Return where the hunk ends by its line counts, or None if they are wrong."""
        old, new = (1 if head[group] is None else int(head[group]) for group in (2, 4))
        at = self.at
        while old > 0 or new > 0:
            line = self.lines[at] if at < len(self.lines) else "@"
            sign = line[:1] or " "
            if sign not in " +-\\":
                return None
            old -= sign in " -"
            new -= sign in " +"
            at += 1
        if old or new:
            return None
        while at < len(self.lines) and self.lines[at].startswith(_NO_LINE_END):
            at += 1
        if (ahead := self._find_text(at)) >= len(self.lines):
            return at
        is_more = self.lines[ahead][0] in " +-\\" and not self._is_file_head(ahead) and not self._is_signature(ahead)
        return None if is_more else at

    def _ends_hunk(self) -> bool:
        line = self.lines[self.at]
        if line[:1] in (" ", "+", "\\"):
            return False
        if line.startswith("-"):
            return self._is_file_head(self.at) or self._is_signature(self.at)
        if not line.strip():  # an empty line of context, or one before the next file
            ahead = self._find_text(self.at)
            if ahead >= len(self.lines) or self._is_file_head(ahead) or self._is_signature(ahead):
                return True
            return self.lines[ahead][0] not in " +-\\"
        return bool(_LOOSE_HEAD.match(line)) or line.startswith(
            ("diff ", "Index: ", "index ", "From ", "*** End", "====", "Only in ")
        )

    def _is_signature(self, at: int) -> bool:
        """Return whether the signature of a mail begins here, which git writes after a patch."""
        rest = [line for line in self.lines[at + 1 : at + 4] if line.strip()]
        return _SIGNATURE.fullmatch(self.lines[at]) is not None and len(rest) <= 1 and at + 4 >= len(self.lines)

    def _make_section(
        self, head: _GitHead, paths: tuple[str, str] | None, hunks: tuple[PatchHunk, ...]
    ) -> PatchSection:
        if paths is None and not head.moved:
            raise _invalid("The patch has a file without a readable name.")
        old, new = paths or ("", "")
        if "rename to" in head.moved and "rename from" in head.moved:
            old, new = head.moved["rename from"], head.moved["rename to"]
        if "copy to" in head.moved and "copy from" in head.moved:
            source, target = (_check_path(head.moved[f"copy {way}"]) for way in ("from", "to"))
            return PatchSection("add", target, hunks, copied_from=source, is_executable=head.is_executable)
        is_created = len(hunks) == 1 and hunks[0].old_line == 0 and not hunks[0].old and not head.is_deleted
        if head.is_new or is_created:
            return PatchSection(
                "add", _check_path(new if new != "/dev/null" else old), hunks, is_executable=head.is_executable
            )
        if head.is_deleted:
            return PatchSection(
                "delete", _check_path(old if old != "/dev/null" else new), hunks, has_content=bool(hunks)
            )
        to = None
        if head.moved:
            to = None if _normalize(old) == _normalize(new) else _check_path(new)
        elif _normalize(old) != _normalize(new):
            old = self._choose_path(old, new)
        if not hunks and to is None and head.is_executable is None:
            raise _invalid(f"The section of {quote_text_or_length(old, 200)} changes nothing.")
        return PatchSection("update", _check_path(old), hunks, to, is_executable=head.is_executable)

    @staticmethod
    def _choose_path(old: str, new: str) -> str:
        """Return the path of a file that a diff names in two ways.

        :raises ToolError: ``invalid_input`` if these are two files
        """
        for one, other in ((old, new), (new, old)):
            if (backup := _BACKUP.fullmatch(one)) is not None and _normalize(backup[1]) == _normalize(other):
                return other
        raise _invalid(
            f"The patch compares {quote_text_or_length(old, 200)} with {quote_text_or_length(new, 200)}.",
            "Name the same file in both lines. To move a file, add the lines `rename from PATH` and `rename to PATH` "
            "after a line `diff --git a/PATH b/PATH`.",
        )


def _binary_error(name: str) -> ToolError:
    return _invalid(
        f"The patch of {quote_text_or_length(name, 200)} is binary.",
        "Only text can be patched. Make the file with a program.",
    )


def _read_name(text: str) -> str:
    r"""Return the name in a ``---`` or ``+++`` line, without the time that follows a tab."""
    text = text.rstrip()
    return _unquote(text) if text.startswith('"') else _TIME.sub("", text.partition("\t")[0]).rstrip()


def _unquote(text: str) -> str:
    """Return a name that git may have quoted, with escapes as in C."""
    if len(text) < 2 or text[0] != '"' or text[-1] != '"':
        return text

    def restore(match: re.Match[bytes]) -> bytes:
        code = match[1].decode()
        return bytes((_ESCAPES[code] if code in _ESCAPES else int(code, 8) & 0xFF,))

    raw = text[1:-1].encode("utf-8", "surrogateescape")
    return _QUOTED.sub(restore, raw).decode("utf-8", "surrogateescape")


def _split_git_paths(text: str) -> tuple[str, str] | None:
    """Return both paths of a ``diff --git`` line, or None if the line can be split in several ways."""
    if (quoted := re.fullmatch(r'("(?:[^"\\]|\\.)*"|\S+) ("(?:[^"\\]|\\.)*"|\S+)', text)) is not None:
        return _strip_prefixes(_unquote(quoted[1]), _unquote(quoted[2]))
    middle = len(text) // 2
    if text[middle : middle + 1] == " ":
        old, new = text[:middle], text[middle + 1 :]
        if old.partition("/")[2] == new.partition("/")[2]:
            return _strip_prefixes(old, new)
    return None


def _strip_prefixes(old: str, new: str) -> tuple[str, str]:
    """Return both paths without the prefixes of git, if they have them."""
    for number, (first, second) in enumerate(_PREFIXES):
        # Only the usual prefixes are removed if one side is missing: `w/x` may be a file in the folder `w`.
        has_old = old.startswith(f"{first}/") or (number < 2 and old == "/dev/null")
        has_new = new.startswith(f"{second}/") or (number < 2 and new == "/dev/null")
        if has_old and has_new:
            return old.removeprefix(f"{first}/"), new.removeprefix(f"{second}/")
    return old, new
