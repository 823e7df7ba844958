"""The guard moves a file under a protected name away while its program runs, and the call fails at its end."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from tests.runtime.test_guard import GuardFixture, ground

from handrail.contract.sandbox_protocol import ProgramSpec
from handrail.runtime.guard import guarded_sandbox
from handrail.runtime.guard.guarded_sandbox import GuardedProcess, GuardedSandbox, ProtectedPathViolation
from handrail.sandbox import tier_probe

pytestmark = pytest.mark.proves("S-07")
__all__ = ["ground"]


@pytest.fixture(autouse=True)
def seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests look when they mean to."""
    monkeypatch.setattr(guarded_sandbox, "CHECK_INTERVAL_S", 3600.0)


async def started(ground: GuardFixture, script: str) -> GuardedProcess:
    process = await ground.sandbox.start(ground.capabilities, ground.profile, ProgramSpec(["/bin/bash", "-c", script]))
    assert isinstance(process, GuardedProcess)
    return process


async def test_a_running_program_loses_the_protected_paths_that_it_makes(ground: GuardFixture) -> None:
    script = (
        "mkdir -p .vscode a/.git/hooks; echo evil > .vscode/tasks.json; echo evil > a/.git/hooks/post-checkout;"
        "echo evil > a/.git/config; echo 'ref: x' > a/.git/HEAD; echo made; read go; echo fine > fine; exit 3"
    )
    process = await started(ground, script)
    assert await process.read_line(100) == b"made\n"
    await ground.sandbox.quarantine_new_protected_files()
    assert sorted(ground.names()) == ["a"] and not (ground.workspace / "a" / ".git").exists()
    await process.write(b"go\n")
    with pytest.raises(ProtectedPathViolation, match=r"\.vscode was moved to") as caught:
        await process.wait()
    assert caught.value.exit_code == 3 and "a/.git" in caught.value.text
    assert (ground.workspace / "fine").read_text() == "fine\n"
    await process.kill()


async def test_a_protected_file_created_between_calls_is_moved_and_reported_at_the_next_call(
    ground: GuardFixture,
) -> None:
    process = await started(ground, "read a; echo one; read b; echo evil > .envrc; echo two; read c")
    try:
        await process.begin_call()
        await process.write(b"go\n")
        assert await process.read_line(100) == b"one\n"
        await process.end_call()
        await process.write(b"go\n")  # no call
        assert await process.read_line(100) == b"two\n"
        await ground.sandbox.quarantine_new_protected_files()
        assert not (ground.workspace / ".envrc").exists()
        assert any(".envrc" in name for name in await process.begin_call())
        await process.end_call()
        assert await process.begin_call() == ()
    finally:
        await process.kill()


async def test_a_repository_created_meanwhile_by_a_git_tool_is_kept(ground: GuardFixture) -> None:
    job = await started(
        ground, "echo up; read go; echo evil >> new/.git/hooks/x; git -C new config core.fsmonitor x; true"
    )
    assert await job.read_line(100) == b"up\n"
    ground.vcs = True
    making = await started(ground, "git init -q new; echo made; read go; git -C new config user.name One")
    assert await making.read_line(100) == b"made\n"
    await ground.sandbox.quarantine_new_protected_files()
    await making.write(b"go\n")
    assert await making.wait() == 0
    await ground.sandbox.quarantine_new_protected_files()
    config = ground.workspace / "new" / ".git" / "config"
    assert "One" in config.read_text()
    await job.kill()
    assert job.violation is None and "One" in config.read_text()


async def test_another_guard_keeps_a_repository_created_by_a_git_tool(ground: GuardFixture) -> None:
    """Servers behind the gateway have one of their own."""
    other = dataclasses.replace(ground, sandbox=GuardedSandbox(tier_probe.choose_sandbox()), vcs=True)
    server = await started(ground, "read go")
    try:
        making = await started(other, "git init -q new; echo made; read go; git -C new config user.name One")
        assert await making.read_line(100) == b"made\n"
        await ground.sandbox.quarantine_new_protected_files()
        await making.write(b"go\n")
        assert await making.wait() == 0
        await ground.sandbox.quarantine_new_protected_files()
        assert "One" in (ground.workspace / "new" / ".git" / "config").read_text()
        assert await server.begin_call() == ()
        assert await server.begin_call() == ()
    finally:
        await server.kill()
    assert server.violation is None and "One" in (ground.workspace / "new" / ".git" / "config").read_text()


async def test_a_program_cannot_change_a_repository_that_a_git_tool_makes_during_its_run(ground: GuardFixture) -> None:
    job = await started(
        ground, "echo up; read go; git -C new config core.fsmonitor evil; echo evil > new/.git/hooks/update; true"
    )
    assert await job.read_line(100) == b"up\n"
    ground.vcs = True
    assert (await ground.run("git init -q new"))[0] == 0
    await job.write(b"go\n")
    with pytest.raises(ProtectedPathViolation):
        await job.wait()
    await job.kill()
    config = ground.workspace / "new" / ".git" / "config"
    assert not config.exists() or "evil" not in config.read_text()
    assert not (ground.workspace / "new" / ".git" / "hooks" / "update").exists()


async def test_protected_paths_are_checked_repeatedly_while_a_program_runs(
    ground: GuardFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarded_sandbox, "CHECK_INTERVAL_S", 0.001)
    looks: asyncio.Queue[None] = asyncio.Queue()
    look = ground.sandbox.quarantine_new_protected_files

    async def noted() -> float:
        looks.put_nowait(None)
        return await look()

    monkeypatch.setattr(ground.sandbox, "quarantine_new_protected_files", noted)
    process = await started(ground, "echo evil > .envrc; echo made; read go")
    assert await process.read_line(100) == b"made\n"
    for _ in range(looks.qsize() + 2):
        await looks.get()
    assert not (ground.workspace / ".envrc").exists()
    await process.kill()
    assert process.violation is not None


def test_checks_of_protected_paths_use_at_most_a_hundredth_of_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert guarded_sandbox.compute_check_pause_s(0.0) == guarded_sandbox.compute_check_pause_s(0.01) == 1.0
    assert guarded_sandbox.compute_check_pause_s(0.25) == 25.0
