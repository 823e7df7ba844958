"""``{user-data}``, ``{ad-hoc}`` and ``{output}``: who has access, when they are created, and what stays closed."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest

from handrail import Runtime, ToolError, tool
from handrail.sandbox import tier_probe
from handrail.testing.scripted_kernel import temporary_kernel

pytestmark = pytest.mark.proves("K-09")
confined = pytest.mark.skipif(
    not tier_probe.probe_tier().is_confining, reason="programs cannot be confined on this machine"
)

BOTH = {"read": ["{user-data}/notes"], "write": ["{user-data}/notes"]}


@tool(id="data.keep", side_effect="write", locks=[], requires={"fs": BOTH})
async def keep(path: str, text: str, runtime: Runtime) -> str:
    """Keep a text for the user."""
    await runtime.files.write(path, text.encode())
    return (await runtime.files.read_bytes(path)).data.decode()


LOOKS = {"fs": {"read": ["{user-data}"]}}


@tool(id="data.look", side_effect="read", locks=[], requires=LOOKS, targets={"fs.read": "{path}"})
async def look(path: str, runtime: Runtime) -> str:
    """Look at what is kept for the user."""
    return (await runtime.files.read_bytes(path)).data.decode()


@tool(
    id="data.run",
    side_effect="write",
    locks=[],
    requires={"fs": {**BOTH, "read": [*BOTH["read"], "{workspace}"]}, "shell": [{"cmd": "*"}]},
)
async def run(command: str, runtime: Runtime) -> dict[str, Any]:
    """Run a program that keeps something for the user."""
    done = await runtime.shell.run(command)
    return {"exit_code": done.exit_code, "output": done.output.decode()}


@tool(id="ad-hoc.look", side_effect="read", locks=[], requires={"fs": {"read": ["{ad-hoc}"]}})
async def look_ad_hoc(path: str, runtime: Runtime) -> str:
    """Look at a file that is open somewhere."""
    try:
        return (await runtime.files.read_bytes(path)).data.decode()
    except ToolError as error:
        return f"{error.kind}"


def user_data(folder: Path) -> Path:
    return folder / "state" / "user-data"


async def test_user_data_is_created_privately_on_demand_and_shared_between_workspaces(
    tmp_path: Path,
) -> None:
    rules = ["allow data.*", f"allow fs.write {user_data(tmp_path)}/notes/**"]
    async with temporary_kernel(tmp_path, tools=[look_ad_hoc]) as kernel:
        assert (await (await kernel.session()).call("glob", {"pattern": "*"})).ok
        assert not user_data(tmp_path).exists()
    async with temporary_kernel(tmp_path, tools=[keep], rules=rules) as kernel:
        assert not user_data(tmp_path).exists()
        session = await kernel.session()
        assert stat.S_IMODE(user_data(tmp_path).stat().st_mode) == 0o700
        kept = await session.call("data.keep", {"path": f"{user_data(tmp_path)}/notes/a", "text": "mine"})
        assert (kept.ok, kept.data) == (True, "mine"), kept.error_text
    (tmp_path / "ws").rename(tmp_path / "old")
    (tmp_path / "ws").mkdir()
    async with temporary_kernel(tmp_path, tools=[look]) as kernel:
        seen = await (await kernel.session()).call("data.look", {"path": f"{user_data(tmp_path)}/notes/a"})
        assert seen.data == "mine", seen.error_text


async def test_a_tool_reaches_only_the_user_data_that_it_requires(tmp_path: Path) -> None:
    place = user_data(tmp_path)
    async with temporary_kernel(tmp_path, tools=[keep, look], rules=["allow data.keep"]) as kernel:
        session = await kernel.session()
        session.add_rules("allow fs.write **", f"allow fs.write {place}/**")
        beside = await session.call("data.keep", {"path": f"{place}/other", "text": "x"})
        assert beside.error_kind == "denied" and not (place / "other").exists()
        (place / "notes").mkdir()
        (place / "notes" / "a").write_text("kept")
        (place / "notes" / ".env").write_text("KEY=1")
        assert (await session.call("data.look", {"path": f"{place}/notes/a"})).data == "kept"
        assert (await session.call("data.look", {"path": f"{place}/notes/.env"})).error_kind == "denied"
        assert (await session.call("read", {"path": f"{place}/notes/a"})).error_kind == "denied"


@confined
async def test_a_program_reads_user_data_only_if_its_tool_requires_it(tmp_path: Path) -> None:
    place = user_data(tmp_path)
    rules = ["allow data.*", "allow bash", "allow shell.run *", f"allow fs.write {place}/**"]
    async with temporary_kernel(tmp_path, tools=[keep, run], rules=rules) as kernel:
        session = await kernel.session()
        await session.call("data.keep", {"path": f"{place}/notes/a", "text": "mine"})
        found = await session.call("data.run", {"command": f"cat {place}/notes/a"})
        assert found.ok and found.data["output"] == "mine", found.error_text
        hidden = await session.call("bash", {"command": f"cat {place}/notes/a"})
        assert hidden.data["exit_code"] != 0 and "mine" not in hidden.data["output"]


async def test_the_ad_hoc_scope_opens_no_files(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, tools=[look_ad_hoc], rules=["allow *"]) as kernel:
        session = await kernel.session()
        (tmp_path / "ws" / "a.txt").write_text("x" * 300_000)
        await session.call("glob", {"pattern": "*"})
        cut = await session.call("bash", {"command": "cat a.txt"})
        path = cut.metadata.get("output_path")
        assert isinstance(path, str)
        assert (await session.call("read", {"path": path, "limit": 1})).ok  # by {output}
        for inside in (path, "a.txt"):
            assert (await session.call("ad-hoc.look", {"path": inside})).data == "denied"
