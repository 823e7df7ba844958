"""One tool of an upstream server: its spec, made from the server's listing, and its calls."""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from handrail.contract.errors import ToolError
from handrail.contract.result_conversions import convert_mcp_content_to_result
from handrail.contract.schema.foreign_schemas import normalise_foreign_schema, sort_unordered_lists
from handrail.contract.schema.mcp_members import select_valid_members
from handrail.contract.services.client_services import METHOD_CAPABILITIES, ClientMethod, UnsupportedClientRequest
from handrail.contract.services.tool_runtime import Runtime
from handrail.contract.text.neutralisation import neutralise_text
from handrail.contract.tool.requires import Requires
from handrail.contract.tool.spec import (
    LockSpec,
    SideEffect,
    TargetTemplates,
    ToolSpec,
    explain_invisible_character,
    infer_capability_targets,
)
from handrail.contract.tool.tool_ids_and_wire_names import wire_name
from handrail.contract.tool.tool_protocol import Tool
from handrail.upstream.client.json_rpc_messages import encode_message
from handrail.upstream.client.task_calls import requires_task_call
from handrail.upstream.client.upstream_session import GRANT_BY_METHOD, RpcError
from handrail.upstream.server_definition import JsonItem, ServerDefinition

if TYPE_CHECKING:
    from handrail.upstream.upstream_connection import UpstreamServerConnection

_IN_AN_ID = re.compile(r"[A-Za-z0-9_-]")
MAX_ID = 49
"""Characters of an id: clients put ``mcp__handrail__`` before it, and models take names of 64 characters."""
_DIGEST = 8
MAX_META_BYTES = 16 * 1024
"""Bytes of the ``_meta`` that travel with a call or a result."""
_HEADER = "x-mcp-header"
_FIELD_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_MISSING_CAPABILITY = -32021


def make_tool_ids(prefix: str, names: Iterable[str]) -> dict[str, str]:
    """Return the id of each of a server's tools, by its name: ``<server>_<tool>``, or the tool's own name without a prefix.

    A letter that an id cannot have is spelled out by its number, and other signs become ``_``. A name that fits keeps its
    plain id. An id that is too long, or that another name has, ends in a hash of the name. So the order of the names does
    not matter.
    """
    known = dict.fromkeys(names)
    plain = {name: _plain_id(prefix, name) for name in known}
    counts = Counter(wire_name(one) for one in plain.values())
    found: dict[str, str] = {}
    for name, tool_id in plain.items():
        exact = tool_id == (f"{prefix}_{name}" if prefix else name)
        collides = counts[wire_name(tool_id)] > 1 and not exact
        if collides or len(tool_id) > MAX_ID:
            digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGEST]
            tool_id = f"{tool_id[: MAX_ID - _DIGEST - 1].rstrip('_')}_{digest}"  # noqa: PLW2901
        found[name] = tool_id
    return found


def _plain_id(prefix: str, name: str) -> str:
    """Return the id of a tool, without regard to its length and to other tools."""
    folded = unicodedata.normalize("NFKD", name)
    spelled = "".join(_spell(one) for one in folded if not unicodedata.combining(one))
    own = re.sub(r"(?<=[A-Za-z0-9])_(?=u[0-9a-f]{4,6}_)|(?<!_)__++(?=u[0-9a-f]{4,6}_)", "_", spelled)
    own = own if own == name else own.strip("_") or "tool"
    return f"{prefix}_{remove_server_prefix(prefix, own)}" if prefix else own if own[0].isalpha() else f"t_{own}"


def remove_server_prefix(prefix: str, name: str) -> str:
    """Return a name without the server's prefix, if the server itself writes it before its names."""
    own, rest = name[: len(prefix)], name[len(prefix) :]
    is_same = own.casefold().replace("-", "_") == prefix.casefold().replace("-", "_")
    return rest[1:] if is_same and rest[:1] in ("_", "-") and rest[1:2].isalnum() else name


def _spell(character: str) -> str:
    if character.isascii():
        return character if _IN_AN_ID.fullmatch(character) else "_"
    return f"_u{ord(character):04x}_" if character.isalnum() else "_"


def build_tool_spec(item: JsonItem, definition: ServerDefinition, requires: Requires, tool_id: str = "") -> ToolSpec:
    """Build the spec of a listed tool.

    :param requires: the server's requirements, one object for all of its tools
    :param tool_id: its id; empty for the id of its name alone
    :raises ValueError: if the item is not a valid tool
    """
    name = item.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError("has no name")
    hints: Mapping[str, Any] = _hints(item) if definition.trust_hints else dict[str, Any]()
    effect = definition.side_effects.get(name) or definition.side_effects.get("*") or _infer_side_effect(hints)
    prefix = definition.name if definition.prefix is None else definition.prefix
    parameters = normalise_foreign_schema(item.get("inputSchema"))
    return ToolSpec(
        id=tool_id or make_tool_ids(prefix, [name])[name],
        description=_description(item, name, definition),
        parameters=parameters,
        requires=requires,
        side_effect=effect,
        locks=_locks(definition, effect),
        targets=_targets(parameters, effect, definition),
        idempotent=effect != "read" and hints.get("idempotentHint") is True,
        timeout_ms=definition.timeout_ms,
        category=None,
        kind="read" if effect == "read" else "other",
        output_schema=_output_schema(item),
        client_listing=_client_listing(item, definition.name),
    )


def _targets(parameters: Mapping[str, Any], effect: SideEffect, definition: ServerDefinition) -> TargetTemplates:
    """Return the targets of a tool's arguments. A URL is data unless the operator says that it is a host."""
    inferred: dict[str, tuple[str, ...]] = infer_capability_targets(parameters, effect)
    if definition.url_arguments == "data" and "net.fetch" in inferred:
        inferred["net.fetch"] = ()
        return inferred
    return {}


def _output_schema(item: JsonItem) -> Mapping[str, Any] | None:
    """Return the schema of the structured content, if it describes an object as MCP demands."""
    schema = item.get("outputSchema")
    fields = cast("dict[str, Any]", schema) if isinstance(schema, dict) else {}
    return fields if fields.get("type") == "object" and not explain_invisible_character(fields) else None


def _client_listing(item: JsonItem, server: str) -> dict[str, Any]:
    """Return what a client shows of a tool in addition: its title, icons and metadata, marked as the server's."""
    title = item.get("title") or _hints(item).get("title")
    found: dict[str, Any] = {"title": title} if isinstance(title, str) and title.strip() else {}
    found |= select_valid_members({"icons": item.get("icons")})
    meta = remove_handrail_metadata(item.get("_meta"))
    if meta:
        found["_meta"] = meta
    found = {key: value for key, value in found.items() if not explain_invisible_character(value)}
    meta = found.get("_meta", {})
    if found:
        found["_meta"] = {**meta, "handrail/origin": f"mcp server {server}"}
    return found


def remove_handrail_metadata(meta: object) -> dict[str, Any]:
    """Return a server's ``_meta`` without the names under which Handrail itself writes."""
    given = cast("dict[str, Any]", meta) if isinstance(meta, dict) else {}
    return {key: value for key, value in given.items() if not key.startswith("handrail/")}


def select_client_metadata(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a client's ``_meta`` is for the server, or nothing if it is too large.

    Names of the protocol and of Handrail are about the client's own connection.
    """
    own = ("handrail/", "io.modelcontextprotocol/", "modelcontextprotocol.io/")
    found = {key: value for key, value in meta.items() if key != "progressToken" and not key.startswith(own)}
    return found if len(encode_message(found)) <= MAX_META_BYTES else {}


def is_same_definition(one: JsonItem, other: JsonItem) -> bool:
    """Return whether two listed tools differ in nothing but an order without meaning."""
    return one is other or one == other or _to_ordered(one) == _to_ordered(other)


def _to_ordered(item: JsonItem) -> dict[str, Any]:
    return {key: sort_unordered_lists(value) if key.endswith("Schema") else value for key, value in item.items()}


def _description(item: JsonItem, name: str, definition: ServerDefinition) -> str:
    description, title = item.get("description"), item.get("title")
    if isinstance(description, str) and description.strip():
        return description
    known_as = title if isinstance(title, str) and title.strip() else name
    return f"{known_as}. The MCP server {definition.name} provides no description."


def _hints(item: JsonItem) -> Mapping[str, Any]:
    hints = item.get("annotations")
    return cast("Mapping[str, Any]", hints) if isinstance(hints, dict) else {}


def _infer_side_effect(hints: Mapping[str, Any]) -> SideEffect:
    return "read" if hints.get("readOnlyHint") is True else "external"


def _locks(definition: ServerDefinition, effect: SideEffect) -> tuple[LockSpec, ...]:
    """Return the locks on the workspace, as far as the server's sandbox can access it."""
    if definition.write and effect != "read":
        return (LockSpec("workspace", "X"),)
    return (LockSpec("workspace", "S"),) if definition.write or definition.read else ()


class McpTool(Tool):
    """A tool of an upstream server. The object is the same while the server's description of it is.

    :param item: the server's description of the tool
    :param tool_id: its id among the server's tools; empty for the id of its name alone
    """

    def __init__(
        self,
        item: JsonItem,
        upstream: UpstreamServerConnection | None,
        definition: ServerDefinition,
        requires: Requires,
        tool_id: str = "",
    ) -> None:
        self.spec = build_tool_spec(item, definition, requires, tool_id)
        self.item = item
        self.name = str(item["name"])
        self.definition = definition
        # A tool must not match a rule about MCP's own requests, such as resources/read.
        self.origin = f"mcp:{definition.name}:{self.name.replace('/', '.')}"
        self.trusted = definition.transport != "stdio"
        """This process speaks to a remote server, over connections that the runtime checks."""
        self._upstream = upstream
        self._headers: Mapping[tuple[str, ...], str] = {}
        if definition.transport == "http":
            self._headers = _header_places(item.get("inputSchema"))
            if problem := _fault_in_headers(item.get("inputSchema"), self._headers):
                raise ValueError(problem)

    def __repr__(self) -> str:
        return f"<tool {self.spec.id} of mcp server {self.definition.name}>"

    def extract_header_fields(self, args: Mapping[str, Any]) -> dict[str, str]:
        """Return the arguments that the schema repeats in header fields, over HTTP."""
        return _headers_of(self._headers, args)

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        upstream = self._upstream
        if upstream is None:
            raise ToolError(
                f"MCP server {self.definition.name} is not connected in this process, which only lists its "
                "tools. Continue without it.",
                kind="unavailable",
            )

        def stands() -> None:
            listing = upstream.listing
            now = listing.find_tool(self.name) if listing is not None else None
            if now is None or not is_same_definition(now, self.item):
                raise ToolError(
                    f"MCP server {self.definition.name} has changed its definition of {self.name} since this call "
                    "was made. Check the current tools, and call again.",
                    kind="conflict",
                )

        headers = self.extract_header_fields(args) if self._headers else None
        fields: dict[str, Any] = {"name": self.name, "arguments": args}
        if asked := select_client_metadata(runtime.client_meta):
            fields["_meta"] = asked
        if self.definition.transport == "stdio":
            await upstream.ensure_connected()
            if upstream.scratch_files is None:
                upstream.scratch_files = await _look_at_scratch_files(upstream.scratch_folder)
        try:
            as_task = requires_task_call(self.item)
            answer = await upstream.call(
                "tools/call", fields, runtime, headers=headers, check_current=stands, as_task=as_task
            )
        except RpcError as error:
            raise to_tool_error(self.definition.name, error) from None
        result = convert_mcp_content_to_result(answer)
        meta = remove_handrail_metadata(answer.get("_meta"))
        if meta and len(encode_message(meta)) <= MAX_META_BYTES:
            result = result.with_metadata(server_meta=meta)
        if folder := upstream.scratch_folder:
            after = await _look_at_scratch_files(folder)
            before, upstream.scratch_files = upstream.scratch_files, after
            note = _describe_new_files(self.definition.name, folder, before or {}, after)
            result = result.with_metadata(scratch_note=note) if note else result
        return result


def to_tool_error(server: str, error: RpcError) -> ToolError:
    """Return the error of a call for an error that a server sent."""
    error_text = error.message[:2000].rstrip(". ")
    is_known = error.code == _MISSING_CAPABILITY
    if error.data and not is_known and (detail := _describe_data(error.data)) not in error_text:
        error_text = f"{error_text}: {detail}" if error_text else detail
    error_text = error_text or "it failed without a message"
    if error.code == _MISSING_CAPABILITY and (lacking := _find_missing_request(error.data)):
        return UnsupportedClientRequest(lacking, before=f"MCP server {server} failed: {error_text}. ")
    kind = "invalid_input" if error.code == -32602 else "failed"
    return ToolError(
        f"MCP server {server} returned an error: {error_text} (error {error.code}). Correct the arguments, or continue without this tool.",
        kind=kind,
    )


def _describe_data(data: object) -> str:
    """Return the details of an error as text."""
    text = data if isinstance(data, str) else encode_message(cast("Any", data)).decode()
    return text[:1000]


def _find_missing_request(data: object) -> ClientMethod | None:
    """Return the first request that the server needs and the client does not answer, or None."""
    value = cast("dict[str, Any]", data).get("requiredCapabilities") if isinstance(data, dict) else None
    needed = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    return next((method for method in METHOD_CAPABILITIES if GRANT_BY_METHOD[method] in needed), None)


def _header_places(schema: object) -> dict[tuple[str, ...], str]:
    """Return the header fields for arguments that a schema marks with ``x-mcp-header``, by path."""
    found: dict[tuple[str, ...], str] = {}
    rest: list[tuple[tuple[str, ...], Any]] = [((), schema)]
    while rest:
        path, node = rest.pop()
        if not isinstance(node, dict):
            continue
        fields = cast("dict[str, Any]", node)
        token = fields.get(_HEADER)
        if path and isinstance(token, str) and fields.get("type") in ("string", "integer", "boolean"):
            found[path] = token
        properties = fields.get("properties")
        if isinstance(properties, dict) and len(path) < 16:
            rest += [((*path, name), one) for name, one in cast("dict[str, Any]", properties).items()]
    return found


def _fault_in_headers(schema: object, places: Mapping[tuple[str, ...], str]) -> str | None:
    """Return why a schema's ``x-mcp-header`` marks are invalid. MCP forbids such a tool."""
    fields = [token.lower() for token in places.values()]
    if odd := [token for token in fields if not _FIELD_NAME.fullmatch(token)]:
        return (
            f"its schema marks an argument with {_HEADER} {odd[0][:60]!r}, which is not a valid name of a header field"
        )
    if len(fields) != len(set(fields)):
        return f"its schema marks two arguments with the same {_HEADER}"
    marks, rest = 0, [schema]
    while rest:
        node = rest.pop()
        if isinstance(node, dict):
            values = cast("dict[str, Any]", node)
            marks += _HEADER in values and not isinstance(values[_HEADER], dict)
            rest += [one for key, one in values.items() if key not in ("default", "examples", "const", "enum")]
        elif isinstance(node, list):
            rest += cast("list[Any]", node)
    return (
        None
        if marks == len(fields)
        else f"its schema marks an argument with {_HEADER} that is not a string, integer or boolean"
    )


def _headers_of(places: Mapping[tuple[str, ...], str], args: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for path, token in places.items():
        node: Any = args
        for key in path:
            node = cast("dict[str, Any]", node).get(key) if isinstance(node, dict) else None
        if isinstance(node, bool):
            found[f"mcp-param-{token}"] = "true" if node else "false"
        elif isinstance(node, (str, int)):
            found[f"mcp-param-{token}"] = str(node)
    return found


# The files that a server's program leaves in its own folder, which neither the user nor another tool sees.

_MAX_LOOKS = 100
"""The number of files and folders that are looked at without a thread."""
_MAX_FILES = 2_000
_MAX_NAMED = 10
_MAX_NAME_CHARS = 200
_CACHE_FOLDERS = frozenset({"node_modules", "__pycache__", "site-packages", "Library", "AppData", "logs", "tmp"})


async def _look_at_scratch_files(folder: str) -> dict[str, tuple[int, int]]:
    """Return what :func:`_list_scratch_files` does. A small folder needs no thread, which would take longer."""
    found = _list_scratch_files(folder, _MAX_LOOKS)
    if found is None:
        found = await asyncio.to_thread(_list_scratch_files, folder, math.inf)
    return found or {}


def _list_scratch_files(folder: str, most: float) -> dict[str, tuple[int, int]] | None:
    """Return the size and the time of each file that is not hidden and not in a cache, by its path in ``folder``.

    :param most: the number of files and folders to look at; None is returned if there are more
    """
    found: dict[str, tuple[int, int]] = {}
    for at, inner, files in os.walk(folder):
        if (most := most - len(inner) - len(files)) < 0:
            return None
        inner[:] = sorted(name for name in inner if not name.startswith(".") and name not in _CACHE_FOLDERS)
        for name in sorted(files):
            if name.startswith(".") or name.endswith((".log", ".lock", ".tmp", ".pid")):
                continue
            try:
                status = (Path(at) / name).lstat()
            except OSError:
                continue
            found[os.path.relpath(f"{at}/{name}", folder)] = (status.st_size, status.st_mtime_ns)
            if len(found) >= _MAX_FILES:
                return found
    return found


def _write_name(name: str) -> str:
    """Return the name of a file, which the server chose, without what could pass for other text."""
    readable = name.encode("utf-8", "replace").decode()
    return neutralise_text("".join(one if one.isprintable() else "?" for one in readable[:_MAX_NAME_CHARS]))


def _describe_new_files(
    server: str, folder: str, before: Mapping[str, tuple[int, int]], after: Mapping[str, tuple[int, int]]
) -> str:
    """Return a text about the files that a call has written into the server's own folder; empty without any."""
    written = [name for name, status in after.items() if before.get(name) != status]
    if not written:
        return ""
    named = ", ".join(map(_write_name, written[:_MAX_NAMED])) + (
        f" and {len(written) - _MAX_NAMED} more" if len(written) > _MAX_NAMED else ""
    )
    return (
        f"The server wrote {named} into its own folder {folder}, not into the workspace. To let it write there, the user sets "
        f"write and cwd of [mcp.servers.{server}]."
    )
