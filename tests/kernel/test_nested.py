"""Calls of tools: no approval is requested while the caller holds locks, and no right exceeds the caller's."""

from __future__ import annotations

from pathlib import Path

import pytest

from handrail import ApprovalAnswer, Runtime, ToolError, tool
from handrail.testing.scripted_kernel import ScriptedApprovalHandler, temporary_kernel

ran: list[str] = []


@tool(id="mail.send", side_effect="external", locks=["outbox:X"])
async def send(to: str) -> str:
    """Send a mail."""
    ran.append(to)
    return to


@tool(id="mail.all", side_effect="external", locks=["outbox:X"], requires={"capabilities": ["call"]})
async def send_to_all(names: list[str], runtime: Runtime) -> list[str | None]:
    """Send a mail to each."""
    return [(await runtime.call("mail.send", {"to": name})).error_text for name in names]


@tool(id="mail.alone", side_effect="external", locks=["outbox:X"])
async def without_the_door(runtime: Runtime) -> str:
    """Call without having declared it."""
    await runtime.call("mail.send", {"to": "nobody"})
    return "called"


@pytest.mark.proves("X-13", "L-08")
async def test_a_nested_call_is_denied_without_a_rule_and_no_user_is_asked(tmp_path: Path) -> None:
    ran.clear()
    person = ScriptedApprovalHandler([ApprovalAnswer("once")] * 3)
    tools, rules = [send, send_to_all], ["allow mail.all", "allow mail.send to=ann"]
    async with temporary_kernel(tmp_path, tools=tools, rules=rules) as kernel:
        session = await kernel.session(approval_handler=person)
        allowed, refused = (await session.call("mail.all", {"names": ["ann", "bob"]})).data
        assert allowed is None and "cannot ask" in refused
        assert ran == ["ann"] and person.requests == []
        await kernel.log.flush()
        rows = {row.call_id.rpartition("/")[2]: row.state for row in kernel.log.reader.calls()}
        assert rows == {"1.0": "output", "1.0.1": "output", "1.0.2": "rejected"}


@pytest.mark.proves("K-11a")
async def test_a_tool_that_does_not_require_calls_cannot_make_them(tmp_path: Path) -> None:
    ran.clear()
    async with temporary_kernel(tmp_path, tools=[send, without_the_door], rules=["allow mail.*"]) as kernel:
        answer = await (await kernel.session()).call("mail.alone", {})
        assert not answer.ok and answer.error_text is not None and "call" in answer.error_text
    assert ran == []


DOORS = (
    *(
        "files",
        "search",
        "shell",
        "net",
        "state",
        "user",
        "catalog",
        "subagents",
        "channels",
        "triggers",
        "transcript",
        "memory",
    ),
    *("skills", "jobs", "terminals", "resources"),
)
"""The doors of a runtime that a tool has only where its requires name them."""


@tool(id="doors.try", side_effect="read", locks=[])
async def without_doors(runtime: Runtime) -> dict[str, str]:
    """Open every door; say which could be opened, and what was said of the others."""
    told: dict[str, str] = {}
    for door in DOORS:
        try:
            getattr(runtime, door)
            told[door] = "opened"
        except ToolError as error:
            told[door] = f"{error.kind}: {error.text}"
    return told


@pytest.mark.proves("K-11a")
async def test_a_tool_without_requirements_is_denied_each_runtime_capability(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, tools=[without_doors], rules=["allow doors.try"]) as kernel:
        told = (await (await kernel.session()).call("doors.try", {})).data
    assert [door for door in DOORS if not told[door].startswith("denied: Tool `doors.try` did not declare ")] == []


@pytest.mark.proves("K-11a")
async def test_each_file_service_needs_its_own_capability(tmp_path: Path) -> None:
    @tool(id="doors.files", side_effect="write", locks=[], requires={"fs": {"write": ["a"]}})
    async def writes(runtime: Runtime) -> object:
        """Have files, and neither a search nor a shell."""
        with pytest.raises(ToolError, match=r"did not declare 'fs\.read'"):
            _ = runtime.search
        with pytest.raises(ToolError, match="did not declare 'shell'"):
            _ = runtime.shell
        return (await runtime.files.write("a", b"x")).path

    rules = ["allow doors.files", "allow fs.write a"]
    async with temporary_kernel(tmp_path, tools=[writes], rules=rules) as kernel:
        assert (await (await kernel.session()).call("doors.files", {})).data == "a"


@pytest.mark.proves("K-10", "K-11a")
@pytest.mark.parametrize(("ceiling", "reaches"), [('["state"]', False), ('["state", "call"]', True)])
async def test_the_ceiling_also_limits_the_capabilities_that_reach_other_sessions(
    tmp_path: Path, ceiling: str, reaches: bool
) -> None:
    ran.clear()
    tools, settings = [send, send_to_all], f"[ceiling]\ncapabilities = {ceiling}\n"
    async with temporary_kernel(tmp_path, tools=tools, rules=["allow mail.*"], settings=settings) as kernel:
        session = await kernel.session()
        answer = await session.call("mail.all", {"names": ["ann"]})
        assert (await session.call("todo", {"todos": []})).ok
    if reaches:
        assert answer.ok and ran == ["ann"]
    else:
        assert answer.error_kind == "denied" and ran == []
        assert answer.error_text is not None and "the host's ceiling" in answer.error_text
