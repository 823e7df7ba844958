"""The MCP server with the SDK's client over stdio: lists, results and shutdown."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Literal, cast

import httpx2
import pytest
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp.client.subscriptions import ToolsListChanged
from mcp.types import CallToolResult, TextContent, Tool, ToolListChangedNotification
from tests.frontends.conftest import Program, SleepingCommand

from handrail.frontends.mcp.mcp_stdio_server import (
    MAX_MESSAGE_BYTES,
    MAX_MESSAGE_VALUES,
    LimitedMessageReader,
    PipeWriter,
)

Mode = Literal["auto", "legacy"]

HELLO: dict[str, Any] = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}},
}


@asynccontextmanager
async def connected(handrail: Program, *options: str, mode: Mode = "auto") -> AsyncGenerator[Client]:
    command, *arguments = handrail.command("mcp", *options)
    async with Client(
        StdioServerParameters(command=command, args=arguments, env=dict(os.environ)), mode=mode
    ) as client:
        yield client


def envelope(result: CallToolResult) -> dict[str, Any]:
    """A result in the kernel's own shape again: its content, and what its metadata say."""
    said = {key.removeprefix("handrail/"): value for key, value in (result.meta or {}).items()}
    texts = [part.text for part in result.content if isinstance(part, TextContent)]
    if result.is_error:
        return {"type": "error", "error_text": texts[0], "data": result.structured_content, "metadata": said}
    if result.structured_content is not None:
        assert json.loads(texts[0]) == result.structured_content
    data = texts[0] if result.structured_content is None else result.structured_content
    return {"type": "output", "data": data, "metadata": said}


async def listed(client: Client) -> dict[str, Tool]:
    return {tool.name: tool for tool in (await client.list_tools()).tools}


@pytest.mark.parametrize("mode", ["auto", "legacy"])
@pytest.mark.proves("K-04", "F-03")
async def test_clients_of_both_protocol_eras_list_and_call_tools_by_wire_name(handrail: Program, mode: Mode) -> None:
    async with connected(handrail, mode=mode) as client:
        tools = await listed(client)
        assert {"read", "write", "bash", "find_tools"} <= set(tools)
        assert not {"file__patch", "git__status"} & set(tools), "these are to be loaded first"
        result = await client.call_tool("read", {"path": "note.txt"})
        assert not result.is_error and "second line" in json.dumps(envelope(result)["data"])


@pytest.mark.proves("K-02")
async def test_a_tool_is_listed_with_only_its_llm_view_and_hints(handrail: Program) -> None:
    async with connected(handrail) as client:
        tools = await listed(client)
    read, write, bash = (tools[name].annotations for name in ("read", "write", "bash"))
    assert read is not None and (read.read_only_hint, read.destructive_hint, read.open_world_hint) == (
        True,
        False,
        False,
    )
    assert write is not None and (write.read_only_hint, write.destructive_hint) == (False, True)
    assert bash is not None and bash.read_only_hint is False
    sent = tools["read"].model_dump(by_alias=True, exclude_none=True)
    assert set(sent) == {"name", "title", "description", "inputSchema", "outputSchema", "annotations", "_meta"}
    assert "path" in sent["inputSchema"]["properties"]


@pytest.mark.proves("P-10")
async def test_a_call_without_an_allowing_rule_is_denied_as_an_error_result(handrail: Program) -> None:
    async with connected(handrail, "--headless") as client:
        result = await client.call_tool("write", {"path": "new.txt", "content": "x"})
        assert result.is_error and envelope(result)["metadata"]["error_kind"] == "denied"
        result = await client.call_tool(
            "question",
            {
                "questions": [
                    {
                        "question": "Well?",
                        "header": "Q",
                        "options": [{"label": "yes", "description": ""}, {"label": "no", "description": ""}],
                    }
                ]
            },
        )
        assert (
            result.is_error
            and envelope(result)["error_text"] == "question is unavailable: no user is attached to this session"
        )
    assert not (handrail.workspace / "new.txt").exists()


async def test_a_rule_of_the_operator_allows_a_call(handrail: Program) -> None:
    async with connected(handrail, "--rule", "allow write new.txt") as client:
        assert not (await client.call_tool("write", {"path": "new.txt", "content": "x"})).is_error
    assert (handrail.workspace / "new.txt").read_text() == "x"


@pytest.mark.parametrize(
    ("tool", "arguments", "kind", "said"),
    [
        ("raed", {}, "unknown_tool", "read"),
        ("read", {}, "invalid_input", "path"),
        ("read", {"path": "note.txt", "colour": "red"}, "invalid_input", "colour"),
        ("read", {"path": "../outside.txt"}, "denied", ""),
        ("read", {"path": "absent.txt"}, None, "absent.txt"),
    ],
)
async def test_invalid_calls_return_errors_that_a_model_can_act_on(
    handrail: Program, tool: str, arguments: dict[str, Any], kind: str | None, said: str
) -> None:
    async with connected(handrail) as client:
        answered = envelope(await client.call_tool(tool, arguments))
    assert answered["type"] == "error" and said in answered["error_text"] and "Traceback" not in answered["error_text"]
    assert kind is None or answered["metadata"]["error_kind"] == kind


async def test_concurrent_calls_of_one_client_each_get_their_own_answer(handrail: Program) -> None:
    for number in range(20):
        (handrail.workspace / f"{number}.txt").write_text(f"content {number}\n")
    async with connected(handrail) as client:
        results = await asyncio.gather(*(client.call_tool("read", {"path": f"{n}.txt"}) for n in range(20)))
    for number, result in enumerate(results):
        assert f"content {number}" in json.dumps(envelope(result)["data"])


async def test_stdout_has_only_protocol_messages_and_closing_stdin_ends_the_server(handrail: Program) -> None:
    ready = {"jsonrpc": "2.0", "method": "notifications/initialized"}
    call = {
        "jsonrpc": "2.0",
        "id": 2,
        "method": "tools/call",
        "params": {"name": "read", "arguments": {"path": "note.txt"}},
    }
    process = await asyncio.create_subprocess_exec(
        *handrail.command("mcp"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None
    answers: dict[int, Any] = {}
    for message in (HELLO, ready, call):
        process.stdin.write(json.dumps(message).encode() + b"\n")
        await process.stdin.drain()
        if "id" in message:
            answer = json.loads(await process.stdout.readline())
            answers[answer["id"]] = answer
    process.stdin.close()
    rest = await process.stdout.read()
    assert await process.wait() == 0 and rest == b""
    assert answers[1]["result"]["serverInfo"]["name"] == "handrail"
    assert "second line" in answers[2]["result"]["content"][0]["text"]


async def test_the_server_ends_cleanly_when_its_client_stops_reading(handrail: Program) -> None:
    process = await asyncio.create_subprocess_exec(
        *handrail.command("mcp"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    process.stdin.write(json.dumps(HELLO).encode() + b"\n")
    assert json.loads(await process.stdout.readline())["id"] == HELLO["id"]
    cast("Any", process)._transport.get_pipe_transport(1).close()
    for number in (2, 3):
        read = {"name": "read", "arguments": {"path": "note.txt"}}
        process.stdin.write(
            json.dumps({"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": read}).encode() + b"\n"
        )
    process.stdin.close()
    assert (await process.stderr.read()).decode() == ""
    assert await process.wait() == 0


async def test_a_message_with_too_many_values_is_refused_and_the_next_one_is_read() -> None:
    reader, said = asyncio.StreamReader(limit=MAX_MESSAGE_BYTES), list[bytes]()
    many = "[]," * MAX_MESSAGE_VALUES
    ping = '{"jsonrpc": "2.0", "id": 8, "method": "ping"}\n'
    reader.feed_data(f'{{"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": [{many}1]}}\n{ping}'.encode())
    reader.feed_eof()
    assert [line async for line in LimitedMessageReader(reader, said.append)] == [ping]
    (refused,) = map(json.loads, said)
    assert refused["id"] == 7 and "contain more than 40,000 values" in refused["error"]["message"]


async def test_the_server_waits_for_a_full_pipe_only_while_its_client_sends() -> None:
    (reading, writing), loop = os.pipe(), asyncio.get_running_loop()
    said, saying = os.pipe()
    flow = asyncio.StreamReaderProtocol(asyncio.StreamReader())
    incoming = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(incoming), os.fdopen(said, "rb", buffering=0))
    out, _ = await loop.connect_write_pipe(lambda: flow, os.fdopen(writing, "wb", buffering=0))
    output = PipeWriter(asyncio.StreamWriter(out, flow, None, loop), patience_s=0)
    lines = LimitedMessageReader(incoming, lambda _: None, output.limit_flush_time)
    try:
        await output.write("x" * 1_000_000)
        waiting = asyncio.ensure_future(output.flush())
        ping = '{"jsonrpc": "2.0", "id": 8, "method": "ping"}\n'
        os.write(saying, ping.encode())
        assert await anext(lines) == ping and not waiting.done()
        os.close(saying)
        with pytest.raises(StopAsyncIteration):
            await anext(lines)
        for flushing in (waiting, output.flush()):
            with pytest.raises(BrokenPipeError):
                await flushing
    finally:
        out.abort()
        os.close(reading)


@pytest.mark.proves("X-08")
async def test_a_cancelled_request_stops_the_call_and_keeps_the_connection(handrail: Program) -> None:
    sleeper = SleepingCommand(handrail)
    async with connected(handrail, "--rule", sleeper.rule, "--rule", "allow write") as client:
        running = asyncio.create_task(client.call_tool("bash", json.loads(sleeper.arguments)))
        await asyncio.to_thread(sleeper.wait_until_it_runs)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        # The sleeper held the workspace exclusively: this answer shows that it is gone.
        assert not (await client.call_tool("write", {"path": "new.txt", "content": "x"})).is_error
    assert sleeper.left_over() == []
    assert handrail("log", "verify").code == 0


async def test_an_invalid_message_does_not_end_the_connection(handrail: Program) -> None:
    process = await asyncio.create_subprocess_exec(
        *handrail.command("mcp"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"this is not JSON\n{}\n[1]\n" + b"[" * 5000 + b"\n")
    process.stdin.write(json.dumps(HELLO).encode() + b"\n")
    await process.stdin.drain()
    while (answer := json.loads(await process.stdout.readline())).get("id") != HELLO["id"]:
        pass
    assert answer["result"]["serverInfo"]["name"] == "handrail"
    process.stdin.close()
    assert await process.wait() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_the_server_while_its_client_is_connected(
    handrail: Program, number: signal.Signals
) -> None:
    process = await asyncio.create_subprocess_exec(
        *handrail.command("mcp"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    process.stdin.write(json.dumps(HELLO).encode() + b"\n")
    assert json.loads(await process.stdout.readline())["id"] == HELLO["id"]
    process.send_signal(number)
    assert await process.wait() == 130
    assert b"Traceback" not in await process.stderr.read()
    assert handrail("log", "verify").code == 0


async def test_an_oversized_message_is_refused_and_the_connection_continues(handrail: Program) -> None:
    process = await asyncio.create_subprocess_exec(
        *handrail.cold("mcp"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdin is not None and process.stdout is not None
    hello = json.dumps(HELLO).encode() + b"\n"
    process.stdin.write(hello)
    assert json.loads(await process.stdout.readline())["id"] == HELLO["id"]
    before = peak_kib(process.pid)
    piece = b"x" * 1024 * 1024
    process.stdin.write(b'{"jsonrpc": "2.0", "id": 9, "method": "ping", "params": {"_meta": {"more": "')
    for _ in range(200):
        process.stdin.write(piece)
        await process.stdin.drain()
    process.stdin.write(b'"}}}\n' + json.dumps({**HELLO, "id": 10, "method": "ping", "params": {}}).encode() + b"\n")
    refused, answer = [json.loads(await process.stdout.readline()) for _ in range(2)]
    assert refused["id"] == 9 and "bytes" in refused["error"]["message"]
    assert answer["id"] == 10 and "result" in answer
    assert peak_kib(process.pid) - before < 120 * 1024, "200 MiB of one message were held"
    process.stdin.close()
    assert await process.wait() == 0


@pytest.mark.parametrize("id_first", [True, False])
@pytest.mark.parametrize("arguments", ["[" * 10_000 + "]" * 10_000, '{"a":' * 10_000 + "1" + "}" * 10_000, "long"])
async def test_an_unreadable_request_gets_an_error_with_its_id(
    handrail: Program, arguments: str, id_first: bool
) -> None:
    process = await asyncio.create_subprocess_exec(
        *handrail.command("mcp"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdin is not None and process.stdout is not None
    long = json.dumps({"id": 3, "x": '"id": 4, ' * 2_000_000})
    inside = long if arguments == "long" else arguments
    params = f'"params": {{"name": "read", "id": 5, "arguments": {{"id": 6, "path": {inside}, "id": 7}}}}'
    parts = ['"jsonrpc": "2.0"', '"method": "tools/call"', params]
    parts.insert(1 if id_first else 3, '"id": "call-8"')
    process.stdin.write(json.dumps(HELLO).encode() + b"\n")
    process.stdin.write(("{" + ", ".join(parts) + "}\n").encode())
    process.stdin.write(json.dumps({**HELLO, "id": 9, "method": "ping", "params": {}}).encode() + b"\n")
    answers = [json.loads(await process.stdout.readline()) for _ in range(3)]
    assert sorted(str(answer["id"]) for answer in answers) == sorted([str(HELLO["id"]), "9", "call-8"])
    (refused,) = [answer for answer in answers if answer["id"] == "call-8"]
    assert "message" in refused["error"]
    process.stdin.close()
    assert await process.wait() == 0


def peak_kib(process_id: int) -> int:
    """The most memory a process ever held."""
    with open(f"/proc/{process_id}/status", encoding="utf-8") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))


def test_the_server_also_reads_requests_from_a_file_as_stdin(handrail: Program, tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    asked.write_text(json.dumps(HELLO) + "\n")
    with asked.open("rb") as stdin:
        done = subprocess.run(handrail.command("mcp"), stdin=stdin, capture_output=True, check=False)
    assert done.returncode == 0 and json.loads(done.stdout)["id"] == HELLO["id"]


def put_tool(folder: Path, name: str, said: str = "{}", **runtime: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    parameters: dict[str, Any] = {"type": "object", "properties": {}}
    llm: dict[str, Any] = {"name": name, "description": "Says it.", "parameters": parameters}
    view: dict[str, Any] = {"side_effect": "read", "locks": [], **runtime}
    (folder / f"{name}.json").write_text(json.dumps({"llm": llm, "runtime": view}))
    (folder / name).write_text(f"#!/bin/sh\necho '{said}'\n")
    (folder / name).chmod(0o755)


@pytest.mark.proves("O-06", "R-01", "F-03")
async def test_a_client_receives_only_output_for_models_and_cannot_call_unavailable_tools(handrail: Program) -> None:
    tools, config = handrail.config / "tools", handrail.config / "handrail.toml"
    put_tool(tools, "shown", '{"page": "for all"}')
    put_tool(tools, "edge", '{"page": "for people"}', exposure="edge")
    put_tool(tools, "masked", '{"summary": "one page", "page": "not for prompts"}', prompt_mask=True)
    put_tool(tools, "weather", secrets=["WEATHER_KEY"])
    config.write_text('rules = ["allow *"]\n')
    async with connected(handrail, "--config", str(config)) as client:
        assert {"shown", "edge", "masked"} == set(await listed(client)) & {"shown", "edge", "masked", "weather"}
        shown, edge, masked, weather = [
            envelope(await client.call_tool(name, {})) for name in ("shown", "edge", "masked", "weather")
        ]
    assert shown["data"] == {"page": "for all"}
    assert edge["type"] == masked["type"] == "output"
    assert "for people" not in json.dumps(edge) and "not for prompts" not in json.dumps(masked)
    assert "one page" in json.dumps(masked)
    assert weather["metadata"]["error_kind"] == "unavailable" and "WEATHER_KEY" in weather["error_text"]


@pytest.mark.proves("D-02", "D-03")
async def test_an_older_client_is_notified_when_a_call_loads_tools(handrail: Program) -> None:
    """By the older protocol; each change once."""
    heard: asyncio.Queue[object] = asyncio.Queue()

    async def hear(message: object) -> None:
        heard.put_nowait(message)

    command, *arguments = handrail.command("mcp")
    parameters = StdioServerParameters(command=command, args=arguments, env=dict(os.environ))
    async with Client(parameters, mode="legacy", message_handler=hear) as client:
        assert "git__status" not in await listed(client)
        answer = envelope(await client.call_tool("load_tools", {"category": "git"}))
        assert answer["data"]["loaded"] == "git"
        assert isinstance(await heard.get(), ToolListChangedNotification)
        assert "git__status" in await listed(client)
        await client.call_tool("load_tools", {"category": "git"})
        await client.call_tool("load_tools", {"category": "files"})
        assert isinstance(await heard.get(), ToolListChangedNotification)
        assert heard.empty()


async def test_a_subscribed_newer_client_is_notified_when_a_call_loads_tools(handrail: Program) -> None:
    command, *arguments = handrail.command("mcp")
    parameters = StdioServerParameters(command=command, args=arguments, env=dict(os.environ))
    async with Client(parameters) as client, client.listen(tools_list_changed=True) as changes:
        assert "git__status" not in await listed(client)
        await client.call_tool("load_tools", {"category": "git"})
        assert isinstance(await anext(aiter(changes)), ToolsListChanged)
        assert "git__status" in await listed(client)


@pytest.mark.proves("D-04")
async def test_a_client_can_call_an_unlisted_tool_and_receives_its_schema_on_errors(handrail: Program) -> None:
    async with connected(handrail) as client:
        assert "git__status" not in await listed(client)
        wrong = envelope(await client.call_tool("git__status", {"wrong": 1}))
        assert wrong["metadata"]["error_kind"] == "invalid_input"
        assert "repository" in wrong["data"]["parameters"]["properties"]
        assert "git__status" in await listed(client)


@pytest.mark.proves("F-03")
@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_the_http_server_serves_configured_clients_until_a_signal(handrail: Program, mode: Mode) -> None:
    token = "sesame-0123456789abcdef"
    handrail.config.mkdir(exist_ok=True)
    (handrail.config / "token").touch(0o600)
    (handrail.config / "token").write_text(token)
    (handrail.config / "handrail.toml").write_text(
        f"[secrets]\nT = {{ file = {json.dumps(str(handrail.config / 'token'))} }}\n"
        '[mcp.serve]\ntokens = { ann = { secret = "T" } }\n'
    )
    process = await asyncio.create_subprocess_exec(
        *handrail.command("mcp", "--http", "127.0.0.1:0", "--config", str(handrail.config / "handrail.toml")),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    line = (await process.stderr.readline()).decode()
    assert "serving at http://127.0.0.1:" in line
    url = line.split()[-1]
    async with AsyncExitStack() as stack:
        stranger = await stack.enter_async_context(httpx2.AsyncClient())
        assert (await stranger.post(url, json=HELLO)).status_code == 401
        known = await stack.enter_async_context(httpx2.AsyncClient(headers={"Authorization": f"Bearer {token}"}))
        client = await stack.enter_async_context(Client(streamable_http_client(url, http_client=known), mode=mode))
        result = envelope(await client.call_tool("read", {"path": "note.txt"}))
        assert "second line" in json.dumps(result["data"])
        process.send_signal(signal.SIGTERM)  # with the client still there
        assert await process.wait() == 130
    assert b"Traceback" not in await process.stderr.read()
    assert handrail("log", "verify").code == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--http", "here"), "HOST:PORT"),
        (("--http", "0.0.0.0:0"), "--token-file"),
        (("--token-file", "tokens"), "--http"),
        (("--wait", "0"), "--wait"),
    ],
)
def test_invalid_mcp_options_are_refused(handrail: Program, options: tuple[str, ...], said: str) -> None:
    done = handrail("mcp", *options)
    assert done.code == 2 and said in done.err and "Traceback" not in done.err
