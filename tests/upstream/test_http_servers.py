"""Upstream servers over HTTP: gone, stateless, slow, oversized, redirecting, and with requests on streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tests.upstream.scripted_mcp_servers import (
    HttpResponseWriter,
    ReceivedHttpRequest,
    UpstreamHttpServer,
    make_tool_entry,
    run_upstream_http_server,
)

from handrail import Result, SessionOptions
from handrail.contract.session_protocols import Session
from handrail.kernel.local_kernel import LocalKernel
from handrail.testing.scripted_kernel import ScriptedClient, temporary_kernel
from handrail.upstream.client.http_transport import LegacySseTransport, StreamableHttpTransport
from handrail.upstream.client.upstream_session import UpstreamConnectionLost
from handrail.upstream.server_definition import ServerDefinition

Opened = tuple[LocalKernel, Session, UpstreamHttpServer]
Opens = Callable[..., AbstractAsyncContextManager[Opened]]


@pytest.fixture
def opened(tmp_path: Path) -> Opens:
    @asynccontextmanager
    async def opens(
        server: dict[str, Any] | None = None, *, session: SessionOptions | None = None, **settings: Any
    ) -> AsyncGenerator[Opened]:
        async with (
            run_upstream_http_server(**(server or {})) as http,
            temporary_kernel(tmp_path, rules=["allow mcp:h:*"]) as kernel,
            kernel.mcp_servers.connect("h", url=http.url, **settings) as connected,
        ):
            await connected.approve_tool_definitions()
            yield kernel, await kernel.session(**(session or SessionOptions())), http

    return opens


def text_of(result: Result) -> str:
    assert result.ok, result.error_text
    return str(result.data)


def state_of(kernel: LocalKernel) -> str:
    return kernel.components.upstreams["h"].state


@pytest.mark.proves("F-04")
async def test_http_server_tools_are_called_in_one_session_with_the_configured_headers(opened: Opens) -> None:
    async with opened(headers={"X-Team": "blue"}) as (_, session, http):
        assert text_of(await session.call("h_echo", {"text": "x"})) == "x"
        assert text_of(await session.call("h_echo", {"text": "y"})) == "y"
        calls = [one for one in http.requests if one.rpc_method == "tools/call"]
        assert {one.headers["mcp-session-id"] for one in calls} == {"session-1"}
        assert all(one.headers["x-team"] == "blue" for one in http.requests)
        assert all(one.headers["mcp-protocol-version"] == "2025-11-25" for one in calls)
    assert http.requests[-1].method == "DELETE" and not http.sessions


async def test_a_gateway_timeout_fails_one_call_and_the_next_call_succeeds(opened: Opens) -> None:
    async def late(asked: ReceivedHttpRequest, answering: HttpResponseWriter) -> bool:
        await answering.send_response(504, b"<html>gateway", "text/html")
        return True

    async with opened() as (kernel, session, http):
        http.replies.append(late)
        result = await session.call("h_echo", {"text": "x"})
        assert result.error_kind == "failed" and "504" in str(result.error_text)
        assert text_of(await session.call("h_echo", {"text": "x"})) == "x" and state_of(kernel) == "connected"


async def test_a_lost_server_session_is_reopened_once_and_the_refused_call_is_retried(
    opened: Opens,
) -> None:
    async with opened() as (_, session, http):
        assert text_of(await session.call("h_echo", {"text": "x"})) == "x"
        http.forget_sessions()
        assert text_of(await session.call("h_echo", {"text": "again"})) == "again"
        assert [one.rpc_method for one in http.requests].count("initialize") == 2


async def test_a_server_that_forgets_every_session_is_unavailable_after_few_reconnects(opened: Opens) -> None:
    async def forget(asked: ReceivedHttpRequest, answering: HttpResponseWriter) -> bool:
        if asked.rpc_method == "tools/call":
            await answering.send_response(404)
        return asked.rpc_method == "tools/call"

    async with opened() as (_, session, http):
        http.any_request = forget
        result = await session.call("h_echo", {"text": "x"})
        assert result.error_kind == "unavailable" and "forgotten" in str(result.error_text)
        assert [one.rpc_method for one in http.requests].count("initialize") <= 3


async def test_an_unreachable_server_is_unavailable_with_the_time_of_the_next_attempt(opened: Opens) -> None:
    async with opened() as (kernel, session, http):
        kernel.components.upstreams["h"].backoff_s = (60,)
        http.close_port()
        result = await session.call("h_echo", {"text": "x"})
        assert result.error_kind == "unavailable" and "cannot be reached" in str(result.error_text)
        while state_of(kernel) != "waiting":
            await asyncio.sleep(0.01)
        result = await session.call("h_echo", {"text": "x"})
        assert "next attempt in" in str(result.error_text)


async def test_a_hanging_call_does_not_block_other_calls(opened: Opens) -> None:
    asked_for, let_go = asyncio.Event(), asyncio.Event()

    async def hang(asked: ReceivedHttpRequest, answering: HttpResponseWriter) -> bool:
        asked_for.set()
        await let_go.wait()
        return False

    async with opened() as (_, session, http):
        http.replies.append(hang)
        hanging = asyncio.create_task(session.call("h_echo", {"text": "slow"}))
        await asked_for.wait()
        assert text_of(await session.call("h_echo", {"text": "quick"})) == "quick"
        let_go.set()
        assert text_of(await hanging) == "slow"


async def test_a_timed_out_call_sends_a_cancellation_to_the_server(opened: Opens) -> None:
    let_go = asyncio.Event()

    async def hang(asked: ReceivedHttpRequest, answering: HttpResponseWriter) -> bool:
        await let_go.wait()
        return False

    async with opened(timeout_ms=200) as (_, session, http):
        http.replies.append(hang)
        assert (await session.call("h_echo", {"text": "slow"})).error_kind == "timeout"
        while not [one for one in http.requests if one.rpc_method == "notifications/cancelled"]:
            await asyncio.sleep(0.01)
        let_go.set()
        (call,) = (one for one in http.requests if one.rpc_method == "tools/call")
        (told,) = (one for one in http.requests if one.rpc_method == "notifications/cancelled")
        assert told.body["params"]["requestId"] == call.body["id"]


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_endless_response_is_cut_off_at_the_size_limit(opened: Opens, streamed: bool) -> None:
    async def endless(asked: ReceivedHttpRequest, answering: HttpResponseWriter) -> bool:
        if streamed:
            await answering.start_event_stream()
            await answering.raw(b"data: ")
        else:
            await answering.raw(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n")
        while True:
            await answering.raw(b"x" * 2**20)

    async with opened() as (_, session, http):
        http.replies.append(endless)
        result = await session.call("h_echo", {"text": "x"})
        assert result.error_kind == "limit" and "16 MiB" in str(result.error_text)
        assert text_of(await session.call("h_echo", {"text": "x"})) == "x"


async def test_a_broken_stream_is_resumed_at_its_last_event(opened: Opens) -> None:
    waiting: list[Any] = []

    async def breaks(asked: ReceivedHttpRequest, answering: HttpResponseWriter) -> bool:
        waiting.append(asked.body["id"])
        await answering.start_event_stream()
        await answering.event("", id="e-1", retry=10)
        return True

    async def again(asked: ReceivedHttpRequest, answering: HttpResponseWriter) -> bool:
        if asked.method != "GET" or asked.headers.get("last-event-id") != "e-1":
            return False
        result = {"content": [{"type": "text", "text": "after all"}]}
        await answering.start_event_stream()
        await answering.event({"jsonrpc": "2.0", "id": waiting[0], "result": result}, id="e-2")
        return True

    async with opened() as (_, session, http):
        http.replies.append(breaks)
        http.any_request = again
        assert text_of(await session.call("h_echo", {"text": "x"})) == "after all"


class RequestRecorder:
    """The outcome of one request."""

    def __init__(self, fault: Exception | None = None) -> None:
        self.failed: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self._fault = fault

    def on_message(self, message: Any, related: int | None) -> None:
        if self._fault is not None:
            raise self._fault

    def on_request_failed(self, request: int | None, error: Exception) -> None:
        if not self.failed.done():
            self.failed.set_result(error)

    def on_connection_lost(self, why: Exception) -> None:
        return


async def test_a_fault_after_the_answer_does_not_count_as_a_request_that_was_not_sent() -> None:
    async def reply(asked: ReceivedHttpRequest, answering: HttpResponseWriter) -> bool:
        await answering.send_response(200, b'{"jsonrpc": "2.0", "id": 7, "result": {}}')
        return True

    recorder = RequestRecorder(RuntimeError("no such form"))
    async with run_upstream_http_server(any_request=reply) as http:
        channel = StreamableHttpTransport(ServerDefinition("h", "here", "http", url=http.url), httpx2.AsyncClient)
        await channel.open(recorder)
        await channel.send({"jsonrpc": "2.0", "id": 7, "method": "tools/call"})
        error = await recorder.failed
        await channel.aclose()
    assert isinstance(error, UpstreamConnectionLost) and not error.is_unsent and "no such form" in str(error)


async def test_a_connection_that_closes_while_the_older_transport_opens_leaves_nothing_open() -> None:
    listening = asyncio.Event()

    async def reply(asked: ReceivedHttpRequest, answering: HttpResponseWriter) -> bool:
        if asked.method == "POST":
            await answering.send_response(404, b"Not Found", "text/plain")
            return True
        await answering.start_event_stream()
        listening.set()
        await asyncio.Event().wait()
        return True

    before = asyncio.all_tasks()
    clients: list[httpx2.AsyncClient] = []

    def make() -> httpx2.AsyncClient:
        clients.append(httpx2.AsyncClient())
        return clients[-1]

    async with run_upstream_http_server(any_request=reply) as http:
        channel = StreamableHttpTransport(ServerDefinition("h", "here", "http", url=http.url), make)
        await channel.open(RequestRecorder())
        await channel.send({"jsonrpc": "2.0", "id": 1, "method": "initialize"})
        await listening.wait()
        await channel.aclose()
        assert not [one for one in asyncio.all_tasks() - before if one.get_name().startswith("mcp: reads")]
    assert len(clients) == 2 and all(one.is_closed for one in clients)


async def test_an_endpoint_that_is_no_address_ends_the_older_transport_with_its_reason() -> None:
    async def reply(asked: ReceivedHttpRequest, answering: HttpResponseWriter) -> bool:
        await answering.start_event_stream()
        await answering.event("/messages\0", name="endpoint")
        await asyncio.Event().wait()
        return True

    async with run_upstream_http_server(any_request=reply) as http:
        channel = LegacySseTransport(ServerDefinition("h", "here", "sse", url=http.url), httpx2.AsyncClient)
        with pytest.raises(UpstreamConnectionLost, match="character in URL"):
            await channel.open(RequestRecorder())
        await channel.aclose()


async def test_a_stream_that_asks_for_immediate_resumption_is_resumed_after_a_pause() -> None:
    pauses: list[float] = []
    answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    class Listens:
        def on_message(self, message: Any, related: int | None) -> None:
            answered.set_result(message)

        def on_request_failed(self, request: int | None, error: Exception) -> None:
            answered.set_exception(error)

        def on_connection_lost(self, why: Exception) -> None:
            pass

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    async def reply(asked: ReceivedHttpRequest, answering: HttpResponseWriter) -> bool:
        await answering.start_event_stream()
        if asked.method == "GET":
            await answering.event({"jsonrpc": "2.0", "id": 7, "result": {}}, id="e-2")
        else:
            await answering.event("", id="e-1", retry=0)
        return True

    async with run_upstream_http_server(any_request=reply) as http:
        channel = StreamableHttpTransport(
            ServerDefinition("h", "here", "http", url=http.url), httpx2.AsyncClient, pause
        )
        await channel.open(Listens())
        await channel.send({"jsonrpc": "2.0", "id": 7, "method": "tools/call"})
        assert (await answered)["id"] == 7
        await channel.aclose()
    assert pauses == [0.05]


async def test_a_request_on_a_call_stream_reaches_the_client_of_that_call(opened: Opens) -> None:
    both, answers = asyncio.Barrier(2), dict[str, asyncio.Future[Any]]()
    form = {"message": "Who?", "requestedSchema": {"type": "object", "properties": {"name": {"type": "string"}}}}

    async def asks(asked: ReceivedHttpRequest, answering: HttpResponseWriter) -> bool:
        mine = asked.body["params"]["arguments"]["text"]
        answers[mine] = asyncio.get_running_loop().create_future()
        await both.wait()
        await answering.start_event_stream()
        await answering.event({"jsonrpc": "2.0", "id": mine, "method": "elicitation/create", "params": form})
        said = (await answers[mine])["content"]["name"]
        result = {"content": [{"type": "text", "text": f"{mine} is {said}"}]}
        await answering.event({"jsonrpc": "2.0", "id": asked.body["id"], "result": result})
        return True

    async def answered(asked: ReceivedHttpRequest, answering: HttpResponseWriter) -> bool:
        if asked.body and "result" in asked.body:
            answers[asked.body["id"]].set_result(asked.body["result"])
        return False

    def person(name: str) -> dict[str, Any]:
        return {"client": ScriptedClient([{"it": {"action": "accept", "content": {"name": name}}}])}

    async with opened(session=person("Ada"), elicitation=True) as (kernel, ada, http):
        grace = await kernel.session(**person("Grace"))
        http.replies.extend([asks, asks])
        http.any_request = answered
        one, other = await asyncio.gather(ada.call("h_echo", {"text": "a"}), grace.call("h_echo", {"text": "b"}))
        assert (text_of(one), text_of(other)) == ("a is Ada", "b is Grace")


async def test_redirects_and_sign_in_metadata_never_lead_to_a_server_without_a_grant(opened: Opens) -> None:
    async with run_upstream_http_server() as elsewhere:

        async def away(asked: ReceivedHttpRequest, answering: HttpResponseWriter) -> bool:
            await answering.send_response(307, location=elsewhere.url)
            return True

        async def sign_in(asked: ReceivedHttpRequest, answering: HttpResponseWriter) -> bool:
            await answering.send_response(401, www_authenticate=f'Bearer resource_metadata="{elsewhere.url}"')
            return True

        async with opened() as (_, session, http):
            http.replies.extend([away, sign_in])
            assert "redirects to another server" in str((await session.call("h_echo", {"text": "x"})).error_text)
            refused = await session.call("h_echo", {"text": "x"})
            assert not refused.ok and "handrail mcp login h" in str(refused.error_text)
        assert not elsewhere.requests


def test_arguments_marked_for_header_fields_are_sent_as_header_fields() -> None:
    from handrail.upstream.mcp_tool import McpTool

    schema = {"type": "object", "properties": {"region": {"type": "string", "x-mcp-header": "Region"}}}
    definition = ServerDefinition("h", "here", "http", url="http://127.0.0.1:1/mcp")
    tool = McpTool(make_tool_entry("echo") | {"inputSchema": schema}, None, definition, definition.requires)
    assert tool.extract_header_fields({"region": "north", "other": 1}) == {"mcp-param-Region": "north"}


async def test_a_call_is_not_repeated_on_a_new_connection_with_a_changed_tool_definition(
    opened: Opens,
) -> None:
    async with opened() as (_, session, http):
        http.forget_sessions()
        http.tools = [make_tool_entry("echo", "Something else by now")]
        calls = [one.rpc_method for one in http.requests].count("tools/call")
        result = await session.call("h_echo", {"text": "x"})
        assert result.error_kind == "conflict" and "has changed its definition of echo" in str(result.error_text)
        assert [one.rpc_method for one in http.requests].count("tools/call") == calls + 1, (
            "only that which was refused unseen"
        )
