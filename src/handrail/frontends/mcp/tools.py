"""The tools that a client is listed, in MCP's form, the server's greeting, and the settings for serving clients."""

from __future__ import annotations

import base64
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Literal

from handrail.catalog.interaction import Interaction
from handrail.catalog.prompt import index_of
from handrail.catalog.view import CatalogOptions, view_of
from handrail.contract.doors.agents import usable
from handrail.contract.schema.schema import InvalidSchema, Schema, compile_schema
from handrail.contract.tool.names import FACE_IDS, wire_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from handrail.contract.generation import Generation
    from handrail.contract.session import Session
    from handrail.contract.tool.spec import ToolSpec
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


# The server's description on connection: its name, capabilities and instructions.

INSTRUCTIONS = (
    "Every call is checked against its operator's rules before it runs. An error says what was wrong and what to do "
    "instead; what was denied stays denied. Where a result says that it is the beginning only, the whole is in the file "
    "that it names."
)
CAPABILITIES: Mapping[str, Any] = {
    "completions": {},
    "logging": {},
    "prompts": {"listChanged": True},
    "resources": {"listChanged": True, "subscribe": True},
    "tools": {"listChanged": True},
}
"""As the SDK says them of the server."""
EXTENSIONS: Mapping[str, dict[str, Any]] = {"io.modelcontextprotocol/tasks": {}}
"""What it says beside them in the stateless era; the older one has no word for it."""


def instructions(kernel: Kernel) -> str:
    """What there is beside the tools in view, as a model reads it."""
    options = kernel.config.settings.catalog.options(kernel.agent.core)
    index = index_of(view_of(kernel.generation, options), options.index_tokens)
    return "\n\n".join(filter(None, (INSTRUCTIONS, index)))


def greeting(kernel: Kernel) -> dict[str, Any]:
    """What both eras say in one way or the other."""
    about = {"name": "handrail", "version": version("handrail")}
    return {"capabilities": CAPABILITIES, "serverInfo": about, "instructions": instructions(kernel)}


# The operator's settings for serving MCP clients.

Discovery = Literal["core", "all"]


@dataclass(frozen=True, slots=True)
class Serving:
    """How clients are served.

    :param discovery: which tools are listed: the core and the ways to the rest, or all
    :param wait_s: how long an approval or a question may keep a request of the older era open: it is parked then, before
        the client gives the request up and so the call, which most do after a minute
    :param hold_s: how long a call of the stateless era is held for its client to come back
    :param task_after_s: after which a running call of a promotable tool is answered with a task, where its client takes one
    :param headless: nobody is asked, whatever clients say that they can
    :param most_guests: sessions of the stateless era at once
    :param most_held: calls over all clients that wait for these to come back
    :param idle_s: after which a session of the stateless era is closed that nobody has used
    """

    discovery: Discovery = "core"
    wait_s: float = 50.0
    hold_s: float = 600.0
    task_after_s: float = 10.0
    headless: bool = False
    most_guests: int = 1_000
    most_held: int = 1_000
    idle_s: float = 1_800.0
