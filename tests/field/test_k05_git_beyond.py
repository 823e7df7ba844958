"""Reports about repositories whose git directory, work tree or objects are outside the workspace."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.tools.repositories import Repo, create_repository

from handrail import open_kernel
from handrail.contract.calls_and_results import Result
from handrail.contract.errors import LoadError
from handrail.session.local_session import LocalSession

RULES = ("allow git.*", "allow bash *", "allow bash", "allow write", "allow fs.write /**")


@asynccontextmanager
async def opened(
    workspace: Path, roots: Mapping[Path, str] = {}, rules: tuple[str, ...] = RULES
) -> AsyncGenerator[LocalSession]:
    state = workspace.with_name("state") if workspace.parent.name != "main" else workspace.parent.with_name("state")
    agent = {"id": "dev", "roots": [{"path": str(path), "access": access} for path, access in roots.items()]}
    async with open_kernel(workspace, state=state, agent=agent, rules=rules) as kernel:
        session = await kernel.session(headless=True)
        assert isinstance(session, LocalSession)
        yield session


async def bash(session: LocalSession, command: str) -> Result:
    return await session.call("bash", {"command": command})


def name_author(folder: Path) -> None:
    """Give a repository an author of commits."""
    Repo(folder).git("config", "user.name", "Ann")
    Repo(folder).git("config", "user.email", "ann@example.org")


def text_of(result: Result) -> str:
    return result.error_text or " ".join(result.data.get("notes", []))


def make_main(folder: Path) -> Repo:
    repo = create_repository(folder / "main")
    repo.commit("one", a__txt="a\n")
    repo.put("sub/b.txt", "b\n")
    repo.commit("two")
    return repo


def make_linked_work_tree(folder: Path) -> tuple[Path, dict[Path, str]]:
    make_main(folder).git("worktree", "add", "--quiet", "../ws")
    return folder / "ws", {folder / "main" / ".git": "write"}


def make_submodule(folder: Path) -> tuple[Path, dict[Path, str]]:
    make_main(folder)
    outer = create_repository(folder / "outer")
    outer.git("-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(folder / "main"), "ws")
    name_author(folder / "outer" / "ws")
    return folder / "outer" / "ws", {folder / "outer" / ".git" / "modules" / "ws": "write"}


def make_separate_directory(folder: Path) -> tuple[Path, dict[Path, str]]:
    (folder / "ws").mkdir()
    Repo(folder).git("init", "--quiet", "--separate-git-dir", "apart.git", "ws")
    name_author(folder / "ws")
    Repo(folder / "ws").commit("one", a__txt="a\n")
    return folder / "ws", {folder / "apart.git": "write"}


def make_sub_folder(folder: Path) -> tuple[Path, dict[Path, str]]:
    make_main(folder)
    return folder / "main" / "sub", {folder / "main": "read", folder / "main" / ".git": "write"}


def make_alternates(folder: Path) -> tuple[Path, dict[Path, str]]:
    make_main(folder)
    Repo(folder).git("clone", "--quiet", "--shared", "main", "ws")
    name_author(folder / "ws")
    return folder / "ws", {folder / "main" / ".git" / "objects": "read"}


def make_work_tree_of_bare(folder: Path) -> tuple[Path, dict[Path, str]]:
    make_main(folder)
    Repo(folder).git("clone", "--quiet", "--bare", "main", "bare.git")
    Repo(folder / "bare.git").git("worktree", "add", "--quiet", "../ws", "main")
    name_author(folder / "bare.git")
    return folder / "ws", {folder / "bare.git": "write"}


def make_link(folder: Path) -> tuple[Path, dict[Path, str]]:
    workspace, roots = make_separate_directory(folder)
    (workspace / ".git").unlink()
    (workspace / ".git").symlink_to("../apart.git")
    return workspace, roots


Layout = Callable[[Path], tuple[Path, dict[Path, str]]]
layouts = pytest.mark.parametrize(
    "layout",
    [
        make_linked_work_tree,
        make_submodule,
        make_separate_directory,
        make_link,
        make_sub_folder,
        make_alternates,
        make_work_tree_of_bare,
    ],
)


@layouts
async def test_a_git_failure_names_the_missing_roots_and_never_advises_git_init(layout: Layout, tmp_path: Path) -> None:
    workspace, roots = layout(tmp_path)
    async with opened(workspace) as session:
        for said in (
            await session.call("git.status", {}),
            await session.call("git.commit", {"message": "x", "all": True}),
            await bash(session, "git status"),
            await bash(session, "git log --oneline 2>&1 | head -3"),
        ):
            text = text_of(said)
            assert "git.init" not in text and "[[roots]]" in text and "Ask the user" in text, text
            for path, access in roots.items():
                assert re.search(rf'path = "{re.escape(str(path))}"[^=]*= [^=]*"{access}"', text), text


@layouts
async def test_git_works_with_the_roots_that_the_message_names(layout: Layout, tmp_path: Path) -> None:
    workspace, roots = layout(tmp_path)
    name = "b.txt" if workspace.name == "sub" else "a.txt"
    async with opened(workspace, roots) as session:
        status = await session.call("git.status", {})
        assert status.data["clean"], status
        assert (await bash(session, "git status --porcelain")).data["output"] == ""
        before = len((await session.call("git.log", {})).data["commits"])
        workspace.joinpath(name).write_text("changed\n")
        assert (await session.call("git.diff", {})).data["files"][0]["path"] == name
        await session.call("git.add", {"paths": [name]})
        committed = await session.call("git.commit", {"message": "by the tool"})
        assert committed.data["files"] == [{"path": name, "change": "modified"}], committed
        done = await bash(session, f"echo more >> {name} && git commit -qam bash")
        assert done.data["exit_code"] == 0, done
        assert len((await session.call("git.log", {})).data["commits"]) == before + 2
        assert (await session.call("git.status", {})).data["clean"]


@layouts
async def test_a_git_directory_granted_for_reading_cannot_be_written(layout: Layout, tmp_path: Path) -> None:
    workspace, roots = layout(tmp_path)
    if layout is make_alternates:
        return  # its own git directory is in the workspace
    async with opened(workspace, dict.fromkeys(roots, "read")) as session:
        assert (await session.call("git.status", {})).data["clean"]
        name = next(path.name for path in workspace.iterdir() if path.suffix == ".txt")
        workspace.joinpath(name).write_text("changed\n")
        refused = await session.call("git.commit", {"message": "x", "all": True})
        assert "ead-only" in text_of(refused) and 'access = "write"' in text_of(refused)
        assert (await bash(session, "git commit -qam x")).data["exit_code"] != 0


@layouts
async def test_hooks_and_settings_of_a_granted_repository_cannot_be_changed(layout: Layout, tmp_path: Path) -> None:
    workspace, roots = layout(tmp_path)
    if layout is make_alternates:
        return
    directory = next(path for path, access in roots.items() if access == "write")
    names = ("config", "hooks/pre-commit", "info/attributes", "config.worktree", "commondir")
    before = {name: directory.joinpath(name).read_bytes() for name in names if directory.joinpath(name).exists()}
    async with opened(workspace, roots) as session:
        for name in (*names, "HEAD", "refs/heads/x", "index", "new"):
            refused = await session.call("write", {"path": f"{directory}/{name}", "content": "ref: x\n"})
            assert refused.error_kind in ("denied", "conflict"), name
        for name in names:
            await bash(session, f"mkdir -p '{directory}/info'; echo '[x]' >> '{directory}/{name}'")
        await bash(session, f"mv '{directory}/config' '{directory}/c'; mv '{directory}/hooks' '{directory}/h'")
    assert before == {
        name: directory.joinpath(name).read_bytes() for name in names if directory.joinpath(name).exists()
    }


async def test_git_tools_do_not_run_hooks_of_a_granted_repository(tmp_path: Path) -> None:
    workspace, roots = make_linked_work_tree(tmp_path)
    hook = tmp_path / "main" / ".git" / "hooks" / "post-commit"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\ntouch ran\n")
    hook.chmod(0o755)
    async with opened(workspace, roots) as session:
        workspace.joinpath("a.txt").write_text("changed\n")
        assert (await session.call("git.commit", {"message": "x", "all": True})).ok
    assert not (workspace / "ran").exists()


async def test_a_confined_call_can_commit_only_if_its_command_text_names_git(tmp_path: Path) -> None:
    workspace, roots = make_linked_work_tree(tmp_path)
    workspace.joinpath("run.sh").write_text("git commit --allow-empty -qm hidden\n")
    async with opened(workspace, roots, ("allow bash {confined}",)) as session:
        done = await bash(session, "git commit --allow-empty -qm plain")
        assert done.data["exit_code"] == 0, done
        hidden = await bash(session, "bash run.sh")
        assert hidden.data["exit_code"] != 0 and "confined" in text_of(hidden), hidden
        assert (await session.call("git.log", {})).data["commits"][0]["subject"] == "plain"


async def test_files_of_a_granted_repository_cannot_be_deleted_without_approval(tmp_path: Path) -> None:
    workspace, roots = make_linked_work_tree(tmp_path)
    head = tmp_path / "main" / ".git" / "HEAD"
    workspace.joinpath("new.txt").write_text("work\n")
    async with opened(workspace, roots, ("allow bash *", "allow fs.write /**")) as session:
        assert (await bash(session, f"rm {head}")).error_kind == "denied"
        assert (await bash(session, f"echo x > {head}")).error_kind == "denied"
        assert (await bash(session, "rm new.txt")).error_kind == "denied"
        assert (await bash(session, "rm a.txt")).ok  # the index of the linked work tree has it
    assert head.exists() and not workspace.joinpath("a.txt").exists()


async def test_undo_reports_that_the_outside_repository_is_not_restored(tmp_path: Path) -> None:
    workspace, roots = make_linked_work_tree(tmp_path)
    async with opened(workspace, roots) as session:
        assert (await bash(session, "echo x >> a.txt && git commit -qam x")).ok
        report = await session.undo()
        assert str(tmp_path / "main" / ".git") in " ".join(report.problems) and not report.is_complete
    assert workspace.joinpath("a.txt").read_text() == "a\n"


# ── nothing in the workspace opens a folder ──────────────────────────────────────────────────────


async def test_a_git_file_grants_no_access_and_the_error_does_not_suggest_a_grant(tmp_path: Path) -> None:
    victim = make_main(tmp_path)
    secret = tmp_path / "secret"
    secret.mkdir()
    secret.joinpath("key").write_text("TOP-SECRET")
    workspace = tmp_path / "ws"
    workspace.mkdir()
    for target in (str(secret), f"{victim.folder}/.git/worktrees/ws", "../secret"):
        workspace.joinpath(".git").write_text(f"gitdir: {target}\n")
        async with opened(workspace) as session:
            for said in (await session.call("git.status", {}), await bash(session, "git log; cat ../secret/key")):
                assert "access =" not in text_of(said) and "git.init" not in text_of(said)
                assert "TOP-SECRET" not in str(said.data)
        workspace.joinpath(".git").unlink()


async def test_a_model_cannot_write_the_git_file_or_borrow_objects(tmp_path: Path) -> None:
    victim = make_main(tmp_path)
    other = create_repository(tmp_path / "other")
    commit = other.commit("secret", key__txt="TOP-SECRET")
    workspace = create_repository(tmp_path / "ws").folder
    async with opened(workspace) as session:
        await bash(session, f"mkdir in; echo 'gitdir: {victim.folder}/.git' > in/.git")
        assert not workspace.joinpath("in", ".git").exists()
        borrowed = f"mkdir -p .git/objects/info; echo {other.folder}/.git/objects > .git/objects/info/alternates"
        workspace.joinpath("borrow.sh").write_text(f"{borrowed}\ngit show {commit}:key.txt\n")
        said = await bash(session, "bash borrow.sh")
        assert "TOP-SECRET" not in str(said.data) and said.data["exit_code"] != 0


async def test_a_moved_work_tree_gets_an_error_that_suggests_git_worktree_repair(tmp_path: Path) -> None:
    workspace, _ = make_linked_work_tree(tmp_path)
    workspace.rename(tmp_path / "moved")
    async with opened(tmp_path / "moved") as session:
        assert "git worktree repair" in text_of(await session.call("git.status", {}))


async def test_a_repository_around_the_workspace_is_refused_without_a_grant_for_its_work_tree(tmp_path: Path) -> None:
    workspace, roots = make_sub_folder(tmp_path)
    with pytest.raises(LoadError, match="as deleted"):
        async with opened(workspace, {path: "write" for path, access in roots.items() if access == "write"}):
            pass


async def test_git_tools_that_change_files_refuse_a_work_tree_larger_than_the_workspace(tmp_path: Path) -> None:
    workspace, roots = make_sub_folder(tmp_path)
    Repo(tmp_path / "main").git("branch", "other")
    async with opened(workspace, roots) as session:
        calls: dict[str, dict[str, Any]] = {
            "git.checkout": {"ref": "other"},
            "git.merge": {"ref": "other"},
            "git.stash": {},
        }
        for tool, args in calls.items():
            refused = await session.call(tool, args)
            assert "larger than the workspace" in text_of(refused)
        tmp_path.joinpath("main", "a.txt").write_text("by the user\n")
        status = await session.call("git.status", {})
        assert status.data["unstaged"] == [{"path": "../a.txt", "change": "modified"}]
        assert (await session.call("git.create_branch", {"name": "topic"})).ok


async def test_git_status_in_a_folder_without_a_repository_suggests_git_init(tmp_path: Path) -> None:
    (tmp_path / "ws").mkdir()
    async with opened(tmp_path / "ws") as session:
        assert "git.init" in text_of(await session.call("git.status", {}))
        assert "[[roots]]" not in text_of(await bash(session, "git status"))
