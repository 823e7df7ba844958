"""The guard tool of seed 001: it asks a reviewing agent about the arguments, then makes the real call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from tests.kernel.test_sub_agents import answers, kernel_of, models

from handrail import Runtime, Session, SubagentTask, ToolError, tool
from handrail.agent.agent_loop import Agent
from handrail.contract.calls_and_results import Event
from handrail.kernel.local_kernel import LocalKernel
from handrail.testing.provider_request_checks import PlaybackModel, call_reply, text_reply
from handrail.testing.scripted_kernel import temporary_kernel

JUDGE = 'role = "subagent"\ndescription = "Judges."\ntools = ["read"]\nmodel = "played:judge"'
FILES = {"read": ["{workspace}"], "write": ["{workspace}"]}


class LockingTool:
    """Holds a tool that has a lock until a test opens it."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.open = asyncio.Event()


door = LockingTool()


@pytest.fixture(autouse=True)
def a_closed_door() -> None:
    door.__init__()


@tool(id="guard.write", side_effect="external", locks=[], requires={"capabilities": ["agents", "call"], "fs": FILES})
async def guarded_write(path: str, content: str, runtime: Runtime) -> object:
    """Write a file once a judge agrees.

    Args:
        path: where
        content: the whole text
    """
    verdict = await runtime.subagents.run(SubagentTask("judge", f"May this be written to {path}?\n{content}"))
    if not verdict.ok or verdict.data["text"].strip() != "yes":
        said = verdict.data["text"] if verdict.ok else verdict.error_text
        raise ToolError(f"the judge refused: {said}", kind="denied")
    return (await runtime.call("write", {"path": path, "content": content})).to_dict()


@tool(id="hold.workspace", side_effect="external", locks=["workspace:X"])
async def hold() -> str:
    """Hold the workspace until the door opens."""
    door.entered.set()
    await door.open.wait()
    return "held"


@tool(id="hold.calls", side_effect="external", locks=["workspace:X"], requires={"capabilities": ["call"]})
async def holds_and_calls(name: str, arguments: dict[str, Any], runtime: Runtime) -> object:
    """Call another tool while holding the workspace."""
    return (await runtime.call(name, arguments)).to_dict()


@tool(id="free.calls", side_effect="external", locks=[], timeout_ms=40, requires={"capabilities": ["call"]})
async def free_and_calls(names: list[str], runtime: Runtime) -> list[Any]:
    """Call other tools at once, holding nothing."""
    return [result.to_dict() for result in await asyncio.gather(*(runtime.call(name, {}) for name in names))]


@tool(id="free.waits", side_effect="read", locks=[], timeout_ms=80)
async def times_out() -> None:
    """Run until the time-out."""
    await asyncio.Event().wait()


@tool(id="mark.set", side_effect="external", locks=["workspace:X"])
async def mark() -> str:
    """Take the workspace for a moment."""
    await asyncio.sleep(0)
    return "marked"


@tool(id="free.steps", mode="stateful", side_effect="external", locks=[], requires={"capabilities": ["call"]})
async def steps(runtime: Runtime) -> AsyncGenerator[Any, Any]:
    """Call a tool that takes locks in each step."""
    while True:
        yield (await runtime.call("mark.set", {})).to_dict()


TOOLS = [guarded_write, hold, holds_and_calls, free_and_calls, times_out, mark, steps]
RULES = ["allow guard.*", "allow hold.*", "allow free.*", "allow mark.*"]


async def waiting(session: Session) -> Event:
    """Return the first event of a call that waits for locks, from now on."""
    found: asyncio.Future[Event] = asyncio.get_running_loop().create_future()
    stop = session.watch_events(
        lambda event: None if event.kind != "awaiting-locks" or found.done() else found.set_result(event)
    )
    try:
        return await found
    finally:
        stop()


def reply(path: str) -> Any:
    return call_reply(("guard__write", {"path": path, "content": "text"}))


async def records_of(kernel: LocalKernel, session: Session, call: str) -> list[tuple[str, dict[str, Any]]]:
    await kernel.log.flush()
    found = kernel.log.reader.records(call=f"{session.id}/{call}")
    return [(record.kind, dict(record.body or {})) for record in found]


@pytest.mark.proves("L-08")
async def test_a_guard_tool_asks_a_judge_and_its_inner_call_takes_its_own_locks(tmp_path: Path) -> None:
    async with kernel_of(tmp_path, {"judge": JUDGE}, tools=TOOLS, rules=[*RULES, "allow write **"]) as kernel:
        judge = PlaybackModel(text_reply("yes"), text_reply("it holds a password"))
        top = PlaybackModel(reply("a.txt"), reply("b.txt"), text_reply("Done."))
        session = await kernel.session()
        agent = Agent(session, top, workspace=session.workdir, models=models(judge=judge))
        written, refused = await answers(agent)

        assert written.ok and written.data["type"] == "output"
        assert (tmp_path / "ws" / "a.txt").read_text() == "text"
        assert "May this be written to a.txt?" in str(judge.requests[0].messages)
        assert refused.error_kind == "denied" and "it holds a password" in str(refused.error_text)
        assert not (tmp_path / "ws" / "b.txt").exists()
        inner = dict(await records_of(kernel, session, "1.0.1"))
        assert inner["proposed"]["parent"] == f"{session.id}/1.0"
        assert inner["intended"]["locks"] == ["workspace/a.txt:X"]
        assert await records_of(kernel, session, "2.0.1") == []


@pytest.mark.proves("L-08")
@pytest.mark.parametrize(("rule", "said"), [("deny write **", "deny"), ("ask write **", "cannot ask the user")])
async def test_an_inner_call_of_a_guard_tool_follows_the_rules(tmp_path: Path, rule: str, said: str) -> None:
    async with kernel_of(tmp_path, {"judge": JUDGE}, tools=TOOLS, rules=[*RULES, rule]) as kernel:
        judge, top = PlaybackModel(text_reply("yes")), PlaybackModel(reply("a.txt"), text_reply("."))
        session = await kernel.session()
        (answer,) = await answers(Agent(session, top, workspace=session.workdir, models=models(judge=judge)))
        assert answer.data["metadata"]["error_kind"] == "denied" and said in answer.data["error_text"]
        assert not (tmp_path / "ws" / "a.txt").exists()


@pytest.mark.proves("L-08")
async def test_the_lock_wait_of_an_inner_call_does_not_count_towards_its_callers_timeout(
    tmp_path: Path,
) -> None:
    async with temporary_kernel(tmp_path, tools=TOOLS, rules=RULES) as kernel:
        session = await kernel.session()
        holding = asyncio.create_task(session.call("hold.workspace", {}))
        await door.entered.wait()
        waits = asyncio.ensure_future(waiting(session))
        caller = asyncio.create_task(session.call("free.calls", {"names": ["mark.set", "mark.set"]}))
        assert "hold.workspace" not in str((await waits).tool_id)
        assert (await session.call("free.waits", {})).error_kind == "timeout"  # longer than the caller's time-out
        assert not caller.done()
        door.open.set()
        assert (await holding).ok
        answer = await caller
        assert answer.ok and [inner["data"] for inner in answer.data] == ["marked", "marked"]


@pytest.mark.proves("L-08", "X-03")
async def test_each_step_of_a_stateful_tool_without_locks_can_call_a_tool_with_locks(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, tools=TOOLS, rules=RULES) as kernel:
        session = await kernel.session()
        first = await session.call("free.steps", {})
        second = await session.call("tool.step", {"id": first.data["state_id"]})
        assert [one.data["step"]["data"] for one in (first, second)] == ["marked", "marked"]


@pytest.mark.proves("L-08")
async def test_an_inner_call_below_a_lock_holding_caller_cannot_take_other_locks(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, tools=TOOLS, rules=RULES) as kernel:
        session = await kernel.session()
        arguments = {"name": "free.calls", "arguments": {"names": ["mark.set"]}}
        covered = await session.call("hold.calls", arguments)
        assert covered.data["data"][0]["data"] == "marked"  # by the workspace lock that is held above

        @tool(id="other.set", side_effect="external", locks=["other:X"])
        async def other() -> str:
            """Take another lock."""
            return "taken"

    async with temporary_kernel(tmp_path / "2", tools=[*TOOLS, other], rules=[*RULES, "allow other.*"]) as kernel:
        session = await kernel.session()
        arguments = {"name": "free.calls", "arguments": {"names": ["other.set"]}}
        (inner,) = (await session.call("hold.calls", arguments)).data["data"]
        assert inner["metadata"]["error_kind"] == "conflict" and "needs the locks other:X" in inner["error_text"]


@pytest.mark.proves("L-08")
@pytest.mark.parametrize(
    ("name", "arguments", "capability"),
    [
        ("task", {"subagent_type": "judge", "prompt": "?"}, "agents"),
        ("wait", {}, "jobs"),
        ("question", {"questions": [{"question": "?"}]}, "ask"),
    ],
)
async def test_a_tool_that_holds_locks_cannot_call_a_tool_that_waits(
    tmp_path: Path, name: str, arguments: dict[str, Any], capability: str
) -> None:
    async with kernel_of(tmp_path, {"judge": JUDGE}, tools=TOOLS, rules=[*RULES, "allow bash true"]) as kernel:
        session = await kernel.session()
        judge = PlaybackModel(text_reply("yes"))
        Agent(session, PlaybackModel(), models=models(judge=judge))
        if name == "wait":
            job = await session.call("bash", {"command": "true", "background": True})
            arguments = {"job_id": job.data["job_id"]}
        answer = await session.call("hold.calls", {"name": name, "arguments": arguments})
        assert (
            f"Tool `{name}` requires {capability!r}, which tool hold.calls does not have" in answer.data["error_text"]
        )
        assert judge.requests == []
