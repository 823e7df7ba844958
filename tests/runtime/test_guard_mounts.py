"""Mounted-over files stay unchanged, also if an outside process replaces them during a run."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.test_guard import GuardFixture, ground

from handrail.contract.errors import ToolError
from handrail.contract.sandbox_protocol import ProgramSpec
from handrail.runtime.files.rooted_file_service import RootedFiles, SeenFileHashes
from handrail.runtime.files.session_roots import SessionRoots
from handrail.runtime.guard import running_programs
from handrail.runtime.guard.guarded_sandbox import GuardedProcess, ProtectedPathViolation
from handrail.runtime.guard.quarantine import OriginalPathStates

pytestmark = pytest.mark.proves("S-07")
__all__ = ["ground"]

CONFIG = "[core]\n\tbare = false\n"


class LockFileDenials:
    """Denies writing ``data.lock``, and hides nothing."""

    key = "rules"
    has_read_only = True

    def is_hidden(self, path: str, /) -> bool:
        return path.endswith("/.env")

    def is_read_only(self, path: str, /) -> bool:
        return path.endswith("data.lock")


def furnish(workspace: Path) -> None:
    for name in (".git/objects", ".git/refs", ".git/hooks", ".vscode"):
        (workspace / name).mkdir(parents=True)
    (workspace / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    (workspace / ".git" / "config").write_text(CONFIG)
    (workspace / ".vscode" / "tasks.json").write_text("theirs")
    for name in (".envrc", "handrail.toml", ".mcp.json", "data.lock", ".env"):
        (workspace / name).write_text("theirs")


def by_rename(workspace: Path, name: str, text: str) -> None:
    """Replace a file as git and editors do."""
    (workspace / "outside.tmp").write_text(text)
    (workspace / "outside.tmp").rename(workspace / name)


async def while_it_runs(ground: GuardFixture, script: str, outside: Callable[[], None]) -> ToolError | None:
    """Start a program, act outside, let it continue with ``script``, and return its error."""
    profile = dataclasses.replace(ground.profile, denials=LockFileDenials())
    program = ProgramSpec(["/bin/bash", "-c", f"echo up; read go; {script}; exit 0"])
    process = await ground.sandbox.start(ground.capabilities, profile, program)
    try:
        assert await process.read_line(100) == b"up\n"
        outside()
        await process.write(b"go\n")
        await process.close_stdin()
        await process.wait()
    except ToolError as error:
        return error
    finally:
        await process.kill()
    assert isinstance(process, GuardedProcess)
    return process.violation


def quarantined(ground: GuardFixture) -> list[str]:
    return [path.read_text() for path in ground.quarantine.rglob("*") if path.is_file()]


@pytest.mark.parametrize("name", [".envrc", "handrail.toml", ".mcp.json", "data.lock"])
@pytest.mark.parametrize(
    "script",
    [
        "echo evil > {}",
        "echo evil > tmp.x && mv -f tmp.x {}",
        "rm -f {}",
        "rm -f {}; mkdir {}; echo evil > {}/x",
        "rm -f {}; ln -s evil {}",
        "rm -f {}; mkfifo {}",
    ],
)
async def test_a_protected_file_that_another_process_replaced_during_a_call_is_restored(
    ground: GuardFixture, name: str, script: str
) -> None:
    furnish(ground.workspace)
    error = await while_it_runs(
        ground, script.replace("{}", name), lambda: by_rename(ground.workspace, name, "a person's")
    )
    assert error is not None
    there = ground.workspace / name
    assert there.is_file() and not there.is_symlink() and there.read_text() == "theirs"
    if isinstance(error, ProtectedPathViolation):
        assert name in error.text and "restored" in error.text


async def test_a_users_rename_over_a_mounted_file_is_kept_in_the_quarantine(ground: GuardFixture) -> None:
    furnish(ground.workspace)
    error = await while_it_runs(ground, "true", lambda: by_rename(ground.workspace, ".envrc", "a person's"))
    assert error is not None
    assert (ground.workspace / ".envrc").read_text() == "theirs" and quarantined(ground) == ["a person's"]


async def test_a_users_write_into_a_mounted_file_is_kept(ground: GuardFixture) -> None:
    furnish(ground.workspace)

    def outside() -> None:
        (ground.workspace / ".envrc").write_text("edited")

    error = await while_it_runs(ground, "true", outside)
    assert error is None and (ground.workspace / ".envrc").read_text() == "edited"


async def test_a_users_change_in_a_pinned_folder_is_kept(ground: GuardFixture) -> None:
    furnish(ground.workspace)
    error = await while_it_runs(
        ground, "echo evil > .vscode/tasks.json", lambda: by_rename(ground.workspace, ".vscode/tasks.json", "edited")
    )
    assert error is None and (ground.workspace / ".vscode" / "tasks.json").read_text() == "edited"


async def test_a_protected_folder_that_another_process_replaced_is_moved_away(ground: GuardFixture) -> None:
    furnish(ground.workspace)

    def outside() -> None:
        (ground.workspace / ".vscode" / "tasks.json").unlink()
        (ground.workspace / ".vscode").rmdir()
        (ground.workspace / ".vscode").mkdir()

    error = await while_it_runs(ground, "echo evil > .vscode/tasks.json", outside)
    assert error is not None
    assert not (ground.workspace / ".vscode" / "tasks.json").exists()


@pytest.mark.parametrize("key", ["core.fsmonitor", "alias.st", "core.sshCommand"])
async def test_git_configuration_that_a_program_could_write_is_restored(ground: GuardFixture, key: str) -> None:
    furnish(ground.workspace)
    config = ground.workspace / ".git" / "config"
    error = await while_it_runs(
        ground,
        f"git config {key} '!evil'",
        lambda: subprocess.run(["git", "config", "--file", str(config), "user.name", "A"], check=True) and None,
    )
    assert error is not None
    assert config.read_text() == CONFIG or "evil" not in config.read_text()


async def test_harmless_git_configuration_that_the_user_set_during_a_call_stays(ground: GuardFixture) -> None:
    furnish(ground.workspace)
    config = ground.workspace / ".git" / "config"
    for value in ("A", "B", "C"):  # file numbers are given again after two
        await while_it_runs(
            ground,
            "true",
            lambda value=value: (
                subprocess.run(["git", "config", "--file", str(config), "user.name", value], check=True) and None
            ),
        )
        assert f"name = {value}" in config.read_text()


async def test_protected_paths_in_a_folder_that_the_user_renames_during_a_call_stay_unchanged(
    ground: GuardFixture,
) -> None:
    for name in ("sub/.vscode/tasks.json", "sub/.envrc", "sub/.git/config", "sub/.git/HEAD", "sub/.git/objects/x"):
        (ground.workspace / name).parent.mkdir(parents=True, exist_ok=True)
        (ground.workspace / name).write_text("theirs")
    (ground.workspace / "sub" / ".git" / "refs").mkdir()
    script = (
        "echo evil > new/.envrc; echo evil > new/.vscode/tasks.json; echo evil >> new/.git/config; echo evil > new/.mcp.json;"
        "mkdir -p sub/.vscode; echo evil > sub/.envrc"
    )
    error = await while_it_runs(
        ground, script, lambda: (ground.workspace / "sub").rename(ground.workspace / "new") and None
    )
    assert error is not None and "new/.envrc" not in error.text
    for name in (".vscode/tasks.json", ".envrc", ".git/config"):
        assert (ground.workspace / "new" / name).read_text() == "theirs"
    assert not (ground.workspace / "new" / ".mcp.json").exists() and not (ground.workspace / "sub" / ".vscode").exists()


async def test_a_protected_file_that_a_killed_program_wrote_is_restored(ground: GuardFixture) -> None:
    furnish(ground.workspace)
    script = "echo up; read go; echo evil > .envrc; echo done; sleep 300"
    process = await ground.sandbox.start(ground.capabilities, ground.profile, ProgramSpec(["/bin/bash", "-c", script]))
    assert isinstance(process, GuardedProcess)
    assert await process.read_line(100) == b"up\n"
    by_rename(ground.workspace, ".envrc", "a person's")
    await process.write(b"go\n")
    await process.read_line(100)
    await process.kill()
    assert (ground.workspace / ".envrc").read_text() == "theirs"
    assert process.violation is not None and ".envrc" in process.violation.text


async def test_a_protected_file_that_a_persistent_process_wrote_is_restored_after_its_call(
    ground: GuardFixture,
) -> None:
    furnish(ground.workspace)
    script = "while read go; do echo evil > .envrc; echo done; done"
    process = await ground.sandbox.start(ground.capabilities, ground.profile, ProgramSpec(["/bin/bash", "-c", script]))
    assert isinstance(process, GuardedProcess)
    try:
        await process.begin_call()
        by_rename(ground.workspace, ".envrc", "a person's")
        await process.write(b"go\n")
        await process.read_line(100)
        with pytest.raises(ProtectedPathViolation, match=r"\.envrc was restored"):
            await process.end_call()
        assert (ground.workspace / ".envrc").read_text() == "theirs"
    finally:
        await process.kill()


async def test_a_protected_file_is_not_written_through_a_hard_link(ground: GuardFixture) -> None:
    furnish(ground.workspace)
    os.link(ground.workspace / ".git" / "config", ground.workspace / "alias")
    os.link(ground.workspace / ".vscode" / "tasks.json", ground.workspace / ".vscode" / "again")
    os.link(ground.workspace / ".vscode" / "tasks.json", ground.workspace / "tasks")
    os.link(ground.workspace / "data.lock", ground.workspace / "lock")
    script = "for f in alias tasks lock; do echo evil >> $f; chmod 777 $f; truncate -s 0 $f; done; true"
    await while_it_runs(ground, script, lambda: None)
    assert (ground.workspace / ".git" / "config").read_text() == CONFIG
    assert (ground.workspace / ".vscode" / "tasks.json").read_text() == "theirs"
    assert (ground.workspace / "data.lock").read_text() == "theirs"


def test_a_new_file_with_a_reused_inode_number_is_detected_as_replaced(tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_text("one")
    originals = OriginalPathStates(str(tmp_path))
    original = originals.remember(str(path))
    assert original is not None and original.snapshot is not None and original.snapshot.data == b"one"
    seen = os.stat(path).st_ino
    for number in range(50):
        path.unlink()
        path.write_text(f"evil {number}")
        assert originals.classify_file_change(str(path), original) == "replaced"
        if os.stat(path).st_ino == seen:
            break


def test_a_change_within_the_same_clock_tick_is_detected(tmp_path: Path) -> None:
    path = tmp_path / "config"
    originals = OriginalPathStates(str(tmp_path))
    for number in range(50):
        path.write_text(f"{number:02}")
        original = originals.remember(str(path))
        assert (
            original is not None and original.snapshot is not None and original.snapshot.data == f"{number:02}".encode()
        )
        path.write_text("ev")
        assert originals.classify_file_change(str(path), original) != "same"


# ── our own tools ────────────────────────────────────────────────────────────────────────────────


def files_of(ground: GuardFixture) -> RootedFiles:
    return RootedFiles(SessionRoots(ground.workspace), SeenFileHashes(), lambda capability, target: None)


async def test_a_write_waits_for_the_program_whose_sandbox_mounts_the_file(ground: GuardFixture) -> None:
    furnish(ground.workspace)
    profile = dataclasses.replace(ground.profile, denials=LockFileDenials(), tool="bash", call="job_1")
    process = await ground.sandbox.start(
        ground.capabilities, profile, ProgramSpec(["/bin/bash", "-c", "echo up; read go; cat .env data.lock"])
    )
    assert await process.read_line(100) == b"up\n"
    files = files_of(ground)
    writing = [asyncio.ensure_future(files.write(name, b"new", expected=b"theirs")) for name in (".env", "data.lock")]
    other = await files.write("other", b"new", expected="new")
    assert other.created and not any(one.done() for one in writing)
    assert (await files.read_bytes("data.lock")).data == b"theirs"
    await process.write(b"go\n")
    assert await process.read_line(100) == b"theirs"
    await process.wait()
    await asyncio.gather(*writing)
    assert (ground.workspace / ".env").read_text() == "new" == (ground.workspace / "data.lock").read_text()


async def test_a_write_that_would_wait_too_long_gets_a_conflict_that_names_the_job(
    ground: GuardFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_programs, "WAIT_S", 0.01)
    furnish(ground.workspace)
    profile = dataclasses.replace(ground.profile, denials=LockFileDenials(), tool="bash", call="job_1")
    process = await ground.sandbox.start(ground.capabilities, profile, ProgramSpec(["/bin/bash", "-c", "read go"]))
    with pytest.raises(ToolError, match=r"bash.*job_1") as caught:
        await files_of(ground).write("data.lock", b"new", expected=b"theirs")
    assert caught.value.kind == "conflict" and (ground.workspace / "data.lock").read_text() == "theirs"
    await process.kill()
    await files_of(ground).write("data.lock", b"new", expected=b"theirs")


async def test_a_git_tool_cannot_change_configuration_that_a_running_sandbox_mounts(ground: GuardFixture) -> None:
    furnish(ground.workspace)
    profile = dataclasses.replace(ground.profile, tool="bash", call="job_1")
    process = await ground.sandbox.start(
        ground.capabilities,
        profile,
        ProgramSpec(["/bin/bash", "-c", "echo up; read go; echo evil >> .git/config; true"]),
    )
    assert await process.read_line(100) == b"up\n"
    ground.vcs = True
    done = await ground.shell().run("git config user.name One")
    assert done.exit_code != 0 and any("job_1" in note for note in done.notes), done
    assert (ground.workspace / ".git" / "config").read_text() == CONFIG
    await process.write(b"go\n")
    await process.wait()
    assert (ground.workspace / ".git" / "config").read_text() == CONFIG
    await process.kill()
    assert (await ground.run("git config user.name One"))[0] == 0


async def up(ground: GuardFixture, script: str, *, vcs: bool = False, **names: Any) -> GuardedProcess:
    """A program that has started and says so."""
    ground.vcs = vcs
    profile = dataclasses.replace(ground.profile, **names)
    process = await ground.sandbox.start(ground.capabilities, profile, ProgramSpec(["/bin/bash", "-c", script]))
    assert await process.read_line(100) == b"up\n"
    assert isinstance(process, GuardedProcess)
    return process


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("true", "git config user.name One"),
        ("git init -q new", "git -C new config user.name One"),
        ("git init -q new", "rm -rf new"),
    ],
)
async def test_a_program_waits_for_a_git_tool_that_may_replace_its_mounted_files(
    ground: GuardFixture, before: str, after: str
) -> None:
    furnish(ground.workspace)
    git = await up(ground, f"{before}; echo up; read go; {after}", vcs=True, tool="git.clone", call="job_1")
    starting = asyncio.ensure_future(up(ground, "echo up; read go; cat .git/config", tool="bash", call="call-2"))
    reading = dataclasses.replace(ground.profile, workspace_writable=False)
    other = await ground.sandbox.start(ground.capabilities, reading, ProgramSpec(["/bin/true"]))
    assert await other.wait() == 0 and not starting.done()
    await git.write(b"go\n")
    assert await git.wait() == 0
    program = await starting
    await program.write(b"go\n")
    assert await program.read_line(100) == b"[core]\n"
    assert await program.wait() == 0


async def test_a_program_that_would_wait_too_long_gets_a_conflict_naming_the_git_tool(
    ground: GuardFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_programs, "WAIT_S", 0.01)
    furnish(ground.workspace)
    git = await up(ground, "echo up; read go", vcs=True, tool="git.push", call="job_1")
    with pytest.raises(ToolError, match=r"git\.push \(job_1\).*\.git/config.*call again") as caught:
        await up(ground, "echo up", tool="bash", call="call-2")
    assert caught.value.kind == "conflict"
    await git.kill()
    await (await up(ground, "echo up", tool="bash", call="call-2")).wait()


async def test_a_program_does_not_wait_for_a_git_tool_that_cannot_change_configuration(
    ground: GuardFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_programs, "WAIT_S", 0.01)
    furnish(ground.workspace)
    earlier = await up(ground, "echo up; read go; cat .git/config", tool="bash", call="call-1")
    git = await up(ground, "echo up; read go", vcs=True, tool="git.push", call="call-2")
    assert await (await up(ground, "echo up", tool="bash", call="call-3")).wait() == 0
    await git.kill()
    await earlier.kill()


async def test_a_program_that_would_wait_too_long_for_a_write_gets_a_conflict(
    ground: GuardFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_programs, "WAIT_S", 0.01)
    furnish(ground.workspace)
    config = str(ground.workspace / ".git" / "config")
    async with running_programs.running_programs.reserve_file_replacement(config, ".git/config"):
        with pytest.raises(ToolError, match=r"a file tool.*\.git/config") as caught:
            await up(ground, "echo up", tool="bash", call="call-2")
    assert caught.value.kind == "conflict"
    await (await up(ground, "echo up", tool="bash", call="call-2")).wait()


@pytest.mark.parametrize("names", [{"call": "job_1"}, {"call": "call-2", "callers": ("call-2", "job_1")}])
async def test_a_program_does_not_wait_for_a_git_tool_that_waits_for_it(
    ground: GuardFixture, monkeypatch: pytest.MonkeyPatch, names: dict[str, Any]
) -> None:
    monkeypatch.setattr(running_programs, "WAIT_S", 0.01)
    furnish(ground.workspace)
    git = await up(ground, "echo up; read go", vcs=True, tool="repository.clone", call="job_1")
    assert await (await up(ground, "echo up", tool="bash", **names)).wait() == 0
    await git.write(b"go\n")
    assert await git.wait() == 0


async def test_programs_wait_for_a_persistent_git_process_only_during_its_calls(
    ground: GuardFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_programs, "WAIT_S", 0.01)
    furnish(ground.workspace)
    stays = await up(ground, "echo up; read go", vcs=True, tool="repositories")
    await (await up(ground, "echo up", tool="bash", call="call-2")).wait()
    for number in range(2):
        await stays.begin_call(f"call-{number}")
        with pytest.raises(ToolError, match=rf"repositories \(call-{number}\)"):
            await up(ground, "echo up", tool="bash", call="call-9")
        await (await up(ground, "echo up", tool="bash", call="call-9", callers=(f"call-{number}",))).wait()
        await stays.end_call()
        await (await up(ground, "echo up", tool="bash", call="call-9")).wait()
    await stays.kill()


async def test_a_git_tool_detects_the_mounts_of_a_program_that_started_during_its_check(
    ground: GuardFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program starts after the git tool has checked, and before it is registered as running."""
    furnish(ground.workspace)
    programs: list[GuardedProcess] = []
    hold = running_programs.running_programs.register

    async def slow(*args: Any, **how: Any) -> bool:
        if how["changeable"] is not None and not programs:
            programs.append(await up(dataclasses.replace(ground), "echo up; read go", tool="bash", call="job_1"))
        return await hold(*args, **how)

    monkeypatch.setattr(running_programs.running_programs, "register", slow)
    ground.vcs = True
    done = await ground.shell().run("git config user.name One")
    assert done.exit_code != 0 and any("job_1" in note for note in done.notes), done
    await programs[0].write(b"go\n")
    assert await programs[0].wait() == 0
