"""Floods over HTTP: slow, idle and abandoned clients do not block others, and requests are unambiguous."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.frontends.test_mcp_http import ALICE, BOB, StatelessRequests, running

from handrail.frontends.mcp.http import http_limits, http_server
from handrail.frontends.mcp.http.http_limits import make_bounded_connection_class

INITIALIZE: dict[str, Any] = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {
        "protocolVersion": "2025-11-25",
        "capabilities": {"elicitation": {}},
        "clientInfo": {"name": "t", "version": "1"},
    },
}
PING = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "ping"}).encode()


async def raw(
    rpc: StatelessRequests,
    *lines: str,
    body: bytes = PING,
    target: str = "/mcp",
    end: bool = True,
    framed: bool = False,
) -> tuple[Any, Any]:
    """Send a raw request over its own connection.

    :param framed: whether the lines say where its body ends
    """
    where = urlsplit(rpc.url)
    assert where.hostname is not None and where.port is not None
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    usual = ("Accept: application/json, text/event-stream", "Content-Type: application/json")
    named = "" if any(line.lower().startswith("host") for line in lines) else f"Host: {where.netloc}"
    length = (
        "" if framed or any("transfer-encoding" in line.lower() for line in lines) else f"Content-Length: {len(body)}"
    )
    head = "\r\n".join([f"POST {target} HTTP/1.1", *filter(None, (named, length)), *usual, *lines])
    writer.write(head.encode("latin-1") + (b"\r\n\r\n" + body if end else b""))
    await writer.drain()
    return reader, writer


async def status(rpc: StatelessRequests, *lines: str, **how: Any) -> int:
    reader, writer = await raw(rpc, *lines, **how)
    line = await reader.readline()
    writer.close()
    return int(line.split()[1])


TWICE = {
    "host": ("Host: 127.0.0.1", "Host: 127.0.0.1"),
    "another host": ("Host: 127.0.0.1", "Host: evil.example"),
    "origin": ("Origin: http://127.0.0.1", "Origin: http://127.0.0.1"),
    "another origin": ("Origin: http://127.0.0.1", "Origin: http://evil.example"),
    "authorization": ("Authorization: Bearer a", "Authorization: Bearer b"),
    "session": ("Mcp-Session-Id: a", "Mcp-Session-Id: b"),
    "version": ("MCP-Protocol-Version: 2025-11-25", "MCP-Protocol-Version: 2026-07-28"),
    "method": ("Mcp-Method: a", "mcp-method: b"),
    "name": ("Mcp-Name: a", "Mcp-Name: b"),
    "content type": ("Content-Type: text/plain",),
    "length": ("Content-Length: 3",),
    "both lengths": ("Transfer-Encoding: chunked", "Content-Length: 4"),
    "an underscore": ("Mcp_Session_Id: a",),
    "another underscore": ("Content_Length: 4",),
    "folded": ("Authorization: Bearer", " abc"),
    "folded by a tab": ("X-A: b", "\tAuthorization: Bearer a"),
    "event": ("Last-Event-Id: a", "Last-Event-Id: b"),
}


@pytest.mark.parametrize("lines", TWICE.values(), ids=TWICE.keys())
async def test_an_ambiguous_http_request_is_refused(tmp_path: Path, lines: tuple[str, ...]) -> None:
    async with running(tmp_path) as rpc:
        assert await status(rpc, *lines) == 400
        assert "result" in await rpc.call("todo"), "the next client is answered"


@pytest.mark.parametrize("first", ["answered whole", "answered before its body"])
async def test_a_folded_header_is_refused_in_a_second_request_of_the_connection(tmp_path: Path, first: str) -> None:
    async with running(tmp_path, tokens={ALICE: "alice"}) as rpc:
        token = f"Authorization: Bearer {ALICE if first == 'answered whole' else 'nobody'}"
        part = PING[: None if first == "answered whole" else 4]
        reader, writer = await raw(rpc, f"Content-Length: {len(PING)}", token, body=part, framed=True)
        if first == "answered before its body":
            assert b"401" in await reader.readline()
        where = urlsplit(rpc.url)
        rest = PING[len(part) :]
        folded = f"POST /mcp HTTP/1.1\r\nHost: {where.netloc}\r\nAuthorization: Bearer\r\n {ALICE}\r\nContent-Length: 0\r\n\r\n"
        writer.write(rest + folded.encode())
        assert b"Invalid HTTP request received" in await reader.read()
        writer.close()


@pytest.mark.parametrize("target", ["http://evil.example/mcp", "http://127.0.0.1/mcp", "*", "mcp", "//../mcp?x"])
async def test_a_request_target_that_is_not_served_is_refused(tmp_path: Path, target: str) -> None:
    async with running(tmp_path) as rpc:
        assert await status(rpc, target=target) in ((404,) if target.startswith("/") else (400,))


async def test_a_header_repeated_with_the_same_value_counts_once(tmp_path: Path) -> None:
    async with running(tmp_path) as rpc:
        once = await status(rpc, "Mcp-Session-Id: a")
        assert (once, await status(rpc, "Mcp-Session-Id: a", "Mcp-Session-Id: a")) == (404, 404)


@pytest.mark.parametrize("sent", ["nothing", "a part of the head", "a part of the body", "a second request"])
async def test_the_server_closes_a_request_that_never_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: str
) -> None:
    monkeypatch.setattr(http_limits, "HEAD_TIMEOUT_S", 0.05)
    monkeypatch.setattr(http_limits, "BODY_TIMEOUT_S", 0.05)
    async with running(tmp_path) as rpc:
        where = urlsplit(rpc.url)
        if sent == "nothing":
            reader, writer = await asyncio.open_connection(where.hostname, where.port)
        elif sent == "a part of the body":
            reader, writer = await raw(rpc, "Transfer-Encoding: chunked", body=b"5\r\n{\r\n")
        elif sent == "a part of the head":
            reader, writer = await raw(rpc, "X-A", end=False)
        else:
            reader, writer = await raw(rpc, "Mcp-Session-Id: a")
            await reader.readuntil(b"Session not found")
            writer.write(b"POST /mcp HTT")
        try:
            await reader.read()  # as long as it is open, this waits
        except ConnectionResetError:
            pass
        writer.close()


@pytest.mark.parametrize("bound", ["bytes", "time"])
async def test_a_client_that_keeps_sending_after_its_answer_is_disconnected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr(http_limits, "MAX_DROPPED_BYTES", 2**20 if bound == "bytes" else 2**60)
    monkeypatch.setattr(http_limits, "DROP_TIMEOUT_S", 600.0 if bound == "bytes" else 0.05)
    async with running(tmp_path) as rpc:
        where = urlsplit(rpc.url)
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        writer.write(f"POST /mcp HTTP/1.1\r\nHost: {where.netloc}\r\nContent-Length: 999999999999\r\n\r\n".encode())
        assert (await reader.readuntil(b"too long")).split()[1] == b"413"
        with pytest.raises(ConnectionError):  # as long as it is open, this goes on
            while True:
                writer.write(b" " * 2**16)
                await writer.drain()
        assert "result" in await rpc.call("todo"), "the next client is answered"


def limit_to_five_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    def five(most: int, ended: Callable[[object], object]) -> type[http_limits.TimedHttpConnection]:
        protocol = make_bounded_connection_class(most, ended)
        protocol.most = 5
        return protocol

    monkeypatch.setattr(http_server, "make_bounded_connection_class", five)


async def test_idle_connections_make_room_for_new_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_to_five_connections(monkeypatch)
    async with running(tmp_path) as rpc:
        where = urlsplit(rpc.url)
        held = [await asyncio.open_connection(where.hostname, where.port) for _ in range(20)]
        assert "result" in await rpc.call("todo")
        assert await held[0][0].read() == b"", "the oldest made room"
        for _, writer in held:
            writer.close()


async def test_unfinished_requests_make_room_for_new_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_to_five_connections(monkeypatch)
    async with running(tmp_path) as rpc:
        slow = [await raw(rpc, "Transfer-Encoding: chunked", body=b"1\r\n{\r\n") for _ in range(5)]
        assert "result" in await rpc.call("todo"), "a new client is answered"
        ended, *_ = await asyncio.wait(
            [asyncio.create_task(reader.read()) for reader, _ in slow], return_when=asyncio.FIRST_COMPLETED
        )
        assert ended, "an unfinished request made room"
        for _, writer in slow:
            writer.close()


@pytest.mark.parametrize("files", [256, 1_024, 65_536])
def test_the_connection_limit_leaves_file_descriptors_for_other_files(
    files: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def limit(which: int) -> tuple[int, int]:
        return files, files

    monkeypatch.setattr(resource, "getrlimit", limit)
    made = make_bounded_connection_class(2_000, id)
    assert 16 <= made.most <= 2_000
    assert made.most_at_once >= 8 and made.most + 5 * made.most_at_once <= files * 7 // 8


async def opened(rpc: StatelessRequests, token: str | None = None) -> tuple[int, str]:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    found = await rpc.post(INITIALIZE, **headers)
    return found.status_code, found.headers.get("mcp-session-id", "")


async def known(rpc: StatelessRequests, session: str, token: str | None = None) -> bool:
    headers = {"Mcp-Session-Id": session, "MCP-Protocol-Version": "2025-11-25"}
    headers |= {} if token is None else {"Authorization": f"Bearer {token}"}
    return (await rpc.post({"jsonrpc": "2.0", "id": 2, "method": "ping"}, **headers)).status_code == 200


async def test_abandoned_sessions_are_evicted_and_working_sessions_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "MAX_SESSIONS", 3)
    async with running(tmp_path) as rpc:
        _, used = await opened(rpc)
        for _ in range(3):
            assert await known(rpc, used)
        _, working = await opened(rpc)
        call: dict[str, Any] = {
            "jsonrpc": "2.0",
            "id": 5,
            "method": "tools/call",
            "params": {"name": "greet", "arguments": {}},
        }
        headers = {"Mcp-Session-Id": working, "MCP-Protocol-Version": "2025-11-25"}
        asked = asyncio.create_task(rpc.post(call, **headers))
        found = [await opened(rpc) for _ in range(12)]
        assert {status for status, _ in found} == {200}
        assert await known(rpc, used), "those that did nothing but begin made room"
        assert await known(rpc, working)
        assert [await known(rpc, session) for _, session in found] == [False] * 11 + [True]
        asked.cancel()


async def test_one_credential_cannot_take_the_sessions_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "MAX_SESSIONS", 10)
    monkeypatch.setattr(http_server, "MAX_SESSIONS_PER_CREDENTIAL", 2)
    async with running(tmp_path, tokens={ALICE: "alice", BOB: "bob"}) as rpc:
        _, of_bob = await opened(rpc, BOB)
        of_alice = [(await opened(rpc, ALICE))[1] for _ in range(30)]
        assert await known(rpc, of_bob, BOB)
        assert [await known(rpc, session, ALICE) for session in of_alice] == [False] * 28 + [True] * 2


@pytest.mark.parametrize("choice", ["session", "session-wider", "once"])
async def test_an_approval_by_one_client_does_not_cover_others_in_a_shared_session(tmp_path: Path, choice: str) -> None:
    async with running(tmp_path) as rpc:
        write = {"path": "a.txt", "content": "b"}
        asked = (await rpc.call("write", write))["result"]
        (form,) = asked["inputRequests"].values()
        shown = json.dumps(form)
        assert "for this session" not in shown and "project" in shown
        (key,) = asked["inputRequests"]
        said = {key: {"action": "accept", "content": {"decision": choice}}}
        done = await rpc.call("write", write, requestState=asked["requestState"], inputResponses=said)
        assert (done["result"]["resultType"] == "complete") is (choice == "once")
        other = (await rpc.call("write", write))["result"]
        assert other["resultType"] == "input_required", "it is asked about again"
