"""Fixtures: a workspace, a scratch folder, and programs in the real sandbox of this machine."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from handrail.contract.sandbox_protocol import Process, ProgramSpec, Sandbox, SandboxProfile
from handrail.contract.tool.requires import CapabilityLayer, CapabilitySet, ShellRequires
from handrail.sandbox import tier_probe


@dataclass
class SandboxFolders:
    """Folders of one test, all beneath a temporary one."""

    workspace: Path
    scratch: Path
    outside: Path
    sandbox: Sandbox

    @property
    def capabilities(self) -> CapabilitySet:
        return CapabilitySet((self.layer(str(self.workspace)),))

    def layer(self, *folders: str, read: Sequence[str] = ()) -> CapabilityLayer:
        return CapabilityLayer("test", (*folders, *read), folders, (), (ShellRequires.model_validate({"cmd": "*"}),))

    def profile(self, **changes: object) -> SandboxProfile:
        values: dict[str, object] = {"workspace": str(self.workspace), "scratch": str(self.scratch), **changes}
        return SandboxProfile(**values)  # pyright: ignore[reportArgumentType]

    async def start(self, *argv: str, **changes: object) -> Process:
        return await self.sandbox.start(self.capabilities, self.profile(**changes), ProgramSpec(argv))

    async def bash(
        self, script: str, *, stdin: bytes = b"", max_bytes: int = 1 << 20, **changes: object
    ) -> CompletedRun:
        process = await self.start("/bin/bash", "--noprofile", "--norc", "-c", script, **changes)
        try:
            out, errors, dropped = await process.communicate(stdin, max_bytes)
            return CompletedRun(await process.wait(), out.decode(), errors.decode(), dropped)
        finally:
            await process.kill()


@dataclass
class CompletedRun:
    code: int
    out: str
    errors: str
    dropped: int


Run = Callable[..., Awaitable[CompletedRun]]


@pytest.fixture(scope="session")
def sandbox() -> Sandbox:
    chosen = tier_probe.choose_sandbox()
    if not chosen.tier.is_confining:
        pytest.skip(f"this machine cannot confine programs: {chosen.tier.detail}; {chosen.tier.remedy}")
    return chosen


@pytest.fixture
def ground(tmp_path: Path, sandbox: Sandbox) -> SandboxFolders:
    place = tmp_path.resolve()
    for name in ("ws", "scratch", "ws_other"):
        (place / name).mkdir()
    (place / "ws_other" / "key").write_text("TOP-SECRET")
    return SandboxFolders(place / "ws", place / "scratch", place / "ws_other", sandbox)


@pytest.fixture
async def confined(ground: SandboxFolders) -> SandboxFolders:
    """A ground on which attacks may be tried: the namespaces were seen to be the sandbox's own."""
    kinds = ("user", "mnt", "pid", "net", "ipc", "uts")
    ran = await ground.bash("readlink " + " ".join(f"/proc/self/ns/{kind}" for kind in kinds))
    inside = ran.out.split()
    outside = [os.readlink(f"/proc/self/ns/{kind}") for kind in kinds]
    assert len(inside) == len(kinds)
    assert not set(inside) & set(outside), "the sandbox shares a namespace with this machine; no attack is tried"
    return ground
