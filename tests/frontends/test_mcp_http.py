"""The MCP server over HTTP against a hostile client: raw requests to a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp import Client
from mcp.server.streamable_http import EventMessage

from handrail import tool
from handrail.contract.errors import StartError, UsageError
from handrail.contract.services.client_services import RequestToClient
from handrail.contract.services.tool_runtime import Runtime
from handrail.frontends.mcp import client_manager, connected_client
from handrail.frontends.mcp.client_manager import McpFrontendSettings
from handrail.frontends.mcp.http import http_server
from handrail.frontends.mcp.http.http_limits import MAX_CONNECTIONS
from handrail.frontends.mcp.http.http_server import (
    MAX_STREAM_EVENTS,
    BoundedEventStore,
    HttpFrontendSettings,
    open_http_server,
)
from handrail.testing.scripted_kernel import temporary_kernel

FORM: dict[str, Any] = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef"
KEEP = ("scratchpad", {"action": "set", "key": "plan", "value": "to-hide"})
LOOK = ("scratchpad", {"action": "get", "key": "plan"})
ran: list[str] = []


@tool(side_effect="read", locks=[], requires={"capabilities": ["elicit"]})
async def greet(runtime: Runtime, greeting: str = "Hello") -> str:
    """Ask who is there."""
    answers = await runtime.client.send_requests(
        {"who": RequestToClient("elicitation/create", {"message": "Who?", "requestedSchema": FORM})}
    )
    ran.append(greeting)
    return f"{greeting}, {answers['who']['content']['name']}"


class StatelessRequests:
    """Requests of the stateless era, one POST each."""

    def __init__(self, http: httpx2.AsyncClient, url: str) -> None:
        self.http = http
        self.url = url

    async def post(self, body: Any, **headers: str) -> httpx2.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        usual = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
        return await self.http.post(self.url, content=content, headers={**usual, **headers}, timeout=30)

    async def call(
        self, name: str = "greet", arguments: Any = None, *, can: Any = None, token: str | None = None, **more: Any
    ) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "io.modelcontextprotocol/protocolVersion": "2026-07-28",
            "io.modelcontextprotocol/clientCapabilities": {"elicitation": {}} if can is None else can,
        }
        params: dict[str, Any] = {"name": name, "arguments": arguments or {}, "_meta": meta, **more}
        headers = {"MCP-Protocol-Version": "2026-07-28", "Mcp-Method": "tools/call", "Mcp-Name": name}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        answer = await self.post({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}, **headers)
        return answer.json()


@asynccontextmanager
async def running(
    folder: Path, serving: McpFrontendSettings | None = None, **listening: Any
) -> AsyncGenerator[StatelessRequests]:
    ran.clear()
    where = HttpFrontendSettings("127.0.0.1", 0, **listening)
    async with AsyncExitStack() as stack:
        kernel = await stack.enter_async_context(temporary_kernel(folder, tools=[greet], rules=["allow greet"]))
        url, _ = await stack.enter_async_context(open_http_server(kernel, serving or McpFrontendSettings(), where))
        http = await stack.enter_async_context(httpx2.AsyncClient())
        yield StatelessRequests(http, url)


def answer(name: Any = "Ann") -> dict[str, Any]:
    return {"who": {"action": "accept", "content": {"name": name}}}


def text(found: dict[str, Any]) -> str:
    return found["result"]["content"][0]["text"]


@pytest.mark.proves("F-03")
async def test_a_held_call_asks_again_until_a_fitting_answer_arrives(tmp_path: Path) -> None:
    async with running(tmp_path) as rpc:
        first = (await rpc.call())["result"]
        assert first["resultType"] == "input_required" and list(first["inputRequests"]) == ["who"]
        state = first["requestState"]
        for wrong in ({}, {"else": answer()["who"]}, answer(7)):
            again = (await rpc.call(requestState=state, inputResponses=wrong))["result"]
            assert list(again["inputRequests"]) == ["who"] and again["requestState"] != state
            state = again["requestState"]
        assert text(await rpc.call(requestState=state, inputResponses=answer())) == "Hello, Ann" and ran == ["Hello"]


@pytest.mark.proves("F-03")
async def test_a_request_state_is_valid_once_and_only_for_its_call_and_client(tmp_path: Path) -> None:
    tokens = {ALICE: "alice", BOB: "bob"}
    async with running(tmp_path, tokens=tokens) as rpc:
        state = (await rpc.call(token=ALICE))["result"]["requestState"]
        tampered = state[:-2] + ("AA" if state[-2:] != "AA" else "BB")
        hostile: list[dict[str, Any]] = [
            {"token": BOB, "requestState": state},
            {"token": ALICE, "requestState": tampered},
            {"token": ALICE, "requestState": "v1.AAAA"},
            {"token": ALICE, "requestState": state, "arguments": {"greeting": "Bye"}},
        ]
        for one in hostile:
            refused = await rpc.call(inputResponses=answer(), **one)
            assert refused["error"]["code"] == -32602 and "requestState" in refused["error"]["message"]
        assert ran == []
        assert text(await rpc.call(token=ALICE, requestState=state, inputResponses=answer())) == "Hello, Ann"
        replayed = await rpc.call(token=ALICE, requestState=state, inputResponses=answer("Eve"))
        assert replayed["error"]["code"] == -32602 and ran == ["Hello"]


async def test_a_client_may_send_an_answer_early_but_not_an_approval(tmp_path: Path) -> None:
    async with running(tmp_path) as rpc:
        early: dict[str, Any] = {**answer(), "unknown": {"action": "accept", "content": {}}}
        assert text(await rpc.call(inputResponses=early)) == "Hello, Ann"
        yes = {"action": "accept", "content": {"decision": "once"}}
        asked = await rpc.call(
            "write", {"path": "a", "content": "b"}, inputResponses={"approval": yes, "decision": yes}
        )
        assert asked["result"]["resultType"] == "input_required"


@pytest.mark.proves("F-03")
async def test_a_missing_client_capability_is_named_in_the_refusal(tmp_path: Path) -> None:
    async with running(tmp_path) as rpc:
        refused = await rpc.call(can={})
        assert refused["error"]["code"] == -32021
        assert list(refused["error"]["data"]["requiredCapabilities"]) == ["elicitation"]


async def test_the_number_of_held_calls_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connected_client, "MAX_HELD_CALLS", 3)
    async with running(tmp_path, McpFrontendSettings()) as rpc:
        held = [await rpc.call() for _ in range(3)]
        assert all(one["result"]["resultType"] == "input_required" for one in held)
        refused = (await rpc.call())["result"]
        assert refused["isError"] and "Too many calls" in refused["content"][0]["text"]
        state = held[0]["result"]["requestState"]
        assert text(await rpc.call(requestState=state, inputResponses=answer())) == "Hello, Ann"
        assert (await rpc.call())["result"]["resultType"] == "input_required"


async def test_a_client_that_disconnects_stops_its_call(tmp_path: Path) -> None:
    reached, stopped = asyncio.Event(), asyncio.Event()

    @tool(side_effect="read", locks=[])
    async def linger() -> str:
        """Take for ever."""
        reached.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()
        return ""

    async with AsyncExitStack() as stack:
        kernel = await stack.enter_async_context(temporary_kernel(tmp_path, tools=[linger], rules=["allow linger"]))
        url, _ = await stack.enter_async_context(
            open_http_server(kernel, McpFrontendSettings(), HttpFrontendSettings("127.0.0.1", 0))
        )
        http = await stack.enter_async_context(httpx2.AsyncClient())
        hanging = asyncio.create_task(StatelessRequests(http, url).call("linger"))
        await reached.wait()
        hanging.cancel()
        await stopped.wait()


@pytest.mark.proves("F-03")
async def test_requests_from_unknown_hosts_and_origins_are_refused(tmp_path: Path) -> None:
    ping: dict[str, Any] = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {}}
    async with running(tmp_path, origins=("https://app.example.org",)) as rpc:
        port = rpc.url.rpartition(":")[2].partition("/")[0]
        for host in (
            "evil.example.com",
            "evil.example.com:80",
            "127.0.0.1.evil.example.com",
            f"localhost.evil:{port}",
            "",
        ):
            assert (await rpc.post(ping, Host=host)).status_code in (400, 421), host
        for origin in (
            "https://evil.example.com",
            "null",
            f"http://127.0.0.1.evil:{port}",
            "https://app.example.org.evil",
        ):
            assert (await rpc.post(ping, Origin=origin)).status_code == 403, origin
        assert (await rpc.post(ping, Origin="")).status_code == 400
        for host in (f"localhost:{port}", f"127.0.0.1:{port}", "localhost"):
            assert (await rpc.post(ping, Host=host)).status_code not in (403, 421), host
        assert (await rpc.post(ping, Origin="https://app.example.org")).status_code not in (403, 421)


async def test_a_request_for_a_foreign_host_or_origin_is_refused_before_its_body(tmp_path: Path) -> None:
    async with running(tmp_path) as rpc:
        port = int(rpc.url.rpartition(":")[2].partition("/")[0])
        for named, status in (
            ("Host: evil.example.com", b"421"),
            (f"Host: localhost:{port}\r\nOrigin: https://evil.example.com", b"403"),
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            more = "Content-Type: application/json\r\nContent-Length: 1000000"
            writer.write(f"POST /mcp HTTP/1.1\r\n{named}\r\n{more}\r\n\r\n[".encode())  # the rest never comes
            head, _, _ = (await reader.read()).partition(b"\r\n\r\n")
            assert head.split()[1] == status and b"connection: close" in head.lower()
            writer.close()


@pytest.mark.proves("F-03")
async def test_a_request_without_a_valid_token_is_refused_unread(tmp_path: Path) -> None:
    async with running(tmp_path, tokens={ALICE: "alice"}) as rpc:
        for token in (None, "x" * 100, ALICE[:-1], ALICE + "x", BOB):
            headers = {} if token is None else {"Authorization": f"Bearer {token}"}
            refused = await rpc.post(b"[" * 100, **headers)
            assert refused.status_code == 401 and refused.headers["www-authenticate"].startswith("Bearer")
        assert (await rpc.call(token=ALICE))["result"]["resultType"] == "input_required"
        missing = await rpc.http.get(rpc.url.replace("/mcp", "/.well-known/oauth-protected-resource/mcp"))
        assert missing.status_code == 404, "there is no authorization server to name"


async def test_a_session_answers_only_its_owner_and_its_exact_id(tmp_path: Path) -> None:
    hello = {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "initialize",
        "params": {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}},
    }
    async with running(tmp_path, tokens={ALICE: "alice", BOB: "bob"}) as rpc:
        opened = await rpc.post(hello, Authorization=f"Bearer {ALICE}")
        session = opened.headers["mcp-session-id"]
        ping = {"jsonrpc": "2.0", "id": 2, "method": "ping"}
        another = session[:-1] + ("1" if session.endswith("0") else "0")
        for token, named in ((BOB, session), (ALICE, another), (ALICE, "../../x")):
            refused = await rpc.post(ping, **{"Authorization": f"Bearer {token}", "Mcp-Session-Id": named})
            assert refused.status_code == 404
        known = await rpc.post(ping, **{"Authorization": f"Bearer {ALICE}", "Mcp-Session-Id": session})
        assert known.status_code == 200


@asynccontextmanager
async def another_client(rpc: StatelessRequests) -> AsyncGenerator[StatelessRequests]:
    """A client with its own connection."""
    async with httpx2.AsyncClient() as http:
        yield StatelessRequests(http, rpc.url)


SEEN_ALONE: list[tuple[Any, Any]] = [
    (KEEP, LOOK),
    (("todo", {"todos": [{"content": "to-hide", "status": "pending"}]}), ("todo", {})),
]


@pytest.mark.parametrize(("does", "looks"), SEEN_ALONE)
async def test_clients_without_a_token_cannot_see_each_others_data(tmp_path: Path, does: Any, looks: Any) -> None:
    async with running(tmp_path) as rpc, another_client(rpc) as other:
        done = await rpc.call(*does)
        assert not done["result"].get("isError"), done
        seen = [await one.call(*looks) for one in (rpc, other)]
        assert "to-hide" in json.dumps(seen[0]), "one client goes on where it was"
        assert "to-hide" not in json.dumps(seen[1])


async def test_one_token_is_one_client_across_connections(tmp_path: Path) -> None:
    async with running(tmp_path, tokens={ALICE: "alice"}) as rpc, another_client(rpc) as again:
        await rpc.call(*KEEP, token=ALICE)
        assert "to-hide" in json.dumps(await again.call(*LOOK, token=ALICE))


async def test_requests_from_a_forwarding_proxy_share_no_client_state(tmp_path: Path) -> None:
    async with running(tmp_path) as rpc:
        for name, value in (("X-Forwarded-For", "10.0.0.1"), ("Via", "1.1 proxy"), ("Forwarded", "for=10.0.0.1")):
            rpc.http.headers = httpx2.Headers({name: value})
            await rpc.call(*KEEP)
            assert "to-hide" not in json.dumps(await rpc.call(*LOOK))


async def test_a_request_state_resumes_a_call_on_another_connection(tmp_path: Path) -> None:
    async with running(tmp_path) as rpc, another_client(rpc) as again:
        state = (await rpc.call())["result"]["requestState"]
        await rpc.http.aclose()
        assert text(await again.call(requestState=state, inputResponses=answer())) == "Hello, Ann"
        spent = await again.call(requestState=state, inputResponses=answer())
        assert spent["error"]["data"] == {"reason": "invalid_request_state"}


async def test_the_session_of_a_client_without_a_token_ends_with_its_connection(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        kernel = await stack.enter_async_context(temporary_kernel(tmp_path, tools=[greet], rules=["allow greet"]))
        url, _ = await stack.enter_async_context(
            open_http_server(kernel, McpFrontendSettings(), HttpFrontendSettings("127.0.0.1", 0))
        )
        async with httpx2.AsyncClient() as http:
            await StatelessRequests(http, url).call(*LOOK)
            (session,) = kernel.sessions.sessions_by_id.values()
        async for _ in session.events():  # which end with the session
            pass
        assert session.is_closed


async def test_one_token_cannot_use_more_than_its_share_of_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "handrail.frontends.mcp.http.http_server.MAX_CONNECTIONS", 16
    )  # a quarter of which is one credential's
    async with running(tmp_path, tokens={ALICE: "alice", BOB: "bob"}) as rpc:
        body: dict[str, Any] = {
            "jsonrpc": "2.0",
            "id": 1,
            "method": "subscriptions/listen",
            "params": {
                "_meta": {
                    "io.modelcontextprotocol/protocolVersion": "2026-07-28",
                    "io.modelcontextprotocol/clientCapabilities": {},
                },
                "notifications": {"toolsListChanged": True},
            },
        }
        headers = {
            "Accept": "application/json, text/event-stream",
            "Content-Type": "application/json",
            "MCP-Protocol-Version": "2026-07-28",
            "Mcp-Method": "subscriptions/listen",
            "Authorization": f"Bearer {ALICE}",
        }
        async with AsyncExitStack() as streams:
            for _ in range(4):
                stream = rpc.http.stream("POST", rpc.url, json=body, headers=headers, timeout=30)
                opened = await streams.enter_async_context(stream)
                assert opened.status_code == 200
            refused = await rpc.post(body, **headers)
            assert refused.status_code == 429 and "of this credential" in refused.text
            assert "result" in await rpc.call("todo", token=BOB), "another one's places are free"
        assert MAX_CONNECTIONS > 16


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"[" * 5_000, 400),
        (b'{"a":' * 400 + b"1" + b"}" * 400, 400),
        (b"no json", 400),
        (b"[]", 400),
        (b"\xff\xfe", 400),
    ],
)
async def test_an_invalid_message_is_refused(tmp_path: Path, body: bytes, status: int) -> None:
    async with running(tmp_path) as rpc:
        for headers in ({}, {"MCP-Protocol-Version": "2026-07-28"}):
            assert (await rpc.post(body, **headers)).status_code == status
        assert (await rpc.call())["result"]["resultType"] == "input_required"


@pytest.mark.parametrize("declared", ["99999999999", "99999999999999999999999", None])
async def test_an_oversized_message_is_refused_and_the_server_continues(tmp_path: Path, declared: str | None) -> None:
    async with running(tmp_path) as rpc:
        port = int(rpc.url.rpartition(":")[2].partition("/")[0])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        length = f"Content-Length: {declared}" if declared else "Transfer-Encoding: chunked"
        head = f"POST /mcp HTTP/1.1\r\nHost: localhost:{port}\r\nContent-Type: application/json\r\n{length}\r\n\r\n"
        writer.write(head.encode())
        if not declared:
            for _ in range(17):  # MiB; the bound is 16
                writer.write(b"100000\r\n" + b" " * 0x100000 + b"\r\n")
                await writer.drain()
        assert (await reader.readline()).split()[1] == (b"400" if declared == "99999999999999999999999" else b"413")
        writer.close()
        assert (await rpc.call())["result"]["resultType"] == "input_required"


async def test_idle_clients_are_evicted_and_busy_clients_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = {ALICE: "alice", BOB: "bob", "carol-0123456789abcdef": "carol"}
    async with running(tmp_path, McpFrontendSettings(max_sessions=1), tokens=tokens) as rpc:
        assert "result" in await rpc.call("todo", token=ALICE)
        state = (await rpc.call(token=BOB))["result"]["requestState"]  # in the place of Alice's, and held
        refused = await rpc.call("todo", token="carol-0123456789abcdef")
        assert "Too many clients" in refused["error"]["message"]
        done = await rpc.call(token=BOB, requestState=state, inputResponses=answer())
        assert text(done) == "Hello, Ann"
        assert "result" in await rpc.call("todo", token="carol-0123456789abcdef")
    assert client_manager.McpFrontendSettings().max_sessions > 1


@pytest.mark.parametrize("begun", [b"", b"POST /mcp HTTP/1.1\r\nHost: localhost\r\n"])
async def test_many_connections_at_once_shut_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 40)
    async with running(tmp_path, McpFrontendSettings()) as rpc:
        port = int(rpc.url.rpartition(":")[2].partition("/")[0])
        opened = await asyncio.gather(*(asyncio.open_connection("127.0.0.1", port) for _ in range(200)))
        for _, writer in opened:
            writer.write(begun)
        assert "result" in await rpc.call("todo")
        for reader, writer in opened[:100]:
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b"", "the oldest make room"
            writer.close()
        for _, writer in opened[100:]:
            writer.close()


async def test_the_sdks_client_works_with_a_token(tmp_path: Path) -> None:
    from mcp.client.streamable_http import streamable_http_client

    async with running(tmp_path, tokens={ALICE: "alice"}) as rpc:
        http = httpx2.AsyncClient(headers={"Authorization": f"Bearer {ALICE}"})
        async with http:
            for mode in ("legacy", "auto"):
                async with Client(streamable_http_client(rpc.url, http_client=http), mode=mode) as connected_client:
                    assert "greet" in {one.name for one in (await connected_client.list_tools()).tools}


# ── what an operator may ask for ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("address", "more", "said"),
    [
        ("127.0.0.1", {}, "HOST:PORT"),
        (":80", {}, "HOST:PORT"),
        ("127.0.0.1:70000", {}, "HOST:PORT"),
        ("0.0.0.0:80", {}, "--token-file"),
        ("192.168.1.2:80", {}, "--token-file"),
        ("tools.example.org:80", {}, "--token-file"),
        ("0.0.0.0:80", {"auth_server": "https://auth.example.org"}, "--public-url"),
        ("127.0.0.1:80", {"auth_server": "http://auth.example.org"}, "--auth-server"),
        ("127.0.0.1:80", {"public_url": "https://tools.example.org"}, "--public-url"),
        ("127.0.0.1:80", {"scopes": ("a",)}, "--scope"),
        ("127.0.0.1:80", {"origins": ("*",)}, "--allow-origin"),
        ("127.0.0.1:80", {"origins": ("https://a.example.org/x",)}, "--allow-origin"),
    ],
)
def test_an_unsafe_http_address_is_refused(address: str, more: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        HttpFrontendSettings.from_options(address, **more)


@pytest.mark.parametrize("address", ["127.0.0.1:0", "localhost:80", "[::1]:8080", "127.8.9.1:80"])
def test_a_local_address_needs_no_token(address: str) -> None:
    assert HttpFrontendSettings.from_options(address).is_local


@pytest.mark.skipif(os.name == "nt", reason="modes of files")
def test_a_token_file_that_other_users_can_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"# who may come\nalice {ALICE}\n\n{BOB}\n")
    file.chmod(0o644)
    with pytest.raises(StartError, match="chmod 600"):
        HttpFrontendSettings.from_options("0.0.0.0:80", str(file), public_url="https://tools.example.org/mcp")
    file.chmod(0o600)
    found = HttpFrontendSettings.from_options("0.0.0.0:80", str(file), public_url="https://tools.example.org/mcp")
    assert found.tokens == {ALICE: "alice", BOB: "token-4"} and ALICE not in repr(found)
    for content in ("", "short", f"{ALICE}\n{ALICE}\n", f"a b {ALICE}"):
        file.write_text(content)
        with pytest.raises(UsageError, match="Expected"):
            HttpFrontendSettings.from_options("127.0.0.1:0", str(file))
    with pytest.raises(StartError, match="Could not read"):
        HttpFrontendSettings.from_options("127.0.0.1:0", str(tmp_path / "none"))


# ── what may be asked for again ──────────────────────────────────────────────────────────────────


async def test_later_events_of_the_same_stream_are_replayed() -> None:
    from mcp_types import JSONRPCNotification

    replay, heard = BoundedEventStore(), list[EventMessage]()

    async def send(event: EventMessage) -> None:
        heard.append(event)

    first = await replay.store_event("a", None)
    for number in range(3):
        for stream in ("a", "b"):
            await replay.store_event(stream, JSONRPCNotification(jsonrpc="2.0", method=f"{stream}{number}"))
    assert await replay.replay_events_after(first, send) == "a"
    assert [getattr(one.message, "method", "") for one in heard] == ["a0", "a1", "a2"]
    assert await replay.replay_events_after("1", send) is None
    for _ in range(MAX_STREAM_EVENTS):
        await replay.store_event("a", None)
    assert await replay.replay_events_after(first, send) is None, "the oldest are forgotten"
