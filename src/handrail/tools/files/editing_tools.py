"""read, write, edit, multi_edit, file.patch: one file at a time, never over content that the model has not seen."""

from __future__ import annotations

import asyncio
import posixpath
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from handrail.contract.errors import ToolError, quote_excerpt
from handrail.contract.services.tool_runtime import Runtime
from handrail.contract.text.neutralisation import (
    OPEN,
    EscapedText,
    escape_terminal_controls,
    neutralise_text,
    restore_path,
)
from handrail.contract.tool.requires import FsRequires, Requires
from handrail.contract.tool.tool_ids_and_wire_names import nearest_names
from handrail.contract.tool.tool_protocol import Tool
from handrail.tools.files.document_text import read_notebook
from handrail.tools.files.lines_and_diffs import (
    LineReplacement,
    SpanReplacement,
    apply_span_replacements,
    check_line_count,
    check_text_size,
    compute_line_replacements,
    convert_line_ends,
    count_line_characters,
    decode_bytes_losslessly,
    detect_line_end,
    encode_text_losslessly,
    explain_missing_text,
    find_lines_of_text,
    find_replaced_lines,
    make_diff_of_replacements,
    make_diff_of_texts,
    replace_all_occurrences,
    replace_invalid_bytes,
    split_lines,
)
from handrail.tools.files.reading_and_search import get_max_answer_bytes, read_bytes, read_lines_or_image
from handrail.tools.tool_declarations import FILE, file_change_spec, file_read_spec, make_closed_object_schema

# Line operations on a text: replace a range, insert at a line, append. Pure functions.

_FIELDS = {
    "replace": ({"first_line", "last_line", "content"}, "first_line, last_line and content"),
    "insert": ({"line", "content"}, "line and content"),
    "append": ({"content"}, "content"),
}


def check_patch_operations(operations: Sequence[dict[str, Any]]) -> None:
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


def convert_patch_operations(text: str, operations: Sequence[dict[str, Any]]) -> list[LineReplacement]:
    """Return the changes of checked ``operations``. All line numbers refer to ``text``.

    New lines get the line end that most lines have. A text without a final line end stays without one.

    :raises ToolError: ``invalid_input`` if lines do not exist or overlap, ``conflict`` if ``expect`` does not match
    """
    lines = split_lines(text)
    end = detect_line_end(text)
    blocks = sorted(
        (_operation_block(number, operation, lines, end) for number, operation in enumerate(operations, 1)),
        key=lambda block: (block.first, block.last),
    )
    joined: list[LineReplacement] = []
    for block in blocks:
        if joined and block.first < joined[-1].last:
            raise ToolError(
                f"Two operations change line {block.first + 1}. Change each line in one operation only.",
                kind="invalid_input",
            )
        if joined and block.first == joined[-1].last:
            joined[-1] = LineReplacement(joined[-1].first, block.last, joined[-1].new + block.new)
        else:
            joined.append(block)
    if lines and not lines[-1].endswith("\n") and joined[-1].last == len(lines) and joined[-1].new:
        tail = joined[-1]
        if tail.first == len(lines):
            tail = LineReplacement(tail.first - 1, tail.last, (lines[-1] + end, *tail.new))
        joined[-1] = LineReplacement(tail.first, tail.last, (*tail.new[:-1], tail.new[-1].removesuffix(end)))
    return joined


def apply_line_replacements(text: str, blocks: Sequence[LineReplacement]) -> str:
    """Return ``text`` with ``blocks`` applied."""
    lines = split_lines(text)
    out: list[str] = []
    line = at = 0
    for block in blocks:
        start = at + count_line_characters(lines, line, block.first)
        out += (text[at:start], *block.new)
        line, at = block.last, start + count_line_characters(lines, block.first, block.last)
    return "".join((*out, text[at:]))


def _operation_block(number: int, operation: dict[str, Any], lines: Sequence[str], end: str) -> LineReplacement:
    op, content = operation["op"], operation["content"]
    total = len(lines)
    if OPEN in content:
        content = _restore_hidden_characters(content, operation, lines)
    new = tuple(f"{line}{end}" for line in _content_lines(content))
    if op == "replace":
        first, last = operation["first_line"], operation["last_line"]
        if not first <= last <= total:
            raise ToolError(
                f"The range of operation {number} is invalid: lines {first} to {last}. The file has {total} lines. "
                "Correct the numbers.",
                kind="invalid_input",
            )
        _check_old_lines(number, operation, lines[first - 1 : last], f"lines {first} to {last}")
        return LineReplacement(first - 1, last, new)
    if op == "insert":
        line = operation["line"]
        if line > total + 1:
            raise ToolError(
                f"Operation {number} inserts before line {line}, but the file has {total} lines. "
                f"Use at most {total + 1}, or op 'append'.",
                kind="invalid_input",
            )
        _check_old_lines(number, operation, lines[line - 1 : line], f"line {line}")
        return LineReplacement(line - 1, line - 1, new)
    _check_old_lines(number, operation, lines[-1:], "the last line")
    return LineReplacement(total, total, new)


def _restore_hidden_characters(content: str, operation: dict[str, Any], lines: Sequence[str]) -> str:
    """Return ``content`` with the original characters that the model copied in spelled-out form."""
    first = operation.get("first_line") or operation.get("line") or len(lines)
    around = "".join(lines[max(0, first - 2) : operation.get("last_line", first) + 1])
    return EscapedText(around).restore_escapes_in_edit(content, 0, len(around))


def _content_lines(content: str) -> list[str]:
    plain = content.replace("\r\n", "\n")
    return plain.removesuffix("\n").split("\n") if plain else []


def _check_old_lines(number: int, operation: dict[str, Any], have: Sequence[str], where: str) -> None:
    if "expect" not in operation:
        return
    want = _content_lines(operation["expect"])
    found = [line.removesuffix("\n").removesuffix("\r") for line in have]
    if want != found and want != neutralise_text("\n".join(found)).split("\n"):
        shown = replace_invalid_bytes("\n".join(found))
        raise ToolError(
            f"`expect` of operation {number} does not match {where}: {quote_excerpt(shown, 500)}. Nothing was changed. "
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


class ReadTool(Tool):
    spec = file_read_spec(
        id="read",
        description=(
            "Read a text file by lines, a PDF by pages, a Jupyter notebook by cells, a byte range of any file, or an image. "
            "Returns text without line numbers, up to 200 KB unless the operator set another limit; `next` is the offset "
            "to continue from, or null at the end. Lines are cut at 2,000 characters. To list a folder use glob."
        ),
        parameters=make_closed_object_schema(
            {
                "path": FILE,
                "offset": {
                    "type": "integer",
                    "description": (
                        "First line, page or cell, counted from 1, or first byte, counted from 0. -20 starts 20 before the end. "
                        "Default: the start"
                    ),
                },
                "limit": {
                    "type": "integer",
                    "minimum": 1,
                    "description": "Maximum number of lines, pages, cells or bytes. Default: as many as fit",
                },
                "unit": {
                    "enum": ["lines", "bytes"],
                    "description": (
                        "Unit of offset and limit. lines: a notebook as JSON text. Default: pages of a PDF, cells of a "
                        "notebook, else lines"
                    ),
                },
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
                return await read_bytes(runtime, path, offset or 0, args.get("limit"))
            if "unit" not in args and path.lower().endswith(".ipynb"):
                most = get_max_answer_bytes(runtime)
                cells = await read_notebook(runtime, path, offset or 1, args.get("limit"), most)
                if cells is not None:
                    return cells
            return await read_lines_or_image(runtime, path, offset or 1, args.get("limit"))
        except ToolError as error:
            raise await _explain_error(error, path, runtime) from None


class WriteTool(Tool):
    spec = file_change_spec(
        id="write",
        description=(
            "Create a file, or overwrite one that you have read in this session. Send the complete content. "
            "Creates parent folders. To change part of a file use edit. Returns a unified diff."
        ),
        parameters=make_closed_object_schema(
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
        written = await runtime.files.write(args["path"], encode_text_losslessly(content))

        before = written.previous_content or b""
        diff = await _run_in_thread_if_large(
            len(content) + len(before),
            lambda: make_diff_of_texts(
                written.path, decode_bytes_losslessly(before), content, created=written.previous_content is None
            ),
        )
        return {"path": written.path, "created": written.created, "size": written.size, **diff.to_data()}


class EditTool(Tool):
    spec = file_change_spec(
        id="edit",
        description=(
            "Replace exact text in a file that you have read in this session. `old` must occur exactly once: "
            "include surrounding lines to make it unique, or set replace_all. Returns a unified diff."
        ),
        parameters=make_closed_object_schema(
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
        before = await _read_file(path, runtime)

        def change() -> tuple[bytes, list[LineReplacement], int]:
            text = decode_bytes_losslessly(before)
            done = replace_exact_text(path, text, args["old"], args["new"], replace_all=args.get("replace_all", False))
            if done.spans is None:
                return (
                    encode_text_losslessly(done.text),
                    compute_line_replacements(split_lines(text), split_lines(done.text)),
                    done.count,
                )
            return encode_text_losslessly(done.text), find_replaced_lines(text, done.spans), done.count

        after, blocks, count = await _run_in_thread_if_large(len(before) + len(args["old"]) + len(args["new"]), change)
        return {"replacements": count, **await _replace_file(path, before, after, blocks, runtime)}


class MultiEditTool(Tool):
    spec = file_change_spec(
        id="multi_edit",
        description=(
            "Apply several edits (find and replace) to one file that you have read in this session, in "
            "order, in one call. Returns which failed and a unified diff."
        ),
        parameters=make_closed_object_schema(
            {
                "path": FILE,
                "edits": {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": 500,
                    "items": make_closed_object_schema(
                        {name: EditTool.spec.parameters["properties"][name] for name in ("old", "new", "replace_all")},
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
        before = await _read_file(path, runtime)

        def change() -> tuple[bytes, list[LineReplacement], list[dict[str, object]], int]:
            text = first = decode_bytes_losslessly(before)
            failed: list[dict[str, object]] = []
            count = work = 0
            for number, edit in enumerate(args["edits"], 1):
                work += len(text)
                if work > _MAX_WORK:
                    raise ToolError(
                        f"The edits of {path} are too many for its size. Split them into several calls.", kind="limit"
                    )
                try:
                    done = replace_exact_text(
                        path, text, edit["old"], edit["new"], replace_all=edit.get("replace_all", False)
                    )
                except ToolError as error:
                    failed.append({"edit": number, "reason": error.text})
                    if mode == "best_effort":
                        continue
                    break
                text, count = done.text, count + done.count
            return (
                encode_text_losslessly(text),
                compute_line_replacements(split_lines(first), split_lines(text)),
                failed,
                count,
            )

        size = sum(len(edit["old"]) + len(edit["new"]) for edit in args["edits"])
        after, blocks, failed, count = await _run_in_thread_if_large(len(before) * len(args["edits"]) + size, change)
        if failed and (mode == "strict" or not count):
            message = " ".join(f"Edit {one['edit']}: {one['reason']}" for one in failed)
            raise ToolError(f"Nothing was changed. {message}", kind="invalid_input")
        answer: dict[str, object] = {"replacements": count}
        if failed:
            answer["failed"] = failed
            stopped = int(str(failed[0]["edit"])) if mode == "partial" else len(args["edits"])
            answer["not_applied"] = len(args["edits"]) - stopped
        return {**answer, **await _replace_file(path, before, after, blocks, runtime)}


class FilePatchTool(Tool):
    spec = file_change_spec(
        id="file.patch",
        description=(
            "Change a file that you have read by line numbers: replace or delete a range of lines, insert "
            "before a line, append. Line numbers refer to the file before this call. Applies all operations "
            "or none. Returns a unified diff."
        ),
        parameters=make_closed_object_schema(
            {
                "path": FILE,
                "operations": {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": 500,
                    "items": make_closed_object_schema(
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
        check_patch_operations(args["operations"])

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        path = args["path"]
        before = await _read_file(path, runtime)

        def change() -> tuple[bytes, list[LineReplacement]]:
            text = decode_bytes_losslessly(before)
            blocks = convert_patch_operations(text, args["operations"])
            return encode_text_losslessly(apply_line_replacements(text, blocks)), blocks

        size = sum(len(operation["content"]) for operation in args["operations"])
        after, blocks = await _run_in_thread_if_large(len(before) + size, change)
        return await _replace_file(path, before, after, blocks, runtime)


def check_differs(old: str, new: str) -> None:
    if old == new:
        raise ToolError("`old` and `new` are equal. Pass a `new` that differs.", kind="invalid_input")


@dataclass(frozen=True, slots=True)
class ReplacedText:
    """A text after a replacement.

    :param spans: the replaced places; None if they are too many
    """

    text: str
    count: int
    spans: Sequence[SpanReplacement] | None


def replace_exact_text(path: str, text: str, old: str, new: str, *, replace_all: bool) -> ReplacedText:
    r"""Replace ``old`` by ``new`` in ``text``.

    A text with ``\r\n`` is matched in the form that ``read`` shows, and keeps its line ends.

    :raises ToolError: ``invalid_input`` if ``old`` is missing or occurs more than once, ``limit`` if the text becomes too
        large
    """
    check_differs(old, new)
    end = detect_line_end(text)
    if end != "\n":
        new = convert_line_ends(new, end)
        if old not in text or "\r\n" not in old:
            old = convert_line_ends(old, end)
    elif old not in text and "\r\n" in text:
        old, new = convert_line_ends(old, "\r\n"), convert_line_ends(new, "\r\n")
    at = text.find(old)
    if at == -1 and (as_shown := _find_spans_as_shown(text, old, new, replace_all=replace_all)):
        return _replace_spans(text, as_shown)
    if at == -1:
        raise ToolError(f"`old` was not found in {path}. {explain_missing_text(text, old)}", kind="invalid_input")
    if not replace_all:
        if text.find(old, at + 1) != -1:
            lines = find_lines_of_text(text, old, 11)
            shown = ", ".join(map(str, lines[:10])) + (" and more" if len(lines) > 10 else "")
            raise ToolError(
                f"`old` occurs {_count_occurrences(text, old)} times in {path}, at lines {shown}. Include more of the surrounding "
                "lines to make it unique, or set `replace_all`.",
                kind="invalid_input",
            )
        return _replace_spans(text, [SpanReplacement(at, at + len(old), new)])
    count = text.count(old)
    if count > _MANY:
        check_text_size(len(text) + count * (len(new) - len(old)))
        return ReplacedText(replace_all_occurrences(text, old, new), count, None)
    spans: list[SpanReplacement] = []
    while at != -1:
        spans.append(SpanReplacement(at, at + len(old), new))
        at = text.find(old, at + len(old))
    return _replace_spans(text, spans)


def _replace_spans(text: str, spans: Sequence[SpanReplacement]) -> ReplacedText:
    check_text_size(len(text) + sum(len(span.new) - (span.end - span.start) for span in spans))
    return ReplacedText(apply_span_replacements(text, spans), len(spans), spans)


def _find_spans_as_shown(text: str, old: str, new: str, *, replace_all: bool) -> list[SpanReplacement]:
    """Find ``old`` in the form of ``text`` that the model saw, with invisible characters spelled out.

    Spelled-out characters in ``new`` become the original ones. The list is empty if ``old`` is missing or ambiguous.
    """
    if len(text) > _MAX_SHOWN:
        return []
    view = EscapedText(text)
    if not view.has_escapes or old == new:
        return []
    spans: list[SpanReplacement] = []
    at = view.shown.find(old)
    while at != -1 and len(spans) <= _MANY:
        if (span := view.original_span(at, at + len(old))) is not None:
            spans.append(SpanReplacement(*span, view.restore_escapes_in_edit(new, *span)))
        at = view.shown.find(old, at + len(old))
    return spans if len(spans) == 1 or (replace_all and len(spans) <= _MANY) else []


def _count_occurrences(text: str, part: str) -> int:
    """Return how often ``part`` occurs, including overlaps."""
    plain = text.count(part)
    return plain if plain > 1 else len(find_lines_of_text(text, part))


async def _read_file(path: str, runtime: Runtime) -> bytes:
    try:
        content = await runtime.files.read_for_edit(path)
    except ToolError as error:
        raise await _explain_error(error, path, runtime) from None
    check_line_count(path, content)
    return content


async def _replace_file(
    path: str, before: bytes, after: bytes, blocks: list[LineReplacement], runtime: Runtime
) -> dict[str, object]:
    written = await runtime.files.write(path, after, expected=before)
    diff = await _run_in_thread_if_large(
        len(before) + len(after),
        lambda: make_diff_of_replacements(written.path, split_lines(decode_bytes_losslessly(before)), blocks),
    )
    return {"path": written.path, "size": written.size, **diff.to_data()}


async def _run_in_thread_if_large(size: int, work: Callable[[], _T]) -> _T:
    return await asyncio.to_thread(work) if size > _THREAD_FROM else work()


async def _explain_error(error: ToolError, path: str, runtime: Runtime) -> ToolError:
    """Return a better error for a folder or a missing file, or ``error``."""
    if error.kind in ("denied", "conflict", "limit", "cancelled", "timeout"):
        return error
    try:
        stat = await runtime.files.stat(path)
    except ToolError:
        return await _missing_file_error(error, path, runtime)
    if stat.kind == "directory":
        return ToolError(
            f'{stat.path} is a folder. List its files with glob, e.g. {{"pattern": "*", "path": "{stat.path}"}}.',
            kind="invalid_input",
        )
    return error


async def _missing_file_error(error: ToolError, path: str, runtime: Runtime) -> ToolError:
    folder, name = posixpath.split(restore_path(path).rstrip("/"))
    try:
        names = [posixpath.basename(entry.path) for entry in await runtime.files.list(folder or ".")]
    except ToolError:
        return error
    alike = nearest_names(escape_terminal_controls(name), names)
    if not alike:
        return error
    folder = escape_terminal_controls(folder)
    shown = ", ".join(posixpath.join(folder, one) for one in alike)
    return ToolError(
        f"File {posixpath.join(folder, escape_terminal_controls(name))} does not exist. Similar names: {shown}. Use one of these, or create the file with write.",
        kind=error.kind,
    )
