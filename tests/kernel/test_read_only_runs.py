"""Commands proved read-only run in parallel without write access; plain commands run without a shell."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from handrail import open_kernel
from handrail.contract.session_protocols import Session
from handrail.sandbox import tier_probe

pytestmark = pytest.mark.skipif(
    not tier_probe.probe_tier().is_confining, reason="programs cannot be confined on this machine"
)


@pytest.fixture
async def session(tmp_path: Path) -> AsyncIterator[Session]:
    (tmp_path / "ws").mkdir()
    async with open_kernel(
        tmp_path / "ws", state=tmp_path / "state", config=_nothing(tmp_path), rules=["allow bash", "allow fs.write **"]
    ) as kernel:
        yield await kernel.session()


def _nothing(folder: Path) -> Path:
    file = folder / "handrail.toml"
    file.write_text("")
    return file


async def bash(session: Session, command: str) -> tuple[int, str, bool]:
    result = await session.call("bash", {"command": command})
    assert result.ok, result.error_text
    return result.data["exit_code"], result.data["output"], result.metadata.get("read_only", False)


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True)


@pytest.mark.proves("P-06")
async def test_a_command_without_shell_syntax_runs_without_a_shell(session: Session) -> None:
    code, output, _ = await bash(session, "printenv SHLVL")
    assert (code, output) == (1, ""), "a shell counts itself in SHLVL"
    code, _, _ = await bash(session, "printenv SHLVL && true")
    assert code == 0


@pytest.mark.proves("P-06")
async def test_a_read_only_command_receives_its_arguments_as_they_were_judged(session: Session) -> None:
    name = "a b\\c'd\"e$f"
    Path(session.workdir, name).write_text("held\n")
    assert (await bash(session, 'cat "a b\\\\c\'d\\"e\\$f"'))[:2] == (0, "held\n")
    assert (await bash(session, "ls '*'"))[0] == 2


@pytest.mark.proves("P-06")
async def test_failed_commands_return_the_exit_codes_of_a_shell(session: Session) -> None:
    Path(session.workdir, "plain").write_text("")
    missing = await bash(session, "no-such-program-here")
    assert missing[0] == 127
    assert "not found" in missing[1]
    assert (await bash(session, "./plain"))[0] == 126
    assert (await bash(session, "no-such-program-here; exit 3"))[0] == 3


@pytest.mark.proves("P-06")
@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("type cd", "cd is a shell builtin\n"),
        ("cd /usr && pwd", "/usr\n"),
        ("echo -n x", "x"),
        ("true", ""),
    ],
)
async def test_commands_that_need_a_shell_run_in_a_shell(session: Session, command: str, expected: str) -> None:
    assert (await bash(session, command))[:2] == (0, expected)


@pytest.mark.proves("S-09")
async def test_two_read_only_calls_run_at_the_same_time(session: Session) -> None:
    """Each reads from a pipe that gets a writer only once both have it open."""
    loop = asyncio.get_running_loop()
    pipes = [Path(session.workdir, name) for name in ("one", "two")]
    for pipe in pipes:
        os.mkfifo(pipe)
    calls = asyncio.gather(*(bash(session, f"cat {pipe.name}") for pipe in pipes))
    # Opening for writing waits for a reader; both are there before either is let go.
    writers = await asyncio.gather(*(loop.run_in_executor(None, os.open, pipe, os.O_WRONLY) for pipe in pipes))
    for number, writer in enumerate(writers):
        os.write(writer, f"{number}\n".encode())
        os.close(writer)
    assert await calls == [(0, "0\n", True), (0, "1\n", True)]


@pytest.mark.proves("S-09")
async def test_programs_started_by_a_read_only_command_cannot_write(session: Session) -> None:
    """git runs programs from its configuration, which no table can know: the sandbox restricts it."""
    workspace = Path(session.workdir)
    git(workspace, "init", "-q")
    hook = workspace / "watch"
    hook.write_text("#!/bin/sh\necho was here > made || echo refused >&2\n")
    hook.chmod(0o755)
    git(workspace, "config", "diff.x.textconv", "./watch")
    (workspace / ".gitattributes").write_text("*.bin diff=x\n")
    (workspace / "a.bin").write_text("1\n")
    git(workspace, "add", ".")
    (workspace / "a.bin").write_text("2\n")
    _, output, read_only = await bash(session, "git diff a.bin")
    assert read_only
    assert "Read-only file system" in output or "refused" in output
    assert not (workspace / "made").exists()
    _, _, read_only = await bash(session, "git diff a.bin; touch other")
    assert not read_only
    assert (workspace / "other").exists()
    assert (workspace / "made").exists(), "the same program writes where the call is not proved to only read"


@pytest.mark.proves("S-09")
async def test_a_command_not_proved_read_only_runs_normally_and_is_not_marked(session: Session) -> None:
    code, _, read_only = await bash(session, "touch made")
    assert (code, read_only) == (0, False)
    assert Path(session.workdir, "made").exists()


@pytest.mark.proves("S-09")
async def test_a_read_only_call_waits_for_a_writing_call(session: Session) -> None:
    pipe = Path(session.workdir, "pipe")
    os.mkfifo(pipe)
    writing = asyncio.ensure_future(bash(session, "touch begun; cat pipe; touch ended"))
    writer = await asyncio.get_running_loop().run_in_executor(None, os.open, pipe, os.O_WRONLY)
    reading = asyncio.ensure_future(bash(session, "ls"))
    os.close(writer)
    code, output, read_only = await reading
    assert (code, read_only) == (0, True)
    assert "ended" in output
    await writing
