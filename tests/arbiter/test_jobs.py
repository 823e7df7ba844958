"""Background jobs: started, promoted, read and stopped; each ends once and is recorded."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from tests.kernel.test_sub_agents import kernel_of, models, task

from handrail import Kernel, Result, Runtime, Session, ToolError, tool
from handrail.agent.agent_loop import Agent
from handrail.arbiter.jobs.output_stream import MAX_HELD_CHARACTERS, CallOutputWriter, JobOutputFile
from handrail.arbiter.output.secret_redaction import SecretRedactor
from handrail.contract.approval_requests import ApprovalAnswer
from handrail.contract.errors import LogUnavailable
from handrail.kernel.local_kernel import LocalKernel
from handrail.testing.provider_request_checks import PlaybackModel, call_reply, text_reply
from handrail.testing.scripted_kernel import ScriptedApprovalHandler, temporary_kernel


class JobRecorder:
    """The events that the tools of these tests wait for, and their effects."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.entered = asyncio.Event()
        self.ran: list[str] = []


bench = JobRecorder()


async def pass_through(name: str, runtime: Runtime) -> str:
    runtime.write_output(f"began {name}\n")
    bench.ran.append(name)
    bench.entered.set()
    await bench.open.wait()
    return name


@tool(id="job.long", side_effect="external", mode="background", locks=["notes:X"], idempotent=True)
async def long(name: str, runtime: Runtime) -> str:
    """Take long, in the background."""
    return await pass_through(name, runtime)


@tool(
    id="job.either",
    side_effect="external",
    locks=["notes:X"],
    background_argument="later",
    locks_background=["shelf:X"],
    promotable=True,
)
async def either(name: str, runtime: Runtime, later: bool = False) -> str:
    """Take long, where somebody waits for it or not."""
    return await pass_through(name, runtime)


@tool(id="job.stays", side_effect="external", locks=[])
async def stays(name: str, runtime: Runtime) -> str:
    """Take long, with somebody who waits for it."""
    return await pass_through(name, runtime)


@tool(id="job.quick", side_effect="external", locks=["shelf:X"])
async def quick(name: str) -> str:
    """Be quick."""
    bench.ran.append(name)
    return name


@tool(id="job.fail", side_effect="external", mode="background", locks=[])
async def fail() -> str:
    """Fail."""
    raise ToolError("the printer is out of paper", kind="failed")


@tool(id="job.tell", side_effect="external", mode="background", locks=[])
async def tell(text: str, runtime: Runtime, backwards: bool = False) -> str:
    """Write a text in pieces."""
    text = text[::-1] if backwards else text
    for piece in (text.encode()[start : start + 3] for start in range(0, len(text.encode()), 3)):
        runtime.write_output(piece)
    return "told"


@tool(id="job.outer", side_effect="external", locks=["notes:X", "shelf:X"], requires={"capabilities": ["call"]})
async def outer(later: bool, runtime: Runtime) -> object:
    """Call another."""
    return (await runtime.call("job.either", {"name": "inner", "later": later})).to_dict()


@tool(id="job.heed", side_effect="read", locks=[], requires={"capabilities": ["call", "jobs"]})
async def heed(job_id: str, fails: bool, runtime: Runtime) -> object:
    """Wait for a job, by a call of its own and directly."""
    told = (await runtime.call("wait", {"job_id": job_id})).data
    assert await runtime.jobs.wait(job_id, timeout_ms=30_000) is not None
    bench.entered.set()
    await bench.open.wait()
    if fails:
        raise ToolError("it says nothing of the job", kind="failed")
    return told


TOOLS = [long, either, stays, quick, fail, tell, outer, heed]
SETTINGS = "[limits]\ngrace_ms = 20\n"


@pytest.fixture(autouse=True)
def a_fresh_bench() -> None:
    bench.__init__()


@pytest.fixture
async def kernel(tmp_path: Path) -> AsyncGenerator[LocalKernel]:
    async with temporary_kernel(tmp_path, tools=TOOLS, rules=["allow job.*"], settings=SETTINGS) as opened:
        yield opened


@pytest.fixture
async def session(kernel: Kernel) -> Session:
    return await kernel.session()


def job_of(result: Result) -> str:
    assert result.ok, result.error_text
    return str(result.data["job_id"])


def kinds(kernel: Kernel, call_id: str) -> list[str]:
    return [record.kind for record in kernel.log.reader.records(call=call_id)]


@pytest.mark.proves("X-02")
async def test_a_background_call_is_answered_at_once_and_continues_as_a_job(kernel: Kernel, session: Session) -> None:
    answered = await session.call("job.long", {"name": "a"})
    job_id = job_of(answered)
    assert job_id.startswith("job__long_") and answered.data["state"] in ("pending", "running")
    await bench.entered.wait()
    bench.open.set()
    result = await session.jobs.wait(job_id, timeout_ms=30_000)
    assert result is not None and result.data == "a" and result.metadata["job_id"] == job_id
    job = await session.jobs.get(job_id)
    assert (job.state, job.tool_id, job.summary) == ("done", "job.long", "a")
    await kernel.log.flush()
    assert kinds(kernel, job.call_id) == ["proposed", "authorised", "backgrounded", "intended", "committed"]
    recalled = await session.recover_result(job.call_id)
    assert recalled.result.data == answered.data, "what its proposer was answered stays that call's answer"


@pytest.mark.proves("X-02", "L-10")
async def test_a_background_call_with_an_idempotency_key_runs_once_as_one_job(session: Session) -> None:
    answered = [await session.call("job.long", {"name": "a"}, key="k") for _ in range(2)]
    assert job_of(answered[0]) == job_of(answered[1]) and answered[1].metadata["replayed"] is True
    await bench.entered.wait()
    bench.open.set()
    result = await session.jobs.wait(job_of(answered[0]), timeout_ms=30_000)
    assert result is not None and result.data == "a" and bench.ran == ["a"]
    assert job_of(await session.call("job.long", {"name": "a"}, key="k")) == job_of(answered[0])


async def test_the_end_of_a_job_is_notified_once_unless_a_wait_call_returned_it(session: Session) -> None:
    first, second = [job_of(await session.call("job.fail", {})) for _ in range(2)]
    waited = await session.call("wait", {"job_id": first})
    assert waited.data["state"] == "failed"
    assert await session.jobs.wait(second, timeout_ms=30_000) is not None
    assert session.notifications is not None
    (notice,) = await session.notifications.list_pending()
    assert (notice.id, notice.kind, notice.source) == (f"job/{second}", "job", second)
    assert "failed" in notice.text and "out of paper" in notice.text and notice.untrusted


@pytest.mark.parametrize("fails", [False, True])
async def test_a_job_notification_stays_pending_until_the_call_that_read_it_is_recorded(
    session: Session, *, fails: bool
) -> None:
    job_id = job_of(await session.call("job.fail", {}))
    heeding = asyncio.create_task(session.call("job.heed", {"job_id": job_id, "fails": fails}))
    await bench.entered.wait()
    assert session.notifications is not None
    assert [notice.source for notice in await session.notifications.list_pending()] == [job_id], (
        "a kill here loses nothing"
    )
    bench.open.set()
    assert (await heeding).ok is not fails
    assert [notice.source for notice in await session.notifications.list_pending()] == ([job_id] if fails else [])


@pytest.mark.proves("X-12")
async def test_a_background_call_reports_the_locks_that_it_skips(session: Session) -> None:
    answered = await session.call("job.either", {"name": "a", "later": True})
    assert answered.metadata["skipped_locks"] == ["notes:X"] and "notes:X" in answered.data["note"]
    await bench.entered.wait()
    held = asyncio.create_task(session.call("job.quick", {"name": "b"}))
    bench.open.set()
    result = await session.jobs.wait(job_of(answered), timeout_ms=30_000)
    assert result is not None and result.metadata["skipped_locks"] == ["notes:X"]
    assert (await held).ok and bench.ran == ["a", "b"], "the lock for the background was held"


async def test_a_later_call_of_a_reply_runs_after_an_earlier_background_call(session: Session) -> None:
    bench.open.set()
    calls = [("job.either", {"name": "first", "later": True}), ("job.quick", {"name": "second"})]
    answers = await session.call_all(calls)
    await session.jobs.wait(job_of(answers[0]), timeout_ms=30_000)
    assert answers[1].ok and bench.ran == ["first", "second"]


async def test_a_refusal_before_the_locks_is_returned_in_the_turn_and_starts_no_job(
    kernel: Kernel, session: Session
) -> None:
    session.add_rules("deny job.long")
    refused = await session.call("job.long", {"name": "a"})
    assert refused.error_kind == "denied" and await session.jobs.list() == []
    assert (await session.call("job.long", {"name": 5})).error_kind == "invalid_input"


async def test_a_nested_call_runs_in_the_foreground_only(session: Session) -> None:
    bench.open.set()
    asked = await session.call("job.outer", {"later": True})
    assert asked.data["metadata"]["error_kind"] == "invalid_input" and "later" in asked.data["error_text"]
    assert (await session.call("job.outer", {"later": False})).data["data"] == "inner"


async def test_a_failed_job_has_its_error_in_its_output(session: Session) -> None:
    job_id = job_of(await session.call("job.fail", {}))
    result = await session.jobs.wait(job_id, timeout_ms=30_000)
    assert result is not None and result.error_text == "the printer is out of paper"
    assert (await session.jobs.get(job_id)).state == "failed"
    assert "out of paper" in (await session.jobs.read_output_bytes(job_id)).text


@pytest.mark.proves("X-05")
async def test_the_end_of_a_wait_does_not_stop_the_job(session: Session) -> None:
    job_id = job_of(await session.call("job.long", {"name": "a"}))
    await bench.entered.wait()
    assert await session.jobs.wait(job_id, timeout_ms=1) is None
    waiting = asyncio.create_task(session.jobs.wait(job_id, timeout_ms=30_000))
    await asyncio.sleep(0)
    waiting.cancel()
    assert (await session.jobs.get(job_id)).state == "running"
    bench.open.set()
    result = await session.jobs.wait(job_id, timeout_ms=30_000)
    assert result is not None and result.ok


@pytest.mark.proves("X-05")
async def test_a_second_stop_of_a_job_returns_its_state(kernel: Kernel, session: Session) -> None:
    job_id = job_of(await session.call("job.long", {"name": "a"}))
    await bench.entered.wait()
    assert (await session.jobs.stop(job_id)).state == "cancelled"
    assert (await session.jobs.stop(job_id)).state == "cancelled"
    result = await kernel.jobs.wait(job_id, timeout_ms=0)
    assert result is not None and result.metadata["stopped_by"] == "user"


async def test_stopping_a_turn_leaves_jobs_alone(session: Session) -> None:
    job_id = job_of(await session.call("job.long", {"name": "a"}))
    await bench.entered.wait()
    assert session.cancel_running_calls() == 0
    bench.open.set()
    result = await session.jobs.wait(job_id, timeout_ms=30_000)
    assert result is not None and result.ok


@pytest.mark.proves("A-03")
async def test_stopping_a_turn_leaves_the_sub_agents_of_jobs_alone(tmp_path: Path) -> None:
    @tool(id="hold", side_effect="read", locks=[])
    async def hold() -> str:
        """Wait."""
        bench.entered.set()
        await bench.open.wait()
        return "held"

    reader = 'role = "subagent"\ndescription = "Holds."\ntools = ["hold"]\nmodel = "played:reader"'
    async with kernel_of(tmp_path, {"reader": reader}, tools=[hold], rules=["allow hold"]) as kernel:
        session = await kernel.session()
        below = PlaybackModel(call_reply(("hold", {})), text_reply("Done."))
        top = PlaybackModel(call_reply(task("reader", background=True)), text_reply("Begun."))
        agent = Agent(session, top, models=models(reader=below))
        await agent.complete("Go.")
        await bench.entered.wait()
        session.cancel_running_calls()
        bench.open.set()
        assert session.notifications is not None
        await session.notifications.wait_until_pending()
        assert '"held"' in str(below.requests[1].messages)


async def test_a_session_cannot_reach_a_job_of_another_session(kernel: Kernel, session: Session) -> None:
    bench.open.set()
    job_id = job_of(await session.call("job.long", {"name": "a"}))
    other = await kernel.session()
    for attempt in (
        other.jobs.get(job_id),
        other.jobs.read_output_bytes(job_id),
        other.jobs.wait(job_id, timeout_ms=1),
    ):
        with pytest.raises(ToolError, match="no job"):
            await attempt
    assert [job.id for job in await kernel.jobs.list()] == [job_id] and await other.jobs.list() == []


@pytest.mark.proves("X-10")
async def test_job_output_is_streamed_and_read_by_cursor_and_lines(session: Session) -> None:
    told: list[str] = []
    session.watch_events(lambda event: told.append(event.data["output"]) if "output" in event.data else None)
    text = "".join(f"zeile {number} ü\n" for number in range(50))
    job_id = job_of(await session.call("job.tell", {"text": text}))
    await session.jobs.wait(job_id, timeout_ms=30_000)
    assert "".join(told) == text
    cursor, read = 0, ""
    while True:
        piece = await session.jobs.read_output_bytes(job_id, cursor=cursor, max_bytes=7)
        cursor, read = piece.cursor, read + piece.text
        if not piece.has_more:
            break
    assert read == text
    lines = text.splitlines(keepends=True)
    assert (await session.jobs.read_line_range(job_id, offset=-2)).text == "".join(lines[-2:])
    middle = await session.jobs.read_line_range(job_id, offset=10, count=3)
    assert (middle.text, middle.first_line, middle.has_more) == ("".join(lines[10:13]), 10, True)
    assert (await session.jobs.read_line_range(job_id, offset=1_000)).text == ""
    assert (await session.jobs.read_output_bytes(job_id, cursor=10**9)).text == ""


@pytest.mark.proves("X-10")
async def test_output_of_a_foreground_call_is_streamed_while_it_runs(session: Session) -> None:
    told: list[str] = []
    session.watch_events(lambda event: told.append(event.data["output"]) if "output" in event.data else None)
    caller = asyncio.create_task(session.call("job.stays", {"name": "a"}))
    await bench.entered.wait()
    assert told == ["began a\n"] and not caller.done()
    bench.open.set()
    assert (await caller).data == "a"


async def test_job_output_and_events_contain_no_secret(tmp_path: Path) -> None:
    told: list[str] = []
    secrets = {"key": "s3cr3t-value-of-some-length"}
    async with temporary_kernel(tmp_path, tools=TOOLS, rules=["allow job.*"], secrets=secrets) as kernel:
        session = await kernel.session()
        session.watch_events(lambda event: told.append(str(event.data)))
        written = f"it is {secrets['key']}, really"
        job_id = job_of(await session.call("job.tell", {"text": written[::-1], "backwards": True}))
        await session.jobs.wait(job_id, timeout_ms=30_000)
        kept = (await session.jobs.read_output_bytes(job_id)).text
        assert kept == "it is [secret:key], really" and secrets["key"] not in "".join(told)
        assert secrets["key"] not in str(await session.jobs.list())


@pytest.mark.proves("X-04")
async def test_a_running_call_moves_to_the_background_with_its_locks_and_output(
    kernel: Kernel, session: Session
) -> None:
    caller = asyncio.create_task(session.call("job.either", {"name": "a"}))
    await bench.entered.wait()
    job = await session.move_to_background(f"{session.id}/1.0")
    answered = await caller
    assert job_of(answered) == job.id and "notes:X" in answered.data["note"], "it keeps what it holds"
    assert (await session.move_to_background(f"{session.id}/1.0")).id == job.id, "twice is once"
    bench.open.set()
    result = await session.jobs.wait(job.id, timeout_ms=30_000)
    assert result is not None and result.data == "a" and bench.ran == ["a"]
    assert (await session.jobs.read_output_bytes(job.id)).text == "began a\n", "also what it had written before"
    await kernel.log.flush()
    assert kinds(kernel, job.call_id) == ["proposed", "authorised", "intended", "backgrounded", "committed"]


@pytest.mark.proves("X-04")
async def test_concurrent_moves_of_a_call_to_the_background_return_one_job(session: Session) -> None:
    caller = asyncio.create_task(session.call("job.either", {"name": "a"}))
    await bench.entered.wait()
    jobs = await asyncio.gather(*(session.move_to_background(f"{session.id}/1.0") for _ in range(3)))
    assert {job.id for job in jobs} == {job_of(await caller)}
    bench.open.set()
    result = await session.jobs.wait(jobs[0].id, timeout_ms=30_000)
    assert result is not None and result.data == "a"


@pytest.mark.proves("X-04")
async def test_a_call_of_a_tool_that_is_not_promotable_cannot_move_to_the_background(session: Session) -> None:
    caller = asyncio.create_task(session.call("job.stays", {"name": "a"}))
    await bench.entered.wait()
    with pytest.raises(ToolError, match=r"cannot move to the background: tool `job\.stays` is not promotable"):
        await session.move_to_background(f"{session.id}/1.0")
    bench.open.set()
    assert (await caller).data == "a" and await session.jobs.list() == []


@pytest.mark.proves("X-12")
async def test_a_job_stopped_while_it_waits_has_the_usual_result_metadata(session: Session) -> None:
    first = job_of(await session.call("job.either", {"name": "a", "later": True}))
    await bench.entered.wait()
    second = job_of(await session.call("job.either", {"name": "b", "later": True}))
    for job_id in (second, first):
        await session.jobs.stop(job_id)
    waited, ran = [await session.jobs.wait(job_id, timeout_ms=0) for job_id in (second, first)]
    assert waited is not None and ran is not None and bench.ran == ["a"]
    assert waited.metadata["job_id"] == second and ran.metadata["job_id"] == first
    assert waited.metadata["skipped_locks"] == ran.metadata["skipped_locks"] == ["notes:X"]


@pytest.mark.proves("X-04")
async def test_a_call_whose_job_cannot_be_stored_continues_in_the_foreground(
    kernel: LocalKernel, session: Session
) -> None:
    caller = asyncio.create_task(session.call("job.either", {"name": "a"}))
    await bench.entered.wait()
    with contextlib.closing(sqlite3.connect(kernel.components.store.database.path)) as other:
        other.execute("ALTER TABLE job RENAME TO gone")
    with pytest.raises(LogUnavailable):
        await session.move_to_background(f"{session.id}/1.0")
    bench.open.set()
    assert (await caller).data == "a"


@pytest.mark.proves("X-05")
async def test_a_job_output_notes_the_characters_omitted_from_before_the_job(tmp_path: Path) -> None:
    flow, output = CallOutputWriter(SecretRedactor(), None, keep=True), JobOutputFile(tmp_path / "out.txt")
    for piece in ("a" * (MAX_HELD_CHARACTERS - 1), "bcd", "efg"):
        flow.feed(piece)
    flow.start_storing_in_file(output)
    flow.feed("after")
    flow.flush_held_output()
    output.close()
    left_out = "[5 characters from before the call became a job are omitted]"
    assert (tmp_path / "out.txt").read_text() == "a" * (MAX_HELD_CHARACTERS - 1) + f"b\n{left_out}\nafter"


@pytest.mark.proves("X-05")
async def test_a_job_still_waiting_when_its_kernel_closes_is_cancelled_and_not_run_later(
    tmp_path: Path,
) -> None:
    person = ScriptedApprovalHandler(approvals=[ApprovalAnswer("once")] * 2)
    async with temporary_kernel(tmp_path, tools=TOOLS, settings=SETTINGS) as kernel:
        session = await kernel.session(approval_handler=person)
        job_of(await session.call("job.either", {"name": "a", "later": True}))
        await bench.entered.wait()
        waits = job_of(await session.call("job.either", {"name": "b", "later": True}))
        id = session.id
    async with temporary_kernel(tmp_path, tools=TOOLS, settings=SETTINGS) as kernel:
        session = await kernel.session(id, approval_handler=person)
        assert (await session.jobs.get(waits)).state == "cancelled"
        result = await session.jobs.wait(waits, timeout_ms=0)
        assert result is not None and "Nothing was run" in str(result.error_text)
        assert await session.resume_suspended_calls() == [] and kernel.approvals.list_unresolved_requests(id) == []
    assert bench.ran == ["a"]


async def test_a_call_that_is_not_running_cannot_move_to_the_background(session: Session) -> None:
    with pytest.raises(ToolError, match="is not running"):
        await session.move_to_background("nothing")
    bench.open.set()
    assert (await session.call("job.either", {"name": "a"})).ok
    with pytest.raises(ToolError, match="is not running"):
        await session.move_to_background(f"{session.id}/1.0")
