"""A lease holder that ends between a request and its answer: its effect happens once, and the caller gets the answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.kernel.guests import joined_kernel

from handrail import ToolError, UsageError, tool
from handrail.contract.approval_requests import ApprovalAnswer
from handrail.ipc.wire.operation_dispatch import OperationTable
from handrail.kernel.local_kernel import LocalKernel
from handrail.testing.scripted_kernel import temporary_kernel

pytestmark = pytest.mark.proves("L-07")

ONCE = ApprovalAnswer("once")
NEVER = ApprovalAnswer("reject-always")


@tool(id="test.send", side_effect="external", locks=["outbox:X"])
async def send(name: str) -> str:
    """Send."""
    return name


def goes_after(holder: LocalKernel, op: str, *, done: bool = True) -> Callable[[], int]:
    """Let the connection of the one process that joined be lost when ``op`` is asked for the first time, once it was
    carried out or before it is. Gives how often it was asked for over that connection."""
    (guest,) = holder.server.clients
    connection = guest.connection  # pyright: ignore[reportPrivateUsage]
    asked = 0
    real = guest.operations.requests[op]

    async def lost(body: Any) -> Any:
        nonlocal asked
        asked += 1
        answer = await real.handler(body) if done else None
        connection.drop("lost in the middle", quietly=True)
        return answer

    requests = {**guest.operations.requests, op: replace(real, handler=lost)}
    connection._dispatcher.operations = OperationTable(requests, guest.operations.notifications)  # pyright: ignore[reportPrivateUsage]
    return lambda: asked


@pytest.mark.parametrize("done", [True, False])
async def test_a_fork_request_repeated_after_a_lost_holder_creates_one_session(tmp_path: Path, done: bool) -> None:
    async with temporary_kernel(tmp_path) as held, joined_kernel(tmp_path) as joined:
        await (await joined.session("ses_1")).suspend()
        asked = goes_after(held, "fork", done=done)
        forked = await joined.fork_session("ses_1")
        assert asked() == 1
        sessions = {row.id: row for row in held.components.store.sessions.list_latest()}
        assert set(sessions) == {"ses_1", forked} and sessions[forked].details["parent"] == "ses_1"


async def test_a_fork_cannot_replace_an_existing_session(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path) as held, joined_kernel(tmp_path) as joined:
        for name in ("ses_1", "ses_2"):
            await (await joined.session(name)).suspend()
        for taken in ("ses_1", "ses_2"):
            with pytest.raises(UsageError, match="already exists"):
                await joined.ipc_client.request("fork", {"id": "ses_1", "forked": taken})
        forked = await joined.fork_session("ses_1")
        async with joined_kernel(tmp_path) as other:
            session = await other.session(forked)
            with pytest.raises(UsageError, match="already exists"):
                await joined.ipc_client.request("fork", {"id": "ses_1", "forked": forked})
            await session.close()
        assert [row.id for row in held.components.store.sessions.list_latest() if row.closed_ns is None] == [
            "ses_2",
            "ses_1",
        ]


@pytest.mark.parametrize("done", [True, False])
async def test_a_close_request_repeated_after_a_lost_holder_succeeds(tmp_path: Path, done: bool) -> None:
    async with temporary_kernel(tmp_path) as held, joined_kernel(tmp_path) as joined:
        await (await joined.session("ses_1")).suspend()
        asked = goes_after(held, "close-session", done=done)
        await joined.close_session("ses_1")
        (row,) = held.components.store.sessions.list_latest()
        assert asked() == 1 and row.closed_ns is not None
        with pytest.raises(UsageError, match="is closed"):
            await joined.close_session("ses_1")


@pytest.mark.proves("P-07")
@pytest.mark.parametrize("done", [True, False])
@pytest.mark.parametrize("answer", [ONCE, NEVER])
async def test_an_approval_decision_is_made_once_when_the_connection_is_lost_before_the_reply(
    tmp_path: Path, answer: ApprovalAnswer, done: bool
) -> None:
    async with temporary_kernel(tmp_path, tools=[send]) as held, joined_kernel(tmp_path) as joined:
        await _parked(held)
        (waiting,) = joined.approvals.list_pending()
        asked = goes_after(held, "approvals.decide", done=done)
        decided = await joined.approvals.decide(waiting.id, answer, by="here")
        assert asked() == 1 and decided.choice == answer.choice and decided.decided_by == "here"
        with pytest.raises(ToolError):
            await joined.approvals.decide(waiting.id, answer, by="here")


@pytest.mark.proves("P-07")
async def test_a_decision_fails_when_another_client_decided_meanwhile(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, tools=[send]) as held, joined_kernel(tmp_path) as joined:
        await _parked(held)
        (waiting,) = joined.approvals.list_pending()
        goes_after(held, "approvals.decide", done=False)
        await held.approvals.decide(waiting.id, ApprovalAnswer("reject"), by="there")
        with pytest.raises(ToolError):
            await joined.approvals.decide(waiting.id, ONCE, by="here")
        assert held.approvals.get(waiting.id).choice == "reject"


@pytest.mark.parametrize("done", [True, False])
async def test_a_rule_is_revoked_once_when_the_connection_is_lost_before_the_reply(tmp_path: Path, done: bool) -> None:
    async with temporary_kernel(tmp_path, tools=[send]) as held, joined_kernel(tmp_path) as joined:
        await _parked(held)
        (waiting,) = joined.approvals.list_pending()
        await joined.approvals.decide(waiting.id, NEVER, by="here")
        (rule,) = joined.approvals.list_rules()
        asked = goes_after(held, "approvals.revoke_rule", done=done)
        assert await joined.approvals.revoke_rule(rule.id) == rule and asked() == 1
        assert joined.approvals.list_rules() == []
        with pytest.raises(ToolError):
            await joined.approvals.revoke_rule(rule.id)


async def _parked(held: LocalKernel) -> None:
    """A call that awaits an approval."""

    class Absent:
        async def approve(self, request: object) -> ApprovalAnswer:
            return ApprovalAnswer("defer")

        async def answer_questions(self, session_id: str, questions: object) -> None:
            return None

    session = await held.session("ses_asks", headless=False, approval_handler=Absent())
    assert "awaiting_approval" in (await session.call("test.send", {"name": "a"})).metadata
    await session.suspend()
    await held.log.flush()
