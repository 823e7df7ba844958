"""Agents and tools that a program passes: only its tools, and agents without a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.kernel.doors import HELD, JOINED, opened

from handrail import Agent, LoadError, UsageError, open_kernel, tool
from handrail.testing import PlaybackModel, call_reply, text_reply
from handrail.tools import ALIASES, BUILTINS

BOTH = pytest.mark.parametrize("door", [HELD, JOINED])


@tool(id="desk.greet", side_effect="read", locks=[])
async def greet(name: str) -> str:
    """Greet a person."""
    return f"hello, {name}"


@tool(id="desk.leave", side_effect="read", locks=[])
async def leave() -> str:
    """Say goodbye."""
    return "bye"


DESK: dict[str, Any] = {
    "id": "desk",
    "description": "Greets.",
    "prompt": "Greet everyone.",
    "tools": ("desk.greet",),
    "rules": ["allow desk.greet"],
}


@BOTH
async def test_a_program_may_have_only_its_own_tools(tmp_path: Path, door: str) -> None:
    rules = ["allow desk.*", "allow bash git status"]  # a rule may still name a built-in tool
    async with opened(door, tmp_path, tools=[greet, leave], builtins=False, rules=rules) as kernel:
        session = await kernel.session()
        assert {spec.id for spec in session.start_turn().tool_specs} == {"desk.greet", "desk.leave"}
        assert not {one.spec.id for one in BUILTINS} & kernel.generation.entries.keys()
        assert (await session.call("desk.greet", {"name": "Ann"})).data == "hello, Ann"
        for gone in ("read", "bash", "task", *ALIASES):
            assert (await session.call(gone, {"path": "a", "command": "git status"})).error_kind == "unknown_tool"
        assert {status.tool for status in await kernel.tool_statuses()} == {"desk.greet", "desk.leave"}


async def test_other_processes_keep_the_built_in_tools_that_one_process_leaves_out(tmp_path: Path) -> None:
    async with (
        opened(HELD, tmp_path, tools=[greet], builtins=False) as ours,
        open_kernel(tmp_path / "ws", state=tmp_path / "state", config=tmp_path / "config/handrail.toml") as theirs,
    ):
        assert "glob" not in ours.generation.entries and "glob" in theirs.generation.entries
        assert (await (await theirs.session()).call("glob", {"pattern": "*"})).ok
        assert (await (await ours.session()).call("glob", {"pattern": "*"})).error_kind == "unknown_tool"


async def test_an_agent_that_names_a_built_in_tool_is_refused_without_built_in_tools(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"agent 'x' of open_kernel.*read"):
        async with opened(HELD, tmp_path, agent={"id": "x", "tools": ["read"]}, builtins=False):
            pass


@BOTH
async def test_an_agent_defined_in_code_behaves_like_one_defined_in_a_file(tmp_path: Path, door: str) -> None:
    async with opened(door, tmp_path, tools=[greet, leave], agent=DESK) as kernel:
        assert (kernel.default_agent.id, kernel.default_agent.prompt) == ("desk", "Greet everyone.")
        session = await kernel.session()
        assert [spec.id for spec in session.start_turn().tool_specs] == ["desk.greet"]
        assert (await session.call("desk.greet", {"name": "Ann"})).ok
        assert (await session.call("desk.leave", {})).error_kind == "unknown_tool"
        other = await kernel.session(agent="default")
        assert (await other.call("desk.greet", {"name": "Ann"})).error_kind == "denied", "its rules are its own"


async def test_a_session_of_an_agent_in_code_reopens_only_with_that_agent(tmp_path: Path) -> None:
    async with opened(HELD, tmp_path, tools=[greet], agent=DESK) as kernel:
        session = await kernel.session()
    async with opened(HELD, tmp_path, tools=[greet], agent=DESK) as kernel:
        assert (await (await kernel.session(session.id)).call("desk.greet", {"name": "Bo"})).ok
    async with opened(HELD, tmp_path, tools=[greet]) as kernel:
        with pytest.raises(UsageError, match="belongs to agent 'desk'"):
            await kernel.session(session.id)


async def test_an_agent_in_code_replaces_the_configured_agent_of_the_same_id(tmp_path: Path) -> None:
    folder = tmp_path / "config/agents/desk"
    folder.mkdir(parents=True)
    (folder / "agent.toml").write_text('id = "desk"\ntools = ["read"]\n')
    async with opened(HELD, tmp_path, tools=[greet], agents=[DESK]) as kernel:
        assert (await (await kernel.session(agent="desk")).call("desk.greet", {"name": "Ann"})).ok
    async with opened(HELD, tmp_path) as kernel:
        assert list((await kernel.session(agent="desk")).start_turn().tool_specs) != []


@BOTH
async def test_an_agent_delegates_work_to_a_sub_agent_defined_in_code(tmp_path: Path, door: str) -> None:
    lead = {"id": "lead", "delegation": {"agents": ["helper"]}, "rules": ["allow task", "allow desk.greet"]}
    helper = {**DESK, "id": "helper", "role": "subagent"}
    model = PlaybackModel(
        call_reply(("task", {"subagent_type": "helper", "prompt": "Greet Ann."})),
        call_reply(("desk.greet", {"name": "Ann"})),
        text_reply("Ann is greeted."),
        text_reply("Done."),
    )
    async with opened(door, tmp_path, tools=[greet], agent=lead, agents=[helper]) as kernel:
        session = await kernel.session()
        outcome = await Agent(session, model).complete("Have Ann greeted.")
        assert outcome.ok and outcome.text == "Done.", outcome
    await model.aclose()


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"agent": {"tools": ["read"]}}, "Invalid `id`"),
        ({"agent": {"id": "a b"}}, "Invalid `id`"),
        ({"agent": 3}, "Expected a mapping"),
        ({"agents": {"id": "a"}}, "Invalid `agents`"),
        ({"agents": ["a"]}, "Expected a mapping"),
        ({"agents": [{"id": "a"}, {"id": "a"}]}, "Two agents have the id 'a'"),
        ({"agent": {"id": "a", "prompt": object()}}, "not JSON"),
        ({"agent": {"id": "a", "prompt": "\ud800"}}, "not JSON"),
        ({"builtins": "no"}, "Expected True or False"),
    ],
)
async def test_an_invalid_agent_argument_is_refused(tmp_path: Path, given: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        async with opened(HELD, tmp_path, **given):
            pass


async def test_the_error_names_all_faults_of_agents_in_code(tmp_path: Path) -> None:
    given = [{"id": "a", "tool": ["read"]}, {"id": "b", "mode": "fast", "roots": [{"path": "x"}]}]
    with pytest.raises(LoadError) as caught:
        async with opened(HELD, tmp_path, agents=given):
            pass
    text = str(caught.value)
    assert all(part in text for part in ("agent 'a' of open_kernel", "tool", "agent 'b'", "mode", "roots[0].path"))
