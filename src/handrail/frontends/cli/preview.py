"""What an edit would do to the file as it is now, for whoever has to say yes to it. Nothing is written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from handrail.contract.approvals import ApprovalRequest
from handrail.contract.errors import HandrailError, ToolError

MAX_PREVIEW_BYTES = 4 * 1024 * 1024
_EDITS = frozenset({"edit", "write", "file.patch"})


async def preview(request: ApprovalRequest, workspace: str) -> str | None:
    """A unified diff, or a sentence on why the call would fail as things are; None for calls that are no edits.

    The diff shows at most so many lines and says how many it leaves out: the arguments beside it are whole.
    """
    path = request.arguments.get("path")
    if request.tool_id not in _EDITS or not isinstance(path, str):
        return None
    try:
        before = await _content(path, workspace)
        return _difference(request.tool_id, path, before, request.arguments)
    except HandrailError as error:
        return f"as the file is now, this would fail: {error}"
    except (KeyError, TypeError, ValueError):  # arguments that were changed by hand since
        return None


async def _content(path: str, workspace: str) -> bytes | None:
    """What is in the file, found as the tools find it; None where there is none."""
    from handrail.runtime.files.files import RootedFiles, SeenFiles
    from handrail.runtime.files.roots import Roots

    files = RootedFiles(Roots(workspace), SeenFiles(), lambda _capability, _target: None)
    try:
        await files.stat(path)
    except ToolError as error:
        if error.kind == "denied":
            raise
        return None
    found = await files.read_bytes(path, max_bytes=MAX_PREVIEW_BYTES + 1)
    if found.size > MAX_PREVIEW_BYTES:
        raise ToolError(f"{path} has {found.size:,} bytes, too many to compare here", kind="limit")
    return found.data


def _difference(tool_id: str, path: str, before: bytes | None, arguments: Mapping[str, Any]) -> str:
    from handrail.tools.files.files import replaced
    from handrail.tools.files.patching import blocks_of_operations
    from handrail.tools.files.text import blocks_between, blocks_of_spans, decoded, lines_of, unified

    if tool_id == "write":
        lines = lines_of(decoded(before or b""))
        blocks = blocks_between(lines, lines_of(arguments["content"]))
        return unified(path, lines, blocks, created=before is None).text or "the file would stay as it is"
    if before is None:
        raise ToolError(f"there is no file {path}", kind="invalid_input")
    text = decoded(before)
    if tool_id == "edit":
        replace_all = bool(arguments.get("replace_all", False))
        done = replaced(path, text, arguments["old"], arguments["new"], replace_all=replace_all)
        if done.spans is None:
            return unified(path, lines_of(text), blocks_between(lines_of(text), lines_of(done.text))).text
        return unified(path, lines_of(text), blocks_of_spans(text, done.spans)).text
    return unified(path, lines_of(text), blocks_of_operations(text, arguments["operations"])).text
