"""A sandboxed program cannot change an existing configuration of the workspace."""

from __future__ import annotations

import pytest
from tests.sandbox.conftest import SandboxFolders

from handrail.contract.sandbox_protocol import ProgramSpec
from handrail.contract.tool.requires import CapabilitySet

pytestmark = pytest.mark.proves("P-15", "F-11")
THEIRS = 'rules = ["deny bash"]\n'

WAYS = {
    "write": "echo x > handrail.toml",
    "append": "echo x >> handrail.toml",
    "tee": "echo x | tee handrail.toml",
    "remove": "rm -f handrail.toml",
    "rename": "mv handrail.toml away",
    "replace": "echo x > new && mv -f new handrail.toml",
    "replace by link": "ln -sf new handrail.toml",
    "replace by hard link": "echo x > new && ln -f new handrail.toml",
    "hard link to it": "ln handrail.toml alias && echo x > alias",
    "in place": "sed -i s/deny/allow/ handrail.toml",
    "truncate": "truncate -s 0 handrail.toml",
    "permissions": "chmod 666 handrail.toml && echo x > handrail.toml",
    "copy over": "cp /etc/passwd handrail.toml",
    "the whole folder": 'cd .. && mv "$OLDPWD" elsewhere',
    "through /proc": "echo x > /proc/self/cwd/handrail.toml",
    "mount": "umount handrail.toml || mount -o remount,rw handrail.toml; echo x > handrail.toml",
    "python": "python3 -c \"import os; os.replace('new', 'handrail.toml')\"",
    "git": "git init -q . && echo x > handrail.toml",
}


@pytest.mark.parametrize("way", WAYS)
async def test_a_sandboxed_program_cannot_change_the_configuration_file(confined: SandboxFolders, way: str) -> None:
    file = confined.workspace / "handrail.toml"
    file.write_text(THEIRS)
    number = file.stat().st_ino
    ran = await confined.bash(f"touch new; {WAYS[way]}; echo code $?")
    assert "code 0" not in ran.out, ran.out
    assert (file.read_text(), file.stat().st_ino, file.is_symlink()) == (THEIRS, number, False)
    others = [path for path in confined.workspace.iterdir() if path.name not in ("handrail.toml", "new", ".git")]
    assert others == []


async def test_a_sandboxed_program_reads_the_configuration_file_and_writes_other_files(
    confined: SandboxFolders,
) -> None:
    (confined.workspace / "handrail.toml").write_text(THEIRS)
    (confined.workspace / "src").mkdir()
    ran = await confined.bash("cat handrail.toml && echo x > other && echo y > src/handrail.toml && mv other moved")
    assert ran.out == THEIRS and ran.code == 0
    assert (confined.workspace / "moved").read_text() == "x\n"


async def test_a_tool_that_declares_the_configuration_file_cannot_write_it(confined: SandboxFolders) -> None:
    file = confined.workspace / "handrail.toml"
    file.write_text(THEIRS)
    layer = confined.layer(str(file), read=(str(confined.workspace),))
    process = await confined.sandbox.start(
        CapabilitySet((layer,)), confined.profile(), ProgramSpec(["/bin/bash", "-c", "echo x > handrail.toml"])
    )
    try:
        await process.communicate(b"", 1000)
        assert await process.wait() != 0
    finally:
        await process.kill()
    assert file.read_text() == THEIRS


async def test_the_configuration_file_of_another_writable_folder_stays_unchanged(confined: SandboxFolders) -> None:
    file = confined.outside / "handrail.toml"
    file.write_text(THEIRS)
    folders = (str(confined.workspace), str(confined.outside))
    profile = confined.profile(writable=(str(confined.outside),))
    script = f"cd {confined.outside} && echo x > fine; echo x > handrail.toml; rm -f handrail.toml; true"
    process = await confined.sandbox.start(
        CapabilitySet((confined.layer(*folders),)), profile, ProgramSpec(["/bin/bash", "-c", script])
    )
    try:
        await process.communicate(b"", 1000)
        await process.wait()
    finally:
        await process.kill()
    assert file.read_text() == THEIRS and (confined.outside / "fine").exists()
