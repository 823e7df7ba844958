"""The fixtures of the conformance suite on the bare SDK: behind the gateway, and for comparison.

``python -m tests.mcp_suite.plain_server`` serves stdin and stdout; with ``--port`` it serves streamable HTTP on loopback
at ``/mcp``. Its tools are those of the fixture pack, by the same behaviours; nothing of Handrail is imported.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import mcp_types as types
from mcp.server.caching import CacheHint
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import NotificationOptions, Server
from mcp.server.request_state import RequestStateBoundary, RequestStateSecurity
from mcp.server.streamable_http import EventCallback, EventId, EventMessage, EventStore, StreamId
from mcp.server.subscriptions import (
    InMemorySubscriptionBus,
    ListenHandler,
    PromptsListChanged,
    ResourceUpdated,
    ToolsListChanged,
)
from mcp.shared.exceptions import MCPError
from tests.mcp_suite.pack.fixtures.behaviours import BEHAVIOURS, PICTURE, Asks, Behaviour, Refused

PACK = Path(__file__).parent / "pack"
Context = ServerRequestContext[dict[str, Any], Any]
NAME = "plain-sdk-server"
RETRY_MS = 100
MODERN = "2026-07-28"

_CAPABILITY: Mapping[str, str] = {
    "elicitation/create": "elicitation",
    "sampling/createMessage": "sampling",
    "roots/list": "roots",
}
_TEXT = "This is the content of the static text resource."
_CHANGES = {"test_trigger_tool_change": "tools", "test_trigger_prompt_change": "prompts"}


class NeedsInput(Exception):
    """A fixture of the stateless era asks: its request is answered with what it asks for."""

    def __init__(self, asks: Asks) -> None:
        self.asks = asks


class Events(EventStore):
    """Every event of every stream, so that a client that comes back gets what it missed."""

    def __init__(self) -> None:
        self._kept: list[tuple[StreamId, types.JSONRPCMessage | None]] = []

    async def store_event(self, stream_id: StreamId, message: types.JSONRPCMessage | None) -> EventId:
        self._kept.append((stream_id, message))
        return str(len(self._kept))

    async def replay_events_after(self, last_event_id: EventId, send_callback: EventCallback) -> StreamId | None:
        if not last_event_id.isdecimal() or not 0 < int(last_event_id) <= len(self._kept):
            return None
        stream = self._kept[int(last_event_id) - 1][0]
        for number, (of, message) in enumerate(self._kept[int(last_event_id) :], int(last_event_id) + 1):
            if of == stream and message is not None:
                await send_callback(EventMessage(message, str(number)))
        return stream


class Exchange:
    """The door of one call, over the SDK's context: asks the client itself in a session, by its result where there is none.

    A fixture without a session is run from its beginning in every round, with the answers of the rounds before; they
    travel in the request's state, which the SDK seals.
    """

    def __init__(self, context: Context, answered: list[dict[str, Any]], given: Mapping[str, Any] | None) -> None:
        self._context = context
        self._replayed = iter(answered)
        self._given = given
        self.answered = answered

    async def progress(self, done: int, total: int, message: str) -> None:
        await self._context.session.report_progress(done, total, message)

    async def log(self, level: Any, text: str) -> None:
        session, related = self._context.session, self._context.request_id
        await session.send_log_message(level, text, related_request_id=related)  # pyright: ignore[reportDeprecated]

    async def pause(self, ms: int) -> None:
        await anyio.sleep(ms / 1000)

    async def let_go(self) -> None:
        if self._context.close_sse_stream is not None:
            await self._context.close_sse_stream()

    def offers(self, method: str) -> bool:
        declared = self._context.session.client_capabilities
        return declared is not None and getattr(declared, _CAPABILITY[method]) is not None

    async def ask(self, asks: Asks) -> Mapping[str, Mapping[str, Any]]:
        for ask in asks.values():
            if not self.offers(str(ask["method"])):
                needed = _CAPABILITY[str(ask["method"])]
                if self._context.protocol_version >= MODERN:
                    raise MCPError(
                        types.MISSING_REQUIRED_CLIENT_CAPABILITY,
                        f"this tool needs a client with the capability {needed!r}",
                        {"requiredCapabilities": {needed: {}}},
                    )
                raise Refused(f"the client did not declare {needed!r}")
        if self._context.protocol_version < MODERN:
            return {key: await self._asked(ask) for key, ask in asks.items()}
        if (before := next(self._replayed, None)) is not None:
            return before
        given, self._given = self._given or {}, None
        if not all(_fits(ask, given.get(key)) for key, ask in asks.items()):
            raise NeedsInput(asks)
        answers = {key: dict(given[key]) for key in asks}
        self.answered.append(answers)
        return answers

    async def _asked(self, ask: Mapping[str, Any]) -> Mapping[str, Any]:
        session, related = self._context.session, self._context.request_id
        match ask["method"]:
            case "elicitation/create":
                params = ask["params"]
                answer = await session.elicit_form(params["message"], params["requestedSchema"], related)
            case "sampling/createMessage":
                said = types.CreateMessageRequestParams.model_validate(ask["params"])
                answer = await session.create_message(  # pyright: ignore[reportDeprecated]
                    said.messages, max_tokens=said.max_tokens, related_request_id=related
                )
            case _:
                answer = await session.list_roots()  # pyright: ignore[reportDeprecated]
        return answer.model_dump(mode="json", by_alias=True, exclude_none=True)


def _fits(ask: Mapping[str, Any], answer: Any) -> bool:
    if not isinstance(answer, Mapping):
        return False
    kind = {
        "elicitation/create": types.ElicitResult,
        "sampling/createMessage": types.CreateMessageResult,
        "roots/list": types.ListRootsResult,
    }
    try:
        kind[str(ask["method"])].model_validate(answer)
    except ValueError:
        return False
    return True


async def _carried_out(
    context: Context, params: types.CallToolRequestParams | types.GetPromptRequestParams, behaviour: Behaviour
) -> Any:
    """Return the result of a fixture, or its request."""
    answered: list[dict[str, Any]] = json.loads(params.request_state) if params.request_state else []
    responses = params.input_responses
    given = (
        None
        if responses is None
        else {
            key: answer.model_dump(mode="json", by_alias=True, exclude_none=True) for key, answer in responses.items()
        }
    )
    door = Exchange(context, answered, given)
    try:
        return await behaviour(params.arguments or {}, door)
    except NeedsInput as needs:
        return types.InputRequiredResult.model_validate(
            {"inputRequests": dict(needs.asks), "requestState": json.dumps(door.answered)}
        )
    except Refused as refused:
        return {"content": [{"type": "text", "text": str(refused)}], "isError": True}


def _tools() -> list[types.Tool]:
    tools: list[types.Tool] = []
    for manifest in sorted(PACK.glob("*.json")):
        said = json.loads(manifest.read_text())
        if (llm := said.get("llm")) is not None:
            tools.append(types.Tool(name=llm["name"], description=llm["description"], input_schema=llm["parameters"]))
    changes = {name: f"Says that the list of {what} has changed." for name, what in _CHANGES.items()}
    return tools + [
        types.Tool(name=name, description=says, input_schema={"type": "object"}) for name, says in changes.items()
    ]


RESOURCES = [
    types.Resource(uri="test://static-text", name="Static text", description="A text", mime_type="text/plain"),
    types.Resource(uri="test://static-binary", name="Static picture", description="A picture", mime_type="image/png"),
    types.Resource(uri="test://watched-resource", name="Watched", description="May change", mime_type="text/plain"),
]
TEMPLATES = [
    types.ResourceTemplate(
        uri_template="test://template/{id}/data", name="Data", description="By id", mime_type="application/json"
    )
]


def _argument(name: str) -> types.PromptArgument:
    return types.PromptArgument(name=name, description=f"The {name}", required=True)


PROMPTS = [
    types.Prompt(name="test_simple_prompt", description="A prompt without arguments"),
    types.Prompt(
        name="test_prompt_with_arguments",
        description="With arguments",
        arguments=[_argument("arg1"), _argument("arg2")],
    ),
    types.Prompt(
        name="test_prompt_with_embedded_resource",
        description="With an embedded resource",
        arguments=[_argument("resourceUri")],
    ),
    types.Prompt(name="test_prompt_with_image", description="With a picture"),
    types.Prompt(name="test_input_required_result_prompt", description="Needs a context before it is given"),
]


def _said(*contents: Mapping[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": dict(content)} for content in contents]}


async def _prompt(name: str, args: Mapping[str, Any], door: Any) -> dict[str, Any]:
    match name:
        case "test_simple_prompt":
            return _said({"type": "text", "text": "This is a simple prompt for testing."})
        case "test_prompt_with_arguments":
            text = f"Prompt with arguments: arg1='{args.get('arg1')}', arg2='{args.get('arg2')}'"
            return _said({"type": "text", "text": text})
        case "test_prompt_with_embedded_resource":
            text = "Embedded resource content for testing."
            resource = {"uri": args.get("resourceUri", ""), "mimeType": "text/plain", "text": text}
            asked = {"type": "text", "text": "Please process the embedded resource above."}
            return _said({"type": "resource", "resource": resource}, asked)
        case "test_prompt_with_image":
            picture = {"type": "image", "data": PICTURE, "mimeType": "image/png"}
            return _said(picture, {"type": "text", "text": "Please analyze the image above."})
        case "test_input_required_result_prompt":
            schema = {"type": "object", "properties": {"context": {"type": "string"}}, "required": ["context"]}
            params = {"mode": "form", "message": "What context should the prompt use?", "requestedSchema": schema}
            answers = await door.ask({"user_context": {"method": "elicitation/create", "params": params}})
            return _said({"type": "text", "text": f"The context: {answers['user_context'].get('content')}"})
        case _:
            raise MCPError(types.INVALID_PARAMS, f"there is no prompt {name!r}")


def _content(uri: str) -> dict[str, Any]:
    if uri in ("test://static-text", "test://watched-resource"):
        return {"uri": uri, "mimeType": "text/plain", "text": _TEXT}
    if uri == "test://static-binary":
        return {"uri": uri, "mimeType": "image/png", "blob": PICTURE}
    if uri.startswith("test://template/") and uri.endswith("/data") and uri.count("/") == 4:
        of = uri.split("/")[3]
        text = json.dumps({"id": of, "templateTest": True, "data": f"Data for ID: {of}"})
        return {"uri": uri, "mimeType": "application/json", "text": text}
    raise MCPError(types.INVALID_PARAMS, f"there is no resource {uri!r}", {"uri": uri})


def build() -> Server[dict[str, Any]]:
    """The server, for any transport."""
    bus = InMemorySubscriptionBus()
    tools = _tools()
    watched: set[str] = set()

    async def on_list_tools(_context: Context, _params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=tools)

    async def on_call_tool(context: Context, params: types.CallToolRequestParams) -> Any:
        if params.name in _CHANGES:
            if _CHANGES[params.name] == "tools":
                await bus.publish(ToolsListChanged())
                await context.session.send_tool_list_changed()
            else:
                await bus.publish(PromptsListChanged())
                await context.session.send_prompt_list_changed()
            return types.CallToolResult(content=[types.TextContent(type="text", text="changed")])
        behaviour = BEHAVIOURS.get(params.name)
        if behaviour is None:
            raise MCPError(types.INVALID_PARAMS, f"there is no tool {params.name!r}")
        given = await _carried_out(context, params, behaviour)
        return types.CallToolResult.model_validate(given) if isinstance(given, dict) else given

    async def on_list_resources(_context: Context, _params: Any) -> types.ListResourcesResult:
        return types.ListResourcesResult(resources=RESOURCES)

    async def on_list_templates(_context: Context, _params: Any) -> types.ListResourceTemplatesResult:
        return types.ListResourceTemplatesResult(resource_templates=TEMPLATES)

    async def on_read(_context: Context, params: types.ReadResourceRequestParams) -> types.ReadResourceResult:
        return types.ReadResourceResult.model_validate({"contents": [_content(params.uri)]})

    async def on_subscribe(context: Context, params: types.SubscribeRequestParams) -> types.EmptyResult:
        watched.add(params.uri)
        await bus.publish(ResourceUpdated(uri=params.uri))
        await context.session.send_resource_updated(params.uri)
        return types.EmptyResult()

    async def on_unsubscribe(_context: Context, params: types.UnsubscribeRequestParams) -> types.EmptyResult:
        watched.discard(params.uri)
        return types.EmptyResult()

    async def on_list_prompts(_context: Context, _params: Any) -> types.ListPromptsResult:
        return types.ListPromptsResult(prompts=PROMPTS)

    async def on_get_prompt(context: Context, params: types.GetPromptRequestParams) -> Any:
        async def given_by(args: Mapping[str, Any], door: Any) -> dict[str, Any]:
            return await _prompt(params.name, args, door)

        given = await _carried_out(context, params, given_by)
        return types.GetPromptResult.model_validate(given) if isinstance(given, dict) else given

    async def on_completion(_context: Context, params: types.CompleteRequestParams) -> types.CompleteResult:
        values = [value for value in ("test", "testing", "trial") if value.startswith(params.argument.value)]
        return types.CompleteResult.model_validate({"completion": {"values": values, "total": len(values)}})

    async def on_level(_context: Context, _params: types.SetLevelRequestParams) -> types.EmptyResult:
        return types.EmptyResult()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the older era has and the newer has not
        server: Server[dict[str, Any]] = Server(  # pyright: ignore[reportDeprecated]
            NAME,
            version="1.0.0",
            cache_hints={
                method: CacheHint(ttl_ms=0, scope="private")
                for method in (
                    "tools/list",
                    "prompts/list",
                    "resources/list",
                    "resources/templates/list",
                    "resources/read",
                    "server/discover",
                )
            },
            on_list_tools=on_list_tools,
            on_call_tool=on_call_tool,
            on_list_resources=on_list_resources,
            on_list_resource_templates=on_list_templates,
            on_read_resource=on_read,
            on_subscribe_resource=on_subscribe,
            on_unsubscribe_resource=on_unsubscribe,
            on_subscriptions_listen=ListenHandler(bus),
            on_list_prompts=on_list_prompts,
            on_get_prompt=on_get_prompt,
            on_completion=on_completion,
            on_set_logging_level=on_level,
        )
    server.middleware.append(RequestStateBoundary(RequestStateSecurity.ephemeral(), default_audience=NAME))
    return server


async def over_stdio() -> None:
    from mcp.server.stdio import stdio_server

    server = build()
    options = NotificationOptions(tools_changed=True, prompts_changed=True, resources_changed=True)
    async with stdio_server() as (incoming, outgoing):
        await server.run(incoming, outgoing, server.create_initialization_options(options))


def over_http(port: int) -> None:
    import uvicorn

    app = build().streamable_http_app(event_store=Events(), retry_interval=RETRY_MS)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", ws="none")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, help="serve streamable HTTP on 127.0.0.1 instead of stdio")
    at = parser.parse_args().port
    anyio.run(over_stdio) if at is None else over_http(at)
