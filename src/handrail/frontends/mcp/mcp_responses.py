"""Pages of a listing, and the results of calls in MCP's form."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from mcp.shared.exceptions import MCPError
from mcp_types import INVALID_PARAMS

from handrail.catalog.view import DISCOVERY_TOOLS
from handrail.contract.calls_and_results import Result
from handrail.contract.result_conversions import result_to_mcp_content
from handrail.frontends.mcp.client_resources import collect_result_artifacts
from handrail.frontends.mcp.tool_listing import (
    CALL_TOOL,
    PAGE_SIZE,
    collect_tool_guidance,
    get_output_schema,
    get_page_at_index,
)

if TYPE_CHECKING:
    from handrail.contract.tool.spec import ToolSpec
    from handrail.frontends.mcp.client_manager import McpClientState
    from handrail.kernel.kernel_interface import Kernel


def get_page_by_cursor(key: str, items: Sequence[Any], cursor: str | None) -> dict[str, Any]:
    """Return the page of a listing that a cursor names.

    :raises MCPError: for an invalid cursor
    """
    return get_page_at_index(key, items, 0 if cursor is None else _cursor_position(cursor))


def _cursor_position(cursor: str) -> int:
    try:
        place = int(base64.urlsafe_b64decode(cursor.encode()).decode("ascii"))
    except (ValueError, binascii.Error, UnicodeError):
        place = 0
    if place <= 0 or place % PAGE_SIZE:
        raise MCPError(INVALID_PARAMS, f"Invalid cursor {cursor[:50]!r}. Start again without a cursor.")
    return place


async def to_mcp_result(kernel: Kernel, client: McpClientState, tool_id: str, result: Result) -> dict[str, Any]:
    """Return a result in MCP's form.

    The result metadata are in ``_meta``. A truncated result also gets a note in its content, so that the model sees it.
    """
    data: object = result.data
    refs = collect_result_artifacts(result)
    stored = await client.outputs.read_artifacts(refs) if refs else {}
    uri = client.outputs.add_result_outputs(tool_id, result, refs) if refs or "output_path" in result.metadata else None
    shown = result
    if result.metadata.get("truncated") and isinstance(data, dict):
        cut = cast("dict[str, Any]", data)
        if cut.keys() <= {"head", "tail"} and isinstance(head := cut.get("head"), str):
            gap = f"\n[{result.metadata.get('omitted_bytes', 0)} bytes omitted]\n" if "tail" in cut else ""
            shown = Result(result.type, f"{head}{gap}{cut.get('tail', '')}", result.error_text, result.metadata)
        elif cut.keys() == {"head"}:
            shown = Result(result.type, cut["head"], result.error_text, result.metadata)
    wire = result_to_mcp_content(shown, stored)
    if result.metadata.get("truncated"):
        wire["content"].append({"type": "text", "text": _truncation_note(result, uri)})
    if uri is not None:
        wire["content"].append(
            {"type": "resource_link", "uri": uri, "name": uri.rpartition("/")[2], "mimeType": "text/plain"}
        )
    entry = kernel.generation.resolve_tool_name(tool_id)
    if entry is not None and entry.spec.output_schema is not None and result.ok:
        _enforce_output_schema(kernel, entry.spec, wire)
    if result.metadata:
        wire["_meta"] = {f"handrail/{key}": value for key, value in result.metadata.items()}
    return wire


def _enforce_output_schema(kernel: Kernel, spec: ToolSpec, wire: dict[str, Any]) -> None:
    """Turn a result that violates the tool's output schema into an error with its content.

    Clients reject such a result otherwise.
    """
    promise = get_output_schema(kernel, spec)
    if promise is None:
        return
    given = wire.get("structuredContent")
    problems = promise.list_problems(given) if isinstance(given, dict) else ["the result is not an object"]  # pyright: ignore[reportUnknownArgumentType]
    if problems:
        wire.pop("structuredContent", None)
        text = f"{spec.id} ran, but its result does not match its output schema: {'; '.join(problems)[:1_000]}"
        wire["content"].insert(0, {"type": "text", "text": text})
        wire["isError"] = True


def _truncation_note(result: Result, uri: str | None) -> str:
    about = result.metadata
    size = about.get("output_bytes")
    text = "[This is only the beginning" + (f" of {size:,} bytes" if isinstance(size, int) else "")
    if uri is not None:
        return f"{text}. The full output is in {about['output_path']} for the tool read, and in the resource {uri}.]"
    return f"{text}. The rest was not saved.]"


def add_input_schemas(kernel: Kernel, tool_id: str, result: Result) -> Result:
    """Return a finder's result with the input schema of each found tool.

    A client that lists tools only once has no other source of them.
    """
    given: object = result.data
    if tool_id not in DISCOVERY_TOOLS or not result.ok or not isinstance(given, dict):
        return result
    data = cast("dict[str, Any]", given)
    names: list[Any] = [*data.get("tools_added", ())]
    for one in data.get("tools", ()):
        names.append(cast("dict[str, Any]", one).get("id") if isinstance(one, dict) else None)
    known = [entry for name in names if isinstance(name, str) and (entry := kernel.generation.resolve_tool_name(name))]
    if not known:
        return result
    schemas = [{"name": entry.wire_name, "inputSchema": dict(entry.spec.parameters)} for entry in known]
    for one, entry in zip(schemas, known, strict=True):
        if entry.spec.guidance.strip() and entry.id not in collect_tool_guidance(kernel, "core"):
            one["guidance"] = entry.spec.guidance.strip()
    if data.get("message") and "tools_added" in data:
        schemas = [{**one, "description": entry.spec.description} for one, entry in zip(schemas, known, strict=True)]
    more = {"schemas": schemas, "how_to_call": f"{CALL_TOOL} with name and arguments"}
    return Result(result.type, {**data, **more}, result.error_text, result.metadata)


def unwrap_tool_call(arguments: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the name and the arguments of the call inside a call of the server's own tool.

    :raises MCPError: for invalid arguments
    """
    name, inner = arguments.get("name"), arguments.get("arguments", {})
    if not isinstance(name, str) or not isinstance(inner, Mapping) or not arguments.keys() <= {"name", "arguments"}:
        wanted = json.dumps({"name": "…", "arguments": {}}, ensure_ascii=False)
        raise MCPError(INVALID_PARAMS, f"Invalid arguments of {CALL_TOOL}. Expected {wanted}.")
    return name, cast("Mapping[str, Any]", inner)
