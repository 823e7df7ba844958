"""One tool of an upstream server: its spec, made from the server's listing, and its calls."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from handrail.contract.errors import ToolError
from handrail.contract.result_conversions import result_from_mcp_content
from handrail.contract.services.client_services import METHOD_CAPABILITIES, ClientMethod, UnsupportedClientRequest
from handrail.contract.services.tool_runtime import Runtime
from handrail.contract.tool.requires import Requires
from handrail.contract.tool.spec import LockSpec, SideEffect, ToolSpec
from handrail.contract.tool.tool_protocol import Tool
from handrail.upstream.client.task_calls import can_be_called_only_as_task
from handrail.upstream.client.upstream_session import GRANT_BY_METHOD, RpcError
from handrail.upstream.server_definition import JsonItem, ServerDefinition

if TYPE_CHECKING:
    from handrail.upstream.upstream_connection import UpstreamServerConnection

_NOT_IN_AN_ID = re.compile(r"[^A-Za-z0-9_-]")
_HEADER = "x-mcp-header"
_FIELD_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_MISSING_CAPABILITY = -32021


def make_tool_id(prefix: str, name: str) -> str:
    """Return the id of a server's tool: ``<server>_<tool>``, or the tool's own name without a prefix."""
    own = _NOT_IN_AN_ID.sub("_", name)
    return f"{prefix}_{own}" if prefix else own


def build_spec(item: JsonItem, definition: ServerDefinition, requires: Requires) -> ToolSpec:
    """Build the spec of a listed tool.

    :param requires: the server's requirements, one object for all of its tools
    :raises ValueError: if the item is not a valid tool
    """
    name, schema = item.get("name"), item.get("inputSchema")
    if not isinstance(name, str) or not name:
        raise ValueError("has no name")
    if not isinstance(schema, dict):
        raise ValueError("has no inputSchema")
    hints: Mapping[str, Any] = _hints(item) if definition.trust_hints else dict[str, Any]()
    effect = definition.side_effects.get(name) or definition.side_effects.get("*") or _infer_side_effect(hints)
    return ToolSpec(
        id=make_tool_id(definition.name if definition.prefix is None else definition.prefix, name),
        description=_description(item, name, definition),
        parameters=cast("dict[str, Any]", schema),
        requires=requires,
        side_effect=effect,
        locks=_locks(definition, effect),
        idempotent=effect != "read" and hints.get("idempotentHint") is True,
        timeout_ms=definition.timeout_ms,
        category=None,
        kind="read" if effect == "read" else "other",
    )


def _description(item: JsonItem, name: str, definition: ServerDefinition) -> str:
    said, title = item.get("description"), item.get("title")
    if isinstance(said, str) and said.strip():
        return said
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
    """

    def __init__(
        self,
        item: JsonItem,
        upstream: UpstreamServerConnection | None,
        definition: ServerDefinition,
        requires: Requires,
    ) -> None:
        self.spec = build_spec(item, definition, requires)
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

    @property
    def structured_content_schema(self) -> Mapping[str, Any] | None:
        """The schema that the server declares for its structured content."""
        schema = self.item.get("outputSchema")
        return cast("Mapping[str, Any]", schema) if isinstance(schema, dict) else None

    def header_fields_from_args(self, args: Mapping[str, Any]) -> dict[str, str]:
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
            if now is None or (now is not self.item and now != self.item):
                raise ToolError(
                    f"MCP server {self.definition.name} has changed its definition of {self.name} since this call "
                    "was made. Look at the current tools, and call again.",
                    kind="conflict",
                )

        headers = self.header_fields_from_args(args) if self._headers else None
        fields = {"name": self.name, "arguments": args}
        try:
            as_task = can_be_called_only_as_task(self.item)
            answer = await upstream.call(
                "tools/call", fields, runtime, headers=headers, check_current=stands, as_task=as_task
            )
        except RpcError as error:
            raise to_tool_error(self.definition.name, error) from None
        return result_from_mcp_content(answer)


def to_tool_error(server: str, error: RpcError) -> ToolError:
    """Return the error of a call for an error that a server sent."""
    said = error.message[:2000] or "it failed without a message"
    if error.code == _MISSING_CAPABILITY and (lacking := _find_missing_request(error.data)):
        return UnsupportedClientRequest(lacking, before=f"MCP server {server} failed: {said}. ")
    kind = "invalid_input" if error.code == -32602 else "failed"
    return ToolError(
        f"MCP server {server} returned an error: {said} (error {error.code}). Correct the arguments, or continue without this tool.",
        kind=kind,
    )


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
