"""One check of a sandbox provider, and the ground that it is tried on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from handrail.contract.sandbox import Profile, Program, Sandbox
from handrail.contract.tool.requires import CapabilitySet, Layer, ShellRequires

_ANY_PROGRAM = ShellRequires(cmd="*")


class NotTried(Exception):
    """A check cannot be made here; the text says why."""


@dataclass(frozen=True, slots=True)
class Ran:
    """How a program in the sandbox ended and what it said."""

    code: int
    out: str
    errors: str
    dropped: int

    @property
    def said(self) -> str:
        """For a report: its last words."""
        words = (self.errors or self.out).strip().split("\n")
        return f"exit code {self.code}{': ' if words[-1] else ''}{words[-1][:120]}"


@dataclass(frozen=True, slots=True)
class Ground:
    """Where checks are made: folders of their own, and what lies outside of the sandbox to be reached for.

    :param secret: what stands in ``outside / "secret"`` and in :data:`_VARIABLE` of this process
    :param port: of a server on this machine's loopback
    :param connections: how often it was reached, or the server at ``workspace / "server"``
    """

    sandbox: Sandbox
    workspace: Path
    scratch: Path
    outside: Path
    secret: str
    port: int
    connections: list[str]

    def capabilities(self, *, write: bool = True) -> CapabilitySet:
        folder = str(self.workspace)
        return CapabilitySet((Layer("self-check", (folder,), (folder,) if write else (), (), (_ANY_PROGRAM,)),))

    def profile(self, **changes: Any) -> Profile:
        return replace(Profile(str(self.workspace), str(self.scratch)), **changes)

    async def was_reached(self, name: Literal["tcp", "unix"]) -> bool:
        """Whether a program has reached the server: a connection of our own is taken in after all before it."""
        if name == "tcp":
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        else:
            here = os.open(self.workspace, os.O_RDONLY | os.O_DIRECTORY)
            try:
                reader, writer = await asyncio.open_unix_connection(f"/proc/self/fd/{here}/server")
            finally:
                os.close(here)
        await reader.read()
        writer.close()
        self.connections.remove(name)
        return name in self.connections

    async def bash(self, script: str, *, write: bool = True, max_bytes: int = 1 << 20, **profile: Any) -> Ran:
        """Run a script and wait until nothing is left of it."""
        return await self.run(("/bin/bash", "-c", script), write=write, max_bytes=max_bytes, **profile)

    async def run(self, argv: Sequence[str], *, write: bool = True, max_bytes: int = 1 << 20, **profile: Any) -> Ran:
        process = await self.sandbox.start(self.capabilities(write=write), self.profile(**profile), Program(argv))
        try:
            out, errors, dropped = await process.communicate(b"", max_bytes)
            code = await process.wait()
        finally:
            await process.kill()
        return Ran(code, out.decode("utf-8", "replace"), errors.decode("utf-8", "replace"), dropped)

    def left(self, mark: str) -> list[int]:
        """The processes of this machine that have ``mark`` among their arguments, which are ended now."""
        found: list[int] = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if mark.encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
                        os.kill(found[-1], signal.SIGKILL)
        return found


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that a sandbox has to do.

    :param run: gives None where it is held, else what was reached
    """

    group: str
    name: str
    run: Callable[[Ground], Awaitable[str | None]]


@contextlib.contextmanager
def standing_by(mark: str) -> Generator[int, None, None]:
    """A process of this machine with ``mark`` in its arguments."""
    waiting = subprocess.Popen(["/bin/sh", "-c", "read -r _", mark], stdin=subprocess.PIPE, env={})
    try:
        yield waiting.pid
    finally:
        waiting.kill()
        waiting.communicate()
