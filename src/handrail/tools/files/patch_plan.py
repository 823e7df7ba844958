"""What a patch would change: the new content of each file, its diff, and every hunk that does not fit.

Nothing is written here. The tool applies the plan, and an approval request shows it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

from handrail.contract.errors import ToolError
from handrail.contract.services.file_services import FileChange, FileService
from handrail.contract.struct import Struct, field
from handrail.contract.text.neutralisation import EscapedText
from handrail.contract.text.patch_text import PatchHunk, PatchSection, parse_patch
from handrail.contract.text.text_encodings import UTF_8, DecodedFileText, decode_file_text, detect_text_encoding
from handrail.tools.files.hunk_locator import (
    GRADES,
    FileLines,
    HunkLocation,
    HunkMismatch,
    MatchGrade,
    locate_hunks,
    reindent_added_lines,
)
from handrail.tools.files.lines_and_diffs import (
    LineReplacement,
    UnifiedDiff,
    check_line_count,
    check_text_size,
    detect_line_separator,
    make_diff_of_replacements,
    make_diff_of_texts,
    split_lines,
)
from handrail.tools.files.text_changes import EscapeWarnings, PatchedText, apply_line_replacements

FileAction = Literal["created", "updated", "moved", "deleted"]
_T = TypeVar("_T")
_THREAD_FROM = 4 * 1024
"""The number of bytes from which hunks are located in a thread, so that other calls continue."""
_MOST_PROBLEMS = 8
_MOST_BYTES = 64 * 1024 * 1024
"""The maximum size of all files of a patch together, in bytes. They are in memory at the same time."""


class PatchedFile(Struct, frozen=True):
    """A file after its section of a patch.

    :param before: its present content; None for a new file
    :param text: the text afterwards; empty if the file is deleted
    :param grade: the worst grade of a match
    :param applied_hunks: the numbers of the hunks that the file has already
    :param is_applied: whether the whole section is applied already
    """

    section: PatchSection
    action: FileAction
    before: DecodedFileText | None
    text: str = ""
    blocks: Sequence[LineReplacement] = ()
    grade: MatchGrade = "exact"
    applied_hunks: tuple[int, ...] = ()
    is_applied: bool = False
    notes: EscapeWarnings = field(default_factory=EscapeWarnings)

    @property
    def path(self) -> str:
        """The path after the change."""
        return self.section.to or self.section.path

    def list_changes(self) -> list[FileChange]:
        """Return the changes of files, without any that is made already."""
        section, before = self.section, None if self.before is None else self.before.data
        if self.is_applied:
            return []
        if self.action == "deleted":
            return [FileChange(section.path, before, None)]
        encoding = UTF_8 if self.before is None else self.before.encoding
        after = before if self.before is not None and not self.blocks else encoding.encode(self.text)
        if self.action == "moved":
            return [
                FileChange(section.path, before, None),
                FileChange(self.path, None, after, section.path, section.is_executable),
            ]
        if self.action == "created" and section.copied_from is not None:
            return [FileChange(section.path, None, after, section.copied_from, section.is_executable)]
        return [FileChange(section.path, before, after, None, section.is_executable)]

    def make_diff(self, shown: str, former: str) -> UnifiedDiff:
        """Return the diff of the file.

        :param shown: its path after the change, as a message names it
        :param former: its path before
        """
        diff = self._make_text_diff(shown, former)
        executable = self.section.is_executable
        if self.is_applied or executable is None or (self.before is None and not executable):
            return diff  # a new file cannot be executed, unless the patch says so
        mode = f"mode {'100755' if executable else '100644'}"
        return replace(diff, text="\n".join(filter(None, (mode, diff.text))))

    def _make_text_diff(self, shown: str, former: str) -> UnifiedDiff:
        if self.is_applied:
            return UnifiedDiff("", 0, 0)
        if self.before is None or self.section.copied_from is not None:
            return make_diff_of_texts(shown, "", self.text, created=True)
        text = self.before.text
        if self.action == "deleted" and detect_text_encoding(self.before.data) is None:
            return UnifiedDiff(f"--- a/{former}\n+++ /dev/null\nBinary file of {len(self.before.data):,} bytes", 0, 0)
        mark = detect_line_separator(text)
        lines = split_lines(text, mark)
        blocks = [LineReplacement(0, len(lines), ())] if self.action == "deleted" and lines else list(self.blocks)
        diff = make_diff_of_replacements(shown, lines, blocks, mark=mark)
        head = [f"--- a/{former}", "+++ /dev/null" if self.action == "deleted" else f"+++ b/{shown}"]
        if self.action == "moved":
            head = [f"rename from {former}", f"rename to {shown}", *(head if diff.text else ())]
        return UnifiedDiff("\n".join((*head, *diff.text.split("\n")[2:])), diff.added, diff.removed, diff.left_out)


class PatchPlan(Struct, frozen=True):
    """What a patch would change."""

    files: tuple[PatchedFile, ...]

    def list_changes(self) -> list[FileChange]:
        """Return the changes of all files."""
        return [change for file in self.files for change in file.list_changes()]


class _PlanProblems(Struct):
    """The reasons why a patch cannot be applied."""

    texts: list[str] = field(default_factory=list[str])
    kind: Any = "invalid_input"

    def add(self, place: str, error: ToolError | str) -> None:
        """Add a reason."""
        if isinstance(error, ToolError):
            self.kind = error.kind if not self.texts else self.kind
            self.texts.append(f"{place}: {error.text}" if place not in error.text else error.text)
        else:
            self.texts.append(f"{place}: {error}")

    def raise_if_any(self) -> None:
        """Raise one error with all reasons.

        :raises ToolError: if there is a reason
        """
        if self.texts:
            shown = self.texts[:_MOST_PROBLEMS]
            if len(self.texts) > len(shown):
                shown.append(f"{len(self.texts) - len(shown)} more problems are not shown.")
            text = "\n".join(("The patch was not applied. Nothing was changed.", *shown))
            raise ToolError(f"{text}\nCorrect these places, and send the whole patch again.", kind=self.kind)


async def plan_patch(text: str, files: FileService) -> PatchPlan:
    """Return what a patch would change.

    :raises ToolError: with every hunk that does not fit, or for a file that cannot be read or changed
    """
    problems, planned = _PlanProblems(), list[PatchedFile]()
    missing: list[tuple[PatchSection, ToolError]] = []
    size = 0
    for section in parse_patch(text):
        try:
            planned.append(one := await _plan_section(section, files))
            size += 0 if one.before is None else len(one.before.data)
        except _MissingSource as error:
            missing.append((section, error.error))
        except HunkMismatch as error:
            problems.texts.extend(str(error).split("\0"))
        except ToolError as error:
            if error.kind == "denied":
                raise
            problems.add(section.path, error)
        if size > _MOST_BYTES:
            raise ToolError(
                f"The files of the patch have more than {_MOST_BYTES >> 20} MiB. Nothing was changed. Split the patch.",
                kind="limit",
            )
    # A deletion leaves nothing that shows who made it. The rest of a patch that is applied does.
    is_repeated = bool(planned) and not problems.texts and all(one.is_applied for one in planned)
    for section, error in missing:
        if is_repeated:
            action: FileAction = "deleted" if section.kind == "delete" else "moved"
            planned.append(PatchedFile(section, action, None, is_applied=True))
        else:
            problems.add(section.path, error)
    problems.raise_if_any()
    return PatchPlan(tuple(planned))


class _MissingSource(Exception):
    """An error for a file that does not exist and may be deleted or moved already."""

    def __init__(self, error: ToolError) -> None:
        super().__init__(error.text)
        self.error = error


async def _plan_section(section: PatchSection, files: FileService) -> PatchedFile:
    if section.kind == "add":
        return await _plan_creation(section, files)
    if section.kind == "delete":
        return await _plan_deletion(section, files)
    if section.to is not None and await _is_same_file(section.path, section.to, files):
        section = PatchSection("update", section.path, section.hunks, is_executable=section.is_executable)
    if section.to is None:
        before = await _read(section.path, files)
        if before is None:
            raise await _missing_error(section.path, files)
        return await _update(section, before)
    source, target = await _read(section.path, files), await _read(section.to, files)
    if source is None:
        if target is None or not section.hunks:
            raise _MissingSource(await _missing_error(section.path, files))
        try:
            moved = await _update(section, target)
        except HunkMismatch:
            moved = None
        if moved is None or not moved.is_applied:
            raise await _missing_error(section.path, files)
        return moved
    if target is not None:
        raise ToolError(
            f"{section.path} cannot move to {section.to}, which already exists. Use another path, or delete that file first.",
            kind="conflict",
        )
    updated = await _update(section, source)
    return PatchedFile(
        section,
        "moved",
        updated.before,
        updated.text,
        updated.blocks,
        updated.grade,
        updated.applied_hunks,
        notes=updated.notes,
    )


async def _is_same_file(path: str, to: str, files: FileService) -> bool:
    """Return whether both paths name one file."""
    try:
        one, other = await files.stat(path), await files.stat(to)
    except ToolError:
        return False
    return one.path == other.path


async def _read(path: str, files: FileService) -> bytes | None:
    """Return the content of a file; None if nothing has this path.

    :raises ToolError: if it cannot be changed
    """
    try:
        found = await files.stat(path)
    except ToolError as error:
        if error.kind != "failed" or "does not exist" not in error.text:
            raise
        return None
    if found.kind == "directory":
        raise ToolError(f"{found.path} is a folder. Name a file in it.", kind="invalid_input")
    return await files.read_for_edit(path, require_seen=False)


async def _missing_error(path: str, files: FileService) -> ToolError:
    try:
        await files.stat(path)
    except ToolError as error:
        return ToolError(f"{error.text} To create a file, use `*** Add File`.", kind=error.kind)
    return ToolError(f"{path} has just been created. Send the patch again.", kind="conflict")


async def _plan_creation(section: PatchSection, files: FileService) -> PatchedFile:
    if section.copied_from is not None:
        source = await _read(section.copied_from, files)
        if source is None:
            raise await _missing_error(section.copied_from, files)
        if await _read(section.path, files) is not None:
            raise _existing_error(section.path)
        copied = await _update(section, source)
        return PatchedFile(
            section, "created", copied.before, copied.text, copied.blocks, copied.grade, notes=copied.notes
        )
    if any(line.sign == "-" or (line.sign == " " and line.text) for hunk in section.hunks for line in hunk.lines):
        raise ToolError(
            f"{section.path} is a new file, and its section has lines that do not begin with `+`. Begin each line with `+`, "
            "or use `*** Update File`.",
            kind="invalid_input",
        )
    notes = EscapeWarnings()
    content = notes.take(EscapedText("").restore_copied_escapes("".join(_list_new_text(section.hunks))))
    after, present = UTF_8.encode(content), await _read(section.path, files)
    if present is None:
        return PatchedFile(section, "created", None, content, notes=notes)
    if present == after:
        return PatchedFile(section, "created", decode_file_text(present), content, is_applied=True)
    if present == b"":
        blocks = [LineReplacement(0, 0, tuple(split_lines(content)))]
        return PatchedFile(section, "updated", decode_file_text(b""), content, blocks, notes=notes)
    raise _existing_error(section.path)


def _list_new_text(hunks: Sequence[PatchHunk]) -> list[str]:
    """Return the lines of a new file with their ends."""
    found: list[str] = []
    for hunk in hunks:
        lines = hunk.lines[: -hunk.loose_tail] if hunk.loose_tail else hunk.lines
        end = "\r\n" if hunk.has_returns else "\n"
        found += [line.text + end for line in lines]
        if hunk.lacks_end[1] and found:
            found[-1] = found[-1].removesuffix(end)
    return found


def _existing_error(path: str) -> ToolError:
    return ToolError(
        f"{path} already exists, and its content differs. Use `*** Update File` to change it, or write to replace it.",
        kind="conflict",
    )


async def _plan_deletion(section: PatchSection, files: FileService) -> PatchedFile:
    before = await _read(section.path, files)
    if before is None:
        error = await _missing_error(section.path, files)
        raise _MissingSource(ToolError(error.text.partition(" To create")[0], kind=error.kind))
    file = decode_file_text(before)
    if section.has_content:
        bodies = _split_bodies(file.text)
        wanted = [line.text.rstrip() for hunk in section.hunks for line in hunk.lines if line.sign != "+"]
        if [line.rstrip() for line in bodies] != wanted:
            raise ToolError(
                f"{section.path} has {len(bodies)} lines, which differ from the {len(wanted)} removed ones. Read the file "
                "again, or delete it with `*** Delete File`.",
                kind="conflict",
            )
    return PatchedFile(section, "deleted", file)


async def _update(section: PatchSection, before: bytes) -> PatchedFile:
    """Return a file with the hunks of its section.

    :raises HunkMismatch: with one text for each hunk that does not fit
    """
    hunks = [hunk for hunk in section.hunks if hunk.has_text_changes]
    if hunks and detect_text_encoding(before) is None:
        raise ToolError(f"{section.path} is a binary file. Only text can be patched.", kind="invalid_input")
    check_line_count(section.path, before)
    size = len(before) + sum(len(line.text) for hunk in hunks for line in hunk.lines)
    return await _run_in_thread_if_large(size, lambda: apply_hunks(section, hunks, before))


async def _run_in_thread_if_large(size: int, work: Callable[[], _T]) -> _T:
    return await asyncio.to_thread(work) if size > _THREAD_FROM else work()


def _split_bodies(text: str) -> list[str]:
    """Return the lines of a text without their ends."""
    mark = detect_line_separator(text)
    return [line.removesuffix(mark).removesuffix("\r") for line in split_lines(text, mark)]


def apply_hunks(section: PatchSection, hunks: Sequence[PatchHunk], before: bytes) -> PatchedFile:
    """Return a file with these hunks of its section.

    :param before: the present content of the file
    :raises HunkMismatch: with one text for each hunk that does not fit
    :raises ToolError: ``limit`` if the new text is too long
    """
    file, notes = decode_file_text(before), EscapeWarnings()
    if not hunks:
        return PatchedFile(section, "updated", file, file.text)
    lines = FileLines(_split_bodies(file.text))
    places, problems = locate_hunks(lines, hunks)
    patched, blocks = PatchedText(file.text, notes), list[LineReplacement]()
    has_end: bool | None = None
    if not problems:
        for place in places:
            try:
                blocks += _replace_lines(place, lines, patched)
                if place.hunk.lacks_end[0] != place.hunk.lacks_end[1] and not place.is_applied:
                    has_end = _read_end(place, len(lines.bodies))
            except HunkMismatch as error:
                problems[place.hunk.number] = str(error)
    if problems:
        raise HunkMismatch(
            "\0".join(f"{section.path}, hunk {number}: {problems[number]}" for number in sorted(problems))
        )
    joined = patched.merge_adjacent_replacements(blocks, has_end=has_end)
    grade = GRADES[max(GRADES.index(place.grade) for place in places)]
    applied = tuple(sorted(place.hunk.number for place in places if place.is_applied))
    check_text_size(len(file.text) + sum(len(new) for block in joined for new in block.new))
    text = apply_line_replacements(file.text, joined)
    is_done = not joined and section.is_executable is None
    return PatchedFile(section, "updated", file, text, joined, grade, applied, is_done, notes)


def _read_end(place: HunkLocation, count: int) -> bool:
    """Return whether the file has a line end at its end after a hunk that changes that.

    :raises HunkMismatch: if the hunk is not at the end
    """
    if place.last != count:
        raise HunkMismatch("The patch says that the file ends here, and the file continues. Read the file again.")
    return not place.hunk.lacks_end[1]


def _replace_lines(place: HunkLocation, lines: FileLines, patched: PatchedText) -> list[LineReplacement]:
    """Return the changes of one hunk. Lines of context stay as they are in the file."""
    if place.is_applied:
        return []
    added = iter(reindent_added_lines(place, lines))
    found: list[LineReplacement] = []
    first = at = place.first
    new: list[str] = []

    def close() -> None:
        if new or at > first:
            content = "".join(f"{line}\n" for line in new)
            found.append(LineReplacement(first, at, patched.fit_new_lines(content, first, at)))
            new.clear()

    for line in place.lines:
        if line.sign == "+":
            new.append(next(added))
        elif line.sign == "-":
            at += 1
        else:
            close()
            at += 1
            first = at
    close()
    return found
