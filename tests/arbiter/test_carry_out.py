"""The way of one call, end to end: one answer each, in order, recorded, whatever happens on the way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from handrail import ApprovalAnswer, Event, Kernel, Result, Runtime, Session, ToolError, tool
from handrail.contract.call import ProposedCall
from handrail.testing.kernels import ScriptedPerson, temporary_kernel


class Gate:
    """A tool's inside, opened from outside: proves an interleaving without sleeping."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.open = asyncio.Event()
        self.ran: list[str] = []

    async def pass_through(self, name: str) -> str:
        self.ran.append(name)
        self.entered.set()
        await self.open.wait()
        return name


gate = Gate()


@pytest.fixture(autouse=True)
def a_fresh_gate() -> None:
    gate.__init__()


@tool(id="test.add", side_effect="read", locks=["sums:S"])
async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool(id="test.note", side_effect="external", locks=["notes:X"])
async def note(text: str) -> dict[str, str]:
    """Note a text."""
    gate.ran.append(text)
    return {"noted": text}


@tool(id="test.hold", side_effect="external", locks=["notes:X"])
async def hold(name: str) -> str:
    """Wait at the gate, holding the notes."""
    return await gate.pass_through(name)


@tool(id="test.look", side_effect="read", locks=["notes:S"])
async def look() -> str:
    """Look at the notes."""
    gate.ran.append("look")
    return "looked"


@tool(id="test.glance", side_effect="read", locks=["elsewhere:S"])
async def glance() -> str:
    """Look at something else."""
    gate.ran.append("glance")
    return "glanced"


@tool(id="test.slow", side_effect="read", locks=[], timeout_ms=30)
async def slow(runtime: Runtime) -> str:
    """Never ends by itself."""
    runtime.partial({"so far": "half"})
    await asyncio.Event().wait()
    return "never"


@tool(id="test.stubborn", side_effect="external", locks=["stubborn:X"], timeout_ms=30)
async def stubborn() -> str:
    """Does not heed its cancellation until the gate opens."""
    while not gate.open.is_set():
        try:
            await gate.open.wait()
        except asyncio.CancelledError:
            gate.entered.set()
    return "late"


thread_may_end = threading.Event()


@tool(id="test.thread", side_effect="external", locks=["thread:X"], timeout_ms=30)
def thread() -> str:
    """Holds a thread until told to end."""
    thread_may_end.wait(30)
    return "late"


@tool(id="test.fail", side_effect="read", locks=[])
async def fail(how: str) -> str:
    """Fail in some way."""
    if how == "tool":
        raise ToolError("the printer is out of paper; refill it", kind="failed", data={"pages": 3})
    raise RuntimeError("boom in the tool")


@tool(id="test.outer", side_effect="external", locks=["notes:X"], requires={"capabilities": ["call"]})
async def outer(inner: str, runtime: Runtime) -> dict[str, object]:
    """Call another tool."""
    result = await runtime.call(inner, {"text": "from inside"} if inner == "test.note" else {})
    return result.to_dict()


TOOLS = (add, note, hold, look, glance, slow, stubborn, thread, fail, outer)
ALLOW = ["allow test.*"]


@pytest.fixture
async def kernel(tmp_path: Path) -> AsyncGenerator[Kernel]:
    async with temporary_kernel(tmp_path, tools=TOOLS, rules=ALLOW, settings="[limits]\ngrace_ms = 20\n") as opened:
        yield opened


@pytest.fixture
async def session(kernel: Kernel) -> Session:
    return await kernel.session()


async def kinds_of(kernel: Kernel, call_id: str) -> list[str]:
    await kernel.log.flush()
    return [record.kind for record in kernel.log.reader.records(call=call_id)]


@pytest.mark.proves("L-01", "K-07", "X-01")
async def test_a_call_is_answered_in_the_envelope_and_every_step_is_recorded(kernel: Kernel, session: Session) -> None:
    result = await session.call("test.add", {"a": 1, "b": 2})
    assert (result.type, result.data) == ("output", 3)
    assert result.metadata["duration_ms"] >= 0
    assert result.metadata["confined_by"] == "runtime"
    assert await kinds_of(kernel, f"{session.id}/1.0") == ["proposed", "authorised", "intended", "committed"]


@pytest.mark.proves("K-05", "L-01")
async def test_arguments_that_do_not_fit_are_an_error_result_with_all_problems_and_a_record(
    kernel: Kernel, session: Session
) -> None:
    result = await session.call("test.add", {"a": "one", "c": 2})
    assert result.error_kind == "invalid_input"
    assert result.error_text is not None
    assert all(word in result.error_text for word in ("a:", "b", "c", "string", "integer"))
    assert await kinds_of(kernel, f"{session.id}/1.0") == ["proposed", "refused"]


async def test_an_unknown_tool_is_answered_with_the_nearest_names_only(session: Session) -> None:
    result = await session.call("test.ad", {})
    assert result.error_kind == "unknown_tool"
    assert result.error_text is not None and "test.add" in result.error_text
    assert "bash" not in result.error_text


@pytest.mark.proves("K-05")
@pytest.mark.parametrize(
    ("text", "word"),
    [
        ('{"a": 1', "JSON"),
        ('{"a": 1, "a": 2, "b": 3}', "twice"),
        ('{"a": NaN, "b": 1}', "NaN"),
        ("[" * 10_000, "deeper"),
        ('{"a": ' + "[" * 10_000 + "]" * 10_000 + "}", "deeper"),
        ("[1, 2]", "object"),
    ],
)
async def test_argument_text_that_is_no_json_object_is_a_clear_error(session: Session, text: str, word: str) -> None:
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


@pytest.mark.proves("L-05")
async def test_an_open_question_holds_back_later_side_effects_but_no_unrelated_read(tmp_path: Path) -> None:
    person = ScriptedPerson([ApprovalAnswer("once")])
    person.may_answer.clear()
    rules = [*ALLOW, "ask test.note text=asked"]
    async with temporary_kernel(tmp_path, tools=TOOLS, rules=rules) as kernel:
        session = await kernel.session(attendant=person)
        replies = asyncio.create_task(
            session.call_all([("test.note", {"text": "asked"}), ("test.note", {"text": "later"}), ("test.glance", {})])
        )
        await person.asked.wait()
        while "glance" not in gate.ran:
            await asyncio.sleep(0)
        assert gate.ran == ["glance"]
        person.may_answer.set()
        assert [result.ok for result in await replies] == [True, True, True]
        assert gate.ran == ["glance", "asked", "later"]


@pytest.mark.proves("X-07")
async def test_a_time_out_is_a_result_with_the_partial_output(session: Session) -> None:
    result = await session.call("test.slow", {})
    assert result.error_kind == "timeout"
    assert result.data == {"so far": "half"}


@pytest.mark.proves("X-07", "X-08")
async def test_work_that_does_not_end_is_answered_and_keeps_its_locks_until_it_does(
    kernel: Kernel, session: Session
) -> None:
    result = await session.call("test.stubborn", {})
    assert result.error_kind == "timeout"
    assert result.metadata["still_running"] is True
    waiting = asyncio.create_task(session.call("test.stubborn", {}))
    events: list[Event] = []
    session.watch(events.append)
    while not any(event.kind == "waiting" for event in events):
        await asyncio.sleep(0)
    gate.open.set()
    assert (await waiting).data == "late"
    assert await kinds_of(kernel, f"{session.id}/1.0") == [
        "proposed",
        "authorised",
        "intended",
        "committed",
        "committed",
    ]


@pytest.mark.proves("X-07")
async def test_a_thread_that_outlives_its_time_out_is_labelled_and_recorded_when_it_ends(
    kernel: Kernel, session: Session
) -> None:
    thread_may_end.clear()
    result = await session.call("test.thread", {})
    assert result.error_kind == "timeout"
    assert result.metadata["still_running"] is True
    thread_may_end.set()
    assert (await session.call("test.thread", {})).data == "late"  # waits for the lock of the first
    assert (await kinds_of(kernel, f"{session.id}/1.0")).count("committed") == 2


@pytest.mark.proves("X-08")
async def test_user_stop_time_out_and_shutdown_are_told_apart(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, tools=TOOLS, rules=ALLOW) as kernel:
        session = await kernel.session()
        stopped = asyncio.create_task(session.call("test.hold", {"name": "x"}))
        await gate.entered.wait()
        session.cancel()
        result = await stopped
        assert (result.error_kind, result.metadata["stopped_by"]) == ("cancelled", "user")
        gate.entered.clear()
        running = asyncio.create_task(session.call("test.hold", {"name": "y"}))
        await gate.entered.wait()
    result = await running
    assert (result.error_kind, result.metadata["stopped_by"]) == ("cancelled", "shutdown")


@pytest.mark.proves("X-08", "G-01")
async def test_cancelling_the_caller_stops_the_call_records_it_and_frees_its_locks(
    kernel: Kernel, session: Session
) -> None:
    task = asyncio.create_task(session.call("test.hold", {"name": "x"}))
    await gate.entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await kinds_of(kernel, f"{session.id}/1.0"))[-1] == "committed"
    assert (await session.call("test.note", {"text": "free"})).ok


@pytest.mark.proves("X-08", "L-05")
async def test_a_wait_for_a_lock_can_be_stopped_and_leaves_nothing_behind(kernel: Kernel, session: Session) -> None:
    holding = asyncio.create_task(session.call("test.hold", {"name": "x"}))
    await gate.entered.wait()
    events: list[Event] = []
    other = await kernel.session()
    other.watch(events.append)
    waiting = asyncio.create_task(other.call("test.note", {"text": "never"}))
    while not any(event.kind == "waiting" for event in events):
        await asyncio.sleep(0)
    other.cancel()
    result = await waiting
    assert result.error_kind == "cancelled"
    gate.open.set()
    assert (await holding).ok
    assert gate.ran == ["x"]


@pytest.mark.proves("L-05")
async def test_a_lock_wait_has_its_own_budget_and_is_reported_apart(tmp_path: Path) -> None:
    settings = "[limits]\nlock_wait_ms = 20\n"
    async with temporary_kernel(tmp_path, tools=TOOLS, rules=ALLOW, settings=settings) as kernel:
        session = await kernel.session()
        holding = asyncio.create_task(session.call("test.hold", {"name": "x"}))
        await gate.entered.wait()
        result = await session.call("test.note", {"text": "late"})
        assert result.error_kind == "timeout"
        assert result.error_text is not None and "20 ms" in result.error_text
        gate.open.set()
        await holding


@pytest.mark.proves("K-07")
async def test_a_tools_own_failure_and_a_defect_are_results_without_a_traceback(session: Session) -> None:
    own = await session.call("test.fail", {"how": "tool"})
    assert (own.error_kind, own.data) == ("failed", {"pages": 3})
    defect = await session.call("test.fail", {"how": "defect"})
    assert defect.error_kind == "backend"
    assert defect.error_text is not None and "boom in the tool" in defect.error_text
    assert "Traceback" not in defect.error_text


@pytest.mark.proves("P-10")
async def test_headless_ask_is_deny_and_says_so(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, tools=TOOLS) as kernel:
        session = await kernel.session()
        result = await session.call("test.note", {"text": "x"})
        assert result.error_kind == "denied"
        assert result.error_text is not None and "Nobody is attached" in result.error_text
        assert gate.ran == []


@pytest.mark.proves("X-13")
async def test_a_person_is_asked_with_the_whole_arguments_and_no_locks_held(tmp_path: Path) -> None:
    person = ScriptedPerson([ApprovalAnswer("once"), ApprovalAnswer("reject", "not today")])
    person.may_answer.clear()
    text = "x" * 5_000
    async with temporary_kernel(tmp_path, tools=TOOLS) as kernel:
        session = await kernel.session(attendant=person, rules=["allow test.hold"])
        waiting = asyncio.create_task(session.call("test.note", {"text": text}))
        await person.asked.wait()
        gate.open.set()
        assert (await session.call("test.hold", {"name": "same lock"})).ok  # nobody holds locks while a person thinks
        person.may_answer.set()
        assert (await waiting).ok
        assert person.requests[0].arguments == {"text": text}
        rejected = await session.call("test.note", {"text": "again"})
        assert rejected.error_kind == "denied"
        assert rejected.error_text is not None and "not today" in rejected.error_text


async def test_for_this_session_stores_the_rule_that_was_shown_and_asks_no_more(tmp_path: Path) -> None:
    person = ScriptedPerson([ApprovalAnswer("session")])
    async with temporary_kernel(tmp_path, tools=TOOLS) as kernel:
        session = await kernel.session(attendant=person)
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
async def test_a_key_gives_the_recorded_result_and_conflicts_with_other_arguments(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, tools=TOOLS, rules=ALLOW) as kernel:
        session = await kernel.session("ses_known")
        first = await session.call("test.note", {"text": "once"}, key="k1")
        again = await session.call("test.note", {"text": "once"}, key="k1")
        other = await session.call("test.note", {"text": "twice"}, key="k1")
        assert first.ok and again.data == first.data and again.metadata["recorded"] is True
        assert other.error_kind == "conflict"
    async with temporary_kernel(tmp_path, tools=TOOLS, rules=ALLOW) as kernel:
        session = await kernel.session("ses_known")
        assert (await session.call("test.note", {"text": "once"}, key="k1")).metadata["recorded"] is True
    assert gate.ran == ["once"]


@pytest.mark.proves("L-10")
async def test_provider_ids_that_repeat_are_two_calls_with_two_answers(kernel: Kernel, session: Session) -> None:
    same = [
        ProposedCall("test.add", '{"a": 1, "b": 1}', "call_1"),
        ProposedCall("test.add", '{"a": 2, "b": 2}', "call_1"),
    ]
    answers = await session.turn().call_all(same)
    assert [answer.result.data for answer in answers] == [2, 4]
    assert len({answer.call_id for answer in answers}) == 2
    await kernel.log.flush()
    proposals = list(kernel.log.reader.records(session=session.id, kind="proposed"))
    assert [(record.body or {}).get("provider_id") for record in proposals] == ["call_1", "call_1"]


async def test_a_proposal_known_to_be_broken_is_recorded_and_answered(kernel: Kernel, session: Session) -> None:
    broken = ProposedCall("test.add", '{"a": 1', fault="the stream broke off inside this call")
    nameless = ProposedCall("", "{}")
    answers = await session.turn().call_all([broken, nameless])
    assert [answer.result.error_kind for answer in answers] == ["invalid_input", "unknown_tool"]
    assert await kinds_of(kernel, answers[0].call_id) == ["proposed", "refused"]


async def test_a_rule_that_comes_while_a_call_waits_is_heeded(kernel: Kernel, session: Session) -> None:
    holding = asyncio.create_task(session.call("test.hold", {"name": "x"}))
    await gate.entered.wait()
    events: list[Event] = []
    session.watch(events.append)
    waiting = asyncio.create_task(session.call("test.note", {"text": "too late"}))
    while not any(event.kind == "waiting" for event in events):
        await asyncio.sleep(0)
    session.add_rules("deny test.note")
    gate.open.set()
    await holding
    result = await waiting
    assert result.error_kind == "denied"
    assert gate.ran == ["x"]


async def test_events_tell_the_way_of_a_call(session: Session) -> None:
    seen: list[Event] = []
    session.watch(seen.append)
    assert (await session.call("test.add", {"a": 1, "b": 2})).ok
    assert [event.kind for event in seen] == ["proposed", "started", "finished"]


def test_an_answer_is_a_value() -> None:
    assert Result.from_dict(Result.error("failed", "x", {"a": 1}).to_dict()).data == {"a": 1}


@pytest.mark.proves("X-07")
async def test_a_command_that_takes_too_long_is_ended_in_the_time_its_caller_gave_and_its_output_is_kept(
    tmp_path: Path,
) -> None:
    async with temporary_kernel(tmp_path, rules=["allow bash"]) as kernel:
        session = await kernel.session()
        result = await session.call("bash", {"command": "echo begun; tail -f /dev/null", "timeout_ms": 1_500})
        assert result.error_kind == "timeout"
        assert result.error_text is not None and "1500 ms" in result.error_text and "timeout_ms" in result.error_text
        assert result.data == {"output": "begun\n"}
