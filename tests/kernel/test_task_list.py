"""``create_task``, ``list_tasks``, ``edit_task``, ``get_task``: one durable list for all sessions of a workspace."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kernel.test_agents import put_agent
from tests.prefork import command as prefork

from handrail import open_kernel
from handrail.contract.agent_manifest import PROFILE_TOOLS, parse_agent_manifest
from handrail.contract.services.task_services import WorkspaceTask
from handrail.contract.session_protocols import Session
from handrail.session.workspace_tasks import _find_cycle, _StoredTask  # pyright: ignore[reportPrivateUsage]
from handrail.testing.scripted_kernel import temporary_kernel

pytestmark = pytest.mark.proves("T-05b")


async def create(session: Session, title: str, **fields: Any) -> int:
    result = await session.call("create_task", {"title": title, **fields})
    assert result.ok, result.error_text
    return result.data["task"]["id"]


async def edit(session: Session, task_id: int, **fields: Any) -> Any:
    return await session.call("edit_task", {"id": task_id, **fields})


async def test_a_task_survives_the_end_of_its_session_and_process(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path) as kernel:
        session = await kernel.session()
        first = await create(session, "Mend the parser", description="It fails on tabs.")
        second = await create(session, "Release", blocked_by=[first, first], owner="ann")
        await session.close()
    async with temporary_kernel(tmp_path) as kernel:
        session = await kernel.session()
        result = await session.call("get_task", {"id": second})
        task = result.data["task"]
        assert (task["title"], task["owner"], task["status"]) == ("Release", "ann", "pending")
        assert task["blocked_by"] == task["open_blockers"] == [first]
        assert (await session.call("get_task", {"id": first})).data["task"]["blocks"] == [second]
        assert result.metadata["untrusted_source"], "another session wrote it"
        third = await create(session, "Mine")
        assert third > second
        assert "untrusted_source" not in (await session.call("get_task", {"id": third})).metadata


async def test_tasks_are_filtered_by_status_owner_text_and_readiness(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path) as kernel:
        session = await kernel.session()
        one = await create(session, "Mend the Parser", owner="ann")
        two = await create(session, "Test the parser", blocked_by=[one], description="Also tabs.")
        three = await create(session, "Write docs", status="in_progress")

        async def ids(**arguments: Any) -> list[int]:
            return [task["id"] for task in (await session.call("list_tasks", arguments)).data["tasks"]]

        assert await ids() == [one, two, three]
        assert await ids(ready=True) == [one]
        assert await ids(status=["in_progress"]) == [three]
        assert await ids(owner="ann") == [one] and await ids(owner="") == [two, three]
        assert await ids(query="PARSER the") == [one, two] and await ids(query="tabs") == [two]
        page = (await session.call("list_tasks", {"limit": 2})).data
        assert (page["total"], page["next"]) == (3, 2)
        rest = (await session.call("list_tasks", {"limit": 2, "offset": 2})).data
        assert [task["id"] for task in rest["tasks"]] == [three] and rest["next"] is None
        assert (await session.call("list_tasks", {"offset": 9})).data == {"tasks": [], "total": 3, "next": None}


async def test_blockers_cannot_form_a_cycle_and_prevent_the_start_of_a_task(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path) as kernel:
        session = await kernel.session()
        a = await create(session, "a")
        b = await create(session, "b", blocked_by=[a])
        c = await create(session, "c", blocked_by=[b])
        refused = await edit(session, a, blocked_by=[c])
        assert refused.error_kind == "invalid_input"
        assert f"{a} waits for {c} waits for {b} waits for {a}" in str(refused.error_text)
        assert (await edit(session, a, blocked_by=[a])).error_kind == "invalid_input"
        assert (await edit(session, a, blocked_by=[99])).error_kind == "invalid_input"
        assert (await session.call("create_task", {"title": "x", "blocked_by": [99]})).error_kind == "invalid_input"
        for status in ("in_progress", "completed"):
            held = await edit(session, b, status=status)
            assert held.error_kind == "conflict" and f"these tasks block it: {a}." in str(held.error_text)
        assert (await edit(session, b, status="cancelled")).ok
        assert (await edit(session, c, status="in_progress")).ok, "a cancelled task blocks no other"
        assert (await session.call("get_task", {"id": a})).data["task"]["version"] == 1, (
            "a refused edit changes nothing"
        )


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), max_size=14))
def test_the_task_list_finds_a_cycle_of_blockers_exactly_if_one_exists(edges: list[tuple[int, int]]) -> None:
    tasks = {number: _StoredTask(WorkspaceTask(number, "")) for number in range(1, 7)}
    for task_id, blocker in edges:
        if task_id == blocker:
            continue
        known = tasks[task_id].task
        new = WorkspaceTask(task_id, "", blocked_by=tuple(sorted({*known.blocked_by, blocker})))

        def reaches(start: int, goal: int) -> bool:
            seen, left = {start}, [start]
            while left:
                for further in tasks[left.pop()].task.blocked_by:
                    if further == goal:
                        return True
                    if further not in seen:
                        seen.add(further)
                        left.append(further)
            return False

        cycle = _find_cycle(new, tasks)
        assert (cycle is not None) == reaches(blocker, task_id)
        if cycle is None:
            tasks[task_id] = _StoredTask(new)
        else:
            assert cycle[0] == cycle[-1] == task_id


async def test_a_session_takes_an_owned_task_only_after_it_has_read_the_current_version(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path) as kernel:
        ann, bob = await kernel.session(), await kernel.session()
        task = await create(ann, "Mend it")
        assert (await edit(ann, task, owner="ann", status="in_progress")).ok
        for owner in ("bob", ""):
            refused = await edit(bob, task, owner=owner)
            assert refused.error_kind == "conflict" and "get_task" in str(refused.error_text)
            assert "ann" not in str(refused.error_text), "an error has no label for the text of another session"
        assert (await edit(bob, task, description="A hint.")).ok
        assert (await edit(bob, task, owner="bob", version=2)).error_kind == "conflict"
        assert (await edit(bob, task, owner="bob", version=3)).data["task"]["owner"] == "bob"
        assert (await ann.call("get_task", {"id": task})).metadata["untrusted_source"], "bob wrote parts of it"


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("create_task", {"title": " \n"}),
        ("create_task", {"title": "x" * 301}),
        ("create_task", {"title": "x", "status": "done"}),
        ("edit_task", {"id": 1}),
        ("edit_task", {"id": 1, "version": 1}),
        ("edit_task", {"id": 404, "title": "x"}),
        ("get_task", {"id": 404}),
        ("get_task", {"id": 0}),
        ("list_tasks", {"limit": 201}),
    ],
)
async def test_invalid_task_arguments_are_refused(tmp_path: Path, tool: str, arguments: dict[str, Any]) -> None:
    async with temporary_kernel(tmp_path) as kernel:
        session = await kernel.session()
        await create(session, "one")
        assert (await session.call(tool, arguments)).error_kind == "invalid_input"
        assert (await session.call("list_tasks", {})).data["total"] == 1


async def test_a_secret_is_not_stored_in_a_task(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, secrets={"KEY": "sk-abcdef-123456"}) as kernel:
        session = await kernel.session()
        task = await create(session, "Use sk-abcdef-123456", description="sk-abcdef-123456", owner="sk-abcdef-123456")
        assert "sk-abcdef-123456" not in json.dumps((await session.call("get_task", {"id": task})).data)
        rows = kernel.log.reader.connection.execute("SELECT body FROM task").fetchall()
        assert len(rows) == 1 and b"sk-abcdef-123456" not in rows[0][0]


CHILD = """
import asyncio, sys
from handrail import open_kernel

async def main():
    folder, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    async with open_kernel(folder + "/ws", state=folder + "/state", config=folder + "/config/handrail.toml") as kernel:
        session = await kernel.session()
        for number in range(count):
            assert (await session.call("create_task", {"title": f"{name} {number}"})).ok
        while (found := (await session.call("list_tasks", {"owner": "", "status": ["pending"], "limit": 1})).data["tasks"]):
            fields = {"id": found[0]["id"], "owner": name, "status": "in_progress"}
            print((await session.call("edit_task", fields)).ok, found[0]["id"], flush=True)

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="connecting needs Linux")
@pytest.mark.proves("L-07")
async def test_several_processes_share_the_tasks_and_claim_each_one_once(tmp_path: Path) -> None:
    for name in ("ws", "config"):
        (tmp_path / name).mkdir()
    (tmp_path / "config" / "handrail.toml").touch()
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    where: dict[str, Any] = {"state": tmp_path / "state", "config": tmp_path / "config" / "handrail.toml"}
    async with open_kernel(tmp_path / "ws", **where) as kernel:
        children = [
            await asyncio.create_subprocess_exec(
                *prefork.python(script), str(tmp_path), name, "8", stdout=asyncio.subprocess.PIPE
            )
            for name in ("ann", "bob", "cid")
        ]
        outputs = [(await child.communicate())[0].decode().split("\n") for child in children]
        assert all(child.returncode == 0 for child in children)
        page = (await (await kernel.session()).call("list_tasks", {"limit": 200})).data
    assert page["total"] == 24 and {task["id"] for task in page["tasks"]} == {*range(1, 25)}
    claimed = [line.split()[1] for lines in outputs for line in lines if line.startswith("True")]
    assert sorted(map(int, claimed)) == [*range(1, 25)], "no task is claimed twice"


@pytest.mark.proves("D-01a")
@pytest.mark.parametrize("profile", PROFILE_TOOLS)
async def test_a_profile_keeps_its_existing_tools_in_view(tmp_path: Path, profile: Any) -> None:
    put_agent(tmp_path, "a", f'profile = "{profile}"\n')
    async with temporary_kernel(tmp_path) as kernel:
        session = await kernel.session(agent="a")
        active = [spec.id for spec in session.active_tools]
        known = (await session.call("browse_tools", {})).data
        for tool_id in PROFILE_TOOLS[profile]:
            info = await session.call("info", {"tool": tool_id})
            hidden = tool_id == "memory.compact"  # needs an agent that runs
            known_id = info.data["id"] if info.ok else tool_id  # of an alias, too
            assert (known_id in active) == (info.ok and not hidden), tool_id
        assert {"read", "bash", "todo", "load_tools"} <= {*active} and known
        plain = [spec.id for spec in (await kernel.session()).active_tools]
        assert not {*plain} & {"create_task", "browse_rules", "add_schedule"}


@pytest.mark.proves("D-01a")
@pytest.mark.parametrize("tool_id", ["browse_rules", "load_rule", "save_rule", "delete_rule"])
async def test_the_deprecated_rule_tools_return_the_redirect_only_in_their_profile(
    tmp_path: Path, tool_id: str
) -> None:
    put_agent(tmp_path, "a", 'profile = "tiered-tools"\n')
    async with temporary_kernel(tmp_path) as kernel:
        session = await kernel.session(agent="a")
        for arguments in ({}, {"name": "style"}, {"id": 3, "content": ["x"]}):
            data = (await session.call(tool_id, arguments)).data
            assert data["redirect"] == "playbooks" and "skill" in data["message"]
        assert (await (await kernel.session()).call(tool_id, {})).error_kind == "unknown_tool"


@pytest.mark.proves("D-01a")
async def test_the_innate_skills_profile_covers_memory_schedules_lists_tasks_and_reading(
    tmp_path: Path,
) -> None:
    put_agent(tmp_path, "a", 'profile = "innate-skills"\n')
    async with temporary_kernel(tmp_path) as kernel:
        active = {spec.id for spec in (await kernel.session(agent="a")).active_tools}
    assert {"memory.query", "add_schedule", "remove_trigger", "todo", "create_task", "read", "info", "jobs"} <= active


@pytest.mark.proves("D-01a")
async def test_an_unknown_profile_is_a_manifest_fault(tmp_path: Path) -> None:
    checked = parse_agent_manifest(b'id = "a"\nprofile = "tiered"\n', "agent.toml", "a")
    assert "tiered-tools" in str(checked.faults[0]) and checked.manifest.profile is None
