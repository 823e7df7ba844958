"""Details of each call in the log: arguments, the rule or person that allowed it, client, and token usage."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.kernel.test_joined import second

from handrail import Agent, ApprovalAnswer
from handrail.agent.providers.scripted_model import ModelScript
from handrail.contract.session_protocols import ClientInfo
from handrail.record.log_reader import ModelUsage
from handrail.testing import ScriptedModel
from handrail.testing.scripted_kernel import ScriptedApprovalHandler, temporary_kernel


def usage(tokens: int, cost: float | None = None) -> dict[str, object]:
    told: dict[str, object] = {"input": tokens, "output": 5, "cache_read": 40}
    return {"usage": told if cost is None else {**told, "cost": cost}}


@pytest.mark.parametrize("joined", [False, True])
async def test_a_log_row_names_the_arguments_the_deciding_rule_and_the_client(tmp_path: Path, joined: bool) -> None:
    async with (
        temporary_kernel(tmp_path, rules=["allow write notes/*"]) as held,
        second(tmp_path, mode="auto") as other,
    ):
        kernel = other if joined else held
        client = ClientInfo("zed" * 100, "0.199")
        session = await kernel.session(
            approval_handler=ScriptedApprovalHandler([ApprovalAnswer("once")]),
            client_info=client,
            rules=["allow fs.write a.txt"],
        )
        for path in ("a.txt", "b.txt"):
            await session.call("write", {"path": path, "content": ""})
        await kernel.log.flush()
        first, asked = kernel.log.reader.calls(session=session.id)
    assert first.arguments == {"path": "a.txt", "content": ""}
    assert first.permission is not None and first.permission.by == "rules"
    assert (first.permission.rule, first.permission.scope) == ("allow fs.write a.txt", "session")
    assert first.opener is not None and asked.opener == first.opener
    assert (first.opener.client, first.opener.client_version) == (("zed" * 100)[:80], "0.199")
    assert first.opener.frontend == "library" and str(first.opener).endswith("0.199 over library")
    if not joined:
        assert asked.permission is not None and asked.permission.by == "person"
        assert asked.permission.choice == "once" and "allowed by the user (once" in str(asked.permission)


async def test_each_resumed_session_records_its_client_or_else_its_frontend(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path) as kernel:
        for info in (ClientInfo("zed", "1"), None, ClientInfo("nvim")):
            session = await kernel.session("ses_1", client_info=info)
            await session.call("glob", {"pattern": "*"})
            await session.suspend()
        await kernel.log.flush()
        rows = kernel.log.reader.calls(session="ses_1")
    assert [str(row.opener) for row in rows] == ["zed 1 over library", "library", "nvim over library"]


async def test_a_log_row_names_the_session_grant_or_mode_that_allowed_the_call(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path) as kernel:
        session = await kernel.session(approval_handler=ScriptedApprovalHandler([ApprovalAnswer("session")]))
        for _ in range(2):
            await session.call("write", {"path": "a.txt", "content": "x"})
        session.set_mode("accept-edits")
        await session.call("write", {"path": "c.txt", "content": "x"})
        await kernel.log.flush()
        asked, standing, mode = (row.permission for row in kernel.log.reader.calls(session=session.id))
    assert asked is not None and standing is not None and mode is not None
    assert (asked.by, asked.choice) == ("person", "session")
    assert standing.scope == "session" and "answered for this session" in str(standing)
    assert mode.scope == "mode" and "accept-edits" in str(mode)


@pytest.mark.parametrize("joined", [False, True])
async def test_the_log_sums_the_usage_of_a_session_by_model_with_reported_costs(tmp_path: Path, joined: bool) -> None:
    call = {"calls": [{"name": "glob", "arguments": {"pattern": "*"}}]}
    turns = [{**call, **usage(100, 0.25)}, {**call, **usage(50)}, {"text": "Done.", **usage(10, 0.5)}]
    async with temporary_kernel(tmp_path) as held, second(tmp_path) as other:
        kernel = other if joined else held
        session = await kernel.session()
        outcome = await Agent(
            session, ScriptedModel(ModelScript.model_validate({"turns": turns}), source="s")
        ).complete("go")
        await kernel.log.flush()
        reader = kernel.log.reader
        assert reader.read_session_model_usage(session.id) == [ModelUsage("script", "s", 3, 160, 15, 120, 0, 0.75)]
        ends = [dict(one.body or {}) for one in reader.records(session=session.id, kind="turn-finished")]
    assert outcome.ok
    assert [(one["turn"], one["finish_reason"]) for one in ends] == [(1, "calls"), (2, "calls"), (3, "end")]
    assert "cost" not in ends[1] and all(one["duration_ms"] >= one["first_token_ms"] >= 0 for one in ends)
