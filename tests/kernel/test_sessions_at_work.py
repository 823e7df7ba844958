"""Sessions with running sub-agents, jobs and triggers: stopped, resumed, forked and closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from tests.kernel.test_sub_agents import kernel_of, models, task

from handrail import ApprovalAnswer, Runtime, tool
from handrail.agent.agent_loop import Agent
from handrail.agent.model_protocol import ProviderDenied
from handrail.agent.run_events import CallAnswered
from handrail.contract.calls_and_results import Result
from handrail.contract.session_protocols import Session
from handrail.kernel.local_kernel import LocalKernel
from handrail.session.local_session import LocalSession
from handrail.store.tables.job_tables import JobRetention
from handrail.testing.provider_request_checks import PlaybackModel, ReplyPause, call_reply, text_reply
from handrail.testing.scripted_kernel import ScriptedApprovalHandler, temporary_kernel

pytestmark = pytest.mark.proves("A-10")


@dataclass
class CountingTools:
    """Tools whose runs are counted, and that do not end before they may."""

    ran: list[str] = field(default_factory=list[str])
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    may_end: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def tools(self) -> list[Any]:
        @tool(id="hold", side_effect="external", locks=[])
        async def hold(name: str, runtime: Runtime) -> str:
            """Hold the turn up."""
            self.ran.append(name)
            self.begun.set()
            await asyncio.Event().wait()
            return name

        @tool(id="build", side_effect="external", mode="background", locks=[])
        async def build(name: str, runtime: Runtime) -> str:
            """Build in the background."""
            self.ran.append(name)
            await self.may_end.wait()
            return f"{name} is built"

        return [hold, build]


HOLDER = 'role = "subagent"\ntools = ["hold"]\nrules = ["allow hold"]\nmodel = "played:holder"'
QUIET = 'role = "subagent"\ntools = ["build", "add_timer"]\nrules = ["allow build", "allow add_timer"]\nmodel = "played:quiet"'
TIMER = ("add_timer", {"interval": 3600, "prompt": "An hour has gone."})


@dataclass
class BusySession:
    """A session with an awaited sub-agent, one in the background, a job and a trigger."""

    kernel: LocalKernel
    session: LocalSession
    agent: Agent
    shop: CountingTools
    quiet: ReplyPause
    run: asyncio.Task[Any]

    @property
    def children(self) -> dict[str, LocalSession]:
        return {child.tree_node.manifest.id: child for child in self.session.tree_node.children}


@asynccontextmanager
async def busy(folder: Path) -> AsyncGenerator[BusySession]:
    shop, pause = CountingTools(), ReplyPause()
    agents = {"holder": HOLDER, "quiet": QUIET}
    async with kernel_of(
        folder, agents, tools=shop.tools, rules=["allow build", "allow hold", "allow add_timer"]
    ) as kernel:
        session = await kernel.session("ses_busy")
        begun = call_reply(("build", {"name": "site"}), task("quiet", background=True), TIMER)
        top = PlaybackModel(begun, call_reply(task("holder", "Hold.")), text_reply("Gone on."))
        by_name = models(
            holder=PlaybackModel(call_reply(("hold", {"name": "held"}))),
            quiet=PlaybackModel([pause, *text_reply("Quietly done.")]),
        )
        agent = Agent(session, top, models=by_name)
        run = asyncio.ensure_future(agent.complete("Go."))
        await shop.begun.wait()
        await pause.reached.wait()
        yield BusySession(kernel, session, agent, shop, pause, run)


async def states(session: Session) -> dict[str, str]:
    return {job.tool_id: job.state for job in await session.jobs.list()}


async def triggers(session: LocalSession) -> list[str]:
    assert session.lane.triggers is not None
    return [trigger.name for trigger in await session.lane.triggers.list_triggers()]


async def list_notices(session: Session) -> list[tuple[str, str]]:
    assert session.notifications is not None
    return [(notice.kind, notice.text) for notice in await session.notifications.list_pending()]


async def test_a_user_stop_ends_the_turn_and_leaves_background_jobs_and_triggers_running(tmp_path: Path) -> None:
    async with busy(tmp_path) as there:
        session, holder = there.session, there.children["holder"]
        there.agent.cancel()
        assert (await there.run).status == "cancelled"
        assert list(there.children) == ["quiet"], "the one that works for a job goes on"
        assert await states(session) == {"build": "running", "task": "running"}
        assert await triggers(session) == ["timer-1"]
        await there.kernel.log.flush()
        (held,) = there.kernel.log.reader.calls(session=holder.id)
        assert held.error_text == "`hold` was aborted by parent."
        answer = str(there.agent.messages[-1])
        assert "`task` was stopped by the user" in answer and f'"session_id":"{holder.id}"' in answer
        assert (await there.agent.complete("Go on.")).text == "Gone on.", "in the same process"
        there.shop.may_end.set()
        there.quiet.proceed.set()
        for job in await session.jobs.list():
            assert (await session.jobs.wait(job.id, timeout_ms=60_000) or Result.output(None)).ok
        assert sorted(text.split(" (")[1].split(")")[0] for _, text in await list_notices(session)) == ["build", "task"]
    assert sorted(there.shop.ran) == ["held", "site"], "each once"


async def test_a_session_resumes_in_a_new_process_with_interrupted_work_and_pending_triggers(tmp_path: Path) -> None:
    async with busy(tmp_path) as there:
        quiet, holder = there.children["quiet"].id, there.children["holder"].id
    assert (await there.run).status == "cancelled"
    shop = CountingTools()
    async with temporary_kernel(tmp_path, tools=shop.tools, rules=["allow build"]) as kernel:
        session = await kernel.session("ses_busy")
        assert await states(session) == {"build": "cancelled", "task": "cancelled"}
        assert await triggers(session) == ["timer-1"]
        heard = PlaybackModel(text_reply("I see."))
        assert (await Agent(session, heard).complete(None)).text == "I see."
        said = str(heard.requests[0].messages)
        assert f'"session_id":"{holder}"' in said and "he kernel is shutting down" in said
        assert said.count("Job build_") == said.count("Job task_") == 1 and quiet in said
        assert (await kernel.session(await kernel.fork_session(quiet), agent="quiet")).id != quiet
    assert (shop.ran, there.shop.ran.count("site")) == ([], 1)


async def test_a_fork_copies_the_messages_without_jobs_triggers_or_grants(tmp_path: Path) -> None:
    person = ScriptedApprovalHandler([ApprovalAnswer("session"), ApprovalAnswer("defer")])
    async with busy(tmp_path) as there:
        await there.session.suspend()
        await there.run
        session = await there.kernel.session("ses_busy", approval_handler=person)
        asked = session.start_turn()
        answers = await asked.call_all(
            [("write", {"path": "a", "content": ""}), ("write", {"path": "b", "content": ""})]
        )
        assert [answer.result.ok for answer in answers] == [True, False]
        forked = await there.kernel.session(await there.kernel.fork_session("ses_busy"))
        assert (await forked.jobs.list(), await triggers(forked), await list_notices(forked)) == ([], [], [])
        assert (
            await forked.list_calls_awaiting_approval() == [] and len(await session.list_calls_awaiting_approval()) == 1
        )
        assert (await forked.call("write", {"path": "a", "content": ""})).error_kind == "denied", "no grant came along"
        ((build, task_),) = [[job.id for job in await session.jobs.list()]]
        for job_id in (build, task_):
            assert (await forked.call("read_job", {"job_id": job_id})).error_kind == "invalid_input"
        model = PlaybackModel(text_reply("A fork."))
        assert (await Agent(forked, model).complete("And you?")).text == "A fork."
        assert str(model.requests[0].messages).count("was stopped by the user") == 1
        assert await states(session) == {"build": "running", "task": "running"}, "they stay with the other"
        assert forked.tree_node.children == []


async def test_a_sub_agent_waits_for_its_jobs_and_receives_their_results(tmp_path: Path) -> None:
    shop = CountingTools()
    shop.may_end.set()
    async with kernel_of(tmp_path, {"quiet": QUIET}, tools=shop.tools) as kernel:
        quiet = PlaybackModel(call_reply(("build", {"name": "part"})), text_reply("Begun."), text_reply("It is built."))
        top = PlaybackModel(call_reply(task("quiet")), text_reply("."))
        session = await kernel.session()
        answers = await _answers(Agent(session, top, models=models(quiet=quiet)))
        assert answers[0].data["text"] == "It is built."
        assert "part is built" in str(quiet.requests[-1].messages)


@pytest.mark.parametrize("how", ["end", "stop"])
async def test_jobs_and_triggers_of_a_sub_agent_end_with_it(tmp_path: Path, how: str) -> None:
    shop, pause = CountingTools(), ReplyPause()
    async with kernel_of(tmp_path, {"quiet": f"{QUIET}\n[budgets]\nturns = 1"}, tools=shop.tools) as kernel:
        began = call_reply(("build", {"name": "part"}), TIMER, ("add_timer", {**TIMER[1], "name": "other"}))
        quiet = PlaybackModel(began[:-1] + ([pause] if how == "stop" else []) + began[-1:])
        agent = Agent(
            session := await kernel.session(),
            PlaybackModel(call_reply(task("quiet")), text_reply(".")),
            models=models(quiet=quiet),
        )
        run = asyncio.ensure_future(agent.complete("Go."))
        if how == "stop":
            await pause.reached.wait()
            child = session.tree_node.children[0]
            while len(await triggers(child)) < 2 or not await child.jobs.list():
                await asyncio.sleep(0)
            agent.cancel()
        await run
        (row,) = kernel.components.store.sessions.list_open_subagent_sessions(session.id)
        assert [(job.session_id, job.state) for job in await kernel.jobs.list()] == [(row.id, "cancelled")]
        assert kernel.components.store.triggers.list_all() == []


async def test_jobs_and_triggers_of_a_sub_agent_are_not_resumed_by_the_next_kernel(tmp_path: Path) -> None:
    ran: list[str] = []

    @tool(id="rebuild", side_effect="external", mode="background", locks=[], idempotent=True)
    async def rebuild(name: str) -> str:
        """Build as often as needed."""
        ran.append(name)
        await asyncio.Event().wait()
        return name

    agents = {"quiet": 'role = "subagent"\nrules = ["allow rebuild", "allow add_timer"]\nmodel = "played:quiet"'}
    async with kernel_of(tmp_path, agents, tools=[rebuild], rules=["allow rebuild"]) as kernel:
        pause = ReplyPause()
        session = await kernel.session("ses_top")
        top = PlaybackModel(call_reply(task("quiet")))
        agent = Agent(session, top, models=models(quiet=PlaybackModel([pause, *text_reply("never")])))
        run = asyncio.ensure_future(agent.complete("Go."))
        await pause.reached.wait()
        for one in (session, session.tree_node.children[0]):
            assert (await one.call("rebuild", {"name": one.tree_node.manifest.id})).ok
        assert (await session.tree_node.children[0].call(*TIMER)).ok
        while len(ran) < 2:
            await asyncio.sleep(0)
    assert (await run).status == "cancelled"
    async with temporary_kernel(tmp_path, tools=[rebuild], rules=["allow rebuild"]) as kernel:
        assert {job.summary: job.state for job in await kernel.jobs.list()} == {
            "default": "pending",
            "quiet": "cancelled",
        }
        await kernel.session("ses_top")
        assert kernel.components.store.triggers.list_all() == []
        while len(ran) < 3:
            await asyncio.sleep(0)
    assert ran == ["default", "quiet", "default"]


async def _answers(agent: Agent) -> list[Result]:
    return [event.answer.result async for event in agent.run("Go.") if isinstance(event, CallAnswered)]


@pytest.mark.proves("X-06")
async def test_an_ended_job_of_a_sub_agent_is_removed_without_a_delivered_notification(tmp_path: Path) -> None:
    shop = CountingTools()
    quiet = PlaybackModel(call_reply(("build", {"name": "site"})), [ProviderDenied("gone")])
    async with kernel_of(tmp_path, {"quiet": QUIET}, tools=shop.tools, rules=["allow build"]) as kernel:
        session = await kernel.session()
        agent = Agent(
            session, PlaybackModel(call_reply(task("quiet")), text_reply("Well.")), models=models(quiet=quiet)
        )
        assert (await agent.complete("Go.")).ok
        (job,) = await kernel.jobs.list()
        assert job.has_ended and job.session_id != session.id
        jobs = kernel.components.arbiter.jobs
        jobs.limits = replace(jobs.limits, retention=JobRetention(max_jobs=0, min_age_ns=0))
        await kernel.log.flush()
        await jobs.remove_old()
        assert not await kernel.jobs.list(), "so it makes room as any other"
