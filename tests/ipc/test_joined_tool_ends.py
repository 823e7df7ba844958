"""Tools of a joined process that do not end: stopped, abandoned, or lost with their process."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.arbiter.toolbox import kinds_of
from tests.ipc.workshop import Open, connected, workshop

from handrail import Event, Runtime, ToolError, tool
from handrail.contract.session_protocols import StopReason
from handrail.ipc.client.tool_host import describe_client_tools
from handrail.ipc.server.client_tools import ClientProcessTools
from handrail.ipc.wire.operation_dispatch import OperationTable


class ToolRecorder:
    """A tool's inside, seen from the test."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.open = asyncio.Event()
        self.thread_in = threading.Event()
        self.thread_may_end = threading.Event()
        self.heard: list[Any] = []


inside = ToolRecorder()
TIME_MS = 500
"""Of those that are to have begun before it is over: their process may get no turn for a while."""


@pytest.fixture(autouse=True)
def a_fresh_inside() -> None:
    inside.__init__()


@tool(id="t.wait", side_effect="external", locks=["place:X"], timeout_ms=TIME_MS)
async def wait(runtime: Runtime) -> str:
    """Wait for ever."""
    runtime.set_partial_result({"so far": "half"})
    inside.entered.set()
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        try:
            runtime.cancellation.raise_if_requested()
        except ToolError as error:
            inside.heard.append((runtime.cancellation.is_requested, error.kind))
        inside.cancelled.set()
        raise
    return "never"


@tool(id="t.look", side_effect="read", locks=["other:S"])
async def look() -> str:
    """Wait for ever, reading."""
    inside.entered.set()
    try:
        await asyncio.Event().wait()
    finally:
        inside.cancelled.set()
    return "never"


@tool(id="t.stubborn", side_effect="external", locks=["place:X"], timeout_ms=TIME_MS)
async def stubborn() -> str:
    """Does not heed its cancellation."""
    while not inside.open.is_set():
        try:
            await inside.open.wait()
        except asyncio.CancelledError:
            inside.cancelled.set()
    return "late"


@tool(id="t.thread", side_effect="external", locks=["place:X"], timeout_ms=TIME_MS)
def thread(runtime: Runtime) -> str:
    """Holds a thread until told to end."""
    runtime.set_partial_result({"so far": "a thread's"})
    inside.thread_in.set()
    inside.thread_may_end.wait(30)
    inside.heard.append(runtime.cancellation.is_requested)
    return "late"


@tool(id="t.next", side_effect="external", locks=["place:X"])
async def following() -> str:
    """Needs the place."""
    return "mine"


async def test_a_timeout_cancels_the_function_in_its_process_and_keeps_partial_output(tmp_path: Path) -> None:
    async with workshop(tmp_path, wait, grace_ms=5_000) as shop:
        result = await shop.session.call("t.wait", {})
        assert (result.error_kind, result.data) == ("timeout", {"so far": "half"})
        assert "still_running" not in result.metadata
        assert inside.heard == [(True, "timeout")]


@pytest.mark.proves("X-08")
@pytest.mark.parametrize(
    ("reason", "kind", "said"),
    [
        ("user", "cancelled", "`t.look` was stopped by the user."),
        ("parent", "cancelled", "`t.look` was aborted by parent."),
        ("budget", "limit", "`t.look` was stopped because the time budget of its run is used up."),
    ],
)
async def test_a_stop_cancels_the_function_and_the_result_names_the_stop_reason(
    tmp_path: Path, reason: StopReason, kind: str, said: str
) -> None:
    async with workshop(tmp_path, look, grace_ms=5_000) as shop:
        running = asyncio.create_task(shop.session.call("t.look", {}))
        await inside.entered.wait()
        shop.session.cancel_running_calls(reason)
        result = await running
        assert (result.error_kind, result.metadata["stopped_by"], result.error_text) == (kind, reason, said)
        assert inside.cancelled.is_set()


async def test_a_cancellation_during_the_start_of_a_client_tool_is_not_lost(tmp_path: Path) -> None:
    async with workshop(tmp_path, look, wait, grace_ms=5_000) as shop:
        for name in ("t.look", "t.wait"):
            for steps in range(12):
                running = asyncio.create_task(shop.session.call(name, {}))
                for _ in range(steps):
                    await asyncio.sleep(0)
                shop.session.cancel_running_calls()
                while not running.done():
                    shop.session.cancel_running_calls()
                    await asyncio.sleep(0)
                result = await running
                assert result.error_kind in ("cancelled", "timeout"), result


@pytest.mark.proves("L-07")
async def test_a_thread_that_outlives_its_timeout_keeps_its_locks_until_it_returns(tmp_path: Path) -> None:
    async with workshop(tmp_path, thread, following) as shop:
        result = await shop.session.call("t.thread", {})
        assert (result.error_kind, result.data) == ("timeout", {"so far": "a thread's"})
        assert result.metadata["still_running"] is True
        await _waits_for_the_place(shop)
        inside.thread_may_end.set()
        assert (await shop.session.call("t.next", {})).data == "mine"
        assert inside.heard == [True]  # it can ask, and is told
        assert (await kinds_of(shop.kernel, f"{shop.session.id}/1.0")).count("committed") == 2


async def test_a_coroutine_that_ignores_cancellation_keeps_its_locks_until_it_returns(tmp_path: Path) -> None:
    async with workshop(tmp_path, stubborn, following) as shop:
        result = await shop.session.call("t.stubborn", {})
        assert (result.error_kind, result.metadata["still_running"]) == ("timeout", True)
        assert inside.cancelled.is_set()
        await _waits_for_the_place(shop)
        inside.open.set()
        assert (await shop.session.call("t.next", {})).data == "mine"


async def _waits_for_the_place(shop: Open) -> None:
    """Whoever wants the place now waits for it."""
    other = await shop.kernel.session()
    waiting = asyncio.Event()

    def watch(event: Event) -> None:
        if event.kind == "awaiting-locks":
            waiting.set()

    other.watch_events(watch)
    wanting = asyncio.create_task(other.call("t.next", {}))
    await waiting.wait()
    other.cancel_running_calls()
    assert (await wanting).error_kind == "cancelled"


# ── the process goes ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.proves("L-07")
async def test_a_lost_process_interrupts_its_running_call_and_makes_later_ones_unavailable(
    tmp_path: Path,
) -> None:
    async with workshop(tmp_path, look, wait, following) as shop:
        running = asyncio.create_task(shop.session.call("t.look", {}))
        await inside.entered.wait()
        shop.theirs.drop("gone", quietly=True)
        result = await running
        assert result.error_kind == "interrupted"
        assert "It is unknown whether the call took effect" in str(result.error_text)
        await inside.cancelled.wait()  # and what ran without its locks is told to end
        later = await shop.session.call("t.next", {})
        assert later.error_kind == "unavailable"
        assert "t.next" in str(later.error_text)
        await shop.kernel.log.flush()
        *_, last = shop.kernel.log.reader.records(call=f"{shop.session.id}/1.0")
        assert last.body is not None
        assert last.body["result"]["metadata"]["error_kind"] == "interrupted"


async def test_an_interrupted_call_returns_its_partial_result(tmp_path: Path) -> None:
    @tool(id="t.copy", side_effect="external", locks=[])
    async def copy(runtime: Runtime) -> None:
        """Copy for ever."""
        runtime.set_partial_result({"copied": 3})
        await asyncio.Event().wait()

    async with workshop(tmp_path, copy) as shop:
        running = asyncio.create_task(shop.session.call("t.copy", {}))
        while not any(run.kept for run in shop.brought._runs.values()):  # pyright: ignore[reportPrivateUsage]
            await asyncio.sleep(0)
        shop.theirs.drop("gone", quietly=True)
        assert (await running).data == {"copied": 3}


async def test_a_lost_process_releases_the_locks_of_its_call(tmp_path: Path) -> None:
    @tool(id="own.next", side_effect="external", locks=["place:X"])
    async def own() -> str:
        """Needs the place, in the holder."""
        return "mine"

    async with workshop(tmp_path, thread, also=[own]) as shop:
        assert (await shop.session.call("t.thread", {})).metadata["still_running"] is True
        shop.theirs.drop("gone", quietly=True)
        assert (await shop.session.call("own.next", {})).data == "mine"
        inside.thread_may_end.set()


async def test_calls_of_the_next_holder_are_separate_from_those_of_a_lost_holder(tmp_path: Path) -> None:
    async with workshop(tmp_path, thread, look, grace_ms=5_000) as shop:
        loop = asyncio.get_running_loop()
        first = asyncio.create_task(shop.session.call("t.thread", {}))
        await loop.run_in_executor(None, inside.thread_in.wait)
        shop.theirs.drop("gone", quietly=True)
        assert (await first).error_kind == "interrupted"  # while its thread goes on
        theirs, ours = await connected()
        theirs.finish_handshake(OperationTable(shop.bench.requests, shop.bench.notifications), {})
        shop.bench.attach_connection(theirs)
        brought = ClientProcessTools(ours, describe_client_tools([thread, look]))
        ours.finish_handshake(OperationTable(brought.requests, brought.notifications), {})
        await shop.kernel.reload_tools(brought.tools)
        second = asyncio.create_task(shop.session.call("t.look", {}))  # counted from 1 again
        await inside.entered.wait()
        inside.thread_may_end.set()
        while not inside.heard:
            await asyncio.sleep(0)
        assert inside.heard == [True]  # it had been told to end
        shop.session.cancel_running_calls()
        assert (await second).error_kind == "cancelled"
        assert inside.cancelled.is_set()
        await ours.aclose()
