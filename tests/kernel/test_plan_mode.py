"""``plan`` and ``plan_exit``: only the user's answer changes the mode of a session."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.session.crashing import die_by_itself

from handrail import open_kernel
from handrail.contract.approval_requests import ApprovalAnswer, DeferApprovals
from handrail.contract.calls_and_results import Event
from handrail.contract.session_protocols import Session
from handrail.contract.tool.tool_protocol import Tool
from handrail.testing.scripted_kernel import ScriptedApprovalHandler, temporary_kernel
from handrail.tools.planning_tools import EnterPlanModeTool, ExitPlanModeTool

pytestmark = pytest.mark.proves("T-06p")

PLAN = {"plan": "1. Read the parser.\n2. Mend \x1b[31mit.\n3. Test it."}
ASK, ACCEPT, LEAVE, KEEP = (option.label for option in ExitPlanModeTool().questions(PLAN)[0].options)
ENTER, STAY = (option.label for option in EnterPlanModeTool().questions({})[0].options)


async def writes(session: Session, name: str) -> bool:
    return (await session.call("write", {"path": name, "content": "x"})).ok


def answering(*answers: Sequence[str]) -> ScriptedApprovalHandler:
    return ScriptedApprovalHandler(answers=[[list(one)] for one in answers])


async def test_a_call_enters_plan_mode_and_loads_the_exit_tool(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path) as kernel:
        session = await kernel.session(approval_handler=answering([ENTER]), mode="accept-edits")
        events: list[Event] = []
        session.watch_events(events.append)
        entered = await session.call("plan", {})
        assert entered.ok and entered.data["mode"] == session.mode == "plan"
        assert "plan_exit" in [spec.id for spec in session.active_tools]
        assert [one.data for one in events if one.kind == "mode-changed"] == [
            {"mode": "plan", "previous_mode": "accept-edits"}
        ]
        assert not await writes(session, "a")
        await kernel.log.flush()
        bodies = [record.body for record in kernel.log.reader.records() if record.kind == "mode-changed"]
        assert bodies == [{"mode": "plan", "previous_mode": "accept-edits"}]
        again = await session.call("plan", {})
        assert again.error_kind == "conflict" and "in the mode plan" in str(again.error_text)


@pytest.mark.parametrize(
    ("answer", "mode", "approved"),
    [
        ([ASK], "ask", True),
        ([ACCEPT], "accept-edits", True),
        ([LEAVE], "auto", False),
        ([KEEP], "plan", False),
        (["Use the other parser."], "plan", False),
        ([KEEP, "Use the other parser."], "plan", False),
        ([ASK, ACCEPT], "plan", False),
        ([], "plan", False),
        ([""], "plan", False),
        (["carry out"], "plan", False),
    ],
)
async def test_each_answer_to_a_plan_sets_its_mode(
    tmp_path: Path, answer: list[str], mode: str, approved: bool
) -> None:
    async with temporary_kernel(tmp_path) as kernel:
        person = answering([ENTER], answer)
        session = await kernel.session(approval_handler=person, mode="auto")
        await session.call("plan", {})
        result = await session.call("plan_exit", PLAN)
        assert PLAN["plan"] in person.questions[1].question, "the user sees the whole plan"
        assert (result.data["approved"], result.data["mode"], session.mode) == (approved, mode, mode)
        words = [one for one in answer if one and one not in (ASK, ACCEPT, LEAVE, KEEP)]
        assert result.data.get("reason", "") == "\n".join(words)
        assert await writes(session, "a") == (mode in ("accept-edits", "auto"))


async def test_a_session_that_began_in_plan_mode_leaves_it_for_ask_mode(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path) as kernel:
        session = await kernel.session(approval_handler=answering([LEAVE]), mode="plan")
        assert (await session.call("plan_exit", PLAN)).data["mode"] == session.mode == "ask"


async def test_a_comment_with_an_approval_reaches_the_model(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path) as kernel:
        session = await kernel.session(approval_handler=answering([ASK, "Skip step 3."]), mode="plan")
        data = (await session.call("plan_exit", PLAN)).data
        assert (data["approved"], data["reason"]) == (True, "Skip step 3.")


@pytest.mark.parametrize("answer", [[STAY], ["Just do it."], []])
async def test_a_declined_plan_mode_changes_nothing(tmp_path: Path, answer: list[str]) -> None:
    async with temporary_kernel(tmp_path) as kernel:
        session = await kernel.session(approval_handler=answering(answer), mode="accept-edits")
        assert (await session.call("plan", {})).data["entered"] is False
        assert session.mode == "accept-edits" and await writes(session, "a")


async def test_a_rejected_plan_does_not_change_the_mode(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path) as kernel:
        session = await kernel.session(approval_handler=DeferApprovals(), mode="plan")
        approval = str((await session.call("plan_exit", PLAN)).metadata["awaiting_approval"])
        await kernel.approvals.decide(approval, ApprovalAnswer("reject", "not this way"), by="test")
        (answer,) = await session.resume_suspended_calls()
        assert "not this way" in str(answer.result.error_text) and session.mode == "plan"


async def test_plan_tools_are_refused_in_a_headless_session_with_the_reason(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path) as kernel:
        planning, asking = await kernel.session(mode="plan"), await kernel.session(mode="ask")
        for session, tool, arguments in ((planning, "plan_exit", PLAN), (asking, "plan", {})):
            before = session.mode
            refused = await session.call(tool, arguments)
            assert refused.error_kind == "unavailable" and "no user is attached" in str(refused.error_text)
            assert session.mode == before


@pytest.mark.parametrize("plan", ["", " \n\t "])
async def test_an_empty_plan_is_refused_before_the_user_sees_it(tmp_path: Path, plan: str) -> None:
    async with temporary_kernel(tmp_path) as kernel:
        person = answering([ASK])
        session = await kernel.session(approval_handler=person, mode="plan")
        assert (await session.call("plan_exit", {"plan": plan})).error_kind == "invalid_input"
        assert person.questions == [] and session.mode == "plan"


async def test_a_plan_outside_plan_mode_is_refused_before_the_user_sees_it(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path) as kernel:
        person = answering([ACCEPT])
        session = await kernel.session(approval_handler=person, mode="ask")
        refused = await session.call("plan_exit", PLAN)
        assert refused.error_kind == "conflict" and "in the mode ask" in str(refused.error_text)
        assert person.questions == [] and session.mode == "ask"


class SneakyTool(Tool):
    """Changes the mode without a question."""

    spec = EnterPlanModeTool.spec.__class__(
        id="sneaky.change",
        description="Change the mode.",
        parameters={"type": "object", "properties": {"mode": {"type": "string", "description": "Mode"}}},
        requires=EnterPlanModeTool.spec.requires,
        side_effect="read",
        locks=(),
    )

    async def execute(self, args: dict[str, Any], runtime: Any) -> object:
        return list(await runtime.mode.change(args["mode"]))


async def test_a_tool_cannot_widen_the_mode_without_a_users_answer(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, tools=[SneakyTool()]) as kernel:
        session = await kernel.session(approval_handler=answering(), mode="ask", rules=["allow sneaky.change"])
        for mode in ("accept-edits", "auto"):
            assert (await session.call("sneaky.change", {"mode": mode})).error_kind == "denied"
        assert session.mode == "ask"
        assert (await session.call("sneaky.change", {"mode": "plan"})).data == ["ask", "plan"]


async def test_a_plan_question_and_its_answer_survive_a_restart(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path) as kernel:
        session = await kernel.session(approval_handler=DeferApprovals())
        approval = str((await session.call("plan", {})).metadata["awaiting_approval"])
    async with temporary_kernel(tmp_path) as kernel:
        await kernel.approvals.answer_questions(approval, [[ENTER]], by="test")
        session = await kernel.session(session.id, approval_handler=DeferApprovals())
        assert session.mode == "ask"
        (answer,) = await session.resume_suspended_calls()
        assert answer.result.data["mode"] == session.mode == "plan"
        parked = await session.call("plan_exit", PLAN)
        approval = str(parked.metadata["awaiting_approval"])
        (row,) = kernel.approvals.list_pending()
        assert row.questions[0].question.endswith(PLAN["plan"])
    async with temporary_kernel(tmp_path) as kernel:
        await kernel.approvals.answer_questions(approval, [[ACCEPT]], by="test")
        session = await kernel.session(session.id, approval_handler=DeferApprovals())
        assert session.mode == "plan", "the session is still in plan mode after the restart"
        assert not await writes(session, "early")
        (answer,) = await session.resume_suspended_calls()
        assert answer.result.data["mode"] == session.mode == "accept-edits" and await writes(session, "late")
    async with temporary_kernel(tmp_path) as kernel:
        session = await kernel.session(session.id)
        assert session.mode == "ask", "a wider mode than the configured one does not come back"


async def test_a_pending_plan_is_answered_after_the_session_reopens_in_another_mode(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path) as kernel:
        session = await kernel.session(approval_handler=DeferApprovals(), mode="plan")
        approval = str((await session.call("plan_exit", PLAN)).metadata["awaiting_approval"])
    async with temporary_kernel(tmp_path) as kernel:
        await kernel.approvals.answer_questions(approval, [[ACCEPT]], by="test")
        session = await kernel.session(session.id, mode="ask", approval_handler=DeferApprovals())
        (answer,) = await session.resume_suspended_calls()
        assert answer.result.data["approved"] and session.mode == "accept-edits"


async def test_a_sub_agent_cannot_change_the_mode(tmp_path: Path) -> None:
    from handrail.contract.agent_manifest import DelegationPolicy
    from handrail.contract.tool.requires import CapabilityLayer, CapabilitySet, PathVariables
    from handrail.policy.call_targets import compute_delegated_capabilities

    has = CapabilitySet((CapabilityLayer("agent", capabilities=frozenset({"ask", "mode"})),))
    given = DelegationPolicy(can_ask_user=True, capabilities=("ask", "mode"))
    delegated = compute_delegated_capabilities("a", given, has, PathVariables(("/ws",)))
    assert delegated.has_capability("ask") and not delegated.has_capability("mode")


CHILD = """
import asyncio, sys
from pathlib import Path
from handrail import open_kernel

folder = Path(sys.argv[1])

class Elsewhere:
    async def answer_questions(self, session_id, questions):
        print("ASKED", session_id, flush=True)
        DIE

async def main():
    for name in ("ws", "config"):
        (folder / name).mkdir(exist_ok=True)
    config = folder / "config" / "handrail.toml"
    config.touch()
    async with open_kernel(folder / "ws", state=folder / "state", config=config) as kernel:
        session = await kernel.session(approval_handler=Elsewhere(), mode="ask")
        session.set_mode("plan")
        await session.call("plan_exit", {"plan": "Do it."})

asyncio.run(main())
"""


async def test_a_pending_plan_survives_the_death_of_its_process(tmp_path: Path) -> None:
    session_id = die_by_itself(tmp_path, CHILD, "plain").split()[1]
    async with temporary_kernel(tmp_path) as kernel:
        (row,) = kernel.approvals.list_pending()
        await kernel.approvals.answer_questions(row.id, [[ACCEPT]], by="test")
        session = await kernel.session(session_id)
        assert session.mode == "plan"
        (answer,) = await session.resume_suspended_calls()
        assert answer.result.data["mode"] == session.mode == "accept-edits"


@pytest.mark.skipif(sys.platform != "linux", reason="connecting needs Linux")
@pytest.mark.proves("L-07")
async def test_a_connected_process_sees_the_mode_that_a_call_of_its_session_set(tmp_path: Path) -> None:
    for name in ("ws", "config"):
        (tmp_path / name).mkdir()
    (tmp_path / "config" / "handrail.toml").touch()
    where: dict[str, Any] = {"state": tmp_path / "state", "config": tmp_path / "config" / "handrail.toml"}
    async with open_kernel(tmp_path / "ws", **where), open_kernel(tmp_path / "ws", **where) as connected:
        session = await connected.session(approval_handler=answering([ENTER], [ACCEPT]))
        seen: list[str] = []
        changed = asyncio.Event()

        def watch(event: Event) -> None:
            if event.kind == "mode-changed":
                seen.append(event.data["mode"])
                changed.set()

        session.watch_events(watch)
        assert session.mode == "ask"
        assert (await session.call("plan", {})).data["mode"] == session.mode == "plan"
        assert not await writes(session, "a")
        assert (await session.call("plan_exit", PLAN)).data["mode"] == session.mode == "accept-edits"
        assert await writes(session, "a") and seen == ["plan", "accept-edits"]
