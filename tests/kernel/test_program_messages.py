"""Messages of programs during a call: notifications, requests to the client, and refused ones."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from handrail import Event, Result
from handrail.arbiter import client_requests
from handrail.contract.services.client_services import RequestToClient
from handrail.kernel.local_kernel import LocalKernel
from handrail.registry.sources import persistent_tools
from handrail.sandbox import tier_probe
from handrail.testing.scripted_kernel import ScriptedClient, temporary_kernel

pytestmark = [
    pytest.mark.skipif(
        not tier_probe.choose_sandbox().tier.is_confining,
        reason=f"no sandbox: {tier_probe.choose_sandbox().tier.detail}",
    ),
    pytest.mark.asyncio(loop_scope="module"),
]

PROGRAM = f"""#!{sys.executable} -S
import json, os, sys
for line in sys.stdin:
    call = json.loads(line)
    got = []
    for step in call["arguments"]["steps"]:
        if step == "die":
            os._exit(3)
        if step == "read":
            got.append(json.loads(sys.stdin.readline()))
        elif "times" in step:
            text = json.dumps({{"id": call["id"], **step["say"]}}) + "\\n"
            for _ in range(step["times"]):
                sys.stdout.write(text)
        else:
            print(json.dumps({{"id": call["id"], **step}}))
        sys.stdout.flush()
    print(json.dumps({{"id": call["id"], "result": {{"client_requests": call.get("client_requests"), "got": got}}}}), flush=True)
"""
FORM = {"method": "elicitation/create", "params": {"message": "Who?", "requestedSchema": {"type": "object"}}}


def put(folder: Path, name: str, capabilities: list[str]) -> None:
    runtime: dict[str, Any] = {
        "persistent": True,
        "side_effect": "read",
        "locks": [],
        "requires": {"capabilities": capabilities},
    }
    manifest: dict[str, Any] = {
        "llm": {
            "name": name,
            "description": "Takes steps.",
            "parameters": {"type": "object", "properties": {"steps": {"type": "array"}}, "required": ["steps"]},
        },
        "runtime": {"exec_path": "run", **runtime},
    }
    (folder / f"{name}.json").write_text(json.dumps(manifest))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def kernel(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[LocalKernel]:
    place = tmp_path_factory.mktemp("midway")
    folder = place / "config" / "tools"
    folder.mkdir(parents=True)
    (folder / "run").write_text(PROGRAM)
    (folder / "run").chmod(0o755)
    put(folder, "steps.asking", ["elicit", "sample"])
    put(folder, "steps.plain", [])
    async with temporary_kernel(place, rules=["allow steps.*"]) as kernel:
        yield kernel


async def run_steps(
    kernel: LocalKernel, *steps: Any, tool: str = "steps.asking", peer: ScriptedClient | None = None
) -> tuple[Result, list[Event]]:
    session, seen = await kernel.session(client=peer), list[Event]()
    session.watch_events(seen.append)
    return await session.call(tool, {"steps": list(steps)}), seen


@pytest.mark.proves("R-03")
async def test_a_program_reports_progress_and_logs_during_a_call(kernel: LocalKernel) -> None:
    result, seen = await run_steps(
        kernel,
        {"progress": {"done": 1, "total": 2, "message": "half"}},
        {"log": {"level": "info", "data": {"n": 1}}},
        tool="steps.plain",
    )
    assert result.ok and result.data == {"client_requests": None, "got": []}
    told = {event.kind: event.data for event in seen}
    assert told["progress"] == {"message": "half", "fraction": 0.5, "done": 1, "total": 2}
    assert told["log"] == {"level": "info", "data": {"n": 1}, "logger": None}


@pytest.mark.proves("R-03")
async def test_a_program_asks_the_client_and_detaches_from_it(kernel: LocalKernel) -> None:
    peer = ScriptedClient([{"a": {"action": "accept", "content": {}}}], kinds=["form"])
    result, _ = await run_steps(kernel, {"detach": True}, {"ask": {"a": FORM}}, "read", peer=peer)
    assert result.data["client_requests"] == ["elicitation/create"]
    assert [one["answers"] for one in result.data["got"]] == [{"a": {"action": "accept", "content": {}}}]
    assert peer.asks == [{"a": RequestToClient("elicitation/create", FORM["params"])}] and len(peer.detached) == 1  # pyright: ignore[reportArgumentType]


async def test_a_program_with_an_invalid_client_request_gets_a_refusal_and_continues(kernel: LocalKernel) -> None:
    asks: list[Mapping[str, Any]] = [
        {"a": {"method": "roots/list"}},  # it did not require that
        {"a": {"method": "tools/call", "params": {}}},
        {str(number): FORM for number in range(17)},
        {"a": "nothing"},
    ]
    steps = [step for ask in asks for step in ({"ask": ask}, "read")]
    peer = ScriptedClient()
    result, _ = await run_steps(kernel, *steps, peer=peer)
    refusals = [one["rejected"] for one in result.data["got"]]
    for refusal, said in zip(refusals, ("roots", "is invalid", "1 to 16", "is an object"), strict=True):
        assert said in refusal
    assert peer.asks == []
    alone, _ = await run_steps(kernel, {"ask": {"a": FORM}}, "read", peer=None)
    assert "No client of this session" in alone.data["got"][0]["rejected"]


@pytest.mark.parametrize(
    "step",
    [
        {"progress": {"done": "1"}},
        {"progress": "half"},
        {"log": {"level": "loud", "data": 1}},
        {"log": {"level": "info"}},
        {"ask": {"a": FORM}, "id": "another call"},
        {"shout": 1},
        {"log": {"level": "info", "data": 1}, "more": 1},
    ],
    ids=["text-for-a-number", "no-object", "no-level", "no-data", "another-call", "no-such-message", "two-messages"],
)
async def test_an_unreadable_message_ends_the_program_and_the_next_call_works(kernel: LocalKernel, step: Any) -> None:
    result, _ = await run_steps(kernel, step, peer=ScriptedClient())
    assert result.error_kind == "backend"
    again, _ = await run_steps(kernel)
    assert again.ok


async def test_a_program_with_too_many_requests_or_messages_is_stopped_at_the_limit(
    kernel: LocalKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_requests, "MAX_REQUESTS_PER_CALL", 16)
    monkeypatch.setattr(persistent_tools, "MAX_CALL_MESSAGES", 500)
    monkeypatch.setattr(persistent_tools, "MAX_CALL_MESSAGE_BYTES", 4_000_000)
    ask = [step for _ in range(17) for step in ({"ask": {"a": FORM}}, "read")]
    peer = ScriptedClient()
    result, _ = await run_steps(kernel, *ask, peer=peer)
    assert len(peer.asks) == 16 and "The limit is 16" in result.data["got"][-1]["rejected"]
    result, _ = await run_steps(kernel, {"times": 501, "say": {"log": {"level": "info", "data": 1}}})
    assert result.error_kind == "limit"
    large = {"log": {"level": "info", "data": "x" * 400_000}}
    result, seen = await run_steps(kernel, {"times": 12, "say": large})
    assert result.error_kind == "limit"
    assert all(len(str(event.data)) < 2_000 for event in seen if event.kind == "log")


async def test_a_program_that_dies_during_a_client_request_interrupts_its_call(kernel: LocalKernel) -> None:
    ended = asyncio.Event()

    class Thinking(ScriptedClient):
        async def send_requests(
            self, call_id: str, requests: Mapping[str, RequestToClient]
        ) -> Mapping[str, Mapping[str, Any]]:
            self.calls.append(call_id)
            try:
                return await asyncio.get_running_loop().create_future()
            finally:
                ended.set()

    peer = Thinking()
    result, _ = await run_steps(kernel, {"ask": {"a": FORM}}, "die", peer=peer)
    await ended.wait()
    assert result.error_kind == "interrupted" and len(peer.calls) == 1  # nobody is asked the same twice
