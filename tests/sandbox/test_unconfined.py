"""Programs that the operator exempts from the sandbox, and how visible that is. All are harmless."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from pathlib import Path

import pytest
from tests.sandbox.conftest import SandboxFolders
from tests.sandbox.test_processes import traces

from handrail.contract.errors import ToolError
from handrail.contract.sandbox_protocol import ProgramSpec, SandboxLimits
from handrail.sandbox.configured_sandbox import ConfiguredSandbox, UnconfinedSandbox


@pytest.fixture
def free(ground: SandboxFolders) -> SandboxFolders:
    ground.sandbox = UnconfinedSandbox()
    return ground


async def test_an_unconfined_program_gets_input_and_returns_output_like_any_other(free: SandboxFolders) -> None:
    ran = await free.bash("cat; pwd; echo wrong >&2; exit 3", stdin=b"given\n")
    assert (ran.code, ran.out, ran.errors) == (3, f"given\n{free.workspace}\n", "wrong\n")
    process = await free.start("/bin/sh", "-c", "read line; echo got $line; read line")
    await process.write(b"this\n")
    assert await process.read_line(100) == b"got this\n"
    await process.kill()
    assert await process.wait() == -9
    assert (await free.bash("head -c 100000 /dev/zero", max_bytes=10)).dropped == 99_990
    assert (await free.start("/nonexistent/program")).pid > 0


async def test_the_process_group_of_a_program_ends_with_the_program(free: SandboxFolders) -> None:
    held, given = os.pipe()
    process = await free.sandbox.start(
        free.capabilities,
        free.profile(),
        ProgramSpec(("/bin/sh", "-c", "(read -r _ < /dev/zero; sleep 1000) & echo up"), {3: given}),
    )
    os.close(given)
    await process.communicate(b"", 100)
    await process.kill()
    with open(held, "rb") as left:
        assert await asyncio.to_thread(left.read) == b""


async def test_a_program_without_a_pidfd_is_ended_and_leaves_no_descriptors_open(
    free: SandboxFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(pid: int, flags: int = 0) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    held, given = os.pipe()
    before = traces()
    with (
        monkeypatch.context() as patch,
        pytest.raises(ToolError, match=r"was stopped right after its start.*Too many open files"),
    ):
        patch.setattr(os, "pidfd_open", full)
        await free.sandbox.start(free.capabilities, free.profile(), ProgramSpec(("/bin/sleep", "1000"), {3: given}))
    assert traces() == before
    os.close(given)
    with open(held, "rb") as left:
        assert await asyncio.to_thread(left.read) == b""


async def test_a_program_gets_secrets_through_a_descriptor_and_a_reduced_environment(
    free: SandboxFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_TOKEN", "TOP-SECRET")
    ran = await free.bash('eval "cat <&$HANDRAIL_SECRETS_FD"; echo; env', secrets={"A": "value"})
    given, _, environment = ran.out.partition("\n")
    assert json.loads(given) == {"A": "value"}
    assert "TOP-SECRET" not in environment and "value" not in environment


async def test_an_invalid_argument_list_is_refused_with_the_reason(free: SandboxFolders) -> None:
    with pytest.raises(ToolError, match="NUL"):
        await free.start("/bin/echo", "a\0b")
    with pytest.raises(ToolError, match="argv list is empty"):
        await free.start()


async def test_only_the_named_tool_is_unconfined_and_operator_limits_apply_to_the_others(
    ground: SandboxFolders,
) -> None:
    operated = ConfiguredSandbox(ground.sandbox, SandboxLimits(open_files=77), unconfined=("deploy",))
    assert operated.tier.unconfined == {"deploy"} and operated.tier.mechanisms == ground.sandbox.tier.mechanisms
    here = str(Path("/proc/self/ns/net").readlink())
    ground.sandbox = operated
    for tool, confined in (("deploy", False), ("deploy2", True), ("", True)):
        ran = await ground.bash("readlink /proc/self/ns/net; ulimit -n", tool=tool)
        space, files = ran.out.split()
        assert (space != here) is confined
        assert (files == "77") is confined


async def test_a_program_makes_unix_sockets_only_when_the_operator_allows_them(ground: SandboxFolders) -> None:
    script = "python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"made\")'"
    assert (await ground.bash(script)).code == 1
    ground.sandbox = ConfiguredSandbox(ground.sandbox, SandboxLimits(), unix_sockets=True)
    assert (await ground.bash(script)).code == 0


async def test_an_unconfined_script_does_not_use_an_interpreter_of_the_workspace(
    free: SandboxFolders, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """``#!/usr/bin/env NAME`` looks on PATH, where an activated environment of the workspace comes first."""
    (programs := free.workspace / "bin").mkdir()
    (programs / "sh").write_text(f"#!/bin/sh\n: > {tmp_path}/planted\n")
    (programs / "sh").chmod(0o755)
    (tool := tmp_path / "tool").write_text("#!/usr/bin/env sh\necho by the system\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}::{os.environ['PATH']}")
    process = await free.start(str(tool))
    output, _, _ = await process.communicate(b"", 100)
    await process.kill()
    assert (output, (tmp_path / "planted").exists()) == (b"by the system\n", False)


def test_a_program_can_lower_the_limits_of_the_operator_and_not_raise_them() -> None:
    operators = SandboxLimits(memory_bytes=None, call_memory_bytes=6, processes=9)
    wanted = SandboxLimits(memory_bytes=5, call_memory_bytes=8, processes=7, open_files=None, cpu_s=9999)
    limits = operators.restrict_to(wanted)
    assert (limits.memory_bytes, limits.call_memory_bytes, limits.processes) == (5, 6, 7)
    assert (limits.open_files, limits.cpu_s) == (4096, 3600)
    assert SandboxLimits(memory_bytes=None).restrict_to(SandboxLimits()).memory_bytes is None
