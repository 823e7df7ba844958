"""Execution: stops, timeouts and cancellation at every moment, each recorded once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Literal

import pytest

from handrail.arbiter.stoppable_execution import (
    StoppableTaskRunner,
    WorkStillRunning,
    WorkStopped,
    await_deferring_cancellation,
)

Way = Literal["inline", "apart"]
both_ways = pytest.mark.parametrize("way", ["inline", "apart"])
pytestmark = pytest.mark.proves("X-08")


def execution(grace_s: float = 0.01) -> StoppableTaskRunner:
    return StoppableTaskRunner(asyncio.get_running_loop(), grace_s)


def begin(
    run: StoppableTaskRunner, way: Way, work: Coroutine[Any, Any, Any], timeout_s: float = 60
) -> Coroutine[Any, Any, Any]:
    return run.run_in_current_task(work, timeout_s) if way == "inline" else run.run_in_separate_task(work, timeout_s)


def cancelling() -> int:
    task = asyncio.current_task()
    assert task is not None
    return task.cancelling()


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class BlockedWork:
    """Work that waits until it is let go, and says how it ended."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.open = asyncio.Event()
        self.ended = ""

    async def work(self) -> str:
        self.entered.set()
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.ended = "cancelled"
            raise
        self.ended = "returned"
        return "value"


@both_ways
async def test_a_stop_cancels_the_work_and_leaves_no_pending_cancellation(way: Way) -> None:
    held, run = BlockedWork(), execution()

    async def stop_when_it_waits() -> None:
        await held.entered.wait()
        run.stop("shutdown")

    stopping = asyncio.create_task(stop_when_it_waits())
    with pytest.raises(WorkStopped) as stopped:
        await begin(run, way, held.work())
    await stopping
    assert stopped.value.reason == "shutdown"
    assert run.owed_cancellation is None
    assert held.ended == "cancelled"
    assert cancelling() == 0
    await turns()  # nothing strikes later


@both_ways
async def test_work_that_stops_itself_is_not_followed_by_a_later_cancellation(way: Way) -> None:
    run = execution()

    async def stops_itself(first: bool) -> str:
        if not first:
            await asyncio.sleep(0)
        run.stop("user")
        return "done all the same"

    for first in (True, False):
        run = execution()
        assert await begin(run, way, stops_itself(first)) == "done all the same"
        await turns()
        assert run.owed_cancellation is None
        assert cancelling() == 0


@both_ways
async def test_a_stop_in_the_first_step_of_work_cancels_it_at_its_next_await(way: Way) -> None:
    held, run = BlockedWork(), execution()

    async def stops_then_waits() -> str:
        run.stop("user")
        return await held.work()

    with pytest.raises(WorkStopped):
        async with asyncio.timeout(300):
            await begin(run, way, stops_then_waits())
    assert held.ended == "cancelled" and run.owed_cancellation is None and cancelling() == 0


@both_ways
async def test_the_original_cancellation_of_a_caller_is_kept_for_redelivery(way: Way) -> None:
    held, run = BlockedWork(), execution()

    async def caller() -> None:
        with pytest.raises(WorkStopped):
            await begin(run, way, held.work())

    task = asyncio.create_task(caller())
    await held.entered.wait()
    task.cancel("sign")
    await asyncio.wait([task])
    assert run.owed_cancellation is not None and run.owed_cancellation.args == ("sign",)
    assert run.reason == "user" and held.ended == "cancelled"


@both_ways
@pytest.mark.parametrize("stop_first", [True, False])
async def test_a_simultaneous_stop_and_cancellation_are_both_counted(way: Way, stop_first: bool) -> None:
    held, run = BlockedWork(), execution()
    left: list[int] = []

    async def caller() -> None:
        with pytest.raises(WorkStopped):
            await begin(run, way, held.work())
        left.append(cancelling())

    task = asyncio.create_task(caller())
    await held.entered.wait()
    if stop_first:
        run.stop("user")
        task.cancel()
    else:
        task.cancel()
        run.stop("user")
    await asyncio.wait([task])
    assert run.owed_cancellation is not None
    assert left == [1]  # the caller's own request is still counted, ours are not


@both_ways
async def test_a_cancellation_that_the_work_suppresses_still_reaches_the_caller(way: Way) -> None:
    run = execution(grace_s=60)
    entered = asyncio.Event()

    async def swallows() -> str:
        entered.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass
        return "never mind"

    async def caller() -> object:
        return await begin(run, way, swallows())

    task = asyncio.create_task(caller())
    await entered.wait()
    task.cancel()
    assert await task == "never mind"
    assert run.owed_cancellation is not None


@both_ways
async def test_a_cancellation_as_the_work_ends_still_reaches_the_caller(way: Way) -> None:
    held, run = BlockedWork(), execution()
    outcome: list[object] = []

    async def caller() -> None:
        try:
            outcome.append(await begin(run, way, held.work()))
        except WorkStopped:
            outcome.append("stopped")

    task = asyncio.create_task(caller())
    await held.entered.wait()
    held.open.set()
    task.cancel()
    await asyncio.wait([task])
    assert outcome in (["value"], ["stopped"])
    assert run.owed_cancellation is not None


@both_ways
@pytest.mark.parametrize("first", [True, False])
async def test_an_unrequested_cancellation_is_a_failure_of_the_work(way: Way, first: bool) -> None:
    run = execution()

    async def awaits_something_cancelled() -> None:
        if not first:
            await asyncio.sleep(0)
        gone = asyncio.get_running_loop().create_future()
        gone.cancel()
        await gone

    with pytest.raises(RuntimeError, match="cancelled"):
        await begin(run, way, awaits_something_cancelled())
    assert run.owed_cancellation is None and run.reason is None and cancelling() == 0


@both_ways
@pytest.mark.parametrize("first", [True, False])
async def test_work_that_raises_system_exit_only_fails(way: Way, first: bool) -> None:
    run = execution()

    async def exits() -> None:
        if not first:
            await asyncio.sleep(0)
        raise SystemExit(3)

    with pytest.raises(RuntimeError, match="SystemExit"):
        await begin(run, way, exits())


@both_ways
async def test_a_timeout_around_a_call_works_as_usual(way: Way) -> None:
    held, run = BlockedWork(), execution()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            with pytest.raises(WorkStopped):
                await begin(run, way, held.work())
            assert run.owed_cancellation is not None
            raise run.owed_cancellation
    assert cancelling() == 0


@both_ways
async def test_timeouts_and_task_groups_inside_the_work_do_not_affect_the_caller(way: Way) -> None:
    run = execution()

    async def failing() -> None:
        raise ValueError("one of the group")

    async def inside() -> str:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await asyncio.Event().wait()
        with pytest.raises(ExceptionGroup):
            async with asyncio.TaskGroup() as group:
                group.create_task(failing())
                await asyncio.Event().wait()
        return "went on"

    assert await begin(run, way, inside()) == "went on"
    assert run.owed_cancellation is None and run.reason is None and cancelling() == 0


@both_ways
async def test_a_stop_cancels_the_members_of_a_task_group_inside_the_work(way: Way) -> None:
    run, members = execution(), [BlockedWork(), BlockedWork()]

    async def inside() -> None:
        async with asyncio.TaskGroup() as group:
            for member in members:
                group.create_task(member.work())

    async def stop_when_both_wait() -> None:
        for member in members:
            await member.entered.wait()
        run.stop("user")

    stopping = asyncio.create_task(stop_when_both_wait())
    with pytest.raises(WorkStopped):
        await begin(run, way, inside())
    await stopping
    assert [member.ended for member in members] == ["cancelled", "cancelled"]
    assert run.owed_cancellation is None and cancelling() == 0


@both_ways
async def test_a_second_stop_does_not_change_the_reason(way: Way) -> None:
    held, run = BlockedWork(), execution()
    loop = asyncio.get_running_loop()
    loop.call_soon(run.stop, "user")
    loop.call_soon(run.stop, "shutdown")
    with pytest.raises(WorkStopped) as stopped:
        await begin(run, way, held.work())
    assert stopped.value.reason == "user" and cancelling() == 0


@both_ways
async def test_work_stopped_before_its_start_is_not_started(way: Way) -> None:
    held, run = BlockedWork(), execution()
    run.stop("user")
    with pytest.raises(WorkStopped):
        await begin(run, way, held.work())
    assert not held.entered.is_set()


@both_ways
async def test_a_timeout_is_distinguished_from_a_stop(way: Way) -> None:
    held, run = BlockedWork(), execution()
    with pytest.raises(WorkStopped) as stopped:
        await begin(run, way, held.work(), timeout_s=0.001)
    assert stopped.value.reason == "timeout" and run.owed_cancellation is None and cancelling() == 0


async def test_separate_work_that_ignores_a_stop_is_returned_as_a_running_task() -> None:
    run, may_end = execution(grace_s=0), asyncio.Event()

    async def stubborn() -> str:
        while not may_end.is_set():
            try:
                await may_end.wait()
            except asyncio.CancelledError:
                pass
        return "late"

    with pytest.raises(WorkStillRunning) as still:
        await run.run_in_separate_task(stubborn(), 0.001)
    may_end.set()
    assert await still.value.task == "late"


async def test_inline_work_that_swallows_its_cancellation_is_cancelled_again_until_it_ends() -> None:
    run = execution(grace_s=0.001)
    told = 0

    async def hard_of_hearing() -> None:
        nonlocal told
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                told += 1
                if told == 3:
                    raise

    with pytest.raises(WorkStopped):
        await run.run_in_current_task(hard_of_hearing(), 0.001)
    assert told == 3 and run.owed_cancellation is None and cancelling() == 0


async def test_a_stop_reaches_the_inner_and_the_outer_of_two_nested_executions() -> None:
    """As a tool's nested call: both are stopped in one moment, in one task, and each has to hear of it."""
    outer, inner, held = execution(), execution(), BlockedWork()
    went_on: list[str] = []

    async def nesting() -> None:
        with pytest.raises(WorkStopped):
            await inner.run_in_current_task(held.work())
        if inner.owed_cancellation is not None:
            raise inner.owed_cancellation
        went_on.append("as if nothing had happened")
        await asyncio.Event().wait()

    def stop_both() -> None:
        outer.stop("user")
        inner.stop("user")

    asyncio.get_running_loop().call_soon(stop_both)
    with pytest.raises(WorkStopped):
        async with asyncio.timeout(300):
            await outer.run_in_separate_task(nesting(), 60)
    assert went_on == [] and cancelling() == 0


@pytest.mark.parametrize("times", [1, 2, 5])
async def test_uninterruptible_work_runs_to_its_end_and_leaves_the_cancellation_owed(times: int) -> None:
    held, run = BlockedWork(), execution()

    async def caller() -> str:
        return await await_deferring_cancellation(held.work(), run)

    task = asyncio.create_task(caller())
    await held.entered.wait()
    for _ in range(times):
        task.cancel()
        await turns(2)
    held.open.set()
    assert await task == "value"
    assert run.owed_cancellation is not None and held.ended == "returned"


async def test_uncancellable_work_gets_each_stop_and_is_left_to_end() -> None:
    held, run = BlockedWork(), execution()
    told: list[str] = []
    run.on_stop = told.append
    running = asyncio.create_task(run.run_in_separate_task(held.work(), 60, cancellable=False))
    await held.entered.wait()
    run.stop("user")
    run.stop("shutdown")
    with pytest.raises(WorkStillRunning) as still:
        await running
    assert told == ["user", "user"]
    held.open.set()
    assert await still.value.task == "value"


async def _never_awaited(make: Callable[[], Awaitable[object]]) -> None:
    """Coroutines that are never begun are closed: no warning at their end (warnings are errors here)."""
    with pytest.raises(WorkStopped):
        await make()


@pytest.mark.filterwarnings("error")
@both_ways
async def test_no_coroutine_is_left_unawaited(way: Way) -> None:
    run = execution()
    run.stop("shutdown")
    await _never_awaited(lambda: begin(run, way, BlockedWork().work()))


@both_ways
async def test_each_of_many_equal_timeouts_ends_only_its_work(way: Way) -> None:
    held = [BlockedWork() for _ in range(5)]
    runs = [execution() for _ in held]
    tasks = [asyncio.create_task(begin(run, way, one.work(), 0.05)) for run, one in zip(runs, held, strict=True)]
    for one in held:
        await one.entered.wait()
    held[0].open.set()  # the first to end gives the next ones no more time
    assert await tasks[0] == "value"
    runs[3].pause_timeout()
    for number in (1, 2, 4):
        with pytest.raises(WorkStopped) as stopped:
            await tasks[number]
        assert stopped.value.reason == "timeout" and held[number].ended == "cancelled"
    assert runs[3].reason is None
    runs[3].resume_timeout()
    with pytest.raises(WorkStopped):
        await tasks[3]
    again = BlockedWork()
    with pytest.raises(WorkStopped):  # nothing is left of the earlier ones
        await begin(execution(), way, again.work(), 0.05)
    assert again.ended == "cancelled"
