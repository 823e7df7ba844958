"""Stateful tools: opened, stepped and closed by calls, each with its own authorization and locks."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.arbiter.stepping import SETTINGS, TOOLS, asks, bench, close, opened, step

from handrail import Kernel, Session, ToolError, ToolSpec, UsageError, tool
from handrail.arbiter.call_state import LiveToolSession
from handrail.arbiter.tool_sessions import ToolSessionManager
from handrail.contract.approval_requests import ApprovalAnswer
from handrail.contract.calls_and_results import Event
from handrail.contract.tool.spec import find_spec_faults
from handrail.kernel.local_kernel import LocalKernel
from handrail.session.local_session import LocalSession
from handrail.testing.scripted_kernel import ScriptedApprovalHandler, temporary_kernel

pytestmark = pytest.mark.proves("X-03")


@pytest.fixture(autouse=True)
def a_fresh_bench() -> None:
    bench.__init__()


@pytest.fixture
async def kernel(tmp_path: Path) -> AsyncGenerator[LocalKernel]:
    rules = ["allow st.*", "allow fs.write **"]
    async with temporary_kernel(tmp_path, tools=TOOLS, rules=rules, settings=SETTINGS) as opened:
        yield opened


@pytest.fixture
async def session(kernel: Kernel) -> Session:
    return await kernel.session()


def states_of(kernel: LocalKernel) -> ToolSessionManager:
    return kernel.components.arbiter.tool_sessions


async def test_a_tool_session_opens_takes_steps_and_ends(kernel: LocalKernel, session: Session) -> None:
    first = await session.call("st.notes", {"first": 7})
    state = first.data["state_id"]
    assert state.startswith("st__notes_") and first.data["step"]["number"] == 7 and "tool.step" in first.data["note"]
    assert {"tool.step", "tool.close"} <= {spec.id for spec in session.active_tools}, "they came into view"
    second = await step(session, state, {"any": ["json"]})
    call = f"{session.id}/2.0"
    assert second.data == {"state_id": state, "step": {"number": 8, "got": {"any": ["json"]}, "call": call}}
    assert not bench.left.is_set()
    assert (await step(session, state, "enough")).data == {"state_id": state, "done": True}
    assert len(bench.tasks) == 1, "one task goes through all of it"
    late = await step(session, state)
    assert late.error_kind == "conflict" and "it returned its last step" in str(late.error_text)
    assert Path(kernel.workdir, "9.txt").read_text() == "enough"
    assert not states_of(kernel).open_sessions


async def test_the_log_records_each_step_as_a_call_with_its_tool_session(kernel: LocalKernel, session: Session) -> None:
    state = await opened(session, "st.notes")
    await step(session, state, "a")
    await close(session, state)
    await kernel.log.flush()
    told = [one.body or {} for one in kernel.log.reader.records(session=session.id, kind="proposed")]
    assert [(one["tool"], one["state"], one.get("by")) for one in told] == [
        ("st.notes", state, None),
        ("st.notes", state, "tool.step"),
        ("st.notes", state, "tool.close"),
    ]
    assert told[1]["arguments"] == {"id": state, "input": "a"} and told[1]["side_effect"] == "write"
    records = list(kernel.log.reader.records(call=f"{session.id}/2.0"))
    assert [one.kind for one in records] == ["proposed", "authorised", "intended", "committed"]
    assert "shelf:X" in (records[2].body or {})["locks"]
    again = await session.recover_result(f"{session.id}/2.0")
    assert again.result.metadata["replayed"] and again.result.data["step"]["got"] == "a", "given again, not taken again"


async def test_a_closed_tool_session_runs_its_finally_block_once(session: Session) -> None:
    state = await opened(session, "st.notes")
    assert (await close(session, state)).data == {"state_id": state, "closed": True}
    assert bench.seen == ["ended"]
    twice = await close(session, state)
    assert twice.ok and "it was closed" in twice.data["note"]
    assert (await step(session, state)).error_kind == "conflict"
    assert bench.seen == ["ended"]


async def test_a_step_of_an_unknown_or_foreign_tool_session_is_refused(kernel: LocalKernel, session: Session) -> None:
    assert "has no open tool session" in str((await step(session, "st__notes_00000000")).error_text)
    mine = await opened(session, "st.notes")
    other = await kernel.session()
    for asked in (step(other, mine), close(other, mine), step(other, "ö"), close(other, "\0")):
        answer = await asked
        assert answer.error_kind == "invalid_input" and mine not in str(answer.error_text).replace(f"`{mine}`", "", 1)
    assert mine in str((await step(session, "nothing")).error_text), "its own are named"
    assert (await session.call("tool.step", {"id": mine, "inputs": 1})).error_kind == "invalid_input"
    assert (await session.call("tool.step", {})).error_kind == "invalid_input"
    assert (await step(session, mine)).ok, "none of it took a step"


async def test_steps_of_one_reply_run_in_order(session: Session) -> None:
    state = await opened(session, "st.asks")
    calls = [("tool.step", {"id": state, "input": {"page": page}}) for page in range(1, 6)]
    answers = await session.call_all([*calls, ("tool.close", {"id": state}), *calls[:1]])
    assert [one.data["step"] for one in answers[:5]] == [{"page": page} for page in range(1, 6)]
    assert answers[5].ok and answers[6].error_kind == "conflict"


async def test_a_tool_that_steps_another_tool_runs_one_step_at_a_time(session: Session) -> None:
    result = await session.call("st.outer", {})
    first, one, two, ended = result.data
    assert first["step"]["number"] == 0 and one["step"]["number"] == 1
    assert two == "conflict" and ended["closed"] is True


async def test_the_input_of_a_step_must_match_the_schema_of_the_tool(session: Session) -> None:
    first = await session.call("st.asks", {})
    assert first.data["input"]["required"] == ["page"], "it is told"
    state = first.data["state_id"]
    for wrong, text in (({"page": 0}, "input.page"), ({"pages": 1}, "input.pages"), ("one", "input"), (None, "input")):
        answer = await step(session, state, wrong)
        assert answer.error_kind == "invalid_input" and text in str(answer.error_text)
    textual = await step(session, state, '{"page": "1"}')
    assert textual.ok and textual.data["step"] == {"page": 1}, textual
    fenced = await session.call("tool.step", f'```json\n{{"id": "{state}", "input": {{"page": "3"}}}}\n```')
    assert fenced.data["step"] == {"page": 3} and len(fenced.metadata["arguments_read_as"]) == 2
    huge = await session.call("tool.step", {"id": state, "input": {"page": 1, "x": "y" * (11 << 20)}})
    assert huge.error_kind == "invalid_input"
    assert (await step(session, state, {"page": 2})).data["step"] == {"page": 2}


@pytest.mark.parametrize("when", [0, 1])
async def test_a_step_that_never_yields_ends_with_a_timeout(session: Session, when: int) -> None:
    first = await session.call("st.short", {"when": when})
    if when:
        last = await step(session, first.data["state_id"])
        assert last.error_kind == "timeout" and "has ended" in str(last.error_text)
        assert "timed out" in str((await step(session, first.data["state_id"])).error_text)
    else:
        assert first.error_kind == "timeout"


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("tool", "failed", "no paper. The tool session"),
        ("other", "backend", "KeyError: 'other'"),
        ("exit", "backend", "SystemExit: 3"),
        ("cancelled", "backend", "CancelledError"),
    ],
)
async def test_an_exception_in_a_step_ends_the_tool_session(session: Session, how: str, kind: str, text: str) -> None:
    state = await opened(session, "st.fails", how=how)
    failed = await step(session, state)
    assert failed.error_kind == kind and text in str(failed.error_text) and state in str(failed.error_text)
    assert failed.data == ({"left": 0} if how == "tool" else None)
    assert "one of its steps failed" in str((await step(session, state)).error_text)


async def test_a_step_that_is_not_json_ends_the_tool_session(kernel: LocalKernel, session: Session) -> None:
    state = await opened(session, "st.fails", how="no JSON")
    failed = await step(session, state)
    assert failed.error_kind == "backend"
    assert "not JSON" in str(failed.error_text) and f"The tool session `{state}` has ended" in str(failed.error_text)
    await bench.left.wait()
    assert "one of its steps failed" in str((await step(session, state)).error_text)
    assert not states_of(kernel).open_sessions


async def test_an_error_result_keeps_the_tool_session_open_and_steps_are_optional(session: Session) -> None:
    state = await opened(session, "st.fails", how="error")
    page = await step(session, state)
    assert page.error_kind == "failed" and page.metadata["state_id"] == state
    assert (await step(session, state)).data["step"] == 3
    assert (await session.call("st.fails", {"how": "at once"})).data == {"done": True}


@tool(id="st.odd", mode="stateful", side_effect="read", locks=[])
async def odd() -> AsyncGenerator[object, Any]:
    """Yield what is no JSON."""
    try:
        yield object()
    finally:
        bench.left.set()


async def test_a_first_step_that_is_not_json_opens_no_tool_session(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, tools=[odd], rules=["allow st.odd"]) as kernel:
        session = await kernel.session()
        wrong = await session.call("st.odd", {})
        assert wrong.error_kind == "backend" and "that is not JSON" in str(wrong.error_text)
        await bench.left.wait()
        assert not states_of(kernel).open_sessions


@pytest.mark.parametrize("how", ["", "yields", "returns", "deaf"])
@pytest.mark.parametrize("reason", ["user", "timeout"])
async def test_a_stopped_step_ends_the_tool_session_even_if_the_generator_ignores_it(
    kernel: LocalKernel, session: Session, how: str, reason: Any
) -> None:
    state = await opened(session, "st.slow", how=how)
    going = asyncio.create_task(step(session, state))
    await bench.entered.wait()
    assert isinstance(session, LocalSession)
    (call,) = session.lane.awaited_calls
    call.execution.stop(reason)
    stopped = await going
    late = await step(session, state)
    bench.open.set()
    assert stopped.error_kind == ("timeout" if reason == "timeout" else "cancelled")
    assert stopped.metadata.get("stopped_by") == (None if reason == "timeout" else "user")
    assert "told 1" in bench.seen and "went on" not in bench.seen
    assert stopped.metadata.get("still_running", False) is (how == "deaf")
    assert late.error_kind == "conflict"
    assert ("timed out" if reason == "timeout" else "was stopped") in str(late.error_text)
    if how == "deaf":  # its locks are held until it yields
        assert (await session.call("st.count", {"path": "a"})).ok


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("times", "ok"), [(1, True), (100, False)])
async def test_a_tool_session_closes_even_when_its_generator_yields_on_close(
    session: Session, times: int, ok: bool
) -> None:
    state = await opened(session, "st.stubborn", times=times)
    ended = await close(session, state)
    assert ended.ok is ok and bench.seen[0] == 0
    if not ok:
        assert ended.error_kind == "backend" and "ignored the request to end (GeneratorExit)" in str(ended.error_text)
    assert (await step(session, state)).error_kind == "conflict"
    gc.collect()


async def test_a_step_waits_for_its_locks_and_holds_none_between_steps(session: Session) -> None:
    state = await opened(session, "st.slow")
    assert (await session.call("st.count", {"path": "between"})).ok
    notes_state = await opened(session, "st.notes")
    going = asyncio.create_task(step(session, state))
    await bench.entered.wait()
    waiting = asyncio.Event()
    session.watch_events(lambda event: waiting.set() if event.kind == "awaiting-locks" else None)
    behind = asyncio.create_task(step(session, notes_state, "late"))
    await waiting.wait()
    assert not behind.done()
    bench.open.set()
    assert (await going).data["step"] == "opened"
    assert (await behind).data["step"]["got"] == "late" and (await behind).metadata["lock_wait_ms"] > 0


async def test_a_rule_added_later_denies_a_step_but_not_the_close_of_its_session(
    kernel: LocalKernel, session: Session
) -> None:
    kept, other = await opened(session, "st.notes"), await opened(session, "st.notes")
    session.add_rules("deny fs.write 1.txt")
    beyond = await step(session, kept)
    assert beyond.error_kind == "denied", "also through a door that the tool kept"
    session.add_rules("deny st.notes")
    denied = await step(session, other)
    assert denied.error_kind == "denied" and "deny st.notes" in str(denied.error_text)
    assert not Path(kernel.workdir, "1.txt").exists()
    assert (await close(session, other)).data["closed"] is True


async def test_rules_can_match_the_input_of_a_step_and_the_step_tool(session: Session) -> None:
    state = await opened(session, "st.asks")
    session.add_rules("deny st.asks step_input=*13*")
    assert (await step(session, state, {"page": 13})).error_kind == "denied"
    assert (await step(session, state, {"page": 12})).ok
    session.add_rules("deny tool.step")
    assert "`tool.step` is denied by the rule" in str((await step(session, state, {"page": 12})).error_text)
    assert (await close(session, state)).ok


async def test_the_user_approves_each_step_sees_its_input_and_can_change_only_that(tmp_path: Path) -> None:
    given = ApprovalAnswer("once", arguments={"opened": 0, "step_input": {"page": 5}})
    person = ScriptedApprovalHandler(
        [ApprovalAnswer("once"), given, ApprovalAnswer("defer"), ApprovalAnswer("reject", "no")]
    )
    async with temporary_kernel(tmp_path, tools=TOOLS, rules=["ask st.asks"]) as kernel:
        session = await kernel.session(approval_handler=person)
        state = await opened(session, "st.asks", opened=0)
        assert (await step(session, state, {"page": 4})).data["step"] == {"page": 5}
        assert person.requests[1].tool_id == "st.asks"
        assert person.requests[1].arguments == {"opened": 0, "step_input": {"page": 4}}
        parked = await step(session, state, {"page": 6})
        assert parked.error_kind == "unavailable" and "Nothing was run" in str(parked.error_text)
        assert await session.list_calls_awaiting_approval() == []
        assert (await step(session, state, {"page": 7})).error_kind == "denied"
        wrong = {"opened": 1, "step_input": {"page": 8}}
        person._approvals.extend([ApprovalAnswer("once", arguments=wrong)] * 5)  # pyright: ignore[reportPrivateUsage]
        assert (await step(session, state, {"page": 8})).error_kind == "denied"
        assert "only step_input may differ" in person.requests[-1].reason
        assert (await close(session, state)).ok, "nobody is asked for that"


async def test_a_step_with_an_idempotency_key_runs_once(session: Session) -> None:
    state = await opened(session, "st.notes")
    asked = {"id": state, "input": "once"}
    one, two = [await session.call("tool.step", asked, key="k") for _ in range(2)]
    assert one.data == two.data and two.metadata["replayed"] is True
    assert (await step(session, state)).data["step"]["number"] == 2


async def test_a_stateful_tool_cannot_use_its_runtime_between_steps(session: Session) -> None:
    state = await opened(session, "st.held")
    (runtime,) = bench.seen
    with pytest.raises(ToolError, match="No step of `st__held"):
        _ = runtime.call_id
    assert (await step(session, state, "x")).data["step"] == "x"
    await close(session, state)


async def test_a_session_limits_open_tool_sessions_and_an_idle_one_expires(tmp_path: Path) -> None:
    settings = SETTINGS + "tool_session_idle_ms = 1\n"
    async with temporary_kernel(tmp_path, tools=TOOLS, rules=["allow st.*"], settings=settings) as kernel:
        session = await kernel.session()
        state = await opened(session, "st.notes")
        await bench.left.wait()
        expired = await step(session, state)
        assert expired.error_kind == "conflict" and "no step came in time" in str(expired.error_text)
        await kernel.log.flush()
        (told,) = kernel.log.reader.records(session=session.id, kind="tool-session-closed")
        assert told.call_id == f"{session.id}/1.0" and told.body == {
            "tool": "st.notes",
            "state": state,
            "ended": "expired",
        }
    async with temporary_kernel(tmp_path, tools=TOOLS, rules=["allow st.*"], settings=SETTINGS) as kernel:
        session = await kernel.session()
        states = [await opened(session, "st.asks") for _ in range(3)]
        over = await session.call("st.asks", {})
        assert over.error_kind == "limit" and states[0] in str(over.error_text)
        await close(session, states[0])
        assert (await session.call("st.asks", {})).ok
        at_once = await (await kernel.session()).call_all([("st.asks", {}) for _ in range(5)])
        assert [result.error_kind for result in at_once] == [None, None, None, "limit", "limit"]


async def test_a_tool_session_expires_when_no_step_follows_in_time(kernel: LocalKernel, session: Session) -> None:
    states, state = states_of(kernel), await opened(session, "st.notes")
    states.limits = replace(states.limits, idle_s=0)
    assert (await step(session, state, "a")).ok
    for _ in range(3):  # turns of the loop, in which its time is over
        await asyncio.sleep(0)
    expired = await step(session, state, "b")
    assert expired.error_kind == "conflict" and "no step came in time" in str(expired.error_text)


async def test_a_step_awaiting_an_answer_keeps_its_tool_session_from_expiring(tmp_path: Path) -> None:
    person = ScriptedApprovalHandler([ApprovalAnswer("once")] * 100)
    settings = SETTINGS + "tool_session_idle_ms = 1\n"
    async with temporary_kernel(tmp_path, tools=TOOLS, rules=["ask st.asks"], settings=settings) as kernel:
        session = await kernel.session(approval_handler=person)
        states = states_of(kernel)
        rests, again = states._start_idle_timer, asyncio.Event()  # pyright: ignore[reportPrivateUsage]

        def rest(one: LiveToolSession) -> None:
            rests(one)
            again.set()

        while True:  # on a busy machine it may be gone before its step begins
            state = await opened(session, "st.asks")
            person.may_answer.clear()
            states._start_idle_timer = rest  # type: ignore[method-assign] # pyright: ignore[reportPrivateUsage]
            going = asyncio.create_task(step(session, state, {"page": 1}))
            waiting = asyncio.create_task(again.wait())
            await asyncio.wait([going, waiting], return_when=asyncio.FIRST_COMPLETED)
            if again.is_set():
                break
            waiting.cancel()
            assert (await going).error_kind == "conflict"
            states._start_idle_timer = rests  # type: ignore[method-assign] # pyright: ignore[reportPrivateUsage]
            person.may_answer.set()
        person.may_answer.set()
        answer = await going
        assert answer.ok and answer.data["step"] == {"page": 1}


async def test_closing_or_suspending_a_session_ends_its_tool_sessions(kernel: LocalKernel, session: Session) -> None:
    state = await opened(session, "st.notes")
    await session.suspend()
    assert bench.left.is_set()
    again = await kernel.session(session.id)
    late = await step(again, state)
    assert late.error_kind == "conflict" and "its session" in str(late.error_text)
    bench.left.clear()
    await opened(again, "st.notes")
    await again.close()
    assert bench.left.is_set() and not states_of(kernel).open_sessions


async def test_a_tool_session_left_open_by_an_earlier_process_is_interrupted(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, tools=TOOLS, rules=["allow st.*"]) as kernel:
        session = await kernel.session()
        state = await opened(session, "st.notes")
        states_of(kernel).table.end = lambda *_: None  # type: ignore[method-assign] # it has no time to say so
    async with temporary_kernel(tmp_path, tools=TOOLS, rules=["allow st.*"]) as kernel:
        session = await kernel.session(session.id)
        late = await step(session, state)
        assert late.error_kind == "interrupted" and "Check its effect" in str(late.error_text)
        closed = await close(session, state)
        assert closed.ok and "unknown" in closed.data["note"]
        forked = await kernel.session(await kernel.fork_session(session.id))
        assert (await step(forked, state)).error_kind == "invalid_input", "a fork has none of it"


async def test_a_step_stopped_before_it_starts_leaves_the_tool_session_open(session: Session) -> None:
    state, other = await opened(session, "st.asks"), await opened(session, "st.slow")
    going = asyncio.create_task(step(session, other))
    await bench.entered.wait()
    waiting = asyncio.create_task(step(session, other))
    before = asyncio.create_task(step(session, state, {"page": 1}))
    assert (await before).ok

    def stop(event: Event) -> None:
        if event.kind == "awaiting-locks":
            session.cancel_running_calls()

    session.watch_events(stop)
    behind = asyncio.create_task(session.call("st.count", {"path": "a"}))
    assert [(await one).error_kind for one in (going, waiting, behind)] == ["cancelled"] * 3
    assert (await step(session, state, {"page": 2})).ok


async def test_a_tool_session_refuses_further_steps_after_its_tool_definition_changed(
    kernel: LocalKernel, session: Session
) -> None:
    kept, changed = await opened(session, "st.asks"), await opened(session, "st.notes")

    @tool(id="st.notes", mode="stateful", side_effect="external", locks=[])
    async def another() -> AsyncGenerator[int, None]:
        """Be another."""
        yield 1

    await kernel.reload_tools([another, asks])
    refused = await step(session, changed)
    assert refused.error_kind == "conflict" and "definition of its tool has changed" in str(refused.error_text)
    await bench.left.wait()
    assert (await step(session, kept, {"page": 1})).ok, "which is the same"


def test_a_tool_that_cannot_be_stateful_is_refused_at_its_definition() -> None:
    async def plain() -> str:
        """Return."""
        return ""

    async def yields() -> AsyncGenerator[int, None]:
        """Yield."""
        yield 1

    for function, mode, text in ((plain, "stateful", "must yield its steps"), (yields, "direct", 'mode="stateful"')):
        with pytest.raises(UsageError, match=text):
            tool(mode=mode)(function)  # type: ignore[call-overload] # pyright: ignore
    named: dict[str, Any] = {"type": "object", "properties": {"step_input": {}}}
    spec = ToolSpec("a", "A.", named, mode="stateful", promotable=True, output_schema={"type": "object"})
    places = [place for place, _ in find_spec_faults(spec)]
    assert places == ["runtime.promotable", "runtime.output_schema", "llm.parameters.step_input"]
    assert [place for place, _ in find_spec_faults(ToolSpec("a", "A.", step_parameters={}))] == [
        "runtime.step_parameters"
    ]
