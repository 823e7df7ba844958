"""Upstream servers that answer a call with a task, of both eras: its result and end are those of the call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.upstream.scripted_mcp_servers import (
    HttpResponseWriter,
    ReceivedHttpRequest,
    UpstreamHttpServer,
    make_tool_entry,
    run_upstream_http_server,
)

from handrail.contract.session_protocols import Session
from handrail.testing.scripted_kernel import ScriptedClient, temporary_kernel

pytestmark = pytest.mark.proves("F-04")
TASKS = "io.modelcontextprotocol/tasks"
NAME = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


def content(text: str) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": text}]}


class TaskServer:
    """A server whose one tool is a task.

    :param states: what its task says, one each time it is looked at; the last one for good
    :ivar tells: what it says of it to whoever listens
    """

    def __init__(self, era: str, *states: Mapping[str, Any]) -> None:
        self.era = era
        self.states = list(states)
        self.asked: list[ReceivedHttpRequest] = []
        self.tells: list[Mapping[str, Any]] = []
        self.stopped = asyncio.Event()
        self.answered = asyncio.Event()
        self.looked = asyncio.Event()

    def of(self, rpc: str) -> list[ReceivedHttpRequest]:
        return [one for one in self.asked if one.rpc_method == rpc]

    async def reply(self, asked: ReceivedHttpRequest, answering: HttpResponseWriter) -> bool:
        if asked.method != "POST":
            return False
        self.asked.append(asked)
        tool = make_tool_entry("slow", execution={"taskSupport": "required"})
        about: dict[str, Any] = {"resultType": "complete", "cacheScope": "private", "ttlMs": 0}
        modern = self.era == "modern"
        found: dict[str, Any]
        match asked.rpc_method:
            case "server/discover" if modern:
                found = {"supportedVersions": ["2026-07-28"], "capabilities": {"tools": {}}, **about}
            case "initialize":
                can: dict[str, Any] = {"tools": {}, "tasks": {"requests": {"tools": {"call": {}}}}}
                found = {
                    "protocolVersion": "2025-11-25",
                    "capabilities": can,
                    "serverInfo": {"name": "h", "version": "1"},
                }
            case "tools/list":
                found = {"tools": [tool], **(about if modern else {})}
            case "tools/call" if modern:
                found = {"resultType": "task", "taskId": "t-1", "status": "working", "ttlMs": None, "pollIntervalMs": 1}
            case "tools/call":
                found = {"task": {"taskId": "t-1", "status": "working", "ttl": 60_000}}
            case "tasks/get":
                self.looked.set()
                state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
                found = {**about, "taskId": "t-1", "pollIntervalMs": 1, **state}
            case "tasks/result" if self.states:
                found = dict(self.states[0])
            case "tasks/result":
                self.looked.set()
                await asyncio.Event().wait()
                return True
            case "subscriptions/listen" if self.tells:
                (task_id,) = asked.body["params"]["notifications"]["taskIds"]
                await answering.start_event_stream()
                for state in self.tells:
                    if state["status"] == "completed":
                        await self.answered.wait()
                    said = {"method": "notifications/tasks", "params": {"taskId": task_id, **state}}
                    await answering.event({"jsonrpc": "2.0", **said})
                await asyncio.Event().wait()
                return True
            case "tasks/update" | "tasks/cancel":
                found = {"resultType": "complete"}
            case "server/discover":
                await answering.send_response(404)
                return True
            case _:
                await answering.send_response(202)
                return True
        await answering.result(asked, found)
        if asked.rpc_method == "tasks/cancel":
            self.stopped.set()
        elif asked.rpc_method == "tasks/update":
            self.answered.set()
        return True


@asynccontextmanager
async def opened(
    folder: Path, tasking: TaskServer, peer: ScriptedClient | None = None, **settings: Any
) -> AsyncGenerator[tuple[Session, UpstreamHttpServer]]:
    async with (
        run_upstream_http_server(any_request=tasking.reply) as http,
        temporary_kernel(folder, rules=["allow mcp:h:*"]) as kernel,
        kernel.mcp_servers.connect("h", url=http.url, **settings) as connected,
    ):
        await connected.approve_tool_definitions()
        yield await kernel.session(client=peer), http


WORKING = {"status": "working", "statusMessage": "half way"}


async def test_a_task_is_polled_until_it_has_a_result(tmp_path: Path) -> None:
    tasking = TaskServer("modern", WORKING, {"status": "completed", "result": content("found it")})
    async with opened(tmp_path, tasking) as (session, _):
        told: list[object] = []
        session.watch_events(lambda event: told.append(event.data.get("message")) if event.kind == "progress" else None)
        result = await session.call("h_slow", {})
        assert (result.ok, result.data) == (True, "found it")
        assert "half way" in told
    (call,) = tasking.of("tools/call")
    declared = call.body["params"]["_meta"]["io.modelcontextprotocol/clientCapabilities"]
    assert declared["extensions"] == {TASKS: {}} and "task" not in call.body["params"]
    assert {one.headers["mcp-name"] for one in tasking.of("tasks/get")} == {"t-1"}
    assert not tasking.of("tasks/cancel"), "one that has ended is not stopped"


async def test_a_request_of_a_task_reaches_the_client_once_when_granted(tmp_path: Path) -> None:
    form: dict[str, Any] = {"method": "elicitation/create", "params": {"message": "Who?", "requestedSchema": NAME}}
    asks: dict[str, Any] = {"status": "input_required", "inputRequests": {"who": form}}
    tasking = TaskServer("modern", asks, asks, {"status": "completed", "result": content("thanks")})
    answer = {"action": "accept", "content": {"name": "Ada"}}
    peer = ScriptedClient([{"who": answer}])
    async with opened(tmp_path, tasking, peer, elicitation=True) as (session, _):
        assert (await session.call("h_slow", {})).data == "thanks"
        (update,) = tasking.of("tasks/update")
        assert update.body["params"]["inputResponses"] == {"who": answer}


async def test_a_task_completes_through_the_notifications_of_its_server(tmp_path: Path) -> None:
    form: dict[str, Any] = {"method": "elicitation/create", "params": {"message": "Who?", "requestedSchema": NAME}}
    asks: dict[str, Any] = {"status": "input_required", "inputRequests": {"who": form}}
    tasking = TaskServer("modern", WORKING)  # whoever only looked at it would look for ever
    tasking.tells = [
        {"taskId": "another", "status": "cancelled"},
        asks,
        {"status": "completed", "result": content("thanks")},
    ]
    peer = ScriptedClient([{"who": {"action": "accept", "content": {"name": "Ada"}}}])
    async with opened(tmp_path, tasking, peer, elicitation=True) as (session, _):
        assert (await session.call("h_slow", {})).data == "thanks"
    (listen,), (_,) = tasking.of("subscriptions/listen"), tasking.of("tasks/update")
    assert listen.body["params"]["_meta"]["io.modelcontextprotocol/clientCapabilities"]["extensions"] == {TASKS: {}}


async def test_a_request_that_is_not_granted_ends_the_call_and_stops_the_task(tmp_path: Path) -> None:
    tasking = TaskServer("modern", {"status": "input_required", "inputRequests": {"who": {"method": "roots/list"}}})
    async with opened(tmp_path, tasking) as (session, _):
        result = await session.call("h_slow", {})
        assert result.error_kind == "denied" and "not granted" in str(result.error_text)
        await tasking.stopped.wait()


@pytest.mark.parametrize(
    ("state", "kind", "words"),
    [
        ({"status": "failed", "error": {"code": -32603, "message": "no more disk"}}, "failed", "no more disk"),
        ({"status": "cancelled"}, "failed", "cancelled"),
        ({"status": "resting"}, "backend", "unknown task state"),
        ({"status": "completed", "result": {**content("bad"), "isError": True}}, "failed", "bad"),
    ],
)
async def test_a_task_without_a_result_fails_with_the_reason(
    tmp_path: Path, state: dict[str, Any], kind: str, words: str
) -> None:
    async with opened(tmp_path, TaskServer("modern", state)) as (session, _):
        result = await session.call("h_slow", {})
        assert (result.error_kind, words in str(result.error_text)) == (kind, True)


@pytest.mark.proves("X-08")
@pytest.mark.parametrize("era", ["modern", "legacy"])
async def test_a_cancelled_call_cancels_its_task(tmp_path: Path, era: str) -> None:
    tasking = TaskServer(era, *([WORKING] if era == "modern" else []))
    async with opened(tmp_path, tasking) as (session, _):
        calling = asyncio.create_task(session.call("h_slow", {}))
        await tasking.looked.wait()
        session.cancel_running_calls("user")
        assert (await calling).error_kind == "cancelled"
        await tasking.stopped.wait()
        (stop,) = tasking.of("tasks/cancel")
        assert stop.body["params"]["taskId"] == "t-1"


async def test_a_task_tool_of_the_older_protocol_is_called_as_a_task(tmp_path: Path) -> None:
    tasking = TaskServer("legacy", content("found it"))
    async with opened(tmp_path, tasking) as (session, _):
        assert (await session.call("h_slow", {})).data == "found it"
        (call,) = tasking.of("tools/call")
        assert call.body["params"]["task"] == {}
