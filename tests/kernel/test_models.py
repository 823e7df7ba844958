"""Models in the whole kernel: both SDKs over a socket, real calls and a real log."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import pytest

from handrail import Kernel, Session, Tool, tool
from handrail.agent.agent_loop import Agent
from handrail.agent.providers import open_model
from handrail.agent.run_events import CallAnswered
from handrail.testing.provider_servers import AnthropicServer, OpenAIServer, ProviderServer, ReplyCall, ScriptedReply
from handrail.testing.scripted_kernel import temporary_kernel

Kind = Literal["openai", "anthropic"]
each_provider = pytest.mark.parametrize("kind", ["openai", "anthropic"])
sent: list[str] = []


@tool(id="mail.send", side_effect="external", locks=["outbox:X"], tier="core")
async def send(to: str) -> dict[str, str]:
    """Send a mail."""
    sent.append(to)
    return {"sent": to}


@tool(id="scan.core", side_effect="read", locks=[], exposure="core")
async def for_the_model() -> dict[str, str]:
    """Shown to the model only."""
    return {"page": "for the model only"}


@tool(id="scan.edge", side_effect="read", locks=[], exposure="edge")
async def for_people() -> dict[str, str]:
    """Shown to people only."""
    return {"page": "for people only"}


@tool(id="scan.nobody", side_effect="read", locks=[], exposure="none")
async def for_the_log() -> dict[str, str]:
    """Kept on record only."""
    return {"page": "for the record only"}


@tool(id="scan.masked", side_effect="read", locks=[], prompt_mask=True)
async def masked() -> dict[str, str]:
    """Kept out of prompts."""
    return {"summary": "twelve pages", "page": "kept out of prompts"}


TOOLS: tuple[Tool, ...] = (send, for_the_model, for_people, for_the_log, masked)
RULES = ("allow mail.send", "allow scan.*")


@pytest.fixture(autouse=True)
def nothing_sent_yet() -> None:
    sent.clear()


class ModelFixture:
    """A model's server, the kernel, and the agent between them."""

    def __init__(self, kind: Kind, server: ProviderServer, kernel: Kernel, session: Session, agent: Agent) -> None:
        self.kind = kind
        self.server = server
        self.kernel = kernel
        self.session = session
        self.agent = agent

    async def done(self) -> None:
        """The run ends with an answer, and every history it sent was one that the provider takes."""
        outcome = await self.agent.complete("go")
        assert outcome.ok, outcome.detail
        assert [request.faults for request in self.server.requests if request.faults] == []
        assert self.server.remaining_replies == 0

    def read(self, request: int) -> list[tuple[str, Any]]:
        """``(id, result)`` of every call that a request answers."""
        messages: list[dict[str, Any]] = self.server.requests[request].body["messages"]
        if self.kind == "openai":
            found = [(m["tool_call_id"], m["content"]) for m in messages if m["role"] == "tool"]
        else:
            told: list[Any] = [m["content"] for m in messages if m["role"] == "user"]
            blocks: list[Any] = [block for content in told if content.__class__ is list for block in content]
            found = [(b["tool_use_id"], b["content"]) for b in blocks if b["type"] == "tool_result"]
        return [(wire_id, json.loads(content)) for wire_id, content in found]

    async def states(self) -> list[tuple[str | None, str]]:
        """``(tool, state)`` of each call on record, in the order of their ids."""
        await self.kernel.log.flush()
        rows = self.kernel.log.reader.calls(session=self.session.id)
        return [(row.tool, row.state) for row in sorted(rows, key=lambda row: row.call_id)]


@asynccontextmanager
async def work(
    kind: Kind, folder: Path, *replies: ScriptedReply, rules: Iterable[str] = RULES
) -> AsyncGenerator[ModelFixture]:
    server_type = OpenAIServer if kind == "openai" else AnthropicServer
    async with server_type(*replies) as server, temporary_kernel(folder, tools=TOOLS, rules=rules) as kernel:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(f"{kind.upper()}_API_KEY", server.key)
            model = open_model(f"{kind}:some-model", base_url=server.base_url)
        session = await kernel.session()
        try:
            yield ModelFixture(kind, server, kernel, session, Agent(session, model))
        finally:
            await model.aclose()


@each_provider
@pytest.mark.proves("A-01", "L-01")
async def test_a_stream_cut_within_a_call_runs_complete_calls_and_records_the_cut_one(
    kind: Kind, tmp_path: Path
) -> None:
    reply = ScriptedReply(ReplyCall("mail__send", {"to": "ann"}), ReplyCall("mail__send", {"to": "bob"}, cut_after=2))
    async with work(kind, tmp_path, reply, ScriptedReply("ok")) as w:
        await w.done()
        first, second = [result for _, result in w.read(1)]
        assert (first["data"], second["type"]) == ({"sent": "ann"}, "error")
        assert "interrupted during the call" in second["error_text"]
        assert await w.states() == [("mail.send", "output"), ("mail.send", "rejected")]
    assert sent == ["ann"]


@each_provider
@pytest.mark.proves("L-10")
async def test_repeated_call_ids_of_a_model_become_separate_calls_with_one_answer_each(
    kind: Kind, tmp_path: Path
) -> None:
    def reply(*names: str) -> ScriptedReply:
        return ScriptedReply(*(ReplyCall("mail__send", {"to": name}, id="call_0") for name in names))

    async with work(kind, tmp_path, reply("ann", "bob"), reply("cyd"), ScriptedReply("ok")) as w:
        await w.done()
        answered = w.read(2)
        assert [result["data"]["sent"] for _, result in answered] == ["ann", "bob", "cyd"] == sent
        assert len({wire_id for wire_id, _ in answered}) == 3
        calls = list(w.kernel.log.reader.calls(session=w.session.id))
        assert len({row.call_id for row in calls}) == 3


@each_provider
@pytest.mark.proves("D-09")
async def test_calls_without_a_name_or_of_an_unknown_tool_are_refused_and_recorded(kind: Kind, tmp_path: Path) -> None:
    reply = ScriptedReply(
        ReplyCall(None), ReplyCall("mail__sent", {"to": "x"}), ReplyCall("mail__send", '{"to": "x", "to": "y"}')
    )
    async with work(
        kind, tmp_path, reply, ScriptedReply(ReplyCall("mail__send", {"to": "ann"})), ScriptedReply("ok")
    ) as w:
        await w.done()
        nameless, unknown, twice = [result for _, result in w.read(1)]
        assert "no tool name" in nameless["error_text"]
        assert unknown["metadata"]["error_kind"] == "unknown_tool" and "mail.send" in unknown["error_text"]
        assert twice["metadata"]["error_kind"] == "invalid_input" and "duplicate keys" in twice["error_text"]
        assert [state for _, state in await w.states()] == ["rejected", "rejected", "rejected", "output"]
    assert sent == ["ann"]


@each_provider
@pytest.mark.proves("K-02", "K-04")
async def test_a_model_gets_wire_names_and_its_calls_map_back_to_tool_ids(kind: Kind, tmp_path: Path) -> None:
    async with work(kind, tmp_path, ScriptedReply(ReplyCall("mail__send", {"to": "ann"})), ScriptedReply("ok")) as w:
        await w.done()
        tools = w.server.requests[0].body["tools"]
        views = [entry["function"] if kind == "openai" else entry for entry in tools]
        assert "mail__send" in [view["name"] for view in views]
        assert {key for view in views for key in view} == {
            "name",
            "description",
            "parameters" if kind == "openai" else "input_schema",
        }
        assert [row.tool for row in w.kernel.log.reader.calls(session=w.session.id)] == ["mail.send"]


@each_provider
@pytest.mark.proves("O-06")
async def test_a_prompt_contains_only_the_output_that_exposure_and_mask_leave_to_the_model(
    kind: Kind, tmp_path: Path
) -> None:
    names = ("scan__core", "scan__edge", "scan__nobody", "scan__masked")
    async with work(kind, tmp_path, ScriptedReply(*(ReplyCall(name) for name in names)), ScriptedReply("ok")) as w:
        at_face = [event.answer.result async for event in w.agent.run("go") if isinstance(event, CallAnswered)]
        prompt = json.dumps(w.server.requests[1].body)
        await w.kernel.log.flush()
        record = repr([entry.body for entry in w.kernel.log.reader.records(kind="committed")])
    kept = {"for the model only", "for people only", "for the record only", "kept out of prompts", "twelve pages"}
    assert {text for text in kept if text in prompt} == {"for the model only", "twelve pages"}
    assert {text for text in kept if text in repr(at_face)} == {
        "for people only",
        "kept out of prompts",
        "twelve pages",
    }
    assert {text for text in kept if text in record} == kept
    assert all(result.ok for result in at_face)
