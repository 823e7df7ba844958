"""A background sub-agent whose parent session is suspended and resumed continues within its limits."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from tests.kernel.guests import joined_kernel
from tests.kernel.test_joined_shutdown import lose
from tests.kernel.test_sub_agents import READER, WRITER, WRITES, Agents, answers, kernel_of, models, task

from handrail import ApprovalAnswer, Kernel, Runtime, Session, tool
from handrail.agent.agent_loop import Agent
from handrail.agent.run_budget import Budget
from handrail.contract.services.subagent_services import SubagentTask
from handrail.frontends.acp.editor_session_setup import AcpEditorClientHandler
from handrail.kernel.local_kernel import LocalKernel
from handrail.runtime.files import editor_file_service
from handrail.session.local_session import LocalSession
from handrail.testing.provider_request_checks import PlaybackModel, ReplyPause, call_reply, text_reply
from handrail.testing.scripted_kernel import ScriptedApprovalHandler, temporary_kernel

SESSION = "ses_above"
PRESENT = "[delegation]\ncan_ask_user = true"
WRITE = call_reply(("write", {"path": "a", "content": "a"}))


async def start_background_agent(
    kernel: Kernel, agent: str, worker: PlaybackModel, pause: ReplyPause, **opening: Any
) -> Session:
    """A session whose model has begun a sub-agent in the background, which is at the pause."""
    session = await kernel.session(SESSION, **opening)
    top = PlaybackModel(call_reply(task(agent, background=True)), text_reply("Begun."))
    assert (await Agent(session, top, models=models(reader=worker, writer=worker)).complete("Go.")).text == "Begun."
    await pause.reached.wait()
    return session


async def wait_for_job_notice(session: Session) -> str:
    """Wait for the end of the job, and return the next request of a resumed model."""
    assert session.notifications is not None
    await session.notifications.wait_until_pending()
    return await said_in(session)


async def said_in(session: Session) -> str:
    """Return the first request of a model that resumes a session after the end of its job."""
    model = PlaybackModel(text_reply("Heard."), text_reply("Again."))
    agent = Agent(session, model)
    assert (await agent.complete("And?")).text == "Heard."
    assert (await agent.complete("And now?")).text == "Again."
    said = str(model.requests[1].messages)
    assert said.count("Job task_") == 1, "it is told once"
    return said


@asynccontextmanager
async def suspended(
    folder: Path, agents: Agents, worker: PlaybackModel, pause: ReplyPause, **opening: Any
) -> AsyncGenerator[LocalKernel]:
    """A kernel whose only session is suspended, while a sub-agent of it works."""
    (agent,) = agents.keys() - {"default"}
    async with kernel_of(folder, agents) as kernel:
        session = await start_background_agent(kernel, agent, worker, pause, **opening)
        await session.suspend()
        yield kernel


async def ended(kernel: Kernel) -> str:
    """The state of the only job, once it has ended."""
    (job,) = await kernel.jobs.list()
    result = await kernel.jobs.wait(job.id, timeout_ms=60_000)
    assert result is not None
    return (await kernel.jobs.get(job.id)).state


@pytest.mark.proves("A-10", "A-03")
@pytest.mark.parametrize("when", ["ends meanwhile", "ends later"])
async def test_a_background_sub_agent_continues_while_its_session_is_suspended_and_reports_once(
    tmp_path: Path, when: str
) -> None:
    pause = ReplyPause()
    reader = PlaybackModel([pause, *call_reply(("read", {"path": "note"}))], text_reply("It says 42."))
    async with suspended(tmp_path, {"reader": READER}, reader, pause) as kernel:
        (tmp_path / "ws" / "note").write_text("42")
        if when == "ends meanwhile":
            pause.proceed.set()
            assert await ended(kernel) == "done"
        session = await kernel.session(SESSION)
        pause.proceed.set()
        assert "It says 42." in await wait_for_job_notice(session)
        assert not kernel.sessions.sessions_by_id.keys() - {SESSION}
        await session.suspend()
        await said_in(await kernel.session(SESSION))


@pytest.mark.proves("A-10")
async def test_a_sub_agent_survives_cancelled_calls_and_repeated_suspension_of_its_session(
    tmp_path: Path,
) -> None:
    pause = ReplyPause()
    reader = PlaybackModel([pause, *text_reply("Done after all.")])
    async with suspended(tmp_path, {"reader": READER}, reader, pause) as kernel:
        for _ in range(3):
            session = await kernel.session(SESSION)
            assert [child.tree_node.manifest.id for child in session.tree_node.children] == ["reader"]
            session.cancel_running_calls()
            await session.suspend()
        pause.proceed.set()
        assert "Done after all." in await wait_for_job_notice(await kernel.session(SESSION))


@pytest.mark.proves("A-10", "A-03")
@pytest.mark.parametrize("how", ["closed", "stopped", "opened and closed", "kernel"])
async def test_closing_the_session_or_kernel_or_stopping_the_job_aborts_the_sub_agent(tmp_path: Path, how: str) -> None:
    pause = ReplyPause()
    reader = PlaybackModel([pause, *text_reply("never")])
    async with suspended(tmp_path, {"reader": READER}, reader, pause) as kernel:
        (child,) = kernel.sessions.sessions_by_id.values()
        if how == "closed":
            await kernel.close_session(SESSION)
        elif how == "stopped":
            (job,) = await kernel.jobs.list()
            assert (await kernel.jobs.stop(job.id)).state == "cancelled"
        elif how == "opened and closed":
            await (await kernel.session(SESSION)).close()
        if how != "kernel":
            assert child.is_closed and not kernel.sessions.sessions_by_id
            assert (kernel.components.store.sessions.list_open_subagent_sessions(SESSION) == []) is (how != "stopped")
    assert child.is_closed and len(reader.requests) == 1 and not reader.open_streams


@pytest.mark.proves("A-10", "P-12")
@pytest.mark.parametrize("who", ["another door", "whoever comes back"])
async def test_an_approval_request_during_suspension_waits_and_is_answered_once(tmp_path: Path, who: str) -> None:
    pause = ReplyPause()
    writer = PlaybackModel([pause, *WRITE], text_reply("Written."))
    gone = ScriptedApprovalHandler([ApprovalAnswer("once")])
    agents = {"default": PRESENT, "writer": WRITER}
    async with suspended(tmp_path, agents, writer, pause, approval_handler=gone) as kernel:
        asking = asyncio.Event()
        kernel.approvals.subscribe_to_requests(lambda _: asking.set())
        pause.proceed.set()
        await asking.wait()
        (row,) = kernel.approvals.list_pending()
        assert row.request.origin == f"sub-agent writer of session {SESSION}"
        back = ScriptedApprovalHandler([ApprovalAnswer("once")])
        if who == "another door":
            await kernel.approvals.decide(row.id, ApprovalAnswer("once"), by="test")
            assert await ended(kernel) == "done"
        session = await kernel.session(SESSION, approval_handler=back)
        assert "Written." in await wait_for_job_notice(session)
        assert (len(gone.requests), len(back.requests)) == (0, who != "another door")
        assert (tmp_path / "ws" / "a").read_text() == "a" and not kernel.approvals.list_pending()


@pytest.mark.proves("A-10", "P-12")
async def test_an_approval_request_open_at_suspension_is_asked_again_in_the_reopened_session(
    tmp_path: Path,
) -> None:
    pause, late = ReplyPause(), ScriptedApprovalHandler([ApprovalAnswer("once")])
    pause.proceed.set()
    late.may_answer.clear()
    writer = PlaybackModel([pause, *WRITE], text_reply("Not written."))
    async with kernel_of(tmp_path, {"default": PRESENT, "writer": WRITER}) as kernel:
        session = await start_background_agent(kernel, "writer", writer, pause, approval_handler=late)
        await late.request_received.wait()
        await session.suspend()
        late.may_answer.set()
        (row,) = kernel.approvals.list_pending()
        back = ScriptedApprovalHandler([ApprovalAnswer("reject", "not that one")])
        again = await kernel.session(SESSION, approval_handler=back)
        assert "Not written." in await wait_for_job_notice(again)
        assert [request.id for request in back.requests] == [row.id] and "not that one" in str(writer.requests[1])
        assert not (tmp_path / "ws" / "a").exists(), "a yes that comes too late is none"


@pytest.mark.proves("A-10", "P-12")
async def test_a_deferred_request_waits_for_its_user_and_headless_sessions_ask_no_new_ones(tmp_path: Path) -> None:
    pause, busy = ReplyPause(), ScriptedApprovalHandler([ApprovalAnswer("defer")])
    pause.proceed.set()
    writer = PlaybackModel([pause, *WRITE], call_reply(("write", {"path": "b", "content": "b"})), text_reply("Tried."))
    async with kernel_of(tmp_path, {"default": PRESENT, "writer": WRITER}) as kernel:
        session = await start_background_agent(kernel, "writer", writer, pause, approval_handler=busy)
        await busy.request_received.wait()
        await session.suspend()
        again = await kernel.session(SESSION)
        (row,) = kernel.approvals.list_pending()
        await kernel.approvals.decide(row.id, ApprovalAnswer("once"), by="test")
        assert "Tried." in await wait_for_job_notice(again)
        assert "No user is available now" in str(writer.requests[2].messages)
        assert [(tmp_path / "ws" / name).exists() for name in "ab"] == [True, False]


@pytest.mark.proves("P-12")
@pytest.mark.parametrize("bound", ["opened with a rule", "opened in a mode", "ruled later", "ruled meanwhile"])
async def test_the_rules_and_mode_of_the_reopened_session_limit_the_sub_agent_at_once(
    tmp_path: Path, bound: str
) -> None:
    pause = ReplyPause()
    writer = PlaybackModel([pause, *WRITE], text_reply("Tried."))
    async with suspended(tmp_path, {"writer": WRITES}, writer, pause) as kernel:
        if bound == "ruled meanwhile":
            asked = await kernel.session(approval_handler=ScriptedApprovalHandler([ApprovalAnswer("reject-always")]))
            assert (await asked.call("write", {"path": "a", "content": "x"})).error_kind == "denied"
        else:
            rules = ["deny fs.write a"] if bound == "opened with a rule" else []
            session = await kernel.session(SESSION, rules=rules, mode="plan" if "mode" in bound else None)
            if bound == "ruled later":
                session.add_rules("deny fs.write a")
        pause.proceed.set()
        assert await ended(kernel) == "done"
        assert '"error_kind":"denied"' in str(writer.requests[1].messages).replace(" ", "")
    assert not (tmp_path / "ws" / "a").exists()


@pytest.mark.proves("F-05")
@pytest.mark.skipif(os.name == "nt", reason="file times say something else there")
async def test_a_sub_agent_does_not_overwrite_unsaved_changes_of_a_reopening_editor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Typing(AcpEditorClientHandler):
        async def read_unsaved_text(self, path: str) -> str | None:
            return "typed"

    monkeypatch.setattr(editor_file_service, "FRESH_NS", -(10**12))
    monkeypatch.setattr(editor_file_service, "SETTLED_NS", -(10**12))
    pause = ReplyPause()
    writer = PlaybackModel(call_reply(("read", {"path": "a"})), [pause, *WRITE], text_reply("Tried."))
    async with kernel_of(tmp_path, {"writer": WRITES}) as kernel:
        (tmp_path / "ws" / "a").write_text("saved")
        await (await start_background_agent(kernel, "writer", writer, pause)).suspend()
        await kernel.session(SESSION, client=Typing(cast("Any", None)))
        pause.proceed.set()
        assert await ended(kernel) == "done"
        assert "`a` was not changed: the user has unsaved changes" in str(writer.requests[2].messages)
    assert (tmp_path / "ws" / "a").read_text() == "saved"


@pytest.mark.proves("P-12", "P-09")
async def test_a_project_grant_given_during_suspension_applies_to_the_sub_agent(tmp_path: Path) -> None:
    pause = ReplyPause()
    writer = PlaybackModel([pause, *WRITE], text_reply("Written."))
    agents = {"default": PRESENT, "writer": WRITER}
    async with suspended(tmp_path, agents, writer, pause, approval_handler=ScriptedApprovalHandler()) as kernel:
        asked = await kernel.session(approval_handler=ScriptedApprovalHandler([ApprovalAnswer("project")]))
        assert (await asked.call("write", {"path": "a", "content": "x"})).ok
        (tmp_path / "ws" / "a").unlink()
        pause.proceed.set()
        assert await ended(kernel) == "done"
    assert (tmp_path / "ws" / "a").read_text() == "a"


@pytest.mark.proves("A-03")
async def test_a_sub_agent_keeps_the_remaining_budget_of_the_run_that_started_it(tmp_path: Path) -> None:
    pause = ReplyPause()
    reader = PlaybackModel([pause, *call_reply(("read", {"path": "x"}))], text_reply("one turn too many"))
    async with kernel_of(tmp_path, {"reader": READER}) as kernel:
        session = await kernel.session(SESSION)
        top = PlaybackModel(call_reply(task("reader", background=True)), text_reply("Begun."))
        agent = Agent(session, top, budget=Budget(turns=3), models=models(reader=reader))
        await agent.complete("Go.")
        await pause.reached.wait()
        await session.suspend()
        session = await kernel.session(SESSION)
        again = Agent(session, PlaybackModel(text_reply("On.")), budget=Budget(turns=100))
        assert (await again.complete("On?")).text == "On."
        pause.proceed.set()
        assert await ended(kernel) == "failed" and len(reader.requests) == 1
        assert "The budget of 3 turns is used up" in await wait_for_job_notice(session)


@pytest.mark.proves("A-03", "A-10", "P-12")
@pytest.mark.parametrize("then", ["it stays suspended", "it is open again", "it was open again"])
async def test_a_background_job_keeps_delegating_with_the_model_it_started_with(tmp_path: Path, then: str) -> None:
    @tool(id="both", requires={"capabilities": ["agents"]}, side_effect="external", locks=[], mode="background")
    async def both(runtime: Runtime) -> list[str]:
        """Ask one agent after the other."""
        results = [await runtime.subagents.run(SubagentTask("writer", prompt)) for prompt in ("one", "two")]
        return [result.data["text"] for result in results]

    pause = ReplyPause()
    writer = PlaybackModel([pause, *text_reply("First.")], WRITE, text_reply("Second."))
    agents = {"default": "rules = ['allow both']", "writer": WRITES}
    async with kernel_of(tmp_path, agents, tools=[both]) as kernel:
        session = await kernel.session(SESSION)
        top = PlaybackModel(call_reply(("both", {})), text_reply("Begun."))
        await Agent(session, top, models=models(writer=writer)).complete("Go.")
        await pause.reached.wait()
        await session.suspend()
        if then != "it stays suspended":
            session = await kernel.session(SESSION, mode="plan")
            Agent(session, PlaybackModel())
        if then == "it was open again":
            await session.suspend()
        pause.proceed.set()
        assert await ended(kernel) == "done"
        session = await kernel.session(SESSION) if session.is_closed else session
        (job,) = await session.jobs.list()
        result = await session.jobs.wait(job.id, timeout_ms=0)
        assert result is not None and result.data == ["First.", "Second."]
        bound = then != "it stays suspended"
        assert (tmp_path / "ws" / "a").exists() is not bound, "by the session as it was open last"


@pytest.mark.proves("A-10")
async def test_a_foreground_sub_agent_ends_when_its_session_is_suspended(tmp_path: Path) -> None:
    pause = ReplyPause()
    async with kernel_of(tmp_path, {"reader": READER}) as kernel:
        session: LocalSession = await kernel.session(SESSION)
        reader = PlaybackModel([pause, *text_reply("never")])
        run = asyncio.ensure_future(
            answers(Agent(session, PlaybackModel(call_reply(task("reader"))), models=models(reader=reader)))
        )
        await pause.reached.wait()
        await session.suspend()
        (result,) = await run
        assert result.error_kind == "cancelled" and not kernel.sessions.sessions_by_id


@pytest.mark.proves("A-10", "L-07")
async def test_a_sub_agent_in_a_joined_process_continues_when_another_process_opens_its_session(tmp_path: Path) -> None:
    pause = ReplyPause()
    reader = PlaybackModel([pause, *call_reply(("read", {"path": "x"}))], text_reply("Read."))
    async with kernel_of(tmp_path, {"reader": READER}) as held, joined_kernel(tmp_path) as kernel:
        session = await start_background_agent(kernel, "reader", reader, pause)
        await session.suspend()
        again = await held.session(SESSION)
        assert [child.tree_node.manifest.id for child in again.tree_node.children] == ["reader"]
        pause.proceed.set()
        assert "Read." in await wait_for_job_notice(again)


@pytest.mark.proves("A-10", "P-12", "L-07")
async def test_a_resumed_sub_agent_asks_the_user_of_the_process_that_reopens_its_session(tmp_path: Path) -> None:
    pause = ReplyPause()
    pause.proceed.set()
    late, back = ScriptedApprovalHandler(), ScriptedApprovalHandler([ApprovalAnswer("once")], [[["blue"]]])
    late.may_answer.clear()
    question = call_reply(("question", {"questions": [{"question": "Which?"}]}))
    writer = PlaybackModel([pause, *WRITE], question, text_reply("Done."))
    agents = {"default": PRESENT, "writer": WRITER}
    async with kernel_of(tmp_path, agents) as held, joined_kernel(tmp_path) as one, joined_kernel(tmp_path) as other:
        session = await start_background_agent(one, "writer", writer, pause, approval_handler=late)
        await late.request_received.wait()
        await session.suspend()
        again = await other.session(SESSION, approval_handler=back)
        assert "Done." in await wait_for_job_notice(again)
        assert (len(back.requests), len(back.questions)) == (1, 1) and "blue" in str(writer.requests[2].messages)
        assert (tmp_path / "ws" / "a").exists() and not held.approvals.list_pending()


@pytest.mark.proves("A-10", "P-12")
async def test_a_lost_model_process_ends_its_sub_agent_and_closes_pending_requests(
    tmp_path: Path,
) -> None:
    pause = ReplyPause()
    writer = PlaybackModel([pause, *WRITE])
    agents = {"default": PRESENT, "writer": WRITER}
    async with kernel_of(tmp_path, agents) as held:
        async with joined_kernel(tmp_path) as kernel:
            session = await start_background_agent(
                kernel, "writer", writer, pause, approval_handler=ScriptedApprovalHandler()
            )
            await session.suspend()
            asking = asyncio.Event()
            held.approvals.subscribe_to_requests(lambda _: asking.set())
            pause.proceed.set()
            await asking.wait()
            assert len(held.approvals.list_pending()) == 1
            lose(kernel)
            assert await ended(held) == "interrupted"
        assert "disconnected while it was working" in await wait_for_job_notice(await held.session(SESSION))
        assert not held.approvals.list_pending() and held.sessions.sessions_by_id.keys() == {SESSION}
    async with temporary_kernel(tmp_path) as held:
        assert not held.approvals.list_pending() and not (tmp_path / "ws" / "a").exists()
