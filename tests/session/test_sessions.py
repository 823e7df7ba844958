"""Sessions that are resumed or end, also during work: IDs stay unique, answers and folders complete."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.kernel.doors import Opens, by_both_doors

from handrail import Event, Kernel, Runtime, ToolError, UsageError, tool
from handrail.contract.approval_requests import ApprovalAnswer, ApprovalRequest
from handrail.contract.session_protocols import Session
from handrail.kernel.local_kernel import LocalKernel
from handrail.store.state_folders import locate_folders
from handrail.testing.scripted_kernel import ScriptedApprovalHandler, temporary_kernel

ALLOW = ["allow test.*"]
SHORT = "[limits]\ngrace_ms = 20\n"


class Held:
    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.open = asyncio.Event()
        self.ran: list[str] = []


held = Held()


@pytest.fixture(autouse=True)
def afresh() -> None:
    held.__init__()


@tool(id="test.look", side_effect="read", locks=[])
async def look(name: str = "") -> str:
    """Look."""
    held.ran.append(name)
    return name


@tool(id="test.send", side_effect="external", locks=["outbox:X"])
async def send(name: str) -> str:
    """Send."""
    held.ran.append(name)
    return name


@tool(id="test.hold", side_effect="external", locks=["outbox:X"])
async def hold(runtime: Runtime, size: int = 0) -> str:
    """Wait; told to stop, end at leisure with a long output."""
    held.entered.set()
    try:
        await held.open.wait()
    except asyncio.CancelledError:
        await asyncio.sleep(0)
        if not size:
            raise
    return "x" * size


@tool(id="test.wait", side_effect="read", locks=[])
async def wait() -> str:
    """Wait."""
    held.entered.set()
    await held.open.wait()
    return "waited"


@tool(id="test.flood", side_effect="read", locks=[])
async def flood(runtime: Runtime, count: int) -> str:
    """Report much progress."""
    for number in range(count):
        runtime.report_progress(str(number))
    return "flooded"


TOOLS = (look, send, hold, wait, flood)


kernel_in = by_both_doors(tools=TOOLS, rules=ALLOW, settings=SHORT)


def session_folders(folder: Path, session_id: str) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in (folder / "state").rglob(session_id))


def kinds(kernel: Kernel, call_id: str) -> list[str]:
    return [record.kind for record in kernel.log.reader.records(call=call_id)]


# ── going on ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.proves("L-10")
async def test_call_ids_stay_unique_when_a_session_resumes(tmp_path: Path, kernel_in: Opens) -> None:
    async with kernel_in(tmp_path) as kernel:
        session = await kernel.session("ses_long")
        early = session.start_turn()  # its calls come last, so that the newest call is not of the highest turn
        for _ in range(3):
            assert (await session.call("test.look", {})).ok
        assert (await session.call("test.look", {}, key="77.0")).ok
        await early.call_all([("test.look", {}), ("test.look", {})])
    for _ in range(2):
        async with kernel_in(tmp_path) as kernel:
            session = await kernel.session("ses_long")
            assert all(result.ok for result in await session.call_all([("test.look", {}), ("test.look", {})]))
    async with kernel_in(tmp_path) as kernel:
        proposed = Counter(record.call_id for record in kernel.log.reader.records(kind="proposed"))
        assert len(proposed) == 3 + 1 + 2 + 4 and set(proposed.values()) == {1}


@pytest.mark.proves("L-10")
async def test_an_idempotency_key_returns_the_first_result_after_every_restart(
    tmp_path: Path, kernel_in: Opens
) -> None:
    for attempt in range(3):
        async with kernel_in(tmp_path) as kernel:
            session = await kernel.session("ses_keys")
            result = await session.call("test.send", {"name": "once"}, key="mail-1")
            assert result.data == "once" and result.metadata.get("replayed", False) is (attempt > 0)
    assert held.ran == ["once"]


@pytest.mark.proves("L-10")
async def test_many_concurrent_calls_with_one_idempotency_key_run_once(tmp_path: Path, kernel_in: Opens) -> None:
    async with kernel_in(tmp_path) as kernel:
        session = await kernel.session()
        calls = [asyncio.create_task(session.call("test.send", {"name": "n"}, key="k")) for _ in range(20)]
        await asyncio.sleep(0)
        for call in calls[::3]:
            call.cancel()
        results = await asyncio.gather(*calls, return_exceptions=True)
        answers = [result for result in results if not isinstance(result, BaseException)]
        assert answers and {result.data for result in answers} == {"n"}
        assert held.ran == ["n"]
        assert (await session.call("test.send", {"name": "n"}, key="k")).metadata["replayed"] is True


@pytest.mark.proves("L-10")
async def test_a_key_can_be_reused_after_its_call_was_cancelled_before_running(
    tmp_path: Path, kernel_in: Opens
) -> None:
    async with kernel_in(tmp_path) as kernel:
        session = await kernel.session()
        holding = asyncio.create_task(session.call("test.hold", {}))
        await held.entered.wait()
        events: list[Event] = []
        session.watch_events(events.append)
        waiting = asyncio.create_task(session.call("test.send", {"name": "later"}, key="k"))
        while not any(event.kind == "awaiting-locks" for event in events):
            await asyncio.sleep(0)
        session.cancel_running_calls()
        assert (await waiting).error_kind == "cancelled" and not (await holding).ok
        again = await session.call("test.send", {"name": "later"}, key="k")
        assert again.data == "later" and "replayed" not in again.metadata
        assert (await session.call("test.send", {"name": "later"}, key="k")).metadata["replayed"] is True
        assert (await session.call("test.send", {"name": "other"}, key="k")).error_kind == "conflict"
    assert held.ran == ["later"]


async def test_concurrent_openings_of_one_session_succeed_only_once(tmp_path: Path, kernel_in: Opens) -> None:
    async with kernel_in(tmp_path) as kernel:
        opened = await asyncio.gather(*(kernel.session("ses_one") for _ in range(5)), return_exceptions=True)
        assert sum(not isinstance(session, BaseException) for session in opened) == 1
        assert all(not isinstance(other, BaseException) or isinstance(other, UsageError) for other in opened)


async def test_a_session_can_be_opened_after_a_failed_attempt(tmp_path: Path, kernel_in: Opens) -> None:
    async with kernel_in(tmp_path) as kernel:
        with pytest.raises(Exception, match="rule"):
            await kernel.session("ses_again", rules=["no rule at all"])
        session = await kernel.session("ses_again")
        assert (await session.call("test.look", {})).ok


async def test_a_session_is_not_held_after_its_opening_is_cancelled(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, tools=[look], rules=ALLOW) as kernel:
        await (await kernel.session("ses_cut")).suspend()
        for turns in range(40):
            opening = asyncio.ensure_future(kernel.session("ses_cut"))
            for _ in range(turns):
                await asyncio.sleep(0)
            opening.cancel()
            await asyncio.wait({opening})
            if not opening.cancelled():
                await opening.result().suspend()
        await kernel.components.store.database.writer.flush()
        row = kernel.components.store.sessions.get("ses_cut")
        assert row is not None and row.holder is None, "nobody would be let to go on with it elsewhere"
        assert (await (await kernel.session("ses_cut")).call("test.look", {})).ok


# ── closing a session ────────────────────────────────────────────────────────────────────────────


@pytest.mark.proves("X-08")
@pytest.mark.parametrize("size", [0, 200_000])
async def test_closing_a_session_answers_open_calls_and_then_removes_its_folders(
    tmp_path: Path, kernel_in: Opens, size: int
) -> None:
    async with kernel_in(tmp_path) as kernel:
        session, other = await kernel.session("ses_gone"), await kernel.session("ses_stays")
        folders = locate_folders(tmp_path / "ws", tmp_path / "state")
        for name in ("ses_gone", "ses_stays"):  # as a program makes them
            folders.prepare_session_output(name)
            folders.prepare_session_scratch(name)
        first = asyncio.create_task(session.call("test.hold", {"size": size}))
        await held.entered.wait()
        calls = asyncio.gather(first, session.call("test.wait", {}), session.call("test.hold", {}))
        await asyncio.sleep(0)
        await session.close()
        results = await calls
        assert [result.error_kind for result in results][1:] == ["cancelled", "cancelled"]
        assert results[0].ok is bool(size)
        assert session_folders(tmp_path, "ses_gone") == []
        assert len(session_folders(tmp_path, "ses_stays")) == 2
        assert (await other.call("test.send", {"name": "free"})).ok
        await kernel.log.flush()
        last = list(kernel.log.reader.records())[-20:]
        closed = next(record.sequence for record in last if record.kind == "session-closed")
        assert all(record.sequence < closed for record in last if record.session_id == "ses_gone" and record.call_id)


async def test_a_closed_session_accepts_no_calls_and_creates_no_folders(tmp_path: Path, kernel_in: Opens) -> None:
    async with kernel_in(tmp_path) as kernel:
        session = await kernel.session("ses_gone")
        turn = session.start_turn()
        await session.close()
        await session.close()
        for attempt in (session.call("test.look", {}), session.call("test.look", {}, key="k")):
            with pytest.raises(UsageError, match="closed"):
                await attempt
        with pytest.raises(UsageError, match="closed"):
            session.start_turn()
        answers = await turn.call_all([("test.look", {}), ("test.send", {"name": "x"})])
        assert [answer.result.error_kind for answer in answers] == ["cancelled", "cancelled"]
        assert held.ran == [] and session_folders(tmp_path, "ses_gone") == []
        again = await kernel.session("ses_gone")
        assert (await again.call("test.look", {})).ok


# ── closing the kernel ───────────────────────────────────────────────────────────────────────────


@pytest.mark.proves("X-08", "G-01")
async def test_closing_the_kernel_answers_and_records_every_open_call(tmp_path: Path, kernel_in: Opens) -> None:
    person = ScriptedApprovalHandler([ApprovalAnswer("once")])
    person.may_answer.clear()
    async with temporary_kernel(
        tmp_path, tools=TOOLS, rules=["allow test.*", "ask test.look"], settings=SHORT
    ) as kernel:
        session = await kernel.session("ses_1", approval_handler=person)
        events: list[Event] = []
        session.watch_events(events.append)
        running = asyncio.create_task(session.call("test.hold", {}))
        await held.entered.wait()
        queued = asyncio.create_task(session.call("test.send", {"name": "never"}))
        asking = asyncio.create_task(session.call("test.look", {}))
        await person.request_received.wait()
        while not any(event.kind == "awaiting-locks" for event in events):
            await asyncio.sleep(0)
    results = [await call for call in (running, queued, asking)]
    assert [(result.error_kind, result.metadata.get("stopped_by")) for result in results] == [
        ("cancelled", "shutdown"),
        ("cancelled", "shutdown"),
        ("unavailable", None),  # it waits for a person, and goes on waiting
    ]
    assert results[2].metadata["awaiting_approval"] == person.requests[0].id
    assert all("log_error" not in result.metadata for result in results)
    async with kernel_in(tmp_path) as kernel:
        assert kernel.interrupted_calls == ()
        assert kinds(kernel, "ses_1/1.0")[-1] == "committed"
        assert kinds(kernel, "ses_1/2.0")[-1] == "rejected" and kinds(kernel, "ses_1/3.0")[-1] == "approval-requested"
        assert list(kernel.log.reader.records(kind="records-dropped")) == []
    assert held.ran == []


async def test_a_closed_kernel_runs_no_call_and_releases_its_state(tmp_path: Path, kernel_in: Opens) -> None:
    async with kernel_in(tmp_path) as kernel:
        session = await kernel.session()
        turn = session.start_turn()
        assert (await session.call("test.look", {"name": "before"})).ok
    with pytest.raises(UsageError, match="kernel"):
        await session.call("test.look", {"name": "after"})
    (answer,) = await turn.call_all([("test.look", {"name": "after"})])
    assert not answer.result.ok
    assert held.ran == ["before"]
    async with kernel_in(tmp_path):
        pass  # the lease and the database were given back


async def test_a_kernel_closes_and_releases_its_state_when_a_tool_fails_to_close(
    tmp_path: Path, kernel_in: Opens
) -> None:
    class Clinging(type(look)):  # type: ignore[misc]
        async def aclose(self) -> None:
            raise RuntimeError("will not end")

    clinging = Clinging(look.function, look.spec, _parameters_of(look))
    with pytest.raises(ExceptionGroup):
        async with temporary_kernel(tmp_path, tools=[clinging], rules=ALLOW) as kernel:
            assert (await (await kernel.session("ses_1")).call("test.look", {})).ok
    async with kernel_in(tmp_path) as kernel:
        assert kinds(kernel, "ses_1/1.0")[-1] == "committed"


# ── events ───────────────────────────────────────────────────────────────────────────────────────


async def test_the_event_stream_ends_when_the_session_or_the_kernel_closes(tmp_path: Path, kernel_in: Opens) -> None:
    async def read(session: Session, into: list[str]) -> None:
        async for event in session.events():
            into.append(event.kind)

    first: list[str] = []
    second: list[str] = []
    async with kernel_in(tmp_path) as kernel:
        closed, suspended = await kernel.session(), await kernel.session()
        readers = [asyncio.create_task(read(closed, first)), asyncio.create_task(read(suspended, second))]
        await asyncio.sleep(0)
        for each in (closed, suspended):
            assert (await each.call("test.look", {})).ok
        await closed.close()
        await readers[0]
    await readers[1]
    assert first == second == ["proposed", "started", "finished"]
    assert [event async for event in suspended.events()] == []


async def test_a_slow_event_reader_misses_progress_events_first_and_is_then_disconnected(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, tools=TOOLS, rules=ALLOW) as kernel:
        session = await kernel.session()
        reader = session.events()
        first = asyncio.ensure_future(anext(reader))
        await asyncio.sleep(0)
        assert (await session.call("test.flood", {"count": 30_000})).ok
        kinds_read = Counter([(await first).kind])
        for _ in range(10_000):
            kinds_read[(await anext(reader)).kind] += 1
        assert kinds_read == {"proposed": 1, "started": 1, "progress": 9_998, "finished": 1}
        turn = session.start_turn()
        for _ in range(7):
            await asyncio.gather(*(turn.call_all([("test.look", {})]) for _ in range(1_000)))
        with pytest.raises(UsageError, match="behind"):
            async for _ in reader:
                pass
        assert not session._lane.listeners  # pyright: ignore[reportPrivateUsage]


async def test_the_events_of_each_call_arrive_in_the_order_of_its_steps(tmp_path: Path, kernel_in: Opens) -> None:
    async with kernel_in(tmp_path) as kernel:
        session = await kernel.session()
        seen: dict[str, list[str]] = {}
        session.watch_events(lambda event: seen.setdefault(event.call_id, []).append(event.kind))
        await session.call_all([("test.send", {"name": str(n)}) for n in range(20)] + [("test.nothing", {})])
        for call_id, steps in seen.items():
            if call_id.endswith(".20"):
                assert steps == ["proposed", "rejected", "finished"]
            else:
                assert [step for step in steps if step != "awaiting-locks"] == ["proposed", "started", "finished"]


# ── people ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("how", ["raises", "nonsense", "cancels"])
async def test_a_failing_approval_handler_denies_its_call_and_no_other_call(tmp_path: Path, how: str) -> None:
    class Broken(ScriptedApprovalHandler):
        async def approve(self, request: ApprovalRequest) -> ApprovalAnswer:
            if how == "raises":
                raise ToolError("the terminal is gone")
            if how == "cancels":
                gone = asyncio.get_running_loop().create_future()
                gone.cancel()
                await gone
            return None  # type: ignore[return-value]

    async with temporary_kernel(tmp_path, tools=TOOLS, rules=["allow test.*", "ask test.send"]) as kernel:
        session = await kernel.session(approval_handler=Broken())
        refused, fine = await session.call_all([("test.send", {"name": "x"}), ("test.look", {"name": "y"})])
        assert refused.error_kind == "denied" and fine.ok
        assert refused.error_text is not None and "could not be asked" in refused.error_text
        await kernel.log.flush()
        assert kinds(kernel, f"{session.id}/1.0")[-1] == "rejected"
    assert held.ran == ["y"]


# ── nothing that only grows ──────────────────────────────────────────────────────────────────────


async def grown(kernel: Kernel, session: Session, calls: int) -> tuple[int, int]:
    """Objects alive after some calls of every kind, less those before; and the tasks left."""

    async def some(count: int) -> None:
        for start in range(0, count, 10):
            await session.call_all([("test.look", {"name": "n"})] * 4 + [("test.nothing", {}), ("test.look", "{bad")])
            await session.call("test.send", {"name": "n"})
            await session.call("test.flood", {"count": 1})
            await session.call("test.look", {"name": "n"}, key=f"k{start}-{calls}")
            reader = session.events()
            pending = asyncio.ensure_future(anext(reader))
            await asyncio.sleep(0)
            await session.call("test.look", {"name": "n"})
            await pending
            await reader.aclose()  # type: ignore[attr-defined]
            held.ran.clear()

    await kernel.find_tools("look", keywords_only=True)  # else the words of the search load at some moment in between
    await some(200)
    await kernel.log.flush()
    gc.collect()
    before, tasks = len(gc.get_objects()), len(asyncio.all_tasks())
    await some(calls)
    await kernel.log.flush()
    gc.collect()
    return len(gc.get_objects()) - before, len(asyncio.all_tasks()) - tasks


async def test_a_long_session_does_not_keep_its_calls_in_memory(tmp_path: Path, kernel_in: Opens) -> None:
    async with kernel_in(tmp_path) as kernel:
        session = await kernel.session()
        objects, tasks = await grown(kernel, session, 500)
        assert objects < 250 and tasks == 0
        if isinstance(kernel, LocalKernel):
            assert kernel.components.arbiter.locks.active_resource_count == 0


def _parameters_of(made: Any) -> Any:
    from handrail.contract.tool.decorator import inspect_function_parameters

    return inspect_function_parameters(made.function, "look", {}, None, {})


@pytest.mark.proves("P-04")
@pytest.mark.parametrize("rule", ["deny reed", "deny file__patch", "deny read ../secret/**", "allow todo nothing=1"])
async def test_a_rule_that_can_never_match_is_refused_and_the_other_rules_apply(tmp_path: Path, rule: str) -> None:
    """A deny of an unknown tool name would silently restrict nothing."""
    async with temporary_kernel(tmp_path) as kernel:
        (tmp_path / "ws" / "a").write_text("x")
        session = await kernel.session()
        with pytest.raises(ValueError, match=rule.split()[1]):
            session.add_rules("deny read", rule)
        assert (await session.call("read", {"path": "a"})).error_kind == "denied"


async def test_a_session_gets_folders_with_its_first_program_or_long_output(tmp_path: Path) -> None:
    @tool(id="talk", side_effect="read", locks=[])
    async def talk() -> str:
        """Return more than fits into a result."""
        return "word " * 100_000

    def found() -> list[int]:
        return [len(session_folders(tmp_path, f"ses_{name}")) for name in ("one", "two", "three")]

    async with temporary_kernel(tmp_path, tools=[talk], rules=["allow bash", "allow talk"]) as kernel:
        (tmp_path / "ws" / "a.txt").write_text("a")
        one, two, three = [await kernel.session(f"ses_{name}") for name in ("one", "two", "three")]
        for session in (one, two, three):
            assert (await session.call("read", {"path": "a.txt"})).ok
        assert found() == [0, 0, 0]
        assert (await one.call("bash", {"command": "echo x > home"})).ok
        assert found() == [2, 0, 0]
        shown = (await two.call("talk", {})).metadata["output_path"]
        assert "/output/" in shown and (await two.call("read", {"path": shown, "limit": 1})).ok
        assert found() == [2, 1, 0]
        (tmp_path / "state" / "scratch").chmod(0o777)
        refused = await three.call("bash", {"command": "true"})
        assert refused.error_kind == "unavailable" and "chmod 700" in (refused.error_text or "")
        (tmp_path / "state" / "scratch").chmod(0o700)
        assert (await three.call("bash", {"command": "true"})).ok
        await three.close()
        assert found() == [2, 1, 0]
