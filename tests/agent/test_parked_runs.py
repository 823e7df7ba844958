"""Runs whose calls await an approval: suspended, answered elsewhere, resumed or stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.kernel.guests import joined_kernel

from handrail import Kernel, tool
from handrail.agent.agent_loop import Agent
from handrail.agent.model_protocol import CallResultsMessage
from handrail.contract.approval_requests import ApprovalAnswer, ApprovalRequest, DeferApprovals
from handrail.contract.services.tool_runtime import UserQuestion
from handrail.testing.provider_request_checks import PlaybackModel, call_reply, text_reply
from handrail.testing.scripted_kernel import ScriptedApprovalHandler, temporary_kernel

sent: list[str] = []


@tool(id="mail.send", side_effect="external", locks=[])
async def send(to: str) -> str:
    """Send."""
    sent.append(to)
    return f"sent to {to}"


@pytest.mark.proves("P-09")
async def test_a_run_awaiting_approval_resumes_with_the_decided_calls(tmp_path: Path) -> None:
    """Source: resuming ran finished siblings again."""
    sent.clear()
    calls = call_reply(("mail__send", {"to": "a"}), ("todo", {"todos": []}), ("mail__send", {"to": "b"}))
    async with temporary_kernel(tmp_path, tools=[send]) as kernel:
        session = await kernel.session(approval_handler=DeferApprovals())
        outcome = await Agent(session, PlaybackModel(calls)).complete("send them")
        assert outcome.status == "awaiting_approval" and len(outcome.pending_approvals) == 2
        first, second = kernel.approvals.list_pending()
        await kernel.approvals.decide(second.id, ApprovalAnswer("reject", "not b"), by="test")
    async with temporary_kernel(tmp_path, tools=[send]) as kernel:
        session = await kernel.session(session.id, approval_handler=DeferApprovals())
        model = PlaybackModel(text_reply("one was sent"))
        agent = Agent(session, model)
        assert (await agent.complete(None)).status == "awaiting_approval" and sent == []
        await kernel.approvals.decide(first.id, ApprovalAnswer("once"), by="test")
        assert (await agent.complete(None)).status == "answered"
        (results,) = [message for message in agent.messages if isinstance(message, CallResultsMessage)]
        told = [result.text for result in results.results]
        assert "sent to a" in told[0] and "not b" in told[2]
    assert sent == ["a"]


@pytest.mark.proves("P-07")
async def test_a_stop_answer_to_an_approval_request_ends_the_run(tmp_path: Path) -> None:
    sent.clear()
    calls = call_reply(("mail__send", {"to": "a"}))
    async with temporary_kernel(tmp_path, tools=[send]) as kernel:
        session = await kernel.session(approval_handler=ScriptedApprovalHandler([ApprovalAnswer("stop", "enough")]))
        outcome = await Agent(session, PlaybackModel(calls, text_reply("never said"))).complete("send it")
        assert outcome.status == "cancelled" and sent == []


async def test_a_stop_answered_outside_the_session_ends_the_run_at_its_next_request(tmp_path: Path) -> None:
    sent.clear()
    async with temporary_kernel(tmp_path, tools=[send]) as kernel:
        session = await kernel.session(approval_handler=DeferApprovals())
        assert "awaiting_approval" in (await session.call("mail.send", {"to": "a"})).metadata
        (row,) = kernel.approvals.list_pending()
        await asyncio.gather(kernel.approvals.decide(row.id, ApprovalAnswer("stop"), by="test"))
        outcome = await Agent(session, PlaybackModel(text_reply("never said"))).complete("go on")
        assert outcome.status == "cancelled" and "stopped by the user" in outcome.detail


class ManualApprovalHandler:
    """An approval handler that answers each request later, in any order."""

    def __init__(self) -> None:
        self.open: dict[str, asyncio.Future[ApprovalAnswer]] = {}
        self.seen: list[str] = []
        self._changed = asyncio.Event()

    async def approve(self, request: ApprovalRequest) -> ApprovalAnswer:
        to = str(request.arguments["to"])
        answered = asyncio.get_running_loop().create_future()
        self.open[to] = answered
        self.seen.append(to)
        self._changed.set()
        try:
            return await answered
        finally:
            del self.open[to]
            self._changed.set()

    async def answer_questions(self, session_id: str, questions: Sequence[UserQuestion]) -> list[list[str]] | None:
        return None

    async def has(self, count: int) -> None:
        """Wait until this many requests are pending."""
        while len(self.open) != count:
            self._changed.clear()
            await self._changed.wait()


async def parked_sends(kernel: Kernel, *names: str) -> str:
    """A session whose last reply sends to each of these and awaits an approval."""
    session = await kernel.session(approval_handler=DeferApprovals())
    calls = call_reply(*(("mail__send", {"to": name}) for name in names))
    assert (await Agent(session, PlaybackModel(calls)).complete("send them")).status == "awaiting_approval"
    await session.suspend()
    return session.id


def told_by(agent: Agent) -> list[str]:
    return [r.text for message in agent.messages if isinstance(message, CallResultsMessage) for r in message.results]


@pytest.mark.proves("P-09")
@pytest.mark.parametrize("joined", [False, True])
async def test_suspended_calls_are_asked_about_together_answered_in_any_order_and_run_in_order(
    tmp_path: Path, joined: bool
) -> None:
    sent.clear()
    async with temporary_kernel(tmp_path, tools=[send]) as kernel:
        known_as = await parked_sends(kernel, *"abc")
    person, model = ManualApprovalHandler(), PlaybackModel(text_reply("two were sent"))

    async def go_on(kernel: Kernel) -> None:
        agent = Agent(await kernel.session(known_as, approval_handler=person), model)
        run = asyncio.ensure_future(agent.complete("go on"))
        await person.has(3)
        assert person.seen == [*"abc"] and sent == []
        person.open["c"].set_result(ApprovalAnswer("once"))
        person.open["b"].set_result(ApprovalAnswer("reject", "not b"))
        await person.has(1)
        person.open["a"].set_result(ApprovalAnswer("once"))
        assert (await run).text == "two were sent"
        told = told_by(agent)
        assert ["sent to a" in told[0], "not b" in told[1], "sent to c" in told[2]] == [True] * 3

    async with temporary_kernel(tmp_path, tools=[send]) as kernel:
        if not joined:
            await go_on(kernel)
        else:
            async with joined_kernel(tmp_path, tools=[send]) as guest:
                await go_on(guest)
        assert kernel.approvals.list_pending() == []
    assert sent == ["a", "c"], "an open question holds later side effects back"


async def test_calls_approved_between_two_runs_execute_concurrently(tmp_path: Path) -> None:
    together = asyncio.Barrier(2)

    @tool(id="meet", side_effect="external", locks=[])
    async def meet(who: str) -> str:
        """Meet the other."""
        await together.wait()
        return f"{who} met"

    async with temporary_kernel(tmp_path, tools=[meet]) as kernel:
        session = await kernel.session(approval_handler=DeferApprovals())
        calls = call_reply(("meet", {"who": "a"}), ("meet", {"who": "b"}))
        model = PlaybackModel(calls, text_reply("both"))
        agent = Agent(session, model)
        assert (await agent.complete("meet")).status == "awaiting_approval"
        for row in kernel.approvals.list_pending():
            await kernel.approvals.decide(row.id, ApprovalAnswer("once"), by="test")
        assert (await agent.complete(None)).text == "both"
        assert ["a met" in told_by(agent)[0], "b met" in told_by(agent)[1]] == [True, True]


async def test_a_stop_during_approval_requests_answers_each_suspended_call(tmp_path: Path) -> None:
    sent.clear()
    async with temporary_kernel(tmp_path, tools=[send]) as kernel:
        known_as, person = await parked_sends(kernel, *"abc"), ManualApprovalHandler()
        agent = Agent(await kernel.session(known_as, approval_handler=person), PlaybackModel(text_reply("so be it")))
        run = asyncio.ensure_future(agent.complete(None))
        await person.has(3)
        agent.cancel()
        assert (await run).status == "cancelled" and kernel.approvals.list_pending() == [] and sent == []
        await kernel.log.flush()
        assert [call.error_kind for call in kernel.log.reader.calls(session=known_as)] == ["cancelled"] * 3
        assert (await agent.complete(None)).text == "so be it"
        assert ["stopped by the user" in text for text in told_by(agent)] == [True] * 3


@pytest.mark.proves("A-10")
async def test_suspending_a_session_leaves_its_open_approval_requests_pending(
    tmp_path: Path,
) -> None:
    sent.clear()
    async with temporary_kernel(tmp_path, tools=[send]) as kernel:
        known_as, person = await parked_sends(kernel, *"ab"), ManualApprovalHandler()
        session = await kernel.session(known_as, approval_handler=person)
        run = asyncio.ensure_future(Agent(session, PlaybackModel()).complete(None))
        await person.has(2)
        await session.suspend()
        assert (await run).status == "awaiting_approval" and len(kernel.approvals.list_pending()) == 2
        for row in kernel.approvals.list_pending():
            await kernel.approvals.decide(row.id, ApprovalAnswer("once"), by="test")
        again = Agent(await kernel.session(known_as), PlaybackModel(text_reply("sent")))
        assert (await again.complete(None)).text == "sent" and sent == ["a", "b"]


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_stop_or_suspend_during_recovery_reaches_suspended_calls_at_any_moment(
    tmp_path: Path, leaves: bool
) -> None:
    sent.clear()
    async with temporary_kernel(tmp_path, tools=[send]) as kernel:
        for rounds in (1, 2, 3, 5, 8):
            known_as, person = await parked_sends(kernel, *"ab"), ManualApprovalHandler()
            session = await kernel.session(known_as, approval_handler=person)
            calls = [f"{known_as}/1.{n}" for n in range(2)]
            recalling = asyncio.ensure_future(session.recover_results(calls))
            for _ in range(rounds):
                await asyncio.sleep(0)
            if leaves:
                await session.suspend()
            else:
                session.cancel_running_calls()
            answers = [answer.result for answer in await recalling]
            assert [answer.metadata.get("stopped_by") for answer in answers] == [None if leaves else "user"] * 2
            assert len(kernel.approvals.list_pending(known_as)) == (2 if leaves else 0)
    assert sent == []
