"""A run whose calls wait for a person: parked, answered at another door, and gone on with; or stopped by that person."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from handrail import tool
from handrail.agent.loop import Agent
from handrail.agent.model import ResultsMessage
from handrail.contract.people import ApprovalAnswer, Away
from handrail.testing.kernels import ScriptedPerson, temporary_kernel
from handrail.testing.models import PlayedModel, call_reply, text_reply

sent: list[str] = []


@tool(id="mail.send", side_effect="external", locks=[])
async def send(to: str) -> str:
    """Send."""
    sent.append(to)
    return f"sent to {to}"


@pytest.mark.proves("P-09")
async def test_a_run_is_parked_with_its_calls_and_the_next_one_goes_on_with_what_was_decided(tmp_path: Path) -> None:
    """Source: resuming ran finished siblings again."""
    sent.clear()
    calls = call_reply(("mail__send", {"to": "a"}), ("todo", {"todos": []}), ("mail__send", {"to": "b"}))
    async with temporary_kernel(tmp_path, tools=[send]) as kernel:
        session = await kernel.session(attendant=Away())
        outcome = await Agent(session, PlayedModel(calls)).complete("send them")
        assert outcome.status == "parked" and len(outcome.parked) == 2
        first, second = kernel.approvals.pending()
        await kernel.approvals.decide(second.id, ApprovalAnswer("reject", "not b"), by="test")
    async with temporary_kernel(tmp_path, tools=[send]) as kernel:
        session = await kernel.session(session.id, attendant=Away())
        model = PlayedModel(text_reply("one was sent"))
        agent = Agent(session, model)
        assert (await agent.complete(None)).status == "parked" and sent == []
        await kernel.approvals.decide(first.id, ApprovalAnswer("once"), by="test")
        assert (await agent.complete(None)).status == "answered"
        (results,) = [message for message in agent.messages if isinstance(message, ResultsMessage)]
        told = [result.text for result in results.results]
        assert "sent to a" in told[0] and "not b" in told[2]
    assert sent == ["a"]


@pytest.mark.proves("P-07")
async def test_a_person_who_stops_the_session_ends_its_run(tmp_path: Path) -> None:
    sent.clear()
    calls = call_reply(("mail__send", {"to": "a"}))
    async with temporary_kernel(tmp_path, tools=[send]) as kernel:
        session = await kernel.session(attendant=ScriptedPerson([ApprovalAnswer("stop", "enough")]))
        outcome = await Agent(session, PlayedModel(calls, text_reply("never said"))).complete("send it")
        assert outcome.status == "cancelled" and sent == []


async def test_a_stop_that_is_given_elsewhere_ends_the_run_at_its_next_request(tmp_path: Path) -> None:
    sent.clear()
    async with temporary_kernel(tmp_path, tools=[send]) as kernel:
        session = await kernel.session(attendant=Away())
        assert "parked" in (await session.call("mail.send", {"to": "a"})).metadata
        (row,) = kernel.approvals.pending()
        await asyncio.gather(kernel.approvals.decide(row.id, ApprovalAnswer("stop"), by="test"))
        outcome = await Agent(session, PlayedModel(text_reply("never said"))).complete("go on")
        assert outcome.status == "cancelled" and "stopped by the user" in outcome.detail
