"""Odd messages of clients: each request gets an answer, and the connection survives."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import httpx2
import pytest
from tests.frontends.conftest import Program

from handrail.frontends.mcp.http.http_server import HttpFrontendSettings, open_http_server
from handrail.frontends.mcp.tool_listing import McpFrontendSettings
from handrail.testing.scripted_kernel import temporary_kernel

PING = '{"jsonrpc": "2.0", "id": %s, "method": "ping"}'
READ = '{"jsonrpc": "2.0", "id": %s, "method": "tools/call", "params": {"name": "read", "arguments": %s}}'
LAST = PING % '"last"'
PARSE, REQUEST, METHOD, PARAMS = -32700, -32600, -32601, -32602
ANSWERED = 0
"""A result, or the result of a tool."""

# The line, and the answers to it: each ID with its error code, or ANSWERED.
ODD: dict[str, tuple[bytes, Sequence[tuple[object, int]]]] = {
    "no JSON": (b"hello", [(None, PARSE)]),
    "half a message": (b'{"jsonrpc": "2.0", "id": 5, "method": ', [(5, PARSE)]),
    "half a message without an ID": (b'{"method": ', [(None, PARSE)]),
    "a byte order mark": (b"\xef\xbb\xbf" + (PING % 6).encode(), [(6, ANSWERED)]),
    "UTF-16": ((PING % 7).encode("utf-16"), [(None, PARSE)]),
    "a line end of Windows": ((PING % 8).encode() + b"\r", [(8, ANSWERED)]),
    "no bytes of a character": (READ.encode() % (b"9", b'{"path": "a\xff.txt"}'), [(9, ANSWERED)]),
    "half a character": ((READ % (10, r'{"path": "a\ud83d.txt"}')).encode(), [(10, ANSWERED)]),
    "the other half": ((READ % (11, r'{"path": "\udc00"}')).encode(), [(11, ANSWERED)]),
    "a number that is none": ((READ % (12, '{"path": "note.txt", "offset": NaN}')).encode(), [(12, ANSWERED)]),
    "an endless number": ((READ % (13, '{"path": "note.txt", "offset": 1e400}')).encode(), [(13, ANSWERED)]),
    "a huge integer": ((READ % (14, '{"path": "note.txt", "offset": 1' + "0" * 30 + "}")).encode(), [(14, ANSWERED)]),
    "a huge ID": ((PING % ("1" + "0" * 30)).encode(), [(10**30, ANSWERED)]),
    "a negative ID": ((PING % -1).encode(), [(-1, ANSWERED)]),
    "an ID twice": (b'{"jsonrpc": "2.0", "id": 18, "id": 19, "method": "ping"}', [(19, ANSWERED)]),
    "an argument twice": ((READ % (20, '{"path": "x", "path": "note.txt"}')).encode(), [(20, ANSWERED)]),
    "no ID": ((PING % "null").encode(), [(None, REQUEST)]),
    "half an ID": ((PING % 1.5).encode(), [(None, REQUEST)]),
    "a truth for an ID": ((PING % "true").encode(), [(None, REQUEST)]),
    "an object for an ID": ((PING % "{}").encode(), [(None, REQUEST)]),
    "no protocol": (b'{"id": 25, "method": "ping"}', [(25, ANSWERED)]),
    "another protocol": (b'{"jsonrpc": "1.0", "id": 26, "method": "ping"}', [(26, REQUEST)]),
    "a number for a method": (b'{"jsonrpc": "2.0", "id": 27, "method": 5}', [(27, REQUEST)]),
    "neither method nor result": (b'{"jsonrpc": "2.0", "id": 28}', [(28, REQUEST)]),
    "an empty object": (b"{}", [(None, REQUEST)]),
    "a method that is unknown": (b'{"jsonrpc": "2.0", "id": 30, "method": "foo/bar"}', [(30, METHOD)]),
    "an empty method": (b'{"jsonrpc": "2.0", "id": 31, "method": ""}', [(31, METHOD)]),
    "a list for parameters": (b'{"jsonrpc": "2.0", "id": 32, "method": "tools/list", "params": []}', [(32, REQUEST)]),
    "a text for parameters": (b'{"jsonrpc": "2.0", "id": 33, "method": "tools/list", "params": "x"}', [(33, REQUEST)]),
    "null": (b"null", [(None, REQUEST)]),
    "a number": (b"5", [(None, REQUEST)]),
    "a text": (b'"x"', [(None, REQUEST)]),
    "two messages": ((PING % 37 + PING % 38).encode(), [(37, ANSWERED), (38, ANSWERED)]),
    "an empty batch": (b"[]", [(None, REQUEST)]),
    "a name that is none": (
        b'{"jsonrpc": "2.0", "id": 40, "method": "tools/call", "params": {"name": 5}}',
        [(40, PARAMS)],
    ),
    "a list of arguments": ((READ % (41, '["note.txt"]')).encode(), [(41, PARAMS)]),
    "an empty list of arguments": ((READ % (46, "[]")).encode(), [(46, ANSWERED)]),
    "arguments as text": ((READ % (47, '"{}"')).encode(), [(47, ANSWERED)]),
    "arguments that are no object": ((READ % (48, '"note.txt"')).encode(), [(48, PARAMS)]),
    "a whole number with a point for an ID": ((PING % "49.0").encode(), [(49, ANSWERED)]),
    "no arguments": ((READ % (42, "null")).encode(), [(42, ANSWERED)]),
    "a call without parameters": (b'{"jsonrpc": "2.0", "id": 43, "method": "tools/call"}', [(43, PARAMS)]),
    "a cursor that is none": (
        b'{"jsonrpc": "2.0", "id": 44, "method": "tools/list", "params": {"cursor": 5}}',
        [(44, PARAMS)],
    ),
    "an odd _meta": (b'{"jsonrpc": "2.0", "id": 45, "method": "tools/list", "params": {"_meta": 5}}', [(45, ANSWERED)]),
    "an empty cursor": (
        b'{"jsonrpc": "2.0", "id": 50, "method": "tools/list", "params": {"cursor": ""}}',
        [(50, ANSWERED)],
    ),
    "no progress token": (
        b'{"jsonrpc": "2.0", "id": 51, "method": "prompts/list", "params": {"_meta": {"progressToken": null}}}',
        [(51, ANSWERED)],
    ),
    "a fraction for a progress token": (
        b'{"jsonrpc": "2.0", "id": 52, "method": "resources/list", "params": {"_meta": {"progressToken": 1.5}}}',
        [(52, ANSWERED)],
    ),
    "a large number for a progress token": (
        b'{"jsonrpc": "2.0", "id": 55, "method": "tools/list", "params": {"_meta": {"progressToken": 1e300}}}',
        [(55, ANSWERED)],
    ),
    "a level of another system": (
        b'{"jsonrpc": "2.0", "id": 53, "method": "logging/setLevel", "params": {"level": "WARN"}}',
        [(53, ANSWERED)],
    ),
    "a level that is unknown": (
        b'{"jsonrpc": "2.0", "id": 54, "method": "logging/setLevel", "params": {"level": "loud"}}',
        [(54, PARAMS)],
    ),
    "an empty line": (b"", []),
    "spaces": (b"   ", []),
    "an answer to nothing": (b'{"jsonrpc": "2.0", "id": 99, "result": 5}', []),
    "a notification that is unknown": (b'{"jsonrpc": "2.0", "method": "notifications/foo", "params": {}}', []),
    "a notification with a list": (b'{"jsonrpc": "2.0", "method": "notifications/initialized", "params": []}', []),
    "a cancellation of nothing": (
        b'{"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": {}}}',
        [],
    ),
}
BATCH = (
    '[%s, {"jsonrpc": "2.0", "method": "notifications/foo"}, 1, {"jsonrpc": "2.0", "id": "list", "method": "tools/list"}]'
    % (PING % '"in"')
)


def hello(version: str) -> str:
    params = {"protocolVersion": version, "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
    return json.dumps({"jsonrpc": "2.0", "id": "hello", "method": "initialize", "params": params})


async def talk(
    command: Sequence[str], *lines: bytes | str, batch: bool = False, least: int = 0
) -> tuple[list[Any], bytes]:
    """Send the lines and a last ping, and return the answers and stderr.

    :param batch: whether to wait for the answers to a batch, too
    :param least: how many answers to wait for before the input ends
    """
    process = await asyncio.create_subprocess_exec(
        *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, limit=2**24
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    for line in (*lines, LAST):
        process.stdin.write((line.encode() if isinstance(line, str) else line) + b"\n")
    answers: list[Any] = []
    awaited = {"last", "list"} if batch else {"last"}
    while awaited or len(answers) < least:  # one answer can overtake another
        answers.append(json.loads(await process.stdout.readline()))
        awaited -= {one.get("id") for one in messages_in(answers[-1])}
    process.stdin.close()
    answers += [json.loads(line) for line in (await process.stdout.read()).splitlines()]
    assert await process.wait() == 0
    return answers, await process.stderr.read()


def messages_in(answer: Any) -> list[dict[str, Any]]:
    """The messages of an answer, which may be a batch."""
    return cast("list[dict[str, Any]]", answer) if isinstance(answer, list) else [answer]


def summary(answer: dict[str, Any]) -> tuple[object, int]:
    return answer.get("id"), answer["error"]["code"] if "error" in answer else ANSWERED


@pytest.mark.parametrize("first", [True, False])
async def test_the_mcp_server_answers_each_request_among_malformed_messages(handrail: Program, first: bool) -> None:
    lines = [line for line, _ in ODD.values()]
    expected = [one for _, answers in ODD.values() for one in answers]
    sent = [hello("2025-06-18"), *lines] if first else lines
    answers, err = await talk(handrail.command("mcp"), *sent, least=len(expected) + 1 + first)
    given = [summary(one) for one in answers if one.get("id") not in ("hello", "last")]
    assert err == b""
    if first:
        assert sorted(given, key=repr) == sorted(expected, key=repr)
    else:  # a request before the handshake is answered with an error
        assert sorted((asked for asked, _ in given), key=repr) == sorted((asked for asked, _ in expected), key=repr)
        assert not [one for one in answers if one.get("error", {}).get("code") == 0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"path": "note.txt"}, "hello"), ('{"path": "note.txt"}', "hello"), ([], "`path` is missing")],
)
async def test_arguments_in_another_form_are_taken(handrail: Program, arguments: object, words: str) -> None:
    (handrail.workspace / "note.txt").write_text("hello")
    read = READ % (5, json.dumps(arguments))
    answers, err = await talk(handrail.command("mcp"), hello("2025-06-18"), read, least=3)
    (said,) = [one for one in answers if one.get("id") == 5]
    assert words in json.dumps(said) and err == b""


@pytest.mark.parametrize(
    "odd",
    [{"capabilities": None}, {"capabilities": []}, {"capabilities": {"roots": True, "elicitation": None, "sampling": []}},
     {"protocolVersion": None}, {"protocolVersion": 5, "capabilities": {}}, {"protocolVersion": []}, {"protocolVersion": "latest"},
     {"protocolVersion": None, "capabilities": None, "clientInfo": None}, {"clientInfo": None}, {"clientInfo": "test"}, {"clientInfo": {"name": "test"}}, {"clientInfo": {"name": 5, "version": 1.0}}],
    ids=str,
)  # fmt: skip
async def test_a_handshake_with_odd_members_is_made(handrail: Program, odd: dict[str, Any]) -> None:
    message = json.loads(hello("2025-06-18"))
    message["params"] = {key: value for key, value in {**message["params"], **odd}.items() if value is not None}
    answers, err = await talk(handrail.command("mcp"), json.dumps(message), PING % 5, least=3)
    assert [one["id"] for one in answers if "result" in one] == ["hello", 5, "last"] and err == b""


@pytest.mark.parametrize("params", ["", ', "params": null', ', "params": {}', ', "params": {"protocolVersion": null}'])
async def test_a_handshake_without_members_is_made(handrail: Program, params: str) -> None:
    begin = f'{{"jsonrpc": "2.0", "id": "hello", "method": "initialize"{params}}}'
    answers, err = await talk(handrail.command("mcp"), begin, PING % 5, least=3)
    assert [one["id"] for one in answers if "result" in one] == ["hello", 5, "last"] and err == b""


PREFIXED = ["mcp__handrail__glob", "mcp__my_tools__glob", "mcp_handrail_glob", "handrail__glob", "handrail_glob",
            "handrail-glob", "handrail.glob", "handrail:glob", "handrail/glob", " glob "]  # fmt: skip


async def test_a_name_with_the_prefix_of_a_client_reaches_its_tool(handrail: Program) -> None:
    arguments = {"pattern": "*"}
    calls = [{"name": name, "arguments": arguments} for name in PREFIXED]
    calls += [{"name": "call_tool", "arguments": {"name": name, "arguments": arguments}} for name in PREFIXED]
    calls += [{"name": "mcp__handrail__call_tool", "arguments": {"name": "glob", "arguments": json.dumps(arguments)}}]
    lines = [
        json.dumps({"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params})
        for number, params in enumerate(calls)
    ]
    answers, err = await talk(handrail.command("mcp"), hello("2025-06-18"), *lines, least=len(lines) + 2)
    found = {one["id"]: one["result"] for one in answers if "result" in one}
    assert [number for number in range(len(calls)) if found[number].get("isError")] == [] and err == b""


@pytest.mark.parametrize(
    "name", ["mcp__handrail__nothing", "handrail_nothing", "github__glob", "mcp__glob", "__glob", "globs"]
)
async def test_a_name_of_another_server_reaches_no_tool(handrail: Program, name: str) -> None:
    call = {"name": name, "arguments": {"pattern": "*"}}
    line = json.dumps({"jsonrpc": "2.0", "id": 5, "method": "tools/call", "params": call})
    answers, _ = await talk(handrail.command("mcp"), hello("2025-06-18"), line, least=3)
    (said,) = [one["result"] for one in answers if one["id"] == 5]
    assert said["isError"] and "does not exist" in json.dumps(said)


async def test_the_acp_server_answers_each_request_among_malformed_messages(handrail: Program) -> None:
    begin = json.dumps({"jsonrpc": "2.0", "id": "hello", "method": "initialize", "params": {"protocolVersion": 1}})
    chosen = {name: answers for name, (_, answers) in ODD.items() if "ping" not in str(ODD[name][0])}
    lines = [line for name, (line, _) in ODD.items() if name in chosen]
    asked = sorted((one for answers in chosen.values() for one, _ in answers), key=repr)
    command = handrail.command("acp", "--model", "script:none.json")
    answers, err = await talk(command, begin, *lines, least=len(asked) + 2)
    assert err == b""
    assert sorted((one.get("id") for one in answers if one.get("id") not in ("hello", "last")), key=repr) == asked


async def test_a_batch_is_answered_in_the_protocol_version_with_batches(handrail: Program) -> None:
    answers, err = await talk(handrail.command("mcp"), hello("2025-03-26"), BATCH, batch=True)
    (batch,) = [messages_in(one) for one in answers if isinstance(one, list)]
    assert sorted(map(summary, batch), key=repr) == sorted([("in", 0), ("list", 0), (None, REQUEST)], key=repr)
    assert err == b""


@pytest.mark.parametrize("version", ["2024-11-05", "2025-06-18", "2025-11-25"])
async def test_each_request_of_a_batch_is_refused_in_protocol_versions_without_batches(
    handrail: Program, version: str
) -> None:
    answers, _ = await talk(handrail.command("mcp"), hello(version), BATCH)
    refused = [summary(one) for one in answers if one.get("id") not in ("hello", "last")]
    assert refused == [("in", REQUEST), (None, REQUEST), ("list", REQUEST)]
    assert "2025-03-26" in answers[1]["error"]["message"]


@pytest.mark.parametrize("asked", [1, 2])
async def test_a_client_that_ignores_the_answer_to_its_discovery_can_still_initialize(
    handrail: Program, asked: int
) -> None:
    envelope = {
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientInfo": {"name": "test", "version": "1"},
        "io.modelcontextprotocol/clientCapabilities": {},
    }
    discover = {"jsonrpc": "2.0", "method": "server/discover", "params": {"_meta": envelope}}
    lines = [json.dumps({**discover, "id": f"d{number}"}) for number in range(asked)]
    tools = '{"jsonrpc": "2.0", "id": "tools", "method": "tools/list"}'
    call = '{"jsonrpc": "2.0", "id": "call", "method": "tools/call", "params": {"name": "glob", "arguments": {"pattern": "*"}}}'
    answers, err = await talk(handrail.command("mcp"), *lines, hello("2025-11-25"), tools, call, least=asked + 4)
    found = {one["id"]: one for one in answers if "id" in one}
    assert err == b"" and not [one for one in answers if "error" in one]
    assert found["hello"]["result"]["protocolVersion"] == "2025-11-25"
    assert found["tools"]["result"]["tools"] and "isError" not in found["call"]["result"]


HEADERS = {
    "as a language server has them": "Content-Length: %d\r\n\r\n",
    "without carriage returns": "Content-Length: %d\n\n",
    "in small letters and another order": (
        "content-type: application/vscode-jsonrpc; charset=utf-8\r\ncontent-length:%d\r\n\r\n"
    ),
}


@pytest.mark.parametrize("kind", ["mcp", "acp"])
@pytest.mark.parametrize("headers", HEADERS.values(), ids=HEADERS)
async def test_messages_with_headers_are_answered_in_the_same_form(handrail: Program, kind: str, headers: str) -> None:
    begin = hello("2025-06-18")
    if kind == "acp":
        begin = '{"jsonrpc": "2.0", "id": "hello", "method": "initialize", "params": {"protocolVersion": 1}}'
    more = ("--model", "script:none.json") if kind == "acp" else ()
    process = await asyncio.create_subprocess_exec(
        *handrail.command(kind, *more), stdin=subprocess.PIPE, stdout=subprocess.PIPE, limit=2**24
    )
    assert process.stdin is not None and process.stdout is not None
    bodies = [
        begin,
        '{"jsonrpc": "2.0", "id": 2, "method":\n "é/none"}',
        "{",
        '{"jsonrpc": "2.0", "id": 4, "method": "x"}',
    ]
    for body in bodies:
        process.stdin.write((headers % len(body.encode())).encode() + body.encode())
    answers: list[Any] = []
    while len(answers) < len(bodies):
        size = int((await process.stdout.readline()).partition(b":")[2])
        assert await process.stdout.readline() == b"\r\n"
        answers.append(json.loads(await process.stdout.readexactly(size)))
    process.stdin.close()
    assert await process.stdout.read() == b"" and await process.wait() == 0
    assert sorted((one["id"] for one in answers), key=repr) == sorted(["hello", 2, None, 4], key=repr)


@pytest.mark.parametrize(
    "headers", ["Content-Length: many\r\n\r\n", "Content-Length: 4000\r\n\r\n{", "Content-Type: x\r\n\r\n"]
)
async def test_messages_with_wrong_headers_are_refused(handrail: Program, headers: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *handrail.command("mcp"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, err = await process.communicate(headers.encode())
    assert process.returncode == 0 and err == b"" and b'"code":-32700' in out


@asynccontextmanager
async def over_http(folder: Path) -> AsyncGenerator[tuple[httpx2.AsyncClient, str]]:
    """A server over HTTP and a client of it that has a session."""
    settings = HttpFrontendSettings("127.0.0.1", 0)
    async with (
        temporary_kernel(folder) as kernel,
        open_http_server(kernel, McpFrontendSettings(), settings) as (url, _),
        httpx2.AsyncClient(headers={"Accept": "application/json, text/event-stream"}, timeout=60) as http,
    ):
        (folder / "note.txt").write_text("a note\n")
        hail = await http.post(url, content=hello("2025-03-26"), headers={"Content-Type": "application/json"})
        http.headers["Mcp-Session-Id"] = hail.headers["mcp-session-id"]
        http.headers["Content-Type"] = "application/json"
        yield http, url


def events(answer: httpx2.Response) -> list[dict[str, Any]]:
    """The messages in an answer, whether it is a stream or not."""
    if not answer.headers.get("content-type", "").startswith("text/event-stream"):
        return messages_in(answer.json()) if answer.content else []
    found = (line.removeprefix("data:").strip() for line in answer.text.splitlines() if line.startswith("data:"))
    return [json.loads(data) for data in found if data]


async def test_each_malformed_request_in_an_http_body_is_answered(tmp_path: Path) -> None:
    async with over_http(tmp_path) as (http, url):
        for odd, (body, expected) in ODD.items():
            answer = await http.post(url, content=body)
            given = [summary(one) for one in events(answer)]
            assert given == list(expected) or odd == "an answer to nothing", odd
            assert answer.status_code < 500, odd


async def test_a_batch_in_an_http_body_is_answered_in_the_protocol_version_with_batches(tmp_path: Path) -> None:
    async with over_http(tmp_path) as (http, url):
        for headers in ({}, {"MCP-Protocol-Version": "2025-03-26"}):
            given = [summary(one) for one in events(await http.post(url, content=BATCH, headers=headers))]
            assert sorted(given, key=repr) == sorted([("in", 0), ("list", 0), (None, REQUEST)], key=repr)
        refused = await http.post(url, content=BATCH, headers={"MCP-Protocol-Version": "2025-06-18"})
        assert refused.status_code == 400
        assert [summary(one) for one in events(refused)] == [("in", REQUEST), (None, REQUEST), ("list", REQUEST)]


HEADERS_OF_CLIENTS: list[dict[str, str] | list[tuple[str, str]]] = [
    {"Accept": "*/*"},
    {"Accept": ""},
    {"Accept": "text/event-stream"},
    {"Accept": "application/*, text/*"},
    {"Content-Type": "Application/JSON"},
    {"Content-Type": "application/json-rpc"},
    {"Content-Type": "application/vnd.mcp+json; charset=utf-8"},
    {"Mcp-Session-Id": ""},
    {"MCP-Protocol-Version": ""},
    [("Accept", "application/json"), ("Accept", "text/event-stream")],
]


@pytest.mark.parametrize("odd", HEADERS_OF_CLIENTS, ids=str)
async def test_a_request_with_odd_header_fields_is_answered(
    tmp_path: Path, odd: dict[str, str] | list[tuple[str, str]]
) -> None:
    async with over_http(tmp_path) as (http, url):
        del http.headers["Mcp-Session-Id"]
        answer = await http.post(url, content=hello("2025-06-18"), headers=odd)
        assert [summary(one) for one in events(answer)] == [("hello", ANSWERED)], answer.text


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", "text/html"]
)
async def test_a_type_that_any_web_page_can_send_is_refused(tmp_path: Path, kind: str) -> None:
    async with over_http(tmp_path) as (http, url):
        assert (await http.post(url, content=PING % 1, headers={"Content-Type": kind})).status_code == 400


async def test_a_host_is_known_in_any_case_and_an_unknown_one_is_refused_with_the_option(tmp_path: Path) -> None:
    async with over_http(tmp_path) as (http, url):
        port = url.split(":")[2].partition("/")[0]
        for known in (f"LocalHost:{port}", f"127.0.0.1:{port}", "LOCALHOST"):
            assert (await http.post(url, content=PING % 1, headers={"Host": known})).status_code == 200
        unknown = await http.post(url, content=PING % 1, headers={"Host": f"host.docker.internal:{port}"})
        assert unknown.status_code == 421 and "--public-url" in unknown.text
        page = await http.post(url, content=PING % 1, headers={"Origin": "https://evil.example"})
        assert page.status_code == 403 and "--allow-origin" in page.text and "connection" in page.headers


def test_a_public_url_in_upper_case_is_known_as_browsers_write_it() -> None:
    settings = HttpFrontendSettings("Box.Example.org", 80, public_url="https://Mcp.Example.org:8443/mcp")
    hosts, origins = settings.list_allowed_hosts_and_origins(80)
    assert {"box.example.org:80", "mcp.example.org:8443"} <= {*hosts} and "https://mcp.example.org:8443" in origins


async def test_a_persistent_http_connection_sends_each_answer_without_delay(tmp_path: Path) -> None:
    """Without TCP_NODELAY the second part of an answer waits for the client's delayed acknowledgement, 40 ms a call."""
    settings = HttpFrontendSettings("127.0.0.1", 0)
    async with (
        temporary_kernel(tmp_path) as kernel,
        open_http_server(kernel, McpFrontendSettings(), settings) as (url, _),
    ):
        port = int(url.split(":")[2].split("/")[0])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert b"404" in await reader.readline()
        own = writer.get_extra_info("sockname")
        served = [one for one in opened_sockets() if one.getpeername() == own]
        try:
            assert [one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for one in served] == [1]
        finally:
            for one in served:
                one.detach()
            writer.close()


def opened_sockets() -> list[socket.socket]:
    """The connected TCP sockets of this process."""
    found: list[socket.socket] = []
    for name in os.listdir("/proc/self/fd"):
        try:
            one = socket.socket(fileno=int(name))
        except OSError:
            continue
        try:
            if one.family == socket.AF_INET and one.getpeername():
                found.append(one)
                continue
        except OSError:
            pass
        one.detach()
    return found
