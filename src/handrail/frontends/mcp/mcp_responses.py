"""Pages of a listing, and the results of calls in MCP's form."""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from handrail.catalog.view import CORE_CATEGORY, DISCOVERY_TOOLS, get_view
from handrail.contract.calls_and_results import Result
from handrail.contract.result_conversions import convert_result_to_mcp_content
from handrail.contract.text.strict_json import InvalidJsonTextError, parse_arguments
from handrail.frontends.mcp.client_resources import collect_result_artifacts
from handrail.frontends.mcp.tool_listing import (
    CALL_TOOL,
    PAGE_SIZE,
    collect_tool_guidance,
    get_output_schema,
    paginate_from_index,
    remove_nonstandard_formats,
)

if TYPE_CHECKING:
    from handrail.contract.tool.spec import ToolSpec
    from handrail.frontends.mcp.client_manager import McpClientState
    from handrail.frontends.mcp.tool_listing import Discovery
    from handrail.kernel.kernel_interface import Kernel


_DOTTED_ID = re.compile(r"\b[A-Za-z][\w-]*(?:\.[\w-]+)+")


def paginate_by_cursor(key: str, items: Sequence[Any], cursor: str | None) -> dict[str, Any]:
    """Return the page of a listing that a cursor names.

    :raises MCPError: for an invalid cursor
    """
    return paginate_from_index(key, items, 0 if cursor is None else _cursor_position(cursor))


def _cursor_position(cursor: str) -> int:
    try:
        place = int(base64.urlsafe_b64decode(cursor.encode()).decode("ascii"))
    except (ValueError, binascii.Error, UnicodeError):
        place = 0
    if place <= 0 or place % PAGE_SIZE:
        from mcp.shared.exceptions import MCPError  # the SDK is loaded after the first answers
        from mcp_types import INVALID_PARAMS

        raise MCPError(INVALID_PARAMS, f"Invalid cursor {cursor[:50]!r}. Repeat the request without a cursor.")
    return place


async def to_mcp_result(kernel: Kernel, client: McpClientState, tool_id: str, result: Result) -> dict[str, Any]:
    """Return a result in MCP's form; see :func:`to_mcp_result_with_outputs`."""
    refs = collect_result_artifacts(result)
    stored = await client.outputs.read_artifacts(refs) if refs else {}
    uri = client.outputs.add_result_outputs(tool_id, result, refs) if has_stored_output(result) else None
    return to_mcp_result_with_outputs(kernel, tool_id, result, stored, uri)


def has_stored_output(result: Result) -> bool:
    """Return whether a result refers to artifacts or an output file, which the client can read as resources."""
    return bool(collect_result_artifacts(result)) or "output_path" in result.metadata


def to_mcp_result_with_outputs(
    kernel: Kernel, tool_id: str, result: Result, stored: Mapping[str, bytes], uri: str | None
) -> dict[str, Any]:
    """Return a result in MCP's form.

    The result metadata are in ``_meta``. A truncated result also gets a note in its content, so that the model sees it.

    :param stored: the content of its artifacts
    :param uri: the resource with its output, or None
    """
    data: object = result.data
    shown = result
    if result.metadata.get("truncated") and isinstance(data, dict):
        cut = cast("dict[str, Any]", data)
        if cut.keys() <= {"head", "tail"} and isinstance(head := cut.get("head"), str):
            gap = f"\n[{result.metadata.get('omitted_bytes', 0)} bytes omitted]\n" if "tail" in cut else ""
            shown = Result(result.type, f"{head}{gap}{cut.get('tail', '')}", result.error_text, result.metadata)
        elif cut.keys() == {"head"}:
            shown = Result(result.type, cut["head"], result.error_text, result.metadata)
    wire = convert_result_to_mcp_content(shown, stored)
    if result.metadata.get("truncated"):
        wire["content"].append({"type": "text", "text": _truncation_note(result, uri)})
    if isinstance(note := result.metadata.get("scratch_note"), str):
        wire["content"].append({"type": "text", "text": f"[{note}]"})
    if uri is not None:
        wire["content"].append(
            {"type": "resource_link", "uri": uri, "name": uri.rpartition("/")[2], "mimeType": "text/plain"}
        )
    entry = kernel.generation.resolve_tool_name(tool_id)
    if entry is not None:
        _enforce_output_schema(kernel, entry.spec, wire, result)
    if result.metadata:
        from_server: dict[str, Any] = result.metadata.get("server_meta", {})
        own = {f"handrail/{key}": value for key, value in result.metadata.items() if key != "server_meta"}
        wire["_meta"] = {**from_server, **own}
    return wire


def _enforce_output_schema(kernel: Kernel, spec: ToolSpec, wire: dict[str, Any], result: Result) -> None:
    """Make the structured content match the tool's output schema, because clients reject a result otherwise.

    A result that violates it becomes an error with its content. An error needs no structured content.
    """
    promise = get_output_schema(kernel, spec)
    if promise is None:
        return
    if result.ok and result.metadata.get("truncated"):
        path = {"output_path": result.metadata["output_path"]} if "output_path" in result.metadata else {}
        wire.setdefault("structuredContent", {"truncated": True, **path})
    given = wire.get("structuredContent")
    problems = promise.list_problems(given) if isinstance(given, dict) else ["the result is not an object"]  # pyright: ignore[reportUnknownArgumentType]
    if problems:
        wire.pop("structuredContent", None)
    if problems and result.ok:
        text = f"{spec.id} ran, but its result does not match its output schema: {'; '.join(problems)[:1_000]}"
        if result.metadata.get("truncated"):
            text = f"{spec.id} ran, but its result is too long to match its output schema. Request less."
        wire["content"].insert(0, {"type": "text", "text": text})
        wire["isError"] = True


def _truncation_note(result: Result, uri: str | None) -> str:
    about = result.metadata
    size = about.get("output_bytes")
    text = "[This is only the beginning" + (f" of {size:,} bytes" if isinstance(size, int) else "")
    if uri is not None:
        return f"{text}. The full output is in {about['output_path']} for the tool read, and in the resource {uri}.]"
    return f"{text}. The rest was not saved.]"


def adapt_tool_search_result(kernel: Kernel, discovery: Discovery, tool_id: str, result: Result) -> Result:
    """Return a finder's result with the names that a client calls.

    If the listing has not all tools, add the input schema of each found tool: a client that lists tools only once has no
    other source of them.
    """
    given: object = result.data
    if tool_id not in DISCOVERY_TOOLS or not result.ok or not isinstance(given, dict):
        return result
    data = cast("dict[str, Any]", given)
    found: list[Any] = [*data.get("tools_added", ())]
    if "loaded" in data and not found:
        found += _list_loaded_before(kernel, data["loaded"])
    found += [one.get("id") for one in data.get("tools", ())]
    shown = _use_wire_names(kernel, data)
    known = [entry for name in found if isinstance(name, str) and (entry := kernel.generation.resolve_tool_name(name))]
    if known and discovery == "core":
        schemas: list[dict[str, Any]] = []
        for entry in known:
            one: dict[str, Any] = {"name": entry.wire_name}
            if "loaded" in data:
                one["description"] = entry.spec.description
            one["inputSchema"] = remove_nonstandard_formats(entry.spec.parameters)
            if entry.spec.guidance.strip() and entry.id not in collect_tool_guidance(kernel, "core"):
                one["guidance"] = entry.spec.guidance.strip()
            schemas.append(one)
        shown |= {
            "schemas": schemas,
            "how_to_call": f"By its name if you have it as a tool, else {CALL_TOOL} with name and arguments",
        }
    return Result(result.type, shown, result.error_text, result.metadata)


def _list_loaded_before(kernel: Kernel, name: object) -> Sequence[str]:
    """Return the tools of a category that was loaded before, or a tool that was."""
    if not isinstance(name, str):
        return ()
    view = get_view(
        kernel.generation, kernel.config.settings.catalog.to_catalog_options(kernel.default_agent.core_tools)
    )
    return view.category_members.get(name, () if name == CORE_CATEGORY else (name,))


def _use_wire_names(kernel: Kernel, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a finder's data with wire names in place of IDs."""

    def named(text: str) -> str:
        entry = kernel.generation.entries.get(text)
        return text if entry is None else entry.wire_name

    def convert(value: object, key: str) -> object:
        if isinstance(value, str):
            return _DOTTED_ID.sub(lambda found: named(found[0]), value) if key == "message" else named(value)
        if isinstance(value, list):
            return [convert(one, key) for one in cast("list[object]", value)]
        if isinstance(value, dict):
            members = cast("dict[str, object]", value)
            return {name: one if name == "description" else convert(one, name) for name, one in members.items()}
        return value

    return {key: convert(value, key) for key, value in data.items()}


_CLIENT_ARGUMENTS = frozenset(
    (
        *("toolCallId", "tool_call_id", "sessionId", "session_id", "chatInput", "conversationId", "conversation_id"),
        *("threadId", "thread_id", "messageId", "message_id", "requestId", "request_id", "runId", "run_id", "_meta"),
    )
)
"""Arguments that some clients add to every call."""
_FURTHER_CLIENT_ARGUMENTS = frozenset({"action", "tool", "toolName"})
"""Arguments that such clients add, too. They are removed only next to one of the others."""


def strip_client_added_arguments(
    arguments: Mapping[str, Any], schema: Mapping[str, Any], removed: set[str]
) -> Mapping[str, Any]:
    """Return the arguments without those that a client adds to every call and that the tool does not declare.

    :param schema: the parameters of the tool. One without declared properties accepts any argument
    :param removed: gets the names of the removed arguments
    """
    declared: Mapping[str, Any] = schema.get("properties") or {}
    foreign = arguments.keys() - declared.keys()
    if not (foreign & _CLIENT_ARGUMENTS) or (not declared and schema.get("additionalProperties") is not False):
        return arguments
    removed |= foreign & (_CLIENT_ARGUMENTS | _FURTHER_CLIENT_ARGUMENTS)
    return {key: value for key, value in arguments.items() if key in declared or key not in removed}


def unwrap_tool_call(arguments: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the name and the arguments of the call inside a call of the server's own tool.

    :raises MCPError: for invalid arguments
    """
    name, inner = arguments.get("name"), arguments.get("arguments")
    if inner is None:
        inner = {}
    elif isinstance(inner, str):  # models write an object within an object as its text
        with contextlib.suppress(InvalidJsonTextError):
            inner = parse_arguments(inner)
    if not isinstance(name, str) or not isinstance(inner, Mapping) or not arguments.keys() <= {"name", "arguments"}:
        wanted = json.dumps({"name": "…", "arguments": {}}, ensure_ascii=False)
        from mcp.shared.exceptions import MCPError  # the SDK is loaded after the first answers
        from mcp_types import INVALID_PARAMS

        raise MCPError(INVALID_PARAMS, f"Invalid arguments of {CALL_TOOL}. Expected {wanted}.")
    return name, cast("Mapping[str, Any]", inner)


_CLIENT_PREFIX = re.compile(r"mcp__[A-Za-z0-9-]+(?:_[A-Za-z0-9-]+)*?__|mcp_[A-Za-z0-9-]+_|handrail(?:__?|[.:/-])")


def remove_client_prefix(name: str, is_known: Callable[[str], bool]) -> str:
    """Return a name that clients write before the names of tools without it, if only then it is the name of a tool.

    :param is_known: returns whether a tool has a name
    """
    bare = name.strip()
    if is_known(bare) or (prefix := _CLIENT_PREFIX.match(bare)) is None:
        return bare if is_known(bare) else name
    rest = bare[prefix.end() :]
    return rest if is_known(rest) else name
