"""Several kernels on one workspace: one holds the lease, and calls behave the same in all of them."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from handrail import ApprovalAnswer, Event, Kernel, ToolError, UsageError, open_kernel, tool
from handrail.contract.services.channels_and_triggers import Notification
from handrail.kernel.local_kernel import LocalKernel
from handrail.kernel.remote_kernel import RemoteKernel
from handrail.record.verification import verify_log
from handrail.testing.scripted_kernel import ScriptedApprovalHandler, temporary_kernel


def second(folder: Path, **options: object) -> AbstractAsyncContextManager[Kernel]:
    """Another kernel on the workspace of ``temporary_kernel(folder)``."""
    config = folder / "config" / "handrail.toml"
    return open_kernel(folder / "ws", state=folder / "state", config=config, **options)  # pyright: ignore[reportArgumentType]


@pytest.mark.proves("L-07")
async def test_a_second_kernel_joins_the_first_and_makes_calls_through_it(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path) as held, second(tmp_path, rules=["allow write"]) as joined:
        assert isinstance(held, LocalKernel) and isinstance(joined, RemoteKernel)
        assert joined.workdir == held.workdir and joined.state_folder == held.state_folder
        assert joined.sandbox_tier == held.sandbox_tier
        assert joined.generation.entries.keys() == held.generation.entries.keys()
        session = await joined.session()
        written = await session.call("write", {"path": "a.txt", "content": "one\n"})
        assert written.ok, written.error_text
        read = await session.call("read", {"path": "a.txt"})
        assert read.data["text"] == "one"
        assert (tmp_path / "ws" / "a.txt").read_text() == "one\n"
        await joined.log.flush()
        rows = joined.log.reader.calls()
        assert [row.tool for row in rows if row.call_id.startswith(session.id)] == ["write", "read"]
        assert verify_log(joined.log.reader).ok


@pytest.mark.proves("L-07", "P-04")
async def test_rules_of_a_joined_process_apply_only_to_its_own_sessions(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path) as held, second(tmp_path, rules=["allow write"]) as joined:
        ours, theirs = await held.session(), await joined.session()
        assert (await ours.call("write", {"path": "a", "content": ""})).error_kind == "denied"
        assert (await theirs.call("write", {"path": "a", "content": ""})).ok
        theirs.add_rules("deny write a")
        assert (await theirs.call("write", {"path": "a", "content": ""})).error_kind == "denied"
        assert (await theirs.call("write", {"path": "b", "content": ""})).ok
        with pytest.raises(ValueError, match="reed"):  # it would keep nothing back, and nobody would know
            theirs.add_rules("deny write b", "deny reed")
        assert (await theirs.call("write", {"path": "b", "content": ""})).error_kind == "denied"
        narrower = await joined.session(rules=["deny write *"])
        assert (await narrower.call("write", {"path": "c", "content": ""})).error_kind == "denied"


@pytest.mark.proves("L-07", "L-02")
async def test_locks_are_shared_by_the_holder_and_joined_processes(tmp_path: Path) -> None:
    entered, leave = asyncio.Event(), asyncio.Event()
    order: list[str] = []

    @tool(id="test.hold", side_effect="write", locks=["file:a.txt:X"])
    async def hold() -> str:
        """Keep the lock until told."""
        entered.set()
        await leave.wait()
        order.append("held")
        return "held"

    holding = temporary_kernel(tmp_path, tools=[hold], rules=["allow test.hold"])
    async with holding as held, second(tmp_path, rules=["allow write"]) as joined:
        ours, theirs = await held.session(), await joined.session()
        waits = asyncio.Event()
        theirs.watch_events(lambda event: waits.set() if event.kind == "awaiting-locks" else None)
        first = asyncio.create_task(ours.call("test.hold", {}))
        await entered.wait()
        later = asyncio.create_task(theirs.call("write", {"path": "a.txt", "content": "x"}))
        await waits.wait()
        assert not later.done()
        leave.set()
        assert (await first).data == "held"
        result = await later
        assert result.ok and result.metadata["lock_wait_ms"] > 0


@pytest.mark.proves("L-07")
async def test_calls_of_one_reply_are_answered_in_order_over_the_socket(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path), second(tmp_path, rules=["allow write"]) as joined:
        session = await joined.session()
        calls = [("write", {"path": f"{n}.txt", "content": str(n)}) for n in range(5)]
        results = await session.call_all([*calls, ("nothing", {}), ("read", {"path": "3.txt"})])
        assert [result.type for result in results] == ["output"] * 5 + ["error", "output"]
        assert results[5].error_kind == "unknown_tool"
        turn = session.start_turn()
        answers = await turn.call_all([("read", {"path": "0.txt"}), ("read", '{"path": "1.txt"}')])
        assert [answer.call_id for answer in answers] == [f"{session.id}/{turn.number}.{n}" for n in range(2)]
        assert [answer.result.data["text"] for answer in answers] == ["0", "1"]


@pytest.mark.proves("K-05", "L-07")
@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ('{"path": "a", "path": "b"}', "duplicate keys"),
        ({"path": float("nan")}, "NaN"),
        ({"path": "\ud800"}, "surrogate"),
        ({"path": {1, 2}}, "not JSON values"),
        ("[1]", "array"),
        (b"\xff", "UTF-8"),
    ],
)
async def test_arguments_are_validated_as_strictly_over_the_socket(
    tmp_path: Path, arguments: object, fault: str
) -> None:
    async with temporary_kernel(tmp_path), second(tmp_path) as joined:
        session = await joined.session()
        result = await session.call("read", arguments)  # pyright: ignore[reportArgumentType]
        assert result.error_kind == "invalid_input" and fault in (result.error_text or "")


@pytest.mark.proves("L-07", "X-10")
async def test_session_events_reach_a_joined_process(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path), second(tmp_path) as joined:
        session = await joined.session()
        seen: list[Event] = []
        stop = session.watch_events(seen.append)
        assert (await session.call("glob", {"pattern": "*"})).ok
        assert [event.kind for event in seen] == ["proposed", "started", "finished"]
        assert {event.session_id for event in seen} == {session.id}
        stop()
        await session.call("glob", {"pattern": "*"})
        await joined.log.flush()  # whatever was under way has arrived with the answer
        assert len(seen) == 3


@pytest.mark.proves("L-07", "X-08")
async def test_a_joined_process_stops_only_its_own_calls(tmp_path: Path) -> None:
    begun: list[asyncio.Event] = [asyncio.Event(), asyncio.Event()]

    @tool(id="test.wait", side_effect="read", locks=[])
    async def wait(n: int) -> str:
        """Wait for ever."""
        begun[n].set()
        await asyncio.Event().wait()
        return ""

    holding = temporary_kernel(tmp_path, tools=[wait], rules=["allow test.wait"])
    async with holding as held, second(tmp_path) as joined:
        # The tool belongs to the process that brought it.
        assert "test.wait" not in joined.generation.entries
        theirs, ours = await joined.session(), await held.session()
        mine = asyncio.create_task(ours.call("test.wait", {"n": 0}))
        await begun[0].wait()
        assert (await theirs.call("test.wait", {"n": 1})).error_kind == "unknown_tool"
        theirs.cancel_running_calls()
        await joined.log.flush()
        assert not mine.done()
        ours.cancel_running_calls()
        assert (await mine).metadata["stopped_by"] == "user"


@pytest.mark.proves("L-07", "P-07")
async def test_the_user_of_a_joined_process_is_asked_there(tmp_path: Path) -> None:
    person = ScriptedApprovalHandler([ApprovalAnswer("once"), ApprovalAnswer("reject", "not now")], [[["blue"]]])
    async with temporary_kernel(tmp_path), second(tmp_path) as joined:
        session = await joined.session(approval_handler=person)
        assert (await session.call("write", {"path": "a", "content": "x"})).ok
        refused = await session.call("write", {"path": "b", "content": "x"})
        assert refused.error_kind == "denied" and "not now" in (refused.error_text or "")
        assert [request.arguments["path"] for request in person.requests] == ["a", "b"]
        answered = await session.call("question", {"questions": [{"question": "Which colour?"}]})
        assert answered.data == {"answers": [["blue"]]}
        nobody = await joined.session()
        assert (await nobody.call("write", {"path": "c", "content": "x"})).error_kind == "denied"


@pytest.mark.proves("L-10", "L-07")
async def test_a_repeated_call_key_returns_the_recorded_result_over_the_socket(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path), second(tmp_path, rules=["allow write"]) as joined:
        session = await joined.session("ses_keys")
        first = await session.call("write", {"path": "a", "content": "x"}, key="k")
        again = await session.call("write", {"path": "a", "content": "x"}, key="k")
        assert first.ok and again.metadata["replayed"] is True
        assert (await session.call("write", {"path": "b", "content": "x"}, key="k")).error_kind == "conflict"


@pytest.mark.proves("L-07", "P-13")
async def test_explain_uses_the_rules_of_the_joined_process(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path) as held, second(tmp_path, rules=["allow write *.md"]) as joined:
        arguments = {"path": "a.md", "content": ""}
        assert (await held.explain_call("write", arguments)).effective_action == "deny"
        assert (await joined.explain_call("write", arguments)).action == "allow"
        with pytest.raises(ToolError, match="Did you mean") as caught:
            await joined.explain_call("wriet", arguments)
        assert caught.value.kind == "unknown_tool"


@pytest.mark.proves("L-07", "O-07")
async def test_a_secret_of_a_joined_process_is_redacted_for_the_holder(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path) as held, second(tmp_path, secrets={"token": "s3cr3t-value"}):
        (tmp_path / "ws" / "a.txt").write_text("it is s3cr3t-value\n")
        result = await (await held.session()).call("read", {"path": "a.txt"})
        assert result.data["text"] == "it is [secret:token]"


@pytest.mark.proves("L-07")
async def test_a_session_can_be_open_in_only_one_process(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path) as held, second(tmp_path) as joined:
        session = await held.session("ses_one")
        with pytest.raises(UsageError, match="already open"):
            await joined.session("ses_one")
        await session.close()
        again = await joined.session("ses_one")
        assert (await again.call("glob", {"pattern": "*"})).ok


@pytest.mark.proves("L-07", "A-10")
async def test_a_process_that_leaves_suspends_its_sessions_for_the_next_process(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path) as held:
        async with second(tmp_path) as joined:
            session = await joined.session("ses_on")
            assert (await session.call("todo", {"todos": [{"content": "go on", "status": "pending"}]})).ok
        async with second(tmp_path) as joined:
            session = await joined.session("ses_on")
            result = await session.call("glob", {"pattern": "*"})
            assert result.ok
        await held.log.flush()
        ids = [row.call_id for row in held.log.reader.calls() if row.call_id.startswith("ses_on")]
        assert ids == ["ses_on/1.0", "ses_on/2.0"]


@pytest.mark.proves("L-07", "R-06")
async def test_a_new_generation_reaches_joined_processes(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path) as held, second(tmp_path) as joined:
        session = await joined.session()
        turn = session.start_turn()
        before = joined.generation.number
        await held.reload_tools()
        assert (await session.call("glob", {"pattern": "*"})).ok  # the news came before this answer
        assert joined.generation.number > before
        assert (await turn.call_all([("glob", {"pattern": "*"})]))[0].result.ok, "a turn keeps the one it began with"


async def test_notifications_for_a_joined_session_wait_at_the_holder(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path) as held, second(tmp_path) as joined:
        session = await joined.session()
        assert session.notifications is not None and not await session.notifications.wait_for_next()
        waits = asyncio.create_task(session.notifications.wait_until_pending())
        said = Notification("n1", session.id, "trigger", "noon", "it is noon", 5, None, "a timer")
        await held.inbound_services.notifications.store_notification(said)
        await waits
        assert await session.notifications.wait_for_next() and await session.notifications.list_pending() == [said]
        await session.notifications.mark_delivered(["n1"])
        assert not await session.notifications.list_pending()


async def test_the_holder_reads_parent_instructions_under_the_rules_of_the_joined_process(
    tmp_path: Path,
) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "AGENTS.md").write_text("Use tabs. hunter2hunter2")
    async with (
        temporary_kernel(tmp_path, secrets={"KEY": "hunter2hunter2"}),
        second(tmp_path) as joined,
        second(tmp_path, rules=["deny read"]) as narrow,
    ):
        assert await (await joined.session()).read_parent_instructions() == [("../AGENTS.md", "Use tabs. [secret:KEY]")]
        assert await (await narrow.session()).read_parent_instructions() == []


async def test_calls_streamed_one_by_one_over_the_socket_form_one_reply(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path), second(tmp_path, rules=["allow write"]) as joined:
        session = await joined.session()
        turn = session.start_turn()
        answers = [turn.start_streamed_call(("write", {"path": "a", "content": str(n)})) for n in range(3)]
        answers.append(turn.start_streamed_call(("read", {"path": "a"})))
        done = [await answer for answer in answers]
        assert [answer.call_id for answer in done] == [f"{session.id}/{turn.number}.{n}" for n in range(4)]
        assert done[3].result.data["text"] == "2", "in their order"
        assert (await session.call("read", {"path": "a"})).ok
