"""A run first answers the calls that the previous run left open."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import pytest
from tests.agent.sessions import RecordingSession

from handrail.agent.agent_loop import Agent
from handrail.agent.model_protocol import CallResultsMessage, UserMessage
from handrail.agent.run_events import CallAnswered, RunFinished
from handrail.contract.calls_and_results import ProposedCall, Result
from handrail.contract.errors import LogUnavailable
from handrail.contract.services.history_and_skill_services import HistoryEntry
from handrail.testing.provider_request_checks import PlaybackModel, call_reply, text_reply


class KeptHere:
    """A history in memory; while ``full`` it takes nothing."""

    def __init__(self) -> None:
        self.rows: dict[int, Mapping[str, Any]] = {}
        self.full = False

    async def read_stored_messages(self) -> Sequence[HistoryEntry]:
        return sorted(self.rows.items())

    def store_messages(self, entries: Sequence[HistoryEntry]) -> Awaitable[None]:
        kept: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.full:
            kept.set_exception(LogUnavailable("the disk is full"))
        else:
            self.rows.update(entries)
            kept.set_result(None)
        return kept

    async def store_attachment(self, data: bytes, media_type: str) -> str:
        raise LogUnavailable("nobody here shows anything beside text")

    async def load_attachment(self, ref: str) -> bytes:
        raise LogUnavailable("nobody here shows anything beside text")

    async def record_turn(self, usage: Mapping[str, Any]) -> None:
        return None

    async def record_compaction(self, summary: Mapping[str, Any]) -> None:
        pass

    async def record_provider_tool_use(self, about: Mapping[str, Any], content: Any) -> Sequence[str]:
        raise LogUnavailable("no model here has tools of its own")

    @property
    def roles(self) -> list[str]:
        return [str(row["role"]) for _, row in sorted(self.rows.items())]


def parks(call: ProposedCall, arguments: dict[str, Any]) -> Result:
    if call.name == "mail.send":
        return Result.error("unavailable", "waits for a person", awaiting_approval="apr_1")
    return Result.output(arguments)


def results_of(agent: Agent) -> list[tuple[str, bool]]:
    return [(r.text, r.is_error) for m in agent.messages if isinstance(m, CallResultsMessage) for r in m.results]


@pytest.mark.proves("A-10")
async def test_a_call_awaiting_approval_ends_the_run_and_its_answer_starts_the_next() -> None:
    history = KeptHere()
    session = RecordingSession(parks, history)
    calls = call_reply(("echo", {"n": 1}), ("mail.send", {}), ("echo", {"n": 2}))
    first = await Agent(session, PlaybackModel(calls)).complete("send it")
    assert (first.status, first.pending_approvals) == ("awaiting_approval", ("apr_1",))
    assert history.roles == ["user", "assistant", "results"]

    session.recorded["s1/1.1"] = Result.error("unavailable", "waits still", awaiting_approval="apr_1")
    again = Agent(session, PlaybackModel())
    assert (await again.complete(None)).status == "awaiting_approval"
    assert again.messages == (UserMessage("send it"),)

    session.recorded["s1/1.1"] = Result.output("sent")
    agent = Agent(session, PlaybackModel(text_reply("it is sent")))
    answered: list[CallAnswered] = []
    async with aclosing(agent.run(None)) as events:
        async for event in events:
            if isinstance(event, CallAnswered):
                answered.append(event)
            elif isinstance(event, RunFinished):
                assert event.outcome.ok
    assert [(event.position, event.call.name, event.answer.result.data) for event in answered] == [
        (1, "mail__send", "sent")
    ]
    assert results_of(agent) == [
        ('{"type":"output","data":{"n":1}}', False),
        ('{"type":"output","data":"sent"}', False),
        ('{"type":"output","data":{"n":2}}', False),
    ]
    assert session.calls[-1].name == "echo" and len(session.calls) == 3, "nothing was proposed again"


async def test_an_agent_continues_after_a_user_decided_its_call() -> None:
    session = RecordingSession(parks)
    agent = Agent(session, PlaybackModel(call_reply(("mail.send", {})), text_reply("so be it")))
    assert (await agent.complete("send it")).status == "awaiting_approval"
    session.recorded["s1/1.0"] = Result.error("denied", "the user rejected this call")
    assert (await agent.complete("then not")).ok
    ((text, failed),) = results_of(agent)
    assert "rejected" in text and failed
    assert agent.messages[3] == UserMessage("then not")


async def test_a_reply_is_stored_before_its_calls_are_proposed() -> None:
    history = KeptHere()
    roles_then: list[list[str]] = []

    def look(call: ProposedCall, arguments: dict[str, Any]) -> Result:
        roles_then.append(history.roles)
        return Result.output(1)

    agent = Agent(RecordingSession(look, history), PlaybackModel(call_reply(("echo", {})), text_reply("end")))
    assert (await agent.complete("task")).ok
    assert roles_then == [["user", "assistant"]]
    assert history.roles == ["user", "assistant", "results", "assistant"]
    assert history.rows[1]["parts"][0]["id"] == "s1/1.0"


async def test_a_reply_that_cannot_be_stored_ends_the_run_with_the_reason() -> None:
    history = KeptHere()
    session = RecordingSession(history=history)

    class FillsUp(PlaybackModel):
        def stream(self, request: Any) -> Any:
            history.full = True
            return super().stream(request)

    agent = Agent(session, FillsUp(call_reply(("echo", {"n": 1}))))
    outcome = await agent.complete("task")
    assert outcome.status == "failed" and "the disk is full" in outcome.detail
    history.full = False
    assert history.roles == ["user"]
    goes_on = Agent(session, PlaybackModel(text_reply("end")))
    assert (await goes_on.complete("again")).ok
    assert history.roles == ["user", "user", "assistant"]


async def test_a_run_does_not_start_when_its_task_cannot_be_stored() -> None:
    history = KeptHere()
    history.full = True
    model = PlaybackModel(text_reply("end"))
    with pytest.raises(LogUnavailable, match="full"):
        await Agent(RecordingSession(history=history), model).complete("task")
    assert model.requests == []


async def test_the_next_run_receives_the_answers_to_the_calls_of_a_cancelled_run() -> None:
    history = KeptHere()
    session = RecordingSession(history=history)
    session.hold()
    run = asyncio.create_task(Agent(session, PlaybackModel(call_reply(("echo", {"n": 1})))).complete("task"))
    await session.started.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert history.roles[:2] == ["user", "assistant"]
    session.recorded["s1/1.0"] = Result.error("cancelled", "stopped by the user")
    agent = Agent(session, PlaybackModel(text_reply("end")))
    assert (await agent.complete("again")).ok
    ((text, failed),) = results_of(agent)
    assert "stopped" in text and failed


async def test_a_stop_after_open_calls_were_answered_ends_the_run_and_keeps_their_answers() -> None:
    history = KeptHere()
    session = RecordingSession(parks, history)
    calls = call_reply(("mail.send", {}), ("mail.send", {}))
    await Agent(session, PlaybackModel(calls)).complete("send both")
    session.recorded = {"s1/1.0": Result.output(1), "s1/1.1": Result.output(2)}
    agent = Agent(session, PlaybackModel(text_reply("end")))
    statuses: list[str] = []
    async with aclosing(agent.run(None)) as events:
        async for event in events:
            if isinstance(event, CallAnswered):
                agent.cancel()
            elif isinstance(event, RunFinished):
                statuses.append(event.outcome.status)
    assert statuses == ["cancelled"] and len(results_of(agent)) == 2
    again = Agent(session, PlaybackModel(text_reply("end")))
    assert (await again.complete(None)).ok
    assert [text for text, _ in results_of(again)] == ['{"type":"output","data":1}', '{"type":"output","data":2}']
