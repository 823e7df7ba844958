"""Ends of sessions, calls and processes with a shared kernel: nothing is left over or repeated."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.kernel.guests import joined_kernel, second, sizes
from tests.kernel.test_agents import put_agent

from handrail import Kernel, LoadError, Runtime, StartError, Tool, ToolSpec, UsageError, tool
from handrail.contract.approval_requests import ApprovalAnswer
from handrail.ipc.client.remote_session import RemoteSession
from handrail.ipc.server import ipc_server
from handrail.kernel.local_kernel import LocalKernel
from handrail.kernel.remote_kernel import RemoteKernel
from handrail.testing.scripted_kernel import ScriptedApprovalHandler, temporary_kernel

pytestmark = pytest.mark.proves("L-07")
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


@tool(id="test.hold", side_effect="external", locks=["outbox:X"])
async def hold() -> str:
    """Wait."""
    held.ran.append("hold")
    held.entered.set()
    await held.open.wait()
    return "held"


@tool(id="test.send", side_effect="external", locks=["outbox:X"])
async def send(name: str) -> str:
    """Send."""
    held.ran.append(name)
    return name


class StatefulResource(Tool):
    """A tool with state between calls."""

    spec = ToolSpec(id="test.stays", description="Stays.", side_effect="read", locks=())

    def __init__(self) -> None:
        self.ended = 0

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        return "stays"

    async def aclose(self) -> None:
        self.ended += 1


async def until(what: Callable[[], bool]) -> None:
    while not what():
        await asyncio.sleep(0)


def lose(joined: RemoteKernel, why: str = "the test cut it") -> None:
    """Cut its connection, as a broken line would."""
    standing = joined.ipc_client.current_connection
    assert standing is not None
    standing.drop(why, quietly=True)


# ── cancelled ────────────────────────────────────────────────────────────────────────────────────


async def methods(kernel: RemoteKernel) -> list[Callable[[], Any]]:
    session = await kernel.session("ses_open")
    turn = session.start_turn
    return [
        lambda: kernel.session("ses_new"),
        kernel.session,
        lambda: kernel.fork_session("ses_open"),
        lambda: kernel.explain_call("glob", {"pattern": "*"}),
        kernel.reload_tools,
        kernel.log.flush,
        lambda: session.call("glob", {"pattern": "*"}),
        lambda: session.call("test.send", {"name": "s"}),
        lambda: session.call("test.send", {"name": "k"}, key="k"),
        lambda: turn().call_all([("test.send", {"name": "a"}), ("test.send", {"name": "b"})]),
        lambda: session.recover_result("ses_open/1.0"),
        session.resume_suspended_calls,
        session.read_parent_instructions,
        session.history.read_stored_messages,
        lambda: session.history.store_messages([(0, {"role": "user"})]),
    ]


@pytest.mark.parametrize("lost", [False, True])
async def test_a_cancelled_request_leaves_no_state_and_is_recorded_once(tmp_path: Path, lost: bool) -> None:
    async with temporary_kernel(tmp_path, settings=SHORT) as holder:
        async with joined_kernel(tmp_path, tools=[send], rules=["allow test.*"]) as joined:
            count = len(await methods(joined))
            await (await joined.session("ses_open_too")).suspend()
            for index in range(count):
                for steps in (0, 1, 2, 3, 5, 8, 20):
                    method = (await methods_of(joined))[index]
                    task: asyncio.Task[object] = asyncio.ensure_future(method())
                    for _ in range(steps):
                        await asyncio.sleep(0)
                    if lost and steps % 2:
                        lose(joined)
                    task.cancel()
                    try:
                        outcome: object = await task
                        if isinstance(outcome, RemoteSession):
                            await outcome.suspend()
                    except (asyncio.CancelledError, UsageError):
                        pass
                    await quiet(joined, holder)
            await joined.log.flush()
            ends: dict[str, list[str]] = {}
            for record in holder.log.reader.records():
                if record.call_id and record.kind in ("committed", "rejected", "interrupted"):
                    ends.setdefault(record.call_id, []).append(record.kind)
            proposed = [record.call_id for record in holder.log.reader.records(kind="proposed")]
            for call, found in ends.items():
                if "/key:" in call:  # one that was stopped before it ran may be asked again, and be stopped again
                    ends[call] = [end for end in found if end != "refused"] or found[:1]
            assert {call: found for call, found in ends.items() if len(found) != 1} == {}
            once = [call for call in proposed if "/key:" not in call]
            assert len(set(once)) == len(once) and set(proposed) == ends.keys()
            began = [record.call_id for record in holder.log.reader.records(kind="intended")]
            assert len(held.ran) <= len(began)
        await until(lambda: sizes(holder)["guests"] == 0)
        assert sizes(holder)["sessions"] == 0


async def methods_of(joined: RemoteKernel) -> list[Callable[[], Any]]:
    await (await current(joined)).suspend()
    return await methods(joined)


async def current(joined: RemoteKernel) -> Any:
    sessions = joined._sessions  # pyright: ignore[reportPrivateUsage]
    return sessions["ses_open"] if "ses_open" in sessions else await joined.session("ses_open")


async def quiet(joined: RemoteKernel, holder: LocalKernel) -> None:
    """Return when nothing is under way any more."""
    membership = joined.ipc_client
    await membership.wait_for_connection()
    await until(lambda: not membership._tasks)  # pyright: ignore[reportPrivateUsage]
    standing = await membership.wait_for_connection()
    await until(lambda: not standing._pending)  # pyright: ignore[reportPrivateUsage]
    await until(lambda: sizes(holder)["guests"] == 1 and not sizes(holder)["left"])
    if "ses_new" not in joined._sessions:  # pyright: ignore[reportPrivateUsage]
        await until(lambda: "ses_new" not in holder.sessions.sessions_by_id)


# ── a line that breaks ───────────────────────────────────────────────────────────────────────────


async def test_a_call_whose_connection_breaks_runs_once_and_returns_its_result(tmp_path: Path) -> None:
    async with (
        temporary_kernel(tmp_path, settings=SHORT),
        joined_kernel(tmp_path, rules=["allow write"]) as joined,
    ):
        session = await joined.session()
        for number in range(30):
            calls = [("write", {"path": f"{number}.{n}", "content": "x"}) for n in range(3)]
            reply = asyncio.create_task(session.call_all(calls))
            for _ in range(number):
                await asyncio.sleep(0)
            lose(joined)
            results = await reply
            assert [result.ok for result in results] == [True] * 3, [result.error_text for result in results]
        await joined.log.flush()
        written = [row.call_id for row in joined.log.reader.calls(limit=1000) if row.tool == "write"]
        began = [r.call_id for r in joined.log.reader.records(kind="intended") if r.call_id in written]
        assert len(began) == 90, "nothing ran twice"


async def test_rules_added_during_a_change_of_holder_apply_at_the_next_holder(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path), joined_kernel(tmp_path, rules=["allow write"]) as joined:
        session, others = await joined.session(), [await joined.session() for _ in range(3)]
        assert others
        for number in range(12):
            lose(joined)
            for _ in range(number * 3):
                await asyncio.sleep(0)
            session.add_rules(f"deny write {number}")
            assert (await session.call("write", {"path": str(number), "content": ""})).error_kind == "denied", number
        assert (await session.call("write", {"path": "free", "content": ""})).ok


async def test_a_session_that_the_next_holder_refuses_ends_and_other_sessions_continue(tmp_path: Path) -> None:
    manifest = put_agent(tmp_path, "reviewer", "")
    async with temporary_kernel(tmp_path), joined_kernel(tmp_path) as joined:
        gone, stays = await joined.session("ses_gone", agent="reviewer"), await joined.session("ses_stays")
        assert (await gone.call("glob", {"pattern": "*"})).ok
        manifest.unlink()
        lose(joined)
        assert (await stays.call("glob", {"pattern": "*"})).ok
        assert gone.is_closed
        with pytest.raises(UsageError, match="reviewer"):
            await gone.call("glob", {"pattern": "*"})


# ── the holder ends ──────────────────────────────────────────────────────────────────────────────


async def test_a_closing_holder_answers_or_hands_over_the_calls_of_joined_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ipc_server, "_DRAIN_TIMEOUT_S", 0.1)  # what has begun never ends by itself here
    person = ScriptedApprovalHandler([ApprovalAnswer("once")])
    person.may_answer.clear()
    async with temporary_kernel(tmp_path, settings=SHORT) as holder:
        joining = second(tmp_path, tools=[hold, send], rules=["allow test.*"])
        joined = await joining.__aenter__()
        session, asking = await joined.session("ses_a"), await joined.session("ses_b", approval_handler=person)
        events: list[str] = []
        session.watch_events(lambda event: events.append(event.kind))
        running = asyncio.create_task(session.call("test.hold", {}))
        await held.entered.wait()
        waiting = asyncio.create_task(session.call("test.send", {"name": "handed on"}))
        await until(lambda: "awaiting-locks" in events)
        asked = asyncio.create_task(asking.call("write", {"path": "a", "content": "x"}))
        await person.request_received.wait()
        assert sizes(holder)["guest._sessions"] == 2
    assert (await running).error_kind == "cancelled"
    assert (await waiting).data == "handed on"
    person.may_answer.set()
    assert (await asked).ok
    assert len({request.id for request in person.requests}) == 1
    await joining.__aexit__(None, None, None)
    assert held.ran == ["hold", "handed on"]


async def test_a_joined_process_that_closes_cancels_its_running_calls(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, settings=SHORT) as holder:
        async with joined_kernel(tmp_path, tools=[hold], rules=["allow test.*"]) as joined:
            session = await joined.session("ses_1")
            running = asyncio.create_task(session.call("test.hold", {}))
            await held.entered.wait()
        result = await running
        assert (result.error_kind, result.metadata.get("stopped_by")) == ("cancelled", "shutdown")
        await until(lambda: sizes(holder)["guests"] == 0)
        assert sizes(holder)["sessions"] == 0


async def test_a_joined_process_that_closes_without_a_holder_does_not_take_over(tmp_path: Path) -> None:
    holding = temporary_kernel(tmp_path)
    await holding.__aenter__()
    joining = second(tmp_path)
    joined = await joining.__aenter__()
    session = await joined.session("ses_left")
    await holding.__aexit__(None, None, None)
    await joining.__aexit__(None, None, None)
    assert session.is_closed
    async with temporary_kernel(tmp_path) as kernel:
        assert (await (await kernel.session("ses_left")).call("glob", {"pattern": "*"})).ok


async def test_consecutive_holders_hand_over_the_workspace_without_interrupted_calls(tmp_path: Path) -> None:
    (tmp_path / "ws").mkdir()
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "handrail.toml").touch()
    opening = [second(tmp_path, rules=["allow write"]) for _ in range(4)]
    kernels: list[Kernel] = [await one.__aenter__() for one in opening]
    sessions = [await kernel.session(f"ses_{n}") for n, kernel in enumerate(kernels)]
    for first, one in enumerate(opening):
        for number, session in enumerate(sessions):
            if number >= first:
                assert (await session.call("write", {"path": f"{first}-{number}", "content": ""})).ok
        await one.__aexit__(None, None, None)
    assert len(list((tmp_path / "ws").iterdir())) == 4 + 3 + 2 + 1
    async with temporary_kernel(tmp_path) as kernel:
        assert kernel.interrupted_calls == ()
        assert list(Path(kernel.state_folder).glob("*.sock")) and not kernel.approvals.list_pending()


# ── tools that were brought ──────────────────────────────────────────────────────────────────────


async def test_a_joined_process_that_leaves_closes_only_its_own_tools(tmp_path: Path) -> None:
    ours, theirs = StatefulResource(), StatefulResource()
    async with temporary_kernel(tmp_path, tools=[ours], rules=["allow *"]) as holder:
        before = sizes(holder)
        async with joined_kernel(tmp_path, tools=[theirs], rules=["allow *"]) as joined:
            assert (await (await joined.session()).call("test.stays", {})).ok
        assert (theirs.ended, ours.ended) == (1, 0)
        await until(lambda: sizes(holder) == before)
        assert (await (await holder.session()).call("test.stays", {})).ok
    assert (theirs.ended, ours.ended) == (1, 1)


async def test_a_reload_with_faults_keeps_the_old_tools_even_at_the_next_holder(tmp_path: Path) -> None:
    @tool(id="read", side_effect="read", locks=[])
    async def impostor() -> str:
        """Pretend."""
        return "owned"

    async with temporary_kernel(tmp_path), joined_kernel(tmp_path, tools=[send], rules=["allow *"]) as joined:
        before = joined.generation.number
        with pytest.raises(LoadError, match="read"):
            await joined.reload_tools(tools=[impostor])
        assert joined.generation.number == before
        lose(joined)
        assert (await (await joined.session()).call("test.send", {"name": "still"})).data == "still"


async def test_a_process_that_joined_without_tools_can_add_some_later(tmp_path: Path) -> None:
    @tool(id="read", side_effect="read", locks=[])
    async def impostor() -> str:
        """Pretend."""
        return "owned"

    rules = ["allow test.*"]
    async with temporary_kernel(tmp_path, rules=rules) as holder, joined_kernel(tmp_path, rules=rules) as joined:
        before = sizes(holder)
        ours, theirs = await holder.session("ses_held"), await joined.session("ses_joined")
        with pytest.raises(LoadError, match="read"):
            await joined.reload_tools(tools=[impostor])
        old = theirs.start_turn()
        assert (await joined.reload_tools(tools=[])).added == ()
        assert (await joined.reload_tools(tools=[send])).added == ("test.send",)
        assert (await theirs.call("test.send", {"name": "later"})).data == "later"
        assert (await old.call_all([("test.send", {"name": "old"})]))[0].result.error_kind == "unknown_tool"
        assert (await ours.call("test.send", {"name": "ours"})).error_kind == "unknown_tool"
        assert (await holder.reload_tools()).added == ()
        assert (await joined.reload_tools(tools=[hold])).removed == ("test.send",)
        assert "test.send" not in joined.generation.entries and "test.hold" in joined.generation.entries
        await joined.reload_tools(tools=[send])
        lose(joined)  # and the next holder has them from the beginning
        assert (await theirs.call("test.send", {"name": "on"})).data == "on"
        await theirs.close()
        await ours.close()
        assert held.ran == ["later", "on"]
    assert before["authorities"] == 2


# ── where kernels are opened ─────────────────────────────────────────────────────────────────────


async def test_a_kernel_on_another_event_loop_of_the_same_process_can_join(tmp_path: Path) -> None:
    told: list[object] = []

    async def elsewhere() -> None:
        async with joined_kernel(tmp_path, rules=["allow write"]) as joined:
            session = await joined.session()
            told.append((await session.call("write", {"path": "a", "content": "x"})).ok)

    async with temporary_kernel(tmp_path) as holder:
        thread = threading.Thread(target=lambda: asyncio.run(elsewhere()))
        thread.start()
        await asyncio.to_thread(thread.join)
        assert told == [True] and (tmp_path / "ws" / "a").exists()
        await until(lambda: sizes(holder)["guests"] == 0)


async def test_only_one_of_many_processes_opens_a_session(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path), joined_kernel(tmp_path) as one, joined_kernel(tmp_path) as other:
        opening = [kernel.session("ses_1") for kernel in (one, other) for _ in range(3)]
        opened = await asyncio.gather(*opening, return_exceptions=True)
        assert sum(not isinstance(found, BaseException) for found in opened) == 1
        assert all(isinstance(found, UsageError) for found in opened if isinstance(found, BaseException))


async def test_a_joined_kernel_lists_the_same_initial_rules_as_its_holder(tmp_path: Path) -> None:
    workspace = 'rules = ["allow bash make*", "ask write docs/*", "deny write secret/*"]\n'
    (tmp_path / "ws").mkdir()
    (tmp_path / "ws" / "handrail.toml").write_text(workspace)
    async with (
        temporary_kernel(tmp_path, rules=["allow glob"]) as holder,
        joined_kernel(tmp_path, rules=["allow glob"]) as joined,
    ):
        assert [*joined.initial_rules] == [*holder.initial_rules]
        assert any(rule.narrows for rule in joined.initial_rules)
        assert joined.default_agent == holder.default_agent and joined.sandbox_tier == holder.sandbox_tier


async def test_a_failed_join_raises_an_error_and_leaves_no_state(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path) as holder:
        before, tasks = sizes(holder), asyncio.all_tasks()
        for _ in range(3):
            with pytest.raises((StartError, UsageError), match="nobody"):
                async with second(tmp_path, agent="nobody"):
                    pass
        await until(lambda: sizes(holder) == before and asyncio.all_tasks() <= tasks)
