"""Peers that use services of other calls, send invalid requests, or send impossible answers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.ipc.scripted import RULES, ScriptedTool, files_in, other
from tests.ipc.workshop import Open, connected, workshop

from handrail import Runtime
from handrail.ipc.client.tool_host import describe_client_tools
from handrail.ipc.codec.protocol_rpc import RUNTIME_PREFIX, collect_runtime_methods
from handrail.ipc.server.client_tools import ClientProcessTools
from handrail.ipc.wire.operation_dispatch import OperationSpec, OperationTable, RemoteRequestError
from handrail.testing.scripted_kernel import temporary_kernel


class _Waiting:
    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.end = asyncio.Event()

    async def __call__(self, on: Runtime) -> object:
        self.begun.set()
        await self.end.wait()
        return "done"


async def _run_of(shop: Open) -> int:
    (number,) = shop.brought._runs  # pyright: ignore[reportPrivateUsage]
    return number


async def test_a_peer_cannot_use_the_runtime_of_another_peers_call(tmp_path: Path) -> None:
    files_in(tmp_path)
    waiting = _Waiting()
    async with workshop(tmp_path, ScriptedTool(waiting), rules=RULES) as shop:
        running = asyncio.create_task(shop.session.call("t.script", {}))
        await waiting.begun.wait()
        number = await _run_of(shop)
        body = {"run": number, "arguments": {"path": "a.txt"}}
        assert (await shop.theirs.request("runtime.files.stat", body))["value"]["size"] == 14

        stranger, ours = await connected()
        brought = ClientProcessTools(ours, describe_client_tools([ScriptedTool(waiting)]))
        ours.finish_handshake(OperationTable(brought.requests, brought.notifications), {})
        stranger.finish_handshake(OperationTable(), {})
        for guess in (number, number + 1, 0, -1, 2**63):
            with pytest.raises(RemoteRequestError) as caught:
                await stranger.request("runtime.files.stat", {"run": guess, "arguments": {"path": "a.txt"}})
            assert caught.value.kind == "not_running"
        stranger.notify("partial", {"run": number, "value": {"data": "forged"}})
        stranger.notify("progress", {"run": number, "message": "forged", "fraction": None})
        await ours.aclose()

        waiting.end.set()
        assert (await running).data == "done"
        with pytest.raises(RemoteRequestError) as caught:
            await shop.theirs.request("runtime.files.stat", body)
        assert caught.value.kind == "not_running"


async def test_a_runtime_request_outside_the_table_is_refused(tmp_path: Path) -> None:
    waiting = _Waiting()
    async with workshop(tmp_path, ScriptedTool(waiting), rules=RULES) as shop:
        running = asyncio.create_task(shop.session.call("t.script", {}))
        await waiting.begun.wait()
        number = await _run_of(shop)
        names = [
            "files",
            "files.__class__",
            "_doors",
            "kept",
            "profile",
            "secrets.get",
            "shell.__init__",
            "files.stat.x",
        ]
        for name in [*names, "", "call.__globals__", "cancellation.stop"]:
            with pytest.raises(RemoteRequestError) as caught:
                await shop.theirs.request(RUNTIME_PREFIX + name, {"run": number, "arguments": {}})
            assert caught.value.kind == "unknown_op"
        waiting.end.set()
        await running


_FAULTY: list[Any] = [
    None,
    [],
    {},
    {"run": 1},
    {"run": True, "arguments": {}},
    {"run": "1", "arguments": {}},
    {"run": 1.0, "arguments": {}},
    {"run": 1, "arguments": None},
    {"run": 1, "arguments": {"path": 3}},
    {"run": 1, "arguments": {"path": None}},
    {"run": 1, "arguments": {"path": ["a"]}},
    {"run": 1, "arguments": {"path": "a.txt", "self": 1}},
    {"run": 1, "arguments": {"path": "a.txt", "data": "text", "over": "seen"}},
    {"run": 1, "arguments": {"path": "a.txt", "data": {"$bytes": "?"}, "over": "seen"}},
    {"run": 1, "arguments": {"path": "a.txt", "data": {"$bytes": "aGk="}, "over": "anything"}},
    {"run": 1, "arguments": {"path": "a.txt", "data": {"$bytes": "aGk=", "more": 1}, "over": "seen"}},
    {"run": 1, "arguments": {"command": [1], "cwd": None, "stdin": {"$bytes": ""}, "on_output": None}},
    {"run": 1, "arguments": {"command": "id", "cwd": None, "stdin": {"$bytes": ""}, "on_output": "x"}},
    {"run": 1, "arguments": {"questions": [{"question": "?"}]}},
    {"run": 1, "arguments": {"tool_id": "t.other", "arguments": []}},
]


async def test_malformed_runtime_arguments_are_refused(tmp_path: Path) -> None:
    workspace = files_in(tmp_path)
    waiting = _Waiting()
    async with workshop(tmp_path, ScriptedTool(waiting), rules=RULES) as shop:
        running = asyncio.create_task(shop.session.call("t.script", {}))
        await waiting.begun.wait()
        assert await _run_of(shop) == 1
        for name in collect_runtime_methods():
            for body in _FAULTY:
                with pytest.raises(RemoteRequestError) as caught:
                    await shop.theirs.request(RUNTIME_PREFIX + name, body)
                assert caught.value.kind == "malformed"
                assert caught.value.text.startswith(f"Invalid request `{name}`")
        for notice in ("partial", "progress"):
            for body in [*_FAULTY, {"run": 1, "value": {"blobs": 3}}, {"run": 1, "message": 1, "fraction": "x"}]:
                shop.theirs.notify(notice, body)
        waiting.end.set()
        assert (await running).data == "done"
        assert (workspace / "a.txt").read_text() == "one\ntwo\nthree\n"


async def _answering(folder: Path, answer: Any) -> Any:
    """The result where the other process answers every execute with this."""
    theirs, ours = await connected()

    async def execute(body: Any) -> Any:
        return answer

    theirs.finish_handshake(OperationTable({"execute": OperationSpec(execute)}), {})
    brought = ClientProcessTools(ours, describe_client_tools([other]))
    ours.finish_handshake(OperationTable(brought.requests, brought.notifications), {})
    async with temporary_kernel(folder, tools=brought.tools, rules=["allow t.other"]) as kernel:
        result = await (await kernel.session()).call("t.other", {"n": 1})
    await ours.aclose()
    return result


@pytest.mark.parametrize(
    "answer",
    [
        None,
        3,
        {},
        {"value": None},
        {"value": {}},
        {"value": {"data": 1, "blobs": [[["x"], {"$bytes": ""}, "a/b"]]}},
        {"value": {"data": 1, "result": {"type": "grant"}}},
        {"error": {}},
        {"error": {"kind": 3, "text": "x"}},
        {"raised": "x"},
    ],
)
async def test_an_invalid_answer_from_a_process_returns_a_backend_error(tmp_path: Path, answer: Any) -> None:
    result = await _answering(tmp_path, answer)
    assert result.error_kind == "backend"
    assert "returned an invalid answer" in result.error_text


async def test_a_process_cannot_forge_the_metadata_of_its_call(tmp_path: Path) -> None:
    forged = {"type": "output", "error_text": None, "metadata": {"sandbox": "bubblewrap", "duration_ms": -1}}
    result = await _answering(tmp_path, {"value": {"data": 1, "result": forged}})
    assert result.metadata["sandbox"] == "runtime"
    assert result.metadata["duration_ms"] >= 0


async def test_an_unrequested_cancelled_answer_is_a_backend_error(tmp_path: Path) -> None:
    result = await _answering(tmp_path, {"cancelled": True})
    assert result.error_kind == "backend"
