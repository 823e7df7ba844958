"""Pending approvals: any number at once, answered from any front end, across restarts, and used once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.kernel.doors import Opens, by_both_doors

from handrail import Kernel, tool
from handrail.contract.approval_requests import Approval, ApprovalAnswer, ApprovalRequest, DeferApprovals
from handrail.contract.calls_and_results import Result
from handrail.contract.errors import ToolError, UsageError
from handrail.contract.json_codec import reader_of, write
from handrail.contract.services.tool_runtime import UserQuestion
from handrail.contract.session_protocols import Session
from handrail.contract.tool.tool_protocol import Tool
from handrail.store.json_fallback_encoding import decode_json_with_fallback, encode_json_with_fallback
from handrail.testing.scripted_kernel import ScriptedApprovalHandler, temporary_kernel

ran: list[str] = []


@pytest.fixture(autouse=True)
def nothing_ran() -> None:
    ran.clear()


@tool(id="bank.pay", side_effect="external", locks=["account:{source}:X"])
async def pay(source: str, amount: int = 1) -> str:
    """Pay."""
    ran.append(f"{source}:{amount}")
    return f"paid {amount} from {source}"


class DeferringUser:
    """Nobody answers here: whatever is asked waits for another door."""

    def __init__(self) -> None:
        self.requests: list[ApprovalRequest] = []
        self.gone = 0

    async def approve(self, request: ApprovalRequest) -> ApprovalAnswer:
        self.requests.append(request)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.gone += 1
            raise
        raise AssertionError

    async def answer_questions(self, session_id: str, questions: Sequence[UserQuestion]) -> list[list[str]] | None:
        await asyncio.Event().wait()


class PendingRequests:
    """Waits until this many requests are pending."""

    def __init__(self, session: Session) -> None:
        self._count = 0
        self._changed = asyncio.Event()
        session.watch_events(lambda event: self._one() if event.kind == "approval-requested" else None)

    def _one(self) -> None:
        self._count += 1
        self._changed.set()

    async def times(self, count: int) -> None:
        while self._count < count:
            self._changed.clear()
            await self._changed.wait()


def start(session: Session, **arguments: Any) -> asyncio.Task[Result]:
    return asyncio.create_task(session.call("bank.pay", arguments))


async def refused(attempt: Any, kind: str, *parts: str) -> None:
    with pytest.raises(ToolError) as raised:
        await attempt
    assert raised.value.kind == kind, raised.value
    for part in parts:
        assert part in str(raised.value), raised.value


kernel_in = by_both_doors()
ONCE = ApprovalAnswer("once")


def one(kernel: Kernel) -> Approval:
    (pending,) = kernel.approvals.list_pending()
    return pending


@pytest.mark.proves("P-09")
async def test_parallel_approval_requests_all_wait_and_each_answer_reaches_its_own_call(
    tmp_path: Path, kernel_in: Opens
) -> None:
    """Source: only the first of parallel approvals surfaced, and answers went to the wrong call."""
    async with kernel_in(tmp_path, tools=[pay]) as kernel:
        session = await kernel.session(approval_handler=DeferringUser())
        asked = PendingRequests(session)
        calls = [start(session, source=f"a{number}") for number in range(20)]
        await asked.times(20)
        pending = {str(row.request.arguments["source"]): row for row in kernel.approvals.list_pending()}
        assert len(pending) == 20
        for number in reversed(range(20)):
            choice = ApprovalAnswer("reject", f"not a{number}") if number % 3 else ONCE
            await kernel.approvals.decide(pending[f"a{number}"].id, choice, by="test")
        for number, result in enumerate(await asyncio.gather(*calls)):
            if number % 3:
                assert result.error_kind == "denied" and f"not a{number}" in (result.error_text or "")
            else:
                assert result.data == f"paid 1 from a{number}"
    assert sorted(ran) == sorted(f"a{number}:1" for number in range(0, 20, 3))


@pytest.mark.proves("P-09")
async def test_the_first_answer_wins_and_later_answers_get_a_conflict(tmp_path: Path, kernel_in: Opens) -> None:
    person = ScriptedApprovalHandler([ONCE])
    person.may_answer.clear()
    async with kernel_in(tmp_path, tools=[pay]) as kernel:
        session = await kernel.session(approval_handler=person)
        call = start(session, source="a")
        await person.request_received.wait()
        row = one(kernel)
        answers = await asyncio.gather(
            *(kernel.approvals.decide(row.id, ApprovalAnswer("reject", str(n)), by=f"door {n}") for n in range(10)),
            return_exceptions=True,
        )
        won = [answer for answer in answers if isinstance(answer, Approval)]
        lost = [answer for answer in answers if isinstance(answer, ToolError)]
        assert len(won) == 1 and len(lost) == 9 and {error.kind for error in lost} == {"conflict"}
        assert "was already answered with `reject`" in str(lost[0])
        result = await call
        assert result.error_text == f"The user rejected this call: {won[0].message}"
        await refused(kernel.approvals.decide(row.id, ONCE, by="late"), "conflict", "already answered")
    assert ran == []


async def test_an_approval_handler_is_notified_when_another_client_answers_its_request(
    tmp_path: Path, kernel_in: Opens
) -> None:
    elsewhere = DeferringUser()
    async with kernel_in(tmp_path, tools=[pay]) as kernel:
        session = await kernel.session(approval_handler=elsewhere)
        asked = PendingRequests(session)
        call = start(session, source="a")
        await asked.times(1)
        while not elsewhere.requests:
            await asyncio.sleep(0)
        assert elsewhere.requests[0].id == one(kernel).id
        await kernel.approvals.decide(one(kernel).id, ONCE, by="test")
        assert (await call).ok and elsewhere.gone == 1


@pytest.mark.proves("X-13")
async def test_a_call_awaiting_approval_holds_no_locks_and_other_calls_run(tmp_path: Path, kernel_in: Opens) -> None:
    async with kernel_in(tmp_path, tools=[pay]) as kernel:
        session = await kernel.session(approval_handler=DeferringUser())
        free = await kernel.session(rules=["allow bank.pay"])
        asked = PendingRequests(session)
        call = start(session, source="a")
        await asked.times(1)
        assert (await free.call("bank.pay", {"source": "a", "amount": 2})).ok
        await kernel.approvals.decide(one(kernel).id, ONCE, by="test")
        assert (await call).ok
    assert ran == ["a:2", "a:1"]


@pytest.mark.proves("P-09")
async def test_a_user_may_change_the_arguments_of_a_call_and_rules_are_checked_again(
    tmp_path: Path, kernel_in: Opens
) -> None:
    async with kernel_in(tmp_path, tools=[pay], rules=["deny bank.pay source=b *"]) as kernel:
        session = await kernel.session(approval_handler=DeferringUser())
        asked = PendingRequests(session)
        call = start(session, source="a", amount=5)
        await asked.times(1)
        row = one(kernel)

        def changed(**arguments: Any) -> ApprovalAnswer:
            return ApprovalAnswer("once", arguments=arguments)

        decide = kernel.approvals.decide
        await refused(decide(row.id, changed(source="a", amount="5"), by="test"), "invalid_input", "amount")
        await refused(decide(row.id, changed(source="b", amount=5), by="test"), "denied", "deny bank.pay")
        await refused(
            decide(row.id, ApprovalAnswer("session", arguments={"source": "a"}), by="test"),
            "invalid_input",
            "Use once.",
        )
        decided = await decide(row.id, changed(source="a", amount=3), by="test")
        assert (await call).data == "paid 3 from a"
        records = list(kernel.log.reader.records(call=row.request.call_id))
        (authorised,) = [record.body for record in records if record.kind == "authorised"]
        assert authorised is not None and authorised["arguments_hash"] == row.request.arguments_hash
        assert authorised["changed_hash"] == decided.changed_arguments_hash != row.request.arguments_hash
        (responded,) = [record.body for record in records if record.kind == "approval-responded"]
        assert responded is not None and responded["changed"] == {"source": "a", "amount": 3}
    assert ran == ["a:3"]


@pytest.mark.proves("P-07", "P-08")
async def test_a_project_grant_applies_in_every_session_after_a_restart_until_it_is_revoked(
    tmp_path: Path, kernel_in: Opens
) -> None:
    async with kernel_in(tmp_path, tools=[pay]) as kernel:
        other = await kernel.session()
        session = await kernel.session(approval_handler=ScriptedApprovalHandler([ApprovalAnswer("project")]))
        assert (await session.call("bank.pay", {"source": "a*", "amount": 1})).ok
        assert (await other.call("bank.pay", {"source": "a*", "amount": 1})).ok
        assert (await other.call("bank.pay", {"source": "ab", "amount": 1})).error_kind == "denied"
    async with kernel_in(tmp_path, tools=[pay]) as kernel:
        (rule,) = kernel.approvals.list_rules()
        session = await kernel.session()
        assert (await session.call("bank.pay", {"source": "a*", "amount": 1})).ok
        assert (await session.call("bank.pay", {"source": "ab", "amount": 1})).error_kind == "denied"
        assert (await kernel.explain_call("bank.pay", {"source": "a*", "amount": 1})).action == "allow"
        await kernel.approvals.revoke_rule(rule.id)
        assert (await session.call("bank.pay", {"source": "a*", "amount": 1})).error_kind == "denied"
        await refused(kernel.approvals.revoke_rule(rule.id), "invalid_input", "--rules")
    async with kernel_in(tmp_path, tools=[pay]) as kernel:
        assert not kernel.approvals.list_rules()


@pytest.mark.proves("P-07")
async def test_a_reject_always_answer_denies_later_calls_in_every_session(tmp_path: Path, kernel_in: Opens) -> None:
    async with kernel_in(tmp_path, tools=[pay]) as kernel:
        person = ScriptedApprovalHandler([ApprovalAnswer("reject-always", "never from there")])
        session = await kernel.session(approval_handler=person)
        first = await session.call("bank.pay", {"source": "a", "amount": 1})
        assert first.error_kind == "denied" and "never from there" in (first.error_text or "")
        again = await session.call("bank.pay", {"source": "a", "amount": 1})
        assert again.error_kind == "denied" and len(person.requests) == 1
        assert (person.requests[0].suggested_deny or "none") in str(again.error_text)
    async with kernel_in(tmp_path, tools=[pay], rules=["allow bank.pay"]) as kernel:
        session = await kernel.session()
        assert (await session.call("bank.pay", {"source": "a", "amount": 1})).error_kind == "denied"
        assert (await session.call("bank.pay", {"source": "b", "amount": 1})).ok


@pytest.mark.proves("P-07")
async def test_an_approval_applies_only_to_the_tool_definition_that_was_shown(tmp_path: Path) -> None:
    @tool(id="bank.pay", side_effect="external", locks=["account:{source}:X"])
    async def pay_twice(source: str, amount: int = 1) -> str:
        """Pay twice the amount."""
        return await pay(source, 2 * amount)

    async with temporary_kernel(tmp_path, tools=[pay]) as kernel:
        session = await kernel.session(approval_handler=DeferringUser())
        asked = PendingRequests(session)
        call = start(session, source="a")
        await asked.times(1)
        await kernel.reload_tools(tools=[pay_twice])
        await kernel.approvals.decide(one(kernel).id, ONCE, by="test")
        result = await call
        assert result.error_kind == "conflict", result
        assert "has changed since this call was approved" in str(result.error_text)
        again = start(session, source="b")
        await asked.times(2)
        await kernel.approvals.decide(one(kernel).id, ONCE, by="test")
        assert (await again).ok, "a new call is of the new definition"
    assert ran == ["b:2"]


@pytest.mark.proves("P-07")
async def test_a_stop_answer_ends_the_work_of_one_session_only(tmp_path: Path, kernel_in: Opens) -> None:
    async with kernel_in(tmp_path, tools=[pay]) as kernel:
        session = await kernel.session(approval_handler=DeferringUser())
        other = await kernel.session(approval_handler=DeferringUser())
        asked, elsewhere = PendingRequests(session), PendingRequests(other)
        calls = [start(session, source=f"a{number}") for number in range(3)]
        spared = start(other, source="b")
        await asked.times(3)
        await elsewhere.times(1)
        rows = kernel.approvals.list_pending(session.id)
        await kernel.approvals.decide(rows[1].id, ApprovalAnswer("stop", "enough"), by="test")
        results = await asyncio.gather(*calls)
        assert {result.error_kind for result in results} == {"cancelled"}
        assert any("enough" in (result.error_text or "") for result in results)
        await kernel.log.flush()
        assert not kernel.approvals.list_pending(session.id)
        with pytest.raises(UsageError, match="stopped by the user"):
            await session.call("bank.pay", {"source": "c"})
        await kernel.approvals.decide(one(kernel).id, ONCE, by="test")
        assert (await spared).ok
    assert ran == ["b:1"]


@pytest.mark.proves("P-09", "X-13")
async def test_a_call_that_waits_at_shutdown_is_suspended_and_runs_once_when_approved(
    tmp_path: Path,
    kernel_in: Opens,
) -> None:
    async with kernel_in(tmp_path, tools=[pay]) as kernel:
        session = await kernel.session(approval_handler=DeferringUser())
        asked = PendingRequests(session)
        call = start(session, source="a")
        await asked.times(1)
        row = one(kernel)
    result = await call
    assert result.error_kind == "unavailable" and result.metadata["awaiting_approval"] == row.id
    async with kernel_in(tmp_path, tools=[pay]) as kernel:
        (logged,) = kernel.log.reader.calls()
        assert logged.state == "suspended" and not kernel.interrupted_calls
        await kernel.approvals.decide(row.id, ONCE, by="days later")
        assert ran == []  # answering runs nothing
        session = await kernel.session(session.id)
        (answer,) = await session.resume_suspended_calls()
        assert answer.call_id == row.request.call_id and answer.result.data == "paid 1 from a"
        assert await session.resume_suspended_calls() == []
        assert (await session.recover_result(row.request.call_id)).result.data == "paid 1 from a"
        assert kernel.approvals.get(row.id).state == "used"
    assert ran == ["a:1"]


@pytest.mark.proves("P-09")
async def test_suspended_calls_resume_with_their_own_decisions(tmp_path: Path, kernel_in: Opens) -> None:
    async with kernel_in(tmp_path, tools=[pay]) as kernel:
        session = await kernel.session(approval_handler=DeferApprovals())
        results = await session.call_all([("bank.pay", {"source": f"a{number}"}) for number in range(4)])
        ids = [str(result.metadata["awaiting_approval"]) for result in results]
        assert [row.id for row in kernel.approvals.list_pending()] == ids
        decide = kernel.approvals.decide
        await decide(ids[0], ApprovalAnswer("reject", "no"), by="test")
        await decide(ids[2], ApprovalAnswer("once", arguments={"source": "a2", "amount": 9}), by="test")
    async with kernel_in(tmp_path, tools=[pay]) as kernel:
        session = await kernel.session(session.id, approval_handler=DeferApprovals())
        answers = [answer.result for answer in await session.resume_suspended_calls()]
        assert answers[0].error_kind == "denied" and answers[2].data == "paid 9 from a2"
        assert [answers[number].metadata.get("awaiting_approval") for number in (1, 3)] == [ids[1], ids[3]]
        await kernel.approvals.decide(ids[3], ONCE, by="test")
        answers = [answer.result for answer in await session.resume_suspended_calls()]
        assert answers[0].metadata["awaiting_approval"] == ids[1] and answers[1].data == "paid 1 from a3"
    assert ran == ["a2:9", "a3:1"]


@pytest.mark.proves("P-09")
async def test_a_grant_overrides_an_ask_but_never_a_deny(tmp_path: Path, kernel_in: Opens) -> None:
    async with kernel_in(tmp_path, tools=[pay]) as kernel:
        session = await kernel.session(approval_handler=DeferApprovals())
        result = await session.call("bank.pay", {"source": "a"})
        await kernel.approvals.decide(str(result.metadata["awaiting_approval"]), ONCE, by="test")
    async with kernel_in(tmp_path, tools=[pay], rules=["deny bank.pay"]) as kernel:
        session = await kernel.session(session.id, approval_handler=DeferApprovals())
        (answer,) = await session.resume_suspended_calls()
        assert answer.result.error_kind == "denied" and "deny bank.pay" in (answer.result.error_text or "")
        await kernel.log.flush()
        assert kernel.approvals.get(str(result.metadata["awaiting_approval"])).state == "withdrawn"
    async with kernel_in(tmp_path, tools=[pay]) as kernel:
        assert (
            await (await kernel.session(session.id, approval_handler=DeferApprovals())).resume_suspended_calls() == []
        )
    assert ran == []


def other_pay() -> Tool:
    @tool(id="bank.pay", side_effect="external")
    async def changed(source: str, amount: int = 1) -> str:
        """Pay, in another way."""
        ran.append("changed")
        return "changed"

    return changed


@pytest.mark.proves("P-09")
async def test_a_call_resumed_after_its_tool_definition_changed_is_refused(tmp_path: Path, kernel_in: Opens) -> None:
    async with kernel_in(tmp_path, tools=[pay]) as kernel:
        session = await kernel.session(approval_handler=DeferApprovals())
        result = await session.call("bank.pay", {"source": "a"})
        await kernel.approvals.decide(str(result.metadata["awaiting_approval"]), ONCE, by="test")
    async with kernel_in(tmp_path, tools=[other_pay()]) as kernel:
        session = await kernel.session(session.id, approval_handler=DeferApprovals())
        (answer,) = await session.resume_suspended_calls()
        assert answer.result.error_kind == "conflict" and "The definition of" in (answer.result.error_text or "")
    assert ran == []


@pytest.mark.proves("P-09")
async def test_a_call_whose_tool_definition_changes_before_the_approval_is_refused(
    tmp_path: Path, kernel_in: Opens
) -> None:
    async with kernel_in(tmp_path, tools=[pay]) as kernel:
        session = await kernel.session(approval_handler=DeferringUser())
        asked = PendingRequests(session)
        call = start(session, source="a")
        await asked.times(1)
        await kernel.reload_tools([other_pay()])
        await kernel.approvals.decide(one(kernel).id, ONCE, by="test")
        assert (await call).error_kind == "conflict"
    assert ran == []


async def test_arguments_with_a_secret_are_not_stored_and_their_call_is_not_resumed(
    tmp_path: Path, kernel_in: Opens
) -> None:
    secrets: Mapping[str, str] = {"key": "hunter2-hunter2"}
    async with kernel_in(tmp_path, tools=[pay], secrets=secrets) as kernel:
        session = await kernel.session(approval_handler=DeferApprovals())
        result = await session.call("bank.pay", {"source": "hunter2-hunter2"})
        approval = str(result.metadata["awaiting_approval"])
        assert kernel.approvals.get(approval).request.arguments == {"source": "[secret:key]"}
        secret = ApprovalAnswer("once", arguments={"source": "x hunter2-hunter2"})
        await refused(kernel.approvals.decide(approval, secret, by="test"), "invalid_input", "secret")
        await kernel.approvals.decide(approval, ONCE, by="test")
        (answer,) = await session.resume_suspended_calls()
        assert answer.result.error_kind == "conflict" and "secret" in (answer.result.error_text or "")
    assert ran == []
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or b"hunter2-hunter2" not in file.read_bytes()


@pytest.mark.proves("P-09")
async def test_a_cancelled_call_can_no_longer_be_approved(tmp_path: Path, kernel_in: Opens) -> None:
    async with kernel_in(tmp_path, tools=[pay]) as kernel:
        session = await kernel.session(approval_handler=DeferringUser())
        asked = PendingRequests(session)
        call = start(session, source="a")
        await asked.times(1)
        row = one(kernel)
        session.cancel_running_calls()
        assert (await call).error_kind == "cancelled"
        await refused(kernel.approvals.decide(row.id, ONCE, by="test"), "conflict", "was withdrawn")
        await kernel.log.flush()
        assert not kernel.approvals.list_pending() and await session.resume_suspended_calls() == []
    assert ran == []


async def test_closing_a_session_withdraws_its_approval_requests(tmp_path: Path, kernel_in: Opens) -> None:
    async with kernel_in(tmp_path, tools=[pay]) as kernel:
        session = await kernel.session(approval_handler=DeferApprovals())
        approval = str((await session.call("bank.pay", {"source": "a"})).metadata["awaiting_approval"])
        await session.close()
        await refused(kernel.approvals.decide(approval, ONCE, by="test"), "conflict", "was withdrawn")
        await kernel.log.flush()
        assert [row.state for row in kernel.log.reader.calls()] == ["rejected"]


@pytest.mark.proves("P-09", "A-05")
async def test_a_suspended_question_is_answered_later_with_one_list_for_each_question(
    tmp_path: Path, kernel_in: Opens
) -> None:
    asked = {"questions": [{"question": "Which?", "options": [{"label": "x"}, {"label": "y"}]}, {"question": "Why?"}]}
    async with kernel_in(tmp_path) as kernel:
        session = await kernel.session(approval_handler=DeferApprovals())
        result = await session.call("question", asked)
        approval = str(result.metadata["awaiting_approval"])
        row = kernel.approvals.get(approval)
        assert row.kind == "question" and [question.question for question in row.questions] == ["Which?", "Why?"]
        await refused(kernel.approvals.decide(approval, ONCE, by="test"), "invalid_input", "asks a question")
        await refused(kernel.approvals.answer_questions(approval, [["x"]], by="test"), "invalid_input", "2 questions")
    async with kernel_in(tmp_path) as kernel:
        assert not kernel.interrupted_calls
        await kernel.approvals.answer_questions(approval, [["x"], ["because"]], by="test")
        await refused(kernel.approvals.answer_questions(approval, [["y"], [""]], by="test"), "conflict")
        session = await kernel.session(session.id)
        (answer,) = await session.resume_suspended_calls()
        assert answer.result.data == {"answers": [["x"], ["because"]]}


@pytest.mark.proves("A-05")
async def test_a_question_can_be_answered_elsewhere_while_its_call_waits(tmp_path: Path, kernel_in: Opens) -> None:
    async with kernel_in(tmp_path) as kernel:
        session = await kernel.session(approval_handler=DeferringUser())
        asked = PendingRequests(session)
        call = asyncio.create_task(session.call("question", {"questions": [{"question": "Which?"}]}))
        await asked.times(1)
        await kernel.approvals.answer_questions(one(kernel).id, [["this"]], by="test")
        assert (await call).data == {"answers": [["this"]]}
        declined = asyncio.create_task(session.call("question", {"questions": [{"question": "Why?"}]}))
        await asked.times(2)
        await kernel.approvals.decide(one(kernel).id, ApprovalAnswer("reject", "not now"), by="test")
        assert (await declined).error_text == "The user did not answer: not now"


async def test_approval_rows_survive_serialisation_to_plain_data(tmp_path: Path, kernel_in: Opens) -> None:
    async with kernel_in(tmp_path, tools=[pay]) as kernel:
        session = await kernel.session(approval_handler=DeferApprovals())
        await session.call("bank.pay", {"source": "a\x1b[2J"})
        await session.call("question", {"questions": [{"question": "Which?", "options": [{"label": "x"}]}]})
        for row in kernel.approvals.list_pending():
            assert (
                reader_of(Approval)(decode_json_with_fallback(encode_json_with_fallback(write(Approval, row)))) == row
            )
            assert json.loads(json.dumps(row.to_dict()))["id"] == row.id


async def test_a_revoked_rule_stays_revoked_after_its_approved_call_resumes(tmp_path: Path, kernel_in: Opens) -> None:
    async with kernel_in(tmp_path, tools=[pay]) as kernel:
        session = await kernel.session(approval_handler=DeferApprovals())
        await session.call("bank.pay", {"source": "a"})
        (row,) = kernel.approvals.list_pending()
        await session.suspend()
        await kernel.approvals.decide(row.id, ApprovalAnswer("project"), by="test")
        (rule,) = kernel.approvals.list_rules()
        await kernel.approvals.revoke_rule(rule.id)
        session = await kernel.session(session.id, approval_handler=DeferApprovals())
        (answer,) = await session.resume_suspended_calls()
        assert answer.result.ok and ran == ["a:1"]
        again = await session.call("bank.pay", {"source": "a"})
        assert again.error_kind == "unavailable" and ran == ["a:1"]


async def test_a_stop_answer_for_a_suspended_session_applies_when_it_reopens(tmp_path: Path, kernel_in: Opens) -> None:
    async with kernel_in(tmp_path, tools=[pay]) as kernel:
        session = await kernel.session(approval_handler=DeferApprovals())
        await session.call("bank.pay", {"source": "a"})
        (row,) = kernel.approvals.list_pending()
        await session.suspend()
        await kernel.approvals.decide(row.id, ApprovalAnswer("stop"), by="test")
        session = await kernel.session(session.id, rules=["allow bank.pay"], approval_handler=DeferApprovals())
        (answer,) = await session.resume_suspended_calls()
        assert answer.result.error_kind == "cancelled"
        with pytest.raises(UsageError, match="was stopped by the user"):
            await session.call("bank.pay", {"source": "b"})
        assert ran == []
