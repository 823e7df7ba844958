"""The agents that a task may be delegated to: checked before the call runs or becomes a job."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.kernel.guests import joined_kernel
from tests.kernel.test_sub_agents import Agents, answers, kernel_of, models, task

from handrail import Kernel
from handrail.agent.agent_loop import Agent
from handrail.agent.model_protocol import CallResultsMessage
from handrail.contract.approval_requests import ApprovalAnswer
from handrail.contract.calls_and_results import Result
from handrail.testing.provider_request_checks import PlaybackModel, call_reply, text_reply
from handrail.testing.scripted_kernel import ScriptedApprovalHandler

LEAD = 'tools = ["read", "task", "agent.nope"]\n[delegation]\nagents = ["wr", "rec", "nope"]'
WR = 'role = "all"\ntools = ["read", "task", "agent.own", "agent.rec"]\nmodel = "played:wr"'
REC = 'role = "all"\ntools = ["read"]\nmodel = "played:rec"'
OWN = 'role = "all"\ntools = ["read"]\nmodel = "played:own"'
NOPE = 'role = "all"\ntools = ["read", "no.such"]'
TEAM = {"default": LEAD, "wr": WR, "rec": REC, "own": OWN, "nope": NOPE}


@asynccontextmanager
async def team(folder: Path, agents: Agents, *, joined: bool) -> AsyncGenerator[Kernel]:
    """A kernel that holds its workspace, or a joined one."""
    async with kernel_of(folder, agents) as held:
        if not joined:
            yield held
            return
        async with joined_kernel(folder) as kernel:
            yield kernel


def is_job(result: Result) -> bool:
    return "job_id" in result.metadata


@pytest.mark.proves("P-12")
@pytest.mark.parametrize("joined", [False, True])
async def test_a_sub_agent_delegates_only_to_agents_that_its_callers_may_use(tmp_path: Path, joined: bool) -> None:
    async with team(tmp_path, TEAM, joined=joined) as kernel:
        further = call_reply(
            task("own"), ("agent__own", {"prompt": "Do it."}), task("rec"), ("agent__rec", {"prompt": "Do it."})
        )
        wr, own = PlaybackModel(further, text_reply(".")), PlaybackModel(text_reply("never said"))
        rec = PlaybackModel(text_reply("one"), text_reply("two"))
        top = PlaybackModel(call_reply(task("wr")), text_reply("."))
        agent = Agent(await kernel.session(), top, models=models(wr=wr, rec=rec, own=own))
        assert (await agent.complete("Go.")).ok
        told = str(wr.requests[1].messages)
        assert told.count("not available for delegation. Available agents: nope, rec, wr.") == 2
        assert (len(own.requests), len(rec.requests)) == (0, 2)
        assert "- rec" in wr.requests[0].system and "- own" not in wr.requests[0].system
        assert [view["name"] for view in wr.requests[0].tools] == ["read", "task", "agent__rec"]


@pytest.mark.proves("P-12")
async def test_a_users_session_delegates_to_every_agent_that_its_manifest_names(tmp_path: Path) -> None:
    async with kernel_of(tmp_path, TEAM) as kernel:
        own = PlaybackModel(text_reply("done"))
        top = PlaybackModel(call_reply(task("own")), text_reply("."))
        (found,) = await answers(Agent(await kernel.session(agent="wr"), top, models=models(own=own)))
        assert (found.ok, found.data["text"]) == (True, "done")


@pytest.mark.proves("A-03")
@pytest.mark.parametrize("joined", [False, True])
async def test_a_delegation_that_cannot_start_returns_an_error_instead_of_a_job(tmp_path: Path, joined: bool) -> None:
    async with team(tmp_path, TEAM, joined=joined) as kernel:
        direct = [task("zzz"), task("nope"), ("agent__nope", {"prompt": "Do it."})]
        behind: list[tuple[str, dict[str, Any]]] = [(name, {**given, "background": True}) for name, given in direct]
        session = await kernel.session()
        top = PlaybackModel(call_reply(*direct), call_reply(*behind), text_reply("."))
        found = await answers(Agent(session, top))
        assert [result.error_kind for result in found] == ["invalid_input", "unavailable", "unavailable"] * 2
        assert [result.error_text for result in found[:3]] == [result.error_text for result in found[3:]]
        assert not any(map(is_job, found)) and not await session.jobs.list()


@pytest.mark.proves("A-03")
async def test_a_sixth_level_of_delegation_creates_no_job(tmp_path: Path) -> None:
    async with kernel_of(tmp_path, {}) as kernel:
        downwards = [call_reply(task("default", background=level == 6)) for level in range(1, 7)]
        model = PlaybackModel(*downwards, *(text_reply(f"up {n}") for n in range(6)))
        assert (await Agent(await kernel.session(), model).complete("Go down.")).text == "up 5"
        told = str(model.requests[6].messages)
        assert "at most 5 levels deep" in told and "job_id" not in told
        assert not await kernel.jobs.list()


@pytest.mark.proves("A-03")
async def test_an_impossible_delegation_is_refused_before_approval_and_changed_arguments_are_checked_too(
    tmp_path: Path,
) -> None:
    async with kernel_of(tmp_path, TEAM | {"default": f"rules = ['ask task']\n{LEAD}"}) as kernel:
        instead = {"subagent_type": "own", "prompt": "Do it.", "background": True}
        person = ScriptedApprovalHandler([ApprovalAnswer("once", arguments=instead)])
        session = await kernel.session(approval_handler=person)
        top = PlaybackModel(call_reply(task("zzz"), task("wr", "Write.")), text_reply("."))
        found = await answers(Agent(session, top))
        assert [request.arguments["subagent_type"] for request in person.requests] == ["wr"]
        assert [result.error_kind for result in found] == ["invalid_input", "invalid_input"]
        assert not any(map(is_job, found)) and not await session.jobs.list()


LOOKS = ["find_tools", "load_tools", "info", "browse_tools"]


@pytest.mark.proves("P-12", "D-05")
@pytest.mark.parametrize("joined", [False, True])
async def test_an_agent_that_callers_may_not_use_is_not_offered_as_a_tool(tmp_path: Path, joined: bool) -> None:
    wr = f'role = "all"\ntools = {[*LOOKS, "agent.*"]}\nmodel = "played:wr"'
    agents = {
        "default": f'tools = {[*LOOKS, "task"]}\n[delegation]\nagents = ["wr", "rec"]',
        "wr": wr,
        "rec": REC,
        "own": OWN,
    }
    async with team(tmp_path, agents, joined=joined) as kernel:
        looks = call_reply(
            ("find_tools", {"query": "agent own"}),
            ("load_tools", {"tool": "agent.own"}),
            ("load_tools", {"tool": "agent.owm"}),
            ("load_tools", {"category": "agent"}),
            ("info", {"tool": "agent.own"}),
            ("info", {"tool": "agent.owm"}),
            ("agent__own", {"prompt": "Do it."}),
        )
        model = PlaybackModel(looks, text_reply("."))
        top = PlaybackModel(call_reply(task("wr")), text_reply("."))
        assert (await Agent(await kernel.session(), top, models=models(wr=model)).complete("Go.")).ok
        assert "agent__own" not in str(model.requests[0].tools) + str(model.requests[1].tools)
        assert "agent.own" not in model.requests[0].system
        results = model.requests[1].messages[-1]
        assert isinstance(results, CallResultsMessage)
        found, loaded, near, category, manual, unknown, called = (result.text for result in results.results)
        assert "agent.own" not in found and "agent.own" not in category
        assert "cannot be used here" in loaded and "cannot be used here" in manual
        assert "agent.own" not in near and "agent.own" not in unknown
        assert "not available for delegation. Available agents: rec, wr." in called


@pytest.mark.proves("A-03")
async def test_an_agent_tool_is_hidden_at_the_deepest_delegation_level(tmp_path: Path) -> None:
    deep = 'role = "all"\ntools = ["read", "task", "agent.deep"]'
    async with kernel_of(tmp_path, {"deep": deep}) as kernel:
        downwards = [call_reply(task("deep")) for _ in range(5)]
        model = PlaybackModel(
            *downwards, call_reply(("agent__deep", {"prompt": "."})), *(text_reply(".") for _ in range(6))
        )
        assert (await Agent(await kernel.session(), model).complete("Go down.")).ok
        views = [[view["name"] for view in request.tools] for request in model.requests[1:6]]
        assert views == [["read", "task", "agent__deep"]] * 4 + [["read", "task"]]
        assert "at most 5 levels deep" in str(model.requests[6].messages)
