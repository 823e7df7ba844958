"""Folders outside the workspace in a sandbox: visible by the tool's capabilities, writable only if declared."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.sandbox.conftest import SandboxFolders

from handrail.contract.sandbox_protocol import ProgramSpec
from handrail.contract.tool.requires import CapabilitySet, PathVariables, Requires, expand_requires

BOTH: Mapping[str, object] = {"fs": {"read": ["{workspace}"], "write": ["{workspace}"]}, "shell": [{"cmd": "*"}]}
SCRIPT = 'cat "$0/a" "$1/a"; (: > "$0/new") 2>/dev/null && echo WROTE; (: > "$1/new") 2>/dev/null && echo wrote'


@pytest.fixture
def further(ground: SandboxFolders) -> tuple[Path, Path]:
    """One folder to read and one to write."""
    made = (ground.workspace.parent / "specs", ground.workspace.parent / "notes")
    for folder in made:
        folder.mkdir()
        (folder / "a").write_text(f"{folder.name}\n")
    return made


async def run(
    ground: SandboxFolders,
    further: tuple[Path, Path],
    requires: Mapping[str, object],
    *,
    workspace_writable: bool = True,
) -> str:
    specs, notes = map(str, further)
    variables = PathVariables((str(ground.workspace), notes), readable=(specs,))
    capabilities = CapabilitySet((expand_requires(Requires.model_validate(requires), variables, "tool"),))
    profile = ground.profile(writable=(notes,), read_only_roots=(specs,), workspace_writable=workspace_writable)
    process = await ground.sandbox.start(capabilities, profile, ProgramSpec(["/bin/bash", "-c", SCRIPT, specs, notes]))
    try:
        out, _, _ = await process.communicate(b"", 1 << 16)
        await process.wait()
        return out.decode()
    finally:
        await process.kill()


async def test_a_readable_root_cannot_be_written_and_a_writable_root_can(
    ground: SandboxFolders, further: tuple[Path, Path]
) -> None:
    assert await run(ground, further, BOTH) == "specs\nnotes\nwrote\n"
    assert (further[1] / "new").exists()
    assert not (further[0] / "new").exists()


async def test_a_tool_that_requires_no_files_sees_no_further_root(
    ground: SandboxFolders, further: tuple[Path, Path]
) -> None:
    assert await run(ground, further, {"shell": [{"cmd": "*"}]}) == ""


async def test_a_tool_that_only_reads_cannot_write_in_a_further_root(
    ground: SandboxFolders, further: tuple[Path, Path]
) -> None:
    assert await run(ground, further, BOTH, workspace_writable=False) == "specs\nnotes\n"
    assert not (further[1] / "new").exists()


async def test_a_workspace_in_a_readable_root_stays_writable_and_its_neighbours_do_not(ground: SandboxFolders) -> None:
    above = str(ground.workspace.parent)
    requires = Requires.model_validate(BOTH)
    capabilities = CapabilitySet(
        (expand_requires(requires, PathVariables((str(ground.workspace),), readable=(above,)), "tool"),)
    )
    script = f": > here && echo wrote; (: > {above}/there) 2>/dev/null && echo WROTE; ls {above}"
    process = await ground.sandbox.start(
        capabilities, ground.profile(read_only_roots=(above,)), ProgramSpec(["/bin/bash", "-c", script])
    )
    try:
        out, _, _ = await process.communicate(b"", 1 << 16)
        await process.wait()
    finally:
        await process.kill()
    assert out.decode().split() == ["wrote", "scratch", "ws", "ws_other"]
    assert (ground.workspace / "here").exists()
