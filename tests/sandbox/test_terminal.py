"""A program with a controlling terminal, of which only the holder has the other end."""

from __future__ import annotations

import asyncio
import secrets
from typing import cast

import pytest
from tests.sandbox.conftest import SandboxFolders
from tests.sandbox.test_launcher import LAUNCHERS
from tests.sandbox.test_processes import survivors

from handrail.contract.errors import ToolError
from handrail.contract.sandbox_protocol import ProgramSpec, SandboxTier, TerminalProcess, TerminalSize
from handrail.sandbox.bubblewrap import BubblewrapSandbox
from handrail.sandbox.configured_sandbox import UnconfinedSandbox
from handrail.sandbox.start.launcher_messages import LauncherProgram
from handrail.sandbox.start.spawn import find_bubblewrap_programs


async def started(ground: SandboxFolders, *argv: str) -> TerminalProcess:
    program = ProgramSpec(argv, terminal=TerminalSize(100, 30))
    return cast("TerminalProcess", await ground.sandbox.start(ground.capabilities, ground.profile(), program))


async def until(process: TerminalProcess, mark: bytes) -> bytes:
    """Return its output up to ``write_marker_file``."""
    shown = b""
    while mark not in shown:
        piece = await process.read(1 << 16)
        assert piece, shown
        shown += piece
    return shown


TRIES = """
import fcntl, os
for command, argument in ((0x5412, b"x"), (0x541C, b"\\x03x"), (0x5423, b"\\0\\0\\0\\0")):
    try: fcntl.ioctl(0, command, argument); print("done")
    except OSError as error: print(error.strerror)
print(os.isatty(0), os.get_terminal_size(), os.getsid(0) == os.getpid(), os.tcgetpgrp(0) == os.getpgrp(), flush=True)
print(os.tcgetpgrp(os.open("/dev/tty", os.O_RDWR)) == os.getpgrp(), flush=True)
"""


@pytest.mark.proves("X-11", "S-01")
@pytest.mark.parametrize("first", LAUNCHERS, ids=lambda found: found.name)
async def test_a_program_controls_only_its_own_terminal_and_cannot_inject_input_into_any(
    confined: SandboxFolders, first: LauncherProgram
) -> None:
    (confined.workspace / "tries.py").write_text(TRIES)
    confined.sandbox = BubblewrapSandbox(
        next(find_bubblewrap_programs()), SandboxTier("bubblewrap", "for a test"), first=first
    )
    process = await started(confined, "python3", "tries.py")
    code = await process.wait()
    shown = process.read_rest(10_000).decode()
    assert code == 0, shown
    lines = shown.splitlines()
    assert lines[:3] == ["Operation not permitted"] * 3
    assert lines[3] == "True os.terminal_size(columns=100, lines=30) True True"
    assert lines[4] == "True"
    await process.kill()


async def test_keys_and_a_new_terminal_size_reach_the_foreground_program(ground: SandboxFolders) -> None:
    process = await started(ground, "/bin/sh", "-c", "trap 'stty size' WINCH; echo on; while :; do sleep 0.01; done")
    assert process.is_line_buffered()
    await until(process, b"on\n")
    process.resize(TerminalSize(40, 10))
    assert b"10 40" in await until(process, b"40\n")
    await process.write(b"\x03")
    assert await process.wait() == 130
    process.resize(TerminalSize(1, 1))
    assert process.discard_pending_input() == 0
    await process.kill()


@pytest.mark.proves("S-05")
async def test_a_hangup_ends_a_shell_and_a_program_that_ignores_signals_is_killed(ground: SandboxFolders) -> None:
    heeding = await started(ground, "/bin/bash", "--noprofile", "--norc")
    await until(heeding, b"# " if b"uid=0" in (await _identity(ground)) else b"$ ")
    heeding.hang_up()
    assert await heeding.wait() in (0, 1, 129)
    assert heeding.read_rest(10) == b"" and await heeding.read(10) == b""
    await heeding.write(b"nobody hears it")
    await heeding.kill()
    marker = f"handrail-{secrets.token_hex(8)}"
    deaf = await started(ground, "/bin/bash", "-c", f"trap '' HUP TERM INT; echo on; read -r {marker[:8]} </dev/zero")
    await until(deaf, b"on\n")
    deaf.hang_up()
    await deaf.kill()
    assert survivors(marker) == []


async def _identity(ground: SandboxFolders) -> bytes:
    return (await ground.bash("id")).out.encode()


async def test_discarding_pending_input_counts_the_bytes_that_the_program_did_not_read(ground: SandboxFolders) -> None:
    process = await started(ground, "/bin/sh", "-c", "stty raw -echo; echo on; sleep 1000")
    await until(process, b"on")
    writing = asyncio.create_task(process.write(b"x" * 1_000_000))
    await asyncio.sleep(0)
    assert 0 < process.discard_pending_input() < 1_000_000
    await writing
    await process.kill()


async def test_a_terminal_is_refused_without_a_sandbox(ground: SandboxFolders) -> None:
    with pytest.raises(ToolError, match="terminals open only in a sandbox"):
        await UnconfinedSandbox().start(
            ground.capabilities, ground.profile(tool="t"), ProgramSpec(("true",), terminal=TerminalSize(80, 24))
        )
