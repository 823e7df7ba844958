"""A running call that is promoted, stopped and cancelled in any order runs once and is answered once."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.arbiter.test_jobs import TOOLS, bench, kinds

from handrail import Kernel, Session, ToolError
from handrail.contract.services.job_and_tool_services import FINAL_JOB_STATES
from handrail.testing.scripted_kernel import temporary_kernel


@pytest.mark.proves("X-04")
@settings(max_examples=30)
@given(turns=st.integers(0, 12), stop=st.booleans(), cancel=st.booleans(), late=st.integers(0, 6))
def test_a_call_moved_to_the_background_runs_once_and_is_answered_once(
    tmp_path_factory: pytest.TempPathFactory, turns: int, stop: bool, cancel: bool, late: int
) -> None:
    async def scenario() -> None:
        bench.__init__()
        kernel, session = await opened()
        number = next(_numbers)
        caller = asyncio.create_task(session.call("job.either", {"name": str(number)}))
        await bench.entered.wait()
        call_id = next(iter(_lane(session).running_calls))
        promoting = asyncio.create_task(session.move_to_background(call_id))
        for turn in range(turns):
            if turn == late:
                if stop:
                    session.cancel_running_calls()
                elif cancel:
                    caller.cancel()
            await asyncio.sleep(0)
        bench.open.set()
        try:
            promoted: str | None = (await promoting).id
        except ToolError as error:
            promoted = None
            assert error.kind in ("conflict", "invalid_input")
        try:
            answer = await caller
            assert (promoted is None) == (answer.data is None or "job_id" not in answer.data)
        except asyncio.CancelledError:
            assert cancel
        if promoted is not None:
            await session.jobs.wait(promoted, timeout_ms=30_000)
            assert (await session.jobs.get(promoted)).state in FINAL_JOB_STATES
        assert bench.ran == [str(number)]
        await kernel.log.flush()
        assert kinds(kernel, call_id).count("committed") == 1
        assert kinds(kernel, call_id).count("backgrounded") == (promoted is not None)

    async def opened() -> tuple[Kernel, Session]:
        if not _shared:
            context = temporary_kernel(tmp_path_factory.mktemp("promoted"), tools=TOOLS, rules=["allow job.*"])
            kernel = await context.__aenter__()
            _shared.append((context, kernel, await kernel.session()))
        return _shared[0][1], _shared[0][2]

    _loop.run_until_complete(scenario())


_loop = asyncio.new_event_loop()
_numbers = itertools.count()
_shared: list[Any] = []


@pytest.fixture(scope="module", autouse=True)
def the_shared_kernel_is_closed() -> Any:
    yield
    if _shared:
        _loop.run_until_complete(_shared.pop()[0].__aexit__(None, None, None))
    _loop.close()


def _lane(session: Session) -> Any:
    return session.lane  # type: ignore[attr-defined]
