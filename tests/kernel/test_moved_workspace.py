"""Calls whose workspace was moved, deleted or replaced while it is open: nothing happens elsewhere."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from handrail import open_kernel
from handrail.record.verification import verify_log
from handrail.sandbox import tier_probe

pytestmark = pytest.mark.proves("S-03")

CALLS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("read", {"path": "a.txt"}),
    ("write", {"path": "sub/b.txt", "content": "x"}),
    ("edit", {"path": "a.txt", "old": "mine", "new": "yours"}),
    ("glob", {"pattern": "*"}),
    ("grep", {"pattern": "."}),
    ("bash", {"command": "touch c.txt"}),
)
RULES = ("allow bash", "allow write", "allow edit")


def moved(workspace: Path) -> None:
    workspace.rename(workspace.with_name("moved"))


def deleted(workspace: Path) -> None:
    shutil.rmtree(workspace)


def linked(workspace: Path) -> None:
    moved(workspace)
    workspace.symlink_to(workspace.with_name("elsewhere"))


def linked_to_itself(workspace: Path) -> None:
    moved(workspace)
    workspace.symlink_to(workspace.with_name("moved"))


def a_file_instead(workspace: Path) -> None:
    moved(workspace)
    workspace.write_text("no folder")


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A workspace, and a folder that is none of its business."""
    for name, text in (("workspace", "mine\n"), ("elsewhere", "somebody's\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(text)
    return tmp_path / "workspace"


@pytest.mark.skipif(not tier_probe.probe_tier().is_confining, reason="programs cannot be confined on this machine")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (moved, "no longer exists"),
        (deleted, "no longer exists"),
        (linked, "became a symbolic link"),
        (linked_to_itself, "became a symbolic link"),
        (a_file_instead, "is not a folder any more"),
    ],
)
async def test_calls_in_a_moved_workspace_report_the_change_and_touch_no_other_files(
    workspace: Path, change: Callable[[Path], None], said: str
) -> None:
    state, elsewhere = workspace.with_name("state"), workspace.with_name("elsewhere")
    async with open_kernel(workspace, state=state, rules=RULES) as kernel:
        session = await kernel.session()
        assert (await session.call("read", {"path": "a.txt"})).ok
        change(workspace)
        for tool, arguments in CALLS:
            result = await session.call(tool, arguments)
            assert not result.ok, tool
            if change is a_file_instead and tool in ("glob", "grep"):
                continue  # that it is a file is what they say
            assert result.error_kind in ("unavailable", "denied"), (tool, result)
            assert said in str(result.error_text) and str(workspace) in str(result.error_text), (tool, result)
        assert [path.name for path in elsewhere.iterdir()] == ["a.txt"]
        assert (elsewhere / "a.txt").read_text() == "somebody's\n"
        await kernel.log.flush()
        assert verify_log(kernel.log.reader).ok


async def test_calls_work_again_when_the_workspace_returns(workspace: Path) -> None:
    async with open_kernel(workspace, state=workspace.with_name("state"), rules=RULES) as kernel:
        session = await kernel.session()
        linked(workspace)
        assert not (await session.call("read", {"path": "a.txt"})).ok
        workspace.unlink()
        workspace.with_name("moved").rename(workspace)
        assert (await session.call("read", {"path": "a.txt"})).ok


async def test_a_folder_that_replaces_the_workspace_becomes_it_and_requires_a_new_read(
    workspace: Path,
) -> None:
    async with open_kernel(workspace, state=workspace.with_name("state"), rules=RULES) as kernel:
        session = await kernel.session()
        assert (await session.call("read", {"path": "a.txt"})).ok
        moved(workspace)
        workspace.with_name("elsewhere").rename(workspace)
        refused = await session.call("write", {"path": "a.txt", "content": "mine again"})
        assert refused.error_kind == "conflict" and (workspace / "a.txt").read_text() == "somebody's\n"
        assert (await session.call("read", {"path": "a.txt"})).data["text"].startswith("somebody's")


async def test_a_moved_workspace_has_a_new_log_and_the_old_log_remains(workspace: Path) -> None:
    state = workspace.with_name("state")
    async with open_kernel(workspace, state=state) as kernel:
        await (await kernel.session()).call("read", {"path": "a.txt"})
        first = kernel.state_folder
    moved(workspace)
    async with open_kernel(workspace.with_name("moved"), state=state) as kernel:
        assert kernel.state_folder != first and kernel.log.reader.calls() == []
    moved_back = workspace.with_name("moved").rename(workspace)
    async with open_kernel(moved_back, state=state) as kernel:
        assert kernel.state_folder == first and len(kernel.log.reader.calls()) == 1
