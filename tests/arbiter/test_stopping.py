"""Calls stopped by a timeout, a user, a shutdown or a lost caller: distinguished and recorded."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.arbiter.toolbox import ALLOW, TOOLS, gate, kinds_of, thread_may_end

from handrail import Event, Kernel, Session
from handrail.testing.scripted_kernel import temporary_kernel


@pytest.mark.proves("X-07")
async def test_a_timeout_returns_a_result_with_the_partial_output(session: Session) -> None:
    result = await session.call("test.slow", {})
    assert result.error_kind == "timeout"
    assert result.data == {"so far": "half"}


@pytest.mark.proves("X-07", "X-08")
async def test_a_call_that_ignores_its_timeout_is_answered_and_holds_its_locks_until_done(
    kernel: Kernel, session: Session
) -> None:
    result = await session.call("test.stubborn", {})
    assert result.error_kind == "timeout"
    assert result.metadata["still_running"] is True
    waiting = asyncio.create_task(session.call("test.stubborn", {}))
    events: list[Event] = []
    session.watch_events(events.append)
    while not any(event.kind == "awaiting-locks" for event in events):
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
async def test_a_thread_that_outlives_its_timeout_is_marked_and_recorded_when_it_ends(
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
async def test_a_user_stop_and_a_shutdown_have_different_reasons(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, tools=TOOLS, rules=ALLOW) as kernel:
        session = await kernel.session()
        stopped = asyncio.create_task(session.call("test.hold", {"name": "x"}))
        await gate.entered.wait()
        session.cancel_running_calls()
        result = await stopped
        assert (result.error_kind, result.metadata["stopped_by"]) == ("cancelled", "user")
        gate.entered.clear()
        running = asyncio.create_task(session.call("test.hold", {"name": "y"}))
        await gate.entered.wait()
    result = await running
    assert (result.error_kind, result.metadata["stopped_by"]) == ("cancelled", "shutdown")


@pytest.mark.proves("X-08", "G-01")
async def test_cancelling_the_caller_stops_and_records_the_call_and_releases_its_locks(
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
async def test_a_wait_for_a_lock_can_be_stopped_and_its_call_never_runs(kernel: Kernel, session: Session) -> None:
    holding = asyncio.create_task(session.call("test.hold", {"name": "x"}))
    await gate.entered.wait()
    events: list[Event] = []
    other = await kernel.session()
    other.watch_events(events.append)
    waiting = asyncio.create_task(other.call("test.note", {"text": "never"}))
    while not any(event.kind == "awaiting-locks" for event in events):
        await asyncio.sleep(0)
    other.cancel_running_calls()
    result = await waiting
    assert result.error_kind == "cancelled"
    gate.open.set()
    assert (await holding).ok
    assert gate.ran == ["x"]


@pytest.mark.proves("L-05")
async def test_a_wait_for_a_lock_has_a_separate_timeout_that_the_error_names(tmp_path: Path) -> None:
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


@pytest.mark.proves("X-07")
async def test_a_slow_command_ends_at_the_timeout_of_its_caller_and_keeps_its_output(
    tmp_path: Path,
) -> None:
    async with temporary_kernel(tmp_path, rules=["allow bash"]) as kernel:
        session = await kernel.session()
        for given_ms in (1_500, 15_000, 150_000):  # on a machine that is busy it takes longer to begin
            call = {"command": "echo begun; tail -f /dev/null", "timeout_ms": given_ms}
            result = await session.call("bash", call)
            assert result.error_kind == "timeout" and result.error_text is not None
            assert f"{given_ms} ms" in result.error_text and "timeout_ms" in result.error_text
            if result.data != {"output": ""}:
                break
        assert result.data == {"output": "begun\n"}


@pytest.mark.proves("X-08")
async def test_a_callers_cancellation_is_raised_again_unchanged(session: Session) -> None:
    async def caller() -> None:
        await session.call("test.hold", {"name": "x"})

    task = asyncio.create_task(caller())
    await gate.entered.wait()
    task.cancel("a scope's own sign")
    with pytest.raises(asyncio.CancelledError) as caught:
        await task
    assert caught.value.args == ("a scope's own sign",)


@pytest.mark.proves("X-07")
async def test_hanging_functions_do_not_block_other_work(tmp_path: Path) -> None:
    thread_may_end.clear()
    try:
        async with temporary_kernel(tmp_path, tools=TOOLS, rules=ALLOW, settings="[limits]\ngrace_ms = 5\n") as kernel:
            hanging = [await (await kernel.session()).call("test.thread_free", {}) for _ in range(40)]
            assert {result.error_kind for result in hanging} == {"timeout"}
            session = await kernel.session()
            (tmp_path / "ws" / "a.txt").write_text("here\n")
            assert (await session.call("read", {"path": "a.txt"})).data["text"] == "here"
            thread_may_end.set()
    finally:
        thread_may_end.set()
