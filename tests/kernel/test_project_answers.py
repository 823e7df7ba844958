"""Answers "for this project" belong to a folder, not to its path."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from handrail import ApprovalAnswer, open_kernel
from handrail.contract.approval_requests import ApprovalRequest
from handrail.contract.errors import UsageError
from handrail.store.project_identity import bind_state_to_current_folder, is_recorded_project_folder, set_grant_sharing
from handrail.store.state_folders import locate_folders
from handrail.testing import ScriptedApprovalHandler

pytestmark = pytest.mark.proves("P-18")
CALL = ("write", {"path": "src/a.txt", "content": "x"})


class ForTheProject(ScriptedApprovalHandler):
    """A user who answers for the project."""

    async def approve(self, request: ApprovalRequest) -> ApprovalAnswer:
        return ApprovalAnswer("project")


@pytest.fixture
def ground(tmp_path: Path) -> Path:
    (tmp_path / "ws" / "src").mkdir(parents=True)
    (tmp_path / "handrail.toml").write_text("")
    return tmp_path


async def is_allowed(ground: Path, workspace: str) -> bool:
    (ground / workspace / "src").mkdir(parents=True, exist_ok=True)
    async with open_kernel(ground / workspace, state=ground / "state", config=ground / "handrail.toml") as kernel:
        return (await (await kernel.session()).call(*CALL)).error_kind != "denied"


async def answer_for_the_project(ground: Path) -> None:
    async with open_kernel(ground / "ws", state=ground / "state", config=ground / "handrail.toml") as kernel:
        assert (await (await kernel.session(approval_handler=ForTheProject())).call(*CALL)).ok


async def test_a_project_grant_holds_for_its_folder(ground: Path) -> None:
    await answer_for_the_project(ground)
    assert await is_allowed(ground, "ws")


async def test_a_replaced_folder_inherits_project_grants_only_after_its_adoption(ground: Path) -> None:
    await answer_for_the_project(ground)
    (ground / "ws").rename(ground / "away")
    shutil.copytree(ground / "away", ground / "ws")
    assert not await is_allowed(ground, "ws")
    folders = locate_folders(ground / "ws", ground / "state")
    assert not is_recorded_project_folder(folders)
    bind_state_to_current_folder(folders)
    assert await is_allowed(ground, "ws")


async def test_a_stored_rejection_holds_for_any_folder_at_the_path(ground: Path) -> None:
    class Never(ScriptedApprovalHandler):
        async def approve(self, request: ApprovalRequest) -> ApprovalAnswer:
            return ApprovalAnswer("reject-always")

    async with open_kernel(ground / "ws", state=ground / "state", config=ground / "handrail.toml") as kernel:
        assert not (await (await kernel.session(approval_handler=Never())).call(*CALL)).ok
    (ground / "ws").rename(ground / "away")
    shutil.copytree(ground / "away", ground / "ws")
    async with open_kernel(
        ground / "ws", state=ground / "state", config=ground / "handrail.toml", rules=["allow write **"]
    ) as kernel:
        assert (await (await kernel.session()).call(*CALL)).error_kind == "denied"


async def test_a_moved_folder_regains_its_project_grants_by_an_explicit_step_of_the_user(ground: Path) -> None:
    await answer_for_the_project(ground)
    (ground / "ws").rename(ground / "moved")
    assert not await is_allowed(ground, "moved")
    folders = locate_folders(ground / "moved", ground / "state")
    set_grant_sharing(folders, ground / "ws", shares=True)
    assert await is_allowed(ground, "moved")


async def test_a_copied_folder_gets_no_project_grants(ground: Path) -> None:
    await answer_for_the_project(ground)
    shutil.copytree(ground / "ws", ground / "copy")
    assert not await is_allowed(ground, "copy")


async def test_two_workspaces_share_project_grants_by_an_explicit_step_until_one_is_replaced(ground: Path) -> None:
    await answer_for_the_project(ground)
    assert not await is_allowed(ground, "worktree")
    folders = locate_folders(ground / "worktree", ground / "state")
    set_grant_sharing(folders, ground / "ws", shares=True)
    assert await is_allowed(ground, "worktree")
    set_grant_sharing(folders, ground / "ws", shares=False)
    assert not await is_allowed(ground, "worktree")
    set_grant_sharing(folders, ground / "ws", shares=True)
    (ground / "ws").rename(ground / "away")
    (ground / "ws").mkdir()
    assert not await is_allowed(ground, "worktree"), "another folder has taken the path"


def test_a_workspace_without_state_cannot_share_project_grants(ground: Path) -> None:
    folders = locate_folders(ground / "ws", ground / "state")
    with pytest.raises(UsageError, match="Adopt it first"):
        set_grant_sharing(folders, ground / "ws", shares=True)
