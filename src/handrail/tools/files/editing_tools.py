"""read, write, edit, multi_edit, file.patch: one file at a time, never over content that the model has not seen."""

from __future__ import annotations

import asyncio
import posixpath
from collections.abc import Callable
from typing import Any, TypeVar

from handrail.contract.errors import ToolError
from handrail.contract.services.tool_runtime import Runtime
from handrail.contract.struct import Struct
from handrail.contract.text.neutralisation import EscapedText, escape_terminal_controls, unescape_displayed_path
from handrail.contract.text.text_encodings import (
    UTF_8,
    DecodedFileText,
    decode_file_text,
    replace_invalid_bytes,
    strip_byte_order_mark,
)
from handrail.contract.tool.requires import Requires
from handrail.contract.tool.tool_ids_and_wire_names import nearest_names
from handrail.contract.tool.tool_protocol import Tool
from handrail.tools.files.document_text import read_notebook_cells
from handrail.tools.files.lines_and_diffs import (
    MAX_TEXT,
    LineReplacement,
    UnifiedDiff,
    check_line_count,
    compute_line_replacements,
    describe_line_end_change,
    detect_line_separator,
    find_replaced_lines,
    make_diff_of_replacements,
    make_diff_of_texts,
    split_lines,
)
from handrail.tools.files.reading_and_search import compute_max_result_bytes, read_bytes, read_lines_or_image
from handrail.tools.files.text_changes import (
    EscapeWarnings,
    adapt_content_to_original,
    apply_line_replacements,
    check_patch_operations,
    check_replacement_differs,
    convert_patch_operations,
    replace_exact_text,
)
from handrail.tools.tool_declarations import (
    FILE,
    WORKSPACE,
    file_change_spec,
    file_read_spec,
    make_closed_object_schema,
)

_T = TypeVar("_T")

_THREAD_FROM = 4 * 1024
"""The characters from which on texts are compared in a thread, so that other calls continue."""
_MAX_WORK = 512 * 1024 * 1024
"""The most characters that several edits may process together."""


class ReadTool(Tool):
    spec = file_read_spec(
        id="read",
        description=(
            "Read a text file by lines, a PDF by pages, a Jupyter notebook by cells with their images, a byte range of any file, or an "
            "image. "
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
                most = compute_max_result_bytes(runtime)
                cells = await read_notebook_cells(runtime, path, offset or 1, args.get("limit"), most)
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
            "Creates parent folders. An existing file keeps its encoding and line ends. To change part of a file use edit. "
            "Returns a unified diff."
        ),
        parameters=make_closed_object_schema(
            {"path": FILE, "content": {"type": "string", "description": "Complete new content"}},
            ["path", "content"],
        ),
        requires=Requires(fs=WORKSPACE),
        targets={"fs.write": "{path}"},
        idempotent=True,
        tier="core",
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        path, content, notes = args["path"], args["content"], EscapeWarnings()
        before = await try_read_for_edit(path, runtime)
        if before is None:
            notes.take(EscapedText("").restore_copied_escapes(content))
            written = await runtime.files.write(path, UTF_8.encode(content))
            file = decode_file_text(written.previous_content or b"")
            diff = await _make_diff(written.path, file, content, created=written.previous_content is None)
            return {
                "path": written.path,
                "created": written.created,
                "size": written.size,
                **diff,
                **notes.to_data(),
            }

        def change() -> tuple[DecodedFileText, str, bytes]:
            file = decode_file_text(before)
            text = adapt_content_to_original(file.text, strip_byte_order_mark(content, file.encoding), notes)
            return file, text, file.encoding.encode(text)

        file, text, after = await _run_in_thread_if_large(len(before) + len(content), change)
        written = await runtime.files.write(path, after, expected=before)
        diff = await _make_diff(written.path, file, text)
        return {
            "path": written.path,
            "created": False,
            "size": written.size,
            **diff,
            **describe_text_format(file, text, notes),
        }


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
        check_replacement_differs(args["old"], args["new"])

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        path, notes = args["path"], EscapeWarnings()
        before = await _read_file(path, runtime)

        def change() -> tuple[_ChangedFile, int]:
            file = decode_file_text(before)
            old, new = (strip_byte_order_mark(args[name], file.encoding) for name in ("old", "new"))
            done = replace_exact_text(
                path, file.text, old, new, replace_all=args.get("replace_all", False), notes=notes
            )
            if done.spans is None:
                return _ChangedFile.compare(file, done.text), done.count
            return _ChangedFile.make(file, done.text, find_replaced_lines(file.text, done.spans)), done.count

        size = len(before) + len(args["old"]) + len(args["new"])
        changed, count = await _run_in_thread_if_large(size, change)
        return {"replacements": count, **await _replace_file(path, changed, notes, runtime)}


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
        path, mode, notes = args["path"], args.get("mode", "strict"), EscapeWarnings()
        before = await _read_file(path, runtime)

        def change() -> tuple[_ChangedFile, list[dict[str, object]], int]:
            file = decode_file_text(before)
            text = file.text
            failed: list[dict[str, object]] = []
            count = work = 0
            for number, edit in enumerate(args["edits"], 1):
                work += len(text)
                if work > _MAX_WORK:
                    raise ToolError(f"The edits of {path} are too many for its size. Use several calls.", kind="limit")
                try:
                    old, new = (strip_byte_order_mark(edit[name], file.encoding) for name in ("old", "new"))
                    replace_all = edit.get("replace_all", False)
                    done = replace_exact_text(path, text, old, new, replace_all=replace_all, notes=notes)
                    if not file.encoding.is_utf8:  # an edit that cannot be written fails by itself
                        file.encoding.encode("".join(span.new for span in done.spans or ()))
                except ToolError as error:
                    failed.append({"edit": number, "reason": error.text})
                    if mode == "best_effort":
                        continue
                    break
                text, count = done.text, count + done.count
            return _ChangedFile.compare(file, text), failed, count

        size = sum(len(edit["old"]) + len(edit["new"]) for edit in args["edits"])
        changed, failed, count = await _run_in_thread_if_large(len(before) * len(args["edits"]) + size, change)
        if failed and (mode == "strict" or not count):
            message = " ".join(f"Edit {one['edit']}: {one['reason']}" for one in failed)
            raise ToolError(f"Nothing was changed. {message}", kind="invalid_input")
        answer: dict[str, object] = {"replacements": count}
        if failed:
            answer["failed"] = failed
            stopped = int(str(failed[0]["edit"])) if mode == "partial" else len(args["edits"])
            answer["not_applied"] = len(args["edits"]) - stopped
        return {**answer, **await _replace_file(path, changed, notes, runtime)}


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
        path, notes = args["path"], EscapeWarnings()
        before = await _read_file(path, runtime)

        def change() -> _ChangedFile:
            file = decode_file_text(before)
            operations: list[dict[str, Any]] = [
                {
                    key: strip_byte_order_mark(one, file.encoding) if isinstance(one, str) else one
                    for key, one in operation.items()
                }
                for operation in args["operations"]
            ]
            blocks = convert_patch_operations(file.text, operations, notes)
            return _ChangedFile.make(file, apply_line_replacements(file.text, blocks), blocks)

        size = sum(len(operation["content"]) for operation in args["operations"])
        changed = await _run_in_thread_if_large(len(before) + size, change)
        return await _replace_file(path, changed, notes, runtime)


class _ChangedFile(Struct, frozen=True):
    """A file with its new text.

    :param after: the new bytes
    """

    file: DecodedFileText
    text: str
    after: bytes
    blocks: list[LineReplacement]

    @staticmethod
    def make(file: DecodedFileText, text: str, blocks: list[LineReplacement]) -> _ChangedFile:
        return _ChangedFile(file, text, file.encoding.encode(text), blocks)

    @staticmethod
    def compare(file: DecodedFileText, text: str) -> _ChangedFile:
        """Find the changed lines by comparison."""
        mark = detect_line_separator(file.text)
        blocks = compute_line_replacements(split_lines(file.text, mark), split_lines(text, mark))
        return _ChangedFile.make(file, text, blocks)

    def make_diff(self, path: str) -> UnifiedDiff:
        mark = detect_line_separator(self.file.text)
        return make_diff_of_replacements(path, split_lines(self.file.text, mark), self.blocks, mark=mark)


def describe_text_format(file: DecodedFileText, text: str, notes: EscapeWarnings) -> dict[str, object]:
    """Return what is special about a changed file: its encoding, its line ends, escapes and invalid bytes."""
    found: dict[str, object] = {}
    if file.encoding != UTF_8:
        found["encoding"] = file.encoding.label
    if (ends := describe_line_end_change(file.text, text)) is not None:
        found["line_ends"] = ends
    lost = text.count("\ufffd") - file.text.count("\ufffd")
    if lost > 0 and replace_invalid_bytes(file.text) != file.text:
        found["invalid_bytes"] = f"U+FFFD was written {lost} times. The file had bytes there that are not text."
    return found | notes.to_data()


async def try_read_for_edit(path: str, runtime: Runtime, *, max_bytes: int = MAX_TEXT) -> bytes | None:
    """Return the content of a file that may be replaced; None if there is none."""
    try:
        return await runtime.files.read_for_edit(path, max_bytes=max_bytes)
    except ToolError:
        return None  # the write itself reports why


async def _read_file(path: str, runtime: Runtime) -> bytes:
    try:
        content = await runtime.files.read_for_edit(path)
    except ToolError as error:
        raise await _explain_error(error, path, runtime) from None
    check_line_count(path, content)
    return content


async def _replace_file(path: str, changed: _ChangedFile, notes: EscapeWarnings, runtime: Runtime) -> dict[str, object]:
    before = changed.file.data
    written = await runtime.files.write(path, changed.after, expected=before)
    diff = await _run_in_thread_if_large(len(before) + len(changed.after), lambda: changed.make_diff(written.path))
    return {
        "path": written.path,
        "size": written.size,
        **diff.to_data(),
        **describe_text_format(changed.file, changed.text, notes),
    }


async def _make_diff(path: str, file: DecodedFileText, text: str, *, created: bool = False) -> dict[str, object]:
    size = len(file.text) + len(text)
    diff = await _run_in_thread_if_large(size, lambda: make_diff_of_texts(path, file.text, text, created=created))
    return diff.to_data()


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
    folder, name = posixpath.split(unescape_displayed_path(path).rstrip("/"))
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
