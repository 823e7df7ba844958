"""Delegation to a sub-agent: its own session, at most its parent's rights, and an end with its parent."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from handrail.agent.agent_loop import Agent
from handrail.agent.model_protocol import Model
from handrail.contract.approval_requests import ApprovalAnswer
from handrail.contract.calls_and_results import Result
from handrail.contract.errors import LoadError
from handrail.contract.services.subagent_services import SubagentTask
from handrail.frontends.acp.editor_session_setup import AcpEditorClientHandler
from handrail.kernel.local_kernel import LocalKernel
from handrail.runtime.files import editor_file_service
from handrail.session.local_session import LocalSession
from handrail.testing.provider_request_checks import PlaybackModel, ReplyPause, call_reply, text_reply
from handrail.testing.scripted_kernel import ScriptedApprovalHandler, temporary_kernel

Agents = dict[str, str]
"""Manifests by id, without the id."""


@asynccontextmanager
async def kernel_of(folder: Path, agents: Agents, **given: Any) -> AsyncGenerator[LocalKernel]:
    for agent, text in agents.items():
        place = folder / "config" / "agents" / agent
        place.mkdir(parents=True, mode=0o755, exist_ok=True)
        (place / "agent.toml").write_text(f'id = "{agent}"\n{text}')
    async with temporary_kernel(folder, **given) as kernel:
        yield kernel


def task(agent: str, prompt: str = "Do it.", **more: Any) -> tuple[str, dict[str, Any]]:
    return "task", {"subagent_type": agent, "prompt": prompt, **more}


def models(**by_name: PlaybackModel) -> Callable[[str], Model]:
    """Return the function that opens ``played:NAME``."""
    return lambda spec: by_name[spec.partition(":")[2]]


async def answers(agent: Agent, prompt: str = "Go.") -> list[Result]:
    """Return the results that the model received, in order."""
    from handrail.agent.run_events import CallAnswered

    return [event.answer.model async for event in agent.run(prompt) if isinstance(event, CallAnswered)]


READER = 'role = "subagent"\ndescription = "Reads."\nprompt = "Only read."\ntools = ["read", "task"]\nmodel = "played:reader"'
WRITER = 'role = "all"\ntools = ["read", "write", "bash", "question", "task"]\nmodel = "played:writer"'
WRITES = f"{WRITER}\nrules = ['allow fs.write **']"


@pytest.mark.proves("A-03")
async def test_a_sub_agent_works_in_a_child_session_and_returns_its_last_message(tmp_path: Path) -> None:
    async with kernel_of(tmp_path, {"reader": READER}) as kernel:
        (tmp_path / "ws" / "note.txt").write_text("The answer is 42.\n")
        reader = PlaybackModel(call_reply(("read", {"path": "note.txt"})), text_reply("It says 42."))
        top = PlaybackModel(call_reply(task("reader", "What is in note.txt?")), text_reply("42"))
        session = await kernel.session()
        agent = Agent(session, top, workspace=session.workdir, models=models(reader=reader))
        outcome = await agent.complete("Find the answer.")

        assert (outcome.status, outcome.text) == ("answered", "42")
        assert "# Agents\n\ntask delegates to one of these:\n- default: " in top.requests[0].system
        assert "- reader: Reads." in top.requests[0].system
        child = reader.requests[0]
        assert "Only read." in child.system
        assert str(child.messages[0]).count("What is in note.txt?") == 1
        assert "Find the answer" not in str(child.messages)
        assert {view["name"] for view in child.tools} == {"read", "task"}
        row = kernel.components.store.sessions.list_open_subagent_sessions(session.id)[0]
        assert (row.agent, row.parent_call, row.holder) == ("reader", f"{session.id}/1.0", None)
        assert "It says 42." in str(top.requests[1].messages)
        await kernel.log.flush()
        assert [call.tool for call in kernel.log.reader.calls(session=row.id)] == ["read"]
        assert await kernel.sessions.session_store.open_history(row.id).read_stored_messages()


@pytest.mark.proves("A-03")
async def test_the_error_for_an_unknown_agent_lists_the_available_agents(tmp_path: Path) -> None:
    agents = {"reader": READER, "mine": "tools = ['read']", "broken": 'role = "all"\npromt = 1'}
    async with kernel_of(tmp_path, agents) as kernel:
        top = PlaybackModel(call_reply(task("readr"), task("mine"), task("broken")), text_reply("."))
        found = await answers(Agent(await kernel.session(), top))
    assert [result.error_kind for result in found] == ["invalid_input"] * 3
    assert (
        "Agent `readr` is not available for delegation. Did you mean `reader`? Available agents: default, reader."
        in str(found[0].error_text)
    )


@pytest.mark.proves("A-03")
async def test_a_session_without_a_model_cannot_delegate_and_does_not_see_the_task_tool(tmp_path: Path) -> None:
    async with kernel_of(tmp_path, {"reader": READER}) as kernel:
        session = await kernel.session()
        assert "task" not in [spec.id for spec in session.active_tools]
        result = await session.call(*task("reader"))
        assert (result.error_kind, "no model for sub-agents" in str(result.error_text)) == ("unavailable", True)
        Agent(session, PlaybackModel())
        assert "task" in [spec.id for spec in session.active_tools]


@pytest.mark.proves("A-03")
async def test_sub_agents_can_be_nested_five_levels_deep_and_no_deeper(tmp_path: Path) -> None:
    async with kernel_of(tmp_path, {}) as kernel:
        downwards = [call_reply(task("default", f"level {n}")) for n in range(1, 7)]
        model = PlaybackModel(*downwards, *(text_reply(f"up {n}") for n in range(6)))
        session = await kernel.session()
        outcome = await Agent(session, model).complete("Go down.")
        assert outcome.text == "up 5"
        assert "at most 5 levels deep" in str(model.requests[6].messages)
        depth, below = 0, session.id
        while rows := kernel.components.store.sessions.list_open_subagent_sessions(below):
            depth, below = depth + 1, rows[0].id
        assert depth == 5


@pytest.mark.proves("A-03")
async def test_one_call_can_run_several_sub_agents_at_once(tmp_path: Path) -> None:
    from handrail import Runtime, tool

    @tool(id="both", requires={"capabilities": ["agents"]}, side_effect="external", locks=[])
    async def both(runtime: Runtime) -> list[Any]:
        """Ask two agents."""
        tasks = [runtime.subagents.run(SubagentTask("reader", prompt)) for prompt in ("one", "two")]
        return [result.data["text"] for result in await asyncio.gather(*tasks)]

    agents = {"default": "rules = ['allow both']", "reader": READER}
    async with kernel_of(tmp_path, agents, tools=[both]) as kernel:
        reader = PlaybackModel(text_reply("1"), text_reply("2"))
        top = PlaybackModel(call_reply(("both", {})), text_reply("."))
        (found,) = await answers(Agent(await kernel.session(), top, models=models(reader=reader)))
        assert (found.ok, sorted(found.data)) == (True, ["1", "2"])


@pytest.mark.proves("F-05")
@pytest.mark.skipif(os.name == "nt", reason="file times say something else there")
async def test_a_sub_agent_does_not_overwrite_unsaved_changes_in_its_parents_editor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Typing(AcpEditorClientHandler):
        async def read_unsaved_text(self, path: str) -> str | None:
            return "typed" if path.endswith("/a") else None

    monkeypatch.setattr(editor_file_service, "FRESH_NS", -(10**12))
    monkeypatch.setattr(editor_file_service, "SETTLED_NS", -(10**12))
    async with kernel_of(tmp_path, {"writer": WRITES}) as kernel:
        for name in "ab":
            (tmp_path / "ws" / name).write_text("saved")
        seen = call_reply(*(("read", {"path": name}) for name in "ab"))
        writes = call_reply(*(("write", {"path": name, "content": "new"}) for name in "ab"))
        writer = PlaybackModel(seen, writes, text_reply("."))
        top = PlaybackModel(call_reply(task("writer")), text_reply("."))
        session = await kernel.session(client=Typing(cast("Any", None)))
        await Agent(session, top, models=models(writer=writer)).complete("Go.")
        assert "`a` was not changed: the user has unsaved changes" in str(writer.requests[2].messages)
        assert [(tmp_path / "ws" / name).read_text() for name in "ab"] == ["saved", "new"]


@pytest.mark.proves("P-12")
@pytest.mark.parametrize("passed", [False, True])
async def test_a_sub_agent_asks_the_user_only_if_its_parent_delegates_that(tmp_path: Path, passed: bool) -> None:
    parent = f"[delegation]\ncan_ask_user = {str(passed).lower()}"
    async with kernel_of(tmp_path, {"default": parent, "writer": WRITER}) as kernel:
        person = ScriptedApprovalHandler([ApprovalAnswer("once")], [[["yes"]]])
        calls = call_reply(("write", {"path": "a", "content": "a"}), ("question", {"questions": [{"question": "Ok?"}]}))
        writer = PlaybackModel(calls, text_reply("."))
        session = await kernel.session(approval_handler=person)
        top = PlaybackModel(call_reply(task("writer", description="write a")), text_reply("."))
        await Agent(session, top, models=models(writer=writer)).complete("Go.")
        assert (tmp_path / "ws" / "a").exists() is passed
        origins = [request.origin for request in person.requests]
        assert origins == ([f"sub-agent writer (write a) of session {session.id}"] if passed else [])
        assert [question.question for question in person.questions] == (["Ok?"] if passed else [])


@pytest.mark.proves("P-12")
async def test_a_deferred_approval_request_of_a_sub_agent_does_not_stay_pending(tmp_path: Path) -> None:
    async with kernel_of(tmp_path, {"default": "[delegation]\ncan_ask_user = true", "writer": WRITER}) as kernel:
        person = ScriptedApprovalHandler([ApprovalAnswer("defer")])
        writer = PlaybackModel(call_reply(("write", {"path": "a", "content": "a"})), text_reply("."))
        top = PlaybackModel(call_reply(task("writer")), text_reply("."))
        await Agent(await kernel.session(approval_handler=person), top, models=models(writer=writer)).complete("Go.")
        assert "cannot wait for one" in str(writer.requests[1].messages)
        assert not kernel.approvals.list_pending()


@pytest.mark.proves("P-12")
@pytest.mark.parametrize("passed", [False, True])
async def test_a_secret_reaches_a_sub_agents_tool_only_if_its_parent_delegates_it(tmp_path: Path, passed: bool) -> None:
    from handrail import Runtime, tool

    told: list[str] = []

    @tool(id="sign", secrets=["key"], side_effect="read", locks=[])
    def sign(runtime: Runtime) -> str:
        """Sign something."""
        told.append(runtime.secrets.get("key"))
        return "signed"

    parent = "[delegation]\nsecrets = ['key']" if passed else ""
    signer = 'role = "subagent"\ntools = ["sign"]\nrules = ["allow sign"]\nmodel = "played:signer"'
    agents = {"default": parent, "signer": signer}
    async with kernel_of(tmp_path, agents, tools=[sign], secrets={"key": "hunter2-hunter2"}) as kernel:
        model = PlaybackModel(call_reply(("sign", {})), text_reply("."))
        top = PlaybackModel(call_reply(task("signer")), text_reply("."))
        await Agent(await kernel.session(), top, models=models(signer=model)).complete("Go.")
        assert told == (["hunter2-hunter2"] if passed else [])
        assert ("does not delegate it to its sub-agents" in str(model.requests[1].messages)) is not passed


@pytest.mark.proves("A-03")
@pytest.mark.parametrize("how", ["cancel", "close", "suspend"])
async def test_the_end_of_a_parent_aborts_its_sub_agents_and_their_calls(tmp_path: Path, how: str) -> None:
    from handrail import Runtime, tool

    running = asyncio.Event()
    ended: list[bool] = []

    @tool(id="hold", side_effect="write", locks=[])
    async def hold(runtime: Runtime) -> str:
        """Wait."""
        running.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(runtime.cancellation.is_requested)
        return ""

    holder = 'role = "subagent"\ntools = ["hold"]\nrules = ["allow hold"]\nmodel = "played:holder"'
    async with kernel_of(tmp_path, {"holder": holder}, tools=[hold]) as kernel:
        top = PlaybackModel(call_reply(task("holder")), text_reply("."))
        session = await kernel.session()
        agent = Agent(session, top, models=models(holder=PlaybackModel(call_reply(("hold", {})))))
        run = asyncio.ensure_future(agent.complete("Go."))
        await running.wait()
        child = session.tree_node.children[0]
        if how == "cancel":
            agent.cancel()
        else:
            await getattr(session, how)()
        outcome = await run
        assert (outcome.status, ended, child.is_closed) == ("cancelled", [True], True)
        assert session.tree_node.children == []
        await kernel.log.flush()
        if how == "close":
            assert kernel.components.store.sessions.list_open_subagent_sessions(session.id) == []
        row = kernel.components.store.sessions.get(child.id)
        assert row is not None and (row.closed_ns is not None) is (how == "close")
        assert [(c.error_kind, c.error_text) for c in kernel.log.reader.calls(session=child.id)] == [
            ("cancelled", "`hold` was aborted by parent.")
        ]


async def test_a_session_of_a_sub_agent_cannot_be_reopened_but_can_be_forked(tmp_path: Path) -> None:
    from handrail import UsageError

    async with kernel_of(tmp_path, {"reader": READER}) as kernel:
        top = PlaybackModel(call_reply(task("reader")), text_reply("."))
        session = await kernel.session()
        await Agent(session, top, models=models(reader=PlaybackModel(text_reply("Read.")))).complete("Go.")
        row = kernel.components.store.sessions.list_open_subagent_sessions(session.id)[0]
        with pytest.raises(UsageError, match="Fork it"):
            await kernel.session(row.id, agent="reader")
        forked = await kernel.fork_session(row.id)
        again = await kernel.session(forked, agent="reader")
        assert again.tree_node.parent_ref is None
        assert (await again.call("read", {"path": "missing"})).error_kind == "failed"


async def test_a_call_that_is_not_running_cannot_start_a_sub_agent(tmp_path: Path) -> None:
    from handrail import UsageError
    from handrail.contract.services.subagent_services import SubagentTask

    async with kernel_of(tmp_path, {}) as kernel:
        session: LocalSession = await kernel.session()
        with pytest.raises(UsageError, match="does not delegate now"):
            await session.open_child("ses_other/1.0", SubagentTask("default", "x"))


@pytest.mark.proves("A-03")
async def test_a_model_sees_exactly_the_agents_that_are_listed_as_tools(tmp_path: Path) -> None:
    agents = {"default": 'tools = ["read", "agent.reader"]', "reader": READER, "writer": WRITER}
    async with kernel_of(tmp_path, agents) as kernel:
        top = PlaybackModel(call_reply(("agent__reader", {"prompt": "Look."})), text_reply("."))
        reader = PlaybackModel(text_reply("Looked."))
        session = await kernel.session()
        assert "agent.reader" not in [spec.id for spec in session.active_tools]  # before a model is attached
        found = await answers(Agent(session, top, models=models(reader=reader)))
        assert [view["name"] for view in top.requests[0].tools] == ["read", "agent__reader"]
        assert "Reads." in top.requests[0].tools[1]["description"]
        assert [result.data["text"] for result in found] == ["Looked."]


def test_an_agent_that_accepts_no_delegation_cannot_be_listed_as_a_tool(tmp_path: Path) -> None:
    async def opened() -> None:
        async with kernel_of(tmp_path, {"default": 'tools = ["agent.mine"]', "mine": ""}):
            pass

    with pytest.raises(LoadError, match=r"tool 'agent\.mine' does not exist"):
        asyncio.run(opened())


@pytest.mark.proves("A-03")
async def test_a_background_task_returns_a_job_and_its_result_arrives_as_a_notification(tmp_path: Path) -> None:
    async with kernel_of(tmp_path, {"reader": READER}) as kernel:
        pause = ReplyPause()
        reader = PlaybackModel([pause, *text_reply("Read in the background.")])
        top = PlaybackModel(call_reply(task("reader", background=True)), text_reply("Begun."), text_reply("Heard."))
        session = await kernel.session()
        agent = Agent(session, top, models=models(reader=reader))
        assert (await agent.complete("Go.")).text == "Begun."
        assert '"job_id":"task_' in str(top.requests[1].messages)
        await pause.reached.wait()
        assert [child.tree_node.manifest.id for child in session.tree_node.children] == ["reader"]
        pause.proceed.set()
        assert session.notifications is not None
        await session.notifications.wait_until_pending()
        assert (await agent.complete("And?")).text == "Heard."
        assert "Read in the background." in str(top.requests[2].messages)


@pytest.mark.proves("A-03")
async def test_a_closed_session_aborts_its_background_sub_agents(tmp_path: Path) -> None:
    async with kernel_of(tmp_path, {"reader": READER}) as kernel:
        pause = ReplyPause()
        top = PlaybackModel(call_reply(task("reader", background=True)), text_reply("Begun."))
        session = await kernel.session()
        agent = Agent(session, top, models=models(reader=PlaybackModel([pause, *text_reply("never")])))
        await agent.complete("Go.")
        await pause.reached.wait()
        child = session.tree_node.children[0]
        await session.close()
        assert child.is_closed
        assert kernel.components.store.sessions.list_open_subagent_sessions(session.id) == []


@pytest.mark.proves("P-12")
async def test_an_approval_request_of_a_sub_agent_does_not_outlive_its_kernel(tmp_path: Path) -> None:
    person = ScriptedApprovalHandler()
    person.may_answer.clear()
    async with kernel_of(tmp_path, {"default": "[delegation]\ncan_ask_user = true", "writer": WRITER}) as kernel:
        writer = PlaybackModel(call_reply(("write", {"path": "a", "content": "a"})), text_reply("."))
        top = PlaybackModel(call_reply(task("writer")), text_reply("."))
        agent = Agent(await kernel.session(approval_handler=person), top, models=models(writer=writer))
        run = asyncio.ensure_future(agent.complete("Go."))
        await person.request_received.wait()
    assert (await run).status == "cancelled"
    async with temporary_kernel(tmp_path) as kernel:
        assert not kernel.approvals.list_pending()
    assert not (tmp_path / "ws" / "a").exists()
