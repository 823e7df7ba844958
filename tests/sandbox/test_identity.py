"""Programs of real root run as the owner of the workspace; those of other users keep their identity."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from tests.sandbox.conftest import SandboxFolders

from handrail.contract.errors import ToolError
from handrail.sandbox.view import sandbox_user
from handrail.sandbox.view.sandbox_user import LookupCache, SandboxUser

SOMEBODY = 65_533
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")


@pytest.fixture
def owned(ground: SandboxFolders) -> SandboxFolders:
    """A workspace whose owner cannot reach it or the scratch folder through the parent folders."""
    os.chown(ground.workspace, SOMEBODY, SOMEBODY)
    ground.workspace.parent.chmod(0o700)
    return ground


@pytest.mark.skipif(os.geteuid() == 0, reason="root does more")
def test_programs_of_an_ordinary_user_run_as_the_same_user(ground: SandboxFolders) -> None:
    assert sandbox_user.find_sandbox_user(str(ground.workspace)) is None
    assert sandbox_user.describe_user_change_mechanism(str(ground.workspace)).is_enforced


@as_root
@pytest.mark.proves("S-01")
async def test_programs_of_root_run_as_the_owner_of_the_workspace(owned: SandboxFolders) -> None:
    ran = await owned.bash("id -u; id -G; cat /proc/self/uid_map; echo x > made; echo x > ~/made")
    assert ran.out.split() == [str(SOMEBODY), str(SOMEBODY), str(SOMEBODY), "0", "1"], ran.errors
    for file in (owned.workspace / "made", owned.scratch / "made"):
        assert file.stat().st_uid == SOMEBODY
    assert sandbox_user.describe_user_change_mechanism(str(owned.workspace)).is_enforced


@as_root
async def test_programs_run_for_the_owner_cannot_read_root_only_files(owned: SandboxFolders) -> None:
    """Beneath a folder that is mounted, where no mask would be."""
    (owned.workspace / "roots").write_text("TOP-SECRET")
    (owned.workspace / "roots").chmod(0o600)
    ran = await owned.bash("cat roots; cat /proc/kcore /proc/kpagecount | head -c 1 | wc -c")
    assert "TOP-SECRET" not in ran.out and "Permission denied" in ran.errors


@as_root
async def test_a_scratch_folder_used_by_root_changes_owner_except_for_linked_files(
    owned: SandboxFolders,
) -> None:
    (owned.scratch / "a" / "b").mkdir(parents=True)
    (owned.scratch / "a" / "b" / "file").write_text("before")
    (owned.scratch / "a" / "away").symlink_to(owned.outside / "key")
    os.link(owned.outside / "key", owned.scratch / "twice")
    ran = await owned.bash("echo after > ~/a/b/file; cat ~/a/b/file")
    assert ran.out == "after\n"
    assert (owned.outside / "key").stat().st_uid == 0


@as_root
async def test_a_root_only_tool_folder_is_refused_with_the_chmod_command(owned: SandboxFolders, tmp_path: Path) -> None:
    folder = tmp_path / "tool"
    folder.mkdir(mode=0o700)
    with pytest.raises(ToolError, match=r"cannot be read by user 65533.*chmod -R o\+rX"):
        await owned.bash("true", readable=(str(folder),))


@as_root
async def test_programs_in_a_workspace_of_root_run_as_root_and_the_check_reports_it(ground: SandboxFolders) -> None:
    assert sandbox_user.find_sandbox_user(str(ground.workspace)) is None
    said = sandbox_user.describe_user_change_mechanism(str(ground.workspace))
    assert said.is_enforced is False and "belongs to root" in said.detail and "ordinary user" in said.remedy
    assert (await ground.bash("id -u")).out == "0\n"


@as_root
def test_the_user_change_is_disabled_without_perl_and_the_check_names_the_remedy(
    owned: SandboxFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_user, "PERL", "/nonexistent/perl")
    assert sandbox_user.find_sandbox_user(str(owned.workspace)) is None
    said = sandbox_user.describe_user_change_mechanism(str(owned.workspace))
    assert said.is_enforced is False and said.remedy == "install perl"


@as_root
async def test_the_user_change_is_disabled_with_a_reason_if_the_owner_cannot_create_namespaces(
    owned: SandboxFolders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As AppArmor and some containers have it; here by a bubblewrap that does nothing for ordinary users."""
    for folder in (tmp_path, *tmp_path.parents[:-2]):
        folder.chmod(folder.stat().st_mode | 0o001)
    picky = tmp_path / "bwrap"
    picky.write_text('#!/bin/sh\n[ "$(id -u)" = 0 ] || { echo "bwrap: no permissions" >&2; exit 1; }\nexec true\n')
    picky.chmod(0o755)
    monkeypatch.setattr("handrail.sandbox.start.spawn.find_bubblewrap_programs", lambda: iter([str(picky)]))
    sandbox_user.probe_sandbox_user_failure.cache_clear()
    try:
        refused = sandbox_user.describe_user_change_mechanism(str(owned.workspace))
        assert refused.is_enforced is False and "no permissions" in refused.detail and refused.remedy
        assert sandbox_user.find_sandbox_user(str(owned.workspace)) is None
    finally:
        sandbox_user.probe_sandbox_user_failure.cache_clear()


def test_only_folders_that_the_sandbox_user_cannot_reach_are_mounted_elsewhere(tmp_path: Path) -> None:
    place = tmp_path.resolve()
    for name, mode in (("open", 0o755), ("closed", 0o700)):
        (place / name / "inner").mkdir(parents=True)
        (place / name).chmod(mode)
    for folder in (place, *place.parents):
        if not folder.stat().st_mode & stat.S_IXOTH:
            folder.chmod(0o711)
    opened, closed = str(place / "open" / "inner"), str(place / "closed" / "inner")
    options = ["--bind", opened, opened, "--ro-bind", closed, closed, "--bind", closed, "/x", "--chdir", closed]
    found, sources = sandbox_user.replace_unreachable_sources(options, SandboxUser(SOMEBODY, SOMEBODY), LookupCache())
    assert sources == [closed]
    assert found == [
        "--bind",
        opened,
        opened,
        "--ro-bind",
        "/run/0",
        closed,
        "--bind",
        "/run/0",
        "/x",
        "--chdir",
        closed,
    ]
