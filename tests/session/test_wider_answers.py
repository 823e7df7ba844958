"""Answers that store the wider rule of a request instead of one for the exact call."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.kernel.doors import Opens, by_both_doors

from handrail.contract.approval_requests import ApprovalAnswer, ApprovalChoice
from handrail.testing.scripted_kernel import ScriptedApprovalHandler

kernel_in = by_both_doors()


@pytest.mark.proves("P-08")
@pytest.mark.parametrize("choice", ["session-wider", "project-wider"])
async def test_an_answer_stores_the_wider_rule_as_shown_or_applies_once_without_one(
    tmp_path: Path, kernel_in: Opens, choice: ApprovalChoice
) -> None:
    person = ScriptedApprovalHandler([ApprovalAnswer(choice)] * 3)
    async with kernel_in(tmp_path) as kernel:
        session = await kernel.session(approval_handler=person)
        for path in ("src/a.txt", "src/b.txt", "top.txt", "other.txt"):
            assert (await session.call("write", {"path": path, "content": "x"})).ok
        assert [request.suggested_wider_rule for request in person.requests] == ["allow write src/**", None, None]
        assert [rule.text for rule in kernel.approvals.list_rules()] == ["allow write src/**"] * (
            choice == "project-wider"
        )
        other = await (await kernel.session()).call("write", {"path": "src/c.txt", "content": "x"})
        assert other.ok is (choice == "project-wider")
