"""read, write, edit, multi_edit, file.patch: one file at a time, never over content that the model has not seen."""

from __future__ import annotations

import asyncio
import posixpath
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from handrail.contract.doors.runtime import Runtime
from handrail.contract.errors import ToolError, excerpt
from handrail.contract.text.neutral import OPEN, Shown, neutralised
from handrail.contract.tool.names import nearest
from handrail.contract.tool.requires import FsRequires, Requires
from handrail.contract.tool.tool import Tool
from handrail.tools.declaring import FILE, file_changing, file_reading, object_schema
from handrail.tools.files.reading import bytes_answer, lines_answer
from handrail.tools.files.text import (
    Block,
    Span,
    blocks_between,
    blocks_of_spans,
    check_lines,
    check_size,
    compared,
    decoded,
    encoded,
    length,
    line_end,
    lines_of,
    places,
    readable,
    replaced_everywhere,
    spliced,
    unified,
    why_missing,
    with_line_end,
)

# Line operations on a text: replace a range, insert at a line, append. Pure functions.

_FIELDS = {
    "replace": ({"first_line", "last_line", "content"}, "first_line, last_line and content"),
    "insert": ({"line", "content"}, "line and content"),
    "append": ({"content"}, "content"),
}


def check_operations(operations: Sequence[dict[str, Any]]) -> None:
    """Check what can be checked without the file.

    :raises ToolError: ``invalid_input`` for an invalid operation
    """
    for number, operation in enumerate(operations, 1):
        wanted, text = _FIELDS[op := operation["op"]]
        given = operation.keys() - {"op", "expect"}
        if given != wanted:
            raise ToolError(
                f"Operation {number} ({op!r}) has the wrong fields: {', '.join(sorted(given)) or 'none'}. "
                f"Pass {text}, and optionally expect.",
                kind="invalid_input",
            )
        if op != "replace" and not operation["content"]:
            raise ToolError(
                f"Operation {number} has an empty `content`. Pass the lines to add; a blank line is '\\n'.",
                kind="invalid_input",
            )


def blocks_of_operations(text: str, operations: Sequence[dict[str, Any]]) -> list[Block]:
    """Return the changes of checked ``operations``. All line numbers refer to ``text``.

    New lines get the line end that most lines have. A text without a final line end stays without one.

    :raises ToolError: ``invalid_input`` if lines do not exist or overlap, ``conflict`` if ``expect`` does not match
    """
    lines = lines_of(text)
    end = line_end(text)
    blocks = sorted(
        (_block(number, operation, lines, end) for number, operation in enumerate(operations, 1)),
        key=lambda block: (block.first, block.last),
    )
    joined: list[Block] = []
    for block in blocks:
        if joined and block.first < joined[-1].last:
            raise ToolError(
                f"Two operations change line {block.first + 1}. Change each line in one operation only.",
                kind="invalid_input",
            )
        if joined and block.first == joined[-1].last:
            joined[-1] = Block(joined[-1].first, block.last, joined[-1].new + block.new)
        else:
            joined.append(block)
    if lines and not lines[-1].endswith("\n") and joined[-1].last == len(lines) and joined[-1].new:
        tail = joined[-1]
        if tail.first == len(lines):
            tail = Block(tail.first - 1, tail.last, (lines[-1] + end, *tail.new))
        joined[-1] = Block(tail.first, tail.last, (*tail.new[:-1], tail.new[-1].removesuffix(end)))
    return joined


def patched(text: str, blocks: Sequence[Block]) -> str:
    """Return ``text`` with ``blocks`` applied."""
    lines = lines_of(text)
    out: list[str] = []
    line = at = 0
    for block in blocks:
        start = at + length(lines, line, block.first)
        out += (text[at:start], *block.new)
        line, at = block.last, start + length(lines, block.first, block.last)
    return "".join((*out, text[at:]))


def _block(number: int, operation: dict[str, Any], lines: Sequence[str], end: str) -> Block:
    op, content = operation["op"], operation["content"]
    total = len(lines)
    if OPEN in content:
        content = _written(content, operation, lines)
    new = tuple(f"{line}{end}" for line in _content_lines(content))
    if op == "replace":
        first, last = operation["first_line"], operation["last_line"]
        if not first <= last <= total:
            raise ToolError(
                f"The range of operation {number} is invalid: lines {first} to {last}. The file has {total} lines. "
                "Correct the numbers.",
                kind="invalid_input",
            )
        _check(number, operation, lines[first - 1 : last], f"lines {first} to {last}")
        return Block(first - 1, last, new)
    if op == "insert":
        line = operation["line"]
        if line > total + 1:
            raise ToolError(
                f"Operation {number} inserts before line {line}, but the file has {total} lines. "
                f"Use at most {total + 1}, or op 'append'.",
                kind="invalid_input",
            )
        _check(number, operation, lines[line - 1 : line], f"line {line}")
        return Block(line - 1, line - 1, new)
    _check(number, operation, lines[-1:], "the last line")
    return Block(total, total, new)


def _written(content: str, operation: dict[str, Any], lines: Sequence[str]) -> str:
    """Return ``content`` with the original characters that the model copied in spelled-out form."""
    first = operation.get("first_line") or operation.get("line") or len(lines)
    around = "".join(lines[max(0, first - 2) : operation.get("last_line", first) + 1])
    return Shown(around).written(content, 0, len(around))


def _content_lines(content: str) -> list[str]:
    plain = content.replace("\r\n", "\n")
    return plain.removesuffix("\n").split("\n") if plain else []


def _check(number: int, operation: dict[str, Any], have: Sequence[str], where: str) -> None:
    if "expect" not in operation:
        return
    want = _content_lines(operation["expect"])
    found = [line.removesuffix("\n").removesuffix("\r") for line in have]
    if want != found and want != neutralised("\n".join(found)).split("\n"):
        shown = readable("\n".join(found))
        raise ToolError(
            f"`expect` of operation {number} does not match {where}: {excerpt(shown, 500)}. Nothing was changed. "
            "Read the file again and correct the line numbers.",
            kind="conflict",
        )


_T = TypeVar("_T")

_THREAD_FROM = 4 * 1024
"""The characters from which on texts are compared in a thread, so that other calls continue."""
_MANY = 1_000
"""The occurrences above which they are replaced in one step and the texts are compared afterwards."""
_MAX_WORK = 512 * 1024 * 1024
"""The most characters that several edits may process together."""
_MAX_SHOWN = 512 * 1024
"""The most characters of a text in which spelled-out characters are searched."""


class Read(Tool):
    spec = file_reading(
        id="read",
        description=(
            "Read a text file by lines, a byte range of any file, or an image. Returns text without line "
            "numbers, up to 200 KB unless the operator set another limit; `next` is the offset to continue "
            "from, or null at the end. Lines are cut at 2,000 characters. To list a folder use glob."
        ),
        parameters=object_schema(
            {
                "path": FILE,
                "offset": {
                    "type": "integer",
                    "description": (
                        "First line, counted from 1, or first byte, counted from 0. -20 starts 20 before the end. "
                        "Default: the start"
                    ),
                },
                "limit": {
                    "type": "integer",
                    "minimum": 1,
                    "description": "Maximum number of lines or bytes. Default: as many as fit",
                },
                "unit": {"enum": ["lines", "bytes"], "default": "lines", "description": "Unit of offset and limit"},
            },
            ["path"],
        ),
        tier="core",
        guidance="Read a file before you change it. For a large file pass offset and limit.",
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        path = args["path"]
        offset: int | None = args.get("offset")
        try:
            if args.get("unit") == "bytes":
                return await bytes_answer(runtime, path, offset or 0, args.get("limit"))
            return await lines_answer(runtime, path, offset or 1, args.get("limit"))
        except ToolError as error:
            raise await _explained(error, path, runtime) from None


class Write(Tool):
    spec = file_changing(
        id="write",
        description=(
            "Create a file, or overwrite one that you have read in this session. Send the complete content. "
            "Creates parent folders. To change part of a file use edit. Returns a unified diff."
        ),
        parameters=object_schema(
            {"path": FILE, "content": {"type": "string", "description": "Complete new content"}},
            ["path", "content"],
        ),
        requires=Requires(fs=FsRequires(write=("{workspace}",))),
        targets={"fs.write": "{path}"},
        idempotent=True,
        tier="core",
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        content: str = args["content"]
        written = await runtime.files.write(args["path"], encoded(content))

        before = written.before or b""
        diff = await _aside(
            len(content) + len(before),
            lambda: compared(written.path, decoded(before), content, created=written.before is None),
        )
        return {"path": written.path, "created": written.created, "size": written.size, **diff.fields()}


class Edit(Tool):
    spec = file_changing(
        id="edit",
        description=(
            "Replace exact text in a file that you have read in this session. `old` must occur exactly once: "
            "include surrounding lines to make it unique, or set replace_all. Returns a unified diff."
        ),
        parameters=object_schema(
            {
                "path": FILE,
                "old": {"type": "string", "minLength": 1, "description": "Exact text to replace, including whitespace"},
                "new": {"type": "string", "description": "Replacement text. Empty deletes `old`"},
                "replace_all": {"type": "boolean", "default": False, "description": "Replace every occurrence"},
            },
            ["path", "old", "new"],
        ),
        tier="core",
        guidance=("Copy `old` from the result of read. Copy ⟦…⟧, an invisible character spelled out, as shown."),
    )

    def check(self, args: dict[str, Any]) -> None:
        check_differs(args["old"], args["new"])

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        path = args["path"]
        before = await _content(path, runtime)

        def change() -> tuple[bytes, list[Block], int]:
            text = decoded(before)
            done = replaced(path, text, args["old"], args["new"], replace_all=args.get("replace_all", False))
            if done.spans is None:
                return encoded(done.text), blocks_between(lines_of(text), lines_of(done.text)), done.count
            return encoded(done.text), blocks_of_spans(text, done.spans), done.count

        after, blocks, count = await _aside(len(before) + len(args["old"]) + len(args["new"]), change)
        return {"replacements": count, **await _replace(path, before, after, blocks, runtime)}


class MultiEdit(Tool):
    spec = file_changing(
        id="multi_edit",
        description=(
            "Apply several edits (find and replace) to one file that you have read in this session, in "
            "order, in one call. Returns which failed and a unified diff."
        ),
        parameters=object_schema(
            {
                "path": FILE,
                "edits": {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": 500,
                    "items": object_schema(
                        {name: Edit.spec.parameters["properties"][name] for name in ("old", "new", "replace_all")},
                        ["old", "new"],
                    ),
                    "description": "Edits, each applied to the result of those before it",
                },
                "mode": {
                    "enum": ["strict", "partial", "best_effort"],
                    "default": "strict",
                    "description": (
                        "strict: all or none. partial: keep the edits before the first that fails. best_effort: skip "
                        "those that fail"
                    ),
                },
            },
            ["path", "edits"],
        ),
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        path, mode = args["path"], args.get("mode", "strict")
        before = await _content(path, runtime)

        def change() -> tuple[bytes, list[Block], list[dict[str, object]], int]:
            text = first = decoded(before)
            failed: list[dict[str, object]] = []
            count = work = 0
            for number, edit in enumerate(args["edits"], 1):
                work += len(text)
                if work > _MAX_WORK:
                    raise ToolError(
                        f"The edits of {path} are too many for its size. Split them into several calls.", kind="limit"
                    )
                try:
                    done = replaced(path, text, edit["old"], edit["new"], replace_all=edit.get("replace_all", False))
                except ToolError as error:
                    failed.append({"edit": number, "reason": error.text})
                    if mode == "best_effort":
                        continue
                    break
                text, count = done.text, count + done.count
            return encoded(text), blocks_between(lines_of(first), lines_of(text)), failed, count

        size = sum(len(edit["old"]) + len(edit["new"]) for edit in args["edits"])
        after, blocks, failed, count = await _aside(len(before) * len(args["edits"]) + size, change)
        if failed and (mode == "strict" or not count):
            said = " ".join(f"Edit {one['edit']}: {one['reason']}" for one in failed)
            raise ToolError(f"Nothing was changed. {said}", kind="invalid_input")
        answer: dict[str, object] = {"replacements": count}
        if failed:
            answer["failed"] = failed
            stopped = int(str(failed[0]["edit"])) if mode == "partial" else len(args["edits"])
            answer["not_tried"] = len(args["edits"]) - stopped
        return {**answer, **await _replace(path, before, after, blocks, runtime)}


class FilePatch(Tool):
    spec = file_changing(
        id="file.patch",
        description=(
            "Change a file that you have read by line numbers: replace or delete a range of lines, insert "
            "before a line, append. Line numbers refer to the file before this call. Applies all operations "
            "or none. Returns a unified diff."
        ),
        parameters=object_schema(
            {
                "path": FILE,
                "operations": {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": 500,
                    "items": object_schema(
                        {
                            "op": {"enum": ["replace", "insert", "append"], "description": "Kind of operation"},
                            "first_line": {
                                "type": "integer",
                                "minimum": 1,
                                "description": "First line to replace, counted from 1. Required for replace",
                            },
                            "last_line": {
                                "type": "integer",
                                "minimum": 1,
                                "description": "Last line to replace. Required for replace",
                            },
                            "line": {
                                "type": "integer",
                                "minimum": 1,
                                "description": "Line to insert before. Required for insert",
                            },
                            "content": {
                                "type": "string",
                                "description": "Complete lines. Empty deletes the range (replace only)",
                            },
                            "expect": {
                                "type": "string",
                                "description": (
                                    "Current text of the lines to replace, the line to insert before, or the last line; nothing is "
                                    "changed if it differs. Default: not checked"
                                ),
                            },
                        },
                        ["op", "content"],
                    ),
                    "description": "Operations in any order",
                },
            },
            ["path", "operations"],
        ),
    )

    def check(self, args: dict[str, Any]) -> None:
        check_operations(args["operations"])

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        path = args["path"]
        before = await _content(path, runtime)

        def change() -> tuple[bytes, list[Block]]:
            text = decoded(before)
            blocks = blocks_of_operations(text, args["operations"])
            return encoded(patched(text, blocks)), blocks

        size = sum(len(operation["content"]) for operation in args["operations"])
        after, blocks = await _aside(len(before) + size, change)
        return await _replace(path, before, after, blocks, runtime)


def check_differs(old: str, new: str) -> None:
    if old == new:
        raise ToolError("`old` and `new` are equal. Pass a `new` that differs.", kind="invalid_input")


@dataclass(frozen=True, slots=True)
class Replaced:
    """A text after a replacement.

    :param spans: the replaced places; None if they are too many
    """

    text: str
    count: int
    spans: Sequence[Span] | None


def replaced(path: str, text: str, old: str, new: str, *, replace_all: bool) -> Replaced:
    r"""Replace ``old`` by ``new`` in ``text``.

    A text with ``\r\n`` is matched in the form that ``read`` shows, and keeps its line ends.

    :raises ToolError: ``invalid_input`` if ``old`` is missing or occurs more than once, ``limit`` if the text becomes too
        large
    """
    check_differs(old, new)
    end = line_end(text)
    if end != "\n":
        new = with_line_end(new, end)
        if old not in text or "\r\n" not in old:
            old = with_line_end(old, end)
    elif old not in text and "\r\n" in text:
        old, new = with_line_end(old, "\r\n"), with_line_end(new, "\r\n")
    at = text.find(old)
    if at == -1 and (as_shown := _spans_as_shown(text, old, new, replace_all=replace_all)):
        return _spliced(text, as_shown)
    if at == -1:
        raise ToolError(f"`old` was not found in {path}. {why_missing(text, old)}", kind="invalid_input")
    if not replace_all:
        if text.find(old, at + 1) != -1:
            lines = places(text, old, 11)
            shown = ", ".join(map(str, lines[:10])) + (" and more" if len(lines) > 10 else "")
            raise ToolError(
                f"`old` occurs {_count(text, old)} times in {path}, at lines {shown}. Include more of the surrounding "
                "lines to make it unique, or set `replace_all`.",
                kind="invalid_input",
            )
        return _spliced(text, [Span(at, at + len(old), new)])
    count = text.count(old)
    if count > _MANY:
        check_size(len(text) + count * (len(new) - len(old)))
        return Replaced(replaced_everywhere(text, old, new), count, None)
    spans: list[Span] = []
    while at != -1:
        spans.append(Span(at, at + len(old), new))
        at = text.find(old, at + len(old))
    return _spliced(text, spans)


def _spliced(text: str, spans: Sequence[Span]) -> Replaced:
    check_size(len(text) + sum(len(span.new) - (span.end - span.start) for span in spans))
    return Replaced(spliced(text, spans), len(spans), spans)


def _spans_as_shown(text: str, old: str, new: str, *, replace_all: bool) -> list[Span]:
    """Find ``old`` in the form of ``text`` that the model saw, with invisible characters spelled out.

    Spelled-out characters in ``new`` become the original ones. The list is empty if ``old`` is missing or ambiguous.
    """
    if len(text) > _MAX_SHOWN:
        return []
    view = Shown(text)
    if not view.differs or old == new:
        return []
    spans: list[Span] = []
    at = view.shown.find(old)
    while at != -1 and len(spans) <= _MANY:
        if (span := view.span(at, at + len(old))) is not None:
            spans.append(Span(*span, view.written(new, *span)))
        at = view.shown.find(old, at + len(old))
    return spans if len(spans) == 1 or (replace_all and len(spans) <= _MANY) else []


def _count(text: str, part: str) -> int:
    """Return how often ``part`` occurs, including overlaps."""
    plain = text.count(part)
    return plain if plain > 1 else len(places(text, part))


async def _content(path: str, runtime: Runtime) -> bytes:
    try:
        content = await runtime.files.read_for_edit(path)
    except ToolError as error:
        raise await _explained(error, path, runtime) from None
    check_lines(path, content)
    return content


async def _replace(path: str, before: bytes, after: bytes, blocks: list[Block], runtime: Runtime) -> dict[str, object]:
    written = await runtime.files.write(path, after, over=before)
    diff = await _aside(len(before) + len(after), lambda: unified(written.path, lines_of(decoded(before)), blocks))
    return {"path": written.path, "size": written.size, **diff.fields()}


async def _aside(size: int, work: Callable[[], _T]) -> _T:
    return await asyncio.to_thread(work) if size > _THREAD_FROM else work()


async def _explained(error: ToolError, path: str, runtime: Runtime) -> ToolError:
    """Return a better error for a folder or a missing file, or ``error``."""
    if error.kind in ("denied", "conflict", "limit", "cancelled", "timeout"):
        return error
    try:
        stat = await runtime.files.stat(path)
    except ToolError:
        return await _missing(error, path, runtime)
    if stat.kind == "directory":
        return ToolError(
            f'{stat.path} is a folder. List its files with glob, e.g. {{"pattern": "*", "path": "{stat.path}"}}.',
            kind="invalid_input",
        )
    return error


async def _missing(error: ToolError, path: str, runtime: Runtime) -> ToolError:
    folder, name = posixpath.split(path.rstrip("/"))
    try:
        names = [posixpath.basename(entry.path) for entry in await runtime.files.list(folder or ".")]
    except ToolError:
        return error
    alike = nearest(name, names)
    if not alike:
        return error
    shown = ", ".join(posixpath.join(folder, one) for one in alike)
    return ToolError(f"File {path} does not exist. Similar names: {shown}.", kind=error.kind)
