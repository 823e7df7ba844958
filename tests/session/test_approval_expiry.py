"""The configured lifetimes of requests and grants hold for every call."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from handrail import ApprovalAnswer, ApprovalRequest, DeferApprovals, ToolError, UserQuestion, tool
from handrail.arbiter.approvals.approval_broker import HOUR_NS, ApprovalLifetimes
from handrail.testing.scripted_kernel import temporary_kernel

ran: list[str] = []


@tool(id="bank.pay", side_effect="external", locks=["account:X"])
async def pay(source: str) -> str:
    """Pay."""
    ran.append(source)
    return source


class SilentUser:
    """Never answers."""

    async def approve(self, request: ApprovalRequest) -> ApprovalAnswer:
        await asyncio.Event().wait()
        raise AssertionError

    async def answer_questions(self, session_id: str, questions: Sequence[UserQuestion]) -> list[list[str]] | None:
        await asyncio.Event().wait()


async def test_the_configuration_sets_the_lifetimes_of_requests_and_grants(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path) as kernel:
        assert kernel.approvals.lifetimes == ApprovalLifetimes(7 * 24 * HOUR_NS, 24 * HOUR_NS)
    settings = "[approvals]\nrequest_days = 3\ngrant_hours = 2\n"
    async with temporary_kernel(tmp_path, settings=settings) as kernel:
        assert kernel.approvals.lifetimes == ApprovalLifetimes(3 * 24 * HOUR_NS, 2 * HOUR_NS)


@pytest.mark.proves("P-07", "P-09")
async def test_a_call_with_an_expired_grant_does_not_run(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, tools=[pay]) as kernel:
        kernel.approvals.lifetimes = ApprovalLifetimes(grant_ns=1)
        session = await kernel.session(approval_handler=DeferApprovals())
        approval = str((await session.call("bank.pay", {"source": "a"})).metadata["awaiting_approval"])
        await kernel.approvals.decide(approval, ApprovalAnswer("once"), by="test")
        (answer,) = await session.resume_suspended_calls()
        assert answer.result.error_kind == "conflict" and "expired unused" in (answer.result.error_text or "")
        await kernel.log.flush()
        kinds = [record.kind for record in kernel.log.reader.records(call=answer.call_id)]
        assert kinds[-1] == "rejected" and "intended" not in kinds
        assert await session.resume_suspended_calls() == []
    assert ran == []


@pytest.mark.proves("P-09")
async def test_a_waiting_call_is_denied_when_its_approval_request_expires(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, tools=[pay]) as kernel:
        kernel.approvals.lifetimes = ApprovalLifetimes(request_ns=1)
        session = await kernel.session(approval_handler=SilentUser())
        result = await session.call("bank.pay", {"source": "a"})
        assert result.error_kind == "denied" and "without an answer" in (result.error_text or "")
        question = await session.call("question", {"questions": [{"question": "Which?"}]})
        assert question.error_kind == "denied"
        assert kernel.approvals.list_pending() == []
    assert ran == []


@pytest.mark.proves("P-09")
async def test_a_request_that_expired_while_its_process_was_gone_is_refused_on_resume(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, tools=[pay]) as kernel:
        kernel.approvals.lifetimes = ApprovalLifetimes(request_ns=1)
        session = await kernel.session(approval_handler=DeferApprovals())
        approval = str((await session.call("bank.pay", {"source": "a"})).metadata["awaiting_approval"])
    async with temporary_kernel(tmp_path, tools=[pay]) as kernel:
        with pytest.raises(ToolError, match="expired"):
            await kernel.approvals.decide(approval, ApprovalAnswer("once"), by="test")
        session = await kernel.session(session.id, approval_handler=DeferApprovals())
        (answer,) = await session.resume_suspended_calls()
        assert answer.result.error_kind == "denied" and "without an answer" in (answer.result.error_text or "")
    assert ran == []


async def test_a_call_that_waits_for_a_lock_keeps_its_grant_over_a_shutdown(tmp_path: Path) -> None:
    entered, leave = asyncio.Event(), asyncio.Event()

    @tool(id="hold", side_effect="external", locks=["account:X"])
    async def hold() -> str:
        """Hold the lock."""
        entered.set()
        await leave.wait()
        return ""

    async with temporary_kernel(tmp_path, tools=[pay, hold], rules=["allow hold"]) as kernel:
        session = await kernel.session(approval_handler=SilentUser())
        waits, asks = asyncio.Event(), asyncio.Event()
        session.watch_events(
            lambda event: {"awaiting-locks": waits, "approval-requested": asks}.get(event.kind, asyncio.Event()).set()
        )
        holding = asyncio.create_task(session.call("hold", {}))
        await entered.wait()
        call = asyncio.create_task(session.call("bank.pay", {"source": "a"}))
        await asks.wait()
        (row,) = kernel.approvals.list_pending()
        await kernel.approvals.decide(row.id, ApprovalAnswer("once"), by="test")
        await waits.wait()
    assert (await holding).error_kind == "cancelled"
    assert (await call).metadata["awaiting_approval"] == row.id and ran == []
    async with temporary_kernel(tmp_path, tools=[pay, hold]) as kernel:
        session = await kernel.session(session.id)
        (answer,) = await session.resume_suspended_calls()
        assert answer.result.data == "a"
    assert ran == ["a"]
