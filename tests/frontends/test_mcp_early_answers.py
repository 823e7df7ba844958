"""The answers of `handrail mcp` before the MCP SDK is loaded: the same as the server's answers."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from handrail import tool
from handrail.frontends.mcp.mcp_server import serve_single_client
from handrail.frontends.mcp.mcp_stdio_server import StartupResponder
from handrail.frontends.mcp.startup_answers import (
    HANDSHAKE_VERSIONS,
    STATELESS_VERSION,
    StartupCache,
    StoredContent,
    locate_startup_cache,
)
from handrail.frontends.mcp.tool_listing import Discovery, McpFrontendSettings
from handrail.kernel.local_kernel import LocalKernel
from handrail.store.operator_decisions import write_approved_definitions
from handrail.testing.scripted_kernel import temporary_kernel

Message = dict[str, Any]
CLIENT: Message = {"name": "test", "version": "1", "title": "A test"}
CAN: Message = {"roots": {"listChanged": True}, "sampling": {}, "elicitation": {"form": {}, "url": {}}}
READY: Message = {"jsonrpc": "2.0", "method": "notifications/initialized"}


@tool(
    side_effect="read",
    locks=[],
    output_schema={"type": "object", "properties": {"n": {"type": "integer", "default": None}}, "required": ["n"]},
)
async def count(to: int | None = None, *, odd: dict[str, Any] | None = None) -> dict[str, int]:
    """Count … to ten."""
    return {"n": to or 10}


@tool(side_effect="read", locks=[])
async def later(a: str) -> str:
    """Come later."""
    return a


class SentMessages:
    """The messages sent to a client."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._more = asyncio.Event()

    async def write(self, text: str) -> None:
        assert text.endswith("\n")
        self.messages.append(json.loads(text))
        self._more.set()

    async def flush(self) -> None:
        return

    async def until(self, count: int) -> list[Message]:
        while len(self.messages) < count:
            self._more.clear()
            await self._more.wait()
        return self.messages


async def lines(messages: Iterable[Message | str]) -> AsyncIterator[str]:
    for message in messages:
        yield message if isinstance(message, str) else json.dumps(message)


def request(number: int | str, method: str, params: Message | None = None) -> Message:
    return {"jsonrpc": "2.0", "id": number, "method": method} | ({} if params is None else {"params": params})


def hello(version: str = "2025-11-25", **more: Any) -> Message:
    said: Message = {"protocolVersion": version, "capabilities": CAN, "clientInfo": CLIENT, **more}
    return request(1, "initialize", said)


def stamped(version: str = STATELESS_VERSION, **more: Any) -> Message:
    prefix = "io.modelcontextprotocol/"
    said: Message = {"protocolVersion": version, "clientInfo": CLIENT, "clientCapabilities": CAN}
    return {"_meta": {f"{prefix}{key}": value for key, value in said.items()} | more}


BEGINNINGS: dict[str, list[Message]] = {
    version: [hello(version), READY, request("two", "tools/list", {"_meta": {"progressToken": 5}})]
    for version in HANDSHAKE_VERSIONS
}
BEGINNINGS[STATELESS_VERSION] = [request(1, "server/discover", stamped()), request("two", "tools/list", stamped())]


@pytest.fixture
async def kernel(tmp_path: Path) -> AsyncGenerator[LocalKernel]:
    async with temporary_kernel(tmp_path, tools=[count]) as opened:
        yield opened


async def start_responder(
    kernel: LocalKernel, messages: Iterable[Message | str], discovery: Discovery = "core", *, stays: bool = False
) -> tuple[StartupResponder, SentMessages, bool]:
    """The reception after these messages; with ``stays``, the client stays connected until the server is loaded."""

    async def until_loaded() -> AsyncIterator[str]:
        async for line in lines(messages):
            yield line
        await asyncio.Event().wait()

    heard = SentMessages()
    reception = StartupResponder(kernel, McpFrontendSettings(discovery=discovery), heard)
    said = until_loaded() if stays else lines(messages)
    return reception, heard, await reception.answer_until_server_needed(said)


async def gone_on(
    reception: StartupResponder, kernel: LocalKernel, discovery: Discovery, out: Any, heard: SentMessages, count: int
) -> None:
    """Run the server for the client of the responder until it has sent this many messages."""
    enough = asyncio.Event()

    async def silence() -> AsyncIterator[str]:
        await enough.wait()
        for line in ():
            yield line

    ends = reception.replay_client_lines(silence()), out
    serving = asyncio.create_task(
        serve_single_client(kernel, McpFrontendSettings(discovery=discovery), ends, reception.client)
    )
    try:
        await heard.until(count)
    finally:
        enough.set()
        await serving


@pytest.mark.parametrize("discovery", ["core", "all"])
@pytest.mark.parametrize("version", [*HANDSHAKE_VERSIONS, STATELESS_VERSION])
@pytest.mark.proves("F-03")
async def test_the_early_answers_equal_those_of_the_server(
    kernel: LocalKernel, version: str, discovery: Discovery
) -> None:
    reception, heard, there = await start_responder(kernel, BEGINNINGS[version], discovery, stays=True)
    assert there
    assert [one["id"] for one in heard.messages] == [1, "two"]
    names = [one["name"] for one in heard.messages[1]["result"]["tools"]]
    assert "count" in names and "read" in names
    own = SentMessages()
    await gone_on(reception, kernel, discovery, own, own, 2)
    assert {one["id"]: one for one in own.messages} == {one["id"]: one for one in heard.messages}


async def test_a_client_receives_each_answer_once_and_a_notification_of_changes_in_between(kernel: LocalKernel) -> None:
    reception, heard, _ = await start_responder(kernel, BEGINNINGS["2025-06-18"], "all")
    await kernel.reload_tools(tools=[count, later])
    await gone_on(reception, kernel, "all", reception.make_early_answer_filter(), heard, 3)
    assert [one.get("id", one.get("method")) for one in heard.messages] == [
        1,
        "two",
        "notifications/tools/list_changed",
    ]


async def test_a_client_that_sends_only_the_handshake_is_passed_on_to_the_server(kernel: LocalKernel) -> None:
    reception, heard, there = await start_responder(kernel, [hello(), READY, request(2, "ping")])
    assert there
    assert [one["id"] for one in heard.messages] == [1]
    await gone_on(reception, kernel, "core", reception.make_early_answer_filter(), heard, 2)
    assert heard.messages[1] == {"jsonrpc": "2.0", "id": 2, "result": {}}


LEFT: dict[str, Message | str] = {
    "no JSON": "{",
    "a batch": "[]",
    "a version that nobody knows": hello("1999-01-01"),
    "a version of the newer era": hello(STATELESS_VERSION),
    "capabilities that are none": hello(capabilities={"roots": {"listChanged": "yes"}}),
    "capabilities of its own": hello(capabilities={"experimental": {"x": {"deep": 1}}}),
    "a client without a name": hello(clientInfo={"version": "1"}),
    "a client with an odd name": hello(clientInfo={"name": 5, "version": "1"}),
    "more than is known": hello(more=1),
    "nothing of itself": request(1, "initialize"),
    "no id": {**hello(), "id": None},
    "a truth for an id": {**hello(), "id": True},
    "another JSON-RPC": {**hello(), "jsonrpc": "1.0"},
    "keys of its own": {**hello(), "extra": 1},
    "parameters that are a list": {**hello(), "params": []},
    "tools before a hello": request(1, "tools/list"),
    "half an envelope": request(
        1, "tools/list", {"_meta": {"io.modelcontextprotocol/protocolVersion": STATELESS_VERSION}}
    ),
    "an envelope of the older era": request(1, "server/discover", stamped("2025-11-25")),
    "an envelope with a level of logging": request(
        1, "tools/list", stamped(**{"io.modelcontextprotocol/logLevel": "info"})
    ),
    "a call": request(1, "tools/call", {"name": "count"}),
}


BEHIND: dict[str, Message] = {
    "another hello": hello(),
    "an id again": request(1, "tools/list"),
    "a cursor": request(2, "tools/list", {"cursor": "NTAw"}),
    "an odd token": request(2, "tools/list", {"_meta": {"progressToken": {}}}),
    "the other era": request(2, "tools/list", stamped()),
}


async def test_a_message_of_unusual_form_is_left_to_the_server(kernel: LocalKernel) -> None:
    for odd, message in LEFT.items():
        _, heard, there = await start_responder(kernel, [message])
        assert there, odd
        assert heard.messages == [], odd
    for odd, message in BEHIND.items():
        _, heard, there = await start_responder(kernel, [hello(), READY, message])
        assert there, odd
        assert [one["id"] for one in heard.messages] == [1], odd


async def test_a_client_that_sends_useless_messages_does_not_fill_memory(kernel: LocalKernel) -> None:
    taken = 0

    async def chatter() -> AsyncIterator[str]:
        nonlocal taken
        while True:
            taken += 1
            yield json.dumps(READY)

    reception = StartupResponder(kernel, McpFrontendSettings(), SentMessages())
    assert await reception.answer_until_server_needed(chatter())
    assert taken < 20


async def test_a_client_that_disconnects_immediately_needs_no_server(kernel: LocalKernel) -> None:
    _, heard, there = await start_responder(kernel, [hello(), READY])
    assert not there
    assert len(heard.messages) == 1


def calling(number: int | str, name: str, **arguments: Any) -> Message:
    return request(number, "tools/call", {"name": name, "arguments": arguments})


async def serve_after(reception: StartupResponder, kernel: LocalKernel, heard: SentMessages, *further: Message) -> None:
    """The server, for a client that sends further requests, until it has answered them."""
    enough = asyncio.Event()
    expected = len(heard.messages) + len(further)

    async def said() -> AsyncIterator[str]:
        async for line in reception.replay_client_lines(lines(further)):
            yield line
        await enough.wait()

    ends = said(), reception.make_early_answer_filter()
    serving = asyncio.create_task(serve_single_client(kernel, McpFrontendSettings(), ends, reception.client))
    try:
        await heard.until(expected)
    finally:
        enough.set()
        await serving


@pytest.mark.proves("F-03")
async def test_an_immediate_read_is_answered_before_the_server_starts_and_shares_its_session(
    kernel: LocalKernel,
) -> None:
    (kernel.components.store.folders.workspace / "note.txt").write_text("one\n")
    reception, heard, there = await start_responder(
        kernel, [hello(), READY, calling(2, "read", path="note.txt")], stays=True
    )
    assert there and [one["id"] for one in heard.messages] == [1, 2]
    early = reception.client.session
    assert early is not None and not reception.client.is_adopted
    await serve_after(reception, kernel, heard, calling(3, "read", path="note.txt"))
    first, second = (one["result"] for one in heard.messages[1:])
    assert first["structuredContent"] == second["structuredContent"] and "one" in first["content"][0]["text"]
    assert reception.client.is_adopted
    await kernel.log.flush()
    assert [row.session_id for row in kernel.log.reader.calls()] == [early.id, early.id]


async def test_calls_other_than_plain_reads_wait_for_the_server(kernel: LocalKernel) -> None:
    for call in (calling(2, "bash", command="true"), calling(2, "find_tools", query="count"), calling(2, "count", n=1)):
        reception, heard, there = await start_responder(kernel, [hello(), READY, call])
        assert there and [one["id"] for one in heard.messages] == [1]
        assert reception.client.session is None


# Answers of the last start, while the kernel is loaded.

SERVE_AFTER_GATE = """
import asyncio, sys
from pathlib import Path
from handrail.frontends.mcp.startup_answers import answer_from_cache, locate_startup_cache
workspace, state, config, gate = sys.argv[1:]
with answer_from_cache(locate_startup_cache(workspace, state, config, (), allow_home=False)) as take_early_answers:
    Path(gate).read_bytes()
    from handrail import open_kernel
    from handrail.frontends.mcp.mcp_stdio_server import serve_stdio
    async def serve():
        async with open_kernel(workspace, state=state, config=config) as kernel:
            await serve_stdio(kernel, take_early_answers=take_early_answers)
    asyncio.run(serve())
"""


class GatedServer:
    """A server over stdio whose kernel is loaded only after :meth:`open_gate`."""

    def __init__(self, folder: Path) -> None:
        self.workspace, self.gate, self.config = folder / "ws", folder / "gate", folder / "handrail.toml"
        self.workspace.mkdir(exist_ok=True)
        if not self.config.exists():
            self.config.touch()
        self.gate.unlink(missing_ok=True)
        os.mkfifo(self.gate)
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVE_AFTER_GATE, self.workspace, folder / "state", self.config, self.gate],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def send(self, *messages: Message | bytes) -> None:
        assert self.process.stdin is not None
        for message in messages:
            self.process.stdin.write(message if isinstance(message, bytes) else json.dumps(message).encode() + b"\n")
        self.process.stdin.flush()

    def receive(self) -> Message:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def open_gate(self) -> None:
        self.gate.write_bytes(b"")

    def finish(self) -> list[Message]:
        """Close stdin, and return the remaining messages."""
        output, _ = self.process.communicate()
        assert self.process.returncode == 0
        return [json.loads(line) for line in output.splitlines()]


@pytest.fixture
def start_gated_server(tmp_path: Path) -> Iterator[Callable[[], GatedServer]]:
    """A function that starts a server. All servers end with the test."""
    started: list[GatedServer] = []

    def start() -> GatedServer:
        started.append(GatedServer(tmp_path))
        return started[-1]

    yield start
    for server in started:
        server.process.kill()
        server.process.communicate()


@pytest.mark.parametrize("version", ["2025-06-18", STATELESS_VERSION])
def test_the_answers_of_the_last_start_come_before_the_kernel_is_loaded(
    start_gated_server: Callable[[], GatedServer], version: str
) -> None:
    first = start_gated_server()
    (first.workspace / "note.txt").write_text("one\n")
    first.send(*BEGINNINGS[version])
    first.open_gate()
    expected = [first.receive(), first.receive()]
    assert first.finish() == []
    second = start_gated_server()
    second.send(*BEGINNINGS[version])
    assert [second.receive(), second.receive()] == expected, "the gate is closed"
    read = calling(3, "read", path="note.txt")
    second.send(read if version != STATELESS_VERSION else {**read, "params": {**read["params"], **stamped()}})
    second.open_gate()
    answer = second.receive()
    assert answer["id"] == 3 and "one" in answer["result"]["content"][0]["text"]
    assert second.finish() == []


def test_a_client_learns_that_the_stored_list_of_tools_has_changed(
    tmp_path: Path, start_gated_server: Callable[[], GatedServer]
) -> None:
    beginning = BEGINNINGS["2025-06-18"]
    first = start_gated_server()
    first.send(*beginning)
    first.open_gate()
    listed = [first.receive(), first.receive()][1]["result"]["tools"]
    first.finish()
    (cache,) = (tmp_path / "state" / "ws").glob("*/mcp-start-*.json")
    stored = json.loads(cache.read_bytes())
    stored["tools"]["tools"] = stored["tools"]["tools"][:1]
    cache.write_text(json.dumps(stored))
    second = start_gated_server()
    second.send(*beginning)
    assert second.receive()["id"] == 1
    assert len(second.receive()["result"]["tools"]) == 1
    second.open_gate()
    second.send(request(3, "ping"))
    later = sorted((second.receive(), second.receive()), key=str)
    assert [one.get("method", one.get("id")) for one in later] == [3, "notifications/tools/list_changed"]
    second.send(request(4, "tools/list"))
    assert second.receive()["result"]["tools"] == listed
    assert second.finish() == []
    assert json.loads(cache.read_bytes())["tools"]["tools"] == listed, "the next start has the right list"
    (tmp_path / "handrail.toml").write_text("rules = []\n")
    third = start_gated_server()
    third.send(*beginning)
    third.open_gate()
    assert [third.receive()["id"], third.receive()["id"]] == [1, "two"]
    assert third.finish() == [], "another configuration has other answers, which the kernel gives"


UNUSUAL_MESSAGES: dict[str, list[Message | bytes]] = {
    "no JSON": [b"{\n", hello(), READY, request(2, "ping")],
    "a batch": [b"[" + json.dumps(hello("2025-03-26")).encode() + b"]\n", READY, request(2, "tools/list")],
    "bytes that are no text": [b"\xff\n", hello(), READY, request(2, "tools/list")],
    "a handshake with an unknown member": [hello(new=True), READY, request(2, "tools/list")],
    "a list before the handshake": [request(5, "tools/list"), hello(), READY, request(2, "tools/list")],
    "the same ID twice": [hello(), READY, request(2, "tools/list"), request(2, "tools/list")],
    "text without an end": [hello(), READY, json.dumps(request(2, "tools/list")).encode()],
    "a ping between": [hello(), READY, request(2, "ping"), request(3, "tools/list")],
}


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param(
            messages, id=name, marks=() if name in ("a batch", "a ping between", "no JSON") else pytest.mark.slow
        )
        for name, messages in UNUSUAL_MESSAGES.items()
    ],
)
def test_a_client_gets_the_same_answers_with_and_without_stored_ones(
    start_gated_server: Callable[[], GatedServer], messages: list[Message | bytes]
) -> None:
    answers: list[list[Message]] = []
    for _ in range(2):
        server = start_gated_server()
        server.send(*messages)
        server.open_gate()
        answers.append(sorted(server.finish(), key=lambda one: json.dumps(one, sort_keys=True)))
    assert answers[0] == answers[1] != []


CONTENT = StoredContent(
    {"capabilities": {}, "serverInfo": {"name": "handrail"}, "instructions": "Use it."}, {}, {"tools": []}
)


@pytest.mark.parametrize(
    "stored",
    [
        b"",
        b"[]",
        b"{}",
        b'{"fingerprint": "f"}',
        b'{"fingerprint": "other", "server_info": {}, "extensions": {}, "tools": {}}',
        b'{"fingerprint": "f", "server_info": {}, "extensions": {}, "tools": {}}',
        b'{"fingerprint": "f", "server_info": [], "extensions": {}, "tools": {"tools": []}}',
        None,
    ],
)
def test_stored_answers_in_another_form_are_replaced(tmp_path: Path, stored: bytes | None) -> None:
    path = tmp_path / "mcp-start.json"
    cache = StartupCache(path, "f")
    assert cache.load() is None
    if stored is None:
        os.mkfifo(path)
    else:
        path.write_bytes(stored)
        path.chmod(0o600)
    assert cache.load() is None
    cache.save(CONTENT)
    assert StartupCache(path, "f").load() == CONTENT
    assert StartupCache(path, "g").load() is None
    assert path.stat().st_mode & 0o077 == 0


TAKE_EARLY_ANSWERS = """
import sys
from pathlib import Path
from handrail.frontends.mcp.startup_answers import answer_from_cache, locate_startup_cache
workspace, state, gate = sys.argv[1:]
with answer_from_cache(locate_startup_cache(workspace, state, None, (), allow_home=False)) as take_early_answers:
    Path(gate).read_bytes()
    sys.stderr.write(str(len(take_early_answers().unwritten)))
"""


def test_a_client_that_does_not_read_its_answer_does_not_block_the_kernel(tmp_path: Path) -> None:
    workspace, state, gate = tmp_path / "ws", tmp_path / "state", tmp_path / "gate"
    workspace.mkdir()
    os.mkfifo(gate)
    cache = locate_startup_cache(str(workspace), str(state), None, (), allow_home=False)
    assert cache is not None
    cache._path.parent.mkdir(parents=True)  # pyright: ignore[reportPrivateUsage]
    tools: Message = {"tools": [{"name": "read", "description": "x" * 1_000_000}]}
    cache.save(StoredContent(CONTENT.server_info, {}, tools))
    process = subprocess.Popen(
        [sys.executable, "-c", TAKE_EARLY_ANSWERS, workspace, state, gate],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    for message in BEGINNINGS["2025-06-18"]:
        process.stdin.write(json.dumps(message).encode() + b"\n")
    assert json.loads(process.stdout.readline())["id"] == 1
    begun = process.stdout.read(1)  # now the pipe becomes full
    gate.write_bytes(b"")
    unwritten = int(process.stderr.read())
    written = len(begun + process.stdout.read())
    assert unwritten > 0 and written + unwritten > 1_000_000
    assert process.wait() == 0


def test_answers_that_cannot_be_stored_or_trusted_are_given_by_the_kernel(tmp_path: Path) -> None:
    StartupCache(tmp_path / "none" / "mcp-start-1.json", "f").save(CONTENT)
    path = tmp_path / "mcp-start-1.json"
    StartupCache(path, "f").save(CONTENT)
    path.chmod(0o622)
    assert StartupCache(path, "f").load() is None, "another user could have written it"


def test_the_answers_of_only_a_few_commands_are_stored(tmp_path: Path) -> None:
    for number in range(100):
        StartupCache(tmp_path / f"mcp-start-{number}.json", "f").save(CONTENT)
    assert len(list(tmp_path.iterdir())) < 50
    assert StartupCache(tmp_path / "mcp-start-99.json", "f").load() == CONTENT


def test_a_list_is_not_stored_beyond_the_approval_of_a_definition(tmp_path: Path) -> None:
    (tmp_path / "ws").mkdir()

    def locate() -> StartupCache:
        cache = locate_startup_cache(str(tmp_path / "ws"), str(tmp_path / "state"), None, (), allow_home=False)
        assert cache is not None
        return cache

    write_approved_definitions(tmp_path / "state", "mcp:s", {"s_echo": {"hash": "1"}})
    first = locate()
    first._path.parent.mkdir(parents=True)  # pyright: ignore[reportPrivateUsage]
    first.save(CONTENT)
    assert locate().load() == CONTENT
    write_approved_definitions(tmp_path / "state", "mcp:s", {})
    assert locate().load() is None


def test_commands_with_other_options_have_other_stored_answers(tmp_path: Path) -> None:
    (tmp_path / "ws").mkdir()

    def locate(**given: Any) -> tuple[Path, str]:
        fields: dict[str, Any] = {"config": None, "options": (), **given}
        cache = locate_startup_cache(
            str(tmp_path / "ws"), str(tmp_path / "state"), fields["config"], fields["options"], allow_home=False
        )
        assert cache is not None
        return cache._path, cache._fingerprint  # pyright: ignore[reportPrivateUsage]

    assert locate() == locate()
    assert locate()[0] != locate(options=("deny read",))[0] != locate(config="other.toml")[0]
    before = locate()
    (tmp_path / "ws" / "handrail.toml").write_text("rules = []\n")
    assert before[0] == locate()[0] and before[1] != locate()[1]
    assert locate_startup_cache(str(tmp_path / "none"), None, None, (), allow_home=False) is None
