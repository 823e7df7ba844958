"""Limits on pending approval requests, for a session and for a workspace."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from handrail import open_kernel, tool
from handrail.arbiter.approvals import approval_broker as approvals
from handrail.contract.approval_requests import ApprovalAnswer, DeferApprovals


@tool(side_effect="external", locks=[])
async def send(text: str) -> str:
    """Send."""
    return text


def opened(tmp_path: Path) -> Any:
    (tmp_path / "ws").mkdir(exist_ok=True)
    return open_kernel(tmp_path / "ws", state=tmp_path / "state", tools=[send], rules=["ask send"])


async def test_a_session_can_have_at_most_a_hundred_pending_approvals(tmp_path: Path) -> None:
    async with opened(tmp_path) as kernel:
        session = await kernel.session(approval_handler=DeferApprovals())
        found = [await session.call("send", {"text": str(number)}) for number in range(130)]
        assert ["awaiting_approval" in result.metadata for result in found] == [True] * 100 + [False] * 30
        refused = found[-1]
        assert refused.error_kind == "limit" and "handrail approve" in (refused.error_text or "")
        assert len(kernel.approvals.list_pending()) == 100
        other = await kernel.session(approval_handler=DeferApprovals())
        assert "awaiting_approval" in (await other.call("send", {"text": "x"})).metadata, "another session has its own"
        first = kernel.approvals.list_pending(session.id)[0]
        await kernel.approvals.decide(first.id, ApprovalAnswer("reject"), by="test")
        assert "awaiting_approval" in (await session.call("send", {"text": "y"})).metadata, "an answer makes room"


async def test_the_limit_of_pending_approvals_holds_for_concurrent_calls(tmp_path: Path) -> None:
    async with opened(tmp_path) as kernel:
        session = await kernel.session(approval_handler=DeferApprovals())
        calls = (session.call("send", {"text": str(number)}) for number in range(300))
        found = await asyncio.gather(*calls)
        assert sum("awaiting_approval" in result.metadata for result in found) == 100
        assert {result.error_kind for result in found if "awaiting_approval" not in result.metadata} == {"limit"}


async def test_pending_approvals_of_all_sessions_have_a_common_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(approvals, "MAX_PENDING_PER_WORKSPACE", 7)
    async with opened(tmp_path) as kernel:
        parked = 0
        for _ in range(5):
            session = await kernel.session(approval_handler=DeferApprovals())
            parked += sum(
                [
                    "awaiting_approval" in (await session.call("send", {"text": str(number)})).metadata
                    for number in range(3)
                ]
            )
        assert parked == 7


async def test_expired_approval_requests_do_not_count_towards_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(approvals, "MAX_PENDING_PER_SESSION", 1)
    async with opened(tmp_path) as kernel:
        session = await kernel.session(approval_handler=DeferApprovals())
        desk = kernel.components.arbiter.approval_broker
        assert "awaiting_approval" in (await session.call("send", {"text": "a"})).metadata
        late = time.time_ns() + 8 * 86_400 * 10**9
        monkeypatch.setattr(desk, "_clock", lambda: late)
        assert "awaiting_approval" in (await session.call("send", {"text": "b"})).metadata


async def test_pending_questions_of_a_session_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(approvals, "MAX_PENDING_PER_SESSION", 2)
    async with opened(tmp_path) as kernel:
        session = await kernel.session(approval_handler=DeferApprovals())
        asked: dict[str, Any] = {"questions": [{"question": "Which?", "header": "", "options": []}]}
        found = [await session.call("question", asked) for _ in range(4)]
        assert [result.error_kind for result in found][2:] == ["limit", "limit"], found
