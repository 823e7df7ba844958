"""The life cycle of a call: one answer, in order, recorded, also after each kind of failure."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from tests.arbiter.toolbox import ALLOW, TOOLS, gate, kinds_of

from handrail import ApprovalAnswer, Event, Kernel, Result, Runtime, Session, Tool, ToolSpec, UsageError, tool
from handrail.contract.calls_and_results import ProposedCall
from handrail.runtime.files.session_roots import resolve_canonical_path
from handrail.testing.scripted_kernel import ScriptedApprovalHandler, temporary_kernel


@pytest.mark.proves("L-01", "K-07", "X-01")
async def test_a_call_returns_a_result_and_each_of_its_steps_is_recorded(kernel: Kernel, session: Session) -> None:
    result = await session.call("test.add", {"a": 1, "b": 2})
    assert (result.type, result.data) == ("output", 3)
    assert result.metadata["duration_ms"] >= 0
    assert result.metadata["sandbox"] == "runtime"
    assert await kinds_of(kernel, f"{session.id}/1.0") == ["proposed", "authorised", "intended", "committed"]


@pytest.mark.proves("K-05", "L-01")
async def test_invalid_arguments_give_an_error_with_all_problems_and_a_record(kernel: Kernel, session: Session) -> None:
    result = await session.call("test.add", {"a": "one", "c": 2})
    assert result.error_kind == "invalid_input"
    assert result.error_text is not None
    assert all(word in result.error_text for word in ("`a`:", "`b`", "`c`", "string", "integer"))
    assert await kinds_of(kernel, f"{session.id}/1.0") == ["proposed", "rejected"]


async def test_the_error_for_an_unknown_tool_names_only_similar_tools(session: Session) -> None:
    result = await session.call("test.ad", {})
    assert result.error_kind == "unknown_tool"
    assert result.error_text is not None and "test.add" in result.error_text
    assert "bash" not in result.error_text


@pytest.mark.proves("K-05")
@pytest.mark.parametrize(
    ("text", "word"),
    [
        ('{"a": 1', "JSON"),
        ('{"a": 1, "a": 2, "b": 3}', "duplicate keys"),
        ('{"a": NaN, "b": 1}', "NaN"),
        ("[" * 10_000, "deeper"),
        ('{"a": ' + "[" * 10_000 + "]" * 10_000 + "}", "deeper"),
        ("[1, 2]", "object"),
    ],
)
async def test_argument_text_that_is_not_a_json_object_is_an_input_error(
    session: Session, text: str, word: str
) -> None:
    result = await session.call("test.add", text)
    assert result.error_kind == "invalid_input"
    assert result.error_text is not None and word in result.error_text


async def test_a_hundred_megabytes_of_arguments_are_refused_by_size(session: Session) -> None:
    result = await session.call("test.add", '{"a": "' + "x" * 100_000_000 + '"}')
    assert result.error_kind == "invalid_input"
    assert result.error_text is not None and "bytes" in result.error_text


@pytest.mark.proves("L-06", "L-05")
async def test_calls_of_one_reply_are_answered_in_order_and_run_together_where_locks_allow(session: Session) -> None:
    replies = asyncio.create_task(
        session.call_all([("test.hold", {"name": "first"}), ("test.glance", {}), ("test.look", {})])
    )
    await gate.entered.wait()
    while "glance" not in gate.ran:  # ran while the first call still holds the notes
        await asyncio.sleep(0)
    assert "look" not in gate.ran  # conflicts with the first call
    gate.open.set()
    assert [result.data for result in await replies] == ["first", "glanced", "looked"]
    assert gate.ran[-1] == "look"


@pytest.mark.proves("L-05", "L-06")
async def test_an_open_approval_request_delays_later_side_effects_but_no_unrelated_read(tmp_path: Path) -> None:
    person = ScriptedApprovalHandler([ApprovalAnswer("once")])
    person.may_answer.clear()
    rules = [*ALLOW, "ask test.note text=asked"]
    async with temporary_kernel(tmp_path, tools=TOOLS, rules=rules) as kernel:
        session = await kernel.session(approval_handler=person)
        replies = asyncio.create_task(
            session.call_all([("test.note", {"text": "asked"}), ("test.note", {"text": "later"}), ("test.glance", {})])
        )
        await person.request_received.wait()
        while "glance" not in gate.ran:
            await asyncio.sleep(0)
        assert gate.ran == ["glance"]
        person.may_answer.set()
        assert [result.ok for result in await replies] == [True, True, True]
        assert gate.ran == ["glance", "asked", "later"]


@pytest.mark.proves("K-07")
async def test_a_tool_failure_and_an_exception_both_give_results_without_a_traceback(session: Session) -> None:
    own = await session.call("test.fail", {"how": "tool"})
    assert (own.error_kind, own.data) == ("failed", {"pages": 3})
    defect = await session.call("test.fail", {"how": "defect"})
    assert defect.error_kind == "backend"
    assert defect.error_text is not None and "boom in the tool" in defect.error_text
    assert "Traceback" not in defect.error_text


async def test_a_tool_without_async_or_await_gets_an_error_that_names_the_fix(tmp_path: Path) -> None:
    class Plain(Tool):
        spec = ToolSpec("test.plain", "Give one at once.", side_effect="read", locks=())

        def execute(self, args: dict[str, Any], runtime: Runtime) -> Any:
            return 1

    class Apart(Plain):
        spec = replace(Plain.spec, id="test.apart", side_effect="write")

    @tool(id="test.forgot", side_effect="read", locks=[])
    async def forgot() -> object:
        """Forget to wait."""
        return asyncio.sleep(0)

    async with temporary_kernel(tmp_path, tools=[Plain(), Apart(), forgot], rules=["allow test.*"]) as kernel:
        session = await kernel.session()
        for name in ("test.plain", "test.apart"):
            said = (await session.call(name, {})).error_text
            assert (
                said is not None and "its `execute` returned int instead of a coroutine" in said and "async def" in said
            )
        said = (await session.call("test.forgot", {})).error_text
        assert (
            said
            == "test.forgot returned a coroutine of sleep that was not awaited. Ask the user to add await to the tool."
        )


@pytest.mark.proves("P-10")
async def test_a_headless_session_denies_an_ask_decision_with_the_reason(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, tools=TOOLS) as kernel:
        session = await kernel.session()
        result = await session.call("test.note", {"text": "x"})
        assert result.error_kind == "denied"
        assert result.error_text is not None and "This session has no user to ask" in result.error_text
        assert gate.ran == []


@pytest.mark.proves("X-13")
async def test_an_approval_request_has_the_whole_arguments_and_holds_no_locks(tmp_path: Path) -> None:
    person = ScriptedApprovalHandler([ApprovalAnswer("once"), ApprovalAnswer("reject", "not today")])
    person.may_answer.clear()
    text = "x" * 5_000
    async with temporary_kernel(tmp_path, tools=TOOLS) as kernel:
        session = await kernel.session(approval_handler=person, rules=["allow test.hold"])
        waiting = asyncio.create_task(session.call("test.note", {"text": text}))
        await person.request_received.wait()
        gate.open.set()
        assert (await session.call("test.hold", {"name": "same lock"})).ok  # nobody holds locks while a person thinks
        person.may_answer.set()
        assert (await waiting).ok
        assert person.requests[0].arguments == {"text": text}
        rejected = await session.call("test.note", {"text": "again"})
        assert rejected.error_kind == "denied"
        assert rejected.error_text is not None and "not today" in rejected.error_text


async def test_a_session_approval_stores_the_shown_rule_and_the_user_is_not_asked_again(tmp_path: Path) -> None:
    person = ScriptedApprovalHandler([ApprovalAnswer("session")])
    async with temporary_kernel(tmp_path, tools=TOOLS) as kernel:
        session = await kernel.session(approval_handler=person)
        assert (await session.call("test.note", {"text": "a*b"})).ok
        assert (await session.call("test.note", {"text": "a*b"})).ok
        assert len(person.requests) == 1
        assert not (await session.call("test.note", {"text": "aXb"})).ok  # the literal star did not become a wildcard
        other = await kernel.session()
        assert (await other.call("test.note", {"text": "a*b"})).error_kind == "denied"


@pytest.mark.proves("L-08")
async def test_a_nested_call_runs_under_its_callers_locks_and_cannot_widen_them(session: Session) -> None:
    inside = await session.call("test.outer", {"inner": "test.note"})
    assert inside.ok and inside.data["data"] == {"noted": "from inside"}
    wider = await session.call("test.outer", {"inner": "test.glance"})
    assert wider.ok and wider.data["metadata"]["error_kind"] == "conflict"


@pytest.mark.proves("L-10")
async def test_a_repeated_idempotency_key_returns_the_recorded_result_or_conflicts_with_other_arguments(
    tmp_path: Path,
) -> None:
    async with temporary_kernel(tmp_path, tools=TOOLS, rules=ALLOW) as kernel:
        session = await kernel.session("ses_known")
        first = await session.call("test.note", {"text": "once"}, key="k1")
        again = await session.call("test.note", {"text": "once"}, key="k1")
        other = await session.call("test.note", {"text": "twice"}, key="k1")
        assert first.ok and again.data == first.data and again.metadata["replayed"] is True
        assert other.error_kind == "conflict"
    async with temporary_kernel(tmp_path, tools=TOOLS, rules=ALLOW) as kernel:
        session = await kernel.session("ses_known")
        assert (await session.call("test.note", {"text": "once"}, key="k1")).metadata["replayed"] is True
    assert gate.ran == ["once"]


@pytest.mark.proves("L-10")
async def test_two_calls_with_the_same_provider_id_get_two_answers(kernel: Kernel, session: Session) -> None:
    same = [
        ProposedCall("test.add", '{"a": 1, "b": 1}', "call_1"),
        ProposedCall("test.add", '{"a": 2, "b": 2}', "call_1"),
    ]
    answers = await session.start_turn().call_all(same)
    assert [answer.result.data for answer in answers] == [2, 4]
    assert len({answer.call_id for answer in answers}) == 2
    await kernel.log.flush()
    proposals = list(kernel.log.reader.records(session=session.id, kind="proposed"))
    assert [(record.body or {}).get("provider_id") for record in proposals] == ["call_1", "call_1"]


async def test_an_invalid_proposal_is_recorded_and_answered(kernel: Kernel, session: Session) -> None:
    broken = ProposedCall("test.add", '{"a": 1', problem="the stream broke off inside this call")
    nameless = ProposedCall("", "{}")
    answers = await session.start_turn().call_all([broken, nameless])
    assert [answer.result.error_kind for answer in answers] == ["invalid_input", "unknown_tool"]
    assert await kinds_of(kernel, answers[0].call_id) == ["proposed", "rejected"]


async def test_a_rule_added_while_a_call_waits_for_locks_applies_to_it(kernel: Kernel, session: Session) -> None:
    holding = asyncio.create_task(session.call("test.hold", {"name": "x"}))
    await gate.entered.wait()
    events: list[Event] = []
    session.watch_events(events.append)
    waiting = asyncio.create_task(session.call("test.note", {"text": "too late"}))
    while not any(event.kind == "awaiting-locks" for event in events):
        await asyncio.sleep(0)
    session.add_rules("deny test.note")
    gate.open.set()
    await holding
    result = await waiting
    assert result.error_kind == "denied"
    assert gate.ran == ["x"]


async def test_a_session_emits_events_for_each_stage_of_a_call(session: Session) -> None:
    seen: list[Event] = []
    session.watch_events(seen.append)
    assert (await session.call("test.add", {"a": 1, "b": 2})).ok
    assert [event.kind for event in seen] == ["proposed", "started", "finished"]


def test_a_result_survives_conversion_to_a_dict() -> None:
    assert Result.from_dict(Result.error("failed", "x", {"a": 1}).to_dict()).data == {"a": 1}


async def test_a_malformed_list_of_calls_raises_a_usage_error(session: Session) -> None:
    unfit: Any = [("test.add", {"a": 1, "b": 2}), ("test.add",)]
    with pytest.raises(UsageError, match="Expected"):
        await session.call_all(unfit)


async def test_a_path_is_resolved_once_for_locks_and_rules_and_again_when_opened(tmp_path: Path) -> None:
    found: list[str] = []

    def heard(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code is resolve_canonical_path.__code__:
            found.append(frame.f_locals["path"])

    async with temporary_kernel(tmp_path) as kernel:
        session = await kernel.session(headless=True)
        workspace = kernel.workdir
        Path(workspace, "a.txt").write_text("here\n")
        assert (await session.call("read", {"path": "a.txt"})).ok
        sys.setprofile(heard)
        try:
            assert (await session.call("read", {"path": "a.txt"})).ok
        finally:
            sys.setprofile(None)
    assert found == [f"{workspace}/a.txt"] * 2, "once for its locks and the rules, once at the door"


async def test_a_path_is_resolved_again_after_the_approval(tmp_path: Path) -> None:
    person = ScriptedApprovalHandler([ApprovalAnswer("once")])
    person.may_answer.clear()
    async with temporary_kernel(tmp_path, rules=("ask fs.write",)) as kernel:
        workspace = Path(kernel.workdir)
        for name in ("open", "closed"):
            (workspace / name).mkdir()
        (workspace / "out").symlink_to("open")
        session = await kernel.session(approval_handler=person)
        writing = asyncio.create_task(session.call("write", {"path": "out/a.txt", "content": "x"}))
        await person.request_received.wait()
        (workspace / "out").unlink()
        (workspace / "out").symlink_to("closed")
        session.add_rules("deny fs.write closed/**")
        person.may_answer.set()
        result = await writing
        assert result.error_kind == "denied" and "closed/a.txt" in (result.error_text or "")
        assert "intended" not in await kinds_of(kernel, f"{session.id}/1.0"), "it never came to the door"
        assert not list((workspace / "closed").iterdir()) and not list((workspace / "open").iterdir())
