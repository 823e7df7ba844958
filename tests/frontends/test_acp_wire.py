"""The ACP agent as a process with pipes, and a peer that violates the protocol."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import pytest
from acp import RequestError
from acp.client.connection import ClientSideConnection
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.frontends.acp_clients import Editor, EditorFixture, ask, call, played
from tests.frontends.conftest import Program

from handrail.agent.run_budget import Budget
from handrail.frontends.acp.acp_agent import serve_acp_client
from handrail.frontends.acp.acp_transport import JsonLinesTransport, ValidatingTransport
from handrail.frontends.acp.editor_session_setup import AcpFrontendSettings
from handrail.frontends.mcp.client_messages import to_json_line

pytestmark = pytest.mark.proves("F-05")


async def test_an_editor_starts_the_agent_process_prompts_it_and_disconnects_cleanly(
    handrail: Program, tmp_path: Path
) -> None:
    played(tmp_path, {"calls": [call("write", path="made.txt", content="x")]}, {"text": "Made."})
    command = handrail.command("acp", "--model", f"script:{tmp_path / 'script.json'}")
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    editor = Editor()
    editor.answering = lambda _call, _options: "allow_once"
    client = ClientSideConnection(cast("Any", editor), process.stdin, process.stdout, use_unstable_protocol=True)
    await client.initialize(1)
    with pytest.raises(RequestError, match="--workspace"):
        await client.new_session(cwd=str(tmp_path))
    opened = await client.new_session(cwd=str(handrail.workspace))
    answer = await ask(client, opened.session_id)
    assert answer.stop_reason == "end_turn" and editor.said == "Made."
    assert (handrail.workspace / "made.txt").read_text() == "x"
    process.stdin.close()
    assert await process.wait() == 0
    assert (await process.stderr.read()) == b""
    await client.close()


class LinePeer:
    """A peer that writes and reads lines."""

    def __init__(self, *lines: str) -> None:
        self._lines = lines
        self.said: list[Any] = []

    async def __aiter__(self) -> AsyncIterator[str]:
        for line in self._lines:
            yield line

    async def write(self, text: str) -> None:
        self.said.append(json.loads(text))

    async def flush(self) -> None:
        pass

    async def taken(self) -> list[Any]:
        checked = ValidatingTransport(JsonLinesTransport(cast("Any", self).__aiter__(), self))
        taken: list[Any] = []
        while (message := await checked.receive()) is not None:
            taken.append(message)
        return taken


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("no json", -32700),
        ("[]", -32600),
        ("7", -32600),
        ("null", -32600),
        ('{"id": {}, "method": "initialize"}', -32600),
        ('{"id": 1, "method": 7}', -32600),
        ('{"id": 1}', -32600),
        ('{"id": 1, "method": "initialize", "params": [1]}', -32600),
    ],
)
async def test_an_invalid_request_is_answered_with_an_error_code(line: str, code: int) -> None:
    lines = LinePeer(line, "", '{"id": 2, "method": "initialize", "params": {"protocolVersion": 1}}')
    taken = await lines.taken()
    assert [message["id"] for message in taken] == [2]
    assert [answer["error"]["code"] for answer in lines.said] == [code]


async def test_useless_messages_are_dropped_and_meta_adds_no_argument() -> None:
    lines = LinePeer(
        '{"method": "document/didOpen", "params": {}}',
        '{"method": 7}',
        '{"method": "session/cancel", "params": {"sessionId": 5}}',
        '{"method": "session/cancel", "params": {}}',
        '{"method": "session/cancel"}',
        '{"id": "x", "result": 1}',
        '{"id": [1], "error": {}}',
        '{"id": 3, "error": 5}',
        '{"method": "session/cancel", "params": {"sessionId": "a", "_meta": {"session_id": "b"}}}',
    )
    error, cancel = await lines.taken()
    assert error["error"] == {"code": -32603, "message": "The client returned an error without a message."}
    assert cancel["params"] == {"sessionId": "a"} and lines.said == []


class ClosedPeer(LinePeer):
    """A peer that no longer reads what it is answered."""

    async def flush(self) -> None:
        raise BrokenPipeError


async def test_a_reply_to_a_lost_client_is_dropped_and_other_messages_raise() -> None:
    closed = ClosedPeer("no json", "null", '{"id": 2, "method": "initialize", "params": {"protocolVersion": 1}}')
    assert [message["id"] for message in await closed.taken()] == [2], "it is heard until it says no more"
    pipe = JsonLinesTransport(aiter(cast("Any", closed)), closed)
    await pipe.send({"jsonrpc": "2.0", "id": 2, "result": {}})
    for waited_for in ({"method": "session/update"}, {"id": 0, "method": "session/request_permission"}):
        with pytest.raises(BrokenPipeError):
            await pipe.send({"jsonrpc": "2.0", **waited_for})


async def test_a_client_that_disconnects_during_a_permission_request_causes_no_traceback(
    handrail: Program, tmp_path: Path
) -> None:
    played(tmp_path, {"calls": [call("write", path="made.txt", content="x")]}, {"text": "Made."})
    process = await asyncio.create_subprocess_exec(
        *handrail.command("acp", "--model", f"script:{tmp_path / 'script.json'}"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    requests = 0

    async def asked(method: str, **params: Any) -> None:
        nonlocal requests
        requests += 1
        assert process.stdin is not None
        process.stdin.write(to_json_line({"jsonrpc": "2.0", "id": requests, "method": method, "params": params}))
        await process.stdin.drain()

    async def told(wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        assert process.stdout is not None
        while not wanted(message := json.loads(await process.stdout.readline())):
            pass
        return message

    await asked("initialize", protocolVersion=1)
    await asked("session/new", cwd=str(handrail.workspace), mcpServers=[])
    opened = await told(lambda message: message.get("id") == 2)
    await asked("session/prompt", sessionId=opened["result"]["sessionId"], prompt=[{"type": "text", "text": "go"}])
    await told(lambda message: message.get("method") == "session/request_permission")
    cast("Any", process)._transport.get_pipe_transport(1).close()  # as when its window is closed
    await asked("session/list")
    process.stdin.close()
    assert await process.wait() == 0
    assert (await process.stderr.read()).decode() == ""
    assert not (handrail.workspace / "made.txt").exists(), "it has answered nothing"


async def test_a_client_that_hangs_up_without_reading_does_not_delay_the_server(tmp_path: Path) -> None:
    desk, answers, unread = EditorFixture(tmp_path), asyncio.Queue[Any](), asyncio.Event()

    class DisconnectingPeer:
        """A peer that starts work in a session and disconnects at the first update without reading it."""

        def __init__(self) -> None:
            self.asked = 0

        async def receive(self) -> Any:
            self.asked += 1
            if self.asked == 1:
                return _request(1, "initialize", protocolVersion=1)
            if self.asked == 4:
                await unread.wait()
                return None
            answered = (await answers.get())["result"]
            if self.asked == 2:
                return _request(2, "session/new", cwd=str(desk.workspace), mcpServers=[])
            said = [{"type": "text", "text": "go"}]
            return _request(3, "session/prompt", sessionId=answered["sessionId"], prompt=said)

        async def send(self, message: dict[str, Any]) -> None:
            if message.get("id") in (1, 2):
                await answers.put(message)
            elif self.asked >= 3:
                unread.set()
                await asyncio.Event().wait()

        async def close(self) -> None:
            pass

    serving = AcpFrontendSettings(
        desk.kernel,
        desk.reading,
        played(tmp_path, {"text": "There is much to say."}),
        lambda manifest: Budget.combine_limits(manifest.budgets),
    )
    await serve_acp_client(DisconnectingPeer(), serving, patience_s=0)
    with desk.reading(str(desk.workspace)) as reader:
        (left,) = reader.list_resumable(limit=5)
    assert left.task == "go"


def _request(number: int, method: str, **params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "method": method, "params": params}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
MESSAGES = st.fixed_dictionaries(
    {},
    optional={
        "jsonrpc": JSON,
        "id": JSON,
        "method": st.sampled_from(["initialize", "session/new", "session/prompt", "session/list", "session/load", "x"])
        | JSON,
        "params": st.fixed_dictionaries(
            {},
            optional={
                "sessionId": JSON,
                "cwd": JSON,
                "prompt": JSON,
                "mcpServers": JSON,
                "cursor": JSON,
                "protocolVersion": JSON,
                "_meta": JSON,
            },
        )
        | JSON,
        "result": JSON,
        "error": JSON,
    },
)


@settings(max_examples=60, deadline=None)
@given(st.lists(MESSAGES | JSON, max_size=5))
async def test_no_message_ends_the_connection(messages: list[Any]) -> None:
    """Whatever comes before it, the last request is answered."""
    answers: asyncio.Queue[Any] = asyncio.Queue()
    incoming = [message for message in messages if message is not None]
    done = asyncio.Event()

    class Hostile:
        async def receive(self) -> Any:
            if incoming:
                return incoming.pop(0)
            if not done.is_set():
                done.set()
                return {"jsonrpc": "2.0", "id": "last", "method": "session/unknown", "params": {}}
            await asyncio.Event().wait()
            return None

        async def send(self, message: dict[str, Any]) -> None:
            await answers.put(json.loads(to_json_line(message)))

        async def close(self) -> None:
            pass

    def never(*_: object) -> Any:
        raise AssertionError("no workspace is opened by what has said no hello")

    served = asyncio.create_task(serve_acp_client(Hostile(), AcpFrontendSettings(never, never, never, never)))
    served.add_done_callback(lambda _: answers.put_nowait(None))
    try:
        while (answer := await answers.get()) is None or answer.get("id") != "last":
            assert answer is not None, "a message ended it"
    finally:
        served.cancel()
        await asyncio.wait((served,))


async def test_a_workspace_that_cannot_be_opened_is_a_readable_error(tmp_path: Path) -> None:
    desk = EditorFixture(tmp_path)
    (tmp_path / "config" / "handrail.toml").write_text("no = such\n")
    async with desk.connected({"text": "x"}) as (client, _):
        for _ in range(2):
            with pytest.raises(RequestError, match=r"handrail\.toml"):
                await client.new_session(cwd=str(desk.workspace))
