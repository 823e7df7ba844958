"""The table of shipped tools says what is so: each is called, and gives the keys that its row has."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from tests.kernel.test_agents import confined, put_agent
from tests.registry.test_own_offering import put_offering
from tests.tool_reference import RESULTS, TABLE, render, rows, shipped, where
from tests.tools.githost import GitHost
from tests.tools.repositories import made

from handrail.agent.loop import Agent
from handrail.contract.call import Result
from handrail.contract.session import Session
from handrail.contract.tool.decorator import tool
from handrail.contract.tool.names import STATE_IDS, TERMINAL_IDS
from handrail.testing.kernels import ScriptedApprovalHandler, temporary_kernel
from handrail.testing.request_checks import PlaybackModel, text_reply
from handrail.tools import ALIASES, BUILTINS

CALLS: dict[str, dict[str, Any]] = {
    "write": {"path": "a.txt", "content": "one\ntwo\n"},
    "read": {"path": "a.txt"},
    "edit": {"path": "a.txt", "old": "one", "new": "uno"},
    "file.patch": {"path": "a.txt", "operations": [{"op": "append", "content": "three\n"}]},
    "glob": {"pattern": "*.txt"},
    "grep": {"pattern": "uno"},
    "bash": {"command": "echo hi"},
    "todo": {"todos": [{"id": "1", "content": "x", "status": "pending"}]},
    "question": {"questions": [{"question": "Which?", "options": [{"label": "a"}, {"label": "b"}]}]},
    "task": {"subagent_type": "default", "prompt": "Say hello."},
    "skill": {"name": "tool-builder"},
    "browse_tools": {},
    "load_tools": {"category": "git"},
    "find_tools": {"query": "show what git has recorded"},
    "tool_search": {"query": "send a letter"},
    "info": {"tool": "read"},
    "multi_edit": {"path": "a.txt", "edits": [{"old": "two", "new": "due"}]},
    "tree": {},
    "json_write": {"path": "a.json", "value": {"a": [1]}},
    "json_read": {"path": "a.json", "pointer": "/a/0"},
    "python": {"code": "print(6 * 7)"},
    "jobs": {},
    "wait": {"job_id": "…"},
    "read_job": {"job_id": "…"},
    "stop_task": {"job_id": "…"},
    "terminal.start": {"command": "cat"},
    "terminal.send": {"id": "…", "keys": "enter"},
    "terminal.read": {"id": "…"},
    "terminal.resize": {"id": "…", "columns": 80, "rows": 24},
    "terminal.stop": {"id": "…"},
    "tool.step": {"id": "…"},
    "tool.close": {"id": "…"},
    "scratchpad": {"action": "set", "key": "k", "value": "v"},
    "search_memory": {"query": "uno"},
    "artifact.read": {"ref": "…", "limit": 4},
    "memory.compact": {},
    "send_message": {"channel": "c", "message": "hello"},
    "wait_channel": {"channel": "c", "timeout_ms": 0},
    "add_timer": {"interval": 3600, "prompt": "look", "name": "t"},
    "add_schedule": {"daily_at": "08:30", "prompt": "look"},
    "watch_channel": {"channel": "d", "prompt": "look"},
    "list_triggers": {},
    "remove_trigger": {"name": "t"},
    "git.init": {"path": "new"},
    "git.add": {"paths": ["a.txt"]},
    "git.commit": {"message": "more"},
    "git.status": {},
    "git.log": {},
    "git.diff": {},
    "git.show": {},
    "git.blame": {"path": "a.txt"},
    "git.branches": {},
    "git.create_branch": {"name": "more"},
    "git.checkout": {"ref": "more"},
    "git.merge": {"ref": "main"},
    "git.stash": {"action": "list"},
    "git.clone": {"source": ".", "path": "copy"},
    "git.push": {},
    "resource.list": {},
    "resource.read": {"uri": "note:1"},
    "resource.subscribe": {"uri": "note:1"},
    "resource.unsubscribe": {"uri": "note:1"},
    "prompt.list": {},
    "prompt.get": {"name": "greet", "arguments": {"who": "Ada"}},
    "prompt.complete": {"ref": {"type": "ref/prompt", "name": "greet"}, "argument": {"name": "who", "value": "A"}},
}
"""One of each, in an order in which they work."""


@pytest.mark.proves("T-10")
def test_every_shipped_tool_has_one_row_and_the_published_table_is_up_to_date() -> None:
    ids = [tool.spec.id for tool in BUILTINS]
    assert list(rows()) == ids and len(set(ids)) == len(ids)
    assert set(RESULTS) == set(CALLS) == set(ids), "a tool without the keys of its result, or without a call"
    assert TABLE.read_text(encoding="utf-8") == render(), "run: make docs"


@pytest.mark.proves("T-10")
def test_a_row_says_all_that_the_tool_declares() -> None:
    generation = shipped()
    for tool_id, cells in rows().items():
        spec = generation.entries[tool_id].spec
        name, parameters, _, requires, locks, side_effect, runs, category = cells
        for parameter in spec.parameters.get("properties", {}):
            optional = "" if parameter in spec.parameters.get("required", ()) else "?"
            assert f"`{parameter}{optional}: " in parameters
        assert all(f"`{lock}`" in locks for lock in spec.effective_locks) and side_effect == spec.side_effect
        assert all(f"`{one.cmd}`" in requires for one in spec.requires.shell)
        assert all(f"`{pattern}`" in requires for pattern in (*spec.requires.fs.read, *spec.requires.fs.write))
        assert all(capability in requires for capability in spec.requires.capabilities)
        assert ("network" in runs) == bool(spec.requires.net.hosts)
        assert category.endswith(", core") == (spec.tier == "core") and category.startswith(str(spec.category))
        assert all(f"`{alias}`" in name for alias, of in ALIASES.items() if of == tool_id)


@tool(mode="stateful", side_effect="read", locks=[])
async def pages() -> AsyncGenerator[int, None]:
    """Go through two pages."""
    yield 1
    yield 2


@pytest.fixture
async def host(tmp_path: Path) -> AsyncGenerator[GitHost]:
    """A server with one repository, which may be pushed to."""
    served = tmp_path / "served" / "x.git"
    served.parent.mkdir()
    made(tmp_path / "source").git("init", "--quiet", "--bare", "--initial-branch=main", str(served))
    with (served / "config").open("a") as file:
        file.write("[http]\n\treceivepack = true\n")
    async with GitHost(tmp_path / "served") as server:
        yield server


@pytest.fixture
async def session(tmp_path: Path, host: GitHost) -> AsyncGenerator[Session]:
    repo = made(tmp_path / "ws")
    repo.commit("first", b__txt="1\n")
    repo.git("remote", "add", "origin", host.url("x.git"))
    tables = f'[requires.tools."git.push".net]\nhosts = ["{host.authority}"]'
    put_agent(tmp_path, "caller", tables)
    put_offering(tmp_path)
    rules = [
        "allow *",
        "allow fs.write **",
        "allow fs.read **",
        "allow shell.run *",
        "allow shell.run python3 -",
        f"allow net.fetch {host.authority}",
    ]
    async with temporary_kernel(tmp_path, rules=rules, tools=[pages]) as kernel:
        opened = await kernel.session(agent="caller", approval_handler=ScriptedApprovalHandler(answers=[[["a"]]]))
        Agent(opened, PlaybackModel(text_reply("Hello.")))
        yield opened


@confined
@pytest.mark.proves("T-10")
async def test_each_tool_gives_what_its_row_says_and_runs_where_it_says(session: Session, host: GitHost) -> None:
    generation = shipped()
    for tool_id, arguments in CALLS.items():
        more = {"url": host.url("x.git")} if tool_id == "git.push" else {}
        if "job_id" in arguments:
            more = {"job_id": (await session.jobs.list())[0].id}
        elif tool_id in TERMINAL_IDS and "id" in arguments:
            more = {"id": (await session.jobs.list())[-1].id}
        elif tool_id in STATE_IDS:
            more = {"id": (await session.call("pages", {})).data["state_id"]}
        elif tool_id == "artifact.read":
            Path(session.workdir, "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(8))
            more = {"ref": (await session.call("read", {"path": "a.png"})).data["image"]["artifact"]}
        elif tool_id == "jobs":
            assert (await session.call("bash", {"command": "echo later", "background": True})).ok
        result: Result = await session.call(tool_id, {**arguments, **more})
        assert result.ok, (tool_id, result.error_text)
        assert set(result.data) == set(RESULTS[tool_id].split()), tool_id
        in_sandbox = "+" in str(result.metadata["confined_by"])
        assert in_sandbox == ("sandbox" in where(generation.entries[tool_id].spec)), tool_id
    assert {alias: getattr(generation.resolve(alias), "id", None) for alias in ALIASES} == dict(ALIASES)
