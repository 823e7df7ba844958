"""Sub-agents in a client process: their model is there, and the lease holder runs their calls."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.kernel.guests import joined_kernel
from tests.kernel.test_joined_shutdown import lose
from tests.kernel.test_sub_agents import READER, WRITER, kernel_of, models, task

from handrail.agent.agent_loop import Agent
from handrail.contract.approval_requests import ApprovalAnswer
from handrail.testing.provider_request_checks import PlaybackModel, ReplyPause, call_reply, text_reply
from handrail.testing.scripted_kernel import ScriptedApprovalHandler


@pytest.mark.proves("A-03")
@pytest.mark.proves("L-07")
async def test_a_sub_agent_works_for_an_agent_in_a_joined_process(tmp_path: Path) -> None:
    async with kernel_of(tmp_path, {"reader": READER}) as held, joined_kernel(tmp_path) as kernel:
        (tmp_path / "ws" / "note.txt").write_text("The answer is 42.\n")
        reader = PlaybackModel(call_reply(("read", {"path": "note.txt"})), text_reply("It says 42."))
        top = PlaybackModel(call_reply(task("reader"), task("nobody")), text_reply("42"))
        session = await kernel.session()
        assert "task" not in [spec.id for spec in session.active_tools]
        agent = Agent(session, top, models=models(reader=reader))
        outcome = await agent.complete("Find the answer.")
        assert (outcome.status, outcome.text) == ("answered", "42")
        assert "- reader: Reads." in top.requests[0].system
        assert "It says 42." in str(top.requests[1].messages)
        assert "Available agents: default, reader." in str(top.requests[1].messages)
        assert "The answer is 42." in str(reader.requests[1].messages)
        row = held.components.store.sessions.list_open_subagent_sessions(session.id)[0]
        assert (row.agent, row.parent_call, row.holder) == ("reader", f"{session.id}/1.0", None)


@pytest.mark.proves("P-12")
async def test_approval_requests_in_a_joined_process_name_the_asking_sub_agent(tmp_path: Path) -> None:
    agents = {"default": "[delegation]\ncan_ask_user = true", "writer": WRITER}
    async with kernel_of(tmp_path, agents), joined_kernel(tmp_path) as kernel:
        person = ScriptedApprovalHandler([ApprovalAnswer("once")])
        writer = PlaybackModel(call_reply(("write", {"path": "a", "content": "a"})), text_reply("."))
        session = await kernel.session(approval_handler=person)
        top = PlaybackModel(call_reply(task("writer")), text_reply("."))
        await Agent(session, top, models=models(writer=writer)).complete("Go.")
        assert (tmp_path / "ws" / "a").read_text() == "a"
        assert [request.origin for request in person.requests] == [f"sub-agent writer of session {session.id}"]


@pytest.mark.proves("A-03")
async def test_stopping_an_agent_in_a_joined_process_stops_its_sub_agents(tmp_path: Path) -> None:
    async with kernel_of(tmp_path, {"reader": READER}) as held, joined_kernel(tmp_path) as kernel:
        pause = ReplyPause()
        top = PlaybackModel(call_reply(task("reader")), text_reply("."))
        session = await kernel.session()
        agent = Agent(session, top, models=models(reader=PlaybackModel([pause, *text_reply("never")])))
        run = asyncio.ensure_future(agent.complete("Go."))
        await pause.reached.wait()
        agent.cancel()
        assert (await run).status == "cancelled"
        row = held.components.store.sessions.list_open_subagent_sessions(session.id)[0]
        assert row.holder is None


@pytest.mark.proves("A-10")
async def test_a_lost_holder_connection_ends_a_sub_agent_and_the_result_names_its_session(tmp_path: Path) -> None:
    async with kernel_of(tmp_path, {"reader": READER}) as held, joined_kernel(tmp_path) as kernel:
        pause = ReplyPause()
        top = PlaybackModel(call_reply(task("reader")), text_reply("Gone on."))
        session = await kernel.session()
        agent = Agent(
            session,
            top,
            models=models(
                reader=PlaybackModel(
                    [
                        pause,
                        *text_reply("Read."),
                    ]
                )
            ),
        )
        run = asyncio.ensure_future(agent.complete("Go."))
        await pause.reached.wait()
        lose(kernel)
        pause.proceed.set()
        assert (await run).text == "Gone on."
        await held.log.flush()
        (child,) = held.components.store.sessions.list_open_subagent_sessions(session.id)
        assert child.id in str(top.requests[-1].messages)


@pytest.mark.proves("A-10", "P-12")
async def test_an_approval_request_of_a_lost_sub_agent_is_closed(tmp_path: Path) -> None:
    agents = {"default": "[delegation]\ncan_ask_user = true", "writer": WRITER}
    async with kernel_of(tmp_path, agents) as held, joined_kernel(tmp_path) as kernel:
        person = ScriptedApprovalHandler()
        person.may_answer.clear()
        writer = PlaybackModel(call_reply(("write", {"path": "a", "content": "a"})))
        session = await kernel.session(approval_handler=person)
        agent = Agent(session, PlaybackModel(call_reply(task("writer")), text_reply(".")), models=models(writer=writer))
        run = asyncio.ensure_future(agent.complete("Go."))
        await person.request_received.wait()
        (asked,) = held.approvals.list_pending()
        lose(kernel)
        assert (await run).status == "answered"
        assert not held.approvals.get(asked.id).is_pending and not held.approvals.list_pending()
    assert not (tmp_path / "ws" / "a").exists()
