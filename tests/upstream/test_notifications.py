"""Notifications of servers: the event stream of the current protocol, and servers of the first HTTP transport."""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mcp_types as types
import pytest
import uvicorn
from mcp.server.lowlevel import NotificationOptions, Server
from mcp.server.sse import SseServerTransport
from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler, ResourceUpdated, ToolsListChanged
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from tests.upstream.scripted_mcp_servers import (
    HttpResponseWriter,
    ReceivedHttpRequest,
    make_tool_entry,
    run_upstream_http_server,
)

from handrail.contract.errors import ToolError
from handrail.contract.session_protocols import Session
from handrail.frontends.mcp.http.http_server import _UvicornServer  # pyright: ignore[reportPrivateUsage]
from handrail.kernel.local_kernel import LocalKernel
from handrail.testing.scripted_kernel import temporary_kernel
from handrail.upstream.upstream_connection import UpstreamServerConnection

ONE, OTHER = "test://one", "test://other"


@dataclass
class Sdk:
    """A server of the SDK's, whose tools are those that are named here."""

    tools: list[str] = field(default_factory=lambda: ["echo"])
    bus: InMemorySubscriptionBus = field(default_factory=InMemorySubscriptionBus)
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""

    def __post_init__(self) -> None:
        self.listen = ListenHandler(self.bus)
        self.asked: list[list[str]] = []
        """The resources that each stream was asked to tell of."""

    def server(self) -> Server[Any]:
        async def on_list(_context: Any, _params: Any) -> types.ListToolsResult:
            return types.ListToolsResult(
                tools=[types.Tool.model_validate(make_tool_entry(name)) for name in self.tools]
            )

        async def on_call(context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
            given = params.arguments or {}
            if params.name == "hang":
                try:
                    await context.session.report_progress(1.0, 2.0, "begun")
                    await asyncio.Event().wait()
                finally:
                    self.stopped.set()
            text = types.TextContent(type="text", text=str(given.get("text")))
            return types.CallToolResult(content=[text])

        async def on_resources(_context: Any, _params: Any) -> types.ListResourcesResult:
            return types.ListResourcesResult(resources=[types.Resource(uri=uri, name=uri) for uri in (ONE, OTHER)])

        async def on_listen(context: Any, params: types.SubscriptionsListenRequestParams) -> Any:
            self.asked.append(sorted(params.notifications.resource_subscriptions or ()))
            return await self.listen(context, params)

        return Server(
            "sdk",
            on_list_tools=on_list,
            on_call_tool=on_call,
            on_list_resources=on_resources,
            on_subscriptions_listen=on_listen,
        )


@asynccontextmanager
async def served(app: Starlette) -> AsyncGenerator[int]:
    listener = _UvicornServer(
        uvicorn.Config(app, port=0, log_config=None, lifespan="auto", timeout_graceful_shutdown=1)
    )
    running = asyncio.create_task(listener.serve())
    while not listener.started:
        await asyncio.sleep(0)
    try:
        yield listener.servers[0].sockets[0].getsockname()[1]
    finally:
        listener.should_exit = listener.force_exit = True
        await running


@asynccontextmanager
async def modern() -> AsyncGenerator[Sdk]:
    sdk = Sdk()
    async with served(sdk.server().streamable_http_app(json_response=False)) as port:
        sdk.url = f"http://127.0.0.1:{port}/mcp"
        yield sdk


@asynccontextmanager
async def first_transport() -> AsyncGenerator[Sdk]:
    sdk = Sdk(tools=["echo", "hang"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is of the older era
        transport, server = SseServerTransport("/messages/"), sdk.server()
    options = server.create_initialization_options(NotificationOptions(tools_changed=True))

    async def stream(request: Request) -> Response:
        async with transport.connect_sse(request.scope, request.receive, request._send) as (incoming, outgoing):  # pyright: ignore[reportPrivateUsage]
            await server.run(incoming, outgoing, options)
        return Response()

    app = Starlette(routes=[Route("/sse", stream), Mount("/messages/", app=transport.handle_post_message)])
    async with served(app) as port:
        sdk.url = f"http://127.0.0.1:{port}/sse"
        yield sdk


@asynccontextmanager
async def behind(
    tmp_path: Path, url: str, **settings: Any
) -> AsyncGenerator[tuple[LocalKernel, Session, UpstreamServerConnection]]:
    async with (
        temporary_kernel(tmp_path, rules=["allow mcp:s:*", "allow resource.subscribe"]) as kernel,
        kernel.mcp_servers.connect("s", url=url, **settings) as connected,
    ):
        await connected.approve_tool_definitions()
        yield kernel, await kernel.session(), kernel.components.upstreams["s"]


async def until(holds: Callable[[], bool]) -> None:
    """The test's own time-out bounds it."""
    while not holds():
        await asyncio.sleep(0.005)


def updated_in(session: Session) -> asyncio.Queue[str]:
    seen: asyncio.Queue[str] = asyncio.Queue()

    def told(event: Any) -> None:
        if event.kind == "resource-updated":
            seen.put_nowait(event.data["uri"])

    session.watch_events(told)
    return seen


@pytest.mark.proves("F-04")
async def test_a_stateless_server_reports_new_tools_and_changed_resources(tmp_path: Path) -> None:
    async with modern() as sdk, behind(tmp_path, sdk.url) as (kernel, session, upstream):
        assert upstream.protocol_version == "2026-07-28"
        seen = updated_in(session)
        for uri in (ONE, OTHER):
            result = await session.call("resource.subscribe", {"uri": uri})
            assert result.ok, result.error_text
            await sdk.bus.publish(ResourceUpdated(uri=uri))  # at once: whoever was told yes is told
            assert await seen.get() == uri
        sdk.tools.append("further")
        await sdk.bus.publish(ToolsListChanged())
        await until(lambda: kernel.generation.resolve_tool_name("s_further") is not None)
        assert (await session.call("resource.unsubscribe", {"uri": ONE})).ok
        await until(lambda: sdk.asked[-1] == [OTHER])
        await sdk.bus.publish(ResourceUpdated(uri=ONE))
        await sdk.bus.publish(ResourceUpdated(uri=OTHER))
        assert await seen.get() == OTHER and seen.empty()
        assert upstream.attempts == 1


async def test_changes_missed_during_a_broken_stream_are_found(tmp_path: Path) -> None:
    async with modern() as sdk, behind(tmp_path, sdk.url) as (kernel, _, _):
        await until(lambda: len(sdk.asked) == 1)
        sdk.tools.append("further")
        sdk.listen.close()
        await until(lambda: kernel.generation.resolve_tool_name("s_further") is not None and len(sdk.asked) == 2)


async def test_a_stream_stays_open_until_its_successor_is_ready(tmp_path: Path) -> None:
    async with modern() as sdk, behind(tmp_path, sdk.url) as (_, session, _):
        seen = updated_in(session)
        assert (await session.call("resource.subscribe", {"uri": ONE})).ok
        subscribing = asyncio.ensure_future(session.call("resource.subscribe", {"uri": OTHER}))
        while not subscribing.done():
            await sdk.bus.publish(ResourceUpdated(uri=ONE))
            while seen.empty() and not subscribing.done():
                await asyncio.sleep(0)
        assert await seen.get() == ONE and (await subscribing).ok


Says = Callable[[ReceivedHttpRequest, HttpResponseWriter], Awaitable[None]]


@asynccontextmanager
async def scripted(
    tmp_path: Path, listening: Says
) -> AsyncGenerator[tuple[list[ReceivedHttpRequest], Session, UpstreamServerConnection]]:
    """A server of the stateless era with a scripted answer to ``subscriptions/listen``."""

    async def answer(asked: ReceivedHttpRequest, answering: HttpResponseWriter) -> bool:
        match asked.rpc_method:
            case "server/discover":
                can = {"tools": {"listChanged": True}, "resources": {"subscribe": True, "listChanged": True}}
                await answering.result(asked, {"supportedVersions": ["2026-07-28"], "capabilities": can})
            case "tools/list":
                await answering.result(asked, {"tools": [make_tool_entry("echo")]})
            case "resources/list":
                await answering.result(asked, {"resources": [{"uri": ONE, "name": "one"}]})
            case "tools/call":
                await answering.result(asked, {"content": [{"type": "text", "text": "x"}]})
            case "subscriptions/listen":
                await listening(asked, answering)
            case _:
                await answering.result(asked, {})
        return True

    async with (
        run_upstream_http_server(any_request=answer) as http,
        behind(tmp_path, http.url) as (_, session, upstream),
    ):
        yield http.requests, session, upstream


async def test_a_server_without_subscriptions_is_not_asked_again_and_the_subscription_fails(tmp_path: Path) -> None:
    async def unknown(asked: ReceivedHttpRequest, answering: HttpResponseWriter) -> None:
        error = {"code": -32601, "message": "no such method"}
        body = {"jsonrpc": "2.0", "id": asked.body["id"], "error": error}
        await answering.send_response(200, json.dumps(body).encode())

    async with scripted(tmp_path, unknown) as (asked, session, upstream):
        refused = await session.call("resource.subscribe", {"uri": ONE})
        assert not refused.ok and "does not report" in str(refused.error_text)
        assert (await session.call("s_echo", {})).data == "x" and upstream.state == "connected"
        assert len([one for one in asked if one.rpc_method == "subscriptions/listen"]) == 1


async def test_a_stream_that_ends_immediately_is_reopened_with_growing_delays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from handrail.upstream.client import resource_subscriptions

    ended = 0

    async def ends(asked: ReceivedHttpRequest, answering: HttpResponseWriter) -> None:
        nonlocal ended
        ended += 1
        await answering.start_event_stream()
        meta = {"io.modelcontextprotocol/subscriptionId": asked.body["id"]}
        said = {"method": "notifications/subscriptions/acknowledged", "params": {"_meta": meta, "notifications": {}}}
        await answering.event({"jsonrpc": "2.0", **said})
        await answering.event({"jsonrpc": "2.0", "id": asked.body["id"], "result": {}})

    waited = asyncio.Event()
    monkeypatch.setattr(resource_subscriptions, "_RETRY_DELAYS_S", (0.0, 0.0, 0.0, 3600.0))
    monkeypatch.setattr(resource_subscriptions, "STABLE_STREAM_S", 3600.0)
    async with scripted(tmp_path, ends) as (_, session, _):
        await until(lambda: ended == 3)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(waited.wait(), 0.05)
        assert ended == 3 and (await session.call("s_echo", {})).data == "x"


# ── the first HTTP transport ─────────────────────────────────────────────────────────────────────


@pytest.mark.proves("F-04")
async def test_a_server_of_the_first_http_transport_handles_calls_cancellations_and_new_tools(tmp_path: Path) -> None:
    async with first_transport() as sdk, behind(tmp_path, sdk.url, transport="sse") as (kernel, session, upstream):
        assert (await session.call("s_echo", {"text": "x"})).data == "x" and upstream.attempts == 1
        begun = asyncio.Event()

        def seen(event: Any) -> None:
            if event.data.get("total") == 2.0:
                begun.set()

        session.watch_events(seen)
        turn = asyncio.ensure_future(session.call("s_hang", {}))
        await begun.wait()
        assert (await session.call("s_echo", {"text": "meanwhile"})).data == "meanwhile"
        turn.cancel()
        await asyncio.gather(turn, return_exceptions=True)
        await sdk.stopped.wait()  # the server was told
        sdk.tools.append("further")
        await sdk.bus.publish(ToolsListChanged())
        await until(lambda: kernel.generation.resolve_tool_name("s_further") is not None)


@pytest.mark.proves("F-04")
async def test_a_server_limited_to_the_first_transport_version_is_served_in_that_version(tmp_path: Path) -> None:
    """As most such servers: all messages come on one stream, whose end fails the running calls."""
    streams: list[HttpResponseWriter] = []
    over = asyncio.Event()
    tools = [make_tool_entry("echo"), make_tool_entry("hang")]

    async def answer(asked: ReceivedHttpRequest, answering: HttpResponseWriter) -> bool:
        if asked.method == "GET":
            streams.append(answering)
            await answering.start_event_stream()
            await answering.event("/messages?session=1", name="endpoint")
            await over.wait()
            return True
        assert asked.path == "/messages?session=1"
        await answering.send_response(202)
        number = asked.body.get("id")
        result: dict[str, Any] | None = None
        match asked.rpc_method:
            case "server/discover":
                unknown = {"code": -32601, "message": "no such method"}
                await streams[-1].event({"jsonrpc": "2.0", "id": number, "error": unknown}, name="message")
            case "initialize":
                can = {"tools": {"listChanged": True}}
                result = {"protocolVersion": "2024-11-05", "capabilities": can, "serverInfo": {"name": "old"}}
            case "tools/list":
                result = {"tools": tools}
            case "tools/call" if asked.body["params"]["name"] == "echo":
                result = {"content": [{"type": "text", "text": "x"}]}
            case "tools/call":
                over.set()
            case _:
                pass
        if result is not None:
            await streams[-1].event({"jsonrpc": "2.0", "id": number, "result": result}, name="message")
        return True

    async with (
        run_upstream_http_server(any_request=answer) as http,
        behind(tmp_path, http.url, transport="sse") as (kernel, session, upstream),
    ):
        assert upstream.protocol_version == "2024-11-05" and (await session.call("s_echo", {})).data == "x"
        tools.append(make_tool_entry("further"))
        await streams[-1].event({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"})
        await until(lambda: kernel.generation.resolve_tool_name("s_further") is not None)
        lost = await session.call("s_hang", {})
        assert lost.error_kind == "interrupted" and "stream of events ended" in str(lost.error_text)


async def test_an_event_stream_endpoint_on_another_server_is_refused(tmp_path: Path) -> None:
    async def answer(_asked: ReceivedHttpRequest, answering: HttpResponseWriter) -> bool:
        await answering.start_event_stream()
        await answering.event("http://192.0.2.1/steal", name="endpoint")
        return True

    async with run_upstream_http_server(any_request=answer) as http, temporary_kernel(tmp_path) as kernel:
        with pytest.raises(ToolError, match=r"192\.0\.2\.1.*another server"):
            async with kernel.mcp_servers.connect("s", url=http.url, transport="sse"):
                pass
        assert [one.method for one in http.requests] == ["GET"]
