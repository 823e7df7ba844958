"""Which tools a client is listed, and each of them as MCP lists it."""

from __future__ import annotations

import base64
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from handrail.catalog.interaction import Interaction
from handrail.catalog.view import CatalogOptions, view_of
from handrail.contract.doors.agents import usable
from handrail.contract.schema.schema import InvalidSchema, Schema, compile_schema
from handrail.contract.tool.names import FACE_IDS, wire_name

if TYPE_CHECKING:
    from handrail.contract.generation import Generation
    from handrail.contract.session import Session
    from handrail.contract.tool.spec import ToolSpec
    from handrail.frontends.mcp.serving import Discovery
    from handrail.kernel.kernel import Kernel

PAGE = 500
"""Of whatever is listed, so many at once."""
(DOOR,) = FACE_IDS
DOOR_TOOL: Mapping[str, Any] = {
    "name": DOOR,
    "description": (
        "Call a tool that is not listed: what find_tools, tool_search and load_tools gave, with its parameters. It is "
        "checked like every call."
    ),
    "inputSchema": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "description": "The tool's name, as it was given"},
            "arguments": {"type": "object", "description": "By the tool's own parameters", "default": {}},
        },
        "required": ["name"],
        "additionalProperties": False,
    },
    "annotations": {"readOnlyHint": False, "destructiveHint": True, "idempotentHint": False, "openWorldHint": True},
}
"""For clients that do not list again."""
_made: weakref.WeakKeyDictionary[Generation, dict[str, dict[str, Any]]] = weakref.WeakKeyDictionary()
_promises: weakref.WeakKeyDictionary[Generation, dict[str, Schema | None]] = weakref.WeakKeyDictionary()


def specs_of(kernel: Kernel, discovery: Discovery, session: Session | None) -> Sequence[ToolSpec]:
    """The tools that a client is listed now.

    :param session: None for a client that has none yet
    """
    if discovery == "all":
        return usable([entry.spec for entry in view_of(kernel.generation, CatalogOptions()).ready.values()], None)
    if session is not None:
        return session.view
    options = kernel.config.settings.catalog.options(kernel.agent.core)
    return usable(Interaction("", options).specs(kernel.generation), None)


def as_tool(kernel: Kernel, spec: ToolSpec) -> dict[str, Any]:
    """The LLM view under its wire name, with the hints that a client may show and the form of what it gives; nothing else of
    the runtime view."""
    made = _made.setdefault(kernel.generation, {})
    known = made.get(spec.id)
    if known is None:
        known = made[spec.id] = {
            "name": wire_name(spec.id),
            "description": spec.description,
            "inputSchema": dict(spec.parameters),
            "annotations": {
                "readOnlyHint": spec.side_effect == "read",
                "destructiveHint": spec.side_effect != "read",
                "idempotentHint": spec.side_effect == "read" or spec.idempotent,
                "openWorldHint": spec.side_effect == "external",
            },
        }
        if promise_of(kernel, spec) is not None:
            known["outputSchema"] = dict(spec.output_schema or {})
    return known


def promise_of(kernel: Kernel, spec: ToolSpec) -> Schema | None:
    """What the structured content of a tool is held to; None where nothing was promised, or nothing that can be."""
    if spec.output_schema is None:
        return None
    made = _promises.setdefault(kernel.generation, {})
    if spec.id not in made:
        try:
            made[spec.id] = compile_schema(spec.output_schema)
        except InvalidSchema:
            made[spec.id] = None
    return made[spec.id]


def page_from(key: str, items: Sequence[Any], start: int) -> dict[str, Any]:
    """One page of a listing."""
    page: dict[str, Any] = {key: list(items[start : start + PAGE])}
    if start + PAGE < len(items):
        page["nextCursor"] = base64.urlsafe_b64encode(str(start + PAGE).encode()).decode()
    return page
