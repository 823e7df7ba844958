"""Eager tasks: tasks and calls start immediately, and are cancelled like any other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest

from handrail import tool
from handrail.arbiter.stoppable_execution import EagerTaskCoroutine, StoppableTaskRunner, WorkStopped, start_eager_task
from handrail.store.database.group_writer import UncancellableWriteFuture
from handrail.testing.scripted_kernel import temporary_kernel

pytestmark = pytest.mark.proves("X-01", "X-08")

MARK: ContextVar[str] = ContextVar("MARK", default="")


async def beginning(work: Coroutine[Any, Any, Any], then: Callable[[StoppableTaskRunner], object]) -> Any:
    """Run ``work``, and do something else between its first step and its task's first turn."""
    run = StoppableTaskRunner(asyncio.get_running_loop(), 60)
    running = asyncio.ensure_future(run.run_in_separate_task(work, 60))
    asyncio.get_running_loop().call_soon(then, run)
    return await running


async def test_a_work_item_runs_all_its_steps_in_one_task_and_context() -> None:
    seen: list[Any] = []

    async def work() -> str:
        seen.append(asyncio.current_task())
        MARK.set("its own")
        async with asyncio.timeout(60):  # which the task that entered it has to leave
            await asyncio.sleep(0)
        seen.extend([asyncio.current_task(), MARK.get()])
        return "done"

    MARK.set("the caller's")
    before = asyncio.all_tasks()
    assert await beginning(work(), lambda _: seen.append("meanwhile")) == "done"
    first, meanwhile, last, mark = seen
    assert meanwhile == "meanwhile" and first is last and mark == "its own" and MARK.get() == "the caller's"
    assert first not in before and asyncio.all_tasks() == before


async def test_a_task_stopped_before_its_first_loop_turn_is_cancelled_at_its_await() -> None:
    cleaned: list[str] = []
    inner: list[asyncio.Task[Any]] = []

    async def waiting() -> None:
        await asyncio.Event().wait()

    async def work() -> None:
        inner.append(asyncio.ensure_future(waiting()))
        try:
            await inner[0]
        finally:
            await asyncio.sleep(0)
            cleaned.append("in its own time")

    with pytest.raises(WorkStopped):
        await beginning(work(), lambda run: run.stop("user"))
    assert cleaned == ["in its own time"] and inner[0].cancelled()


@pytest.mark.parametrize("ready", [False, True])
async def test_a_task_that_awaits_a_sleep_or_ready_future_is_stopped_too(ready: bool) -> None:
    heard: list[str] = []
    arrives = asyncio.get_running_loop().create_future()

    async def work() -> None:
        try:
            await (arrives if ready else asyncio.sleep(0))
        except asyncio.CancelledError:
            heard.append("cancelled")
            raise

    def stop(run: StoppableTaskRunner) -> None:
        arrives.set_result(None)
        run.stop("user")

    with pytest.raises(WorkStopped):
        await beginning(work(), stop)
    assert heard == ["cancelled"]


@pytest.mark.parametrize("failure", [None, LookupError("not written")])
async def test_a_task_that_awaits_an_uncancellable_write_is_cancelled_after_the_write(
    failure: Exception | None,
) -> None:
    loop, seen = asyncio.get_running_loop(), list[Any]()
    written = UncancellableWriteFuture(loop=loop)

    async def work() -> None:
        try:
            await written
        except BaseException as error:
            seen.extend([type(error), written.done()])
            raise

    task = start_eager_task(loop, work(), lambda _: None)
    task.cancel()
    for _ in range(3):
        await asyncio.sleep(0)
    assert seen == [] and not task.done()
    if failure is None:
        written.set_result(None)
    else:
        written.set_exception(failure)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == [asyncio.CancelledError, True]


async def test_a_task_that_ended_in_its_first_step_is_not_stopped() -> None:
    async def work() -> str:
        return "done"

    assert await beginning(work(), lambda run: run.stop("user")) == "done"


async def test_a_task_fails_with_the_error_of_its_first_step() -> None:
    async def failing(error: BaseException) -> None:
        raise error

    with pytest.raises(LookupError, match="its own"):
        await beginning(failing(LookupError("its own")), lambda _: None)
    with pytest.raises(RuntimeError, match="SystemExit"):
        await beginning(failing(SystemExit(1)), lambda _: None)
    with pytest.raises(RuntimeError, match="CancelledError"):
        await beginning(failing(asyncio.CancelledError()), lambda _: None)


@pytest.mark.parametrize("waits", [False, True])
async def test_a_direct_await_of_an_eager_coroutine_returns_its_result(waits: bool) -> None:
    async def work() -> str:
        if waits:
            await asyncio.sleep(0)
        return "done"

    begun = EagerTaskCoroutine(work())
    begun.take_first_step()
    assert await begun == "done"


async def test_a_task_that_stops_itself_in_its_first_step_runs_to_its_next_await() -> None:
    run = StoppableTaskRunner(asyncio.get_running_loop(), 60)
    seen: list[str] = []

    async def work() -> None:
        run.stop("call")
        seen.append("after that")
        await asyncio.Event().wait()

    with pytest.raises(WorkStopped) as stopped:
        await run.run_in_separate_task(work(), 60)
    assert stopped.value.reason == "call" and seen == ["after that"]


async def test_a_streamed_call_starts_as_soon_as_it_is_submitted(tmp_path: Path) -> None:
    seen: list[Any] = []

    @tool(id="test.mark", side_effect="read", locks=[])
    async def mark(n: int) -> int:
        """Say in which task it runs."""
        seen.append(n)
        assert asyncio.current_task() is not None
        seen.append(asyncio.current_task())
        await asyncio.sleep(0)
        seen.append(n)
        return n

    async with temporary_kernel(tmp_path, tools=[mark], rules=["allow test.mark"]) as kernel:
        turn, mine = (await kernel.session()).start_turn(), asyncio.current_task()
        first, second = (turn.start_streamed_call(("test.mark", {"n": n})) for n in (1, 2))
        assert [seen[0], seen[2]] == [1, 2] and len(seen) == 4, "before the event loop has gone on"
        assert seen[1] is first and seen[3] is second and asyncio.current_task() is mine
        assert [(await task).result.data for task in (first, second)] == [1, 2]
        assert seen[4:] == [1, 2]
