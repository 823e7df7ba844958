"""Faulty tools, watchdogs and callers: each call has one answer and a complete record, and no lock is left."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from pathlib import Path
from typing import Any, cast

import pytest

from handrail import Event, Kernel, Runtime, Session, Tool, ToolSpec, tool
from handrail.testing.scripted_kernel import temporary_kernel

ALLOW = ["allow test.*", "allow read", "allow bash", "allow edit", "allow fs.*"]
SHORT = "[limits]\ngrace_ms = 20\n"


async def kinds_of(kernel: Kernel, call_id: str) -> list[str]:
    await kernel.log.flush()
    return [record.kind for record in kernel.log.reader.records(call=call_id)]


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class BlockedTool:
    """The inside of a tool, held open by a test."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.open = asyncio.Event()
        self.effects: list[str] = []


held = BlockedTool()
thread_may_end = threading.Event()
threads_entered = threading.Semaphore(0)


@pytest.fixture(autouse=True)
def afresh() -> None:
    held.__init__()
    thread_may_end.clear()
    while threads_entered.acquire(blocking=False):
        pass


@tool(id="test.tell", side_effect="read", locks=[])
async def tell(runtime: Runtime, waits: bool = False) -> str:
    """Report progress, and perhaps wait."""
    runtime.report_progress("half")
    if waits:
        await held.open.wait()
    return "told"


@tool(id="test.exit", side_effect="read", locks=[])
async def exits(waits: bool = False) -> str:
    """Exit."""
    if waits:
        await asyncio.sleep(0)
    raise SystemExit(3)


@tool(id="test.exit_apart", side_effect="external", locks=[])
async def exits_apart() -> str:
    """Exit."""
    raise SystemExit(3)


@tool(id="test.exit_thread", side_effect="read", locks=[])
def exits_thread() -> str:
    """Exit."""
    raise SystemExit(3)


@tool(id="test.interrupt_thread", side_effect="read", locks=[])
def interrupts_thread() -> str:
    """Raise what Ctrl-C raises."""
    raise KeyboardInterrupt


@tool(id="test.stop_iteration", side_effect="read", locks=[], timeout_ms=2_000)
def stops_iteration() -> str:
    """Let a StopIteration out."""
    return next(iter([]))


@tool(id="test.cancelled_inside", side_effect="read", locks=[])
async def cancelled_inside() -> str:
    """Await what was cancelled."""
    gone = asyncio.get_running_loop().create_future()
    gone.cancel()
    await gone
    return "never"


@tool(id="test.cancelled_apart", side_effect="external", locks=[])
async def cancelled_apart() -> str:
    """Await what was cancelled."""
    gone = asyncio.get_running_loop().create_future()
    gone.cancel()
    await gone
    return "never"


@tool(id="test.hold", side_effect="external", locks=["held:X"])
async def hold(text: str = "held") -> str:
    """Wait to be let go."""
    held.entered.set()
    await held.open.wait()
    held.effects.append(text)
    return text


@tool(id="test.long", side_effect="external", locks=[])
async def long(size: int) -> str:
    """A long output that is only ready when the tool has been told to stop."""
    held.entered.set()
    try:
        await held.open.wait()
    except asyncio.CancelledError:
        pass
    return "x" * size


@tool(id="test.effect", side_effect="external", locks=["held:X"])
async def effect(text: str) -> str:
    """Have an effect."""
    held.effects.append(text)
    return text


@tool(id="test.messy", side_effect="external", locks=[], timeout_ms=20)
async def messy() -> None:
    """Fail while being stopped."""
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        raise RuntimeError("the clean-up failed") from None


@tool(id="test.nest", side_effect="external", locks=["held:X"], requires={"capabilities": ["call"]})
async def nest(runtime: Runtime) -> str:
    """Call a tool that waits, then have an effect of its own."""
    await runtime.call("test.tell", {"waits": True})
    held.effects.append("as if nothing had happened")
    return "went on"


@tool(
    id="test.deaf",
    side_effect="external",
    locks=["held:X"],
    requires={"capabilities": ["call"]},
    timeout_ms=20,
)
async def deaf(runtime: Runtime, until: str = "open") -> str:
    """Do not heed a time-out, and make a call after it."""
    while not held.open.is_set():
        with contextlib.suppress(asyncio.CancelledError):
            await held.open.wait()
    inner = await runtime.call("test.effect", {"text": "after the time-out"})
    held.effects.append(str(inner.error_kind))
    return until


@tool(id="test.detach", side_effect="external", locks=["held:X"], requires={"capabilities": ["call"]})
async def detach(runtime: Runtime) -> str:
    """Leave a nested call behind."""
    left_behind.append(asyncio.ensure_future(runtime.call("test.hold", {})))
    await held.entered.wait()
    return "gone"


left_behind: list[asyncio.Future[Any]] = []


@tool(id="test.thread", side_effect="external", locks=[], timeout_ms=20)
def thread() -> str:
    """Hold a thread."""
    threads_entered.release()
    thread_may_end.wait(60)
    held.effects.append("thread")
    return "late"


@tool(id="test.loop_in_thread", side_effect="read", locks=[])
def loop_in_thread(runtime: Runtime) -> str:
    """Run a loop of its own."""

    async def inside() -> None:
        runtime.report_progress("from another loop")

    asyncio.run(inside())
    return "done"


class Broken(Tool):
    spec = ToolSpec(
        id="test.broken",
        description="Raises before there is anything to await.",
        parameters={"type": "object", "properties": {}},
        side_effect="read",
        locks=(),
    )

    def execute(self, args: dict[str, Any], runtime: Runtime) -> Any:
        raise ValueError("no coroutine comes of this")


TOOLS: tuple[Tool, ...] = (
    tell, exits, exits_apart, exits_thread, interrupts_thread, stops_iteration, cancelled_inside, cancelled_apart, hold,
    long, effect, messy, nest, deaf, detach, thread, loop_in_thread, Broken(),
)  # fmt: skip


@pytest.fixture
async def kernel(tmp_path: Path) -> Any:
    async with temporary_kernel(tmp_path, tools=TOOLS, rules=ALLOW, settings=SHORT) as opened:
        yield opened


@pytest.fixture
async def session(kernel: Kernel) -> Session:
    return await kernel.session()


@pytest.mark.proves("K-07", "L-01")
@pytest.mark.parametrize(
    ("name", "arguments", "word"),
    [
        ("test.exit", {}, "SystemExit"),
        ("test.exit", {"waits": True}, "SystemExit"),
        ("test.exit_apart", {}, "SystemExit"),
        ("test.exit_thread", {}, "SystemExit"),
        ("test.interrupt_thread", {}, "KeyboardInterrupt"),
        ("test.stop_iteration", {}, "StopIteration"),
        ("test.cancelled_inside", {}, "cancelled"),
        ("test.cancelled_apart", {}, "cancelled"),
        ("test.broken", {}, "no coroutine"),
    ],
)
async def test_an_exception_of_a_tool_becomes_the_result_of_its_call_only(
    kernel: Kernel, session: Session, name: str, arguments: dict[str, Any], word: str
) -> None:
    result = await session.call(name, arguments)
    assert result.error_kind == "backend"
    assert result.error_text is not None and word in result.error_text and name in result.error_text
    assert "Handrail failed" not in result.error_text
    await turns()
    assert await kinds_of(kernel, f"{session.id}/1.0") == ["proposed", "authorised", "intended", "committed"]
    assert (await session.call("test.tell", {})).data == "told"


@pytest.mark.proves("X-08")
async def test_a_tool_that_fails_during_its_timeout_is_reported_as_a_timeout(session: Session) -> None:
    result = await session.call("test.messy", {})
    assert result.error_kind == "timeout"


async def test_an_event_watcher_that_raises_does_not_affect_calls_or_other_watchers(session: Session) -> None:
    seen: list[str] = []
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))

    def broken(event: Event) -> None:
        raise RuntimeError(f"cannot show {event.kind}")

    session.watch_events(broken)
    session.watch_events(lambda event: seen.append(event.kind))
    result = await session.call("test.tell", {})
    assert result.data == "told"
    assert seen == ["proposed", "started", "progress", "finished"]
    assert len(complaints) == 4  # said where a program says such things, not swallowed


async def test_a_watcher_that_unsubscribes_during_an_event_takes_no_event_from_another_watcher(
    session: Session,
) -> None:
    seen: list[str] = []

    def once(event: Event) -> None:
        stop()
        stop()

    stop = session.watch_events(once)
    session.watch_events(lambda event: seen.append(event.kind))
    assert (await session.call("test.tell", {})).ok
    assert seen == ["proposed", "started", "progress", "finished"]


@pytest.mark.proves("X-08")
@pytest.mark.parametrize("at", ["proposed", "started", "progress"])
@pytest.mark.parametrize("waits", [True, False])
async def test_a_stop_from_an_event_watcher_stops_the_current_call_only(
    kernel: Kernel, session: Session, at: str, waits: bool
) -> None:

    def stop_there(event: Event) -> None:
        if event.kind == at:
            session.cancel_running_calls()

    stop = session.watch_events(stop_there)
    async with asyncio.timeout(300):
        result = await session.call("test.tell", {"waits": waits})
    stop()
    if at == "progress" and not waits:
        assert result.data == "told"  # it was done by then
    else:
        assert result.error_kind == "cancelled"
    await turns()
    assert (await session.call("test.tell", {})).ok
    assert (await kinds_of(kernel, f"{session.id}/1.0"))[-1] in ("committed", "rejected")


@pytest.mark.proves("X-08", "L-08")
async def test_a_stop_of_a_session_cancels_a_tool_during_its_nested_call(session: Session) -> None:
    events: list[Event] = []
    session.watch_events(events.append)
    call = asyncio.create_task(session.call("test.nest", {}))
    while not any(event.kind == "progress" for event in events):
        await asyncio.sleep(0)
    session.cancel_running_calls()
    result = await call
    assert result.error_kind == "cancelled" and "still_running" not in result.metadata
    assert held.effects == []


@pytest.mark.proves("X-07", "L-08")
async def test_a_tool_that_runs_on_after_its_timeout_can_make_no_more_calls(kernel: Kernel, session: Session) -> None:
    result = await session.call("test.deaf", {})
    assert result.metadata["still_running"] is True
    held.open.set()
    assert (await session.call("test.effect", {"text": "mine"})).ok  # waits for the late one's lock
    assert held.effects == ["cancelled", "mine"]
    assert await kinds_of(kernel, f"{session.id}/1.0.1") == ["proposed", "rejected"]


@pytest.mark.proves("L-08", "X-08")
async def test_a_detached_nested_call_is_cancelled_before_the_locks_are_released(session: Session) -> None:
    result = await session.call("test.detach", {})
    assert result.data == "gone"
    other = asyncio.create_task(session.call("test.effect", {"text": "later"}))
    await turns()
    inner = await left_behind.pop()
    assert inner.error_kind == "cancelled"  # it was ended with the tool that made it
    assert (await other).ok
    assert held.effects == ["later"]


@pytest.mark.proves("X-07")
async def test_hanging_threads_do_not_block_other_calls(kernel: Kernel, session: Session) -> None:
    Path(kernel.workdir, "a.txt").write_text("text\n")
    calls = asyncio.gather(*(session.call("test.thread", {}) for _ in range(40)))
    for _ in range(40):  # all of them run, though the loop's own pool has fewer threads
        assert await asyncio.get_running_loop().run_in_executor(None, threads_entered.acquire, True, 5)
    assert (await session.call("read", {"path": "a.txt"})).ok
    for result in await calls:
        assert result.metadata["still_running"] is True
    thread_may_end.set()


async def test_progress_from_another_event_loop_reaches_watchers_on_the_loop_of_the_kernel(session: Session) -> None:
    told: list[int] = []
    session.watch_events(lambda event: told.append(threading.get_ident()))
    assert (await session.call("test.loop_in_thread", {})).ok
    await turns()
    assert set(told) == {threading.get_ident()} and len(told) == 4


@pytest.mark.proves("T-07", "L-04")
async def test_fifty_concurrent_edits_of_one_file_all_succeed(kernel: Kernel, session: Session) -> None:
    path = Path(kernel.workdir, "list.txt")
    path.write_text("".join(f"line {n} old\n" for n in range(50)))
    assert (await session.call("read", {"path": "list.txt"})).ok
    results = await session.call_all(
        [("edit", {"path": "list.txt", "old": f"line {n} old", "new": f"line {n} new"}) for n in range(50)]
    )
    assert [result.error_text for result in results] == [None] * 50
    assert path.read_text() == "".join(f"line {n} new\n" for n in range(50))


def nested(depth: int) -> dict[str, Any]:
    deep: dict[str, Any] = {}
    for _ in range(depth):
        deep = {"a": deep}
    return deep


def endless() -> dict[str, Any]:
    around: dict[str, Any] = {}
    around["path"] = around
    return around


@pytest.mark.proves("K-05", "L-01")
@pytest.mark.parametrize(
    "arguments",
    [
        nested(10_000),
        {"path": nested(10_000)},
        {"path": "x" * 100_000_000},
        endless(),
        {"path": float("nan")},
        {"path": b"bytes"},
        {"path": object()},
        {1: 2},
        {"path": "\ud800"},
        {"path": 10**400},
    ],
    ids=["deep", "deep value", "100 MB", "endless", "nan", "bytes", "object", "key", "half a pair", "number"],
)
async def test_arguments_that_json_cannot_express_are_rejected_with_a_clear_error(
    kernel: Kernel, session: Session, arguments: dict[Any, Any]
) -> None:
    result = await session.call("read", cast("dict[str, Any]", arguments))
    assert result.error_kind == "invalid_input"
    assert result.error_text is not None and "Handrail failed" not in result.error_text
    assert len(result.error_text) < 2_000
    assert await kinds_of(kernel, f"{session.id}/1.0") == ["proposed", "rejected"]
    size = max(len(str(record.body)) for record in kernel.log.reader.records(call=f"{session.id}/1.0"))
    assert size < 20_000
