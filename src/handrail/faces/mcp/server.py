"""The MCP server: the kernel's tools, listed and called over stdio, under the same rules as everywhere.

One connection is one headless session and one interaction: what would be asked is denied, and what was brought into view
is listed until the end. A client is told when the list changes; one that does not listen can call every tool all the same.
Calls of one connection run side by side where their locks allow. A client's cancellation stops the call as the user's stop
does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import mcp_types as types
import orjson
from mcp.server.lowlevel import NotificationOptions, Server
from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler, ToolsListChanged

from handrail.contract.call import Answer, ProposedCall
from handrail.contract.names import wire_name
from handrail.faces.mcp.stdio import streams

if TYPE_CHECKING:
    from mcp.server.context import ServerRequestContext

    from handrail.contract.result import Result
    from handrail.contract.session import Session
    from handrail.contract.spec import ToolSpec
    from handrail.kernel import Kernel

INSTRUCTIONS = (
    "Every call is checked against its operator's rules before it runs. Each result is one JSON object: "
    '{"type": "output", "data": …} or {"type": "error", "error_text": …}. An error says what was wrong and what to do '
    'instead; "denied" is final. Where metadata says "truncated", read the file named under "output_path".'
)


async def serve(kernel: Kernel) -> None:
    """Serve one client on this process's stdin and stdout until it hangs up. Nothing else may use stdout meanwhile."""
    session = await kernel.session(headless=True)
    try:
        server = build(session)
        async with streams() as (incoming, outgoing):
            changes = NotificationOptions(tools_changed=True)
            await server.run(incoming, outgoing, server.create_initialization_options(changes))
    finally:
        await session.close()


def build(session: Session) -> Server[dict[str, Any]]:
    """The server for one connection, to run over any pair of streams."""
    running: set[asyncio.Task[Sequence[Answer]]] = set()
    bus = InMemorySubscriptionBus()
    told = shown(session)

    async def on_list(
        _context: ServerRequestContext[dict[str, Any]], _params: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[as_tool(spec) for spec in session.view])

    async def tell_of_changes(context: ServerRequestContext[dict[str, Any]]) -> None:
        nonlocal told
        if (now := shown(session)) != told:
            told = now
            await bus.publish(ToolsListChanged())  # the newer protocol has subscriptions for this
            await context.session.send_tool_list_changed()  # and drops what the older one sends

    async def on_call(
        context: ServerRequestContext[dict[str, Any]], params: types.CallToolRequestParams
    ) -> types.CallToolResult:
        # A task of its own: the SDK cancels by a scope that strikes again at every await until its task is gone,
        # and a call that was stopped still has to end its processes and be recorded.
        call = asyncio.create_task(session.turn().call_all([ProposedCall(params.name, params.arguments or {})]))
        running.add(call)
        call.add_done_callback(running.discard)
        try:
            (answer,) = await asyncio.shield(call)
        except asyncio.CancelledError:
            call.cancel()
            raise
        await tell_of_changes(context)
        return as_result(answer.model)

    return Server(
        "handrail",
        version=version("handrail"),
        instructions="\n\n".join(filter(None, (INSTRUCTIONS, session.turn().index))),
        on_list_tools=on_list,
        on_call_tool=on_call,
        on_subscriptions_listen=ListenHandler(bus),
    )


def shown(session: Session) -> list[str]:
    """The ids of the tools that are listed now."""
    return [spec.id for spec in session.view]


def as_tool(spec: ToolSpec) -> types.Tool:
    """The LLM view under its wire name, with the hints that a client may show; nothing else of the runtime view."""
    return types.Tool(
        name=wire_name(spec.id),
        description=spec.description,
        input_schema=dict(spec.parameters),
        annotations=types.ToolAnnotations(
            read_only_hint=spec.side_effect == "read",
            destructive_hint=spec.side_effect != "read",
            idempotent_hint=spec.side_effect == "read" or spec.idempotent,
            open_world_hint=spec.side_effect == "external",
        ),
    )


def as_result(result: Result) -> types.CallToolResult:
    """The envelope, as structured content and as its JSON text."""
    envelope = result.to_dict()
    return types.CallToolResult(
        content=[types.TextContent(type="text", text=orjson.dumps(envelope, default=str).decode())],
        structured_content=envelope,
        is_error=not result.ok,
    )
